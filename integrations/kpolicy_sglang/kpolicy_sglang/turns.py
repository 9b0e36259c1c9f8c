"""How many prompt tokens a step may have while decodes run, by what both take.

SGLang runs prompts as long as any wait, a whole chunk a step, and no decode meanwhile. Here decodes have their turn
after each such step, and the prompts of a step take no longer than leaves decodes their share of the time.

A decode step costs much the same with few rows as with many, so that one for few rows holds up prompts that would have
made it larger. The time between two decode steps is therefore longer, the fewer of the rows run that could: with half
of them it is twice as long. At a share of a fifth a burst of prompts is served at most a sixteenth slower for it.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

from kpolicy_sglang.state import State

__all__ = ["Turns"]

_STEP = 512
"""Prompt tokens between the sizes that are tried where nothing is captured."""
_RATE = 0.8
"""Of the most tokens a microsecond: a step for a decode share is never so small that it serves fewer."""


class Turns:
    """See the module's docstring.

    Args:
        state: what kpolicy knows of the model runner.
        chunk: SGLang's most prompt tokens of a step; 0 where prompts aren't cut, and nothing is limited.
        share: whether decodes have a share; not where SGLang was given an interval of its own.
    """

    def __init__(self, state: State, chunk: int, *, share: bool = True) -> None:
        self.chunk = chunk
        prefill, decode = state.prefill, state.decode
        known = bool(chunk and prefill is not None and prefill.costs is not None)
        self._gap_us = state.config.gap_ms * 1e3 if known and state.config.gap_ms is not None else None
        shared = share and known and decode is not None and decode.costs is not None
        self._share = state.config.decode_share if shared else 0.0
        self._per_decode = 1 / self._share - 1 if self._share else 0.0
        """Time of prompts for a decode step's."""
        self._decode = decode
        self._decode_us: dict[int, float] = {}
        self._cut = not state.prefix_is_eager
        """Whether a prompt may be cut: the rest of it would lose its graph otherwise."""
        self._sizes: list[int] = []
        self._us: list[float] = []
        self._least = self.limit = chunk
        """`limit` has most prompt tokens of a step by the limit on gaps alone, for steps with decodes in them."""
        if known and prefill is not None:
            self._sizes = sorted({*(s for s in prefill.sizes if s < chunk), *range(_STEP, chunk, _STEP), chunk})
            # A larger size that takes less makes the smaller ones no better.
            self._us = list(accumulate((prefill.us(size) for size in self._sizes), max))
            rates = [size / max(us, 1e-9) for size, us in zip(self._sizes, self._us, strict=True)]
            if self._gap_us is not None:
                self.limit = self._fitting(self._gap_us)
            self._least = next(
                size for size, rate in zip(self._sizes, rates, strict=True) if rate >= _RATE * max(rates)
            )

    @property
    def on(self) -> bool:
        """Whether decodes have turns."""
        return self._gap_us is not None or self._share > 0

    def tokens(self, decodes: int, most_decodes: int) -> int:
        """Prompt tokens of a step.

        Args:
            decodes: rows that decode now, at least one.
            most_decodes: rows that would, were all that wait let in.
        """
        if not (self._share and self._cut):
            return self.limit
        wait_us = self._per_decode * self.decode_us(decodes)
        if most_decodes > decodes:
            wait_us *= most_decodes / decodes
        return min(max(self._least, self._fitting(wait_us)), self.limit)

    def _fitting(self, us: float) -> int:
        """The most tokens that take no longer; the smallest size where none does."""
        return self._sizes[max(bisect_right(self._us, us) - 1, 0)]

    def decode_us(self, decodes: int) -> float:
        """Microseconds of a decode step, looked up once a number of rows."""
        found = self._decode_us.get(decodes)
        if found is None:
            assert self._decode is not None  # noqa: S101
            found = self._decode_us[decodes] = self._decode.us(decodes)
        return found
