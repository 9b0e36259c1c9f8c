"""What each way to run a step takes on the slowest rank, from votes: `auto` compares ways by that.

A batch that holds every rank's rows tells which graphs can run, but not what they take: the rank with the most tokens
needn't be the one with the most KV, and run eagerly each rank keeps its own size. So each rank votes what it knows of
every way, all but the graphs' dense work, which follows from what is agreed. Votes are whole nanoseconds: every rank
computes the same from what was reduced.

The time that comes out is the slowest rank's own, but for halves beside each other where ranks' rows slow each other
down by unlike much: each votes that too, and the most of any rank counts, so that it is no less than the slowest takes,
and a few percent more where a rank has no rows. For several decode steps beside a prompt it is at most that of the
slowest decode rows with the slowest step. What padding takes more counts where any rank has some, as all have in a
graph of the largest one's size whose rows are fewer: whether the slowest is among them isn't known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kpolicy.costs import MANY_DECODES, Cost, CostTable
from kpolicy.decision import Launch
from kpolicy.keys import GraphKey
from kpolicy.modes import Mode, Rows
from kpolicy.overlap import Overlap
from kpolicy.policies.auto import CLEARLY
from kpolicy.policies.base import Way
from kpolicy.shapes import BatchNumbers

__all__ = ["NUM_TIMES", "RankTimes", "Voted"]

_NS = 1e3
_SHARE = 1e9
"""Of an overlap's numbers, which are shares and not times, whole billionths are voted."""
_MOST = 1 << 62
"""Votes are 64-bit integers where they are reduced."""


class Voted(NamedTuple):
    """A rank's times, or the largest of all ranks': in nanoseconds, without the dense work of graphs.

    Of a SPLIT `decode` is the half with the decode rows and `tail` the other, run eagerly or as pieces. How much they
    overlap, `overlap_cost` and the next three say: no times, but billionths of the numbers of `kpolicy.overlap.Overlap`
    and a flag.
    """

    decode: int
    attention: int
    full: int
    pieces: int
    eager: int
    full_host: int
    pieces_host: int
    eager_host: int
    decode_host: int
    split_pieces_host: int
    split_eager_host: int
    in_turn_eager: int
    pieces_in_decode: int
    """The decode half, and the overlap's share of a tail of pieces"""
    decode_in_pieces: int
    eager_in_decode: int
    decode_in_eager: int
    overlap_cost: int
    overlap_outlasted: int
    overlap_slowdown: int
    overlap_gains: int
    """1 where halves beside each other take no longer than in turn, on any rank"""
    fewest: int = 0
    """Tokens of the rank that has the fewest, negated so that a maximum finds them; no time"""
    fewest_decode: int = 0
    fewest_prefill: int = 0

    def fewest_of(self, rows: Rows) -> int:
        """Tokens of these rows, of the rank that has the fewest."""
        if rows is Rows.ALL:
            return -self.fewest
        return -(self.fewest_decode if rows is Rows.DECODE else self.fewest_prefill)

    def unlike(self, numbers: BatchNumbers) -> bool:
        """Whether ranks have unlike many tokens; `numbers` has as many of each kind as any."""
        most = -numbers.total_tokens, -numbers.decode_tokens, -numbers.num_prefill_tokens
        return most != (self.fewest, self.fewest_decode, self.fewest_prefill)

    @property
    def overlap(self) -> Overlap:
        """The most that halves beside each other add to each other on any rank."""
        shares = (each / _SHARE for each in (self.overlap_cost, self.overlap_outlasted, self.overlap_slowdown))
        return Overlap(*shares)


NUM_TIMES = len(Voted._fields)
"""Values that a rank votes."""


