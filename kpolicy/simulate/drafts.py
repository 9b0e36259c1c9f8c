"""Decode rows that verify drafts: how many tokens each step brings is drawn once, when a row joins.

A draft is accepted with the same probability as every other, if all before it were. The draws belong to a request and
the seed alone, so every policy meets the same ones. What a row will add to each later step (tokens, KV, blocks) is put
into arrays over the counter at once, and a step reads its place in them.
"""

from __future__ import annotations

from numbers import Real
from typing import TYPE_CHECKING, Any

import attrs

from kpolicy.errors import ConfigError
from kpolicy.simulate.requests import Request

if TYPE_CHECKING:
    import numpy as np

    Ints = np.ndarray[Any, np.dtype[np.int64]]

__all__ = ["DraftedRows", "Drafts", "drawn"]


@attrs.frozen(kw_only=True)
class Drafts:
    """Speculative decoding; how many tokens are drafted is `Settings.num_speculative_tokens`.

    Args:
        acceptance: probability that a draft is accepted, if all before it were.
        draft_us: time of drafting for one step, which nothing overlaps.

    Raises:
        ConfigError: the probability isn't from 0 to 1, or the time is negative or not finite.
    """

    acceptance: float = 0.7
    draft_us: float = 0.0

    def __attrs_post_init__(self) -> None:
        if not (isinstance(self.acceptance, Real) and 0 <= self.acceptance <= 1):
            raise ConfigError(f"acceptance is {self.acceptance!r:.80}; it is a probability from 0 to 1.")
        if not (isinstance(self.draft_us, Real) and 0 <= self.draft_us < 1e9):
            raise ConfigError(f"draft_us is {self.draft_us!r:.80}; it is microseconds from 0 up.")


def drawn(seed: int, request: Request, num_drafts: int, acceptance: float) -> Ints:
    """[steps] Tokens that each verifying step brings a request until it has all of its tokens."""
    import numpy as np

    left = request.output_tokens - request.generated
    random = np.random.default_rng((seed, request.index, request.preempted))
    parts: list[Ints] = []
    while left > 0:
        accepted = random.random((min(left, 4096), num_drafts)) < acceptance
        tokens = 1 + np.cumprod(accepted, axis=1).sum(axis=1, dtype=np.int64)
        total = np.cumsum(tokens)
        steps = int(np.searchsorted(total, left)) + 1
        if steps <= len(tokens):
            tokens = tokens[:steps]
            tokens[-1] -= int(total[steps - 1]) - left
            left = 0
        else:
            left -= int(total[-1])
        parts.append(tokens)
    return np.concatenate(parts)


