"""Wall time of `kpolicy run` over a whole trace, every step decided, run on the simulated executor and checked.

Run from the repository root, on an otherwise idle machine::

    python -m benchmarks.whole_trace --trace PATH --date YYYY-MM-DD

Each policy is one process on one thread. What is timed is the command as a user types it, start-up included.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import kpolicy
from benchmarks.command import input_file

RESULT = Path(__file__).parent / "results" / "whole_trace.json"
RUNS = (("auto",), ("vllm",), ("auto", "vllm"))


def timed(trace: Path, policies: tuple[str, ...]) -> dict[str, Any]:
    """One run of the command over the whole trace."""
    options = [option for policy in policies for option in ("--policy", policy)]
    command = [sys.executable, "-m", "kpolicy", "run", "--device", "simulated", "--trace", str(trace)]
    command += ["--window", "0", "--json", *options]
    start = time.perf_counter()
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds = time.perf_counter() - start
    results = json.loads(finished.stdout)["policies"]
    return {
        "policies": list(policies),
        "seconds": round(seconds, 1),
        "requests": [result["served"] for result in results],
        "steps": [sum(mode["steps"] for mode in result["modes"].values()) for result in results],
        "checked": [result["checked"] for result in results],
        "wrong": [len(result["wrong"]) for result in results],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=input_file, required=True, help="the trace that is served whole")
    parser.add_argument("--date", default="", help="written into the result; without it nothing is written")
    arguments = parser.parse_args()
    runs = []
    for policies in RUNS:
        runs.append(timed(arguments.trace, policies))
        print(runs[-1], flush=True)
    if arguments.date:
        written = {
            "what": "wall seconds of `kpolicy run --window 0` over a whole trace, one thread",
            "date": arguments.date,
            "command": f"python -m benchmarks.whole_trace --trace {arguments.trace.name} --date {arguments.date}",
            "trace": arguments.trace.name,
            "kpolicy": kpolicy.__version__,
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "load_average_before": round(os.getloadavg()[0], 2),
            "runs": runs,
        }
        RESULT.write_text(json.dumps(written, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
