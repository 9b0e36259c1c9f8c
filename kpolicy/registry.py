"""`GraphRegistry`: the one record of every captured graph, shared by all executors and safe under threads.

The promise: a key that is advertised is captured or withdrawn, and a view never holds a key that can't be replayed.

The hard part is memory. Graphs of one pool share buffers, and destroying one of them can break the others
(pytorch#193402), so withdrawing a graph stops its use and frees nothing: what it cost stays *held* until the pool's
whole generation is evicted. Budgets bound what is held. Time spent capturing is never given back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from threading import Lock
from typing import Any, TypeVar

import attrs

from kpolicy.budgets import Budget, Usage
from kpolicy.errors import KPolicyError, RegistryError, SchemaError
from kpolicy.keys import GraphKey
from kpolicy.ladders import CaptureLadder
from kpolicy.modes import Part
from kpolicy.reasons import Reason

__all__ = ["GraphRecord", "GraphRegistry", "GraphState", "PoolRecord", "RegistryTotals"]

T = TypeVar("T")
Callback = Callable[[int], None]
_MOST_PENDING = 1024
_NO_USAGE = Usage()


class GraphState(str, Enum):
    """Where a key stands."""

    PLANNED = "planned"
    """To be captured."""
    CAPTURED = "captured"
    """Captured, and may be replayed."""
    FAILED = "failed"
    """Its capture failed; it may be planned anew."""
    WITHDRAWN = "withdrawn"
    """It was planned or captured and may not be replayed; it may be planned anew."""

    def __str__(self) -> str:
        return self.value


@attrs.frozen(kw_only=True)
class GraphRecord:
    """What the registry knows of one key.

    Args:
        key: the key.
        state: where it stands.
        pool: the pool of its last capture; empty before one.
        generation: the pool's generation at that capture.
        graphs, streams, bytes: what its last graph costs, while that is held; 0 otherwise.
        seconds: time spent on all its captures, failed and refused ones included.
        hits: replays; of a device that runs behind its host those that were counted, see `Engine.step`.
        reason: why it failed or was withdrawn.
        handle: the executor's own object for the captured graph; None where it isn't captured.
    """

    key: GraphKey
    state: GraphState = GraphState.PLANNED
    pool: str = ""
    generation: int = 0
    graphs: int = 0
    streams: int = 0
    bytes: int = 0
    seconds: float = 0.0
    hits: int = 0
    reason: Reason | None = None
    handle: Any = attrs.field(default=None, eq=False, repr=False)

    @property
    def usage(self) -> Usage:
        """What the key cost."""
        return Usage(self.graphs, self.streams, self.bytes, self.seconds)


@attrs.frozen
class PoolRecord:
    """One pool: its generation, what the graphs held in it cost, and their handles, withdrawn ones included."""

    name: str
    generation: int = 0
    held: Usage = _NO_USAGE
    handles: tuple[Any, ...] = attrs.field(default=(), eq=False, repr=False)


_NO_POOL = PoolRecord("", -1)


@attrs.frozen
class RegistryTotals:
    """Sums over the registry.

    Args:
        keys: keys by state.
        by_state: what the keys of each state cost.
        held: what is held in all pools, withdrawn graphs included; its seconds are all seconds ever spent.
    """

    keys: Mapping[GraphState, int]
    by_state: Mapping[GraphState, Usage]
    held: Usage

    @property
    def live(self) -> Usage:
        """What the captured keys cost."""
        return self.by_state[GraphState.CAPTURED]

    @property
    def bytes_live(self) -> int:
        """Bytes of captured keys."""
        return self.live.bytes

    @property
    def bytes_held(self) -> int:
        """Bytes of captured keys and of withdrawn graphs whose generation is still there."""
        return self.held.bytes


class GraphRegistry:
    """Every planned, captured, failed and withdrawn key, under one budget.

    Args:
        budget: the most that may be held; by default unbounded.

    Attributes:
        version: a number that rises with every change of what is planned or captured; hits don't change it.

    Raises:
        RegistryError: the budget isn't a `Budget`.
    """

    def __init__(self, budget: Budget | None = None) -> None:
        if not isinstance(budget, Budget | None):
            raise RegistryError(f"budget is {budget!r:.80}; give a Budget, such as Budget(bytes=1 << 30), or None.")
        self.budget = budget if budget is not None else Budget()
        self._lock = Lock()
        self._records: dict[GraphKey, GraphRecord] = {}
        self._pools: dict[str, PoolRecord] = {}
        # For each key that was ever captured (a replay under way when its key is withdrawn still counts), hits by
        # amount, not summed yet. Appending is atomic, and takes half of what a lock would on the per-batch path.
        self._pending: dict[GraphKey, list[int]] = {}
        self._hits: dict[GraphKey, int] = {}
        self._seconds = 0.0
        self.version = 0
        self._views: dict[tuple[tuple[str, ...], bool], CaptureLadder] = {}
        self._callbacks: tuple[Callback, ...] = ()

    # Changes.

    def plan(self, keys: Iterable[GraphKey]) -> None:
        """Plan to capture the keys. Planned and captured keys stay; failed and withdrawn ones are planned anew.

        Raises:
            RegistryError: one isn't a `GraphKey`; then none is planned.
        """
        planned = list(keys) if isinstance(keys, Iterable) else [keys]
        if not isinstance(keys, Iterable) or not all(isinstance(key, GraphKey) for key in planned):
            raise RegistryError(f"{keys!r:.80} was to be planned; give a sequence of GraphKeys.")
        with self._changing() as changed:
            for key in planned:
                record = self._records.get(key)
                if record is None:
                    changed(GraphRecord(key=key))
                elif record.state in (GraphState.FAILED, GraphState.WITHDRAWN):
                    changed(attrs.evolve(record, state=GraphState.PLANNED, reason=None))

    def admit(self, key: GraphKey, *, bytes: int = 0, seconds: float = 0.0, streams: int = 1, graphs: int = 1) -> None:  # noqa: A002
        """Ask, before a capture, whether what it is expected to cost fits the budget. Changes nothing.

        Raises:
            BudgetRefused: it doesn't; `reason` names the budget.
            RegistryError: the key isn't planned.
        """
        asked = Usage(graphs, streams, bytes, seconds)
        with self._lock:
            self._expect(key, "admitted", GraphState.PLANNED)
            self.budget.check(key, self._held(), asked)

    def capture(
        self,
        key: GraphKey,
        *,
        bytes: int,  # noqa: A002
        seconds: float,
        streams: int = 1,
        graphs: int = 1,
        pool: str = "default",
        handle: Any = None,
    ) -> None:
        """Enter a captured graph with what it really cost; its planned key becomes captured.

        A graph over the budget is refused and its key withdrawn. It is in the pool all the same, so it is held, and
        its handle is returned with the others of the generation when that is evicted.

        Raises:
            BudgetRefused: the graph is over the budget; `reason` names it.
            RegistryError: the key isn't planned.
        """
        asked = Usage(graphs, streams, bytes, seconds)
        with self._changing() as changed:
            record = self._expect(key, "captured", GraphState.PLANNED)
            used = self._held()
            reason = self.budget.refuses(used, asked)
            kept = reason is None
            into = self._pools.get(pool, PoolRecord(pool))
            handles = into.handles if handle is None else (*into.handles, handle)
            self._pools[pool] = attrs.evolve(into, held=into.held + asked, handles=handles)
            self._seconds += seconds
            if kept:
                self._pending.setdefault(key, [])
            changed(
                attrs.evolve(
                    record,
                    state=GraphState.CAPTURED if kept else GraphState.WITHDRAWN,
                    pool=pool,
                    generation=into.generation,
                    graphs=graphs,
                    streams=streams,
                    bytes=bytes,
                    seconds=record.seconds + seconds,
                    reason=reason,
                    handle=handle if kept else None,
                )
            )
        if not kept:
            self.budget.check(key, used, asked)

    def fail(self, key: GraphKey, reason: Reason, *, seconds: float = 0.0) -> None:
        """A capture failed after that many seconds; the planned key becomes failed.

        Raises:
            RegistryError: the key isn't planned, or the reason isn't a `Reason`.
        """
        spent = Usage(seconds=seconds)
        _check_reason(reason)
        with self._changing() as changed:
            record = self._expect(key, "failed", GraphState.PLANNED)
            self._seconds += spent.seconds
            changed(
                attrs.evolve(record, state=GraphState.FAILED, reason=reason, seconds=record.seconds + spent.seconds)
            )

    def withdraw(self, key: GraphKey, reason: Reason) -> bool:
        """Take a planned or captured key out of use. What its graph cost stays held; see `evict_generation`.

        Returns:
            Whether this call withdrew it: False where it had failed or was withdrawn before, and nothing changes.

        Raises:
            RegistryError: the key was never planned, or the reason isn't a `Reason`.
        """
        _check_reason(reason)
        with self._changing() as changed:
            record = self._expect(key, "withdrawn", *GraphState)
            if record.state in (GraphState.FAILED, GraphState.WITHDRAWN):
                return False
            changed(attrs.evolve(record, state=GraphState.WITHDRAWN, reason=reason, handle=None))
            return True

    def evict_generation(self, pool: str = "default", *, withdraw: bool = False) -> tuple[Any, ...]:
        """Give up every graph of a pool, as destroying one of them can break the others.

        Captured keys of the pool are planned again, or withdrawn. What they cost, but for time, is free.

        Args:
            pool: the pool; one that holds nothing stays as it is.
            withdraw: withdraw the keys, for `Reason.GENERATION_EVICTED`.

        Returns:
            Handles of all graphs of the generation, withdrawn and refused ones included, for the executor to destroy.
        """
        state = GraphState.WITHDRAWN if withdraw else GraphState.PLANNED
        with self._changing() as changed:
            gone = self._pools.get(pool)
            records = () if gone is None else self._of_pool(gone)
            if gone is None or not (records or gone.handles or gone.held != _NO_USAGE):
                return ()
            self._pools[pool] = PoolRecord(pool, gone.generation + 1)
            for record in records:
                freed = attrs.evolve(record, graphs=0, streams=0, bytes=0, handle=None)
                if record.state is GraphState.CAPTURED:
                    reason = Reason.GENERATION_EVICTED if withdraw else None
                    freed = attrs.evolve(freed, state=state, reason=reason)
                changed(freed)
            changed()
            return gone.handles

    def hit(self, key: GraphKey, times: int = 1) -> None:
        """Count replays of a key. A hit that arrives after its key was withdrawn counts: its replay was under way.

        Raises:
            RegistryError: the key was never captured, or there are fewer than 0 replays.
        """
        if times < 0:
            raise RegistryError(f"{times} replays of {key} can't be counted; it is a whole number from 0 up.")
        try:
            pending = self._pending[key]
        except KeyError:
            raise RegistryError(f"{key} can't be replayed: {self._standing(key)}. Capture it first.") from None
        pending.append(times)
        if len(pending) >= _MOST_PENDING:
            with self._lock:
                self._sum_hits(key)

    def subscribe(self, callback: Callback) -> Callable[[], None]:
        """Call `callback(version)` after each change, outside the lock.

        Calls from several threads may overtake each other: compare versions. What a callback raises reaches the
        caller of the change, which stands.

        Returns:
            A function that ends the subscription, and no other of the same callback.

        Raises:
            RegistryError: the callback can't be called: every later change would fail.
        """
        if not callable(callback):
            raise RegistryError(f"{callback!r:.80} can't be called; subscribe a function of the version.")

        def subscription(version: int) -> None:
            callback(version)

        with self._lock:
            self._callbacks = (*self._callbacks, subscription)

        def unsubscribe() -> None:
            with self._lock:
                self._callbacks = tuple(each for each in self._callbacks if each is not subscription)

        return unsubscribe

    # Questions.

    def record(self, key: GraphKey) -> GraphRecord:
        """What is known of a key.

        Raises:
            RegistryError: the key was never planned.
        """
        with self._lock:
            return self._counted(self._expect(key, "looked up", *GraphState))

    def records(self) -> tuple[GraphRecord, ...]:
        """Every record, by stage, part and size."""
        with self._lock:
            return self._sorted()

    def pools(self) -> tuple[PoolRecord, ...]:
        """Every pool, by name."""
        with self._lock:
            return tuple(self._pools[name] for name in sorted(self._pools))

    def captured(self) -> tuple[GraphKey, ...]:
        """The keys that may be replayed, of all stages."""
        return tuple(record.key for record in self.records() if record.state is GraphState.CAPTURED)

    def unused(self) -> tuple[GraphKey, ...]:
        """The captured keys that were never replayed."""
        return tuple(record.key for record in self.records() if record.state is GraphState.CAPTURED and not record.hits)

    def totals(self) -> RegistryTotals:
        """Sums by state, and of what is held."""
        with self._lock:
            records, held = tuple(self._records.values()), self._held()
        keys = dict.fromkeys(GraphState, 0)
        usage = dict.fromkeys(GraphState, _NO_USAGE)
        for record in records:
            keys[record.state] += 1
            usage[record.state] += record.usage
        return RegistryTotals(keys, usage, held)

    def view(self, stages: Sequence[str] = ("main",), *, assumed: bool = False) -> CaptureLadder:
        """The keys of those stages that may be replayed, for policies; the same object until something changes.

        Args:
            stages: the stages whose keys to show.
            assumed: take planned keys as captured (an Engine without a model).

        Raises:
            RegistryError: one stage's name in place of several.
        """
        if isinstance(stages, str):
            # Its letters would be stages that have no keys.
            raise RegistryError(f"stages is {stages!r}; it is a sequence of names. Give ({stages!r},).")
        asked = (tuple(stages), assumed)
        with self._lock:
            view = self._views.get(asked)
            if view is None:
                view = self._views[asked] = self._view(asked[0], assumed)
            return view

    # Snapshots.

    def snapshot(self) -> dict[str, Any]:
        """The registry as plain JSON values in a fixed order, without handles."""
        with self._lock:
            return {
                "schema": SNAPSHOT_SCHEMA,
                "version": list(SNAPSHOT_VERSION),
                "budget": attrs.asdict(self.budget),
                "changes": self.version,
                "seconds": self._seconds,
                "pools": [
                    {"name": pool.name, "generation": pool.generation, "held": attrs.asdict(pool.held)}
                    for _, pool in sorted(self._pools.items())
                ],
                "records": [_record_as_dict(record) for record in self._sorted()],
            }

    @classmethod
    def restore(cls, snapshot: Mapping[str, Any], *, keep: bool = False) -> GraphRegistry:
        """A registry from a snapshot.

        Args:
            snapshot: what `snapshot` returned, perhaps through JSON.
            keep: keep captured keys captured and all accounting as it was, for reports. Otherwise, as no handle
                outlives its process, captured keys are planned, nothing is held and no time is spent yet; hits stay.

        Raises:
            SchemaError: it isn't a snapshot, it is of a newer schema, or a field is missing or wrong.
        """
        fields = _Fields("snapshot", snapshot)
        _check_header(fields)
        registry = cls(_built("snapshot.budget", Budget, fields.mapping("budget")))
        registry.version = fields.whole("changes")
        registry._seconds = fields.seconds("seconds")
        for entry in fields.entries("pools"):
            held = _built(f"{entry.path}.held", Usage, entry.mapping("held"))
            pool = PoolRecord(entry.text("name"), entry.whole("generation"), held)
            if pool.name in registry._pools:
                raise SchemaError(f"{entry.path} is a second record of the pool {pool.name!r}; a pool has one.")
            registry._pools[pool.name] = pool
        for entry in fields.entries("records"):
            record = _record_of(entry)
            if record.key in registry._records:
                raise SchemaError(f"{entry.path} is a second record of {record.key}; a key has one.")
            captured = record.state is GraphState.CAPTURED
            if captured and registry._pools.get(record.pool, _NO_POOL).generation != record.generation:
                raise SchemaError(f"{entry.path} is captured in a pool or generation that the snapshot doesn't list.")
            registry._records[record.key] = attrs.evolve(record, hits=0)
            if captured or record.hits:
                registry._pending[record.key] = [record.hits]
        if not keep:
            registry._lose_graphs()
        return registry

    # The rest is called with the lock held.

    @contextmanager
    def _changing(self) -> Iterator[Callable[..., None]]:
        """Hold the lock; give a function that enters a record; after a change raise the version and tell."""
        changes = 0

        def changed(record: GraphRecord | None = None) -> None:
            nonlocal changes
            changes += 1
            if record is not None:
                self._records[record.key] = record

        try:
            with self._lock:
                try:
                    yield changed
                finally:
                    if changes:
                        self.version += 1
                        self._views.clear()
                    version, callbacks = self.version, self._callbacks
        finally:
            if changes:
                for callback in callbacks:
                    callback(version)

    def _expect(self, key: GraphKey, to_be: str, *states: GraphState) -> GraphRecord:
        record = self._records.get(key)
        if record is None or record.state not in states:
            captured = record is not None and record.state is GraphState.CAPTURED
            step = "Withdraw it or evict its pool, then plan it." if captured else "Plan it first."
            raise RegistryError(f"{key} can't be {to_be}: {self._standing(key)}. {step}")
        return record

    def _standing(self, key: GraphKey) -> str:
        record = self._records.get(key)
        if record is None:
            return f"it isn't among the {len(self._records)} keys of the registry"
        why = "" if record.reason is None else f" ({record.reason.text})"
        return f"it is {record.state}{why}"

    def _held(self) -> Usage:
        held = _NO_USAGE
        for pool in self._pools.values():
            held += pool.held
        return attrs.evolve(held, seconds=self._seconds)

    def _of_pool(self, pool: PoolRecord) -> tuple[GraphRecord, ...]:
        """Records whose last graph is held in the pool."""
        of = (pool.name, pool.generation)
        return tuple(record for record in self._records.values() if (record.pool, record.generation) == of)

    def _counted(self, record: GraphRecord) -> GraphRecord:
        return attrs.evolve(record, hits=self._sum_hits(record.key)) if record.key in self._pending else record

    def _sum_hits(self, key: GraphKey) -> int:
        pending = self._pending[key]
        # Others may append meanwhile: only what was counted is deleted.
        counted = pending[:]
        del pending[: len(counted)]
        total = self._hits[key] = self._hits.get(key, 0) + sum(counted)
        return total

    def _sorted(self) -> tuple[GraphRecord, ...]:
        return tuple(self._counted(self._records[key]) for key in sorted(self._records, key=_order))

    def _view(self, stages: tuple[str, ...], assumed: bool) -> CaptureLadder:
        shown = {GraphState.CAPTURED, GraphState.PLANNED} if assumed else {GraphState.CAPTURED}
        lost = {GraphState.FAILED, GraphState.WITHDRAWN}
        records = [record for record in self._records.values() if record.key.stage in stages]
        return CaptureLadder(
            (record.key for record in records if record.state in shown),
            version=self.version,
            assumed=assumed,
            withdrawn=(record.key for record in records if record.state in lost),
        )

    def _lose_graphs(self) -> None:
        self._pools.clear()
        self._seconds = 0.0
        self.version += 1
        for record in tuple(self._records.values()):
            state = GraphState.PLANNED if record.state is GraphState.CAPTURED else record.state
            self._records[record.key] = GraphRecord(key=record.key, state=state, reason=record.reason)


def _check_reason(reason: object) -> None:
    if not isinstance(reason, Reason):
        raise RegistryError(f"reason is {reason!r:.80}; it is a member of Reason, such as Reason.CAPTURE_FAILED.")


def _order(key: GraphKey) -> tuple[Any, ...]:
    lengths = (key.num_reqs or 0, key.query_len or 0, key.max_query_len or 0)
    return (key.stage, key.part.value, key.num_tokens, *lengths, key.lora_case, key.variant)


SNAPSHOT_SCHEMA = "kpolicy/registry"
SNAPSHOT_VERSION = (1, 0)
"""A snapshot of another major number isn't read; a higher minor one is, its unknown fields ignored."""


