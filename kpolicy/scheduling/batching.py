"""Continuous batching: which rows run in the next step. No torch, no clock; of a policy only its pace.

Decode rows come first, one token each; then prompts, chunked under the token budget, in order of arrival. When KV
blocks run out the request that was admitted last gives its blocks back and is computed again later (preemption by
recomputation). `kpolicy run` and the reference runner batch with this class; the simulator's `Queue` makes the same
steps from counts alone.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from kpolicy.errors import ConfigError
from kpolicy.executors.base import StepInputs, StepOutputs
from kpolicy.scheduling.gap_tail import GapTail
from kpolicy.scheduling.line import Line, in_line
from kpolicy.settings import Settings
from kpolicy.shapes import GAP_TAIL_US, NO_FACTS, WAITING_REQS, BatchNumbers

if TYPE_CHECKING:
    from kpolicy.scheduling.pace import EnginePace

__all__ = ["Batch", "Batcher", "Completion", "Generation", "step_facts"]

MOST_STEPS_AHEAD = 8
"""Decode steps that are offered beside one prefill, at most: each reserves a KV slot a row ahead."""


def step_facts(needed: Iterable[int], free: int, places: int, tail_us: int | None) -> Mapping[str, Any]:
    """What `auto` is told besides counts: how many waiting requests KV and rows are free for, and the longest gaps.

    Args:
        needed: blocks that the prompt of each takes, in order of arrival.
        free: blocks that nobody has.
        places: requests that may run besides those that do.
        tail_us: what `GapTail` says.
    """
    count = 0
    for blocks in needed:
        free -= blocks
        if free < 0 or count >= places:
            break
        count += 1
    if tail_us is None:
        return {WAITING_REQS: count} if count else NO_FACTS
    return {WAITING_REQS: count, GAP_TAIL_US: tail_us} if count else {GAP_TAIL_US: tail_us}


class Generation:
    """One request while it is served.

    Args:
        index: the caller's name for it.
        prompt: its token ids; at least one.
        output_tokens: tokens to generate; at least one.
    """

    __slots__ = (
        "added",
        "admitted",
        "blocks",
        "index",
        "num_computed",
        "num_preempted",
        "num_prompt",
        "output_tokens",
        "tokens",
        "until",
    )

    def __init__(self, index: int, prompt: Sequence[int], output_tokens: int) -> None:
        if not len(prompt) or output_tokens < 1:  # an array of NumPy has no truth value
            raise ConfigError(
                f"request {index} has {len(prompt)} prompt tokens and {output_tokens} to generate; both start at 1. "
                "Drop such requests before they are batched, and count them."
            )
        self.index = index
        self.tokens = array("q", prompt)
        """Prompt and generated token ids: 64-bit numbers, which device libraries take without a copy an element."""
        self.num_prompt = len(self.tokens)
        self.output_tokens = output_tokens
        self.num_preempted = 0
        self.until = self.num_prompt
        """Tokens to compute before it decodes: the prompt, or after a preemption all that was generated too."""
        self.num_computed = 0
        """How many of these are computed. A decode row has all of its tokens but the last one in KV."""
        self.added = False
        """Whether a Batcher has taken it: its state is that one's from then on"""
        self.admitted = 0
        """Its turn of admission; the latest gives way first."""
        self.blocks: list[int] = []

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.num_prompt :].tolist()

    @property
    def remaining(self) -> int:
        """Tokens still to generate."""
        return self.output_tokens - (len(self.tokens) - self.num_prompt)


class Batch(NamedTuple):
    """One step's rows: inputs for the executor, and whose they are."""

    inputs: StepInputs
    decodes: list[Generation]
    chunks: list[tuple[Generation, int]]
    """(request, new prompt tokens)"""


class Completion(NamedTuple):
    """What a step changed."""

    first_tokens: list[Generation]
    """Requests whose prompt was finished: their next token came out, the first one unless they were preempted."""
    finished: list[Generation]


