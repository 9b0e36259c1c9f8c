"""What a step asks of a CUDA device, over an adapter whose device takes no time; see `benchmarks.host_step`."""

from __future__ import annotations

import gc
from array import array
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

import pytest

torch = pytest.importorskip("torch")

from benchmarks.engine_step import decode_inputs  # noqa: E402
from benchmarks.host_step import Point, bare_step, calls_of, opened  # noqa: E402
from kpolicy.engine import COUNT_EVERY  # noqa: E402
from kpolicy.errors import ConfigError, GraphReplayError  # noqa: E402
from kpolicy.executors.base import StepInputs  # noqa: E402
from kpolicy.executors.cuda.staging import DecodeStager, StagedGroup  # noqa: E402
from kpolicy.executors.launcher import GraphLauncher  # noqa: E402


@pytest.fixture(autouse=True)
def points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Point)
    monkeypatch.setattr(Point, "asked", Counter())


@pytest.mark.parametrize("policy", ["full", "auto"])
def test_steps_ask_the_device_once_together(policy: str) -> None:
    """Two points are recorded a step, the last is asked whether all are over, and nothing is made anew.

    A step waits for the one that had its turn of pinned memory before, where nobody has yet.
    """
    engine, model = opened(policy)
    inputs = decode_inputs(3, model.num_blocks)
    for _ in range(2 * COUNT_EVERY):
        engine.step(inputs)
    assert engine.stats.total.steps == 2 * COUNT_EVERY
    Point.asked.clear()
    counted = 3 * (COUNT_EVERY - 1)
    for _ in range(counted + 1):
        engine.step(inputs)
    # Two of those before were waited for by `stats`.
    waits = counted + 1 - 2 - 3
    assert Point.asked == {
        "record": 2 * (counted + 1), "query": 3, "elapsed_time": counted, "synchronize": waits
    }  # fmt: skip
    assert engine.stats.total.steps == 2 * COUNT_EVERY + counted + 1
    assert engine.stats.by_mode["full"].us == pytest.approx(engine.stats.total.steps * 2000.0)


def test_steps_are_counted_together_while_the_last_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before it is launched, when the device would wait for it."""
    engine, model = opened()
    inputs = decode_inputs(3, model.num_blocks)
    order: list[str] = []

    def noted(name: str, call: Callable[..., Any], *given: Any) -> Any:
        order.append(name)
        return call(*given)

    engine.step(inputs)
    assert engine.stats.total.steps == 1
    monkeypatch.setattr(engine.executor, "run", partial(noted, "run", engine.executor.run))
    monkeypatch.setattr(engine, "_count_alike", partial(noted, "count", engine._count_alike))
    for _ in range(COUNT_EVERY + 1):
        engine.step(inputs)
    assert order == [*["run"] * COUNT_EVERY, "count", "run"]
    assert engine._stats.total.steps == COUNT_EVERY
    assert engine.stats.total.steps == COUNT_EVERY + 2


def test_steps_of_several_decisions_that_are_counted_together_count_each_for_its_own() -> None:
    """Steps, tokens, times and the graphs' replays, in whatever order sizes take turns."""
    engine, model = opened()
    sizes = [1, 1, 5, 1, 8, 8, 60, 1]
    for _ in range(3 * COUNT_EVERY):
        for size in sizes:
            engine.step(decode_inputs(size, model.num_blocks))
    steps = 3 * COUNT_EVERY * len(sizes)
    total = engine.stats.total
    assert (total.steps, total.tokens) == (steps, 3 * COUNT_EVERY * sum(sizes))
    assert total.padding == 3 * COUNT_EVERY * (3 + 4)
    assert total.us == pytest.approx(steps * 2000.0)
    hits = {record.key.num_tokens: record.hits for record in engine.registry.records() if record.hits}
    assert hits == {1: 4 * 3 * COUNT_EVERY, 8: 3 * 3 * COUNT_EVERY, 64: 3 * COUNT_EVERY}


