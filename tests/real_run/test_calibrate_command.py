"""`kpolicy calibrate`, end to end on the CPU."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kpolicy.schemas import read_profile  # noqa: E402
from tests.cli.conftest import Command  # noqa: E402
from tests.real_run.helpers import TINY  # noqa: E402
from tests.real_run.test_command import kpolicy  # noqa: E402, F401

SMALL = ("--max-num-reqs", 4, "--max-num-tokens", 16, "--kv-tokens", 512, "--seconds", 0.3)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return path


def test_a_profile_is_measured(kpolicy: Command, config: Path, tmp_path: Path) -> None:  # noqa: F811
    """Every mode has times, the profile says where they are from, and other commands decide by it."""
    out = tmp_path / "profile.json"
    ended = kpolicy("calibrate", "--model", config, "--out", out, "--ladder", "1,2,4,8,16", "--json", *SMALL)
    assert (ended.code, [line for line in ended.err.splitlines() if "beyond --seconds 0.3" not in line]) == (0, [])
    profile, said = read_profile(out), ended.json
    assert profile.costs.measured
    assert said["costs"] == profile.costs.version
    assert "Qwen3ForCausalLM" in profile.model
    assert profile.command.startswith("kpolicy calibrate --model")
    assert said["graphs"] > 5
    assert said["not_captured"] == {}
    assert said["host_us"].keys() == {"full", "piecewise", "eager"}
    assert said["device_us"].keys() == {*said["host_us"], "full, mixed"}
    assert all(us > 0 for curve in said["device_us"].values() for us in curve.values())
    assert sorted(tmp_path.iterdir()) == [config, out]
    assert profile.costs.version in kpolicy("explain", "--decodes", 2, "--profile", out).out


def test_in_text(kpolicy: Command, config: Path, tmp_path: Path) -> None:  # noqa: F811
    """Without --json the table is short, and ends with the file."""
    out = tmp_path / "profile.json"
    ended = kpolicy("calibrate", "--model", config, "--out", out, "--device", "cpu", *SMALL)
    assert ended.code == 0
    assert ended.out.splitlines()[-1] == f"written to {out}"


def test_repeats_are_each_a_process_and_the_profile_their_middle(
    kpolicy: Command, config: Path, tmp_path: Path  # noqa: F811
) -> None:  # fmt: skip
    """They stay beside it; a figure of it is none of one table's in particular."""
    out = tmp_path / "p.json"
    ended = kpolicy("calibrate", "--model", config, "--out", out, "--repeats", 3, "--seed", 3, "--json", *SMALL)
    assert ended.code == 0, ended.err
    assert [line for line in ended.err.splitlines() if line.startswith("kpolicy:")] == [
        f"kpolicy: calibration {i} of 3" for i in (1, 2, 3)
    ]
    parts = [tmp_path / f"p-{i}.json" for i in (1, 2, 3)]
    assert sorted(tmp_path.iterdir()) == sorted([config, out, *parts])
    made, repeats = read_profile(out), [read_profile(part) for part in parts]
    us = [each.costs.full.at(4) for each in repeats]
    assert made.costs.full.at(4) == sorted(us)[1]
    assert made.costs.version == f"the middle of each figure of 3: {'; '.join(each.costs.version for each in repeats)}"
    assert made.command.endswith("--max-num-reqs 4 --max-num-tokens 16 --kv-tokens 512 --seconds 0.3")
    assert "--seed 3" in repeats[0].command, "a repeat has what was asked"
    assert ended.json["repeats_launching_us"].keys() == {str(part) for part in parts}
    assert ended.json["costs"] == made.costs.version


