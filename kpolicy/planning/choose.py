"""The choice over several ladders under one budget.

Where every size of a ladder takes the same, the frontiers are folded together and the answer is exact, for any number
of budgets at once. Where sizes of one list take different amounts of what is limited, it is a knapsack: prices on what
is limited give a choice and a bound that no choice can beat, and `exact` solves the integer programme.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from kpolicy.budgets import Budget, Usage
from kpolicy.errors import BudgetRefused, ConfigError, check_kind
from kpolicy.planning.ladder import Ladder
from kpolicy.planning.solve import Frontier, Sums, cheapest_path, frontier
from kpolicy.reasons import Reason
from kpolicy.shapes import plain_int
from kpolicy.words import some

if TYPE_CHECKING:
    import numpy as np

    Vector = np.ndarray[Any, Any]

__all__ = ["Choice", "allowed", "checked_most", "choose", "frontiers", "joint_curve"]

_RESOURCES = ("graphs", "streams", "bytes", "seconds")
_REASONS = {
    "graphs": Reason.BUDGET_GRAPHS,
    "streams": Reason.BUDGET_STREAMS,
    "bytes": Reason.BUDGET_BYTES,
    "seconds": Reason.BUDGET_SECONDS,
}
_ROUNDING = 1e-9


@attrs.frozen(kw_only=True)
class Choice:
    """Sizes for every ladder.

    Args:
        sizes: chosen sizes by ladder.
        us: the time of all steps with them.
        bound_us: no choice within the budget takes less; equal to `us` where the choice is exact.
        usage: what capturing them takes.
        price_us: what the best further size would save, whatever it costs: the price of one more graph.
        next_size: the ladder whose further size that is; empty where none would help.
    """

    sizes: Mapping[str, tuple[int, ...]]
    us: float
    bound_us: float
    usage: Usage
    price_us: float
    next_size: str

    @property
    def num_sizes(self) -> int:
        return sum(map(len, self.sizes.values()))

    @property
    def gap(self) -> float:
        """How much more than the bound it may take at most, as a share; 0 where it is exact."""
        return self.us / self.bound_us - 1 if self.bound_us else 0.0


def frontiers(
    ladders: Sequence[Ladder], most: int | Sequence[int | None] | None = None, *,
    largest: Mapping[str, int] | None = None,
) -> tuple[Frontier, ...]:  # fmt: skip
    """The frontier of each ladder, those named in `largest` ending with that size, up to `most` sizes of all or each.

    Raises:
        ConfigError: two ladders share a name, or `largest` names none of them.
    """
    names = [each.name for each in ladders]
    check_kind("largest", largest or {}, Mapping, "{'decode': 256}")
    for name in largest or {}:
        if name not in names:
            raise ConfigError(f"largest names the list {name!r}; there are {', '.join(names)}.")
    if len(set(names)) < len(names):
        raise ConfigError(f"the ladders {', '.join(names)} share a name; give each its own.")
    each_most = most if isinstance(most, Sequence) else [most] * len(ladders)
    return tuple(
        frontier(each, count, largest=(largest or {}).get(each.name))
        for each, count in zip(ladders, each_most, strict=True)
    )


def choose(
    ladders: Sequence[Ladder],
    budget: Budget | None = None,
    *,
    most_sizes: int | None = None,
    largest: Mapping[str, int] | None = None,
    exact: bool = False,
) -> Choice:
    """The sizes with the least time of all steps within the budget.

    Args:
        ladders: the ladders.
        budget: what capturing all sizes together may take.
        most_sizes: the most sizes, over all ladders.
        largest: sizes that a ladder must end with, by its name.
        exact: where prices differ within a ladder, solve the integer programme (needs highspy) instead of giving a
            choice with a bound.

    Raises:
        BudgetRefused: nothing fits, though `largest` asks for something.
        ConfigError: a name is wrong, most_sizes is negative, or highspy is missing or would take too long.
    """
    most_sizes = checked_most(most_sizes)
    limits = _Limits(budget or Budget(), most_sizes)
    fronts = frontiers(ladders, [limits.most_of(each) for each in ladders], largest=largest)
    if all(limits.one_price(each) for each in ladders):
        counts = _folded(fronts, limits)
        sizes = {each.ladder.name: each.best(count) for each, count in zip(fronts, counts, strict=True)}
        us = float(sum(each.us[count] for each, count in zip(fronts, counts, strict=True)))
        return _choice(ladders, fronts, sizes, us, us)
    if exact:
        from kpolicy.planning.programme import solve_programme

        kept = [Sums.of(each, (largest or {}).get(each.name)).ladder for each in ladders]
        sizes = solve_programme(kept, limits.budget, most_sizes=most_sizes, largest=largest)
        us = sum(each.time_us(sizes[each.name]) for each in ladders)
        return _choice(ladders, fronts, sizes, us, us)
    sizes, us, bound = _priced(ladders, limits, largest or {})
    return _choice(ladders, fronts, sizes, us, min(bound, us))


def checked_most(most_sizes: int | None) -> int | None:
    """The most sizes as an int; None for any number.

    Raises:
        ConfigError: it isn't a whole number from 0 up.
    """
    if most_sizes is None:
        return None
    most = plain_int(most_sizes)
    if type(most) is not int or most < 0:
        raise ConfigError(f"most_sizes is {most_sizes!r:.80}; it is a whole number from 0 up.")
    return most


def joint_curve(fronts: Sequence[Frontier], most: int | None = None) -> Vector:
    """The least time with at most k sizes over all ladders together, for k from 0 `[1 + most]`."""
    import numpy as np

    total = np.zeros(1)
    for each in fronts:
        length = len(total) + each.most
        folded = np.full(length, np.inf)
        for k, us in enumerate(each.us.tolist()):
            folded[k : k + len(total)] = np.minimum(folded[k : k + len(total)], total + us)
        total = folded
    return total if most is None else total[: most + 1]


def _choice(
    ladders: Sequence[Ladder], fronts: Sequence[Frontier], sizes: Mapping[str, tuple[int, ...]], us: float, bound: float
) -> Choice:
    usage = Usage()
    for each in ladders:
        listed = each.sizes.tolist()
        for size in sizes[each.name]:
            usage += each.usage_of(listed.index(size))
    gains = [(each.gain(len(sizes[each.ladder.name])), each.ladder.name) for each in fronts]
    price, name = max(gains, default=(0.0, ""))
    return Choice(
        sizes=dict(sizes),
        us=us,
        bound_us=bound,
        usage=usage,
        price_us=max(price, 0.0),
        next_size=name if price > 0 else "",
    )


@attrs.frozen
class _Limits:
    """What is limited: resources of the budget, and the number of sizes."""

    budget: Budget
    most_sizes: int | None

    @property
    def names(self) -> list[str]:
        return [name for name in _RESOURCES if getattr(self.budget, name) is not None]

    @property
    def amounts(self) -> list[float]:
        sizes = [] if self.most_sizes is None else [self.most_sizes]
        return [float(getattr(self.budget, name)) for name in self.names] + sizes

    def of(self, usage: Usage) -> list[float]:
        """What one size takes of each."""
        return [float(getattr(usage, name)) for name in self.names] + ([] if self.most_sizes is None else [1.0])

    def most_of(self, ladder: Ladder) -> int | None:
        """The most sizes of a ladder that the limits admit, and one more for its price; None where nothing limits."""
        usages = [ladder.usage] if isinstance(ladder.usage, Usage) else ladder.usage
        least = map(min, zip(*map(self.of, usages), strict=True))
        counts = [amount * (1 + _ROUNDING) // one for amount, one in zip(self.amounts, least, strict=True) if one > 0]
        return int(min(counts)) + 1 if counts else None

    def one_price(self, ladder: Ladder) -> bool:
        """Whether every size of the ladder takes the same of what is limited."""
        if isinstance(ladder.usage, Usage):
            return True
        first = self.of(ladder.usage[0])
        return all(self.of(usage) == first for usage in ladder.usage)


def _folded(fronts: Sequence[Frontier], limits: _Limits) -> tuple[int, ...]:
    """How many sizes each ladder gets: exact, by folding one ladder after the other into all that is worth keeping."""
    import numpy as np

    allowed = np.array(limits.amounts)
    used, us, counts = np.zeros((1, len(allowed))), np.zeros(1), np.zeros((1, 0), np.int64)
    for each in fronts:
        steps = np.unique(each.choices[np.isfinite(each.us)])
        one = np.array(limits.of(each.ladder.usage_of(0)))
        more = used[:, None, :] + steps[None, :, None] * one
        total = us[:, None] + each.us[steps][None, :]
        fits = (more <= allowed * (1 + _ROUNDING)).all(axis=2) & np.isfinite(total)
        row, column = np.nonzero(fits)
        if not len(row):
            raise _nothing_fits(fronts, limits)
        used, us = more[row, column], total[row, column]
        counts = np.concatenate([counts[row], steps[column][:, None]], axis=1)
        keep = _worth_keeping(used, us)
        used, us, counts = used[keep], us[keep], counts[keep]
    at = int(np.lexsort((counts.sum(axis=1), us))[0])
    return tuple(counts[at].tolist())


def _worth_keeping(used: Vector, us: Vector) -> Vector:
    """Which states no other beats: less or equal use and time. Exact for one resource; duplicates only for more."""
    import numpy as np

    if used.shape[1] == 0:
        return np.array([int(us.argmin())])
    order = np.lexsort((us, *used.T[::-1]))
    if used.shape[1] == 1:
        least = np.minimum.accumulate(us[order])
        better = us[order][1:] < least[:-1]
    else:
        better = (used[order][1:] != used[order][:-1]).any(axis=1)
    kept: Vector = order[np.concatenate([[True], better])]
    return kept


def _nothing_fits(fronts: Sequence[Frontier], limits: _Limits) -> BudgetRefused:
    wanted = ", ".join(f"{each.ladder.name} {each.kept.sizes[-1]}" for each in fronts if not _may_be_empty(each))
    reason = _REASONS[limits.names[0]] if limits.names else Reason.BUDGET_GRAPHS
    return BudgetRefused(
        reason,
        f"the sizes that must be captured ({wanted}) don't fit the budget of "
        f"{allowed(limits.budget, limits.most_sizes)}. Raise the budget, or don't fix the largest size.",
    )


def allowed(budget: Budget | None, most_sizes: int | None) -> str:
    """What may be captured, in words."""
    parts = [] if budget in (None, Budget()) else [str(budget)]
    parts += [] if most_sizes is None else [some(most_sizes, "size")]
    return " and ".join(parts) or "anything"


def _may_be_empty(each: Frontier) -> bool:
    return bool(each.us[0] < float("inf"))


def _priced(
    ladders: Sequence[Ladder], limits: _Limits, largest: Mapping[str, int]
) -> tuple[dict[str, tuple[int, ...]], float, float]:
    """A choice within the budget and a bound: prices on what is limited, raised until the choice fits.

    For any prices the priced optimum less the prices of all that is allowed is a bound (Lagrange).
    """
    import numpy as np

    sums = [Sums.of(each, largest.get(each.name)) for each in ladders]
    takes = [np.array([limits.of(each.ladder.usage_of(i)) for i in range(len(each.ladder.sizes))]) for each in sums]
    allowed = np.array(limits.amounts)
    least: dict[str, tuple[int, ...]] = {
        each.name: (largest[each.name],) if each.name in largest else () for each in ladders
    }
    if (_taken(sums, takes, least) > allowed * (1 + _ROUNDING)).any():
        raise _nothing_fits([frontier(each, largest=largest.get(each.name)) for each in ladders], limits)
    best = sum(each.time_us(least[each.name]) for each in ladders), least
    bound = -np.inf

    def at(prices: Vector) -> Vector:
        """What the choice at those prices takes of each resource."""
        nonlocal best, bound
        total, sizes = 0.0, {}
        for each, take in zip(sums, takes, strict=True):
            us, sizes[each.ladder.name] = cheapest_path(each, take @ prices)
            total += us
        taken = _taken(sums, takes, sizes)
        bound = max(bound, total - float(prices @ allowed))
        if (taken <= allowed * (1 + _ROUNDING)).all():
            us = sum(each.ladder.time_us(sizes[each.ladder.name]) for each in sums)
            if us < best[0]:
                best = us, sizes
        return taken

    prices = np.zeros(len(allowed))
    most_us = sum(float(each.escape_us.sum()) for each in ladders) + 1.0
    smallest = np.array(
        [min(take[take[:, r] > 0, r].min(initial=np.inf) for take in takes) for r in range(len(allowed))]
    )
    top = np.where(np.isfinite(smallest), most_us / smallest, 0.0)
    for _ in range(1 if len(allowed) == 1 else 3):
        for r in range(len(allowed)):
            low, high = 0.0, float(top[r])
            for _ in range(48):
                prices[r] = (low + high) / 2 if low else high / 2**20 if high > top[r] / 2 else high / 2
                if at(prices)[r] > allowed[r] * (1 + _ROUNDING):
                    low = prices[r]
                else:
                    high = prices[r]
            prices[r] = high
            at(prices)
    us, sizes = _filled(sums, takes, allowed, *best)
    return sizes, us, float(bound)


def _taken(sums: Sequence[Sums], takes: Sequence[Vector], sizes: Mapping[str, tuple[int, ...]]) -> Vector:
    """What those sizes take of each limited resource."""
    import numpy as np

    taken: Vector = np.zeros(takes[0].shape[1])
    for each, take in zip(sums, takes, strict=True):
        taken = taken + take[np.isin(each.ladder.sizes, sizes[each.ladder.name])].sum(axis=0)
    return taken


def _filled(
    sums: Sequence[Sums], takes: Sequence[Vector], allowed: Vector, us: float, sizes: dict[str, tuple[int, ...]]
) -> tuple[float, dict[str, tuple[int, ...]]]:
    """The choice with further sizes, while one fits and saves time: the one that saves most first."""
    import numpy as np

    found, us_of = dict(sizes), {each.ladder.name: each.ladder.time_us(sizes[each.ladder.name]) for each in sums}
    while True:
        taken = _taken(sums, takes, found)
        best: tuple[float, str, int] | None = None
        for each, take in zip(sums, takes, strict=True):
            name, own = each.ladder.name, found[each.ladder.name]
            room: Any = (take + taken <= allowed * (1 + _ROUNDING)).all(axis=1)
            if np.isinf(each.tail[0]):
                room[-1] = False
            for size in each.ladder.sizes[room & ~np.isin(each.ladder.sizes, own)].tolist():
                saved = us_of[name] - each.ladder.time_us((*own, size))
                if saved > (best[0] if best else us * 1e-12):
                    best = saved, name, size
        if best is None:
            return sum(us_of.values()), found
        _, name, size = best
        found[name] = tuple(sorted((*found[name], size)))
        us_of[name] -= best[0]
