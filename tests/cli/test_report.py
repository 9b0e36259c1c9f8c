"""`kpolicy report`: what it writes and prints, and what it refuses before anything runs."""

from __future__ import annotations

import gzip
import json
import re
import shlex
from html import unescape
from importlib import import_module
from pathlib import Path

import pytest

from kpolicy.errors import ConfigError
from kpolicy.scheduling.traces import Trace
from kpolicy.schemas import LadderPlan, loads
from tests.cli.conftest import Command, write
from tests.cli.test_bad_input import refused
from tests.observe.processor import find_processor, query

SMALL = ("--max-num-reqs", 16, "--max-num-tokens", 256)


def test_it_says_what_to_do_first_and_writes_the_page(kpolicy: Command, trace: Path, tmp_path: Path) -> None:
    """The sentence and the flags are printed as they stand in the page; two runs write the same bytes."""
    one, other = tmp_path / "one.html", tmp_path / "other.html"
    ended = kpolicy("report", trace, "--out", one, *SMALL, "--budget", 4)
    assert (ended.code, ended.err) == (0, "")
    assert "Run " in ended.out
    assert f"written to {one}" in ended.out
    assert kpolicy("report", trace, "--out", other, *SMALL, "--budget", 4).code == 0
    assert one.read_bytes() == other.read_bytes()
    assert "<!doctype html>" in one.read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.html", "other.html", "trace.csv"]


def test_its_numbers_are_those_of_simulate(kpolicy: Command, trace: Path, tmp_path: Path) -> None:
    """Warm by default and cold when asked; the planned run is `simulate` with the plan's sizes as the ladder."""
    for mine, theirs in (((), ("--warm",)), (("--cold",), ())):
        ended = kpolicy("report", trace, "--policy", "vllm", "--out", tmp_path / "r.html", *SMALL, *mine, "--json")
        assert ended.code == 0, ended.err
        (made,) = ended.json["traces"]
        base, planned = made["runs"]
        shared = ("simulate", trace, "--policy", "vllm", "--window", 300, *SMALL, *theirs, "--json")
        assert base | kpolicy(*shared).json["traces"][0]["policies"][0] == base
        (paste,) = made["advice"]["paste"]
        arguments = shlex.split(paste["text"])
        sizes = json.loads(arguments[arguments.index("--compilation-config") + 1])["cudagraph_capture_sizes"]
        if made["advice"]["planned"]:
            ladder = ",".join(map(str, sizes))
            assert planned | kpolicy(*shared, "--ladder", ladder).json["traces"][0]["policies"][0] == planned
    assert base["started_after_s"] > 0


def test_the_plan_file_that_it_offers_is_a_ladder(kpolicy: Command, trace: Path, tmp_path: Path) -> None:
    """Saved, `simulate --ladder` takes it, and what comes out is the report's own run."""
    ended = kpolicy("report", trace, "--policy", "auto", "--out", tmp_path / "r.html", *SMALL, "--budget", 6, "--json")
    assert ended.code == 0, ended.err
    (made,) = ended.json["traces"]
    assert made["advice"]["planned"]
    (text,) = (each["text"] for each in made["advice"]["paste"] if each["file_name"] == "plan.json")
    assert loads(text, LadderPlan).policy == "auto"
    (tmp_path / "plan.json").write_text(text)
    again = kpolicy(
        "simulate", trace, "--policy", "auto", "--warm", "--window", 300, *SMALL, "--ladder", tmp_path / "plan.json",
        "--json",
    )  # fmt: skip
    assert made["runs"][-1] | again.json["traces"][0]["policies"][0] == made["runs"][-1]


