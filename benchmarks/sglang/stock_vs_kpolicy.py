"""Stock SGLang against SGLang with kpolicy, alternating in one run, on one GPU.

    python benchmarks/sglang/stock_vs_kpolicy.py --models MODELS --trace conv.csv --out OUT

Both sides are processes on the same GPU that stay up and take turns, each round in another order. ``--again`` starts
stock once more, as the last one, in slices of steps: no decision explains what two stock processes differ by. Slices:

- ``qwen``, ``dsv2``: single steps of Qwen2.5-0.5B and DeepSeek-V2-Lite shapes (decode, extend, mixed; random weights);
- ``qwen-drawn``: steps of 0.5B of sizes drawn from the steps in ``--drawn``, with kpolicy's sizes and ``--plan``'s;
- ``qwen-between``: steps of the sizes that SGLang captures and ``--plan`` has no graph of, and of one less, which both
  pad;
- ``qwen-trace``: request throughput and gaps through SGLang's scheduler, the conversation trace at 600 requests, every
  token streamed; ``order`` is kpolicy with steps in SGLang's order;
- ``qwen-mixed-trace``: with mixed chunks, at 64 requests; ``qwen-offline-trace``: as the first, nothing streamed;
- ``dsv2-trace``: the conversation trace on DeepSeek-V2-Lite with mixed chunks, at 48 requests;
- ``capture``: start-up alone: SGLang's own sizes and those of ``--plan``, which end at the same; kpolicy's own and
  SGLang's own list up to the same; ``dsv2-capture``: of DeepSeek-V2-Lite, SGLang's own sizes and kpolicy's;
- ``log``: counters and decision log of a scheduler under the trace, decided again by `kpolicy simulate`;
- ``check``: logits on a generated checkpoint against float32 (benchmarks/sglang/check.py).

Every answer is appended to OUT/raw.jsonl as it comes; OUT/sglang_stock_vs_kpolicy.json is written anew after each slice
and takes in what OUT/raw.jsonl had before, so that slices can be run one by one (``--slices``). What its rows are is
told in rows.py. Steps are prepared a few times, with short turns in each.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import queue
import random
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

HERE = Path(__file__).resolve().parent
if str(HERE.parents[1]) not in sys.path:
    sys.path.append(str(HERE.parents[1]))  # run as a script

from benchmarks.command import commit_of  # noqa: E402
from benchmarks.sglang.rows import AGAIN, LOADS, MODEL, rows, write  # noqa: E402

T = TypeVar("T")

SLICES = (
    "qwen", "dsv2", "check", "qwen-trace", "capture", "qwen-mixed-trace", "qwen-offline-trace", "dsv2-trace", "log",
    "qwen-drawn", "qwen-between", "dsv2-capture",
)  # fmt: skip
VARIANTS = {"order": {"KPOLICY_TURNS": "0"}}
REQUESTS = {
    "qwen-trace": (600, 1800), "qwen-offline-trace": (600, 1800), "qwen-mixed-trace": (64, 256), "dsv2-trace": (48, 72),
}  # fmt: skip
"""Requests in flight and in all. With mixed chunks fewer: SGLang's own mixed batches take a second with 600 decodes."""
LIMIT_S = 100
"""Most seconds that a side may take for a trace; less where less is left."""
STEPS = {
    "qwen": [
        *(("decode", size) for size in (1, 32, 256, 512, 768)),
        *(("extend", size) for size in (64, 256, 512, 1024, 2048)),
        *(("mixed", size) for size in (64, 512, 2048)),
    ],
    "dsv2": [
        *(("decode", size) for size in (1, 32, 256, 512)),
        *(("extend", size) for size in (64, 256, 512, 1024, 2048, 4096)),
        *(("mixed", size) for size in (64, 512, 2048)),
    ],
}
ROUND_MS, WARM_MS, MOST_STEPS = 40, 15, 9
"""About how long a side's turn in a round of steps is, and the steps before it that aren't timed; most steps of each.

A side's turn right after its own was 1 to 5% quicker than one after the other's (runs 21 and 22, one untimed step).
"""
NO_VARIANTS: Mapping[str, dict[str, str]] = {}
WARM_TOKENS = 8
"""Most output tokens of a request before anything is measured."""
STARTS_S = {"qwen": 120, "dsv2": 200}


