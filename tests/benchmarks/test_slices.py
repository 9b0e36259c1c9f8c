"""`benchmarks.gpu.slices`: several benchmarks by one command, each in its process, within one limit."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from benchmarks.gpu import slices
from benchmarks.gpu.slice_kinds import KINDS, Call, Slice, read_slice

QWEN: dict[str, Any] = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 896, "intermediate_size": 4864,
    "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
    "max_position_embeddings": 32768, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture
def interruptible() -> Iterator[None]:
    """What a test starts can be interrupted, also where a shell began pytest in the background: there it can't."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def given(tmp_path: Path) -> list[str]:
    """What a dry run is told besides its slices."""
    for name in ("models/qwen05b", "traces"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "models" / "qwen05b" / "config.json").write_text(json.dumps(QWEN))
    (tmp_path / "traces" / "azure_llm_2023_code.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        + "".join(f"2023-11-16 18:17:{i:02}.0000000,5,2\n" for i in range(6))
    )
    folders = [f"--{name}={tmp_path / name}" for name in ("models", "traces", "results")]
    return [*folders, "--tiny", "--device", "cpu", "--date", "today", "--commit", "abc", "--limit", "300"]


@pytest.fixture
def call(given: list[str], tmp_path: Path) -> Call:
    """What slices share."""
    del given
    results = tmp_path / "results"
    results.mkdir()
    return Call(
        tmp_path / "models", tmp_path / "traces", results, tmp_path / "shapes.json", None, ["qwen05b"], "cpu",
        tiny=True, date="today", commit="abc",
    )  # fmt: skip


