"""`benchmarks.gpu.overhead` over a device that takes no time."""

from __future__ import annotations

from collections import Counter
from functools import partial
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
    """A bare step gives what `Engine.step` gives; each baseline is timed as often, in both orders, beside it."""
    monkeypatch.setattr(torch.cuda, "Event", Point)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    engine, model = opened()
    runs = overhead.runs_of(engine, model, [1, 8])
    logits, tokens = runs[8]["bare_step"]()
    assert runs[8]["copies_replay"]() is None
    outputs = runs[8]["engine_step"]()
    assert torch.equal(outputs.outputs.tensor, logits)
    assert list(outputs.tokens[0]) == tokens.tolist()
    seen: dict[int, Any] = {size: {} for size in runs}
    overhead.measure(runs, seen, 4)
    overhead.measure(runs, seen, 6, row=4, skipped=1)
    for each in seen.values():
        row = overhead.row_of(each)
        assert {name: of["pairs"] for name, of in row["over"].items()} == {
            "copies_replay": 10, "bare_step": 10, "replay": 20,
        }  # fmt: skip
        assert {len(us) for of in each.values() for found in of.values() for us in found.values()} == {10}
        for baseline, of in row["over"].items():
            for name in ("engine_step", baseline, "replay"):
                low, middle, high = of["host_quartiles_us"][name]
                assert 0 < low <= middle <= high
            assert of["engine_step_us"] >= of["engine_step_host_us"]


def test_baselines_take_turns_in_both_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each comes before `Engine.step` as often as behind it, so that neither finds caches that the other filled."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    ran: list[str] = []
    names = ("engine_step", "bare_step", "copies_replay", "replay")
    runs = {1: {name: partial(ran.append, name) for name in names}}
    overhead.measure(runs, {1: {}}, 2)
    assert ran == [
        "copies_replay", "engine_step", "replay", "replay", "engine_step", "copies_replay",
        "bare_step", "engine_step", "replay", "replay", "engine_step", "bare_step",
    ]  # fmt: skip


def test_results_of_one_baseline_are_read() -> None:
    """What an old one lacks is None; its host time beyond copies and a replay is worked out from the parts."""
    old = {"in_a_row": {
        "engine_step_host_us": 90.0, "replay_host_us": 8.0, "host_beyond_us": 18.0, "ratio": 1.005,
        "host_beyond_interval": [17.0, 20.0], "interval": [1.004, 1.006],
    }, "parts_us": {"clone": 13.0, "sample": 21.0}}  # fmt: skip
    bare = {"us": 18.0, "us_interval": [17.0, 20.0], "ratio": 1.005, "interval": [1.004, 1.006]}
    assert overhead.beyond(old, "in_a_row", "bare_step") == bare
    nothing = {"us_interval": None, "ratio": None, "interval": None}
    assert overhead.beyond(old, "in_a_row", "copies_replay") == {"us": 52.0, **nothing}
    assert overhead.beyond(old, "in_a_row", "replay") == {"us": 82.0, **nothing}
    new = {"in_a_row": {"over": {"copies_replay": {**old["in_a_row"], "host_beyond_us": 25.0}}}}
    assert overhead.beyond(new, "in_a_row", "copies_replay") == {**bare, "us": 25.0}


def test_where_the_time_of_a_step_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is watched is there under its name, and a prepared step and a bare one each stage and replay once."""
    monkeypatch.setattr(torch.cuda, "Event", Point)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    engine, model = opened()
    inputs = overhead.decode_inputs(8, 8192)
    found = overhead.inside(engine, model, inputs, count=4)
    watched = {"FullStep.run", "FullGraph.stage_decodes", "NoDevice.span", "FullGraph.launch"}
    assert watched <= found["engine_step"].keys()
    assert {"NoDevice.commit", "NoDevice.stage_all", "_Empty.replay"} <= found["bare_step"].keys()
    assert "NoDevice.stage_all" in found["copies_replay"]
    assert "NoModel.sample" not in found["copies_replay"]
    parts = overhead.parts_of(engine, model, inputs, count=4)
    assert {"graph.replay", "stage and copy", "session", "event", "select"} <= parts.keys()
