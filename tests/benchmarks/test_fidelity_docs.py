"""docs/benchmarks.md: every cell and every latency of the last fidelity runs is there, as its result has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fidelity import RESULT

DOC = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text(encoding="utf-8").splitlines()
RUNS = {
    "rate-2-ninth": ("ninth, {mode}, {regime}", "0.5B, ninth"),
    "rate-2-tenth": ("tenth, {mode}, {regime}", "0.5B, tenth"),
    "dsv2lite-fourth": ("{mode}, {regime}", "DeepSeek-V2-Lite, fourth"),
    "small24-seventh": ("seventh, {regime}", "small, seventh"),
    "small24-eighth": ("eighth, {regime}", "small, eighth"),
}  # fmt: skip
"""Of each result: what its rows of cells begin with, and its name in the table of latencies."""
EARLIER = ("rate-2-seventh", "rate-2-eighth", "small24-fifth", "small24-sixth")
"""The runs before, told by one row each"""
COLUMNS = (("full", "middle"), ("piecewise", "middle"), ("piecewise", "saturated"), ("split", "middle"),
           ("split", "saturated"), ("eager", "host-bound"), ("piecewise", "host-bound"))  # fmt: skip
"""Of such a row: cells by mode and regime; of the small model's the last and the second alone."""
MOST, MOST_LATENCY = 0.05, 0.1
"""What is written in bold beyond it"""
NOISY, AGAIN_SHARE, AGAIN_TIMES = 0.03, 0.8, 3
"""The page's rule: from this noise on repeats decide, where so large a share of the cell's steps has so many."""
MOSTLY = 0.5
"""A host-bound cell of whose repeats fewer were host-bound holds to the rule's letter only."""


def share(x: float) -> str:
    return f"**{x:.1%}**" if x > MOST else f"{x:.1%}"


def repeated(result: dict[str, Any], mode: str, regime: str) -> dict[str, Any] | None:
    """A cell's repeats: of the steps that were in it in the run, where those were told apart."""
    rows = {(row["mode"], row["regime"]): row for row in result["measured_again"].get("all policies", [])}
    found: dict[str, Any] | None = rows.get((mode, f"{regime} in the run"), rows.get((mode, regime)))
    return found


def holds(row: dict[str, Any], again: dict[str, Any] | None) -> str:
    """Whether a cell is within the line, by the rule that the page gives."""
    error = row["error"]
    if row["noise"] >= NOISY:
        if again is None or again["steps"] < AGAIN_SHARE * row["steps"] or again["repeats"] < AGAIN_TIMES:
            return "not shown"
        error = again["error"]
        if error <= MOST and row["regime"] == "host-bound" and again["host_bound_share"] < MOSTLY:
            return "to the letter"
    return "yes" if error <= MOST else "no"


def cell(row: dict[str, Any], begin: str, again: dict[str, Any] | None) -> str:
    """A row of the page; repeats of five steps or fewer aren't told."""
    mode = "split" if row["mode"].startswith("split") else row["mode"]
    kinds = f"{share(row['kind_error'])} of {row['kind_steps']:,}" if row["kind_steps"] else ""
    parts = [begin.format(mode=mode, regime=row["regime"]), holds(row, again), f"{row['steps']:,}"]
    parts += [share(row["error"]), f"{row['bias']:+.1%}", share(row["noise"]), kinds]
    if again is not None and again["steps"] > 5:
        times = f"{again['steps']:,} x {again['repeats']:g}"
        parts += [times, share(again["error"]), f"{again['bias']:+.1%}", share(again["spread"])]
    return "".join(f"| {part} " if part else "| " for part in parts)


def cells(result: dict[str, Any], begin: str) -> list[str]:
    """All rows of the page that a result has, in its order."""
    rows = [row for row in result["policies"]["all policies"] if row["regime"] != "all"]
    return [cell(row, begin, repeated(result, row["mode"], row["regime"])) for row in rows]


def latency(found: dict[str, float], digits: int) -> str:
    error = f"**{found['error']:+.1%}**" if abs(found["error"]) > MOST_LATENCY else f"{found['error']:+.0%}"
    return f"{found['measured']:.{digits}f} / {found['simulated']:.{digits}f} ({error})"


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULT.with_name(f"fidelity-h200-{name}.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_told_as_its_result_has_it(name: str) -> None:
    """No cell is left out, those over the line are bold, and whether it holds is by the rule of the page."""
    result = read(name)
    begin, label = RUNS[name]
    assert any(f"-{name.split('-', 1)[1]}.json`" in line or f"-{name}.json`" in line for line in DOC)
    for expected in cells(result, begin):
        assert any(line.startswith(expected) for line in DOC), expected
    at = next(i for i, line in enumerate(DOC) if line.startswith(f"| {label} | `"))
    served = result["served"]["policies"]
    rows = {line.split(" | ")[1].strip("`"): line for line in DOC[at : at + len(served)]}
    assert set(rows) == set(served)
    for policy, found in served.items():
        assert rows[policy].endswith(f"| {latency(found['ttft_p50_ms'], 1)} | {latency(found['gap_p50_ms'], 2)} |")


def earlier(result: dict[str, Any], columns: tuple[tuple[str, str], ...]) -> str:
    """An earlier run's cells: the mean error of single steps and in brackets that of repeats, empty where none."""
    rows = {(row["mode"].split("/")[0], row["regime"]): row for row in result["policies"]["all policies"]}
    parts = []
    for key in columns:
        again = repeated(result, *key) or {"steps": 0}
        brackets = f" ({again['error'] * 100:.1f})" if again["steps"] > 5 else ""
        parts.append(f"{rows[key]['error']:.1%}{brackets}" if key in rows else "")
    return "".join(f"| {part} " if part else "| " for part in parts)


@pytest.mark.parametrize("name", EARLIER)
def test_an_earlier_run_is_told_as_its_result_has_it(name: str) -> None:
    """Its cells stand side by side in a row."""
    columns = (COLUMNS[-1], COLUMNS[1]) if name.startswith("small24") else COLUMNS
    expected = f"{earlier(read(name), columns)}| "
    ordinal = name.rsplit("-", 1)[1]
    assert any(line.startswith(f"| {ordinal}") and expected in line for line in DOC), expected
