"""`WholeFile`, `write_whole` and `write_text`: a file is there whole or as it was, and what isn't a file stays one.

Every writer of a finished file uses these. Logs, and the results of a sweep, are written line by line instead, so that
a process that is killed leaves them behind; their errors are worded by `refused` too.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path
from typing import IO

from kpolicy.errors import ConfigError

__all__ = ["WholeFile", "is_special", "refused", "write_all", "write_text", "write_whole"]

_NO_SPACE = (errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC))
_OPEN_ALREADY = re.compile(r"/dev/(?:std(?:in|out|err)|fd/\d+)|/proc/(?:self|thread-self|\d+)/fd/\d+")
"""Names of what a process has open, such as a redirected standard output, which other parts of it write to as well"""


def write_text(path: Path | str, text: str) -> None:
    """Write a text file as UTF-8: all of it or, where that fails, nothing.

    Raises:
        ConfigError: the file can't be written.
    """
    write_whole(path, text)


def write_whole(path: Path | str, content: str | bytes) -> None:
    """Write a file as a `WholeFile`; text as UTF-8.

    Raises:
        ConfigError: the file can't be written.
    """
    try:
        data = content.encode() if isinstance(content, str) else content
    except UnicodeEncodeError as error:
        raise refused(path, error) from None
    file = WholeFile(path)
    try:
        file.write(data)
        file.keep()
    finally:
        file.discard()


class WholeFile:
    """Bytes that become a file once all of them are there.

    They are written beside the path, under a name of their own, so that nobody reads half of them and what was there
    stays until then. A link stays, and what it leads to is replaced. What isn't a file, such as a pipe or
    ``/dev/null``, is written to and never replaced, and so is what this process has open, as ``/dev/stdout``.

    Args:
        path: the file.

    Raises:
        ConfigError: it can't be written.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = path
        self._size = 0
        self._target = Path(path)
        self._temporary: Path | None = None
        try:
            self._file = self._opened()
        except (OSError, ValueError) as error:
            raise refused(path, error) from None

    def _opened(self) -> IO[bytes]:
        if is_special(self._target) or (
            _OPEN_ALREADY.fullmatch(os.path.abspath(self._target)) and self._target.exists()
        ):
            if self._target.is_block_device():
                raise OSError("it is a disk, whose content would be lost")
            # Without a buffer, which would be tried again where the device takes no more.
            return open(self._target, "ab", buffering=0)
        if self._target.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        self._target = Path(os.path.realpath(self._target))
        import secrets

        # Where the target's name is as long as a folder takes, this one is no longer.
        temporary = self._target.with_name(f".{self._target.name[:60]}.{secrets.token_hex(4)}.tmp")
        file = open(temporary, "xb")  # noqa: SIM115 - it is closed by `keep` or `discard`
        self._temporary = temporary
        return file

    @property
    def closed(self) -> bool:
        """Whether it was kept or discarded."""
        return self._file.closed

    def write(self, data: bytes) -> None:
        """Add bytes.

        Raises:
            ConfigError: they can't be written; nothing is left of what was, and the file is closed.
        """
        self._size += len(data)
        try:
            write_all(self._file, data)
        except OSError as error:
            self.discard()
            raise refused(self.path, error, self._size) from None

    def keep(self) -> None:
        """Give the file its name; a second time does nothing.

        Raises:
            ConfigError: it can't be written; nothing is left of it.
        """
        if self._file.closed:
            return
        try:
            with self._file:
                self._file.flush()
                if self._temporary is not None:
                    os.fsync(self._file.fileno())
            if self._temporary is not None:
                os.replace(self._temporary, self._target)
        except OSError as error:
            raise refused(self.path, error, self._size) from None
        finally:
            self.discard()

    def discard(self) -> None:
        """Leave nothing of what isn't finished, as far as it isn't in a pipe or a device."""
        try:
            self._file.close()
        except OSError:
            # What couldn't be written isn't wanted any more.
            pass
        finally:
            if self._temporary is not None:
                self._temporary.unlink(missing_ok=True)


def write_all(file: IO[bytes], data: bytes) -> None:
    """Write all of the bytes, of which a file without a buffer may take some at a time.

    Raises:
        OSError: it takes no more.
    """
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def is_special(path: Path | str) -> bool:
    """Whether there is something at a path that is neither a file nor a folder: a device, a pipe, a socket."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def refused(path: Path | str, error: Exception, size: int | None = None, step: str = "") -> ConfigError:
    """The error for a file that can't be written.

    Args:
        path: the file.
        error: why.
        size: bytes that were to be in it, told where there is no room for them.
        step: what to do, in place of what is usual.
    """
    why = getattr(error, "strerror", None) or error
    held, usual = "", "Give a file in a folder that exists and can be written."
    if getattr(error, "errno", None) in _NO_SPACE:
        held = "" if size is None else f" ({size:,} bytes)"
        usual = "Make room there, or give another path."
    return ConfigError(f"can't write {path}{held}: {why}. {step or usual}")
