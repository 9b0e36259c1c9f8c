"""The error table: nothing off where a log was made by the table itself, and every error named where it wasn't."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs
import pytest

from kpolicy.costs import CostTable, HostCost
from kpolicy.decision import Decision, Launch
from kpolicy.errors import ConfigError
from kpolicy.modes import Mode, Part, Rows
from kpolicy.reasons import Reason
from kpolicy.schemas import StepEntry, StepLogWriter, read_step_log
from kpolicy.shapes import BatchShape
from kpolicy.simulate import SimStep, simulate
from kpolicy.simulate.fidelity import (
    REPEATS,
    FidelityRow,
    expected_cost,
    expected_costs,
    fidelity,
    same_ranking,
)
from kpolicy.simulate.step_costs import StepCosts
from kpolicy.step_effects import StepEffects

from .helpers import COSTS, SIZES, server, trace_of

BUSY = trace_of(*[(0.2 * i, 3 + 7 * i % 40, 1 + 5 * i % 17) for i in range(20)])


SHOWN = attrs.evolve(COSTS, effects=StepEffects(warm_host_share=(0.7, 0.9), eager_new_us=55.5))
"""Steps in a row and eager steps of known sizes take the host less."""


def logged(path: Path, policy: str = "auto", costs: CostTable = COSTS) -> tuple[StepEntry, ...]:
    """A simulation's steps, through a step log and back."""
    with StepLogWriter(path) as log:

        def write(step: SimStep) -> None:
            log.write(StepEntry.of(step.number, step.step.shape(), step.decision, cycle_us=step.cycle_us))

        simulate(BUSY, policy, server=server(num_blocks=60), costs=costs, ladder=SIZES, on_step=write)
    return read_step_log(path).entries


@pytest.mark.parametrize("costs", [COSTS, SHOWN], ids=["plain", "in a row"])
@pytest.mark.parametrize("policy", ["auto", "split", "vllm", "eager", "piecewise", "kunlun"])
def test_a_tables_own_steps_have_no_error(tmp_path: Path, policy: str, costs: CostTable) -> None:
    """Every step costs again what it cost, splits, padding and several decode steps included."""
    entries = logged(tmp_path / "s.jsonl", policy, costs)
    rows = fidelity(entries, costs)
    assert rows[-1].mode == rows[-1].regime == "all"
    assert rows[-1].steps == len(entries) > 30
    for row in rows:
        found = row.error, row.bias, row.median_error, row.gap_p50_error, row.noise
        assert found == pytest.approx((0, 0, 0, 0, 0), abs=1e-12)
    parts = [row for row in rows if row.mode != "all" and row.regime != "all"]
    assert sum(row.steps for row in parts) == len(entries)


@pytest.mark.parametrize("policy", ["eager", "piecewise"])
def test_what_ran_before_tells(tmp_path: Path, policy: str) -> None:
    """A table that doesn't tell steps in a row and known sizes apart is too slow for them."""
    entries = logged(tmp_path / "s.jsonl", policy, SHOWN)
    blind = fidelity(entries, COSTS)[-1]
    assert blind.error > 0.003
    assert fidelity(entries, SHOWN)[-1].error == pytest.approx(0, abs=1e-12)


def test_forms_of_a_split_are_one_mode(tmp_path: Path) -> None:
    """As in a simulation: a split in turn after one beside comes after a step of its mode."""
    first = next(each for each in logged(tmp_path / "s.jsonl", "split", SHOWN) if each.mode.startswith("split/"))
    entries = [attrs.evolve(first, mode=f"split/{form}") for form in ("beside", "in_turn")]
    assert any(each.key is None or each.key.part is Part.PIECEWISE for each in first.launches)
    launches = tuple(Launch(each.rows, each.key, each.stream, each.repeat) for each in first.launches)
    again = StepCosts.in_a_row(SHOWN).cost(launches, first.shape.numbers)
    assert expected_costs(entries, SHOWN)[1] == again != expected_cost(first, SHOWN)


def test_the_hosts_speed_at_a_step_is_the_mean_of_what_is_noted_around_it(tmp_path: Path) -> None:
    """Four steps on either side; a step without a note is at the table's speed."""
    noted = (20.0, 20.0, 90.0, 20.0, 40.0, 40.0, 40.0, 40.0, 40.0, 40.0, None)
    entries = [attrs.evolve(each, host_work_us=work) for each, work in zip(
        logged(tmp_path / "s.jsonl", "eager")[:11], noted, strict=True
    )]  # fmt: skip
    costs = attrs.evolve(COSTS, host_work_us=20.0)
    means = (190 / 5, 230 / 6, 270 / 7, 310 / 8, 350 / 9, 370 / 9, 350 / 8, 260 / 7, 40.0, 40.0, None)
    alone = [costs.at_host_speed(speed) for speed in means]
    assert [each.cycle_us for each in expected_costs(entries, costs)] == pytest.approx(
        [
            expected_cost(attrs.evolve(entry, host_work_us=None), table).cycle_us
            for entry, table in zip(entries, alone, strict=True)
        ]
    )


