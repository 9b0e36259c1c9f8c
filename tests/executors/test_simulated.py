"""The simulated executor keeps the executor contract; the contract catches executors broken on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import settings as run_settings
from hypothesis import strategies as st

from kpolicy.budgets import Budget
from kpolicy.decision import Decision, Launch
from kpolicy.engine import Engine
from kpolicy.errors import CaptureError, ConfigError, RegistryError, StickyDeviceError, UnknownNameError
from kpolicy.executors import executor_names, get_executor
from kpolicy.executors.base import Executor, ProbeStatus, StepOutputs
from kpolicy.executors.runner import PartOutputs
from kpolicy.executors.simulated import (
    FAULTS,
    Fault,
    SimulatedExecutor,
    reference_outputs,
    reference_tokens,
    sampled_token,
)
from kpolicy.keys import GraphKey
from kpolicy.ladders import CaptureSizes
from kpolicy.modes import Mode, Part, Rows, SplitForm
from kpolicy.reasons import Reason
from kpolicy.registry import GraphRegistry, GraphState
from kpolicy.scheduling.batching import Batcher, Generation
from kpolicy.settings import Settings
from kpolicy.shapes import BatchShape
from kpolicy.simulate.step_costs import StepCosts
from kpolicy.testing import EXECUTOR_CHECKS
from kpolicy.testing.executors import KEYS, LIMITS, all_decisions, keys_hold_what_they_say
from kpolicy.testing.sequences import NUM_BLOCKS, VOCAB, Sequences
from kpolicy.testing.strategies import cost_tables, shapes


def simulated(**arguments: Any) -> SimulatedExecutor:
    return SimulatedExecutor(num_blocks=NUM_BLOCKS, vocab=VOCAB, **arguments)


@pytest.mark.parametrize("check", EXECUTOR_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"seed": 7},
        {"faults": ["capture_fails@2x3", "capture_out_of_memory@7"]},
        {"streams": 5},
        {"memory_bytes": 60 << 20},
    ],
    ids=["plain", "seeded", "some captures fail", "few streams", "little memory"],
)
def test_contract(check: Callable[..., None], arguments: dict[str, Any]) -> None:
    """The simulated executor keeps the contract, also where the device refuses part of the graphs."""
    check(lambda: simulated(**arguments))


def test_outputs_are_those_of_the_sequence_alone() -> None:
    """Any batching of sequences gives the outputs that `reference_outputs` computes from each of them."""
    executor = simulated(seed=3)
    executor.open(registry := GraphRegistry())
    registry.plan(KEYS)
    executor.capture(KEYS)
    sequences = Sequences(11)
    for _ in range(60):
        rows = sequences.random_rows(LIMITS.max_num_reqs, LIMITS.max_num_tokens, LIMITS.query_len)
        inputs = sequences.inputs(rows)
        decision = sequences.random.choice(all_decisions(inputs.numbers, registry.captured()))
        outputs = executor.run(decision, inputs).outputs
        wanted = []
        for row in rows:
            start = row.sequence.num_computed
            known = row.sequence.tokens[: start + row.num_tokens]
            own = reference_outputs(known, seed=3, first=start)
            wanted += [own[offset] for offset in row.wanted]
        assert list(outputs) == wanted, decision
        sequences.advance(rows)


@given(st.lists(st.integers(0, 31_999), min_size=1, max_size=40), st.integers(1, 30), st.integers(0, 5))
@run_settings(max_examples=50, deadline=None)
def test_reference_tokens_follow_reference_outputs(prompt: list[int], num_tokens: int, seed: int) -> None:
    """The greedy continuation is what sampling each last output of the growing sequence gives."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(sampled_token(reference_outputs(tokens, seed=seed)[-1], 4096))
    assert reference_tokens(prompt, num_tokens, seed=seed) == tokens[len(prompt) :]


@given(st.lists(st.integers(0, 999), min_size=2, max_size=30), st.data())
@run_settings(max_examples=50, deadline=None)
def test_an_output_depends_on_each_token_and_its_place(tokens: list[int], data: st.DataObject) -> None:
    """Changing one token, or swapping two that differ, changes the last output."""
    place = data.draw(st.integers(0, len(tokens) - 1))
    other = data.draw(st.integers(0, len(tokens) - 1))
    changed = [*tokens[:place], tokens[place] + 1, *tokens[place + 1 :]]
    assert reference_outputs(changed)[-1] != reference_outputs(tokens)[-1]
    swapped = list(tokens)
    swapped[place], swapped[other] = swapped[other], swapped[place]
    assert (reference_outputs(swapped)[-1] == reference_outputs(tokens)[-1]) == (swapped == tokens)


