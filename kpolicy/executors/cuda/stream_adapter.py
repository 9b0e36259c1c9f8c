"""`StreamAdapter`: a device whose graphs, streams and events have the names that `torch.cuda` gave them.

`torch.npu` and `torch.xpu` offer the same classes under the same names, with fewer options. All that adapters of such
devices do alike is here, asked of the device's own namespace; `CudaAdapter` adds what only CUDA's torch has.

A pool has a capture stream of its own, on which it also warms up: cuBLAS keeps a workspace a stream, and two graphs
that share one may not run at the same time.

The main stream is the caller's current one.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any

import torch

from kpolicy.errors import CaptureError, RegistryError
from kpolicy.executors.addresses import Address, addresses_of, check_moved
from kpolicy.executors.base import ProbeReport, ProbeStatus
from kpolicy.executors.cuda.events import StreamEvent, finish
from kpolicy.executors.cuda.failures import classify_by_words
from kpolicy.executors.cuda.staging import BufferSpec, Job, StagedGroup, place_of
from kpolicy.executors.device import Failure, MemoryReport, Span
from kpolicy.executors.faults import Fault, Faults
from kpolicy.executors.parts import EarlyTokens, EventSpan
from kpolicy.reasons import Reason

__all__ = ["CudaGraph", "Statics", "StreamAdapter", "StreamPool", "inference"]

Statics = Callable[[], Mapping[str, Any]]
"""Gives what graphs read besides their inputs, by name: weights and KV."""

_guard: Any = getattr(torch._C, "_InferenceMode", None)
inference: Callable[[], AbstractContextManager[Any]] = (
    partial(_guard, True) if hasattr(_guard, "__enter__") else torch.inference_mode
)
"""Makes what a step runs in, to be entered at once: `torch.inference_mode()` without what that does for functions and
for TorchScript"""


class CudaGraph:
    """A captured graph.

    Attributes:
        num_bytes: device memory that capturing and instantiating it took.
        addresses: where what it reads lay, by name, where the adapter checks.
    """

    def __init__(self, graph: Any, num_bytes: int, addresses: Mapping[str, Any]) -> None:
        self.graph = graph
        self.num_bytes = num_bytes
        self.addresses = addresses
        self.replay: Callable[[], None] = graph.replay


class StreamPool:
    """Memory for graphs that never run at the same time, those graphs, and the stream they are captured on."""

    def __init__(self, stream: Any, handle: Any) -> None:
        self.stream = stream
        self.handle = handle
        self.graphs: list[Any] = []
        self.released = False


class StreamAdapter:
    """The primitives of one device behind a namespace such as `torch.xpu`.

    Args:
        name: the adapter's name.
        library: the namespace.
        device: the device, with its index.
        begin: makes a graph that records on the current stream from then on, from its pool's handle (None where the
            library has none before the first graph). By default a ``CUDAGraph`` of the library that records what its
            own thread launches.
        classify: what an error of the library means; memory, and the words of a lost device, by default.
        report: what `probe` says.
        check: look before each replay whether what it reads is where it was captured.
        statics: what `check` looks at besides a launch's inputs.
        faults: faults to inject, as `Fault` or text such as ``"replay_fails@3"``; see `DEVICE_FAULTS`.

    Raises:
        ConfigError: a fault's text can't be used.
        UnknownNameError: no fault has that name.
    """

    def __init__(
        self, name: str, library: Any, device: torch.device, *, begin: Callable[[Any], Any] | None = None,
        classify: Callable[[BaseException], Failure] = classify_by_words, report: ProbeReport | None = None,
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
        self._faults = Faults(faults, name)
        self._pools: list[StreamPool] = []
        self._dirty: list[StagedGroup] = []
        self._recording: Any = None

    @property
    def name(self) -> str:
        return self._name

    @property
    def host_runs(self) -> bool:
        return False

    @property
    def checks(self) -> bool:
        """Whether replays look first at where weights, KV and inputs are."""
        return self._check

    @property
    def device_name(self) -> str:
        """What the device calls itself; "" where the library doesn't say."""
        named: Callable[[Any], Any] | None = getattr(self.device_module, "get_device_name", None)
        return "" if named is None else str(named(self.device))

    def probe(self) -> ProbeReport:
        return self._report

    def session(self) -> AbstractContextManager[Any]:
        return inference()

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self.device_module.stream(stream)
        return context

    # Memory

    def alloc_inputs(self, specs: Sequence[tuple[Sequence[int], str, float]]) -> list[Any]:
        return StagedGroup([BufferSpec(*spec) for spec in specs], self.device).buffers()

    def alloc_static(self, shape: Sequence[int], dtype: str, fill: float = 0) -> Any:
        return self.alloc_inputs([(shape, dtype, fill)])[0]

    def alloc_like(self, tensor: Any, num_rows: int) -> Any:
        # Outside inference mode, so that later steps may write to it in any.
        with torch.inference_mode(False):
            return torch.empty((num_rows, *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)

    def stage(self, buffer: Any, values: Any, size: int, fill: float) -> None:
        if self._faults.planned:
            self._faults.check_staging()
        group, place = place_of(buffer)
        if not group.staged:
            self._dirty.append(group)
        group.stage(buffer, place, values, size, fill)

    def stage_all(self, jobs: Sequence[Job]) -> None:
        """`stage` for several buffers that `alloc_inputs` made together."""
        if self._faults.planned:
            for _ in jobs:
                self._faults.check_staging()
        group, _ = place_of(jobs[0][0])
        if group not in self._dirty:
            self._dirty.append(group)
        group.stage_all(jobs)

    def commit(self, until: Span | None = None) -> None:
        try:
            for group in self._dirty:
                group.commit(self.current, until)
        except BaseException:
            # Left there, it would fail with every later launch too.
            self.drop_staged()
            raise
        self._dirty.clear()

    def drop_staged(self) -> None:
        for group in self._dirty:
            group.drop()
        self._dirty.clear()

    def memory(self) -> MemoryReport:
        free, total = self.device_module.mem_get_info(self.device)
        return MemoryReport(total - free, total)

    # Streams

    def new_stream(self, priority: int = 0) -> Any:
        return self.device_module.Stream(self.device, priority=-1 if priority > 0 else 0)

    def give_back(self, stream: Any) -> None:
        """Take a stream back, where the device hands streams on."""

    def submit(self, stream: Any, work: Callable[[], None]) -> None:
        with self.device_module.stream(stream):
            work()

    def current(self) -> Any:
        """The stream that launches go to now."""
        return self.device_module.current_stream(self.device)

    def event(self, stream: Any = None) -> StreamEvent:
        point = self.device_module.Event(enable_timing=True)
        point.record(self.current() if stream is None else stream)
        return StreamEvent(point, self._classify, self._finisher())

    def span(self) -> Span:
        return EventSpan(self)

    def wait(self, event: Any) -> None:
        event.hold(self.current())

    def copy_out(self, tensor: Any) -> EarlyTokens:
        """A tensor's values on the host, once the current stream has come so far."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self.device.type == "cuda")
        host.copy_(tensor, non_blocking=True)
        return EarlyTokens(host, self.event())

    def _finisher(self) -> Callable[[Any], None]:
        """What blocks the host until an event of the library is done, without keeping the adapter."""
        return finish

    def occupy(self, us: float) -> None:
        """Nothing: no library but CUDA's is known to have work of a given length.

        So calibration counts the host's gaps as device time where the host is the slower side. Override it for a
        device that can be made to wait.
        """

    # Graphs

    def new_pool(self, priority: int = 0) -> StreamPool:
        # Kernels keep the priority of the stream they were captured on.
        pool = StreamPool(self.new_stream(priority), self.device_module.graph_pool_handle())
        self._pools.append(pool)
        gc.collect()
        return pool

    @contextmanager
    def recording(self, pool: StreamPool) -> Iterator[None]:
        """The pool's stream, with no collection of garbage meanwhile.

        What that frees may be device memory, which is forbidden while a stream is captured.
        """
        _check_there(pool)
        main = self.current()
        pool.stream.wait_stream(main)
        frozen = gc.isenabled()
        gc.disable()
        try:
            with self.device_module.stream(pool.stream):
                try:
                    yield
                finally:
                    # A capture that an error left open would take the main stream in with the wait.
                    self.abort()
        finally:
            if frozen:
                gc.enable()
            main.wait_stream(pool.stream)

    def begin(self, pool: StreamPool) -> None:
        self._check_lost()
        self._faults.check_capture()
        _check_there(pool)
        if self._recording is not None:
            raise CaptureError(Reason.CAPTURE_FORBIDDEN, "another recording isn't over; end it first.")
        if self.current() != pool.stream:
            raise CaptureError(Reason.CAPTURE_FORBIDDEN, "begin must be called within recording(pool).")
        used = self._used()
        self._recording = pool, self._begun(pool), used
        if self._faults.due("mid_segment"):
            raise RuntimeError("injected fault mid_segment")

    def _used(self) -> int:
        """Bytes of the device's memory in use."""
        return self.memory().used

    def _begun(self, pool: StreamPool) -> Any:
        """A graph that records from here on."""
        if self._begin is not None:
            return self._begin(pool.handle)
        graph = self.device_module.CUDAGraph()
        graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
        return graph

    def end(self) -> Any:
        if self._recording is None:
            raise CaptureError(Reason.CAPTURE_FAILED, "nothing is recording; call begin first.")
        (pool, recorded, used), self._recording = self._recording, None
        try:
            self._ended(recorded)
        except BaseException:
            self._mend(pool, recorded)
            raise
        try:
            graph = self._graph(recorded, max(0, self._used() - used))
        except BaseException:
            self._give_up(pool, recorded)
            raise
        pool.graphs.append(graph)
        if pool.handle is None:
            # Where no pool comes before its first graph, that graph makes it.
            pool.handle = recorded.pool()
        return graph

    def _ended(self, recorded: Any) -> None:
        """End its recording."""
        recorded.capture_end()

    def _graph(self, recorded: Any, num_bytes: int) -> CudaGraph:
        return CudaGraph(recorded, num_bytes, self._addresses() if self._check else {})

    def abort(self) -> None:
        if self._recording is None:
            return
        (pool, recorded, _), self._recording = self._recording, None
        try:
            self._ended(recorded)
        except RuntimeError:
            # The operator that broke it has said so already.
            self._mend(pool, recorded)
        else:
            self._give_up(pool, recorded)

    def _give_up(self, pool: StreamPool, recorded: Any) -> None:
        """Free what a capture that failed took."""
        self._reset(recorded)
        self._go_on(pool)

    def _reset(self, recorded: Any) -> None:
        try:
            recorded.reset()
        except RuntimeError as error:
            # What broke the capture says more, unless the device is lost; some libraries have nothing left to reset.
            if self.classify(error).sticky:
                raise
            logging.getLogger("kpolicy").warning("A failed capture's memory may not be free: %s", error)

    def _go_on(self, pool: StreamPool) -> None:
        """Leave a pool as the next capture wants it, after some that failed: without graphs it is a new one."""
        if not pool.graphs:
            pool.handle = self.device_module.graph_pool_handle()
        self.trim()

    def _mend(self, pool: StreamPool, recorded: Any) -> None:
        """`_give_up` for a capture that the device itself ended, and what its library then needs to go on."""
        self._give_up(pool, recorded)

    def trim(self) -> None:
        """Give back what torch's allocator keeps for later, of every stream; waits until nothing runs on the device.

        A device that is lost says so elsewhere.
        """
        with suppress(RuntimeError):
            self._synchronise()
            self.device_module.empty_cache()

    def _synchronise(self) -> None:
        """Wait until nothing runs on the device."""
        self.device_module.synchronize(self.device)

    def weak(self, pool: StreamPool, tensor: Any) -> Any:
        """The tensor as it is, where the library has no way not to hold its memory."""
        del pool
        return tensor

    def discard(self, pool: StreamPool, graphs: Sequence[Any]) -> None:
        for graph in graphs:
            self._reset(graph.graph)
        pool.graphs = [graph for graph in pool.graphs if graph not in graphs]
        self._go_on(pool)

    def replay(self, graph: CudaGraph) -> None:
        if self._check:
            check_moved(None, graph.addresses, self._addresses())
        if self._faults.planned:
            self._faults.check_replay()
        graph.replay()

    def replayer(self, graph: CudaGraph) -> Callable[[], None]:
        # Without anything to look at first, without a function of Python's.
        return partial(self.replay, graph) if self._check or self._faults.planned else graph.replay

    def release(self, pool: StreamPool) -> None:
        if pool in self._pools:
            self._pools.remove(pool)
        with suppress(RuntimeError):
            self._synchronise()
            for graph in pool.graphs:
                graph.graph.reset()
            if not pool.released:
                # What libraries keep for the pool's stream stays, for the pool that has the stream next.
                self.give_back(pool.stream)
        pool.graphs, pool.handle, pool.released = [], None, True
        self.trim()

    # Checks

    def _addresses(self) -> dict[str, Address]:
        if self._statics is None:
            return {}
        # Who watches the model's functions on tensors doesn't mean these.
        with torch._C.DisableTorchFunction():
            return addresses_of(self._statics())

    # Errors

    def classify(self, error: BaseException) -> Failure:
        return self._classify(error)

    def _check_lost(self) -> None:
        self._faults.check_lost()


def _check_there(pool: StreamPool) -> None:
    if pool.released:
        raise RegistryError("a graph was to be captured into a pool that was released; make a new pool.")
