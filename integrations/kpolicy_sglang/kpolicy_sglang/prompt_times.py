"""What a batch of prompts takes, by its tokens and by how long its prompts are.

Steps were measured with prompts of `PROMPT_TOKENS` at most and with a single prompt; a batch lies between the two by
its *length*, the tokens that attention goes through for each token of it. With most kernels those are a prompt's own.
Some give every prompt of a batch as many blocks as the longest has, and a long prompt makes all others as long. How far
a kernel does is measured with one such batch: `beside` is 0 where prompts pay for themselves alone, and 1 where each
pays for the longest.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf
from operator import mul

from kpolicy.costs import Curve
from kpolicy_sglang.phase import PROMPT_TOKENS, Phase

__all__ = ["PromptTimes", "beside_of", "length_of", "mean_length"]

_STEP = 512
"""Prompt tokens between the sizes that are tried where nothing is captured."""
_FURTHEST = 2.0
"""Times a batch as long as its tokens are: what tokens in KV add to attention is told up to there."""
_LEAST_TOLD = 0.05
"""Of a step's time: where long prompts take no more than that over usual ones, what is beside them isn't told apart."""


class PromptTimes:
    """Microseconds of prompt batches up to a chunk.

    Args:
        prefill: the phase, with costs.
        chunk: most tokens of a batch.
        long: microseconds of a single prompt by its tokens; None where that is what was measured anyway.
        beside: how far a long prompt makes those beside it as long.
    """

    def __init__(self, prefill: Phase, chunk: int, long: Curve | None = None, beside: float = 0.0) -> None:
        self.beside = beside
        self.sizes: list[int] = sorted({*(s for s in prefill.sizes if s < chunk), *range(_STEP, chunk, _STEP), chunk})
        # A larger size that takes less makes the smaller ones no better.
        self.usual_us: list[float] = list(accumulate((prefill.us(size) for size in self.sizes), max))
        alone = _from_usual(long, prefill.us(PROMPT_TOKENS)) if long is not None else prefill.us
        at_most = zip(self.sizes, self.usual_us, strict=True)
        self.long_us: list[float] = [max(us, alone(size)) if size > PROMPT_TOKENS else us for size, us in at_most]

    def us(self, tokens: int, length: float = 0.0) -> float:
        """Microseconds of a batch of prompts of no more than a chunk.

        Args:
            tokens: of all of them.
            length: see `length_of`; up to `PROMPT_TOKENS` it makes no difference.
        """
        sizes = self.sizes
        at = bisect_left(sizes, tokens) if tokens < sizes[-1] else -1
        us, size = self.usual_us[at], sizes[at]
        if length <= PROMPT_TOKENS or size <= PROMPT_TOKENS:
            return us
        times = (length - PROMPT_TOKENS) / (size - PROMPT_TOKENS)
        return us + (self.long_us[at] - us) * (times if times < _FURTHEST else _FURTHEST)

    def length(self, new: Sequence[int], before: Sequence[int] | None = None) -> float:
        """`length_of` by this kernel; 0 where it makes no difference."""
        if not new or (max(new) <= PROMPT_TOKENS and not (before and max(before))):
            return 0.0
        return length_of(new, before or (0,) * len(new), self.beside)

    def most_length(self, us: float) -> float:
        """Tokens of the longest prompt that keeps a whole chunk within so many microseconds, whatever is beside it."""
        size, usual_us, long_us = self.sizes[-1], self.usual_us[-1], self.long_us[-1]
        if long_us <= usual_us:
            return inf
        length = PROMPT_TOKENS + (us - usual_us) / (long_us - usual_us) * (size - PROMPT_TOKENS)
        return max(length / 2 if self.beside else length, PROMPT_TOKENS)

    def first(self, new: Sequence[int], before: int, most_us: float) -> tuple[int, float, float]:
        """How many of a batch's prompts, in their order and at least one, take no longer than that.

        Args:
            new: tokens of each in this batch.
            before: tokens that the first one has in KV.
            most_us: microseconds.

        Returns:
            tuple: their number, the microseconds of these, and of all.
        """
        cached, beside = 2 * before * new[0], self.beside

        def us(count: int) -> float:
            kept = new[:count]
            tokens = sum(kept)
            return self.us(tokens, _length(tokens, max(kept), sum(map(mul, kept, kept)), cached, before, beside))

        every = len(new)
        all_us = us(every)
        if all_us <= most_us:
            return every, all_us, all_us
        # Where a chunk of usual prompts fits, the short ones before the first longer one do.
        first, last, kept_us = 0, every, 0.0
        if not before and most_us >= self.usual_us[-1]:
            short = PROMPT_TOKENS / 2 if beside else PROMPT_TOKENS
            while first < every - 1 and new[first] <= short:
                first += 1
        # More prompts take longer: `first` of them fit, if any, and `last` don't. That longer one is tried first.
        tried = first + 1
        while last - first > 1:
            tried_us = us(tried)
            if tried_us > most_us:
                last = tried
            else:
                first, kept_us = tried, tried_us
            tried = (first + last) // 2
        count = max(first, 1)
        return count, kept_us or us(count), all_us


def length_of(new: Sequence[int], before: Sequence[int], beside: float) -> float:
    """Tokens that attention goes through for each token of a batch, twice: that of a single prompt is its own length.

    Args:
        new: tokens of each prompt in this batch.
        before: tokens that each has in KV already.
        beside: how far prompts are as long as the longest.
    """
    cached = 2 * sum(map(mul, new, before))
    return _length(sum(new), max(new), sum(map(mul, new, new)), cached, sum(before), beside)


def _length(tokens: int, longest: int, squares: int, cached: int, before: int, beside: float) -> float:
    own = squares + cached
    if not beside:
        return own / tokens
    as_longest = 2 * longest * (tokens + before) - squares
    return (own + beside * (as_longest - own)) / tokens


def beside_of(new: Sequence[int], us: float, usual_us: float, long_us: float) -> float:
    """How far prompts are as long as the longest, by what a batch of them takes.

    Args:
        new: tokens of the prompts.
        us: microseconds of the batch.
        usual_us: those of as many tokens in usual prompts.
        long_us: those of as many tokens in one.
    """
    tokens, nothing = sum(new), (0,) * len(new)
    own, as_longest = (length_of(new, nothing, beside) for beside in (0.0, 1.0))
    if long_us - usual_us <= _LEAST_TOLD * usual_us or as_longest <= own:
        return 0.0
    length = PROMPT_TOKENS + (us - usual_us) / (long_us - usual_us) * (tokens - PROMPT_TOKENS)
    return min(max((length - own) / (as_longest - own), 0.0), 1.0)


def _from_usual(long: Curve, usual_us: float) -> Callable[[int], float]:
    """Microseconds of one prompt, from the longest usual one on."""
    return Curve((PROMPT_TOKENS, *long.sizes), (usual_us, *long.us)).at


def mean_length(lengths: Sequence[int]) -> float:
    """How long the prompt is which a token is in, mean over the tokens; 0 where that makes no difference."""
    if not lengths or max(lengths) <= PROMPT_TOKENS:
        return 0.0
    return float(sum(map(mul, lengths, lengths))) / sum(lengths)
