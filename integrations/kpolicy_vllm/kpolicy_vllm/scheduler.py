"""SPLIT in vLLM: schedulers that run decodes in a step of their own where that costs less, so they keep FULL graphs.

They also hold steps of decodes and prompts to a bound, see `kpolicy_vllm.pace`.

`SplitScheduler` and `SplitAsyncScheduler` are made of vLLM's own classes when first asked for. Where both decodes and
prompts could run, `SplitRule` compares one mixed step with two apart. For a decode-only step the prompts are hidden
from vLLM's own `schedule`, for a prompt-only step the decodes; all else is vLLM's.

vLLM's first runner drops rows that a step leaves out from its batch and takes them up again in the next; under
asynchronous scheduling the engine has their last tokens by then, as long as two steps are under way and no more.
`why_not` lists where that, or something else, doesn't hold; there the scheduler is vLLM's.

Under data parallelism ranks run each step in the lesser of their modes, so all of them take the same turns: even steps
are for decodes, odd ones for prompts, by the step counter that vLLM keeps equal on all ranks.
"""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Iterable
from typing import Any

from kpolicy.policies import get_policy
from kpolicy_vllm import pace
from kpolicy_vllm.config import Config
from kpolicy_vllm.pace import Pacer
from kpolicy_vllm.rows import left_of, queues_of
from kpolicy_vllm.split_rule import SplitRule
from kpolicy_vllm.state import State, held_by, state_of, workers_apart

__all__ = ["SplitAsyncScheduler", "SplitScheduler", "may_pace", "qualname", "why_not"]  # noqa: F822 - made by __getattr__

_BASES = {
    "SplitScheduler": ("vllm.v1.core.sched.scheduler", "Scheduler"),
    "SplitAsyncScheduler": ("vllm.v1.core.sched.async_scheduler", "AsyncScheduler"),
}
_MARK = "_kpolicy_counted"
_ALONE_STEPS = 8
"""Steps for decodes that a rank of prompts only takes part in, once it waited through one and no rank had decodes"""


def qualname(vllm_config: Any) -> str:
    """What ``scheduler_cls`` is set to for that vLLM."""
    name = "SplitAsyncScheduler" if vllm_config.scheduler_config.async_scheduling else "SplitScheduler"
    return f"{__name__}.{name}"


def why_not(vllm_config: Any, *, in_scheduler: bool = True) -> str | None:
    """Why decodes and prompts can't be run apart in this vLLM; None where they can.

    Args:
        vllm_config: vLLM's.
        in_scheduler: whether it is for the scheduler to decide, or for the workers.
    """
    if in_scheduler and workers_apart(vllm_config):
        return (
            "the workers are processes of their own, and costs are measured there; SPLIT needs the in-process executor"
        )
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        return "pipeline stages have more steps under way than rows left out survive"
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.num_speculative_tokens:
        return "drafts of rows that a step leaves out would be lost"
    if vllm_config.lora_config is not None:
        return "adapters of rows that a step leaves out wouldn't be counted"
    if getattr(vllm_config, "kv_transfer_config", None) is not None:
        return "a KV connector sees every step"
    if vllm_config.model_config.is_encoder_decoder:
        return "steps of an encoder and a decoder aren't of decodes or prompts"
    return None


def may_pace(vllm_config: Any, config: Config) -> bool:
    """Whether steps can ever be bounded in this vLLM, so that graphs for bounded ones are worth their memory.

    Args:
        vllm_config: vLLM's, before or after it was given our scheduler's class.
        config: the user's settings.
    """
    if not config.paces or not get_policy(config.policy).reads_costs:
        return False
    if vllm_config.scheduler_config.scheduler_cls not in (None, qualname(vllm_config)):
        return False
    return pace.why_not(vllm_config, apart=config.split and why_not(vllm_config) is None) is None


