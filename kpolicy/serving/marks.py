"""The mark: the attention function that models of transformers call, and who answers it on this thread.

Registered with transformers' attention interface under one name. No mask function is registered for that name, which
is how transformers knows to build no mask: building one reads positions on the host.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from kpolicy.errors import SupportError
from kpolicy.serving.experts import own_experts

if TYPE_CHECKING:
    import torch

__all__ = ["ATTENTION_NAME", "Answering", "answering", "own_forward", "register", "take_latent", "watch_latents"]

ATTENTION_NAME = "kpolicy_paged"

_here = threading.local()


class Answering(Protocol):
    """What answers a model's marked calls while it runs."""

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int,
        softcap: float,
    ) -> torch.Tensor:
        """[num_tokens, num_heads, value_dim], of [num_tokens, heads, dim] each."""
        ...  # fmt: skip


@contextmanager
def answering(by: Answering) -> Iterator[None]:
    """Let `by` answer the marked calls of this thread."""
    before = getattr(_here, "by", None)
    _here.by = by
    try:
        yield
    finally:
        _here.by = before


def register() -> None:
    """Make the mark known to transformers. Doing it again changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, _marked)


def _marked(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it: [1, heads, num_tokens, dim] each; gives [1, num_tokens, heads, dim]."""
    name = type(module).__name__
    by: Answering | None = getattr(_here, "by", None)
    if by is None:
        raise SupportError(f"{name} was called outside a step; run the model through LoadedModel.forward.")
    if attention_mask is not None or others.get("s_aux") is not None or others.get("is_causal") is False:
        raise SupportError(
            f"attention of {name} brings a mask, sinks or non-causal attention of its own, which kpolicy's kernels "
            "don't have; allowed is causal attention, with a sliding window or softcap."
        )
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    tokens_first = [each[0].transpose(0, 1) for each in (query, key, value)]
    q, k, v = tokens_first
    return by.attend(module, q, k, v, scale, sliding_window or 0, softcap or 0.0)[None], None


def watch_latents(modules: list[Any]) -> None:
    """Keep what each MLA module's latent norm gives, on the thread that runs it, for the marked call that follows."""
    for module in modules:
        module.kv_a_layernorm.register_forward_hook(_keep_latent)


def _keep_latent(_module: Any, _args: Any, output: torch.Tensor) -> None:
    _here.latent = output


def take_latent() -> torch.Tensor:
    """[num_tokens, rank], of the MLA module that is running."""
    latent: torch.Tensor = _here.latent
    _here.latent = None
    return latent.view(-1, latent.shape[-1])


@contextmanager
def own_forward(model: Any) -> Iterator[None]:
    """Run transformers' own eager attention and experts meanwhile. No step of the model may run beside it."""
    model.config._attn_implementation = "eager"
    try:
        with own_experts(model):
            yield
    finally:
        model.config._attn_implementation = ATTENTION_NAME
