"""A model whose attention breaks once it is loaded, in the kernels that serve: what `benchmarks.gpu.correct` must see.

Loading holds a model to its class's own forward, so what is broken before that is refused there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs

from benchmarks.gpu import correct

if TYPE_CHECKING:
    import pytest

LATENT: dict[str, Any] = {
    "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "hidden_size": 2048,
    "intermediate_size": 10944, "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16,
    "vocab_size": 102400, "max_position_embeddings": 4096, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "q_lora_rank": None, "n_routed_experts": 64, "n_shared_experts": 2,
    "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "first_k_dense_replace": 1,
}  # fmt: skip
"""DeepSeek-V2-Lite's shape"""
BREAKS: dict[str, Callable[[Any, Any], tuple[Any, Any]]] = {
    "intact": lambda spec, query: (spec, query),
    "queries are zero": lambda spec, query: (spec, query.new_zeros(query.shape)),
    "scores are 1.3 times too large": lambda spec, query: (attrs.evolve(spec, scale=1.3 * spec.scale), query),
}
"""What kernels take instead of a layer's description and its queries"""


def break_after_loading(patch: pytest.MonkeyPatch, how: str) -> list[str]:
    """Let `correct` load models whose kernels are broken then; the kernels' names, as models are loaded."""
    load, broken = correct.load_model, []

    def loaded(*given: Any, **named: Any) -> Any:
        model = load(*given, **named)
        kind = type(model.layers[0].kernels)
        for name in ("attend", "attend_latents"):
            patch.setattr(kind, name, _broken(getattr(kind, name), BREAKS[how]))
        broken.append(model.layers[0].kernels.name)
        return model

    patch.setattr(correct, "load_model", loaded)
    return broken


def _broken(intact: Callable[..., Any], breaks: Callable[[Any, Any], tuple[Any, Any]]) -> Callable[..., Any]:
    def attend(self: Any, step: Any, spec: Any, query: Any, *rest: Any) -> Any:
        return intact(self, step, *breaks(spec, query), *rest)

    return attend
