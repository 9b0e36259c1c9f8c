"""Absorbed MLA attention in Triton: decode rows over the latents themselves (arXiv 2405.04434, 2.1.2), split KV.

All heads share one latent a token, so a tile holds query tokens and heads of one row, and a latent is read once for
keys and values. Lengths are read from device tensors, as in `kpolicy.serving.gpu.paged`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kpolicy.serving.gpu.launch import launch
from kpolicy.serving.gpu.paged import LOG2_E
from kpolicy.serving.gpu.splits import (
    FIELDS,
    Scratch,
    Shares,
    at_once,
    clear_padding,
    leave,
    part_of,
    plan_splits,
    store,
    tile_of,
    together,
)
from kpolicy.serving.rows import RowTensors

__all__ = ["latent_attention", "write_latents"]

BLOCK_M = 16
BLOCK_N = 32
CHUNK = 64
"""Of a latent's values, that a program brings together"""
READ_TOGETHER = 8192
"""Values of parts whose reads are under way together"""


@triton.jit
def _write(slots_ptr, latent_ptr, rope_ptr, cache_ptr, latent_stride, rope_stride, cache_stride,
           RANK: tl.constexpr, ROPE: tl.constexpr, RANK_PAD: tl.constexpr, ROPE_PAD: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    r, p = tl.arange(0, RANK_PAD), tl.arange(0, ROPE_PAD)
    latent = tl.load(latent_ptr + token * latent_stride + r, mask=r < RANK)
    rope = tl.load(rope_ptr + token * rope_stride + p, mask=p < ROPE)
    tl.store(cache_ptr + slot * cache_stride + r, latent, mask=r < RANK)
    tl.store(cache_ptr + slot * cache_stride + RANK + p, rope, mask=p < ROPE)


def write_latents(slots: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor, cache: torch.Tensor) -> None:
    """Write each token's latent and roped key to its slot, in one launch.

    Args:
        slots: [num_tokens] int64.
        latent: [num_tokens, rank]; the last dimension is contiguous.
        rope: [num_tokens, rope_dim]; likewise.
        cache: [num_slots + 1, rank + rope_dim], contiguous.
    """
    rank, rope_dim = latent.shape[1], rope.shape[1]
    launch(
        _write, (latent.shape[0], 1, 1),
        (slots, latent, rope, cache, latent.stride(0), rope.stride(0), cache.stride(0)),
        (rank, rope_dim, triton.next_power_of_2(rank), triton.next_power_of_2(rope_dim)),
    )  # fmt: skip


@triton.jit(do_not_specialize=["grid", "cleared"])
def _attend(out_ptr, mid_ptr, max_ptr, sum_ptr, plan_ptr, latent_q_ptr, rope_q_ptr, cache_ptr, table_ptr, lens_ptr,
            starts_ptr, scale, latent_q_stride_t, latent_q_stride_h, rope_q_stride_t, rope_q_stride_h, cache_stride,
            table_stride, grid, cleared,
            NUM_HEADS: tl.constexpr, QUERY_LEN: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
            RANK_PAD: tl.constexpr, ROPE_PAD: tl.constexpr, PAGE: tl.constexpr, TILES: tl.constexpr,
            BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    program = tl.program_id(1)
    num_rows = tl.load(plan_ptr + grid * FIELDS)
    clear_padding(out_ptr, starts_ptr, num_rows, cleared, QUERY_LEN, NUM_HEADS, TILES, RANK, RANK_PAD, BLOCK_M)
    if program >= grid:
        return
    row, split, parts, share, place = part_of(plan_ptr, program)
    if row < 0:
        return
    row = row.to(tl.int64)
    start = tl.load(starts_ptr + row)
    query_len = tl.load(starts_ptr + row + 1) - start
    kv_len = tl.load(lens_ptr + row)
    t, head = tile_of(NUM_HEADS, TILES, BLOCK_M, BLOCK_M)
    m_ok = t < query_len
    token = (start + t).to(tl.int64)
    r, p = tl.arange(0, RANK_PAD), tl.arange(0, ROPE_PAD)
    r_ok, p_ok = r < RANK, p < ROPE
    q = tl.load(
        latent_q_ptr + token[:, None] * latent_q_stride_t + head[:, None] * latent_q_stride_h + r[None, :],
        mask=m_ok[:, None] & r_ok[None, :], other=0.0,
    )  # fmt: skip
    q_rope = tl.load(
        rope_q_ptr + token[:, None] * rope_q_stride_t + head[:, None] * rope_q_stride_h + p[None, :],
        mask=m_ok[:, None] & p_ok[None, :], other=0.0,
    )  # fmt: skip
    at = kv_len - query_len + t
    begin = split * share * BLOCK_N
    end = tl.minimum(begin + share * BLOCK_N, kv_len)
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, RANK_PAD], tl.float32)
    # With two buffers a block's latents are on their way while the last are used: its pages are known by then.
    pages_ptr = table_ptr + row * table_stride
    ahead = begin + tl.arange(0, BLOCK_N)
    page = tl.load(pages_ptr + ahead // PAGE, mask=ahead < end, other=0)
    for n in range(begin, end, BLOCK_N):
        pos = n + tl.arange(0, BLOCK_N)
        ok = pos < end
        slot = page.to(tl.int64) * PAGE + pos % PAGE
        page = tl.load(pages_ptr + (pos + BLOCK_N) // PAGE, mask=pos + BLOCK_N < end, other=0)
        first = cache_ptr + slot * cache_stride
        latent = tl.load(first[:, None] + r[None, :], mask=ok[:, None] & r_ok[None, :], other=0.0)
        rope = tl.load(first[None, :] + RANK + p[:, None], mask=ok[None, :] & p_ok[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(latent), input_precision=PRECISION)
        scores = tl.dot(q_rope, rope, scores, input_precision=PRECISION) * scale
        scores = tl.where(ok[None, :] & (pos[None, :] <= at[:, None]), scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        kept = tl.exp2(best - safe)
        weights = tl.exp2(scores - safe[:, None])
        total = total * kept + tl.sum(weights, 1)
        acc = acc * kept[:, None] + tl.dot(weights.to(latent.dtype), latent, input_precision=PRECISION)
        best = higher
    leave(
        out_ptr, mid_ptr, max_ptr, sum_ptr, acc, best, total, place + split, parts, start, query_len, NUM_HEADS, TILES,
        RANK, RANK_PAD, BLOCK_M, BLOCK_M,
    )  # fmt: skip


@triton.jit
def _combine(out_ptr, mid_ptr, max_ptr, sum_ptr, plan_ptr, heads_ptr, starts_ptr,
             NUM_HEADS: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr, TILES: tl.constexpr,
             BLOCK_M: tl.constexpr, CHUNK: tl.constexpr, AT_ONCE: tl.constexpr):  # fmt: skip
    """Bring a row's parts together: a program a row, tile and `CHUNK` of the values, since a tile has 32 KiB a part."""
    # Rows' own programs are next to each other, so that they begin on processors of their own.
    program = tl.load(heads_ptr + tl.program_id(2))
    if program < 0:
        return
    row, _, parts, _, place = part_of(plan_ptr, program)
    start = tl.load(starts_ptr + row)
    query_len = tl.load(starts_ptr + row + 1) - start
    t, head = tile_of(NUM_HEADS, TILES, BLOCK_M, BLOCK_M)
    width = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    acc, total = together(
        mid_ptr, max_ptr, sum_ptr, place, parts, t < query_len, width, BLOCK_M, CHUNK, RANK_PAD, AT_ONCE
    )  # fmt: skip
    store(out_ptr, start + t, head, t < query_len, acc, total, width, NUM_HEADS, TILES, RANK)


def latent_attention(
    latent_query: torch.Tensor, rope_query: torch.Tensor, cache: torch.Tensor, rows: RowTensors, scale: float,
    decode_len: int, shares: Shares,
) -> torch.Tensor:  # fmt: skip
    """Causal attention of decode rows over latents, as one KV head that all query heads share.

    Args:
        latent_query: [num_tokens, num_heads, rank], queries in latent space; the last dimension is contiguous.
        rope_query: [num_tokens, num_heads, rope_dim]; likewise.
        cache: [num_slots + 1, rank + rope_dim], contiguous.
        rows: rows of at most `decode_len` query tokens; longer ones are left out.
        scale: multiplies scores.
        decode_len: query tokens of a row, at most.
        shares: the step's; launches that may run beside each other have each their own.

    Returns:
        [num_tokens, num_heads, rank]; zeros for rows without KV and for what is behind the last row that has some,
        undefined for rows left out before it.
    """
    num_tokens, num_heads, rank = latent_query.shape
    rope_dim = rope_query.shape[2]
    num_reqs, table = rows.kv_lens.shape[0], rows.block_table
    out = torch.empty(num_tokens, num_heads, rank, dtype=latent_query.dtype, device=latent_query.device)
    tiles = triton.cdiv(num_heads * decode_len, BLOCK_M)
    splits = plan_splits(num_reqs, tiles, table.shape[1] * rows.block_size, latent_query.device, 2)
    # A matrix product takes at least 16.
    rank_pad, rope_pad = (max(16, triton.next_power_of_2(each)) for each in (rank, rope_dim))
    precision = "ieee" if latent_query.dtype == torch.float32 else "tf32"
    shared = shares.of(rows, splits, tiles, BLOCK_N, decode_len, counted=False)
    scratch = Scratch.of(splits, tiles, BLOCK_M, rank_pad, out.device)
    launch(
        _attend, (tiles, max(splits.grid, triton.cdiv(num_tokens, decode_len)), 1),
        (out, *scratch, shared.plan, latent_query, rope_query, cache, table, rows.kv_lens, rows.query_starts,
         scale * LOG2_E, latent_query.stride(0), latent_query.stride(1), rope_query.stride(0), rope_query.stride(1),
         cache.stride(0), table.stride(0)),
        (num_heads, decode_len, rank, rope_dim, rank_pad, rope_pad, rows.block_size, tiles, BLOCK_M,
         BLOCK_N, precision),
        (splits.grid, num_tokens), num_warps=4, num_stages=2 if out.dtype == torch.float32 else 3,
    )  # fmt: skip
    if splits.shared:
        chunk = min(rank_pad, CHUNK)
        launch(
            _combine, (tiles, rank_pad // chunk, splits.shared),
            (out, *scratch, shared.plan, shared.heads, rows.query_starts),
            (num_heads, rank, rank_pad, tiles, BLOCK_M, chunk, at_once(READ_TOGETHER, splits.most, BLOCK_M * chunk)),
            num_warps=4,
        )  # fmt: skip
    return out
