"""`Engine.step` in FULL on a GPU against a bare replay of the same graph with the same copies.

A bare step stages the same numbers into the same static inputs by the same calls, brings them over in the same copy,
replays, copies the logits out and samples. Both in turn in one process, to a synchronisation: the ratio is of pairs of
wall times. Host time is until the call returns; what `Engine.step` takes beyond a bare step is ours, and
`replay_host_us` is what the one call that launches the graph takes. Sizes take turns pair by pair, so whatever else the
host does is spread over all of them. Medians, and `host_beyond_mean_us`: steps are counted several at a time, which
medians don't show.

`parts_us` is the host time of what both are made of, each alone after a synchronisation. `inside_us` is where the
host's time goes within a step: of each function, without the watched ones that it calls. Watching costs some tenths of
a microsecond a call.

Run: ``python -m benchmarks.gpu.overhead --config FILE --date D --json FILE [--sizes 1 8 64]``.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.command import command_line
from benchmarks.engine_step import decode_inputs
from benchmarks.host_step import bare_step
from benchmarks.pairs import interval
from kpolicy.executors.full_step import FullStep

LIMIT, HOST_LIMIT_US = 1.05, 30.0
WARM_UP = 20


def graph_of(engine: Any, inputs: Any) -> Any:
    """The captured graph that the Engine replays for the inputs."""
    key = engine.compiled.select(*inputs.numbers).launches[0].key
    return engine.registry.record(key).handle


def parts_of(engine: Any, model: Any, inputs: Any, count: int = 60) -> dict[str, float]:
    """Host microseconds of single things after a synchronisation, as a step finds the processor's caches: medians."""
    import torch

    handle, adapter = graph_of(engine, inputs), engine.executor.adapter
    logits, numbers = handle._logits[: len(inputs.token_ids)], inputs.numbers
    points = [adapter.event() for _ in range(3)]
    torch.cuda.synchronize()

    def session() -> None:
        with adapter.session():
            pass

    parts: dict[str, Callable[[], Any]] = {
        "graph.replay": handle._graph.graph.replay, "stage and copy": lambda: handle.buffers.stage(
            inputs, handle.shape, False
        ), "session": session,
        "clone": logits.clone, "sample": lambda: model.sample(logits, {}), "event": adapter.event,
        "query": points[0].done, "elapsed_time": lambda: points[1].us_since(points[0]),
        "select": lambda: engine.compiled.select(*numbers),
        "executor.run": lambda: engine.executor.run(engine.compiled.select(*numbers), inputs),
    }  # fmt: skip
    found: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(count):
        kept = []
        for name, part in parts.items():
            # Somebody else's work in between, as a serving engine has it: a synchronisation.
            torch.cuda.synchronize()
            start = time.perf_counter()
            kept.append(part())
            found[name].append((time.perf_counter() - start) * 1e6)
    return {name: round(statistics.median(each), 1) for name, each in found.items()}


