"""What steps take that a host of changing speed runs itself: samples brought to one speed, and what is left unsure.

How fast the host was, the samples say themselves, each beside the others of its case and the ones around it together.
On two shared cores a step's slowness and that of the steps around it correlate at 0.75, with the time of the fixed work
(`kpolicy.host_speed`, a loop of the interpreter) at 0.3: another core's work is felt in caches and memory, which a loop
doesn't use.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from kpolicy.host_speed import steadied

__all__ = ["Sample", "at_one_speed", "chance", "error_of_one", "typical"]

Sample = tuple[int, float]
"""(its place among all samples in the order in which they were taken, microseconds)"""
_AROUND = 2
"""Samples on either side of one that tell with it how fast the host was: of 2 to 9, what repeats best"""
_PASSES = 3
"""Speeds come from what cases usually take, and that from speeds"""
_UNKNOWN, _LEAST = 0.1, 0.04
"""Standard error of a single sample where none were repeated, and however well they agree: of two shared cores"""
_NORMAL = 1.4826
"""Standard deviations in the median distance from the middle"""
_SIGMAS = 3
"""Standard errors within which a difference may be chance: calibrations differ by half as much again as their halves"""
_MOST_CHANCE = 0.25
"""The largest difference ever put down to chance: one sample a case would hide 0.42, as much as modes differ by"""


def at_one_speed(cases: Sequence[Sequence[Sample]]) -> list[list[float]]:
    """Microseconds of every case's samples, as if the host had always been as fast as it mostly was.

    A speed lasts; what one sample takes beyond its neighbours is its own, and stays.
    """
    order = sorted((place, case, i) for case, samples in enumerate(cases) for i, (place, _) in enumerate(samples))
    brought = [[us for _, us in samples] for samples in cases]
    for _ in range(_PASSES):
        usual = [statistics.median(each) if each else 0.0 for each in brought]
        slower = steadied([cases[case][i][1] / usual[case] if usual[case] else 1.0 for _, case, i in order], _AROUND)
        for (_, case, i), times in zip(order, slower, strict=True):
            brought[case][i] = cases[case][i][1] / times
    return brought


def typical(brought: Sequence[float]) -> float:
    """What a case takes: the sample that a quarter of them aren't above. What interrupts a step only lengthens it."""
    return sorted(brought)[(len(brought) - 1) // 4]


def error_of_one(brought: Sequence[Sequence[float]]) -> float:
    """Standard error of what one sample says, as a share: of n samples it is that over the root of n.

    By what the earlier and the later half of each case's samples differ by, of all cases together: of one case alone a
    few samples tell little, and how far they lie from their median tells too little, as neighbours were slow together.
    Bringing them to one speed lets them agree by chance too, the more the fewer they are.

    Args:
        brought: each case's samples in the order in which they were taken.
    """
    off = [
        abs(math.log(typical(earlier) / typical(later))) / 2 * len(samples) / math.sqrt(len(samples) - 1)
        for samples in brought
        for earlier, later in [(samples[: len(samples) // 2], samples[len(samples) // 2 :])]
        if earlier and min(samples) > 0
    ]
    return max(_NORMAL * statistics.median(off), _LEAST) if off else _UNKNOWN


def chance(error: float, other: float) -> float:
    """By which share one of two times may be above the other though they are alike: a quarter at most.

    Args:
        error: standard error of the one, as a share of it.
        other: of the other.
    """
    return min(_SIGMAS * math.hypot(error, other), _MOST_CHANCE)
