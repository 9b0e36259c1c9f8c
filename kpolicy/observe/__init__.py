"""What happened: counts by mode, reason and graph; events, metrics and traces. Never logs per batch.

`events`, `metrics` and `perfetto` are modules of their own, imported by those who want them; docs/observe.md.
"""

from kpolicy.observe.stats import ModeStats, Stats, padding_per_token, padding_text

__all__ = ["ModeStats", "Stats", "padding_per_token", "padding_text"]