def test_plots_and_perfetto_are_written_beside_it(kpolicy: Command, trace: Path, tmp_path: Path) -> None:
    """A folder of pictures, and a Perfetto trace of each policy and trace that Perfetto's own processor can query."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("perfetto")
    other = tmp_path / "other.csv.gz"
    other.write_bytes(gzip.compress(trace.read_bytes()))
    ended = kpolicy(
        "report", trace, other, "--policy", "auto", "--policy", "eager", "--out", tmp_path / "r.html", *SMALL,
        "--plots", tmp_path / "plots", "--perfetto", tmp_path / "p.pftrace", "--json",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    written = [Path(path) for path in ended.json["written"]]
    assert written[0] == tmp_path / "r.html"
    traces = sorted(path.name for path in tmp_path.glob("*.pftrace"))
    pictures = [path.name for path in written[1:-4]]
    assert set(pictures) == {path.name for path in (tmp_path / "plots").iterdir()}
    assert len(pictures) == 2 * 2 * 5
    assert sorted(path.name for path in written[-4:]) == traces
    assert traces == [f"p-{name}-{policy}.pftrace" for name in ("other.csv", "trace") for policy in ("auto", "eager")]
    processor = find_processor()
    if processor is None:
        pytest.skip("no Perfetto trace processor here")
    (rows,) = query(
        processor,
        tmp_path / "p-trace-auto.pftrace",
        ["SELECT name, COUNT(*) AS steps FROM slice WHERE category = 'step' GROUP BY name"],
    )
    wanted = {mode: each["steps"] for mode, each in ended.json["traces"][0]["runs"][0]["modes"].items()}
    assert {row["name"]: int(row["steps"]) for row in rows} == wanted


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "--out"),
        (("--out", "."), "is a folder; name a file in it"),
        (("--out", "nowhere/r.html"), "there is no folder nowhere"),
        (("--out", "r.html", "--policy", "vlm"), "vllm"),
        (("--out", "r.html", "--policy", "vllm", "--policy", "vllm"), "given twice"),
        (("--out", "r.html", "--cold", "--warm"), "say the opposite"),
        (("--out", "r.html", "--budget", "3 frogs"), "--budget has '3 frogs'"),
        (("--out", "r.html", "--rate", "0"), "--rate is 0"),
        (("--out", "r.html", "--start", "1e6"), "no request arrives"),
        (("--out", "r.html", "--plots", "trace.csv"), "is a file; name a folder"),
        (("--out", "r.html", "--plots", "nowhere/plots"), "there is no folder nowhere"),
        (("--out", "r.html", "--perfetto", "nowhere/p"), "there is no folder nowhere"),
        (("--out", "r.html", "--profile", "trace.csv"), "trace.csv"),
        (("--out", "r.html", "--seed", "-1"), "--seed is -1"),
    ],
)
def test_what_cant_be_done_is_said_first(
    kpolicy: Command, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], said: str
) -> None:
    """One line, exit code 2, and no file made, whole or half."""
    monkeypatch.chdir(tmp_path)
    ended = kpolicy("report", "trace.csv", *options)
    assert ended.code == 2
    assert said in ended.err
    assert ended.err.count("\n") == 1
    assert "Traceback" not in ended.err
    assert [path.name for path in tmp_path.iterdir()] == ["trace.csv"]


def test_a_page_that_is_there_stays_where_the_new_one_fails(kpolicy: Command, trace: Path, tmp_path: Path) -> None:
    """A budget that can't be met ends it with the old page whole."""
    page = tmp_path / "r.html"
    page.write_text("the old one")
    ended = kpolicy("report", trace, "--policy", "vllm", "--out", page, "--ladder", "1,2,4", "--budget-graphs", 1)
    assert ended.code == 2
    assert "budget" in ended.err
    assert page.read_text() == "the old one"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.html", "trace.csv"]


@pytest.mark.parametrize(
    ("command", "option", "name"),
    [
        (("report", "--out", "{}"), "--out", "x" * 300 + ".html"),
        (("report", "--out={}"), "--out", "x" * 300 + ".html"),
        (("report", "--out", "{}"), "--out", "x" * 300 + "/r.html"),
        (("report", "--out", "r.html", "--plots", "{}"), "--plots", "x" * 300),
        (("report", "--out", "r.html", "--perfetto", "{}"), "--perfetto", "x" * 300),
        (("plan", "--out", "{}"), "--out", "x" * 300),
        (("simulate", "--step-log", "{}"), "--step-log", "x" * 300),
        (("simulate", "--policy", "vllm", "--policy", "auto", "--perfetto", "{}"), "--perfetto", "x" * 252),
        (("sweep", "--out", "{}"), "--out", "x" * 300),
    ],
)
def test_a_name_that_is_too_long_is_said_first(
    kpolicy: Command, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...],
    option: str, name: str,
) -> None:  # fmt: skip
    """The option, the name and what is wrong with it, exit code 2, and nothing is made; of any command."""
    monkeypatch.chdir(tmp_path)
    pytest.importorskip("matplotlib") if option == "--plots" else None
    ended = kpolicy(command[0], "trace.csv", *(word.format(name) for word in command[1:]))
    assert ended.code == 2
    assert re.match(rf"kpolicy: {option}\b.* {name}", ended.err)
    assert "too long" in ended.err
    assert "Is there space" not in ended.err
    assert ended.err.count("\n") == 1
    assert ended.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["trace.csv"]


