"""Sizes of graphs that calibration times on the device alone, as there are too many to time each as a whole step.

Times needn't rise with sizes: of a Llama of 8B pieces of 448 tokens took an H200 14.4 ms, where those of 432 took 10.3
and of 464 11.3 (kpolicy's docs/measured_vllm.md). What lies between two sizes that were timed isn't told by them.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Collection, Iterable, Sequence
from math import log
from statistics import median

from kpolicy.costs import Curve
from kpolicy_vllm.timing import NOISE, Case

__all__ = ["FurtherSizes", "farthest_first"]

NEAR = 1.2
"""Times a size: a larger one so near may be cheaper, one that is farther hardly is"""


class FurtherSizes:
    """The sizes of one kind of graph that aren't timed as whole steps.

    Args:
        timed: the steps of that kind that are, as far as time is there.
        every: a step of each size of that kind, `timed` among them. An attribute.
    """

    def __init__(self, timed: Sequence[Case], every: Sequence[Case]) -> None:
        self._timed = list(timed)
        self.every = list(every)

    @property
    def further(self) -> int:
        """How many aren't timed whole, whatever the time."""
        return len(self.every) - len(self._timed)

    @property
    def lacking(self) -> bool:
        """Whether one wasn't timed, and one was, whole: the same on every rank."""
        return any(case.whole for case in self._timed) and not all(case.times for case in self.every)

    def cases(self, places: Sequence[int]) -> list[Case]:
        """The steps at these places, which other ranks have the same ones at."""
        return [self.every[place] for place in places]

    def untimed(self, first: Collection[int] = ()) -> list[int]:
        """Places of those that weren't timed, in an order that soonest tells which to pass over for a larger one.

        Those with a larger one near come first, the farthest from any that was timed before others, and those that the
        host bounds after them, as there the device's time doesn't show.

        Args:
            first: sizes at which another kind was steep: the same kernels run there.
        """
        left = {case.tokens: place for place, case in enumerate(self.every) if not case.times}
        sizes = sorted(case.tokens for case in self.every)
        next_one = dict(itertools.pairwise(sizes))
        host_us = self.host_us()

        def rank(tokens: int) -> tuple[bool, bool, bool]:
            far = next_one.get(tokens, sys.maxsize) > tokens * NEAR
            return tokens not in first, far, self.expected_us(self.every[left[tokens]]) < host_us

        order = farthest_first(left, [case.tokens for case in self._ran])
        return [left[tokens] for tokens in sorted(order, key=rank)]

    def smallest(self) -> list[int]:
        """Places of those that weren't timed, the smallest first."""
        left = [place for place, case in enumerate(self.every) if not case.times]
        return sorted(left, key=lambda place: self.every[place].tokens)

    def steep(self) -> list[int]:
        """Places of those timed on the device alone that took longer than a larger size by more than noise."""
        found, least_us = [], float("inf")
        for place in sorted(range(len(self.every)), key=lambda place: -self.every[place].tokens):
            case = self.every[place]
            if case.times:
                us = case.best().device
                if us > least_us * (1 + NOISE) and not case.whole:
                    found.append(place)
                least_us = min(least_us, us)
        return found

    @property
    def _ran(self) -> list[Case]:
        return [case for case in self._timed if case.times]

    def with_times(self) -> list[Case]:
        """All that were timed by now, in whichever way, smallest first."""
        return sorted((case for case in self.every if case.times), key=lambda case: case.tokens)

    def expected_us(self, case: Case) -> float:
        """About how long the device takes for a step, by those that were timed whole."""
        us = {each.tokens: each.best().device for each in self._ran}
        return Curve(tuple(sorted(us)), tuple(us[tokens] for tokens in sorted(us))).at(case.tokens)

    def host_us(self) -> float:
        """Microseconds until the host has launched one, the median of those that were timed whole."""
        return median(case.host_us() for case in self._ran if case.whole)


def farthest_first(sizes: Iterable[int], known: Sequence[int]) -> list[int]:
    """The sizes in an order that leaves the least far from a known one at any time; far is by how many times as large.

    Args:
        sizes: those to order.
        known: at least one that is known.
    """
    apart = {size: min(abs(log(size / each)) for each in known) for size in sizes}
    order: list[int] = []
    while apart:
        size = max(apart, key=lambda each: (apart[each], -each))
        del apart[size]
        order.append(size)
        for each in apart:
            apart[each] = min(apart[each], abs(log(size / each)))
    return order
