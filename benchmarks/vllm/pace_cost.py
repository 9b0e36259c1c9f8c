"""What bounding steps adds to the host's work of a step in vLLM's own schedulers, beside another tree's in turn.

Run from the repository root, with wheels or unpacked wheels of vLLM 0.23.0 and 0.33.0 in one folder::

    KPOLICY_ORACLE=FOLDER PYTHONPATH=integrations/kpolicy_vllm python -m benchmarks.vllm.pace_cost --beside TREE
        --date YYYY-MM-DD

The schedulers serve made-up loads, with as many rows decoding as said: a line of long prompts, a line of short ones,
and none. Two figures, both without vLLM's own part of `schedule`: ``again``, the same step asked for over and over, as
`benchmarks.vllm_shim` asks for graphs, best of passes; and ``served``, the median over served steps, where all that
vLLM does between two steps has the processor's caches. Costs are those measured in vLLM on an H200. Processes of the
two trees alternate; of all processes the best is taken, as other work only adds time.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs

from benchmarks.command import input_folder
from kpolicy.attention.support import Claims
from kpolicy.schemas import read_profile
from kpolicy_vllm import scheduler as ours
from kpolicy_vllm.config import Config
from kpolicy_vllm.ladder import default_sizes
from kpolicy_vllm.pace import Pacer
from kpolicy_vllm.state import State, settings_of
from tests.integrations.vllm.real_scheduler import make_request, make_scheduler, schedulers, vllm_config

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "vllm_shim.json"
COSTS = ROOT / "benchmarks" / "results" / "h200" / "vllm_costs_qwen05b.json"
STEPS, WARM = 120, 50
AGAIN, PASSES = 320, 15
LIMIT, CONTEXT = 8192, 600
LINES = {"long prompts": (40, 500, 3000), "short prompts": (200, 20, 200), "none": (0, 1, 2)}
"""By load: requests that are kept waiting, and their prompts' least and most tokens"""
ROWS = (8, 64, 512, 1000)
FIGURES = ("again_us", "served_us")


def state_for(config: Any, version: str) -> State:
    """kpolicy's side when vLLM has captured its graphs and costs are there."""
    settings = settings_of(config)
    state = State(Config(objective="1:1"), settings)
    state.claims, state.vllm_version, state.runner = Claims(1, mixed=True), f"{version}.0", SimpleNamespace()
    for key in state.policy.plan(default_sizes(settings, paced=True), state.claims, settings):
        state.registry.plan([key])
        state.registry.capture(key, bytes=1, seconds=0.1, graphs=1, pool="vllm")
    state.graphs_captured()
    costs = read_profile(COSTS).costs
    state.install_costs(attrs.evolve(costs, mixed=costs.piecewise))
    return state


class Served:
    """One scheduler with its load, a step at a time, two under way.

    Args:
        version: vLLM's.
        rows: requests that decode all the while.
        line: of `LINES`.
    """

    def __init__(self, version: str, rows: int, line: tuple[int, int, int]) -> None:
        self.waiting, self.least, self.most = line
        config = vllm_config(
            version, asynchronous=True, max_num_seqs=2048, max_tokens=LIMIT, blocks=(rows + 300) * 4096 // 16
        )
        name = ours.qualname(config).rpartition(".")[2]
        self.scheduler = make_scheduler(ours._made(name), config)
        self.state = state_for(config, version)
        self.scheduler.kpolicy_pacer = Pacer(self.scheduler, self.state)
        self.random, self.under_way = random.Random(rows), deque[Any]()
        self.requests: dict[str, Any] = {}
        self.own_us = 0.0
        base: Any = type(self.scheduler).__mro__[1]
        own = base.schedule

        def timed(scheduler: Any, *args: Any, **named: Any) -> Any:
            start = time.perf_counter_ns()
            output = own(scheduler, *args, **named)
            self.own_us = (time.perf_counter_ns() - start) / 1e3
            return output

        base.schedule = timed
        self.undo: Callable[[], None] = lambda: setattr(base, "schedule", own)
        for i in range(rows):
            self._add(f"decode{i}", CONTEXT, 100_000)
        while len(self.scheduler.running) < rows or any(r.num_output_tokens < 1 for r in self.scheduler.running):
            self.step()

    def _add(self, name: str, prompt: int, outputs: int) -> None:
        self.requests[name] = request = make_request(name, prompt, outputs)
        self.scheduler.add_request(request)

    def step(self) -> float:
        """One step of vLLM's engine; microseconds that were not vLLM's own."""
        start = time.perf_counter_ns()
        output = self.scheduler.schedule()
        added = (time.perf_counter_ns() - start) / 1e3 - self.own_us
        self.under_way.append((output, self._run(output)))
        if len(self.under_way) > 1:
            self.scheduler.update_from_output(*self.under_way.popleft())
        return added

    def _run(self, output: Any) -> Any:
        """What a worker answers: a token of each row whose prompt is computed."""
        names = list(output.num_scheduled_tokens)
        rows = [self.requests[name] for name in names]
        return importlib.import_module("vllm.v1.outputs").ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[[1] if row.num_computed_tokens >= row.num_prompt_tokens else [] for row in rows],
        )  # fmt: skip

    def again(self) -> float:
        """Microseconds of one step, the same over and over: the scheduler does nothing in it."""
        running = len(self.scheduler.running)
        output = SimpleNamespace(
            num_scheduled_tokens=range(running), total_num_scheduled_tokens=LIMIT, scheduled_new_reqs=(),
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=()),
        )  # fmt: skip
        pacer, best = self.scheduler.kpolicy_pacer, float("inf")
        for _ in range(PASSES):
            start = time.perf_counter_ns()
            for _ in range(AGAIN):
                pacer.schedule(lambda: output)
            best = min(best, (time.perf_counter_ns() - start) / AGAIN / 1e3)
        return best

    def refill(self, step: int) -> None:
        """Keep the line as long as it was; prompts give way after a few tokens."""
        for i in range(self.waiting - len(self.scheduler.waiting)):
            self._add(f"p{step}-{i}", self.random.randint(self.least, self.most), 4)
        if step % 64 == 0:
            self.requests = {name: each for name, each in self.requests.items() if not each.is_finished()}


