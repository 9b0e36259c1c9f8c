"""Simulated against measured: each step of a measured run costed again, and the runs' latencies and ranking.

Run from the repository root, with a profile and step logs that one machine measured::

    kpolicy run --policy auto --policy vllm --trace T --rate X --save-profile P.json --step-log S.jsonl --json > R.json
    python -m benchmarks.fidelity --profile P.json --log S-auto.jsonl --log S-vllm.jsonl --run R.json --trace T --date D

A step log's times are the executor's: each step is costed again by the profile. With ``--run`` the same arrivals are
simulated too, with nothing but the profile and what the run's scheduler took a step (its ``outside_us``), and the
median time to first token, the median gap and the ranking of policies are held to the run's. Steps with prompts have a
time of their own outside the executor, where the run tells it (``outside_prompts_us``).

Where profile and log note the host's speed (`kpolicy.host_speed`), the host's times are brought to each step's, and in
the simulation to what was noted at its time: virtual machines' cores change speed by half for seconds at a time.

A profile's table needn't be the one that its run had: ``--table`` says how it came to be, where the table doesn't by
itself (`kpolicy.middle_profile`), and with ``--date`` the result names it and the profile is kept beside it.

To tell the step costs' errors from the simulated scheduler's, the logs' own step times are served too ("replayed"):
with requests let in at the steps at which the run let them in, how many batches are the run's, and the latencies.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

import attrs

import kpolicy
from benchmarks.command import command_line, input_file, without_folders
from benchmarks.fidelity_again import POOLED, check_probe, measured_again, shown_again, side_by_side
from kpolicy.attention import Claims
from kpolicy.costs import CostTable
from kpolicy.scheduling.traces import Trace, read_trace
from kpolicy.schemas import Profile, StepEntry, read_profile, read_step_log, write_profile
from kpolicy.settings import Settings
from kpolicy.shapes import GAP_TAIL_US, BatchNumbers
from kpolicy.simulate import Server, simulate
from kpolicy.simulate.fidelity import FidelityRow, expected_costs, fidelity, same_ranking
from kpolicy.simulate.host_state import HostSpeeds
from kpolicy.simulate.percentiles import Percentiles
from kpolicy.simulate.queue import Queue
from kpolicy.simulate.repeats import RepeatRow
from kpolicy.simulate.requests import Request, in_order

RESULT = Path(__file__).parent / "results" / "fidelity.json"
_COUNTS = BatchNumbers._fields.index("max_query_len")
OWN_TABLE = "measured in the run itself, before its first request"
"""How a table came to be where nothing else is said."""
MIDDLE = re.compile(r"(the middle of each figure of \d+): ")
"""What the version of `kpolicy.middle_profile.middle`'s tables begins with"""


def per_token_us(entries: tuple[StepEntry, ...], times: list[float]) -> float:
    """Time of all steps over the tokens that they computed."""
    return sum(times) / sum(each.shape.numbers.total_tokens for each in entries)


def outside(each: dict[str, Any]) -> tuple[float, float]:
    """What the run's scheduler took a step, and what a step with prompts took besides; 0 where the run doesn't tell."""
    prompts = each.get("prompt_steps", 0)
    decodes = each["steps"] - prompts
    if not prompts or not decodes:
        return each["outside_us"] / each["steps"], 0.0
    plain = (each["outside_us"] - each["outside_prompts_us"]) / decodes
    return plain, max(each["outside_prompts_us"] / prompts - plain, 0.0)


def requests_of(run: dict[str, Any], trace: Path, start_s: float, window_s: float) -> Trace:
    """The requests that the run served."""
    setting = run["setting"]
    return read_trace(trace).window(start_s, window_s).limited(setting["max_model_len"]).scaled(setting["rate"])


def replayed(
    entries: Sequence[StepEntry], setting: dict[str, Any], served: dict[str, Any], trace: Trace
) -> tuple[dict[str, Any], list[float]]:
    """The log's step times in the simulator's queue, with requests let in at the steps at which the run let them in.

    Args:
        entries: a policy's step log.
        setting: the run's.
        served: what the run measured for the policy.
        trace: what it served.

    Returns:
        How many batches are the run's, and the latencies; the end of each step, in microseconds from the first arrival.
    """
    queue = Queue(
        Settings(max_num_reqs=setting["max_num_reqs"], max_num_tokens=setting["max_num_tokens"]),
        num_blocks=setting["kv_tokens"] // setting["block_size"], block_size=setting["block_size"], prefix_block=0,
    )  # fmt: skip
    step_us, prompt_us = outside(served)
    coming = deque(in_order(trace.requests))
    start_us = now_us = coming[0].arrival_s * 1e6
    ends: list[float] = []
    ttft, gap, same = Percentiles(), Percentiles(), 0
    for entry in entries:
        if queue.idle and coming:
            now_us = max(now_us, coming[0].arrival_s * 1e6)
        inside = (entry.queue.waiting + entry.queue.running) if entry.queue else 0
        while coming and queue.num_running + len(queue.waiting) < inside:
            arrived = coming.popleft()
            queue.add(Request(arrived, arrived.arrival_s * 1e6))
            now_us = max(now_us, arrived.arrival_s * 1e6)
        if coming:
            # It hadn't come yet. Time outside the executor varies, and who was let in tells what the clock was.
            now_us = min(now_us, coming[0].arrival_s * 1e6)
        step = queue.next_step(now_us)
        if step is None:
            break
        same += step.numbers[:_COUNTS] == entry.shape.numbers[:_COUNTS]
        us = (entry.cycle_us or 0.0) + step_us + (prompt_us if step.chunks else 0.0)
        now_us += us
        ends.append(now_us - start_us)
        if step.numbers.num_decodes:
            gap.add(us / entry.decode_steps, step.numbers.num_decodes * entry.decode_steps)
        for request in queue.complete(step, entry.decode_steps).first_tokens:
            ttft.add(now_us - request.arrival_us)
    found = {
        "steps": len(entries), "same_batches": same,
        "ttft_p50_ms": round(ttft.spread().p50 / 1e3, 3), "gap_p50_ms": round(gap.spread().p50 / 1e3, 3),
    }  # fmt: skip
    return found, ends


