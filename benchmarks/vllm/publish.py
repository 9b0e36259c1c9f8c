"""From the folders that GPU calls left, what `benchmarks/results/h200` keeps of vLLM, and a table for the docs.

Of a row measured in several folders the last is taken. What was published before stays, with its date, but for loads
and models that all its sides have served again. Each row names its device and versions, and of several nothing is
written: another GPU's or vLLM's results go into a folder of their own. How each call was made is kept beside its rows.

Run: ``python -m benchmarks.vllm.publish FOLDER... --date D [--results FOLDER]``.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.vllm.rows import MACHINE, machine, machines, say
from benchmarks.vllm.summary import compared
from kpolicy.errors import ConfigError

RAW = ("starts.jsonl", "raw.jsonl")
TOLD = ("vllm_starts.json", "vllm_stock_vs_kpolicy.json")
"""Where the calls that made those rows tell how they were made"""
ERROR = re.compile(r"(?:\[rank\d+\]: )?((?:\w+\.)*\w*(?:Error|Exception|Interrupt)(?:: .*)?)$")
"""The line of an error below its traceback"""
FOLDERS = re.compile(r"(?<![\w.:/])/(?:[^\s/:]+/)+")
"""Of an absolute path"""
COUNTED = ("counters", "steps", "graphs")
"""What a shim tells of a call besides its costs"""
COMMANDS = (
    "python -m benchmarks.vllm.starts --model FOLDER --plan FILE --out OUT",
    "python -m benchmarks.vllm.stock_vs_kpolicy --models FOLDER --traces FOLDER --plan FILE --sides SIDES --out OUT",
)


def gathered(folders: Iterable[Path]) -> list[dict[str, Any]]:
    """Every raw row, each (model, load, requests, side, repeat) once, with its folder's device and versions.

    Raises:
        ConfigError: a folder's rows are of several devices or versions.
    """
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for folder in folders:
        lines = [
            line
            for name in RAW
            if (folder / name).exists()
            for line in (folder / name).read_text().splitlines()
            if line
        ]
        found = [json.loads(line) for line in lines]
        for row in _named(found, next(iter(machines(found)), {})):
            rows[(*_call(row), row.get("requests"), row["side"], row["repeat"])] = row
    return list(rows.values())


def _named(rows: Iterable[dict[str, Any]], about: dict[str, Any]) -> list[dict[str, Any]]:
    """Those rows; the ones that name no device and versions are of these."""
    return [row if machine(row) else {**row, **about} for row in rows]


def checks(folders: Iterable[Path]) -> list[dict[str, Any]]:
    """The correctness results, the last of each model."""
    found: dict[str, dict[str, Any]] = {}
    for folder in folders:
        path = folder / "vllm_correct.json"
        if path.exists():
            written = json.loads(path.read_text())
            found |= {result["model"]: {"date": written["date"], **result} for result in written["results"]}
    return [in_short(result) for result in found.values()]


def in_short(check: dict[str, Any]) -> dict[str, Any]:
    """A check, of whose failures the first line and the error are kept, without folders of the machine."""
    failed = {label: _error(text) for label, text in check.get("failed", {}).items()}
    return {**check, "failed": failed} if failed else check


def _error(text: str) -> str:
    """Which engine ended how, and the last error that its output has; its last line where it has none."""
    first, *rest = text.strip().splitlines() or [""]
    errors = [found[1] for found in map(ERROR.match, rest) if found is not None]
    return FOLDERS.sub("", " ".join([first, *(errors or rest)[-1:]]))


def calls(folders: Iterable[Path], rows: Sequence[dict[str, Any]], target: Path) -> list[dict[str, Any]]:
    """How each call that rows are of was made, as it told: command, commit, what was cut, and its sides' cost tables.

    ``shims`` has what each side's shim counted: events, steps by mode and reason with tokens and padding, and its
    graphs as (key, bytes, seconds of its capture, hits). Calls of starts have neither: nothing is read of their sides.

    Args:
        folders: of the calls.
        rows: all that are published.
        target: the file with the calls that were published before.
    """
    before = json.loads(target.read_text()).get("calls", []) if target.exists() else []
    found = {each["call"]: each for each in before}
    for path in (folder / name for folder in folders for name in TOLD):
        told = json.loads(path.read_text()) if path.exists() else {}
        if "call" in told:
            tables = [] if path.name == "vllm_starts.json" else sorted(path.parent.glob("shim_*.json"))
            of_side = {file.stem.removeprefix("shim_"): json.loads(file.read_text()) for file in tables}
            costs = {side: shim.get("costs", "") for side, shim in of_side.items()}
            about = {name: told[name] for name in ("call", "command", "commit", "cut_by_the_budget")}
            shims = {side: {name: shim[name] for name in COUNTED if name in shim} for side, shim in of_side.items()}
            found[told["call"]] = {**about, "costs": costs, **({"shims": shims} if any(shims.values()) else {})}
    wanted = {row.get("call") for row in rows}
    return [each for name, each in sorted(found.items()) if name in wanted]


def kept(rows: Sequence[dict[str, Any]], target: Path) -> list[dict[str, Any]]:
    """The rows published before, each with its date, device and versions, but for calls whose sides all served again.

    A call that had a side which none of the new rows of a load is of still has the only pairs with that side.
    """
    if not target.exists():
        return []
    published = json.loads(target.read_text())
    about = machine({"gpu": published["device"], **published["versions"]})
    new, before = _sides(rows), _sides(published["rows"])

    def stays(call: tuple[Any, ...]) -> bool:
        again = {side for other, sides in new.items() if other[:2] == call[:2] for side in sides}
        return call not in new and not before[call] <= again

    rest = [row for row in published["rows"] if stays(_call(row))]
    return [{"date": published["date"], **row} for row in _named(rest, about)]


def _sides(rows: Iterable[dict[str, Any]]) -> dict[tuple[Any, ...], set[str]]:
    """The sides that served, by load and call."""
    found: dict[tuple[Any, ...], set[str]] = {}
    for row in rows:
        found.setdefault(_call(row), set()).add(row["side"])
    return found


def _call(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["model"], row["load"], row.get("call")


def table(found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Markdown, a figure a row, a table a pair of sides; ``host`` as `summarise` has it."""
    lines: list[str] = []
    for pair, rows in found.items():
        base, side = pair.split()
        lines += ["", f"| model | load | figure | {base} | {side} | ratio | 95% interval | n | host | date |"]
        lines.append("|---" * 10 + "|")
        for row in rows:
            bounds = "" if row["low"] is None else f"{row['low']:.2f} to {row['high']:.2f}"
            lines.append(
                f"| {row['model']} | {row['load']} | {row['figure']} | {row[base]:g} | {row[side]:g} | "
                f"{row['ratio']:.2f} | {bounds} | {row['repeats']} | {row.get('host', '')} | {row['date']} |"
            )
    return lines


