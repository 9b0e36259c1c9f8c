"""What each step of a turn took: those with prompts one by one, the others by what they ran in.

A turn's medians don't say which steps two sides differ by, nor whether a difference is a single step's.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

__all__ = ["Ended", "step_rows"]


class Ended(NamedTuple):
    """A step whose outputs came, or, without tokens, the end of a time in which nothing was under way.

    Args:
        at_s: when.
        tokens: those of the step.
        requests: those of the step.
    """

    at_s: float
    tokens: int = 0
    requests: int = 0


def step_rows(ended: Sequence[Ended], taken: Sequence[tuple[str, int]]) -> dict[str, Any]:
    """``prompt_steps``, a list for each step with prompts, and ``decode_steps``, one for each kind of the others.

    The first are [mode, padded tokens, tokens, requests, milliseconds since the step before, whether nothing was under
    way before]; the second [mode, padded tokens, steps, median milliseconds, longest]. Empty where the steps that ended
    aren't those whose modes were noted, as when a step has two forwards.

    Args:
        ended: steps in order, after a time in which nothing was under way.
        taken: (mode, padded tokens) of each step, in order.
    """
    if sum(bool(each.tokens) for each in ended) != len(taken):
        return {}
    prompts: list[list[Any]] = []
    decodes: dict[tuple[str, int], list[float]] = {}
    modes = iter(taken)
    for before, each in pairwise(ended):
        if not each.tokens:
            continue
        mode, padded = next(modes)
        took = 1e3 * (each.at_s - before.at_s)
        if each.tokens > each.requests:
            prompts.append([mode, padded, each.tokens, each.requests, round(took, 3), not before.tokens])
        else:
            decodes.setdefault((mode, padded), []).append(took)
    kinds = [
        [*kind, len(times), round(statistics.median(times), 3), round(max(times), 3)]
        for kind, times in sorted(decodes.items())
    ]
    return {"prompt_steps": prompts, "decode_steps": kinds}
