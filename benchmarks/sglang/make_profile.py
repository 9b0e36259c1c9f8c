"""A profile for `kpolicy plan` of what kpolicy measured inside SGLang, out of the results of stock_vs_kpolicy.py.

    python benchmarks/sglang/make_profile.py OUT [--runs 15,16] [--mean]

made h200/profile_sglang_qwen05b.json, by which the plan beside it has its sizes, and with ``--runs 15,16,20,22 --mean``
h200/profile_sglang_qwen05b_mean.json, that of the plan of 60. SGLang's kernels aren't those that kpolicy's own measured
profiles are of. kpolicy times a few sizes at each start, host and device together; between them lies a straight line,
and a size has the median of the starts. Each start's times were made to rise, so that where a size came out slower than
the next both have one time: by the median a graph that most starts couldn't tell from the next is worth nothing,
by the mean it is worth what the others saw. SGLang pads to its next own size, so that a size between two of those is
taken to last as long as the larger.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
if str(HERE.parents[1]) not in sys.path:
    sys.path.append(str(HERE.parents[1]))  # run as a script

from benchmarks.sglang.rows import NAMES  # noqa: E402
from kpolicy.costs import CostTable, Curve, HostCost  # noqa: E402
from kpolicy.schemas import Profile, write_profile  # noqa: E402

RESULTS = HERE.parent / "results" / "h200" / "sglang_stock_vs_kpolicy.json"


def profile(results: dict[str, Any], runs: Sequence[int], *, mean: bool = False) -> Profile:
    """What the starts with kpolicy's own sizes measured of 0.5B, over SGLang's own sizes.

    Args:
        results: the result file.
        runs: whose starts.
        mean: a size has the mean of the starts, and else their median.

    Raises:
        ValueError: the runs had other versions, another date or other sizes of SGLang's.
    """
    of_runs = [each for each in results["starts"] if each["run"] in runs and not each["part"].startswith("dsv2")]
    starts = [each for each in of_runs if each["side"] == "kpolicy"]
    stock = [each for each in of_runs if each["side"] == "stock"]
    own_sizes = {
        phase: _one(f"{phase}_sizes", runs, [each[f"{phase}_sizes"] for each in stock])
        for phase in ("decode", "prefill")
    }
    of_starts = statistics.fmean if mean else statistics.median
    about = [each for each in results["runs"] if each["run"] in runs]
    versions, at = (_one(name, runs, [each[name] for each in about]) for name in ("versions", "at"))

    def curve(phase: str, kind: str) -> tuple[list[int], list[float]]:
        measured = [{int(size): us for size, us in each["kpolicy"]["us"][phase][kind].items()} for each in starts]
        graphs = kind == "graph"
        sizes = own_sizes[phase] if graphs else sorted(set().union(*measured))
        middle = [
            of_starts(float(np.interp(size, sorted(each), [each[key] for key in sorted(each)]))
                      for each in measured)
            for size in sizes
        ]  # fmt: skip
        rising = [float(us) for us in np.maximum.accumulate(middle)]
        return _stairs(sizes, rising) if graphs else (sizes, rising)

    def rounded(phase: str, kind: str) -> Curve:
        sizes, us = curve(phase, kind)
        return Curve(tuple(sizes), tuple(round(each, 1) for each in us))

    count, nothing = len(starts), HostCost(base_us=0.0)
    return Profile(
        costs=CostTable(
            version=f"measured by kpolicy-sglang {at} on NVIDIA H200, at {count} starts of SGLang {versions['sglang']}",
            measured=True,
            full=rounded("decode", "graph"), piecewise=rounded("prefill", "graph"), eager=rounded("prefill", "eager"),
            host_full=nothing, host_piecewise=nothing, host_eager=nothing,
        ),
        device="NVIDIA H200", model=NAMES["qwen05b"], measured_at=at, tensor_parallel_size=1,
        versions={name: versions[name] for name in ("sglang", "torch")},
        command=f"python benchmarks/sglang/make_profile.py OUT --runs {','.join(map(str, runs))}"
        + " --mean" * mean,
    )  # fmt: skip


def _one(what: str, runs: Sequence[int], found: Sequence[Any]) -> Any:
    """What all runs have: a profile is of one software on one day.

    Raises:
        ValueError: they don't have the same, or none has any.
    """
    if not found or any(each != found[0] for each in found):
        listed = ", ".join(map(str, runs))
        raise ValueError(f"{what} must be the same in runs {listed}, not {[*found]}: choose others with --runs")
    return found[0]


def _stairs(sizes: Sequence[int], us: Sequence[float]) -> tuple[list[int], list[float]]:
    """The same with what follows each size, which lasts as long as the next."""
    wide, lasts = [sizes[0]], [us[0]]
    for before, size, each in zip(sizes, sizes[1:], us[1:], strict=False):
        for step in sorted({before + 1, size}):
            wide.append(step)
            lasts.append(each)
    return wide, lasts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--runs", default="15,16", help="whose starts of kpolicy's own sizes are taken")
    parser.add_argument("--mean", action="store_true", help="the mean of the starts, not their median")
    given = parser.parse_args()
    runs = [int(run) for run in given.runs.split(",")]
    write_profile(given.out, profile(json.loads(RESULTS.read_text(encoding="utf-8")), runs, mean=given.mean))


if __name__ == "__main__":
    main()
