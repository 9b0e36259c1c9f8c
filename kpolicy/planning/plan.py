"""`plan`: the capture sizes for a workload under a budget, with the price of one more graph."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real

import attrs

from kpolicy.budgets import Budget, Usage
from kpolicy.errors import BudgetRefused, ConfigError, check_kind
from kpolicy.ladders import CaptureSizes
from kpolicy.planning.choose import Choice, allowed, checked_most, choose, frontiers, joint_curve
from kpolicy.planning.histogram import Histogram
from kpolicy.planning.ladder import Ladder
from kpolicy.planning.workload import Workload
from kpolicy.reasons import Reason
from kpolicy.words import some

__all__ = ["SMOOTHING", "WORTH", "Plan", "Replayed", "Round", "fixed_point", "least_worth", "plan"]

SMOOTHING = 0.1
"""Share of the steps that is spread over sizes that weren't seen. A plan without it is best for the steps it was made
from and loses on others: sizes between those seen get no graph near them (docs/planning.md has the figures)."""
WORTH = 0.001
"""Without a budget, graphs are added while one more takes this share off the mean step."""
MOST_LAYERS = 256


@attrs.frozen(kw_only=True)
class Plan:
    """Capture sizes, and what they are expected to do.

    Args:
        sizes: the capture sizes, as an Engine takes them.
        lists: the same by list; `DECODE` in requests, others in tokens.
        step_us: mean time of a step with them, on the steps they were planned for.
        eager_us: mean time of a step with nothing captured.
        gap: how much more than the best choice it may take at most, as a share; 0 where it is exact.
        usage: what capturing them takes.
        price_us: what the best further size would take off a mean step.
        next_list: that size's list; empty where none would help.
        curve_us: mean time of a step with at most k sizes, k from 0, on the smoothed steps.
        steps: steps it was planned for.
    """

    sizes: CaptureSizes
    lists: Mapping[str, tuple[int, ...]] = attrs.field(hash=False)
    step_us: float
    eager_us: float
    gap: float
    usage: Usage
    price_us: float
    next_list: str
    curve_us: tuple[float, ...] = attrs.field(repr=False)
    steps: float

    @property
    def num_sizes(self) -> int:
        return sum(map(len, self.lists.values()))

    def gain_us(self, num_sizes: int) -> float:
        """What one size more than that many takes off a mean step, on the smoothed steps."""
        if not 0 <= num_sizes < len(self.curve_us) - 1:
            return 0.0
        return self.curve_us[num_sizes] - self.curve_us[num_sizes + 1]


def plan(
    workload: Workload,
    budget: Budget | None = None,
    *,
    most_sizes: int | None = None,
    largest: Mapping[str, int] | None = None,
    smoothing: float = SMOOTHING,
    worth: float | None = None,
    most_loss: float | Mapping[str, float] | None = None,
    against: CaptureSizes | None = None,
    exact: bool = False,
) -> Plan:
    """The capture sizes with the least mean step time within the budget.

    Args:
        workload: the steps, their costs and the policy's lists.
        budget: what capturing all sizes may take together.
        most_sizes: the most sizes, over all lists.
        largest: the size that a list must end with, by the list's name.
        smoothing: see `SMOOTHING`.
        worth: sizes are added only while one more takes this share off the mean step; see `least_worth`.
        most_loss: no step may take longer than in a graph of its own size by more than this share, of all lists or by
            list: with `smoothing` no size that a step may have, else none that was seen.
        against: sizes that another list has: with `most_loss` a step is compared with the graph that it has there, if
            it has one, and not with one of its own size.
        exact: solve the integer programme where prices differ within a list (needs highspy).

    Raises:
        BudgetRefused: sizes that must be captured don't fit, or `most_loss` takes more than there may be.
        ConfigError: there are no steps, or an argument is out of range.
    """
    check_kind("workload", workload, Workload, "kpolicy.planning.Workload(histogram=...)")
    if budget is not None:
        check_kind("budget", budget, Budget, "kpolicy.Budget(graphs=1000)")
    steps = workload.steps
    if not steps:
        raise ConfigError("the histogram has no steps, so there is nothing to plan for. Replay a trace with requests.")
    most_sizes = checked_most(most_sizes)
    if worth is None:
        worth = least_worth(budget, most_sizes)
    if not (isinstance(worth, Real) and 0 <= worth < 1):
        raise ConfigError(f"worth is {worth!r:.80}; it is a share of the mean step from 0 to under 1.")
    theirs = workload.lists_of(against) if against is not None else {}
    ladders, penalty_us = _bounded(workload.ladders(smoothing=smoothing), most_loss, theirs)
    most = MOST_LAYERS if most_sizes is None else most_sizes + 1
    curve = joint_curve(frontiers(ladders, most, largest=largest), most)
    curve[curve >= penalty_us] = math.inf
    curve += workload.rest_us
    limits = None if _unlimited(budget, most_sizes) else allowed(budget, most_sizes)
    if not math.isfinite(curve[-1]) and penalty_us < math.inf:
        raise _too_few(ladders, penalty_us, limits, largest)
    if worth:
        # Where the curve isn't quite convex, up to the last size that is worth it.
        # Too few sizes for all steps take infinitely long: one size more gains no number there.
        gains = [fewer - more for fewer, more in itertools.pairwise(curve.tolist())]
        worthy = max((k + 1 for k, gain in enumerate(gains) if gain >= worth * curve[-1]), default=0)
        most_sizes = worthy if most_sizes is None else min(most_sizes, worthy)
    choice = choose(ladders, budget, most_sizes=most_sizes, largest=largest, exact=exact)
    if choice.us >= penalty_us:
        raise _too_few(ladders, penalty_us, limits, largest)
    return _plan(workload, choice, curve.tolist())


def least_worth(budget: Budget | None, most_sizes: int | None) -> float:
    """The default of `plan`'s `worth`: `WORTH` without any limit, and 0 with one."""
    return WORTH if _unlimited(budget, most_sizes) else 0.0