class Turns:
    """What the next steps are for.

    Args:
        scheduler: vLLM's.
        state: the integration's.
    """

    def __init__(self, scheduler: Any, state: State) -> None:
        self._scheduler = scheduler
        self._state = state
        self._rule = SplitRule(state)
        self._ranks = scheduler.vllm_config.parallel_config.data_parallel_size
        self._decode_steps = 0
        self._prompt_due = False
        self._off = False
        self._shut: tuple[int, int] | None = None
        self._found: tuple[list[Any], list[Any]] | None = None
        self._only_decodes = False
        """Whether all that runs were decodes and nobody was queued: so it stays until somebody is"""
        self._waited = False
        self._alone = 0
        self.counter: Any = None

    def schedule(self, stock: Any) -> Any:
        """One step: vLLM's own, or with one kind of row hidden from it.

        Args:
            stock: vLLM's `schedule`, bound to its arguments.
        """
        scheduler = self._scheduler
        turn, self._found = "", None
        if not self._off:
            try:
                turn = self._turn() if int(scheduler._pause_state) == 0 else ""
            except Exception as error:  # noqa: BLE001 - nothing was hidden yet, and vLLM schedules on
                self._off = True
                self._state.counters.warn_once(
                    "split_failed", f"decodes and prompts are scheduled together: {type(error).__name__}: {error}"
                )
        if turn == "decode":
            return self._hiding_prompts(stock)
        if turn == "prompt":
            return self._prompts_or_all(stock)
        if turn == "wait":
            return self._hiding_all(stock)
        return stock()

    def _turn(self) -> str:
        queued = any(self._queues())
        if self._only_decodes and not queued:
            return ""
        decodes, prompts = self._kinds()
        self._only_decodes = not prompts and not queued
        if self._ranks > 1:
            return self._turn_of_ranks(decodes, prompts)
        if not decodes or not (prompts or self._waiting()) or self._still_shut():
            self._decode_steps, self._prompt_due = 0, False
            return ""
        if self._prompt_due:
            self._prompt_due = False
            return "prompt"
        if not self._decode_steps:
            self._decode_steps = self._rule.steps(
                len(decodes), self._chunks(len(decodes), prompts), self._waited_us(prompts)
            )
            if not self._decode_steps:
                self._state.counters.add("split_not_worth_it")
                return ""
        if self._short_of_blocks(len(decodes)):
            self._decode_steps = 0
            self._state.counters.add("split_short_of_blocks")
            return ""
        self._decode_steps -= 1
        self._prompt_due = not self._decode_steps
        return "decode"

    def _turn_of_ranks(self, decodes: list[Any], prompts: list[Any]) -> str:
        if self.counter is None or not self._rule.alternates():
            return ""
        if self._waited:
            self._waited = False
            self._alone = 0 if self._state.others_decode() else _ALONE_STEPS
        even = self.counter() % 2 == 0
        if not (prompts or self._waiting()) or self._still_shut():
            return ""
        if not decodes:
            return "wait" if even and self._waits() else ""
        if self._short_of_blocks(len(decodes)):
            return ""
        return "decode" if even else "prompt"

    def _waits(self) -> bool:
        """Whether to leave a step to other ranks' decodes, as far as the last that was left to them had any."""
        if self._alone:
            self._alone -= 1
            return False
        self._waited = True
        return True

    def _kinds(self) -> tuple[list[Any], list[Any]]:
        """The running requests that decode, and those whose prompt isn't done: told once a step."""
        if self._found is not None:
            return self._found
        decodes: list[Any] = []
        prompts: list[Any] = []
        for request in self._scheduler.running:
            (prompts if left_of(request) > 1 else decodes).append(request)
        self._found = (decodes, prompts)
        return self._found

    def _queues(self) -> Iterable[Any]:
        return queues_of(self._scheduler)

    def _waiting(self) -> bool:
        """Whether a request could come in."""
        scheduler = self._scheduler
        return len(scheduler.running) < scheduler.max_num_running_reqs and any(self._queues())

    def _chunks(self, num_decodes: int, prompts: list[Any]) -> list[int]:
        """The prompt chunks that a mixed step would have, as far as that can be told without asking for blocks."""
        scheduler = self._scheduler
        left = scheduler.max_num_scheduled_tokens - num_decodes
        room = scheduler.max_num_running_reqs - len(scheduler.running)
        most = scheduler.scheduler_config.long_prefill_token_threshold or left
        chunks: list[int] = []
        for request in self._next_in_line(prompts, room):
            chunk = min(request.num_tokens - request.num_computed_tokens, left, most)
            if chunk <= 0:
                break
            chunks.append(chunk)
            left -= chunk
        return chunks

    def _next_in_line(self, prompts: list[Any], room: int) -> Iterable[Any]:
        yield from prompts
        for queue in self._queues():
            for request in queue:
                if room <= 0:
                    return
                room -= 1
                yield request

    def _waited_us(self, prompts: list[Any]) -> float:
        """How long the first in line has waited since it came."""
        first = next(iter(self._next_in_line(prompts, 1)), None)
        return 0.0 if first is None else 1e6 * max(0.0, time.time() - first.arrival_time)

    def _short_of_blocks(self, num_decodes: int) -> bool:
        """Whether decodes alone might have to preempt each other, which is vLLM's to order among all requests."""
        pool = self._scheduler.kv_cache_manager.block_pool
        groups = len(self._scheduler.kv_cache_config.kv_cache_groups)
        return bool(pool.get_num_free_blocks() < num_decodes * groups)

    def _still_shut(self) -> bool:
        """Whether no prompt came in when it was due, and nothing has become free since."""
        if self._shut is not None:
            running, free = self._shut
            if len(self._scheduler.running) != running or self._free_blocks() > free:
                self._shut = None
        return self._shut is not None

    def _free_blocks(self) -> int:
        return int(self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    # One kind hidden

    def _prompts_or_all(self, stock: Any) -> Any:
        """A step of prompts; where none can run, because blocks are short or it isn't ready, vLLM's own step."""
        scheduler = self._scheduler
        previous = set(getattr(scheduler, "prev_step_scheduled_req_ids", ()))
        output = self._hiding_decodes(stock)
        if output.total_num_scheduled_tokens:
            self._state.counters.add("split_prompt_steps")
            return output
        self._shut = (len(scheduler.running), self._free_blocks())
        self._state.counters.add("split_no_prompt_came_in")
        if previous:
            # The empty step is never run: rows of the one before are still in the runner's batch.
            scheduler.prev_step_scheduled_req_ids.update(previous)
        return _joined(output, stock())

    def _hiding_prompts(self, stock: Any) -> Any:
        """A step of decodes: prompts stay where they are, and nobody comes in."""
        scheduler = self._scheduler
        before, paused = scheduler.running, scheduler._pause_state
        bound = getattr(scheduler, "prefill_capacity_bound", None)
        active = getattr(scheduler, "max_num_active_reqs", None)
        scheduler.running = list(self._kinds()[0])
        hidden = {id(request) for request in before} - {id(request) for request in scheduler.running}
        scheduler._pause_state = type(paused)(1)
        _admit(scheduler, active, 0)
        try:
            output = stock()
        finally:
            _admit(scheduler, active, active)
            scheduler._pause_state = paused
            scheduler.running = _merged(before, scheduler.running, hidden)
            if bound is not None:
                # Whether prompts had to stay out is not what this step can tell.
                scheduler.prefill_capacity_bound = bound
        self._state.counters.add("split_decode_steps")
        return output

    def _hiding_decodes(self, stock: Any) -> Any:
        """A step of prompts, those that come in included; decodes keep their places.

        It takes the prompt tokens that the mixed step would have taken, as they were compared with it.
        """
        scheduler = self._scheduler
        before = scheduler.running
        decodes, prompts = self._kinds()
        scheduler.running = list(prompts)
        limits = {
            name: getattr(scheduler, name)
            for name in ("max_num_running_reqs", "max_num_active_reqs", "max_num_scheduled_tokens")
            if hasattr(scheduler, name)
        }
        for name, most in limits.items():
            setattr(scheduler, name, most - len(decodes))
        try:
            output = stock()
        finally:
            for name, most in limits.items():
                setattr(scheduler, name, most)
            scheduler.running = _merged(before, scheduler.running, {id(request) for request in decodes})
        return output

    def _hiding_all(self, stock: Any) -> Any:
        """A step of nothing, while other ranks decode; vLLM has the rank run along without rows."""
        scheduler = self._scheduler
        before, paused = scheduler.running, scheduler._pause_state
        active = getattr(scheduler, "max_num_active_reqs", None)
        scheduler.running = []
        scheduler._pause_state = type(paused)(1)
        _admit(scheduler, active, 0)
        try:
            output = stock()
        finally:
            _admit(scheduler, active, active)
            scheduler._pause_state = paused
            scheduler.running = _merged(before, scheduler.running, {id(request) for request in before})
        self._state.counters.add("split_waiting_steps")
        return output


def _merged(before: list[Any], now: list[Any], hidden: set[int]) -> list[Any]:
    """The running requests in their order: those hidden, those that are still running, then those that came in."""
    still = {id(request) for request in now}
    known = {id(request) for request in before}
    return [request for request in before if id(request) in hidden or id(request) in still] + [
        request for request in now if id(request) not in known
    ]


def _admit(scheduler: Any, active: int | None, most: int | None) -> None:
    """Set 0.33's limit on requests that come in: it also holds for those with blocks, whom a pause lets in."""
    if active is not None:
        scheduler.max_num_active_reqs = most


def _joined(empty: Any, output: Any) -> Any:
    """A step's output with what an empty one before it, which isn't run, had to tell the workers."""
    for name in ("finished_req_ids", "preempted_req_ids"):
        told = getattr(empty, name, None)
        if told:
            setattr(output, name, {*told, *(getattr(output, name, None) or ())})
    for name in ("free_encoder_mm_hashes", "new_block_ids_to_zero", "kv_cache_block_copies"):
        told = getattr(empty, name, None)
        if told:
            setattr(output, name, [*told, *(getattr(output, name, None) or ())])
    return output


def _made(name: str) -> type[Any]:
    module, base_name = _BASES[name]
    base = getattr(importlib.import_module(module), base_name)

    class Split(base):  # type: ignore[misc,valid-type]
        """vLLM's scheduler, with decodes and prompts in steps of their own where that costs less."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.kpolicy_turns: Turns | None = None
            self.kpolicy_pacer: Pacer | None = None
            state = state_of(self.vllm_config)
            if state is None:
                return
            held_by(self, state)
            self._kpolicy_split(state)
            if not state.config.paces:
                return
            with state.guard("not_paced", "bounding steps", "they are filled to vLLM's limit"):
                reason = pace.why_not(self.vllm_config, self, apart=self.kpolicy_turns is not None)
                if reason is None:
                    self.kpolicy_pacer = Pacer(self, state)
                else:
                    state.counters.warn_once("not_paced", f"steps are filled to vLLM's limit: {reason}.")

        def _kpolicy_split(self, state: State) -> None:
            if not state.config.split:
                return
            with state.guard("not_split", "scheduling decodes and prompts apart", "they are scheduled together"):
                reason = why_not(self.vllm_config)
                if reason is not None and _left_to_workers(self.vllm_config):
                    return
                if reason is not None:
                    state.counters.warn_once("not_split", f"decodes and prompts are scheduled together: {reason}.")
                    return
                if self.vllm_config.parallel_config.data_parallel_size > 1:
                    _count_steps()
                self.kpolicy_turns = Turns(self, state)

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            run = functools.partial(super().schedule, *args, **kwargs)
            if self.kpolicy_turns is not None:
                return self.kpolicy_turns.schedule(run)
            return run() if self.kpolicy_pacer is None else self.kpolicy_pacer.schedule(run)

    Split.__name__ = Split.__qualname__ = name
    Split.__module__ = __name__
    return Split


def _left_to_workers(vllm_config: Any) -> bool:
    """Whether workers run two forwards in a step where the scheduler can't decide (`kpolicy_vllm.two_forwards`)."""
    second = getattr(vllm_config, "use_v2_model_runner", False)
    alone = vllm_config.parallel_config.data_parallel_size == 1
    return bool(second and alone) and why_not(vllm_config, in_scheduler=False) is None


def _count_steps() -> None:
    """Let schedulers of data-parallel ranks read the step counter that their engine shares with the others."""
    engine = importlib.import_module("vllm.v1.engine.core").DPEngineCoreProc
    original = engine.run_busy_loop
    if getattr(original, _MARK, False):
        return

    @functools.wraps(original)
    def run_busy_loop(self: Any, *args: Any, **kwargs: Any) -> Any:
        turns = getattr(self.scheduler, "kpolicy_turns", None)
        if turns is not None:
            turns.counter = lambda: self.step_counter
        return original(self, *args, **kwargs)

    setattr(run_busy_loop, _MARK, True)
    engine.run_busy_loop = run_busy_loop


def __getattr__(name: str) -> Any:
    """The two classes, made when vLLM asks for them."""
    if name in _BASES:
        made = globals()[name] = _made(name)
        return made
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
