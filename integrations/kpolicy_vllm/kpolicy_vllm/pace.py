"""How long vLLM's steps are: fewer prompt tokens beside decodes where the objective weighs the gap between tokens.

vLLM fills a step up to its token limit, and every decode in it waits for the whole. `kpolicy.scheduling.pace` says how
many tokens the next step should have, by the same costs that decide its graph; vLLM's own `schedule` then runs under
that limit. The prompts in line take, by those costs, no longer than by vLLM's own rule in full steps over its own
graphs, less 5%, or the objective's limit on the first token times the best for them, whichever is longer.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable
from typing import Any

from kpolicy.errors import KPolicyError
from kpolicy.ladders import CaptureSizes
from kpolicy.policies import get_policy
from kpolicy.scheduling.pace import Pace, in_line, other_select
from kpolicy_vllm.state import LISTED, State, workers_apart

__all__ = ["Pacer", "left_of", "queues_of", "vllm_s_own", "why_not"]

_OTHERS_STEPS = 8
"""Steps that a rank of prompts only is bounded in, once ranks' last step showed that another decodes"""
_COMPUTED, _PROMPT = operator.attrgetter("num_computed_tokens"), operator.attrgetter("num_prompt_tokens")


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


def queues_of(scheduler: Any) -> Iterable[Any]:
    """vLLM's queues of requests that wait, those with any."""
    for name in ("waiting", "skipped_waiting", "kv_holding_waiting"):
        queue = getattr(scheduler, name, None)
        if queue:
            yield queue


def left_of(request: Any) -> int:
    """Tokens that a running request has to compute, those left out that are still being sampled."""
    return int(request.num_tokens + request.num_output_placeholders - request.num_computed_tokens)


class Pacer:
    """The bound on a scheduler's steps.

    Args:
        scheduler: vLLM's.
        state: the integration's.
    """

    def __init__(self, scheduler: Any, state: State) -> None:
        self._scheduler = scheduler
        self._state = state
        self._ranks = scheduler.vllm_config.parallel_config.data_parallel_size
        self._paces: dict[int, Pace] = {}
        self._by: tuple[Any, Any] | None = None
        self._off = False
        self._for_others = 0
        self._whole = False
        """Whether the next step is vLLM's own, as no prompt came in under the bound"""

    def schedule(self, run: Callable[[], Any]) -> Any:
        """One step under the bound that costs give it.

        Args:
            run: the step as it is scheduled otherwise.
        """
        scheduler, found = self._scheduler, None
        if not self._off:
            try:
                found = self._bound()
            except Exception as error:  # noqa: BLE001 - nothing was changed yet, and vLLM schedules on
                self._off = True
                self._state.counters.warn_once(
                    "pace_failed", f"steps are filled to vLLM's limit: {type(error).__name__}: {error}"
                )
        if found is None:
            return run()
        most, decode_tokens = found
        limit = scheduler.max_num_scheduled_tokens
        scheduler.max_num_scheduled_tokens = most
        try:
            output = run()
        finally:
            scheduler.max_num_scheduled_tokens = limit
        self._state.counters.add("paced_steps")
        rows = len(output.num_scheduled_tokens) * self._state.settings.query_len
        if rows <= decode_tokens and output.total_num_scheduled_tokens <= decode_tokens:
            # Tokens alone don't tell, as decodes may have fewer drafts than they could.
            # A prompt that can't be cut so short, such as one with an image in it, mustn't wait for ever.
            self._whole = True
            self._state.counters.add("pace_no_prompt_came_in")
        return output

    def _bound(self) -> tuple[int, int] | None:
        """(tokens of the step, tokens of its decodes); None for vLLM's own limit."""
        scheduler, state = self._scheduler, self._state
        if self._whole:
            self._whole = False
            return None
        if state.costs is None or state.select is None or int(scheduler._pause_state):
            return None
        prompts = self._prompts()
        waiting = sum(map(len, queues_of(scheduler)))
        decoding = scheduler.running[: len(scheduler.running) - len(prompts)]
        decodes = len(decoding)
        if not (prompts or waiting) or not (decodes or self._others_decode()):
            return None
        unfinished = any(map(operator.lt, map(_COMPUTED, decoding), map(_PROMPT, decoding)))
        if unfinished and any(left_of(request) > 1 for request in decoding):
            # A prompt before them would fill a bounded step alone, again and again, until it is done.
            state.counters.add("pace_decodes_behind_a_prompt")
            return None
        limit = scheduler.max_num_scheduled_tokens
        decode_tokens = decodes * state.settings.query_len
        requests = itertools.chain(prompts, itertools.chain.from_iterable(queues_of(scheduler)))
        first = next(requests)
        line = in_line(
            ((left_of(request), request.num_computed_tokens) for request in itertools.chain((first,), requests)),
            len(prompts) + waiting,
            limit - decode_tokens,
            scheduler.max_num_running_reqs - decodes,
            sum(map(_COMPUTED, decoding)) + decode_tokens,
        )
        # Decodes of other ranks wait for this one's step too.
        most = self._pace(limit).next_step(first.request_id, max(decodes, 1), line)
        return (most, decode_tokens) if most < limit else None

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

    def _prompts(self) -> list[Any]:
        """The last of the running requests, as far as their prompts aren't done.

        One that isn't takes all that is left of a step, so hardly anyone comes in behind it. Where somebody did, as
        behind a prompt with an image that had to wait, decodes may follow it: `_bound` looks for that.
        """
        found = list(itertools.takewhile(lambda request: left_of(request) > 1, reversed(self._scheduler.running)))
        found.reverse()
        return found

    def _pace(self, limit: int) -> Pace:
        """The rule for the graphs and costs of now."""
        state = self._state
        by = (state.costs, state.select)
        if self._by is None or by[0] is not self._by[0] or by[1] is not self._by[1]:
            self._by = by
            self._paces.clear()
        if limit not in self._paces:
            assert state.select is not None  # noqa: S101 - whoever asks looked
            context = state.context(lora=False)
            other = None
            try:
                policy, sizes = vllm_s_own(self._scheduler.vllm_config, state)
                other = other_select(policy, context, sizes)
            except KPolicyError as error:
                state.counters.warn_once("not_compared", f"steps are bounded without vLLM's own rule beside: {error}")
            self._paces[limit] = Pace(context, state.select, other, limit=limit)
        return self._paces[limit]


def vllm_s_own(vllm_config: Any, state: State) -> tuple[Any, CaptureSizes | None]:
    """The replica of this vLLM's own rule, and the sizes that the user gave it; None for its default ones.

    Raises:
        ConfigError: there is no replica of this release.
    """
    runner = "v2" if hasattr(state.runner, "cudagraph_manager") else "v1"
    policy = get_policy(f"vllm:version={'.'.join(state.vllm_version.split('.')[:2])},runner={runner}")
    listed = (vllm_config.additional_config or {}).get(LISTED)
    if not listed:
        return policy, None
    q, reqs = state.settings.query_len, state.settings.max_num_reqs
    return policy, CaptureSizes([n for n in listed if n % q == 0 and n <= q * reqs], listed, listed)
