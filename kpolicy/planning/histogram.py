"""`Histogram`: how many steps of each size there were, and what attention they did."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kpolicy.shapes import BatchNumbers

__all__ = ["Histogram", "Sums"]


class Sums(NamedTuple):
    """Steps of one size, and sums over them, of which costs depend besides the size."""

    steps: float = 0
    decodes: float = 0
    decode_kv_tokens: float = 0
    prefill_kv_tokens: float = 0
    prefill_tokens: float = 0
    prefill_pairs: float = 0
    reqs: float = 0
    with_decodes: float = 0
    """Steps that have decode rows, and below those that have prefill rows"""
    with_prefills: float = 0

    def plus(self, other: Sums) -> Sums:
        return Sums(*(one + more for one, more in zip(self, other, strict=True)))


class Histogram:
    """Steps by size, as a replay or a step log gives them.

    A uniform decode batch counts under its query length and its requests, any other batch under its tokens. The halves
    of a SPLIT count apart, as the two batches that they run as.

    Args:
        source: where the steps come from, in words.
    """

    def __init__(self, source: str = "") -> None:
        self.source = source
        self.decodes: dict[int, dict[int, Sums]] = {}
        """Uniform decode batches: query length, then requests."""
        self.others: dict[int, Sums] = {}
        """All other batches, by tokens."""
        self.refused: dict[str, int] = {}
        """Requests that made no steps, by reason."""
        self.outside_sizes = 0.0
        """Share of the steps that ran at a size which the cost table's curves don't span."""
        self.outside_contexts: float | None = None
        """Share of the steps with a context beyond those that attention was timed at; None where that isn't known."""
        self.delays = ""
        """How far clients were too few for the arrivals, in words; "" where they weren't"""
        self._added: dict[tuple[int, int], list[float]] = {}

    def add(self, numbers: BatchNumbers, *, split: bool = False, decode_steps: int = 1) -> None:
        """Count one step.

        Args:
            numbers: the batch.
            split: whether its decode and prefill rows ran on their own.
            decode_steps: decode steps that it ran for each decode row.
        """
        q = numbers.query_len if numbers.num_decodes else 0
        if numbers.num_prefills and not (split and q):
            self._put((0, numbers.total_tokens), numbers, 1, decodes=True, prefills=True)
        elif not numbers.num_prefills:
            if not numbers.num_decodes:
                return
            key = (q, numbers.num_decodes) if q else (0, numbers.total_tokens)
            self._put(key, numbers, 1, decodes=True, prefills=False)
        else:
            self._put((q, numbers.num_decodes), numbers, decode_steps, decodes=True, prefills=False)
            self._put((0, numbers.num_prefill_tokens), numbers, 1, decodes=False, prefills=True)

    def add_decodes(self, num_decodes: int, query_len: int, steps: int, kv_tokens: int) -> None:
        """Count steps of the same decode rows alone.

        Args:
            num_decodes: the rows.
            query_len: the tokens of each.
            steps: how many steps.
            kv_tokens: KV tokens that they attended to, over all steps.
        """
        sums = self._sums((query_len, num_decodes))
        sums[0] += steps
        sums[1] += num_decodes * steps
        sums[2] += kv_tokens
        sums[6] += num_decodes * steps
        sums[7] += steps

    def _sums(self, key: tuple[int, int]) -> list[float]:
        return self._added.setdefault(key, [0.0] * 9)

    def _put(self, key: tuple[int, int], numbers: BatchNumbers, times: int, *, decodes: bool, prefills: bool) -> None:
        sums = self._sums(key)
        sums[0] += times
        if decodes:
            sums[1] += numbers.num_decodes * times
            sums[2] += numbers.decode_kv_tokens * times
            sums[6] += numbers.num_decodes * times
            sums[7] += times if numbers.num_decodes else 0
        if prefills:
            sums[3] += numbers.prefill_kv_tokens
            sums[4] += numbers.num_prefill_tokens
            sums[5] += numbers.prefill_pairs
            sums[6] += numbers.num_prefills
            sums[8] += 1

    def settled(self) -> Histogram:
        """This histogram, with all that was added in its tables."""
        for (q, size), sums in self._added.items():
            table = self.decodes.setdefault(q, {}) if q else self.others
            table[size] = table.get(size, Sums()).plus(Sums(*sums))
        self._added.clear()
        return self

    @property
    def steps(self) -> float:
        """Steps counted; a SPLIT's halves count each."""
        self.settled()
        tables = [*self.decodes.values(), self.others]
        return sum(sums.steps for table in tables for sums in table.values())

    def largest(self, query_len: int | None = None) -> int:
        """The most requests of a uniform decode batch of that query length, or the most tokens of any other batch."""
        self.settled()
        return max(self.others if query_len is None else self.decodes.get(query_len, {}), default=0)

    def as_dict(self) -> Mapping[str, Any]:
        """Steps by size as plain JSON values."""
        self.settled()
        return {
            "source": self.source,
            "decodes": {
                str(q): {str(size): table[size].steps for size in sorted(table)}
                for q, table in sorted(self.decodes.items())
            },
            "others": {str(size): self.others[size].steps for size in sorted(self.others)},
        }
