"""How near a cost table comes to steps that were measured several times (`benchmarks.gpu.again`).

A step that the host bounds takes 5 to 10% more or less each time that it runs, which no table can know: held to single
measurements the best one is off by as much. The middle of several tells what the step takes.

Each repeat counts in the regime that it has itself, by what the table says at the host speed that was noted around it:
a step that the host bounded in the run isn't one that it bounds when it runs again on a quicker core.
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

__all__ = ["HOSTS", "IN_THE_RUN", "LEAST_REPEATS", "RepeatRow", "host_bound", "ran_alike", "repeat_rows"]

LEAST_REPEATS = 3
"""Of a step, whose middle is looked at."""
IN_THE_RUN = "host-bound in the run"
"""In place of a regime: steps that the host bounded at the speed that it had in the run."""
HOSTS = ("any", "quick", "slow")
"""Which repeats a row looks at: all of them; those while the fixed work took up to `SLOW` times as long as while the
table was measured; those while it took longer. Rows of the last two are where there are slow ones."""
SLOW = 1.2
_ANY, _QUICK, _SLOW = HOSTS


@attrs.frozen(kw_only=True)
class RepeatRow:
    """Steps of one mode in one regime, each measured several times.

    Each repeat is compared with what the table says at the host speed that was noted around it.

    Args:
        mode: the mode, with the form of a split.
        regime: one of `REGIMES`, which each repeat has at the host speed noted around it; or `IN_THE_RUN`.
        host: one of `HOSTS`.
        steps: how many different ones; those with fewer than `LEAST_REPEATS` such repeats are left out. A step may be
            in several regimes, by different repeats.
        repeats: how many of each there are, in the median.
        host_bound_share: share of the repeats that the host bounded: 0 or 1 but for `IN_THE_RUN`.
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
    host: str
    steps: int
    repeats: float
    host_bound_share: float
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
    slow: bool
    regime: str


def host_bound(entries: Sequence[StepEntry], costs: CostTable, *, slower: float = 1.0) -> list[int]:
    """Places of the steps that the host bounds, by the table at its own host speed or at the one noted around them.

    Args:
        entries: a run's steps.
        costs: the table.
        slower: with those that a host bounds which takes so many times as long as the table's.
    """
    return [
        i
        for i, each in enumerate(expected_steps(entries, costs))
        if each.cost.host_us > each.cost.device_us or each.at_table.host_us * slower > each.at_table.device_us
    ]


def ran_alike(one: StepEntry, other: StepEntry) -> bool:
    """Whether two steps launched the same, for whatever reasons."""
    first, second = ([attrs.evolve(launch, reason=None) for launch in each.launches] for each in (one, other))
    return first == second


def repeat_rows(run: Sequence[StepEntry], again: Sequence[StepEntry], costs: CostTable) -> list[RepeatRow]:
    """Rows for each mode and regime whose steps were measured again; none where no step has `LEAST_REPEATS` repeats.

    Args:
        run: a run's steps.
        again: those that ran again, in the order in which they did, passes after one another; `StepEntry.step` says
            which of the run's each is. Ones that ran in another way than in the run are left out.
        costs: the table to hold to them.

    Raises:
        ConfigError: a step isn't one of the run's.
    """
    bound = [each.cost.host_us > each.cost.device_us for each in expected_steps(run, costs)]
    samples: dict[int, list[_Repeat]] = {}
    for entry, each in zip(again, expected_steps(again, costs), strict=True):
        if entry.step >= len(run) or entry.shape != run[entry.step].shape:
            raise ConfigError(
                f"step {entry.step} that ran again isn't one of the run's {len(run)}. Give the log of the same run."
            )
        if entry.cycle_us and ran_alike(entry, run[entry.step]):
            repeat = _Repeat(
                each.cost.cycle_us, entry.cycle_us, each.at_table.cycle_us, each.at_speed, each.speed > SLOW,
                regime_of(entry, each.cost, costs),
            )  # fmt: skip
            samples.setdefault(entry.step, []).append(repeat)
    cases: dict[tuple[str, str, str], list[list[_Repeat]]] = {}
    for step, repeats in samples.items():
        mode = run[step].mode
        alike: dict[tuple[str, str, str], list[_Repeat]] = {}
        for repeat in repeats:
            for host in (_ANY, _SLOW if repeat.slow else _QUICK):
                alike.setdefault((mode, repeat.regime, host), []).append(repeat)
        if bound[step]:
            alike[mode, IN_THE_RUN, _ANY] = repeats
        for case, kept in alike.items():
            if len(kept) >= LEAST_REPEATS:
                cases.setdefault(case, []).append(kept)
    mixed = {(mode, regime) for mode, regime, host in cases if host == _SLOW}
    cases = {key: steps for key, steps in cases.items() if key[2] != _QUICK or key[:2] in mixed}
    places = {name: i for i, name in enumerate((*REGIMES, IN_THE_RUN, *HOSTS))}
    return [_row(*key, cases[key]) for key in sorted(cases, key=lambda key: (key[0], places[key[1]], places[key[2]]))]


def _row(mode: str, regime: str, host: str, steps: Sequence[Sequence[_Repeat]]) -> RepeatRow:
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
        host=host,
        steps=len(steps),
        repeats=median(map(len, steps)),
        host_bound_share=fmean(each.regime == REGIMES[0] for repeats in steps for each in repeats),
        error=fmean(map(abs, middles)),
        bias=fmean(middles),
        between=fmean(abs((each + 1) / usual - 1) for each in middles),
        of_means=fmean(map(abs, means)),
        single_error=fmean(abs(ratio - 1) for ratio, _ in ratios),
        spread=fmean(abs(ratio / middle - 1) for ratio, middle in ratios),
        at_speed_steps=len(at_speed),
        at_speed_error=fmean(off) if off else 0.0,
    )
