"""How modes run, once: which rows each launch gets, what replays, what falls back, and when each part is ready.

A `Launcher` captures a graph for a key, replays it over a part's inputs and runs a part eagerly. There are two: the
simulated device, whose memory is numbers, and `kpolicy.executors.launcher.GraphLauncher`, which runs a step model over
the primitives of any real device. `ModeRunner` does the rest for both, and is the `Executor` that an Engine gets.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from threading import Lock
from typing import Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary, ref

import attrs

from kpolicy.decision import Decision, Launch
from kpolicy.errors import BudgetRefused, CaptureError, GraphReplayError, RegistryError, StickyDeviceError
from kpolicy.executors.base import CaptureReport, ProbeReport, ReadyEvent, StepInputs, StepOutputs, new_outputs
from kpolicy.executors.handover import LateOutputs, PartOutputs, joined, part_of, without_graph
from kpolicy.keys import GraphKey
from kpolicy.modes import Part, Rows
from kpolicy.reasons import Reason
from kpolicy.registry import GraphRegistry, GraphState
from kpolicy.shapes import BatchNumbers

__all__ = ["AsyncLauncher", "Launcher", "ModeRunner", "PartOutputs", "part_of"]


class Launcher(Protocol):
    """Runs single launches of one device.

    A pool is the memory, buffers, stream and workspace that graphs share which never run at the same time; the
    runner keeps one for each part.
    """

    @property
    def name(self) -> str: ...

    def probe(self) -> ProbeReport: ...

    def estimate(self, key: GraphKey) -> CaptureReport:
        """What capturing that key is expected to cost."""
        ...

    def new_pool(self, part: Part, largest: GraphKey) -> Any:
        """Memory and static buffers for graphs of one part.

        Args:
            part: what the graphs cover.
            largest: no graph of the pool has more tokens, rows or LoRAs than this key; it needn't be one of them.

        Raises:
            CaptureError: the device refused; what it took is freed.
            StickyDeviceError: the device is lost.
        """
        ...

    def capture(self, key: GraphKey, pool: Any) -> tuple[Any, CaptureReport]:
        """Capture one graph; (handle, what it cost).

        Raises:
            CaptureError: the device refused; what it took is freed.
            StickyDeviceError: the device is lost.
        """
        ...

    def replay(self, handle: Any, rows: StepInputs, launch: Launch) -> PartOutputs:
        """Pad and stage the rows, replay, unpad; as many times as `launch.repeat` says, also without decode rows.

        Raises:
            RegistryError: the graph has fewer tokens or rows than the launch.
            GraphReplayError: nothing was launched.
            StickyDeviceError: the device is lost.
        """
        ...

    def eager(self, rows: StepInputs, launch: Launch) -> PartOutputs:
        """Run the rows with no graph, padded to `launch.padded_tokens` where that is given."""
        ...

    def ready(self, decision: Decision, numbers: BatchNumbers) -> Sequence[ReadyEvent]:
        """When each launch of the step that was just launched is ready, in launch order."""
        ...

    def release(self, pool: Any) -> None:
        """Give a pool and all its graphs back."""
        ...


@runtime_checkable
class AsyncLauncher(Launcher, Protocol):
    """A launcher whose launches run behind the host: `GraphLauncher`."""

    late_failure: Callable[[GraphKey], None]
    """Called with the key of a graph that failed behind the host, on any thread"""

    def start(self, decision: Decision) -> None:
        """A step begins; how its launches share the device is known from the decision."""
        ...

    def eager_as(self, key: GraphKey, rows: StepInputs, which: Rows = Rows.ALL, *, repeat: int = 1) -> PartOutputs:
        """Run rows eagerly at exactly the shape of a replay of that key, for comparing bit for bit."""
        ...

    def close(self) -> None:
        """Give back what isn't a pool's."""
        ...


@attrs.define
class _Pool:
    """One pool: its name in the registry, the device's own object, and what its buffers hold."""

    name: str
    memory: Any
    largest: GraphKey

    def holds(self, key: GraphKey) -> bool:
        largest = self.largest
        return (
            key.part is largest.part
            and key.num_tokens <= largest.num_tokens
            and (key.num_reqs or 0) <= (largest.num_reqs or 0)
            and key.lora_case <= largest.lora_case
        )


MOST_PREPARED = 4096
"""Decisions that are kept prepared; policies prepare theirs, so there are as many as they have sizes and ways"""
_NO_LAST: tuple[Decision | None, Callable[[StepInputs], StepOutputs] | None] = (None, None)
_TAKEN: WeakKeyDictionary[GraphRegistry, set[str]] = WeakKeyDictionary()
_TAKING = Lock()
# Names that executors took in each registry: an executor that has captured nothing yet isn't in the registry's pools.


