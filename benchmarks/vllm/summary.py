"""From raw rows of both sides to one row a figure: stock, kpolicy, and their ratio with its 95% interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["summarise"]

BETTER_HIGH = ("requests_per_s", "tokens_per_s", "kv_tokens")
BETTER_LOW = (
    "ttft_p50_ms", "ttft_p99_ms", "gap_p50_ms", "gap_p99_ms", "step_p50_ms", "start_s", "capture_s", "graph_mib",
)  # fmt: skip
STUDENT = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""97.5% points of Student's t for 1 to 9 degrees of freedom"""


def ratio_interval(ratios: Sequence[float]) -> tuple[float, float | None, float | None]:
    """(geometric mean, low, high): 95% by Student's t on logarithms; no bounds from one pair."""
    logs = [math.log(each) for each in ratios]
    mean = statistics.fmean(logs)
    if len(logs) < 2:
        return math.exp(mean), None, None
    point = STUDENT[len(logs) - 2] if len(logs) - 2 < len(STUDENT) else 1.96
    half = point * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def summarise(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of {model, load, figure, stock, kpolicy, ratio, low, high, repeats}; a ratio above 1 is better.

    Args:
        rows: raw rows, each with ``model``, ``side``, ``load`` (``start`` for start-up) and ``repeat``. Pairs are
            formed by repeat; a repeat that one side lacks is left out.
    """
    grouped: dict[tuple[str, str], dict[str, dict[int, dict[str, Any]]]] = {}
    for row in rows:
        sides = grouped.setdefault((row["model"], row["load"]), {})
        sides.setdefault(row["side"], {})[row["repeat"]] = row
    found = []
    for (model, load), sides in grouped.items():
        stock, kpolicy = sides.get("stock", {}), sides.get("kpolicy", {})
        repeats = sorted(stock.keys() & kpolicy.keys())
        for figure in (*BETTER_HIGH, *BETTER_LOW):
            pairs = [
                (stock[i][figure], kpolicy[i][figure])
                for i in repeats
                if stock[i].get(figure) and kpolicy[i].get(figure)
            ]
            if not pairs:
                continue
            ratios = [b / a if figure in BETTER_HIGH else a / b for a, b in pairs]
            ratio, low, high = ratio_interval(ratios)
            found.append({
                "model": model, "load": load, "figure": figure,
                "stock": round(statistics.median(a for a, _ in pairs), 4),
                "kpolicy": round(statistics.median(b for _, b in pairs), 4),
                "ratio": round(ratio, 4), "low": low and round(low, 4), "high": high and round(high, 4),
                "repeats": len(pairs),
            })  # fmt: skip
    return found
