"""docs/vllm.md: what it makes of the published rows of the burst."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from benchmarks.student import student
from benchmarks.vllm.summary import ratio_interval

ROOT = Path(__file__).parents[3]
RAW = ROOT / "benchmarks" / "results" / "h200" / "raw" / "vllm_stock_vs_kpolicy.json"
PAGE = (ROOT / "docs" / "vllm.md").read_text()


def line_at_one(x: list[float], y: list[float]) -> list[float]:
    """By a straight line through logarithms: y where x is 1, and its 95% interval."""
    a, b = ([math.log(each) for each in values] for values in (x, y))
    slope, start = statistics.linear_regression(a, b)
    middle, spread = statistics.fmean(a), sum((each - statistics.fmean(a)) ** 2 for each in a)
    left = sum((each - start - slope * at) ** 2 for at, each in zip(a, b, strict=True)) / (len(a) - 2)
    half = student(len(a) - 2) * math.sqrt(left * (1 / len(a) + middle * middle / spread))
    return [math.exp(start + sign * half) for sign in (0, -1, 1)]


def correlation(x: list[float], y: list[float]) -> float:
    return statistics.correlation([math.log(each) for each in x], [math.log(each) for each in y])


def test_the_burst_with_its_adding_and_without() -> None:
    """Ratios over the nine pairs, and how they go with that of adding."""
    turns: dict[str, dict[int, dict[str, Any]]] = {"stock": {}, "kpolicy": {}}
    for row in json.loads(RAW.read_text())["rows"]:
        if row["load"] == "burst-768" and "call" not in row:
            turns[row["side"]][row["repeat"]] = row
    pairs = [(turns["stock"][repeat], turns["kpolicy"][repeat]) for repeat in range(9)]

    def wall_ms(row: dict[str, Any]) -> float:
        return 1e3 * float(row["requests"]) / float(row["requests_per_s"])

    adding = [a["added_ms"] / b["added_ms"] for a, b in pairs]
    rates = [b["requests_per_s"] / a["requests_per_s"] for a, b in pairs]
    rest = [(wall_ms(a) - a["added_ms"]) / (wall_ms(b) - b["added_ms"]) for a, b in pairs]
    told = "{:.2f} ({:.2f} to {:.2f})".format
    for words in (
        f"in the burst's nine pairs, {told(*ratio_interval(adding))}",
        f"goes with that of adding (correlation {correlation(adding, rates):.2f})",
        f"kpolicy has {told(*line_at_one(adding, rates))} of stock's where adding took as long",
        f"has a ratio of {told(*ratio_interval(rest))}",
        f"goes with that of adding too ({correlation(adding, rest):.2f})",
        f"by the line is {told(*line_at_one(adding, rest))}",
    ):
        assert words in PAGE
    assert sum(each >= 1 for each in adding) == 2
    assert sum(a["added_ms"] for a, _ in pairs) / sum(wall_ms(a) for a, _ in pairs) == pytest.approx(1 / 3, abs=0.02)
