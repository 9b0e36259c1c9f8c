"""FlashInfer itself, where it is installed: random steps in every mode, and a model served by it against Triton's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kpolicy.executors.cuda import CudaExecutor
from kpolicy.registry import GraphRegistry
from kpolicy.serving.load import load
from kpolicy.testing.sequences import Sequences
from tests.executors_launcher.checker import (
    BLOCK_SIZE,
    EAGER,
    LIMITS,
    MAX_MODEL_LEN,
    NUM_BLOCKS,
    Checker,
    batcher_steps,
    drafting_steps,
    plan,
)

pytest.importorskip("flashinfer", reason="flashinfer isn't installed")

CONFIG: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 128, "hidden_size": 256, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 1024,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
STEPS = 60


def loaded(kernels: str, **options: Any) -> Any:
    return load(
        CONFIG, device="cuda", dtype=torch.bfloat16, kernels=kernels, max_num_reqs=LIMITS.max_num_reqs, **options
    )


@pytest.mark.parametrize("source", [batcher_steps, drafting_steps])
def test_modes(source: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit EAGER at the same padded shape, in every mode, with FlashInfer for the prompts."""
    model = loaded("flashinfer", num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_model_len=MAX_MODEL_LEN)
    model.poison_padding()
    kernels = model.layers[0].kernels
    planned, calls = kernels._planned, list[int]()

    def noted(*given: Any) -> Any:
        calls.append(len(given))
        return planned(*given)

    monkeypatch.setattr(kernels, "_planned", noted)
    executor: Any = CudaExecutor(model, check=True)
    registry = GraphRegistry()
    keys = plan(model)
    registry.plan(keys)
    executor.open(registry)
    executor.capture(keys)
    failed = {str(record.key): (record.state, record.reason) for record in registry.records() if record.reason}
    assert not failed, (failed, executor.capture_errors)
    checker = Checker(executor, model)
    for _ in source(checker, registry.captured(), STEPS, seed=1):
        pass
    assert sum(checker.steps.values()) == STEPS
    assert calls, "no prompt went to FlashInfer"
    executor.release()
    model.release()


def test_a_model_computes_what_it_does_with_other_kernels() -> None:
    """The same weights and steps: logits as with Triton's kernels, within half precision."""
    found = []
    for name in ("triton", "flashinfer", "flash"):
        model = loaded(name, num_blocks=64, block_size=16, max_model_len=1024)
        executor = CudaExecutor(model)
        executor.open(GraphRegistry())
        sequences, logits = Sequences(3, num_blocks=64, block_size=16), []
        for _ in range(12):
            rows = sequences.random_rows(8, 200)
            inputs = sequences.inputs(rows)
            logits.append(torch.stack([row.float() for row in executor.run(EAGER, inputs).outputs]))
            sequences.advance(rows)
        found.append(torch.cat(logits))
        executor.release()
        model.release()
    for other in found[1:]:
        assert other.shape == found[0].shape
        off = (other - found[0]).norm(dim=-1) / found[0].norm(dim=-1)
        assert float(off.max()) < 0.05
