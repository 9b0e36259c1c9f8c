"""`PartRun`: launches from staged inputs to outputs, on whichever stream; and outputs that wait for their launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, overload

from kpolicy.errors import GraphReplayError, KPolicyError, OutOfMemoryError, StickyDeviceError
from kpolicy.executors.buffers import StepBuffers
from kpolicy.executors.device import DeviceAdapter, DeviceEvent, Span
from kpolicy.executors.launch_rows import LaunchRows
from kpolicy.executors.step_model import StepModel
from kpolicy.keys import GraphKey

__all__ = [
    "EarlyTokens",
    "EventSpan",
    "OutputRows",
    "PartReady",
    "PartRun",
    "Program",
    "SampledSteps",
    "SampledTokens",
    "SpreadRows",
    "raise_lost",
    "replay_error",
]

Tensor = Any


class Program(Protocol):
    """What computes logits from staged buffers: see `kpolicy.executors.segments`."""

    @property
    def buffers(self) -> StepBuffers: ...

    def logits(self, rows: LaunchRows, lasting: bool) -> Tensor:
        """[num_wanted, vocab]; None where there is no row. `lasting` ones aren't overwritten by the next launch."""
        ...


def replay_error(adapter: DeviceAdapter, key: GraphKey, error: Exception) -> Exception:
    """What an error of a replay or of its staging means to whoever asked for it."""
    if isinstance(error, GraphReplayError):
        return error if error.key is not None else GraphReplayError(key, f"replaying {key}: {error}", error.reason)
    if isinstance(error, KPolicyError) and not isinstance(error, OutOfMemoryError):
        return error
    if adapter.classify(error).sticky:
        return StickyDeviceError(f"replaying {key}: {error}. The device is lost to this process; start a new one.")
    # A token, slot or row of the inputs that isn't there; or one that the graph, captured with other weights, lacks.
    maybe_inputs = isinstance(error, IndexError)
    return GraphReplayError(key, f"replaying {key}: {type(error).__name__}: {error}", maybe_inputs=maybe_inputs)


def raise_lost(adapter: DeviceAdapter, error: Exception) -> None:
    """Raise what an error of a launch means where it means that the device is lost."""
    if not isinstance(error, KPolicyError) and adapter.classify(error).sticky:
        raise StickyDeviceError(
            f"running a launch: {error}. The device is lost to this process; start a new one."
        ) from error


class PartReady:
    """A part's `ReadyEvent`: its end on the device, timed from the step's start.

    It keeps none of the part's outputs: a step that waits to be counted holds no memory.

    Args:
        event: the part's end; None for a part beside until it is submitted, when whoever submits it sets it.
        started: the step's start.
        behind: the device runs it behind the host.

    Attributes:
        error: what a part beside raised, which its stream's thread sets.
    """

    __slots__ = ("_behind", "_over", "_started", "error", "event")

    def __init__(self, event: DeviceEvent | None, started: DeviceEvent, behind: bool) -> None:
        self.event = event
        self.error: BaseException | None = None
        self._started = started
        self._behind = behind
        self._over = False
        """The device was seen to be past the event, so nobody need ask again"""

    def done(self) -> bool:
        if self._over:
            return True
        done = self._end.done()
        # Where the host runs the stream, waiting is also how it hears of an error there.
        self._over = done and self._behind
        return done

    def wait(self) -> None:
        """Block until it is done.

        Raises:
            StickyDeviceError: the device is lost.
            Exception: what the model raised.
        """
        if not self._over:
            self._end.wait()
        if self.error is not None:
            raise self.error

    @property
    def us(self) -> float:
        return self._end.us_since(self._started)

    @property
    def _end(self) -> DeviceEvent:
        assert self.event is not None  # noqa: S101 - nobody has it before its launch is submitted
        return self.event


class EventSpan(PartReady):
    """A `Span` of two events, for adapters without one of their own. Once ended it keeps none of the adapter."""

    __slots__ = ("_adapter",)

    def __init__(self, adapter: DeviceAdapter) -> None:
        super().__init__(None, adapter.event(), not adapter.host_runs)
        self._adapter = adapter

    def end(self) -> None:
        self.event = self._adapter.event()
        del self._adapter


