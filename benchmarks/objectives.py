"""What `auto` minimised in a run of before, as its result says it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from kpolicy.settings import Objective

__all__ = ["UNSTATED_LIMIT", "objective_of"]

UNSTATED_LIMIT = 1.25
"""`Objective.first_token_limit` of results that don't say: every objective's default until 2026-11-29"""


def objective_of(setting: Mapping[str, Any]) -> Objective:
    """The objective of a run, by the setting that ``kpolicy run --json`` printed.

    Args:
        setting: has ``objective`` as text, throughput where it doesn't, and ``first_token_limit`` since 2026-11-29.

    Raises:
        ConfigError: the text is no objective.
    """
    objective = Objective.parse(setting.get("objective", "throughput"))
    return attrs.evolve(objective, first_token_limit=setting.get("first_token_limit", UNSTATED_LIMIT))
