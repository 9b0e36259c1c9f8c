"""Streams of the CPU: threads that run what they are given in order, and events on them.

The host thread is a stream too: what it runs is done when it returns, so its events are past at once. A worker takes
over, with each piece of work, whether the host was in inference mode, whether gradients were on, and how many
threads operators use: torch keeps these for each thread, and results of reductions depend on the last.

An error ends what its stream was given up to then: work that was submitted before the host heard of it (an event's
`wait` raised it) is skipped, because its inputs may be missing; work submitted after that runs again.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from kpolicy.errors import ConfigError

__all__ = ["CpuEvent", "CpuStream", "current_stream"]

_current = threading.local()


def current_stream() -> CpuStream | None:
    """The stream whose work this thread runs; None on a thread that is no stream's."""
    return getattr(_current, "stream", None)


class CpuEvent:
    """A point on a stream."""

    __slots__ = ("_failed", "_ns", "_passed", "_stream")

    def __init__(self, stream: CpuStream | None = None) -> None:
        self._passed = threading.Event()
        self._stream = stream
        self._failed: BaseException | None = None
        self._ns = 0

    def fire(self, failed: BaseException | None = None) -> None:
        """The stream has come to this point."""
        self._failed = failed
        self._ns = time.perf_counter_ns()
        self._passed.set()

    def done(self) -> bool:
        return self._passed.is_set()

    def wait(self) -> None:
        """Block this thread until the stream is past the point.

        Raises:
            Exception: what the stream's work before the point raised.
            ConfigError: the calling thread is that stream, so the point would never come.
        """
        if not self._passed.is_set() and self._stream is not None and current_stream() is self._stream:
            raise ConfigError("a stream's work waits for a later point of the same stream; wait on another stream.")
        self._passed.wait()
        if self._failed is not None:
            if self._stream is not None:
                self._stream.heard(self._failed)
            raise self._failed

    def us_since(self, earlier: Any) -> float:
        """Microseconds from that event to this one; waits for both, and raises nothing that their work raised."""
        earlier._passed.wait()
        self._passed.wait()
        elapsed: float = (self._ns - earlier._ns) / 1e3
        return elapsed


class _Settings(NamedTuple):
    """What torch keeps for each thread."""

    inference: bool
    grad: bool
    num_threads: int

    @classmethod
    def here(cls) -> _Settings:
        return cls(torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.get_num_threads())

    def run(self, work: Callable[[], None]) -> None:
        if torch.get_num_threads() != self.num_threads:
            torch.set_num_threads(self.num_threads)
        with torch.inference_mode(self.inference), torch.set_grad_enabled(self.grad and not self.inference):
            work()


class _Work(NamedTuple):
    run: Callable[[], None]
    settings: _Settings | None
    round: int
    event: CpuEvent | None
    """Fired instead of running anything"""


class _State:
    """What a stream and its thread share; the thread holds no reference to the stream, so that it ends with it."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[_Work | None] = SimpleQueue()
        self.failed: BaseException | None = None
        self.failed_round = -1
        self.stream: weakref.ref[CpuStream] | None = None
        self.ending = False


class CpuStream:
    """A thread that runs what it is given, in order. It starts with the first work.

    Args:
        priority: noted, and of no effect: an unprivileged thread can't be put before another.
    """

    def __init__(self, priority: int = 0) -> None:
        self.priority = priority
        self._state = _State()
        self._state.stream = weakref.ref(self)
        self._round = 0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, work: Callable[[], None]) -> None:
        """Queue work and return.

        Raises:
            ConfigError: the stream is closed.
        """
        self._put(_Work(work, _Settings.here(), self._round, None))

    def event(self) -> CpuEvent:
        """The point after all that was submitted so far."""
        event = CpuEvent(self)
        self._put(_Work(_nothing, None, self._round, event))
        return event

    def heard(self, failed: BaseException) -> None:
        """The host knows of an error: what it submits from now on runs."""
        with self._lock:
            if self._state.failed is failed and self._state.failed_round == self._round:
                self._round += 1

    def close(self) -> None:
        """End the thread after what it was given, and wait for that."""
        with self._lock:
            self._closed = True
            thread = self._thread
            if thread is not None:
                self._state.queue.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _put(self, work: _Work) -> None:
        with self._lock:
            if self._closed:
                raise ConfigError("this stream is closed; make a new one with new_stream().")
            if self._thread is None:
                thread = threading.Thread(target=_worker, args=(self._state,), name="kpolicy-cpu", daemon=True)
                thread.start()
                self._thread = thread
                _working[thread] = self._state
                weakref.finalize(self, self._state.queue.put, None).atexit = False
            # Under the lock, so that nothing lands behind what `close` puts last.
            self._state.queue.put(work)


_working: weakref.WeakKeyDictionary[threading.Thread, _State] = weakref.WeakKeyDictionary()


@atexit.register
def _end_all() -> None:
    """End every thread before the interpreter ends: cut off inside torch, one can abort the process.

    Work that hasn't begun is dropped: nobody is left to read it.
    """
    working = list(_working.items())
    for _, state in working:
        state.ending = True
        state.queue.put(None)
    until = time.monotonic() + _PATIENCE_S
    for thread, _ in working:
        thread.join(max(0.0, until - time.monotonic()))


_PATIENCE_S = 10.0
"""For all threads together: one that hangs mustn't keep the process alive."""


def _nothing() -> None:
    pass


def _worker(state: _State) -> None:
    while (work := state.queue.get()) is not None:
        if state.ending:
            if work.event is not None:
                work.event.fire(state.failed)
            continue
        broken = work.round <= state.failed_round
        if not broken:
            state.failed = None
        if work.event is not None:
            work.event.fire(state.failed if broken else None)
        elif not broken and work.settings is not None:
            _current.stream = None if state.stream is None else state.stream()
            try:
                work.settings.run(work.run)
            except BaseException as error:  # noqa: BLE001 - it surfaces where the host waits
                state.failed, state.failed_round = error, work.round
            _current.stream = None
        del work
