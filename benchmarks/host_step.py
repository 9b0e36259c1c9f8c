"""What the host does in `Engine.step`: a CUDA adapter whose device takes no time, so that nothing else is left.

Graphs are empty, points on streams pass at once, and static inputs are in the host's memory; deciding, staging,
launching, events and counting are what runs on a GPU. A bare step stages the same numbers by the same calls, replays
the same graph, copies the logits out and samples; ``copies_replay`` leaves the last two out. Processor time of this
thread, in turn, the least of several blocks; the same with caches that hold something else, as a step finds them in a
serving engine: 40 MB are written before each, and the lower quartile is taken, as other processes add to it; and calls
a step, of Python functions and of built-in ones, which don't depend on the machine.

Run: ``python -m benchmarks.host_step --date D --json FILE [--sizes 1 64] [--policy full] [--profile]``.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import platform
import pstats
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar
from unittest import mock

import torch

from benchmarks.command import command_line, output_file
from benchmarks.engine_step import decode_inputs
from kpolicy.attention import parse_attention
from kpolicy.engine import Engine
from kpolicy.executors.cuda import adapter as cuda
from kpolicy.executors.device import MemoryReport
from kpolicy.executors.launcher import GraphLauncher
from kpolicy.executors.runner import ModeRunner
from kpolicy.settings import Settings

VOCAB, NUM_BLOCKS, BLOCK_SIZE, MAX_NUM_REQS = 16, 8192, 16, 256
BLOCKS, STEPS = 12, 400
COLD_STEPS, COLD_BYTES = 300, 40 << 20


class Point:
    """What is read of `torch.cuda.Event`; counts what is asked of it."""

    asked: ClassVar[Counter[str]] = Counter()

    def __init__(self, enable_timing: bool = False) -> None:
        del enable_timing
        self.asked["made"] += 1

    def record(self, stream: Any) -> None:
        del stream
        self.asked["record"] += 1

    def query(self) -> bool:
        self.asked["query"] += 1
        return True

    def synchronize(self) -> None:
        self.asked["synchronize"] += 1

    def elapsed_time(self, later: Point) -> float:
        del later
        self.asked["elapsed_time"] += 1
        return 2.0


class _Empty:
    """A graph with nothing in it."""

    def replay(self) -> None:
        pass


class _Pool:
    def __init__(self) -> None:
        self.graphs: list[Any] = []


class NoDevice(cuda.CudaAdapter):
    """A CUDA adapter without its device."""

    def __init__(self) -> None:
        with mock.patch.object(cuda, "_device", torch.device):
            super().__init__("cpu")
        # A CUDA build of torch would look for a driver.
        self._raw_stream = int
        self._index = 0

    def session(self) -> AbstractContextManager[Any]:
        return cuda.inference()

    def alloc_inputs(self, specs: Sequence[tuple[Sequence[int], str, float]]) -> list[Any]:
        # Imported here: `benchmarks.gpu.overhead` also measures checkouts from before them, and needs none of this.
        from kpolicy.executors.cuda.events import Recorder
        from kpolicy.executors.cuda.staging import place_of

        buffers = super().alloc_inputs(specs)
        # Memory that isn't pinned is copied at once, so nobody notes when.
        for turn in place_of(buffers[0])[0].turns:
            turn.copied = Recorder(timed=False)
        return buffers

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        del stream
        return nullcontext()

    def memory(self) -> MemoryReport:
        return MemoryReport(0, 1 << 40)

    def new_stream(self, priority: int = 0) -> Any:
        return priority

    def current(self) -> Any:
        return 0

    def submit(self, stream: Any, work: Callable[[], None]) -> None:
        del stream
        work()

    def new_pool(self, priority: int = 0) -> Any:
        del priority
        return _Pool()

    @contextmanager
    def recording(self, pool: Any) -> Iterator[None]:
        del pool
        try:
            yield
        finally:
            self.abort()

    def begin(self, pool: Any) -> None:
        self._recording = pool

    def end(self) -> Any:
        self._recording = None
        return cuda.CudaGraph(_Empty(), 0, {})

    def abort(self) -> None:
        self._recording = None

    def weak(self, pool: Any, tensor: Any) -> Any:
        del pool
        return tensor

    def release(self, pool: Any) -> None:
        del pool

    def trim(self) -> None:
        pass


class NoModel:
    """A step model that computes next to nothing."""

    vocab, max_blocks, num_slots, pad_slot = VOCAB, 256, NUM_BLOCKS * BLOCK_SIZE, NUM_BLOCKS * BLOCK_SIZE
    num_blocks, block_size, max_num_reqs = NUM_BLOCKS, BLOCK_SIZE, MAX_NUM_REQS
    greedy_in_graphs = True

    def __init__(self) -> None:
        self.support = parse_attention("gqa")

    def forward(self, step: Any) -> Any:
        return torch.zeros(step.tensors.token_ids.shape[0], 8)

    def head(self, hidden: Any) -> Any:
        return torch.zeros(len(hidden), self.vocab)

    def sample(self, logits: Any, step: Any) -> Any:
        del step
        return logits.argmax(-1)

    def kv_caches(self) -> list[Any]:
        return []

    def release(self) -> None:
        pass


def opened(policy: str = "full", **arguments: Any) -> tuple[Any, Any]:
    """(an Engine with its graphs over no device, its model). `torch.cuda.Event` must be `Point` meanwhile."""
    model: Any = NoModel()
    adapter = NoDevice()
    executor: Any = ModeRunner(GraphLauncher(adapter, model, max_num_reqs=MAX_NUM_REQS))
    executor.adapter, executor.model = adapter, model
    engine = Engine(
        policy, executor=executor, attention=model.support, calibrate=0, ladder=[1, 8, 64, MAX_NUM_REQS],
        settings=Settings(max_num_reqs=MAX_NUM_REQS, max_num_tokens=2048), **arguments,
    )  # fmt: skip
    engine.capture()
    return engine, model


def bare_step(engine: Any, model: Any, inputs: Any, *, outputs: bool = True) -> Callable[[], Any]:
    """Stage, copy, replay, copy out, sample: on the graph that the Engine replays, by the calls that it makes.

    Without ``outputs`` it ends with the replay.
    """
    key = engine.compiled.select(*inputs.numbers).launches[0].key
    handle, adapter = engine.registry.record(key).handle, engine.executor.adapter
    buffers, size, reqs = handle.buffers, key.num_tokens, handle.shape.num_reqs
    graph, logits = handle._graph.graph, handle._logits[: len(inputs.token_ids)]
    pad = model.pad_slot

    def step() -> Any:
        with adapter.session():
            adapter.stage_all([
                (buffers.token_ids, inputs.token_ids, size, 0), (buffers.positions, inputs.positions, size, 0),
                (buffers.slot_mapping, inputs.slot_mapping, size, pad),
                (buffers.block_table, inputs.block_table, reqs, 0), (buffers.kv_lens, inputs.kv_lens, reqs, 0),
            ])  # fmt: skip
            adapter.commit()
            graph.replay()
            return (logits.clone(), model.sample(logits, {})) if outputs else None

    return step


def calls_of(step: Callable[[], Any]) -> dict[str, int]:
    """Calls that a step makes: of Python functions, and of built-in ones."""
    counts: Counter[str] = Counter()

    def note(_frame: Any, event: str, _argument: Any) -> None:
        counts[event] += 1

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    # Less the step's own and the one that ends the count.
    return {"python": counts["call"] - 1, "built_in": counts["c_call"] - 1}


def cold_us(runs: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """Microseconds of each with none of its memory in the processor's caches: lower quartiles."""
    others, found = torch.zeros(COLD_BYTES, dtype=torch.uint8), {name: list[float]() for name in runs}
    for i in range(COLD_STEPS):
        for name in sorted(runs, reverse=bool(i % 2)):
            others.add_(1)
            start = time.perf_counter()
            kept = runs[name]()
            found[name].append((time.perf_counter() - start) * 1e6)
            del kept
    return {name: round(sorted(us)[COLD_STEPS // 4], 1) for name, us in found.items()}


def measure(engine: Any, model: Any, num_reqs: int) -> dict[str, Any]:
    """One decode size: microseconds and calls of both."""
    inputs = decode_inputs(num_reqs, model.num_blocks)
    runs = {
        "engine_step": lambda: engine.step(inputs), "bare_step": bare_step(engine, model, inputs),
        "copies_replay": bare_step(engine, model, inputs, outputs=False),
    }  # fmt: skip
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(BLOCKS + 1):
        for name, run in runs.items():
            start = time.thread_time()
            for _ in range(STEPS):
                run()
            best[name] = min(best[name], (time.thread_time() - start) / STEPS * 1e6)
    us, cold = {name: round(each, 1) for name, each in best.items()}, cold_us(runs)
    return {
        "num_reqs": num_reqs, "us": us, "beyond_us": round(best["engine_step"] - best["bare_step"], 1),
        "beyond_copies_replay_us": round(best["engine_step"] - best["copies_replay"], 1),
        "cold_us": cold, "cold_beyond_us": round(cold["engine_step"] - cold["bare_step"], 1),
        "cold_beyond_copies_replay_us": round(cold["engine_step"] - cold["copies_replay"], 1),
        "ratio": round(best["engine_step"] / best["bare_step"], 3),
        "calls": {name: calls_of(run) for name, run in runs.items()},
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--date", default="unstated", help="written into the result")
    parser.add_argument("--json", type=output_file, help="where the result is written; printed only without it")
    parser.add_argument("--sizes", type=int, nargs="*", default=[1, 8, 64, 256], help="decode rows of a step")
    parser.add_argument("--policy", default="full", help="the policy that decides")
    parser.add_argument("--profile", action="store_true", help="where the host's time goes, at the first size")
    options = parser.parse_args(argv)

    import kpolicy

    torch.set_num_threads(1)
    with mock.patch.object(torch.cuda, "Event", Point):
        engine, model = opened(options.policy)
        rows = []
        for size in options.sizes:
            rows.append(measure(engine, model, size))
            print(rows[-1], flush=True)
        if options.profile:
            inputs = decode_inputs(options.sizes[0], model.num_blocks)
            profiler = cProfile.Profile()
            profiler.enable()
            for _ in range(5000):
                engine.step(inputs)
            profiler.disable()
            pstats.Stats(profiler, stream=sys.stdout).sort_stats("tottime").print_stats(40)
    result = {
        "command": command_line("benchmarks.host_step", argv), "date": options.date,
        "versions": {
            "kpolicy": kpolicy.__version__, "torch": str(torch.__version__), "python": platform.python_version()
        },
        "machine": platform.machine(), "rows": rows,
    }  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
