"""Figures of models against the parameter counts their publishers give."""

from __future__ import annotations

from typing import Any

import pytest

from kpolicy.costs import LLAMA_8B
from kpolicy.errors import SupportError, UnknownNameError
from kpolicy.figures import DEVICES, config_costs, find_device, kv_room, model_figures

LLAMA_8B_CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip
QWEN_05B: dict[str, Any] = {
    "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
LLAMA_1B: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True,
}  # fmt: skip
DEEPSEEK_V2_LITE: dict[str, Any] = {
    "model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408,
    "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512,
    "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64,
    "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "vocab_size": 102400,
}  # fmt: skip
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "kv_lora_rank": 512,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "moe_layer_freq": 1,
    "vocab_size": 129280,
}  # fmt: skip
MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
    "vocab_size": 32000,
}  # fmt: skip
QWEN3_30B: dict[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
    "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 151936,
}  # fmt: skip
QWEN3_NEXT: dict[str, Any] = {
    "model_type": "qwen3_next", "hidden_size": 2048, "intermediate_size": 5120, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "num_hidden_layers": 48, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 512,
    "num_experts_per_tok": 10, "decoder_sparse_step": 1, "full_attention_interval": 4, "vocab_size": 151936,
}  # fmt: skip
JAMBA: dict[str, Any] = {
    "model_type": "jamba", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "attn_layer_period": 8, "attn_layer_offset": 4,
    "expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 16, "num_experts_per_tok": 2,
    "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 256, "vocab_size": 65536,
}  # fmt: skip
MAMBA2: dict[str, Any] = {
    "model_type": "mamba2", "hidden_size": 2560, "num_hidden_layers": 64, "state_size": 128, "num_heads": 80,
    "head_dim": 64, "expand": 2, "n_groups": 1, "vocab_size": 50288, "tie_word_embeddings": True,
}  # fmt: skip
LFM2: dict[str, Any] = {
    "model_type": "lfm2", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "block_ff_dim": 12288, "conv_L_cache": 3, "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "vocab_size": 65536, "tie_word_embeddings": True,
}  # fmt: skip
GPT_OSS_120B: dict[str, Any] = {
    "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 128,
    "num_experts_per_tok": 4, "sliding_window": 128, "vocab_size": 201088,
}  # fmt: skip


