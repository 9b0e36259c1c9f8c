"""`Sequences`: random token sequences that own KV blocks, and the inputs of any step over them.

What a batcher is to a server, this is to a test: it can build every batch, in any order of rows and lengths, with
drafts of different lengths, chunks, and rows whose outputs nobody wants. Blocks are handed out in random order, so
that a wrong block table can't be right by chance.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

import attrs

from kpolicy.executors.base import StepInputs
from kpolicy.shapes import BatchShape

__all__ = ["BLOCK_SIZE", "NUM_BLOCKS", "VOCAB", "Row", "Sequence", "Sequences"]

NUM_BLOCKS = 64
"""KV blocks that an executor under test must have, at least."""
BLOCK_SIZE = 16
"""Tokens a KV block of an executor under test."""
VOCAB = 100
"""Token ids are below this."""
_MOST_LIVE = 8
"""Random batches add up to three sequences to these; none grows past five blocks, so 64 blocks hold them all."""


@attrs.define(eq=False)
class Sequence:
    """One sequence: its tokens as far as they are known, how many are in KV, and its blocks."""

    tokens: list[int] = attrs.field(factory=list)
    num_computed: int = 0
    blocks: list[int] = attrs.field(factory=list)


@attrs.frozen
class Row:
    """One row of a batch.

    Args:
        sequence: whose row it is.
        num_tokens: tokens it runs, from the sequence's first that isn't in KV on.
        decode: whether it is a decode row; a prompt chunk otherwise.
        wanted: which of its tokens' outputs are wanted, counted from its first, rising.
    """

    sequence: Sequence
    num_tokens: int
    decode: bool
    wanted: tuple[int, ...]


class Sequences:
    """Sequences and the free blocks they don't own.

    Args:
        seed: another seed gives other tokens, blocks and rows.
        num_blocks, block_size: the executor's KV capacity.
        vocab: token ids are below this.
    """

    def __init__(
        self, seed: int = 0, *, num_blocks: int = NUM_BLOCKS, block_size: int = BLOCK_SIZE, vocab: int = VOCAB
    ) -> None:
        self.random = random.Random(seed)  # noqa: S311 - not for secrets
        self.block_size = block_size
        self.vocab = vocab
        self.live: list[Sequence] = []
        self._free = list(range(num_blocks))
        self.random.shuffle(self._free)

    def start(self) -> Sequence:
        """A new sequence without tokens."""
        sequence = Sequence()
        self.live.append(sequence)
        return sequence

    def end(self, sequence: Sequence) -> None:
        """Give a sequence's blocks back, for others to take."""
        self.live.remove(sequence)
        self._free += sequence.blocks
        self.random.shuffle(self._free)
        sequence.blocks = []

    # Rows

    def decode(self, sequence: Sequence, query_len: int = 1, *, last_only: bool = False) -> Row:
        """A decode row that wants the output of each of its tokens, as verification does, or only of its last."""
        return Row(sequence, query_len, True, tuple(range(query_len - 1 if last_only else 0, query_len)))

    def chunk(self, sequence: Sequence, num_tokens: int, wanted: Iterable[int] | None = None) -> Row:
        """A prompt chunk; by default its last output is wanted."""
        return Row(sequence, num_tokens, False, (num_tokens - 1,) if wanted is None else tuple(wanted))

    def random_rows(self, max_num_reqs: int, max_num_tokens: int, longest_decode: int = 1) -> list[Row]:
        """A random batch: decode rows of 1 to `longest_decode` tokens, all equal half of the time, then chunks."""
        rng, budget = self.random, max_num_tokens
        long = [sequence for sequence in self.live if sequence.num_computed > 3 * self.block_size]
        for sequence in long or self.live[:-_MOST_LIVE]:
            self.end(sequence)
        started = [sequence for sequence in self.live if sequence.num_computed]
        rng.shuffle(started)
        num_decodes = rng.randint(0, min(len(started), max_num_reqs))
        query_len = rng.choice([0, rng.randint(1, longest_decode)])
        rows: list[Row] = []
        for sequence in started[:num_decodes]:
            length = query_len or rng.randint(1, longest_decode)
            if length <= budget:
                rows.append(self.decode(sequence, length, last_only=rng.random() < 0.3))
                budget -= length
        most = min(max_num_reqs - len(rows), 3)
        for _ in range(rng.randint(0 if rows else 1, most) if most else 0):
            if budget:
                rows.append(self._random_chunk(started[num_decodes:], budget))
                budget -= rows[-1].num_tokens
                started = [sequence for sequence in started if sequence is not rows[-1].sequence]
        return rows

    def _random_chunk(self, started: list[Sequence], budget: int) -> Row:
        rng = self.random
        new = rng.randint(1, budget)
        sequence = started[-1] if started and rng.random() < 0.3 else self.start()
        return self.chunk(sequence, new, rng.choice([(), (new - 1,), (new - 1,), range(new)]))

    # Steps

    def inputs(self, rows: Iterable[Row], *, steps: int = 1) -> StepInputs:
        """The inputs of one step; the sequences stay where they are until `advance`.

        Args:
            rows: decode rows, then chunks.
            steps: decode steps to reserve KV slots for; decode rows must be of one token when there are several.
        """
        rows = list(rows)
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        wanted: list[int] = []
        for row in rows:
            sequence, start = row.sequence, row.sequence.num_computed
            end = start + row.num_tokens
            self._grow(sequence, end, end + steps - 1 if row.decode else end)
            wanted += [len(token_ids) + offset for offset in row.wanted]
            token_ids += sequence.tokens[start:end]
            positions += range(start, end)
            slots += [self._slot(sequence, position) for position in range(start, end)]
        decodes = [row for row in rows if row.decode]
        kv_lens = [row.sequence.num_computed + row.num_tokens for row in rows]
        shape = BatchShape(
            decodes=[(row.num_tokens, 1) for row in decodes],
            prefills=[(row.num_tokens, row.sequence.num_computed) for row in rows[len(decodes) :]],
            decode_kv_tokens=sum(kv_lens[: len(decodes)]) if decodes else None,
            max_kv_len=max(kv_lens, default=0),
            max_decode_steps=steps,
        )
        ahead = [
            [self._slot(row.sequence, row.sequence.num_computed + step) for row in decodes] for step in range(1, steps)
        ]
        tables = [list(row.sequence.blocks) for row in rows]
        query_lens = [row.num_tokens for row in rows]
        return StepInputs(shape.numbers, query_lens, token_ids, positions, slots, tables, kv_lens, wanted, ahead)

    def advance(self, rows: Iterable[Row], accepted: int | None = None) -> None:
        """Take the rows' tokens as computed.

        Args:
            rows: the step's rows.
            accepted: most tokens that a decode row keeps, as when drafts are refused; all by default. The rest is
                drawn anew, so that the next step overwrites KV entries.
        """
        for row in rows:
            kept = row.num_tokens if accepted is None or not row.decode else min(accepted, row.num_tokens)
            row.sequence.num_computed += kept
            if kept < row.num_tokens:
                del row.sequence.tokens[row.sequence.num_computed :]

    def append(self, rows: Iterable[Row], tokens: Iterable[int]) -> None:
        """One decode step is done: each row of one token goes on with the token that was sampled for it."""
        for row, token in zip(rows, tokens, strict=True):
            sequence = row.sequence
            sequence.num_computed += 1
            del sequence.tokens[sequence.num_computed :]
            sequence.tokens.append(int(token))

    def _grow(self, sequence: Sequence, num_tokens: int, num_slots: int) -> None:
        while len(sequence.tokens) < num_tokens:
            sequence.tokens.append(self.random.randrange(self.vocab))
        while len(sequence.blocks) * self.block_size < num_slots:
            sequence.blocks.append(self._free.pop())

    def _slot(self, sequence: Sequence, position: int) -> int:
        return sequence.blocks[position // self.block_size] * self.block_size + position % self.block_size
