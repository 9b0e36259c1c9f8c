"""`unseen`: what decode steps cost that are larger than any a plan was made for."""

from __future__ import annotations

import bisect
from typing import NamedTuple

from kpolicy.costs import CostTable
from kpolicy.ladders import CaptureSizes
from kpolicy.planning.workload import DECODE, LIST, Workload

__all__ = ["Unseen", "unseen"]


class Unseen(NamedTuple):
    """The worst decode step of more requests than any that was planned for.

    Args:
        largest: requests of the largest that was planned for.
        reqs: requests of the worst one.
        size: the size in requests that it replays; 0 where it runs eagerly.
        worse: how much longer that takes than a graph of its own size, as a share; without attention, which both have.
    """

    largest: int
    reqs: int
    size: int
    worse: float


def unseen(workload: Workload, sizes: CaptureSizes) -> Unseen | None:
    """What the next larger decode steps would cost; None where there are no larger ones, or the policy has no FULL.

    Smoothing spreads few steps over many sizes, so that a plan has few graphs, or one, for all that are above those it
    was made for.
    """
    settings, costs = workload.settings, workload.costs
    q = settings.query_len
    largest = workload.histogram.largest(q)
    most = min(settings.max_num_reqs, settings.max_num_tokens // q)
    if not workload.layout.captures(q) or not 0 < largest < most:
        return None
    lists = workload.lists_of(sizes)
    own = lists[LIST if workload.layout.one_list else DECODE]
    captured = sorted({size // q for size in own} if workload.layout.one_list else own)
    # Right above a size that is captured padding is longest; anything eager is worst where it begins.
    found = []
    for reqs in sorted({largest + 1, *(size + 1 for size in captured if largest <= size < most)}):
        at = bisect.bisect_left(captured, reqs)
        size = captured[at] if at < len(captured) else 0
        takes = _step_us(costs, reqs, costs.full.at(size * q) if size else None, q)
        found.append(Unseen(largest, reqs, size, takes / _step_us(costs, reqs, costs.full.at(reqs * q), q) - 1))
    return max(found, key=lambda each: each.worse)


def _step_us(costs: CostTable, reqs: int, graph_us: float | None, q: int) -> float:
    """A decode step in a graph that takes the device so long, or an eager one."""
    host = costs.host_eager if graph_us is None else costs.host_full
    device_us = costs.eager.at(reqs * q) if graph_us is None else graph_us
    return max(device_us, host.base_us + host.decode_us + host.req_us * reqs) + costs.step_us
