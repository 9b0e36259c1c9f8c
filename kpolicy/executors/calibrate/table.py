"""A measured `CostTable` of one device and model: every captured graph, EAGER at a few sizes, attention, overlap.

Synthetic rows run through the executor, staging and hand-over included, in rounds over all cases: this machine's other
work comes and goes, and should slow every case alike. What attention costs is the slope of time over KV; it is taken
off the curves, which stand for padded dense work alone (docs/design.md, costs).

Where the host itself runs what it launches (a CPU), a launch's time is the host's, and the table's host costs are 0.
Samples are then brought to one speed by what they say of each other, and short steps have more of them (`one_speed`;
halves beside each other: `_Overlap`).

Curves are as measured. What may be chance between two ways goes to the one with fewer tokens and launches: by the
table's `ties`, which decisions alone read (`_curves`, `kpolicy.executors.calibrate.ties`).

Elsewhere each case is timed twice. Behind work that keeps the device busy while the host launches, device events tell
the device's time alone; run at once, the clock tells the host's time to launch, and what neither covers: staging, hand-
over, waiting. Both are brought to one speed of the host, noted beside each sample. What that is beyond a replay of a
whole graph goes to the side that bounds the case: a host and a device that are both busy don't overlap wholly.

Rows read whatever KV there is and write to the reserved slot alone, so a running server may be measured. Where no KV is
there yet, prompts that stand for dense work write their own, which is gone again afterwards.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any, NamedTuple

from kpolicy.costs import FEW_DECODES, MANY_DECODES, CostTable, Curve
from kpolicy.decision import Launch
from kpolicy.errors import GraphReplayError
from kpolicy.executors.calibrate.attention import Bases, DecodeSlope, PrefillSlope, holding
from kpolicy.executors.calibrate.bench import Bench, Measurable, Wave
from kpolicy.executors.calibrate.host import HostTimes, host_by_rows
from kpolicy.executors.calibrate.one_speed import chance
from kpolicy.executors.calibrate.padding import PaddedRows
from kpolicy.executors.calibrate.rest import by_size
from kpolicy.executors.calibrate.ties import Point, between, settled
from kpolicy.heap import frozen_heap
from kpolicy.host_speed import INSIDE
from kpolicy.keys import GraphKey
from kpolicy.kv_span import KvSpan
from kpolicy.modes import Part, Rows, SplitForm
from kpolicy.overlap import MOST_SLOWDOWN, Overlap
from kpolicy.registry import GraphRegistry
from kpolicy.settings import Settings
from kpolicy.step_effects import StepEffects

__all__ = ["Calibration", "calibrate", "can_measure", "measure"]

EAGER_SIZES = (1, 4, 16, 64, 256, 1024)
NOISE = 0.02
"""Of a time: what is within it of another is as good. Where the host runs the launches, samples tell; see `settled`."""
_LEAST_US = 0.1
_MOST_SPARED = 0.5
"""Of a prompt's time, what its own KV is believed to spare it"""
_LEAST_SIZES = 2
"""Sizes that say how a curve goes"""
_OFTEN = 3
"""Samples a round of steps beside each other where the host runs them: two cores serve those, of all the others one"""
_SEVERAL = 4
"""Decode steps beside a prompt that doesn't last as long"""
_SHORTER = (32, 4, 2)
"""Parts of the longest prompt's tokens that prompts which are over first have"""
_WAYS = 2
"""Steps that tell what beside each other costs"""
_OVER_FIRST = 0.97
"""Of a step in halves, until when its decode steps are over, for the prompt to have lasted longer"""


def can_measure(executor: Any) -> bool:
    """Whether an executor runs a model over a device's primitives, and the model says of its KV what rows need."""
    model = getattr(executor, "model", None)
    wanted = ("vocab", "pad_slot", "num_blocks", "block_size", "max_model_len")
    return hasattr(getattr(executor, "launcher", None), "adapter") and all(hasattr(model, name) for name in wanted)


