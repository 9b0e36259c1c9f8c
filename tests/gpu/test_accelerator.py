"""The executor for any device behind torch.accelerator, on a CUDA device."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kpolicy.executors.xpu import AcceleratorExecutor  # noqa: E402
from kpolicy.testing import EXECUTOR_CHECKS  # noqa: E402
from tests.executors_launcher.conftest import SMALL  # noqa: E402

pytestmark = pytest.mark.skipif(
    not hasattr(torch.accelerator, "Graph"), reason="this torch has no torch.accelerator.Graph; 2.13 has it"
)


@pytest.mark.parametrize("check", EXECUTOR_CHECKS, ids=lambda check: check.__name__)
def test_contract(check: Callable[..., None]) -> None:
    """Modes, padding, failures and budgets are as on every other device."""
    from kpolicy.serving.load import load

    def make() -> Any:
        sizes = {"num_blocks": 64, "block_size": 16, "max_model_len": 512, "max_num_reqs": 8}
        return AcceleratorExecutor(load(SMALL, device="cuda", **sizes))

    fewer = {"seeds": range(1)} if "seeds" in signature(check).parameters else {}
    check(make, close=lambda a, b: bool(torch.allclose(a, b, rtol=1e-3, atol=1e-3)), **fewer)
