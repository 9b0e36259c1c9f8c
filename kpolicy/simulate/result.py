"""What came out of a simulation, as values and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from kpolicy.kv_span import KvSpan, outside_in_words
from kpolicy.observe import ModeStats
from kpolicy.reasons import Basis
from kpolicy.simulate.percentiles import Spread

__all__ = ["Bound", "Goodput", "SimResult"]

_SUMS = ("steps", "step_us", "tokens_computed", "padding", "outside_share", "delayed_share")


@attrs.frozen
class Bound:
    """Steps that one side bounds, and what they took."""

    steps: int = 0
    us: float = 0.0


@attrs.frozen(kw_only=True)
class Goodput:
    """Requests that met the service level; without one no figure is there, as no request was held to anything.

    Args:
        ttft_ms, gap_ms: its limits; None is none.
        good: requests that met all of them; None where there are no limits, as in the other two.
        share: of those served.
        per_s: good requests a second of the run.
    """

    ttft_ms: float | None
    gap_ms: float | None
    good: int | None
    share: float | None
    per_s: float | None


@attrs.frozen(kw_only=True)
class SimResult:
    """What one policy made of a trace. Times are simulated, in microseconds unless they say otherwise.

    Args:
        policy: the policy's name, with its arguments.
        source: the trace, and what was done to it.
        seed: of all draws.
        costs: the cost table's version.
        measured: whether its numbers were measured on the device.
        kv_span: the contexts that its attention was timed at; None where that isn't recorded.
        served: requests that got all their tokens.
        refused: requests that weren't, by reason.
        delayed: requests that came later than the trace says, for want of a free client (`Server.concurrency`); none
            that was refused.
        most_delayed_s: by how much at most.
        tokens: tokens generated.
        ttft, gap, e2e: time to first token, between a request's tokens, and from arrival to last token.
        goodput: requests that met the service level, where one was given.
        span_s: from the first arrival to the last token.
        modes: steps, tokens, padding and time by mode.
        reasons: steps by reason, of every rank.
        eager_halves: why prefill halves of splits ran eagerly, in steps.
        bound: steps and time by the side that bounds them, ``device`` or ``host``.
        outside: steps outside what the cost table was made for, by size or by context.
        outside_sizes: those with a size that its curves don't span.
        outside_contexts: those with a context beyond `kv_span`; None where a table was measured and doesn't record it.
        graphs, graphs_used: captured graphs, and those that replayed at least once.
        unused: the graphs that never replayed.
        not_captured: planned graphs that couldn't be had, by reason.
        graph_bytes: what captured graphs take.
        capture_s: seconds of capture.
        started_after_s: how long the first request waited for them; 0 for a warm server, and where none was served.
        kv_tokens: KV capacity of a rank, what graphs take not in it.
        preemptions: requests that gave their KV back and were computed again.
        prompt_tokens, reused_tokens: prompt tokens of admitted requests, each request's once, and those that were found
            in the prefix cache when it was first admitted. What is computed again after a preemption is in neither.
        drafted, accepted: tokens drafted and accepted.
        ranks: data-parallel ranks.
        decode_steps: steps of decode rows alone, by number of rows of a rank.
        interrupted: whether it ended before the trace did, and why.
        basis: what the decisions took for granted.
        downgrades: what start-up took back.
    """

    policy: str
    source: str
    seed: int
    costs: str
    measured: bool
    kv_span: KvSpan | None
    served: int
    refused: Mapping[str, int]
    delayed: int = 0
    most_delayed_s: float = 0.0
    tokens: int
    ttft: Spread
    gap: Spread
    e2e: Spread
    goodput: Goodput
    span_s: float
    modes: Mapping[str, ModeStats]
    reasons: Mapping[str, int]
    eager_halves: Mapping[str, int]
    bound: Mapping[str, Bound]
    outside: int
    outside_sizes: int
    outside_contexts: int | None
    graphs: int
    graphs_used: int
    unused: tuple[str, ...]
    not_captured: Mapping[str, int]
    graph_bytes: int
    capture_s: float
    started_after_s: float
    kv_tokens: int
    preemptions: int
    prompt_tokens: int
    reused_tokens: int
    drafted: int
    accepted: int
    ranks: int
    decode_steps: Mapping[int, int]
    interrupted: str
    basis: Basis
    downgrades: tuple[str, ...]

    @property
    def steps(self) -> int:
        return sum(stats.steps for stats in self.modes.values())

    @property
    def step_us(self) -> float:
        """Time of all steps."""
        return sum(stats.us for stats in self.modes.values())

    @property
    def padding(self) -> int:
        return sum(stats.padding for stats in self.modes.values())

    @property
    def tokens_computed(self) -> int:
        """Tokens of all steps, prompts included, without padding."""
        return sum(stats.tokens for stats in self.modes.values())

    @property
    def outside_share(self) -> float:
        """Share of the steps that are outside what the cost table was made for."""
        return self.outside / self.steps if self.steps else 0.0

    @property
    def extrapolated(self) -> tuple[str, ...]:
        """What of the steps the cost table wasn't made for, in words; and where it can't tell, that."""
        return outside_in_words(self.steps, self.outside_sizes, self.outside_contexts)

    @property
    def delayed_share(self) -> float:
        """Share of the requests that came later than the trace says."""
        return self.delayed / max(self.served + sum(self.refused.values()), 1)

    @property
    def delays(self) -> str:
        """How far clients were too few for the trace's arrivals, in words; "" where they weren't."""
        if not self.delayed:
            return ""
        ms = self.most_delayed_s * 1e3
        most = f"{ms:.3g} ms" if ms < 999 else f"{self.most_delayed_s:,.1f} s"
        return (
            f"{self.delayed_share:.1%} of the requests came up to {most} later than the trace says, when a client "
            "was free: quicker arrivals change nothing for these"
        )

    def as_dict(self) -> dict[str, Any]:
        """The result as plain JSON values. It holds no time of this machine, so equal runs give equal bytes."""
        # `curve` is each spread's, for plots.
        left_out = ("modes", "bound", "basis", "decode_steps", "curve")
        values = attrs.asdict(self, filter=lambda attribute, _value: attribute.name not in left_out)
        values["modes"] = {mode: attrs.asdict(stats) for mode, stats in self.modes.items()}
        values["bound"] = {side: attrs.asdict(each) for side, each in self.bound.items()}
        values["decode_steps"] = {str(rows): steps for rows, steps in sorted(self.decode_steps.items())}
        values["assumes"] = list(self.basis.names)
        sums = {name: getattr(self, name) for name in _SUMS}
        return values | sums
