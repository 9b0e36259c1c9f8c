"""`GraphLauncher`: runs a step model's launches over the primitives of any device, in every mode.

Promise: a replay computes what the same rows padded to the same shape compute eagerly, bit for bit where the kernels
are deterministic; padding writes to the reserved slot alone; outputs are copies.

What may run beside something else never shares memory with it. Each part (decode-FULL, PIECEWISE) has a pool with its
own graphs, static inputs and outputs; eager launches have static inputs for each stream. Steps follow each other: a
step's staging waits for all of the step before, so only launches of one step overlap. Where the host itself runs the
main stream (the CPU), a step with launches on several streams runs each on a stream of its own, main one included.

A graph that fails before it is launched raises `GraphReplayError` where the host still can decide again; on a stream
beside, where it can't, its rows run eagerly on what was staged, at the graph's own shape, and the owner is told. A
model that writes KV by slot may be run again over the same rows, also after some segments of a PIECEWISE graph ran; one
with recurrent state may not, so its graphs must fail in the first segment or not at all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kpolicy.decision import Decision, Launch
from kpolicy.errors import (
    CaptureError,
    ConfigError,
    GraphReplayError,
    KPolicyError,
    RegistryError,
    StickyDeviceError,
)
from kpolicy.executors.addresses import Address, addresses_of, check_moved
from kpolicy.executors.base import CaptureReport, ProbeReport, ReadyEvent, StepInputs
from kpolicy.executors.buffers import PaddedShape, StepBuffers
from kpolicy.executors.device import DeviceAdapter, DeviceEvent
from kpolicy.executors.full_step import FullStep, sampled_of
from kpolicy.executors.handover import PartOutputs
from kpolicy.executors.input_values import check_values
from kpolicy.executors.launch_rows import LaunchRows, launch_rows, new_rows, uniform_query_len
from kpolicy.executors.parts import (
    OutputRows,
    PartReady,
    PartRun,
    Program,
    SampledTokens,
    SpreadRows,
    raise_lost,
    replay_error,
)
from kpolicy.executors.segments import (
    BreakBuffers,
    FullGraph,
    HeadRows,
    ModelRun,
    PieceGraph,
    capture_full,
    capture_pieces,
    head_rows,
    trim,
)
from kpolicy.executors.spread import SpreadRepeats
from kpolicy.executors.step_model import StepModel
from kpolicy.keys import GraphKey
from kpolicy.modes import Part, Rows
from kpolicy.reasons import Reason
from kpolicy.shapes import BatchNumbers

__all__ = ["GraphLauncher", "LauncherPool"]

MAX_NUM_REQS = 256
"""Rows of a launch where neither the caller nor the model says"""
_NEEDED = ("forward", "head", "sample", "max_blocks", "pad_slot")
"""What no launch goes without"""
_CHECKED = ("token_ids", "positions", "slot_mapping", "block_table", "kv_lens")
WARM_UPS = 3
"""Eager runs before a pool's first graph, which is its largest; each later one has one.

What starts late starts once a process or a stream: libraries' handles and workspaces, autotuners that try first and
settle then. Three is what `torch.cuda.make_graphed_callables` takes for it. A smaller size may have kernels of its own,
which its own run loads or compiles."""
_CHECKS = -1
"""The eager buffers of `eager_as`: no stream has that number."""


class LauncherPool:
    """One part's graphs, static inputs and outputs of attention calls."""

    def __init__(self, part: Part, memory: Any, buffers: StepBuffers, breaks: BreakBuffers) -> None:
        self.part = part
        self.memory = memory
        self.buffers = buffers
        self.breaks = breaks
        self.warm = False
        """Whether something was captured into it"""
        self.counted_bytes = 0
        """What reports of graphs that were kept have of `num_bytes`"""

    @property
    def num_bytes(self) -> int:
        """Bytes of static inputs and of outputs of attention calls, which go with the pool."""
        return self.buffers.num_bytes + self.breaks.num_bytes