class Batcher:
    """The scheduler. `add` requests, then `next_batch` and `complete` in turn.

    Args:
        settings: most requests and tokens a step.
        num_blocks, block_size: KV capacity, in blocks of so many tokens.
        steps_ahead: most decode steps offered beside a prefill (1 where the host samples).
        pace: what says how many prompt tokens a step may have beside decodes; None fills steps to the limit.

    Raises:
        ConfigError: the capacity can't hold one token.
    """

    def __init__(
        self, settings: Settings, *, num_blocks: int, block_size: int = 16, steps_ahead: int = MOST_STEPS_AHEAD,
        pace: EnginePace | None = None,
    ) -> None:  # fmt: skip
        if num_blocks < 1 or block_size < 1 or steps_ahead < 1:
            raise ConfigError(
                f"num_blocks is {num_blocks}, block_size {block_size}, steps_ahead {steps_ahead}; all start at 1."
            )
        self.settings = settings
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.steps_ahead = steps_ahead
        self.pace = pace
        self.waiting: deque[Generation] = deque()
        self.prefilling: list[Generation] = []
        """Admitted requests whose prompt isn't finished, in order of admission."""
        self.decoding: list[Generation] = []
        """Requests that decode. Replaced, never changed in place: a batch keeps the list it was made from."""
        self.num_preemptions = 0
        self.gap_tail = GapTail()
        """The longest gaps so far, as who serves tells of them; without that nothing is known"""
        self._free = list(range(num_blocks - 1, -1, -1))
        self._admissions = 0
        # Positions and slots of prompts are slices of this: copies of memory, with no integer made for a token.
        self._whole = array("q", range(num_blocks * block_size))
        self._rows: _DecodeRows | None = None
        """Inputs of the decode rows, carried from step to step while the rows stay the same."""

    @property
    def running(self) -> list[Generation]:
        """Admitted requests: decode rows, then unfinished prompts."""
        return self.decoding + self.prefilling

    @property
    def capacity(self) -> int:
        """KV tokens in all."""
        return self.num_blocks * self.block_size

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def fits(self, prompt_tokens: int, output_tokens: int) -> bool:
        """Whether a request of that length can ever be served. Its last token needs no KV entry."""
        return prompt_tokens + output_tokens - 1 <= self.capacity

    def add(self, request: Generation) -> None:
        """Queue a request.

        Raises:
            ConfigError: it can never fit into KV, hand it back to whoever sent it; or it was added before. One that
                was cancelled while it waited may come again.
        """
        if request.added:
            raise ConfigError(
                f"request {request.index} was added before, and what steps made of it stays; make a new Generation."
            )
        if not self.fits(request.num_prompt, request.output_tokens):
            raise ConfigError(
                f"request {request.index} needs {request.num_prompt + request.output_tokens - 1} KV tokens and there "
                f"are {self.capacity}; raise the KV capacity or refuse the request."
            )
        request.added = True
        self.waiting.append(request)

    def cancel(self, index: int) -> bool:
        """Drop a request, wherever it is, also while its step runs; whether it was there."""
        for request in self.running:
            if request.index == index:
                self._leave(request)
                return True
        for request in self.waiting:
            if request.index == index:
                self.waiting.remove(request)
                # It has no blocks and is in no step, also where it was preempted: it may come again.
                request.added = False
                return True
        return False

    @property
    def idle(self) -> bool:
        return not self.decoding and not self.prefilling and not self.waiting

    # The next step

    def next_batch(self) -> Batch | None:
        """The next step's rows, or None when there is nothing to run."""
        before = self.num_preemptions
        rows = self._decode_rows()
        num_decodes = len(rows.requests)
        budget = self.settings.max_num_tokens - num_decodes
        # What was preempted for want of blocks doesn't come back in the same step.
        admit = self.num_preemptions == before
        if self.pace is not None and num_decodes and budget > 0 and self._can_take(admit=admit):
            budget = min(budget, self._paced(self.pace, rows, budget))
        chunks = self._chunks(budget, admit=admit) if self.prefilling or self.waiting else []
        while not num_decodes and not chunks and len(self.prefilling) > 1:
            # Half-computed prompts hold all blocks: the last one gives way, so that the first can finish.
            self._preempt(self.prefilling[-1])
            chunks = self._chunks(budget, admit=False)
        if not num_decodes and not chunks:
            return None
        return Batch(self._inputs(rows, chunks), rows.requests, chunks)

    def _can_take(self, *, admit: bool) -> bool:
        """Whether a prompt can be in the next step: a pace's answer stands for some steps of those alone."""
        if admit and self.waiting and self._free and self._num_running < self.settings.max_num_reqs:
            return True
        return any(
            self._free or len(request.blocks) * self.block_size > request.num_computed for request in self.prefilling
        )

    def _paced(self, pace: EnginePace, rows: _DecodeRows, room: int) -> int:
        """Prompt tokens that the step may have by its costs."""

        def line() -> Line:
            prompts = chain(self.prefilling, self.waiting)
            left = ((request.until - request.num_computed, request.num_computed) for request in prompts)
            places = min(self.settings.max_num_reqs, self.settings.max_num_tokens) - len(self.decoding)
            return in_line(left, total, room, places, rows.kv_tokens)

        total = len(self.prefilling) + len(self.waiting)
        first = (self.prefilling or self.waiting)[0]
        return pace.prompt_tokens((first.index, first.num_preempted), len(rows.requests), total, line)

    def _decode_rows(self) -> _DecodeRows:
        """The decode rows, each with a KV slot for its next token."""
        rows = self._rows
        if rows is None or not rows.advance(self._free):
            rows = self._rows = self._rebuilt()
        return rows

    def _rebuilt(self) -> _DecodeRows:
        """Rows from the requests themselves: after one joined or left, or when blocks ran out."""
        size, free = self.block_size, self._free
        requests = self.decoding[: self.settings.max_num_tokens]
        before = self.num_preemptions
        for request in requests:
            if not request.blocks or len(request.tokens) <= len(request.blocks) * size:
                continue
            while not free and request.blocks:
                self._preempt(max(self.running, key=lambda each: each.admitted))
            if request.blocks:
                request.blocks.append(free.pop())
        if self.num_preemptions != before:
            requests = [request for request in requests if request.blocks]
        return _DecodeRows(requests, size)

    def _chunks(self, budget: int, *, admit: bool) -> list[tuple[Generation, int]]:
        """Prompt chunks in order of admission, then of arrival, while budget, rows and blocks last."""
        chunks = []
        for request in self.prefilling:
            new = self._allot(request, min(request.until - request.num_computed, budget))
            if new:
                chunks.append((request, new))
                budget -= new
        while admit and self.waiting and budget > 0 and self._num_running < self.settings.max_num_reqs:
            request = self.waiting[0]
            new = self._allot(request, min(request.until, budget))
            if not new:
                break
            self._admissions += 1
            request.admitted = self._admissions
            self.prefilling.append(self.waiting.popleft())
            chunks.append((request, new))
            budget -= new
        return chunks

    @property
    def _num_running(self) -> int:
        return len(self.decoding) + len(self.prefilling)

    def _allot(self, request: Generation, new: int) -> int:
        """Give a request blocks for `new` more tokens; as many tokens as the free blocks hold."""
        size, blocks = self.block_size, request.blocks
        room = (len(blocks) + len(self._free)) * size - request.num_computed
        new = min(new, room)
        if new <= 0:
            return 0
        for _ in range(-(-(request.num_computed + new) // size) - len(blocks)):
            blocks.append(self._free.pop())
        return new

    def _preempt(self, request: Generation) -> None:
        """Take a request's blocks; it waits at the head of the queue and is computed again with what it generated."""
        self._leave(request)
        request.num_computed = 0
        request.until = len(request.tokens)
        request.num_preempted += 1
        self.num_preemptions += 1
        self.waiting.appendleft(request)

    def _leave(self, request: Generation) -> None:
        self._free_blocks_of(request)
        self.decoding = [each for each in self.decoding if each is not request]
        self.prefilling = [each for each in self.prefilling if each is not request]
        self._rows = None

    def _free_blocks_of(self, request: Generation) -> None:
        self._free.extend(reversed(request.blocks))
        request.blocks = []

    def _inputs(self, rows: _DecodeRows, chunks: list[tuple[Generation, int]]) -> StepInputs:
        num_decodes, decode_kv = len(rows.requests), rows.kv_tokens
        if not chunks:
            numbers = BatchNumbers(
                num_decodes, 1, decode_kv, num_decodes, 0, 0, 0, 0, 1, rows.longest, 0, 0, 0, 1, num_decodes,
                num_decodes, 1,
            )  # fmt: skip
            return StepInputs(
                numbers, rows.ones, rows.token_ids, rows.positions, rows.slots, rows.tables, rows.kv_lens, rows.indices
            )
        token_ids, positions, slots = array("q", rows.token_ids), array("q", rows.positions), array("q", rows.slots)
        tables, kv_lens = [*rows.tables], [*rows.kv_lens]
        query_lens, wanted = [*rows.ones], [*rows.indices]
        prefill_kv = pairs = first_chunks = longest = 0
        for request, new in chunks:
            start = request.num_computed
            end = start + new
            token_ids += request.tokens[start:end]
            positions += self._whole[start:end]
            self._add_slots(slots, request.blocks, start, end)
            tables.append(request.blocks)
            kv_lens.append(end)
            query_lens.append(new)
            if end == request.until:
                wanted.append(len(token_ids) - 1)
            prefill_kv += end
            pairs += new * start + new * (new + 1) // 2
            first_chunks += not start
            longest = max(longest, new)
        ahead: list[list[int]] = []
        facts = NO_FACTS
        if num_decodes and self.steps_ahead > 1:
            facts = self._facts()
            ahead = self._slots_ahead(rows.requests)
        num_tokens = len(token_ids)
        numbers = BatchNumbers(
            num_decodes, 1 if num_decodes else 0, decode_kv, num_decodes, len(chunks), num_tokens - num_decodes,
            prefill_kv, pairs, longest, max(kv_lens), first_chunks, 0, 0, 1 + len(ahead), num_tokens,
            num_decodes + len(chunks), 1 if num_decodes else 0, facts,
        )  # fmt: skip
        return StepInputs(numbers, query_lens, token_ids, positions, slots, tables, kv_lens, wanted, ahead)

    def _add_slots(self, slots: array[int], blocks: Sequence[int], start: int, end: int) -> None:
        """Append the KV slots of positions start to end."""
        size, whole = self.block_size, self._whole
        for block in range(start // size, -(-end // size)):
            first = blocks[block] * size
            slots += whole[first + max(start - block * size, 0) : first + min(end - block * size, size)]

    def _facts(self) -> Mapping[str, Any]:
        """Requests that wait for a place among the step's tokens only, and the longest gaps."""
        needed = (-(-request.until // self.block_size) for request in self.waiting)
        return step_facts(needed, len(self._free), self.settings.max_num_reqs - self._num_running, self.gap_tail.told())

    def _slots_ahead(self, decodes: list[Generation]) -> list[list[int]]:
        """KV slots for further decode steps of all rows, as far as every row has tokens to generate and blocks last."""
        size = self.block_size
        steps = min(self.steps_ahead, min(request.remaining for request in decodes))
        ahead: list[list[int]] = []
        for step in range(1, steps):
            short = [request for request in decodes if len(request.tokens) + step > len(request.blocks) * size]
            # Reserving ahead may not take what another request needs now.
            if len(short) * 2 > len(self._free):
                break
            for request in short:
                request.blocks.append(self._free.pop())
            row = []
            for request in decodes:
                position = len(request.tokens) - 1 + step
                row.append(request.blocks[position // size] * size + position % size)
            ahead.append(row)
        return ahead

    # After the step

    def complete(self, batch: Batch, outputs: StepOutputs, sample: Callable[[Any], int]) -> Completion:
        """Take a step's results in: tokens are appended, requests that are done leave.

        Args:
            batch: what `next_batch` gave.
            outputs: what the executor gave back for it.
            sample: the token id of one wanted output, for rows that the device didn't sample.
        """
        decodes = batch.decodes
        num_decodes = len(decodes)
        first_tokens: list[Generation] = []
        finished: list[Generation] = []
        if num_decodes:
            sampled: Sequence[Sequence[int]] = outputs.tokens
            if not sampled:
                sampled = [[sample(each) for each in outputs.outputs[:num_decodes]]]
            for tokens in sampled:
                for request, token in zip(decodes, tokens, strict=True):
                    request.tokens.append(token)
            rows = self._rows
            if rows is None or not rows.take(sampled):
                self._rows = None
                # A request that was cancelled during the step has no blocks any more, and isn't reported.
                finished = [request for request in decodes if request.remaining <= 0 and request.blocks]
        if batch.chunks:
            sampled_first: Iterable[int] = outputs.first_tokens
            if not sampled_first:
                sampled_first = map(sample, outputs.outputs[num_decodes:])
            self._end_chunks(batch.chunks, iter(sampled_first), first_tokens, finished)
        for request in finished:
            self._leave(request)
        return Completion(first_tokens, finished)

    def _end_chunks(
        self,
        chunks: list[tuple[Generation, int]],
        sampled: Iterator[int],
        first_tokens: list[Generation],
        finished: list[Generation],
    ) -> None:
        """Prompts that are finished start to decode with the token that came out."""
        for request, new in chunks:
            request.num_computed += new
            if request.num_computed == request.until:
                request.tokens.append(next(sampled))
                if not request.blocks:
                    continue
                first_tokens.append(request)
                if request.remaining <= 0:
                    finished.append(request)
        if first_tokens:
            gone = set(map(id, first_tokens))
            self.prefilling = [request for request in self.prefilling if id(request) not in gone]
            self.decoding = self.decoding + first_tokens
            self._rows = None


class _DecodeRows:
    """The inputs of the decode rows. While the rows stay the same each step is the last one plus one."""

    __slots__ = (
        "indices", "kv_lens", "kv_tokens", "left", "longest", "ones", "positions", "requests", "size", "slots",
        "tables", "taken", "token_ids", "within",
    )  # fmt: skip

    def __init__(self, requests: list[Generation], size: int) -> None:
        self.requests = requests
        self.size = size
        self.token_ids: Sequence[int] = [request.tokens[-1] for request in requests]
        self.positions = [len(request.tokens) - 1 for request in requests]
        self.tables = [request.blocks for request in requests]
        self.slots = [
            blocks[position // size] * size + position % size
            for blocks, position in zip(self.tables, self.positions, strict=True)
        ]
        self.kv_lens = [position + 1 for position in self.positions]
        self.kv_tokens = sum(self.kv_lens)
        self.longest = max(self.kv_lens, default=0)
        self.ones = [1] * len(requests)
        self.indices = list(range(len(requests)))
        self.left = min((request.remaining for request in requests), default=1)
        self.taken = False
        self.within = self._steps_within(self.positions)
        """Steps from here in which no row comes to a new block."""

    def take(self, sampled: Sequence[Sequence[int]]) -> bool:
        """Take a step's tokens in; False where a row is done, or several steps ran, so that rows are made anew."""
        self.left -= len(sampled)
        self.token_ids = sampled[0]
        self.taken = True
        return len(sampled) == 1 and self.left > 0

    def advance(self, free: list[int]) -> bool:
        """Go one position on; False where a row needs a block and none is free."""
        if not self.taken:
            return True
        self.positions = positions = self.kv_lens
        self.kv_lens = [position + 1 for position in positions]
        self.slots = slots = [slot + 1 for slot in self.slots]
        self.within -= 1
        if self.within < 0 and not self._enter_blocks(positions, slots, free):
            return False
        self.kv_tokens += len(positions)
        self.longest += 1
        self.taken = False
        return True

    def _enter_blocks(self, positions: list[int], slots: list[int], free: list[int]) -> bool:
        """Rows that come to a new block write to its first slot; False where one needs a block and none is free."""
        size = self.size
        for row, position in enumerate(positions):
            if not position % size:
                blocks = self.tables[row]
                if position // size == len(blocks):
                    if not free:
                        return False
                    blocks.append(free.pop())
                slots[row] = blocks[position // size] * size
        self.within = self._steps_within(positions)
        return True

    def _steps_within(self, positions: list[int]) -> int:
        """Steps that no row leaves its block in."""
        size = self.size
        return size - 1 - max((position % size for position in positions), default=0)
