"""Stock vLLM 0.23.0 and vLLM with the shim, alternating on one GPU over the same loads.

Each side (`benchmarks.vllm.ladders`) is one engine in a process of its own, all on the GPU at once and one at work at
a time, with random weights, KV caches of equal bytes, vLLM's default asynchronous scheduling and default compilation
level 3 (torch.compile) unless ``--llm`` says otherwise. Turns are short and many, as the host's speed changes within
tens of seconds: in each repeat every side serves every load once (a burst `TURNS` times), and each side comes first in
turn. The engine core runs in its process's main thread, which also makes the requests and reads the tokens, on all
sides; ``--one-core`` has it on one quick core, the same for all (`benchmarks.vllm.cores`). Prompts are other random
tokens each repeat, equal on all sides.

With ``--states LOAD=N`` each side first serves that load N times with either speed of replays in turn
(`benchmarks.vllm.replay_state`), the slow one first, and from then on each turn begins at the slow one, which every
start leaves. Without it sides that share a GPU have whichever the last start of any left.

First tokens of a load are told by the quantiles of all turns' requests together too (``ttft_all_p50_ms``,
``ttft_all_p99_ms``), which is what a comparison is judged by where turns have few requests; ``--shift-ms`` moves
arrivals by chance, other each turn and alike on all sides.

Raw rows go to ``OUT/raw.jsonl`` as they come; rows already there, or in ``--done``, aren't measured again.

Run: ``python -m benchmarks.vllm.stock_vs_kpolicy --models FOLDER --traces FOLDER --out OUT --date D``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from benchmarks.command import command_line, commit_of, input_file, input_folder, made_folder
from benchmarks.vllm.cores import OneCore
from benchmarks.vllm.ladders import PACED, SIDES, arguments_of
from benchmarks.vllm.loads import LOADS, TURNS, Load, make_load
from benchmarks.vllm.replay_state import SLOW, STATES
from benchmarks.vllm.rows import Measurement, machine, rotated, say
from benchmarks.vllm.sides import WITHOUT, Side, SideError
from benchmarks.vllm.summary import compared, lines, states_compared
from kpolicy.errors import ConfigError

NAMES = ("qwen05b", "llama8b", "dsv2lite")
START_S, RUN_S, LAST_S = 170.0, 60.0, 6.0
"""Most seconds for a start and for one run of a load; for a side's turn, what must be left of the budget at least"""
WARM_SCALE = 0.1
"""Share of a load's requests that each side serves before any turn counts, unless ``--warm-scale`` says otherwise"""
PROFILE_S, PROFILE_SCALE = 7.0, 0.5
"""Seconds that are left for one side's profile of a load, and the share of the load's requests in it"""
UTIL = 0.2
"""Share of the device that must be free when an engine starts; `KV_BYTES` says what it takes"""
MAX_SEQS, MAX_TOKENS = 1024, 8192
KV_BYTES = {"qwen05b": 16 << 30, "llama8b": 25 << 29, "dsv2lite": 14 << 30}
"""Equal on all sides, enough for the loads, and little enough for five engines of the first and three of the second on
one device; what is left for KV at a start `benchmarks.vllm.starts` measures"""


