"""vLLM's balancing of experts (EPLB) isn't told of made-up rows, as it isn't of vLLM's own dummy runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["unbalanced"]


@contextmanager
def unbalanced(runner: Any) -> Iterator[None]:
    """Steps in here count for no expert, and move none.

    vLLM comes to its first rearrangement early, by the loads of the steps until then: a calibration of some hundred
    steps of the same few tokens would be most of what it goes by, or have it happen while steps are timed.

    Args:
        runner: vLLM's model runner, of either kind; every rank must call it.
    """
    state = getattr(runner, "eplb_state", None)
    if state is None:
        yield
        return
    before, runner.eep_eplb_suppressed = runner.eep_eplb_suppressed, True
    try:
        yield
    finally:
        runner.eep_eplb_suppressed = before
        for model in state.model_states.values():
            # The layers add to it whether or not a step of the balancing follows.
            model.expert_load_pass.zero_()
