"""What a forecast's figures are worth: by single calibrations, from other starts, and by less than all of a profile.

A run that `benchmarks.fidelity` was given has its forecasts in its result: what `kpolicy simulate` says by the middle
of the calibrations before it. Here the same arrivals are simulated, for the same policies,

- by the calibrations one by one;
- from `STARTS` starts among the notes of the host's speed (``kpolicy simulate --seed``), with the pairs of policies
  that are ranked wrongly from each;
- on a host as much slower than its notes as it was in a policy's turns (``--slower-host``; of fixed work the plain
  mean beside the turns' steps, over the notes' mean, which are by time and from inside steps), and on one that is
  `SLOWER` times as slow, each from all starts; and
- by a part of the profile: its launches alone (``--scheduler-us 0 --steady-host``), with the scheduler's time
  (``--steady-host``), and with all of it,

and held to what the run measured. From the repository root, with a published result and its profiles beside it::

    python -m benchmarks.forecast_spread --result fidelity-h200-NAME-before.json --calibrations 3 --trace T --date D
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import kpolicy
from benchmarks.command import command_line, commit_of, input_file
from benchmarks.fidelity_served import STARTS, requests_of, served_by, server_of
from benchmarks.fidelity_turns import ranked_wrong
from kpolicy.costs import CostTable
from kpolicy.scheduling.traces import Trace
from kpolicy.schemas import read_profile

RESULTS = Path(__file__).parent / "results"
KNOWN: dict[str, dict[str, Any]] = {
    "launches": {"scheduler_us": 0.0, "steady_host": True},
    "scheduler": {"steady_host": True},
    "all": {},
}
"""What of a profile a simulation goes by, and the server that does"""
FIGURES = ("ttft_p50_ms", "gap_p50_ms")
SLOWER = 1.08


def forecast(
    setting: dict[str, Any], requests: Trace, policy: str, costs: CostTable, seed: int = 0, **known: Any
) -> dict[str, float]:
    """Milliseconds of each of `FIGURES`.

    Args:
        setting: the run's.
        requests: what it served.
        policy: the policy.
        costs: the profile's.
        seed: of the start among its notes.
        known: of the server, what it goes by.
    """
    result = served_by(setting, requests, policy, costs, server_of(setting, **known), seed=seed)
    return {name: us / 1e3 for name, us in zip(FIGURES, (result.ttft.p50, result.gap.p50), strict=True)}


def middles(found: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of each figure the middle."""
    return {name: median(each[name] for each in found) for name in FIGURES}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--result", type=input_file, required=True, help="what benchmarks.fidelity wrote of the run")
    parser.add_argument("--calibrations", type=int, default=3, help="those before the run, beside it (3)")
    parser.add_argument("--trace", type=input_file, required=True, help="the trace that it served")
    parser.add_argument("--start", type=float, default=0.0, help="second of the trace that it started at")
    parser.add_argument("--window", type=float, default=30.0, help="seconds of the trace that it served")
    parser.add_argument("--date", default="", help="written into the result; without it nothing is written")
    arguments = parser.parse_args(argv)
    commit = commit_of()
    path: Path = arguments.result
    result = json.loads(path.read_text())
    if "after" in result["table"]["made"]:
        parser.error(
            f"--result {path} is held to calibrations made after the run too, by which nothing is told beforehand. "
            "Give the one by those before it alone."
        )
    setting = result["setting"]
    requests = requests_of({"setting": setting}, arguments.trace, arguments.start, arguments.window)
    costs = read_profile(path.with_name(result["table"]["profile"])).costs
    stem = path.stem.removesuffix("-before")
    singles = [
        read_profile(path.with_name(f"{stem}-profile-{number}.json")).costs
        for number in range(1, arguments.calibrations + 1)
    ]
    if costs.served is None or not costs.served.host_work_us:
        parser.error(f"--result {path}: its profile doesn't say how fast the host was while its calibration served")
    notes_us = costs.served.mean_work_us
    policies: dict[str, Any] = {}
    started: list[dict[str, dict[str, float]]] = [{} for _ in range(STARTS)]
    for policy, measured in result["served"]["policies"].items():

        def errors(found: dict[str, float], measured: Any = measured) -> dict[str, float]:
            return {name: round(ms / measured[name]["measured"] - 1, 4) for name, ms in found.items()}

        told = partial(forecast, setting, requests, policy)

        def from_starts(told: Any = told, **known: Any) -> list[dict[str, float]]:
            return [told(costs, seed, **known) for seed in range(STARTS)]

        as_noted = from_starts()
        for by_policy, each in zip(started, as_noted, strict=True):
            by_policy[policy] = each
        starts = list(map(errors, as_noted))
        turns = [turn["host_work_us"] for turn in measured["turns"]]
        times = fmean(turns) / notes_us
        usual, slower, as_slow = map(
            middles, (as_noted, from_starts(slower_host=SLOWER), from_starts(slower_host=times))
        )
        policies[policy] = {
            "by_part": {name: errors(told(costs, **known)) for name, known in KNOWN.items()},
            "by_calibration": [errors(told(each)) for each in singles],
            "from_starts": {
                name: {
                    "least": min(each[name] for each in starts),
                    "middle": round(median(each[name] for each in starts), 4),
                    "most": max(each[name] for each in starts),
                }
                for name in FIGURES
            },
            "slower_host": {
                "times": round(times, 4),
                "turns": [round(each / notes_us, 4) for each in turns],
                "by_it": errors(as_slow),
                "moved": {name: round(slower[name] / usual[name] - 1, 4) for name in FIGURES},
            },
        }
        print(policy, json.dumps(policies[policy]), flush=True)
    wrong = [
        [
            (name, *pair)
            for name in FIGURES
            for pair in ranked_wrong(
                {
                    policy: {**each[name], "simulated": by_policy[policy][name]}
                    for policy, each in result["served"]["policies"].items()
                }
            )
        ]
        for by_policy in started
    ]
    ranked = {
        " of ".join((name, " before ".join(pair))): sum((name, *pair) in each for each in wrong)
        for name, *pair in sorted({each for found in wrong for each in found})
    }
    print("ranked wrongly, from how many starts:", ranked)
    if arguments.date:
        written = {
            "what": "errors of forecasts by parts of a profile, by single calibrations and from other starts",
            "date": arguments.date,
            "commit": commit,
            "command": command_line("benchmarks.forecast_spread", argv),
            "kpolicy": kpolicy.__version__,
            "run": path.name,
            "starts": STARTS,
            "slower": SLOWER,
            "ranked_wrong_from_starts": ranked,
            "policies": policies,
        }
        out = RESULTS / f"forecast_spread-{stem.removeprefix('fidelity-')}.json"
        out.write_text(json.dumps(written, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
