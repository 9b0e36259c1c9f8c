"""What benchmarks take on their command lines, and how a result was made, as its file tells it."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path, PurePath

__all__ = [
    "command_line",
    "commit_of",
    "input_file",
    "input_folder",
    "input_path",
    "made_file",
    "made_folder",
    "output_file",
    "profile",
    "traces_and_date",
    "without_folders",
]


def input_path(text: str) -> Path:
    """An option's file or folder, which is there: `argparse` tells of one that isn't, before anything is measured."""
    path = Path(text)
    if not path.exists():
        raise argparse.ArgumentTypeError(f"{text} isn't there (the current folder is {Path.cwd()})")
    return path


def input_file(text: str) -> Path:
    """An option's file, which is there; a pipe is one too."""
    path = input_path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder; name a file")
    return path


def input_folder(text: str) -> Path:
    """An option's folder, which is there."""
    path = input_path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a file; name a folder")
    return path


def output_file(text: str) -> Path:
    """An option's file that is written, or gone on with, in a folder that is there."""
    path = Path(text)
    if not os.path.isdir(path) and not os.path.isdir(path.parent):
        raise argparse.ArgumentTypeError(f"{text} can't be written: {path.parent} is no folder")
    return made_file(text)


def made_file(text: str) -> Path:
    """An option's file that is written, or gone on with; its folder is made where it isn't there."""
    path = Path(text)
    if os.path.isdir(path):
        raise argparse.ArgumentTypeError(f"{text} is a folder; name a file")
    _check_writable(path)
    return path


def made_folder(text: str) -> Path:
    """An option's folder that files are written to, made where it isn't there."""
    path = Path(text)
    if os.path.exists(path) and not os.path.isdir(path):
        raise argparse.ArgumentTypeError(f"{text} is a file; name a folder")
    _check_writable(path)
    return path


def _check_writable(path: Path) -> None:
    """Refuse what can't be written, or made in the nearest folder above that is there."""
    found = Path(os.path.realpath(next(each for each in (path, *path.parents) if os.path.exists(each))))
    if not os.path.isdir(found) and not os.path.exists(path):
        raise argparse.ArgumentTypeError(f"{path} can't be written: {found} is no folder")
    # A file is written beside its place, and put there.
    for each in (found, found.parent) if os.path.isfile(found) else (found,):
        if not os.access(each, os.W_OK | os.X_OK if os.path.isdir(each) else os.W_OK):
            raise argparse.ArgumentTypeError(f"{path} can't be written: no write access to {each}")


def profile(text: str) -> str:
    """An option's profile, a file or a name that ships, which can be read."""
    from kpolicy.errors import KPolicyError
    from kpolicy.profiles import load_profile

    try:
        load_profile(text)
    except KPolicyError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def command_line(module: str, argv: Sequence[str] | None = None) -> str:
    """The command with every option that was given; of absolute paths only the last part, or the config's folder too.

    Args:
        module: what ran, such as ``benchmarks.gpu.soak``.
        argv: what it was given; this process's own arguments where None.
    """
    return without_folders(["python", "-m", module, *(sys.argv[1:] if argv is None else argv)])


def without_folders(words: Sequence[str]) -> str:
    """A command whose absolute paths have lost their folders, but a config's own."""
    return shlex.join(_told(each) for each in words)


def _told(argument: str) -> str:
    option, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
    path = PurePath(value)
    if path.is_absolute():
        value = "/".join(path.parts[-2:]) if path.name == "config.json" and len(path.parts) > 2 else path.name
    return f"{option}{equals}{value}"


def commit_of(tree: Path | None = None) -> str:
    """The commit whose code runs: ``KPOLICY_COMMIT``, or git's; empty where neither tells.

    Args:
        tree: another tree, which git alone tells of; this one where None.

    Returns:
        Seven digits of git's, with a ``+`` where a Python file isn't as it was committed.
    """
    given = os.environ.get("KPOLICY_COMMIT", "") if tree is None else ""
    if given:
        return given
    at = ["git", "-C", str(Path(__file__).parent if tree is None else tree)]
    try:
        found = subprocess.run([*at, "rev-parse", "--short=7", "HEAD"], capture_output=True, text=True, check=True)
        differs = subprocess.run([*at, "diff", "--quiet", "HEAD", "--", ":/*.py"], capture_output=True, check=False)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return found.stdout.strip() + ("+" if differs.returncode else "")


def traces_and_date(description: str | None) -> argparse.Namespace:
    """What this process was given, of a benchmark that takes a folder of traces (`traces`) and a date (`date`)."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=input_folder, required=True, help="folder with the traces")
    parser.add_argument("--date", required=True, help="written into the result")
    return parser.parse_args()
