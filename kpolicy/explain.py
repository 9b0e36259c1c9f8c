"""`explain`: every way to run a batch, what each would cost, and why it lost."""

from __future__ import annotations

from typing import Any

import attrs

from kpolicy.costs import Cost
from kpolicy.decision import Decision
from kpolicy.kv_span import NOT_RECORDED
from kpolicy.modes import Mode, Rows, SplitForm
from kpolicy.policies.auto import SPLIT_MARGIN, cheapest, clear_us, deciding, in_tail, near_tie
from kpolicy.policies.base import (
    Policy,
    PolicyContext,
    Way,
    full_keys,
    legal_ways,
    miss_full,
    miss_piecewise,
)
from kpolicy.policies.fixed import smallest
from kpolicy.shapes import BatchNumbers, BatchShape

__all__ = ["COLUMNS", "Considered", "Explanation", "explain"]


COLUMNS = ("way", "launches", "step ms", "gap ms", "bound", "verdict")


@attrs.frozen
class Considered:
    """One way to run the batch.

    Args:
        label: the mode, with the form of a split.
        launches: what would be launched, in words; empty where the mode isn't legal.
        cost: what it would take; None where it isn't legal.
        verdict: ``chosen``, or why it lost.
    """

    label: str
    launches: str
    cost: Cost | None
    verdict: str
    chosen: bool = False


