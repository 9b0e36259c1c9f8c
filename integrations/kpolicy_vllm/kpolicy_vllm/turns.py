"""SPLIT's turns: which of a scheduler's next steps are of decodes, which of prompts, and which of both.

For a decode-only step the prompts are hidden from vLLM's own `schedule`, for a prompt-only step the decodes; all else
is vLLM's. `kpolicy_vllm.scheduler` has the classes that do this.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from kpolicy_vllm.rows import StepPlanner, left_of, queues_of
from kpolicy_vllm.split_rule import SplitRule
from kpolicy_vllm.state import State

__all__ = ["Turns"]

_ALONE_STEPS = 8
"""Steps for decodes that a rank of prompts only takes part in, once it waited through one and no rank had decodes"""


class Turns(StepPlanner):
    """What the next steps are for. Args as of `StepPlanner`."""

    def __init__(self, scheduler: Any, state: State) -> None:
        super().__init__(scheduler, state)
        self._rule = SplitRule(state)
        self._decode_steps = 0
        self._prompt_due = False
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
                self._end("split_failed", "decodes and prompts are scheduled together", error)
        if turn == "decode":
            return self._hiding_prompts(stock)
        if turn == "prompt":
            return self._prompts_or_all(stock)
        if turn == "wait":
            return self._hiding_all(stock)
        return stock()

    def _turn(self) -> str:
        queued = any(queues_of(self._scheduler))
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

    def _waiting(self) -> bool:
        """Whether a request could come in."""
        scheduler = self._scheduler
        return len(scheduler.running) < scheduler.max_num_running_reqs and any(queues_of(self._scheduler))

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
        for queue in queues_of(self._scheduler):
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
        before = scheduler.running
        bound = getattr(scheduler, "prefill_capacity_bound", None)
        scheduler.running = list(self._kinds()[0])
        hidden = {id(request) for request in before} - {id(request) for request in scheduler.running}
        try:
            with _closed(scheduler):
                output = stock()
        finally:
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
        before = scheduler.running
        scheduler.running = []
        try:
            with _closed(scheduler):
                output = stock()
        finally:
            scheduler.running = _merged(before, scheduler.running, {id(request) for request in before})
        self._state.counters.add("split_waiting_steps")
        return output


@contextmanager
def _closed(scheduler: Any) -> Iterator[None]:
    """Nobody who waits comes in meanwhile."""
    paused, active = scheduler._pause_state, getattr(scheduler, "max_num_active_reqs", None)
    scheduler._pause_state = type(paused)(1)
    _admit(scheduler, active, 0)
    try:
        yield
    finally:
        _admit(scheduler, active, active)
        scheduler._pause_state = paused


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
