"""`kpolicy sweep`: its table, files and picture, and what it says of bad input."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import attrs
import pytest

from kpolicy.costs import Curve, analytic_costs
from kpolicy.kv_span import KvSpan
from kpolicy.schemas import Profile, write_profile
from tests.cli.conftest import Command, write
from tests.cli.test_bad_input import refused


def test_a_table_a_picture_and_a_file_to_go_on_from(kpolicy: Command, trace: Path, tmp_path: Path) -> None:
    """Every case is a row, the front is marked, and the same command again runs nothing."""
    pytest.importorskip("matplotlib")
    options = [
        "sweep", trace, "--policy", "auto", "--policy", "eager", "--rate", 1, "--rate", 2, "--ladders", "own",
        "--ladders", "1,2,4,8", "--jobs", 1, "--out", tmp_path / "s.jsonl", "--plot", tmp_path / "p.svg",
    ]  # fmt: skip
    ended = kpolicy(*options)
    assert ended.code == 0, ended.err
    assert sum(line.startswith(("auto", "eager")) for line in ended.out.splitlines()) == 8
    assert "eager *" in ended.out
    assert (tmp_path / "p.svg").read_text().startswith("<?xml")
    written = (tmp_path / "s.jsonl").read_bytes()
    assert written.count(b"\n") == 9
    assert kpolicy(*options).out == ended.out
    assert (tmp_path / "s.jsonl").read_bytes() == written
    told = kpolicy(*options, "--json").json
    assert len(told["cases"]) == 8
    assert {case["policy"] for case in told["pareto"]} <= {"auto", "eager"}
    refused(kpolicy(*options, "--max-num-reqs", 7), "was begun with other servers")


def test_devices_are_an_axis(kpolicy: Command, trace: Path) -> None:
    """Each device has its own cost table."""
    ended = kpolicy("sweep", trace, "--policy", "vllm", "--devices", "h200", "--devices", "a100", "--json", "--jobs", 1)
    assert ended.code == 0, ended.err
    costs = {line["case"]["costs"]: line["result"]["costs"] for line in ended.json["cases"]}
    assert "H200" in costs["h200"]
    assert "A100" in costs["a100"]


def test_a_case_that_fails_is_told_and_the_others_stay(kpolicy: Command, trace: Path) -> None:
    """Exit code 1, a line on standard error for each, and a table with the rest."""
    ended = kpolicy("sweep", trace, "--policy", "eager", "--policy", "vllm", "--kv-tokens", 400, "--jobs", 1)
    assert ended.code == 1
    assert ended.err.count("\n") == 1
    assert "vllm on trace.csv" in ended.err
    assert "nothing is left for requests" in ended.err
    assert "failed" in ended.out


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ("--policy autoo", ["unknown policy 'autoo'"]),
        ("--rate 0", ["--rate is 0"]),
        ("--rate 1e-9", ["--rate is 1e-09"]),
        ("--rate 2 --rate 2", ["--rate 2 is given twice"]),
        ("--ladders 1,2 --ladders own --ladders 1,2", ["--ladders 1,2 is given twice"]),
        ("--ladders 1,2 --ladders own --ladders 01,2", ["--ladders 01,2 is the same as 1,2; give each once"]),
        ("--profiles a.json --profiles a.json", ["--profiles a.json is given twice"]),
        ("--profiles a.json --profiles ./no/../a.json", ["--profiles no/../a.json is the same as a.json"]),
        ("--devices h200 --devices H200", ["--devices H200 is the same as h200"]),
        ("--metric speed", ["unknown metric 'speed'", "gap-p50"]),
        ("--backend slurm", ["unknown backend 'slurm'", "local, ray"]),
        ("--jobs -1", ["--jobs is -1"]),
        ("--plot x.pdf", ["--plot x.pdf ends in .pdf"]),
        ("--plot no/x.png", ["there is no folder no"]),
        ("--out no/x.jsonl", ["there is no folder no"]),
        ("--ladder 1,2 --ladders 1", ["--ladder and --ladders both"]),
        ("--ladders 1,x", ["--ladders is '1,x'"]),
        ("--ladder 1,x", ["--ladder is '1,x'"]),
        ("--profiles a.json --devices h200", ["--profiles were measured on devices"]),
    ],
)
def test_what_cant_be_done_is_one_line(kpolicy: Command, trace: Path, arguments: str, parts: list[str]) -> None:
    """Every wrong option names itself and its value; nothing has run."""
    refused(kpolicy("sweep", trace, *arguments.split()), *parts)


def test_more_panels_than_a_picture_holds_are_refused(kpolicy: Command, trace: Path, tmp_path: Path) -> None:
    """Before anything runs, where the picture would come last."""
    pytest.importorskip("matplotlib")
    rates = [f"--rate={rate}" for rate in range(1, 122)]
    refused(kpolicy("sweep", trace, *rates, "--plot", tmp_path / "p.svg"), "a panel for each", "would have 121")


def test_two_traces_of_one_name_are_refused(kpolicy: Command, trace: Path, tmp_path: Path) -> None:
    """Results couldn't tell them apart."""
    other = tmp_path / "other"
    other.mkdir()
    (other / trace.name).write_text(trace.read_text())
    refused(kpolicy("sweep", trace, other / trace.name), "two traces are called trace.csv")


