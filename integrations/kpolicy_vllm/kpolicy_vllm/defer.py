"""Making the next step late: just before the device comes to it, so that requests which arrive meanwhile are in it.

Under asynchronous scheduling vLLM's engine core makes the step after next when the device begins the next one. A
request that arrives while that one runs isn't in it, and waits for one step more. Here the engine waits before it looks
at its input queue, until what is left of the running step is what the host needs to have the next one launched.

The running step's end is expected at when the device came to it plus what costs say of it, brought to what such steps
were seen to take. How long the host needs is learned: the most that recent steps took, and a margin. Where the device
was through before the next step was launched that was late, and the margin grows at once; else it shrinks slowly, so
that about one in a hundred is late. Where many are it rests for a while.

vLLM's loop does all the rest: the requests that come in during the wait are taken in by its own method as they come.
"""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable
from typing import Any

from kpolicy.costs import CostTable
from kpolicy.decision import Launch
from kpolicy.modes import Part
from kpolicy.modes import Rows as RowsOf
from kpolicy_vllm.rows import left_of, queues_of
from kpolicy_vllm.state import State, held_by, state_of, workers_apart
from kpolicy_vllm.steps import Entry, numbers_of

__all__ = ["Deferral", "attach", "made_for", "why_not"]

_MARK = "_kpolicy_deferral"
_ENGINE = "vllm.v1.engine.core"
_UNDER_WAY = 2
"""Steps that asynchronous scheduling has under way"""
_PLAIN = frozenset(("ADD", "ABORT"))
"""What may wait for the end of the wait; anything else in the input queue ends it"""

LEAST_S, POLL_S = 0.5e-3, 0.2e-3
"""The shortest wait that is worth it; seconds between two looks whether it should end"""
SETTLED = 16
"""Steps before the first wait"""
MARGIN_S, LEAST_MARGIN_S, MOST_MARGIN_S = 1e-3, 0.2e-3, 20e-3
_LATER, _SOONER = 1.5, 0.996
"""Times the margin, once the host was late, and with every step"""
_FORGOTTEN = 0.02
"""Share of what the host took longer than now that each step forgets"""
_QUICKER, _SLOWER, _UNSEEN = 0.5, 0.1, 0.9
"""Weight of a step that took less than such steps did, and of one that took more; what of its costs one that wasn't
seen yet is expected to take"""
OFTEN, _OVER, REST_S = 0.1, 64, 10.0
"""Share of waits that were late, over about so many, from which it rests, and for how long"""
_LOOKED_AT = 8
"""Prompts in line that are looked at"""


def why_not(vllm_config: Any, state: State | None = None) -> str | None:
    """Why steps can't be made late in this vLLM; None where they can.

    Args:
        vllm_config: vLLM's.
        state: the integration's, where there is one.
    """
    if state is not None and not state.policy.reads_costs:
        return f"policy {state.config.policy!r} reads no costs, and they say when a step ends"
    if state is not None and state.config.split:
        return "split is on, and a step may have two forwards"
    parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
    if workers_apart(vllm_config) or getattr(parallel, "world_size", 1) > 1:
        return "the workers are processes of their own, or ranks that have to schedule alike"
    if parallel.data_parallel_size > 1:
        return "data-parallel engines wait for each other in every step"
    if not scheduler.async_scheduling:
        return "scheduling isn't asynchronous, so a step is made when the one before is done"
    if parallel.pipeline_parallel_size > 1 or getattr(vllm_config, "max_concurrent_batches", 2) != _UNDER_WAY:
        return "other than two steps are under way at a time"
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.num_speculative_tokens:
        return "what drafts take beside a step isn't among the costs"
    for name in ("kv_transfer_config", "ec_transfer_config"):
        if getattr(vllm_config, name, None) is not None:
            return "a connector moves blocks between steps"
    return None