def test_seeds_change_outputs_and_equal_seeds_do_not() -> None:
    """Outputs are a function of the seed and the sequence."""
    assert reference_outputs([1, 2, 3], seed=1) == reference_outputs([1, 2, 3], seed=1)
    assert reference_outputs([1, 2, 3], seed=1) != reference_outputs([1, 2, 3], seed=2)


def test_releasing_lets_graphs_be_captured_again() -> None:
    """After a release the same keys can be captured and replayed."""
    executor, registry = simulated(streams=len(KEYS)), GraphRegistry()
    executor.open(registry)
    registry.plan(KEYS)
    executor.capture(KEYS)
    assert set(registry.captured()) == set(KEYS)
    executor.release()
    executor.capture(KEYS)
    assert set(registry.captured()) == set(KEYS)


@given(cost_tables(), shapes(forbid=False), st.data())
@run_settings(max_examples=100, deadline=None)
def test_times_are_the_cost_tables(costs: Any, shape: Any, data: st.DataObject) -> None:
    """A step takes what the cost table says of launches of one host; decode rows of a split are ready no later.

    That is the table's time but for a half beside another, which waits until that one is launched.
    """
    decision = data.draw(st.sampled_from(all_decisions(shape.numbers, KEYS)))
    executor = simulated(costs=costs)
    outputs = StepOutputs([], [], decision, executor.device.ready(decision, shape.numbers))
    cycle_us, ready_us = outputs.cycle_us, outputs.ready_us
    cost = costs.cost(decision.launches, shape.numbers)
    assert cycle_us == pytest.approx(StepCosts(costs).cost(decision.launches, shape.numbers).cycle_us)
    if len(decision.launches) < 2 or not decision.launches[1].stream:
        assert cycle_us == pytest.approx(cost.cycle_us)
    else:
        _, launch_us = costs.launch_us(decision.launches[0], shape.numbers)
        assert abs(cycle_us - cost.cycle_us) <= launch_us + 1e-9 * cycle_us
    assert max(ready_us.values()) == pytest.approx(cycle_us)


def test_probe_says_usable() -> None:
    """The simulated device is always there."""
    report = simulated().device.probe()
    assert (report.name, report.status) == ("simulated", ProbeStatus.USABLE)
    assert "simulated" in executor_names()


@pytest.mark.parametrize("arguments", [{"num_blocks": 0}, {"block_size": 12}, {"vocab": 0}, {"max_num_reqs": 0}])
def test_bad_arguments_are_named(arguments: dict[str, int]) -> None:
    """A capacity that no device has is an error that names the argument."""
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        get_executor("simulated", **arguments)


def test_unknown_executors_and_arguments_are_named() -> None:
    """A near miss is suggested, an unknown argument and a thing that isn't an executor are refused."""
    with pytest.raises(UnknownNameError, match="did you mean 'simulated'"):
        get_executor("simulate")
    with pytest.raises(ConfigError, match="blocks"):
        get_executor("simulated", blocks=3)
    with pytest.raises(ConfigError, match="isn't an executor"):
        get_executor(object())  # type: ignore[arg-type]
    mine = simulated()
    assert get_executor(mine) is mine
    assert isinstance(mine, Executor)


# Broken on purpose.

Mutation = Callable[..., PartOutputs]


def leaks_pads(device: Any, replay: Any, handle: Any, rows: Any, launch: Launch, memory: dict[Any, Any]) -> PartOutputs:
    """The tail isn't staged: padding rows still write where the last larger batch of the graph wrote."""
    outputs = replay(handle, rows, launch)
    stale = memory.get(handle.key, [])[len(rows.slot_mapping) : handle.key.num_tokens]
    for slot in stale:
        device.kv[slot] = 12_345
    memory[handle.key] = [*rows.slot_mapping, *stale]
    return outputs


def skips_staging(device: Any, replay: Any, handle: Any, rows: Any, launch: Launch, memory: Any) -> PartOutputs:
    """Token ids are those of the replay before, where they were as many."""
    before, memory[handle.key] = memory.get(handle.key, rows.token_ids), rows.token_ids
    return replay(
        handle, rows._replace(token_ids=before if len(before) == len(rows.token_ids) else rows.token_ids), launch
    )


