"""What the layers of each model family compute, from its config. One function a family, found by `model_type`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kpolicy.attention.fields import Fields
from kpolicy.attention.layers import SLIDING, Layers, choose, dense_kind, full_kind, listed, typed
from kpolicy.attention.support import LayerKind
from kpolicy.errors import SupportError

__all__ = ["FAMILIES", "Family"]

Family = Callable[[Fields], Layers]


def attention(fields: Fields, *, window: str = "never", pattern: int = 1) -> Layers:
    """MHA, GQA or MQA, some or all layers with a sliding window.

    Args:
        fields: the config.
        window: ``never``; ``every`` layer where a window is set; ``upper`` layers, from `max_window_layers` up;
            ``pattern``, all but each n-th.
        pattern: the n of ``pattern``, where the config doesn't give it.
    """
    given = listed(fields)
    if given is not None:
        return given
    full = dense_kind(fields)
    set_window = fields.get("sliding_window", "attention_window_size")
    if window == "never" or not set_window or not fields.flag("use_sliding_window", window != "upper"):
        return ((full,),) * fields.num_layers
    if window == "every":
        return ((SLIDING,),) * fields.num_layers
    if window == "upper":
        first = fields.count("max_window_layers", default=28, least=0)
        return choose(fields, SLIDING, full, lambda index: index >= first)
    letters = fields.get("sliding_window_pattern", "_sliding_window_pattern", "global_attn_every_n_layers")
    if isinstance(letters, str) and letters and set(letters) <= {"L", "G"}:
        return choose(fields, SLIDING, full, lambda index: letters[index % len(letters)] == "L")
    every = fields.count(
        "sliding_window_pattern", "_sliding_window_pattern", "global_attn_every_n_layers", default=pattern
    )
    return choose(fields, SLIDING, full, lambda index: (index + 1) % every != 0)


def _mla(fields: Fields, *, per_layer: int = 1) -> Layers:
    if not fields.has("kv_lora_rank"):
        raise SupportError(f"{fields.name} is a model with MLA, but its config has no kv_lora_rank. Add it.")
    return listed(fields) or ((full_kind(fields),) * per_layer,) * _mla_layers(fields, per_layer)


def _mla_layers(fields: Fields, per_layer: int) -> int:
    # LongCat counts num_layers of two attentions each; num_hidden_layers then counts attentions.
    if per_layer > 1 and not fields.has("num_layers"):
        return fields.num_layers // per_layer
    return fields.count("num_layers", default=0) or fields.num_layers if per_layer > 1 else fields.num_layers


def _sparse(fields: Fields) -> Layers:
    return listed(fields) or ((LayerKind.SPARSE,),) * fields.num_layers


def _deepseek_v4(fields: Fields) -> Layers:
    # Every layer reads compressed or windowed keys through the sparse kernels.
    return ((LayerKind.SPARSE,),) * fields.num_layers


def _minimax_m3(fields: Fields) -> Layers:
    given = listed(fields)
    if given is not None:
        return given
    chosen = fields.section("sparse_attention_config").per_layer("sparse_attention_freq", fields.num_layers)
    if chosen is None:
        return ((dense_kind(fields),),) * fields.num_layers
    return choose(fields, LayerKind.SPARSE, dense_kind(fields), lambda index: bool(chosen[index]))


def _llama4(fields: Fields) -> Layers:
    given = listed(fields)
    if given is not None:
        return given
    full = dense_kind(fields)
    if "attention_chunk_size" in fields.values and not fields.values["attention_chunk_size"]:
        return ((full,),) * fields.num_layers
    # The field's name is inverted in the checkpoints: 1 marks a layer with rotary positions, which is a chunked one.
    marks = fields.per_layer("no_rope_layers") if fields.get("no_rope_layers") else None
    interval = fields.count("no_rope_layer_interval", default=4)
    return choose(
        fields, LayerKind.CHUNKED_LOCAL, full,
        lambda index: bool(marks[index]) if marks is not None else (index + 1) % interval != 0,
    )  # fmt: skip


def _mimo_v2(fields: Fields) -> Layers:
    marks = fields.per_layer("hybrid_layer_pattern")
    if marks is None:
        return attention(fields)
    return choose(fields, SLIDING, dense_kind(fields), lambda index: bool(marks[index]))


def _recurrent(fields: Fields, *, kind: LayerKind) -> Layers:
    return ((kind,),) * fields.num_layers


def _every_nth_full(fields: Fields, *, kind: LayerKind, full: LayerKind | None = None) -> Layers:
    """Recurrent layers with full attention in each n-th (Qwen3-Next, Qwen3.5, OLMo hybrid)."""
    given = listed(fields, kind)
    if given is not None:
        return given
    every = fields.count("full_attention_interval", default=4)
    return choose(fields, kind, full or full_kind(fields), lambda index: (index + 1) % every != 0)


def _kimi_linear(fields: Fields) -> Layers:
    given = listed(fields, LayerKind.GDN)
    if given is not None:
        return given
    linear = fields.section("linear_attn_config")
    if not linear.has("kda_layers"):
        return choose(fields, LayerKind.GDN, full_kind(fields), lambda index: (index + 1) % 4 != 0)
    # Layers count from 1 in these lists.
    sized = Fields({**linear.values, "num_hidden_layers": fields.num_layers})
    kda = sized.indices("kda_layers", base=1)
    full = sized.indices("full_attn_layers", base=1, default=tuple(set(range(fields.num_layers)) - kda))
    if kda & full or len(kda | full) != fields.num_layers:
        raise SupportError(
            f"linear_attn_config of {fields.name} must name each of the {fields.num_layers} layers once, in kda_layers "
            f"or in full_attn_layers."
        )
    return choose(fields, LayerKind.GDN, full_kind(fields), lambda index: index in kda)


def _minimax(fields: Fields) -> Layers:
    given = listed(fields, LayerKind.LINEAR)
    if given is not None:
        return given
    marks = fields.per_layer("attn_type_list")
    if marks is not None:
        return choose(fields, dense_kind(fields), LayerKind.LINEAR, lambda index: bool(marks[index]))
    return choose(fields, dense_kind(fields), LayerKind.LINEAR, lambda index: (index + 1) % 2 == 1)


def _jamba(fields: Fields) -> Layers:
    given = listed(fields, LayerKind.MAMBA)
    if given is not None:
        return given
    period = fields.count("attn_layer_period", default=8)
    offset = fields.count("attn_layer_offset", default=4, least=0)
    if offset >= period:
        raise SupportError(f"attn_layer_offset of {fields.name} is {offset}; it must be less than the period {period}.")
    return choose(fields, dense_kind(fields), LayerKind.MAMBA, lambda index: index % period == offset)


def _bamba(fields: Fields) -> Layers:
    chosen = fields.indices("attn_layer_indices")
    return listed(fields, LayerKind.MAMBA) or choose(
        fields, dense_kind(fields), LayerKind.MAMBA, lambda index: index in chosen
    )


def _zamba(fields: Fields) -> Layers:
    given = listed(fields, LayerKind.MAMBA)
    if given is not None:
        return given
    if not fields.has("hybrid_layer_ids"):
        raise SupportError(f"the config of {fields.name} has neither layers_block_type nor hybrid_layer_ids; add one.")
    hybrid = fields.indices("hybrid_layer_ids")
    both = (LayerKind.MAMBA, dense_kind(fields))
    return tuple(both if index in hybrid else (LayerKind.MAMBA,) for index in range(fields.num_layers))


def _falcon_h1(fields: Fields) -> Layers:
    return ((LayerKind.MAMBA, dense_kind(fields)),) * fields.num_layers


def _nemotron_h(fields: Fields) -> Layers:
    pattern = fields.get("hybrid_override_pattern")
    if pattern is None:
        if not (fields.has("layers_block_type") or fields.has("layer_types")):
            raise SupportError(
                f"the config of {fields.name} has no hybrid_override_pattern or layers_block_type; add one."
            )
        if not fields.has("num_hidden_layers"):
            types = fields.get("layer_types", "layers_block_type")
            return typed(fields, list(types), LayerKind.MAMBA)
        return listed(fields, LayerKind.MAMBA) or ()
    names = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
    if not isinstance(pattern, str) or not set(pattern) <= set(names):
        raise SupportError(f"hybrid_override_pattern of {fields.name} is {pattern!r}; it is made of M, *, - and E.")
    if fields.count("num_hidden_layers", default=len(pattern)) != len(pattern):
        raise SupportError(
            f"hybrid_override_pattern of {fields.name} has {len(pattern)} layers and num_hidden_layers is "
            f"{fields.num_layers}. One of the two is wrong."
        )
    return typed(fields, [names[each] for each in pattern], LayerKind.MAMBA)


def _granite_hybrid(fields: Fields) -> Layers:
    return listed(fields, LayerKind.MAMBA) or ((LayerKind.MAMBA,),) * fields.num_layers


def _lfm2(fields: Fields) -> Layers:
    given = listed(fields)
    if given is not None:
        return given
    full = fields.indices("full_attn_idxs", default=tuple(range(fields.num_layers)))
    return choose(fields, dense_kind(fields), LayerKind.SHORT_CONV, lambda index: index in full)


def _plamo2(fields: Fields) -> Layers:
    step = fields.count("mamba_step", default=2)
    layers = fields.num_layers
    if not fields.flag("mamba_enabled", True):
        return ((dense_kind(fields),),) * layers
    if layers <= step // 2:
        return choose(fields, dense_kind(fields), LayerKind.MAMBA, lambda index: index == layers - 1)
    return choose(fields, dense_kind(fields), LayerKind.MAMBA, lambda index: index % step == step // 2)


def _recurrent_gemma(fields: Fields) -> Layers:
    blocks = fields.get("block_types", "_block_types") or ["recurrent", "recurrent", "attention"]
    kinds = {"recurrent": LayerKind.LINEAR, "attention": SLIDING}
    if not isinstance(blocks, (list, tuple)) or not all(name in kinds for name in map(str, blocks)):
        raise SupportError(f"block_types of {fields.name} is {blocks!r}; it lists 'recurrent' and 'attention'.")
    return tuple((kinds[blocks[index % len(blocks)]],) for index in range(fields.num_layers))


_FULL_ONLY = """
    llama gemma gpt2 gpt_neox gptj gpt_bigcode opt bloom mpt falcon RefinedWeb RefinedWebModel phi stablelm olmo olmo2
    olmoe granite granitemoe granitemoeshared cohere dbrx nemotron glm glm4 glm4_moe glm4v_text glm4v_moe_text chatglm
    mimo ernie4_5 ernie4_5_moe smollm3 apertus arcee seed_oss minicpm persimmon minimax_m2 baichuan internlm internlm2
    internlm3 qwen exaone solar hunyuan_v1_dense hunyuan_v1_moe deepseek xverse bitnet helium nanochat codegen
    gpt_neox_japanese dots1 aquila orion telechat2 jais mllama_text_model qwen2_5_vl_text qwen2_vl_text
    qwen3_vl_text qwen3_vl_moe_text bailing_moe arctic flex_olmo emu3_text_model aria_text xglm
