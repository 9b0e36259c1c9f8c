"""Calibration where the host itself runs what it launches, on a simulated clock: a slow second turns no decision."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from kpolicy.costs import AttentionCost, CostTable, Curve, HostCost
from kpolicy.decision import Decision, Launch
from kpolicy.engine import Engine
from kpolicy.executors.calibrate import Calibration, bench
from kpolicy.keys import GraphKey
from kpolicy.ladders import CaptureSizes
from kpolicy.modes import Mode, Part, Rows
from kpolicy.registry import GraphRegistry
from kpolicy.settings import Objective, Settings
from kpolicy.shapes import BatchShape

SETTINGS = Settings(max_num_reqs=32, max_num_tokens=256)
SIZES = CaptureSizes((1, 2, 4, 8, 16, 32), (16, 64, 256), (16, 32, 64, 256))
SLOW = 2.5
# As two cores took, with a model of 4.8 million parameters; pieces are as quick as a whole graph, or hardly slower.
TRUE = CostTable(
    version="the host", measured=True,
    full=Curve(SIZES.decode, [4600.0, 5500.0, 5800.0, 6100.0, 7200.0, 8900.0]),
    mixed=Curve(SIZES.mixed, [7200.0, 12_400.0, 32_400.0]),
    piecewise=Curve(SIZES.piecewise, [7300.0, 9000.0, 12_500.0, 32_500.0]),
    eager=Curve([1, 4, 16, 64, 256], [6300.0, 7800.0, 10_000.0, 15_000.0, 36_000.0]),
    decode_attention=AttentionCost(unit_us=0.7), prefill_attention=AttentionCost(unit_us=0.3),
    host_full=HostCost(0.0), host_piecewise=HostCost(0.0), host_eager=HostCost(0.0),
)  # fmt: skip


class Host:
    """An executor whose steps take the host what a table says, as many times as long as `slower` says of that time.

    Halves beside each other take the share that `beside` says of the time at which they begin.
    """

    name = "host"
    host_runs = True

    def __init__(
        self, slower: Callable[[float], float], table: CostTable = TRUE, beyond_us: float = 0.0,
        beside: Callable[[float], float] = lambda _now: TRUE.overlap_cost,
    ) -> None:  # fmt: skip
        self.captured = frozenset(keys())
        self.launcher = SimpleNamespace(adapter=self)
        self.now = 0.0
        self.ran: list[tuple[Any, int]] = []
        self._slower, self._table, self._beyond_us, self._beside = slower, table, beyond_us, beside

    def perf_counter(self) -> float:
        return self.now / 1e6

    def run(self, decision: Decision, inputs: Any) -> Any:
        numbers = inputs.numbers
        table = attrs.evolve(self._table, overlap_cost=self._beside(self.perf_counter()))
        us = table.cost(decision.launches, numbers).device_us
        # KV that leaves the caches takes more time a token.
        us += self._beyond_us * max(numbers.decode_kv_tokens - 8192, 0)
        self.now += us * self._slower(self.perf_counter())
        self.ran.append((decision.launches, len(inputs.token_ids)))
        return SimpleNamespace(ready=[], cycle_us=us)


def keys() -> list[GraphKey]:
    return [
        *(GraphKey(Part.FULL, size, size, query_len=1) for size in SIZES.decode),
        *(GraphKey(Part.FULL, size, min(size, SETTINGS.max_num_reqs)) for size in SIZES.mixed),
        *(GraphKey(Part.PIECEWISE, size) for size in SIZES.piecewise),
    ]


def calibrated(monkeypatch: pytest.MonkeyPatch, host: Host, allowance_s: float) -> CostTable:
    monkeypatch.setattr(bench, "time", host)
    registry = GraphRegistry()
    registry.plan(keys())
    for key in keys():
        registry.capture(key, bytes=1, seconds=0.1, streams=0, graphs=1, pool=f"host/{key.part.value}", handle=None)
    model: Any = SimpleNamespace(vocab=100, pad_slot=32_768, num_blocks=2048, block_size=16, max_model_len=4096)
    calibration = Calibration(host, registry, model, SETTINGS)
    calibration.measure(allowance_s)
    return calibration.table("found")


def decode_modes(costs: CostTable) -> set[Mode]:
    """How `auto` runs decode rows of every number, over short and long KV."""
    engine = Engine(
        "auto", attention="mixed", ladder=SIZES, settings=SETTINGS, costs=attrs.evolve(costs, measured_on="")
    )
    return {engine.decide(BatchShape.decode(rows, rows * kv)).mode for rows in range(1, 33) for kv in (64, 512, 2048)}


def divided(costs: CostTable) -> bool:
    """Whether `auto` divides most steps that a few decode rows and a prompt chunk fill, over usual KV.

    It may delay the prompt for several decode steps, as it doesn't by default: those are what it divides for here.
    """
    engine = Engine(
        "auto", attention="mixed", ladder=SIZES, settings=SETTINGS, costs=attrs.evolve(costs, measured_on=""),
        objective=Objective(1.0, 0.0, first_token_limit=1.25),
    )  # fmt: skip
    shapes = [
        BatchShape(
            decodes=[(1, rows)], prefills=[(256 - rows, context)], decode_kv_tokens=1024 * rows, max_decode_steps=8
        )
        for rows in range(3, 9)
        for context in (0, 512)
    ]
    return sum(engine.decide(shape).mode is Mode.SPLIT for shape in shapes) > len(shapes) / 2


def taken_for(share: float, seed: int) -> Callable[[float], bool]:
    """Whether others have a core at that time: in turns of 20 to 200 ms, that share of them."""
    drawn = random.Random(seed)  # noqa: S311
    turns = [(0.0, False)]
    while turns[-1][0] < 60:
        turns.append((turns[-1][0] + drawn.uniform(0.02, 0.2), drawn.random() < share))
    return lambda now: next(taken for at, taken in reversed(turns) if at <= now)


def noisy(seed: int, sigma: float) -> Callable[[float], float]:
    drawn = random.Random(seed)  # noqa: S311
    return lambda _now: drawn.lognormvariate(0, sigma)


def test_a_quiet_host_gives_the_table_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the microsecond, with nothing for the host's own launches."""
    found = calibrated(monkeypatch, Host(lambda _now: 1.0), 60.0)
    for name in ("full", "mixed", "piecewise", "eager"):
        assert getattr(found, name).us == pytest.approx(getattr(TRUE, name).us), name
    assert found.decode_attention.unit_us == pytest.approx(0.7)
    assert (found.step_us, found.both_us, found.host_piecewise) == (0.0, (0.0, 0.0), HostCost(0.0))


