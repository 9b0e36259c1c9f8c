"""Weights that move where no replay looks, over an adapter whose device takes no time; see `benchmarks.host_step`."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from benchmarks.engine_step import decode_inputs  # noqa: E402
from benchmarks.host_step import NoModel, Point, opened  # noqa: E402
from kpolicy.engine import COUNT_EVERY, LOOK_EVERY  # noqa: E402
from kpolicy.observe.events import GraphWithdrawn  # noqa: E402
from kpolicy.reasons import Reason  # noqa: E402
from kpolicy.registry import GraphState  # noqa: E402

WITHIN = LOOK_EVERY * COUNT_EVERY
"""Steps until a move is found, at most."""


class Weights:
    """A model's weights by name, and how often they were looked at."""

    def __init__(self) -> None:
        self.held = {"up_proj": torch.zeros(4), "down_proj": torch.zeros(4)}
        self.looks = 0

    def named(self) -> dict[str, Any]:
        self.looks += 1
        return dict(self.held)


@pytest.fixture
def weights(monkeypatch: pytest.MonkeyPatch) -> Weights:
    monkeypatch.setattr(torch.cuda, "Event", Point)
    made = Weights()
    monkeypatch.setattr(NoModel, "static_tensors", lambda _: made.named(), raising=False)
    return made


def test_weights_that_stay_are_looked_at_seldom(weights: Weights) -> None:
    """Once in some hundred steps, and no graph goes."""
    engine, model = opened()
    inputs = decode_inputs(3, model.num_blocks)
    captured, before = engine.registry.captured(), weights.looks
    for _ in range(3 * WITHIN):
        engine.step(inputs)
    assert 2 <= weights.looks - before <= 4
    assert engine.registry.captured() == captured


def test_a_weight_that_moved_costs_its_graphs_within_some_hundred_steps(weights: Weights) -> None:
    """All graphs are withdrawn, counted and told with the tensor's name, and steps go on; captured anew they replay."""
    engine, model = opened()
    told: list[Any] = []
    engine.events.subscribe(told.append)
    inputs = decode_inputs(3, model.num_blocks)
    keys = engine.registry.captured()
    assert engine.step(inputs).decision.mode.value == "full"
    weights.held["up_proj"] = torch.zeros(4)
    for _ in range(WITHIN):
        engine.step(inputs)
    assert engine.step(inputs).decision.mode.value == "eager"
    records = [engine.registry.record(key) for key in keys]
    assert {(each.state, each.reason) for each in records} == {(GraphState.WITHDRAWN, Reason.ADDRESS_CHANGED)}
    assert all("up_proj is now at" in engine.executor.capture_errors[key] for key in keys)
    assert {each.key for each in told if isinstance(each, GraphWithdrawn)} == set(keys)
    assert engine.stats.total.steps == WITHIN + 2
    engine.release()
    engine.capture()
    assert engine.registry.captured() == keys
    for _ in range(WITHIN):
        assert engine.step(inputs).decision.mode.value == "full"


def test_a_weight_that_is_gone_is_named(weights: Weights) -> None:
    engine, _ = opened()
    del weights.held["down_proj"]
    engine.executor.look()
    assert not engine.registry.captured()
    assert all("down_proj is gone" in words for words in engine.executor.capture_errors.values())
    engine.executor.look()
