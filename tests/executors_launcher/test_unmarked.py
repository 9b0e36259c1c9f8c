"""Unmarked attention is no PIECEWISE graph: an error with layer and line, and the step runs eagerly."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kpolicy.decision import Decision, Launch  # noqa: E402
from kpolicy.engine import Engine  # noqa: E402
from kpolicy.executors.cpu import CpuExecutor  # noqa: E402
from kpolicy.executors.segments import BreakingStep  # noqa: E402
from kpolicy.executors.step_model import current_step  # noqa: E402
from kpolicy.keys import GraphKey  # noqa: E402
from kpolicy.modes import Mode, Part, Rows  # noqa: E402
from kpolicy.reasons import Reason  # noqa: E402
from kpolicy.registry import GraphRegistry, GraphState  # noqa: E402
from kpolicy.settings import Settings  # noqa: E402
from kpolicy.testing.sequences import Sequences  # noqa: E402
from tests.executors_launcher.checker import EAGER  # noqa: E402

PIECES = GraphKey(Part.PIECEWISE, 8)
FULL = GraphKey(Part.FULL, 8, 8, query_len=1)


def _own_kernel(model: Any) -> None:
    """Layer 1 goes to torch's fused attention, past the interface."""
    module = model.hf.model.layers[1].self_attn
    module.config = copy.copy(module.config)
    module.config._attn_implementation = "sdpa"


def _own_operators(model: Any) -> None:
    """Layer 1 goes to matrix products and a softmax, past the interface."""
    module = model.hf.model.layers[1].self_attn
    module.config = copy.copy(module.config)
    module.config._attn_implementation = "eager"


def _without_mark(model: Any) -> None:
    """Layer 1 calls its cache without the step's mark where a segment is being recorded."""
    attend = type(model).attend

    def attends(self: Any, module: Any, query: Any, key: Any, value: Any, *rest: Any) -> Any:
        step = current_step()
        if module.layer_idx == 1 and isinstance(step, BreakingStep):
            return self.layers[1](step, query, key, value)
        return attend(self, module, query, key, value, *rest)

    model.attend = attends.__get__(model)


def _reads_kv(model: Any) -> None:
    """Layer 1 reads KV before its marked call."""
    module = model.hf.model.layers[1].self_attn
    cache = model.kv_caches()[0]

    def hook(_module: Any, _args: Any, output: Any) -> Any:
        return output + 0 * cache[0, 0, 0]

    module.q_proj.register_forward_hook(hook)


