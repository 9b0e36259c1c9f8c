"""The exact choice of capture sizes for one ladder: every number of sizes at once.

Serving the true sizes in (a, b] with size b costs C(a, b), a sum over the demands between. Where no step takes less at
a larger size, C(a,c) + C(b,d) <= C(a,d) + C(b,c) for a < b < c < d (C is Monge): the left end of the best last range
moves right with its right end, so each layer of the dynamic programme is divide and conquer on that end, O(n log n)
whole-array steps. Running without a graph is the range above the last size. Convexity of the times isn't needed.
Source of the method: dynamic programming over Monge costs (Aggarwal and others 1987; Wu 1991 for quantisation).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from kpolicy.errors import LadderError
from kpolicy.planning.ladder import Ladder

if TYPE_CHECKING:
    import numpy as np

    Vector = np.ndarray[Any, Any]

__all__ = ["Frontier", "Sums", "cheapest_path", "frontier"]


@attrs.frozen(eq=False)
class Sums:
    """A ladder without dominated sizes, and running sums over its demands.

    Args:
        ladder: what is left of it.
        prefix: for each size, the time of the first demands at it `[num_sizes, 1 + num_demands]`.
        columns: demands that "no size" and each size hold `[1 + num_sizes]`.
        tail: time of the steps above "no size" and above each size, without a graph; infinite where a choice may not
            end there `[1 + num_sizes]`.
    """

    ladder: Ladder
    prefix: Vector = attrs.field(repr=False)
    columns: Vector = attrs.field(repr=False)
    tail: Vector = attrs.field(repr=False)

    @classmethod
    def of(cls, ladder: Ladder, largest: int | None = None) -> Sums:
        """The sums of a ladder whose choices end with `largest`, where it is given.

        Raises:
            LadderError: `largest` isn't a candidate.
        """
        import numpy as np

        kept = ladder
        if largest is not None:
            if largest not in ladder.sizes.tolist():
                raise LadderError(
                    f"the largest size {largest} isn't a candidate of the ladder {ladder.name}; its candidates go "
                    f"from {ladder.sizes[0]} to {ladder.sizes[-1]}."
                )
            kept = ladder.kept(ladder.sizes <= largest)
        kept = kept.without_dominated()
        columns = np.concatenate([[0], kept.columns])
        held = np.arange(len(kept.demands))[None, :] < columns[1:, None]
        prefix = np.zeros((len(kept.sizes), len(kept.demands) + 1))
        np.cumsum(np.where(held, kept.cost_us, 0.0), axis=1, out=prefix[:, 1:])
        escape = np.concatenate([[0.0], np.cumsum(kept.escape_us)])
        tail = escape[-1] - escape[columns]
        if largest is not None:
            tail[:-1] = np.inf
        return cls(kept, prefix, columns, tail)


@attrs.frozen(eq=False)
class Frontier:
    """The best choice of a ladder for every number of sizes.

    Args:
        ladder: the ladder as given.
        us: the least time of all steps with at most k sizes, for k from 0 `[1 + most]`.
        choices: for each k, how many sizes that best uses.
        parents: the dynamic programme's last range of each layer.
        kept: the ladder without dominated sizes.
        last: the last size of each layer's best.
    """

    ladder: Ladder = attrs.field(repr=False)
    us: Vector
    choices: Vector = attrs.field(repr=False)
    parents: Vector = attrs.field(repr=False)
    kept: Ladder = attrs.field(repr=False)
    last: Vector = attrs.field(repr=False)

    @property
    def most(self) -> int:
        """The largest number of sizes that it answers for; more can't help."""
        return len(self.us) - 1

    def best(self, num_sizes: int) -> tuple[int, ...]:
        """The best at most `num_sizes` sizes, rising; fewer where more wouldn't help."""
        layer = int(self.choices[min(max(num_sizes, 0), self.most)])
        found, at = [], int(self.last[layer])
        for each in range(layer, 0, -1):
            found.append(int(self.kept.sizes[at - 1]))
            at = int(self.parents[each - 1, at])
        return tuple(reversed(found))

    def gain(self, num_sizes: int) -> float:
        """Microseconds, over all steps, that one size more than `num_sizes` saves: the price it may have."""
        if not 0 <= num_sizes < self.most:
            return 0.0
        return float(self.us[num_sizes] - self.us[num_sizes + 1])


