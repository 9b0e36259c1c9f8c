"""Steps counted several at a time behind the host: none is lost by who reads when, or by what fails."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from benchmarks.engine_step import decode_inputs  # noqa: E402
from benchmarks.host_step import Point, opened  # noqa: E402
from kpolicy.errors import StickyDeviceError  # noqa: E402

LOST = "CUDA error: an illegal memory access was encountered"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    monkeypatch.setattr(torch.cuda, "Event", Point)
    monkeypatch.setattr(Point, "asked", Counter())
    return opened()


def raising(*_: Any) -> None:
    raise RuntimeError(LOST)


def step_often(engine: Any, inputs: Any) -> None:
    for _ in range(40):
        engine.step(inputs)


def test_readers_on_other_threads_lose_no_step(engine: tuple[Any, Any]) -> None:
    """Prometheus reads `stats` on a thread of its own while steps are made."""
    opened_engine, model = engine
    inputs = [decode_inputs(size, model.num_blocks) for size in (1, 3, 8)]
    wrong: list[Exception] = []
    ends = threading.Event()

    def read() -> None:
        while not ends.is_set():
            try:
                opened_engine.stats  # noqa: B018
            except Exception as error:  # noqa: BLE001, PERF203 - every one counts
                wrong.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    readers = [threading.Thread(target=read) for _ in range(2)]
    try:
        for reader in readers:
            reader.start()
        steps, until = 0, time.monotonic() + 2
        while time.monotonic() < until:
            opened_engine.step(inputs[steps // 7 % 3])
            steps += 1
    finally:
        ends.set()
        for reader in readers:
            reader.join()
        sys.setswitchinterval(interval)
    assert not wrong
    assert opened_engine.stats.total.steps == steps
    hits = sum(record.hits for record in opened_engine.registry.records())
    assert hits == steps


def test_a_device_lost_after_it_was_asked_is_a_lost_device(
    engine: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last step was seen to be over; then its time can't be read."""
    opened_engine, model = engine
    inputs, told = decode_inputs(3, model.num_blocks), Counter[str]()
    opened_engine.events.subscribe(lambda event: told.update([type(event).__name__]))
    monkeypatch.setattr(Point, "elapsed_time", raising)
    monkeypatch.setattr(Point, "synchronize", raising)
    with pytest.raises(StickyDeviceError):
        step_often(opened_engine, inputs)
    with pytest.raises(StickyDeviceError):
        opened_engine.step(inputs)
    opened_engine.stats  # noqa: B018 - tells what was counted, and raises nothing
    assert told["DeviceLost"] == 1


def test_steps_known_to_be_over_count_when_the_next_loses_the_device(
    engine: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tenth step's time is the first that can't be read: nine are counted, and hit their graph nine times."""
    opened_engine, model = engine
    inputs, asked, before = decode_inputs(3, model.num_blocks), [0], Point.elapsed_time

    def elapsed(point: Point, later: Point) -> float:
        asked[0] += 1
        if asked[0] >= 10:
            raise RuntimeError(LOST)
        return before(point, later)

    monkeypatch.setattr(Point, "elapsed_time", elapsed)
    with pytest.raises(StickyDeviceError):
        step_often(opened_engine, inputs)
    assert opened_engine.stats.total.steps == 9
    assert sum(record.hits for record in opened_engine.registry.records()) == 9


def test_a_lost_device_is_told_once_by_whichever_asks(engine: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    opened_engine, model = engine
    inputs, told = decode_inputs(3, model.num_blocks), Counter[str]()
    opened_engine.events.subscribe(lambda event: told.update([type(event).__name__]))
    for name in ("query", "elapsed_time", "synchronize"):
        monkeypatch.setattr(Point, name, raising)
    with pytest.raises(StickyDeviceError):
        step_often(opened_engine, inputs)
    opened_engine.stats  # noqa: B018
    assert told["DeviceLost"] == 1
    assert not opened_engine._running
