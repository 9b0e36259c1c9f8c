"""Where the tensors of one recording live: memory from outside, constants, and blocks of the pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch

from kpolicy.executors.cpu.arena import Arena, Block, nbytes_of
from kpolicy.executors.cpu.prepare import flat_bytes

__all__ = ["Fresh", "Outside", "RecordedMemory", "tensors_in"]


def tensors_in(value: Any) -> Iterator[Any]:
    """Every tensor in arguments or results: lists, tuples and mappings are looked into."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_in(each)
    elif isinstance(value, Mapping):
        yield from tensors_in(tuple(value.values()))


class Fresh(NamedTuple):
    """A result that got memory of its own."""

    path: tuple[int, ...]
    """Where it lies in what the operator gives; () where it is all of it"""
    recorded: Any
    """Its elements in the pool, for recorded calls"""
    copy: Callable[[Any], Any]
    """Copies a later result to the same place"""
    block: Block


class Outside:
    """Memory that a recording reads or writes and didn't take from the pool.

    Args:
        tensor: the first tensor on it.
        line: the operator and the line of model code that used it first.
        constant: made of Python data while recording: frozen, and kept for the graph alone.
    """

    def __init__(self, tensor: Any, line: str, constant: bool) -> None:
        self.address = tensor.untyped_storage().data_ptr()
        self.cdata = tensor.untyped_storage()._cdata
        self.nbytes = nbytes_of(tensor)
        self.line = line
        self.constant = constant
        self.ours = 0
        """References to the storage that the graph itself holds, or a few less: a prepared call may hold a view more"""
        self.pristine: Any = None
        """A constant's bytes before the model changed them"""
        self._tensors: dict[Any, Any] = {}

    def tensor_like(self, tensor: Any) -> Any:
        """An alias of a tensor on this memory, made once for each layout."""
        layout = (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())
        if layout not in self._tensors:
            self._tensors[layout] = tensor.detach()
            self.ours += 1
        return self._tensors[layout]

    @property
    def moved(self) -> bool:
        storage = next(iter(self._tensors.values())).untyped_storage()
        return bool(storage.data_ptr() != self.address or storage.nbytes() < self.nbytes)

    @property
    def ours_only(self) -> bool:
        """Whether nobody but the graph holds the memory, so that nobody can put a new value there."""
        return not self.constant and _uses(self.cdata) - _overhead() <= self.ours

    @property
    def kept_bytes(self) -> int:
        """Bytes that exist for the graph alone."""
        return (self.nbytes if self.constant else 0) + (0 if self.pristine is None else nbytes_of(self.pristine))


def _uses(cdata: int) -> int:
    """References to a storage. Where torch doesn't tell, the check that uses it finds nothing."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return 1 << 30 if count is None else int(count(cdata))


@lru_cache(maxsize=1)
def _overhead() -> int:
    """What `_uses` says beyond the tensors on a storage: it differs between versions of torch."""
    tensor = torch.empty(1)
    return _uses(tensor.untyped_storage()._cdata) - 1


class RecordedMemory:
    """Gives each tensor of a recording its place, and recorded calls their view of it."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.outside: dict[int, Outside] = {}
        self.restores: list[Callable[[], Any]] = []
        """Calls that put changed constants back, before a replay"""

    def keep(self, tensor: Any, line: str, *, constant: bool = False) -> Outside:
        """Hold memory that isn't the pool's for as long as the graph lives."""
        cdata = tensor.untyped_storage()._cdata
        if cdata not in self.outside:
            self.outside[cdata] = Outside(tensor, line, constant)
            self.outside[cdata].tensor_like(tensor)
        return self.outside[cdata]

    def for_calls(self, value: Any, line: str) -> Any:
        """Arguments as recorded calls take them: the same elements, not the model's tensors."""
        if isinstance(value, torch.Tensor):
            if not nbytes_of(value):
                return value.detach()
            block = self.arena.block_of(value)
            if block is not None:
                block.read = True
                return block.seen_by_calls(value)
            return self.keep(value, line).tensor_like(value)
        if isinstance(value, (list, tuple)):
            return type(value)([self.for_calls(each, line) for each in value])
        if isinstance(value, Mapping):
            return {name: self.for_calls(each, line) for name, each in value.items()}
        return value

    def before_write(self, tensors: Sequence[Any]) -> None:
        """Remember a constant before the model changes it for the first time: each replay starts with it as it was."""
        for tensor in tensors:
            outside = self.outside.get(tensor.untyped_storage()._cdata)
            if outside is not None and outside.constant and outside.pristine is None:
                outside.pristine = flat_bytes(tensor).clone()
                self.restores.append(partial(_restore, outside.tensor_like(tensor), outside.pristine))

    def moved(self, result: Any, argument_storages: set[int]) -> tuple[Any, list[Fresh]]:
        """Results for the model, those that aren't views of arguments moved to the pool, and what was moved."""
        fresh: list[Fresh] = []
        return self._move(result, (), dict.fromkeys(argument_storages), fresh), fresh

    def _move(self, value: Any, path: tuple[int, ...], places: dict[int, Any], fresh: list[Fresh]) -> Any:
        """A result for the model. `places` maps storages to where they went, or to None where they stay.

        Not a closure that calls itself: such a cycle would keep tensors, and so their memory, until the collector runs.
        """
        if isinstance(value, (list, tuple)):
            return type(value)([self._move(each, (*path, place), places, fresh) for place, each in enumerate(value)])
        if not isinstance(value, torch.Tensor) or not nbytes_of(value):
            return value
        cdata = value.untyped_storage()._cdata
        if cdata not in places:
            places[cdata] = self.arena.new(nbytes_of(value))
            places[cdata][0].copy_(flat_bytes(value))
        if places[cdata] is None:
            return value
        flat, block = places[cdata]
        model = flat.view(value.dtype).as_strided(value.size(), value.stride(), value.storage_offset())
        recorded = block.seen_by_calls(model)
        copy = partial(_copy_storage, block.seen_by_calls(flat)) if _overlaps(value) else recorded.copy_
        fresh.append(Fresh(path, recorded, copy, block))
        return model


def _copy_storage(flat: Any, result: Any) -> None:
    flat.copy_(flat_bytes(result))


def _restore(tensor: Any, pristine: Any) -> None:
    flat_bytes(tensor).copy_(pristine)


def _overlaps(tensor: Any) -> bool:
    """Whether two indices may name one element, as in an expanded tensor: such a tensor can't be copied to."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False