def _caught(model: Any) -> None:
    """As `_own_kernel`, and the model catches what goes wrong there."""
    _own_kernel(model)
    forward = model.hf.model.layers[1].self_attn.forward

    def forwards(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except Exception:  # noqa: BLE001 - as careless code does
            return torch.zeros_like(kwargs["hidden_states"]), None

    model.hf.model.layers[1].self_attn.forward = forwards


@pytest.mark.parametrize(
    ("breaks", "said"),
    [
        (_own_kernel, ("layer 1 (LlamaAttention)", "modeling_llama.py:", "calls scaled_dot_product_attention")),
        (_own_operators, ("layer 1 (LlamaAttention", "modeling_llama.py:", "made no marked attention call")),
        (_without_mark, ("layer 1 (LlamaAttention)", "modeling_llama.py:", "reads the step's slot_mapping")),
        (_reads_kv, ("layer 1 (LlamaAttention)", "modeling_llama.py:", "touches KV")),
        (_caught, ("layer 1 (LlamaAttention)", "modeling_llama.py:", "calls scaled_dot_product_attention")),
    ],
)
def test_it_is_a_capture_error(breaks: Callable[[Any], None], said: tuple[str, ...], small: Callable[..., Any]) -> None:
    """The key fails with its reason, in words the layer and the line; memory is as before; steps run all the same."""
    model = small()
    breaks(model)
    executor, registry = CpuExecutor(model, memory_bytes=1 << 30), GraphRegistry()
    registry.plan([PIECES])
    executor.open(registry)
    executor.capture([PIECES])
    record = registry.record(PIECES)
    assert (record.state, record.reason) == (GraphState.FAILED, Reason.CAPTURE_FAILED)
    error = executor.capture_errors[PIECES]
    for part in said:
        assert part in error
    assert not [graph for pool in executor.adapter._pools for graph in pool.graphs]
    sequences = Sequences(1)
    rows = [sequences.chunk(sequences.start(), 5)]
    assert torch.isfinite(executor.run(EAGER, sequences.inputs(rows)).outputs[0]).all()
    executor.release()


def test_marked_models_capture_as_ever(small: Callable[..., Any]) -> None:
    """The same model without the fault has its graph, and no error is kept."""
    executor, registry = CpuExecutor(small()), GraphRegistry()
    registry.plan([PIECES])
    executor.open(registry)
    executor.capture([PIECES])
    assert registry.record(PIECES).state is GraphState.CAPTURED
    assert executor.capture_errors == {}
    executor.release()


def test_the_engine_goes_to_a_lesser_mode(small: Callable[..., Any]) -> None:
    """A policy that wants PIECEWISE serves eagerly, and its reason says that there is no graph."""
    model = small()
    _own_operators(model)
    engine = Engine("piecewise", model=model, ladder=[8], settings=Settings(max_num_reqs=4, max_num_tokens=16))
    engine.capture()
    sequences = Sequences(1)
    outputs = engine.step(sequences.inputs([sequences.chunk(sequences.start(), 5)]))
    assert outputs.decision.mode is Mode.EAGER
    assert engine.registry.captured() == ()
    engine.release()


class _Plain:
    """A step model without transformers or torch modules: one attention call, marked or not."""

    vocab, max_blocks, num_slots, pad_slot = 16, 4, 64, 64

    def __init__(self, support: Any, marked: bool) -> None:
        self.support = support
        self.marked = marked
        self.cache = torch.zeros(65, 4)
        self.weight = torch.ones(16, 4)

    def _attend(self, step: Any, hidden: Any) -> Any:
        self.cache.index_copy_(0, step.tensors.slot_mapping, hidden)
        return hidden

    def forward(self, step: Any) -> Any:
        hidden = self.weight[step.tensors.token_ids]
        return (step.attention(self._attend, hidden) if self.marked else self._attend(step, hidden)) + 1

    def head(self, hidden: Any) -> Any:
        return hidden @ self.weight.T

    def sample(self, logits: Any, step: Any) -> Any:  # noqa: ARG002
        return logits.argmax(-1)

    def kv_caches(self) -> list[Any]:
        return [self.cache]

    def release(self) -> None:
        """Nothing to give back."""


@pytest.mark.parametrize("marked", [True, False])
def test_any_step_model_is_held_to_the_mark(marked: bool, small: Callable[..., Any]) -> None:
    """Without transformers the line that reads the step's slots is named; FULL graphs need no mark."""
    executor, registry = CpuExecutor(_Plain(small().support, marked), max_num_reqs=8), GraphRegistry()
    registry.plan([PIECES, FULL])
    executor.open(registry)
    executor.capture([PIECES, FULL])
    assert registry.record(FULL).state is GraphState.CAPTURED
    if marked:
        assert registry.record(PIECES).state is GraphState.CAPTURED
    else:
        assert "_attend at" in executor.capture_errors[PIECES]
        assert "test_unmarked.py:" in executor.capture_errors[PIECES]
    sequences = Sequences(1, num_blocks=4, vocab=16)
    inputs = sequences.inputs([sequences.chunk(sequences.start(), 5)])
    decision = Decision(Mode.PIECEWISE, (Launch(Rows.ALL, PIECES),), Reason.GRAPH_FITS) if marked else EAGER
    assert len(executor.run(decision, inputs).outputs) == 1
    executor.release()
