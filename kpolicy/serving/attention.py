"""Paged attention as operators of torch, `kpolicy::paged_attention` and `kpolicy::mla_attention`.

A recorder sees one opaque operator a call, and a replay runs it on the live lengths. The implementations are plain
torch for any device; `kpolicy.serving.kernels` chooses between these and a device's own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import library

from kpolicy.serving.rows import HostRows, RowGroup, RowTensors, Scratch, divide

__all__ = ["LIBRARY", "SCRATCH", "attend", "mla_attention", "paged_attention"]

LIBRARY = library.Library("kpolicy", "DEF")
"""Defined by hand: the decorator `custom_op` costs about 8 µs more a call, which a decode step pays in each layer."""

_ROWS = "Tensor block_table, Tensor kv_lens, Tensor query_starts, int block_size"
LIBRARY.define(
    f"paged_attention(Tensor query, Tensor k_cache, Tensor v_cache, {_ROWS}, float scale, int window, float softcap)"
    " -> Tensor"
)
LIBRARY.define(
    f"mla_attention(Tensor query, Tensor cache, Tensor kv_b, {_ROWS}, float scale, int absorbed_len) -> Tensor"
)

LONGEST_DECODE = 8
"""Query tokens of a row that the decode kernel takes, whoever calls it a decode: with more, a row is worth its own
call."""

MOST_GATHERED = 1 << 22
"""Elements of keys that one call of the decode kernel gathers, where it has several rows: it bounds the memory that
gathered KV takes. Smaller calls were measured slower, each costs some 0.3 ms."""

SCRATCH = Scratch()


def paged_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rows: RowTensors,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Causal attention of the step's tokens over their requests' KV, through the dispatcher.

    Args:
        query: [num_tokens, num_heads, head_dim].
        k_cache: [num_slots + 1, num_kv_heads, head_dim]; query heads of a group follow each other.
        v_cache: [num_slots + 1, num_kv_heads, value_dim].
        rows: the step's rows; query tokens are the last of their row's `kv_lens`.
        scale: multiplies scores.
        window: tokens a query sees, itself included; 0 for all before it.
        softcap: c in ``c * tanh(score / c)``; 0 for none.

    Returns:
        [num_tokens, num_heads, value_dim]; zeros for tokens of no row and rows without KV.
    """
    return torch.ops.kpolicy.paged_attention(query, k_cache, v_cache, *rows, scale, window, softcap)


def mla_attention(
    query: torch.Tensor, cache: torch.Tensor, kv_b: torch.Tensor, rows: RowTensors, scale: float, absorbed_len: int = 1
) -> torch.Tensor:
    """Causal attention over a latent cache (MLA, arXiv 2405.04434), through the dispatcher.

    Args:
        query: [num_tokens, num_heads, nope_dim + rope_dim].
        cache: [num_slots + 1, rank + rope_dim], normalised latents and roped keys.
        kv_b: [num_heads * (nope_dim + value_dim), rank], the up-projection.
        rows: the step's rows.
        scale: multiplies scores.
        absorbed_len: rows with at most this many query tokens are absorbed, the others expanded.

    Returns:
        [num_tokens, num_heads, value_dim]; zeros for tokens of no row and rows without KV.
    """
    return torch.ops.kpolicy.mla_attention(query, cache, kv_b, *rows, scale, absorbed_len)


