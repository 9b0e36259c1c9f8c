"""Experts of a model of transformers on kernels of ours, through its own interface: `take_experts`.

transformers lets a function answer for a layer's experts (`ExpertsInterface`), as it does for attention. The one that
is registered here answers for gated experts with SiLU, and leaves others to transformers' own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["EXPERTS_NAME", "THEIRS", "THEIR_NAME", "own_experts", "take_experts", "takes_ours"]

EXPERTS_NAME = "kpolicy"
THEIRS = "grouped_mm"
"""What transformers takes where it can, and what these kernels compute"""
THEIR_NAME = "transformers"
"""Of transformers' own kernels, in a profile"""
_NOTED = "kpolicy_experts"
_OTHERS = ("is_transposed", "has_bias", "has_post_expert_norm", "_is_expert_parallel")
"""What a layer's experts may have that these kernels don't"""


def take_experts(hf: Any, by: Callable[..., torch.Tensor] | None) -> bool:
    """Let `by` answer for a model's experts from now on, of the layers that it computes; whether there are any.

    Args:
        hf: a causal LM of transformers, whose config may be another model's that was taken.
        by: as `kpolicy.serving.gpu.experts.gated_experts`; None for transformers' own.
    """
    if _implementation(hf) == EXPERTS_NAME:
        hf.set_experts_implementation(THEIRS)
    # What a quantized checkpoint has of other types answers through another interface.
    quantized = getattr(hf.config, "quantization_config", None) is not None
    layers = [module for module in hf.modules() if _computed(module)]
    if by is None or quantized or not layers or _implementation(hf) != THEIRS:
        return False
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    for module in layers:
        setattr(module, _NOTED, by)
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, _answer)
    hf.set_experts_implementation(EXPERTS_NAME)
    return True


def _implementation(hf: Any) -> str | None:
    """By which of transformers' functions a model's experts run."""
    found: str | None = getattr(hf.config, "_experts_implementation", None)
    return found


def takes_ours(hf: Any) -> bool:
    """Whether `take_experts` took any layer of a model, and its experts run so now."""
    return _implementation(hf) == EXPERTS_NAME and any(_NOTED in vars(module) for module in hf.modules())


def _answer(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """[num_tokens, size], as transformers calls it: of [num_tokens, size] and [num_tokens, chosen] each."""
    by: Callable[..., torch.Tensor] | None = vars(module).get(_NOTED)
    if by is not None:
        return by(hidden_states, top_k_index, top_k_weights, module.gate_up_proj, module.down_proj)
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    theirs: Callable[..., torch.Tensor] = ALL_EXPERTS_FUNCTIONS[THEIRS]
    return theirs(module, hidden_states, top_k_index, top_k_weights)


def _computed(module: Any) -> bool:
    """Whether a module is a layer's experts, all of them here, whose MLPs `gated_experts` computes."""
    said = vars(module)
    if not said.get("has_gate") or not said.get("is_concatenated", True) or any(said.get(name) for name in _OTHERS):
        return False
    gating = getattr(type(module), "_apply_gate", None)
    if getattr(gating, "__name__", "") != "_default_apply_gate" or not _is_silu(getattr(module, "act_fn", None)):
        return False
    weights = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
    # What torch's grouped products take on a GPU.
    return hasattr(torch.nn.functional, "grouped_mm") and all(
        isinstance(each, torch.Tensor) and each.dtype is torch.bfloat16 for each in weights
    )


def _is_silu(function: Any) -> bool:
    """Whether an activation is SiLU, of torch or of transformers."""
    return type(function).__name__ in ("SiLU", "SiLUActivation")


@contextmanager
def own_experts(hf: Any) -> Iterator[None]:
    """Run transformers' own experts meanwhile. No step of the model may run beside it."""
    taken = takes_ours(hf)
    if taken:
        hf.set_experts_implementation(THEIRS)
    try:
        yield
    finally:
        if taken:
            hf.set_experts_implementation(EXPERTS_NAME)
