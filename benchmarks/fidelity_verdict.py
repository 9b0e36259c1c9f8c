"""Whether a simulation held to a measured run is near enough: what `benchmarks.fidelity` wrote, by one rule.

Run from the repository root, with results of `benchmarks.fidelity` whose profile is of before the run alone::

    python -m benchmarks.fidelity_verdict fidelity-h200-NAME.json ...

What was wanted: simulated step times within 5% of measured ones in the mean, by mode and regime, medians of latencies
within 10%, and policies ranked as measured. By the rule of 2026-11-30, 08:16 UTC (docs/measured_fidelity.md, "All
turns, and means"):

- **Steps**: of all turns of all policies, by mode and by the regime that the profile has at its own host speed. A cell
  with less than `SMALL` of the steps' time is told and not judged. "In the mean" is the error of a cell's mean step
  time; "singly" the mean of each step's own error, without its sign, which has what the machine itself differs by in
  it. A run is within the line singly, or in the mean alone, or not.
- **Medians** of first tokens and gaps, told the host's speed.
- **Ranking** by time a token, by those medians, by the time of all steps and by the run's span, told the host's speed;
  ties as `benchmarks.fidelity_turns` has them.

As a forecast (told nothing of the run) medians and the ranking by latencies have a verdict of their own; a median of
which a policy's own turns are over `LATENCY` apart isn't judged there.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from benchmarks.command import input_file
from benchmarks.fidelity_served import NOTHING

STEP, LATENCY = 0.05, 0.10
"""Errors of step times and of medians that are within the line"""
SMALL = 0.01
"""Share of all steps' time below which a cell isn't judged"""
MEDIANS = ("ttft_p50_ms", "gap_p50_ms")
SINGLY, IN_THE_MEAN, NO = "singly", "in the mean", "no"


@attrs.frozen(kw_only=True)
class CellVerdict:
    """Steps of one mode in one regime.

    Args:
        mode: with the form of a split.
        regime: one of `kpolicy.simulate.fidelity.REGIMES`.
        steps: of all turns of all policies.
        time_share: of the time of all steps.
        mean_error: of the mean step time; above 0 is too slow a simulation.
        single_error: the mean of each step's error, without its sign.
        noise: what would be left of that if the profile were right on the median of each kind of step.
    """

    mode: str
    regime: str
    steps: int
    time_share: float
    mean_error: float
    single_error: float
    noise: float

    @property
    def judged(self) -> bool:
        return self.time_share >= SMALL

    @property
    def within(self) -> str:
        """`SINGLY`, `IN_THE_MEAN` or `NO`."""
        if self.single_error <= STEP:
            return SINGLY
        return IN_THE_MEAN if abs(self.mean_error) <= STEP else NO


def cells_of(result: Mapping[str, Any]) -> list[CellVerdict]:
    """The cells of all turns, in the result's order."""
    return [
        CellVerdict(
            mode=row["mode"], regime=row["regime"], steps=row["steps"], time_share=row["time_share"],
            mean_error=row["bias"], single_error=row["error"], noise=row["noise"],
        )
        for row in result["by_own_speed"]["all_turns"]
        if "all" not in (row["mode"], row["regime"])
    ]  # fmt: skip


@attrs.frozen(kw_only=True)
class Verdict:
    """A run's.

    Args:
        cells: of its steps.
        medians: (policy, median) that are over the line, told the host's speed.
        ranked_wrong: by figure, pairs of policies that rank the other way round, told the host's speed.
        forecast_medians: `medians` told nothing of the run.
        forecast_ranked_wrong: `ranked_wrong` told nothing of the run.
    """

    cells: tuple[CellVerdict, ...]
    medians: tuple[tuple[str, str], ...]
    ranked_wrong: Mapping[str, list[list[str]]]
    forecast_medians: tuple[tuple[str, str], ...]
    forecast_ranked_wrong: Mapping[str, list[list[str]]]

    @property
    def steps(self) -> str:
        """Within the line `SINGLY`, `IN_THE_MEAN` or `NO`: the worst of the cells that are judged."""
        found = {cell.within for cell in self.cells if cell.judged}
        return next((each for each in (NO, IN_THE_MEAN) if each in found), SINGLY)

    @property
    def holds(self) -> bool:
        """Told the host's speed."""
        return self.steps != NO and not self.medians and not self.ranked_wrong

    @property
    def forecast_holds(self) -> bool:
        return not self.forecast_medians and not self.forecast_ranked_wrong


def verdict(result: Mapping[str, Any]) -> Verdict:
    """What the rule says of a result of `benchmarks.fidelity` that has cells of all turns, latencies and forecasts."""
    told, forecast = result["served"], result["forecasts"][NOTHING]
    wrong = {"us_per_token": result["ranked_wrong"], **told["ranked_wrong"]}
    return Verdict(
        cells=tuple(cells_of(result)),
        medians=_over(told["policies"]),
        ranked_wrong={name: pairs for name, pairs in wrong.items() if pairs},
        forecast_medians=_over(forecast["policies"], apart=LATENCY),
        forecast_ranked_wrong={name: pairs for name, pairs in forecast["ranked_wrong"].items() if pairs},
    )


def _over(policies: Mapping[str, Any], *, apart: float | None = None) -> tuple[tuple[str, str], ...]:
    """Medians over the line; not of those whose turns are further apart than `apart`."""
    return tuple(
        (policy, name)
        for policy, each in policies.items()
        for name in MEDIANS
        if abs(each[name]["error"]) > LATENCY and (apart is None or each[name].get("apart", 0.0) <= apart)
    )


def shown(name: str, found: Verdict) -> list[str]:
    """Lines that tell a verdict."""
    says = {True: "holds", False: "doesn't hold"}
    return [
        name,
        *(
            f"  {cell.mode:<22} {cell.regime:<11} {cell.steps:>7,} steps {cell.time_share:6.1%} of the time  "
            f"mean step time {cell.mean_error:+6.1%}  single steps {cell.single_error:6.1%}  "
            f"noise {cell.noise:6.1%}  {cell.within if cell.judged else 'not judged'}"
            for cell in found.cells
        ),
        f"  told the host's speed it {says[found.holds]}: steps within {STEP:.0%}: {found.steps}; "
        f"medians over {LATENCY:.0%}: {found.medians or 'none'}; ranked wrongly: {found.ranked_wrong or 'none'}",
        f"  as a forecast it {says[found.forecast_holds]}: "
        f"medians over {LATENCY:.0%}: {found.forecast_medians or 'none'}; "
        f"ranked wrongly: {found.forecast_ranked_wrong or 'none'}",
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=input_file, nargs="+", help="what benchmarks.fidelity wrote, several runs' too")
    arguments = parser.parse_args(argv)
    held = []
    for path in arguments.results:
        result: dict[str, Any] = json.loads(Path(path).read_text())
        rows = result.get("by_own_speed", {}).get("all_turns", ())
        if not all("time_share" in row for row in rows) or not rows or "forecasts" not in result:
            parser.error(
                f"{path} lacks cells of all turns, their share of the time, or forecasts. Write it again from the "
                "run's logs with benchmarks.fidelity --run R.json --trace T"
            )
        if "after" in result["table"]["made"]:
            parser.error(
                f"{path} is held to calibrations made after the run too, which the rule leaves out. Give the one by "
                "those before it alone."
            )
        found = verdict(result)
        held.append(found.holds)
        print("\n".join(shown(path.name, found)))
    return 0 if all(held) else 1


if __name__ == "__main__":
    raise SystemExit(main())
