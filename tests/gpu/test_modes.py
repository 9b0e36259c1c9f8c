"""Random steps of every family in every mode on the GPU: bit for bit EAGER at the same padded shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kpolicy.executors.cuda import CudaExecutor
from kpolicy.registry import GraphRegistry
from kpolicy.serving.load import load
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
