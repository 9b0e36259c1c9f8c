"""Random weights under which attention matters.

The initialisation that model classes bring is for training: scores are near zero, so attention averages whatever it
sees and a broken one hardly shows. Here activations have about unit variance, scores a standard deviation of about 2
and logits about 2, so greedy tokens depend on which keys a query saw.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["randomise"]

_QUERY_KEY = ("q_proj", "k_proj", "c_attn", "q_b_proj", "kv_b_proj", "qkv_proj", "query_key_value")
_SCORE_NORMS = ("q_norm", "k_norm")
QUERY_KEY_GAIN = 1.4
"""Of queries and of keys, so scores get its square."""
HEAD_GAIN = 2.0
TIED_GAIN = 0.25
"""Of an embedding that is also the LM head: small, or a token's own embedding, still in the hidden state, makes the
model repeat it. The final norm makes up for it."""
NOISE = 0.1
"""Standard deviation of biases, and of norm weights around what their class starts from."""


def randomise(model: Any, seed: int) -> None:
    """Give every parameter of a model new values, in place.

    The values depend on the seed and the device type: a device draws its own.

    Args:
        model: a causal LM of transformers, as its class initialised it.
        seed: of the generator.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    done: set[int] = set()
    with torch.no_grad():
        for path, module in model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                # Tied weights are one parameter, filled where it is met first, as the embedding.
                if id(parameter) not in done:
                    done.add(id(parameter))
                    _fill(f"{path}.{name}", module, parameter, generator)
        if tied:
            model.get_input_embeddings().weight.mul_(TIED_GAIN)
            for norm in _final_norms(model):
                # Classes that scale by 1 + weight start from 0, others from 1: adding serves both.
                norm.add_(HEAD_GAIN / TIED_GAIN - 1.0)


def _final_norms(model: Any) -> list[torch.Tensor]:
    """Weights of norms that the base model itself has, outside its layers."""
    children = model.base_model.named_children()
    return [child.weight for name, child in children if "norm" in name or name == "ln_f"]


def _fill(path: str, module: Any, parameter: torch.Tensor, generator: torch.Generator) -> None:
    noise = torch.randn(parameter.shape, generator=generator, device=parameter.device)
    if parameter.ndim == 1:
        centre = parameter.float() + (1.0 if any(name in path for name in _SCORE_NORMS) else 0.0)
        parameter.copy_(centre + NOISE * noise)
        return
    parameter.copy_(noise * (_gain(path) / _fan_in(module, parameter) ** 0.5))


def _fan_in(module: Any, parameter: torch.Tensor) -> int:
    """Inputs of each output; of an embedding its width, so that tied logits have the scale of others."""
    transposed = type(module).__name__ == "Conv1D" or getattr(module, "is_transposed", False)
    size: int = parameter.shape[-2 if transposed else -1]
    return size


def _gain(path: str) -> float:
    if "lm_head" in path:
        return HEAD_GAIN
    return QUERY_KEY_GAIN if any(f".{name}." in path for name in _QUERY_KEY) else 1.0
