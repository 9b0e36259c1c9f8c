"""`DeviceAdapter`: the primitives of one device. How modes run over them is written once, in the launcher."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from kpolicy.errors import CaptureError, GraphReplayError, StickyDeviceError
from kpolicy.executors.base import ProbeReport
from kpolicy.reasons import Reason

__all__ = ["DeviceAdapter", "DeviceEvent", "Failure", "MemoryReport", "known"]

Tensor = Any


class MemoryReport(NamedTuple):
    """Device memory in bytes."""

    used: int
    total: int


class Failure(NamedTuple):
    """What an error of the device means."""

    reason: Any
    """A `Reason`: why the key can't be had, or the launch failed."""
    sticky: bool
    """Whether the device is lost for this process."""


def known(error: BaseException) -> Failure | None:
    """What an error means on every device; None for those whose codes and words are a device's own."""
    if isinstance(error, StickyDeviceError):
        return Failure(Reason.DEVICE_LOST, True)
    if isinstance(error, CaptureError):
        return Failure(error.reason, False)
    if isinstance(error, GraphReplayError):
        return Failure(error.reason, False)
    if isinstance(error, MemoryError):
        return Failure(Reason.CAPTURE_OUT_OF_MEMORY, False)
    if isinstance(error, ImportError):
        return Failure(Reason.BACKEND_MISSING, False)
    return None


class DeviceEvent(Protocol):
    """A point on a stream."""

    def done(self) -> bool:
        """Whether the stream has passed it. Never waits."""
        ...

    def wait(self) -> None:
        """Block the host until the stream has passed it. Raises what the work before it raised."""
        ...

    def us_since(self, earlier: Any) -> float:
        """Microseconds from that event (of any stream of the device) to this one; waits for both."""
        ...


class Span(Protocol):
    """A launch on the stream that was current when it began: the `ReadyEvent` of a step that is one launch."""

    def end(self) -> None:
        """The stream's work up to here is what it is; called once, with the same stream current."""
        ...

    def done(self) -> bool:
        """Whether the stream has passed its end. Never waits."""
        ...

    def wait(self) -> None:
        """Block the host until the stream has passed its end. Raises what the work raised."""
        ...

    @property
    def us(self) -> float:
        """Microseconds on the device from its beginning to its end; waits for it."""
        ...


