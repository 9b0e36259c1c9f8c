"""Hooks that one object's method is bound to, past the registry's wrapper, which takes longer to call than most hooks.

SGLang's registry puts the hooks on classes. Once one of them has an object in hand that is kpolicy's, the object's own
attribute calls the same hook with what it wraps. Where the wrapper isn't ours alone, the registry's way stays, and
where the class's method is another one later, `leave_hooked` has it called again.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

__all__ = ["bind", "calls", "leave_hooked", "names_of", "wrapped_by"]

_bound: list[tuple[weakref.ref[Any], str, Any, Callable[[Any], bool] | None]] = []
"""Objects, the method that each has an attribute of its own for, their class's, and what tells if it may stay."""


def bind(owner: object, name: str, own: Callable[..., Any], *, holds: Callable[[Any], bool] | None = None) -> None:
    """Give an object its own attribute for a method of its class, unless it couldn't be left again.

    Args:
        owner: the object.
        name: the method's.
        own: what is called instead.
        holds: what tells of the object whether that may stay; None where it always may.
    """
    try:
        known = weakref.ref(owner)
    except TypeError:
        return
    setattr(owner, name, own)
    _bound.append((known, name, getattr(type(owner), name), holds))


def leave_hooked() -> None:
    """Take away the attributes for methods that someone has replaced on the class since: theirs is to be called.

    Likewise those that don't hold any more; the class's method has the hook too.
    """
    kept = []
    for known, name, method, holds in _bound:
        owner = known()
        if owner is None or name not in vars(owner):
            continue
        if getattr(type(owner), name, None) is method and (holds is None or holds(owner)):
            kept.append((known, name, method, holds))
        else:
            delattr(owner, name)
    _bound[:] = kept


def wrapped_by(owner: object, name: str, around: Callable[..., Any]) -> Callable[..., Any] | None:
    """What the hook is around where it is the outermost of a method's; None elsewhere."""
    found = getattr(type(owner), name, None)
    return getattr(found, "__wrapped__", None) if calls(found, around) else None


def calls(wrapper: object, around: Callable[..., Any]) -> bool:
    """Whether a wrapper of the registry's calls that hook."""
    return any(_holds(cell, around) for cell in getattr(wrapper, "__closure__", None) or ())


def _holds(cell: Any, around: Callable[..., Any]) -> bool:
    """Whether a name of a closure is that hook; one that isn't set yet is none."""
    try:
        return cell.cell_contents is around
    except ValueError:
        return False


def names_of(function: object) -> dict[str, Any]:
    """The names of the module of a function, or of what it wraps; none of what isn't Python's."""
    found: dict[str, Any] = getattr(inspect.unwrap(function), "__globals__", {})  # type: ignore[arg-type]
    return found