def _paged_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    kv_lens: torch.Tensor,
    query_starts: torch.Tensor,
    block_size: int,
    scale: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    at = HostRows.read(RowTensors(block_table, kv_lens, query_starts, block_size))
    out = query.new_zeros(query.shape[0], query.shape[1], v_cache.shape[2])
    decodes, prefills = divide(at, LONGEST_DECODE, window)
    row_size = block_size * k_cache.shape[1] * k_cache.shape[2]
    for group in decodes:
        for part in group.parts(max(1, MOST_GATHERED // (row_size * group.num_blocks))):
            _decode(out, query, k_cache, v_cache, part, at, scale, window, softcap)
    for row in prefills:
        _prefill(out, query, k_cache, v_cache, row, at, scale, window, softcap)
    return out


def _decode(
    out: torch.Tensor,
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    group: RowGroup,
    at: HostRows,
    scale: float,
    window: int,
    softcap: float,
) -> None:
    """The decode kernel: rows of equal query length in one call.

    The query heads that share a KV head stand in a row of queries for it, so keys and values aren't repeated.
    """
    num_rows, query_len, span = len(group.rows), group.query_len, group.num_blocks * at.block_size
    num_kv_heads, head_dim = k_cache.shape[1:]
    share = query.shape[1] // num_kv_heads
    tokens = group.tokens(query.device)
    slots, seen = group.slots(at, window, query.device)
    q = query.index_select(0, tokens).view(num_rows, query_len, num_kv_heads, share, head_dim)
    q = q.permute(0, 2, 3, 1, 4).reshape(num_rows, num_kv_heads, share * query_len, head_dim)
    flat = slots.flatten()
    k = SCRATCH.gather("k", k_cache, flat).view(num_rows, span, num_kv_heads, head_dim).transpose(1, 2)
    v = SCRATCH.gather("v", v_cache, flat).view(num_rows, span, num_kv_heads, -1).transpose(1, 2)
    if query_len > 1:
        seen = seen[:, None].expand(-1, share, -1, -1).reshape(num_rows, share * query_len, span)
    result = attend(q, k, v, seen[:, None], scale, softcap)
    result = result.view(num_rows, num_kv_heads, share, query_len, -1).permute(0, 3, 1, 2, 4)
    out.index_copy_(0, tokens, result.reshape(num_rows * query_len, query.shape[1], -1))


def _prefill(
    out: torch.Tensor,
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    row: RowGroup,
    at: HostRows,
    scale: float,
    window: int,
    softcap: float,
) -> None:
    """The prefill kernel: one row. Its groups of query heads are views that share keys and values."""
    num_kv_heads, head_dim = k_cache.shape[1:]
    share = query.shape[1] // num_kv_heads
    tokens = slice(row.starts[0], row.starts[0] + row.query_len)
    slots, seen = row.slots(at, window, query.device)
    q = query[tokens].view(row.query_len, num_kv_heads, share, head_dim).permute(1, 2, 0, 3)
    k = SCRATCH.gather("k", k_cache, slots[0]).transpose(0, 1)[:, None].expand(-1, share, -1, -1)
    v = SCRATCH.gather("v", v_cache, slots[0]).transpose(0, 1)[:, None].expand(-1, share, -1, -1)
    result = attend(q, k, v, seen[:, None], scale, softcap)
    out[tokens] = result.permute(2, 0, 1, 3).reshape(row.query_len, query.shape[1], -1)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float, softcap: float = 0.0
) -> torch.Tensor:
    """Softmax attention, [..., queries, value_dim], of queries that each see at least one key.

    Args:
        q: [batch, heads, queries, head_dim].
        k: [batch, heads, keys, head_dim].
        v: [batch, heads, keys, value_dim].
        seen: bool, [1 or batch, 1 or heads, queries, keys]; the first two may be left out.
        scale: multiplies scores.
        softcap: 0 for none.
    """
    # On a GPU (torch 2.11, H200) the fused kernel gave wrong results for the last of 129 queries under a mask.
    if not softcap and q.device.type == "cpu":
        # Of a mask of three dimensions its fused kernel isn't taken: scores of a chunk of 256 tokens are written out
        # then, tens of MB that come from the system anew.
        seen = seen[(None,) * (4 - seen.dim())]
        # torch's fused kernel wants equal head sizes; zeros beyond a value change nothing.
        missing = q.shape[-1] - v.shape[-1]
        if missing > 0:
            padded = F.pad(v, (0, missing))
            return F.scaled_dot_product_attention(q, k, padded, attn_mask=seen, scale=scale)[..., : v.shape[-1]]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
    scores = torch.matmul(q, k.transpose(-1, -2))
    scores = torch.tanh(scores * (scale / softcap)) * softcap if softcap else scores * scale
    weights = scores.masked_fill_(~seen, float("-inf")).softmax(-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, v)


def _paged_shape(query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *_: object) -> torch.Tensor:  # noqa: ARG001
    return query.new_empty(query.shape[0], query.shape[1], v_cache.shape[2])


LIBRARY.impl("paged_attention", _paged_attention, "CompositeExplicitAutograd")
library.register_fake("kpolicy::paged_attention", _paged_shape, lib=LIBRARY)
