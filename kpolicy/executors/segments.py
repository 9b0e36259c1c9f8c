"""What computes a launch's logits: a FULL graph, the segments of a PIECEWISE graph, or the model itself.

Which rows get logits is part of what is captured, so all three choose them here:

* decode graphs (uniform or variable-length): the head over every token, as each is likely wanted;
* mixed FULL graphs: the head over a static `wanted` buffer with a place for each request row; where more rows are
  wanted than that (a prompt's log-probabilities), the head runs again, eagerly, on the rows that are;
* PIECEWISE and EAGER: the head eagerly, on the wanted rows alone.

PIECEWISE capture is breakable: the model runs once, and each marked attention call ends a segment, runs eagerly and
begins the next (`BreakingStep`). A replay runs the calls over the live step. What they read and write lies in fixed
memory: arguments in the pool, where the segment before wrote them and nothing overwrites them before the call; outputs
in buffers that graphs of every size share, one a call.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from functools import cached_property, partial
from typing import Any, NamedTuple

from kpolicy.errors import CaptureError
from kpolicy.executors.base import StepInputs
from kpolicy.executors.buffers import PaddedShape, StepBuffers
from kpolicy.executors.device import DeviceAdapter, Span
from kpolicy.executors.joined_rows import JoinedLayout, Spare
from kpolicy.executors.launch_rows import LaunchRows
from kpolicy.executors.step_model import AttentionCall, RowLayout, StepContext, StepModel, StepTensors, running
from kpolicy.executors.unmarked import GuardedTensors
from kpolicy.keys import GraphKey
from kpolicy.modes import Part
from kpolicy.reasons import Reason

__all__ = [
    "BreakBuffers",
    "BreakingStep",
    "FullGraph",
    "HeadRows",
    "Joined",
    "ModelRun",
    "PieceGraph",
    "capture_full",
    "capture_pieces",
    "head_rows",
    "trim",
]

Tensor = Any


MOST_JOINED_BYTES = 4 << 20
"""Logits that a graph copies behind its tokens: more take the device longer than a launch takes the host"""


class HeadRows(Enum):
    """Which rows the head runs on."""

    TOKENS = "tokens"
    """Every token, padding included"""
    REQS = "reqs"
    """A static `wanted`, one place a request row"""
    WANTED = "wanted"
    """The wanted rows, however many"""


def trim(adapter: DeviceAdapter) -> None:
    """Let the device have what the adapter's library keeps of it and nobody uses, where the adapter can."""
    # Optional for an adapter, as a device whose library keeps nothing has nothing to give.
    give: Callable[[], None] | None = getattr(adapter, "trim", None)
    if give is not None:
        give()


def head_rows(key: GraphKey) -> HeadRows:
    """Which rows a key's graph has logits of."""
    if key.part is Part.PIECEWISE:
        return HeadRows.WANTED
    return HeadRows.TOKENS if key.decode_only else HeadRows.REQS


def _chosen(values: Tensor, buffers: StepBuffers, rows: LaunchRows) -> Tensor:
    """The wanted rows of a tensor with a row a token."""
    if rows.all_wanted:
        return values[: rows.num_wanted]
    return values.index_select(0, buffers.wanted[: rows.num_wanted])


class _ToldStep(StepContext):
    """A step of whose attention calls somebody hears before each."""

    def __init__(
        self, tensors: StepTensors, layout: RowLayout | None, query_len: int | None, before: Callable[[], None]
    ) -> None:
        super().__init__(tensors, layout, query_len)
        self._before = before

    def attention(self, call: AttentionCall, *tensors: Tensor) -> Tensor:
        self._before()
        return call(self, *tensors)


def _live_step(
    buffers: StepBuffers, shape: PaddedShape, rows: LaunchRows, before: Callable[[], None] | None
) -> StepContext:
    """What a launch runs over."""
    tensors = buffers.tensors(shape)
    if before is None:
        return StepContext(tensors, rows.layout, shape.uniform_query_len)
    return _ToldStep(tensors, rows.layout, shape.uniform_query_len, before)


