"""What `benchmarks.fidelity` makes of a run's steps that ran again (`benchmarks.gpu.again`), beside single ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median

import attrs

from kpolicy.errors import ConfigError, ProfileError
from kpolicy.schemas import Log, Profile, StepEntry, read_step_log
from kpolicy.simulate.fidelity import FidelityRow, expected_steps
from kpolicy.simulate.repeats import LEAST_REPEATS, RepeatRow, ran_alike, repeat_rows

POOLED = "all policies"


def check_probe(log: Log[StepEntry], profile: Profile, name: Path) -> None:
    """Refuse a log whose host's speed was noted by other fixed work than the profile's.

    Raises:
        ProfileError: it was.
    """
    ours, theirs = profile.costs.host_probe, log.header.host_probe
    if ours != theirs and profile.costs.host_work_us and any(entry.host_work_us for entry in log.entries):
        raise ProfileError(
            f"{name} has the host's speed by the fixed work {theirs!r}, and the profile's costs by {ours!r}; times of "
            "one say nothing of the other's. Give the profile that the run had."
        )
    ours, theirs = profile.costs.inside_probe, log.header.inside_probe
    inside = profile.costs.host_work_inside_us and any(entry.host_work_inside_us for entry in log.entries)
    if ours != theirs and inside:
        raise ProfileError(
            f"{name} has the host's speed inside steps by the work {theirs!r}, and the profile's costs by {ours!r}, "
            "which another version of kpolicy noted; neither tells the other. Give the profile that the run had, or "
            "calibrate and run anew."
        )


@attrs.frozen(kw_only=True)
class Cell:
    """What ran again of the steps that a run has in one mode and regime, whatever regime the repeats have.

    Args:
        mode: the mode, with the form of a split.
        regime: that of the steps in the run.
        steps: the run's with a measured time.
        again: those of them that ran again `LEAST_REPEATS` times or more.
        error: the mean over these of the error of the middle of each one's repeats; 0 without any.
    """

    mode: str
    regime: str
    steps: int
    again: int
    error: float


def pooled(
    logs: Mapping[str, Sequence[StepEntry]], again: Mapping[str, Sequence[StepEntry]]
) -> tuple[list[StepEntry], list[StepEntry]]:
    """All policies' steps, and those that ran again, numbered by their places among them."""
    run: list[StepEntry] = []
    repeats: list[StepEntry] = []
    for policy, entries in again.items():
        # The last policy's first, so that the numbers fall where another policy's passes begin.
        repeats = [*(attrs.evolve(entry, step=entry.step + len(run)) for entry in entries), *repeats]
        run += logs[policy]
    return run, repeats


def steps_again(
    paths: Sequence[Path], logs: Mapping[str, Sequence[StepEntry]], profile: Profile
) -> dict[str, tuple[StepEntry, ...]]:
    """By policy, the steps that ran again.

    Raises:
        ConfigError: they are of a policy without a log.
        ProfileError: see `check_probe`.
    """
    found: dict[str, tuple[StepEntry, ...]] = {}
    for path in paths:
        log = read_step_log(path)
        check_probe(log, profile, path)
        if log.header.policy not in logs:
            raise ConfigError(f"{path} is of {log.header.policy}; give the run's --log of that policy too.")
        found[log.header.policy] = (*found.get(log.header.policy, ()), *log.entries)
    return found


def measured_again(
    again: Mapping[str, Sequence[StepEntry]], logs: Mapping[str, Sequence[StepEntry]], profile: Profile
) -> dict[str, list[RepeatRow]]:
    """By policy and for all together, the steps that `benchmarks.gpu.again` ran again; of too few repeats no rows.

    Raises:
        ConfigError: see `repeat_rows`.
    """
    found = {policy: repeat_rows(logs[policy], entries, profile.costs) for policy, entries in again.items()}
    if found:
        found[POOLED] = repeat_rows(*pooled(logs, again), profile.costs)
    return found


