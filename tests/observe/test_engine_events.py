"""An Engine's events, from capture to a lost device."""

from __future__ import annotations

import pytest

from kpolicy import Engine
from kpolicy.errors import StickyDeviceError
from kpolicy.observe.events import (
    CaptureFinished,
    DeviceLost,
    Event,
    GraphCaptured,
    GraphFailed,
    GraphWithdrawn,
    PolicyDowngraded,
    ReplayFailed,
)  # fmt: skip
from kpolicy.reasons import Reason
from tests.observe.runs import engine_of, serve


def told_by(engine: Engine) -> list[Event]:
    told: list[Event] = []
    engine.events.subscribe(told.append)
    return told


def test_a_capture_is_told_graph_by_graph_and_at_its_end() -> None:
    """One event for each graph, failed ones with their reason, and a last one with the sums."""
    engine = engine_of(faults=["capture_fails@1"])
    told = told_by(engine)
    engine.capture()
    captured = [event.key for event in told if isinstance(event, GraphCaptured)]
    assert sorted(map(str, captured)) == sorted(map(str, engine.registry.captured()))
    assert sum(isinstance(event, GraphFailed) for event in told) == 1
    totals = engine.registry.totals()
    assert told[-1] == CaptureFinished(
        captured=len(captured), not_captured=1, held_bytes=totals.bytes_held, seconds=totals.held.seconds
    )


def test_a_failed_replay_is_told_with_its_graph_and_what_ran() -> None:
    """The withdrawal and the failure come together, once the step has run; nothing else is told of steps."""
    engine = engine_of("full_and_piecewise", faults=["replay_fails@2"])
    engine.capture()
    told = told_by(engine)
    serve(engine)
    withdrawn, failed = told
    assert isinstance(withdrawn, GraphWithdrawn)
    assert withdrawn.reason is Reason.REPLAY_FAILED
    assert isinstance(failed, ReplayFailed)
    assert failed.keys == (withdrawn.key,)
    assert engine.stats.replay_failures == 1


def test_a_lost_device_is_told_once() -> None:
    """The Engine tells of it when it stops, and not again when it is asked for more."""
    engine = engine_of(faults=["sticky@3"])
    engine.capture()
    told = told_by(engine)
    for _ in range(2):
        with pytest.raises(StickyDeviceError) as lost:
            serve(engine)
    assert told == [DeviceLost(error=str(lost.value))]


def test_a_downgraded_policy_is_told_when_somebody_listens() -> None:
    """The downgrades of the Engine's construction reach a hook that comes later."""
    engine = Engine("full", attention="mla")
    assert [event.reason for event in told_by(engine) if isinstance(event, PolicyDowngraded)] == [
        downgrade.reason for downgrade in engine.downgrades
    ]