class DeviceAdapter(Protocol):
    """One device.

    A *pool* is memory that graphs share which never run at the same time; a *stream* runs what it is given in order,
    beside other streams.
    """

    @property
    def name(self) -> str: ...

    @property
    def host_runs(self) -> bool:
        """Whether the host itself runs what it launches on the main stream, as on the CPU.

        Where it does, what is to run beside other work goes to a stream of its own, also on the main stream's behalf.
        """
        ...

    def probe(self) -> ProbeReport: ...

    def session(self) -> AbstractContextManager[Any]:
        """What the device's library must be in while it runs, records or replays steps: torch's inference mode."""
        ...

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Make a stream the current one for staging. Work goes to it through `submit`."""
        ...

    def new_pool(self, priority: int = 0) -> Any:
        """Memory for graphs. A device whose libraries keep a workspace a stream captures each pool on its own.

        Args:
            priority: of two pools whose graphs run beside each other, the one with the higher goes first where the
                device can.
        """
        ...

    def new_stream(self, priority: int = 0) -> Any:
        """A stream; of two that have work, the one with the higher priority goes first where the device can."""
        ...

    def alloc_static(self, shape: Sequence[int], dtype: str, fill: float = 0) -> Tensor:
        """A buffer whose address never changes; `dtype` is int64, int32 or float32."""
        ...

    def alloc_inputs(self, specs: Sequence[tuple[Sequence[int], str, float]]) -> list[Tensor]:
        """Buffers as of `alloc_static`, (shape, dtype, fill) each, which launches stage together.

        A device with memory of its own brings all of a launch over in one copy, from the first buffer to the last that
        was staged: those that are staged least come last.
        """
        ...

    def alloc_like(self, tensor: Tensor, num_rows: int) -> Tensor:
        """A buffer of `num_rows` rows like those of a tensor, contents undefined, whose address never changes."""
        ...

    def stage(self, buffer: Tensor, values: Any, size: int, fill: int) -> None:
        """Copy values to the front of a buffer and fill it up to `size` rows; `commit` brings them to the device.

        Args:
            buffer: from `alloc_static`.
            values: a sequence of numbers, or of rows of numbers (shorter ones filled), or a tensor.
            size: rows written in all.
            fill: what rows beyond the values hold.
        """
        ...

    # Optional, to save the host's time: stage_all(jobs), `stage` for several buffers that `alloc_inputs` made together,
    # with the arguments of each in `jobs`; decode_stager(buffers, shape, pad_slot), with a method ``stage(rows,
    # until)`` that stages decodes padded to one shape again and again, and commits them, and an attribute ``swapped``,
    # set where those aren't the buffers any more (see `StepBuffers.decode_stager`); span(), a `Span` that begins;
    # replayer(graph), `replay` of it with as few calls as the adapter's settings allow; join(first, second), two
    # tensors behind each other in one of bytes, and where the second begins: FULL graphs of decode rows then sample,
    # too. And give_back(stream): nobody needs a stream any more of `new_stream`'s; device_name, what the device calls
    # itself, which costs that were measured on another one are told by; checks, whether `replay` looks itself at where
    # weights and KV are, which the launcher otherwise does now and then; trim(), gives the device what a library keeps
    # of its memory for later, once nothing runs there: called where what captures warmed up with isn't needed again;
    # current(), the stream that launches go to now: repeats of a launch then lie evenly beside another (`wait_share`);
    # copy_out(tensor), its values on the host and when they are there: tokens of such a repeat can then be read before
    # the next ones are over.

    def commit(self, until: Span | None = None) -> None:
        """Bring all that was staged since to the device, before what the current stream gets next.

        Args:
            until: begun on that stream, and ends there in any case: what is copied out of is in use no longer than
                that, so the adapter needn't note itself when the copy is over.
        """
        ...

    def drop_staged(self) -> None:
        """Forget what was staged and not committed: staging failed."""
        ...

    def submit(self, stream: Any, work: Callable[[], None]) -> None:
        """Queue work on a stream and return. A device with streams of its own calls `work`, which launches, at once."""
        ...

    def occupy(self, us: float) -> None:
        """Keep the current stream busy for about so many microseconds, while the host launches what comes next.

        Nothing where the host itself runs what it launches.
        """
        ...

    def recording(self, pool: Any) -> AbstractContextManager[Any]:
        """Where what goes into a pool is warmed up and recorded: begin and end are called within.

        It ends with `abort`, so that an error leaves nothing recording.
        """
        ...

    def begin(self, pool: Any) -> None:
        """Begin recording what this thread launches; nothing else may be recording on it.

        Raises:
            CaptureError: the device refuses to capture now.
        """
        ...

    def end(self) -> Any:
        """End recording: a graph that `replay` takes, with ``num_bytes`` that it keeps.

        Raises:
            CaptureError: something recorded can't be captured, said with the operator and the line of model code.
        """
        ...

    def abort(self) -> None:
        """End recording after an error and free what it took; nothing where nothing is recording."""
        ...

    def weak(self, pool: Any, tensor: Tensor) -> Tensor:
        """The same elements, without keeping them from what is recorded into the pool later.

        For what is read only between replays of its own graph. A tensor that isn't the pool's comes back as it is.
        """
        ...

    def discard(self, pool: Any, graphs: Sequence[Any]) -> None:
        """Forget graphs that were just recorded and never replayed: the pieces of a capture that failed."""
        ...

    def replay(self, graph: Any) -> None:
        """Launch a graph on the current stream.

        Raises:
            GraphReplayError: nothing was launched; its key is None where the adapter doesn't know it.
            StickyDeviceError: the device is lost.
        """
        ...

    def event(self, stream: Any = None) -> DeviceEvent:
        """A point on a stream, the current one by default, after all that it was given so far."""
        ...

    def wait(self, event: DeviceEvent) -> None:
        """Let the current stream wait for an event of another, without the host where the device can."""
        ...

    def memory(self) -> MemoryReport: ...

    def classify(self, error: BaseException) -> Failure:
        """What an error raised by this device's library means."""
        ...

    def release(self, pool: Any) -> None:
        """Give a pool and every graph in it back."""
        ...
