"""Layer kinds and support of every model family, from configs with the fields that decide."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from kpolicy.attention import AttentionSupport, LayerKind, SupportLevel
from kpolicy.attention import hf as hf_module
from kpolicy.attention.hf import architectures, from_hf_config, layer_kinds, register_architecture
from kpolicy.attention.support import reference_support
from kpolicy.errors import ConfigError, PluginError, SupportError, UnknownArchitectureError, UnknownNameError

SHORT = {LayerKind.SLIDING_WINDOW: "swa", LayerKind.CHUNKED_LOCAL: "local", LayerKind.SHORT_CONV: "conv"}
"""Shorter names for the tables below; other kinds have their own."""


def config(
    model_type: str, num_layers: int = 4, num_heads: int = 8, num_kv_heads: int = 2, **rest: Any
) -> dict[str, Any]:
    """A minimal decoder config."""
    return {
        "model_type": model_type,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        **rest,
    }


def only(model_type: str, **fields: Any) -> dict[str, Any]:
    """A config of these fields alone."""
    return {"model_type": model_type, **fields}


def text(values: object) -> str:
    """Layers in order as runs, for example ``3swa gqa``."""
    runs = [(SHORT.get(kind, kind.value), len(list(same))) for kind, same in groupby(layer_kinds(values))]
    return " ".join(f"{count if count > 1 else ''}{name}" for name, count in runs)


LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
TYPES = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]

FAMILIES = {
    # Whole keys and values, by how many KV heads there are.
    "gqa": (config("llama"), "4gqa"),
    "mha": (config("llama", num_kv_heads=8), "4mha"),
    "mqa": (config("llama", num_kv_heads=1), "4mqa"),
    "no-kv-heads-field": (only("gpt_neox", num_hidden_layers=2, num_attention_heads=4), "2mha"),
    "gpt2": (only("gpt2", n_layer=3, n_head=12), "3mha"),
    "falcon-7b": (only("falcon", num_hidden_layers=2, num_attention_heads=71, multi_query=True), "2mqa"),
    "falcon-40b": (
        only("falcon", num_hidden_layers=2, num_attention_heads=128, num_kv_heads=8, multi_query=True,
             new_decoder_architecture=True), "2gqa"),
    "falcon-rw": (only("falcon", num_hidden_layers=2, num_attention_heads=32, multi_query=False), "2mha"),
    "gpt_bigcode": (only("gpt_bigcode", n_layer=2, n_head=16), "2mqa"),
    "gpt_bigcode-mha": (only("gpt_bigcode", n_layer=2, n_head=16, multi_query=False), "2mha"),
    "chatglm": (
        only("chatglm", num_layers=2, num_attention_heads=32, multi_query_attention=True, multi_query_group_num=2),
        "2gqa"),
    "mpt": (only("mpt", n_layers=2, n_heads=32, attn_config={"kv_n_heads": 8}), "2gqa"),
    # Windows.
    "mistral": (config("mistral", sliding_window=4096), "4swa"),
    "mistral-v0.3": (config("mistral", sliding_window=None), "4gqa"),
    "mixtral": (config("mixtral", sliding_window=None), "4gqa"),
    "phi3": (config("phi3", sliding_window=2047), "4swa"),
    "starcoder2": (config("starcoder2", sliding_window=4096, use_sliding_window=False), "4gqa"),
    "qwen2": (config("qwen2", sliding_window=32768, use_sliding_window=False, max_window_layers=2), "4gqa"),
    "qwen2-windowed": (config("qwen2", sliding_window=32768, use_sliding_window=True, max_window_layers=3), "3gqa swa"),
    "qwen2-no-flag": (config("qwen2", sliding_window=32768, max_window_layers=0), "4gqa"),
    "gemma2": (config("gemma2", sliding_window=4096), "swa gqa swa gqa"),
    "gemma3": (config("gemma3_text", 7, sliding_window=512), "5swa gqa swa"),
    "gemma3-pattern": (config("gemma3_text", sliding_window=512, sliding_window_pattern=2), "swa gqa swa gqa"),
    "gpt_oss": (config("gpt_oss", 2, layer_types=["sliding_attention", "full_attention"]), "swa gqa"),
    "cohere2": (config("cohere2", sliding_window=4096, sliding_window_pattern=4), "3swa gqa"),
    "exaone4": (config("exaone4", sliding_window=4096, sliding_window_pattern="LLLG"), "3swa gqa"),
    "exaone4-small": (config("exaone4", sliding_window=None), "4gqa"),
    "mimo_v2": (config("mimo_v2_flash", hybrid_layer_pattern=[0, 1, 1, 0]), "gqa 2swa gqa"),
    "llama4": (config("llama4_text", 5), "3local gqa local"),
    "llama4-listed": (config("llama4_text", no_rope_layers=[1, 0, 1, 0]), "local gqa local gqa"),
    "llama4-no-chunks": (config("llama4_text", attention_chunk_size=None), "4gqa"),
    # Latent and sparse.
    "deepseek_v2": (config("deepseek_v2", num_kv_heads=8, **LATENT), "4mla"),
    "deepseek_v3": (config("deepseek_v3", num_kv_heads=8, **LATENT), "4mla"),
    "kimi_k2": (config("kimi_k2", num_kv_heads=8, **LATENT), "4mla"),
    "minicpm3": (config("minicpm3", num_kv_heads=8, kv_lora_rank=256), "4mla"),
    "longcat": (only("longcat_flash", num_layers=3, num_attention_heads=8, **LATENT), "6mla"),
    "longcat-derived": (only("longcat_flash", num_hidden_layers=6, num_attention_heads=8, **LATENT), "6mla"),
    "deepseek_v32": (config("deepseek_v32", num_kv_heads=8, index_topk=2048, **LATENT), "4sparse"),
    "deepseek_v3-with-indexer": (config("deepseek_v3", num_kv_heads=8, index_topk=2048, **LATENT), "4sparse"),
    "glm_moe_dsa": (config("glm_moe_dsa", num_kv_heads=8, index_topk=2048, **LATENT), "4sparse"),
    "deepseek_v4": (config("deepseek_v4", num_kv_heads=1, compress_ratios=[0, 4, 128, 4]), "4sparse"),
    "minimax_m3": (
        config("minimax_m3_text", sparse_attention_config={"sparse_attention_freq": [0, 0, 1, 1]}), "2gqa 2sparse"),
    # Recurrences, and mixes of them with attention.
    "mamba": (only("mamba", num_hidden_layers=3), "3mamba"),
    "mamba2": (only("mamba2", num_hidden_layers=3), "3mamba"),
    "falcon_mamba": (only("falcon_mamba", num_hidden_layers=3), "3mamba"),
    "jamba": (config("jamba", 8, attn_layer_period=8, attn_layer_offset=4), "4mamba gqa 3mamba"),
    "bamba": (config("bamba", attn_layer_indices=[1]), "mamba gqa 2mamba"),
    "zamba2": (config("zamba2", 3, 8, 8, layers_block_type=["mamba", "hybrid", "mamba"]), "2mamba mha mamba"),
    "zamba2-ids": (config("zamba2", 3, 8, 8, hybrid_layer_ids=[0]), "mamba mha 2mamba"),
    "falcon_h1": (config("falcon_h1", 2), "mamba gqa mamba gqa"),
    "nemotron_h": (config("nemotron_h", 6, hybrid_override_pattern="M-M*-E"), "2mamba gqa"),
    "nemotron_h-listed": (
        only("nemotron_h", num_attention_heads=8, num_key_value_heads=2,
             layers_block_type=["mamba", "moe", "attention", "mlp"]), "mamba gqa"),
    "granite": (config("granitemoehybrid", layer_types=["mamba", "mamba", "attention", "mamba"]), "2mamba gqa mamba"),
    "qwen3_next": (config("qwen3_next", 8, full_attention_interval=4), "3gdn gqa 3gdn gqa"),
    "qwen3_5": (config("qwen3_5_text", layer_types=TYPES), "3gdn gqa"),
    "qwen4_exp": (config("qwen4_exp_text", 8), "3gdn sparse 3gdn sparse"),
    "olmo_hybrid": (config("olmo_hybrid", layer_types=TYPES), "3gdn gqa"),
    "kimi_linear": (
        config("kimi_linear", num_kv_heads=8, linear_attn_config={"kda_layers": [1, 2, 3], "full_attn_layers": [4]},
               **LATENT), "3gdn mla"),
    "minimax": (config("minimax", layer_types=TYPES), "3linear gqa"),
    "minimax_text_01": (config("minimax_text_01", attn_type_list=[0, 0, 0, 1]), "3linear gqa"),
    "lfm2": (config("lfm2", full_attn_idxs=[2]), "2conv gqa conv"),
    "lfm2-listed": (config("lfm2", 2, layer_types=["conv", "full_attention"]), "conv gqa"),
    "plamo2": (config("plamo2", mamba_step=2), "mamba gqa mamba gqa"),
    "rwkv": (only("rwkv", num_hidden_layers=3), "3linear"),
    "recurrent_gemma": (config("recurrent_gemma", 3, 10, 1, attention_window_size=2048), "2linear swa"),
}  # fmt: skip


@pytest.mark.parametrize(("values", "layers"), FAMILIES.values(), ids=FAMILIES)
def test_layers_of_a_family(values: dict[str, Any], layers: str) -> None:
    """Each family's config gives the kinds of its layers, in order."""
    assert text(values) == layers