class Run(Measurement):
    """The whole comparison.

    Args:
        options: the command line's.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options, "raw.jsonl", "log.txt")
        self._ahead: dict[tuple[str, str], Side] = {}
        self._machine: dict[str, str] = {}
        """Device and versions of the sides, as `machine` has them"""
        self._core: OneCore | None = None
        self.failed = 0
        """Sides that were lost"""
        self._cut: list[str] = []
        """Models whose loads the budget cut"""
        self._turn_s: dict[tuple[str, str], float] = {}
        """The longest that a side's turn of each model and load took so far"""

    def ahead(self, model: str) -> None:
        """Have all sides of a model import what they need, while others start."""
        for name in self._options.sides:
            if (model, name) not in self._ahead:
                self._ahead[model, name] = self._spawn(name, model)

    def _spawn(self, name: str, model: str) -> Side:
        options = self._options
        own = arguments_of(
            name, json.loads(options.kpolicy), max_seqs=MAX_SEQS, max_tokens=MAX_TOKENS, plan=options.plan,
            paced=json.loads(options.paced), model=options.models / model,
        )  # fmt: skip
        llm = {"kv_cache_memory_bytes": KV_BYTES[model], **json.loads(options.llm), **own}
        sizes = ["--max-seqs", str(MAX_SEQS), "--max-tokens", str(MAX_TOKENS), "--util", str(UTIL)]
        hold = [] if name in WITHOUT else ["--hold"]
        arguments = ["--llm", json.dumps(llm), *sizes, *hold, *options.child]
        return Side(name, options.models / model, arguments, self._log, module=options.module)

    def end(self) -> None:
        """End what was started ahead and never used, and the children's log."""
        for side in self._ahead.values():
            side.end()
        self.close()

    def _start(self, names: list[str], model: str) -> dict[str, Side]:
        """Start those sides at once, and wait for all; each shim times its graphs when all others are idle."""
        started = time.monotonic()
        sides = {name: self._ahead.pop((model, name), None) or self._spawn(name, model) for name in names}

        def answer(side: Side) -> dict[str, Any]:
            return side.answer(min(START_S, max(20.0, self.left_s())))

        for side in sides.values():
            side.go()
        rows: dict[str, dict[str, Any]] = {}
        for name, side in list(sides.items()):
            try:
                rows[name] = answer(side)
            except SideError as error:  # noqa: PERF203 - seconds are waited for
                self._lose(model, sides, name, error)
        for name, row in rows.items():
            try:
                if row["kind"] == "waits":
                    sides[name].go()
                    row = answer(sides[name])
                self.rows.check(row)
            except (SideError, ConfigError) as error:
                self._lose(model, sides, name, SideError(str(error)))
                continue
            self._machine = machine(row)
            # Cold, and beside others: `benchmarks.vllm.starts` measures what a start takes.
            self.rows.keep(model=model, load="cold start", side=name, repeat=0, cold=row, **self.about)
            say(
                f"{model} {name}: ready after {time.monotonic() - started:.0f} s, {row['graphs']}, KV "
                f"{row['kv_tokens']}, {row['mode']}, {row['runner']}, {row['scheduler']}"
            )
        return sides

    def _lose(self, model: str, sides: dict[str, Side], name: str, error: SideError) -> None:
        """Go on without that side, where two are left to compare.

        Raises:
            SideError: one is left, or stock itself is lost.
        """
        self.failed += 1
        sides[name].end()
        del sides[name]
        if len(sides) < 2 or name == "stock":
            for side in sides.values():
                side.end()
            raise error
        say(f"{model} {name} FAILED, and the others go on: {error}")

    def serve(self, model: str, loads: list[str], following: str | None) -> None:
        """Start all sides once and have them serve each load in turn; `following` is the model that comes next."""
        options = self._options
        made = {load: make_load(load, model, options.traces, scale=options.scale) for load in loads}
        wanted = [
            (repeat, load)
            for round_ in range(options.repeats)
            for load in loads
            for repeat in self._repeats(load, round_)
            if not self.rows.has(model, load, self._of(load, options.sides), repeat, len(made[load].requests))
        ]
        if wanted and self.left_s() < 90:
            self._cut.append(model)
        if not wanted or self.left_s() < 90:
            return
        sides: dict[str, Side] = {}
        try:
            self.ahead(model)
            if following is not None:
                self.ahead(following)
            sides |= self._start(options.sides, model)
            if options.one_core:
                self._core = OneCore(sorted(os.sched_getaffinity(0)))
                say(f"{model}: {self._core.told}")
            self._both_states(model, sides)
            for load in dict.fromkeys(load for _, load in wanted):
                warm = make_load(load, model, options.traces, scale=options.warm_scale * options.scale)
                for name in self._of(load, sides):
                    self._served(model, sides, name, warm, f"{load} warm")
            for repeat, load in wanted:
                turn_s = max(LAST_S, self._turn_s.get((model, load), 0.0))
                if self.left_s() < turn_s * len(self._of(load, sides)) + self._profiles_s(sides):
                    say(f"{model}: the budget is spent")
                    self._cut.append(model)
                    break
                self._turns(model, made[load], repeat, sides)
            self._keep_statistics(model, sides)
            self._profile(model, sides)
        finally:
            for side in sides.values():
                side.end()

    def _turns(self, model: str, load: Load, repeat: int, sides: dict[str, Side]) -> None:
        """Each side serves that load once."""
        for name in rotated(self._of(load.name, sides), repeat):
            row = self._served(model, sides, name, load, f"{load.name} {repeat}")
            if row is not None:
                took = self._turn_s.get((model, load.name), 0.0)
                self._turn_s[model, load.name] = max(took, row["wall_s"])
                self.rows.keep(
                    model=model,
                    load=load.name,
                    side=name,
                    repeat=repeat,
                    requests=len(load.requests),
                    **self.about,
                    **row,
                    **self._machine,
                )
                say(_line(model, load.name, name, repeat, row))

    def _served(
        self, model: str, sides: dict[str, Side], name: str, load: Load, seed: str, state: str = SLOW
    ) -> dict[str, Any] | None:
        """That side's figures of a load; None where it is lost. With ``--states`` replays begin at that speed."""
        side, told = sides[name], {}
        try:
            if self._options.states:
                told = {"state": self._state(side, state)}
            with nullcontext({}) if self._core is None else self._core.held_by(side.pid) as host:
                row = side.ask(RUN_S, requests=load.requests, seed=seed, step_tokens=load.step_tokens)
            return {**row, **told, **host}
        except SideError as error:
            self._lose(model, sides, name, error)
        return None

    @staticmethod
    def _state(side: Side, state: str) -> str:
        """Have that side's replays be of that speed; the state as it said."""
        told: str = side.ask(RUN_S, state=state)["state"]
        return told

    def _both_states(self, model: str, sides: dict[str, Side]) -> None:
        """Each side serves a load with either speed of replays in turn, the slow one first in every other repeat."""
        for name, times in self._options.states:
            load = make_load(name, model, self._options.traces, scale=self._options.scale)
            count = len(load.requests)
            if all(self.rows.has(model, f"{name} {state}", sides, times - 1, count) for state in STATES):
                continue
            longest_s = LAST_S
            for repeat, state in [(i, state) for i in range(times + 1) for state in rotated(STATES, i)]:
                if self.left_s() < longest_s * len(sides):
                    say(f"{model}: the budget is spent")
                    self._cut.append(model)
                    return
                for side in rotated(list(sides), repeat):
                    row = self._served(model, sides, side, load, f"{name} {state} {repeat}", state)
                    longest_s = max(longest_s, row["wall_s"] if row is not None else 0.0)
                    # The first of each only warms up.
                    if row is not None and repeat:
                        about = {"model": model, "load": f"{name} {state}", "side": side, "repeat": repeat - 1}
                        self.rows.keep(**about, requests=count, **self.about, **row, **self._machine)
                        say(_line(model, f"{name} {state}", side, repeat - 1, row))

    def _repeats(self, load: str, round_: int) -> range:
        """The numbers of a load's turns in that round over all loads."""
        turns = dict(self._options.turns).get(load, TURNS.get(load.partition("-")[0], 1))
        return range(round_ * turns, (round_ + 1) * turns)

    def _of(self, load: str, sides: Iterable[str]) -> list[str]:
        """Those of the sides that serve that load."""
        only = dict(self._options.only_for)
        return [name for name in sides if name not in only or load in only[name]]

    def _keep_statistics(self, model: str, sides: dict[str, Side]) -> None:
        for name, side in sides.items():
            if name not in WITHOUT:
                row = side.ask(RUN_S, statistics=True)
                (self._options.out / f"shim_{model}_{name}.json").write_text(json.dumps(row, indent=1))

    def _profiles_s(self, sides: dict[str, Side]) -> float:
        return PROFILE_S * sum(len(self._of(load, sides)) for load in self._options.profile)

    def _profile(self, model: str, sides: dict[str, Side]) -> None:
        """What bounds each side's steps: loads once more, in part, under the profiler."""
        options = self._options
        found: dict[str, dict[str, Any]] = {}
        for name in options.profile:
            load = make_load(name, model, options.traces, scale=PROFILE_SCALE * options.scale)
            for side in self._of(name, sides):
                order = {"requests": load.requests, "seed": f"{name} profile", "step_tokens": load.step_tokens}
                try:
                    with nullcontext({}) if self._core is None else self._core.held_by(sides[side].pid) as host:
                        row = sides[side].ask(RUN_S, profile=True, **order)
                except SideError as error:
                    self.failed += 1
                    say(f"{model} {side}: no profile of {name}: {error}")
                    return
                found.setdefault(name, {})[side] = {**row, **host}
                (options.out / f"profile_{model}.json").write_text(json.dumps({**self.about, "loads": found}))
                say(f"{model} {name} {side}: profiled, {len(row['steps'])} steps, {row['spans']} spans")

    def write(self) -> None:
        """The summary, as it stands."""
        options, rows = self._options, self.rows.all
        starts = [row["cold"] | {"of": f"{row['model']} {row['side']}"} for row in rows if "cold" in row]
        first = starts[0] if starts else {}
        found = compared(rows)
        self.rows.summary(
            options.out / "vllm_stock_vs_kpolicy.json",
            {
                "call": self.about["call"], "command": options.command,
                "commit": commit_of(), "cut_by_the_budget": self._cut,
                "date": options.date, "device": first.get("gpu"), "options": {
                    "llm": json.loads(options.llm), "kpolicy": json.loads(options.kpolicy), "child": options.child,
                    "paced": json.loads(options.paced), "one_core": options.one_core,
                    "repeats": options.repeats, "scale": options.scale, "warm_scale": options.warm_scale,
                },
                "versions": {name: first.get(name) for name in ("vllm", "torch")},
                "levels": {row["of"]: [row["level"], row["mode"], row["runner"]] for row in starts},
                "rows": found.pop("stock kpolicy", []),
                "beside": found,
                **({"states": told} if (told := states_compared(rows)) else {}),
            },
        )  # fmt: skip


