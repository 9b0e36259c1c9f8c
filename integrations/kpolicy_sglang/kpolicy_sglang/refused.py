"""Why SGLang refused a graph that the size would have had.

SGLang answers no and doesn't say; this asks again, in its order, and only where it said no.
"""

from __future__ import annotations

from typing import Any

from kpolicy.reasons import Reason
from kpolicy_sglang.phase import DECODE

__all__ = ["why_refused"]


def why_refused(phase: str, runner: Any, batch: Any) -> Reason:
    """The first reason that holds, of those that the runner's own rule has.

    Args:
        phase: the phase's name.
        runner: SGLang's graph runner.
        batch: its `ForwardBatch`.
    """
    found = _decode(runner, batch) if phase == DECODE else _prefill(runner, batch)
    return found or Reason.BACKEND_REFUSED


def _decode(runner: Any, batch: Any) -> Reason | None:
    if _has(batch, "replace_embeds"):
        return Reason.REPLACED_EMBEDDINGS
    width = getattr(getattr(batch, "spec_info", None), "num_tokens_per_req", 0)
    if width > 0 and width != runner.captured_req_width:
        return Reason.WIDTH_DIFFERS
    if runner.require_mlp_sync and not _voted(batch, "can_run_decode_cuda_graph", "can_run_dp_cuda_graph"):
        return Reason.RANK_NEEDS_EAGER
    if batch.batch_size > runner.max_bs:
        return Reason.ABOVE_LARGEST_SIZE
    if getattr(runner, "disable_padding", False):
        return Reason.EXACT_SIZE_NOT_CAPTURED
    if getattr(runner, "enable_two_batch_overlap", False):
        return Reason.MICROBATCHES_DIFFER
    if getattr(runner, "is_encoder_decoder", False):
        return Reason.ENCODER_LENGTHS_ZERO
    return Reason.HIDDEN_STATES_WANTED if _hidden(runner, batch) else None


def _prefill(runner: Any, batch: Any) -> Reason | None:
    if batch.global_num_tokens_cpu is not None and not _voted(
        batch, "can_run_dp_prefill_cuda_graph", "can_run_dp_breakable_cuda_graph"
    ):
        return Reason.RANK_NEEDS_EAGER
    mode = batch.forward_mode
    of_first = (
        (len(batch.global_num_tokens_cpu or ()) > 1 and 0 in batch.global_num_tokens_cpu, Reason.RANK_NEEDS_EAGER),
        (_has(batch, "input_embeds"), Reason.INPUT_EMBEDDINGS),
        (_has(batch, "replace_embeds"), Reason.REPLACED_EMBEDDINGS),
        (runner._is_full_backend and batch.batch_size > runner._capture_req_slots, Reason.TOO_MANY_REQS),
        (_prefix_refused(runner, batch), Reason.PREFIX_NOT_CAPTURED),
        (mode.is_target_verify(), Reason.TARGET_VERIFY),
        (_hidden(runner, batch), Reason.HIDDEN_STATES_WANTED),
        (batch.return_logprob and not runner._uses_eager_prefill_tail(), Reason.LOGPROBS_WANTED),
        (getattr(runner, "enable_lora", False), Reason.LORA_NOT_CAPTURED),
        (getattr(runner, "prefer_eager_mixed_prefill", False), Reason.EAGER_MIXED_PREFERRED),
        (getattr(runner, "max_seq_len", None) is not None, Reason.CONTEXT_TOO_LONG),
        (batch.input_ids.shape[0] > runner.max_num_tokens, Reason.ABOVE_LARGEST_SIZE),
    )
    return next((reason for holds, reason in of_first if holds), None)


def _prefix_refused(runner: Any, batch: Any) -> bool:
    """Whether cached tokens keep the batch from a graph: MLA on 0.5.16. Later versions capture them on CUDA."""
    refuses = getattr(runner, "_has_unsupported_mha_prefix", None)
    return refuses is not None and bool(refuses(batch))


def _has(batch: Any, name: str) -> bool:
    return getattr(batch, name, None) is not None


def _hidden(runner: Any, batch: Any) -> bool:
    asked = getattr(batch, "capture_hidden_mode", None)
    return asked is not None and asked != runner.capture_hidden_mode


def _voted(batch: Any, *names: str) -> bool:
    """The group's verdict; its field has another name in each version."""
    return any(getattr(batch, name, False) for name in names)
