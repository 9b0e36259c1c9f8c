"""Host work outside the executor in the default run of `kpolicy run`: how much a step, in which parts and functions.

The default model serves the default window of the trace with `auto`, costs measured first, arrivals scaled to 70% of
what the machine serves, checks off. A step's time goes from the end of the step before to its own end; the executor's
share is `Executor.run` and the wait for its outputs, and the rest is ours: scheduling, deciding, counting, taking
tokens in. Repeats time the parts by wrapping them; one more run is profiled by cProfile, which is off while the
executor runs, so its functions are those outside (the profiler makes them slower: their order counts, not their sum).

Run from the repository root::

    OMP_NUM_THREADS=1 python -m benchmarks.host_profile --date 2026-01-01 [--json FILE] [--window 30] [--repeats 3]
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import platform
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from benchmarks.command import output_file

LIMIT = 0.05
BLOCK_SIZE, KV_TOKENS, MAX_NUM_REQS, MAX_NUM_TOKENS = 16, 32_768, 32, 256
UTILISATION, CALIBRATION_S = 0.7, 10.0
POLICY = "auto"
FUNCTIONS = 15
ROOT = Path(__file__).parent.parent


class Parts:
    """Wraps calls and sums what they take, less what wrapped calls within them take."""

    def __init__(self) -> None:
        self.us: dict[str, float] = {}
        self.calls: dict[str, int] = {}
        self._inner: list[float] = []

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed under that name."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                took = time.perf_counter() - start
                inner = self._inner.pop()
                if self._inner:
                    self._inner[-1] += took
                self.us[name] = self.us.get(name, 0.0) + (took - inner) * 1e6
                self.calls[name] = self.calls.get(name, 0) + 1

        return timed


def ready_to_serve(window_s: float) -> tuple[Any, Any, Any, float]:
    """(trace, scaled; engine, captured; its `Serving`; the arrivals' factor), as `kpolicy run` makes them."""
    from kpolicy.scheduling.traces import default_trace
    from kpolicy.serving.calibrate import calibrate
    from kpolicy.serving.real_run import Serving, fitting, open_model, saturated_s, share_cores, small_ladder
    from kpolicy.settings import Settings

    share_cores()
    settings = Settings(max_num_reqs=MAX_NUM_REQS, max_num_tokens=MAX_NUM_TOKENS)
    model = open_model(None, settings, kv_tokens=KV_TOKENS, block_size=BLOCK_SIZE, seed=0)
    trace = fitting(default_trace().window(0, window_s), model)
    serving = Serving(model=model, settings=settings, ladder=small_ladder(settings), verify=False)
    engine = serving.engine(POLICY)
    engine.capture()
    costs = calibrate(engine.executor, engine.registry, model, settings, allowance_s=CALIBRATION_S)
    serving = attrs.evolve(serving, costs=costs)
    engine = serving.engine(POLICY, like=engine)
    work_s = saturated_s(trace, engine, costs, num_blocks=KV_TOKENS // BLOCK_SIZE, block_size=BLOCK_SIZE)
    rate = UTILISATION * trace.span_s / work_s if trace.span_s else 1.0
    return trace.scaled(rate), engine, serving, rate


def a_run(trace: Any, engine: Any, serving: Any, wrap: Callable[[str, Any, str], None]) -> Callable[[], Any]:
    """What serves the trace once; `wrap` is given each part's name, object and method before."""
    from kpolicy.trace_run import Prompts, WallClock, serve_trace

    serving.model.clear_kv()
    fresh = serving.engine(POLICY, like=engine)
    batcher, prompts = serving.batcher(), Prompts(0, vocab=serving.model.vocab)
    for name, owner, method in (
        ("executor", fresh.executor, "run"),
        ("decide and count (Engine.step)", fresh, "step"),
        ("schedule (Batcher.next_batch)", batcher, "next_batch"),
        ("take tokens in (Batcher.complete)", batcher, "complete"),
        ("prompts of arrivals", prompts, "of"),
    ):
        wrap(name, owner, method)

    def run() -> Any:
        clock = WallClock()
        wrap("wait for outputs", clock, "step_us")
        try:
            return serve_trace(trace, fresh, batcher, prompts, clock=clock)
        finally:
            vars(fresh.executor).pop("run", None)

    return run


def timed_run(trace: Any, engine: Any, serving: Any) -> dict[str, Any]:
    """Shares and parts of one run."""
    parts = Parts()

    def wrap(name: str, owner: Any, method: str) -> None:
        setattr(owner, method, parts.wrap(name, getattr(owner, method)))

    run = a_run(trace, engine, serving, wrap)
    start = time.perf_counter()
    result = run()
    total_us = (time.perf_counter() - start) * 1e6
    inside = parts.us.pop("executor") + parts.us.pop("wait for outputs")
    parts.us["the loop"] = total_us - inside - sum(parts.us.values())
    return {
        "steps": result.steps,
        "step_us": total_us / result.steps,
        "outside_us": (total_us - inside) / result.steps,
        "share": (total_us - inside) / total_us,
        "share_in_run_table": result.outside_us / (result.outside_us + result.step_us),
        "parts": {name: us / result.steps for name, us in parts.us.items()},
    }


def profiled_run(trace: Any, engine: Any, serving: Any) -> list[dict[str, Any]]:
    """Functions by own time outside the executor."""
    profiler = cProfile.Profile()

    def wrap(name: str, owner: Any, method: str) -> None:
        if name not in ("executor", "wait for outputs"):
            return
        function = getattr(owner, method)

        def unseen(*args: Any, **kwargs: Any) -> Any:
            profiler.disable()
            try:
                return function(*args, **kwargs)
            finally:
                profiler.enable()

        setattr(owner, method, unseen)

    run = a_run(trace, engine, serving, wrap)
    profiler.enable()
    result = run()
    profiler.disable()
    stats: Any = pstats.Stats(profiler)
    rows = [(own, calls, where) for where, (_, calls, own, _, _) in stats.stats.items() if "unseen" not in where]
    total = sum(own for own, _, _ in rows)
    return [
        {
            "function": _named(*where), "calls_per_step": round(calls / result.steps, 2),
            "own_us_per_step": round(own / result.steps * 1e6, 2), "of_outside": round(own / total, 4),
        }
        for own, calls, where in sorted(rows, reverse=True)[:FUNCTIONS]
    ]  # fmt: skip


def _named(file: str, line: int, name: str) -> str:
    if file.startswith("~"):
        return name.strip("<>")
    path = Path(file)
    within = path.relative_to(ROOT) if path.is_relative_to(ROOT) else Path(path.name)
    return f"{within}:{line} {name}"


def main(argv: list[str] | None = None) -> int:
    """Measure, print, and say whether the limit holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--date", default="unstated", help="written into the result")
    parser.add_argument("--json", type=output_file, help="where the result is written; printed only without it")
    parser.add_argument("--window", type=float, default=30.0, help="seconds of the trace")
    parser.add_argument("--repeats", type=int, default=3, help="times that the run is timed")
    options = parser.parse_args(argv)

    import kpolicy
    from kpolicy.serving.calibrate import device_name, versions

    trace, engine, serving, rate = ready_to_serve(options.window)
    runs = []
    for _ in range(options.repeats):
        runs.append(timed_run(trace, engine, serving))
        print({name: round(value, 4) for name, value in runs[-1].items() if name != "parts"}, flush=True)
    functions = profiled_run(trace, engine, serving)
    engine.release()
    parts = {name: statistics.median(run["parts"][name] for run in runs) for name in runs[0]["parts"]}
    whole = statistics.median(run["step_us"] for run in runs)
    shares = sorted(run["share"] for run in runs)
    result = {
        "command": "OMP_NUM_THREADS=1 python -m benchmarks.host_profile "
        + " ".join(argv if argv is not None else sys.argv[1:]),
        "date": options.date,
        "versions": {"kpolicy": kpolicy.__version__, "python": platform.python_version(), **versions()},
        "device": {"name": device_name(), "machine": platform.machine(), "cores": os.cpu_count()},
        "model": serving.model.full_name,
        "policy": POLICY,
        "trace": {"source": Path(trace.source).name, "window_s": options.window, "requests": len(trace), "rate": rate},
        "limit": LIMIT,
        "holds": shares[-1] < LIMIT,
        "repeats": options.repeats,
        "steps": [run["steps"] for run in runs],
        "step_us": round(whole, 1),
        "outside_us": round(statistics.median(run["outside_us"] for run in runs), 1),
        "shares": [round(share, 5) for share in shares],
        "shares_in_run_table": sorted(round(run["share_in_run_table"], 5) for run in runs),
        "parts": [
            {"part": name, "us_per_step": round(us, 1), "share": round(us / whole, 5)}
            for name, us in sorted(parts.items(), key=lambda each: -each[1])
        ],
        "functions": functions,
    }  # fmt: skip
    for row in (*result["parts"], *functions):
        print(row)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print("holds" if result["holds"] else "DOES NOT HOLD", f"(limit {LIMIT:.0%})")
    return 0 if result["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