class GraphLauncher:
    """Captures and launches a step model on one device. A `Launcher`; `ModeRunner` makes an executor of it.

    Args:
        adapter: the device.
        model: the model.
        max_num_reqs: most rows of a launch that replays; the model's own by default.

    Attributes:
        late_failure: called, on the stream's thread, with the key of a graph that failed on a stream beside.
        spreads: whether repeats of a launch lie evenly beside another where a decision says so (`Launch.wait_share`);
            otherwise all begin at once.

    Raises:
        ConfigError: the model isn't a `StepModel`, or `max_num_reqs` isn't at least 1.
    """

    def __init__(self, adapter: DeviceAdapter, model: StepModel, *, max_num_reqs: int | None = None) -> None:
        lacks = [name for name in _NEEDED if not hasattr(model, name)]
        if lacks:
            raise ConfigError(
                f"a {type(model).__name__} isn't a step model: it lacks {', '.join(lacks)}. kpolicy.load makes one of "
                "a folder or a config; kpolicy.executors.step_model.StepModel says what one of your own has."
            )
        most: int = getattr(model, "max_num_reqs", MAX_NUM_REQS) if max_num_reqs is None else max_num_reqs
        if most < 1:
            raise ConfigError(f"max_num_reqs is {most}; it starts at 1.")
        self.adapter = adapter
        self.model = model
        self.max_num_reqs = most
        self.late_failure: Callable[[GraphKey], None] = _unheard
        self._eager: dict[int, StepBuffers] = {}
        self._streams: dict[int, Any] = {}
        self._reports: dict[tuple[Part, bool], dict[int, CaptureReport]] = {}
        """What captures took, by part and whether the pool had graphs before, and by size"""
        self._beside = False
        self._behind = not adapter.host_runs
        self._checks: bool = getattr(adapter, "checks", False)
        self._statics: dict[GraphKey, dict[str, Address]] = {}
        self._places: dict[str, Address] = {}
        """Where weights and KV lay at the first capture, where replays don't look themselves"""
        self._part_run = PartRun(adapter, model)
        self._started: DeviceEvent = adapter.event()
        self.spreads = not adapter.host_runs and hasattr(adapter, "current")
        self._waiting: Launch | None = None
        """The launch of this step whose repeats wait for the next launch"""
        self._spread: SpreadRepeats | None = None
        """Those repeats, until that launch comes"""
        self._num_calls = 0
        """Attention calls of a forward; 0 while nobody knows"""
        self._ready: list[ReadyEvent] = []
        self._unfinished: list[DeviceEvent] = []

    @property
    def name(self) -> str:
        return self.adapter.name

    def probe(self) -> ProbeReport:
        return self.adapter.probe()

    # Capture

    def estimate(self, key: GraphKey) -> CaptureReport:
        """What that key will cost, from the captures of its part so far: that of the nearest size.

        Before the first capture nothing is known, so nothing is expected of it but its graph. The first graph of a pool
        pays for memory that later ones use again, so of those alone no bytes are expected.
        """
        later, first = self._reports.get((key.part, True)), self._reports.get((key.part, False))
        known = later or first
        if not known:
            return CaptureReport(0, 0.0, 0, 1)
        near = known[min(known, key=lambda num_tokens: abs(num_tokens - key.num_tokens))]
        return near if later else near._replace(bytes=0)

    def new_pool(self, part: Part, largest: GraphKey) -> LauncherPool:
        num_reqs = largest.num_reqs or min(self.max_num_reqs, largest.num_tokens)
        try:
            # Eager buffers that grow give back what a launch beside may still read.
            self._settle()
            # Rows that wait for a stream are seldom many; its thread or handle is made before a step asks for it.
            for stream in (0, 1):
                self._stream(stream)
                # Eager launches must go on whatever graphs take, so theirs come first.
                self._eager_buffers(stream, PaddedShape(largest.num_tokens, num_reqs, None))
            buffers = StepBuffers(self.adapter, self.model, largest.num_tokens, num_reqs)
            memory = self.adapter.new_pool(1 if part is Part.FULL else 0)
        except Exception as error:
            raise self._capture_error(f"a pool for {part} graphs of up to {largest}", error) from error
        return LauncherPool(part, memory, buffers, BreakBuffers(self.adapter, largest.num_tokens))

    def capture(self, key: GraphKey, pool: LauncherPool) -> tuple[FullGraph | PieceGraph, CaptureReport]:
        buffers, start = pool.buffers, time.perf_counter()
        shape = PaddedShape(key.num_tokens, key.num_reqs or min(key.num_tokens, buffers.num_reqs), key.query_len)
        if not buffers.holds(shape.num_tokens, shape.num_reqs):
            raise RegistryError(
                f"capturing {key}: its pool has buffers for {buffers.num_tokens} tokens in {buffers.num_reqs} rows; "
                "make a pool for the largest key."
            )
        warm_ups = 1 if pool.warm else WARM_UPS
        handle: FullGraph | PieceGraph
        try:
            self._settle()
            with self.adapter.session(), self.adapter.recording(pool.memory):
                buffers.stage_padding(shape)
                self.adapter.commit()
                if key.part is Part.FULL:
                    handle = capture_full(key, shape, self.adapter, self.model, pool.memory, buffers, warm_ups)
                    graphs = 1
                else:
                    handle = capture_pieces(
                        key, shape, self.adapter, self.model, pool.memory, buffers, pool.breaks, warm_ups
                    )
                    graphs = handle.num_graphs
                    self._num_calls = graphs - 1
        except Exception as error:
            failed = self._capture_error(str(key), error)
            if isinstance(failed, CaptureError):
                failed.seconds = time.perf_counter() - start
            raise failed from error
        if self._checks:
            self._statics[key] = self._where()
        elif not self._places:
            self._places = self._where()
        # A pool's first graph pays for what the pool holds besides graphs, and each for what came since.
        kept, pool.counted_bytes = pool.num_bytes - pool.counted_bytes, pool.num_bytes
        report = CaptureReport(handle.num_bytes + kept, time.perf_counter() - start, 0, graphs)
        self._reports.setdefault((key.part, pool.warm), {})[key.num_tokens] = report
        pool.warm = True
        return handle, report

    def refused(self, handle: FullGraph | PieceGraph, report: CaptureReport, pool: LauncherPool) -> None:
        """A captured graph isn't kept: what it would have paid for of its pool counts with the next."""
        pool.counted_bytes -= report.bytes - handle.num_bytes

    def _capture_error(self, what: str, error: Exception) -> Exception:
        if isinstance(error, CaptureError | StickyDeviceError):
            return error
        failure = self.adapter.classify(error)
        message = f"capturing {what}: {type(error).__name__}: {error}"
        return StickyDeviceError(message) if failure.sticky else CaptureError(failure.reason, message)

    # Running

    def start(self, decision: Decision) -> None:
        """A step begins: it waits for the one before, and its parts' times count from here."""
        # Of a step that was given up in between nothing is left.
        self._ready, self._spread, self._waiting = [], None, None
        launches = decision.launches
        if self.spreads and len(launches) > 1 and not launches[0].stream and launches[1].stream:
            self._waiting = launches[0] if launches[0].wait_share is not None else None
        self._beside = len(launches) > 1 and self.adapter.host_runs and any(launch.stream for launch in launches)
        try:
            if self._unfinished:
                self._settle()
            self._started = self.adapter.event()
        except Exception as error:
            # What the step before ended in, the next call may be the first to say.
            raise_lost(self.adapter, error)
            raise

    def _settle(self) -> None:
        """Let the main stream wait for what other streams still do."""
        unfinished = self._unfinished[:]
        self._unfinished.clear()
        for event in unfinished:
            self.adapter.wait(event)

    def prepared(self, handle: FullGraph | PieceGraph, decision: Decision) -> FullStep | None:
        """A decision that is one replay of a FULL graph on the main stream, prepared.

        None where it isn't, and where replays or launches are somebody else's, whom a prepared step would pass by.
        """
        own = getattr(self.replay, "__func__", None), getattr(self._launch, "__func__", None)
        if own != (GraphLauncher.replay, GraphLauncher._launch):
            return None
        launch = decision.launches[0]
        plain = len(decision.launches) == 1 and launch.rows is Rows.ALL and not launch.stream and launch.repeat == 1
        if not plain or self._checks or not isinstance(handle, FullGraph):
            return None
        return FullStep(decision, handle, self.adapter, self.model, self._unfinished, self._settle)

    def replay(self, handle: FullGraph | PieceGraph, rows: StepInputs, launch: Launch) -> PartOutputs:
        key, buffers, num_reqs, num_tokens = handle.key, handle.buffers, len(rows.query_lens), len(rows.token_ids)
        program: Program
        if isinstance(handle, FullGraph):
            shape, head, program = handle.shape, handle.head, handle
            most_reqs = shape.num_reqs
            num_wanted = len(rows.wanted)
            live = new_rows((num_wanted, num_wanted == num_tokens, num_reqs, None))
        else:
            shape = PaddedShape(key.num_tokens, num_reqs, uniform_query_len(rows, launch.rows))
            head, program, most_reqs = HeadRows.WANTED, handle.bound(shape), buffers.num_reqs
            live = launch_rows(rows, launch.rows, live=True)
        if num_tokens > key.num_tokens or num_reqs > most_reqs:
            raise RegistryError(
                f"{key} has {key.num_tokens} tokens in {most_reqs} rows and was given {num_tokens} in "
                f"{num_reqs}; choose a graph that holds them, as GraphKey.holds says."
            )
        if self._checks:
            check_values(rows, launch.rows, self.model)
            _check_inputs(handle)
            # Before the first launch, where it costs the graph and not the step.
            check_moved(key, self._statics.get(key, {}), self._where())
        wanted = not live.all_wanted or head is HeadRows.REQS
        behind = self._beside or launch.stream or launch is self._waiting
        with self.adapter.session():
            try:
                if launch.stream:
                    sampled = self._stage_beside(buffers, rows, shape, wanted, launch)
                else:
                    sampled = buffers.stage(rows, shape, wanted, launch.repeat)
            except Exception as error:
                raise replay_error(self.adapter, key, error) from error
            # Only what runs behind the host needs something to fall back on: here the host decides again.
            fallback = partial(ModelRun, self.model, buffers, shape, head) if behind else None
            return self._launch(program, rows, live, launch, sampled, fallback)

    def moved(self) -> GraphReplayError | None:
        """What moved of weights and KV since graphs were captured, once; None where nothing did or replays look."""
        places = self._places
        if not places:
            return None
        try:
            check_moved(None, places, self._where())
        except GraphReplayError as found:
            # Graphs that are captured from here on have what is there now.
            self._places = {}
            return found
        return None

    def _where(self) -> dict[str, Address]:
        """Where weights and KV lie, by name; nothing of a model that doesn't name them."""
        named: Callable[[], Any] = getattr(self.model, "static_tensors", dict)
        return addresses_of(named())

    def eager(self, rows: StepInputs, launch: Launch) -> PartOutputs:
        num_tokens = len(rows.token_ids)
        padded = num_tokens if launch.padded_tokens is None else launch.padded_tokens
        if padded < num_tokens:
            raise RegistryError(f"an eager launch of {num_tokens} tokens can't be padded to {padded}.")
        if self._checks:
            check_values(rows, launch.rows, self.model)
        shape = PaddedShape(padded, len(rows.query_lens), uniform_query_len(rows, launch.rows))
        return self._run_eagerly(launch.stream, rows, shape, HeadRows.WANTED, True, launch)

    def eager_as(self, key: GraphKey, rows: StepInputs, which: Rows = Rows.ALL, *, repeat: int = 1) -> PartOutputs:
        """Run rows eagerly at exactly the shape of a replay of that key, for comparing bit for bit.

        Not part of a step: it waits for the step before, and writes the same KV as the replay would.

        Args:
            key: the graph's key; it needn't be captured.
            rows: the launch's rows; see `kpolicy.executors.runner.part_of`.
            which: which rows of the batch they are.
            repeat: decode steps.
        """
        live = key.part is Part.PIECEWISE
        if live:
            shape = PaddedShape(key.num_tokens, len(rows.query_lens), uniform_query_len(rows, which))
        else:
            shape = PaddedShape(key.num_tokens, key.num_reqs or key.num_tokens, key.query_len)
        self._settle()
        # A step that was given up between its halves may have left repeats, whose slots may be others' by now.
        self._spread = self._waiting = None
        ready, beside, self._beside = self._ready, self._beside, False
        self._ready = []
        try:
            return self._run_eagerly(_CHECKS, rows, shape, head_rows(key), live, Launch(which, None, repeat=repeat))
        finally:
            self._ready, self._beside = ready, beside

    def _run_eagerly(
        self, slot: int, rows: StepInputs, shape: PaddedShape, head: HeadRows, live: bool, launch: Launch
    ) -> PartOutputs:
        facts = launch_rows(rows, launch.rows, live=live)
        wanted = not facts.all_wanted or head is HeadRows.REQS
        with self.adapter.session():
            buffers = self._eager_buffers(slot, shape)
            stage = partial(buffers.stage, rows, shape, wanted, launch.repeat)
            if launch.stream:
                stage = partial(self._stage_beside, buffers, rows, shape, wanted, launch)
            try:
                sampled = stage()
            except KPolicyError:
                raise
            except Exception as error:
                # Nothing ran yet and there is no lesser mode: once more, and then it is the caller's.
                if self.adapter.classify(error).sticky:
                    raise StickyDeviceError(f"staging an eager launch: {error}. The device is lost.") from error
                sampled = stage()
            return self._launch(ModelRun(self.model, buffers, shape, head), rows, facts, launch, sampled, None)

    def _eager_buffers(self, slot: int, shape: PaddedShape) -> StepBuffers:
        """The eager buffers of a stream; larger ones where they don't hold the shape.

        Raises:
            OutOfMemoryError: the device's limit doesn't have them; smaller launches make theirs anew.
        """
        buffers = self._eager.get(slot)
        if buffers is None or not buffers.holds(shape.num_tokens, shape.num_reqs):
            tokens = max(_power(shape.num_tokens), buffers.num_tokens if buffers else 0)
            reqs = max(_power(shape.num_reqs), buffers.num_reqs if buffers else 0)
            # Never both at once: the smaller ones' memory may be what the larger ones need.
            self._eager.pop(slot, None)
            del buffers
            buffers = self._eager[slot] = StepBuffers(self.adapter, self.model, tokens, reqs)
        return buffers

    def _stage_beside(
        self, buffers: StepBuffers, rows: StepInputs, shape: PaddedShape, wanted: bool, launch: Launch
    ) -> bool:
        """Stage a launch on its own stream."""
        with self.adapter.on(self._stream(launch.stream)):
            # These buffers may be those of the step before, which the main stream ran.
            self.adapter.wait(self._started)
            return buffers.stage(rows, shape, wanted, launch.repeat)

    def _launch(
        self, program: Program, rows: StepInputs, live: LaunchRows, launch: Launch, sampled: bool,
        fallback: Callable[[], Program] | None,
    ) -> PartOutputs:  # fmt: skip
        """Run what was staged: here, or on a stream beside."""
        adapter, started, run, count = self.adapter, self._started, self._part_run, live.num_wanted
        ready, beside = PartReady(None, started, self._behind), bool(launch.stream or self._beside)
        spread, self._spread, waits = self._spread, None, launch is self._waiting
        outputs = SpreadRows(count, ready) if waits else OutputRows(count, ready)
        try:
            if spread is not None:
                self._tell(spread, program)
            if isinstance(outputs, SpreadRows):
                repeats = run.repeats(outputs, program, live, launch.repeat, sampled, launch.key, fallback)
                self._spread = SpreadRepeats(adapter, repeats, outputs, ready, launch)
            elif beside:
                stream = self._stream(launch.stream)
                adapter.submit(stream, partial(
                    run.run_beside, outputs, program, live, launch.repeat, sampled, launch.key, fallback, started,
                    self.late_failure,
                ))  # fmt: skip
                ready.event = adapter.event(stream)
                self._unfinished.append(ready.event)
            else:
                run.run(outputs, program, live, launch.repeat, sampled, launch.key)
                ready.event = adapter.event()
            if spread is not None:
                calls = spread.end(self.late_failure)
                if calls and ready.error is None and outputs.failed_key is None:
                    self._num_calls = calls
        except Exception as error:
            raise_lost(adapter, error)
            raise
        self._ready.append(ready)
        found: Sequence[Any] = outputs if count else ()
        if launch.rows is Rows.PREFILL:
            part = PartOutputs(found, (), SampledTokens(outputs, 0, range(count)) if count else ())
        else:
            part = PartOutputs(found, *sampled_of(outputs, count, rows, launch.repeat))
        return _BesideOutputs.of(part, outputs) if beside or waits else part

    def _tell(self, spread: SpreadRepeats, program: Program) -> None:
        """Let repeats that wait hear how far this launch is; else begin them and count for the next."""
        num_calls: int = getattr(program, "num_calls", self._num_calls)
        if not num_calls or not hasattr(program, "before_calls"):
            spread.begin_all()
        if hasattr(program, "before_calls"):
            program.before_calls = partial(spread.before_call, num_calls or 1)

    def _stream(self, number: int) -> Any:
        stream = self._streams.get(number)
        if stream is None:
            # Decodes wait for nobody: their stream goes first where the device can.
            stream = self._streams[number] = self.adapter.new_stream(priority=0 if number else 1)
        return stream

    def ready(self, decision: Decision, numbers: BatchNumbers) -> Sequence[ReadyEvent]:  # noqa: ARG002 - measured here
        return self._ready

    # The end

    def trim(self) -> None:
        """Let the device have what captures warmed up with, where its library keeps it for later."""
        trim(self.adapter)

    def _drain(self) -> None:
        """`_settle`, for who gives memory back: nobody waits for what a lost device still had."""
        try:
            self._settle()
        except Exception as error:
            if not self.adapter.classify(error).sticky:
                raise

    def release(self, pool: LauncherPool) -> None:
        self._drain()
        del pool.buffers, pool.breaks
        self.adapter.release(pool.memory)

    def close(self) -> None:
        """Give back the buffers of eager launches and the streams; a later launch makes them anew."""
        self._drain()
        self._ready, self._spread, self._waiting = [], None, None
        self._places = {}
        self._eager.clear()
        # Optional for an adapter: a stream that nobody needs any more.
        give_back: Callable[[Any], None] = getattr(self.adapter, "give_back", _unheard)
        for stream in self._streams.values():
            give_back(stream)
        self._streams.clear()
        # Optional for a model: what it keeps for steps to come.
        getattr(self.model, "give_back", int)()