def _unlimited(budget: Budget | None, most_sizes: int | None) -> bool:
    return (budget is None or budget == Budget()) and most_sizes is None


def _bounded(
    ladders: Sequence[Ladder], most_loss: float | Mapping[str, float] | None, against: Mapping[str, Sequence[int]]
) -> tuple[Sequence[Ladder], float]:
    """The ladders with what a step that loses more costs besides, and that; infinite where nothing is bounded."""
    if most_loss is None:
        if against:
            raise ConfigError("against says what most_loss compares with; give most_loss too, 0 for no loss.")
        return ladders, math.inf
    names = [each.name for each in ladders]
    losses = most_loss if isinstance(most_loss, Mapping) else dict.fromkeys(names, most_loss)
    for name, loss in losses.items():
        if name not in names:
            raise ConfigError(f"most_loss names the list {name!r}; there are {', '.join(names)}.")
        if not (isinstance(loss, Real) and 0 <= loss < math.inf):
            raise ConfigError(f"most_loss is {loss!r:.80}; it is a share of a step's time from 0 up, or one by list.")
    penalty_us = sum(each.most_us for each in ladders) + 1.0
    bounded = [
        each.bounded(losses[each.name], penalty_us, against.get(each.name, ())) if each.name in losses else each
        for each in ladders
    ]
    return bounded, penalty_us


def _too_few(
    ladders: Sequence[Ladder], penalty_us: float, limits: str | None, largest: Mapping[str, int] | None
) -> BudgetRefused:
    """The error for sizes that can't hold `most_loss`; `limits` is what there may be, in words, None for any number."""
    curve = joint_curve(frontiers(ladders, MOST_LAYERS, largest=largest)).tolist()
    fixed = ", or don't fix the largest size" if largest else ""
    enough = next((k for k, us in enumerate(curve) if us < penalty_us), None)
    if limits is None or enough is None:
        return BudgetRefused(
            Reason.BUDGET_GRAPHS,
            f"no plan of up to {some(len(curve) - 1, 'size')} keeps every step as near to a graph of its own size as "
            f"was asked. Allow more loss, compare with another list instead{fixed}.",
        )
    return BudgetRefused(
        Reason.BUDGET_GRAPHS,
        f"{limits} can't keep every step as near to a graph of its own size as was asked: it takes "
        f"{some(enough, 'size')}. Raise the budget or the loss{fixed}.",
    )


