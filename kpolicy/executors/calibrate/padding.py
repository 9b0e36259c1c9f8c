"""What rows of padding take the device, next to as many decode rows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from kpolicy.costs import AttentionCost, Curve
from kpolicy.decision import Launch
from kpolicy.executors.calibrate.bench import Bench, Wave
from kpolicy.keys import GraphKey
from kpolicy.modes import Rows

__all__ = ["PaddedRows"]

_CASES = 3
"""Graphs that are timed with as few rows as come to them"""
_TOLD = 0.02
"""Of the full graphs' time: what padding saves less than that is what repeats differ by"""


class PaddedRows:
    """Graphs timed with the fewest decode rows that come to them: one more than the next smaller one holds.

    In a mixture of experts all rows of padding choose the same few experts, and leave the weights of others unread.

    Args:
        bench: times the steps; nothing is timed where the host itself runs what it launches.
        keys: decode graphs, or those of pieces that decode batches replay.
    """

    def __init__(self, bench: Bench, keys: Sequence[GraphKey]) -> None:
        self._bench = bench
        self._cases: list[tuple[int, int, int]] = []
        if bench.host_runs:
            return
        by_size = {key.num_tokens: key for key in keys}
        fewest = [(size, smaller + 1) for smaller, size in itertools.pairwise(sorted(by_size)) if size > smaller + 2]
        # Where rows choose many experts each, larger graphs read them all anyway.
        for size, rows in fewest[:_CASES]:
            launches = [Launch(Rows.ALL, by_size[size])]
            self._cases.append((bench.add(launches, bench.rows(rows, bench.dense_kv), wave=Wave.LATER), size, rows))

    def share(self, curve: Curve | None, attention: AttentionCost, step_us: float) -> float:
        """Share of what further rows would take that padding takes; 1 where nothing tells that it takes less.

        Args:
            curve: dense work by size, without padding.
            attention: of decode rows.
            step_us: what overlaps nothing, in any mode.
        """
        bench, saved, most, whole = self._bench, 0.0, 0.0, 0.0
        for case, size, rows in self._cases:
            if curve is None or not bench.measured(case):
                continue
            attention_us = attention.base_us + attention.row_us * rows + attention.unit_us * rows * bench.dense_kv
            saved += curve.at(size) - (bench.sides_us(case, step_us)[0] - attention_us)
            most += curve.at(size) - curve.at(rows + 1)
            whole += curve.at(size)
        if most <= 0 or saved <= _TOLD * whole:
            return 1.0
        return max(1 - saved / most, 0.0)
