"""The registry of captured graphs: states, accounting, views, snapshots, threads."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from threading import Barrier, Thread
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kpolicy.budgets import Budget, Usage
from kpolicy.errors import BudgetRefused, ConfigError, RegistryError, SchemaError
from kpolicy.keys import GraphKey
from kpolicy.modes import Part
from kpolicy.reasons import Reason
from kpolicy.registry import GraphRegistry, GraphState

KEYS = (
    *(GraphKey(Part.FULL, size, size, query_len=1) for size in (1, 2, 4)),
    GraphKey(Part.FULL, 8, 8, max_query_len=4),
    GraphKey(Part.PIECEWISE, 8, lora_case=2),
    GraphKey(Part.PIECEWISE, 8, stage="draft"),
)
A, B, C = KEYS[:3]


def planned(*keys: GraphKey, **limits: Any) -> GraphRegistry:
    registry = GraphRegistry(Budget(**limits))
    registry.plan(keys)
    return registry


def captured(*keys: GraphKey, **limits: Any) -> GraphRegistry:
    registry = planned(*keys, **limits)
    for key in keys:
        registry.capture(key, bytes=10, seconds=1.0, handle=f"graph {key}")
    return registry


def test_a_key_goes_from_planned_to_captured_to_withdrawn() -> None:
    """Each state shows in the record, with what the graph cost and why it was withdrawn."""
    registry = planned(A)
    assert registry.record(A).state is GraphState.PLANNED
    registry.capture(A, bytes=10, seconds=0.5, streams=3, pool="decode", handle="graph")
    found = registry.record(A)
    assert (found.state, found.pool, found.usage) == (GraphState.CAPTURED, "decode", Usage(1, 3, 10, 0.5))
    assert found.handle == "graph"
    assert registry.withdraw(A, Reason.REPLAY_FAILED)
    found = registry.record(A)
    assert (found.state, found.reason, found.handle) == (GraphState.WITHDRAWN, Reason.REPLAY_FAILED, None)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda registry: registry.capture(A, bytes=1, seconds=0.1), "it is captured. Withdraw it or evict its pool"),
        (lambda registry: registry.withdraw(A, "replay_failed"), "reason is 'replay_failed'; it is a member of Reason"),
        (lambda registry: registry.fail(B, None), "reason is None; it is a member of Reason"),
        (lambda registry: registry.hit(A, -3), "-3 replays of .* can't be counted"),
        (lambda registry: registry.view("main"), r"stages is 'main'; .* Give \('main',\)"),
    ],
)
def test_a_wrong_call_is_named_and_changes_nothing(wrong: Any, said: str) -> None:
    """A captured key isn't to be planned, a reason is no text, hits aren't taken back, and a name isn't its letters."""
    registry = captured(A)
    registry.plan([B])
    before = registry.snapshot()
    with pytest.raises(RegistryError, match=said):
        wrong(registry)
    assert registry.snapshot() == before


def test_planning_keeps_what_stands_and_renews_what_was_lost() -> None:
    """Planning again changes nothing for planned and captured keys; failed and withdrawn ones become planned."""
    registry = captured(A)
    registry.plan([B, C])
    registry.fail(B, Reason.CAPTURE_FAILED, seconds=2.0)
    registry.withdraw(C, Reason.CAPTURE_FAILED)
    registry.plan([A, B, C])
    assert [registry.record(key).state.value for key in (A, B, C)] == ["captured", "planned", "planned"]
    assert registry.record(B).reason is None
    assert registry.totals().held.seconds == 3.0
    version = registry.version
    registry.plan([A, B, C])
    assert registry.version == version


