"""A FULL replay on the CPU beside the eager run of the same decode step, on the default model of `kpolicy run`.

Both are steps of the same executor on the same rows at the same padded shape: staging, the model, the head, sampling.
They alternate, in an order that alternates too, and each pair gives one ratio, so that the machine's slower changes
meet both sides; the result is the median of the ratios, and its interval holds 95% of medians of resampled pairs. Pairs
are added until the interval's half-width is at most 2% of the ratio, or there are too many. Wall time is what the limit
is about; the thread's processor time, which other processes disturb less, stands beside it. Logits must be equal to
the bit.

Run from the repository root, with torch and transformers::

    OMP_NUM_THREADS=1 python -m benchmarks.recorder --date 2026-01-01 [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from functools import partial
from typing import Any

from benchmarks.command import output_file
from benchmarks.engine_step import BLOCK_SIZE, CONTEXT, decode_inputs
from benchmarks.pairs import HALF_WIDTH, measure_pairs

SIZES = (1, 2, 4, 8, 16, 32, 64)


def measure(executor: Any, key: Any, inputs: Any, least: int, most: int) -> dict[str, Any]:
    """Eager and replayed times of one size, and whether they agreed to the bit."""
    import torch

    from kpolicy.decision import Decision, Launch
    from kpolicy.modes import Mode, Rows
    from kpolicy.reasons import Reason

    decisions = (
        Decision(Mode.EAGER, (Launch(Rows.ALL, None, padded_tokens=key.num_tokens),), Reason.POLICY_IS_EAGER),
        Decision(Mode.FULL, (Launch(Rows.ALL, key),), Reason.GRAPH_FITS),
    )
    equal = True

    def compare(replayed: Any, eager: Any) -> None:
        nonlocal equal
        equal = equal and all(map(torch.equal, replayed.outputs, eager.outputs))

    eager, full = (partial(executor.run, decision, inputs) for decision in decisions)
    row = measure_pairs(("replay", full), ("eager", eager), least=least, most=most, after=compare)
    return {"tokens": key.num_tokens, **row, "equal": equal}


def main(argv: list[str] | None = None) -> int:
    """Print the table; 1 where a replay wasn't the eager run to the bit, or wasn't faster."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--date", default="unstated", help="written into the result")
    parser.add_argument("--json", type=output_file, help="where the result is written; printed only without it")
    parser.add_argument("--least", type=int, default=300, help="pairs of a size, at least")
    parser.add_argument("--most", type=int, default=3000, help="pairs of a size, at most")
    options = parser.parse_args(argv)

    import torch
    import transformers

    import kpolicy
    from kpolicy.executors.cpu import CpuExecutor
    from kpolicy.keys import GraphKey
    from kpolicy.modes import Part
    from kpolicy.registry import GraphRegistry
    from kpolicy.serving.default_model import load_default

    torch.set_num_threads(1)
    model = load_default(num_blocks=1280, block_size=BLOCK_SIZE, max_model_len=512, max_num_reqs=max(SIZES))
    executor, registry = CpuExecutor(model), GraphRegistry()
    keys = [GraphKey(Part.FULL, size, size, query_len=1) for size in SIZES]
    registry.plan(keys)
    executor.open(registry)
    executor.capture(keys)
    rows = []
    print("tokens  pairs  eager ms  replay ms  ratio  95% interval    half-width  of processor time  equal")
    for key in keys:
        row = measure(executor, key, decode_inputs(key.num_tokens, model.num_blocks), options.least, options.most)
        record = registry.record(key)
        row |= {"graph_bytes": record.bytes, "capture_s": round(record.seconds, 3)}
        rows.append(row)
        low, high = row["interval"]
        print(
            f"{row['tokens']:6d}  {row['pairs']:5d}  {row['eager_ms']:8.2f}  {row['replay_ms']:9.2f}  "
            f"{row['ratio']:.3f}  {low:.3f} to {high:.3f}  {row['half_width']:10.2%}  {row['cpu_ratio']:17.3f}  "
            f"{row['equal']}",
            flush=True,
        )
    holds = all(row["equal"] and row["interval"][1] < 1 for row in rows)
    result = {
        "command": "OMP_NUM_THREADS=1 python -m benchmarks.recorder "
        + " ".join(argv if argv is not None else sys.argv[1:]),
        "date": options.date,
        "versions": {
            "kpolicy": kpolicy.__version__, "torch": str(torch.__version__), "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "device": {"machine": platform.machine(), "cores": os.cpu_count(), "threads": 1},
        "model": f"default_model, {model.num_params} parameters, context {CONTEXT}",
        "limit": 1.0,
        "wanted_half_width": HALF_WIDTH,
        "holds": holds,
        "rows": rows,
    }  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    executor.release()
    print("holds" if holds else "DOES NOT HOLD")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
