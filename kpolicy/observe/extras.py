"""Optional libraries, loaded on first use, with an error that names the extra to install."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from kpolicy.errors import ConfigError

__all__ = ["load"]


def load(module: str, *, extra: str, package: str, what: str) -> Any:
    """The module of an optional library.

    Args:
        module: its full name.
        extra: the extra of kpolicy that installs it.
        package: the name it is installed by.
        what: what it is needed for, as the start of a sentence.

    Raises:
        ConfigError: it isn't installed, or it can't be imported.
    """
    try:
        return import_module(module)
    except ImportError as error:
        problem = "which isn't installed" if isinstance(error, ModuleNotFoundError) else f"which failed: {error}"
        raise ConfigError(f"{what} needs {package}, {problem}. Run: pip install 'kpolicy[{extra}]'.") from None
