"""`gather`: every policy simulated, the best ones planned for and simulated with the plan, and the map of modes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import attrs

from kpolicy.attention.support import AttentionSupport, Claims, parse_attention
from kpolicy.budgets import Budget, Usage
from kpolicy.costs import CostTable, analytic_costs
from kpolicy.engine_flags import engine_of
from kpolicy.errors import BudgetRefused, ConfigError, KPolicyError, check_kind
from kpolicy.ladders import CaptureSizes
from kpolicy.policies import get_policy
from kpolicy.report.advice import Advice, advise, best_of
from kpolicy.report.modemap import ModeMap, mode_maps
from kpolicy.report.runs import Planned, Run
from kpolicy.report.steps import Steps
from kpolicy.scheduling.traces import FailedTrace, Trace
from kpolicy.simulate import Server, SimStep, simulate
from kpolicy.simulate.run import OnStep
from kpolicy.trace_plan import layout_of, plan_trace

__all__ = ["Report", "TraceReport", "gather"]

Observed = Callable[[int, int], AbstractContextManager[OnStep | None]]
"""(number of the trace, number of the policy) -> who else is told each step of that run"""


@attrs.frozen(kw_only=True)
class TraceReport:
    """What is reported of one trace.

    Args:
        trace: the trace.
        runs: the policies with the ladder they were given or have of their own, then those with planned sizes.
        plans: the plans.
        advice: what to do first.
        maps: modes over batches, the cheapest way's first.
        interrupted: what is missing because the keyboard interrupted it, in words; empty where nothing is.
        failed: what couldn't be simulated, a policy or its plan, and why.
        number: which of the report's traces it is, from 0, those that failed counted.
    """

    trace: Trace
    runs: tuple[Run, ...]
    plans: tuple[Planned, ...]
    advice: Advice
    maps: tuple[ModeMap, ...]
    interrupted: str = ""
    failed: tuple[tuple[str, str], ...] = ()
    number: int = 0

    @property
    def missing(self) -> tuple[str, ...]:
        """What isn't there and why, a line each."""
        lines = [f"{self.trace.source}: no {what}: {why}" for what, why in self.failed]
        return (*lines, self.interrupted) if self.interrupted else tuple(lines)


@attrs.frozen(kw_only=True)
class Report:
    """A report.

    Args:
        traces: what is reported of each.
        server: the server that was simulated.
        costs: what launches took.
        setting: the costs, the server and the model in words.
        notes: what a reader should know of the costs.
        interrupted: what is missing because the keyboard interrupted it, in words; empty where nothing is.
        failed: traces of which nothing is reported: which of all, from 0, and why.
    """

    traces: tuple[TraceReport, ...]
    server: Server
    costs: CostTable = attrs.field(repr=False)
    setting: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    interrupted: str = ""
    failed: tuple[tuple[int, FailedTrace], ...] = ()


@attrs.frozen(kw_only=True)
class _Asked:
    """What every run of a report shares."""

    server: Server
    costs: CostTable
    attention: AttentionSupport | Claims
    ladder: CaptureSizes | None
    objective: str
    budget: Budget | None
    seed: int

    def run(
        self, trace: Trace, policy: str, told: Callable[[int], object], *, planned: CaptureSizes | None = None,
        observer: OnStep | None = None,
    ) -> Run:  # fmt: skip
        """Simulate a policy, with planned sizes or the ladder there is.

        Raises:
            KeyboardInterrupt: it was interrupted; half a trace isn't reported.
        """
        steps = Steps()
        listen: OnStep = steps
        if observer is not None:

            def listen(step: SimStep) -> None:
                steps(step)
                observer(step)

        sizes = planned or self.ladder
        result = simulate(
            trace, policy, server=self.server, costs=self.costs, attention=self.attention, ladder=sizes,
            objective=self.objective, budget=None if planned else self.budget, seed=self.seed, on_step=listen,
            on_decodes=steps.decodes if observer is None else None, progress=told,
        )  # fmt: skip
        if result.interrupted:
            raise KeyboardInterrupt
        kind = "planned" if planned else "own" if sizes is None else "given"
        made, settings = get_policy(policy), self.server.settings
        sizes = sizes or made.sizes(settings)
        keys = made.plan(sizes, self.claims, settings)
        return Run(policy=policy, kind=kind, sizes=sizes, keys=keys, result=result, steps=steps.done())

    @property
    def claims(self) -> Claims:
        return self.attention if isinstance(self.attention, Claims) else self.attention.claims

    def fits(self, run: Run, budget: Budget | None, most_sizes: int | None) -> bool:
        """Whether a run's sizes are within what planned ones may take."""
        if run.kind == "planned" or not run.result.graphs:
            return True
        policy, settings, sizes = get_policy(run.policy), self.server.settings, run.sizes
        if most_sizes is not None:
            counted = layout_of(policy, self.claims, settings).count(sizes, settings.query_len)
            if counted > most_sizes:
                return False
        if budget is None or budget == self.budget:
            # Nothing was captured beyond what the simulation's own budget holds.
            return True
        taken = sum(map(self.costs.usage_of, policy.plan(sizes, self.claims, settings)), Usage())
        return budget.refuses(Usage(), taken) is None


