"""`Kernels`, what a model's attention asks of a device, and `PlainKernels`, which run on any."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from kpolicy.attention import AttentionSupport, Claims, SupportLevel
from kpolicy.executors.step_model import StepContext
from kpolicy.serving import attention
from kpolicy.serving.rows import RowTensors

if TYPE_CHECKING:
    from kpolicy.serving.kv_cache import LayerSpec

__all__ = ["IndexCopied", "Kernels", "PlainKernels"]


class Kernels(Protocol):
    """Kernels of one device for the attention calls of a model's layers. They keep nothing between calls."""

    @property
    def name(self) -> str: ...

    def support(self, *, latent: bool) -> AttentionSupport:
        """What a graph may hold of them.

        Args:
            latent: a layer keeps latents (MLA).
        """
        ...

    def write(self, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *caches: torch.Tensor) -> None:
        """Write the tokens' keys and values, [num_tokens, num_kv_heads, dim] each, to their slots."""
        ...

    def attend(
        self, step: StepContext, spec: LayerSpec, query: torch.Tensor, rows: RowTensors, *caches: torch.Tensor
    ) -> torch.Tensor:
        """Attention over keys and values: [num_tokens, num_heads, value_dim]."""
        ...

    def write_latents(
        self, slots: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor, cache: torch.Tensor
    ) -> None:  # fmt: skip
        """Write the tokens' latents [num_tokens, rank] and roped keys [num_tokens, rope_dim] to their slots."""
        ...

    def attend_latents(
        self, step: StepContext, spec: LayerSpec, query: torch.Tensor, rows: RowTensors, cache: torch.Tensor,
        kv_b: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Attention over latents: [num_tokens, num_heads, value_dim].

        Rows of one token, and all rows of a uniform launch, are absorbed; the others expanded.
        """
        ...


class IndexCopied:
    """Writes by index: each slot of a token is a row of the cache."""

    def write(self, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *caches: torch.Tensor) -> None:
        caches[0].index_copy_(0, slots, key)
        caches[1].index_copy_(0, slots, value)

    def write_latents(
        self, slots: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor, cache: torch.Tensor
    ) -> None:  # fmt: skip
        cache.index_copy_(0, slots, torch.cat((latent, rope), dim=-1))


class PlainKernels(IndexCopied):
    """Operators of torch, on any device.

    Args:
        device: where they run.
    """

    name = "plain"

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def support(self, *, latent: bool) -> AttentionSupport:
        del latent
        here = self.device.type == "cpu"
        return AttentionSupport.of(
            Claims.at_level(SupportLevel.MIXED if here else SupportLevel.NONE),
            backend=f"kpolicy-torch-{self.device.type}",
            source="kpolicy/serving/attention.py",
            note="" if here else "plain torch kernels read lengths on the host",
        )

    def attend(
        self, step: StepContext, spec: LayerSpec, query: torch.Tensor, rows: RowTensors, *caches: torch.Tensor
    ) -> torch.Tensor:
        del step
        return attention.paged_attention(query, caches[0], caches[1], rows, spec.scale, spec.window, spec.softcap)

    def attend_latents(
        self, step: StepContext, spec: LayerSpec, query: torch.Tensor, rows: RowTensors, cache: torch.Tensor,
        kv_b: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        absorbed_len = max(1, step.uniform_query_len or 1)
        return attention.mla_attention(query, cache, kv_b, rows, spec.scale, absorbed_len)
