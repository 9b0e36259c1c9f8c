"""How many tokens a step holds: what the objective and the costs say of the gap, within the bound on prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kpolicy.attention.support import Claims
from kpolicy.costs import AttentionCost, CostTable, Curve, HostCost
from kpolicy.engine import Engine
from kpolicy.executors.base import StepOutputs
from kpolicy.executors.simulated import SimulatedExecutor
from kpolicy.keys import GraphKey
from kpolicy.ladders import CaptureLadder, CaptureSizes
from kpolicy.modes import Part
from kpolicy.policies import get_policy
from kpolicy.policies.base import PolicyContext
from kpolicy.reasons import Reason
from kpolicy.scheduling import pace as module
from kpolicy.scheduling.batching import Batch, Batcher, Generation
from kpolicy.scheduling.line import Line, in_line
from kpolicy.scheduling.pace import EnginePace, Pace, mixed_numbers, other_select
from kpolicy.settings import Objective, Settings

PIECES = (256, 512, 1024, 2048)
SETTINGS = Settings(max_num_reqs=64, max_num_tokens=2048)
# 1,000 us whatever a step's tokens and 2 us for each: 512 tokens take 2,024 us, 2,048 take 5,096.
LINEAR = Curve((1, 4096), (1002.0, 9192.0))


def table(**changed: Any) -> CostTable:
    flat = HostCost(10.0)
    made: dict[str, Any] = {
        "version": "made up", "measured": True, "full": LINEAR, "piecewise": LINEAR, "eager": LINEAR,
        "host_full": flat, "host_piecewise": flat, "host_eager": flat,
    } | changed  # fmt: skip
    return CostTable(**made)


def context(costs: CostTable, objective: Objective | str = "latency", **settings: int) -> PolicyContext:
    keys = [GraphKey(Part.PIECEWISE, size) for size in PIECES] + [GraphKey(Part.FULL, 64, 64, query_len=1)]
    limits = Settings(**{"max_num_reqs": 64, "max_num_tokens": 2048, **settings})
    return PolicyContext(
        claims=Claims(1), ladder=CaptureLadder(keys), costs=costs, settings=limits, objective=Objective.parse(objective)
    )


def pace(costs: CostTable, objective: Objective | str = "latency", *, other: str = "", **more: Any) -> Pace:
    limit = more.pop("limit", None)
    found = context(costs, objective, **more)
    select = get_policy("auto").compile(found).select
    return Pace(found, select, other_select(get_policy(other), found) if other else None, limit=limit)


FULL_LINE = Line(2, 2038, 20)
"""Ten decodes leave so many tokens of 2,048, and twenty requests wait behind them."""


@pytest.mark.parametrize(
    ("objective", "size"),
    [
        # Throughput: the fixed time of a step is shared by the most tokens.
        ("throughput", 2048),
        # 1,024 tokens at a time take 3,048 us for 5,096 and 1.21 times as long in all, 512 1.6 times.
        ("latency", 1024),
        (Objective(0.0, 1.0, 1.1), 2048),
        (Objective(0.0, 1.0, 1.7), 512),
        # 2,048 score 10,192, 1,024 6,127 + 3,048, 512 8,218 + 2,024.
        ("1:1", 1024),
        ("20:1", 2048),
    ],
)
def test_the_objective_decides_within_the_bound_on_prompts(objective, size):
    """Smaller steps shorten the gap and take longer in all; the weights and the limit say how far that goes."""
    assert pace(table(), objective).most_tokens(10, FULL_LINE) == size


def test_what_graphs_gain_over_another_policy_may_be_spent_on_the_gap():
    """Prompts may take as long as by the other policy's whole steps, which is eager above its largest graph."""
    slow = table(host_eager=HostCost(9000.0))
    assert pace(slow).most_tokens(10, FULL_LINE) == 1024
    assert pace(slow, other="vllm:version=0.23").most_tokens(10, FULL_LINE) == 512
    # Where the other policy is no slower, only the objective's own limit holds.
    assert pace(table(), other="vllm:version=0.23").most_tokens(10, FULL_LINE) == 1024