class Side:
    """One SGLang process."""

    def __init__(
        self, name: str, kind: str, arguments: dict[str, Any], out: Path, *, kpolicy: bool, **more: str
    ) -> None:
        environ = {k: v for k, v in os.environ.items() if not k.startswith("KPOLICY_")}
        if kpolicy:
            environ |= {"KPOLICY_SGLANG": "1", **more}
        self.name = name
        self.log = (out / f"log-{name}.txt").open("ab")
        self.answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "server.py"), kind, "--args", json.dumps(arguments)],
            env={**environ, "PYTHONUNBUFFERED": "1"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log,
        )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(b"RES "):
                self.answers.put(json.loads(line[4:]))
            else:
                self.log.write(line)
        self.answers.put({"error": f"{self.name} ended with {self.process.wait()}"})

    def hear(self, seconds: float) -> dict[str, Any]:
        """The next answer.

        Raises:
            RuntimeError: it is an error, or there is none in time.
        """
        try:
            answer = self.answers.get(timeout=max(seconds, 0.1))
        except queue.Empty:
            raise RuntimeError(f"{self.name}: no answer in {seconds:.0f} s") from None
        if "error" in answer:
            raise RuntimeError(f"{self.name}: {answer['error']}")
        return answer

    def ask(self, seconds: float, **what: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what).encode() + b"\n")
        self.process.stdin.flush()
        return self.hear(seconds)

    def start(self, seconds: float) -> dict[str, Any]:
        """Let it load the model; it only imports before."""
        self.hear(seconds)
        return self.ask(seconds)

    def end(self) -> None:
        if self.log.closed:
            return
        self.process.kill()
        self.process.wait()
        self.log.close()


