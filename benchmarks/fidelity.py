"""Simulated against measured: each step of a measured run costed again, and the runs' latencies and ranking.

Run from the repository root, with a profile and step logs that one machine measured::

    kpolicy run --policy auto --policy vllm --save-profile P.json --step-log S.jsonl ...
    python -m benchmarks.fidelity --profile P.json --log S-auto.jsonl --log S-vllm.jsonl --date YYYY-MM-DD

A step log's times are the executor's. The ranking is by the mean time of a step's decode token, measured and expected.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import attrs

import kpolicy
from kpolicy.schemas import StepEntry, read_profile, read_step_log
from kpolicy.simulate.fidelity import expected_cost, fidelity, same_ranking

RESULT = Path(__file__).parent / "results" / "fidelity.json"


def per_token_us(entries: tuple[StepEntry, ...], times: list[float]) -> float:
    """Time of all steps over the tokens that they computed."""
    return sum(times) / sum(each.shape.numbers.total_tokens for each in entries)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--log", type=Path, action="append", required=True)
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
                f"{row.median_error:6.1%}  bias {row.bias:+6.1%}  p50 {row.gap_p50_error:6.1%}"
            )
    wrong = same_ranking(measured, expected, tie=0.02)
    print("ranking:", "the same" if not wrong else f"wrong for {wrong}")
    if arguments.date:
        written = {
            "what": "step times of a cost table against those measured, by mode and regime",
            "date": arguments.date,
            "command": "python -m benchmarks.fidelity --profile P.json --log S-POLICY.jsonl ...",
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
        }
        result = RESULT.with_stem(f"{RESULT.stem}-{arguments.name}") if arguments.name else RESULT
        result.write_text(json.dumps(written, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