def loses_a_row(device: Any, replay: Any, handle: Any, rows: Any, launch: Launch, memory: Any) -> PartOutputs:
    """The last wanted output is missing."""
    outputs, tokens, _ = replay(handle, rows, launch)
    return PartOutputs(outputs[:-1], tokens)


def repeats_a_row(device: Any, replay: Any, handle: Any, rows: Any, launch: Launch, memory: Any) -> PartOutputs:
    """The second output is the first again."""
    outputs, tokens, _ = replay(handle, rows, launch)
    return PartOutputs([*outputs[:1], *outputs[:1], *outputs[2:]][: len(outputs)], tokens)


def mixes_blocks(device: Any, replay: Any, handle: Any, rows: Any, launch: Launch, memory: Any) -> PartOutputs:
    """The first row reads the last row's blocks, where those are as many."""
    tables = list(rows.block_table)
    if tables and len(tables[0]) <= len(tables[-1]):
        tables[0] = tables[-1]
    return replay(handle, rows._replace(block_table=tables), launch)


def drops_a_block(device: Any, replay: Any, handle: Any, rows: Any, launch: Launch, memory: Any) -> PartOutputs:
    """Tables of two blocks or more have their first block for the second."""
    tables = [[table[0], table[0], *table[2:]] if len(table) > 1 else table for table in rows.block_table]
    return replay(handle, rows._replace(block_table=tables), launch)


def keeps_its_outputs(device: Any, replay: Any, handle: Any, rows: Any, launch: Launch, memory: Any) -> PartOutputs:
    """Outputs aren't copied: every replay of a part hands out the same buffer."""
    outputs, tokens, _ = replay(handle, rows, launch)
    buffer = memory.setdefault(handle.key.part, [])
    buffer[:] = outputs
    return PartOutputs(buffer, tokens)


def writes_nothing(device: Any, replay: Any, handle: Any, rows: Any, launch: Launch, memory: Any) -> PartOutputs:
    """Outputs are right, and the KV entries of the step are gone afterwards."""
    before = device.kv[:]
    outputs = replay(handle, rows, launch)
    device.kv[:] = before
    return outputs


def repeats_on_one_slot(device: Any, replay: Any, handle: Any, rows: Any, launch: Launch, memory: Any) -> PartOutputs:
    """Steps ahead write to the slots of the step before them."""
    ahead = [rows.slot_mapping, *rows.slots_ahead[:-1]] if rows.slots_ahead else ()
    return replay(handle, rows._replace(slots_ahead=ahead), launch)


MUTATIONS: dict[str, Mutation] = {
    mutation.__name__: mutation
    for mutation in (
        leaks_pads,
        skips_staging,
        loses_a_row,
        repeats_a_row,
        mixes_blocks,
        drops_a_block,
        keeps_its_outputs,
        writes_nothing,
        repeats_on_one_slot,
    )
}


def broken(mutation: Mutation) -> Callable[[], SimulatedExecutor]:
    def make() -> SimulatedExecutor:
        executor = simulated()
        device, replay, memory = executor.device, executor.device.replay, {}
        device.replay = lambda handle, rows, launch: mutation(device, replay, handle, rows, launch, memory)  # type: ignore[method-assign]
        return executor

    return make


def failing_checks(make: Callable[[], SimulatedExecutor]) -> list[str]:
    return [check.__name__ for check in EXECUTOR_CHECKS if _fails(check, make)]


def _fails(check: Callable[..., None], make: Callable[[], SimulatedExecutor]) -> bool:
    try:
        check(make)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_contract_catches_a_broken_device(name: str) -> None:
    """Each way of getting staging, rows, blocks or outputs wrong breaks at least one check."""
    assert failing_checks(broken(MUTATIONS[name]))


@pytest.mark.parametrize("slot", [0, 101, 517])
def test_the_contract_catches_pads_that_write_to_a_live_slot(slot: int) -> None:
    """A padding slot that belongs to a KV block breaks the sequence that owns the block."""

    def make() -> SimulatedExecutor:
        executor = simulated()
        executor.device.pad_slot = slot
        return executor

    assert failing_checks(make)


def test_the_contract_catches_a_capture_that_says_nothing() -> None:
    """An executor that leaves keys planned, or takes one that it doesn't capture, breaks the contract."""

    class Lazy(SimulatedExecutor):
        def capture(self, keys: Any, progress: Any = None) -> None:
            super().capture(list(keys)[1:], progress)

    assert "captures_or_says_why" in failing_checks(lambda: Lazy(num_blocks=NUM_BLOCKS, vocab=VOCAB))