def write(target: Path, content: Any, rows: Sequence[dict[str, Any]] | None = None) -> None:
    """A file, whole or not at all; `rows` come last in its object, a line each."""
    text = json.dumps(content, indent=1)
    if rows is not None:
        lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
        text = f'{text[:-2]},\n "rows": [\n{lines}\n ]\n}}'
    target.with_suffix(".tmp").write_text(text + "\n")
    target.with_suffix(".tmp").replace(target)


def main(argv: Sequence[str] | None = None) -> int:
    """Gather, write, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--date", required=True)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/h200"))
    options = parser.parse_args(argv)
    raw = options.results / "raw" / "vllm_stock_vs_kpolicy.json"
    try:
        rows, checked = gathered(options.folders), checks(options.folders)
        earlier_rows = kept(rows, raw)
        about = next(iter(machines([*earlier_rows, *rows])), {})
    except ConfigError as error:
        say(f"nothing was published: {error}")
        return 2
    if not rows and not checked:
        say(f"nothing was measured in {', '.join(map(str, options.folders))}: no {' or '.join(RAW)} there.")
        return 2
    head = {
        "commands": COMMANDS, "date": options.date, "device": about.get("gpu"),
        "versions": {name: about.get(name) for name in MACHINE if name != "gpu"},
    }  # fmt: skip
    raw.parent.mkdir(parents=True, exist_ok=True)
    if rows:
        rows = [*earlier_rows, *({**row, "date": options.date} for row in rows)]
        found = compared(rows)
        for line in table(found):
            say(line)
        made = calls(options.folders, rows, raw)
        write(options.results / "vllm_stock_vs_kpolicy.json", found.pop("stock kpolicy", []))
        write(options.results / "vllm_sides.json", {**head, "pairs": found})
        write(raw, {**head, "calls": made}, rows)
    if checked:
        command, target = "python -m benchmarks.vllm.correct --out OUT", options.results / "vllm_correct.json"
        models = {result["model"] for result in checked}
        earlier = json.loads(target.read_text())["results"] if target.exists() else []
        checked = [*(result for result in earlier if result["model"] not in models), *checked]
        write(target, {"command": command, "results": checked})
    return 0


if __name__ == "__main__":
    sys.exit(main())
