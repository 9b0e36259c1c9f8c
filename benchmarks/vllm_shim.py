"""What kpolicy adds to the host's work of a step in vLLM: the real runners' dispatch with and without it, in one run.

Run from the repository root, with wheels or unpacked wheels of vLLM 0.23.0 and 0.33.0 in one folder::

    KPOLICY_ORACLE=FOLDER PYTHONPATH=integrations/kpolicy_vllm python -m benchmarks.vllm_shim --date YYYY-MM-DD

Of the first runner all of `_determine_batch_execution_and_padding` is timed, of the second `dispatch`. Each pass has
steps of its own, so that prepared answers are found as often as in serving: decodes have theirs after the first of
their number, batches with a prompt chunk theirs from start-up. Passes of the two alternate, in several processes; the
best of each is taken, as all else only adds time.

Steps go through the runner's `execute_model`, where costs follow the host's speed: each pass has a look at it, which
`kpolicy_vllm.watch` has due every few seconds. ``look_us`` is what one takes; 1 / `STEPS` of it is in kpolicy's times.
Every look finds the speed that the costs have: none of them changes in a pass.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import subprocess
import sys
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

import kpolicy
import kpolicy_vllm.host
from kpolicy.costs import Curve, HostCost, analytic_costs
from kpolicy.host_speed import host_work_us
from kpolicy.policies.vllm import vllm
from kpolicy.settings import Settings
from kpolicy_vllm.config import Config
from kpolicy_vllm.state import State, state_of
from tests.integrations.vllm.real_runner import initialise_v1, runner_v1, sized, vllm_config, vllm_of
from tests.integrations.vllm.shimmed import ShimmedVllm
from tests.oracle.configs import Deployment
from tests.oracle.vllm_real import RealVllm

RESULT = Path(__file__).parent / "results" / "vllm_shim.json"
STEPS = 1000
PASSES = 9
WORK_US = 30.0


def costs() -> Any:
    """Costs of a small model, where every mode is the cheapest somewhere."""
    import attrs

    curve = Curve((1, 64, 512, 2048, 8192), (900.0, 950.0, 1500.0, 4000.0, 15000.0))
    return attrs.evolve(
        analytic_costs(), version="bench", measured=True, full=curve, piecewise=curve, eager=curve,
        host_full=HostCost(100.0), host_piecewise=HostCost(1500.0), host_eager=HostCost(8000.0),
        host_work_us=WORK_US,
    )  # fmt: skip


def decodes(rng: random.Random) -> list[int]:
    return [1] * rng.randint(1, 256)


def mixed(rng: random.Random) -> list[int]:
    return [1] * rng.randint(1, 200) + [rng.randint(2, 1500)]


def long(rng: random.Random) -> list[int]:
    return [1] * rng.randint(1, 200) + [rng.randint(2049, 6000)]


KINDS: dict[str, Callable[[random.Random], list[int]]] = {"decode": decodes, "mixed": mixed, "long chunk": long}


def runner_of(ask: Callable[..., Any], state: State | None = None) -> Any:
    """A runner whose steps only ask for a graph; costs of kpolicy's follow the host."""
    parallel = SimpleNamespace(data_parallel_size=1)
    runner = SimpleNamespace(execute_model=ask, vllm_config=SimpleNamespace(parallel_config=parallel))
    if state is not None:
        state.runner = runner
        kpolicy_vllm.host.host_work_us = lambda: WORK_US if host_work_us() else 0.0
        kpolicy_vllm.host.attach(runner, state)
        assert state.look_due is not None
        runner.look_due = state.look_due
    return runner


def timed(runner: Any, steps: list[Any]) -> float:
    """Microseconds a step."""
    if hasattr(runner, "look_due"):
        runner.look_due()
    start = time.perf_counter_ns()
    for step in steps:
        runner.execute_model(**step)
    return (time.perf_counter_ns() - start) / len(steps) / 1000


def look_us() -> float:
    """Microseconds that a look at the host's speed takes, at best."""
    return round(min(timeit.repeat(host_work_us, number=1, repeat=50)) * 1e6, 1)


def compared(stock: Any, shim: Any, draw: Callable[[], Any]) -> dict[str, Any]:
    """Best times of both runners, and their ratio."""
    # vLLM's engine freezes what there is after its start, so that the collector doesn't walk through it.
    gc.collect()
    gc.freeze()
    for runner in (stock, shim):
        timed(runner, [draw() for _ in range(STEPS)])
    times: tuple[list[float], list[float]] = ([], [])
    for i in range(PASSES):
        for which in (0, 1) if i % 2 else (1, 0):
            times[which].append(timed((stock, shim)[which], [draw() for _ in range(STEPS)]))
    best, ours = min(times[0]), min(times[1])
    return {
        "stock_us": round(best, 2),
        "kpolicy_us": round(ours, 2),
        "added_us": round(ours - best, 2),
        "ratio": round(ours / best, 2),
    }


