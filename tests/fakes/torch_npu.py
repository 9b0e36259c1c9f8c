# ruff: noqa: ARG002, ARG005 - arguments are those of the vendor's signatures
"""`torch_npu` over a `Device` and tensors on the CPU, with the names and signatures of torch_npu 2.13.

`tests/executors_ascend/test_signatures.py` holds each name here to the signatures that were recorded from the wheel.
Operators are recorded by the CPU adapter's recorder, cut wherever the graph has a node of its own.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from kpolicy.executors.cpu.arena import Arena
from kpolicy.executors.cpu.recorder import Recorder
from tests.fakes.device import Command, Device

NO_STREAMS = (
    "NPU function error: aclmdlRICaptureBegin, error code is 207008\n[ERROR] Stream resources are insufficient.\n"
    "        Check whether the number of streams meets the requirements"
)
OLD_DRIVER = (
    "NPU function error: capture_begin, error code is 207005\nrtModelCreate: Alloc sq cq fail, not enough space"
)


HANDLED = frozenset({
    "npu_fused_infer_attention_score.out", "npu_fused_infer_attention_score_v2.out", "_npu_paged_attention.default",
    "npu_multi_head_latent_attention.out",
})  # fmt: skip
"""Operators that `NPUGraph.update` has handlers for, in `torch_npu/npu/_npugraph_handlers`"""


class _Record(NamedTuple):
    """One operator that a dispatcher saw."""

    event: Any
    handle: Any
    kwargs: dict[str, Any]


class _Dispatcher:
    """What sees operators while a graph is captured with ``auto_dispatch_capture``."""

    def __init__(self, update_stream: Any) -> None:
        self.update_stream = update_stream
        self.graph_dispatch_records: list[_Record] = []
        self.entered = False

    def __enter__(self) -> Any:
        assert not self.entered
        self.entered = True
        return self

    def __exit__(self, *error: object) -> None:
        self.entered = False


class Task:
    """An operator of a graph that reads arguments on the host."""

    def __init__(self, run: Callable[[Any], None] | None, name: str) -> None:
        self.run = run
        self.name = name


class _Capture:
    """What one graph has recorded so far."""

    def __init__(self, graph: Any, stream: int, arena: Arena) -> None:
        self.graph = graph
        self.stream = stream
        self.arena = arena
        self.nodes: list[Command] = []
        self.segments: list[Any] = []
        self.recorder: Recorder | None = None
        self.group: Task | None = None
        self.in_group = False

    def resume(self) -> None:
        self.recorder = Recorder(self.arena)
        self.recorder.begin()

    def cut(self) -> None:
        recorder, self.recorder = self.recorder, None
        assert recorder is not None
        segment = recorder.end()
        self.segments.append(segment)
        if segment.num_operators:
            self.nodes.append(Command("work", segment.replay))

    def node(self, *commands: Command) -> None:
        self.cut()
        self.nodes.extend(commands)
        self.resume()


def fake_torch_npu(
    device: Device | None = None, *, records: bool = True, total_bytes: int = 64 << 30, soc: str = "Ascend910_9392",
    versions: dict[str, str] | None = None, per_graph: Callable[[], int] = lambda: 1, error: str = NO_STREAMS,
) -> Any:  # fmt: skip
    """A module like `torch_npu`.

    Args:
        device: the device; one with streams without end by default.
        records: whether operators of torch are recorded; without, graphs have host tasks alone.
        total_bytes: its memory.
        soc: its name.
        versions: by module, as `get_cann_version` gives them.
        per_graph: streams that the next graph takes.
        error: what a capture says where streams have run out.
    """
    chip = Device() if device is None else device
    chip.around = torch.inference_mode
    arenas: dict[int, Arena] = {}
    state = SimpleNamespace(current=None, capture=None, numbers=0, handles=0, updating=None)

    class Stream:
        def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
            state.numbers += 1
            self.number = state.numbers
            self.priority = priority

        def wait_event(self, event: Any) -> None:
            event.wait(self)

        def wait_stream(self, stream: Any) -> None:
            self.wait_event(stream.record_event())

        def record_event(self, event: Any = None) -> Any:
            event = Event() if event is None else event
            event.record(self)
            return event

        def query(self) -> bool:
            if not chip.runs:
                chip.drain(self.number)  # who asks until it is done waits
            return not list(chip.waiting(self.number))

        def synchronize(self) -> None:
            _outside_capture("aclrtSynchronizeStream")
            chip.drain(self.number)

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Stream) and other.number == self.number

        def __hash__(self) -> int:
            return hash(self.number)

    def _put(stream: Any, command: Command) -> None:
        capture = state.capture
        if capture is not None and stream.number == capture.stream:
            capture.node(command)
        else:
            chip.put(stream.number, command)

    def _outside_capture(name: str) -> None:
        if state.capture is not None:
            raise RuntimeError(f"{name} failed, error code is 107030")

    class Event:
        def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
            self.last = 0
            self.stream: Any = None
            self.enable_timing = enable_timing

        def record(self, stream: Any = None) -> None:
            self.stream = state.current if stream is None else stream
            self.last = chip.serial()
            _put(self.stream, Command("record", self, self.last))

        def wait(self, stream: Any = None) -> None:
            if self.last:
                _put(state.current if stream is None else stream, Command("wait", self, self.last))

        def query(self) -> bool:
            return not self.last or chip.state.serials.get(self, 0) >= self.last

        def synchronize(self) -> None:
            _outside_capture("aclrtSynchronizeEvent")
            if self.last and not self.query():
                chip.drain(self.stream.number)

        def elapsed_time(self, end_event: Any) -> float:
            assert self.enable_timing
            assert end_event.enable_timing
            return float(end_event.last - self.last)

    class ExternalEvent:
        def record(self, stream: Any = None) -> None:
            _put(state.current if stream is None else stream, Command("raise", self))

        def wait(self, stream: Any = None) -> None:
            _put(state.current if stream is None else stream, Command("block", self))

        def reset(self, stream: Any = None) -> None:
            _put(state.current if stream is None else stream, Command("lower", self))

    class NPUGraph:
        def __init__(self) -> None:
            self.graph_dispatch_mode = _Dispatcher(_library_stream())
            self.auto_dispatch_capture = False
            self._capture: _Capture | None = None
            self._streams = 0
            self._pool = 0

        def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
            if state.capture is not None or capture_error_mode not in ("global", "thread_local", "relaxed"):
                raise RuntimeError("aclmdlRICaptureBegin failed, error code is 107029")
            asked = per_graph()
            if chip.streams is not None and chip.taken + asked > chip.streams:
                raise RuntimeError(error)
            chip.taken += asked
            self._streams, self._pool = asked, pool or graph_pool_handle()
            arena = arenas.setdefault(self._pool, Arena())
            state.capture = self._capture = _Capture(self, state.current.number, arena)
            if records:
                self._capture.resume()
            else:
                self._capture.cut = self._capture.resume = lambda: None  # type: ignore[method-assign]

        def capture_end(self) -> None:
            capture, state.capture = state.capture, None
            if capture is None or capture is not self._capture:
                raise RuntimeError("aclmdlRICaptureEnd failed, error code is 107024")
            capture.cut()

        def replay(self) -> None:
            assert self._capture is not None, "a graph that holds nothing was replayed"
            chip.replays += 1
            for command in self._capture.nodes:
                chip.put(
                    state.current.number, command._replace(value=chip.replays) if command.kind == "task" else command
                )

        def reset(self) -> None:
            capture, self._capture = self._capture, None
            chip.taken -= self._streams
            self._streams = 0
            if capture is not None and capture.recorder is not None:
                capture.recorder.abort()
            for segment in [] if capture is None else capture.segments:
                segment.release()

        def pool(self) -> Any:
            return self._pool

        def update(self, cpu_update_input: Any) -> None:
            if not self.auto_dispatch_capture:
                raise RuntimeError("The current graph configuration does not support update")
            mode = self.graph_dispatch_mode
            inputs = list(cpu_update_input)
            if len(inputs) == 1:
                inputs *= len(mode.graph_dispatch_records)
            if len(inputs) != len(mode.graph_dispatch_records):
                raise RuntimeError(f"there are only {len(inputs)} elements in the incoming cpu_update_input list")
            with stream(mode.update_stream):
                for (event, handle, arguments), given in zip(mode.graph_dispatch_records, inputs, strict=True):
                    graph_task_update_begin(mode.update_stream, handle)
                    arguments.update({name: given[name] for name in given if name in arguments})
                    chip.put(mode.update_stream.number, Command("update", handle, dict(arguments)))
                    graph_task_update_end(mode.update_stream)
                    event.record(mode.update_stream)

    class graph:  # noqa: N801 - torch_npu's own name
        default_capture_stream: Any = None

        def __init__(
            self, npu_graph: Any, pool: Any = None, stream: Any = None, auto_dispatch_capture: bool = False,
            capture_error_mode: str = "global",
        ) -> None:  # fmt: skip
            self.npu_graph, self.pool, self.mode = npu_graph, pool, capture_error_mode
            self.stream_ctx = npu_stream(stream or Stream())
            npu_graph.auto_dispatch_capture = auto_dispatch_capture

        def __enter__(self) -> None:
            synchronize()
            self.stream_ctx.__enter__()
            if self.npu_graph.auto_dispatch_capture:
                self.npu_graph.graph_dispatch_mode.__enter__()
            self.npu_graph.capture_begin(self.pool, capture_error_mode=self.mode)

        def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
            self.npu_graph.capture_end()
            if self.npu_graph.auto_dispatch_capture:
                self.npu_graph.graph_dispatch_mode.__exit__(exc_type, exc_value, traceback)
            self.stream_ctx.__exit__(exc_type, exc_value, traceback)

    def _library_stream() -> Any:
        if state.handles == 0:
            state.handles, state.own_stream = 1, Stream()
        return state.own_stream

    @contextlib.contextmanager
    def stream(stream: Any) -> Iterator[None]:
        before, state.current = state.current, stream
        try:
            yield
        finally:
            state.current = before

    npu_stream = stream

    def current_stream(device: Any = None) -> Any:
        return state.current

    def graph_pool_handle() -> Any:
        state.numbers += 1
        return state.numbers

    def graph_task_group_begin(stream: Any) -> None:
        assert state.capture is not None, "a task group outside a capture"
        assert stream.number == state.capture.stream, "a task group on another stream than the capture's"
        state.capture.in_group = True

    def graph_task_group_end(stream: Any) -> Any:
        capture = state.capture
        capture.in_group, task = False, capture.group
        capture.group = None
        return task

    def graph_task_update_begin(stream: Any, handle: Any) -> None:
        if state.updating is not None or not isinstance(handle, Task):
            raise RuntimeError("aclmdlRICaptureTaskUpdateBegin failed, error code is 107003")
        state.updating = handle, stream.number

    def graph_task_update_end(stream: Any) -> None:
        if state.updating is None or state.updating[1] != stream.number:
            raise RuntimeError("aclmdlRICaptureTaskUpdateEnd failed, error code is 107003")
        state.updating = None

    def launch(name: str, run: Callable[[Any], None] | None, arguments: dict[str, Any]) -> None:
        """Launch an operator that reads those arguments on the host."""
        capture = state.capture
        if state.updating is not None and state.updating[1] == state.current.number:
            # The workspace and outputs are those of the capture; only arguments change.
            chip.put(state.current.number, Command("update", state.updating[0], dict(arguments)))
            return
        # On another stream than the update's an operator is work like any other, and the task keeps its arguments.
        if capture is None:
            if run is not None:
                chip.put(state.current.number, Command("work", lambda: run(arguments)))
            return
        automatic = capture.graph.graph_dispatch_mode.entered and name in HANDLED
        event = ExternalEvent()
        if automatic:
            event.wait(state.current)
            event.reset(state.current)
        task = Task(run, name)
        chip.state.arguments[task] = dict(arguments)
        if capture.in_group:
            capture.group = task
        capture.cut()
        if run is not None:
            run(arguments)
        capture.nodes.append(Command("task", task))
        capture.resume()
        if automatic:
            capture.graph.graph_dispatch_mode.graph_dispatch_records.append(_Record(event, task, dict(arguments)))

    def synchronize(device: Any = None) -> None:
        _outside_capture("aclrtSynchronizeDevice")
        chip.drain()

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        return total_bytes - sum(arena.num_bytes for arena in arenas.values()), total_bytes

    state.current = Stream()
    found = {"CANN": "8.5.0", "DRIVER": "25.5.1"} | (versions or {})
    npu = SimpleNamespace(
        Stream=Stream, Event=Event, ExternalEvent=ExternalEvent, NPUGraph=NPUGraph, graph=graph, stream=stream,
        current_stream=current_stream, graph_pool_handle=graph_pool_handle, synchronize=synchronize,
        graph_task_group_begin=graph_task_group_begin, graph_task_group_end=graph_task_group_end,
        graph_task_update_begin=graph_task_update_begin, graph_task_update_end=graph_task_update_end,
        mem_get_info=mem_get_info, empty_cache=lambda: None, is_available=lambda: True, device_count=lambda: 1,
        current_device=lambda: 0, get_device_name=lambda device_name=None: soc,
        utils=SimpleNamespace(get_cann_version=lambda module="CANN": found.get(module, "")),
    )  # fmt: skip
    return SimpleNamespace(
        npu=npu, __version__="2.13.0", _C=SimpleNamespace(), launch=launch, chip=chip, state=state,
        **_operators(launch, state),
    )  # fmt: skip


class _Overloads:
    """An operator with its overloads."""

    def __init__(self, default: Callable[..., Any], out: Callable[..., Any]) -> None:
        self.default = default
        self.out = out

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.default(*args, **kwargs)


def _operators(launch: Callable[..., None], state: Any) -> dict[str, Any]:
    def fused_out(
        query: Any, key: Any, value: Any, *, atten_mask: Any = None, actual_seq_lengths: Any = None,
        actual_seq_lengths_kv: Any = None, block_table: Any = None, num_heads: int = 1, scale: float = 1.0,
        pre_tokens: int = 2147483647, next_tokens: int = 2147483647, input_layout: str = "BSH",
        num_key_value_heads: int = 0, sparse_mode: int = 0, block_size: int = 0, softmax_lse_flag: bool = False,
        workspace: Any = None, out: Any = None,
    ) -> Any:  # fmt: skip
        assert workspace is not None or state.capture is None, "a captured operator allocates its workspace"

        def run(arguments: Any) -> None:
            _fused(
                query, key, value, block_table, out[0], arguments["actual_seq_lengths"],
                arguments["actual_seq_lengths_kv"], num_heads, scale, input_layout, num_key_value_heads, sparse_mode,
                pre_tokens, block_size, atten_mask,
            )  # fmt: skip

        launch(
            "npu_fused_infer_attention_score.out", run,
            {"actual_seq_lengths": list(actual_seq_lengths), "actual_seq_lengths_kv": list(actual_seq_lengths_kv)},
        )  # fmt: skip
        return out

    def fused(query: Any, key: Any, value: Any, **kwargs: Any) -> Any:
        out = [torch.empty_like(query), query.new_empty(1)]
        fused_out(query, key, value, out=out, workspace=torch.empty(0), **kwargs)
        return tuple(out)

    def latent_out(
        query: Any, key_cache: Any, num_kv_heads: int, num_heads: int, scale_value: float, block_table: Any,
        context_lens: Any, mla_vheadsize: int, out: Any,
    ) -> None:  # fmt: skip
        assert context_lens.device.type == "cpu"

        def run(arguments: Any) -> None:
            _latent(query, key_cache, block_table, arguments["context_lens"], scale_value, mla_vheadsize, out)

        if state.capture is not None:
            state.capture.cut()  # what the device's operator reads on the host is none of the recorder's business
        lens = context_lens.tolist()
        if state.capture is not None:
            state.capture.resume()
        launch("_npu_paged_attention_mla", run, {"context_lens": lens})

    def workspace(query: Any, *args: Any, **kwargs: Any) -> Any:
        assert state.updating is None, "a workspace was asked for inside an update"
        return torch.empty(16)

    return {
        "npu_fused_infer_attention_score": _Overloads(fused, fused_out),
        "_npu_fused_infer_attention_score_get_max_workspace": workspace,
        "_npu_paged_attention_mla": latent_out,
    }


def _fused(
    query: Any, key: Any, value: Any, table: Any, out: Any, ends: list[int], kv_lens: list[int], num_heads: int,
    scale: float, layout: str, num_kv_heads: int, sparse_mode: int, pre_tokens: int, block_size: int, mask: Any,
) -> None:  # fmt: skip
    """Fused attention over pages, row by row, with the limits that its documents name."""
    assert layout == "TND"
    assert sparse_mode in (3, 4)
    assert mask is not None
    assert tuple(mask.shape) == (2048, 2048)
    assert key.is_contiguous()
    assert key.dim() == 3, "pages are [blocks, block_size, heads * dim]"
    assert len(ends) == len(kv_lens) == len(table), f"{len(ends)} rows, {len(kv_lens)} KV lengths, {len(table)} tables"
    assert ends[-1] == len(query), f"the last sum {ends[-1]} isn't the {len(query)} tokens"
    begin = 0
    for row, (end, kv_len) in enumerate(zip(ends, kv_lens, strict=True)):
        count, start = end - begin, begin
        begin = end
        if not count:
            continue
        assert count <= kv_len, f"row {row}: {count} queries over {kv_len} KV tokens under a causal mask"
        assert math.ceil(kv_len / block_size) <= table.shape[1], f"row {row}: {kv_len} tokens don't fit its table"
        pages = table[row, : math.ceil(kv_len / block_size)].long()
        k, v = (each[pages].flatten(0, 1)[:kv_len].view(kv_len, num_kv_heads, -1) for each in (key, value))
        share = num_heads // num_kv_heads
        q = query[start:end].view(count, num_kv_heads, share, -1).permute(1, 2, 0, 3)
        at = torch.arange(kv_len - count, kv_len)[:, None] - torch.arange(kv_len)[None]
        seen = (at >= 0) if sparse_mode == 3 else (at >= 0) & (at <= pre_tokens)
        scores = (q @ k.permute(1, 2, 0)[:, None] * scale).masked_fill(~seen, float("-inf"))
        result = scores.softmax(-1) @ v.transpose(0, 1)[:, None]
        out[start:end] = result.permute(2, 0, 1, 3).reshape(count, num_heads, -1)


def _latent(query: Any, cache: Any, table: Any, lens: list[int], scale: float, value_dim: int, out: Any) -> None:
    """Attention of single tokens over latents."""
    assert len(lens) == len(query) == len(table)
    block_size = cache.shape[1]
    out.zero_()
    for row, length in enumerate(lens):
        if length:
            pages = table[row, : math.ceil(length / block_size)].long()
            latents = cache[pages].flatten(0, 1)[:length].reshape(length, -1)
            out[row] = ((query[row] @ latents.T) * scale).softmax(-1) @ latents[:, :value_dim]
