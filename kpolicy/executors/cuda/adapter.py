"""`CudaAdapter`: a CUDA device through torch. Graphs are `torch.cuda.CUDAGraph`s, streams CUDA streams.

A pool has a capture stream of its own, on which it also warms up: cuBLAS keeps a workspace a stream, and two graphs
that share one may not run at the same time. Graphs of a pool share its memory, and so does what they leave behind:
results are seen through tensors that don't keep their memory, so that the next capture takes it again.

The main stream is the caller's current one.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch

from kpolicy.errors import CaptureError, ConfigError, GraphReplayError, RegistryError, StickyDeviceError
from kpolicy.executors.addresses import Address, addresses_of, check_moved
from kpolicy.executors.base import ProbeReport, ProbeStatus
from kpolicy.executors.cpu.faults import Faults
from kpolicy.executors.cuda.events import CudaEvent, Points, Recorder, new_span
from kpolicy.executors.cuda.failures import classify
from kpolicy.executors.cuda.staging import BufferSpec, Job, StagedGroup, place_of
from kpolicy.executors.cuda.streams import give_back, new_stream
from kpolicy.executors.device import Failure, MemoryReport, Span
from kpolicy.executors.importing import first_line
from kpolicy.executors.simulated import Fault
from kpolicy.reasons import Reason

__all__ = ["CudaAdapter", "CudaGraph", "CudaPool"]

_CYCLES_A_US = 2000
"""Of a GPU's clock, at most: `occupy` may take longer, never much less."""

Statics = Callable[[], Mapping[str, Any]]
"""Gives what graphs read besides their inputs, by name: weights and KV."""


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


class CudaPool:
    """Memory for graphs that never run at the same time, those graphs, and the stream they are captured on."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.handle: Any = torch.cuda.graph_pool_handle()
        self.graphs: list[CudaGraph] = []
        self.released = False


_guard: Any = getattr(torch._C, "_InferenceMode", None)
inference: Callable[[], AbstractContextManager[Any]] = (
    partial(_guard, True) if hasattr(_guard, "__enter__") else torch.inference_mode
)
"""Makes what a step runs in, to be entered at once: `torch.inference_mode()` without what that does for functions and
for TorchScript"""
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
"""As `torch.cuda.current_device`, which looks first whether CUDA is there: an adapter knows that."""


_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: index)
"""The handle of a device's current stream; a torch without CUDA has none, and no adapter is made there"""