class EarlyTokens(NamedTuple):
    """Tokens of one repeat on the host, and when they are there."""

    values: Tensor
    event: DeviceEvent


class OutputRows(Sequence[Any]):
    """[num_wanted] rows of one launch's logits; reading one waits for the launch.

    Args:
        count: how many.
        ready: when they are there; of a launch beside, set once it is submitted.

    Attributes:
        logits: [num_wanted, vocab], to be read once they are ready; None where there is no row.
        tokens: [num_wanted] each, what was sampled, repeat by repeat.
        failed_key: the graph that failed before its launch on a stream beside, so that the rows ran eagerly.
    """

    __slots__ = ("failed_key", "logits", "num_rows", "ready", "tokens")

    def __init__(self, count: int, ready: PartReady | Span) -> None:
        self.num_rows = count
        self.ready = ready
        self.logits: Tensor = None
        self.tokens: list[Tensor] = []
        self.failed_key: GraphKey | None = None

    @property
    def tensor(self) -> Tensor:
        """[num_wanted, vocab], all of them; None where there is no row."""
        self.ready.wait()
        return self.logits

    def host_tokens(self, step: int) -> list[int]:
        """[num_wanted] tokens of a repeat; waits for the launch. Empty where there is no row."""
        self.ready.wait()
        return self.tokens[step].tolist() if self.num_rows else []

    def __len__(self) -> int:
        return self.num_rows

    @overload
    def __getitem__(self, at: int) -> Any: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Any]: ...
    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(self.num_rows))]
        if not -self.num_rows <= at < self.num_rows:
            raise IndexError(at)
        return self.tensor[at]


class SpreadRows(OutputRows):
    """`OutputRows` whose repeats' tokens can be read one by one, while the next ones wait for their place.

    Attributes:
        early: of each repeat, those that are copied to the host behind it.
    """

    __slots__ = ("early",)

    def __init__(self, count: int, ready: PartReady | Span) -> None:
        super().__init__(count, ready)
        self.early: list[EarlyTokens] = []

    def host_tokens(self, step: int) -> list[int]:
        if step >= len(self.early):
            return super().host_tokens(step)
        values, event = self.early[step]
        event.wait()
        found: list[int] = values.tolist()
        return found


new_outputs_of: Callable[[], OutputRows] = partial(object.__new__, OutputRows)
"""Makes them empty, without a function of Python's, for who sets what they have"""


