"""The drivers of the comparison with stock vLLM, over children that answer as engines would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from benchmarks.vllm import cores, correct, publish, starts, stock_vs_kpolicy
from benchmarks.vllm.ladders import arguments_of
from benchmarks.vllm.rows import Rows, machine
from kpolicy.errors import ConfigError
from kpolicy.settings import Settings
from kpolicy_vllm.ladder import default_sizes, one_list

HERE = str(Path(__file__).parent)
"""A folder: that of models and traces, which the fakes don't read"""
FAKE = ["--module", "tests.benchmarks.fake_vllm_child", "--date", "today"]


def ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    return {row["figure"]: row["ratio"] for row in rows}


def start(out: Path, *more: str) -> int:
    return starts.main(["--model", HERE, "--out", str(out), "--starts", "2", *FAKE, *more])


def test_starts_are_compared_by_side(tmp_path: Path) -> None:
    assert start(tmp_path, "--sides", "stock", "kpolicy", "wide") == 0
    written = json.loads((tmp_path / "vllm_starts.json").read_text())
    assert ratios(written["rows"]["stock kpolicy"]) == {"kv_tokens": 1, "start_s": 1, "capture_s": 2, "graph_mib": 1}
    assert ratios(written["rows"]["wide kpolicy"])["graph_mib"] == len(written["graphs"]["wide"]["sizes"]) / 2
    order = [json.loads(line)["side"] for line in (tmp_path / "starts.jsonl").read_text().splitlines()]
    assert order == ["stock", "kpolicy", "wide", "kpolicy", "wide", "stock"]


@pytest.mark.parametrize("warm", [False, True])
def test_caches_are_filled_first_unless_they_are_full(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], warm: bool
) -> None:
    assert start(tmp_path, "--sides", "stock", "kpolicy", *(["--warm"] if warm else [])) == 0
    assert ("to warm" in capsys.readouterr().out) is not warm


def test_caches_may_be_filled_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert starts.main(["--model", HERE, "--out", str(tmp_path), "--starts", "0", "--sides", "stock", *FAKE]) == 0
    assert "stock, to warm" in capsys.readouterr().out
    assert not (tmp_path / "starts.jsonl").exists()
    assert not (tmp_path / "vllm_starts.json").exists()


@pytest.mark.parametrize("options", [["--starts", "0", "--warm"], ["--starts", "-1"]])
def test_a_call_of_starts_that_would_do_nothing_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        starts.main(["--model", HERE, "--out", str(tmp_path), *options, *FAKE])
    assert f"{' '.join(options)} does nothing" in capsys.readouterr().err


def test_starts_on_record_are_not_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """But for a repeat that was cut, which is made again with all its sides: one process's alone are compared."""
    start(tmp_path, "--sides", "stock", "kpolicy")
    raw = tmp_path / "starts.jsonl"
    lines = raw.read_text().splitlines()
    raw.write_text("\n".join(lines[:-1]) + "\n")
    capsys.readouterr()
    for _ in range(2):
        assert start(tmp_path, "--sides", "stock", "kpolicy") == 0
        assert len(raw.read_text().splitlines()) == len(lines) + 1
        assert "#0" not in capsys.readouterr().out


def test_a_side_that_cannot_start_leaves_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert start(tmp_path, "--sides", "kpolicy", "stock", "--kpolicy", '{"fails": 1}') == 0
    sides = {json.loads(line)["side"] for line in (tmp_path / "starts.jsonl").read_text().splitlines()}
    assert sides == {"stock"}
    assert "FAILED" in capsys.readouterr().out


def test_loads_are_served_by_every_side(tmp_path: Path) -> None:
    command = [
        "--models", HERE, "--traces", HERE, "--out", str(tmp_path), "--only", "qwen05b", "--repeats", "2",
        "--loads", "decode-4", "--sides", "stock", "kpolicy", "wide", "--scale", "0.1", *FAKE,
    ]  # fmt: skip
    assert stock_vs_kpolicy.main(command) == 0
    written = json.loads((tmp_path / "vllm_stock_vs_kpolicy.json").read_text())
    assert ratios(written["rows"])["requests_per_s"] == 2.0
    assert set(written["rows"][0]) == {
        "model", "load", "figure", "stock", "kpolicy", "ratio", "low", "high", "repeats", "requests"
    }  # fmt: skip
    assert written["rows"][0]["requests"] == 4
    assert ratios(written["beside"]["stock wide"])["requests_per_s"] == 1.0
    before = (tmp_path / "raw.jsonl").read_text()
    assert stock_vs_kpolicy.main(command) == 0
    assert (tmp_path / "raw.jsonl").read_text() == before


