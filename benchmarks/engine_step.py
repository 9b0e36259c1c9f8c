"""`Engine.step` in FULL on the CPU against a bare step of the same recording with the same copies.

A bare step stages the same numbers into the same static buffers, replays the same graph, copies the logits out and
samples from them: what any runner of this graph must do. The rest of `Engine.step` is ours: deciding, finding the
graph, outputs, events, counting. Both run in one process in pairs (`benchmarks.pairs`); the ratio is the median of the
pairs', with a bootstrap interval, of wall time and of this thread's processor time, which other processes disturb less.
The limit is 1.05.

Run: ``python -m benchmarks.engine_step --date 2026-01-01 [--json FILE] [--profile]``.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import platform
import pstats
import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.command import output_file
from benchmarks.pairs import HALF_WIDTH, measure_pairs

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


def measure(engine: Any, model: Any, num_reqs: int, least: int, most: int) -> dict[str, Any]:
    """One decode size."""
    inputs = decode_inputs(num_reqs, model.num_blocks)
    ours, bare = partial(engine.step, inputs), bare_step(engine, model, inputs)
    row = measure_pairs(("engine_step", ours), ("bare_replay", bare), least=least, most=most)
    return {"num_reqs": num_reqs, **row}


def main(argv: list[str] | None = None) -> int:
    """Measure, print, and say whether the limit holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--date", default="unstated", help="written into the result")
    parser.add_argument("--json", type=output_file, help="where the result is written; printed only without it")
    parser.add_argument("--least", type=int, default=300, help="pairs of a size, at least")
    parser.add_argument("--most", type=int, default=3000, help="pairs of a size, at most")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads")
    parser.add_argument("--sizes", type=int, nargs="*", default=list(SIZES), help="decode rows of a step")
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
        rows.append(measure(engine, model, size, options.least, options.most))
        print(rows[-1], flush=True)
    if options.profile:
        inputs = decode_inputs(options.sizes[-1], model.num_blocks)
        profiler = cProfile.Profile()
        profiler.enable()
        for _ in range(options.least):
            engine.step(inputs)
        profiler.disable()
        pstats.Stats(profiler, stream=sys.stdout).sort_stats("tottime").print_stats(22)
    holds = all(row["interval"][1] <= LIMIT for row in rows)
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
        "wanted_half_width": HALF_WIDTH,
        "holds": holds,
        "rows": rows,
    }  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    print("holds" if holds else "DOES NOT HOLD", f"(limit {LIMIT})")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
