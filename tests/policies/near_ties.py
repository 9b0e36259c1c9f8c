"""Contexts in which dividing a batch is about `SPLIT_MARGIN` shorter than running it whole."""

from __future__ import annotations

import math
from collections.abc import Iterator

import attrs
from hypothesis import strategies as st

from kpolicy.modes import Mode
from kpolicy.policies import PolicyContext
from kpolicy.policies.auto import SPLIT_MARGIN, cheapest
from kpolicy.policies.base import legal_ways
from kpolicy.shapes import BatchShape

MIXED = st.builds(
    lambda decodes, prefills, steps: BatchShape(decodes=[(1, decodes)], prefills=prefills, max_decode_steps=steps),
    st.integers(1, 12),
    st.lists(st.tuples(st.integers(1, 120), st.sampled_from([0, 4000])), min_size=1, max_size=2),
    st.sampled_from([1, 1, 4]),
)
"""Batches that can be divided"""


def near_ties(context: PolicyContext, shape: BatchShape) -> Iterator[PolicyContext]:
    """The context with so long a `step_us` that a SPLIT of one decode step is shorter by about the margin.

    None where no `step_us` does that.
    """
    numbers, costs = shape.numbers, attrs.evolve(context.costs, step_us=0.0)
    times: dict[bool, list[float]] = {False: [], True: []}
    for way in legal_ways(numbers, context, cheapest(context)):
        if way.launches[0].repeat == 1:
            times[way.mode is Mode.SPLIT].append(costs.cost(way.launches, numbers).cycle_us)
    whole_us, divided_us = (min(each, default=math.inf) for each in times.values())
    step_us = (whole_us - divided_us) / SPLIT_MARGIN - whole_us
    if math.isfinite(step_us) and step_us > 0:
        for share in (0.9, 1 - 1e-9, 1.0, 1 + 1e-9, 1.1):
            yield attrs.evolve(context, costs=attrs.evolve(costs, step_us=step_us * share))
