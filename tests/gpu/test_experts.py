"""Experts on kernels of ours against transformers' own, at DeepSeek-V2-Lite's size, in and out of graphs."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
moe = pytest.importorskip("transformers.integrations.moe")

NUM_EXPERTS, CHOSEN, SIZE, INNER = 64, 6, 2048, 1408


class Layer(torch.nn.Module):
    """A layer's experts, as transformers' functions take them."""

    has_gate, has_bias, has_post_expert_norm = True, False, False
    is_transposed, is_concatenated, _is_expert_parallel = False, True, False
    num_experts = NUM_EXPERTS

    def __init__(self) -> None:
        super().__init__()
        made = torch.Generator("cuda").manual_seed(0)
        options: dict[str, Any] = {"generator": made, "device": "cuda", "dtype": torch.bfloat16}
        self.gate_up_proj = torch.randn(NUM_EXPERTS, 2 * INNER, SIZE, **options) * SIZE**-0.5
        self.down_proj = torch.randn(NUM_EXPERTS, SIZE, INNER, **options) * INNER**-0.5
        self.act_fn = torch.nn.SiLU()

    _apply_gate = moe._default_apply_gate


@pytest.fixture(scope="module")
def layer() -> Any:
    return Layer()


def inputs(num_tokens: int, seed: int = 1) -> tuple[Any, Any, Any]:
    made = torch.Generator("cuda").manual_seed(seed)
    hidden = torch.randn(num_tokens, SIZE, generator=made, device="cuda", dtype=torch.bfloat16)
    weights, experts = torch.rand(num_tokens, NUM_EXPERTS, generator=made, device="cuda").topk(CHOSEN)
    return hidden, experts, weights


def ours(layer: Any, hidden: Any, experts: Any, weights: Any) -> Any:
    from kpolicy.serving.gpu.experts import gated_experts

    return gated_experts(hidden, experts, weights, layer.gate_up_proj, layer.down_proj)


def in_float32(layer: Any, hidden: Any, experts: Any, weights: Any) -> Any:
    """Expert by expert."""
    exact = torch.zeros(hidden.shape, device="cuda")
    for expert in range(NUM_EXPERTS):
        token, copy = torch.where(experts == expert)
        gates, ups = (hidden[token].float() @ layer.gate_up_proj[expert].float().T).chunk(2, dim=-1)
        result = (torch.nn.functional.silu(gates) * ups) @ layer.down_proj[expert].float().T
        exact.index_add_(0, token, result * weights[token, copy, None])
    return exact


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 64, 257, 2048])
def test_ours_are_as_near_float32_as_theirs(layer: Any, num_tokens: int) -> None:
    hidden, experts, weights = inputs(num_tokens)
    found = ours(layer, hidden, experts, weights).float()
    theirs = moe.ALL_EXPERTS_FUNCTIONS["grouped_mm"](layer, hidden, experts, weights).float()
    exact = in_float32(layer, hidden, experts, weights)
    error, allowed = ((each - exact).norm() / exact.norm() for each in (found, theirs))
    assert float(error) <= 1.05 * float(allowed) + 1e-4
    assert float(error) < 0.02


def test_a_graph_has_the_bits_of_the_same_call_and_routes_anew(layer: Any) -> None:
    """Replayed over other tokens, whose experts are others."""
    held = inputs(96)
    ours(layer, *held)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ours(layer, *held)
    for seed in (2, 3):
        fresh = inputs(96, seed)
        for mine, new in zip(held, fresh, strict=True):
            mine.copy_(new)
        graph.replay()
        assert torch.equal(out, ours(layer, *fresh))


def test_experts_of_all_tokens_and_experts_without_any(layer: Any) -> None:
    hidden, _, weights = inputs(40)
    experts = torch.arange(CHOSEN, device="cuda").expand(40, -1).contiguous()
    found, exact = ours(layer, hidden, experts, weights).float(), in_float32(layer, hidden, experts, weights)
    assert float((found - exact).norm() / exact.norm()) < 0.02


def test_tokens_of_padding_leave_others_as_they_are(layer: Any) -> None:
    """NaN in a token reaches that token alone."""
    hidden, experts, weights = inputs(40)
    hidden[32:] = float("nan")
    found = ours(layer, hidden, experts, weights)
    assert bool(found[:32].isfinite().all())
    assert bool(found[32:].isnan().all())
