"""What `benchmarks.fidelity` makes of a run's steps that ran again (`benchmarks.gpu.again`), beside single ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from kpolicy.errors import ConfigError, ProfileError
from kpolicy.schemas import Log, Profile, StepEntry, read_step_log
from kpolicy.simulate.fidelity import FidelityRow
from kpolicy.simulate.repeats import RepeatRow, repeated

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


def measured_again(
    paths: Sequence[Path], logs: Mapping[str, Sequence[StepEntry]], profile: Profile
) -> dict[str, list[RepeatRow]]:
    """By policy and for all together, the steps that `benchmarks.gpu.again` ran again.

    Raises:
        ConfigError: they are of a policy without a log, or see `repeated`.
        ProfileError: see `check_probe`.
    """
    found: dict[str, list[RepeatRow]] = {}
    run: list[StepEntry] = []
    again: list[StepEntry] = []
    for path in paths:
        log = read_step_log(path)
        check_probe(log, profile, path)
        ours = logs.get(log.header.policy)
        if ours is None:
            raise ConfigError(f"{path} is of {log.header.policy}; give the run's --log of that policy too.")
        found[log.header.policy] = repeated(ours, log.entries, profile.costs)
        # The last policy's first, so that the numbers fall where another policy's passes begin.
        again = [*(attrs.evolve(entry, step=entry.step + len(run)) for entry in log.entries), *again]
        run += ours
    if found:
        found[POOLED] = repeated(run, again, profile.costs)
    return found


def shown_again(title: str, rows: Sequence[RepeatRow]) -> None:
    """Print a policy's rows."""
    print(title, "measured again")
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
