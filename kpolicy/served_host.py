"""`ServedHost`: what the host of a server took besides launching, noted while a short load was served.

A calibration launches step after step and brings the host's times to one speed, its usual one. A server's host
schedules between two steps, and shares its core with others, who slow it down for a part of the time. Both are noted
where a calibration serves for some seconds, and simulations by its profile go by them (`kpolicy.simulate`).
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable, Sequence

import attrs

from kpolicy.errors import ProfileError

__all__ = ["ServedHost", "noted_work"]

EVERY_US = 50_000.0
"""Of serving that a note of the host's speed is of"""


def _listed(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(values)


@attrs.frozen(kw_only=True)
class ServedHost:
    """What a server's host took besides launching.

    Args:
        scheduler_us: microseconds of a step that neither the device nor launching took: scheduling, deciding, handing
            tokens over. The mean of steps without prompts, at the speeds that the host had meanwhile.
        scheduler_prompt_us: more for a step with prompts, whose tokens are laid out and first tokens taken in.
        every_us: microseconds of serving that each of `host_work_us` is of.
        host_work_us: microseconds that the fixed work (`kpolicy.host_speed`) took in the course of serving, one time
            after the other, without those in which nothing ran. Empty where it isn't noted, as where the host itself
            runs what it launches.

    Raises:
        ProfileError: a time is below 0, or none at all, or not finite.
    """

    scheduler_us: float
    scheduler_prompt_us: float = 0.0
    every_us: float = EVERY_US
    host_work_us: tuple[float, ...] = attrs.field(default=(), converter=_listed)

    def __attrs_post_init__(self) -> None:
        for name in ("scheduler_us", "scheduler_prompt_us"):
            if not 0 <= getattr(self, name) < 1e9:
                raise ProfileError(f"{name} is {getattr(self, name)}; it is microseconds from 0 up.")
        if not 0 < self.every_us < 1e12:
            raise ProfileError(f"every_us is {self.every_us}; it is microseconds above 0, such as {EVERY_US:g}.")
        for i, us in enumerate(self.host_work_us):
            if not 0 < us < 1e9:
                raise ProfileError(f"host_work_us[{i}] is {us}; it is microseconds above 0. Calibrate again.")

    def at(self, us: float) -> float:
        """Microseconds that the fixed work takes so long after the first arrival; behind the last note all come again.

        Only where it was noted.
        """
        return self.host_work_us[int(us // self.every_us) % len(self.host_work_us)]

    def begun_at(self, seed: int) -> ServedHost:
        """With the notes in the same turn from another one on, which the seed picks; 0 is the first."""
        noted = self.host_work_us
        if not seed or not noted:
            return self
        first = random.Random(seed).randrange(len(noted))  # noqa: S311 - a moment, not a secret
        return attrs.evolve(self, host_work_us=noted[first:] + noted[:first])

    @property
    def mean_work_us(self) -> float:
        """Mean of `host_work_us`; 0 without any."""
        return statistics.fmean(self.host_work_us) if self.host_work_us else 0.0

    def slower(self, usual_us: float) -> dict[str, float]:
        """How many times as long as usual the fixed work took: least, mean and most. Empty where it wasn't noted."""
        noted = self.host_work_us
        if not noted:
            return {}
        us = {"least": min(noted), "mean": self.mean_work_us, "most": max(noted)}
        return {name: value / usual_us for name, value in us.items()}

    @classmethod
    def middle(cls, found: Sequence[ServedHost]) -> ServedHost:
        """Of several servings: the medians of the scheduler's times, and all notes of the host's speed in turn.

        The middle of speeds would be of no moment that any had.

        Raises:
            ProfileError: their notes are of unlike times.
        """
        every = {each.every_us for each in found if each.host_work_us}
        if len(every) > 1:
            raise ProfileError(f"every_us is {', '.join(map(str, sorted(every)))}; give profiles that noted it alike.")
        return cls(
            scheduler_us=statistics.median(each.scheduler_us for each in found),
            scheduler_prompt_us=statistics.median(each.scheduler_prompt_us for each in found),
            every_us=every.pop() if every else found[0].every_us,
            host_work_us=tuple(us for each in found for us in each.host_work_us),
        )


def noted_work(steps: Iterable[tuple[float, float, float]], every_us: float = EVERY_US) -> tuple[float, ...]:
    """The fixed work's mean time in each stretch of `every_us` in which steps ran.

    Args:
        steps: (begin, end, microseconds that the work took) of each step; times in microseconds from the first's begin.
        every_us: of a stretch.
    """
    spent: dict[int, float] = {}
    total: dict[int, float] = {}
    for begin, end, work_us in steps:
        for i in range(int(begin // every_us), int(end // every_us) + 1):
            share = min(end, (i + 1) * every_us) - max(begin, i * every_us)
            if share > 0:
                spent[i] = spent.get(i, 0.0) + share
                total[i] = total.get(i, 0.0) + share * work_us
    return tuple(total[i] / spent[i] for i in sorted(spent))
