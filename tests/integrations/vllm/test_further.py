"""Sizes of graphs that are timed on the device alone."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest

from kpolicy.attention.support import Claims
from kpolicy.costs import CostTable, Curve, HostCost
from kpolicy.keys import GraphKey
from kpolicy.ladders import CaptureLadder
from kpolicy.modes import Part
from kpolicy.policies.auto import AutoPolicy
from kpolicy.policies.base import PolicyContext
from kpolicy.settings import Settings
from kpolicy_vllm.calibrate import _hosts, calibrate
from kpolicy_vllm.further import FurtherSizes, farthest_first
from kpolicy_vllm.ladder import default_sizes
from kpolicy_vllm.steps import Step, numbers_of
from kpolicy_vllm.synthetic import Rows
from kpolicy_vllm.timing import Case, Times
from tests.integrations.vllm.fake_runner import HOST_WORK_US, FakeRunner, FakeState, SimulatedClock, stand_ins
from tests.integrations.vllm.test_host import decider

LIMITS = Settings(max_num_reqs=1024, max_num_tokens=8192)
LADDER = default_sizes(LIMITS, wide=True)
KEYS = [GraphKey(Part.FULL, n, n, query_len=1) for n in LADDER.decode] + [
    GraphKey(Part.PIECEWISE, n) for n in LADDER.piecewise
]
STEEP = {448: 1.35}


def of_a_llama(
    key: GraphKey | None, tokens: int, kv: int, chunk: int, context: int, decodes: int
) -> tuple[float, float]:
    """About what a Llama of 8B took an H200, with pieces of 448 tokens as steep as those."""
    padded = tokens if key is None else key.num_tokens
    device = (4400 + 18.0 * padded) * (STEEP.get(padded, 1.0) if key is not None else 1.0) + 0.02 * kv
    host = 15_500.0 if key is None else 1_200.0 if key.part is Part.FULL else 5_700.0
    return host + 1.0 * decodes, device


class WaitingRunner(FakeRunner):
    """It hands out each step's tokens, as vLLM does without asynchronous scheduling."""

    under_way = 1

    def sample_tokens(self, grammar: Any) -> None:
        super().sample_tokens(grammar)
        self.clock.wait()


def calibrated(
    monkeypatch: Any, cost: Any = of_a_llama, seconds: float = 2.0, runner: type[FakeRunner] = FakeRunner, **more: Any
) -> tuple[CostTable, FakeState]:
    clock = SimulatedClock()
    state = FakeState(
        runner(clock, cost, max_num_seqs=1024, max_model_len=16384, num_blocks=100_000), KEYS, LIMITS, seconds
    )
    state.config.split = False
    vars(state).update(more)
    with stand_ins(monkeypatch):
        table = calibrate(state.runner, state, clock)
    assert table is not None
    return table, state


class SurprisingRunner(WaitingRunner):
    """It waits, and doesn't say so."""

    under_way = 2


@pytest.mark.parametrize("runner", [FakeRunner, WaitingRunner, SurprisingRunner])
def test_a_size_that_is_steep_is_known(monkeypatch: Any, runner: type[FakeRunner]) -> None:
    """In the default allowance, and where the runner waits for each step in a longer one."""
    seconds = 2.0 if runner is FakeRunner else 5.0
    table, state = calibrated(monkeypatch, seconds=seconds, runner=runner)
    for curve in (table.piecewise, table.full):
        assert curve.at(448) == pytest.approx(1.35 * (4400 + 18 * 448), rel=0.02)
        assert curve.at(512) == pytest.approx(4400 + 18 * 512, rel=0.02)
    assert table.piecewise.at(464) == pytest.approx(4400 + 18 * 464, rel=0.02)
    assert state.runner.clock.now() < 1.1 * seconds
    if runner is FakeRunner:
        assert table.host_piecewise.base_us == pytest.approx(5700, rel=0.05)
        assert table.host_full.base_us == pytest.approx(1200, rel=0.05)


