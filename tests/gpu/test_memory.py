"""Graphs of a whole model own what they read: freed memory is others' to use, and all of it is back after release."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from tests.executors_launcher.checker import Checker, batcher_steps
from tests.gpu.memory import held
from tests.gpu.test_modes import opened

SCRIBBLES = [(1 << 12, 64), (1 << 16, 64), (1 << 18, 64), (1 << 21, 16), (1 << 24, 8)]
"""(float32 elements, how many): 16 KiB to 64 MiB each, of both kinds of segments that torch's allocator has"""
FAMILIES = ["llama", "deepseek_v3"]
"""Of keys and values, and of latents with experts"""


def scribble() -> list[Any]:
    """Tensors of NaN over memory that nobody holds any more; whoever still reads it shows."""
    made = [torch.full((size,), float("nan"), device="cuda") for size, count in SCRIBBLES for _ in range(count)]
    torch.cuda.synchronize()
    return made


def parts(steps: Counter[str]) -> set[str]:
    """Which graphs those steps replayed; FULL ones are counted by what they hold."""
    words = {word for step in steps for word in step.split()}
    return {"piecewise"} & words | {"full" for word in words if word.startswith("q=") or word in {"varlen", "mixed"}}


@pytest.mark.parametrize("name", FAMILIES)
def test_graphs_survive_empty_cache(name: str) -> None:
    """Replays give EAGER's bits over memory full of NaN, and write to none of it."""
    model, executor, registry = opened(name)
    assert not [record for record in registry.records() if record.reason]
    for seed in range(3):
        torch.cuda.empty_cache()
        mine = scribble()
        checker = Checker(executor, model)
        for _ in batcher_steps(checker, registry.captured(), 40, seed):
            pass
        assert sum(checker.steps.values()) == 40
        assert parts(checker.steps) == {"full", "piecewise"}
        assert all(bool(each.isnan().all()) for each in mine), "a replay wrote to memory of others"
        del mine
    executor.release()
    model.release()


def live(name: str) -> int:
    """Load, capture, run some steps of every kind, and release; bytes that torch's allocator had before release."""
    model, executor, registry = opened(name)
    for _ in batcher_steps(Checker(executor, model), registry.captured(), 20, 1):
        pass
    reserved: int = torch.cuda.memory_reserved()
    executor.release()
    model.release()
    return reserved


@pytest.mark.parametrize("name", FAMILIES)
def test_all_memory_is_back_after_release(name: str) -> None:
    """A model's life that follows one like it leaves nothing: the first one loads libraries and compiles kernels."""
    live(name)
    before = held()
    for _ in range(3):
        assert live(name) > before.reserved, "a life took nothing, so nothing was tested"
    after = held()
    assert after.is_back_at(before), (after, before)
