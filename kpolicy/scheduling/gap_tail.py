"""What one gap in a hundred exceeds: how long rows wait for a token while others' prompts run.

`auto` may run several decode steps beside a prompt: two gaps of 5.8 ms in place of one of 9.5 and one of 2.8, say.
Their mean and the longest are shorter, and yet a percentile may be longer: where it lies below 5.8 ms there are two
gaps above it then, and not one. No step tells by itself where it lies, so the scheduler keeps it and says it as a fact
of the batch (`kpolicy.shapes.GAP_TAIL_US`). Gaps come in by when each token was there
(`kpolicy.scheduling.token_gaps`); `auto` holds the mean of a step's gaps to it, and lets its decode steps lie evenly.

The steps that this changes have one gap in a hundred, and more of the time than that, as they are the longest: what it
costs in throughput is measured (docs/measured_sglang.md), not bounded.
"""

from __future__ import annotations

from math import ceil, log2

__all__ = ["GapTail"]

_SHARE = 100
_FEWEST, _MOST = 1_000, 1 << 17
"""Gaps before anything is said, and those after which all counts are halved, so that what was long ago is forgotten"""
_FINENESS = 32
"""Counts a doubling: each holds gaps of 2% around"""
_COUNTS = 40 * _FINENESS


class GapTail:
    """The 99th percentile of gaps between the tokens of a row, as they come.

    Steps of decode rows alone count as shorter than all others, whatever they take.
    """

    __slots__ = ("_above", "_at", "_counts", "_gaps", "_prompts")

    def __init__(self) -> None:
        self._counts = [0] * _COUNTS
        """Gaps in steps with prompts, by their length"""
        self._gaps = self._prompts = 0
        """All gaps, and those in steps with prompts"""
        self._at = _COUNTS - 1
        self._above = 0
        """Gaps in counts above `_at`: at most one in a hundred, and with that count more"""

    def without_prompts(self, gaps: int) -> None:
        """Take so many gaps of steps that had decode rows alone."""
        self._gaps += gaps

    def beside_prompts(self, us: float, gaps: int) -> None:
        """Take so many gaps of a step with prompts, each that long."""
        count = min(int(log2(us) * _FINENESS), _COUNTS - 1) if us > 1 else 0
        self._counts[count] += gaps
        self._gaps += gaps
        self._prompts += gaps
        if count > self._at:
            self._above += gaps

    def told(self) -> int | None:
        """Microseconds that one gap in a hundred exceeds; 0 where fewer are in steps with prompts.

        None where too few gaps were seen. Where many were, what is asked halves the counts.
        """
        if self._gaps < _FEWEST:
            return None
        if self._gaps > _MOST:
            self._forget()
        if self._prompts * _SHARE <= self._gaps:
            return 0
        counts, gaps, at, above = self._counts, self._gaps, self._at, self._above
        while above * _SHARE > gaps:
            at += 1
            above -= counts[at]
        while (above + counts[at]) * _SHARE <= gaps:
            above += counts[at]
            at -= 1
        self._at, self._above = at, above
        return ceil(2 ** ((at + 1) / _FINENESS))

    def _forget(self) -> None:
        counts = self._counts = [each // 2 for each in self._counts]
        self._prompts, self._gaps, self._above = sum(counts), self._gaps // 2, sum(counts[self._at + 1 :])