def _plan(workload: Workload, choice: Choice, curve: list[float]) -> Plan:
    steps = workload.steps
    sizes = workload.sizes_of(choice.sizes)
    return Plan(
        sizes=sizes,
        lists=choice.sizes,
        step_us=workload.time_us(sizes) / steps,
        eager_us=workload.time_us(workload.sizes_of({})) / steps,
        gap=choice.gap,
        usage=choice.usage,
        price_us=choice.price_us / steps,
        next_list=choice.next_size,
        curve_us=tuple(us / steps for us in curve),
        steps=steps,
    )


@attrs.frozen(kw_only=True)
class Round:
    """One replay: the sizes it ran with, its steps, and their mean time with them."""

    sizes: CaptureSizes
    steps: float
    step_us: float


@attrs.frozen(kw_only=True)
class Replayed:
    """A plan that was replayed until it settled.

    Args:
        plan: the plan.
        histogram: the steps it was planned for.
        rounds: every replay, the starting sizes' first.
        settled: whether its own steps would give the same plan, or one no better than the tolerance.
    """

    plan: Plan
    histogram: Histogram
    rounds: tuple[Round, ...]
    settled: bool


def fixed_point(
    replay: Callable[[CaptureSizes], Histogram],
    planned: Callable[[Histogram], tuple[Plan, Workload]],
    start: CaptureSizes,
    *,
    most_rounds: int = 6,
    tolerance: float = 0.001,
) -> Replayed:
    """Replay and plan until the plan is one for the steps that it itself makes.

    Sizes change the time of steps, so they change which steps there are.

    Args:
        replay: the steps that a trace makes with those sizes.
        planned: the plan for those steps, and the workload it was made of.
        start: the sizes to begin with.
        most_rounds: replays at most.
        tolerance: it is settled when a new plan takes less than this share off the step time of the one replayed.

    Returns:
        The settled plan; where it doesn't settle (it goes round, or rounds run out), the plan whose own replay had the
        least mean step, with `settled` False.
    """
    if most_rounds < 1:
        raise ConfigError(f"most_rounds is {most_rounds}; at least one replay is needed to plan from.")
    rounds: list[Round] = []
    seen: list[tuple[Plan, Histogram]] = []
    sizes, made = start, None
    for _ in range(most_rounds):
        histogram = replay(sizes)
        found, workload = planned(histogram)
        now_us = workload.time_us(sizes) / workload.steps
        rounds.append(Round(sizes=sizes, steps=workload.steps, step_us=now_us))
        if made is not None and (found.sizes == sizes or found.step_us >= now_us * (1 - tolerance)):
            return Replayed(plan=_refit(made, workload), histogram=histogram, rounds=tuple(rounds), settled=True)
        if made is not None:
            seen.append((_refit(made, workload), histogram))
        if any(found.sizes == each.sizes for each in rounds[1:]):
            break
        sizes, made = found.sizes, found
    if not seen:
        return Replayed(plan=found, histogram=histogram, rounds=tuple(rounds), settled=False)
    best = min(range(len(seen)), key=lambda i: seen[i][0].step_us)
    return Replayed(plan=seen[best][0], histogram=seen[best][1], rounds=tuple(rounds), settled=False)


def _refit(made: Plan, workload: Workload) -> Plan:
    """The plan with the times of the steps that it itself makes."""
    return attrs.evolve(
        made,
        step_us=workload.time_us(made.sizes) / workload.steps,
        eager_us=workload.time_us(workload.sizes_of({})) / workload.steps,
        steps=workload.steps,
    )
