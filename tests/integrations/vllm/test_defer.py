"""Steps that are made late: the rule, on a simulated host and device."""

from __future__ import annotations

import gc
import itertools
import logging
import math
import random
import statistics
import weakref
from collections import deque
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from benchmarks.vllm import child
from kpolicy.costs import Curve
from kpolicy.keys import GraphKey
from kpolicy.modes import Part
from kpolicy_vllm import defer
from kpolicy_vllm.config import Config
from kpolicy_vllm.defer import CAME_S, LONG, MOST_MARGIN_S, REST_S, SETTLED, Deferral, why_not
from kpolicy_vllm.state import State
from kpolicy_vllm.steps import Entry
from tests.integrations.vllm.engine_loop import (
    ANY,
    COSTS,
    DECODES_US,
    HOST_S,
    LAUNCH_S,
    PREPARE_S,
    SAMPLE_S,
    UPDATE_S,
    Gaps,
    Kind,
    Machine,
    Plain,
    added,
    deferring,
    gaps_of,
    plain_engine,
    request_of,
    state_of_machine,
    turns,
    vllm_config,
)


def engine_on(machine: Machine, **given: Any) -> tuple[Plain, State, Deferral]:
    engine, state = plain_engine(vllm_config(), machine, **given)
    deferral = deferring(engine, state, machine)
    deferral.came_s = math.inf  # requests come all the time
    return engine, state, deferral


def settled(machine: Machine, steps: int = 100, *, pieces: bool = False, **given: Any) -> tuple[Plain, State, Deferral]:
    """An engine that has run so many steps of decodes, and with `pieces` one of a prompt, as those are run so then."""
    engine, state, deferral = engine_on(machine, **given)
    if pieces:
        engine.model_executor.pieces = ANY
    for turn in turns(engine, steps):
        if pieces and turn == 0:
            machine.input_queue.put(added("prompt", 100, 1))
    return engine, state, deferral


NEEDED_S = HOST_S + LAUNCH_S["full"] + SAMPLE_S
"""For a step of decodes, whose tokens the host then waits for in time"""


# The rule


def test_a_step_is_begun_when_the_host_s_time_for_it_is_left() -> None:
    """So long before the running one ends, and a margin; the device is never without work, nor are steps fewer."""
    machine = Machine()
    engine, state, deferral = settled(machine)
    steps = engine.model_executor.steps
    for _ in turns(engine, 20):
        pass
    sampled_s = steps[-1][0] + SAMPLE_S
    assert machine.device_s - 1e-6 * DECODES_US - sampled_s == pytest.approx(deferral.margin_s, abs=1e-4)
    assert deferral.lead_s == pytest.approx(NEEDED_S, rel=0.01)
    assert state.counters.counts["deferred_late"] == 0
    assert deferral._judged >= state.counters.counts["deferred_steps"] - 1
    assert state.counters.counts["deferred_steps"] >= 120 - SETTLED - 2
    waited_s = 1e-6 * DECODES_US - deferral.lead_s - deferral.margin_s
    assert state.counters.counts["deferred_ms"] == pytest.approx(1e3 * waited_s * 120, rel=0.25)
    assert machine.idle_s < 3e-3  # before the first
    assert steps[-1][0] == pytest.approx(1e-6 * DECODES_US * 119, rel=0.01)


def test_who_arrives_meanwhile_is_in_the_next_step() -> None:
    """Without the wait a request that comes in the first half of a step waits for the one after next."""

    def step_of(late: bool) -> int:
        machine = Machine()
        engine, state = plain_engine(vllm_config(), machine)
        engine.model_executor.pieces = ANY
        if late:
            deferring(engine, state, machine).came_s = math.inf
        for turn in turns(engine, 60):
            if turn == 0:
                machine.input_queue.put(added("before", 100, 1))
        # In the first half of the step that runs once this one's tokens are there.
        begun_s, before = machine.time_s, len(engine.model_executor.steps)
        machine.arrivals.append((begun_s + 0.4e-6 * DECODES_US, added("new", 100)))
        for _ in turns(engine, 4):
            pass
        return next(
            place for place, (_, output) in enumerate(engine.model_executor.steps[before:])
            if "new" in output.num_scheduled_tokens
        )  # fmt: skip

    assert (step_of(late=False), step_of(late=True)) == (1, 0)


@pytest.mark.parametrize("slower", [0.7, 1.0, 1.8])
def test_what_steps_take_is_learned(slower: float) -> None:
    """Costs leave out what attention reads, and are of another moment: steps of its kind tell."""
    machine = Machine(slower=slower, noise=0.01)
    engine, state, deferral = settled(machine, 400)
    counts = state.counters.counts
    assert counts["deferred_late"] <= 0.03 * counts["deferred_steps"]
    assert machine.idle_s < 0.005 * machine.time_s
    assert counts["deferred_ms"] > 0.6 * 400 * (1e-3 * DECODES_US * slower - 1e3 * NEEDED_S - 1)
    assert deferral.margin_s < 2e-3
    assert engine is not None


def test_late_ones_are_one_in_a_hundred_where_the_host_is_unsteady() -> None:
    """The margin grows at once, and shrinks slowly; what is late costs next to nothing."""
    machine = Machine(noise=0.02)
    engine, state, _ = settled(machine)
    uneven, execute = random.Random(2), engine.model_executor.execute_model  # noqa: S311

    def slow_now_and_then(output: Any, non_block: bool = False) -> Any:
        machine.work(uneven.choice([0.0] * 40 + [1e-3]))
        return execute(output, non_block)

    engine.model_executor.execute_model = slow_now_and_then
    before_s, idle_s = machine.time_s, machine.idle_s
    late, steps = (state.counters.counts[name] for name in ("deferred_late", "deferred_steps"))
    for _ in turns(engine, 3000):
        pass
    assert state.counters.counts["deferred_late"] - late <= 0.02 * (state.counters.counts["deferred_steps"] - steps)
    assert machine.idle_s - idle_s < 0.002 * (machine.time_s - before_s)


