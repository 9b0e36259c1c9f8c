"""Stands for `benchmarks.vllm.child` where there is no GPU: the same lines, figures that follow from its arguments."""

from __future__ import annotations

import argparse
import json
import os
import sys


def answer(**row: object) -> None:
    sys.stdout.write("RES " + json.dumps(row) + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--llm", default="{}")
    parser.add_argument("--hold", action="store_true")
    options = parser.parse_known_args()[0]
    llm = json.loads(options.llm)
    shim = "kpolicy" in llm.get("additional_config", {})
    if "fails" in llm:
        sys.exit("no such device")
    sys.stdin.readline()
    if options.hold and shim:
        answer(kind="waits")
        sys.stdin.readline()
    sizes = llm.get("compilation_config", {}).get("cudagraph_capture_sizes", [1, 2])
    answer(
        kind="startup", start_s=2.0, compile_s=1.0, capture_s=1.0 if shim else 2.0, graph_mib=10.0 * len(sizes),
        graphs={"FULL": len(sizes)}, sizes=sizes, kv_tokens=100, mode="FULL", level="3", runner="v1", scheduler="S",
        gpu="none", vllm="0.23.0", torch="2",
    )  # fmt: skip
    state = ""
    for line in sys.stdin:
        order = json.loads(line)
        if order.get("statistics"):
            answer(kind="statistics", counters={})
        elif order.get("profile"):
            answer(kind="profile", steps=[], spans=len(order["requests"]))
        elif "state" in order:
            state = order["state"]
            answer(kind="state", state=state, ms=1.0)
        elif "prompts" in order:
            answer(
                kind="generated", tokens=[[1] * count for count in order["outputs"]], steps=[["FULL", 8]], stats=[],
                logits=[[{"1": 1.0, "2": 0.5}] * count for count in order["outputs"]],
            )  # fmt: skip
        elif "breaks" in llm:
            sys.exit("the device was lost")
        else:
            time = (1.0 if shim else 2.0) * (2.0 if state == "slow" else 1.0)
            answer(
                kind="run", requests_per_s=len(order["requests"]) / time, ttft_p50_ms=time, ttft_p99_ms=time,
                gap_p50_ms=time, gap_p99_ms=time, wall_s=time, steps=3, modes={},
                may_run_on=sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
            )  # fmt: skip


main()