@pytest.mark.parametrize(("option", "module"), [("--backend ray", "ray"), ("--plot p.png", "matplotlib")])
def test_a_missing_library_is_named(
    kpolicy: Command, trace: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, option: str, module: str
) -> None:
    """The extra to install is in the error, before anything has run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    refused(kpolicy("sweep", trace, *option.split(), "--out", tmp_path / "s.jsonl"), f"needs {module}", "kpolicy[")
    assert not (tmp_path / "s.jsonl").exists()


def test_lines_are_json_that_reads_back(kpolicy: Command, trace: Path, tmp_path: Path) -> None:
    """A header with what it was made with, then a line a case."""
    kpolicy("sweep", trace, "--policy", "eager", "--out", tmp_path / "s.jsonl", "--jobs", 1)
    header, line = map(json.loads, (tmp_path / "s.jsonl").read_text().splitlines())
    assert header["schema"] == "kpolicy/sweep"
    assert line["case"] == {"trace": "trace.csv", "rate": 1.0, "costs": "default", "ladder": "own", "policy": "eager"}
    assert line["result"]["served"] == 40


def test_a_trace_of_which_nothing_is_served(kpolicy: Command, tmp_path: Path) -> None:
    """It has no latencies, and no zeros that look like some; it is told (code 1), and what was handed back stays."""
    long = write(tmp_path / "long.csv", "timestamp,input_length,output_length", "0,1000000,9")
    ended = kpolicy("sweep", long, "--policy", "eager", "--jobs", 1)
    assert ended.code == 1
    assert ended.err == (
        "kpolicy: eager on long.csv x1, costs default, ladder own: no request was served (1 over_kv_capacity); each "
        "takes more than the 400,000 KV tokens that graphs leave. Raise --kv-tokens, or give another trace or window.\n"
    )
    (row,) = (line for line in ended.out.splitlines() if line.startswith("eager"))
    assert row.split()[:5] == ["eager", "-", "-", "-", "-"]
    assert "1 case has requests handed back, up to 1 over_kv_capacity" in ended.out
    assert "dropped" not in ended.out
    told = kpolicy("sweep", long, "--policy", "eager", "--jobs", 1, "--json").json
    assert told["pareto"] == []
    assert told["cases"][0]["result"]["refused"] == {"over_kv_capacity": 1}


def test_nobody_waited_for_captures_where_none_was_served(kpolicy: Command, tmp_path: Path) -> None:
    """Of a trace that is handed back whole no command tells a wait; beside one that is served that one's is told."""
    head = "timestamp,input_length,output_length"
    long, short = write(tmp_path / "long.csv", head, "0,1000000,9"), write(tmp_path / "short.csv", head, "0,10,3")
    given = ("--policy", "full", "--policy", "eager")
    for command in ("sweep", "simulate"):
        ended = kpolicy(command, long, *given)
        assert "full" in ended.out
        assert "the first request waited" not in ended.out
        assert "the first request waited" in kpolicy(command, short, *given).out
    told = kpolicy("sweep", long, short, *given, "--json").json
    waits = {
        (line["case"]["trace"], line["case"]["policy"]): line["result"]["started_after_s"] for line in told["cases"]
    }
    captures = next(line["result"]["capture_s"] for line in told["cases"] if line["case"]["policy"] == "full")
    assert waits.pop(("short.csv", "full")) == captures > 0
    assert waits == dict.fromkeys([("long.csv", "full"), ("long.csv", "eager"), ("short.csv", "eager")], 0.0)


