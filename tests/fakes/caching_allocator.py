"""torch's caching allocator for a GPU, by its own rules, over tensors that are really on the CPU.

What is here is what decides which memory stays with the process when nobody uses it: sizes are rounded, small and large
tensors come out of segments of their own sizes, a free piece serves the stream that it was taken on, the smallest that
fits is split, and a segment goes back to the device only when all of it is free (torch's notes on CUDA semantics,
"Memory management").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from kpolicy.executors.cpu.memory import tensors_in

MIB = 1 << 20


class _Piece:
    """A part of a segment."""

    def __init__(self, offset: int, nbytes: int) -> None:
        self.offset = offset
        self.nbytes = nbytes
        self.free = True


class _Segment:
    """Memory that the device gave for one stream, in pieces one behind the other."""

    def __init__(self, stream: Any, nbytes: int, small: bool) -> None:
        self.stream = stream
        self.nbytes = nbytes
        self.small = small
        self.pieces = [_Piece(0, nbytes)]

    @property
    def free(self) -> bool:
        return all(piece.free for piece in self.pieces)

    def take(self, piece: _Piece, nbytes: int, least_left: int) -> None:
        """Use the front of a free piece; the rest stays free where it is enough to be worth it."""
        piece.free = False
        left = piece.nbytes - nbytes
        if left >= least_left:
            piece.nbytes = nbytes
            self.pieces.insert(self.pieces.index(piece) + 1, _Piece(piece.offset + nbytes, left))

    def give_back(self, piece: _Piece) -> None:
        """A piece is free again, in one with free neighbours."""
        piece.free = True
        merged: list[_Piece] = []
        for each in self.pieces:
            if merged and merged[-1].free and each.free:
                merged[-1].nbytes += each.nbytes
            else:
                merged.append(each)
        self.pieces = merged


class CachingAllocator(TorchDispatchMode):
    """While it is entered, every tensor that an operator makes has its place in pretended device memory.

    Args:
        stream: gives the current stream.
        recording: whether a graph is being recorded; what is made then is the graph's, and not counted here.
        unit: the bytes that count as one: with 1,024, toys have the places that tensors 1,024 times as large have.
    """

    def __init__(self, stream: Callable[[], Any], recording: Callable[[], bool], unit: int = 1) -> None:
        super().__init__()
        self._stream = stream
        self._recording = recording
        self._unit = unit
        self._segments: list[_Segment] = []
        self._held: dict[int, tuple[StorageWeakRef, _Segment, _Piece]] = {}
        self._paused = False
        self.made: list[int] = []
        """Bytes of each tensor that was made, in order, as they are"""

    @property
    def reserved(self) -> int:
        """Bytes that the device has less."""
        return sum(segment.nbytes for segment in self._segments) // self._unit

    def reserved_on(self, stream: Any) -> int:
        """`reserved` for one stream."""
        return sum(segment.nbytes for segment in self._segments if segment.stream == stream) // self._unit

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is made within isn't on the device."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def empty_cache(self) -> None:
        """Give back segments that nobody uses any part of."""
        self._sweep()
        self._segments = [segment for segment in self._segments if not segment.free]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if not (self._paused or self._recording()):
            known = {each.untyped_storage()._cdata for each in tensors_in((args, kwargs or {}))}
            for tensor in tensors_in(results):
                storage = tensor.untyped_storage()
                if storage._cdata not in known and storage._cdata not in self._held and storage.nbytes():
                    self._take(storage)
        return results

    def _take(self, storage: Any) -> None:
        self._sweep()
        nbytes = -(-storage.nbytes() * self._unit // 512) * 512
        self.made.append(storage.nbytes())
        small, stream = nbytes <= MIB, self._stream()
        fitting = [found for found in self._free_pieces(stream, small) if found[1].nbytes >= nbytes]
        if fitting:
            segment, piece = min(fitting, key=lambda found: found[1].nbytes)
        else:
            size = 2 * MIB if small else 20 * MIB if nbytes < 10 * MIB else -(-nbytes // (2 * MIB)) * 2 * MIB
            segment = _Segment(stream, size, small)
            self._segments.append(segment)
            piece = segment.pieces[0]
        segment.take(piece, nbytes, 512 if small else MIB + 1)
        self._held[storage._cdata] = StorageWeakRef(storage), segment, piece

    def _free_pieces(self, stream: Any, small: bool) -> Iterator[tuple[_Segment, _Piece]]:
        for segment in self._segments:
            if segment.stream == stream and segment.small is small:
                for piece in segment.pieces:
                    if piece.free:
                        yield segment, piece

    def _sweep(self) -> None:
        for cdata in [cdata for cdata, (held, _, _) in self._held.items() if held.expired()]:
            _, segment, piece = self._held.pop(cdata)
            segment.give_back(piece)
