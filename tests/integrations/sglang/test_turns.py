"""When a decode step comes between two batches of prompts."""

from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kpolicy.costs import Curve
from kpolicy.settings import Objective
from kpolicy_sglang import hooks
from kpolicy_sglang.config import Config
from kpolicy_sglang.phase import DECODE, PREFILL, Phase, table_of
from kpolicy_sglang.prompt_times import mean_length
from kpolicy_sglang.split import split_of
from kpolicy_sglang.state import State, attach
from kpolicy_sglang.turns import BURST, Turns, aligned
from tests.integrations.sglang.fake_sglang import pretended
from tests.integrations.sglang.test_split import Scheduler, limited, scheduler_of, state_of

PROMPT_US = {64: 4000, 512: 4000, 1024: 4300, 2048: 7500, 3072: 11_200, 4096: 15_000, 8192: 30_000}
DECODE_US = {1: 1370, 256: 1970, 600: 2910}


def waiting(split, decodes):
    """What a split takes to wait beside so many decodes, as it is told to the turns."""
    scheduler = split._scheduler
    could = max(min(len(scheduler.waiting_queue), scheduler.max_running_requests - decodes), 0)
    split._waits.look(could, scheduler.waiting_queue, scheduler.chunked_req)
    return split._waits.counts()


def state_with(**settings):
    """A small dense model on a large GPU."""
    state = State(Config(**settings), "0.5.16")
    for name, us, full in ((DECODE, DECODE_US, True), (PREFILL, PROMPT_US, False)):
        phase = state.phases[name] = Phase(name, tuple(us), max(us), full=full)
        phase.install("auto", table_of("made up", us, {size: 3 * each for size, each in us.items()}), Objective())
    return state


def request(tokens, cached=0, name="prefix_len"):
    """A request that waits, some of its tokens found in SGLang's cache."""
    return SimpleNamespace(origin_input_ids=range(tokens), **{name: cached if name == "prefix_len" else range(cached)})


class Prompts:
    """A scheduler with prompts of so many tokens in its queue, run whole as far as a chunk goes."""

    def __init__(self, prompts, *, decodes=8, room=592, **settings):
        runner = SimpleNamespace()
        attach(runner, state_with(**settings))
        self.tp_worker = SimpleNamespace(model_runner=runner)
        self.waiting_queue = [request(tokens) for tokens in prompts]
        self.chunked_req, self.is_mixed_chunk, self.chunked_prefill_size = None, False, 8192
        self.max_running_requests = decodes + room
        self.running = SimpleNamespace(reqs=[0] * decodes)

    def own(self, _, running):
        """SGLang's own batch: as many whole prompts as fit into the chunk and there is room for."""
        room, tokens, taken = self.max_running_requests - len(running.reqs), 0, []
        while self.waiting_queue and len(taken) < room:
            prompt = self.waiting_queue[0].origin_input_ids
            if taken and tokens + len(prompt) > self.chunked_prefill_size:
                break
            taken.append(self.waiting_queue.pop(0))
            tokens += len(prompt)
        batch = SimpleNamespace(extend_num_tokens=tokens) if taken else None
        running.reqs.extend([0] * len(taken))
        return SimpleNamespace(batch_to_run=batch, running_batch=running)

    def run(self, steps):
        """Prompt tokens of each step; 0 for a decode step."""
        found = []
        with pretended("0.5.16"):
            for _ in range(steps):
                batch = hooks.new_batch_prefill(self.own, self, self.running).batch_to_run
                found.append(batch.extend_num_tokens if batch else 0)
        return found


def test_decodes_wait_for_no_more_than_a_chunk():
    """A chunk and a decode step take 31.4 ms: after 4,096 tokens (15 ms) as many may follow, but not 8,192 (30 ms)."""
    assert Prompts([4096]).run(2) == [4096, 0]
    late = Prompts([4096])
    assert late.run(1) == [4096]
    late.waiting_queue = [request(4096)]
    assert late.run(2) == [4096, 0]
    late = Prompts([4096])
    assert late.run(1) == [4096]
    late.waiting_queue = [request(8192)]
    assert late.run(3) == [0, 8192, 0]


