"""`Stats`: what an Engine decided and ran, counted per prepared decision and summed up when asked."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import attrs

from kpolicy.decision import Decision
from kpolicy.modes import Rows
from kpolicy.reasons import Basis
from kpolicy.shapes import BatchNumbers
from kpolicy.words import some

__all__ = ["TIME_BOUNDS_US", "ModeStats", "Stats", "StepTimes", "padding_per_token", "padding_text"]

_ALL = Rows.ALL
K = TypeVar("K", bound=str | tuple[str, str])

TIME_BOUNDS_US: tuple[float, ...] = (
    *(mantissa * 10.0**exponent for exponent in range(2, 7) for mantissa in (1, 1.5, 2, 3, 5, 7)),
    1e7,
)
"""Upper bounds of the step-time buckets in microseconds, 100 us to 10 s: a decode step of a small model to a prefill
that somebody should look at. Six a decade tell a step from one half as long again."""


def padding_per_token(padding: int, tokens: int) -> float:
    """Padding tokens for each token that was asked for: what padding in percent is, wherever kpolicy tells it.

    Args:
        padding: padding tokens.
        tokens: tokens asked for, without padding; with none, as on a rank that only keeps others company, any padding
            is infinitely much.
    """
    if tokens:
        return padding / tokens
    return math.inf if padding else 0.0


def padding_text(padding: int, tokens: int) -> str:
    """`padding_per_token` in percent; "all" where every token is padding."""
    share = padding_per_token(padding, tokens)
    return "all" if share == math.inf else f"{share:.1%}"


@attrs.define
class ModeStats:
    """Sums over steps.

    Args:
        steps: how many.
        tokens: tokens asked for, without padding.
        padding: padding tokens.
        us: time of the steps in microseconds, where the executor tells.
    """

    steps: int = 0
    tokens: int = 0
    padding: int = 0
    us: float = 0.0

    def add(self, other: ModeStats) -> None:
        self.steps += other.steps
        self.tokens += other.tokens
        self.padding += other.padding
        self.us += other.us


@attrs.frozen
class StepTimes:
    """How long steps took: steps a bucket of `TIME_BOUNDS_US`, the last one for longer ones, and their sum.

    Steps of which no time is known aren't among them.
    """

    counts: tuple[int, ...]
    sum_us: float


@attrs.define
class _Counted(ModeStats):
    """Sums over the steps of one prepared decision, and how long they took by bucket."""

    times: list[int] = attrs.field(factory=lambda: [0] * (len(TIME_BOUNDS_US) + 1))


class Stats:
    """Counters of one Engine. Adding is a few additions; sums are made when they are read, from any thread."""

    def __init__(self) -> None:
        self._by_decision: dict[Decision, _Counted] = {}
        self.replay_failures = 0
        self.recompiles = 0

    def add(self, decision: Decision, numbers: BatchNumbers, us: float = 0.0) -> None:
        """Count one step."""
        self.add_all(decision, ((numbers, us),))

    def add_all(self, decision: Decision, steps: Sequence[tuple[BatchNumbers, float]]) -> None:
        """Count steps of one decision: the batch and the microseconds of each, 0 where they aren't known."""
        stats = self._by_decision.get(decision)
        if stats is None:
            stats = self._by_decision[decision] = _Counted()
        stats.steps += len(steps)
        for _, us in steps:
            if us > 0:
                stats.us += us
                stats.times[bisect_left(TIME_BOUNDS_US, us)] += 1
        for launch in decision.launches:
            repeat, key, whole = launch.repeat, launch.key, launch.rows is _ALL
            padded = launch.padded_tokens if key is None else key.num_tokens
            tokens = 0
            for numbers, _ in steps:
                tokens += numbers.total_tokens if whole else launch.num_tokens(numbers)
            stats.tokens += tokens * repeat
            if padded is not None:
                # `Launch.padding`, without counting the tokens a second time.
                stats.padding += (padded * len(steps) - tokens) * repeat

    @property
    def total(self) -> ModeStats:
        return self._sum(lambda _decision: "")[""] if self._by_decision else ModeStats()

    @property
    def by_mode(self) -> dict[str, ModeStats]:
        """By mode, with the form of a split."""
        return self._sum(lambda decision: decision.label)

    @property
    def by_reason(self) -> dict[str, ModeStats]:
        return self._sum(lambda decision: decision.reason.value)

    @property
    def by_mode_and_reason(self) -> dict[tuple[str, str], ModeStats]:
        return self._sum(lambda decision: (decision.label, decision.reason.value))

    @property
    def times_by_mode(self) -> dict[str, StepTimes]:
        """How long steps took, by mode; only modes with a step whose time is known."""
        by_mode: dict[str, list[_Counted]] = {}
        for decision, stats in self._items():
            if any(stats.times):
                by_mode.setdefault(decision.label, []).append(stats)
        return {
            mode: StepTimes(
                tuple(map(sum, zip(*(stats.times for stats in each), strict=True))), sum(stats.us for stats in each)
            )
            for mode, each in by_mode.items()
        }

    @property
    def half_reasons(self) -> dict[str, int]:
        """Why halves of splits ran eagerly, in steps."""
        counts: dict[str, int] = {}
        for decision, stats in self._items():
            for launch in decision.launches:
                if launch.reason is not None:
                    counts[launch.reason.value] = counts.get(launch.reason.value, 0) + stats.steps
        return counts

    @property
    def basis(self) -> Basis:
        """Everything that any decision took for granted."""
        basis = Basis.NOTHING
        for decision, _stats in self._items():
            basis |= decision.basis
        return basis

    def _items(self) -> list[tuple[Decision, _Counted]]:
        """What is counted now, for any thread while the Engine's enters decisions.

        Copying the dict is one uninterrupted operation. Listing its items isn't: each is a new tuple, any of which may
        start a collection, and with it a switch of threads.
        """
        return list(self._by_decision.copy().items())

    def _sum(self, group: Callable[[Decision], K]) -> dict[K, ModeStats]:
        sums: dict[K, ModeStats] = {}
        for decision, stats in self._items():
            sums.setdefault(group(decision), ModeStats()).add(stats)
        return dict(sorted(sums.items(), key=lambda item: -item[1].steps))

    def as_dict(self) -> dict[str, Any]:
        """The counters as plain JSON values."""
        return {
            "steps": self.total.steps,
            "modes": {mode: attrs.asdict(stats) for mode, stats in self.by_mode.items()},
            "reasons": {reason: stats.steps for reason, stats in self.by_reason.items()},
            "eager_halves": self.half_reasons,
            "replay_failures": self.replay_failures,
            "assumes": list(self.basis.names),
        }

    def __str__(self) -> str:
        lines = [some(self.total.steps, "step")]
        for (mode, reason), stats in self.by_mode_and_reason.items():
            lines.append(f"  {mode:<24}{stats.steps:>9}  {reason}")
        return "\n".join(lines)
