"""Simulated against measured: each step of a measured run costed again, and the runs' latencies and ranking.

Run from the repository root, with a profile and step logs that one machine measured::

    kpolicy run --policy auto --policy vllm --trace T --rate X --save-profile P.json --step-log S.jsonl --json > R.json
    python -m benchmarks.fidelity --profile P.json --log S-auto.jsonl --log S-vllm.jsonl --run R.json --trace T --date D

A step log's times are the executor's: each step is costed again by the profile. With ``--run`` the same arrivals are
simulated too, with nothing but the profile and what the run's scheduler took a step (its ``outside_us``), and the
median time to first token, the median gap and the ranking of policies are held to the run's.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import attrs

import kpolicy
from benchmarks.command import command_line
from kpolicy.attention import Claims
from kpolicy.costs import CostTable
from kpolicy.scheduling.traces import read_trace
from kpolicy.schemas import StepEntry, read_profile, read_step_log
from kpolicy.settings import Settings
from kpolicy.simulate import Server, simulate
from kpolicy.simulate.fidelity import expected_cost, fidelity, same_ranking

RESULT = Path(__file__).parent / "results" / "fidelity.json"


def per_token_us(entries: tuple[StepEntry, ...], times: list[float]) -> float:
    """Time of all steps over the tokens that they computed."""
    return sum(times) / sum(each.shape.numbers.total_tokens for each in entries)


def latencies(run: dict[str, Any], trace: Path, start_s: float, window_s: float, costs: CostTable) -> dict[str, Any]:
    """By policy, what the run measured and what simulating its arrivals gives: milliseconds and their error; steps.

    Args:
        run: what ``kpolicy run --json`` printed.
        trace: the file that it served.
        start_s: second of the trace that it started at.
        window_s: seconds of it.
        costs: the profile's.
    """
    setting = run["setting"]
    claims = Claims.at_level(setting["attention"].partition(",")[0])
    settings = Settings(max_num_reqs=setting["max_num_reqs"], max_num_tokens=setting["max_num_tokens"])
    requests = read_trace(trace).window(start_s, window_s).limited(setting["max_model_len"]).scaled(setting["rate"])
    found = {}
    for each in run["policies"]:
        server = Server(
            settings=settings, kv_tokens=setting["kv_tokens"], block_size=setting["block_size"], warm=True,
            kv_bytes_per_token=None, scheduler_us=each["outside_us"] / each["steps"],
        )  # fmt: skip
        simulated = simulate(requests, each["policy"], server=server, costs=costs, attention=claims)
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
        } | {"steps": {"measured": each["steps"], "simulated": simulated.steps}}  # fmt: skip
    return found


def ranked_wrong(found: dict[str, Any], name: str) -> list[tuple[str, str]]:
    """Pairs of policies that the simulation ranks the other way round by that figure."""
    measured, simulated = (
        {policy: each[name][side] for policy, each in found.items()} for side in ("measured", "simulated")
    )
    return same_ranking(measured, simulated, tie=0.02)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--log", type=Path, action="append", required=True)
    parser.add_argument("--run", type=Path, help="what kpolicy run --json printed, for latencies; with --trace")
    parser.add_argument("--trace", type=Path, help="the trace that it served")
    parser.add_argument("--start", type=float, default=0.0, help="second of the trace that it started at")
    parser.add_argument("--window", type=float, default=30.0, help="seconds of the trace that it served")
    parser.add_argument("--name", default="", help="names the result file, fidelity-NAME.json, for another device")
    parser.add_argument("--date", default="", help="written into the result; without it nothing is written")
    arguments = parser.parse_args()
    profile = read_profile(arguments.profile)
    measured: dict[str, float] = {}
    expected: dict[str, float] = {}
    tables: dict[str, Any] = {}
    for path in arguments.log:
        log = read_step_log(path)
        rows = fidelity(log.entries, profile.costs)
        tables[log.header.policy] = [
            {key: round(value, 4) if isinstance(value, float) else value for key, value in attrs.asdict(row).items()}
            for row in rows
        ]
        timed = tuple(each for each in log.entries if each.cycle_us)
        measured[log.header.policy] = per_token_us(timed, [each.cycle_us or 0.0 for each in timed])
        expected[log.header.policy] = per_token_us(
            timed, [expected_cost(each, profile.costs).cycle_us for each in timed]
        )
        print(log.header.policy)
        for row in rows:
            print(
                f"  {row.mode:<22} {row.regime:<11} {row.steps:>7} steps  error {row.error:6.1%}  median "
                f"{row.median_error:6.1%}  bias {row.bias:+6.1%}  p50 {row.gap_p50_error:6.1%}  noise {row.noise:6.1%}"
            )
    wrong = same_ranking(measured, expected, tie=0.02)
    print("ranking by time a token:", wrong or "the same")
    served: dict[str, Any] = {}
    if arguments.run is not None:
        run = json.loads(arguments.run.read_text())
        found = latencies(run, arguments.trace, arguments.start, arguments.window, profile.costs)
        figures = [name for name in next(iter(found.values())) if name != "steps"]
        served = {"policies": found, "ranked_wrong": {name: ranked_wrong(found, name) for name in figures}}
        for policy, each in found.items():
            print(
                policy, *(f"{name} {each[name]['measured']:,.2f} / {each[name]['simulated']:,.2f}" for name in figures)
            )
        print("ranking by latency:", served["ranked_wrong"])
    if arguments.date:
        written = {
            "what": "step times of a cost table against those measured, by mode and regime",
            "date": arguments.date,
            "command": command_line("benchmarks.fidelity"),
            "kpolicy": kpolicy.__version__,
            "device": profile.device,
            "model": profile.model,
            "versions": dict(profile.versions),
            "measured_at": profile.measured_at,
            "policies": tables,
            "us_per_token": {
                name: {"measured": round(measured[name], 2), "expected": round(expected[name], 2)} for name in measured
            },
            "ranked_wrong": wrong,
            "served": served,
        }
        result = RESULT.with_stem(f"{RESULT.stem}-{arguments.name}") if arguments.name else RESULT
        result.write_text(json.dumps(written, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
