"""How near a cost table comes to what was measured: a step log's steps, costed again, by mode and regime."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import chain, islice
from statistics import fmean, median
from typing import NamedTuple

import attrs

from kpolicy.costs import Cost, CostTable
from kpolicy.decision import Launch
from kpolicy.errors import ConfigError
from kpolicy.host_speed import felt
from kpolicy.schemas import StepEntry, StepLaunch
from kpolicy.simulate.host_state import HostState
from kpolicy.simulate.step_costs import StepCosts

__all__ = [
    "REGIMES",
    "REPEATS",
    "FidelityRow",
    "eager_sizes",
    "expected_cost",
    "expected_costs",
    "fidelity",
    "same_ranking",
]

REGIMES = ("host-bound", "middle", "saturated")
"""By the cost table: the host takes longer than the device; it doesn't; and dense work takes at least twice what one
token takes, so that a step grows with its tokens."""
_SATURATED = 2.0
_AT_SPEED = 0.1
REPEATS = 5
"""Steps of a kind whose mean is compared."""


@attrs.frozen(kw_only=True)
class FidelityRow:
    """Steps of one mode in one regime.

    Args:
        mode: the mode, with the form of a split; ``all`` for every one.
        regime: one of `REGIMES`, or ``all``.
        steps: how many.
        time_share: their measured time, as a share of that of all steps that are told.
        error: mean of the relative error of each step's time, without its sign: the stricter reading of "5% mean" for a
            mode and regime, in which errors either way don't make up for each other, and the machine's own count.
        bias: the expected time of all steps over the measured one, less 1, which is the error of their mean step time:
            the other reading, by which a simulated queue goes. Above 0 is too slow a table.
        median_error: median of the same errors: late steps of a busy machine don't move it.
        gap_p50_error: relative error of the median step time, which is the gap between tokens where rows decode.
        noise: the error that would be left if the table were right on the median of all steps that launch the same
            graphs (or none) on the same kinds of rows, after a step of the same mode or another, and where they are
            eager, of a size that ran before or not: what the machine itself differs by.
        at_speed_steps: steps beside which the host was as fast as while the table was measured, within 10%; all of them
            where no speed was noted.
        at_speed_error: `error` of these alone; 0 without any.
        kind_steps: steps of which there are `REPEATS` or more of one kind: with the same launches on the same kinds of
            rows, as for `noise`; tokens of eager steps within a quarter of a factor of two, the decode rows' KV and the
            prompts' pairs of tokens within a factor of two.
        kind_error: mean over these steps of the error of their kind's mean time: what is left of `error` where a
            repeated step's expected time is asked for, as a simulator is, and not each repeat's. Between the two:
            errors of a kind's steps make up for each other, and not those of other kinds; 0 without any.
    """

    mode: str
    regime: str
    steps: int
    time_share: float
    error: float
    bias: float
    median_error: float
    gap_p50_error: float
    noise: float
    at_speed_steps: int
    at_speed_error: float
    kind_steps: int
    kind_error: float


def _launch(entry: StepEntry, launch: StepLaunch) -> Launch:
    padded = None
    if launch.key is None and launch.padding:
        plain = Launch(launch.rows, None)
        padded = plain.num_tokens(entry.shape.numbers) + launch.padding // launch.repeat
    return Launch(launch.rows, launch.key, launch.stream, launch.repeat, padded, wait_share=launch.wait_share)


def expected_cost(entry: StepEntry, costs: CostTable) -> Cost:
    """What the table says that the step took by itself, at the host speed noted inside it, or else beside it."""
    launches = tuple(_launch(entry, each) for each in entry.launches)
    work_us = costs.host_work_of(entry.host_work_inside_us) or entry.host_work_us
    return StepCosts(costs.at_host_speed(work_us)).cost(launches, entry.shape.numbers)


def expected_costs(entries: Sequence[StepEntry], costs: CostTable, before: Sequence[StepEntry] = ()) -> list[Cost]:
    """What the table says that the steps of a log took, one after the other, and after those `before` them.

    The host's speed at a step is what was noted inside it, where the table and the log have that, or else around it
    (`felt`). It must have been noted by the fixed work that the table names (`CostTable.host_probe`, and a log's
    header).
    """
    return [each.cost for each in _after(before, entries, costs)]


class Expected(NamedTuple):
    """What the table says of a step."""

    cost: Cost
    """At the host speed that was noted inside or around it"""
    at_table: Cost
    """At the table's"""
    state: Hashable
    """What of the host's state both rest on"""
    speed: float
    """How many times as long as while the table was measured the host's fixed work took; 1 where it wasn't noted"""

    @property
    def at_speed(self) -> bool:
        """Whether the host was as fast as the table's, within a tenth."""
        return abs(self.speed - 1) <= _AT_SPEED

    def regime(self, entry: StepEntry, costs: CostTable, *, own_speed: bool) -> str:
        """Which of `REGIMES` the step is in, at the table's own host speed or at the noted one."""
        return regime_of(entry, self.at_table if own_speed else self.cost, costs)


