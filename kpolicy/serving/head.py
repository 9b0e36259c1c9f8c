"""`Head`: what a causal LM does after its base model, by running the class's own code.

Classes scale or cap logits after the LM head, each in its own way. So nothing is written again here: the head is a
shallow copy of the model whose base model gives back the hidden states it is handed.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

__all__ = ["Head"]


class _Given:
    """A base model's outputs: hidden states and nothing else."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]


class _GiveBack(torch.nn.Module):  # type: ignore[misc]
    def forward(self, *_: Any, inputs_embeds: torch.Tensor | None = None, **__: Any) -> _Given:
        return _Given(inputs_embeds)


class Head:
    """Logits of hidden states. It shares the model's weights and changes nothing of it.

    Args:
        model: a causal LM of transformers whose base model is an attribute of it.
    """

    def __init__(self, model: Any) -> None:
        shell = copy.copy(model)
        # Module attributes live in a dict that a shallow copy shares.
        shell.__dict__["_modules"] = {**model._modules, model.base_model_prefix: _GiveBack()}
        self._shell = shell

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, vocab] of [rows, hidden]."""
        logits: torch.Tensor = self._shell(inputs_embeds=hidden[None], use_cache=False).logits
        return logits[0]
