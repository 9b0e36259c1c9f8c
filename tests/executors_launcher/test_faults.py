"""Injected faults at every point: the step's result stays right, the key goes with a reason, memory is as before."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kpolicy.decision import Decision, Launch  # noqa: E402
from kpolicy.engine import Engine  # noqa: E402
from kpolicy.errors import GraphReplayError, StickyDeviceError  # noqa: E402
from kpolicy.executors.cpu import CpuExecutor  # noqa: E402
from kpolicy.executors.segments import FullGraph  # noqa: E402
from kpolicy.keys import GraphKey  # noqa: E402
from kpolicy.ladders import CaptureSizes  # noqa: E402
from kpolicy.modes import Mode, Part, Rows, SplitForm  # noqa: E402
from kpolicy.reasons import Reason  # noqa: E402
from kpolicy.registry import GraphRegistry, GraphState  # noqa: E402
from kpolicy.settings import Settings  # noqa: E402
from kpolicy.testing.sequences import Sequences  # noqa: E402
from tests.executors_launcher.checker import EAGER, eager_part, opened  # noqa: E402

DECODES = GraphKey(Part.FULL, 4, 4, query_len=1)
PIECES = GraphKey(Part.PIECEWISE, 16)
SETTINGS = Settings(max_num_reqs=8, max_num_tokens=32)


def _started(executor: Any, sizes: tuple[int, ...] = (9, 14)) -> tuple[Sequences, list[Any]]:
    sequences = Sequences(1)
    rows = [sequences.chunk(sequences.start(), size) for size in sizes]
    executor.run(EAGER, sequences.inputs(rows))
    sequences.advance(rows)
    return sequences, [row.sequence for row in rows]


def _begun(engine: Engine, seed: int) -> tuple[Sequences, Any]:
    """Sequences of that seed, the first of which has run its prompt of two tokens."""
    sequences = Sequences(seed)
    sequence = sequences.start()
    chunk = sequences.chunk(sequence, 2)
    engine.step(sequences.inputs([chunk]))
    sequences.advance([chunk])
    return sequences, sequence


def _mixed(sequences: Sequences, started: list[Any], steps: int = 1) -> Any:
    rows = [sequences.decode(each) for each in started] + [sequences.chunk(sequences.start(), 7)]
    return sequences.inputs(rows, steps=steps)


def _split(form: SplitForm, repeat: int = 1) -> Decision:
    side = int(form is not SplitForm.IN_TURN)
    launches = Launch(Rows.DECODE, DECODES, repeat=repeat), Launch(Rows.PREFILL, PIECES, stream=side)
    return Decision(Mode.SPLIT, launches, Reason.DECODES_KEEP_GRAPH, form)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("capture_fails@2", Reason.CAPTURE_FAILED),
        ("capture_out_of_memory@2", Reason.CAPTURE_OUT_OF_MEMORY),
        ("capture_out_of_streams@2", Reason.CAPTURE_OUT_OF_STREAMS),
        ("mid_segment@2", Reason.CAPTURE_FAILED),
    ],
)
@pytest.mark.parametrize("part", list(Part))
def test_a_failed_capture_leaves_no_trace(part: Part, fault: str, reason: Reason, small: Callable[..., Any]) -> None:
    """The second recording fails: in PIECEWISE midway. The key has the reason, the device has the memory back."""
    # A larger graph goes before in FULL; in PIECEWISE the second recording is the second segment of the first graph.
    keys = [GraphKey(part, size, size if part is Part.FULL else None, **_uniform(part)) for size in (8, 4)]
    executor, registry = CpuExecutor(small(), memory_bytes=1 << 30, faults=[fault]), GraphRegistry()
    registry.plan(keys)
    executor.open(registry)
    used: list[int] = []
    executor.capture(keys, lambda *_: used.append(executor.adapter.memory().used))
    states = [registry.record(key) for key in keys]
    failed = states[0] if part is Part.PIECEWISE else states[1]
    other = states[1] if part is Part.PIECEWISE else states[0]
    assert (failed.state, failed.reason) == (GraphState.FAILED, reason)
    assert failed.seconds > 0
    assert other.state is GraphState.CAPTURED
    graphs = [graph for pool in executor.adapter._pools for graph in pool.graphs]
    assert len(graphs) == other.graphs, "graphs of the failed capture are still held"
    if part is Part.FULL:
        assert used[1] == used[0]
    before = executor.adapter.memory().used
    executor.capture([failed.key])
    assert registry.record(failed.key).state is GraphState.CAPTURED
    assert executor.adapter.memory().used >= before
    del states, other, failed  # records have the graphs
    executor.release()
    assert executor.adapter.memory().used == 0


def _uniform(part: Part) -> dict[str, int]:
    return {"query_len": 1} if part is Part.FULL else {}


def test_memory_that_runs_out_costs_graphs_only(small: Callable[..., Any]) -> None:
    """Under a limit of memory some graphs are captured, others fail for it, and steps run in lesser modes."""
    engine = Engine(
        "full_and_piecewise", executor=CpuExecutor(small(), memory_bytes=60_000), settings=SETTINGS, attention="mixed",
        ladder=[1, 2, 4, 8, 16, 32],
    )  # fmt: skip
    engine.capture()
    reasons = {record.reason for record in engine.registry.records() if record.state is GraphState.FAILED}
    assert reasons == {Reason.CAPTURE_OUT_OF_MEMORY}
    sequences = Sequences(3)
    row = sequences.chunk(sequences.start(), 20)
    expected = CpuExecutor(small()).run(EAGER, sequences.inputs([row]))
    got = engine.step(sequences.inputs([row]))
    assert torch.allclose(got.outputs[0], expected.outputs[0], atol=1e-4)


@pytest.mark.parametrize("fault", ["replay_fails@1", "before_launch@1", "staging_fails@30"])
@pytest.mark.parametrize("policy", ["full", "piecewise"])
def test_a_graph_that_fails_before_launch_costs_speed(fault: str, policy: str, small: Callable[..., Any]) -> None:
    """The Engine withdraws the graph, decides again, and the step's outputs are eager's."""
    model = small()
    executor = CpuExecutor(model, faults=[fault])
    engine = Engine(policy, executor=executor, settings=SETTINGS, attention="mixed", ladder=[4])
    engine.capture()
    sequences = Sequences(2)
    sequence = sequences.start()
    reference = CpuExecutor(small())
    for size in (2, 1, 1, 3, 1, 1):
        row = sequences.chunk(sequence, size)
        inputs = sequences.inputs([row])
        got, wanted = engine.step(inputs), reference.run(EAGER, inputs)
        assert torch.allclose(got.outputs[0], wanted.outputs[0], atol=1e-4)
        sequences.advance([row])
    assert engine.stats.replay_failures == 1
    assert {record.reason for record in engine.registry.records() if record.state is GraphState.WITHDRAWN} == {
        Reason.REPLAY_FAILED
    }


def test_staging_of_an_eager_launch_is_tried_twice(small: Callable[..., Any]) -> None:
    """A copy that fails once under an eager launch, which has no lesser mode, doesn't cost the step."""
    model = small()
    executor = CpuExecutor(model, faults=["staging_fails@3"])
    sequences = Sequences(2)
    inputs = sequences.inputs([sequences.chunk(sequences.start(), 5)])
    got = executor.run(EAGER, inputs).outputs[0]
    assert torch.equal(got, CpuExecutor(small()).run(EAGER, inputs).outputs[0])


