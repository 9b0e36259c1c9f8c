"""Whether decodes and prompt chunks run in steps of their own: the cost of both ways, from the policy's own table.

A mixed step costs what the policy's best way for the whole batch costs. Apart, they cost a decode-only step and a
prompt-only step, each as the policy would run it, one engine step more, and on vLLM's first runner what it takes rows
to join its batch again. Several decode-only steps between two with prompts shorten the gap between tokens, and make
prompts wait; how long is bounded.

Costs are looked up by counts and kept: attention on the real KV is the same work either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kpolicy.costs import CostTable
from kpolicy.scheduling.pace import mixed_numbers
from kpolicy.shapes import BatchNumbers
from kpolicy_vllm.state import State
from kpolicy_vllm.timing import NOISE

__all__ = ["Apart", "SplitRule"]

_MOST_KEPT = 4096
_REFERENCE_DECODES = 32
_EXACT, _ROUND = 512, 64
"""Above so many, prompt tokens are looked up by multiples of the other."""


class Apart(NamedTuple):
    """What a mixed step and the two apart would take, in microseconds."""

    whole: float
    decode: float
    prompt: float
    more: float
    """What running them apart costs besides: rows that join the batch again"""
    once: float = float("inf")
    """Both, as two forwards of one step"""


def _shorter(apart: Apart) -> bool:
    """Whether two forwards of a step take less than one, by more than costs are off: they're twice the host's work."""
    return apart.once < apart.whole * (1 - NOISE)


class SplitRule:
    """How many decode-only steps go before a step with prompts; 0 runs both in one.

    Args:
        state: the integration's: its compiled policy, costs, objective and settings.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._kept: dict[tuple[int, int, int], Apart] = {}
        self._by: tuple[CostTable, Any] | None = None

    def steps(self, num_decodes: int, prompts: Sequence[int], waited_us: float = 0.0) -> int:
        """Decode-only steps before the next step with prompts.

        Args:
            num_decodes: decode rows.
            prompts: tokens of each chunk that the step would have.
            waited_us: how long the prompt that waits longest has waited.
        """
        apart = self.apart(num_decodes, len(prompts), sum(prompts))
        return 0 if apart is None else self.best(apart, waited_us)

    def best(self, apart: Apart, waited_us: float = 0.0) -> int:
        """The number of decode-only steps of least score, within the bound on the first token; 0 for a mixed step."""
        config, objective = self._state.config, self._state.objective
        whole, decode, prompt, more, once = apart
        if self._state.two_forwards and _shorter(apart):
            whole = once
        bound = objective.first_token_limit * min(whole, decode + prompt + more)
        if config.first_token_ms is not None:
            bound = max(bound, 1e3 * config.first_token_ms - waited_us)
        step, gap = objective.step_weight, objective.gap_weight
        scores = [((step + gap) * whole, 0)]
        for count in range(1, config.split_decodes + 1):
            cycle = count * decode + prompt + more
            if cycle <= bound:
                scores.append((step * (decode + prompt + more) + gap * cycle / count, count))
        return min(scores)[1]

    def apart(self, num_decodes: int, num_prompts: int, prompt_tokens: int) -> Apart | None:
        """What both ways take; None while there are no costs."""
        state = self._state
        costs, select = state.costs, state.select
        if costs is None or select is None or not num_decodes or not prompt_tokens:
            return None
        if self._by is None or self._by[0] is not costs or self._by[1] is not select:
            self._by = (costs, select)
            self._kept.clear()
        tokens = prompt_tokens
        if tokens > _EXACT:
            most = state.settings.max_num_tokens - num_decodes
            tokens = max(tokens, min(-(-tokens // _ROUND) * _ROUND, most))
        key = (num_decodes, num_prompts, tokens)
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            q = state.settings.query_len

            def cycle(numbers: BatchNumbers) -> float:
                return costs.cost(select(*numbers).launches, numbers).cycle_us

            decode = cycle(mixed_numbers(num_decodes, 0, 0, q))
            prompt = cycle(mixed_numbers(0, num_prompts, tokens, q))
            found = self._kept[key] = Apart(
                cycle(mixed_numbers(num_decodes, num_prompts, tokens, q)), decode, prompt,
                state.rejoin_us * num_decodes, decode + prompt - costs.step_us,
            )  # fmt: skip
        return found

    def two_forwards(self, num_decodes: int, num_prompts: int, prompt_tokens: int) -> bool:
        """Whether a step of such rows takes less as two forwards, of decodes and of prompts."""
        apart = self.apart(num_decodes, num_prompts, prompt_tokens)
        return apart is not None and _shorter(apart)

    def alternates(self) -> bool:
        """Whether data-parallel ranks alternate: what each finds alone, from costs and limits that all share."""
        settings = self._state.settings
        decodes = max(1, min(_REFERENCE_DECODES, settings.max_num_reqs - 1))
        tokens = max(1, settings.max_num_tokens - decodes)
        apart = self.apart(decodes, 1, tokens)
        return apart is not None and self.best(apart) > 0
