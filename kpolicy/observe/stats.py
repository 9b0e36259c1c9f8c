"""`Stats`: what an Engine decided and ran, counted per prepared decision and summed up when asked."""

from __future__ import annotations

from typing import Any

import attrs

from kpolicy.decision import Decision
from kpolicy.reasons import Basis
from kpolicy.shapes import BatchNumbers

__all__ = ["ModeStats", "Stats"]


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


class Stats:
    """Counters of one Engine. Adding is a few additions; sums are made when they are read."""

    def __init__(self) -> None:
        self._by_decision: dict[Decision, ModeStats] = {}
        self.replay_failures = 0
        self.recompiles = 0

    def add(self, decision: Decision, numbers: BatchNumbers, us: float = 0.0) -> None:
        """Count one step."""
        stats = self._by_decision.get(decision)
        if stats is None:
            stats = self._by_decision[decision] = ModeStats()
        stats.steps += 1
        stats.us += us
        for launch in decision.launches:
            stats.tokens += launch.num_tokens(numbers) * launch.repeat
            stats.padding += launch.padding(numbers)

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
    def half_reasons(self) -> dict[str, int]:
        """Why halves of splits ran eagerly, in steps."""
        counts: dict[str, int] = {}
        for decision, stats in self._by_decision.items():
            for launch in decision.launches:
                if launch.reason is not None:
                    counts[launch.reason.value] = counts.get(launch.reason.value, 0) + stats.steps
        return counts

    @property
    def basis(self) -> Basis:
        """Everything that any decision took for granted."""
        basis = Basis.NOTHING
        for decision in self._by_decision:
            basis |= decision.basis
        return basis

    def _sum(self, group: Any) -> dict[Any, ModeStats]:
        sums: dict[Any, ModeStats] = {}
        for decision, stats in self._by_decision.items():
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
        lines = [f"{self.total.steps} steps"]
        for (mode, reason), stats in self.by_mode_and_reason.items():
            lines.append(f"  {mode:<24}{stats.steps:>9}  {reason}")
        return "\n".join(lines)
