"""How the sides of benchmarks/sglang take turns, over processes that only say how long they took."""

import itertools
import json
from collections import Counter
from types import SimpleNamespace

import pytest

from benchmarks.sglang import stock_vs_kpolicy as bench

MS = {"stock": 10.0, "kpolicy": 5.0, "planned": 5.0, "again": 8.0}
SIZES = {"stock": ([1, 2, 4], [16, 32, 64]), "planned": ([1, 4], [64])}
ASKED: list[tuple[str | None, str, int | None, int | None]] = []


class FakeSide:
    """A process whose steps take as long as its side's name says."""

    def __init__(self, name, *_, kpolicy, **more):
        self.name, self.kpolicy, self.more = name.rpartition("-")[2], kpolicy, more

    def start(self, _):
        decode, prefill = SIZES.get(self.name, SIZES["stock"])
        return {"decode_sizes": decode, "prefill_sizes": prefill, "with_kpolicy": self.kpolicy, "more": self.more}

    def hear(self, _):
        pass

    def ask(self, _, **what):
        ASKED.append((what.get("do"), self.name, what.get("count"), what.get("warm")))
        return {"ms": MS[self.name], "served": "D"}

    def end(self):
        pass


@pytest.fixture
def served(monkeypatch, tmp_path):
    """The raw answers and the rows of a run with these arguments."""
    monkeypatch.setattr(bench, "Side", FakeSide)
    ASKED.clear()

    def run(*arguments):
        given = ["stock_vs_kpolicy.py", "--models", str(tmp_path), "--trace", "none.csv", "--out", str(tmp_path)]
        monkeypatch.setattr("sys.argv", [*given, *arguments])
        bench.main()
        lines = [json.loads(line) for line in (tmp_path / "raw.jsonl").read_text().splitlines()]
        return lines, json.loads((tmp_path / "sglang_stock_vs_kpolicy.json").read_text())["rows"]

    return run


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_orders_are_balanced(count):
    """Each side has each place as often, no round starts as the one before, and up to three follow each other alike."""
    orders = bench.orders_of("ABCD"[:count])
    assert all(set(order) == set("ABCD"[:count]) for order in orders)
    assert set(Counter(place for order in orders for place in enumerate(order)).values()) == {2}
    if count > 1:
        assert all(one[0] != other[0] for one, other in itertools.pairwise([*orders, orders[0]]))
    followers = Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert len(set(followers.values())) <= (1 if count < 4 else 2)


def test_stock_runs_once_more(served):
    """The third side is stock's own, and a row tells what it differs by from stock and from kpolicy."""
    lines, rows = served("--slices", "qwen", "--again", "--loads", "decode-1,extend-64", "--preparations", "2")
    assert [(line["side"], line["with_kpolicy"]) for line in lines if line["kind"] == "start"] == [
        ("stock", False), ("kpolicy", True), ("again", False),
    ]  # fmt: skip
    assert [row["load"] for row in rows] == ["decode 1", "extend 64"]
    for row in rows:
        assert (row["stock"], row["kpolicy"], row["ratio"], row["repeats"]) == (10.0, 5.0, 2.0, 2)
        assert row["again"] == {"stock": 10.0, "again": 8.0, "ratio": 1.25, "repeats": 2, "low": 1.25, "high": 1.25,
                                "preparations": [1.25, 1.25]}  # fmt: skip
        assert (row["against_again"]["again"], row["against_again"]["ratio"]) == (8.0, 1.6)


def test_rounds_are_in_all_orders(served):
    """Three sides have six rounds a preparation, two have four; the first preparations start with another side each."""
    lines, _ = served("--slices", "qwen", "--again", "--loads", "decode-1", "--preparations", "3")
    steps = [line for line in lines if line["kind"] == "step"]
    orders = [[line["side"] for line in steps if line["turn"] == turn] for turn in range(18)]
    for first in (0, 6, 12):
        assert len({tuple(order) for order in orders[first : first + 6]}) == 6
    assert all(line["place"] == orders[line["turn"]].index(line["side"]) for line in steps)
    prepared = [name for what, name, _, _ in ASKED if what == "prepare"]
    assert len(prepared[::3]) == len(set(prepared[::3])) == 3
    assert [orders[first][0] for first in (0, 6, 12)] == prepared[::3]


