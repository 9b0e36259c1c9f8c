"""What `auto` gains or loses with data-parallel ranks beside vLLM's replica, over stretches of recorded traces.

Run from the repository root::

    python -m benchmarks.simulated_ranks --traces FOLDER --date YYYY-MM-DD

An overloaded server's figures turn on who gives its KV back when, so one stretch says little: Mooncake's trace is cut
into eight that begin and end elsewhere, and the code trace is served at five rates. Costs are the analytic table's of
an 8B model on an H200. A row has the ratio of `auto` to the replica.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kpolicy
from benchmarks.command import input_folder
from kpolicy.scheduling.traces import Trace, read_trace
from kpolicy.simulate import Server, SimResult, simulate

RESULT = Path(__file__).parent / "results" / "simulated_ranks.json"
MOONCAKE, CODE = "mooncake_conversation.csv.gz", "azure_llm_2023_code.csv"
STRETCHES = ((0, 800), (0, 850), (0, 900), (0, 950), (100, 900), (200, 900), (900, 900), (1800, 900))
"""Start and length, in seconds"""
RATES = (1.6, 1.8, 2.0, 2.2, 2.5)


def loads(folder: Path) -> Iterator[tuple[str, int, Trace]]:
    """Name, ranks and requests of each."""
    mooncake, code = read_trace(folder / MOONCAKE), read_trace(folder / CODE)
    for start, length in STRETCHES:
        yield f"Mooncake, {length} s from {start} s", 3, mooncake.window(start, length)
    for rate in RATES:
        yield f"code x{rate}", 4, code.scaled(rate)


def figures(result: SimResult) -> dict[str, float]:
    """What is compared: seconds of steps, and milliseconds as users see them."""
    return {
        "busy_s": result.step_us / 1e6, "ttft_p50_ms": result.ttft.p50 / 1e3, "ttft_p99_ms": result.ttft.p99 / 1e3,
        "gap_p99_ms": result.gap.p99 / 1e3, "whole_mean_ms": result.e2e.mean / 1e3,
    }  # fmt: skip


def compared(name: str, ranks: int, trace: Trace) -> dict[str, Any]:
    """One row."""
    server = Server(ranks=ranks, warm=True)
    auto, replica = (figures(simulate(trace, policy, server=server)) for policy in ("auto", "vllm"))
    row = {
        "load": name, "ranks": ranks, "requests": len(trace),
        "auto": {key: round(value, 2) for key, value in auto.items()},
        "vllm": {key: round(value, 2) for key, value in replica.items()},
        "ratio": {key: round(auto[key] / replica[key], 4) for key in auto},
    }  # fmt: skip
    print(f"{name}, {ranks} ranks: {row['ratio']}", flush=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=input_folder, required=True, help="the folder with the traces")
    parser.add_argument("--date", default="", help="written into the result; without it nothing is written")
    arguments = parser.parse_args()
    rows = [compared(*load) for load in loads(arguments.traces)]
    means = {
        kind: {
            key: round(statistics.fmean(row["ratio"][key] for row in rows if row["load"].startswith(kind)), 4)
            for key in rows[0]["ratio"]
        }
        for kind in ("Mooncake", "code")
    }
    if arguments.date:
        written = {
            "what": "auto beside vLLM's replica with data-parallel ranks, simulated: below 1 auto is better",
            "date": arguments.date,
            "command": f"python -m benchmarks.simulated_ranks --traces FOLDER --date {arguments.date}",
            "kpolicy": kpolicy.__version__,
            "python": platform.python_version(),
            "mean_ratio": means,
            "rows": rows,
        }
        RESULT.write_text(json.dumps(written, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
