"""What a config's quantization_config makes of its weights' bits, and what isn't known of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest

from kpolicy.costs import LLAMA_8B, analytic_costs
from kpolicy.errors import ProfileError, SupportError
from kpolicy.figures import config_costs, find_device, kv_room, model_figures
from kpolicy.simulate.cost_models import cost_model
from tests.cli.conftest import write
from tests.test_figures import DEEPSEEK_V3, GPT_OSS_120B, LLAMA_8B_CONFIG

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def groups(*given: dict[str, Any], ignore: tuple[str, ...] = ("lm_head",), method: str = "compressed-tensors") -> Any:
    """A config by groups, as compressed-tensors and modelopt write it."""
    return {
        "quant_method": method, "ignore": list(ignore), "kv_cache_scheme": None,
        "config_groups": {f"group_{i}": {"targets": ["Linear"], **each} for i, each in enumerate(given)},
    }  # fmt: skip


def of(config: dict[str, Any], scheme: Any) -> Any:
    return model_figures({**config, "quantization_config": scheme})


HEAD = 128256 * 4096 + 4096
"""Weights of the 8B model's LM head and last norm"""


def mean(bits: float, *, head: float = 16) -> float:
    """Bits of the 8B model's weights where all but the head have so many."""
    return (HEAD * head + (LLAMA_8B.weight_params - HEAD) * bits) / LLAMA_8B.weight_params


