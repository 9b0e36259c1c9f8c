"""`CostTable`: what each way to run a batch would take, and the analytic table for when nothing was measured.

The model of a step (docs/design.md, costs):

- A launch keeps the device busy for ``dense(padded tokens) + attention(real KV)`` and the host for its launch time.
  The two overlap, so launches that follow each other take the larger of the two sums.
- Rows of both kinds in one graph add `both_us`: the host prepares two attention kernels before the device begins.
- A graph with rows of padding adds `padding_us` to both sides: nothing overlaps what an engine does for them first.
- Halves that run beside each other on the device slow each other down (`kpolicy.overlap.Overlap`).
- `step_us` is the whole cycle, less what decode steps beyond the first take off the steps to come, so that equal work
  is compared. `gap_us` is the time until the same decode rows' next token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Set
from itertools import chain
from numbers import Integral, Real
from typing import Any, NamedTuple, Protocol

import attrs

from kpolicy.budgets import Usage
from kpolicy.decision import Launch
from kpolicy.errors import ProfileError, check_kind
from kpolicy.host_speed import INSIDE, INTERPRETER, ONCE, launching_takes
from kpolicy.keys import GraphKey
from kpolicy.kv_span import KvSpan
from kpolicy.modes import Part, Rows
from kpolicy.overlap import Overlap, between, check_slowdown
from kpolicy.reasons import Basis
from kpolicy.served_host import ServedHost
from kpolicy.settings import Objective
from kpolicy.shapes import BatchNumbers
from kpolicy.step_effects import StepEffects
from kpolicy.what_runs import WhatRuns

__all__ = [
    "FEW_DECODES",
    "H200",
    "LLAMA_8B",
    "MIDDLE_OF",
    "AttentionCost",
    "Cost",
    "CostTable",
    "Costing",
    "Curve",
    "DeviceFigures",
    "HostCost",
    "ModelFigures",
    "Ties",
    "analytic_costs",
    "title_of",
]


_WAITS = 16
"""Shares of a slot that a launch's repeats may wait for"""
EARLY = 1.15
"""Times as long as expected that decode steps beside a prompt may take, to be over when the step ends.

Of 65 shapes with long prompts, of four models on an H200, decode steps slowed down by more than 1.15 times their
model's median in four, by up to 1.31 times (benchmarks/results/h200/halves.json); those would be late all the same.
Steps that waited by it took 0.988 to 1.022 times as long as the same at once.
"""
MIDDLE_OF = "the middle of each figure of "
"""What the version of several tables' middle begins with (`kpolicy.middle_profile`), before how many and each one's"""
FEW_DECODES = 8
"""Decode rows, at most, beside which `CostTable.overlap_cost` is timed where a graph has so few"""
MANY_DECODES = 32
"""Decode rows from which what overlapping costs is taken to be the same"""


class Cost(NamedTuple):
    """What one way to run a batch takes, in microseconds."""

    step_us: float
    """The whole cycle, less what decode steps beyond the first take off the steps to come."""
    gap_us: float
    """Time until the same decode rows' next token."""
    cycle_us: float
    """From this step's start to the next one's; the prefill rows are done by then."""
    device_us: float
    host_us: float

    @property
    def bound_by(self) -> str:
        """The side that bounds the step: ``device`` or ``host``."""
        return "host" if self.host_us > self.device_us else "device"


_PLAIN: Mapping[type, Set[type]] = {Integral: {int}, Real: {int, float}}
"""Python's own numbers of each kind"""


