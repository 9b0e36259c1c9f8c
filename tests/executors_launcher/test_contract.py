"""The CPU executor keeps the contract of all executors; and the checks of this folder catch executors that don't."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kpolicy.executors.buffers import StepBuffers  # noqa: E402
from kpolicy.executors.cpu import CpuExecutor  # noqa: E402
from kpolicy.testing import EXECUTOR_CHECKS  # noqa: E402
from tests.executors_launcher.checker import Checker, batcher_steps, load_family, opened  # noqa: E402


def close(mine: Any, other: Any) -> bool:
    """Logits of other shapes round differently; rows of another batch would be far off."""
    return bool(torch.allclose(mine, other, rtol=1e-3, atol=1e-4))


@pytest.mark.parametrize("check", EXECUTOR_CHECKS, ids=lambda check: check.__name__)
def test_contract(check: Callable[..., None], small: Callable[..., Any]) -> None:
    """The CPU executor keeps the contract that the simulated one keeps."""
    fewer = {"seeds": range(2)} if "seeds" in signature(check).parameters else {}
    check(lambda: CpuExecutor(small()), close=close, **fewer)


def _no_reserved_slot(stage: Any, self: Any, rows: Any, shape: Any, *rest: Any) -> bool:
    """Padding writes to slot 0, which is some request's."""
    self._pad_slot = 0
    return stage(self, rows, shape, *rest)  # type: ignore[no-any-return]


def _stale_lengths(stage: Any, self: Any, rows: Any, shape: Any, *rest: Any) -> bool:
    """The graph's buffers keep the lengths of the step before, where it had as many rows."""
    if self.num_reqs < 16 and not rows.numbers.num_prefills:
        rows = rows._replace(kv_lens=[max(1, length - 1) for length in rows.kv_lens])
    return stage(self, rows, shape, *rest)  # type: ignore[no-any-return]


@pytest.mark.parametrize("broken", [_no_reserved_slot, _stale_lengths])
def test_the_bitwise_check_catches_wrong_staging(broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding that writes to a live slot, and lengths that are off by one in a graph's buffers, fail the check."""
    model = load_family("llama")
    executor, registry = opened(model)
    checker = Checker(executor, model)
    stage = StepBuffers.stage
    monkeypatch.setattr(StepBuffers, "stage", lambda *args: broken(stage, *args))
    with pytest.raises(AssertionError):
        for _ in batcher_steps(checker, registry.captured(), 60, seed=3):
            pass
