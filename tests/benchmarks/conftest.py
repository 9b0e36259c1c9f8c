"""What a benchmark asks of the machine ends with its test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _priority() -> Iterator[None]:
    """Benchmarks go before other processes where they may, and later tests of this process mustn't."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    yield
    if os.getpriority(os.PRIO_PROCESS, 0) != before:
        os.setpriority(os.PRIO_PROCESS, 0, before)
