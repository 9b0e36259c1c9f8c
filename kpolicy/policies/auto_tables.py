"""`auto` prepared for one context: what `select` does for each batch.

Uniform decode batches read one row: the graph, and the device time up to which nothing else can be cheaper, because
every other way keeps the host busy for longer than that. Other batches are scored in place, over the ways of
`legal_ways` in their order and with the arithmetic of `CostTable.cost`, so that `select` equals `AutoPolicy.decide` to
the last bit. Where each decode row runs one step, the gap is the cycle, so the shortest cycle has the least score
whatever the weights; one that divides the batch must be shorter by `SPLIT_MARGIN`. Steps with LoRA or with forbidden
modes get tables of their own at first use. What is left (eager forbidden, row limits that token counts can't tell, two
sizes of which the whole batch tells the cheaper) goes through prepared ways.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import attrs

from kpolicy.costs import MANY_DECODES, CostTable, HostCost
from kpolicy.decision import Decision
from kpolicy.modes import Mode, SplitForm
from kpolicy.overlap import Overlap
from kpolicy.policies import ranks
from kpolicy.policies.auto import CLEARLY, cheapest, cheapest_of_unlike, choose, rate, spread, wait_of
from kpolicy.policies.base import (
    PolicyContext,
    Way,
    eager_reason,
    graph_reason,
    split_tails,
    split_way,
    steps_ahead,
)
from kpolicy.policies.rank_times import NUM_TIMES, RankTimes, Voted
from kpolicy.policies.tables import EAGER_WAY, MOST_DECISIONS, Entry, Group, PreparedWays, at
from kpolicy.reasons import Reason
from kpolicy.shapes import GAP_TAIL_US, NO_FACTS, WAITING_REQS, BatchNumbers

__all__ = ["AutoTables"]


class Row(NamedTuple):
    """A uniform decode batch: the graph `uid` is the cheapest while device time is at most `limit_us`.

    Above the limit the rivals' dense times tell; `piece_us` is infinite where no piecewise graph holds the batch. Both
    graphs' times have what padding takes, which comes to the host's too.
    """

    dense_us: float
    limit_us: float
    uid: int
    piece_us: float
    piece_uid: int
    padding_us: float
    piece_padding_us: float


_DECODES, _PREFILLS = 1, 2
"""Kinds of rows that a launch has; their sum indexes `_bases`"""
_NOTHING = Group({}, [], [], [])
_INFINITY = float("inf")
_NEVER = 1 << 62
_IN_TURN, _BESIDE = SplitForm.IN_TURN, SplitForm.BESIDE
_DecodeStep = tuple[float, float, Overlap, float, float]
"""Its device and host time, its overlap with the prompt, what one beyond the first takes off later steps, and the gap
beyond which there are none (`kpolicy.shapes.GAP_TAIL_US`)"""


class AutoTables:
    """See the module's docstring; the context's costs are those that decisions are made by (`CostTable.deciding`)."""

    def __init__(self, forms: tuple[SplitForm, ...], context: PolicyContext) -> None:
        self._context = context
        self._forms = forms
        self._ways = PreparedWays(context, cheapest(context), rate(context), forms)
        self._decisions: dict[tuple[Way, Reason], Decision] = {}
        self._splits: dict[tuple[object, ...], Decision] = {}
        self._reason = graph_reason(context)
        self._wholes: list[Decision | None] = [None] * len(self._ways.tables.entries)
        self._eager = EAGER_WAY.decided(eager_reason(context), context, costs=True)
        self._eager_us = array("d", context.costs.eager.upto(context.settings.max_num_tokens))
        self._prompt_bases = tuple(_bases(host)[_PREFILLS] for host in _hosts(context.costs)[1:])
        """What launching prompts alone takes whatever their number: pieces, and eagerly"""
        self._times = RankTimes(context.costs, self._eager_us)
        self._unlike = self._ways
        """The ways of ranks that have unlike many tokens: others only where padding takes something"""
        if self._times.pads:
            self._unlike = PreparedWays(context, cheapest_of_unlike(context), rate(context), forms, unlike=True)
        self._agreed, self._reduced = self._eager, tuple[int, ...]()
        self._usual: dict[int, list[Row | None]] = {}
        """Rows of steps without LoRA in which nothing is forbidden"""
        self._selects: dict[tuple[int, int, int], Callable[..., Decision]] = {}
        self._lost_cases = sorted({key.lora_case for key in context.ladder.withdrawn})
        self.select: Callable[..., Decision] = self._select_for(0, 0)

    def vote(self, numbers: BatchNumbers) -> tuple[int, ...]:
        return (*ranks.vote(numbers), *self._times.vote(numbers))

    def agree(self, reduced: Sequence[int], numbers: BatchNumbers) -> Decision:
        given = tuple(reduced)
        if given != self._reduced:
            # Where ranks share a process each asks in turn.
            self._agreed, self._reduced = self._by_slowest(given), given
        return ranks.told(self._agreed, self.select, numbers)

    def _by_slowest(self, reduced: Sequence[int]) -> Decision:
        """The way that takes the slowest rank the least, of those that hold every rank's rows."""
        largest = Voted._make(reduced[-NUM_TIMES:])
        num_decodes, query_len = ranks.plain_decodes(reduced)
        rows, times = self._usual.get(query_len), self._times
        row = rows[num_decodes] if rows is not None and num_decodes < len(rows) else None
        # Where padding takes something, a row's times are those of ranks that have as many.
        if row is not None and not (times.pads and -largest.fewest != num_decodes * query_len):
            return self._row_by_slowest(row, largest)
        numbers = ranks.reduced_numbers(reduced[:-NUM_TIMES])
        ways = (self._unlike if times.pads and largest.unlike(numbers) else self._ways)(numbers)
        if len(ways) < 2 or (numbers.max_decode_steps > 1 and ways[-1].mode is Mode.SPLIT):
            way, reason = choose(numbers, ways, self._context, lambda way: times.cost(way, largest))
            return self._made(spread(way, times.wait_of(way, largest) if self._context.spreads else None), reason)
        # The shortest cycle but for near ties, as `select` has it.
        way = times.soonest(ways, largest)
        way = spread(way, times.wait_of(way, largest) if self._context.spreads else None)
        return self._made(way, eager_reason(self._context) if way.mode is Mode.EAGER else self._reason)

    def _row_by_slowest(self, row: Row, largest: Voted) -> Decision:
        """The same for decode rows of one length, the usual step: their row has the graphs."""
        uid, ns = row.uid, max(row.dense_us * 1e3 + largest.full, largest.full_host + row.padding_us * 1e3)
        piece_ns = max(row.piece_us * 1e3 + largest.pieces, largest.pieces_host + row.piece_padding_us * 1e3)
        if piece_ns < ns:
            uid, ns = row.piece_uid, piece_ns
        if max(largest.eager, largest.eager_host) < ns:
            return self._eager
        return self._wholes[uid] or self._whole(uid)

    def _select_for(self, loras: int, forbidden: int) -> Callable[..., Decision]:
        """The prepared path for that many active LoRAs and those forbidden modes: made at first use.

        LoRA counts that the same graphs serve share one.
        """
        by_loras = self._ways.tables.by_loras
        if forbidden & Mode.EAGER.bit or (loras and loras >= len(by_loras)):
            return self._scanned
        group = by_loras[loras] if by_loras else _NOTHING
        key = (*self._alike(loras), forbidden)
        select = self._selects.get(key)
        if select is None:
            select = self._selects[key] = self._prepare(_allowed(group, forbidden), loras, forbidden)
        return select

    def _scanned(self, *numbers: Any) -> Decision:
        return self._general(BatchNumbers(*numbers))

    def _prepare(self, group: Group, loras: int, forbidden_here: int) -> Callable[..., Decision]:
        uniform, costs = self._uniform_rows(group), self._context.costs
        if not loras and not forbidden_here:
            self._usual = uniform
        base_us, row_us, unit_us, _ = attrs.astuple(costs.decode_attention)
        # With the attention that is the same whatever the KV. Plain tuples, which unpack quicker than named ones.
        prepared = {
            q: [None if row is None else (*row, base_us + row_us * n) for n, row in enumerate(rows)]
            for q, rows in uniform.items()
        }
        (full_base, full_req), (piece_base, piece_req), (eager_base, eager_req) = (
            (host.base_for(decodes=True, prefills=False), host.req_us) for host in _hosts(costs)
        )
        step_us, eager, wholes, whole = costs.step_us, self._eager, self._wholes, self._whole
        dense_eager = self._dense_eager
        general, select_for = self._general, self._select_for
        others = _telling(self._prepare_others(group, loras, forbidden_here), group.open)
        most_loras = len(self._ways.tables.by_loras)
        alike = self._alike(loras)
        serves = frozenset(n for n in range(most_loras) if self._alike(n) == alike) | {loras}

        def select(
            num_decodes: int,
            query_len: int = 1,
            decode_kv_tokens: int = 0,
            num_decode_tokens: int = -1,
            num_prefills: int = 0,
            num_prefill_tokens: int = 0,
            prefill_kv_tokens: int = 0,
            prefill_pairs: int = 0,
            max_query_len: int = 1,
            max_kv_len: int = 0,
            num_first_chunks: int = 0,
            num_active_loras: int = 0,
            forbidden: int = 0,
            max_decode_steps: int = 1,
            num_tokens: int = -1,
            num_reqs: int = -1,
            max_decode_len: int = 0,
            facts: Mapping[str, Any] = NO_FACTS,
        ) -> Decision:
            if forbidden != forbidden_here or num_active_loras not in serves:
                return select_for(num_active_loras, forbidden)(
                    num_decodes, query_len, decode_kv_tokens, num_decode_tokens, num_prefills, num_prefill_tokens,
                    prefill_kv_tokens, prefill_pairs, max_query_len, max_kv_len, num_first_chunks, num_active_loras,
                    forbidden, max_decode_steps, num_tokens, num_reqs, max_decode_len, facts,
                )  # fmt: skip
            if not num_prefills:
                rows = prepared.get(query_len)
                row = rows[num_decodes] if rows is not None and num_decodes < len(rows) else None
                if row is not None:
                    dense_us, limit_us, uid, piece_us, piece_uid, padding_us, piece_padding_us, rows_us = row
                    attention_us = rows_us + unit_us * decode_kv_tokens
                    decision = wholes[uid] or whole(uid)
                    if dense_us + attention_us <= limit_us:
                        return decision
                    device, host = dense_us + attention_us, full_base + full_req * num_decodes + padding_us
                    cycle = (device if device >= host else host) + step_us
                    device, host = piece_us + attention_us, piece_base + piece_req * num_decodes + piece_padding_us
                    rival = (device if device >= host else host) + step_us
                    if rival < cycle:
                        cycle, decision = rival, wholes[piece_uid] or whole(piece_uid)
                    device, host = (
                        dense_eager(num_decodes * query_len) + attention_us,
                        eager_base + eager_req * num_decodes,
                    )
                    return eager if (device if device >= host else host) + step_us < cycle else decision
            decided = others(
                num_decodes, query_len, decode_kv_tokens,
                num_decodes * query_len if num_decode_tokens < 0 else num_decode_tokens,
                num_prefills, num_prefill_tokens, prefill_kv_tokens, prefill_pairs, max_decode_steps, num_tokens,
                num_reqs, max_decode_len, facts,
            )  # fmt: skip
            if decided is not None:
                return decided
            return general(
                BatchNumbers(
                    num_decodes, query_len, decode_kv_tokens, num_decode_tokens, num_prefills, num_prefill_tokens,
                    prefill_kv_tokens, prefill_pairs, max_query_len, max_kv_len, num_first_chunks, num_active_loras,
                    forbidden, max_decode_steps, num_tokens, num_reqs, max_decode_len, facts,
                )
            )  # fmt: skip

        return select

    # Uniform decode batches

    def _alike(self, loras: int) -> tuple[int, int]:
        """Equal for LoRA counts that the same graphs serve, and for which the same graphs were withdrawn."""
        by_loras = self._ways.tables.by_loras
        group = by_loras[loras] if loras < len(by_loras) else None
        return id(group), bisect_left(self._lost_cases, loras)

    def _uniform_rows(self, group: Group) -> dict[int, list[Row | None]]:
        """For each query length, by number of decode rows; None goes the general way."""
        pieces = group.pieces
        return {
            q: [
                None
                if num_reqs * q in group.open
                else self._row(at(column, num_reqs * q), at(pieces, num_reqs * q), num_reqs, num_reqs * q)
                for num_reqs in range((len(column) - 1) // q + 1)
            ]
            for q, column in group.uniform.items()
        }

    def _row(self, entry: Entry | None, piece: Entry | None, num_reqs: int, tokens: int) -> Row | None:
        costs = self._context.costs
        if entry is None or entry.num_reqs < num_reqs:
            return None
        dense = entry.rate
        eager = self._dense_eager(tokens)
        host = costs.host_full.base_for(decodes=True, prefills=False) + costs.host_full.req_us * num_reqs
        host += entry.padding_us
        limit = _INFINITY
        rivals = [(eager, costs.host_eager, 0.0)]
        if piece is not None:
            rivals.append((piece.rate, costs.host_piecewise, piece.padding_us))
        for rival_dense, rival, padding_us in rivals:
            rival_host = rival.base_for(decodes=True, prefills=False) + rival.req_us * num_reqs + padding_us
            if rival_host < host:
                limit = -1.0
            elif rival_dense < dense:
                # Below its host time the rival can't get; up to there the graph is at least as quick.
                limit = min(limit, rival_host)
        rate_us, uid, padding_us = (_INFINITY, -1, 0.0) if piece is None else (piece.rate, piece.uid, piece.padding_us)
        return Row(dense, limit, entry.uid, rate_us, uid, entry.padding_us, padding_us)

    def _dense_eager(self, tokens: int) -> float:
        return self._eager_us[tokens] if tokens < len(self._eager_us) else self._context.costs.eager.at(tokens)

    # Batches with prefill rows, or with decode rows of different lengths

    def _prepare_others(self, group: Group, loras: int, forbidden: int) -> Callable[..., Decision | None]:
        costs = self._context.costs
        d_base, d_row, d_unit, _ = attrs.astuple(costs.decode_attention)
        p_base, p_row, p_unit, p_kv = attrs.astuple(costs.prefill_attention)
        (full_bases, full_req), (piece_bases, piece_req), (eager_bases, eager_req) = (
            (_bases(host), host.req_us) for host in _hosts(costs)
        )
        decode_host, piece_prompt, eager_prompt = full_bases[_DECODES], piece_bases[_PREFILLS], eager_bases[_PREFILLS]
        step_us, overlaps = costs.step_us, [costs.overlap_of(count) for count in range(MANY_DECODES + 1)]
        # Of steps with both kinds of rows, which the index says.
        full_more, piece_more = ((0.0, 0.0, 0.0, both) for both in costs.both_us)
        uniform, varlen, mixed_column, pieces = group.uniform, group.varlen, group.mixed, group.pieces
        dense_eager = self._eager_us
        shares: Sequence[float] = ()
        if costs.effects.outlasted_share is not None:
            shares = [costs.effects.outlasted_at(tokens) for tokens in range(len(dense_eager))]
        most_tokens, num_mixed, num_pieces, num_varlen = len(dense_eager), len(mixed_column), len(pieces), len(varlen)
        # Only this order of forms is unrolled below; any other goes the general way.
        usual = self._forms[:2] == (_IN_TURN, _BESIDE)
        divides = bool(self._forms) and not forbidden & Mode.SPLIT.bit
        several = SplitForm.DECODES_BESIDE in self._forms
        wholes, whole, divide, eager = self._wholes, self._whole, self._divided, self._eager
        most_unlooked, spared, most_told = 1 if several else _NEVER, costs.spared_us, MANY_DECODES
        step = (loras, forbidden)
        nothing: Sequence[Entry | None] = ()

        def others(
            num_decodes: int, query_len: int, decode_kv: int, decode_tokens: int, num_prefills: int,
            prefill_tokens: int, prefill_kv: int, prefill_pairs: int, max_decode_steps: int, num_tokens: int,
            num_reqs: int, max_decode_len: int, facts: Mapping[str, Any],
        ) -> Decision | None:  # fmt: skip
            """The decision; None for a batch that the columns can't tell about."""
            tokens = decode_tokens + prefill_tokens if num_tokens < 0 else num_tokens
            reqs = num_decodes + num_prefills if num_reqs < 0 else num_reqs
            if not 0 < tokens < most_tokens:
                return None
            decode_us = d_base + d_row * num_decodes + d_unit * decode_kv if num_decodes else 0.0
            prefill_us = 0.0
            if num_prefills:
                prefill_us = p_base + p_row * prefill_tokens + p_unit * prefill_pairs + p_kv * prefill_kv
            attention_us = decode_us + prefill_us
            kinds = (_DECODES if num_decodes else 0) + (_PREFILLS if num_prefills else 0)
            least = _INFINITY
            chosen: Any = None
            decode: Any = None
            if num_decodes:
                column = uniform.get(query_len, nothing)
                decode = column[decode_tokens] if decode_tokens < len(column) else None
                if decode is None:
                    decode = varlen[decode_tokens] if decode_tokens < num_varlen else None
                    if decode is None:
                        decode = mixed_column[decode_tokens] if decode_tokens < num_mixed else None
                if decode is not None and (decode[2] < num_decodes or decode[3] < (query_len or max_decode_len)):
                    return None
            entry: Any = decode
            if num_prefills:
                entry = mixed_column[tokens] if tokens < num_mixed else None
            if entry is not None:
                if entry[2] < reqs:
                    return None
                device = entry[1] + attention_us + full_more[kinds]
                host = full_bases[kinds] + full_req * reqs + entry[5]
                least, chosen = (device if device >= host else host) + step_us, entry
            entry = pieces[tokens] if tokens < num_pieces else None
            if entry is not None:
                device = entry[1] + attention_us + piece_more[kinds]
                host = piece_bases[kinds] + piece_req * reqs + entry[5]
                cycle = (device if device >= host else host) + step_us
                if cycle < least:
                    least, chosen = cycle, entry
            some = chosen is not None
            device, host = dense_eager[tokens] + attention_us, eager_bases[kinds] + eager_req * reqs
            cycle = (device if device >= host else host) + step_us
            if cycle < least:
                least, chosen = cycle, None
            if decode is not None and num_prefills and divides:
                overlap = overlaps[num_decodes if num_decodes < most_told else most_told]
                if not (usual and overlap[0] <= 1.0):
                    return None
                cost, outlasted, _, _ = overlap
                if shares:
                    outlasted *= shares[prefill_tokens]
                # Beside takes no longer than in turn: where it isn't clearly the shortest no form of one step is.
                clear_us = CLEARLY * least
                d_device, d_host = decode[1] + decode_us, decode_host + full_req * num_decodes + decode[5]
                t_device = dense_eager[prefill_tokens] + prefill_us
                prompt_last, decodes_last = t_device + cost * d_device, d_device + outlasted * t_device
                device = prompt_last if prompt_last >= decodes_last else decodes_last
                host = d_host + (eager_prompt + eager_req * num_prefills)
                wins = (device if device >= host else host) + step_us < clear_us
                piece = pieces[prefill_tokens] if prefill_tokens < num_pieces else None
                if piece is not None and not wins:
                    t_device = piece[1] + prefill_us
                    prompt_last, decodes_last = t_device + cost * d_device, d_device + outlasted * t_device
                    device = prompt_last if prompt_last >= decodes_last else decodes_last
                    host = d_host + (piece_prompt + piece_req * num_prefills + piece[5])
                    wins = (device if device >= host else host) + step_us < clear_us
                spared_us, tail_us = 0.0, _INFINITY
                if max_decode_steps > most_unlooked:
                    own_us = d_row * num_decodes + d_unit * decode_kv
                    share = num_decodes / (num_decodes + facts.get(WAITING_REQS, 0))
                    spared_us = spared(d_device, d_host, own_us, share)
                    tail_us, wins = facts.get(GAP_TAIL_US, _INFINITY), True
                if wins:
                    if shares:
                        overlap = overlap.outlasting(shares[prefill_tokens])
                    decided = divide(
                        decode, piece, prefill_tokens, (d_device, d_host, overlap, spared_us, tail_us), prefill_us,
                        num_prefills, max_decode_steps, least, step,
                    )  # fmt: skip
                    if decided is not None:
                        return decided
            elif not some:
                return None
            return eager if chosen is None else wholes[chosen[4]] or whole(chosen[4])

        return others

    def _divided(
        self, decode: Entry, piece: Entry | None, prefill_tokens: int, decode_us: _DecodeStep,
        prefill_us: float, num_prefills: int, max_decode_steps: int, least: float, step: tuple[int, int],
    ) -> Decision | None:  # fmt: skip
        """The best split, where one is better than the `least` cycle so far.

        Args:
            decode: the decode half's graph.
            piece: the graph that holds the prefill half; None where none does.
            prefill_tokens: of all prompt chunks.
            decode_us: of one decode step.
            prefill_us: attention of the prefill half.
            num_prefills: its rows.
            max_decode_steps: decode steps that may run.
            least: the shortest cycle of the ways that don't split, by which one step of decodes must be beaten clearly.
            step: active LoRAs and forbidden modes.
        """
        costs = self._context.costs
        step_us = costs.step_us
        piece_base_us, eager_base_us = self._prompt_bases
        piece_host_us = piece_base_us + costs.host_piecewise.req_us * num_prefills
        eager_host_us = eager_base_us + costs.host_eager.req_us * num_prefills
        d_device, d_host, overlap, *_ = decode_us
        turns: list[tuple[Entry | None, float, float]] = []
        if piece is not None:
            turns.append((piece, piece.rate + prefill_us, piece_host_us + piece.padding_us))
        turns.append((None, self._eager_us[prefill_tokens] + prefill_us, eager_host_us))
        form = tail = None
        clearly = CLEARLY * least
        for each, t_device, t_host in turns:
            device, host = d_device + t_device, d_host + t_host
            cycle = (device if device >= host else host) + step_us
            if cycle < clearly:
                clearly, form, tail = cycle, _IN_TURN, each
        for each, t_device, t_host in turns:
            host = d_host + t_host
            device = overlap.device_us(d_device, t_device)
            cycle = (device if device >= host else host) + step_us
            if cycle < clearly:
                clearly, form, tail = cycle, _BESIDE, each
        if form is not None:
            least = clearly
        if max_decode_steps > 1 and SplitForm.DECODES_BESIDE in self._forms:
            steps, each, cycle = self._several(decode_us, turns, max_decode_steps, least, least)
            if steps > 1:
                wait = costs.wait_share(d_device, d_host, overlap, cycle, steps) if self._context.spreads else None
                return self._split(decode, piece, each, SplitForm.DECODES_BESIDE, steps, wait, prefill_tokens, step)
        if form is None:
            return None
        waits = form is _BESIDE and self._context.spreads
        wait = costs.wait_share(d_device, d_host, overlap, least, 1) if waits else None
        return self._split(decode, piece, tail, form, 1, wait, prefill_tokens, step)

    def _several(
        self, decode_us: _DecodeStep, turns: Sequence[tuple[Entry | None, float, float]],
        most_steps: int, least: float, shortest: float,
    ) -> tuple[int, Entry | None, float]:  # fmt: skip
        """Decode steps to run beside the prefill half, its graph and the cycle; 1 step where another way is as good.

        Here the score isn't the cycle. Where one step beside the prompt was left out for `SPLIT_MARGIN`, several may be
        shorter than the best way with one.

        Args:
            decode_us: as `_divided` has it.
            turns: the prefill half's graph or None, its device time, and its host time.
            most_steps: decode steps that may run.
            least: the shortest cycle of all ways with one decode step that are considered.
            shortest: of all ways that are, as far as they were looked at.
        """
        costs, objective = self._context.costs, self._context.objective
        step_weight, gap_weight = objective.step_weight, objective.gap_weight
        step_us = costs.step_us
        d_device, d_host, overlap, spared_us, tail_us = decode_us
        limit = objective.first_token_limit * shortest
        best_score = best_cycle = _INFINITY
        if least <= limit:
            best_score, best_cycle = step_weight * least + gap_weight * least, least
        best: tuple[int, Entry | None, float] = (1, None, least)
        for steps in steps_ahead(most_steps):
            within = False
            decodes_us = steps * d_device
            for tail, t_device, t_host in turns:
                device = overlap.device_us(decodes_us, t_device)
                host = steps * d_host + t_host
                cycle = (device if device >= host else host) + step_us
                within = within or cycle <= limit
                if cycle <= limit and cycle / steps <= tail_us:
                    if cycle < shortest:
                        return self._several(decode_us, turns, most_steps, least, cycle)
                    score = step_weight * (cycle - (steps - 1) * spared_us) + gap_weight * (cycle / steps)
                    if score < best_score or (score == best_score and cycle < best_cycle):
                        best_score, best_cycle, best = score, cycle, (steps, tail, cycle)
            if not within:
                # More steps take no less.
                break
        return best

    # Prepared decisions

    def _whole(self, uid: int) -> Decision:
        """To replay that graph for the whole batch: made at first use, because a ladder has thousands."""
        decision = self._wholes[uid]
        if decision is None:
            way = self._ways.tables.entries[uid].way
            decision = self._wholes[uid] = way.decided(self._reason, self._context, costs=True)
        return decision

    def _split(
        self, decode: Entry, piece: Entry | None, tail: Entry | None, form: SplitForm, steps: int, wait: float | None,
        prefill_tokens: int, step: tuple[int, int],
    ) -> Decision:  # fmt: skip
        """The prepared decision of a split: made at the first batch that takes it, kept after that."""
        # Without a piece, prompt tokens tell why none holds them; beyond every graph they all tell the same.
        alike = -1 if piece is not None or prefill_tokens > self._ways.tables.largest else prefill_tokens
        memo = (decode.uid, -1 if tail is None else tail.uid, piece is None, alike, form, steps, wait, step)
        decision = self._splits.get(memo)
        if decision is None:
            numbers = BatchNumbers(
                1, num_decode_tokens=1, num_prefills=1, num_prefill_tokens=prefill_tokens,
                num_active_loras=step[0], forbidden=step[1],
            )  # fmt: skip
            tails = split_tails(piece and piece.key, numbers, self._context)
            wanted = tails[:1] if tail is not None else tails[-1:]
            way = next(each for each in split_way(decode.key, wanted, form, steps) if each.launches[0].repeat == steps)
            decision = spread(way, wait).decided(self._reason, self._context, costs=True)
            if len(self._splits) >= MOST_DECISIONS:
                self._splits.clear()
            self._splits[memo] = decision
        return decision

    def _general(self, numbers: BatchNumbers) -> Decision:
        way, reason = choose(numbers, self._ways(numbers), self._context)
        return self._made(spread(way, wait_of(way, numbers, self._context)), reason)

    def _made(self, way: Way, reason: Reason) -> Decision:
        decision = self._decisions.get((way, reason))
        if decision is None:
            decision = way.decided(reason, self._context, costs=True)
            if len(self._decisions) >= MOST_DECISIONS:
                self._decisions.clear()
            self._decisions[way, reason] = decision
        return decision


def _hosts(costs: CostTable) -> tuple[HostCost, HostCost, HostCost]:
    return costs.host_full, costs.host_piecewise, costs.host_eager


def _bases(host: HostCost) -> tuple[float, ...]:
    """What a launch takes whatever its requests, by the kinds of rows that it has: none, decode, prefill, both."""
    return tuple(host.base_for(decodes=bool(kinds & _DECODES), prefills=bool(kinds & _PREFILLS)) for kinds in range(4))


def _telling(others: Callable[..., Decision | None], left_open: frozenset[int]) -> Callable[..., Decision | None]:
    """`others`, and None where columns don't tell which graph is the cheapest; see `Group.open`."""
    if not left_open:
        return others

    def told(
        num_decodes: int, query_len: int, decode_kv: int, decode_tokens: int, num_prefills: int, prefill_tokens: int,
        prefill_kv: int, prefill_pairs: int, max_decode_steps: int, num_tokens: int, *rest: Any,
    ) -> Decision | None:  # fmt: skip
        tokens = decode_tokens + prefill_tokens if num_tokens < 0 else num_tokens
        if not left_open.isdisjoint((tokens, decode_tokens, prefill_tokens)):
            return None
        return others(
            num_decodes, query_len, decode_kv, decode_tokens, num_prefills, prefill_tokens, prefill_kv, prefill_pairs,
            max_decode_steps, num_tokens, *rest,
        )  # fmt: skip

    return told


def _allowed(group: Group, forbidden: int) -> Group:
    """The group without the columns of forbidden modes."""
    if forbidden & Mode.FULL.bit:
        group = Group({}, [], [], group.pieces, group.open)
    return group._replace(pieces=[]) if forbidden & Mode.PIECEWISE.bit else group
