"""`kpolicy policies` and `kpolicy doctor`: what there is."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from kpolicy.cli.options import Json
from kpolicy.cli.render import console, grid, print_json, show
from kpolicy.errors import ConfigError, PluginError
from kpolicy.executors.base import ProbeReport, ProbeStatus
from kpolicy.plugins import parameters_of
from kpolicy.policies import OWN, factory_of, get_policy, policy_names

__all__ = ["doctor", "policies"]

_REQUIRED = "required"


def policies(*, json: Json = False) -> None:
    """List every policy with a line each, its arguments, and where it comes from."""
    rows = [_policy(name, origin) for name, origin in sorted(_names().items())]
    if json:
        print_json(rows)
        return
    table = grid("policy", "what it does, and its arguments with their defaults")
    for row in rows:
        text = Text(row["error"], "bold red") if row["error"] else Text(row["summary"])
        if row["from"] != "kpolicy":
            text.append(f" (from {row['from']})")
        if row["arguments"] is None:
            text.append("\nits arguments aren't known: what makes it doesn't tell", "dim")
        elif row["arguments"]:
            text.append(
                "\n" + ", ".join(f"{name}={_shown(value)}".rstrip("=") for name, value in row["arguments"].items()),
                "dim",
            )
        table.add_row(row["policy"], text)
    show(table, console())


def _names() -> dict[str, str]:
    try:
        return policy_names()
    except PluginError as error:
        # What other packages broke shouldn't hide ours.
        sys.stderr.write(f"kpolicy: only kpolicy's own policies are listed: {error}\n")
        return dict.fromkeys(OWN, "kpolicy")


def _policy(name: str, origin: str) -> dict[str, Any]:
    row: dict[str, Any] = {
        "policy": name, "from": origin, "status": "usable", "summary": "", "arguments": {}, "error": None
    }  # fmt: skip
    try:
        row["arguments"] = arguments = _arguments(parameters_of(factory_of(name)))
        if arguments is None or _REQUIRED not in arguments.values():
            row["summary"] = get_policy(name).summary
    except ConfigError as error:
        # What doesn't tell its arguments may need some.
        if row["arguments"] is not None:
            row |= _broken(error)
    except Exception as error:  # noqa: BLE001 - a plugin may raise anything, and the others are still listed
        row |= _broken(error)
    return row


def _broken(error: Exception) -> dict[str, Any]:
    return {"status": "broken", "arguments": {}, "error": f"broken: {error}"}


def _arguments(parameters: Mapping[str, inspect.Parameter] | None) -> dict[str, Any] | None:
    """The arguments that have a name, with their defaults; None where nobody can tell."""
    if parameters is None:
        return None
    named = [each for each in parameters.values() if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    return {each.name: _value(each.default) for each in named}


def _value(default: Any) -> Any:
    """A default as a plain JSON value; tuples as they are written in a policy's arguments."""
    if default is inspect.Parameter.empty:
        return _REQUIRED
    if isinstance(default, tuple):
        return "+".join(map(str, default))
    return default if default is None or isinstance(default, bool | int | float | str) else str(default)


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


_STYLES = {
    ProbeStatus.USABLE: "green",
    ProbeStatus.ABSENT: "dim",
    ProbeStatus.BROKEN: "bold red",
    ProbeStatus.MASKED: "yellow",
}
# Facts that the reason has already, or that only --json needs.
_UNSHOWN = ("origin", "target", "location", "version", "kernels")


def doctor(*, json: Json = False) -> None:
    """Say which devices, extras and plugins are there: usable, absent, broken or masked, each with the reason."""
    reports = _probed()
    if json:
        print_json(
            [
                {
                    "name": report.name,
                    "status": report.status.value,
                    "reason": report.reason,
                    "facts": {key: str(value) for key, value in report.facts.items()},
                }
                for report in reports
            ]
        )
        return
    table = grid("what", "status", "why", words=("status",))
    for report in reports:
        facts = ", ".join(f"{key} {value}" for key, value in report.facts.items() if key not in _UNSHOWN)
        table.add_row(
            report.name, Text(report.status.value, _STYLES[report.status]),
            Text(f"{report.reason} [{facts}]" if facts else report.reason),
        )  # fmt: skip
    show(table, console())


def _probed() -> Sequence[ProbeReport]:
    from kpolicy.probes import probe_all

    if not sys.stderr.isatty():
        return probe_all(kernels=True)
    with console(stderr=True).status("looking at devices, extras and plugins"):
        return probe_all(kernels=True)
