"""What watching costs a step: `Stats.add` with and without the histogram of step times, a scrape, a trace's step.

Run: ``python -m benchmarks.observe``. Times are the best of repeats, in microseconds of one thread. The ratio is of two
loops that take turns in one process, so that the machine's other work meets both.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from bisect import bisect_left
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kpolicy import BatchShape, Engine
from kpolicy.decision import Decision
from kpolicy.observe.stats import TIME_BOUNDS_US, Stats, _Counted
from kpolicy.schemas import QueueState, StepEntry
from kpolicy.shapes import BatchNumbers

STEPS = 20_000
SHAPES = [
    BatchShape.decode(1),
    BatchShape.decode(37),
    BatchShape.decode(200),
    BatchShape(decodes=[(1, 8)], prefills=[(500, 0)]),
]


class WithoutTimes(Stats):
    """`Stats` that keeps no histogram, otherwise the same."""

    def add(self, decision: Decision, numbers: BatchNumbers, us: float = 0.0) -> None:
        stats = self._by_decision.get(decision)
        if stats is None:
            stats = self._by_decision[decision] = _Counted()
        stats.steps += 1
        if us > 0:
            stats.us += us
        for launch in decision.launches:
            repeat, key = launch.repeat, launch.key
            tokens = launch.num_tokens(numbers) * repeat
            stats.tokens += tokens
            padded = launch.padded_tokens if key is None else key.num_tokens
            if padded is not None:
                stats.padding += padded * repeat - tokens


def steps_of(engine: Engine) -> list[tuple[Decision, BatchNumbers, float]]:
    """What a run of steps counts: decisions of the policy, with times all over the buckets."""
    decided = [(engine.decide(shape), shape.numbers) for shape in SHAPES]
    return [(*decided[i % len(decided)], 150.0 * 1.3 ** (i % 30)) for i in range(STEPS)]


def seconds(loop: Callable[[], Any]) -> float:
    started = time.perf_counter()
    loop()
    return time.perf_counter() - started


def counting(stats: Stats, steps: list[tuple[Decision, BatchNumbers, float]]) -> Callable[[], None]:
    def loop() -> None:
        add = stats.add
        for decision, numbers, us in steps:
            add(decision, numbers, us)

    return loop


def bucket_only(steps: list[tuple[Decision, BatchNumbers, float]]) -> Callable[[], None]:
    times = [0] * (len(TIME_BOUNDS_US) + 1)

    def loop() -> None:
        for _decision, _numbers, us in steps:
            times[bisect_left(TIME_BOUNDS_US, us)] += 1

    return loop


def measured(repeats: int) -> dict[str, float]:
    """Best times and the median ratio of neighbouring runs."""
    engine = Engine("auto")
    steps = steps_of(engine)
    loops = {
        "add_us": counting(Stats(), steps),
        "add_without_histogram_us": counting(WithoutTimes(), steps),
        "bucket_alone_us": bucket_only(steps),
    }
    runs: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(repeats):
        for name, loop in loops.items():
            runs[name].append(seconds(loop) / STEPS * 1e6)
    ratios = sorted(a / b for a, b in zip(runs["add_us"], runs["add_without_histogram_us"], strict=True))
    found = {name: min(values) for name, values in runs.items()}
    found["ratio_with_to_without"] = ratios[len(ratios) // 2]
    numbers = SHAPES[1].numbers
    select = engine.select
    found["select_us"] = min(
        seconds(lambda: [select(*numbers) for _ in range(STEPS)]) / STEPS * 1e6 for _ in range(repeats)
    )
    return found


def optional(repeats: int) -> dict[str, float]:
    """A scrape and a step of a trace, where their libraries are installed."""
    found: dict[str, float] = {}
    if find_spec("prometheus_client"):
        from prometheus_client import CollectorRegistry, generate_latest

        from kpolicy.observe.metrics import EngineCollector

        engine = Engine("auto")
        for shape in SHAPES:
            engine.decide(shape)
        registry = CollectorRegistry()
        registry.register(EngineCollector(engine))
        found["scrape_us"] = min(seconds(lambda: generate_latest(registry)) * 1e6 for _ in range(repeats))
        found["graph_keys"] = len(engine.registry.records())
    if find_spec("perfetto"):
        found |= tracing(repeats)
    return found


def tracing(repeats: int) -> dict[str, float]:
    from kpolicy.observe.perfetto import PerfettoWriter

    engine, count = Engine("auto"), 2000
    queue = QueueState(waiting=3, running=40)
    entries = [
        StepEntry.of(i, shape, engine.decide(shape), cycle_us=500.0, host_us=90.0, queue=queue)
        for i, shape in enumerate(SHAPES * (count // len(SHAPES)))
    ]
    best = float("inf")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.pftrace"
        for _ in range(max(repeats // 4, 2)):
            with PerfettoWriter(path) as trace:
                best = min(best, seconds(lambda trace=trace: [trace.write(entry) for entry in entries]))
        size = path.stat().st_size
    return {"trace_step_us": best / len(entries) * 1e6, "trace_step_bytes": size / len(entries)}


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=21, help="repeats, of which the best counts")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    found = measured(arguments.repeats) | optional(arguments.repeats)
    if arguments.json:
        print(json.dumps(found, indent=1))
        return
    print(f"python {platform.python_version()} on {platform.machine()}, {sys.platform}; {STEPS} steps a repeat")
    for name, value in found.items():
        print(f"{name:<28}{value:>12.3f}")


if __name__ == "__main__":
    main()
