"""Random steps of every model family in every mode, each compared bit for bit with eager at the same padded shape.

A step is a random batch (of the real batcher, or with drafts of 1 to 3 tokens) run in the way that was run least so far
among all legal ones: every mode, form of SPLIT, kind and size of graph. Its logits, sampled tokens and written KV must
equal, to the bit, those of the same launches run eagerly, alone, at the padded shapes that the graphs have; KV of no
row of the step may change; the reserved slot holds NaN. Every policy's batches are among these: a policy only chooses
one of the ways.

Slices of steps are resumable: the result file holds how many steps each family has done, and a run goes on from there.

Run from the repository root::

    OMP_NUM_THREADS=1 python -m benchmarks.random_steps --date 2026-01-01 [--steps 100000] [--seconds 600]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results" / "random_steps.json"
SLICE = 250


def run_slice(family: str, start: int) -> tuple[Counter[str], int]:
    """One slice of a family: steps by way, and rows compared. Its seed is its place, so a slice can be run again."""
    from tests.executors_launcher.checker import Checker, batcher_steps, drafting_steps, load_family, opened

    model = load_family(family)
    executor, registry = opened(model)
    checker = Checker(executor, model)
    source = drafting_steps if (start // SLICE) % 2 else batcher_steps
    model.clear_kv()
    for _ in source(checker, registry.captured(), SLICE, seed=start):
        pass
    executor.release()
    return checker.steps, checker.rows


def load_result(path: Path) -> dict[str, Any]:
    """The result so far; an empty one where there is none."""
    if path.exists():
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    return {"steps": {}, "rows_compared": 0, "ways": {}, "seconds": 0.0}


def main(argv: list[str] | None = None) -> int:
    """Run slices, family by family in turn, until all steps are done or time is up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--date", required=True)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--result", type=Path, default=RESULT)
    options = parser.parse_args(argv)

    import torch
    import transformers

    import kpolicy
    from tests.serving_models.families import FAMILIES

    torch.set_num_threads(1)
    result, begun = load_result(options.result), time.monotonic()
    while (done := sum(result["steps"].values())) < options.steps and time.monotonic() - begun < options.seconds:
        family = min(sorted(FAMILIES), key=lambda name: result["steps"].get(name, 0))
        start, at = result["steps"].get(family, 0), time.monotonic()
        ways, rows = run_slice(family, start)
        result["steps"][family] = start + SLICE
        result["rows_compared"] += rows
        for way, count in ways.items():
            result["ways"][way] = result["ways"].get(way, 0) + count
        result["seconds"] = round(result["seconds"] + time.monotonic() - at, 1)
        result |= {
            "total_steps": done + SLICE,
            "asked_steps": options.steps,
            "command": "OMP_NUM_THREADS=1 python -m benchmarks.random_steps "
            f"--date {options.date} --steps {options.steps}",
            "date": options.date,
            "versions": {
                "kpolicy": kpolicy.__version__, "torch": str(torch.__version__),
                "transformers": transformers.__version__, "python": platform.python_version(),
            },
            "device": {"machine": platform.machine(), "cores": os.cpu_count(), "threads": 1},
        }  # fmt: skip
        options.result.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")
        print(
            f"{done + SLICE:>7} steps, {result['rows_compared']} rows, {family}, {result['seconds']:.0f} s", flush=True
        )
    print(f"{sum(result['steps'].values())} of {options.steps} steps, no difference")
    return 0


if __name__ == "__main__":
    sys.exit(main())
