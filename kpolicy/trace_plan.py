"""A trace, planned: replayed and planned until it settles, scored out of sample, and set beside the default lists.

::

    from kpolicy.scheduling.traces import read_trace
    from kpolicy.trace_plan import plan_trace

    found = plan_trace(read_trace("azure_llm_2023_conv.csv"), policy="vllm", most_sizes=20)
    print(found.plan.sizes.piecewise, found.plan.price_us, found.held_out.step_us)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import gcd
from typing import Any

import attrs

from kpolicy.attention.support import AttentionSupport, Claims, parse_attention
from kpolicy.budget_models import BudgetModel
from kpolicy.budgets import Budget, Usage, amount
from kpolicy.costs import CostTable, analytic_costs
from kpolicy.errors import BudgetRefused, ConfigError, KPolicyError, check_kind
from kpolicy.keys import GraphKey
from kpolicy.kv_span import NOT_RECORDED
from kpolicy.ladders import CaptureSizes
from kpolicy.modes import Mode, Part
from kpolicy.planning.choose import allowed
from kpolicy.planning.histogram import Histogram
from kpolicy.planning.plan import SMOOTHING, Plan, Replayed, fixed_point, plan
from kpolicy.planning.unseen import unseen
from kpolicy.planning.workload import Layout, Workload
from kpolicy.policies import Policy, get_policy
from kpolicy.reasons import Reason
from kpolicy.scheduling.traces import Trace
from kpolicy.schemas import LadderPlan
from kpolicy.settings import Settings
from kpolicy.simulate import DecodeRun, Server, SimStep, simulate
from kpolicy.words import some

__all__ = ["DEFAULT_LISTS", "HeldOut", "Score", "TracePlan", "halves", "layout_of", "plan_trace", "replayed"]

DEFAULT_LISTS: Mapping[str, str] = {
    "vLLM 0.23": "vllm:version=0.23",
    "vLLM 0.33": "vllm:version=0.33",
    "SGLang 0.5.23": "sglang",
    "TensorRT-LLM, padded": "tensorrt_llm:enable_padding=true",
    "vLLM-Ascend": "ascend",
    "nano-vLLM": "nano_vllm",
}
"""Serving engines whose default lists are scored, and the replica that has each."""


@attrs.frozen(kw_only=True)
class Score:
    """What a list of sizes costs on given steps.

    Args:
        name: whose list it is.
        policy: the rule that it is scored under.
        sizes: the list.
        num_sizes: sizes, over all lists.
        num_keys: graph keys: what the engine captures.
        usage: what capturing them is expected to take.
        step_us: mean time of a step.
    """

    name: str
    policy: str
    sizes: CaptureSizes
    num_sizes: int
    num_keys: int
    usage: Usage
    step_us: float


@attrs.frozen(kw_only=True)
class HeldOut:
    """The plan of the first half of the requests, scored on the steps of the second.

    Args:
        plan: that plan.
        step_us: mean time of a step of the second half with it.
        default_us: the same with the policy's own default sizes.
        best_us: the same with the plan that the second half itself would have had, unsmoothed and as large.
        steps: steps of the second half.
    """

    plan: Plan
    step_us: float
    default_us: float
    best_us: float
    steps: float

    @property
    def against_default(self) -> float:
        """How much longer a step takes than with the default sizes, as a share; below 0 is better."""
        return self.step_us / self.default_us - 1


@attrs.frozen(kw_only=True)
class TracePlan:
    """What `plan_trace` found.

    Args:
        policy: the policy planned for, with its arguments.
        replayed: the plan, and the replays that it came from.
        own: the plan's score.
        default: the policy's own default list, on the same steps.
        others: the default lists of serving engines, each by its own rule, on the same steps.
        held_out: the first half's plan on the second half; None where that was left out.
        settings: the deployment's limits.
        claims: what attention supports.
        layout: the policy's lists.
        costs: the cost table's version, and whether it was measured.
        source: the trace.
        requests: its requests.
        dropped: rows of it that were left out, by reason.
        notes: what a reader of the plan should know.
        model: what tells the model from others (`kpolicy.attention.fields.identity`); empty where no config was given.
    """

    policy: str
    replayed: Replayed
    own: Score
    default: Score
    others: tuple[Score, ...]
    held_out: HeldOut | None
    settings: Settings
    claims: Claims
    layout: Layout
    costs: CostTable = attrs.field(repr=False)
    source: str
    requests: int = 0
    dropped: Mapping[str, int] = attrs.field(factory=dict, hash=False)
    notes: tuple[str, ...] = ()
    model: Mapping[str, Any] = attrs.field(factory=dict, hash=False)

    @property
    def plan(self) -> Plan:
        return self.replayed.plan

    def file(self, budget: Budget | None = None, **made_by: str) -> LadderPlan:
        """The plan as a plan file has it: `kpolicy.schemas.write_plan` writes it, and ``--ladder`` takes it.

        Args:
            budget: what it was planned under.
            made_by: what made it, such as a command, for the file's `planned_from`.
        """
        sizes = self.plan.sizes
        captures = bool(sizes.decode or sizes.mixed or sizes.piecewise)
        return LadderPlan(
            sizes=sizes,
            keys=get_policy(self.policy).plan(sizes, self.claims, self.settings) if captures else (),
            settings=self.settings,
            attention=self.claims,
            budget=budget or Budget(),
            policy=self.policy,
            costs_version=self.costs.version,
            planned_from={
                "trace": self.source,
                "histogram": self.replayed.histogram.as_dict(),
                **({"model": dict(self.model)} if self.model else {}),
                **made_by,
                "settled": self.replayed.settled,
            },
        )


_ONE_LIST = frozenset({"ascend", "kunlun"})
"""Replicas that keep the lists of one engine's list apart."""
_MUCH_WORSE = 0.1
"""How much longer, as a share, larger steps than were planned for may take without a note."""


