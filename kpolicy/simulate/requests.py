"""A request while it is simulated: counts of tokens and blocks, no token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from numbers import Real

from kpolicy.errors import ConfigError, check_kind
from kpolicy.scheduling.traces import TraceRequest
from kpolicy.shapes import LARGEST_COUNT, plain_int

__all__ = ["Request", "in_order"]


class Request:
    """One request from its arrival to its last token.

    Args:
        one: the trace's request.
        arrival_us: when it comes, in microseconds of the trace.
    """

    __slots__ = (
        "admitted", "arrival_us", "blocks", "computed", "drafted", "end", "enters", "first_us", "generated",
        "hash_ids", "held", "index", "joined", "last_us", "order", "output_tokens", "preempted", "prompt_tokens",
        "start", "until",
    )  # fmt: skip

    def __init__(self, one: TraceRequest, arrival_us: float) -> None:
        self.index = one.index
        self.arrival_us = arrival_us
        self.prompt_tokens = one.prompt_tokens
        self.output_tokens = one.output_tokens
        self.hash_ids: Sequence[int] = one.hash_ids
        self.until = one.prompt_tokens
        """Tokens to compute before it decodes: the prompt, or after a preemption what was generated too."""
        self.computed = 0
        """How many of these are in KV."""
        self.generated = 0
        self.blocks = 0
        """KV blocks it holds, cached ones included; without those that came while it decodes."""
        self.held: list[int] = []
        """Hash ids of the cached blocks among them."""
        self.admitted = 0
        self.preempted = 0
        self.first_us = -1.0
        self.last_us = -1.0
        """When it had its last token before a preemption; negative where it waits for none."""
        # While it decodes; see `PlainRows`.
        self.order = self.joined = self.start = self.end = self.enters = 0
        self.drafted: object = None


LATEST_S = 2**53 / 1e6
"""Arrivals are kept in microseconds, which are exact up to here."""


def in_order(requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
    """The requests, checked as they come; numbers of other libraries as Python's.

    Raises:
        ConfigError: one is no request, a time goes back, is too late or no number, or a count isn't from 1 to
            `LARGEST_COUNT`.
    """
    before = 0.0
    for each in requests:
        check_kind("a request", each, TraceRequest, "those of kpolicy.scheduling.traces.read_trace(FILE)")
        one = _plain(each)
        if not (isinstance(one.arrival_s, float) and before <= one.arrival_s < LATEST_S):
            raise ConfigError(
                f"request {one.index} arrives at {one.arrival_s} s, after one at {before} s; arrivals must be finite, "
                f"not negative, in order and under {LATEST_S:.0e} s. Sort the requests, and count from the first."
            )
        if not _has_counts(one):
            raise ConfigError(
                f"request {one.index!r:.80} has {one.prompt_tokens!r:.80} prompt and {one.output_tokens!r:.80} output "
                f"tokens; both must be 1 to {LARGEST_COUNT}, and its index from 0 up. Leave such requests out."
            )
        before = one.arrival_s
        yield one


def _plain(one: TraceRequest) -> TraceRequest:
    if type(one.arrival_s) is float and type(one.prompt_tokens) is type(one.output_tokens) is type(one.index) is int:
        return one
    arrival_s = float(one.arrival_s) if isinstance(one.arrival_s, Real) else one.arrival_s
    return TraceRequest(
        plain_int(one.index), arrival_s, plain_int(one.prompt_tokens), plain_int(one.output_tokens), one.hash_ids
    )


def _has_counts(one: TraceRequest) -> bool:
    prompt_tokens, output_tokens, index = one.prompt_tokens, one.output_tokens, one.index
    return (
        type(prompt_tokens) is type(output_tokens) is type(index) is int
        and 1 <= prompt_tokens <= LARGEST_COUNT
        and 1 <= output_tokens <= LARGEST_COUNT
        and 0 <= index <= LARGEST_COUNT
    )
