"""`benchmarks.fidelity_run`: what it runs, in which order, and where it ends."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest

from benchmarks import fidelity_run

POLICIES = ("auto", "split:form=decodes_beside")


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Options of a run into DIR/out."""
    config, trace = tmp_path / "config.json", tmp_path / "trace.csv"
    config.write_text("{}")
    trace.write_text("")
    policies = [word for policy in POLICIES for word in ("--policy", policy)]
    files = ["--config", str(config), "--trace", str(trace), "--out", str(tmp_path / "out")]
    return [*files, *policies, "--rate", "2", "--quiet", "0", "--limit", "180", "--later", "2", "--again", "150"]


def pretend(monkeypatch: pytest.MonkeyPatch, *codes: int, seconds: float = 0.0) -> None:
    """In place of each command one that says its name, writes its file and ends with the next of these codes."""
    real = fidelity_run.calls

    def calls(options: argparse.Namespace) -> list[tuple[str, Path, list[str], float]]:
        found = []
        for (what, path, command, most), code in zip(real(options), [*codes, *[0] * 9], strict=False):
            script = f"import time; time.sleep({seconds}); print('{what} ran')"
            if path.name == "A.jsonl":
                script += "; open('part-A-auto.jsonl', 'w').close()"
            elif path.name != "R.json":
                script += f"; open('{path}', 'w').close()"
            found.append(
                (what, path, [sys.executable, "-c", f"{script}; raise SystemExit({code})", *command[-4:]], most)
            )
            assert not any("/" in word for word in command[3:]), "no folder of a machine is in what results name"
        return found

    monkeypatch.setattr(fidelity_run, "calls", calls)


def test_all_runs_in_its_order_and_once(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch)
    assert fidelity_run.main(words) == 0
    *lines, around, last = capsys.readouterr().out.splitlines()
    names = [f"calibration {i}" for i in (1, 2, 3)]
    names += ["the middle", "the run", "calibration 4", "steps again", "calibration 5", "the middle"]
    assert [line.partition("] ")[2] for line in lines] == [f"{name}: done" for name in names]
    logs = [
        "S-auto.jsonl",
        "S-split-form-decodes_beside.jsonl",
        "S-auto-2.jsonl",
        "S-split-form-decodes_beside-2.jsonl",
        "S-auto-3.jsonl",
        "S-split-form-decodes_beside-3.jsonl",
    ]
    told = " ".join(f"--log {log}" for log in logs)
    assert f"--profile P.json {told} --again A-auto.jsonl --run R.json --trace trace.csv --start 0 --window 30" in last
    table = "the middle of each figure of 5 calibrations, 3 before the run and 2 after it"
    assert f"--profile Q.json --table '{table}' {told} --again A-auto.jsonl --run R.json" in around
    assert (tmp_path / "out" / "R.json").read_text() == "the run ran\n"
    assert (tmp_path / "out" / "C-2.log").read_text() == "calibration 2 ran\n"
    assert not (tmp_path / "out" / "R.json.part").exists()
    assert fidelity_run.main(words) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if "done" in line] == []