def test_it_rests_where_many_are_late(caplog: pytest.LogCaptureFixture) -> None:
    """For a while, then it tries again: said once, and counted."""
    machine = Machine()
    engine, state, deferral = settled(machine)
    counts = state.counters.counts
    for times in (1, 2):
        with caplog.at_level(logging.WARNING):
            for turn in range(64):
                deferral._judge(late=turn % 6 == 0)
        assert counts["deferred_late_often"] == times
        assert deferral.margin_s == MOST_MARGIN_S
        deferral.margin_s, began_s, before = 1e-3, machine.time_s, counts["deferred_steps"]
        while machine.time_s < began_s + 0.98 * REST_S:
            for _ in turns(engine, 1):
                pass
        assert counts["deferred_steps"] == before
        for _ in turns(engine, 100):
            pass
        assert counts["deferred_steps"] > before + 50
    assert len([each for each in caplog.records if "launched late" in each.message]) == 1


def test_a_margin_that_leaves_no_wait_shrinks() -> None:
    """What was late for a while isn't for ever."""
    machine = Machine()
    engine, state, deferral = settled(machine)
    deferral.margin_s, before = MOST_MARGIN_S, state.counters.counts["deferred_steps"]
    for _ in turns(engine, 800):
        pass
    assert 0 < state.counters.counts["deferred_steps"] - before < 700


def test_a_step_that_ends_early_ends_the_wait() -> None:
    """The device has nothing to do then; that is late, and the margin grows."""
    machine = Machine()
    engine, state, deferral = settled(machine)
    margin_s = deferral.margin_s
    machine.slower = 0.5
    for _ in turns(engine, 1):
        pass
    ended_s = machine.device_s
    engine.process()
    assert machine.time_s <= ended_s + 0.3e-3
    engine.step()
    assert state.counters.counts["deferred_late"] == 1
    assert deferral.margin_s >= 0.98 * margin_s + 0.5e-3


# Prompts, whose steps run in pieces or eagerly


def served(
    machine: Machine, *, every: int, late: bool = True, pieces: bool = False, tokens: int = 300, steps: int = 600
) -> tuple[float, State, Deferral | None]:
    """Steps a second, with a prompt in one of so many."""
    engine, state = plain_engine(vllm_config(), machine)
    engine.model_executor.pieces = pieces and ANY
    deferral = deferring(engine, state, machine) if late else None
    for turn in turns(engine, steps):
        if turn % every == 0:
            machine.input_queue.put(added(f"p{turn}", tokens))
            engine.running = engine.running[:8]
    return steps / machine.time_s, state, deferral


def as_quick(least: float = 0.998, load: Any = None, **machine: Any) -> tuple[State, Deferral]:
    """What the host learned, where steps are as many a second as without waiting."""
    stock, _, _ = served(Machine(noise=0.01, **machine), late=False, **load)
    own, state, deferral = served(Machine(noise=0.01, **machine), **load)
    assert deferral is not None
    assert not state.counters.counts["defer_failed"]
    assert own > least * stock
    return state, deferral


def launching(times: float) -> dict[str, float]:
    return {kind: took_s * (1.0 if kind == "full" else times) for kind, took_s in LAUNCH_S.items()}


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("every", [1, 2, 5])
@pytest.mark.parametrize("prompts", [0.7, 0.9, 1.0])
@pytest.mark.parametrize("rest_s", [0.5e-3, 1e-3, 1.5e-3])
def test_launches_that_hide_behind_the_step_before_still_do(
    pieces: bool, every: int, prompts: float, rest_s: float
) -> None:
    """The host takes 12 ms for an eager one, and up to 3 for what follows: no wait spends what hides those."""
    load = {"every": every, "pieces": pieces}
    state, deferral = as_quick(load=load, prompts=prompts, sample_s=rest_s, update_s=rest_s)
    if pieces:
        assert state.counters.counts["deferred_steps"] > 250
        assert deferral.lead_s < NEEDED_S + 2 * rest_s
        assert state.counters.counts["deferred_late"] <= 0.02 * state.counters.counts["deferred_steps"]


@pytest.mark.parametrize("times", [0.5, 0.8, 1.2, 1.5])
@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("every", [2, 5, 20])
def test_what_launching_takes_is_measured(times: float, pieces: bool, every: int) -> None:
    """Costs may have it otherwise."""
    state, _ = as_quick(load={"every": every, "pieces": pieces}, launch_s=launching(times))
    if pieces or times == 0.5:
        assert state.counters.counts["deferred_steps"] > 250


@pytest.mark.parametrize(("times", "prompts"), [(0.8, 0.9), (0.8, 1.0), (1.0, 0.9)])
@pytest.mark.parametrize("update_s", [2e-3, 3e-3])
def test_the_host_s_whole_turn_counts(times: float, prompts: float, update_s: float) -> None:
    """Taking tokens in too: no step is late before that is found out."""
    state, _ = as_quick(
        load={"every": 5}, prompts=prompts, launch_s=launching(times), sample_s=0.3e-3, update_s=update_s
    )
    assert not state.counters.counts["deferred_late"]


def test_what_the_device_waits_for_is_not_what_a_step_takes() -> None:
    """A step that ends with its last launch tells nothing slower, or the host would seem to be quick enough."""
    _, deferral = as_quick(load={"every": 5}, prompts=0.3)
    assert {kind: ratio for kind, ratio in deferral._ratio.items() if isinstance(kind, int) and ratio > 0.9} == {}


def test_a_wait_that_ended_late_is_the_host_s() -> None:
    """As where what came in shortly before took long to take in."""
    machine = Machine()
    engine, _, deferral = settled(machine)
    due_s = machine.device_s - deferral.lead_s - deferral.margin_s
    machine.arrivals.append((due_s - 0.5e-3, (Kind.ABORT, None)))

    def take_in() -> None:
        if not machine.input_queue.empty():
            machine.work(2e-3)
            engine._process_input_queue()

    deferral.process(take_in)
    engine.step()
    engine.process()
    assert deferral.lead_s > NEEDED_S + 1.2e-3


