"""How decode rows' KV is shared out among programs, and how their results come together: what both decode kernels do.

A row's KV goes to as many programs as its length asks for: one kernel, once a step, looks for the least share with
which all rows' programs fit the device, and writes down which part of which row each program has (`Shares`). Rows are
rarely alike in length, and with as many programs for each the longest row's decide how long all take.

It rests on the lengths of the rows there are, so not on the padded shape: a row is computed alike, bit for bit, beside
the same rows in every graph and mode that takes this kernel for them, and padding costs programs that end at once.
Programs of a row leave partial results in memory, which are brought together in the order of the KV: by the last
program to arrive, whoever it is, or by a kernel of its own, whichever is quicker for the size of what there is to read.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kpolicy.serving.gpu.launch import launch
from kpolicy.serving.rows import RowTensors

__all__ = [
    "Scratch",
    "Shared",
    "Shares",
    "Splits",
    "at_once",
    "clear_padding",
    "leave",
    "most_programs",
    "part_of",
    "plan_splits",
    "store",
    "tile_of",
    "together",
]

MOST_SPLITS = 32
LEAST_KV = 128
"""KV tokens a program has at least, where rows are as long as they can be"""
FIELDS = tl.constexpr(4)
"""Of a program in the plan: its row, or -1; which part of it and how many there are, in one (`PARTS`); blocks of keys
of each part; and the first of the places that the row's partial results have, where it has several programs"""
PARTS = tl.constexpr(256)
"""More than a row has programs"""
CLASSES = tl.constexpr(4)
"""Of programs by how much of a share they have: those with most begin first, so that none of them ends last"""
FEW_ROWS = 256
"""So many rows and fewer are shared out by one compiled form, in one warp: warps would wait for each other"""


@functools.lru_cache(maxsize=8)
def processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


