"""Models over Ascend's attention operators, and executors over the pretended device."""

from __future__ import annotations

from typing import Any

import torch

from kpolicy.executors.ascend import AscendExecutor
from kpolicy.keys import GraphKey
from kpolicy.registry import GraphRegistry
from kpolicy.serving.ascend import AscendKernels
from tests.fakes.torch_npu import fake_torch_npu

__all__ = ["on_ascend", "opened"]


def on_ascend(model: Any, library: Any = None) -> tuple[Any, Any]:
    """The model with Ascend's operators in place of its own kernels, and the library they are of."""
    library = fake_torch_npu() if library is None else library
    kernels = AscendKernels(torch.device("cpu"), library)
    for layer in model.layers:
        layer.kernels = kernels
    latent = any(hasattr(layer, "rank") for layer in model.layers)
    model._support = model.support.meet(kernels.support(latent=latent))
    return model, library


def opened(model: Any, library: Any, keys: Any, **options: Any) -> tuple[AscendExecutor, GraphRegistry]:
    """An executor over the model with those keys captured."""
    executor, registry = AscendExecutor(model, library=library, **options), GraphRegistry()
    wanted: list[GraphKey] = list(keys)
    registry.plan(wanted)
    executor.open(registry)
    executor.capture(wanted)
    return executor, registry