@pytest.mark.parametrize("pieces", [False, True])
def test_the_first_launch_of_a_step_comes_after_the_answer(pieces: bool) -> None:
    """Runners prepare a step in between: as long as those of whole graphs took, which are launched at once."""
    machine = Machine()
    engine, _, deferral = settled(machine, 600)
    engine.model_executor.pieces = pieces and ANY
    machine.input_queue.put(added("new", 300))
    for _ in turns(engine, 1):
        pass
    step = deferral._steps[-1]
    assert step.first_s - step.ahead_s == pytest.approx(PREPARE_S + LAUNCH_S["full"], rel=0.02)


@pytest.mark.parametrize("every", [50, 100, 200])
@pytest.mark.parametrize("prompts", [0.7, 0.9])
def test_prompts_that_are_rare_cost_little(every: int, prompts: float) -> None:
    """What the host needs for one is forgotten by the next, at worst."""
    as_quick(0.995, load={"every": every, "steps": 2000}, prompts=prompts)


@pytest.mark.parametrize("prompts", [0.6, 0.8, 1.3])
@pytest.mark.parametrize(("pieces", "every", "times"), [(True, 1, 1.0), (True, 3, 1.0), (False, 3, 0.5)])
def test_what_steps_with_prompts_take_is_learned(prompts: float, pieces: bool, every: int, times: float) -> None:
    """Where the host waits too, and its launches end after the step before."""
    load = {"every": every, "pieces": pieces}
    _, deferral = as_quick(load=load, prompts=prompts, launch_s=launching(times))
    found = [ratio for kind, ratio in deferral._ratio.items() if getattr(kind, "part", None) is not Part.FULL]
    assert found == [pytest.approx(prompts, abs=0.12)]


@pytest.mark.parametrize("pieces", [False, True])
def test_a_launch_bit_by_bit_is_late_where_the_device_had_nothing_to_do(pieces: bool) -> None:
    """Though it has long work once the launch is over."""
    machine = Machine(launch_s=launching(0.5))
    engine, state, deferral = settled(machine)
    engine.model_executor.pieces = pieces and ANY
    machine.input_queue.put(added("before", 300, 1))
    for _ in turns(engine, 100):
        pass
    margin_s, idle_s = deferral.margin_s, machine.idle_s
    assert not state.counters.counts["deferred_late"]
    machine.slower = 0.5
    for _ in turns(engine, 1):
        pass
    machine.arrivals.append((machine.time_s + 1e-3, added("new", 300)))
    for _ in turns(engine, 1):
        pass
    assert "new" in engine.model_executor.steps[-1][1].num_scheduled_tokens
    assert machine.idle_s > idle_s + 1e-3
    assert state.counters.counts["deferred_late"] == 1
    assert deferral.margin_s > 1.4 * margin_s


def test_the_step_after_is_late_where_a_wait_put_that_off() -> None:
    """Though the device was still at work when the one that waited was launched."""
    machine = Machine(launch_s=launching(1.5), prompts=0.3)
    engine, state, _ = settled(machine, pieces=True)
    machine.arrivals.append((machine.time_s + 1e-3, added("new", 100)))
    idle_s = machine.idle_s
    for _ in turns(engine, 1):
        pass
    assert machine.idle_s == idle_s
    assert state.counters.counts["deferred_late"] == 0
    for _ in turns(engine, 1):
        pass
    assert machine.idle_s > idle_s
    assert state.counters.counts["deferred_late"] == 1


def test_a_step_ends_after_its_launches() -> None:
    """Whatever the device takes for it."""
    machine = Machine(prompts=0.2, launch_s=LAUNCH_S | {"eager": 20e-3})
    engine, _, deferral = settled(machine)
    machine.input_queue.put(added("new", 10))
    engine.process()
    engine.step()
    launched = deferral._steps[-1]
    assert deferral._device_s(launched) == pytest.approx(0.9e-6 * launched.costs_us)  # none like it was seen
    assert deferral._end_s(launched) == launched.until_s == engine.model_executor.steps[-1][0] + SAMPLE_S


def test_there_is_no_wait_where_the_host_takes_longer_than_the_device() -> None:
    """Its whole turn counts, not only until a step is launched."""
    machine = Machine(update_s=6e-3)
    engine, state, _ = settled(machine, 300)
    assert not state.counters.counts["deferred_steps"]
    machine.update_s = 1e-3
    for _ in turns(engine, 200):
        pass
    before = state.counters.counts["deferred_steps"]
    assert before > 50
    machine.update_s = 6e-3
    for _ in turns(engine, 200):
        pass
    assert state.counters.counts["deferred_steps"] <= before + 3


def test_tokens_are_looked_for_in_time() -> None:
    """Sampling is launched before the running step ends, so that its tokens aren't held back."""
    machine = Machine(sample_s=2e-3)
    engine, state, _ = settled(machine)
    late = []
    original = engine.model_executor.sample_tokens

    def sample_tokens(*given: Any, **named: Any) -> Any:
        ends_s = engine.batch_queue[-1][0].async_output.ends_s
        result = original(*given, **named)
        late.append(machine.time_s - ends_s)
        return result

    engine.model_executor.sample_tokens = sample_tokens
    for _ in turns(engine, 50):
        pass
    assert max(late) < 0
    assert state.counters.counts["deferred_steps"] > 100


def test_a_quicker_step_counts_for_more_than_a_slower_one() -> None:
    """Steps that end sooner than expected are late ones."""
    quicker, slower = Machine(), Machine()
    for machine, slow in ((quicker, 0.6), (slower, 1.4)):
        engine, _, deferral = settled(machine)
        machine.slower = slow
        for _ in turns(engine, 6):
            pass
        (ratio,) = deferral._ratio.values()
        assert (abs(ratio - slow) < 0.05) is (slow == 0.6)
        for _ in turns(engine, 40):
            pass
        (ratio,) = deferral._ratio.values()
        assert ratio == pytest.approx(slow, abs=0.05)


# What ends a wait, and where there is none


