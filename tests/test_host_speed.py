"""The host's speed: noted while costs are measured and beside each step, and what a table makes of it."""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import subprocess
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import attrs
import pytest

from kpolicy.costs import CostTable, Curve, HostCost
from kpolicy.decision import Decision, Launch
from kpolicy.errors import ProfileError
from kpolicy.host_speed import SpeedTimer, felt, host_work_us, launching_takes, steadied, work_inside_us
from kpolicy.modes import Mode, Rows
from kpolicy.reasons import Reason
from kpolicy.schemas import StepEntry
from kpolicy.shapes import BatchShape
from kpolicy.simulate.fidelity import expected_cost, fidelity
from kpolicy.step_effects import StepEffects

COSTS = CostTable(
    version="noted", measured=True, full=Curve([1], [100.0]), piecewise=Curve([1], [110.0]), eager=Curve([1], [120.0]),
    host_full=HostCost(50.0, 1.0), host_piecewise=HostCost(300.0, 1.0, 20.0, 30.0),
    host_eager=HostCost(900.0, 1.0, 20.0, 30.0), step_us=80.0, host_work_us=40.0,
)  # fmt: skip


def test_the_least_of_three_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    # Runs of 70, 40 and 90 us.
    times = itertools.chain.from_iterable((start, start + us / 1e6) for start, us in ((1, 70), (2, 40), (3, 90)))
    monkeypatch.setattr("kpolicy.host_speed.time.perf_counter", lambda: next(times))
    assert host_work_us() == pytest.approx(40)


def test_launching_slows_by_less_than_the_work() -> None:
    assert [launching_takes(times) for times in (1.0, 1.5, 2.0, 3.0)] == pytest.approx([1.0, 1.425, 1.85, 2.7])
    found = [launching_takes(tenths / 10) for tenths in range(1, 50)]
    assert found == sorted(set(found))
    assert found[0] > 0


def test_a_slower_host_changes_the_hosts_times_alone() -> None:
    """The work takes half as long again, launching 1.425 times as long."""
    costs = attrs.evolve(COSTS, effects=StepEffects(eager_new_us=200.0, padding_share=(0.5, 0.9)))
    slow = costs.at_host_speed(60.0)
    assert slow.host_work_us == 60
    assert slow.step_us == pytest.approx(1.425 * costs.step_us)
    assert slow.effects == attrs.evolve(costs.effects, eager_new_us=slow.effects.eager_new_us)
    assert slow.effects.eager_new_us == pytest.approx(285.0)
    for name in ("host_full", "host_piecewise", "host_eager"):
        before, now = getattr(costs, name), getattr(slow, name)
        for part in ("base_us", "req_us", "decode_us", "prefill_us"):
            assert getattr(now, part) == pytest.approx(1.425 * getattr(before, part))
    assert (slow.full, slow.piecewise, slow.eager) == (costs.full, costs.piecewise, costs.eager)
    assert slow.decode_attention == costs.decode_attention
    assert costs.at_host_speed(40.0) == costs
    quick = costs.at_host_speed(20.0)
    assert quick.step_us == pytest.approx(0.575 * costs.step_us)
    # The law starts from the speed that a table was measured at.
    assert slow.at_host_speed(40.0).step_us == pytest.approx(1.02125 * costs.step_us)


@pytest.mark.parametrize(("noted", "now"), [(0.0, 60.0), (40.0, None), (40.0, 0.0)])
def test_nothing_changes_where_a_speed_was_not_noted(noted: float, now: float | None) -> None:
    costs = attrs.evolve(COSTS, host_work_us=noted)
    assert costs.at_host_speed(now) is costs


def test_fidelity_holds_a_step_to_the_host_as_it_was() -> None:
    costs = COSTS
    shape = BatchShape(decodes=[(1, 4)], decode_kv_tokens=256, max_kv_len=64)
    launches = (Launch(Rows.ALL, None),)
    plain = costs.cost(launches, shape.numbers)
    # The slow host bounds the step; its times are 1.425 times as long.
    slow_us = 1.425 * (plain.host_us + costs.step_us)
    decision = Decision(Mode.EAGER, launches, Reason.ONLY_LEGAL, None)
    noted = StepEntry.of(0, shape, decision, cycle_us=slow_us, host_work_us=60.0)
    assert plain.host_us > plain.device_us
    assert expected_cost(noted, costs).cycle_us == pytest.approx(slow_us)
    assert fidelity([noted], costs)[-1].error == pytest.approx(0, abs=1e-9)
    unnoted = attrs.evolve(noted, host_work_us=None)
    assert fidelity([unnoted], costs)[-1].error == pytest.approx(1 - 1 / 1.425)


def test_a_time_below_0_is_an_error_that_names_it() -> None:
    with pytest.raises(ProfileError, match=r"host_work_us is -5"):
        COSTS.at_host_speed(-5)


