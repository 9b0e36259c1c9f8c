"""`Correction`: a measured cost table held to the steps that ran, and mended where one mode is off.

A step's time is read when the step is counted, which is after it is over: nothing waits for the device. Of every
fourth step, unless its halves run in turn, what it took is compared with what the table says. Blocks of these are
reviewed together:

- What most units of a block share, such as a device that throttles, is taken off: it changes nothing between modes. A
  unit has one vote, however many steps it ran: most steps are often of one kind, and that kind may be what is off. With
  fewer than three units, or no majority that is alike, a block says nothing.
- What is left is noted for what bounded the step: the device time of a mode at about that padded size, or a mode's
  host time. A block counts as one observation, its median, so that outliers don't count.
- Of halves that ran beside each other it is noted for `overlap_cost`, beyond what is known by then to be off of each
  half by itself: where the device bounds the step, and the shorter half is enough of it to tell. When more is known of
  a curve it begins anew. What one decode row and what many cost there (`CostTable.effects`) changes by as much, and so
  does how many times as long decode steps take there.
- The table that comes out has the median of a unit's last blocks on its numbers, within bounds. Blocks are forgotten,
  so whatever was wrong for a while is forgotten too, and what isn't used any more goes back to what was measured.

If a correction sends steps to another mode, that mode's own times are seen next, and it is held to them likewise.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import TYPE_CHECKING, Any

import attrs

from kpolicy.costs import CostTable, Curve, HostCost, Ties
from kpolicy.modes import Part
from kpolicy.overlap import MOST_SLOWDOWN

if TYPE_CHECKING:
    from kpolicy.decision import Decision, Launch
    from kpolicy.shapes import BatchNumbers

__all__ = ["Correction"]

EVERY = 4
"""One step of so many is looked at"""
BLOCK = 128
"""Steps looked at between reviews"""
LEAST_SAMPLES = 8
"""Of a unit in a block, for the block to say something of it"""
VOTE_SAMPLES = 4
"""Of a unit in a block, for it to have a vote in what the block's steps share"""
LEAST_VOTES = 3
"""Units of a block, for what they share to be told from what one of them is off by"""
LEAST_BLOCKS, MOST_BLOCKS = 4, 16
"""Blocks that a correction takes, and that are remembered"""
UNSEEN = 100
"""Blocks without a unit after which one that it has is forgotten, and one more with each block that follows"""
NOTICEABLE = 0.05
"""Of a time: what is less off isn't corrected, and corrections that differ by less are one."""
MOST = 0.4
"""The largest correction, as a logarithm: a factor of about 1.5 either way"""

MOST_OVERLAP = 2.0
"""What `CostTable.overlap_cost` can be at most"""
LEAST_SHORTER = 0.2
"""Of a step's time, the shorter half, for the step to tell what overlapping costs: less is hidden by the longer one"""

Unit = tuple[str, int]
"""(the name of a curve of `CostTable`, bits of the padded size), (a mode, 0) for its host time, or `OVERLAP`"""
OVERLAP: Unit = ("overlap_cost", 0)


@attrs.define
class _Seen:
    """What recent blocks said of one unit."""

    blocks: deque[float] = attrs.field(factory=lambda: deque(maxlen=MOST_BLOCKS))
    unseen: int = 0

    @property
    def off(self) -> float:
        """The correction, as a logarithm."""
        if len(self.blocks) < LEAST_BLOCKS:
            return 0.0
        median = statistics.median(self.blocks)
        return max(-MOST, min(MOST, median)) if abs(median) >= NOTICEABLE else 0.0


