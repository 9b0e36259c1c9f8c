"""`auto`: the cheapest legal way to run each batch, by the cost table and the objective."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import attrs

from kpolicy.attention.support import Claims
from kpolicy.costs import Cost
from kpolicy.decision import Decision
from kpolicy.errors import ConfigError, UnknownNameError
from kpolicy.keys import GraphKey
from kpolicy.ladders import CaptureSizes, plan_keys
from kpolicy.modes import Mode, SplitForm, parse_form
from kpolicy.policies.base import (
    Downgrade,
    Pick,
    PolicyContext,
    Way,
    eager_reason,
    graph_reason,
    legal_ways,
    miss_full,
    miss_piecewise,
    no_legal_mode,
)
from kpolicy.reasons import Reason
from kpolicy.settings import Settings
from kpolicy.shapes import BatchNumbers, BatchShape

if TYPE_CHECKING:
    from kpolicy.policies.auto_tables import AutoTables

__all__ = [
    "CLEARLY",
    "SPLIT_MARGIN",
    "AutoPolicy",
    "cheapest",
    "choose",
    "clear_us",
    "deciding",
    "in_tail",
    "near_tie",
    "rate",
    "spread",
    "wait_of",
]

SPLIT_MARGIN = 0.02
"""Share of the cycle by which a SPLIT of one decode step must be shorter than every way that doesn't divide the batch

Tables aren't that exact. On an H200, with Llama-3.1-8B, such splits that were expected to win by 0.04 to 0.9% took 1.5
to 3.0% longer, with no shorter gap (docs/measured_gpu.md, regret); margins of 1, 2 and 5% mend the same picks there.
"""
CLEARLY = 1 - SPLIT_MARGIN
"""Of the best whole way's cycle, what a SPLIT of one decode step must take less than"""

NO_FORMS = "none"
"""No form, as text"""


def _forms(forms: Iterable[SplitForm | str] | str) -> tuple[SplitForm, ...]:
    if isinstance(forms, str):
        names = forms.split("+")
        if any(name.strip().lower() == NO_FORMS for name in names) and forms != NO_FORMS:
            raise ConfigError(
                f"forms of split are {forms!r}; write {NO_FORMS} in small letters and alone for no SPLIT, or leave it "
                f"out and join {', '.join(form.value for form in SplitForm)} by +."
            )
        forms = () if forms == NO_FORMS else names
    try:
        return tuple(parse_form(form) for form in forms)
    except UnknownNameError as error:
        hint = f"Join several by +; {NO_FORMS} stands alone, and no batch is divided."
        raise UnknownNameError(error.kind, error.name, (*error.allowed, NO_FORMS), hint) from None


@attrs.frozen
class AutoPolicy:
    """Scores every legal way on `step_us` and `gap_us` and takes the lowest; on ties the mode with fewer launches.

    Among captured sizes that hold the rows it takes the cheapest, which needn't be the next: measured times aren't
    monotone in size. Three kinds of ways are left out:

    - a SPLIT of one decode step that isn't shorter by `SPLIT_MARGIN` than every legal way that doesn't divide the
      batch;
    - several decode steps beside a prompt where each takes longer than one gap in a hundred did so far, if that is
      known (`kpolicy.shapes.GAP_TAIL_US`);
    - what delays the prefill rows by more than the objective's `first_token_limit` over the best of the rest for them.

    Args:
        forms: the forms of SPLIT that are considered, in the order of `SplitForm`; as text joined by ``+``, or
            ``none`` for no SPLIT.
    """

    forms: tuple[SplitForm, ...] = attrs.field(default=tuple(SplitForm), converter=_forms)

    name = "auto"
    summary = "the cheapest legal way for each batch, by measured or analytic costs"
    reads_costs = True

    def sizes(self, settings: Settings) -> CaptureSizes:
        return CaptureSizes.default(settings)

    def plan(self, sizes: CaptureSizes, claims: Claims, settings: Settings) -> tuple[GraphKey, ...]:
        return plan_keys(sizes, claims, settings)

    def resolve(self, claims: Claims, settings: Settings) -> tuple[Downgrade, ...]:  # noqa: ARG002 - the protocol's
        # It promises no mode but the cheapest legal one, so nothing is taken back; `AttentionSupport.limits` says more.
        return ()

    def decide(self, shape: BatchShape, context: PolicyContext) -> Decision:
        context, numbers = deciding(context), shape.numbers
        ways = legal_ways(numbers, context, cheapest(context), forms=self.forms)
        way, reason = choose(numbers, ways, context)
        wait = wait_of(way, numbers, context)
        return spread(way, wait).decided(reason, context, costs=True)

    def compile(self, context: PolicyContext) -> AutoTables:
        from kpolicy.policies.auto_tables import AutoTables

        return AutoTables(self.forms, deciding(context))


def deciding(context: PolicyContext) -> PolicyContext:
    """The context with the costs that decisions are made by, where the smaller of sizes alike has the preference."""
    costs = context.costs.deciding
    return context if costs is context.costs else attrs.evolve(context, costs=costs)


def wait_of(way: Way, numbers: BatchNumbers, context: PolicyContext) -> float | None:
    """`Launch.wait_share` of a way's decode steps; None where no prompt runs beside them, or the executor can't."""
    launches, costs = way.launches, context.costs
    if len(launches) != 2 or launches[0].stream == launches[1].stream or not context.spreads:
        return None
    first, cycle_us = launches[0], costs.cost(launches, numbers).cycle_us
    overlap = costs.overlap_of(numbers.num_decodes)
    return costs.wait_share(*costs.launch_us(first, numbers), overlap, cycle_us, first.repeat)