class Run:
    """What all slices share."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.out: Path = given.out
        self.out.mkdir(parents=True, exist_ok=True)
        self.stop_s = time.monotonic() + float(given.budget)
        self.raw = self.out / "raw.jsonl"
        self.logs: Path = given.logs or given.out
        self.logs.mkdir(parents=True, exist_ok=True)
        self.warm = set(MODEL.values()) if given.warm else set()
        """Models that were started before."""

    @property
    def left_s(self) -> float:
        return self.stop_s - time.monotonic()

    def note(self, **line: Any) -> None:
        text = json.dumps(line)
        print(text[:400], flush=True)
        with self.raw.open("a", encoding="utf-8") as file:
            file.write(text + "\n")

    def sides(
        self, part: str, kind: str, arguments: dict[str, Any], variants: Mapping[str, dict[str, str]] = NO_VARIANTS,
        *, again: bool = False,
    ) -> dict[str, Side]:  # fmt: skip
        sides = {
            side: Side(f"{part}-{side}", kind, self.arguments(part, arguments), self.logs, kpolicy=side == "kpolicy")
            for side in ("stock", "kpolicy")
            if f"{part}-{side}" not in given_names(self.given.without)
        }
        for name, environ in variants.items():
            given = self.arguments(part, arguments)
            sides[name] = Side(f"{part}-{name}", kind, given, self.logs, kpolicy=True, **environ)
        if again:
            sides[AGAIN] = Side(f"{part}-{AGAIN}", kind, self.arguments(part, arguments), self.logs, kpolicy=False)
        return sides

    def plan(self) -> dict[str, str]:
        """The environment of a kpolicy with the planned ladder; empty without a plan."""
        return {"KPOLICY_PLAN": str(self.given.plan.resolve())} if self.given.plan else {}

    def arguments(self, part: str, arguments: dict[str, Any]) -> dict[str, Any]:
        model = MODEL[part.partition("-")[0]]
        # The sides share the GPU, and are given the same KV: the fraction is of what those before them left.
        memory = {"mem_fraction_static": 0.4, "max_total_tokens": 900_000}
        if model == "dsv2lite":
            memory = {"mem_fraction_static": 0.7, "max_total_tokens": 110_000}
        return {
            "model_path": str(self.given.models / model), **memory, **arguments,
            **json.loads(self.given.args),
        }  # fmt: skip

    def start(self, part: str, sides: dict[str, Side]) -> dict[str, dict[str, Any]]:
        """Start one after the other: captures are timed. What each says of its start."""
        seconds = STARTS_S[part.partition("-")[0]]
        said = {}
        for name, side in sides.items():
            said[name] = side.start(min(seconds, self.left_s))
            self.note(kind="start", part=part, side=name, **said[name])
        self.warm.add(MODEL[part.partition("-")[0]])
        return said


def steps(run: Run, part: str) -> None:
    """Steps by kind and size, those that are drawn, or those that a plan pads further, the sides in turn.

    All sides stay up, and each waits on its standard input while another runs a few steps. Their main threads are on
    one core, which changes with the load: the cores of a virtual machine can differ, and change, by more than what is
    looked for.
    """
    of_list = part in STEPS
    if part == "qwen-between" and not run.plan():
        raise ValueError("qwen-between takes the sizes that a plan hasn't: give one with --plan")
    planned = {"planned": run.plan()} if not of_list and run.plan() else NO_VARIANTS
    only = given_names(run.given.loads)
    loads = [("", *load) for load in STEPS[part] if not only or "-".join(map(str, load)) in only] if of_list else []
    if of_list and not loads:
        raise ValueError(f"--loads has no step of {part}'s list")
    sides = run.sides(part, "steps", {"max_running_requests": 1024}, planned, again=run.given.again)
    try:
        said = run.start(part, sides)
        if not of_list:
            loads = drawn(run.given.drawn) if part == "qwen-drawn" else between(said["stock"], said["planned"])
        for turn in range(run.given.preparations):
            for load in loads:
                if not in_rounds(run, sides, (part, "step" if of_list else "drawn", *load), turn):
                    return
    finally:
        for side in sides.values():
            side.end()


def in_rounds(run: Run, sides: dict[str, Side], load: tuple[Any, ...], turn: int) -> bool:
    """Prepare a load on all sides and let each run a few steps a round; whether there was time for all."""
    part, what, draw, kind, size = load
    rng = random.Random(f"{part} {kind} {size} {turn}")
    core = rng.choice(sorted(os.sched_getaffinity(0)))
    orders = orders_of(list(sides))
    ready = {}
    for name in orders[turn % len(orders)]:
        if run.left_s < 10:
            return False
        ready[name] = sides[name].ask(60, do="prepare", kind=kind, size=size, core=core)
    slowest = max(found["ms"] for found in ready.values())
    count, warm = (min(max(round(ms / slowest), 1), MOST_STEPS) for ms in (ROUND_MS, WARM_MS))
    for each in range(len(orders)):
        for place, name in enumerate(orders[(turn + each) % len(orders)]):
            if run.left_s < 5:
                return False
            found = {**ready[name], **sides[name].ask(60, do="take", count=count, warm=warm)}
            more = {"draw": draw} if draw else {}
            run.note(
                kind=what, part=part, side=name, turn=turn * len(orders) + each, step=kind, size=size, count=count,
                warm=warm, core=core, preparation=turn, place=place, **more, **found,
            )  # fmt: skip
    return True


def orders_of(sides: Sequence[T]) -> list[list[T]]:
    """Orders of the sides for as many rounds, each of which starts with another side than the one before.

    In all of them together each side has each place as often, and of up to three each comes after each other as often.
    """
    turned = [sides[0], *reversed(sides[1:])]
    return [[*each[first:], *each[:first]] for each in (sides, turned) for first in range(len(sides))]


def drawn(path: Path) -> list[tuple[str, str, int]]:
    """Loads drawn from the steps that a plan was made of, a size once, and decode steps of 1 to 256 requests alike."""
    steps = json.loads(path.read_text(encoding="utf-8"))["planned_from"]["histogram"]
    rng = random.Random(11)
    found = []
    for kind, table in (("decode", steps["decodes"]["1"]), ("extend", steps["others"])):
        sizes = rng.choices([int(size) for size in table], weights=table.values(), k=8)
        found += [("trace", kind, size) for size in sorted(set(sizes))]
    return [*found, *(("alike", "decode", rng.randint(low + 1, low + 32)) for low in range(0, 256, 32))]


def between(stock: Mapping[str, Any], planned: Mapping[str, Any]) -> list[tuple[str, str, int]]:
    """Loads of sizes that SGLang has graphs of and a plan hasn't, all decodes and every third prompt, and of one less.

    SGLang pads nothing at the sizes themselves, and any padding takes the host some launches: at one less both pad.
    """
    loads = []
    for kind, sizes, apart in (("decode", "decode_sizes", 1), ("extend", "prefill_sizes", 3)):
        lacking = sorted(set(stock[sizes]) - set(planned[sizes]), reverse=True)[::apart]
        loads += [("between", kind, size) for size in lacking]
        loads += [("below", kind, size - 1) for size in lacking if size > 1 and size - 1 not in stock[sizes]]
    return loads


def requests_of(path: Path, count: int, longest: int, speed: float) -> list[tuple[float, int, int]]:
    """(arrival, prompt tokens, output tokens) of the trace's first requests, arriving so many times as fast."""
    rows = []
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            prompt, output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            if prompt and output and prompt + output <= longest:
                rows.append((datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp(), prompt, output))
            if len(rows) == count:
                break
    first = rows[0][0]
    return [((at - first) / speed, prompt, output) for at, prompt, output in rows]


