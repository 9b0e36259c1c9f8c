"""Prompt rows of MLA in Triton, over keys and values made of their latents: `expanded_attention`.

The online softmax of FlashAttention-2 (arXiv 2307.08691), a tile of query tokens a program. A head's keys and values
are read as the up-projection leaves them, beside each other, and the roped key that heads share as it is cached, so
that nothing is copied together, and values aren't padded to a key's size.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from kpolicy.errors import SupportError
from kpolicy.serving.gpu.launch import launch
from kpolicy.serving.gpu.paged import LOG2_E, row_of

__all__ = ["expanded_attention"]


@triton.jit
def _keys(acc, best, total, q, q_rope, at, begin, end, kv_len, first_key, head, kv_ptr, rope_ptr, scale, kv_stride,
          rope_stride, NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr, NOPE_PAD: tl.constexpr,
          ROPE_PAD: tl.constexpr, VALUE_PAD: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
          MASKED: tl.constexpr):  # fmt: skip
    d, r, dv = tl.arange(0, NOPE_PAD), tl.arange(0, ROPE_PAD), tl.arange(0, VALUE_PAD)
    head_at = kv_ptr + head * (NOPE + VALUE)
    for n in range(begin, end, BLOCK_N):
        pos = n + tl.arange(0, BLOCK_N)
        ok = pos < kv_len
        key = first_key + pos
        k_at = head_at + key[None, :] * kv_stride + d[:, None]
        rope_at = rope_ptr + key[None, :] * rope_stride + r[:, None]
        if MASKED or NOPE_PAD != NOPE:
            k = tl.load(k_at, mask=ok[None, :] & (d < NOPE)[:, None], other=0.0)
        else:
            k = tl.load(k_at)
        if MASKED or ROPE_PAD != ROPE:
            k_rope = tl.load(rope_at, mask=ok[None, :] & (r < ROPE)[:, None], other=0.0)
        else:
            k_rope = tl.load(rope_at)
        scores = tl.dot(q, k, input_precision=PRECISION)
        scores = tl.dot(q_rope, k_rope, scores, input_precision=PRECISION) * scale
        if MASKED:
            scores = tl.where(ok[None, :] & (pos[None, :] <= at[:, None]), scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        kept = tl.exp2(best - higher)
        weights = tl.exp2(scores - higher[:, None])
        total = total * kept + tl.sum(weights, 1)
        v_at = head_at + key[:, None] * kv_stride + NOPE + dv[None, :]
        if MASKED or VALUE_PAD != VALUE:
            v = tl.load(v_at, mask=ok[:, None] & (dv < VALUE)[None, :], other=0.0)
        else:
            v = tl.load(v_at)
        acc = tl.dot(weights.to(v.dtype), v, acc * kept[:, None], input_precision=PRECISION)
        best = higher
    return acc, best, total


@triton.jit(do_not_specialize=["num_rows"])
def _expanded_prefill(out_ptr, q_ptr, kv_ptr, rope_ptr, q_starts_ptr, kv_starts_ptr, scale, q_stride_t, q_stride_h,
                      kv_stride, rope_stride, num_rows, HEADS: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr,
                      VALUE: tl.constexpr, NOPE_PAD: tl.constexpr, ROPE_PAD: tl.constexpr, VALUE_PAD: tl.constexpr,
                      BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    # Rows behind a context mostly come first, and a row's last tiles have the most keys: these begin first.
    head = tl.program_id(0)
    place = tl.program_id(1)
    row = row_of(q_starts_ptr, place, num_rows, BLOCK_M).to(tl.int64)
    start = tl.load(q_starts_ptr + row)
    query_len = tl.load(q_starts_ptr + row + 1) - start
    first = ((query_len + BLOCK_M - 1) // BLOCK_M - 1 - (place - (start // BLOCK_M + row))) * BLOCK_M
    if first < 0:
        return
    first_key = tl.load(kv_starts_ptr + row).to(tl.int64)
    kv_len = (tl.load(kv_starts_ptr + row + 1) - first_key).to(tl.int32)
    m = first.to(tl.int32) + tl.arange(0, BLOCK_M)
    m_ok = m < query_len
    token = (start + m).to(tl.int64)
    d, r, dv = tl.arange(0, NOPE_PAD), tl.arange(0, ROPE_PAD), tl.arange(0, VALUE_PAD)
    q_at = q_ptr + token[:, None] * q_stride_t + head * q_stride_h
    q = tl.load(q_at + d[None, :], mask=m_ok[:, None] & (d < NOPE)[None, :], other=0.0)
    q_rope = tl.load(q_at + NOPE + r[None, :], mask=m_ok[:, None] & (r < ROPE)[None, :], other=0.0)
    context = kv_len - query_len
    at = context + m
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, VALUE_PAD], tl.float32)
    # Keys that every query of the tile sees need no mask.
    whole = (context + first + 1).to(tl.int32) // BLOCK_N * BLOCK_N
    high = tl.minimum(kv_len, context + first.to(tl.int32) + BLOCK_M)
    acc, best, total = _keys(
        acc, best, total, q, q_rope, at, 0, whole, kv_len, first_key, head, kv_ptr, rope_ptr, scale, kv_stride,
        rope_stride, NOPE, ROPE, VALUE, NOPE_PAD, ROPE_PAD, VALUE_PAD, BLOCK_N, PRECISION, False,
    )  # fmt: skip
    acc, best, total = _keys(
        acc, best, total, q, q_rope, at, whole, high, kv_len, first_key, head, kv_ptr, rope_ptr, scale, kv_stride,
        rope_stride, NOPE, ROPE, VALUE, NOPE_PAD, ROPE_PAD, VALUE_PAD, BLOCK_N, PRECISION, True,
    )  # fmt: skip
    out = acc / total[:, None]
    tl.store(
        out_ptr + (token[:, None] * HEADS + head) * VALUE + dv[None, :], out.to(out_ptr.dtype.element_ty),
        mask=m_ok[:, None] & (dv < VALUE)[None, :],
    )  # fmt: skip


def expanded_attention(
    query: torch.Tensor, expanded: torch.Tensor, rope: torch.Tensor, query_starts: torch.Tensor,
    kv_starts: torch.Tensor, value_dim: int, scale: float,
) -> torch.Tensor:  # fmt: skip
    """[num_tokens, num_heads, value_dim] of prompt rows, causal from the end.

    Args:
        query: [num_tokens, num_heads, nope_dim + rope_dim]; the last dimension is contiguous.
        expanded: [kv tokens, num_heads, nope_dim + value_dim], contiguous: keys without position, then values.
        rope: [kv tokens, rope_dim], the roped keys that heads share; the last dimension is contiguous.
        query_starts: [num_rows + 1] int32, from 0 to num_tokens.
        kv_starts: [num_rows + 1] int32, where each row's keys begin; a row has at least as many as queries.
        value_dim: of a head.
        scale: multiplies scores.
    """
    num_tokens, num_heads, _ = query.shape
    num_rows = query_starts.shape[0] - 1
    nope_dim, rope_dim = expanded.shape[2] - value_dim, rope.shape[1]
    block_m, num_warps, num_stages, constants = _plan(
        num_heads, nope_dim, rope_dim, value_dim, query.dtype, query.device
    )  # fmt: skip
    out = query.new_empty(num_tokens, num_heads, value_dim)
    launch(
        _expanded_prefill, (num_heads, num_tokens // block_m + num_rows, 1),
        (out, query, expanded, rope, query_starts, kv_starts, scale * LOG2_E, query.stride(0), query.stride(1),
         expanded.stride(0), rope.stride(0)),
        constants, (num_rows,), num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    return out


TILES = {
    False: ((128, 64, 8, 2), (64, 64, 8, 2), (64, 32, 4, 2), (64, 32, 8, 2), (32, 32, 4, 1), (16, 16, 4, 1)),
    True: ((32, 32, 4, 2), (32, 32, 4, 1), (16, 16, 4, 1)),
}
"""Query tokens and keys of a tile, warps and stages, of half precision and of float32, the largest first.

