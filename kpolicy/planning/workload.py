"""A histogram, a cost table and a policy's layout as `Ladder`s: what every capture size would cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import lcm
from numbers import Real
from typing import TYPE_CHECKING, Any

import attrs

from kpolicy.budgets import Usage
from kpolicy.costs import CostTable, Curve, HostCost
from kpolicy.errors import ConfigError, check_kind
from kpolicy.keys import GraphKey
from kpolicy.ladders import CaptureSizes
from kpolicy.modes import Part
from kpolicy.planning.histogram import Histogram, Sums
from kpolicy.planning.ladder import Ladder, aligned_sizes, tied
from kpolicy.settings import Settings
from kpolicy.shapes import plain_int
from kpolicy.step_effects import StepEffects

if TYPE_CHECKING:
    import numpy as np

    Vector = np.ndarray[Any, Any]

__all__ = ["DECODE", "LIST", "OTHERS", "Layout", "Workload", "token_candidates"]

DECODE, OTHERS, LIST = "decode", "prefill", "all"
"""Names of the lists: uniform decode batches by requests, all other batches by tokens, and one list for both."""


@attrs.frozen(kw_only=True)
class Layout:
    """Which lists of sizes a policy has, and what replays from them.

    Args:
        one_list: one list in tokens for every kind of graph, as vLLM has it; else decode batches have one by requests
            and all others one by tokens.
        decode: what uniform decode batches replay: FULL graphs of their own, or None, where they go with the others.
        others: what all other batches replay; None is eager.
        query_lens: query lengths of decode batches with FULL graphs; none named is all.
        decode_keys: graph keys of one decode size: one for each query length, variable lengths and adapters besides.
        other_keys: graph keys of one size of the others.
        escape_when_cheaper: a step whose graph would take longer than eager runs eagerly (`auto`); else a step that
            fits a graph always replays it.
        most_padding: a graph of the others replays only where it is at most this many times the step's tokens, and the
            step runs eagerly else, as in SGLang; 0 is any padding.
        multiple_of: sizes in tokens are multiples of this: tensor parallelism under sequence parallelism.
        decode_multiple_of: decode sizes in requests are multiples of this.
    """

    one_list: bool = False
    decode: Part | None = Part.FULL
    others: Part | None = Part.PIECEWISE
    query_lens: tuple[int, ...] = ()
    decode_keys: int = attrs.field(default=1, converter=plain_int)
    other_keys: int = attrs.field(default=1, converter=plain_int)
    escape_when_cheaper: bool = False
    most_padding: int = 0
    multiple_of: int = attrs.field(default=1, converter=plain_int)
    decode_multiple_of: int = attrs.field(default=1, converter=plain_int)

    def __attrs_post_init__(self) -> None:
        for name in ("multiple_of", "decode_multiple_of", "decode_keys", "other_keys"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name} is {value!r:.80}; it is a whole number from 1 up.")

    def captures(self, query_len: int) -> bool:
        """Whether decode batches of that query length have FULL graphs."""
        return self.decode is not None and (not self.query_lens or query_len in self.query_lens)

    def lists_of(self, sizes: CaptureSizes, query_len: int) -> dict[str, tuple[int, ...]]:
        """The lists that capture sizes stand for, `DECODE` in requests of so many tokens."""
        if self.one_list:
            return {LIST: tuple(sorted({*sizes.decode, *sizes.mixed, *sizes.piecewise}))}
        others = sizes.piecewise if self.others is Part.PIECEWISE else sizes.mixed
        return {DECODE: tuple(size // query_len for size in sizes.decode), OTHERS: others if self.others else ()}

    def count(self, sizes: CaptureSizes, query_len: int) -> int:
        """How many sizes there are in the lists that a policy has."""
        return sum(len(each) for name, each in self.lists_of(sizes, query_len).items() if name in self.names)

    @property
    def names(self) -> tuple[str, ...]:
        """The lists there are to choose."""
        if self.one_list:
            return (LIST,) if self.decode or self.others else ()
        names = (DECODE,) if self.decode else ()
        return (*names, OTHERS) if self.others else names


def token_candidates(largest: int) -> tuple[int, ...]:
    """Sizes in tokens that are worth trying: all to 256, then ever wider steps, at most a 64th of the size."""
    sizes, size = [], 1
    while size <= largest:
        sizes.append(size)
        size += 1 if size < 256 else max(1, 1 << (size.bit_length() - 7))
    return tuple(sizes) if not sizes or sizes[-1] == largest else (*sizes, largest)


@attrs.frozen(kw_only=True)
class Workload:
    """Steps to plan for.

    Args:
        histogram: the steps.
        costs: what launches take.
        settings: the deployment's limits.
        layout: the policy's lists.
        usage_of: what capturing a graph key takes; the cost table's word by default. A `BudgetModel.cost_of` counts a
            device's own units, such as Ascend's streams.
    """

    histogram: Histogram
    costs: CostTable
    settings: Settings
    layout: Layout
    usage_of: Callable[[GraphKey], Usage] | None = None

    def __attrs_post_init__(self) -> None:
        check_kind("histogram", self.histogram, Histogram, "one that `Histogram.add` counted steps in")
        check_kind("costs", self.costs, CostTable, "kpolicy.costs.analytic_costs()")
        check_kind("settings", self.settings, Settings, "kpolicy.Settings(max_num_reqs=256)")
        check_kind("layout", self.layout, Layout, "Layout(one_list=True)")

    @property
    def steps(self) -> float:
        return self.histogram.steps

    def ladders(self, *, smoothing: float = 0.0, candidates: Mapping[str, Sequence[int]] | None = None) -> list[Ladder]:
        """The lists to choose, with what each size costs.

        Args:
            smoothing: share of the steps that is spread evenly over all sizes a step may have, so that sizes that were
                not seen have a graph near them too.
            candidates: sizes to consider instead of all, by list: in tokens, `DECODE` in requests.

        Raises:
            LadderError: no candidate has the alignment.
            ConfigError: smoothing isn't from 0 to under 1, or the layout captures nothing.
        """
        if not (isinstance(smoothing, Real) and 0 <= smoothing < 1):
            raise ConfigError(f"smoothing is {smoothing!r:.80}; it is a share of the steps from 0 to under 1.")
        layout, found = self.layout, []
        if not layout.names:
            raise ConfigError("the policy captures nothing here, so there is nothing to plan. Choose another policy.")
        for name in candidates or {}:
            if name not in layout.names:
                raise ConfigError(f"candidates names the list {name!r:.80}; there are {', '.join(layout.names)}.")
        for name in layout.names:
            given = (candidates or {}).get(name)
            sizes = self.candidates(name) if given is None else tuple(sorted(set(given)))
            found.append(self._ladder(name, sizes, smoothing) if sizes else None)
        return [each for each in found if each is not None]

    def candidates(self, name: str) -> tuple[int, ...]:
        """All sizes that a list may have."""
        settings, layout = self.settings, self.layout
        most = min(settings.max_num_reqs, settings.max_num_tokens // settings.query_len)
        if name == DECODE:
            return aligned_sizes(range(1, most + 1), layout.decode_multiple_of)
        largest = settings.max_num_tokens if layout.others else most * settings.query_len
        align = layout.multiple_of
        if name == LIST and layout.decode:
            # Sizes that aren't whole decode rows would be rounded up by the engine.
            align = lcm(align, settings.query_len)
        # What would be rounded beyond the largest step is the last multiple before it, which most of such steps fit.
        last = largest // align * align
        kept = {min(-(-size // align) * align, last) for size in token_candidates(largest)}
        return aligned_sizes([size for size in kept if size] or [largest], align)

    def time_us(self, sizes: CaptureSizes) -> float:
        """Microseconds of all steps with those sizes captured, each at the next size that holds it."""
        import numpy as np

        lists, layout = self.lists_of(sizes), self.layout
        total = self.rest_us
        for name in layout.names:
            own = lists.get(name, ())
            times = self._ladder(name, own or (1,), 0.0).times_us(own)
            if name == OTHERS and layout.others is Part.FULL and sizes.piecewise:
                # Batches above the FULL sizes, and with `auto` any that are better off, replay pieces.
                pieces = attrs.evolve(self, layout=attrs.evolve(layout, others=Part.PIECEWISE))
                ladder = pieces._ladder(name, sizes.piecewise, 0.0)
                by_piece = ladder.times_us(sizes.piecewise)
                above = ladder.demands > max(own, default=0)
                times = np.where(above, by_piece, np.minimum(times, by_piece) if layout.escape_when_cheaper else times)
            total += float(times.sum())
        return total

    @property
    def rest_us(self) -> float:
        """Time of the steps that no list is for: they run eagerly whatever is captured."""
        layout, rows = self.layout, []
        if layout.others is None:
            rows.append(self._others())
        if layout.decode and not layout.one_list:
            rows += [self._decodes(q) for q in self.histogram.settled().decodes if not layout.captures(q)]
        costs = self.costs.deciding
        return float(sum(each.escape_us(costs).sum() for each in rows))

    def lists_of(self, sizes: CaptureSizes) -> dict[str, tuple[int, ...]]:
        """The lists that capture sizes stand for, `DECODE` in requests."""
        return self.layout.lists_of(sizes, self.settings.query_len)

    def sizes_of(self, lists: Mapping[str, Sequence[int]]) -> CaptureSizes:
        """Capture sizes for those lists."""
        q, most = self.settings.query_len, self.settings.max_num_reqs
        if self.layout.one_list:
            every = tuple(lists.get(LIST, ()))
            decode = tuple(size for size in every if size % q == 0 and size <= most * q)
            return CaptureSizes(decode if self.layout.decode else (), every, every)
        decode = tuple(size * q for size in lists.get(DECODE, ()))
        others = tuple(lists.get(OTHERS, ()))
        if self.layout.others is Part.FULL:
            return CaptureSizes(decode, others, ())
        return CaptureSizes(decode, (), others)

    # Ladders

    def _ladder(self, name: str, sizes: Sequence[int], smoothing: float) -> Ladder:
        q, layout = self.settings.query_len, self.layout
        if name == DECODE:
            captured = [each for each in self._query_lens if layout.captures(each)]
            # A trace of prompts alone leaves room for decode steps all the same.
            none = not any(len(self._decodes(each).sizes) for each in captured)
            unseen = (q if q in captured else captured[0]) if none else None
            parts = [
                self._part(
                    name, self._decodes(each), [size * each for size in sizes], sizes, Part.FULL, smoothing,
                    counted=each == captured[0], unseen=each == unseen,
                )
                for each in captured
            ]  # fmt: skip
            return tied(name, parts)
        others = self._others(with_decodes=not layout.decode)
        if name == OTHERS or not layout.decode:
            return self._part(name, others, sizes, sizes, layout.others or Part.FULL, smoothing)
        # One list: a decode batch takes the FULL graph of the next size, or where there are so many rows of it none,
        # what the others take.
        most = self.settings.max_num_reqs * q
        parts = []
        if layout.others:
            parts.append(self._part(name, others, sizes, sizes, layout.others, smoothing))
        for each in self._query_lens:
            rows = self._decodes(each)
            rows = attrs.evolve(rows, sizes=rows.sizes * each, per_size=1)
            own = layout.captures(each)
            share = Part.FULL if own else layout.others
            parts.append(self._part(name, rows, sizes, sizes, share, smoothing, most=most, counted=own))
        return tied(name, parts)

    @property
    def _query_lens(self) -> tuple[int, ...]:
        """Query lengths of uniform decode batches: those that were seen, and those that graphs are captured for."""
        return tuple(sorted({*self.histogram.settled().decodes, *self.settings.decode_query_lens}))

    def _part(
        self, name: str, rows: _Rows, tokens: Sequence[int], sizes: Sequence[int], part: Part | None, smoothing: float,
        *, most: int | None = None, counted: bool = True, unseen: bool = False,
    ) -> Ladder:  # fmt: skip
        """One kind of graph of a list.

        Args:
            name: the list.
            rows: its steps.
            tokens: tokens of each size.
            sizes: the sizes, in the list's unit.
            part: what replays; None is nothing.
            smoothing: see `ladders`.
            most: FULL graphs end here, in tokens, and larger sizes replay what the others do.
            counted: whether its graphs are its own, and not counted with another kind's.
            unseen: whether these are decode rows and no step had any, so that they get a share of all other steps.
        """
        import numpy as np

        costs, layout = self.costs.deciding, self.layout
        limit = max(sizes) if most is None else min(max(sizes), most)
        rows = rows.usual(smoothing * self.steps, limit) if unseen else rows.smoothed(smoothing, limit)
        escape = rows.escape_us(costs)
        full = [part is not None and (part is not Part.FULL or most is None or size <= most) for size in tokens]
        above = layout.others if most is not None else None
        single = escape / np.maximum(rows.steps, _TINY)

        def graphs_us(costs: CostTable) -> Vector:
            columns = []
            for size, own in zip(tokens, full, strict=True):
                which = part if own else above
                columns.append(single if which is None else rows.graph_us(costs, which, size))
            return np.array(columns)

        times = graphs_us(costs)
        if layout.escape_when_cheaper:
            # Whether it is cheaper is decided by full graphs' times.
            same = costs.effects.padding_share == (1.0, 1.0)
            decided = times if same else graphs_us(attrs.evolve(costs, effects=StepEffects()))
            times = np.where(decided <= single, times, single)
        if layout.most_padding and not rows.query_len:
            times = np.where(np.array(tokens)[:, None] > layout.most_padding * rows.sizes[None, :], single, times)
        usages = []
        for size, own in zip(tokens, full, strict=True):
            usages.append(self._usage(part, size, rows.query_len) if own and counted and part is not None else Usage())
        same = all(usage == usages[0] for usage in usages)
        return Ladder(
            name=name, sizes=sizes, demands=rows.sizes, cost_us=times * rows.steps, escape_us=escape,
            usage=usages[0] if same else usages,
        )  # fmt: skip

    def _usage(self, part: Part, tokens: int, query_len: int) -> Usage:
        """What one size takes, all its graph keys together."""
        one, layout = (self.usage_of or self.costs.usage_of)(GraphKey(part, tokens)), self.layout
        count = layout.decode_keys if query_len else layout.other_keys
        return Usage(one.graphs * count, one.streams * count, one.bytes * count, one.seconds * count)

    def _decodes(self, query_len: int) -> _Rows:
        return _Rows.of(self.histogram.settled().decodes.get(query_len, {}), query_len)

    def _others(self, *, with_decodes: bool = False) -> _Rows:
        tables: dict[int, Sums] = dict(self.histogram.settled().others)
        if with_decodes:
            for q, table in self.histogram.decodes.items():
                for reqs, sums in table.items():
                    tables[reqs * q] = tables.get(reqs * q, Sums()).plus(sums)
        return _Rows.of(tables, 0)


_TINY = 1e-300


@attrs.frozen(eq=False)
class _Rows:
    """Steps of one kind by size, with the averages that their time depends on. All are `[num_sizes]`.

    Args:
        sizes: true sizes: requests for decode batches, tokens for others.
        steps: how many steps, or how much they weigh.
        means: of a step: the sums of `Sums` but the steps `[num_sizes, 8]`.
        query_len: of decode batches; 0 for others.
        per_size: tokens that a size counts: `query_len` where it is requests, 1 where it is tokens.
    """

    sizes: Vector
    steps: Vector
    means: Vector
    query_len: int
    per_size: int

    @classmethod
    def of(cls, table: Mapping[int, Sums], query_len: int) -> _Rows:
        import numpy as np

        sizes = sorted(table)
        sums = np.array([table[size] for size in sizes], float).reshape(len(sizes), 9)
        steps = sums[:, 0]
        means = sums[:, 1:] / np.maximum(steps, _TINY)[:, None]
        return cls(np.array(sizes, np.int64), steps, means, query_len, max(query_len, 1))

    def smoothed(self, share: float, most: int) -> _Rows:
        """With a share of its steps spread evenly over every size up to `most`, of average attention."""
        import numpy as np

        if not share or most < 1:
            return self
        own = float(self.steps.sum())
        sizes = np.union1d(self.sizes, np.arange(1, most + 1))
        steps, seen = np.zeros(len(sizes)), np.zeros((len(sizes), 8))
        at = np.searchsorted(sizes, self.sizes)
        average = (self.means * self.steps[:, None]).sum(axis=0) / own if own else np.zeros(8)
        scale = sizes / (float(self.sizes @ self.steps) / own) if own else np.ones(len(sizes))
        steps[at] = (1 - share) * self.steps
        seen[at] = self.means
        weight = np.where(sizes <= most, share * own / most, 0.0)
        usual = average[None, :] * scale[:, None]
        usual[:, -2:] = np.minimum(average[-2:], 1)
        means = (seen * steps[:, None] + usual * weight[:, None]) / np.maximum(steps + weight, _TINY)[:, None]
        return _Rows(sizes, steps + weight, means, self.query_len, self.per_size)

    def usual(self, steps: float, most: int) -> _Rows:
        """So many decode steps without context, spread evenly over every size up to `most`."""
        import numpy as np

        if not steps or most < 1:
            return self
        sizes, nothing, once = np.arange(1, most + 1), np.zeros(most), np.ones(most)
        means = np.array([sizes, nothing, nothing, nothing, nothing, sizes, once, nothing], float).T
        return _Rows(sizes, once * (steps / most), means, self.query_len, self.per_size)

    def _time(self, costs: CostTable, dense: Any, host: HostCost, both_us: float = 0.0) -> Vector:
        import numpy as np

        decodes, kv, context, tokens, pairs, reqs, with_decodes, with_prefills = self.means.T
        # Every step has rows of one kind at least, so this is the share of those that have both.
        dense = dense + both_us * np.maximum(with_decodes + with_prefills - 1, 0)
        decode, prefill = costs.decode_attention, costs.prefill_attention
        attention = decode.base_us * with_decodes + decode.row_us * decodes + decode.unit_us * kv
        attention = attention + prefill.base_us * with_prefills + prefill.row_us * tokens + prefill.unit_us * pairs
        attention = attention + prefill.kv_us * context
        host_us = host.base_us + host.decode_us * with_decodes + host.prefill_us * with_prefills + host.req_us * reqs
        time: Vector = np.maximum(dense + attention, host_us) + costs.step_us
        return time

    def graph_us(self, costs: CostTable, part: Part, tokens: int) -> Vector:
        """One step of each size, replayed at that many tokens."""
        full = part is Part.FULL
        key = GraphKey(part, tokens, query_len=self.query_len or None)
        host = costs.host_full if full else costs.host_piecewise
        time = self._time(costs, self._dense_us(costs, key), host, costs.both_us[0 if full else 1])
        # `CostTable.padding_of`, for all sizes at once.
        padded: Vector = time + costs.padding_of(key, 0) * (self._tokens < tokens)
        return padded

    def _dense_us(self, costs: CostTable, key: GraphKey) -> Any:
        """`CostTable.replay_us` in a step of each size; one number where padding takes what further tokens would."""
        import numpy as np

        curve = costs.curve_for(key)
        full_us = curve.at(key.num_tokens)
        alone = np.clip(1 - self.means[:, -1], 0, 1)
        if costs.effects.padding_share[0 if key.part is Part.FULL else 1] == 1 or not alone.any():
            return full_us
        # Sizes that the graph doesn't hold aren't read.
        after = np.minimum(self._tokens + 1, key.num_tokens)
        next_us: Any = np.array(curve.upto(int(after.max())))[after]
        padded_us = np.where(self._tokens < key.num_tokens, costs.padded_us(key, full_us, next_us), full_us)
        return full_us + alone * (padded_us - full_us)

    def escape_us(self, costs: CostTable) -> Vector:
        """All steps of each size together, run eagerly at their true size."""
        dense = _at(costs.eager, self._tokens.tolist())
        return self._time(costs, dense, costs.host_eager) * self.steps

    @property
    def _tokens(self) -> Vector:
        """The true sizes in tokens."""
        return self.sizes * self.per_size


def _at(curve: Curve, sizes: Iterable[int]) -> Vector:
    import numpy as np

    return np.array([curve.at(size) for size in sizes])
