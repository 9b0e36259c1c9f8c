"""What the raw answers of stock_vs_kpolicy.py come to: the rows of its result file.

    python benchmarks/sglang/rows.py OUT [--pooled RUN,RUN] [--apart RUN]

writes OUT/sglang_stock_vs_kpolicy.json anew from OUT/raw.jsonl.

Rows are {model, load, figure, run, stock, kpolicy, ratio, low, high}: the ratio is above 1 where kpolicy is better,
with a 95% interval over the repeats, null for a single one. A preparation of steps counts once, by the median of its
pairs, since core, KV pages and graphs are the same in all of them. Each drawn size has a row (with the ratio of each
turn and no interval where it was prepared once), and all have one whose interval is over the ``sizes`` it counts. The
ratio is the mean of the repeats' (of their logarithms, as the interval, which is Student's), however many there are;
``preparations`` has that of each preparation where there are several. Where a side had more turns than the other those
of both are compared, and are all that a row tells. Of a trace ``pace`` is a request's time from its first token to its
last over the tokens after the first, and ``decode step at equal rows`` the mean over numbers of rows of a decode step
that another follows, each number as often as the side that had it less often.

``run`` counts the starts of the script, whose code may differ: a load that was measured again has the later run's row,
and those of traces before it are in ``earlier``. Runs are put together only where that is asked for (``pooled``, over
the pairs of all of them), and those of code that isn't what is there now are in ``apart``. In the published file steps
that run 37 has of up to 23 preparations keep its rows: those of run 39, of the same code and four preparations, are in
``fewer``. Rows of steps before both are in ``earlier`` too.

Where stock ran once more beside both (``--again``), ``again`` in a row is the same of stock against that process, whose
ratio tells what two processes of the same differ by, and ``against_again`` is that process against kpolicy.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
if str(HERE.parents[1]) not in sys.path:
    sys.path.append(str(HERE.parents[1]))  # run as a script

from benchmarks.student import student  # noqa: E402

MODEL = {"qwen": "qwen05b", "dsv2": "dsv2lite"}
NAMES = {"qwen05b": "Qwen2.5-0.5B", "dsv2lite": "DeepSeek-V2-Lite"}
VARIED = {"order": ", KPOLICY_TURNS=0"}
"""What the load of a side beside both is called; others go by the side's own name."""
TRACE = "conversation trace, "
LOADS = {
    "qwen-trace": "", "qwen-mixed-trace": ", mixed chunks", "qwen-offline-trace": ", not streamed",
    "dsv2-trace": ", mixed chunks",
}  # fmt: skip
PLANNED = "SGLang's sizes against planned ones that end at the same"
CAPTURES = {
    PLANNED: ("stock", "planned"),
    "SGLang's list to kpolicy's largest sizes against kpolicy's sizes": ("wide", "kpolicy"),
    "SGLang's sizes against kpolicy's": ("stock", "kpolicy"),
}
"""The sides of each row of captures: SGLang's, ours."""
DRAWS = {
    "trace": "of distinct sizes drawn from the trace", "alike": "of 1 to 256 requests alike",
    "between": "of sizes that SGLang has graphs of and the plan hasn't",
    "below": "of one less than sizes that SGLang has graphs of and the plan hasn't",
    "": "of 8 or 12 sizes, runs to 4 and their plan",
}  # fmt: skip
AGAIN = "again"
"""The side that is stock once more."""
PAIRS = {"": ("stock", "kpolicy"), "again": ("stock", AGAIN), "against_again": (AGAIN, "kpolicy")}
"""Which two sides are compared: in a row itself, and in what it holds where stock ran once more."""
NONE_SHARED: Mapping[int, int] = {}
SERVED = ("step", "trace", "check", "drawn", "log")
"""Kinds of answers that a slice is run for."""


