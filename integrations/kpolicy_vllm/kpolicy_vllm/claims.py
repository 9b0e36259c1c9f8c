"""What attention lets be captured, from the levels that vLLM's backends declare."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs

from kpolicy.attention.support import Claims

__all__ = ["claims_of", "levels_of"]

_TAKES_PREFILLS = frozenset(
    {
        "FLASH_ATTN", "FLASH_ATTN_DIFFKV", "TRITON_ATTN", "TRITON_ATTN_DIFFKV", "FLEX_ATTENTION", "ROCM_ATTN",
        "ROCM_AITER_UNIFIED_ATTN",
    }
)  # fmt: skip
"""Backends whose ALWAYS means that a graph may hold prefill rows. Elsewhere (MLA, sparse, recurrent) it only means
decodes of 1 to 1 + k tokens, and a mixed graph would be wrong or fail to capture."""
_LEVELS = {
    "ALWAYS": "mixed",
    "UNIFORM_BATCH": "uniform",
    "UNIFORM_SINGLE_TOKEN_DECODE": "single",
    "NEVER": "none",
}


def levels_of(groups: Iterable[tuple[Any, Any]], vllm_config: Any) -> list[tuple[str, str]]:
    """The (backend, level) of each (backend class, KV cache spec)."""
    return [
        (backend.get_name(), backend.get_builder_cls().get_cudagraph_support(vllm_config, spec).name)
        for backend, spec in groups
    ]


def claims_of(levels: Iterable[tuple[str, str]], *, piecewise: bool, mixed: bool = True) -> Claims:
    """The claims that hold for all backends of a model.

    Args:
        levels: backends by name with the level they declare; none of them stands for attention that takes all.
        piecewise: whether the model is cut at attention.
        mixed: whether this runner captures mixed batches rightly.
    """
    met = Claims.at_level("mixed" if mixed else "uniform", piecewise=piecewise)
    for backend, level in levels:
        held = Claims.at_level(_LEVELS.get(level, "none"), piecewise=piecewise)
        if held.mixed and backend not in _TAKES_PREFILLS:
            held = Claims.at_level("uniform", piecewise=piecewise)
        met = met.meet(held)
    return attrs.evolve(met, piecewise=piecewise)
