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

Of a run with several turns a policy (``kpolicy run --repeats``) give each turn's log, in the order of the turns: cells
are of the first turns, latencies and the ranking of the means of all, and two policies are ranked where the interval of
their difference, by what each one's turns deviate by, leaves 0 out (`benchmarks.fidelity_turns`). ``--again`` takes
steps of first turns.

In those cells a step's regime is by the host speed that was noted at it: one that only a slow moment makes host-bound
counts as host-bound. Other tables, of first turns and of all, are by the regime that the profile gives each step at its
own host speed, which is what a simulation calls it.

To tell the step costs' errors from the simulated scheduler's, the logs' own step times are served too ("replayed"):
with requests let in at the steps at which the run let them in, how many batches are the run's, and the latencies.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import attrs

import kpolicy
from benchmarks.command import command_line, commit_of, input_file, without_folders
from benchmarks.fidelity_again import (
    POOLED,
    Cell,
    cells_again,
    check_probe,
    measured_again,
    shown_again,
    side_by_side,
    steps_again,
)
from benchmarks.fidelity_served import Turns, forecast_steps, forecasts, latencies, outside, requests_of
from benchmarks.fidelity_turns import figure, figures_of, not_shown, ranked_wrong, ranking, replays_apart, ties
from kpolicy.costs import MIDDLE_OF, CostTable
from kpolicy.schemas import Profile, StepEntry, read_profile, read_step_log, write_profile
from kpolicy.simulate.fidelity import FidelityRow, expected_costs, fidelity
from kpolicy.simulate.repeats import RepeatRow

RESULT = Path(__file__).parent / "results" / "fidelity.json"
OWN_TABLE = "measured in the run itself, before its first request"
"""How a table came to be where nothing else is said."""
MIDDLE = re.compile(rf"({re.escape(MIDDLE_OF)}\d+): ")
"""What the version of `kpolicy.middle_profile.middle`'s tables begins with"""


def per_token_us(entries: Sequence[StepEntry], times: list[float]) -> float:
    """Time of all steps over the tokens that they computed."""
    return sum(times) / sum(each.shape.numbers.total_tokens for each in entries)


def us_per_token(logs: Turns, costs: CostTable) -> dict[str, dict[str, Any]]:
    """By policy, what a token took by the logs and by the table."""
    found: dict[str, dict[str, Any]] = {}
    for policy, turns in logs.items():
        measured, expected = [], []
        for i, entries in enumerate(turns):
            timed = [each for each in entries if each.cycle_us]
            measured.append(per_token_us(timed, [each.cycle_us or 0.0 for each in timed]))
            costed = expected_costs(timed, costs, list(chain(*turns[:i])))
            expected.append(per_token_us(timed, [each.cycle_us for each in costed]))
        found[policy] = figure(measured, expected, 2)
    return found


