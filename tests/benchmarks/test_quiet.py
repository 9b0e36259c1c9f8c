"""`benchmarks.quiet`: which cores a command gets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
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
    assert turns.move(quick=False) == "slow core 1, fixed work 31.0 us"
    assert moved == [{3}, {1}]
    assert os.sched_getaffinity(0) == before


@linux
def test_a_process_is_moved_off_a_core_that_stays_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    here, moved = [0], []
    #                 look 1     2     3     4     5     6
    times = {1: iter([20.0, 20.0, 40.0, 40.0, 40.0, 40.0]), 2: iter([30.0, 21.0, 21.0, 21.0, 21.0, 21.0])}
    monkeypatch.setattr(quiet, "siblings", lambda core: {core})
    monkeypatch.setattr(quiet, "host_work_us", lambda: next(times[here[0]]))

    def pin(pid: int, cores: set[int]) -> None:
        if pid:
            moved.append((pid, set(cores)))
        else:
            here[:] = cores

    monkeypatch.setattr(os, "sched_setaffinity", pin)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1})
    follower = quiet.Follower(77, [1, 2], [1, 2])
    after = []
    for _ in range(6):
        follower.look()
        after.append(len(moved))
    # At once to the quick one; off it when it was slow in two of three looks and the other quick in all three.
    assert moved == [(77, {1}), (77, {2})]
    assert after == [1, 1, 1, 2, 2, 2]
    assert follower.moves == 1


@linux
def test_a_core_a_tenth_slower_is_kept_and_one_that_is_gone_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    here, moved = [0], []
    works = {1: 20.0, 2: 18.5}
    monkeypatch.setattr(quiet, "siblings", lambda core: {core})
    monkeypatch.setattr(quiet, "host_work_us", lambda: works[here[0]])

    def pin(pid: int, cores: set[int]) -> None:
        if not pid and not cores & works.keys():
            raise OSError(22, "Invalid argument")
        if pid:
            moved.append(cores)
        else:
            here[:] = cores

    monkeypatch.setattr(os, "sched_setaffinity", pin)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1})
    follower = quiet.Follower(77, [1, 2], [1, 2])
    works[2] = 21.0
    follower.look()
    works[2] = 18.5
    for _ in range(4):
        follower.look()
    assert moved == [{1}]
    del works[1]
    follower.look()
    assert moved == [{1}, {2}]
    works.clear()
    follower.look()
    assert moved == [{1}, {2}]


@linux
def test_threads_that_a_followed_process_starts_get_their_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pinned: list[tuple[int, set[int]]] = []
    monkeypatch.setattr(quiet, "TASKS", str(tmp_path / "{}"))
    monkeypatch.setattr(quiet, "host_work_us", lambda: 20.0)
    monkeypatch.setattr(quiet, "siblings", lambda core: {core})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1})
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: pinned.append((pid, set(cores))))
    for thread in (77, 78):
        (tmp_path / "77" / str(thread)).mkdir(parents=True)
    follower = quiet.Follower(77, [1, 2], [2, 3])
    follower.look()
    follower.look()
    assert [each for each in pinned if each[0]] == [(77, {1}), (78, {2, 3})]


@linux
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_a_followed_command_once(number: signal.Signals) -> None:
    code = (
        "import signal, sys, time\n"
        "for each in (signal.SIGINT, signal.SIGTERM):\n"
        "    signal.signal(each, lambda n, _: print('got', int(n), flush=True))\n"
        "print('up', flush=True)\n"
        "time.sleep(0.6); time.sleep(0.6)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_DFL); import os; os.kill(os.getpid(), signal.SIGTERM)"
    )
    words = ["-m", "benchmarks.quiet", "--seconds", "0.05", "--follow", "--", sys.executable, "-c", code]
    with subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        os.killpg(process.pid, number)
        assert process.stdout.read() == f"got {int(number)}\n"
    assert process.returncode == 128 + signal.SIGTERM


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
    assert "moved to a quicker core" in capfd.readouterr().err


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
