"""`Engine.step` in FULL on the CPU against a bare replay of the same recording with the same copies.

A bare step stages the same numbers into the same static buffers, replays the same graph, copies the logits out and
samples from them: what any runner of this graph must do. The rest of `Engine.step` is ours: deciding, finding the
graph, outputs, events, counting. Both run in one process, in turn, step by step; the ratio is of medians, with a
bootstrap interval, of wall time and of this thread's processor time, which other processes disturb less. The limit is
1.05.

Run: ``python -m benchmarks.engine_step --date 2026-01-01 [--json FILE] [--steps 300] [--profile]``.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import platform
import pstats
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIMIT = 1.05
SIZES = (1, 2, 4, 8, 16, 32, 64)
CONTEXT = 256
BLOCK_SIZE = 16


def decode_inputs(num_reqs: int, num_blocks: int) -> Any:
    """A decode step of so many rows at the benchmark's context, blocks in random order."""
    from kpolicy.executors.base import StepInputs
    from kpolicy.shapes import BatchShape

    rng = random.Random(num_reqs)
    blocks = rng.sample(range(num_blocks), num_reqs * (CONTEXT // BLOCK_SIZE + 1))
    tables = [blocks[row::num_reqs] for row in range(num_reqs)]
    slots = [table[CONTEXT // BLOCK_SIZE] * BLOCK_SIZE for table in tables]
    numbers = BatchShape.decode(num_reqs, num_reqs * (CONTEXT + 1)).numbers
    return StepInputs(
        numbers, [1] * num_reqs, [rng.randrange(4096) for _ in range(num_reqs)], [CONTEXT] * num_reqs, slots, tables,
        [CONTEXT + 1] * num_reqs, list(range(num_reqs)),
    )  # fmt: skip


def bare_step(engine: Any, model: Any, inputs: Any) -> Callable[[], Any]:
    """Stage, replay, copy out, sample: on the recording that the Engine replays."""
    from kpolicy.executors.buffers import PaddedShape

    key = engine.compiled.select(*inputs.numbers).launches[0].key
    handle, adapter = engine.registry.record(key).handle, engine.executor.adapter
    buffers, size = handle.buffers, key.num_tokens
    shape: PaddedShape = handle.shape
    pad, reqs, count = model.pad_slot, shape.num_reqs, len(inputs.token_ids)
    graph, logits = handle._graph, handle._logits[:count]
    stage = adapter.stage

    def step() -> Any:
        with adapter.session():
            stage(buffers.token_ids, inputs.token_ids, size, 0)
            stage(buffers.positions, inputs.positions, size, 0)
            stage(buffers.slot_mapping, inputs.slot_mapping, size, pad)
            stage(buffers.block_table, inputs.block_table, reqs, 0)
            stage(buffers.kv_lens, inputs.kv_lens, reqs, 0)
            graph.replay()
            return logits.clone(), model.sample(logits, {})

    return step


def interval(a: list[float], b: list[float], repeats: int = 400) -> tuple[float, float]:
    """95% bootstrap interval of the ratio of medians of pairs."""
    rng = random.Random(0)
    ratios = []
    for _ in range(repeats):
        chosen = rng.choices(range(len(a)), k=len(a))
        ratios.append(statistics.median([a[i] for i in chosen]) / statistics.median([b[i] for i in chosen]))
    ratios.sort()
    return ratios[int(0.025 * repeats)], ratios[int(0.975 * repeats)]


def measure(engine: Any, model: Any, num_reqs: int, steps: int) -> dict[str, Any]:
    """One decode size."""
    inputs = decode_inputs(num_reqs, model.num_blocks)
    runs = (lambda: engine.step(inputs), bare_step(engine, model, inputs))
    wall: tuple[list[float], list[float]] = [], []
    cpu: tuple[list[float], list[float]] = [], []
    for i in range(steps + 10):
        for which in (0, 1) if i % 2 else (1, 0):
            start, started = time.perf_counter_ns(), time.thread_time_ns()
            runs[which]()
            cpu[which].append((time.thread_time_ns() - started) / 1e3)
            wall[which].append((time.perf_counter_ns() - start) / 1e3)
    row: dict[str, Any] = {"num_reqs": num_reqs}
    for name, (ours, theirs) in (("", (wall[0][10:], wall[1][10:])), ("cpu_", (cpu[0][10:], cpu[1][10:]))):
        low, high = interval(ours, theirs)
        row |= {
            f"{name}engine_step_us": round(statistics.median(ours), 1),
            f"{name}bare_replay_us": round(statistics.median(theirs), 1),
            f"{name}ratio": round(statistics.median(ours) / statistics.median(theirs), 4),
            f"{name}interval": [round(low, 4), round(high, 4)],
        }
    return row


def main(argv: list[str] | None = None) -> int:
    """Measure, print, and say whether the limit holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--date", default="unstated")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sizes", type=int, nargs="*", default=list(SIZES))
    parser.add_argument("--profile", action="store_true", help="where the host's time goes, at the largest size")
    options = parser.parse_args(argv)

    import torch
    import transformers

    import kpolicy
    from kpolicy.engine import Engine
    from kpolicy.serving.default_model import load_default
    from kpolicy.settings import Settings

    torch.set_num_threads(options.threads)
    model = load_default(num_blocks=1280, block_size=BLOCK_SIZE, max_model_len=512, max_num_reqs=max(options.sizes))
    settings = Settings(max_num_reqs=max(options.sizes), max_num_tokens=max(512, *options.sizes))
    engine = Engine("full", model=model, ladder=sorted(options.sizes), settings=settings)
    engine.capture()
    rows = []
    for size in options.sizes:
        rows.append(measure(engine, model, size, options.steps))
        print(rows[-1], flush=True)
    if options.profile:
        inputs = decode_inputs(options.sizes[-1], model.num_blocks)
        profiler = cProfile.Profile()
        profiler.enable()
        for _ in range(options.steps):
            engine.step(inputs)
        profiler.disable()
        pstats.Stats(profiler, stream=sys.stdout).sort_stats("tottime").print_stats(22)
    holds = all(row["interval"][0] <= LIMIT for row in rows)
    result = {
        "command": "python -m benchmarks.engine_step " + " ".join(argv if argv is not None else sys.argv[1:]),
        "date": options.date,
        "versions": {
            "kpolicy": kpolicy.__version__, "torch": str(torch.__version__), "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "device": {"machine": platform.machine(), "cores": os.cpu_count(), "threads": options.threads},
        "model": f"default_model, {model.num_params} parameters, context {CONTEXT}",
        "limit": LIMIT,
        "holds": holds,
        "rows": rows,
    }  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    print("holds" if holds else "DOES NOT HOLD", f"(limit {LIMIT})")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
