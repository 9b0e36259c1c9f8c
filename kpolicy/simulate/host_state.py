"""What a step costs the host besides its own launches.

`HostState`: which mode ran before it, with prompts or without, and which eager sizes did. `HostSpeeds`: how fast the
host was at its time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import lru_cache

from kpolicy.costs import CostTable
from kpolicy.decision import Launch
from kpolicy.errors import ConfigError
from kpolicy.shapes import BatchNumbers
from kpolicy.simulate.step_costs import Sides, StepCosts

__all__ = ["HostSpeeds", "HostState"]

_MOST_SIDES = 4096
"""Launches of decode rows, by their number, whose times are kept: they come again and again"""


class HostSpeeds:
    """The time of the host's fixed work (`kpolicy.host_speed`) in the course of a run.

    A core that is slow for seconds at a time fills a queue that its mean speed wouldn't.

    Args:
        noted: (microseconds from the first arrival, microseconds that the fixed work took then), in the order of time.

    Raises:
        ConfigError: there is none, times go back, or the work took no time.
    """

    def __init__(self, noted: Iterable[tuple[float, float]]) -> None:
        pairs = list(noted)
        self._at_us = [at_us for at_us, _ in pairs]
        self._work_us = [work_us for _, work_us in pairs]
        if not pairs or self._at_us != sorted(self._at_us) or not all(0 < work_us < 1e9 for work_us in self._work_us):
            raise ConfigError(
                f"{len(pairs)} host speeds were given; at least one is needed, in the order of time, each with a time "
                "of the fixed work above 0 microseconds. Leave them out where the host's speed wasn't noted."
            )

    def at(self, us: float) -> float:
        """The time of the fixed work so many microseconds after the first arrival, between those noted around it."""
        at_us, work_us = self._at_us, self._work_us
        after = bisect_right(at_us, us)
        if after == 0:
            return work_us[0]
        if after == len(at_us):
            return work_us[-1]
        share = (us - at_us[after - 1]) / (at_us[after] - at_us[after - 1])
        return work_us[after - 1] + share * (work_us[after] - work_us[after - 1])


class HostState:
    """The costs of one host's steps, in their order.

    Args:
        costs: a table. Where its effects tell nothing of what ran before, every step has the same.
        eager_sizes: tokens of eager launches that ran before the first of them.
    """

    def __init__(self, costs: CostTable, eager_sizes: Iterable[int] = ()) -> None:
        first, again = StepCosts.after_another(costs), StepCosts.in_a_row(costs)
        if again == first:
            again = first
        self._costs = (first, first.new_sizes()), (again, again.new_sizes())
        self._plain = first if again is first and not costs.effects.eager_new_us else None
        self._plain_decodes = lru_cache(maxsize=_MOST_SIDES)(first.decodes)
        self._ran: Hashable = None
        self._sizes = set(eager_sizes)

    def costs(self, mode: Hashable, launches: Sequence[Launch], numbers: BatchNumbers) -> StepCosts:
        """The costs of the next step, which then has run.

        Args:
            mode: what `StepEffects.warm_host_share` counts as one mode; a split is one in whatever form. Steps with
                prompts and steps without aren't alike.
            launches: the step's.
            numbers: its rows.
        """
        if self._plain is not None:
            return self._plain
        ran = mode, numbers.num_prefills > 0
        again, self._ran = ran == self._ran, ran
        new = False
        for launch in launches:
            if launch.key is None:
                size = launch.size(numbers)
                new = new or size not in self._sizes
                self._sizes.add(size)
        return self._costs[again][new]

    def decodes(
        self, mode: Hashable, launch: Launch, num_rows: int, at: Callable[[StepCosts], StepCosts] | None = None
    ) -> tuple[Sides, Sides]:
        """What a launch of so many decode rows takes, and what the next one like it does; then it has run.

        Args:
            mode: as for `costs`.
            launch: the step's only one.
            num_rows: its decode rows.
            at: costs at another speed of the host; by default they are as they are.
        """
        if self._plain is not None:
            decodes = self._plain_decodes if at is None else at(self._plain).decodes
            sides = decodes(launch, num_rows)
            return sides, sides
        size = launch.padded_tokens or num_rows
        new = launch.key is None and size not in self._sizes
        ran = mode, False
        costs = self._costs[ran == self._ran][new]
        self._ran = ran
        if launch.key is None:
            self._sizes.add(size)
        again = self._costs[True][False]
        if at is not None:
            costs, again = at(costs), at(again)
        return costs.decodes(launch, num_rows), again.decodes(launch, num_rows)
