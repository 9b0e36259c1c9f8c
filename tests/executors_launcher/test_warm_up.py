"""What runs before a recording begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kpolicy.engine import Engine  # noqa: E402
from kpolicy.executors.cpu import CpuExecutor  # noqa: E402
from kpolicy.executors.launcher import WARM_UPS  # noqa: E402
from kpolicy.settings import Settings  # noqa: E402

SETTINGS = Settings(max_num_reqs=8, max_num_tokens=32)


@pytest.mark.parametrize("policy", ["full", "piecewise"])
def test_eager_runs_before_each_recording(
    policy: str, small: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several before a pool's first graph, one before each later one, all before anything records."""
    model, order = small(), list[str]()
    executor = CpuExecutor(model)
    forward, begin, end = model.forward, executor.adapter.begin, executor.adapter.end
    recording = False

    def forwarded(step: Any) -> Any:
        order.append("recorded" if recording else "run")
        return forward(step)

    def begun(pool: Any) -> None:
        nonlocal recording
        begin(pool)
        recording = True

    def ended() -> Any:
        nonlocal recording
        recording = False
        return end()

    monkeypatch.setattr(model, "forward", forwarded)
    monkeypatch.setattr(executor.adapter, "begin", begun)
    monkeypatch.setattr(executor.adapter, "end", ended)
    engine = Engine(policy, executor=executor, settings=SETTINGS, ladder=[4, 8], calibrate=0)
    engine.capture()
    assert len(engine.registry.captured()) == len(engine.keys) >= 2
    pools = len(engine.registry.pools())
    first = ["run"] * WARM_UPS + ["recorded"]
    assert order[: len(first)] == first
    assert order.count("recorded") == len(engine.keys)
    assert order.count("run") == len(engine.keys) + pools * (WARM_UPS - 1)
    order.clear()
    engine.release()
    engine.capture()
    assert order[: len(first)] == first
    engine.release()
