"""What a graph reads by its address, moved or swapped: the debug mode tells, and the step goes on without the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kpolicy.engine import Engine  # noqa: E402
from kpolicy.errors import GraphReplayError  # noqa: E402
from kpolicy.executors import get_executor  # noqa: E402
from kpolicy.executors.addresses import addresses_of, check_moved  # noqa: E402
from kpolicy.reasons import Reason  # noqa: E402
from kpolicy.registry import GraphState  # noqa: E402
from kpolicy.settings import Settings  # noqa: E402
from kpolicy.testing.sequences import Sequences  # noqa: E402
from tests.executors_launcher.checker import EAGER  # noqa: E402
from tests.executors_launcher.conftest import SMALL  # noqa: E402

SETTINGS = Settings(max_num_reqs=8, max_num_tokens=32)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


def opened(device: str, policy: str) -> tuple[Any, Engine, Any]:
    """(a small model, an Engine over it in debug mode with its graphs, inputs of one step)."""
    from kpolicy.serving.load import load

    model = load(SMALL, device=device, num_blocks=64, block_size=16, max_model_len=512, max_num_reqs=8)
    executor = get_executor(device, model=model, max_num_reqs=8, check=True)
    engine = Engine(policy, executor=executor, attention=model.support, settings=SETTINGS, ladder=[4, 8], calibrate=0)
    engine.capture()
    sequences = Sequences(2)
    return model, engine, sequences.inputs([sequences.chunk(sequences.start(), 5)])


def moved_weight(model: Any, _engine: Engine) -> None:
    """A weight gets other memory with other values, as when a checkpoint is loaded anew."""
    weight = model.hf.model.layers[1].mlp.up_proj.weight
    weight.data = weight.data.clone() * 1.5


def moved_kv(model: Any, _engine: Engine) -> None:
    """A layer's keys get other memory."""
    layer = model.layers[1]
    layer.caches = tuple(cache.clone() for cache in layer.caches)


def swapped_input(_model: Any, engine: Engine) -> None:
    """The token ids that are staged aren't those that graphs read."""
    executor: Any = engine.executor
    for key in engine.registry.captured():
        buffers = engine.registry.record(key).handle.buffers
        buffers.token_ids = executor.adapter.alloc_static(tuple(buffers.token_ids.shape), "int64")


MOVES: dict[str, tuple[Callable[[Any, Engine], None], str]] = {
    "weight": (moved_weight, "up_proj"),
    "kv": (moved_kv, "KV 0 of layer 1"),
    "input": (swapped_input, "static input token_ids is now at"),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", ["full", "piecewise"])
@pytest.mark.parametrize("what", MOVES)
def test_a_move_costs_the_graph_not_the_step(what: str, policy: str, device: str) -> None:
    """The graph is withdrawn with its reason, the step runs eagerly over what is there now, and others follow."""
    move, _ = MOVES[what]
    model, engine, inputs = opened(device, policy)
    assert engine.step(inputs).decision.mode.value == policy
    move(model, engine)
    outputs = engine.step(inputs)
    assert outputs.decision.mode.value == "eager"
    wanted = engine.executor.run(EAGER, inputs)  # type: ignore[union-attr]
    assert torch.allclose(outputs.outputs[0], wanted.outputs[0], atol=1e-4)
    assert engine.stats.replay_failures == 1
    assert {record.reason for record in engine.registry.records() if record.state is GraphState.WITHDRAWN} == {
        Reason.ADDRESS_CHANGED
    }
    engine.release()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("what", MOVES)
def test_the_error_names_what_moved(what: str, device: str) -> None:
    """It says what, where it was and is, and what to do."""
    move, words = MOVES[what]
    model, engine, inputs = opened(device, "full")
    decision = engine.select(*inputs.numbers)
    move(model, engine)
    with pytest.raises(GraphReplayError) as caught:
        engine.executor.run(decision, inputs)  # type: ignore[union-attr]
    assert caught.value.key == decision.launches[0].key
    assert words in str(caught.value)
    assert "capture again" in str(caught.value)
    engine.release()


@pytest.mark.parametrize("device", DEVICES)
def test_inputs_may_come_in_any_tensor(device: str) -> None:
    """A caller's tensors are copied: others each step, also on the device, change nothing."""
    model, engine, inputs = opened(device, "full")
    expected = engine.step(inputs).outputs[0]
    for _ in range(3):
        tokens = torch.tensor(inputs.token_ids, device=device)
        assert torch.equal(engine.step(inputs._replace(token_ids=tokens)).outputs[0], expected)
    assert engine.stats.replay_failures == 0
    engine.release()
    del model


def test_the_same_address_in_another_shape_has_moved() -> None:
    """A graph reads by strides too; what is as it was is nothing."""
    weight = torch.zeros(4, 6)
    then = addresses_of({"weight": weight})
    check_moved(None, then, addresses_of({"weight": weight.view(4, 6)}))
    for other in (weight.view(6, 4), weight[:2], weight.t()):
        assert other.data_ptr() == weight.data_ptr()
        with pytest.raises(GraphReplayError, match="weight is now at"):
            check_moved(None, then, addresses_of({"weight": other}))
    with pytest.raises(GraphReplayError, match="weight is gone"):
        check_moved(None, then, {})
