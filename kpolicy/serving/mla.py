"""MLA over a paged latent cache: absorbed for decode rows, expanded for prefill rows.

Absorbed: queries go into latent space through the key half of the up-projection, attend to latents as one shared KV
head, and come out through its value half. Expanded: the row's latents become keys and values first. Both are the same
function with other roundings, which is why one graph's result can't stand in for the other's (arXiv 2405.04434, 2.1.2).
"""

from __future__ import annotations

import torch
from torch import library

from kpolicy.serving.attention import LIBRARY, SCRATCH, attend
from kpolicy.serving.latents import absorbed, unabsorbed
from kpolicy.serving.rows import HostRows, RowGroup, RowTensors, divide

__all__ = ["absorbed_rows", "expanded_row"]


def _mla_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    kv_b: torch.Tensor,
    block_table: torch.Tensor,
    kv_lens: torch.Tensor,
    query_starts: torch.Tensor,
    block_size: int,
    scale: float,
    absorbed_len: int,
) -> torch.Tensor:
    at = HostRows.read(RowTensors(block_table, kv_lens, query_starts, block_size))
    up = kv_b.view(query.shape[1], -1, kv_b.shape[1])
    out = query.new_zeros(query.shape[0], query.shape[1], up.shape[1] - _nope_dim(query, cache, kv_b))
    decodes, prefills = divide(at, absorbed_len, 0)
    for group in decodes:
        out.index_copy_(0, group.tokens(query.device), absorbed_rows(query, cache, up, group, at, scale))
    for row in prefills:
        out[row.starts[0] : row.starts[0] + row.query_len] = expanded_row(query, cache, up, row, at, scale)
    return out


def _nope_dim(query: torch.Tensor, cache: torch.Tensor, kv_b: torch.Tensor) -> int:
    size: int = query.shape[2] - (cache.shape[1] - kv_b.shape[1])
    return size


def absorbed_rows(
    query: torch.Tensor, cache: torch.Tensor, up: torch.Tensor, group: RowGroup, at: HostRows, scale: float
) -> torch.Tensor:
    """[num_rows * query_len, num_heads, value_dim] of rows of equal query length, over the latents themselves.

    Args:
        query: [num_tokens, num_heads, nope_dim + rope_dim].
        cache: [num_slots + 1, rank + rope_dim].
        up: [num_heads, nope_dim + value_dim, rank].
        group: the rows.
        at: the step's rows.
        scale: multiplies scores.
    """
    rank = up.shape[2]
    value_dim = up.shape[1] - (query.shape[2] - (cache.shape[1] - rank))
    num_rows, num_heads = len(group.rows), query.shape[1]
    q = absorbed(query.index_select(0, group.tokens(query.device)), up, value_dim)
    q = torch.cat(q, dim=-1).view(num_rows, group.query_len * num_heads, -1)
    slots, seen = group.slots(at, 0, query.device)
    latents = SCRATCH.gather("latents", cache, slots.flatten()).view(num_rows, slots.shape[1], -1)
    scores = torch.bmm(q, latents.transpose(1, 2)).mul_(scale).view(num_rows, group.query_len, num_heads, -1)
    weights = scores.masked_fill_(~seen[:, :, None], float("-inf")).softmax(-1, dtype=torch.float32).to(q.dtype)
    mixed = torch.bmm(weights.view(num_rows, group.query_len * num_heads, -1), latents[..., :rank])
    return unabsorbed(mixed.view(num_rows * group.query_len, num_heads, rank), up, value_dim)


def expanded_row(
    query: torch.Tensor, cache: torch.Tensor, up: torch.Tensor, row: RowGroup, at: HostRows, scale: float
) -> torch.Tensor:
    """[query_len, num_heads, value_dim] of one row, over keys and values made of its latents."""
    rank, num_heads = up.shape[2], query.shape[1]
    rope_dim = cache.shape[1] - rank
    nope_dim = query.shape[2] - rope_dim
    slots, seen = row.slots(at, 0, query.device)
    latents = SCRATCH.gather("latents", cache, slots[0])
    expanded = torch.matmul(latents[:, :rank], up.transpose(1, 2))  # [num_heads, span, nope_dim + value_dim]
    shared = latents[:, rank:].expand(num_heads, -1, -1)
    k = torch.cat((expanded[..., :nope_dim], shared), dim=-1)
    q = query[row.starts[0] : row.starts[0] + row.query_len].transpose(0, 1)
    v = expanded[..., nope_dim:]
    return attend(q[None], k[None], v[None], seen[:, None], scale)[0].transpose(0, 1)


def _mla_shape(query: torch.Tensor, cache: torch.Tensor, kv_b: torch.Tensor, *_: object) -> torch.Tensor:
    value_dim = kv_b.shape[0] // query.shape[1] - _nope_dim(query, cache, kv_b)
    return query.new_empty(query.shape[0], query.shape[1], value_dim)


LIBRARY.impl("mla_attention", _mla_attention, "CompositeExplicitAutograd")
library.register_fake("kpolicy::mla_attention", _mla_shape, lib=LIBRARY)
