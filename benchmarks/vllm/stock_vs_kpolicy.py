"""Stock vLLM 0.23.0 and vLLM with the shim, alternating on one GPU over the same loads.

Each side is one engine in a process of its own, both on the GPU at once and one at work at a time, with random weights,
vLLM's default asynchronous scheduling and default compilation level 3 (torch.compile) unless ``--llm`` says otherwise.
The engine core runs in its process's main thread, which also makes the requests and reads the tokens, on both sides.
Prompts are other random tokens each repeat, equal on both sides.

Raw rows go to ``OUT/raw.jsonl`` as they come; rows already there, or in ``--done``, aren't measured again.

Run: ``python -m benchmarks.vllm.stock_vs_kpolicy --models FOLDER --traces FOLDER --out OUT --date D``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.vllm.loads import LOADS, make_load
from benchmarks.vllm.sides import Side, SideError
from benchmarks.vllm.summary import summarise

NAMES = ("qwen05b", "llama8b", "dsv2lite")
START_S, RUN_S = 170.0, 60.0
"""Most seconds for a start and for one run of a load"""
WARM_SCALE = 0.1
SIDES = ("stock", "kpolicy")


class Run:
    """The whole comparison.

    Args:
        options: the command line's.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._stop_s = time.monotonic() + options.budget
        options.out.mkdir(parents=True, exist_ok=True)
        self._raw = options.out / "raw.jsonl"
        self.rows: list[dict[str, Any]] = []
        for path in {self._raw, *options.done}:
            if path.exists():
                self.rows += [json.loads(line) for line in path.read_text().splitlines() if line]
        self._ahead: dict[tuple[str, str], Side] = {}
        self._log = (options.out / "log.txt").open("a")

    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return self._stop_s - time.monotonic()

    def _keep(self, **row: Any) -> None:
        self.rows.append(row)
        with self._raw.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def has(self, model: str, load: str, repeat: int) -> bool:
        """Whether both sides of that repeat are measured."""
        wanted = {"stock", "kpolicy"}
        return wanted <= {
            row["side"] for row in self.rows
            if (row["model"], row["load"], row["repeat"]) == (model, load, repeat)
        }  # fmt: skip

    def ahead(self, model: str) -> None:
        """Have both sides of a model import what they need, while others start."""
        for name in SIDES:
            if (model, name) not in self._ahead:
                self._ahead[model, name] = self._spawn(name, model)

    def _spawn(self, name: str, model: str) -> Side:
        options = self._options
        llm = json.loads(options.llm) | (json.loads(options.kpolicy) if name == "kpolicy" else {})
        arguments = ["--llm", json.dumps(llm), *options.child]
        return Side(name, options.models / model, arguments, self._log, module=options.module)

    def end(self) -> None:
        """End what was started ahead and never used."""
        for side in self._ahead.values():
            side.end()

    def _start(self, name: str, model: str, repeat: int) -> Side:
        started = time.monotonic()
        side = self._ahead.pop((model, name), None) or self._spawn(name, model)
        side.go()
        try:
            row = side.answer(min(START_S, max(20.0, self.left_s())))
        except SideError:
            side.end()
            raise
        started_s = row["start_s"]
        if not repeat:
            # The side that starts first compiles, and fills caches for the other.
            row["cold_start_s"] = row.pop("start_s")
        self._keep(model=model, load="start", side=name, repeat=repeat, **row)
        say(
            f"{model} {name}: started in {started_s} s ({time.monotonic() - started:.0f} s with imports), compile "
            f"{row['compile_s']}, capture {row.get('capture_s')} s, {row.get('graph_mib')} MiB, {row['graphs']}, KV "
            f"{row['kv_tokens']}, {row['mode']}, {row['runner']}, {row['scheduler']}"
        )
        return side

    def starts(self, model: str) -> None:
        """Starts alone, in turn, until there are as many pairs as wanted; caches are warm after the first."""
        for repeat in range(1, self._options.starts):
            if self.has(model, "start", repeat) or self.left_s() < 60:
                continue
            for name in _turn(repeat):
                self._start(name, model, repeat).end()

    def serve(self, model: str, loads: list[str], following: str | None) -> None:
        """Start both sides once and have them serve each load in turn; `following` is the model that comes next."""
        options = self._options
        wanted = [
            (repeat, load) for repeat in range(options.repeats) for load in loads if not self.has(model, load, repeat)
        ]
        if not wanted or self.left_s() < 90:
            return
        sides: dict[str, Side] = {}
        try:
            self.ahead(model)
            if following is not None:
                self.ahead(following)
            for name in SIDES:
                sides[name] = self._start(name, model, 0)
            for load in dict.fromkeys(load for _, load in wanted):
                warm = make_load(load, model, options.traces, scale=WARM_SCALE * options.scale)
                for side in sides.values():
                    side.ask(RUN_S, requests=warm.requests, seed=f"{load} warm", step_tokens=warm.step_tokens)
            for repeat, load in wanted:
                made = make_load(load, model, options.traces, scale=options.scale)
                for name in _turn(repeat):
                    if self.left_s() < 5:
                        say(f"{model}: the budget is spent")
                        return
                    row = sides[name].ask(
                        min(RUN_S, max(5.0, self.left_s())), requests=made.requests, seed=f"{load} {repeat}",
                        step_tokens=made.step_tokens,
                    )  # fmt: skip
                    self._keep(model=model, load=load, side=name, repeat=repeat, **row)
                    say(_line(model, load, name, repeat, row))
            self._keep_statistics(model, sides)
        finally:
            for side in sides.values():
                side.end()

    def _keep_statistics(self, model: str, sides: dict[str, Side]) -> None:
        row = sides["kpolicy"].ask(RUN_S, statistics=True)
        (self._options.out / f"shim_{model}.json").write_text(json.dumps(row, indent=1))

    def write(self) -> None:
        """The summary, as it stands."""
        options = self._options
        starts = [row for row in self.rows if row["load"] == "start"]
        first = starts[0] if starts else {}
        result = {
            "command": "python -m benchmarks.vllm.stock_vs_kpolicy --models FOLDER --traces FOLDER --out OUT",
            "date": options.date, "device": first.get("gpu"), "options": {
                "llm": json.loads(options.llm), "kpolicy": json.loads(options.kpolicy), "child": options.child,
                "repeats": options.repeats, "scale": options.scale,
            },
            "versions": {name: first.get(name) for name in ("vllm", "torch")},
            "levels": {f"{row['model']} {row['side']}": [row["level"], row["mode"], row["runner"]] for row in starts},
            "rows": summarise(self.rows),
        }  # fmt: skip
        target = options.out / "vllm_stock_vs_kpolicy.json"
        target.with_suffix(".tmp").write_text(json.dumps(result, indent=1))
        target.with_suffix(".tmp").replace(target)


