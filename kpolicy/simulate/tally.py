"""What steps of each prepared decision took: prepared costs, and sums that come out the same by every loop."""

from __future__ import annotations

from collections.abc import Iterator

from kpolicy.costs import CostTable, Curve
from kpolicy.decision import Decision, Launch
from kpolicy.modes import Rows
from kpolicy.shapes import BatchNumbers

__all__ = ["Tallies", "Tally"]


class Tally:
    """The sums of one decision."""

    __slots__ = (
        "_eager",
        "_outside",
        "decision",
        "decode_steps",
        "host_bound",
        "host_us",
        "outside",
        "outside_contexts",
        "outside_sizes",
        "padded",
        "padding",
        "rank_steps",
        "steps",
        "tokens",
        "us",
        "whole",
    )  # fmt: skip

    def __init__(self, decision: Decision, costs: CostTable) -> None:
        self.decision = decision
        self.decode_steps = decision.decode_steps
        self.steps = 0
        """Steps, and below them those of every rank"""
        self.rank_steps = 0
        self.tokens = self.padding = 0
        self.us = 0.0
        self.host_bound = 0
        """Steps that the host's launches bound, and what those took"""
        self.host_us = 0.0
        self.outside = 0
        """Steps that the cost table doesn't span, and below them those of such a size, and of such a context"""
        self.outside_sizes = self.outside_contexts = 0
        self.padded = 0
        self._outside = False
        self._eager: Curve | None = None
        launches = decision.launches
        self.whole = len(launches) == 1 and launches[0].rows is Rows.ALL and launches[0].repeat == 1
        """Whether the step is one launch over all rows, so that its cost is worked out here."""
        if not self.whole:
            return
        launch = launches[0]
        self.padded = _size(launch) or 0
        if self.padded:
            self._outside = not costs.curve_of(launch).spans(self.padded)
        else:
            self._eager = costs.eager

    def outside_for(self, num_tokens: int) -> bool:
        """Whether a step of one launch over so many tokens is of a size that the cost table doesn't span."""
        return self._outside if self._eager is None else not self._eager.spans(num_tokens)

    def add_outside(self, steps: int, *, sizes: bool, contexts: int) -> None:
        """Count what of so many steps the cost table doesn't span.

        Args:
            steps: the steps.
            sizes: whether it doesn't span their size.
            contexts: those whose contexts it doesn't span.
        """
        self.outside += steps if sizes else contexts
        self.outside_sizes += steps * sizes
        self.outside_contexts += contexts


class Tallies:
    """Every decision's tally.

    Prepared decisions come again and again as the same object, which a look-up by identity finds; equal ones that
    were made anew, as those of ranks are, share a tally all the same.
    """

    def __init__(self, costs: CostTable) -> None:
        self.costs = costs
        self._by_identity: dict[int, Tally] = {}
        self._by_value: dict[Decision, Tally] = {}

    def of(self, decision: Decision) -> Tally:
        """The decision's tally."""
        tally = self._by_identity.get(id(decision))
        if tally is not None and tally.decision is decision:
            return tally
        tally = self._by_value.get(decision)
        if tally is None:
            tally = self._by_value[decision] = self._by_identity[id(decision)] = Tally(decision, self.costs)
        return tally

    def add(self, tally: Tally, us: float, *, host_bound: bool) -> None:
        """Count a step and its time; the tokens of each rank, and what the table doesn't span, are counted apart."""
        tally.steps += 1
        tally.us += us
        if host_bound:
            tally.host_bound += 1
            tally.host_us += us

    def count(self, tally: Tally, numbers: BatchNumbers) -> None:
        """Count one rank's tokens and padding."""
        tally.rank_steps += 1
        if tally.whole:
            tokens = numbers.total_tokens
            tally.tokens += tokens
            if tally.padded:
                tally.padding += tally.padded - tokens
            return
        for launch in tally.decision.launches:
            tokens = launch.num_tokens(numbers) * launch.repeat
            tally.tokens += tokens
            size = _size(launch)
            if size is not None:
                tally.padding += size * launch.repeat - tokens

    def size_outside(self, tally: Tally, numbers: BatchNumbers) -> bool:
        """Whether a rank's step has a size that the table's curves don't span."""
        if tally.whole:
            tokens = numbers.total_tokens
            return tokens > 0 and tally.outside_for(tokens)
        return not self.costs.spans(tally.decision.launches, numbers)

    def __iter__(self) -> Iterator[Tally]:
        return iter(self._by_value.values())


def _size(launch: Launch) -> int | None:
    return launch.padded_tokens if launch.key is None else launch.key.num_tokens
