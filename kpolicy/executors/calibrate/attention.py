"""Device time of attention, from steps over short and long KV and of either kind of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import attrs

from kpolicy.costs import FEW_DECODES, AttentionCost
from kpolicy.decision import Launch
from kpolicy.executors.calibrate.bench import LONG_KV, Bench, Wave
from kpolicy.executors.calibrate.one_speed import chance
from kpolicy.keys import GraphKey
from kpolicy.modes import Rows

__all__ = ["PLAIN_PROMPT", "Bases", "DecodeSlope", "PrefillSlope", "holding"]

LONG_CONTEXT, _SHORT_CHUNK = 4096, 128
"""Tokens before a prompt chunk, and of a short chunk, for what attention of prompts takes"""
_MANY_DECODES = 128
PLAIN_PROMPT = 96
"""Tokens of a short prompt that runs as prompts mostly do: of MLA's, chunks of up to 64 may be absorbed."""
_LEAST_SPARED = 0.03
"""Of a short prompt's time, what counts as spared by its own KV: two samples of one step differ by 2% and more"""
_MOST_BASE = 0.2
"""Of a step, that attention's base can be: more is noise."""


class Bases:
    """What attention costs a step of a graph beyond KV and pairs: kernels of its own for either kind of rows, and rows.

    - Of a decode row: what many cost more than a few beside a prompt, each in the place of a prompt token.
    - Of decode rows at all: what a few cost more than the prompt tokens in whose place they come, beside a long prompt.
      That is the usual mixed batch.
    - Of prompt rows: what a prompt costs more than decode rows of as many tokens.
    - Of both kinds together: what the few cost more in one part than in the other, and what the host's preparing for
      both delays the device. A FULL graph that holds prompts has kernels for both kinds whatever rows come.

    Args:
        bench: times the steps.
        pieces: PIECEWISE graphs.
        mixed: FULL graphs that hold prompts.
        most_reqs: rows of a step, at most.
    """

    def __init__(self, bench: Bench, pieces: Sequence[GraphKey], mixed: Sequence[GraphKey], most_reqs: int) -> None:
        self._bench = bench
        self._steps: dict[str, _Step] = {}
        self._own_kv: int | None = None
        """The short prompt once more, on its own KV"""
        large = max(pieces, key=lambda key: key.num_tokens, default=None)
        few = min(FEW_DECODES, most_reqs - 1)
        if large is not None and large.num_tokens > few > 0:
            # Small enough for a short allowance to come to it.
            middle = holding(pieces, 2 * _MANY_DECODES) or large
            size, most = middle.num_tokens, large.num_tokens
            many = min(_MANY_DECODES, most_reqs - 1, size // 2)
            if many > few:
                self._add("middle prompt", middle, 0, size)
                self._add("middle prompt and few", middle, few, size - few)
                self._add("middle prompt and many", middle, many, size - many)
            self._add("prompt", large, 0, most)
            self._add("prompt and few", large, few, most - few)
            whole = next((key for key in mixed if key.num_tokens == most), None)
            if whole is not None:
                self._add("prompt, whole", whole, 0, most)
                self._add("prompt and few, whole", whole, few, most - few)
        small = sorted((key for key in pieces if 2 <= key.num_tokens <= most_reqs), key=lambda key: key.num_tokens)
        if small:
            # As above: the middle one, or the smallest beyond what may be absorbed.
            usual = [key for key in small if key.num_tokens >= PLAIN_PROMPT]
            key = small[len(small) // 2]
            if usual and key.num_tokens < PLAIN_PROMPT:
                key = usual[0]
            self._add("short prompt", key, 0, key.num_tokens)
            self._add("decodes", key, key.num_tokens, 0)
            if not bench.host_runs:
                rows = bench.rows(0, 0, key.num_tokens)
                self._own_kv = bench.add([Launch(Rows.ALL, key)], rows, own_kv=True, wave=Wave.LATER)

    def _add(self, name: str, key: GraphKey, decodes: int, prompt: int) -> None:
        rows = self._bench.rows(decodes, self._bench.dense_kv if decodes else 0, prompt)
        self._steps[name] = _Step(self._bench.add([Launch(Rows.ALL, key)], rows), decodes, prompt)

    def spared(self) -> float:
        """Share of a short prompt's time that its own KV spares it; 0 where that isn't known, or may be chance.

        Its tokens are likely the more alike for it, so that a mixture of experts reads fewer experts' weights: what a
        larger draw of shapes found on an H200 can be told by that (docs/measured_gpu.md#a-larger-draw-of-one-load).
        """
        bench, own, short = self._bench, self._own_kv, self._steps.get("short prompt")
        if own is None or short is None or not (bench.had_own_kv(own) and bench.measured(own)):
            return 0.0
        share = 1 - bench.us(own) / bench.us(short.case) if bench.measured(short.case) else 0.0
        return share if share > _LEAST_SPARED else 0.0

    def added(
        self, decode: AttentionCost, prefill: AttentionCost, step_us: float
    ) -> tuple[AttentionCost, AttentionCost, tuple[float, float]]:
        """Both costs with what is told here, and `CostTable.both_us`.

        Args:
            decode: by KV.
            prefill: by KV and pairs.
            step_us: what overlaps nothing, in any mode.
        """
        costs = decode, prefill
        row_us = self._row_us(costs)

        def base(name: str, than: str, *, waited: bool = False) -> float | None:
            us = self._more(name, than, costs, step_us if waited else None)
            return None if us is None else max(us - row_us * self._steps[name].decodes, 0.0)

        decode_base = base("prompt and few", "prompt")
        if decode_base is None:
            decode_base = base("middle prompt and few", "middle prompt") or 0.0
        bases = (
            base("prompt and few, whole", "prompt, whole", waited=True),
            base("prompt and few", "prompt", waited=True),
        )
        decode_base = min(each for each in (decode_base, *bases) if each is not None)
        # Where the host itself runs what it launches, no part has kernels or preparing of its own.
        apart = [None, None] if self._bench.host_runs else bases
        whole_us, pieces_us = (0.0 if each is None else each - decode_base for each in apart)
        prefill_base, short = 0.0, self._more("short prompt", "decodes", costs)
        if short is not None:
            prefill_base = max(short + decode_base + row_us * self._steps["decodes"].decodes, 0.0)
        return (
            attrs.evolve(decode, base_us=decode_base, row_us=row_us),
            attrs.evolve(prefill, base_us=prefill_base),
            (whole_us, pieces_us),
        )

    def _row_us(self, costs: tuple[AttentionCost, AttentionCost]) -> float:
        """What a decode row adds to a step, as beside a prompt; 0 where the host itself runs what it launches.

        A CPU takes several times as long for a row beside a prompt as for one more in a step of decodes, which has its
        rows' time in its curve by size.
        """
        if self._bench.host_runs:
            return 0.0
        us = self._more("middle prompt and many", "middle prompt and few", costs)
        if us is None:
            return 0.0
        rows = self._steps["middle prompt and many"].decodes - self._steps["middle prompt and few"].decodes
        return max(us, 0.0) / rows

    def _more(
        self, name: str, than: str, costs: tuple[AttentionCost, AttentionCost], step_us: float | None = None
    ) -> float | None:
        """By how much a step takes longer than another, KV and pairs apart; None where either wasn't timed.

        Device time alone, or with `step_us` what the device waits for the host beyond that too.
        """
        bench, steps = self._bench, [self._steps.get(each) for each in (name, than)]
        decode, prefill = costs
        times: list[float] = []
        for step in steps:
            if step is None or not bench.measured(step.case):
                return None
            us = bench.us(step.case) if step_us is None else bench.sides_us(step.case, step_us)[0]
            prompt_us = prefill.unit_us * step.prompt * (step.prompt + 1) / 2 + prefill.kv_us * step.prompt
            times.append(us - decode.unit_us * step.decodes * bench.dense_kv - prompt_us)
        mine, others = times
        if bench.host_runs:
            # A small difference of long steps: what may be chance is nothing.
            errors = [bench.error(step.case) for step in steps if step is not None]
            if abs(mine - others) <= chance(*errors) * others:
                return 0.0
        return min(mine - others, _MOST_BASE * others)


class _Step(NamedTuple):
    """A step that was timed: decode rows over `Bench.dense_kv` each, and tokens of a prompt without context."""

    case: int
    decodes: int
    prompt: int


class DecodeSlope:
    """What a KV token costs a decode row, from equal steps over short and long KV."""

    def __init__(self, bench: Bench, keys: Sequence[GraphKey], most_reqs: int) -> None:
        key = max(keys, key=lambda each: each.num_tokens, default=None)
        rows = most_reqs if key is None else key.num_tokens
        short, long = bench.short_kv, bench.usual_kv
        self._bench = bench
        self._rows, self._long = rows, long
        self._units = rows * (long - short)
        # Curves by decode rows have attention in them until this is known, and sizes by prompts have none.
        self._cases = [
            bench.add([Launch(Rows.ALL, key)], bench.rows(rows, each), wave=Wave.FAR_APART) for each in (short, long)
        ]

    def cost(self) -> AttentionCost:
        return _slope(self._bench, self._cases, self._units)

    def timed(self) -> tuple[int, int]:
        """KV tokens that its longest row and all its rows had; 0 where that wasn't timed."""
        return (self._long, self._rows * self._long) if all(map(self._bench.measured, self._cases)) else (0, 0)


class PrefillSlope:
    """What a query-key pair and a KV token cost a prompt chunk: from chunks without context and with a long one.

    Of a large chunk the pairs tell, of a short one the context that it goes through.
    """

    def __init__(self, bench: Bench, pieces: Sequence[GraphKey], most_tokens: int, longest: int) -> None:
        large = max(1, min(most_tokens, longest // 2))
        short = min(_SHORT_CHUNK, max(1, large // 2))
        self._bench = bench
        self._news = large, short
        self._context = max(0, min(LONG_KV if bench.host_runs else LONG_CONTEXT, longest - large))
        self._cases = [
            [bench.add([Launch(Rows.ALL, key)], bench.rows(0, 0, new, each)) for each in (0, self._context)]
            for new, key in zip(self._news, (None, holding(pieces, short)), strict=True)
        ]

    def timed(self) -> int:
        """KV tokens that its longest chunk attended to, its own included; 0 where that wasn't timed."""
        return self._context + self._news[0] if all(map(self._bench.measured, self._cases[0])) else 0

    def cost(self) -> AttentionCost:
        context, (large, short) = self._context, self._news
        if not context or not all(map(self._bench.measured, self._cases[0])):
            return AttentionCost()
        by_large, by_short = (
            max(self._bench.us(cases[1]) - self._bench.us(cases[0]), 0.0) / context
            if all(map(self._bench.measured, cases))
            else 0.0
            for cases in self._cases
        )
        if large == short or by_large <= by_short:
            return AttentionCost(unit_us=by_large / large)
        unit_us = (by_large - by_short) / (large - short)
        kv_us = by_short - unit_us * short
        # Where pairs alone explain the short chunk too, all of it is theirs.
        return AttentionCost(unit_us=unit_us, kv_us=kv_us) if kv_us > 0 else AttentionCost(unit_us=by_large / large)


def holding(keys: Sequence[GraphKey], num_tokens: int) -> GraphKey | None:
    """The smallest graph that holds so many tokens."""
    return min((key for key in keys if key.num_tokens >= num_tokens), key=lambda key: key.num_tokens, default=None)


def _slope(bench: Bench, cases: Sequence[int], units: int) -> AttentionCost:
    if not units or not all(map(bench.measured, cases)):
        return AttentionCost()
    return AttentionCost(unit_us=max(bench.us(cases[1]) - bench.us(cases[0]), 0.0) / units)