def attach(found: Any, vllm_config: Any, state: State) -> None:
    """Have the engine core of this process make steps late, where that can be and the user doesn't say otherwise.

    Its input method is wrapped once in a process. Other engines' pass through.

    Args:
        found: the version's adapter.
        vllm_config: vLLM's.
        state: the integration's.
    """
    if state.config.defer is False:
        return
    why = why_not(vllm_config, state)
    if why is None:
        try:
            found.check("engine")
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine is left alone
            why = str(error)
    if why is not None:
        if state.config.defer:
            state.counters.warn_once("not_deferred", f"steps are made as early as vLLM makes them: {why}.")
        return
    engine = importlib.import_module(_ENGINE).EngineCoreProc
    original = engine._process_input_queue
    if getattr(original, _MARK, False):
        return

    @functools.wraps(original)
    def process_input_queue(self: Any) -> Any:
        deferral = self.__dict__.get(_MARK, False)
        if deferral is False:
            deferral = made_for(self)
        return original(self) if deferral is None else deferral.process(functools.partial(original, self))

    setattr(process_input_queue, _MARK, True)
    engine._process_input_queue = process_input_queue


def made_for(engine: Any) -> Deferral | None:
    """The wait of an engine, made at its first step; None where it is to be left alone.

    Args:
        engine: vLLM's `EngineCoreProc`, or whatever has a loop of its own around an `EngineCore`, with that one's
            fields, an `input_queue` and `is_running`.
    """
    made = None
    state = state_of(engine.vllm_config)
    if state is not None and state.config.defer is not False:
        with state.guard("not_deferred", "making steps late", "they are made as early as vLLM makes them"):
            if why_not(engine.vllm_config, state) is None and getattr(engine, "batch_queue_size", 1) == _UNDER_WAY:
                deferral = Deferral(engine, state)
                deferral.watch()
                held_by(engine, state)
                made = deferral
    setattr(engine, _MARK, made)
    return made


class _Launched:
    """A step that was launched."""

    __slots__ = ("costs_us", "kind", "output", "start_s", "until_s")

    def __init__(self, output: Any, entry: Entry | None, costs_us: float, until_s: float, start_s: float) -> None:
        self.output = output
        self.kind = None if entry is None else _kind(entry)
        """Steps of which one tells what another takes: those of a graph, or eager ones of about as many tokens"""
        self.costs_us = costs_us
        """Microseconds on the device by costs; 0 where they say nothing"""
        self.until_s = until_s
        """When all of it was launched"""
        self.start_s = start_s
        """When the device came to it at the earliest; 0 where it is when the one before ends"""