def measure(executor: Any, registry: GraphRegistry, settings: Settings, *, allowance_s: float) -> CostTable:
    """`calibrate` for the model that the executor runs, without graphs that fail meanwhile; see `can_measure`.

    Those are withdrawn. What was measured of others stays, and what is left of the allowance goes to them.

    Raises:
        GraphReplayError: a graph failed that isn't named or was withdrawn before, or so late that a curve which should
            have several sizes has fewer than two, or that decode rows' attention isn't known.
    """
    stop_s = time.perf_counter() + allowance_s
    at = datetime.now(timezone.utc).isoformat(timespec="seconds")
    calibration, failed = Calibration(executor, registry, executor.model, settings), None
    try:
        while True:
            try:
                with calibration.undisturbed():
                    calibration.measure(stop_s - time.perf_counter())
                break
            except GraphReplayError as error:
                if error.key is None or not registry.withdraw(error.key, error.reason):
                    raise
                failed = error
            calibration.end()
            calibration = Calibration(executor, registry, executor.model, settings, earlier=calibration)
        lacking = "" if failed is None else calibration.lacking()
        if failed is not None and lacking:
            raise GraphReplayError(
                failed.key,
                f"{failed}; in the rest of {allowance_s:g} s {lacking}. Give calibrate= more.",
                failed.reason,
            )
        return calibration.table(f"measured {at} on {executor.name}")
    finally:
        calibration.end()


def calibrate(
    executor: Any, registry: GraphRegistry, model: Measurable, settings: Settings, *, version: str,
    allowance_s: float = 10.0,
) -> CostTable:  # fmt: skip
    """Measure what launches take.

    Args:
        executor: a `ModeRunner` over a `GraphLauncher`, its graphs captured into `registry`; nothing else may run on it
            meanwhile.
        registry: the graphs to time, and what their captures took.
        model: what the executor runs.
        settings: no larger batch is timed.
        version: names the table.
        allowance_s: seconds to spend, on few sizes of each mode first, its largest among them, and on sizes between
            powers of two last: those that it doesn't come to lie between the others' times, and where it came to no
            larger one they go on as the last two rise. Where the host runs what it launches, smallest first but for
            these last. The last case that it comes to may end beyond it.
    """
    calibration = Calibration(executor, registry, model, settings)
    try:
        with calibration.undisturbed():
            calibration.measure(allowance_s)
        return calibration.table(version)
    finally:
        calibration.end()


