"""Entry points: how other packages' policies and executors are found. Scanned only when a name isn't ours.

A name that two distributions register is refused for both, and a plugin that raises at import is one named error;
neither touches the plugins beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from kpolicy.errors import ConfigError, PluginError, near_miss

if TYPE_CHECKING:
    from inspect import Parameter

__all__ = ["check_names", "load_plugin", "parameters_of", "plugin_names"]


def parameters_of(factory: Callable[..., Any]) -> Mapping[str, Parameter] | None:
    """What a factory takes; None where nobody can tell, as of classes that are written in C."""
    import inspect

    try:
        return inspect.signature(factory).parameters
    except ValueError:
        return None


def check_names(what: str, factory: Callable[..., Any], arguments: Iterable[str], hint: str = "") -> None:
    """Refuse arguments that a factory doesn't take.

    Args:
        what: what it makes, as errors call it.
        factory: makes it; one that takes any name, or doesn't say which, says itself which it knows.
        arguments: their names.
        hint: where to look, behind what it takes.

    Raises:
        ConfigError: it doesn't take one, with what it takes.
    """
    parameters = parameters_of(factory)
    if parameters is None or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for argument in arguments:
        if argument not in parameters:
            near = near_miss(argument, tuple(parameters))
            raise ConfigError(
                f"{what} doesn't take {argument}{f'; did you mean {near}?' if near else '.'} It takes "
                f"{', '.join(parameters) or 'no arguments'}{hint}."
            )


def _found(group: str, own: Mapping[str, str]) -> dict[str, list[tuple[str, Any]]]:
    """Name -> (distribution, entry point) of everything in the group that isn't our own registration."""
    from importlib.metadata import entry_points

    found: dict[str, list[tuple[str, Any]]] = {}
    try:
        points = entry_points(group=group)
    except Exception as error:
        # One package's broken metadata breaks the scan of all.
        raise PluginError(
            f"an installed package has entry points that can't be read ({type(error).__name__}: {error}); "
            "`pip check` and `pip list` help to find it. kpolicy's own names work without the scan."
        ) from error
    for point in points:
        if own.get(point.name) == point.value:
            continue
        origin = (point.dist.name if point.dist is not None else None) or "unknown distribution"
        if (origin, point.value) not in [(name, each.value) for name, each in found.get(point.name, [])]:
            found.setdefault(point.name, []).append((origin, point))
    return found


def plugin_names(group: str, own: Mapping[str, str]) -> dict[str, str]:
    """Every name of the group and where it comes from; our own names are from ``kpolicy``."""
    names = dict.fromkeys(own, "kpolicy")
    for name, points in _found(group, own).items():
        if name not in names:
            names[name] = ", ".join(origin for origin, _ in points)
    return names


def load_plugin(group: str, name: str, own: Mapping[str, str]) -> Any | None:
    """What an outside package registered under that name; None where nobody did.

    Raises:
        PluginError: two packages registered it, or loading it raised.
    """
    points = _found(group, own).get(name, [])
    if not points:
        return None
    if len(points) > 1:
        origins = " and ".join(f"{origin} ({point.value})" for origin, point in points)
        raise PluginError(f"{group} {name!r} is registered by {origins}; uninstall one of them.")
    origin, point = points[0]
    try:
        return point.load()
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"{group} {name!r} of {origin} ({point.value}) raised when loaded: {type(error).__name__}: {error}. "
            f"Update or uninstall {origin}."
        ) from error