def _record_as_dict(record: GraphRecord) -> dict[str, Any]:
    key = attrs.asdict(record.key)
    return {
        "key": {**key, "part": record.key.part.value},
        "state": record.state.value,
        "pool": record.pool,
        "generation": record.generation,
        **attrs.asdict(record.usage),
        "hits": record.hits,
        "reason": None if record.reason is None else record.reason.value,
    }


class _Fields:
    """An object of a snapshot, read field by field: each wrong or missing one is a SchemaError with its path."""

    def __init__(self, path: str, data: object) -> None:
        self.path = path
        if not isinstance(data, Mapping):
            raise SchemaError(f"{path} is {data!r:.80}; it must be an object of fields.")
        self.data = data

    def _wrong(self, name: str, wanted: str) -> SchemaError:
        if name not in self.data:
            return SchemaError(f"{self.path}.{name} is missing; it must be {wanted}.")
        return SchemaError(f"{self.path}.{name} is {self.data[name]!r:.80}; it must be {wanted}.")

    def _take(self, name: str, kind: type[T], wanted: str) -> T:
        value = self.data.get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise self._wrong(name, wanted)
        return value

    def text(self, name: str) -> str:
        return self._take(name, str, "text")

    def whole(self, name: str) -> int:
        value = self._take(name, int, "a whole number from 0 up")
        if value < 0:
            raise self._wrong(name, "a whole number from 0 up")
        return value

    def seconds(self, name: str) -> float:
        value: float = self._take(name, (int, float), "a finite number from 0 up")  # type: ignore[arg-type]
        return _built(f"{self.path}.{name}", lambda seconds: float(Usage(seconds=seconds).seconds), {"seconds": value})

    def mapping(self, name: str) -> Mapping[str, Any]:
        return _Fields(f"{self.path}.{name}", self._take(name, Mapping, "an object of fields")).data  # type: ignore[type-abstract]

    def entries(self, name: str) -> Iterator[_Fields]:
        for index, entry in enumerate(self._take(name, list, "a list of objects")):
            yield _Fields(f"{self.path}.{name}[{index}]", entry)

    def one_of(self, name: str, kind: type[Enum]) -> Any:
        try:
            return kind(self.data.get(name))
        except ValueError:
            raise self._wrong(name, "one of " + ", ".join(str(member.value) for member in kind)) from None