class Watch:
    """Host time of functions without the watched ones that they call."""

    def __init__(self) -> None:
        self.us: dict[str, float] = defaultdict(float)
        self._inner = [0.0]

    def watched(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        clock, inner, us = time.perf_counter, self._inner, self.us

        def timed(*given: Any, **named: Any) -> Any:
            inner.append(0.0)
            start = clock()
            try:
                return call(*given, **named)
            finally:
                took = (clock() - start) * 1e6
                us[name] += took - inner.pop()
                inner[-1] += took

        return timed

    def take(self) -> dict[str, float]:
        """What was seen since the last time."""
        seen = dict(self.us)
        self.us.clear()
        return seen


def inside(engine: Any, model: Any, inputs: Any, count: int = 100) -> dict[str, dict[str, float]]:
    """Where the host's time goes within `Engine.step` and within a bare step: medians by function."""
    import torch

    watch, executor, handle = Watch(), engine.executor, graph_of(engine, inputs)
    launcher, adapter, compiled = executor.launcher, executor.adapter, engine.compiled
    places: Sequence[tuple[Any, str]] = [
        (engine, "_settle"), (executor, "run"), (launcher, "start"), (launcher, "ready"), (FullStep, "run"),
        (adapter, "stage_all"), (adapter, "commit"), (adapter, "event"), (adapter, "span"),
        (adapter, "session"), (handle.buffers, "stage"), (handle, "front"), (handle, "logits"),
        (handle._graph.graph, "replay"), (model, "sample"), (compiled, "select"),
        (getattr(launcher, "_part_run", None), "run"),
    ]  # fmt: skip
    found: dict[str, dict[str, list[float]]] = {"engine_step": defaultdict(list), "bare_step": defaultdict(list)}
    with ExitStack() as stack:
        for place, name in places:
            if place is not None and hasattr(place, name):
                owner = place if isinstance(place, type) else type(place)
                call = watch.watched(f"{owner.__name__}.{name}", getattr(place, name))
                stack.enter_context(mock.patch.object(place, name, call))
        # Adapters and buffers may have taken these calls before.
        stack.enter_context(mock.patch.object(handle._graph, "replay", handle._graph.graph.replay))
        stack.enter_context(mock.patch.object(handle.buffers, "_stage_all", adapter.stage_all))
        # Prepared steps took theirs too; those made from here on take the watched ones.
        forget = getattr(executor, "forget_prepared", int)
        stack.callback(forget)
        forget()
        runs = {
            "engine_step": watch.watched("Engine.step", lambda: engine.step(inputs)),
            "bare_step": watch.watched("bare step", bare_step(engine, model, inputs)),
        }
        for i in range(count + WARM_UP):
            for name, run in runs.items():
                torch.cuda.synchronize()
                watch.take()
                kept = run()
                if i >= WARM_UP:
                    for function, us in watch.take().items():
                        found[name][function].append(us)
                del kept
    if "FullStep.run" not in found["engine_step"]:
        raise RuntimeError("no step was prepared while functions were watched, so their times are of another path.")
    return {
        name: {function: round(statistics.median(us), 1) for function, us in sorted(each.items())}
        for name, each in found.items()
    }


def measure(engine: Any, model: Any, sizes: Sequence[int], pairs: int) -> list[dict[str, Any]]:
    """Decode sizes: wall and host microseconds of both, and the ratio of pairs."""
    import torch

    runs: dict[int, dict[str, Callable[[], Any]]] = {}
    seen: dict[int, dict[str, tuple[list[float], list[float]]]] = {}
    for size in sizes:
        inputs = decode_inputs(size, model.num_blocks)
        replay = graph_of(engine, inputs)._graph.graph.replay
        runs[size] = {
            "engine_step": partial(engine.step, inputs), "bare_step": bare_step(engine, model, inputs),
            "replay": replay,
        }  # fmt: skip
        seen[size] = {name: ([], []) for name in runs[size]}
    for i in range(pairs + WARM_UP):
        for size in sizes:
            for name in sorted(runs[size], reverse=bool(i % 2)):
                run, (wall, host) = runs[size][name], seen[size][name]
                torch.cuda.synchronize()
                start = time.perf_counter()
                kept = run()
                launched = time.perf_counter()
                torch.cuda.synchronize()
                if i >= WARM_UP:
                    wall.append((time.perf_counter() - start) * 1e6)
                    host.append((launched - start) * 1e6)
                del kept
    return [_row(size, seen[size]) for size in sizes]


def _row(size: int, seen: dict[str, tuple[list[float], list[float]]]) -> dict[str, Any]:
    walls, hosts = ({name: each[which] for name, each in seen.items()} for which in (0, 1))
    ratio, low, high = interval([a / b for a, b in zip(walls["engine_step"], walls["bare_step"], strict=True)])
    beyond, least, most = interval([a - b for a, b in zip(hosts["engine_step"], hosts["bare_step"], strict=True)])
    means = {name: statistics.fmean(sorted(us)[: len(us) * 99 // 100]) for name, us in hosts.items()}
    return {
        "num_reqs": size,
        **{f"{name}_us": round(statistics.median(us), 1) for name, us in walls.items() if name != "replay"},
        **{f"{name}_host_us": round(statistics.median(us), 1) for name, us in hosts.items()},
        "host_beyond_us": round(beyond, 1), "host_beyond_interval": [round(least, 1), round(most, 1)],
        # Of the 99% that took least: what interrupts the host is nobody's.
        "host_beyond_mean_us": round(means["engine_step"] - means["bare_step"], 1),
        "ratio": round(ratio, 4), "interval": [round(low, 4), round(high, 4)],
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
    result: dict[str, Any] = {
        "command": command_line("benchmarks.gpu.overhead", argv),
        "date": options.date, "device": torch.cuda.get_device_name(), "model": repr(model), "limit": LIMIT,
        "host_limit_us": HOST_LIMIT_US,
        "versions": {
            "kpolicy": kpolicy.__version__, "torch": str(torch.__version__), "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "rows": measure(engine, model, options.sizes, options.pairs),
    }  # fmt: skip
    # What is asked for first, also where the rest doesn't come to an end.
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    for row in result["rows"]:
        print(row, flush=True)
        inputs = decode_inputs(row["num_reqs"], model.num_blocks)
        row["parts_us"] = parts_of(engine, model, inputs)
        row["inside_us"] = inside(engine, model, inputs)
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