def test_capturing_what_is_not_planned_is_an_error() -> None:
    """A key that is unknown, captured already or failed can't be captured, and the error says how it stands."""
    registry = captured(A)
    registry.plan([B])
    registry.fail(B, Reason.CAPTURE_OUT_OF_MEMORY)
    for key, said in ((A, "it is captured"), (B, "it is failed .the device ran out"), (C, "isn't among the 2 keys")):
        for enter in (registry.admit, registry.capture):
            with pytest.raises(RegistryError, match=said):
                enter(key, bytes=1, seconds=1.0)
    with pytest.raises(RegistryError, match="can't be failed"):
        registry.fail(A, Reason.CAPTURE_FAILED)
    with pytest.raises(RegistryError, match="can't be withdrawn"):
        registry.withdraw(C, Reason.REPLAY_FAILED)
    with pytest.raises(RegistryError, match="can't be looked up"):
        registry.record(C)


LIMITS = [
    ({"graphs": 1}, Reason.BUDGET_GRAPHS),
    ({"streams": 3}, Reason.BUDGET_STREAMS),
    ({"bytes": 15}, Reason.BUDGET_BYTES),
    ({"seconds": 1.5}, Reason.BUDGET_SECONDS),
]


@pytest.mark.parametrize(("limits", "reason"), LIMITS)
def test_every_budget_refuses_before_and_at_a_capture(limits: dict[str, float], reason: Reason) -> None:
    """`admit` refuses without a change; `capture` refuses, withdraws the key and counts the time it took."""
    registry = planned(A, B, **limits)
    registry.capture(A, bytes=10, seconds=1.0, streams=2)
    version = registry.version
    with pytest.raises(BudgetRefused, match="budgeted are used") as before:
        registry.admit(B, bytes=10, seconds=1.0, streams=2)
    assert before.value.reason is reason
    assert (registry.record(B).state, registry.version) == (GraphState.PLANNED, version)
    with pytest.raises(BudgetRefused) as at:
        registry.capture(B, bytes=10, seconds=1.0, streams=2, handle="over")
    assert at.value.reason is reason
    assert (registry.record(B).state, registry.record(B).reason) == (GraphState.WITHDRAWN, reason)
    assert registry.captured() == (A,)
    assert registry.totals().live == Usage(1, 2, 10, 1.0)
    assert registry.totals().held.seconds == 2.0
    assert registry.evict_generation() == ("over",)


def test_a_withdrawn_graph_holds_its_memory_until_its_generation_goes() -> None:
    """Withdrawing frees nothing: the budget counts what is held, until the pool's generation is evicted."""
    registry = captured(A, B, bytes=25)
    registry.withdraw(A, Reason.REPLAY_FAILED)
    assert (registry.totals().bytes_live, registry.totals().bytes_held) == (10, 20)
    registry.plan([A])
    with pytest.raises(BudgetRefused):
        registry.admit(A, bytes=10)
    assert registry.evict_generation() == (f"graph {A}", f"graph {B}")
    assert (registry.totals().bytes_live, registry.totals().bytes_held) == (0, 0)
    assert [registry.record(key).state for key in (A, B)] == [GraphState.PLANNED] * 2
    registry.capture(A, bytes=25, seconds=1.0)
    assert registry.record(A).generation == 1


def test_eviction_touches_one_pool_only() -> None:
    """The graphs of another pool stay; evicting a pool that holds nothing changes nothing."""
    registry = planned(A, B)
    registry.capture(A, bytes=10, seconds=1.0, pool="decode", handle="a")
    registry.capture(B, bytes=5, seconds=1.0, pool="pieces", handle="b")
    assert registry.evict_generation("decode", withdraw=True) == ("a",)
    assert (registry.record(A).state, registry.record(A).reason) == (
        GraphState.WITHDRAWN,
        Reason.GENERATION_EVICTED,
    )
    assert registry.captured() == (B,)
    assert [(pool.name, pool.generation, pool.held.bytes) for pool in registry.pools()] == [
        ("decode", 1, 0),
        ("pieces", 0, 5),
    ]
    version = registry.version
    assert registry.evict_generation("decode") == ()
    assert registry.evict_generation("nobody's") == ()
    assert registry.version == version


