"""Continuous batching in counts: the rules of `kpolicy.scheduling.batching.Batcher` without tokens or block tables.

Decode rows first, then prompt chunks under the token budget in order of arrival; when blocks run out the request
admitted last is computed again later. On top of `Batcher`: prompts that begin with cached blocks start behind them,
and decode rows may verify drafts. Where both can run a trace they make the same steps (tests/simulate).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from kpolicy.errors import ConfigError
from kpolicy.scheduling.batching import MOST_STEPS_AHEAD, step_facts
from kpolicy.scheduling.gap_tail import GapTail
from kpolicy.scheduling.line import Line, in_line
from kpolicy.scheduling.pace import EnginePace
from kpolicy.scheduling.token_gaps import TokenGaps
from kpolicy.settings import Settings
from kpolicy.shapes import NO_FACTS, BatchNumbers, BatchShape
from kpolicy.simulate.blocks import Blocks
from kpolicy.simulate.drafts import DraftedRows, Drafts
from kpolicy.simulate.requests import Request
from kpolicy.simulate.rows import PlainRows

__all__ = ["Completed", "Queue", "Step"]


class Step(NamedTuple):
    """One step's rows."""

    numbers: BatchNumbers
    chunks: list[tuple[Request, int, int]]
    """(request, new prompt tokens, tokens before them)"""

    def shape(self) -> BatchShape:
        """The batch for people and logs."""
        numbers = self.numbers
        return BatchShape(
            decodes=((numbers.query_len, numbers.num_decodes),) if numbers.num_decodes else (),
            prefills=[(new, start) for _, new, start in self.chunks],
            decode_kv_tokens=numbers.decode_kv_tokens if numbers.num_decodes else None,
            max_kv_len=numbers.max_kv_len,
            max_decode_steps=numbers.max_decode_steps,
            facts=numbers.facts,
        )


class Completed(NamedTuple):
    """What a step changed."""

    first_tokens: list[Request]
    """Requests whose prompt was finished, so that a token came out."""
    finished: list[Request]


