"""Memory that the graphs of one pool share: what a tensor of one recording gave back, a later one may take.

A recorded tensor lives in a *block* of an *arena*. The model sees it through a storage of its own; recorded calls see
the same bytes through the segment's storage. When nothing holds the model's storage any more, nothing that is
recorded later can read the block, so a later tensor of this graph, or of another graph of the pool, may have it. A
replay runs the calls in the order in which they were recorded, so every block is written again before it is read.
This is what the private pool of a device graph does, and it is sound on the same condition: graphs of a pool never
run at the same time, and a segment that reads what an earlier one wrote is replayed after it, with no other key's
graph between.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from kpolicy.errors import CaptureError
from kpolicy.reasons import Reason

__all__ = ["Arena", "Block", "nbytes_of"]

ALIGNMENT = 64
"""Bytes: what torch's CPU allocator aligns to (c10/core/alignment.h). Some kernels of a maths library round
differently on memory that is aligned less, so recorded memory is aligned as eager memory is."""

SEGMENT_BYTES = 8 << 20
"""Least bytes mapped at once; pages that nobody touches take no memory."""


def nbytes_of(tensor: Any) -> int:
    """Bytes of the storage under a tensor."""
    nbytes: int = tensor.untyped_storage().nbytes()
    return nbytes


class _Segment:
    """One mapping, and which of its bytes are free."""

    def __init__(self, nbytes: int) -> None:
        try:
            self.memory = mmap.mmap(-1, nbytes)
        except OSError as error:
            raise CaptureError(
                Reason.CAPTURE_OUT_OF_MEMORY, f"the host refused {nbytes} bytes for recorded tensors: {error}"
            ) from error
        self.nbytes = nbytes
        self.top = 0
        self.free: list[tuple[int, int]] = []
        """(offset, bytes) below `top`, by offset, never two side by side"""
        with torch.inference_mode():
            self.flat = torch.frombuffer(self.memory, dtype=torch.uint8)
        self._typed: dict[Any, Any] = {}

    def take(self, nbytes: int) -> int | None:
        """The offset of free bytes: the smallest hole that holds them, else the end."""
        fits = [(size, offset) for offset, size in self.free if size >= nbytes]
        if fits:
            size, offset = min(fits)
            self.free.remove((offset, size))
            if size > nbytes:
                self.free.append((offset + nbytes, size - nbytes))
                self.free.sort()
            return offset
        if self.top + nbytes > self.nbytes:
            return None
        self.top += nbytes
        return self.top - nbytes

    def give_back(self, offset: int, nbytes: int) -> None:
        self.free.append((offset, nbytes))
        self.free.sort()
        joined: list[tuple[int, int]] = []
        for start, size in self.free:
            if joined and sum(joined[-1]) == start:
                start, size = joined[-1][0], joined.pop()[1] + size
            joined.append((start, size))
        self.free = joined

    def typed(self, dtype: Any) -> Any:
        """The whole segment as one tensor of a dtype."""
        if dtype not in self._typed:
            self._typed[dtype] = self.flat.view(dtype)
        return self._typed[dtype]


class Block:
    """Bytes of a segment that hold one storage of a recorded tensor."""

    __slots__ = ("nbytes", "offset", "read", "ref", "segment")

    def __init__(self, segment: _Segment, offset: int, nbytes: int) -> None:
        self.segment = segment
        self.offset = offset
        self.nbytes = nbytes
        self.ref: Any = None
        """Whether the model's storage still lives"""
        self.read = False
        """Whether a recorded call takes it"""

    @property
    def alive(self) -> bool:
        return not self.ref.expired()

    def flat(self, nbytes: int) -> Any:
        """The block's first bytes for the model: under a storage of their own, whose end frees the block."""
        flat = torch.frombuffer(self.segment.memory, dtype=torch.uint8, count=nbytes, offset=self.offset)
        self.ref = StorageWeakRef(flat.untyped_storage())
        return flat

    def seen_by_calls(self, tensor: Any) -> Any:
        """The same elements as a tensor on this block, without keeping the model's storage alive."""
        itemsize = tensor.element_size()
        with torch.inference_mode():
            return self.segment.typed(tensor.dtype).as_strided(
                tensor.size(), tensor.stride(), self.offset // itemsize + tensor.storage_offset()
            )


class Arena:
    """The blocks of one pool.

    Args:
        admit: called with the bytes by which the arena is about to grow; raises where they aren't to be had.
    """

    def __init__(self, admit: Callable[[int], None] | None = None) -> None:
        self._admit = admit or _admit_all
        self._segments: list[_Segment] = []
        self._live: dict[int, Block] = {}
        self._attributed = 0

    @property
    def num_bytes(self) -> int:
        """Bytes that tensors have ever had: what the host really gave."""
        return sum(segment.top for segment in self._segments)

    def attribute(self) -> int:
        """The bytes that no graph was charged with yet, which the graph that asks now is."""
        grown, self._attributed = self.num_bytes - self._attributed, self.num_bytes
        return grown

    @property
    def num_live(self) -> int:
        """Blocks whose tensors somebody outside the graphs still holds."""
        self._sweep()
        return len(self._live)

    def new(self, nbytes: int) -> tuple[Any, Block]:
        """Bytes for the model, contents undefined, and their block.

        Raises:
            CaptureError: the memory isn't to be had.
        """
        block = self._take(-(-nbytes // ALIGNMENT) * ALIGNMENT)
        flat = block.flat(nbytes)
        self._live[flat.untyped_storage()._cdata] = block
        return flat, block

    def block_of(self, tensor: Any) -> Block | None:
        """The block under a tensor that somebody holds; None for memory that isn't the arena's."""
        block = self._live.get(tensor.untyped_storage()._cdata)
        return block if block is not None and block.alive else None

    def _take(self, nbytes: int) -> Block:
        self._sweep()
        for segment in self._segments:
            before = segment.top
            offset = segment.take(nbytes)
            if offset is not None:
                if segment.top > before:
                    try:
                        self._admit(nbytes)
                    except BaseException:
                        segment.top = before
                        raise
                return Block(segment, offset, nbytes)
        self._admit(nbytes)
        segment = _Segment(max(nbytes, SEGMENT_BYTES))
        self._segments.append(segment)
        offset = segment.take(nbytes)
        assert offset is not None  # noqa: S101 - a new segment holds what it was made for
        return Block(segment, offset, nbytes)

    def _sweep(self) -> None:
        """Take back the blocks whose tensors are gone."""
        for cdata in [cdata for cdata, block in self._live.items() if not block.alive]:
            block = self._live.pop(cdata)
            block.segment.give_back(block.offset, block.nbytes)


def _admit_all(nbytes: int) -> None:
    del nbytes
