"""`Overlap`: what two halves of a step take that run beside each other on the device."""

from __future__ import annotations

import math
from typing import NamedTuple

from kpolicy.errors import ProfileError

__all__ = ["MOST_SLOWDOWN", "Overlap", "between", "check_slowdown"]

MOST_SLOWDOWN = 8.0
"""Times as long as alone that a decode step may take beside a prompt, to be believed: 2.9 is the most that was seen"""


class Overlap(NamedTuple):
    """How much a half with decode rows and one with prompts slow each other down.

    While both run, each goes on at a constant share of its own speed, the two seldom at the same one: beside long
    prompts on an H200 decode steps had 0.4 to 0.6 of theirs and the prompt 0.6 to 0.8 (docs/measured_gpu.md). Where one
    is over the other goes on alone.

    Args:
        cost: what decode steps that are over first add to the prompt's time, as a share of theirs.
        outlasted: what a prompt that is over first adds to the decode steps' time, as a share of its.
        slowdown: how many times as long as alone a decode step takes beside a prompt.
        share: what is left, in `outlasted`, of what the two speeds say: less than 1 where the prompt is short.
    """

    cost: float
    outlasted: float
    slowdown: float
    share: float = 1.0

    @classmethod
    def of(cls, cost: float, slowdown: float | None = None) -> Overlap:
        """From what a table has; without a slowdown both halves slow down alike.

        The prompt's speed is ``1 - cost / slowdown``. While it runs, the decode steps get ``1 / slowdown`` of its time
        done, so that they lack ``(1 - 1 / slowdown) / (1 - cost / slowdown)`` times what it takes alone.
        """
        if slowdown is None:
            return cls(cost, cost, 1.0 + cost)
        if cost >= 1.0:
            # Together they take longer than in turn, which two speeds don't tell.
            return cls(cost, cost, slowdown)
        return cls(cost, (slowdown - 1.0) / (slowdown - cost), slowdown)

    def outlasting(self, share: float) -> Overlap:
        """Beside a prompt that adds only so much of that to decode steps which outlast it (`StepEffects`)."""
        return self if share == 1.0 or self.cost > 1.0 else self._replace(outlasted=share * self.outlasted, share=share)

    @property
    def gains(self) -> bool:
        """Whether beside each other they take no longer than in turn."""
        return self.cost <= 1.0

    @property
    def alike(self) -> bool:
        """Whether both halves slow down alike, as they are taken to where no slowdown was timed."""
        return self.slowdown == 1.0 + self.cost

    def device_us(self, decodes_us: float, prompt_us: float, lead_us: float = 0.0) -> float:
        """Both halves beside each other, from the start of the decode steps.

        Args:
            decodes_us: device time of all decode steps alone.
            prompt_us: of the prompt alone.
            lead_us: by how much the prompt begins later; so long the decode steps have the device to themselves.
        """
        if lead_us:
            return lead_us + self.device_us(max(decodes_us - lead_us, 0.0), prompt_us)
        prompt_last, decodes_last = prompt_us + self.cost * decodes_us, decodes_us + self.outlasted * prompt_us
        return max(prompt_last, decodes_last) if self.cost <= 1.0 else min(prompt_last, decodes_last)

    def rise_us(self, decodes_us: float, prompt_us: float) -> float:
        """By how much `device_us` rises with the cost and the slowdown, where both rise by as much.

        Where the prompt is over last it is the decode steps' time, else ``share / (slowdown - cost)`` of the prompt's.

        Args:
            decodes_us: device time of all decode steps alone.
            prompt_us: of the prompt alone.
        """
        us = self.device_us(decodes_us, prompt_us)
        if us == prompt_us + self.cost * decodes_us:
            return decodes_us
        return self.share * prompt_us / (self.slowdown - self.cost) if self.cost < 1.0 else prompt_us


def between(fewer: Overlap, more: Overlap, num_decodes: int, rows: tuple[int, int]) -> Overlap:
    """What changes evenly as decode rows double, between two numbers of them that were timed.

    Args:
        fewer: with the smaller number.
        more: with the larger one.
        num_decodes: decode rows; below the smaller number as there.
        rows: the two numbers.
    """
    first, last = rows
    share = math.log2(max(num_decodes, first) / first) / math.log2(last / first)
    if share <= 0.0 or share >= 1.0 or fewer == more:
        return more if share >= 1.0 else fewer
    cost = fewer.cost + (more.cost - fewer.cost) * share
    if fewer.alike and more.alike:
        return Overlap.of(cost)
    return Overlap.of(cost, fewer.slowdown + (more.slowdown - fewer.slowdown) * share)


def check_slowdown(name: str, value: float | None) -> None:
    """Whether a decode step may take so many times as long as alone.

    Raises:
        ProfileError: it may not.
    """
    if value is not None and not 1.0 <= value <= MOST_SLOWDOWN:
        raise ProfileError(
            f"{name} is {value}; it is how many times as long as alone a decode step takes beside a prompt, from 1 to "
            f"{MOST_SLOWDOWN:g}, or none."
        )
