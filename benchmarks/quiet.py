"""Runs a command on the quietest cores of this machine: ``python -m benchmarks.quiet -- kpolicy run ...``.

What a step launches from Python takes as long as the core that does it: beside a busy hardware thread of the same core
1.6 times as long, on virtual machines for seconds at a time. Each core's fixed work (`kpolicy.host_speed`) is timed in
turn, several times over; the command gets the quickest ones, one hardware thread of each and not the first core, which
serves interrupts, where there are others. Its libraries' own pools get one thread, so that none spins beside it, and it
goes before other processes where this user may ask for that. ``--follow`` goes on looking while it runs: where its core
turns slow and stays so, the command's main thread moves to one that is quick when it is busy.

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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from kpolicy.host_speed import host_work_us

SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
TASKS = "/proc/{}/task"
POOLS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
FIRST = -10
"""Niceness asked for."""
SLOWER = 1.15
"""The fixed work is slow where it takes longer than so many times the quickest core's median."""
ROUNDS = 16
"""Turns that each core is timed in."""
BURNT_S = 0.2
"""`Turns`: seconds that a slow core is looked at for, with others busy beside it"""
BURNER = """
import os, sys
parent, core = map(int, sys.argv[1:])
os.sched_setaffinity(0, {core})
os.setpriority(os.PRIO_PROCESS, 0, 19)
os.write(1, b"+")
while os.getppid() == parent:
    for _ in range(100_000):
        pass
"""
"""A program that keeps a core busy for as long as the process lives that began it, and says when it does"""
EVERY_S, IN_A_ROW = 0.05, 4
"""`Follower`: seconds between looks, and slow ones in a row that a core is left for"""
TRIED, TRIED_S = 3, 0.02
"""`Follower`: cores that are tried at a time, and seconds of work on each"""
MEMORY, LONGEST = 100, 20
"""`Follower`: looks that a core's share of slow ones is over, and that one stands for at most"""


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


def slow_from(times: Mapping[int, Sequence[float]]) -> float:
    """Microseconds from which the fixed work counts as slow: by the median of the quickest core."""
    return SLOWER * min(statistics.median(found) for found in times.values())


def slow_share(found: Sequence[float], limit: float) -> float:
    """The share of the times that are over the limit."""
    return sum(each > limit for each in found) / len(found)


class Turns:
    """The quickest core for this thread now, and the slowest then, looked at each time: a core is slow for seconds.

    Threads that run beside this one keep their cores. While this one is on the slowest, the other hardware threads of
    its core are kept busy, or where there are none that it may use, all other cores, those of this process's other
    threads among them. Used as a context, it leaves none busy behind.

    Args:
        cores: those to choose from.
    """

    def __init__(self, cores: Sequence[int]) -> None:
        self._cores = list(cores)
        self._burners: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Turns:
        return self

    def __exit__(self, *_: object) -> None:
        self._rest()

    def move(self, *, quick: bool) -> str:
        """Run on the quickest or the slowest core from here on; which that is, in words."""
        self._rest()
        times = timed(self._cores, rounds=2, seconds=0.015)
        core = quietest(times, 1)[0] if quick else slowest(times)
        told = f"{'quick' if quick else 'slow'} core {core}, fixed work {statistics.median(times[core]):.1f} us"
        if not quick:
            busy = self._burn(core)
            work_us = statistics.median(timed([core], rounds=1, seconds=BURNT_S)[core])
            told += f", beside {busy} of {len(self._burners)} that were to be busy {work_us:.1f}"
        os.sched_setaffinity(0, {core})
        return told

    def _burn(self, core: int) -> int:
        """Keep what shares a core with that hardware thread busy; how many have begun."""
        for each in (siblings(core) & {*self._cores}) - {core} or {*self._cores} - {core}:
            command = [sys.executable, "-c", BURNER, str(os.getpid()), str(each)]
            self._burners.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL))
        return sum(burner.stdout is not None and bool(burner.stdout.read(1)) for burner in self._burners)

    def _rest(self) -> None:
        """Nothing is kept busy any more."""
        for burner in self._burners:
            burner.kill()
        for burner in self._burners:
            # Its pipe is closed, too.
            burner.communicate()
        self._burners.clear()