@pytest.mark.parametrize(("kind", "waits"), [(Kind.UTILITY, False), (Kind.ABORT, True), (Kind.ADD, True)])
def test_other_than_requests_and_aborts_end_the_wait(kind: Kind, waits: bool) -> None:
    """A call that pauses, sleeps or changes weights is handled as soon as the loop comes to it."""
    machine = Machine()
    engine, _, deferral = settled(machine, pieces=True)
    comes_s, begun = machine.time_s + 1e-3, len(machine.slept)
    machine.arrivals.append((comes_s, (kind, (request_of("new", 10), 0))))
    engine.process()
    handled_s, what = engine.handled[-1]
    assert what is kind
    assert handled_s - comes_s < 0.3e-3
    assert (machine.time_s > comes_s + 2e-3) is waits
    assert len(machine.slept) > begun
    assert deferral.margin_s > 0


def test_requests_that_never_stop_coming_dont_keep_it_waiting() -> None:
    """Each is taken in as it comes, until the step is due."""
    machine = Machine()
    engine, state, deferral = settled(machine, pieces=True)
    taken, ends_s = [0], machine.time_s + 1e-6 * DECODES_US

    def take_in() -> None:
        taken[0] += 1
        machine.work(1e-4)
        machine.input_queue.put(added(str(taken), 1))

    machine.input_queue.put(added("first", 1))
    deferral.process(take_in)
    assert taken[0] > 20
    assert machine.time_s < ends_s - deferral.lead_s
    assert state.counters.counts["defer_failed"] == 0
    assert engine.batch_queue


def test_there_are_waits_only_while_requests_come() -> None:
    """Who generates offline gains nothing by them."""
    machine = Machine()
    engine, state, deferral = settled(machine)
    deferral.came_s, counts = machine.time_s, state.counters.counts
    before = counts["deferred_steps"]
    for _ in turns(engine, int(3e6 / DECODES_US)):
        pass
    assert counts["deferred_steps"] - before == pytest.approx(1e6 * CAME_S / DECODES_US, abs=2)
    before = counts["deferred_steps"]
    machine.input_queue.put(added("new", 1))
    for _ in turns(engine, 10):
        pass
    assert counts["deferred_steps"] >= before + 8


@pytest.mark.parametrize("where", ["update_s", "sample_s", "launch"])
@pytest.mark.parametrize("pause_s", [0.05, 1.0, 5.0])
def test_one_pause_of_the_host_ends_waits_for_a_while(where: str, pause_s: float) -> None:
    """For some tens of steps, however long it was."""
    machine = Machine(launch_s=dict(LAUNCH_S))
    engine, state, _ = settled(machine)
    if where == "launch":
        machine.launch_s["full"] += pause_s
    else:
        setattr(machine, where, getattr(machine, where) + pause_s)
    for _ in turns(engine, 1):
        pass
    machine.launch_s, machine.sample_s, machine.update_s = dict(LAUNCH_S), SAMPLE_S, UPDATE_S
    before = state.counters.counts["deferred_steps"]
    for _ in turns(engine, 80):
        pass
    assert state.counters.counts["deferred_steps"] > before + 15


def test_an_engine_that_was_idle_waits_at_once() -> None:
    """The time without requests isn't the host's."""
    machine = Machine()
    engine, state, deferral = settled(machine)
    lead_s, before = deferral.lead_s, state.counters.counts["deferred_steps"]
    for _ in range(3):
        future, output, _ = engine.batch_queue.pop()
        future.result()
        engine.update_from_output(output, None)
        deferral.process(lambda: machine.work(3.0))
        for _ in range(8):
            engine.step()
            engine.process()
    assert deferral.lead_s == pytest.approx(lead_s, rel=0.01)
    assert state.counters.counts["deferred_steps"] >= before + 15
    assert not state.counters.counts["deferred_late"]


def test_a_loop_that_does_not_ask_teaches_nothing() -> None:
    """Steps that are made without the wait's method, as the benchmark's greedy ones."""
    machine = Machine()
    engine, state, deferral = engine_on(machine)
    for _ in range(50):
        engine.step()
    assert (deferral.lead_s, deferral._seen) == (0.0, 0)
    for _ in turns(engine, 100):
        pass
    assert deferral.lead_s == pytest.approx(NEEDED_S, rel=0.2)
    before = state.counters.counts["deferred_steps"]
    assert before > 60
    for _ in range(50):
        machine.work(0.1)
        engine.step()
    engine.process()
    assert deferral.lead_s == pytest.approx(NEEDED_S, rel=0.2)


def test_nothing_of_a_step_is_kept_once_its_tokens_are_there() -> None:
    """vLLM's step refers to requests' prompts."""
    machine = Machine()
    engine, _, deferral = settled(machine)
    future, output, _ = engine.batch_queue.pop()
    future.result()
    engine.update_from_output(output, None)
    kept = weakref.ref(output)
    engine.model_executor.steps.clear()
    engine.model_executor._tokens = None
    del future, output
    gc.collect()
    assert kept() is None
    assert deferral.lead_s


def test_a_step_whose_tokens_nobody_asks_for_is_forgotten() -> None:
    """What came of it isn't known, and those after it are waited behind as ever."""
    machine = Machine()
    engine, state, deferral = settled(machine)
    engine.batch_queue.clear()
    before = state.counters.counts["deferred_steps"]
    for _ in turns(engine, 30):
        pass
    assert len(deferral._steps) == 1
    assert state.counters.counts["deferred_steps"] > before + 20
    assert not state.counters.counts["defer_failed"]


def test_a_queue_by_priority_is_not_gone_over() -> None:
    """To iterate it is to copy and sort it."""

    class Heap:
        def __len__(self) -> int:
            return 3

        def peek_request(self) -> Any:
            return request_of("first", self.first)

        first = 100

    machine = Machine()
    engine, _, deferral = settled(machine)
    engine.waiting = Heap()
    assert deferral._in_line() == (8, 100, 64 - 8 - 3)
    engine.waiting = deque(request_of(str(i), 1000) for i in range(20))
    assert deferral._in_line() == (8, 8000, 64 - 8 - 20)


