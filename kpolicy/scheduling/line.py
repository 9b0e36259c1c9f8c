"""The prompts that wait for a step's tokens, as a scheduler tells `kpolicy.scheduling.pace` of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["Line", "in_line"]

_MOST_LOOKED_AT = 8
"""Prompts of a line that are looked at; those behind them are taken to be as long on average"""


class Line(NamedTuple):
    """The prompts that a step could take."""

    num_prompts: int
    tokens: int
    waiting: int
    """Requests behind them, for whom this step has no room"""
    pairs: int = 0
    """Query-key pairs of their tokens; 0 for the least, prompts of one length that begin here"""
    decode_kv: int = 0
    """KV tokens of the decode rows; 0 for the least, one for each of their tokens"""


def in_line(remaining: Iterable[tuple[int, int]], total: int, room: int, places: int, decode_kv: int = 0) -> Line:
    """The prompts in line for a step; of many, those behind the first few are taken to be as long on average.

    Args:
        remaining: of each prompt, in order, the tokens that it still has to compute, and those that it has.
        total: prompts in all.
        room: tokens that the step has for prompts.
        places: prompts that may run.
        decode_kv: KV tokens of the rows that decode beside them.
    """
    count = tokens = pairs = 0
    for left, before in remaining:
        if tokens >= room or count >= places:
            break
        if count == _MOST_LOOKED_AT:
            more = min(min(total, places) - count, -(-(room - tokens) * count // max(tokens, 1)))
            pairs += pairs * more // count
            count, tokens = count + more, min(room, tokens + tokens * more // count)
            break
        count += 1
        new = min(left, room - tokens)
        tokens += new
        pairs += new * before + new * (new + 1) // 2
    return Line(count, tokens, total - count, pairs, decode_kv)
