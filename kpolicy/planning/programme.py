"""The same choice as an integer programme, for HiGHS: for unequal prices, and to hold the fast solver to.

It says nothing of ranges: each true size is assigned to one captured size that holds it, or to none. Where a smaller
captured size, or any, would be worse for a step, a constraint says that the step takes it all the same.
highspy is an optional extra (``pip install 'kpolicy[planning]'``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kpolicy.budgets import Budget
from kpolicy.errors import BudgetRefused, ConfigError
from kpolicy.planning.ladder import Ladder
from kpolicy.reasons import Reason

__all__ = ["solve_programme"]

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
        ladders: the ladders; sizes times demands should stay in the tens of thousands.
        budget: what capturing all sizes together may take.
        most_sizes: the most sizes, over all ladders.
        largest: sizes that must be captured and not passed, by ladder.

    Raises:
        ConfigError: highspy isn't installed.
        BudgetRefused: nothing fits.
    """
    try:
        import highspy
    except ImportError:
        raise ConfigError(
            "the integer programme needs highspy, not installed here. Run: pip install 'kpolicy[planning]'."
        ) from None
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
        column_rows = each.sizes.searchsorted(each.demands).tolist()
        for column, demand in enumerate(each.demands.tolist()):
            without = model.addVariable(0, 1)
            served = [without]
            objective.append(without * (float(each.escape_us[column]) / unit))
            for row, size in enumerate(each.sizes.tolist()):
                if size < demand:
                    continue
                at = model.addVariable(0, 1)
                model.addConstr(at <= taken[row])
                cost = float(each.cost_us[row, column])
                objective.append(at * (cost / unit))
                served.append(at)
                if cost > each.escape_us[column]:
                    model.addConstr(without + taken[row] <= 1)
                for smaller in range(column_rows[column], row):
                    if each.cost_us[smaller, column] > cost:
                        model.addConstr(at + taken[smaller] <= 1)
            model.addConstr(sum(served) == 1)
        chosen.append((each, taken))
    every = [(each.usage_of(i), variable) for each, taken in chosen for i, variable in enumerate(taken)]
    for name in _LIMITED:
        limit = getattr(budget, name, None)
        if limit is not None:
            scale = float(limit) or 1.0
            model.addConstr(sum(getattr(usage, name) / scale * variable for usage, variable in every) <= limit / scale)
    if most_sizes is not None:
        model.addConstr(sum(variable for _, variable in every) <= most_sizes)
    model.minimize(sum(objective))
    if model.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        limits = f"{budget or Budget()}" + ("" if most_sizes is None else f" and {most_sizes} sizes")
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