@pytest.mark.parametrize(
    ("form", "half"),
    [(SplitForm.IN_TURN, 1), (SplitForm.BESIDE, 0), (SplitForm.BESIDE, 1), (SplitForm.DECODES_BESIDE, 0)],
)
def test_a_half_that_fails_runs_eagerly_at_its_size(form: SplitForm, half: int, small: Callable[..., Any]) -> None:
    """In turn and on a stream beside: outputs are the replay's, the key goes, and the decision says what ran."""
    model = small()
    executor, registry = opened(model, [DECODES, PIECES])
    sequences, started = _started(executor)
    decision = _split(form, 3 if form is SplitForm.DECODES_BESIDE else 1)
    inputs = _mixed(sequences, started, 3)
    parts = [eager_part(executor, launch, inputs) for launch in decision.launches]
    failing = executor._handles[decision.launches[half].key]
    _fail_once(executor, failing)
    outputs = executor.run(decision, inputs)
    rows = list(outputs.outputs)
    wanted = [row for part in parts for row in part.outputs]
    same = torch.equal if form is not SplitForm.IN_TURN else lambda a, b: torch.allclose(a, b, atol=1e-4)
    assert all(map(same, rows, wanted))
    assert [list(each) for each in outputs.tokens] == [list(each) for each in parts[0].tokens]
    for event in outputs.ready:
        event.wait()
    ran = outputs.decision.launches[half]
    assert (ran.key, ran.padded_tokens, ran.reason) == (None, failing.key.num_tokens, Reason.REPLAY_FAILED)
    assert outputs.decision.launches[1 - half] == decision.launches[1 - half]
    record = registry.record(failing.key)
    assert (record.state, record.reason) == (GraphState.WITHDRAWN, Reason.REPLAY_FAILED)