@triton.jit
def most_programs(num_rows, programs, most):
    """Programs of a group that so many rows may have.

    All that run at once, or, where rows are many, half of that beyond a program each, so that a long one is shared out.
    """
    return min(num_rows * most, max(programs, num_rows + programs // 2))


class Splits(NamedTuple):
    """What a launch needs for any number of rows up to its own."""

    programs: int
    """Of a group of heads that run at once"""
    most: int
    """Programs of one row and group of heads, at most"""
    grid: int
    """Programs of a group of heads"""
    shared: int
    """Rows that may have several programs of a group"""
    places: int
    """Programs of these rows, of a group: what may leave partial results"""


@functools.lru_cache(maxsize=4096)
def plan_splits(num_reqs: int, groups: int, most_kv: int, device: torch.device, each: int) -> Splits:
    """For so many rows at most, whose heads are so many groups, a program each; `each` programs a processor."""
    programs = max(1, each * processors(device) // groups)
    most = triton.next_power_of_2(max(1, min(MOST_SPLITS, most_kv // LEAST_KV)))
    grid = most_programs.fn(num_reqs, programs, most)
    # Few rows have all programs that run at once, and each that is shared out two or more of them. Many have half as
    # many beyond one each: no more rows are shared out, and they have no more than that and one each.
    shared = min(num_reqs, programs // 2) if most > 1 else 0
    return Splits(programs, most, grid, shared, min(grid, programs) if shared else 0)


@triton.jit(do_not_specialize=["num_reqs", "grid", "shared", "counters"])
def _share_out(plan_ptr, heads_ptr, arrivals_ptr, starts_ptr, lens_ptr, num_reqs, grid, shared, counters,
               QUERY_LEN: tl.constexpr, WINDOW: tl.constexpr, PROGRAMS: tl.constexpr, MOST: tl.constexpr,
               BLOCK_N: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """Write which part of which row each program has, and the first program of each row that has several."""
    row = tl.arange(0, ROWS)
    ok = row < num_reqs
    query_len = tl.load(starts_ptr + row + 1, mask=ok, other=0) - tl.load(starts_ptr + row, mask=ok, other=0)
    kv_len = tl.load(lens_ptr + row, mask=ok, other=0)
    decodes = (query_len > 0) & (query_len <= QUERY_LEN)
    # Behind the last row with KV are prompts and padding.
    num_rows = tl.max(tl.where(decodes & (kv_len > 0), row + 1, 0), 0)
    decodes = decodes & (row < num_rows)
    low = row * 0
    if WINDOW > 0:
        low = tl.maximum(kv_len - query_len - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    # A row without KV has a program too, which writes zeros.
    blocks = tl.where(decodes, tl.maximum(tl.cdiv(kv_len - low, BLOCK_N), 1), 0)
    room = most_programs(tl.sum(decodes.to(tl.int32), 0), PROGRAMS, MOST)
    longest = tl.maximum(tl.max(blocks, 0), 1)
    # Shares up to `under` need too many programs.
    under = tl.cdiv(longest, MOST) - 1
    share = longest
    while share - under > 1:
        middle = (share + under) // 2
        if tl.sum(tl.cdiv(blocks, middle), 0) <= room:
            share = middle
        else:
            under = middle
    # More programs than are planned to run at once aren't worth a share that is little less than the longest row:
    # even rows took 0.92 to 0.98 of the time with one each (docs/measured_gpu.md).
    beyond = tl.sum(tl.cdiv(blocks, share), 0) > PROGRAMS
    share = tl.where(beyond & (share * 4 > longest * 3), longest, share)
    # Parts of a row are as even as whole blocks allow.
    own = tl.maximum(tl.cdiv(blocks, tl.maximum(tl.cdiv(blocks, share), 1)), 1)
    parts = tl.cdiv(blocks, own)
    # Those with most of a share first: where not all run at once, short ones fill what these leave.
    level = tl.minimum(own * CLASSES // (share + 1), CLASSES - 1)
    first, before = row * 0, 0
    for each in tl.static_range(CLASSES):
        here = tl.where(level == CLASSES - 1 - each, parts, 0)
        first = tl.where(level == CLASSES - 1 - each, before + tl.cumsum(here, 0) - here, first)
        before += tl.sum(here, 0)
    split = tl.where(parts > 1, parts, 0)
    place = tl.cumsum(split, 0) - split
    for part in range(tl.max(parts, 0)):
        at = plan_ptr + (first + part) * FIELDS
        has = part < parts
        tl.store(at, row, mask=has)
        tl.store(at + 1, parts * PARTS + part, mask=has)
        tl.store(at + 2, own, mask=has)
        tl.store(at + 3, place, mask=has)
    several = (parts > 1).to(tl.int32)
    tl.store(heads_ptr + tl.cumsum(several, 0) - several, first, mask=parts > 1)
    for begin in range(tl.sum(parts, 0), grid, TILE):
        at = begin + tl.arange(0, TILE)
        tl.store(plan_ptr + at * FIELDS, tl.full([TILE], -1, tl.int32), mask=at < grid)
    for begin in range(tl.sum(several, 0), shared, TILE):
        at = begin + tl.arange(0, TILE)
        tl.store(heads_ptr + at, tl.full([TILE], -1, tl.int32), mask=at < shared)
    tl.store(plan_ptr + grid * FIELDS, num_rows)
    for begin in range(0, counters, TILE):
        at = begin + tl.arange(0, TILE)
        tl.store(arrivals_ptr + at, tl.zeros([TILE], tl.int32), mask=at < counters)


class Shared(NamedTuple):
    """How a step's rows are shared out for one kind of layers."""

    plan: torch.Tensor
    """[at least grid * `FIELDS` + 1] int32: what each program of a group has, and behind it how many rows there are"""
    heads: torch.Tensor
    """[at least shared] int32: the first program of each row that has several, or -1"""
    arrivals: torch.Tensor
    """[at least places // 2 * groups] int32, counters that every launch finds at 0 and leaves at 0; where any are asked
    for"""


class Shares:
    """A step's rows, shared out once for all layers of a kind, when the first of them runs.

    What is shared out rests on lengths that are read on the device, so it is captured with the layers. Steps that may
    run beside each other have each their own, as layers that run one after the other use the same counters.
    """

    def __init__(self) -> None:
        # With the tensors whose addresses the keys have, so that no other gets them.
        self._made: dict[tuple[int, ...], tuple[Shared, RowTensors]] = {}

    def of(
        self, rows: RowTensors, splits: Splits, groups: int, block_n: int, query_len: int, window: int = 0,
        *, counted: bool = True,
    ) -> Shared:  # fmt: skip
        """For layers of so many groups of heads, over blocks of so many keys.

        Args:
            rows: of the step.
            splits: of `plan_splits`.
            groups: of heads.
            block_n: keys of a block.
            query_len: rows of at most so many query tokens are shared out.
            window: tokens a query sees, itself included; 0 for all before it.
            counted: whether a row's programs count who is last.
        """
        lens, starts = rows.kv_lens, rows.query_starts
        num_reqs, (programs, most, grid, shared, places) = lens.shape[0], splits
        key = (
            lens.data_ptr(), starts.data_ptr(), num_reqs, groups, block_n, query_len, window, programs, most, counted
        )  # fmt: skip
        found = self._made.get(key)
        if found is None:
            counters = places // 2 * groups if counted else 0
            # Each begins where a kernel's pointers divide by 16, as what is compiled depends on that.
            counts = [triton.cdiv(each, 4) * 4 for each in (grid * FIELDS.value + 1, shared, counters)]
            whole = torch.empty(sum(counts), dtype=torch.int32, device=lens.device)
            found = self._made[key] = Shared(*whole.split(counts)), rows
            tile = max(FEW_ROWS, triton.next_power_of_2(num_reqs))
            launch(
                _share_out, (1, 1, 1), (*found[0], starts, lens),
                (query_len, window, programs, most, block_n, tile, FEW_ROWS), (num_reqs, grid, shared, counters),
                num_warps=max(1, min(4, tile // FEW_ROWS)),
            )  # fmt: skip
        return found[0]


@triton.jit
def part_of(plan_ptr, program):
    """Of a program: (its row or -1, which part of it, how many there are, blocks of keys of each, the first place)."""
    at = plan_ptr + program * FIELDS
    of = tl.load(at + 1)
    return tl.load(at), of % PARTS, of // PARTS, tl.load(at + 2), tl.load(at + 3)


def at_once(values: int, most: int, tile: int) -> int:
    """Parts that are read together, of so many there may be: what has so many values, of so many in a tile.

    With 8 of Llama-3.2-1B's, and the fewer registers, six of its programs fit a processor, and graphs of more programs
    than fit all processors then have the rows' own on some of them: 15 to 21% slower with 8 and 16 rows in one of 160.
    """
    return max(2, min(16, most, values // tile))


class Scratch(NamedTuple):
    """Partial results: sums of values, maxima, and sums of weights, float32."""

    mid: torch.Tensor
    most: torch.Tensor
    total: torch.Tensor

    @classmethod
    def of(cls, splits: Splits, groups: int, places: int, width: int, device: torch.device) -> Scratch:
        """In one allocation, of so many places of a tile."""
        count = splits.places * groups * places
        whole = torch.empty(count * (width + 2), dtype=torch.float32, device=device)
        return cls(*whole.split((count * width, count, count)))


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
def leave(out_ptr, mid_ptr, max_ptr, sum_ptr, acc, best, total, place, parts, start, query_len,
          SHARE: tl.constexpr, TILES: tl.constexpr, VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr,
          BLOCK_M: tl.constexpr, COUNT: tl.constexpr):  # fmt: skip
    """Store a program's result: the row's where it is the only one, else a part. `COUNT` places can be in use."""
    t, head = tile_of(SHARE, TILES, BLOCK_M, BLOCK_M)
    if parts <= 1:
        store(out_ptr, start + t, head, t < query_len, acc, total, tl.arange(0, WIDTH), SHARE, TILES, VALUE_DIM)
    else:
        at = (place.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * COUNT + tl.arange(0, BLOCK_M)
        tl.store(max_ptr + at, best, mask=t < query_len)
        tl.store(sum_ptr + at, total, mask=t < query_len)
        tl.store(mid_ptr + at[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], acc, mask=(t < query_len)[:, None])


@triton.jit
def together(mid_ptr, max_ptr, sum_ptr, begins, parts, own, width, COUNT: tl.constexpr, CHUNK: tl.constexpr,
             WIDTH: tl.constexpr, AT_ONCE: tl.constexpr):  # fmt: skip
    """(sums of values, sums of weights) of all parts, one after the other, for `CHUNK` of the values' `WIDTH`.

    `begins` is the first one's place.

    Each thread adds up values of its own: threads exchange nothing, and the reads of `AT_ONCE` parts are under way
    together, past the first cache.
    """
    best = tl.full([COUNT], float("-inf"), tl.float32)
    total = tl.zeros([COUNT], tl.float32)
    acc = tl.zeros([COUNT, CHUNK], tl.float32)
    step = tl.num_programs(0) * COUNT
    first = (begins.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * COUNT + tl.arange(0, COUNT)
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
