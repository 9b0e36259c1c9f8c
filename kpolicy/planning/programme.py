"""The same choice as an integer programme, for HiGHS: for unequal prices, and to hold the fast solver to.

It says nothing of ranges: the true sizes that the same candidates hold are assigned to one captured size that holds
them, or to none. Where a smaller captured size, or any, would be worse for them, a constraint says that they take it
all the same.
highspy is an optional extra (``pip install 'kpolicy[planning]'``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kpolicy.budgets import Budget
from kpolicy.errors import BudgetRefused, ConfigError
from kpolicy.planning.ladder import Ladder
from kpolicy.reasons import Reason
from kpolicy.words import some

if TYPE_CHECKING:
    import numpy as np

    Vector = np.ndarray[Any, Any]

__all__ = ["solve_programme"]

MOST_VARIABLES = 125_000
_LIMITED = ("graphs", "streams", "bytes", "seconds")


def solve_programme(
    ladders: Sequence[Ladder],
    budget: Budget | None = None,
    *,
    most_sizes: int | None = None,
    largest: Mapping[str, int] | None = None,
) -> dict[str, tuple[int, ...]]:
    """The sizes with the least time of all steps, each step at the captured size that is best for it.

    Args:
        ladders: the ladders; some 300 sizes take seconds.
        budget: what capturing all sizes together may take.
        most_sizes: the most sizes, over all ladders.
        largest: sizes that must be captured and not passed, by ladder.

    Raises:
        ConfigError: highspy isn't installed, or the programme would be too large.
        BudgetRefused: nothing fits.
    """
    try:
        import highspy
    except ImportError:
        raise ConfigError(
            "the integer programme needs highspy, not installed here. Run: pip install 'kpolicy[planning]'."
        ) from None
    variables = sum(len(each.sizes) * (len(each.sizes) + 1) // 2 for each in ladders)
    if variables > MOST_VARIABLES:
        raise ConfigError(
            f"the integer programme would have {variables:,} variables, over {MOST_VARIABLES:,}, for "
            f"{' and '.join(str(len(each.sizes)) for each in ladders)} candidate sizes. Lower the largest size, ask "
            "for multiples of a larger number, or take the choice with a bound."
        )
    model: Any = highspy.Highs()  # type: ignore[no-untyped-call]
    model.silent()
    model.setOptionValue("mip_rel_gap", 0.0)
    model.setOptionValue("mip_abs_gap", 1e-9)
    chosen: list[tuple[Ladder, list[Any]]] = []
    objective = []
    # HiGHS' tolerances are absolute, so times are in units of all escapes together.
    unit = sum(float(each.escape_us.sum()) for each in ladders) or 1.0
    for each in ladders:
        last = (largest or {}).get(each.name)
        taken = [model.addBinary() for _ in each.sizes]
        for size, variable in zip(each.sizes.tolist(), taken, strict=True):
            if last is not None and size >= last:
                model.addConstr(variable == (1 if size == last else 0))
        costs, escapes = _grouped(each)
        for first, escape in enumerate(escapes.tolist()):
            if not escape:
                continue
            without = model.addVariable(0, 1)
            served = [without]
            objective.append(without * (escape / unit))
            for row in range(first, len(each.sizes)):
                at = model.addVariable(0, 1)
                model.addConstr(at <= taken[row])
                cost = float(costs[row, first])
                objective.append(at * (cost / unit))
                served.append(at)
                if cost > escape:
                    model.addConstr(without + taken[row] <= 1)
                for smaller in range(first, row):
                    if costs[smaller, first] > cost:
                        model.addConstr(at + taken[smaller] <= 1)
            model.addConstr(model.qsum(served) == 1)
        chosen.append((each, taken))
    every = [(each.usage_of(i), variable) for each, taken in chosen for i, variable in enumerate(taken)]
    for name in _LIMITED:
        limit = getattr(budget, name, None)
        if limit is not None:
            scale = float(limit) or 1.0
            used = model.qsum(getattr(usage, name) / scale * variable for usage, variable in every)
            model.addConstr(used <= limit / scale)
    if most_sizes is not None:
        model.addConstr(model.qsum(variable for _, variable in every) <= most_sizes)
    model.minimize(model.qsum(objective))
    if model.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        limits = f"{budget or Budget()}" + ("" if most_sizes is None else f" and {some(most_sizes, 'size')}")
        raise BudgetRefused(
            Reason.BUDGET_GRAPHS,
            f"no set of sizes fits the budget of {limits}. Raise the budget, or don't fix the largest size.",
        )
    return {
        each.name: tuple(
            size for size, variable in zip(each.sizes.tolist(), taken, strict=True) if model.val(variable) > 0.5
        )
        for each, taken in chosen
    }


def _grouped(ladder: Ladder) -> tuple[Vector, Vector]:
    """Costs `[num_sizes, num_sizes]` and escapes `[num_sizes]`, by the smallest candidate that holds a demand."""
    import numpy as np

    first = np.searchsorted(ladder.sizes, ladder.demands)
    held = first < len(ladder.sizes)
    costs, escapes = np.zeros((len(ladder.sizes), len(ladder.sizes))), np.zeros(len(ladder.sizes))
    np.add.at(escapes, first[held], ladder.escape_us[held])
    for row, cost in enumerate(ladder.cost_us):
        np.add.at(costs[row], first[held], cost[held])
    return costs, escapes
