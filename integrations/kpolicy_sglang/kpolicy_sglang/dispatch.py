"""The hooks that a step goes through: whether it replays. SGLang's own functions are called for all but the size."""

from __future__ import annotations

import sys
from typing import Any

from kpolicy.reasons import Reason
from kpolicy_sglang.phase import Phase
from kpolicy_sglang.refused import why_refused

__all__ = ["decode_can_run", "phase_of", "prefill_can_replay_locally", "prefill_can_run", "prefill_can_run_0_5_16"]

ATTRIBUTE = "_kpolicy_phase"
_NO_LIMIT = 1 << 40
_FACTOR = "_MAX_PREFILL_CUDA_GRAPH_PADDING_FACTOR"


def phase_of(runner: Any) -> Phase | None:
    """The phase of a graph runner that kpolicy is attached to."""
    return getattr(runner, ATTRIBUTE, None)


def decode_can_run(original: Any, runner: Any, forward_batch: Any) -> Any:
    """AROUND `DecodeCudaGraphRunner.can_run_graph`."""
    phase: Phase | None = getattr(runner, ATTRIBUTE, None)
    if phase is None:
        return original(runner, forward_batch)
    if phase.force is not None:
        return phase.force
    size = forward_batch.batch_size
    # Where ranks step together the vote was taken when the step was scheduled: what is left is the same on all.
    if not (runner.require_mlp_sync or phase.replays(size)):
        phase.ran(size, forward_batch)
        return False
    can_run = original(runner, forward_batch)
    if can_run:
        phase.ran(size, forward_batch)
        return can_run
    return _refused(phase, runner, forward_batch, size)


def prefill_can_run_0_5_16(original: Any, runner: Any, forward_batch: Any) -> Any:
    """AROUND `PrefillCudaGraphRunner.can_run_graph` of 0.5.16, which has the limit on padding inside."""
    phase: Phase | None = getattr(runner, ATTRIBUTE, None)
    if phase is None:
        return original(runner, forward_batch)
    if phase.force is not None:
        return phase.force
    if forward_batch.global_num_tokens_cpu is not None:
        # This version votes before it knows sizes: a rank that decided on its own could part from the others.
        return original(runner, forward_batch)
    size = forward_batch.input_ids.shape[0]
    if not phase.replays(size):
        phase.ran(size, forward_batch)
        return False
    names = phase.names or _names(phase, runner)
    factor = names[_FACTOR]
    names[_FACTOR] = _NO_LIMIT
    try:
        can_run = original(runner, forward_batch)
    finally:
        names[_FACTOR] = factor
    if can_run:
        phase.ran(size, forward_batch)
        return can_run
    return _refused(phase, runner, forward_batch, size)


def _names(phase: Phase, runner: Any) -> dict[str, Any]:
    """The names of the runner's module, among which SGLang's rule looks up its limit on padding."""
    phase.names = vars(sys.modules[type(runner).__module__])
    return phase.names


def prefill_can_run(original: Any, runner: Any, forward_batch: Any) -> Any:
    """AROUND `PrefillCudaGraphRunner.can_run_graph` of 0.5.23: it counts; `can_replay_locally` decides."""
    phase: Phase | None = getattr(runner, ATTRIBUTE, None)
    if phase is None:
        return original(runner, forward_batch)
    if phase.force is not None:
        return phase.force
    size = forward_batch.input_ids.shape[0]
    if forward_batch.global_num_tokens_cpu is None:
        can_run = original(runner, forward_batch)
    else:
        phase.agreed = True
        try:
            can_run = original(runner, forward_batch)
        finally:
            phase.agreed = False
    if can_run:
        phase.ran(size, forward_batch)
        return can_run
    return _refused(phase, runner, forward_batch, size)


def prefill_can_replay_locally(original: Any, runner: Any, **asked: Any) -> bool:
    """AROUND `PrefillCudaGraphRunner.can_replay_locally`: the vote and the step itself both ask it.

    Under data parallelism the step's batch is padded to what ranks agreed on, so that only the vote decides by size.
    """
    phase: Phase | None = getattr(runner, ATTRIBUTE, None)
    size = asked.get("num_tokens")
    if phase is None or size is None:
        return bool(original(runner, **asked))
    if not (size <= phase.largest if phase.agreed else phase.replays(size)):
        return False
    # Without a size SGLang checks all the rest, and no limit on padding.
    asked["num_tokens"] = None
    return bool(original(runner, **asked))


def _refused(phase: Phase, runner: Any, batch: Any, size: int) -> bool:
    """Count a no of SGLang's: its own, unless the size is eager by the policy."""
    if phase.replays(size):
        try:
            reason = why_refused(phase.name, runner, batch)
        # The answer is SGLang's already; only its reason is looked for.
        except Exception as error:  # noqa: BLE001
            phase.failures.note("looking for SGLang's reason", error, then="the step counts as backend_refused")
            reason = Reason.BACKEND_REFUSED
        phase.was_refused(size, batch, reason)
    else:
        phase.ran(size, batch)
    return False