def of_runner_1(version: str, rng: random.Random) -> dict[str, Any]:
    """The first runner of a release."""
    from kpolicy_vllm.attach_v1 import attach
    from kpolicy_vllm.ladder import sizes_of
    from kpolicy_vllm.versions.names import Names

    def started(modules: Any, kpolicy_on: bool) -> Any:
        config = vllm_config(modules, max_num_seqs=256, max_num_batched_tokens=8192, kpolicy={"summary_seconds": 0})
        sized(modules, config)
        runner = runner_v1(modules, config)
        if kpolicy_on:
            state = state_of(config)
            assert state is not None
            state.sizes = sizes_of(state.config, state.settings)
            state.config = Config(calibrate=False, summary_seconds=0)
            attach(runner, state, Names.of_v1())
        initialise_v1(runner, modules)
        runner.capture_model()
        if kpolicy_on:
            state.install_costs(costs())
            state.dispatcher.chooser.prepare()
        return runner_of(runner._determine_batch_execution_and_padding, state if kpolicy_on else None)

    with vllm_of(version) as modules:
        stock, shim = started(modules, False), started(modules, True)

        def draw(kind: Callable[[random.Random], list[int]]) -> dict[str, Any]:
            new = kind(rng)
            return {
                "num_tokens": sum(new),
                "num_reqs": len(new),
                "num_scheduled_tokens_np": np.array(new, dtype=np.int32),
                "max_num_scheduled_tokens": max(new),
                "use_cascade_attn": False,
            }

        return {name: compared(stock, shim, lambda kind=kind: draw(kind)) for name, kind in KINDS.items()}


def of_runner_2(version: str, rng: random.Random) -> dict[str, Any]:
    """The second runner's manager of a release."""
    from kpolicy.attention.support import Claims, SupportLevel

    settings = Settings(max_num_reqs=256, max_num_tokens=8192)
    sizes = tuple(range(1, 5)) + tuple(range(8, 513, 8))
    deployment = Deployment(
        vllm(version=version, runner="v2"), SupportLevel.MIXED, Claims.at_level("mixed"), settings, sizes
    )
    with vllm_of(version) as modules:
        stock = RealVllm(modules, version, "v2")
        stock.start(deployment)
        from kpolicy.policies import get_policy

        shim = ShimmedVllm(modules, version, "v2", policy=get_policy("auto"), costs=costs(), config=Config())
        shim.start(deployment)
        shim.captured()
        shim.state.dispatcher.chooser.prepare()

        def draw(kind: Callable[[random.Random], list[int]]) -> dict[str, Any]:
            new = kind(rng)
            step = {"num_reqs": len(new), "num_tokens": sum(new), "uniform_token_count": 1 if new[-1] == 1 else None}
            if version == "0.33":
                step |= {"num_active_loras": 0, "max_query_len": 1 if new[-1] == 1 else None}
            return step

        runners = runner_of(stock.manager.dispatch), runner_of(shim.manager.dispatch, shim.state)
        return {name: compared(*runners, lambda kind=kind: draw(kind)) for name, kind in KINDS.items()}


def measured() -> list[dict[str, Any]]:
    """Both runners of both releases, in this process."""
    return [
        {"vllm": f"{version}.0", "runner": runner, "step": kind, **row}
        for version in ("0.23", "0.33")
        for runner, measure in (("v1", of_runner_1), ("v2", of_runner_2))
        for kind, row in measure(version, random.Random(0)).items()
    ]


def best(runs: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The best times of each side over processes."""
    rows = []
    for same in zip(*runs, strict=True):
        stock, ours = (min(row[side] for row in same) for side in ("stock_us", "kpolicy_us"))
        found = {"stock_us": stock, "kpolicy_us": ours}
        rows.append({**same[0], **found, "added_us": round(ours - stock, 2), "ratio": round(ours / stock, 2)})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--date", required=True, help="written into the result")
    parser.add_argument("--processes", type=int, default=5, help="where objects lie, which differs, changes times")
    parser.add_argument("--one", action="store_true", help="measure here and print JSON: what each process runs")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measured()))
        return 0
    command = [sys.executable, "-m", "benchmarks.vllm_shim", "--one", "--date", arguments.date]
    runs = [
        json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        for _ in range(arguments.processes)
    ]
    rows = best(runs)
    for row in rows:
        print(*row.values(), sep="\t")
    written = {
        "what": "host time of one dispatch in vLLM's runners, stock and with kpolicy's shim, on one CPU",
        "date": arguments.date,
        "command": f"KPOLICY_ORACLE=FOLDER PYTHONPATH=integrations/kpolicy_vllm python -m benchmarks.vllm_shim "
        f"--date {arguments.date} --processes {arguments.processes}",
        "versions": {"kpolicy": kpolicy.__version__, "python": platform.python_version()},
        "cpu": platform.processor() or platform.machine(),
        "look_us": look_us(),
        "rows": rows,
    }
    # What `vllm.pace_cost` measured stands in the same file.
    kept = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {}
    RESULT.write_text(json.dumps(kept | written, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