def _line(model: str, load: str, name: str, repeat: int, row: dict[str, Any]) -> str:
    shown = " ".join(
        f"{key}={row[key]}" for key in ("requests_per_s", "ttft_p50_ms", "ttft_p99_ms", "gap_p50_ms", "gap_p99_ms")
    )
    host = " ".join(f"{key}={row[key]}" for key in ("host_us", "cores", "core_looks", "core_slow") if key in row)
    return f"{model} {load} #{repeat} {name:7} {shown} wall={row['wall_s']} steps={row['steps']} {row['modes']} {host}"


def _turns(text: str) -> tuple[str, int]:
    load, _, turns = text.partition("=")
    if not turns.isdecimal() or not int(turns):
        raise argparse.ArgumentTypeError(f"{text!r} isn't LOAD=N with N from 1, such as chat=6.")
    return load, int(turns)


def _only_for(text: str) -> tuple[str, list[str]]:
    side, _, loads = text.partition("=")
    if not loads:
        raise argparse.ArgumentTypeError(f"{text!r} isn't SIDE=LOAD,LOAD, such as wide=chat.")
    return side, loads.split(",")


def _check(parser: argparse.ArgumentParser, option: str, names: list[str], known: list[str]) -> None:
    """End with an error where a name isn't known or comes twice."""
    for name in names:
        if name not in known or names.count(name) > 1:
            wrong = "comes twice" if name in known else "isn't served"
            parser.error(f"{option}: {name!r} {wrong}; this call has {', '.join(known)}.")


