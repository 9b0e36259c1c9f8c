"""`CudaAdapter`: a CUDA device through torch: a `StreamAdapter` with what only CUDA's torch has.

Graphs of a pool share its memory, and so does what they leave behind: results are seen through tensors that don't keep
their memory, so that the next capture takes it again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from kpolicy.errors import ConfigError
from kpolicy.executors.base import ProbeReport, ProbeStatus
from kpolicy.executors.cuda.events import CudaEvent, CudaSpan, Points, Recorder
from kpolicy.executors.cuda.failures import classify
from kpolicy.executors.cuda.staging import ALIGNMENT, DecodeStager
from kpolicy.executors.cuda.stream_adapter import CudaGraph, Statics, StreamAdapter, StreamPool, inference
from kpolicy.executors.cuda.streams import give_back, new_stream
from kpolicy.executors.device import Span
from kpolicy.executors.faults import Fault
from kpolicy.executors.importing import not_there

__all__ = ["CudaAdapter", "CudaGraph", "inference"]

_CYCLES_A_US = 2000
"""Of a GPU's clock, at most: `occupy` may take longer, never much less."""

_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
"""As `torch.cuda.current_device`, which looks first whether CUDA is there: an adapter knows that."""


_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: index)
"""The handle of a device's current stream; a torch without CUDA has none, and no adapter is made there"""


class CudaAdapter(StreamAdapter):
    """The primitives of one CUDA device.

    Args:
        device: the device; the current one where it has no index.
        check, statics, faults: as `StreamAdapter` has them.

    Raises:
        ConfigError: there is no such device, or a fault's text can't be used.
        UnknownNameError: no fault has that name.
    """

    def __init__(
        self, device: Any = "cuda", *, check: bool = False, statics: Statics | None = None,
        faults: Iterable[Fault | str] = (),
    ) -> None:  # fmt: skip
        super().__init__(
            "cuda", torch.cuda, _device(device), classify=classify, check=check, statics=statics, faults=faults
        )
        self._index = self.device.index
        self._streams: dict[int, Any] = {}
        self._raw_stream = _raw_stream
        self._spare: list[Recorder] = []
        self._spare_points: dict[int, list[Points]] = {}
        """By the handle of their stream"""

    def session(self) -> AbstractContextManager[Any]:
        # Kernels of Triton go to the current device, whatever their tensors are on.
        if _current_device() != self._index:
            stack = ExitStack()
            stack.enter_context(torch.cuda.device(self.device))
            stack.enter_context(torch.inference_mode())
            return stack
        return inference()

    def probe(self) -> ProbeReport:
        facts = {
            "torch": str(torch.__version__), "cuda": torch.version.cuda,
            "capability": torch.cuda.get_device_capability(self.device),
        }  # fmt: skip
        return ProbeReport("cuda", ProbeStatus.USABLE, f"{self.device_name}, torch {facts['torch']}", facts=facts)

    # Streams

    def new_stream(self, priority: int = 0) -> Any:
        return new_stream(self.device, -1 if priority > 0 else 0)

    def give_back(self, stream: Any) -> None:
        """Take a stream back: the next `new_stream` may give it away again."""
        give_back(stream)

    def current(self) -> Any:
        """The current stream; the object is looked up by its handle, which takes a tenth of the time."""
        handle = self._raw_stream(self._index)
        stream = self._streams.get(handle)
        if stream is None:
            stream = self._streams[handle] = torch.cuda.current_stream(self.device)
        return stream

    def event(self, stream: Any = None) -> CudaEvent:
        spare = self._spare
        point = spare.pop() if spare else Recorder()
        point.record(self.current() if stream is None else stream)
        return CudaEvent(point, spare)

    def span(self) -> Span:
        handle = self._raw_stream(self._index)
        spare = self._spare_points.get(handle)
        if spare is None:
            spare = self._spare_points[handle] = []
        points = spare.pop() if spare else Points.on(self.current())
        span = CudaSpan()
        span._points, span._spare, span._over, span.end = points, spare, False, points[1]
        points[0]()
        return span

    def occupy(self, us: float) -> None:
        with torch.cuda.device(self.device):
            torch.cuda._sleep(int(us * _CYCLES_A_US))

    # Graphs

    def _mend(self, pool: StreamPool, recorded: Any) -> None:
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

    def decode_stager(
        self, buffers: Sequence[Any], shape: tuple[int, int, int], pad_slot: int
    ) -> DecodeStager | None:  # fmt: skip
        """What stages decodes of one shape in one call and commits; None where somebody looks at each staging."""
        return None if self._faults.planned else DecodeStager(buffers, shape, pad_slot, self.current)

    def join(self, first: Any, second: Any) -> tuple[Any, int]:
        """Two tensors behind each other in one of bytes, and where the second begins there."""
        num_bytes = first.numel() * first.element_size()
        at = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        whole = torch.empty(at + second.numel() * second.element_size(), dtype=torch.uint8, device=second.device)
        whole[:num_bytes].view(first.dtype).view(first.shape).copy_(first)
        whole[at:].view(second.dtype).view(second.shape).copy_(second)
        return whole, at

    def weak(self, pool: StreamPool, tensor: Any) -> Any:
        del pool
        return _without_hold(tensor) if isinstance(tensor, torch.Tensor) and tensor.is_cuda else tensor


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
        raise not_there(device, error) from error
    if at.type != "cuda":
        raise ConfigError(
            f"device is {str(device)!r}; the CUDA adapter takes 'cuda' or 'cuda:N'. Load a model that is elsewhere "
            "there: kpolicy.load(..., device='cuda')."
        )
    # Imported here: that package stands on this module.
    from kpolicy.executors.kunlun.proof import kunlun_behind_cuda

    behind = kunlun_behind_cuda(torch.cuda.get_device_name(at), torch.cuda.get_device_capability(at))
    if behind:
        raise ConfigError(f"device {str(device)!r} isn't for the CUDA executor: {behind}")
    return at
