"""A step as both of vLLM's runners know it, in kpolicy's numbers, and a prepared answer for one."""

from __future__ import annotations

from typing import Any, NamedTuple

from kpolicy.decision import Decision
from kpolicy.keys import GraphKey
from kpolicy.modes import Mode, Part
from kpolicy.shapes import BatchNumbers

__all__ = ["Entry", "Step", "classes", "numbers_of"]

_NO_SPLIT = Mode.SPLIT.bit


class Step(NamedTuple):
    """What both runners know of a step: all that a decision may depend on."""

    num_tokens: int
    num_reqs: int
    num_decodes: int
    """Requests of at most 1 + k tokens: what attention takes for decodes."""
    query_len: int = 0
    """The tokens of every request, where vLLM takes the step for a uniform decode; otherwise 0."""
    longest: int = 0
    """The most tokens of a decode row, where they differ and vLLM tells; otherwise 0."""
    num_active_loras: int = 0
    forbidden: int = 0
    """Bits of kpolicy's modes; see `Mode.bit`."""


class Entry:
    """A prepared answer, and how often it was given.

    Args:
        step: what it answers.
        result: what vLLM is told.
        key: the graph that replays, None where none does.
        decision: the policy's decision, None where vLLM's own rule decided.
        reason: why.
    """

    __slots__ = ("count", "decision", "device_us", "key", "label", "padding", "result", "step", "whole")

    def __init__(self, step: Step, result: Any, key: GraphKey | None, decision: Decision | None, reason: str) -> None:
        self.step = step
        self.result = result
        self.key = key
        self.whole = key is not None and key.part is Part.FULL
        self.decision = decision
        self.device_us: float | None = None
        """By costs, once it was asked for"""
        self.label = ("eager" if key is None else key.part.value, reason)
        self.padding = 0 if key is None else key.num_tokens - step.num_tokens
        self.count = 0


def numbers_of(step: Step, query_len: int) -> BatchNumbers:
    """The step as kpolicy's plain numbers, with as little KV as its rows can have.

    Args:
        step: the step.
        query_len: 1 + k.
    """
    tokens, reqs, loras, forbidden = step.num_tokens, step.num_reqs, step.num_active_loras, step.forbidden | _NO_SPLIT
    prefills = reqs - step.num_decodes
    if step.query_len or (not prefills and (query_len > 1 or step.longest)):
        # Decodes that differ in length have fewer drafts.
        same, longest = step.query_len, step.query_len or step.longest or query_len
        return BatchNumbers(
            reqs, same, tokens, tokens, 0, 0, 0, 0, longest, longest, 0, loras, forbidden, 1, tokens, reqs, longest
        )
    # Rows of one token each that aren't decodes are those of a dummy run.
    prefills = prefills or reqs
    decodes = reqs - prefills
    decode_tokens = min(decodes * query_len, tokens - prefills)
    same = query_len if decodes and decode_tokens == decodes * query_len else 0
    new = tokens - decode_tokens
    even, more = divmod(new, prefills)
    pairs = (prefills - more) * even * (even + 1) // 2 + more * (even + 1) * (even + 2) // 2
    longest = new - prefills + 1
    # vLLM says that it isn't a uniform decode; its replica tells by the lengths, so they must say so too.
    told = longest + 1 if longest * reqs == tokens else longest
    return BatchNumbers(
        decodes, same, decode_tokens, decode_tokens, prefills, new, new, pairs, told, longest, 0, loras, forbidden,
        1, tokens, reqs, query_len if decodes else 0,
    )  # fmt: skip


def classes(most: int) -> tuple[list[int], list[int]]:
    """Numbers of decodes in classes, one to a doubling: the class of each number to `most`, and each one's middle."""
    class_of = [number.bit_length() for number in range(most + 1)]
    middles = [0, *(min(most, (3 << i) >> 1) for i in range(class_of[-1]))]
    return class_of, middles