def served(tmp_path: Path, *more: str) -> list[dict[str, Any]]:
    command = [
        "--models", HERE, "--traces", HERE, "--out", str(tmp_path), "--only", "qwen05b", "--scale", "0.1",
        *more, *FAKE,
    ]  # fmt: skip
    assert stock_vs_kpolicy.main(command) == 0
    return [json.loads(line) for line in (tmp_path / "raw.jsonl").read_text().splitlines()]


def test_sides_are_served_at_either_speed_of_replays_and_then_at_the_slow_one(tmp_path: Path) -> None:
    command = [
        "--models", HERE, "--traces", HERE, "--out", str(tmp_path), "--only", "qwen05b", "--repeats", "2",
        "--loads", "decode-4", "--states", "decode-2=3", "--scale", "0.1", *FAKE,
    ]  # fmt: skip
    assert stock_vs_kpolicy.main(command) == 0
    written = json.loads((tmp_path / "vllm_stock_vs_kpolicy.json").read_text())
    found = {(row["of"], row["load"]): row for row in written["states"] if row["figure"] == "gap_p50_ms"}
    assert set(found) == {("stock", "decode-2"), ("kpolicy", "decode-2")}
    told = {side: (row["slow"], row["quick"], row["ratio"], row["repeats"]) for (side, _), row in found.items()}
    assert told == {"stock": (4.0, 2.0, 2.0, 3), "kpolicy": (2.0, 1.0, 2.0, 3)}
    order = [(row["side"], row["load"]) for row in map(json.loads, (tmp_path / "raw.jsonl").read_text().splitlines())
             if row["load"].startswith("decode-2")]  # fmt: skip
    assert order[:4] == [(side, f"decode-2 {state}") for state in ("quick", "slow") for side in ("kpolicy", "stock")]
    assert order[4:8] == [(side, f"decode-2 {state}") for state in ("slow", "quick") for side in ("stock", "kpolicy")]
    raw = [json.loads(line) for line in (tmp_path / "raw.jsonl").read_text().splitlines()]
    turns = {(row["side"], row["state"]) for row in raw if row["load"] == "decode-4"}
    assert turns == {("stock", "slow"), ("kpolicy", "slow")}
    assert next(row for row in written["rows"] if row["load"] == "decode-4")["ratio"] == 2.0
    before = (tmp_path / "raw.jsonl").read_text()
    assert stock_vs_kpolicy.main(command) == 0
    assert (tmp_path / "raw.jsonl").read_text() == before


def test_a_load_of_states_that_is_not_there_is_refused_before_engines_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        served(tmp_path, "--states", "decod-2=3")
    assert "--states: there is no load 'decod-2'" in capsys.readouterr().err


def test_stock_may_be_served_by_a_second_process(tmp_path: Path) -> None:
    """How far apart two are that are the same tells what a ratio is worth."""
    served(tmp_path, "--repeats", "2", "--loads", "decode-4-8", "--sides", "stock", "kpolicy", "again")
    written = json.loads((tmp_path / "vllm_stock_vs_kpolicy.json").read_text())
    assert ratios(written["beside"]["stock again"])["requests_per_s"] == 1.0
    assert ratios(written["beside"]["again kpolicy"])["requests_per_s"] == 2.0
    assert not (tmp_path / "shim_qwen05b_again.json").exists()


def test_loads_are_profiled_at_the_end_by_the_sides_that_serve_them(tmp_path: Path) -> None:
    sides = ["--sides", "stock", "kpolicy", "paced", "--only-for", "paced=decode-4-8"]
    served(tmp_path, "--repeats", "1", "--loads", "decode-4-8", "decode-5-8", *sides,
           "--profile", "decode-5-8", "decode-4-8")  # fmt: skip
    loads = json.loads((tmp_path / "profile_qwen05b.json").read_text())["loads"]
    assert {load: list(found) for load, found in loads.items()} == {
        "decode-5-8": ["stock", "kpolicy"], "decode-4-8": ["stock", "kpolicy", "paced"],
    }  # fmt: skip
    assert loads["decode-5-8"]["stock"]["spans"] == 5


def test_bursts_are_served_in_several_turns_a_repeat_and_sides_take_turns_to_be_first(tmp_path: Path) -> None:
    rows = served(tmp_path, "--repeats", "2", "--loads", "decode-4-8", "burst-3", "--sides", "stock", "kpolicy")
    turns = [(row["load"], row["repeat"], row["side"]) for row in rows if row["load"] != "cold start"]
    first = [(load, repeat) for load, repeat, _ in turns[::2]]
    assert first == [
        ("decode-4-8", 0), ("burst-3", 0), ("burst-3", 1), ("burst-3", 2),
        ("decode-4-8", 1), ("burst-3", 3), ("burst-3", 4), ("burst-3", 5),
    ]  # fmt: skip
    assert [side for load, _, side in turns if load == "burst-3"] == ["stock", "kpolicy", "kpolicy", "stock"] * 3


