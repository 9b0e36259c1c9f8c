"""Processor seconds to plan one ladder exactly, beside the layered dynamic programme that looks at every range.

Run from the repository root::

    python -m benchmarks.planning --date YYYY-MM-DD

Both work on the same instance in alternating passes of one process, and must find the same times.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import attrs
import numpy as np

import kpolicy
from benchmarks.command import commit_of
from kpolicy.budgets import Budget, Usage
from kpolicy.planning import Ladder, choose, frontier
from kpolicy.planning import solve as solver
from kpolicy.planning.choose import _Limits
from kpolicy.planning.solve import Frontier

RESULT = Path(__file__).parent / "results" / "planning.json"
CASES = ((256, 32), (1024, 64), (2048, 16), (2048, 64), (2048, 256))
PASSES = 5


def instance(num: int, seed: int = 0) -> Ladder:
    """A heavy-tailed histogram, rising times and an escape that costs more: every size is a candidate and a demand."""
    rng = np.random.default_rng(seed)
    graph_us = 5000 + np.cumsum(rng.random(num) * 60)
    return Ladder.of(
        "decode",
        weights=rng.pareto(1.1, num) / np.arange(1, num + 1),
        sizes=range(1, num + 1),
        graph_us=graph_us,
        escape_us=np.full(num, 12_000.0) + np.arange(num) * 30,
    )


def timed(ladder: Ladder, most: int, *, layered: bool) -> tuple[float, Frontier]:
    """Processor seconds of one solve."""
    quick = solver._layer
    if layered:
        solver._layer = solver._layer_of_any
    try:
        start = time.process_time()
        found = frontier(ladder, most)
        return time.process_time() - start, found
    finally:
        solver._layer = quick


def case(num: int, most: int) -> dict[str, Any]:
    """One size of problem."""
    ladder = instance(num)
    fast, slow = [], []
    for _ in range(PASSES):
        seconds, one = timed(ladder, most, layered=False)
        fast.append(seconds)
        seconds, other = timed(ladder, most, layered=True)
        slow.append(seconds)
    assert np.allclose(one.us, other.us, rtol=1e-12), "the two programmes disagree"
    return {
        "sizes": num,
        "most": most,
        "seconds": round(min(fast), 4),
        "layered_seconds": round(min(slow), 4),
        "ratio": round(min(slow) / min(fast), 2),
    }


BUDGETS = {
    "10 seconds, one list": (1, False, Budget(seconds=10)),
    "60 seconds, two lists": (2, False, Budget(seconds=60)),
    "20 seconds, 1 GiB and 1,500 device graphs, two lists": (2, False, Budget(seconds=20, bytes=1 << 30, graphs=1500)),
    "256 MiB, one list whose graphs grow": (1, True, Budget(bytes=256 << 20)),
}


def budgeted(lists: int, growing: bool, budget: Budget) -> dict[str, Any]:
    """`choose` under a budget over lists of 2,048 sizes, beside all numbers of sizes that a list could have."""
    prices = (Usage(graphs=1, streams=1, bytes=3 << 20, seconds=0.15), Usage(33, 1, 18 << 20, 0.35))
    ladders = [attrs.evolve(instance(2048, i), name=f"list {i}", usage=price) for i, price in enumerate(prices[:lists])]
    if growing:
        usages = [attrs.evolve(prices[0], bytes=prices[0].bytes + 4096 * i) for i in range(2048)]
        ladders[0] = attrs.evolve(ladders[0], usage=usages)
    bounded = _Limits.most_of
    seconds: dict[str, list[float]] = {"bounded": [], "all": []}
    found = {}
    try:
        for _ in range(PASSES):
            for name, most_of in (("bounded", bounded), ("all", lambda _self, _ladder: None)):
                _Limits.most_of = most_of  # type: ignore[method-assign]
                start = time.process_time()
                found[name] = choose(ladders, budget)
                seconds[name].append(time.process_time() - start)
    finally:
        _Limits.most_of = bounded  # type: ignore[method-assign]
    assert found["bounded"] == found["all"], "the bound changed the choice"
    return {
        "chosen": found["bounded"].num_sizes,
        "seconds": round(min(seconds["bounded"]), 4),
        "all_numbers_seconds": round(min(seconds["all"]), 4),
        "ratio": round(min(seconds["all"]) / min(seconds["bounded"]), 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--date", default="", help="written into the result; without it nothing is written")
    arguments = parser.parse_args()
    rows, commit, load = [], commit_of(), round(os.getloadavg()[0], 2)
    for num, most in CASES:
        rows.append(case(num, most))
        print(rows[-1], flush=True)
    under = {}
    for name, given in BUDGETS.items():
        under[name] = budgeted(*given)
        print(name, under[name], flush=True)
    if arguments.date:
        written = {
            "what": "best processor seconds of alternating passes to find the best sizes for every number of them up "
            "to `most`: divide and conquer against the layered dynamic programme; and to choose from lists of 2,048 "
            "sizes under budgets, beside working out every number of sizes",
            "date": arguments.date,
            "commit": commit,
            "command": f"python -m benchmarks.planning --date {arguments.date}",
            "kpolicy": kpolicy.__version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "cores": os.cpu_count(),
            "load_average_before": load,
            "passes": PASSES,
            "cases": rows,
            "budgets": under,
        }
        RESULT.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
