"""`CpuAdapter`: the CPU as a device. Graphs are recordings, streams are threads."""

from __future__ import annotations

import errno
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from kpolicy.errors import CaptureError, ConfigError, OutOfMemoryError, RegistryError
from kpolicy.executors.base import ProbeReport, ProbeStatus
from kpolicy.executors.cpu.arena import Arena
from kpolicy.executors.cpu.graph import Graph
from kpolicy.executors.cpu.naming import cpu_name
from kpolicy.executors.cpu.recorder import Recorder
from kpolicy.executors.cpu.staging import new_buffer, stage_tensor_or_numbers
from kpolicy.executors.cpu.streams import CpuEvent, CpuStream
from kpolicy.executors.device import DeviceEvent, Failure, MemoryReport, Span, known
from kpolicy.executors.faults import Fault, Faults
from kpolicy.reasons import Reason

__all__ = ["CpuAdapter", "CpuPool"]


_ITEM_BYTES = {"int64": 8, "int32": 4, "float32": 4}


class CpuPool:
    """Memory for graphs that never run at the same time, and those graphs.

    Graphs captured largest first take little beyond the first: a smaller one lives in the larger one's memory.
    """

    def __init__(self, admit: Callable[[int], None]) -> None:
        self._admit = admit
        self.arena = Arena(admit)
        self.graphs: list[Graph] = []
        self.recorder: Recorder | None = None
        self.released = False

    @property
    def num_bytes(self) -> int:
        """Bytes that the pool and its graphs keep."""
        return self.arena.num_bytes + sum(graph.constant_bytes for graph in self.graphs)

    def forget_failure(self) -> None:
        """Free what a failed recording took. Where the pool has graphs it stays, for the next recording to take."""
        if not self.graphs:
            self.arena = Arena(self._admit)

    def discard(self, graphs: Sequence[Graph]) -> None:
        """Forget graphs; what they took beyond others' memory is free."""
        for graph in graphs:
            graph.release()
        self.graphs = [graph for graph in self.graphs if graph not in graphs]
        self.forget_failure()

    def release(self) -> None:
        """Let go of the memory; what somebody still holds of it stays until they let go."""
        for graph in self.graphs:
            graph.release()
        self.graphs, self.arena, self.released = [], Arena(), True


