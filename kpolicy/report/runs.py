"""`Run` and `Planned`: one simulated policy, and the sizes that were planned for it."""

from __future__ import annotations

import attrs

from kpolicy.budgets import Budget
from kpolicy.ladders import CaptureSizes
from kpolicy.report.steps import Steps
from kpolicy.simulate import SimResult
from kpolicy.trace_plan import TracePlan

__all__ = ["Planned", "Run", "in_words"]


@attrs.frozen(kw_only=True)
class Run:
    """One simulated policy.

    Args:
        policy: the policy, with its arguments.
        kind: whose capture sizes it had: ``own``, ``given`` or ``planned``.
        sizes: those sizes.
        result: what came out.
        steps: what was kept of the steps.
    """

    policy: str
    kind: str
    sizes: CaptureSizes
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
    """

    found: TracePlan
    base: Run
    run: Run | None
    budget: Budget | None = None


def in_words(sizes: CaptureSizes, query_len: int = 1) -> list[tuple[str, str]]:
    """The lists of capture sizes: what each is for, and its sizes; equal lists once."""
    if sizes.mixed == sizes.piecewise and set(sizes.decode) <= set(sizes.piecewise):
        return [("all graphs, tokens", _listed(sizes.piecewise))]
    decode = tuple(size // query_len for size in sizes.decode)
    lists = (
        ("decode graphs, requests", decode), ("FULL graphs of mixed batches, tokens", sizes.mixed),
        ("PIECEWISE graphs, tokens", sizes.piecewise),
    )  # fmt: skip
    return [(name, _listed(listed)) for name, listed in lists if listed] or [("graphs", "none")]


def _listed(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes)) or "none"
