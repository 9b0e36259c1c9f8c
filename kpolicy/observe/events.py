"""Events: what happens to graphs and to the device. They are rare, and never a batch's.

An Engine has `events`. Nothing is made, compared or imported until somebody subscribes: `log_events(engine)`, or
``engine.events.subscribe(hook)`` with any callable that takes an event. Events are frozen, `fields` gives their plain
values. docs/observe.md lists them.

What becomes of graphs is read off the registry after each of its changes, so whoever changes it needn't know of
events. What only the Engine sees (`CaptureFinished`, `ReplayFailed`, `DeviceLost`) the Engine tells.

A graph that fails in a step is withdrawn before the step's last launch, where nothing may be logged: that event waits
until the Engine tells of the failure, when the step is over.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Union

import attrs

from kpolicy.decision import Decision
from kpolicy.errors import ConfigError
from kpolicy.keys import GraphKey
from kpolicy.reasons import Reason
from kpolicy.registry import GraphRecord, GraphRegistry, GraphState, PoolRecord

if TYPE_CHECKING:
    from kpolicy.policies import Downgrade

__all__ = [
    "CaptureFinished",
    "DeviceLost",
    "Event",
    "Events",
    "GenerationEvicted",
    "GraphCaptured",
    "GraphFailed",
    "GraphWithdrawn",
    "Hook",
    "PolicyDowngraded",
    "ReplayFailed",
    "fields",
    "log_events",
]

_AT_REPLAY = (Reason.REPLAY_FAILED, Reason.ADDRESS_CHANGED)
"""Why a graph is withdrawn in the midst of a step, whose event names it"""


@attrs.frozen(kw_only=True)
class GraphCaptured:
    """A graph was captured, and may be replayed.

    Args:
        key: the graph.
        pool, generation: where it was captured into.
        graphs, streams, bytes: what it takes.
        seconds: how long the capture took.
    """

    name: ClassVar[str] = "kpolicy.graph_captured"
    level: ClassVar[int] = logging.INFO
    key: GraphKey
    pool: str
    generation: int
    graphs: int
    streams: int
    bytes: int
    seconds: float


@attrs.frozen(kw_only=True)
class GraphFailed:
    """A graph couldn't be captured after that many seconds; batches that it would hold run in a lesser mode."""

    name: ClassVar[str] = "kpolicy.graph_failed"
    level: ClassVar[int] = logging.WARNING
    key: GraphKey
    reason: Reason
    seconds: float


@attrs.frozen(kw_only=True)
class GraphWithdrawn:
    """A graph was taken out of use, or refused by the budget.

    Args:
        key: the graph.
        reason: why.
        held_bytes: what it still takes until its generation is evicted.
    """

    name: ClassVar[str] = "kpolicy.graph_withdrawn"
    level: ClassVar[int] = logging.WARNING
    key: GraphKey
    reason: Reason
    held_bytes: int


@attrs.frozen(kw_only=True)
class GenerationEvicted:
    """A pool gave up all its graphs. `graphs` and `bytes` are what that freed."""

    name: ClassVar[str] = "kpolicy.generation_evicted"
    level: ClassVar[int] = logging.INFO
    pool: str
    generation: int
    graphs: int
    bytes: int


@attrs.frozen(kw_only=True)
class CaptureFinished:
    """`Engine.capture` is done.

    Args:
        captured: graphs there are now.
        not_captured: keys that failed or were withdrawn.
        held_bytes: what all graphs take, withdrawn ones included.
        seconds: spent on captures since the registry was made.
    """

    name: ClassVar[str] = "kpolicy.capture_finished"
    level: ClassVar[int] = logging.INFO
    captured: int
    not_captured: int
    held_bytes: int
    seconds: float


@attrs.frozen(kw_only=True)
class ReplayFailed:
    """Graphs failed before they were launched, and the step ran without them.

    Args:
        keys: the graphs, withdrawn now.
        mode: how the step was to run.
        ran: how it ran.
    """

    name: ClassVar[str] = "kpolicy.replay_failed"
    level: ClassVar[int] = logging.WARNING
    keys: tuple[GraphKey, ...]
    mode: str
    ran: str