@pytest.mark.parametrize(("ms", "count", "warm"), [(1.5, 9, 9), (8.0, 5, 2), (60.0, 1, 1)])
def test_steps_of_a_turn(served, monkeypatch, ms, count, warm):
    """Short steps run a while before they are timed, since another process had the core; the slowest side counts."""
    monkeypatch.setitem(MS, "kpolicy", ms / 2)
    monkeypatch.setitem(MS, "stock", ms)
    lines, _ = served("--slices", "qwen", "--loads", "decode-1", "--preparations", "1")
    assert {each[2:] for each in ASKED if each[0] == "take"} == {(count, warm)}
    assert {(line["count"], line["warm"]) for line in lines if line["kind"] == "step"} == {(count, warm)}


def test_two_sides_without_it(served):
    """By default there is no third process, and no row speaks of one."""
    lines, rows = served("--slices", "qwen", "--loads", "decode-1", "--preparations", "1")
    assert [line["side"] for line in lines if line["kind"] == "step"] == ["stock", "kpolicy", "kpolicy", "stock"] * 2
    assert not {"again", "against_again"} & rows[0].keys()


def test_starts_take_turns_in_all_orders(served, tmp_path):
    """Of three kinds of starts each is as often first, in the middle and last, in three repeats."""
    arguments = ("--slices", "capture", "--warm", "--without", "capture-wide", "--repeats", "3")
    lines, _ = served(*arguments, "--plan", str(tmp_path / "plan.json"))
    starts = [(line["turn"], line["side"]) for line in lines if line["kind"] == "start"]
    assert starts == [
        (0, "stock"), (0, "kpolicy"), (0, "planned"), (1, "kpolicy"), (1, "planned"), (1, "stock"), (2, "planned"),
        (2, "stock"), (2, "kpolicy"),
    ]  # fmt: skip


def test_sizes_that_the_plan_lacks_are_taken(served, tmp_path):
    """Of SGLang's and the plan's own lists, as both say them at their start; the plan's side is compared with both."""
    arguments = ("--slices", "qwen-between", "--preparations", "2", "--again", "--without", "qwen-between-kpolicy")
    lines, rows = served(*arguments, "--plan", str(tmp_path / "plan.json"))
    starts = {line["side"]: line for line in lines if line["kind"] == "start"}
    assert list(starts) == ["stock", "planned", "again"]
    assert starts["planned"]["more"] == {"KPOLICY_PLAN": str(tmp_path / "plan.json")}
    alone = {row["load"].partition(" of ")[0]: row for row in rows if "sizes" not in row}
    assert sorted(alone) == ["decode 2", "extend 31", "extend 32"]
    for row in rows:
        assert (row["ratio"], row["again"]["ratio"], row["against_again"]["ratio"]) == (2.0, 1.25, 1.6)
        assert ("sizes" in row) == ("sizes" in row["again"]) == (row["load"].partition(" of ")[0] not in alone)


@pytest.mark.parametrize(("visible", "asked"), [("1", ["--id=1"]), (None, [])])
def test_the_device_is_the_one_that_is_used(monkeypatch, visible, asked):
    """nvidia-smi lists GPUs that CUDA_VISIBLE_DEVICES leaves out."""
    commands = []

    def run(command, **_):
        commands.append(command)
        return SimpleNamespace(returncode=0, stdout="NVIDIA H200, 580\n")

    monkeypatch.setattr(bench.subprocess, "run", run)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert bench.about()["device"] == "NVIDIA H200, 580"
    assert [each for each in commands[0] if each.startswith("--id")] == asked


def test_what_it_cannot_take_is_said(served, capsys):
    """A step that no list has ends the script; one that a slice's list lacks, or sizes without a plan, its slice."""
    with pytest.raises(SystemExit):
        served("--slices", "qwen", "--loads", "decode-1,decode-3")
    assert "--loads has decode-3; there are decode-1, decode-256" in capsys.readouterr().err
    lines, rows = served("--slices", "dsv2,qwen-between", "--loads", "decode-768")
    assert [line["error"].partition(":")[2].strip() for line in lines if line["kind"] == "error"] == [
        "--loads has no step of dsv2's list", "qwen-between takes the sizes that a plan hasn't: give one with --plan",
    ]  # fmt: skip
    assert rows == []
