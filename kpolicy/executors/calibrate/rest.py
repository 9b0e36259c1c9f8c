"""What a step of a decode graph takes beside its device's time and its launching, by its size."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping

__all__ = ["by_size"]


def by_size(rest_us: Mapping[int, float]) -> Callable[[int], float]:
    """A line through what was measured of all sizes: staging and handing over are the host's, and rise with the rows.

    Of one size two or three samples tell it to 20 to 40 us (two models on an H200), 1% of the step, and sizes are
    chosen by less. Medians, of slopes and of what is left, as a host is interrupted now and then.
    """
    slopes = [(rest_us[b] - rest_us[a]) / (b - a) for a, b in itertools.combinations(sorted(rest_us), 2)]
    slope = max(statistics.median(slopes), 0.0) if slopes else 0.0
    base = statistics.median([us - slope * size for size, us in rest_us.items()] or [0.0])
    return lambda size: base + slope * size
