"""How decode rows' KV is shared out among programs, and how their results come together: what both decode kernels do.

A row's KV goes to as many programs as the rows there are leave for it, which the kernel counts on the device. So it
doesn't depend on the padded shape: a row is computed alike, bit for bit, beside the same rows in every graph and mode
that takes this kernel for them, and padding costs programs that end at once. Programs of a row leave partial results
in memory, which are brought together in the order of the KV: by the last program to arrive, whoever it is, or by a
kernel of its own, whichever is quicker for the size of what there is to read.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

__all__ = [
    "Scratch",
    "Splits",
    "at_once",
    "clear_padding",
    "kept_rows",
    "leave",
    "new_arrivals",
    "plan_splits",
    "share_of",
    "split_count",
    "store",
    "tile_of",
    "together",
]

MOST_SPLITS = 32
MOST_EACH = 4
"""Programs on a processor, of rows that are shared out"""
LEAST_KV = 128
"""KV tokens a program has at least, where rows are as long as they can be"""


@functools.lru_cache(maxsize=8)
def processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


@triton.jit
def split_count(num_rows, groups, programs, most):
    """Programs that share the KV of each row and group of heads: as many as leave all of them within `programs`."""
    return max(1, min(most, programs // max(1, num_rows * groups)))


class Splits(NamedTuple):
    """What a launch needs for any number of rows up to its own."""

    programs: int
    """That rows which are shared out have at most, all of them"""
    most: int
    """Programs of one row and group of heads, at most"""
    grid: int
    """Programs of a group of heads"""
    partial: int
    """How many of these may leave partial results: the first ones"""
    shared: int
    """Rows that may have several programs of a group: the first ones"""


@functools.lru_cache(maxsize=4096)
def plan_splits(num_reqs: int, groups: int, most_kv: int, device: torch.device, each: int) -> Splits:
    """For so many rows at most, whose heads are so many groups, a program each; `each` programs a processor."""
    programs = each * processors(device)
    most = triton.next_power_of_2(max(1, min(MOST_SPLITS, most_kv // LEAST_KV)))
    counts = [(rows, split_count.fn(rows, groups, programs, most)) for rows in range(1, num_reqs + 1)]
    shared = [(rows, splits) for rows, splits in counts if splits > 1]
    partial = max((rows * splits for rows, splits in shared), default=0)
    return Splits(programs, most, max(num_reqs, partial), partial, max((rows for rows, _ in shared), default=0))


def at_once(values: int, most: int, tile: int) -> int:
    """Parts that are read together, of so many there may be: what has so many values, of so many in a tile.

    With 8 of Llama-3.2-1B's, and the fewer registers, six of its programs fit a processor, and graphs of more programs
    than fit all processors then have the rows' own on some of them: 15 to 21% slower with 8 and 16 rows in one of 160.
    """
    return max(2, min(16, most, values // tile))


def new_arrivals(device: torch.device) -> torch.Tensor:
    """[as many as a launch may need] int32, counters that every launch finds at 0 and leaves at 0.

    Rows have several programs only while one for each row and group is at most half of all there may be.
    """
    return torch.zeros(MOST_EACH // 2 * processors(device), dtype=torch.int32, device=device)


class Scratch(NamedTuple):
    """Partial results: sums of values, maxima, and sums of weights, float32."""

    mid: torch.Tensor
    most: torch.Tensor
    total: torch.Tensor

    @classmethod
    def of(cls, splits: Splits, groups: int, places: int, width: int, device: torch.device) -> Scratch:
        """In one allocation, of so many places of a tile."""
        count = splits.partial * groups * places
        whole = torch.empty(count * (width + 2), dtype=torch.float32, device=device)
        return cls(*whole.split((count * width, count, count)))


@triton.jit
def kept_rows(starts_ptr, lens_ptr, num_reqs, QUERY_LEN: tl.constexpr):
    """Rows up to the last one with KV and at most `QUERY_LEN` tokens: behind it are prompts and padding."""
    last = 0
    for first in range(0, num_reqs, 256):
        row = first + tl.arange(0, 256)
        ok = row < num_reqs
        query_len = tl.load(starts_ptr + row + 1, mask=ok, other=0) - tl.load(starts_ptr + row, mask=ok, other=0)
        kept = (tl.load(lens_ptr + row, mask=ok, other=0) > 0) & (query_len > 0) & (query_len <= QUERY_LEN)
        last = tl.maximum(last, tl.max(tl.where(kept, row + 1, 0), 0))
    return last


@triton.jit
def share_of(num_keys, splits, BLOCK_N: tl.constexpr):
    """(keys of a program, programs that have any)."""
    blocks = tl.cdiv(num_keys, BLOCK_N)
    share = tl.maximum(tl.cdiv(blocks, splits), 1)
    return share * BLOCK_N, tl.cdiv(blocks, share)


@triton.jit
def tile_of(SHARE: tl.constexpr, TILES: tl.constexpr, BLOCK_M: tl.constexpr, COUNT: tl.constexpr):
    """(token of a row, query head) of the first `COUNT` places in a program's tile of `BLOCK_M`.

    A KV head's places are its queries' heads, `SHARE`, token by token, in so many tiles.
    """
    group = tl.program_id(0)
    m = group % TILES * BLOCK_M + tl.arange(0, COUNT)
    return m // SHARE, group // TILES * SHARE + m % SHARE


@triton.jit
def store(out_ptr, token, head, ok, acc, total, width, SHARE: tl.constexpr, TILES: tl.constexpr,
          VALUE_DIM: tl.constexpr):  # fmt: skip
    """These of a tile's results: sums of values over sums of weights, which are 0 where there is no KV."""
    at = token.to(tl.int64) * (tl.num_programs(0) // TILES * SHARE) + head
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        out_ptr + at[:, None] * VALUE_DIM + width[None, :], out.to(out_ptr.dtype.element_ty),
        mask=ok[:, None] & (width < VALUE_DIM)[None, :],
    )  # fmt: skip


