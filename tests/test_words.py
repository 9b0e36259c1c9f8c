"""Counts with their nouns."""

from __future__ import annotations

import pytest

from kpolicy.words import some


@pytest.mark.parametrize(
    ("count", "words", "said"),
    [
        (0, ("step",), "0 steps"),
        (1, ("prefill step",), "1 prefill step"),
        (2, ("step",), "2 steps"),
        (12345, ("token",), "12,345 tokens"),
        (1, ("batch", "batches"), "1 batch"),
        (3, ("batch", "batches"), "3 batches"),
    ],
)
def test_one_is_one(count: int, words: tuple[str, ...], said: str) -> None:
    """One of a thing has no plural; large counts are grouped."""
    assert some(count, *words) == said
