"""Figures without a measurement: of a model, from its Hugging Face config, and of devices, as published.

`model_figures`: how many weights a step reads and in how many bits, and what a token's KV takes, in bf16.

Parameters are counted matrix by matrix from the config, as the model classes of transformers lay them out. The
embedding table is left out, since a token reads one row of it; the LM head counts, tied or not, since it is read
whole. Vision and audio towers and draft (MTP) layers aren't counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import attrs

from kpolicy.attention.fields import Fields, read_config
from kpolicy.attention.hf import layers_of
from kpolicy.attention.layers import heads
from kpolicy.attention.support import LayerKind
from kpolicy.costs import H200, CostTable, DeviceFigures, ModelFigures, analytic_costs
from kpolicy.errors import SupportError, UnknownNameError
from kpolicy.quantized import Scheme, read_scheme

__all__ = ["DEVICES", "NamedDevice", "config_costs", "find_device", "kv_room", "model_figures"]


@attrs.frozen(kw_only=True)
class NamedDevice:
    """A device as its publisher describes it. Nothing here was measured, and the host costs are those of an H200's.

    Args:
        figures: bandwidth and throughput in bf16 (fp16 where there is no bf16 figure).
        memory_bytes: device memory.
        source: where the figures are from.
    """

    figures: DeviceFigures
    memory_bytes: int
    source: str


def _device(name: str, tb_per_s: float, tflops: float, gigabytes: int, source: str) -> NamedDevice:
    figures = DeviceFigures(name=f"{name} (published figures)", bytes_per_us=tb_per_s * 1e6, flops_per_us=tflops * 1e6)
    return NamedDevice(figures=figures, memory_bytes=gigabytes * 10**9, source=source)


DEVICES: Mapping[str, NamedDevice] = MappingProxyType(
    {
        "H200": NamedDevice(figures=H200, memory_bytes=141 * 10**9, source="NVIDIA's H200 data sheet (SXM)"),
        "H100": _device("H100", 3.35, 989, 80, "NVIDIA's H100 data sheet (SXM, 80 GB)"),
        "A100": _device("A100", 2.039, 312, 80, "NVIDIA's A100 data sheet (SXM, 80 GB)"),
        "B200": _device("B200", 7.7, 2250, 180, "NVIDIA's Blackwell data sheet (a GPU of an HGX B200)"),
        "Ascend 910B": _device(
            "Ascend 910B", 1.6, 313, 64,
            "accounts by others (Huawei has no data sheet of it), which differ: fp16 280 to 376 TFLOPS by variant, and "
            "0.4 to 1.6 TB/s",
        ),
        "Kunlun P800": _device(
            "Kunlun P800", 1.6, 345, 96,
            "fp16 throughput by press reports, 96 GB by users of the OAM module; the bandwidth isn't published, and "
            "1.6 TB/s is assumed",
        ),
    }
)  # fmt: skip
"""Devices by name, with published figures; all unverified here."""

_KV_SHARE = 0.9
"""Share of device memory that serving engines take by default."""
_WORKSPACE = 3 * 10**9
"""Bytes for activations and workspaces."""
_ANOTHER = (
    "These are published figures; for another device, this machine's too, measure a profile (`kpolicy calibrate`), and "
    "give --profile."
)


def find_device(name: str) -> NamedDevice:
    """The device of that name, however it is spelt: ``h200``, ``ascend-910b``.

    Raises:
        UnknownNameError: there is no such device; DeviceFigures and a profile take any.
    """
    wanted = "".join(letter for letter in str(name).lower() if letter.isalnum())
    for known, device in DEVICES.items():
        if wanted == "".join(letter for letter in known.lower() if letter.isalnum()):
            return device
    raise UnknownNameError("device", name, DEVICES, _ANOTHER)


def config_costs(config: object, device: str = "H200") -> CostTable:
    """The analytic cost table of a model's config on a named device; raises as `model_figures` and `find_device`."""
    return analytic_costs(model_figures(config), find_device(device).figures)


