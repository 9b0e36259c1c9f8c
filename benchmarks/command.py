"""`command_line`: how a result was made, as its file tells it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import PurePath

__all__ = ["command_line"]


def command_line(module: str, argv: Sequence[str] | None = None) -> str:
    """The command with every option that was given; of absolute paths only the last part, or the config's folder too.

    Args:
        module: what ran, such as ``benchmarks.gpu.soak``.
        argv: what it was given; this process's own arguments where None.
    """
    given = [_told(each) for each in (sys.argv[1:] if argv is None else argv)]
    return shlex.join(["python", "-m", module, *given])


def _told(argument: str) -> str:
    option, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
    path = PurePath(value)
    if path.is_absolute():
        value = "/".join(path.parts[-2:]) if path.name == "config.json" and len(path.parts) > 2 else path.name
    return f"{option}{equals}{value}"
