"""Hooks that one object's method is bound to, past the registry's wrapper, which takes longer to call than most hooks.

SGLang's registry puts the hooks on classes. Once one of them has an object in hand that is kpolicy's, the object's own
attribute calls the same hook with what it wraps. Where the wrapper isn't ours alone, the registry's way stays.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

__all__ = ["calls", "names_of", "wrapped_by"]


def wrapped_by(owner: object, name: str, around: Callable[..., Any]) -> Callable[..., Any] | None:
    """What the hook is around where it is the outermost of a method's; None elsewhere."""
    found = getattr(type(owner), name, None)
    return getattr(found, "__wrapped__", None) if calls(found, around) else None


def calls(wrapper: object, around: Callable[..., Any]) -> bool:
    """Whether a wrapper of the registry's calls that hook."""
    return any(cell.cell_contents is around for cell in getattr(wrapper, "__closure__", None) or ())


def names_of(function: object) -> dict[str, Any]:
    """The names of the module of a function, or of what it wraps; none of what isn't Python's."""
    found: dict[str, Any] = getattr(inspect.unwrap(function), "__globals__", {})  # type: ignore[arg-type]
    return found
