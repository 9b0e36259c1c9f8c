"""When decode rows get their tokens, and how far apart.

A step that is one launch brings its tokens at its end. Of one in halves the decode half may be done long before the
prompt half, and may be several decode steps: their tokens are there one after the other until that half's end, and
what the prompt half takes beyond it is in the gap to the next token.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["TokenGaps"]


class TokenGaps:
    """Gaps between the tokens of rows that decode in every step until they end.

    Attributes:
        waited_us: what the last step went on after the decode rows' last token: the next gap has it in it, of rows that
            were in that step.
    """

    __slots__ = ("_joined", "waited_us")

    def __init__(self) -> None:
        self.waited_us = 0.0
        self._joined: set[int] = set()
        """Requests whose token came at the last step's end, and that decode from the next one on"""

    def step(self, us: float, num_rows: int, steps: int = 1, after_us: float = 0.0) -> list[tuple[float, int]]:
        """[(gap in microseconds, how many of them)] of a step.

        Args:
            us: from the end of the step before to this one's.
            num_rows: its decode rows.
            steps: decode steps in it, which take alike.
            after_us: of `us`, what came after the last decode step.
        """
        waited, after_us = self.waited_us, min(after_us, us)
        self.waited_us = after_us
        each = (us - after_us) / steps
        joined = min(len(self._joined), num_rows)
        self._joined = set()
        if not waited:
            joined = num_rows
        found = [(each, joined + num_rows * (steps - 1))] if joined or steps > 1 else []
        if joined < num_rows:
            found.append((each + waited, num_rows - joined))
        return found

    def join(self, requests: Iterable[int]) -> None:
        """These requests, by index, got a token of their prompt at the step's end, and decode from the next one on."""
        self._joined = {*requests}

    def leave(self, request: int) -> float:
        """A request of the last step, by index, doesn't go on: how long before that step's end its last token came."""
        if request not in self._joined:
            return self.waited_us
        self._joined.discard(request)
        return 0.0
