"""A file is there whole or as it was, and what isn't a file is written to and never replaced."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from kpolicy.errors import ConfigError
from kpolicy.schemas import LogHeader, StepLogWriter
from kpolicy.writing import WholeFile, write_text, write_whole
from tests.writing import device, room_for


def test_a_failed_write_keeps_what_was_there(tmp_path: Path) -> None:
    """Where there is no room the error says for how much, the old file stays and no part of the new one is left."""
    path = tmp_path / "a.json"
    write_text(path, "old")
    said = r"can't write .*a\.json \(100,000 bytes\): .*\. Make room there, or give another path\."
    with room_for(5000), pytest.raises(ConfigError, match=said):
        write_text(path, "n" * 100_000)
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"]


def test_a_file_in_pieces_is_whole_when_it_is_kept(tmp_path: Path) -> None:
    """Until then what was there stays, and a discarded one leaves nothing; both may be said again."""
    path = tmp_path / "a"
    path.write_text("old")
    file = WholeFile(path)
    file.write(b"ne")
    file.write(b"w")
    assert path.read_text() == "old"
    file.keep()
    file.keep()
    assert (path.read_text(), file.closed) == ("new", True)
    other = WholeFile(path)
    other.write(b"lost")
    other.discard()
    other.discard()
    assert path.read_text() == "new"
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("name", ["x" * 255, "é" * 127, "\U0001f4c8" * 63])
def test_a_name_as_long_as_a_folder_takes_is_written(tmp_path: Path, name: str) -> None:
    """The name that a file has until it is whole is no longer."""
    write_text(tmp_path / name, "whole")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "whole")]


def test_a_link_stays(tmp_path: Path) -> None:
    """What it leads to is replaced, or made where it isn't there yet."""
    real, link = tmp_path / "real", tmp_path / "link"
    link.symlink_to(real)
    for text in ("first", "second"):
        write_text(link, text)
        assert link.is_symlink()
        assert real.read_text() == text


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    """Who reads it has all of it, and it is a pipe afterwards."""
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    write_text(pipe, "through" * 50_000)
    reader.join()
    assert read == [b"through" * 50_000]
    assert pipe.is_fifo()


@pytest.mark.parametrize("linked", [False, True])
def test_a_device_stays(tmp_path: Path, linked: bool) -> None:
    """One that takes nothing is an error that names the path and how much was to be written, by a link too."""
    node = path = device(tmp_path / "full")
    if linked:
        path = tmp_path / "link"
        path.symlink_to(node)
    with pytest.raises(ConfigError, match=rf"can't write {path} \(5 bytes\): No space left on device\. Make room"):
        write_whole(path, b"12345")
    assert node.is_char_device()
    null = device(tmp_path / "null", "null")
    write_text(null, "gone")
    assert null.is_char_device()


def test_a_log_on_a_device_names_it(tmp_path: Path) -> None:
    """Lines are kept until there are some, so the last of them may be refused."""
    node = device(tmp_path / "full")
    said = rf"can't write {node}: No space left on device\. Make room there"
    with pytest.raises(ConfigError, match=said), StepLogWriter(node, LogHeader()):
        pass
    assert node.is_char_device()


def test_what_this_process_has_open_is_added_to(tmp_path: Path) -> None:
    """What /dev/stdout leads to, where a shell redirects it, keeps what was printed before and after."""
    printed = tmp_path / "out.txt"
    with printed.open("ab") as file:
        for folder in ("/dev/fd", "/proc/self/fd"):
            if not Path(f"{folder}/{file.fileno()}").exists():
                pytest.skip(f"this system has no {folder}")
        file.write(b"before\n")
        file.flush()
        write_whole(f"/dev/fd/{file.fileno()}", "content\n")
        write_whole(f"/proc/self/fd/{file.fileno()}", "more\n")
        file.write(b"after\n")
    assert printed.read_text() == "before\ncontent\nmore\nafter\n"


def test_a_file_in_memory_is_replaced() -> None:
    """The folder for it under /dev is like any other: a second result isn't added to the first."""
    folder = Path("/dev/shm")  # noqa: S108
    if not os.access(folder, os.W_OK):
        pytest.skip("no /dev/shm here")
    path = folder / f"kpolicy-test-{os.getpid()}"
    try:
        for text in ("first", "second"):
            write_text(path, text)
            assert path.read_text() == text
    finally:
        path.unlink(missing_ok=True)


def test_text_that_isnt_utf_8_is_refused(tmp_path: Path) -> None:
    """Before anything is made."""
    with pytest.raises(ConfigError, match=r"can't write .*surrogates not allowed"):
        write_text(tmp_path / "a", "\ud800")
    assert list(tmp_path.iterdir()) == []
