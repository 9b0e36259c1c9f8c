"""The decode rows of one rank as sums: what a step over all of them costs is known without looking at any of them.

All rows advance together, so time is a counter of decode steps. A row that joins at counter j with its next token at
KV position b attends to ``b - j + 1 + c`` tokens at counter c, needs its next block at one residue of the counter
modulo the block size, and is done at a counter known when it joins. So a step is a few additions however many rows
there are. With drafts a row advances by what its target accepts: `kpolicy.simulate.drafts` draws that when it joins.
"""

from __future__ import annotations

from heapq import heappop, heappush

from kpolicy.simulate.requests import Request

__all__ = ["PlainRows"]

_NEVER = 1 << 62


class PlainRows:
    """Rows of one token a step.

    Args:
        block_size: tokens of a KV block.
    """

    query_len = 1

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.counter = 0
        """The decode step that runs next."""
        self.rows: dict[int, Request] = {}
        """By order of joining."""
        self.entering = [0] * block_size
        """Rows by the residue of the counters at which they need a block."""
        self.ahead: dict[int, list[int]] = {}
        """By counter: how many rows have their block for it already, and which joining order that is below."""
        self.base = 0
        """KV tokens of all rows, less the counter for each."""
        self._joined = 0
        self._ends: list[tuple[int, int]] = []
        self._longest = -_NEVER
        self._longest_known = True

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def kv_tokens(self) -> int:
        """KV tokens that the rows attend to in the next step, the step's own included."""
        return self.base + len(self.rows) * self.counter

    @property
    def longest(self) -> int:
        """The most that one row attends to; 0 without rows."""
        if not self.rows:
            return 0
        if not self._longest_known:
            self._longest = max(row.start - row.joined for row in self.rows.values())
            self._longest_known = True
        return self._longest + 1 + self.counter

    @property
    def next_end(self) -> int:
        """The counter at which the next row is done; far off without rows."""
        ends, rows = self._ends, self.rows
        while ends and ends[0][1] not in rows:
            heappop(ends)
        return ends[0][0] if ends else _NEVER

    def join(self, request: Request) -> None:
        """Add a row whose prompt is computed and whose next token is known."""
        order, counter = self._joined, self.counter
        self._joined += 1
        request.order, request.joined, request.start = order, counter, request.until
        request.end = counter + request.output_tokens - request.generated
        request.enters = counter + request.blocks * self.block_size - request.start
        self.rows[order] = request
        self.entering[request.enters % self.block_size] += 1
        self.base += request.start - counter + 1
        heappush(self._ends, (request.end, order))
        if self._longest_known:
            self._longest = (
                max(self._longest, request.start - counter) if len(self.rows) > 1 else (request.start - counter)
            )

    def leave(self, request: Request, *, entered: bool = False) -> None:
        """Take a row out; its tokens and blocks are its own numbers again.

        Args:
            request: the row.
            entered: whether it got the block that it needs at the current counter.
        """
        counter, size = self.counter, self.block_size
        del self.rows[request.order]
        self.entering[request.enters % size] -= 1
        self.base -= request.start - request.joined + 1
        self._longest_known = self._longest_known and request.start - request.joined < self._longest
        request.generated += counter - request.joined
        needs = request.enters
        if counter > needs:
            passed = (counter - 1 - needs) // size + 1
            request.blocks += passed
            needs += passed * size
        if entered and needs == counter:
            request.blocks += 1
            needs += size
        while needs in self.ahead and request.order < self.ahead[needs][1]:
            self.ahead[needs][0] -= 1
            request.blocks += 1
            needs += size

    def needed(self, counter: int) -> int:
        """Blocks that rows need for the step at that counter, and don't have yet."""
        wanted = self.entering[counter % self.block_size]
        if self.ahead and counter in self.ahead:
            wanted -= self.ahead[counter][0]
        return wanted

    def needed_until(self, counter: int) -> int:
        """Blocks that rows need for the steps before that counter, and don't have yet."""
        rounds, more = divmod(counter - self.counter, self.block_size)
        start = self.counter % self.block_size
        wanted = rounds * len(self.rows) + sum(self.entering[start : start + more])
        if start + more > self.block_size:
            wanted += sum(self.entering[: start + more - self.block_size])
        for at, (had, _) in self.ahead.items():
            # Those of counters before this one have left.
            if at < counter:
                wanted -= had
        return wanted

    def most_needed(self, counter: int) -> int:
        """At least as many as `needed_until` says, without looking: each row enters one in `block_size` steps."""
        return len(self.rows) * ((counter - self.counter) // self.block_size + 1)

    def needs(self, request: Request) -> int:
        """Blocks that the row needs for the next step."""
        counter = self.counter
        if (counter - request.enters) % self.block_size:
            return 0
        return int(not (counter in self.ahead and request.order < self.ahead[counter][1]))

    def reserve(self, most: int, available: int) -> tuple[int, int]:
        """Note that all rows have their blocks for as many steps as there are blocks for: these, and blocks they take.

        Args:
            most: steps at most; the next one's blocks the rows have.
            available: blocks that nobody holds. No step may take more than half of what is left, as reserving ahead
                may not take what another request needs now.
        """
        entering, size, ahead, order = self.entering, self.block_size, self.ahead, self._joined
        left = available
        for counter in range(self.counter + 1, self.counter + most):
            wanted = entering[counter % size]
            if not wanted:
                continue
            noted = ahead.get(counter)
            had = 0 if noted is None else noted[0]
            short = wanted - had
            if short * 2 > left:
                return counter - self.counter, available - left
            if short:
                left -= short
                ahead[counter] = [wanted, order]
        return max(most, 1), available - left

    def advance(self, steps: int) -> list[Request]:
        """Go that many steps on; the rows that are done, in order of joining, have left."""
        self.counter = now = self.counter + steps
        if self.ahead:
            self.ahead = {counter: each for counter, each in self.ahead.items() if counter >= now}
        # Of a row that left before its end too, which is looked at below.
        if not self._ends or self._ends[0][0] > now:
            return []
        done: list[int] = []
        while self.next_end <= now:
            done.append(heappop(self._ends)[1])
        finished = [self.rows[order] for order in sorted(done)]
        for request in finished:
            self.leave(request)
        return finished