def given_names(text: str) -> list[str]:
    """The names in a list with commas."""
    return [name for name in text.split(",") if name]


def beside(text: str) -> dict[str, dict[str, str]]:
    """Sides that run the kpolicy of other trees: `NAME=FOLDER`, with commas between several."""
    found = {}
    for name, _, folder in (each.partition("=") for each in given_names(text)):
        tree = Path(folder).resolve()
        if not (tree / "integrations" / "kpolicy_sglang").is_dir():
            raise SystemExit(f"--beside {name}={folder}: there is no integrations/kpolicy_sglang in that folder")
        paths = (str(tree), str(tree / "integrations" / "kpolicy_sglang"), os.environ.get("PYTHONPATH", ""))
        found[name] = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return found


def trace(run: Run, part: str) -> None:
    """Throughput and gaps through the scheduler, the sides in turn."""
    qwen = part.startswith("qwen")
    concurrent, count = REQUESTS[part]
    count = run.given.requests or count
    extra: dict[str, Any] = {"max_running_requests": concurrent}
    if "mixed" in LOADS[part]:
        extra["enable_mixed_chunk"] = True
    if not qwen:
        extra["chunked_prefill_size"] = 2048
    requests = requests_of(run.given.trace, count, 7000, 400.0)
    variants = {}
    if part == "qwen-trace":
        variants = {name: VARIANTS[name] for name in given_names(run.given.variants)} | beside(run.given.beside)
    sides = run.sides(part, "trace", extra, variants)
    how = {"concurrent": concurrent, "stream": "streamed" not in LOADS[part]}
    try:
        run.start(part, sides)
        # The same burst with short answers: what a first one compiles isn't a side's own time.
        warm = [(at, prompt, min(output, WARM_TOKENS)) for at, prompt, output in requests[: len(requests) // 2]]
        for name in sides:
            sides[name].ask(90, do="run", requests=warm, **how)
        orders = orders_of(list(sides))
        for turn in range(run.given.repeats):
            for name in orders[turn % len(orders)]:
                if run.left_s < 25:
                    return
                limit_s = min(LIMIT_S, run.left_s - 10)
                found = sides[name].ask(limit_s + 10, do="run", requests=requests, limit_s=limit_s, **how)
                run.note(kind="trace", part=part, side=name, turn=turn, concurrent=concurrent, **found)
    finally:
        for side in sides.values():
            side.end()


def capture(run: Run, part: str) -> None:
    """Start-up alone: SGLang's list and a planned one to its largest sizes, kpolicy's and SGLang's to kpolicy's.

    Of DeepSeek-V2-Lite SGLang's and kpolicy's alone. Neither mixes batches, as by default.
    """
    name = "qwen" if part == "capture" else "dsv2"
    own: dict[str, Any] = {"enable_mixed_chunk": False}
    largest = {**own, "cuda_graph_max_bs_decode": 1024, "cuda_graph_max_bs_prefill": 8192}
    kinds: list[tuple[str, dict[str, Any], dict[str, str]]] = [("stock", own, {}), ("kpolicy", own, {})]
    if name == "qwen":
        kinds.insert(1, ("wide", largest, {}))
    if run.plan() and name == "qwen":
        kinds.append(("planned", own, run.plan()))
    kinds = [kind for kind in kinds if f"{part}-{kind[0]}" not in given_names(run.given.without)]
    # The first turn warms up what starts share, compiled kernels and files, and isn't counted; a slice of steps before
    # does so too. Later ones take turns in who goes first.
    orders = orders_of(kinds)
    turns = [
        (turn, *kind)
        for turn in range(-1, run.given.repeats)
        for kind in orders[turn % len(orders)]
        if turn >= 0 or MODEL[name] not in run.warm
    ]
    made: list[Side] = []
    try:
        # All import at once and then wait, so that nothing else runs beside a capture.
        for _, side_name, extra, environ in turns:
            arguments = run.arguments(name, {"max_running_requests": 1024, **extra})
            kpolicy = side_name in ("kpolicy", "planned")
            made.append(Side(f"{part}-{side_name}", "steps", arguments, run.logs, kpolicy=kpolicy, **environ))
        for side in made:
            side.hear(min(90, run.left_s))
        for (turn, side_name, _, _), side in zip(turns, made, strict=True):
            if run.left_s < 20:
                return
            kind = "start" if turn >= 0 else "warm start"
            run.note(kind=kind, part=part, side=side_name, turn=turn, **side.ask(min(90, run.left_s)))
            side.end()
    finally:
        for side in made:
            side.end()


def log(run: Run, part: str) -> None:
    """One kpolicy side with counters and a decision log; what it wrote, after it is killed, is decided again."""
    path = run.logs / "decisions.jsonl"
    extra = {"max_running_requests": 600, "enable_metrics": True}
    side = Side(
        f"{part}-kpolicy", "trace", run.arguments("qwen", extra), run.logs, kpolicy=True,
        KPOLICY_DECISION_LOG=str(path.resolve()),
    )  # fmt: skip
    try:
        run.start("qwen-log", {"kpolicy": side})
        requests = requests_of(run.given.trace, run.given.requests or 600, 7000, 400.0)
        limit_s = min(LIMIT_S, run.left_s - 30)
        found = side.ask(limit_s + 10, do="run", requests=requests, concurrent=600, limit_s=limit_s)
        counted = side.ask(30, do="counters")
    finally:
        side.end()
    command = [sys.executable, "-m", "kpolicy", "simulate", "--decisions", str(path), "--json"]
    again = subprocess.run(
        [*command, "--policy", "auto", "--policy", "sglang"], capture_output=True, text=True, check=False
    )
    run.note(
        kind="log", part=part, steps=found["steps"], counters=counted["counters"], size=path.stat().st_size,
        entries=len(path.read_text(encoding="utf-8").splitlines()) - 1, rc=again.returncode,
        said=again.stderr.replace(str(path), path.name)[-500:],
        policies=None if again.returncode else json.loads(again.stdout)["policies"],
    )  # fmt: skip


def check(run: Run, part: str) -> None:
    """Logits of a generated checkpoint against float32: see check.py."""
    for name in ("qwen", "dsv2"):
        if f"{part}-{name}" in given_names(run.given.without):
            continue
        side = Side(
            f"{part}-{name}", "check", {"family": name, "folder": str(run.logs / f"checkpoint-{name}")}, run.logs,
            kpolicy=True,
        )  # fmt: skip
        try:
            run.note(kind="check-start", part=part, model=name, **side.start(min(150, run.left_s)))
            run.note(kind="check", part=part, model=name, **side.ask(min(120, run.left_s), do="check"))
        except RuntimeError as error:
            run.note(kind="error", part=part, model=name, error=str(error))
        finally:
            side.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="folder of model shapes, each with config.json")
    parser.add_argument("--trace", type=Path, required=True, help="azure_llm_2023_conv.csv, or its beginning")
    parser.add_argument("--plan", type=Path, help="a ladder plan that ends at SGLang's own largest sizes")
    parser.add_argument("--drawn", type=Path, help="a ladder plan of another part of the trace, whose steps are drawn")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--logs", type=Path, help="where the processes' logs and the checkpoints go (default: --out)")
    parser.add_argument("--slices", default=",".join(SLICES))
    parser.add_argument("--variants", default=",".join(VARIANTS), help="further sides of qwen-trace; may be empty")
    parser.add_argument("--beside", default="", help="further sides of qwen-trace, kpolicy of other trees: NAME=FOLDER")
    parser.add_argument("--without", default="", help="sides that are left out: capture-wide,check-qwen")
    parser.add_argument("--again", action="store_true", help="stock once more beside both, in slices of steps")
    parser.add_argument("--loads", default="", help="steps of the fixed lists that are taken: decode-1,extend-64; all")
    parser.add_argument("--preparations", type=int, default=4, help="how often each load of steps is prepared")
    parser.add_argument("--warm", action="store_true", help="0.5B was started on this machine by an earlier call")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--requests", type=int, default=0, help="requests of a trace; 0 takes each slice's own number")
    parser.add_argument("--budget", type=float, default=440.0, help="seconds for all slices")
    parser.add_argument("--args", default="{}", help="JSON with further arguments of SGLang, for a dry run")
    given = parser.parse_args()
    beside(given.beside)
    known_loads = {f"{kind}-{size}" for each in STEPS.values() for kind, size in each}
    if strange := set(given_names(given.loads)) - known_loads:
        parser.error(f"--loads has {', '.join(sorted(strange))}; there are {', '.join(sorted(known_loads))}")
    run = Run(given)
    run.note(**about())
    for part in given.slices.split(","):
        started = time.monotonic()
        try:
            known = {"check": check, "capture": capture, "dsv2-capture": capture, "log": log}
            function = known.get(part) or (trace if "trace" in part else steps)
            if run.left_s > 40:
                function(run, part)
            else:
                run.note(kind="error", part=part, error="no time left")
        # One slice's failure must not take the others with it.
        except Exception as error:  # noqa: BLE001
            run.note(kind="error", part=part, error=f"{type(error).__name__}: {error}"[:800])
        run.note(kind="slice", part=part, s=round(time.monotonic() - started, 1))
        write(run.raw, run.out)
    for row in rows(json.loads(line) for line in run.raw.read_text(encoding="utf-8").splitlines()):
        print(
            f"{row['model']:17} {row['load']:48} {row['figure']:11} {row['stock']:10.3f} {row['kpolicy']:10.3f} "
            f"{row['ratio']:7.3f} [{row.get('low')}, {row.get('high')}]{of_again(row)}"
        )


def of_again(row: Mapping[str, Any]) -> str:
    """What a row tells of stock's second process, if there was one."""
    told = [(name, row[name]) for name in ("again", "against_again") if name in row]
    return "".join(f"  {name} {each['ratio']:.3f} [{each['low']}, {each['high']}]" for name, each in told)


def about() -> dict[str, Any]:
    """The device and versions."""
    from importlib.metadata import PackageNotFoundError, version

    versions = {}
    for name in ("sglang", "kpolicy", "kpolicy-sglang", "torch", "triton", "transformers"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:  # noqa: PERF203
            versions[name] = ""
    return {
        "kind": "about",
        "device": device_name(),
        "commit": commit_of(),
        "versions": versions,
        "at": time.strftime("%Y-%m-%d"),
    }


def device_name() -> str:
    """The names and drivers of the GPUs that this process can see; why they can't be told where nvidia-smi fails."""
    # It lists GPUs that this process can't see too.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    command = ["nvidia-smi", *([f"--id={visible}"] if visible else []), "--query-gpu=name,driver_version"]
    try:
        done = subprocess.run([*command, "--format=csv,noheader"], capture_output=True, text=True, check=False)
    except OSError as error:
        return _unknown(f"nvidia-smi can't be run: {error.strerror}")
    names = done.stdout.strip()
    if done.returncode or not names:
        return _unknown(f"{' '.join(command)} ended with {done.returncode}: {names or done.stderr.strip()}")
    return names


def _unknown(why: str) -> str:
    print(f"the device's name isn't known: {why}", file=sys.stderr)
    return f"unknown: {why}"


if __name__ == "__main__":
    main()
