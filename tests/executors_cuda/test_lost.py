"""A device that was lost after a step is an error by name at the next, whichever call of the library says so first."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from benchmarks.engine_step import decode_inputs  # noqa: E402
from benchmarks.host_step import Point, opened  # noqa: E402
from kpolicy.errors import StickyDeviceError  # noqa: E402


def raising(*_: Any) -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def step_thrice(engine: Any, inputs: Any) -> None:
    for _ in range(3):
        engine.step(inputs)


@pytest.mark.parametrize("policy", ["full", "piecewise", "eager"])
@pytest.mark.parametrize("after", range(4))
def test_a_point_that_cannot_be_recorded_tells_of_a_lost_device(
    policy: str, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call fails then, and recording where a step begins or ends is among the first."""
    monkeypatch.setattr(torch.cuda, "Event", Point)
    monkeypatch.setattr(Point, "asked", Counter())
    engine, model = opened(policy)
    inputs, recorded, record = decode_inputs(3, model.num_blocks), [0], Point.record

    def fails(point: Point, stream: Any = None) -> None:
        recorded[0] += 1
        if recorded[0] > after:
            raising()
        record(point, stream)

    engine.step(inputs)
    engine.executor.adapter._spare_points.clear()
    monkeypatch.setattr(Point, "record", fails)
    for _ in range(2):
        with pytest.raises(StickyDeviceError, match="illegal memory access"):
            step_thrice(engine, inputs)


@pytest.mark.parametrize("policy", ["full", "piecewise"])
def test_a_lost_device_is_released(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a stream beside still did is nobody's any more; pools and graphs go all the same."""
    monkeypatch.setattr(torch.cuda, "Event", Point)
    monkeypatch.setattr(Point, "asked", Counter())
    monkeypatch.setattr(Point, "wait", raising, raising=False)
    engine, model = opened(policy)
    engine.step(decode_inputs(3, model.num_blocks))
    launcher = engine.executor.launcher
    launcher._unfinished.append(launcher.adapter.event())
    engine.release()
    assert not engine.executor._pools
    assert not launcher._streams
