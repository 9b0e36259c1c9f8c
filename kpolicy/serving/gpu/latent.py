"""Absorbed MLA attention in Triton: decode rows over the latents themselves (arXiv 2405.04434, 2.1.2), split KV.

All heads share one latent a token, so a tile holds query tokens and heads of one row, and a latent is read once for
keys and values. Lengths are read from device tensors, as in `kpolicy.serving.gpu.paged`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kpolicy.serving.gpu.launch import launch
from kpolicy.serving.gpu.paged import LOG2_E, decode_splits
from kpolicy.serving.rows import RowTensors

__all__ = ["latent_attention", "write_latents"]

BLOCK_M = 16
BLOCK_N = 32


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


@triton.jit
def _attend(out_ptr, mid_ptr, max_ptr, sum_ptr, latent_q_ptr, rope_q_ptr, cache_ptr, table_ptr, lens_ptr, starts_ptr,
            scale, latent_q_stride_t, latent_q_stride_h, rope_q_stride_t, rope_q_stride_h, cache_stride, table_stride,
            NUM_HEADS: tl.constexpr, QUERY_LEN: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
            RANK_PAD: tl.constexpr, ROPE_PAD: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr,
            BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    split = tl.program_id(2)
    start = tl.load(starts_ptr + row)
    query_len = tl.load(starts_ptr + row + 1) - start
    if (query_len == 0) | (query_len > QUERY_LEN):
        return
    kv_len = tl.load(lens_ptr + row)
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    t, head = m // NUM_HEADS, m % NUM_HEADS
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
    share = tl.cdiv(tl.cdiv(kv_len, BLOCK_N), SPLITS) * BLOCK_N
    begin = split * share
    end = tl.minimum(begin + share, kv_len)
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, RANK_PAD], tl.float32)
    for n in range(begin, end, BLOCK_N):
        pos = n + tl.arange(0, BLOCK_N)
        ok = pos < end
        page = tl.load(table_ptr + row * table_stride + pos // PAGE, mask=ok, other=0)
        slot = page.to(tl.int64) * PAGE + pos % PAGE
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
    if SPLITS == 1:
        out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(
            out_ptr + (token[:, None] * NUM_HEADS + head[:, None]) * RANK + r[None, :],
            out.to(out_ptr.dtype.element_ty), mask=m_ok[:, None] & r_ok[None, :],
        )  # fmt: skip
    else:
        place = ((row * tl.num_programs(1) + tile) * SPLITS + split) * BLOCK_M + tl.arange(0, BLOCK_M)
        tl.store(max_ptr + place, best)
        tl.store(sum_ptr + place, total)
        tl.store(mid_ptr + place[:, None] * RANK_PAD + r[None, :], acc)


@triton.jit
def _combine(out_ptr, mid_ptr, max_ptr, sum_ptr, starts_ptr, NUM_HEADS: tl.constexpr, QUERY_LEN: tl.constexpr,
             RANK: tl.constexpr, RANK_PAD: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    start = tl.load(starts_ptr + row)
    query_len = tl.load(starts_ptr + row + 1) - start
    if (query_len == 0) | (query_len > QUERY_LEN):
        return
    place = tl.arange(0, BLOCK_M)
    m = tile * BLOCK_M + place
    t, head = m // NUM_HEADS, m % NUM_HEADS
    r = tl.arange(0, RANK_PAD)
    first = (row * tl.num_programs(1) + tile) * SPLITS * BLOCK_M + place
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for split in range(SPLITS):
        best = tl.maximum(best, tl.load(max_ptr + first + split * BLOCK_M))
    safe = tl.where(best == float("-inf"), 0.0, best)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, RANK_PAD], tl.float32)
    for split in range(SPLITS):
        weight = tl.exp2(tl.load(max_ptr + first + split * BLOCK_M) - safe)
        total += weight * tl.load(sum_ptr + first + split * BLOCK_M)
        acc += weight[:, None] * tl.load(mid_ptr + (first + split * BLOCK_M)[:, None] * RANK_PAD + r[None, :])
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    token = (start + t).to(tl.int64)
    tl.store(
        out_ptr + (token[:, None] * NUM_HEADS + head[:, None]) * RANK + r[None, :],
        out.to(out_ptr.dtype.element_ty), mask=(t < query_len)[:, None] & (r < RANK)[None, :],
    )  # fmt: skip


def latent_attention(
    latent_query: torch.Tensor, rope_query: torch.Tensor, cache: torch.Tensor, rows: RowTensors, scale: float,
    decode_len: int,
) -> torch.Tensor:  # fmt: skip
    """Causal attention of decode rows over latents, as one KV head that all query heads share.

    Args:
        latent_query: [num_tokens, num_heads, rank], queries in latent space; the last dimension is contiguous.
        rope_query: [num_tokens, num_heads, rope_dim]; likewise.
        cache: [num_slots + 1, rank + rope_dim], contiguous.
        rows: rows of at most `decode_len` query tokens; longer ones are left out.
        scale: multiplies scores.
        decode_len: query tokens of a row, at most.

    Returns:
        [num_tokens, num_heads, rank]; zeros for rows without KV, undefined for tokens of rows left out and of no row.
    """
    num_tokens, num_heads, rank = latent_query.shape
    rope_dim = rope_query.shape[2]
    num_reqs, table = rows.kv_lens.shape[0], rows.block_table
    out = torch.empty(num_tokens, num_heads, rank, dtype=latent_query.dtype, device=latent_query.device)
    tiles = triton.cdiv(num_heads * decode_len, BLOCK_M)
    splits = decode_splits(num_reqs, tiles, table.shape[1] * rows.block_size, latent_query.device)
    # A matrix product takes at least 16.
    rank_pad, rope_pad = (max(16, triton.next_power_of_2(each)) for each in (rank, rope_dim))
    precision = "ieee" if latent_query.dtype == torch.float32 else "tf32"
    mid = most = total = out
    if splits > 1:
        count = num_reqs * tiles * splits * BLOCK_M
        scratch = torch.empty(count * (rank_pad + 2), dtype=torch.float32, device=out.device)
        mid, most, total = scratch.split((count * rank_pad, count, count))
    launch(
        _attend, (num_reqs, tiles, splits),
        (out, mid, most, total, latent_query, rope_query, cache, table, rows.kv_lens, rows.query_starts,
         scale * LOG2_E, latent_query.stride(0), latent_query.stride(1), rope_query.stride(0), rope_query.stride(1),
         cache.stride(0), table.stride(0)),
        (num_heads, decode_len, rank, rope_dim, rank_pad, rope_pad, rows.block_size, splits, BLOCK_M, BLOCK_N,
         precision),
        num_warps=4, num_stages=2,
    )  # fmt: skip
    if splits > 1:
        launch(
            _combine, (num_reqs, tiles, 1), (out, mid, most, total, rows.query_starts),
            (num_heads, decode_len, rank, rank_pad, splits, BLOCK_M), num_warps=4,
        )  # fmt: skip
    return out
