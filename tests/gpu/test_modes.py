"""Random steps of every family in every mode on the GPU: bit for bit EAGER at the same padded shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kpolicy.decision import Decision, Launch
from kpolicy.executors.base import StepInputs
from kpolicy.executors.cuda import CudaExecutor
from kpolicy.modes import Mode, Part, Rows
from kpolicy.reasons import Reason
from kpolicy.registry import GraphRegistry
from kpolicy.serving.load import load
from kpolicy.shapes import BatchShape
from tests.executors_launcher.checker import (
    BLOCK_SIZE,
    LIMITS,
    MAX_MODEL_LEN,
    NUM_BLOCKS,
    Checker,
    batcher_steps,
    drafting_steps,
    plan,
)
from tests.serving_models.families import FAMILIES

STEPS = 60


def opened(name: str, **options: Any) -> tuple[Any, CudaExecutor, GraphRegistry]:
    """A family's tiny model on the GPU, its executor with graphs of each kind, and their registry."""
    model = load(
        FAMILIES[name], device="cuda", dtype=torch.bfloat16, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN, max_num_reqs=LIMITS.max_num_reqs,
    )  # fmt: skip
    model.poison_padding()
    executor, registry = CudaExecutor(model, check=True, **options), GraphRegistry()
    keys = plan(model)
    registry.plan(keys)
    executor.open(registry)
    executor.capture(keys)
    return model, executor, registry


@pytest.mark.parametrize("source", [batcher_steps, drafting_steps])
@pytest.mark.parametrize("name", FAMILIES)
def test_modes(name: str, source: Any) -> None:
    model, executor, registry = opened(name)
    failed = {str(record.key): (record.state, record.reason) for record in registry.records() if record.reason}
    assert not failed, (failed, executor.launcher.capture_errors)
    checker = Checker(executor, model)
    for _ in source(checker, registry.captured(), STEPS, seed=1):
        pass
    assert sum(checker.steps.values()) == STEPS
    executor.release()
    model.release()


def test_graphs_of_decodes_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """A greedy step samples nothing behind its graph; tokens, ties' too, and logits are EAGER's, and stay."""
    model = load(
        FAMILIES["llama"], device="cuda", dtype=torch.bfloat16, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN, max_num_reqs=LIMITS.max_num_reqs,
    )  # fmt: skip
    # Half of the vocabulary is the other half again, so that each row's likeliest token ties.
    weight = model.hf.get_output_embeddings().weight
    half = len(weight) // 2
    with torch.no_grad():
        weight[half : 2 * half] = weight[:half]
    executor, registry = CudaExecutor(model), GraphRegistry()
    keys = [key for key in plan(model) if key.part is Part.FULL and key.decode_only]
    registry.plan(keys)
    executor.open(registry)
    executor.capture(keys)
    assert set(registry.captured()) == set(keys)
    launcher: Any = executor.launcher
    sampled, sample = [], model.sample
    monkeypatch.setattr(model, "sample", lambda *given: sampled.append(given) or sample(*given))
    kept = []
    for key in keys:
        if key.query_len not in (None, 1):
            continue
        for num_reqs in {1, key.num_reqs or key.num_tokens}:
            inputs = StepInputs(
                BatchShape.decode(num_reqs, num_reqs).numbers, [1] * num_reqs, [3 + i for i in range(num_reqs)],
                [0] * num_reqs, [BLOCK_SIZE * i for i in range(num_reqs)], [[i] for i in range(num_reqs)],
                [1] * num_reqs, list(range(num_reqs)),
            )  # fmt: skip
            outputs = executor.run(Decision(Mode.FULL, (Launch(Rows.ALL, key),), Reason.GRAPH_FITS), inputs)
            kept.append((key, inputs, outputs))
    assert kept
    assert sampled == []
    for key, inputs, outputs in kept:
        eager = launcher.eager_as(key, inputs)
        rows: Any = outputs.outputs
        assert torch.equal(rows.tensor, eager.outputs.tensor)
        assert list(outputs.tokens[0]) == list(eager.tokens[0])
    executor.release()
    model.release()
