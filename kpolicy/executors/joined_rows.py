"""`JoinedRows`: outputs of a graph that samples, which came in one copy and are told apart when somebody reads them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from kpolicy.executors.parts import OutputRows

__all__ = ["JoinedLayout", "JoinedRows", "new_joined"]

Tensor = Any


class JoinedLayout(NamedTuple):
    """How tokens and logits lie behind each other in bytes."""

    num_rows: int
    logits_at: int
    tokens_dtype: Any
    logits_dtype: Any


class JoinedRows(OutputRows):
    """`OutputRows` whose `tokens` and `logits` are made when somebody asks: the host has time then.

    Attributes:
        joined: the bytes of both, a copy of the graph's.
        layout: how they lie there.
    """

    __slots__ = ("joined", "layout")

    joined: Tensor
    layout: JoinedLayout

    def __getattr__(self, name: str) -> Any:
        # Only asked for what isn't there yet.
        if name == "tokens":
            tokens = self.joined[: self.layout.num_rows * self.layout.tokens_dtype.itemsize]
            self.tokens = [tokens.view(self.layout.tokens_dtype)]
            return self.tokens
        if name == "logits":
            logits = self.joined[self.layout.logits_at :].view(self.layout.logits_dtype)
            self.logits = logits.view(self.layout.num_rows, -1)
            return self.logits
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")


new_joined: Callable[[], JoinedRows] = partial(object.__new__, JoinedRows)
"""Makes them empty, as `new_outputs_of` does"""