@pytest.mark.parametrize(
    ("begins_s", "allowance_s"),
    [*((at, 10.0) for at in (0.0, 0.15, 0.3, 0.6, 1.5, 4.0, 8.9)), *((at, 1.0) for at in (0.0, 0.3, 0.45, 0.6, 0.8))],
)
def test_a_slow_second_turns_no_decode(monkeypatch: pytest.MonkeyPatch, begins_s: float, allowance_s: float) -> None:
    """Whenever it begins all decodes replay whole graphs, also where one second is all that there is.

    Of that one it may be the whole; but where it begins after the smaller sizes and lasts till the end, larger ones
    have no other samples.
    """
    speed = noisy(5, 0.04)
    host = Host(lambda now: speed(now) * (SLOW if begins_s <= now < begins_s + 1 else 1.0))
    assert decode_modes(calibrated(monkeypatch, host, allowance_s)) == {Mode.FULL}


@pytest.mark.parametrize("seed", range(6))
def test_a_busy_neighbour_leaves_the_curves(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Up to three times as long for a tenth of a second to a whole one, half of the time: within a tenth of the truth.

    All sizes may be off alike by the speed that the host mostly had.
    """
    drawn, turns = random.Random(seed), [(0.0, 1.0)]  # noqa: S311
    while turns[-1][0] < 60:
        turns.append((turns[-1][0] + drawn.uniform(0.1, 1.0), 1.0 if len(turns) % 2 else drawn.uniform(1.2, 3.0)))
    speed = noisy(seed, 0.03)
    host = Host(lambda now: speed(now) * next(slow for at, slow in reversed(turns) if at <= now))
    found = calibrated(monkeypatch, host, 10.0)
    assert decode_modes(found) == {Mode.FULL}
    times = [mine / true for mine, true in zip(found.full.us, TRUE.full.us, strict=True)]
    assert max(times) / min(times) < 1.15, times


@pytest.mark.parametrize(("share", "most"), [(0.05, 12), (0.7, 1)])
def test_steps_are_divided_where_serving_has_two_cores(
    monkeypatch: pytest.MonkeyPatch, share: float, most: int
) -> None:
    """Whenever it is measured: where others mostly have one of the two, the moments in which they don't aren't serving.

    Beside each other halves cost 0.4 of the shorter one with two cores, and 1.2 with one, as two shared cores took. Of
    12 calibrations 6 divided steps where others had a core, as the quicker samples told it.
    """

    def calibrate(seed: int) -> CostTable:
        speed, taken = noisy(seed, 0.06), taken_for(share, seed)
        slower: Callable[[float], float] = lambda now: speed(now) * (1.2 if taken(now) else 1.0)  # noqa: E731
        return calibrated(monkeypatch, Host(slower, beside=lambda now: 1.2 if taken(now) else 0.4), 10.0)

    found = sum(divided(calibrate(seed)) for seed in range(12))
    assert found == most if most > 1 else found <= most


def test_pieces_that_are_cheaper_beyond_chance_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """FULL has the preference, not the last word: pieces of 16 at 5 ms beat 6 to 7 ms, on a host as noisy."""
    cheap = attrs.evolve(TRUE, piecewise=Curve(SIZES.piecewise, [5000.0, 6500.0, 12_500.0, 32_500.0]))
    modes = decode_modes(calibrated(monkeypatch, Host(noisy(2, 0.04), cheap), 10.0))
    assert modes == {Mode.FULL, Mode.PIECEWISE}


def test_kv_beyond_the_caches_leaves_dense_work_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """32 rows over 1,024 tokens take half as much again for each: 8 rows' dense work isn't cheaper for it."""
    found = calibrated(monkeypatch, Host(lambda _now: 1.0, beyond_us=0.5), 60.0)
    assert found.decode_attention.unit_us > 1.0
    assert found.full.us == pytest.approx(TRUE.full.us, rel=0.12)
    assert sorted(found.full.us) == list(found.full.us)


def test_short_steps_are_sampled_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of decode rows more than twice as often as long prompts, within the allowance."""
    host = Host(noisy(3, 0.05))
    calibrated(monkeypatch, host, 6.0)
    assert 6.0 < host.now / 1e6 < 6.5
    two, most = ((Launch(Rows.ALL, GraphKey(Part.FULL, 2, 2, query_len=1)),), 2), ((Launch(Rows.ALL, None),), 256)
    # The longest runs eagerly over its own KV, over none, and after a context.
    long = [launches for launches, tokens in host.ran if (launches, tokens) == most]
    assert host.ran.count(two) >= 2 * (len(long) // 3)


def test_a_short_allowance_takes_what_is_compared_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second: graphs of 16 and EAGER are sampled twice each, and no two samples of one follow each other."""
    host = Host(noisy(3, 0.05))
    calibrated(monkeypatch, host, 0.5)
    at = [i for i, (launches, tokens) in enumerate(host.ran) if tokens == 16]
    assert max(at) - min(at) == len(at) - 1, "all of them together"
    ran = [host.ran[i][0] for i in at]
    assert all(ran.count(each) >= 2 for each in ran)
    assert len(set(ran)) == 4
    assert all(one != other for one, other in itertools.pairwise(ran))


def test_sizes_are_taken_together_up_to_the_next_power_of_two() -> None:
    """Graphs of 16 and 24, then of 32, those for later after all of them; and on a device wave by wave, as they are."""
    host = Host(lambda _now: 1.0)
    model: Any = SimpleNamespace(vocab=100, pad_slot=32_768, num_blocks=2048, block_size=16, max_model_len=4096)

    def order() -> list[list[int]]:
        timed = bench.Bench(host, model)
        far, usual, finer, later, thorough = bench.Wave
        for size, wave in ((32, far), (16, finer), (24, later), (24, usual), (20, later)):
            timed.add([Launch(Rows.ALL, GraphKey(Part.PIECEWISE, size))], timed.rows(0, 0, size), wave=wave)
            timed.add([Launch(Rows.ALL, None)], timed.rows(0, 0, size), wave=wave)
        timed.add([Launch(Rows.ALL, None)], timed.rows(0, 0, 8), wave=thorough)
        return timed._smallest_first()

    # One that is to be timed later and sooner is one case, and comes sooner.
    assert order() == [[2, 3, 4, 5], [0, 1], [6, 7]]
    host.host_runs = False
    assert order() == [[0, 1, 6, 7, 2, 3, 8, 9, 4, 5]]


def test_a_short_allowance_is_for_more_samples_of_what_decisions_rest_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is thorough comes after one round of the rest, and has samples in each from there on."""
    model: Any = SimpleNamespace(vocab=100, pad_slot=32_768, num_blocks=2048, block_size=16, max_model_len=4096)
    host = Host(lambda _now: 1.0)
    host.host_runs = False
    timed = bench.Bench(host, model)
    ran: list[int] = []

    def run(case: int, *_: Any) -> None:
        ran.append(case)
        timed._times[case].append(bench._Times(1.0, 1.0, 1.0))

    monkeypatch.setattr(timed, "_first", run)
    monkeypatch.setattr(timed, "_sample", run)
    usual, thorough = (
        timed.add([Launch(Rows.ALL, None)], timed.rows(0, 0, size), wave=wave)
        for size, wave in ((64, bench.Wave.LATER), (8, bench.Wave.THOROUGH))
    )
    assert timed.measure(60.0)
    assert ran[: bench.THOROUGH_ROUNDS] == [usual] * bench.THOROUGH_ROUNDS
    assert ran[bench.THOROUGH_ROUNDS] == thorough
    assert ran.count(usual) == bench.MOST_ROUNDS
    # Its first run and each round's from there on.
    assert ran.count(thorough) == 1 + bench.MOST_ROUNDS - bench.THOROUGH_ROUNDS


def test_what_is_measured_later_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table made in the midst of it is of the samples so far, and a case with more of them is known better."""
    monkeypatch.setattr(bench, "time", host := Host(noisy(7, 0.1)))
    model: Any = SimpleNamespace(vocab=100, pad_slot=32_768, num_blocks=2048, block_size=16, max_model_len=4096)
    timed = bench.Bench(host, model)
    cases = [timed.add([Launch(Rows.ALL, None)], rows) for rows in (timed.rows(1, 64), timed.rows(0, 0, 256))]
    timed.measure(0.15)
    before = [timed.us(case) for case in cases]
    timed.measure(0.3)
    assert [timed.us(case) for case in cases] != before
    short, long = (len(each["us"]) for each in timed.samples())
    assert short > 2 * long
    assert timed.error(cases[1]) / timed.error(cases[0]) == pytest.approx(math.sqrt(short / long))