@pytest.mark.parametrize(
    ("scheme", "bits"),
    [
        (FP8, mean(8 + 32 / 128**2)),
        ({"quant_method": "fp8"}, mean(8)),
        (AWQ, mean(4 + (16 + 4) / 128)),
        ({**AWQ, "zero_point": False}, mean(4 + 16 / 128)),
        (GPTQ, mean(4 + (16 + 4) / 128)),
        ({**GPTQ, "bits": 8, "group_size": -1}, mean(8)),
        ({**GPTQ, "lm_head": True}, mean(4 + 20 / 128, head=4 + 20 / 128)),
        (groups({"weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}}), mean(8)),
        (groups({"weights": {"num_bits": 4, "strategy": "group", "group_size": 128, "symmetric": True}}),
         mean(4 + 16 / 128)),
        (groups({"weights": {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}}),
         mean(4 + 20 / 32)),
        (groups({"weights": {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}}), mean(4 + 8 / 16)),
        (groups({"weights": {"num_bits": 8, "strategy": "block", "block_structure": [128, 128]}}),
         mean(8 + 16 / 128**2)),
        (groups({"weights": {"num_bits": 8}}, ignore=()), 8.0),
        (groups({"weights": None, "input_activations": {"num_bits": 8}}), 16.0),
        (groups({"weights": {"num_bits": 8, "type": "float"}}, method="modelopt"), mean(8)),
        (groups({"weights": {"num_bits": 4, "type": "float", "group_size": 16}}, method="modelopt"), mean(4 + 8 / 16)),
    ],
)  # fmt: skip
def test_bits_of_schemes(scheme: Any, bits: float) -> None:
    """Scales and zero points count with the weights that share them; the head stays where the scheme leaves it."""
    figures = of(LLAMA_8B_CONFIG, scheme)
    assert figures.weight_bits == figures.dense_bits == pytest.approx(bits)
    assert figures.weight_params == LLAMA_8B.weight_params


def test_weights_take_what_is_published() -> None:
    """gpt-oss-120b's checkpoint has 60.8 GiB by its model card, its embedding table included."""
    figures = of(GPT_OSS_120B, MXFP4)
    embedding = 2 * GPT_OSS_120B["vocab_size"] * GPT_OSS_120B["hidden_size"]
    assert (figures.weight_bytes + embedding) / 2**30 == pytest.approx(60.8, rel=0.005)
    assert figures.dense_bits > figures.weight_bits  # a token meets few experts, and all of attention and the head


def test_kept_modules() -> None:
    """Attention, MLP, experts and single layers stay in 16 bits by name, glob or pattern; a like name is another's."""
    whole = of(LLAMA_8B_CONFIG, {"quant_method": "fp8"}).weight_bits

    def kept(*names: str) -> float:
        return float(of(LLAMA_8B_CONFIG, {"quant_method": "fp8", "modules_to_not_convert": list(names)}).weight_bits)

    attention, mlp = kept("self_attn"), kept("mlp")
    assert whole < attention < mlp < 16
    assert attention == kept("model.layers.*.self_attn") == kept("re:.*self_attn.*")
    assert attention == kept("language_model.model.layers.*.self_attn.o_proj")
    assert kept("self_attn", "mlp") == pytest.approx(16)
    one = kept("model.layers.1.mlp.down_proj")
    assert whole < one == kept("model.layers.1.mlp") < kept("model.layers.1")
    assert kept("mlp.down") == kept("vision_tower") == kept("model.layers.99") == whole


def test_groups_of_several_widths() -> None:
    """Each part has the bits of the first group that names it."""
    deepseek = groups(
        {"targets": ["re:.*mlp.experts.*"], "weights": {"num_bits": 4}}, {"weights": {"num_bits": 8}}, ignore=()
    )
    figures = of(DEEPSEEK_V3, deepseek)
    assert figures.name == "deepseek_v3 (compressed-tensors, 4 and 8 bits)"
    assert 4 < figures.weight_bits < 4.3
    assert figures.weight_bits < figures.dense_bits < 8
    nvfp4 = groups({"weights": {"num_bits": 4, "type": "float", "group_size": 16}}, method="modelopt")
    assert of(LLAMA_8B_CONFIG, nvfp4).name == "llama (modelopt, 4 bits)"
    experts = of(DEEPSEEK_V3, {**FP8, "expert_dtype": "fp4", "scale_fmt": "ue8m0"})
    assert 4.25 < experts.weight_bits < 4.6


@pytest.mark.parametrize(
    ("scheme", "what"),
    [
        ({"quant_method": "quark"}, "quark"),
        ({"load_in_4bit": True}, "a scheme without a name"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors without config_groups"),
        ({"quant_method": "compressed-tensors", "config_groups": {"W8A8": ["Linear"]}},
         "compressed-tensors by a preset"),
        ({**FP8, "expert_dtype": "fp6"}, "fp8 with experts of fp6"),
    ],
)  # fmt: skip
def test_unknown_schemes_are_named(scheme: Any, what: str) -> None:
    """Weights count as 16 bits, and the table's name and a note say so."""
    figures = of(LLAMA_8B_CONFIG, scheme)
    assert figures.weight_bits == 16
    assert figures.name == f"llama ({what} counted as 16 bits)"
    assert any(f"how many bits {what} keeps a weight in isn't known" in note for note in figures.notes)


@pytest.mark.parametrize(
    ("scheme", "said"),
    [
        ("fp8", "quantization_config of llama is 'fp8'"),
        ({**AWQ, "bits": "four"}, "bits of llama quantization_config is 'four'"),
        ({**GPTQ, "group_size": 1.5}, "group_size of llama quantization_config is 1.5"),
        ({**FP8, "weight_block_size": "128"}, "weight_block_size of llama quantization_config is '128'"),
        ({**FP8, "weight_block_size": []}, "it is two whole numbers"),
        ({**FP8, "weight_block_size": [1, 2, 3]}, "it is two whole numbers"),
        ({**AWQ, "bits": 128}, "bits of llama quantization_config is 128; quantized weights have at most 16"),
        ({**FP8, "modules_to_not_convert": "lm_head"}, "are 'lm_head'; they are a list of names"),
        ({**FP8, "modules_to_not_convert": ["re:("]}, "has a pattern that can't be read"),
        (groups({"weights": {"num_bits": 8}, "targets": ["re:("]}), "has a pattern that can't be read"),
        (groups({"weights": {"num_bits": 0}}), "num_bits of llama quantization_config group_0 weights is 0"),
        (groups({"weights": {"num_bits": 8}, "targets": "Linear"}), "targets of group_0 of llama .* are 'Linear'"),
    ],
)  # fmt: skip
def test_fields_that_cannot_be_used(scheme: Any, said: str) -> None:
    """A scheme that is known and says what can't be is an error that names the field."""
    with pytest.raises(SupportError, match=said):
        of(LLAMA_8B_CONFIG, scheme)


def test_notes_say_what_is_not_counted() -> None:
    """Arithmetic in 16 bits, KV by a scheme, sparsity; a config in 16 bits has none."""
    assert model_figures(LLAMA_8B_CONFIG).notes == ()
    (note,) = of(LLAMA_8B_CONFIG, FP8).notes
    assert "8.56 bits each in the mean" in note
    assert "arithmetic is costed in 16 bits" in note
    notes = of(LLAMA_8B_CONFIG, {**FP8, "kv_cache_scheme": {"num_bits": 8}, "sparsity_config": {"format": "2:4"}}).notes
    assert any("KV counts as 16 bits" in note for note in notes)
    assert any("sparsity" in note for note in notes)


def test_a_multimodal_config_has_its_scheme_beside_its_language_model() -> None:
    """It counts for the language model, wherever it stands, and a config object's too."""
    nested = {"model_type": "llava", "vision_config": {}, "text_config": LLAMA_8B_CONFIG, "quantization_config": FP8}
    assert model_figures(nested) == of(LLAMA_8B_CONFIG, FP8)
    inner = {**LLAMA_8B_CONFIG, "quantization_config": FP8}
    assert model_figures({"model_type": "llava", "text_config": inner}) == of(LLAMA_8B_CONFIG, FP8)


def test_costs_and_room_go_by_the_bits(tmp_path: Path) -> None:
    """Steps that read weights take less, those that compute the same; KV has the room that weights leave."""
    config = {**LLAMA_8B_CONFIG, "quantization_config": AWQ}
    plain, awq = config_costs(LLAMA_8B_CONFIG), config_costs(config)
    assert awq.version == "analytic-1:llama (awq, 4 bits):H200 (published figures)"
    read_us = LLAMA_8B.weight_params * (16 - model_figures(config).weight_bits) / 8 / (0.7 * 4.8e6)
    assert plain.full.at(1) - awq.full.at(1) == pytest.approx(read_us)
    assert plain.full.at(1024) == awq.full.at(1024)
    h200 = find_device("H200")
    more = kv_room(model_figures(config), h200) - kv_room(model_figures(LLAMA_8B_CONFIG), h200)
    assert more * LLAMA_8B.kv_bytes_per_token == pytest.approx(read_us * 0.7 * 4.8e6, rel=1e-4)
    file = write(tmp_path / "config.json", json.dumps(config))
    assert any("bits each in the mean" in note for note in cost_model(config=file).notes)


def test_bits_that_cannot_be() -> None:
    """Figures of one's own are checked, too."""
    assert analytic_costs(attrs.evolve(LLAMA_8B, weight_bits=8.0, dense_bits=8.0)).full.at(1) < 3000
    for bits in (0, -1, 65, float("nan"), "16", True):
        with pytest.raises(ProfileError, match="weight_bits of 8B GQA decoder is"):
            attrs.evolve(LLAMA_8B, weight_bits=bits)
