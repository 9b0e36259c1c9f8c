"""`Ladder`: one list of capture sizes to choose, and what every choice would cost.

A step of true size n runs at the smallest captured size that holds it, or without a graph. A ladder says what all
steps of each true size take at each candidate size, as one matrix, so any cost model, several kinds of graph that
share one list, and attention that works on the real KV all have the same form.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from kpolicy.budgets import Usage
from kpolicy.errors import ConfigError, LadderError

if TYPE_CHECKING:
    import numpy as np

    Vector = np.ndarray[Any, Any]

__all__ = ["Ladder", "aligned_sizes", "tied"]


_TINY_US = 1e-9
"""Times closer than this are one time."""


def _ints(value: Any) -> Vector:
    import numpy as np

    given = np.asarray(value)
    # Without any it is of floats.
    if given.size and given.dtype.kind not in "iu":
        raise LadderError(f"sizes and demands of a ladder are whole numbers; these are {value!r:.80}.")
    return np.ascontiguousarray(given, dtype=np.int64)


def _floats(value: Any) -> Vector:
    import numpy as np

    return np.ascontiguousarray(value, dtype=np.float64)


def _usages(value: Usage | Iterable[Usage]) -> Usage | tuple[Usage, ...]:
    return value if isinstance(value, Usage) else tuple(value)


@attrs.frozen(eq=False, kw_only=True)
class Ladder:
    """One list of capture sizes, with the candidates and the cost of each.

    Args:
        name: what to call the list: ``decode``, ``piecewise``, ...
        sizes: candidate sizes `[num_sizes]`, rising.
        demands: true sizes that steps have `[num_demands]`, rising.
        cost_us: microseconds that all steps of a true size take together at a captured size
            `[num_sizes, num_demands]`; read only where the size holds the demand.
        escape_us: microseconds that they take together without a graph `[num_demands]`.
        usage: what capturing one size takes: one `Usage` for all, or one a size.

    Raises:
        LadderError: sizes or demands don't rise, a shape is off, or a number isn't finite and at least 0.
    """

    name: str
    sizes: Vector = attrs.field(converter=_ints)
    demands: Vector = attrs.field(converter=_ints)
    cost_us: Vector = attrs.field(converter=_floats, repr=False)
    escape_us: Vector = attrs.field(converter=_floats, repr=False)
    usage: Usage | tuple[Usage, ...] = attrs.field(factory=Usage, converter=_usages)

    def __attrs_post_init__(self) -> None:
        import numpy as np

        for what, values in (("sizes", self.sizes), ("demands", self.demands)):
            if values.ndim != 1 or (len(values) and (values[0] < 1 or (np.diff(values) <= 0).any())):
                raise LadderError(f"{what} of the ladder {self.name} must be whole numbers that rise from at least 1.")
        if not len(self.sizes):
            raise LadderError(f"the ladder {self.name} has no candidate size; loosen its alignment or its limits.")
        wanted = (len(self.sizes), len(self.demands))
        if self.cost_us.shape != wanted or self.escape_us.shape != wanted[1:]:
            raise LadderError(
                f"the ladder {self.name} has costs {self.cost_us.shape} and escapes {self.escape_us.shape} for "
                f"{wanted[0]} sizes and {wanted[1]} demands; one cost a pair and one escape a demand."
            )
        held = self.demands[None, :] <= self.sizes[:, None]
        if not (_sound(self.cost_us[held]) and _sound(self.escape_us)):
            raise LadderError(
                f"the ladder {self.name} has a cost that isn't a finite number of microseconds from 0 up."
            )
        if isinstance(self.usage, tuple) and len(self.usage) != len(self.sizes):
            raise LadderError(
                f"the ladder {self.name} has {len(self.usage)} usages for {len(self.sizes)} sizes; one a size, or one."
            )

    @classmethod
    def of(
        cls,
        name: str,
        *,
        weights: Sequence[float],
        sizes: Sequence[int],
        graph_us: Sequence[float],
        escape_us: Sequence[float],
        usage: Usage | Iterable[Usage] = Usage(),  # noqa: B008 - frozen
        escape_when_cheaper: bool = True,
    ) -> Ladder:
        """The ladder of a plain histogram and one time a size.

        Args:
            name: what to call it.
            weights: how many steps have each true size 1, 2, ..., `len(weights)`; any non-negative numbers.
            sizes: candidate sizes.
            graph_us: time of one step run at each candidate size.
            escape_us: time of one step without a graph, for each true size.
            usage: what capturing one size takes.
            escape_when_cheaper: a step whose graph would take longer than the escape takes the escape, as the policy
                `auto` does; otherwise a step that fits a graph always replays it, as serving engines do.
        """
        import numpy as np

        steps, escape = np.asarray(weights, float), np.asarray(escape_us, float)
        if steps.shape != escape.shape:
            raise LadderError(f"the ladder {name} has {len(steps)} weights and {len(escape)} escapes; one each a size.")
        if len(graph_us) != len(sizes):
            raise LadderError(f"the ladder {name} has {len(graph_us)} times for {len(sizes)} sizes; one time a size.")
        times = np.broadcast_to(np.asarray(graph_us, float)[:, None], (len(sizes), len(steps)))
        if escape_when_cheaper:
            times = np.minimum(times, escape)
        return cls(
            name=name, sizes=sizes, demands=np.arange(1, len(steps) + 1), cost_us=times * steps,
            escape_us=escape * steps, usage=usage,
        )  # fmt: skip

    def usage_of(self, index: int) -> Usage:
        """What capturing the candidate at that index takes."""
        return self.usage[index] if isinstance(self.usage, tuple) else self.usage

    @property
    def one_price(self) -> Usage | None:
        """What every size takes; None where sizes differ."""
        if isinstance(self.usage, Usage):
            return self.usage
        return self.usage[0] if all(each == self.usage[0] for each in self.usage) else None

    @property
    def columns(self) -> Vector:
        """How many demands each candidate holds `[num_sizes]`."""
        import numpy as np

        return np.searchsorted(self.demands, self.sizes, side="right")

    def kept(self, which: Vector) -> Ladder:
        """The ladder with only those candidates (indices or a mask)."""
        import numpy as np

        usage = self.usage
        if isinstance(usage, tuple):
            usage = tuple(usage[i] for i in np.arange(len(self.sizes))[which])
        return attrs.evolve(self, sizes=self.sizes[which], cost_us=self.cost_us[which], usage=usage)

    def without_dominated(self) -> Ladder:
        """The ladder without sizes that a larger candidate beats or equals on every step, at no higher price.

        No best set needs such a size: taking the larger one instead never costs more. What is left of a list with one
        time a size is strictly rising in time, which the fast solver needs.
        """
        import numpy as np

        columns, kept = self.columns, [len(self.sizes) - 1]
        # What the steps above a size take at best without the one after it.
        least: Vector = self.escape_us.copy()
        for i in range(len(self.sizes) - 2, -1, -1):
            above = kept[-1]
            held, more = columns[i], slice(columns[i], columns[above])
            if not (
                _no_dearer(self.usage_of(above), self.usage_of(i))
                and (self.cost_us[above, :held] <= self.cost_us[i, :held]).all()
                # The larger one takes these steps in too, and they might be better off at one larger still, or without
                # a graph.
                and (self.cost_us[above, more] <= least[more]).all()
            ):
                least = np.minimum(least, self.cost_us[above])
                kept.append(i)
        return self.kept(np.array(kept[::-1]))

    def bounded(self, most_loss: float, penalty_us: float, against: Sequence[int] = ()) -> Ladder:
        """The ladder with a penalty wherever a step loses more than that share against a graph of its own size.

        A step loses by padding to a size far above it, or by running without a graph. Every true size counts that some
        steps have, so with smoothing all do. A finite penalty leaves times that rise rising, and the solvers exact.

        Args:
            most_loss: the share of a step's time at the smallest candidate that holds it.
            penalty_us: what each such true size costs besides; more than all steps together may take.
            against: sizes of another list: a step that one of them holds may take that share longer than in the graph
                that it has there, padding and all. Between candidates the one below counts.
        """
        import numpy as np

        held = int(np.searchsorted(self.demands, self.sizes[-1], "right"))
        own = np.searchsorted(self.sizes, self.demands[:held])
        if against:
            there = np.array(sorted(against))
            at = np.searchsorted(there, self.demands[:held])
            within = at < len(there)
            theirs = np.searchsorted(self.sizes, there[at[within]], "right") - 1
            own[within] = np.maximum(own[within], theirs)
        most = (1 + most_loss) * self.cost_us[own, np.arange(held)] + _TINY_US
        cost, escape = self.cost_us.copy(), self.escape_us.copy()
        cost[:, :held] += np.where(cost[:, :held] > most, penalty_us, 0.0)
        escape[:held] += np.where(escape[:held] > most, penalty_us, 0.0)
        return attrs.evolve(self, cost_us=cost, escape_us=escape)

    @property
    def most_us(self) -> float:
        """No choice takes longer for all steps together."""
        import numpy as np

        longest: Vector = np.maximum(self.cost_us.max(axis=0), self.escape_us)
        return float(longest.sum())

    @property
    def rising(self) -> bool:
        """Whether no step takes less time at a larger candidate; then the cost of serving a range of sizes is Monge."""
        columns, costs = self.columns, self.cost_us
        return all((costs[i + 1, : columns[i]] >= costs[i, : columns[i]]).all() for i in range(len(self.sizes) - 1))

    def time_us(self, chosen: Iterable[int]) -> float:
        """Microseconds of all steps with those sizes captured, each step at the smallest one that holds it.

        Raises:
            LadderError: a size isn't a candidate, so what it costs isn't known.
        """
        return float(self.times_us(chosen).sum())

    def times_us(self, chosen: Iterable[int]) -> Vector:
        """`time_us` for each true size `[num_demands]`."""
        import numpy as np

        listed = self.sizes.tolist()
        rows = []
        for size in sorted(set(chosen)):
            at = bisect_left(listed, size)
            if at == len(listed) or listed[at] != size:
                raise LadderError(f"{size} isn't a candidate of the ladder {self.name}, so what it costs isn't known.")
            rows.append(at)
        times: Vector = self.escape_us.copy()
        if rows:
            served = np.searchsorted(self.sizes[rows], self.demands)
            held = np.flatnonzero(served < len(rows))
            times[held] = self.cost_us[np.array(rows)[served[held]], held]
        return times


def _sound(values: Vector) -> bool:
    import numpy as np

    return bool(np.isfinite(values).all() and (values >= 0).all())


def _no_dearer(one: Usage, other: Usage) -> bool:
    return (
        one.graphs <= other.graphs
        and one.streams <= other.streams
        and one.bytes <= other.bytes
        and one.seconds <= other.seconds
    )


def aligned_sizes(sizes: Iterable[int], multiple_of: int) -> tuple[int, ...]:
    """The sizes that are multiples of `multiple_of`: of tensor parallelism, or of 1 + k.

    Raises:
        ConfigError: the multiple isn't at least 1.
        LadderError: no size is left.
    """
    if multiple_of < 1:
        raise ConfigError(f"multiple_of is {multiple_of}; sizes are multiples of a whole number from 1 up.")
    listed = list(sizes)
    kept = tuple(sorted({size for size in listed if size % multiple_of == 0}))
    if not kept:
        raise LadderError(
            f"none of the {len(listed)} candidate sizes up to {max(listed, default=0)} is a multiple of {multiple_of}; "
            "raise the largest size or lower the alignment."
        )
    return kept


def tied(name: str, ladders: Sequence[Ladder]) -> Ladder:
    """One list that several kinds of graph share, as vLLM has it: their costs and usages add up.

    Raises:
        LadderError: there are no ladders, or their candidates differ.
    """
    import numpy as np

    if not ladders or any(not np.array_equal(each.sizes, ladders[0].sizes) for each in ladders):
        raise LadderError(f"the ladders of {name} must be at least one, with the same candidate sizes.")
    sizes = ladders[0].sizes
    demands = np.unique(np.concatenate([each.demands for each in ladders]))
    cost, escape = np.zeros((len(sizes), len(demands))), np.zeros(len(demands))
    for each in ladders:
        columns: Vector = np.searchsorted(demands, each.demands)
        cost[:, columns] += each.cost_us
        escape[columns] += each.escape_us
    usages = [sum((each.usage_of(i) for each in ladders), Usage()) for i in range(len(sizes))]
    same = all(usage == usages[0] for usage in usages)
    return Ladder(
        name=name, sizes=sizes, demands=demands, cost_us=cost, escape_us=escape, usage=usages[0] if same else usages
    )
