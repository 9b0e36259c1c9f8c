"""Memory of outputs that nobody has any more takes the next step's, over a device that takes no time."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from operator import attrgetter, itemgetter
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from benchmarks.engine_step import decode_inputs  # noqa: E402
from benchmarks.host_step import Point, opened  # noqa: E402
from kpolicy.executors.joined_rows import MOST_SPARE  # noqa: E402

ROWS = 8


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a step of so many rows, whose graph leaves that number in every byte of its outputs."""
    monkeypatch.setattr(torch.cuda, "Event", Point)
    monkeypatch.setattr(Point, "asked", Counter())
    engine, model = opened()
    key = engine.select(*decode_inputs(ROWS, model.num_blocks).numbers).launches[0].key
    handle = engine.registry.record(key).handle

    def step(number: int, num_reqs: int = ROWS) -> Any:
        with torch.inference_mode():
            handle._joined.whole.fill_(number)
        return engine.step(decode_inputs(num_reqs, model.num_blocks))

    step.spare = handle.spare  # type: ignore[attr-defined]
    return step


def tokens_of(number: int) -> list[int]:
    return [number * 0x0101010101010101] * ROWS


def test_outputs_read_as_tokens_alone_leave_their_memory_to_the_next_step(steps: Any) -> None:
    places = set()
    for number in range(1, 6):
        outputs = steps(number)
        assert list(outputs.tokens[0]) == tokens_of(number)
        places.add(outputs.outputs.joined.data_ptr())
        del outputs
    assert len(places) == 1


def test_outputs_that_are_read_later_are_not_overwritten(steps: Any) -> None:
    """As where a step is launched before the one before is read."""
    before = steps(1)
    for number in range(2, 7):
        outputs = steps(number)
        assert list(before.tokens[0]) == tokens_of(number - 1)
        before = outputs
    assert list(before.tokens[0]) == tokens_of(6)


@pytest.mark.parametrize(
    "take", [attrgetter("tensor"), itemgetter(0), attrgetter("tokens"), attrgetter("joined"), copy.copy]
)
def test_what_somebody_took_of_outputs_stays_as_it_is(take: Callable[[Any], Any], steps: Any) -> None:
    taken = take(steps(1).outputs)
    for number in range(2, 5):
        steps(number)
    if take is copy.copy:
        taken = taken.joined
    elif isinstance(taken, list):
        (taken,) = taken
    assert set(taken.view(torch.uint8).flatten().tolist()) == {1}


def test_outputs_of_other_sizes_have_memory_of_their_own(steps: Any) -> None:
    for number, num_reqs in enumerate([8, 5, 8, 5, 5, 8], 1):
        outputs = steps(number, num_reqs)
        assert list(outputs.tokens[0]) == tokens_of(number)[:num_reqs]
        assert len(outputs.outputs.tensor) == num_reqs


def test_a_graph_keeps_memory_of_few_outputs(steps: Any) -> None:
    held = [steps(number) for number in range(1, 6)]
    assert not steps.spare
    held.clear()
    assert len(steps.spare) == MOST_SPARE


def test_outputs_that_were_never_filled_go_quietly(recwarn: pytest.WarningsRecorder) -> None:
    from kpolicy.executors.joined_rows import JoinedRows

    outputs = JoinedRows()
    assert outputs.spare is None
    del outputs
    assert not recwarn.list


def test_there_is_one_step_of_tokens(steps: Any) -> None:
    outputs = steps(3).outputs
    assert outputs.host_tokens(0) == tokens_of(3)
    with pytest.raises(IndexError):
        outputs.host_tokens(1)
