"""Why SGLang refused a graph that the size would have had.

SGLang answers no and doesn't say; this asks again, in its order, and only where it said no.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kpolicy.reasons import Reason
from kpolicy_sglang.phase import DECODE

__all__ = ["has_idle_rank", "why_refused"]


Refusal = tuple[Callable[..., Any], Mapping[str, Any]]
_NEUTRAL: Mapping[str, Any] = {
    "batch_size": 1, "num_tokens": None, "input_embeds": None, "replace_embeds": None, "prefix_lens": None,
    "is_target_verify": False, "capture_hidden_mode": None, "return_logprob": False, "lora_ineligible": False,
    "is_mixed": False, "batch_max_context_len": 0, "contains_mm_inputs": False,
}  # fmt: skip
"""What 0.5.23's rule says yes to, as far as the batch goes."""
_IN_ORDER = (
    ("contains_mm_inputs", Reason.MULTIMODAL_INPUTS), ("batch_size", Reason.TOO_MANY_REQS),
    ("lora_ineligible", Reason.LORA_NOT_CAPTURED), ("is_mixed", Reason.EAGER_MIXED_PREFERRED),
    ("input_embeds", Reason.INPUT_EMBEDDINGS), ("replace_embeds", Reason.REPLACED_EMBEDDINGS),
    ("prefix_lens", Reason.PREFIX_NOT_CAPTURED), ("is_target_verify", Reason.TARGET_VERIFY),
    ("capture_hidden_mode", Reason.HIDDEN_STATES_WANTED), ("return_logprob", Reason.LOGPROBS_WANTED),
    ("batch_max_context_len", Reason.CONTEXT_TOO_LONG),
)  # fmt: skip
"""What 0.5.23's rule looks at, in its order."""


def why_refused(phase: str, runner: Any, batch: Any, refusal: Refusal | Reason | None = None) -> Reason:
    """The first reason that holds, of those that the runner's own rule has.

    Args:
        phase: the phase's name.
        runner: SGLang's graph runner.
        batch: its `ForwardBatch`.
        refusal: the question that 0.5.23 said no to, and what was asked: it is asked again bit by bit. Or the reason,
            where that question isn't what the no came from; None where it wasn't asked, as on 0.5.16.
    """
    if phase == DECODE:
        found = _decode(runner, batch)
    elif refusal is None:
        found = _prefill(runner, batch)
    else:
        found = _voted_no(batch) or (refusal if isinstance(refusal, Reason) else _asked_again(runner, *refusal))
    return found or Reason.BACKEND_REFUSED


def _asked_again(runner: Any, question: Callable[..., Any], asked: Mapping[str, Any]) -> Reason | None:
    """The first of what was asked that SGLang says no to, with all that it looks at before."""
    so_far = dict(_NEUTRAL)
    for name, reason in _IN_ORDER:
        if name not in asked:
            continue
        so_far[name] = asked[name]
        if not question(**so_far):
            too_long = getattr(runner, "_has_uncapturable_chunked_prefix", None)
            if name == "prefix_lens" and too_long is not None and too_long(asked[name]):
                return Reason.PREFIX_TOO_LONG
            return reason
    return None


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
    voted_no = _voted_no(batch)
    if voted_no is not None:
        return voted_no
    mode = batch.forward_mode
    of_first = (
        (_has(batch, "input_embeds"), Reason.INPUT_EMBEDDINGS),
        (_has(batch, "replace_embeds"), Reason.REPLACED_EMBEDDINGS),
        (runner._is_full_backend and batch.batch_size > runner._capture_req_slots, Reason.TOO_MANY_REQS),
        (_prefix_refused(runner, batch), Reason.PREFIX_NOT_CAPTURED),
        (mode.is_target_verify(), Reason.TARGET_VERIFY),
        (_hidden(runner, batch), Reason.HIDDEN_STATES_WANTED),
        (batch.return_logprob and not runner._uses_eager_prefill_tail(), Reason.LOGPROBS_WANTED),
        (batch.input_ids.numel() > runner.max_num_tokens, Reason.ABOVE_LARGEST_SIZE),
    )
    return next((reason for holds, reason in of_first if holds), None)


def _voted_no(batch: Any) -> Reason | None:
    """Whether ranks agreed on eager, or one of them has nothing to run."""
    if batch.global_num_tokens_cpu is None:
        return None
    no = not _voted(batch, "can_run_dp_prefill_cuda_graph", "can_run_dp_breakable_cuda_graph")
    return Reason.RANK_NEEDS_EAGER if no or has_idle_rank(batch) else None


def has_idle_rank(batch: Any) -> bool:
    """Whether a data-parallel rank has nothing to run beside the batch: SGLang's prompts have no graph then."""
    counts = batch.global_num_tokens_cpu
    return counts is not None and len(counts) > 1 and 0 in counts


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
