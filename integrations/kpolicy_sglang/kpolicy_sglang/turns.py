"""When a decode step comes between two batches of prompts, by what both take.

SGLang runs prompts as long as any wait, batch after batch, and no decode meanwhile: that is the long gap between two
tokens of a request. Here running decodes wait for one batch of prompts, or several that together take no longer than
a chunk of usual prompts and a decode step: once the prompts since the last decode step and the next batch would take
longer, a decode step goes first. Batches stay as large as SGLang makes them. A batch of one prompt as long as the
chunk takes about twice a batch of usual ones; both were measured, and what lies between goes by how long prompts are.

A decode step keeps every prompt that waits from its first token. Where few wait that is little beside the gap that it
ends; in a burst it isn't, and the last prompts of it are what the longest waits come from. Once more than `BURST`
chunks wait that could run, with those that ran since the last decode step, or more prompts than decodes run, the order
is SGLang's, until at most one chunk waits and no more prompts than decodes, and for the batch that takes those. A
prompt of more than a chunk makes no burst: a decode step is little beside each of its chunks, and so it is to what
waits behind it.

A burst has a size: what waits when it is last seen to be one, and four chunks at least. Once that much has run a
decode step comes, so that a queue that never empties says by its length whether decodes have turns, and not by what it
was before.

A burst is what comes at once. Requests that end let others in, a few each decode step, and what they bring by the time
that prompts have run is two or three chunks: those waves are the usual load, and decodes have their turns in them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import lcm
from operator import mul

from kpolicy.costs import Curve
from kpolicy_sglang.phase import PROMPT_TOKENS
from kpolicy_sglang.state import State

__all__ = ["BURST", "Turns", "aligned", "mean_length"]

_STEP = 512
"""Prompt tokens between the sizes that are tried where nothing is captured."""
BURST = 4
"""Chunks of prompts: where more wait that could run, they go first."""


class Turns:
    """See the module's docstring.

    Args:
        state: what kpolicy knows of the model runner.
        chunk: SGLang's most prompt tokens of a step; 0 where prompts aren't cut, and there are no turns.
        align: what SGLang rounds a cut prompt down to: it runs none that has fewer tokens.
        own: whether SGLang was given an interval of its own; then only a limit on gaps is kept.
    """

    def __init__(self, state: State, chunk: int, *, align: int = 1, own: bool = False) -> None:
        self.chunk = chunk
        prefill, decode = state.prefill, state.decode
        known = bool(chunk and prefill is not None and prefill.costs is not None)
        gap_ms = state.config.gap_ms
        self._gap_us = gap_ms * 1e3 if known and gap_ms is not None else None
        by_cost = known and decode is not None and decode.costs is not None
        self.on = self._gap_us is not None or bool(state.config.turns and by_cost and not own)
        """Whether decodes have turns."""
        self._decode = decode
        self._decode_us: dict[int, float] = {}
        self._sizes: list[int] = []
        self._us: list[float] = []
        self._long_us: list[float] = []
        self.limit = chunk
        """Most prompt tokens of a step while decodes run."""
        if known and prefill is not None:
            self._sizes = sorted({*(s for s in prefill.sizes if s < chunk), *range(_STEP, chunk, _STEP), chunk})
            # A larger size that takes less makes the smaller ones no better.
            self._us = list(accumulate((prefill.us(size) for size in self._sizes), max))
            long = _from_usual(state.long, prefill.us(PROMPT_TOKENS)) if state.long is not None else prefill.us
            at_most = zip(self._sizes, self._us, strict=True)
            self._long_us = [max(us, long(size)) if size > PROMPT_TOKENS else us for size, us in at_most]
            if self._gap_us is not None:
                self.limit = self._fitting(self._gap_us, align)
        self._waited_us = 0.0
        self._batches = self._taken = 0
        self._burst = False
        self._size = 0
        """Tokens since the last decode step after which a burst is over; 0 where none was since."""

    def decode_goes_first(self, decodes: int, prompts: int, tokens: int, length: float = 0.0) -> bool:
        """Whether a decode step comes before the next batch of prompts.

        Args:
            decodes: rows that decode now, at least one.
            prompts: prompts that wait and could run.
            tokens: their tokens, near enough.
            length: how long they are, see `prompts_us`.
        """
        if self._gap_us is not None:
            next_us = self.prompts_us(min(tokens, self.limit), length)
            return bool(self._batches) and self._waited_us + next_us > self._gap_us
        # What ran in a burst makes no other.
        first, ran = self._burst, 0 if self._size else self._taken
        if prompts > decodes or (tokens > self.chunk and ran + tokens > BURST * self.chunk):
            self._size = self._taken + max(tokens, BURST * self.chunk)
            first = True
        # What is left of a burst at its end, a chunk at most, goes with it.
        self._burst = prompts > decodes or (first and min(tokens, self._size - self._taken) > self.chunk)
        if first or not self._batches:
            return False
        return self._waited_us + self.prompts_us(tokens, length) > self._us[-1] + self.decode_us(decodes)

    @property
    def in_burst(self) -> bool:
        """Whether more than a chunk waits of prompts that go first."""
        return self._burst

    @property
    def fresh(self) -> bool:
        """Whether no prompt ran since the last decode step: then none waits for another."""
        return not self._batches

    def cut(self, mixed_decodes: int) -> int:
        """The chunk to give SGLang for a step of `limit` prompt tokens: it takes the decodes of a mixed batch off."""
        return min(self.limit + mixed_decodes, self.chunk)

    def prefilled(self, tokens: int, length: float = 0.0) -> None:
        """A batch of so many prompt tokens, of prompts that long, runs without the decodes."""
        self._batches += 1
        self._taken += tokens
        self._waited_us += self.prompts_us(tokens, length)

    def decoded(self) -> None:
        """Decodes run, or nothing does."""
        self._batches = self._taken = self._size = 0
        self._waited_us = 0.0
        self._burst = False

    def prompts_us(self, tokens: int, length: float = 0.0) -> float:
        """Microseconds of a batch of prompts of no more than a chunk.

        Args:
            tokens: of all of them.
            length: that of the prompt which a token is in, mean over the tokens; up to `PROMPT_TOKENS` it makes no
                difference. Attention beyond is proportional to it: between what was measured of usual prompts and of
                a single one.
        """
        at = min(bisect_left(self._sizes, tokens), len(self._us) - 1)
        us, size = self._us[at], self._sizes[at]
        if length <= PROMPT_TOKENS or size <= PROMPT_TOKENS:
            return us
        return us + (self._long_us[at] - us) * min((length - PROMPT_TOKENS) / (size - PROMPT_TOKENS), 1.0)

    def decode_us(self, decodes: int) -> float:
        """Microseconds of a decode step, looked up once a number of rows."""
        found = self._decode_us.get(decodes)
        if found is None:
            assert self._decode is not None  # noqa: S101
            found = self._decode_us[decodes] = self._decode.us(decodes)
        return found

    def _fitting(self, us: float, align: int) -> int:
        """The most tokens that take no longer even as one prompt, in whole pages; the fewest that SGLang runs else."""
        found = self._sizes[max(bisect_right(list(accumulate(self._long_us, max)), us) - 1, 0)]
        return min(max(found // align * align, align), self.chunk)


def aligned(scheduler: object) -> int:
    """What a scheduler rounds a cut prompt down to: whole pages, and blocks of a deterministic attention."""
    page, block = (int(getattr(scheduler, name, None) or 1) for name in ("page_size", "truncation_align_size"))
    return lcm(page, block)


def _from_usual(long: Curve, usual_us: float) -> Callable[[int], float]:
    """Microseconds of one prompt, from the longest usual one on."""
    return Curve((PROMPT_TOKENS, *long.sizes), (usual_us, *long.us)).at


def mean_length(lengths: Sequence[int]) -> float:
    """How long the prompt is which a token is in, mean over the tokens; 0 where that makes no difference."""
    if not lengths or max(lengths) <= PROMPT_TOKENS:
        return 0.0
    return float(sum(map(mul, lengths, lengths))) / sum(lengths)