def test_sizes_timed_alone_tell_nothing_of_the_host(monkeypatch: Any) -> None:
    """On a slow core some that would be timed whole are timed on the device alone, EAGER too."""

    def slow(*of: Any) -> tuple[float, float]:
        host, device = of_a_llama(*of)
        return 1.4 * host, device

    table, _ = calibrated(monkeypatch, slow)
    assert [each.base_us for each in (table.host_full, table.host_piecewise, table.host_eager)] == pytest.approx(
        [1.4 * 1200 + 20, 1.4 * 5700 + 20, 1.4 * 15_500 + 20], rel=0.02
    )
    assert table.host_full.req_us == pytest.approx(1.4, rel=0.02)
    assert table.step_us == pytest.approx(0.0, abs=40)
    assert table.eager.sizes[-1] >= 1024
    assert table.eager.at(1024) == pytest.approx(4400 + 18 * 1024, rel=0.02)


def steeper_in_rows(*of: Any, launching: float) -> tuple[float, float]:
    """Past 256 rows each takes nearly twice as long, as a Llama's of 8B did, and eager steps 4% more than graphs."""
    key, tokens, kv, *_, decodes = of
    padded = tokens if key is None else key.num_tokens
    device = (4400 + 11.0 * padded + 7.5 * max(0, padded - 256)) * (1.04 if key is None else 1.0) + 0.03 * kv
    host = 13_400.0 if key is None else 1_400.0 if key.part is Part.FULL else 7_100.0
    return launching * (host + 1.0 * decodes), device


def test_eager_decodes_are_timed_to_as_many_as_graphs_hold(monkeypatch: Any) -> None:
    """On a slow core too, where steps that are timed whole come to 256 rows: a line beyond those would be too low."""
    table, state = calibrated(monkeypatch, functools.partial(steeper_in_rows, launching=2.0))
    assert set(table.eager.sizes) >= {1, 8, 64, 256, 1024}
    assert table.eager.sizes[-1] == 1024
    assert table.eager.at(1024) == pytest.approx(4400 + 11 * 1024 + 7.5 * 768, rel=0.02)  # its pieces' time
    sizes = (1, 8, 64, 256)
    few = Curve(sizes, [table.eager.at(size) for size in sizes])
    assert few.at(768) < 0.95 * table.full.at(768) <= table.eager.at(768)
    made = decider(table.at_host_speed(HOST_WORK_US / 2), wide=True, level="uniform")
    for rows in (512, 768, 1000, 1024):
        assert made.entry(Step(rows, rows, rows, 1, 1)).label[0] == "full"
    assert state.runner.clock.now() < 2.2


def test_eager_decodes_that_take_the_host_longer_than_their_graph_takes_are_left(monkeypatch: Any) -> None:
    """Even where the core was slow just then: the time is for graphs."""
    _, state = calibrated(monkeypatch, functools.partial(steeper_in_rows, launching=4.0))
    assert (("eager", 1024), 1024, 1024) not in state.runner.ran


