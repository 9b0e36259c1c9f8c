"""What benchmarks are given: a file that isn't there is one line that says so, before anything is measured."""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from benchmarks.command import (
    commit_of,
    input_file,
    input_folder,
    input_path,
    made_file,
    made_folder,
    output_file,
    profile,
)

ROOT = Path(__file__).parents[2]
MADE_OR_MISSED = {"--results", "--done", "--work", "folders", "profiles"}
"""Options whose file or folder is made where it isn't there, left out, or told of by what reads it"""


@pytest.mark.parametrize(
    ("module", "given"),
    [
        ("simulate", "--trace"), ("whole_trace", "--trace"), ("simulated_ranks", "--traces"),
        ("first_token_limit", "--traces"),
        ("plan_worth", "--traces"), ("npu_streams", "--traces"), ("fidelity", "--profile"), ("random_steps", "--merge"),
        ("gpu.shapes", "--configs"), ("vllm.starts", "--model"), ("vllm.stock_vs_kpolicy", "--models"),
    ],
)  # fmt: skip
def test_a_missing_file_is_one_line(
    module: str, given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "missing" / "there"
    monkeypatch.setattr(sys, "argv", [module, given, str(missing)])
    with pytest.raises(SystemExit) as ended:
        import_module(f"benchmarks.{module}").main()
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"argument {given}: {missing} isn't there" in last


@pytest.mark.parametrize(
    ("kind", "text", "told"),
    [
        (input_path, "nowhere", "nowhere isn't there"), (input_file, "nowhere", "nowhere isn't there"),
        (input_file, ".", ". is a folder"), (input_folder, "file", "file is a file"),
        (output_file, ".", ". is a folder"), (output_file, "nowhere/x", "nowhere is no folder"),
        (output_file, "file/x", "file is no folder"), (made_file, ".", ". is a folder"),
        (made_file, "file/x/y", "file is no folder"), (made_folder, "file", "file is a file"),
        (made_folder, "file/x", "file is no folder"),
        (profile, "qwen", "unknown profile 'qwen'"), (profile, "file", "Is it another kind of file"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_path_is_said(
    kind: Callable[[str], Any], text: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("{}")
    with pytest.raises(argparse.ArgumentTypeError, match=told):
        kind(text)


@pytest.mark.parametrize(
    ("kind", "text"), [(output_file, "file"), (output_file, "new"), (made_file, "new/x"), (made_folder, "new")]
)
@pytest.mark.parametrize("closed", [".", "file"])
def test_no_write_access_is_said(
    kind: Callable[[str], Any], text: str, closed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is put in its folder's place, so it takes access to both."""
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    without = (tmp_path / closed).resolve()
    # A superuser has access to whatever modes say.
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != without)
    if closed == "." or text == closed:
        with pytest.raises(argparse.ArgumentTypeError, match=f"{text} can't be written: no write access to"):
            kind(text)
    else:
        assert kind(text) == Path(text)


@pytest.mark.parametrize("name", ["attention", "gpt2", "kernels", "padded", "correct", "overlap", "soak"])
@pytest.mark.parametrize("out", ["file/x.json", "folder"])
def test_a_gpu_benchmark_tells_at_once_where_it_cannot_write(
    name: str, out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("folder").mkdir()
    pytest.importorskip("torch")
    with pytest.raises(SystemExit) as ended:
        import_module(f"benchmarks.gpu.{name}").main(["--tiny", "--device", "cpu", "--config", "file", "--out", out])
    assert ended.value.code == 2
    assert f"argument --out: {out} " in capsys.readouterr().err.splitlines()[-1]


def test_what_is_there_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is written needn't be there; a profile is a name too."""
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    assert [input_path("file"), input_path("."), input_file("file"), input_folder("."), output_file("new")] == [
        Path("file"), Path(), Path("file"), Path(), Path("new")
    ]  # fmt: skip
    assert [made_file("new/folder/x"), made_folder("new/folder"), made_folder("."), made_file("/dev/null")] == [
        Path("new/folder/x"), Path("new/folder"), Path(), Path("/dev/null")
    ]  # fmt: skip
    assert profile("qwen2.5-0.5b-h200") == "qwen2.5-0.5b-h200"


def test_every_benchmark_looks_at_its_files_first() -> None:
    """No option takes a path as it comes, but for `MADE_OR_MISSED`."""
    found = set()
    for path in (ROOT / "benchmarks").rglob("*.py"):
        if "sglang" in path.parts:
            continue
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument":
                types = [each.value for each in call.keywords if each.arg == "type"]
                if any(isinstance(each, ast.Name) and each.id == "Path" for each in types):
                    found.add((path.relative_to(ROOT).as_posix(), ast.literal_eval(call.args[0])))
    assert {name for _, name in found} <= MADE_OR_MISSED, found


def git(tree: Path, *words: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(tree), *who, *words], check=True, capture_output=True)


def test_a_result_names_the_commit_that_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the environment says of this tree; of another git's, with a mark where its Python files were changed."""
    monkeypatch.setenv("KPOLICY_COMMIT", "abc1234")
    assert commit_of() == "abc1234"
    assert commit_of(tmp_path) == ""
    git(tmp_path, "init", "--quiet")
    assert commit_of(tmp_path) == ""
    for name in ("code.py", "result.json"):
        (tmp_path / name).write_text("1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "all")
    clean = commit_of(tmp_path)
    assert re.fullmatch("[0-9a-f]{7}", clean)
    (tmp_path / "result.json").write_text("2\n")
    assert commit_of(tmp_path) == clean
    (tmp_path / "code.py").write_text("2\n")
    assert commit_of(tmp_path) == f"{clean}+"
    monkeypatch.setenv("PATH", "")
    assert commit_of(tmp_path) == ""
