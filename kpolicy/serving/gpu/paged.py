"""Paged attention in Triton, in two kernels: one for decode rows, one for prompt rows.

Every length is read from device tensors, so a captured call attends over the live KV of each replay. The grid depends
on the padded shape alone: programs of rows that the other kernel takes, and of padding, end at once.

Decode rows: split KV (arXiv 2311.01282), the query tokens and heads of a KV head in one tile. Prompt rows: the online
softmax of FlashAttention-2 (arXiv 2307.08691), a tile of query tokens a program.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kpolicy.serving.gpu.launch import launch
from kpolicy.serving.gpu.splits import (
    FIELDS,
    Scratch,
    Shares,
    Splits,
    at_once,
    clear_padding,
    leave,
    part_of,
    plan_splits,
    processors,
    store,
    tile_of,
    together,
)  # fmt: skip
from kpolicy.serving.rows import RowTensors

__all__ = ["LOG2_E", "paged_attention", "row_of", "write_kv"]

LOG2_E = 1.4426950408889634
DECODE_BLOCK_N = 64
READ_TOGETHER = 4096
"""Values of parts whose reads are under way together"""
TWICE_BYTES = 16384
"""Of a block's keys and values, that have two buffers; with larger ones too few programs fit a processor"""
FEW_KV_HEADS = 2
"""With so few a row has many parts, and half as many programs a processor are quicker"""


