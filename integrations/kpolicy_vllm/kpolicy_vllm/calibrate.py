"""A measured `CostTable` from vLLM's own graphs and eager steps, timed at start-up within an allowance.

Each captured size, and EAGER at a few, runs as a whole step of made-up rows through the runner's `execute_model` and
`sample_tokens`, so that what the host does for a step is in the times. A step is timed twice: at once, for the host's
time, and behind work that keeps the device busy meanwhile, for the device's alone. What attention costs is the slope
of a step's time over KV; it is taken off the curves, which stand for dense work (kpolicy's docs/design.md, costs).

Where ranks work together rank 0 says what runs next, all run it, and rank 0's table is everyone's.
"""

from __future__ import annotations

import importlib
import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from kpolicy.costs import AttentionCost, CostTable, Curve, HostCost
from kpolicy.keys import GraphKey
from kpolicy.modes import Part
from kpolicy_vllm.synthetic import Rows, Steps

__all__ = ["Clock", "calibrate", "why_not"]

SHORT_KV, LONG_KV = 64, 1024
"""Tokens that decode rows attend to, and that a chunk has before it, for the two ends of the slopes."""
EAGER_SIZES = (1, 8, 64, 256, 1024, 2048)
FEW_DECODES = 8
NOISE = 0.02
"""Of a time: what is within it of another is as good."""
MOST_ROUNDS, REJOINS = 9, 3
SLOPES = 0.2
"""Share of the allowance for attention's slopes"""
_AHEAD, _CYCLES_A_US = 2.0, 2000
_LEAST_US = 0.1
_TELLING = 256


class Clock(Protocol):
    """The device and the time, as calibration needs them."""

    def now(self) -> float:
        """Seconds."""

    def wait(self) -> None:
        """Until the device has done all."""

    def occupy(self, us: float) -> None:
        """Keep the device busy for about so long, and return at once."""

    def event(self) -> Any:
        """A mark in the device's work, here."""

    def between_us(self, first: Any, second: Any) -> float:
        """Device time between two marks; waits for both."""


class _CudaClock:
    """The current CUDA device. vLLM brings torch, so it is imported when first used."""

    def __init__(self) -> None:
        import torch

        self._torch = torch

    def now(self) -> float:
        return time.perf_counter()

    def wait(self) -> None:
        self._torch.cuda.synchronize()

    def occupy(self, us: float) -> None:
        self._torch.cuda._sleep(int(us * _CYCLES_A_US))

    def event(self) -> Any:
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between_us(self, first: Any, second: Any) -> float:
        second.synchronize()
        return 1e3 * float(first.elapsed_time(second))


class _Times(NamedTuple):
    """Microseconds of one step."""

    wall: float
    host: float
    device: float
    decode_kv: int
    """Tokens that its decode rows attended to: rows grow from step to step"""


class _Case:
    """One step that is timed.

    Args:
        key: the graph it runs; None for EAGER.
        rows: its rows.
    """

    def __init__(self, key: GraphKey | None, rows: Rows) -> None:
        self.key = key
        self.rows = rows
        self.times: list[_Times] = []

    def best(self) -> _Times:
        """The run with the shortest device time: its work is the same each time, and a late host adds to it."""
        return min(self.times, key=lambda each: each.device)

    def units(self) -> float:
        """KV tokens of the decode rows of that run, or query-key pairs of the chunk beyond its own."""
        return self.rows.chunk * self.rows.context if self.rows.chunk else self.best().decode_kv

    def dense_us(self, decode: AttentionCost, chunks: AttentionCost) -> float:
        """Microseconds on the device without attention."""
        chunk, best = self.rows.chunk, self.best()
        pairs = chunk * self.rows.context + chunk * (chunk + 1) / 2
        return max(best.device - decode.unit_us * best.decode_kv - chunks.unit_us * pairs, _LEAST_US)

    def host_us(self) -> float:
        """Median microseconds until the host had launched all."""
        return statistics.median(each.host for each in self.times)


