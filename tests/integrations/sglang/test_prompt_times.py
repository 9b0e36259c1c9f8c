"""What a batch of prompts takes by how long they are, and what of it runs while decodes wait."""

import weakref
from bisect import bisect_right
from math import inf
from types import SimpleNamespace

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from kpolicy.costs import Curve
from kpolicy_sglang.phase import PREFILL, PROMPT_TOKENS, Phase
from kpolicy_sglang.prompt_times import PromptTimes, beside_of, length_of, mean_length
from kpolicy_sglang.split import split_of
from kpolicy_sglang.turns import Turns
from kpolicy_sglang.waiting import Waiting
from tests.integrations.sglang.test_turns import Prompts, request, state_with

LONG_US = Curve((2048, 4096, 8192), (8_000.0, 20_000.0, 60_000.0))


def times(beside=0.0):
    """30 ms for a chunk of usual prompts, 60 for one."""
    return PromptTimes(state_with().phases[PREFILL], 8192, LONG_US, beside)


@pytest.mark.parametrize(
    ("new", "before", "beside", "length"),
    [
        ([4096], [0], 0, 4096), ([4096], [0], 1, 4096),
        # Half of the tokens are in a prompt of 4,096: they attend as far, the others to 1,024.
        ([4096, *[1024] * 4], [0] * 5, 0, 2560), ([4096, *[1024] * 4], [0] * 5, 1, 5632),
        ([4096, *[1024] * 4], [0] * 5, 0.5, 4096),
        # What is in KV is attended to by every token, and is as long for all of the longest's blocks.
        ([1000], [3000], 0, 7000), ([1000, 2000], [3000, 0], 0, 11_000 / 3), ([1000, 2000], [3000, 0], 1, 19_000 / 3),
    ],
)  # fmt: skip
def test_how_far_attention_goes(new, before, beside, length):
    """A token's own prompt, or the longest of the batch, as the kernel has it."""
    assert length_of(new, before, beside) == pytest.approx(length)


@given(st.lists(st.integers(1, 8192), min_size=1, max_size=30), st.integers(0, 8192), st.floats(0, 1))
def test_the_longest_bounds_how_far(new, cached, beside):
    """No batch is shorter than its own prompts make it, nor is one longer than all as the longest."""
    before = [cached] + [0] * (len(new) - 1)
    own, all_ = length_of(new, before, 0.0), length_of(new, before, 1.0)
    assert own - 1e-6 <= length_of(new, before, beside) <= all_ + 1e-6
    assert all_ <= 2 * max(new) * (sum(new) + cached) / sum(new)
    if len(new) == 1:
        assert own == all_ == new[0] + 2 * cached
    # Only the first ones need to be told.
    assert length_of(new, [cached], 1.0) == all_


