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
states differ: 4 to 13% on Qwen2.5-0.5B, 10% on DeepSeek-V2-Lite; samples of one state by some 1%"""
_STATE_NOISE, _STATE_SHARE = 2, 0.25
"""A state must be apart by so many times what a sample's distance from its case's middle mostly is, and be that of at
most such a share of all samples: one round in three has other tokens, which may be some percent dearer altogether"""
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

    A case that has no others has them as if they had taken as long as in the usual state. Where another state seems to
    be that of over a quarter of the samples all are as they were: which one is usual can't be told then.

    Args:
        cases: samples of replays alone: what the host launches one by one has no two states.
    """
    order = sorted((place, case, i) for case, samples in enumerate(cases) for i, (place, _) in enumerate(samples))
    # A single sample is what its case usually takes, and tells nothing.
    told = [each for each in order if len(cases[each[1]]) > 1]
    times: dict[tuple[int, int], float] = {}
    speeds: list[float] = []
    for _ in range(_PASSES):
        usual = [
            statistics.median([us for i, (_, us) in enumerate(samples) if times.get((case, i), 1.0) == 1]
                              or [us for _, us in samples]) if samples else 0.0
            for case, samples in enumerate(cases)
        ]  # fmt: skip
        speeds = _other_state([cases[case][i][1] / usual[case] if usual[case] else 1.0 for _, case, i in told])
        times = {(case, i): each for (_, case, i), each in zip(told, speeds, strict=True)}
    if sum(each != 1 for each in speeds) > _STATE_SHARE * len(told):
        return [[us for _, us in samples] for samples in cases]
    places = [place for place, _, _ in told]

    def alone(place: int, us: float) -> float:
        at = bisect.bisect_left(places, place)
        beside = speeds[max(0, at - 1) : at + 1]
        return us / statistics.fmean(beside) if beside and 1 not in beside else us

    found = []
    for case, samples in enumerate(cases):
        if len(samples) == 1:
            found.append([alone(*samples[0])])
            continue
        kept = [us for i, (_, us) in enumerate(samples) if times[case, i] == 1]
        found.append(kept or [us / times[case, i] for i, (_, us) in enumerate(samples)])
    return found


def _other_state(ratios: Sequence[float]) -> list[float]:
    """How long replays took in another state, over the usual one, at each of these in their order; 1 in that one.

    Args:
        ratios: what each took over what its case usually takes.
    """
    apart = max(_STATE_APART, _STATE_NOISE * statistics.median([_far(each) for each in ratios] or [0.0]))
    speeds = [each if _far(each) > apart else 1.0 for each in steadied(ratios, _STATE_AROUND)]
    # Of one side: a case of which a sample was quick seems slow in its others, until that sample doesn't count.
    quick = 2 * sum(each < 1 for each in speeds) >= sum(each != 1 for each in speeds)
    speeds = [each if (each < 1) is quick else 1.0 for each in speeds]
    # The middle of a few samples tells a state's ends late: it reaches as far as those beside say the same, and over
    # one between two.
    for way in (1, -1):
        for at in range(len(speeds))[::way]:
            beside, beyond = (speeds[to] if 0 <= to < len(speeds) else 1.0 for to in (at - way, at + way))
            alike = _far(ratios[at]) > apart and (ratios[at] < 1) is quick
            if speeds[at] == 1 != beside and (alike or beyond != 1):
                speeds[at] = beside
    return speeds


def _far(ratio: float) -> float:
    return abs(math.log(ratio)) if ratio > 0 else 0.0


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