def kv_room(model: ModelFigures, device: NamedDevice) -> int:
    """KV tokens that a device has room for beside the weights: 90% of memory, less weights and 3 GB; 0 for none.

    Raises:
        SupportError: the model has no KV that grows, so tokens don't bound it.
    """
    if not model.kv_bytes_per_token:
        raise SupportError(f"{model.name} has no KV that grows with tokens; say the capacity in tokens yourself.")
    left = int(device.memory_bytes * _KV_SHARE) - int(model.weight_bytes) - _WORKSPACE
    return max(left // model.kv_bytes_per_token, 0)


_BYTES = 2
"""A bf16 number."""


class _Part(NamedTuple):
    """Weights of one part of the model, which a checkpoint keeps alike."""

    weights: int
    used: int
    """Those that a token passes through"""
    modules: tuple[str, ...] = ()
    """What they are called, as of one layer; none for what no scheme quantizes"""


_HEAD = ("lm_head",)
_ATTENTION = ("self_attn.o_proj", "attention.o_proj", "attn.c_proj")
_RECURRENCE = ("linear_attn.out_proj", "mixer.out_proj", "mamba.out_proj", "conv.out_proj")
_MLP = ("mlp.down_proj", "feed_forward.down_proj", "feed_forward.w2", "mlp.c_proj")
_EXPERTS = ("mlp.experts.0.down_proj", "block_sparse_moe.experts.0.w2", "feed_forward.experts.0.w2")
_SHARED = ("mlp.shared_experts.down_proj", "mlp.shared_expert.down_proj", "feed_forward.shared_expert.down_proj")

_DENSE = frozenset(
    {LayerKind.MHA, LayerKind.GQA, LayerKind.MQA, LayerKind.SLIDING_WINDOW, LayerKind.CHUNKED_LOCAL},
)
_UNGATED_NAMES = (
    "gpt2 gpt_neox gptj gpt_bigcode opt bloom mpt falcon phi starcoder2 nemotron nemotron_h persimmon codegen"
)
_UNGATED = frozenset(_UNGATED_NAMES.split())
"""Models whose MLP is two matrices; the others' has a third that gates."""
_NO_MLP = frozenset({"mamba", "mamba2", "falcon_mamba"})
_UNKNOWN_NAMES = (
    "rwkv rwkv5 rwkv6 rwkv7 recurrent_gemma zamba zamba2 deepseek_v4 deepseek_v41 plamo2 minicpm3 gemma3n_text "
    "longcat_flash dbrx arctic glm5_next_text qwen4_exp_text"
)
_UNKNOWN_LAYOUT = frozenset(_UNKNOWN_NAMES.split())


def model_figures(config: object) -> ModelFigures:
    """The figures that a model's cost depends on.

    Weights have the bits that `quantization_config` says; see `kpolicy.quantized`.

    Sliding windows, chunks and sparse selection aren't taken off `kv_bytes_per_token` and `attention_flops_per_pair`:
    for such models both are upper bounds. Recurrent layers have no KV that grows, and count 0 in both.

    Args:
        config: a mapping, an object with `to_dict()`, a path to a ``config.json`` or to a directory holding one.

    Raises:
        SupportError: the config can't be read, contradicts itself, or is of a model whose weights aren't known here.
        UnknownArchitectureError: nobody declared the architecture.
    """
    values = read_config(config)
    fields = Fields(values)
    layers, scheme = layers_of(fields), read_scheme(values, fields)
    if fields.model_type in _UNKNOWN_LAYOUT:
        raise SupportError(
            f"kpolicy doesn't know how the weights of {fields.name} are laid out; give kpolicy.costs.ModelFigures."
        )
    hidden = fields.count("hidden_size", "n_embd", "d_model")
    head = hidden * fields.count("vocab_size") + hidden
    parts = [_Part(head, head, _HEAD)]
    kv_numbers = pair_flops = 0
    for index, kinds in enumerate(layers):
        for kind in kinds:
            weights = _mixer(fields, kind, hidden)
            parts.append(_in_layer(index, _Part(weights, weights, _RECURRENCE if kind in _RECURRENT else _ATTENTION)))
            numbers, flops = _per_token(fields, kind, hidden)
            kv_numbers += numbers
            pair_flops += flops
        parts += [_in_layer(index, part) for part in _feed_forward(fields, index, kinds, hidden)]
    total, active = sum(part.weights for part in parts), sum(part.used for part in parts)
    bits = [scheme.bits(part.modules) for part in parts]
    weight_bits = sum(each * part.weights for each, part in zip(bits, parts, strict=True)) / total
    return ModelFigures(
        name=f"{fields.name} ({scheme.name})" if scheme.name else fields.name,
        num_layers=len(layers),
        dense_params=active,
        weight_params=total,
        kv_bytes_per_token=_BYTES * kv_numbers,
        attention_flops_per_pair=pair_flops,
        weight_bits=weight_bits,
        dense_bits=sum(each * part.used for each, part in zip(bits, parts, strict=True)) / active,
        notes=(*_counted(weight_bits, scheme), *scheme.notes),
    )


def _in_layer(index: int, part: _Part) -> _Part:
    return part._replace(modules=tuple(f"layers.{index}.{each}" for each in part.modules))


def _counted(weight_bits: float, scheme: Scheme) -> tuple[str, ...]:
    """What is said of costs by a scheme that is known."""
    if not scheme.groups:
        return ()
    return (
        f"weights take {weight_bits:.3g} bits each in the mean, by quantization_config ({scheme.name}); arithmetic is "
        "costed in 16 bits, whatever activations are, and unpacking weights as free",
    )


def _head_dim(fields: Fields, hidden: int) -> int:
    return fields.count("head_dim", "attention_head_dim", default=hidden // heads(fields)[0])


def _mixer(fields: Fields, kind: LayerKind, hidden: int) -> int:
    """Weights of one attention or recurrence, with its norm."""
    if kind in _DENSE:
        return _dense_attention(fields, hidden) + hidden
    if kind in (LayerKind.MLA, LayerKind.SPARSE) and fields.has("kv_lora_rank"):
        return _mla(fields, hidden) + hidden
    if kind is LayerKind.SPARSE:
        return _dense_attention(fields, hidden) + hidden
    return _RECURRENT[kind](fields, hidden) + hidden


def _dense_attention(fields: Fields, hidden: int) -> int:
    count, kv = heads(fields)
    dim = _head_dim(fields, hidden)
    query, key_value = count * dim, kv * dim
    # Qwen3-Next and Qwen3.5 project an output gate beside the query.
    gate = query if fields.flag("attn_output_gate", fields.model_type == "qwen3_next") else 0
    weights = hidden * (query + gate + 2 * key_value) + query * hidden
    qwen2 = fields.model_type.startswith("qwen2")
    if fields.flag("attention_bias", False) or fields.flag("qkv_bias", qwen2):
        weights += query + 2 * key_value
    return weights


def _mla(fields: Fields, hidden: int) -> int:
    count, _ = heads(fields)
    rank, rope = fields.count("kv_lora_rank"), fields.count("qk_rope_head_dim")
    nope, value = fields.count("qk_nope_head_dim"), fields.count("v_head_dim")
    query = count * (nope + rope)
    query_rank = fields.count("q_lora_rank", default=0)
    weights = hidden * query if not query_rank else hidden * query_rank + query_rank + query_rank * query
    weights += hidden * (rank + rope) + rank + rank * count * (nope + value) + count * value * hidden
    if fields.has("index_topk"):
        index_heads, index_dim = fields.count("index_n_heads"), fields.count("index_head_dim")
        weights += (query_rank or hidden) * index_heads * index_dim + hidden * (index_dim + index_heads)
    return weights


def _gdn(fields: Fields, hidden: int) -> int:
    if fields.model_type == "kimi_linear":
        linear = fields.section("linear_attn_config")
        width = linear.count("num_heads") * linear.count("head_dim")
        # q, k, v, their convolutions, the output, and two low-rank gates.
        low_rank = 2 * linear.count("head_dim") * (hidden + width)
        return 4 * hidden * width + 3 * width * linear.count("short_conv_kernel_size", default=4) + low_rank
    key_heads, value_heads = fields.count("linear_num_key_heads"), fields.count("linear_num_value_heads")
    keys = key_heads * fields.count("linear_key_head_dim")
    values = value_heads * fields.count("linear_value_head_dim")
    convolved = 2 * keys + values
    weights = hidden * (convolved + values) + hidden * 2 * value_heads
    return weights + convolved * fields.count("linear_conv_kernel_dim", default=4) + values * hidden


def _mamba(fields: Fields, hidden: int) -> int:
    state = fields.count("mamba_d_state", "ssm_state_size", "state_size", default=16)
    kernel = fields.count("mamba_d_conv", "conv_kernel", default=4)
    num_heads = fields.count("mamba_n_heads", "mamba_num_heads", default=0)
    if not num_heads and fields.model_type == "mamba2":
        num_heads = fields.count("num_heads", default=128)
    inner = fields.count("mamba_d_ssm", "intermediate_size_ssm", default=0) or hidden * fields.count(
        "mamba_expand", "expand", default=2
    )
    if not num_heads:
        rank = fields.get("mamba_dt_rank", "time_step_rank")
        rank = rank if isinstance(rank, int) else -(-hidden // 16)
        return (
            hidden * 2 * inner + inner * kernel + inner * (rank + 2 * state) + rank * inner + inner * (state + hidden)
        )
    head_dim = fields.count("mamba_d_head", "mamba_head_dim", default=inner // num_heads)
    inner = num_heads * head_dim
    groups = fields.count("mamba_n_groups", "n_groups", default=1)
    convolved = inner + 2 * groups * state
    return hidden * (inner + convolved + num_heads) + convolved * kernel + 3 * num_heads + inner * (hidden + 1)


def _linear(fields: Fields, hidden: int) -> int:
    # Lightning attention: q, k, v, an output gate and the output, all of full width.
    return 5 * hidden * heads(fields)[0] * _head_dim(fields, hidden)


def _short_conv(fields: Fields, hidden: int) -> int:
    return 4 * hidden * hidden + hidden * fields.count("conv_L_cache", default=3)


_RECURRENT: dict[LayerKind, Callable[[Fields, int], int]] = {
    LayerKind.GDN: _gdn,
    LayerKind.MAMBA: _mamba,
    LayerKind.LINEAR: _linear,
    LayerKind.SHORT_CONV: _short_conv,
}


def _per_token(fields: Fields, kind: LayerKind, hidden: int) -> tuple[int, int]:
    """(numbers of KV a token, operations a query-key pair) of one attention."""
    if kind in _RECURRENT:
        return 0, 0
    count, kv = heads(fields)
    if kind in (LayerKind.MLA, LayerKind.SPARSE) and fields.has("kv_lora_rank"):
        rope = fields.count("qk_rope_head_dim")
        # Pairs are counted for prefill, where keys and values are expanded.
        per_head = fields.count("qk_nope_head_dim") + rope + fields.count("v_head_dim")
        return fields.count("kv_lora_rank") + rope, 2 * count * per_head
    dim = _head_dim(fields, hidden)
    return 2 * kv * dim, 4 * count * dim


def _feed_forward(fields: Fields, index: int, kinds: tuple[LayerKind, ...], hidden: int) -> list[_Part]:
    """One layer's MLP or experts, with their norm."""
    if fields.model_type in _NO_MLP or (fields.model_type == "nemotron_h" and kinds):
        return []
    matrices = 2 if fields.model_type in _UNGATED else 3
    experts = fields.count("n_routed_experts", "num_local_experts", "num_experts", default=0, least=0)
    if experts < 2 or not _has_experts(fields, index):
        width = fields.count("intermediate_size_mlp", "dense_intermediate_size", default=0) or fields.count(
            "intermediate_size", "block_ff_dim", "ffn_hidden_size", "n_inner", default=4 * hidden
        )
        if fields.model_type == "granitemoehybrid":
            width = fields.count("shared_intermediate_size", default=width)
        if fields.model_type == "lfm2" and fields.flag("block_auto_adjust_ff_dim", True):
            multiple = fields.count("block_multiple_of", default=256)
            width = -(-int(2 * width / 3) // multiple) * multiple
        weights = matrices * hidden * width + hidden
        return [_Part(weights, weights, _MLP)]
    expert = matrices * hidden * fields.count("moe_intermediate_size", "intermediate_size")
    shared = fields.count(
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
        "moe_shared_expert_intermediate_size",
        default=fields.count("intermediate_size") if fields.model_type.startswith("llama4") else 0,
        least=0,
    )
    shared_weights = matrices * hidden * shared + hidden if shared else 0
    if not shared:
        shared_weights = expert * fields.count("n_shared_experts", "num_shared_experts", default=0, least=0)
    used = fields.count("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
    if used > experts:
        raise SupportError(f"{fields.name} routes a token to {used} of {experts} experts. One of the two is wrong.")
    # The router, and a norm.
    around = hidden * experts + hidden
    return [
        _Part(around, around), _Part(shared_weights, shared_weights, _SHARED),
        _Part(experts * expert, used * expert, _EXPERTS),
    ]  # fmt: skip


def _has_experts(fields: Fields, index: int) -> bool:
    """Whether the layer has experts in place of one MLP, in a model that has experts."""
    types = fields.per_layer("mlp_layer_types")
    if types is not None:
        return bool(types[index] == "sparse")
    frequency = fields.get("moe_layer_freq")
    if isinstance(frequency, (list, tuple)):
        listed = fields.per_layer("moe_layer_freq")
        return bool(listed and listed[index])
    if index < fields.count("first_k_dense_replace", "num_dense_layers", default=0, least=0):
        return False
    if fields.has("expert_layer_period"):
        return index % fields.count("expert_layer_period") == fields.count("expert_layer_offset", default=0, least=0)
    if index in fields.indices("mlp_only_layers"):
        return False
    step = fields.count("moe_layer_freq", "decoder_sparse_step", "interleave_moe_layer_step", default=1)
    return index % step == 0 if fields.has("moe_layer_freq") else (index + 1) % step == 0
