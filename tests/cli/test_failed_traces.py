"""One bad trace among several: it is told, the others' results are all there, and the exit code says that it failed."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.cli.conftest import Command, write

HEADER = "timestamp,input_length,output_length"
SMALL = ("--max-num-reqs", 16, "--max-num-tokens", 256)
BAD = {
    "missing": "no such file. Check the name",
    "folder": "this is a folder; name one trace file in it",
    "columns": "line 1: unknown columns (found: a, b, c). Known formats by column",
    "cut": "the gzip data is cut short here",
    "unsorted": "line 3: timestamp goes back from 5 to 1. Sort",
    "nothing": "has no request to serve; rows dropped: 1 zero_output_tokens. Choose another trace",
    "late": "no request arrives in the 3 s from second 1",
}


def bad_trace(folder: Path, kind: str) -> Path:
    """A trace with one thing wrong."""
    path = folder / f"{kind}.csv"
    if kind == "folder":
        path.mkdir()
    elif kind == "columns":
        write(path, "a,b,c", "1,2,3")
    elif kind == "cut":
        whole = gzip.compress("\n".join([HEADER, *(f"{at},{at * at % 997},5" for at in range(999))]).encode())
        path.write_bytes(whole[: len(whole) // 2])
    elif kind == "unsorted":
        write(path, HEADER, "5,5,5", "1,5,5")
    elif kind == "nothing":
        write(path, HEADER, "0,5,0")
    elif kind == "late":
        write(path, HEADER, "0,5,5", "90000,5,5")
    return path


@pytest.fixture
def other(trace: Path) -> Path:
    """A second good trace."""
    path = trace.with_name("other.csv")
    path.write_text(trace.read_text())
    return path


WINDOW = ("--start", 1, "--window", 3)


@pytest.mark.parametrize("kind", BAD)
def test_simulate_keeps_the_others(kpolicy: Command, trace: Path, other: Path, tmp_path: Path, kind: str) -> None:
    """In print, in JSON and in files, with what they are alone; every policy failed on the bad one."""
    bad, result = bad_trace(tmp_path, kind), tmp_path / "r.json"
    asked = (*WINDOW, "--policy", "eager", "--policy", "vllm")
    ended = kpolicy("simulate", trace, bad, other, *asked, "--out", result, "--json")
    assert ended.code == 1
    assert ended.err.startswith("kpolicy: ")
    assert str(bad) in ended.err
    assert BAD[kind] in ended.err
    assert ended.err.count("\n") == 1
    assert json.loads(result.read_text()) == ended.json
    first, failed, last = ended.json["traces"]
    assert failed == {
        "source": str(bad), "format": None, "requests": None, "span_s": None, "dropped": None, "policies": [],
        "failed": [{"policy": policy, "error": ended.err[len("kpolicy: ") : -1]} for policy in ("eager", "vllm")],
    }  # fmt: skip
    assert [first, last] == kpolicy("simulate", trace, other, *asked, "--json").json["traces"]
    printed = kpolicy("simulate", trace, bad, other, *asked)
    assert printed.out == kpolicy("simulate", trace, other, *asked).out
    assert printed.err == ended.err


@pytest.mark.parametrize("kind", BAD)
def test_sweep_keeps_the_others(kpolicy: Command, trace: Path, other: Path, tmp_path: Path, kind: str) -> None:
    """The bad one's cases are failed ones, told once, and no line of the results file."""
    bad, result = bad_trace(tmp_path, kind), tmp_path / "s.jsonl"
    asked = (*WINDOW, "--policy", "eager", "--policy", "vllm", "--rate", 1, "--rate", 2, "--jobs", 1)
    ended = kpolicy("sweep", trace, bad, other, *asked, "--out", result, "--json")
    assert ended.code == 1
    assert str(bad) in ended.err
    assert BAD[kind] in ended.err
    assert ended.err.count("\n") == 1
    cases = ended.json["cases"]
    assert [line["case"]["trace"] for line in cases] == ["trace.csv"] * 4 + [bad.name] * 4 + ["other.csv"] * 4
    assert all(BAD[kind] in line["error"] and line["lost"] for line in cases[4:8])
    alone = kpolicy("sweep", trace, other, *asked, "--json").json
    assert [*cases[:4], *cases[8:]] == alone["cases"]
    assert ended.json["pareto"] == alone["pareto"]
    assert result.read_text().count("\n") == 1 + 8
    printed = kpolicy("sweep", trace, bad, other, *asked)
    assert (printed.code, printed.err) == (1, ended.err)
    assert printed.out.count("failed") == 4


@pytest.mark.parametrize("kind", BAD)
def test_report_keeps_the_others(kpolicy: Command, trace: Path, other: Path, tmp_path: Path, kind: str) -> None:
    """The page says what is wrong with the bad one, and has the rest as it is alone."""
    bad, page = bad_trace(tmp_path, kind), tmp_path / "r.html"
    asked = (*WINDOW, "--policy", "eager", *SMALL, "--out", page)
    ended = kpolicy("report", bad, trace, other, *asked, "--json")
    assert ended.code == 1
    assert str(bad) in ended.err
    assert BAD[kind] in ended.err
    assert ended.err.count("\n") == 1
    failed, *rest = ended.json["traces"]
    why = [{"what": "eager", "error": ended.err[len("kpolicy: ") : -1]}]
    assert failed == {"source": str(bad), "interrupted": "", "failed": why, "advice": None, "runs": []}
    assert "<nav>" in page.read_text()
    assert bad.name in page.read_text()
    assert rest == kpolicy("report", trace, other, *asked, "--json").json["traces"]
    assert bad.name not in page.read_text()