def _fail_once(executor: Any, handle: Any) -> None:
    """The device's library raises at the first replay of that graph."""
    graphs = {id(handle._graph)} if hasattr(handle, "_graph") else {id(handle._segments[0].graph)}
    replay = executor.adapter.replay

    def failing(graph: Any) -> None:
        if id(graph) in graphs:
            graphs.clear()
            raise RuntimeError("failed on purpose")
        replay(graph)

    executor.adapter.replay = failing
    if isinstance(handle, FullGraph):
        handle.launch = partial(failing, handle._graph)


def test_an_engine_counts_a_half_that_failed_beside(small: Callable[..., Any]) -> None:
    """What a step behind the host really ran is counted when it is over, the failure with it."""
    model = small()
    engine = Engine("split:form=beside", model=model, settings=SETTINGS, ladder=[4, 16])
    engine.capture()
    sequences, started = _started(engine.executor)
    key = next(key for key in engine.keys if key.part is Part.FULL and key.num_tokens == 4)
    _fail_once(engine.executor, engine.executor._handles[key])
    inputs = _mixed(sequences, started)
    outputs = engine.step(inputs)
    assert len([row.clone() for row in outputs.outputs]) == 3
    assert engine.stats.replay_failures == 1
    assert engine.stats.half_reasons == {"replay_failed": 1}
    assert engine.registry.record(key).hits == 0
    assert engine.step(inputs).decision.launches[0].key != key


def test_a_lost_device_stops_the_engine(small: Callable[..., Any]) -> None:
    """A sticky error in a replay raises one named error, now and ever after."""
    engine = Engine("full", executor=CpuExecutor(small(), faults=["sticky@2"]), settings=SETTINGS, ladder=[4])
    engine.capture()
    sequences, sequence = _begun(engine, 2)
    decode = sequences.decode(sequence)
    for _ in range(2):
        with pytest.raises(StickyDeviceError):
            engine.step(sequences.inputs([decode])), engine.step(sequences.inputs([decode]))


def test_a_device_lost_beside_is_told_where_the_host_waits(small: Callable[..., Any]) -> None:
    """A half that loses the device raises from its outputs and from the Engine's next step."""
    model = small()
    executor = CpuExecutor(model, faults=["sticky@1"])
    engine = Engine("split:form=beside", executor=executor, attention="mixed", settings=SETTINGS, ladder=[4, 16])
    engine.capture()
    sequences, started = _started(executor)
    inputs = _mixed(sequences, started)

    def step_and_read() -> None:
        outputs = engine.step(inputs)
        for event in outputs.ready:
            event.wait()

    with pytest.raises(StickyDeviceError):
        step_and_read()
    with pytest.raises(StickyDeviceError):
        engine.step(inputs)


