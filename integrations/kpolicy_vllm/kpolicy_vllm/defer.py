"""Making the next step late: just before the device comes to it, so that requests which arrive meanwhile are in it.

Under asynchronous scheduling vLLM's engine core makes the step after next when the device begins the next one. A
request that arrives while that one runs isn't in it, and waits for one step more. Here the engine waits before it looks
at its input queue, until what is left of the running step is what the host needs to have the next one launched.

The running step's end is expected at when the device came to it plus what costs say of it, brought to what such steps
were seen to take. How long the host needs is learned from its whole turns, all but its waiting for tokens: a step must
be there when the device is through with the one before, and so must those that follow, as a launch that takes the host
longer than the device puts off the next. Where the host's turns take longer than the device's steps nothing is left to
wait for. What a wait put off is owed until the host waits for the device again: where a launch finds the device idle
before that it was late, and the margin grows at once. Else it shrinks slowly, so that about one wait in a hundred is
late. Where many are it rests for a while.

The host takes a step's tokens in once it has launched the next one, so what is left of its launches when the running
step ends holds that one's tokens back. A whole graph is launched in time. A step that takes the host longer to launch
than 1.5 steps of decodes take, mostly an eager one, is never put off: whoever arrives in a wait and would have the next
step be one is left for the step after, as without the wait. Other steps with prompts are begun so soon that the gap
before the running step's tokens is no longer than without the wait, or than those 1.5 steps.

vLLM's loop does all the rest: the requests that come in during the wait are taken in by its own method as they come.
Where somebody is left out the wait is over, and that isn't asked again before the step. It is asked first of all after
it.
"""

from __future__ import annotations

import functools
import importlib
import math
import time
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any

from kpolicy.costs import CostTable
from kpolicy.decision import Launch
from kpolicy.modes import Rows as RowsOf
from kpolicy_vllm.rows import left_of, queues_of
from kpolicy_vllm.state import State, held_by, state_of, workers_apart
from kpolicy_vllm.steps import Entry, Step, numbers_of

__all__ = ["Deferral", "attach", "made_for", "why_not"]

_MARK = "_kpolicy_deferral"
_ENGINE = "vllm.v1.engine.core"
_UNDER_WAY = 2
"""Steps that asynchronous scheduling has under way"""
_PLAIN = frozenset(("ADD", "ABORT"))
"""What may wait for the end of the wait; anything else in the input queue ends it"""

LEAST_S, POLL_S = 1e-3, 0.2e-3
"""The shortest wait that is worth it; seconds between two looks whether it should end"""
SETTLED = 16
"""Steps before the first wait"""
MARGIN_S, LEAST_MARGIN_S, MOST_MARGIN_S = 1e-3, 0.2e-3, 20e-3
_LATER, _LONGER_S, _SOONER = 1.5, 0.5e-3, 0.996
"""Times the margin, and seconds longer at least, once the host was late; times it with every step"""
_FORGOTTEN = 0.01
"""Share of what the host took longer than now that each step forgets"""
_FADES = 0.05
"""The same of what it took to launch all of a step, with each step of its mode"""
LONG = 1.5
"""Times a step of decodes, up to which a gap is none of the long ones"""
PREPARED_S = 1e-3
"""What a runner takes from the answer until it launches, before a whole graph told"""
_QUICKER, _SLOWER, _UNSEEN = 0.5, 0.1, 0.9
"""Weight of a step that took less than such steps did, and of one that took more; what of its costs one that wasn't
seen yet is expected to take"""
OFTEN, _OVER, REST_S = 0.1, 64, 10.0
"""Share of waits that were late, over about so many, from which it rests, and for how long"""
CAME_S = 1.0
"""Steps wait where something came in so recently"""
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
    """Have the engine core of this process make steps late, where the user asks for that and it can be.

    Its input method is wrapped once in a process. Other engines' pass through.

    Args:
        found: the version's adapter.
        vllm_config: vLLM's.
        state: the integration's.
    """
    if not state.config.defer:
        return
    why = why_not(vllm_config, state)
    if why is None:
        try:
            found.check("engine")
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine is left alone
            why = str(error)
    if why is not None:
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
    if state is not None and state.config.defer:
        with state.guard("not_deferred", "making steps late", "they are made as early as vLLM makes them"):
            if why_not(engine.vllm_config, state) is None and getattr(engine, "batch_queue_size", 1) == _UNDER_WAY:
                deferral = Deferral(engine, state)
                deferral.watch()
                held_by(engine, state)
                made = deferral
    setattr(engine, _MARK, made)
    return made


