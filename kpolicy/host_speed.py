"""How fast the host is now: the time of a fixed piece of interpreter work.

Virtual machines share cores, whose speed changes by half for seconds at a time; a step that the host bounds changes
with it. Noted while costs are measured and beside each step of a log, it tells a wrong cost from another host speed.
"""

from __future__ import annotations

import time

__all__ = ["host_work_us"]

_LOOPS, _RUNS = 600, 3


def host_work_us() -> float:
    """Microseconds that the fixed work takes now: the least of three runs, so that no interruption counts."""
    least = float("inf")
    for _ in range(_RUNS):
        start, total = time.perf_counter(), 0
        for i in range(_LOOPS):
            total += i * i
        least = min(least, time.perf_counter() - start)
    return least * 1e6
