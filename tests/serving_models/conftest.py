"""Models of all families, loaded once."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.serving_models.families import FAMILIES


@pytest.fixture(scope="session")
def loaded() -> Callable[[str], Any]:
    """A family's model over 64 blocks of 4 tokens; requests of up to 96 tokens."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from kpolicy.serving.load import load

    models: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in models:
            models[name] = load(FAMILIES[name], num_blocks=96, block_size=4, max_model_len=96)
        return models[name]

    return get


@pytest.fixture(scope="session")
def sequences() -> list[list[int]]:
    """Token ids of four requests; one is longer than the smallest span that is gathered."""
    rng = random.Random(5)  # noqa: S311
    return [[rng.randrange(128) for _ in range(length)] for length in (9, 21, 30, 71)]