class Taken(Exception):
    """A module took what it was given."""


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("startup:qwen05b", {"pairs": 1, "plan": None}), ("beside:qwen05b --rounds 3", {"rounds": 3}),
        ("regret:qwen05b", {"model": "qwen05b", "loads": None, "shapes_a_load": 40}),
        ("regret:qwen05b:code_x6,burstgpt_x600", {"loads": ["code x6", "burstgpt x600"]}),
        ("e2e:qwen05b:code_saturated", {"loads": ["code saturated"], "requests": 600}),
        ("e2e:qwen05b:code_x6,code_x1:150 --policies auto vllm", {"requests": 150, "policies": ["auto", "vllm"]}),
        ("correct:qwen05b:100:20", {"part": "bits", "first": 100, "count": 20, "commit": "abc"}),
        ("correct:qwen05b:reference", {"part": "reference"}), ("overlap", {"layers": 2, "count": 100_000}),
        ("overlap:250:500", {"first": 250, "count": 500}), ("soak", {"layers": 6}),
        ("overhead:qwen05b --pairs 4", {"pairs": 4, "tiny": True}), ("gpt2", {"rounds": 60}),
        ("kernels:qwen05b", {"seconds": 175.0}),
        ("padded", {"models": ["1B", "0.5B"]}), ("padded:8B,dsv2lite", {"models": ["8B", "dsv2lite"]}),
    ],
)  # fmt: skip
def test_modules_take_what_their_slices_say(
    text: str, wanted: dict[str, Any], call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every option is one that the module has, with the value that is meant; the result lies among the results."""
    call.shapes.write_text("{}")
    one = read_slice(text, call)
    _, _, module, *words = one.command(200)
    parse = argparse.ArgumentParser.parse_args

    def parsed(self: argparse.ArgumentParser, *given: Any, **named: Any) -> Any:
        raise Taken(parse(self, *given, **named))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    with pytest.raises(Taken) as taken:
        importlib.import_module(module).main(words)
    options = vars(taken.value.args[0])
    assert {name: options[name] for name in wanted} == wanted
    assert options["date"] == "today"
    assert options.get("device", "cpu") == "cpu"
    out = options["json"] if text.startswith("overhead") else options["out"]
    assert out == call.results / f"{one.name}.json"
    assert "seconds" not in options or 50 < options["seconds"] < 200


def test_every_kind_is_tried() -> None:
    """But for tests, which pytest runs: they are among those that really run."""
    (mark,) = (each for each in test_modules_take_what_their_slices_say.pytestmark if each.name == "parametrize")
    assert {text.split(" ")[0].partition(":")[0] for text, _ in mark.args[1]} == KINDS.keys() - {"tests"}


def test_slices_run(given: list[str], tmp_path: Path) -> None:
    """Results, logs and how each ended are kept, and go into the archive."""
    archive, results = tmp_path / "all.tgz", tmp_path / "results"
    (tmp_path / "test_some.py").write_text("""
import pytest
def test_passed():
    assert True
def test_skipped():
    pytest.skip("no need")
""")
    wanted = ["overlap:0:1", "overhead:qwen05b --pairs 1 --no-parts", f"tests:{tmp_path / 'test_some.py'}"]
    assert slices.main([*given, "--at-once", "2", f"--pack={archive}", *wanted]) == 0
    assert json.loads((results / "overlap-0-1.json").read_text())["total"]["steps_by_commit"] == {"abc": 1}
    assert json.loads((results / "overhead-qwen05b.json").read_text())["device"] == "none"
    (path,) = results.glob("tests-*.json")
    tests = json.loads(path.read_text())
    assert (tests["passed"], tests["skipped"], tests["failed"]) == (1, 1, [])
    assert tests["why_skipped"] == {"no need": 1}
    with tarfile.open(archive) as packed:
        assert sorted(packed.getnames()) == sorted(path.name for path in results.iterdir())
    assert "-m benchmarks.gpu.overlap --config qwen05b/config.json" in (results / "overlap-0-1.log").read_text()
    assert results_of(tmp_path) == dict.fromkeys(wanted, "done")


class Sleeper:
    """Slices that run Python code instead of a benchmark."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, given: list[str]) -> None:
        self.codes: dict[str, tuple[str, float, float]] = {}
        monkeypatch.setattr(slices, "read_slice", self.read)
        monkeypatch.setenv("PYTHONPATH", given[2].partition("=")[2])
        self.given = given

    def read(self, text: str, call: Call) -> Slice:
        code, seconds, shortest = self.codes[text]
        (call.results / f"{text}.py").write_text(code)
        return Slice(text, text, seconds, shortest, [text], None)

    def run(self, limit: float, *more: str, **codes: tuple[str, float, float]) -> int:
        self.codes = codes
        return slices.main([*self.given, "--limit", str(limit), *more, *codes])


@pytest.fixture
def sleeper(monkeypatch: pytest.MonkeyPatch, given: list[str]) -> Sleeper:
    return Sleeper(monkeypatch, given)


def results_of(tmp_path: Path) -> dict[str, str]:
    return {each["slice"]: each["result"] for each in json.loads((tmp_path / "results" / "slices.json").read_text())}


def test_what_would_overrun_is_not_begun(sleeper: Sleeper, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that may be cut gets what is left; the others begin, whatever went wrong before."""
    assert sleeper.run(
        100, bad=("raise SystemExit(3)", 5, 5), long=("", 150, 150), cut=("", 150, 20), good=("print('fine')", 5, 5)
    ) == 1  # fmt: skip
    assert results_of(tmp_path) == {"bad": "ended with 3", "long": "not begun", "cut": "done", "good": "done"}
    told = capsys.readouterr().out
    assert "long: not begun, 9" in told
    assert "cut: begins, 9" in told
    assert told.splitlines()[-1].endswith(": fine")


def test_calls_go_on_from_each_other(sleeper: Sleeper, tmp_path: Path) -> None:
    """What a call found is there for the next, and how slices ended is told of both."""
    code = "import pathlib; path = pathlib.Path(__file__).with_suffix('.json'); path.open('a').write('x')"
    for _ in range(2):
        assert sleeper.run(100, a=(code, 5, 5)) == 0
    assert (tmp_path / "results" / "a.json").read_text() == "xx"
    assert len(json.loads((tmp_path / "results" / "slices.json").read_text())) == 2
    assert (tmp_path / "results" / "a.log").read_text().count("$ ") == 2


class Clock:
    """The time of `benchmarks.gpu.slices`, which goes on by itself and is ahead by what has happened.

    Args:
        ready: files that are written when all slices are under way, which is looked at between looks at them.
        over: seconds that it is ahead from then.
        kept: a file that is written when one has what it needs.
        grace: seconds that it is ahead from then, besides.
    """

    def __init__(self, ready: list[Path], over: float, kept: Path, grace: float) -> None:
        self.ready, self.over, self.kept, self.grace = ready, over, kept, grace
        self.ahead = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead + (self.grace if written(self.kept) else 0.0)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds / 5)
        if all(map(written, self.ready)):
            self.ahead = self.over

    def strftime(self, form: str) -> str:
        return time.strftime(form)


def written(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


@pytest.mark.usefixtures("interruptible")
def test_one_that_takes_too_long_is_interrupted(
    sleeper: Sleeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that it can write what it has; then it is killed, with what it started.

    Their time is over once both are under way, and the time to write is once one has written.
    """
    ready, kept, child = tmp_path / "ready", tmp_path / "kept", tmp_path / "child"
    polite = f"""
import time
try:
    open({str(ready)!r}, "w").write("ready")
    time.sleep(600)
except KeyboardInterrupt:
    open({str(kept)!r}, "w").write("kept")
    raise
"""
    stubborn = f"""
import signal, subprocess, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
process = subprocess.Popen(["sleep", "600"], start_new_session=True)
open({str(child)!r}, "w").write(str(process.pid))
time.sleep(600)
"""
    seconds, grace = 400.0, 40.0
    monkeypatch.setattr(slices, "GRACE_S", grace)
    monkeypatch.setattr(slices, "time", Clock([ready, child], seconds - grace, kept, grace))
    polite_one, stubborn_one = (polite, seconds, seconds), (stubborn, seconds, seconds)
    assert sleeper.run(1000, "--at-once", "2", polite=polite_one, stubborn=stubborn_one) == 1
    assert kept.read_text() == "kept"
    assert results_of(tmp_path) == {"polite": "cut off", "stubborn": "cut off"}
    assert gone(int(child.read_text()))


def gone(pid: int) -> bool:
    """Whether a process is no more, or only waits to be asked how it ended; asked for a minute."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_slices_beside_each_other_have_cores_of_their_own(sleeper: Sleeper, tmp_path: Path) -> None:
    """Each the same number, while this process keeps its own; each waits until it has seen the other."""
    mine = sorted(os.sched_getaffinity(0))
    code = """
import os, pathlib, sys, time
here = pathlib.Path(sys.argv[0]).parent
(here / sys.argv[0].replace(".py", ".cores")).write_text(" ".join(map(str, os.sched_getaffinity(0))))
end = time.monotonic() + 200
while len(list(here.glob("*.cores"))) < 2 and time.monotonic() < end:
    time.sleep(0.02)
"""
    cores = ",".join(map(str, mine[:2]))
    assert sleeper.run(300, "--at-once", "2", "--cores", cores, a=(code, 250, 250), b=(code, 250, 250)) == 0
    found = [(tmp_path / "results" / f"{name}.cores").read_text() for name in "ab"]
    assert sorted(found) == sorted(str(core) for core in mine[:2])
    assert sorted(os.sched_getaffinity(0)) == mine


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_whole_command_ends_what_it_started(number: signal.Signals, given: list[str], tmp_path: Path) -> None:
    """Interrupted by a terminal, or ended by whoever limits its time, it leaves nothing behind.

    The second slice finds too little time, which is told once the first is under way.
    """
    sleeps, child = tmp_path / "test_sleeps.py", tmp_path / "child"
    sleeps.write_text(f"""
import subprocess, time
def test_sleeps():
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    open({str(child)!r}, "w").write(str(process.pid))
    time.sleep(600)
""")
    command = [sys.executable, "-m", "benchmarks.gpu.slices", *given, "--at-once", "2", f"tests:{sleeps}", "gpt2@5000"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=slices.ROOT
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert "begins" in process.stdout.readline()
        assert "not begun" in process.stdout.readline()
        end = time.monotonic() + 120
        while not written(child) and time.monotonic() < end:
            time.sleep(0.02)
        below = slices.descendants(process.pid)
        process.send_signal(number)
        process.wait(120)
    assert int(child.read_text()) in below
    assert len(below) == 2
    assert all(gone(pid) for pid in below)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("regrets:qwen05b", "the kinds are startup, beside, regret, "), ("", "the kinds are startup"),
        ("regret:qwen", r"model 'qwen': .*models has qwen05b"), ("beside", "beside takes 1 parts behind colons"),
        ("e2e:qwen05b", "e2e takes 2 to 3 parts"), ("e2e:qwen05b:code_x1:many", "'many' is no whole number"),
        ("gpt2@soon", "'soon' is no whole number"), ("correct:qwen05b:0", "name the first step and how many"),
        ("correct:qwen05b:reference:5", "the reference has no steps"), ("tests:test_no.py", "test_no.py: no such file"),
        ("startup:", "startup takes 1 parts"), ("gpt2 'x", "No closing quotation"),
    ],
)  # fmt: skip
def test_what_is_no_slice_is_said(text: str, told: str, call: Call) -> None:
    """With the slice, what is wrong with it, and what there is."""
    with pytest.raises(ValueError, match=told) as raised:
        read_slice(text, call)
    assert str(raised.value).startswith(f"slice {text!r}: ")


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["gpt2", "gpt2 --rounds 1"], "two slices write gpt2.json"), (["gpt2", "--at-once", "0"], "both are above 0"),
        (["gpt2", "--quiet", "1", "--at-once", "2"], "--quiet chooses the cores of one slice at a time"),
        (["gpt2", "--at-once", "2", "--cores", "999"], "--cores 999 are 0 that this process may use"),
        (["gpt3"], "slice 'gpt3': the kinds are"),
    ],
)  # fmt: skip
def test_bad_options_begin_nothing(
    more: list[str], told: str, given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are one line."""
    with pytest.raises(SystemExit) as ended:
        slices.main([*given, *more])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err.splitlines()[-1]
    assert not list((tmp_path / "results").glob("*"))


def test_modules_end_before_their_time_is_over(call: Call) -> None:
    """Nothing begins that what a benchmark does last would overrun; one that isn't told of seconds isn't cut either."""
    on_gpu = call._replace(tiny=False, device="cuda")
    for text in ("startup:qwen05b@120", "correct:qwen05b:0:100@120", "soak@120"):
        one = read_slice(text, on_gpu)
        assert one.shortest < one.seconds == 120
        told = one.command(120)
        assert 40 < int(told[told.index("--seconds") + 1]) < 100
        assert one.command(100)[-1] == str(int(told[-1]) - 20)
    whole = read_slice("gpt2@50", on_gpu)
    assert whole.shortest == whole.seconds == 50
    assert "--seconds" not in whole.command(50)


def test_what_tests_come_to(tmp_path: Path) -> None:
    """Passed, failed with their names, and skipped with reasons; a file that was cut off comes to nothing."""
    path = tmp_path / "found.xml"
    path.write_text(
        '<testsuites><testsuite><testcase classname="a" name="b" time="1.5"/>'
        '<testcase classname="a" name="c" time="0.5"><failure message="no"/></testcase>'
        '<testcase classname="a" name="d"><error message="no"/></testcase>'
        '<testcase classname="a" name="e"><skipped message="no CUDA device"/></testcase></testsuite></testsuites>'
    )
    assert slices.tests_told(path) == {
        "passed": 1, "skipped": 1, "failed": ["a::c", "a::d"], "why_skipped": {"no CUDA device": 1}, "seconds": 2.0
    }  # fmt: skip
    path.write_text("<testsuites>")
    assert slices.tests_told(path) == {}
    assert slices.tests_told(tmp_path / "none.xml") == {}
