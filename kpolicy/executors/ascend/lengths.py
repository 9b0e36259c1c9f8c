"""Lengths that an operator reads on the host, for a launch and padded to a graph's shape: `LengthRule`s.

Ascend's attention operators take lengths as lists of numbers. A graph keeps those it was captured with, so a replay
rewrites them; where the operator runs eagerly it takes them from the step. Both ask the same rule.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import NamedTuple, Protocol

import attrs

from kpolicy.errors import GraphReplayError
from kpolicy.executors.buffers import PaddedShape
from kpolicy.executors.step_model import StepContext

__all__ = ["NO_ROWS", "ContextLengths", "HostRows", "LengthRule", "TokenLengths", "host_rows", "running_rows"]


class HostRows(NamedTuple):
    """What the host knows of a launch's real rows."""

    query_lens: Sequence[int]
    """[num_reqs]"""
    kv_lens: Sequence[int]
    """[num_reqs], this step's tokens included"""

    def ahead(self, steps: int) -> HostRows:
        """The rows that many decode steps on."""
        return self if not steps else HostRows(self.query_lens, [kv_len + steps for kv_len in self.kv_lens])


NO_ROWS = HostRows((), ())
"""Padding alone: what a graph is captured over."""


class LengthRule(Protocol):
    """Makes an operator's host arguments of a launch's rows. Rules that are equal make equal arguments."""

    @property
    def fields(self) -> tuple[str, ...]:
        """The arguments' names."""
        ...

    def values(self, rows: HostRows, shape: PaddedShape) -> Mapping[str, list[int]]:
        """Every field's value.

        Raises:
            GraphReplayError: the rows can't be padded to the shape.
        """
        ...


@attrs.frozen
class TokenLengths:
    """Lengths of tokens laid end to end (the layout TND of torch_npu's fused attention).

    Query lengths are summed up, KV lengths are each row's own, and the last sum is the padded number of tokens. In a
    uniform launch padding rows have the query length of the others. Otherwise one row more than the graph has, and
    padding rows before it, take the padded tokens. A padding row has as many KV tokens as query tokens, because the
    operator refuses fewer under a causal mask; its block table holds zeros, and nobody reads what it computes.

    Args:
        query: the name of the query lengths' argument.
        kv: that of the KV lengths'.
        most_kv: KV tokens that a row's block table has room for.
    """

    query: str
    kv: str
    most_kv: int

    @property
    def fields(self) -> tuple[str, ...]:
        return self.query, self.kv

    def values(self, rows: HostRows, shape: PaddedShape) -> dict[str, list[int]]:
        num_tokens, num_reqs, query_len = shape
        queries, kv_lens = list(rows.query_lens), list(rows.kv_lens)
        if query_len is not None:
            padding = num_reqs - len(queries)
            queries += [query_len] * padding
            kv_lens += [min(query_len, self.most_kv)] * padding
        else:
            left = num_tokens - sum(queries)
            for _ in range(num_reqs + 1 - len(queries)):
                taken = min(left, self.most_kv)
                left -= taken
                queries.append(taken)
                kv_lens.append(taken)
            if left:
                raise GraphReplayError(
                    None,
                    f"{left} of the {num_tokens} padded tokens have no row: {num_reqs + 1} rows hold {self.most_kv} "
                    "tokens of padding each. Capture a size nearer to such batches, or raise max_model_len.",
                )
        return {self.query: list(accumulate(queries)), self.kv: kv_lens}


@attrs.frozen
class ContextLengths:
    """KV lengths of single tokens, as paged attention takes them: each token is a row that sees what is before it.

    A row of q tokens has them at kv_len - q + 1 up to kv_len. Tokens of padding have none.

    Args:
        kv: the argument's name.
    """

    kv: str

    @property
    def fields(self) -> tuple[str, ...]:
        return (self.kv,)

    def values(self, rows: HostRows, shape: PaddedShape) -> dict[str, list[int]]:
        lens = [
            length
            for query_len, kv_len in zip(rows.query_lens, rows.kv_lens, strict=True)
            for length in range(kv_len - query_len + 1, kv_len + 1)
        ]
        return {self.kv: lens + [0] * (shape.num_tokens - len(lens))}


_running = threading.local()


@contextmanager
def running_rows(rows: HostRows) -> Iterator[None]:
    """Let calls of this thread that the step says nothing to (its `layout` is None) know their rows all the same.

    A graph's attention must not read them while it is captured; what stands in for a replay must.
    """
    before = getattr(_running, "rows", NO_ROWS)
    _running.rows = rows
    try:
        yield
    finally:
        _running.rows = before


def host_rows(step: StepContext) -> HostRows:
    """The rows of a step: from its layout, or those that `running_rows` says; none while a graph is captured."""
    if step.layout is not None:
        return HostRows(step.layout.query_lens, step.layout.kv_lens)
    rows: HostRows = getattr(_running, "rows", NO_ROWS)
    return rows