def test_a_load_may_have_more_turns_than_others(tmp_path: Path) -> None:
    rows = served(
        tmp_path, "--repeats", "2", "--loads", "decode-4", "decode-5", "burst-3", "--turns", "decode-5=2", "burst-3=1"
    )
    turns = [(row["load"], row["repeat"]) for row in rows if row["load"] != "cold start"][::2]
    assert turns == [
        ("decode-4", 0), ("decode-5", 0), ("decode-5", 1), ("burst-3", 0),
        ("decode-4", 1), ("decode-5", 2), ("decode-5", 3), ("burst-3", 1),
    ]  # fmt: skip


def test_a_turn_is_begun_where_the_longest_before_it_fits_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The stand-in's turns take no time and say that they took one and two seconds."""
    monkeypatch.setattr(stock_vs_kpolicy, "LAST_S", 0.0)
    left = iter([900.0] * 40)
    monkeypatch.setattr(stock_vs_kpolicy.Run, "left_s", lambda self: 3.9 if self._turn_s else next(left))
    rows = served(tmp_path, "--repeats", "2", "--loads", "decode-4")
    assert [row["repeat"] for row in rows if "wall_s" in row] == [0, 0]
    assert "the budget is spent" in capsys.readouterr().out


def test_what_is_served_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of each load, or the share that is asked for."""
    served_: list[float] = []
    inner = stock_vs_kpolicy.make_load

    def noted(name: str, model: str, traces: Path, *, scale: float = 1.0) -> Any:
        served_.append(scale)
        return inner(name, model, traces, scale=scale)

    monkeypatch.setattr(stock_vs_kpolicy, "make_load", noted)
    served(tmp_path / "tenth", "--repeats", "1", "--loads", "decode-4")
    served(tmp_path / "half", "--repeats", "1", "--loads", "decode-4", "--warm-scale", "0.5")
    assert served_ == pytest.approx([0.1, 0.01, 0.1, 0.05])  # of the tenth that these tests take of any load


two_cores = pytest.mark.skipif(
    len(getattr(os, "sched_getaffinity", lambda _: ())(0)) < 2, reason="needs two cores, and a system that gives them"
)


@two_cores
def test_every_side_has_the_one_core_and_rows_tell_how_often_it_was_slow(tmp_path: Path) -> None:
    rows = served(tmp_path, "--one-core", "--loads", "decode-4", "--repeats", "2")
    turns = [row for row in rows if "wall_s" in row]
    assert len(turns) == 4
    assert all(len(row["may_run_on"]) == 1 for row in turns)
    assert all({"core_looks", "core_slow", "core_moves"} <= row.keys() for row in turns)
    assert all(
        len(row["may_run_on"]) > 1 for row in served(tmp_path / "free", "--loads", "decode-4") if "wall_s" in row
    )


@two_cores
def test_the_core_that_one_side_was_moved_to_is_the_next_one_s(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = sorted(os.sched_getaffinity(0))[:2]
    moved = Event()

    def look(self: Any) -> None:
        self.looks += 1
        if not moved.is_set():
            os.sched_setaffinity(self._pid, {second})
            self._at, self.slow, self.moves = second, 1, 1
            moved.set()

    monkeypatch.setattr(cores, "timed", lambda *_, **__: {first: [20.0] * 3, second: [21.0] * 3})
    monkeypatch.setattr(cores, "quietest", lambda *_: [first])
    monkeypatch.setattr(cores._Shared, "look", look)
    here, found = cores.OneCore([first, second]), []
    waiting = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    children = [subprocess.Popen(waiting, stdin=subprocess.PIPE) for _ in range(2)]
    for place, child in enumerate(children):
        with here.held_by(child.pid) as told:
            found.append(os.sched_getaffinity(child.pid))
            assert moved.wait(10.0)
        assert told["core_looks"] >= 1 - place
        assert (told["core_slow"], told["core_moves"]) == (1 - place, 1 - place)
        found.append(os.sched_getaffinity(child.pid))
        child.communicate()
    assert found == [{first}, {second}, {second}, {second}]
    with here.held_by(children[0].pid) as told:  # it has ended
        pass
    assert told["core_moves"] == 0


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("--turns decode-4", "'decode-4' isn't LOAD=N with N from 1"),
        ("--turns decode-4=x", "'decode-4=x' isn't LOAD=N"),
        ("--turns decode-4=0", "'decode-4=0' isn't LOAD=N"),
        ("--turns decode-4=-1", "'decode-4=-1' isn't LOAD=N"),
        ("--turns decod-4=2", "--turns: 'decod-4' isn't served; this call has decode-4, burst-3."),
        ("--turns burst-3=2 burst-3=1", "--turns: 'burst-3' comes twice; this call has decode-4, burst-3."),
        ("--only-for wide", "'wide' isn't SIDE=LOAD,LOAD"),
        ("--profile chat", "--profile: 'chat' isn't served; this call has decode-4, burst-3."),
        ("--only-for widest=burst-3", "--only-for: 'widest' isn't served; this call has stock, wide."),
    ],
)
def test_turns_and_sides_that_nothing_can_be_made_of_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, told: str
) -> None:
    """Before anything starts, with the names that there are."""
    with pytest.raises(SystemExit, match="2"):
        served(tmp_path, "--loads", "decode-4", "burst-3", "--sides", "stock", "wide", *option.split())
    assert told in capsys.readouterr().err


def on(gpu: str) -> dict[str, str]:
    return {"gpu": gpu, "vllm": "0.23.0", "torch": "2"}


def test_every_row_names_its_device_and_versions(tmp_path: Path) -> None:
    rows = served(tmp_path, "--repeats", "1", "--loads", "decode-4")
    assert [machine(row) for row in rows] == [on("none")] * 4


def test_rows_of_another_device_are_not_gone_on_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sides that find themselves on another device than the rows of an earlier call are lost, and say so."""
    earlier = tmp_path / "earlier.jsonl"
    row = {
        "model": "qwen05b",
        "load": "decode-4",
        "side": "stock",
        "repeat": 0,
        "requests": 4,
        "graphs": {},
        "sizes": [],
        **on("H100"),
    }
    earlier.write_text(json.dumps(row) + "\n")
    command = [
        "--models", HERE, "--traces", HERE, "--out", str(tmp_path), "--only", "qwen05b", "--loads", "decode-4",
        "--repeats", "2", "--scale", "0.1", "--done", str(earlier), *FAKE,
    ]  # fmt: skip
    assert stock_vs_kpolicy.main(command) == 1
    assert "gpu H100, vllm 0.23.0, torch 2; gpu none, vllm 0.23.0, torch 2" in capsys.readouterr().out
    assert not (tmp_path / "raw.jsonl").exists()
    assert start(tmp_path, "--sides", "stock", "--warm", "--done", str(earlier)) == 0
    assert "FAILED: rows of several devices" in capsys.readouterr().out
    assert not (tmp_path / "starts.jsonl").exists()
    rows = Rows(earlier)
    with pytest.raises(ConfigError, match="gpu none"):
        rows.keep(**{**row, **on("none")})
    earlier.write_text("".join(json.dumps({**row, **on(name)}) + "\n" for name in ("H100", "none")))
    with pytest.raises(ConfigError, match="Keep each in its own folder"):
        Rows(earlier)


