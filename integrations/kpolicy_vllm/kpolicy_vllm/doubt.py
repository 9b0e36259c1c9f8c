"""Whether a way of more launches is surely cheaper than one of fewer, by costs that were timed within two seconds.

Two things are unsure. Times differ by some percent from one timing to the next. And the host's were taken at the speed
that its core had then: where the core turns slow, for seconds at a time, launching takes up to `SLOWER_HOST` times as
long. A step without a graph, or in pieces, waits for the launches that a graph spares, so that it is late by as much; a
graph that is somewhat too large is never late by more than its padding.
"""

from __future__ import annotations

from kpolicy.costs import CostTable
from kpolicy.decision import Launch
from kpolicy.keys import GraphKey
from kpolicy.modes import Rows
from kpolicy.shapes import BatchNumbers
from kpolicy_vllm.timing import NOISE

__all__ = ["SLOWER_HOST", "surely_cheaper"]

SLOWER_HOST = 1.78
"""The most that launching eager steps took on slow cores of H200s' hosts, over what it took in calibration
(docs/fidelity.md)"""


def surely_cheaper(costs: CostTable, key: GraphKey | None, than: GraphKey | None, numbers: BatchNumbers) -> bool:
    """Whether a whole batch runs cheaper so by more than noise, and no dearer where the host turns slow.

    Args:
        costs: what launches take.
        key: the graph; None for EAGER.
        than: the other.
        numbers: the batch.
    """
    ours, theirs = (costs.cost((Launch(Rows.ALL, of),), numbers) for of in (key, than))
    our_slow_us, their_slow_us = (max(each.device_us, SLOWER_HOST * each.host_us) for each in (ours, theirs))
    return ours.cycle_us * (1 + NOISE) < theirs.cycle_us and our_slow_us <= their_slow_us