def test_long_prompts_take_longer_than_usual_ones():
    """By what one long prompt takes, two of 4,096 tokens are too much for one wait; eight usual ones aren't."""
    for prompts, steps in (([4096], [4096, 0, 4096, 0]), ([1024] * 4, [4096, 4096, 0])):
        scheduler = Prompts(prompts)
        scheduler.tp_worker.model_runner._kpolicy_state.long = Curve((2048, 4096, 8192), (8_000.0, 20_000.0, 60_000.0))
        found = scheduler.run(1)
        scheduler.waiting_queue = [request(tokens) for tokens in prompts]
        assert found + scheduler.run(len(steps) - 1) == steps


@pytest.mark.parametrize(
    ("tokens", "length", "us"),
    [(512, 512, 4000), (4096, 0, 15_000), (4096, 1024, 15_000), (4096, 4096, 20_000),
     (4096, 7168, 25_000), (4096, 9000, 25_000), (4096, 2560, 17_500), (1024, 1024, 4300), (1536, 1536, 7500)],
)  # fmt: skip
def test_what_prompts_take_goes_by_their_length(tokens, length, us):
    """A line in the length, from usual prompts to a single one: attention to one's own tokens is that."""
    state = state_with()
    state.long = Curve((2048, 4096, 8192), (8_000.0, 20_000.0, 60_000.0))
    assert Turns(state, 8192).times.us(tokens, length) == us


def test_how_long_prompts_are():
    """The mean over tokens; nothing where all are usual."""
    assert mean_length([]) == mean_length([1024, 10]) == 0
    assert mean_length([3000, 1000]) == 2500


@pytest.mark.parametrize(("before", "us"), [(None, 4000), ([0], 4000), ([8000], 22_500)])
def test_a_step_that_ran_is_as_long_as_it_was_taken_for(before, us):
    """A piece of a long prompt is one, as it was while it waited: attention to what came before it is that."""
    scheduler = Prompts([1024])
    scheduler.tp_worker.model_runner._kpolicy_state.long = Curve((1200, 2048, 8192), (14_000.0, 15_000.0, 60_000.0))
    batch = SimpleNamespace(extend_num_tokens=2048, extend_lens=[512], prefix_lens=before)
    turns = split_of(scheduler).turns
    scheduler.own = lambda *_: SimpleNamespace(batch_to_run=batch, running_batch=None)
    assert scheduler.run(1) == [2048]
    assert turns.waited_us() == (7500 if us == 4000 else us)


def test_one_prompt_that_waits_alone_is_not_looked_at():
    """Right after a decode step it runs however long it is: nothing behind it could be left to a next batch."""
    scheduler = Prompts([])
    scheduler.waiting_queue = [object()]
    batch = SimpleNamespace(extend_num_tokens=2048, extend_lens=[2048], prefix_lens=[0])
    scheduler.own = lambda *_: SimpleNamespace(batch_to_run=batch, running_batch=None)
    waits = split_of(scheduler)._waits
    waits.look(2, [request(64), request(64)], None)
    assert scheduler.run(1) == [2048]
    assert not scheduler.tp_worker.model_runner._kpolicy_state.failures.counts
    assert not waits._looked


def test_a_prompt_under_way_is_not_held_once_one_waits_alone():
    """Nothing waited behind it when the queue was looked at; it has ended since."""
    scheduler = Prompts([8192])
    scheduler.own = lambda *_: SimpleNamespace(batch_to_run=SimpleNamespace(extend_num_tokens=10), running_batch=None)
    waits = split_of(scheduler)._waits
    waits.look(0, [], request(9000))
    assert waits._cut is not None
    assert scheduler.run(1) == [10]
    assert waits.first is waits._cut is None


@pytest.mark.parametrize("name", ["prefix_len", "prefix_indices"])
@pytest.mark.parametrize(("tokens", "cached"), [(500, 0), (500, 100), (9000, 0), (9000, 4000), (20_000, 1)])
def test_one_prompt_that_waits_alone_is_counted_as_among_others(tokens, cached, name):
    """Its tokens that aren't in KV, a chunk at most, and how long it is."""
    scheduler = Prompts([])
    scheduler.waiting_queue = [request(tokens, cached, name)]
    split = split_of(scheduler)
    prompts, *counted = waiting(split, 8)
    assert prompts == 1
    assert [counted[0], tuple(counted[1])] == list(split._waits.alone(scheduler.waiting_queue[0]))


def test_decodes_have_a_turn_after_a_whole_chunk():
    """Up to four chunks wait: a decode step comes between each two."""
    scheduler = Prompts([8192, 8000])
    assert scheduler.run(3) == [8192, 0, 8000]
    assert split_of(scheduler).cycles["in turns"] == 1
    assert Prompts([8192] * 4).run(7) == [8192, 0, 8192, 0, 8192, 0, 8192]


