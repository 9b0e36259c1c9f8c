"""`State`: what kpolicy keeps of one SGLang model runner."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from kpolicy.costs import Curve
from kpolicy.errors import RegistryError
from kpolicy.keys import GraphKey
from kpolicy.registry import GraphRegistry
from kpolicy.settings import Objective
from kpolicy_sglang.bound import leave_hooked
from kpolicy_sglang.captures import Savings
from kpolicy_sglang.config import Config
from kpolicy_sglang.counters import buckets, summary
from kpolicy_sglang.decision_log import DecisionLog
from kpolicy_sglang.failures import Failures
from kpolicy_sglang.metrics import Metrics
from kpolicy_sglang.phase import DECODE, PREFILL, MixedCost, Phase

__all__ = ["State", "attach", "detach", "state_of"]

logger = logging.getLogger(__name__)
_ATTRIBUTE = "_kpolicy_state"
_TICKS = 128
IDLE_RANK = (
    "a data-parallel rank had nothing to run beside prompts of others: SGLang runs such a step eagerly on all ranks, "
    "and kpolicy leaves it so; these steps count as rank_needs_eager"
)
"""What is said once where it is so: `State.tick` looks at what steps found."""
METRICS_S = 5.0
"""Seconds between two flushes of the Prometheus counters and of the decision log."""


class State:
    """What kpolicy knows of one model runner. Phases appear as their graphs are captured.

    Args:
        config: the settings.
        version: SGLang's.
    """

    def __init__(self, config: Config, version: str) -> None:
        self.config = config
        self.version = version
        self.graphs = GraphRegistry()
        """The registry, whose hits are those that were last asked for."""
        self.phases: dict[str, Phase] = {}
        self.by_replay: set[str] = set()
        """Phases whose replays are counted one by one: their steps don't tell which graph was replayed."""
        self._hits: Counter[GraphKey] = Counter()
        self.held: dict[str, dict[str, Any]] = {}
        """By phase SGLang's graph backend and runner, whose attributes call kpolicy."""
        self.mixed: MixedCost | None = None
        self.long: Curve | None = None
        """Microseconds of one prompt by its tokens, where prompt steps were timed as several."""
        self.beside = 0.0
        """How far a long prompt makes those beside it take as long, see `kpolicy_sglang.prompt_times`."""
        self.savings = Savings()
        """What quicker captures took off the start."""
        self.measuring_s = 0.0
        """Seconds that costs took to measure."""
        self.serving: list[bool] = []
        """Has an entry once nothing is measured any more, so that steps and replays are a server's."""
        self.coupled = False
        """Whether ranks take each step together, so that none may decide by itself."""
        self.prefix_is_eager = False
        """Whether a row with cached tokens keeps a prefill batch from its graph (MLA on 0.5.16)."""
        self.failures = Failures()
        """What raised while SGLang served, in any phase."""
        self.messages: list[str] = []
        self.metrics: Metrics | None = None
        self.decision_log: DecisionLog | None = None
        self.left = _TICKS
        """Cycles of the scheduler until `tick` looks at the clock."""
        self._flushed_s = self._summed_s = time.monotonic()

    @property
    def registry(self) -> GraphRegistry:
        """SGLang's graphs, with the hits of all steps so far."""
        self.count_hits()
        return self.graphs

    def count_hits(self) -> None:
        """Enter the replays that steps tell of and that weren't entered before."""
        for phase in self.phases.values() if self.serving else ():
            for size, replays in buckets(phase).items() if phase.name not in self.by_replay else ():
                key = phase.keys[phase.sizes.index(size)]
                more, self._hits[key] = replays - self._hits[key], replays
                try:
                    if more:
                        self.graphs.hit(key, more)
                except RegistryError as error:
                    self.failures.note("counting replays", error, then="the graph isn't in the registry")

    def count_by_replay(self, name: str) -> None:
        """From now on what replays a phase's graphs counts them."""
        self.count_hits()
        self.by_replay.add(name)

    @property
    def decode(self) -> Phase | None:
        return self.phases.get(DECODE)

    @property
    def prefill(self) -> Phase | None:
        return self.phases.get(PREFILL)

    def say(self, message: str) -> None:
        """Log what kpolicy leaves to SGLang, once."""
        if message not in self.messages:
            self.messages.append(message)
            logger.warning("kpolicy: %s", message)

    def tick(self) -> None:
        """Flush counters now and then, say what steps found, and look for later hooks.

        Whatever of it raises, SGLang goes on scheduling.
        """
        self.left = _TICKS
        try:
            # A step itself logs nothing.
            if self.prefill is not None and self.prefill.idle_rank:
                self.say(IDLE_RANK)
            leave_hooked()
            self._flush()
        except Exception as error:  # noqa: BLE001  as it says
            self.failures.note("counting", error, then="SGLang goes on")

    def _flush(self) -> None:
        now = time.monotonic()
        if now - self._flushed_s >= METRICS_S:
            self._flushed_s = now
            if self.metrics is not None:
                self.metrics.flush(self.phases, self.failures)
            if self.decision_log is not None:
                self.decision_log.flush()
        if self.config.summary_seconds and now - self._summed_s >= self.config.summary_seconds:
            self._summed_s = now
            logger.info("kpolicy: %s", summary(self.phases, self.failures))

    def install(self, tables: Mapping[str, Any]) -> None:
        """Decide by the policy of the settings, with these cost tables by phase: every size, before a step asks."""
        objective = Objective.parse(self.config.objective)
        for name, phase in self.phases.items():
            phase.install(self.config.policy, tables.get(name), objective)
            phase.decide_all()


def state_of(model_runner: Any) -> State | None:
    """The state of a model runner that kpolicy is attached to."""
    return getattr(model_runner, _ATTRIBUTE, None)


def attach(model_runner: Any, state: State) -> None:
    """Keep the state with its model runner."""
    setattr(model_runner, _ATTRIBUTE, state)


def detach(model_runner: Any) -> None:
    """Forget the state, and all that it decides by: whoever still has it finds nothing in it."""
    state = state_of(model_runner)
    if state is not None:
        state.phases.clear()
        state.held.clear()
        state.mixed = state.long = state.metrics = None
        delattr(model_runner, _ATTRIBUTE)
