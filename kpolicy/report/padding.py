"""Padding by the true size of what was launched, in ranges that double."""

from __future__ import annotations

from kpolicy.report.runs import Run
from kpolicy.report.steps import Padded, Steps

__all__ = ["by_range", "remainder"]


def by_range(steps: Steps) -> dict[tuple[int, int], Padded]:
    """Launches by their tokens: 0, 1, 2, 3 to 4, 5 to 8 and so on, both ends included."""
    found: dict[tuple[int, int], Padded] = {}
    for tokens, each in sorted(steps.padding.items()):
        high = 1 << (tokens - 1).bit_length() if tokens else 0
        low = high // 2 + 1 if high > 1 else high
        into = found.setdefault((low, high), Padded())
        into.graphs += each.graphs
        into.eager += each.eager
        into.tokens += each.tokens
        into.padding += each.padding
    return found


def remainder(run: Run) -> int:
    """Padding of the run that no rank's own launches have: that of ranks without rows."""
    return run.result.padding - sum(each.padding for each in run.steps.padding.values())
