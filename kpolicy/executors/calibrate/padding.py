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
"""Of each, the smallest graph of so many tokens and more is timed first"""
_CASES = 3
"""Graphs that are timed"""
_TOLD = 0.02
"""Of the full graphs' time: what padding saves less than that is what repeats differ by"""


class PaddedRows:
    """Small graphs timed with half as many decode rows and one more, or with the fewest that come to them.

    In a mixture of experts all rows of padding choose the same few experts, and leave the weights of others unread.
    The fewer rows there are, the more experts they leave, so small graphs tell. One ladder has a graph for every few
    rows there, and a serving engine's list 8, 16, 24 and 32, whose first two five and nine rows come to: so many are
    timed in either. Where the next smaller graph is below half, its rows and one more are.
    No run has been held to it; on an H200 calibration ran so at 7c76117, and before with the fewest rows of any graph.

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
        sizes = sorted(by_size)
        # The smallest graph has any number of rows.
        fewest = {size: min(size // 2, smaller) + 1 for smaller, size in zip([*sizes[:1], *sizes], sizes, strict=False)}
        # One row of padding is what padding counts as anyway.
        padded = [size for size, rows in fewest.items() if size > rows + 1]
        first = [next((size for size in padded if size >= least), 0) for least in _LEAST]
        few = [size for size in padded if fewest[size] <= _LEAST[-1]]
        chosen = dict.fromkeys(size for size in (*first, *few) if size)
        for size in sorted(list(chosen)[:_CASES]):
            launches, rows = [Launch(Rows.ALL, by_size[size])], fewest[size]
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