def test_withdrawing_twice_keeps_the_first_reason() -> None:
    """Of two threads that see one replay fail, the second changes nothing."""
    registry = captured(A)
    assert registry.withdraw(A, Reason.REPLAY_FAILED)
    version = registry.version
    assert not registry.withdraw(A, Reason.GENERATION_EVICTED)
    assert (registry.record(A).reason, registry.version) == (Reason.REPLAY_FAILED, version)


def test_hits_are_counted_and_unused_graphs_listed() -> None:
    """Hits add up, also those that come after a withdrawal; a key that was never captured can't be hit."""
    registry = captured(A, B)
    registry.plan([C])
    registry.hit(A)
    registry.hit(A, 4)
    assert registry.unused() == (B,)
    registry.withdraw(A, Reason.REPLAY_FAILED)
    for _ in range(3000):
        registry.hit(A)
    assert registry.record(A).hits == 3005
    for key, said in ((C, "it is planned"), (KEYS[3], "isn't among")):
        with pytest.raises(RegistryError, match=said):
            registry.hit(key)


def test_a_view_holds_captured_keys_and_says_what_was_lost() -> None:
    """Failed and withdrawn keys are never in a view, only in its list of those; planned ones only where assumed."""
    registry = captured(A, B)
    registry.plan([C, KEYS[3], KEYS[4]])
    registry.withdraw(B, Reason.REPLAY_FAILED)
    registry.fail(C, Reason.CAPTURE_FAILED)
    view = registry.view()
    assert (view.keys, set(view.withdrawn), view.assumed) == ((A,), {B, C}, False)
    assumed = registry.view(assumed=True)
    assert (set(assumed.keys), assumed.assumed) == ({A, KEYS[3], KEYS[4]}, True)


def test_a_view_shows_the_stages_asked_for_only() -> None:
    """Keys of other stages are neither in a view nor among its withdrawn keys."""
    draft = KEYS[5]
    registry = captured(A, draft)
    assert registry.view().keys == (A,)
    registry.withdraw(draft, Reason.REPLAY_FAILED)
    assert registry.view().withdrawn == ()
    assert registry.view(("draft",)).withdrawn == (draft,)


def test_a_view_is_kept_until_something_changes() -> None:
    """The same view object is given out, stamped with the version, until a change; hits are none."""
    registry = captured(A, B)
    view = registry.view()
    registry.hit(A)
    assert registry.view() is view
    registry.withdraw(B, Reason.REPLAY_FAILED)
    assert registry.view() is not view
    assert view.version < registry.view().version == registry.version


def test_subscribers_are_told_outside_the_lock() -> None:
    """Each change calls back once with the new version; the callback may ask the registry; it can be ended."""
    registry = GraphRegistry()
    seen: list[tuple[int, int]] = []
    end = registry.subscribe(lambda version: seen.append((version, len(registry.view(assumed=True)))))
    registry.plan([A, B])
    registry.capture(A, bytes=1, seconds=1.0)
    registry.hit(A)
    registry.withdraw(B, Reason.CAPTURE_FAILED)
    assert seen == [(1, 2), (2, 2), (3, 1)]
    end()
    registry.evict_generation()
    assert len(seen) == 3


def test_a_refused_capture_is_told_too() -> None:
    """A capture that the budget refuses withdraws its key, so subscribers hear of it."""
    registry = planned(A, bytes=1)
    seen: list[int] = []
    registry.subscribe(seen.append)
    with pytest.raises(BudgetRefused):
        registry.capture(A, bytes=2, seconds=1.0)
    assert seen == [registry.version]


@pytest.mark.parametrize("cost", [{"bytes": -1}, {"streams": 0.5}, {"seconds": float("nan")}, {"graphs": -2}])
def test_impossible_costs_change_nothing(cost: dict[str, Any]) -> None:
    """A cost that can't be is an error, and the key stays planned."""
    registry = planned(A)
    with pytest.raises(ConfigError, match=next(iter(cost))):
        registry.capture(A, **{"bytes": 1, "seconds": 1.0, **cost})
    assert registry.record(A).state is GraphState.PLANNED