@attrs.frozen(kw_only=True)
class DeviceLost:
    """The device is lost to this process, and the Engine stops. `error` is what it raises from now on."""

    name: ClassVar[str] = "kpolicy.device_lost"
    level: ClassVar[int] = logging.ERROR
    error: str


@attrs.frozen(kw_only=True)
class PolicyDowngraded:
    """The policy can't have all that it asks for. Told to each hook when it subscribes: it was so from the start."""

    name: ClassVar[str] = "kpolicy.policy_downgraded"
    level: ClassVar[int] = logging.WARNING
    policy: str
    batches: str
    asked: str
    resolved: str
    reason: Reason


Event = Union[  # noqa: UP007 - a name that help() and isinstance know
    GraphCaptured, GraphFailed, GraphWithdrawn, GenerationEvicted, CaptureFinished, ReplayFailed, DeviceLost,
    PolicyDowngraded,
]  # fmt: skip


class Hook(Protocol):
    """What an event is told to: any callable. What it raises is logged and goes no further."""

    def __call__(self, event: Event, /) -> object: ...


class HasEvents(Protocol):
    """An Engine."""

    @property
    def events(self) -> Events: ...


def fields(event: Event) -> dict[str, Any]:
    """The event's fields as plain JSON values; keys of graphs as text."""
    return {field.name: _plain(getattr(event, field.name)) for field in attrs.fields(type(event))}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, GraphKey) else value


class Events:
    """The events of one Engine, for any number of hooks. Safe under threads.

    Where Engines share a registry, each has the graph events of all.

    Args:
        registry: the record of captured graphs.
        policy: the policy's name.
        downgrades: what the policy can't have.
    """

    def __init__(self, registry: GraphRegistry, policy: str = "", downgrades: Sequence[Downgrade] = ()) -> None:
        self._registry = registry
        self._policy = policy
        self._downgrades = tuple(downgrades)
        self._lock = Lock()
        self._hooks: tuple[Callable[[Event], None], ...] = ()
        self._records: dict[GraphKey, GraphRecord] = {}
        self._pools: dict[str, PoolRecord] = {}
        self._held: list[GraphWithdrawn] = []
        self._unwatch: Callable[[], None] | None = None

    def subscribe(self, hook: Hook) -> Callable[[], None]:
        """Tell the hook of every event from now on, and of the policy's downgrades at once.

        Events of several threads may overtake each other. A key that changes twice at the same time is told of once,
        as it stands then.

        Returns:
            A function that ends the subscription, and no other of the same hook.

        Raises:
            ConfigError: it can't be called.
        """
        if not callable(hook):
            raise ConfigError(f"a hook for events is {hook!r:.80}; it takes a function of one event, such as print.")

        def subscription(event: Event) -> None:
            try:
                hook(event)
            except Exception:
                # A capture or a step that went well must not fail for want of a log line.
                logging.getLogger("kpolicy").exception("a hook for events failed on %s", event.name)

        def unsubscribe() -> None:
            with self._lock:
                self._hooks = tuple(each for each in self._hooks if each is not subscription)
                unwatch, self._unwatch = (None, self._unwatch) if self._hooks else (self._unwatch, None)
            if unwatch is not None:
                unwatch()

        with self._lock:
            if self._unwatch is None:
                self._unwatch = self._registry.subscribe(self._changed)
                self._records, self._pools = self._now()
            self._hooks = (*self._hooks, subscription)
        for downgrade in self._downgrades:
            subscription(PolicyDowngraded(policy=self._policy, **attrs.asdict(downgrade, recurse=False)))
        return unsubscribe

    # Told by the Engine, outside the time between a step's decision and its last launch.

    def capture_finished(self) -> None:
        """`Engine.capture` is done."""
        totals = self._registry.totals()
        lost = totals.keys[GraphState.FAILED] + totals.keys[GraphState.WITHDRAWN]
        self._tell(
            *self._release(),
            CaptureFinished(
                captured=totals.keys[GraphState.CAPTURED],
                not_captured=lost,
                held_bytes=totals.bytes_held,
                seconds=totals.held.seconds,
            ),
        )

    def replay_failed(self, wanted: Decision, ran: Decision) -> None:
        """A step that was to run as `wanted` lost graphs before their launch, and ran as `ran`."""
        held = self._release()
        self._tell(*held, ReplayFailed(keys=tuple(event.key for event in held), mode=wanted.label, ran=ran.label))

    def graphs_withdrawn(self) -> None:
        """Graphs may have been withdrawn between steps, for which no step failed."""
        held = self._release()
        if held:
            self._tell(*held)

    def device_lost(self, error: BaseException) -> None:
        """The device is lost."""
        self._tell(*self._release(), DeviceLost(error=str(error)))

    # What the registry tells.

    def _changed(self, _version: int) -> None:
        with self._lock:
            events = []
            for event in self._differences():
                if isinstance(event, GraphWithdrawn) and event.reason in _AT_REPLAY:
                    self._held.append(event)
                else:
                    events.append(event)
        self._tell(*events)

    def _now(self) -> tuple[dict[GraphKey, GraphRecord], dict[str, PoolRecord]]:
        records = {record.key: record for record in self._registry.records()}
        return records, {pool.name: pool for pool in self._registry.pools()}

    def _differences(self) -> Iterator[Event]:
        """Events for what changed in the registry since the last call."""
        records, pools = self._records, self._pools
        self._records, self._pools = self._now()
        for name, pool in self._pools.items():
            before = pools.get(name)
            if before is not None and before.generation != pool.generation:
                held = before.held
                yield GenerationEvicted(pool=name, generation=before.generation, graphs=held.graphs, bytes=held.bytes)
        for key, record in self._records.items():
            event = _difference(records.get(key), record)
            if event is not None:
                yield event

    def _release(self) -> list[GraphWithdrawn]:
        with self._lock:
            held, self._held = self._held, []
        return held

    def _tell(self, *events: Event) -> None:
        for event in events:
            for hook in self._hooks:
                hook(event)