def _turn(repeat: int) -> tuple[str, str]:
    return ("kpolicy", "stock") if repeat % 2 else ("stock", "kpolicy")


def _line(model: str, load: str, name: str, repeat: int, row: dict[str, Any]) -> str:
    shown = " ".join(
        f"{key}={row[key]}" for key in ("requests_per_s", "ttft_p50_ms", "ttft_p99_ms", "gap_p50_ms", "gap_p99_ms")
    )
    return f"{model} {load} #{repeat} {name:7} {shown} wall={row['wall_s']} steps={row['steps']} {row['modes']}"


def say(text: str) -> None:
    """One line of progress."""
    print(text, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Measure model by model, and write after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="folder with a folder and config.json a model")
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--done", type=Path, action="append", default=[], help="raw rows of an earlier call")
    parser.add_argument("--only", nargs="*", default=NAMES, help="models, in order")
    parser.add_argument("--loads", nargs="*", default=list(LOADS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--starts", type=int, default=1, help="pairs of starts, of the first model")
    parser.add_argument("--scale", type=float, default=1.0, help="share of each load's requests, for a quick look")
    parser.add_argument("--budget", type=float, default=420.0, help="seconds for all")
    parser.add_argument("--llm", default="{}", help="JSON with further arguments of vllm.LLM, for both sides")
    parser.add_argument(
        "--kpolicy", default='{"additional_config": {"kpolicy": {"policy": "auto"}}}',
        help="JSON with arguments of vllm.LLM for the shim's side",
    )  # fmt: skip
    parser.add_argument("--module", default="benchmarks.vllm.child", help="what runs in the children")
    parser.add_argument("--date", default="unstated")
    options, options.child = parser.parse_known_args(argv)
    run = Run(options)
    failed = 0
    for model, following in zip(options.only, [*options.only[1:], None], strict=True):
        try:
            run.serve(model, options.loads, following)
        except SideError as error:
            failed += 1
            say(f"{model} FAILED: {error}")
        run.write()
    if options.starts > 1:
        run.starts(options.only[0])
        run.write()
    run.end()
    for row in summarise(run.rows):
        say(
            f"{row['model']:9} {row['load']:12} {row['figure']:15} {row['stock']:>10} {row['kpolicy']:>10} "
            f"x{row['ratio']} [{row['low']}, {row['high']}] n={row['repeats']}"
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
