"""`benchmarks.gpu.overhead` over a device that takes no time."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from benchmarks.gpu import overhead  # noqa: E402
from benchmarks.host_step import Point, opened  # noqa: E402


def test_the_middle_of_both_orders_is_no_median_of_all() -> None:
    """Differences of two orders that lie about two values: one more of either doesn't move the middle."""
    pairs = [-20.0, 80.0] * 10
    assert overhead.of_both_orders(pairs) == (30.0, 30.0, 30.0)
    noisy = [*pairs, -20.0, -19.0]
    middle, low, high = overhead.of_both_orders(noisy)
    assert middle == pytest.approx(30.0)
    assert low <= middle <= high


def test_rows_begin_with_pairs_that_do_not_count() -> None:
    """Sizes take turns row by row, each pair of a size is counted once, and orders alternate over rows too."""
    order = list(overhead._order([1, 8], 6, 4, 2))
    assert [(size, number) for size, number, counts in order if counts] == [
        *((1, i) for i in range(4)), *((8, i) for i in range(4)), (1, 4), (1, 5), (8, 4), (8, 5),
    ]  # fmt: skip
    assert Counter(counts for *_, counts in order) == {True: 12, False: 8}


def test_every_pair_is_measured_in_both_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bare step gives what `Engine.step` gives, both are timed as often, and a row says the quartiles of both."""
    monkeypatch.setattr(torch.cuda, "Event", Point)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    engine, model = opened()
    runs = overhead.runs_of(engine, model, [1, 8])
    logits, tokens = runs[8]["bare_step"]()
    outputs = runs[8]["engine_step"]()
    assert torch.equal(outputs.outputs.tensor, logits)
    assert list(outputs.tokens[0]) == tokens.tolist()
    seen: dict[int, Any] = {size: {} for size in runs}
    overhead.measure(runs, seen, 4)
    overhead.measure(runs, seen, 6, row=4, skipped=1)
    for each in seen.values():
        row = overhead.row_of(each)
        assert row["pairs"] == 10
        assert {len(us) for found in each.values() for us in found.values()} == {10}
        for name in ("engine_step", "bare_step", "replay"):
            low, middle, high = row["host_quartiles_us"][name]
            assert 0 < low <= middle <= high


def test_where_the_time_of_a_step_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is watched is there under its name, and a prepared step and a bare one each stage and replay once."""
    monkeypatch.setattr(torch.cuda, "Event", Point)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    engine, model = opened()
    inputs = overhead.decode_inputs(8, 8192)
    found = overhead.inside(engine, model, inputs, count=4)
    assert {"FullStep.run", "NoDevice.commit", "NoDevice.span", "FullGraph.launch"} <= found["engine_step"].keys()
    assert {"NoDevice.commit", "NoDevice.stage_all", "_Empty.replay"} <= found["bare_step"].keys()
    parts = overhead.parts_of(engine, model, inputs, count=4)
    assert {"graph.replay", "stage and copy", "session", "event", "select"} <= parts.keys()
