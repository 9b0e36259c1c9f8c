"""The paged KV cache, a layer at a time: its tensors, what is written to them, and the marked call that reads them.

KV tensors are indexed by slot first: slot = block * block_size + offset. One more slot, the last, is reserved for
padding: padding writes there and nothing reads it. Kernels with ``kv_rows`` lay keys and values out otherwise within a
block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from kpolicy.errors import ConfigError
from kpolicy.executors.step_model import StepContext
from kpolicy.serving import mla  # noqa: F401 (registers its operator)
from kpolicy.serving.kernels import Kernels
from kpolicy.serving.rows import RowTensors

if TYPE_CHECKING:
    import torch

__all__ = ["LatentLayer", "LayerSpec", "PagedLayer", "layer_cache"]


@attrs.frozen
class LayerSpec:
    """What a layer's marked attention call was seen to take.

    Args:
        num_heads: query heads.
        num_kv_heads: KV heads; for MLA as expanded.
        head_dim: of queries and keys.
        value_dim: of values.
        scale: multiplies scores.
        window: tokens a query sees, itself included; 0 for all before it.
        softcap: c in ``c * tanh(score / c)``; 0 for none.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    window: int = 0
    softcap: float = 0.0


def _rows(step: StepContext, block_size: int) -> RowTensors:
    at = step.tensors
    return RowTensors(at.block_table, at.kv_lens, at.query_starts, block_size)


class PagedLayer:
    """Keys and values of one layer. Calling it is that layer's marked attention call.

    What changes from step to step comes from the step; what is held here never does.

    Attributes:
        poisons: whether the call fills the reserved slot with NaN between its write and its reads. Padding writes
            there first, so NaN put there before the step would be gone by the time attention could read it. A captured
            call keeps the choice that it was captured with.
    """

    def __init__(
        self, spec: LayerSpec, kernels: Kernels, num_slots: int, block_size: int, like: torch.Tensor
    ) -> None:  # fmt: skip
        self.spec = spec
        self.kernels = kernels
        self.block_size = block_size
        self.poisons = False
        shape = num_slots + 1, spec.num_kv_heads
        self.caches: tuple[torch.Tensor, ...] = (
            like.new_zeros(*shape, spec.head_dim),
            like.new_zeros(*shape, spec.value_dim),
        )

    def __call__(self, step: StepContext, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Write the tokens' keys and values, then attend: [num_tokens, num_heads, value_dim].

        Args:
            step: the step that runs.
            query: [num_tokens, num_heads, head_dim].
            key: [num_tokens, num_kv_heads, head_dim].
            value: [num_tokens, num_kv_heads, value_dim].
        """
        k_cache, v_cache = _held(self.caches)
        self.kernels.write(step.tensors.slot_mapping, key, value, k_cache, v_cache)
        if self.poisons:
            _poison(k_cache, v_cache)
        return self.kernels.attend(step, self.spec, query, _rows(step, self.block_size), k_cache, v_cache)

    def at(self, slots: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each KV tensor, and which of its rows hold those slots."""
        kv_rows = getattr(self.kernels, "kv_rows", None)
        if kv_rows is None:
            return [(cache, slots) for cache in self.caches]
        rows = kv_rows(slots, self.caches[0])
        return [(cache.view(-1, cache.shape[2]), rows) for cache in self.caches]


class LatentLayer:
    """Latents of one MLA layer. Calling it is that layer's marked attention call.

    Rows of one token, and all rows of a uniform launch, are absorbed; the others expanded.

    Args:
        spec: what the call takes.
        kernels: what writes and attends.
        kv_b: [num_heads * (nope_dim + value_dim), rank], the module's own up-projection.
        num_slots: without the reserved one.
        block_size: tokens in a block.

    Attributes:
        poisons: as `PagedLayer` has it.
    """

    def __init__(
        self, spec: LayerSpec, kernels: Kernels, kv_b: torch.Tensor, num_slots: int, block_size: int
    ) -> None:  # fmt: skip
        self.spec = spec
        self.kernels = kernels
        self.block_size = block_size
        self.poisons = False
        self.kv_b = kv_b
        self.rank: int = kv_b.shape[1]
        nope_dim = kv_b.shape[0] // spec.num_heads - spec.value_dim
        self.rope_dim = spec.head_dim - nope_dim
        self.caches: tuple[torch.Tensor, ...] = (kv_b.new_zeros(num_slots + 1, self.rank + self.rope_dim),)

    def __call__(
        self, step: StepContext, query: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor
    ) -> torch.Tensor:
        """Write the tokens' latents, then attend: [num_tokens, num_heads, value_dim].

        Args:
            step: the step that runs.
            query: [num_tokens, num_heads, nope_dim + rope_dim].
            latent: [num_tokens, rank], normalised.
            rope: [num_tokens, rope_dim], the roped key that all heads share.
        """
        (cache,) = _held(self.caches)
        self.kernels.write_latents(step.tensors.slot_mapping, latent, rope, cache)
        if self.poisons:
            _poison(cache)
        return self.kernels.attend_latents(
            step, self.spec, query, _rows(step, self.block_size), cache, self.kv_b
        )  # fmt: skip

    def at(self, slots: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The KV tensor, and which of its rows hold those slots."""
        return [(cache, slots) for cache in self.caches]


def _poison(*caches: torch.Tensor) -> None:
    """Fill the reserved slot with NaN."""
    for cache in caches:
        cache[-1].fill_(float("nan"))


def _held(caches: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    if not caches:
        raise ConfigError("this model's KV was given back by release(); load the model again.")
    return caches


def layer_cache(
    spec: LayerSpec, kernels: Kernels, module: torch.nn.Module, latent: bool, num_slots: int, block_size: int,
    like: torch.Tensor,
) -> PagedLayer | LatentLayer:  # fmt: skip
    """A layer's cache, of the kind that its attention module needs; device and dtype are those of `like`."""
    if latent:
        return LatentLayer(spec, kernels, module.kv_b_proj.weight.detach(), num_slots, block_size)
    return PagedLayer(spec, kernels, num_slots, block_size, like)