def test_rows_that_a_trace_lost_are_told(kpolicy: Command, tmp_path: Path) -> None:
    """By trace, in words and as JSON; one that lost none isn't named."""
    head = "timestamp,input_length,output_length"
    whole = write(tmp_path / "whole.csv", head, "0,10,3")
    short = write(tmp_path / "short.csv", head, "0,10,3", "1,0,3", "2,0,4", "3,9,2")
    ended = kpolicy("sweep", whole, short, "--policy", "eager", "--jobs", 1)
    assert ended.code == 0, ended.err
    [line] = [line for line in ended.out.splitlines() if "dropped" in line]
    [(reason, count)] = (
        kpolicy("sweep", whole, short, "--policy", "eager", "--json").json["dropped"]["short.csv"].items()
    )
    assert count == 2
    assert line == f"rows of short.csv that were dropped: 2 {reason}"
    assert kpolicy("sweep", whole, "--policy", "eager", "--json").json["dropped"] == {}


def test_sizes_outside_the_table_are_told(kpolicy: Command, tmp_path: Path) -> None:
    """By how many cases, and the largest share of a case's steps."""
    costs = attrs.evolve(analytic_costs(), eager=Curve((1, 8), (100.0, 800.0)), measured=True, version="narrow")
    profile = tmp_path / "narrow.json"
    write_profile(profile, Profile(costs=costs, device="A device", model="a model"))
    trace = write(tmp_path / "t.csv", "timestamp,input_length,output_length", "0,40,3", "9000,5,1")
    ended = kpolicy("sweep", trace, "--policy", "eager", "--policy", "full", "--profile", profile, "--jobs", 1)
    assert ended.code == 0, ended.err
    said = " ".join(ended.out.split())
    assert "1 case has steps of a size or a context outside the cost table, up to 25.0%" in said
    assert "contexts: not recorded by the profile of 2 cases" in said
    # The second of two decode steps has 42 KV tokens.
    short = KvSpan(decode_row=41, decode_step=1000, prefill=1000)
    write_profile(profile, Profile(costs=attrs.evolve(costs, kv_span=short), device="A device", model="a model"))
    ended = kpolicy("sweep", trace, "--policy", "eager", "--profile", profile, "--jobs", 1)
    assert "up to 50.0%" in " ".join(ended.out.split())
    assert "not recorded" not in ended.out


def test_rates_that_clients_are_too_few_for_are_told(kpolicy: Command, tmp_path: Path) -> None:
    """Where requests wait for a client the rate says nothing; with clients enough nothing is told."""
    trace = write(tmp_path / "t.csv", "timestamp,input_length,output_length", *(f"{i},40,30" for i in range(4)))
    given = ("sweep", trace, "--policy", "eager", "--rate", 1, "--rate", 2, "--jobs", 1, "--concurrency")
    said = " ".join(kpolicy(*given, 1).out.split())
    assert "2 cases have requests that came later than the trace says" in said
    assert "up to 75.0%: --rate changes nothing for these" in said
    assert "later than the trace" not in kpolicy(*given, 4).out


def test_cases_that_serve_fewer_are_told(kpolicy: Command, tmp_path: Path) -> None:
    """Graphs that leave too little KV for long requests make the others quick, which is no merit."""
    rows = [f"{i},{1500 if i % 2 else 20},5" for i in range(20)]
    trace = write(tmp_path / "t.csv", "timestamp,input_length,output_length", *rows)
    ended = kpolicy(
        "sweep", trace, "--policy", "eager", "--policy", "vllm", "--kv-tokens", 8000, "--jobs", 1,
    )  # fmt: skip
    assert ended.code == 0, ended.err
    assert "eager *" in ended.out
    assert "vllm *" not in ended.out
    assert "1 case served fewer requests than another" in " ".join(ended.out.split())


def test_a_picture_of_a_trace_with_any_name(kpolicy: Command, tmp_path: Path) -> None:
    """Dollar signs in a name are no formula."""
    pytest.importorskip("matplotlib")
    path = write(tmp_path / "a$\\b$.csv", "timestamp,input_length,output_length\n0,8,2\n")
    drawn = tmp_path / "p.svg"
    assert kpolicy("sweep", path, "--policy", "eager", "--plot", drawn).code == 0
    assert drawn.stat().st_size


def test_names_are_printed_as_they_are(kpolicy: Command, tmp_path: Path) -> None:
    """Brackets in a name are no colours, and a word between colons is no picture."""
    paths = [tmp_path / "a[bold]b.csv", tmp_path / "c:llama:d.csv"]
    for path in paths:
        write(path, "timestamp,input_length,output_length\n0,8,2\n")
    table = kpolicy("sweep", *paths, "--policy", "eager").out
    for path in paths:
        assert f" {path.stem} " in table
        assert path.name in kpolicy("simulate", path, "--policy", "eager").out
        assert path.name in kpolicy("plan", path, "--policy", "vllm").out