class Calibration:
    """`calibrate`, a slice of time after another.

    Args:
        executor, registry, model, settings: as `calibrate` takes them. Graphs that are captured later aren't timed.
        earlier: one that ended, of the same: what it measured of graphs that are still there is kept.
    """

    def __init__(
        self, executor: Any, registry: GraphRegistry, model: Measurable, settings: Settings,
        earlier: Calibration | None = None,
    ) -> None:  # fmt: skip
        self._registry = registry
        self._device: str = getattr(executor, "device_name", "")
        self._model: str = getattr(model, "full_name", "")
        self._shape: dict[str, int | str] = getattr(model, "model_shape", {}) if self._model else {}
        # A registry that Engines share has other executors' graphs too.
        self.keys = keys = [key for key in registry.captured() if key in executor.captured]
        decode = [key for key in keys if key.part is Part.FULL and key.query_len == 1]
        # Prompts are timed as one chunk, which no request can have longer; larger sizes go on as the last ones rise.
        longest = min(settings.max_num_tokens, model.max_model_len)
        mixed = [key for key in keys if key.part is Part.FULL and not key.decode_only and key.num_tokens <= longest]
        pieces = [key for key in keys if key.part is Part.PIECEWISE and key.num_tokens <= longest]
        most_reqs = min(settings.max_num_reqs, settings.max_num_tokens)
        sizes = sorted({size for size in EAGER_SIZES if size < longest} | {longest})
        self._most_reqs = most_reqs
        bench = Bench(executor, model, None if earlier is None else earlier._bench)
        self._bench: Bench = bench

        # Where pieces go over from decode rows to prompts a curve may bend.
        prompts = [key for key in pieces if key.num_tokens > most_reqs and not key.num_tokens & (key.num_tokens - 1)]
        ends = {max(each, key=_tokens) for each in (decode, mixed, pieces) if each} | {
            *sorted(prompts, key=_tokens)[:1]
        }

        def add(key: GraphKey | None, size: int, *, prompt: bool) -> tuple[int, int, bool]:
            rows = bench.rows(0, 0, size) if prompt else bench.rows(size, bench.dense_kv)
            # Small sizes stand for decode rows too, whose tokens don't come from one prompt.
            return (
                bench.add(
                    [Launch(Rows.ALL, key)], rows, own_kv=prompt and size > most_reqs,
                    wave=Wave.FAR_APART if key in ends or size in (1, longest) else _wave(key, size),
                ),
                size, prompt,
            )  # fmt: skip

        # One token, eagerly, comes first: the case that is always measured.
        self._eager = [add(None, size, prompt=size > most_reqs) for size in sizes]
        self._decoding = DecodeSlope(bench, decode, most_reqs)
        self._prefilling = PrefillSlope(bench, pieces, longest, model.max_model_len)
        self._overlap = _Overlap(bench, decode, pieces, settings)
        self._bases = Bases(bench, pieces, mixed, most_reqs)
        self._full = [add(key, key.num_tokens, prompt=False) for key in decode]
        self._mixed = [add(key, key.num_tokens, prompt=True) for key in mixed]
        # Decode rows where a batch can have so many: what they take is compared with decode graphs.
        self._pieces = [add(key, key.num_tokens, prompt=key.num_tokens > most_reqs) for key in pieces]
        self._padded = (
            PaddedRows(bench, decode),
            PaddedRows(bench, [key for key in pieces if key.num_tokens <= most_reqs]),
        )
        self._host_eager = HostTimes(bench, [None], most_reqs, longest)
        self._host_piecewise = HostTimes(bench, pieces, most_reqs, longest)

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Measure inside this where no requests are served meanwhile: prompts on their own KV, the heap frozen."""
        # A collection of garbage would take half of a second's allowance.
        with frozen_heap(collects=False), self._bench.own_kv():
            yield

    @property
    def rounds(self) -> int:
        """Samples that every case has."""
        return self._bench.rounds

    def measure(self, allowance_s: float) -> bool:
        """Spend so many seconds; whether all is measured that will be."""
        return self._bench.measure(allowance_s)

    def samples(self) -> list[dict[str, Any]]:
        """What the table is made of, as plain values: see `Bench.samples`."""
        return self._bench.samples()

    def end(self) -> None:
        """Let go of the executor."""
        self._bench.end()

    def _measured(self, cases: Sequence[tuple[int, int, bool]]) -> list[int]:
        """Those of a curve's cases that time came to."""
        return [case for case, _, _ in cases if self._bench.measured(case)]

    def lacking(self) -> str:
        """What was measured of too few sizes, in words; empty where a table says of each mode how it goes by size."""
        curves = {
            "EAGER": self._eager, "FULL decodes": self._full, "FULL graphs that hold prompts": self._mixed,
            "PIECEWISE": self._pieces,
        }  # fmt: skip
        found = [
            f"{len(self._measured(cases))} of {len(cases)} sizes of {name} were measured"
            for name, cases in curves.items()
            if len(self._measured(cases)) < min(_LEAST_SIZES, len(cases))
        ]
        if self._decoding.timed() == (0, 0):
            found.append("attention of decode rows wasn't")
        return ", ".join(found)

    def _of_each(self, step_us: float) -> Callable[[int, int], float]:
        """Device time of a case, with what is its own beyond `step_us`."""
        return lambda case, _size: self._bench.sides_us(case, step_us)[0]

    def _of_decodes(self, cases: Sequence[tuple[int, int, bool]], step_us: float) -> Callable[[int, int], float]:
        """Device time of a decode graph of that size, with what all sizes tell that is beyond `step_us`.

        With prompts that isn't a line: it hardly rises from some hundred tokens on.
        """
        bench = self._bench
        rest_us = by_size({size: bench.rest_us(case) for case, size, _ in cases if bench.measured(case)})

        def device_us(case: int, size: int) -> float:
            us = bench.us(case)
            return us + max(rest_us(size) - step_us, 0.0) if us >= bench.host_us(case) else us

        return device_us

    def table(self, version: str) -> CostTable:
        """What was measured so far, as a table of that name."""
        bench = self._bench
        cases = (*self._full, *self._mixed, *self._pieces, *self._eager)
        every = self._measured(cases)
        # A decode step's graph leaves the host nothing to do: what is beyond the device's time there no mode overlaps.
        # Staging more rows takes more, which goes to their graphs' curve: what is left is that of the least.
        whole = self._measured(self._full)
        step_us = min(map(bench.rest_us, whole or every))
        decode_attention, prefill_attention, both_us = self._bases.added(
            self._decoding.cost(), self._prefilling.cost(), step_us
        )

        def points(cases: Sequence[tuple[int, int, bool]], *, decodes: bool = False) -> dict[int, Point]:
            found = {}
            device_us = self._of_decodes(cases, step_us) if decodes and not bench.host_runs else self._of_each(step_us)
            for case, size, prompt in cases:
                if not bench.measured(case):
                    continue
                units = size * (size + 1) / 2 if prompt else size * bench.dense_kv
                cost = prefill_attention if prompt else decode_attention
                attention_us = cost.base_us + cost.row_us * size + cost.unit_us * units + cost.kv_us * size
                us = max(device_us(case, size) - attention_us, _LEAST_US)
                found[size] = Point(us, bench.error(case) if bench.host_runs else 0.0)
            return found

        eager_points, pieces_points = points(self._eager), points(self._pieces)
        modes = (
            _with_untimed(eager_points, pieces_points, [size for _, size, _ in self._eager]),
            points(self._full, decodes=True), points(self._mixed), pieces_points,
        )  # fmt: skip
        eager, full, mixed, pieces = _measured(*modes)
        assert eager is not None  # noqa: S101 - the first case of all
        full_padding, piecewise_padding = (
            padded.share(curve, decode_attention, step_us)
            for padded, curve in zip(self._padded, (full, pieces), strict=True)
        )
        overlap_cost, slowdown = self._overlap.told()
        table = CostTable(
            version=version,
            measured=True,
            **_named(eager, full, mixed, pieces),
            both_us=both_us,
            decode_attention=decode_attention,
            prefill_attention=prefill_attention,
            host_full=host_by_rows(
                bench, [(case, 1 if prompt else size) for case, size, prompt in (*self._full, *self._mixed)], step_us
            ),
            host_piecewise=self._host_piecewise.cost(step_us, self._measured(self._pieces)),
            host_eager=self._host_eager.cost(step_us, self._measured(self._eager)),
            step_us=step_us,
            overlap_cost=overlap_cost,
            decode_slowdown=slowdown,
            host_work_us=bench.host_work_us,
            host_work_inside_us=bench.host_work_inside_us,
            inside_probe=INSIDE,
            effects=StepEffects(
                warm_host_share=(self._host_piecewise.again(step_us), self._host_eager.again(step_us)),
                eager_new_us=self._host_eager.new_us(),
                padding_share=(full_padding, piecewise_padding),
                **self._overlap.effects(),
            ),
            kv_span=KvSpan(*self._decoding.timed(), self._prefilling.timed()),
            measured_on=self._device,
            measured_with=self._model,
            # A model that says its name isn't a rank's share.
            measured_over=1 if self._model else None,
            measured_shape=self._shape,
            **_captures(self._registry, self.keys),
        )
        kinds = Kinds(self._most_reqs, self._bases.spared())
        return table.decided_by(_named(*_curves(*modes, chance=bench.host_runs, kinds=kinds)))


