"""Policies that are one rule: `eager`, `full`, `piecewise`, `full_and_piecewise`, `split`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from kpolicy.attention.support import Claims, HostParams, SupportLevel
from kpolicy.decision import Decision
from kpolicy.keys import GraphKey
from kpolicy.ladders import CaptureSizes, plan_keys
from kpolicy.modes import Mode, Part, SplitForm, parse_form
from kpolicy.policies import ranks
from kpolicy.policies.base import (
    Downgrade,
    PolicyContext,
    Way,
    legal_ways,
    miss_full,
    miss_piecewise,
    no_legal_mode,
    split_way,
)
from kpolicy.policies.tables import EAGER_WAY, MOST_DECISIONS, Entry, Group, PreparedWays, at, decode_graph
from kpolicy.reasons import Reason
from kpolicy.settings import Settings
from kpolicy.shapes import BatchNumbers, BatchShape

__all__ = ["FixedPolicy", "downgrades"]


def smallest(keys: Sequence[GraphKey], _num_tokens: int) -> Sequence[GraphKey]:
    """The smallest captured size that holds the rows."""
    return keys[:1]


@attrs.frozen
class FixedPolicy:
    """Takes the first mode of an order that is legal, at the smallest captured size that fits.

    Args:
        name: the policy's name.
        summary: one line for people.
        order: modes in the order they are tried; eager comes last by itself.
        mixed_order: the order for batches with prefill rows, where it differs.
        form: how the halves of a SPLIT share the device.
    """

    name: str
    summary: str
    order: tuple[Mode, ...]
    mixed_order: tuple[Mode, ...] = ()
    form: SplitForm = SplitForm.IN_TURN

    reads_costs = False

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "form", parse_form(self.form))

    @property
    def parts(self) -> frozenset[Part]:
        """What its graphs cover. SPLIT owns none: it replays FULL and PIECEWISE graphs."""
        modes = {*self.order, *self.mixed_order}
        parts = {Part.FULL} if modes & {Mode.FULL, Mode.SPLIT} else set()
        return frozenset(parts | ({Part.PIECEWISE} if modes & {Mode.PIECEWISE, Mode.SPLIT} else set()))

    def sizes(self, settings: Settings) -> CaptureSizes:
        return CaptureSizes.default(settings)

    def plan(self, sizes: CaptureSizes, claims: Claims, settings: Settings) -> tuple[GraphKey, ...]:
        parts = self.parts
        takes_mixed = Mode.FULL in self.orders(mixed=True)
        keys = plan_keys(sizes, claims, settings) if parts else ()
        return tuple(
            key for key in keys if key.part in parts and (takes_mixed or key.decode_only or key.part is Part.PIECEWISE)
        )

    def orders(self, *, mixed: bool) -> tuple[Mode, ...]:
        return self.mixed_order if mixed and self.mixed_order else self.order

    def resolve(self, claims: Claims, settings: Settings) -> tuple[Downgrade, ...]:
        return downgrades(self.orders(mixed=False), self.orders(mixed=True), claims, settings)

    def decide(self, shape: BatchShape, context: PolicyContext) -> Decision:
        numbers = shape.numbers
        way, reason = self.choose(numbers, legal_ways(numbers, context, smallest, forms=(self.form,)), context)
        return way.decided(reason, context)

    def choose(self, numbers: BatchNumbers, ways: Sequence[Way], context: PolicyContext) -> tuple[Way, Reason]:
        """The first legal way in this policy's order, and why."""
        if not ways:
            raise no_legal_mode(numbers)
        if not numbers.total_tokens:
            return ways[0], Reason.EMPTY_BATCH
        order = self.orders(mixed=numbers.num_prefills > 0)
        for mode in order:
            for way in ways:
                if way.mode is mode:
                    if mode is Mode.SPLIT:
                        return way, Reason.DECODES_KEEP_GRAPH
                    return way, Reason.GRAPH_FITS if mode is order[0] else Reason.NEXT_MODE
        eager = next((way for way in ways if way.mode is Mode.EAGER), None)
        if eager is None:
            raise no_legal_mode(numbers)
        return eager, self.miss(numbers, order, context) if order else Reason.POLICY_IS_EAGER

    def miss(self, numbers: BatchNumbers, order: tuple[Mode, ...], context: PolicyContext) -> Reason:
        """Why none of the order's modes could run: what the last of them lacked."""
        if order[-1] is Mode.PIECEWISE:
            return miss_piecewise(numbers, context)
        return miss_full(numbers, context)

    def compile(self, context: PolicyContext) -> FixedTables:
        return FixedTables(self, context)


