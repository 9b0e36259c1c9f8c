"""What a batch of prompts takes, by its tokens and by how long its prompts are.

Steps were measured with prompts of `PROMPT_TOKENS` at most and with a single prompt; a batch lies between the two by
its *length*, the tokens that attention goes through for each token of it. With most kernels those are a prompt's own.
Some give every prompt of a batch as many blocks as the longest has, and a long prompt makes all others as long. How far
a kernel does is measured with one such batch: `beside` is 0 where prompts pay for themselves alone, and 1 where each
pays for the longest.
"""

from __future__ import annotations

from bisect import bisect_right
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
LONGEST = 64
"""Tokens of a longest prompt that are guessed for alike."""
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
        self._chunk, self._shares, self._most_longer = chunk, _shares(beside), max(1.0, 2 * beside)
        self._by_tokens = self._listed()
        self.bounds = self._bounds()
        """Least and most microseconds of a batch, however long its prompts are, by its tokens up to a chunk."""
        self._short = PROMPT_TOKENS // 2 if beside else PROMPT_TOKENS
        """Tokens of a prompt that makes none beside it longer than usual, if they are no longer."""

    def _listed(self) -> list[tuple[float, float, int]]:
        """By a batch's tokens: microseconds of usual prompts, what one takes more, and its tokens beyond a usual one's.

        A list, since each weighing of a batch asks several times.
        """
        found, below = [], -1
        for size, usual, long in zip(self.sizes, self.usual_us, self.long_us, strict=True):
            found += [(usual, long - usual, size - PROMPT_TOKENS)] * (size - below)
            below = size
        return found

    def _bounds(self) -> list[tuple[float, float]]:
        """Likewise the least and the most: one pair for all tokens of a size, as pairs for each are in no cache."""
        found, below = [], -1
        for size, usual, long in zip(self.sizes, self.usual_us, self.long_us, strict=True):
            furthest_us = _FURTHEST * (long - usual) if size > PROMPT_TOKENS else 0.0
            found += [(usual, usual + furthest_us)] * (size - below)
            below = size
        return found

    def us(self, tokens: int, length: float = 0.0) -> float:
        """Microseconds of a batch of prompts of no more than a chunk.

        Args:
            tokens: of all of them.
            length: see `length_of`; up to `PROMPT_TOKENS` it makes no difference.
        """
        us, more_us, more = self._by_tokens[tokens if tokens < self._chunk else -1]
        if length <= PROMPT_TOKENS or more <= 0:
            return us
        times = (length - PROMPT_TOKENS) / more
        return us + more_us * (times if times < _FURTHEST else _FURTHEST)

    def most_us(self, tokens: int, longest: int) -> float:
        """The most microseconds that a batch can take of which nothing is in KV, by its longest prompt's tokens."""
        return self.us(tokens, longest * self._most_longer)

    def length(self, new: Sequence[int], before: Sequence[int] = ()) -> float:
        """`length_of` by this kernel; 0 where all are so short that it makes no difference."""
        cached = () if before.count(0) == len(before) else before
        if not new or (max(new) <= self._short and not cached):
            return 0.0
        return length_of(new, cached, self.beside)

    def most_length(self, us: float) -> float:
        """Tokens of the longest prompt that keeps a whole chunk within so many microseconds, whatever is beside it."""
        size, usual_us, long_us = self.sizes[-1], self.usual_us[-1], self.long_us[-1]
        if long_us <= usual_us:
            return inf
        length = PROMPT_TOKENS + (us - usual_us) / (long_us - usual_us) * (size - PROMPT_TOKENS)
        return max(length / 2 if self.beside else length, self._short)

    def most_alike(self, us: float) -> int:
        """The most tokens that take no longer even as one prompt; 0 where none do. No prompts take longer than one."""
        return self.sizes[at - 1] if (at := bisect_right(list(accumulate(self.long_us, max)), us)) else 0

    def beside_longest(self, us: float) -> list[int]:
        """Tokens of a batch of usual prompts and a long one that takes about so long, by `LONGEST` tokens of that one.

        A guess, from which `first` goes on.
        """
        found, tokens = [], self._chunk
        for longest in range(0, self._chunk + LONGEST, LONGEST):
            # The longer it is the fewer are beside it.
            while tokens > longest and self.batch_us([longest, *_usual(tokens - longest)]) > us:
                tokens -= LONGEST
            found.append(tokens)
        return found

    def first(
        self, new: Sequence[int], before: int, tokens: int, longest: int, most_us: float, guess: int
    ) -> tuple[int, int, float, float]:
        """How many of a batch's prompts, in their order and at least one, take no longer than that.

        A further prompt is taken to make no batch shorter.

        Args:
            new: tokens of each; the batch has a chunk of them at most, and cuts the last one.
            before: tokens that the first one has in KV.
            tokens: of all these prompts.
            longest: tokens of the longest.
            most_us: microseconds.
            guess: tokens of those that fit, about; a chunk at most.

        Returns:
            tuple: their number, their tokens, the microseconds that they take, and those of more of them that take too
                long, of one more where that was costed; 0.0 where all fit.
        """
        by_tokens, chunk = self._by_tokens, self._chunk
        own, longests, in_kv = self._shares
        last = len(new)
        if before:
            short, cached = 0, in_kv * before * (new[0] if new[0] < chunk else chunk)
        else:
            short, cached = self._short, 0.0
        if tokens <= guess:
            count = last
            squares = sum(map(mul, new, new))
        else:
            count = tokens = squares = longest = 0
            for each in new:
                after = tokens + each
                if after > guess:
                    break
                tokens = after
                count += 1
                squares += each * each
                if each > longest:
                    longest = each
            if not count:
                count, tokens, longest = 1, each, each
                if tokens > chunk:
                    # It is cut.
                    last, tokens, longest = 1, chunk, chunk
                squares = longest * longest
        fits, fit_tokens, fit_us, more_us = 0, 0, 0.0, 0.0
        # One prompt more each time until it is too many, or one less until it isn't.
        while True:
            us, longer_us, longer = by_tokens[tokens]
            if longest > short and longer > 0:
                # As `us` has it, which would take as long to call.
                length = (own * squares + longests * longest * (tokens + before) + cached) / tokens
                if length > PROMPT_TOKENS:
                    times = (length - PROMPT_TOKENS) / longer
                    us += longer_us * (times if times < _FURTHEST else _FURTHEST)
            if us <= most_us:
                if count == last or tokens == chunk:
                    return count, tokens, us, more_us
                fits, fit_tokens, fit_us = count, tokens, us
                each = new[count]
                count += 1
                tokens += each
                if tokens > chunk:
                    # The last one is cut.
                    last = count
                    each -= tokens - chunk
                    tokens = chunk
                squares += each * each
                if each > longest:
                    longest = each
            elif fits:
                return fits, fit_tokens, fit_us, us
            elif count == 1:
                return 1, tokens, us, us
            else:
                last = count = count - 1
                more_us = us
                each = new[count]
                tokens, squares = tokens - each, squares - each * each
                if each == longest:
                    longest = max(new[:count])

    def batch_us(self, new: Sequence[int], before: int = 0) -> float:
        """Microseconds of a batch of prompts, of which the first has so many tokens in KV."""
        return self.us(sum(new), length_of(new, (before,), self.beside))


