"""What a report keeps of every step: time by mode over time, the slowest stretch, and padding by size.

Memory doesn't grow with the steps.
"""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

from kpolicy.decision import Decision
from kpolicy.modes import Mode
from kpolicy.shapes import BatchNumbers
from kpolicy.simulate import DecodeRun, SimStep

__all__ = ["MODES", "MOST_BINS", "STRETCH", "Padded", "StepNote", "Steps"]

MODES: tuple[Mode, ...] = (Mode.FULL, Mode.PIECEWISE, Mode.SPLIT, Mode.EAGER)
"""In the order in which pictures stack them."""
MOST_BINS = 2048
STRETCH = 1500
"""Steps of a stretch."""
_FIRST_BIN_US = 1024.0
_INDEX = {mode: i for i, mode in enumerate(MODES)}


class StepNote(NamedTuple):
    """One step of the slowest stretch."""

    start_us: float
    us: float
    mode: int
    """Its place in `MODES`"""
    decodes: int
    prefill_tokens: int
    padding: int
    reason: str


class Padded:
    """Launches of one true size, in tokens."""

    __slots__ = ("eager", "graphs", "padding", "tokens")

    def __init__(self) -> None:
        self.graphs = self.eager = 0
        self.tokens = self.padding = 0


class Steps:
    """Is told each step of a simulation, as its ``on_step``; steps of decode rows alone also by `decodes`.

    Time is kept in at most `MOST_BINS` bins: where a run is longer than they span, two neighbours become one. Of
    several ranks the first one's steps are the timeline; padding is all ranks'.
    """

    def __init__(self) -> None:
        self.bin_us = _FIRST_BIN_US
        self.busy_us: list[list[float]] = [[] for _ in MODES]
        """Time of the steps in each bin, by mode"""
        self.running: list[int] = []
        """The most requests that ran in each bin, and below those that waited"""
        self.waiting: list[int] = []
        self.padding: dict[int, Padded] = {}
        self.end_us = 0.0
        self.slowest: list[StepNote] = []
        """The slowest of the run's stretches of `STRETCH` steps"""
        self._slowest_us = -1.0
        self._stretch: list[StepNote] = []

    def __call__(self, step: SimStep) -> None:
        decision, numbers = step.decision, step.step.numbers
        padding = self._pad(decision, numbers, 1)
        if step.rank:
            return
        mode = _INDEX[decision.mode]
        self._spread(step.start_us, step.cycle_us, mode, step.queue.num_running, len(step.queue.waiting))
        self._stretch.append(
            StepNote(
                step.start_us, step.cycle_us, mode, numbers.num_decodes, numbers.num_prefill_tokens, padding,
                decision.reason.value,
            )
        )  # fmt: skip
        if len(self._stretch) == STRETCH:
            self._end_stretch()

    def decodes(self, steps: DecodeRun) -> None:
        """Steps of decode rows alone, as a simulation's ``on_decodes`` has them."""
        running, waiting, rows = steps.queue.num_running, len(steps.queue.waiting), steps.numbers.num_decodes
        now, origin, cycles = steps.now_us, steps.origin_us, iter(steps.cycles_us)
        for decision, count in steps.decisions:
            padding = self._pad(decision, steps.numbers, count) // count
            mode, reason = _INDEX[decision.mode], decision.reason.value
            last = -1
            for us in islice(cycles, count):
                start = now - origin
                end, width = start + us, self.bin_us
                if last >= 0 and int(start / width) == int(end / width) == last:
                    # The bin of the step before, where as many run and wait; its width is a power of two, so that a
                    # step that lies in it reaches over neither end.
                    self.busy_us[mode][last] += end - start
                    if end > self.end_us:
                        self.end_us = end
                else:
                    self._spread(start, us, mode, running, waiting)
                    last = int(end / self.bin_us)
                self._stretch.append(StepNote(start, us, mode, rows, 0, padding, reason))
                if len(self._stretch) == STRETCH:
                    self._end_stretch()
                now += us

    def _pad(self, decision: Decision, numbers: BatchNumbers, steps: int) -> int:
        """Count so many steps' padding by the true size of what is launched, and say how much that is."""
        padding = 0
        for launch in decision.launches:
            tokens, times = launch.num_tokens(numbers), launch.repeat * steps
            size = self.padding.get(tokens)
            if size is None:
                size = self.padding[tokens] = Padded()
            if launch.key is None:
                size.eager += times
            else:
                size.graphs += times
            pads = launch.padding(numbers) * steps
            size.tokens += tokens * times
            size.padding += pads
            padding += pads
        return padding

    def done(self) -> Steps:
        """This, with the last stretch looked at."""
        if self._stretch:
            self._end_stretch()
        return self

    def _end_stretch(self) -> None:
        taken = sum(note.us for note in self._stretch)
        if taken > self._slowest_us:
            self._slowest_us, self.slowest = taken, self._stretch
        self._stretch = []

    def _spread(self, start: float, us: float, mode: int, running: int, waiting: int) -> None:
        """Put a step's time into its bins."""
        end = start + us
        self.end_us = max(self.end_us, end)
        while end >= self.bin_us * MOST_BINS:
            self._halve()
        width = self.bin_us
        first, last = int(start / width), int(end / width)
        missing = last + 1 - len(self.running)
        if missing > 0:
            for each in self.busy_us:
                each.extend([0.0] * missing)
            self.running.extend([0] * missing)
            self.waiting.extend([0] * missing)
        busy = self.busy_us[mode]
        for i in range(first, last + 1):
            busy[i] += min(end, (i + 1) * width) - max(start, i * width)
            self.running[i] = max(self.running[i], running)
            self.waiting[i] = max(self.waiting[i], waiting)

    def _halve(self) -> None:
        self.bin_us *= 2
        self.busy_us = [[sum(each[i : i + 2]) for i in range(0, len(each), 2)] for each in self.busy_us]
        self.running = [max(self.running[i : i + 2]) for i in range(0, len(self.running), 2)]
        self.waiting = [max(self.waiting[i : i + 2]) for i in range(0, len(self.waiting), 2)]
