"""Steps of a vLLM runner, timed one by one: on the host, and on the device alone."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from kpolicy.costs import AttentionCost
from kpolicy.host_speed import host_work_us, launching_takes, steadied
from kpolicy.keys import GraphKey
from kpolicy.modes import Part
from kpolicy_vllm.synthetic import Rows, Steps

__all__ = ["LEAST_US", "NOISE", "Bench", "Case", "Clock", "CudaClock", "Rejoin", "Times", "together"]

T = TypeVar("T")

LEAST_US = 0.1
"""No time is shorter"""
NOISE = 0.02
"""Of a time: what is within it of another is as good."""
MOST_ROUNDS, REJOINS = 9, 3
AGAIN = 0.5
"""Share of an allowance after which nothing is timed again: the whole is for what is slow to be timed once"""
_AHEAD, _CYCLES_A_US = 2.0, 2000
IN_A_ROW, UNDER_WAY = 8, 2
"""Steps that are launched one behind the other, and that are under way of them: for more than two runners have no host
buffers, so the device would read what a later step has put there"""


class Clock(Protocol):
    """The device and the time, as calibration needs them."""

    def now(self) -> float:
        """Seconds."""

    def host_work_us(self) -> float:
        """Microseconds that the host's fixed work takes now."""

    def wait(self) -> None:
        """Until the device has done all."""

    def occupy(self, us: float) -> None:
        """Keep the device busy for about so long, and return at once."""

    def event(self) -> Any:
        """A mark in the device's work, here."""

    def reach(self, mark: Any) -> None:
        """Wait until the device has come to a mark."""

    def between_us(self, first: Any, second: Any) -> float:
        """Device time between two marks; waits for both."""


class CudaClock:
    """The current CUDA device. vLLM brings torch, so it is imported when first used."""

    def __init__(self) -> None:
        import torch

        self._torch = torch

    def now(self) -> float:
        return time.perf_counter()

    def host_work_us(self) -> float:
        return host_work_us()

    def wait(self) -> None:
        self._torch.cuda.synchronize()

    def occupy(self, us: float) -> None:
        self._torch.cuda._sleep(int(us * _CYCLES_A_US))

    def event(self) -> Any:
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def reach(self, mark: Any) -> None:
        mark.synchronize()

    def between_us(self, first: Any, second: Any) -> float:
        second.synchronize()
        return 1e3 * float(first.elapsed_time(second))


class Times(NamedTuple):
    """Microseconds of one step; of one that was timed on the device alone, `wall` and `host` are 0."""

    wall: float
    host: float
    device: float
    decode_kv: int
    """Tokens that its decode rows attended to: rows grow from step to step"""


class Case:
    """One step that is timed.

    Args:
        key: the graph it runs; None for EAGER.
        rows: its rows.
    """

    def __init__(self, key: GraphKey | None, rows: Rows) -> None:
        self.key = key
        self.rows = rows
        self.times: list[Times] = []

    def best(self) -> Times:
        """The run with the shortest device time: its work is the same each time, and a late host adds to it."""
        return min(self.times, key=lambda each: each.device)

    @property
    def tokens(self) -> int:
        """Tokens that the step is padded to."""
        return self.rows.num_tokens if self.key is None else self.key.num_tokens

    @property
    def sampled(self) -> int:
        """Rows that the model's head is run for, and that are sampled."""
        return self.rows.decodes + bool(self.rows.chunk)

    def units(self) -> float:
        """KV tokens of the decode rows of that run, or query-key pairs of the chunk beyond its own."""
        return self.rows.chunk * self.rows.context if self.rows.chunk else self.best().decode_kv

    def dense_us(self, decode: AttentionCost, chunks: AttentionCost) -> float:
        """Microseconds on the device without attention, and without what each decode row takes besides."""
        chunk, best = self.rows.chunk, self.best()
        pairs = chunk * self.rows.context + chunk * (chunk + 1) / 2
        attention = decode.unit_us * best.decode_kv + chunks.unit_us * pairs
        return max(best.device - attention - decode.row_us * self.rows.decodes, LEAST_US)

    def bring(self, visit: int, times: float) -> None:
        """What that visit would have taken, had the host been so many times as quick."""
        raw = self.times[visit]
        host, rest = raw.host / times, (raw.wall - max(raw.host, raw.device)) / times
        self.times[visit] = raw._replace(wall=max(host, raw.device) + rest, host=host)

    @property
    def whole(self) -> list[Times]:
        """Its runs that weren't timed on the device alone."""
        return [each for each in self.times if each.wall]

    def host_us(self) -> float:
        """Median microseconds until the host had launched all."""
        return statistics.median(each.host for each in self.whole)