def test_a_burst_is_served_in_sglangs_order():
    """More than four chunks wait: prompts go first, the last chunk with the others; then decodes have turns again."""
    scheduler = Prompts([8192] * 6)
    assert scheduler.run(8) == [8192] * 6 + [0, 0]
    scheduler.waiting_queue = [request(8192) for _ in range(2)]
    assert scheduler.run(3) == [8192, 0, 8192]


@pytest.mark.parametrize("burst", [0, 6])
def test_turns_come_back_while_prompts_keep_coming(burst):
    """The queue never empties: what waits decides, and not that there was a burst once."""
    scheduler = Prompts([8192] * burst, decodes=300, room=5000)
    steps = []
    for _ in range(60):
        scheduler.waiting_queue.append(request(4096))
        steps += scheduler.run(1)
        # Half a chunk comes a step: those that a decode step lets in are taken together.
        assert not split_of(scheduler).turns.in_burst or len(steps) < 14
    assert steps[14:].count(0) >= 15


@pytest.mark.parametrize(("prompts", "turns"), [(12, 20), (20, 20), (30, 7)])
def test_what_was_before_does_not_decide(prompts, turns):
    """A queue kept at one and a half chunks, at two and a half and close to four has its decode steps after a burst."""
    found = []
    for burst in (0, 40):
        scheduler = Prompts([1000] * burst, decodes=300, room=5000)
        steps = []
        while len(steps) < 60:
            waiting = scheduler.waiting_queue
            waiting += [request(1000) for _ in range(len(waiting), prompts)]
            steps += scheduler.run(1)
        found.append(steps[20:].count(0))
    assert abs(found[0] - found[1]) <= 1
    assert min(found) >= turns - 1


def test_more_prompts_than_decodes_are_a_burst():
    """A decode step for two rows would hold up three prompts; with three of each the rows have their turn."""
    assert Prompts([5000] * 3, decodes=2).run(5) == [5000, 5000, 5000, 0, 0]
    assert Prompts([5000] * 3, decodes=3).run(5) == [5000, 0, 5000, 0, 5000]


def test_a_burst_is_four_chunks_at_least():
    """One of few tokens, more prompts than decodes, goes on with what comes until that much has run."""
    turns = Turns(state_with(), 8192)
    assert not turns.decode_goes_first(2, 3, 3000)
    for ran, burst in ((3000, True), (20_000, True), (6000, False)):
        turns.prefilled_in_burst(ran)
        assert not turns.decode_goes_first(2, 2, 20_000)
        assert turns.in_burst == burst
    assert turns.decode_goes_first(2, 2, 20_000)


class Chunks(Prompts):
    """Cuts prompts, one in a batch."""

    def own(self, _, running):
        """The next chunk of the prompt under way, or of the next one."""
        prompt = self.chunked_req or (self.waiting_queue.pop(0) if self.waiting_queue else None)
        if prompt is None:
            return SimpleNamespace(batch_to_run=None, running_batch=running)
        tokens = min(self.chunked_prefill_size, len(prompt.origin_input_ids) - prompt.prefix_len)
        prompt.prefix_len += tokens
        self.chunked_req = prompt if prompt.prefix_len < len(prompt.origin_input_ids) else None
        return SimpleNamespace(batch_to_run=SimpleNamespace(extend_num_tokens=tokens), running_batch=running)


@pytest.mark.parametrize("behind", [[], [8192] * 2])
def test_one_long_prompt_is_no_burst(behind):
    """Decodes have their turn between the chunks of a prompt, whatever waits behind it."""
    assert Chunks([131_072, *behind], decodes=300).run(29) == [8192, 0] * 14 + [8192]


def test_a_burst_before_a_long_prompt_ends_with_it():
    """Five chunks go first; then the long prompt is cut with turns between."""
    scheduler = Chunks([8000] * 5 + [40_000], decodes=300)
    assert scheduler.run(8) == [8000] * 5 + [0, 8192, 0]


@pytest.mark.parametrize("name", ["prefix_len", "prefix_indices"])
def test_cached_tokens_do_not_wait(name):
    """Prompts that are mostly in the cache make no burst, on either release."""
    scheduler = Prompts([], decodes=300)
    scheduler.waiting_queue = [request(9000, 8900, name) for _ in range(3)]
    split = split_of(scheduler)
    split.turns.prefilled(512)
    assert waiting(split, 300) == (3, 300, [9000] * 3)
    assert not split.turns.decode_goes_first(300, *waiting(split, 300))
    assert not split.turns.in_burst
    scheduler.waiting_queue = [request(9000, 100, name)] * 3
    assert waiting(split, 300) == (1, 8192, (8192,))


