"""`benchmarks.quiet`: which cores a command gets."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import quiet

linux = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores can't be chosen here")


def test_lists_of_cores_read() -> None:
    assert quiet.cores_of("0-2,8\n") == {0, 1, 2, 8}
    assert quiet.cores_of("5") == {5}


def test_a_core_without_a_known_topology_is_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(quiet, "SIBLINGS", str(tmp_path / "{}"))
    (tmp_path / "1").write_text("1,3\n")
    (tmp_path / "2").write_text("no list")
    assert [quiet.siblings(core) for core in (0, 1, 2)] == [{0}, {1, 3}, {2}]


def test_one_thread_of_each_quick_core_and_the_first_core_last(monkeypatch: pytest.MonkeyPatch) -> None:
    # Cores 0 and 1 are one, so are 2 and 3; 4 and 5 are alone, and 5 is slow for a third of the time.
    monkeypatch.setattr(quiet, "siblings", lambda core: {0: {0, 1}, 1: {0, 1}, 2: {2, 3}, 3: {2, 3}}.get(core, {core}))
    times = {0: [20.0] * 3, 1: [20.0] * 3, 2: [23.0] * 3, 3: [22.0] * 3, 4: [24.0] * 3, 5: [22.0, 22.0, 40.0]}
    assert quiet.quietest(times, 2) == [3, 4]
    assert quiet.quietest(times, 9) == [3, 4, 5, 0]


@linux
def test_a_thread_goes_to_the_quickest_core_and_to_the_slowest(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.sched_getaffinity(0)
    moved: list[set[int]] = []
    # Slow for half of the time, and once for long.
    times = {0: [20.0] * 4, 1: [20.0, 22.0, 40.0, 40.0], 2: [21.0, 21.0, 21.0, 900.0], 3: [20.5] * 4}
    monkeypatch.setattr(quiet, "timed", lambda cores, **_: {core: times[core] for core in cores})
    monkeypatch.setattr(quiet, "siblings", lambda core: {core})
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: moved.append(set(cores)))
    turns = quiet.Turns(sorted(times))
    assert turns.move(quick=True) == "quick core 3, fixed work 20.5 us"
    monkeypatch.setattr(turns, "_burn", lambda _: 0)
    assert turns.move(quick=False) == "slow core 1, fixed work 31.0 us, beside 0 of 0 that were to be busy 31.0"
    assert moved == [{3}, {1}]
    assert os.sched_getaffinity(0) == before


@linux
@pytest.mark.parametrize(("known", "busy"), [({2, 3}, [3]), ({2}, [0, 1, 3])])
def test_others_are_busy_beside_the_slowest_core(
    monkeypatch: pytest.MonkeyPatch, known: set[int], busy: list[int]
) -> None:
    """By what shares its core, or by all others where that isn't known; nothing is busy once a quick one is wanted."""
    running: list[Burner] = []

    class Burner:
        def __init__(self, command: list[str], **_: int) -> None:
            self.core = int(command[-1])
            self.stdout = io.BytesIO(b"+")
            running.append(self)

        def kill(self) -> None:
            running.remove(self)

        def communicate(self) -> None:
            assert self not in running

    def times(cores: list[int], **_: Any) -> dict[int, list[float]]:
        return {core: [(25.0 if core == 2 else 20.0) * (1.6 if running else 1.0)] for core in cores}

    monkeypatch.setattr(quiet, "timed", times)
    monkeypatch.setattr(quiet, "siblings", lambda core: known if core in known else {core})
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    monkeypatch.setattr(subprocess, "Popen", Burner)
    with quiet.Turns(range(4)) as turns:
        told = turns.move(quick=False)
        assert told == f"slow core 2, fixed work 25.0 us, beside {len(busy)} of {len(busy)} that were to be busy 40.0"
        assert sorted(burner.core for burner in running) == busy
        assert turns.move(quick=True) == "quick core 1, fixed work 20.0 us"
        assert not running
        turns.move(quick=False)
    assert not running


