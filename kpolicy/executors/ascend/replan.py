"""Which graphs to keep when a device can't hold all that were planned: `fitting`, by the planner of `kpolicy.planning`.

The keys of a ladder that replay the same kind of batch (the same part, query length, LoRA case, stage) are one list of
sizes. A list's worth is what steps take with it; steps are those of a histogram where one is given, and spread evenly
over all sizes up to the largest where not. numpy loads on first use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from kpolicy.budget_models import BudgetModel
from kpolicy.budgets import Budget, Usage
from kpolicy.costs import CostTable, HostCost
from kpolicy.keys import GraphKey
from kpolicy.modes import Part
from kpolicy.planning import Ladder, choose

__all__ = ["Demand", "fitting", "kinds_of", "ladders_of"]

Demand = Callable[[GraphKey, int], float]
"""How many steps have that many tokens and would replay graphs like that key: ``demand(largest key, tokens)``."""

_Kind = tuple[Part, int | None, int | None, int, str, str]


PADDING_PRICE = 1e-6
"""What a padded token adds to a graph's time, as a share of it: too little to matter, enough that of sizes that take as
long the smaller is chosen."""


def _evenly(key: GraphKey, tokens: int) -> float:
    del tokens
    return 1.0 / key.num_tokens


def kinds_of(keys: Iterable[GraphKey]) -> dict[_Kind, dict[int, list[GraphKey]]]:
    """Keys by kind, and by size within it: of one size may be several, for other row counts."""
    kinds: dict[_Kind, dict[int, list[GraphKey]]] = {}
    for key in keys:
        kind = key.part, key.query_len, key.max_query_len, key.lora_case, key.stage, key.variant
        kinds.setdefault(kind, {}).setdefault(key.num_tokens, []).append(key)
    return kinds


def _base_us(host: HostCost) -> float:
    """A launch of decode rows, which ladders are planned for."""
    return host.base_for(decodes=True, prefills=False)


def ladders_of(
    kinds: Mapping[_Kind, Mapping[int, Sequence[GraphKey]]], units: BudgetModel, costs: CostTable, demand: Demand | None
) -> list[Ladder]:
    """A ladder a kind, named by its place."""
    asked, costs = _evenly if demand is None else demand, costs.deciding
    ladders = []
    for place, (kind, by_size) in enumerate(kinds.items()):
        sizes = sorted(by_size)
        largest = by_size[sizes[-1]][0]
        curve = costs.curve_for(largest)
        host = costs.host_full if kind[0] is Part.FULL else costs.host_piecewise
        step = kind[1] or 1
        tokens = range(1, sizes[-1] + 1)
        eager, at_least = costs.eager, _base_us(costs.host_eager)
        ladders.append(
            Ladder.of(
                str(place),
                # A uniform batch has a whole number of rows.
                weights=[0.0 if count % step else asked(largest, count) for count in tokens],
                sizes=sizes,
                graph_us=[(max(curve.at(size), _base_us(host))) * (1 + PADDING_PRICE * size) for size in sizes],
                escape_us=[max(eager.at(count), at_least) for count in tokens],
                usage=[sum((units.cost_of(key) for key in by_size[size][1:]), units.cost_of(by_size[size][0]))
                       for size in sizes],
            )
        )  # fmt: skip
    return ladders


def fitting(
    keys: Sequence[GraphKey], budget: Budget, units: BudgetModel, costs: CostTable, demand: Demand | None = None
) -> tuple[GraphKey, ...]:
    """The keys to capture under a budget: those with the least expected time of a step, in their order.

    Args:
        keys: what was planned.
        budget: what all graphs may take together.
        units: what one takes, and how many sizes of PIECEWISE graphs there may be.
        costs: what launches take.
        demand: which steps there are; see `Demand`.
    """
    kinds = kinds_of(keys)
    limited: dict[_Kind, Mapping[int, Sequence[GraphKey]]] = {}
    for kind, by_size in kinds.items():
        limited[kind] = by_size
        if kind[0] is Part.PIECEWISE and units.num_sizes is not None:
            # A bound on the number of sizes is the device's own; which ones is ours to choose.
            most = max(1, units.num_sizes)
            ladders = ladders_of({kind: by_size}, units, costs, demand)
            kept = list(choose(ladders, most_sizes=most).sizes["0"])
            while len(kept) < min(most, len(by_size)):
                kept.append(max(set(by_size) - set(kept), key=lambda size: _gap(size, kept)))
            limited[kind] = {size: by_size[size] for size in kept}
    if not limited:
        return ()
    ladders = ladders_of(limited, units, costs, demand)
    chosen = choose(ladders, budget).sizes
    kept_of = {kind: list(chosen[str(place)]) for place, kind in enumerate(limited)}
    _fill(kept_of, limited, budget, units)
    kept_keys = {key for kind, sizes in kept_of.items() for size in sizes for key in limited[kind][size]}
    return tuple(key for key in keys if key in kept_keys)


def _gap(size: int, kept: Iterable[int]) -> float:
    """How much a batch of that size is padded by the sizes that are kept, as a share; infinite where none holds it."""
    return min((each for each in kept if each > size), default=float("inf")) / size


def _fill(
    kept: Mapping[_Kind, list[int]], kinds: Mapping[_Kind, Mapping[int, Sequence[GraphKey]]], budget: Budget,
    units: BudgetModel,
) -> None:  # fmt: skip
    """Add sizes that the costs see no use for while there is room, widest gap first: costs may be wrong."""
    used = Usage()
    price = {
        (kind, size): sum((units.cost_of(key) for key in keys), Usage())
        for kind, by_size in kinds.items() for size, keys in by_size.items()
    }  # fmt: skip
    for kind, sizes in kept.items():
        used += sum((price[kind, size] for size in sizes), Usage())
    while True:
        room = [
            (_gap(size, kept[kind]), size, place, kind)
            for place, (kind, by_size) in enumerate(kinds.items()) for size in by_size
            if size not in kept[kind] and budget.refuses(used, price[kind, size]) is None
        ]  # fmt: skip
        if not room:
            return
        _, size, _, kind = max(room, key=lambda each: each[:3])
        kept[kind].append(size)
        used += price[kind, size]
