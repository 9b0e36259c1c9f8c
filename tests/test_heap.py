"""The heap stays out of garbage collection while time is taken, and comes back."""

from __future__ import annotations

import gc

import pytest

from kpolicy.heap import frozen_heap

pytestmark = pytest.mark.usefixtures("thawed")


def test_what_is_there_is_frozen_until_the_end() -> None:
    kept = [[i] for i in range(1000)]
    with frozen_heap():
        assert gc.get_freeze_count() >= len(kept)
        assert not any(each is kept for each in gc.get_objects())
    assert gc.get_freeze_count() == 0
    assert any(each is kept for each in gc.get_objects())


def test_it_comes_back_after_an_error() -> None:
    with pytest.raises(RuntimeError, match="a step"), frozen_heap():
        raise RuntimeError("a step")
    assert gc.get_freeze_count() == 0


def test_a_heap_that_is_frozen_already_stays_so() -> None:
    gc.freeze()
    try:
        with frozen_heap():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_a_frozen_block_inside_another_does_not_end_it() -> None:
    with frozen_heap():
        with frozen_heap():
            pass
        assert gc.get_freeze_count() > 0


def test_garbage_is_collected_first_where_that_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes long, so who has little time leaves it."""
    collections: list[None] = []
    monkeypatch.setattr(gc, "collect", lambda: collections.append(None))
    with frozen_heap(collects=False):
        assert gc.get_freeze_count() > 0
    assert not collections
    with frozen_heap():
        pass
    assert len(collections) == 1