def test_by_itself_it_calibrates_three_times_and_runs(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing behind the run, and the one command that holds it to the profile of before."""
    pretend(monkeypatch)
    assert fidelity_run.main(words[: words.index("--later")]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    names = [*(f"calibration {i}" for i in (1, 2, 3)), "the middle", "the run"]
    assert [line.partition("] ")[2] for line in lines] == [f"{name}: done" for name in names]
    assert "--profile P.json --log S-auto.jsonl" in last
    assert "--again" not in last


def test_what_fails_ends_it_and_goes_on_from_there(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run by fewer calibrations is none."""
    pretend(monkeypatch, 0, 3)
    # One that fails writes nothing.
    real = fidelity_run.ran

    def ran(command: list[str], out: Path, written: Path, seconds: float, *, quiet: int) -> int:
        code = real(command, out, written, seconds, quiet=quiet)
        if code:
            (out / written).unlink()
        return code

    monkeypatch.setattr(fidelity_run, "ran", ran)
    assert fidelity_run.main(words) == 1
    said = capsys.readouterr()
    assert said.out.splitlines()[-1].endswith("calibration 2: ended with 3")
    assert said.err == "calibration 2 ran\n"
    assert not (tmp_path / "out" / "C-3.json").exists()
    monkeypatch.undo()
    pretend(monkeypatch)
    assert fidelity_run.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "calibration 1: is there"
    assert lines[1].endswith("calibration 2: done")


def test_nothing_begins_without_time_and_what_lasts_is_stopped(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, seconds=600)
    assert fidelity_run.main([*words, "--calibration-limit", "5"]) == 1
    assert "calibration 1: ended with -" in capsys.readouterr().out
    assert fidelity_run.main([*words, "--again", "0", "--limit", "9"]) == 1
    assert "calibration 1: no time left within --limit 9; call it again to go on" in capsys.readouterr().err


def test_steps_run_again_with_all_their_time_or_in_the_next_call(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """That one has a whole limit for them; a call's own start of less than a second isn't missed."""
    clock, runs_s = [0.0], [35.0]
    monkeypatch.setattr(fidelity_run.time, "monotonic", lambda: clock[0])
    seen: list[tuple[list[str], float]] = []

    def ran(command: list[str], out: Path, written: Path, seconds: float, *, quiet: int) -> int:
        del quiet
        if written.name == "R.json":
            clock[0] += runs_s[0]
        if written.name == "A.jsonl":
            seen.append((command, seconds))
        else:
            (out / written).touch()
        return 0

    monkeypatch.setattr(fidelity_run, "ran", ran)
    asked = [*words, "--again", "95.5"]
    assert fidelity_run.main([*asked, "--limit", "120"]) == 1
    assert capsys.readouterr().err == (
        "steps again: 85 s are left within --limit 120, and --again 95.5 takes 100.5; call it again to go on\n"
    )
    assert seen == []
    assert not [*(tmp_path / "out").glob("*A*")]
    assert fidelity_run.main([*asked, "--limit", "120"]) == 0
    (command, seconds), said = seen[0], capsys.readouterr()
    assert said.err == ""
    assert command[-4:] == ["--seconds", "80.5", "--out", "part-A.jsonl"]
    assert seconds == 100.5
    (tmp_path / "out" / "R.json").unlink()
    runs_s[0] = 19.9
    assert fidelity_run.main([*asked, "--limit", "120"]) == 0
    assert seen[1] == (command, pytest.approx(100.1))


def test_steps_that_were_cut_short_run_again(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither they nor the files of one that was killed are taken for done."""
    pretend(monkeypatch, 0, 0, 0, 0, 0, 0, 3)
    assert fidelity_run.main(words) == 1
    out = tmp_path / "out"
    assert [path.name for path in out.glob("*A-*")] == ["part-A-auto.jsonl"]
    (out / "part-A-other.jsonl").touch()
    monkeypatch.undo()
    pretend(monkeypatch)
    capsys.readouterr()
    assert fidelity_run.main(words) == 0
    assert [path.name for path in out.glob("*A-*")] == ["A-auto.jsonl"]
    assert "steps again: done" in capsys.readouterr().out


@pytest.mark.parametrize("seconds", ["0.5", "15", "-1", "nan", "inf", "175.5"])
def test_seconds_in_which_no_steps_can_run_again_are_refused(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], seconds: str
) -> None:
    """Before anything is measured."""
    with pytest.raises(SystemExit):
        fidelity_run.main([*words, f"--again={seconds}"])
    assert (
        f"--again {seconds}: 0 for none, or over 15 seconds, which go for starting and ending, and at most 5 less than "
        "--limit 180"
    ) in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_calibrations_after_the_run_can_be_left_out(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch)
    assert fidelity_run.main([*words, "--later", "0"]) == 0
    told = capsys.readouterr().out
    assert "--profile P.json" in told
    assert "Q.json" not in told
    assert not (tmp_path / "out" / "Q.json").exists()
    with pytest.raises(SystemExit):
        fidelity_run.main([*words, "--later", "-1"])
    assert "--later -1: 0 for none, or how many calibrations run after the run" in capsys.readouterr().err


def test_another_model_in_the_folder_is_refused(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch)
    assert fidelity_run.main(words) == 0
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"another": "model"}))
    with pytest.raises(SystemExit):
        fidelity_run.main([*words, "--config", str(other)])
    assert "has another config.json; give another folder" in capsys.readouterr().err


def test_the_commands_are_those_of_a_run(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every option that they give is one that the real commands take; what a test of each command tries, isn't here."""
    seen: list[list[str]] = []
    cores: list[int] = []

    def ran(command: list[str], out: Path, written: Path, seconds: float, *, quiet: int) -> int:
        del out, written, seconds
        seen.append(command)
        cores.append(quiet)
        return 0

    monkeypatch.setattr(fidelity_run, "ran", ran)
    assert fidelity_run.main([*words, "--window", "20", "--start", "600", "--limit", "580"]) == 0
    served = "--trace trace.csv --start 600 --window 20"
    *calibrations, middle, run, fourth, again, fifth, all_five = [" ".join(command[2:]) for command in seen]
    assert fourth == calibrations[2].replace("C-3", "C-4")
    assert fifth == calibrations[2].replace("C-3", "C-5")
    assert all_five == "benchmarks.middle_profile C-1.json C-2.json C-3.json C-4.json C-5.json --out Q.json"
    assert calibrations[2] == ("kpolicy calibrate --device cuda --model config.json --seconds 25 --out C-3.json --json")
    assert middle == "benchmarks.middle_profile C-1.json C-2.json C-3.json --out P.json"
    assert run == (
        f"kpolicy run --device cuda --model config.json {served} --rate 2 --policy auto --policy "
        "split:form=decodes_beside --repeats 3 --recapture --no-verify --profile P.json --step-log S.jsonl --json"
    )
    assert again == (
        f"benchmarks.gpu.again --device cuda --config config.json --profile P.json --run R.json {served} --log "
        "S-auto.jsonl --log S-split-form-decodes_beside.jsonl --mode eager --mode piecewise --most 5000 --passes 9 "
        "--seconds 135 --out part-A.jsonl"
    )
    seen.clear()
    cores.clear()
    assert fidelity_run.main([*words, "--turns", "--quiet", "3", "--limit", "580"]) == 0
    [again] = [command for command in seen if "benchmarks.gpu.again" in command]
    assert again[again.index("--turns") + 1 :][:2] == ["--most", "5000"]
    # It chooses among all cores, and a middle is no measurement.
    assert cores == [3, 3, 3, 0, 3, 3, 0, 3, 0]
    seen.clear()
    assert fidelity_run.main([*words, "--passes", "3", "--limit", "580"]) == 0
    [again] = [command for command in seen if "benchmarks.gpu.again" in command]
    assert again[again.index("--passes") + 1] == "3"
    with pytest.raises(SystemExit):
        fidelity_run.main([*words, "--passes", "2"])
    assert "--passes 2: from 3 up, of which the middle is looked at" in capsys.readouterr().err
