"""`PartRun`: one launch from its staged inputs to its outputs, on whichever stream; and outputs that wait for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, overload

from kpolicy.errors import GraphReplayError, KPolicyError, OutOfMemoryError, StickyDeviceError
from kpolicy.executors.buffers import StepBuffers
from kpolicy.executors.device import DeviceAdapter, DeviceEvent
from kpolicy.executors.launch_rows import LaunchRows
from kpolicy.executors.step_model import StepModel
from kpolicy.keys import GraphKey

__all__ = ["OutputRows", "PartReady", "PartRun", "Program", "SampledSteps", "SampledTokens", "replay_error"]

Tensor = Any


class Program(Protocol):
    """What computes logits from staged buffers: see `kpolicy.executors.segments`."""

    @property
    def buffers(self) -> StepBuffers: ...

    def logits(self, rows: LaunchRows) -> Tensor: ...

    def lasting(self, logits: Tensor) -> Tensor: ...


def replay_error(adapter: DeviceAdapter, key: GraphKey, error: Exception) -> Exception:
    """What an error of a replay or of its staging means to whoever asked for it."""
    if isinstance(error, GraphReplayError):
        return error if error.key is not None else GraphReplayError(key, f"replaying {key}: {error}")
    if isinstance(error, KPolicyError) and not isinstance(error, OutOfMemoryError):
        return error
    if adapter.classify(error).sticky:
        return StickyDeviceError(f"replaying {key}: {error}. The device is lost to this process; start a new one.")
    return GraphReplayError(key, f"replaying {key}: {type(error).__name__}: {error}")


class PartRun:
    """One launch.

    Args:
        adapter: the device.
        model: samples.
        program: computes logits from the staged buffers.
        rows: what the host knows of the rows.
        repeat: decode steps.
        sampled: whether sampling inputs were staged; otherwise every row is greedy.
        key: the graph that replays; None where the program is eager.
        behind: the device runs it behind the host.

    Attributes:
        beside: it runs on a stream beside.
        event: its end on the device; set by whoever launches it.
        failed_key: the graph that failed before its launch on a stream beside, so that the rows ran eagerly.
        over: the device was seen to be past `event`, so nobody need ask again.
    """

    __slots__ = (
        "_adapter", "_error", "_model", "_program", "_repeat", "_rows", "_sampled", "behind", "beside", "event",
        "failed_key", "key", "logits", "over", "tokens",
    )  # fmt: skip

    def __init__(
        self, adapter: DeviceAdapter, model: StepModel, program: Program, rows: LaunchRows, repeat: int, sampled: bool,
        key: GraphKey | None, *, behind: bool,
    ) -> None:  # fmt: skip
        self.behind = behind
        self._adapter = adapter
        self._model = model
        self._program: Program | None = program
        self._rows = rows
        self._repeat = repeat
        self._sampled = sampled
        self.key = key
        self.logits: Tensor = None
        self.tokens: list[Tensor] = []
        self.failed_key: GraphKey | None = None
        self.beside = False
        self.over = False
        self._error: BaseException | None = None
        self.event: DeviceEvent | None = None

    def through(self, wrap: Callable[[Program], Program]) -> None:
        """Compute through what a device puts around programs, before the launch runs."""
        assert self._program is not None  # noqa: S101 - a launch runs once
        self._program = wrap(self._program)

    def run(self, fallback: Callable[[], Program] | None = None) -> None:
        """Compute and sample, as often as the launch repeats.

        Args:
            fallback: makes what runs in place of a graph that fails before it is launched. A failure after the first
                repeat goes on from there: its inputs are staged.

        Raises:
            GraphReplayError: the graph failed and there is no fallback.
            StickyDeviceError: the device is lost.
        """
        program = self._program
        assert program is not None  # noqa: S101 - a launch runs once
        # Outputs live as long as the caller likes; the buffers and the graph needn't, also after a failure.
        self._program = None
        try:
            for step in range(self._repeat):
                if step:
                    self._next_step(program.buffers, step)
                try:
                    logits = program.logits(self._rows)
                except Exception as error:
                    if self.key is None:
                        raise
                    meant = replay_error(self._adapter, self.key, error)
                    if fallback is None or not isinstance(meant, GraphReplayError):
                        raise meant from error
                    program, self.key, fallback, self.failed_key = fallback(), None, None, self.key
                    logits = program.logits(self._rows)
                if logits is not None:
                    sampled = self._sample(logits, program.buffers) if self._sampled else self._model.sample(logits, {})
                    self.tokens.append(sampled)
            self.logits = None if logits is None else program.lasting(logits)
        except KPolicyError:
            raise
        except Exception as error:
            if self._adapter.classify(error).sticky:
                raise StickyDeviceError(
                    f"running a launch: {error}. The device is lost to this process; start a new one."
                ) from error
            raise

    def _next_step(self, buffers: StepBuffers, step: int) -> None:
        rows = self._rows
        if rows.num_reqs:
            buffers.next_step(step, self.tokens[-1], rows.num_reqs)
        if rows.layout is not None:
            layout = rows.layout._replace(kv_lens=[kv_len + 1 for kv_len in rows.layout.kv_lens])
            self._rows = rows._replace(layout=layout)

    def _sample(self, logits: Tensor, buffers: StepBuffers) -> Tensor:
        """[num_wanted], the next token of each wanted row, by the sampling inputs that were staged."""
        count, positions = self._rows.num_wanted, buffers.positions
        if self._rows.all_wanted:
            positions = positions[:count] + 1
        else:
            positions = positions.index_select(0, buffers.wanted[:count]) + 1
        return self._model.sample(
            logits, {"temperature": buffers.temperature[:count], "seed": buffers.seed[:count], "position": positions}
        )

    def run_beside(
        self, fallback: Callable[[], Program] | None, started: DeviceEvent, late: Callable[[], None]
    ) -> None:
        """`run` on a stream of its own. What it raises is kept for whoever waits."""
        try:
            self._adapter.wait(started)
            self.run(fallback)
        # Whatever it is, it surfaces where the host waits for this part, and nowhere else.
        except BaseException as error:  # noqa: BLE001
            self._error = error
        if self.failed_key is not None:
            late()

    def wait(self) -> None:
        """Block until it is done.

        Raises:
            StickyDeviceError: the device is lost.
            Exception: what the model raised.
        """
        if self.event is not None and not self.over:
            self.event.wait()
        if self._error is not None:
            raise self._error


class PartReady:
    """A part's `ReadyEvent`: its end on the device, timed from the step's start."""

    __slots__ = ("_event", "_part", "_started")

    def __init__(self, part: PartRun, event: DeviceEvent, started: DeviceEvent) -> None:
        self._part = part
        self._event = event
        self._started = started

    def done(self) -> bool:
        part = self._part
        if part.over:
            return True
        done = self._event.done()
        # Where the host runs the stream, waiting is also how it hears of an error there.
        part.over = done and part.behind
        return done

    def wait(self) -> None:
        self._part.wait()

    @property
    def us(self) -> float:
        return self._event.us_since(self._started)


class OutputRows(Sequence[Any]):
    """[num_wanted] rows of logits; reading one waits for the part."""

    __slots__ = ("_count", "_part")

    def __init__(self, part: PartRun, count: int) -> None:
        self._part = part
        self._count = count

    @property
    def tensor(self) -> Tensor:
        """[num_wanted, vocab], all of them; None where there is no row."""
        self._part.wait()
        return self._part.logits

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, at: int) -> Any: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Any]: ...
    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(self._count))]
        if not -self._count <= at < self._count:
            raise IndexError(at)
        return self.tensor[at]


class SampledTokens(Sequence[int]):
    """Tokens of one sampling; reading one waits for the part and copies them to the host, once.

    Args:
        part: the launch.
        step: which of its repeats.
        places: which of the wanted rows, in order.
    """

    __slots__ = ("_part", "_places", "_step", "_values")

    def __init__(self, part: PartRun, step: int, places: Sequence[int]) -> None:
        self._part = part
        self._step = step
        self._places = places
        self._values: list[int] | None = None

    @property
    def values(self) -> list[int]:
        if self._values is None:
            self._part.wait()
            places = self._places
            if not places:
                self._values = []
            else:
                whole: list[int] = self._part.tokens[self._step].tolist()
                whole_wanted = len(places) == len(whole)
                self._values = whole if whole_wanted else [whole[place] for place in places]
        return self._values

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[int]:
        return iter(self.values)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[int]: ...
    def __getitem__(self, at: Any) -> Any:
        return self.values[at]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self.values == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self.values)


class SampledSteps(Sequence[Sequence[int]]):
    """[repeat, num_decodes] tokens; how many there are is known at once."""

    __slots__ = ("_part", "_places", "_repeat", "_steps")

    def __init__(self, part: PartRun, repeat: int, places: Sequence[int]) -> None:
        self._part = part
        self._repeat = repeat
        self._places = places
        self._steps: list[SampledTokens] | None = None

    @property
    def steps(self) -> list[SampledTokens]:
        """The steps' tokens, made when somebody asks: that is after the launch, and the host has time then."""
        if self._steps is None:
            self._steps = [SampledTokens(self._part, step, self._places) for step in range(self._repeat)]
        return self._steps

    def __len__(self) -> int:
        return self._repeat

    @overload
    def __getitem__(self, at: int) -> Sequence[int]: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Sequence[int]]: ...
    def __getitem__(self, at: Any) -> Any:
        # Plain lists, which struct packs faster than any other sequence when they are the next step's inputs.
        return [each.values for each in self.steps[at]] if isinstance(at, slice) else self.steps[at].values

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and [each.values for each in self.steps] == [list(each) for each in other]

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr([each.values for each in self.steps])
