"""What the raw answers of benchmarks/sglang come to: intervals, and runs that aren't put together."""

import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.sglang.check import passed
from benchmarks.sglang.make_profile import _stairs, profile
from benchmarks.sglang.rows import _compared, capture_s, rows, write
from benchmarks.sglang.server import since
from benchmarks.sglang.stock_vs_kpolicy import beside, between
from benchmarks.sglang.stock_vs_kpolicy import drawn as loads_of
from kpolicy.schemas import read_plan, read_profile

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RESULTS = BENCHMARKS / "results" / "h200" / "sglang_stock_vs_kpolicy.json"
TIMES = st.lists(st.floats(0.5, 10.0), min_size=2, max_size=6)


def about(**more):
    return {"kind": "about", **more}


def step(side, turn, ms, *, size=32):
    return {"kind": "step", "part": "qwen", "side": side, "turn": turn, "step": "decode", "size": size, "ms": ms,
            "served": "D"}  # fmt: skip


def test_one_pair_has_no_interval():
    """From a single start nothing is known of the spread: the bounds are null, not a number."""
    found = _compared({"stock": {0: 6.2}, "kpolicy": {0: 3.1}}, more=False)
    assert found == {"stock": 6.2, "kpolicy": 3.1, "ratio": 2.0, "repeats": 1, "low": None, "high": None}
    assert json.loads(json.dumps(found))["low"] is None


@given(TIMES, TIMES)
def test_interval_of_pairs(stock, ours):
    """The interval holds the ratio, is finite, and turns round where more is better."""
    sides = {"stock": dict(enumerate(stock)), "kpolicy": dict(enumerate(ours))}
    found = _compared(sides, more=False)
    assert found["repeats"] == min(len(stock), len(ours))
    assert 0 <= found["low"] <= found["ratio"] <= found["high"]
    other = _compared(sides, more=True)
    assert other["ratio"] * found["ratio"] == pytest.approx(1, rel=0.01)


@pytest.mark.parametrize("more", [False, True])
def test_only_turns_of_both_sides_are_told(more):
    """A start that the other side has no like of is in no column: they'd belie the ratio beside them."""
    sides = {"stock": {0: 9.0, 1: 7.0, 2: 8.0, 3: 7.0}, "kpolicy": {0: 5.0, 9: 1.0}}
    found = _compared(sides, more=more)
    assert (found["stock"], found["kpolicy"], found["repeats"]) == (9.0, 5.0, 1)
    assert found["ratio"] == pytest.approx(5 / 9 if more else 9 / 5, abs=1e-4)
    lines = [about(), step("stock", 0, 10.0), step("kpolicy", 1, 5.0)]
    assert rows(lines) == []


def served(side, turn, decodes, gap_ms):
    return {"kind": "trace", "part": "dsv2-trace", "side": side, "turn": turn, "concurrent": 48, "req_per_s": 1.0,
            "tok_per_s": 1.0, "gap_p50_ms": gap_ms, "gap_p99_ms": 9.0, "pace_p50_ms": 5.0, "pace_p99_ms": 6.0,
            "decodes": decodes}  # fmt: skip


def test_decode_steps_are_compared_at_equal_rows():
    """Full batches oftener make the middle gap longer where no step takes longer; at equal rows that is gone."""
    lines = [about()]
    for turn in range(2):
        lines.append(served("stock", turn, {"8": [30, 4.0], "48": [10, 8.0], "3": [9, 1.0]}, 4.0))
        lines.append(served("kpolicy", turn, {"8": [10, 4.0], "48": [30, 8.0], "4": [9, 99.0]}, 8.0))
    found = {row["figure"]: row for row in rows(lines)}
    assert found["gap p50 ms"]["ratio"] == 0.5
    alike = found["decode step at equal rows ms"]
    assert (alike["stock"], alike["kpolicy"], alike["ratio"], alike["repeats"]) == (6.0, 6.0, 1.0, 2)
    assert found["pace p50 ms"]["kpolicy"] == 5.0
    slower = [*lines[:2], served("kpolicy", 0, {"48": [30, 10.0]}, 8.0)]
    (row,) = [row for row in rows(slower) if row["figure"] == "decode step at equal rows ms"]
    assert (row["stock"], row["kpolicy"]) == (8.0, 10.0)
    none = [*lines[:2], served("kpolicy", 0, {"7": [30, 10.0]}, 8.0)]
    assert not [row for row in rows(none) if row["figure"] == "decode step at equal rows ms"]