def test_a_prepared_step_goes_with_its_graph() -> None:
    """After a release nothing of it runs; after another capture the new graph does."""
    engine, model = opened()
    inputs = decode_inputs(3, model.num_blocks)
    engine.step(inputs)
    old = ref(engine.registry.record(engine.select(*inputs.numbers).launches[0].key).handle)
    engine.release()
    gc.collect()
    assert old() is None
    engine.capture()
    outputs = engine.step(inputs)
    key = outputs.decision.launches[0].key
    assert key is not None
    assert engine.stats.total.steps == engine.registry.record(key).hits == 2


@pytest.mark.parametrize("num_reqs", [1, 3, 8])
def test_a_step_of_a_full_graph_is_what_its_launch_is(num_reqs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prepared step gives what `GraphLauncher.replay` gives, every field of it."""
    engine, model = opened()
    inputs = decode_inputs(num_reqs, model.num_blocks)
    prepared = engine.step(inputs)
    monkeypatch.setattr(GraphLauncher, "prepared", lambda *_: None)
    engine.executor.forget_prepared()
    plain = engine.step(inputs)
    assert prepared.decision == plain.decision
    assert prepared.tokens == plain.tokens
    assert len(prepared.tokens) == 1
    assert torch.equal(prepared.outputs.tensor, plain.outputs.tensor)
    assert list(prepared.first_tokens) == list(plain.first_tokens) == []
    assert prepared.ready_us == plain.ready_us


def test_a_launcher_with_replays_of_its_own_is_not_passed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prepared step stands for `GraphLauncher.replay` alone."""
    engine, model = opened()
    replay, rows = GraphLauncher.replay, []

    class Own(GraphLauncher):
        def replay(self, handle: Any, inputs: Any, launch: Any) -> Any:
            rows.append(len(inputs.query_lens))
            return replay(self, handle, inputs, launch)

    monkeypatch.setattr(engine.executor.launcher, "__class__", Own)
    for _ in range(3):
        engine.step(decode_inputs(3, model.num_blocks))
    assert rows == [3, 3, 3]


def test_a_step_that_waits_to_be_counted_keeps_none_of_its_outputs() -> None:
    """Their memory goes with the caller's last look at them."""
    engine, model = opened()
    outputs = engine.step(decode_inputs(3, model.num_blocks))
    logits = ref(outputs.outputs.tensor)
    del outputs
    assert logits() is None
    assert engine.stats.total.steps == 1


def test_a_step_that_runs_behind_the_host_is_counted_when_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before, and `stats` waits for it."""
    # Nor does anybody wait for pinned memory then, as test_pinned_memory.py has it.
    monkeypatch.setattr(StagedGroup, "commit", lambda self, *_: self.drop())
    monkeypatch.setattr(DecodeStager, "stage", lambda *_: True)
    monkeypatch.setattr(Point, "query", lambda _self: False)
    engine, model = opened()
    inputs = decode_inputs(3, model.num_blocks)
    for _ in range(2 * COUNT_EVERY):
        engine.step(inputs)
    assert engine._stats.total.steps == 0
    assert engine.stats.total.steps == 2 * COUNT_EVERY
    assert Point.asked["synchronize"] == 2 * COUNT_EVERY


def test_what_is_staged_is_what_the_graph_reads() -> None:
    """Rows in front and padding behind, as a bare step stages them."""
    engine, model = opened()
    inputs: StepInputs = decode_inputs(5, model.num_blocks)
    engine.step(inputs)
    key = engine.compiled.select(*inputs.numbers).launches[0].key
    held = engine.registry.record(key).handle.held
    assert held.token_ids.tolist() == [*inputs.token_ids, 0, 0, 0]
    assert held.slot_mapping.tolist() == [*inputs.slot_mapping, *[model.pad_slot] * 3]
    assert held.kv_lens.tolist() == [*inputs.kv_lens, 0, 0, 0]
    assert [row[: len(inputs.block_table[0])] for row in held.block_table.tolist()[:5]] == inputs.block_table
    held.token_ids.zero_()
    bare_step(engine, model, inputs)()
    assert held.token_ids.tolist() == [*inputs.token_ids, 0, 0, 0]


@pytest.mark.parametrize("how", ["arrays", "tensors", "swapped", "fewer"])
def test_what_a_quick_staging_does_not_take_goes_the_general_way(how: str) -> None:
    """Other sequences are staged as they are, a swapped input is told, and so is a step that lacks a token."""
    engine, model = opened()
    inputs: StepInputs = decode_inputs(5, model.num_blocks)
    handle = engine.registry.record(engine.compiled.select(*inputs.numbers).launches[0].key).handle
    engine.step(inputs)
    held = handle.held
    wanted = [held.token_ids.tolist(), held.block_table.tolist(), held.kv_lens.tolist()]
    for each in (held.token_ids, held.block_table, held.kv_lens):
        each.fill_(7)
    if how in ("arrays", "tensors"):
        made: Any = partial(array, "q") if how == "arrays" else torch.tensor
        engine.step(inputs._replace(token_ids=made(inputs.token_ids), kv_lens=made(inputs.kv_lens)))
        assert [held.token_ids.tolist(), held.block_table.tolist(), held.kv_lens.tolist()] == wanted
        return
    run, decision = engine.executor.run, engine.compiled.select(*inputs.numbers)
    if how == "swapped":
        own = handle.buffers.kv_lens
        handle.buffers.kv_lens = own.clone()
        assert not handle.stage_decodes(inputs, None)
        with pytest.raises(GraphReplayError, match="swapped"):
            run(decision, inputs)
        handle.buffers.kv_lens = own
        run(decision, inputs)
        assert [held.token_ids.tolist(), held.block_table.tolist(), held.kv_lens.tolist()] == wanted
    else:
        with pytest.raises(ConfigError):
            run(decision, inputs._replace(kv_lens=inputs.kv_lens[1:]))


def test_what_was_staged_before_comes_along() -> None:
    """Also where somebody left more of the same buffers uncommitted, behind what a step of decodes stages."""
    engine, model = opened()
    inputs: StepInputs = decode_inputs(8, model.num_blocks)
    engine.step(inputs)
    handle = engine.registry.record(engine.compiled.select(*inputs.numbers).launches[0].key).handle
    ahead = handle.buffers.slots_ahead
    engine.executor.adapter.stage(ahead, [[3, 4]], 1, 9)
    engine.step(inputs._replace(token_ids=[*range(8)]))
    assert ahead[0, :3].tolist() == [3, 4, 9]
    assert handle.held.token_ids.tolist() == [*range(8)]


@pytest.mark.parametrize("bad", [2**80, "x", None])
def test_a_value_that_cannot_be_staged_costs_its_step_alone(bad: Any) -> None:
    """It is told with the dtype that it doesn't fit, nothing of it is copied, and the next step is as ever."""
    engine, model = opened()
    inputs: StepInputs = decode_inputs(8, model.num_blocks)
    engine.step(inputs)
    held = engine.registry.record(engine.compiled.select(*inputs.numbers).launches[0].key).handle.held
    before = held.token_ids.tolist()
    with pytest.raises(ConfigError, match="int64 don't fit"):
        engine.step(inputs._replace(token_ids=[*range(7), 3], positions=[*inputs.positions[:7], bad]))
    assert held.token_ids.tolist() == before
    engine.step(inputs._replace(token_ids=[*range(8)]))
    assert held.token_ids.tolist() == [*range(8)]


def test_calls_are_counted() -> None:
    """Those that the function makes, without its own."""
    assert calls_of(lambda: len([abs(-1), max(*(lambda: (7, 2))())])) == {"python": 1, "built_in": 3}
