"""The host's speed: noted while costs are measured and beside each step, and what a table makes of it."""

from __future__ import annotations

import itertools

import attrs
import pytest

from kpolicy.costs import CostTable, Curve, HostCost
from kpolicy.decision import Decision, Launch
from kpolicy.errors import ProfileError
from kpolicy.host_speed import felt, host_work_us, launching_takes, steadied
from kpolicy.modes import Mode, Rows
from kpolicy.reasons import Reason
from kpolicy.schemas import StepEntry
from kpolicy.shapes import BatchShape
from kpolicy.simulate.fidelity import expected_cost, fidelity
from kpolicy.step_effects import StepEffects

COSTS = CostTable(
    version="noted", measured=True, full=Curve([1], [100.0]), piecewise=Curve([1], [110.0]), eager=Curve([1], [120.0]),
    host_full=HostCost(50.0, 1.0), host_piecewise=HostCost(300.0, 1.0, 20.0, 30.0),
    host_eager=HostCost(900.0, 1.0, 20.0, 30.0), step_us=80.0, host_work_us=40.0,
)  # fmt: skip


def test_the_least_of_three_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    # Runs of 70, 40 and 90 us.
    times = itertools.chain.from_iterable((start, start + us / 1e6) for start, us in ((1, 70), (2, 40), (3, 90)))
    monkeypatch.setattr("kpolicy.host_speed.time.perf_counter", lambda: next(times))
    assert host_work_us() == pytest.approx(40)


def test_launching_slows_by_less_than_the_work() -> None:
    assert [launching_takes(times) for times in (1.0, 1.5, 2.0, 3.0)] == pytest.approx([1.0, 1.425, 1.85, 2.7])
    found = [launching_takes(tenths / 10) for tenths in range(1, 50)]
    assert found == sorted(set(found))
    assert found[0] > 0


def test_a_slower_host_changes_the_hosts_times_alone() -> None:
    """The work takes half as long again, launching 1.425 times as long."""
    costs = attrs.evolve(COSTS, effects=StepEffects(eager_new_us=200.0, padding_share=(0.5, 0.9)))
    slow = costs.at_host_speed(60.0)
    assert slow.host_work_us == 60
    assert slow.step_us == pytest.approx(1.425 * costs.step_us)
    assert slow.effects == attrs.evolve(costs.effects, eager_new_us=slow.effects.eager_new_us)
    assert slow.effects.eager_new_us == pytest.approx(285.0)
    for name in ("host_full", "host_piecewise", "host_eager"):
        before, now = getattr(costs, name), getattr(slow, name)
        for part in ("base_us", "req_us", "decode_us", "prefill_us"):
            assert getattr(now, part) == pytest.approx(1.425 * getattr(before, part))
    assert (slow.full, slow.piecewise, slow.eager) == (costs.full, costs.piecewise, costs.eager)
    assert slow.decode_attention == costs.decode_attention
    assert costs.at_host_speed(40.0) == costs
    quick = costs.at_host_speed(20.0)
    assert quick.step_us == pytest.approx(0.575 * costs.step_us)
    # The law starts from the speed that a table was measured at.
    assert slow.at_host_speed(40.0).step_us == pytest.approx(1.02125 * costs.step_us)


@pytest.mark.parametrize(("noted", "now"), [(0.0, 60.0), (40.0, None), (40.0, 0.0)])
def test_nothing_changes_where_a_speed_was_not_noted(noted: float, now: float | None) -> None:
    costs = attrs.evolve(COSTS, host_work_us=noted)
    assert costs.at_host_speed(now) is costs


def test_fidelity_holds_a_step_to_the_host_as_it_was() -> None:
    costs = COSTS
    shape = BatchShape(decodes=[(1, 4)], decode_kv_tokens=256, max_kv_len=64)
    launches = (Launch(Rows.ALL, None),)
    plain = costs.cost(launches, shape.numbers)
    # The slow host bounds the step; its times are 1.425 times as long.
    slow_us = 1.425 * (plain.host_us + costs.step_us)
    decision = Decision(Mode.EAGER, launches, Reason.ONLY_LEGAL, None)
    noted = StepEntry.of(0, shape, decision, cycle_us=slow_us, host_work_us=60.0)
    assert plain.host_us > plain.device_us
    assert expected_cost(noted, costs).cycle_us == pytest.approx(slow_us)
    assert fidelity([noted], costs)[-1].error == pytest.approx(0, abs=1e-9)
    unnoted = attrs.evolve(noted, host_work_us=None)
    assert fidelity([unnoted], costs)[-1].error == pytest.approx(1 - 1 / 1.425)


def test_a_time_below_0_is_an_error_that_names_it() -> None:
    with pytest.raises(ProfileError, match=r"host_work_us is -5"):
        COSTS.at_host_speed(-5)


def test_late_notes_are_not_the_hosts_speed() -> None:
    """Nor are two one after the other: nine notes are looked at."""
    quick, slow = 10 * [20.0], 10 * [30.0]
    late = [*quick, *slow]
    late[3] = late[4] = late[15] = late[16] = 200.0
    assert steadied(late) == quick + slow
    assert steadied([]) == []
    assert steadied([20.0]) == [20.0]


def test_what_is_felt_of_a_core_is_its_mean_speed() -> None:
    assert felt([20.0, 20.0, 29.0], around=1) == pytest.approx([20.0, 23.0, 24.5])
    assert felt(9 * [20.0] + 9 * [30.0])[4:14] == pytest.approx([20.0 + 10 * i / 9 for i in range(10)])
    assert felt([]) == []