def spread(way: Way, wait: float | None) -> Way:
    """The way with its decode steps evenly over the time of the prompt that they run beside, where `wait` is given.

    Done at once they are over long before a long prompt is, and their rows wait for the rest of it, and for the whole
    of the next step where that is one graph: longer gaps than without a split (docs/measured_sglang.md, in simulation).
    """
    if wait is None:
        return way
    first, second = way.launches
    return attrs.evolve(way, launches=(attrs.evolve(first, wait_share=wait), second))


def rate(context: PolicyContext) -> Callable[[GraphKey, int], float]:
    """Dense device time of a key that replays so many tokens, what padding takes included.

    All that differs between sizes of one kind, but where padding takes something: then a full graph spares the host it.
    """
    curve_for, padding_of = context.costs.curve_for, context.costs.padding_of
    return lambda key, num_tokens: curve_for(key).at(key.num_tokens) + padding_of(key, num_tokens)


def cheapest(context: PolicyContext) -> Pick:
    """The cheapest captured size; the smaller on ties.

    Where a size with padding is quicker on the device than the exact one, and padding takes something, both: where the
    host bounds the step, it is the exact one that takes less.
    """
    rated, padding_of = rate(context), context.costs.padding_of

    def pick(keys: Sequence[GraphKey], num_tokens: int) -> Sequence[GraphKey]:
        best = min(keys, key=lambda key: rated(key, num_tokens))
        if padding_of(best, num_tokens):
            exact = [key for key in keys if key.num_tokens == num_tokens]
            if exact:
                return exact[0], best
        return (best,)

    return pick


def cheapest_of_unlike(context: PolicyContext) -> Pick:
    """`cheapest` for ranks that have unlike many tokens: also what it would be if padding took nothing more.

    Whatever the size, those with fewer tokens have padding in it.
    """
    alone, curve_for = cheapest(context), context.costs.curve_for

    def pick(keys: Sequence[GraphKey], num_tokens: int) -> Sequence[GraphKey]:
        found = alone(keys, num_tokens)
        best = min(keys, key=lambda key: curve_for(key).at(key.num_tokens))
        return found if best in found else (*found, best)

    return pick


def choose(
    numbers: BatchNumbers, ways: Sequence[Way], context: PolicyContext, cost: Callable[[Way], Cost] | None = None
) -> tuple[Way, Reason]:
    """The way of least score, and why.

    Args:
        numbers: the batch.
        ways: the legal ways to run it.
        context: what the policy reads.
        cost: what a way takes; on these rows by default.
    """
    if not ways:
        raise no_legal_mode(numbers)
    if not numbers.total_tokens:
        return ways[0], Reason.EMPTY_BATCH
    if len(ways) == 1:
        if ways[0].mode is Mode.EAGER:
            return ways[0], _miss(numbers, context)
        return ways[0], Reason.ONLY_LEGAL
    costs = [context.costs.cost(way.launches, numbers) if cost is None else cost(way) for way in ways]
    return _least(ways, costs, numbers, context)


def _least(
    ways: Sequence[Way], costs: Sequence[Cost], numbers: BatchNumbers, context: PolicyContext
) -> tuple[Way, Reason]:
    """The lowest score; the shorter cycle where scores are equal, then the earlier way."""
    objective, limit_us = context.objective, clear_us(ways, costs)
    considered = [
        i
        for i, cost in enumerate(costs)
        if not in_tail(ways[i], cost, numbers) and not near_tie(ways[i], cost, limit_us)
    ] or range(len(ways))
    shortest_us = min(costs[i].cycle_us for i in considered)
    limit = objective.first_token_limit * shortest_us if numbers.num_prefills else float("inf")
    ranked = [
        (context.costs.score(costs[i], objective), costs[i].cycle_us, i)
        for i in considered
        if costs[i].cycle_us <= limit
    ]
    best = ways[min(ranked)[2]]
    if best.mode is Mode.EAGER:
        return best, eager_reason(context)
    return best, graph_reason(context)


def clear_us(ways: Sequence[Way], costs: Sequence[Cost]) -> float:
    """What a SPLIT of one decode step must take less than; infinite where every way divides the batch."""
    wholes = (cost.cycle_us for way, cost in zip(ways, costs, strict=True) if way.mode is not Mode.SPLIT)
    return CLEARLY * min(wholes, default=float("inf"))


def near_tie(way: Way, cost: Cost, limit_us: float) -> bool:
    """Whether it is a SPLIT of one decode step that isn't shorter by the margin; `limit_us` is `clear_us`."""
    return way.mode is Mode.SPLIT and way.launches[0].repeat == 1 and cost.cycle_us >= limit_us


def in_tail(way: Way, cost: Cost, numbers: BatchNumbers) -> bool:
    """Whether several decode steps would each be among the longest gaps: one step has one of them, and not several."""
    return cost.gap_us > numbers.gap_tail_us and bool(way.launches) and way.launches[0].repeat > 1


def _miss(numbers: BatchNumbers, context: PolicyContext) -> Reason:
    """Why nothing but eager was legal: what PIECEWISE lacks where it could have been captured, else what FULL does."""
    if context.claims.piecewise and (context.ladder.piecewise or not context.claims.full.uniform_query_len):
        return miss_piecewise(numbers, context)
    return miss_full(numbers, context)
