"""How ranks agree: each votes scalars, the maximum of each is taken over ranks, and all decide from the maxima.

Every component is made so that a maximum is the right reduction: counts as they are, lower bounds negated, flags as
0 or 1. The reduced batch holds every rank's batch, so the graph that holds it can be replayed by all of them, idle
ranks included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import attrs

from kpolicy.decision import Decision
from kpolicy.modes import Mode
from kpolicy.reasons import Reason
from kpolicy.shapes import LARGEST_COUNT, BatchNumbers

__all__ = ["agree", "plain_decodes", "reduced_numbers", "told", "vote"]

_ALL = sum(mode.bit for mode in Mode)
_FLAGS = [tuple(int(bool(forbidden & mode.bit)) for mode in Mode) for forbidden in range(_ALL + 1)]
"""Forbidden modes as flags of 0 or 1"""
_LORAS = 13
"""Where a vote has its LoRAs; the flags follow"""
_MASKS = {flags: forbidden for forbidden, flags in enumerate(_FLAGS)}


def vote(numbers: BatchNumbers) -> tuple[int, ...]:
    """This rank's batch as scalars whose maximum over ranks describes a batch that holds all of them."""
    (
        decodes, query_len, decode_kv, decode_tokens, prefills, prefill_tokens, prefill_kv, pairs, longest, max_kv,
        first_chunks, loras, forbidden, steps, tokens, reqs, longest_decode, _,
    ) = numbers  # fmt: skip
    if decode_tokens < 0:
        decode_tokens, longest = decodes * query_len, query_len
    reqs = decodes + prefills if reqs < 0 else reqs
    decoding = decodes > 0
    return (
        decodes,
        decode_tokens,
        query_len if decoding else 0,
        -query_len if decoding else -LARGEST_COUNT,
        int(decoding and not query_len),
        decode_kv,
        prefills,
        prefill_tokens,
        prefill_kv,
        pairs,
        longest if reqs else 0,
        max_kv,
        first_chunks,
        loras,
        *_FLAGS[forbidden & _ALL],
        -steps if decoding else -LARGEST_COUNT,
        decode_tokens + prefill_tokens if tokens < 0 else tokens,
        reqs,
        query_len or longest_decode,
    )


def reduced_numbers(reduced: Sequence[int]) -> BatchNumbers:
    """The batch that the reduced votes describe."""
    (
        decodes, decode_tokens, longest_q, shortest_q, uneven, decode_kv, prefills, prefill_tokens, prefill_kv, pairs,
        max_query, max_kv, first_chunks, loras, *bits, steps, tokens, reqs, longest_decode,
    ) = reduced  # fmt: skip
    uniform = not uneven and longest_q == -shortest_q
    return BatchNumbers(
        num_decodes=decodes,
        query_len=longest_q if uniform else 0,
        decode_kv_tokens=decode_kv,
        num_decode_tokens=decode_tokens,
        num_prefills=prefills,
        num_prefill_tokens=prefill_tokens,
        prefill_kv_tokens=prefill_kv,
        prefill_pairs=pairs,
        max_query_len=max_query,
        max_kv_len=max_kv,
        num_first_chunks=first_chunks,
        num_active_loras=loras,
        forbidden=_MASKS[tuple(bits)],
        max_decode_steps=1 if -steps == LARGEST_COUNT else -steps,
        num_tokens=tokens,
        num_reqs=reqs,
        max_decode_len=longest_decode,
    )


def plain_decodes(reduced: Sequence[int]) -> tuple[int, int]:
    """(rows, query length) where all ranks have decode rows of one length, no LoRA, and nothing forbidden; else 0s."""
    decodes, _, longest, shortest, _, _, prefills = reduced[:7]
    # A rank whose rows differ votes a query length of 0, so that the two are unlike or both 0.
    if prefills or longest != -shortest or any(reduced[_LORAS : _LORAS + 1 + len(Mode)]):
        return 0, 0
    return decodes, longest


def agree(select: Callable[..., Decision], reduced: Sequence[int], numbers: BatchNumbers) -> Decision:
    """The decision for the reduced batch; the reason names other ranks where this one alone would replay more."""
    return told(select(*reduced_numbers(reduced)), select, numbers)


def told(decision: Decision, select: Callable[..., Decision], numbers: BatchNumbers) -> Decision:
    """What was agreed, with this rank's reason for it: see `agree`."""
    if not numbers.total_tokens:
        return _because(decision, Reason.RANKS_AGREED)
    alone = select(*numbers)
    if alone.mode is decision.mode:
        return decision
    reason = Reason.RANK_NEEDS_EAGER if decision.mode is Mode.EAGER else Reason.RANK_NEEDS_LESS
    return _because(decision, reason)


@lru_cache(maxsize=1024)
def _because(decision: Decision, reason: Reason) -> Decision:
    """The decision for that reason: one object each, as policies have them, because executors prepare them once."""
    return attrs.evolve(decision, reason=reason)
