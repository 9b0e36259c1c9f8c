"""A measured `CostTable` from vLLM's own graphs and eager steps, timed at start-up within an allowance.

Captured sizes, as many as tell the curve, and EAGER at a few, as many decodes as graphs hold among them, run each as a
whole step of made-up rows through the runner's `execute_model` and `sample_tokens`, so that what the host does for a
step is in the times. A step is timed twice: at once, for the host's time, and behind work that keeps the device busy
meanwhile, for the device's alone; further sizes only so (`kpolicy_vllm.further`). How fast the host is then is noted,
and its times are brought to one speed (`kpolicy.host_speed`). What attention costs is the slope of a step's time over
KV; it is taken off the curves, which stand for dense work (kpolicy's docs/design.md, costs). So is what each decode row
takes in every mode, whatever the step is padded to: the model's head gives every one of them logits, and a prompt chunk
only its last token (1,000 rows of a 0.5B model: 0.6 ms of 3.5). Rows needn't cost the same at every number of them:
where a larger graph seems cheaper than a smaller one, it is timed with the smaller one's rows too, and is cheaper only
if it is so with those.

An eager step runs the kernels of the pieces of its tokens, so on the device it takes no longer than those
(`kpolicy.costs.Curve.at_most`): its launches may leave the device waiting, which the host's time says already. Beyond
the last size that was timed of one of them it is decided as if it went on as the other
(`kpolicy_vllm.state.going_on_alike`).

FULL graphs of mixed batches have attention of a fixed shape: they are timed with a chunk that fills them, and have a
curve of their own.

Where ranks work together rank 0 says what runs next, all run it, and rank 0's table is everyone's.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from kpolicy.costs import AttentionCost, CostTable, Curve, HostCost
from kpolicy.keys import GraphKey
from kpolicy.kv_span import KvSpan
from kpolicy.modes import Part
from kpolicy_vllm.doubt import SLOWER_HOST
from kpolicy_vllm.experts import unbalanced
from kpolicy_vllm.further import FurtherSizes
from kpolicy_vllm.state import LOGGER
from kpolicy_vllm.synthetic import Rows, Steps
from kpolicy_vllm.timing import IN_A_ROW, NOISE, Bench, Case, Clock, CudaClock, together

__all__ = ["calibrate", "why_not"]

SHORT_KV, LONG_KV = 64, 1024
"""Tokens that decode rows attend to, and that a chunk has before it, for the two ends of the slopes."""
EAGER_SIZES = (1, 8, 64, 256, 1024, 2048)
"""Tokens of eager steps, besides the most decodes that a whole graph holds and the longest chunk"""
FEW_DECODES = 8
ALIKE = 0.05
"""Of a time: a whole graph runs the kernels of its pieces, but for attention of a fixed shape, so only what is above
is a difference between them."""
_PIECES = -1
"""In place of a larger graph's place: the pieces of as many tokens"""
NEAREST = 1.2
"""Times a size of pieces, for the next one that is timed"""
SLOPES = 0.2
"""Share of the allowance for attention's slopes"""
FURTHER, CHECKS = 0.2, 0.1
"""Shares of the allowance that curves leave to the sizes that aren't timed whole, and those to what settles doubts"""
MOST_FULL, MOST_MIXED, MOST_PIECES = 12, 6, 8
"""Sizes that are timed of whole graphs of decodes, of those of mixed batches and of pieces, the smallest and the
largest among them; between two the curve is straight"""


def why_not(runner: Any) -> str | None:
    """Why this vLLM can't be calibrated in place; None where it can."""
    config = runner.vllm_config
    if config.parallel_config.pipeline_parallel_size > 1:
        return "pipeline stages hand rows on to each other"
    if getattr(config, "kv_transfer_config", None) is not None:
        return "a KV connector would see the made-up rows"
    if getattr(config, "ec_transfer_config", None) is not None:
        return "a connector of encoder outputs expects the scheduler's word on every step"
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
    with unbalanced(runner):
        return _measured(runner, state, clock)