def test_late_notes_are_not_the_hosts_speed() -> None:
    """Nor are two one after the other: nine notes are looked at."""
    quick, slow = 10 * [20.0], 10 * [30.0]
    late = [*quick, *slow]
    late[3] = late[4] = late[15] = late[16] = 200.0
    assert steadied(late) == quick + slow
    assert steadied([]) == []
    assert steadied([20.0]) == [20.0]


def test_what_is_felt_of_a_core_is_its_mean_speed() -> None:
    assert felt([20.0, 20.0, 29.0], around=1) == pytest.approx([20.0, 23.0, 24.5])
    assert felt(9 * [20.0] + 9 * [30.0])[4:14] == pytest.approx([20.0 + 10 * i / 9 for i in range(10)])
    assert felt([]) == []


def busy(seconds: float) -> tuple[float, float]:
    """When work of the interpreter began and ended, that takes so long."""
    begin = now = time.perf_counter()
    while now < begin + seconds:
        now = time.perf_counter()
    return begin, now


@pytest.fixture
def alarms() -> Iterator[list[int]]:
    """Signals that another handler of the process got, which is there before a timer and after it."""
    got: list[int] = []

    def handler(number: int, _: object) -> None:
        got.append(number)

    before = signal.signal(signal.SIGALRM, handler)
    yield got
    assert signal.getsignal(signal.SIGALRM) is handler
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    busy(0.02)
    assert not got
    signal.signal(signal.SIGALRM, before)


def noted(timer: SpeedTimer, count: int = 8) -> tuple[float, float]:
    """When work began and ended, inside which so many notes came; a minute at most."""
    begin = time.perf_counter()
    while len(timer._noted) < count and time.perf_counter() < begin + 60:
        busy(0.01)
    return begin, time.perf_counter()


@pytest.mark.usefixtures("alarms")
def test_a_timer_notes_inside_what_runs_and_leaves_nothing_behind() -> None:
    with SpeedTimer() as timer:
        begin, end = noted(timer)
        inside_us = work_inside_us(begin, end)
        assert inside_us == timer.felt_us(begin, end) > 0
    assert len(timer._noted) >= 8
    assert work_inside_us(begin, end) == 0
    # Once more it begins anew.
    with timer:
        assert timer.felt_us(begin, end) == 0


def test_a_note_is_its_quickest_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of 9, 5 and 40 us: neither what the signal left in the caches counts nor an interruption."""
    runs = [(1.0, 9), (2.0, 5), (3.0, 40)]
    times = itertools.chain([0.5], itertools.chain.from_iterable((start, start + us / 1e6) for start, us in runs))
    monkeypatch.setattr("kpolicy.host_speed.time.perf_counter", lambda: next(times))
    timer = SpeedTimer()
    timer._note()
    assert list(timer._noted) == [(0.5, pytest.approx(15))]


@pytest.mark.usefixtures("alarms")
def test_there_is_one_timer_at_a_time() -> None:
    with SpeedTimer() as timer, pytest.raises(RuntimeError, match="open already"), SpeedTimer():
        pass
    assert not timer._open
    with SpeedTimer():
        assert signal.getitimer(signal.ITIMER_REAL)[1] == pytest.approx(0.004)


@pytest.mark.usefixtures("alarms")
def test_a_timer_ends_with_what_it_was_opened_for() -> None:
    def fails() -> None:
        with SpeedTimer():
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()


@pytest.mark.usefixtures("alarms")
def test_a_timer_that_cannot_be_set_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(signal, "siginterrupt", fails)
        with pytest.raises(KeyboardInterrupt), SpeedTimer():
            pass
    with SpeedTimer() as timer:
        assert timer._open


def test_an_alarm_that_runs_already_goes_on(alarms: list[int]) -> None:
    """Somebody's time limit: nothing is noted beside it, and it comes."""
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    with SpeedTimer() as timer:
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
        end = time.perf_counter() + 60
        while not alarms and time.perf_counter() < end:
            busy(0.01)
    assert alarms == [signal.SIGALRM]
    assert not timer._noted
    alarms.clear()


@pytest.mark.usefixtures("alarms")
def test_calls_of_the_system_by_other_code_are_not_interrupted() -> None:
    """A byte that comes after some signals is read at once, by code that doesn't try again."""
    libc, buffer = ctypes.CDLL(None, use_errno=True), ctypes.create_string_buffer(1)
    reads, writes = os.pipe()
    with SpeedTimer() as timer:
        # A process of its own writes: in this one the signal could go to the thread that does.
        late = subprocess.Popen(["sh", "-c", "sleep 0.2; printf x"], stdout=writes)
        assert libc.read(reads, buffer, 1) == 1, os.strerror(ctypes.get_errno())
        late.wait()
        noted(timer, 1)
    assert buffer.value == b"x"
    os.close(reads)
    os.close(writes)


