"""A graph that waits for ever: whoever waits for its step gets a named error after the time limit, not a hang."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kpolicy.engine import Engine  # noqa: E402
from kpolicy.errors import ConfigError, StickyDeviceError, UpdateStallError  # noqa: E402
from kpolicy.executors.ascend import AscendAdapter, AscendExecutor, UpdateOrder  # noqa: E402
from kpolicy.executors.ascend.updates import Updater  # noqa: E402
from kpolicy.reasons import Reason  # noqa: E402
from kpolicy.testing import Sequences  # noqa: E402
from tests.executors_ascend.helpers import on_ascend  # noqa: E402
from tests.executors_ascend.test_orders import _NoSignal, _WrongStream  # noqa: E402
from tests.executors_launcher.checker import BLOCK_SIZE, NUM_BLOCKS, kept_by_outputs, load_family  # noqa: E402
from tests.fakes.torch_npu import fake_torch_npu  # noqa: E402

LIMIT_S = 0.2
"""Of steps that stall for certain"""
LONG_S = 600.0
"""Of steps that end, however slow the machine"""


def serving(
    order: str, way: str, updater: type[Updater] | None, limit_s: float = LIMIT_S
) -> tuple[Engine, Any, Any]:  # fmt: skip
    """An Engine whose graphs are captured, the library, and the inputs of decode steps to come."""
    model, library = on_ascend(load_family("llama"))
    executor = AscendExecutor(
        model, library=library, update_order=order, update_way=way, update_timeout_s=limit_s
    )  # fmt: skip
    if updater is not None:
        adapter = executor.adapter
        adapter._updater = updater(library.npu, adapter._updater.stream, UpdateOrder(order), limit_s)
    engine = Engine("full", executor=executor, ladder=[8], calibrate=0)
    engine.capture()
    sequences = Sequences(1, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, vocab=128)
    first = sequences.start()

    def steps() -> Any:
        rows = [sequences.chunk(first, 6)]
        while True:
            yield sequences.inputs(rows)
            sequences.advance(rows, accepted=1)
            rows = [sequences.decode(first, 1)]

    return engine, library, steps()


def _nothing(self: Any, cpu_update_input: Any) -> None:
    """An update that rewrites and signals nothing."""


@pytest.mark.parametrize("updater", [_NoSignal, _WrongStream])
@pytest.mark.parametrize("order", ["replay_fenced", "replay_barrier"])
def test_a_stalled_update_is_a_named_error_after_the_limit(order: str, updater: type[Updater]) -> None:
    """The error names the graphs, the order, the limit and the next step; the Engine stops, and the device is free."""
    engine, library, steps = serving(order, "task_groups", updater)
    outputs = engine.step(next(steps))
    with pytest.raises(UpdateStallError, match=r"update_timeout_s=0\.2.*FULL.*replay_") as caught:
        outputs.outputs[0].tolist()
    assert set(outputs.decision.keys) <= set(caught.value.keys)
    with pytest.raises(StickyDeviceError):
        engine.step(next(steps))
    executor: Any = engine.executor
    again = []
    for _ in range(2):
        with pytest.raises(UpdateStallError) as each:
            executor.adapter.finish(outputs.ready[0])
        again.append(each.value)
        assert (each.value.keys, str(each.value)) == (caught.value.keys, str(caught.value))
    # An error of its own each time: one that is raised again and again keeps the frames of all.
    assert again[0] is not again[1]
    # The graph was let go, so that the process can end.
    library.npu.synchronize()
    engine.release()


@pytest.mark.parametrize("gives_up", ["release", "evict"])
def test_a_stalled_graph_that_nobody_waited_for_is_given_back(gives_up: str) -> None:
    """Giving memory back waits for the device: no longer than the limit, and the graph is let go."""
    engine, library, steps = serving("replay_fenced", "task_groups", _NoSignal)
    engine.step(next(steps))
    executor: Any = engine.executor
    if gives_up == "release":
        engine.release()
    else:
        executor.adapter.trim()
    with pytest.raises(UpdateStallError, match=r"update_timeout_s=0\.2"):
        executor.adapter._check_lost()
    library.npu.synchronize()


def test_a_stalled_whole_graph_update_is_found_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Likewise where torch_npu owns the events."""
    engine, library, steps = serving("replay_fenced", "whole_graph", None)
    monkeypatch.setattr(library.npu.NPUGraph, "update", _nothing)
    outputs = engine.step(next(steps))
    with pytest.raises(UpdateStallError, match="whole_graph"):
        outputs.ready[0].wait()
    library.npu.synchronize()


