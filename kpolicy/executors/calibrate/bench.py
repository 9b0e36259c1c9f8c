"""Times steps of synthetic rows on an executor."""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

from kpolicy.decision import Decision, Launch
from kpolicy.errors import StickyDeviceError
from kpolicy.executors.base import StepInputs
from kpolicy.executors.calibrate.one_speed import at_one_speed, error_of_one, of_one_state, typical
from kpolicy.host_speed import host_work_us, launching_takes, steadied, work_inside_us
from kpolicy.modes import Mode, Part, SplitForm
from kpolicy.reasons import Reason
from kpolicy.shapes import BatchShape

__all__ = ["LONG_KV", "SHORT_KV", "Bench", "Measurable", "Wave"]

SHORT_KV, LONG_KV = 64, 1024
"""Tokens that decode rows attend to, for the two ends of the slope."""
TURNS = 5
MOST_ROUNDS = 15
THOROUGH_ROUNDS = 1
_OFTEN = 3
"""Samples a round, at most, of steps that take the host itself little beside others"""
_NEW = 6
"""Other rows that run twice after each sample of rows that differ: steps differ by more than new rows add"""
_TELLING = 64
"""Tokens from which a step's time tells what more of them take"""
_SURELY = 1.2
"""Times the host's launching that the device takes, where it surely bounds the step"""
_LIKE = 1.25
"""Times a case's usual time that its samples take, but for interruptions"""
_LEAST_US = 0.1
_AHEAD = 1.5
"""Times the host's launching that the device is kept busy, to see its time alone."""


class Wave(IntEnum):
    """When a case is first run: a short allowance may end after any of them.

    Where the host runs what it launches, all before `LATER` are one wave.
    """

    FAR_APART = 0
    """Few sizes of each mode, up to its largest: between them a curve is never far off, beyond them it may be"""
    USUAL = 1
    FINER = 2
    """Sizes between those"""
    LATER = 3
    """Sizes between powers of two, and what decisions don't rest on"""
    THOROUGH = 4
    """What few decisions rest on: after `THOROUGH_ROUNDS` rounds of all else, which a short allowance hasn't"""


class Measurable(Protocol):
    """What is read of a model: its KV as a paged cache. A `StepModel` without these can't be measured."""

    @property
    def vocab(self) -> int: ...

    @property
    def pad_slot(self) -> int: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...


class _Times(NamedTuple):
    """Microseconds of one run."""

    wall: float
    """Of the step, by the executor's own time where the device runs behind the host: what steps are held to"""
    host: float
    """Until the step was launched"""
    device: float
    work: float = 0.0
    """Of the fixed work, just before"""
    again: float = 0.0
    """`host`, of the same step once more at once; 0 where that wasn't run"""
    place: int = -1
    """Of the sample among all that were taken, in their order; -1 where it stands alone"""
    inside: float = 0.0
    """Of the work that a timer runs inside steps, while it was launched; 0 without one"""
    decodes: float = 0.0
    """Until the half with decode rows was over, in the run that `device` is of; 0 where the step isn't in halves"""

    def like(self, other: _Times) -> float:
        """`host`, as if the host had been as fast as it was for another."""
        return self.host / launching_takes(self.inside / other.inside) if self.inside and other.inside else self.host


class _Pace:
    """What first runs of a mode's cases take by their tokens: as the last one, and as that lies above the smallest."""

    def __init__(self) -> None:
        self._smallest: tuple[int, float] | None = None
        self._last: tuple[int, float] | None = None

    def add(self, num_tokens: int, seconds: float) -> None:
        """A case of so many tokens took so long."""
        if self._smallest is None or num_tokens < self._smallest[0]:
            self._smallest = num_tokens, seconds
        if num_tokens >= _TELLING:
            self._last = num_tokens, seconds

    def expected_s(self, num_tokens: int) -> float:
        """Seconds that a case of so many tokens takes; 0 where nothing tells.

        Of one size alone nobody knows what it took whatever its tokens: then twice as many take twice as long.
        """
        if self._last is None or self._smallest is None:
            return 0.0
        (tokens, seconds), (least_tokens, least_s) = self._last, self._smallest
        token_s = max(seconds - least_s, 0.0) / (tokens - least_tokens) if tokens > least_tokens else seconds / tokens
        return max(seconds + token_s * (num_tokens - tokens), 0.0)


