"""What one of vLLM's schedulers runs and who waits, in numbers that are kept up from step to step.

A scheduler may run a thousand requests, whose objects are in no cache when a step begins: to look at each of them takes
hundreds of microseconds, more than all else that is done about a step's length. What a step says of itself tells who
came in; who left shows by the length of the list.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from kpolicy_vllm.state import State

__all__ = ["Rows", "StepPlanner", "left_of", "queues_of"]

_LOOKED_AT = 32
"""Decode rows whose KV is looked at at a time"""
_COMPUTED = operator.attrgetter("num_computed_tokens")
_QUEUES = ("waiting", "skipped_waiting", "kv_holding_waiting")


def queues_of(scheduler: Any) -> Iterable[Any]:
    """vLLM's queues of requests that wait, those with any."""
    for name in _QUEUES:
        queue = getattr(scheduler, name, None)
        if queue:
            yield queue


def left_of(request: Any) -> int:
    """Tokens that a running request has to compute, those left out that are still being sampled."""
    return int(request.num_tokens + request.num_output_placeholders - request.num_computed_tokens)


class StepPlanner:
    """What decides about the steps of a scheduler.

    Args:
        scheduler: vLLM's.
        state: the integration's.
    """

    def __init__(self, scheduler: Any, state: State) -> None:
        self._scheduler = scheduler
        self._state = state
        self._ranks = scheduler.vllm_config.parallel_config.data_parallel_size
        self._off = False

    def _end(self, event: str, then: str, error: Exception) -> None:
        """Decide nothing any more, as that went wrong; said and counted once."""
        self._off = True
        self._state.counters.warn_once(event, f"{then}: {type(error).__name__}: {error}")


class Rows:
    """The requests of a scheduler: those that decode and those that wait by number, prompts that aren't done by name.

    Every step must be told, by `ran`.

    Args:
        scheduler: vLLM's.

    Attributes:
        prompts: (request, the tokens it has to compute before it decodes) of those that don't decode yet, in order.
        decodes: how many do.
        kv: KV tokens of these: exact as far as rows have a token each a step and none leaves; a row that leaves takes
            the mean. `look` sees a few rows at a time, and once all were seen, what was found replaces the number.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self.prompts: list[tuple[Any, int]] = []
        self.decodes = 0
        self.kv = 0.0
        self._status: Any = None
        """vLLM's for requests that run"""
        self._at = self._seen = self._seen_kv = 0

    def refresh(self) -> None:
        """Before a step: leave out who has left since the last."""
        if len(self._scheduler.running) != self.decodes + len(self.prompts):
            self._settle()

    @property
    def waiting(self) -> int:
        """Requests in vLLM's queues."""
        return sum(map(len, queues_of(self._scheduler)))

    @property
    def first(self) -> Any:
        """Whoever is first in line: there must be somebody."""
        if self.prompts:
            return self.prompts[0][0]
        return next(iter(queues_of(self._scheduler))).peek_request()

    def ran(self, output: Any) -> None:
        """After a step.

        Args:
            output: what vLLM's `schedule` returned.
        """
        if output.total_num_scheduled_tokens:
            self.kv += self.decodes
            self._seen_kv += self._seen
        came = len(output.scheduled_new_reqs) + len(output.scheduled_cached_reqs.resumed_req_ids)
        if came:
            new = self._scheduler.running[-came:]
            self._status = new[-1].status
            self.prompts += [(request, request.num_tokens) for request in new]
        if self.prompts:
            self._settle()

    def _settle(self) -> None:
        """Take prompts that are done for decodes, and those that are gone out."""
        running, before = self._scheduler.running, self.decodes
        known, self.prompts = self.prompts, []
        for request, until in known:
            if request.status is not self._status:
                # It was preempted, or has ended.
                continue
            if request.num_computed_tokens < until:
                self.prompts.append((request, until))
            else:
                before += 1
                self.kv += request.num_computed_tokens
        self.decodes = len(running) - len(self.prompts)
        if self.decodes > before:
            self._count(running)
        elif self.decodes < before:
            self.kv *= self.decodes / before

    def _count(self, running: list[Any]) -> None:
        """All anew: requests came in another way than by a step that was told."""
        self._status = running[-1].status
        self.prompts = [
            (request, request.num_tokens)
            for request in running
            if request.num_computed_tokens < request.num_prompt_tokens
        ]
        waiting = {id(request) for request, _ in self.prompts}
        self.decodes = len(running) - len(self.prompts)
        self.kv = sum(request.num_computed_tokens for request in running if id(request) not in waiting)

    def look(self) -> None:
        """Look at some decode rows' KV, those next to the ones that were looked at before."""
        until = min(self._at + _LOOKED_AT, self.decodes)
        self._seen_kv += sum(map(_COMPUTED, self._scheduler.running[self._at : until]))
        self._seen += max(0, until - self._at)
        self._at = until
        if until == self.decodes:
            if self._seen:
                self.kv = self._seen_kv * self.decodes / self._seen
            self._at = self._seen = self._seen_kv = 0

    @property
    def behind_a_prompt(self) -> bool:
        """Whether a request that decodes stands behind one whose prompt isn't done."""
        prompts = self.prompts
        last = self._scheduler.running[-len(prompts) :] if prompts else ()
        return any(one is not other for one, (other, _) in zip(last, prompts, strict=True))
