"""`LazyCapture`: which planned graphs steps needed, and their capture between steps within a time allowance."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from kpolicy.errors import ConfigError, GraphReplayError, StickyDeviceError
from kpolicy.keys import GraphKey
from kpolicy.registry import GraphRegistry, GraphState
from kpolicy.shapes import BatchNumbers

if TYPE_CHECKING:
    from kpolicy.decision import Decision
    from kpolicy.executors.base import Executor

__all__ = ["LazyCapture"]

HOT = 2
"""Steps that need a key before it is captured between steps: what came once may never come again."""
FORGET_EVERY = 4096
"""Steps after which needs count half: a size that came twice in a long time is a cold one"""
SLICE_S = 0.02
"""Seconds that are saved up before some are spent on measuring"""
NOTE_EVERY = 16
"""Steps that are gone over together, at most, where the ones before needed nothing: one by one the processor fetches
what that takes from memory each time, and that takes longer than going over them"""
ROUNDS = 3, 12
"""Samples of every case when costs are first decided by, and when they are measured for good"""


class _Engine(Protocol):
    """What is read of the Engine."""

    executor: Executor | None
    registry: GraphRegistry
    policy: Any
    settings: Any
    keys: tuple[GraphKey, ...]
    calibration_error: str

    @property
    def context(self) -> Any: ...

    @property
    def costs(self) -> Any: ...

    def take_costs(self, costs: Any) -> None: ...


class LazyCapture:
    """Captures by need.

    A step *needs* a key when the policy would have chosen it, had every planned key been captured. Needs are counted;
    the key that was needed most often is captured first. What is saved of an allowance is kept for the next one, what
    was overspent is paid back, so that over time no more is spent than allowed, but for the capture that is under way.

    Before a step only what `HOT` earlier steps needed is captured: the first token comes at eager speed, and a size
    that comes once gets no graph, nor one that comes once in thousands of steps (`FORGET_EVERY`).

    Where costs are to be measured, what is captured is timed in slices of the same allowance, once nothing is left to
    capture: the table comes when every case has a few samples, and once more with all of them.

    Args:
        engine: whose steps.
        allowance_s: seconds that `before_step` may spend a step; 0 only counts needs.
        measures: whether costs are to be measured.

    Raises:
        ConfigError: the Engine has no executor, or several ranks, whose graphs must be captured together; or the
            allowance is negative.
    """

    def __init__(
        self, engine: _Engine, allowance_s: float, *, num_ranks: int = 1, measures: bool = False
    ) -> None:  # fmt: skip
        if engine.executor is None or num_ranks > 1:
            raise ConfigError(
                "lazy capture needs an executor and one rank: "
                + ("this Engine only decides." if engine.executor is None else f"there are {num_ranks} ranks.")
                + " Leave lazy off, or give model= or executor=."
            )
        if not allowance_s >= 0:
            raise ConfigError(f"lazy is {allowance_s!r}; give True, or seconds a step of at least 0.")
        self._engine = engine
        self._executor: Any = engine.executor
        self._allowance_s = allowance_s
        self._saved_s = 0.0
        self.needs: Counter[GraphKey] = Counter()
        """Steps that needed a key that isn't captured"""
        self._since_forgot = 0
        self._unnoted: list[BatchNumbers] = []
        """Steps that weren't gone over yet: that is done between steps"""
        self._most_unnoted = 1
        self._due = False
        """Whether there is something to capture or to measure"""
        self._untrimmed = False
        """Whether the device's library keeps what captures warmed up with"""
        self._select: Any = None
        self._version = -1
        self._planned: frozenset[GraphKey] = frozenset()
        """Keys without a graph, at that version of the registry"""
        self._costs: Any = None
        self._measures = measures
        self._calibration: Any = None
        self._measured: frozenset[GraphKey] = frozenset()
        """What the costs were measured of for good"""
        self._rounds = 0
        expect = getattr(self._executor, "expect", None)
        if expect is not None:
            # Pools are made for the largest key that may come, whichever comes first.
            expect(engine.keys)

    def before_step(self, numbers: BatchNumbers) -> None:
        """Capture within the allowance what earlier steps needed. What this one needs is noted later."""
        unnoted = self._unnoted
        if self._due or len(unnoted) >= self._most_unnoted:
            if self._allowance_s:
                self.capture(self._allowance_s, least=HOT)
            else:
                self._note()
        unnoted.append(numbers)

    def _note(self) -> None:
        """Count what steps needed that weren't gone over yet."""
        unnoted = self._unnoted
        if not unnoted:
            return
        self._look()
        self._most_unnoted = min(2 * self._most_unnoted, NOTE_EVERY)
        if self._select is not None:
            planned, needs = self._planned, self.needs
            for numbers in unnoted:
                wished: Decision = self._select(*numbers)
                for key in wished.keys:
                    if key in planned:
                        needs[key] += 1
                        # What is missing is missed again soon.
                        self._most_unnoted = 1
        self._since_forgot += len(unnoted)
        if self._since_forgot >= FORGET_EVERY:
            self._since_forgot = 0
            for key, times in [*self.needs.items()]:
                self.needs[key] = times // 2
            # Those that nobody needs any more are left out.
            self.needs += Counter()
        unnoted.clear()

    def _look(self) -> None:
        """Prepare for what would be decided with every graph, where graphs or costs changed."""
        # A context goes over all keys: it is for what changed alone, as this is between any two steps.
        registry, costs = self._engine.registry, self._engine.costs
        if costs is not self._costs:
            # What other costs would have chosen says nothing of what these choose.
            self._costs, self._version = costs, -1
            self.needs.clear()
        if registry.version != self._version:
            self._version = registry.version
            self._select = None
            self._planned = frozenset(
                key for key in self._engine.keys if registry.record(key).state is GraphState.PLANNED
            )
            if self._planned:
                ladder = registry.view(assumed=True).only(frozenset(self._engine.keys))
                context = attrs.evolve(self._engine.context, ladder=ladder)
                self._select = self._engine.policy.compile(context).select

    def capture(self, seconds: float, *, least: int = 1) -> int:
        """Capture what was needed most, while it is expected to fit.

        Args:
            seconds: the allowance.
            least: steps that must have needed a key.

        Returns:
            How many graphs were captured.
        """
        self._note()
        try:
            captured = self._captured_within(seconds, least)
        finally:
            self._due = self._needed(least) or self._unmeasured()
        # Not behind an error: a lost device isn't asked, and nothing takes the error's place.
        if self._untrimmed and not self._needed(least):
            self._trim()
        return captured

    def _needed(self, least: int) -> bool:
        """Whether a key was needed by so many steps."""
        return any(times >= least for times in self.needs.values())

    def _trim(self) -> None:
        """No more is captured for now: what captures warmed up with goes back."""
        start = time.perf_counter()
        # Optional for an executor.
        trim: Callable[[], None] = getattr(self._executor, "trim", _nothing)
        trim()
        self._untrimmed = False
        self._saved_s -= time.perf_counter() - start

    def _captured_within(self, seconds: float, least: int) -> int:
        """`capture`, of what was noted."""
        estimate = getattr(getattr(self._executor, "launcher", None), "estimate", None)
        wanted, times = self.needs.most_common(1)[0] if self.needs else (None, 0)
        if times < least and not self._unmeasured():
            self._saved_s = min(self._saved_s, 0.0)
            return 0
        # No more is saved than what is next may take: it would be spent between two steps.
        most = max(seconds, SLICE_S)
        if times >= least and estimate is not None:
            most = max(most, estimate(wanted).seconds)
        self._saved_s = min(self._saved_s + seconds, most)
        registry, captured = self._engine.registry, 0
        while self.needs:
            key, times = self.needs.most_common(1)[0]
            if times < least or self._saved_s < 0 or (estimate is not None and estimate(key).seconds > self._saved_s):
                break
            del self.needs[key]
            if registry.record(key).state is not GraphState.PLANNED:
                continue
            start, self._untrimmed = time.perf_counter(), True
            self._executor.capture([key])
            self._saved_s -= time.perf_counter() - start
            captured += registry.record(key).state is GraphState.CAPTURED
        if not captured and self._saved_s >= SLICE_S and self._unmeasured():
            self._measure()
        return captured

    # Measuring

    def _captured(self) -> frozenset[GraphKey]:
        return frozenset(self._engine.registry.captured()) & getattr(self._executor, "captured", frozenset())

    @property
    def pending(self) -> bool:
        """Whether there is something left to do: a graph to capture that was needed often enough, or to measure."""
        self._note()
        # The next step doesn't go over these any more, so it is told here.
        self._due = self._needed(HOT) or self._unmeasured()
        return self._due

    def _unmeasured(self) -> bool:
        """Whether there are graphs that the costs weren't measured with."""
        return self._measures and self._captured() not in (self._measured, frozenset())

    def _measure(self) -> None:
        """Spend what is saved on measuring, and give the Engine the table when there is one."""
        from kpolicy.executors.calibrate import Calibration

        captured, executor = self._captured(), self._executor
        settings = self._engine.settings
        start, costs, rounds = time.perf_counter(), None, 0
        few, enough = ROUNDS
        try:
            if self._calibration is None or frozenset(self._calibration.keys) != captured:
                self.end()
                self._calibration = Calibration(executor, self._engine.registry, executor.model, settings)
            self._calibration.measure(self._saved_s)
            rounds = self._calibration.rounds
            if rounds >= enough or (rounds >= few > self._rounds):
                version = f"measured while {executor.name} runs: {len(captured)} graphs, {rounds} samples each"
                costs = self._calibration.table(version)
        except StickyDeviceError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a launch of the model raised
            # The costs stay as they are, and the graphs that are there aren't tried again.
            self._engine.calibration_error = f"{type(error).__name__}: {error}"
            self._finish(captured)
            if isinstance(error, GraphReplayError) and error.key is not None:
                self._engine.registry.withdraw(error.key, error.reason)
            return
        finally:
            self._saved_s -= time.perf_counter() - start
        if costs is not None:
            self._engine.take_costs(costs)
            self._engine.calibration_error = ""
        self._rounds = rounds
        if rounds >= enough:
            self._finish(captured)

    def all_measured(self) -> None:
        """The costs there are were just measured with all graphs there are: nothing is left to measure."""
        self._finish(self._captured())

    def _finish(self, captured: frozenset[GraphKey]) -> None:
        self._measured = captured
        self.end()

    def end(self) -> None:
        """Let go of what is being measured."""
        if self._calibration is not None:
            self._calibration.end()
        self._calibration, self._rounds = None, 0


def _nothing() -> None:
    """An executor that keeps nothing."""
