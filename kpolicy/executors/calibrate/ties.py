"""Times that samples can't tell apart: there the way that asks less of the host has the preference."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from kpolicy.costs import Curve
from kpolicy.executors.calibrate.one_speed import chance

__all__ = ["Point", "between", "settled"]


class Point(NamedTuple):
    """What was measured of one size."""

    us: float
    error: float
    """Standard error, as a share of it"""


def settled(points: Mapping[int, Point], others: Sequence[Mapping[int, Point]] = ()) -> Curve:
    """A curve to decide by: as measured, but for sizes beside which a larger one or another mode is cheaper by chance.

    They get that one's time, and with it the preference: a smaller size shares out less padding, and a mode that comes
    before others launches less. What is cheaper beyond chance stays so.

    Args:
        points: by size.
        others: of modes that come after it in preference, by size; one as large or larger can run instead.
    """
    us: dict[int, float] = {}
    for size, mine in points.items():
        rivals = [each for larger, each in points.items() if larger > size]
        rivals += [each for other in others for larger, each in other.items() if larger >= size]
        by_chance = [each.us for each in rivals if each.us < mine.us <= each.us * (1 + chance(mine.error, each.error))]
        us[size] = min(by_chance, default=mine.us)
    sizes = sorted(us)
    return Curve(sizes, [us[size] for size in sizes])


def between(points: Mapping[int, Point], sizes: Iterable[int]) -> dict[int, Point]:
    """The same at other sizes too: of EAGER few are timed, and it runs every one."""
    known = sorted(points)
    curve = Curve(known, [points[size].us for size in known])
    found = dict(points)
    for size in sizes:
        nearest = known[min(bisect_left(known, size), len(known) - 1)]
        found.setdefault(size, Point(curve.at(size), points[nearest].error))
    return found