class _Bench:
    """Runs and times steps.

    Args:
        runner: vLLM's model runner.
        forced: context manager in which the step runs that graph, or EAGER.
        agree: what rank 0 says, on every rank.
        clock: the device and the time.
    """

    def __init__(
        self, runner: Any, forced: Callable[[GraphKey | None, Rows], AbstractContextManager[Any]],
        agree: Callable[[Any], Any], clock: Clock,
    ) -> None:  # fmt: skip
        self._runner = runner
        self._forced = forced
        self._agree = agree
        self._clock = clock
        self._ran_any = False
        self._token_s = 0.0
        """Seconds a token that the largest case so far took, all its runs together"""
        self.steps = Steps(runner)

    def measure(self, cases: Sequence[_Case], allowance_s: float) -> None:
        """Time the cases, those with the fewest tokens first, then in rounds over those that ran.

        The very first case always runs; which others did, their `times` say.
        """
        clock = self._clock
        stop_s = clock.now() + allowance_s
        ran: list[_Case] = []
        for case in sorted(cases, key=lambda each: each.rows.num_tokens):
            begun_s = clock.now()
            if not self._agree(not self._ran_any or begun_s + self._token_s * case.rows.num_tokens <= stop_s):
                break
            self._visit(case)
            ran.append(case)
            self._ran_any = True
            if case.rows.num_tokens >= _TELLING:
                self._token_s = (clock.now() - begun_s) / case.rows.num_tokens
        for turn in range(1, MOST_ROUNDS):
            for case in random.Random(turn).sample(ran, len(ran)):  # noqa: S311
                if not self._agree(clock.now() <= stop_s):
                    return
                self._visit(case)

    def warm(self, cases: Sequence[_Case]) -> None:
        """Run some steps that aren't timed: kernels compile, and buffers are made."""
        for case in cases:
            with self._forced(case.key, case.rows):
                self._run(case.rows)

    def rejoin_us(self, case: _Case, chunk: _Case) -> float:
        """Host microseconds that a decode row costs more in a step after one that left it out.

        Args:
            case: a step of decodes.
            chunk: a step without them.
        """
        steady, after = [], []
        for _ in range(REJOINS):
            with self._forced(case.key, case.rows):
                self._run(case.rows)
                steady.append(self._run(case.rows)[1])
            with self._forced(chunk.key, chunk.rows):
                self._run(chunk.rows)
            with self._forced(case.key, case.rows):
                after.append(self._run(case.rows)[1])
        return max(0.0, statistics.median(after) - statistics.median(steady)) / case.rows.decodes

    def close(self) -> None:
        """Leave none of the rows in the runner."""
        self._runner.execute_model_state = None
        self._runner.execute_model(self.steps.close())
        self._clock.wait()

    def _visit(self, case: _Case) -> None:
        if self.steps.used_up(case.rows):
            self._runner.execute_model(self.steps.close())
        with self._forced(case.key, case.rows):
            self._run(case.rows)  # rows join the batch; kernels compile
            wall, host = self._run(case.rows)
            device = min(self._device_us(case.rows, host), wall)
            case.times.append(_Times(wall, host, device, self.steps.decode_kv))

    def _run(self, rows: Rows) -> tuple[float, float]:
        """(wall, host) microseconds of a step."""
        output, clock = self.steps.step(rows), self._clock
        clock.wait()
        start = clock.now()
        self._runner.execute_model(output)
        self._runner.sample_tokens(None)
        launched = clock.now()
        clock.wait()
        return 1e6 * (clock.now() - start), 1e6 * (launched - start)

    def _device_us(self, rows: Rows, host_us: float) -> float:
        """The step behind other work, which the host needn't wait for: the device's own time."""
        output, clock = self.steps.step(rows), self._clock
        clock.wait()
        clock.occupy(_AHEAD * host_us)
        first = clock.event()
        self._runner.execute_model(output)
        second = clock.event()
        self._runner.sample_tokens(None)
        return clock.between_us(first, second)


def why_not(runner: Any) -> str | None:
    """Why this vLLM can't be calibrated in place; None where it can."""
    config = runner.vllm_config
    if config.parallel_config.pipeline_parallel_size > 1:
        return "pipeline stages hand rows on to each other"
    if getattr(config, "kv_transfer_config", None) is not None:
        return "a KV connector would see the made-up rows"
    if config.model_config.is_encoder_decoder:
        return "steps of an encoder and a decoder take encoder inputs"
    if getattr(runner, "is_pooling_model", False):
        return "a pooling model samples nothing"
    return None


