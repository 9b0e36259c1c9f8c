"""`Run` and `Planned`: one simulated policy, and the sizes that were planned for it."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from kpolicy.budgets import Budget
from kpolicy.keys import GraphKey
from kpolicy.ladders import CaptureSizes
from kpolicy.modes import Part
from kpolicy.report.steps import Steps
from kpolicy.simulate import SimResult
from kpolicy.trace_plan import TracePlan
from kpolicy.words import some

__all__ = ["Planned", "Run", "in_words"]


@attrs.frozen(kw_only=True)
class Run:
    """One simulated policy.

    Args:
        policy: the policy, with its arguments.
        kind: whose capture sizes it had: ``own``, ``given`` or ``planned``.
        sizes: those sizes.
        keys: the graphs that the policy plans for them with this attention; not all are captured where
            `result.not_captured` counts some.
        result: what came out.
        steps: what was kept of the steps.
    """

    policy: str
    kind: str
    sizes: CaptureSizes
    keys: tuple[GraphKey, ...] = attrs.field(repr=False)
    result: SimResult
    steps: Steps = attrs.field(repr=False)

    @property
    def name(self) -> str:
        """The policy, and whose sizes where they were planned."""
        return f"{self.policy}, planned sizes" if self.kind == "planned" else self.policy


@attrs.frozen(kw_only=True)
class Planned:
    """A plan, and the simulation with it.

    Args:
        found: the plan.
        base: the run of its policy without it.
        run: the run with it; None where the plan captures nothing.
        budget: what it was planned under; None without a limit.
        most_sizes: the most sizes it may have; None for any number.
    """

    found: TracePlan
    base: Run
    run: Run | None
    budget: Budget | None = None
    most_sizes: int | None = None

    @property
    def limited(self) -> bool:
        """Whether anything was limited."""
        return self.most_sizes is not None or self.budget not in (None, Budget())


def in_words(keys: Iterable[GraphKey]) -> list[tuple[str, str]]:
    """Graphs by kind: how many there are and what they are for, and their sizes in words.

    Graphs of one size that differ in something else, such as adapters, are counted each and listed once.
    """
    kinds: dict[tuple[int, str, str], list[int]] = {}
    for key in keys:
        place, what, size = _kind(key)
        kinds.setdefault((place, f"{key.part.name} graph", what), []).append(size)
    listed = [
        (f"{some(len(sizes), graph)}{what}", ", ".join(map(str, sorted(set(sizes)))))
        for (_, graph, what), sizes in sorted(kinds.items())
    ]
    return listed or [("graphs", "none")]


def _kind(key: GraphKey) -> tuple[int, str, int]:
    """Where graphs of a kind stand among the others, what they are for, and the size of this one."""
    if key.part is Part.PIECEWISE:
        return 1000, ", tokens", key.num_tokens
    if key.query_len is not None:
        each = f" of {key.query_len} tokens a request" if key.query_len > 1 else ""
        return key.query_len, f" of decode batches{each}, requests", key.num_tokens // key.query_len
    if key.max_query_len is not None:
        return 998, f" of decode batches of up to {key.max_query_len} tokens a request, tokens", key.num_tokens
    return 999, " of mixed batches, tokens", key.num_tokens
