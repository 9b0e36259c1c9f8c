"""Points on CUDA streams, over a stand-in for torch's events. `tests/gpu` has the real ones."""

from __future__ import annotations

import gc
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from benchmarks.host_step import NoDevice  # noqa: E402
from kpolicy.errors import StickyDeviceError  # noqa: E402
from kpolicy.executors.cuda.events import MOST_SPARE  # noqa: E402


class Event:
    """What is read of `torch.cuda.Event`: over when `over` says, in the order in which they were recorded."""

    made = 0
    over = True
    lost = False

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        Event.made += 1
        self.at = 0.0
        self.waits = 0

    def record(self, stream: Any) -> None:
        stream.clock += 2.0
        self.at = stream.clock

    def query(self) -> bool:
        return Event.over

    def synchronize(self) -> None:
        self.waits += 1
        if Event.lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        Event.over = True

    def elapsed_time(self, later: Event) -> float:
        if not Event.over:
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return later.at - self.at


class Stream:
    clock = 0.0


@pytest.fixture(autouse=True)
def events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "made", 0)
    monkeypatch.setattr(Event, "over", True)
    monkeypatch.setattr(Event, "lost", False)


def test_events_are_used_again() -> None:
    """A step's events come back when nobody looks at them; those that somebody holds aren't touched."""
    adapter, stream = NoDevice(), Stream()
    held = adapter.event(stream)
    at = held._event.at
    for _ in range(50):
        started, ended = adapter.event(stream), adapter.event(stream)
        assert ended.us_since(started) == 2000.0
        del started, ended
        gc.collect()
    assert Event.made <= 5
    assert held._event.at == at
    assert held._event not in [point.event for point in adapter._spare]


def test_only_so_many_are_kept() -> None:
    """A burst of steps under way doesn't keep its events for ever."""
    adapter = NoDevice()
    many = [adapter.event(Stream()) for _ in range(3 * MOST_SPARE)]
    del many
    gc.collect()
    assert len(adapter._spare) == MOST_SPARE


def test_time_waits_only_for_what_is_not_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where both points were passed nothing blocks; otherwise it waits for both."""
    adapter, stream = NoDevice(), Stream()
    first, second = adapter.event(stream), adapter.event(stream)
    assert second.us_since(first) == 2000.0
    assert first._event.waits == second._event.waits == 0
    monkeypatch.setattr(Event, "over", False)
    assert second.us_since(first) == 2000.0
    assert first._event.waits == second._event.waits == 1


def test_a_lost_device_is_told_by_the_time_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of work in which the device was lost is the named error."""
    adapter, stream = NoDevice(), Stream()
    first, second = adapter.event(stream), adapter.event(stream)
    monkeypatch.setattr(Event, "over", False)
    monkeypatch.setattr(Event, "lost", True)
    with pytest.raises(StickyDeviceError, match="lost to this process"):
        second.us_since(first)


def test_a_record_that_fails_keeps_nothing() -> None:
    """An event that wasn't recorded isn't used again."""

    class Broken:
        @property
        def clock(self) -> float:
            raise RuntimeError("no stream")

    adapter = NoDevice()
    with pytest.raises(RuntimeError, match="no stream"):
        adapter.event(Broken())
    gc.collect()
    assert adapter._spare == []


def test_a_span_uses_its_points_again() -> None:
    """Both points come back when nobody looks at the span; those of one that is held aren't touched."""
    adapter = NoDevice()
    streams = [Stream(), Stream()]
    adapter.current = lambda: streams[0]  # type: ignore[method-assign]
    held = adapter.span()
    held.end()
    for _ in range(20):
        span = adapter.span()
        streams[0].clock += 5.0
        span.end()
        assert span.us == 7000.0
        del span
        gc.collect()
    assert held.us == 2000.0
    assert Event.made == 4


def test_a_span_ends_on_the_stream_that_it_began_on() -> None:
    """Whichever stream is current by then."""
    adapter, streams = NoDevice(), [Stream(), Stream()]
    adapter.current = lambda: streams[0]  # type: ignore[method-assign]
    span = adapter.span()
    streams.reverse()
    span.end()
    assert [stream.clock for stream in streams] == [0.0, 4.0]


def test_a_span_waits_once_and_only_where_it_is_not_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time waits too; a span that was seen to be over isn't asked again."""
    adapter = NoDevice()
    adapter.current = Stream  # type: ignore[method-assign]
    span: Any = adapter.span()
    span.end()
    monkeypatch.setattr(Event, "over", False)
    assert not span.done()
    assert span.us == 2000.0
    last = span._points.last
    assert last.waits == 1
    monkeypatch.setattr(Event, "over", False)
    assert span.done()
    span.wait()
    assert last.waits == 1


def test_a_span_tells_of_a_lost_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """However it is asked."""
    adapter = NoDevice()
    adapter.current = Stream  # type: ignore[method-assign]
    span = adapter.span()
    span.end()
    monkeypatch.setattr(Event, "over", False)
    monkeypatch.setattr(Event, "lost", True)
    with pytest.raises(StickyDeviceError, match="lost to this process"):
        span.wait()
    with pytest.raises(StickyDeviceError, match="lost to this process"):
        _ = span.us