def _tokens(key: GraphKey) -> int:
    return key.num_tokens


def _wave(key: GraphKey | None, size: int) -> Wave:
    """When a size within a curve is timed; None is EAGER."""
    if key is None:
        return Wave.USUAL
    if size & (size - 1):
        return Wave.LATER
    doublings = size.bit_length() - 1
    return Wave.FINER if doublings % 2 else Wave.USUAL if doublings % 4 else Wave.FAR_APART


def _measured(*modes: dict[int, Point]) -> tuple[Curve | None, ...]:
    """Curves of the modes as `_curves` has them, as measured: which size or mode has the preference isn't in them."""
    curves = [_curve({size: each.us for size, each in points.items()}) if points else None for points in modes]
    return _with_rise(curves)


def _with_rise(curves: list[Curve | None]) -> tuple[Curve | None, ...]:
    eager, full, mixed, pieces = curves
    return eager, full, mixed if mixed is None or pieces is None else _rising_as(mixed, pieces), pieces


def _named(
    eager: Curve | None, full: Curve | None, mixed: Curve | None, pieces: Curve | None
) -> dict[str, Any]:  # fmt: skip
    """The curves as a table has them. A mode without graphs has no times of its own, and is never chosen."""
    return {"full": full or mixed or eager, "piecewise": pieces or eager, "eager": eager, "mixed": mixed}


