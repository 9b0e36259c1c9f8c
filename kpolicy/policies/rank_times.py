"""What each way to run a step takes on the slowest rank, from votes: `auto` compares ways by that.

A batch that holds every rank's rows tells which graphs can run, but not what they take: the rank with the most tokens
needn't be the one with the most KV, and run eagerly each rank keeps its own size. So each rank votes what it knows of
every way, all but the graphs' dense work, which follows from what is agreed. Votes are whole nanoseconds: every rank
computes the same from what was reduced.

The time that comes out is the slowest rank's own, but for several decode steps beside a prompt, where it is at most
that of the slowest decode rows with the slowest step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kpolicy.costs import Cost, CostTable
from kpolicy.modes import Mode
from kpolicy.policies.base import Way
from kpolicy.shapes import BatchNumbers

__all__ = ["NUM_TIMES", "RankTimes", "Voted"]

_NS = 1e3
_MOST = 1 << 62
"""Votes are 64-bit integers where they are reduced."""


class Voted(NamedTuple):
    """A rank's times, or the largest of all ranks': in microseconds, without the dense work of graphs.

    Of a SPLIT `decode` is the half with the decode rows and `tail` the other, run eagerly or as pieces. `overlap` is
    the table's `overlap_cost`.
    """

    decode: float
    attention: float
    full: float
    pieces: float
    eager: float
    full_host: float
    pieces_host: float
    eager_host: float
    decode_host: float
    split_pieces_host: float
    split_eager_host: float
    in_turn_eager: float
    pieces_in_decode: float
    """The decode half, and the overlap's share of a tail of pieces"""
    decode_in_pieces: float
    eager_in_decode: float
    decode_in_eager: float


NUM_TIMES = len(Voted._fields)
"""Times that a rank votes."""


class RankTimes:
    """What a rank votes of its times, and what ways take by the largest of each.

    Args:
        costs: the table that all ranks have.
        eager_us: dense time of an eager launch by tokens, where it was worked out before.
    """

    def __init__(self, costs: CostTable, eager_us: Sequence[float] = ()) -> None:
        self._costs = costs
        self._eager_us = eager_us
        self._hosts = [
            ([host.base_for(decodes=bool(kinds & 1), prefills=kinds > 1) for kinds in range(4)], host.req_us)
            for host in (costs.host_full, costs.host_piecewise, costs.host_eager)
        ]
        """What a launch takes the host, by kinds of rows (1 decode, 2 prompt, 3 both), and more for each request"""
        self._dense: dict[Way, tuple[float, float]] = {}

    def vote(self, numbers: BatchNumbers) -> tuple[int, ...]:
        """This rank's times in nanoseconds, of which ranks take the largest."""
        costs, eager_us, overlap = self._costs, self._eager_us, self._costs.overlap_cost
        decodes, prefills, tokens = numbers.num_decodes, numbers.num_prefills, numbers.total_tokens
        reqs, prompts = numbers.total_reqs, numbers.num_prefill_tokens
        decode = costs.decode_attention_us(numbers) if decodes else 0.0
        prefill = costs.prefill_attention_us(numbers) if prefills else 0.0
        attention = decode + prefill
        some, others = decodes > 0, 2 if prefills else 0
        kinds = some + others
        full_both, pieces_both = costs.both_us if kinds == _BOTH else _NOTHING
        (full, full_req), (pieces, pieces_req), (eager, eager_req) = self._hosts
        decode_host = full[some] + full_req * decodes
        dense = eager_us[tokens] if 0 < tokens < len(eager_us) else costs.eager.at(tokens)
        tail = prefill + (eager_us[prompts] if 0 < prompts < len(eager_us) else costs.eager.at(prompts))
        # As `CostTable.cost` has it, an eager launch without rows takes as long as that of the smallest size.
        times = (
            decode,
            attention,
            attention + full_both,
            attention + pieces_both,
            dense + attention,
            full[kinds] + full_req * reqs,
            pieces[kinds] + pieces_req * reqs,
            eager[kinds] + eager_req * reqs,
            decode_host,
            decode_host + pieces[others] + pieces_req * prefills,
            decode_host + eager[others] + eager_req * prefills,
            decode + tail,
            decode + overlap * prefill,
            prefill + overlap * decode,
            decode + overlap * tail,
            tail + overlap * decode,
        )
        votes = tuple([int(time * _NS) for time in times])
        return votes if max(votes) <= _MOST else tuple(min(vote, _MOST) for vote in votes)

    @staticmethod
    def largest(reduced: Sequence[int]) -> Voted:
        """The largest times of all ranks, from the largest votes."""
        return Voted._make([vote / _NS for vote in reduced])

    def sides(self, way: Way, voted: Voted) -> tuple[float, float]:
        """(device, host) time of a way that holds every rank's rows, each on the rank that takes the longest."""
        mode = way.mode
        if mode is Mode.EAGER:
            return voted.eager, voted.eager_host
        first, second = self._dense.get(way) or self._dense_of(way)
        if mode is Mode.FULL:
            return first + voted.full, voted.full_host
        if mode is Mode.PIECEWISE:
            return first + voted.pieces, voted.pieces_host
        overlap = self._costs.overlap_cost
        decode, tail = way.launches
        eager, more = tail.key is None, decode.repeat - 1
        host = (voted.split_eager_host if eager else voted.split_pieces_host) + more * voted.decode_host
        if tail.stream == decode.stream:
            return first + (voted.in_turn_eager if eager else second + voted.attention), host
        # The longer and a share of the shorter: of the two sums the larger, where beside takes no longer.
        outer = first + overlap * second + (voted.eager_in_decode if eager else voted.pieces_in_decode)
        inner = second + overlap * first + (voted.decode_in_eager if eager else voted.decode_in_pieces)
        if more:
            later = more * (first + voted.decode)
            outer, inner = outer + later, inner + overlap * later
        return (max if overlap <= 1 else min)(outer, inner), host

    def cost(self, way: Way, voted: Voted) -> Cost:
        """What a way that holds every rank's rows takes on the slowest rank."""
        costs = self._costs
        device, host = self.sides(way, voted)
        cycle = max(device, host) + costs.step_us
        steps = way.launches[0].repeat if way.launches else 1
        if steps == 1:
            return Cost(cycle, cycle, cycle, device, host)
        own_us = max(voted.decode - costs.decode_attention.base_us, 0.0)
        first, _ = self._dense_of(way)
        spared_us = costs.spared_us(first + voted.decode, voted.decode_host, own_us, 1.0)
        return Cost(cycle - (steps - 1) * spared_us, cycle / steps, cycle, device, host)

    def _dense_of(self, way: Way) -> tuple[float, float]:
        """The dense work of a way's graphs, launch by launch; 0 where a launch is eager, whose work is voted."""
        us = [self._costs.curve_of(each).at(each.key.num_tokens) if each.key else 0.0 for each in way.launches]
        if len(self._dense) >= _MOST_WAYS:
            self._dense.clear()
        first, second, *_ = (*us, 0.0, 0.0)
        found = self._dense[way] = (first, second)
        return found


_BOTH = 3
_NOTHING = (0.0, 0.0)
_MOST_WAYS = 4096
"""Ways whose dense work is kept; above it the memo starts afresh."""