@pytest.mark.parametrize("values", [values for values, _ in FAMILIES.values()], ids=FAMILIES)
def test_support_is_the_meet_over_layers(values: dict[str, Any]) -> None:
    """Support is the meet of the layers' reference supports, with an origin for each kind."""
    support = from_hf_config(values)
    kinds = layer_kinds(values)
    assert support == AttentionSupport.meet_all(reference_support(kind) for kind in kinds)
    assert {origin.kind for origin in support.origins} == set(kinds)


@pytest.mark.parametrize(
    ("family", "level", "weakest"),
    [
        ("qwen3_next", "uniform", ["gdn"]),
        ("jamba", "uniform", ["mamba"]),
        ("minimax", "single", ["linear"]),
        ("lfm2", "uniform", ["short_conv"]),
        ("kimi_linear", "uniform", ["gdn", "mla"]),
        ("llama4", "none", ["chunked_local"]),
        ("gemma2", "mixed", []),
    ],
)
def test_limits_of_hybrids_name_the_weakest_layers(family: str, level: str, weakest: list[str]) -> None:
    """A hybrid has its weakest layers' level, and its limits name those layers alone."""
    support = from_hf_config(FAMILIES[family][0])
    assert support.claims.level is SupportLevel(level)
    assert [limit.split()[0] for limit in support.limits] == weakest


