"""Points on streams, and the spans between them that time a step. CUDA's are used again: making one takes long."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import methodcaller
from typing import Any, NamedTuple

import torch

from kpolicy.errors import StickyDeviceError
from kpolicy.executors.cuda.failures import classify
from kpolicy.executors.device import Failure
from kpolicy.executors.importing import first_line

__all__ = [
    "MOST_SPARE", "CudaEvent", "CudaSpan", "Points", "Recorder", "StreamEvent", "finish", "meant",
]  # fmt: skip

MOST_SPARE = 64
"""Events that are kept to be used again"""
finish: Callable[[Any], None] = methodcaller("synchronize")
"""Blocks the host until the library's event is done"""


class Recorder:
    """An event of torch's, how it is recorded, and how the time to a later one is had."""

    __slots__ = ("elapsed_time", "event", "record", "synchronize")

    def __init__(self, *, timed: bool = True) -> None:
        self.event: Any = torch.cuda.Event(enable_timing=timed)
        # What `torch.cuda.Event.record` calls, once it has looked for a stream; likewise the others.
        base = super(torch.cuda.Event, self.event)
        self.record: Callable[[Any], None] = getattr(base, "record", self.event.record)
        self.elapsed_time: Callable[[Any], float] = getattr(base, "elapsed_time", self.event.elapsed_time)
        self.synchronize: Callable[[], Any] = getattr(base, "synchronize", self.event.synchronize)


class Points(NamedTuple):
    """Where a span of one stream begins and ends.

    What records the points there, the time between, the last, and what waits for that.
    """

    begin: Callable[[], Any]
    end: Callable[[], Any]
    elapsed_ms: Callable[[], float]
    last: Any
    wait: Callable[[], Any]

    @classmethod
    def on(cls, stream: Any) -> Points:
        first, last = Recorder(), Recorder()
        elapsed_ms = partial(first.elapsed_time, last.event)
        return cls(
            partial(first.record, stream), partial(last.record, stream), elapsed_ms, last.event, last.synchronize
        )


class CudaSpan:
    """A launch's `ReadyEvent` on the stream that was current when it began; see `DeviceAdapter`.

    One object for both of its points, which are used again when it goes: each that a step makes takes the host's time.
    """

    __slots__ = ("_over", "_points", "_spare", "end")

    end: Callable[[], Any]
    """As `Span.end`, without a function of Python's"""
    _over: bool
    _points: Points
    _spare: list[Points]

    def __del__(self) -> None:
        if len(self._spare) < MOST_SPARE:
            self._spare.append(self._points)

    def done(self) -> bool:
        if not self._over:
            try:
                self._over = bool(self._points[3].query())
            except RuntimeError as error:
                raise meant(error, classify) from error
        return self._over

    def wait(self) -> None:
        if not self._over:
            try:
                self._points[4]()
            except RuntimeError as error:
                raise meant(error, classify) from error
            self._over = True

    @property
    def us(self) -> float:
        elapsed_ms = self._points[2]
        try:
            return elapsed_ms() * 1e3
        except RuntimeError:
            # It isn't over, or the device is lost, which waiting says; where it was over before, asking again does.
            self.wait()
            try:
                return elapsed_ms() * 1e3
            except RuntimeError as error:
                raise meant(error, classify) from error


class StreamEvent:
    """A point on a stream.

    It keeps nothing of its adapter, which has the model's weights: a step's outputs have it for as long as they live.

    Args:
        event: the library's event, recorded there.
        classify: what an error of the library means.
        finish: blocks the host until that event is done.
    """

    __slots__ = ("_classify", "_event", "_finish")

    def __init__(
        self, event: Any, classify: Callable[[BaseException], Failure], finish: Callable[[Any], None]
    ) -> None:  # fmt: skip
        self._event = event
        self._classify = classify
        self._finish = finish

    def done(self) -> bool:
        """Whether the stream has passed it.

        Raises:
            StickyDeviceError: the device was lost in the work before it.
        """
        try:
            return bool(self._event.query())
        except RuntimeError as error:
            raise meant(error, self._classify) from error

    def wait(self) -> None:
        """Block the host until the stream has passed it. Raises as `done`."""
        try:
            self._finish(self._event)
        except RuntimeError as error:
            raise meant(error, self._classify) from error

    def hold(self, stream: Any) -> None:
        """Let a stream wait for the point."""
        self._event.wait(stream)

    def us_since(self, earlier: StreamEvent) -> float:
        """Microseconds on the device from that event to this one; waits for both."""
        earlier.wait()
        self.wait()
        elapsed: float = earlier._event.elapsed_time(self._event) * 1e3
        return elapsed


class CudaEvent(StreamEvent):
    """A point on a CUDA stream.

    Args:
        point: the event that was recorded there.
        spare: takes it when nobody looks at the point any more, to be used again: making one takes longer than all
            else that a step asks of it.
    """

    __slots__ = ("_point", "_spare")

    def __init__(self, point: Recorder, spare: list[Recorder]) -> None:
        self._event = point.event
        self._classify = classify
        self._finish = finish
        self._point = point
        self._spare = spare

    def __del__(self) -> None:
        # A stream that waits for the point took it over when it was told to.
        if len(self._spare) < MOST_SPARE:
            self._spare.append(self._point)

    def us_since(self, earlier: StreamEvent) -> float:
        """Microseconds on the device from that event to this one; waits for those that aren't over."""
        try:
            elapsed: float = earlier._event.elapsed_time(self._event) * 1e3
        except RuntimeError:
            # One isn't over, or the device is lost, which waiting says.
            elapsed = super().us_since(earlier)
        return elapsed


def meant(error: RuntimeError, classify: Callable[[BaseException], Failure]) -> Exception:
    """The error; what it means where it means that the device is lost."""
    if classify(error).sticky:
        return StickyDeviceError(f"{first_line(error)}. The device is lost to this process; start a new one.")
    return error