@pytest.mark.parametrize("order", list(UpdateOrder), ids=str)
def test_a_whole_graph_update_that_fails_midway_leaves_no_graph_waiting(
    order: UpdateOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One layer is rewritten and signalled, the others aren't: the graph is lost, the step and the device aren't."""
    engine, library, steps = serving(str(order), "whole_graph", None, LONG_S)
    engine.step(next(steps)).outputs[0].tolist()
    whole = library.npu.NPUGraph.update

    def fails(self: Any, cpu_update_input: Any) -> None:
        monkeypatch.setattr(library.npu.NPUGraph, "update", whole)
        mode = self.graph_dispatch_mode
        records = mode.graph_dispatch_records
        assert len(records) > 1
        mode.graph_dispatch_records = records[:1]
        whole(self, cpu_update_input[:1])
        mode.graph_dispatch_records = records
        library.npu.graph_task_update_begin(mode.update_stream, records[1].handle)
        raise RuntimeError("npu_fused_infer_attention_score.out failed, error code is 561002")

    monkeypatch.setattr(library.npu.NPUGraph, "update", fails)
    outputs = engine.step(next(steps))
    library.npu.synchronize()
    assert torch.isfinite(outputs.outputs[0]).all()
    assert [each.reason for each in engine.registry.records()].count(Reason.REPLAY_FAILED) == 1
    engine.step(next(steps))
    library.npu.synchronize()


def test_the_barrier_itself_does_not_hang() -> None:
    """With the host barrier, a step after one that stalled finds out where it waits, before anything is launched."""
    engine, library, steps = serving("replay_barrier", "task_groups", _NoSignal)
    executor: Any = engine.executor
    inputs = next(steps)
    decision = engine.compiled.select(*inputs.numbers)
    executor.run(decision, inputs)
    replays = library.chip.replays
    with pytest.raises(UpdateStallError):
        executor.run(decision, inputs)
    assert library.chip.replays == replays


@pytest.mark.parametrize("order", list(UpdateOrder), ids=str)
def test_sound_orders_are_not_taken_for_stalls(order: UpdateOrder) -> None:
    """With updates as they should be, waiting ends with the step."""
    engine, _, steps = serving(str(order), "task_groups", None, LONG_S)
    for _ in range(5):
        outputs = engine.step(next(steps))
        outputs.ready[0].wait()
        assert torch.isfinite(outputs.outputs[0]).all()


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf")])
def test_a_limit_that_is_none_is_refused(timeout: float) -> None:
    """Without a limit a stall would hang."""
    with pytest.raises(ConfigError, match="update_timeout_s"):
        AscendAdapter("cpu", library=fake_torch_npu(), update_timeout_s=timeout)


@pytest.mark.parametrize("way", ["task_groups", "whole_graph"])
def test_released_graphs_are_kept_by_nobody(way: str) -> None:
    """Graphs and their tasks, whose arguments are tensors of the pool, go with `release`."""
    engine, _, steps = serving("replay_fenced", way, None, LONG_S)
    outputs = engine.step(next(steps))
    outputs.ready[0].wait()
    executor: Any = engine.executor
    held = [weakref.ref(each) for pair in executor.adapter._updater._recent for each in pair]
    assert held
    engine.release()
    del outputs
    gc.collect()
    assert [each() for each in held] == [None] * len(held)


@pytest.mark.parametrize("policy", ["eager", "piecewise", "full"])
def test_outputs_do_not_keep_the_model(policy: str) -> None:
    """Who holds a step's outputs after release can still wait for them, and holds neither weights nor KV."""

    def executor(model: Any) -> AscendExecutor:
        model, library = on_ascend(model)
        return AscendExecutor(model, library=library)

    assert kept_by_outputs(executor, policy) == []
