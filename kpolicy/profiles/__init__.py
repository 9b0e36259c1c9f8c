"""Profiles that ship with kpolicy: ``NAME.json`` beside this file.

`kpolicy calibrate` measured them, two of them three times over (`kpolicy.middle_profile`). A name is the model's and
the device's, as in ``qwen2.5-0.5b-h200``; docs/gpu.md says how each was measured.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from kpolicy.errors import UnknownNameError, check_kind

if TYPE_CHECKING:
    from kpolicy.schemas import Profile

__all__ = ["find_profile", "load_profile", "profile_names"]

FOLDER = Path(__file__).parent


def profile_names() -> tuple[str, ...]:
    """The names of the profiles that ship with kpolicy, sorted."""
    return tuple(sorted(path.name[: -len(".json")] for path in FOLDER.glob("*.json")))


def find_profile(given: str | Path) -> Path:
    """The file of a profile: one that is there, or one that ships with kpolicy, by its name.

    A file wins over a name. What can only be a path is given back as it is, for whoever reads it to say what is wrong.

    Raises:
        UnknownNameError: it is neither a file nor a path, and no profile has that name.
        ConfigError: it is no name at all.
    """
    check_kind("the profile", given, (str, PathLike), '"qwen2.5-0.5b-h200"')
    path, name = Path(given), str(given)
    if path.exists() or path.name != name or name.endswith(".json"):
        return path
    names = profile_names()
    if name not in names:
        raise UnknownNameError("profile", name, names, "Or give a file that kpolicy calibrate wrote.")
    return FOLDER / f"{name}.json"


def load_profile(given: str | Path) -> Profile:
    """The profile in a file, or that of a name.

    Raises:
        UnknownNameError: see `find_profile`.
        ConfigError: the file can't be read.
        SchemaError: it isn't a profile.
    """
    from kpolicy.schemas import read_profile

    return read_profile(find_profile(given))
