"""How long vLLM's steps are: fewer prompt tokens beside decodes where the objective weighs the gap between tokens.

vLLM fills a step up to its token limit, and every decode in it waits for the whole. `kpolicy.scheduling.pace` says how
many tokens the next step should have, by the same costs that decide its graph; vLLM's own `schedule` then runs under
that limit. The prompts in line take, by those costs, no longer than by vLLM's own rule in full steps over its own
graphs, less 5%, or the objective's limit on the first token times the best for them, whichever is longer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

from kpolicy.errors import KPolicyError
from kpolicy.ladders import CaptureSizes
from kpolicy.policies import get_policy
from kpolicy.scheduling.line import in_line
from kpolicy.scheduling.pace import OtherSelect, Pace
from kpolicy_vllm.rows import Rows, StepPlanner, queues_of
from kpolicy_vllm.state import LISTED, State, workers_apart

__all__ = ["Pacer", "vllm_s_own", "why_not"]

_FAILED = ("pace_failed", "steps are filled to vLLM's limit")
_OTHERS_STEPS = 8
"""Steps that a rank of prompts only is bounded in, once ranks' last step showed that another decodes"""


def why_not(vllm_config: Any, scheduler: Any = None, *, apart: bool = False) -> str | None:
    """Why steps can't be bounded in this vLLM; None where they can.

    Args:
        vllm_config: vLLM's.
        scheduler: vLLM's, where it is made.
        apart: whether decodes and prompts are given steps of their own (SPLIT).
    """
    if apart:
        return "split is on, so decodes and prompts have steps of their own, and the bound is on those of both"
    if workers_apart(vllm_config):
        return "the workers are processes of their own, and costs are measured there; it needs the in-process executor"
    if not getattr(vllm_config.scheduler_config, "enable_chunked_prefill", True):
        return "prompts aren't chunked, and one that is longer than the bound would wait"
    if getattr(vllm_config.scheduler_config, "long_prefill_token_threshold", 0):
        return "with long_prefill_token_threshold decodes run behind prompts, and a bounded step may have no room left"
    if getattr(scheduler, "need_mamba_block_aligned_split", False):
        return "chunks of this model end at blocks, which may be longer than the bound"
    return None


