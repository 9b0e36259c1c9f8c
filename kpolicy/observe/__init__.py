"""What happened: counts by mode, reason and graph. Never logs per batch."""

from kpolicy.observe.stats import ModeStats, Stats

__all__ = ["ModeStats", "Stats"]
