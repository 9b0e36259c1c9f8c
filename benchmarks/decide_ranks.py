"""What a decision with data-parallel ranks takes: `auto`'s votes of times, beside votes of counts alone.

Run from the repository root::

    python -m benchmarks.decide_ranks --date YYYY-MM-DD

The batches are those of `benchmarks.decide`, another on each of four ranks. One rank's work is timed, its vote and its
decision from what was reduced, not the reduction. By counts alone the batch of every rank's largest counts is decided
as if one rank had it, which is what other policies of kpolicy do, and `auto` did before it voted times. Passes of both
alternate; a ratio is the median of the pairs'. `other_decisions` is the share of steps in
which the launches differ.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import kpolicy
from benchmarks.decide import KINDS, MAX_REQS, draw, shape_of
from benchmarks.pairs import measure_pairs
from kpolicy.costs import CostTable, analytic_costs
from kpolicy.engine import Engine
from kpolicy.policies import ranks
from kpolicy.policies.rank_times import NUM_TIMES
from kpolicy.profiles import load_profile
from kpolicy.settings import Settings
from kpolicy.shapes import BatchNumbers

RESULT = Path(__file__).parent / "results" / "decide_ranks.json"
RANKS, STEPS = 4, 500
PROFILE = "qwen2.5-0.5b-h200"


def drawn(kind: str) -> list[list[BatchNumbers]]:
    """Each rank's batch of every step."""
    rng = random.Random(0)
    return [[shape_of(kind, draw(kind, rng), rng).numbers for _ in range(RANKS)] for _ in range(STEPS)]


def measured(kind: str, costs: CostTable, *, least: int, most: int) -> dict[str, Any]:
    """One kind of batches by one table: microseconds a step, and the ratio of times to counts."""
    compiled: Any = Engine("auto", settings=Settings(max_num_reqs=MAX_REQS), costs=costs).compiled
    steps = drawn(kind)
    own = [step[0] for step in steps]
    by_times = [tuple(map(max, *map(compiled.vote, step))) for step in steps]
    by_counts = [tuple(map(max, *map(ranks.vote, step))) for step in steps]
    agree = partial(ranks.agree, compiled.select)

    def passes(call: Callable[..., Any], *arguments: Any) -> Callable[[], None]:
        def run() -> None:
            for each in zip(*arguments, strict=True):
                call(*each)

        return run

    found = {}
    for name, times, counts in (
        ("vote", passes(compiled.vote, own), passes(ranks.vote, own)),
        ("agree", passes(compiled.agree, by_times, own), passes(agree, by_counts, own)),
    ):
        row = measure_pairs(("times", times), ("counts", counts), least=least, most=most)
        found[name] = {
            "times_us": round(row["cpu_times_ms"] / STEPS * 1e3, 2),
            "counts_us": round(row["cpu_counts_ms"] / STEPS * 1e3, 2),
            **{key: row[f"cpu_{key}"] for key in ("ratio", "interval", "half_width")}, "pairs": row["pairs"],
        }  # fmt: skip
    pairs = zip(by_times, by_counts, own, strict=True)
    other = sum(compiled.agree(a, rank).launches != agree(b, rank).launches for a, b, rank in pairs)
    return {**found, "other_decisions": round(other / STEPS, 3)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--date", default="", help="written into the result; without it nothing is written")
    parser.add_argument("--pairs", type=int, default=200, help="pairs of passes (200); up to three times as many")
    arguments = parser.parse_args()
    tables = {"analytic": analytic_costs(), PROFILE: load_profile(PROFILE).costs}
    rows = []
    for table, costs in tables.items():
        for kind in KINDS:
            row = measured(kind, costs, least=arguments.pairs, most=3 * arguments.pairs)
            rows.append({"costs": table, "batches": kind, **row})
            print(f"{table}, {kind}: {row}", flush=True)
    if arguments.date:
        written = {
            "what": "a rank's vote and decision: processor microseconds a step with votes of times and of counts alone",
            "date": arguments.date,
            "command": f"python -m benchmarks.decide_ranks --pairs {arguments.pairs} --date {arguments.date}",
            "kpolicy": kpolicy.__version__,
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "ranks": RANKS,
            "integers": {
                "times": len(ranks.vote(BatchNumbers(0))) + NUM_TIMES,
                "counts": len(ranks.vote(BatchNumbers(0))),
            },
            "rows": rows,
        }
        RESULT.write_text(json.dumps(written, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
