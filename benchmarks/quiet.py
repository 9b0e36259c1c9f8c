"""Runs a command on the quietest cores of this machine: ``python -m benchmarks.quiet -- kpolicy run ...``.

What a step launches from Python takes as long as the core that does it: beside a busy hardware thread of the same core
1.6 times as long, on virtual machines for seconds at a time. Each core's fixed work (`kpolicy.host_speed`) is timed in
turn, several times over; the command gets the quickest ones, one hardware thread of each and not the first core, which
serves interrupts, where there are others. Its libraries' own pools get one thread, so that none spins beside it, and it
goes before other processes where this user may ask for that.

The same by hand: ``OMP_NUM_THREADS=1 nice -n -10 taskset -c 3,5,8,11 kpolicy run ...``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from kpolicy.host_speed import host_work_us

SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
POOLS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
FIRST = -10
"""Niceness asked for."""


def cores_of(text: str) -> frozenset[int]:
    """The cores that a list such as ``0-2,8`` names."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def siblings(core: int) -> frozenset[int]:
    """The hardware threads of that one's core; itself alone where the system doesn't say."""
    try:
        return cores_of(Path(SIBLINGS.format(core)).read_text()) | {core}
    except (OSError, ValueError):
        return frozenset({core})


def timed(cores: Sequence[int], *, rounds: int, seconds: float) -> dict[int, list[float]]:
    """Microseconds of the fixed work on each core, one after the other, several times over.

    Args:
        cores: the cores; this process may run on all of them afterwards.
        rounds: turns of each.
        seconds: of each turn.
    """
    found: dict[int, list[float]] = {core: [] for core in cores}
    for _ in range(rounds):
        for core in cores:
            os.sched_setaffinity(0, {core})
            end = time.perf_counter() + seconds
            while True:
                found[core].append(host_work_us())
                if time.perf_counter() >= end:
                    break
    os.sched_setaffinity(0, cores)
    return found


def quietest(times: dict[int, list[float]], wanted: int) -> list[int]:
    """The cores to run on, the quickest first: by the mean, which slow stretches are in.

    One hardware thread of a core, and the first core only where there aren't as many others.
    """
    by_time = sorted(times, key=lambda core: (0 in siblings(core), statistics.fmean(times[core])))
    chosen: list[int] = []
    for core in by_time:
        if len(chosen) < wanted and not siblings(core) & set(chosen):
            chosen.append(core)
    return chosen


def slowest(times: dict[int, list[float]]) -> int:
    """The core that is slow for longest, by the median."""
    return max(times, key=lambda core: statistics.median(times[core]))


class Turns:
    """The quickest core for this thread now, and the slowest then, looked at each time: a core is slow for seconds.

    Threads that run beside this one keep their cores.

    Args:
        cores: those to choose from.
    """

    def __init__(self, cores: Sequence[int]) -> None:
        self._cores = list(cores)

    def move(self, *, quick: bool) -> str:
        """Run on the quickest or the slowest core from here on; which that is, in words."""
        times = timed(self._cores, rounds=2, seconds=0.015)
        core = quietest(times, 1)[0] if quick else slowest(times)
        os.sched_setaffinity(0, {core})
        return f"{'quick' if quick else 'slow'} core {core}, fixed work {statistics.median(times[core]):.1f} us"


def go_first() -> None:
    """Go before other processes, where this user may ask for that."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, FIRST)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cores", type=int, default=4, help="cores that the command gets (4)")
    parser.add_argument("--seconds", type=float, default=4.0, help="seconds for timing all cores (4)")
    parser.add_argument("command", nargs="*", help="the command, after --; without one the cores are only shown")
    arguments = parser.parse_args(argv)
    if arguments.cores < 1 or arguments.seconds <= 0:
        parser.error(f"--cores {arguments.cores} --seconds {arguments.seconds:g}: both are above 0")
    if not hasattr(os, "sched_setaffinity"):
        parser.error("this system doesn't let a process choose its cores; Linux does")
    rounds, cores = 4, sorted(os.sched_getaffinity(0))
    times = timed(cores, rounds=rounds, seconds=arguments.seconds / rounds / len(cores))
    chosen = quietest(times, arguments.cores)
    for core in cores:
        mark = f"  taken, {chosen.index(core) + 1}" if core in chosen else ""
        middle, mean = statistics.median(times[core]), statistics.fmean(times[core])
        sys.stderr.write(f"core {core:>3}: fixed work {middle:5.1f} us in the median, {mean:5.1f} in the mean{mark}\n")
    if not arguments.command:
        return 0
    sys.stderr.flush()
    os.sched_setaffinity(0, chosen)
    go_first()
    os.environ.update(dict.fromkeys(POOLS, "1"))
    try:
        os.execvp(arguments.command[0], arguments.command)  # noqa: S606 - what it is for
    except OSError as error:
        sys.stderr.write(f"{arguments.command[0]} can't be run: {error.strerror}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
