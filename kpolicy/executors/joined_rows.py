"""`JoinedRows`: outputs of a graph that samples, which came in one copy and are told apart when somebody reads them.

Most steps' outputs are read as tokens alone and let go. Nobody has their memory then, and the next step copies there.
"""

from __future__ import annotations

from collections.abc import Callable
from sys import getrefcount
from typing import Any, NamedTuple

from kpolicy.executors.parts import OutputRows

__all__ = ["NO_SPARE", "JoinedLayout", "JoinedRows", "Spare"]

Tensor = Any


class JoinedLayout(NamedTuple):
    """How tokens and logits lie behind each other in bytes."""

    num_rows: int
    logits_at: int
    tokens_dtype: Any
    logits_dtype: Any


Spare = tuple[JoinedLayout | None, Tensor]
"""A copy that nobody reads any more, and how it lies there"""
NO_SPARE: Spare = (None, None)
MOST_SPARE = 2
"""Copies that a graph keeps: one is read while the next is made"""


class JoinedRows(OutputRows):
    """`OutputRows` whose `tokens` and `logits` are made when somebody asks: the host has time then.

    Attributes:
        joined: the bytes of both, a copy of the graph's; a view that somebody else makes of it may be written over.
        layout: how they lie there.
        spare: takes the copy when these outputs go, unless `tokens` or `logits` gave a view of it; None for none.
    """

    __slots__ = ("joined", "layout", "spare")

    joined: Tensor
    layout: JoinedLayout
    spare: list[Spare] | None

    # Made empty, and by no function of Python's: who makes them sets what they have.
    __init__ = object.__init__

    def __del__(self, getrefcount: Callable[[Any], int] = getrefcount) -> None:
        # Whoever else has the copy itself, such as a copy of this object, keeps it.
        if self.spare is not None and len(self.spare) < MOST_SPARE and getrefcount(self.joined) == _ALONE:
            self.spare.append((self.layout, self.joined))

    def host_tokens(self, step: int) -> list[int]:
        if step:
            return super().host_tokens(step)
        self.ready.wait()
        found: list[int] = self._tokens().tolist() if self.num_rows else []
        return found

    def _tokens(self) -> Tensor:
        tokens = self.joined[: self.layout.num_rows * self.layout.tokens_dtype.itemsize]
        return tokens.view(self.layout.tokens_dtype)

    def __getattr__(self, name: str) -> Any:
        # Only asked for what isn't there yet.
        if name == "spare":
            return None
        if name == "tokens":
            self.spare = None
            self.tokens = [self._tokens()]
            return self.tokens
        if name == "logits":
            self.spare = None
            logits = self.joined[self.layout.logits_at :].view(self.layout.logits_dtype)
            self.logits = logits.view(self.layout.num_rows, -1)
            return self.logits
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")


class _Probe:
    """Has one object, as outputs have their copy."""

    __slots__ = ("held",)

    def __init__(self) -> None:
        self.held = object()


_probe = _Probe()
_ALONE = getrefcount(_probe.held)
"""References to a copy that `getrefcount` finds where its outputs have the only one; 2 in CPython 3.11"""