def gather(
    traces: Sequence[Trace | FailedTrace],
    policies: list[str] | tuple[str, ...] = ("auto", "vllm"),
    *,
    server: Server | None = None,
    costs: CostTable | None = None,
    attention: str | AttentionSupport | Claims | None = None,
    ladder: CaptureSizes | Sequence[int] | None = None,
    objective: str = "throughput",
    budget: Budget | None = None,
    plan_budget: Budget | None = None,
    most_sizes: int | None = None,
    seed: int = 0,
    setting: Sequence[str] = (),
    notes: Sequence[str] = (),
    observed: Observed | None = None,
    progress: Callable[[str, int], Callable[[int], object]] | None = None,
) -> Report:
    """Simulate the policies on each trace, plan sizes for the best, and simulate those.

    Planned for is the best policy, and where no serving engine has that one, also the best of those that one has.

    Args:
        traces: the traces; of one that failed the report says so.
        policies: the policies to compare.
        server: the server; warm by default.
        costs: what launches take; analytic by default.
        attention: what attention supports; ``gqa`` by default.
        ladder: capture sizes to compare a plan with; each policy's own by default.
        objective: what `auto` minimises.
        budget: what graphs of the policies may take.
        plan_budget: what planned graphs may take together; `budget` by default.
        most_sizes: the most planned sizes.
        seed: of accepted drafts.
        setting: the costs and the server in words.
        notes: what a reader should know of the costs.
        observed: who else is told the steps of a policy's run.
        progress: told what is done next and how many requests that has, and gives what to tell of those that are over.

    An interrupt from the keyboard ends it with what is done: whole policies of a trace, without a plan or with one. A
    policy that can't be simulated, such as one whose graphs leave no KV, is left out where another one can, and so is
    a trace of which none can.

    Raises:
        KeyboardInterrupt: it was interrupted before any policy was done.
        ConfigError: there is no trace or no policy, an argument can't be used, or no policy can be simulated.
        BudgetRefused: the budget doesn't hold what must be captured, or nothing.
    """
    check_kind("traces", traces, (list, tuple), "[read_trace(FILE)]")
    check_kind("policies", policies, (list, tuple), "['auto', 'vllm']")
    if not traces or not policies:
        raise ConfigError(f"a report needs a trace and a policy; there are {len(traces)} and {len(policies)}.")
    for trace in traces:
        check_kind("a trace", trace, (Trace, FailedTrace), "kpolicy.scheduling.traces.read_trace(FILE)")
    for policy in policies:
        check_kind("a policy", policy, str, "'auto'")
    support = _support(attention)
    server = Server(warm=True) if server is None else server
    check_kind("server", server, Server, "kpolicy.simulate.Server(warm=True)")
    if ladder is not None and not isinstance(ladder, CaptureSizes):
        ladder = CaptureSizes.of(ladder, server.settings)
    asked = _Asked(
        server=server, costs=analytic_costs() if costs is None else costs, attention=support, ladder=ladder,
        objective=objective, budget=budget, seed=seed,
    )  # fmt: skip
    plans = {"budget": plan_budget or budget, "most_sizes": most_sizes}
    tell = progress or (lambda _what, _total: lambda _done: None)
    found: list[TraceReport] = []
    failed = [(i, trace) for i, trace in enumerate(traces) if isinstance(trace, FailedTrace)]
    first: KPolicyError | None = None
    interrupted = ""
    for i, trace in enumerate(traces):
        if isinstance(trace, FailedTrace):
            continue

        def watch(j: int, i: int = i) -> AbstractContextManager[OnStep | None]:
            return nullcontext() if observed is None else observed(i, j)

        try:
            made = _of_trace(trace, list(policies), asked, plans, tell, watch)
            found.append(attrs.evolve(made, number=i))
            interrupted = made.interrupted
        except KeyboardInterrupt:
            if not found:
                raise
            interrupted = f"{trace.source}: interrupted, nothing is reported of it"
        except BudgetRefused:
            raise
        except KPolicyError as error:
            first = first or error
            failed.append((i, FailedTrace(trace.source, f"{trace.source}: {error}")))
        if interrupted:
            break
    if not found:
        raise first or ConfigError(failed[0][1].error)
    missing = dict.fromkeys(
        (
            *(each.error for _, each in failed),
            *(line for each in found for line in each.missing),
            *filter(None, [interrupted]),
        )
    )
    return Report(
        traces=tuple(found), server=server, costs=asked.costs, setting=tuple(setting), notes=(*notes, *missing),
        interrupted=interrupted, failed=tuple(failed),
    )  # fmt: skip