def test_a_shutdown_ends_the_wait_and_none_begins() -> None:
    """What is under way is served as vLLM serves it."""
    machine = Machine()
    engine, _, _ = settled(machine)
    engine.stopping, begun_s = True, machine.time_s
    engine.process()
    assert machine.time_s == begun_s


def test_it_does_not_wait_where_none_who_comes_could_be_in_the_step() -> None:
    """Prompts in line fill the step, or every place is taken."""
    machine = Machine()
    engine, state, _ = settled(machine, pieces=True)

    def waited() -> bool:
        before = state.counters.counts["deferred_steps"]
        engine.process()
        now = state.counters.counts["deferred_steps"]
        engine.step()
        return now > before

    assert waited()
    engine.waiting = [request_of("a", 3000), request_of("b", 2000)]
    assert not waited()
    engine.running = engine.running[:8]
    for _ in turns(engine, 3):
        pass
    engine.waiting = [request_of("a", 500)]
    assert waited()
    engine.running = [request_of(str(i), 1) for i in range(64)]
    for each in engine.running:
        each.num_computed_tokens = 1
    assert not waited()


@pytest.mark.parametrize(
    "case", ["no costs", "made-up costs", "no answer", "a future of another kind", "fewer steps", "short steps"]
)
def test_it_does_not_wait_for_what_it_knows_nothing_of(case: str) -> None:
    """Steps whose end can't be expected, or seen, are followed as vLLM follows them."""
    machine = Machine()
    if case == "short steps":
        machine.slower = 0.2
    engine, state, _ = engine_on(machine)
    steps = 60
    if case == "no costs":
        state.costs = None
    elif case == "made-up costs":
        state.costs = attrs.evolve(COSTS, measured=False)
    elif case == "fewer steps":
        steps = SETTLED
    elif case == "a future of another kind":
        engine.model_executor._future = lambda tokens, _: SimpleNamespace(result=tokens.get_output)
    elif case == "no answer":
        engine.model_executor.execute_model.__wrapped__.__self__.answers = False
    for _ in turns(engine, steps):
        pass
    if case == "short steps":
        before = state.counters.counts["deferred_steps"]
        for _ in turns(engine, 100):
            pass
        assert state.counters.counts["deferred_steps"] <= before + 2
    else:
        assert not state.counters.counts["deferred_steps"]
        assert not machine.slept


@pytest.mark.parametrize(
    "broken",
    [
        "_due_s",
        "_waits",
        "_launching",
        "_answered",
        "_launched",
        "_sampled",
        "_ended",
        "_turned",
        "_count",
        "_look",
        "_next",
    ],
)
def test_an_error_ends_it_and_not_serving(monkeypatch: Any, caplog: pytest.LogCaptureFixture, broken: str) -> None:
    """One warning, and the loop goes on as vLLM's."""
    machine = Machine()
    engine, state, deferral = settled(machine)

    def failing(*_: Any) -> Any:
        raise ZeroDivisionError("made up")

    monkeypatch.setattr(deferral, broken, failing)
    machine.arrivals.append((machine.time_s + 1e-3, added("new", 10)))
    with caplog.at_level(logging.WARNING):
        for _ in turns(engine, 10):
            pass
    assert state.counters.counts["defer_failed"] == 1
    assert len(caplog.records) == 1
    assert engine.running[-1].request_id == "new"
    before = len(machine.slept)
    for _ in turns(engine, 10):
        pass
    assert len(machine.slept) == before


def test_an_error_of_vllm_s_own_is_its_own() -> None:
    """What its input method raises in a wait isn't swallowed: an executor that failed ends the engine."""
    machine = Machine()
    engine, state, _ = settled(machine)

    def dead() -> None:
        raise RuntimeError("Executor failed.")

    engine._process_input_queue = dead  # type: ignore[method-assign]
    machine.arrivals.append((machine.time_s + 1e-3, added("new", 10)))
    with pytest.raises(RuntimeError, match="Executor failed"):
        engine.process()
    assert not state.counters.counts["defer_failed"]


@pytest.mark.parametrize(
    ("changed", "given", "reason"),
    [
        ({}, {}, None),
        ({"distributed_executor_backend": "mp"}, {}, "processes of their own"),
        ({"world_size": 2, "distributed_executor_backend": "external_launcher"}, {}, "schedule alike"),
        ({"data_parallel_size": 2}, {}, "data-parallel"),
        ({"async_scheduling": False}, {}, "asynchronous"),
        ({"pipeline_parallel_size": 2}, {}, "two steps"),
        ({"max_concurrent_batches": 3}, {}, "two steps"),
        ({"speculative_config": SimpleNamespace(num_speculative_tokens=2)}, {}, "drafts"),
        ({"kv_transfer_config": object()}, {}, "connector"),
        ({"ec_transfer_config": object()}, {}, "connector"),
        ({}, {"policy": "full_and_piecewise"}, "reads no costs"),
        ({}, {"split": True}, "split"),
    ],
)
def test_where_it_cannot_be_had_it_says_why(changed: Any, given: Any, reason: str | None) -> None:
    """Everything else of vLLM's is as without it."""
    config = vllm_config(**changed)
    found = why_not(config, state_of_machine(config, **given))
    assert found is None if reason is None else reason in str(found)


@pytest.mark.parametrize(("setting", "warned"), [(True, 1), (False, 0)])
def test_only_who_asks_for_it_is_told_that_it_cannot_be_had(setting: bool, warned: int) -> None:
    state = state_of_machine(vllm_config(), defer=setting)
    defer.attach(None, vllm_config(data_parallel_size=2), state)
    assert state.counters.counts["not_deferred"] == warned


def test_the_setting_is_read() -> None:
    """Steps are made as vLLM makes them by default."""
    assert Config().defer is False
    assert Config.load({"kpolicy": {"defer": True}}, {}).defer is True  # type: ignore[union-attr]


