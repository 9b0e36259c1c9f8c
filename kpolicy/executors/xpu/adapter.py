"""`StreamAdapter`: a device whose graphs, streams and events have the names that `torch.cuda` gave them.

`torch.npu` and `torch.xpu` offer the same classes under the same names, with fewer options. What `CudaAdapter` does
with tensors alone is taken from it; what it asks of `torch.cuda` is asked of the device's own namespace here.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any

import torch

from kpolicy.errors import CaptureError, RegistryError, StickyDeviceError
from kpolicy.executors.base import ProbeReport, ProbeStatus
from kpolicy.executors.cpu.faults import Faults
from kpolicy.executors.cuda.adapter import CudaAdapter, CudaGraph, Statics
from kpolicy.executors.cuda.staging import StagedGroup
from kpolicy.executors.device import Failure, MemoryReport, Span
from kpolicy.executors.importing import first_line
from kpolicy.executors.parts import EventSpan
from kpolicy.executors.simulated import Fault
from kpolicy.executors.xpu.failures import classify
from kpolicy.reasons import Reason

__all__ = ["StreamAdapter", "StreamEvent", "StreamPool"]


class StreamPool:
    """Memory for graphs that never run at the same time, those graphs, and the stream they are captured on."""

    def __init__(self, stream: Any, handle: Any) -> None:
        self.stream = stream
        self.handle = handle
        self.graphs: list[CudaGraph] = []
        self.released = False


class StreamEvent:
    """A point on a stream."""

    __slots__ = ("_adapter", "_event")

    def __init__(self, adapter: StreamAdapter, stream: Any) -> None:
        self._adapter = adapter
        self._event: Any = adapter.device_module.Event(enable_timing=True)
        self._event.record(stream)

    def done(self) -> bool:
        """Whether the stream has passed it.

        Raises:
            StickyDeviceError: the device was lost in the work before it.
        """
        try:
            return bool(self._event.query())
        except RuntimeError as error:
            raise self._meant(error) from error

    def wait(self) -> None:
        """Block the host until the stream has passed it. Raises as `done`."""
        try:
            self._adapter.finish(self._event)
        except RuntimeError as error:
            raise self._meant(error) from error

    def _meant(self, error: RuntimeError) -> Exception:
        if not self._adapter.classify(error).sticky:
            return error
        line = first_line(error)
        return StickyDeviceError(f"{line}. The device is lost to this process; start a new one.")

    def hold(self, stream: Any) -> None:
        """Let a stream wait for the point."""
        self._event.wait(stream)

    def us_since(self, earlier: StreamEvent) -> float:
        """Microseconds on the device from that event to this one; waits for both."""
        earlier.wait()
        self.wait()
        elapsed: float = earlier._event.elapsed_time(self._event) * 1e3
        return elapsed


class StreamAdapter(CudaAdapter):
    """The primitives of one device behind a namespace such as `torch.xpu`.

    Args:
        name: the adapter's name.
        library: the namespace.
        device: the device, with its index.
        begin: makes a graph that records on the current stream from then on, from its pool's handle (None where the
            library has none before the first graph). By default the library has a ``CUDAGraph``.
        classify: what an error of the library means; memory, and the words of a lost device, by default.
        report: what `probe` says.
        check, statics, faults: as `CudaAdapter` has them.
    """

    def __init__(
        self, name: str, library: Any, device: torch.device, *, begin: Callable[[Any], Any] | None = None,
        classify: Callable[[BaseException], Failure] = classify, report: ProbeReport | None = None,
        check: bool = False, statics: Statics | None = None, faults: Iterable[Fault | str] = (),
    ) -> None:  # fmt: skip
        self._begin = begin
        self._classify = classify
        self._report = report or ProbeReport(name, ProbeStatus.USABLE, f"{device}; unverified on hardware")
        self._name = name
        self.device_module = library
        self.device = device
        self._check = check
        self._statics = statics
        self._faults = Faults(faults)
        self._pools: list[Any] = []
        self._dirty: list[StagedGroup] = []
        self._recording: Any = None
        self._lost = False

    @property
    def name(self) -> str:
        return self._name

    def probe(self) -> ProbeReport:
        return self._report

    def classify(self, error: BaseException) -> Failure:
        return self._classify(error)

    def session(self) -> AbstractContextManager[Any]:
        session: AbstractContextManager[Any] = torch.inference_mode()
        return session

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self.device_module.stream(stream)
        return context

    # Memory

    def memory(self) -> MemoryReport:
        free, total = self.device_module.mem_get_info(self.device)
        return MemoryReport(total - free, total)

    # Streams

    def new_stream(self, priority: int = 0) -> Any:
        return self.device_module.Stream(self.device, priority=-1 if priority > 0 else 0)

    def submit(self, stream: Any, work: Callable[[], None]) -> None:
        with self.device_module.stream(stream):
            work()

    def _current(self) -> Any:
        return self.device_module.current_stream(self.device)

    def event(self, stream: Any = None) -> Any:
        return StreamEvent(self, self._current() if stream is None else stream)

    def span(self) -> Span:
        return EventSpan(self)

    @property
    def device_name(self) -> str:
        named: Callable[[Any], Any] | None = getattr(self.device_module, "get_device_name", None)
        return "" if named is None else str(named(self.device))

    def replayer(self, graph: Any) -> Callable[[], None]:
        return partial(self.replay, graph)

    def wait(self, event: Any) -> None:
        event.hold(self._current())

    def finish(self, point: Any) -> None:
        """Block the host until the library's event, or stream, is done."""
        point.synchronize()

    def occupy(self, us: float) -> None:
        """Nothing: no library but CUDA's is known to have work of a given length.

        So calibration counts the host's gaps as device time where the host is the slower side. Override it for a
        device that can be made to wait.
        """

    # Graphs

    def new_pool(self, priority: int = 0) -> Any:
        pool = StreamPool(self.new_stream(priority), self.device_module.graph_pool_handle())
        self._pools.append(pool)
        gc.collect()
        return pool

    @contextmanager
    def recording(self, pool: Any) -> Iterator[None]:
        """The pool's stream, with no collection of garbage meanwhile. See `CudaAdapter.recording`."""
        if pool.released:
            raise RegistryError("a graph was to be captured into a pool that was released; make a new pool.")
        main = self._current()
        pool.stream.wait_stream(main)
        frozen = gc.isenabled()
        gc.disable()
        try:
            with self.device_module.stream(pool.stream):
                yield
        finally:
            # A capture that an error left open would take the main stream in with the wait.
            self.abort()
            if frozen:
                gc.enable()
            main.wait_stream(pool.stream)

    def _begun(self, pool: Any) -> Any:
        if self._begin is not None:
            return self._begin(pool.handle)
        graph = self.device_module.CUDAGraph()
        graph.capture_begin(pool=pool.handle)
        return graph

    def _ended(self, recorded: Any) -> None:
        """End its recording."""
        recorded.capture_end()

    def end(self) -> Any:
        if self._recording is None:
            raise CaptureError(Reason.CAPTURE_FAILED, "nothing is recording; call begin first.")
        (pool, recorded, used), self._recording = self._recording, None
        try:
            self._ended(recorded)
        except BaseException:
            self._give_up(pool, recorded)
            raise
        graph = self._graph(recorded, max(0, self._used() - used))
        pool.graphs.append(graph)
        if pool.handle is None:
            # Where no pool comes before its first graph, that graph makes it.
            pool.handle = recorded.pool()
        return graph

    def _graph(self, recorded: Any, num_bytes: int) -> Any:
        return CudaGraph(recorded, num_bytes, self._addresses() if self._check else {})

    def abort(self) -> None:
        if self._recording is None:
            return
        (pool, recorded, _), self._recording = self._recording, None
        # A capture that an operator has broken ends with that operator's error, which is already on its way.
        with suppress(RuntimeError):
            self._ended(recorded)
        self._give_up(pool, recorded)

    def _give_up(self, pool: Any, recorded: Any) -> None:
        """Free what a capture that failed took."""
        with suppress(RuntimeError):
            recorded.reset()
        if not pool.graphs:
            pool.handle = self.device_module.graph_pool_handle()
        self._trim()

    def _trim(self) -> None:
        """Give back what torch's allocator keeps for later. A device that is lost says so elsewhere."""
        with suppress(RuntimeError):
            self._synchronise()
            self.device_module.empty_cache()

    def _synchronise(self) -> None:
        """Wait until nothing runs on the device."""
        self.device_module.synchronize(self.device)

    def weak(self, pool: Any, tensor: Any) -> Any:
        """The tensor as it is, where the library has no way not to hold its memory."""
        del pool
        return tensor

    def discard(self, pool: Any, graphs: Sequence[Any]) -> None:
        for graph in graphs:
            graph.graph.reset()
        pool.graphs = [graph for graph in pool.graphs if graph not in graphs]
        if not pool.graphs:
            pool.handle = self.device_module.graph_pool_handle()

    def release(self, pool: Any) -> None:
        if pool in self._pools:
            self._pools.remove(pool)
        with suppress(RuntimeError):
            self._synchronise()
            for graph in pool.graphs:
                graph.graph.reset()
        pool.graphs, pool.handle, pool.released = [], None, True
        self._trim()

    def _check_lost(self) -> None:
        if self._lost:
            raise StickyDeviceError(f"the {self.name} device is lost (injected fault sticky); start a new executor.")