class Slots:
    """Slots of cached tokens as 0.5.16 keeps them, without a length that is had quickly."""

    def __init__(self, count):
        self.numel = lambda: count


def test_cached_tokens_are_asked_for_where_sglang_has_looked():
    """On 0.5.16 these have a node of the cache; the others have nothing that is asked."""
    looked, not_yet = (
        SimpleNamespace(origin_input_ids=range(tokens), prefix_indices=slots, last_node=node)
        for tokens, slots, node in ((9000, Slots(8900), object()), (4000, SimpleNamespace(numel=None), None))
    )
    scheduler = Prompts([], decodes=300)
    scheduler.waiting_queue = [looked] * 3
    split = split_of(scheduler)
    assert waiting(split, 300) == (3, 300, [9000] * 3)
    scheduler.waiting_queue = [looked, not_yet]
    assert waiting(split, 300) == (2, 4100, [9000, 4000])


@pytest.mark.parametrize(("tokens", "cached"), [(8000, 7000), (9000, 8000)])
def test_many_prompts_are_counted_beyond_what_is_cached(tokens, cached):
    """Of prompts longer than a chunk that are mostly cached the first stand for the others too."""
    split = split_of(Prompts([], decodes=600, room=390))
    split._scheduler.waiting_queue = [request(tokens, cached)] * 390
    split.turns.prefilled(8192)
    assert waiting(split, 600) == (390, 390_000, [tokens] * 8)
    split.turns.decode_goes_first(600, *waiting(split, 600))
    assert split.turns.in_burst


def test_many_prompts_are_counted_by_the_first_of_them():
    """What a count takes is bounded; in a burst it goes on, so that its end is seen."""
    split = split_of(Prompts([600] * 500, decodes=600, room=80))
    assert waiting(split, 600) == (80, 80 * 600, [600] * 8)
    split.turns.prefilled(8192)
    assert not split.turns.decode_goes_first(600, *waiting(split, 600))
    assert split.turns.in_burst
    assert waiting(split, 670) == (10, 10 * 600, [600] * 8)
    assert not split.turns.decode_goes_first(670, *waiting(split, 670))
    assert not split.turns.in_burst
    assert split.turns.decode_goes_first(670, *waiting(split, 670))


def test_what_has_no_room_is_no_burst():
    """A long queue in front of a full server: those that may run are counted, and a batch that isn't had ends it."""
    scheduler = Prompts([8192] * 9, room=2)
    assert scheduler.run(5) == [8192, 0, 8192, 0, 0]
    scheduler.max_running_requests += 2
    assert scheduler.run(3) == [8192, 0, 8192]


def test_a_batch_that_is_not_had_ends_the_wait():
    """Prompts that KV has no room for: SGLang runs decodes, and what waits is counted anew."""
    scheduler = Prompts([8192] * 6, decodes=4)
    assert scheduler.run(1) == [8192]
    turns = split_of(scheduler).turns
    assert turns.in_burst
    assert not turns.fresh
    scheduler.own = lambda *_: SimpleNamespace(batch_to_run=None, running_batch=None)
    assert scheduler.run(1) == [0]
    assert turns.fresh
    assert not turns.in_burst


def test_no_decodes_no_turns():
    """With nothing that decodes prompts run as SGLang has them."""
    scheduler = Prompts([8192, 8192], decodes=0)
    first = scheduler.run(1)
    scheduler.running.reqs.clear()
    assert first + scheduler.run(1) == [8192, 8192]


@given(
    st.one_of(st.lists(st.integers(1, 8192), max_size=60), st.lists(st.integers(1, 8192), max_size=8)),
    st.integers(1, 500), st.integers(0, 100), st.sampled_from([None, 0.1, 9.0, 40.0]),
)  # fmt: skip
@example([1, 1, 8191, 1, 1, 1, 1, 1, 5457, 8192, 1, 1, 1, 1], 14, 14, None)
def test_every_prompt_runs_and_waits_are_bounded(prompts, decodes, room, gap_ms):
    """Nothing is lost or held up for ever; outside bursts no two decode steps are further apart than the bound."""
    scheduler = Prompts(prompts, decodes=decodes, room=room, gap_ms=gap_ms)
    turns = split_of(scheduler).turns
    steps = scheduler.run(2 * len(prompts) + 2)
    served = min(len(prompts), room)
    assert sum(steps) == sum(prompts[:served])
    assert steps[-1] == 0
    # Of more than eight what waits is an estimate, by which they may be a burst.
    if gap_ms is None and sum(prompts) <= BURST * 8192 and served <= min(decodes, 8):
        since = 0.0
        for tokens in steps:
            since = since + turns.times.us(tokens) if tokens else 0.0
            assert since <= 30_000 + turns.decode_us(decodes + served)


