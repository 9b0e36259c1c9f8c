"""What bounds an engine's steps: a load served under torch's profiler, step by step and kernel by kernel."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from benchmarks.vllm.step_rows import Ended

__all__ = ["Span", "profiled", "spans_by_step"]

MOST_STEPS = 250
"""Steps after which the profiler stops: a graph's replay has thousands of kernels"""
MOST_NAMES, NAME_LENGTH = 10, 100


class Span(NamedTuple):
    """What the profiler saw: a kernel or copy on the device, or a call into CUDA on the host.

    Args:
        name: its name.
        start_s: when it began, by the clock of `Ended`.
        end_s: when it ended.
        on_device: whether the device did it.
    """

    name: str
    start_s: float
    end_s: float
    on_device: bool


def spans_by_step(
    ended: Sequence[Ended], taken: Sequence[tuple[str, int]], spans: Iterable[Span]
) -> dict[str, list[Any]]:
    """``steps``, and ``kernels`` and ``calls`` of steps with prompts and of the others.

    A step lasts from the end of the one before to its own, as the engine sees them: where the host was busy, it sees an
    end late, and the next step's first kernels count to the step before. ``steps`` has, for each, [mode, padded tokens,
    tokens, requests, its milliseconds, those of it in which the device was at work, kernels that began in it];
    ``kernels`` and ``calls`` have [of steps with prompts or not, name, how many, milliseconds in all], longest first.

    Args:
        ended: steps in order, after a time in which nothing was under way.
        taken: (mode, padded tokens) of each step, in order.
        spans: what the profiler saw; what began before the first step or after the last is left out.
    """
    device = sorted((span for span in spans if span.on_device), key=lambda span: span.start_s)
    host = sorted((span for span in spans if not span.on_device), key=lambda span: span.start_s)
    kernels, calls, steps, modes, busy_until = _Totals(), _Totals(), [], iter(taken), 0.0
    kernels_left, calls_left = deque(device), deque(host)
    for before, each in pairwise(ended):
        mode, padded = next(modes) if each.tokens else ("", 0)
        prompts, count = each.tokens > each.requests, 0
        busy = max(0.0, min(busy_until, each.at_s) - before.at_s)
        for span in _until(each.at_s, kernels_left):
            if span.start_s >= before.at_s:
                count += 1
                busy += max(0.0, min(span.end_s, each.at_s) - max(span.start_s, busy_until))
                busy_until = max(busy_until, span.end_s)
                kernels.add(prompts, span)
        for span in _until(each.at_s, calls_left):
            if span.start_s >= before.at_s:
                calls.add(prompts, span)
        if each.tokens and count:
            took = 1e3 * (each.at_s - before.at_s)
            steps.append([mode, padded, each.tokens, each.requests, round(took, 3), round(1e3 * busy, 3), count])
    return {"steps": steps, "kernels": kernels.rows(), "calls": calls.rows()}


class _Totals:
    """How often, and how long in all, things of a name were there in steps with prompts and in others."""

    def __init__(self) -> None:
        self._seconds: defaultdict[tuple[bool, str], list[float]] = defaultdict(list)

    def add(self, prompts: bool, span: Span) -> None:
        self._seconds[prompts, span.name].append(span.end_s - span.start_s)

    def rows(self) -> list[list[Any]]:
        """[of steps with prompts or not, name, how many, milliseconds in all] of the longest of each kind."""
        rows: list[list[Any]] = [[*what, len(each), round(1e3 * sum(each), 3)] for what, each in self._seconds.items()]
        rows.sort(key=lambda row: -row[3])
        return [row for prompts in (True, False) for row in [row for row in rows if row[0] is prompts][:MOST_NAMES]]


def _until(at_s: float, spans: deque[Span]) -> Iterator[Span]:
    """Takes the spans that began before that time."""
    while spans and spans[0].start_s < at_s:
        yield spans.popleft()


def profiled(engine: Any, order: dict[str, Any]) -> dict[str, Any]:
    """What bounds that engine's steps: `spans_by_step` of its first steps, and the turn's figures under the profiler.

    Args:
        engine: `benchmarks.vllm.child.Engine`, which serves nothing else after it: the profiler leaves traces.
        order: the load, as `benchmarks.vllm.child.Engine.serve` takes it.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    profiler, core, left = profile(activities=[ProfilerActivity.CUDA]), engine.engine, MOST_STEPS
    inner, offset = core.step, 1e-9 * time.time_ns() - time.perf_counter()

    def step() -> Any:
        nonlocal left
        left -= 1
        if not left:
            profiler.stop()
        return inner()

    core.step = step
    profiler.start()
    try:
        figures = engine.serve(order["requests"], order["seed"], order.get("step_tokens"))
    finally:
        del core.step
        if left > 0:
            profiler.stop()
    assert profiler.profiler is not None
    spans = [
        Span(
            event.name()[:NAME_LENGTH], 1e-9 * event.start_ns() - offset,
            1e-9 * (event.start_ns() + event.duration_ns()) - offset, event.device_type() == DeviceType.CUDA,
        )
        for event in profiler.profiler.kineto_results.events()
    ]  # fmt: skip
    return {"figures": figures, "spans": len(spans), **spans_by_step(engine.ended, engine.taken, spans)}