def calibrate(runner: Any, state: Any, clock: Clock | None = None) -> CostTable | None:
    """Measure what vLLM's steps take.

    Args:
        runner: vLLM's model runner, after its graphs were captured.
        state: the integration's, whose registry says which.
        clock: the device and the time; the current CUDA device's by default.

    Returns:
        The table, rank 0's on every rank; None where `why_not` has a reason, which is counted and said once.
    """
    reason = why_not(runner)
    if reason is not None:
        state.counters.warn_once("not_calibrated", f"costs aren't measured at start-up: {reason}.")
        return None
    clock = clock or _CudaClock()
    bench = _Bench(runner, lambda key, rows: _forced(state, key, rows), state.broadcast, clock)
    plan = _Plan(state, bench.steps.longest)
    allowance_s = state.config.calibrate_seconds
    try:
        bench.warm(plan.warm)
        start = clock.now()
        bench.measure(plan.curves, allowance_s * (1 - SLOPES))
        bench.measure(plan.slopes, max(0.0, allowance_s - (clock.now() - start)))
        if state.config.split:
            state.rejoin_us = state.broadcast(bench.rejoin_us(plan.decodes, plan.warm[1]))
    finally:
        bench.close()
    table: CostTable = state.broadcast(plan.table(state.registry))
    return table


def _forced(state: Any, key: GraphKey | None, rows: Rows) -> AbstractContextManager[Any]:
    """The next dispatches answer that graph, or EAGER."""
    dispatcher = state.dispatcher
    mode, desc = _eager(dispatcher, rows) if key is None else dispatcher.desc_of[key]
    context: AbstractContextManager[Any] = dispatcher.forcing(mode, desc)
    return context


def _eager(dispatcher: Any, rows: Rows) -> tuple[Any, Any]:
    """What the runner's dispatcher answers for a step without graphs."""
    none = importlib.import_module("vllm.config").CUDAGraphMode.NONE
    utils = importlib.import_module("vllm.v1.worker.gpu.cudagraph_utils")
    if isinstance(dispatcher, utils.CudaGraphManager):
        reqs = rows.decodes + bool(rows.chunk)
        return none, utils.BatchExecutionDescriptor(cg_mode=none, num_tokens=rows.num_tokens, num_reqs=reqs)
    return none, importlib.import_module("vllm.forward_context").BatchDescriptor(rows.num_tokens)


