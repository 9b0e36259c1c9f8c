"""How fast the simulator is: a whole trace by each policy, ten million decisions, and cost per step by length.

Run from the repository root, on an otherwise idle machine::

    python -m benchmarks.simulate --trace PATH --date YYYY-MM-DD

One process on one thread. Longer traces are the one trace again and again, read as it is served; each length has a
process of its own, so that its memory is known. Seconds are of the processor, so that other work on the machine doesn't
count. `stepwise` goes through the scheduler for every step: the ratio says what stretches of decode steps save, with
the same result. With drafts and with ranks the scheduler is always asked.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kpolicy
from benchmarks.command import commit_of, input_file
from kpolicy.policies import OWN
from kpolicy.scheduling.traces import Trace, TraceRequest, read_trace
from kpolicy.settings import Settings
from kpolicy.simulate import Server, simulate

RESULT = Path(__file__).parent / "results" / "simulate.json"
LENGTHS = (1_000, 10_000, 100_000, 1_000_000)
DECISIONS = 10_000_000
SCHEDULED = {
    "3 drafts a row": Server(settings=Settings(max_num_reqs=256, max_num_tokens=2048, num_speculative_tokens=3)),
    "2 ranks": Server(ranks=2),
}


def repeated(trace: Trace, num_requests: int) -> Iterator[TraceRequest]:
    """The trace again and again, one second apart."""
    lap_s, done = trace.requests[-1].arrival_s + 1.0, 0
    while True:
        start_s = (done // len(trace)) * lap_s
        for each in trace.requests:
            if done == num_requests:
                return
            yield TraceRequest(done, start_s + each.arrival_s, each.prompt_tokens, each.output_tokens, each.hash_ids)
            done += 1


def whole(trace: Trace, policy: str) -> dict[str, Any]:
    """One policy over the trace, and the same through the scheduler for each step."""
    start = time.process_time()
    result = simulate(trace, policy)
    seconds = time.process_time() - start
    start = time.process_time()
    plain = simulate(trace, policy, stepwise=True)
    stepwise = time.process_time() - start
    assert plain.as_dict() == result.as_dict()
    return {
        "policy": policy,
        "seconds": round(seconds, 2),
        "requests": result.served,
        "steps": result.steps,
        "us_per_step": round(seconds / result.steps * 1e6, 2),
        "stepwise_over_stretches": round(stepwise / seconds, 1),
    }


def scheduled(trace: Trace, policy: str, name: str) -> dict[str, Any]:
    """One policy over the trace on a server whose scheduler is asked at every step."""
    start = time.process_time()
    result = simulate(trace, policy, server=SCHEDULED[name])
    seconds = time.process_time() - start
    return {
        "policy": policy,
        "server": name,
        "seconds": round(seconds, 2),
        "requests": result.served,
        "steps": result.steps,
        "us_per_step": round(seconds / result.steps * 1e6, 2),
    }


def long_run(trace: Trace, policy: str, num_requests: int) -> dict[str, Any]:
    """A trace of that many requests; seconds and the process's largest memory."""
    most = before = resident_mib()

    def look(_done: int) -> None:
        nonlocal most
        most = max(most, resident_mib())

    start = time.process_time()
    result = simulate(repeated(trace, num_requests), policy, server=Server(warm=True), progress=look)
    seconds = time.process_time() - start
    return {
        "policy": policy,
        "requests": result.served,
        "decisions": result.steps,
        "seconds": round(seconds, 1),
        "us_per_step": round(seconds / result.steps * 1e6, 2),
        "mib_over_the_trace": round(most - before, 1),
        "gap_p99_us": result.gap.p99,
        "relative_error": result.gap.relative_error,
    }


def resident_mib() -> float:
    """Memory of this process now, as Linux counts it."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def in_a_process(trace: Path, policy: str, num_requests: int) -> dict[str, Any]:
    """`long_run` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.simulate", "--trace", str(trace), "--long", policy, str(num_requests)]
    found: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    print(found, flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=input_file, required=True, help="the trace that is simulated whole")
    parser.add_argument("--date", default="", help="written into the result; without it nothing is written")
    parser.add_argument("--long", nargs=2, metavar=("POLICY", "REQUESTS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    trace = read_trace(arguments.trace)
    if arguments.long:
        policy, num_requests = arguments.long
        print(json.dumps(long_run(trace, policy, int(num_requests))))
        return 0
    load, commit = round(os.getloadavg()[0], 2), commit_of()
    wholes = []
    for policy in sorted(OWN):
        wholes.append(whole(trace, policy))
        print(wholes[-1], flush=True)
    through = [scheduled(trace, policy, name) for policy in ("auto", "vllm") for name in SCHEDULED]
    print(through, flush=True)
    per_request = max(each["steps"] / each["requests"] for each in wholes if each["policy"] == "auto")
    enough = int(DECISIONS / per_request * 1.01)
    millions = [in_a_process(arguments.trace, policy, enough) for policy in ("auto", "vllm")]
    lengths = [in_a_process(arguments.trace, "auto", length) for length in LENGTHS]
    if arguments.date:
        written = {
            "what": "processor seconds on one thread: whole traces, ten million decisions, and by length",
            "date": arguments.date,
            "commit": commit,
            "command": f"python -m benchmarks.simulate --trace {arguments.trace.name} --date {arguments.date}",
            "trace": arguments.trace.name,
            "kpolicy": kpolicy.__version__,
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "load_average_before": load,
            "whole_trace": wholes,
            "through_the_scheduler": through,
            "ten_million_decisions": millions,
            "by_length": lengths,
            "us_per_step_longest_over_shortest": round(lengths[-1]["us_per_step"] / lengths[0]["us_per_step"], 2),
        }
        RESULT.write_text(json.dumps(written, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