def in_tiles(key: GraphKey | None, *rest: int, launching: float = 1.0) -> tuple[float, float]:
    """Times rise by the 384 tokens, so that the slope between the last two sizes says little of what comes.

    Decodes cost besides, of which there are as many as tokens in the longest eager step that is timed.
    """
    host, _ = of_a_llama(key, *rest)
    padded = rest[0] if key is None else key.num_tokens
    return launching * host, 4400 + 6.0 * padded + 14.0 * 384 * -(-padded // 384) + 0.02 * rest[1] + 1.5 * rest[-1]


@pytest.mark.parametrize("launching", [1.0, 1.3, 2.0])
def test_no_padded_graph_seems_cheaper_than_its_kernels_without_padding(monkeypatch: Any, launching: float) -> None:
    """Whatever was timed in the two seconds: sizes end at other tokens than eager steps, and far below the largest."""
    timed, _ = calibrated(monkeypatch, functools.partial(in_tiles, launching=launching))
    assert timed.eager.sizes[-1] < timed.piecewise.sizes[-1] < 2048
    made = decider(timed, wide=True, level="uniform")
    table = made.state.costs
    assert table is not None
    sizes = [key.num_tokens for key in KEYS if key.part is Part.PIECEWISE]
    for tokens in range(513, 4097):
        padded = next(size for size in sizes if size >= tokens)
        assert table.eager.at(tokens) <= table.piecewise.at(padded), tokens
    for tokens in (1122, 1300, 1600, 2008, 2600, 3500):
        assert made.entry(Step(tokens, 2, 1)).label == ("eager", "eager_is_cheaper")


@pytest.mark.parametrize(("requests", "query_len"), [(768, 1), (300, 1), (150, 4)])
def test_the_most_eager_decodes_are_those_of_the_largest_graph(monkeypatch: Any, requests: int, query_len: int) -> None:
    """Whatever their number: a chunk of more tokens has no rows of that many."""
    limits = Settings(max_num_reqs=requests, max_num_tokens=8192, num_speculative_tokens=query_len - 1)
    clock, tokens = SimulatedClock(), requests * query_len
    keys = [GraphKey(Part.FULL, query_len * n, n, query_len=query_len) for n in (1, 64, requests)]
    keys += [GraphKey(Part.PIECEWISE, n) for n in (16, 512, 1024)]
    runner = FakeRunner(clock, of_a_llama, max_num_seqs=requests, max_model_len=16384, num_blocks=100_000)
    state = FakeState(runner, keys, limits, 20.0)
    with stand_ins(monkeypatch):
        table = calibrate(runner, state, clock)
    assert table is not None
    assert (("eager", tokens), tokens, requests) in runner.ran
    assert tokens in table.eager.sizes


def test_what_launching_takes_is_of_whole_steps() -> None:
    """A time of the device alone says nothing of the host, neither of its step nor of a row."""
    whole, alone = (Case(GraphKey(Part.FULL, n, n, query_len=1), Rows(n, 64)) for n in (8, 512))
    whole.times = [Times(130.0, 100.0, 60.0, 0), Times(0.0, 0.0, 55.0, 0)]
    alone.times = [Times(0.0, 0.0, 900.0, 0)]
    assert (whole.host_us(), whole.best().device) == (100.0, 55.0)
    assert _hosts([whole, alone]) == [HostCost(100.0)]


def test_auto_passes_over_a_steep_size(monkeypatch: Any) -> None:
    """Decodes and prompts that it would hold go in a larger graph; those that a smaller one holds, in that."""
    table, _ = calibrated(monkeypatch)
    claims = Claims.at_level("uniform", piecewise=True)
    context = PolicyContext(claims=claims, ladder=CaptureLadder(KEYS), costs=table, settings=LIMITS)
    select = AutoPolicy(forms=()).compile(context).select

    def size(step: Step) -> int:
        (launch,) = select(*numbers_of(step, 1)).launches
        assert launch.key is not None
        return launch.key.num_tokens

    assert size(Step(445, 9, 8)) == size(Step(440, 440, 440, 1, 1)) == 464
    assert size(Step(410, 9, 8)) == 416
    assert size(Step(380, 380, 380, 1, 1)) == 384


def test_without_time_for_them_they_are_left_to_the_curve(monkeypatch: Any) -> None:
    table, state = calibrated(monkeypatch, seconds=0.8)
    assert state.runner.clock.now() < 1.2
    assert table.piecewise.at(512) > table.piecewise.at(64)


def test_what_was_late_once_is_not_steep(monkeypatch: Any) -> None:
    """A size that seems steep is timed once more, and the quicker time holds."""
    rng, seen = random.Random(1), set[int]()  # noqa: S311 - a fixed sequence

    def hindered(key: Any, *rest: Any) -> tuple[float, float]:
        host, device = of_a_llama(key, *rest)
        first = isinstance(key, GraphKey) and key.num_tokens not in seen and key.num_tokens != 448
        if first and key.part is Part.PIECEWISE and not rest[-1]:
            seen.add(key.num_tokens)
            device *= 1 + rng.random()
        return host, device

    table, _ = calibrated(monkeypatch, hindered, seconds=6.0)
    for size in (144, 272, 400, 576, 960):
        assert table.piecewise.at(size) == pytest.approx(4400 + 18 * size, rel=0.06)


def test_a_step_that_the_device_came_to_early_is_not_timed_so(monkeypatch: Any) -> None:
    """Its host was held up while it launched, and the device waited for it."""

    def held_up(key: Any, *rest: Any) -> tuple[float, float]:
        host, device = of_a_llama(key, *rest)
        return host + (60_000.0 if isinstance(key, GraphKey) and key == GraphKey(Part.PIECEWISE, 432) else 0.0), device

    table, _ = calibrated(monkeypatch, held_up, seconds=6.0)
    assert table.piecewise.at(432) < 1.3 * (4400 + 18 * 432)
    assert table.piecewise.at(464) == pytest.approx(4400 + 18 * 464, rel=0.05)


def test_ranks_time_the_same_ones(monkeypatch: Any) -> None:
    """A rank runs what rank 0 says, whatever it was late for itself."""
    _, first = calibrated(monkeypatch)
    told = iter(first.broadcasts)

    def slower(*of: Any) -> tuple[float, float]:
        host, device = of_a_llama(*of)
        return 2.5 * host, device

    _, second = calibrated(monkeypatch, slower, broadcast=lambda _: next(told))
    assert second.runner.ran == first.runner.ran


def sizes(others: FurtherSizes, places: list[int]) -> list[int]:
    """Tokens of the steps at these places."""
    return [case.tokens for case in others.cases(places)]


def test_those_with_a_larger_one_near_come_first_the_farthest_from_any_before_others() -> None:
    assert farthest_first([2, 4, 8, 64], [1, 16]) == [4, 64, 2, 8]

    def case(tokens: int, *times: Times) -> Case:
        made = Case(GraphKey(Part.PIECEWISE, tokens), Rows(0, 0, tokens))
        made.times = list(times)
        return made

    timed = [case(16, Times(900.0, 800.0, 100.0, 0)), case(1024, Times(6500.0, 700.0, 6400.0, 0)), case(4096)]
    others = FurtherSizes(timed, [*timed, *map(case, (32, 36, 256, 480, 512, 560))])
    assert others.lacking
    assert others.host_us() == 750.0
    assert others.expected_us(case(520)) == pytest.approx(3250.0)
    # Of 32 tokens the host's 750 us hide the device's; of the others no larger one is near, and 4,096 wasn't come to.
    assert sizes(others, others.untimed()) == [512, 480, 32, 256, 4096, 560, 36]
    assert sizes(others, others.untimed([36, 560])) == [560, 36, 512, 480, 32, 256, 4096]
    assert not FurtherSizes(timed[:2], timed[:2]).lacking
    assert not FurtherSizes(timed[2:], timed[2:]).lacking


def test_a_size_is_steep_where_a_larger_one_is_quicker_by_more_than_noise() -> None:
    """One that was timed whole isn't timed again here."""
    cases = [Case(GraphKey(Part.PIECEWISE, n), Rows(0, 0, n)) for n in (16, 32, 48, 64, 80)]
    for each, us in zip(cases, (500.0, 700.0, 610.0, 605.0, 600.0), strict=True):
        each.times = [Times(0.0, 0.0, us, 0)]
    kind = FurtherSizes(cases[:2], cases)
    assert sizes(kind, kind.steep()) == [32]
    cases[1].times.append(Times(900.0, 800.0, 700.0, 0))
    assert kind.steep() == []