@pytest.mark.parametrize(("gap_ms", "tokens"), [(11.4, 512), (11.3, 64), (0.1, 64), (30.0, 512), (100.0, 2048)])
def test_limit_on_gaps_bounds_the_prompts_of_a_step(gap_ms, tokens):
    """As many prompt tokens as take no longer; never none."""
    state = state_of(mixed_us=40_000)
    state.config = Config(gap_ms=gap_ms, turns=False)
    assert Turns(state, 2048).limit == tokens


@pytest.mark.parametrize(("align", "tokens"), [(1, 64), (48, 48), (64, 64), (256, 256), (4096, 2048)])
def test_a_cut_prompt_has_whole_pages(align, tokens):
    """SGLang rounds a cut prompt down to pages, and runs none that has less than one: prompts would wait for ever."""
    state = state_of(mixed_us=40_000)
    state.config = Config(gap_ms=1.0)
    assert Turns(state, 2048, align=align).limit == tokens


def test_alignment_is_sglangs():
    """Pages, and the blocks of a deterministic attention where that is on."""
    assert aligned(SimpleNamespace()) == 1
    assert aligned(SimpleNamespace(page_size=64, truncation_align_size=None)) == 64
    assert aligned(SimpleNamespace(page_size=16, truncation_align_size=24)) == 48


@pytest.mark.parametrize("case", ["off", "no chunk", "no costs", "an interval", "on"])
def test_off(case):
    """Switched off, without chunks, without costs and with an interval of SGLang's the order is SGLang's."""
    state = state_with(turns=case != "off")
    if case == "no costs":
        state.phases[PREFILL].costs = None
    turns = Turns(state, 0 if case == "no chunk" else 8192, own=case == "an interval")
    assert turns.on == (case == "on")


def test_mixed_batches_need_no_turns():
    """They have decodes in them."""
    seen = []

    def own(scheduler, running):
        seen.append(scheduler.chunked_prefill_size)
        return Scheduler.get_new_batch_prefill(scheduler, running)

    mixed = scheduler_of(state_of(mixed_us=1), waiting=3)
    mixed.tp_worker.model_runner._kpolicy_state.config = Config(split=False)
    running = SimpleNamespace(reqs=[0] * 8)
    assert [hooks.new_batch_prefill(own, mixed, running).batch_to_run for _ in range(3)] == ["mixed"] * 3
    assert seen == [2048] * 3


def test_interval_of_sglangs_own_goes_before_turns():
    """Who gave SGLang 0.5.23 an interval of decode steps gets that one."""
    scheduler = scheduler_of(state_of(mixed_us=1), mixed=False)
    scheduler.prefill_decode_interval = 3
    assert split_of(scheduler) is None


@pytest.mark.parametrize("decodes", [1, 100, 600, 1984, 2000])
@pytest.mark.parametrize("page", [1, 64])
def test_gap_limit_holds_mixed_batches_too(decodes, page):
    """Decodes in a mixed batch wait for its prompts; SGLang takes them off the chunk, and the limit is what is left."""
    scheduler, seen = limited(11.4, waiting=3), []
    scheduler.is_mixed_chunk, scheduler.page_size = True, page

    def own(scheduler, running):
        left = scheduler.chunked_prefill_size - (len(running.reqs) if scheduler.is_mixed_chunk else 0)
        seen.append(left // page * page)
        return Scheduler.get_new_batch_prefill(scheduler, running)

    scheduler.tp_worker.model_runner._kpolicy_state.config = Config(gap_ms=11.4, split=False)
    hooks.new_batch_prefill(own, scheduler, SimpleNamespace(reqs=[0] * decodes))
    # Where the chunk itself has less left it is SGLang's own.
    assert seen == [min(512, (2048 - decodes) // page * page)]
    assert scheduler.chunked_prefill_size == 2048