def test_a_core_that_is_slow_for_a_part_of_every_step_slows_it(tmp_path: Path) -> None:
    """A third of the notes is 1.6 times as long; every step takes 1.2 times the work, and 1.17 times the launching."""
    costs = attrs.evolve(COSTS, host_work_us=20.0, host_eager=COSTS.host_eager.times(20))
    steps = []
    for i, entry in enumerate(logged(tmp_path / "s.jsonl", "eager")[:60]):
        slow = expected_cost(attrs.evolve(entry, host_work_us=24.0), costs)
        assert slow.bound_by == "host"
        steps.append(attrs.evolve(entry, host_work_us=20.0 if i % 3 else 32.0, cycle_us=slow.cycle_us))
    assert fidelity(steps, costs)[-1].error < 0.01


def test_steps_at_the_tables_host_speed_are_told_apart(tmp_path: Path) -> None:
    """Within a tenth; elsewhere the machine's speed changed, and with it what a table can say."""
    entries = logged(tmp_path / "s.jsonl", "eager")[:20]
    speeds = 10 * (21.9,) + 10 * (40.0,)
    # Two passes over the same ten.
    entries = tuple(
        attrs.evolve(each, step=i % 10, host_work_us=speed)
        for i, (each, speed) in enumerate(zip(entries, speeds, strict=True))
    )
    costs = attrs.evolve(COSTS, host_work_us=20.0)
    expected = [each.cycle_us for each in expected_costs(entries, costs)]
    off = 5 * (1.25,) + 5 * (1.0,) + 5 * (2.0,) + 5 * (4.0,)
    late = [attrs.evolve(each, cycle_us=us * by) for each, us, by in zip(entries, expected, off, strict=True)]
    row = fidelity(late, costs)[-1]
    assert (row.at_speed_steps, row.at_speed_error) == (10, pytest.approx(0.1))
    assert row.error == pytest.approx((0.2 + 0 + 0.5 + 0.75) / 4)
    unnoted = fidelity(entries, COSTS)[-1]
    assert (unnoted.at_speed_steps, unnoted.at_speed_error) == (20, unnoted.error)


def test_a_slow_moment_is_no_regime_of_the_tables_own(tmp_path: Path) -> None:
    """A step that the host bounds at the speed noted beside it alone stays in the regime that a simulation has."""
    entries = logged(tmp_path / "s.jsonl", "vllm")
    costs = attrs.evolve(
        COSTS, host_work_us=20.0, host_full=HostCost(1.0), host_piecewise=HostCost(1.0), host_eager=HostCost(1.0)
    )
    slow = [attrs.evolve(each, host_work_us=1e6) for each in entries]
    plain = {(row.mode, row.regime): row.steps for row in fidelity(entries, costs)}
    assert not any(regime == "host-bound" for _, regime in plain)
    assert {row.regime for row in fidelity(slow, costs)} == {"host-bound", "all"}
    own = fidelity(slow, costs, own_speed=True)
    assert {(row.mode, row.regime): row.steps for row in own} == plain
    noted = fidelity(slow, costs)
    assert own[-1] == noted[-1]


def test_an_error_shows_where_it_is(tmp_path: Path) -> None:
    """A host that is slower than the table says makes host-bound steps too quick, and leaves others alone."""
    entries = logged(tmp_path / "s.jsonl", "eager")
    quick = attrs.evolve(COSTS, host_eager=HostCost(COSTS.host_eager.base_us / 2, COSTS.host_eager.req_us / 2))
    by_regime = {row.regime: row for row in fidelity(entries, COSTS)}
    assert {"host-bound", "saturated"} <= set(by_regime)
    off = fidelity(entries, quick)[-1]
    assert off.bias < -0.05
    assert off.error > 0.05
    regimes = [row for row in by_regime.values() if row.regime != "all"]
    assert sum(row.time_share for row in regimes) == pytest.approx(1.0)
    [saturated] = [row for row in regimes if row.regime == "saturated"]
    assert saturated.time_share > saturated.steps / len(entries)
    late = [attrs.evolve(each, cycle_us=(each.cycle_us or 0.0) * 1.25) for each in entries]
    row = fidelity(late, COSTS)[-1]
    assert (row.error, row.bias, row.noise) == pytest.approx((0.2, -0.2, 0.0))