@triton.jit
def clear_padding(out_ptr, starts_ptr, num_rows, cleared, QUERY_LEN: tl.constexpr, SHARE: tl.constexpr,
                  TILES: tl.constexpr, VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr,
                  BLOCK_M: tl.constexpr):  # fmt: skip
    """Zero what tokens behind the rows' own have as output, of the first `cleared`: `QUERY_LEN` tokens a program."""
    first = tl.program_id(1) * QUERY_LEN
    padding = tl.load(starts_ptr + num_rows)
    if (first < cleared) & (first + QUERY_LEN > padding):
        t, head = tile_of(SHARE, TILES, BLOCK_M, BLOCK_M)
        token = first + t
        ok = (t < QUERY_LEN) & (token >= padding) & (token < cleared)
        nothing = tl.zeros([BLOCK_M], tl.float32)
        acc, width = tl.zeros([BLOCK_M, WIDTH], tl.float32), tl.arange(0, WIDTH)
        store(out_ptr, token, head, ok, acc, nothing, width, SHARE, TILES, VALUE_DIM)


@triton.jit
def leave(out_ptr, mid_ptr, max_ptr, sum_ptr, acc, best, total, row, split, splits, parts, start, query_len,
          SHARE: tl.constexpr, TILES: tl.constexpr, VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr,
          BLOCK_M: tl.constexpr, COUNT: tl.constexpr):  # fmt: skip
    """Store a program's result: the row's where it is the only one, else a part. `COUNT` places can be in use."""
    t, head = tile_of(SHARE, TILES, BLOCK_M, BLOCK_M)
    if parts <= 1:
        store(out_ptr, start + t, head, t < query_len, acc, total, tl.arange(0, WIDTH), SHARE, TILES, VALUE_DIM)
    else:
        place = ((row * splits + split) * tl.num_programs(0) + tl.program_id(0)) * COUNT + tl.arange(0, BLOCK_M)
        tl.store(max_ptr + place, best, mask=t < query_len)
        tl.store(sum_ptr + place, total, mask=t < query_len)
        tl.store(mid_ptr + place[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], acc, mask=(t < query_len)[:, None])


@triton.jit
def together(mid_ptr, max_ptr, sum_ptr, row, splits, parts, own, width, COUNT: tl.constexpr, CHUNK: tl.constexpr,
             WIDTH: tl.constexpr, AT_ONCE: tl.constexpr):  # fmt: skip
    """(sums of values, sums of weights) of all parts, one after the other, for `CHUNK` of the values' `WIDTH`.

    Each thread adds up values of its own: threads exchange nothing, and the reads of `AT_ONCE` parts are under way
    together, past the first cache.
    """
    best = tl.full([COUNT], float("-inf"), tl.float32)
    total = tl.zeros([COUNT], tl.float32)
    acc = tl.zeros([COUNT, CHUNK], tl.float32)
    step = tl.num_programs(0) * COUNT
    first = (row * splits * tl.num_programs(0) + tl.program_id(0)) * COUNT + tl.arange(0, COUNT)
    for begin in range(0, parts, AT_ONCE):
        maxima, sums, values = (), (), ()
        higher = best
        for each in tl.static_range(AT_ONCE):
            # Compared as a tensor: Triton 3.9's interpreter makes int32 of a scalar condition that it broadcasts.
            ok = own & (tl.full([COUNT], begin + each, tl.int32) < parts)
            place = first + (begin + each) * step
            most = tl.load(max_ptr + place, mask=ok, other=float("-inf"), cache_modifier=".cg")
            higher = tl.maximum(higher, most)
            summed = tl.load(sum_ptr + place, mask=ok, other=0.0, cache_modifier=".cg")
            at = place[:, None] * WIDTH + width[None, :]
            value = tl.load(mid_ptr + at, mask=ok[:, None], other=0.0, cache_modifier=".cg")
            # Triton has no unpacking into a tuple.
            maxima, sums = maxima + (most,), sums + (summed,)  # type: ignore[assignment]  # noqa: RUF005
            values = values + (value,)  # type: ignore[assignment]  # noqa: RUF005
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        kept = tl.exp2(best - safe)
        total, acc = total * kept, acc * kept[:, None]
        for each in tl.static_range(AT_ONCE):
            weight = tl.exp2(maxima[each] - safe)
            total += weight * sums[each]
            acc += weight[:, None] * values[each]
        best = higher
    return acc, total