@pytest.mark.parametrize("name", ["latency.svg", "padding-2.png"])
def test_a_picture_isnt_written_over_what_is_read(kpolicy: Command, trace: Path, tmp_path: Path, name: str) -> None:
    """Any file that --plots may make, before anything runs; nor over what another option writes."""
    pytest.importorskip("matplotlib")
    folder = tmp_path / "plots"
    folder.mkdir()
    other = folder / name
    other.write_text(trace.read_text())
    given = ("report", trace, other, "--policy", "eager", *SMALL, "--plots", folder)
    refused(kpolicy(*given, "--out", tmp_path / "r.html"), f"--plots {other} is what the command reads")
    assert other.read_text() == trace.read_text()
    page = folder / "modes.png"
    refused(kpolicy("report", trace, *given[3:], "--out", page), f"--out and --plots both write {page}")
    assert [path.name for path in folder.iterdir()] == [name]
    new = tmp_path / "new"
    refused(kpolicy("report", trace, "--policy", "eager", *SMALL, "--plots", new, "--out", new), "both write")
    assert not new.exists()


def test_without_matplotlib_nothing_runs(
    kpolicy: Command, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The extra is named; the page alone needs none of it."""
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    ended = kpolicy("report", trace, "--out", tmp_path / "r.html", "--plots", tmp_path / "plots")
    assert ended.code == 2
    assert "pip install 'kpolicy[plots]'" in ended.err
    assert [path.name for path in tmp_path.iterdir()] == ["trace.csv"]
    assert kpolicy("report", trace, "--policy", "eager", "--out", tmp_path / "r.html").code == 0


@pytest.fixture
def interrupt_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes while sizes are planned."""

    def interrupted(*_args: object, **_rest: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(import_module("kpolicy.report.gather"), "plan_trace", interrupted)


@pytest.mark.usefixtures("interrupt_plans")
def test_an_interrupt_keeps_what_was_done(kpolicy: Command, trace: Path, tmp_path: Path) -> None:
    """Ctrl-C ends it with code 130; the page has the policies that were done, and says what is missing."""
    ended = kpolicy("report", trace, "--policy", "vllm", "--policy", "auto", "--out", tmp_path / "r.html", "--json")
    assert ended.code == 130
    assert "interrupted in a plan; what was done is in" in ended.err
    (made,) = ended.json["traces"]
    assert [run["name"] for run in made["runs"]] == ["vllm", "auto"]
    assert made["interrupted"].endswith("interrupted in a plan")
    assert made["interrupted"] in (tmp_path / "r.html").read_text()


def test_an_interrupt_in_a_policy_leaves_it_out(
    kpolicy: Command, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a trace isn't reported; with no policy done there is no page."""
    gather = import_module("kpolicy.report.gather")
    simulate = gather.simulate

    def interrupted(trace: object, policy: str, **rest: object) -> object:
        if policy == "eager":
            raise KeyboardInterrupt
        return simulate(trace, policy, **rest)

    monkeypatch.setattr(gather, "simulate", interrupted)
    out, other = tmp_path / "r.html", tmp_path / "other.csv"
    other.write_bytes(trace.read_bytes())
    for policies, done in ((("vllm", "eager", "auto"), ["vllm"]), (("eager", "vllm"), [])):
        asked = [each for policy in policies for each in ("--policy", policy)]
        ended = kpolicy("report", trace, other, *asked, "--out", out, *SMALL, "--json")
        assert ended.code == 130
        assert out.exists() == bool(done)
        if done:
            (made,) = ended.json["traces"]
            assert [run["name"] for run in made["runs"]] == done
            assert "before eager, auto; nothing was planned" in ended.err
        out.unlink(missing_ok=True)


@pytest.mark.parametrize(("part", "said"), [("mode_maps", "before the maps of modes"), ("plan_trace", "in a plan")])
def test_an_interrupt_in_another_part(
    part: str, said: str, kpolicy: Command, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page stands without the part that was under way."""

    def interrupted(*_args: object, **_rest: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(import_module("kpolicy.report.gather"), part, interrupted)
    ended = kpolicy("report", trace, "--policy", "vllm", "--out", tmp_path / "r.html", *SMALL, "--budget", 4)
    assert ended.code == 130
    assert f"interrupted {said}; what was done is in" in ended.err
    assert said in (tmp_path / "r.html").read_text()


def test_an_interrupt_in_a_later_trace(
    kpolicy: Command, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The traces before it are whole, and nothing is said to be missing of them."""
    gather = import_module("kpolicy.report.gather")
    simulate = gather.simulate

    def interrupted(given: Trace, policy: str, **rest: object) -> object:
        if "later.csv" in given.source:
            raise KeyboardInterrupt
        return simulate(given, policy, **rest)

    monkeypatch.setattr(gather, "simulate", interrupted)
    later = tmp_path / "later.csv"
    later.write_text(trace.read_text())
    out = tmp_path / "r.html"
    ended = kpolicy("report", trace, later, "--policy", "vllm", "--out", out, *SMALL, "--budget", 4, "--json")
    assert ended.code == 130
    assert "interrupted, nothing is reported of it" in ended.err
    (made,) = ended.json["traces"]
    assert made["interrupted"] == ""
    assert len(made["runs"]) == 2


def test_a_policy_that_cant_run_is_left_out(kpolicy: Command, trace: Path, tmp_path: Path) -> None:
    """Graphs that leave no KV: the page has the others, and says what is missing and why; alone there is no page."""
    out = tmp_path / "r.html"
    options = ("--kv-tokens", 6700, "--out", out, "--json")
    ended = kpolicy("report", trace, "--policy", "vllm", "--policy", "auto", *options)
    assert ended.code == 1
    assert ": no auto: captured graphs take the room of" in ended.err
    (made,) = ended.json["traces"]
    assert made["runs"][0]["name"] == "vllm"
    assert [each["what"] for each in made["failed"]] == ["auto"]
    assert "no auto: captured graphs" in out.read_text()
    out.unlink()
    refused(kpolicy("report", trace, "--policy", "auto", *options), "nothing is left for requests")
    assert not out.exists()


def test_a_plan_that_cant_run_leaves_the_page(
    kpolicy: Command, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policies are there, and the section of the plan says why there is none."""

    def fails(*_args: object, **_rest: object) -> None:
        raise ConfigError("nothing is left for requests.")

    monkeypatch.setattr(import_module("kpolicy.report.gather"), "plan_trace", fails)
    ended = kpolicy("report", trace, "--policy", "vllm", "--out", tmp_path / "r.html", *SMALL)
    assert ended.code == 1
    assert "no plan for vllm: nothing is left" in ended.err
    assert "Nothing was planned: nothing is left for requests." in (tmp_path / "r.html").read_text()


def test_one_request_is_enough(kpolicy: Command, tmp_path: Path) -> None:
    """There is no second half to score a plan on, and it is planned all the same."""
    one = write(tmp_path / "one.csv", "timestamp,input_length,output_length", "0,40,9")
    ended = kpolicy("report", one, "--policy", "vllm", "--out", tmp_path / "r.html", *SMALL, "--budget", 2, "--json")
    assert ended.code == 0, ended.err
    assert len(ended.json["traces"][0]["runs"]) == 2


def test_a_trace_of_which_nothing_is_served(kpolicy: Command, trace: Path, tmp_path: Path) -> None:
    """The page and standard error say so and what to do (code 1), and other traces are whole."""
    pytest.importorskip("matplotlib")
    long = write(tmp_path / "long.csv", "timestamp,input_length,output_length", "0,1000000,9", "5,1000000,9")
    out = tmp_path / "r.html"
    ended = kpolicy("report", long, "--out", out, *SMALL)
    assert ended.code == 1
    told = f"on {long}, from 0 s for 300 s: no request was served (2 over_kv_capacity); each takes more than the "
    assert [told in line for line in ended.err.splitlines()] == [True, True]
    said = " ".join(ended.out.split())
    assert f"No request of {long}, from 0 s for 300 s was served (2 over_kv_capacity): give more KV tokens" in said
    given = ("--policy", "vllm", "--out", out, *SMALL, "--budget", 4, "--plots", tmp_path / "plots", "--json")
    ended = kpolicy("report", long, trace, *given)
    assert ended.code == 1
    assert ended.err.startswith(f"kpolicy: vllm {told}")
    assert len(ended.err.splitlines()) == 1
    first, second = ended.json["traces"]
    assert "was served (2 over_kv_capacity)" in first["advice"]["sentence"]
    assert first["advice"]["paste"] == []
    assert second["advice"]["planned"]
    assert first["advice"]["sentence"] in unescape(out.read_text())
