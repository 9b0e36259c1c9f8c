"""From a config's fields to the kinds in each layer: what every model family builds on.

Field names and their defaults are those of the model classes of transformers 5.18 and, for models that only vLLM
has, vLLM 0.33.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kpolicy.attention.fields import Fields
from kpolicy.attention.support import LayerKind
from kpolicy.errors import SupportError

__all__ = ["SLIDING", "Layers", "choose", "dense_kind", "full_kind", "heads", "listed", "typed"]

Layers = tuple[tuple[LayerKind, ...], ...]
"""An entry a layer: the kinds of attention or recurrence in it. Empty for a layer of MLP or experts alone, two for one
that runs both."""

SLIDING = LayerKind.SLIDING_WINDOW

_LAYER_TYPES: dict[str, str] = {
    "full_attention": "full",
    "attention": "full",
    "global_attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
    "indexed_attention": "sparse",
    "deepseek_sparse_attention": "sparse",
    "qwen_sparse_attention": "sparse",
    "compressed_sparse_attention": "sparse",
    "heavily_compressed_attention": "sparse",
    "minimax_m3_sparse": "sparse",
    "linear_attention": "recurrent",
    "mamba": "recurrent",
    "mamba2": "recurrent",
    "recurrent": "recurrent",
    "kda": "recurrent",
    "conv": "conv",
    "short_conv": "conv",
    "hybrid": "hybrid",
    "hybrid_sliding": "hybrid_sliding",
    "moe": "none",
    "mlp": "none",
}


_MULTI_QUERY_FLAG = ("falcon", "RefinedWeb", "RefinedWebModel", "gpt_bigcode")
"""Models whose `multi_query`, true unless it is said otherwise, stands for one KV head."""


def heads(fields: Fields) -> tuple[int, int]:
    """(query heads, KV heads).

    Raises:
        SupportError: a count is missing or out of range, or the KV heads don't divide the query heads.
    """
    count = fields.count("num_attention_heads", "n_head", "num_heads", "n_heads")
    nested = fields.section("attn_config")
    if fields.model_type in _MULTI_QUERY_FLAG and not fields.flag("new_decoder_architecture", False):
        kv = 1 if fields.flag("multi_query", True) else count
    elif fields.flag("multi_query_attention", False):
        kv = fields.count("multi_query_group_num")
    else:
        kv = fields.count("num_key_value_heads", "num_kv_heads", "n_head_kv", default=0) or nested.count(
            "kv_n_heads", default=count
        )
    if count % kv:
        raise SupportError(
            f"{fields.name} has {count} attention heads and {kv} key-value heads; the second must divide the first."
        )
    return count, kv


def dense_kind(fields: Fields) -> LayerKind:
    count, kv = heads(fields)
    if kv == count:
        return LayerKind.MHA
    return LayerKind.MQA if kv == 1 else LayerKind.GQA


def full_kind(fields: Fields) -> LayerKind:
    """What a full-attention layer of this model computes."""
    if fields.has("index_topk"):
        return LayerKind.SPARSE
    return LayerKind.MLA if fields.has("kv_lora_rank") else dense_kind(fields)


def typed(fields: Fields, types: list[Any], recurrent: LayerKind | None) -> Layers:
    """Layers from their type names."""
    layers: list[tuple[LayerKind, ...]] = []
    for index, name in enumerate(types):
        role = _LAYER_TYPES.get(str(name))
        if role is None or (recurrent is None and role in ("recurrent", "hybrid", "hybrid_sliding")):
            raise SupportError(
                f"layer {index} of {fields.name} has the type {name!r}, which kpolicy doesn't know for this model. "
                f"Known: {', '.join(sorted(_LAYER_TYPES))}. Give the attention as kinds joined with + instead."
            )
        if role == "none":
            layers.append(())
        elif role == "hybrid" and recurrent is not None:
            layers.append((recurrent, full_kind(fields)))
        elif role == "hybrid_sliding" and recurrent is not None:
            layers.append((recurrent, SLIDING))
        elif role == "recurrent" and recurrent is not None:
            layers.append((recurrent,))
        else:
            layers.append((_FIXED[role] if role in _FIXED else full_kind(fields),))
    return tuple(layers)


_FIXED = {
    "sliding": SLIDING,
    "chunked": LayerKind.CHUNKED_LOCAL,
    "sparse": LayerKind.SPARSE,
    "conv": LayerKind.SHORT_CONV,
}


def listed(fields: Fields, recurrent: LayerKind | None = None) -> Layers | None:
    """Layers from the config's own list of types; None where it has none."""
    for name in ("layer_types", "layers_block_type"):
        types = fields.per_layer(name)
        if types is not None:
            return typed(fields, types, recurrent)
    return None


def choose(fields: Fields, first: LayerKind, second: LayerKind, is_first: Callable[[int], bool]) -> Layers:
    return tuple((first,) if is_first(index) else (second,) for index in range(fields.num_layers))