class _Plan:
    """What is timed, and the table it makes.

    Args:
        state: the integration's.
        longest: tokens of a sequence, at most.
    """

    def __init__(self, state: Any, longest: int) -> None:
        settings = state.settings
        q = self._query_len = settings.query_len
        most_rows = min(settings.max_num_reqs, settings.max_num_tokens // q)
        short = self._short = min(SHORT_KV, longest // 4)
        most_chunk = min(settings.max_num_tokens, longest - 2)
        # Keys with LoRA differ in their linear layers; the tables know one curve a part.
        keys = [key for key in state.registry.captured() if not key.lora_case]

        def decode(key: GraphKey | None, rows: int, kv: int = short) -> _Case:
            return _Case(key, Rows(rows, kv, query_len=q))

        def chunk(key: GraphKey | None, tokens: int) -> _Case:
            return _Case(key, Rows(0, 0, tokens))

        full = {
            key.num_tokens: key for key in keys if key.part is Part.FULL and not key.decode_only
        } | {key.num_tokens: key for key in keys if key.part is Part.FULL and key.query_len == q}  # fmt: skip
        self._full = [
            decode(key, min(size // q, most_rows)) if key.query_len == q else chunk(key, size)
            for size, key in sorted(full.items())
            if size // q >= 1 and (key.query_len == q or size <= most_chunk)
        ]
        pieces = sorted((key for key in keys if key.part is Part.PIECEWISE), key=lambda key: key.num_tokens)
        self._pieces = [chunk(key, key.num_tokens) for key in pieces if key.num_tokens <= most_chunk]
        wide = [key for key in pieces if key.num_tokens >= q]
        self._piece_rows = (
            [decode(wide[-1], rows) for rows in sorted({min(each, most_rows, wide[-1].num_tokens // q)
             for each in (FEW_DECODES, most_rows)})] if wide else []
        )  # fmt: skip
        sizes = sorted({size for size in EAGER_SIZES if size < most_chunk} | {most_chunk})
        self._eager = [
            decode(None, size // q) if size // q <= most_rows and size % q == 0 else chunk(None, size) for size in sizes
        ]
        self.curves = [*self._full, *self._pieces, *self._piece_rows, *self._eager]
        chunks = [case for case in self._eager if case.rows.chunk]
        self.decodes = max(
            (case for case in (*self._full, *self._eager) if case.rows.decodes), key=lambda case: case.rows.decodes
        )
        """The step with the most decode rows"""
        self.warm = [case for cases in (self._eager, chunks, self._full, self._pieces) for case in cases[:1]]
        """One each of what a step can be"""

        long_kv = min(LONG_KV, longest // 2)
        best = max((case.key for case in self._full if case.rows.decodes and case.key is not None
                    and case.rows.decodes <= 256), key=lambda key: key.num_tokens, default=None)  # fmt: skip
        rows = min(most_rows, 256 if best is None else best.num_tokens // q)
        self._decode_slope = [decode(best, rows, kv) for kv in (short, long_kv)]
        new = max(1, min(most_chunk, longest // 2, 2048))
        before = min(LONG_KV, longest - new - 1)
        self._chunk_slope = [_Case(None, Rows(0, 0, new, context)) for context in (0, before)]
        self.slopes = [*self._decode_slope, *self._chunk_slope]

    def table(self, registry: Any) -> CostTable:
        """The table of what ran."""
        decode, chunks = _slope(self._decode_slope), _slope(self._chunk_slope)

        def curve(cases: Sequence[_Case]) -> Curve | None:
            us: dict[int, float] = {}
            for case in cases:
                if case.times:
                    size = case.rows.num_tokens if case.key is None else case.key.num_tokens
                    us[size] = case.dense_us(decode, chunks)
            return _steady(us) if us else None

        eager = curve(self._eager)
        assert eager is not None  # noqa: S101 - the case with the fewest tokens always runs
        records = [record for record in registry.records() if record.key in {case.key for case in self.curves}]
        by_part = [[each for each in records if each.key.part is part] for part in (Part.FULL, Part.PIECEWISE)]
        ran = [each for case in self.curves for each in case.times]
        return CostTable(
            version="measured in vLLM at start-up",
            measured=True,
            # A mode without graphs has no times of its own, and is never chosen.
            full=curve(self._full) or eager,
            piecewise=curve(self._pieces) or eager,
            eager=eager,
            decode_attention=decode,
            prefill_attention=chunks,
            host_full=_host(self._full),
            host_piecewise=_host(self._piece_rows or self._pieces),
            host_eager=_host(self._eager),
            step_us=max(0.0, statistics.median(each.wall - max(each.host, each.device) for each in ran)),
            capture_us=(_mean(by_part[0], "seconds", 1e6), _mean(by_part[1], "seconds", 1e6)),
            graph_bytes=(round(_mean(by_part[0], "bytes")), round(_mean(by_part[1], "bytes"))),
            graph_pieces=(
                max(1, round(_mean(by_part[0], "graphs"))), max(1, round(_mean(by_part[1], "graphs"))),
            ),
        )  # fmt: skip


def _mean(records: Sequence[Any], name: str, unit: float = 1.0) -> float:
    return statistics.fmean(unit * getattr(record, name) for record in records) if records else 0.0


def _slope(cases: Sequence[_Case]) -> AttentionCost:
    """Time a unit, from two cases that differ in nothing else."""
    if not all(case.times for case in cases):
        return AttentionCost()
    more = cases[1].units() - cases[0].units()
    return (
        AttentionCost(unit_us=max(cases[1].best().device - cases[0].best().device, 0.0) / more)
        if more > 0
        else AttentionCost()
    )


def _host(cases: Sequence[_Case]) -> HostCost:
    """Host time by rows: through the cases with the fewest rows and with the most."""
    by_rows: dict[int, list[float]] = {}
    for case in cases:
        if case.times:
            by_rows.setdefault(case.rows.decodes + bool(case.rows.chunk), []).append(case.host_us())
    if not by_rows:
        return HostCost(0.0)
    fewest, most = min(by_rows), max(by_rows)
    low, high = statistics.median(by_rows[fewest]), statistics.median(by_rows[most])
    slope = max(high - low, 0.0) / (most - fewest) if most > fewest else 0.0
    return HostCost(max(low - slope * fewest, 0.0), slope)


def _steady(us: dict[int, float]) -> Curve:
    """A curve as measured, but where a larger size seems cheaper by no more than noise, the smaller gets its time."""
    sizes = sorted(us, reverse=True)
    for larger, size in itertools.pairwise(sizes):
        if us[larger] < us[size] <= us[larger] * (1 + NOISE):
            us[size] = us[larger]
    sizes.reverse()
    return Curve(tuple(sizes), tuple(us[size] for size in sizes))
