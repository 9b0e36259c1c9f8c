"""What steps came to: by mode and reason, with padding, from the counts by size that phases keep."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from kpolicy.modes import Mode
from kpolicy.observe import padding_text
from kpolicy.reasons import Reason
from kpolicy_sglang.failures import Failures
from kpolicy_sglang.phase import Phase

__all__ = ["Line", "lines", "summary"]


class Line(NamedTuple):
    """Steps of one phase that ran in one mode for one reason.

    Args:
        phase: ``decode`` or ``prefill``.
        mode: the mode.
        reason: the reason's value.
        steps: how many.
        tokens: tokens asked for, without padding.
        padding: padding tokens.
    """

    phase: str
    mode: str
    reason: str
    steps: int
    tokens: int
    padding: int


def lines(phase: Phase) -> list[Line]:
    """The counts of a phase. Steps over its largest size are counted at that size and one."""
    sums: dict[tuple[str, str], list[int]] = {}

    def add(mode: Mode, reason: Any, steps: int, size: int, padded: int) -> None:
        found = sums.setdefault((mode.value, reason.value), [0, 0, 0])
        found[0] += steps
        found[1] += steps * size * phase.width
        found[2] += steps * (padded - size) * phase.width

    for size, steps in enumerate(phase.steps):
        if steps:
            decision = phase.decision(size)
            bucket = phase.bucket(size)
            replays = decision.mode is not Mode.EAGER and bucket is not None
            add(decision.mode, decision.reason, steps, size, bucket if replays and bucket is not None else size)
    for (size, captured), steps in phase.voted.items():
        add(Mode(phase.keys[0].part.value), Reason.GRAPH_FITS, steps, size, captured)
    for (reason, size), steps in phase.refused.items():
        add(Mode.EAGER, reason, steps, size, size)
    return [Line(phase.name, mode, reason, *counts) for (mode, reason), counts in sums.items()]


def buckets(phase: Phase) -> Counter[int]:
    """Replays by captured size."""
    found: Counter[int] = Counter()
    for size, steps in enumerate(phase.steps):
        bucket = phase.bucket(size) if steps else None
        if bucket is not None and phase.replays(size):
            found[bucket] += steps
    for (_, captured), steps in phase.voted.items():
        found[captured] += steps
    return found


def summary(phases: dict[str, Phase], failures: Failures | None = None) -> str:
    """One line for the log."""
    parts = []
    for phase in phases.values():
        for line in sorted(lines(phase), key=lambda line: -line.steps):
            share = f", {padding_text(line.padding, line.tokens)} padding" if line.padding else ""
            parts.append(f"{line.phase} {line.mode} ({line.reason}): {line.steps} steps{share}")
    if failures is not None and failures.total:
        parts.append(f"kpolicy raised {failures.total} times")
    return "; ".join(parts) or "no steps"