def expected_steps(entries: Sequence[StepEntry], costs: CostTable) -> Iterator[Expected]:
    """What the table says of the steps of a log, one after the other; see `expected_costs`.

    Where the number of a step isn't above that of the one before, as where a run's steps ran in several passes, the
    host's speed is taken from either side by itself: seconds and other cores may lie between.
    """
    state, usual = HostState(costs), costs.host_work_us
    noted = chain.from_iterable(
        felt([entry.host_work_us for entry in stretch if entry.host_work_us]) for stretch in _passes(entries)
    )
    for entry in entries:
        launches, numbers = tuple(_launch(entry, each) for each in entry.launches), entry.shape.numbers
        # As the simulator counts them: forms of a split, which the log's mode names, are one mode.
        step = state.costs(entry.mode.partition("/")[0], launches, numbers)
        around = next(noted) if entry.host_work_us else None
        speed = costs.host_work_of(entry.host_work_inside_us) or around
        at_table = step.cost(launches, numbers)
        cost = step.at_host_speed(speed).cost(launches, numbers) if speed else at_table
        yield Expected(cost, at_table, id(step), speed / usual if speed and usual else 1.0)


def _after(before: Sequence[StepEntry], entries: Sequence[StepEntry], costs: CostTable) -> Iterator[Expected]:
    """`expected_steps` of entries that ran after others."""
    return islice(expected_steps([*before, *entries], costs), len(before), None)


def _passes(entries: Sequence[StepEntry]) -> Iterator[Sequence[StepEntry]]:
    """The stretches of a log in which the steps' numbers rise."""
    first = 0
    for i in range(1, len(entries) + 1):
        if i == len(entries) or entries[i].step <= entries[i - 1].step:
            yield entries[first:i]
            first = i


def eager_sizes(entries: Iterable[StepEntry]) -> set[int]:
    """Tokens of the eager launches of a log."""
    launches = ((entry, _launch(entry, each)) for entry in entries for each in entry.launches)
    return {launch.size(entry.shape.numbers) for entry, launch in launches if launch.key is None}


def regime_of(entry: StepEntry, cost: Cost, costs: CostTable) -> str:
    """Which of `REGIMES` a step of that cost is in."""
    if cost.host_us > cost.device_us:
        return REGIMES[0]
    growth = max((_growth(entry, _launch(entry, each), costs) for each in entry.launches), default=1.0)
    return REGIMES[2] if growth >= _SATURATED else REGIMES[1]


def _growth(entry: StepEntry, launch: Launch, costs: CostTable) -> float:
    curve = costs.curve_of(launch)
    return curve.at(launch.size(entry.shape.numbers)) / curve.at(1)


def fidelity(
    entries: Sequence[StepEntry], costs: CostTable, before: Sequence[StepEntry] = (), *, own_speed: bool = False
) -> list[FidelityRow]:
    """Rows for each mode and regime that has steps, then for all of each mode, then for all.

    Args:
        entries: a log's steps; those without a measured `cycle_us` are left out.
        costs: the table to hold to them.
        before: steps that the process ran before them.
        own_speed: regimes are by the table at its own host speed, as a simulation that is told no other has them, and
            not at the speed noted at each step. Times are at the noted one either way.

    Raises:
        ConfigError: no step has a measured time.
    """
    timed = [
        (entry, entry.cycle_us, each)
        for entry, each in zip(entries, _after(before, entries, costs), strict=True)
        if entry.cycle_us
    ]
    launched = [(_launched(entry), each.state) for entry, _, each in timed]
    alike: dict[Hashable, list[float]] = {}
    for kind, (_, measured_us, each) in zip(launched, timed, strict=True):
        alike.setdefault(kind, []).append(each.cost.cycle_us / measured_us)
    usual = {kind: median(ratios) for kind, ratios in alike.items()}
    cases: dict[tuple[str, str], list[_Step]] = {}
    for kind, (entry, measured_us, each) in zip(launched, timed, strict=True):
        step = _Step(each.cost.cycle_us, measured_us, usual[kind], each.at_speed, (kind, _sizes(entry)))
        regime = each.regime(entry, costs, own_speed=own_speed)
        for key in ((entry.mode, regime), (entry.mode, "all"), ("all", "all")):
            cases.setdefault(key, []).append(step)
    if not cases:
        raise ConfigError("the log has no step with a measured time, so nothing can be compared with it.")
    order = {regime: i for i, regime in enumerate((*REGIMES, "all"))}
    total_us = sum(measured_us for _, measured_us, _ in timed)
    return [
        _row(*key, cases[key], total_us)
        for key in sorted(cases, key=lambda key: (key[0] == "all", key[0], order[key[1]]))
    ]


