"""From raw rows of both sides to one row a figure: stock, kpolicy, and their ratio with its 95% interval."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.student import student
from benchmarks.vllm.replay_state import QUICK, SLOW, STATES

__all__ = ["compared", "lines", "states_compared", "summarise"]

BETTER_HIGH = ("requests_per_s", "tokens_per_s", "kv_tokens")
BETTER_LOW = (
    "ttft_p50_ms", "ttft_p99_ms", "ttft_geo_ms", "added_ms", "ttft_after_p50_ms", "gap_p50_ms", "gap_p99_ms",
    "gap_slow_ms", "step_p50_ms",
    "start_s", "capture_s", "graph_mib", "host_us",
)  # fmt: skip
POOLED = {"ttft_all_p50_ms": 0.5, "ttft_all_p99_ms": 0.99}
"""Figures of all turns' first tokens together, each with its quantile"""
DRAWS = 1000
"""Of turns, for the interval of these"""


def ratio_interval(ratios: Sequence[float]) -> tuple[float, float | None, float | None]:
    """(geometric mean, low, high): 95% by Student's t on logarithms; no bounds from one pair."""
    logs = [math.log(each) for each in ratios]
    mean = statistics.fmean(logs)
    if len(logs) < 2:
        return math.exp(mean), None, None
    half = student(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def summarise(rows: Iterable[dict[str, Any]], base: str = "stock", side: str = "kpolicy") -> list[dict[str, Any]]:
    """Rows of {model, load, figure, `base`, `side`, ratio, low, high, repeats}; a ratio above 1: `side` is better.

    Where raw rows say how many requests a load had, so do these, and other numbers are another load. Pairs are of one
    process (``began``). Several may have gone on with a call; of the calls the last with pairs counts, with its
    ``date`` where rows tell it. Where all of a row's turns tell the host's speed, ``host`` is the ratio of that: above
    1 the side had the quicker host.

    Args:
        rows: raw rows, each with ``model``, ``side``, ``load`` (``start`` for start-up) and ``repeat``. Pairs are
            formed by process and repeat; a repeat that one side lacks there is left out.
        base: the side that is compared with.
        side: the side that is compared.
    """
    calls: dict[tuple[str, str, int | None], dict[str, dict[str, dict[tuple[str, int], dict[str, Any]]]]] = {}
    for row in rows:
        sides = calls.setdefault((row["model"], row["load"], row.get("requests")), {}).setdefault(
            row.get("call", ""), {}
        )
        sides.setdefault(row["side"], {})[row.get("began", ""), row["repeat"]] = row
    found = []
    for (model, load, requests), by_call in calls.items():
        both = [call for call, sides in by_call.items() if sides.get(base, {}).keys() & sides.get(side, {}).keys()]
        if not both:
            continue
        bases, others = (by_call[max(both)][name] for name in (base, side))
        repeats = sorted(bases.keys() & others.keys())
        turns = [(bases[i], others[i]) for i in repeats]
        more = {**({} if requests is None else {"requests": requests}), **_host(turns)}
        if "date" in bases[repeats[-1]]:
            more["date"] = bases[repeats[-1]]["date"]
        for figure, share in POOLED.items() if all("ttft_ms" in turn for pair in turns for turn in pair) else ():
            first, second, *ratio_of = pooled(turns, share)
            ratio, low, high = (each and round(each, 4) for each in ratio_of)
            found.append({
                "model": model, "load": load, "figure": figure, base: first, side: second, "ratio": ratio, "low": low,
                "high": high, "repeats": len(turns), **more,
            })  # fmt: skip
        for figure in (*BETTER_HIGH, *BETTER_LOW):
            pairs = [
                (bases[i][figure], others[i][figure]) for i in repeats if bases[i].get(figure) and others[i].get(figure)
            ]
            if not pairs:
                continue
            ratios = [b / a if figure in BETTER_HIGH else a / b for a, b in pairs]
            ratio, low, high = ratio_interval(ratios)
            found.append({
                "model": model, "load": load, "figure": figure,
                base: round(statistics.median(a for a, _ in pairs), 4),
                side: round(statistics.median(b for _, b in pairs), 4),
                "ratio": round(ratio, 4), "low": low and round(low, 4), "high": high and round(high, 4),
                "repeats": len(pairs), **more,
            })  # fmt: skip
    return found


def pooled(
    turns: Sequence[tuple[dict[str, Any], dict[str, Any]]], share: float
) -> tuple[float, float, float, Any, Any]:
    """A quantile of all turns' first tokens together: (base's, side's, ratio, low, high); above 1 the side is sooner.

    Of one turn's requests a p99 is the second slowest, and a median lies where a step happened to end; of all turns'
    together it is told by more. The interval is of `DRAWS` draws of as many pairs of turns, with replacement.

    Args:
        turns: pairs of turns that tell each request's first token (``ttft_ms``), the base's first.
        share: of the requests whose first token is sooner.
    """

    def of(drawn: Sequence[tuple[dict[str, Any], dict[str, Any]]], which: int) -> float:
        values = sorted(one for pair in drawn for one in pair[which]["ttft_ms"])
        found: float = values[min(len(values) - 1, int(share * len(values)))]
        return found

    base, side = of(turns, 0), of(turns, 1)
    if len(turns) < 2:
        return base, side, base / side, None, None
    chance = random.Random(0)
    ratios = []
    for _ in range(DRAWS):
        drawn = chance.choices(turns, k=len(turns))
        ratios.append(of(drawn, 0) / of(drawn, 1))
    ratios.sort()
    return base, side, base / side, ratios[int(0.025 * DRAWS)], ratios[int(0.975 * DRAWS)]


def _host(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, float]:
    """The host's speed in the second turns over that in the first; nothing where a turn doesn't tell it."""
    if not all("host_us" in turn for pair in pairs for turn in pair):
        return {}
    return {"host": round(statistics.geometric_mean(a["host_us"] / b["host_us"] for a, b in pairs), 4)}


def compared(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """`summarise` for every pair of sides that rows are of, by its name: "stock kpolicy", "wide kpolicy", ..."""
    found = {
        f"{base} {side}": summarise(rows, base, side)
        for base, side in (
            ("stock", "kpolicy"),
            ("stock", "planned"),
            ("wide", "kpolicy"),
            ("stock", "wide"),
            ("stock", "paced"),
            ("kpolicy", "paced"),
            ("stock", "split"),
            ("kpolicy", "split"),
            ("stock", "lazy"),
            ("kpolicy", "lazy"),
            ("stock", "again"),
            ("again", "kpolicy"),
        )
    }
    return {name: each for name, each in found.items() if each}


def states_compared(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """`summarise` of each side with itself, for loads that it served with either speed of replays.

    Rows are {model, load, figure, slow, quick, ratio, ...} with ``of``, the side; a ratio above 1: quick replays are
    better.
    """
    ends = {f" {state}": state for state in STATES}
    sides: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        for end, state in ends.items():
            if row["load"].endswith(end):
                told = {**row, "load": row["load"].removesuffix(end), "side": state}
                sides.setdefault(row["side"], []).append(told)
    return [{"of": side, **row} for side, found in sides.items() for row in summarise(found, SLOW, QUICK)]


def lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The comparisons, a figure a line, for a log."""
    return [
        f"{row['model']:9} {row['load']:12} {row['figure']:15} {base} {row[base]:>10} {side} {row[side]:>10} "
        f"x{row['ratio']} [{row['low']}, {row['high']}] n={row['repeats']} host {row.get('host')}"
        for name, found in compared(rows).items()
        for base, side in [name.split()]
        for row in found
    ] + [
        f"{row['model']:9} {row['load']:12} {row['figure']:15} {row['of']} slow {row['slow']:>10} quick "
        f"{row['quick']:>10} x{row['ratio']} [{row['low']}, {row['high']}] n={row['repeats']} host {row.get('host')}"
        for row in states_compared(rows)
    ]
