"""What `auto` gains or loses with data-parallel ranks beside vLLM's replica, over stretches of recorded traces.

Run from the repository root::

    python -m benchmarks.simulated_ranks --traces FOLDER --date YYYY-MM-DD

An overloaded server's figures turn on who gives its KV back when, so one stretch says little: Mooncake's trace is cut
into eight that begin and end elsewhere, and the code trace is served at five rates. Costs are the analytic table's of
an 8B model on an H200. A row has the ratio of `auto` to the replica, also where prompts may be later for decode steps
beside them (a `first_token_limit` of 1.25), as they may where the gap is weighed.
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
from kpolicy.settings import GAP_FIRST_TOKEN_LIMIT, Objective
from kpolicy.simulate import Server, SimResult, simulate

RESULT = Path(__file__).parent / "results" / "simulated_ranks.json"
MOONCAKE, CODE = "mooncake_conversation.csv.gz", "azure_llm_2023_code.csv"
STRETCHES = ((0, 800), (0, 850), (0, 900), (0, 950), (100, 900), (200, 900), (900, 900), (1800, 900))
"""Start and length, in seconds"""
RATES = (1.6, 1.8, 2.0, 2.2, 2.5)
LATER = Objective(first_token_limit=GAP_FIRST_TOKEN_LIMIT)
RATIOS = {"auto": "ratio", "auto_later": "ratio_later"}
"""What a row calls each one's ratio to the replica"""


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
    found = {
        label: figures(simulate(trace, policy, server=server, objective=objective))
        for label, policy, objective in (
            ("vllm", "vllm", Objective()), ("auto", "auto", Objective()), ("auto_later", "auto", LATER),
        )
    }  # fmt: skip
    replica = found["vllm"]
    row: dict[str, Any] = {"load": name, "ranks": ranks, "requests": len(trace)}
    for label, each in found.items():
        row[label] = {key: round(value, 2) for key, value in each.items()}
    for label, ratio in RATIOS.items():
        row[ratio] = {key: round(value / replica[key], 4) for key, value in found[label].items()}
    print(f"{name}, {ranks} ranks: {row['ratio']}; later {row['ratio_later']}", flush=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=input_folder, required=True, help="the folder with the traces")
    parser.add_argument("--date", default="", help="written into the result; without it nothing is written")
    arguments = parser.parse_args()
    rows = [compared(*load) for load in loads(arguments.traces)]
    means = {
        f"mean_{ratio}": {
            kind: {
                key: round(statistics.fmean(row[ratio][key] for row in rows if row["load"].startswith(kind)), 4)
                for key in rows[0][ratio]
            }
            for kind in ("Mooncake", "code")
        }
        for ratio in RATIOS.values()
    }
    if arguments.date:
        written = {
            "what": "auto beside vLLM's replica with data-parallel ranks, simulated: below 1 auto is better",
            "date": arguments.date,
            "command": f"python -m benchmarks.simulated_ranks --traces FOLDER --date {arguments.date}",
            "kpolicy": kpolicy.__version__,
            "python": platform.python_version(),
            **means,
            "rows": rows,
        }
        RESULT.write_text(json.dumps(written, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
