"""What steps take on what changes its speed: samples brought to one speed, and what is left unsure.

A device replays a graph at one of two speeds, some 0.35 us a kernel apart, until something on the host turns it to the
other (docs/measured_gpu.md, two speeds of a replay): seconds of a calibration may be of the other one. `of_one_state`
leaves them out. The rest is of steps that the host runs itself.

How fast the host was, the samples say themselves, each beside the others of its case and the ones around it together.
On two shared cores a step's slowness and that of the steps around it correlate at 0.75, with the time of the fixed work
(`kpolicy.host_speed`, a loop of the interpreter) at 0.3: another core's work is felt in caches and memory, which a loop
doesn't use.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Sequence

from kpolicy.host_speed import steadied

__all__ = ["Sample", "at_one_speed", "chance", "error_of_one", "of_one_state", "typical"]

Sample = tuple[int, float]
"""(its place among all samples in the order in which they were taken, microseconds)"""
_AROUND = 2
"""Samples on either side of one that tell with it how fast the host was: of 2 to 9, what repeats best"""
_PASSES = 3
"""Speeds come from what cases usually take, and that from speeds"""
_STATE_AROUND, _STATE_APART = 3, 0.025
"""Samples on either side of a replay that tell with it which state the device was in, and by which share of their time
states differ: 7 to 12% on Qwen2.5-0.5B, 10% on DeepSeek-V2-Lite; samples of one state by some 1%"""
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


def of_one_state(cases: Sequence[Sequence[Sample]]) -> list[list[float]]:
    """Microseconds of every case's samples but for those taken while all around took another time than usual.

    A case that has no others has them as if they had taken as long as in the state that most samples are of. A state is
    told where it is that of up to a tenth of the samples; where more than half seem to be of another, all stay.

    Args:
        cases: samples of replays alone: what the host launches one by one has no two states.
    """
    order = sorted((place, case, i) for case, samples in enumerate(cases) for i, (place, _) in enumerate(samples))
    # A single sample is what its case usually takes, and tells nothing.
    told = [each for each in order if len(cases[each[1]]) > 1]
    places = [place for place, _, _ in told]
    away: set[tuple[int, int]] = set()
    speeds: list[float] = []
    for _ in range(_PASSES):
        usual = [
            statistics.median([us for i, us in enumerate(each) if (case, i) not in away] or each) if each else 0.0
            for case, each in enumerate([[us for _, us in samples] for samples in cases])
        ]
        ratios = [cases[case][i][1] / usual[case] if usual[case] else 1.0 for _, case, i in told]
        speeds = _grown(ratios, _of_one_side(steadied(ratios, _STATE_AROUND)))
        away = {(case, i) for (_, case, i), times in zip(told, speeds, strict=True) if _apart(times)}
    if 2 * len(away) > len(told):
        return [[us for _, us in samples] for samples in cases]

    def brought(place: int, us: float) -> float:
        at = bisect.bisect_left(places, place)
        near = speeds[max(0, at - 1) : at + 1]
        times = statistics.fmean(near) if near and all(map(_apart, near)) else 1.0
        return us / times

    found = [[us for i, (_, us) in enumerate(samples) if (case, i) not in away] for case, samples in enumerate(cases)]
    return [
        kept if kept and len(samples) > 1 else [brought(place, us) for place, us in samples]
        for kept, samples in zip(found, cases, strict=True)
    ]


def _apart(times: float) -> bool:
    """Whether a speed is another state's."""
    return times > 0 and abs(math.log(times)) > _STATE_APART


def _of_one_side(speeds: Sequence[float]) -> list[float]:
    """The speeds, but for those of the rarer side of usual.

    A case of which a sample was quick seems slow in its others, until that sample doesn't count.
    """
    quick, slow = (sum(_apart(each) and (each < 1) is side for each in speeds) for side in (True, False))
    return [1.0 if _apart(each) and (each < 1) is not (quick >= slow) else each for each in speeds]


def _grown(ratios: Sequence[float], speeds: Sequence[float]) -> list[float]:
    """The speeds, of which another state's reach as far as samples beside them say the same, and over one between two.

    The middle of a few samples tells a state's ends late.
    """
    grown = list(speeds)
    for way in (1, -1):
        for at in range(len(grown))[::way]:
            beside = at - way
            if 0 <= beside < len(grown) and _apart(grown[beside]) and not _apart(grown[at]):
                between = 0 <= at + way < len(grown) and _apart(grown[at + way])
                alike = _apart(ratios[at]) and (ratios[at] < 1) is (grown[beside] < 1)
                grown[at] = grown[beside] if between or alike else grown[at]
    return grown


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