class Correction:
    """Corrects one measured table.

    Args:
        costs: the table as it was measured.

    Attributes:
        applied: corrections in the table now, as logarithms.
    """

    def __init__(self, costs: CostTable) -> None:
        self._measured = costs
        self._steps = 0
        self._samples: list[tuple[Decision, BatchNumbers, float]] = []
        self._units: dict[Unit, _Seen] = {}
        self.applied: dict[Unit, float] = {}
        self._made = 0
        self._now = costs
        self._rises: deque[float] = deque(maxlen=MOST_BLOCKS)
        """By block, by what share of its time a step in the middle rises with what overlapping costs"""

    def add(self, decision: Decision, numbers: BatchNumbers, cycle_us: float) -> CostTable | None:
        """Take in a step that is over.

        Args:
            decision: how it ran.
            numbers: its batch.
            cycle_us: what it took, on the device's clock.

        Returns:
            A corrected table where corrections have changed; else None.
        """
        self._steps += 1
        streams = [launch.stream for launch in decision.launches]
        if self._steps % EVERY or cycle_us <= 0 or not streams or (len(streams) > 1 and streams[0] == streams[1]):
            return None
        self._samples.append((decision, numbers, cycle_us))
        return self._review() if len(self._samples) >= BLOCK else None

    def _review(self) -> CostTable | None:
        found, rises = self._found()
        if not found:
            return None
        off = {unit: statistics.median(ratios) for unit, ratios in found.items()}
        shared = _shared([off[unit] for unit, ratios in found.items() if len(ratios) >= VOTE_SAMPLES])
        for unit, ratios in found.items():
            if len(ratios) >= LEAST_SAMPLES:
                seen = self._units.setdefault(unit, _Seen())
                seen.unseen = -1
                if shared is not None:
                    seen.blocks.append(off[unit] - shared)
                    if unit == OVERLAP:
                        self._rises.append(statistics.median(rises))
        for seen in self._units.values():
            seen.unseen += 1
            if seen.unseen >= UNSEEN and seen.blocks:
                seen.blocks.popleft()
        return self._changed()

    def _found(self) -> tuple[dict[Unit, list[float]], list[float]]:
        """What the block's steps say: logarithms by unit, and by what share each step of `OVERLAP` rises with it."""
        samples, self._samples = self._samples, []
        found, rises = dict[Unit, list[float]](), list[float]()
        for decision, numbers, cycle_us in samples:
            if len(decision.launches) > 1:
                expected, shorter, rise = self._beside(decision, numbers)
                if shorter >= LEAST_SHORTER:
                    found.setdefault(OVERLAP, []).append(math.log(cycle_us / expected))
                    rises.append(rise)
                continue
            launch = decision.launches[0]
            device, host = self._measured.launch_us(launch, numbers)
            expected = max(device, host)
            if expected > 0:
                unit = _unit(launch, numbers, host > device, self._measured.mixed is not None)
                found.setdefault(unit, []).append(math.log(cycle_us / expected))
        return found, rises

    def _changed(self) -> CostTable | None:
        """The table with what is known now, where that differs from what the last one had."""
        wanted = {unit: seen.off for unit, seen in self._units.items() if seen.off}
        units = [
            unit
            for unit in wanted.keys() | self.applied.keys()
            if abs(wanted.get(unit, 0.0) - self.applied.get(unit, 0.0)) >= NOTICEABLE
        ]
        if not units:
            return None
        if OVERLAP in self._units and any(size for _, size in units):
            # It was told from other times of the halves.
            self._units[OVERLAP].blocks.clear()
            self._rises.clear()
            wanted.pop(OVERLAP, None)
        self.applied = wanted
        self._now = self._table()
        return self._now

    def _beside(self, decision: Decision, numbers: BatchNumbers) -> tuple[float, float, float]:
        """Microseconds as measured, the shorter half's share of them, and by what share they rise with what it costs.

        The share is 0 where the host bounds the step. Each half has the corrections of its own steps.
        """
        first, second = decision.launches
        device, host = self._now.launch_us(first, numbers)
        other, other_host = self._now.launch_us(second, numbers)
        decodes_us, prompt_us = first.repeat * device, second.repeat * other
        overlap = self._measured.overlap_of(numbers.num_decodes, numbers.num_prefill_tokens)
        expected = overlap.device_us(decodes_us, prompt_us)
        bounded = expected > first.repeat * host + second.repeat * other_host
        shorter = min(decodes_us, prompt_us) / expected if bounded else 0.0
        return expected, shorter, overlap.rise_us(decodes_us, prompt_us) / expected

    def _overlap(self, cost: float) -> float:
        """The `overlap_cost` by which steps whose halves share the device as those that were seen take what they took.

        Args:
            cost: as it was measured.
        """
        off = self.applied.get(OVERLAP, 0.0)
        if not off:
            return cost
        return min(max(cost + math.expm1(off) / statistics.median(self._rises), 0.0), MOST_OVERLAP)

    def _table(self) -> CostTable:
        """The measured table with the corrections."""
        if not self.applied:
            return self._measured
        self._made += 1
        costs = self._measured
        effects = costs.effects
        cost = self._overlap(costs.overlap_cost)
        slowdown = _slower(costs.decode_slowdown, cost - costs.overlap_cost)
        changed: dict[str, Any] = {"overlap_cost": cost, "decode_slowdown": slowdown}
        beside: dict[str, Any] = {}
        for rows in ("one_row", "many_rows"):
            timed = getattr(effects, f"{rows}_overlap")
            if timed is not None:
                cost = self._overlap(timed)
                slowdown = _slower(getattr(effects, f"{rows}_slowdown"), cost - timed)
                beside |= {f"{rows}_overlap": cost, f"{rows}_slowdown": slowdown}
        changed["effects"] = attrs.evolve(effects, **beside)
        for name in ("full", "piecewise", "eager"):
            changed[name] = self._curve(name, getattr(costs, name))
            changed[f"host_{name}"] = self._host(name, getattr(costs, f"host_{name}"))
        if costs.mixed is not None:
            changed["mixed"] = self._curve("mixed", costs.mixed)
        if costs.ties is not None:
            tied = attrs.asdict(costs.ties, recurse=False)
            changed["ties"] = Ties(**{name: each and self._curve(name, each) for name, each in tied.items()})
        return attrs.evolve(costs, version=f"{costs.version}, corrected {self._made}", **changed)

    def _curve(self, name: str, curve: Curve) -> Curve:
        factors = [math.exp(self.applied.get((name, size.bit_length()), 0.0)) for size in curve.sizes]
        return Curve(curve.sizes, [us * factor for us, factor in zip(curve.us, factors, strict=True)])

    def _host(self, name: str, host: HostCost) -> HostCost:
        factor = math.exp(self.applied.get((name, 0), 0.0))
        return HostCost(*(us * factor for us in attrs.astuple(host)))


def _slower(slowdown: float | None, more: float) -> float | None:
    """A slowdown where overlapping costs so much more; None where it wasn't timed."""
    return None if slowdown is None else min(max(slowdown + more, 1.0), MOST_SLOWDOWN)


def _shared(votes: list[float]) -> float | None:
    """What most units are off by alike; None where it can't be told."""
    if len(votes) < LEAST_VOTES:
        return None
    middle = statistics.median(votes)
    alike = sum(abs(vote - middle) < NOTICEABLE for vote in votes)
    return middle if 2 * alike > len(votes) else None


def _unit(launch: Launch, numbers: BatchNumbers, host_bound: bool, mixed: bool) -> Unit:
    """What bounded a launch; `mixed` where the table has a curve of its own for graphs that hold prompts."""
    name = "eager" if launch.key is None else "full" if launch.key.part is Part.FULL else "piecewise"
    if host_bound:
        return name, 0
    if launch.key is not None:
        if mixed and name == "full" and not launch.key.decode_only:
            name = "mixed"
        return name, launch.key.num_tokens.bit_length()
    return name, (launch.padded_tokens or launch.num_tokens(numbers)).bit_length()
