"""Steps that were measured several times, held to a cost table."""

from __future__ import annotations

import attrs
import pytest

from kpolicy.costs import CostTable, Curve, HostCost
from kpolicy.decision import Decision, Launch
from kpolicy.errors import ConfigError
from kpolicy.host_speed import launching_takes
from kpolicy.modes import Mode, Rows
from kpolicy.reasons import Reason
from kpolicy.schemas import StepEntry
from kpolicy.shapes import BatchShape
from kpolicy.simulate.repeats import IN_THE_RUN, LEAST_REPEATS, RepeatRow, host_bound, repeat_rows

COSTS = CostTable(
    version="repeats", measured=True, full=Curve([1], [100.0]), piecewise=Curve([1], [100.0]),
    eager=Curve([1, 1000], [100.0, 1100.0]), host_full=HostCost(50.0), host_piecewise=HostCost(300.0),
    host_eager=HostCost(500.0), step_us=0.0, host_work_us=20.0,
)  # fmt: skip
BOUND, NOT, SOMETIMES = 0, 1, 2
SIZES = {BOUND: 101, NOT: 901, SOMETIMES: 501}
"""Tokens: the host bounds the first, the device the second; the third where the host is slower than the table's."""


def step(which: int, us: float, work_us: float = 20.0) -> StepEntry:
    shape = BatchShape(prefills=[(SIZES[which], 0)])
    decision = Decision(Mode.EAGER, (Launch(Rows.ALL, None),), Reason.ONLY_LEGAL)
    return StepEntry.of(which, shape, decision, cycle_us=us, host_work_us=work_us)


SLOW_US = 500 * launching_takes(1.5)
"""By the table, of a step that the host bounds while the fixed work takes 30 us, half as long again"""
RUN = [step(BOUND, 550.0), step(NOT, 1000.0), step(SOMETIMES, 900.0)]


def rows(again: list[StepEntry], run: list[StepEntry] = RUN, costs: CostTable = COSTS) -> dict[str, RepeatRow]:
    return {row.regime: row for row in repeat_rows(run, again, costs) if row.host == "any"}


def test_the_middle_of_the_repeats_is_held_to_the_table() -> None:
    """500 us by the table: one late repeat is in each's error and in the mean's, not in the middle's."""
    found = rows([step(BOUND, us) for us in (500.0, 490.0, 510.0, 500.0, 1000.0)])
    row = found["host-bound"]
    assert (row.steps, row.repeats) == (1, 5)
    assert (row.error, row.bias) == (pytest.approx(0), pytest.approx(0))
    assert row.of_means == pytest.approx(1 - 2500 / 3000)
    assert row.single_error == pytest.approx((500 / 490 - 1 + 1 - 500 / 510 + 0.5) / 5)
    assert row.spread == pytest.approx(row.single_error)


def test_a_wrong_table_shows_whatever_the_noise() -> None:
    found = rows([step(BOUND, us) for us in (400.0, 380.0, 420.0)])["host-bound"]
    assert found.error == pytest.approx(0.25)
    assert found.bias == pytest.approx(0.25)


def test_what_is_wrong_between_steps_stands_apart_from_what_all_have() -> None:
    """A table a quarter too slow for all but one step, which is right: a factor for all leaves that one a fifth off."""
    run = [attrs.evolve(RUN[BOUND], step=i) for i in range(5)]
    again = [attrs.evolve(step(BOUND, 500.0 if i == 4 else 400.0), step=i) for i in range(5) for _ in range(3)]
    found = rows(again, run)["host-bound"]
    assert (found.error, found.between) == (pytest.approx(0.2), pytest.approx(0.2 / 5))


def test_each_repeat_is_at_its_own_host_speed() -> None:
    """Ten of a slow host; the table as it is, is held to those at its own speed alone."""
    slow = [step(BOUND, SLOW_US, 30.0) for _ in range(10)]
    row = rows([*slow, *(step(BOUND, 520.0) for _ in range(10))])["host-bound"]
    assert row.error == pytest.approx(abs(0.5 * (1 + 500 / 520) - 1))
    assert (row.at_speed_steps, row.at_speed_error) == (1, pytest.approx(1 - 500 / 520))
    assert rows(slow)["host-bound"].at_speed_steps == 0