def test_decodes_of_further_steps_are_spared_later():
    """With nobody behind the prompts, decodes would have the steps to themselves that they now share; else hardly."""
    found = pace(table(host_eager=HostCost(9000.0)), Objective(1.0, 0.0, first_token_limit=1.25))
    # 5,096 us whole; 6,096 in two steps, less 1,128 of decodes alone.
    assert found.most_tokens(16, Line(2, 1792, 0)) == 1024
    assert found.most_tokens(16, Line(2, 1792, 200)) == 2048


def test_prompts_that_are_few_are_not_divided():
    """Two steps for what one would do delay the first token beyond the limit."""
    found = pace(table())
    assert found.most_tokens(10, Line(1, 600, 0)) == 2048
    assert found.most_tokens(10, Line(1, 40, 0)) == 2048


def test_without_decodes_or_prompts_there_is_no_gap():
    """A step of one kind is filled to the limit, and so is one that decodes fill."""
    found = pace(table())
    assert found.most_tokens(0, FULL_LINE) == 2048
    assert found.most_tokens(10, Line(0, 0, 0)) == 2048
    assert pace(table(), max_num_tokens=64).most_tokens(64, Line(1, 1, 0)) == 64


def test_a_gap_that_the_host_bounds_gains_nothing_by_smaller_steps():
    """The same host time for each step: fewer tokens only mean more of them."""
    bound = table(host_piecewise=HostCost(6000.0), host_eager=HostCost(9000.0))
    assert pace(bound, other="vllm:version=0.23").most_tokens(10, FULL_LINE) == 2048


def test_attention_of_a_prompt_is_not_made_cheaper_by_dividing_it():
    """The pieces of one prompt have all of its pairs between them."""
    pairs = table(prefill_attention=AttentionCost(unit_us=0.01))
    found = pace(pairs, "throughput")
    whole = mixed_numbers(1, 1, 2047)
    once, half = found._step(whole, 2047)[0], found._step(whole, 1024)[0]
    assert once > 20_000, "most of it is attention"
    assert 2 * half == pytest.approx(once + 1000.0, rel=0.01)


def test_a_chunk_reads_what_came_before_it():
    """KV before the prompts is before each chunk too, and of the prompt itself half is before a chunk on average."""
    kv = pace(table(prefill_attention=AttentionCost(kv_us=1.0)), "throughput")
    without = pace(table(), "throughput")

    def kv_us(whole: Any, chunk: int) -> float:
        return kv._step(whole, chunk)[0] - without._step(whole, chunk)[0]

    whole = mixed_numbers(1, 1, 2047)
    begun = whole._replace(prefill_kv_tokens=2047 + 1000)
    assert kv_us(whole, 2047) == pytest.approx(2047.0)
    assert kv_us(whole, 1023) == pytest.approx(1023.0 + 512.0)
    assert kv_us(begun, 1023) == pytest.approx(1023.0 + 512.0 + 1000.0)


def test_a_prompt_that_has_begun_is_not_divided_further():
    """While one prompt is first in line the size doesn't fall, however little is left of it."""
    gap_first = Objective(0.0, 1.0, 1.7)
    found = pace(table(), gap_first)
    prompt, other = object(), object()
    few = Line(1, 30, 0)
    assert found.next_step(prompt, 10, few) == 2048
    assert found.next_step(prompt, 10, FULL_LINE) == 2048
    assert found.next_step(other, 10, FULL_LINE) == 512
    assert pace(table(), gap_first).most_tokens(10, Line(1, 400, 0)) == 256
    assert found.next_step(other, 10, Line(1, 400, 0)) == 512
    assert found.next_step(other, 10, few) == 2048
    # A step that has no room for whoever is first says nothing of it.
    third = object()
    assert found.next_step(third, 10, Line(0, 0, 22)) == 2048
    assert found.next_step(third, 10, FULL_LINE) == 512