def test_repeats_do_not_import_from_the_folder_they_are_in(
    kpolicy: Command, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    """Nor does calibrating once."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in sys.path if path not in {"", str(tmp_path)}])
    for name in ("random.py", "json.py"):
        (tmp_path / name).write_text("raise SystemExit(9)")
    ended = kpolicy("calibrate", "--model", config, "--out", "p.json", "--repeats", 2, "--json", *SMALL)
    assert ended.code == 0
    assert (tmp_path / "p-2.json").exists()


def test_time_beyond_what_was_asked_is_told(
    kpolicy: Command, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    """In one line; within it nothing is said."""
    out, *others = tmp_path / "p.json", *SMALL[:-2]
    monkeypatch.setattr("kpolicy.cli.calibrate._BEYOND_S", 0.0)
    ended = kpolicy("calibrate", "--model", config, "--out", out, *others, "--seconds", 1e-3)
    assert ended.code == 0
    told = [line for line in ended.err.splitlines() if line.startswith("kpolicy: it took ")]
    assert len(told) == 1
    assert told[0].endswith(" s to measure every step twice, beyond --seconds 0.001")
    monkeypatch.setattr("kpolicy.cli.calibrate._BEYOND_S", 1e6)
    ended = kpolicy("calibrate", "--model", config, "--out", out, *others, "--seconds", 1e-3)
    assert "it took" not in ended.err


def test_a_repeat_that_a_signal_ends_is_told(
    kpolicy: Command, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    """With a shell's code; what was written before stays, and what a library prints before the result is no result."""
    import kpolicy.cli.calibrate as command

    monkeypatch.setattr(command, "_BOOT", f"print('a library says {{this}}'); {command._BOOT}")
    ended = kpolicy("calibrate", "--model", config, "--out", tmp_path / "p.json", "--repeats", 2, *SMALL)
    assert ended.code == 0, ended.err
    monkeypatch.setattr(command, "_BOOT", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    ended = kpolicy("calibrate", "--model", config, "--out", tmp_path / "q.json", "--repeats", 2, *SMALL)
    assert ended.code == 128 + 9
    assert "calibration 1 of 2 was ended by SIGKILL" in ended.err
    assert not (tmp_path / "q.json").exists()


def test_repeats_that_did_not_serve_have_their_middle_and_a_code_of_1(
    kpolicy: Command, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    """Each is whole but for that. One that ends so and tells nothing, or no result, isn't, and ends it."""
    import kpolicy.cli.calibrate as command

    begun = f"import sys; sys.argv.insert(1, {command._BOOT!r})"
    whole = f"{begun}\ntry:\n exec(sys.argv.pop(1))\nexcept SystemExit as ended:\n sys.exit(ended.code or 1)"
    monkeypatch.setattr(command, "_BOOT", whole)
    ended = kpolicy("calibrate", "--model", config, "--out", tmp_path / "p.json", "--repeats", 2, *SMALL)
    assert ended.code == 1, ended.err
    assert read_profile(tmp_path / "p.json").costs.version.startswith("the middle of each figure of 2: ")
    for nothing in ("raise SystemExit(1)", "print('{\\n'); raise SystemExit(1)", "print('{\\n}')"):
        monkeypatch.setattr(command, "_BOOT", nothing)
        ended = kpolicy("calibrate", "--model", config, "--out", tmp_path / "q.json", "--repeats", 2, *SMALL)
        assert ended.code == 1
        assert not (tmp_path / "q.json").exists()


def test_a_repeat_that_fails_ends_it(kpolicy: Command, config: Path, tmp_path: Path) -> None:  # noqa: F811
    """With its code, and no profile; a repeat may be no file that is read."""
    config.write_text(json.dumps({**TINY, "num_attention_heads": 3}))
    ended = kpolicy("calibrate", "--model", config, "--out", tmp_path / "p.json", "--repeats", 2, *SMALL)
    assert ended.code != 0
    assert list(tmp_path.iterdir()) == [config]
    read = tmp_path / "p-2.json"
    config.rename(read)
    ended = kpolicy("calibrate", "--model", read, "--out", tmp_path / "p.json", "--repeats", 2, *SMALL)
    assert ended.code == 2
    assert f"--repeats {read} is what the command reads" in ended.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--repeats", "0"), "--repeats is 0"),
        (("--device", "gpu"), "unknown device 'gpu'"),
        (("--device", "simulated"), "unknown device 'simulated'"),
        (("--device", "cpu:1"), "unknown device 'cpu:1'; did you mean 'cpu'?"),
        (("--device", "auto:1"), "unknown device 'auto:1'"),
        (("--device", "cuda:x"), "unknown device 'cuda:x'"),
        (("--seconds", "0"), "--seconds is 0"),
        (("--seconds", "nan"), "--seconds is nan"),
        (("--kv-tokens", "3"), "--kv-tokens is 3"),
        (("--ladder", "1,2,x"), "--ladder is"),
        (("--model", "no/such/model"), "no/such/model"),
        (("--out", "no/such/folder/p.json"), "can't be written"),
    ],
)
def test_bad_options(
    arguments: tuple[str, str], said: str, kpolicy: Command, config: Path, tmp_path: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Each is one line and exit code 2, and no file is left."""
    monkeypatch.chdir(tmp_path)
    given: dict[str, Any] = {"--model": config, "--out": "p.json", **dict([arguments])}
    ended = kpolicy("calibrate", *[each for pair in given.items() for each in pair])
    assert ended.code == 2
    assert said in ended.err
    assert len(ended.err.splitlines()) == 1
    assert not (tmp_path / "p.json").exists()


def test_a_device_that_is_not_there(kpolicy: Command, config: Path, tmp_path: Path) -> None:  # noqa: F811
    """cuda without a GPU is an error that says what is there."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    ended = kpolicy("calibrate", "--model", config, "--out", tmp_path / "p.json", "--device", "cuda")
    assert ended.code == 2
    assert "isn't there" in ended.err


def test_an_interrupt_leaves_no_profile(
    kpolicy: Command, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    """Cut off while measuring, it ends with 130 and writes nothing."""

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(import_module("kpolicy.serving.calibrate"), "calibrate", interrupted)
    ended = kpolicy("calibrate", "--model", config, "--out", tmp_path / "p.json", *SMALL)
    assert ended.code == 130
    assert list(tmp_path.iterdir()) == [config]