class ModelRun:
    """The model, eagerly, over staged buffers.

    Args:
        model: the model.
        buffers: its inputs.
        shape: the launch's padded shape.
        head: which rows the head runs on.
    """

    def __init__(self, model: StepModel, buffers: StepBuffers, shape: PaddedShape, head: HeadRows) -> None:
        self.model = model
        self.buffers = buffers
        self.shape = shape
        self.head = head
        self.before_calls: Callable[[], None] | None = None
        """Called before each attention call"""

    def logits(self, rows: LaunchRows, lasting: bool = True) -> Tensor:  # noqa: ARG002 - they are
        """[num_wanted, vocab], in memory of their own."""
        if not self.shape.num_tokens:
            return None
        hidden = self.model.forward(_live_step(self.buffers, self.shape, rows, self.before_calls))
        if not rows.num_wanted:
            return None
        if self.head is HeadRows.TOKENS:
            return _chosen(self.model.head(hidden), self.buffers, rows)
        if self.head is HeadRows.REQS and rows.num_wanted <= self.shape.num_reqs:
            padded = self.model.head(hidden.index_select(0, self.buffers.wanted[: self.shape.num_reqs]))
            return padded[: rows.num_wanted]
        return self.model.head(_chosen(hidden, self.buffers, rows))


class Joined(NamedTuple):
    """What a FULL graph sampled greedily, and its logits behind that, in one piece: so one copy takes both."""

    whole: Tensor
    """Bytes"""
    logits_at: int
    """Where the logits begin"""
    tokens_dtype: Any
    logits_dtype: Any


