"""When pinned memory that inputs were copied out of is taken again, over a device that takes no time."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from benchmarks.engine_step import decode_inputs  # noqa: E402
from benchmarks.host_step import NoDevice, Point, bare_step, opened  # noqa: E402
from kpolicy.executors.cuda.staging import TURNS, StagedGroup, place_of  # noqa: E402


@pytest.fixture(autouse=True)
def points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Point)
    monkeypatch.setattr(Point, "asked", Counter())


def _group(engine: Any, inputs: Any) -> StagedGroup:
    key = engine.select(*inputs.numbers).launches[0].key
    return place_of(engine.registry.record(key).handle.buffers.token_ids)[0]


def test_a_turn_waits_for_the_step_that_had_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is written to, and for its own step alone; the first steps wait for nobody."""
    engine, model = opened()
    inputs = decode_inputs(3, model.num_blocks)
    engine.step(inputs)
    group = _group(engine, inputs)
    for turn in group.turns:
        turn.wait = None
    waited: list[Any] = []
    monkeypatch.setattr(Point, "synchronize", lambda self: waited.append(self))
    spans = [engine.step(inputs).ready[0] for _ in range(TURNS)]
    assert not waited
    for number, span in enumerate(spans, 1):
        engine.step(inputs)
        assert len(waited) == number
        assert waited[-1] is span._points.last


def test_who_has_waited_for_a_step_is_not_asked_to_again() -> None:
    """As a serving engine does, which reads each step's tokens: no step blocks for memory then."""
    engine, model = opened()
    inputs = decode_inputs(3, model.num_blocks)
    for _ in range(2 * TURNS):
        engine.step(inputs).ready[0].wait()
    Point.asked.clear()
    for _ in range(2 * TURNS):
        engine.step(inputs).ready[0].wait()
    assert Point.asked["synchronize"] == 2 * TURNS


def test_a_launch_without_a_span_notes_its_copy_itself() -> None:
    """One point more than a step has: it is recorded behind the copy, and the turn waits for that."""
    engine, model = opened()
    inputs = decode_inputs(3, model.num_blocks)
    bare = bare_step(engine, model, inputs)
    for _ in range(TURNS):
        bare()
    Point.asked.clear()
    for _ in range(3):
        bare()
    assert Point.asked == {"record": 3, "synchronize": 3}


@pytest.mark.parametrize("fails", ["launch", "sample"])
def test_a_step_that_fails_behind_its_copy_ends_all_the_same(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The span's end is recorded behind the copy, so whoever has the memory next waits for it."""
    engine, model = opened()
    inputs = decode_inputs(3, model.num_blocks)
    engine.step(inputs)
    executor, decision = engine.executor, engine.select(*inputs.numbers)
    handle = engine.registry.record(decision.launches[0].key).handle
    group, order = _group(engine, inputs), list[str]()

    def raises(*_: Any) -> Any:
        order.append("fails")
        raise KeyboardInterrupt

    if fails == "launch":
        # What a step was prepared with.
        monkeypatch.setattr(handle, "launch", raises)
        stage = handle.stage_decodes

        def staged(*given: Any) -> Any:
            order.append("copy")
            return stage(*given)

        monkeypatch.setattr(handle, "stage_decodes", staged)
        executor.forget_prepared()
    else:
        # A graph doesn't sample these.
        inputs = inputs._replace(sampling={"temperature": [1.0] * 3, "seed": [1] * 3})
        monkeypatch.setattr(model, "sample", raises)
    commit = StagedGroup.commit

    def noted(self: StagedGroup, *given: Any) -> None:
        order.append("copy")
        commit(self, *given)

    monkeypatch.setattr(StagedGroup, "commit", noted)
    record = Point.record

    def recorded(self: Point, stream: Any) -> None:
        order.append("point")
        record(self, stream)

    monkeypatch.setattr(Point, "record", recorded)
    for turn in group.turns:
        turn.wait = None
    # Spans that are used again have these points already.
    executor.adapter._spare_points.clear()
    with pytest.raises(KeyboardInterrupt):
        executor.run(decision, inputs)
    assert order == ["point", "copy", "fails", "point"]
    assert [turn.wait is not None for turn in group.turns].count(True) == 1


def test_a_copy_that_fails_is_forgotten() -> None:
    """It fails its own launch: what the next one stages comes over, and nothing of the one before."""
    adapter = NoDevice()
    tokens, positions = adapter.alloc_inputs([((4,), "int64", 0), ((4,), "int64", 0)])
    adapter.stage(tokens, torch.empty(4, dtype=torch.int64, device="meta"), 4, 0)  # has nothing to copy
    with pytest.raises((RuntimeError, NotImplementedError)):
        adapter.commit()
    adapter.stage(positions, [1, 2, 3, 4], 4, 0)
    adapter.commit()
    assert positions.tolist() == [1, 2, 3, 4]