def _built(path: str, build: Callable[..., T], data: Mapping[str, Any]) -> T:
    """The object of those fields; unknown ones are ignored."""
    names = {field.name for field in attrs.fields(build)} if isinstance(build, type) and attrs.has(build) else data
    try:
        return build(**{name: value for name, value in data.items() if name in names})
    except (KPolicyError, TypeError, OverflowError) as error:
        raise SchemaError(f"{path} can't be used: {error}") from None


def _check_header(fields: _Fields) -> None:
    if fields.data.get("schema") != SNAPSHOT_SCHEMA:
        raise fields._wrong("schema", repr(SNAPSHOT_SCHEMA))
    version = fields.data.get("version")
    if not isinstance(version, (list, tuple)) or len(version) != 2 or not all(type(part) is int for part in version):
        raise fields._wrong("version", "two whole numbers, [major, minor]")
    if version[0] != SNAPSHOT_VERSION[0]:
        step = "upgrade kpolicy" if version[0] > SNAPSHOT_VERSION[0] else "take a new snapshot"
        raise SchemaError(
            f"the snapshot has version {version[0]}.{version[1]}; this kpolicy reads {SNAPSHOT_VERSION[0]}.x: {step}."
        )


def _record_of(entry: _Fields) -> GraphRecord:
    key = _Fields(f"{entry.path}.key", entry.mapping("key"))
    optional = {
        name: key.whole(name) for name in ("num_reqs", "query_len", "max_query_len") if key.data.get(name) is not None
    }
    plain = {"num_tokens": key.whole("num_tokens"), "lora_case": key.whole("lora_case")}
    words = {"stage": key.text("stage"), "variant": key.text("variant")}
    reason = None if entry.data.get("reason") is None else entry.one_of("reason", Reason)
    return GraphRecord(
        key=_built(key.path, GraphKey, {"part": key.one_of("part", Part), **optional, **plain, **words}),
        state=entry.one_of("state", GraphState),
        pool=entry.text("pool"),
        generation=entry.whole("generation"),
        graphs=entry.whole("graphs"),
        streams=entry.whole("streams"),
        bytes=entry.whole("bytes"),
        seconds=entry.seconds("seconds"),
        hits=entry.whole("hits"),
        reason=reason,
    )
