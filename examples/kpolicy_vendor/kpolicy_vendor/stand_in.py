# ruff: noqa: ARG001, ARG002 - arguments are those of torch's own names
"""A stand-in for a vendor's namespace such as `torch.musa`: streams, events and graphs over tensors on the CPU.

It has the names that `StreamAdapter` asks of a library, and what they do where the host itself is the device. Graphs
are kpolicy's own recordings of torch's operators. A real package has none of this file.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, ClassVar

from kpolicy.executors.cpu.arena import Arena
from kpolicy.executors.cpu.recorder import Recorder

TOTAL_BYTES = 1 << 34

_numbers = count(1)
_pools: dict[int, Arena] = {}


class Stream:
    """Work given to it is done at once."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = device
        self.priority = priority

    def wait_stream(self, stream: Stream) -> None:
        """All of that stream's work is done already."""

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event


class Event:
    """A point in time."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.enable_timing = enable_timing
        self._at = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self._at = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        """What is before it is done already."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """What is before it is done already."""

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds."""
        return (end_event._at - self._at) * 1e3


class VendorGraph:
    """A recording of what the current stream gets between `capture_begin` and `capture_end`."""

    def __init__(self) -> None:
        self._recorder: Recorder | None = None
        self._recorded: Any = None
        self._pool = 0

    def capture_begin(self, pool: Any = None) -> None:
        self._pool = pool or graph_pool_handle()
        self._recorder = Recorder(_pools.setdefault(self._pool, Arena()))
        self._recorder.begin()

    def capture_end(self) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            raise RuntimeError("the graph isn't recording")
        self._recorded = recorder.end()

    def replay(self) -> None:
        self._recorded.replay()

    def reset(self) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.abort()
        if self._recorded is not None:
            self._recorded.release()

    def pool(self) -> Any:
        return self._pool


class CachedGraph:
    """A graph of a device that compiles and caches. It has what an `HPUGraph` has: no pool, no `reset`.

    Attributes:
        most: graphs that there may be at a time.
        live: those that there are.
        compiled: how often each structure was asked for; only the first time costs a compilation.
    """

    most = 1 << 10
    live = 0
    compiled: ClassVar[Counter[int]] = Counter()

    def __init__(self) -> None:
        # Each graph has memory of its own, out of the pool that keys and values are in.
        self._arena = Arena()
        self._recorder: Recorder | None = None
        self._recipe: Any = None

    def capture_begin(self) -> None:
        if CachedGraph.live >= CachedGraph.most:
            raise RuntimeError(f"the graph cache is full: {CachedGraph.most} graphs")
        self._recorder = Recorder(self._arena)
        self._recorder.begin()

    def capture_end(self) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            raise RuntimeError("the graph isn't recording")
        self._recipe = recorder.end()
        CachedGraph.live += 1
        self.compiled[hash(self._recipe.describe())] += 1

    def replay(self, asynchronous: bool = False) -> None:
        self._recipe.replay()

    def __del__(self) -> None:
        if self._recorder is not None:
            self._recorder.abort()
        if self._recipe is not None:
            self._recipe.release()
            CachedGraph.live -= 1


_current = Stream()


@contextmanager
def stream(wanted: Stream) -> Iterator[None]:
    global _current
    before, _current = _current, wanted
    try:
        yield
    finally:
        _current = before


def current_stream(device: Any = None) -> Stream:
    return _current


def graph_pool_handle() -> int:
    return next(_numbers)


def synchronize(device: Any = None) -> None:
    """Everything is done already."""


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Free and total bytes."""
    return TOTAL_BYTES - sum(pool.num_bytes for pool in _pools.values()), TOTAL_BYTES


def empty_cache() -> None:
    """There is none."""


def device_count() -> int:
    return 1


def get_device_name(device: Any = None) -> str:
    return "stand-in for a vendor's device"