def host_speeds(entries: Sequence[StepEntry], ends: Sequence[float]) -> HostSpeeds | None:
    """How fast the host was when, as it was noted after a log's steps; None where it wasn't.

    Every note as it is: a queue feels the slow moments that the middle of several leaves out.
    """
    # A request that came earlier than the time outside the executor says sets the clock back.
    noted = [
        (end, each.host_work_us) for each, end in zip(entries, accumulate(ends, max), strict=False) if each.host_work_us
    ]
    return HostSpeeds(noted) if noted else None


def latencies(
    run: dict[str, Any], requests: Trace, costs: CostTable, logs: Mapping[str, Sequence[StepEntry]]
) -> dict[str, Any]:  # fmt: skip
    """By policy, what the run measured and what simulating its arrivals gives: milliseconds and their error; steps.

    Args:
        run: what ``kpolicy run --json`` printed.
        requests: what it served.
        costs: the profile's.
        logs: each policy's steps, beside which the host's speed may be noted.

    With a policy's log also "replayed", and the mean of the fixed work's times that it notes, "host_work_us".
    """
    setting = run["setting"]
    claims = Claims.at_level(setting["attention"].partition(",")[0])
    settings = Settings(max_num_reqs=setting["max_num_reqs"], max_num_tokens=setting["max_num_tokens"])
    found: dict[str, Any] = {}
    for each in run["policies"]:
        scheduler_us, scheduler_prompt_us = outside(each)
        # Runs before the fact was told were decided without it.
        tail = any(GAP_TAIL_US in entry.shape.facts for entry in logs.get(each["policy"], ()))
        server = Server(
            settings=settings, kv_tokens=setting["kv_tokens"], block_size=setting["block_size"], warm=True,
            kv_bytes_per_token=None, scheduler_us=scheduler_us, scheduler_prompt_us=scheduler_prompt_us, gap_tail=tail,
        )  # fmt: skip
        speeds = None
        told: dict[str, Any] = {}
        if (entries := logs.get(each["policy"])) is not None:
            told["replayed"], ends = replayed(entries, setting, each, requests)
            speeds = host_speeds(entries, ends)
            noted = [entry.host_work_us for entry in entries if entry.host_work_us]
            if noted:
                told["host_work_us"] = round(fmean(noted), 3)
        simulated = simulate(requests, each["policy"], server=server, costs=costs, attention=claims, host_speed=speeds)
        # Both sides have the scheduler's own time, a step's and the run's.
        pairs = {
            "ttft_p50_ms": (each["ttft_us"][0], simulated.ttft.p50),
            "gap_p50_ms": (each["gap_us"][0], simulated.gap.p50),
            "busy_ms": (each["step_us"] + each["outside_us"], simulated.step_us),
            "span_ms": (each["span_s"] * 1e6, simulated.span_s * 1e6),
        }
        found[each["policy"]] = {
            name: {
                "measured": round(measured / 1e3, 3), "simulated": round(expected / 1e3, 3),
                "error": round(expected / measured - 1, 4),
            }
            for name, (measured, expected) in pairs.items()
        } | {"steps": {"measured": each["steps"], "simulated": simulated.steps}} | told  # fmt: skip
    return found


def ranked_wrong(found: dict[str, Any], name: str) -> list[tuple[str, str]]:
    """Pairs of policies that the simulation ranks the other way round by that figure."""
    measured, simulated = (
        {policy: each[name][side] for policy, each in found.items()} for side in ("measured", "simulated")
    )
    return same_ranking(measured, simulated, tie=0.02)


def rounded(row: FidelityRow | RepeatRow) -> dict[str, Any]:
    """The row as it is written."""
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in attrs.asdict(row).items()}


def shown(title: str, rows: Sequence[FidelityRow]) -> None:
    """Print a policy's rows."""
    print(title)
    for row in rows:
        print(
            f"  {row.mode:<22} {row.regime:<11} {row.steps:>7} steps  error {row.error:6.1%}  median "
            f"{row.median_error:6.1%}  bias {row.bias:+6.1%}  p50 {row.gap_p50_error:6.1%}  noise {row.noise:6.1%}"
            f"  at the table's host speed {row.at_speed_error:6.1%} of {row.at_speed_steps}  by kinds' means"
            f" {row.kind_error:6.1%} of {row.kind_steps}"
        )