@triton.jit
def _write(slots_ptr, k_ptr, v_ptr, k_cache_ptr, v_cache_ptr,
           k_stride_t, k_stride_h, v_stride_t, v_stride_h, k_cache_stride, v_cache_stride,
           NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
           H_PAD: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    h = tl.arange(0, H_PAD)[:, None]
    d, dv = tl.arange(0, D_PAD)[None, :], tl.arange(0, DV_PAD)[None, :]
    k_ok, v_ok = (h < NUM_HEADS) & (d < HEAD_DIM), (h < NUM_HEADS) & (dv < VALUE_DIM)
    k = tl.load(k_ptr + token * k_stride_t + h * k_stride_h + d, mask=k_ok)
    v = tl.load(v_ptr + token * v_stride_t + h * v_stride_h + dv, mask=v_ok)
    tl.store(k_cache_ptr + slot * k_cache_stride + h * HEAD_DIM + d, k, mask=k_ok)
    tl.store(v_cache_ptr + slot * v_cache_stride + h * VALUE_DIM + dv, v, mask=v_ok)


def write_kv(
    slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor
) -> None:
    """Write each token's keys and values to its slot, in one launch.

    Args:
        slots: [num_tokens] int64.
        key: [num_tokens, num_kv_heads, head_dim]; the last dimension is contiguous.
        value: [num_tokens, num_kv_heads, value_dim]; likewise.
        k_cache: [num_slots + 1, num_kv_heads, head_dim], contiguous.
        v_cache: [num_slots + 1, num_kv_heads, value_dim], contiguous.
    """
    if key.stride(2) != 1:
        key = key.contiguous()
    if value.stride(2) != 1:
        value = value.contiguous()
    num_heads, head_dim = k_cache.shape[1:]
    launch(
        _write, (key.shape[0], 1, 1),
        (slots, key, value, k_cache, v_cache, key.stride(0), key.stride(1), value.stride(0), value.stride(1),
         k_cache.stride(0), v_cache.stride(0)),
        _write_constants(num_heads, head_dim, v_cache.shape[2]),
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def _write_constants(num_heads: int, head_dim: int, value_dim: int) -> tuple[int, ...]:
    padded = (triton.next_power_of_2(each) for each in (num_heads, head_dim, value_dim))
    return (num_heads, head_dim, value_dim, *padded)


@triton.jit
def _softcapped(scores, softcap):
    # In units of log2 e, as scores are.
    x = scores / softcap
    return softcap * (1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0))


@triton.jit(do_not_specialize=["grid", "cleared"])
def _decode(out_ptr, mid_ptr, max_ptr, sum_ptr, plan_ptr, arrivals_ptr, q_ptr, k_ptr, v_ptr, table_ptr, lens_ptr,
            starts_ptr, scale, softcap, q_stride_t, q_stride_h, k_stride, v_stride, table_stride, grid, cleared,
            SHARE: tl.constexpr, QUERY_LEN: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
            D_PAD: tl.constexpr, DV_PAD: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
            SOFTCAP: tl.constexpr, BLOCK_M: tl.constexpr,
            COUNT: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK_N: tl.constexpr, TWICE: tl.constexpr,
            PRECISION: tl.constexpr):  # fmt: skip
    # Rows' own programs begin before those that end at once.
    kv_head = tl.program_id(0)
    program = tl.program_id(1)
    num_rows = tl.load(plan_ptr + grid * FIELDS)
    clear_padding(out_ptr, starts_ptr, num_rows, cleared, QUERY_LEN, SHARE, 1, VALUE_DIM, DV_PAD, BLOCK_M)
    if program >= grid:
        return
    row, split, parts, share, place = part_of(plan_ptr, program)
    if row < 0:
        return
    row = row.to(tl.int64)
    start = tl.load(starts_ptr + row)
    query_len = tl.load(starts_ptr + row + 1) - start
    kv_len = tl.load(lens_ptr + row)
    low = 0
    if WINDOW > 0:
        low = tl.maximum(kv_len - query_len - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    t, head = tile_of(SHARE, 1, BLOCK_M, BLOCK_M)
    token = (start + t).to(tl.int64)
    d, dv = tl.arange(0, D_PAD), tl.arange(0, DV_PAD)
    q = tl.load(
        q_ptr + token[:, None] * q_stride_t + head[:, None] * q_stride_h + d[None, :],
        mask=(t < query_len)[:, None] & (d < HEAD_DIM)[None, :], other=0.0,
    )  # fmt: skip
    at = kv_len - query_len + t
    begin = low + split * share * BLOCK_N
    end = tl.minimum(begin + share * BLOCK_N, kv_len)
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DV_PAD], tl.float32)
    # With two buffers a block's keys and values are on their way while the last are used: its pages are known by then.
    pages_ptr = table_ptr + row * table_stride
    ahead = begin + tl.arange(0, BLOCK_N)
    page = tl.load(pages_ptr + ahead // PAGE, mask=ahead < end, other=0)
    for n in range(begin, end, BLOCK_N):
        pos = n + tl.arange(0, BLOCK_N)
        ok = pos < end
        if not TWICE:
            page = tl.load(pages_ptr + pos // PAGE, mask=ok, other=0)
        slot = page.to(tl.int64) * PAGE + pos % PAGE
        if TWICE:
            page = tl.load(pages_ptr + (pos + BLOCK_N) // PAGE, mask=pos + BLOCK_N < end, other=0)
        k = tl.load(
            k_ptr + slot[None, :] * k_stride + kv_head * HEAD_DIM + d[:, None],
            mask=ok[None, :] & (d < HEAD_DIM)[:, None], other=0.0,
        )  # fmt: skip
        scores = tl.dot(q, k, input_precision=PRECISION) * scale
        if SOFTCAP:
            scores = _softcapped(scores, softcap)
        seen = ok[None, :] & (pos[None, :] <= at[:, None])
        if WINDOW > 0:
            seen = seen & (pos[None, :] > at[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        kept = tl.exp2(best - safe)
        weights = tl.exp2(scores - safe[:, None])
        total = total * kept + tl.sum(weights, 1)
        v = tl.load(
            v_ptr + slot[:, None] * v_stride + kv_head * VALUE_DIM + dv[None, :],
            mask=ok[:, None] & (dv < VALUE_DIM)[None, :], other=0.0,
        )  # fmt: skip
        acc = acc * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        best = higher
    leave(
        out_ptr, mid_ptr, max_ptr, sum_ptr, acc, best, total, place + split, parts, start, query_len, SHARE, 1,
        VALUE_DIM, DV_PAD, BLOCK_M, COUNT,
    )  # fmt: skip
    if parts > 1:
        # What other programs stored is read: a program's barrier, and release and acquire of the counter, order both.
        tl.debug_barrier()
        counter = arrivals_ptr + place // 2 * tl.num_programs(0) + kv_head
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == parts - 1:
            own_t, own_head = tile_of(SHARE, 1, BLOCK_M, COUNT)
            own = own_t < query_len
            all_acc, all_total = together(
                mid_ptr, max_ptr, sum_ptr, place, parts, own, dv, COUNT, DV_PAD, DV_PAD, AT_ONCE
            )  # fmt: skip
            store(out_ptr, start + own_t, own_head, own, all_acc, all_total, dv, SHARE, 1, VALUE_DIM)
            tl.store(counter, 0)


@triton.jit
def row_of(starts_ptr, tile, num_reqs, BLOCK_M: tl.constexpr):
    """The row that a tile of query tokens belongs to: row r's tiles begin at starts[r] // BLOCK_M + r."""
    low = 0
    high = num_reqs
    while low < high:
        middle = (low + high) // 2
        if tl.load(starts_ptr + middle) // BLOCK_M + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _prefill_keys(acc, best, total, q, at, begin, end, kv_len, row, kv_head, k_ptr, v_ptr, table_ptr, scale, softcap,
                  k_stride, v_stride, table_stride, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
                  D_PAD: tl.constexpr, DV_PAD: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
                  SOFTCAP: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
                  MASKED: tl.constexpr):  # fmt: skip
    d, dv = tl.arange(0, D_PAD), tl.arange(0, DV_PAD)
    for n in range(begin, end, BLOCK_N):
        pos = n + tl.arange(0, BLOCK_N)
        ok = pos < kv_len
        page = tl.load(table_ptr + row * table_stride + pos // PAGE, mask=ok, other=0)
        slot = page.to(tl.int64) * PAGE + pos % PAGE
        k_at = k_ptr + slot[None, :] * k_stride + kv_head * HEAD_DIM + d[:, None]
        if MASKED or D_PAD != HEAD_DIM:
            k = tl.load(k_at, mask=ok[None, :] & (d < HEAD_DIM)[:, None], other=0.0)
        else:
            k = tl.load(k_at)
        scores = tl.dot(q, k, input_precision=PRECISION) * scale
        if SOFTCAP:
            scores = _softcapped(scores, softcap)
        if MASKED:
            seen = ok[None, :] & (pos[None, :] <= at[:, None])
            if WINDOW > 0:
                seen = seen & (pos[None, :] > at[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        kept = tl.exp2(best - safe)
        weights = tl.exp2(scores - safe[:, None])
        total = total * kept + tl.sum(weights, 1)
        v_at = v_ptr + slot[:, None] * v_stride + kv_head * VALUE_DIM + dv[None, :]
        if MASKED or DV_PAD != VALUE_DIM:
            v = tl.load(v_at, mask=ok[:, None] & (dv < VALUE_DIM)[None, :], other=0.0)
        else:
            v = tl.load(v_at)
        acc = acc * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        best = higher
    return acc, best, total


@triton.jit(do_not_specialize=["num_reqs"])
def _prefill(out_ptr, q_ptr, k_ptr, v_ptr, table_ptr, lens_ptr, starts_ptr, scale, softcap,
             q_stride_t, q_stride_h, k_stride, v_stride, table_stride, num_reqs,
             NUM_HEADS: tl.constexpr, SHARE: tl.constexpr, LEAST: tl.constexpr, HEAD_DIM: tl.constexpr,
             VALUE_DIM: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr, PAGE: tl.constexpr,
             WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
             PRECISION: tl.constexpr):  # fmt: skip
    # Rows behind a context mostly come first, and a row's last tiles have the most keys: these begin first.
    head = tl.program_id(0)
    place = tl.program_id(1)
    row = row_of(starts_ptr, place, num_reqs, BLOCK_M).to(tl.int64)
    start = tl.load(starts_ptr + row)
    query_len = tl.load(starts_ptr + row + 1) - start
    first = ((query_len + BLOCK_M - 1) // BLOCK_M - 1 - (place - (start // BLOCK_M + row))) * BLOCK_M
    if (query_len < LEAST) | (first < 0):
        return
    kv_len = tl.load(lens_ptr + row)
    kv_head = head // SHARE
    m = first + tl.arange(0, BLOCK_M)
    m_ok = m < query_len
    token = (start + m).to(tl.int64)
    d, dv = tl.arange(0, D_PAD), tl.arange(0, DV_PAD)
    q = tl.load(
        q_ptr + token[:, None] * q_stride_t + head * q_stride_h + d[None, :],
        mask=m_ok[:, None] & (d < HEAD_DIM)[None, :], other=0.0,
    )  # fmt: skip
    context = kv_len - query_len
    at = context + m
    low = 0
    if WINDOW > 0:
        low = tl.maximum(context + first - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    high = tl.minimum(kv_len, context + first + BLOCK_M)
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DV_PAD], tl.float32)
    whole = low
    if WINDOW == 0:
        # Keys that every query of the tile sees need no mask.
        whole = tl.maximum(context + first + 1, 0) // BLOCK_N * BLOCK_N
        acc, best, total = _prefill_keys(
            acc, best, total, q, at, 0, whole, kv_len, row, kv_head, k_ptr, v_ptr, table_ptr, scale, softcap,
            k_stride, v_stride, table_stride, HEAD_DIM, VALUE_DIM, D_PAD, DV_PAD, PAGE, WINDOW, SOFTCAP, BLOCK_N,
            PRECISION, False,
        )  # fmt: skip
    acc, best, total = _prefill_keys(
        acc, best, total, q, at, whole, high, kv_len, row, kv_head, k_ptr, v_ptr, table_ptr, scale, softcap,
        k_stride, v_stride, table_stride, HEAD_DIM, VALUE_DIM, D_PAD, DV_PAD, PAGE, WINDOW, SOFTCAP, BLOCK_N,
        PRECISION, True,
    )  # fmt: skip
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        out_ptr + (token[:, None] * NUM_HEADS + head) * VALUE_DIM + dv[None, :],
        out.to(out_ptr.dtype.element_ty), mask=m_ok[:, None] & (dv < VALUE_DIM)[None, :],
    )  # fmt: skip


def paged_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rows: RowTensors,
    scale: float,
    shares: Shares,
    *,
    window: int = 0,
    softcap: float = 0.0,
    decode_len: int = 1,
    decodes: bool = True,
    prefills: bool = True,
) -> torch.Tensor:
    """Causal attention of the step's tokens over their requests' KV.

    Args:
        query: [num_tokens, num_heads, head_dim]; the last dimension is contiguous.
        k_cache: [num_slots + 1, num_kv_heads, head_dim], contiguous.
        v_cache: [num_slots + 1, num_kv_heads, value_dim], contiguous.
        rows: the step's rows.
        scale: multiplies scores.
        shares: the step's; launches that may run beside each other have each their own.
        window: tokens a query sees, itself included; 0 for all before it.
        softcap: c in ``c * tanh(score / c)``; 0 for none.
        decode_len: rows of at most this many query tokens go to the decode kernel, longer ones to the prefill kernel.
        decodes: whether there may be rows for the decode kernel.
        prefills: whether there may be rows for the prefill kernel; without, every row has `decode_len` query tokens.

    Returns:
        [num_tokens, num_heads, value_dim]; zeros for tokens of no row and of rows without KV.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, value_dim = v_cache.shape[1:]
    table, num_reqs = rows.block_table, rows.kv_lens.shape[0]
    if query.stride(2) != 1:
        query = query.contiguous()
    # Without prompts the decode kernel clears what is padding: clearing all first would be one launch more a layer.
    out = (torch.empty if decodes and not prefills and num_reqs else torch.zeros)(
        (num_tokens, num_heads, value_dim), dtype=query.dtype, device=query.device
    )  # fmt: skip
    if not num_reqs:
        return out
    log2_scale, cap = scale * LOG2_E, softcap * LOG2_E
    strides = query.stride(0), query.stride(1), k_cache.stride(0), v_cache.stride(0), table.stride(0)
    model = _Heads(
        num_heads, num_kv_heads, head_dim, value_dim, rows.block_size, window, softcap > 0, query.dtype, query.device
    )  # fmt: skip
    if decodes:
        splits, places, stages, constants = _decode_plan(model, num_reqs, decode_len, table.shape[1])
        shared = shares.of(rows, splits, num_kv_heads, model.block_n, decode_len, window)
        cleared = 0 if prefills else num_tokens
        launch(
            _decode, (num_kv_heads, max(splits.grid, triton.cdiv(cleared, decode_len)), 1),
            (out, *Scratch.of(splits, num_kv_heads, places, model.padded[1], query.device), shared.plan,
             shared.arrivals, query, k_cache, v_cache, table, rows.kv_lens, rows.query_starts, log2_scale, cap,
             *strides),
            constants, (splits.grid, cleared), num_warps=4, num_stages=stages,
        )  # fmt: skip
    if prefills:
        block_m, num_warps, constants = _prefill_plan(model, decode_len + 1 if decodes else 1, num_tokens)
        launch(
            _prefill, (num_heads, num_tokens // block_m + num_reqs, 1),
            (out, query, k_cache, v_cache, table, rows.kv_lens, rows.query_starts, log2_scale, cap, *strides),
            constants, (num_reqs,), num_warps=num_warps, num_stages=2,
        )  # fmt: skip
    return out


class _Heads(NamedTuple):
    """What the kernels are compiled for, of a layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    page: int
    window: int
    capped: bool
    dtype: torch.dtype
    device: torch.device

    @property
    def padded(self) -> tuple[int, int]:
        """Head sizes as powers of two; a matrix product takes at least 16."""
        return max(16, triton.next_power_of_2(self.head_dim)), max(16, triton.next_power_of_2(self.value_dim))

    @property
    def wide(self) -> bool:
        """Whether tiles must be small to fit."""
        return self.dtype == torch.float32 or self.padded[0] > 128

    @property
    def block_n(self) -> int:
        """Keys of a block, of decode rows."""
        return DECODE_BLOCK_N // 2 if self.wide else DECODE_BLOCK_N

    @property
    def precision(self) -> str:
        return "ieee" if self.dtype == torch.float32 else "tf32"


@functools.lru_cache(maxsize=4096)
def _decode_plan(
    model: _Heads, num_reqs: int, decode_len: int, table_width: int
) -> tuple[Splits, int, int, tuple[Any, ...]]:  # fmt: skip
    """(how KV may be shared out, places of a tile, stages of the loop, compile-time arguments) of the decode kernel."""
    share = model.num_heads // model.num_kv_heads
    places = triton.next_power_of_2(share * decode_len)
    each = 2 if model.num_kv_heads <= FEW_KV_HEADS else 4
    splits = plan_splits(num_reqs, model.num_kv_heads, table_width * model.page, model.device, each)
    block_n = model.block_n
    twice = block_n * sum(model.padded) * model.dtype.itemsize <= TWICE_BYTES
    constants = (
        share, decode_len, model.head_dim, model.value_dim, *model.padded, model.page, model.window, model.capped,
        max(16, places), places,
        at_once(READ_TOGETHER, splits.most, places * model.padded[1]), block_n, twice, model.precision,
    )  # fmt: skip
    return splits, places, 3 if twice else 2, constants


@functools.lru_cache(maxsize=1024)
def _prefill_plan(model: _Heads, least: int, num_tokens: int) -> tuple[int, int, tuple[Any, ...]]:
    """(query tokens of a tile, warps, compile-time arguments) of the prefill kernel."""
    block_m, block_n = (32, 32) if model.wide else (128, 64)
    if not model.wide and num_tokens // block_m * model.num_heads < 2 * processors(model.device):
        # Large tiles of a short prompt would leave most of the device idle.
        block_m = 64
    constants = (
        model.num_heads, model.num_heads // model.num_kv_heads, least, model.head_dim, model.value_dim,
        *model.padded, model.page, model.window, model.capped, block_m, block_n, model.precision,
    )  # fmt: skip
    return block_m, 4 if model.wide or model.padded[0] <= 64 or block_m == 64 else 8, constants