class Follower:
    """Keeps the main thread of a process on a quick core, where cores are slow for parts of a second.

    The thread stays as long as it can: a busy core that is quick tends to stay so. It leaves a core that is slow in
    `IN_A_ROW` looks one after the other, for the first of the `TRIED` slow least of late that is quick when it is kept
    busy for `TRIED_S`: a look at an idle core says little. On a host with 16 virtual ones 10 were slow when looked at
    in turns; of three kept busy for 3 s one was quick, one after a second, and one for its first half second only.

    A look takes the thread's core and one other some 0.1 ms each: one step in some tens is that much longer. The cores
    tried are others than the thread's; what runs there waits. Threads and processes that the thread starts get all of
    `others` at the next look, processes where the system lists them.

    Args:
        pid: the process.
        times: microseconds of the fixed work on each core to choose from, timed before.
        others: the cores of its other threads, the quickest first.

    Attributes:
        looks: how often its core was looked at.
        slow: how often it was slow then.
        moves: how often it was moved.
    """

    def __init__(self, pid: int, times: Mapping[int, Sequence[float]], others: Sequence[int]) -> None:
        self._pid = pid
        self._others = set(others)
        self._threads = {pid}
        self._limit = slow_from(times)
        self._shares = {core: slow_share(found, self._limit) for core, found in times.items()}
        self._seen = dict.fromkeys(times, 0)
        self._at = others[0]
        self._in_a_row = 0
        self.looks = self.slow = self.moves = 0

    def look(self) -> None:
        """Time the fixed work on the thread's core and on one whose turn it is, and move where its own stays slow.

        One that is slow mostly waits up to ten times as long for its turn. A core that can't be had any more is left
        out, and so are the other hardware threads of the thread's. The calling thread ends on the cores that it had.

        Raises:
            ProcessLookupError: the process is gone.
        """
        here = os.sched_getaffinity(0)
        self.looks += 1
        try:
            quick = self._quicker()
        finally:
            with suppress(OSError):
                os.sched_setaffinity(0, here)
        if quick is not None:
            os.sched_setaffinity(self._pid, {quick})
            self._at = quick
            self.moves += 1
        self._free(self._pid)

    def _quicker(self) -> int | None:
        """A quick core to go to, where the thread's own stays slow; None where it stays."""
        slow = self._is_slow(self._at)
        self.slow += slow
        self._in_a_row = self._in_a_row + 1 if slow else 0
        beside = siblings(self._at)
        others = {core: share for core, share in self._shares.items() if core not in beside}
        if self._in_a_row >= IN_A_ROW:
            # The next are tried after as many looks again: what runs on a core that is tried waits.
            self._in_a_row = 0
            best = quietest({core: [share] for core, share in others.items()}, TRIED)
            return next((core for core in best if not self._is_slow(core, TRIED_S)), None)
        if others:
            self._is_slow(max(others, key=lambda core: (self.looks - self._seen[core]) * (1.1 - others[core])))
        return None

    def _is_slow(self, core: int, seconds: float = 0.0) -> bool:
        """Whether the fixed work is slow on a core now, or can't be done there; in its share of slow looks from then.

        Given seconds, by the median of so long. A look stands for the time since the last, a second at most.
        """
        try:
            os.sched_setaffinity(0, {core})
        except OSError:
            self._shares.pop(core, None)
            return True
        found, end = [host_work_us()], time.perf_counter() + seconds
        while time.perf_counter() < end:
            found.append(host_work_us())
        slow = statistics.median(found) > self._limit
        weight = min(self.looks - self._seen[core], LONGEST) / MEMORY
        share = self._shares.get(core, 1.0)
        self._shares[core] = share + weight * (slow - share)
        self._seen[core] = self.looks
        return slow

    def _free(self, pid: int) -> None:
        """What the main thread started has its one core: give it back the others'."""
        tasks = Path(TASKS.format(pid))
        with suppress(OSError):
            for thread in {int(task.name) for task in tasks.iterdir()} - self._threads:
                self._threads.add(thread)
                os.sched_setaffinity(thread, self._others)
        with suppress(OSError):
            for child in (tasks / str(pid) / "children").read_text().split():
                self._free(int(child))

    def follow(self, process: subprocess.Popen[bytes]) -> int:
        """Look until the process ends, its main thread on the quickest core to begin with; its exit code."""
        with suppress(ProcessLookupError):
            os.sched_setaffinity(self._pid, {self._at})
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
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds for timing all cores (8)")
    parser.add_argument("--follow", action="store_true", help="keep its main thread on a quick core while it runs")
    parser.add_argument("command", nargs="*", help="the command, after --; without one the cores are only shown")
    arguments = parser.parse_args(argv)
    if arguments.cores < 1 or arguments.seconds <= 0:
        parser.error(f"--cores {arguments.cores} --seconds {arguments.seconds:g}: both are above 0")
    if not hasattr(os, "sched_setaffinity"):
        parser.error("this system doesn't let a process choose its cores; Linux does")
    cores = sorted(os.sched_getaffinity(0))
    times = timed(cores, rounds=ROUNDS, seconds=arguments.seconds / ROUNDS / len(cores))
    chosen, limit = quietest(times, arguments.cores), slow_from(times)
    for core in cores:
        mark = f"  taken, {chosen.index(core) + 1}" if core in chosen else ""
        middle, mean = statistics.median(times[core]), statistics.fmean(times[core])
        sys.stderr.write(
            f"core {core:>3}: fixed work {middle:5.1f} us in the median, {mean:5.1f} in the mean, "
            f"slow in {slow_share(times[core], limit):4.0%}{mark}\n"
        )
    if not arguments.command:
        return 0
    sys.stderr.flush()
    os.sched_setaffinity(0, chosen)
    go_first()
    os.environ.update(dict.fromkeys(POOLS, "1"))
    try:
        if arguments.follow:
            return _followed(arguments.command, times, chosen)
        os.execvp(arguments.command[0], arguments.command)  # noqa: S606 - what it is for
    except OSError as error:
        sys.stderr.write(f"{arguments.command[0]} can't be run: {error.strerror}\n")
    return 2


def _followed(command: Sequence[str], times: Mapping[int, Sequence[float]], chosen: Sequence[int]) -> int:
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
    follower = Follower(started[0].pid, times, chosen)
    code = follower.follow(started[0])
    sys.stderr.write(
        f"moved to a quicker core {follower.moves} times; "
        f"its core was slow in {follower.slow} of {follower.looks} looks, {EVERY_S * 1e3:.0f} ms apart or more\n"
    )
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