def test_backends_replace_references() -> None:
    """Named backends speak for their kinds; the others keep their reference."""
    values = FAMILIES["qwen3_next"][0]
    support = from_hf_config(values, backends={"gdn": "vllm-0.33/GDN_ATTN", LayerKind.MLA: "vllm-0.33/FLASHMLA"})
    assert {(str(origin.kind), origin.backend) for origin in support.origins} == {
        ("gdn", "vllm-0.33/GDN_ATTN"),
        ("gqa", "reference"),
    }
    both = from_hf_config(values, backends={"gdn": "vllm-0.33/GDN_ATTN", "gqa": "vllm-0.33/FLASHINFER[native]"})
    assert both.claims.level is SupportLevel.SINGLE
    assert [limit.split(":")[0] for limit in both.limits] == ["gqa on vllm-0.33/FLASHINFER[native]"]


def test_bad_backends_are_refused() -> None:
    """A kind or backend that doesn't exist, or one that can't run the layers, is an error."""
    values = config("llama")
    with pytest.raises(UnknownNameError, match="did you mean 'gqa'"):
        from_hf_config(values, backends={"gqaa": "vllm-0.33/TRITON_ATTN"})
    with pytest.raises(UnknownNameError, match=r"vllm-0\.33/TRITON_ATTN"):
        from_hf_config(values, backends={"gqa": "vllm-0.33/TRITON_ATN"})
    with pytest.raises(SupportError, match="doesn't run gqa"):
        from_hf_config(values, backends={"gqa": "vllm-0.33/FLASHMLA"})


@pytest.mark.parametrize(
    "values",
    [
        {"model_type": "llava", "text_config": config("llama")},
        {"model_type": "deepseek_vl_v2", "language_config": config("llama")},
        {"model_type": "qwen2_5_omni", "thinker_config": {"text_config": config("llama")}},
        {"model_type": "llama", "text_config": {k: v for k, v in config("llama").items() if k != "model_type"}},
    ],
    ids=["text_config", "language_config", "thinker_config", "outer-model-type"],
)
def test_multimodal_configs_are_read_through(values: dict[str, Any]) -> None:
    """The language model inside a multimodal config decides."""
    assert text(values) == "4gqa"


def test_classes_stand_in_for_a_missing_model_type() -> None:
    """An old config that names only its class is known by it."""
    values = {key: value for key, value in config("").items() if value}
    assert text({**values, "architectures": ["LlamaForCausalLM"]}) == "4gqa"
    assert text({**values, "architectures": ["Qwen3NextForCausalLM"]}) == "3gdn gqa"