# Published totals count the embedding table, once where it is tied to the LM head.
@pytest.mark.parametrize(
    ("config", "total"),
    [
        (LLAMA_8B_CONFIG, 8_030_261_248),
        (QWEN_05B, 494_032_768),
        (LLAMA_1B, 1_235_814_400),
        (DEEPSEEK_V2_LITE, 15.7e9),
        (DEEPSEEK_V3, 671e9),
        (MIXTRAL, 46.7e9),
        (QWEN3_30B, 30.5e9),
        (QWEN3_NEXT, 80e9),
        (JAMBA, 51.6e9),
        (MAMBA2, 2.7e9),
        (LFM2, 1.17e9),
        (GPT_OSS_120B, 116.8e9),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else None,
)
def test_weights_match_published_counts(config: dict[str, Any], total: float) -> None:
    """All weights, plus the embedding table where it isn't the LM head, are within 3% of the published count."""
    embedding = 0 if config.get("tie_word_embeddings") else config["vocab_size"] * config["hidden_size"]
    assert model_figures(config).weight_params + embedding == pytest.approx(total, rel=0.03)


@pytest.mark.parametrize(
    ("config", "active"),
    [(DEEPSEEK_V2_LITE, 2.4e9), (DEEPSEEK_V3, 37e9), (MIXTRAL, 12.9e9), (GPT_OSS_120B, 5.1e9)],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else None,
)
def test_active_weights_match_published_counts(config: dict[str, Any], active: float) -> None:
    """Weights that a token passes through, LM head included, are within 3% of the published active count."""
    assert model_figures(config).dense_params == pytest.approx(active, rel=0.03)


def test_the_default_figures_are_those_of_the_8b_config() -> None:
    """The analytic table's default model is what its config gives, number by number."""
    figures = model_figures(LLAMA_8B_CONFIG)
    assert figures.dense_params == figures.weight_params == LLAMA_8B.dense_params
    assert figures.kv_bytes_per_token == LLAMA_8B.kv_bytes_per_token
    assert figures.attention_flops_per_pair == LLAMA_8B.attention_flops_per_pair
    assert figures.num_layers == LLAMA_8B.num_layers


def test_latent_kv_is_one_compressed_vector_a_layer() -> None:
    """MLA keeps the latent and the rotary key of each layer, whatever its heads."""
    assert model_figures(DEEPSEEK_V2_LITE).kv_bytes_per_token == 27 * (512 + 64) * 2


def test_recurrent_layers_keep_no_kv() -> None:
    """Only the attention layers of a hybrid keep KV, and a pure recurrence keeps none."""
    assert model_figures(JAMBA).kv_bytes_per_token == 4 * (2 * 8 * 128) * 2
    assert model_figures(QWEN3_NEXT).kv_bytes_per_token == 12 * (2 * 2 * 256) * 2
    assert model_figures(MAMBA2).kv_bytes_per_token == 0
    assert model_figures(MAMBA2).attention_flops_per_pair == 0


def test_nested_text_config_is_counted() -> None:
    """A multimodal config's figures are those of its language model."""
    nested = {"model_type": "llava", "vision_config": {}, "text_config": LLAMA_8B_CONFIG}
    assert model_figures(nested) == model_figures(LLAMA_8B_CONFIG)


def test_models_of_unknown_layout_are_refused() -> None:
    """A model whose weights can't be counted is an error that names the next step, not a guess."""
    rwkv = {"model_type": "rwkv", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100}
    with pytest.raises(SupportError, match="give kpolicy"):
        model_figures(rwkv)


def test_more_active_experts_than_experts_are_refused() -> None:
    """A router that picks more experts than there are contradicts the config."""
    with pytest.raises(SupportError, match="9 of 8 experts"):
        model_figures({**MIXTRAL, "num_experts_per_tok": 9})


def test_a_missing_size_is_named() -> None:
    """A config without its vocabulary says which field is missing."""
    config = {key: value for key, value in LLAMA_8B_CONFIG.items() if key != "vocab_size"}
    with pytest.raises(SupportError, match="vocab_size"):
        model_figures(config)


def test_devices_are_found_however_they_are_spelt() -> None:
    """Case and punctuation don't matter; a near miss is suggested."""
    assert find_device("ascend-910b") is DEVICES["Ascend 910B"] is find_device("Ascend910B")
    with pytest.raises(UnknownNameError, match="did you mean 'H100'"):
        find_device("h10")


@pytest.mark.parametrize("name", DEVICES)
def test_devices_have_a_source_and_give_costs(name: str) -> None:
    """Every device says where its figures are from, and a model's large steps take what its throughput allows."""
    device = DEVICES[name]
    assert device.source
    costs = config_costs(LLAMA_8B_CONFIG, name)
    assert device.figures.name in costs.version
    assert not costs.measured
    least_us = 2 * LLAMA_8B.dense_params * 16384 / device.figures.flops_per_us
    assert least_us < costs.eager.at(16384) < 2 * least_us


def test_room_for_kv_is_memory_less_weights() -> None:
    """An H100 of 80 GB has 90% of it, less 15 GB of weights and 3 GB, at 131,072 bytes a token."""
    figures = model_figures(LLAMA_8B_CONFIG)
    assert kv_room(figures, DEVICES["H100"]) == (72 * 10**9 - 2 * figures.weight_params - 3 * 10**9) // 131_072
    assert kv_room(model_figures(DEEPSEEK_V3), DEVICES["H200"]) == 0
