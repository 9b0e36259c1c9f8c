"""What waits in a scheduler's queue, as it was when it was last looked at.

Of many prompts the first are looked at, and the others taken to be like them. A decode step changes nothing of it:
while as many could run, or others came behind as many as are looked at, and the same ones are the first and the last
that were, what was worked out before it stands for the batch after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["Waiting", "done"]

_LOOKED = 8
_NONE = (0,) * _LOOKED


class Waiting:
    """See the module's docstring.

    Args:
        chunk: SGLang's most prompt tokens of a step.
        burst: tokens above which what could run is a burst.
    """

    def __init__(self, chunk: int, burst: int) -> None:
        self._chunk, self._burst = chunk, burst
        self._in_cache: Callable[[Sequence[Any]], list[int]] = self._first_in_cache
        """Tokens of each request that SGLang has found in its cache, or that are in KV already."""
        self._whole: Callable[[Sequence[Any]], list[int]] = self._first_whole
        """Tokens of each request of which it has found none."""
        self.longest = 0
        """Most tokens of a prompt that was looked at."""
        self.at_most = 0
        """Tokens that `counts` counts no more than."""
        self.first: Any = None
        """The first request of the queue as it was looked at, or the one under way where it was empty; None where no
        request is held."""
        self._could = -1
        self._cut: Any = None
        self._done = self._left = 0
        """Tokens of the prompt under way that are in KV, and that aren't."""
        self._looked: Sequence[Any] = ()
        self._lengths: list[int] = []
        self._tokens = 0
        """Of all that were looked at."""
        self._cached: Sequence[int] | None = None
        """Tokens of each that SGLang has found in its cache; None where that has to be looked at."""
        self._in_kv = 0
        """Of all of those."""
        self.known: tuple[list[int], int, int, int] | None = None
        """`batch`, where it was worked out."""

    def forget(self) -> None:
        """Hold no request any more."""
        self._could, self.first, self._cut, self._looked = -1, None, None, ()

    def is_of(self, could: int, queue: Sequence[Any], cut: Any) -> bool:
        """Whether this is what waits, if `first` is the first that could: as many could, and of these none has left.

        Where as many were looked at as ever are, some may have come behind them, or left there, if it makes no burst.
        """
        looked = self._looked
        if cut is not self._cut:
            return False
        if could != self._could:
            if len(looked) < _LOOKED or could < _LOOKED or self._could < 0:
                return False
            self._could = could
            # As many as are looked at or more, before and now.
            self.at_most = self._tokens * could // _LOOKED + (0 if cut is None else self._chunk)
            if self.at_most > self._burst:
                return False
        # One that left from among them has another come after it.
        return not looked or queue[len(looked) - 1] is looked[-1]

    def look(self, could: int, queue: Sequence[Any], cut: Any) -> int:
        """Look at what waits: tokens of the longest prompt of it, but for the one under way.

        Args:
            could: how many of the queue could run.
            queue: SGLang's.
            cut: the prompt under way, if there is one.
        """
        looked = queue[: could if could < _LOOKED else _LOOKED]
        # Most often SGLang has found nothing of any, which takes less to see than how much of each.
        lengths = self._whole(looked) if looked else []
        whole = len(lengths) == len(looked)
        if not whole:
            lengths = [len(each.origin_input_ids) for each in looked]
        tokens, longest = sum(lengths), max(lengths) if lengths else 0
        self.at_most = tokens if could <= _LOOKED else tokens * could // _LOOKED
        if cut is None:
            self.known = (lengths, 0, tokens, longest) if whole else None
        else:
            self.known, self._done = None, done(cut)
            self._left = len(cut.origin_input_ids) - self._done
            self.at_most += self._chunk
        self._lengths, self._tokens, self.longest = lengths, tokens, longest
        self._cached, self._in_kv = _NONE if whole else None, 0
        self._could, self.first, self._cut, self._looked = could, queue[0] if queue else cut, cut, looked
        return longest

    def asked(self) -> None:
        """SGLang was asked for a batch and had none, and may have found more in its cache."""
        self._cached = self.known = None
        if self._cut is not None:
            self._could = -1

    def counts(self) -> tuple[int, int, Sequence[int]]:
        """(prompts, their tokens near enough, those of the first prompts) that wait and could run.

        Of a prompt that has more than a chunk left one chunk is seen, with what comes before it, and nothing behind it.
        Cached tokens are taken off where SGLang has looked for them already, but for how long prompts are.
        """
        chunk, could, lengths = self._chunk, self._could, self._lengths
        before = tokens = 0
        if self._cut is not None:
            before, tokens = 1, self._left
            if tokens > chunk:
                return 1, chunk, (chunk,)
        if not lengths:
            return before, tokens, ()
        cached = self._found() if self._cached is None else self._cached
        looked = len(lengths)
        if self.longest <= chunk:
            found = self._tokens - self._in_kv
        else:
            found = 0
            for each, (length, in_kv) in enumerate(zip(lengths, cached, strict=False)):
                left = length - in_kv
                if left > chunk:
                    return max(before + each, 1), max(tokens + found, chunk), (chunk,)
                found += left
        return before + could, tokens + (found if could == looked else found * could // looked), lengths

    def alone(self, request: Any) -> tuple[int, Sequence[int]]:
        """(tokens, length) of the only prompt that waits, which none is under way beside, as `counts` has them."""
        length, chunk = len(request.origin_input_ids), self._chunk
        left = length - self._in_cache((request,))[0]
        return (chunk, (chunk,)) if left > chunk else (left, (length,))

    def batch(self) -> tuple[list[int], int, int, int]:
        """Of the first prompts of a batch of what waits: tokens of each, what the very first has in KV, all, the most.

        `known` until it is looked at again.
        """
        new, before, tokens, longest = self._lengths, 0, self._tokens, self.longest
        cached = self._found() if self._cached is None else self._cached
        if self._in_kv:
            new = [length - in_kv for length, in_kv in zip(new, cached, strict=False)]
            tokens, longest = sum(new), max(new)
        if self._cut is not None:
            before, left = self._done, self._left
            new, tokens, longest = [left, *new], tokens + left, max(left, longest)
        self.known = new, before, tokens, longest
        return self.known

    def _found(self) -> Sequence[int]:
        """Look at what SGLang has found in its cache."""
        self._cached = found = self._in_cache(self._looked)
        self._in_kv = sum(found)
        return found

    def _first_in_cache(self, requests: Sequence[Any]) -> list[int]:
        if not requests:
            return []
        self._in_cache = _in_cache(requests[0])
        return self._in_cache(requests)

    def _first_whole(self, requests: Sequence[Any]) -> list[int]:
        self._whole = _whole(requests[0])
        return self._whole(requests)


def done(request: Any) -> int:
    """Prompt tokens of a request that are in KV: 0.5.16 has their slots, 0.5.23 their number."""
    number = getattr(request, "prefix_len", None)
    if number is None:
        slots = request.prefix_indices
        # Tensors on 0.5.16, whose `len` takes five times as long.
        number = slots.numel() if hasattr(slots, "numel") else len(slots)
    return number


def _in_cache(request: Any) -> Callable[[Sequence[Any]], list[int]]:
    """What counts the tokens in KV of each of requests such as this one, in one call: many may wait."""
    if hasattr(request, "prefix_len"):
        return lambda requests: [each.prefix_len for each in requests]
    if hasattr(request, "last_node") and hasattr(request.prefix_indices, "numel"):
        # Where SGLang hasn't looked yet there is no node, which is asked in a third of the time.
        return lambda requests: [each.prefix_indices.numel() if each.last_node is not None else 0 for each in requests]
    return lambda requests: [len(each.prefix_indices) for each in requests]


def _whole(request: Any) -> Callable[[Sequence[Any]], list[int]]:
    """Likewise the tokens of each request of which none are; of no request where the first has some."""
    if hasattr(request, "prefix_len"):
        return lambda requests: (
            [] if requests[0].prefix_len else [len(each.origin_input_ids) for each in requests if not each.prefix_len]
        )
    if hasattr(request, "last_node"):
        return lambda requests: (
            [len(each.origin_input_ids) for each in requests if each.last_node is None]
            if requests[0].last_node is None
            else []
        )
    return lambda _: []