def test_a_side_may_serve_some_loads_alone(tmp_path: Path) -> None:
    rows = served(
        tmp_path, "--repeats", "1", "--loads", "decode-4", "decode-5", "--sides", "stock", "kpolicy", "wide",
        "--only-for", "wide=decode-5",
    )  # fmt: skip
    served_by = {load: {row["side"] for row in rows if row["load"] == load} for load in ("decode-4", "decode-5")}
    assert served_by == {"decode-4": {"stock", "kpolicy"}, "decode-5": {"stock", "kpolicy", "wide"}}


def test_rows_of_another_number_of_requests_are_of_another_load(tmp_path: Path) -> None:
    """The same name meant more requests in an earlier call: those rows are apart, and this call measures its own."""
    earlier = tmp_path / "earlier.jsonl"
    old = {"model": "qwen05b", "load": "decode-4", "repeat": 0, "requests": 9, "requests_per_s": 1.0}
    earlier.write_text("".join(json.dumps({**old, "side": side}) + "\n" for side in ("stock", "kpolicy")))
    rows = served(tmp_path, "--repeats", "1", "--loads", "decode-4", "--done", str(earlier))
    assert len([row for row in rows if row["load"] == "decode-4"]) == 2
    written = json.loads((tmp_path / "vllm_stock_vs_kpolicy.json").read_text())["rows"]
    found = {(row["requests"], row["repeats"]): row["ratio"] for row in written if row["figure"] == "requests_per_s"}
    assert found == {(4, 1): 2.0, (9, 1): 1.0}