def _difference(before: GraphRecord | None, now: GraphRecord) -> Event | None:
    """The event of a record that changed, if that is one."""
    before = before if before is not None else GraphRecord(key=now.key)
    if (before.state, before.pool, before.generation) == (now.state, now.pool, now.generation):
        return None
    if now.state is GraphState.CAPTURED:
        return GraphCaptured(
            key=now.key, pool=now.pool, generation=now.generation, graphs=now.graphs, streams=now.streams,
            bytes=now.bytes, seconds=now.seconds - before.seconds,
        )  # fmt: skip
    if now.reason is None:
        return None
    if now.state is GraphState.FAILED:
        return GraphFailed(key=now.key, reason=now.reason, seconds=now.seconds - before.seconds)
    return GraphWithdrawn(key=now.key, reason=now.reason, held_bytes=now.bytes)


def log_events(engine: HasEvents, logger: Any = None) -> Callable[[], None]:
    """Log an Engine's events: the event's name, and its fields by name.

    Logging isn't configured here; that is the application's. An unconfigured structlog prints to standard output.

    Args:
        engine: the Engine.
        logger: a structlog or a standard logger; by default structlog's where that is installed, otherwise the
            standard logger ``kpolicy``, which gets the fields in its records' ``kpolicy`` attribute too.

    Returns:
        A function that ends it.
    """
    return engine.events.subscribe(_Log(logger))


class _Log:
    """Logs events; finds its logger at the first one."""

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def __call__(self, event: Event) -> None:
        if self._logger is None:
            self._logger = _default_logger()
        values = fields(event)
        if isinstance(self._logger, (logging.Logger, logging.LoggerAdapter)):
            text = " ".join(f"{name}={value!r}" for name, value in values.items())
            self._logger.log(event.level, "%s %s", event.name, text, extra={"kpolicy": values})
        else:
            self._logger.log(event.level, event.name, **values)


def _default_logger() -> Any:
    try:
        from structlog import get_logger
    except ImportError:
        return logging.getLogger("kpolicy")
    # Bound once: a lazy logger would be assembled anew for each event.
    return get_logger("kpolicy").bind()