def test_the_contract_catches_a_release_that_keeps_graphs() -> None:
    """An executor whose release does nothing breaks the contract."""

    class Hoarder(SimulatedExecutor):
        def release(self) -> None:
            pass

    assert failing_checks(lambda: Hoarder(num_blocks=NUM_BLOCKS, vocab=VOCAB)) == ["release_gives_everything_back"]


def test_the_contract_catches_a_hidden_failure() -> None:
    """An executor that swallows a failed replay and runs eagerly without saying so breaks the contract."""

    class Silent(SimulatedExecutor):
        def run(self, decision: Decision, inputs: Any) -> Any:
            try:
                return super().run(decision, inputs)
            except Exception:  # noqa: BLE001 - the fault under test
                eager = Decision(Mode.EAGER, (Launch(Rows.ALL, None),), Reason.POLICY_IS_EAGER)
                return super().run(eager, inputs)._replace(decision=decision)

    failed = failing_checks(lambda: Silent(num_blocks=NUM_BLOCKS, vocab=VOCAB))
    assert {"a_failed_replay_leaves_the_batch_runnable", "an_uncaptured_graph_is_an_error"} <= set(failed)


# Faults, through an Engine.

SETTINGS = Settings(max_num_reqs=4, max_num_tokens=16)
SIZES = CaptureSizes((1, 2, 4), (8, 16), (8, 16))


def serve(
    policy: str = "full_and_piecewise", budget: Budget | None = None, **arguments: Any
) -> tuple[Engine, list[Any]]:
    """Eight requests through an Engine; the Engine and the requests that were served, checked."""
    executor = SimulatedExecutor(num_blocks=32, **arguments)
    engine = Engine(policy, attention="gqa", ladder=SIZES, settings=SETTINGS, executor=executor, budget=budget)
    engine.capture()
    batcher = Batcher(SETTINGS, num_blocks=32)
    for index in range(8):
        batcher.add(Generation(index, list(range(index, 2 * index + 3)), 6))
    served: list[Any] = []
    while (batch := batcher.next_batch()) is not None:
        outputs = engine.step(batch.inputs)
        served += batcher.complete(batch, outputs, lambda output: sampled_token(output, 4096)).finished
    for request in served:
        assert request.generated == reference_tokens(request.tokens[: request.num_prompt], 6)
    assert len(served) == 8
    return engine, served


CAPTURE_FAULTS = {
    "capture_fails": Reason.CAPTURE_FAILED,
    "capture_out_of_memory": Reason.CAPTURE_OUT_OF_MEMORY,
    "capture_out_of_streams": Reason.CAPTURE_OUT_OF_STREAMS,
}


@pytest.mark.parametrize(("fault", "reason"), CAPTURE_FAULTS.items())
@pytest.mark.parametrize("times", [1, 3, 99])
def test_a_failed_capture_costs_speed_only(fault: str, reason: Reason, times: int) -> None:
    """Keys whose capture failed carry the reason, and every request is served without them."""
    engine, _ = serve(faults=[Fault(fault, 2, times)])
    failed = [record for record in engine.registry.records() if record.state is GraphState.FAILED]
    assert len(failed) == min(times, len(engine.keys) - 1)
    assert {record.reason for record in failed} == {reason}
    ran = {launch.key for decision in engine.stats._by_decision for launch in decision.launches}
    assert not ran & {record.key for record in failed}


@pytest.mark.parametrize("policy", ["full_and_piecewise", "auto", "split", "piecewise", "full"])
@pytest.mark.parametrize("times", [1, 4])
def test_a_failed_replay_is_counted_and_its_key_withdrawn(policy: str, times: int) -> None:
    """Each failed replay withdraws a key for REPLAY_FAILED and is counted; every request is served."""
    engine, _ = serve(policy, faults=[Fault("replay_fails", 2, times)])
    gone = [record.reason for record in engine.registry.records() if record.state is GraphState.WITHDRAWN]
    assert gone == [Reason.REPLAY_FAILED] * min(times, len(engine.keys))
    assert engine.stats.replay_failures == len(gone)


def test_every_graph_failing_leaves_eager_steps_with_a_reason() -> None:
    """When each replay fails, all keys are withdrawn one by one and what is left runs eagerly, saying why."""
    engine, _ = serve(faults=[Fault("replay_fails", 1, 10**6)])
    assert engine.stats.by_mode.keys() == {"eager"}
    assert engine.stats.by_reason.keys() <= {"graph_withdrawn", "no_graphs"}
    assert "graph_withdrawn" in engine.stats.by_reason


