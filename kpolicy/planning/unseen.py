"""`unseen`: what decode steps cost that are larger than any a plan was made for."""

from __future__ import annotations

import bisect
from typing import NamedTuple

from kpolicy.costs import CostTable
from kpolicy.keys import GraphKey
from kpolicy.ladders import CaptureSizes
from kpolicy.modes import Part
from kpolicy.planning.workload import DECODE, LIST, Workload
from kpolicy.shapes import BatchNumbers

__all__ = ["Unseen", "unseen"]


class Unseen(NamedTuple):
    """The worst decode step of more requests than any that was planned for.

    Args:
        largest: requests of the largest that was planned for.
        reqs: requests of the worst one.
        size: the size in requests that it replays; 0 where it runs eagerly.
        worse: how much longer that takes than a graph of its own size, as a share, if its rows read as much KV as those
            that were planned for do on average.
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
    settings, costs = workload.settings, workload.costs.deciding
    q = settings.query_len
    largest = workload.histogram.largest(q)
    most = min(settings.max_num_reqs, settings.max_num_tokens // q)
    if not workload.layout.captures(q) or largest >= most:
        return None
    lists = workload.lists_of(sizes)
    own = lists[LIST if workload.layout.one_list else DECODE]
    captured = sorted({size // q for size in own} if workload.layout.one_list else own)
    kv_tokens = _kv_tokens(workload, q)
    # Right above a size that is captured padding is longest; anything eager is worst where it begins.
    found = []
    for reqs in sorted({largest + 1, *(size + 1 for size in captured if largest <= size < most)}):
        at = bisect.bisect_left(captured, reqs)
        size = captured[at] if at < len(captured) else 0
        rows = BatchNumbers(reqs, query_len=q, decode_kv_tokens=round(reqs * kv_tokens))
        takes = _step_us(costs, rows, size * q)
        found.append(Unseen(largest, reqs, size, takes / _step_us(costs, rows, reqs * q) - 1))
    return max(found, key=lambda each: each.worse)


def _kv_tokens(workload: Workload, query_len: int) -> float:
    """KV tokens that a decode row of that query length attends to on average."""
    sums = workload.histogram.settled().decodes.get(query_len, {}).values()
    return sum(each.decode_kv_tokens for each in sums) / max(sum(each.decodes for each in sums), 1)


def _step_us(costs: CostTable, rows: BatchNumbers, size: int) -> float:
    """A decode step in a graph of so many tokens, or an eager one where that is 0."""
    key = GraphKey(Part.FULL, size, query_len=rows.query_len) if size else None
    dense_us = costs.eager.at(rows.total_tokens) if key is None else costs.replay_us(key, rows.total_tokens)
    host = costs.host_full if size else costs.host_eager
    host_us = host.base_for(decodes=True, prefills=False) + host.req_us * rows.num_decodes
    padding_us = costs.padding_of(key, rows.total_tokens) if key else 0.0
    return max(dense_us + costs.decode_attention_us(rows), host_us) + padding_us + costs.step_us