def test_a_restored_registry_plans_what_was_captured() -> None:
    """Without handles captured keys are planned and nothing is held; failures, reasons and hits stay."""
    registry = captured(A, B)
    registry.hit(A, 7)
    registry.withdraw(B, Reason.REPLAY_FAILED)
    restored = GraphRegistry.restore(json.loads(json.dumps(registry.snapshot())))
    assert restored.record(A).state is GraphState.PLANNED
    assert restored.record(A).hits == 7
    assert restored.record(B).reason is Reason.REPLAY_FAILED
    assert restored.totals().held == Usage()
    assert restored.version > registry.version
    restored.capture(A, bytes=1, seconds=1.0)


def damaged(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """A good snapshot with one field replaced, or taken out where the value is `...`."""
    snapshot: dict[str, Any] = json.loads(json.dumps(captured(A, bytes=100).snapshot()))
    place: Any = snapshot
    for step in path[:-1]:
        place = place[step]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return snapshot


DAMAGE = [
    (("schema",), "kpolicy/profile", "snapshot.schema is 'kpolicy/profile'"),
    (("version",), [2, 0], "reads 1.x: upgrade"),
    (("version",), "1.0", "snapshot.version is '1.0'"),
    (("budget", "bytes"), -5, "snapshot.budget can't be used"),
    (("records",), {}, "snapshot.records is {}"),
    (("records", 0), 7, r"snapshot.records\[0\] is 7"),
    (("records", 0, "state"), "lost", r"records\[0\].state is 'lost'; it must be one of planned"),
    (("records", 0, "state"), ..., r"records\[0\].state is missing"),
    (("records", 0, "bytes"), 1.5, r"records\[0\].bytes is 1.5; it must be a whole number"),
    (("records", 0, "hits"), True, r"records\[0\].hits is True"),
    (("records", 0, "seconds"), float("inf"), r"records\[0\].seconds"),
    (("records", 0, "reason"), "whim", r"records\[0\].reason is 'whim'"),
    (("records", 0, "generation"), 4, "pool or generation that the snapshot doesn't list"),
    (("records", 0, "key", "num_tokens"), 0, r"records\[0\].key can't be used"),
    (("records", 0, "key", "part"), "half", r"records\[0\].key.part is 'half'"),
    (("pools", 0, "held"), None, r"pools\[0\].held is None"),
]


@pytest.mark.parametrize(("path", "value", "said"), DAMAGE)
def test_a_damaged_snapshot_names_the_field(path: tuple[Any, ...], value: Any, said: str) -> None:
    """Whatever is wrong with a snapshot is a SchemaError with the field's path and value."""
    with pytest.raises(SchemaError, match=said):
        GraphRegistry.restore(damaged(path, value), keep=True)


def test_a_snapshot_of_a_higher_minor_version_reads() -> None:
    """Fields that this kpolicy doesn't know are ignored."""
    snapshot = damaged(("version",), [1, 9]) | {"news": 1}
    snapshot["records"][0]["news"] = 1
    snapshot["budget"]["news"] = 1
    assert GraphRegistry.restore(snapshot, keep=True).captured() == (A,)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@settings(deadline=None)
@given(st.data())
def test_no_change_to_a_snapshot_raises_anything_else(data: st.DataObject) -> None:
    """With any one value of a snapshot replaced, restoring works or raises SchemaError."""
    snapshot = json.loads(json.dumps(captured(A, B, bytes=100).snapshot()))
    place, step = snapshot, None
    while True:
        steps = list(place) if isinstance(place, dict) else list(range(len(place)))
        step = data.draw(st.sampled_from(steps))
        if not place[step] or not isinstance(place[step], (dict, list)) or data.draw(st.booleans()):
            break
        place = place[step]
    place[step] = data.draw(json_values)
    try:
        restored = GraphRegistry.restore(snapshot, keep=True)
    except SchemaError:
        return
    assert GraphRegistry.restore(restored.snapshot(), keep=True).snapshot() == restored.snapshot()


@settings(max_examples=80, stateful_step_count=40, deadline=None)
class AnySequence(RuleBasedStateMachine):
    """Any sequence of operations, beside a model that keeps every graph in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.budget = Budget(graphs=8, streams=14, bytes=60, seconds=40.0)
        self.registry = GraphRegistry(self.budget)
        self.states: dict[GraphKey, str] = {}
        self.hits: Counter[GraphKey] = Counter()
        self.ever: set[GraphKey] = set()
        self.seconds = 0.0
        self.graphs: list[tuple[GraphKey, str, Usage, int, bool]] = []  # key, pool, cost, handle, admitted
        self.live: dict[GraphKey, int] = {}  # key -> handle
        self.last_version = 0
        self.handle = 0

    def of(self, *states: str) -> list[GraphKey]:
        return [key for key in KEYS if self.states.get(key) in states]

    def held(self) -> Usage:
        total = Usage()
        for _, _, cost, _, _ in self.graphs:
            total += cost
        return Usage(total.graphs, total.streams, total.bytes, self.seconds)

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=4))
    def plan(self, keys: list[GraphKey]) -> None:
        self.registry.plan(keys)
        for key in keys:
            if self.states.get(key) not in ("captured", "planned"):
                self.states[key] = "planned"

    @rule(
        key=st.sampled_from(KEYS),
        size=st.integers(0, 30),
        quarters=st.integers(0, 20),
        streams=st.integers(0, 5),
        graphs=st.integers(1, 3),
        pool=st.sampled_from(["default", "pieces"]),
    )
    def capture(self, key: GraphKey, size: int, quarters: int, streams: int, graphs: int, pool: str) -> None:
        cost = Usage(graphs, streams, size, quarters / 4)
        asked = {"bytes": size, "seconds": quarters / 4, "streams": streams, "graphs": graphs}
        if self.states.get(key) != "planned":
            with pytest.raises(RegistryError):
                self.registry.capture(key, **asked)
            return
        refused = self.budget.refuses(self.held(), cost)
        if refused is None:
            self.registry.admit(key, **asked)
        else:
            with pytest.raises(BudgetRefused) as caught:
                self.registry.admit(key, **asked)
            assert caught.value.reason is refused
        self.handle += 1
        self.graphs.append((key, pool, cost, self.handle, refused is None))
        self.seconds += cost.seconds
        if refused is None:
            self.registry.capture(key, **asked, pool=pool, handle=self.handle)
            self.states[key] = "captured"
            self.live[key] = self.handle
            self.ever.add(key)
        else:
            with pytest.raises(BudgetRefused):
                self.registry.capture(key, **asked, pool=pool, handle=self.handle)
            self.states[key] = "withdrawn"

    @precondition(lambda self: self.of("planned"))
    @rule(data=st.data(), quarters=st.integers(0, 8))
    def fail(self, data: st.DataObject, quarters: int) -> None:
        key = data.draw(st.sampled_from(self.of("planned")))
        self.registry.fail(key, Reason.CAPTURE_FAILED, seconds=quarters / 4)
        self.seconds += quarters / 4
        self.states[key] = "failed"

    @rule(key=st.sampled_from(KEYS))
    def withdraw(self, key: GraphKey) -> None:
        if key not in self.states:
            with pytest.raises(RegistryError):
                self.registry.withdraw(key, Reason.REPLAY_FAILED)
            return
        expected = self.states[key] in ("planned", "captured")
        assert self.registry.withdraw(key, Reason.REPLAY_FAILED) is expected
        if expected:
            self.states[key] = "withdrawn"
            self.live.pop(key, None)

    @rule(pool=st.sampled_from(["default", "pieces"]), withdraw=st.booleans())
    def evict(self, pool: str, withdraw: bool) -> None:
        handles = self.registry.evict_generation(pool, withdraw=withdraw)
        gone = [graph for graph in self.graphs if graph[1] == pool]
        assert list(handles) == [handle for _, _, _, handle, _ in gone]
        self.graphs = [graph for graph in self.graphs if graph[1] != pool]
        for key, _, _, handle, _ in gone:
            if self.live.get(key) == handle:
                del self.live[key]
                self.states[key] = "withdrawn" if withdraw else "planned"

    @rule(key=st.sampled_from(KEYS), times=st.integers(1, 5))
    def hit(self, key: GraphKey, times: int) -> None:
        if key not in self.ever:
            with pytest.raises(RegistryError):
                self.registry.hit(key)
            return
        self.registry.hit(key, times)
        self.hits[key] += times

    @invariant()
    def accounting_adds_up(self) -> None:
        totals = self.registry.totals()
        live = [cost for _, _, cost, handle, _ in self.graphs if handle in self.live.values()]
        for name in ("graphs", "streams", "bytes"):
            assert getattr(totals.live, name) == sum(getattr(cost, name) for cost in live)
        assert totals.held == self.held()
        assert sum(usage.seconds for usage in totals.by_state.values()) == self.seconds
        counted = Counter(self.states.values())
        assert {state.value: number for state, number in totals.keys.items() if number} == dict(counted)

    @invariant()
    def budgets_hold(self) -> None:
        held = Usage()
        for _, _, cost, _, admitted in self.graphs:
            held += cost if admitted else Usage()
        for name in ("graphs", "streams", "bytes"):
            assert getattr(held, name) <= getattr(self.budget, name)

    @invariant()
    def records_and_views_agree(self) -> None:
        assert {record.key: record.state.value for record in self.registry.records()} == self.states
        assert {record.key: record.hits for record in self.registry.records() if record.hits} == dict(self.hits)
        main = {key for key in self.of("captured") if key.stage == "main"}
        assert set(self.registry.view().keys) == main
        assert set(self.registry.captured()) == set(self.of("captured")) == set(self.live)
        assert set(self.registry.unused()) == set(self.of("captured")) - set(self.hits)
        assert all(
            (record.reason is None) == (record.state.value in ("planned", "captured"))
            for record in self.registry.records()
        )
        assert self.registry.version >= self.last_version
        self.last_version = self.registry.version

    @invariant()
    def snapshots_round_trip(self) -> None:
        snapshot = self.registry.snapshot()
        text = json.dumps(snapshot, allow_nan=False)
        assert GraphRegistry.restore(json.loads(text), keep=True).snapshot() == snapshot
        again = GraphRegistry.restore(json.loads(text))
        assert set(again.captured()) == set()
        assert {record.key for record in again.records() if record.state is GraphState.PLANNED} == set(
            self.of("captured", "planned")
        )


TestAnySequence = AnySequence.TestCase


def in_threads(number: int, work: Any) -> None:
    """Run `work(index)` in that many threads from one moment on; the first error is raised here."""
    barrier, errors = Barrier(number), []

    def run(index: int) -> None:
        barrier.wait()
        try:
            work(index)
        except BaseException as error:  # noqa: BLE001 - raised again in the test's own thread
            errors.append(error)

    threads = [Thread(target=run, args=(index,)) for index in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.fixture
def eager_switching() -> Any:
    """Threads that give way as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("eager_switching")
def test_hits_from_many_threads_are_exact() -> None:
    """Eight threads that hit and withdraw while another reads lose no hit, and each key is withdrawn once."""
    keys = [GraphKey(Part.FULL, size, size, query_len=1) for size in range(1, 9)]
    registry = captured(*keys)
    withdrawn: list[GraphKey] = []

    def work(index: int) -> None:
        for number in range(6000):
            registry.hit(keys[number % 8])
            if number % 500 == index:
                registry.records()
            if number == 3000 and registry.withdraw(keys[index // 2], Reason.REPLAY_FAILED):
                withdrawn.append(keys[index // 2])

    in_threads(8, work)
    assert [record.hits for record in registry.records()] == [6000] * 8
    assert sorted(key.num_tokens for key in withdrawn) == [1, 2, 3, 4]
    totals = registry.totals()
    assert (totals.keys[GraphState.CAPTURED], totals.bytes_live, totals.bytes_held) == (4, 40, 80)


def test_a_hit_while_hits_are_summed_is_not_lost() -> None:
    """A hit of another thread that falls between summing the pending hits and dropping them still counts."""
    registry = captured(A)

    class Overtaken(list[int]):
        def __getitem__(self, index: Any) -> Any:
            found = super().__getitem__(index)
            if len(self) == 2:
                registry.hit(A)
            return found

    registry._pending[A] = Overtaken()
    registry.hit(A)
    registry.hit(A)
    assert [registry.record(A).hits, registry.record(A).hits] == [2, 3]


@pytest.mark.usefixtures("eager_switching")
def test_captures_from_many_threads_stay_in_budget() -> None:
    """Eight threads that capture at once never pass the budget, and every refused graph is accounted for."""
    keys = [GraphKey(Part.PIECEWISE, size) for size in range(1, 401)]
    registry = planned(*keys, bytes=1000)
    versions: list[int] = []
    registry.subscribe(versions.append)
    refused: list[GraphKey] = []

    def work(index: int) -> None:
        for key in keys[index::8]:
            try:
                registry.capture(key, bytes=10, seconds=0.25)
            except BudgetRefused:  # noqa: PERF203
                refused.append(key)

    in_threads(8, work)
    totals = registry.totals()
    assert (totals.live.bytes, totals.keys[GraphState.CAPTURED]) == (1000, 100)
    assert (len(refused), totals.held.bytes, totals.held.seconds) == (300, 4000, 100.0)
    assert sorted(versions) == list(range(2, 402))


def test_the_registry_loads_nothing_heavy() -> None:
    """Importing the registry brings in neither cattrs nor numpy nor json."""
    code = "import sys, kpolicy.registry; print([m for m in ('cattrs', 'numpy', 'json', 'torch') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_ending_one_of_two_subscriptions_keeps_the_other() -> None:
    """A callback subscribed twice is still called once after one of the two ends, however often that is ended."""
    registry, seen = GraphRegistry(), []

    def told(version: int) -> None:
        seen.append(version)

    first = registry.subscribe(told)
    second = registry.subscribe(told)
    first()
    first()
    registry.plan([GraphKey(Part.PIECEWISE, 8)])
    assert len(seen) == 1
    second()
    registry.plan([GraphKey(Part.PIECEWISE, 16)])
    assert len(seen) == 1


@pytest.mark.parametrize("keys", [GraphKey(Part.FULL, 8), "full", None, [None], [GraphKey(Part.FULL, 8), "full"]])
def test_only_keys_are_planned(keys: Any) -> None:
    """Anything else stood in the registry until a view was asked for, and that failed for ever."""
    registry = GraphRegistry()
    with pytest.raises(RegistryError, match="was to be planned; give a sequence of GraphKeys"):
        registry.plan(keys)
    assert registry.records() == ()
    assert registry.version == 0


def test_arguments_of_another_kind_are_named_at_once() -> None:
    """Not by the first capture, or by every change from then on."""
    with pytest.raises(RegistryError, match="budget is 5; give a Budget"):
        GraphRegistry(5)  # type: ignore[arg-type]
    with pytest.raises(RegistryError, match="None can't be called"):
        GraphRegistry().subscribe(None)  # type: ignore[arg-type]


def test_a_pool_is_listed_once() -> None:
    """Of two with one name the first's bytes would be held by nobody."""
    snapshot = GraphRegistry().snapshot()
    pool = {"name": "cuda/full", "generation": 0, "held": {}}
    with pytest.raises(SchemaError, match="second record of the pool 'cuda/full'"):
        GraphRegistry.restore({**snapshot, "pools": [pool, pool]})