class Kinds(NamedTuple):
    """Sizes that decode rows are timed by, and larger ones that a prompt on its own KV is timed by, aren't alike.

    Args:
        most_reqs: the largest size of the first kind.
        spared: share of a prompt's time that its own KV spares it (`Bases.spared`), which it may be cheaper by.
    """

    most_reqs: int = 0
    spared: float = 0.0

    def noise(self, size: int, larger: int) -> float:
        """By how much a larger size may seem cheaper and not be: `NOISE`, and beyond the first kind what is spared."""
        return self.loose if size <= self.most_reqs < larger else NOISE

    @property
    def loose(self) -> float:
        return (1 + NOISE) / (1 - min(self.spared, _MOST_SPARED)) - 1


ALIKE = Kinds()
"""Sizes that are all timed by rows of one kind"""


def _curves(*modes: dict[int, Point], chance: bool, kinds: Kinds = ALIKE) -> tuple[Curve | None, ...]:
    """Curves that decisions are made by, of EAGER, FULL decodes, FULL graphs that hold prompts and PIECEWISE.

    None where one has no sizes.

    Args:
        modes: what was measured of each.
        chance: whether the samples say how far their times may be off; otherwise `NOISE` does, and `kinds`.
        kinds: which sizes were timed by rows of another kind.
    """
    eager, full, mixed, pieces = modes
    if chance:
        # The fewest rows that come to a decode graph are those for which EAGER may seem the cheaper.
        fewest = {size: smaller + 1 for smaller, size in itertools.pairwise([0, *sorted(full)])}
        all_eager = between(eager, (*fewest.values(), *mixed, *pieces))
        of_fewest = {size: all_eager[rows] for size, rows in fewest.items()}
        after = [(), (pieces, of_fewest), (pieces, all_eager), (all_eager,)]
        curves = [settled(*each) if each[0] else None for each in zip(modes, after, strict=True)]
    else:
        us = [{size: each.us for size, each in points.items()} for points in modes]
        curves = [_steady(each, kinds.noise) if each else None for each in us]
        if curves[1] is not None and curves[3] is not None:
            curves[1] = _not_above(curves[1], us[3], curves[3], NOISE)
    return _with_rise(curves)


def _curve(us: dict[int, float]) -> Curve:
    sizes = sorted(us)
    return Curve(sizes, [us[size] for size in sizes])


def _steady(us: dict[int, float], noise: Callable[[int, int], float]) -> Curve:
    """A curve to decide by: as measured, but for larger sizes that seem cheaper by what repeats of one size differ by.

    There the smaller size gets the larger one's time, and with it the preference: it shares out less padding. Whatever
    is between the two: a policy needn't have graphs of sizes that others had captured.

    Args:
        us: by size.
        noise: by how much a larger size may seem cheaper than a smaller one.
    """
    least: dict[int, float] = {}
    for size, mine in us.items():
        rivals = [(each, noise(size, larger)) for larger, each in us.items() if larger > size and each < mine]
        least[size] = min((each for each, most in rivals if mine <= each * (1 + most)), default=mine)
    return _curve(least)


