"""What the replicas share: a rule written once, over captured graphs that are either scanned or prepared.

A replica is a rule: a batch either leads to one size in one list of graphs, or to a reason for eager. `bind` ties the
rule to a view of the captured graphs. `decide` binds it to a view that scans the ladder; `compile` binds it to one
whose look-ups and decisions are prepared, and fills a table for uniform decode batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import attrs

from kpolicy.attention.support import Claims, HostParams
from kpolicy.decision import Decision
from kpolicy.keys import GraphKey
from kpolicy.modes import Mode, Part
from kpolicy.policies import ranks
from kpolicy.policies.base import Downgrade, PolicyContext
from kpolicy.policies.graphs import Graphs, Kind
from kpolicy.reasons import Reason
from kpolicy.settings import Settings
from kpolicy.shapes import BatchNumbers, BatchShape

__all__ = [
    "Choose",
    "CompiledRule",
    "Ranks",
    "Rule",
    "agreed_decision",
    "by_lora_case",
    "decide_by_rule",
    "downgrade",
    "smaller",
]

Choose = Callable[[BatchNumbers], Decision]
"""A bound rule."""


def downgrade(batches: str, asked: str, resolved: str, kind: Kind, claims: Claims) -> Downgrade:
    """The downgrade for what attention refuses at start-up."""
    full = claims.full
    if kind.part is Part.PIECEWISE:
        reason = Reason.NO_PIECEWISE
    elif claims.host_params is HostParams.FROZEN:
        reason = Reason.HOST_LENGTHS_FROZEN
    elif not full.uniform_query_len:
        reason = Reason.SUPPORT_NONE
    elif kind.query_len is not None:
        reason = Reason.SPECULATION_TOO_WIDE
    else:
        reason = Reason.SUPPORT_SINGLE_ONLY if full.uniform_query_len == 1 else Reason.SUPPORT_UNIFORM_ONLY
    return Downgrade(batches, asked, resolved, reason)


def by_lora_case(keys: Sequence[GraphKey], settings: Settings) -> tuple[GraphKey, ...]:
    """Each key without LoRA and, where the deployment has adapters, for up to `max_loras` of them."""
    if not settings.max_loras:
        return tuple(keys)
    return tuple(attrs.evolve(key, lora_case=case) for key in keys for case in (0, settings.max_loras))


def smaller(sizes: Sequence[int], largest: int) -> tuple[int, ...]:
    """The sizes up to `largest`."""
    return tuple(size for size in sizes if size <= largest)


class Rule(Protocol):
    """A policy that is one rule over captured graphs."""

    def bind(self, graphs: Graphs) -> Choose: ...


class Ranks(Protocol):
    """How ranks agree on a rule's decision; see `CompiledPolicy`."""

    def vote(self, numbers: BatchNumbers) -> tuple[int, ...]: ...

    def agree(self, reduced: Sequence[int], numbers: BatchNumbers) -> Decision: ...


def decide_by_rule(rule: Rule, shape: BatchShape, context: PolicyContext) -> Decision:
    """The readable path: the rule over a scan of the ladder."""
    return rule.bind(Graphs(context, prepared=False))(shape.numbers)


def agreed_decision(graphs: Graphs, found: Decision | Reason, agreed: BatchNumbers, alone: Decision | None) -> Decision:
    """What the ranks agreed on, with the reason as this rank sees it.

    Args:
        graphs: the captured graphs.
        found: the agreed decision, or why it is eager.
        agreed: the agreed counts; whether eager is allowed is read.
        alone: what this rank would have done alone; None on an idle rank.

    Raises:
        NoLegalModeError: eager is all that is left, and a rank forbids it.
    """
    if isinstance(found, Reason):
        own = alone is not None and alone.mode is Mode.EAGER
        return graphs.eager(alone.reason if alone is not None and own else found, agreed)
    if alone is None:
        return attrs.evolve(found, reason=Reason.RANKS_AGREED)
    return found if alone.mode is found.mode else attrs.evolve(found, reason=Reason.RANK_NEEDS_LESS)


class CompiledRule:
    """A rule prepared for one context.

    Args:
        rule: the policy.
        context: what it reads.
        join: makes the way ranks agree, from the prepared graphs and the bound rule; by default the largest batch
            of every count decides (see `kpolicy.policies.ranks`).
    """

    def __init__(
        self, rule: Rule, context: PolicyContext, join: Callable[[Graphs, Choose], Ranks] | None = None
    ) -> None:
        graphs = Graphs(context, prepared=True)
        choose = rule.bind(graphs)
        self.select: Callable[..., Decision] = _with_uniform_table(choose, graphs)
        self._ranks = None if join is None else join(graphs, choose)

    def vote(self, numbers: BatchNumbers) -> tuple[int, ...]:
        return ranks.vote(numbers) if self._ranks is None else self._ranks.vote(numbers)

    def agree(self, reduced: Sequence[int], numbers: BatchNumbers) -> Decision:
        if self._ranks is None:
            return ranks.agree(self.select, reduced, numbers)
        return self._ranks.agree(reduced, numbers)


# Where `select` finds the fields behind its named ones.
_NAMED = BatchNumbers._fields.index("num_prefills") + 1
_REST = len(BatchNumbers._fields) - _NAMED
_LORAS, _FORBIDDEN, _FACTS = (
    BatchNumbers._fields.index(name) - _NAMED for name in ("num_active_loras", "forbidden", "facts")
)


_MOST_TABLED = 1024
"""Decode tokens up to which batches are in the table, captured or not."""


def _with_uniform_table(choose: Choose, graphs: Graphs) -> Callable[..., Decision]:
    """The bound rule, with the decisions of uniform decode batches in a table: of captured size, and some way above.

    Of such a batch a rule may read the rows, the adapters, the forbidden modes and the facts, and nothing else.
    """
    settings = graphs.settings
    most = max((key.num_tokens for key in graphs.context.ladder.keys), default=0)
    most = min(max(most, _MOST_TABLED), settings.max_num_tokens)
    uniform = {
        q: [choose(BatchNumbers(n, q)) for n in range(min(most // q, settings.max_num_reqs) + 1)]
        for q in settings.decode_query_lens
    }

    def select(
        num_decodes: int,
        query_len: int = 1,
        decode_kv_tokens: int = 0,
        num_decode_tokens: int = -1,
        num_prefills: int = 0,
        *rest: Any,
    ) -> Decision:
        # A whole row of numbers is a plain uniform decode too where it has no adapter, no forbidden mode and no fact.
        if num_prefills == 0 and (
            not rest or (len(rest) == _REST and rest[_LORAS] == rest[_FORBIDDEN] == 0 and not rest[_FACTS])
        ):
            decisions = uniform.get(query_len)
            if decisions is not None and num_decodes < len(decisions):
                return decisions[num_decodes]
        return choose(BatchNumbers(num_decodes, query_len, decode_kv_tokens, num_decode_tokens, num_prefills, *rest))

    return select