def layout_of(policy: Policy, claims: Claims, settings: Settings, *, multiple_of: int = 1) -> Layout:
    """Which lists of sizes a policy has, read from the graphs it plans for lists that can be told apart."""
    q = settings.query_len
    wide = attrs.evolve(settings, max_num_reqs=64, max_num_tokens=256 * q)
    probe = CaptureSizes((2 * q,), (11 * q,), (13 * q,))
    keys = policy.plan(probe, claims, wide)
    full = [key for key in keys if key.part is Part.FULL]
    decode = [key for key in full if key.decode_only]
    mixed = [key for key in full if not key.decode_only]
    pieces = [key for key in keys if key.part is Part.PIECEWISE]
    one_list = any(key.num_tokens > 2 * q for key in decode) or any(key.num_tokens == 2 * q for key in pieces + mixed)
    one_list = one_list or policy.name in _ONE_LIST
    lens = {key.query_len for key in decode}
    # One list is captured at every size of the probe; lists apart have one each.
    probed = 3 if any(key.num_tokens > 2 * q for key in decode) else 1
    either = mixed or pieces
    # Where a mixed batch may replay either, FULL takes the host less time.
    others = Part.PIECEWISE if pieces and not mixed else Part.FULL if mixed else None
    return Layout(
        one_list=one_list,
        decode=Part.FULL if decode else None,
        others=others,
        query_lens=() if None in lens or lens >= set(settings.decode_query_lens) else tuple(sorted(filter(None, lens))),
        decode_keys=max(1, len(decode) // probed),
        other_keys=max(1, len(either) // len({key.num_tokens for key in either})) if either else 1,
        escape_when_cheaper=policy.reads_costs,
        most_padding=getattr(policy, "most_padding", 0),
        multiple_of=multiple_of,
        decode_multiple_of=1 if one_list else multiple_of // gcd(multiple_of, q),
    )


def halves(trace: Trace) -> tuple[Trace, Trace]:
    """The first and the second half of a trace's requests.

    Raises:
        ConfigError: there are fewer than two.
    """
    middle = len(trace) // 2
    if not middle:
        raise ConfigError(
            f"{trace.source} has {len(trace)} of the two requests that it takes to score a plan on the second half. "
            "Give a longer window."
        )
    first, second = trace.requests[:middle], trace.requests[middle:]
    return (
        attrs.evolve(trace, source=f"{trace.source}, first half of the requests", requests=first),
        attrs.evolve(trace, source=f"{trace.source}, second half of the requests", requests=second),
    )


def replayed(
    trace: Trace,
    policy: str | Policy,
    sizes: CaptureSizes,
    *,
    server: Server,
    costs: CostTable,
    attention: str | AttentionSupport | Claims | None = None,
    objective: str = "throughput",
    seed: int = 0,
) -> Histogram:
    """The steps that a trace makes with a policy and those sizes; with none captured all run eagerly.

    Raises:
        KeyboardInterrupt: it was interrupted; half a trace isn't planned for.
    """
    histogram = Histogram(trace.source)
    captures = bool(sizes.decode or sizes.mixed or sizes.piecewise)

    def note(step: SimStep) -> None:
        decision = step.decision
        histogram.add(step.step.numbers, split=decision.mode is Mode.SPLIT, decode_steps=decision.decode_steps)

    def note_decodes(steps: DecodeRun) -> None:
        numbers = steps.numbers
        histogram.add_decodes(numbers.num_decodes, numbers.query_len, len(steps.cycles_us), steps.kv_tokens)

    result = simulate(
        trace, policy if captures else "eager", server=server, costs=costs, attention=attention,
        ladder=sizes if captures else None, objective=objective, seed=seed, on_step=note, on_decodes=note_decodes,
    )  # fmt: skip
    if result.interrupted:
        raise KeyboardInterrupt
    histogram.refused = dict(result.refused)
    histogram.delays = result.delays
    histogram.outside_sizes = result.outside_sizes / max(result.steps, 1)
    if result.outside_contexts is not None:
        histogram.outside_contexts = result.outside_contexts / max(result.steps, 1)
    return histogram.settled()


def _sizes_of(against: str, claims: Claims, settings: Settings) -> CaptureSizes:
    """A policy's own sizes.

    Raises:
        ConfigError: it captures nothing.
    """
    policy = get_policy(against)
    if not layout_of(policy, claims, settings).names:
        raise ConfigError(f"the policy {against!r} captures nothing to compare with; name one that does, as sglang.")
    return policy.sizes(settings)


def plan_trace(
    trace: Trace,
    *,
    policy: str = "auto",
    budget: Budget | BudgetModel | None = None,
    most_sizes: int | None = None,
    costs: CostTable | None = None,
    attention: str | AttentionSupport | Claims | None = None,
    server: Server | None = None,
    objective: str = "throughput",
    multiple_of: int = 1,
    largest: Mapping[str, int] | None = None,
    smoothing: float = SMOOTHING,
    worth: float | None = None,
    most_loss: float | Mapping[str, float] | None = None,
    against: str | None = None,
    exact: bool = False,
    hold_out: bool = True,
    most_rounds: int = 6,
    seed: int = 0,
    progress: Callable[[str], object] | None = None,
) -> TracePlan:
    """Plan the capture sizes for a trace.

    Args:
        trace: the requests.
        policy: the policy that will run, with its arguments.
        budget: what capturing all sizes may take together; a `BudgetModel` also says what each graph takes of it.
        most_sizes: the most sizes, over all lists.
        costs: what launches take; analytic by default.
        attention: what attention supports; ``gqa`` by default.
        server: limits and memory of the server.
        objective: what `auto` minimises.
        multiple_of: sizes are multiples of this.
        largest: the size that a list must end with, by the list's name.
        smoothing: share of the steps that is spread over sizes that weren't seen.
        worth: sizes are added only while one more takes this share off the mean step; see `kpolicy.planning.plan`.
        most_loss: no step takes longer than in a graph of its own size by more than this share; likewise.
        against: a policy by whose own sizes `most_loss` goes where it has a graph for a step; likewise.
        exact: solve the integer programme where prices differ within a list (needs highspy).
        hold_out: also plan on the first half and score on the second, where both have requests that are served.
        most_rounds: replays at most, for each plan.
        seed: of accepted drafts.
        progress: told what is done now.

    Raises:
        ConfigError: an argument can't be used, or no request is served.
        BudgetRefused: no size fits the budget, or sizes that must be captured don't.
    """
    server = Server(warm=True) if server is None else server
    costs = analytic_costs() if costs is None else costs
    check_kind("trace", trace, Trace, "kpolicy.scheduling.traces.read_trace(FILE)")
    check_kind("server", server, Server, "kpolicy.simulate.Server(warm=True)")
    if server.ranks > 1:
        raise ConfigError(
            f"{server.ranks} ranks were asked for; sizes are planned from the steps of one rank, and ranks that agree "
            "run at the largest of theirs. Leave them out, and give the rate of arrivals that one rank gets."
        )
    chosen, claims = get_policy(policy), _claims(attention)
    layout = layout_of(chosen, claims, server.settings, multiple_of=multiple_of)
    limits, usage_of = (budget.budget, budget.cost_of) if isinstance(budget, BudgetModel) else (budget, costs.usage_of)
    planner = _Planner(
        policy=policy, server=server, costs=costs, claims=claims, objective=objective, seed=seed, layout=layout,
        start=chosen.sizes(server.settings), limits=limits, usage_of=usage_of, most_rounds=most_rounds,
        tell=progress or (lambda _: None),
        given={
            "most_sizes": most_sizes, "largest": largest, "smoothing": smoothing, "worth": worth, "exact": exact,
            "most_loss": most_loss,
            "against": None if against is None else _sizes_of(against, claims, server.settings),
        },
    )  # fmt: skip
    parts = halves(trace) if hold_out else ()
    if not largest:
        _check_fits(planner.workload(Histogram(trace.source)), limits, most_sizes)
    begun = planner.steps_of(trace, planner.start)
    if not begun.steps:
        raise ConfigError(
            f"no request of {trace.source} was served, so there are no steps to plan for: {_counted(begun.refused)}. "
            "Give more KV tokens, or another trace or window."
        )
    held, unscored = planner.held_out(*parts) if parts else (None, "")
    found = planner.settled(trace, begun)
    final = planner.workload(found.histogram)
    return TracePlan(
        policy=policy,
        replayed=found,
        own=score("the plan", policy, found.plan.sizes, final, claims),
        default=score(f"default of {policy}", policy, planner.start, final, claims),
        others=tuple(_defaults(final, claims)),
        held_out=held,
        settings=server.settings,
        claims=claims,
        layout=layout,
        costs=costs,
        source=trace.source,
        requests=len(trace),
        dropped=dict(trace.dropped),
        notes=(*_notes(found, final, chosen, costs), *([unscored] if unscored else ())),
    )


@attrs.frozen(kw_only=True)
class _Planner:
    """What is equal for all plans of one call of `plan_trace`.

    Args:
        start: the policy's own sizes, which the first steps are of.
        limits: what capturing may take.
        given: the arguments of `kpolicy.planning.plan`.
        tell: told what is done now.
    """

    policy: str
    server: Server
    costs: CostTable
    claims: Claims
    objective: str
    seed: int
    layout: Layout
    start: CaptureSizes
    limits: Budget | None
    usage_of: Callable[[GraphKey], Usage]
    most_rounds: int
    given: Mapping[str, Any]
    tell: Callable[[str], object]

    def workload(self, histogram: Histogram) -> Workload:
        return Workload(
            histogram=histogram, costs=self.costs, settings=self.server.settings, layout=self.layout,
            usage_of=self.usage_of,
        )  # fmt: skip

    def steps_of(self, requests: Trace, sizes: CaptureSizes) -> Histogram:
        """The steps that requests make with those sizes."""
        self.tell(f"replaying {requests.source}")
        return replayed(
            requests, self.policy, sizes, server=self.server, costs=self.costs, attention=self.claims,
            objective=self.objective, seed=self.seed,
        )  # fmt: skip

    def planned(self, histogram: Histogram, **changed: Any) -> tuple[Plan, Workload]:
        made = self.workload(histogram)
        return plan(made, self.limits, **{**self.given, **changed}), made

    def settled(self, requests: Trace, begun: Histogram) -> Replayed:
        """The plan that makes the steps that it is for, from the steps with the policy's own sizes on."""
        return fixed_point(
            lambda sizes: begun if sizes == self.start else self.steps_of(requests, sizes), self.planned, self.start,
            most_rounds=self.most_rounds,
        )  # fmt: skip

    def held_out(self, first: Trace, second: Trace) -> tuple[HeldOut | None, str]:
        """A plan of the first half on the steps of the second, or why there is none."""
        before, after = (self.steps_of(each, self.start) for each in (first, second))
        if not (before.steps and after.steps):
            empty = "second" if before.steps else "first"
            return None, f"the plan isn't scored out of sample: no request of the {empty} half was served."
        made, seen = self.settled(first, before).plan, self.workload(after)
        free = {"smoothing": 0.0, "worth": 0.0, "most_loss": None, "against": None}
        best, _ = self.planned(seen.histogram, most_sizes=made.num_sizes, **free)
        return HeldOut(
            plan=made,
            step_us=seen.time_us(made.sizes) / seen.steps,
            default_us=seen.time_us(self.start) / seen.steps,
            best_us=best.step_us,
            steps=seen.steps,
        ), ""


def score(name: str, policy: str, sizes: CaptureSizes, workload: Workload, claims: Claims) -> Score:
    """What those sizes cost on a workload's steps, under a policy's rule."""
    made, settings = get_policy(policy), workload.settings
    layout = layout_of(made, claims, settings)
    under = attrs.evolve(workload, layout=attrs.evolve(layout, multiple_of=workload.layout.multiple_of))
    keys = made.plan(sizes, claims, settings) if sizes.decode or sizes.mixed or sizes.piecewise else ()
    return Score(
        name=name,
        policy=policy,
        sizes=sizes,
        num_sizes=layout.count(sizes, settings.query_len),
        num_keys=len(keys),
        usage=sum(map(workload.usage_of or workload.costs.usage_of, keys), Usage()),
        step_us=under.time_us(sizes) / under.steps,
    )


def _defaults(workload: Workload, claims: Claims) -> list[Score]:
    """The default lists of serving engines that start with these settings and this attention."""
    found = [_default(name, policy, workload, claims) for name, policy in DEFAULT_LISTS.items()]
    return [each for each in found if each is not None]


def _default(name: str, policy: str, workload: Workload, claims: Claims) -> Score | None:
    """An engine's default list; None where the engine has none for these limits, or doesn't start."""
    try:
        return score(name, policy, get_policy(policy).sizes(workload.settings), workload, claims)
    except KPolicyError:
        return None


def _claims(attention: str | AttentionSupport | Claims | None) -> Claims:
    if isinstance(attention, Claims):
        return attention
    given = "gqa" if attention is None else attention
    return (parse_attention(given) if isinstance(given, str) else given).claims


def _notes(found: Replayed, workload: Workload, policy: Policy, costs: CostTable) -> list[str]:
    """What a reader should know of how sure the plan is."""
    notes = []
    if costs.kernel_tables:
        notes.append(
            f"step times are {costs.version}, kernels that their publisher measured, not on your device, and analytic "
            "host and capture costs. Measure a profile before you rely on the numbers."
        )
    elif not costs.measured:
        notes.append(
            f"step times are {costs.version}, not measured on your device: analytic times are flat where reading "
            "weights bounds a step, so they ask for few sizes. Measure a profile before you rely on the numbers."
        )
    if not found.settled:
        notes.append(
            f"the plan didn't settle in {some(len(found.rounds), 'replay')}: the sizes change the steps that they are "
            "planned for. The best of the plans replayed is given."
        )
    if not policy.reads_costs and getattr(policy, "enable_padding", True) is False:
        notes.append("the policy replays exact sizes only; the plan takes padding as on.")
    refused = found.histogram.refused
    if refused:
        notes.append(f"requests that made no steps: {_counted(refused)}.")
    if found.histogram.delays:
        notes.append(f"{found.histogram.delays}.")
    above = unseen(workload, found.plan.sizes)
    if above is not None and above.worse > _MUCH_WORSE:
        how = f"replays the graph of {above.size:,}" if above.size else "runs eagerly"
        most = f"more than {above.largest:,} decode{'' if above.largest == 1 else 's'}"
        notes.append(
            f"no step has {most if above.largest else 'decodes alone'}, and "
            f"{workload.settings.max_num_reqs:,} may run: one of {above.reqs:,} {how}, which takes {above.worse:.0%} "
            "longer than a graph of its size. If your server is busier than this trace, plan for a higher rate of "
            "arrivals or fewer requests."
        )
    sizes = found.histogram.outside_sizes
    if sizes:
        notes.append(
            f"{sizes:.1%} of the steps run at a size outside what the cost table was made for: {_timed(costs)}."
        )
    contexts = found.histogram.outside_contexts
    if contexts:
        notes.append(
            f"{contexts:.1%} of the steps have a context outside what the cost table was made for: {costs.kv_span}."
        )
    elif contexts is None and costs.measured:
        notes.append(f"{NOT_RECORDED}, so that steps of longer ones than attention was timed at can't be told.")
    return notes


def _counted(refused: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in refused.items())


def _check_fits(workload: Workload, limits: Budget | None, most_sizes: int | None) -> None:
    """See that the budget holds one size at least, of any list."""
    budget = limits or Budget()
    usages = [ladder.usage_of(i) for ladder in workload.ladders() for i in range(len(ladder.sizes))]
    reasons = [budget.refuses(Usage(), usage) for usage in usages]
    if None in reasons and most_sizes != 0:
        return
    least = min(usages, key=lambda usage: (usage.graphs, usage.bytes, usage.seconds))
    takes = ", ".join(amount(name, value) for name, value in attrs.asdict(least).items())
    raise BudgetRefused(
        next(filter(None, reasons), Reason.BUDGET_GRAPHS),
        f"no capture size fits the budget of {allowed(limits, most_sizes)}: the least that one takes is {takes}. Raise "
        "the budget, or run eagerly.",
    )


def _timed(costs: CostTable) -> str:
    """The largest sizes of each kind that a table was made for."""
    curves = {"FULL graphs": costs.full, "FULL graphs of mixed batches": costs.mixed, "PIECEWISE": costs.piecewise}
    each = [(name, curve.sizes[-1]) for name, curve in curves.items() if curve is not None]
    each.append(("eager", costs.eager.sizes[-1]))
    return ", ".join(f"{name} of up to {size:,} tokens" for name, size in each)