def test_what_steps_alike_differ_by_is_noise(tmp_path: Path) -> None:
    """A machine that is slow in every fourth step leaves an error that no table can take away."""
    entries = logged(tmp_path / "s.jsonl", "eager")
    some = [
        attrs.evolve(each, cycle_us=(each.cycle_us or 0.0) * (1.5 if i % 4 else 3.0)) for i, each in enumerate(entries)
    ]
    row = fidelity(some, COSTS)[-1]
    assert row.error > 0.3
    assert row.noise == pytest.approx(0.125, abs=0.02)


def test_repeats_of_one_kind_are_held_to_their_mean(tmp_path: Path) -> None:
    """Errors either way make up for each other within a kind alone, and kinds of few steps are left out."""
    decodes = [each for each in logged(tmp_path / "s.jsonl", "full") if not each.shape.prefills]
    one, other = (most(decodes, key=lambda each: each.shape.numbers.num_decodes) for most in (min, max))
    us = {each: expected_cost(each, COSTS).cycle_us for each in (one, other)}

    def row(times: Mapping[StepEntry, Sequence[float]]) -> FidelityRow:
        steps = [attrs.evolve(each, cycle_us=us[each] * by) for each, all_by in times.items() for by in all_by]
        return fidelity(steps, COSTS)[-1]

    either_way = row({one: [0.5, 1.5] * 3})
    assert either_way.error == pytest.approx((1 + 1 / 3) / 2)
    assert either_way.kind_steps == 6
    assert either_way.kind_error == pytest.approx(0)
    # Two kinds that are off either way stay off, each by its own.
    assert one.launches != other.launches
    apart = row({one: [0.5] * 6, other: [2.0] * REPEATS})
    assert apart.kind_steps == 6 + REPEATS
    assert apart.kind_error == pytest.approx((6 * 1.0 + REPEATS * 0.5) / (6 + REPEATS))
    few = row({one: [0.5] * 6, other: [2.0] * (REPEATS - 1)})
    assert few.kind_steps == 6
    assert few.kind_error == pytest.approx(1.0)
    assert row({one: [0.5] * (REPEATS - 1)}).kind_steps == 0


def test_eager_steps_of_other_sizes_are_other_kinds() -> None:
    """Eager launches say nothing of their size, and no launch of its KV: rows a factor of two apart aren't one kind."""
    plain = Decision(Mode.EAGER, (Launch(Rows.ALL, None),), Reason.POLICY_IS_EAGER)

    def kinds(shape: BatchShape) -> int:
        steps = [StepEntry.of(0, each, plain, cycle_us=100.0) for each in [BatchShape(prefills=[(600, 0)])] * 4]
        return fidelity([*steps, StepEntry.of(0, shape, plain, cycle_us=100.0)], COSTS)[-1].kind_steps

    assert kinds(BatchShape(prefills=[(590, 0)])) == 5
    assert kinds(BatchShape(prefills=[(900, 0)])) == 0
    assert kinds(BatchShape(prefills=[(600, 4000)])) == 0


def test_padded_eager_steps_cost_their_padding() -> None:
    """An eager launch that a rule pads all the same is costed at its padded size."""
    decision = Decision(Mode.EAGER, (Launch(Rows.ALL, None, padded_tokens=16),), Reason.POLICY_IS_EAGER)
    shape = BatchShape.decode(5)
    entry = StepEntry.of(0, shape, decision, cycle_us=1.0)
    assert expected_cost(entry, COSTS) == COSTS.cost(decision.launches, shape.numbers)


def test_a_log_without_times_cant_be_compared() -> None:
    """The error says so."""
    with pytest.raises(ConfigError, match="no step with a measured time"):
        fidelity([], COSTS)


def test_rankings_are_compared_pair_by_pair() -> None:
    """Only pairs that are told apart on the device can be wrong."""
    measured = {"a": 10.0, "b": 10.1, "c": 12.0}
    assert same_ranking(measured, {"a": 5.0, "b": 6.0, "c": 7.0}) == []
    assert same_ranking(measured, {"a": 6.0, "b": 5.0, "c": 7.0}) == [("a", "b")]
    assert same_ranking(measured, {"a": 6.0, "b": 5.0, "c": 7.0}, tie=0.02) == []
    assert same_ranking(measured, {"a": 9.0, "b": 5.0, "c": 7.0}, tie=0.02) == [("a", "c")]