def test_a_loop_of_one_s_own_waits_as_the_engine_core_would(monkeypatch: Any) -> None:
    """The benchmark's: what has come by then is added, and stock is left alone."""
    machine = Machine()
    engine, state = plain_engine(vllm_config(), machine)
    core = SimpleNamespace(
        vllm_config=engine.vllm_config, scheduler=engine, model_executor=engine.model_executor,
        batch_queue=engine.batch_queue, batch_queue_size=2,
    )  # fmt: skip
    monkeypatch.setattr(defer, "state_of", lambda _: state)
    incoming = child.Incoming()
    for additional in ({}, {"kpolicy": False}, None):
        engine.vllm_config.additional_config = additional
        assert child.waiting(core, incoming) is None
    engine.vllm_config.additional_config = {"kpolicy": {}}
    waits = child.waiting(core, incoming)
    waits._now, waits._sleep, waits.came_s = machine.now, machine.sleep, math.inf
    taken: list[float] = []
    for _ in range(60):
        waits.process(lambda: None)
        engine.step()
    comes_s = machine.time_s + 1e-3
    incoming.due = lambda: [100] if not taken and machine.time_s >= comes_s else []

    def take_in() -> None:
        if incoming.due():
            taken.append(machine.time_s)

    waits.process(take_in)  # how long such a step is launched isn't known yet
    assert not taken
    assert not incoming.empty()
    engine.step()
    begun_s = machine.time_s
    waits.process(take_in)
    assert taken == [begun_s]
    engine.step()
    taken.clear()
    waits._launching_s["eager"] = 5e-3
    comes_s = machine.time_s + 1e-3
    waits.process(take_in)
    assert taken == [pytest.approx(comes_s, abs=3e-4)]
    assert machine.time_s > comes_s + 2e-3


# The gaps between tokens

MEASURED = attrs.evolve(
    COSTS, full=Curve((1, 64), (6000.0, 6000.0)), piecewise=Curve((1, 512), (6000.0, 11100.0)),
    eager=Curve((1, 8192), (6000.0, 6000.0 + 15.0 * 8191)),
)  # fmt: skip
"""Steps as an H200 has them for a Llama-3.1-8B, about: decodes 6 ms, prompts of 300 tokens 9, of 1,200 24 and eager"""


def arrivals_of(seed: int, seconds: float, rate: float, prompts: tuple[int, ...]) -> list[tuple[float, str, int, int]]:
    """When a request comes, its name, its tokens and those that it is to have: one to three at a time."""
    drawn, found, due_s = random.Random(seed), list[tuple[float, str, int, int]](), 0.5  # noqa: S311
    while due_s < seconds:
        due_s += drawn.expovariate(rate / 1.3)
        for _ in range(drawn.choice([1] * 8 + [2, 3])):
            found.append((due_s, f"r{len(found)}", drawn.choice(prompts), 1 + int(drawn.expovariate(1 / 150))))
    return found


def measured_load(
    *, late: bool, seed: int = 1, seconds: float = 240.0, rate: float = 11.0, prompts: tuple[int, ...] = (300, 1200),
    **machine: Any,
) -> tuple[Gaps, State]:  # fmt: skip
    """A load like the one on which waits made the slowest gaps longer."""
    simulated = Machine(**{"noise": 0.02, "launch_s": LAUNCH_S | {"eager": 14e-3}} | machine)
    engine, state = plain_engine(vllm_config(), simulated, decodes=4, costs=MEASURED)
    engine.model_executor.pieces = 512
    if late:
        deferring(engine, state, simulated)
    came_s = {}
    for due_s, name, tokens, left in arrivals_of(seed, seconds, rate, prompts):
        came_s[name] = due_s
        simulated.arrivals.append((due_s, added(name, tokens, left)))
    while simulated.arrivals:
        for _ in turns(engine, 1):
            pass
    return gaps_of(engine, came_s), state


@pytest.mark.parametrize("seed", [1, 2])
def test_first_tokens_come_sooner_and_the_slowest_gaps_no_later(seed: int) -> None:
    """With eager steps taken in until the last moment these gaps were 5% longer: their launching held tokens back."""
    (stock, _), (own, state) = (measured_load(late=late, seed=seed, seconds=120.0) for late in (False, True))
    assert own.slowest_s(0.02) < 1.01 * stock.slowest_s(0.02)
    assert own.p99_s < 1.01 * stock.p99_s
    assert statistics.fmean(own.first_s) < 0.98 * statistics.fmean(stock.first_s)
    assert own.steps / own.time_s > 0.999 * stock.steps / stock.time_s
    counts = state.counters.counts
    assert counts["deferred_steps"] > 0.8 * own.steps
    assert counts["deferred_late"] <= 0.01 * counts["deferred_steps"]
    assert counts["deferred_left_out"] > 100


@pytest.mark.parametrize(
    "load",
    [
        {"prompts": (300, 1000, 2000)},
        {"prompts": (200, 300)},
        {"prompts": (1200,)},
        {"prompts": (100, 300, 700, 1500), "slower": 1.5},
        {"rate": 20.0},
        {"launch_s": {"full": 1e-3, "piecewise": 6e-3, "eager": 20e-3}},
        {"launch_s": {"full": 0.3e-3, "piecewise": 1.5e-3, "eager": 4e-3}},
    ],
)
def test_gaps_are_as_short_under_other_loads(load: Any) -> None:
    """And first tokens come as soon, at least."""
    (stock, _), (own, _) = (measured_load(late=late, seconds=60.0, **load) for late in (False, True))
    assert own.slowest_s(0.02) < 1.01 * stock.slowest_s(0.02)
    assert own.slowest_s(0.01) < 1.01 * stock.slowest_s(0.01)
    assert statistics.fmean(own.first_s) < 1.001 * statistics.fmean(stock.first_s)
    assert own.steps / own.time_s > 0.999 * stock.steps / stock.time_s


def taught(**given: Any) -> tuple[Plain, State, Deferral]:
    """An engine as in `measured_load` that has seen a step of each kind."""
    machine = Machine(launch_s=LAUNCH_S | {"eager": 14e-3})
    engine, state = plain_engine(vllm_config(), machine, costs=MEASURED, **given)
    engine.model_executor.pieces = 512
    deferral = deferring(engine, state, machine)
    deferral.came_s = math.inf
    for turn in turns(engine, 200):
        if turn in (5, 10):
            machine.input_queue.put(added(str(turn), 300 if turn == 5 else 1200, 1))
    return engine, state, deferral


