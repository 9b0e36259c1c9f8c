"""Calibration on a machine of known costs, whose clock is simulated: the table that it was made of comes back."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from kpolicy.attention.support import Claims
from kpolicy.costs import AttentionCost, CostTable, Curve, HostCost
from kpolicy.decision import Decision, Launch
from kpolicy.executors.calibrate import Calibration, bench
from kpolicy.executors.calibrate.rest import by_size
from kpolicy.executors.calibrate.table import ALIKE, NOISE, Kinds, _not_above, _steady, _with_untimed
from kpolicy.executors.calibrate.ties import Point
from kpolicy.host_speed import launching_takes
from kpolicy.keys import GraphKey
from kpolicy.kv_span import KvSpan
from kpolicy.ladders import CaptureLadder, CaptureSizes
from kpolicy.modes import Part, Rows
from kpolicy.policies import PolicyContext, get_policy
from kpolicy.profiles import load_profile
from kpolicy.registry import GraphRegistry
from kpolicy.settings import Objective, Settings
from kpolicy.shapes import BatchShape
from kpolicy.simulate.step_costs import StepCosts
from kpolicy.step_effects import StepEffects

SETTINGS = Settings(max_num_reqs=64, max_num_tokens=512)
DECODES, PIECES, MIXED = (1, 8, 32, 64), (8, 64, 128, 448, 512), (64, 512)
TRUE = CostTable(
    version="the machine", measured=True,
    full=Curve(DECODES, [900.0, 1000.0, 1100.0, 1300.0]),
    mixed=Curve([64, 512], [1370.0, 3070.0]),
    # Less at 64 than at 8: step time isn't monotone in size, and a table keeps that.
    piecewise=Curve(PIECES, [1500.0, 1400.0, 1600.0, 3100.0, 3500.0]),
    eager=Curve([1, 4, 16, 64, 256, 512], [1700.0, 1760.0, 1900.0, 2100.0, 2900.0, 4000.0]),
    decode_attention=AttentionCost(base_us=90.0, row_us=0.8, unit_us=0.004),
    prefill_attention=AttentionCost(base_us=40.0, unit_us=0.0006, kv_us=0.2),
    host_full=HostCost(150.0, 0.5), host_piecewise=HostCost(1000.0, 2.0, 400.0, 300.0),
    host_eager=HostCost(9000.0, 2.0, 400.0, 300.0), step_us=120.0, overlap_cost=0.3, decode_slowdown=1.6,
    both_us=(0.0, 45.0),
    effects=StepEffects(
        warm_host_share=(0.75, 0.9), eager_new_us=700.0, padding_share=(0.25, 1.0), one_row_overlap=0.15,
        one_row_slowdown=1.9, many_rows_overlap=0.5, many_rows_slowdown=1.4,
        outlasted_share=((64, 0.4), (128, 0.7), (448, 1.0)),
    ),
)  # fmt: skip
WORK_US = 33.0
PAD_SLOT = 65_536
LONGEST = 8192
TOGETHER = 0.1
"""Of the shorter side, where host and device are both busy for long: what of it doesn't overlap"""


