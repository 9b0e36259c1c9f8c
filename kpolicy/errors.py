"""Every error kpolicy raises on purpose.

One base class, `KPolicyError`, so that a caller can catch what is ours and nothing else. A message names the
thing, the value it had, what is allowed, and the next step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kpolicy.reasons import Reason

__all__ = [
    "BudgetRefused",
    "CaptureError",
    "CheckpointError",
    "ConfigError",
    "GraphReplayError",
    "KPolicyError",
    "LadderError",
    "NoLegalModeError",
    "OutOfMemoryError",
    "PluginError",
    "ProfileError",
    "RankError",
    "RegistryError",
    "SchemaError",
    "ShapeError",
    "StickyDeviceError",
    "SupportError",
    "TraceError",
    "UnknownArchitectureError",
    "UnknownNameError",
    "UpdateStallError",
    "check_kind",
    "misspelt",
    "near_miss",
]


class KPolicyError(Exception):
    """Base of every error that kpolicy raises on purpose. It pickles, so that a pool of processes hands it on."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Python's own would call the class with the message alone, which isn't what every class takes.
        return _again, (type(self), self.args), self.__dict__


def _again(kind: type[KPolicyError], args: tuple[Any, ...]) -> KPolicyError:
    """An error with that message; its fields follow."""
    return kind.__new__(kind, *args)


class ConfigError(KPolicyError, ValueError):
    """A setting, flag or argument has a value that can't be used."""


class UnknownNameError(ConfigError):
    """A policy, executor, mode, attention kind or backend name that nobody registered.

    Args:
        kind: what the name names, for example ``"policy"``.
        name: the name that was asked for.
        allowed: every name that would have been taken.
        hint: the next step, when "pick one of these" isn't enough.
    """

    def __init__(self, kind: str, name: object, allowed: Iterable[str], hint: str = "") -> None:
        self.kind = kind
        self.name = name
        self.allowed = tuple(sorted(allowed))
        message = f"unknown {kind} {name!r}"
        near = near_miss(name, self.allowed)
        message += f"; did you mean {near!r}?" if near else "."
        message += f" Known: {_listed(self.allowed)}."
        super().__init__(f"{message} {hint}".rstrip())


class ShapeError(ConfigError):
    """A batch shape that no batch can have: negative, inconsistent or overflowing counts."""


class LadderError(ConfigError):
    """Capture sizes that can't be used: empty, unsorted, repeated, too large or misaligned."""


class SupportError(ConfigError):
    """What was asked of attention contradicts what it supports."""


class UnknownArchitectureError(SupportError):
    """A model architecture whose attention kpolicy can't name."""


class ProfileError(ConfigError):
    """A profile whose numbers can't be used as costs."""


class SchemaError(ConfigError):
    """A file that isn't the schema it should be: newer, cut short, or of another kind."""


class CheckpointError(ConfigError):
    """A model folder that lacks files, or whose weights aren't those of its config."""


class TraceError(ConfigError):
    """A request trace that can't be read.

    Args:
        path: the file as the user named it.
        line: 1-based line number in the (decompressed) file, or None for the file as a whole.
        problem: what is wrong and what to do.
    """

    def __init__(self, path: object, line: int | None, problem: str) -> None:
        self.path = str(path)
        self.line = line
        where = f"{path}" if line is None else f"{path}, line {line}"
        super().__init__(f"{where}: {problem}")


class PluginError(KPolicyError):
    """A plugin that raises when imported, registers a taken name, or doesn't keep its contract."""


class NoLegalModeError(KPolicyError):
    """Every mode that could run this batch was forbidden for this step."""


class RegistryError(KPolicyError):
    """The captured-graph registry was asked for something its record contradicts."""


class BudgetRefused(RegistryError):
    """A graph that a budget doesn't admit. `reason` is the `Reason` that names the budget."""

    def __init__(self, reason: object, message: str) -> None:
        self.reason = reason
        super().__init__(message)


class CaptureError(KPolicyError):
    """A capture that failed; the batch still runs, in a lesser mode. `reason` says why, `seconds` what it took."""

    def __init__(self, reason: object, message: str, *, seconds: float = 0.0) -> None:
        self.reason = reason
        self.seconds = seconds
        super().__init__(message)


class OutOfMemoryError(KPolicyError):
    """Memory for buffers that a limit of ours doesn't give. A capture that needs it fails with `CaptureError`."""


class GraphReplayError(KPolicyError):
    """A graph that failed before anything was launched, so the step can run in a lesser mode.

    `key` is the graph's `GraphKey`; the Engine withdraws it. `reason` is the `Reason` for that; anything else, as None,
    is ``replay_failed``. Where it is `maybe_inputs`, the step's inputs may be to blame, such as a token that isn't
    there: the graph is withdrawn only where its launch runs without it.
    """

    def __init__(self, key: Any, message: str, reason: object = None, *, maybe_inputs: bool = False) -> None:
        self.key = key
        self.maybe_inputs = maybe_inputs
        self.reason = reason if isinstance(reason, Reason) else Reason.REPLAY_FAILED
        super().__init__(message)


class StickyDeviceError(KPolicyError):
    """The device is lost to this process. The Engine stops; `requests` go back to the caller."""


class UpdateStallError(StickyDeviceError):
    """A graph waits for rewritten host arguments that never came, so its stream is lost to this process.

    `keys` are the graphs that were replayed last; one of them waits.
    """

    def __init__(self, keys: Iterable[Any], message: str) -> None:
        self.keys = tuple(keys)
        super().__init__(message)


class RankError(KPolicyError):
    """Ranks disagree, or a rank was asked to decide before the ranks agreed on their data."""


def check_kind(name: str, value: object, kind: type | tuple[type, ...], example: str) -> None:
    """See that an argument is of a class.

    Args:
        name: the argument.
        value: what was given.
        kind: the class, or several; the first is named.
        example: what makes one.

    Raises:
        ConfigError: it isn't.
    """
    if not isinstance(value, kind):
        named = kind[0] if isinstance(kind, tuple) else kind
        article = "an" if named.__name__[0] in "AEIOU" else "a"
        raise ConfigError(f"{name} is {value!r:.80}; it takes {article} {named.__name__}, such as {example}.")


MOST_LISTED = 24
"""Names that an error lists, at most; `UnknownNameError.allowed` has all of them."""


def _listed(names: tuple[str, ...]) -> str:
    more = len(names) - MOST_LISTED
    text = ", ".join(names[:MOST_LISTED]) or "(none)"
    return f"{text} and {more} more" if more > 0 else text


def near_miss(name: object, allowed: tuple[str, ...], cutoff: float = 0.6) -> str | None:
    """The allowed name that is nearest to the one given, if any is as near as `cutoff`, of 1."""
    import difflib

    folded = {each.lower(): each for each in reversed(allowed)}
    close = difflib.get_close_matches(str(name).lower(), folded, n=1, cutoff=cutoff)
    return folded[close[0]] if close else None


def misspelt(environ: Iterable[str], prefix: str, known: Iterable[str]) -> list[tuple[str, str]]:
    """Variables with that prefix that aren't known, each with the one meant; others may be of another program."""
    allowed = tuple(known)
    others = sorted(name for name in environ if name.startswith(prefix) and name not in allowed)
    return [(name, near) for name in others if (near := near_miss(name, allowed, cutoff=0.9))]
