"""torch's own attention over pages: `torch.nn.attention.varlen.varlen_attn` with ``block_table``.

Documented from torch 2.12 on, for inference. The FlashAttention 2 that comes with torch refuses a block table; an
implementation that was installed and activated (`torch.nn.attention.activate_flash_attention_impl`) reads it. So
whether it runs is tried, on a row of two pages a kind of layer, when a model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from inspect import signature
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kpolicy.executors.cuda.failures import classify
from kpolicy.serving.rows import RowTensors

if TYPE_CHECKING:
    from kpolicy.serving.kv_cache import LayerSpec

__all__ = ["Kind", "attend_pages", "kind_of", "missing", "refusal"]

ALLOWED = 2e-2
"""Relative L2 difference between half-precision kernels that compute the same"""


class Kind(NamedTuple):
    """What a kernel is chosen by: layers of one kind have one."""

    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    block_size: int


def kind_of(spec: LayerSpec, dtype: torch.dtype, block_size: int) -> Kind:
    """A layer's kind."""
    return Kind(dtype, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.value_dim, block_size)


@cache
def _varlen() -> Callable[..., torch.Tensor] | None:
    """torch's attention over rows of any length, where it has one that takes pages."""
    try:
        from torch.nn.attention import varlen
    except ImportError:
        return None
    call: Callable[..., torch.Tensor] = varlen.varlen_attn
    return call if {"block_table", "seqused_k"} <= signature(call).parameters.keys() else None


def missing() -> str:
    """Why torch's attention can't read pages here at all; "" where an implementation may."""
    if _varlen() is None:
        return f"torch {torch.__version__} has no block_table in varlen_attn; 2.12 has"
    return ""


def attend_pages(
    query: torch.Tensor, caches: tuple[torch.Tensor, ...], rows: RowTensors, kv_starts: torch.Tensor,
    longest: tuple[int, int], scale: float,
) -> torch.Tensor:  # fmt: skip
    """Causal attention of rows over their pages: [num_tokens, num_heads, head_dim].

    Args:
        query: [num_tokens, num_heads, head_dim], of these rows alone.
        caches: keys and values, [num_slots + 1, num_kv_heads, head_dim] each; behind the pages is the reserved slot.
        rows: these rows; `query_starts` from 0.
        kv_starts: [num_rows + 1] int32, from 0.
        longest: (query tokens, KV tokens) of the longest rows.
        scale: multiplies scores.
    """
    call = _varlen()
    assert call is not None  # noqa: S101 - callers looked
    key, value = (cache[:-1].view(-1, rows.block_size, *cache.shape[1:]) for cache in caches)
    return call(
        query, key, value, rows.query_starts, kv_starts, *longest, scale=scale, window_size=(-1, 0), enable_gqa=True,
        seqused_k=rows.kv_lens, block_table=rows.block_table,
    )  # fmt: skip


def refusal(
    kind: Kind, device: torch.device, scale: float, gathered: Callable[..., torch.Tensor]
) -> str:  # fmt: skip
    """Why layers of a kind can't read pages; "" where a row of two pages comes out as over gathered keys.

    Args:
        kind: the layers'.
        device: where they run.
        scale: multiplies scores.
        gathered: (query, key, value, query_starts, kv_starts, (query tokens, KV tokens)) -> the same, over keys and
            values that follow each other.
    """
    why = missing()
    if why:
        return why
    size, kv_len = kind.block_size, kind.block_size + (kind.block_size + 1) // 2
    query_len = max(1, size // 2)
    make: dict[str, Any] = {"generator": torch.Generator().manual_seed(0)}
    # Three pages, of which the row has the last and the first.
    caches = tuple(
        torch.randn(3 * size + 1, kind.num_kv_heads, kind.head_dim, **make).to(device, kind.dtype) for _ in range(2)
    )
    query = torch.randn(query_len, kind.num_heads, kind.head_dim, **make).to(device, kind.dtype)
    whole: dict[str, Any] = {"dtype": torch.int32, "device": device}
    starts, kv_starts = torch.tensor([0, query_len], **whole), torch.tensor([0, kv_len], **whole)
    rows = RowTensors(torch.tensor([[2, 0]], **whole), torch.tensor([kv_len], **whole), starts, size)
    slots = torch.cat((torch.arange(2 * size, 3 * size), torch.arange(size)))[:kv_len].to(device)
    try:
        mine = attend_pages(query, caches, rows, kv_starts, (query_len, kv_len), scale).float()
        right = gathered(
            query, *(cache.index_select(0, slots) for cache in caches), starts, kv_starts, (query_len, kv_len)
        ).float()
    # Whatever torch or the implementation that was activated says to a block table.
    except Exception as error:
        if classify(error).sticky:
            raise
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    off = float((mine - right).norm() / right.norm())
    return "" if off <= ALLOWED else f"its results over pages are off by {off:.2g} (relative L2)"
