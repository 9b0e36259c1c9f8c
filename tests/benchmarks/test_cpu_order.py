"""What docs/benchmarks.md tells of policies served in turn on a CPU is its result's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = " ".join((ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8").split())
RESULT: Any = json.loads((ROOT / "benchmarks" / "results" / "cpu_order.json").read_text(encoding="utf-8"))


def told(values: list[Any]) -> str:
    """Figures as a sentence lists them."""
    written = [f"{value:,}" for value in values]
    return ", ".join(written[:-1]) + f" and {written[-1]}"


def test_page_faults_in_the_order_of_serving() -> None:
    """Faults before and after are told in the order served, and what the first serve took beyond the third."""
    runs = [
        next(run for run in RESULT["in_order"] if run["code"] == code and run["verified"])
        for code in ("before", "after")
    ]
    before, after = (run["serves"] for run in runs)
    costs, loads = ([run[name] for run in runs] for name in ("overlap_cost", "load"))
    assert f"cost {costs[1]} by that table, where it was {costs[0]}" in PAGE
    assert f"(load {loads[1]}, {loads[0]} before)" in PAGE
    assert told([serve["minor_faults"] for serve in before]) in PAGE
    assert told([serve["minor_faults"] for serve in after]) in PAGE
    more = round(before[0]["processor_s"] - before[2]["processor_s"], 2)
    assert f"the first {more} s more of {before[0]['processor_s']} s" in PAGE
    assert before[0]["system_s"] - before[2]["system_s"] >= more


def test_turns_and_shares() -> None:
    """Busy times of the four turns; shares of halves beside each other; both policies where both cores are free."""
    for serve in (*RESULT["in_turns"]["serves"], *RESULT["both_cores_free"]["serves"]):
        assert f"{serve['busy_s']:.2f}" in PAGE
    shares = RESULT["overlap_cost"]
    free, placed = shares["both cores free"], shares["else"]
    assert f"had shares of {told(placed['after'])}." in PAGE
    assert f"shares are {told(free['after'])}, and {told(free['before'])} by the code before" in PAGE
    p50, p99, gaps = (
        [serve[name][at] for serve in RESULT["both_cores_free"]["serves"]]
        for name, at in (("ttft_ms", 0), ("ttft_ms", 1), ("gap_ms", 1))
    )
    assert f"gaps of {told([round(gap) for gap in gaps])} ms at p99" in PAGE
    assert f"after {told([round(each) for each in p50])} ms in the median" in PAGE
    assert f"{told([round(each / 1e3, 2) for each in p99])} s at p99." in PAGE


def test_attention() -> None:
    """A layer's attention by the mask's dimensions."""
    longest, middle = RESULT["attention_ms"][2], RESULT["attention_ms"][1]
    assert f"takes {longest['mask_of_4']:.0f} ms of a core instead of {longest['mask_of_3']:.0f}" in PAGE
    assert f"over 1,000 {middle['mask_of_4']:.1f} instead of {middle['mask_of_3']:.1f}" in PAGE