class _Step:
    """A step that was launched, and what was seen of it: the host only sees whether the device is through with it."""

    __slots__ = ("ahead_s", "costs_us", "first_s", "kind", "mode", "output", "over_s", "ran_s", "until_s", "whole")

    def __init__(self, output: Any, entry: Entry | None, costs_us: float, ahead_s: float, first_s: float) -> None:
        self.output = output
        """vLLM's, until its tokens are there"""
        self.kind = None if entry is None else _kind(entry)
        """Steps of which one tells what another takes: those of a graph, or eager ones of about as many tokens"""
        self.mode = None if entry is None else entry.label[0]
        self.whole = entry is not None and entry.whole
        self.costs_us = costs_us
        """Microseconds on the device by costs; 0 where they say nothing"""
        self.ahead_s, self.first_s = ahead_s, first_s
        """Before and after the device had something of it to do: its answer, and the first launch at the latest"""
        self.until_s = first_s
        """When all of it was launched"""
        self.ran_s, self.over_s = 0.0, math.inf
        """When it was last seen under way, and first seen done"""


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
        came_s: when something last came in.
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
        self.came_s = -math.inf
        self._seen = 0
        """Turns that told how long the host takes"""
        self._ratio: dict[Any, float] = {}
        """Of each kind of step, what it takes of its costs"""
        self._late = 0.0
        self._judged = 0
        self._rests_until_s = 0.0
        self._ms = 0.0
        self._steps: deque[_Step] = deque(maxlen=_UNDER_WAY)
        """Those under way"""
        self._ran_s = self._over_s = 0.0
        """Of the last one that ended"""
        self._owes = False
        """Whether the host hasn't waited for the device since it put off a step"""
        self._prepared_s = PREPARED_S
        """From the answer until a whole graph is launched, the most lately"""
        self._behind_s = 0.0
        """How much later the last turns have the host begin the next step than it could, or how much sooner"""
        self._longest_s = 0.0
        """What the device was expected to take for the last step"""
        self._launching_s: dict[str | None, float] = {}
        """By mode, what the host took lately from the turn's beginning until all of a step was launched"""
        self._once: set[str | None] = set()
        """Modes of which that is of one launch"""
        # The wait that is under way:
        self._from_s = self._ends_s = self._latest_s = self._until_s = 0.0
        """When the tokens before were handed over, when the running step is expected to end, until when a wait may be
        at most, and until when this one is"""
        self._long_s = 0.0
        """What a gap may be, whatever it would be without the wait"""
        self._prompts = False
        """Whether the next step has prompts already"""
        self._left_out = False
        """Whether somebody who came is left for the step after the next"""
        # The turn of the loop that is under way:
        self._begun_s = 0.0
        """When it was begun, or should have been; 0 where that isn't known"""
        self._made: _Step | None = None
        self._done_s = 0.0
        """When that was launched and sampled"""
        self._blocked_s = 0.0
        """How long the host waited for tokens"""
        self._answer: Entry | None = None
        self._answer_s = 0.0
        self._idle = False
        """Whether the device had nothing to do at the answer"""

    def watch(self) -> None:
        """Note from now on when steps are launched and when they end: by this engine's own objects."""
        executor, scheduler = self._engine.model_executor, self._engine.scheduler
        execute, sample, update = executor.execute_model, executor.sample_tokens, scheduler.update_from_output

        @functools.wraps(execute)
        def execute_model(scheduler_output: Any, *args: Any, **named: Any) -> Any:
            if self._off or not scheduler_output.total_num_scheduled_tokens:
                return execute(scheduler_output, *args, **named)
            self._guarded(self._launching)
            result = execute(scheduler_output, *args, **named)
            self._guarded(self._launched, scheduler_output)
            return result

        @functools.wraps(sample)
        def sample_tokens(*args: Any, **named: Any) -> Any:
            result = sample(*args, **named)
            if not self._off:
                self._guarded(self._sampled)
            return result

        @functools.wraps(update)
        def update_from_output(scheduler_output: Any, *args: Any, **named: Any) -> Any:
            if not self._off:
                self._guarded(self._ended, scheduler_output)
            return update(scheduler_output, *args, **named)

        executor.execute_model, executor.sample_tokens = execute_model, sample_tokens
        scheduler.update_from_output = update_from_output

    def process(self, original: Callable[[], Any]) -> Any:
        """Wait while the device has long to run, then take in what has come.

        Args:
            original: vLLM's way to take in what has come; it doesn't wait while there is work.
        """
        if self._off:
            return original()
        self._guarded(self._turned)
        self._begun_s = self._now()
        self._guarded(self._incoming)
        result = original()
        if not self._engine.batch_queue:  # it may have waited for a request
            self._begun_s = self._now()
            self.came_s = max(self.came_s, self._begun_s)
        elif self._guarded(self._may_wait):
            began_s = self._now()
            while self._guarded(self._waits):
                original()
            self._guarded(self._count, self._now() - began_s)
            self._owes = True
            # What the wait took too long is the host's.
            self._begun_s = min(self._now(), self._until_s)
            if not self._left_out:
                original()
        return result

    # When

    def _may_wait(self) -> bool:
        """Whether to wait before the next step; until when is noted."""
        queue, now_s = self._engine.batch_queue, self._now()
        self._left_out = False
        if len(queue) != 1 or len(self._steps) != 1 or queue[0][1] is not self._steps[0].output:
            return False
        step = self._steps[0]
        if self._seen < SETTLED or not step.costs_us or now_s < self._rests_until_s or not self._state.ready:
            return False
        device_s = self._device_s(step)
        # Most of what is put off can't be longer than the step.
        if device_s < LEAST_S + self.lead_s + self.margin_s:
            return False
        self._from_s, self._ends_s = self._begun_s, self._end_s(step)
        self._latest_s = min(self._ends_s - self.lead_s - self.margin_s, now_s + device_s)
        if self._latest_s - now_s < LEAST_S or not self._incoming() or not self._runs():
            return False
        decodes, tokens, places = self._in_line()
        if places <= 0 or decodes + tokens >= self._engine.scheduler.max_num_scheduled_tokens:
            return False  # nobody who arrives now can be in the next step
        if decodes <= 0:
            return False  # how long a gap is isn't known
        alone = self._next(decodes, 0)
        self._long_s = LONG * self._answer_device_s(alone)
        self._prompts = tokens > 0
        entry = self._next(decodes, tokens) if tokens else alone
        self._until_s = self._due_s(entry, now_s + self._launched_in_s(entry))
        return self._until_s - now_s >= LEAST_S

    def _next(self, decodes: int, tokens: int) -> Entry:
        """The answer for the next step, of so many decodes, and tokens of prompts beside them."""
        chooser, query_len = self._state.dispatcher.chooser, self._state.settings.query_len
        found: Entry
        if tokens:
            found = chooser.cell(min(decodes + tokens, self._engine.scheduler.max_num_scheduled_tokens), decodes)
        else:
            decodes = max(decodes, 1)  # all may have been aborted in the wait
            found = chooser.entry(Step(decodes * query_len, decodes, decodes, query_len, query_len))
        return found

    def _launched_in_s(self, entry: Entry) -> float:
        """What the host takes for a step until all of it is launched, where that holds back the tokens before."""
        return 0.0 if entry.whole else self._launching_s.get(entry.label[0], math.inf)

    def _due_s(self, entry: Entry, held_s: float = 0.0) -> float:
        """Until when a step may be begun so that no long gap is longer for it; long ago where none may be put off.

        Args:
            entry: its answer.
            held_s: until when it holds back the running step's tokens without the wait.
        """
        launching_s = self._launched_in_s(entry)
        if launching_s > self._long_s:
            return -math.inf
        given_s = max(self._ends_s, held_s)
        if not _alone(entry):
            given_s = max(given_s, self._from_s + self._long_s)
        return min(self._latest_s, given_s - launching_s - self.margin_s)

    def _incoming(self) -> bool:
        """Whether something has come in lately."""
        if not self._engine.input_queue.empty():
            self.came_s = max(self.came_s, self._now())
            return True
        return self._now() - self.came_s < CAME_S

    def _in_line(self) -> tuple[int, int, int]:
        """Decodes of the next step, tokens of the prompts in line for it, and the places that are left."""
        scheduler = self._engine.scheduler
        running = scheduler.running
        decodes, tokens, places = len(running), 0, scheduler.max_num_running_reqs - len(running)
        if running and (left := left_of(running[-1])) > 1:  # prompts that aren't done stand last
            decodes, tokens = decodes - 1, left
        for queue in queues_of(scheduler):
            places -= len(queue)
            # To go over a queue by priority is to copy and sort it.
            first = islice(queue, _LOOKED_AT) if isinstance(queue, deque | list) else (queue.peek_request(),)
            tokens += sum(request.num_tokens - request.num_computed_tokens for request in first)
        return decodes, tokens, places

    def _waits(self) -> bool:
        """Wait, until something came in; whether to go on once that is taken in."""
        engine = self._engine
        while engine.is_running() and len(engine.batch_queue) == 1:
            came = not engine.input_queue.empty()
            if came:
                self.came_s = max(self.came_s, self._now())
                if not self._look():
                    return False
            left_s = self._until_s - self._now()
            if left_s <= 0 or not self._runs():
                return False
            if came:
                return True
            self._sleep(min(left_s, POLL_S))
        return False

    def _look(self) -> bool:
        """Look at what came in: whether it is for the next step, and until when to wait on.

        Where it would make a gap long all of it is left for the step after, as without the wait. Nobody who comes later
        could be before it, so there is nothing left to wait for.
        """
        incoming = self._engine.input_queue
        with incoming.mutex:
            items = list(incoming.queue)
        kinds = [getattr(kind, "name", "") for kind, _ in items]
        if not _PLAIN.issuperset(kinds):
            return False
        decodes, tokens, _ = self._in_line()
        for kind, (_, given) in zip(kinds, items, strict=True):
            if kind == "ADD":
                tokens += given[0].num_tokens - given[0].num_computed_tokens
        entry = self._next(decodes, tokens)
        due_s = self._due_s(entry)
        longer = self._prompts and self._answer_device_s(entry) > self._long_s
        self._left_out = longer or due_s < min(self._until_s, self._now())
        if self._left_out:
            return False
        self._until_s, self._prompts = min(self._until_s, due_s), tokens > 0
        return True

    def _count(self, waited_s: float) -> None:
        if self._owes:
            self._judge(late=False)
        counters = self._state.counters
        counters.add("deferred_steps")
        counters.add("deferred_left_out", self._left_out)
        self._ms += 1e3 * waited_s
        counters.add("deferred_ms", int(self._ms))
        self._ms %= 1.0

    # What steps tell

    def _device_s(self, step: _Step) -> float:
        """What the device is expected to take for a step."""
        return 1e-6 * step.costs_us * self._ratio.get(step.kind, _UNSEEN)

    def _answer_device_s(self, entry: Entry) -> float:
        """The same for a step with such an answer."""
        costs = self._state.costs
        assert costs is not None  # noqa: S101 - there are no waits without
        return 1e-6 * _device_us(entry, costs, self._state.settings.query_len) * self._ratio.get(_kind(entry), _UNSEEN)

    def _end_s(self, step: _Step) -> float:
        """When the oldest step under way is expected to end: rather too soon."""
        return max(max(step.ahead_s, self._ran_s) + self._device_s(step), step.until_s)

    def _runs(self) -> bool:
        """Whether the device is seen at the oldest step under way; that is noted."""
        queue = self._engine.batch_queue
        if not queue or not self._steps or queue[-1][1] is not self._steps[0].output:
            return False
        step, over, now_s = self._steps[0], _over(queue[-1][0]), self._now()
        if over is False:
            step.ran_s = now_s
        elif over:
            step.over_s = min(step.over_s, now_s)
        return over is False

    def _launching(self) -> None:
        """A step is about to be launched."""
        if self._made is not None:
            self._begun_s = 0.0  # a loop that didn't ask
        self._answer = None
        self._state.dispatcher.told = self._told

    def _told(self, entry: Entry) -> None:
        """The policy has answered, so that the runner is about to launch."""
        self._guarded(self._answered, entry)

    def _answered(self, entry: Entry) -> None:
        self._answer, self._idle = entry, not self._runs()
        self._answer_s = self._now()

    def _launched(self, output: Any) -> None:
        """A step's forward was launched: its expected time, and whether that was in time."""
        runs, now_s, costs, entry = self._runs(), self._now(), self._state.costs, self._answer
        self._state.dispatcher.told = None
        costs_us, ahead_s, first_s = 0.0, self._begun_s, now_s
        if entry is not None:
            ahead_s = self._answer_s
            if costs is not None and costs.measured:
                costs_us = _device_us(entry, costs, self._state.settings.query_len)
            if entry.whole:
                took_s = now_s - ahead_s
                self._prepared_s = max(took_s, self._prepared_s + _FORGOTTEN * (took_s - self._prepared_s))
            else:
                first_s = min(now_s, ahead_s + self._prepared_s)
        if self._owes and not runs:
            before = self._steps[0] if self._steps else None
            # What is launched bit by bit is well under way by now.
            if before is None:
                self._owes = False
            elif self._idle or first_s == now_s or first_s > self._end_s(before):
                self._owes = False
                self._judge(late=True)
        self._made = _Step(output, entry, costs_us, ahead_s, first_s)
        self._made.until_s = self._done_s = now_s
        self._steps.append(self._made)

    def _sampled(self) -> None:
        """So was what samples its tokens."""
        if self._made is None:
            return
        self._runs()
        self._made.until_s = self._now()
        if not self._blocked_s:  # or it had to wait for the tokens before
            self._done_s = self._made.until_s

    def _ended(self, output: Any) -> None:
        """The engine has a step's tokens: what it took, as far as that was seen."""
        if all(each.output is not output for each in self._steps):
            return
        while (step := self._steps.popleft()).output is not output:
            pass  # nobody asked for its tokens
        now_s = self._now()
        expected_s = self._end_s(step)
        step.output = None
        if self._made is None:
            self._begun_s = 0.0  # nothing was launched in this turn
        if step.over_s == math.inf:
            if self._made is not None:
                self._blocked_s = now_s - self._done_s
                step.ran_s = now_s
            step.over_s = now_s
            if self._owes:
                self._owes = False
                self._judge(late=False)
        if step.costs_us:
            self._learn(step)
        # Where its end wasn't seen the next one's start is taken to be when it was expected.
        self._ran_s, self._over_s = max(step.ran_s, min(expected_s, step.over_s)), step.over_s

    def _learn(self, step: _Step) -> None:
        """Bring what such steps take of their costs to what this one did at most, and at least, as far as was seen."""
        expected_s = self._device_s(step)
        most_s = step.over_s - max(step.ahead_s, self._ran_s)
        least_s = step.ran_s - max(step.first_s, self._over_s)
        took_s = max(min(expected_s, most_s), least_s)
        if took_s == expected_s or most_s <= 0:
            return
        was, took = self._ratio.get(step.kind), 1e6 * took_s / step.costs_us
        if was is None:
            self._ratio[step.kind] = took
        else:
            self._ratio[step.kind] = was + (_QUICKER if took < was else _SLOWER) * (took - was)

    def _turned(self) -> None:
        """A turn of the loop is over: what the host took for it."""
        now_s, step, blocked_s = self._now(), self._made, self._blocked_s
        self._made, self._blocked_s = None, 0.0
        if step is None or not step.costs_us or not self._begun_s:
            return
        device_s = self._device_s(step)
        # Beyond a step of the device a host that comes later makes the device wait, and nothing is put off.
        most_s, self._longest_s = max(device_s, self._longest_s), device_s
        needed_s = min((self._done_s if step.whole else step.first_s) - self._begun_s + self._behind_s, most_s)
        self.lead_s = max(needed_s, self.lead_s + _FORGOTTEN * (needed_s - self.lead_s))
        self._learn_launching(step.mode, self._done_s - self._begun_s)
        turn_s = now_s - self._begun_s - blocked_s
        self._behind_s = min(max(self._behind_s + turn_s - device_s, 0.0), most_s)
        self.margin_s = max(_SOONER * self.margin_s, LEAST_MARGIN_S)
        self._seen += 1

    def _learn_launching(self, mode: str | None, took_s: float) -> None:
        """Bring what launches of a mode take to what one took: one pause would be remembered for long."""
        known_s = self._launching_s.get(mode)
        if known_s is None:
            self._once.add(mode)
            known_s = took_s
        elif mode in self._once:
            self._once.remove(mode)
            if 2 * took_s < known_s:
                known_s = took_s  # the first may have compiled
        took_s = min(took_s, 2 * known_s)
        self._launching_s[mode] = max(took_s, known_s + _FADES * (took_s - known_s))

    def _judge(self, *, late: bool) -> None:
        if late:
            self.margin_s = min(max(_LATER * self.margin_s, self.margin_s + _LONGER_S), MOST_MARGIN_S)
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

    def _guarded(self, run: Callable[..., Any], *args: Any) -> Any:
        """Run it; None, and an end to all waits, where it fails."""
        try:
            return run(*args)
        except Exception as error:  # noqa: BLE001 - waiting is an extra, and serving goes on without it
            self._off = True
            self._steps.clear()
            self._state.counters.warn_once(
                "defer_failed",
                f"making steps late failed: {type(error).__name__}: {error}; they are made as early as vLLM does.",
            )
            return None


def _kind(entry: Entry) -> Any:
    return entry.key or entry.step.num_tokens.bit_length()


def _alone(entry: Entry) -> bool:
    """Whether a step has decodes only."""
    return entry.step.num_decodes == entry.step.num_reqs


def _over(future: Any) -> bool | None:
    """Whether the device is through with a step; None where that can't be told.

    vLLM's futures resolve only when they are asked for: what is asked here is the event behind the copy of the tokens.
    """
    output = getattr(future, "async_output", None)
    event = getattr(output, "async_copy_ready_event", None) or getattr(output, "copy_event", None)
    return None if event is None else bool(event.query())


def _device_us(entry: Entry, costs: CostTable, query_len: int) -> float:
    """What costs say of a step's time on the device, noted with its answer."""
    if entry.device_us is None:
        launch = Launch(RowsOf.ALL, entry.key)
        entry.device_us = costs.launch_us(launch, numbers_of(entry.step, query_len))[0]
    return entry.device_us
