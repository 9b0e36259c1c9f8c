"""Device time of attention, from steps over short and long KV and of either kind of rows."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from kpolicy.costs import AttentionCost
from kpolicy.decision import Launch
from kpolicy.executors.calibrate.bench import LONG_KV, Bench
from kpolicy.keys import GraphKey
from kpolicy.modes import Rows

__all__ = ["FEW_DECODES", "PLAIN_PROMPT", "Bases", "DecodeSlope", "PrefillSlope", "holding"]

LONG_CONTEXT, _SHORT_CHUNK = 4096, 128
"""Tokens before a prompt chunk, and of a short chunk, for what attention of prompts takes"""
FEW_DECODES = 8
PLAIN_PROMPT = 96
"""Tokens of a short prompt that runs as prompts mostly do: of MLA's, chunks of up to 64 may be absorbed."""
_MOST_BASE = 0.2
"""Of a step, that attention's base can be: more is noise."""


class Bases:
    """What attention of either kind costs a PIECEWISE step whatever the KV: kernels of its own, and their launches.

    The base of decode rows is what a few of them add to a long prompt, the usual mixed batch; that of prompt rows what
    a batch of decode rows costs less than a prompt of as many tokens.

    Args:
        bench: times the steps.
        pieces: PIECEWISE graphs.
        most_reqs: rows of a step, at most.
    """

    def __init__(self, bench: Bench, pieces: Sequence[GraphKey], most_reqs: int) -> None:
        self._bench = bench
        self._steps: dict[str, tuple[int, int, int]] = {}

        def add(name: str, key: GraphKey, decodes: int, prompt: int, kv: int = 0) -> None:
            rows = bench.rows(decodes, kv, prompt)
            case = bench.add([Launch(Rows.ALL, key)], rows)
            self._steps[name] = case, decodes * kv, prompt

        large = max((key for key in pieces), key=lambda key: key.num_tokens, default=None)
        few = min(FEW_DECODES, most_reqs - 1)
        if large is not None and large.num_tokens > few > 0:
            add("prompt", large, 0, large.num_tokens)
            add("prompt and decodes", large, few, large.num_tokens - few, bench.usual_kv)
        small = sorted((key for key in pieces if 2 <= key.num_tokens <= most_reqs), key=lambda key: key.num_tokens)
        if small:
            # As above: the middle one, or the smallest beyond what may be absorbed.
            usual = [key for key in small if key.num_tokens >= PLAIN_PROMPT]
            middle = small[len(small) // 2]
            key = usual[0] if usual and middle.num_tokens < PLAIN_PROMPT else middle
            add("short prompt", key, 0, key.num_tokens)
            add("decodes", key, key.num_tokens, 0, bench.usual_kv)

    def added(self, decode: AttentionCost, prefill: AttentionCost) -> tuple[AttentionCost, AttentionCost]:
        """Both costs with their bases."""
        us = {
            name: self._bench.us(case)
            - decode.unit_us * kv
            - prefill.unit_us * new * (new + 1) / 2
            - prefill.kv_us * new
            for name, (case, kv, new) in self._steps.items()
            if self._bench.measured(case)
        }
        decode_base = prefill_base = 0.0
        if "prompt" in us and "prompt and decodes" in us:
            decode_base = min(max(us["prompt and decodes"] - us["prompt"], 0.0), _MOST_BASE * us["prompt"])
        if "decodes" in us and "short prompt" in us:
            more = us["short prompt"] - us["decodes"]
            prefill_base = min(max(more + decode_base, 0.0), _MOST_BASE * us["short prompt"])
        return attrs.evolve(decode, base_us=decode_base), attrs.evolve(prefill, base_us=prefill_base)


class DecodeSlope:
    """What a KV token costs a decode row, from equal steps over short and long KV."""

    def __init__(self, bench: Bench, keys: Sequence[GraphKey], most_reqs: int) -> None:
        key = max(keys, key=lambda each: each.num_tokens, default=None)
        rows = most_reqs if key is None else key.num_tokens
        short, long = bench.short_kv, bench.usual_kv
        self._bench = bench
        self._units = rows * (long - short)
        self._cases = [bench.add([Launch(Rows.ALL, key)], bench.rows(rows, each)) for each in (short, long)]

    def cost(self) -> AttentionCost:
        return _slope(self._bench, self._cases, self._units)


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