class CudaAdapter:
    """The primitives of one CUDA device.

    Args:
        device: the device; the current one where it has no index.
        check: look before each replay whether what it reads is where it was captured.
        statics: what `check` looks at besides a launch's inputs.
        faults: faults to inject, as `Fault` or text such as ``"replay_fails@3"``; see `CPU_FAULTS`.

    Raises:
        ConfigError: there is no such device, or a fault's text can't be used.
        UnknownNameError: no fault has that name.
    """

    def __init__(
        self, device: Any = "cuda", *, check: bool = False, statics: Statics | None = None,
        faults: Iterable[Fault | str] = (),
    ) -> None:  # fmt: skip
        self.device = _device(device)
        self._index = self.device.index
        self._check = check
        self._statics = statics
        self._faults = Faults(faults)
        self._pools: list[CudaPool] = []
        self._dirty: list[StagedGroup] = []
        self._recording: tuple[CudaPool, Any, int] | None = None
        self._lost = False
        self._streams: dict[int, Any] = {}
        self._raw_stream = _raw_stream
        self._spare: list[Any] = []
        self._spare_points: dict[int, list[Points]] = {}
        """By the handle of their stream"""

    @property
    def name(self) -> str:
        return "cuda"

    @property
    def host_runs(self) -> bool:
        return False

    @property
    def checks(self) -> bool:
        """Whether replays look first at where weights, KV and inputs are."""
        return self._check

    def session(self) -> AbstractContextManager[Any]:
        # Kernels of Triton go to the current device, whatever their tensors are on.
        if _current_device() != self._index:
            stack = ExitStack()
            stack.enter_context(torch.cuda.device(self.device))
            stack.enter_context(torch.inference_mode())
            return stack
        return inference()

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = torch.cuda.stream(stream)
        return context

    @property
    def device_name(self) -> str:
        """What the device calls itself."""
        return str(torch.cuda.get_device_name(self.device))

    def probe(self) -> ProbeReport:
        name, capability = torch.cuda.get_device_name(self.device), torch.cuda.get_device_capability(self.device)
        facts = {"torch": str(torch.__version__), "cuda": torch.version.cuda, "capability": capability}
        return ProbeReport("cuda", ProbeStatus.USABLE, f"{name}, torch {facts['torch']}", facts=facts)

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
            self._check_staging()
        group, place = place_of(buffer)
        if not group.staged:
            self._dirty.append(group)
        group.stage(buffer, place, values, size, fill)

    def stage_all(self, jobs: Sequence[Job]) -> None:
        """`stage` for several buffers that `alloc_inputs` made together."""
        if self._faults.planned:
            for _ in jobs:
                self._check_staging()
        group, _ = place_of(jobs[0][0])
        if group not in self._dirty:
            self._dirty.append(group)
        group.stage_all(jobs)

    def _check_staging(self) -> None:
        """Fail as planned."""
        self._check_lost()
        if self._faults.due("staging_fails"):
            raise RuntimeError("injected fault staging_fails")

    def commit(self, until: Span | None = None) -> None:
        try:
            for group in self._dirty:
                group.commit(self._current, until)
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
        free, total = torch.cuda.mem_get_info(self.device)
        return MemoryReport(total - free, total)

    # Streams

    def new_stream(self, priority: int = 0) -> Any:
        return new_stream(self.device, -1 if priority > 0 else 0)

    def give_back(self, stream: Any) -> None:
        """Take a stream back: the next `new_stream` may give it away again."""
        give_back(stream)

    def submit(self, stream: Any, work: Callable[[], None]) -> None:
        with torch.cuda.stream(stream):
            work()

    def _current(self) -> Any:
        """The current stream; the object is looked up by its handle, which takes a tenth of the time."""
        handle = self._raw_stream(self._index)
        stream = self._streams.get(handle)
        if stream is None:
            stream = self._streams[handle] = torch.cuda.current_stream(self.device)
        return stream

    def event(self, stream: Any = None) -> CudaEvent:
        spare = self._spare
        point = spare.pop() if spare else Recorder()
        point.record(self._current() if stream is None else stream)
        return CudaEvent(point, spare)

    def span(self) -> Span:
        handle = self._raw_stream(self._index)
        spare = self._spare_points.get(handle)
        if spare is None:
            spare = self._spare_points[handle] = []
        points = spare.pop() if spare else Points.on(self._current())
        span = new_span()
        span._points, span._spare, span._over, span.end = points, spare, False, points[1]
        points[0]()
        return span

    def wait(self, event: Any) -> None:
        event.hold(self._current())

    def occupy(self, us: float) -> None:
        with torch.cuda.device(self.device):
            torch.cuda._sleep(int(us * _CYCLES_A_US))

    # Graphs

    def new_pool(self, priority: int = 0) -> CudaPool:
        # Kernels keep the priority of the stream they were captured on.
        pool = CudaPool(self.new_stream(priority))
        self._pools.append(pool)
        gc.collect()
        return pool

    @contextmanager
    def recording(self, pool: CudaPool) -> Iterator[None]:
        """The pool's stream, with no collection of garbage meanwhile.

        What that frees may be device memory, which is forbidden while a stream is captured.
        """
        if pool.released:
            raise RegistryError("a graph was to be captured into a pool that was released; make a new pool.")
        main = torch.cuda.current_stream(self.device)
        pool.stream.wait_stream(main)
        frozen = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.stream(pool.stream):
                yield
        finally:
            if frozen:
                gc.enable()
            main.wait_stream(pool.stream)

    def begin(self, pool: CudaPool) -> None:
        self._check_lost()
        self._faults.check_capture()
        if pool.released:
            raise RegistryError("a graph was to be captured into a pool that was released; make a new pool.")
        if self._recording is not None:
            raise CaptureError(Reason.CAPTURE_FORBIDDEN, "another recording isn't over; end it first.")
        if self._current() != pool.stream:
            raise CaptureError(Reason.CAPTURE_FORBIDDEN, "begin must be called within recording(pool).")
        used = self._used()
        self._recording = pool, self._begun(pool), used
        if self._faults.due("mid_segment"):
            raise RuntimeError("injected fault mid_segment")

    def _used(self) -> int:
        """Bytes of the device's memory in use."""
        return self.memory().used

    def _begun(self, pool: Any) -> Any:
        """A graph that records from here on."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
        return graph

    def end(self) -> CudaGraph:
        if self._recording is None:
            raise CaptureError(Reason.CAPTURE_FAILED, "nothing is recording; call begin first.")
        (pool, recorded, used), self._recording = self._recording, None
        try:
            recorded.capture_end()
        except BaseException:
            self._mend(pool, recorded)
            raise
        graph = CudaGraph(recorded, max(0, self._used() - used), self._addresses() if self._check else {})
        pool.graphs.append(graph)
        return graph

    def abort(self) -> None:
        if self._recording is None:
            return
        (pool, recorded, _), self._recording = self._recording, None
        try:
            recorded.capture_end()
        except RuntimeError:
            # The operator that broke it has said so already.
            self._mend(pool, recorded)
        else:
            self._give_up(pool, recorded)

    def _give_up(self, pool: CudaPool, recorded: Any) -> None:
        """Free what a capture that failed took."""
        recorded.reset()
        if not pool.graphs:
            pool.handle = torch.cuda.graph_pool_handle()
        self._trim()

    def _trim(self) -> None:
        """Give back what torch's allocator keeps for later. A device that is lost says so elsewhere."""
        with suppress(RuntimeError):
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    def _mend(self, pool: CudaPool, recorded: Any) -> None:
        """`_give_up` for a capture that CUDA itself ended, and what torch 2.11 then needs to go on.

        Its allocator takes the pool for still recording and for held by the graph that never came, so both are ended
        here, and later graphs get a pool of their own. Its random generator believes that it is captured until a
        capture ends well, so an empty one does.
        """
        recorded.reset()
        self._end_allocation(pool.handle)
        pool.handle = torch.cuda.graph_pool_handle()
        self._give_up(pool, recorded)
        with torch.cuda.stream(pool.stream), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            empty = torch.cuda.CUDAGraph()
            empty.capture_begin(capture_error_mode="thread_local")
            empty.capture_end()
            empty.reset()

    def _end_allocation(self, handle: Any) -> None:
        """End a recording in torch's allocator, and its hold on the pool, where torch left both as they were."""
        # Before torch 2.8 it had another name.
        names = ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool")
        end_allocate = next((getattr(torch._C, name) for name in names if hasattr(torch._C, name)), None)
        if end_allocate is None:
            return
        try:
            end_allocate(self.device.index, handle)
        except RuntimeError:
            # It had ended, and with it `reset` has let the pool go: once more would free what live graphs read.
            return
        release = getattr(torch._C, "_cuda_releasePool", None)
        if release is not None:
            release(self.device.index, handle)

    def weak(self, pool: CudaPool, tensor: Any) -> Any:
        del pool
        return _without_hold(tensor) if isinstance(tensor, torch.Tensor) and tensor.is_cuda else tensor

    def discard(self, pool: CudaPool, graphs: Sequence[CudaGraph]) -> None:
        for graph in graphs:
            graph.graph.reset()
        pool.graphs = [graph for graph in pool.graphs if graph not in graphs]
        if not pool.graphs:
            pool.handle = torch.cuda.graph_pool_handle()
        self._trim()

    def replay(self, graph: CudaGraph) -> None:
        if self._check:
            check_moved(None, graph.addresses, self._addresses())
        if self._faults.planned:
            self._check_lost()
            if self._faults.due("replay_fails"):
                raise GraphReplayError(None, "injected fault replay_fails")
            if self._faults.due("before_launch"):
                raise RuntimeError("injected fault before_launch")
            if self._faults.due("sticky"):
                self._lost = True
                self._check_lost()
        graph.replay()

    def replayer(self, graph: CudaGraph) -> Callable[[], None]:
        # Without anything to look at first, without a function of Python's.
        return partial(self.replay, graph) if self._check or self._faults.planned else graph.replay

    def release(self, pool: CudaPool) -> None:
        if pool in self._pools:
            self._pools.remove(pool)
        with suppress(RuntimeError):
            torch.cuda.synchronize(self.device)
            for graph in pool.graphs:
                graph.graph.reset()
            if not pool.released:
                # The workspace of the pool's stream stays, for the pool that has the stream next.
                give_back(pool.stream)
        pool.graphs, pool.handle, pool.released = [], None, True
        self._trim()

    # Checks

    def _addresses(self) -> dict[str, Address]:
        if self._statics is None:
            return {}
        # Who watches the model's functions on tensors doesn't mean these.
        with torch._C.DisableTorchFunction():
            return addresses_of(self._statics())

    # Errors

    def classify(self, error: BaseException) -> Failure:
        return classify(error)

    def _check_lost(self) -> None:
        if self._lost:
            raise StickyDeviceError("the CUDA device is lost (injected fault sticky); start a new executor.")