def _launched(entry: StepEntry) -> Hashable:
    """What steps that should take alike have in common, but for their KV and the sizes of eager rows."""
    numbers = entry.shape.numbers
    launches = tuple((each.rows, each.key, each.stream, each.repeat) for each in entry.launches)
    return entry.mode, launches, numbers.num_decodes > 0, numbers.num_prefills > 0


def _sizes(entry: StepEntry) -> Hashable:
    """What else steps of a kind have in common: sizes that the graphs don't tell, roughly."""
    numbers = entry.shape.numbers
    tokens = numbers.total_tokens if any(each.key is None for each in entry.launches) else 0
    return tuple(
        round(parts * math.log2(size)) if size else None
        for size, parts in ((tokens, 4), (numbers.decode_kv_tokens, 1), (numbers.prefill_pairs, 1))
    )


class _Step(NamedTuple):
    """A step's times in microseconds, and what it is compared with."""

    expected: float
    measured: float
    ratio: float
    """The usual one of both in steps like it"""
    at_speed: bool
    """Whether the host was as fast as the table's"""
    kind: Hashable


def _kinds(steps: Sequence[_Step]) -> tuple[int, float]:
    """How many steps are of kinds with enough repeats, and the mean over them of the error of their kind's mean."""
    kinds: dict[Hashable, list[_Step]] = {}
    for each in steps:
        kinds.setdefault(each.kind, []).append(each)
    repeated = [alike for alike in kinds.values() if len(alike) >= REPEATS]
    count = sum(map(len, repeated))
    errors = (
        len(alike) * abs(sum(each.expected for each in alike) / sum(each.measured for each in alike) - 1)
        for alike in repeated
    )
    return count, sum(errors) / count if count else 0.0


def _row(mode: str, regime: str, steps: Sequence[_Step], total_us: float) -> FidelityRow:
    """The row of steps, which are some of those that took so long in all."""
    errors = [abs(each.expected / each.measured - 1) for each in steps]
    at_speed = [error for error, each in zip(errors, steps, strict=True) if each.at_speed]
    expected_us, measured_us = [each.expected for each in steps], [each.measured for each in steps]
    kind_steps, kind_error = _kinds(steps)
    return FidelityRow(
        mode=mode,
        regime=regime,
        steps=len(steps),
        time_share=sum(measured_us) / total_us,
        error=fmean(errors),
        bias=sum(expected_us) / sum(measured_us) - 1,
        median_error=median(errors),
        gap_p50_error=abs(median(expected_us) / median(measured_us) - 1),
        noise=fmean(abs(each.expected / each.measured / each.ratio - 1) for each in steps),
        at_speed_steps=len(at_speed),
        at_speed_error=fmean(at_speed) if at_speed else 0.0,
        kind_steps=kind_steps,
        kind_error=kind_error,
    )


def same_ranking(measured: dict[str, float], expected: dict[str, float], *, tie: float = 0.0) -> list[tuple[str, str]]:
    """Pairs of policies that simulation ranks the other way round than measurement; empty is the same ranking.

    Args:
        measured: a time by policy, on the device.
        expected: the same by simulation.
        tie: policies whose measured times differ by at most this share rank equal, whichever comes first.
    """
    wrong = []
    for first in measured:
        for second in measured:
            quicker = measured[first] * (1 + tie) < measured[second]
            if quicker and expected[first] >= expected[second]:
                wrong.append((first, second))
    return wrong
