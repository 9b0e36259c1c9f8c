"""The captured graphs of one context, as a replica's rule looks them up: scanned, or prepared."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

import attrs

from kpolicy.attention.support import Claims, HostParams
from kpolicy.decision import Decision, Launch
from kpolicy.keys import GraphKey
from kpolicy.ladders import CaptureLadder
from kpolicy.modes import Mode, Part, Rows
from kpolicy.policies.base import PolicyContext, Way, eager_decision, no_legal_mode
from kpolicy.reasons import Reason
from kpolicy.settings import Settings
from kpolicy.shapes import BatchNumbers

__all__ = ["MIXED", "PIECES", "Found", "Graphs", "Kind", "decode_kind", "refusal"]


class Kind(NamedTuple):
    """One list of graphs that a rule looks in."""

    part: Part
    query_len: int | None = None
    variant: str = ""


MIXED = Kind(Part.FULL)
"""FULL graphs that take prefill rows."""
PIECES = Kind(Part.PIECEWISE)


def decode_kind(query_len: int) -> Kind:
    """FULL graphs of uniform decode rows of that many tokens."""
    return Kind(Part.FULL, query_len)


class Found(NamedTuple):
    """A captured graph and its decisions, by reason."""

    key: GraphKey
    fits: Decision
    next_mode: Decision


_EAGER = Mode.EAGER.bit
_MODES = {Part.FULL: Mode.FULL, Part.PIECEWISE: Mode.PIECEWISE}


class Graphs:
    """The captured graphs of one context, as a rule looks them up.

    Args:
        context: what the policy reads.
        prepared: look-ups by bisection over lists made now, with their decisions; otherwise scans, which are
            slow and plain. Both find the same.
    """

    def __init__(self, context: PolicyContext, *, prepared: bool) -> None:
        self.context = context
        self.settings: Settings = context.settings
        self.kinds = _by_kind(context.ladder.keys)
        self._lost = _by_kind(context.ladder.withdrawn)
        self._find = _prepared(self.kinds, context) if prepared else _scanned(self.kinds, context)
        self._eager: dict[Reason, Decision] = {}
        self._whys: dict[Kind, _Why] = {}
        planned = {key.num_tokens for keys in (*self.kinds.values(), *self._lost.values()) for key in keys}
        self.sizes = tuple(sorted(planned))
        """Every size of every kind that was planned, captured or not, in tokens."""

    def find(self, kind: Kind, tokens: int, loras: int, *, exact: bool = False) -> Found | None:
        """The smallest graph of that kind for so many tokens, of the smallest LoRA case that has one.

        Args:
            kind: which list.
            tokens: tokens of the batch.
            loras: active LoRAs.
            exact: no padding.
        """
        return self._find(kind, tokens, loras, exact)

    def next_size(self, tokens: int) -> int | None:
        """The size that a rule with one list for all kinds pads to: the next one planned, captured or not."""
        i = bisect_left(self.sizes, tokens)
        return self.sizes[i] if i < len(self.sizes) else None

    def why(self, kind: Kind, tokens: int, loras: int, *, exact: bool = False) -> Reason:
        """Why `find` came back with nothing."""
        why = self._whys.get(kind)
        if why is None:
            why = self._whys[kind] = _Why.of(kind, self.kinds, self._lost, self.context)
        return why(tokens, loras, exact)

    def eager(self, reason: Reason, numbers: BatchNumbers) -> Decision:
        """The batch eagerly, for that reason.

        Raises:
            NoLegalModeError: eager is forbidden for this step.
        """
        if numbers.forbidden & _EAGER:
            raise no_legal_mode(numbers)
        decision = self._eager.get(reason)
        if decision is None:
            if reason is Reason.EMPTY_BATCH:
                decision = Way(Mode.EAGER, ()).decided(reason, self.context)
            else:
                decision = eager_decision(reason, self.context)
            self._eager[reason] = decision
        return decision

    def take(
        self, kind: Kind, tokens: int, numbers: BatchNumbers, *, exact: bool = False, first: bool = True
    ) -> Decision | Reason:
        """Replay the graph that `find` finds, or say why there is none.

        Args:
            kind: which list.
            tokens: tokens of the batch.
            numbers: the batch; its LoRAs, requests and forbidden modes are read.
            exact: no padding.
            first: whether this is the mode that the rule prefers.
        """
        if numbers.forbidden & _MODES[kind.part].bit:
            return Reason.MODE_FORBIDDEN
        found = self._find(kind, tokens, numbers.num_active_loras, exact)
        if found is None:
            return self.why(kind, tokens, numbers.num_active_loras, exact=exact)
        most = found.key.num_reqs
        if most is not None and most < numbers.total_reqs:
            return Reason.TOO_MANY_REQS
        return found.fits if first else found.next_mode


_Find = Callable[[Kind, int, int, bool], "Found | None"]
_Kinds = dict[Kind, tuple[GraphKey, ...]]


def _by_kind(keys: Sequence[GraphKey]) -> _Kinds:
    kinds: dict[Kind, list[GraphKey]] = {}
    for key in keys:
        if key.max_query_len is None and key.stage == "main":
            kinds.setdefault(Kind(key.part, key.query_len, key.variant), []).append(key)
    return {kind: tuple(found) for kind, found in kinds.items()}


def _found(key: GraphKey, context: PolicyContext) -> Found:
    way = Way(_MODES[key.part], (Launch(Rows.ALL, key),))
    return Found(key, way.decided(Reason.GRAPH_FITS, context), way.decided(Reason.NEXT_MODE, context))


def _scanned(kinds: _Kinds, context: PolicyContext) -> _Find:
    def find(kind: Kind, tokens: int, loras: int, exact: bool) -> Found | None:
        fitting = [
            key
            for key in kinds.get(kind, ())
            if key.lora_case >= loras and (key.num_tokens == tokens if exact else key.num_tokens >= tokens)
        ]
        best = min(fitting, key=lambda key: (key.lora_case, key.num_tokens), default=None)
        return None if best is None else _found(best, context)

    return find


class _Shelf(NamedTuple):
    """The graphs of one kind for one number of active LoRAs."""

    sizes: list[int]
    found: list[Found]
    exact: dict[int, Found]


def _prepared(kinds: _Kinds, context: PolicyContext) -> _Find:
    shelves: dict[Kind, list[_Shelf]] = {}
    for kind, keys in kinds.items():
        entries = [_found(key, context) for key in keys]
        cases = sorted({key.lora_case for key in keys})
        by_loras = shelves[kind] = []
        for i, case in enumerate(cases):
            by_loras += [_shelf(entries, cases[i:])] * (case + 1 - len(by_loras))

    def find(kind: Kind, tokens: int, loras: int, exact: bool) -> Found | None:
        by_loras = shelves.get(kind)
        if by_loras is None or loras >= len(by_loras):
            return None
        sizes, found, exactly = by_loras[loras]
        if exact:
            return exactly.get(tokens)
        i = bisect_left(sizes, tokens)
        return found[i] if i < len(found) else None

    return find


def _shelf(entries: Sequence[Found], cases: Sequence[int]) -> _Shelf:
    """The smallest case that has a graph of enough tokens wins; a larger one only serves sizes beyond its last."""
    found: list[Found] = []
    exact: dict[int, Found] = {}
    for case in cases:
        last = found[-1].key.num_tokens if found else 0
        for entry in entries:
            if entry.key.lora_case == case:
                exact.setdefault(entry.key.num_tokens, entry)
                if entry.key.num_tokens > last:
                    found.append(entry)
    return _Shelf([entry.key.num_tokens for entry in found], found, exact)


@attrs.frozen
class _Why:
    """Why a kind has no graph for a batch, from figures taken once."""

    fixed: Reason | None
    most_loras: int
    largest: int
    largest_lost: int
    lost: frozenset[int]

    @classmethod
    def of(cls, kind: Kind, kinds: _Kinds, lost: _Kinds, context: PolicyContext) -> _Why:
        keys, gone = kinds.get(kind, ()), lost.get(kind, ())
        fixed = refusal(kind, context.claims)
        if fixed is None and not keys:
            fixed = _nothing(kind, context.ladder) if not gone else Reason.GRAPH_WITHDRAWN
        return cls(
            fixed,
            max((key.lora_case for key in keys), default=0),
            max((key.num_tokens for key in keys), default=0),
            max((key.num_tokens for key in gone), default=0),
            frozenset(key.num_tokens for key in gone),
        )

    def __call__(self, tokens: int, loras: int, exact: bool) -> Reason:
        if self.fixed is not None:
            return self.fixed
        if loras > self.most_loras:
            return Reason.LORA_NOT_CAPTURED
        if tokens in self.lost if exact else tokens <= self.largest_lost:
            return Reason.GRAPH_WITHDRAWN
        return Reason.EXACT_SIZE_NOT_CAPTURED if exact and tokens <= self.largest else Reason.ABOVE_LARGEST_SIZE


def _nothing(kind: Kind, ladder: CaptureLadder) -> Reason:
    if not ladder.keys:
        return Reason.GRAPH_WITHDRAWN if ladder.withdrawn else Reason.NO_GRAPHS
    if kind.part is Part.PIECEWISE:
        return Reason.SIZE_NOT_CAPTURED
    return Reason.MIXED_NOT_CAPTURED if kind.query_len is None else Reason.QUERY_LEN_NOT_CAPTURED


def refusal(kind: Kind, claims: Claims) -> Reason | None:
    """Why attention keeps graphs of that kind from being captured; None where it doesn't."""
    if kind.part is Part.PIECEWISE:
        return None if claims.piecewise else Reason.NO_PIECEWISE
    full = claims.full
    if full.mixed if kind.query_len is None else kind.query_len <= full.uniform_query_len:
        return None
    return Reason.HOST_LENGTHS_FROZEN if claims.host_params is HostParams.FROZEN else Reason.ATTENTION_NOT_CAPTURABLE