def rounded(row: FidelityRow | RepeatRow | Cell) -> dict[str, Any]:
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
        "--log", type=input_file, action="append", required=True, help="a policy's step log; again for each, and turn"
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
    commit = commit_of()
    profile = read_profile(arguments.profile)
    if arguments.date and arguments.date < profile.measured_at[:10]:
        parser.error(f"--date {arguments.date} is before the profile was measured, {profile.measured_at[:10]}")
    tables: dict[str, Any] = {}
    logs: dict[str, list[tuple[StepEntry, ...]]] = {}
    later: list[StepEntry] = []
    for path in arguments.log:
        log = read_step_log(path)
        check_probe(log, profile, path)
        turns = logs.setdefault(log.header.policy, [])
        turns.append(log.entries)
        if len(turns) > 1:
            later += log.entries
            continue
        rows = fidelity(log.entries, profile.costs)
        tables[log.header.policy] = [rounded(row) for row in rows]
        shown(log.header.policy, rows)
    first = {policy: turns[0] for policy, turns in logs.items()}
    steps = list(chain(*first.values()))
    pooled = fidelity(steps, profile.costs)
    tables[POOLED] = [rounded(row) for row in pooled]
    shown(POOLED, pooled)
    later_rows = fidelity(later, profile.costs, steps) if later else []
    if later:
        shown(f"{POOLED}, later turns", later_rows)
    all_rows = fidelity([*steps, *later], profile.costs) if later else pooled
    own_rows = fidelity(steps, profile.costs, own_speed=True)
    shown(f"{POOLED}, regimes at the profile's own host speed", own_rows)
    own_all = own_rows
    if later:
        own_all = fidelity([*steps, *later], profile.costs, own_speed=True)
        shown(f"{POOLED}, all turns, regimes at the profile's own host speed", own_all)
    ran_again = steps_again(arguments.again, first, profile)
    again = measured_again(ran_again, first, profile)
    cells = cells_again(ran_again, first, profile) if again else []
    own_cells = cells_again(ran_again, first, profile, own_speed=True) if again else []
    for policy, repeats in again.items():
        shown_again(policy, repeats)
    if again:
        print(f"{POOLED}, side by side", *side_by_side(pooled, again[POOLED]), sep="\n  ")
        print(f"{POOLED}, how many of the run's steps in a cell ran again", *map(str, cells), sep="\n  ")
    per_token = us_per_token(logs, profile.costs)
    replays = replays_apart(logs, profile.costs)
    print("replays of the same decode graphs,", *(f"{pair} {apart:+.2%}" for pair, apart in replays.items()))
    wrong, unsure = ranked_wrong(per_token), not_shown(per_token)
    print("ranking by time a token:", wrong or "as measured", *(f", {each} not shown" for each in unsure))
    served: dict[str, Any] = {}
    of_run: dict[str, Any] = {}
    if arguments.run is not None:
        run = json.loads(arguments.run.read_text())
        requests = requests_of(run, arguments.trace, arguments.start, arguments.window)
        found = latencies(run, requests, profile.costs, logs)
        served = {"policies": found, **ranking(found)}
        for policy, each in found.items():
            for part in (each, *each.get("turns", ())):
                print(
                    policy if part is each else "  a turn",
                    *(f"{name} {part[name]['measured']:,.2f} / {part[name]['simulated']:,.2f}"
                      for name in figures_of(part)),
                    part.get("replayed", ""),
                )  # fmt: skip
        print("ranking by latency:", *(f"{key} {served[key]}" for key in ("ranked_wrong", "not_shown", "tie")))
        of_run = {
            "setting": run["setting"],
            "scheduler_us": {
                policy: [[round(us, 2) for us in outside(each)] for each in run["policies"] if each["policy"] == policy]
                for policy in found
            },
            "forecasts": forecasts(run, requests, profile.costs, logs),
            "forecast_steps": forecast_steps(run, requests, profile.costs, logs),
        }
        print("mean step times told nothing of the run:", *(
            f"{each['mode']} {each['regime']} {each['measured_us']} / {each['forecast_us']} us, error {each['error']}, "
            f"{each['steps']} steps" for each in of_run["forecast_steps"]
        ), sep="\n  ")  # fmt: skip
        for knows, forecast in of_run["forecasts"].items():
            print(f"told {knows} of the run:", *(
                f"{policy} " + " ".join(f"{name} {each[name]['simulated']:,.2f} ({each[name]['error']:+.1%})"
                                        for name in figures_of(each))
                for policy, each in forecast["policies"].items()
            ), f"ranked wrongly {forecast['ranked_wrong']}, not shown {forecast['not_shown']}", sep="\n  ")  # fmt: skip
    if arguments.date:
        result = RESULT.with_stem(f"{RESULT.stem}-{arguments.name}") if arguments.name else RESULT
        written = {
            "what": "step times of a cost table against those measured, by mode and regime",
            "date": arguments.date,
            "commit": commit,
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
            "host_work_inside_us": profile.costs.host_work_inside_us,
            "host_probe": profile.costs.host_probe,
            "policies": tables,
            "measured_again": {policy: [rounded(row) for row in repeats] for policy, repeats in again.items()},
            "cells_again": [rounded(cell) for cell in cells],
            "later_turns": [rounded(row) for row in later_rows],
            "all_turns": [rounded(row) for row in all_rows],
            "by_own_speed": {
                "first_turns": [*map(rounded, own_rows)],
                "all_turns": [*map(rounded, own_all)],
                "cells_again": [*map(rounded, own_cells)],
            },
            "us_per_token": per_token,
            "ranked_wrong": wrong,
            "replays_apart": replays,
            "tie": ties(per_token),
            "not_shown": unsure,
            "served": served,
            **of_run,
        }
        result.write_text(json.dumps(written, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
