"""`Engine.step` in FULL on a GPU against bare replays of the same graph.

Three baselines are measured in the same run. ``replay`` launches the graph alone. ``copies_replay`` stages the same
numbers into the same static inputs by the same calls, brings them over in the same copy and replays: the limits, 1.05
of its wall time and 30 us of the host beyond it, are for this one. ``bare_step`` also copies the logits out and
samples, by calls of its own; results before 2026-11-28 have no other, and it is kept to compare with them.

`Engine.step` and one baseline in turn in one process, each to a synchronisation, and a replay: the ratio is of pairs of
wall times. Host time is until the call returns; what `Engine.step` takes beyond a baseline is ours, and
`replay_host_us` is what the one call that launches the graph takes. Medians, and `host_beyond_mean_us`: steps are
counted several at a time, which medians don't show.

Whichever of the two comes first fetches the inputs into the processor's caches, for the other as well. So differences
and ratios of pairs lie about two values, one for each order, and the median over all pairs may be anywhere between
them: the middle of both orders' medians is taken. The baselines take turns, two pairs each, one in each order.

Each size is measured in two surroundings. ``in_turn``: sizes take turns pair by pair, so that each launch finds the
processor's caches with another graph's parameters in them. ``in_a_row``: so many pairs of one size follow each other,
as decodes of a few requests do; the first ones of a row don't count. Rows of all sizes alternate, so whatever else the
host does is spread over all of them, and the process keeps to one core.

`parts_us` is the host time of what both are made of, each alone after a synchronisation. `inside_us` is where the
host's time goes within a step: of each function, without the watched ones that it calls. Watching costs some tenths of
a microsecond a call.

With ``--slices N`` it measures N times as many pairs, each time after a line on standard input, and says ``ready``
before each and after the last, where it waits once more: so two checkouts can take turns on one device.

Run: ``python -m benchmarks.gpu.overhead --config FILE --date D --json FILE [--sizes 1 8 64]``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

from benchmarks.command import command_line, input_path, output_file
from benchmarks.engine_step import decode_inputs
from benchmarks.host_step import bare_step
from kpolicy.executors.full_step import FullStep

LIMIT, HOST_LIMIT_US = 1.05, 30.0
LIMIT_OVER = "copies_replay"
"""The baseline that the limits are for"""
BASELINES = ("copies_replay", "bare_step")
"""What `Engine.step` is measured beside, in turn; ``replay`` is measured beside each"""
WARM_UP = 20
IN_A_ROW, NOT_COUNTED = 16, 3
"""Pairs of one size that follow each other, and how many of them don't count"""


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
        "clone": logits.clone, "sample": lambda: model.sample(logits, {}),
        "clone and sample": lambda: (logits.clone(), model.sample(logits, {})), "event": adapter.event,
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
    """Where the host's time goes within `Engine.step` and within two of the baselines: medians by function."""
    import torch

    from kpolicy.executors.cuda import staging

    watch, executor, handle = Watch(), engine.executor, graph_of(engine, inputs)
    launcher, adapter, compiled = executor.launcher, executor.adapter, engine.compiled
    places: Sequence[tuple[Any, str]] = [
        (engine, "_settle"), (executor, "run"), (launcher, "start"), (launcher, "ready"), (FullStep, "run"),
        (adapter, "stage_all"), (adapter, "commit"), (adapter, "event"), (adapter, "span"),
        (adapter, "session"), (handle.buffers, "stage"), (handle, "launch"), (handle, "logits"),
        (handle._graph.graph, "replay"), (model, "sample"), (compiled, "select"),
        (getattr(launcher, "_part_run", None), "run"), (staging.StagedGroup, "commit"),
        # Not in checkouts from before.
        (getattr(staging, "FixedJobs", None), "stage"),
        # Called by its place in the prepared step, so it is watched there; not for all graphs.
        (handle if getattr(handle, "stage_decodes", None) else None, "stage_decodes"),
    ]  # fmt: skip
    found: dict[str, dict[str, list[float]]] = {
        name: defaultdict(list) for name in ("engine_step", "bare_step", "copies_replay")
    }
    with ExitStack() as stack:
        for place, name in places:
            if place is not None and hasattr(place, name):
                owner = place if isinstance(place, type) else type(place)
                call = watch.watched(f"{owner.__name__}.{name}", getattr(place, name))
                stack.enter_context(mock.patch.object(place, name, call))
        # Buffers may have taken this call before.
        stack.enter_context(mock.patch.object(handle.buffers, "_stage_all", adapter.stage_all))
        # Prepared steps took theirs too; those made from here on take the watched ones.
        forget = getattr(executor, "forget_prepared", int)
        stack.callback(forget)
        forget()
        runs = {
            "engine_step": watch.watched("Engine.step", lambda: engine.step(inputs)),
            "bare_step": watch.watched("bare step", bare_step(engine, model, inputs)),
            "copies_replay": watch.watched("copies and replay", bare_step(engine, model, inputs, outputs=False)),
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


_Runs = dict[int, dict[str, Callable[[], Any]]]
_Seen = dict[str, dict[str, dict[str, list[float]]]]
"""By baseline, wall (``wall``) and host (``host``) microseconds of each run, in the order of pairs"""


def runs_of(engine: Any, model: Any, sizes: Sequence[int]) -> _Runs:
    """By size, what is timed."""
    runs: _Runs = {}
    for size in sizes:
        inputs = decode_inputs(size, model.num_blocks)
        runs[size] = {
            "engine_step": partial(engine.step, inputs), "bare_step": bare_step(engine, model, inputs),
            "copies_replay": bare_step(engine, model, inputs, outputs=False),
            "replay": graph_of(engine, inputs)._graph.graph.replay,
        }  # fmt: skip
    return runs


def _order(sizes: Sequence[int], pairs: int, row: int, skipped: int) -> Iterator[tuple[int, int, bool]]:
    """(size, number of the pair, whether it counts) of so many counted pairs a size, in rows of that length."""
    for start in range(0, pairs, row):
        for size in sizes:
            for i in range(-skipped, min(row, pairs - start)):
                yield size, start + i, i >= 0


def measure(runs: _Runs, seen: dict[int, _Seen], pairs: int, *, row: int = 1, skipped: int = 0) -> None:
    """Time so many pairs a size and baseline, an even number, and note them."""
    import torch

    for size, number, counts in _order(list(runs), pairs * len(BASELINES), row, skipped):
        baseline = BASELINES[number // 2 % len(BASELINES)]
        for name in sorted((baseline, "engine_step", "replay"), reverse=bool(number % 2)):
            run = runs[size][name]
            torch.cuda.synchronize()
            start = time.perf_counter()
            kept = run()
            launched = time.perf_counter()
            torch.cuda.synchronize()
            if counts:
                found = seen[size].setdefault(baseline, {}).setdefault(name, {"wall": [], "host": []})
                found["wall"].append((time.perf_counter() - start) * 1e6)
                found["host"].append((launched - start) * 1e6)
            del kept


def row_of(seen: _Seen) -> dict[str, Any]:
    """What is said of one size in one surrounding.

    Beside what is said of each baseline under ``over``, the first keys are what results before there were several have:
    of pairs with a bare step.
    """
    over = {name: _over(seen[name], name) for name in BASELINES}
    every = {
        run: {which: [us for name in BASELINES for us in seen[name][run][which]] for which in ("wall", "host")}
        for run in ("engine_step", "replay")
    }
    over["replay"] = _over(every, "replay")
    return {**over["bare_step"], "over": over}


def _over(seen: dict[str, dict[str, list[float]]], baseline: str) -> dict[str, Any]:
    """What is said of `Engine.step` beside one baseline."""
    walls, hosts = ({name: each[which] for name, each in seen.items()} for which in ("wall", "host"))
    ratio, low, high = of_both_orders([
        a / b for a, b in zip(walls["engine_step"], walls[baseline], strict=True)
    ])  # fmt: skip
    beyond_us = [a - b for a, b in zip(hosts["engine_step"], hosts[baseline], strict=True)]
    beyond, least, most = of_both_orders(beyond_us)
    means = {name: statistics.fmean(sorted(us)[: max(1, len(us) * 99 // 100)]) for name, us in hosts.items()}
    return {
        **{f"{name}_us": round(statistics.median(us), 1) for name, us in walls.items()},
        **{f"{name}_host_us": round(statistics.median(us), 1) for name, us in hosts.items()},
        "host_beyond_us": round(beyond, 1), "host_beyond_interval": [round(least, 1), round(most, 1)],
        # Of the 99% that took least: what interrupts the host is nobody's.
        "host_beyond_mean_us": round(means["engine_step"] - means[baseline], 1),
        "ratio": round(ratio, 4), "interval": [round(low, 4), round(high, 4)],
        # Where the quarters of a run's host times lie: two speeds of the host show here.
        "host_quartiles_us": {name: _quartiles(us) for name, us in hosts.items()},
        "host_beyond_quartiles_us": _quartiles(beyond_us),
        # Of pairs with the baseline first, and with `Engine.step` first; a replay is last, and first.
        "host_beyond_by_order_us": [round(statistics.median(beyond_us[first::2]), 1) for first in (0, 1)],
        "pairs": len(beyond_us),
    }  # fmt: skip


def beyond(row: Mapping[str, Any], where: str, baseline: str) -> dict[str, Any]:
    """Host time of a result's row beyond a baseline, and the ratio of wall times.

    Args:
        row: of a size; results before there were several baselines have less.
        where: ``in_a_row`` or ``in_turn``.
        baseline: ``replay``, ``copies_replay`` or ``bare_step``.

    Returns:
        ``us`` and ``ratio``, with intervals ``us_interval`` and ``interval``; what the result doesn't have is None. For
        an old one microseconds beyond copies and a replay are worked out: those beyond a bare step, and its parts.
    """
    found, parts = row[where], row.get("parts_us", {})
    if "over" in found:
        found = found["over"][baseline]
    elif baseline == "replay":
        us = found["engine_step_host_us"] - found["replay_host_us"]
        return {"us": round(us, 1), "us_interval": None, "ratio": None, "interval": None}
    elif baseline == "copies_replay":
        worked_out = round(found["host_beyond_us"] + parts["clone"] + parts["sample"], 1) if parts else None
        return {"us": worked_out, "us_interval": None, "ratio": None, "interval": None}
    return {
        "us": found["host_beyond_us"], "us_interval": found["host_beyond_interval"],
        "ratio": found["ratio"], "interval": found["interval"],
    }  # fmt: skip


def of_both_orders(pairs: Sequence[float], draws: int = 400) -> tuple[float, float, float]:
    """(middle of the medians of both orders, lowest and highest of 95% of those of resampled pairs).

    Args:
        pairs: an even number of them, whose orders alternate.
        draws: how often they are resampled.
    """
    orders, chance = (pairs[::2], pairs[1::2]), random.Random(0)
    medians = sorted(
        statistics.fmean(statistics.median(chance.choices(order, k=len(order))) for order in orders)
        for _ in range(draws)
    )
    middle = statistics.fmean(map(statistics.median, orders))
    return middle, medians[int(0.025 * draws)], medians[int(0.975 * draws)]


def _quartiles(us: Sequence[float]) -> list[float]:
    ranked = sorted(us)
    return [round(ranked[len(ranked) * quarter // 4], 1) for quarter in (1, 2, 3)]


def _told() -> bool:
    """Say that this process is ready, and wait until it is told to go on; False where nobody will."""
    print("ready", flush=True)
    return bool(sys.stdin.readline())


def _keep_to(core: int | None) -> int | None:
    """Keep this thread to one core, the last that it may use where none is given; None where the system can't."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    core = max(os.sched_getaffinity(0)) if core is None else core
    os.sched_setaffinity(0, {core})
    return core


def main(argv: list[str] | None = None) -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=input_path, required=True)
    parser.add_argument("--sizes", type=int, nargs="*", default=[1, 8, 64, 256])
    parser.add_argument("--pairs", type=int, default=300, help="pairs of a size and baseline in each surrounding")
    parser.add_argument("--slices", type=int, default=0, help="measure at each of so many lines on standard input")
    parser.add_argument("--no-parts", action="store_true", help="rows alone, without the parts of a step")
    parser.add_argument("--core", type=int, help="the processor's core to keep to; by default the highest")
    parser.add_argument("--tiny", action="store_true", help="no model and no device: a dry run over what takes no time")
    parser.add_argument("--date", default="unstated")
    parser.add_argument("--json", type=output_file, required=True)
    options = parser.parse_args(argv)
    with ExitStack() as stack:
        if options.tiny:
            stack.enter_context(_no_device())
        return _measured(options, argv)


@contextmanager
def _no_device() -> Iterator[None]:
    """What is asked of CUDA is answered without it."""
    import torch

    from benchmarks.host_step import Point

    with mock.patch.object(torch.cuda, "Event", Point), mock.patch.object(torch.cuda, "synchronize", int):
        yield


def _opened(options: argparse.Namespace) -> tuple[Any, Any, str]:
    """(an Engine with its graphs, its model, the device's name)."""
    import torch

    from kpolicy.engine import Engine
    from kpolicy.serving.load import load
    from kpolicy.settings import Settings

    if options.tiny:
        from benchmarks.host_step import opened

        return *opened(), "none"
    config = json.loads(options.config.read_text())
    model = load(
        config, device="cuda", dtype=torch.bfloat16, num_blocks=8192, block_size=16, max_model_len=4096,
        max_num_reqs=max(options.sizes),
    )  # fmt: skip
    settings = Settings(max_num_reqs=max(options.sizes), max_num_tokens=2048)
    engine = Engine("full", model=model, device="cuda", ladder=sorted(options.sizes), settings=settings)
    engine.capture()
    return engine, model, torch.cuda.get_device_name()


def _measured(options: argparse.Namespace, argv: Sequence[str] | None) -> int:
    import torch
    import transformers

    import kpolicy

    engine, model, device = _opened(options)
    result: dict[str, Any] = {
        "command": command_line("benchmarks.gpu.overhead", argv),
        "date": options.date, "device": device, "model": repr(model), "limit": LIMIT,
        "host_limit_us": HOST_LIMIT_US, "limit_over": LIMIT_OVER,
        "versions": {
            "kpolicy": kpolicy.__version__, "torch": str(torch.__version__), "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "host": {"core": _keep_to(options.core), "cores": os.cpu_count(), "in_a_row": IN_A_ROW},
    }  # fmt: skip
    runs, pairs = runs_of(engine, model, options.sizes), options.pairs + options.pairs % 2
    seen: dict[str, dict[int, _Seen]] = {where: {size: {} for size in runs} for where in ("in_turn", "in_a_row")}
    measure(runs, {size: {} for size in runs}, WARM_UP)
    for _ in range(max(1, options.slices)):
        if options.slices and not _told():
            break
        measure(runs, seen["in_turn"], pairs)
        measure(runs, seen["in_a_row"], pairs, row=IN_A_ROW, skipped=NOT_COUNTED)
        # What is asked for first, also where the rest doesn't come to an end.
        result["rows"] = [
            {"num_reqs": size, **{where: row_of(each[size]) for where, each in seen.items()}} for size in runs
        ]
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.slices:
        _told()
    for row in result.get("rows", ()):
        print(row, flush=True)
        if not options.no_parts:
            inputs = decode_inputs(row["num_reqs"], model.num_blocks)
            row["parts_us"] = parts_of(engine, model, inputs)
            row["inside_us"] = inside(engine, model, inputs)
            options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
