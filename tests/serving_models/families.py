"""A tiny config of each model family that the reference runner holds."""

from __future__ import annotations

from typing import Any

_SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
_LATENT = {
    **_SMALL,
    **_EXPERTS,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "routed_scaling_factor": 1.5,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_SMALL},
    "llama-mqa": {"model_type": "llama", **_SMALL, "num_key_value_heads": 1},
    "qwen2": {"model_type": "qwen2", **_SMALL, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", **_SMALL},
    "mistral": {"model_type": "mistral", **_SMALL, "sliding_window": 6},
    "gpt2": {
        "model_type": "gpt2", "vocab_size": 128, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 256,
        "bos_token_id": None, "eos_token_id": None,
    },
    "gemma2": {
        "model_type": "gemma2", **_SMALL, "pad_token_id": 0, "sliding_window": 6, "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "gemma3": {
        "model_type": "gemma3_text", **_SMALL, "pad_token_id": 0, "sliding_window": 6, "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "qwen3_moe": {"model_type": "qwen3_moe", **_SMALL, **_EXPERTS, "num_experts": 4, "norm_topk_prob": True},
    "mixtral": {"model_type": "mixtral", **_SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": {
        "model_type": "deepseek_v2", **_LATENT, "q_lora_rank": None, "topk_method": "greedy", "n_group": 1,
        "topk_group": 1, "rope_parameters": _YARN,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3", **_LATENT, "q_lora_rank": 20, "n_group": 2, "topk_group": 1,
        "norm_topk_prob": True, "rope_parameters": _YARN,
    },
}  # fmt: skip
"""By the name that tests use."""

LATENT = ("deepseek_v2", "deepseek_v3")
EXPERTS = ("qwen3_moe", "mixtral", *LATENT)