def test_usual_prompts_take_usual_times():
    """Up to the usual length nothing is added, but for tokens in KV."""
    assert times().length([]) == 0
    assert times().length([PROMPT_TOKENS] * 8) == times().length([PROMPT_TOKENS] * 8, [0] * 8) == 0
    assert times(1.0).length([PROMPT_TOKENS // 2] * 8) == 0
    assert times(1.0).length([PROMPT_TOKENS] * 8) == PROMPT_TOKENS
    assert times().length([500], [4000]) == 8500
    assert times(1.0).length([4096, *[1024] * 4]) == 5632


@given(st.floats(0, 1), st.sampled_from([[4096, *[1024] * 4], [3000, 500, 500], [2048, 2048, 100]]))
def test_beside_is_what_such_a_batch_took(beside, new):
    """A time that comes of so much of it says so much."""
    tokens, usual_us, long_us = sum(new), 10_000.0, 30_000.0
    length = length_of(new, [0] * len(new), beside)
    us = usual_us + (long_us - usual_us) * (length - PROMPT_TOKENS) / (tokens - PROMPT_TOKENS)
    assert beside_of(new, us, usual_us, long_us) == pytest.approx(beside, abs=1e-9)


@pytest.mark.parametrize(
    ("new", "us", "long_us", "beside"),
    [
        # Beyond either end, where long prompts take as long as usual ones, and where all are as long.
        ([4096, *[1024] * 4], 5_000.0, 30_000.0, 0), ([4096, *[1024] * 4], 90_000.0, 30_000.0, 1),
        ([4096, *[1024] * 4], 30_000.0, 10_400.0, 0), ([1024] * 8, 30_000.0, 30_000.0, 0),
    ],
)  # fmt: skip
def test_beside_is_a_share(new, us, long_us, beside):
    """Noise makes no batch shorter than its own prompts, nor longer than all as the longest."""
    assert beside_of(new, us, 10_000.0, long_us) == beside


def first(found, new, before, most_us, guess=4000):
    """How many prompts fit, what they take, and what more of them take."""
    count, tokens, us, more_us = found.first(new, before, sum(new), max(new), most_us, guess)
    assert tokens == sum(new[:count])
    return count, us, more_us


@given(
    st.lists(st.integers(1, 4000), min_size=1, max_size=20), st.integers(0, 4000), st.floats(0, 80_000),
    st.floats(0, 1), st.integers(0, 80_000),
)  # fmt: skip
def test_first_prompts_of_a_batch(new, before, most_us, beside, guess):
    """As many as fit into the time and no fewer than one, by the times of whole batches, whatever was guessed."""
    found = times(beside)
    assume(sum(new) <= 8192)
    us = [found.batch_us(new[:count], before) for count in range(1, len(new) + 1)]
    assume(us == sorted(us))
    assume(min(abs(each - most_us) for each in us) > 1e-6)
    fit = max(bisect_right(us, most_us), 1)
    more_us = us[0] if us[0] > most_us else us[fit] if fit < len(us) else 0.0
    assert first(found, new, before, most_us, guess) == pytest.approx((fit, us[fit - 1], more_us))


@pytest.mark.parametrize("beside", [0.0, 1.0])
@pytest.mark.parametrize(("before", "fit"), [(0, 1), (0, 2), (0, 5), (6000, 1), (6000, 2), (6000, 3)])
def test_short_prompts_count_before_a_long_one_too(beside, before, fit):
    """With less time than a usual chunk takes, and with tokens in KV before the first, short ones may not all fit."""
    found, new = times(beside), [400] * 6 + [4000]
    most_us = found.us(400 * fit, length_of(new[:fit], [before] + [0] * (fit - 1), beside))
    more_us = found.us(400 * (fit + 1), length_of(new[: fit + 1], [before] + [0] * fit, beside))
    assert more_us > most_us
    assert first(found, new, before, most_us + 1e-6) == pytest.approx((fit, most_us, more_us))


def test_usual_prompts_beside_shorter_ones_may_not_fit():
    """Where all are as long as the longest, one of 1,000 makes many short ones longer than usual prompts are."""
    found, new = times(1.0), [1000, *[100] * 60, 1000]
    count, kept_us, _ = first(found, new, 0, 31_000.0)
    assert kept_us <= 31_000.0
    assert found.us(1000 + 100 * count, length_of(new[: count + 1], [0] * (count + 1), 1.0)) > 31_000.0
    # Nor those behind one that has many tokens in KV.
    assert first(times(), [1000] * 7 + [1100], 8000, 31_000.0)[0] == 5


@given(st.lists(st.integers(1, 4000), min_size=1, max_size=20), st.integers(0, 4000), st.floats(0, 1))
@example([500, 500, 900], 0, 1.0)
@example([1024, *[100] * 60], 0, 0.8)
def test_a_batch_takes_what_it_takes(new, before, beside):
    """Asked for by its length or as a whole: where no length is worked out it makes no difference."""
    found = times(beside)
    length = found.length(new, [before] + [0] * (len(new) - 1))
    assert found.us(sum(new), length) == pytest.approx(found.batch_us(new, before))


@pytest.mark.parametrize("beside", [0.5, 1.0])
def test_a_first_prompt_is_no_longer_for_the_one_that_does_not_fit(beside):
    """The next one was tried, and isn't of the batch whose time is told."""
    found = times(beside)
    assert first(found, [2000, 4000], 0, 9_000.0)[:2] == (1, found.us(2000, 2000))


@pytest.mark.parametrize("beside", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("us", [33_000.0, 45_000.0, 59_000.0])
def test_the_longest_that_keeps_a_chunk_within(beside, us):
    """A chunk of one prompt as long as that and usual ones fits; where prompts pay for themselves alone it's exact."""
    found = times(beside)
    most = int(found.most_length(us))
    new = [most, *[1024] * ((8192 - most) // 1024)]
    assert found.us(8192, length_of(new, [0] * len(new), beside)) <= us
    assert beside or found.us(8192, most) == pytest.approx(us, rel=1e-3)


@given(st.floats(0, 1), st.floats(20_000, 70_000), st.lists(st.integers(1, 8192), min_size=1, max_size=12))
@example(1.0, 30_500.0, [1024, *[700] * 10])
def test_shorter_prompts_make_no_chunk_too_long(beside, us, new):
    """Whatever is beside it: what is skipped by the longest prompt alone would have fitted."""
    found = times(beside)
    most = found.most_length(us)
    new = [min(each, int(most)) for each in new]
    while sum(new) > 8192:
        new.pop()
    if us >= 30_000:
        assert found.us(sum(new), found.length(new)) <= us + 1e-6
    assert PromptTimes(state_with().phases[PREFILL], 8192, None, beside).most_length(us) == inf


@pytest.mark.parametrize("beside", [0, 1])
def test_a_first_prompt_that_is_cut_takes_what_its_chunk_takes(beside):
    """What it has in KV counts for the tokens of the chunk, not for those of a later one."""
    found = times(beside)
    count, tokens, us, more_us = found.first([20_000, 400], 3000, 20_400, 20_000, 1e9, 4000)
    assert (count, tokens, more_us) == (1, 8192, 0.0)
    assert us == pytest.approx(found.batch_us([8192], 3000))


def test_a_cut_prompt_is_weighed_where_none_of_a_chunk_is_too_long():
    """By what it has in KV it is beyond what keeps a chunk within the time, though no prompt of a chunk is."""
    scheduler = Cut([], decodes=8, beside=0)
    state = scheduler.tp_worker.model_runner._kpolicy_state
    state.long = Curve((2048, 8192), (7_500.0, 39_000.0))
    turns = split_of(scheduler).turns
    assert 8192 <= turns.long < 11_808 + 8192
    assert turns.most(8, 3, [11_808, 400, 400], 8192, 12_608, 11_808) == 8192


def test_usual_prompts_are_never_long():
    """Nothing is weighed for them, nor where batches have a limit of the user's own, or aren't in turns at all."""
    assert split_of(Cut([], decodes=1)).turns.long > PROMPT_TOKENS
    assert split_of(Cut([], decodes=1, gap_ms=20.0)).turns.long == inf
    assert Turns(state_with(turns=False), 8192).long == inf


class Cut(Prompts):
    """As SGLang has it: a prompt that doesn't fit into what is left of the chunk is cut, and goes on in the next."""

    def __init__(self, prompts, *, beside=1.0, **more):
        super().__init__(prompts, **more)
        state = self.tp_worker.model_runner._kpolicy_state
        state.long, state.beside, self.seen = LONG_US, beside, []

    def own(self, _, running):
        self.seen.append(self.chunked_prefill_size)
        left, lens, before = self.chunked_prefill_size, [], []
        while left > 0 and (self.chunked_req is not None or self.waiting_queue):
            each = self.chunked_req or self.waiting_queue.pop(0)
            take = min(left, len(each.origin_input_ids) - each.prefix_len)
            lens, before, left = [*lens, take], [*before, each.prefix_len], left - take
            each.prefix_len += take
            self.chunked_req = each if each.prefix_len < len(each.origin_input_ids) else None
        batch = SimpleNamespace(extend_num_tokens=sum(lens), extend_lens=lens, prefix_lens=before) if lens else None
        return SimpleNamespace(batch_to_run=batch, running_batch=running)


SHORT = [500] * 4


def most_of(turns, decodes, waiting, new, before=0):
    """The most tokens of the next batch of such prompts."""
    return turns.most(decodes, waiting, new, before, sum(new), max(new, default=0))


def looked_most(split, decodes):
    """The most tokens of the next batch of what waits; 0 for a decode step."""
    scheduler = split._scheduler
    return split._most(decodes, scheduler.waiting_queue, scheduler.chunked_req)


@pytest.mark.parametrize(
    ("prompts", "beside", "steps"),
    [
        # Usual prompts and a decode step take 32 ms, a further batch 8: the long one and all others together take 43.
        ([*SHORT, 4000, *SHORT], 1, [6000, 0, 2000, 0]),
        # Where prompts pay for themselves alone nothing is gained apart.
        ([*SHORT, 4000, *SHORT], 0, [8000, 0]),
        # Alone where it comes first: what is behind it goes together.
        ([7000, 600, 500], 1, [7000, 0, 1100, 0]),
        # One prompt is never cut.
        ([8192], 1, [8192, 0]),
        ([1000] * 8, 1, [8000, 0]),
        # Behind a decode step the queue is known, and with it that a prompt of it is long.
        ([1024] * 8 + [*SHORT, 4000, *SHORT], 1, [8192, 0, 6000, 0, 2000, 0]),
        # A burst: in SGLang's order, in SGLang's batches.
        ([8000] * 5, 1, [8192] * 4 + [7232, 0]),
    ],
)
def test_long_prompts_run_apart_from_others(prompts, beside, steps):
    """Where a batch would take longer than decodes wait elsewhere it ends before the prompt that makes it so long."""
    scheduler = Cut(prompts, decodes=300, beside=beside)
    assert scheduler.run(len(steps)) == steps
    assert scheduler.chunked_prefill_size == 8192


@given(
    st.lists(st.sampled_from([1, 100, 500, 513, 900, 2000, 4000, 8192]), min_size=1, max_size=9),
    st.sampled_from([0, 0, 1000, 5000]), st.integers(1, 400), st.integers(0, 60), st.floats(0, 1),
)  # fmt: skip
@example([500, 500, 900], 0, 1, 0, 1.0)
def test_what_a_batch_ends_before_is_weighed_by_whole_batches(new, before, decodes, behind, beside):
    """However little of it is worked out: by what each batch would take, and what decodes and prompts lose."""
    turns = split_of(Cut([], decodes=1, beside=beside)).turns
    kept, left = [], 8192
    for each in new:
        if left:
            kept.append(min(each, left))
            left -= kept[-1]
    us = [turns.times.batch_us(kept[:count], before) for count in range(1, len(kept) + 1)]
    assume(us == sorted(us))
    late_us = turns.decode_us(decodes) + 2 * 4000
    fit = max(bisect_right(us, 30_000 + late_us), 1)
    gained, lost = decodes * (us[-1] - us[fit - 1]), (len(new) + behind - fit) * late_us
    assume(abs(gained - lost) > 1e-3 or fit == len(kept))
    most = sum(kept[:fit]) if fit < len(kept) and gained > lost else 8192
    assert most_of(turns, decodes, len(new) + behind, new, before) == most
    # What ran is as long as it was taken for, weighed or not.
    for ran, in_kv in (kept[:fit], before), (kept, before), (kept[:fit], 0):
        turns.decoded()
        turns.prefilled(sum(ran), ran, [in_kv] + [0] * (len(ran) - 1))
        assert turns.waited_us() == pytest.approx(turns.times.batch_us(ran, in_kv))


@pytest.mark.parametrize(("decodes", "most"), [(1, 8192), (4, 6000), (300, 6000)])
def test_few_decodes_hold_up_no_prompts(decodes, most):
    """What decodes gain by a batch's end is weighed against what those behind it lose."""
    turns = split_of(Cut([], decodes=decodes)).turns
    assert most_of(turns, decodes, 9, [*SHORT, 4000, *SHORT]) == most


def test_the_rest_of_a_prompt_is_as_long_as_all_of_it():
    """Short prompts behind the end of one that has 8,000 tokens in KV wait for it; without these none is long."""
    turns = split_of(Cut([], decodes=300)).turns
    assert most_of(turns, 300, 5, [1600] * 5) == 8192
    assert most_of(turns, 300, 5, [1600] * 5, 8000) < 8000
    # So they do where they have so few tokens that no batch of as many without KV takes too long.
    assert most_of(turns, 4, 3, [1800] * 3) == most_of(turns, 4, 3, [1800] * 3, 2000) == 8192
    assert most_of(turns, 4, 3, [1800] * 3, 20_000) == 3600


@pytest.mark.parametrize("weighed", [0, 1000])
@pytest.mark.parametrize("before", [(0, 0), (1000, 0), (0, 1000), (1000, 1000), (400, 600)])
def test_a_batch_takes_what_it_has_in_kv(weighed, before):
    """With other tokens in KV than its prompts were weighed with, or with them elsewhere, too."""
    turns, new = split_of(Cut([], decodes=300, beside=0.5)).turns, [3500, 3000]
    most_of(turns, 300, 2, new, weighed)
    turns.decoded()
    turns.prefilled(6500, new, list(before))
    assert turns.waited_us() == pytest.approx(turns.times.us(6500, length_of(new, before, 0.5)))


def test_decodes_come_right_after_a_burst():
    """They have waited for all of it, so that not even a short prompt goes before them."""
    turns = split_of(Cut([], decodes=300)).turns
    for _ in range(3):
        turns.prefilled_in_burst(8192)
    assert turns.decode_goes_first(300, 1, 100)


def test_ends_are_whole_pages():
    """SGLang takes whole pages of the chunk for a prompt."""
    scheduler = Cut([*SHORT, 4000, *SHORT], decodes=300)
    scheduler.page_size = 128
    assert most_of(split_of(scheduler).turns, 300, 9, [*SHORT, 4000, *SHORT]) == 4 * 512 + 4096


def test_the_rest_of_a_prompt_is_long():
    """A prompt under way has tokens in KV, and what is cached of the others doesn't run."""
    scheduler = Cut([4000, *SHORT], decodes=300)
    scheduler.chunked_req = request(5000, 4000)
    scheduler.waiting_queue[0].prefix_len = 1000
    split = split_of(scheduler)
    seen = []
    split.turns.most = lambda *given: seen.append(given) or 8192
    split.turns.decoded()
    assert looked_most(split, 300) == 8192
    assert seen == [(300, 6, [1000, 3000, *SHORT], 4000, 6000, 3000)]


def test_limit_on_gaps_goes_before():
    """Who set a limit has that one: batches are cut, even to a prompt's pieces."""
    scheduler = Cut([*SHORT, 4000, *SHORT], decodes=300, gap_ms=25.0)
    assert scheduler.run(2) == [4096, 0]
    assert set(scheduler.seen) == {4096}


def test_what_is_cached_unseen_stops_it():
    """Cached tokens that SGLang finds later than we look: one prompt is cut, then batches are its own for a while."""
    scheduler = Cut([], decodes=300)
    own = scheduler.own

    def finds(_, running):
        for each in scheduler.waiting_queue:
            each.prefix_len = max(each.prefix_len, len(each.origin_input_ids) // 4)
        return own(_, running)

    scheduler.own, seen = finds, []
    for _ in range(70):
        scheduler.waiting_queue = [request(tokens) for tokens in (*SHORT, 4000, 4000)]
        scheduler.chunked_req, scheduler.seen = None, []
        split_of(scheduler).turns.decoded()
        scheduler.run(1)
        seen += scheduler.seen
    assert seen == [6000] + [8192] * 64 + [6000] + [8192] * 4


@pytest.mark.parametrize("another_first", [False, True])
@pytest.mark.parametrize(("prompts", "decodes", "room"), [([1000], 300, 100), ([1000] * 2, 300, 0)])
def test_a_look_right_after_a_decode_step_is_not_counted_twice(prompts, decodes, room, another_first):
    """Of those after a missed end: what waits, or that nothing has room, was seen before the decode step."""
    scheduler = Cut(prompts, decodes=decodes, room=room)
    scheduler.own = lambda *_: SimpleNamespace(batch_to_run=None, running_batch=None)
    split = split_of(scheduler)
    split._as_sglang = 64
    assert scheduler.run(1) == [0]
    counted = split._as_sglang
    if another_first:
        scheduler.waiting_queue[0] = request(1000)
    assert scheduler.run(1) == [0]
    assert counted - split._as_sglang == (1 if another_first and room else 0)


def test_a_prompt_that_sglang_cuts_itself_stops_nothing():
    """Its own chunk ends within one: the next batch may end before a long prompt."""
    scheduler = Cut([4000, 1000, 1000, 1000, 1500], decodes=300, beside=0.0)
    assert scheduler.run(2) == [8192, 0]
    assert scheduler.chunked_req is not None
    assert not split_of(scheduler)._as_sglang


def looked(scheduler):
    """A list that each look at the queue adds to: how many could run."""
    looks, waits = [], split_of(scheduler)._waits
    look = waits.look
    waits.look = lambda could, *rest: looks.append(could) or look(could, *rest)
    return looks


def test_a_burst_is_looked_at_now_and_then():
    """While much is left of a burst what waits isn't counted before every batch; its end is as it was."""
    scheduler = Prompts([1000] * 200, decodes=300, room=592)
    looks = looked(scheduler)
    steps = scheduler.run(27)
    assert steps == [8000] * 25 + [0, 0]
    assert looks == [200, 192, 8]


def test_a_queue_that_is_known_is_not_looked_at_again():
    """After a decode step: the same first prompts, none of them long; others, or room for more, are looked at."""
    scheduler = Prompts([1000] * 4 + [5000] * 2, decodes=300, room=4)
    split, looks = split_of(scheduler), looked(scheduler)
    for room, seen in ((4, [4]), (4, [4]), (6, [4, 6]), (4, [4, 6, 4]), (4, [4, 6, 4])):
        scheduler.max_running_requests = 300 + room
        split.turns.decoded()
        assert looked_most(split, 300) == 8192
        assert looks == seen
    scheduler.waiting_queue.pop(0)
    looked_most(split, 300)
    assert looks[-2:] == [4, 4]


def test_a_prompt_under_way_is_known_after_a_decode_step():
    """It is as it was; once SGLang was asked and ran nothing it may be another, with more of it in the cache."""
    scheduler = Cut([*SHORT, 4000, *SHORT], decodes=300)
    scheduler.chunked_req = request(4000, 2000)
    split, looks = split_of(scheduler), looked(scheduler)
    split.turns.prefilled(8192)
    assert looked_most(split, 300) == 0
    split.turns.decoded()
    assert [looked_most(split, 300) for _ in range(2)] == [4000, 4000]
    assert looks == [9]
    split._waits.asked()
    assert looked_most(split, 300) == 4000
    assert looks == [9, 9]
    scheduler.chunked_req = None
    assert looked_most(split, 300) == 6000
    assert looks == [9, 9, 9]


def seen_half_cached(scheduler, split):
    """What is asked of the turns about a queue half of whose tokens were found in the cache since."""
    for each in scheduler.waiting_queue:
        each.prefix_len = len(each.origin_input_ids) // 2
    seen = []
    split.turns.most = lambda *given: seen.append(given) or 8192
    looked_most(split, 300)
    return seen


def test_what_sglang_finds_in_its_cache_is_seen_once_it_was_asked():
    """Between a decode step and the batch after it nothing is found; a batch that isn't had may have looked."""
    scheduler = Cut([*SHORT, 4000, *SHORT], decodes=300)
    split = split_of(scheduler)
    split.turns.prefilled(8192)
    assert looked_most(split, 300) == 0
    split.turns.decoded()
    scheduler.own = lambda *_: SimpleNamespace(batch_to_run=None, running_batch=None)
    assert scheduler.run(1) == [0]
    assert seen_half_cached(scheduler, split) == [(300, 9, [250] * 4 + [2000] + [250] * 3, 0, 3750, 2000)]


def test_what_sglang_finds_while_nothing_decodes_is_seen():
    """It was asked for a batch, and may have looked in its cache."""
    scheduler = Cut([*SHORT, 4000, *SHORT], decodes=300)
    split = split_of(scheduler)
    split.turns.prefilled(8192)
    assert looked_most(split, 300) == 0
    running, scheduler.running.reqs = scheduler.running.reqs, []
    scheduler.own = lambda *_: SimpleNamespace(batch_to_run=None, running_batch=None)
    assert scheduler.run(1) == [0]
    scheduler.running.reqs = running
    assert seen_half_cached(scheduler, split) == [(300, 9, [250] * 4 + [2000] + [250] * 3, 0, 3750, 2000)]


@pytest.mark.parametrize("left", [0, 1, 3, 7])
@pytest.mark.parametrize("waiting", [8, 20])
def test_a_request_that_left_and_one_that_came_are_seen(left, waiting):
    """As many wait as before, and the first may be the same."""
    queue, waits = [request(500) for _ in range(waiting)], Waiting(8192, 4 * 8192)
    waits.look(waiting, queue, None)
    assert waits.is_of(waiting, queue, None)
    del queue[left]
    assert not waits.is_of(waiting, [*queue, request(4000)], None)


@pytest.mark.parametrize(("could", "known"), [(9, True), (60, True), (66, False), (8, True), (7, False)])
def test_what_comes_behind_the_first_is_not_looked_at(could, known):
    """As many are looked at as ever are, and more came or found room: only a burst, or fewer than those, is new."""
    queue, waits = [request(500) for _ in range(70)], Waiting(8192, 4 * 8192)
    waits.look(10, queue, None)
    assert waits.is_of(could, queue, None) == known
    del queue[3]
    assert not waits.is_of(9, queue, None)


def test_a_queue_of_fewer_is_looked_at_when_one_comes():
    """It wasn't looked at before, and may be long."""
    queue, waits = [request(500) for _ in range(9)], Waiting(8192, 4 * 8192)
    waits.look(7, queue, None)
    assert not waits.is_of(8, queue, None)
    # Nor is anything known after an error or a burst.
    waits.look(8, queue, None)
    waits.forget()
    assert not waits.is_of(8, queue, None)


BATCH = st.lists(st.integers(1, 5000), min_size=1, max_size=12).filter(lambda new: sum(new) <= 8192)


@given(
    st.lists(BATCH, max_size=4), st.lists(st.integers(1, 8192), max_size=8), st.integers(1, 8), st.integers(1, 500),
    st.floats(0, 1), st.sampled_from([0, 0, 3000]),
)  # fmt: skip
@example([[500, 500]], [4000, 500], 1, 300, 1.0, 0)
@example([[64], [900, 64]], [6000], 1, 300, 0.5, 0)
def test_decodes_wait_by_what_all_took(ran, new, many, decodes, beside, before):
    """Most often bounds tell who goes first, and no length is worked out: the answer is as if each were."""
    turns = split_of(Cut([], decodes=1, beside=beside)).turns
    tokens = min(sum(new) * many, 4 * 8192 - sum(map(sum, ran)))
    assume(tokens > 0)
    waited_us = 0.0
    for batch in ran:
        in_kv = [before] + [0] * (len(batch) - 1)
        turns.prefilled(sum(batch), batch, in_kv)
        waited_us += turns.times.us(sum(batch), turns.times.length(batch, in_kv))
    took_us = turns.times.us(tokens, mean_length(new))
    assume(abs(waited_us + took_us - turns.most_us(decodes)) > 1e-6)
    late = bool(ran) and waited_us + took_us > turns.most_us(decodes)
    assert turns.decode_goes_first(decodes, 1, tokens, new) == late
    assert turns.waited_us() == pytest.approx(waited_us)


def test_lengths_are_worked_out_where_they_decide():
    """A chunk of short prompts ran, and decodes have waited whatever its lengths are; after few it may matter."""
    turns, asked = split_of(Cut([], decodes=1)).turns, []
    length = turns.times.length
    turns.times.length = lambda *given: asked.append(given) or length(*given)
    for ran, late in ([64] * 128, True), ([64] * 20 + [900], False):
        turns.decoded()
        turns.prefilled(sum(ran), ran, [0] * len(ran))
        assert turns.decode_goes_first(300, 4, 2000, [500] * 4) == late
    assert not asked
    turns.decoded()
    turns.prefilled(4000, [3000, 1000], [0, 0])
    assert not turns.decode_goes_first(300, 5, 2500, [500] * 5)
    assert len(asked) == 1


def test_an_empty_queue_is_known():
    """So is one of which none could run; nothing is before the first look, nor after one that failed."""
    waits = Waiting(8192, 4 * 8192)
    assert not waits.is_of(0, [], None)
    waits.look(0, [], None)
    assert waits.is_of(0, [], None)
    assert waits.is_of(0, [request(500)], None)
    queue = [request(500), SimpleNamespace()]
    with pytest.raises(AttributeError):
        waits.look(2, queue, None)
    assert not waits.is_of(2, queue, None)


class Request(SimpleNamespace):
    """One that can be asked whether it is still there."""


def test_no_request_is_held_while_nothing_waits():
    """Nor a prompt under way: a request may hold much memory."""
    scheduler = Cut([], decodes=300)
    for cut in (False, True):
        requests = [Request(origin_input_ids=range(n), prefix_len=0) for n in (500, 4000, 500, 3000)]
        gone = [weakref.ref(each) for each in requests]
        scheduler.chunked_req, scheduler.waiting_queue = (requests[0] if cut else None), requests[cut:]
        del requests
        scheduler.run(8)
        assert not any(each() for each in gone)


def test_no_request_is_held_in_a_burst():
    """Nobody asks again before it is looked at anew."""
    scheduler = Cut([], decodes=300)
    scheduler.own = lambda *_: SimpleNamespace(batch_to_run=SimpleNamespace(extend_num_tokens=8192))
    requests = [Request(origin_input_ids=range(8000), prefix_len=0) for _ in range(8)]
    gone = [weakref.ref(each) for each in requests]
    scheduler.waiting_queue = requests
    scheduler.run(1)
    assert split_of(scheduler).turns.in_burst
    requests.clear()
    assert not any(each() for each in gone)


def test_no_request_is_held_after_an_error():
    """What a look that raised had found isn't kept."""
    scheduler = Cut([], decodes=300)
    scheduler.own = lambda *_: SimpleNamespace(batch_to_run=None, running_batch=None)
    scheduler.waiting_queue = [request(500), SimpleNamespace()]
    scheduler.run(1)
    waits = split_of(scheduler)._waits
    assert not waits._looked


@given(
    st.lists(st.sampled_from([200, 900, 2500, 4000, 8000, 9000]), max_size=40), st.integers(1, 500),
    st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([1, 64]),
)  # fmt: skip
def test_every_prompt_runs_whole(prompts, decodes, beside, page):
    """Nothing is lost, cut twice or held up for ever, and SGLang's own chunk is put back."""
    scheduler = Cut(prompts, decodes=decodes, room=5000, beside=beside)
    scheduler.page_size = page
    steps = scheduler.run(4 * len(prompts) + 2)
    assert sum(steps) == sum(prompts)
    assert steps[-1] == 0
    assert scheduler.chunked_prefill_size == 8192


def test_means_and_profiles():
    """Nothing is told of prompts without costs; a mean is over tokens."""
    assert mean_length([3000, 1000]) == 2500
    state = state_with()
    state.phases[PREFILL] = Phase(PREFILL, (64,), 8192, full=False)
    turns = Turns(state, 8192)
    assert turns.times is None
    assert most_of(turns, 8, 2, [5000, 5000]) == 8192


@given(
    st.lists(st.tuples(st.integers(1, 9000), st.sampled_from([0, 0, 0, 100])), min_size=1, max_size=12),
    st.sampled_from(["prefix_len", "prefix_indices", "last_node"]), st.integers(1, 12), st.booleans(),
)  # fmt: skip
def test_what_is_in_the_cache_is_counted_whatever_the_first_has(found, name, could, under_way):
    """On either release, where SGLang has found tokens of none, of the first, or of others only."""
    queue = [waits_with(tokens, min(cached, tokens - 1), name) for tokens, cached in found]
    could = min(could, len(queue))
    cut = request(6000, 2000) if under_way else None
    waits = Waiting(8192, 4 * 8192)
    waits.look(could, queue, cut)
    lengths = [tokens for tokens, _ in found[: min(could, 8)]]
    left = [tokens - min(cached, tokens - 1) for tokens, cached in found[: min(could, 8)]]
    most = sum(lengths) * could // len(lengths) + (8192 if under_way else 0)
    assert (waits.longest, waits.at_most) == (max(lengths), most)
    if max(left) <= 8192:
        seen = sum(left) * could // len(left) + (4000 if under_way else 0)
        assert waits.counts() == (could + under_way, seen, lengths)
    new = [4000, *left] if under_way else left
    assert waits.batch() == (new, 2000 if under_way else 0, sum(new), max(new))


def waits_with(tokens, cached, name):
    """A request that waits, as either release has it, or without what tells that SGLang has looked."""
    if name != "last_node":
        return request(tokens, cached, name)
    slots = SimpleNamespace(numel=lambda: cached)
    return SimpleNamespace(origin_input_ids=range(tokens), prefix_indices=slots, last_node=slots if cached else None)


@given(st.lists(st.integers(1, 4000), min_size=1, max_size=12), st.floats(0, 1))
def test_a_batch_takes_no_longer_than_as_its_longest(new, beside):
    """By which a batch that fits needs no more to be worked out; alone a prompt takes that."""
    found = times(beside)
    assume(sum(new) <= 8192)
    assert found.batch_us(new) <= found.most_us(sum(new), max(new)) + 1e-6
    if beside <= 0.5:
        assert found.batch_us(new[:1]) == pytest.approx(found.most_us(new[0], new[0]))


def test_a_batch_that_fits_whatever_its_prompts_do_is_not_costed():
    """Nor is it ended; one that may not fit is, and so is one with tokens in KV."""
    turns = split_of(Cut([], decodes=300)).turns
    turns.times.first = lambda *given: asked.append(given) or (1, 1, 0.0, 0.0)
    fits = [1700, *[1000] * 5]
    for new, before, costed in ((fits, 0, 0), ([5000, 500, 1000], 0, 1), (fits, 4000, 1)):
        asked = []
        assert turns.long < max(new) + before
        assert turns._short < sum(new)
        assert most_of(turns, 300, len(new), new, before) == 8192
        assert len(asked) == costed