class Queue:
    """The scheduler of one rank. `add`, then `next_step` and `complete` in turn.

    Args:
        settings: most requests and tokens a step, and drafts a row.
        num_blocks: KV blocks.
        block_size: tokens of a block.
        steps_ahead: most decode steps offered beside a prefill; 1 with drafts, whose rows need the host each step.
        prefix_block: prompt tokens that one hash id stands for; 0 reuses no prefix.
        drafts: how many drafts are accepted; None without speculation.
        seed: of the draws.
    """

    def __init__(
        self, settings: Settings, *, num_blocks: int, block_size: int = 16, steps_ahead: int = MOST_STEPS_AHEAD,
        prefix_block: int = 512, drafts: Drafts | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        if prefix_block % block_size:
            raise ConfigError(
                f"a hash id stands for {prefix_block} tokens, which isn't a whole number of KV blocks of {block_size}; "
                "choose a block size that divides it, or reuse no prefixes."
            )
        self.settings = settings
        self.block_size = block_size
        self.prefix_block = prefix_block
        self.blocks = Blocks(num_blocks, max(prefix_block // block_size, 1))
        self.rows: PlainRows | DraftedRows
        if drafts is None or not settings.num_speculative_tokens:
            self.rows = PlainRows(block_size)
        else:
            self.rows = DraftedRows(block_size, settings.num_speculative_tokens, drafts, seed)
        self.steps_ahead = steps_ahead
        self.most_reqs = min(settings.max_num_reqs, settings.max_num_tokens // self.rows.query_len)
        """A decode row takes part in every step, so no more are admitted than one step's tokens hold."""
        self.waiting: deque[Request] = deque()
        self.prefilling: list[Request] = []
        self.pace: EnginePace | None = None
        """What says how many tokens a step may have beside decodes; None leaves the limit"""
        self.gap_tail: GapTail | None = None
        """The longest gaps so far; None tells nobody"""
        self.token_gaps = TokenGaps()
        self.num_preemptions = 0
        self.looked_up_tokens = self.reused_tokens = 0
        """Prompt tokens of requests, each once, and those found in the cache when it was first admitted.

        What a preemption computes again is in neither: it would find its own blocks, which says nothing of the trace.
        """
        self._admissions = 0
        self._now_us = 0.0

    # What there is

    @property
    def idle(self) -> bool:
        return not self.rows.rows and not self.prefilling and not self.waiting

    @property
    def num_running(self) -> int:
        return len(self.rows.rows) + len(self.prefilling)

    @property
    def capacity(self) -> int:
        """KV tokens in all."""
        return self.blocks.num_blocks * self.block_size

    @property
    def used_tokens(self) -> int:
        """KV tokens in blocks that requests hold."""
        return (self.blocks.num_blocks - self.blocks.available) * self.block_size

    def fits(self, request: Request) -> bool:
        """Whether the request can ever be served. Its last token needs no KV entry, its last drafts do."""
        most = request.prompt_tokens + request.output_tokens - 1
        if request.output_tokens > 1:
            most += self.rows.query_len - 1
        return most <= self.capacity

    def add(self, request: Request) -> None:
        """Queue a request that fits."""
        self.waiting.append(request)

    # The next step

    def next_step(self, now_us: float) -> Step | None:
        """The next step's rows, or None when there is nothing to run.

        Args:
            now_us: the clock, for requests that have to give way.
        """
        self._now_us = now_us
        before = self.num_preemptions
        self._enter_blocks()
        num_decodes = len(self.rows.rows)
        budget = self.settings.max_num_tokens - num_decodes * self.rows.query_len
        # What was preempted for want of blocks doesn't come back in the same step.
        admit = self.num_preemptions == before
        if self.pace is not None and num_decodes and budget > 0 and self._can_take(admit=admit):
            budget = min(budget, self._paced(self.pace, num_decodes, budget))
        chunks = self._chunks(budget, admit=admit) if self.prefilling or self.waiting else []
        while not num_decodes and not chunks and len(self.prefilling) > 1:
            # Half-computed prompts hold all blocks: the last one gives way, so that the first can finish.
            self._preempt(self.prefilling[-1])
            chunks = self._chunks(budget, admit=False)
        if not num_decodes and not chunks:
            return None
        return Step(self._numbers(chunks), chunks)

    def _paced(self, pace: EnginePace, num_decodes: int, room: int) -> int:
        """Prompt tokens that the step may have by its costs."""

        def line() -> Line:
            prompts = itertools.chain(self.prefilling, self.waiting)
            left = ((request.until - request.computed, request.computed) for request in prompts)
            places = len(self.prefilling) + self.most_reqs - self.num_running
            return in_line(left, total, room, places, self.rows.kv_tokens)

        total = len(self.prefilling) + len(self.waiting)
        first = (self.prefilling or self.waiting)[0]
        return pace.prompt_tokens((first.index, first.preempted), num_decodes, total, line)

    def _can_take(self, *, admit: bool) -> bool:
        """Whether a prompt can be in the next step: a pace's answer stands for some steps of those alone."""
        free = self.blocks.available
        if admit and self.waiting and free and self.num_running < self.most_reqs:
            return True
        return any(free or request.blocks * self.block_size > request.computed for request in self.prefilling)

    def _enter_blocks(self) -> None:
        """Give every decode row the blocks that its next tokens need; where none is left somebody gives way."""
        rows, blocks = self.rows, self.blocks
        needed = rows.needed(rows.counter)
        if not needed or blocks.take(needed):
            return
        entered: set[int] = set()
        for order, request in list(rows.rows.items()):
            if order not in rows.rows:
                continue
            count = rows.needs(request)
            while not blocks.take(count):
                last = max((*rows.rows.values(), *self.prefilling), key=lambda each: each.admitted)
                self._preempt(last, entered=last.order in entered and rows.rows.get(last.order) is last)
                if last is request:
                    break
            else:
                if count:
                    entered.add(order)

    def _chunks(self, budget: int, *, admit: bool) -> list[tuple[Request, int, int]]:
        """Prompt chunks in order of admission, then of arrival, while budget, rows and blocks last."""
        chunks = []
        for request in self.prefilling:
            new = self._allot(request, min(request.until - request.computed, budget))
            if new:
                chunks.append((request, new, request.computed))
                budget -= new
        while admit and self.waiting and budget > 0 and self.num_running < self.most_reqs:
            request = self.waiting[0]
            self._reuse(request)
            new = self._allot(request, min(request.until - request.computed, budget))
            if not new:
                self._forget(request)
                break
            self._admissions += 1
            request.admitted = self._admissions
            if not request.preempted:
                self.looked_up_tokens += request.prompt_tokens
                self.reused_tokens += request.computed
            self.prefilling.append(self.waiting.popleft())
            chunks.append((request, new, request.computed))
            budget -= new
        return chunks

    def _reuse(self, request: Request) -> None:
        """Start behind the cached blocks that the prompt begins with; its last token is always computed."""
        if self.prefix_block and request.hash_ids:
            most = (min(request.prompt_tokens, request.until - 1)) // self.prefix_block
            request.held = self.blocks.match(request.hash_ids, most)
            request.computed = len(request.held) * self.prefix_block
            request.blocks = len(request.held) * self.blocks.per_hash

    def _forget(self, request: Request) -> None:
        """Give back what a request holds; nothing of it is computed any more."""
        self.blocks.release(request.blocks - len(request.held) * self.blocks.per_hash, request.held)
        request.blocks = request.computed = 0
        request.held = []

    def _allot(self, request: Request, new: int) -> int:
        """Give a request blocks for `new` more tokens; as many tokens as the blocks that can be had hold."""
        size = self.block_size
        new = min(new, (request.blocks + self.blocks.available) * size - request.computed)
        if new <= 0:
            return 0
        more = -(-(request.computed + new) // size) - request.blocks
        if more > 0:
            self.blocks.take(more)
            request.blocks += more
        return new

    def _preempt(self, request: Request, *, entered: bool = False) -> None:
        """Take a request's blocks; it waits at the head of the queue and is computed again with what it generated."""
        waited_us = 0.0
        if self.rows.rows.get(request.order) is request:
            self.rows.leave(request, entered=entered)
            waited_us = self.token_gaps.leave(request.index)
        else:
            self.prefilling = [each for each in self.prefilling if each is not request]
        self._forget(request)
        request.until = request.prompt_tokens + request.generated
        request.preempted += 1
        if request.generated and request.last_us < 0:
            request.last_us = self._now_us - waited_us
        self.num_preemptions += 1
        self.waiting.appendleft(request)

    @property
    def decode_numbers(self) -> BatchNumbers:
        """The next step's numbers where decode rows go on alone."""
        return self._numbers([])

    def _numbers(self, chunks: list[tuple[Request, int, int]]) -> BatchNumbers:
        rows = self.rows
        num_decodes, q = len(rows.rows), rows.query_len
        tokens = num_decodes * q
        if not chunks:
            return BatchNumbers(
                num_decodes, q, rows.kv_tokens, tokens, 0, 0, 0, 0, q, rows.longest, 0, 0, 0, 1, tokens, num_decodes, q
            )
        prefill_tokens = prefill_kv = pairs = first_chunks = longest = longest_kv = 0
        for _, new, start in chunks:
            end = start + new
            prefill_tokens += new
            prefill_kv += end
            pairs += new * start + new * (new + 1) // 2
            if not start:
                first_chunks += 1
            if new > longest:
                longest = new
            if end > longest_kv:
                longest_kv = end
        steps, decode_q, facts = 1, 0, NO_FACTS
        if num_decodes:
            decode_q = q
            if isinstance(rows, PlainRows) and self.steps_ahead > 1:
                facts = self._facts()
                steps = self._reserved_steps(rows)
            longest, longest_kv = max(longest, q), max(longest_kv, rows.longest)
        return BatchNumbers(
            num_decodes, decode_q, rows.kv_tokens, tokens, len(chunks), prefill_tokens, prefill_kv, pairs, longest,
            longest_kv, first_chunks, 0, 0, steps, tokens + prefill_tokens, num_decodes + len(chunks), decode_q, facts,
        )  # fmt: skip

    def _facts(self) -> Mapping[str, Any]:
        """Requests that wait for a place among the step's tokens only, and the longest gaps."""
        # Mostly nobody waits.
        needed = (-(-request.until // self.block_size) for request in self.waiting) if self.waiting else ()
        tail_us = None if self.gap_tail is None else self.gap_tail.told()
        return step_facts(needed, self.blocks.available, self.most_reqs - self.num_running, tail_us)

    def _reserved_steps(self, rows: PlainRows) -> int:
        """Decode steps that have KV for all rows, reserved here; no row runs out of tokens to generate within them."""
        most = min(self.steps_ahead, rows.next_end - rows.counter)
        steps, taken = rows.reserve(most, self.blocks.available)
        self.blocks.take(taken)
        return steps

    # After the step

    def advance(self, steps: int) -> list[Request]:
        """Decode rows alone have run that many steps, and have the blocks for them; those that are done leave."""
        finished = self.rows.advance(steps)
        for request in finished:
            self._forget(request)
        return finished

    def complete(self, step: Step, decode_steps: int) -> Completed:
        """Take a step in: its decode rows have run `decode_steps` times, its chunks are computed."""
        # Rows that join now weren't part of it, so the counter moves first.
        finished = self.rows.advance(decode_steps) if step.numbers.num_decodes else []
        first_tokens: list[Request] = []
        for request, new, start in step.chunks:
            request.computed = start + new
            if request.hash_ids and self.prefix_block:
                self._publish(request, start)
            if request.computed == request.until:
                request.generated += 1
                first_tokens.append(request)
        if len(first_tokens) == len(self.prefilling):
            self.prefilling = []
        elif first_tokens:
            gone = set(map(id, first_tokens))
            self.prefilling = [request for request in self.prefilling if id(request) not in gone]
        for request in finished:
            self._forget(request)
        for request in first_tokens:
            if request.generated < request.output_tokens:
                self.rows.join(request)
            else:
                finished.append(request)
                self._forget(request)
        return Completed(first_tokens, finished)

    def _publish(self, request: Request, before: int) -> None:
        """Cache the whole prompt blocks that were computed since `before`."""
        size, hash_ids = self.prefix_block, request.hash_ids
        until = min(request.computed, request.prompt_tokens) // size
        for i in range(before // size, min(until, len(hash_ids))):
            if self.blocks.publish(hash_ids[i]):
                request.held.append(hash_ids[i])