def _with_untimed(
    eager: dict[int, Point], pieces: dict[int, Point], wanted: Sequence[int]
) -> dict[int, Point]:  # fmt: skip
    """EAGER with those of the wanted sizes that a short allowance left out between two that were timed.

    There it rises as PIECEWISE does: they are the same kernels, of which hundreds of tokens take no longer than few and
    thousands in proportion, so that a straight line from a few tokens to the most says little. What EAGER takes more
    changes evenly.
    """
    if len(eager) < 2 or not pieces:
        return eager
    rises, timed = _curve({size: each.us for size, each in pieces.items()}), sorted(eager)
    found = dict(eager)
    for size in wanted:
        at = bisect_left(timed, size)
        if size in eager or not 0 < at < len(timed):
            continue
        below, above = timed[at - 1], timed[at]
        share = (size - below) / (above - below)
        more = [eager[each].us - rises.at(each) for each in (below, above)]
        us = rises.at(size) + more[0] + share * (more[1] - more[0])
        found[size] = Point(max(us, _LEAST_US), eager[above].error)
    return found


def _rising_as(mixed: Curve, pieces: Curve) -> Curve:
    """FULL graphs that hold prompts beyond the largest that was timed: from there they rise as PIECEWISE does.

    They do the same work. The last two sizes of theirs, often 32 apart, say little of what is four times as large.
    """
    last = mixed.sizes[-1]
    beyond = [size for size in pieces.sizes if size > last]
    rise = [mixed.us[-1] + pieces.at(size) - pieces.at(last) for size in beyond]
    return Curve((*mixed.sizes, *beyond), (*mixed.us, *(max(us, mixed.us[-1]) for us in rise)))


def _not_above(full: Curve, measured: Mapping[int, float], pieces: Curve, noise: float) -> Curve:
    """FULL's curve where PIECEWISE seems cheaper at a size by what repeats differ by: the same kernels, one launch.

    There both take PIECEWISE's time, and FULL the preference: the host, whose speed changes, does less.

    Args:
        full: to decide by.
        measured: what pieces took by size, on the same rows.
        pieces: to decide by: less where a larger size, of prompts' time or any other's, stands for it.
        noise: by how much FULL may seem dearer on the same rows, and not be.
    """
    of = dict(zip(pieces.sizes, pieces.us, strict=True))
    us = [
        of[size] if size in of and of[size] < us <= measured[size] * (1 + noise) else us
        for size, us in zip(full.sizes, full.us, strict=True)
    ]
    return Curve(full.sizes, us)


