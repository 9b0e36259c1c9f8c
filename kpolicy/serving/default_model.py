"""The default model of `kpolicy run`: small enough for a laptop, with everything that a real one has.

Random weights, so no download; Qwen3's architecture, so GQA, normalised queries and keys, and rotary positions.
"""

from __future__ import annotations

from typing import Any

from kpolicy.serving.hf_model import LoadedModel
from kpolicy.serving.load import load

__all__ = ["DEFAULT_CONFIG", "load_default"]

DEFAULT_CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 4096,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
"""About 4.8 million parameters."""


def load_default(**options: Any) -> LoadedModel:
    """The default model, for example ``load_default(device="cpu", num_blocks=2048)``.

    Args:
        **options: as of `kpolicy.serving.load.load`.
    """
    return load(DEFAULT_CONFIG, **options)