class PartRun:
    """Runs launches from their staged inputs to their outputs, on whichever stream.

    Args:
        adapter: the device.
        model: samples.
    """

    def __init__(self, adapter: DeviceAdapter, model: StepModel) -> None:
        self._adapter = adapter
        self._model = model

    def run(
        self, into: OutputRows, program: Program, rows: LaunchRows, repeat: int, sampled: bool, key: GraphKey | None,
        fallback: Callable[[], Program] | None = None,
    ) -> None:  # fmt: skip
        """Compute and sample, as often as the launch repeats: all of `repeats`."""
        for _ in self.repeats(into, program, rows, repeat, sampled, key, fallback):
            pass

    def repeats(
        self, into: OutputRows, program: Program, rows: LaunchRows, repeat: int, sampled: bool, key: GraphKey | None,
        fallback: Callable[[], Program] | None = None,
    ) -> Iterator[None]:  # fmt: skip
        """Compute and sample once each time the next is asked for, as often as the launch repeats.

        Args:
            into: the launch's outputs. They live as long as the caller likes, and keep neither buffers nor graph.
            program: computes logits from the staged buffers.
            rows: what the host knows of the rows.
            repeat: decode steps.
            sampled: whether sampling inputs were staged; otherwise every row is greedy.
            key: the graph that replays; None where the program is eager.
            fallback: makes what runs in place of a graph that fails before it is launched. A failure after the first
                repeat goes on from there: its inputs are staged.

        Raises:
            GraphReplayError: the graph failed and there is no fallback.
            StickyDeviceError: the device is lost.
        """
        tokens, last, logits = into.tokens, repeat - 1, None
        try:
            for step in range(repeat):
                if step:
                    rows = _next_step(program.buffers, rows, step, tokens)
                try:
                    logits = program.logits(rows, step == last)
                except Exception as error:
                    if key is None:
                        raise
                    meant = replay_error(self._adapter, key, error)
                    if fallback is None or not isinstance(meant, GraphReplayError):
                        raise meant from error
                    program, failed, key, fallback = fallback(), key, None, None
                    if not meant.maybe_inputs:
                        into.failed_key = failed
                    logits = program.logits(rows, step == last)
                    into.failed_key = failed
                if logits is not None:
                    tokens.append(self._model.sample(logits, sampling_inputs(program.buffers, rows) if sampled else {}))
                if step == last:
                    into.logits = logits
                yield
        except Exception as error:
            raise_lost(self._adapter, error)
            raise

    def run_beside(
        self, into: OutputRows, program: Program, rows: LaunchRows, repeat: int, sampled: bool, key: GraphKey | None,
        fallback: Callable[[], Program] | None, started: DeviceEvent, late: Callable[[GraphKey], None],
    ) -> None:  # fmt: skip
        """`run` on a stream of its own. What it raises is kept for whoever waits; `late` hears of a failed graph."""
        try:
            self._adapter.wait(started)
            self.run(into, program, rows, repeat, sampled, key, fallback)
        # Whatever it is, it surfaces where the host waits for this part, and nowhere else.
        except BaseException as error:  # noqa: BLE001
            assert isinstance(into.ready, PartReady)  # noqa: S101 - as for every launch that isn't a whole step
            into.ready.error = error
        if into.failed_key is not None:
            late(into.failed_key)


def _next_step(buffers: StepBuffers, rows: LaunchRows, step: int, tokens: Sequence[Tensor]) -> LaunchRows:
    """Go one decode step on: what the host knows of the rows then."""
    if rows.num_reqs:
        buffers.next_step(step, tokens[-1], rows.num_reqs)
    if rows.layout is None:
        return rows
    return rows._replace(layout=rows.layout._replace(kv_lens=[kv_len + 1 for kv_len in rows.layout.kv_lens]))


def sampling_inputs(buffers: StepBuffers, rows: LaunchRows) -> Mapping[str, Tensor]:
    """What sampling reads of each wanted row: the inputs that were staged."""
    count, positions = rows.num_wanted, buffers.positions
    positions = positions[:count] + 1 if rows.all_wanted else positions.index_select(0, buffers.wanted[:count]) + 1
    return {"temperature": buffers.temperature[:count], "seed": buffers.seed[:count], "position": positions}


class SampledTokens(Sequence[int]):
    """Tokens of one sampling; reading one waits for the part and copies them to the host, once.

    Args:
        part: the launch.
        step: which of its repeats.
        places: which of the wanted rows, in order.
    """

    __slots__ = ("_part", "_places", "_step", "_values")

    def __init__(self, part: OutputRows, step: int, places: Sequence[int]) -> None:
        self._part = part
        self._step = step
        self._places = places
        self._values: list[int] | None = None

    @property
    def values(self) -> list[int]:
        if self._values is None:
            places, whole = self._places, self._part.host_tokens(self._step)
            if not places:
                self._values = []
            else:
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

    __slots__ = ("_steps", "part", "places", "repeat")

    part: OutputRows
    places: Sequence[int]
    repeat: int
    _steps: list[SampledTokens]

    @classmethod
    def of(cls, part: OutputRows, repeat: int, places: Sequence[int]) -> SampledSteps:
        made = cls()
        made.part, made.places, made.repeat = part, places, repeat
        return made

    @property
    def steps(self) -> list[SampledTokens]:
        """The steps' tokens, made when somebody asks: that is after the launch, and the host has time then."""
        try:
            return self._steps
        except AttributeError:
            self._steps = [SampledTokens(self.part, step, self.places) for step in range(self.repeat)]
            return self._steps

    def __len__(self) -> int:
        return self.repeat

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
