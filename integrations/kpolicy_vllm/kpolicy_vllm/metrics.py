"""kpolicy's counters on vLLM's own ``/metrics`` page.

The page is served by the front end, and steps are counted in workers, mostly in another process. A worker leaves its
counts in a small file now and then; the front end's collector reads the files when it is scraped. The metrics are those
of an Engine (kpolicy's docs/observe.md), and ``kpolicy_vllm_events`` for what else happened.
"""

from __future__ import annotations

import json
import os
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from kpolicy.errors import KPolicyError
from kpolicy.observe.metrics import EngineCollector
from kpolicy.observe.stats import ModeStats, Stats
from kpolicy.registry import GraphRegistry
from kpolicy_vllm.state import LOGGER, PROCESS, State

__all__ = ["Collector", "Publisher", "announce", "folder", "published"]


def folder() -> Path:
    """Where workers leave their counts: of this user alone.

    Raises:
        OSError: it can't be made, or is another user's.
    """
    path = Path(tempfile.gettempdir()) / f"kpolicy-vllm-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    if path.lstat().st_uid != os.getuid() or path.is_symlink():
        raise PermissionError(f"{path} is another user's; counters for the metrics page need a folder of one's own")
    return path


def published(state: State) -> dict[str, Any]:
    """What there is to tell of one worker, as plain JSON values."""
    state.dispatcher.chooser.count_hits()
    return {
        "policy": state.config.policy,
        "steps": [[*label, *sums] for label, sums in state.dispatcher.chooser.tallies().items()],
        "events": dict(state.counters.counts),
        "compiles": state.compiles,
        "registry": state.registry.snapshot(),
    }


def _removed(path: Path, pid: int) -> None:
    """Take that file away, if this is the process that writes it and not one forked off it."""
    if os.getpid() == pid:
        path.unlink(missing_ok=True)


class Publisher:
    """Leaves a worker's counts in its file; the file goes with the state, at the latest with the process.

    Args:
        state: what kpolicy knows of this vLLM.
        instance: vLLM's name for itself.
        rank: the data-parallel engine's number.
    """

    def __init__(self, state: State, instance: str, rank: int) -> None:
        self._state = weakref.ref(state)
        self.path = folder() / f"{instance}.dp{rank}.json"
        weakref.finalize(state, _removed, self.path, os.getpid())

    def __call__(self) -> None:
        from kpolicy.schemas import write_text

        state = self._state()
        if state is None:
            return
        try:
            write_text(self.path, json.dumps(published(state)))
        except KPolicyError as error:
            state.counters.warn_once("metrics_failed", f"counters can't be told to the front end: {error}")


class _Counts(Stats):
    """Counts that another process has summed up."""

    def __init__(self, told: Mapping[str, Any]) -> None:
        super().__init__()
        self.recompiles = told["compiles"]
        self._told = told["steps"]

    @property
    def by_mode_and_reason(self) -> dict[tuple[str, str], ModeStats]:
        return {(mode, reason): ModeStats(*sums) for mode, reason, *sums in self._told}


@attrs.frozen
class _Named:
    name: str


class _Worker:
    """One worker's counts, as `EngineCollector` reads an Engine's."""

    def __init__(self, told: Mapping[str, Any]) -> None:
        self.stats = _Counts(told)
        self.registry = GraphRegistry.restore(told["registry"], keep=True)
        self.policy = _Named(told["policy"])
        self.events: Mapping[str, int] = told["events"]


class Collector:
    """Collects the metrics of every vLLM that was configured in this process.

    Attributes:
        states: workers in this process, by vLLM's name for itself, which aren't held; others (None) leave files.
    """

    def __init__(self) -> None:
        from prometheus_client import metrics_core

        self._families = metrics_core
        self.pid = os.getpid()
        self.states: dict[str, weakref.ref[State] | None] = {}

    def describe(self) -> list[Any]:
        """Nothing: registering asks for names only."""
        return []

    def collect(self) -> Iterator[Any]:
        """Every metric, read now."""
        workers = dict(self._workers())
        if workers:
            yield from EngineCollector(workers).collect()
        if not workers and not PROCESS.counts:
            return
        events = self._families.CounterMetricFamily(
            "kpolicy_vllm_events", "What kept kpolicy from deciding, and other warnings.", labels=["policy", "event"]
        )
        told = {label: worker.events for label, worker in workers.items()} | {"": PROCESS.counts}
        for label, counts in told.items():
            for name, count in counts.items():
                events.add_metric([label, name], count)
        yield events

    def _workers(self) -> Iterator[tuple[str, _Worker]]:
        for number, (instance, reference) in enumerate(list(self.states.items())):
            state = reference() if reference is not None else None
            if reference is not None and state is None:
                continue
            told = {0: published(state)} if state is not None else _read(instance)
            for rank, each in told.items():
                label = each["policy"] + (f" dp{rank}" if rank else "") + (f" #{number}" if number else "")
                yield label, _Worker(each)


def _read(instance: str) -> dict[int, dict[str, Any]]:
    """What the workers of a vLLM have left, by rank."""
    before, after = f"{instance}.dp", ".json"
    try:
        found = {path.name[len(before) : -len(after)]: path for path in folder().glob(f"{before}*{after}")}
    except OSError:
        return {}
    # A copy that somebody made of a file has no rank for a name.
    paths = {int(rank): path for rank, path in found.items() if rank.isdecimal()}
    told = ((rank, _told(path)) for rank, path in sorted(paths.items()))
    return {rank: each for rank, each in told if each is not None}


def _told(path: Path) -> dict[str, Any] | None:
    """What a file tells; None where it is gone or broken."""
    try:
        told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return told


_COLLECTOR: list[Collector] = []


def announce(instance: str) -> None:
    """Put the metrics of a vLLM on this process's page: once where it is configured. Needs prometheus-client.

    Without a name there is no engine of ours to tell of, and only what went wrong in this process is told.
    """
    try:
        if not _COLLECTOR:
            from prometheus_client import REGISTRY

            _COLLECTOR.append(Collector())
            REGISTRY.register(_COLLECTOR[0])
        if instance:
            _COLLECTOR[0].states.setdefault(instance, None)
    except ImportError:
        LOGGER.info("kpolicy: prometheus-client isn't installed, so there are no counters on the metrics page")
    except Exception as error:  # noqa: BLE001 - a registry may refuse, and vLLM serves on
        PROCESS.warn_once(
            "metrics_failed", f"there are no counters on the metrics page: {type(error).__name__}: {error}"
        )


def publisher(state: State, instance: str, rank: int) -> Publisher | None:
    """How that worker tells its counts: nothing to do where the collector is in this process."""
    # A worker that was forked has the front end's collector too, and no page.
    if _COLLECTOR and _COLLECTOR[0].pid == os.getpid() and instance in _COLLECTOR[0].states:
        _COLLECTOR[0].states[instance] = weakref.ref(state)
        return None
    return Publisher(state, instance, rank)
