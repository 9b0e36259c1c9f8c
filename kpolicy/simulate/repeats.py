"""How near a cost table comes to steps that were measured several times (`benchmarks.gpu.again`).

A step that the host bounds takes 5 to 10% more or less each time that it runs, which no table can know: held to single
measurements the best one is off by as much. The middle of several tells what the step takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median
from typing import NamedTuple

import attrs

from kpolicy.costs import CostTable
from kpolicy.errors import ConfigError
from kpolicy.schemas import StepEntry
from kpolicy.simulate.fidelity import REGIMES, expected_steps, regime_of

__all__ = ["IN_THE_RUN", "LEAST_REPEATS", "RepeatRow", "host_bound", "ran_alike", "repeated"]

LEAST_REPEATS = 3
"""Of a step, whose middle is looked at."""
IN_THE_RUN = "host-bound in the run"
"""In place of a regime: steps that the host bounded at the speed that it had in the run."""


@attrs.frozen(kw_only=True)
class RepeatRow:
    """Steps of one mode in one regime, each measured several times.

    Each repeat is compared with what the table says at the host speed that was noted around it.

    Args:
        mode: the mode, with the form of a split.
        regime: one of `REGIMES`, at the host speed that the table was measured at; or `IN_THE_RUN`.
        steps: how many different ones; those with fewer than `LEAST_REPEATS` repeats are left out.
        repeats: how many of each there are, in the median.
        error: mean over steps of the relative error of the middle: the median over a step's repeats of expected over
            measured time, less 1, without its sign.
        bias: the same with its sign: above 0 is too slow a table.
        between: `error` once the median of the row's middles is taken off: what is wrong between steps, whatever the
            host's speed is taken for.
        of_means: mean over steps of the error of the mean of a step's repeats.
        single_error: mean of the error of every repeat by itself.
        spread: mean over repeats of how far each is from the middle of its step: what one measurement can't tell.
        at_speed_steps: steps with `LEAST_REPEATS` repeats while the host was as fast as while the table was measured,
            within a tenth.
        at_speed_error: mean over these of the error of what the table says, as it is, against the median of the
            measured times, as they are; 0 without any.
    """

    mode: str
    regime: str
    steps: int
    repeats: float
    error: float
    bias: float
    between: float
    of_means: float
    single_error: float
    spread: float
    at_speed_steps: int
    at_speed_error: float


class _Repeat(NamedTuple):
    expected: float
    measured: float
    at_table: float
    at_speed: bool


def host_bound(entries: Sequence[StepEntry], costs: CostTable) -> list[int]:
    """Places of the steps that the host bounds, by the table at its own host speed or at the one noted around them."""
    return [
        i
        for i, each in enumerate(expected_steps(entries, costs))
        if any(cost.host_us > cost.device_us for cost in (each.cost, each.at_table))
    ]


def ran_alike(one: StepEntry, other: StepEntry) -> bool:
    """Whether two steps launched the same, for whatever reasons."""
    first, second = ([attrs.evolve(launch, reason=None) for launch in each.launches] for each in (one, other))
    return first == second


def repeated(run: Sequence[StepEntry], again: Sequence[StepEntry], costs: CostTable) -> list[RepeatRow]:
    """Rows for each mode and regime whose steps were measured again.

    Args:
        run: a run's steps.
        again: those that ran again, in the order in which they did, passes after one another; `StepEntry.step` says
            which of the run's each is. Ones that ran in another way than in the run are left out.
        costs: the table to hold to them.

    Raises:
        ConfigError: a step isn't one of the run's, or none has enough repeats.
    """
    regimes = [
        (regime_of(entry, each.at_table, costs), regime_of(entry, each.cost, costs))
        for entry, each in zip(run, expected_steps(run, costs), strict=True)
    ]
    samples: dict[int, list[_Repeat]] = {}
    for entry, each in zip(again, expected_steps(again, costs), strict=True):
        if entry.step >= len(run) or entry.shape != run[entry.step].shape:
            raise ConfigError(
                f"step {entry.step} that ran again isn't one of the run's {len(run)}. Give the log of the same run."
            )
        if entry.cycle_us and ran_alike(entry, run[entry.step]):
            repeat = _Repeat(each.cost.cycle_us, entry.cycle_us, each.at_table.cycle_us, each.at_speed)
            samples.setdefault(entry.step, []).append(repeat)
    cases: dict[tuple[str, str], list[list[_Repeat]]] = {}
    for step, repeats in samples.items():
        if len(repeats) >= LEAST_REPEATS:
            usual, own = regimes[step]
            cases.setdefault((run[step].mode, usual), []).append(repeats)
            if own == REGIMES[0]:
                cases.setdefault((run[step].mode, IN_THE_RUN), []).append(repeats)
    if not cases:
        raise ConfigError(f"no step ran {LEAST_REPEATS} times or more; give more passes.")
    order = {regime: i for i, regime in enumerate((*REGIMES, IN_THE_RUN))}
    return [_row(*key, cases[key]) for key in sorted(cases, key=lambda key: (key[0], order[key[1]]))]


def _row(mode: str, regime: str, steps: Sequence[Sequence[_Repeat]]) -> RepeatRow:
    middles = [median(each.expected / each.measured for each in repeats) - 1 for repeats in steps]
    usual = median(middles) + 1
    means = [sum(each.expected for each in r) / sum(each.measured for each in r) - 1 for r in steps]
    at_speed = [kept for r in steps if len(kept := [each for each in r if each.at_speed]) >= LEAST_REPEATS]
    off = [abs(median(e.at_table for e in kept) / median(e.measured for e in kept) - 1) for kept in at_speed]
    ratios = [
        (each.expected / each.measured, middle + 1)
        for repeats, middle in zip(steps, middles, strict=True)
        for each in repeats
    ]
    return RepeatRow(
        mode=mode,
        regime=regime,
        steps=len(steps),
        repeats=median(map(len, steps)),
        error=fmean(map(abs, middles)),
        bias=fmean(middles),
        between=fmean(abs((each + 1) / usual - 1) for each in middles),
        of_means=fmean(map(abs, means)),
        single_error=fmean(abs(ratio - 1) for ratio, _ in ratios),
        spread=fmean(abs(ratio / middle - 1) for ratio, middle in ratios),
        at_speed_steps=len(at_speed),
        at_speed_error=fmean(off) if off else 0.0,
    )
