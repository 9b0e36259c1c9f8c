"""What a lazy Engine spends between steps, by a clock that only captures move."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kpolicy.engine import Engine
from kpolicy.errors import StickyDeviceError
from kpolicy.executors import lazy
from kpolicy.executors.base import CaptureReport
from kpolicy.keys import GraphKey
from kpolicy.modes import Part
from kpolicy.settings import Settings
from kpolicy.shapes import BatchShape

ALLOWANCE_S, CAPTURE_S = 0.01, 0.1
SIZES = (4, 8, 16, 32, 64)


class Clock:
    """Captures take `takes_s`, and are expected to take `CAPTURE_S`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, takes_s: float = CAPTURE_S) -> None:
        self.now = 0.0
        self.captured_at: list[int] = []
        self.engine = Engine(
            "full", executor="simulated", ladder=list(SIZES), lazy=ALLOWANCE_S, calibrate=0,
            settings=Settings(max_num_reqs=64, max_num_tokens=64), attention="single",
        )  # fmt: skip
        executor: Any = self.engine.executor
        capture, self.step = executor.capture, 0

        def slow(keys: list[GraphKey], progress: Any = None) -> None:
            self.now += takes_s * len(keys)
            self.captured_at.append(self.step)
            capture(keys, progress)

        monkeypatch.setattr(executor, "capture", slow)
        monkeypatch.setattr(executor.launcher, "estimate", lambda _key: CaptureReport(0, CAPTURE_S, 0, 1))
        monkeypatch.setattr(lazy, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def serve(self, steps: int, sizes: Sequence[int] = SIZES) -> None:
        """Steps that need each size in turn."""
        assert self.engine._lazy is not None
        for _ in range(steps):
            self.step += 1
            self.engine._lazy.before_step(BatchShape.decode(sizes[self.step % len(sizes)]).numbers)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_no_more_is_spent_than_steps_allow(clock: Clock) -> None:
    """A graph is captured once its expected time is saved up: at most one in ten steps."""
    clock.serve(80)
    assert len(clock.captured_at) == len(SIZES)
    pairs = zip([0, *clock.captured_at], clock.captured_at, strict=False)
    assert all(later - before >= CAPTURE_S / ALLOWANCE_S for before, later in pairs), clock.captured_at
    assert set(clock.engine.registry.captured()) == set(clock.engine.keys)


def test_what_was_overspent_is_paid_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures that take five times what was expected come a fifth as often."""
    clock = Clock(monkeypatch, takes_s=5 * CAPTURE_S)
    clock.serve(120)
    first, second, *_ = clock.captured_at
    assert second - first >= 5 * CAPTURE_S / ALLOWANCE_S
    assert clock.now <= 120 * ALLOWANCE_S + 5 * CAPTURE_S


def test_nothing_is_captured_twice(clock: Clock) -> None:
    """However long steps need what is there, each graph is captured once, and `capture` adds none of those again."""
    clock.serve(200)
    assert len(clock.captured_at) == len(SIZES)
    seen: list[GraphKey] = []
    clock.engine.capture(lambda key, _report: seen.append(key))
    assert seen == []


def test_what_nothing_changed_in_costs_steps_a_decision(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two steps of a lazy Engine that has what it needs no key is gone over, captured or not."""
    clock.serve(80)
    engine = clock.engine
    engine.registry.plan([GraphKey(Part.FULL, 48, 48, query_len=1)])
    clock.serve(20)

    def looked(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(Engine, "context", property(looked))
    monkeypatch.setattr(engine.registry, "record", looked)
    monkeypatch.setattr(engine.registry, "records", looked)
    clock.serve(20)


def test_steps_that_need_nothing_are_gone_over_together(clock: Clock) -> None:
    """Most steps of a lazy Engine that has what it needs ask nothing; none is left out, and one that needs is heard."""
    *sizes, last = SIZES
    key = GraphKey(Part.FULL, last, last, query_len=1)
    clock.serve(80, sizes)
    assert set(clock.engine.registry.captured()) == set(clock.engine.keys) - {key}
    capture: Any = clock.engine._lazy
    select, asked = capture._select, list[int]()

    def counted(*numbers: Any) -> Any:
        asked.append(clock.step)
        return select(*numbers)

    capture._select = counted
    clock.serve(8 * lazy.NOTE_EVERY, sizes)
    assert [asked.count(step) for step in sorted(set(asked))] == [lazy.NOTE_EVERY] * 8
    begun = clock.step
    clock.serve(2 * lazy.NOTE_EVERY + int(CAPTURE_S / ALLOWANCE_S), [last])
    assert key in clock.engine.registry.captured()
    assert clock.captured_at[-1] - begun <= lazy.NOTE_EVERY + int(CAPTURE_S / ALLOWANCE_S)


def test_what_captures_warmed_up_with_goes_back_when_no_more_come(clock: Clock) -> None:
    """Not behind each graph, as the next one warms up with it again, and not at steps that capture nothing."""
    executor: Any = clock.engine.executor
    executor.trim = lambda: trimmed.append(len(clock.captured_at))
    trimmed: list[int] = []
    clock.serve(120)
    assert trimmed == [len(SIZES)]


def test_who_asks_what_is_pending_after_each_step_gets_the_graphs_too(clock: Clock) -> None:
    """Asking goes over the steps so far; what they needed is captured before the next ones all the same."""
    for _ in range(8 * int(CAPTURE_S / ALLOWANCE_S)):
        clock.serve(1)
        pending = clock.engine.lazy_pending
    assert set(clock.engine.registry.captured()) == set(clock.engine.keys)
    assert not pending


def test_behind_an_error_nothing_goes_back(clock: Clock) -> None:
    """A lost device isn't asked for memory, and what that would raise doesn't take the error's place."""
    executor: Any = clock.engine.executor

    def lost(_keys: list[GraphKey]) -> None:
        raise StickyDeviceError("an illegal memory access")

    executor.capture = lost
    executor.trim = lambda: pytest.fail("a lost device was asked")
    with pytest.raises(StickyDeviceError, match="illegal memory access"):
        clock.serve(80, [SIZES[0]])


def test_a_size_that_comes_once_in_a_long_time_stays_cold(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Needs count half after a while: two of one size make it hot where they come soon after each other, alone."""
    monkeypatch.setattr(lazy, "FORGET_EVERY", 64)
    *sizes, last = SIZES
    key = GraphKey(Part.FULL, last, last, query_len=1)
    clock.serve(80, sizes)
    for _ in range(6):
        clock.serve(1, [last])
        clock.serve(64 + lazy.NOTE_EVERY, sizes[:1])
    assert key not in clock.engine.registry.captured()
    clock.serve(2, [last])
    clock.serve(2 * lazy.NOTE_EVERY, sizes[:1])
    assert key in clock.engine.registry.captured()
