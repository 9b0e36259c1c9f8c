"""What rows of padding take the device, next to as many decode rows."""

from __future__ import annotations

from collections.abc import Sequence

from kpolicy.costs import AttentionCost, Curve
from kpolicy.decision import Launch
from kpolicy.executors.calibrate.bench import Bench, Wave
from kpolicy.keys import GraphKey
from kpolicy.modes import Rows

__all__ = ["PaddedRows"]

_LEAST = (8, 16, 32)
"""Of each, the smallest graph of so many tokens and more is timed, half empty"""
_TOLD = 0.02
"""Of the full graphs' time: what padding saves less than that is what repeats differ by"""


class PaddedRows:
    """Graphs timed with one decode row more than half of what they hold.

    In a mixture of experts all rows of padding choose the same few experts, and leave the weights of others unread.
    Where rows choose many experts each, larger graphs read them all anyway, so the smaller ones tell. One ladder has
    graphs of every few rows there, another of 8, 16 and 24 alone, which five, nine and 17 rows come to: half of a graph
    is what either may leave empty.

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
        chosen = (min((size for size in by_size if size >= least), default=None) for least in _LEAST)
        for size in sorted({size for size in chosen if size is not None}):
            launches, rows = [Launch(Rows.ALL, by_size[size])], size // 2 + 1
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
