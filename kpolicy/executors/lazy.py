"""`LazyCapture`: which planned graphs steps needed, and their capture between steps within a time allowance."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from kpolicy.errors import ConfigError
from kpolicy.keys import GraphKey
from kpolicy.registry import GraphRegistry, GraphState
from kpolicy.shapes import BatchNumbers

if TYPE_CHECKING:
    from kpolicy.decision import Decision
    from kpolicy.executors.base import Executor

__all__ = ["LazyCapture"]

HOT = 2
"""Steps that need a key before it is captured between steps: what came once may never come again."""


class _Engine(Protocol):
    """What is read of the Engine."""

    executor: Executor | None
    registry: GraphRegistry
    policy: Any
    keys: tuple[GraphKey, ...]

    @property
    def context(self) -> Any: ...


class LazyCapture:
    """Captures by need.

    A step *needs* a key when the policy would have chosen it, had every planned key been captured. Needs are counted;
    the key that was needed most often is captured first. What is saved of an allowance is kept for the next one, what
    was overspent is paid back, so that over time no more is spent than allowed, but for the capture that is under way.

    Before a step only what `HOT` earlier steps needed is captured: the first token comes at eager speed, and a size
    that comes once gets no graph.

    Args:
        engine: whose steps.
        allowance_s: seconds that `before_step` may spend a step; 0 only counts needs.

    Raises:
        ConfigError: the Engine has no executor, or several ranks, whose graphs must be captured together; or the
            allowance is negative.
    """

    def __init__(self, engine: _Engine, allowance_s: float, *, num_ranks: int = 1) -> None:
        if engine.executor is None or num_ranks > 1:
            raise ConfigError(
                "lazy capture needs an executor and one rank: "
                + ("this Engine only decides." if engine.executor is None else f"there are {num_ranks} ranks.")
                + " Leave lazy off, or give model= or executor=."
            )
        if not allowance_s >= 0:
            raise ConfigError(f"lazy is {allowance_s!r}; give True, or seconds a step of at least 0.")
        self._engine = engine
        self._executor = engine.executor
        self._allowance_s = allowance_s
        self._saved_s = 0.0
        self.needs: Counter[GraphKey] = Counter()
        """Steps that needed a key that isn't captured"""
        self._unnoted: BatchNumbers | None = None
        """The step before, which is noted when nothing waits for it"""
        self._select: Any = None
        self._version = -1
        expect = getattr(self._executor, "expect", None)
        if expect is not None:
            # Pools are made for the largest key that may come, whichever comes first.
            expect(engine.keys)

    def before_step(self, numbers: BatchNumbers) -> None:
        """Capture within the allowance what earlier steps needed. What this one needs is noted later."""
        if self._allowance_s:
            self.capture(self._allowance_s, least=HOT)
        elif self._unnoted is not None:
            self._note(self._unnoted)
        self._unnoted = numbers

    def _note(self, numbers: BatchNumbers) -> None:
        registry = self._engine.registry
        if registry.version != self._version:
            self._version = registry.version
            self._select = None
            if any(record.state is GraphState.PLANNED for record in registry.records()):
                context = attrs.evolve(self._engine.context, ladder=registry.view(assumed=True))
                self._select = self._engine.policy.compile(context).select
        if self._select is None:
            return
        wished: Decision = self._select(*numbers)
        for key in wished.keys:
            if key in self.needs or registry.record(key).state is GraphState.PLANNED:
                self.needs[key] += 1

    def capture(self, seconds: float, *, least: int = 1) -> int:
        """Capture what was needed most, while it is expected to fit.

        Args:
            seconds: the allowance.
            least: steps that must have needed a key.

        Returns:
            How many graphs were captured.
        """
        if self._unnoted is not None:
            self._note(self._unnoted)
            self._unnoted = None
        if not self.needs:
            self._saved_s = 0.0
            return 0
        self._saved_s += seconds
        estimate = getattr(getattr(self._executor, "launcher", None), "estimate", None)
        registry, captured = self._engine.registry, 0
        while self.needs:
            key, times = self.needs.most_common(1)[0]
            if times < least or self._saved_s < 0 or (estimate is not None and estimate(key).seconds > self._saved_s):
                break
            del self.needs[key]
            if registry.record(key).state is not GraphState.PLANNED:
                continue
            start = time.perf_counter()
            self._executor.capture([key])
            self._saved_s -= time.perf_counter() - start
            captured += registry.record(key).state is GraphState.CAPTURED
        return captured
