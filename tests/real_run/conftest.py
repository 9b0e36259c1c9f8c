"""A tiny model, loaded once, and what serves it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.real_run.helpers import LADDER, SETTINGS, TINY


@pytest.fixture(scope="session")
def one_thread() -> Iterator[None]:
    """Threads that outnumber the cores make tiny operators slow."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model(one_thread: None) -> Any:
    """The tiny model over 32 blocks of 4 tokens."""
    from kpolicy.serving.load import load

    return load(TINY, num_blocks=32, block_size=4, max_num_reqs=4, seed=3)


@pytest.fixture
def serving(model: Any) -> Any:
    """The tiny model with small limits and few graphs."""
    from kpolicy.serving.real_run import Serving

    return Serving(model=model, settings=SETTINGS, ladder=LADDER)
