"""What goes wrong around an Engine on a GPU: each costs graphs with a reason, and no step.

Moved weights and swapped inputs under the debug mode are in tests/executors_launcher/test_addresses.py, which runs on
GPUs too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kpolicy.engine import Engine
from kpolicy.executors.cuda import CudaExecutor
from kpolicy.reasons import Reason
from kpolicy.registry import GraphState
from kpolicy.serving.load import load
from kpolicy.settings import Settings
from kpolicy.testing.sequences import Sequences
from tests.executors_launcher.checker import EAGER
from tests.executors_launcher.conftest import SMALL

SETTINGS = Settings(max_num_reqs=8, max_num_tokens=64)
LADDER = [1, 2, 4, 8, 16, 32, 64]


@pytest.fixture
def model() -> Any:
    return load(SMALL, device="cuda", dtype="bfloat16", num_blocks=64, block_size=16, max_model_len=512, max_num_reqs=8)


@pytest.fixture
def all_memory() -> Iterator[None]:
    """The allocator may take everything again afterwards."""
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def opened(model: Any) -> Engine:
    executor = CudaExecutor(model, max_num_reqs=8)
    return Engine(
        "full_and_piecewise", executor=executor, attention=model.support, settings=SETTINGS, ladder=LADDER, calibrate=0
    )


def steps_are_right(engine: Engine, seed: int) -> set[str]:
    """Some steps against eager ones; the modes that ran."""
    sequences, modes = Sequences(seed), set()
    for _ in range(20):
        rows = sequences.random_rows(8, 60)
        inputs = sequences.inputs(rows)
        outputs = engine.step(inputs)
        modes.add(outputs.decision.mode.value)
        wanted = engine.executor.run(EAGER, inputs)  # type: ignore[union-attr]
        for mine, other in zip(outputs.outputs, wanted.outputs, strict=True):
            assert torch.allclose(mine.float(), other.float(), atol=0.25, rtol=0.05)
        sequences.advance(rows)
    return modes


def reasons(engine: Engine) -> dict[Reason | None, int]:
    found: dict[Reason | None, int] = {}
    for record in engine.registry.records():
        found[record.reason] = found.get(record.reason, 0) + 1
    return found


def test_a_model_that_synchronises_in_capture(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every capture fails with its reason, all steps run eagerly, and without the fault everything is captured."""
    layer = model.hf.model.layers[1].mlp
    forward = layer.forward

    def synchronising(hidden: Any) -> Any:
        torch.cuda.synchronize()
        return forward(hidden)

    engine = opened(model)
    with monkeypatch.context() as patch:
        patch.setattr(layer, "forward", synchronising)
        engine.capture()
        assert set(reasons(engine)) == {Reason.CAPTURE_ILLEGAL}
        assert "synchron" in next(iter(engine.executor.capture_errors.values())).lower() or (  # type: ignore[union-attr]
            "captur" in next(iter(engine.executor.capture_errors.values())).lower()  # type: ignore[union-attr]
        )
        assert steps_are_right(engine, 1) == {"eager"}
    engine.capture()
    assert set(reasons(engine)) == {None}
    assert steps_are_right(engine, 2) - {"eager"}
    engine.release()


def test_a_host_read_is_found_at_load() -> None:
    """A forward that reads the host runs eagerly from the start, and the support says why."""
    import transformers

    llama: Any = transformers.models.llama.modeling_llama.LlamaMLP
    forward = llama.forward

    def reading(self: Any, hidden: Any) -> Any:
        return forward(self, hidden) * (1.0 if float(hidden.sum()) < 1e30 else 0.0)

    llama.forward = reading
    try:
        found = load(SMALL, device="cuda", num_blocks=64, block_size=16, max_model_len=512, max_num_reqs=8)
        engine = Engine("auto", model=found, device="cuda", settings=SETTINGS, ladder=LADDER, calibrate=0)
        assert engine.keys == ()
        assert any("reads the host" in limit for limit in engine.support.limits)
        assert steps_are_right(engine, 3) == {"eager"}
        engine.release()
    finally:
        llama.forward = forward


def test_memory_that_runs_out_half_way(model: Any, all_memory: None) -> None:
    """Graphs that memory holds are captured, the others have the reason, and they come when there is memory again."""
    engine = opened(model)
    count = 0

    def squeeze(_key: Any, _report: Any) -> None:
        nonlocal count
        count += 1
        if count == 2:
            torch.cuda.empty_cache()
            total = torch.cuda.mem_get_info()[1]
            torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (1 << 20)) / total)

    engine.capture(squeeze)
    found = reasons(engine)
    assert found.keys() <= {None, Reason.CAPTURE_OUT_OF_MEMORY}
    assert found.get(None, 0) >= 2
    torch.cuda.set_per_process_memory_fraction(1.0)
    assert steps_are_right(engine, 4)
    if Reason.CAPTURE_OUT_OF_MEMORY in found:
        engine.capture()
        assert all(record.state is GraphState.CAPTURED for record in engine.registry.records())
        assert steps_are_right(engine, 5) - {"eager"}
    before = torch.cuda.memory_reserved()
    engine.release()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < before


def test_an_input_that_was_swapped_is_found_without_the_debug_mode(model: Any) -> None:
    """Staging knows its own tensors: graphs that read the old one are withdrawn, and the step runs in another pool."""
    engine = opened(model)
    engine.capture()
    sequences = Sequences(6)
    inputs = sequences.inputs([sequences.chunk(sequences.start(), 5)])
    (key,) = engine.step(inputs).decision.keys
    buffers = engine.registry.record(key).handle.buffers
    buffers.token_ids = torch.zeros_like(buffers.token_ids)
    outputs = engine.step(inputs)
    assert key not in outputs.decision.keys
    assert engine.registry.record(key).reason is Reason.ADDRESS_CHANGED
    wanted = engine.executor.run(EAGER, inputs)  # type: ignore[union-attr]
    assert torch.allclose(outputs.outputs[0].float(), wanted.outputs[0].float(), atol=0.25, rtol=0.05)
    engine.release()


def test_a_weight_that_moved_is_found_without_the_debug_mode(model: Any) -> None:
    """A look between steps withdraws every graph; captured anew they replay."""
    engine = opened(model)
    engine.capture()
    weight = model.hf.model.layers[1].mlp.up_proj.weight
    weight.data = weight.data.clone()
    executor: Any = engine.executor
    assert executor.look()
    assert set(reasons(engine)) == {Reason.ADDRESS_CHANGED}
    assert steps_are_right(engine, 7) == {"eager"}
    engine.capture()
    assert not executor.look()
    assert steps_are_right(engine, 8) - {"eager"}
    engine.release()
