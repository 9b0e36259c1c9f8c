"""Compare the vLLM replica with vLLM's own code and write the result.

Run from the repository root, with wheels or unpacked wheels of vLLM 0.23.0 and 0.33.0 in one folder::

    KPOLICY_ORACLE=FOLDER python -m benchmarks.oracle_vllm --date YYYY-MM-DD
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path

import kpolicy
from tests.oracle.compare import RUNNERS, compare, compare_default_sizes, compare_ranks, compare_resolution
from tests.oracle.loader import VARIABLE, oracle_folder

RESULT = Path(__file__).parent / "results" / "oracle_vllm.json"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=20_000, help="random batches a runner")
    parser.add_argument("--seed", type=int, default=0, help="of the batches")
    parser.add_argument("--date", required=True, help="written into the result")
    arguments = parser.parse_args()
    folder = oracle_folder()
    if folder is None:
        print(f"{VARIABLE} isn't set: name a folder with vLLM 0.23.0 and 0.33.0 wheels (docs/replicas.md)")
        return 2
    runners, bad = [], 0
    for version, runner in RUNNERS:
        result = compare(folder, version, runner, arguments.batches, arguments.seed)
        cells, differing = compare_resolution(folder, version, runner)
        steps, modes, unlike = compare_ranks(folder, version, runner, arguments.batches // 10, arguments.seed)
        bad += len(result.mismatches) + len(differing) + len(unlike)
        runners.append(
            result.as_dict()
            | {"resolution_cells": cells, "resolution_mismatches": len(differing)}
            | {"rank_steps": steps, "rank_modes": dict(sorted(modes.items())), "rank_mismatches": len(unlike)}
        )
        print(f"vLLM {version} {runner}: {result.batches} batches, {len(result.mismatches)} mismatches")
        for line in [*result.mismatches[:3], *differing[:3], *unlike[:3]]:
            print(f"  {line}")
    lists = {}
    for version in ("0.23", "0.33"):
        count, differing = compare_default_sizes(folder, version)
        bad += len(differing)
        lists[version] = {"deployments": count, "mismatches": len(differing)}
    written = {
        "what": "decisions of the vllm replica against vLLM's own dispatch code, on random deployments and batches",
        "date": arguments.date,
        "command": f"KPOLICY_ORACLE=FOLDER python -m benchmarks.oracle_vllm --batches {arguments.batches} "
        f"--seed {arguments.seed} --date {arguments.date}",
        "kpolicy": kpolicy.__version__,
        "vllm": ["0.23.0", "0.33.0"],
        "python": platform.python_version(),
        "runners": runners,
        "default_size_lists": lists,
    }
    RESULT.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