def test_a_models_own_error_beside_reaches_the_reader(
    small: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the model raises in an eager half is raised as it is, from that half's outputs only."""
    model = small()
    executor, _ = opened(model, [DECODES])
    sequences, started = _started(executor)
    inputs = _mixed(sequences, started)
    split = _split(SplitForm.BESIDE)
    decision = Decision(Mode.SPLIT, (split.launches[0], Launch(Rows.PREFILL, None, stream=1)), split.reason, split.form)

    def broken(step: Any) -> Any:
        raise ZeroDivisionError("the model's own")

    with monkeypatch.context() as patched:
        patched.setattr(model, "forward", broken)
        outputs = executor.run(decision, inputs)
        assert len(list(outputs.tokens[0])) == 2
        with pytest.raises(ZeroDivisionError, match="the model's own"):
            list(outputs.first_tokens)
    assert len(list(executor.run(decision, inputs).first_tokens)) == 1


def test_the_first_launch_of_a_step_raises_for_the_engine(small: Callable[..., Any]) -> None:
    """A whole-batch graph that fails names itself, and nothing else of the step has run."""
    executor, _ = opened(small(), [DECODES])
    sequences, started = _started(executor)
    inputs = sequences.inputs([sequences.decode(each) for each in started])
    _fail_once(executor, executor._handles[DECODES])
    with pytest.raises(GraphReplayError, match="failed on purpose") as caught:
        executor.run(Decision(Mode.FULL, (Launch(Rows.ALL, DECODES),), Reason.GRAPH_FITS), inputs)
    assert caught.value.key == DECODES


def test_a_device_lost_behind_the_host_still_gives_its_memory_back(small: Callable[..., Any]) -> None:
    """Releasing an Engine whose last step lost the device on a stream beside gives back every graph and buffer."""
    executor = CpuExecutor(small(), faults=["sticky@1"])
    sizes = CaptureSizes((4,), (), (16,))
    engine = Engine("split:form=beside", attention="gqa", ladder=sizes, settings=SETTINGS, executor=executor)
    engine.capture()
    assert executor.captured
    sequences = Sequences(1)
    rows = [sequences.chunk(sequences.start(), size) for size in (9, 14)]
    assert engine.step(sequences.inputs(rows)).decision.mode is Mode.EAGER
    sequences.advance(rows)
    outputs = engine.step(_mixed(sequences, [row.sequence for row in rows]))
    assert outputs.decision.mode is Mode.SPLIT
    with pytest.raises(StickyDeviceError):
        list(outputs.tokens[0])
    engine.release()
    assert executor.captured == frozenset()
    assert engine.registry.captured() == ()
    assert sum(pool.held.graphs for pool in engine.registry.pools()) == 0


def test_uniform_row_starts_are_kept_only_once_staged(small: Callable[..., Any]) -> None:
    """A staging fault while the row starts of a query length are made leaves no zeros for the next launch."""
    from kpolicy.executors.buffers import PaddedShape, StepBuffers
    from kpolicy.executors.cpu import CpuAdapter

    adapter = CpuAdapter(faults=["staging_fails@1"])
    buffers = StepBuffers(adapter, small(), 8, 4)
    with pytest.raises(RuntimeError, match="staging_fails"):
        buffers.tensors(PaddedShape(8, 4, 2))
    assert buffers.tensors(PaddedShape(8, 4, 2)).query_starts.tolist() == [0, 2, 4, 6, 8]


@pytest.mark.parametrize("fault", ["before_launch@1", "before_launch@2", "replay_fails@1"])
def test_a_graph_that_fails_behind_the_host_is_named_and_verified_at_its_shape(
    fault: str, small: Callable[..., Any]
) -> None:
    """Which graph the rows ran in place of is known when the part is over, and EAGER at that shape equals it."""
    from kpolicy.serving.verify import Verifier

    model = small()
    executor, registry = CpuExecutor(model, faults=[fault]), GraphRegistry()
    registry.plan([DECODES, PIECES])
    executor.open(registry)
    executor.capture([DECODES, PIECES])
    sequences, started = _started(executor)
    inputs = _mixed(sequences, started)
    verifier = Verifier(model, executor.launcher)
    outputs: Any = executor.run(_split(SplitForm.BESIDE), inputs)
    verifier.check(0, inputs, outputs, Any, 0.0)  # type: ignore[arg-type]
    assert list(outputs.failed_keys.values()) in ([DECODES], [PIECES])
    assert [place for place, launch in enumerate(outputs.decision.launches) if launch.key is None] == list(
        outputs.failed_keys
    )
    assert verifier.differences == []
    executor.release()


def test_a_device_lost_in_capture_is_counted_on_its_key(small: Callable[..., Any]) -> None:
    """The key that lost it has failed for that reason, and the error is the caller's and every later step's."""
    executor = CpuExecutor(small())
    engine = Engine("full", executor=executor, settings=SETTINGS, ladder=[2, 4])
    executor.adapter._faults.lost = True
    with pytest.raises(StickyDeviceError):
        engine.capture()
    lost = {record.key: record.reason for record in engine.registry.records() if record.reason is not None}
    assert list(lost.values()) == [Reason.DEVICE_LOST]
    assert "lost" in executor.capture_errors[next(iter(lost))]
    with pytest.raises(StickyDeviceError):
        engine.capture()


def test_a_later_launch_says_why_it_lost_its_graph(small: Callable[..., Any]) -> None:
    """Memory that moved under the second launch's graph is that launch's reason, and the record's."""
    executor = CpuExecutor(small())
    engine = Engine("split:form=in_turn", executor=executor, settings=SETTINGS, ladder=[2, 4, 8, 16])
    engine.capture()
    sequences, sequence = _begun(engine, 3)
    inputs = sequences.inputs([sequences.decode(sequence), sequences.chunk(sequences.start(), 5)])
    key = engine.select(*inputs.numbers).launches[1].key
    assert key is not None
    replay = executor.launcher.replay

    def moved(handle: Any, rows: Any, launch: Any) -> Any:
        if launch.key == key:
            raise GraphReplayError(key, "weight is now elsewhere", Reason.ADDRESS_CHANGED)
        return replay(handle, rows, launch)

    executor.launcher.replay = moved  # type: ignore[method-assign]
    outputs = engine.step(inputs)
    assert outputs.decision.launches[1].reason is Reason.ADDRESS_CHANGED
    assert engine.registry.record(key).reason is Reason.ADDRESS_CHANGED
    assert engine.stats.half_reasons == {"address_changed": 1}
