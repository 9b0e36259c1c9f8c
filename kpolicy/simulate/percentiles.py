"""Percentiles of millions of weighted values: exact up to a size, beyond it from a sketch with a stated error."""

from __future__ import annotations

import math
from array import array
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    import numpy as np

__all__ = ["CURVE_PERCENTS", "EXACT_REQUESTS", "EXACT_VALUES", "RELATIVE_ERROR", "Percentiles", "Spread"]

EXACT_VALUES = 1 << 20
"""Entries up to which percentiles are exact; an entry is a value with its weight, 16 bytes."""
EXACT_REQUESTS = 1 << 17
"""Requests up to which percentiles over requests are exact."""
RELATIVE_ERROR = 0.002
"""Beyond that a percentile is off by at most this share of itself."""
CURVE_PERCENTS: tuple[float, ...] = (*range(100), *(round(99 + tenth / 10, 1) for tenth in range(1, 10)), 100)
"""The percentiles that `Spread.curve` has."""
_AT_ONCE = 1 << 16
_BUCKET = math.log((1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR))


@attrs.frozen(kw_only=True)
class Spread:
    """How values are spread, in microseconds.

    Args:
        count: how many.
        mean: their mean; 0 without values, as all of them.
        p50, p90, p99: the smallest value that so many percent don't exceed.
        max: the largest.
        relative_error: how far a percentile may be off, as a share of itself; 0 where it is exact.
        curve: the values at `CURVE_PERCENTS`, for plots; empty without values.
    """

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    max: float = 0.0
    relative_error: float = 0.0
    curve: tuple[float, ...] = attrs.field(default=(), repr=False)


class Percentiles:
    """Takes values with weights.

    Args:
        exact: entries that are kept as they are.
    """

    __slots__ = ("_most", "_sketch", "_sum", "_weight", "largest", "values", "weights")

    def __init__(self, exact: int = EXACT_VALUES) -> None:
        self._most = exact
        """Entries that are kept until they go to the sketch"""
        self.values = array("d")
        """Entries not yet in the sketch; who appends here calls `settle` now and then."""
        self.weights = array("q")
        self._sketch: Any = None
        self._sum = 0.0
        self._weight = 0
        self.largest = 0.0

    def add(self, value: float, weight: int = 1) -> None:
        """Take a value, `weight` times."""
        self.values.append(value)
        self.weights.append(weight)
        if len(self.values) > self._most:
            self._flush()

    def settle(self) -> None:
        """Move the entries to the sketch where there are too many to keep."""
        if len(self.values) > self._most:
            self._flush()

    def _flush(self) -> None:
        import numpy as np
        from ddsketch import DDSketch

        if self._sketch is None:
            self._sketch, self._most = DDSketch(RELATIVE_ERROR), _AT_ONCE
        # A slice at a time, so that the arrays of the way there stay small.
        for start in range(0, len(self.values), _AT_ONCE):
            values = np.array(self.values[start : start + _AT_ONCE], np.float64)
            weights = np.array(self.weights[start : start + _AT_ONCE], np.int64)
            self._sum += float((values * weights).sum())
            self._weight += int(weights.sum())
            self.largest = max(self.largest, float(values.max()))
            # Values of one bucket are the same to the sketch, so each bucket is told once, by the first of its values:
            # of those that are put in one place the last stays. Buckets are few, so this needs no sorting.
            buckets = np.ceil(np.log(np.maximum(values, 1e-9)) / _BUCKET).astype(np.int64)
            buckets -= buckets.min()
            summed = np.bincount(buckets, weights=weights)
            by_bucket = np.zeros(len(summed))
            by_bucket[buckets[::-1]] = values[::-1]
            there = np.bincount(buckets) > 0
            for value, weight in zip(by_bucket[there].tolist(), summed[there].tolist(), strict=True):
                self._sketch.add(value, weight)
        # Emptied in place: the loop appends to these very arrays.
        del self.values[:], self.weights[:]

    def _arrays(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        import numpy as np

        return np.array(self.values, np.float64), np.array(self.weights, np.int64)

    def spread(self) -> Spread:
        """What the values so far look like."""
        if self._sketch is not None:
            if self.values:
                self._flush()
            at = self._sketch.get_quantile_value
            curve = tuple(float(at(percent / 100)) for percent in CURVE_PERCENTS[:-1])
            return Spread(
                count=self._weight, mean=self._sum / self._weight, p50=at(0.5), p90=at(0.9), p99=at(0.99),
                max=self.largest, relative_error=RELATIVE_ERROR, curve=(*curve, self.largest),
            )  # fmt: skip
        if not self.values:
            return Spread()
        import numpy as np

        values, weights = self._arrays()
        order = np.argsort(values, kind="stable")
        values, weights = values[order], weights[order]
        seen = np.cumsum(weights)
        total = int(seen[-1])
        at_percent = np.searchsorted(seen, [total * percent / 100 for percent in CURVE_PERCENTS])
        curve = tuple(values[np.minimum(at_percent, len(values) - 1)].tolist())
        p50, p90, p99 = (curve[CURVE_PERCENTS.index(percent)] for percent in (50, 90, 99))
        mean = math.fsum((values * weights).tolist()) / total
        return Spread(count=total, mean=mean, p50=p50, p90=p90, p99=p99, max=float(values[-1]), curve=curve)