def _without_hold(tensor: Any) -> Any:
    """The same elements, kept by nobody: as CUDA graph trees of torch see what their pool holds."""
    make: Any = getattr(torch._C, "_construct_storage_from_data_pointer", None)
    if make is None:
        return tensor
    storage = tensor.untyped_storage()
    with torch.inference_mode(False):
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        held = make(storage.data_ptr(), tensor.device, storage.nbytes())
        alias.set_(held, tensor.storage_offset(), tensor.shape, tensor.stride())
    return alias


def _device(device: Any) -> torch.device:
    try:
        at = torch.device(device)
        if at.type == "cuda":
            torch.empty(1, device=at)
            at = torch.device("cuda", torch.cuda.current_device() if at.index is None else at.index)
    # The library has errors of its own.
    except Exception as error:
        raise ConfigError(
            f"device {str(device)!r} isn't there: {first_line(error)}. `kpolicy doctor` says what is."
        ) from error
    if at.type != "cuda":
        raise ConfigError(f"device is {device!r}; the CUDA adapter takes 'cuda' or 'cuda:N'.")
    # Imported here: that package stands on this module.
    from kpolicy.executors.kunlun.proof import kunlun_behind_cuda

    behind = kunlun_behind_cuda(torch.cuda.get_device_name(at), torch.cuda.get_device_capability(at))
    if behind:
        raise ConfigError(f"device {str(device)!r} isn't for the CUDA executor: {behind}")
    return at