def _measured(runner: Any, state: Any, clock: Clock | None) -> CostTable | None:
    everywhere = state.agree

    def prepared() -> tuple[Bench, _Plan]:
        made = Bench(
            runner, lambda key, rows: _forced(state, key, rows), state.broadcast, clock or CudaClock(), everywhere
        )
        return made, _Plan(state, made.steps)

    bench, plan = together(everywhere, prepared)
    clock = bench.clock
    allowance_s = state.config.calibrate_seconds
    rejoin = None
    try:
        bench.warm(plan.warm)
        start = clock.now()
        bench.measure(plan.curves, allowance_s * (1 - SLOPES - (FURTHER if plan.has_further else 0.0)))
        bench.measure(plan.slopes, min(allowance_s * SLOPES, max(0.0, allowance_s - (clock.now() - start))))
        plan.time_further(
            bench, start + allowance_s * (1 - CHECKS), lambda asked: state.broadcast(together(everywhere, asked))
        )
        doubts = state.broadcast(together(everywhere, plan.doubts))
        bench.measure(plan.checks(doubts), max(0.0, allowance_s - (clock.now() - start)))
        if state.config.split and plan.decodes is not None and plan.chunk is not None:
            rejoin = together(everywhere, bench.rejoin, plan.decodes, plan.chunk)
    finally:
        bench.close()
    LOGGER.info(
        "kpolicy: %d of %d steps timed, %.1f times each, and %d of %d further sizes on the device alone, in %.1f s",
        *plan.timed(), statistics.fmean([len(case.whole) for case in plan.curves]), *plan.timed_alone(),
        clock.now() - start,
    )  # fmt: skip
    work_us = bench.at_one_speed()
    if rejoin is not None:
        state.rejoin_us = state.broadcast(rejoin.row_us())
    table: CostTable | None = state.broadcast(together(everywhere, plan.table, state.registry, work_us))
    if table is None:
        kinds = ", ".join(plan.unmeasured())
        state.counters.warn_once(
            "not_calibrated", f"no step of these kinds could be timed: {kinds}. Give calibrate_seconds, or a profile."
        )
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
        steps: makes the rows, and says which the model's longest sequence holds.
    """

    def __init__(self, state: Any, steps: Steps) -> None:
        longest = steps.longest
        settings = state.settings
        q = self._query_len = settings.query_len
        most_rows = min(settings.max_num_reqs, settings.max_num_tokens // q)
        short = self._short = max(q, min(SHORT_KV, longest // 4))
        most_chunk = min(settings.max_num_tokens, longest - 2)
        # Keys with LoRA differ in their linear layers; the tables know one curve a part. Where every graph has
        # adapters, steps without any run in them too.
        captured = state.registry.captured()
        cases = {key.lora_case for key in captured}
        case = 0 if 0 in cases else max(cases, default=0)
        keys = [key for key in captured if key.lora_case == case]
        self._parts = {key.part for key in captured}

        def decode(key: GraphKey | None, rows: int, kv: int = short) -> Case:
            return Case(key, Rows(rows, kv, query_len=q))

        def chunk(key: GraphKey | None, tokens: int) -> Case:
            return Case(key, Rows(0, 0, tokens))

        def of_decodes(key: GraphKey) -> bool:
            # 0.33 has graphs of decodes with as many drafts as there may be, or fewer.
            return key.query_len == q or (key.query_len is None and key.max_query_len == q)

        full = sorted((key for key in keys if key.part is Part.FULL), key=lambda key: key.num_tokens)
        decodes = {key.num_tokens: key for key in full if of_decodes(key) and key.num_tokens >= q}
        mixed = {key.num_tokens: key for key in full if not key.decode_only and q <= key.num_tokens <= most_chunk}
        self._mixed = [chunk(key, size) for size, key in mixed.items()]
        self._full = [decode(key, min(size // q, most_rows)) for size, key in decodes.items()]
        pieces = sorted((key for key in keys if key.part is Part.PIECEWISE), key=lambda key: key.num_tokens)
        self._pieces = [chunk(key, key.num_tokens) for key in pieces if key.num_tokens <= most_chunk]
        # The smallest that holds all rows: what they take shows best there.
        wide = self._wide = [key for key in pieces if key.num_tokens >= q]
        holds = next((key for key in wide if key.num_tokens >= most_rows * q), wide[-1] if wide else None)
        self._piece_rows = (
            [decode(holds, rows) for rows in sorted({min(each, most_rows, holds.num_tokens // q)
             for each in (FEW_DECODES, most_rows)})] if holds is not None else []
        )  # fmt: skip
        most_decodes = min(max((key.num_tokens // q for key in full), default=0), most_rows) * q
        sizes = sorted({size for size in EAGER_SIZES if size < most_chunk} | {most_chunk, most_decodes} - {0})
        self._eager = [
            decode(None, size // q) if size // q <= most_rows and size % q == 0 else chunk(None, size) for size in sizes
        ]
        for listed in (self._full, self._mixed, self._pieces, self._piece_rows, self._eager):
            listed[:] = [case for case in listed if steps.fits(case.rows)]
        full, pieces_too = self._full, self._pieces
        self._pieces, self._mixed = _spread(_thin(self._pieces), MOST_PIECES), _spread(self._mixed, MOST_MIXED)
        # Where all whole graphs are of mixed batches, decodes run in those.
        self._full = _spread(self._full, MOST_FULL) or self._mixed
        rows_of = [case for case in self._eager if case.rows.decodes > FEW_DECODES]
        self._eager_rows: list[Case] = []
        if rows_of and not self._piece_rows and rows_of[-1].rows.num_tokens <= most_chunk:
            self._eager_rows = [chunk(None, rows_of[-1].rows.num_tokens), rows_of[-1]]
        self.further_decodes = FurtherSizes(self._full if full else (), full)
        self.further_pieces = FurtherSizes(self._pieces, pieces_too)
        self.further_eager = FurtherSizes(self._eager, self._eager)
        self._launched = (self._full, [*self._pieces, *self._piece_rows], self._eager)
        """The steps that tell what launching takes, by kind"""
        more = [case for case in self._mixed if case not in self._full]
        self.curves = [*self._full, *more, *self._pieces, *self._piece_rows, *self._eager, *self._eager_rows[:1]]
        chunks = [case for case in self._eager if case.rows.chunk]
        self.decodes = max(
            (case for case in (*self._full, *self._eager) if case.rows.decodes),
            key=lambda case: case.rows.decodes, default=None,
        )  # fmt: skip
        """The step with the most decode rows"""
        self.warm = [case for cases in (self._eager, chunks, self._full, self._pieces) for case in cases[:1]]
        """One each of what a step can be"""
        self.chunk = chunks[0] if chunks else None

        long_kv = min(LONG_KV, longest // 2)
        best = max((case.key for case in self._full if case.rows.decodes and case.key is not None
                    and case.rows.decodes <= 256), key=lambda key: key.num_tokens, default=None)  # fmt: skip
        rows = min(most_rows, 256 if best is None else best.num_tokens // q)
        self._decode_slope = [decode(best, rows, kv) for kv in (short, long_kv)]
        new = max(1, min(most_chunk, longest // 2, 2048))
        before = min(LONG_KV, longest - new - 1)
        self._chunk_slope = [Case(None, Rows(0, 0, new, context)) for context in (0, before)]
        self._checked: list[tuple[Case, Case, Case]] = []
        """A graph, a larger one that seems cheaper, and that one with the rows of the first"""
        self._apart: tuple[Case, Case] | None = None
        """The largest whole graph that seems dearer than its pieces, and those with its rows"""
        pairs = (self._decode_slope, self._chunk_slope)
        self.slopes = [case for pair in pairs if all(steps.fits(each.rows) for each in pair) for case in pair]

    @property
    def has_further(self) -> bool:
        """Whether there are sizes that aren't timed as whole steps, whatever the time."""
        return self.further_decodes.further + self.further_pieces.further > 0

    def time_further(self, bench: Bench, until_s: float, told: Callable[[Callable[[], Any]], Any]) -> None:
        """Time on the device alone what wasn't timed whole, and what seems steep of that once more.

        The most eager decodes come first: without them none leaves its graph for EAGER (`Chooser`).

        Args:
            bench: runs steps.
            until_s: when to end, on its clock.
            told: what rank 0 finds, on every rank.
        """
        clock, steep = bench.clock, list[int]()

        def time(kind: FurtherSizes, ends_s: float, in_a_row: int, *orders: Callable[[], list[int]]) -> None:
            for asked in orders:
                cases = kind.cases(told(asked))
                bench.alone(cases, kind.expected_us, kind.host_us(), ends_s - clock.now(), in_a_row)

        if self.further_eager.lacking:
            time(self.further_eager, until_s, 1, self._most_eager)
        for kind, in_a_row, share in ((self.further_decodes, 1, 0.5), (self.further_pieces, IN_A_ROW, 1.0)):
            if kind.lacking:
                ends_s = clock.now() + share * (until_s - clock.now())
                time(kind, ends_s, in_a_row, functools.partial(kind.untimed, steep), kind.steep)
                steep = [case.tokens for case in kind.cases(told(kind.steep))]
        if self.further_eager.lacking:
            time(self.further_eager, until_s, 1, self.further_eager.smallest)
        self._full = self.further_decodes.with_times() or self._full
        self._pieces = self.further_pieces.with_times()

    def _most_eager(self) -> list[int]:
        """The place of the eager step with the most decodes, where it wasn't timed and may be quicker than its graph.

        Small steps are timed first, so that on a large model time ends before this one. It isn't quicker where
        launching it takes longer than the graph on a quick core too.
        """
        place = max(range(len(self._eager)), key=lambda each: self._eager[each].rows.decodes)
        case, whole = self._eager[place], {each.tokens: each.best().device for each in self._full if each.times}
        if case.times or not case.rows.decodes or not whole:
            return []
        graph_us = Curve(tuple(sorted(whole)), tuple(whole[tokens] for tokens in sorted(whole))).at(case.tokens)
        return [place] if self.further_eager.host_us() < SLOWER_HOST * graph_us else []

    def doubts(self) -> list[tuple[int, int]]:
        """Places of whole graphs of decodes that seem dearer than larger ones, each with the cheapest of those.

        And the place of the largest that seems dearer than its pieces, with `_PIECES`.
        """
        decode, chunks = self._attention()

        def timed(cases: Sequence[Case]) -> dict[int, float]:
            return {place: case.dense_us(decode, chunks) for place, case in enumerate(cases) if case.times}

        us = {place: each for place, each in timed(self._full).items() if self._full[place].rows.decodes}
        found = []
        for place in us:
            cheapest = min((each for each in us if each > place), key=us.__getitem__, default=place)
            if us[place] > us[cheapest] * (1 + NOISE):
                found.append((place, cheapest))
        pieces = {self._pieces[place].tokens: each for place, each in timed(self._pieces).items()}
        apart = _steady(pieces) if pieces else None
        dearer = [place for place in us if self._holding(self._full[place]) is not None
                  and _dearer(us[place], self._full[place].tokens, apart)]  # fmt: skip
        return [*found, (max(dearer), _PIECES)] if dearer else found

    def checks(self, doubts: Sequence[tuple[int, int]]) -> list[Case]:
        """The steps that settle `doubts`: the larger graph with the smaller one's rows, or pieces with them.

        And the smaller one again.
        """
        self._checked = []
        for place, larger in doubts:
            case = self._full[place]
            if larger == _PIECES:
                check = Case(self._holding(case), case.rows)
                self._apart = (case, check)
            else:
                check = Case(self._full[larger].key, case.rows)
                self._checked.append((case, self._full[larger], check))
        checked = [(case, check) for case, _, check in self._checked]
        return [each for pair in (*checked, *([self._apart] if self._apart else [])) for each in pair]

    def _holding(self, case: Case) -> GraphKey | None:
        """The smallest pieces that hold the rows of a whole graph; None where they pad more than it does."""
        holds = min((key for key in self._wide if key.num_tokens >= case.rows.num_tokens),
                    key=lambda key: key.num_tokens, default=None)  # fmt: skip
        return holds if holds is not None and holds.num_tokens <= case.tokens else None

    def _of_rows(self) -> int:
        """The largest size of whole graphs that only seem dearer than pieces, as those take as long with its rows.

        Pieces are timed with one chunk, and rows that cost more where they are many show in whole graphs alone.
        """
        if self._apart is None:
            return 0
        whole, check = self._apart
        alike = check.times and whole.best().device <= check.best().device * (1 + ALIKE)
        return whole.tokens if alike else 0

    def timed(self) -> tuple[int, int]:
        """How many of the steps were timed, and of how many."""
        return sum(bool(case.whole) for case in self.curves), len(self.curves)

    def timed_alone(self) -> tuple[int, int]:
        """How many of the sizes that weren't timed whole were timed on the device alone, and of how many."""
        kinds = (self.further_decodes, self.further_pieces, self.further_eager)
        further = [case for kind in kinds for case in kind.every if not case.whole]
        return sum(bool(case.times) for case in further), len(further)

    def unmeasured(self) -> list[str]:
        """The parts with graphs of which none ran: what they take isn't known."""
        ran = {case.key.part for case in self.curves if case.times and case.key is not None}
        missing = [part.value for part in (Part.FULL, Part.PIECEWISE) if part in self._parts - ran]
        return missing if any(case.times for case in self._eager) else [*missing, "eager"]

    def table(self, registry: Any, host_work_us: float) -> CostTable | None:
        """The table of what ran, at that speed of the host; None where a kind of launch that there is didn't."""
        if self.unmeasured():
            return None
        decode, chunks = self._attention()

        def curve(cases: Sequence[Case], rival: Curve | None = None) -> Curve | None:
            us: dict[int, float] = {}
            for case in cases:
                if case.times:
                    us[case.tokens] = case.dense_us(decode, chunks)
            for smaller, larger, check in self._checked if cases is self._full else ():
                if check.times and check.best().device > smaller.best().device * (1 - NOISE):
                    us[smaller.tokens] = us[larger.tokens]  # its rows cost more, not its graph
            return _steady(us, rival, self._of_rows() if cases is self._full else 0) if us else None

        eager = curve(self._eager)
        assert eager is not None  # noqa: S101 - or it is among the unmeasured
        pieces = curve(self._pieces)
        piecewise = pieces or curve(self._piece_rows)
        if piecewise is not None:
            eager = eager.at_most(piecewise)
        records = [record for record in registry.records() if record.key in {case.key for case in self.curves}]
        by_part = [[each for each in records if each.key.part is part] for part in (Part.FULL, Part.PIECEWISE)]
        ran = [each for case in self.curves for each in case.whole]
        host_full, host_piecewise, host_eager = _hosts(*self._launched)
        return CostTable(
            version="measured in vLLM at start-up",
            measured=True,
            # A mode without graphs has no times of its own, and is never chosen.
            full=curve(self._full, pieces) or eager,
            mixed=curve(self._mixed, pieces),
            piecewise=piecewise or eager,
            eager=eager,
            decode_attention=decode,
            prefill_attention=chunks,
            kv_span=self._kv_span(),
            host_full=host_full,
            host_piecewise=host_piecewise,
            host_eager=host_eager,
            host_work_us=host_work_us,
            step_us=max(0.0, statistics.median(each.wall - max(each.host, each.device) for each in ran)),
            capture_us=(_mean(by_part[0], "seconds", 1e6), _mean(by_part[1], "seconds", 1e6)),
            graph_bytes=(round(_mean(by_part[0], "bytes")), round(_mean(by_part[1], "bytes"))),
            graph_pieces=(
                max(1, round(_mean(by_part[0], "graphs"))), max(1, round(_mean(by_part[1], "graphs"))),
            ),
        )  # fmt: skip

    def _attention(self) -> tuple[AttentionCost, AttentionCost]:
        """What attention of decodes and of chunks costs, and decode rows besides."""
        decode, chunks = _slope(self._decode_slope), _slope(self._chunk_slope)
        return AttentionCost(row_us=self._row_us(decode, chunks), unit_us=decode.unit_us), chunks

    def _kv_span(self) -> KvSpan:
        """The contexts that both slopes were timed at."""
        row, step, prefill = 0, 0, 0
        if all(case.times for case in self._decode_slope):
            rows = self._decode_slope[1].rows
            row, step = rows.kv, rows.decodes * rows.kv
        if all(case.times for case in self._chunk_slope):
            chunk = self._chunk_slope[1].rows
            prefill = chunk.context + chunk.chunk
        return KvSpan(row, step, prefill)

    def _row_us(self, decode: AttentionCost, chunks: AttentionCost) -> float:
        """What a decode row takes besides the tokens that the step is padded to, and attention to its KV.

        Told by two steps of equal tokens: pieces of one size with few and with many decode rows, or else an eager
        step of decodes and a chunk of as many tokens. It is at most what whole graphs take more for each row, or dense
        work would seem to fall with its tokens.
        """
        pair = self._piece_rows or self._eager_rows
        if len(pair) < 2 or not all(case.times for case in pair):
            return 0.0
        few, many = pair
        less, whole = few.dense_us(decode, chunks), many.dense_us(decode, chunks)
        if whole <= less * (1 + NOISE):
            return 0.0
        found = (whole - less) / (many.sampled - few.sampled)
        ran = [case for case in self._full if case.rows.decodes and case.times]
        if len(ran) < 2:
            return found
        fewest, most = ran[0], ran[-1]
        more = max(1, most.sampled - fewest.sampled)
        rise = (most.dense_us(decode, chunks) - fewest.dense_us(decode, chunks)) / more
        return min(found, max(rise, 0.0))