def test_configs_come_as_files_directories_and_objects(tmp_path: Path) -> None:
    """A path to config.json, its directory as text, a mapping and an object with to_dict are the same config."""

    class Config:
        def to_dict(self) -> Mapping[str, Any]:
            return config("gemma2", sliding_window=8)

    path = tmp_path / "config.json"
    path.write_text(json.dumps(Config().to_dict()), encoding="utf-8")
    assert text(path) == text(str(tmp_path)) == text(Config()) == text(Config().to_dict()) == "swa gqa swa gqa"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no model config at"),
        (b'{"model_type": "llama", ', "isn't JSON: .* in line 1"),
        (b"[1, 2]", "holds list, not an object"),
        (b"\xff\xfe\x00", "can't be read"),
    ],
    ids=["missing", "cut-short", "a-list", "binary"],
)
def test_unreadable_files_are_named(tmp_path: Path, content: bytes | None, said: str) -> None:
    """A missing, cut, binary or wrong file is an error that names it."""
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(SupportError, match=said) as raised:
        from_hf_config(tmp_path)
    assert str(tmp_path) in str(raised.value)


def test_what_is_no_config_is_refused() -> None:
    """A number or None in place of a config says what a config is."""
    with pytest.raises(SupportError, match="not int"):
        from_hf_config(7)
    with pytest.raises(SupportError, match="not NoneType"):
        from_hf_config(None)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (config("llama", num_heads=32, num_kv_heads=5), "32 attention heads and 5 key-value heads"),
        (config("llama", num_heads=8, num_kv_heads=16), "8 attention heads and 16 key-value heads"),
        (config("llama", num_layers=0), "num_hidden_layers of llama is 0"),
        (config("llama", num_layers="4"), "num_hidden_layers of llama is '4'"),
        (config("llama", num_heads=True), "num_attention_heads of llama is True"),
        (only("llama", num_hidden_layers=2), "no num_attention_heads"),
        (only("llama", num_attention_heads=2), "no num_hidden_layers"),
        (config("gpt_oss", layer_types=["full_attention"]), "1 entries for 4 layers"),
        (config("gpt_oss", layer_types="full_attention"), "must be a list"),
        (config("gpt_oss", layer_types=["full_attention"] * 3 + ["spiral_attention"]), "spiral_attention"),
        (config("gpt_oss", layer_types=["full_attention"] * 3 + ["mamba"]), "layer 3 of gpt_oss has the type 'mamba'"),
        (config("deepseek_v3", num_kv_heads=8), "no kv_lora_rank"),
        (config("jamba", attn_layer_period=4, attn_layer_offset=4), "less than the period 4"),
        (config("nemotron_h", hybrid_override_pattern="M*"), "2 layers and num_hidden_layers is 4"),
        (config("nemotron_h", hybrid_override_pattern="MXM*"), "made of M"),
        (config("nemotron_h"), "no hybrid_override_pattern"),
        (config("nemotron_h", 2, hybrid_override_pattern="-E"), "no layer of this model has attention"),
        (config("zamba2", num_kv_heads=8), "neither layers_block_type nor hybrid_layer_ids"),
        (config("lfm2", full_attn_idxs=[4]), "layers from 0 to 3"),
        (config("kimi_linear", linear_attn_config={"kda_layers": [1, 2], "full_attn_layers": [2, 3, 4]}), "once"),
        (config("minimax_m3", sparse_attention_config=[1]), "must be an object"),
        (config("minimax_text_01", attn_type_list=[0, 1]), "2 entries for 4 layers"),
    ],
)
def test_contradictions_are_named(values: dict[str, Any], said: str) -> None:
    """A config that contradicts itself is an error with the field and both values."""
    with pytest.raises(SupportError, match=said):
        from_hf_config(values)


def test_an_unknown_architecture_says_how_to_declare_it() -> None:
    """The error names the model, its class, the near miss and both ways to declare it."""
    values = {**config("qwen3_nxt"), "architectures": ["Qwen3NxtForCausalLM"]}
    with pytest.raises(UnknownArchitectureError) as raised:
        from_hf_config(values)
    for said in (
        "'qwen3_nxt'",
        "Qwen3NxtForCausalLM",
        "mean 'qwen3_next'",
        '"gdn+gqa"',
        "register_architecture('qwen3_nxt'",
    ):
        assert said in str(raised.value)


def test_a_config_without_any_name_is_unknown() -> None:
    """An empty mapping isn't taken for some default model."""
    with pytest.raises(UnknownArchitectureError):
        from_hf_config({})