@attrs.frozen
class Explanation:
    """A decision beside everything that it was chosen from. Prints as text, shows as a table in notebooks."""

    shape: BatchShape
    policy: str
    decision: Decision
    considered: tuple[Considered, ...]
    costs: str

    def as_dict(self) -> dict[str, Any]:
        """The explanation as plain JSON values; times in microseconds."""
        return {
            "shape": str(self.shape),
            "policy": self.policy,
            "decision": self.decision.as_dict(self.shape.numbers),
            "costs": self.costs,
            "considered": [
                {
                    "way": each.label,
                    "launches": each.launches or None,
                    "step_us": each.cost and round(each.cost.step_us, 1),
                    "gap_us": each.cost and round(each.cost.gap_us, 1),
                    "bound_by": each.cost and each.cost.bound_by,
                    "verdict": each.verdict,
                }
                for each in self.considered
            ],
        }

    def rows(self) -> list[tuple[str, str, str, str, str, str]]:
        """The table's rows: way, launches, step in ms, gap in ms, bound by, verdict."""
        return [
            (
                each.label,
                each.launches,
                "" if each.cost is None else f"{each.cost.step_us / 1e3:.2f}",
                "" if each.cost is None else f"{each.cost.gap_us / 1e3:.2f}",
                "" if each.cost is None else each.cost.bound_by,
                each.verdict,
            )
            for each in self.considered
        ]

    @property
    def head(self) -> tuple[str, str, str]:
        """The lines before the table: what was decided, why, and from which costs."""
        return (
            f"{self.shape}: {self.decision.label} by {self.policy}",
            f"because {self.decision.why}",
            f"costs: {self.costs}",
        )

    def __str__(self) -> str:
        lines = [*self.head, ""]
        table = [COLUMNS, *self.rows()]
        widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
        for row in table:
            cells = (
                cell.rjust(width) if i in (2, 3) else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            lines.append("  ".join(cells).rstrip())
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        from html import escape

        head = "".join(f"<th>{name}</th>" for name in COLUMNS)
        body = ""
        for each, row in zip(self.considered, self.rows(), strict=True):
            cells = "".join(f"<td>{escape(cell)}</td>" for cell in row)
            body += f"<tr style='font-weight:bold'>{cells}</tr>" if each.chosen else f"<tr>{cells}</tr>"
        return (
            f"<p><b>{escape(self.decision.label)}</b> for {escape(str(self.shape))}, by {escape(self.policy)}: "
            f"{escape(self.decision.why)}</p><table><tr>{head}</tr>{body}</table><p>costs: {escape(self.costs)}</p>"
        )


def explain(policy: Policy, shape: BatchShape, context: PolicyContext) -> Explanation:
    """Why the policy runs the batch as it does, beside every other legal way and every mode that isn't legal.

    Raises:
        NoLegalModeError: every mode that could run the batch is forbidden.
    """
    context, numbers = deciding(context), shape.numbers
    decision = policy.decide(shape, context)
    ways = legal_ways(numbers, context, smallest)
    if policy.reads_costs:
        # The cheapest captured size of each kind, beside the smallest where they differ.
        best = legal_ways(numbers, context, cheapest(context))
        ways = best + [way for way in ways if way not in best]
    chosen = Way(decision.mode, decision.launches, decision.form)
    # Where its decode steps wait for their place it is the same way, and takes as long.
    at_once = attrs.evolve(chosen, launches=tuple(attrs.evolve(each, wait_share=None) for each in chosen.launches))
    ways = [chosen if way == at_once else way for way in ways]
    if chosen not in ways:
        ways.insert(0, chosen)
    costs = [context.costs.cost(way.launches, numbers) for way in ways]
    mine = costs[ways.index(chosen)]
    # The bound on the prefill rows is of what the policy chooses among.
    forms = getattr(policy, "forms", tuple(SplitForm))
    among = [way is chosen or way.form is None or way.form in forms for way in ways]
    long_gaps = [in_tail(way, cost, numbers) for way, cost in zip(ways, costs, strict=True)]
    clearly_us = clear_us(ways, costs)
    near = [near_tie(way, cost, clearly_us) for way, cost in zip(ways, costs, strict=True)]
    kept = [own and not (long or tie) for own, long, tie in zip(among, long_gaps, near, strict=True)]
    shortest_us = min(cost.cycle_us for cost, keep in zip(costs, kept if any(kept) else among, strict=True) if keep)
    limit_us = context.objective.first_token_limit * shortest_us if numbers.num_prefills else float("inf")
    considered = [
        Considered(
            way.mode.value if way.form is None else f"{way.mode.value}/{way.form.value}",
            "; ".join(str(launch) for launch in way.launches) or "nothing to run",
            cost,
            "chosen" if way == chosen else _lost(policy, cost, mine, limit_us, own, long, tie, numbers, context),
            way == chosen,
        )
        for way, cost, own, long, tie in zip(ways, costs, among, long_gaps, near, strict=True)
    ]
    considered.sort(key=lambda each: (not each.chosen, _score(each, context)))
    considered += _illegal(ways, numbers, context)
    kind = context.costs.source
    if not all(context.costs.spans(way.launches, numbers) for way in ways):
        kind += "; sizes outside the table are extrapolated"
    span = context.costs.kv_span
    if span is not None and not span.holds(numbers):
        kind += f"; attention is extrapolated from {span}"
    elif span is None and context.costs.measured:
        kind += f"; {NOT_RECORDED}"
    return Explanation(shape, policy.name, decision, tuple(considered), f"{context.costs.version} ({kind})")


def _score(each: Considered, context: PolicyContext) -> float:
    return context.costs.score(each.cost, context.objective) if each.cost else 0.0


def _lost(
    policy: Policy, cost: Cost, chosen: Cost, limit_us: float, own: bool, long_gaps: bool, near: bool,
    numbers: BatchNumbers, context: PolicyContext,
) -> str:  # fmt: skip
    score, best = (context.costs.score(each, context.objective) for each in (cost, chosen))
    difference = f"{(score / best - 1) * 100:+.1f}% {_measure(context)}" if best else "no different"
    if not policy.reads_costs:
        return f"the rule doesn't choose it; {difference}"
    if score > best:
        return difference
    if not own and score < best:
        return f"the policy doesn't consider it; {difference}"
    if long_gaps:
        return f"more of the longest gaps, those above {numbers.gap_tail_us:,.0f} us; {difference}"
    if cost.cycle_us > limit_us:
        limit = context.objective.first_token_limit
        beyond = "" if limit == 1 else f"beyond {limit:g}x of the best way for them"
        return f"delays the prefill rows{beyond and ' ' + beyond}; {difference}"
    if near:
        return f"not {SPLIT_MARGIN:.0%} shorter than the best way that doesn't divide the batch; {difference}"
    if score < best:
        return f"the policy doesn't consider it; {difference}"
    return "as cheap, but it comes later in the policy's order"


def _measure(context: PolicyContext) -> str:
    objective = context.objective
    if not objective.gap_weight:
        return "step time"
    return "weighted time" if objective.step_weight else "gap"


def _illegal(ways: list[Way], numbers: BatchNumbers, context: PolicyContext) -> list[Considered]:
    """The modes that couldn't run this batch, with the reason."""
    there = {way.mode for way in ways}
    missing = []
    if Mode.FULL not in there:
        missing.append(("full", miss_full(numbers, context).text))
    if Mode.PIECEWISE not in there:
        missing.append(("piecewise", miss_piecewise(numbers, context).text))
    if Mode.SPLIT not in there:
        missing.append(("split", _no_split(numbers, context)))
    if Mode.EAGER not in there:
        missing.append(("eager", "forbidden for this step"))
    return [Considered(label, "", None, f"not possible: {why}") for label, why in missing]


def _no_split(numbers: BatchNumbers, context: PolicyContext) -> str:
    if not (numbers.num_decodes and numbers.num_prefills):
        return "the batch isn't mixed"
    if numbers.forbidden & (Mode.SPLIT.bit | Mode.FULL.bit):
        return "forbidden for this step"
    if not full_keys(numbers, context.ladder, Rows.DECODE):
        decodes_only = numbers._replace(num_prefills=0, num_prefill_tokens=0, num_tokens=-1, num_reqs=-1)
        return f"decode rows have no FULL graph: {miss_full(decodes_only, context).text}"
    return "the prefill half may not run"