def _ints(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(int(value) for value in _numbers("curve sizes", values, Integral))


def _floats(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(float(value) for value in _numbers("curve times", values, Real))


def _numbers(what: str, values: Any, kind: type) -> tuple[Any, ...]:
    """The numbers: Python's, or another library's that say of which kind they are, as numpy's do.

    Text, bools and numbers of another kind would be taken for something they aren't.
    """
    found = tuple(values) if isinstance(values, Iterable) and not isinstance(values, str) else (None,)
    # Curves are made while steps run, and to ask each value for an abstract class takes most of making one.
    if not {*map(type, found)} <= _PLAIN[kind] and not all(_is_number(value, kind) for value in found):
        numbers = "whole numbers" if kind is Integral else "numbers"
        raise ProfileError(f"{what} are {values!r:.80}; they are a sequence of {numbers}.")
    return found


def _is_number(value: object, kind: type) -> bool:
    """Whether it is a number of that kind, of any library; a bool isn't."""
    return type(value) in _PLAIN[kind] or (isinstance(value, kind) and not isinstance(value, bool))


def _all_below(most: float, values: Iterable[Any]) -> bool:
    return all(_is_number(value, Real) and 0 <= value < most for value in values)


@attrs.frozen
class Curve:
    """Microseconds by padded tokens, as measured: it need not rise. Linear between points and beyond the last two.

    Raises:
        ProfileError: no points, sizes that don't rise, or a time that isn't a positive number.
    """

    sizes: tuple[int, ...] = attrs.field(converter=_ints)
    us: tuple[float, ...] = attrs.field(converter=_floats)

    def __attrs_post_init__(self) -> None:
        if not self.sizes or len(self.sizes) != len(self.us):
            raise ProfileError(f"a curve has {len(self.sizes)} sizes and {len(self.us)} times; one time a size.")
        if any(b <= a for a, b in zip(self.sizes, self.sizes[1:], strict=False)) or self.sizes[0] < 1:
            raise ProfileError(f"curve sizes {self.sizes} must rise from at least 1.")
        if not all(0 < value < 1e12 for value in self.us):
            raise ProfileError("a curve has a time that isn't a positive number of microseconds.")

    def spans(self, size: int) -> bool:
        """Whether that size lies between the first point and the last; elsewhere `at` is extrapolated."""
        return self.sizes[0] <= size <= self.sizes[-1]

    def at(self, size: int) -> float:
        """Microseconds at that size."""
        sizes, us = self.sizes, self.us
        i = bisect_left(sizes, size)
        if i < len(sizes) and sizes[i] == size:
            return us[i]
        if i == 0 or len(sizes) == 1:
            return us[0]
        if i == len(sizes):
            return max(us[-1] + (size - sizes[-1]) * self._slope_beyond, 0.0)
        return max(us[i] + (size - sizes[i]) * self._slope(i), 0.0)

    def _slope(self, i: int) -> float:
        """Microseconds a token between point i and the one before it."""
        return (self.us[i] - self.us[i - 1]) / (self.sizes[i] - self.sizes[i - 1])

    @property
    def _slope_beyond(self) -> float:
        """Microseconds a token beyond the last point: that of the last two, but never falling."""
        return max(self._slope(len(self.sizes) - 1), 0.0)

    def at_most(self, other: Curve) -> Curve:
        """This curve, nowhere above another at sizes of either that both span: of work that is part of the other's.

        Beyond the other's last size it rises as it did, from where it is held there. The same curve where it is nowhere
        above. It has no size beyond its own.
        """
        if not any(other.spans(size) and other.at(size) < self.at(size) for size in (*self.sizes, *other.sizes)):
            return self
        sizes = sorted({*self.sizes, *filter(self.spans, other.sizes)})
        last = other.sizes[-1]
        less = max(self.at(last) - other.at(last), 0.0) if self.spans(last) else 0.0

        def held(size: int) -> float:
            if size > last:
                return max(self.at(size) - less, 0.0)
            return min(self.at(size), other.at(size)) if other.spans(size) else self.at(size)

        return Curve(sizes, [held(size) for size in sizes])

    def going_on_as(self, other: Curve) -> Curve:
        """This curve, beyond its own last size as far above or below another as it is there: of the same work.

        Where the other begins behind that size, it goes on with the other's times; a single point says nothing of how
        times rise, so that all of it is as the other, but falls nowhere. The same curve where the other ends no later,
        or where a time wouldn't be above 0.
        """
        last = self.sizes[-1]
        if other.sizes[-1] <= last:
            return self
        more = self.us[-1] - other.at(last) if other.sizes[0] <= last else 0.0
        points = {size: us + more for size, us in zip(other.sizes, other.us, strict=True)
                  if size > last or len(self.sizes) == 1}  # fmt: skip
        if min(points.values()) <= 0:
            return self
        points |= zip(self.sizes, self.us, strict=True)
        sizes = sorted(points)
        if len(self.sizes) == 1:  # another's noise is no reason to take a larger size
            least = points[sizes[-1]]
            for size in reversed(sizes):
                least = points[size] = min(least, points[size])
        return Curve(sizes, [points[size] for size in sizes])

    def upto(self, most: int) -> list[float]:
        """`at` for every size from 0 to `most`, 0 being 0: segment by segment, because a table is made of thousands."""
        sizes, us = self.sizes, self.us
        found = [0.0] + [us[0]] * (sizes[0] if len(sizes) > 1 else most)
        for i in range(1, len(sizes)):
            point, slope = sizes[i], self._slope(i)
            high = us[i]
            found += _not_below_0([high + (size - point) * slope for size in range(sizes[i - 1] + 1, point)])
            found.append(high)
        if len(sizes) > 1:
            point, slope = sizes[-1], self._slope_beyond
            high = us[-1]
            found += _not_below_0([high + (size - point) * slope for size in range(point + 1, most + 1)])
        return found[: most + 1]


def _not_below_0(times: list[float]) -> list[float]:
    """Rounding goes below 0 between points of very unlike times; one look is cheaper than a call a size."""
    return times if min(times, default=0.0) >= 0.0 else [max(time, 0.0) for time in times]


@attrs.frozen(kw_only=True)
class Ties:
    """Times that decisions take in place of measured ones, of the `CostTable`'s curves of the same names.

    Where a larger size, or a mode with more launches, seemed cheaper by no more than repeats differ by, a size has that
    one's time here, and with it the preference. A curve has these sizes alone; None where it has none.
    """

    full: Curve | None = None
    piecewise: Curve | None = None
    eager: Curve | None = None
    mixed: Curve | None = None


@attrs.frozen
class AttentionCost:
    """Device time of attention over all layers: ``base + per_row * rows + per_unit * units`` microseconds.

    For decode rows a unit is a KV token attended to; for prefill rows it is a query-key pair. Rows are decode
    requests, or prefill tokens.

    Args:
        base_us: microseconds where there are such rows at all.
        row_us: for each row.
        unit_us: for each unit.
        kv_us: for prefill rows, more for each KV token that a chunk attends to: a short chunk goes through a long
            context one block after the other however few its pairs are, and MLA expands every one. 0 for decode rows,
            whose units are KV tokens.
    """

    base_us: float = 0.0
    row_us: float = 0.0
    unit_us: float = 0.0
    kv_us: float = 0.0

    def __attrs_post_init__(self) -> None:
        if not _all_below(1e9, attrs.astuple(self)):
            raise ProfileError(f"{self!r}: attention costs are microseconds from 0 up.")


@attrs.frozen
class HostCost:
    """Host time to launch one forward in a mode: ``base + per_req * requests + the attention of its rows``.

    Outside a whole graph the host launches attention itself, and decode and prefill rows each have kernels of their
    own: a mixed launch pays for both.

    Args:
        base_us: microseconds of a launch, whatever its rows.
        req_us: for each request.
        decode_us: more where the launch has decode rows.
        prefill_us: more where the launch has prefill rows.
    """

    base_us: float
    req_us: float = 0.0
    decode_us: float = 0.0
    prefill_us: float = 0.0

    def __attrs_post_init__(self) -> None:
        if not _all_below(1e9, attrs.astuple(self)):
            raise ProfileError(f"{self!r}: host costs are microseconds from 0 up.")

    def times(self, factor: float) -> HostCost:
        """As many times the host's time."""
        return HostCost(self.base_us * factor, self.req_us * factor, self.decode_us * factor, self.prefill_us * factor)

    def base_for(self, *, decodes: bool, prefills: bool) -> float:
        """`base_us` with the attention of the rows that there are; `req_us` for each request comes on top."""
        if decodes:
            return self.base_us + self.decode_us + (self.prefill_us if prefills else 0.0)
        return self.base_us + self.prefill_us if prefills else self.base_us


_PARTS: tuple[tuple[type, tuple[str, ...], str], ...] = (
    (Curve, ("full", "piecewise", "eager", "mixed"), "Curve((1, 512), (2000.0, 4000.0))"),
    (AttentionCost, ("decode_attention", "prefill_attention"), "AttentionCost(unit_us=0.01)"),
    (HostCost, ("host_full", "host_piecewise", "host_eager"), "HostCost(50.0)"),
    (StepEffects, ("effects",), "StepEffects()"),
    (KvSpan, ("kv_span",), "KvSpan(decode_row=1024, decode_step=8192, prefill=6144)"),
    (ServedHost, ("served",), "ServedHost(scheduler_us=150.0)"),
    (Ties, ("ties",), "Ties(full=Curve((256,), (3300.0,)))"),
)
"""Fields of a `CostTable` that have parts of their own: of which class, and what makes one"""
_CURVES = ("full", "piecewise", "eager", "mixed")


def title_of(version: str) -> str:
    """`CostTable.title` of a table whose version that is, or ends with it."""
    first, *others = version.split("; ") if MIDDLE_OF in version else [version]
    return f"{first} and {len(others)} more" if others else first


@attrs.frozen(kw_only=True)
class CostTable:
    """What launches take on one device for one model.

    Args:
        version: names the table; it changes when a number does.
        measured: whether the numbers were measured on the device.
        kernel_tables: whether its device times are from kernel tables that their publisher measured, on a device of the
            kind; `measured` isn't so then, as host and capture costs are analytic.
        full, piecewise, eager: device time of the dense work by padded tokens, in each mode, as measured. Calibration
            before `ties` kept what decisions take here instead.
        mixed: the same for FULL graphs that hold prefill rows too, whose attention has kernels for both kinds whatever
            rows come; None where `full` stands for them.
        decode_attention, prefill_attention: device time of attention on the real KV.
        host_full, host_piecewise, host_eager: host time of one forward's launches. A whole graph launches its
            attention itself, so that `host_full` has none by kind of rows.
        step_us: time of a step that overlaps nothing (sampling, hand-over).
        overlap_cost: what decode steps beside a prompt add to its device time, as a share of theirs: 0 when overlap is
            free, 1 when nothing overlaps. With fewer than `FEW_DECODES` decode rows, or more, see `overlap_of`.
        decode_slowdown: how many times as long as alone decode steps take beside a prompt; None where it wasn't timed:
            both halves slow down alike then, to ``1 + overlap_cost``. See `kpolicy.overlap.Overlap`.
        both_us: more of device time where one launch of a graph has decode and prefill rows, by part: (FULL,
            PIECEWISE).
        padding_us: more for a launch of a graph with any padding, whatever its size, which nothing overlaps, by part:
            (FULL, PIECEWISE). An engine may clear buffers then that an exact size leaves alone.
        capture_us: seconds of capture a graph, in microseconds, by part: (FULL, PIECEWISE).
        graph_bytes: bytes a graph, by part.
        graph_pieces: device graphs that one key is made of, by part: one for FULL, one a piece for PIECEWISE.
        host_work_us: time of `kpolicy.host_speed`'s fixed work while this was measured; 0 where it wasn't noted.
        host_probe: which fixed work that was; times of another say nothing here.
        host_work_inside_us: likewise the time of the work that a `SpeedTimer` runs inside steps, at the same speed; 0
            where none did. It is what the host's times hold at then, and says more of long steps.
        inside_probe: which work that was, likewise.
        effects: what launches take more or less by what ran before them and by what their rows are. Simulations read it
            (`kpolicy.simulate.step_costs`), and plans what padding takes (`replay_us`); of it `cost`, decisions and the
            simulated executor read what one decode row and what many take beside a prompt (`overlap_of`).
        kv_span: the contexts that attention was timed at; None where that wasn't recorded.
        served: what the host of a server took besides launching, for simulations; None where no calibration served.
        ties: what decisions take in place of times that differ by chance (`deciding`); `cost`, the simulated executor
            and simulations don't read it. None where there is nothing of the kind.
        measured_on: the full name of the device that it was measured on; empty where nobody said. Files have it in the
            profile, and two tables that differ in nothing else are equal.
        measured_with: likewise the model, as it calls itself.
        measured_over: likewise how many devices each layer was split over; None where nobody said.
        measured_shape: likewise what tells that model from others of its name (`WhatRuns.model_shape`).
    """

    version: str
    measured: bool
    kernel_tables: bool = False
    full: Curve
    piecewise: Curve
    eager: Curve
    decode_attention: AttentionCost = AttentionCost()
    prefill_attention: AttentionCost = AttentionCost()
    host_full: HostCost
    host_piecewise: HostCost
    host_eager: HostCost
    step_us: float = 0.0
    overlap_cost: float = attrs.field(default=1.0)
    decode_slowdown: float | None = attrs.field(default=None)
    mixed: Curve | None = None
    both_us: tuple[float, float] = (0.0, 0.0)
    padding_us: tuple[float, float] = (0.0, 0.0)
    capture_us: tuple[float, float] = (0.0, 0.0)
    graph_bytes: tuple[int, int] = (0, 0)
    graph_pieces: tuple[int, int] = (1, 1)
    host_work_us: float = 0.0
    host_probe: str = INTERPRETER
    host_work_inside_us: float = 0.0
    inside_probe: str = ONCE
    effects: StepEffects = attrs.field(default=StepEffects())
    kv_span: KvSpan | None = None
    served: ServedHost | None = None
    ties: Ties | None = None
    measured_on: str = attrs.field(default="", eq=False)
    measured_with: str = attrs.field(default="", eq=False)
    measured_over: int | None = attrs.field(default=None, eq=False)
    measured_shape: Mapping[str, int | str] = attrs.field(factory=dict, eq=False)

    def __attrs_post_init__(self) -> None:
        for kind, names, example in _PARTS:
            for name in names:
                value = getattr(self, name)
                if value is not None or name not in ("mixed", "kv_span", "served", "ties"):
                    check_kind(name, value, kind, example)
        for name in ("measured", "kernel_tables"):
            check_kind(name, getattr(self, name), bool, "True")
        if self.kernel_tables and self.measured:
            raise ProfileError(
                "a table was measured on its device or is of published kernel tables; leave measured or kernel_tables "
                "out."
            )
        if self.ties is not None:
            self._check_ties(self.ties)
        if self.served is not None and self.served.host_work_us and not self.host_work_us:
            raise ProfileError(
                f"served has {len(self.served.host_work_us)} times of the fixed work, and host_work_us, which they are "
                "held to, is 0. Leave them out, or calibrate again."
            )
        if self.decode_attention.kv_us:
            raise ProfileError(
                f"decode_attention has kv_us {self.decode_attention.kv_us}; it takes unit_us: its units are KV tokens."
            )
        by_part = (self.both_us, self.padding_us, self.capture_us, self.graph_bytes, self.graph_pieces)
        try:
            times = (*chain(*by_part), self.step_us, self.host_work_us, self.host_work_inside_us)
            fine = {len(pair) for pair in by_part} == {2} and all(0 <= value < 1e15 for value in times)
        except TypeError:
            fine = False
        if not fine:
            raise ProfileError(
                f"step_us is {self.step_us}, both_us {self.both_us}, padding_us {self.padding_us}, "
                f"capture_us {self.capture_us}, graph_bytes {self.graph_bytes}, "
                f"graph_pieces {self.graph_pieces}, host_work_us {self.host_work_us} and host_work_inside_us "
                f"{self.host_work_inside_us}; all are finite numbers from 0 up, those by part two, for (FULL, "
                "PIECEWISE)."
            )

    @overlap_cost.validator
    def _check_overlap(self, _: Any, value: float) -> None:
        if not 0 <= value <= 2:
            raise ProfileError(f"overlap_cost is {value}; 0 is free overlap, 1 none, and over 2 isn't believable.")

    @decode_slowdown.validator
    def _check_slowdown(self, _: Any, value: float | None) -> None:
        check_slowdown("decode_slowdown", value)

    def at_host_speed(self, work_us: float | None) -> CostTable:
        """The table of a host on which the fixed work takes so long: the host's times and `step_us` change with it.

        The work is that of `host_probe`; by how much they change, `kpolicy.host_speed.launching_takes` tells, from the
        speed that the table was measured at: a table brought to one speed and then to another isn't exact. Unchanged
        where either time wasn't noted.

        Raises:
            ProfileError: the time is below 0.
        """
        if work_us is not None and work_us < 0:
            raise ProfileError(f"host_work_us is {work_us}; it is microseconds from 0 up. Measure the steps again.")
        if not work_us or not self.host_work_us:
            return self
        slower = work_us / self.host_work_us
        times = launching_takes(slower)
        return attrs.evolve(
            self, step_us=self.step_us * times, host_work_us=work_us,
            host_work_inside_us=self.host_work_inside_us * slower, host_full=self.host_full.times(times),
            host_piecewise=self.host_piecewise.times(times), host_eager=self.host_eager.times(times),
            effects=self.effects.at_host_speed(times),
        )  # fmt: skip

    @property
    def notes_inside(self) -> bool:
        """Whether what a `SpeedTimer` of today notes inside steps can be held to this table."""
        return self.host_work_inside_us > 0 and self.inside_probe == INSIDE

    def host_work_of(self, inside_us: float | None) -> float | None:
        """`host_work_us` on a host where the work inside steps takes so long; None where one of them wasn't noted."""
        if not inside_us or not self.host_work_inside_us or not self.host_work_us:
            return None
        return self.host_work_us * inside_us / self.host_work_inside_us

    def _check_ties(self, ties: Ties) -> None:
        for name in _CURVES:
            tied, curve = getattr(ties, name), getattr(self, name)
            if tied is None:
                continue
            check_kind(f"ties.{name}", tied, Curve, "Curve((256,), (3300.0,))")
            unknown = sorted({*tied.sizes} - {*(() if curve is None else curve.sizes)})
            if unknown:
                raise ProfileError(
                    f"ties.{name} has a time at size {unknown[0]}, and {name} was measured at "
                    f"{'no size' if curve is None else curve.sizes}; leave it out there."
                )

    @property
    def deciding(self) -> CostTable:
        """The table that decisions are made by: `ties` in place of what was measured there."""
        if self.ties is None:
            return self
        curves = dict[str, Any]()
        for name in _CURVES:
            tied, curve = getattr(self.ties, name), getattr(self, name)
            if tied is not None:
                us = dict(zip(tied.sizes, tied.us, strict=True))
                measured = zip(curve.sizes, curve.us, strict=True)
                curves[name] = Curve(curve.sizes, [us.get(size, mine) for size, mine in measured])
        return attrs.evolve(self, ties=None, **curves)

    def decided_by(self, curves: Mapping[str, Curve | None]) -> CostTable:
        """The table with the `ties` by which `deciding` has these curves, by name, of the same sizes."""
        ties = dict[str, Curve | None]()
        for name, decided in curves.items():
            mine = getattr(self, name)
            if decided is not None:
                other = [(size, us) for size, us, own in zip(mine.sizes, decided.us, mine.us, strict=True) if us != own]
                ties[name] = Curve(*zip(*other, strict=True)) if other else None
        return attrs.evolve(self, ties=Ties(**ties) if any(ties.values()) else None)

    def curve_of(self, launch: Launch) -> Curve:
        """The dense work's curve that a launch is costed by."""
        return self.eager if launch.key is None else self.curve_for(launch.key)

    def curve_for(self, key: GraphKey) -> Curve:
        """The dense work's curve of a graph."""
        if key.part is not Part.FULL:
            return self.piecewise
        return self.full if self.mixed is None or key.decode_only else self.mixed

    @property
    def title(self) -> str:
        """`version` for a line that people read: of the middle of several tables the first one's alone."""
        return title_of(self.version)

    @property
    def source(self) -> str:
        """Where its times are from, in words."""
        if self.kernel_tables:
            return "kernels measured by their publisher, not on your device; host costs are analytic"
        return "measured" if self.measured else "analytic, not measured"

    @property
    def basis(self) -> Basis:
        """What a decision by it takes for granted."""
        if self.kernel_tables:
            return Basis.COSTS_KERNEL_TABLES
        return Basis.NOTHING if self.measured else Basis.COSTS_ANALYTIC

    @property
    def measured_of(self) -> WhatRuns:
        """What it was measured of, as far as anyone said."""
        return WhatRuns(self.measured_on, self.measured_with, self.measured_over, self.measured_shape)

    def unlike(self, here: WhatRuns) -> tuple[str, str, str]:
        """How what runs here isn't what was measured: see `WhatRuns.unlike`. All empty where nothing was measured."""
        return self.measured_of.unlike(here) if self.measured else ("", "", "")

    def padding_of(self, key: GraphKey, num_tokens: int) -> float:
        """`padding_us` of a graph where fewer tokens than it has replay; 0 where it is full."""
        if num_tokens >= key.num_tokens:
            return 0.0
        return self.padding_us[0 if key.part is Part.FULL else 1]

    def padded_us(self, key: GraphKey, full_us: float, next_us: float) -> float:
        """Device time of a graph's dense work where decode rows alone don't fill it, by `effects.padding_share`.

        The first token of padding takes what one more token of decode rows would, the others that share of what they
        would.

        Args:
            key: the graph.
            full_us: its time where it is full.
            next_us: that of a graph of one token more than the decode rows have. An array of them gives an array.
        """
        return next_us + self.effects.padding_share[0 if key.part is Part.FULL else 1] * (full_us - next_us)

    def replay_us(self, key: GraphKey, decodes: int = 0) -> float:
        """Device time of a graph's dense work. Simulations and plans count padding so, decisions as further tokens.

        Args:
            key: the graph.
            decodes: tokens in it without padding, where all are decode rows'; 0 of others.
        """
        curve = self.curve_for(key)
        full_us = curve.at(key.num_tokens)
        if self.effects.padding_share[0 if key.part is Part.FULL else 1] == 1 or not 0 < decodes < key.num_tokens:
            return full_us
        return self.padded_us(key, full_us, curve.at(decodes + 1))

    def spans(self, launches: tuple[Launch, ...], numbers: BatchNumbers) -> bool:
        """Whether each launch's size lies within the curve of its kind: elsewhere its dense work is extrapolated."""
        for launch in launches:
            size = launch.size(numbers)
            if size and not self.curve_of(launch).spans(size):
                return False
        return True

    def usage_of(self, key: GraphKey) -> Usage:
        """What capturing that key is expected to take."""
        which = 0 if key.part is Part.FULL else 1
        return Usage(
            graphs=self.graph_pieces[which],
            bytes=self.graph_bytes[which],
            seconds=self.capture_us[which] / 1e6,
            streams=1,
        )

    def decode_attention_us(self, numbers: BatchNumbers) -> float:
        cost = self.decode_attention
        if not numbers.num_decodes:
            return 0.0
        return cost.base_us + cost.row_us * numbers.num_decodes + cost.unit_us * numbers.decode_kv_tokens

    def prefill_attention_us(self, numbers: BatchNumbers) -> float:
        cost = self.prefill_attention
        if not numbers.num_prefills:
            return 0.0
        us = cost.base_us + cost.row_us * numbers.num_prefill_tokens + cost.unit_us * numbers.prefill_pairs
        return us + cost.kv_us * numbers.prefill_kv_tokens

    def launch_us(self, launch: Launch, numbers: BatchNumbers, dense_us: float | None = None) -> tuple[float, float]:
        """(device, host) time of one repeat of a launch; with `dense_us`, where it is given, for its dense work."""
        decodes = numbers.num_decodes if launch.rows is not Rows.PREFILL else 0
        prefills = numbers.num_prefills if launch.rows is not Rows.DECODE else 0
        decode = self.decode_attention_us(numbers) if decodes else 0.0
        prefill = self.prefill_attention_us(numbers) if prefills else 0.0
        reqs = numbers.total_reqs if launch.rows is Rows.ALL else decodes or prefills
        both = padding = 0.0
        if launch.key is None:
            host = self.host_eager
            if dense_us is None:
                dense_us = self.eager.at(launch.size(numbers))
        else:
            full = launch.key.part is Part.FULL
            host = self.host_full if full else self.host_piecewise
            if dense_us is None:
                dense_us = self.curve_for(launch.key).at(launch.key.num_tokens)
            if decodes and prefills:
                both = self.both_us[0 if full else 1]
            padding = self.padding_of(launch.key, launch.num_tokens(numbers))
        base_us = host.base_for(decodes=decodes > 0, prefills=prefills > 0)
        return (dense_us + padding) + (decode + prefill) + both, base_us + host.req_us * reqs + padding

    def overlap_of(self, num_decodes: int, prompt_tokens: int | None = None) -> Overlap:
        """What halves beside each other take with so many decode rows; between those timed it changes evenly.

        A rank without any, beside others that have some, counts as one row: its graph runs all the same.

        Args:
            num_decodes: decode rows.
            prompt_tokens: of all prompts' chunks; None for long ones.
        """
        share = 1.0 if prompt_tokens is None else self.effects.outlasted_at(prompt_tokens)
        return self._overlap_with(num_decodes).outlasting(share)

    def _overlap_with(self, num_decodes: int) -> Overlap:
        """`overlap_of` beside long prompts."""
        effects, few = self.effects, self.overlap
        if num_decodes < FEW_DECODES:
            one = self._overlap_by(effects.one_row_overlap, effects.one_row_slowdown)
            return between(one, few, num_decodes, (1, FEW_DECODES))
        many = self._overlap_by(effects.many_rows_overlap, effects.many_rows_slowdown)
        return between(few, many, min(num_decodes, MANY_DECODES), (FEW_DECODES, MANY_DECODES))

    def _overlap_by(self, cost: float | None, slowdown: float | None) -> Overlap:
        """With other decode rows than `FEW_DECODES`; what wasn't timed is as with those."""
        if cost is None:
            return self.overlap
        return Overlap.of(cost, self.decode_slowdown if slowdown is None else slowdown)

    @property
    def overlap(self) -> Overlap:
        """What halves beside each other take with `FEW_DECODES` decode rows."""
        return Overlap.of(self.overlap_cost, self.decode_slowdown)

    def cost(self, launches: tuple[Launch, ...], numbers: BatchNumbers) -> Cost:
        """What running these launches as one step takes. The readable form; compiled policies inline it."""
        return self.cost_by(self.launch_us, launches, numbers)

    def cost_by(
        self, launch_us: Callable[[Launch, BatchNumbers], tuple[float, float]], launches: tuple[Launch, ...],
        numbers: BatchNumbers, *, leads: bool = False,
    ) -> Cost:  # fmt: skip
        """`cost` where launches take something else.

        Args:
            launch_us: (device, host) time of one repeat of a launch.
            launches: the launches.
            numbers: the step's rows.
            leads: whether a half on another stream begins only when one repeat of the first half's launch is done, as
                one host thread launches both. Further repeats are replays of what was staged once, and nearly free.
                `cost` leaves it out: decode halves are graphs, of which it is a few hundred microseconds, and what
                ranks tell each other of halves is linear in their times.
        """
        if not launches:
            return Cost(self.step_us, self.step_us, self.step_us, 0.0, 0.0)
        device, host = launch_us(launches[0], numbers)
        if len(launches) == 1:
            cycle = max(device, host) + self.step_us
            return Cost(cycle, cycle, cycle, device, host)
        first, second = launches
        second_device, second_host = launch_us(second, numbers)
        steps = first.repeat
        decodes_us = steps * device
        host_us = steps * host + second_host
        if second.stream == first.stream:
            device_us = decodes_us + second_device
        else:
            overlap = self.overlap_of(numbers.num_decodes, numbers.num_prefill_tokens)
            device_us = overlap.device_us(decodes_us, second_device, host if leads else 0.0)
        cycle = max(device_us, host_us) + self.step_us
        if steps == 1:
            return Cost(cycle, cycle, cycle, device_us, host_us)
        # A rank that is idle beside others has no rows.
        share = numbers.num_decodes / max(numbers.num_decodes + numbers.waiting_reqs, 1)
        spared_us = self.spared_us(device, host, self.own_attention_us(numbers), share)
        return Cost(cycle - (steps - 1) * spared_us, cycle / steps, cycle, device_us, host_us)

    def own_attention_us(self, numbers: BatchNumbers) -> float:
        """Attention of the decode rows that grows with them and their KV: other rows in the step save nothing of it."""
        cost = self.decode_attention
        return cost.row_us * numbers.num_decodes + cost.unit_us * numbers.decode_kv_tokens

    def spared_us(self, device_us: float, host_us: float, own_us: float, share: float) -> float:
        """What one more decode step now takes off the steps to come.

        Where nobody waits that is a decode-only step: the rows would have had it to themselves. Where requests wait
        for nothing but a place among a step's tokens, they would have shared it with those: they take their own
        attention off it, and their share of what a step takes whatever its rows, which is weights read and launches.

        Args:
            device_us: device time of the decode step.
            host_us: host time of its launch.
            own_us: attention of its rows alone.
            share: its rows over these and the `BatchNumbers.waiting_reqs`.
        """
        return max(own_us + share * (device_us - own_us), share * host_us) + share * self.step_us

    def beside_us(self, device_us: float, host_us: float, overlap: Overlap) -> float:
        """One decode step beside another half, which slows it down.

        Args:
            device_us: device time of the decode step alone.
            host_us: host time of its launch.
            overlap: of the two halves.
        """
        return max(device_us * overlap.slowdown, host_us)

    def wait_share(
        self, device_us: float, host_us: float, overlap: Overlap, cycle_us: float, steps: int
    ) -> float | None:
        """`Launch.wait_share` of so many decode steps beside a prompt, so that the last is over when the step ends.

        Rather early than late (`EARLY`), as what ends after the prompt makes the whole step longer. Rounded down to a
        sixteenth of a slot, so that prepared decisions stay few. None where they take all of the step's time or nearly.

        Args:
            device_us: device time of one of the decode steps alone.
            host_us: host time of its launch.
            overlap: of the two halves.
            cycle_us: what the whole step takes.
            steps: decode steps.
        """
        busy_us = cycle_us - self.step_us
        decodes_us = EARLY * steps * self.beside_us(device_us, host_us, overlap)
        if decodes_us >= busy_us:
            return None
        return int((1 - decodes_us / busy_us) * _WAITS) / _WAITS or None

    def decodes_ready_us(self, launches: tuple[Launch, ...], numbers: BatchNumbers, cycle_us: float) -> float:
        """`Costing.decodes_ready_us`."""
        return self.decodes_ready_by(self.launch_us, launches, numbers, cycle_us)

    def decodes_ready_by(
        self, launch_us: Callable[[Launch, BatchNumbers], tuple[float, float]], launches: tuple[Launch, ...],
        numbers: BatchNumbers, cycle_us: float, *, leads: bool = False,
    ) -> float:  # fmt: skip
        """`decodes_ready_us` where launches take something else; the arguments are those of `cost_by` and its cycle."""
        first = launches[0]
        device_us, host_us = launch_us(first, numbers)
        if all(launch.stream == first.stream for launch in launches):
            ready_us = first.repeat * max(device_us, host_us)
        else:
            overlap = self.overlap_of(numbers.num_decodes)
            each_us = self.beside_us(device_us, host_us, overlap)
            ready_us = first.repeat * each_us
            if first.wait_share is None and leads:
                # What ran before the prompt began wasn't slowed down.
                alone_us = min(host_us, first.repeat * device_us)
                ready_us = max(ready_us - alone_us * (overlap.slowdown - 1), first.repeat * host_us)
            if first.wait_share is not None:
                begun = (first.repeat - 1 + first.wait_share) / first.repeat
                ready_us = max(ready_us, begun * (cycle_us - self.step_us) + each_us)
        return min(ready_us + self.step_us, cycle_us)

    def score(self, cost: Cost, objective: Objective) -> float:
        return objective.step_weight * cost.step_us + objective.gap_weight * cost.gap_us


class Costing(Protocol):
    """Whatever says what launches take: a `CostTable`, or one as it is in one step of a simulation."""

    def cost(self, launches: tuple[Launch, ...], numbers: BatchNumbers) -> Cost: ...

    def decodes_ready_us(self, launches: tuple[Launch, ...], numbers: BatchNumbers, cycle_us: float) -> float:
        """Microseconds from the start of a step in halves until its decode rows have all tokens that it brings them.

        Args:
            launches: decode rows' half, then the other.
            numbers: the step's rows.
            cycle_us: what the whole step takes; it is at most that.
        """
        ...


_COUNTS_OF_MODELS = {
    "num_layers": 1, "dense_params": 1, "weight_params": 1, "kv_bytes_per_token": 0, "attention_flops_per_pair": 0,
}  # fmt: skip


@attrs.frozen(kw_only=True)
class ModelFigures:
    """The figures of a decoder that its cost depends on.

    Args:
        name: what to call it.
        num_layers: decoder layers.
        dense_params: parameters a token passes through (active experts only), LM head included.
        weight_params: parameters that are read when the batch is large enough to touch all of them.
        kv_bytes_per_token: bytes of KV a token, over all layers.
        attention_flops_per_pair: floating point operations a query-key pair, over all layers and heads.
        weight_bits, dense_bits: bits of a weight, in the mean over `weight_params` and over `dense_params`.
        notes: what the reader should know of these figures.
    """

    name: str
    num_layers: int
    dense_params: int
    weight_params: int
    kv_bytes_per_token: int
    attention_flops_per_pair: int
    weight_bits: float = 16.0
    dense_bits: float = 16.0
    notes: tuple[str, ...] = ()

    def __attrs_post_init__(self) -> None:
        for field, least in _COUNTS_OF_MODELS.items():
            value = getattr(self, field)
            if not _is_number(value, Integral) or value < least:
                raise ProfileError(
                    f"{field} of {self.name} is {value!r:.80}; it is a whole number of at least {least}."
                )
        for field in ("weight_bits", "dense_bits"):
            value = getattr(self, field)
            if not _is_number(value, Real) or not 0 < value <= 64:
                raise ProfileError(f"{field} of {self.name} is {value!r:.80}; it is above 0, at most 64.")

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights."""
        return self.weight_params * self.weight_bits / 8


@attrs.frozen(kw_only=True)
class DeviceFigures:
    """Published figures of a device, and host costs of launching on it.

    Args:
        bytes_per_us: memory bandwidth.
        flops_per_us: dense bf16 throughput.
        efficiency: share of both that real kernels reach.
        kernel_us: device time of the smallest kernel inside a graph.
        eager_op_us: host time of one eager operator, its launch included.
        segment_us: host time of one segment replay and the eager attention behind it.
        replay_us: host time of one whole-graph replay.
    """

    name: str
    bytes_per_us: float
    flops_per_us: float
    efficiency: float = 0.7
    kernel_us: float = 1.3
    eager_op_us: float = 24.0
    segment_us: float = 80.0
    replay_us: float = 50.0

    def __attrs_post_init__(self) -> None:
        for field in ("bytes_per_us", "flops_per_us", "efficiency"):
            value = getattr(self, field)
            if not _is_number(value, Real) or not 0 < value < float("inf"):
                raise ProfileError(f"{field} of {self.name} is {value!r:.80}; it is a number above 0.")
        for field in ("kernel_us", "eager_op_us", "segment_us", "replay_us"):
            value = getattr(self, field)
            if not _all_below(1e9, (value,)):
                raise ProfileError(f"{field} of {self.name} is {value!r:.80}; it is microseconds from 0 up.")


# 4.8 TB/s and 989 TFLOPS dense bf16: NVIDIA's H200 data sheet. Host costs: fitted to the first measurements in
# docs/design.md (eager 9 to 13 ms at 24 and 32 layers, pieces 2.2 ms at 24).
H200 = DeviceFigures(name="H200 (published figures)", bytes_per_us=4.8e6, flops_per_us=989e6)
LLAMA_8B = ModelFigures(
    name="8B GQA decoder",
    num_layers=32,
    dense_params=7_504_924_672,
    weight_params=7_504_924_672,
    kv_bytes_per_token=2 * 2 * 8 * 128 * 32,
    attention_flops_per_pair=4 * 32 * 128 * 32,
)
_OPS_PER_LAYER = 16
_KERNELS_PER_LAYER = 10


def analytic_costs(model: ModelFigures = LLAMA_8B, device: DeviceFigures = H200) -> CostTable:
    """A roofline table: each dense step is bound by reading weights or by arithmetic, on top of a kernel floor.

    Nothing in it was measured on the user's device, and decisions made from it say so.

    Raises:
        ConfigError: these aren't figures; `kpolicy.figures` has them by a config and by a device's name.
    """
    check_kind("model", model, ModelFigures, "kpolicy.figures.model_figures(CONFIG)")
    check_kind("device", device, DeviceFigures, 'kpolicy.figures.find_device("H100").figures')
    grid = [1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 16384]
    floor = model.num_layers * _KERNELS_PER_LAYER * device.kernel_us
    bandwidth = device.bytes_per_us * device.efficiency
    flops = device.flops_per_us * device.efficiency

    def dense(tokens: int) -> float:
        touched = min(model.weight_bytes, model.dense_params * model.dense_bits / 8 * tokens)
        return floor + max(touched / bandwidth, 2 * model.dense_params * tokens / flops)

    curve = Curve(tuple(grid), tuple(dense(tokens) for tokens in grid))
    decode = AttentionCost(model.num_layers * 2 * device.kernel_us, 0.0, model.kv_bytes_per_token / bandwidth)
    prefill = AttentionCost(model.num_layers * 2 * device.kernel_us, 0.0, model.attention_flops_per_pair / flops)
    return CostTable(
        version=f"analytic-1:{model.name}:{device.name}",
        measured=False,
        full=curve,
        piecewise=curve,
        eager=curve,
        decode_attention=decode,
        prefill_attention=prefill,
        host_full=HostCost(device.replay_us),
        host_piecewise=HostCost((model.num_layers + 1) * device.segment_us),
        host_eager=HostCost(model.num_layers * _OPS_PER_LAYER * device.eager_op_us),
        step_us=300.0,
        overlap_cost=0.9,
        capture_us=(150_000.0, 400_000.0),
        graph_bytes=(6 << 20, 12 << 20),
        graph_pieces=(1, model.num_layers + 1),
    )