def test_a_repeat_is_in_the_regime_that_it_has_itself() -> None:
    """A step that the host bounded while it was slow isn't one that it bounds where it isn't."""
    run = [RUN[BOUND], RUN[NOT], step(SOMETIMES, 900.0, 40.0)]
    run = [attrs.evolve(each, host_work_us=None) if each.step != SOMETIMES else each for each in run]
    repeats = ((BOUND, 500.0, 20.0), (NOT, 1000.0, 20.0), (SOMETIMES, 600.0, 20.0), (SOMETIMES, 800.0, 40.0))
    again = [step(*each) for each in repeats for _ in range(LEAST_REPEATS)]
    found = rows(again, run)
    assert {regime: row.steps for regime, row in found.items()} == {"host-bound": 2, "saturated": 2, IN_THE_RUN: 2}
    assert found["host-bound"].host_bound_share == 1
    assert found["saturated"].host_bound_share == 0
    # Of its nine repeats, three of one step and three of the other's six.
    assert found[IN_THE_RUN].host_bound_share == pytest.approx(6 / 9)
    assert host_bound(run, COSTS) == [BOUND, SOMETIMES]
    assert host_bound(RUN, COSTS) == [BOUND]
    assert host_bound(RUN, COSTS, slower=1.5) == [BOUND, SOMETIMES]


def test_two_repeats_in_a_regime_are_too_few_though_the_step_ran_five_times() -> None:
    again = [step(SOMETIMES, 600.0) for _ in range(3)] + [step(SOMETIMES, 1000.0, 40.0) for _ in range(2)]
    assert set(rows(again)) == {"saturated"}


def test_repeats_on_quick_and_slow_hosts_stand_beside_each_other() -> None:
    """Right by the table on a quick host, and a quarter too slow on a slow one."""
    again = [step(BOUND, 500.0) for _ in range(3)] + [step(BOUND, SLOW_US / 1.25, 30.0) for _ in range(3)]
    found = {row.host: row for row in repeat_rows(RUN, again, COSTS) if row.regime == "host-bound"}
    assert {host: row.repeats for host, row in found.items()} == {"any": 6, "quick": 3, "slow": 3}
    assert found["quick"].error == pytest.approx(0)
    assert found["slow"].error == pytest.approx(0.25)
    assert found["any"].error == pytest.approx(0.125)


def test_the_hosts_speed_is_taken_from_a_pass_of_its_own() -> None:
    """The first step of a pass on a slow core has that one's speed, not the median of both passes."""
    run = [attrs.evolve(step(BOUND, 500.0), step=i) for i in range(8)]
    passes = [(500.0, 20.0), (SLOW_US, 30.0), (500.0, 20.0), (SLOW_US, 30.0)]
    again = [attrs.evolve(step(BOUND, *each), step=i) for each in passes for i in range(8)]
    assert rows(again, run)["host-bound"].single_error == pytest.approx(0)


def test_repeats_that_ran_another_way_or_too_seldom_are_left_out() -> None:
    other = attrs.evolve(step(BOUND, 9000.0), launches=())
    assert rows([*(step(BOUND, 500.0) for _ in range(3)), other])["host-bound"].repeats == 3
    alike = attrs.evolve(step(BOUND, 500.0), launches=[attrs.evolve(RUN[BOUND].launches[0], reason="no_graphs")])
    assert rows(3 * [alike])["host-bound"].repeats == 3
    few = [*(step(BOUND, 500.0) for _ in range(2)), other, step(NOT, 1000.0)]
    assert repeat_rows(RUN, few, COSTS) == []


@pytest.mark.parametrize("wrong", [{"step": 7}, {"step": NOT}], ids=["no such step", "another batch"])
def test_steps_of_another_run_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="isn't one of the run's 3"):
        repeat_rows(RUN, [attrs.evolve(step(BOUND, 500.0), **wrong)], COSTS)