def drawn(side, size, turn, ms, preparation=0):
    return {"kind": "drawn", "part": "qwen-drawn", "side": side, "turn": turn, "step": "decode", "size": size,
            "ms": ms, "draw": "alike", "preparation": preparation, "served": "D"}  # fmt: skip


def test_a_drawn_size_that_loses_has_a_row():
    """The mean over sizes hides one that takes twice as long; its own row has each turn's ratio and no interval."""
    lines = [about()]
    for size in (8, 16, 24):
        for turn in range(2):
            slow = 2.0 if size == 24 else 1.0
            lines += [drawn("stock", size, turn, 10.0), drawn("kpolicy", size, turn, 10.0 * slow + turn)]
    found = {row["load"]: row for row in rows(lines)}
    (over,) = [row for row in found.values() if "sizes" in row]
    assert over["sizes"] == 3
    assert "repeats" not in over
    lost = found["decode 24 of 1 to 256 requests alike, kpolicy's sizes"]
    assert (lost["turns"], lost["repeats"], lost["low"]) == ([0.5, 0.4762], 1, None)
    assert len(found) == 4


def test_a_drawn_size_has_an_interval_over_its_preparations():
    """A size that was prepared three times has three repeats; over all sizes it is one all the same."""
    lines = [about()]
    for size in (8, 16):
        for turn in range(6):
            lines += [drawn("stock", size, turn, 10.0, turn // 2), drawn("kpolicy", size, turn, 9.0 + turn, turn // 2)]
    found = {row["load"]: row for row in rows(lines)}
    alone = found["decode 8 of 1 to 256 requests alike, kpolicy's sizes"]
    assert alone["repeats"] == 3
    assert "turns" not in alone
    assert alone["low"] < alone["ratio"] < alone["high"]
    (over,) = [row for row in found.values() if "sizes" in row]
    assert (over["sizes"], over["low"], over["high"]) == (2, over["ratio"], over["ratio"])


def test_a_run_without_a_side_leaves_the_rows_of_that_side():
    """Stock against planned sizes alone, later, isn't stock's new time against kpolicy's sizes."""
    lines = [about(), *(drawn(side, 8, 0, ms) for side, ms in (("stock", 10.0), ("kpolicy", 5.0), ("planned", 5.0)))]
    lines += [about(), drawn("stock", 8, 0, 12.0), drawn("planned", 8, 0, 4.0)]
    found = {row["load"]: (row["run"], row["ratio"]) for row in rows(lines) if "sizes" not in row}
    assert found == {
        "decode 8 of 1 to 256 requests alike, kpolicy's sizes": (1, 2.0),
        "decode 8 of 1 to 256 requests alike, planned sizes": (2, 3.0),
    }


def test_sizes_that_one_side_lacks_are_in_no_row_of_that_turn():
    """The second stock process was cut off before the last size: what is told is of the sizes that all had."""
    lines = [about()]
    for size in (8, 16, 24):
        sides = {"stock": 10.0, "kpolicy": 5.0} | ({} if size == 24 else {"again": 8.0})
        lines += [drawn(side, size, 0, ms * (3 if size == 24 else 1)) for side, ms in sides.items()]
    found = {row["load"].partition(" of ")[0]: row for row in rows(lines)}
    assert sorted(found) == ["decode 16", "decode 8", "decode steps"]
    assert (found["decode steps"]["sizes"], found["decode steps"]["again"]["sizes"]) == (2, 2)
    assert (found["decode steps"]["stock"], found["decode steps"]["again"]["ratio"]) == (10.0, 1.25)


def test_sizes_that_a_plan_lacks_are_loads_of_their_own():
    """There a plan pads and SGLang doesn't; at one less both pad. Rows say so, apart from sizes drawn."""
    stock = {"decode_sizes": [1, 2, 4, 8], "prefill_sizes": [4, 8, 16, 32, 64, 128]}
    assert between(stock, {"decode_sizes": [1, 8], "prefill_sizes": [64, 128]}) == [
        ("between", "decode", 4), ("between", "decode", 2), ("below", "decode", 3), ("between", "extend", 32),
        ("between", "extend", 4), ("below", "extend", 31), ("below", "extend", 3),
    ]  # fmt: skip
    # There is nothing below one.
    assert between(stock, {"decode_sizes": [2, 4, 8], "prefill_sizes": stock["prefill_sizes"]}) == [
        ("between", "decode", 1)
    ]
    lines = [about()]
    for draw, size in (("between", 2), ("alike", 3)):
        lines += [drawn(side, size, 0, 10.0) | {"draw": draw} for side in ("stock", "planned")]
    assert {row["load"] for row in rows(lines) if "sizes" not in row} == {
        "decode 2 of sizes that SGLang has graphs of and the plan hasn't, planned sizes",
        "decode 3 of 1 to 256 requests alike, planned sizes",
    }


def test_a_row_is_the_mean_however_many_preparations_it_has():
    """One of six that took twice as long counts, which a median would leave out; each is told."""
    found = []
    for count in (5, 6):
        lines = [about()]
        for turn in range(count):
            lines += [{**step(side, turn, ms), "preparation": turn}
                      for side, ms in (("stock", 10.0), ("kpolicy", 10.0 if turn else 20.0))]  # fmt: skip
        (row,) = rows(lines)
        assert row["preparations"] == [0.5, *[1.0] * (count - 1)]
        assert row["ratio"] == pytest.approx(0.5 ** (1 / count), abs=1e-4)
        found.append(row)
    assert found[0]["ratio"] < found[1]["ratio"] < 1
    assert found[1]["low"] < found[1]["ratio"] < found[1]["high"]


def test_turns_of_one_preparation_count_once():
    """What a preparation does to all of its turns isn't taken for that many repeats."""
    lines = [about()]
    for turn in range(16):
        shared = {"preparation": turn // 8}
        lines += [{**step("stock", turn, 10.0), **shared},
                  {**step("kpolicy", turn, (9.0, 11.0)[turn // 8] + turn % 8 / 1000), **shared}]  # fmt: skip
    (row,) = rows(lines)
    assert row["repeats"] == 2
    assert row["low"] < 10 / 11 < row["ratio"] < 10 / 9 < row["high"]


def test_runs_are_not_put_together():
    """What one run measured of a side isn't compared with another run's, whose code may differ; the later one stays."""
    lines = [about(), step("stock", 0, 10.0), step("kpolicy", 0, 5.0), step("stock", 1, 12.0), step("kpolicy", 1, 6.0),
             step("stock", 0, 7.0, size=1), step("kpolicy", 0, 7.0, size=1),
             about(commit="later"), step("stock", 0, 8.0), step("kpolicy", 0, 2.0)]  # fmt: skip
    first, second = rows(lines)
    assert (first["load"], first["run"], first["ratio"], first["repeats"]) == ("decode 32", 2, 4.0, 1)
    assert (second["load"], second["run"], second["ratio"]) == ("decode 1", 1, 1.0)
    assert [row["load"] for row in rows([*lines[:7], about(), step("kpolicy", 0, 1.0)])] == ["decode 1"]


def test_result_file_tells_runs_and_errors(tmp_path):
    """Each run says what it was; an error is there until the same part was served by a later run."""
    lines = [about(), step("stock", 0, 1.0), {"kind": "error", "part": "qwen", "error": "killed"},
             {"kind": "error", "part": "check", "model": "dsv2", "error": "no time"},
             about(commit="later"), step("stock", 0, 1.0),
             {"kind": "check", "part": "check", "model": "qwen", "passed": True}]  # fmt: skip
    raw = tmp_path / "raw.jsonl"
    raw.write_text("".join(json.dumps(line) + "\n" for line in lines))
    write(raw, tmp_path)
    found = json.loads((tmp_path / "sglang_stock_vs_kpolicy.json").read_text())
    assert [run.get("commit") for run in found["runs"]] == [None, "later"]
    assert [(line["part"], line["run"]) for line in found["errors"]] == [("check", 1)]
    assert found["checks"][0]["run"] == 2


def trace(side, turn, value):
    return {"kind": "trace", "part": "dsv2-trace", "side": side, "turn": turn, "concurrent": 48, "req_per_s": value,
            "tok_per_s": value, "gap_p99_ms": 1.0, "gap_p50_ms": 1.0}  # fmt: skip


def test_runs_are_put_together_where_that_is_asked_for(tmp_path):
    """A trace's earlier run stays in the file; pooled pairs count alike; a run apart is in no other row."""
    lines = []
    for run, ours in enumerate(((2.0, 3.0, 4.0), (4.0, 5.0), (9.0,))):
        lines.append(about(commit=str(run)))
        for turn, each in enumerate(ours):
            lines += [trace("stock", turn, 1.0), trace("kpolicy", turn, each)]
    raw = tmp_path / "raw.jsonl"
    raw.write_text("".join(json.dumps(line) + "\n" for line in lines))
    write(raw, tmp_path, together=[1, 2], apart=[3])
    found = json.loads((tmp_path / "sglang_stock_vs_kpolicy.json").read_text())

    def rate(name):
        return next(row for row in found[name] if row["figure"] == "requests/s")

    assert (rate("rows")["run"], rate("rows")["pairs"]) == (2, [4.0, 5.0])
    assert (rate("earlier")["run"], rate("earlier")["pairs"]) == (1, [2.0, 3.0, 4.0])
    assert (rate("apart")["run"], rate("apart")["ratio"]) == (3, 9.0)
    pooled = rate("pooled")
    assert (pooled["runs"], pooled["pairs"], pooled["repeats"]) == ([1, 2], [2.0, 3.0, 4.0, 4.0, 5.0], 5)
    assert pooled["ratio"] == pytest.approx(math.prod(pooled["pairs"]) ** 0.2, abs=1e-4)
    assert pooled["low"] < pooled["ratio"] < pooled["high"]
    write(raw, tmp_path)
    found = json.loads((tmp_path / "sglang_stock_vs_kpolicy.json").read_text())
    assert (rate("rows")["run"], found["pooled"], found["apart"]) == (3, [], [])


def captured(side, turn, seconds, sizes, part="capture"):
    return {"kind": "start", "part": part, "side": side, "turn": turn, "init_s": 3 * seconds, "prefill_s": seconds,
            "decode_s": 0.0, "prefill_mib": 1.0, "decode_mib": 1.0, "decode_sizes": [1] * sizes,
            "prefill_sizes": []}  # fmt: skip


def test_capture_seconds_have_what_is_done_around_the_captures():
    """All of SGLang's step of the start counts, on both sides, but for kpolicy's measuring; earlier runs had less."""
    stock = captured("stock", 0, 4.0, 36) | {"graphs_s": 9.0, "kpolicy": None}
    planned = captured("planned", 0, 2.0, 20) | {"graphs_s": 7.0, "kpolicy": {"measuring_s": 2.5}}
    assert [capture_s(line) for line in (stock, planned, captured("stock", 0, 4.0, 36))] == [9.0, 4.5, 4.0]
    (row,) = (row for row in rows([{"kind": "about"}, stock, planned]) if row["figure"] == "capture s")
    assert row["ratio"] == 2.0


def test_starts_of_another_model_are_rows_of_their_own():
    """SGLang's sizes and kpolicy's; those of 0.5B aren't among them."""
    lines = [{"kind": "about"}, captured("stock", 0, 9.0, 94), captured("kpolicy", 0, 3.0, 98)]
    for turn, seconds in enumerate((4.0, 2.0)):
        lines += [
            captured("stock", turn, 4.0, 36, "dsv2-capture"),
            captured("kpolicy", turn, seconds, 46, "dsv2-capture"),
        ]
    found = {(row["model"], row["figure"]): row["ratio"] for row in rows(lines)}
    assert found["DeepSeek-V2-Lite", "start-up s"] == pytest.approx(2**0.5, 1e-4)
    assert found["Qwen2.5-0.5B", "start-up s"] == 3.0


def test_captures_of_as_many_sizes_are_put_together(tmp_path):
    """Pairs of two runs with one plan are pooled; another run's plan of other sizes is another load."""
    lines = []
    for sizes, halves in ((9, (4.0, 4.0)), (7, (2.0, 1.0)), (7, (1.0, 2.0))):
        lines.append(about())
        for turn, seconds in enumerate(halves):
            lines += [captured("stock", turn, 4.0, 36), captured("planned", turn, seconds, sizes)]
    raw = tmp_path / "raw.jsonl"
    raw.write_text("".join(json.dumps(line) + "\n" for line in lines))
    write(raw, tmp_path, together=[1, 2, 3])
    found = json.loads((tmp_path / "sglang_stock_vs_kpolicy.json").read_text())
    assert {row["figure"]: row["pairs"] for row in found["pooled"] if row["runs"] == [2, 3]} == {
        "capture s": [2.0, 4.0, 4.0, 2.0], "start-up s": [2.0, 4.0, 4.0, 2.0], "graph MiB": [1.0] * 4,
    }  # fmt: skip
    assert [row["runs"] for row in found["pooled"] if row["figure"] == "capture s"] == [[2, 3]]
    assert next(row["ratio"] for row in found["rows"] if row["figure"] == "start-up s") == pytest.approx(8**0.5, 1e-4)


def test_a_side_of_another_tree_is_a_load_of_its_own(tmp_path):
    """It is compared with stock's turns, and isn't in kpolicy's rows."""
    lines = [about()]
    for turn in range(2):
        for side, value in (("stock", 1.0), ("kpolicy", 3.0), ("cut", 5.0), ("order", 2.0)):
            lines.append(trace(side, turn, value) | {"part": "qwen-trace"})
    found = {row["load"]: row["ratio"] for row in rows(lines) if row["figure"] == "requests/s"}
    assert sorted(found.values()) == [2.0, 3.0, 5.0]
    assert next(ratio for load, ratio in found.items() if load.endswith(", cut")) == 5.0
    assert beside("") == {}
    with pytest.raises(SystemExit, match="--beside cut="):
        beside(f"cut={tmp_path}")
    (tmp_path / "integrations" / "kpolicy_sglang").mkdir(parents=True)
    (paths,) = beside(f"cut={tmp_path}").values()
    assert paths["PYTHONPATH"].startswith(f"{tmp_path}{os.pathsep}{tmp_path / 'integrations' / 'kpolicy_sglang'}")


def test_counts_of_a_turn():
    """A turn's row has that turn's counts, and not those of the warm-up and the turns before."""
    before = {"cycles": None, "steps": {"decode": {"decided": 7, "refused": 1}}}
    now = {"cycles": {"in turns": 3}, "steps": {"decode": {"decided": 9, "refused": 1}, "prefill": {"decided": 4}}}
    assert since(before, now) == {
        "cycles": {"in turns": 3}, "steps": {"decode": {"decided": 2, "refused": 0}, "prefill": {"decided": 4}},
    }  # fmt: skip
    assert since(now, {"cycles": None, "steps": None}) == {"cycles": None, "steps": None}


GOOD = {
    "served": {
        "eager": {"P": 0, "D": 0, "-": 32}, "graph": {"P": 24, "D": 8, "-": 0}, "kpolicy": {"P": 24, "D": 8, "-": 0},
    },
    "p999": {"eager": 0.01, "graph": 0.02, "kpolicy": 0.01, "broken": 1.0},
    "missed": {name: {"all": 7, "where the margin is above the limit": 0} for name in ("eager", "graph", "kpolicy")},
}  # fmt: skip


@pytest.mark.parametrize(
    ("what", "side", "value", "holds"),
    [
        ("p999", "graph", 0.02, True),
        ("p999", "kpolicy", 0.021, False),
        ("p999", "broken", 0.02, False),
        ("missed", "graph", {"all": 7, "where the margin is above the limit": 1}, False),
        ("served", "eager", {"P": 0, "D": 1, "-": 31}, False),
        ("served", "eager", {"P": 0, "D": 0, "-": 0}, False),
        ("served", "graph", {"P": 24, "D": 7, "-": 1}, False),
        ("served", "graph", {"P": 32, "D": 0, "-": 0}, False),
        ("served", "kpolicy", {"P": 0, "D": 0, "-": 32}, False),
        ("served", "kpolicy", {"P": 0, "D": 8, "-": 24}, True),
    ],
)
def test_check_passes_only_if_the_sides_ran_apart(what, side, value, holds):
    """Equal errors say nothing where the eager side replayed graphs, or the graph side didn't."""
    assert passed(**GOOD)
    assert passed(**{**GOOD, what: {**GOOD[what], side: value}}) is holds


def test_published_rows():
    """Every published row names its run, and has an interval around its ratio where it was repeated."""
    found = json.loads(RESULTS.read_text())
    assert found["rows"]
    for row in found["rows"]:
        assert 1 <= row["run"] <= len(found["runs"])
        if row.get("repeats") == 1:
            assert row["low"] is row["high"] is None
        else:
            assert row["low"] <= row["ratio"] <= row["high"] < math.inf


def test_sizes_that_sglang_pads_last_as_long_as_the_graph():
    """What follows one of SGLang's sizes has the next one's time, and a neighbour has its own only."""
    assert _stairs([4, 8, 9, 16], [1.0, 2.0, 3.0, 4.0]) == ([4, 5, 8, 9, 10, 16], [1.0, 2.0, 2.0, 3.0, 4.0, 4.0])


def test_profile_is_of_the_published_starts():
    """The committed profile is what make_profile.py makes of the result file, and kpolicy's own sizes alone count."""
    found, published = json.loads(RESULTS.read_text()), RESULTS.with_name("profile_sglang_qwen05b.json")
    assert profile(found, [15, 16]) == read_profile(published)
    for start in found["starts"]:
        if start["side"] == "planned":
            start["kpolicy"]["us"]["decode"]["graph"] = {"1": 1e6}
    assert profile(found, [15, 16]) == read_profile(published)


@pytest.mark.parametrize(
    ("what", "where", "value"),
    [("versions", "runs", {"sglang": "0.5.23"}), ("at", "runs", "2026-11-21"), ("decode_sizes", "starts", [1, 2]),
     ("prefill_sizes", "starts", [4])],
)  # fmt: skip
@pytest.mark.parametrize("run", [15, 16])
def test_profile_is_of_runs_alike(what, where, value, run):
    """Starts of other software, of another day or with other sizes of SGLang's make no profile together."""
    found = json.loads(RESULTS.read_text())
    next(each for each in found[where] if each["run"] == run and each.get("side", "stock") == "stock")[what] = value
    with pytest.raises(ValueError, match=f"{what} must be the same in runs 15, 16"):
        profile(found, [15, 16])


@pytest.mark.parametrize(
    ("run", "plan", "costs"),
    [
        (21, "plan_sglang_qwen05b", "profile_sglang_qwen05b"),
        (28, "plan_sglang_qwen05b_60", "profile_sglang_qwen05b_mean"),
    ],
)
def test_published_plan_is_what_was_run(run, plan, costs):
    """A committed plan rests on its committed profile, and its sizes are those that its run had."""
    found = json.loads(RESULTS.read_text())
    plan = read_plan(RESULTS.with_name(f"{plan}.json"))
    assert plan.costs_version == read_profile(RESULTS.with_name(f"{costs}.json")).costs.version
    starts = [each for each in found["starts"] if (each["run"], each["side"]) == (run, "planned")]
    assert starts
    for each in starts:
        assert each["decode_sizes"] == list(plan.sizes.decode)
        assert each["prefill_sizes"] == list(plan.sizes.piecewise)


@pytest.mark.parametrize("run", [38, 46])
def test_published_drawn_sizes_are_the_file_s(run):
    """The sizes that were drawn are drawn.json's, with a plan and by kpolicy's own list."""
    found = json.loads(RESULTS.read_text())
    loads = [f"{kind} {size} of" for _, kind, size in loads_of(BENCHMARKS / "sglang" / "drawn.json")]
    measured = [row["load"] for row in found["rows"] if row["run"] == run and "steps" not in row["load"]]
    assert sorted(loads) == sorted(f"{load.partition(' of ')[0]} of" for load in measured if " of " in load)
