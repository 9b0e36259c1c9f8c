"""Events: what is told of graphs and the device, to whom, and when."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest

from kpolicy import Engine
from kpolicy.budgets import Budget
from kpolicy.decision import Decision, Launch
from kpolicy.errors import BudgetRefused, ConfigError
from kpolicy.keys import GraphKey
from kpolicy.modes import Mode, Part, Rows
from kpolicy.observe import events as ev
from kpolicy.reasons import Reason
from kpolicy.registry import GraphRegistry

FULL8, FULL16 = GraphKey(Part.FULL, 8, 8, query_len=1), GraphKey(Part.FULL, 16, 16, query_len=1)
WANTED = Decision(Mode.FULL, (Launch(Rows.ALL, FULL8),), Reason.GRAPH_FITS)
RAN = Decision(Mode.EAGER, (Launch(Rows.ALL, None),), Reason.REPLAY_FAILED)


@attrs.define
class Emitter:
    """Something with events, as an Engine."""

    events: ev.Events


@pytest.fixture
def registry() -> GraphRegistry:
    """A registry with two planned keys, and room for 100 bytes."""
    registry = GraphRegistry(Budget(bytes=100))
    registry.plan([FULL8, FULL16])
    return registry


def told_of(events: ev.Events) -> list[ev.Event]:
    """What the events tell from now on."""
    told: list[ev.Event] = []
    events.subscribe(told.append)
    return told


def test_captures_failures_and_withdrawals_are_told_with_what_they_cost(registry: GraphRegistry) -> None:
    """Each change of a key is one event with its own seconds, bytes and reason."""
    told = told_of(ev.Events(registry))
    registry.fail(FULL16, Reason.CAPTURE_FAILED, seconds=0.25)
    registry.plan([FULL16])
    registry.capture(FULL16, bytes=70, seconds=0.5, pool="p")
    with pytest.raises(BudgetRefused):
        registry.capture(FULL8, bytes=70, seconds=0.5, pool="p")
    registry.withdraw(FULL16, Reason.BACKEND_REFUSED)
    assert told == [
        ev.GraphFailed(key=FULL16, reason=Reason.CAPTURE_FAILED, seconds=0.25),
        ev.GraphCaptured(key=FULL16, pool="p", generation=0, graphs=1, streams=1, bytes=70, seconds=0.5),
        ev.GraphWithdrawn(key=FULL8, reason=Reason.BUDGET_BYTES, held_bytes=70),
        ev.GraphWithdrawn(key=FULL16, reason=Reason.BACKEND_REFUSED, held_bytes=70),
    ]


@pytest.mark.parametrize("withdraw", [False, True])
def test_an_eviction_is_told_with_what_it_frees(registry: GraphRegistry, withdraw: bool) -> None:
    """Evicting a pool is one event, and one more for each key where they are withdrawn by it."""
    registry.capture(FULL8, bytes=10, seconds=0.5, pool="p")
    registry.capture(FULL16, bytes=20, seconds=0.5, pool="p")
    told = told_of(ev.Events(registry))
    registry.evict_generation("p", withdraw=withdraw)
    assert told[0] == ev.GenerationEvicted(pool="p", generation=0, graphs=2, bytes=30)
    gone = [ev.GraphWithdrawn(key=key, reason=Reason.GENERATION_EVICTED, held_bytes=0) for key in (FULL8, FULL16)]
    assert told[1:] == (gone if withdraw else [])


def test_a_graph_captured_again_after_an_eviction_is_told_again(registry: GraphRegistry) -> None:
    """A capture in the next generation is an event of its own, with that generation."""
    registry.capture(FULL8, bytes=10, seconds=0.5, pool="p")
    told = told_of(ev.Events(registry))
    registry.evict_generation("p")
    registry.capture(FULL8, bytes=10, seconds=0.25, pool="p")
    assert isinstance(told[-1], ev.GraphCaptured)
    assert (told[-1].generation, told[-1].seconds) == (1, 0.25)


def test_a_graph_that_fails_in_a_step_is_told_when_the_step_is_over(registry: GraphRegistry) -> None:
    """Its withdrawal waits for the Engine's word, because nothing is logged before a step's last launch."""
    registry.capture(FULL8, bytes=10, seconds=0.5)
    events = ev.Events(registry)
    told = told_of(events)
    registry.withdraw(FULL8, Reason.REPLAY_FAILED)
    assert told == []
    events.replay_failed(WANTED, RAN)
    assert told == [
        ev.GraphWithdrawn(key=FULL8, reason=Reason.REPLAY_FAILED, held_bytes=10),
        ev.ReplayFailed(keys=(FULL8,), mode="full", ran="eager"),
    ]


def test_what_the_engine_sees_is_told(registry: GraphRegistry) -> None:
    """The end of a capture carries the registry's sums, a lost device its error."""
    events = ev.Events(registry)
    told = told_of(events)
    registry.capture(FULL8, bytes=10, seconds=0.5)
    registry.fail(FULL16, Reason.CAPTURE_OUT_OF_MEMORY, seconds=1.0)
    events.capture_finished()
    events.device_lost(RuntimeError("gone"))
    assert told[-2:] == [
        ev.CaptureFinished(captured=1, not_captured=1, held_bytes=10, seconds=1.5),
        ev.DeviceLost(error="gone"),
    ]


def test_downgrades_are_told_to_every_hook_at_once(registry: GraphRegistry) -> None:
    """A policy was downgraded before anyone could listen, so each hook hears of it when it subscribes."""
    engine = Engine("full", attention="mla")
    assert engine.downgrades
    events = ev.Events(registry, "full", engine.downgrades)
    for _ in range(2):
        told = told_of(events)
        assert [event.name for event in told] == ["kpolicy.policy_downgraded"] * len(engine.downgrades)
        first = told[0]
        assert isinstance(first, ev.PolicyDowngraded)
        assert (first.policy, first.reason) == ("full", engine.downgrades[0].reason)


