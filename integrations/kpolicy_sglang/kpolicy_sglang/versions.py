"""What of SGLang is hooked, in the versions that are known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from kpolicy_sglang import captures, dispatch, hooks, padding, sizes, votes

__all__ = ["KNOWN", "Hook", "Version", "known"]

_RUNNER = "sglang.srt.model_executor.runner"
_DECODE = f"{_RUNNER}.decode_cuda_graph_runner.DecodeCudaGraphRunner"
_PREFILL = f"{_RUNNER}.prefill_cuda_graph_runner.PrefillCudaGraphRunner"
_BACKENDS = "sglang.srt.model_executor.runner_backend.utils"
_SETUP = "sglang.srt.model_executor.model_runner_components.cuda_graph_setup"
_MODEL_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_VOTES = "sglang.srt.managers.scheduler_components.dp_attn"
_SIZES = "sglang.srt.arg_groups.cuda_graph_hook"
_LIMIT = "sglang.srt.arg_groups.model_overrides.qwen3_vl"
_BUFFERS = "sglang.srt.model_executor.cuda_graph_buffer_registry"
_ARGS = "sglang.srt.server_args.ServerArgs"


@attrs.frozen
class Hook:
    """An AROUND hook.

    Args:
        target: the dotted name that SGLang's registry takes.
        around: ``around(original, *args, **kwargs)``.
        takes: names of the arguments that the target must have, `self` included.
    """

    target: str
    around: Callable[..., Any]
    takes: tuple[str, ...]


@attrs.frozen
class Version:
    """One known version and its hooks."""

    name: str
    hooks: tuple[Hook, ...]


_COMMON = (
    Hook(f"{_DECODE}.can_run_graph", dispatch.decode_can_run, ("self", "forward_batch")),
    Hook(f"{_BACKENDS}.resolve_decode_backend", hooks.decode_backend, ("cuda_graph_runner",)),
    Hook(f"{_BACKENDS}.resolve_prefill_backend", hooks.prefill_backend, ("cuda_graph_runner",)),
    Hook(f"{_MODEL_RUNNER}.init_cuda_graphs", hooks.init_cuda_graphs, ("self", "capture_decode_cuda_graph")),
    Hook(f"{_RUNNER}.decode_cuda_graph_runner.freeze_gc", captures.freeze_gc, ("enable_cudagraph_gc",)),
    Hook(f"{_RUNNER}.prefill_cuda_graph_runner.freeze_gc", captures.freeze_gc, ("enable_cudagraph_gc",)),
    Hook(f"{_SCHEDULER}.get_new_batch_prefill", hooks.new_batch_prefill, ("self", "running_batch")),
)

KNOWN: Mapping[str, Version] = {
    "0.5.16": Version(
        "0.5.16",
        (
            *_COMMON,
            Hook(f"{_PREFILL}.can_run_graph", dispatch.prefill_can_run_0_5_16, ("self", "forward_batch")),
            Hook(f"{_ARGS}._generate_decode_cuda_graph_batch_sizes", sizes.decode_sizes_0_5_16, ("self", "max_bs")),
            Hook(f"{_ARGS}._generate_prefill_cuda_graph_batch_sizes", sizes.prefill_sizes_0_5_16, ("self", "max_bs")),
            Hook(
                f"{_BUFFERS}.CudaGraphBufferRegistry.fill_from", padding.fill_from,
                ("self", "forward_batch", "raw_bs", "padded_bs", "raw_num_tokens", "padded_num_tokens"),
            ),
            Hook(
                "sglang.srt.layers.radix_attention.breakable_unified_attention_with_output", padding.attention_0_5_16,
                ("args", "kwargs"),
            ),
            Hook(f"{_ARGS}._disable_breakable_cudagraph_if_incompatible", hooks.mla_rule_0_5_16, ("self",)),
            Hook(
                f"{_VOTES}.prepare_mlp_sync_batch_raw", votes.decode_vote_0_5_16, ("local_batch", "disable_cuda_graph"),
            ),
        ),
    ),
    "0.5.23": Version(
        "0.5.23",
        (
            *_COMMON,
            Hook(f"{_PREFILL}.can_run_graph", dispatch.prefill_can_run, ("self", "forward_batch")),
            Hook(
                f"{_PREFILL}.can_replay_locally",
                dispatch.prefill_can_replay_locally,
                (
                    "self", "batch_size", "num_tokens", "input_embeds", "replace_embeds", "prefix_lens",
                    "is_target_verify", "capture_hidden_mode", "return_logprob",
                ),
            ),
            Hook(f"{_SIZES}.generate_decode_cuda_graph_batch_sizes", sizes.decode_sizes, ("server_args", "max_bs")),
            Hook(
                f"{_LIMIT}.expand_multimodal_decode_graph_to_running_limit", sizes.decode_limit,
                ("server_args", "decode_config", "gpu_mem"),
            ),
            Hook(f"{_SIZES}.generate_prefill_cuda_graph_batch_sizes", sizes.prefill_sizes, ("max_bs",)),
            Hook(f"{_VOTES}._local_decode_cuda_graph_vote", votes.decode_vote, ("local_batch", "disable_cuda_graph")),
            Hook(
                f"{_SETUP}.capture_prefill_graph", hooks.capture_prefill_graph, ("model_runner", "eager_runner"),
            ),
        ),
    ),
}  # fmt: skip


def known(version: str) -> Version | None:
    """The known version that a version string names; a post-release is the version that it mends."""
    return KNOWN.get(version.partition(".post")[0].partition("+")[0])