@linux
def test_what_keeps_a_core_busy_does_and_ends_with_the_process_that_began_it() -> None:
    """On the core that it was given; the process is killed, so that nothing of its own ends it."""
    core = max(os.sched_getaffinity(0))
    began = (
        "import sys\nfrom benchmarks.quiet import Turns\n"
        f"turns = Turns([{core}])\nprint(turns._burn(-1), turns._burners[0].pid, flush=True)\nsys.stdin.read()"
    )
    command = [sys.executable, "-c", began]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        count, burner = map(int, parent.stdout.readline().split())
        try:
            assert count == 1
            assert os.sched_getaffinity(burner) == {core}
            assert os.getpriority(os.PRIO_PROCESS, burner) == 19
            waited(lambda: (used_s(burner) or 0.0) > 0.05)
            parent.kill()
            waited(lambda: used_s(burner) is None)
        finally:
            parent.kill()
            if used_s(burner) is not None:
                with suppress(ProcessLookupError):
                    os.kill(burner, signal.SIGKILL)


@linux
def test_what_could_not_begin_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quiet, "BURNER", "raise SystemExit(1)")
    with quiet.Turns([0, 1]) as turns:
        assert turns._burn(0) == 0
        assert len(turns._burners) == 1
    assert not turns._burners


def waited(done: Callable[[], bool]) -> None:
    """Wait until it is so, 20 seconds at most."""
    end = time.monotonic() + 20
    while not done():
        assert time.monotonic() < end
        time.sleep(0.02)


def used_s(pid: int) -> float | None:
    """What a process has used of processors; None where it has ended, whether or not somebody waits for it."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state == "Z" else (int(fields[10]) + int(fields[11])) / os.sysconf("SC_CLK_TCK")


class Cores:
    """Cores of given speeds in place of the machine's: what a look takes on each, and where a process was put.

    The fixed work takes 8 ms of a clock that stands else: a core that is kept busy for 20 ms does it four times.

    Attributes:
        works: microseconds on each core.
        busy: the same, for those that take another time from the second time in a row on.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, works: dict[int, float]) -> None:
        self.works = works
        self.busy: dict[int, float] = {}
        self.moved: list[tuple[int, set[int]]] = []
        self.looked: list[int] = []
        self.here = {9}
        self.now = 0.0
        monkeypatch.setattr(quiet, "siblings", lambda core: {core})
        monkeypatch.setattr(quiet, "TASKS", "no such folder {}")  # process 77 may be one of this machine's
        monkeypatch.setattr(quiet, "host_work_us", self._work)
        monkeypatch.setattr(quiet, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(os, "sched_setaffinity", self._pin)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(self.here))

    def _work(self) -> float:
        [core] = self.here
        again = self.looked[-1:] == [core]
        self.looked.append(core)
        self.now += 0.008
        return self.busy.get(core, self.works[core]) if again else self.works[core]

    def _pin(self, pid: int, cores: set[int]) -> None:
        if not pid and cores != {9} and not cores & self.works.keys():
            raise OSError(22, "Invalid argument")
        if pid:
            self.moved.append((pid, set(cores)))
        else:
            self.here = set(cores)

    def look(self, follower: quiet.Follower, times: int = 1) -> list[int]:
        """Look so often; the cores that were looked at."""
        self.looked.clear()
        for _ in range(times):
            follower.look()
        assert self.here == {9}
        return list(self.looked)


def timed_before(*shares: float) -> dict[int, list[float]]:
    """Times on cores 1, 2, ... that were slow for such shares of a hundred looks."""
    slow = [round(100 * share) for share in shares]
    return {core: [20.0] * (100 - each) + [40.0] * each for core, each in enumerate(slow, 1)}