class _BesideOutputs(PartOutputs):
    """Outputs of a launch on a stream beside."""

    _rows: OutputRows | None = None

    @classmethod
    def of(cls, part: PartOutputs, rows: OutputRows) -> PartOutputs:
        beside = cls(*part)
        beside._rows = rows
        return beside

    @property
    def runs_behind(self) -> bool:
        return True

    @property
    def failed_key(self) -> GraphKey | None:
        return None if self._rows is None else self._rows.failed_key


def _check_inputs(handle: FullGraph | PieceGraph) -> None:
    """Look whether static inputs are those that the graph reads.

    Raises:
        GraphReplayError: one was swapped for another tensor: it would be staged, and the graph read the old one.
    """
    held, buffers = handle.held, handle.buffers
    named = {name: getattr(held, name) for name in _CHECKED}
    for name, then in {**named, **held.extra}.items():
        now = buffers.extra[name] if name in held.extra else getattr(buffers, name)
        if now.data_ptr() != then.data_ptr():
            raise GraphReplayError(
                handle.key,
                f"static input {name} is now at {now.data_ptr():#x}; {handle.key} was captured with it at "
                f"{then.data_ptr():#x}. Copy into the tensor that is there, or capture again.",
                Reason.ADDRESS_CHANGED,
            )


def _unheard(key: Any) -> None:
    del key


def _power(size: int) -> int:
    """The least power of two that is at least that, and at least 16: buffers that grow, grow seldom."""
    return max(16, 1 << (size - 1).bit_length())