class RankTimes:
    """What a rank votes of its times, and what ways take by the largest of each.

    Args:
        costs: the table that all ranks have.
        eager_us: dense time of an eager launch by tokens, where it was worked out before.
    """

    def __init__(self, costs: CostTable, eager_us: Sequence[float] = ()) -> None:
        self._costs = costs
        self._eager_us = eager_us
        self._no_rows_us = costs.eager.at(0)
        self._hosts = [
            ([host.base_for(decodes=bool(kinds & 1), prefills=kinds > 1) for kinds in range(4)], host.req_us)
            for host in (costs.host_full, costs.host_piecewise, costs.host_eager)
        ]
        """What a launch takes the host, by kinds of rows (1 decode, 2 prompt, 3 both), and more for each request"""
        self._overlaps = [costs.overlap_of(rows) for rows in range(MANY_DECODES + 1)]
        """What halves take beside each other by decode rows, where prompts are long"""
        self._shares: dict[int, float] | None = None if costs.effects.outlasted_share is None else {}
        """What is left of that, where decode steps outlast prompts of so many tokens, if it was timed"""
        self._graph_ns: dict[GraphKey, float] = {}
        self.pads = any(costs.padding_us)
        """Whether padding takes more than its dense work"""

    def vote(self, numbers: BatchNumbers) -> tuple[int, ...]:
        """This rank's times in nanoseconds, of which ranks take the largest."""
        decodes, tokens, reqs = numbers.num_decodes, numbers.total_tokens, numbers.total_reqs
        dense = self._eager_at(tokens)
        overlap = self._overlaps[min(decodes, MANY_DECODES)]
        cost, outlasted, slowdown, _ = overlap
        if self._shares is not None and overlap.gains:
            outlasted *= self._share_of(self._shares, numbers.num_prefill_tokens)
        if decodes and reqs == decodes:
            times = self._of_decodes(self._costs.decode_attention_us(numbers), decodes, dense, cost, outlasted)
        else:
            times = self._of_any(numbers, dense, cost, outlasted)
        votes = tuple([int(time * _NS) for time in times])
        if max(votes) > _MOST:
            votes = tuple(min(vote, _MOST) for vote in votes)
        return (
            *votes,
            int(cost * _SHARE),
            int(outlasted * _SHARE),
            int(slowdown * _SHARE),
            int(overlap.gains),
            -tokens,
            -numbers.decode_tokens,
            -numbers.num_prefill_tokens,
        )

    def _share_of(self, shares: dict[int, float], prompt_tokens: int) -> float:
        """`StepEffects.outlasted_at`, which is kept: no step has more tokens than a few thousand."""
        share = shares.get(prompt_tokens)
        if share is None:
            share = shares[prompt_tokens] = self._costs.effects.outlasted_at(prompt_tokens)
        return share

    def _of_decodes(
        self, decode: float, decodes: int, dense: float, cost: float, outlasted: float
    ) -> tuple[float, ...]:  # fmt: skip
        """The times of decode rows alone: `_of_any` without what needs prompts."""
        tail = self._no_rows_us
        shared = cost * decode
        (full, full_req), (pieces, pieces_req), (eager, eager_req) = self._hosts
        host = full[1] + full_req * decodes
        return (
            decode,
            decode,
            decode,
            decode,
            dense + decode,
            host,
            pieces[1] + pieces_req * decodes,
            eager[1] + eager_req * decodes,
            host,
            host + pieces[0],
            host + eager[0],
            decode + tail,
            decode,
            shared,
            decode + outlasted * tail,
            tail + shared,
        )

    def _of_any(self, numbers: BatchNumbers, dense: float, cost: float, outlasted: float) -> tuple[float, ...]:
        """The times in the order of `Voted`, `dense` being the dense work of an eager launch of all rows."""
        costs = self._costs
        decodes, prefills, reqs = numbers.num_decodes, numbers.num_prefills, numbers.total_reqs
        decode = costs.decode_attention_us(numbers) if decodes else 0.0
        prefill = costs.prefill_attention_us(numbers) if prefills else 0.0
        attention = decode + prefill
        some, others = decodes > 0, 2 if prefills else 0
        kinds = some + others
        full_both, pieces_both = costs.both_us if kinds == _BOTH else _NOTHING
        (full, full_req), (pieces, pieces_req), (eager, eager_req) = self._hosts
        decode_host = full[some] + full_req * decodes
        tail = prefill + self._eager_at(numbers.num_prefill_tokens)
        return (
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
            decode + outlasted * prefill,
            prefill + cost * decode,
            decode + outlasted * tail,
            tail + cost * decode,
        )

    def _eager_at(self, tokens: int) -> float:
        """Dense time of an eager launch; without rows that of the smallest size, as `CostTable.cost` has it."""
        if not tokens:
            return self._no_rows_us
        return self._eager_us[tokens] if tokens < len(self._eager_us) else self._costs.eager.at(tokens)

    def soonest(self, ways: Sequence[Way], voted: Voted) -> Way:
        """The way of the shortest cycle, where each decode row runs one step; the earlier on ties.

        A SPLIT counts where it is clearly shorter than what doesn't divide the batch (`SPLIT_MARGIN`).
        What takes the host as long as the best so far takes both is looked at no further.

        Args:
            ways: the ways; those that don't divide the batch first.
            voted: the largest times of all ranks.
        """
        found, least, clear_us, step_us = ways[0], _INFINITY, _INFINITY, self._costs.step_us
        for way in ways:
            pads = self._padding(way, voted) if self.pads else _NOTHING
            took = self._host(way, voted, pads)
            if took < least:
                took = max(took, self._device(way, voted, pads))
                if took < least and way.mode is not Mode.SPLIT:
                    found, least, clear_us = way, took, CLEARLY * (took / _NS + step_us)
                elif took < least and took / _NS + step_us < clear_us:
                    found, least = way, took
        return found

    def _padding(self, way: Way, voted: Voted) -> tuple[float, float]:
        """Nanoseconds that padding takes more in one repeat of a way's first launch, and in its second."""
        first, second = (
            0.0 if each.key is None else self._costs.padding_of(each.key, voted.fewest_of(each.rows)) * _NS
            for each in (*way.launches, _NO_LAUNCH, _NO_LAUNCH)[:2]
        )
        return first, second

    def _host(self, way: Way, voted: Voted, pads: tuple[float, float]) -> float:
        """Nanoseconds that a way takes the host, on the rank where that is longest; `pads` is `_padding`."""
        mode = way.mode
        if mode is Mode.FULL:
            return voted.full_host + pads[0]
        if mode is Mode.PIECEWISE:
            return voted.pieces_host + pads[0]
        if mode is Mode.EAGER:
            return voted.eager_host
        decode, tail = way.launches
        host = voted.split_eager_host if tail.key is None else voted.split_pieces_host
        return host + (decode.repeat - 1) * voted.decode_host + decode.repeat * pads[0] + pads[1]

    def _device(self, way: Way, voted: Voted, pads: tuple[float, float]) -> float:
        """Nanoseconds that a way takes the device, on the rank where that is longest; `pads` is `_padding`."""
        mode = way.mode
        if mode is Mode.EAGER:
            return voted.eager
        launches, graph_ns = way.launches, self._graph_ns
        decode = launches[0]
        first = (graph_ns.get(decode.key) or self._dense(decode)) + pads[0]  # type: ignore[arg-type]  # None isn't kept
        if mode is Mode.FULL:
            return first + voted.full
        if mode is Mode.PIECEWISE:
            return first + voted.pieces
        tail, second = launches[1], 0.0
        eager, more = tail.key is None, decode.repeat - 1
        if tail.key is not None:
            second = (graph_ns.get(tail.key) or self._dense(tail)) + pads[1]
        if tail.stream == decode.stream:
            return first + (voted.in_turn_eager if eager else second + voted.attention)
        # The half that is over last and a share of the other: of the two sums the larger, where beside takes no longer.
        cost, outlasted = voted.overlap_cost / _SHARE, voted.overlap_outlasted / _SHARE
        outer = first + outlasted * second + (voted.eager_in_decode if eager else voted.pieces_in_decode)
        inner = second + cost * first + (voted.decode_in_eager if eager else voted.decode_in_pieces)
        if more:
            later = more * (first + voted.decode)
            outer, inner = outer + later, inner + cost * later
        return (max if voted.overlap_gains else min)(outer, inner)

    def cost(self, way: Way, voted: Voted) -> Cost:
        """What a way takes on the slowest rank; its graphs hold every rank's rows."""
        costs, pads = self._costs, self._padding(way, voted)
        device, host = self._device(way, voted, pads) / _NS, self._host(way, voted, pads) / _NS
        cycle = max(device, host) + costs.step_us
        steps = way.launches[0].repeat if way.launches else 1
        if steps == 1:
            return Cost(cycle, cycle, cycle, device, host)
        decode_us = voted.decode / _NS
        own_us = max(decode_us - costs.decode_attention.base_us, 0.0)
        first_us = (self._dense(way.launches[0]) + pads[0]) / _NS
        spared_us = costs.spared_us(first_us + decode_us, (voted.decode_host + pads[0]) / _NS, own_us, 1.0)
        return Cost(cycle - (steps - 1) * spared_us, cycle / steps, cycle, device, host)

    def wait_of(self, way: Way, voted: Voted) -> float | None:
        """`Launch.wait_share` of a way's decode steps on the slowest rank; None where no prompt runs beside them."""
        launches = way.launches
        if len(launches) != 2 or launches[0].stream == launches[1].stream:
            return None
        pads = self._padding(way, voted)
        device_us = (self._dense(launches[0]) + pads[0] + voted.decode) / _NS
        host_us = (voted.decode_host + pads[0]) / _NS
        cycle_us = self.cost(way, voted).cycle_us
        return self._costs.wait_share(device_us, host_us, voted.overlap, cycle_us, launches[0].repeat)

    def _dense(self, launch: Launch) -> float:
        """Nanoseconds of the dense work of a launch's graph; 0 for an eager launch, whose work is voted."""
        if launch.key is None:
            return 0.0
        ns = self._costs.curve_of(launch).at(launch.key.num_tokens) * _NS
        if len(self._graph_ns) >= _MOST_GRAPHS:
            self._graph_ns.clear()
        self._graph_ns[launch.key] = ns
        return ns


_BOTH = 3
_INFINITY = float("inf")
_NO_LAUNCH = Launch(Rows.ALL, None)
_NOTHING = (0.0, 0.0)
_MOST_GRAPHS = 4096
"""Graphs whose dense work is kept; above it the memo starts afresh."""
