"""What `benchmarks.fidelity` makes of policies that had several turns on the same arrivals (`kpolicy run --repeats`).

A figure is then the mean of a policy's turns, measured and simulated, and two policies are a tie by it where their
measured means are no further apart than the turns of either of them are. Of a policy with one turn nothing is known of
that, and `TIE` stands for it. A tie of over `MOST_APART` isn't one: the ranking of these two isn't shown.

A policy's turns replay what it captured once, and each policy captures its own: replays of the same decode graphs
differ between two policies' captures by what their own turns don't show. So two policies are a tie too where they are
no further apart than these (`captures_of`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, combinations
from statistics import fmean
from types import MappingProxyType
from typing import Any

from kpolicy.costs import CostTable
from kpolicy.modes import Mode
from kpolicy.schemas import StepEntry
from kpolicy.simulate.fidelity import expected_costs, same_ranking

TIE = 0.02
"""Share of the measured figure, of a policy that had one turn"""
MOST_APART = 0.05
"""Share by which turns may differ for policies that are nearer than that to be a tie"""
SIDES = ("measured", "simulated")
Figure = dict[str, Any]
"""A figure of a policy: `SIDES`, the error, and of several turns by how much the measured ones are apart."""
Captures = Mapping[str, float]
"""By policy: see `captures_of`"""
NO_CAPTURES: Captures = MappingProxyType({})
LEAST_REPLAYS = 100
"""Steps that a policy's captures are told by"""


def figure(measured: Sequence[float], simulated: Sequence[float], digits: int = 3) -> Figure:
    """A policy's figure, of its turns' in their order."""
    means = fmean(measured), fmean(simulated)
    found: Figure = {side: round(mean, digits) for side, mean in zip(SIDES, means, strict=True)}
    found["error"] = round(means[1] / means[0] - 1, 4)
    if len(measured) > 1:
        found["apart"] = round(max(measured) / min(measured) - 1, 4)
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
    return max(one.get("apart", TIE), other.get("apart", TIE))


def captures_of(logs: Mapping[str, Sequence[Sequence[StepEntry]]], costs: CostTable) -> Captures:
    """By policy, how long replays of its decode graphs took, over what the table says that they take.

    Of all turns' steps of decode rows alone in one FULL graph that the device bounds; only of policies with
    `LEAST_REPLAYS` of them.
    """
    found: dict[str, float] = {}
    for policy, turns in logs.items():
        replays: list[tuple[float, float]] = []
        both = (zip(turn, expected_costs(turn, costs), strict=True) for turn in turns)
        for entry, expected in chain.from_iterable(both):
            decodes = entry.mode == Mode.FULL.value and not entry.shape.numbers.num_prefills
            if decodes and entry.cycle_us and expected.device_us > expected.host_us:
                replays.append((entry.cycle_us, expected.cycle_us))
        if len(replays) >= LEAST_REPLAYS:
            measured_us, expected_us = map(sum, zip(*replays, strict=True))
            found[policy] = round(measured_us / expected_us, 4)
    return found


def pairs_of(
    figures: Mapping[str, Figure], captures: Captures = NO_CAPTURES
) -> Iterator[tuple[tuple[str, str], float, float]]:
    """Each two policies, by what share the measured means of the slower lie above the quicker's, and their tie."""
    for one, other in combinations(figures, 2):
        means = sorted(figures[policy]["measured"] for policy in (one, other))
        tie = tie_of(figures[one], figures[other])
        if one in captures and other in captures:
            replays = sorted((captures[one], captures[other]))
            tie = max(tie, round(replays[1] / replays[0] - 1, 4))
        yield (one, other), means[1] / means[0] - 1, tie


def not_shown(figures: Mapping[str, Figure], captures: Captures = NO_CAPTURES) -> list[tuple[str, str]]:
    """Pairs of policies whose turns lie too far apart to say which of them is quicker by that figure."""
    return [pair for pair, apart, tie in pairs_of(figures, captures) if apart <= tie and tie > MOST_APART]


def ranked_wrong(figures: Mapping[str, Figure], captures: Captures = NO_CAPTURES) -> list[tuple[str, str]]:
    """Pairs of policies that simulation ranks the other way round by that figure, ties left out."""
    wrong: list[tuple[str, str]] = []
    for pair, _, tie in pairs_of(figures, captures):
        measured, simulated = ({policy: figures[policy][side] for policy in pair} for side in SIDES)
        wrong += same_ranking(measured, simulated, tie=tie)
    return wrong


def ties(figures: Mapping[str, Figure], captures: Captures = NO_CAPTURES) -> dict[str, float]:
    """By two policies, their tie."""
    return {" and ".join(pair): tie for pair, _, tie in pairs_of(figures, captures)}


def ranking(found: Mapping[str, Mapping[str, Any]], captures: Captures = NO_CAPTURES) -> dict[str, Any]:
    """By figure, the pairs of policies that are ranked wrongly, their ties, and those whose ranking isn't shown."""
    by_figure = {
        name: {policy: each[name] for policy, each in found.items()} for name in figures_of(next(iter(found.values())))
    }
    return {
        "ranked_wrong": {name: ranked_wrong(figures, captures) for name, figures in by_figure.items()},
        "tie": {name: ties(figures, captures) for name, figures in by_figure.items()},
        "not_shown": {name: not_shown(figures, captures) for name, figures in by_figure.items()},
    }
