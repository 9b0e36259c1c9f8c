"""Places that take no more, for tests of writers: a device of this test's own, and files of a bounded length."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def device(path: Path, kind: str = "full") -> Path:
    """A device like /dev/full, /dev/zero or /dev/null at that path, which a wrong writer may replace without harm."""
    numbers = {"null": (1, 3), "zero": (1, 5), "full": (1, 7)}
    if os.uname().sysname != "Linux":
        pytest.skip("needs Linux")
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(*numbers[kind]))
        with open(path, "ab"):
            pass
    except PermissionError:
        pytest.skip("no device may be made or opened here")
    return path


@contextmanager
def room_for(most_bytes: int) -> Iterator[None]:
    """Files take no more than that from this process, as where a disk is full."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
