"""Experts of transformers' models on kernels of ours: which layers they take, and that nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kpolicy.serving.experts import EXPERTS_NAME, THEIRS, take_experts, takes_ours  # noqa: E402
from kpolicy.serving.load import load  # noqa: E402
from kpolicy.serving.plain_kernels import PlainKernels  # noqa: E402
from tests.serving_models.families import FAMILIES  # noqa: E402

EXPERTS = ["deepseek_v2", "deepseek_v3", "mixtral", "qwen3_moe"]


def plain_experts(hidden: Any, experts: Any, weights: Any, gate_up: Any, down: Any) -> Any:
    """As `gated_experts`, token by token, in float32."""
    out = torch.zeros(hidden.shape, dtype=torch.float32)
    for token, (chosen, counts) in enumerate(zip(experts.tolist(), weights.float().tolist(), strict=True)):
        for expert, count in zip(chosen, counts, strict=True):
            gates, ups = (gate_up[expert].float() @ hidden[token].float()).chunk(2)
            out[token] += count * (down[expert].float() @ (torch.nn.functional.silu(gates) * ups))
    return out.to(hidden.dtype)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Kernels of a CPU that answer for experts; how many tokens they were asked for, call by call."""
    asked: list[int] = []

    def noted(hidden: Any, *others: Any) -> Any:
        asked.append(len(hidden))
        return plain_experts(hidden, *others)

    monkeypatch.setattr(PlainKernels, "experts", staticmethod(noted), raising=False)
    return asked


def config(name: str, **changed: Any) -> dict[str, Any]:
    return {**FAMILIES[name], **changed}


@pytest.mark.parametrize("name", EXPERTS)
def test_a_models_experts_are_ours_and_its_reference_keeps_its_own(name: str, kernels: list[int]) -> None:
    model = load(config(name), dtype="bfloat16")
    layers = sum(hasattr(module, "gate_up_proj") and hasattr(module, "act_fn") for module in model.hf.modules())
    # Loading holds the model's own steps to the class's forward, of 9 tokens in three steps.
    assert takes_ours(model.hf)
    assert len(kernels) >= 3 * layers > 0
    assert model.model_shape["expert_kernels"] == EXPERTS_NAME
    del kernels[:]
    reference = model.reference_logits(range(12))
    assert not kernels
    assert takes_ours(model.hf)
    model.generate_reference([1, 2, 3], 2)
    assert not kernels
    model.hf.set_experts_implementation(THEIRS)
    assert torch.equal(model.reference_logits(range(12)), reference)


def test_wrong_experts_are_found_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    from kpolicy.errors import SupportError

    def wrong(hidden: Any, experts: Any, weights: Any, gate_up: Any, down: Any) -> Any:
        return plain_experts(hidden, experts.flip(0), weights, gate_up, -3.0 * down)

    monkeypatch.setattr(PlainKernels, "experts", staticmethod(wrong), raising=False)
    with pytest.raises(SupportError, match="gives other logits than its own forward"):
        load(config("mixtral"), dtype="bfloat16")


@pytest.mark.parametrize(
    ("name", "changed", "dtype"),
    [
        ("llama", {}, "bfloat16"),
        ("mixtral", {}, "float32"),
        ("mixtral", {"hidden_act": "gelu"}, "bfloat16"),
    ],
)
def test_what_the_kernels_dont_compute_stays_theirs(
    name: str, changed: dict[str, Any], dtype: str, kernels: list[int]
) -> None:
    """No experts, float32, another activation."""
    model = load(config(name, **changed), dtype=dtype)
    assert not kernels
    assert not takes_ours(model.hf)
    assert model.model_shape.get("expert_kernels") == (None if name == "llama" else "transformers")


@pytest.mark.parametrize("said", ["is_transposed", "has_bias", "has_post_expert_norm", "_is_expert_parallel"])
def test_experts_of_another_making_stay_theirs(said: str) -> None:
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    own = {key: value for key, value in config("qwen3_moe").items() if key != "model_type"}
    hf: Any = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**own), dtype=torch.bfloat16)
    layers = [module for module in hf.modules() if hasattr(module, "gate_up_proj")]
    for module in layers:
        setattr(module, said, True)
    assert not take_experts(hf, plain_experts)
    setattr(layers[0], said, False)
    assert take_experts(hf, plain_experts)
    found = [module for module in layers if "kpolicy_experts" in vars(module)]
    assert found == layers[:1]


def test_a_user_who_chose_an_implementation_keeps_it() -> None:
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    own = {key: value for key, value in config("qwen3_moe").items() if key != "model_type"}
    hf: Any = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**own), dtype=torch.bfloat16)
    hf.set_experts_implementation("eager")
    assert not take_experts(hf, plain_experts)
    assert hf.config._experts_implementation == "eager"


def test_a_config_of_a_model_that_was_taken_is_taken_anew(kernels: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its config says so; kernels that have nothing for experts leave them theirs."""
    first = load(config("mixtral"), dtype="bfloat16")
    again = load(first.hf.config, dtype="bfloat16")
    assert takes_ours(again.hf)
    monkeypatch.delattr(PlainKernels, "experts")
    plain = load(first.hf.config, dtype="bfloat16")
    assert not takes_ours(plain.hf)
    assert plain.model_shape["expert_kernels"] == "transformers"
    assert takes_ours(first.hf)


def test_a_quantized_model_keeps_its_own() -> None:
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    own = {key: value for key, value in config("qwen3_moe").items() if key != "model_type"}
    hf: Any = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**own), dtype=torch.bfloat16)
    hf.config.quantization_config = {"quant_method": "fp8"}
    assert not take_experts(hf, plain_experts)