@linux
def test_a_process_is_moved_off_a_core_that_stays_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """After four slow looks in a row, to the one that was slow least."""
    cores = Cores(monkeypatch, {1: 20.0, 2: 20.0, 3: 20.0})
    follower = quiet.Follower(77, timed_before(0.1, 0.02, 0.01), [1, 2])
    cores.look(follower, 5)
    for _ in range(3):
        cores.works[1] = 40.0
        cores.look(follower, 3)
        cores.works[1] = 20.0
        cores.look(follower)
    assert cores.moved == []
    cores.works[1] = 40.0
    cores.look(follower, 3)
    assert cores.moved == []
    cores.look(follower)
    assert cores.moved == [(77, {3})]
    assert (follower.moves, follower.slow, follower.looks) == (1, 13, 21)


@linux
def test_slow_looks_in_a_row_are_counted_from_when_a_process_came(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = Cores(monkeypatch, {1: 40.0, 2: 20.0, 3: 20.0})
    follower = quiet.Follower(77, timed_before(0.45, 0.31, 0.3), [1, 2])
    cores.look(follower, 4)
    assert cores.moved == [(77, {3})]
    cores.works[3] = 40.0
    cores.look(follower, 3)
    assert cores.moved == [(77, {3})]
    cores.look(follower)
    assert cores.moved == [(77, {3}), (77, {2})]


@linux
def test_three_cores_are_tried_in_order_of_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kept busy, while the process's own stays slow; none quick, it stays, and tries again four looks later."""
    cores = Cores(monkeypatch, {1: 40.0, 2: 40.0, 3: 40.0, 4: 40.0, 5: 20.0})
    follower = quiet.Follower(77, timed_before(0.0, 0.2, 0.1, 0.0, 0.9), [1, 2])
    looked = cores.look(follower, 3)
    assert looked[::2] == [1, 1, 1]
    assert len(looked) == 6
    tried = [1, *[4] * 4, *[3] * 4, *[2] * 4]
    assert cores.look(follower) == tried
    assert len(cores.look(follower, 3)) == 6
    assert cores.look(follower) == tried
    assert cores.moved == []
    # As before where its own is quick once.
    cores.works[1] = 20.0
    assert cores.look(follower, 2)[::2] == [1, 1]
    cores.works[1] = 40.0
    assert len(cores.look(follower, 3)) == 6
    cores.works[3] = 20.0
    assert cores.look(follower) == tried[:9]
    assert cores.moved == [(77, {3})]
    assert follower.moves == 1


@linux
def test_a_core_that_was_slow_for_longer_is_better_than_one_that_stays_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = Cores(monkeypatch, {1: 40.0, 2: 20.0})
    follower = quiet.Follower(77, timed_before(0.0, 0.9), [1, 2])
    cores.look(follower, 4)
    assert cores.moved == [(77, {2})]


@linux
def test_what_a_core_takes_when_it_is_kept_busy_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the median: 2 is quick in one look alone, and 3 slow."""
    cores = Cores(monkeypatch, {1: 40.0, 2: 20.0, 3: 900.0})
    cores.busy = {2: 40.0, 3: 20.0}
    follower = quiet.Follower(77, timed_before(0.0, 0.0, 0.9), [1, 2])
    cores.look(follower, 4)
    assert cores.moved == [(77, {3})]


@linux
def test_a_core_that_was_tried_for_nothing_loses_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = Cores(monkeypatch, {1: 40.0, 2: 40.0, 3: 40.0, 4: 40.0, 5: 40.0})
    follower = quiet.Follower(77, timed_before(0.0, 0.5, 0.5, 0.5, 0.6), [1, 2])
    cores.look(follower, 3)
    assert 5 not in cores.look(follower)
    assert 5 in cores.look(follower, 30)


@linux
def test_other_hardware_threads_of_its_core_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = Cores(monkeypatch, {1: 40.0, 2: 20.0, 3: 40.0})
    monkeypatch.setattr(quiet, "siblings", lambda core: {3} if core == 3 else {1, 2})
    follower = quiet.Follower(77, timed_before(0.0, 0.0, 0.5), [1])
    assert set(cores.look(follower, 8)) == {1, 3}
    assert cores.moved == []


@linux
def test_a_look_that_fails_gives_the_cores_back(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = Cores(monkeypatch, {1: 20.0, 2: 20.0})
    follower = quiet.Follower(77, timed_before(0.0, 0.0), [1, 2])
    monkeypatch.setattr(quiet, "host_work_us", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        follower.look()
    assert cores.here == {9}


@linux
def test_slow_is_over_1_15_times_the_quickest_core(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = Cores(monkeypatch, {1: 22.9, 2: 20.0})
    times = {1: [24.0] * 9, 2: [20.0] * 5 + [90.0] * 4}
    follower = quiet.Follower(77, times, [1, 2])
    cores.look(follower, 8)
    assert cores.moved == []
    assert follower.slow == 0
    cores.works[1] = 23.1
    cores.look(follower, 4)
    assert cores.moved == [(77, {2})]


@linux
def test_bad_cores_are_looked_at_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the process's own, one core a look: good ones in turn, one that is always slow a tenth as often."""
    cores = Cores(monkeypatch, {1: 20.0, 2: 20.0, 3: 20.0, 4: 40.0})
    follower = quiet.Follower(77, timed_before(0.0, 0.0, 0.0, 1.0), [1, 2])
    looked = cores.look(follower, 200)
    counts = {core: looked.count(core) for core in (1, 2, 3, 4)}
    assert counts[1] == 200
    assert counts[2] + counts[3] + counts[4] == 200
    assert abs(counts[2] - counts[3]) <= 2
    assert 6 <= counts[4] <= 14


@linux
@pytest.mark.parametrize(("share", "first"), [(0.77, 2), (0.72, 3)])
def test_a_look_after_long_stands_for_a_second_at_most(
    share: float, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One quick look at a core that was always slow doesn't make it good: from 1 to 0.8, by 20 looks of 100.

    And a slow one at another takes it from 0.77 to 0.82, or from 0.72 to 0.78.
    """
    cores = Cores(monkeypatch, {1: 20.0, 2: 20.0, 3: 40.0})
    follower = quiet.Follower(77, timed_before(0.0, 1.0, share), [1, 2])
    follower.looks = 500
    assert set(cores.look(follower, 2)) == {1, 2, 3}
    cores.works = dict.fromkeys(cores.works, 40.0)
    cores.look(follower, 3)
    looked = cores.look(follower)
    assert looked[1] == first


@linux
def test_a_core_that_is_gone_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = Cores(monkeypatch, {1: 20.0, 2: 20.0, 3: 20.0})
    follower = quiet.Follower(77, timed_before(0.0, 0.0, 0.9), [1, 2])
    del cores.works[2]
    cores.look(follower, 4)
    del cores.works[1]
    assert cores.look(follower, 4) == [3] * 7
    assert cores.moved == [(77, {3})]
    assert cores.look(follower, 4) == [3] * 4
    cores.works.clear()
    assert cores.look(follower, 8) == []
    assert cores.moved == [(77, {3})]


@linux
def test_a_core_that_is_had_again_counts_as_slow_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process's own; others aren't looked at any more."""
    cores = Cores(monkeypatch, {1: 20.0, 2: 20.0, 3: 20.0})
    follower = quiet.Follower(77, timed_before(0.0, 0.0, 0.5), [1, 2])
    del cores.works[1]
    cores.look(follower)
    cores.works[1] = 40.0
    cores.look(follower, 3)
    assert cores.moved == [(77, {2})]
    cores.works |= {1: 20.0, 2: 40.0}
    cores.look(follower, 4)
    assert cores.moved == [(77, {2}), (77, {3})]


@linux
def test_what_a_followed_process_starts_gets_its_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Once each: its threads, processes that its main thread started, their threads and what they started."""
    cores = Cores(monkeypatch, {1: 20.0, 2: 20.0, 3: 20.0})
    monkeypatch.setattr(quiet, "TASKS", str(tmp_path / "{}"))

    def task(process: int, thread: int, children: str = "") -> None:
        (tmp_path / str(process) / str(thread)).mkdir(parents=True)
        (tmp_path / str(process) / str(thread) / "children").write_text(children)

    task(77, 77)
    task(77, 78)
    follower = quiet.Follower(77, timed_before(0.0, 0.0, 0.0), [2, 3])
    cores.look(follower, 2)
    assert cores.moved == [(78, {2, 3})]
    (tmp_path / "77" / "77" / "children").write_text("80 90 ")
    task(90, 90, "91")
    task(90, 92)
    task(91, 91)
    cores.look(follower, 2)
    assert sorted(cores.moved) == [(each, {2, 3}) for each in (78, 90, 91, 92)]


@linux
def test_a_followed_process_begins_on_the_quickest_core_and_may_be_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = Cores(monkeypatch, {1: 20.0, 2: 20.0})
    waits: list[float] = []
    monkeypatch.setattr(quiet, "time", SimpleNamespace(sleep=waits.append))

    class Process:
        left = 4

        def poll(self) -> int | None:
            self.left -= 1
            return None if self.left > 0 else 5

    follower = quiet.Follower(77, timed_before(0.5, 0.1), [2, 1])
    monkeypatch.setattr(follower, "look", lambda: (_ for _ in ()).throw(ProcessLookupError()))
    process: Any = Process()
    assert follower.follow(process) == 5
    assert cores.moved == [(77, {2})]
    assert waits == [0.05] * 3
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: (_ for _ in ()).throw(ProcessLookupError()))
    assert follower.follow(process) == 5


@linux
def test_a_process_that_a_followed_command_starts_has_all_its_cores() -> None:
    """As the system lists them."""
    here = len(os.sched_getaffinity(0))
    mine = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    if here < 2 or not mine.exists():
        pytest.skip("one core here, or the system doesn't list a process's children")
    code = "import os, time; time.sleep(0.5); print(len(os.sched_getaffinity(0)), flush=True)"
    parent = f"import subprocess, sys, time; time.sleep(0.2); subprocess.run([sys.executable, '-c', {code!r}]); {code}"
    words = ["-m", "benchmarks.quiet", "--seconds", "0.05", "--cores", "2", "--follow", "--", sys.executable]
    done = subprocess.run(
        [sys.executable, *words, "-c", parent], check=True, timeout=60, stdout=subprocess.PIPE, text=True
    )
    assert done.stdout == "2\n1\n"


@linux
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_a_followed_command_once(number: signal.Signals) -> None:
    code = (
        "import os, signal, sys, time\n"
        "for each in (signal.SIGINT, signal.SIGTERM):\n"
        "    signal.signal(each, lambda n, _: print('got', int(n), flush=True))\n"
        "print('up, in its own session', os.getsid(0) == os.getpid(), flush=True)\n"
        "time.sleep(0.6); time.sleep(0.6)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_DFL); os.kill(os.getpid(), signal.SIGTERM)"
    )
    words = ["-m", "benchmarks.quiet", "--seconds", "0.05", "--follow", "--", sys.executable, "-c", code]
    with subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up, in its own session True\n"
        os.killpg(process.pid, number)
        assert process.stdout.read() == f"got {int(number)}\n"
    assert process.returncode == 128 + signal.SIGTERM


@linux
def test_a_signal_that_comes_while_the_command_starts_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []

    class Process:
        pid = 77

        def __init__(self, *_: object, **__: object) -> None:
            signal.raise_signal(signal.SIGTERM)

        def send_signal(self, number: int) -> None:
            sent.append(number)

    monkeypatch.setattr(subprocess, "Popen", Process)
    monkeypatch.setattr(quiet.Follower, "follow", lambda *_: 0)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        assert quiet._followed(["kpolicy"], timed_before(0.0), [1]) == 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert sent == [signal.SIGTERM]


@linux
@pytest.mark.parametrize(("code", "seen"), [("import time; time.sleep(0.3)", 0), ("raise SystemExit(3)", 3)])
def test_a_followed_command_ends_as_it_does(code: str, seen: int, capfd: pytest.CaptureFixture[str]) -> None:
    before = os.sched_getaffinity(0)
    try:
        words = ["--seconds", "0.05", "--follow", "--", sys.executable, "-c", code]
        done = subprocess.run([sys.executable, "-m", "benchmarks.quiet", *words], check=False, timeout=60)
    finally:
        os.sched_setaffinity(0, before)
    assert done.returncode == seen
    told = re.search(
        r"moved to a quicker core \d+ times; its core was slow in (\d+) of (\d+) looks", capfd.readouterr().err
    )
    assert told
    assert int(told[1]) <= int(told[2])


@linux
def test_the_command_gets_the_chosen_cores_and_single_threaded_pools(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    before = os.sched_getaffinity(0)
    given: list[tuple[Any, ...]] = []
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setattr(os, "setpriority", lambda *_: (_ for _ in ()).throw(PermissionError()))
    monkeypatch.setattr(
        os, "execvp",
        lambda file, words: given.append((file, words, os.sched_getaffinity(0), os.environ["OMP_NUM_THREADS"])),
    )  # fmt: skip
    try:
        quiet.main(["--cores", "1", "--seconds", "0.05", "--", "kpolicy", "doctor", "--json"])
    finally:
        os.sched_setaffinity(0, before)
    [(file, words, cores, threads)] = given
    assert (file, words, threads) == ("kpolicy", ["kpolicy", "doctor", "--json"], "1")
    assert len(cores) == 1
    assert cores <= before
    assert "taken, 1" in capfd.readouterr().err


@linux
def test_how_often_each_core_was_slow_is_told(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Beside the quickest one's median."""
    asked: list[tuple[int, int, float]] = []
    times = {1: [20.0] * 4, 2: [20.0, 20.0, 22.9, 23.1], 3: [40.0] * 4}

    def timed(cores: list[int], *, rounds: int, seconds: float) -> dict[int, list[float]]:
        asked.append((len(cores), rounds, rounds * seconds * len(cores)))
        return times

    monkeypatch.setattr(quiet, "timed", timed)
    monkeypatch.setattr(quiet, "siblings", lambda core: {core})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2, 3})
    assert quiet.main(["--cores", "2"]) == 0
    assert asked == [(3, 16, pytest.approx(8.0))]
    told = capfd.readouterr().err
    assert "core   2: fixed work  21.4 us in the median,  21.5 in the mean, slow in  25%  taken, 2" in told
    assert "core   3: fixed work  40.0 us in the median,  40.0 in the mean, slow in 100%\n" in told


@linux
@pytest.mark.parametrize("words", [["--cores", "0"], ["--seconds", "0"], ["--cores", "x"]])
def test_numbers_that_name_nothing_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        quiet.main(words)
    assert stopped.value.code == 2
    assert words[1] in capsys.readouterr().err


@linux
@pytest.mark.parametrize("more", [[], ["--follow"]])
def test_a_command_that_is_not_there_is_named(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    before = os.sched_getaffinity(0)
    monkeypatch.setattr(os, "setpriority", lambda *_: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    try:
        assert quiet.main(["--seconds", "0.05", *more, "--", "no-such-command-here"]) == 2
    finally:
        os.sched_setaffinity(0, before)
    assert "no-such-command-here can't be run" in capfd.readouterr().err


@linux
def test_without_a_command_cores_are_shown_and_kept() -> None:
    before = os.sched_getaffinity(0)
    assert quiet.main(["--seconds", "0.05"]) == 0
    assert os.sched_getaffinity(0) == before