def keep_profile(profile: Profile, result: Path) -> str:
    """Write the profile beside a result, without folders of the machine that made it; its file's name."""
    path = result.with_stem(f"{result.stem}-profile")
    write_profile(path, attrs.evolve(profile, command=without_folders(shlex.split(profile.command))))
    return path.name


def made_of(profile: Profile, said: str) -> str:
    """How a profile's table came to be: as was said, or as its version tells."""
    middle = MIDDLE.match(profile.costs.version)
    return said or (f"{middle[1]} calibrations before the run" if middle else OWN_TABLE)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=input_file, required=True, help="the profile that the run saved, or another")
    parser.add_argument(
        "--log", type=input_file, action="append", required=True, help="a policy's step log; again for each"
    )
    parser.add_argument("--run", type=input_file, help="what kpolicy run --json printed, for latencies; with --trace")
    parser.add_argument("--trace", type=input_file, help="the trace that it served")
    parser.add_argument("--start", type=float, default=0.0, help="second of the trace that it started at")
    parser.add_argument("--window", type=float, default=30.0, help="seconds of the trace that it served")
    parser.add_argument("--again", type=input_file, action="append", default=[], help="steps of it that ran again")
    parser.add_argument("--name", default="", help="names the result file, fidelity-NAME.json, for another device")
    parser.add_argument("--table", default="", help="how the profile's table came to be, for the result")
    parser.add_argument("--date", default="", help="written into the result; without it nothing is written")
    arguments = parser.parse_args(argv)
    profile = read_profile(arguments.profile)
    if arguments.date and arguments.date < profile.measured_at[:10]:
        parser.error(f"--date {arguments.date} is before the profile was measured, {profile.measured_at[:10]}")
    measured: dict[str, float] = {}
    expected: dict[str, float] = {}
    tables: dict[str, Any] = {}
    logs: dict[str, tuple[StepEntry, ...]] = {}
    for path in arguments.log:
        log = read_step_log(path)
        check_probe(log, profile, path)
        logs[log.header.policy] = log.entries
        rows = fidelity(log.entries, profile.costs)
        tables[log.header.policy] = [rounded(row) for row in rows]
        timed = tuple(each for each in log.entries if each.cycle_us)
        measured[log.header.policy] = per_token_us(timed, [each.cycle_us or 0.0 for each in timed])
        expected[log.header.policy] = per_token_us(
            timed, [each.cycle_us for each in expected_costs(timed, profile.costs)]
        )
        shown(log.header.policy, rows)
    pooled = fidelity([entry for entries in logs.values() for entry in entries], profile.costs)
    tables[POOLED] = [rounded(row) for row in pooled]
    shown(POOLED, pooled)
    again = measured_again(arguments.again, logs, profile)
    for policy, repeats in again.items():
        shown_again(policy, repeats)
    if again:
        print(f"{POOLED}, side by side", *side_by_side(pooled, again[POOLED]), sep="\n  ")
    wrong = same_ranking(measured, expected, tie=0.02)
    print("ranking by time a token:", wrong or "the same")
    served: dict[str, Any] = {}
    if arguments.run is not None:
        run = json.loads(arguments.run.read_text())
        requests = requests_of(run, arguments.trace, arguments.start, arguments.window)
        found = latencies(run, requests, profile.costs, logs)
        figures = [name for name in next(iter(found.values())) if name.endswith("_ms")]
        served = {"policies": found, "ranked_wrong": {name: ranked_wrong(found, name) for name in figures}}
        for policy, each in found.items():
            print(
                policy,
                *(f"{name} {each[name]['measured']:,.2f} / {each[name]['simulated']:,.2f}" for name in figures),
                each.get("replayed", ""),
            )
        print("ranking by latency:", served["ranked_wrong"])
    if arguments.date:
        result = RESULT.with_stem(f"{RESULT.stem}-{arguments.name}") if arguments.name else RESULT
        written = {
            "what": "step times of a cost table against those measured, by mode and regime",
            "date": arguments.date,
            "command": command_line("benchmarks.fidelity", argv),
            "kpolicy": kpolicy.__version__,
            "device": profile.device,
            "model": profile.model,
            "versions": dict(profile.versions),
            "measured_at": profile.measured_at,
            "table": {
                "made": made_of(profile, arguments.table),
                "version": profile.costs.version,
                "profile": keep_profile(profile, result),
            },
            "host_work_us": profile.costs.host_work_us,
            "host_probe": profile.costs.host_probe,
            "policies": tables,
            "measured_again": {policy: [rounded(row) for row in repeats] for policy, repeats in again.items()},
            "us_per_token": {
                name: {"measured": round(measured[name], 2), "expected": round(expected[name], 2)} for name in measured
            },
            "ranked_wrong": wrong,
            "served": served,
        }
        result.write_text(json.dumps(written, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
