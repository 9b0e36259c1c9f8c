"""`Outside`: how many of a simulated run's steps its cost table wasn't made for."""

from __future__ import annotations

import attrs

from kpolicy.costs import CostTable
from kpolicy.executors.base import StepInputs, StepOutputs
from kpolicy.scheduling.batching import Batcher
from kpolicy.trace_run import OnStep, RunResult

__all__ = ["Outside"]


class Outside:
    """Counts them as `kpolicy simulate` does: told each step, it hands the step on.

    Args:
        costs: what the steps are priced by.
        then: who is told each step besides.
    """

    def __init__(self, costs: CostTable, then: OnStep | None = None) -> None:
        self._costs = costs
        self._then = then
        self._steps = self._sizes = self._contexts = 0

    def __call__(
        self, index: int, inputs: StepInputs, outputs: StepOutputs, batcher: Batcher, start_us: float
    ) -> None:  # fmt: skip
        numbers, span = inputs.numbers, self._costs.kv_span
        size = not self._costs.spans(outputs.decision.launches, numbers)
        context = span is not None and not span.holds(numbers, max(inputs.kv_lens[: numbers.num_decodes], default=0))
        self._steps += size or context
        self._sizes += size
        self._contexts += context
        if self._then is not None:
            self._then(index, inputs, outputs, batcher, start_us)

    def told(self, result: RunResult) -> RunResult:
        """The result with what was counted."""
        blind = self._costs.measured and self._costs.kv_span is None
        return attrs.evolve(
            result, outside=self._steps, outside_sizes=self._sizes, outside_contexts=None if blind else self._contexts
        )
