"""Which rows of a step an attention kernel takes together, and which KV slots they read.

Kernels here read lengths from tensors when they run, as a device kernel does, so a replay has the live ones.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

__all__ = ["HostRows", "RowGroup", "RowTensors", "Scratch", "Window", "divide", "padded_blocks"]

Window = int
"""Tokens a query sees, itself included; 0 for all before it."""

SMALLEST_SPAN = 32


class RowTensors(NamedTuple):
    """What a kernel is told of the rows: tensors of `StepTensors`, and the tokens in a block."""

    block_table: torch.Tensor
    kv_lens: torch.Tensor
    query_starts: torch.Tensor
    block_size: int


class HostRows(NamedTuple):
    """The same on the host, where kernels in torch work out their slots.

    numpy takes microseconds for what costs torch tens of them, and each layer pays.
    """

    block_table: Any
    kv_lens: Any
    query_starts: Any
    block_size: int

    @classmethod
    def read(cls, at: RowTensors) -> HostRows:
        """Read them as they are now; on a device that waits for it."""
        table, lens, starts = (each.cpu().numpy() for each in at[:3])
        return cls(table, lens.astype(np.int64), starts, at.block_size)


class RowGroup(NamedTuple):
    """Rows that one batched call computes: equal query lengths, spans of KV padded to one number of blocks."""

    rows: list[int]
    starts: list[int]
    """[num_rows], each row's first token"""
    query_len: int
    num_blocks: int
    """KV blocks gathered for each row, padding included"""

    def tokens(self, device: torch.device) -> torch.Tensor:
        """[num_rows * query_len] int64, the rows' tokens."""
        first = np.array(self.starts)
        if self.query_len > 1:
            first = (first[:, None] + np.arange(self.query_len)).reshape(-1)
        return torch.from_numpy(first).to(device)

    def slots(self, at: HostRows, window: Window, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """(slots [num_rows, span] int64, which of them each query sees [num_rows, query_len, span] bool).

        Positions past a row's end repeat its last token's slot, so neither the reserved slot nor another request's
        tokens are read, whatever they hold.
        """
        size, rows = at.block_size, np.array(self.rows)[:, None]
        end = at.kv_lens[rows]
        block = np.arange(self.num_blocks)[None]
        if window:
            block = block + np.maximum(end - (self.query_len + window - 1), 0) // size
        # Blocks and offsets apart, because dividing every position costs as much as reading its keys.
        last = (end - 1) // size
        offset = np.arange(size)
        starts = at.block_table[rows, np.minimum(block, last)].astype(np.int64) * size
        slots = (starts[:, :, None] + offset).reshape(len(rows), -1)
        position = ((block * size)[:, :, None] + offset).reshape(len(block), -1)
        final = at.block_table[rows, last].astype(np.int64) * size + (end - 1 - last * size)
        slots = np.where(position < end, slots, final)
        query = (end - self.query_len + np.arange(self.query_len))[:, :, None]
        seen = position[:, None] <= query
        if window:
            seen &= position[:, None] > query - window
        return torch.from_numpy(slots).to(device), torch.from_numpy(seen).to(device)

    def parts(self, most_rows: int) -> Iterator[RowGroup]:
        """The group in pieces of at most that many rows."""
        if len(self.rows) <= most_rows:
            yield self
            return
        for first in range(0, len(self.rows), most_rows):
            piece = slice(first, first + most_rows)
            yield self._replace(rows=self.rows[piece], starts=self.starts[piece])


def padded_blocks(num_blocks: int, block_size: int) -> int:
    """KV blocks gathered for a row that sees `num_blocks`: steps of a power of two and one and a half of one.

    It depends on the row alone, so that its result doesn't depend on which other rows are in the batch.
    """
    size = -(-SMALLEST_SPAN // block_size)
    while size < num_blocks:
        if size * 3 // 2 >= num_blocks:
            return size * 3 // 2
        size *= 2
    return size


def divide(at: HostRows, longest: int, window: Window) -> tuple[list[RowGroup], list[RowGroup]]:
    """(groups of rows with at most `longest` query tokens, every other row alone).

    Rows without KV or tokens are padding: no group has them.
    """
    short: dict[tuple[int, int], RowGroup] = {}
    rest: list[RowGroup] = []
    size = at.block_size
    starts: list[int] = at.query_starts.tolist()
    for row, kv_len in enumerate(at.kv_lens.tolist()):
        start, query_len = starts[row], starts[row + 1] - starts[row]
        if not kv_len or not query_len:
            continue
        first = max(0, kv_len - query_len - window + 1) // size if window else 0
        num_blocks = (kv_len - 1) // size - first + 1
        if query_len > longest:
            rest.append(RowGroup([row], [start], query_len, num_blocks))
            continue
        key = query_len, padded_blocks(num_blocks, size)
        if key not in short:
            short[key] = RowGroup([], [], *key)
        short[key].rows.append(row)
        short[key].starts.append(start)
    return list(short.values()), rest


class Scratch(threading.local):
    """Memory that gathered KV goes to, one piece a thread and name, used again from call to call.

    Fresh memory of this size comes from the system page by page, which was measured to take over ten times as long as
    the gather itself (64 rows of 256 tokens on a two-core CPU).
    Only for tensors that are read before the call that asked for them returns.
    """

    def __init__(self) -> None:
        self._pieces: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def gather(self, name: str, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """[len(slots), ...] of a cache, in the piece of that name."""
        if cache.device.type != "cpu":
            # A thread may launch on two streams, and a device's allocator keeps pages by itself.
            return cache.index_select(0, slots)
        key = name, cache.dtype
        shape = (len(slots), *cache.shape[1:])
        size = math.prod(shape)
        piece = self._pieces.get(key)
        if piece is None or piece.numel() < size:
            # Outside inference mode, so that any later call may write to it.
            with torch.inference_mode(False):
                piece = self._pieces[key] = torch.empty(size, dtype=cache.dtype)
        out = piece[:size].view(shape)
        torch.index_select(cache, 0, slots, out=out)
        return out
