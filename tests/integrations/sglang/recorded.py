"""Signatures of what kpolicy hooks, as SGLang's releases have them. `test_oracle.py` holds them to the wheels."""

from __future__ import annotations

SIGNATURES: dict[str, dict[str, str]] = {
    "0.5.16": {
        "DecodeCudaGraphRunner.can_run_graph": "self, forward_batch",
        "PrefillCudaGraphRunner.can_run_graph": "self, forward_batch",
        "resolve_decode_backend": "cuda_graph_runner",
        "resolve_prefill_backend": "cuda_graph_runner",
        "freeze_gc": "enable_cudagraph_gc",
        "ModelRunner.init_cuda_graphs": "self, capture_decode_cuda_graph",
        "Scheduler.get_new_batch_prefill": "self, running_batch",
        "CudaGraphBufferRegistry.fill_from": (
            "self, forward_batch, raw_bs, padded_bs, raw_num_tokens, padded_num_tokens, pp_proxy_tensors"
        ),
        "breakable_unified_attention_with_output": "args, kwargs",
        "ServerArgs._generate_decode_cuda_graph_batch_sizes": "self, max_bs",
        "ServerArgs._generate_prefill_cuda_graph_batch_sizes": "self, max_bs",
        "ServerArgs._disable_breakable_cudagraph_if_incompatible": "self",
        "prepare_mlp_sync_batch_raw": (
            "local_batch, dp_size, attn_tp_size, attn_cp_size, tp_group, get_idle_batch, disable_cuda_graph, "
            "require_mlp_tp_gather, disable_overlap_schedule, offload_tags"
        ),
    },
    "0.5.23": {
        "DecodeCudaGraphRunner.can_run_graph": "self, forward_batch",
        "PrefillCudaGraphRunner.can_run_graph": "self, forward_batch",
        "PrefillCudaGraphRunner.can_replay_locally": (
            "self, batch_size, num_tokens, input_embeds, replace_embeds, prefix_lens, is_target_verify, "
            "capture_hidden_mode, return_logprob, lora_ineligible, is_mixed, batch_max_context_len, contains_mm_inputs"
        ),
        "resolve_decode_backend": "cuda_graph_runner",
        "resolve_prefill_backend": "cuda_graph_runner",
        "freeze_gc": "enable_cudagraph_gc",
        "ModelRunner.init_cuda_graphs": "self, capture_decode_cuda_graph",
        "Scheduler.get_new_batch_prefill": "self, running_batch",
        "generate_decode_cuda_graph_batch_sizes": "server_args, max_bs",
        "generate_prefill_cuda_graph_batch_sizes": "max_bs",
        "expand_multimodal_decode_graph_to_running_limit": "server_args, decode_config, gpu_mem",
        "_local_decode_cuda_graph_vote": "local_batch, disable_cuda_graph",
        "capture_prefill_graph": "model_runner, eager_runner, force_for_draft_worker",
    },
}