Half precision's first was the quickest of eight on an H200, for DeepSeek-V2-Lite's heads (`docs/measured_gpu.md`). What
larger heads, or a processor with less shared memory, take is unverified on hardware.
"""
MOST_RESULTS = 64
"""Registers of a thread for results; a quarter of what there are"""


@functools.lru_cache(maxsize=64)
def _plan(
    num_heads: int, nope_dim: int, rope_dim: int, value_dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[int, int, int, tuple[object, ...]]:
    """(query tokens of a tile, warps, stages, compile-time arguments): the first of `TILES` that fits a processor.

    Raises:
        SupportError: none does.
    """
    nope, rope, value = (max(16, triton.next_power_of_2(each)) for each in (nope_dim, rope_dim, value_dim))
    most = _shared_bytes(device) // dtype.itemsize
    # Queries, and so many stages of keys and values; and a thread's share of the results in registers.
    fits = (
        (block_m, block_n, num_warps, num_stages)
        for block_m, block_n, num_warps, num_stages in TILES[dtype == torch.float32]
        if block_m * (nope + rope) + num_stages * block_n * (nope + rope + value) <= most
        and block_m * value <= num_warps * 32 * MOST_RESULTS
    )
    tile = next(fits, None)
    if tile is None:
        raise SupportError(
            f"heads of MLA of {nope_dim} and {rope_dim} in keys and {value_dim} in values are too large for {device}'s "
            "shared memory in any tile of the prompt kernel; load with kernels='plain'."
        )
    block_m, block_n, num_warps, num_stages = tile
    precision = "ieee" if dtype == torch.float32 else "tf32"
    constants = (num_heads, nope_dim, rope_dim, value_dim, nope, rope, value, block_m, block_n, precision)
    return block_m, num_warps, num_stages, constants


@functools.lru_cache(maxsize=8)
def _shared_bytes(device: torch.device) -> int:
    """Shared memory that a program may have, as Triton counts it; a Hopper's where there is no CUDA device."""
    if device.type != "cuda":
        return 227 << 10
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    return int(properties["max_shared_mem"])
