"""`read_whole`: what a file or a pipe holds, unless that needn't ever end."""

from __future__ import annotations

from pathlib import Path
from stat import S_ISBLK, S_ISCHR, S_ISREG

__all__ = ["MOST_BYTES", "MOST_LINES_BYTES", "read_whole"]

MOST_BYTES, MOST_LINES_BYTES = 64 << 20, 4 << 30
"""The longest file of one object that is read (a profile, a plan, a model's config), and of a line a step or request"""
_CHUNK = 1 << 20


def read_whole(path: Path, most: int = MOST_BYTES) -> bytes | bytearray:
    """All that a file or a pipe holds.

    Raises:
        OSError: it can't be read, is a device, or holds more than `most` bytes.
    """
    found = path.stat()
    if S_ISCHR(found.st_mode) or S_ISBLK(found.st_mode):
        raise OSError("it is a device, which needn't ever end")
    too_long = f"it is longer than {most >> 20} MiB, and no file of this kind is"
    with open(path, "rb") as file:
        if S_ISREG(found.st_mode):
            if found.st_size > most:
                raise OSError(too_long)
            return file.read()
        # A pipe doesn't say how long it is.
        read = bytearray()
        while chunk := file.read(_CHUNK):
            read += chunk
            if len(read) > most:
                raise OSError(too_long)
        return read