@pytest.mark.parametrize(("shim", "rest"), [('{"fails": 1}', {"stock", "wide"}), ('{"breaks": 1}', {"stock", "wide"})])
def test_a_side_that_fails_leaves_the_others_to_be_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], shim: str, rest: set[str]
) -> None:
    """At its start, or in the middle of a load."""
    command = [
        "--models", HERE, "--traces", HERE, "--out", str(tmp_path), "--only", "qwen05b", "--loads", "decode-4",
        "--sides", "kpolicy", "stock", "wide", "--repeats", "2", "--kpolicy", shim, *FAKE,
    ]  # fmt: skip
    assert stock_vs_kpolicy.main(command) == 1
    rows = [json.loads(line) for line in (tmp_path / "raw.jsonl").read_text().splitlines()]
    assert {row["side"] for row in rows if row["load"] == "decode-4"} == rest
    assert "kpolicy FAILED, and the others go on" in capsys.readouterr().out


def test_with_nothing_left_to_compare_it_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "--models", HERE, "--traces", HERE, "--out", str(tmp_path), "--only", "qwen05b", "--loads", "decode-4",
        "--kpolicy", '{"fails": 1}', *FAKE,
    ]  # fmt: skip
    assert stock_vs_kpolicy.main(command) == 1
    assert "qwen05b FAILED" in capsys.readouterr().out


def test_what_the_shim_counted_is_kept_where_the_budget_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stock_vs_kpolicy, "LAST_S", 1e6)
    rows = served(tmp_path, "--loads", "decode-4")
    assert {row["load"] for row in rows} == {"cold start"}
    assert "the budget is spent" in capsys.readouterr().out
    assert json.loads((tmp_path / "vllm_stock_vs_kpolicy.json").read_text())["cut_by_the_budget"] == ["qwen05b"]
    assert json.loads((tmp_path / "shim_qwen05b_kpolicy.json").read_text())["kind"] == "statistics"


def test_shims_time_graphs_one_at_a_time_once_all_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    class Told(stock_vs_kpolicy.Side):
        def go(self) -> None:
            told.append(f"go {self.name}")
            super().go()

        def answer(self, timeout_s: float) -> dict[str, Any]:
            row = super().answer(timeout_s)
            told.append(f"{self.name} {row['kind']}")
            return row

    monkeypatch.setattr(stock_vs_kpolicy, "Side", Told)
    plan = tmp_path / "plan.json"
    plan.touch()
    served(
        tmp_path, "--repeats", "1", "--loads", "decode-4", "--sides", "stock", "kpolicy", "planned",
        "--plan", str(plan), "--only-for", "planned=none",
    )  # fmt: skip
    assert told[:9] == [
        "go stock", "go kpolicy", "go planned", "stock startup", "kpolicy waits", "planned waits",
        "go kpolicy", "kpolicy startup", "go planned",
    ]  # fmt: skip


def test_wide_has_every_size_of_the_shim_s() -> None:
    wide = arguments_of("wide", {}, max_seqs=1000, max_tokens=4096)
    sizes = default_sizes(Settings(max_num_reqs=1000, max_num_tokens=4096))
    assert wide["compilation_config"]["cudagraph_capture_sizes"] == one_list(sizes)
    with pytest.raises(ValueError, match="planned with --plan"):
        arguments_of("planned", {}, max_seqs=1, max_tokens=1)


def test_folders_of_several_calls_are_published_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls = [tmp_path / "one", tmp_path / "two"]
    start(calls[0], "--sides", "stock", "kpolicy", "wide")
    start(calls[1], "--sides", "stock", "kpolicy")
    (calls[0] / "vllm_correct.json").write_text(json.dumps({"date": "then", "results": [{"model": "m", "passes": 1}]}))
    results = tmp_path / "results"
    capsys.readouterr()
    assert publish.main([*map(str, calls), "--date", "today", "--results", str(results)]) == 0
    assert "| vllm | start | capture_s | 2 | 1 | 2.00 | 2.00 to 2.00 | 2 |  | today |" in capsys.readouterr().out
    rows = json.loads((results / "vllm_stock_vs_kpolicy.json").read_text())
    assert ratios(rows)["capture_s"] == 2
    assert set(json.loads((results / "vllm_sides.json").read_text())["pairs"]) == {"wide kpolicy", "stock wide"}
    assert len(json.loads((results / "raw" / "vllm_stock_vs_kpolicy.json").read_text())["rows"]) == 10
    assert json.loads((results / "vllm_correct.json").read_text())["results"][0]["date"] == "then"
    assert publish.main([str(tmp_path / "nowhere"), "--date", "today", "--results", str(tmp_path / "no")]) == 2
    assert not (tmp_path / "no").exists()


