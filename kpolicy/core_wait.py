"""`waited_s`: how long this process was ready to run and had no core, which tells what other work took of its time."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

__all__ = ["waited_s"]

_TASKS = Path("/proc/self/task")


def waited_s() -> float | None:
    """Seconds that the threads there are waited for a core so far, together; None where the system doesn't say.

    Linux does, in each thread's ``schedstat``. What ended threads waited isn't in it.
    """
    waited_ns, told = 0, False
    with suppress(OSError):
        for task in _TASKS.iterdir():
            # A thread may end just now.
            with suppress(OSError, IndexError, ValueError):
                waited_ns += int((task / "schedstat").read_text().split()[1])
                told = True
    return waited_ns / 1e9 if told else None