class CpuAdapter:
    """The primitives of the CPU.

    Args:
        memory_bytes: what static buffers and graphs may take in all; a buffer or a capture that would take more is
            refused as out of memory. None: no limit of ours, and `memory` tells the process's and the machine's memory.
        check: look before each replay whether memory from outside is still where it was recorded, and held.
        faults: faults to inject, as `Fault` or text such as ``"mid_segment@3"``; see `DEVICE_FAULTS`.

    Raises:
        UnknownNameError: no fault has that name.
        ConfigError: a fault's text or `memory_bytes` can't be used.
    """

    def __init__(
        self, *, memory_bytes: int | None = None, check: bool = False, faults: Iterable[Fault | str] = ()
    ) -> None:
        if memory_bytes is not None and memory_bytes < 1:
            raise ConfigError(f"memory_bytes is {memory_bytes}; it is at least 1, or None for no limit.")
        self._memory_bytes = memory_bytes
        self._check = check
        self._faults = Faults(faults, "CPU")
        self._pools: list[CpuPool] = []
        self._streams: weakref.WeakSet[CpuStream] = weakref.WeakSet()
        self._recording = threading.local()
        self._lock = threading.Lock()
        self._static_bytes = 0
        # Finalizers run anywhere, also where this thread holds the lock: they only append.
        self._freed: deque[int] = deque()

    @property
    def name(self) -> str:
        return "cpu"

    @property
    def host_runs(self) -> bool:
        return True

    @property
    def checks(self) -> bool:
        """Whether replays look first at where weights, KV and inputs are."""
        return self._check

    def session(self) -> AbstractContextManager[Any]:
        # What is recorded is recorded so, and composite operators run another way outside.
        session: AbstractContextManager[Any] = torch.inference_mode()
        return session

    def on(self, stream: CpuStream) -> AbstractContextManager[Any]:  # noqa: ARG002 - memory is memory to every thread
        return nullcontext()

    @property
    def device_name(self) -> str:
        """What the processor calls itself, with the threads that operators use."""
        return cpu_name()

    def probe(self) -> ProbeReport:
        facts = {"torch": str(torch.__version__), "threads": torch.get_num_threads(), "cores": os.cpu_count() or 1}
        return ProbeReport(
            "cpu", ProbeStatus.USABLE, f"torch {facts['torch']} on {facts['threads']} threads", facts=facts
        )

    # Memory

    def new_pool(self, priority: int = 0) -> CpuPool:  # noqa: ARG002 - threads have none
        pool = CpuPool(self._admit)
        with self._lock:
            self._pools.append(pool)
        return pool

    def alloc_static(self, shape: Sequence[int], dtype: str, fill: float = 0) -> Any:
        """A static buffer; see `DeviceAdapter.alloc_static`.

        Raises:
            OutOfMemoryError: `memory_bytes` doesn't have it.
            UnknownNameError, ConfigError: no buffer is of that dtype or shape.
        """
        self._admit_buffer(math.prod(shape) * _ITEM_BYTES.get(dtype, 0))
        return self._counted(new_buffer(shape, dtype, fill))

    def alloc_inputs(self, specs: Sequence[tuple[Sequence[int], str, float]]) -> list[Any]:
        return [self.alloc_static(*spec) for spec in specs]

    def alloc_like(self, tensor: Any, num_rows: int) -> Any:
        self._admit_buffer(math.prod((num_rows, *tensor.shape[1:])) * tensor.element_size())
        # Outside inference mode, so that later steps may write to it in any.
        with torch.inference_mode(False):
            return self._counted(torch.empty((num_rows, *tensor.shape[1:]), dtype=tensor.dtype))

    def _counted(self, buffer: Any) -> Any:
        nbytes = buffer.numel() * buffer.element_size()
        with self._lock:
            self._static_bytes += nbytes
        weakref.finalize(buffer, self._freed.append, nbytes).atexit = False
        return buffer

    def stage(self, buffer: Any, values: Any, size: int, fill: float) -> None:
        if self._faults.planned:
            self._faults.check_staging()
        stage_tensor_or_numbers(buffer, values, size, fill)

    def commit(self, until: Span | None = None) -> None:
        """Nothing: what was staged is where it is read."""

    def drop_staged(self) -> None:
        """Nothing: the next launch stages all that it reads."""

    def memory(self) -> MemoryReport:
        if self._memory_bytes is not None:
            return MemoryReport(self._held_bytes(), self._memory_bytes)
        return MemoryReport(_resident_bytes(), _physical_bytes())

    def _held_bytes(self) -> int:
        with self._lock:
            while self._freed:
                self._static_bytes -= self._freed.popleft()
            return self._static_bytes + sum([pool.num_bytes for pool in self._pools])

    def _admit(self, nbytes: int) -> None:
        why = self._over("recording", nbytes)
        if why:
            raise CaptureError(Reason.CAPTURE_OUT_OF_MEMORY, why)

    def _admit_buffer(self, nbytes: int) -> None:
        why = self._over("a static buffer", nbytes)
        if why:
            raise OutOfMemoryError(why)

    def _over(self, what: str, nbytes: int) -> str:
        """Why those bytes can't be had, in words; "" where they can."""
        if self._memory_bytes is None or self._held_bytes() + nbytes <= self._memory_bytes:
            return ""
        return (
            f"{what} needs {nbytes} bytes more than the {self._held_bytes()} held, and memory_bytes is "
            f"{self._memory_bytes}; raise it, or capture fewer or smaller sizes."
        )

    # Streams

    def new_stream(self, priority: int = 0) -> CpuStream:
        stream = CpuStream(priority)
        self._streams.add(stream)
        return stream

    def submit(self, stream: CpuStream, work: Callable[[], None]) -> None:
        self._faults.check_lost()
        stream.submit(work)

    def event(self, stream: CpuStream | None = None) -> CpuEvent:
        """A point on the current stream, or after all that was submitted to another.

        What a stream's work did before it asks is done, and so is what the host ran: such a point is past at once.
        """
        if stream is not None:
            return stream.event()
        event = CpuEvent()
        event.fire()
        return event

    def wait(self, event: DeviceEvent) -> None:
        event.wait()

    def occupy(self, us: float) -> None:
        """Nothing: the host runs what it launches."""

    # Graphs

    @contextmanager
    def recording(self, pool: CpuPool) -> Iterator[None]:  # noqa: ARG002 - recorded where it runs
        try:
            yield
        finally:
            self.abort()

    def begin(self, pool: CpuPool) -> None:
        self._faults.check_lost()
        self._faults.check_capture()
        if pool.released:
            raise RegistryError("a graph was to be captured into a pool that was released; make a new pool.")
        recorder = Recorder(pool.arena, _fail_midway if self._faults.due("mid_segment") else None)
        with self._lock:
            if pool.recorder is not None:
                raise CaptureError(
                    Reason.CAPTURE_FORBIDDEN,
                    "another recording into this pool isn't over; end it, or use another pool.",
                )
            pool.recorder = recorder
        try:
            recorder.begin()
        except BaseException:
            pool.recorder = None
            raise
        self._recording.pool = pool

    def end(self) -> Graph:
        pool: CpuPool | None = getattr(self._recording, "pool", None)
        if pool is None or pool.recorder is None:
            raise CaptureError(Reason.CAPTURE_FAILED, "this thread isn't recording; call begin first.")
        recorder, self._recording.pool, pool.recorder = pool.recorder, None, None
        try:
            graph = recorder.end()
        except CaptureError:
            pool.forget_failure()
            raise
        pool.graphs.append(graph)
        return graph

    def abort(self) -> None:
        pool: CpuPool | None = getattr(self._recording, "pool", None)
        if pool is not None and pool.recorder is not None:
            recorder, self._recording.pool, pool.recorder = pool.recorder, None, None
            recorder.abort()
            pool.forget_failure()

    def weak(self, pool: CpuPool, tensor: Any) -> Any:
        block = pool.arena.block_of(tensor)
        return tensor if block is None else block.seen_by_calls(tensor)

    def discard(self, pool: CpuPool, graphs: Sequence[Graph]) -> None:
        pool.discard(graphs)

    def replay(self, graph: Graph) -> None:
        if self._check:
            graph.check()
        if not self._faults.planned:
            graph.replay()
            return
        self._faults.check_replay()
        start = time.perf_counter()
        graph.replay()
        if self._faults.due("late"):
            time.sleep(99 * (time.perf_counter() - start))

    def release(self, pool: CpuPool) -> None:
        with self._lock:
            if pool in self._pools:
                self._pools.remove(pool)
        pool.release()

    def close(self) -> None:
        """End all streams, after the work they have, and release all pools."""
        for stream in list(self._streams):
            stream.close()
        for pool in list(self._pools):
            self.release(pool)

    # Errors

    def classify(self, error: BaseException) -> Failure:
        meant = known(error)
        if meant is not None:
            return meant
        return Failure(Reason.CAPTURE_OUT_OF_MEMORY if is_out_of_memory(error) else Reason.CAPTURE_FAILED, False)


def _fail_midway(place: int) -> None:
    if place:
        raise RuntimeError("injected fault mid_segment")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the host's memory ran out: torch's CPU allocator says so in words only (c10/core/impl/alloc_cpu.cpp)."""
    if isinstance(error, (OutOfMemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    text = str(error)
    return isinstance(error, RuntimeError) and ("can't allocate memory" in text or "not enough memory" in text)


def _resident_bytes() -> int:
    """Memory of this process; the most it ever had where the system doesn't tell what it has now."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import resource
        import sys

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def _physical_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
