"""How fast the host is now: the time of a fixed piece of work.

Virtual machines share cores, whose speed changes by half for seconds at a time; a step that the host bounds changes
with it. Noted while costs are measured and beside each step of a log, it tells a wrong cost from another host speed.

The work is a loop of the interpreter. A device may have work of its own that follows launching better
(`DeviceAdapter`'s ``host_probe``); none of ours has: small copies did where they were tried, and took 13% longer in
calibration than in a run on the same core (docs/benchmarks.md). Times of one kind of work say nothing of another's, so
a table names the work that its times rest on.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

__all__ = ["INTERPRETER", "HostProbe", "host_work_us", "probe_named", "probe_of", "steadied"]

INTERPRETER = "interpreter"
"""`host_work_us`, by name."""
AROUND = 4
"""Times on either side of one that tell with it how fast the host was: one alone may be late"""
_LOOPS, _RUNS = 600, 3


class HostProbe(NamedTuple):
    """Fixed work that tells how fast the host is."""

    name: str
    us: Callable[[], float]
    """Does it now; the microseconds that it took"""


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


def probe_of(executor: Any) -> HostProbe:
    """The fixed work of an executor's device; the interpreter's where it has none of its own."""
    own = getattr(getattr(getattr(executor, "launcher", None), "adapter", None), "host_probe", None)
    return (own() if own is not None else None) or HostProbe(INTERPRETER, host_work_us)


def probe_named(name: str, executor: Any) -> HostProbe | None:
    """The fixed work of that name, by which a table's times were noted; None where it can't be done here."""
    if name == INTERPRETER:
        return HostProbe(INTERPRETER, host_work_us)
    own = probe_of(executor)
    return own if own.name == name else None


def steadied(noted: Sequence[float]) -> list[float]:
    """How fast the host was at each of the times noted one after the other: the median of it and `AROUND` either side.

    The core's speed lasts; what one time has beyond it is an interruption, or what lay in the caches.
    """
    return [statistics.median(noted[max(0, i - AROUND) : i + AROUND + 1]) for i in range(len(noted))]
