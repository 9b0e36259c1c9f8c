"""Weights that move where no replay looks, over an adapter whose device takes no time; see `benchmarks.host_step`."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from benchmarks.engine_step import decode_inputs  # noqa: E402
from benchmarks.host_step import NoModel, Point, opened  # noqa: E402
from kpolicy.engine import COUNT_EVERY, LOOK_EVERY  # noqa: E402
from kpolicy.executors.base import StepInputs  # noqa: E402
from kpolicy.executors.faults import Faults  # noqa: E402
from kpolicy.observe.events import GraphWithdrawn  # noqa: E402
from kpolicy.reasons import Reason  # noqa: E402
from kpolicy.registry import GraphState  # noqa: E402
from kpolicy.shapes import BatchShape  # noqa: E402

WITHIN = LOOK_EVERY + 2 * COUNT_EVERY
"""Steps until a move is found, at most."""


def mixed_inputs(model: Any) -> StepInputs:
    """Two decode rows beside a prompt of nine tokens."""
    size, lens, kv = model.block_size, [1, 1, 9], [20, 5, 9]
    tables = [[4 * row + i for i in range(4)] for row in range(3)]
    positions = [at for q, n in zip(lens, kv, strict=True) for at in range(n - q, n)]
    rows = [row for row, q in enumerate(lens) for _ in range(q)]
    slots = [tables[row][at // size] * size + at % size for row, at in zip(rows, positions, strict=True)]
    numbers = BatchShape(decodes=((1, 2),), decode_kv_tokens=25, prefills=((9, 0),)).numbers
    return StepInputs(numbers, lens, [1] * 11, positions, slots, tables, kv, [0, 1, 10])


class Weights:
    """A model's weights by name, and how often they were looked at."""

    def __init__(self) -> None:
        self.held = {"up_proj": torch.zeros(4), "down_proj": torch.zeros(4)}
        self.looks = 0

    def named(self) -> dict[str, Any]:
        self.looks += 1
        return dict(self.held)


@pytest.fixture
def weights(monkeypatch: pytest.MonkeyPatch) -> Weights:
    monkeypatch.setattr(torch.cuda, "Event", Point)
    made = Weights()
    monkeypatch.setattr(NoModel, "static_tensors", lambda _: made.named(), raising=False)
    return made


def test_weights_that_stay_are_looked_at_seldom(weights: Weights) -> None:
    """Once in some hundred steps, and no graph goes."""
    engine, model = opened()
    inputs = decode_inputs(3, model.num_blocks)
    captured, before = engine.registry.captured(), weights.looks
    for _ in range(3 * WITHIN):
        engine.step(inputs)
    assert 2 <= weights.looks - before <= 4
    assert engine.registry.captured() == captured


@pytest.mark.parametrize("reads", [False, True])
def test_looks_are_by_steps_whatever_counts_them(weights: Weights, reads: bool) -> None:
    """Not by how often steps are counted: SPLIT ones are counted one by one, and so is all where stats are read."""
    engine, model = opened("split:form=in_turn")
    mixed = mixed_inputs(model)
    assert len(engine.step(mixed).ready) == 2
    before, steps = weights.looks, 3 * WITHIN
    for _ in range(steps):
        engine.step(mixed)
        if reads:
            assert engine.stats.total.steps
    assert 2 <= weights.looks - before <= 4