def frontier(ladder: Ladder, most: int | None = None, *, largest: int | None = None) -> Frontier:
    """The best sizes of a ladder for every number of them.

    Args:
        ladder: the ladder. Where a larger size is faster on some steps and slower on others (kinds tied to one list),
            steps still take the next size that holds them, as engines do, and the slower O(most n^2) programme runs.
        most: the largest number of sizes to answer for; by default as many as can help.
        largest: a size that every choice must end with; by default the largest is chosen like the others, and steps
            above it run without a graph.

    Raises:
        LadderError: `largest` isn't a candidate.
    """
    import numpy as np

    sums = Sums.of(ladder, largest)
    kept, prefix, columns, tail = sums.ladder, sums.prefix, sums.columns, sums.tail
    num = len(kept.sizes)
    if prefix.shape[1] > num + 1:
        # Ranges end where sizes do, so no other sum is looked at.
        prefix, columns = np.ascontiguousarray(prefix[:, columns]), np.arange(num + 1)
    layers = num if most is None else max(0, min(most, num))
    layer = _layer if kept.rising else _layer_of_any
    best = np.full(num + 1, np.inf)
    best[0] = 0.0
    us, last = [float(tail[0])], [0]
    parents = np.zeros((layers, num + 1), np.int32)
    for k in range(1, layers + 1):
        best, parents[k - 1] = layer(best, prefix, columns, k)
        ends = best + tail
        end = int(ends.argmin())
        us.append(float(ends[end]))
        last.append(end)
    least = np.minimum.accumulate(us)
    # The fewest sizes that reach the least time: the last layer that improved.
    improved = np.concatenate([[True], least[1:] < least[:-1]])
    choices = np.maximum.accumulate(np.where(improved, np.arange(len(us)), 0))
    return Frontier(ladder, least, choices, parents, kept, np.array(last))


def _layer(before: Vector, prefix: Vector, columns: Vector, k: int) -> tuple[Vector, Vector]:
    """The least time of serving up to each size with k sizes, and where the last range begins.

    Candidates are counted from 1; 0 is "no size yet". The midpoints of one depth of the divide and conquer are worked
    out together: their ranges are laid end to end, and one reduction finds all minima.
    """
    import numpy as np

    num = len(columns) - 1
    best, parent = np.full(num + 1, np.inf), np.zeros(num + 1, np.int32)
    ends = np.arange(k, num + 1)
    whole = prefix[ends - 1, columns[ends]]
    flat, width = prefix.ravel(), prefix.shape[1]
    begin = np.empty(len(ends), np.int64)
    stride = 1 << max(0, len(ends).bit_length() - 1)
    while stride:
        at = np.arange(stride - 1, len(ends), 2 * stride)
        right = at + stride
        low = np.where(at >= stride, begin[at - stride], k - 1)
        high = np.where(right < len(ends), begin[np.minimum(right, len(ends) - 1)], num)
        high = np.minimum(high, ends[at] - 1)
        length = high - low + 1
        starts = np.cumsum(length) - length
        start_of = np.arange(int(length.sum())) + np.repeat(low - starts, length)
        values = before[start_of] - flat[np.repeat((ends[at] - 1) * width, length) + columns[start_of]]
        least = np.minimum.reduceat(values, starts)
        first = np.flatnonzero(values == np.repeat(least, length))
        begin[at] = start_of[first[np.searchsorted(first, starts)]]
        best[ends[at]] = least + whole[at]
        stride >>= 1
    parent[ends] = begin
    return best, parent


def _layer_of_any(before: Vector, prefix: Vector, columns: Vector, k: int) -> tuple[Vector, Vector]:
    """`_layer` for any costs: every range is looked at."""
    import numpy as np

    num = len(columns) - 1
    best, parent = np.full(num + 1, np.inf), np.zeros(num + 1, np.int32)
    if k > num:
        return best, parent
    ends = np.arange(k, num + 1)
    values = before[None, : num + 1] - prefix[ends - 1][:, columns]
    values[np.arange(num + 1)[None, :] >= ends[:, None]] = np.inf
    begin = values.argmin(axis=1)
    best[ends] = values[np.arange(len(ends)), begin] + prefix[ends - 1, columns[ends]]
    parent[ends] = begin
    return best, parent


def cheapest_path(sums: Sums, prices_us: Vector) -> tuple[float, tuple[int, ...]]:
    """The sizes with the least sum of time and prices, however many they are: O(n^2), for any costs.

    Args:
        sums: the ladder, prepared.
        prices_us: what each of its candidates is charged, in microseconds from 0 up `[num_sizes]`.

    Returns:
        The sum, and the sizes.
    """
    import numpy as np

    columns, prefix, num = sums.columns, sums.prefix, len(sums.columns) - 1
    best, parent = np.zeros(num + 1), np.zeros(num + 1, np.int64)
    for end in range(1, num + 1):
        row = prefix[end - 1]
        values = best[:end] - row[columns[:end]]
        at = int(values.argmin())
        parent[end], best[end] = at, values[at] + row[columns[end]] + prices_us[end - 1]
    ends = best + sums.tail
    at = int(ends.argmin())
    total, found = float(ends[at]), []
    while at:
        found.append(int(sums.ladder.sizes[at - 1]))
        at = int(parent[at])
    return total, tuple(reversed(found))
