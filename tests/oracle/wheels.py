"""The marks of tests that need a serving engine's wheels."""

from __future__ import annotations

import pytest

from tests.oracle.loader import VARIABLE, oracle_folder

VLLM_WHEELS = [
    pytest.mark.oracle,
    pytest.mark.skipif(
        oracle_folder() is None,
        reason=f"{VARIABLE} isn't set: name a folder with vLLM 0.23.0 and 0.33.0 wheels (docs/replicas.md)",
    ),
]
