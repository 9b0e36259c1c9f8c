"""What `benchmarks.fidelity` makes of policies that had several turns on the same arrivals (`kpolicy run --repeats`).

A figure is then the mean of a policy's turns, measured and simulated. Two policies are a tie by it where the 95%
interval of the difference of their measured means, as shares of each one's own, has 0 in it, by Student's t and what
their turns deviate by together. Of a policy with one turn nothing is known of that, and `TIE` stands for it. Where half
of the interval is over `MOST_APART` a tie isn't one: the ranking of these two isn't shown.

Results from before 2026-11-29, 22:25 UTC, don't say what turns deviate by. In these two policies are a tie where their
means are no further apart than the turns of either (docs/measured_fidelity.md has the rule by its times).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import chain, combinations
from math import sqrt
from statistics import fmean, stdev
from typing import Any

from benchmarks.student import student
from kpolicy.costs import CostTable
from kpolicy.modes import Mode
from kpolicy.schemas import StepEntry
from kpolicy.simulate.fidelity import expected_costs, same_ranking

TIE = 0.02
"""Share of the measured figure, of a policy that had one turn"""
MOST_APART = 0.05
"""Share by which policies may be a tie; where it takes more their ranking isn't shown"""
SIDES = ("measured", "simulated")
Figure = dict[str, Any]
"""A figure of a policy: `SIDES`, the error, and of several turns by how much the measured ones are apart, their
standard deviation as a share of their mean, and how many they are."""
LEAST_REPLAYS = 20
"""Steps of a policy in a graph that its replays are told by"""


def figure(measured: Sequence[float], simulated: Sequence[float], digits: int = 3) -> Figure:
    """A policy's figure, of its turns' in their order."""
    means = fmean(measured), fmean(simulated)
    found: Figure = {side: round(mean, digits) for side, mean in zip(SIDES, means, strict=True)}
    found["error"] = round(means[1] / means[0] - 1, 4)
    if len(measured) > 1:
        found["apart"] = round(max(measured) / min(measured) - 1, 4)
        found |= {"deviation": round(stdev(measured) / means[0], 6), "of": len(measured)}
    return found


def of_turns(turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a policy's turns tell together: each figure, and the turns; of a single turn what it tells."""
    if len(turns) == 1:
        return turns[0]
    names = figures_of(turns[0])
    found = {name: figure(*([each[name][side] for each in turns] for side in SIDES)) for name in names}
    return {**found, "turns": list(turns)}


def figures_of(found: Mapping[str, Any]) -> list[str]:
    """The names of the figures that policies are ranked by."""
    return [name for name in found if name.endswith("_ms")]


def tie_of(one: Figure, other: Figure) -> float:
    """By what share two policies' measured means may differ and rank equal; see this module."""
    both = one, other
    if any("deviation" not in each for each in both):
        return max(each.get("apart", TIE) for each in both)
    free = sum(each["of"] - 1 for each in both)
    pooled = sqrt(sum((each["of"] - 1) * each["deviation"] ** 2 for each in both) / free)
    return student(free) * pooled * sqrt(sum(1 / each["of"] for each in both))


def replays_apart(logs: Mapping[str, Sequence[Sequence[StepEntry]]], costs: CostTable) -> dict[str, float]:
    """By two policies, how much longer replays of the same decode graphs took with the first, as a share.

    Steps of as many decode rows alone in the same FULL graph, which the device bounds, are held to each other by what
    the table says that their KV takes, `LEAST_REPLAYS` or more of each policy. Each policy captures graphs of its own;
    where its turns replay the same (no ``kpolicy run --recapture``), what captures may differ by isn't in what turns
    are apart. No tie rests on it.
    """
    found: dict[str, dict[Hashable, list[tuple[float, float]]]] = {}
    for policy, turns in logs.items():
        alike = found.setdefault(policy, {})
        for entry, expected in chain.from_iterable(
            zip(turn, expected_costs(turn, costs), strict=True) for turn in turns
        ):
            decodes = entry.mode == Mode.FULL.value and not entry.shape.numbers.num_prefills
            if decodes and entry.cycle_us and expected.device_us > expected.host_us:
                kind = entry.launches[0].key, entry.shape.numbers.num_decodes
                alike.setdefault(kind, []).append((entry.cycle_us, expected.cycle_us))
    apart: dict[str, float] = {}
    for one, other in combinations(found, 2):
        both = [
            (min(map(len, pair)), *(sum(us for us, _ in steps) / sum(us for _, us in steps) for steps in pair))
            for pair in ((found[one][kind], found[other][kind]) for kind in found[one] if kind in found[other])
            if min(map(len, pair)) >= LEAST_REPLAYS
        ]
        if both:
            ratio = sum(count * first / second for count, first, second in both) / sum(count for count, *_ in both)
            apart[f"{one} and {other}"] = round(ratio - 1, 4)
    return apart


def pairs_of(figures: Mapping[str, Figure]) -> Iterator[tuple[tuple[str, str], float, float]]:
    """Each two policies, by what share the measured means of the slower lie above the quicker's, and their tie."""
    for one, other in combinations(figures, 2):
        means = sorted(figures[policy]["measured"] for policy in (one, other))
        yield (one, other), means[1] / means[0] - 1, tie_of(figures[one], figures[other])


def not_shown(figures: Mapping[str, Figure]) -> list[tuple[str, str]]:
    """Pairs of policies whose turns lie too far apart to say which of them is quicker by that figure."""
    return [pair for pair, apart, tie in pairs_of(figures) if apart <= tie and tie > MOST_APART]


def ranked_wrong(figures: Mapping[str, Figure]) -> list[tuple[str, str]]:
    """Pairs of policies that simulation ranks the other way round by that figure, ties left out."""
    wrong: list[tuple[str, str]] = []
    for pair, _, tie in pairs_of(figures):
        measured, simulated = ({policy: figures[policy][side] for policy in pair} for side in SIDES)
        wrong += same_ranking(measured, simulated, tie=tie)
    return wrong


def ties(figures: Mapping[str, Figure]) -> dict[str, float]:
    """By two policies, their tie."""
    return {" and ".join(pair): round(tie, 4) for pair, _, tie in pairs_of(figures)}


def ranking(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """By figure, the pairs of policies that are ranked wrongly, their ties, and those whose ranking isn't shown."""
    by_figure = {
        name: {policy: each[name] for policy, each in found.items()} for name in figures_of(next(iter(found.values())))
    }
    return {
        "ranked_wrong": {name: ranked_wrong(figures) for name, figures in by_figure.items()},
        "tie": {name: ties(figures) for name, figures in by_figure.items()},
        "not_shown": {name: not_shown(figures) for name, figures in by_figure.items()},
    }