def test_files_keep_their_names(kpolicy: Command, trace: Path, tmp_path: Path) -> None:
    """Those of a good trace are called as if the bad one were good too, and those of the bad one aren't there."""
    bad = tmp_path / "bad.csv"
    kpolicy("simulate", bad, trace, "--policy", "eager", "--step-log", tmp_path / "s.jsonl")
    assert [path.name for path in tmp_path.glob("s*")] == ["s-trace-eager.jsonl"]
    pytest.importorskip("matplotlib")
    pytest.importorskip("perfetto")
    pictures = tmp_path / "pictures"
    ended = kpolicy(
        "report", bad, trace, "--policy", "eager", *SMALL, "--out", tmp_path / "r.html", "--plots", pictures,
        "--perfetto", tmp_path / "p", "--json",
    )  # fmt: skip
    assert {path.stem for path in pictures.iterdir()} >= {"latency-2", "modes-2"}
    assert not list(pictures.glob("latency.*"))
    assert [path.name for path in tmp_path.glob("p-*")] == ["p-trace-eager"]
    assert str(tmp_path / "p-trace-eager") in ended.json["written"]


@pytest.mark.parametrize("command", ["simulate", "sweep", "report"])
def test_where_all_fail_each_is_told(kpolicy: Command, tmp_path: Path, command: str) -> None:
    """Nothing is printed or written, and the exit code is that of what can't be done."""
    more = ("--out", tmp_path / "r.html") if command == "report" else ()
    ended = kpolicy(command, tmp_path / "a.csv", tmp_path / "b.csv", *more)
    assert (ended.code, ended.out) == (2, "")
    assert [line.split(": ")[1] for line in ended.err.splitlines()] == [
        str(tmp_path / "a.csv"),
        str(tmp_path / "b.csv"),
    ]
    assert not list(tmp_path.iterdir())
    wrong = kpolicy(command, tmp_path / "a.csv", tmp_path / "b.csv", *more, "--window", -1)
    assert (wrong.code, wrong.err.count("\n")) == (2, 1)
    assert "--window is -1" in wrong.err


def test_a_trace_of_which_no_policy_runs_is_one_that_failed(
    kpolicy: Command, trace: Path, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a report too, which ended there; elsewhere its policies are told one by one."""
    from importlib import import_module

    from kpolicy.errors import ConfigError

    gather = import_module("kpolicy.report.gather")
    real = gather.simulate

    def refuses(given: object, *rest: object, **more: object) -> object:
        if "other.csv" in getattr(given, "source", ""):
            raise ConfigError("it can't be simulated.")
        return real(given, *rest, **more)

    monkeypatch.setattr(gather, "simulate", refuses)
    ended = kpolicy("report", other, trace, "--policy", "eager", *SMALL, "--out", tmp_path / "r.html", "--json")
    assert ended.code == 1
    assert "other.csv, from 0 s for 300 s: it can't be simulated." in ended.err
    assert [bool(each["runs"]) for each in ended.json["traces"]] == [False, True]


def test_a_sweep_goes_on_when_the_trace_can_be_read(kpolicy: Command, trace: Path, tmp_path: Path) -> None:
    """The same command runs what failed, and holds the trace to what it was then; a wrong name may be set right."""
    late, result = tmp_path / "late.csv", tmp_path / "s.jsonl"
    asked = ("--policy", "eager", "--policy", "vllm", "--jobs", 1, "--out", result)
    assert kpolicy("sweep", trace, late, *asked).code == 1
    begun = result.read_text()
    assert kpolicy("sweep", trace, late, *asked).code == 1
    assert result.read_text() == begun
    late.write_text(trace.read_text())
    ended = kpolicy("sweep", trace, late, *asked, "--json")
    assert ended.code == 0, ended.err
    assert all("result" in line for line in ended.json["cases"])
    assert result.read_text().startswith(begun)
    # A header of both traces, and the two cases.
    whole = result.read_text()
    assert whole[len(begun) :].count("\n") == 3
    assert kpolicy("sweep", trace, late, *asked, "--json").out == ended.out
    assert result.read_text() == whole
    write(late, HEADER, "0,9,9")
    assert "was begun with other traces" in kpolicy("sweep", trace, late, *asked).err
    late.unlink()
    gone = kpolicy("sweep", trace, late, *asked, "--json")
    assert gone.code == 1
    assert gone.json == ended.json
    assert "no such file" in gone.err
    result.write_text(begun)
    other = tmp_path / "right.csv"
    other.write_text(trace.read_text())
    assert kpolicy("sweep", trace, other, *asked).code == 0
    result.write_text(whole)
    assert "was begun with other traces" in kpolicy("sweep", trace, other, *asked).err