def cells_again(
    again: Mapping[str, Sequence[StepEntry]],
    logs: Mapping[str, Sequence[StepEntry]],
    profile: Profile,
    *,
    own_speed: bool = False,
) -> list[Cell]:
    """How many of each cell's steps ran again, of all policies together, also of those that ran none again.

    Args:
        again: the steps that ran again, by policy.
        logs: the steps of first turns, by policy.
        profile: what they are held to.
        own_speed: as of `kpolicy.simulate.fidelity.fidelity`.
    """
    run, repeats = pooled(logs, {policy: again.get(policy, ()) for policy in logs})
    ratios: dict[int, list[float]] = {}
    for entry, each in zip(repeats, expected_steps(repeats, profile.costs), strict=True):
        if entry.cycle_us and ran_alike(entry, run[entry.step]):
            ratios.setdefault(entry.step, []).append(each.cost.cycle_us / entry.cycle_us)
    cells: dict[tuple[str, str], list[list[float]]] = {}
    for i, (entry, each) in enumerate(zip(run, expected_steps(run, profile.costs), strict=True)):
        if entry.cycle_us:
            key = entry.mode, each.regime(entry, profile.costs, own_speed=own_speed)
            cells.setdefault(key, []).append(ratios.get(i, []))
    found = []
    for (mode, regime), steps in sorted(cells.items()):
        off = [abs(median(kept) - 1) for kept in steps if len(kept) >= LEAST_REPEATS]
        found.append(Cell(mode=mode, regime=regime, steps=len(steps), again=len(off), error=fmean(off) if off else 0.0))
    return found


def shown_again(title: str, rows: Sequence[RepeatRow]) -> None:
    """Print a policy's rows, or that it has none."""
    few = f": too few repeats, no step ran {LEAST_REPEATS} times or more in one regime"
    print(f"{title} measured again{'' if rows else few}")
    for row in rows:
        print(
            f"  {row.mode:<22} {row.regime:<21} {row.host:<5} host {row.steps:>6} steps, {row.repeats:g} times each  "
            f"host-bound when repeated {row.host_bound_share:4.0%}  error of the middle "
            f"{row.error:6.1%}  bias {row.bias:+6.1%}  between steps {row.between:6.1%}  of means {row.of_means:6.1%}"
            f"  of each {row.single_error:6.1%}  spread {row.spread:6.1%}  at the table's host speed "
            f"{row.at_speed_error:6.1%} of {row.at_speed_steps}"
        )


def side_by_side(rows: Sequence[FidelityRow], repeats: Sequence[RepeatRow]) -> list[str]:
    """A line for each mode and regime: the error of single steps, of kinds' means and of repeats' middles.

    Beside each stands what the machine itself differs by: the noise of steps that launch alike, and how far the repeats
    of one step lie from their middle. No table comes below that.
    """
    again = {(row.mode, row.regime): row for row in repeats if row.host == "any"}
    keys = [(row.mode, row.regime) for row in rows if "all" not in (row.mode, row.regime)]
    single = {(row.mode, row.regime): row for row in rows}
    lines = [
        f"{'mode, regime':<36}{'single steps':>14}{'error':>8}{'bias':>8}{'noise':>8} |"
        f"{'by kinds, of':>14}{'error':>8} |{'repeated, times':>16}{'error':>8}{'bias':>8}{'spread':>8}"
    ]
    for key in sorted({*keys, *again}, key=lambda key: (key[0], keys.index(key) if key in keys else len(keys), key[1])):
        parts = [f"{key[0] + ', ' + key[1]:<36}"]
        if (row := single.get(key)) is None:
            parts.append(" " * 38 + " |" + " " * 22 + " |")
        else:
            parts.append(f"{row.steps:>14}{row.error:>8.1%}{row.bias:>+8.1%}{row.noise:>8.1%} |")
            parts.append(f"{row.kind_steps:>14}{row.kind_error:>8.1%} |")
        if (more := again.get(key)) is not None:
            times = f"{more.steps} x {more.repeats:g}"
            parts.append(f"{times:>16}{more.error:>8.1%}{more.bias:>+8.1%}{more.spread:>8.1%}")
        lines.append("".join(parts).rstrip())
    return lines