def _spread(cases: list[Case], most: int) -> list[Case]:
    """At most so many of the cases, the first and the last among them, as evenly as places go."""
    if len(cases) <= most:
        return cases
    return [cases[round(i * (len(cases) - 1) / (most - 1))] for i in range(most)]


def _thin(cases: list[Case]) -> list[Case]:
    """Those of the cases that are `NEAREST` from the next larger one, so that where sizes are dense few are timed."""
    kept: list[Case] = []
    for case in reversed(cases):
        if not kept or case.tokens * NEAREST <= kept[-1].tokens:
            kept.append(case)
    return kept[::-1]


def _mean(records: Sequence[Any], name: str, unit: float = 1.0) -> float:
    return statistics.fmean(unit * getattr(record, name) for record in records) if records else 0.0


def _slope(cases: Sequence[Case]) -> AttentionCost:
    """Time a unit, from two cases that differ in nothing else."""
    if not all(case.times for case in cases):
        return AttentionCost()
    more = cases[1].units() - cases[0].units()
    return (
        AttentionCost(unit_us=max(cases[1].best().device - cases[0].best().device, 0.0) / more)
        if more > 0
        else AttentionCost()
    )


def _hosts(*kinds: Sequence[Case]) -> list[HostCost]:
    """Host time of each kind of launch: what it takes to launch, and what a row takes besides.

    A row is its request's inputs and sample, the same work whatever launches the step, so one number is taken for all
    kinds: the median slope between two steps of a kind, weighted by the rows between them, as steps with nearly as many
    differ by what the host happened to do. Each case was visited few times: no single one decides. That is mostly whole
    graphs' slope, whose cases have the most rows between them; other kinds' decides where those tell none.
    """
    points = [[(case.sampled, case.host_us()) for case in cases if case.whole] for cases in kinds]
    slopes = sorted(
        ((b - a) / (more - fewer), more - fewer)
        for found in points
        for (fewer, a), (more, b) in itertools.combinations(sorted(found), 2)
        if more != fewer
    )
    half, slope = sum(rows for _, rows in slopes) / 2, 0.0
    for each, rows in slopes:
        half -= rows
        if half <= 0:
            slope = max(each, 0.0)
            break
    return [
        HostCost(max(statistics.median(us - slope * rows for rows, us in found), 0.0), slope)
        if found
        else HostCost(0.0)
        for found in points
    ]


def _dearer(us: float, size: int, apart: Curve | None) -> bool:
    """Whether a whole graph is clearly dearer than the same kernels launched apart."""
    return apart is not None and apart.spans(size) and us > apart.at(size) * (1 + ALIKE)


def _steady(us: dict[int, float], rival: Curve | None = None, of_rows: int = 0) -> Curve:
    """A curve as measured, but where a larger size seems cheaper by no more than noise, the smaller gets its time.

    Args:
        us: microseconds by size.
        rival: a curve of the same kernels, launched apart: what isn't clearly dearer than it isn't at all.
        of_rows: sizes to this one aren't, however much dearer they seem.
    """
    for size in us if rival is not None else ():
        if rival is None or not rival.spans(size):
            continue
        apart = rival.at(size)
        if apart < us[size] and (size <= of_rows or not _dearer(us[size], size, rival)):
            us[size] = apart
    sizes = sorted(us, reverse=True)
    for larger, size in itertools.pairwise(sizes):
        if us[larger] < us[size] <= us[larger] * (1 + NOISE):
            us[size] = us[larger]
    sizes.reverse()
    return Curve(tuple(sizes), tuple(us[size] for size in sizes))
