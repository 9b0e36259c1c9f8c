"""What `benchmarks.fidelity` makes of policies that had several turns on the same arrivals (`kpolicy run --repeats`).

A figure is then the mean of a policy's turns, measured and simulated, and two policies are a tie by it where their
measured means are no further apart than the turns of one policy are, of whichever these are furthest apart. Of a policy
with one turn nothing is known of that, and `TIE` stands for it. A figure by which turns of a policy
are over `MOST_APART` apart ranks nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from kpolicy.simulate.fidelity import same_ranking

TIE = 0.02
"""Share of the measured figure, of a policy that had one turn"""
MOST_APART = 0.05
"""Share by which turns of a policy may differ for policies to be ranked by that figure"""
SIDES = ("measured", "simulated")
Figure = dict[str, Any]
"""A figure of a policy: `SIDES`, the error, and of several turns by how much the measured ones are apart."""


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


def tie_of(figures: Mapping[str, Figure]) -> float:
    """By what share two policies' measured means may differ and rank equal; see this module."""
    return max((each.get("apart", TIE) for each in figures.values()), default=TIE)


def shows_ranking(figures: Mapping[str, Figure]) -> bool:
    """Whether turns of one policy are near enough for the figure to rank policies."""
    return tie_of(figures) <= MOST_APART


def ranked_wrong(figures: Mapping[str, Figure]) -> list[tuple[str, str]]:
    """Pairs of policies that simulation ranks the other way round by that figure, ties left out."""
    measured, simulated = ({policy: each[side] for policy, each in figures.items()} for side in SIDES)
    return same_ranking(measured, simulated, tie=tie_of(figures))


def ranking(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """By figure, the pairs of policies that are ranked wrongly, and the tie; and which figures rank nothing."""
    by_figure = {
        name: {policy: each[name] for policy, each in found.items()} for name in figures_of(next(iter(found.values())))
    }
    return {
        "ranked_wrong": {name: ranked_wrong(figures) for name, figures in by_figure.items()},
        "tie": {name: tie_of(figures) for name, figures in by_figure.items()},
        "not_shown": [name for name, figures in by_figure.items() if not shows_ranking(figures)],
    }
