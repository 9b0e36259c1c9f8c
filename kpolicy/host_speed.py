"""How fast the host is now: the time of a fixed piece of work.

Virtual machines share cores, whose speed changes by half for seconds at a time; a step that the host bounds changes
with it. Noted while costs are measured and beside each step of a log, it tells a wrong cost from another host speed.

Launching a step goes with it for the most part: see `launching_takes`. From the times noted around a step `felt` tells
how slow the host was while it ran; `steadied` does for samples of which the median counts, slow ones left out.

The work is a loop of the interpreter. Times of other work say nothing of it, so a table names what its times rest on:
small copies to the device were tried, and took 13% longer in calibration than in a run (docs/measured_fidelity.md).

A long step's launching meets quick and slow stretches that notes beside it miss. `SpeedTimer` notes the speed inside
steps, where the process is the command's own.
"""

from __future__ import annotations

import os
import signal
import statistics
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

__all__ = [
    "INSIDE",
    "INTERPRETER",
    "ONCE",
    "SpeedTimer",
    "felt",
    "host_work_us",
    "launching_takes",
    "steadied",
    "work_inside_us",
]

INTERPRETER = "interpreter"
"""`host_work_us`, by name."""
INSIDE = "interpreter, least of three"
"""What a `SpeedTimer` notes, by name."""
ONCE = "interpreter, once"
"""What it noted until 2026-11-28: half of `host_work_us`'s loop, run once with cold caches, which takes longer"""
AROUND = 4
"""Times on either side of one that tell with it how fast the host was: one alone is a moment's"""
_LOOPS, _RUNS = 600, 3
_EVERY_S, _SMALL_LOOPS, _SMALL_RUNS = 0.004, 100, 3
"""Of a `SpeedTimer`: a note takes 0.4% of the time"""
_LEAST, _KEPT, _RECENT_S = 8, 512, 0.25
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


class SpeedTimer:
    """Notes how fast the host is every 4 ms while it is open, inside steps too; `work_inside_us` tells.

    A timer's signal interrupts the main thread between two operations of the interpreter, for a sixth of
    `host_work_us`'s loop, run three times: some 15 us. The least of them counts, three times over: the first run finds
    the processor's caches full of what the signal brought, and one that is interrupted says nothing of the core. One
    process has one such signal, so it is for commands that own theirs, and not for servers. It does nothing outside of
    the main thread, where the system has no such timer, or where the process has an alarm running already. The last
    two seconds are kept.

    Of an EAGER step's launching on an H200's virtual host (DeepSeek-V2-Lite, 230 steps, four times each) notes inside
    left 2.9% unexplained, notes beside it 6.1%. These were of half of the loop, run once
    (docs/measured_fidelity.md); notes of three runs are unverified on hardware.

    Raises:
        RuntimeError: on entry, where one is open already.
    """

    def __init__(self) -> None:
        self._noted: deque[tuple[float, float]] = deque(maxlen=_KEPT)
        self._before: Any = None
        self._open = False

    def __enter__(self) -> SpeedTimer:
        global _timer
        if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
            return self
        if _timer is not None:
            raise RuntimeError("a SpeedTimer is open already, and a process has one such timer; close that one first.")
        if signal.getitimer(signal.ITIMER_REAL)[0]:
            # Somebody's time limit, which would be lost.
            return self
        self._noted.clear()
        self._before = signal.getsignal(signal.SIGALRM)
        _timer, self._open = self, True
        try:
            signal.signal(signal.SIGALRM, self._note)
            # Calls of the system by other code than Python's go on, as without the signal.
            signal.siginterrupt(signal.SIGALRM, False)
            signal.setitimer(signal.ITIMER_REAL, _EVERY_S, _EVERY_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        global _timer
        if self._open:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            # What another thread still holds of it is dropped; the default would end the process.
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
            # None: what handled it wasn't installed from Python.
            signal.signal(signal.SIGALRM, signal.SIG_DFL if self._before is None else self._before)
            _timer, self._open = None, False

    def _note(self, *_: object) -> None:
        begin, least = time.perf_counter(), float("inf")
        for _run in range(_SMALL_RUNS):
            start, total = time.perf_counter(), 0
            for i in range(_SMALL_LOOPS):
                total += i * i
            least = min(least, time.perf_counter() - start)
        self._noted.append((begin, least * _SMALL_RUNS * 1e6))

    def felt_us(self, begin_s: float, end_s: float) -> float:
        """Mean time of the work between two times; where fewer than eight were noted, of the last eight until the end.

        Args:
            begin_s: by `time.perf_counter`.
            end_s: likewise.

        Returns:
            Microseconds; 0 where fewer than eight were noted in the time and in the quarter of a second before its
            end, as where one call holds the interpreter.
        """
        inside: list[float] = []
        # A copy, which is made at once: the next note may come while this looks.
        for start, us in reversed(tuple(self._noted)):
            if start < begin_s and (len(inside) >= _LEAST or start < end_s - _RECENT_S):
                break
            if start < end_s:
                inside.append(us)
        return statistics.fmean(inside) if len(inside) >= _LEAST else 0.0


_timer: SpeedTimer | None = None


def work_inside_us(begin_s: float, end_s: float) -> float:
    """What the open `SpeedTimer` noted between two times of `time.perf_counter`, in us: see `SpeedTimer.felt_us`.

    0 where none is open, and in other threads than the main one, whose steps it isn't in.
    """
    if _timer is None or threading.current_thread() is not threading.main_thread():
        return 0.0
    return _timer.felt_us(begin_s, end_s)


def _forked() -> None:
    """A child has no timer, and nothing that its parent noted is of it."""
    global _timer
    if _timer is not None:
        _timer._open, _timer = False, None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