def _of_trace(
    trace: Trace, policies: Sequence[str], asked: _Asked, limits: dict[str, Any], tell: Callable[..., Any],
    watch: Callable[[int], AbstractContextManager[OnStep | None]],
) -> TraceReport:  # fmt: skip
    runs: list[Run] = []
    plans: list[Planned] = []
    failed: dict[str, KPolicyError] = {}
    interrupted = ""

    def simulate_one(j: int, policy: str) -> None:
        try:
            with watch(j) as observer:
                runs.append(asked.run(trace, policy, tell(policy, len(trace)), observer=observer))
        except KPolicyError as error:
            failed[policy] = error

    def plan_one(base: Run) -> None:
        tell(f"plan for {base.policy}", 0)
        try:
            plans.append(_planned(trace, base, asked, limits, tell))
        except BudgetRefused:
            raise
        except KPolicyError as error:
            failed[f"plan for {base.policy}"] = error

    try:
        for j, policy in enumerate(policies):
            simulate_one(j, policy)
        if not runs:
            raise next(iter(failed.values()))
        for base in _to_plan(runs, asked):
            plan_one(base)
    except KeyboardInterrupt:
        if not runs:
            raise
        left = ", ".join(policies[len(runs) + len(failed) :])
        interrupted = f"{trace.source}: interrupted" + (
            f" before {left}; nothing was planned" if left else " in a plan"
        )
    kv_len = max(1, round(sum(r.prompt_tokens + r.output_tokens / 2 for r in trace.requests) / max(len(trace), 1)))
    maps: Sequence[ModeMap] = ()
    try:
        maps = mode_maps(
            [run.policy for run in runs], server=asked.server, costs=asked.costs, kv_len=kv_len,
            attention=asked.attention, ladder=asked.ladder, objective=asked.objective, budget=asked.budget,
        )  # fmt: skip
    except KeyboardInterrupt:
        interrupted = interrupted or f"{trace.source}: interrupted before the maps of modes"
    every = (*runs, *(plan.run for plan in plans if plan.run is not None))
    within = [run for run in every if asked.fits(run, **limits)]
    return TraceReport(
        trace=trace,
        runs=every,
        plans=tuple(plans),
        advice=advise(trace.source, runs, plans, within, asked.server),
        maps=tuple(maps),
        interrupted=interrupted,
        failed=tuple((what, str(error)) for what, error in failed.items()),
    )


def _planned(trace: Trace, base: Run, asked: _Asked, limits: dict[str, Any], tell: Callable[..., Any]) -> Planned:
    """Sizes for a policy, and its simulation with them."""
    made = plan_trace(
        trace, policy=base.policy, costs=asked.costs, attention=asked.attention, server=asked.server,
        objective=asked.objective, hold_out=len(trace) > 1, seed=asked.seed, **limits,
    )  # fmt: skip
    sizes = made.plan.sizes
    run = None
    if sizes.decode or sizes.mixed or sizes.piecewise:
        run = asked.run(trace, base.policy, tell(f"{base.policy}, planned", len(trace)), planned=sizes)
    return Planned(found=made, base=base, run=run, **limits)


def _to_plan(runs: Sequence[Run], asked: _Asked) -> list[Run]:
    """The runs whose policies are planned for."""
    if asked.server.ranks > 1:
        # Sizes are planned from the steps of one rank.
        return []
    best = best_of(runs)
    if not best.result.served:
        return []
    chosen = [best]
    if engine_of(best.policy) is None:
        of_engines = [run for run in runs if engine_of(run.policy) is not None]
        chosen += [best_of(of_engines)] if of_engines else []
    settings = asked.server.settings
    return [run for run in chosen if layout_of(get_policy(run.policy), asked.claims, settings).names]


def _support(attention: str | AttentionSupport | Claims | None) -> AttentionSupport | Claims:
    if attention is None or isinstance(attention, str):
        return parse_attention(attention or "gqa")
    return attention
