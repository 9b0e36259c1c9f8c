"""A request while it is simulated: counts of tokens and blocks, no token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kpolicy.errors import ConfigError
from kpolicy.scheduling.traces import TraceRequest
from kpolicy.shapes import LARGEST_COUNT

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


def in_order(requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
    """The requests, checked as they come.

    Raises:
        ConfigError: a time goes back or isn't finite, or a count isn't from 1 to `LARGEST_COUNT`.
    """
    before = 0.0
    for one in requests:
        if not before <= one.arrival_s < float("inf"):
            raise ConfigError(
                f"request {one.index} arrives at {one.arrival_s} s, after one at {before} s; arrivals must be finite, "
                "not negative and in order. Sort the requests."
            )
        if not (1 <= one.prompt_tokens <= LARGEST_COUNT and 1 <= one.output_tokens <= LARGEST_COUNT):
            raise ConfigError(
                f"request {one.index} has {one.prompt_tokens} prompt and {one.output_tokens} output tokens; both must "
                f"be 1 to {LARGEST_COUNT}. Leave such requests out."
            )
        before = one.arrival_s
        yield one