class _Planned:
    """What one row does at each of its steps."""

    __slots__ = ("blocks", "kv", "new_blocks", "tokens")

    def __init__(self, tokens: Ints, start: int, query_len: int, had: int, block_size: int) -> None:
        import numpy as np

        self.tokens = tokens
        self.kv = start + query_len + np.concatenate(([0], np.cumsum(tokens[:-1])))
        """KV tokens attended to"""
        self.blocks = np.maximum(-(-self.kv // block_size), had)
        self.new_blocks = np.diff(self.blocks, prepend=had)


class DraftedRows:
    """Rows that verify the same number of drafts in every step; `PlainRows` says what each method does.

    Args:
        block_size: tokens of a KV block.
        num_drafts: tokens drafted a row and step.
        drafts: how many of them are accepted.
        seed: of the draws.
    """

    def __init__(self, block_size: int, num_drafts: int, drafts: Drafts, seed: int) -> None:
        import numpy as np

        self.block_size = block_size
        self.query_len = 1 + num_drafts
        self.counter = 0
        self.rows: dict[int, Request] = {}
        self._drafts, self._seed = drafts, seed
        self._joined = 0
        self._from = 0
        # By counter less `_from`: blocks that rows need, KV tokens over the step before, and rows by tokens they get.
        self._need: Ints = np.zeros(1024, np.int64)
        self._more: Ints = np.zeros(1024, np.int64)
        self._rows_by_tokens: Ints = np.zeros((1024, self.query_len + 1), np.int64)
        self._ends: dict[int, list[int]] = {}
        self.kv_tokens = 0

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def longest(self) -> int:
        return max((int(_plan(row).kv[self.counter - row.joined]) for row in self.rows.values()), default=0)

    def join(self, request: Request) -> None:
        counter = self.counter
        tokens = drawn(self._seed, request, self.query_len - 1, self._drafts.acceptance)
        plan = _Planned(tokens, request.until, self.query_len, request.blocks, self.block_size)
        request.order, request.joined, request.start = self._joined, counter, request.until
        request.end = counter + len(tokens)
        request.drafted = plan
        self._joined += 1
        self.rows[request.order] = request
        self._ends.setdefault(request.end, []).append(request.order)
        self._put(plan, counter, 0, 1)
        self.kv_tokens += int(plan.kv[0])

    def leave(self, request: Request, *, entered: bool = False) -> None:
        plan, step = _plan(request), self.counter - request.joined
        del self.rows[request.order]
        self._put(plan, self.counter, step, -1)
        done = step >= len(plan.tokens)
        self.kv_tokens -= int(plan.kv[-1 if done else step])
        request.generated += int(plan.tokens[:step].sum())
        if step or entered:
            request.blocks = int(plan.blocks[step if entered else step - 1])
        if not done:
            self._ends[request.end].remove(request.order)
        request.drafted = None

    def needed(self, counter: int) -> int:
        return int(self._need[counter - self._from])

    def needs(self, request: Request) -> int:
        """Blocks that the row needs for the next step."""
        return int(_plan(request).new_blocks[self.counter - request.joined])

    def advance(self, steps: int) -> list[Request]:
        finished: list[Request] = []
        for _ in range(steps):
            self.counter += 1
            done = [self.rows[order] for order in self._ends.pop(self.counter, ())]
            # Rows that go on attend to what they were given in the step that ran.
            self._make_room(1)
            self.kv_tokens += int(self._more[self.counter - self._from])
            for request in done:
                self.leave(request)
            finished += done
        return finished

    def emitted(self) -> tuple[tuple[int, int], ...]:
        """(tokens a row, rows) of the step that ran."""
        by_tokens = self._rows_by_tokens[self.counter - self._from].tolist()
        return tuple((tokens, rows) for tokens, rows in enumerate(by_tokens) if tokens and rows)

    def joined(self) -> tuple[tuple[int, int], ...]:
        """`emitted` of the rows alone for which the step is the first."""
        found: dict[int, int] = {}
        for row in reversed(self.rows.values()):
            if row.joined != self.counter:
                break
            tokens = int(_plan(row).tokens[0])
            found[tokens] = found.get(tokens, 0) + 1
        return tuple(sorted(found.items()))

    def _put(self, plan: _Planned, counter: int, step: int, sign: int) -> None:
        """Add, or take away, what the row does from that step of its own on."""
        import numpy as np

        steps = len(plan.tokens) - step
        if steps <= 0:
            return
        self._make_room(steps + 1)
        first = counter - self._from
        self._need[first : first + steps] += sign * plan.new_blocks[step:]
        # What a step adds to KV shows at the next one; after its last step the row isn't there.
        self._more[first + 1 : first + steps] += sign * plan.tokens[step:-1]
        self._rows_by_tokens[np.arange(first, first + steps), plan.tokens[step:]] += sign

    def _make_room(self, steps: int) -> None:
        """Arrays that reach so many counters beyond this one."""
        import numpy as np

        passed = self.counter - self._from
        if passed + steps < len(self._need):
            return
        size = max(1024, 2 * steps)

        def moved(array: Ints) -> Ints:
            grown = np.zeros((max(size, 2 * (len(array) - passed)), *array.shape[1:]), np.int64)
            grown[: len(array) - passed] = array[passed:]
            return grown

        self._need, self._more = moved(self._need), moved(self._more)
        self._rows_by_tokens = moved(self._rows_by_tokens)
        self._from = self.counter


def _plan(request: Request) -> _Planned:
    plan = request.drafted
    assert isinstance(plan, _Planned)  # noqa: S101 - set when it joined
    return plan
