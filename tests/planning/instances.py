"""Small random planning problems, and every choice of them looked at."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from hypothesis import strategies as st

from kpolicy.budgets import Budget, Usage
from kpolicy.planning import Ladder

MOST_DEMAND = 10

times = st.integers(1, 40).map(float)


@st.composite
def ladders(draw: Any, *, name: str = "decode", rising: bool = False, escapes: bool = True) -> Ladder:
    """A ladder with up to seven candidates of some alignment, gaps in its histogram, and times that need not rise."""
    step = draw(st.sampled_from([1, 1, 2, 3]))
    most = draw(st.integers(1, MOST_DEMAND))
    allowed = [size for size in range(1, MOST_DEMAND + 3) if size % step == 0]
    sizes = sorted(draw(st.sets(st.sampled_from(allowed), min_size=1, max_size=7)))
    graph_us = draw(st.lists(times, min_size=len(sizes), max_size=len(sizes)))
    weights = draw(st.lists(st.sampled_from([0.0, 1.0, 2.5, 7.0]), min_size=most, max_size=most))
    return Ladder.of(
        name,
        weights=weights,
        sizes=sizes,
        graph_us=sorted(graph_us) if rising else graph_us,
        escape_us=draw(st.lists(times, min_size=most, max_size=most)),
        usage=draw(usages),
        escape_when_cheaper=escapes,
    )


usages = st.builds(
    Usage, st.integers(0, 3), st.integers(0, 3), st.integers(0, 5), st.sampled_from([0.0, 0.5, 1.0, 1.5])
)
budgets = st.builds(
    Budget,
    st.none() | st.integers(0, 12),
    st.none() | st.integers(0, 12),
    st.none() | st.integers(0, 20),
    st.none() | st.sampled_from([0.0, 1.0, 2.5, 4.0]),
)


def subsets(ladder: Ladder, most: int) -> Iterator[tuple[int, ...]]:
    """Every set of at most that many candidates."""
    for count in range(min(most, len(ladder.sizes)) + 1):
        yield from itertools.combinations(ladder.sizes.tolist(), count)


def usage_of(ladder: Ladder, sizes: Sequence[int]) -> Usage:
    """What capturing those sizes takes."""
    listed = ladder.sizes.tolist()
    return sum((ladder.usage_of(listed.index(size)) for size in sizes), Usage())


def cheapest_fit_us(ladder: Ladder, sizes: Sequence[int]) -> float:
    """The time of all steps, each at whichever captured size is best for it, or without a graph."""
    listed, total = ladder.sizes.tolist(), 0.0
    for column, demand in enumerate(ladder.demands.tolist()):
        ways = [ladder.cost_us[listed.index(size), column] for size in sizes if size >= demand]
        total += float(min([*ways, ladder.escape_us[column]]))
    return total


def within(budget: Budget, usage: Usage) -> bool:
    """Whether the budget admits it."""
    return all(
        limit is None or getattr(usage, name) <= limit + 1e-9
        for name in ("graphs", "streams", "bytes", "seconds")
        for limit in [getattr(budget, name)]
    )


def best_us(given: Sequence[Ladder], budget: Budget, most_sizes: int | None, *, fit: Any) -> float:
    """The least time over all choices for all ladders together; infinite where none is within the budget."""
    least = float("inf")
    most = sum(len(each.sizes) for each in given) if most_sizes is None else most_sizes
    options = [
        [(len(found), usage_of(each, found), fit(each, found)) for found in subsets(each, most)] for each in given
    ]
    for picked in itertools.product(*options):
        if sum(count for count, _, _ in picked) > most:
            continue
        if within(budget, sum((usage for _, usage, _ in picked), Usage())):
            least = min(least, sum(us for _, _, us in picked))
    return least
