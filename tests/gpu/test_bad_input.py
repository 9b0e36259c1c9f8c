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
from kpolicy.modes import Part
from kpolicy.reasons import Reason
from kpolicy.registry import GraphState
from kpolicy.serving.load import load
from kpolicy.settings import Settings
from kpolicy.testing.sequences import Sequences
from tests.executors_launcher.checker import EAGER
from tests.executors_launcher.conftest import SMALL
from tests.gpu.memory import held

SETTINGS = Settings(max_num_reqs=8, max_num_tokens=64)
LADDER = [1, 2, 4, 8, 16, 32, 64]
OUT_OF_MEMORY = Reason.CAPTURE_OUT_OF_MEMORY


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


@pytest.mark.parametrize("come_first", [0, 2])
def test_memory_that_runs_out_half_way(model: Any, all_memory: None, come_first: int) -> None:
    """Graphs that memory holds are captured, the others have the reason, and they come when there is memory again.

    From some graph on torch's allocator may take no more of the device than next to nothing, so that it can't get a
    segment, and a pool that has no graph yet needs one of its own: every PIECEWISE graph fails, as the pool of FULL
    ones came first, and each of that one's that needs more than it has.
    """
    engine = opened(model)
    executor: Any = engine.executor
    engine.capture()
    assert steps_are_right(engine, 9) - {"eager"}
    executor.release()
    before, captured = held(), 0

    def squeeze(_key: Any = None, report: Any = None) -> None:
        nonlocal captured
        captured += report is not None
        if captured == come_first:
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(1e-6)

    squeeze()
    engine.capture(squeeze)
    torch.cuda.set_per_process_memory_fraction(1.0)
    found = reasons(engine)
    assert found.keys() == ({None, OUT_OF_MEMORY} if come_first else {OUT_OF_MEMORY}), executor.capture_errors
    assert found.get(None, 0) >= come_first
    pieces = {record.reason for record in engine.registry.records() if record.key.part is Part.PIECEWISE}
    assert pieces == {OUT_OF_MEMORY}
    assert all("out of memory" in why for why in executor.capture_errors.values())
    modes = steps_are_right(engine, 4)
    assert modes if come_first else modes == {"eager"}
    engine.capture()
    assert all(record.state is GraphState.CAPTURED for record in engine.registry.records())
    assert steps_are_right(engine, 5) - {"eager"}
    engine.release()
    after = held()
    assert after.is_back_at(before), (after, before)


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
