"""What commands write where a path is a device or a pipe, or where there is no room."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cli.conftest import Command
from tests.writing import device, room_for

SMALL = ("--max-num-reqs", 16, "--max-num-tokens", 256)
WRITERS = [
    ("simulate", "--policy", "eager", "--out"),
    ("simulate", "--policy", "eager", "--step-log"),
    ("simulate", "--policy", "eager", "--decision-log"),
    ("simulate", "--policy", "eager", "--perfetto"),
    ("report", "--policy", "eager", *SMALL, "--out"),
    ("report", "--policy", "eager", *SMALL, "--out", "page.html", "--perfetto"),
    ("plan", "--policy", "vllm", "--budget", 2, *SMALL, "--out"),
    ("plan", "--policy", "vllm", "--budget", 2, *SMALL, "--emit", "vllm", "--out"),
    ("run", "--policy", "eager", "--perfetto"),
]


def needs(arguments: Sequence[object]) -> None:
    if "--perfetto" in arguments:
        pytest.importorskip("perfetto")


def given(arguments: Sequence[object], trace: Path) -> list[object]:
    return [arguments[0], *(["--trace"] if arguments[0] == "run" else []), trace, *arguments[1:]]


@pytest.mark.parametrize("arguments", WRITERS, ids=lambda each: f"{each[0]} {each[-1]}")
def test_a_device_is_written_to_and_stays(
    kpolicy: Command, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: Sequence[object]
) -> None:
    """One that takes nothing is an error that names it, and one that takes all is none; no file replaces either."""
    needs(arguments)
    monkeypatch.chdir(tmp_path)
    full, null = device(tmp_path / "full"), device(tmp_path / "null", "null")
    ended = kpolicy(*given(arguments, trace), full)
    assert ended.code != 0
    assert f"can't write {full}" in ended.err
    assert "No space left on device. Make room there, or give another path." in ended.err
    assert ended.err.count("\n") == 1
    assert kpolicy(*given(arguments, trace), null).code == 0
    assert full.is_char_device()
    assert null.is_char_device()
    assert {path.name for path in tmp_path.iterdir()} <= {"full", "null", "trace.csv", "page.html"}


def test_a_pipe_has_the_whole_result(kpolicy: Command, trace: Path, tmp_path: Path) -> None:
    """It isn't opened to see whether it can be: who reads it would take that for the end."""
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    ended = kpolicy("simulate", trace, "--policy", "eager", "--out", pipe, "--json")
    reader.join(timeout=60)
    assert ended.code == 0, ended.err
    assert json.loads(read[0]) == ended.json


@pytest.mark.parametrize("arguments", [each for each in WRITERS if each[-1] == "--out"], ids=lambda each: each[0])
def test_results_are_printed_where_there_is_no_room_for_the_file(
    kpolicy: Command, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: Sequence[object]
) -> None:
    """What was there stays; what was computed is told before the error, which says how much there was to write."""
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "result"
    out.write_text("the old one")
    with room_for(10):
        ended = kpolicy(*given(arguments, trace), out)
    assert ended.code == 1
    assert f"can't write {out} (" in ended.err
    assert " bytes): " in ended.err
    assert len(ended.out.splitlines()) > 3
    assert f"written to {out}" not in ended.out
    assert out.read_text() == "the old one"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["result", "trace.csv"]


def test_a_sweep_without_room_for_its_picture_has_its_table(kpolicy: Command, trace: Path, tmp_path: Path) -> None:
    """Minutes of many cores aren't lost to a picture."""
    pytest.importorskip("matplotlib")
    kpolicy("sweep", trace, "--policy", "eager", "--jobs", 1, "--plot", tmp_path / "p.svg")
    with room_for(10):
        ended = kpolicy("sweep", trace, "--policy", "eager", "--jobs", 1, "--plot", tmp_path / "q.svg")
    assert ended.code == 1
    assert f"can't write {tmp_path / 'q.svg'} (" in ended.err
    assert "eager" in ended.out
    assert not (tmp_path / "q.svg").exists()


def test_a_disk_is_refused(kpolicy: Command, trace: Path, tmp_path: Path) -> None:
    """Before anything has run: a result at its start would cost what is on it."""
    disk = tmp_path / "disk"
    try:
        # A number that no driver has, so that nothing can be lost by a wrong test.
        os.mknod(disk, 0o600 | 0o060000, os.makedev(510, 200))
    except (PermissionError, AttributeError):
        pytest.skip("no device may be made here")
    ended = kpolicy("simulate", trace, "--policy", "eager", "--out", disk)
    assert ended.code == 2
    assert f"--out {disk} can't be written: it is a disk" in ended.err
