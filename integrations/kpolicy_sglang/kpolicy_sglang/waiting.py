"""What waits in a scheduler's queue, as it was when it was last looked at.

Of many prompts the first are looked at, and the others taken to be like them. A decode step changes nothing of it:
while as many could run and the same ones are the first and the last that were looked at, what was worked out before it
stands for the batch after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["Waiting", "done"]

_LOOKED = 8


class Waiting:
    """See the module's docstring.

    Args:
        chunk: SGLang's most prompt tokens of a step.
    """

    def __init__(self, chunk: int) -> None:
        self._chunk = chunk
        self._in_cache: Callable[[Sequence[Any]], list[int]] | None = None
        self.forget()

    def forget(self) -> None:
        """Hold no request any more."""
        self.holds = False
        """Whether requests are referenced."""
        self.longest = 0
        """Most tokens of a prompt that was looked at."""
        self._could = -1
        self._cut: Any = None
        self._looked: Sequence[Any] = ()
        self._lengths: list[int] = []
        self._cached: int | None = None
        """Tokens that SGLang has found in its cache; None where that has to be looked at."""

    def is_of(self, could: int, queue: Sequence[Any], cut: Any) -> bool:
        """Whether this is what waits: as many could run, the same one is under way, and no other of them has left."""
        if could != self._could or cut is not self._cut:
            return False
        looked = self._looked
        # One that left from among them has another come after it.
        return not looked or (queue[0] is looked[0] and queue[len(looked) - 1] is looked[-1])

    def look(self, could: int, queue: Sequence[Any], cut: Any) -> None:
        """Look at what waits.

        Args:
            could: how many of the queue could run.
            queue: SGLang's.
            cut: the prompt under way, if there is one.
        """
        self.holds, self._could, self._cut = True, -1, cut
        self._looked = looked = queue[: could if could < _LOOKED else _LOOKED]
        self._lengths = lengths = [len(each.origin_input_ids) for each in looked]
        self.longest = max(lengths) if lengths else 0
        self._cached = None
        self._could = could

    def asked(self) -> None:
        """SGLang was asked for a batch and had none, and may have found more in its cache."""
        self._cached = None
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
            before, tokens = 1, len(self._cut.origin_input_ids) - done(self._cut)
            if tokens > chunk:
                return 1, chunk, (chunk,)
        if not lengths:
            return before, tokens, ()
        in_cache = self._found()
        found, self._cached = sum(lengths), sum(in_cache)
        if self.longest <= chunk:
            found -= self._cached
        else:
            found = 0
            for each, (length, cached) in enumerate(zip(lengths, in_cache, strict=True)):
                left = length - cached
                if left > chunk:
                    return max(before + each, 1), max(tokens + found, chunk), (chunk,)
                found += left
        looked = len(lengths)
        return before + could, tokens + (found if could == looked else found * could // looked), lengths

    def batch(self) -> tuple[list[int], int]:
        """Tokens of the first prompts of a batch of what waits, and what the very first has in KV."""
        new, before = self._lengths, 0
        if self._cached is None:
            self._cached = sum(self._found())
        if self._cached:
            new = [length - cached for length, cached in zip(new, self._found(), strict=True)]
        if self._cut is not None:
            before = done(self._cut)
            new = [len(self._cut.origin_input_ids) - before, *new]
        return new, before

    def _found(self) -> list[int]:
        """Tokens of each prompt looked at that SGLang has found in its cache."""
        looked = self._looked
        if not looked:
            return []
        if self._in_cache is None:
            self._in_cache = _in_cache(looked[0])
        return self._in_cache(looked)


def done(request: Any) -> int:
    """Prompt tokens of a request that are in KV: 0.5.16 has their slots, 0.5.23 their number."""
    number = getattr(request, "prefix_len", None)
    return len(request.prefix_indices) if number is None else int(number)


def _in_cache(request: Any) -> Callable[[Sequence[Any]], list[int]]:
    """What counts the tokens in KV of each of requests such as this one, in one call: many may wait."""
    if hasattr(request, "prefix_len"):
        return lambda requests: [each.prefix_len for each in requests]
    # Tensors on 0.5.16, whose `len` takes five times as long.
    if hasattr(request.prefix_indices, "numel"):
        return lambda requests: [each.prefix_indices.numel() for each in requests]
    return lambda requests: [len(each.prefix_indices) for each in requests]
