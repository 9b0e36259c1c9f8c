"""When a decode step comes between two batches of prompts, by what both take.

SGLang runs prompts as long as any wait, batch after batch, and no decode meanwhile: that is the long gap between two
tokens of a request. Here running decodes wait for one batch of prompts, or several that together take no longer than
a chunk of usual prompts and a decode step: once the prompts since the last decode step and the next batch would take
longer, a decode step goes first. What a batch takes goes by its prompts too, see `kpolicy_sglang.prompt_times`: a long
one may make all others take as long. A batch that would take longer than running decodes wait elsewhere ends before the
prompt that makes it so long, where it is longer by what a further batch costs, and decodes gain more by it than the
prompts behind lose. It ends between two prompts, by what is seen to wait.

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

from collections.abc import Sequence
from math import inf, lcm

from kpolicy_sglang.prompt_times import PromptTimes, mean_length
from kpolicy_sglang.state import State

__all__ = ["BURST", "Turns", "aligned"]

BURST = 4
"""Chunks of prompts: where more wait that could run, they go first."""
_STARTS = 2
"""Steps of the smallest batch that a further one costs: its launches, and the scheduler's own loop about as much."""


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
        self._most_us: dict[int, float] = {}
        self._align = align
        self.times: PromptTimes | None = None
        """What batches of prompts take; None where nothing was measured."""
        self.limit = chunk
        """Most prompt tokens of a step while decodes run."""
        if known and prefill is not None:
            self.times = PromptTimes(prefill, chunk, state.long, state.beside)
            if self._gap_us is not None:
                self.limit = self._fitting(self._gap_us)
        self._start_us = _STARTS * self.times.usual_us[0] if self.times is not None else 0.0
        """What a further batch costs the host"""
        self.long, self._short = inf, chunk
        """Tokens of a prompt above which a batch with it may take too long, and of a batch up to which none does"""
        if self.on and self._gap_us is None and self.times is not None:
            # With one decode the least is allowed.
            least_us = self.most_us(1) + self._start_us
            self.long, self._short = self.times.most_length(least_us), self.times.most_alike(least_us)
        self._chunk_us = self.times.usual_us[-1] if self.times is not None else 0.0
        self._weighed: tuple[Sequence[int], int, float] = [], 0, 0.0
        """The prompts that were last weighed and fit, what the first has in KV, and what they take."""
        self._waited_us = 0.0
        self._taken = 0
        self.fresh = True
        """Whether no prompt ran since the last decode step: then none waits for another."""
        self.in_burst = False
        """Whether more than a chunk waits of prompts that go first."""
        self._look_at = 0
        """Tokens since the last decode step up to which what waits isn't looked at: the burst lasts as long."""
        self._size = 0
        """Tokens since the last decode step after which a burst is over; 0 where none was since."""

    def decode_goes_first(self, decodes: int, prompts: int, tokens: int, new: Sequence[int] = ()) -> bool:
        """Whether a decode step comes before the next batch of prompts.

        Args:
            decodes: rows that decode now, at least one.
            prompts: prompts that wait and could run.
            tokens: their tokens, near enough.
            new: tokens of the first of them, which say how long they are.
        """
        if self._gap_us is not None:
            return not self.fresh and self._too_long(min(tokens, self.limit), new, self._gap_us)
        # What ran in a burst makes no other.
        first, chunk, taken = self.in_burst, self.chunk, self._taken
        if prompts > decodes or (tokens > chunk and (0 if self._size else taken) + tokens > BURST * chunk):
            self._size = taken + max(tokens, BURST * chunk)
            first = True
        if first:
            # What is left of a burst at its end, a chunk at most, goes with it.
            left = min(tokens, self._size - taken)
            self.in_burst = prompts > decodes or left > chunk
            self._look_at = taken + left - chunk if self.in_burst else 0
            return False
        if self.fresh:
            return False
        most_us = self._most_us.get(decodes)
        if most_us is None:
            most_us = self._most_us[decodes] = self.most_us(decodes)
        return self._too_long(tokens, new, most_us)

    def _too_long(self, tokens: int, new: Sequence[int], most_us: float) -> bool:
        """Whether decodes would wait for longer with a batch of so many tokens of such prompts."""
        times = self.times
        assert times is not None  # noqa: S101
        # How long prompts are only adds.
        return self._waited_us + times.us(tokens) > most_us or (
            bool(new) and self._waited_us + times.us(tokens, mean_length(new)) > most_us
        )

    def most(self, decodes: int, waiting: int, new: Sequence[int], before: int = 0) -> int:
        """Most tokens of the next batch of prompts: `limit`, or those of its first prompts where all take too long.

        Outside bursts: in one nobody asks.

        Args:
            decodes: rows that decode now.
            waiting: prompts that wait and could run.
            new: tokens of the first of them in SGLang's order, as many as are known.
            before: tokens that the first one has in KV.
        """
        times = self.times
        if times is None or not new:
            return self.limit
        longest, tokens = max(new), sum(new)
        if longest + before <= self.long or (tokens <= self._short and not before):
            return self.limit
        if tokens > self.chunk:
            new = _within(new, tokens, self.chunk)
        start_us, decode_us = self._start_us, self._decode_us.get(decodes) or self.decode_us(decodes)
        count, kept_us, more_us = times.first(new, before, self._chunk_us + decode_us + start_us)
        kept = new[:count]
        self._weighed = kept, before, kept_us
        # What running decodes gain against what those behind it lose: often one more prompt tells.
        lost_us = (waiting - count) * (decode_us + start_us)
        if decodes * (more_us - kept_us) <= lost_us and decodes * (times.batch_us(new, before) - kept_us) <= lost_us:
            return self.limit
        # SGLang takes whole pages off what is left for each prompt.
        tokens = sum(kept) if self._align == 1 else sum([-(-each // self._align) * self._align for each in kept])
        return tokens if tokens < self.limit else self.limit

    @property
    def busy(self) -> bool:
        """Whether a burst has so much left that nothing needs to be looked at before the next batch."""
        return self._taken < self._look_at

    def cut(self, mixed_decodes: int) -> int:
        """The chunk to give SGLang for a step of `limit` prompt tokens: it takes the decodes of a mixed batch off."""
        return min(self.limit + mixed_decodes, self.chunk)

    def prefilled(self, tokens: int, new: Sequence[int] = (), before: Sequence[int] = ()) -> None:
        """A batch of so many prompt tokens runs without the decodes.

        Args:
            tokens: of all prompts.
            new: of each, where that is known.
            before: tokens that each has in KV; none where it is empty.
        """
        self.fresh = False
        self._taken += tokens
        weighed, in_kv, us = self._weighed
        if new != weighed or (before[0] if before else 0) != in_kv or sum(before) != in_kv:
            times = self.times
            us = times.us(tokens, times.length(new, before)) if times is not None else 0.0
        self._waited_us += us

    def prefilled_in_burst(self, tokens: int) -> None:
        """The same while prompts go first: by its end decodes have waited for long, whatever each batch took."""
        self.fresh = False
        self._taken += tokens
        self._waited_us += self._chunk_us

    def decoded(self) -> None:
        """Decodes run, or nothing does."""
        self._taken = self._size = self._look_at = 0
        self._waited_us = 0.0
        self.fresh, self.in_burst = True, False

    def most_us(self, decodes: int) -> float:
        """Microseconds that running decodes wait for, outside bursts: a chunk of usual prompts and a decode step."""
        assert self.times is not None  # noqa: S101
        return self.times.usual_us[-1] + self.decode_us(decodes)

    def decode_us(self, decodes: int) -> float:
        """Microseconds of a decode step, looked up once a number of rows."""
        found = self._decode_us.get(decodes)
        if found is None:
            assert self._decode is not None  # noqa: S101
            found = self._decode_us[decodes] = self._decode.us(decodes)
        return found

    def _fitting(self, us: float) -> int:
        """The most tokens that take no longer even as one prompt, in whole pages; the fewest that SGLang runs else."""
        assert self.times is not None  # noqa: S101
        found = self.times.most_alike(us) or self.times.sizes[0]
        return min(max(found // self._align * self._align, self._align), self.chunk)


def _within(new: Sequence[int], tokens: int, chunk: int) -> list[int]:
    """Of prompts of so many tokens, more than a chunk, those that a batch of a chunk has; the last one is cut."""
    count = len(new)
    while tokens > chunk:
        count -= 1
        tokens -= new[count]
    return [*new[:count], chunk - tokens] if tokens < chunk else list(new[:count])


def aligned(scheduler: object) -> int:
    """What a scheduler rounds a cut prompt down to: whole pages, and blocks of a deterministic attention."""
    page, block = (int(getattr(scheduler, name, None) or 1) for name in ("page_size", "truncation_align_size"))
    return lcm(page, block)