@pytest.mark.usefixtures("alarms")
def test_in_other_threads_nothing_is_noted_nor_told() -> None:
    found: list[float] = []

    def elsewhere() -> None:
        with SpeedTimer() as timer:
            found.append(work_inside_us(*busy(0.03)))
            found.append(float(timer._open))

    def run() -> None:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    run()
    with SpeedTimer() as timer:
        begin, end = noted(timer)
        run()
        assert timer._open
        assert work_inside_us(begin, end) > 0
    assert found == [0.0] * 4


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system doesn't fork")
@pytest.mark.usefixtures("alarms")
def test_a_forked_process_has_no_timer_and_may_have_its_own() -> None:
    with SpeedTimer() as timer:
        begin, end = noted(timer)
        with warnings.catch_warnings():
            # Some versions of Python warn where other tests left threads.
            warnings.simplefilter("ignore")
            child = os.fork()
        if not child:
            fine = work_inside_us(begin, end) == 0
            with SpeedTimer() as own:
                fine = fine and own._open
            os._exit(0 if fine else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert work_inside_us(begin, end) > 0


def test_what_was_noted_inside_counts_and_before_the_end_of_short_steps() -> None:
    timer = SpeedTimer()
    assert timer.felt_us(0.0, 1.0) == 0
    for i, us in enumerate([10.0] * 4 + [20.0] * 8 + [30.0] * 8):
        timer._noted.append((i / 100, us))
    assert timer.felt_us(0.04, 0.12) == pytest.approx(20)
    assert timer.felt_us(0.04, 0.20) == pytest.approx(25)
    # Five inside, and three before them; none after it.
    assert timer.felt_us(0.12, 0.17) == pytest.approx((3 * 20 + 5 * 30) / 8)
    # Too few, or too long ago.
    assert timer.felt_us(0.02, 0.03) == 0
    assert timer.felt_us(0.5, 1.3) == 0
    # A long step's own count however long ago they are.
    assert timer.felt_us(0.0, 1.3) == pytest.approx((4 * 10 + 8 * 20 + 8 * 30) / 20)


def test_a_table_knows_the_speed_by_work_inside_steps() -> None:
    """40 us beside steps are 12 inside; twice as slow is 80 and 24, and at that speed both are the table's own."""
    costs = attrs.evolve(COSTS, host_work_inside_us=12.0)
    assert costs.host_work_of(24.0) == pytest.approx(80)
    slow = costs.at_host_speed(80.0)
    assert slow.host_work_inside_us == pytest.approx(24)
    assert slow.host_work_of(24.0) == pytest.approx(80)
    unnoted = attrs.evolve(costs, host_work_us=0.0)
    none = [costs.host_work_of(None), costs.host_work_of(0.0), COSTS.host_work_of(24.0), unnoted.host_work_of(24.0)]
    assert none == [None] * 4
    with pytest.raises(ProfileError, match=r"host_work_inside_us -1.0"):
        attrs.evolve(COSTS, host_work_inside_us=-1.0)


def test_what_was_noted_inside_a_step_goes_before_what_was_noted_beside_it() -> None:
    """The step is half as slow again; its notes beside it say that the host was quick."""
    costs = attrs.evolve(COSTS, host_work_inside_us=12.0)
    shape = BatchShape(decodes=[(1, 4)], decode_kv_tokens=256, max_kv_len=64)
    launches = (Launch(Rows.ALL, None),)
    plain = costs.cost(launches, shape.numbers)
    decision = Decision(Mode.EAGER, launches, Reason.ONLY_LEGAL, None)
    measured: dict[str, Any] = {"cycle_us": 1.425 * (plain.host_us + costs.step_us), "host_work_us": 40.0}
    entries = [StepEntry.of(i, shape, decision, host_work_inside_us=18.0, **measured) for i in range(3)]
    assert fidelity(entries, costs)[-1].error == pytest.approx(0, abs=1e-9)
    assert expected_cost(entries[0], costs).cycle_us == pytest.approx(measured["cycle_us"])
    # A table without it goes by what is beside, and so does an entry.
    assert fidelity(entries, COSTS)[-1].error == pytest.approx(1 - 1 / 1.425)
    beside = [attrs.evolve(each, host_work_inside_us=None) for each in entries]
    assert fidelity(beside, costs)[-1].error == pytest.approx(1 - 1 / 1.425)


@pytest.mark.usefixtures("alarms")
def test_notes_that_come_while_others_are_looked_at_are_no_error() -> None:
    """For half a second, and whatever is noted: a signal may come between any two operations."""
    with SpeedTimer() as timer:
        noted(timer)
        end = time.perf_counter() + 0.5
        while (now := time.perf_counter()) < end:
            timer.felt_us(now - 0.2, now)
    assert len(timer._noted) >= 8
