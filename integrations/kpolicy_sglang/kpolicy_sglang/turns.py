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

from collections.abc import Mapping, Sequence
from math import inf, lcm

from kpolicy_sglang.prompt_times import LONGEST, PromptTimes, mean_length
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
        self.burst = BURST * chunk
        """Tokens above which what could run is a burst."""
        self.on = self._gap_us is not None or bool(state.config.turns and by_cost and not own)
        """Whether decodes have turns."""
        self._decode = decode
        self._decode_us: Mapping[int, float] = decode.known_us if decode is not None else {}
        self._align = align
        self.times: PromptTimes | None = None
        """What batches of prompts take; None where nothing was measured."""
        self.limit = chunk
        """Most prompt tokens of a step while decodes run."""
        if known and prefill is not None:
            self.times = PromptTimes(prefill, chunk, state.long, state.beside)
            if self._gap_us is not None:
                self.limit = self._fitting(self._gap_us)
        self._chunk_us = self.times.usual_us[-1] if self.times is not None else 0.0
        self._start_us = _STARTS * self.times.usual_us[0] if self.times is not None else 0.0
        """What a further batch costs the host"""
        self.long, self._short = inf, chunk
        """Tokens of a prompt above which a batch with it may take too long, and of a batch up to which none does"""
        self._guesses: list[int] = []
        """Of a batch that takes about so long its tokens, by its longest prompt's."""
        if self.on and self._gap_us is None and self.times is not None:
            # With one decode the least is allowed.
            least_us = self.most_us(1) + self._start_us
            self.long, self._short = self.times.most_length(least_us), self.times.most_alike(least_us)
            if self.long < inf:
                # Also where no prompt of a chunk is too long: one that is cut counts with what it has in KV.
                self._guesses = self.times.beside_longest(least_us)
        self._ran: list[tuple[int, Sequence[int], Sequence[int]]] = []
        """Batches since the last decode step, of which nobody has asked yet what they take: of most nobody does.
        SGLang's own lists, which 0.5.16 and 0.5.23 replace and never change."""
        self._settled_us = 0.0
        """What they took, but for `_ran`."""
        self._taken = 0
        self.fresh = True
        """Whether no prompt ran since the last decode step: then none waits for another."""
        self.in_burst = False
        """Whether more than a chunk waits of prompts that go first."""
        self.busy = False
        """Whether a burst has so much left that nothing needs to be looked at before the next batch."""
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
            self.busy = taken < self._look_at
            return False
        if self.fresh:
            return False
        return self._too_long(tokens, new, self._chunk_us + (self._decode_us.get(decodes) or self.decode_us(decodes)))

    def _too_long(self, tokens: int, new: Sequence[int], most_us: float) -> bool:
        """Whether decodes would wait for longer with a batch of so many tokens of such prompts."""
        times = self.times
        assert times is not None  # noqa: S101
        bounds, last = times.bounds, self.chunk
        least_us, furthest_us = bounds[tokens if tokens < last else last]
        waited_us = furthest_waited_us = self._settled_us
        for ran, _, _ in self._ran:
            ran_us, furthest_ran_us = bounds[ran if ran < last else last]
            waited_us += ran_us
            furthest_waited_us += furthest_ran_us
        # How long prompts are only adds: most often what waits is told without it.
        if waited_us + least_us > most_us:
            return True
        if furthest_waited_us + furthest_us <= most_us:
            return False
        if furthest_waited_us + times.us(tokens, max(new) if new else 0) <= most_us:
            return False
        return self.waited_us() + times.us(tokens, mean_length(new)) > most_us

    def most(self, decodes: int, waiting: int, new: Sequence[int], before: int, tokens: int, longest: int) -> int:
        """Most tokens of the next batch of prompts: `limit`, or those of its first prompts where all take too long.

        Outside bursts: in one nobody asks.

        Args:
            decodes: rows that decode now.
            waiting: prompts that wait and could run.
            new: tokens of the first of them in SGLang's order, as many as are known.
            before: tokens that the first one has in KV.
            tokens: of all these prompts.
            longest: tokens of the longest.
        """
        if longest + before <= self.long or (tokens <= self._short and not before):
            return self.limit
        times = self.times
        assert times is not None  # noqa: S101
        # What those behind a batch that ends wait for more, and what that batch may take.
        late_us = (self._decode_us.get(decodes) or self.decode_us(decodes)) + self._start_us
        most_us = self._chunk_us + late_us
        guess = self._guesses[longest // LONGEST if longest < self.chunk else -1]
        # Most often all fit however long they make each other, which takes less to see than what they take.
        if tokens <= guess and not before and times.most_us(tokens, longest) <= most_us:
            return self.limit
        count, kept_tokens, us, more_us = times.first(new, before, tokens, longest, most_us, guess)
        if not more_us:
            return self.limit
        # What running decodes gain against what those behind it lose: often one more prompt tells.
        lost_us = (waiting - count) * late_us
        if decodes * (more_us - us) <= lost_us:
            whole = _within(new, tokens, self.chunk) if tokens > self.chunk else new
            if count == len(whole) or decodes * (times.batch_us(whole, before) - us) <= lost_us:
                return self.limit
        if self._align > 1:
            # SGLang takes whole pages off what is left for each prompt.
            kept_tokens = sum([-(-each // self._align) * self._align for each in new[:count]])
        return kept_tokens if kept_tokens < self.limit else self.limit

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
        if self.busy or self.times is None:
            self.prefilled_in_burst(tokens)
            return
        self.fresh = False
        self._taken += tokens
        self._ran.append((tokens, new, before))

    def waited_us(self) -> float:
        """Microseconds of the prompts since the last decode step."""
        times = self.times
        assert times is not None  # noqa: S101
        for tokens, new, before in self._ran:
            self._settled_us += times.us(tokens, times.length(new, before))
        self._ran.clear()
        return self._settled_us

    def prefilled_in_burst(self, tokens: int) -> None:
        """The same while prompts go first: by its end decodes have waited for long, whatever each batch took."""
        self.fresh = False
        self._taken += tokens
        self.busy = self._taken < self._look_at
        self._settled_us += self._chunk_us

    def decoded(self) -> None:
        """Decodes run, or nothing does."""
        self._taken = self._size = self._look_at = 0
        self._settled_us = 0.0
        self._ran.clear()
        self.fresh, self.in_burst, self.busy = True, False, False

    def most_us(self, decodes: int) -> float:
        """Microseconds that running decodes wait for, outside bursts: a chunk of usual prompts and a decode step."""
        return self._chunk_us + self.decode_us(decodes)

    def decode_us(self, decodes: int) -> float:
        """Microseconds of a decode step."""
        assert self._decode is not None  # noqa: S101
        return self._decode.us(decodes)

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
