"""vLLM's rule for data-parallel ranks: all run the least mode that any of them chose, at the size of the largest.

Each rank decides alone, and votes its tokens and how far its mode is from FULL. The agreed mode is looked up again at
the most tokens; where that size has no graph of the mode, all ranks run eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from kpolicy.decision import Decision
from kpolicy.modes import Mode
from kpolicy.policies.graphs import Graphs
from kpolicy.policies.rule import Choose, agreed_decision
from kpolicy.reasons import Reason
from kpolicy.shapes import BatchNumbers

__all__ = ["MinRanks"]

_ORDER = (Mode.FULL, Mode.PIECEWISE, Mode.EAGER)
_EAGER = Mode.EAGER.bit


@attrs.frozen
class MinRanks:
    """Ranks that run the least of their modes.

    Args:
        graphs: the captured graphs.
        choose: what a rank would do alone.
        take: the graph of FULL or PIECEWISE for that many tokens, read from agreed counts only.
    """

    graphs: Graphs
    choose: Choose
    take: Callable[[Mode, int, BatchNumbers], Decision | Reason]

    def vote(self, numbers: BatchNumbers) -> tuple[int, ...]:
        return (
            numbers.total_tokens,
            _ORDER.index(self._alone(numbers).mode) if numbers.total_tokens else 0,
            numbers.num_active_loras,
            int(bool(numbers.forbidden & _EAGER)),
        )

    def agree(self, reduced: Sequence[int], numbers: BatchNumbers) -> Decision:
        tokens, order, loras, no_eager = reduced
        agreed = BatchNumbers(0, num_active_loras=loras, forbidden=_EAGER * no_eager)
        if not tokens:
            return self.graphs.eager(Reason.EMPTY_BATCH, agreed)
        mode = _ORDER[order]
        found = Reason.RANK_NEEDS_EAGER if mode is Mode.EAGER else self.take(mode, tokens, agreed)
        return agreed_decision(self.graphs, found, agreed, self._alone(numbers) if numbers.total_tokens else None)

    def _alone(self, numbers: BatchNumbers) -> Decision:
        """What the rank would do alone, were eager allowed: whether it is, is agreed."""
        return self.choose(numbers._replace(forbidden=numbers.forbidden & ~_EAGER))