def main(argv: list[str] | None = None) -> int:
    """Measure model by model, and write after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", type=input_folder, required=True, help="has a folder with config.json for each model"
    )
    parser.add_argument("--traces", type=input_folder, required=True)
    parser.add_argument("--out", type=made_folder, required=True)
    parser.add_argument("--done", type=Path, action="append", default=[], help="raw rows of an earlier call")
    parser.add_argument("--only", nargs="*", default=NAMES, help="models, in order")
    parser.add_argument("--loads", nargs="*", default=list(LOADS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sides", nargs="*", default=["stock", "kpolicy"], help=f"of {', '.join(SIDES)}")
    parser.add_argument(
        "--only-for", nargs="*", default=[], type=_only_for, metavar="SIDE=LOAD,LOAD",
        help="a side that serves those loads alone",
    )  # fmt: skip
    parser.add_argument(
        "--turns", nargs="*", default=[], type=_turns, metavar="LOAD=N", help="turns of that load in a repeat"
    )
    parser.add_argument(
        "--states", nargs="*", default=[], type=_turns, metavar="LOAD=N",
        help="loads served N times first with either speed of replays; turns then begin at the slow one",
    )  # fmt: skip
    parser.add_argument(
        "--profile", nargs="*", default=[], metavar="LOAD",
        help="loads that are served once more at the end, in part, under torch's profiler: profile_MODEL.json",
    )  # fmt: skip
    parser.add_argument(
        "--one-core", action="store_true", help="the side at work has its main thread on one quick core, each the same"
    )
    parser.add_argument("--plan", type=input_file, help="plan file of the side planned")
    parser.add_argument(
        "--paced",
        default=json.dumps(PACED),
        help="JSON with settings of the shim that the side paced has besides, of the gap or any other",
    )
    parser.add_argument("--scale", type=float, default=1.0, help="share of each load's requests, for a quick look")
    parser.add_argument(
        "--warm-scale", type=float, default=WARM_SCALE, help="share of each load that is served before it counts"
    )
    parser.add_argument("--budget", type=float, default=420.0, help="seconds for all")
    parser.add_argument("--llm", default="{}", help="JSON with further arguments of vllm.LLM, for both sides")
    parser.add_argument(
        "--kpolicy", default='{"additional_config": {"kpolicy": {"policy": "auto"}}}',
        help="JSON with arguments of vllm.LLM for the shim's side",
    )  # fmt: skip
    parser.add_argument("--module", default="benchmarks.vllm.child", help="what runs in the children")
    parser.add_argument("--date", default="unstated")
    options, options.child = parser.parse_known_args(argv)
    options.command = command_line("benchmarks.vllm.stock_vs_kpolicy", argv)
    if options.one_core and not hasattr(os, "sched_setaffinity"):
        parser.error("--one-core: this system doesn't let a process choose its cores; Linux does.")
    _check(parser, "--turns", [load for load, _ in options.turns], options.loads)
    try:
        for load, _ in options.states:
            make_load(load, options.only[0], options.traces)
    except ConfigError as error:
        parser.error(f"--states: {error}")
    _check(parser, "--profile", options.profile, options.loads)
    _check(parser, "--only-for", [side for side, _ in options.only_for], options.sides)
    run = Run(options)
    for model, following in zip(options.only, [*options.only[1:], None], strict=True):
        try:
            run.serve(model, options.loads, following)
        except SideError as error:
            say(f"{model} FAILED: {error}")
        run.write()
    run.end()
    for line in lines(run.rows.all):
        say(line)
    return 1 if run.failed else 0


if __name__ == "__main__":
    sys.exit(main())
