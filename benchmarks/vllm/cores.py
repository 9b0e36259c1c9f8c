"""One quick core for whichever side is at work: sides with cores of their own have those cores' speeds.

A virtual machine's cores are slow by half for seconds at a time, each at other times, and a process tends to stay on
its core. Of an earlier run's nine bursts, one side added the same requests in 63 to 116 ms and the other in 65 to 76
(docs/measured_vllm.md). So here all sides have one core in turn, and leave it together where it turns slow.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Event, Thread
from typing import Any

from benchmarks.quiet import EVERY_S, Follower, quietest, slow_from, timed

__all__ = ["OneCore"]

ROUNDS, SECONDS = 8, 2.0
"""Turns that each core is timed in at first, and seconds for all of them"""


class _Shared(Follower):
    """A `Follower` whose process changes; the core that it has found is the next one's too."""

    def turn_to(self, pid: int) -> None:
        """Follow that process from here on.

        Raises:
            ProcessLookupError: it is gone.
        """
        self._pid, self._threads, self._in_a_row = pid, {pid}, 0
        os.sched_setaffinity(pid, {self._at})


class OneCore:
    """The core, which is looked at while a side serves.

    Args:
        cores: those to choose from; each is timed now, so no other work should be on them.
    """

    def __init__(self, cores: Sequence[int]) -> None:
        times = timed(cores, rounds=ROUNDS, seconds=SECONDS / ROUNDS / len(cores))
        order = quietest(times, 1)
        order += sorted(set(cores) - set(order), key=lambda core: statistics.fmean(times[core]))
        self._follower = _Shared(os.getpid(), times, order)
        self.told = (
            f"core {order[0]} of {len(cores)}: fixed work {statistics.median(times[order[0]]):.1f} us, "
            f"slow from {slow_from(times):.1f}"
        )

    @contextmanager
    def held_by(self, pid: int) -> Iterator[dict[str, Any]]:
        """Have that process's main thread on the core while the context lasts.

        Yields:
            ``core_looks`` of it, how many were ``core_slow``, and ``core_moves`` to a quicker one, once it is left.
        """
        follower, ended, found = self._follower, Event(), {}
        before = follower.looks, follower.slow, follower.moves

        def follow() -> None:
            with suppress(ProcessLookupError):
                while not ended.wait(EVERY_S):
                    follower.look()

        with suppress(ProcessLookupError):  # the side has ended, which its answer tells
            follower.turn_to(pid)
        thread = Thread(target=follow, name="core", daemon=True)
        thread.start()
        try:
            yield found
        finally:
            ended.set()
            thread.join()
            after = follower.looks, follower.slow, follower.moves
            names = ("core_looks", "core_slow", "core_moves")
            found |= {name: b - a for name, a, b in zip(names, before, after, strict=True)}
