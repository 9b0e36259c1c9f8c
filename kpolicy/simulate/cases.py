"""Cases of a sweep: what is combined, what they share, and how one is run.

A case is data, and running one needs nothing but that and what all share, so local processes and Ray's workers run the
same function.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import attrs

from kpolicy import __version__
from kpolicy.budgets import Budget
from kpolicy.costs import CostTable
from kpolicy.engine import Engine
from kpolicy.errors import KPolicyError
from kpolicy.ladders import CaptureSizes
from kpolicy.scheduling.traces import FailedTrace, Trace
from kpolicy.settings import Objective, Settings
from kpolicy.simulate.run import simulate
from kpolicy.simulate.server import Server

__all__ = ["Axes", "Case", "Common", "alike", "lost_case", "run_case"]


@attrs.frozen(kw_only=True)
class Case:
    """One simulation of a sweep, by the names of what it combines.

    Args:
        trace, costs, ladder: names in `Common`; an empty ladder is the policy's own.
        rate: speeds the arrivals up by this factor.
        policy: the policy, with its arguments.
    """

    trace: str
    rate: float
    costs: str
    ladder: str
    policy: str

    @property
    def key(self) -> str:
        """What tells it from every other case of its sweep."""
        return json.dumps([self.trace, self.rate, self.costs, self.ladder, self.policy])


@attrs.frozen(kw_only=True)
class Common:
    """What the names of cases stand for, and what is equal in all of them.

    Args:
        traces: by name. Cases of one that failed have its error, and are run when it can be served.
        costs: (cost table, server) by name: another device has other room for KV.
        ladders: capture sizes by name; None where the policy's own.
        attention: as `Engine` takes it.
        objective: what `auto` minimises.
        budget: what captured graphs may take.
        seed: of accepted drafts, and of the note of the host's speed that simulations begin at (`simulate`).
    """

    traces: Mapping[str, Trace | FailedTrace]
    costs: Mapping[str, tuple[CostTable, Server]]
    ladders: Mapping[str, CaptureSizes | None]
    attention: Any = None
    objective: str = "throughput"
    budget: Budget | None = None
    seed: int = 0

    def fingerprint(self) -> dict[str, Any]:
        """What a results file must have been made with to be gone on with; None for a trace that failed."""
        from hashlib import sha256

        def digest(value: object) -> str:
            return sha256(repr(value).encode()).hexdigest()[:16]

        return {
            "kpolicy": __version__,
            "traces": {
                name: None if isinstance(trace, FailedTrace) else digest(trace.requests)
                for name, trace in self.traces.items()
            },
            "costs": {name: digest(costs) for name, (costs, _) in self.costs.items()},
            "servers": {name: digest(server) for name, (_, server) in self.costs.items()},
            "ladders": {name: digest(each) for name, each in self.ladders.items()},
            # What attention supports; where that was read from is a set, whose order differs from process to process.
            "attention": digest(getattr(self.attention, "claims", self.attention)),
            # With its bound on first tokens, which was another for the same text until 2026-11-29.
            "objective": repr(Objective.parse(self.objective)),
            "budget": digest(self.budget),
            "seed": self.seed,
        }


@attrs.frozen(kw_only=True)
class Axes:
    """What is combined: every value of each with every value of the others."""

    policies: Sequence[str]
    rates: Sequence[float] = (1.0,)

    def cases(self, common: Common) -> list[Case]:
        """Every combination, in order."""
        return [
            Case(trace=trace, rate=rate, costs=costs, ladder=ladder, policy=policy)
            for trace, rate, costs, ladder, policy in product(
                common.traces, self.rates, common.costs, common.ladders, self.policies
            )
        ]


def alike(cases: Sequence[Case], common: Common) -> dict[str, list[Case]]:
    """By key, the cases that a case is as, itself among them; only those that are as others.

    A case that captures nothing, as `eager`'s, is the same with any other ladder by which it captures nothing.
    """
    groups: dict[str, list[Case]] = {}
    nothing: dict[tuple[str, str, Settings], bool] = {}
    for case in cases if len(common.ladders) > 1 else ():
        # Which graphs are planned doesn't hang on what they cost.
        of = (case.policy, case.ladder, common.costs[case.costs][1].settings)
        if of not in nothing:
            nothing[of] = _captures_nothing(case, common)
        if nothing[of]:
            groups.setdefault(attrs.evolve(case, ladder="").key, []).append(case)
    return {case.key: group for group in groups.values() if len(group) > 1 for case in group}


def _captures_nothing(case: Case, common: Common) -> bool:
    """Whether it plans no graph; not where that can't be told, which its run says why."""
    _, server = common.costs[case.costs]
    ladder = common.ladders[case.ladder]
    try:
        engine = Engine(case.policy, attention=common.attention, ladder=ladder, settings=server.settings)
    except KPolicyError:
        return False
    return not engine.keys


def run_case(case: Case, common: Common) -> dict[str, Any]:
    """One line of a results file: the case, and its result or why it has none."""
    costs, server = common.costs[case.costs]
    trace = common.traces[case.trace]
    if isinstance(trace, FailedTrace):
        return {"case": attrs.asdict(case), "error": trace.error, "lost": True}
    try:
        result = simulate(
            trace if case.rate == 1 else trace.scaled(case.rate), case.policy, server=server, costs=costs,
            attention=common.attention, ladder=common.ladders[case.ladder], objective=common.objective,
            budget=common.budget, seed=common.seed,
        )  # fmt: skip
    except KPolicyError as error:
        return {"case": attrs.asdict(case), "error": str(error)}
    if result.interrupted:
        raise KeyboardInterrupt
    # As it reads back from a file, wherever it was run.
    return {"case": attrs.asdict(case), "result": json.loads(json.dumps(result.as_dict(), allow_nan=False))}


def lost_case(case: Case, why: str) -> dict[str, Any]:
    """The line of a case whose process or node went away. It isn't kept in a results file, so that it is run again."""
    return {"case": attrs.asdict(case), "error": f"{why}. The same command runs it again.", "lost": True}