def by_run(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The raw answers with the number of their run, counted from 1: each start of the script says what it is first."""
    found, run = [], 0
    for line in lines:
        run += line["kind"] == "about"
        found.append({"run": run, **line})
    return found


def rows(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the raw answers come to, run by run; of a load that was measured again the later run's."""
    values: dict[tuple[str, str, str], dict[str, dict[int, float]]] = {}
    how: dict[tuple[str, str, str], dict[str, Any]] = {}
    runs: dict[tuple[str, str, str], int] = {}
    preparations: dict[tuple[str, str, str], dict[int, int]] = {}
    drawn_ms: dict[tuple[int, int, str, str], dict[str, dict[tuple[str, int], dict[str, Any]]]] = {}

    over_sizes: set[tuple[str, str, str]] = set()
    decodes: dict[tuple[int, int, str, str], dict[str, dict[str, list[float]]]] = {}

    def put(model: str, load: str, figure: str, line: dict[str, Any], value: float, **more: Any) -> None:
        key = (NAMES[MODEL[model]], load, figure)
        if runs.setdefault(key, line["run"]) != line["run"]:
            runs[key], values[key], how[key], preparations[key] = line["run"], {}, {}, {}
        values.setdefault(key, {}).setdefault(line["side"], {})[line["turn"]] = value
        if "preparation" in line:
            preparations.setdefault(key, {})[line["turn"]] = line["preparation"]
        for name, each in more.items():
            how.setdefault(key, {})[f"{line['side']}_{name}"] = each

    numbered = by_run(lines)
    varied = sorted({line["side"] for line in numbered if line["kind"] == "trace"} - {"stock", "kpolicy"})
    for line in numbered:
        if "error" in line or "part" not in line:
            continue
        model = line["part"].partition("-")[0]
        if line["kind"] == "step":
            beside = "32 decodes + " if line["step"] == "mixed" else ""
            load = f"{beside}{line['step'] if not beside else 'extend'} {line['size']}"
            more = {"order": line["order"]} if "order" in line else {}
            put(model, load, "step ms", line, line["ms"], served=line["served"], **more)
        elif line["kind"] == "trace" and "req_per_s" in line:
            load = f"{TRACE}{line['concurrent']} requests at once{LOADS[line['part']]}"
            figures = [("requests/s", "req_per_s"), ("tokens/s", "tok_per_s")]
            if line["part"] != "qwen-offline-trace":
                figures += [("gap p99 ms", "gap_p99_ms"), ("gap p50 ms", "gap_p50_ms")]
                for words, name in (("first token", "ttft"), ("pace", "pace")):
                    figures += [(f"{words} p{q} ms", f"{name}_p{q}_ms") for q in (50, 99) if f"{name}_p{q}_ms" in line]
            for figure, name in figures:
                if line["side"] in ("stock", "kpolicy"):
                    put(model, load, figure, line, line[name])
                for variant in varied if line["part"] == "qwen-trace" else ():
                    if line["side"] in (variant, "stock"):
                        sided = {**line, "side": "stock" if line["side"] == "stock" else "kpolicy"}
                        put(model, load + VARIED.get(variant, f", {variant}"), figure, sided, line[name])
            if "decodes" in line and line["side"] in ("stock", "kpolicy"):
                decodes.setdefault((line["run"], line["turn"], model, load), {})[line["side"]] = line["decodes"]
        elif line["kind"] == "start" and line["part"].endswith("capture") and "prefill_s" in line:
            model = "qwen" if model == "capture" else model
            for load, (stock, ours) in CAPTURES.items():
                if line["side"] not in (stock, ours):
                    continue
                sized = {**line, "side": "kpolicy" if line["side"] == ours else "stock"}
                count = len(line["decode_sizes"]) + len(line["prefill_sizes"])
                put(model, load, "capture s", sized, capture_s(line), sizes=count)
                if "init_s" in line:
                    put(model, load, "start-up s", sized, line["init_s"], sizes=count)
                put(model, load, "graph MiB", sized, line["prefill_mib"] + line["decode_mib"], sizes=count)
        elif line["kind"] == "drawn":
            for ours, words in (("kpolicy", "kpolicy's sizes"), ("planned", "planned sizes")):
                if line["side"] in (ours, "stock", AGAIN):
                    load = DRAWS[line.get("draw", "")]
                    sides = drawn_ms.setdefault((line["run"], line["turn"], load, words), {})
                    sides.setdefault(line["side"].replace(ours, "kpolicy"), {})[line["step"], line["size"]] = line
    for (run, turn, load, words), by_side in drawn_ms.items():
        if not {"stock", "kpolicy"} <= by_side.keys():
            continue
        of_all = set.intersection(*(set(by_size) for by_size in by_side.values()))
        for kind in ("decode", "extend"):
            sizes = sorted(size for size in of_all if size[0] == kind)
            for side, by_size in by_side.items() if sizes else ():
                what = ("qwen", f"{kind} steps {load}, {words}")
                if not all("preparation" in by_size[size] for size in sizes):
                    mean = statistics.fmean(by_size[size]["ms"] for size in sizes)
                    put(*what, "mean step ms", {"run": run, "turn": turn, "side": side}, mean, sizes=len(sizes))
                    continue
                # Over all sizes each is one repeat; of a size each preparation is.
                for size in sizes:
                    line = {"run": run, "turn": size[1] * 100 + turn, "side": side, "preparation": size[1]}
                    put(*what, "step ms", line, by_size[size]["ms"], sizes=len(sizes))
                    alone = f"{kind} {size[1]} {load}, {words}"
                    line["preparation"] = by_size[size]["preparation"]
                    put("qwen", alone, "step ms", line, by_size[size]["ms"])
                    over_sizes.add((NAMES[MODEL["qwen"]], what[1], "step ms"))
    for (run, turn, model, load), steps in decodes.items():
        for side, ms in at_equal_rows(steps).items():
            put(model, load, "decode step at equal rows ms", {"run": run, "turn": turn, "side": side}, ms)
    found = []
    for (model, load, figure), measured in values.items():
        if measured.get("stock", {}).keys() & measured.get("kpolicy", {}).keys():
            key = model, load, figure
            named = {"model": model, "load": load, "figure": figure, "run": runs[key]}
            told = _told(
                measured, more="/s" in figure, preparations=preparations.get(key, NONE_SHARED),
                repeats="sizes" if key in over_sizes else "repeats",
            )  # fmt: skip
            found.append(named | told | (how.get(key, {}) if key not in over_sizes else {}))
    return found


def at_equal_rows(sides: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """The mean milliseconds of a decode step by side, over the numbers of rows that both had; nothing where none is.

    Args:
        sides: by side and number of rows, how many such steps there were and the median milliseconds of one.
    """
    if not {"stock", "kpolicy"} <= sides.keys():
        return {}
    shared = sorted(sides["stock"].keys() & sides["kpolicy"].keys())
    often = [min(sides[side][rows][0] for side in ("stock", "kpolicy")) for rows in shared]
    return {
        side: sum(count * sides[side][rows][1] for rows, count in zip(shared, often, strict=True)) / sum(often)
        for side in ("stock", "kpolicy") if shared
    }  # fmt: skip


def capture_s(start: Mapping[str, Any]) -> float:
    """Seconds of a start that went to graphs: all that is done around the captures too, but for kpolicy's measuring.

    Runs to 14 have the captures alone.
    """
    if "graphs_s" not in start:
        return float(start["prefill_s"] + start["decode_s"])
    return float(start["graphs_s"] - ((start.get("kpolicy") or {}).get("measuring_s") or 0.0))


def _told(
    sides: dict[str, dict[int, float]], *, more: bool, preparations: Mapping[int, int], repeats: str
) -> dict[str, Any]:
    """What a row tells of its sides: stock against kpolicy, and each against stock once more where that ran.

    Args:
        sides: a figure by side and turn.
        more: whether more is better.
        preparations: the preparation of each turn that shares one with others.
        repeats: what the repeats are called.
    """
    found = {}
    for name, (stock, ours) in PAIRS.items():
        if sides.get(stock, {}).keys() & sides.get(ours, {}).keys():
            pair = _compared({"stock": sides[stock], "kpolicy": sides[ours]}, more=more, preparations=preparations)
            if repeats == "sizes":
                pair.pop("preparations", None)  # each size has a row
            words = {"stock": stock, "kpolicy": ours, "repeats": repeats}
            found[name] = {words.get(word, word): value for word, value in pair.items()}
    return found.pop("") | found


def _compared(
    sides: dict[str, dict[int, float]], *, more: bool, preparations: Mapping[int, int] = NONE_SHARED
) -> dict[str, Any]:
    """Medians, the ratio that is above 1 where kpolicy is better, and its 95% interval: None for a single pair.

    All of them are of the turns that both sides had. Several turns of a single preparation have each its ratio.

    Args:
        sides: a figure by side and turn.
        more: whether more is better.
        preparations: the preparation of each turn that shares one with others.
    """
    turns = sorted(sides["stock"].keys() & sides["kpolicy"].keys())
    prepared: dict[int, list[float]] = {}
    for turn in turns:
        stock, ours = sides["stock"][turn], sides["kpolicy"][turn]
        log = math.log(max(ours, 1e-9) / max(stock, 1e-9)) * (1 if more else -1)
        prepared.setdefault(preparations.get(turn, turn), []).append(log)
    logs = [statistics.median(each) for each in prepared.values()]
    medians = {
        name: round(statistics.median([sides[name][turn] for turn in turns]), 4) for name in ("stock", "kpolicy")
    }
    middle, low, high = _mean(logs)
    found: dict[str, Any] = {**medians, "ratio": round(math.exp(middle), 4), "repeats": len(logs)}
    found |= {
        "low": None if low is None else round(math.exp(low), 4),
        "high": None if high is None else round(math.exp(high), 4),
    }
    if len(logs) == 1 < len(turns):
        found["turns"] = [round(math.exp(each), 4) for each in next(iter(prepared.values()))]
    elif not preparations and len(logs) > 1:
        found["pairs"] = [round(math.exp(each), 4) for each in logs]
    elif len(logs) > 1:
        found["preparations"] = [round(math.exp(each), 4) for each in logs]
    return found


def _mean(values: list[float]) -> tuple[float, float | None, float | None]:
    """Mean and Student's 95% interval."""
    count = len(values)
    if count < 2:
        return values[0] if values else float("nan"), None, None
    mean = statistics.fmean(values)
    half = student(count - 1) * statistics.stdev(values) / math.sqrt(count)
    return mean, mean - half, mean + half


def pooled(found: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the same load and figure put together: over the pairs of all of their runs, each of which counts once."""
    alike: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in found:
        if "pairs" in row:
            # Captures of other numbers of sizes aren't the same load.
            key = row["model"], row["load"], row["figure"], row.get("kpolicy_sizes")
            alike.setdefault(key, []).append(row)
    together = []
    for (model, load, figure, _), each in alike.items():
        if len(each) > 1:
            pairs = [pair for row in each for pair in row["pairs"]]
            ratio, low, high = (
                None if value is None else math.exp(value) for value in _mean(list(map(math.log, pairs)))
            )
            together.append(
                {"model": model, "load": load, "figure": figure, "runs": [row["run"] for row in each],
                 "ratio": ratio, "low": low, "high": high, "repeats": len(pairs), "pairs": pairs}
            )  # fmt: skip
    return [{k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()} for row in together]


def write(raw: Path, out: Path, *, together: Sequence[int] = (), apart: Sequence[int] = ()) -> None:
    """The result file, from all raw answers there are.

    Args:
        raw: the raw answers.
        out: the folder of the result file.
        together: runs whose traces and captures are put together too.
        apart: runs of code that isn't what is there now.
    """
    lines = by_run(json.loads(line) for line in raw.read_text(encoding="utf-8").splitlines())
    served = {(line["part"], line.get("model")): line["run"] for line in lines if line["kind"] in SERVED}
    kept = [line for line in lines if line["run"] not in apart]
    found = rows(kept)
    latest = {(row["model"], row["load"], row["figure"]): row["run"] for row in found}
    of_run = {run: rows([line for line in lines if line["run"] == run]) for run in {line["run"] for line in lines}}
    traces = [row for run in sorted(of_run) for row in of_run[run] if row["load"].startswith(TRACE)]
    captures = [row for run in sorted(of_run) for row in of_run[run] if row["load"] in CAPTURES]
    result = {
        "what": "stock SGLang against SGLang with kpolicy, alternating in one run",
        "command": "python benchmarks/sglang/stock_vs_kpolicy.py --models MODELS --trace TRACE --out OUT",
        "runs": [line for line in lines if line["kind"] == "about"], "rows": found,
        "earlier": [
            row
            for row in traces
            if row["run"] not in apart and row["run"] < latest[row["model"], row["load"], row["figure"]]
        ],
        "pooled": pooled(row for row in (*traces, *captures) if row["run"] in together),
        "apart": [row for run in apart for row in of_run.get(run, [])],
        "checks": [line for line in lines if line["kind"] == "check"],
        "logs": [line for line in lines if line["kind"] == "log"],
        "starts": [line for line in lines if line["kind"] == "start"],
        # A slice that failed once and was run again since is no error.
        "errors": [
            line
            for line in lines
            if line["kind"] == "error" and served.get((line["part"], line.get("model")), 0) <= line["run"]
        ],
    }  # fmt: skip
    target = out / "sglang_stock_vs_kpolicy.json"
    partial = target.with_suffix(".part")
    partial.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    partial.replace(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder with raw.jsonl")
    parser.add_argument("--pooled", default="", help="runs whose traces and captures are put together too: 7,11")
    parser.add_argument("--apart", default="", help="runs of code that isn't what is there now")
    given = parser.parse_args()
    together, apart = ([int(run) for run in text.split(",") if run] for text in (given.pooled, given.apart))
    write(given.out / "raw.jsonl", given.out, together=together, apart=apart)


if __name__ == "__main__":
    main()