class Pacer(StepPlanner):
    """The bound on a scheduler's steps. Args as of `StepPlanner`."""

    def __init__(self, scheduler: Any, state: State) -> None:
        super().__init__(scheduler, state)
        self._rule: Pace | None = None
        self._other: OtherSelect | None = None
        self._by: tuple[Any, Any, int] = (None, None, 0)
        """Costs, policy and limit of that"""
        self._for_others = 0
        self._rows = Rows(scheduler)
        self._whole = False
        """Whether the next step is vLLM's own, as no prompt came in under the bound"""

    def schedule(self, run: Callable[[], Any]) -> Any:
        """One step under the bound that costs give it.

        Args:
            run: the step as it is scheduled otherwise.
        """
        if self._off:
            return run()
        scheduler, found = self._scheduler, None
        try:
            found = self._bound()
        except Exception as error:  # noqa: BLE001 - nothing was changed yet, and vLLM schedules on
            self._end(*_FAILED, error)
        if found is None:
            output = run()
        else:
            limit = scheduler.max_num_scheduled_tokens
            scheduler.max_num_scheduled_tokens = found
            try:
                output = run()
            finally:
                scheduler.max_num_scheduled_tokens = limit
            self._state.counters.add("paced_steps")
            decodes, q = self._rows.decodes, self._state.settings.query_len
            if output.total_num_scheduled_tokens <= decodes * q and len(output.num_scheduled_tokens) <= decodes:
                # Tokens alone don't tell, as decodes may have fewer drafts than they could.
                # A prompt that can't be cut so short, such as one with an image in it, mustn't wait for ever.
                self._whole = True
                self._state.counters.add("pace_no_prompt_came_in")
        try:
            self._rows.ran(output)
        except Exception as error:  # noqa: BLE001 - the step is scheduled, and vLLM runs it
            self._end(*_FAILED, error)
        return output

    def _bound(self) -> int | None:
        """Most tokens of the step; None for vLLM's own limit."""
        scheduler, state, rows = self._scheduler, self._state, self._rows
        if self._whole:
            self._whole = False
            return None
        if state.costs is None or state.select is None or int(scheduler._pause_state):
            return None
        rows.refresh()
        prompts, decodes = rows.prompts, rows.decodes
        waiting = rows.waiting
        if not prompts and not (waiting and len(scheduler.running) < scheduler.max_num_running_reqs):
            return None
        if not decodes and not self._others_decode():
            return None
        if prompts and rows.behind_a_prompt:
            # A prompt before decodes would fill a bounded step alone, again and again, until it is done.
            state.counters.add("pace_decodes_behind_a_prompt")
            return None
        limit = scheduler.max_num_scheduled_tokens
        pace = self._pace(limit)
        # Decodes of other ranks wait for this one's step too.
        beside, total = max(decodes, 1), len(prompts) + waiting
        # A preempted request comes again with another prompt.
        first = (rows.first.request_id, rows.first.num_preemptions)
        most = pace.held(first, beside, total)
        if most is None:
            most = self._asked(pace, first, beside, total)
        return most if most < limit else None

    def _asked(self, pace: Pace, first: object, beside: int, total: int) -> int:
        """What the rule says of the line as it is now.

        Args:
            pace: the rule.
            first: whoever is first in line.
            beside: decode rows that wait for the step.
            total: prompts in line.
        """
        scheduler, rows = self._scheduler, self._rows
        rows.look()
        begun = ((until - request.num_computed_tokens, request.num_computed_tokens) for request, until in rows.prompts)
        queued = ((request.num_tokens - request.num_computed_tokens, request.num_computed_tokens)
                  for queue in queues_of(scheduler) for request in queue)  # fmt: skip
        decode_tokens = rows.decodes * self._state.settings.query_len
        line = in_line(
            itertools.chain(begun, queued),
            total,
            scheduler.max_num_scheduled_tokens - decode_tokens,
            scheduler.max_num_running_reqs - rows.decodes,
            round(rows.kv) + decode_tokens,
        )
        return pace.next_step(first, beside, line)

    def _others_decode(self) -> bool:
        """Whether this rank, which has no decodes, is to bound its steps for those of other ranks.

        What ranks agreed on tells of others only where this one ran no prompts, so that is held for some steps.
        """
        if self._ranks == 1:
            return False
        if self._state.others_decode():
            self._for_others = _OTHERS_STEPS
        elif self._for_others:
            self._for_others -= 1
        return self._for_others > 0

    def _pace(self, limit: int) -> Pace:
        """The rule for the graphs, the costs and the limit of now."""
        state, pace = self._state, self._rule
        costs, select, most = self._by
        if pace is None or costs is not state.costs or select is not state.select or most != limit:
            assert state.select is not None  # noqa: S101 - whoever asks looked
            context = state.context(lora=False)
            other = None
            try:
                if self._other is None:
                    self._other = OtherSelect(*vllm_s_own(self._scheduler.vllm_config, state))
                other = self._other.by(context)
            except KPolicyError as error:
                state.counters.warn_once("not_compared", f"steps are bounded without vLLM's own rule beside: {error}")
            made = Pace(context, state.select, other, limit=limit)
            if pace is not None and most == limit:
                made.go_on_from(pace)
            pace = self._rule = made
            self._by = (state.costs, state.select, limit)
        return pace


def vllm_s_own(vllm_config: Any, state: State) -> tuple[Any, CaptureSizes | None]:
    """The replica of this vLLM's own rule, and the sizes that the user gave it; None for its default ones.

    Raises:
        ConfigError: there is no replica of this release.
    """
    runner = "v2" if hasattr(state.runner, "cudagraph_manager") else "v1"
    policy = get_policy(f"vllm:version={'.'.join(state.vllm_version.split('.')[:2])},runner={runner}")
    additional = vllm_config.additional_config
    listed = additional.get(LISTED) if isinstance(additional, Mapping) else None
    if not listed:
        return policy, None
    q, reqs = state.settings.query_len, state.settings.max_num_reqs
    return policy, CaptureSizes([n for n in listed if n % q == 0 and n <= q * reqs], listed, listed)