class Rejoin(NamedTuple):
    """A step of decodes, timed after one with the same rows, and after one that left them out."""

    steady: Case
    after: Case

    def row_us(self) -> float:
        """Host microseconds that a decode row costs more in the latter."""
        return max(0.0, self.after.host_us() - self.steady.host_us()) / self.after.rows.decodes


def together(everywhere: Callable[[bool], bool], run: Callable[..., T], *args: Any) -> T:
    """Run it on every rank, and raise on all where it raises on one: else the others would wait for it for ever."""
    result, error = None, None
    try:
        result = run(*args)
    except Exception as raised:  # noqa: BLE001 - it is raised below
        error = raised
    if everywhere(error is None):
        return cast("T", result)
    raise error or RuntimeError("another rank couldn't run that step")


def _kind(case: Case) -> Part | None:
    """The part of the model that its graphs hold; None for EAGER."""
    return None if case.key is None else case.key.part


class Bench:
    """Runs and times steps.

    Args:
        runner: vLLM's model runner.
        forced: context manager in which the step runs that graph, or EAGER.
        agree: what rank 0 says, on every rank.
        clock: the device and the time.
        everywhere: whether something holds on every rank.
    """

    def __init__(
        self, runner: Any, forced: Callable[[GraphKey | None, Rows], AbstractContextManager[Any]],
        agree: Callable[[Any], Any], clock: Clock, everywhere: Callable[[bool], bool] = bool,
    ) -> None:  # fmt: skip
        self._runner = runner
        self._all = everywhere
        self._forced = forced
        self._agree = agree
        self.clock = self._clock = clock
        self._ran_any = False
        self._visits: list[tuple[Case, int, float]] = []
        """Every visit so far: the case, which of its times, and what the host's fixed work took just before"""
        self._last: dict[Part | None, tuple[Case, float]] = {}
        """The last case so far of each kind of launch, and seconds that its visit took"""
        self.steps = Steps(runner)

    def measure(self, cases: Sequence[Case], allowance_s: float) -> None:
        """Time the cases, those with the fewest tokens first, then in rounds over those that ran.

        The very first case always runs, and others where there is time for them; which did, their `times` say. A round
        in which none was quicker than before ends it, and so does `AGAIN` of the allowance.
        """
        clock = self._clock
        again_s, stop_s = clock.now() + AGAIN * allowance_s, clock.now() + allowance_s
        ran: list[Case] = []
        for case in sorted(cases, key=lambda each: each.rows.num_tokens):
            begun_s = clock.now()
            if not self._agree(not self._ran_any or begun_s + self._expected_s(case) <= stop_s):
                continue  # one of another kind may be quicker
            together(self._all, self._visit, case)
            ran.append(case)
            self._ran_any = True
            self._last[_kind(case)] = case, clock.now() - begun_s
        for turn in range(1, MOST_ROUNDS):
            before = [case.best().device for case in ran]
            for case in random.Random(turn).sample(ran, len(ran)):  # noqa: S311
                if not self._agree(clock.now() <= again_s):
                    return
                together(self._all, self._visit, case)
            quicker = (case.best().device < us * (1 - NOISE) for case, us in zip(ran, before, strict=True))
            if not self._agree(any(quicker)):
                return

    def alone(self, cases: Sequence[Case], expected_us: Callable[[Case], float], host_us: float, allowance_s: float,
              in_a_row: int = IN_A_ROW) -> None:  # fmt: skip
        """Time the device alone at the cases, in their order, as far as the allowance goes: for less than a visit each.

        Each step is launched while the one before runs, behind work that keeps the device busy for what that lacks of
        the host's time, once the one before that is over, as it would be in serving. A step that the device came to
        before all of it was launched isn't timed so: where the runner waits for each, those that follow are launched
        one at a time.

        Args:
            cases: the steps; none of them has decode rows that leave and join again, where several are in a row.
            expected_us: about how long the device takes for one.
            host_us: microseconds until the host has launched one.
            allowance_s: seconds for all.
            in_a_row: most that are launched so.
        """
        left, stop_s, most = list(cases), self._clock.now() + allowance_s, in_a_row
        if getattr(self._runner.vllm_config, "max_concurrent_batches", 1) < UNDER_WAY:
            most = 1
        in_a_row = min(most, 2)  # which tells whether the runner waits
        while left:
            ends_s, fits = self._clock.now(), 0
            for case in left[:in_a_row]:
                ends_s += 1e-6 * max(_AHEAD * host_us, expected_us(case))
                fits += ends_s <= stop_s
            group = left[: self._agree(fits)]
            if not group:
                return
            times = together(self._all, self._in_a_row, group, expected_us, host_us)
            # Ranks must have timed the same ones.
            late: list[int] = self._agree([place for place, (_, in_time) in enumerate(times) if not in_time])
            for place, (case, (each, _)) in enumerate(zip(group, times, strict=True)):
                if place not in late:
                    case.times.append(each)
            again = [group[place] for place in late] if in_a_row > 1 else []
            most = 1 if late else most
            in_a_row, left = most, again + left[len(group) :]

    def _in_a_row(
        self, group: Sequence[Case], expected_us: Callable[[Case], float], host_us: float
    ) -> list[tuple[Times, bool]]:
        """Of each the device's time, and whether all of it was launched when the device came to it."""
        clock, before_us = self._clock, 0.0
        marks: list[tuple[Any, Any, float, int]] = []
        ends: list[Any] = []
        for case in group:
            if case.rows.decodes:
                self._warm(case)  # rows join the batch
        outputs = [(self.steps.step(case.rows), self.steps.decode_kv) for case in group]
        clock.wait()
        start, start_s = clock.event(), clock.now()
        for case, (output, kv) in zip(group, outputs, strict=True):
            if len(ends) >= UNDER_WAY:
                clock.reach(ends[-UNDER_WAY])
            clock.occupy(max(0.0, _AHEAD * host_us - before_us))
            first = clock.event()
            with self._forced(case.key, case.rows):
                self._runner.execute_model(output)
                second, launched_us = clock.event(), 1e6 * (clock.now() - start_s)
                self._runner.sample_tokens(None)
            ends.append(clock.event())
            marks.append((first, second, launched_us, kv))
            before_us = expected_us(case)
        return [
            (Times(0.0, 0.0, clock.between_us(first, second), kv), launched_us <= clock.between_us(start, first))
            for first, second, launched_us, kv in marks
        ]

    def _expected_s(self, case: Case) -> float:
        """Seconds that a visit takes by the last of its kind: more tokens are more for the device, not for the host."""
        if _kind(case) not in self._last:
            return 0.0
        last, took_s = self._last[_kind(case)]
        once, more = last.times[-1], case.rows.num_tokens / last.rows.num_tokens
        return took_s * max(once.host, once.device * more) / max(once.host, once.device)

    def at_one_speed(self) -> float:
        """Bring the host's times of all visits so far to one speed; what the fixed work takes at it.

        Steps are timed one after the other, each hardly more than once, and a core's speed changes within seconds: what
        it was slow for would seem costly.
        """
        noted = steadied([work for _, _, work in self._visits])
        usual = statistics.median(noted or [0.0])
        for (case, visit, _), work in zip(self._visits, noted, strict=True):
            if usual:
                case.bring(visit, launching_takes(work / usual))
        self._visits.clear()
        return usual

    def warm(self, cases: Sequence[Case]) -> None:
        """Run some steps that aren't timed: kernels compile, and buffers are made."""
        for case in cases:
            together(self._all, self._warm, case)

    def rejoin(self, case: Case, chunk: Case) -> Rejoin:
        """Time a step after one with the same rows, and after one that left them out.

        Args:
            case: a step of decodes.
            chunk: a step without them.
        """
        steady, after = Case(case.key, case.rows), Case(case.key, case.rows)
        for _ in range(REJOINS):
            self._make_room(case.rows)
            with self._forced(case.key, case.rows):
                self._run(case.rows)
                self._timed(steady)
            with self._forced(chunk.key, chunk.rows):
                self._run(chunk.rows)
            with self._forced(case.key, case.rows):
                self._timed(after)
        return Rejoin(steady, after)

    def close(self) -> None:
        """Leave none of the rows in the runner."""
        self._runner.execute_model_state = None
        self._runner.execute_model(self.steps.close())
        self._clock.wait()

    def _warm(self, case: Case) -> None:
        self._make_room(case.rows)
        with self._forced(case.key, case.rows):
            self._run(case.rows)

    def _make_room(self, rows: Rows) -> None:
        """Rows begin anew where another visit would end their prompts."""
        if self.steps.used_up(rows):
            self._runner.execute_model(self.steps.close())

    def _visit(self, case: Case) -> None:
        self._make_room(case.rows)
        with self._forced(case.key, case.rows):
            self._run(case.rows)  # rows join the batch; kernels compile, for seconds
            self._timed(case)
            timed = case.times[-1]
            device = min(self._device_us(case.rows, timed.host), timed.wall)
            case.times[-1] = timed._replace(device=device, decode_kv=self.steps.decode_kv)

    def _timed(self, case: Case) -> None:
        """Run the step, and add what the host took, with its speed just before."""
        work_us = self._clock.host_work_us()
        wall, host = self._run(case.rows)
        self._visits.append((case, len(case.times), work_us))
        case.times.append(Times(wall, host, 0.0, self.steps.decode_kv))

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