def steps_with(engine: Plain, *names: str) -> list[int]:
    """In which of the last steps each is first, the one that ends the next wait being 0."""
    before = len(engine.model_executor.steps)
    for _ in turns(engine, 5):
        pass
    last = [output.num_scheduled_tokens for _, output in engine.model_executor.steps[before:]]
    return [next(place for place, tokens in enumerate(last) if name in tokens) for name in names]


@pytest.mark.parametrize("later_s", [0.0, 1e-3])
def test_a_prompt_whose_step_is_long_to_launch_is_left_for_the_step_after(later_s: float) -> None:
    """As without the wait, which ends there: who comes later can't be before it, and who is seen with it is left too.

    All are taken in first of all after the step.
    """
    engine, state, _ = taught()
    machine, ends_s = engine.machine, engine.machine.device_s
    comes_s = machine.time_s + 1e-3
    machine.arrivals += [(comes_s, added("long", 1200)), (comes_s + later_s, added("short", 300))]
    engine.process()
    assert comes_s <= machine.time_s < comes_s + 0.3e-3 < ends_s - NEEDED_S - 1e-3
    assert not engine.waiting
    assert state.counters.counts["deferred_left_out"] == 1
    engine.step()
    assert engine.handed[-1][0] == pytest.approx(ends_s + UPDATE_S, abs=1e-6)  # the tokens weren't held back
    begun_s = machine.time_s
    engine.process()
    assert [each.request_id for each in engine.waiting] == ["long", "short"]
    assert machine.time_s == begun_s  # a step that's long to launch isn't put off


def test_a_short_prompt_is_taken_in_before_a_long_one_that_comes_later() -> None:
    """Each is looked at as it comes."""
    engine, _, _ = taught()
    machine = engine.machine
    machine.arrivals += [(machine.time_s + 0.5e-3, added("short", 300)), (machine.time_s + 1e-3, added("long", 1200))]
    assert steps_with(engine, "short", "long") == [0, 1]


def test_a_short_prompt_holds_tokens_back_by_half_a_step_of_decodes_at_most() -> None:
    """Its step is the longer one as it is, and its gap is shorter for that."""
    engine, _, _ = taught()
    machine, began_s = engine.machine, engine.machine.time_s
    machine.arrivals.append((began_s + 2.5e-3, added("short", 300)))
    assert steps_with(engine, "short") == [0]
    gaps_s = [b - a for (a, _), (b, _) in itertools.pairwise(engine.handed[-7:])]
    assert 6.2e-3 < max(gaps_s) < LONG * 6e-3 + 1e-4


def sized(graphs: dict[str, tuple[int, ...]]) -> tuple[Plain, State, Deferral]:
    """An engine of 40 requests that decode, in the smallest of its graphs that holds them, 8 rows 2 ms and 64 rows 8.

    It has seen steps of decodes, and launched one in pieces.
    """
    costs = attrs.evolve(COSTS, full=Curve((8, 64), (2000.0, 8000.0)))
    machine = Machine()
    engine, state = plain_engine(vllm_config(), machine, decodes=40, costs=costs)
    engine.model_executor.pieces = ANY
    original = engine.model_executor.entry

    def entry(step: Any) -> Entry:
        if not step.query_len:
            return original(step)
        rows = min(each for each in graphs["captured"] if each >= step.num_reqs)
        return Entry(step, None, GraphKey(Part.FULL, rows, rows, query_len=1), None, "cheapest_measured")

    engine.model_executor.entry = entry
    deferral = deferring(engine, state, machine)
    deferral.came_s = math.inf
    for turn in turns(engine, 100):
        if turn == 5:
            machine.input_queue.put(added("prompt", 100, 1))
    return engine, state, deferral


def prompts_all_the_time(engine: Plain, state: State, steps: int = 20) -> int:
    """How many of so many steps were put off that all have a prompt."""
    before = state.counters.counts["deferred_steps"]
    for turn in range(steps):
        engine.waiting.append(request_of(f"p{turn}", 100, 1))
        engine.process()
        engine.step()
    return state.counters.counts["deferred_steps"] - before


def test_a_step_of_decodes_has_as_many_as_there_are_now() -> None:
    """Under steady prompts the last one without any was of another load: where few decode now, a gap is long sooner."""
    engine, state, deferral = sized({"captured": (8, 64)})
    assert prompts_all_the_time(engine, state) > 15
    assert deferral._long_s == pytest.approx(LONG * 8e-3, rel=0.02)
    engine.running = engine.running[:8]
    assert prompts_all_the_time(engine, state) <= 1
    assert deferral._long_s == pytest.approx(LONG * 0.9 * 2e-3)  # none like it was seen


def test_a_step_of_decodes_runs_in_a_graph_that_is_there() -> None:
    """Answers are other ones once graphs or costs have changed."""
    graphs: dict[str, tuple[int, ...]] = {"captured": (48, 64)}
    engine, state, deferral = sized(graphs)
    graphs["captured"] = (64,)
    assert prompts_all_the_time(engine, state, 1) == 1
    assert deferral._long_s == pytest.approx(LONG * 0.9 * 8e-3)


def test_there_is_no_wait_where_nobody_decodes() -> None:
    """How long a gap is isn't known then."""
    engine, state, _ = taught()
    counts = state.counters.counts
    before = counts["deferred_steps"]
    engine.running = [request_of("unfinished", 300)]
    engine.process()
    assert counts["deferred_steps"] == before
    engine.running.insert(0, request_of("decodes", 1))
    engine.process()
    assert counts["deferred_steps"] == before + 1


def test_who_decoded_may_be_aborted_in_a_wait() -> None:
    """What then comes in is looked at as ever."""
    engine, state, _ = taught()
    machine = engine.machine
    comes_s = machine.time_s + 1e-3
    machine.arrivals += [(comes_s + later_s, (Kind.ABORT, None)) for later_s in (0.0, 1e-3)]
    original = engine._process_input_queue

    def process_input_queue() -> None:
        if not machine.input_queue.empty():
            engine.running = []
        original()

    engine._process_input_queue = process_input_queue  # type: ignore[method-assign]
    engine.process()
    assert len(engine.handled) == 4
    assert not state.counters.counts["defer_failed"]


