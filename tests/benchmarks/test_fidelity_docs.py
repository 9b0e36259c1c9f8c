"""docs/benchmarks.md: every cell and every latency of the last fidelity runs is there, as its result has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fidelity import RESULT

DOC = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text(encoding="utf-8").splitlines()
RUNS = {
    "rate-2-seventh": ("", "0.5B"), "rate-2-eighth": ("", "0.5B, `vllm` alone"),
    "dsv2lite-fourth": ("", "DeepSeek-V2-Lite"),
    "small24-fifth": ("fifth, ", "small, fifth"), "small24-sixth": ("sixth, ", "small, sixth"),
}  # fmt: skip
"""Of each result: what its rows of cells begin with, and its name in the table of latencies."""
MOST, MOST_LATENCY = 0.05, 0.1
"""What is written in bold beyond it"""


def share(x: float) -> str:
    return f"**{x:.1%}**" if x > MOST else f"{x:.1%}"


def cell(row: dict[str, Any], begin: str, again: dict[str, Any] | None) -> str:
    """A row of the page; repeats of five steps or fewer aren't told."""
    mode = "split, decodes beside;" if row["mode"].startswith("split") else f"{row['mode']},"
    name = f"{begin}{row['regime']}" if begin else f"{mode} {row['regime']}"
    kinds = f"{share(row['kind_error'])} of {row['kind_steps']:,}" if row["kind_steps"] else ""
    parts = [name, f"{row['steps']:,}", share(row["error"]), f"{row['bias']:+.1%}", share(row["noise"]), kinds]
    if again is not None and again["steps"] > 5:
        times = f"{again['steps']:,} x {again['repeats']:g}"
        parts += [times, share(again["error"]), f"{again['bias']:+.1%}", share(again["spread"])]
    return "".join(f"| {part} " if part else "| " for part in parts)


def latency(found: dict[str, float], digits: int) -> str:
    error = f"**{found['error']:+.1%}**" if abs(found["error"]) > MOST_LATENCY else f"{found['error']:+.0%}"
    return f"{found['measured']:.{digits}f} / {found['simulated']:.{digits}f} ({error})"


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_told_as_its_result_has_it(name: str) -> None:
    """No cell is left out, and those over the line are bold."""
    result = json.loads(RESULT.with_name(f"fidelity-h200-{name}.json").read_text(encoding="utf-8"))
    begin, label = RUNS[name]
    assert any(f"-{name.split('-', 1)[1]}.json`" in line or f"-{name}.json`" in line for line in DOC)
    again = {(row["mode"], row["regime"]): row for row in result["measured_again"].get("all policies", [])}
    for row in result["policies"]["all policies"]:
        if row["regime"] != "all":
            expected = cell(row, begin, again.get((row["mode"], row["regime"])))
            assert any(line.startswith(expected) for line in DOC), expected
    at = next(i for i, line in enumerate(DOC) if line.startswith(f"| {label} | `"))
    served = result["served"]["policies"]
    rows = {line.split(" | ")[1].strip("`"): line for line in DOC[at : at + len(served)]}
    assert set(rows) == set(served)
    for policy, found in served.items():
        assert rows[policy].endswith(f"| {latency(found['ttft_p50_ms'], 1)} | {latency(found['gap_p50_ms'], 2)} |")