def length_of(new: Sequence[int], before: Sequence[int], beside: float) -> float:
    """Tokens that attention goes through for each token of a batch, twice: that of a single prompt is its own length.

    Args:
        new: tokens of each prompt in this batch.
        before: tokens that the first ones have in KV already; the others have none.
        beside: how far prompts are as long as the longest.
    """
    (own, longests, in_kv), tokens, squares = _shares(beside), sum(new), sum(map(mul, new, new))
    cached = in_kv * sum(map(mul, new, before))
    return float((own * squares + longests * max(new) * (tokens + sum(before)) + cached) / tokens)


def _usual(tokens: int) -> list[int]:
    """Prompts of so many tokens, none longer than usual."""
    usual = PROMPT_TOKENS // 2
    return [usual] * (tokens // usual) + ([tokens % usual] if tokens % usual else [])


def _shares(beside: float) -> tuple[float, float, float]:
    """What `length_of` goes by: the prompts' squares, the longest times all tokens, and prompts times those in KV.

    By its own length a batch is the squares and twice the last. All as long as the longest are twice that times all
    tokens, less the squares: a prompt's tokens attend to half of it.
    """
    return 1 - 2 * beside, 2 * beside, 2 * (1 - beside)


def beside_of(new: Sequence[int], us: float, usual_us: float, long_us: float) -> float:
    """How far prompts are as long as the longest, by what a batch of them takes.

    Args:
        new: tokens of the prompts.
        us: microseconds of the batch.
        usual_us: those of as many tokens in usual prompts.
        long_us: those of as many tokens in one.
    """
    tokens = sum(new)
    own, as_longest = (length_of(new, (), beside) for beside in (0.0, 1.0))
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
