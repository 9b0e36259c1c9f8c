"""`Engine.step` in FULL on a GPU against a bare replay of the same graph with the same copies.

A bare step stages the same numbers into the same static inputs by the same calls, brings them over in the same copy,
replays, copies the logits out and samples. Both in turn in one process, to a synchronisation: the ratio is of pairs of
wall times. Host time is until the call returns; what `Engine.step` takes beyond a bare step is ours. `parts_us` is the
host time of what both are made of, each alone after a synchronisation.

Run: ``python -m benchmarks.gpu.overhead --config FILE --date D --json FILE [--sizes 1 8 64]``.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.command import command_line
from benchmarks.engine_step import decode_inputs
from benchmarks.host_step import bare_step
from benchmarks.pairs import interval

LIMIT, HOST_LIMIT_US = 1.05, 30.0


def parts_of(engine: Any, model: Any, inputs: Any, count: int = 100) -> dict[str, float]:
    """Host microseconds of single things after a synchronisation, as a step finds the processor's caches: medians."""
    import torch

    key = engine.compiled.select(*inputs.numbers).launches[0].key
    handle, adapter = engine.registry.record(key).handle, engine.executor.adapter
    logits, numbers = handle._logits[: len(inputs.token_ids)], inputs.numbers
    points = [adapter.event() for _ in range(3)]
    torch.cuda.synchronize()

    def session() -> None:
        with adapter.session():
            pass

    def stage() -> None:
        handle.buffers.stage(inputs, handle.shape, False)

    parts: dict[str, Callable[[], Any]] = {
        "graph.replay": handle._graph.graph.replay, "stage": stage, "commit": adapter.commit, "session": session,
        "clone": logits.clone, "sample": lambda: model.sample(logits, {}), "event": adapter.event,
        "query": points[0].done, "elapsed_time": lambda: points[1].us_since(points[0]),
        "select": lambda: engine.compiled.select(*numbers),
        "executor.run": lambda: engine.executor.run(engine.compiled.select(*numbers), inputs),
    }  # fmt: skip
    found: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(count):
        kept = []
        for name, part in parts.items():
            if name != "commit":
                # Somebody else's work in between, as a serving engine has it: a synchronisation.
                torch.cuda.synchronize()
            start = time.perf_counter()
            kept.append(part())
            found[name].append((time.perf_counter() - start) * 1e6)
    return {name: round(statistics.median(each), 1) for name, each in found.items()}


def measure(engine: Any, model: Any, num_reqs: int, pairs: int) -> dict[str, Any]:
    """One decode size: wall and host microseconds of both, and the ratio of pairs."""
    import torch

    inputs = decode_inputs(num_reqs, model.num_blocks)
    runs = {"engine_step": lambda: engine.step(inputs), "bare_step": bare_step(engine, model, inputs)}
    wall: dict[str, list[float]] = {name: [] for name in runs}
    host: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(pairs + 20):
        for name in sorted(runs, reverse=bool(i % 2)):
            torch.cuda.synchronize()
            start = time.perf_counter()
            kept = runs[name]()
            launched = time.perf_counter()
            torch.cuda.synchronize()
            if i >= 20:
                wall[name].append((time.perf_counter() - start) * 1e6)
                host[name].append((launched - start) * 1e6)
            del kept
    ratios = [a / b for a, b in zip(wall["engine_step"], wall["bare_step"], strict=True)]
    ratio, low, high = interval(ratios)
    beyond = [a - b for a, b in zip(host["engine_step"], host["bare_step"], strict=True)]
    return {
        "num_reqs": num_reqs,
        **{f"{name}_us": round(statistics.median(times), 1) for name, times in wall.items()},
        **{f"{name}_host_us": round(statistics.median(times), 1) for name, times in host.items()},
        "host_beyond_us": round(statistics.median(beyond), 1),
        "ratio": round(ratio, 4), "interval": [round(low, 4), round(high, 4)],
        "parts_us": parts_of(engine, model, inputs),
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--sizes", type=int, nargs="*", default=[1, 8, 64, 256])
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--date", default="unstated")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args(argv)

    import torch
    import transformers

    import kpolicy
    from kpolicy.engine import Engine
    from kpolicy.serving.load import load
    from kpolicy.settings import Settings

    config = json.loads(options.config.read_text())
    model = load(
        config, device="cuda", dtype=torch.bfloat16, num_blocks=8192, block_size=16, max_model_len=4096,
        max_num_reqs=max(options.sizes),
    )  # fmt: skip
    settings = Settings(max_num_reqs=max(options.sizes), max_num_tokens=2048)
    engine = Engine("full", model=model, device="cuda", ladder=sorted(options.sizes), settings=settings)
    engine.capture()
    rows = []
    for size in options.sizes:
        rows.append(measure(engine, model, size, options.pairs))
        print(rows[-1], flush=True)
    result = {
        "command": command_line("benchmarks.gpu.overhead", argv),
        "date": options.date, "device": torch.cuda.get_device_name(), "model": repr(model), "limit": LIMIT,
        "host_limit_us": HOST_LIMIT_US,
        "versions": {
            "kpolicy": kpolicy.__version__, "torch": str(torch.__version__), "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "rows": rows,
    }  # fmt: skip
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