@pytest.fixture
def no_registrations(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers doesn't stay."""
    monkeypatch.setattr(hf_module, "_registered", {})


@pytest.mark.usefixtures("no_registrations")
def test_a_registered_architecture_is_known() -> None:
    """A declared model gives its kinds, as names or members, from its own config."""
    register_architecture("mine", lambda values: ["gdn"] * (values["num_hidden_layers"] - 1) + [LayerKind.GQA])
    assert text(config("mine")) == "3gdn gqa"
    assert from_hf_config({"model_type": "outer", "text_config": config("mine")}).claims.level is SupportLevel.UNIFORM
    assert "mine" in architectures()


@pytest.mark.usefixtures("no_registrations")
def test_registering_twice_is_refused() -> None:
    """A taken name is an error, whether kpolicy or a caller has it."""
    register_architecture("mine", lambda _: ["gqa"])
    with pytest.raises(PluginError, match="'mine' is registered already"):
        register_architecture("mine", lambda _: ["mla"])
    with pytest.raises(PluginError, match="'llama' is part of kpolicy"):
        register_architecture("llama", lambda _: ["mla"])


@pytest.mark.usefixtures("no_registrations")
def test_a_registered_kind_that_does_not_exist_is_named() -> None:
    """A misspelt kind in a declaration suggests the near miss."""
    register_architecture("mine", lambda _: ["gqq", *["gqa"] * 3])
    with pytest.raises(UnknownNameError, match="unknown layer kind 'gqq'; did you mean 'gqa'"):
        layer_kinds(config("mine"))


@pytest.mark.usefixtures("no_registrations")
def test_a_registered_layer_may_run_two_kinds_or_none() -> None:
    """As in the families of kpolicy's own: both for a recurrence beside attention, none for a layer of experts."""
    register_architecture("mine", lambda _: [("mamba", "gqa"), (), "gqa", "gqa"])
    assert layer_kinds(config("mine")) == (LayerKind.MAMBA, LayerKind.GQA, LayerKind.GQA, LayerKind.GQA)


@pytest.mark.usefixtures("no_registrations")
def test_a_registered_function_that_leaves_layers_out_is_refused() -> None:
    """What isn't named would limit nothing: a forgotten layer of MLA would allow mixed graphs."""
    register_architecture("mine", lambda _: ["gqa"])
    with pytest.raises(SupportError, match="gives 1 layers and the config has 4"):
        from_hf_config(config("mine"))


@pytest.mark.usefixtures("no_registrations")
def test_a_registered_function_that_fails_is_named() -> None:
    """The error says whose function it was."""
    register_architecture("mine", lambda values: ["gqa"] * values["depth"])
    with pytest.raises(SupportError, match="registered for 'mine' fails with this config: KeyError: 'depth'"):
        layer_kinds(config("mine"))


@pytest.mark.usefixtures("no_registrations")
@pytest.mark.parametrize(("model_type", "kinds"), [("", lambda _: ["mla"]), (None, lambda _: ["mla"]), ("mine", None)])
def test_what_cannot_be_registered_is_refused(model_type: Any, kinds: Any) -> None:
    """An empty name would be that of every config without a model_type."""
    with pytest.raises(ConfigError, match="give the config's model_type and a function"):
        register_architecture(model_type, kinds)


@pytest.mark.parametrize("blocks", [["recurent", "attention"], "recurrent", [7]])
def test_block_types_that_are_not_known_are_refused(blocks: object) -> None:
    """Nothing is guessed: what isn't recurrent isn't therefore a sliding window."""
    with pytest.raises(SupportError, match="it lists 'recurrent' and 'attention'"):
        layer_kinds(config("recurrent_gemma", 3, 10, 1, block_types=blocks))


@pytest.mark.parametrize("given", [5, "LlamaForCausalLM", [None], ["LlamaForCausalLM", 3]])
def test_architectures_are_a_list(given: Any) -> None:
    """A name's letters are no classes."""
    with pytest.raises(SupportError, match=r"architectures is .*; it is a list of class names"):
        from_hf_config({"architectures": given, "num_hidden_layers": 2, "num_attention_heads": 4})


def test_a_backend_that_is_no_name_is_unknown() -> None:
    with pytest.raises(UnknownNameError, match="unknown attention backend '5'"):
        from_hf_config({"model_type": "gpt2", "n_layer": 1, "n_head": 4}, backends={"mha": 5})  # type: ignore[dict-item]