def test_a_late_step_takes_a_hundred_times_as_long() -> None:
    """`late` stretches the n-th step alone and changes nothing else."""
    plain, late = serve()[0], serve(faults=["late@3"])[0]
    assert plain.stats.total.steps == late.stats.total.steps
    steps = plain.stats.total.us
    assert late.stats.total.us > steps
    assert serve(faults=["late@1000"])[0].stats.total.us == pytest.approx(steps)


@pytest.mark.parametrize("policy", ["eager", "full_and_piecewise", "split"])
def test_a_lost_device_stops_the_engine_and_hands_requests_back(policy: str) -> None:
    """After a sticky fault every call raises the one named error, and unfinished requests are still the caller's."""
    executor = SimulatedExecutor(num_blocks=32, faults=["sticky@4"])
    engine = Engine(policy, ladder=SIZES, settings=SETTINGS, executor=executor)
    engine.capture()
    batcher = Batcher(SETTINGS, num_blocks=32)
    for index in range(3):
        batcher.add(Generation(index, [1, 2, 3], 9))

    def run() -> None:
        while (batch := batcher.next_batch()) is not None:
            batcher.complete(batch, engine.step(batch.inputs), lambda output: sampled_token(output, 4096))

    with pytest.raises(StickyDeviceError, match="lost"):
        run()
    assert 1 <= engine.stats.total.steps <= 3
    inputs = Sequences().inputs([])
    assert sorted(request.index for request in [*batcher.running, *batcher.waiting]) == [0, 1, 2]
    for call in (lambda: engine.step(inputs), engine.capture, lambda: engine.decide(BatchShape.decode(1))):
        with pytest.raises(StickyDeviceError):
            call()


def test_budget_and_device_limits_leave_the_requests_served() -> None:
    """A registry budget and a device without streams both shorten the ladder; requests don't notice."""
    engine, _ = serve(streams=2)
    lost = {record.reason for record in engine.registry.records() if record.reason}
    assert lost == {Reason.CAPTURE_OUT_OF_STREAMS}
    registry = GraphRegistry(Budget(graphs=3))
    engine = Engine("auto", settings=SETTINGS, executor=SimulatedExecutor(num_blocks=32), registry=registry)
    engine.capture()
    assert len(registry.captured()) == 3
    assert {record.reason for record in registry.records() if record.reason} == {Reason.BUDGET_GRAPHS}


def test_every_fault_is_tried_here() -> None:
    """No fault is documented that the tests above don't inject."""
    assert {*CAPTURE_FAULTS, "replay_fails", "sticky", "late"} == set(FAULTS)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("late", Fault("late")),
        ("replay_fails@10", Fault("replay_fails", 10)),
        ("replay_fails@10x3", Fault("replay_fails", 10, 3)),
    ],
)
def test_faults_are_parsed(text: str, fault: Fault) -> None:
    """A fault is NAME, NAME@N or NAME@NxTIMES."""
    assert Fault.parse(text) == fault


@pytest.mark.parametrize("text", ["late@", "late@x", "nope", "late@0", "late@2x0", "late@a", "late@1xb", "late@-1"])
def test_bad_faults_are_named(text: str) -> None:
    """A fault that can't be had is an error, an empty number included."""
    with pytest.raises(ConfigError):
        Fault.parse(text)


@pytest.mark.parametrize("fault", ["before_launch@2", Fault("before_launch", 2), "nope"])
def test_faults_of_recordings_are_not_the_simulated_devices(fault: Any) -> None:
    """It has none, so such a fault would never come: refused with those that it can have."""
    with pytest.raises(UnknownNameError, match="late") as caught:
        SimulatedExecutor(faults=[fault])
    assert set(caught.value.allowed) == set(FAULTS)


def test_capture_errors_carry_their_reason() -> None:
    """The device's own refusal names the key and the reason."""
    device = simulated(streams=0).device
    with pytest.raises(CaptureError, match="streams") as caught:
        device.capture(KEYS[0], device.new_pool(KEYS[0].part, KEYS[0]))
    assert caught.value.reason is Reason.CAPTURE_OUT_OF_STREAMS


# Rows that a graph wasn't captured for.