def test_two_short_prompts_that_would_be_a_long_step_together_are_apart() -> None:
    """The second is where it would be without the wait."""
    engine, _, _ = taught()
    machine = engine.machine
    machine.arrivals += [(machine.time_s + 0.5e-3, added("one", 240)), (machine.time_s + 1e-3, added("two", 240))]
    assert steps_with(engine, "one", "two") == [0, 1]


def test_a_kind_of_launch_that_was_not_seen_yet_is_not_put_off() -> None:
    """Nobody knows how long it holds tokens back."""
    machine = Machine()
    engine, state, deferral = settled(machine)
    engine.model_executor.pieces = ANY
    machine.arrivals.append((machine.time_s + 1e-3, added("new", 100, 1)))
    assert steps_with(engine, "new") == [1]
    assert deferral._launching_s["piecewise"] == pytest.approx(HOST_S + LAUNCH_S["piecewise"] + SAMPLE_S)
    machine.arrivals.append((machine.time_s + 1e-3, added("another", 100, 1)))
    assert steps_with(engine, "another") == [0]
    assert state.counters.counts["deferred_left_out"] == 1


def test_nobody_is_left_out_where_a_call_ends_the_wait() -> None:
    """vLLM handles all that came, in its order."""
    engine, state, _ = taught()
    machine = engine.machine
    comes_s = machine.time_s + 1e-3
    machine.arrivals += [(comes_s, added("long", 1200)), (comes_s, (Kind.UTILITY, None))]
    engine.process()
    assert [kind for _, kind in engine.handled[2:]] == [Kind.ADD, Kind.UTILITY]
    assert machine.time_s < comes_s + 0.3e-3
    assert not state.counters.counts["deferred_left_out"]


def test_nobody_is_left_out_twice() -> None:
    """However many come."""
    engine, state, _ = taught()
    machine, came_s = engine.machine, {}
    for i in range(200):
        came_s[f"r{i}"] = machine.time_s + 37e-3 * i
        machine.arrivals.append((came_s[f"r{i}"], added(f"r{i}", 1200, 3)))
    launched: dict[str, int] = {}
    begun: list[float] = []
    while len(launched) < 200:
        begun.append(machine.time_s)
        for _ in turns(engine, 1):
            pass
        _, output = engine.model_executor.steps[-1]
        for name in output.num_scheduled_tokens:
            if name in came_s:
                launched.setdefault(name, len(begun) - 1)
    assert state.counters.counts["deferred_left_out"] > 20
    for name, turn in launched.items():
        # At the latest in the step that was made in the turn after the one in which it came.
        assert turn == 0 or came_s[name] >= begun[turn - 1] - 1e-9


def test_decodes_that_run_in_pieces_hold_no_tokens_back() -> None:
    """Nothing is gained by a longer gap where nobody comes."""
    machine = Machine()
    engine, state, _ = engine_on(machine)
    engine.model_executor.entry = lambda step: engine.model_executor._entries.setdefault(
        step, Entry(step, None, GraphKey(Part.PIECEWISE, step.num_tokens), None, "cheapest_measured")
    )
    queue = engine.batch_queue
    held = [queue[-1][0].async_output.ends_s for turn in turns(engine, 200) if turn > 50]
    late = [time_s - UPDATE_S - ends_s for (time_s, _), ends_s in zip(engine.handed[-len(held) :], held, strict=True)]
    assert state.counters.counts["deferred_steps"] > 100
    assert max(late) < 1e-6


@pytest.mark.parametrize("pause_s", [0.05, 5.0])
def test_one_slow_launch_is_soon_forgotten(pause_s: float) -> None:
    """Of a kind that is put off otherwise."""
    engine, _, deferral = taught()
    machine = engine.machine
    known_s = deferral._launching_s["piecewise"]
    machine.launch_s = machine.launch_s | {"piecewise": pause_s}
    machine.input_queue.put(added("slow", 100, 1))
    for _ in turns(engine, 3):
        pass
    assert deferral._launching_s["piecewise"] == 2 * known_s
    machine.launch_s = machine.launch_s | {"piecewise": LAUNCH_S["piecewise"]}
    for i in range(20):
        machine.input_queue.put(added(f"p{i}", 100, 1))
        for _ in turns(engine, 2):
            pass
    assert deferral._launching_s["piecewise"] < 1.4 * known_s


@pytest.mark.parametrize("first_s", [1.0, 5.0])
def test_a_first_launch_that_compiles_is_forgotten_with_the_second(first_s: float) -> None:
    """What is known of a kind by one launch is known by the next where that is far quicker."""
    machine = Machine()
    engine, _, deferral = settled(machine)
    engine.model_executor.pieces = ANY
    for i, took_s in enumerate((first_s, LAUNCH_S["piecewise"])):
        machine.launch_s = LAUNCH_S | {"piecewise": took_s}
        machine.input_queue.put(added(f"p{i}", 100, 1))
        for _ in turns(engine, 2):
            pass
        if i == 0:
            assert deferral._launching_s["piecewise"] == pytest.approx(first_s, abs=0.01)
    assert deferral._launching_s["piecewise"] == pytest.approx(HOST_S + LAUNCH_S["piecewise"] + SAMPLE_S, rel=0.01)
    for _ in turns(engine, 100):  # the pause is forgotten otherwise, too
        pass
    machine.arrivals.append((machine.time_s + 1e-3, added("new", 100, 1)))
    assert steps_with(engine, "new") == [0]


def test_a_second_launch_is_a_pause_where_the_first_was_quick() -> None:
    """It counts for twice that at most, as ever."""
    _, _, deferral = engine_on(Machine())
    for took_s in (4e-3, 1.0):
        deferral._learn_launching("piecewise", took_s)
    assert deferral._launching_s["piecewise"] == 8e-3
    deferral._learn_launching("piecewise", 1e-3)
    assert deferral._launching_s["piecewise"] > 7e-3