"""

_TABLE: tuple[tuple[str, Family], ...] = (
    (_FULL_ONLY, attention),
    (
        "mistral mixtral phi3 phimoe starcoder2 phi4_multimodal ministral ministral3",
        partial(attention, window="every"),
    ),
    (
        "qwen2 qwen2_moe qwen3 qwen3_moe qwen2_vl qwen2_5_vl qwen2_5_omni_text qwen3_omni_moe_text",
        partial(attention, window="upper"),
    ),
    ("gemma2 gpt_oss vaultgemma", partial(attention, window="pattern", pattern=2)),
    ("cohere2 exaone4 exaone_moe olmo3 afmoe", partial(attention, window="pattern", pattern=4)),
    ("gemma3n_text", partial(attention, window="pattern", pattern=5)),
    ("gemma3 gemma3_text gemma4_text", partial(attention, window="pattern", pattern=6)),
    ("llama4 llama4_text", _llama4),
    ("mimo_v2_flash mimo_v2", _mimo_v2),
    ("deepseek_v2 deepseek_v3 kimi_k2 minicpm3 glm4_moe_lite axk1 youtu pangu_ultra_moe", _mla),
    ("longcat_flash", partial(_mla, per_layer=2)),
    ("deepseek_v32 glm_moe_dsa axk2", _sparse),
    ("deepseek_v4 deepseek_v41", _deepseek_v4),
    ("minimax_m3 minimax_m3_text minimax_m3_vl", _minimax_m3),
    ("mamba mamba2 falcon_mamba", partial(_recurrent, kind=LayerKind.MAMBA)),
    ("rwkv rwkv5 rwkv6 rwkv7", partial(_recurrent, kind=LayerKind.LINEAR)),
    ("jamba", _jamba),
    ("bamba", _bamba),
    ("zamba zamba2", _zamba),
    ("falcon_h1", _falcon_h1),
    ("nemotron_h", _nemotron_h),
    ("granitemoehybrid", _granite_hybrid),
    (
        "qwen3_next qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text olmo_hybrid",
        partial(_every_nth_full, kind=LayerKind.GDN),
    ),
    ("qwen4_exp_text", partial(_every_nth_full, kind=LayerKind.GDN, full=LayerKind.SPARSE)),
    ("kimi_linear glm5_next_text", _kimi_linear),
    ("minimax minimax_text_01 minimax_m1", _minimax),
    ("lfm2 lfm2_moe", _lfm2),
    ("plamo2", _plamo2),
    ("recurrent_gemma", _recurrent_gemma),
)

FAMILIES: dict[str, Family] = {name: family for names, family in _TABLE for name in names.split()}
"""Each known `model_type` and what reads it."""
