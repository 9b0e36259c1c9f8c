"""How fast the host is now: the time of a fixed piece of work.

Virtual machines share cores, whose speed changes by half for seconds at a time; a step that the host bounds changes
with it. Noted while costs are measured and beside each step of a log, it tells a wrong cost from another host speed.

Launching a step goes with it for the most part: see `launching_takes`. From the times noted around a step `felt` tells
how slow the host was while it ran; `steadied` does for samples of which the median counts, slow ones left out.

The work is a loop of the interpreter. Times of other work say nothing of it, so a table names what its times rest on:
small copies to the device were tried, and took 13% longer in calibration than in a run (docs/measured_fidelity.md).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

__all__ = ["INTERPRETER", "felt", "host_work_us", "launching_takes", "steadied"]

INTERPRETER = "interpreter"
"""`host_work_us`, by name."""
AROUND = 4
"""Times on either side of one that tell with it how fast the host was: one alone is a moment's"""
_LOOPS, _RUNS = 600, 3
_SLOWS = 0.85
"""Share of the host's time for launching that is taken to go with the work; see docs/measured_fidelity.md."""


def host_work_us() -> float:
    """Microseconds that a fixed loop of the interpreter takes now: the least of three runs.

    So no interruption counts.
    """
    least = float("inf")
    for _ in range(_RUNS):
        start, total = time.perf_counter(), 0
        for i in range(_LOOPS):
            total += i * i
        least = min(least, time.perf_counter() - start)
    return least * 1e6


def launching_takes(times: float) -> float:
    """How many times as long launching a step takes, where the fixed work takes `times` as long.

    By the work alone steps that were repeated on slow cores of H200s' hosts came out 5 to 13% too slow in three runs.
    """
    return 1 + _SLOWS * (times - 1)


def steadied(noted: Sequence[float], around: int = AROUND) -> list[float]:
    """How fast the host was at each of the times noted one after the other: the median of it and some either side.

    The core's speed lasts; what one time has beyond it is an interruption, or what lay in the caches.
    """
    return [statistics.median(noted[max(0, i - around) : i + around + 1]) for i in range(len(noted))]


def felt(noted: Sequence[float], around: int = AROUND) -> list[float]:
    """How slow the host was around each of the times noted one after the other: the mean of it and some either side.

    A core that others use too is slow for a part of every long step, while each time is of a moment that is quick or
    slow: their median stays quick until half of them are slow (docs/measured_fidelity.md).
    """
    return [statistics.fmean(noted[max(0, i - around) : i + around + 1]) for i in range(len(noted))]
