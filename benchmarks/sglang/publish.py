"""Puts the rows of further runs into the published result file.

    python -m benchmarks.sglang.publish OUT [--results FOLDER]

OUT holds what `stock_vs_kpolicy` wrote of its starts since. Their runs go on with the published numbers. A row that was
measured again takes the place of the published one, which goes to ``earlier``; rows of other loads stay. Starts, checks
and logs are added to those that are there. The file is written whole or not at all.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.command import input_folder

NAME = "sglang_stock_vs_kpolicy.json"
RESULTS = Path(__file__).parents[1] / "results" / "h200"
ADDED = ("starts", "checks", "logs", "errors")
"""Lists that take in what is new"""

__all__ = ["published"]


def published(before: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The result with the rows of further runs.

    Args:
        before: the result that is published.
        new: what `rows.write` made of further runs, counted from 1.

    Raises:
        ValueError: they are of a device or of versions that the published ones aren't of, or are there already.
    """
    of_before, of_new = ([about(run) for run in result["runs"]] for result in (before, new))
    if strange := [each for each in of_new if each["device"] != of_before[-1]["device"]]:
        raise ValueError(f"runs of {strange[0]['device']} can't stand beside those of {of_before[-1]['device']}")
    if strange := [each for each in of_new if each["versions"] != of_before[-1]["versions"]]:
        raise ValueError(
            f"runs with {strange[0]['versions']} can't stand beside those with {of_before[-1]['versions']}"
        )
    first = len(before["runs"])

    def moved(lines: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return [{**line, "run": line["run"] + first} for line in lines]

    for name in ADDED:
        known = [_without_run(line) for line in before[name]]
        if any(_without_run(line) in known for line in new[name]):
            raise ValueError(f"some of its {name} are in the published file: give the folder of further runs alone")
    if told := [name for name in ("pooled", "apart") if new[name]]:
        raise ValueError(f"it has {' and '.join(told)} rows, which are of runs put together: leave those to rows.py")
    again = {_key(row): row for row in moved(new["rows"])}
    there = {_key(row) for row in before["rows"]}
    replaced = [row for row in before["rows"] if _key(row) in again]
    rows = [again.get(_key(row), row) for row in before["rows"]]
    rows += [row for key, row in again.items() if key not in there]
    return {
        **before,
        "runs": [*before["runs"], *moved(new["runs"])],
        "rows": rows,
        "earlier": [*before["earlier"], *replaced, *moved(new["earlier"])],
        **{name: [*before[name], *moved(new[name])] for name in ADDED},
    }


def about(run: Mapping[str, Any]) -> dict[str, Any]:
    """The GPU, without its driver, and the versions that rows depend on."""
    versions = {name: value.partition("+")[0] for name, value in run["versions"].items() if "kpolicy" not in name}
    return {"device": run["device"].partition(",")[0], "versions": versions}


def _without_run(line: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name != "run"}


def _key(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["model"], row["load"], row["figure"]


def main(argv: list[str] | None = None) -> None:
    """Read both, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=input_folder, help=f"folder with the {NAME} of further runs")
    parser.add_argument("--results", type=input_folder, default=RESULTS, help="folder of the published file")
    given = parser.parse_args(argv)
    target = given.results / NAME
    try:
        before, new = (json.loads((folder / NAME).read_text(encoding="utf-8")) for folder in (given.results, given.out))
        result = published(before, new)
    except (OSError, ValueError) as error:
        parser.error(f"nothing was published: {error}")
    partial = target.with_suffix(".part")
    partial.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    partial.replace(target)
    took = sum(row["run"] > len(before["runs"]) for row in result["rows"])
    print(f"{took} rows of {len(new['runs'])} runs are in {NAME}, of {len(result['rows'])} in all")


if __name__ == "__main__":
    main()
