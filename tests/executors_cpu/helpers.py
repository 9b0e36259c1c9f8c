"""What the tests of the CPU device share. Imported after torch is known to be there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kpolicy.executors.cpu import Graph, Recorder


def record(run: Callable[[], Any], recorder: Recorder | None = None) -> tuple[Any, Graph]:
    """Record a call: (what it gave, its graph)."""
    recorder = recorder or Recorder()
    recorder.begin()
    try:
        outputs = run()
        return outputs, recorder.end()
    finally:
        recorder.abort()


def same(a: Any, b: Any) -> bool:
    """Whether two tensors, or lists of them, are equal to the bit."""
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    a, b = a.detach(), b.detach()
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return (
        a.contiguous().view(torch.uint8).tolist() == b.contiguous().view(torch.uint8).tolist()
        if a.dim()
        else (a.reshape(1).view(torch.uint8).tolist() == b.reshape(1).view(torch.uint8).tolist())
    )


def holds(run: Callable[..., Any], *inputs: Any, change: Callable[[Any], Any] | None = None) -> Graph:
    """Record a function of tensors, change the tensors twice, and hold each replay to an eager run.

    Inputs that the function writes are held to the eager run's too.
    """
    change = change or _changed
    with torch.inference_mode():
        outputs, graph = record(lambda: run(*inputs))
        for _ in range(2):
            for each in inputs:
                each.copy_(change(each))
            expected_inputs = [each.clone() for each in inputs]
            expected = run(*expected_inputs)
            graph.replay()
            assert same(outputs, expected)
            assert same(list(inputs), expected_inputs)
    return graph


def _changed(tensor: Any) -> Any:
    if tensor.dtype.is_floating_point:
        return torch.randn_like(tensor)
    if tensor.dtype is torch.bool:
        return ~tensor
    return tensor.flip(0) if tensor.dim() else tensor + 1
