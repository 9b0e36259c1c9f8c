"""What an executor is told once an Engine has captured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kpolicy import Engine
from kpolicy.executors.simulated import SimulatedExecutor

if TYPE_CHECKING:
    import pytest


class Told(SimulatedExecutor):
    """Notes how many graphs were there when it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[int] = []

    def after_captures(self) -> None:
        self.told.append(len(self.captured))


def test_it_is_told_once_graphs_were_captured() -> None:
    """After the last of them and before anything is measured; not where nothing was left to capture."""
    executor = Told()
    engine = Engine("vllm", executor=executor)
    engine.capture()
    assert executor.told == [len(engine.keys)]
    engine.capture()
    assert executor.told == [len(engine.keys)]


def test_measuring_comes_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    executor, order = Told(), []
    engine = Engine("auto", executor=executor)
    monkeypatch.setattr(engine, "_calibrate_s", 1.0)

    def measured(self: Any) -> None:
        order.append(list(executor.told))

    monkeypatch.setattr(Engine, "_measure", measured)
    engine.capture()
    assert order == [[len(engine.keys)]]
