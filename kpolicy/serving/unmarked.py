"""Unmarked attention of a model of transformers, found while a PIECEWISE graph of it is captured.

Held to at load already, for a few tokens; a class may still go another way at another size. Three signs: torch's fused
attention outside a marked call, KV touched outside one, and a layer that made none.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from kpolicy.errors import CaptureError
from kpolicy.executors.segments import BreakingStep
from kpolicy.executors.unmarked import unmarked
from kpolicy.reasons import Reason

if TYPE_CHECKING:
    from kpolicy.serving.hf_model import LoadedModel

__all__ = ["watching"]

_ATTENTION = frozenset({"scaled_dot_product_attention", "multi_head_attention_forward", "flex_attention"})


class _Watch(TorchFunctionMode):  # type: ignore[misc]
    """Looks at each function on tensors that runs outside marked calls."""

    def __init__(self, step: BreakingStep, caches: list[torch.Tensor]) -> None:
        super().__init__()
        self._step = step
        self._caches = {cache.untyped_storage()._cdata for cache in caches}
        self.found: CaptureError | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._step.in_call:
            name = getattr(func, "__name__", str(func))
            if name in _ATTENTION or str(func).startswith("kpolicy."):
                self._refuse(f"calls {name}")
            if any(isinstance(each, torch.Tensor) and self._is_kv(each) for each in tree_leaves((args, kwargs))):
                self._refuse(f"touches KV ({name})")
        return func(*args, **(kwargs or {}))

    def _is_kv(self, tensor: torch.Tensor) -> bool:
        with torch._C.DisableTorchFunction():
            return tensor.untyped_storage()._cdata in self._caches

    def _refuse(self, what: str) -> None:
        # Model code may catch what it raises; the capture is lost all the same.
        self.found = self.found or unmarked(what)
        raise self.found


@contextmanager
def watching(model: LoadedModel, step: BreakingStep) -> Iterator[None]:
    """Find unmarked attention in what runs meanwhile: the capture of a forward, from its first segment on.

    Raises:
        CaptureError: there is some, said with the layer and the line.
    """
    watch = _Watch(step, list(model.kv_caches()))
    with watch:
        yield
    if watch.found is not None:
        raise watch.found
    missing = [index for index, layer in enumerate(model.layers) if all(layer is not call for call in step.calls)]
    if missing:
        raise CaptureError(
            Reason.CAPTURE_FAILED,
            f"{_module(model, missing[0])} made no marked attention call in a PIECEWISE capture of "
            f"{step.num_tokens} tokens, though it did at load: what it did instead would be recorded with the lengths "
            "of the capture. Let its attention go through transformers' attention interface at every size, or capture "
            "FULL graphs only.",
        )


def _module(model: LoadedModel, index: int) -> str:
    """A layer's attention module and where its forward is, in words."""
    for module in model.hf.base_model.modules():
        if getattr(module, "layer_idx", None) == index:
            code = inspect.unwrap(type(module).forward).__code__
            return f"layer {index} ({type(module).__name__} at {code.co_filename}:{code.co_firstlineno})"
    return f"layer {index}"
