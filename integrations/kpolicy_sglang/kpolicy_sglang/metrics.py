"""Counters beside SGLang's own Prometheus metrics, in the process of the scheduler.

SGLang collects its metrics over processes from files, so these are plain counters that are raised now and then.
"""

from __future__ import annotations

from typing import Any

from kpolicy_sglang.counters import buckets, lines
from kpolicy_sglang.failures import Failures
from kpolicy_sglang.phase import Phase

__all__ = ["Metrics"]


class Metrics:
    """Counters of steps, padding and replays, by phase.

    Args:
        registry: the registry of `prometheus_client` to register with; by default its own.
        dp_rank: which of several data-parallel ranks this is, a label of every counter; None for the only one.

    Raises:
        ModuleNotFoundError: prometheus-client isn't installed.
    """

    def __init__(self, registry: Any = None, *, dp_rank: int | None = None) -> None:
        from prometheus_client import REGISTRY, Counter

        self._of_rank = () if dp_rank is None else (str(dp_rank),)

        def counter(name: str, what: str, *labels: str) -> Any:
            named = [*labels, *(["dp_rank"] if self._of_rank else [])]
            return Counter(f"sglang:kpolicy_{name}", what, named, registry=REGISTRY if registry is None else registry)

        self._steps = counter("steps", "Steps by phase, mode and reason.", "phase", "mode", "reason")
        self._padding = counter("padding_tokens", "Padding tokens of replayed steps.", "phase", "mode")
        self._replays = counter(
            "replays", "Replays by captured size (requests in decode, tokens in prefill).", "phase", "size"
        )
        self._failures = counter("failures", "Errors of kpolicy that SGLang's own rule stood in for.", "what")
        self._told: dict[tuple[Any, ...], int] = {}

    def flush(self, phases: dict[str, Phase], failures: Failures | None = None) -> None:
        """Raise the counters by what came since the last time."""
        for what, times in failures.counts.items() if failures is not None else ():
            self._raise(self._failures, (what,), times)
        for phase in phases.values():
            for line in lines(phase):
                self._raise(self._steps, (line.phase, line.mode, line.reason), line.steps)
                if line.padding:
                    self._raise(self._padding, (line.phase, line.mode), line.padding, line.reason)
            for size, steps in buckets(phase).items():
                self._raise(self._replays, (phase.name, str(size)), steps)

    def _raise(self, counter: Any, labels: tuple[str, ...], total: int, apart: str = "") -> None:
        key = (id(counter), labels, apart)
        more = total - self._told.get(key, 0)
        if more > 0:
            counter.labels(*labels, *self._of_rank).inc(more)
            self._told[key] = total
