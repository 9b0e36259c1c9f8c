"""Why a planned list starts where it does, in words: what graphs of smaller sizes would save."""

from __future__ import annotations

from kpolicy.keys import GraphKey
from kpolicy.modes import Part
from kpolicy.planning.workload import DECODE, OTHERS, Workload
from kpolicy.report.html import ms
from kpolicy.trace_plan import TracePlan
from kpolicy.words import some

__all__ = ["none_below"]

_EXPECTED = 8
"""Lists that start at this size or below leave out little that a reader would look for."""
_EQUAL = 1e-3
"""Times that differ by less than this share are told as one."""


def none_below(found: TracePlan, *names: str) -> list[str]:
    """For each list that starts well above 1 what graphs of all smaller sizes together would take off a mean step.

    Args:
        found: the plan.
        names: the lists to look at; all where none is named.
    """
    sizes, told = found.plan.sizes, []
    steps = Workload(
        histogram=found.replayed.histogram, costs=found.costs, settings=found.settings, layout=found.layout
    )  # fmt: skip
    lists = steps.lists_of(sizes)
    for name, own in lists.items():
        if not own or own[0] <= _EXPECTED or (names and name not in names):
            continue
        below = [size for size in steps.candidates(name) if size < own[0]]
        with_all = steps.sizes_of({**lists, name: (*below, *own)})
        share = max(0.0, 1 - steps.time_us(with_all) / steps.time_us(sizes))
        what = {DECODE: "decode size", OTHERS: "size of batches with prompts"}.get(name, "size")
        told.append(
            f"No {what} below {some(own[0], 'request' if name == DECODE else 'token')} is planned: graphs of all "
            f"smaller ones together would take {share:.2%} off a mean step. By these costs "
            f"{_times(found, name, own[0])}."
        )
    return told


def _times(found: TracePlan, name: str, size: int) -> str:
    """How long a graph of that size of a list takes, and one of size 1, without attention."""
    layout, q = found.layout, found.settings.query_len
    decode = name != OTHERS and layout.decode is not None
    part = Part.FULL if decode else layout.others or Part.FULL
    least, tokens = (q, size * q) if name == DECODE else (1, size)
    curve = found.costs.curve_for(GraphKey(part, tokens, query_len=q if decode else None))
    one_us, us = curve.at(least), curve.at(tokens)
    graph = f"a {part.name} graph of {some(tokens, 'token')} takes"
    if abs(us - one_us) < _EQUAL * us:
        return f"{graph} as long as one of {least:,} ({ms(us)} ms)"
    return f"{graph} {ms(us)} ms and one of {least:,} {ms(one_us)} ms"