def test_a_published_failure_is_the_error_without_its_traceback() -> None:
    """Folders of the machine aren't published; an address stays."""
    frames = '[rank0]:   File "/tmp/site/vllm/serial_utils.py", line 5, in run\n[rank0]:     run()\n[rank0]:    ^^^'
    error = "AssertionError: No cudagraph for Desc(n=16) in /opt/torch/lib/site-packages/vllm/graphs.py"
    tail = "INFO 1 step\nWARNING: see https://pytorch.org/docs/stable/it.html"
    told = f"llama kpolicy ended with 1:\n{frames}\n[rank0]: {error}\n{tail}"
    check = {"model": "m", "failed": {"lazy": told, "twice": "m twice: no answer in 120 s", "paced": f"ended:\n{tail}"}}
    assert publish.in_short(check)["failed"] == {
        "lazy": "llama kpolicy ended with 1: AssertionError: No cudagraph for Desc(n=16) in graphs.py",
        "twice": "m twice: no answer in 120 s",
        "paced": "ended: WARNING: see https://pytorch.org/docs/stable/it.html",
    }
    assert publish.in_short({"model": "m"}) == {"model": "m"}


def test_what_was_published_before_stays_unless_it_was_measured_again(tmp_path: Path) -> None:
    """Loads are kept or replaced whole, of any number of requests, so that no pair is of two calls; checks by model."""
    results = tmp_path / "results"

    def publish_rows(date: str, rows: list[dict[str, Any]], checks: list[str]) -> list[dict[str, Any]]:
        folder = tmp_path / date
        folder.mkdir()
        (folder / "raw.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        checked = {"date": date, "results": [{"model": name, "passes": True} for name in checks]}
        (folder / "vllm_correct.json").write_text(json.dumps(checked))
        assert publish.main([str(folder), "--date", date, "--results", str(results)]) == 0
        written: list[dict[str, Any]] = json.loads((results / "raw" / "vllm_stock_vs_kpolicy.json").read_text())["rows"]
        return written

    def row(load: str, side: str, repeat: int) -> dict[str, Any]:
        return {"model": "m", "load": load, "side": side, "repeat": repeat, "requests_per_s": 1.0}

    publish_rows("then", [row("chat", "stock", 0), row("chat", "wide", 0), row("start", "stock", 0)], ["a", "b"])
    publish_rows("later", [{**row("chat", "stock", 1), "requests": 4}], ["b"])
    rows = publish_rows("now", [row("burst", "stock", 0)], [])
    assert [(each["load"], each["side"], each["date"]) for each in rows] == [
        ("start", "stock", "then"), ("chat", "stock", "later"), ("burst", "stock", "now"),
    ]  # fmt: skip
    checks = json.loads((results / "vllm_correct.json").read_text())["results"]
    assert [(each["model"], each["date"]) for each in checks] == [("a", "then"), ("b", "later")]


def test_pairs_are_of_one_call_the_last_with_both_sides(tmp_path: Path) -> None:
    """A later call with fewer sides replaces what it measured, and leaves the pairs that only the earlier one has."""

    def rows_of(call: str, date: str, **rates: float) -> list[dict[str, Any]]:
        about = {"model": "m", "load": "chat", "repeat": 0, "call": call, "date": date}
        return [{**about, "side": side, "requests_per_s": rate} for side, rate in rates.items()]

    results = tmp_path / "results"

    def publish_rows(date: str, rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        (tmp_path / date).mkdir()
        (tmp_path / date / "raw.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert publish.main([str(tmp_path / date), "--date", date, "--results", str(results)]) == 0
        found = json.loads((results / "vllm_stock_vs_kpolicy.json").read_text())
        pairs = json.loads((results / "vllm_sides.json").read_text())["pairs"]
        return found, {name: (each[0]["ratio"], each[0]["date"]) for name, each in pairs.items()}

    publish_rows("then", rows_of("1", "then", stock=1.0, kpolicy=2.0, wide=4.0))
    (found,), pairs = publish_rows("now", rows_of("2", "now", stock=10.0, kpolicy=30.0))
    assert (found["ratio"], found["date"]) == (3.0, "now")
    assert pairs == {"wide kpolicy": (0.5, "then"), "stock wide": (4.0, "then")}
    (found,), pairs = publish_rows("last", rows_of("3", "last", stock=1.0, kpolicy=1.0, wide=5.0))
    assert (found["ratio"], pairs["stock wide"]) == (1.0, (5.0, "last"))
    raw = json.loads((results / "raw" / "vllm_stock_vs_kpolicy.json").read_text())["rows"]
    assert {row["call"] for row in raw} == {"3"}


def test_a_call_that_goes_on_with_another_s_rows_is_one_with_it(tmp_path: Path) -> None:
    rows = served(tmp_path, "--repeats", "1", "--loads", "decode-4")
    more = served(tmp_path, "--repeats", "2", "--loads", "decode-4")
    assert len({row["call"] for row in more}) == 1 == len({row["call"] for row in rows})
    assert [len({row["began"] for row in each}) for each in (rows, more)] == [1, 2]
    written = json.loads((tmp_path / "vllm_stock_vs_kpolicy.json").read_text())["rows"]
    assert {row["repeats"] for row in written} == {2}


def test_a_repeat_that_was_cut_is_measured_again_with_all_its_sides(tmp_path: Path) -> None:
    """What a side had in another process isn't compared with."""
    rows = served(tmp_path, "--repeats", "1", "--loads", "decode-4", "--sides", "stock", "kpolicy")
    kept = [row for row in rows if row["side"] == "stock"]
    (tmp_path / "raw.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    more = served(tmp_path, "--repeats", "1", "--loads", "decode-4", "--sides", "stock", "kpolicy")[len(kept) :]
    assert {row["side"] for row in more if row["load"] == "decode-4"} == {"stock", "kpolicy"}


def call(folder: Path, load: str, *abouts: dict[str, str]) -> Path:
    """What a call left: a start of each of these, and two sides' rows of a load that name none."""
    folder.mkdir()
    rows = [
        {"model": "m", "load": "cold start", "side": str(place), "repeat": 0, "cold": about}
        for place, about in enumerate(abouts)
    ]
    rows += [
        {"model": "m", "load": load, "side": side, "repeat": 0, "requests_per_s": 1.0} for side in ("stock", "kpolicy")
    ]
    (folder / "raw.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_results_of_one_device_and_its_versions_are_published_with_them_and_their_date(tmp_path: Path) -> None:
    results = tmp_path / "results"
    for date, load in (("then", "chat"), ("now", "burst")):
        folder = call(tmp_path / date, load, on("H200"))
        assert publish.main([str(folder), "--date", date, "--results", str(results)]) == 0
    written = json.loads((results / "raw" / "vllm_stock_vs_kpolicy.json").read_text())
    assert (written["device"], written["versions"]) == ("H200", {"vllm": "0.23.0", "torch": "2"})
    assert [machine(row) for row in written["rows"]] == [on("H200")] * 5
    rows = json.loads((results / "vllm_stock_vs_kpolicy.json").read_text())
    assert [(row["load"], row["date"]) for row in rows] == [("chat", "then"), ("burst", "now")]


def test_how_each_call_was_made_is_published_with_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command as it was given, the commit, what the budget cut, costs and counts; those of rows that go, go too."""
    monkeypatch.setenv("KPOLICY_COMMIT", "abc1234")
    results = tmp_path / "results"
    counts = {"counters": {"lazy_captures": 1}, "steps": [["full", "cheapest_measured", 2, 3, 4]]}
    counted: dict[str, dict[str, Any]] = {"one": {}, "two": counts}

    def published(folder: str) -> list[dict[str, Any]]:
        made = tmp_path / folder
        served(made, "--repeats", "1", "--loads", "decode-4", "--sides", "stock", "kpolicy")
        (made / "shim_m_kpolicy.json").write_text(json.dumps({"costs": f"of {folder}", **counted[folder]}))
        assert publish.main([str(made), "--date", folder, "--results", str(results)]) == 0
        found: list[dict[str, Any]] = json.loads((results / "raw" / "vllm_stock_vs_kpolicy.json").read_text())["calls"]
        return found

    (first,) = published("one")
    assert first["command"].startswith("python -m benchmarks.vllm.stock_vs_kpolicy ")
    assert "--loads decode-4" in first["command"]
    assert str(tmp_path) not in first["command"]
    assert (first["commit"], first["cut_by_the_budget"]) == ("abc1234", [])
    assert first["costs"]["m_kpolicy"] == "of one"
    assert first["shims"]["m_kpolicy"] == {}
    (second,) = published("two")
    assert (second["costs"]["m_kpolicy"], second["call"] > first["call"]) == ("of two", True)
    assert second["shims"]["m_kpolicy"] == counts


def test_a_start_that_the_budget_ended_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It had less than a start may take, and gave no answer by then."""
    answer = starts.Side.answer

    def late(side: starts.Side, timeout_s: float) -> dict[str, Any]:
        if timeout_s < starts.START_S and (tmp_path / "starts.jsonl").exists():
            raise starts.SideError(f"no answer in {timeout_s:.0f} s")
        return answer(side, timeout_s)

    monkeypatch.setattr(starts.Side, "answer", late)
    assert start(tmp_path, "--sides", "stock", "--warm", "--budget", "60") == 0
    assert json.loads((tmp_path / "vllm_starts.json").read_text())["cut_by_the_budget"] == [Path(HERE).name]
    assert len((tmp_path / "starts.jsonl").read_text().splitlines()) == 1


def test_how_starts_were_made_is_published_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they were called, also from a folder with another call's rows and costs; and whether all were made."""
    monkeypatch.setenv("KPOLICY_COMMIT", "abc1234")
    out, results = tmp_path / "out", tmp_path / "results"
    served(out, "--repeats", "1", "--loads", "decode-4", "--sides", "stock", "kpolicy")
    (out / "shim_m_kpolicy.json").write_text(json.dumps({"costs": "measured"}))
    monkeypatch.setenv("KPOLICY_COMMIT", "def5678")
    start(out, "--sides", "stock", "kpolicy", "--warm")
    written = json.loads((out / "vllm_starts.json").read_text())
    assert publish.main([str(out), "--date", "today", "--results", str(results)]) == 0
    raw = json.loads((results / "raw" / "vllm_stock_vs_kpolicy.json").read_text())
    loads, starting = sorted(raw["calls"], key=lambda call: call["commit"])
    assert (loads["commit"], loads["costs"]["m_kpolicy"]) == ("abc1234", "measured")
    assert starting == {
        "call": written["call"], "command": written["command"], "commit": "def5678", "cut_by_the_budget": [],
        "costs": {},
    }  # fmt: skip
    assert {row["call"] for row in raw["rows"] if row["load"] == "start"} == {starting["call"]}
    words = starting["command"].split()
    assert words[:3] == ["python", "-m", "benchmarks.vllm.starts"]
    assert words[words.index("--starts") + 1] == "2"
    assert words[-4:] == ["--sides", "stock", "kpolicy", "--warm"]
    assert str(tmp_path) not in starting["command"]


def test_starts_that_the_budget_cut_are_told(tmp_path: Path) -> None:
    assert start(tmp_path, "--sides", "stock", "kpolicy", "--warm") == 0
    assert start(tmp_path, "--sides", "stock", "kpolicy", "--warm", "--starts", "3", "--budget", "1") == 0
    assert json.loads((tmp_path / "vllm_starts.json").read_text())["cut_by_the_budget"] == [Path(HERE).name]


@pytest.mark.parametrize("other", [on("H100"), {**on("H200"), "vllm": "0.33.0"}, {**on("H200"), "torch": "3"}])
def test_results_of_several_devices_or_versions_are_not_published_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], other: dict[str, str]
) -> None:
    """Neither from one call's folders, nor beside what was published before, with its rows named or not."""
    results = tmp_path / "results"
    first, second = call(tmp_path / "a", "chat", on("H200")), call(tmp_path / "b", "burst", other)
    torn = call(tmp_path / "c", "burst", on("H200"), other)

    def refused(*folders: Path) -> None:
        capsys.readouterr()
        assert publish.main([*map(str, folders), "--date", "now", "--results", str(results)]) == 2
        assert "nothing was published: rows of several devices or versions" in capsys.readouterr().out

    refused(first, second)
    refused(torn)
    assert not results.exists()
    assert publish.main([str(first), "--date", "then", "--results", str(results)]) == 0
    raw = results / "raw" / "vllm_stock_vs_kpolicy.json"
    before = raw.read_text()
    refused(second)
    assert raw.read_text() == before
    named = json.loads(before)
    rows = [{name: row[name] for name in row.keys() - on("")} for row in named["rows"] if "cold" not in row]
    raw.write_text(json.dumps({**named, "rows": rows}))
    refused(second)


class Reference:
    """Stands for float32 logits: near the fake child's."""

    def __init__(self, _folder: Path, *, logprobs: bool) -> None:
        assert logprobs

    def logits(self, _prompt: list[int], tokens: list[int]) -> list[list[float]]:
        return [[0.0, 0.9, 0.4]] * len(tokens)


@pytest.mark.parametrize(("lost", "left"), [("twice", {"auto", "split", "lazy", "paced", "broken"}), ("none", None)])
def test_an_engine_that_fails_leaves_the_others_to_be_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str, left: set[str] | None
) -> None:
    """But for those that the others are compared with."""
    whole = correct.variants

    def variants(*arguments: Any) -> dict[str, Any]:
        made = whole(*arguments)
        side, llm, more = made[lost]
        return {**made, lost: (side, {**llm, "fails": 1}, more)}

    monkeypatch.setattr(correct, "variants", variants)
    monkeypatch.setattr(correct, "make_checkpoint", lambda _name, folder: folder)
    monkeypatch.setattr(correct, "Reference", Reference)
    assert correct.main(["--out", str(tmp_path), "--only", "llama", *FAKE]) == 1
    if left is None:
        assert not (tmp_path / "vllm_correct.json").exists()
        return
    (result,) = json.loads((tmp_path / "vllm_correct.json").read_text())["results"]
    assert set(result["failed"]) == {lost}
    assert all(result[label]["passes"] for label in left | {"replica"})
    assert not result["passes"]
