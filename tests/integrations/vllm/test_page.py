"""docs/measured_vllm.md: its tables are those of the published results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = (ROOT / "docs" / "measured_vllm.md").read_text()
MODELS = ("qwen05b", "dsv2lite", "llama8b")
MEASURED = {
    "decode-768-64": "768 decodes at once",
    "decode-1000-64": "1,000 decodes at once",
    "burst-768": "Burst of 768 requests of 4 tokens",
    "code-2048": "Azure code, steps of 2,048",
    "code-8192": "Azure code, steps of 8,192",
    "chat": "Azure chat",
}
FIGURES = {
    "requests_per_s": "requests/s", "gap_p50_ms": "gap p50 ms", "gap_p99_ms": "gap p99 ms",
    "ttft_p50_ms": "first token p50 ms", "ttft_p99_ms": "first token p99 ms",
}  # fmt: skip
SHORT = 0.99
"""A ratio below it is bold"""
SIMULATED = {
    "code-2048": "Azure code, steps of 2,048",
    "code-8192": "Azure code, steps of 8,192, vLLM's default here",
    "chat": "Azure chat, 40 requests/s",
    "decode-768-64": "768 decodes at once",
    "decode-1000-64": "1,000 decodes at once",
    "burst-768": "Burst of 768 short prompts",
}
SIDES = {"kpolicy": "as it is", "paced 1:1": "`1:1`", "paced latency": "`latency`"}
SHOWN = ("requests/s", "gap p50 ms", "gap p99 ms", "ttft p50 ms", "ttft p99 ms")


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def cell(row: dict[str, Any]) -> str:
    """Medians of both sides, and the ratio with its interval, which one pair hasn't."""
    bounds = "" if row["low"] is None else f" ({row['low']:.2f} to {row['high']:.2f})"
    ratio = f"{row['ratio']:.2f}"
    return (
        f"{number(row['stock'])}, {number(row['kpolicy'])}: {f'**{ratio}**' if row['ratio'] < SHORT else ratio}{bounds}"
    )


def measured() -> Iterator[str]:
    rows = json.loads((RESULTS / "h200" / "vllm_stock_vs_kpolicy.json").read_text())
    by = {(row["model"], row["load"], row["figure"]): row for row in rows}
    for load, title in MEASURED.items():
        for place, (figure, name) in enumerate(FIGURES.items()):
            cells = [cell(by[model, load, figure]) if (model, load, figure) in by else "" for model in MODELS]
            yield f"| {'' if place else title} | {name} | {' | '.join(cells)} |"


def simulated() -> Iterator[str]:
    rows = json.loads((RESULTS / "vllm_simulated.json").read_text())["rows"]
    for load, title in SIMULATED.items():
        for side, name in SIDES.items():
            cells = []
            for figure in SHOWN:
                ratios = [
                    row["ratio"] for row in rows if (row["load"], row["side"], row["figure"]) == (load, side, figure)
                ]
                low, high = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
                cells.append(low if low == high else f"{low} to {high}")
            yield f"| {title if side == 'kpolicy' else ''} | {name} | {' | '.join(cells)} |"


@pytest.mark.parametrize("rows", [measured, simulated])
def test_the_page_s_rows_are_those_of_the_results(rows: Any) -> None:
    """Every one, in order."""
    table = "\n".join(" ".join(row.split()) for row in rows())
    assert table in "\n".join(" ".join(line.split()) for line in PAGE.splitlines())


def test_the_page_s_calls_and_launching_costs_are_published() -> None:
    """Each call's command and commit, and what launching an eager step took by its calibration."""
    raw = json.loads((RESULTS / "h200" / "raw" / "vllm_stock_vs_kpolicy.json").read_text())
    rows = {row["call"] for row in raw["rows"] if row.get("core_looks")}
    assert rows == {call["call"] for call in raw["calls"]}
    launching = {}
    for call in raw["calls"]:
        assert " --one-core " in call["command"]
        assert f"kpolicy at {call['commit']} " in PAGE
        for name, costs in call["costs"].items():
            launching[name] = float(costs.partition("host_eager=HostCost(base_us=")[2].partition(",")[0]) / 1e3
    told = "launching an eager step took {qwen05b_kpolicy:.0f} ms on the 0.5B, {dsv2lite_kpolicy:.0f} on DeepSeek and "
    assert (told + "{llama8b_kpolicy:.0f} on Llama").format(**launching) in " ".join(PAGE.split())
