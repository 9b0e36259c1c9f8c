"""Which graphs vLLM's runners try for a batch, in order: readable (`ScannedKeys`) and indexed (`PreparedKeys`).

A withdrawn key still counts as a size: vLLM pads to the next size it was configured with, and finds the graph missing
there; it never looks for a larger one. So both forms read captured and withdrawn keys together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Protocol

from kpolicy.keys import GraphKey
from kpolicy.modes import Part

__all__ = ["VARLEN", "Keys", "PreparedKeys", "ScannedKeys", "matches"]

VARLEN = -1
"""The kind of batches that variable-length decode graphs take. Other kinds are the uniform query length, or 0."""


def matches(key: GraphKey, kind: int) -> bool:
    """Whether the graph takes batches of that kind."""
    if key.query_len is not None:
        return key.query_len == kind
    return key.max_query_len is None or kind == VARLEN


class Keys(Protocol):
    """The graphs of a context as dispatch reads them."""

    lost: frozenset[GraphKey]
    """Withdrawn graphs; all other planned ones are captured."""
    planned: tuple[GraphKey, ...]
    has_full: bool

    def tried(self, tokens: int, case: int) -> tuple[GraphKey, ...]:
        """The graphs that are tried for so many tokens under a LoRA case, captured or not, of every kind."""
        ...

    def reach(self, case: int, kind: int) -> int:
        """The most tokens of any graph of the case that takes the kind; 0 where there is none."""
        ...

    def has_case(self, case: int) -> bool:
        """Whether any graph is of that LoRA case."""
        ...


def _order(key: GraphKey) -> tuple[bool, bool]:
    """FULL before PIECEWISE, and of two FULL graphs the one for decodes first."""
    return (key.part is Part.PIECEWISE, not key.decode_only)


class ScannedKeys:
    """The readable form.

    Args:
        captured: graphs that may be replayed.
        withdrawn: graphs that were planned and can't be had.
        ladders_apart: whether FULL and PIECEWISE graphs each pad to the next size of their own (v2 of 0.33), or all
            pad to one size.
    """

    def __init__(self, captured: Iterable[GraphKey], withdrawn: Iterable[GraphKey], ladders_apart: bool) -> None:
        found = frozenset(captured)
        self.lost = frozenset(withdrawn) - found
        self.planned = tuple(sorted(found | self.lost, key=lambda key: (key.num_tokens, _order(key))))
        self.has_full = any(key.part is Part.FULL for key in self.planned)
        self.ladders_apart = ladders_apart

    def tried(self, tokens: int, case: int) -> tuple[GraphKey, ...]:
        fitting = [key for key in self.planned if key.num_tokens >= tokens]
        if not self.ladders_apart:
            size = min((key.num_tokens for key in fitting), default=0)
            return tuple(key for key in fitting if key.num_tokens == size and key.lora_case == case)
        found: list[GraphKey] = []
        for part in (Part.FULL, Part.PIECEWISE):
            ladder = [key for key in fitting if key.part is part and key.lora_case == case]
            size = min((key.num_tokens for key in ladder), default=0)
            found += [key for key in ladder if key.num_tokens == size]
        return tuple(found)

    def reach(self, case: int, kind: int) -> int:
        taking = (key.num_tokens for key in self.planned if key.lora_case == case and matches(key, kind))
        return max(taking, default=0)

    def has_case(self, case: int) -> bool:
        return any(key.lora_case == case for key in self.planned)


class PreparedKeys:
    """The same by look-up.

    `slots[tokens]` numbers the ranges of token counts between neighbouring sizes; within one, the graphs that are
    tried don't change. So one list is as long as the largest size, and the rest as short as the list of sizes.
    """

    def __init__(self, keys: ScannedKeys) -> None:
        self.lost = keys.lost
        self.planned = keys.planned
        self.has_full = keys.has_full
        sizes = sorted({key.num_tokens for key in self.planned})
        self.slots: list[int] = [0]
        for slot, size in enumerate(sizes):
            self.slots += [slot] * (size + 1 - len(self.slots))
        groups: dict[tuple[int, int], list[GraphKey]] = defaultdict(list)
        for key in self.planned:
            groups[key.lora_case, key.num_tokens].append(key)
        self.by_case = {
            case: _apart(groups, sizes, case) if keys.ladders_apart else _together(groups, sizes, case)
            for case in sorted({key.lora_case for key in self.planned})
        }
        self._reach: dict[tuple[int, int], int] = {}
        for key in self.planned:
            for kind in {key.query_len or (VARLEN if key.max_query_len else 0), 0}:
                if matches(key, kind):
                    self._reach[key.lora_case, kind] = key.num_tokens  # planned keys rise by size

    def tried(self, tokens: int, case: int) -> tuple[GraphKey, ...]:
        if tokens >= len(self.slots) or case not in self.by_case:
            return ()
        return self.by_case[case][self.slots[tokens]]

    def reach(self, case: int, kind: int) -> int:
        return max(self._reach.get((case, kind), 0), self._reach.get((case, 0), 0))

    def has_case(self, case: int) -> bool:
        return case in self.by_case

    @property
    def kinds(self) -> frozenset[int]:
        """Every kind that some graph tells from others, and 0."""
        return frozenset({kind for _, kind in self._reach} | {0})


Groups = dict[tuple[int, int], list[GraphKey]]


def _together(groups: Groups, sizes: list[int], case: int) -> list[tuple[GraphKey, ...]]:
    return [tuple(groups.get((case, size), ())) for size in sizes]


def _apart(groups: Groups, sizes: list[int], case: int) -> list[tuple[GraphKey, ...]]:
    found: list[tuple[GraphKey, ...]] = []
    full: tuple[GraphKey, ...] = ()
    pieces: tuple[GraphKey, ...] = ()
    for size in reversed(sizes):
        here = groups.get((case, size), ())
        full = tuple(key for key in here if key.part is Part.FULL) or full
        pieces = tuple(key for key in here if key.part is Part.PIECEWISE) or pieces
        found.append(full + pieces)
    return found[::-1]
