"""Runs a command on the quietest cores of this machine: ``python -m benchmarks.quiet -- kpolicy run ...``.

What a step launches from Python takes as long as the core that does it: beside a busy hardware thread of the same core
1.6 times as long, on virtual machines for seconds at a time. Each core's fixed work (`kpolicy.host_speed`) is timed in
turn, several times over; the command gets the quickest ones, one hardware thread of each and not the first core, which
serves interrupts, where there are others. Its libraries' own pools get one thread, so that none spins beside it, and it
goes before other processes where this user may ask for that. ``--follow`` goes on looking while it runs: a core turns
slow for less than a second at a time, and the command's main thread moves to one that is quick then.

The same by hand, but for that: ``OMP_NUM_THREADS=1 nice -n -10 taskset -c 3,5,8,11 kpolicy run ...``.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from kpolicy.host_speed import host_work_us

SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
TASKS = "/proc/{}/task"
POOLS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
FIRST = -10
"""Niceness asked for."""
EVERY_S, LAST, SLOWER = 0.05, 3, 1.15
"""`Follower`: seconds between looks, looks that tell a core's speed, and times as slow as another a core is left for"""


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


class Follower:
    """Keeps the main thread of a process on a core that is quick, where others are slow for parts of a second.

    A look takes each core some 0.1 ms, the process's own too: one step in some tens is that much longer. Threads that
    the process starts get all of `others` at the next look; processes that it starts keep the one core.

    Args:
        pid: the process.
        cores: those to choose from.
        others: the cores of its other threads.

    Attributes:
        moves: how often it was moved.
    """

    def __init__(self, pid: int, cores: Sequence[int], others: Sequence[int]) -> None:
        self._pid = pid
        self._others = set(others)
        self._threads = {pid}
        self._times: dict[int, deque[float]] = {core: deque(maxlen=LAST) for core in cores}
        self._at: int | None = None
        self.moves = 0

    def look(self) -> None:
        """Time the fixed work once on each core, and move where another is quicker for some looks now.

        A core that can't be had any more is left out. The calling thread ends on the cores that it had.

        Raises:
            ProcessLookupError: the process is gone.
        """
        here = os.sched_getaffinity(0)
        for core in list(self._times):
            try:
                os.sched_setaffinity(0, {core})
            except OSError:
                del self._times[core]
                continue
            self._times[core].append(host_work_us())
        with suppress(OSError):
            os.sched_setaffinity(0, here)
        if not self._times:
            return
        # A quick core is one that was quick in every one of the last looks.
        best = quietest({core: [max(times)] for core, times in self._times.items()}, 1)[0]
        at = self._times.get(-1 if self._at is None else self._at)
        if at is None or statistics.median(at) > SLOWER * max(self._times[best]):
            os.sched_setaffinity(self._pid, {best})
            self.moves += self._at is not None
            self._at = best
        self._free_threads()

    def _free_threads(self) -> None:
        """What the main thread started has its one core: give it back the others'."""
        with suppress(OSError):
            for thread in {int(name) for name in os.listdir(TASKS.format(self._pid))} - self._threads:
                self._threads.add(thread)
                os.sched_setaffinity(thread, self._others)

    def follow(self, process: subprocess.Popen[bytes]) -> int:
        """Look until the process ends; its exit code."""
        while (code := process.poll()) is None:
            # It may end between two calls.
            with suppress(ProcessLookupError):
                self.look()
            time.sleep(EVERY_S)
        return code


def go_first() -> None:
    """Go before other processes, where this user may ask for that."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, FIRST)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cores", type=int, default=4, help="cores that the command gets (4)")
    parser.add_argument("--seconds", type=float, default=4.0, help="seconds for timing all cores (4)")
    parser.add_argument("--follow", action="store_true", help="keep its main thread on a quick core while it runs")
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
        if arguments.follow:
            return _followed(arguments.command, cores, chosen)
        os.execvp(arguments.command[0], arguments.command)  # noqa: S606 - what it is for
    except OSError as error:
        sys.stderr.write(f"{arguments.command[0]} can't be run: {error.strerror}\n")
    return 2


def _followed(command: Sequence[str], cores: Sequence[int], chosen: Sequence[int]) -> int:
    """Run a command under a `Follower`; its exit code, as a shell has it.

    It has a session of its own, so that a signal reaches it once: by this process, which is told by a terminal.

    Raises:
        OSError: it can't be run.
    """
    started: list[subprocess.Popen[bytes]] = []
    early: list[int] = []

    def forward(number: int, _: object) -> None:
        if started:
            started[0].send_signal(number)
        else:
            early.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, forward)
    started.append(subprocess.Popen(command, start_new_session=True))
    for number in early:
        started[0].send_signal(number)
    follower = Follower(started[0].pid, cores, chosen)
    code = follower.follow(started[0])
    sys.stderr.write(f"moved to a quicker core {follower.moves} times\n")
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