def test_only_what_was_withdrawn_is_told(weights: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look that finds nothing leaves events alone, which a step on another thread may hold back."""
    engine, model = opened()
    told = list[str]()
    monkeypatch.setattr(engine.events, "graphs_withdrawn", lambda: told.append("told"))
    inputs = decode_inputs(3, model.num_blocks)
    for _ in range(2 * WITHIN):
        engine.step(inputs)
    assert not told
    weights.held["up_proj"] = torch.zeros(4)
    for _ in range(2 * WITHIN):
        engine.step(inputs)
    assert told == ["told"]


def test_a_weight_that_moved_costs_its_graphs_within_some_hundred_steps(weights: Weights) -> None:
    """All graphs are withdrawn, counted and told with the tensor's name, and steps go on; captured anew they replay."""
    engine, model = opened()
    told: list[Any] = []
    engine.events.subscribe(told.append)
    inputs = decode_inputs(3, model.num_blocks)
    keys = engine.registry.captured()
    assert engine.step(inputs).decision.mode.value == "full"
    weights.held["up_proj"] = torch.zeros(4)
    for _ in range(WITHIN):
        engine.step(inputs)
    assert engine.step(inputs).decision.mode.value == "eager"
    records = [engine.registry.record(key) for key in keys]
    assert {(each.state, each.reason) for each in records} == {(GraphState.WITHDRAWN, Reason.ADDRESS_CHANGED)}
    assert all("up_proj is now at" in engine.executor.capture_errors[key] for key in keys)
    assert {each.key for each in told if isinstance(each, GraphWithdrawn)} == set(keys)
    assert engine.stats.total.steps == WITHIN + 2
    engine.release()
    engine.capture()
    assert engine.registry.captured() == keys
    for _ in range(WITHIN):
        assert engine.step(inputs).decision.mode.value == "full"


def test_a_weight_that_is_gone_is_named(weights: Weights) -> None:
    engine, _ = opened()
    del weights.held["down_proj"]
    engine.executor.look()
    assert not engine.registry.captured()
    assert all("down_proj is gone" in words for words in engine.executor.capture_errors.values())
    engine.executor.look()


@pytest.mark.parametrize("made", [False, True], ids=["any tensor", "of the adapter"])
@pytest.mark.parametrize("what", ["token_ids", "positions", "slot_mapping", "block_table", "kv_lens", "scale"])
def test_an_input_that_was_swapped_costs_the_graph_not_the_step(
    what: str, made: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever it is, a model's own further inputs too: it would be staged, and the graph read the one that was."""
    monkeypatch.setattr(torch.cuda, "Event", Point)
    monkeypatch.setattr(NoModel, "extra_inputs", {"scale": ((4,), "float32")}, raising=False)
    engine, model = opened()
    inputs = decode_inputs(3, model.num_blocks)._replace(extra={"scale": [[1.0] * 4] * 3})
    (key,) = engine.step(inputs).decision.keys
    buffers = engine.registry.record(key).handle.buffers
    held = buffers.extra if what == "scale" else vars(buffers)
    shape, dtype = tuple(held[what].shape), held[what].dtype
    held[what] = (
        engine.executor.adapter.alloc_static(shape, str(dtype)[6:]) if made else torch.zeros(shape, dtype=dtype)
    )
    assert engine.step(inputs).decision.mode.value == "eager"
    record = engine.registry.record(key)
    assert (record.state, record.reason) == (GraphState.WITHDRAWN, Reason.ADDRESS_CHANGED)
    assert engine.stats.replay_failures >= 1


def test_graphs_that_are_gone_are_not_told_of_swaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that is captured anew in the same buffers again and again leaves nothing behind."""
    monkeypatch.setattr(torch.cuda, "Event", Point)
    engine, model = opened()
    (key,) = engine.step(decode_inputs(3, model.num_blocks)).decision.keys
    buffers = engine.registry.record(key).handle.buffers
    shape = engine.registry.record(key).handle.shape
    known = len(buffers._stagers)
    assert known > 0
    for _ in range(5):
        kept = buffers.decode_stager(shape)
    assert kept is not None
    assert len([each for each, _ in buffers._stagers if each() is not None]) == known + 1
    assert len(buffers._stagers) <= known + 2


@pytest.mark.parametrize("what", ["temperature", "seed"])
def test_a_sampling_input_that_was_swapped_costs_the_graph_not_the_step(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are staged where the rows are sampled, apart from the others."""
    monkeypatch.setattr(torch.cuda, "Event", Point)
    engine, model = opened()
    inputs = decode_inputs(3, model.num_blocks)
    inputs = inputs._replace(sampling={"temperature": [1.0] * 3, "seed": [1, 2, 3]})
    (key,) = engine.step(inputs).decision.keys
    buffers = engine.registry.record(key).handle.buffers
    held = getattr(buffers, what)
    setattr(buffers, what, torch.zeros(held.shape, dtype=held.dtype))
    assert engine.step(inputs).decision.mode.value == "eager"
    record = engine.registry.record(key)
    assert (record.state, record.reason) == (GraphState.WITHDRAWN, Reason.ADDRESS_CHANGED)
    assert engine.step(inputs).decision.mode.value == "eager"


def test_a_run_with_faults_finds_swapped_inputs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the adapter's own too, which could be staged."""
    monkeypatch.setattr(torch.cuda, "Event", Point)
    engine, model = opened()
    engine.executor.adapter._faults = Faults(["staging_fails@1000000"], "CUDA")
    inputs = decode_inputs(3, model.num_blocks)
    (key,) = engine.step(inputs).decision.keys
    buffers = engine.registry.record(key).handle.buffers
    buffers.positions = engine.executor.adapter.alloc_static(tuple(buffers.positions.shape), "int64")
    assert engine.step(inputs).decision.mode.value == "eager"
    assert engine.registry.record(key).reason is Reason.ADDRESS_CHANGED
