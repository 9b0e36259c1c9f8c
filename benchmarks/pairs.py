"""Two ways to do the same, timed in pairs: what a shared machine's other work does to both cancels in each ratio."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["HALF_WIDTH", "interval", "measure_pairs"]

HALF_WIDTH = 0.02
"""Wanted half-width of a 95% interval, as a share of the ratio."""
STEP = 100
"""Pairs between looks at the interval"""


def interval(ratios: Sequence[float], draws: int = 400) -> tuple[float, float, float]:
    """(median, lowest and highest of 95% of medians of resampled ratios)."""
    chance, count = random.Random(0), len(ratios)
    medians = sorted(statistics.median(chance.choices(ratios, k=count)) for _ in range(draws))
    return statistics.median(ratios), medians[int(0.025 * draws)], medians[int(0.975 * draws)]


def measure_pairs(
    first: tuple[str, Callable[[], Any]],
    second: tuple[str, Callable[[], Any]],
    *,
    least: int,
    most: int,
    after: Callable[[Any, Any], None] | None = None,
) -> dict[str, Any]:
    """Time both in turn, in an order that alternates, until the interval is narrow enough or pairs are too many.

    Args:
        first: (name, what to call); the ratio is its time over the other's.
        second: likewise.
        least: pairs, at least.
        most: pairs, at most.
        after: told what each pair gave.

    Returns:
        Median milliseconds of both by name, the median ``ratio`` of pairs with its 95% ``interval`` and ``half_width``
        (relative), of wall time and, as ``cpu_...``, of this thread's processor time.
    """
    names, runs = (first[0], second[0]), (first[1], second[1])
    wall: tuple[list[float], list[float]] = [], []
    cpu: tuple[list[float], list[float]] = [], []
    outputs: list[Any] = [None, None]
    for which in (0, 1) * 5:
        runs[which]()
    done = 0
    while True:
        for i in range(STEP):
            for which in (0, 1) if i % 2 else (1, 0):
                start, started = time.perf_counter_ns(), time.thread_time_ns()
                outputs[which] = runs[which]()
                cpu[which].append((time.thread_time_ns() - started) / 1e6)
                wall[which].append((time.perf_counter_ns() - start) / 1e6)
            if after is not None:
                after(*outputs)
        done += STEP
        ratio, low, high = interval([a / b for a, b in zip(*wall, strict=True)])
        if done >= most or (done >= least and (high - low) / 2 <= HALF_WIDTH * ratio):
            break
    row: dict[str, Any] = {"pairs": done}
    for prefix, times in (("", wall), ("cpu_", cpu)):
        ratio, low, high = interval([a / b for a, b in zip(*times, strict=True)])
        row |= {
            f"{prefix}{name}_ms": round(statistics.median(each), 3) for name, each in zip(names, times, strict=True)
        }
        row |= {
            f"{prefix}ratio": round(ratio, 4),
            f"{prefix}interval": [round(low, 4), round(high, 4)],
            f"{prefix}half_width": round((high - low) / 2 / ratio, 4),
        }
    return row