class FixedTables:
    """A `FixedPolicy` prepared for one context.

    Without forbidden modes or LoRA a batch is looked up in the columns of its order, one after the other; what they
    can't tell goes through prepared ways. Batches larger than every graph miss for the same reason, which is kept.
    """

    def __init__(self, policy: FixedPolicy, context: PolicyContext) -> None:
        self._policy = policy
        self._context = context
        self._ways = PreparedWays(context, smallest, lambda _key, _num_tokens: 0.0, (policy.form,))
        self._decisions: dict[tuple[Way, Reason], Decision] = {}
        self._misses: dict[tuple[bool, int], Decision] = {}
        self._splits: dict[tuple[int, int], Decision] = {}
        by_loras = self._ways.tables.by_loras
        self._group = by_loras[0] if by_loras else Group({}, [], [], [])
        self._wholes: dict[Mode, list[Decision | None]] = {}
        self.select: Callable[..., Decision] = self._prepare()

    def vote(self, numbers: BatchNumbers) -> tuple[int, ...]:
        return ranks.vote(numbers)

    def agree(self, reduced: Sequence[int], numbers: BatchNumbers) -> Decision:
        return ranks.agree(self.select, reduced, numbers)

    def _prepare(self) -> Callable[..., Decision]:
        first, group = self._policy.order[:1], self._group
        columns: Mapping[int, Sequence[Entry | None]] = {}
        if first == (Mode.FULL,):
            columns = group.uniform
        elif first == (Mode.PIECEWISE,):
            columns = dict.fromkeys(self._context.settings.decode_query_lens, group.pieces)
        uniform = {
            q: [
                self._uniform(at(column, num_reqs * q), num_reqs, first[0])
                for num_reqs in range((max(len(column), 1) - 1) // q + 1)
            ]
            for q, column in columns.items()
        }
        general, common = self._general, self._common

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
            *rest: Any,
        ) -> Decision:
            if not (num_active_loras or forbidden):
                if not num_prefills:
                    decisions = uniform.get(query_len)
                    if decisions is not None and num_decodes < len(decisions):
                        decision = decisions[num_decodes]
                        if decision is not None:
                            return decision
                decision = common(num_decodes, query_len, num_decode_tokens, num_prefills, num_prefill_tokens, *rest)
                if decision is not None:
                    return decision
            return general(
                BatchNumbers(
                    num_decodes, query_len, decode_kv_tokens, num_decode_tokens, num_prefills, num_prefill_tokens,
                    prefill_kv_tokens, prefill_pairs, max_query_len, max_kv_len, num_first_chunks, num_active_loras,
                    forbidden, *rest,
                )
            )  # fmt: skip

        return select

    def _uniform(self, entry: Entry | None, num_reqs: int, mode: Mode) -> Decision | None:
        if entry is None or entry.num_reqs < num_reqs:
            return None
        return self._whole(entry, mode, Reason.GRAPH_FITS)

    def _common(
        self, num_decodes: int, query_len: int, decode_tokens: int, num_prefills: int, prefill_tokens: int,
        _max_decode_steps: int = 1, num_tokens: int = -1, num_reqs: int = -1, max_decode_len: int = 0,
        _facts: Any = None,
    ) -> Decision | None:  # fmt: skip
        """The decision of a batch with nothing forbidden and no LoRA; None where the columns can't tell."""
        if decode_tokens < 0:
            decode_tokens, max_decode_len = num_decodes * query_len, query_len
        tokens = decode_tokens + prefill_tokens if num_tokens < 0 else num_tokens
        reqs = num_decodes + num_prefills if num_reqs < 0 else num_reqs
        longest = query_len or max_decode_len
        if not tokens:
            return None
        policy, group = self._policy, self._group
        order = policy.mixed_order if num_prefills and policy.mixed_order else policy.order
        for mode in order:
            if mode is Mode.PIECEWISE:
                entry = at(group.pieces, tokens)
            elif mode is Mode.SPLIT:
                decode = decode_graph(group, query_len, decode_tokens) if num_decodes and num_prefills else None
                if decode is None:
                    continue
                piece = at(group.pieces, prefill_tokens)
                several = policy.form is SplitForm.DECODES_BESIDE
                if piece is None or several or decode.num_reqs < num_decodes or decode.max_query_len < longest:
                    return None
                return self._split(decode, piece)
            elif num_prefills:
                entry = at(group.mixed, tokens)
            else:
                entry = decode_graph(group, query_len, tokens)
            if entry is not None:
                if entry.num_reqs < reqs or (not num_prefills and entry.max_query_len < longest):
                    return None
                return self._whole(entry, mode, Reason.GRAPH_FITS if mode is order[0] else Reason.NEXT_MODE)
        if order and tokens <= self._ways.tables.largest:
            return None
        return self._miss(num_prefills > 0, query_len, tokens)

    def _miss(self, mixed: bool, query_len: int, tokens: int) -> Decision:
        """Larger than every graph, or a policy without graphs: what else is in the batch makes no difference."""
        decision = self._misses.get((mixed, query_len))
        if decision is None:
            numbers = BatchNumbers(
                1, query_len, num_decode_tokens=tokens - mixed, num_prefills=int(mixed), num_prefill_tokens=int(mixed)
            )
            order = self._policy.orders(mixed=mixed)
            reason = self._policy.miss(numbers, order, self._context) if order else Reason.POLICY_IS_EAGER
            decision = self._misses[mixed, query_len] = EAGER_WAY.decided(reason, self._context)
        return decision

    def _whole(self, entry: Entry, mode: Mode, reason: Reason) -> Decision:
        decisions = self._wholes.get(mode)
        if decisions is None:
            decisions = self._wholes[mode] = [None] * (2 * len(self._ways.tables.entries))
        place = 2 * entry.uid + (reason is Reason.NEXT_MODE)
        decision = decisions[place]
        if decision is None:
            decision = decisions[place] = self._ways.whole(entry).decided(reason, self._context)
        return decision

    def _split(self, decode: Entry, piece: Entry) -> Decision:
        decision = self._splits.get((decode.uid, piece.uid))
        if decision is None:
            way = split_way(decode.key, ((piece.key, None),), self._policy.form, 1)[0]
            decision = way.decided(Reason.DECODES_KEEP_GRAPH, self._context)
            if len(self._splits) >= MOST_DECISIONS:
                self._splits.clear()
            self._splits[decode.uid, piece.uid] = decision
        return decision

    def _general(self, numbers: BatchNumbers) -> Decision:
        way, reason = self._policy.choose(numbers, self._ways(numbers), self._context)
        decision = self._decisions.get((way, reason))
        if decision is None:
            decision = way.decided(reason, self._context)
            if len(self._decisions) >= MOST_DECISIONS:
                self._decisions.clear()
            self._decisions[way, reason] = decision
        return decision