def measured(version: str, rows: int, line: tuple[int, int, int]) -> dict[str, float]:
    """Times of one scheduler and load."""
    served = Served(version, rows, line)
    try:
        added, own = [], []
        for step in range(WARM + STEPS):
            served.refill(step)
            if step == WARM:
                gc.collect()
                gc.freeze()
                before = served.state.counters.counts["paced_steps"]
            us = served.step()
            if step >= WARM:
                added.append(us)
                own.append(served.own_us)
        bounded = served.state.counters.counts["paced_steps"] - before
        served.refill(0)
        again_us = served.again()
    finally:
        served.undo()
        gc.unfreeze()
    counts = served.state.counters.counts
    assert not counts["pace_failed"] + counts["not_compared"], counts
    assert line[0] or not bounded, counts
    return {"again_us": again_us, "served_us": statistics.median(added), "own_us": statistics.median(own)}


def run_here() -> list[dict[str, Any]]:
    """All of this process's tree."""
    found = []
    for version in ("0.23", "0.33"):
        with schedulers(version):
            # Classes are made of this release's.
            importlib.reload(ours)
            for name, line in LINES.items():
                found += [
                    {"vllm": version, "line": name, "rows": rows, **measured(version, rows, line)} for rows in ROWS
                ]
    return found


def run_in(tree: Path) -> list[dict[str, Any]]:
    """All of another process, with that tree's kpolicy and this benchmark."""
    path = os.pathsep.join(map(str, (tree, tree / "integrations" / "kpolicy_vllm", ROOT)))
    run = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), "--one"], check=True, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": path}, cwd=tree,
    )  # fmt: skip
    rows: list[dict[str, Any]] = json.loads(run.stdout.splitlines()[-1])
    return rows


def best(runs: list[list[dict[str, Any]]], beside: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The best of all processes, by figure; the other tree's as ``before``."""
    rows = []
    for i, first in enumerate(runs[0]):
        row = {name: first[name] for name in ("vllm", "line", "rows")}
        row["own_us"] = round(min(run[i]["own_us"] for run in runs), 1)
        for name in FIGURES:
            if beside:
                row[f"before_{name}"] = round(min(run[i][name] for run in beside), 2)
            row[f"added_{name}"] = round(min(run[i][name] for run in runs), 2)
        rows.append(row)
    return rows


def main() -> int:
    """Measure, print, and write beside what `benchmarks.vllm_shim` wrote."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--date", help="written into the result; without it nothing is written")
    parser.add_argument("--beside", type=input_folder, help="another tree of the project, measured in turn")
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--one", action="store_true", help="measure here and print JSON: what each process runs")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(run_here()))
        return 0
    runs, beside = [], []
    for _ in range(given.processes):
        if given.beside is not None:
            beside.append(run_in(given.beside.resolve()))
        runs.append(run_in(ROOT))
    rows = best(runs, beside)
    for row in rows:
        print(*row.values(), sep="\t")
    if given.date:
        written = json.loads(RESULT.read_text(encoding="utf-8"))
        written["scheduler"] = {
            "what": "host time that bounding steps adds to vLLM's schedule, on one CPU; before: another commit's",
            "date": given.date,
            "command": f"KPOLICY_ORACLE=FOLDER PYTHONPATH=integrations/kpolicy_vllm python -m benchmarks.vllm.pace_cost"
            f" --beside TREE --date {given.date} --processes {given.processes}",
            "rows": rows,
        }
        target = RESULT.with_suffix(".tmp")
        target.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
        target.replace(RESULT)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