class Bench:
    """Times launches of synthetic rows, in rounds over all of them.

    Args:
        executor: with graphs captured.
        model: what it runs.
        earlier: one that ended, of the same two: cases that it has too begin with its samples.

    Attributes:
        rounds: samples of every case, so far.
    """

    def __init__(self, executor: Any, model: Measurable, earlier: Bench | None = None) -> None:
        self._executor = executor
        self._model = model
        self._adapter = executor.launcher.adapter
        self._cases: list[tuple[Decision, StepInputs]] = []
        self._own: list[int] = []
        self._had: set[int] = set()
        """Of these, the cases that had their own KV"""
        self._launching: set[int] = set()
        self._others: dict[int, Callable[[int], StepInputs]] = {}
        self._times: list[list[_Times]] = []
        self._new: dict[int, list[_Times]] = {}
        self._often: dict[int, int] = {}
        self._earlier = earlier
        self._taken: set[int] = set()
        """Of the earlier one's cases, those whose samples are here"""
        self._noted: list[float] = [] if earlier is None else earlier._noted.copy()
        self._steady: list[float] = []
        self._brought: list[list[float]] = []
        self._brought_of, self._error = -1, 0.0
        self._waited: dict[tuple[int, float], float] = {}
        self._beside: dict[tuple[int, Mode], float | None] = {}
        self._waves: dict[int, Wave] = {}
        self._runs: Iterator[bool] | None = None
        self._stop_s = 0.0
        self.rounds = 0

    def add(
        self, launches: Sequence[Launch], inputs: StepInputs, form: SplitForm | None = None, *, often: int = 1,
        own_kv: bool = False, others: Callable[[int], StepInputs] | None = None, launching: bool = False,
        wave: Wave = Wave.USUAL,
    ) -> int:  # fmt: skip
        """A step to be timed.

        Args:
            launches: what it runs.
            inputs: on these rows.
            form: of a SPLIT.
            often: samples a round. Outside a whole graph all but the first are run once more at once, as steps in a row
                are.
            own_kv: the rows are one prompt without context, which attends to its own KV where it can; see `own_kv`.
            others: rows of later samples, by their number, where they should differ by more than tokens; see `new_us`.
            launching: only what launching takes counts: the device is timed once, as that is over half of a sample's
                time.
            wave: when; cases of one wave come smallest first.

        Returns:
            The number that `us` takes.
        """
        mode = Mode.SPLIT if len(launches) > 1 else _mode(launches[0])
        step = Decision(mode, tuple(launches), Reason.ONLY_LEGAL, form), inputs
        if self.host_runs and others is None:
            # One that is there already has its samples for both.
            for case, known in enumerate(self._cases):
                if known == step and case not in self._others and (case in self._own) == own_kv:
                    self._waves[case] = min(self._waves[case], wave)
                    return case
        self._cases.append(step)
        self._times.append([])
        case = len(self._cases) - 1
        if often > 1:
            self._often[case] = often
        self._waves[case] = wave
        if own_kv:
            self._own.append(case)
        if launching:
            self._launching.add(case)
        if others is not None:
            self._others[case] = others
        self._take(case)
        return case

    def _take(self, case: int) -> None:
        """Begin with the samples of the earlier one's same case, where there are any."""
        earlier = self._earlier
        if earlier is None:
            return
        for other, step in enumerate(earlier._cases):
            alike = (
                (other in earlier._own) == (case in self._own)
                and (other in earlier._launching) == (case in self._launching)
                and (other in earlier._others) == self.differs(case)
            )
            if other not in self._taken and earlier._times[other] and alike and step == self._cases[case]:
                self._taken.add(other)
                self._times[case] = earlier._times[other].copy()
                if other in earlier._new:
                    self._new[case] = earlier._new[other].copy()
                return

    def measure(self, allowance_s: float) -> bool:
        """Run the cases, wave by wave and smallest first, then in rounds, until the allowance is spent.

        The first case always runs; which others did, `measured` says. Called again it goes on where it was.

        Returns:
            Whether all rounds are done.
        """
        self._stop_s = time.perf_counter() + allowance_s
        if self._runs is None:
            self._runs = self._in_rounds()
        return all(goes_on and time.perf_counter() <= self._stop_s for goes_on in self._runs)

    def had_own_kv(self, case: int) -> bool:
        """Whether that case was to attend to its own KV, and there was KV that it could write."""
        return case in self._had

    def end(self) -> None:
        """Nothing is measured any more: what is under way holds this bench, and with it the executor."""
        self._runs = iter(())

    @contextmanager
    def own_kv(self) -> Iterator[None]:
        """Let prompts that were added so write their KV and attend to it; afterwards it is gone again.

        Attention over zeros adds nothing to its tokens, which a mixture of experts then routes otherwise: a prompt of
        DeepSeek-V2-Lite took 6% less time so, on an H200. Nothing changes where these slots hold KV already.
        """
        model: Any = self._model
        prompts = {case: self._cases[case] for case in self._own}
        longest = max((len(inputs.token_ids) for _, inputs in prompts.values()), default=0)
        count = -(-longest // model.block_size)
        # The last blocks, because decode rows begin with the first.
        blocks = list(range(model.num_blocks - count, model.num_blocks))
        if count == 0 or blocks[0] < 0 or not hasattr(model, "kv_untouched"):
            yield
            return
        slots = range(blocks[0] * model.block_size, model.num_blocks * model.block_size)
        if not model.kv_untouched(slots):
            yield
            return
        for case, (decision, inputs) in prompts.items():
            own = inputs._replace(slot_mapping=list(slots[: len(inputs.token_ids)]), block_table=[blocks])
            self._cases[case] = decision, own
            self._had.add(case)
        lost = False
        try:
            yield
        except StickyDeviceError:
            # Clearing would fail too, and hide that error.
            lost = True
            raise
        finally:
            for case, before in prompts.items():
                self._cases[case] = before
            if not lost:
                model.clear_kv(slots)

    def _in_rounds(self) -> Iterator[bool]:
        """Run the cases one by one; whether the next one is expected to fit."""
        ran: list[int] = []
        paces: dict[tuple[Mode, bool], _Pace] = {}
        thorough = [case for case, wave in self._waves.items() if wave is Wave.THOROUGH]
        for alike in self._smallest_first():
            left = [i for i in alike if not self._times[i]]
            ran += [i for i in alike if self._times[i]]
            while left:
                i = self._fitting(left, paces)
                if i is None and ran:
                    yield False
                    i = self._fitting(left, paces)
                i = left[0] if i is None else i
                left.remove(i)
                begun_s = time.perf_counter()
                self._first(i)
                ran.append(i)
                kind, num_tokens = self._work(i)
                paces.setdefault(kind, _Pace()).add(num_tokens, time.perf_counter() - begun_s)
                yield True
            if self.host_runs:
                for i in alike:
                    self._sample(i, self._cases[i][1])
                    yield True
        for done in range(1, MOST_ROUNDS):
            self.rounds = done
            if done == THOROUGH_ROUNDS:
                for i in thorough:
                    if not self._times[i]:
                        self._first(i)
                        yield True
                ran += thorough
            # In another order each round: what ran before leaves the host's caches cold or warm, as in serving.
            rounds = ran + self._more_of(ran)
            for i in random.Random(done).sample(rounds, len(rounds)):  # noqa: S311
                others, number = self._others.get(i), len(self._times[i]) * (1 + _NEW)
                self._sample(i, self._drawn(self._cases[i][1], done) if others is None else others(number))
                yield True
                if others is not None:
                    yield from self._run_new(i, [others(number + j) for j in range(1, 1 + _NEW)])
        self.rounds = MOST_ROUNDS

    def _work(self, case: int) -> tuple[tuple[Mode, bool], int]:
        """A case's mode and whether it has prompts, and its tokens."""
        decision, inputs = self._cases[case]
        return (decision.mode, inputs.numbers.num_prefills > 0), len(inputs.token_ids)

    def _fitting(self, cases: Sequence[int], paces: Mapping[tuple[Mode, bool], _Pace]) -> int | None:
        """The first case that is expected to end in time.

        Args:
            cases: to choose from.
            paces: what first runs took, of each mode with prompts and without.
        """
        left_s = self._stop_s - time.perf_counter()
        for case in cases:
            kind, num_tokens = self._work(case)
            if (paces[kind].expected_s(num_tokens) if kind in paces else 0.0) <= left_s:
                return case
        return None

    def _smallest_first(self) -> list[list[int]]:
        """The cases, wave by wave: where the host runs them those of about one size together, else all.

        Then what slows a step slows the one that it is compared with too, and not all samples of either; what isn't for
        later is one wave.
        """
        of_size: dict[tuple[Wave, int], list[int]] = {}
        for i, (_, inputs) in enumerate(self._cases):
            wave = self._waves[i]
            if wave is Wave.THOROUGH:
                continue
            of_size.setdefault((max(wave, Wave.FINER) if self.host_runs else wave, len(inputs.token_ids)), []).append(i)
        if not self.host_runs:
            return [[i for size in sorted(of_size) for i in of_size[size]]]
        about: dict[tuple[Wave, int], list[int]] = {}
        for wave, size in sorted(of_size):
            about.setdefault((wave, size.bit_length()), []).extend(of_size[wave, size])
        return list(about.values())

    def _first(self, case: int) -> None:
        """Run a case for the first time, which touches fresh memory and compiles kernels, and take a sample.

        Where the host runs it the first run is one itself: the quicker samples count.
        """
        decision, inputs = self._cases[case]
        if not self.host_runs:
            self._once(decision, inputs)
        self._sample(case, inputs)

    def _sample(self, case: int, rows: StepInputs) -> None:
        # The first sample comes right after the case's first run, and so in a row itself.
        samples = self._times[case]
        again = bool(samples) and self._kind(case) in (Mode.PIECEWISE, Mode.EAGER)
        known_us = samples[0].device if samples and case in self._launching else 0.0
        samples.append(self._run(self._cases[case][0], rows, again, known_us))

    def _run_new(self, case: int, new: Sequence[StepInputs]) -> Iterator[bool]:
        """Run each of these rows twice, right after others of the case's: all find the caches warm."""
        decision, before = self._cases[case]
        in_time_s = 0.0
        for rows in new:
            if in_time_s != self._stop_s:
                # Something else ran before.
                self._once(decision, before)
                in_time_s = self._stop_s
            work, place = self._note()
            times, again = self._once(decision, rows), self._once(decision, rows)
            self._new.setdefault(case, []).append(times._replace(work=work, place=place, again=again.like(times)))
            yield True

    def _more_of(self, ran: Sequence[int]) -> list[int]:
        """Cases that a round has once more, or several times.

        Those that are `often`. Where the host runs what it launches, those too that take little beside the mean of all:
        the steps of decode rows alone, which serving mostly has, are among them.
        """
        often = {i: self._often.get(i, 1) for i in ran}
        if self.host_runs:
            took = {i: min(each.device for each in self._times[i]) for i in ran}
            mean_us = statistics.fmean(took.values())
            often = {i: max(often[i], min(_OFTEN, int(mean_us / max(took[i], _LEAST_US)))) for i in ran}
        return [i for i in ran for _ in range(1, often[i])]

    def _drawn(self, inputs: StepInputs, turn: int) -> StepInputs:
        """The same rows with other tokens: which experts they go to makes up to some percent."""
        vocab = self._model.vocab
        return inputs._replace(token_ids=[(token + 977 * (turn % TURNS)) % vocab for token in inputs.token_ids])

    @property
    def short_kv(self) -> int:
        """KV tokens of a decode row where they should tell little."""
        return min(SHORT_KV, self._model.max_model_len)

    @property
    def usual_kv(self) -> int:
        """KV tokens of a decode row while dense work is timed: kernels that share out a row's KV have some to share."""
        return min(LONG_KV, self._model.max_model_len)

    @property
    def dense_kv(self) -> int:
        """KV tokens of a decode row while dense work is timed: few where the host runs the attention over them too.

        Its time over many rises faster than their number, once they leave the caches: what a large step tells of a KV
        token, taken off a small one, would leave less for 8 rows than for one.
        """
        return self.short_kv if self.host_runs else self.usual_kv

    @property
    def host_runs(self) -> bool:
        """Whether the host itself runs what it launches, so that its time is the device's."""
        return bool(self._adapter.host_runs)

    def samples(self) -> list[dict[str, Any]]:
        """Every case as plain values: launches, rows, and the fields of `_Times` in us, of each sample and new rows."""
        return [
            {
                "launches": [
                    [launch.rows.value, str(launch.key or "eager"), launch.stream, launch.repeat]
                    for launch in decision.launches
                ],
                "decodes": inputs.numbers.num_decodes, "decode_kv_tokens": inputs.numbers.decode_kv_tokens,
                "prompt": inputs.numbers.num_prefill_tokens, "pairs": inputs.numbers.prefill_pairs,
                "us": [[round(each, 1) for each in sample] for sample in times],
                "new_us": [[round(each, 1) for each in sample] for sample in self._new.get(case, [])],
            }
            for case, ((decision, inputs), times) in enumerate(zip(self._cases, self._times, strict=True))
        ]  # fmt: skip

    def measured(self, case: int) -> bool:
        """Whether the allowance came to it."""
        return bool(self._times[case])

    def us(self, case: int) -> float:
        """Median microseconds of a case on the device, from its start until all of it is there.

        Of replays only samples of the state that the device mostly replayed in count. Where the host runs what it
        launches, what its quicker samples take, at one speed of the host.
        """
        samples = self._of_one_speed()[case]
        return typical(samples) if self.host_runs else statistics.median(samples)

    def middle_us(self, case: int) -> float:
        """`us`, but where the host runs what it launches the median of its samples at one speed, not the quicker ones.

        Halves beside each other take two cores, of which others may want one: the quicker samples had both, and serving
        pays for all.
        """
        return statistics.median(self._of_one_speed()[case])

    def decodes_us(self, case: int) -> float:
        """Median microseconds until the half with decode rows is over, of a step in halves that takes `us`."""
        shares = [each.decodes / each.device for each in self._times[case] if each.device]
        return self.us(case) * statistics.median(shares or [0.0])

    def error(self, case: int) -> float:
        """Standard error of `us`, as a share of it, where the host runs what it launches."""
        self._of_one_speed()
        return self._error / math.sqrt(len(self._times[case]))

    def _of_one_speed(self) -> list[list[float]]:
        """What the device took in each case's samples, but for another speed of the host, or another state of it."""
        count = sum(map(len, self._times))
        if count != self._brought_of:
            every = [[(each.place, each.device) for each in samples] for samples in self._times]
            if self.host_runs:
                self._brought = at_one_speed(every)
                self._error = error_of_one(self._brought)
            else:
                replays = [all(launch.key is not None for launch in decision.launches) for decision, _ in self._cases]
                of_state = of_one_state([each if whole else [] for each, whole in zip(every, replays, strict=True)])
                self._brought = [
                    found if whole else [us for _, us in each]
                    for each, found, whole in zip(every, of_state, replays, strict=True)
                ]
            self._brought_of = count
        return self._brought

    def host_us(self, case: int) -> float:
        """Median microseconds until the host had launched it, at `host_work_us`."""
        slower = self._slower()
        return statistics.median(each.host * slower(each) for each in self._times[case])

    def launching_us(self, case: int, step_us: float) -> list[float]:
        """The host's microseconds of every launch, as `sides_us` tells their middle: first ones, and once more at once.

        The latter over the share that this takes, where rows differ they alone: those had run before.
        """
        slower, samples = self._slower(), self._times[case]
        beside_us, share = self.beside_us(case, step_us) or 0.0, self.again_share(case, step_us)
        again = [
            (each.again * slower(each) - beside_us) / share
            for each in (*samples, *self._new.get(case, []))
            if each.again
        ]
        if again and self.differs(case):
            return again
        more_us = self.sides_us(case, step_us)[1] - self.host_us(case)
        return [each.host * slower(each) + more_us for each in samples] + again

    def host_bounds(self, case: int) -> bool:
        """Whether launching it takes longer than the device does."""
        return self.host_us(case) > self.us(case)

    def rows_of(self, case: int) -> tuple[int, int]:
        """Its decode rows and the tokens of its prompts."""
        numbers = self._cases[case][1].numbers
        return numbers.num_decodes, numbers.num_prefill_tokens

    def again_share(self, case: int, step_us: float) -> float:
        """Share of its time that launching takes once more at once, for a launch like it; 1 where nothing tells.

        The median of all samples of the mode whose rows don't differ. Each is beside its own first run: a host that is
        slow for some steps or seconds is so for both.
        """
        beside_us, slower, shares = self.beside_us(case, step_us) or 0.0, self._slower(), []
        for i, samples in enumerate(self._times):
            if i not in self._others and self._kind(i) is self._kind(case):
                for each in samples:
                    host, again = (us * slower(each) - beside_us for us in (each.host, each.again))
                    if each.again and host > 0 and again > 0:
                        shares.append(again / host)
        return min(statistics.median(shares), 1.0) if shares else 1.0

    def new_us(self, cases: Sequence[int]) -> float:
        """Median by which launching other rows takes longer than them once more at once, at `host_work_us`.

        Of those right after others, which find the caches warm both times. Of all samples together; 0 without any.
        """
        slower = self._slower()
        more = [(each.host - each.again) * slower(each) for case in cases for each in self._new.get(case, [])]
        return statistics.median(more) if more else 0.0

    def differs(self, case: int) -> bool:
        """Whether a case's rows are others each time."""
        return case in self._others

    def rest_us(self, case: int) -> float:
        """Median microseconds that neither the device's time nor the launching covers, at `host_work_us`."""
        slower = self._slower()
        return statistics.median(
            max(each.wall - max(each.host, each.device), 0.0) * slower(each) for each in self._times[case]
        )

    @property
    def host_work_us(self) -> float:
        """Median time of the host's fixed work over all samples, to which the host's times are brought.

        A host whose speed changes meanwhile would else make what it was slow for seem costly. 0 where the host itself
        runs what it launches.
        """
        every = [each for samples in self._times for each in samples]
        return statistics.median([self._work_us(each) for each in self._with_inside() or every] or [0.0])

    @property
    def host_work_inside_us(self) -> float:
        """Likewise of the work that a timer runs inside steps (`SpeedTimer`), over the same samples.

        Over those that it was noted in, where these are half of all or more; else it is 0 and goes for nothing.
        """
        return statistics.median([each.inside for each in self._with_inside()] or [0.0])

    def _with_inside(self) -> list[_Times]:
        every = [each for samples in self._times for each in samples]
        noted = [each for each in every if each.inside]
        return noted if 2 * len(noted) >= len(every) else []

    def _work_us(self, sample: _Times) -> float:
        """Time of the fixed work while the sample was taken, by what was noted around it."""
        if sample.place < 0:
            return sample.work
        if len(self._steady) != len(self._noted):
            self._steady = steadied(self._noted)
        return self._steady[sample.place]

    def _slower(self) -> Callable[[_Times], float]:
        """How many times slower the host usually is than it was for a sample."""
        usual_us, inside_us, work_us = self.host_work_us, self.host_work_inside_us, self._work_us

        def slower(sample: _Times) -> float:
            if sample.inside and inside_us:
                return 1 / launching_takes(sample.inside / inside_us)
            return 1 / launching_takes(work_us(sample) / usual_us) if sample.work else 1.0

        return slower

    def sides_us(self, case: int, step_us: float) -> tuple[float, float]:
        """(device, host) microseconds, of which the longer and `step_us` make the whole step.

        The device waits for the first pieces of a step; see `waited`. Of the host's time goes what isn't the step's;
        see `beside_us`. Of other launches, what is beyond the longer side and `step_us` is that side's.
        """
        device, host, beyond = self.us(case), self.host_us(case), max(self.rest_us(case) - step_us, 0.0)
        device_beyond, host_beyond = (beyond, 0.0) if device >= host else (0.0, beyond)
        if (beside_us := self.beside_us(case, step_us)) is not None:
            host_beyond = -beside_us
        if self._in_pieces(case):
            device_beyond = self.waited(step_us) * host
        return device + device_beyond, max(host + host_beyond, 0.0)

    def beside_us(self, case: int, step_us: float) -> float | None:
        """Of the host's time for a launch like it, what isn't the step's, at `host_work_us`; None where nothing tells.

        A step's clock starts when the device is told so, and ends before the last call returns: a step that the host
        bounds takes less than the host does, whose time and `step_us` are its whole time. The median of all samples
        of the mode that the host surely bounds, but those that were interrupted.
        """
        kind = self._kind(case)
        if kind is None:
            return None
        known = sum(map(len, self._times)), kind
        if known not in self._beside:
            slower, more = self._slower(), []
            for i, samples in enumerate(self._times):
                if samples and self._kind(i) is kind:
                    host_us = self.host_us(i)
                    more += [
                        (each.host - each.wall) * slower(each)
                        for each in samples
                        if each.host >= _SURELY * each.device and each.host * slower(each) <= _LIKE * host_us
                    ]
            self._beside = {other: us for other, us in self._beside.items() if other[0] == known[0]}
            self._beside[known] = statistics.median(more) if more else None
        us = self._beside[known]
        return None if us is None else us + step_us

    def waited(self, step_us: float) -> float:
        """Share of the host's time for a step of pieces that the device waits: it begins when the first are launched.

        Of steps that the device bounds, whose time tells it; in others the host's own time hides it. The median of
        all, because in one case it is a small difference of large times.
        """
        known = sum(map(len, self._times)), step_us
        if known not in self._waited:
            shares = []
            for case, samples in enumerate(self._times):
                if samples and self._in_pieces(case) and self.us(case) >= _SURELY * self.host_us(case) > 0:
                    shares.append(max(self.rest_us(case) - step_us, 0.0) / self.host_us(case))
            self._waited = {known: statistics.median(shares) if shares else 0.0}
        return self._waited[known]

    def _kind(self, case: int) -> Mode | None:
        """Its mode, where it is one launch."""
        mode = self._cases[case][0].mode
        return None if mode is Mode.SPLIT else mode

    def _in_pieces(self, case: int) -> bool:
        return self._kind(case) is Mode.PIECEWISE

    def _run(self, decision: Decision, inputs: StepInputs, again: bool, known_us: float = 0.0) -> _Times:
        """A sample; `known_us` is what the device takes, where it isn't to be timed."""
        if self.host_runs:
            times, place = self._once(decision, inputs), len(self._noted)
            self._noted.append(0.0)
            return times._replace(host=0.0, device=times.wall, place=place)
        work, place = self._note()
        times = self._once(decision, inputs)._replace(work=work, place=place)
        if again:
            # Before the device is kept busy: right after that a launch takes longer (docs/measured_fidelity.md).
            times = times._replace(again=self._once(decision, inputs).like(times))
        if known_us:
            return times._replace(device=min(known_us, times.wall))
        self._adapter.occupy(_AHEAD * times.host)
        outputs = self._executor.run(decision, inputs)
        for event in outputs.ready:
            event.wait()
        decodes = outputs.ready[0].us if len(decision.launches) > 1 else 0.0
        return times._replace(device=min(outputs.cycle_us, times.wall), decodes=decodes)

    def _note(self) -> tuple[float, int]:
        """How fast the host is now, and the note's place."""
        work = host_work_us()
        self._noted.append(work)
        return work, len(self._noted) - 1

    def _once(self, decision: Decision, inputs: StepInputs) -> _Times:
        start = time.perf_counter()
        outputs = self._executor.run(decision, inputs)
        launched = time.perf_counter()
        inside = work_inside_us(start, launched)
        for event in outputs.ready:
            event.wait()
        wall = (time.perf_counter() - start) * 1e6 if self.host_runs else outputs.cycle_us
        return _Times(wall, (launched - start) * 1e6, 0.0, inside=inside)

    def rows(self, num_decodes: int, decode_kv: int, new: int = 0, context: int = 0, steps: int = 1) -> StepInputs:
        """Decode rows that attend to so many tokens each, then one prompt chunk of `new` tokens after a context.

        `steps` decode steps may follow each other; they too end within the model's longest.
        """
        size, model = self._model.block_size, self._model
        decode_kv = min(decode_kv, max(1, model.max_model_len + 1 - steps))
        free = itertools.cycle(range(model.num_blocks))
        lens = [decode_kv] * num_decodes + ([context + new] if new else [])
        query_lens = [1] * num_decodes + ([new] if new else [])
        tables: list[list[int]] = []
        positions: list[int] = []
        for kv_len, query_len in zip(lens, query_lens, strict=True):
            # Where the KV is too small for all rows they share blocks: the times are the same.
            tables.append([next(free) for _ in range(-(-kv_len // size))])
            positions += range(kv_len - query_len, kv_len)
        tokens = [(7 * i) % model.vocab for i in range(len(positions))]
        wanted = [*range(num_decodes), *([len(tokens) - 1] if new else [])]
        shape = BatchShape(
            decodes=[(1, num_decodes)] if num_decodes else [], prefills=[(new, context)] if new else [],
            decode_kv_tokens=num_decodes * decode_kv if num_decodes else None, max_kv_len=max(lens),
            max_decode_steps=steps,
        )  # fmt: skip
        slots = [model.pad_slot] * len(tokens)
        ahead = [[model.pad_slot] * num_decodes] * (steps - 1)
        return StepInputs(shape.numbers, query_lens, tokens, positions, slots, tables, lens, wanted, ahead)


def _mode(launch: Launch) -> Mode:
    if launch.key is None:
        return Mode.EAGER
    return Mode.FULL if launch.key.part is Part.FULL else Mode.PIECEWISE