class Deferral:
    """The wait before an engine's steps.

    Args:
        engine: vLLM's `EngineCoreProc`.
        state: the integration's.
        now: seconds.
        sleep: for so many seconds.

    Attributes:
        lead_s: what the host is taken to need, without the margin.
        margin_s: that.
    """

    def __init__(
        self, engine: Any, state: State, now: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:  # fmt: skip
        self._engine = engine
        self._state = state
        self._now = now
        self._sleep = sleep
        self._off = False
        self.lead_s = 0.0
        self.margin_s = MARGIN_S
        self._seen = 0
        """Steps that told how long the host takes"""
        self._ratio: dict[Any, float] = {}
        """Of each kind of step, what it takes of its costs"""
        self._late = 0.0
        self._judged = 0
        self._rests_until_s = 0.0
        self._begun_s = 0.0
        """When the host began with the step that it makes now"""
        self._deferred = False
        """Whether it waited before that"""
        self._last: _Launched | None = None
        self._before: _Launched | None = None
        self._end_s = 0.0
        """When the step that runs was last expected to end"""
        self._ended_s = 0.0
        """When the last step was seen to end"""
        self._seen_to_end = False
        """Whether the device was still at it when the host began to wait for it"""
        self._ms = 0.0

    def watch(self) -> None:
        """Note from now on when steps are launched and when they end: by this engine's own objects."""
        executor, scheduler = self._engine.model_executor, self._engine.scheduler
        execute, update = executor.execute_model, scheduler.update_from_output

        @functools.wraps(execute)
        def execute_model(scheduler_output: Any, *args: Any, **named: Any) -> Any:
            if self._off or not scheduler_output.total_num_scheduled_tokens:
                return execute(scheduler_output, *args, **named)
            early = self._guarded(self._launching)
            result = execute(scheduler_output, *args, **named)
            self._guarded(self._launched, scheduler_output, early)
            return result

        @functools.wraps(update)
        def update_from_output(scheduler_output: Any, *args: Any, **named: Any) -> Any:
            if not self._off:
                self._guarded(self._ended, scheduler_output)
            return update(scheduler_output, *args, **named)

        executor.execute_model, scheduler.update_from_output = execute_model, update_from_output

    def process(self, original: Callable[[], Any]) -> Any:
        """Wait while the device has long to run, then take in what has come.

        Args:
            original: vLLM's way to take in what has come; it doesn't wait while there is work.
        """
        if self._off:
            return original()
        due_s = self._guarded(self._due_s)
        if due_s:
            begun_s = self._now()
            while self._guarded(self._waits, due_s):
                original()
            self._guarded(self._count, self._now() - begun_s)
        self._deferred = bool(due_s)
        busy = bool(self._engine.batch_queue)
        if busy:
            self._begun_s = self._now()
        result = original()
        if not busy:
            self._begun_s = self._now()  # it may have waited for a request
        return result

    # When

    def _due_s(self) -> float:
        """When to begin with the next step; 0 for now."""
        queue, last, now_s = self._engine.batch_queue, self._last, self._now()
        if len(queue) != 1 or last is None or queue[0][1] is not last.output or self._seen < SETTLED:
            return 0.0
        if not last.costs_us or now_s < self._rests_until_s or not self._state.ready:
            return 0.0
        device_s = 1e-6 * last.costs_us * self._ratio.get(last.kind, _UNSEEN)
        # Most of what is put off can't be longer than the step.
        if device_s < LEAST_S + self.lead_s + self.margin_s:
            return 0.0
        end_s = self._end_s = max((last.start_s or self._ended_s) + device_s, last.until_s)
        due_s = min(end_s - self.lead_s - self.margin_s, now_s + device_s)
        if due_s - now_s < LEAST_S or _over(queue[0][0]) is not False or self._full():
            return 0.0
        return due_s

    def _full(self) -> bool:
        """Whether no request that arrives now can be in the next step."""
        scheduler = self._engine.scheduler
        running = scheduler.running
        room = scheduler.max_num_scheduled_tokens - len(running)
        places = scheduler.max_num_running_reqs - len(running)
        if running:
            room -= left_of(running[-1]) - 1  # prompts that aren't done stand last
        for queue in queues_of(scheduler):
            places -= len(queue)
            for looked_at, request in enumerate(queue):
                if looked_at == _LOOKED_AT or room <= 0:
                    break
                room -= request.num_tokens - request.num_computed_tokens
        return bool(room <= 0 or places <= 0)

    def _waits(self, due_s: float) -> bool:
        """Wait, until something came in; whether to go on once that is taken in."""
        engine = self._engine
        incoming, batches = engine.input_queue, engine.batch_queue
        while engine.is_running() and len(batches) == 1:
            left_s = due_s - self._now()
            if left_s <= 0 or _over(batches[0][0]) is not False:
                return False
            if not incoming.empty():
                return _only_requests(incoming)
            self._sleep(min(left_s, POLL_S))
        return False

    def _count(self, waited_s: float) -> None:
        counters = self._state.counters
        counters.add("deferred_steps")
        self._ms += 1e3 * waited_s
        counters.add("deferred_ms", int(self._ms))
        self._ms %= 1.0

    # What steps tell

    def _launching(self) -> bool:
        """A step is about to be launched after a wait; whether the device is still at the one before."""
        self._state.dispatcher.last = None
        return self._deferred and self._running()

    def _running(self) -> bool:
        """Whether the device is at a step that the engine waits for."""
        queue = self._engine.batch_queue
        return bool(queue and _over(queue[-1][0]) is False)

    def _launched(self, output: Any, early: bool) -> None:
        """A step was launched: its expected time, what the host took, and whether that was in time."""
        now_s, costs, entry = self._now(), self._state.costs, self._state.dispatcher.last
        still = self._running()
        deferred, self._deferred = self._deferred, False
        costs_us = apart_s = 0.0
        if entry is not None and costs is not None and costs.measured:
            costs_us = _device_us(entry, costs, self._state.settings.query_len)
            apart_s = 1e-6 * _launching_us(entry, costs)
            device_s = 1e-6 * costs_us * self._ratio.get(_kind(entry), _UNSEEN)
            # Until the device has something to do. And the next step's must be there when it is through with this one.
            first_s = now_s - self._begun_s - apart_s
            self._took(max(first_s, first_s + now_s - self._begun_s - device_s, 0.0))
            if deferred:
                # What is launched bit by bit is well under way by now: there it goes by when it should have begun.
                self._judge(late=(not early or now_s - apart_s > self._end_s) if apart_s else not still)
        start_s = 0.0 if still else max(now_s - apart_s, self._begun_s)
        self._before, self._last = self._last, _Launched(output, entry, costs_us, now_s, start_s)
        self._seen_to_end = still

    def _took(self, needed_s: float) -> None:
        """What the host needed for a step, before the one that ran ended."""
        self.lead_s = max(needed_s, self.lead_s + _FORGOTTEN * (needed_s - self.lead_s))
        self.margin_s = max(_SOONER * self.margin_s, LEAST_MARGIN_S)
        self._seen += 1

    def _judge(self, *, late: bool) -> None:
        if late:
            self.margin_s = min(max(_LATER * self.margin_s, self.margin_s + LEAST_S), MOST_MARGIN_S)
            self._state.counters.add("deferred_late")
        self._judged += 1
        self._late += (late - self._late) / min(self._judged, _OVER)
        if self._judged >= _OVER and self._late > OFTEN:
            self._judged, self._late = 0, 0.0
            self._rests_until_s = self._now() + REST_S
            self._state.counters.warn_once(
                "deferred_late_often",
                f"steps were often launched late after a wait; for {REST_S:.0f} s they are made as early as vLLM does.",
            )

    def _ended(self, output: Any) -> None:
        """The engine has a step's tokens: what it took, where both its ends were seen."""
        now_s, last, before = self._now(), self._last, self._before
        if before is not None and before.output is output:
            ended, seen = before, self._seen_to_end
        elif last is not None and last.output is output:
            ended, seen = last, False  # nothing was launched behind it
        else:
            return
        if seen and not ended.start_s and ended.costs_us and self._ended_s:
            took = 1e6 * (now_s - self._ended_s) / ended.costs_us
            was = self._ratio.get(ended.kind)
            weight = 1.0 if was is None else _QUICKER if took < was else _SLOWER
            self._ratio[ended.kind] = (was or 0.0) + weight * (took - (was or 0.0))
        self._ended_s = now_s

    def _guarded(self, run: Callable[..., Any], *args: Any) -> Any:
        """Run it; None, and an end to all waits, where it fails."""
        try:
            return run(*args)
        except Exception as error:  # noqa: BLE001 - waiting is an extra, and serving goes on without it
            self._off = True
            self._state.counters.warn_once(
                "defer_failed",
                f"making steps late failed: {type(error).__name__}: {error}; they are made as early as vLLM does.",
            )
            return None


def _kind(entry: Entry) -> Any:
    return entry.key or entry.step.num_tokens.bit_length()


def _over(future: Any) -> bool | None:
    """Whether the device is through with a step; None where that can't be told.

    vLLM's futures resolve only when they are asked for: what is asked here is the event behind the copy of the tokens.
    """
    output = getattr(future, "async_output", None)
    event = getattr(output, "async_copy_ready_event", None) or getattr(output, "copy_event", None)
    return None if event is None else bool(event.query())


def _only_requests(incoming: Any) -> bool:
    with incoming.mutex:
        return all(getattr(each[0], "name", "") in _PLAIN for each in incoming.queue)


def _device_us(entry: Entry, costs: CostTable, query_len: int) -> float:
    """What costs say of a step's time on the device, noted with its answer."""
    if entry.device_us is None:
        launch = Launch(RowsOf.ALL, entry.key)
        entry.device_us = costs.launch_us(launch, numbers_of(entry.step, query_len))[0]
    return entry.device_us


def _launching_us(entry: Entry, costs: CostTable) -> float:
    """What launching bit by bit takes the host beyond a whole graph, during which the device works already."""
    if not costs.host_full.base_us or (entry.key is not None and entry.key.part is Part.FULL):
        return 0.0
    host = costs.host_eager if entry.key is None else costs.host_piecewise
    return max(0.0, host.base_us - costs.host_full.base_us)