HELD = GraphKey.holds
WEAKER: dict[str, Callable[..., bool]] = {
    "tokens": lambda key, tokens, *rest: HELD(key, min(tokens, key.num_tokens), *rest),
    "rows": lambda key, tokens, reqs, *rest: HELD(key, tokens, min(reqs, key.num_reqs or reqs), *rest),
    "query length": lambda key, t, r, q, *rest: HELD(key, t, r, key.query_len or q, *rest),
    "longest decode": lambda key, t, r, q, longest, *rest: HELD(key, t, r, q, min(longest, 1), *rest),
    "decode rows only": lambda key, t, r, q, longest, _, loras: HELD(key, t, r, q, longest, True, loras),
    "LoRAs": lambda key, t, r, q, longest, decode, _: HELD(key, t, r, q, longest, decode, 0),
}


@pytest.mark.parametrize("name", WEAKER)
def test_the_contract_catches_keys_that_hold_too_much(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each condition of `GraphKey.holds` is needed: without it a graph lets rows in that come out wrong or fail."""
    monkeypatch.setattr(GraphKey, "holds", WEAKER[name])
    assert _fails(keys_hold_what_they_say, simulated)


def replaying(key: GraphKey) -> Decision:
    return Decision(Mode.FULL, (Launch(Rows.ALL, key),), Reason.GRAPH_FITS)


def opened(*keys: GraphKey, **arguments: Any) -> tuple[SimulatedExecutor, Sequences, list[Any]]:
    """An executor with those graphs, and three prefilled sequences."""
    executor, sequences = simulated(**arguments), Sequences(3)
    executor.open(GraphRegistry())
    executor.capture(keys)
    prefilled = [sequences.chunk(sequences.start(), 20) for _ in range(3)]
    executor.run(EAGER, sequences.inputs(prefilled))
    sequences.advance(prefilled)
    return executor, sequences, [row.sequence for row in prefilled]


EAGER = Decision(Mode.EAGER, (Launch(Rows.ALL, None),), Reason.POLICY_IS_EAGER)
UNIFORM = GraphKey(Part.FULL, 8, 4, query_len=2)
VARLEN = GraphKey(Part.FULL, 8, 8, max_query_len=2)
SINGLE = GraphKey(Part.FULL, 8, 8, query_len=1)


@pytest.mark.parametrize(
    ("key", "lengths", "right"),
    [
        (UNIFORM, [2, 2], True), (UNIFORM, [1, 1], False), (UNIFORM, [2, 1], False), (UNIFORM, [1], False),
        (UNIFORM, [4], False), (VARLEN, [1, 2, 2], True), (VARLEN, [3], False), (VARLEN, [1, 3, 2], False),
        (SINGLE, [1, 1, 1], True), (SINGLE, [2, 1], False), (SINGLE, [3], False),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("decode", [True, False], ids=["decodes", "chunks"])
def test_a_graph_takes_rows_by_its_key(key: GraphKey, lengths: list[int], right: bool, decode: bool) -> None:
    """Rows of other lengths than a decode graph's come out wrong, and chunks of its lengths right."""
    executor, sequences, started = opened(key)
    make = sequences.decode if decode else sequences.chunk
    inputs = sequences.inputs([make(sequence, length) for sequence, length in zip(started, lengths, strict=False)])
    wanted = executor.run(EAGER, inputs).outputs
    assert (executor.run(replaying(key), inputs).outputs == wanted) is right


@pytest.mark.parametrize("key", [UNIFORM, VARLEN, SINGLE, GraphKey(Part.FULL, 8, 2), GraphKey(Part.PIECEWISE, 8)])
def test_more_rows_or_tokens_than_a_graph_has_is_a_named_error(key: GraphKey) -> None:
    """A launch too large for its graph names the graph and both sizes, and the graph replays rightly afterwards."""
    executor, sequences, started = opened(key)
    large = sequences.inputs([sequences.chunk(started[2], 9)])
    for inputs in (large, sequences.inputs([sequences.decode(sequence, 3) for sequence in started])):
        with pytest.raises(RegistryError, match=f"8 tokens in .* and was given 9 in {len(inputs.query_lens)}"):
            executor.run(replaying(key), inputs)
    inputs = sequences.inputs([sequences.decode(started[0], key.query_len or 1)])
    assert executor.run(replaying(key), inputs).outputs == executor.run(EAGER, inputs).outputs


@pytest.mark.parametrize("part", Part)
@pytest.mark.parametrize(("active", "right"), [(0, True), (2, True), (3, False)])
def test_adapters_beyond_a_graphs_case_are_missing(part: Part, active: int, right: bool) -> None:
    """A graph gives eager's outputs up to its LoRA case, and others above."""
    key = GraphKey(part, 8, 8 if part is Part.FULL else None, lora_case=2)
    executor, sequences, started = opened(key)
    inputs = sequences.inputs([sequences.decode(started[0])])
    inputs = inputs._replace(numbers=inputs.numbers._replace(num_active_loras=active))
    wanted = executor.run(EAGER, inputs).outputs
    assert (executor.run(replaying(key), inputs).outputs == wanted) is right


def test_an_eager_launch_is_padded_as_it_says() -> None:
    """Padded tokens are computed, write to the reserved slot alone, and leave outputs as they are."""
    executor, sequences, started = opened()
    inputs = sequences.inputs([sequences.decode(started[0])])
    kv = executor.device.kv
    wanted, before = executor.run(EAGER, inputs).outputs, list(kv)
    padded = Decision(Mode.EAGER, (Launch(Rows.ALL, None, padded_tokens=5),), Reason.REPLAY_FAILED)
    assert executor.run(padded, inputs).outputs == wanted
    assert [slot for slot, value in enumerate(kv) if value != before[slot]] == [executor.device.pad_slot]
    with pytest.raises(RegistryError, match="9 tokens can't be padded to 5"):
        executor.run(padded, sequences.inputs([sequences.chunk(started[1], 9)]))


@pytest.mark.parametrize("num_prompts", [0, 1])
@pytest.mark.parametrize("graph", [True, False], ids=["replayed", "eager"])
def test_repeats_run_without_decode_rows(num_prompts: int, graph: bool) -> None:
    """An idle or prefill-only rank runs the decode half as often as was agreed."""
    executor, sequences, started = opened(SINGLE)
    inputs = sequences.inputs([sequences.chunk(started[0], 4)] * num_prompts)
    runs: list[int] = []
    handle = executor._handles[SINGLE]
    replay, eagerly = handle.run, executor.device._run_eagerly
    handle.run = lambda rows: (runs.append(len(rows.token_ids)), replay(rows))[1]
    executor.device._run_eagerly = lambda rows: (runs.append(len(rows.token_ids)), eagerly(rows))[1]  # type: ignore[method-assign]
    first = Launch(Rows.DECODE, SINGLE if graph else None, repeat=4, padded_tokens=None if graph else 8)
    executor.run(Decision(Mode.SPLIT, (first,), Reason.RANKS_AGREED, SplitForm.DECODES_BESIDE), inputs)
    assert runs == [0 if graph else 8] * 4


def test_too_few_slots_ahead_are_named() -> None:
    """A launch that repeats more often than slots are reserved for is an error, not fewer steps."""
    executor, sequences, started = opened(SINGLE)
    inputs = sequences.inputs([sequences.decode(started[0])], steps=3)
    launch = Launch(Rows.DECODE, SINGLE, repeat=4)
    with pytest.raises(ConfigError, match="slots_ahead has 2"):
        executor.run(Decision(Mode.SPLIT, (launch,), Reason.GRAPH_FITS, SplitForm.DECODES_BESIDE), inputs)


# Pools, registries, and capturing again.


def test_a_refused_pool_fails_its_key_and_the_rest_is_captured() -> None:
    """When the device has no memory for the largest graph's pool, that key fails and smaller ones are captured."""
    executor, registry = simulated(), GraphRegistry()
    executor.open(registry)
    new_pool, asked = executor.device.new_pool, []

    def refusing(part: Part, largest: GraphKey) -> Any:
        asked.append(largest)
        if largest.num_tokens > 16:
            raise CaptureError(Reason.CAPTURE_OUT_OF_MEMORY, "no memory for that pool")
        return new_pool(part, largest)

    executor.device.new_pool = refusing  # type: ignore[method-assign]
    executor.capture(KEYS)
    for record in registry.records():
        fits = record.key.num_tokens <= 16
        assert (record.state, record.reason) == (
            (GraphState.CAPTURED, None) if fits else (GraphState.FAILED, Reason.CAPTURE_OUT_OF_MEMORY)
        )
    assert {largest.num_tokens for largest in asked} >= {16, 32}


def test_larger_keys_later_get_a_pool_of_their_own() -> None:
    """A second capture of a larger graph works in a second pool, and the first pool's graphs go on."""
    large = attrs.evolve(UNIFORM, num_tokens=16, num_reqs=8)
    executor, sequences, started = opened(UNIFORM)
    executor.capture([large])
    for key in (UNIFORM, large):
        inputs = sequences.inputs([sequences.decode(sequence, 2) for sequence in started])
        assert executor.run(replaying(key), inputs).outputs == executor.run(EAGER, inputs).outputs
    assert [pool.name for pool in executor.registry.pools()] == ["simulated/full", "simulated/full/2"]
    executor.release()
    assert executor.registry.totals().held.graphs == 0


def test_a_pool_that_went_alone_leaves_no_two_of_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next pool takes the name that is free: under one name both's bytes and graphs would be one pool's."""
    small, large, larger, largest = (GraphKey(Part.FULL, size, 4) for size in (8, 16, 32, 64))
    executor, registry = simulated(), GraphRegistry(Budget(bytes=10**12))
    executor.open(registry)
    for key in (large, larger):
        executor.capture([key])
    registry.withdraw(large, Reason.REPLAY_FAILED)
    capture = executor.launcher.capture

    def too_large(key: GraphKey, pool: Any) -> Any:
        handle, report = capture(key, pool)
        return handle, report._replace(bytes=10**13)

    with monkeypatch.context() as patched:
        patched.setattr(executor.launcher, "capture", too_large)
        executor.capture([small])
    assert [pool.name for pool in executor._pools] == ["simulated/full/2"]
    executor.capture([largest])
    assert sorted(pool.name for pool in executor._pools) == ["simulated/full", "simulated/full/2"]
    assert registry.record(larger).pool != registry.record(largest).pool
    registry.withdraw(largest, Reason.REPLAY_FAILED)
    with monkeypatch.context() as patched:
        patched.setattr(executor.launcher, "capture", too_large)
        executor.capture([attrs.evolve(largest, num_tokens=48)])
    assert (registry.captured(), executor.captured) == ((larger,), {larger})


def test_a_pool_has_rows_for_each_of_its_keys() -> None:
    """The graph with the most rows needn't be the one with the most tokens: a pool holds both."""
    executor, _, _ = opened(GraphKey(Part.FULL, 16, 2), SINGLE)
    assert executor.captured == {GraphKey(Part.FULL, 16, 2), SINGLE}
    assert [pool.name for pool in executor.registry.pools()] == ["simulated/full"]


def test_everything_can_be_captured_again_after_a_release() -> None:
    """Keys that failed, were refused or were withdrawn are captured like the others once asked for again."""
    executor, registry = simulated(faults=["capture_fails@1x2"]), GraphRegistry()
    executor.open(registry)
    executor.capture(KEYS)
    assert {record.state for record in registry.records()} == {GraphState.CAPTURED, GraphState.FAILED}
    registry.withdraw(registry.captured()[0], Reason.REPLAY_FAILED)
    executor.release()
    assert executor.captured == frozenset()
    executor.capture(KEYS)
    assert set(registry.captured()) == executor.captured == set(KEYS)


def test_executors_that_share_a_registry_keep_their_graphs() -> None:
    """Releasing one executor leaves the graphs of the other captured, whichever captured first."""
    registry = GraphRegistry()
    one, other = simulated(), simulated()
    one.open(registry)
    other.open(registry)
    other.capture([SINGLE])
    one.capture([UNIFORM])
    assert (one.captured, other.captured) == ({UNIFORM}, {SINGLE})
    assert [pool.name for pool in registry.pools()] == ["simulated-2/full", "simulated/full"]
    one.release()
    assert registry.captured() == (SINGLE,)
    third = simulated()
    third.open(GraphRegistry.restore(registry.snapshot(), keep=True))
    third.capture([VARLEN])
    assert third.registry.record(VARLEN).pool == "simulated-3/full"


def test_an_executor_keeps_its_registry() -> None:
    """Opening it again with the same registry changes nothing; another registry is an error that says what to do."""
    executor, _, _ = opened(SINGLE)
    executor.open(executor.registry)
    with pytest.raises(RegistryError, match="make an executor for each"):
        executor.open(GraphRegistry())
    assert executor.registry.captured() == (SINGLE,)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"costs": 5}, "costs is 5; give a CostTable"), ({"faults": [5]}, "fault 5 is neither a Fault nor its text")],
)
def test_arguments_of_another_kind_are_named(arguments: dict[str, Any], words: str) -> None:
    """When the executor is made, and not by its first step."""
    with pytest.raises(ConfigError, match=words):
        SimulatedExecutor(**arguments)
