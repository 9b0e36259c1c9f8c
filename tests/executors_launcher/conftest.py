"""Models of one layer, for tests that look at launches and not at families."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

SMALL: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 1024,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _threads_end() -> Iterator[None]:
    """Streams end with their executors; other folders count threads."""
    yield
    gc.collect()
    until = time.monotonic() + 5
    while time.monotonic() < until and any(each.name == "kpolicy-cpu" for each in threading.enumerate()):
        time.sleep(0.01)


@pytest.fixture(scope="session")
def small() -> Callable[..., Any]:
    """Makes models that all compute the same: 64 blocks of 16 tokens by default."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from kpolicy.serving.load import load

    def make(num_blocks: int = 64, block_size: int = 16) -> Any:
        return load(SMALL, num_blocks=num_blocks, block_size=block_size, max_model_len=512, max_num_reqs=8)

    return make
