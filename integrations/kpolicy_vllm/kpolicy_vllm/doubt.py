"""Whether a way of more launches is cheaper than one of fewer beyond doubt, by costs of two seconds' timing.

Two things are unsure. Times differ by some percent from one timing to the next. And the host's were taken at the speed
that its core had then: where the core turns slow, for seconds at a time, launching slows with it. A step without a
graph, or in pieces, waits for the launches that a graph spares; a graph that is somewhat too large is never late by
more than its padding. The doubt is of a core as slow as `SLOWER_HOST` says, and some steps on slow cores are slower.
"""

from __future__ import annotations

from kpolicy.costs import Cost, CostTable
from kpolicy.decision import Launch
from kpolicy.keys import GraphKey
from kpolicy.modes import Rows
from kpolicy.shapes import BatchNumbers
from kpolicy_vllm.timing import NOISE

__all__ = ["SLOWER_HOST", "clearly_cheaper", "surely_cheaper"]

SLOWER_HOST = 1.78
"""Launching EAGER on slow cores of H200s' hosts, over what it took in calibration: the highest of five medians, each of
steps beside which the host's fixed work took about as long, so that half of those took longer. Pieces took up to 1.92
times as long on the slowest of these hosts, where no EAGER step was told by classes (docs/measured_fidelity.md)."""


def clearly_cheaper(costs: CostTable, key: GraphKey | None, than: GraphKey | None, numbers: BatchNumbers) -> bool:
    """Whether a whole batch runs cheaper so by more than noise; arguments as `surely_cheaper` takes them."""
    ours, theirs = _both(costs, key, than, numbers)
    return ours.cycle_us * (1 + NOISE) < theirs.cycle_us


def surely_cheaper(
    costs: CostTable, key: GraphKey | None, than: GraphKey | None, numbers: BatchNumbers, *, noise: float = NOISE
) -> bool:
    """Whether a whole batch runs cheaper so by more than noise, and no dearer with a host `SLOWER_HOST` times as slow.

    Args:
        costs: what launches take.
        key: the graph; None for EAGER.
        than: the other.
        numbers: the batch.
        noise: share of its time by which it must be cheaper.
    """
    ours, theirs = _both(costs, key, than, numbers)
    our_slow_us, their_slow_us = (max(each.device_us, SLOWER_HOST * each.host_us) for each in (ours, theirs))
    return ours.cycle_us * (1 + noise) < theirs.cycle_us and our_slow_us <= their_slow_us


def _both(costs: CostTable, key: GraphKey | None, than: GraphKey | None, numbers: BatchNumbers) -> tuple[Cost, Cost]:
    ours, theirs = (costs.cost((Launch(Rows.ALL, of),), numbers) for of in (key, than))
    return ours, theirs