def test_nothing_is_watched_before_the_first_hook_and_after_the_last(registry: GraphRegistry) -> None:
    """Without hooks the registry has no subscription; each unsubscribe ends its own hook only."""
    events = ev.Events(registry)
    assert registry._callbacks == ()
    told: list[ev.Event] = []
    first, second = events.subscribe(told.append), events.subscribe(told.append)
    assert len(registry._callbacks) == 1
    first()
    first()
    registry.capture(FULL8, bytes=1, seconds=0)
    assert len(told) == 1
    second()
    registry.capture(FULL16, bytes=1, seconds=0)
    assert (len(told), registry._callbacks) == (1, ())


def test_a_hook_that_raises_harms_nobody(registry: GraphRegistry, caplog: pytest.LogCaptureFixture) -> None:
    """The change stands, other hooks are told, and the failure is logged."""
    events = ev.Events(registry)

    def broken(event: ev.Event) -> None:
        raise ValueError("no space")

    events.subscribe(broken)
    told = told_of(events)
    registry.capture(FULL8, bytes=1, seconds=0)
    assert registry.captured() == (FULL8,)
    assert len(told) == 1
    assert "kpolicy.graph_captured" in caplog.text
    assert "no space" in caplog.text


def every_event() -> list[ev.Event]:
    return [
        ev.GraphCaptured(key=FULL8, pool="p", generation=0, graphs=1, streams=1, bytes=2, seconds=0.5),
        ev.GraphFailed(key=FULL8, reason=Reason.CAPTURE_FAILED, seconds=0.25),
        ev.GraphWithdrawn(key=FULL8, reason=Reason.REPLAY_FAILED, held_bytes=1),
        ev.GenerationEvicted(pool="p", generation=0, graphs=2, bytes=30),
        ev.CaptureFinished(captured=1, not_captured=1, held_bytes=10, seconds=1.5),
        ev.ReplayFailed(keys=(FULL8, FULL16), mode="full", ran="eager"),
        ev.DeviceLost(error="gone"),
        ev.PolicyDowngraded(policy="full", batches="b", asked="a", resolved="r", reason=Reason.SUPPORT_NONE),
    ]


@pytest.mark.parametrize("event", every_event(), ids=lambda event: event.name)
def test_fields_are_plain_values(event: ev.Event) -> None:
    """Every event's fields are JSON values: keys are text, reasons their values."""
    values = ev.fields(event)
    assert json.loads(json.dumps(values)) == values
    assert set(values) == {field.name for field in attrs.fields(type(event))}
    if "key" in values:
        assert values["key"] == str(FULL8)


def test_every_event_is_documented() -> None:
    """docs/observe.md has a row for each event and none for others."""
    text = (Path(__file__).parent.parent.parent / "docs" / "observe.md").read_text()
    rows = {line.split("`")[1] for line in text.splitlines() if line.startswith("| `kpolicy.")}
    assert rows == {event.name for event in every_event()}


def test_structlog_gets_the_event_and_its_fields(registry: GraphRegistry) -> None:
    """With structlog the event's name is the event, and fields are key-value pairs at the event's level."""
    testing = pytest.importorskip("structlog.testing")
    events = ev.Events(registry)
    with testing.capture_logs() as logs:
        ev.log_events(Emitter(events))
        registry.capture(FULL8, bytes=3, seconds=0.5, pool="p")
        events.device_lost(RuntimeError("gone"))
    assert logs == [
        {"event": "kpolicy.graph_captured", "log_level": "info", "key": str(FULL8), "pool": "p", "generation": 0,
         "graphs": 1, "streams": 1, "bytes": 3, "seconds": 0.5},
        {"event": "kpolicy.device_lost", "log_level": "error", "error": "gone"},
    ]  # fmt: skip


@pytest.mark.parametrize("given", [False, True])
def test_standard_logging_gets_the_event_and_its_fields(
    registry: GraphRegistry, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, given: bool
) -> None:
    """Without structlog, or where a standard logger is given, records carry the name, the text and the fields."""
    if not given:
        monkeypatch.setitem(sys.modules, "structlog", None)
    events = ev.Events(registry)
    caplog.set_level(logging.INFO)
    stop = ev.log_events(Emitter(events), logging.getLogger("mine") if given else None)
    registry.fail(FULL8, Reason.CAPTURE_FAILED, seconds=0.5)
    stop()
    registry.fail(FULL16, Reason.CAPTURE_FAILED, seconds=0.5)
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("mine" if given else "kpolicy", logging.WARNING)
    assert record.getMessage() == (f"kpolicy.graph_failed key={str(FULL8)!r} reason='capture_failed' seconds=0.5")
    fields: dict[str, Any] = record.__dict__["kpolicy"]
    assert fields == {"key": str(FULL8), "reason": "capture_failed", "seconds": 0.5}


def test_nothing_is_imported_before_the_first_event() -> None:
    """Subscribing the log loads no structlog; its first event does, or works without."""
    code = """
import sys
from kpolicy import Engine
assert "kpolicy.observe.events" not in sys.modules
from kpolicy.observe.events import Events, log_events
from kpolicy.registry import GraphRegistry
class Emitter:
    events = Events(GraphRegistry())
log_events(Emitter)
print("structlog" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]


def test_a_hook_can_be_called(registry: GraphRegistry) -> None:
    """What can't is named when it subscribes, not in the log at each event."""
    with pytest.raises(ConfigError, match="a hook for events is None; it takes a function"):
        ev.Events(registry).subscribe(None)  # type: ignore[arg-type]