class FullGraph:
    """A captured FULL graph.

    Attributes:
        key, shape, head, buffers: what it was captured for.
        launch: replays it.
        fronts: the first rows of its logits and their places, by how many they are; `front` makes them.
        samples: whether it also samples greedily.
        joined_fronts: where it does, the first rows of tokens and logits, how they lie in a copy and their places;
            `joined_front` makes them.
        spare: memory for such copies that nobody reads any more.
    """

    def __init__(
        self, key: GraphKey, shape: PaddedShape, adapter: DeviceAdapter, model: StepModel, buffers: StepBuffers,
        graph: Any, hidden: Tensor, logits: Tensor, joined: Joined | None = None,
    ) -> None:  # fmt: skip
        self.key = key
        self.shape = shape
        self.head = head_rows(key)
        self.buffers = buffers
        replayer: Callable[[Any], Callable[[], None]] = getattr(adapter, "replayer", partial(partial, adapter.replay))
        self.launch = replayer(graph)
        self._model = model
        self._graph = graph
        self._hidden = hidden
        self._logits = logits
        self.fronts: dict[int, tuple[Tensor, range]] = {}
        self.samples = joined is not None
        self._joined = joined
        self.joined_fronts: dict[int, tuple[Tensor, JoinedLayout, range]] = {}
        self.spare: list[Spare] = []
        self.num_bytes: int = graph.num_bytes
        self.held = buffers.tensors(shape)
        """What the graph reads: it must not go before the graph"""

    def logits(self, rows: LaunchRows, lasting: bool = False) -> Tensor:
        """Replay: [num_wanted, vocab], overwritten by the pool's next replay where they needn't be lasting."""
        count = rows.num_wanted
        self.launch()
        if self.head is HeadRows.REQS:
            if count > self.shape.num_reqs:
                return self._model.head(_chosen(self._hidden, self.buffers, rows))
        elif not rows.all_wanted:
            return self._logits.index_select(0, self.buffers.wanted[:count])
        front, _ = self.fronts.get(count) or self.front(count)
        return front.clone() if lasting else front

    def front(self, count: int) -> tuple[Tensor, range]:
        """The first rows of the logits as they are, [count, vocab], and their places."""
        front = self.fronts[count] = self._logits[:count], range(count)
        return front

    @cached_property
    def stage_decodes(self) -> Callable[[StepInputs, Span], bool] | None:
        """What stages steps of decodes in fewer calls than its buffers; see `StepBuffers.decode_stager`."""
        return self.buffers.decode_stager(self.shape) if self.head is HeadRows.TOKENS else None

    def joined_front(self, count: int) -> tuple[Tensor, JoinedLayout, range]:
        """The first rows of tokens and logits as they are, how they lie in a copy, and their places."""
        joined = self._joined
        assert joined is not None  # noqa: S101 - asked for where the graph samples
        whole, at, num_tokens = joined.whole, joined.logits_at, self.shape.num_tokens
        layout = JoinedLayout(count, at, joined.tokens_dtype, joined.logits_dtype)
        rows = whole[: at + (len(whole) - at) // num_tokens * count]
        front = self.joined_fronts[count] = rows, layout, range(count)
        return front


class BreakBuffers:
    """Fixed outputs of a pool's attention calls: the first call's buffer, the second's, and so on."""

    def __init__(self, adapter: DeviceAdapter, num_tokens: int) -> None:
        self._adapter = adapter
        self._num_tokens = num_tokens
        self._buffers: dict[tuple[int, tuple[int, ...], Any], Tensor] = {}
        self.num_bytes = 0

    @property
    def held(self) -> frozenset[Any]:
        """Which buffers there are, for `give_back`."""
        return frozenset(self._buffers)

    def give_back(self, held: frozenset[Any]) -> None:
        """Free the buffers beyond those: a capture that failed took them."""
        for key in self._buffers.keys() - held:
            buffer = self._buffers.pop(key)
            self.num_bytes -= buffer.numel() * buffer.element_size()

    def take(self, place: int, output: Tensor) -> Tensor:
        """A buffer for the output of the call at that place, holding it."""
        key = place, tuple(output.shape[1:]), output.dtype
        buffer = self._buffers.get(key)
        if buffer is None:
            buffer = self._buffers[key] = self._adapter.alloc_like(output, self._num_tokens)
            self.num_bytes += buffer.numel() * buffer.element_size()
        front = buffer[: output.shape[0]]
        front.copy_(output)
        return front


class _Segment(NamedTuple):
    """A graph, and the attention call that follows it."""

    graph: Any
    call: AttentionCall
    arguments: tuple[Tensor, ...]
    output: Tensor


class BreakingStep(StepContext):
    """A step whose attention calls end the segment that is being recorded.

    Its own tensors hold nothing that only attention needs: a call that reads it from here isn't marked.

    Args:
        live: the step that the calls run over meanwhile.
        adapter: the device, recording.
        pool: what it records into.
        buffers: fixed outputs of the calls.

    Attributes:
        in_call: a marked call runs.
    """

    def __init__(self, live: StepContext, adapter: DeviceAdapter, pool: Any, buffers: BreakBuffers) -> None:
        super().__init__(GuardedTensors(*live.tensors), None, live.uniform_query_len)
        self.in_call = False
        self._live = live
        self._adapter = adapter
        self._pool = pool
        self._buffers = buffers
        self.segments: list[_Segment] = []
        self.graphs: list[Any] = []
        """As `segments`, for a capture that fails"""

    @property
    def calls(self) -> list[AttentionCall]:
        """The marked calls so far."""
        return [segment.call for segment in self.segments]

    @property
    def num_tokens(self) -> int:
        """Padding included."""
        count: int = self.tensors.token_ids.shape[0]
        return count

    def attention(self, call: AttentionCall, *tensors: Tensor) -> Tensor:
        adapter = self._adapter
        self.graphs.append(adapter.end())
        self.in_call = True
        try:
            output = call(self._live, *tensors)
        finally:
            self.in_call = False
        if output.shape[0] != self.num_tokens:
            raise CaptureError(
                Reason.CAPTURE_FAILED,
                f"an attention call gave {output.shape[0]} rows for {self.num_tokens} padded tokens; it must give "
                "one a token, padding included.",
            )
        front = self._buffers.take(len(self.segments), output)
        # The caller's tensors end as the model goes on, and with them the hold on their memory, which later segments
        # may then take: a replay runs the call before those, as now.
        arguments = tuple(adapter.weak(self._pool, tensor) for tensor in tensors)
        self.segments.append(_Segment(self.graphs[-1], call, arguments, front))
        adapter.begin(self._pool)
        return front


class PieceGraph:
    """A captured PIECEWISE graph: segments with eager attention calls between them."""

    head = HeadRows.WANTED

    def __init__(
        self, key: GraphKey, adapter: DeviceAdapter, model: StepModel, buffers: StepBuffers,
        segments: list[_Segment], last: Any, hidden: Tensor, held: StepTensors,
    ) -> None:  # fmt: skip
        self.key = key
        self.buffers = buffers
        self.num_graphs = len(segments) + 1
        self.num_bytes: int = last.num_bytes + sum(segment.graph.num_bytes for segment in segments)
        self._adapter = adapter
        self.model = model
        self._segments = segments
        self._last = last
        self._hidden = hidden
        self.held = held

    def bound(self, shape: PaddedShape) -> BoundPieces:
        """The graph for a launch of that shape, whose rows aren't padded."""
        return BoundPieces(self, shape)

    def replay(self, step: StepContext) -> Tensor:
        """Run over a live step: [padded_tokens, hidden], overwritten by the pool's next replay."""
        replay = self._adapter.replay
        if isinstance(step, _ToldStep):
            for graph, call, arguments, output in self._segments:
                replay(graph)
                output.copy_(step.attention(call, *arguments))
        else:
            # A function of Python's less for each.
            for graph, call, arguments, output in self._segments:
                replay(graph)
                output.copy_(call(step, *arguments))
        replay(self._last)
        return self._hidden


class BoundPieces:
    """A PIECEWISE graph and the shape of one launch."""

    head = HeadRows.WANTED

    def __init__(self, graph: PieceGraph, shape: PaddedShape) -> None:
        self.key = graph.key
        self.buffers = graph.buffers
        self.shape = shape
        self.num_calls = graph.num_graphs - 1
        """Attention calls of a forward"""
        self.before_calls: Callable[[], None] | None = None
        """Called before each"""
        self._graph = graph

    def logits(self, rows: LaunchRows, lasting: bool = True) -> Tensor:  # noqa: ARG002 - they are
        """Replay: [num_wanted, vocab], in memory of their own."""
        step = _live_step(self.buffers, self.shape, rows, self.before_calls)
        with running(step):
            hidden = self._graph.replay(step)
        if not rows.num_wanted:
            return None
        return self._graph.model.head(_chosen(hidden, self.buffers, rows))


def capture_full(
    key: GraphKey, shape: PaddedShape, adapter: DeviceAdapter, model: StepModel, pool: Any, buffers: StepBuffers,
    warm_ups: int = 1,
) -> FullGraph:  # fmt: skip
    """Record a FULL graph over padding, after so many eager runs of it.

    It also samples greedily where it has logits of every token, few enough bytes of them, and adapter and model can.
    """
    tensors = buffers.tensors(shape)
    which = head_rows(key)
    # Optional, both: see `DeviceAdapter` and `StepModel`.
    join: Callable[[Tensor, Tensor], tuple[Tensor, int]] | None = getattr(adapter, "join", None)
    if which is not HeadRows.TOKENS or not getattr(model, "greedy_in_graphs", False):
        join = None

    def run() -> tuple[Tensor, Tensor, Joined | None]:
        hidden = model.forward(StepContext(tensors, None, shape.uniform_query_len))
        rows = hidden if which is HeadRows.TOKENS else hidden.index_select(0, wanted)
        logits = model.head(rows)
        if join is None or logits.numel() * logits.element_size() > MOST_JOINED_BYTES:
            return hidden, logits, None
        tokens = model.sample(logits, {})
        return hidden, logits, Joined(*join(tokens, logits), tokens.dtype, logits.dtype)

    wanted = buffers.wanted[: shape.num_reqs]
    for _ in range(warm_ups):
        run()
    adapter.begin(pool)
    hidden, logits, joined = run()
    graph = adapter.end()
    if joined is not None:
        joined = joined._replace(whole=adapter.weak(pool, joined.whole))
    hidden, logits = adapter.weak(pool, hidden), adapter.weak(pool, logits)
    return FullGraph(key, shape, adapter, model, buffers, graph, hidden, logits, joined)


def capture_pieces(
    key: GraphKey, shape: PaddedShape, adapter: DeviceAdapter, model: StepModel, pool: Any, buffers: StepBuffers,
    breaks: BreakBuffers, warm_ups: int = 1,
) -> PieceGraph:  # fmt: skip
    """Record a PIECEWISE graph over padding, after so many eager runs of it.

    A capture that fails midway forgets the segments it has.

    Raises:
        CaptureError: attention ran unmarked (a model finds more of it by an attribute ``watching``, called with the
            `BreakingStep` for a context manager), or the device refused.
    """
    tensors = buffers.tensors(shape)
    live = StepContext(tensors, RowLayout(0, 0, (), ()))
    wanted = buffers.wanted[: shape.num_reqs]
    for _ in range(warm_ups):
        # As in a step, on as many rows as there are requests: logits of 2,048 tokens would take 600 MB.
        model.head(model.forward(live).index_select(0, wanted))
    if not breaks.held:
        # Buffers that stay would be cut out of what warming up freed, and hold all of a piece for a small part of it.
        trim(adapter)
    step, held = BreakingStep(live, adapter, pool, breaks), breaks.held
    watching = getattr(model, "watching", None)
    watched: AbstractContextManager[Any] = nullcontext() if watching is None else watching(step)
    try:
        # Around all recordings, which end first: what looks at operators ends in the order in which it began.
        with watched:
            try:
                adapter.begin(pool)
                hidden = model.forward(step)
                last = adapter.end()
                step.graphs.append(last)
            finally:
                adapter.abort()
    except BaseException:
        adapter.discard(pool, step.graphs)
        step.segments.clear()
        breaks.give_back(held)
        raise
    hidden = adapter.weak(pool, hidden)
    return PieceGraph(key, adapter, model, buffers, step.segments, last, hidden, tensors)
