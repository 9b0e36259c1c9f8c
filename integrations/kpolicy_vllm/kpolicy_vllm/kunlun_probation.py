"""`Probation`: what a FULL graph of attention that takes lengths on the host has still to prove, and what a step shows.

Everything is read from the step's attention metadata by the names that vLLM and vLLM-Kunlun give its fields: lengths
on the host (``seq_lens_tensor_cpu``, ``context_lens_cpu``, ``kv_lod_cpu``), and block tables wherever they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from itertools import pairwise
from typing import Any, cast

import attrs

__all__ = ["NEEDED", "PATIENCE", "Probation", "Seen", "copied", "each_of", "num_tokens", "same"]

NEEDED = 3
"""Replays that must have eager's bits."""
PATIENCE = 512
"""Steps after which a graph that hasn't been shown all it needs is given up."""
_DEEPEST = 3
_CUMULATED = ("lod", "start_loc")


@attrs.frozen
class Seen:
    """What one step's metadata shows.

    Args:
        lengths: tokens that each row attends to, as attention takes them on the host; empty where it takes none.
        rows: rows that are there, without padding.
        tables: the first block of each of those rows; empty where the metadata has no block tables.
    """

    lengths: tuple[int, ...]
    rows: int
    tables: tuple[int, ...]

    @classmethod
    def of(cls, metadata: Any) -> Seen | None:
        """Of a step; None where attention takes no lengths on the host."""
        fields = [field for each in each_of(metadata) for field in _fields(each, 0)]
        found = [(name, _rows_of(name, value)) for name, value in fields if "block_table" not in name]
        if not found:
            return None
        # A host list of query lengths says how many rows there are, and nothing of what they attend to.
        attended = [lengths for name, lengths in found if not ("query" in name or "qlen" in name or name == "q_lens")]
        rows = min((len(lengths) for _, lengths in found if lengths), default=0)
        tables = [value for name, value in fields if "block_table" in name]
        return cls(
            tuple(length for lengths in attended for length in lengths), rows,
            tuple(block for table in tables for block in _first_blocks(table, rows)),
        )  # fmt: skip


@attrs.define
class Probation:
    """What a FULL graph has still to prove.

    Args:
        captured: what it was captured with.
        shortest: no row could attend to less than those of the capture.
    """

    captured: Seen
    shortest: bool
    passed: int = 0
    steps: int = 0
    shorter: bool = False
    longer: bool = False
    tables: bool = False
    rows: bool = False

    def tells(self, seen: Seen) -> bool:
        """Whether a replay of that step would prove anything: never with the capture's own lengths."""
        self.steps += 1
        if seen.lengths == self.captured.lengths and seen.rows == self.captured.rows:
            return False
        return self.passed < NEEDED or bool(self.missing() - self._after(seen).missing())

    def compared(self, seen: Seen) -> bool:
        """A replay of that step had eager's bits; whether the graph is trusted from here on."""
        after = self._after(seen)
        self.passed += 1
        self.shorter, self.longer, self.tables, self.rows = after.shorter, after.longer, after.tables, after.rows
        return self.passed >= NEEDED and not self.missing()

    def missing(self) -> frozenset[str]:
        """What no replay with eager's bits has shown so far, in words."""
        lengths, more = self.captured.lengths, self.captured.rows > 1
        words = {
            "longer rows": not lengths or self.longer, "shorter rows": not lengths or self.shortest or self.shorter,
            "other block tables": self.tables, "another number of rows": not more or self.rows,
        }  # fmt: skip
        return frozenset(name for name, shown in words.items() if not shown)

    def _after(self, seen: Seen) -> Probation:
        was = self.captured
        return attrs.evolve(
            self,
            longer=self.longer or max(seen.lengths, default=0) > max(was.lengths, default=0),
            shorter=self.shorter or min(seen.lengths, default=0) < min(was.lengths, default=0),
            tables=self.tables or any(a != b for a, b in zip(seen.tables, was.tables, strict=False)),
            rows=self.rows or seen.rows != was.rows,
        )


def each_of(metadata: Any) -> list[Any]:
    """One layer's metadata after another; layers that share it count once."""
    every = list(metadata.values()) if isinstance(metadata, Mapping) else [metadata]
    return list({id(each): each for each in every if each is not None}.values())


def num_tokens(metadata: Any, seen: Seen | None, desc: Any) -> int:
    """Tokens of the step without padding: vLLM's own count where it is less, else by the rows that are there."""
    counts = [getattr(each, "num_actual_tokens", None) for each in each_of(metadata)]
    told = min((int(count) for count in counts if count), default=int(desc.num_tokens))
    reqs = getattr(desc, "num_reqs", None)
    if seen is None or not reqs or not seen.rows or desc.num_tokens % reqs:
        return told
    return min(told, seen.rows * (int(desc.num_tokens) // int(reqs)))


def _fields(value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    for name, held in (vars(value) if hasattr(value, "__dict__") else {}).items():
        device = getattr(getattr(held, "device", None), "type", "")
        lengths = "len" in name or any(word in name for word in _CUMULATED)
        if "block_table" in name and device:
            yield name, held
        elif lengths and device == "cpu" and not held.is_floating_point():
            yield name, held.flatten().tolist()
        elif lengths and isinstance(held, list) and all(isinstance(each, int) for each in held):
            yield name, held
        elif depth < _DEEPEST and "meta" in type(held).__name__.lower():
            yield from _fields(held, depth + 1)


def _rows_of(name: str, values: list[int]) -> list[int]:
    """The lengths of the rows that are there; those of padding are zero."""
    if any(word in name for word in _CUMULATED):
        values = [after - before for before, after in pairwise(values)]
    return [value for value in values if value > 0]


def _first_blocks(table: Any, rows: int) -> list[int]:
    first = table[:rows, 0] if table.dim() > 1 else table[:rows]
    return [int(block) for block in first.tolist()]


def copied(output: Any, padded: int, count: int) -> list[Any]:
    """Copies of an output's tensors, without rows of padding."""
    if isinstance(output, tuple | list):
        return [copy for each in output for copy in copied(each, padded, count)]
    if isinstance(output, Mapping):
        return [copy for each in output.values() for copy in copied(each, padded, count)]
    tensors = getattr(output, "tensors", None)
    if isinstance(tensors, Mapping):  # vLLM's IntermediateTensors
        return copied(tensors, padded, count)
    if not hasattr(output, "clone"):
        return []
    rows = output[:count] if output.dim() and output.shape[0] == padded else output
    return [rows.clone()]


def same(mine: list[Any], other: list[Any]) -> bool:
    """Whether two lists of copies have the same bits."""
    equal = cast("Callable[[Any, Any], bool]", import_module("torch").equal)
    return len(mine) == len(other) and all(equal(a, b) for a, b in zip(mine, other, strict=True))