def test_an_answer_stands_while_counts_stay_alike():
    """It is for all prompts of a line: asked again after some steps, or once decodes or prompts are others."""
    found, prompt, other = pace(table()), object(), object()
    assert found.held(prompt, 10, 22) is None
    assert found.next_step(prompt, 10, FULL_LINE) == 1024
    # Ten decodes are weighed as sixteen. More prompts than one step holds: whoever is first of them.
    assert [found.held(other, decodes, 22) for decodes in (10, 16, 6, 5, 17)] == [1024, 1024, 1024, None, None]
    assert [found.held(other, 10, prompts) for prompts in (43, 12, 44, 11)] == [1024, 1024, None, None]
    steps = 0
    while found.held(other, 10, 22):
        steps += 1
    assert steps == 10, "sixteen with the one that was asked for and the five above"


def test_an_answer_for_few_prompts_is_for_the_first_of_them():
    """Whoever comes behind it may be longer; and that they fit in one step says nothing of the next ones."""
    found, prompt, other = pace(table(), Objective(0.0, 1.0, 1.7)), object(), object()
    assert found.next_step(prompt, 10, Line(1, 400, 0)) == 256
    assert found.held(other, 10, 1) is None
    assert found.held(prompt, 10, 1) == 256
    assert found.next_step(other, 10, Line(1, 30, 0)) == 2048
    assert found.held(other, 10, 1) is None
    # A line that no step holds is best in whole ones by this objective, for as long.
    whole = pace(table(), "throughput")
    assert whole.next_step(prompt, 10, FULL_LINE) == whole.held(other, 10, 22) == 2048
    assert whole.next_step(prompt, 0, FULL_LINE) == 2048
    assert whole.held(prompt, 10, 22) is None


@given(st.lists(st.tuples(st.integers(1, 63), st.integers(1, 40), st.integers(1, 700)), min_size=1, max_size=60))
def test_a_step_holds_its_decodes_also_where_the_answer_is_an_older_one(steps):
    """However decodes and prompts go up and down, there is room for all decodes and a prompt token."""
    found = pace(table(host_eager=HostCost(9000.0)), "1:3", other="vllm:version=0.23")
    for decodes, prompts, tokens in steps:
        size = found.held(0, decodes, prompts)
        if size is None:
            line = in_line([(tokens, 0)] * prompts, prompts, 2048 - decodes, 64 - decodes)
            size = found.next_step(0, decodes, line)
        assert decodes < size <= SETTINGS.max_num_tokens


def test_another_limit_than_the_settings_say():
    """What a scheduler may run at most can be less than what graphs were planned for."""
    assert pace(table(), Objective(0.0, 1.0, 1.7), limit=1024, max_num_tokens=8192).most_tokens(
        10, Line(2, 1014, 9)
    ) == 512  # fmt: skip
    assert pace(table(), limit=1024, max_num_tokens=8192).most_tokens(10, Line(2, 1014, 9)) == 1024


def test_sizes_that_cannot_be_within_the_bound_are_not_weighed():
    """Each costs time in a scheduler: of so many steps even the decodes alone would take too long."""
    found = pace(table())
    asked: list[int] = []
    weigh = found._paced
    found._paced = lambda size, *rest: asked.append(size) or weigh(size, *rest)
    assert found.most_tokens(10, FULL_LINE) == 1024
    assert min(asked) >= 256


# 1.8 ms of attention for each step of ten decodes at a context of 1,000.
ATTENTION = AttentionCost(unit_us=0.18)


def test_each_further_step_reads_the_decodes_kv():
    """What graphs gain over the other policy is spent on fewer steps where each of them has attention to pay too."""
    slow = table(host_eager=HostCost(9000.0), decode_attention=ATTENTION)
    found = pace(slow, Objective(0.0, 1.0, 1.0), other="vllm:version=0.23")
    # 1,024 tokens take 3,048 us and 2,048 of vLLM's 9,000; four steps of 512 take 8,096, two of 1,024 6,096.
    assert found.most_tokens(10, FULL_LINE) == 512
    # With 1,800 us more in each, vLLM's step hides them behind the host: four take over 15,000, two 9,700.
    assert found.most_tokens(10, FULL_LINE._replace(decode_kv=10_000)) == 2048
    assert found.most_tokens(10, FULL_LINE._replace(decode_kv=5_000)) == 1024


