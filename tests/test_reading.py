"""Files and pipes are read whole, and nothing that needn't end is."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kpolicy.attention.fields import read_config
from kpolicy.errors import SupportError, TraceError
from kpolicy.reading import read_whole
from kpolicy.scheduling.traces import read_trace


def written_to(pipe: Path, pieces: Iterable[bytes]) -> threading.Thread:
    """Writes pieces to a pipe, until they end or nobody reads."""

    def write() -> None:
        with suppress(BrokenPipeError), open(pipe, "wb") as end:
            for piece in pieces:
                end.write(piece)

    writer = threading.Thread(target=write)
    os.mkfifo(pipe)
    writer.start()
    return writer


def test_files_and_pipes_are_read_to_their_end(tmp_path: Path) -> None:
    """A pipe in pieces of any length, as a shell's ``<(command)`` is; an empty file is empty."""
    (tmp_path / "file").write_bytes(b"12345")
    assert read_whole(tmp_path / "file", 5) == b"12345"
    (tmp_path / "empty").touch()
    assert read_whole(tmp_path / "empty") == b""
    writer = written_to(tmp_path / "pipe", [b"1", b"2345" * (1 << 18), b"6"])
    assert read_whole(tmp_path / "pipe") == b"1" + b"2345" * (1 << 18) + b"6"
    writer.join()


def test_what_is_too_long_is_not_read(tmp_path: Path) -> None:
    """A file by its size, before it is read; a pipe once that much came."""
    most = 1 << 20
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match="longer than 1 MiB"):
        read_whole(tmp_path / "sparse", most)
    writer = written_to(tmp_path / "pipe", itertools.repeat(b" " * 65536))
    with pytest.raises(OSError, match="longer than 1 MiB"):
        read_whole(tmp_path / "pipe", most)
    writer.join()


@pytest.mark.parametrize(("read", "error"), [(read_trace, TraceError), (read_config, SupportError)])
@pytest.mark.parametrize("device", ["/dev/urandom", "/dev/null"])
def test_traces_and_configs_are_no_devices(
    read: Callable[[Any], Any], error: type[Exception], device: str, tmp_path: Path
) -> None:
    """Nor links to one."""
    if not Path(device).is_char_device():
        pytest.skip(f"there is no {device}")
    link = tmp_path / "link"
    link.symlink_to(device)
    for path in (device, link):
        with pytest.raises(error, match=r"can't be read: it is a device, which needn't ever end"):
            read(path)