def _take_name(name: str, registry: GraphRegistry) -> str:
    """The first of name, name-2, name-3 ... that no other executor's pools have in the registry."""
    with _TAKING:
        taken = _TAKEN.setdefault(registry, set())
        free = _free(name, "-", taken | {pool.name.partition("/")[0] for pool in registry.pools()})
        taken.add(free)
        return free


def _free(name: str, mark: str, held: Collection[str]) -> str:
    """The first of name, name-2, name-3 ..., with that mark, that isn't held."""
    free, count = name, 1
    while free in held:
        count += 1
        free = f"{name}{mark}{count}"
    return free


class ModeRunner:
    """Runs decisions on any device that has a launcher.

    Args:
        launcher: the device.
        name: the executor's name, the launcher's by default.

    Attributes:
        capture_errors: why keys couldn't be captured, in words; the registry has the reason alone.
    """

    def __init__(self, launcher: Launcher, name: str | None = None) -> None:
        self.launcher = launcher
        self._name = name or launcher.name
        self._pool_name = self._name
        self._registry: GraphRegistry | None = None
        self._pools: list[_Pool] = []
        self._handles: dict[GraphKey, Any] = {}
        self._prepared: dict[int, Callable[[StepInputs], StepOutputs]] = {}
        """By identity, which needs no hash; what runs a decision keeps it"""
        self._last = _NO_LAST
        """The one that ran last, which the next step mostly runs too"""
        self._expected: tuple[GraphKey, ...] = ()
        self.capture_errors: dict[GraphKey, str] = {}
        self._async = launcher if isinstance(launcher, AsyncLauncher) else None
        if self._async is not None:
            self._async.late_failure = _withdrawing(ref(self))

    @property
    def name(self) -> str:
        return self._name

    @property
    def device_name(self) -> str:
        """What the device calls itself; empty where its adapter doesn't say."""
        name: str = getattr(getattr(self.launcher, "adapter", None), "device_name", "")
        return name

    @property
    def registry(self) -> GraphRegistry:
        """The registry it was opened with; one of its own where it wasn't."""
        registry = self._registry
        if registry is None:
            registry = GraphRegistry()
            self.open(registry)
        return registry

    @property
    def runs_behind(self) -> bool:
        """Whether a step is surely not over when `run` returns: the device runs it behind the host."""
        adapter = getattr(self.launcher, "adapter", None)
        return adapter is not None and not adapter.host_runs

    @property
    def spreads(self) -> bool:
        """Whether decode steps wait for their place beside a prompt where a decision says so."""
        # Optional for a launcher: the simulated one does as it is told.
        return bool(getattr(self.launcher, "spreads", True))

    @property
    def captured(self) -> frozenset[GraphKey]:
        """The keys that this executor has graphs of, withdrawn ones included."""
        return frozenset(self._handles)

    def open(self, registry: GraphRegistry) -> None:
        """Take the registry that all graphs are recorded in, and names for pools that nobody has there.

        Raises:
            RegistryError: it was opened with another registry.
        """
        if registry is self._registry:
            return
        if self._registry is not None:
            raise RegistryError(
                f"executor {self._name!r} is open with another registry, which has its graphs. Give both Engines the "
                "same registry, or make an executor for each."
            )
        self._pool_name = _take_name(self._name, registry)
        self._registry = registry

    def expect(self, keys: Iterable[GraphKey]) -> None:
        """Make pools from now on large enough for these keys too: those that may be captured later, in any order."""
        self._expected = tuple(keys)

    def capture(
        self, keys: Iterable[GraphKey], progress: Callable[[GraphKey, CaptureReport | None], None] | None = None
    ) -> None:
        """Capture keys, largest first, so that smaller graphs reuse the pool's memory.

        Failed and withdrawn keys are planned anew first, so after a release everything can be had again.

        Device memory that captures warmed up with goes back at the end. Not after a single one of the keys to `expect`:
        who captures them one by one, between steps, calls `trim` when there are no more for now.

        Raises:
            RegistryError: a key is captured already.
            StickyDeviceError: the device is lost.
        """
        wanted = list(keys)
        self._capture_until(wanted, progress)
        self._end_capture(len(wanted))

    def _end_capture(self, num_keys: int) -> None:
        if num_keys > 1 or (num_keys and not self._expected):
            self.trim()

    def trim(self) -> None:
        """Give the device what captures warmed up with and nobody uses, where the launcher can."""
        # Optional for a launcher.
        give: Callable[[], None] = getattr(self.launcher, "trim", _nothing)
        give()

    def _capture_until(
        self, keys: Iterable[GraphKey], progress: Callable[[GraphKey, CaptureReport | None], None] | None,
        ends: Callable[[GraphKey], bool] | None = None,
    ) -> GraphKey | None:  # fmt: skip
        """Capture keys, largest first, up to the first that `ends` it, of which progress isn't told; that key."""
        left = sorted(keys, key=lambda key: (key.part.value, -key.num_tokens, -key.lora_case))
        self.registry.plan(left)
        for i, key in enumerate(left):
            report = self._capture_one(key, left[i:])
            if ends is not None and ends(key):
                return key
            if progress is not None:
                progress(key, report)
        return None

    def _capture_one(self, key: GraphKey, left: Sequence[GraphKey]) -> CaptureReport | None:
        registry, estimate = self.registry, self.launcher.estimate(key)
        try:
            registry.admit(key, **estimate._asdict())
        except BudgetRefused as refused:
            registry.withdraw(key, _reason(refused))
            self.capture_errors[key] = str(refused)
            return None
        try:
            pool = self._pool(key, left)
            handle, report = self.launcher.capture(key, pool.memory)
        except CaptureError as error:
            registry.fail(key, _reason(error), seconds=error.seconds)
            self.capture_errors[key] = str(error)
            return None
        except StickyDeviceError as error:
            registry.fail(key, Reason.DEVICE_LOST)
            self.capture_errors[key] = str(error)
            raise
        try:
            registry.capture(key, **report._asdict(), pool=pool.name, handle=handle)
        except BudgetRefused as refused:
            self.capture_errors[key] = str(refused)
            if not any(each.pool == pool.name and each.state is GraphState.CAPTURED for each in registry.records()):
                # It would be held for graphs that nobody replays, and smaller ones would come beyond the budget.
                self._release_pool(pool)
            else:
                # Optional for a launcher: one whose pools take nothing later has nothing to count anew.
                refuse: Callable[[Any, CaptureReport, Any], None] = getattr(self.launcher, "refused", _unheard)
                refuse(handle, report, pool.memory)
            return None
        self.capture_errors.pop(key, None)
        self._handles[key] = handle
        self.forget_prepared()
        return report

    def _pool(self, key: GraphKey, left: Sequence[GraphKey]) -> _Pool:
        """The first pool that holds the graph; otherwise a new one, for the keys that are left.

        Raises:
            CaptureError: the device refused a new one.
        """
        for pool in self._pools:
            if pool.holds(key):
                return pool
        largest = _largest([other for other in (*left, *self._expected) if other.part is key.part])
        memory = self.launcher.new_pool(key.part, largest)
        # A pool may go alone, so how many there are names none.
        name = _free(f"{self._pool_name}/{key.part.value}", "/", {pool.name for pool in self._pools})
        self._pools.append(_Pool(name, memory, largest))
        return self._pools[-1]

    def run(self, decision: Decision, inputs: StepInputs) -> StepOutputs:
        """Run one step as decided.

        A later launch whose graph fails runs eagerly in place, because the launches before it have run, and at the
        graph's size, because other ranks replay that size. The graph is withdrawn and the decision that comes back
        says so.

        Raises:
            RegistryError: the decision names a graph that this executor hasn't captured, or one with fewer tokens or
                rows than its launch.
            GraphReplayError: the first launch's graph failed before anything was launched.
            StickyDeviceError: the device is lost.
        """
        last, prepared = self._last
        if prepared is None or last is not decision:
            prepared = self._prepared.get(id(decision))
            if prepared is None:
                return self._run(decision, inputs)
            self._last = decision, prepared
        return prepared(inputs)

    def _run(self, decision: Decision, inputs: StepInputs) -> StepOutputs:
        launches, launcher = decision.launches, self.launcher
        if self._async is not None:
            self._async.start(decision)
        if len(launches) == 1 and launches[0].rows is Rows.ALL:
            launch = launches[0]
            handle = self._handles.get(launch.key)  # type: ignore[arg-type]
            if handle is not None and self._async is not None and self._prepare(handle, decision):
                return self.run(decision, inputs)
            if handle is not None:
                part = launcher.replay(handle, inputs, launch)
            else:
                part = launcher.eager(inputs, launch) if launch.key is None else self._replay(launch, inputs)
            ready = launcher.ready(decision, inputs.numbers)
            return new_outputs((part.outputs, part.tokens, decision, ready, part.first_tokens))
        return self._run_split(decision, inputs)

    def look(self) -> bool:
        """Withdraw every graph where weights or KV moved: all read them. For between steps, seldom.

        Returns:
            Whether graphs were withdrawn.
        """
        moved: Callable[[], GraphReplayError | None] = getattr(self.launcher, "moved", _nothing)
        found = moved()
        if found is None:
            return False
        withdrawn = [key for key in self._handles if self.registry.withdraw(key, found.reason)]
        self.capture_errors |= dict.fromkeys(withdrawn, str(found))
        return bool(withdrawn)

    def forget_prepared(self) -> None:
        """Prepare decisions anew: graphs or the launcher are other ones."""
        self._prepared.clear()
        self._last = _NO_LAST

    def _prepare(self, handle: Any, decision: Decision) -> bool:
        """Prepare a decision where the launcher can."""
        # Optional for a launcher: `run` for a decision and the one graph that it replays. Its own, not that of another
        # which it hands calls on to.
        prepared: Callable[[Any, Any, Decision], Any] | None = getattr(type(self.launcher), "prepared", None)
        step = None if prepared is None else prepared(self.launcher, handle, decision)
        if step is None:
            return False
        if len(self._prepared) >= MOST_PREPARED:
            self.forget_prepared()
        self._prepared[id(decision)] = step.run
        return True

    def _replay(self, launch: Launch, rows: StepInputs) -> PartOutputs:
        """Replay a launch's graph.

        Raises:
            RegistryError: this executor has no such graph.
        """
        handle = self._handles.get(launch.key)  # type: ignore[arg-type]
        if handle is None:
            raise RegistryError(f"{launch.key} isn't captured by executor {self._name!r}; capture it first.")
        return self.launcher.replay(handle, rows, launch)

    def _run_split(self, decision: Decision, inputs: StepInputs) -> StepOutputs:
        """`run` for several launches, or for part of the rows."""
        ran, parts = decision, []
        for i, launch in enumerate(decision.launches):
            rows = inputs if launch.rows is Rows.ALL else part_of(inputs, launch.rows)
            if launch.key is None:
                parts.append(self.launcher.eager(rows, launch))
                continue
            try:
                parts.append(self._replay(launch, rows))
            except GraphReplayError as failure:
                if i == 0:
                    raise
                if not failure.maybe_inputs:
                    self.registry.withdraw(launch.key, failure.reason)
                ran = without_graph(ran, i, failure.reason)
                parts.append(self.launcher.eager(rows, ran.launches[i]))
                self.registry.withdraw(launch.key, failure.reason)
        ready = self.launcher.ready(ran, inputs.numbers)
        outputs = joined([part.outputs for part in parts])
        first_tokens = joined([part.first_tokens for part in parts])
        result = StepOutputs(outputs, parts[0].tokens if parts else (), ran, ready, first_tokens)
        if any(part.runs_behind for part in parts):
            return LateOutputs.of(result, parts)
        return result

    def release(self) -> None:
        """Give back every pool; the registry forgets their graphs generation by generation."""
        self._release_pools()
        if self._async is not None:
            self._async.close()

    def _release_pools(self) -> None:
        """Every pool with its graphs; the eager launches' buffers stay."""
        for pool in self._pools[:]:
            self._release_pool(pool)

    def _release_pool(self, pool: _Pool) -> None:
        gone = [key for key in self._handles if self.registry.record(key).pool == pool.name]
        self.registry.evict_generation(pool.name)
        self.launcher.release(pool.memory)
        self._pools.remove(pool)
        for key in gone:
            del self._handles[key]
        self.forget_prepared()


def _nothing() -> None:
    """A launcher that doesn't look."""


def _unheard(handle: Any, report: CaptureReport, pool: Any) -> None:
    """A launcher whose graphs pay for themselves alone."""
    del handle, report, pool


def _withdrawing(runner: ref[ModeRunner]) -> Callable[[GraphKey], None]:
    """Withdraws a graph that failed behind the host. A weak reference: its launcher doesn't keep a runner alive."""

    def withdraw(key: GraphKey) -> None:
        alive = runner()
        if alive is not None:
            alive.registry.withdraw(key, Reason.REPLAY_FAILED)

    return withdraw


def _largest(keys: Sequence[GraphKey]) -> GraphKey:
    """A key with the most tokens, rows and LoRAs of these keys, which may be different keys."""
    rows = max(key.num_reqs or 0 for key in keys)
    tokens = max(key.num_tokens for key in keys)
    return GraphKey(keys[0].part, tokens, rows or None, lora_case=max(key.lora_case for key in keys))


def _reason(error: BudgetRefused | CaptureError) -> Reason:
    return error.reason if isinstance(error.reason, Reason) else Reason.CAPTURE_FAILED
