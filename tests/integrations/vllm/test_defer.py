"""Steps that are made late: the rule, on a simulated host and device."""

from __future__ import annotations

import logging
import random
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from benchmarks.vllm import child
from kpolicy_vllm import defer
from kpolicy_vllm.config import Config
from kpolicy_vllm.defer import LEAST_S, MOST_MARGIN_S, REST_S, SETTLED, Deferral, why_not
from kpolicy_vllm.state import State
from tests.integrations.vllm.engine_loop import (
    COSTS,
    DECODES_US,
    HOST_S,
    LAUNCH_S,
    Kind,
    Machine,
    Plain,
    deferring,
    plain_engine,
    request_of,
    state_of_machine,
    turns,
    vllm_config,
)


def engine_on(machine: Machine, **given: Any) -> tuple[Plain, State, Deferral]:
    engine, state = plain_engine(vllm_config(), machine, **given)
    return engine, state, deferring(engine, state, machine)


def settled(machine: Machine, steps: int = 100, **given: Any) -> tuple[Plain, State, Deferral]:
    """An engine that has run so many steps of decodes."""
    engine, state, deferral = engine_on(machine, **given)
    for _ in turns(engine, steps):
        pass
    return engine, state, deferral


# The rule


def test_a_step_is_begun_when_the_host_s_time_for_it_is_left() -> None:
    """So long before the running one ends, and a margin; the device is never without work, nor are steps fewer."""
    machine = Machine()
    engine, state, deferral = settled(machine)
    steps = engine.model_executor.steps
    for _ in turns(engine, 20):
        pass
    launched = [machine.device_s - 1e-6 * DECODES_US - time_s for time_s, _ in steps[-1:]]
    assert launched == pytest.approx([deferral.margin_s], abs=3e-4)
    assert deferral.lead_s == pytest.approx(HOST_S + LAUNCH_S["full"], rel=0.01)
    assert state.counters.counts["deferred_late"] == 0
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
        if late:
            deferring(engine, state, machine)
        for _ in turns(engine, 60):
            pass
        # In the first half of the step that runs once this one's tokens are there.
        begun_s, before = machine.time_s, len(engine.model_executor.steps)
        machine.arrivals.append((begun_s + 0.4e-6 * DECODES_US, (Kind.ADD, request_of("new", 100))))
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
    assert counts["deferred_ms"] > 0.6 * 400 * (1e-3 * DECODES_US * slower - 1e3 * (HOST_S + LAUNCH_S["full"]) - 1)
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
    assert deferral.margin_s >= 0.99 * margin_s + LEAST_S


def test_eager_steps_launch_while_the_device_works() -> None:
    """Their 12 ms of launching don't count to what the host needs before the running step ends."""
    machine = Machine()
    engine, state, deferral = settled(machine)
    for turn in turns(engine, 200):
        if turn % 5 == 0:
            machine.input_queue.put((Kind.ADD, request_of(f"p{turn}", 1000)))
            engine.running = engine.running[:8]
    assert deferral.lead_s < 4e-3
    counts = state.counters.counts
    assert counts["deferred_late"] <= 0.02 * counts["deferred_steps"]
    assert machine.idle_s < 0.005 * machine.time_s


# What ends a wait, and where there is none


@pytest.mark.parametrize(("kind", "waits"), [(Kind.UTILITY, False), (Kind.ABORT, True), (Kind.ADD, True)])
def test_other_than_requests_and_aborts_end_the_wait(kind: Kind, waits: bool) -> None:
    """A call that pauses, sleeps or changes weights is handled as soon as the loop comes to it."""
    machine = Machine()
    engine, _, deferral = settled(machine)
    comes_s, begun = machine.time_s + 1e-3, len(machine.slept)
    machine.arrivals.append((comes_s, (kind, request_of("new", 10))))
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
    engine, state, deferral = settled(machine)
    taken, ends_s = [0], machine.time_s + 1e-6 * DECODES_US

    def take_in() -> None:
        taken[0] += 1
        machine.work(1e-4)
        machine.input_queue.put((Kind.ADD, request_of(str(taken), 1)))

    machine.input_queue.put((Kind.ADD, request_of("first", 1)))
    deferral.process(take_in)
    assert taken[0] > 20
    assert machine.time_s < ends_s - deferral.lead_s
    assert state.counters.counts["defer_failed"] == 0
    assert engine.batch_queue


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
    engine, state, _ = settled(machine)

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
        original = engine.model_executor.execute_model.__wrapped__

        def bare(output: Any, non_block: bool = False) -> Any:
            result = original(output, non_block)
            state.dispatcher.last = None
            return result

        engine.model_executor.execute_model = bare
        deferring(engine, state, machine)
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


@pytest.mark.parametrize("broken", ["_due_s", "_waits", "_launching", "_launched", "_ended", "_count"])
def test_an_error_ends_it_and_not_serving(monkeypatch: Any, caplog: pytest.LogCaptureFixture, broken: str) -> None:
    """One warning, and the loop goes on as vLLM's."""
    machine = Machine()
    engine, state, deferral = settled(machine)

    def failing(*_: Any) -> Any:
        raise ZeroDivisionError("made up")

    monkeypatch.setattr(deferral, broken, failing)
    with caplog.at_level(logging.WARNING):
        for _ in turns(engine, 10):
            pass
    assert state.counters.counts["defer_failed"] == 1
    assert len(caplog.records) == 1
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
    machine.arrivals.append((machine.time_s + 1e-3, (Kind.ADD, request_of("new", 10))))
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


@pytest.mark.parametrize(("setting", "warned"), [(None, 0), (True, 1), (False, 0)])
def test_only_who_asks_for_it_is_told_that_it_cannot_be_had(setting: bool | None, warned: int) -> None:
    """By default it is had where it can be."""
    state = state_of_machine(vllm_config(), defer=setting)
    defer.attach(None, vllm_config(data_parallel_size=2), state)
    assert state.counters.counts["not_deferred"] == warned


def test_the_setting_is_read() -> None:
    """By default where it can be had."""
    assert Config().defer is None
    assert Config.load({"kpolicy": {"defer": False}}, {}).defer is False  # type: ignore[union-attr]


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
    waits._now, waits._sleep = machine.now, machine.sleep
    taken: list[float] = []
    for _ in range(60):
        waits.process(lambda: None)
        engine.step()
    comes_s = machine.time_s + 1e-3
    incoming.due = lambda: not taken and machine.time_s >= comes_s
    waits.process(lambda: taken.append(machine.time_s) if incoming.due() else None)
    assert taken == [pytest.approx(comes_s, abs=3e-4)]
    assert machine.time_s > comes_s + 2e-3