def downgrades(
    order: tuple[Mode, ...], mixed_order: tuple[Mode, ...], claims: Claims, settings: Settings
) -> tuple[Downgrade, ...]:
    """What attention takes back of the modes that a policy asks for, batch class by batch class."""
    found = []
    full, q = claims.full, settings.query_len
    for batches, asked, supported in (
        ("single-token decodes", order, full.uniform_query_len >= 1),
        (f"decodes of {q} tokens", order if q > 1 else (), full.uniform_query_len >= q),
        ("batches with prefill", mixed_order, full.mixed),
    ):
        if not asked or asked[0] is Mode.EAGER:
            continue
        can = {
            Mode.FULL: supported,
            Mode.PIECEWISE: claims.piecewise,
            Mode.SPLIT: full.uniform_query_len >= q,
            Mode.EAGER: True,
        }
        got = next((mode for mode in asked if can[mode]), Mode.EAGER)
        if got is not asked[0]:
            reason = _support_reason(claims, q) if asked[0] is not Mode.PIECEWISE else Reason.NO_PIECEWISE
            found.append(Downgrade(batches, asked[0].value, got.value, reason))
    return tuple(found)


def _support_reason(claims: Claims, query_len: int) -> Reason:
    if claims.host_params is HostParams.FROZEN:
        return Reason.HOST_LENGTHS_FROZEN
    full = claims.full
    if not full.uniform_query_len:
        return Reason.SUPPORT_NONE
    if full.uniform_query_len < query_len:
        return Reason.SPECULATION_TOO_WIDE
    return Reason.SUPPORT_SINGLE_ONLY if full.level is SupportLevel.SINGLE else Reason.SUPPORT_UNIFORM_ONLY


def eager() -> FixedPolicy:
    return FixedPolicy("eager", "replays nothing: the baseline for every comparison", ())


def full() -> FixedPolicy:
    return FixedPolicy("full", "one FULL graph where one holds the batch, else eager", (Mode.FULL,))


def piecewise() -> FixedPolicy:
    return FixedPolicy("piecewise", "graphs between attention calls for every batch that fits, else eager",
                       (Mode.PIECEWISE,))  # fmt: skip


def full_and_piecewise() -> FixedPolicy:
    return FixedPolicy("full_and_piecewise", "FULL where it holds the batch, then PIECEWISE, else eager",
                       (Mode.FULL, Mode.PIECEWISE))  # fmt: skip


def split(form: SplitForm | str = SplitForm.IN_TURN) -> FixedPolicy:
    return FixedPolicy("split", "decode rows always replay their FULL graph; prefill rows are split off",
                       (Mode.FULL, Mode.PIECEWISE), (Mode.SPLIT, Mode.PIECEWISE), parse_form(form))  # fmt: skip