class Machine:
    """An executor whose launches take what `TRUE` says, and the clock that tells so."""

    name = "machine"

    def __init__(
        self, keys: list[GraphKey], *, together: float = 0.0, longest: int = LONGEST, stalls: int = 0,
        slow: float = 1.0, noise: Callable[[float], float] = lambda _now: 1.0, spared: float = 0.0,
    ) -> None:  # fmt: skip
        self.captured = frozenset(keys)
        self.launcher = SimpleNamespace(adapter=self)
        self.host_runs = False
        self.now = self.busy = 0.0
        self.behind = 0
        self._together = together
        self._longest = longest
        self._stalls = stalls
        self._slow = slow
        self._noise = noise
        self._spared = spared
        self._runs = 0
        self._last: Any = None
        self._sizes: set[int] = set()

    def perf_counter(self) -> float:
        return self.now / 1e6

    @property
    def slower(self) -> float:
        """How many times slower the host's core is just now: it changes every two hundred steps, and half are slow."""
        return self._slow if random.Random(self._runs // 200).random() < 0.45 else 1.0  # noqa: S311

    def host_work_us(self) -> float:
        return WORK_US * self.slower

    def occupy(self, us: float) -> None:
        self.busy = max(self.busy, self.now) + us

    def run(self, decision: Decision, inputs: Any) -> Any:
        assert max(inputs.kv_lens) <= self._longest, "no request of the model is so long"
        self._runs += 1
        costs, size = StepCosts(TRUE), len(inputs.token_ids)
        like = decision.mode, inputs.numbers.num_prefills > 0
        if self._last == like:
            # The device's wait for the first pieces isn't this machine's.
            costs = attrs.evolve(StepCosts.in_a_row(TRUE), first_pieces_us=0.0)
        if decision.launches[0].key is None and size not in self._sizes:
            costs = costs.new_sizes()
        if decision.launches[0].key is None:
            self._sizes.add(size)
        alone = self.busy <= self.now
        # Behind other work the host launches ahead of the device.
        costs = attrs.evolve(costs, leads=alone)
        cost = costs.cost(decision.launches, inputs.numbers)
        if self._stalls and self._runs % self._stalls == 0:
            self.now += 50_000.0
        device = cost.device_us
        if inputs.slot_mapping[0] != PAD_SLOT:
            # One prompt, on its own KV.
            device *= 1 - self._spared
        alone = self.busy <= self.now
        self.behind += not alone
        # Who waits for a device that was kept busy finds the caches cold.
        self._last = like if alone else None
        slower = launching_takes(self.slower) * self._noise(self.perf_counter())
        host_us, self._rest_us = cost.host_us * slower, TRUE.step_us * slower
        begun, self.now = max(self.busy, self.now), self.now + host_us
        # Behind other work nothing is seen of the host, as long as it is done before that.
        lasts = max(device, host_us) + self._together * min(device, host_us) if alone else device
        self.busy = begun + lasts
        cycle_us = lasts + self._rest_us * alone
        ready = [SimpleNamespace(wait=self._wait, us=lasts)]
        if len(decision.launches) > 1:
            decodes_us = costs.decodes_ready_us(decision.launches, inputs.numbers, cost.cycle_us) - TRUE.step_us
            ready.insert(0, SimpleNamespace(wait=self._wait, us=decodes_us))
        return SimpleNamespace(ready=ready, cycle_us=cycle_us)

    def _wait(self) -> None:
        self.now = max(self.now, self.busy) + self._rest_us


def keys() -> list[GraphKey]:
    return [
        *(GraphKey(Part.FULL, size, size, query_len=1) for size in DECODES),
        *(GraphKey(Part.FULL, size) for size in MIXED),
        *(GraphKey(Part.PIECEWISE, size) for size in PIECES),
    ]


def calibrated(
    monkeypatch: pytest.MonkeyPatch, *, allowance_s: float = 60.0, sliced: bool = False, longest: int = LONGEST,
    **options: Any,
) -> tuple[CostTable, Machine]:  # fmt: skip
    machine, registry = Machine(keys(), longest=longest, **options), GraphRegistry()
    monkeypatch.setattr(bench, "time", machine)
    monkeypatch.setattr(bench, "host_work_us", machine.host_work_us)
    registry.plan(keys())
    for key in keys():
        full = key.part is Part.FULL
        registry.capture(
            key, bytes=5000 if full else 800, seconds=0.08 if full else 0.02, streams=0, graphs=1 if full else 25,
            pool="machine/full" if full else "machine/piecewise", handle=None,
        )  # fmt: skip
    # A graph of another executor in the registry has no times here.
    other = GraphKey(Part.FULL, 33, 33, query_len=1)
    registry.plan([other])
    registry.capture(other, bytes=10**9, seconds=50.0, streams=0, graphs=1, pool="another", handle=None)
    model: Any = SimpleNamespace(vocab=100, pad_slot=PAD_SLOT, num_blocks=4096, block_size=16, max_model_len=longest)
    if options.get("spared"):
        model.kv_untouched, model.clear_kv = (lambda _slots: True), (lambda _slots: None)
    calibration = Calibration(machine, registry, model, SETTINGS)
    with calibration.undisturbed():
        while not calibration.measure(allowance_s) and sliced:
            # Requests are served in between.
            machine._last = None
    return calibration.table("found"), machine


def test_the_whole_table_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Device time by mode and size, attention by kind, host time by mode, overlap, and what captures took."""
    found, machine = calibrated(monkeypatch)
    assert machine.behind, "device times are taken behind other work"
    assert found.measured
    for name in ("full", "mixed", "piecewise", "eager"):
        assert getattr(found, name).sizes == getattr(TRUE, name).sizes
        assert getattr(found, name).us == pytest.approx(getattr(TRUE, name).us, rel=1e-6)
    for name in ("decode_attention", "prefill_attention", "host_full", "host_piecewise", "host_eager"):
        mine, true = getattr(found, name), getattr(TRUE, name)
        assert [getattr(mine, each.name) for each in mine.__attrs_attrs__] == pytest.approx(
            [getattr(true, each.name) for each in true.__attrs_attrs__], rel=1e-6, abs=1e-6
        ), name
    assert (found.step_us, found.overlap_cost) == (pytest.approx(TRUE.step_us), pytest.approx(TRUE.overlap_cost))
    assert found.decode_slowdown == pytest.approx(TRUE.decode_slowdown)
    for name in ("one_row_overlap", "one_row_slowdown", "many_rows_overlap", "many_rows_slowdown"):
        assert getattr(found.effects, name) == pytest.approx(getattr(TRUE.effects, name)), name
    # The graph of 64 holds the longest's 32nd, and that of 128 its quarter.
    told = found.effects.outlasted_share
    assert told is not None
    assert [each for point in told for each in point] == pytest.approx([64, 0.4, 128, 0.7, 448, 1.0])
    assert found.both_us == pytest.approx(TRUE.both_us, abs=1e-6)
    assert found.effects.warm_host_share == pytest.approx(TRUE.effects.warm_host_share)
    assert found.effects.eager_new_us == pytest.approx(TRUE.effects.eager_new_us)
    assert found.effects.padding_share == pytest.approx(TRUE.effects.padding_share)
    assert found.capture_us == pytest.approx((80_000.0, 20_000.0))
    assert (found.graph_bytes, found.graph_pieces) == ((5000, 800), (1, 25))
    # Decode rows of the largest graph over the usual KV, and the longest chunk behind a long context.
    assert found.kv_span == KvSpan(decode_row=1024, decode_step=64 * 1024, prefill=512 + 4096)
    assert found.host_work_us == WORK_US


def test_pieces_of_prompts_seem_no_cheaper_than_smaller_ones_of_decode_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where own KV spares a prompt a sixth, as in a mixture of experts, a larger size that is timed by one isn't taken.

    What was measured stays as it is. Decode rows don't leave FULL for pieces by it.
    """
    found, _ = calibrated(monkeypatch, spared=1 / 6)
    pieces, deciding = found.piecewise, found.deciding
    smaller, larger = 64, 128
    assert pieces.at(larger) < pieces.at(smaller) / 1.03, "128 tokens are timed by a prompt, 64 by decode rows"
    assert deciding.piecewise.at(smaller) == pytest.approx(pieces.at(larger)), "the smaller one has the preference"
    assert deciding.full.at(smaller) <= deciding.piecewise.at(smaller)
    assert deciding.piecewise.at(448) == pytest.approx(pieces.at(448)), "both are timed by prompts"

    without, _ = calibrated(monkeypatch)
    assert without.deciding.piecewise.us == pytest.approx(TRUE.piecewise.us, rel=1e-6)


def test_sizes_are_compared_by_what_own_kv_spares() -> None:
    """A larger size counts as cheaper once it is by more than that, and among sizes of one kind by `NOISE`."""
    us = {64: 1000.0, 128: 980.0, 256: 1010.0, 512: 850.0}
    assert _steady(us, ALIKE.noise).us == (1000.0, 980.0, 1010.0, 850.0)
    assert _steady(us, Kinds(256, 0.1).noise).us == (1000.0, 980.0, 1010.0, 850.0)
    assert _steady(us, Kinds(256, 0.17).noise).us == (850.0, 850.0, 850.0, 850.0)
    assert _steady(us, Kinds(64, 0.17).noise).us == (850.0, 980.0, 1010.0, 850.0)
    assert Kinds(256, 0.99).loose < 1.05, "no more than half is believed"


def test_a_host_whose_speed_changes_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In almost half of the steps the fixed work takes 1.6 times as long; the table is the quick host's."""
    found, _ = calibrated(monkeypatch, slow=1.6)
    assert found.host_work_us == WORK_US
    assert found.step_us == pytest.approx(TRUE.step_us, rel=0.01)
    for name in ("host_full", "host_piecewise", "host_eager"):
        assert getattr(found, name).base_us == pytest.approx(getattr(TRUE, name).base_us, rel=0.01), name
    assert found.eager.us == pytest.approx(TRUE.eager.us, rel=0.01)


def test_a_host_that_stalls_now_and_then_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every thirteenth step takes 50 ms more; the table is that of the others."""
    found, _ = calibrated(monkeypatch, stalls=13)
    for name in ("full", "piecewise", "eager"):
        assert getattr(found, name).us == pytest.approx(getattr(calibrated(monkeypatch)[0], name).us, rel=0.01)
    assert found.host_eager.base_us == pytest.approx(TRUE.host_eager.base_us, rel=0.01)
    assert found.host_full.base_us == pytest.approx(TRUE.host_full.base_us, rel=0.01)
    assert found.effects.warm_host_share == pytest.approx(TRUE.effects.warm_host_share, rel=0.01)
    assert found.effects.eager_new_us == pytest.approx(TRUE.effects.eager_new_us, rel=0.1)


def test_slices_of_time_tell_what_steps_in_a_row_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where other steps come between any two of its own, new sizes are still beside steps like them."""
    found, _ = calibrated(monkeypatch, allowance_s=1e-6, sliced=True)
    assert found.effects.warm_host_share == pytest.approx(TRUE.effects.warm_host_share)
    assert found.effects.eager_new_us == pytest.approx(TRUE.effects.eager_new_us)


class Unsteady:
    """How many times as long the host takes; its fixed work tells nothing of it.

    Every step is off by some 5%, a tenth of the time is 1.4 times as slow, for 10 ms each, and seconds up to 1.2 times.
    """

    def __init__(self, seed: int) -> None:
        self._drawn = random.Random(seed)  # noqa: S311
        self._short, self._long, self._by = (0.0, 0.0), 0.0, 1.0

    def __call__(self, now_s: float) -> float:
        drawn = self._drawn
        while now_s >= self._short[1]:
            begins_s = self._short[1] + drawn.expovariate(1 / 0.1)
            self._short = begins_s, begins_s + 0.01
        while now_s >= self._long:
            self._long, self._by = self._long + drawn.uniform(0.3, 3.0), drawn.uniform(1.0, 1.2)
        return self._by * drawn.lognormvariate(0.0, 0.05) * (1.4 if now_s >= self._short[0] else 1.0)


def test_steps_in_a_row_and_new_sizes_are_told_on_an_unsteady_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """In two seconds pieces in a row come within 2% and a new size's time within 400 us, by the root mean square.

    By medians of each case's first and second runs they were 5% and 500 us off.
    """
    effects = [calibrated(monkeypatch, allowance_s=2.0, noise=Unsteady(seed))[0].effects for seed in range(16)]

    def error(found: list[float], true: float) -> float:
        return math.sqrt(statistics.fmean((each - true) ** 2 for each in found))

    assert error([each.warm_host_share[0] for each in effects], TRUE.effects.warm_host_share[0]) < 0.02
    assert error([each.warm_host_share[1] for each in effects], TRUE.effects.warm_host_share[1]) < 0.05
    assert error([each.eager_new_us for each in effects], TRUE.effects.eager_new_us) < 400.0


def test_what_launching_takes_is_told_on_an_unsteady_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one second EAGER's levels of 200 tables are within 8% of each other, by the standard deviation.

    By the median of each case's first runs they were 9% to 13% apart.
    """
    steps = [(True, False), (False, True), (True, True)]
    off: dict[tuple[bool, bool], list[float]] = {step: [] for step in steps}
    for seed in range(200):
        found = calibrated(monkeypatch, allowance_s=1.0, noise=Unsteady(seed))[0].host_eager
        for decodes, prefills in steps:
            off[decodes, prefills].append(math.log(found.base_for(decodes=decodes, prefills=prefills)))
    assert max(map(statistics.pstdev, off.values())) < 0.08, off


def test_the_device_is_timed_once_where_launching_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager prompts beside decode rows: three cases, each once behind other work, the other samples by the clock."""
    runs, behind = Machine.run, list[bool]()

    def run(machine: Machine, decision: Decision, inputs: Any) -> Any:
        numbers = inputs.numbers
        if decision.launches[0].key is None and numbers.num_decodes and numbers.num_prefills:
            behind.append(machine.busy > machine.now)
        return runs(machine, decision, inputs)

    monkeypatch.setattr(Machine, "run", run)
    calibrated(monkeypatch)
    assert sum(behind) == 3
    assert len(behind) > 100


def test_no_step_is_longer_than_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes beyond its longest have no times; what is below is as it was."""
    found, _ = calibrated(monkeypatch, longest=256)
    assert found.eager.sizes[-1] == 256
    assert found.piecewise.sizes[-1] == 128
    one, row = (Launch(Rows.ALL, GraphKey(Part.PIECEWISE, 8)),), BatchShape(decodes=[(1, 1)]).numbers
    assert found.cost(one, row).device_us == pytest.approx(TRUE.cost(one, row).device_us, rel=0.01)


def test_what_does_not_overlap_goes_to_the_longer_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager steps are the host's, a large piecewise one the device's; what whole graphs have of it is `step_us`."""
    found, _ = calibrated(monkeypatch, together=TOGETHER)
    assert found.step_us > TRUE.step_us
    assert found.host_eager.base_us > TRUE.host_eager.base_us
    assert found.eager.us == pytest.approx(TRUE.eager.us, rel=1e-3), "the host bounds all of them"
    assert found.piecewise.us[-1] > TRUE.piecewise.us[-1]


def test_no_more_is_spent_than_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least allowance times one case; a longer one ends within the case that it comes to."""
    least, machine = calibrated(monkeypatch, allowance_s=1e-9)
    assert least.eager.sizes == (1,)
    assert least.kv_span == KvSpan(0, 0, 0), "attention wasn't timed"
    assert machine.now < 100_000
    assert machine._runs == 3, "the first run isn't a sample, which is one by the clock and one behind other work"
    _, machine = calibrated(monkeypatch, allowance_s=0.5)
    longest = 3 * (max(TRUE.eager.us) + 10_000.0)
    assert 0.4e6 < machine.now < 0.5e6 + longest


def test_decode_rows_are_compared_on_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight decode rows in pieces take 100 us more than a prompt's tokens would, as experts do; the table says so."""
    step = (Launch(Rows.ALL, GraphKey(Part.PIECEWISE, 8)),), BatchShape.decode(8, 8 * 1024).numbers
    runs = Machine.run

    def run(machine: Machine, decision: Decision, inputs: Any) -> Any:
        ended = runs(machine, decision, inputs)
        if decision.launches == step[0] and inputs.numbers.num_decodes == 8:
            machine.busy += 100.0
            ended.cycle_us += 100.0
        return ended

    monkeypatch.setattr(Machine, "run", run)
    found, _ = calibrated(monkeypatch)
    assert found.cost(*step).device_us == pytest.approx(TRUE.cost(*step).device_us + 100.0, rel=1e-4)


def test_staging_that_was_slow_for_one_size_is_not_its_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host took 100 us more beside the graph of 8 rows whenever it was timed; other sizes say it is chance."""
    runs = Machine.run

    def run(machine: Machine, decision: Decision, inputs: Any) -> Any:
        alone = machine.busy <= machine.now
        ended = runs(machine, decision, inputs)
        if alone and decision.launches[0].key == GraphKey(Part.FULL, 8, 8, query_len=1):
            ended.cycle_us += 100.0
        return ended

    monkeypatch.setattr(Machine, "run", run)
    found, _ = calibrated(monkeypatch)
    assert found.full.us == pytest.approx(TRUE.full.us, rel=1e-6)


@pytest.mark.parametrize(
    ("rest_us", "found"),
    [
        ({}, [0.0, 0.0]),
        ({8: 50.0}, [50.0, 50.0]),
        # Staging more rows takes more.
        ({1: 40.0, 101: 140.0}, [39.0, 139.0]),
        # Sizes at which the host was interrupted don't count, nor does what would fall.
        ({10: 50.0, 20: 60.0, 30: 400.0, 40: 80.0, 50: 90.0}, [40.0, 140.0]),
        ({10: 60.0, 20: 50.0, 30: 55.0}, [55.0, 55.0]),
    ],
)
def test_what_is_beside_the_device_is_a_line_over_sizes(rest_us: dict[int, float], found: list[float]) -> None:
    """At no rows and at a hundred."""
    line = by_size(rest_us)
    assert [line(0), line(100)] == pytest.approx(found)


def test_pieces_that_are_hardly_quicker_leave_full_the_preference(monkeypatch: pytest.MonkeyPatch) -> None:
    """1% at 8 tokens is what repeats differ by, 5% at 64 isn't."""
    quick = Curve(PIECES, [990.0, 1235.0, 1600.0, 3100.0, 3500.0])
    monkeypatch.setitem(globals(), "TRUE", attrs.evolve(TRUE, piecewise=quick))
    found, _ = calibrated(monkeypatch)
    assert found.deciding.full.us == pytest.approx((900.0, 990.0, 1100.0, 1300.0), rel=1e-6)
    assert found.full.us == pytest.approx(TRUE.full.us, rel=1e-6)


def test_beyond_their_largest_mixed_graphs_rise_as_pieces_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one of 512 tokens: 70 us over the decode graph of 64, and from there PIECEWISE's 2,100 us more."""
    monkeypatch.setitem(globals(), "MIXED", (8, 64))
    monkeypatch.setitem(
        globals(), "TRUE", attrs.evolve(TRUE, mixed=Curve((8, 64), (1100.0, 1370.0)), both_us=(0.0, 0.0))
    )
    found, _ = calibrated(monkeypatch)
    assert found.mixed is not None
    assert found.mixed.sizes == (8, 64, 128, 448, 512)
    assert found.mixed.us == pytest.approx((1100, 1370, 1570, 3070, 3470), rel=1e-6)


def test_a_short_allowance_comes_to_sizes_far_apart_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is beyond the last two sizes goes on as they rise: so the largest comes early, then powers of two."""
    sizes = [*range(1, 33), *range(40, 65, 8), 96, 128, 192, 256, 384, 512]
    monkeypatch.setitem(globals(), "PIECES", sizes)
    assert calibrated(monkeypatch)[0].piecewise.sizes == tuple(sizes)
    few, _ = calibrated(monkeypatch, allowance_s=0.6)
    found = few.piecewise.sizes
    assert found[-1] == 512
    assert {1, 16, 128, 256} < set(found) < {1 << i for i in range(10)}


@pytest.mark.parametrize(
    ("model", "seconds", "beyond"),
    [
        ("qwen2.5-0.5b-h200", 1.025, {}), ("deepseek-v2-lite-h200", 1.155, {}),
        ("llama-3.2-1b-h200", 1.005, {(200, 0): 1.0475}),
        ("llama-3.1-8b-h200", 1.005, {(1, 40): 1.0255}),
    ],
)  # fmt: skip
def test_a_second_is_enough_to_decide_by(
    model: str, seconds: float, beyond: dict[tuple[int, int], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 2% of the best of nine batches, but for two that docs/measured_gpu.md tells.

    `Engine.capture` takes no more by default, and an eager step of these takes 14 to 48 ms of it, several times.
    """
    settings = Settings(max_num_reqs=256, max_num_tokens=2048)
    true, sizes = load_profile(model).costs, CaptureSizes.default(settings)
    for name, value in {
        "TRUE": true, "SETTINGS": settings, "DECODES": sizes.decode, "PIECES": sizes.piecewise, "MIXED": ()
    }.items():  # fmt: skip
        monkeypatch.setitem(globals(), name, value)
    found, machine = calibrated(monkeypatch, allowance_s=1.0)
    assert machine.perf_counter() <= seconds
    policy, ladder = get_policy("auto"), CaptureLadder(keys())
    context = PolicyContext(
        claims=Claims.at_level("uniform"), ladder=ladder, costs=found, settings=settings, objective=Objective()
    )  # fmt: skip
    right = attrs.evolve(context, costs=true)
    for decodes, new in [(1, 0), (9, 0), (200, 0), (1, 40), (8, 300), (60, 1500), (0, 20), (0, 500), (0, 2000)]:
        shape = BatchShape(decodes=[(1, decodes)] if decodes else [], prefills=[(new, 0)] if new else [])
        mine, best = (true.cost(policy.decide(shape, each).launches, shape.numbers) for each in (context, right))
        longer = mine.cycle_us / best.cycle_us
        assert longer <= beyond.get((decodes, new), 1.02), shape


def test_eager_sizes_that_a_short_allowance_left_out_rise_as_pieces_do() -> None:
    """Between timed ones what EAGER takes more changes evenly; timed ones stay, and beyond them nothing is said."""
    pieces = {
        size: Point(us, 0.0) for size, us in {1: 900.0, 64: 950.0, 256: 1200.0, 1024: 4000.0, 2048: 8000.0}.items()
    }
    wanted = (1, 4, 64, 256, 1024, 2048)

    def more(size: int) -> float:
        return 300.0 + 0.25 * (size - 4)

    true = {size: Point(Curve(sorted(pieces), [pieces[each].us for each in sorted(pieces)]).at(size) + more(size), 0.02)
            for size in wanted}  # fmt: skip
    few = {size: true[size] for size in (4, 1024)}
    found = _with_untimed(few, pieces, wanted)
    assert {size: each.us for size, each in found.items()} == pytest.approx(
        {size: true[size].us for size in (4, 64, 256, 1024)}
    )
    assert {each.error for each in found.values()} == {0.02}
    # By a straight line 256 tokens would take 30% longer.
    assert Curve((4, 1024), (few[4].us, few[1024].us)).at(256) == pytest.approx(1.3 * true[256].us, rel=0.01)
    assert _with_untimed(true, pieces, wanted) == true
    assert _with_untimed(few, {}, wanted) == few
    assert _with_untimed({4: true[4]}, pieces, wanted) == {4: true[4]}


def timing(monkeypatch: pytest.MonkeyPatch) -> tuple[bench.Bench, Machine]:
    """A bench of the machine, without cases."""
    machine, model = Machine(keys()), SimpleNamespace(
        vocab=100, pad_slot=PAD_SLOT, num_blocks=4096, block_size=16, max_model_len=LONGEST
    )  # fmt: skip
    monkeypatch.setattr(bench, "time", machine)
    monkeypatch.setattr(bench, "host_work_us", machine.host_work_us)
    return bench.Bench(machine, model), machine


def test_a_short_time_takes_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large case that isn't expected to end in time leaves what there is to smaller ones, and comes when it fits."""
    timed, _ = timing(monkeypatch)
    large, small = (
        timed.add([Launch(Rows.ALL, None)], timed.rows(0, 0, size), wave=wave)
        for size, wave in ((512, bench.Wave.FAR_APART), (65, bench.Wave.USUAL))
    )
    first = timed.add([Launch(Rows.ALL, None)], timed.rows(0, 0, 64), wave=bench.Wave.FAR_APART)
    timed.measure(0.08)
    assert [timed.measured(case) for case in (first, small, large)] == [True, True, False]
    timed.measure(0.12)
    assert timed.measured(large)


@pytest.mark.parametrize(
    ("cases", "allowance_s"),
    [([(64, None), (512, GraphKey(Part.PIECEWISE, 512))], 0.08), ([(1, None), (64, None), (512, None)], 0.12)],
    ids=["of another mode", "eagerly"],
)
def test_what_a_step_takes_whatever_its_tokens_keeps_no_larger_one_out(
    cases: list[tuple[int, GraphKey | None]], allowance_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host takes 33 ms for the runs of an eager case of any size: 8 times the tokens aren't 8 times that."""
    timed, machine = timing(monkeypatch)
    added = [timed.add([Launch(Rows.ALL, key)], timed.rows(0, 0, size)) for size, key in cases]
    timed.measure(allowance_s)
    assert all(timed.measured(case) for case in added)
    assert machine.perf_counter() < allowance_s + 0.05


def test_the_hosts_time_is_some_of_the_modes_where_its_own_cases_did_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it EAGER would be free to launch. A first sample comes after the same step, which finds caches warm."""
    found, _ = calibrated(monkeypatch, allowance_s=0.01)
    assert found.eager.sizes == (1,)
    again = TRUE.effects.warm_host_share[1] * (TRUE.host_eager.base_us + TRUE.host_eager.decode_us)
    assert found.host_eager.base_us == pytest.approx(again, rel=0.01)
    assert found.host_piecewise.base_us == 0


@pytest.mark.parametrize(
    ("us", "curve"),
    [
        # Within the noise of a larger size that seems cheaper: no reason to pad more.
        ({8: 101.0, 16: 100.0}, (100.0, 100.0)),
        ({8: 101.4, 16: 100.5, 32: 99.5}, (99.5, 99.5, 99.5)),
        # Sizes between them don't matter: the policy may have no graphs of those.
        ({8: 101.0, 12: 110.0, 16: 100.0}, (100.0, 110.0, 100.0)),
        # Beyond it the larger size is really cheaper, as it is on devices.
        ({8: 110.0, 16: 100.0}, (110.0, 100.0)),
        ({8: 104.5, 16: 103.0, 32: 101.5, 64: 100.0}, (103.0, 101.5, 100.0, 100.0)),
        ({8: 100.0, 16: 101.0}, (100.0, 101.0)),
    ],
)
def test_noise_between_sizes_is_no_difference(us: dict[int, float], curve: tuple[float, ...]) -> None:
    """Everything else of a table is as measured."""
    assert _steady(us, ALIKE.noise).us == curve


@pytest.mark.parametrize(
    ("full", "pieces", "kinds", "found"),
    [
        # Within the noise FULL takes PIECEWISE's time, which leaves it the preference.
        ({8: 101.0, 16: 120.0}, {8: 100.0, 16: 130.0}, ALIKE, (100.0, 120.0)),
        # Beyond it, and at sizes that have no pieces, it keeps its own.
        ({8: 103.0, 16: 120.0}, {8: 100.0}, ALIKE, (103.0, 120.0)),
        # What a larger size's prompts lend pieces of decode rows they lend FULL too, however much that is,
        ({64: 102.0}, {64: 100.0, 512: 82.4}, Kinds(256, 0.16), (82.4,)),
        ({64: 95.0}, {64: 100.0, 512: 82.4}, Kinds(256, 0.16), (82.4,)),
        # and what decode rows themselves tell apart stays so.
        ({64: 100.0}, {64: 85.0, 512: 90.0}, Kinds(256, 0.16), (100.0,)),
        ({64: 103.0}, {64: 100.0, 512: 82.4}, Kinds(256, 0.16), (103.0,)),
    ],
)
def test_noise_between_parts_is_no_difference(
    full: dict[int, float], pieces: dict[int, float], kinds: Kinds, found: tuple[float, ...]
) -> None:
    """The same kernels on the same decode rows: a whole graph leaves the host less to do."""
    deciding = _steady(pieces, kinds.noise)
    assert _not_above(Curve(full, full.values()), pieces, deciding, NOISE).us == found


def test_kv_that_is_there_tells_nothing_of_what_own_kv_spares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the prompt was timed over the same KV twice, and what its times differ by is chance."""
    monkeypatch.setattr(bench.Bench, "had_own_kv", lambda *_: False)
    found, _ = calibrated(monkeypatch, spared=1 / 6)
    assert found.deciding.piecewise.us == found.piecewise.us