class _Overlap:
    """How much halves that run beside each other slow each other down.

    By one and by two decode steps beside the longest prompt, so that the decode steps are over first: by how much the
    prompt is later tells the one, when they are over the other (`kpolicy.overlap.Overlap`). Beside shorter prompts
    decode steps slow down less: by long ones' speeds steps of Qwen2.5-0.5B with prompts of up to 1,280 tokens were
    expected 8% too slow, with longer ones 1% (docs/measured_fidelity.md). So several decode steps beside prompts of a
    half, a quarter and a 32nd of the longest's tokens, which are over first, tell what is left of that there
    (`StepEffects.outlasted_share`).

    Where the host runs what it launches it is the share of the shorter half's time that both take beyond the longer
    one, of a decode step beside a long prompt and several beside a shorter one together. Of both, as of one decode
    step's few milliseconds, what prompts differ by from run to run is as much again. Their rows attend to usual KV
    there, and they have more samples, as another core's other work comes and goes. What they save by chance is nothing:
    a divided step launches more.

    Timed with a few decode rows, and with one and many where the host doesn't run them itself: a mixture of experts
    reads other weights for each. One and many are timed only where there is a graph of so many tokens, since padding
    reads weights too, and where the few are `FEW_DECODES`, between which and these `CostTable.overlap_of` goes over.
    """

    def __init__(
        self, bench: Bench, decode: Sequence[GraphKey], pieces: Sequence[GraphKey], settings: Settings
    ) -> None:
        self._bench = bench
        self._few: list[tuple[int, int, int, int]] = []
        self._one: list[tuple[int, int, int, int]] = []
        self._many: list[tuple[int, int, int, int]] = []
        self._shorter: list[tuple[int, tuple[int, int, int, int]]] = []
        """By a prompt's tokens"""
        self._longest = 0
        halves = [(a, b) for a in decode for b in pieces if a.num_tokens + b.num_tokens <= settings.max_num_tokens]
        if not halves:
            return
        # A few decodes are the usual case, and larger decode batches leave less to overlap.
        first, largest = max(
            halves, key=lambda each: (each[1].num_tokens, each[0].num_tokens <= FEW_DECODES, each[0].num_tokens)
        )
        middle = holding(pieces, largest.num_tokens // 2)
        assert middle is not None  # noqa: S101 - the largest is among them
        second = (middle, _SEVERAL) if bench.host_runs else (largest, 2)
        seconds = ((largest, 1, SplitForm.BESIDE), (*second, SplitForm.DECODES_BESIDE))
        prompts = {
            key: bench.add([Launch(Rows.ALL, key)], bench.rows(0, 0, key.num_tokens))
            for key in dict.fromkeys(key for key, _, _ in seconds)
        }
        kv, often = (bench.usual_kv, _OFTEN) if bench.host_runs else (bench.short_kv, 1)
        graphs = [(first, self._few, Wave.USUAL)]
        if first.num_tokens == FEW_DECODES and not bench.host_runs:
            for count, cases in ((1, self._one), (MANY_DECODES, self._many)):
                fits = count + largest.num_tokens <= settings.max_num_tokens
                graphs += [(key, cases, Wave.FINER) for key in decode if fits and key.num_tokens == count]
        for graph, cases, wave in graphs:
            rows = graph.num_tokens
            decodes = bench.add([Launch(Rows.DECODE, graph)], bench.rows(rows, kv), wave=wave)
            for key, steps, form in seconds:
                launches = [Launch(Rows.DECODE, graph, repeat=steps), Launch(Rows.PREFILL, key, 1)]
                both = bench.rows(rows, kv, key.num_tokens, steps=steps)
                cases.append((bench.add(launches, both, form, often=often, wave=wave), decodes, prompts[key], steps))
        if not bench.host_runs:
            self._longest = largest.num_tokens
            self._time_shorter(first, pieces, self._few[0][1])

    def _time_shorter(self, graph: GraphKey, pieces: Sequence[GraphKey], decodes: int) -> None:
        """Several decode steps beside prompts which are over first; `decodes` is the case of one alone."""
        bench, rows = self._bench, graph.num_tokens
        shorter = [holding(pieces, max(self._longest // part, 1)) for part in _SHORTER]
        for key in dict.fromkeys(key for key in shorter if key is not None and key.num_tokens < self._longest):
            prompt = bench.add([Launch(Rows.ALL, key)], bench.rows(0, 0, key.num_tokens), wave=Wave.THOROUGH)
            launches = [Launch(Rows.DECODE, graph, repeat=_SEVERAL), Launch(Rows.PREFILL, key, 1)]
            both = bench.rows(rows, bench.short_kv, key.num_tokens, steps=_SEVERAL)
            case = bench.add(launches, both, SplitForm.DECODES_BESIDE, wave=Wave.THOROUGH)
            self._shorter.append((key.num_tokens, (case, decodes, prompt, _SEVERAL)))

    def told(self) -> tuple[float, float | None]:
        """`overlap_cost` and `decode_slowdown` with a few decode rows; 1 and None where nothing was timed."""
        if not self._timed(self._few):
            return 1.0, None
        if not self._bench.host_runs:
            return self._speeds(self._few)
        more, shorter = map(sum, zip(*self._paid(self._few), strict=True))
        share = _believable(more / shorter)
        return max(share, 1.0) if self._saves_by_chance() else share, None

    def effects(self) -> dict[str, Any]:
        """The same with one decode row and with many, as `StepEffects` has it; None where not both steps were timed.

        And what is left of it beside shorter prompts.
        """
        found: dict[str, Any] = {"outlasted_share": self._outlasted()}
        for name, cases in (("one_row", self._one), ("many_rows", self._many)):
            told = self._speeds(cases) if len(self._timed(cases)) == _WAYS else (None, None)
            found |= zip((f"{name}_overlap", f"{name}_slowdown"), told, strict=True)
        return found

    def _outlasted(self) -> tuple[tuple[int, float], ...] | None:
        """`StepEffects.outlasted_share`; None where nothing of it was timed."""
        cost, slowdown = self.told()
        beside_long = Overlap.of(cost, slowdown).outlasted
        if slowdown is None or cost > 1.0 or not beside_long:
            return None
        us, over, found = self._bench.us, self._bench.decodes_us, []
        for tokens, case in self._shorter:
            both, decodes, prompt, steps = case
            # Only where the decode steps are over last.
            if self._timed([case]) and over(both) >= _OVER_FIRST * us(both):
                paid = (us(both) - steps * us(decodes)) / us(prompt)
                found.append((tokens, min(max(paid / beside_long, 0.0), 1.0)))
        return (*sorted(found), (self._longest, 1.0)) if found else None

    def _saves_by_chance(self) -> bool:
        """Whether the halves in turn take longer by no more than samples differ by."""
        bench, timed = self._bench, self._timed(self._few)

        def total(parts: Iterable[tuple[int, int]]) -> tuple[float, float]:
            """Microseconds of all, and their standard error as a share."""
            us = [(times * bench.middle_us(case), bench.error(case)) for case, times in parts]
            whole = sum(each for each, _ in us)
            return whole, math.hypot(*(each * error for each, error in us)) / whole

        beside_us, error = total((both, 1) for both, *_ in timed)
        halves = (
            (half, times) for _, decodes, prompt, steps in timed for half, times in ((decodes, steps), (prompt, 1))
        )
        in_turn_us, other = total(halves)
        return in_turn_us <= beside_us * (1 + chance(error, other))

    def _speeds(self, cases: Sequence[tuple[int, int, int, int]]) -> tuple[float, float | None]:
        """(what decode steps add to the prompt's time as a share of theirs, how many times as long they take).

        Where none was seen to be over first, the share of the shorter half that both take beyond the longer, and None.
        """
        us, over = self._bench.us, self._bench.decodes_us
        first = [each for each in self._timed(cases) if 0 < over(each[0]) < _OVER_FIRST * us(each[0])]
        if not first:
            return _believable(statistics.fmean(more / shorter for more, shorter in self._paid(cases))), None
        alone_us = sum(steps * us(decodes) for _, decodes, _, steps in first)
        cost = _believable(sum(us(both) - us(prompt) for both, _, prompt, _ in first) / alone_us)
        slowdown = sum(over(both) for both, *_ in first) / alone_us
        return cost, min(max(slowdown, 1.0), MOST_SLOWDOWN)

    def _paid(self, cases: Sequence[tuple[int, int, int, int]]) -> list[tuple[float, float]]:
        """(beyond the longer half, the shorter half): microseconds of each step that was timed."""
        us, paid = self._bench.middle_us, []
        for both, decodes, prompt, steps in self._timed(cases):
            halves = steps * us(decodes), us(prompt)
            paid.append((us(both) - max(halves), min(halves)))
        return paid

    def _timed(self, cases: Sequence[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
        return [each for each in cases if all(map(self._bench.measured, each[:3]))]


def _believable(share: float) -> float:
    return min(max(share, 0.0), 2.0)


def _captures(registry: GraphRegistry, keys: Sequence[GraphKey]) -> dict[str, Any]:
    """What a graph took on average, by part."""
    found: dict[str, Any] = {"capture_us": (0.0, 0.0), "graph_bytes": (0, 0), "graph_pieces": (1, 1)}
    ours = set(keys)
    records = [record for record in registry.records() if record.key in ours]
    by_part = [[record for record in records if record.key.part is part] for part in (Part.FULL, Part.PIECEWISE)]

    def mean(value: Callable[[Any], float]) -> tuple[float, ...]:
        return tuple(statistics.fmean(map(value, each)) if each else 0.0 for each in by_part)

    found["capture_us"] = tuple(1e6 * seconds for seconds in mean(lambda record: record.seconds))
    found["graph_bytes"] = tuple(round(size) for size in mean(lambda record: record.bytes))
    found["graph_pieces"] = tuple(max(1, round(count)) for count in mean(lambda record: record.graphs))
    return found