def test_attention_of_prompts_as_long_as_they_are_is_not_hidden_behind_the_host():
    """Where one prompt fills the line, or has begun, there is less that shorter steps may spend."""
    slow = table(host_eager=HostCost(9000.0), prefill_attention=AttentionCost(unit_us=0.0002))
    found = pace(slow, Objective(0.0, 1.0, 1.0), other="vllm:version=0.23")
    room = 2038
    even = in_line([(room // 2, 0)] * 2, 22, room, 54)
    uneven = in_line([(room - 1, 0), (900, 0)], 22, room, 54)
    begun = in_line([(room - 1, 7000), (900, 0)], 22, room, 54)
    assert even.num_prompts == uneven.num_prompts == begun.num_prompts == 2
    assert [found.most_tokens(10, line) for line in (even, uneven, begun)] == [512, 1024, 2048]


def test_counts_that_differ_by_little_are_weighed_once():
    """A scheduler asks in every step, and what is weighed anew takes time: counts are rounded up to powers of two."""
    found = pace(table())
    weighed: list[int] = []
    best = found._best
    found._best = lambda *counts: weighed.append(1) or best(*counts)
    for more in range(12):
        found.most_tokens(9 + more % 7, Line(2, 1800 + more, 17 + more, 1_700_000 + more, 8000 + 9 * more))
    assert len(weighed) == 1


def test_of_sizes_that_score_alike_the_largest_is_taken():
    """Steps as long as each other, whatever they hold: fewer of them bring prompts in sooner."""
    flat = Curve((1, 4096), (1000.0, 1000.0))
    gap_alone = Objective(0.0, 1.0, 9.0)
    stepped = table(piecewise=flat, eager=LINEAR)
    assert pace(stepped, gap_alone).most_tokens(10, FULL_LINE) == 2048
    found = pace(table(piecewise=flat, eager=LINEAR), gap_alone, max_num_tokens=4096)
    # 4,096 run eagerly and take 9 ms; all that have pieces take 1.
    assert found.most_tokens(10, Line(2, 4086, 20)) == 2048


def test_what_the_other_policy_takes_is_trusted_less_five_per_cent():
    """Costs are known to some 5%: shorter steps that take just as long as the other's whole ones are too long."""

    # Two steps of 1,024 tokens take 6,088 us for these prompts, which waiting requests fill up.
    def size(other_us: float) -> int:
        return pace(table(host_eager=HostCost(other_us)), Objective(0.0, 1.0, 1.0), other="vllm:version=0.23"
                    ).most_tokens(10, FULL_LINE)  # fmt: skip

    assert size(6_500.0) == 1024
    assert size(6_250.0) == 2048


@given(
    st.integers(1, 63), st.integers(1, 30), st.integers(1, 4000), st.integers(0, 500),
    st.sampled_from(("throughput", "latency", "1:1", "1:3")), st.sampled_from(("", "vllm:version=0.23", "eager")),
)  # fmt: skip
def test_a_step_holds_its_decodes_and_a_prompt(decodes, prompts, tokens, waiting, objective, other):
    """Whatever the counts, there is room for all decodes and at least one prompt token, and never over the limit."""
    left = min(tokens, SETTINGS.max_num_tokens - decodes)
    size = pace(table(), objective, other=other).most_tokens(
        decodes, Line(min(prompts, left, 64 - decodes), left, waiting)
    )
    assert decodes < size <= SETTINGS.max_num_tokens


def test_the_line_stops_at_the_step_s_room_and_places():
    """Prompts count as far as there is room for their tokens; the rest wait."""
    begun = [(100, 7), (50, 0), (70, 0)]
    assert in_line(begun, 3, 1000, 9)[:3] == (3, 220, 0)
    assert in_line(begun, 3, 120, 9)[:3] == (2, 120, 1)
    assert in_line(begun, 3, 1000, 1)[:3] == (1, 100, 2)
    assert in_line([(100, 0)], 1, 0, 9) == Line(0, 0, 1)
    # Prompts that have nothing left to compute tell nothing of those behind them.
    assert in_line([(0, 5)] * 9, 9, 100, 20) == Line(9, 0, 0)
    # Each new token attends to those before it and to itself.
    assert in_line(begun, 3, 120, 9, 5000) == Line(2, 120, 1, 100 * 7 + 100 * 101 // 2 + 20 * 21 // 2, 5000)


def test_of_a_long_line_the_first_prompts_tell():
    """Looking at each takes time, so behind the first eight they are taken to be as long on average."""
    looked = iter([(100, 50)] * 4 + [(300, 0)] * 4 + [(10**6, 10**6)] * 90)
    some = in_line(looked, 98, 4000, 90)
    assert len(list(looked)) == 89
    assert some[:3] == (20, 4000, 78)
    eight = 4 * (100 * 50 + 100 * 101 // 2) + 4 * (300 * 301 // 2)
    assert some.pairs == eight + eight * 12 // 8
    # No more of them than there are, and than have places.
    assert in_line([(100, 0)] * 10, 10, 4000, 90)[:3] == (10, 1000, 0)
    assert in_line([(100, 0)] * 20, 20, 4000, 9)[:3] == (9, 900, 11)


def test_the_numbers_of_a_step():
    """Decodes and prompts by counts alone: the prompts' lengths are as even as they can be."""
    both = mixed_numbers(32, 2, 501)
    assert (both.num_decodes, both.num_prefills, both.total_tokens, both.total_reqs) == (32, 2, 533, 34)
    assert both.prefill_pairs == 250 * 251 // 2 + 251 * 252 // 2
    decodes = mixed_numbers(32, 0, 0)
    assert (decodes.total_tokens, decodes.total_reqs, decodes.num_prefills) == (32, 32, 0)
    prompts = mixed_numbers(0, 1, 512)
    assert (prompts.num_decodes, prompts.total_tokens, prompts.max_query_len) == (0, 512, 512)


OTHER = "vllm:version=0.23"
NOTHING: Any = None
SLOW_EAGER = table(host_eager=HostCost(9000.0))


def asked_of(found: EnginePace, first: object, line: Line = FULL_LINE) -> int:
    return found.prompt_tokens(first, 10, line.num_prompts + line.waiting, lambda: line)


def test_an_engine_s_pace_goes_by_its_costs_of_now() -> None:
    """Costs that are taken while it serves change the next answer; a prompt that was divided isn't divided again."""
    engine = Engine("auto", ladder=PIECES, settings=SETTINGS, costs=table(), objective="latency")
    found = EnginePace(engine, get_policy(OTHER))
    assert asked_of(found, "one") == 1014
    engine.take_costs(SLOW_EAGER)
    assert asked_of(found, "one") == 1014, "a new rule by which it would have 502"
    assert asked_of(found, "two") == 502
    asked: list[int] = []

    def line() -> Line:
        asked.append(1)
        return FULL_LINE

    assert [found.prompt_tokens("first", 10, 22, line) for _ in range(32)] == [502] * 32
    assert len(asked) == 2, "an answer stands for sixteen steps, and the line is made for the first of them alone"


def test_an_engine_s_pace_goes_by_its_graphs_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that is gone is no size any more; the other policy is prepared anew for other costs alone."""
    made: list[object] = []
    monkeypatch.setattr(module, "other_select", lambda *given: made.append(given) or other_select(*given))
    ladder = CaptureSizes((64,), (), (1500, 2048))
    engine = Engine(
        "piecewise", ladder=ladder, settings=SETTINGS, costs=table(), objective="latency",
        executor=SimulatedExecutor(table(), num_blocks=4096),
    )  # fmt: skip
    engine.capture()
    found = EnginePace(engine, get_policy(OTHER))
    assert asked_of(found, "one") == 1490
    [key] = [key for key in engine.registry.captured() if key.num_tokens == 1500]
    engine.registry.withdraw(key, Reason.ADDRESS_CHANGED)
    assert asked_of(found, "two") == 2038
    assert len(made) == 1
    engine.take_costs(SLOW_EAGER)
    asked_of(found, "three")
    assert len(made) == 2


def test_whoever_had_an_answer_of_others_has_no_less_later() -> None:
    """One that comes to the head of a line that an answer still stands for is divided as that says from then on."""
    found, short = pace(table(), Objective(0.0, 1.0, 1.7)), Line(1, 400, 0)
    size = found.next_step("one", 10, FULL_LINE)
    assert size == found.held("two", 10, 22) > 256
    assert found.next_step("two", 10, short) == size
    assert found.next_step("three", 10, short) == 256


class Told:
    """Stands in for a pace: notes what it is asked, and gives so many prompt tokens."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.asked: list[tuple[object, int, int, Line]] = []

    def prompt_tokens(self, first: object, num_decodes: int, num_prompts: int, line: Callable[[], Line]) -> int:
        self.asked.append((first, num_decodes, num_prompts, line()))
        return self.tokens


def ran(batch: Batch) -> StepOutputs:
    """What a step gives whose rows are sampled on the host."""
    return StepOutputs(batch.inputs.wanted, (), NOTHING, ())


def batched(limits: Settings, told: Told, num_blocks: int, lengths: Sequence[tuple[int, int]], steps: int) -> Batcher:
    """A batcher after so many steps over requests of (prompt tokens, tokens to generate)."""
    batcher = Batcher(limits, num_blocks=num_blocks, block_size=4, steps_ahead=1, pace=told)  # type: ignore[arg-type]
    for index, (prompt, output) in enumerate(lengths):
        batcher.add(Generation(index, [1] * prompt, output))
    for _ in range(steps):
        batch = batcher.next_batch()
        assert batch is not None
        batcher.complete(batch, ran(batch), lambda _: 1)
    return batcher


def test_a_batcher_tells_its_line() -> None:
    """Prompts that run and those that there are places for, and all KV; where all places decode it doesn't ask."""
    told = Told(63)
    limits = Settings(max_num_reqs=3, max_num_tokens=64)
    batched(limits, told, 100, [(40, 9)] * 5, 3)
    # 64 of the first two prompts' 80 tokens ran, and the third has the one place left; then all places are taken.
    pairs = 16 * 24 + 16 * 17 // 2 + 40 * 41 // 2
    assert told.asked == [((1, 0), 1, 4, (2, 56, 2, pairs, 41))]


def test_a_batcher_does_not_ask_where_nothing_can_come_in() -> None:
    """Without a free block no prompt can, nor in the step in which somebody gave way."""
    told = Told(8)
    batcher = batched(Settings(max_num_reqs=4, max_num_tokens=12), told, 4, [(12, 5), (8, 2)], 4)
    assert (batcher.num_preemptions, len(batcher.waiting), told.asked) == (0, 1, [])
    batcher = batched(Settings(max_num_reqs=4, max_num_tokens=16), told, 4, [(8, 8), (8, 2)], 2)
    assert (batcher.num_preemptions, len(batcher.waiting), told.asked) == (1, 1, [])
    assert batcher.next_batch() is not None
    assert [first for first, *_ in told.asked] == [(1, 1)], "a block is free in the next one"


def test_a_prompt_that_gave_way_is_another_one() -> None:
    """It is computed again with what it generated: what it was divided into before says nothing."""
    told = Told(2)
    batcher = batched(Settings(max_num_reqs=4, max_num_tokens=32), told, 7, [(8, 16), (9, 5)], 3)
    batcher._preempt(next(each for each in batcher.running if each.index == 1))
    assert batcher.next_batch() is not None
    assert [first for first, *_ in told.asked] == [(1, 1)]


@pytest.mark.parametrize("limits", [(8, 4), (2, 16), (5, 5)])
def test_a_batcher_with_a_pace_serves_all(limits: tuple[int, int]) -> None:
    """Prompts make way however little a step may hold."""
    told = Told(1)
    batcher = batched(Settings(max_num_reqs=limits[0], max_num_tokens=limits[1]), told, 9, [(9, 3), (5, 4), (7, 2)], 0)
    steps = 0
    while (batch := batcher.next_batch()) is not None:
        batcher.complete(batch, ran(batch), lambda _: 1)
        steps += 1
        assert steps < 200
    assert batcher.free_blocks == 9
    assert told.asked
