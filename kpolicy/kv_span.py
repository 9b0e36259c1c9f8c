"""`KvSpan`: the contexts that attention was timed at."""

from __future__ import annotations

import attrs

from kpolicy.errors import ProfileError
from kpolicy.shapes import BatchNumbers
from kpolicy.words import some

__all__ = ["NOT_RECORDED", "KvSpan", "outside_in_words"]

NOT_RECORDED = "contexts: not recorded"
"""What is said of a measured table without a span: its steps can't be told inside from outside."""


def outside_in_words(steps: int, sizes: int, contexts: int | None) -> tuple[str, ...]:
    """What of a run's steps a cost table wasn't made for; and where it can't tell, that.

    Args:
        steps: steps that ran.
        sizes: those of a size that its curves don't span.
        contexts: those with a context beyond its `KvSpan`; None where it was measured and doesn't record that.
    """
    told = [
        f"{some(count, 'step')} ({count / steps:.1%}) of a {what} outside the cost table"
        for count, what in ((sizes, "size"), (contexts, "context"))
        if count
    ]
    return (*told, NOT_RECORDED) if contexts is None else tuple(told)


@attrs.frozen
class KvSpan:
    """The longest contexts that attention was timed at; beyond them its time is a line drawn on.

    Args:
        decode_row: KV tokens of a decode row.
        decode_step: KV tokens of all decode rows of a step.
        prefill: KV tokens that a step's prompt chunks attend to, their own included. Chunks are timed one at a time,
            so this is a chunk's and a step's.

    Raises:
        ProfileError: a number is below 0.
    """

    decode_row: int
    decode_step: int
    prefill: int

    def __attrs_post_init__(self) -> None:
        if min(attrs.astuple(self)) < 0:
            raise ProfileError(f"{self!r}: contexts are KV tokens from 0 up.")

    def holds(self, numbers: BatchNumbers, longest: int | None = None) -> bool:
        """Whether attention was timed at contexts as long as a batch's.

        Args:
            numbers: the batch.
            longest: KV tokens of its longest decode row; by default the least that its counts allow.
        """
        row = numbers.longest_decode_kv if longest is None else longest
        return (
            row <= self.decode_row
            and numbers.decode_kv_tokens <= self.decode_step
            and numbers.prefill_kv_tokens <= self.prefill
        )

    def outside(self, steps: int, rows: int, kv_tokens: int, longest: int) -> int:
        """How many of decode steps that follow each other have longer contexts than were timed.

        Args:
            steps: the steps.
            rows: decode rows of each, which grow by a KV token a step.
            kv_tokens: KV tokens of the first step.
            longest: of its longest row.
        """
        inside = min(self.decode_row - longest, (self.decode_step - kv_tokens) // rows) + 1
        return steps - min(max(inside, 0), steps)

    def __str__(self) -> str:
        return (
            f"contexts of up to {self.decode_row:,} tokens a decode row, {self.decode_step:,} in a step, and "
            f"{self.prefill:,} of prompts"
        )
