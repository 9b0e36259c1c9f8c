"""What a step takes by what ran before it and by what its rows are: sums by hand."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from kpolicy.costs import FEW_DECODES, MANY_DECODES, AttentionCost, CostTable, Curve, HostCost
from kpolicy.decision import Launch
from kpolicy.errors import ProfileError
from kpolicy.keys import GraphKey
from kpolicy.modes import Part, Rows
from kpolicy.overlap import Overlap
from kpolicy.shapes import BatchShape
from kpolicy.simulate.step_costs import StepCosts
from kpolicy.step_effects import StepEffects

SIZES = (8, 16)
TABLE = CostTable(
    version="by hand",
    measured=True,
    full=Curve(SIZES, (800.0, 1600.0)),
    mixed=Curve(SIZES, (800.0, 1600.0)),
    piecewise=Curve(SIZES, (800.0, 1600.0)),
    eager=Curve(SIZES, (900.0, 1700.0)),
    prefill_attention=AttentionCost(20.0, 0.5, 0.001),
    host_full=HostCost(40.0, 0.5),
    host_piecewise=HostCost(100.0, 1.0, 30.0, 10.0),
    host_eager=HostCost(900.0, 2.0),
    overlap_cost=0.6,
)
FULL, PIECES = (
    (Launch(Rows.ALL, GraphKey(Part.FULL, 16, 16, query_len=1)),),
    (Launch(Rows.ALL, GraphKey(Part.PIECEWISE, 16)),),
)
EAGER = (Launch(Rows.ALL, None),)


def told(**effects: Any) -> CostTable:
    return attrs.evolve(TABLE, effects=StepEffects(**effects))


def ahead(table: CostTable) -> StepCosts:
    """On a host that launches ahead of the device, as calibration has it."""
    return attrs.evolve(StepCosts(table), leads=False)


def device_us(costs: StepCosts | CostTable, launches: tuple[Launch, ...], rows: int) -> float:
    return costs.cost(launches, BatchShape.decode(rows).numbers).device_us


def test_the_wait_for_the_first_pieces_is_half_of_what_launching_both_kinds_has_beyond_a_row() -> None:
    """Added after another mode and taken off in a row; no launch takes less than nothing for it."""
    table = told(warm_host_share=(0.75, 1.0))
    after, again = StepCosts.after_another(table), StepCosts.in_a_row(table)
    # Half of a quarter of 140 us.
    assert device_us(after, PIECES, 16) == 1600.0 + 17.5
    assert device_us(again, PIECES, 16) == 1600.0 - 17.5
    for launches in (FULL, EAGER):
        assert device_us(after, launches, 16) == device_us(again, launches, 16) == device_us(TABLE, launches, 16)
    # A split's eager half may be of a new size.
    new = attrs.evolve(table, effects=attrs.evolve(table.effects, eager_new_us=70.0))
    assert device_us(StepCosts.after_another(new).new_sizes(), PIECES, 16) == 1600.0 + 17.5
    slow = attrs.evolve(table, host_piecewise=HostCost(20_000.0))
    assert device_us(StepCosts.in_a_row(slow), PIECES, 16) == 0.0


def test_by_itself_a_step_has_the_tables_times() -> None:
    """As long as it tells nothing of rows; what ran before isn't known."""
    numbers = BatchShape(decodes=[(1, 3)], prefills=[(4, 0)]).numbers
    for costs in (StepCosts(TABLE), StepCosts(told(warm_host_share=(0.5, 0.5), eager_new_us=70.0))):
        for launches in ((), FULL, PIECES, EAGER):
            assert costs.cost(launches, numbers) == TABLE.cost(launches, numbers)
            assert device_us(costs, launches, 9) == device_us(TABLE, launches, 9)


def test_decode_rows_alone_are_told_by_sides() -> None:
    """What `decodes` says of them is `launch_us` without their attention, which the table here has none of."""
    costs = StepCosts(told(padding_share=(0.25, 0.5)))
    for launch in (FULL[0], PIECES[0], EAGER[0], Launch(Rows.ALL, None, padded_tokens=16)):
        device, host = costs.launch_us(launch, BatchShape.decode(9).numbers)
        assert costs.decodes(launch, 9) == (host, device, TABLE.step_us)


def test_rows_of_padding_take_their_share() -> None:
    """9 rows in a graph of 16: from 10 rows' time, one row of padding, to 16 rows' by the share of their part."""
    table = told(padding_share=(0.25, 0.5))
    costs = StepCosts(table)
    assert device_us(costs, FULL, 9) == pytest.approx(1000.0 + 0.25 * 600.0)
    assert device_us(costs, PIECES, 9) == pytest.approx(1000.0 + 0.5 * 600.0)
    assert device_us(costs, FULL, 16) == device_us(costs, FULL, 15) == 1600.0
    assert device_us(costs, EAGER, 9) == device_us(table, EAGER, 9)
    # Decisions rest on the table.
    assert device_us(table, FULL, 9) == 1600.0


def test_a_step_with_prompts_has_no_rows_of_padding() -> None:
    table = told(padding_share=(0.0, 0.0))
    mixed = BatchShape(decodes=[(1, 5)], prefills=[(4, 0)], decode_kv_tokens=50, max_kv_len=10).numbers
    assert device_us(table, PIECES, 9) - device_us(StepCosts(table), PIECES, 9) == pytest.approx(600.0)
    assert StepCosts(table).cost(PIECES, mixed) == table.cost(PIECES, mixed)
    # The decode half of a split has some.
    halves = Launch(Rows.DECODE, FULL[0].key), Launch(Rows.PREFILL, PIECES[0].key)
    assert StepCosts(table).launch_us(halves[0], mixed)[0] == 800.0
    assert StepCosts(table).launch_us(halves[1], mixed) == table.launch_us(halves[1], mixed)


def test_one_decode_row_beside_a_prompt_has_its_own_share() -> None:
    """From one row to a few it changes evenly as the rows double, in decisions too."""
    table = told(one_row_overlap=0.3)
    # A rank that has none, where others do, runs its graph too.
    found = [table.overlap_of(rows).cost for rows in (0, 1, 2, 4, FEW_DECODES, 64)]
    assert found == pytest.approx([0.3, 0.3, 0.4, 0.5, 0.6, 0.6])
    launches = Launch(Rows.DECODE, FULL[0].key), Launch(Rows.PREFILL, PIECES[0].key, 1)
    numbers = BatchShape(decodes=[(1, 1)], prefills=[(30, 0)], decode_kv_tokens=10, max_kv_len=30).numbers
    halves = [table.launch_us(launch, numbers)[0] for launch in launches]
    for costs in (table, ahead(table)):
        assert costs.cost(launches, numbers).device_us == pytest.approx(max(halves) + 0.3 * min(halves))
    assert TABLE.overlap_of(1) == Overlap.of(0.6)


def test_many_decode_rows_and_slowdowns_have_their_own_too() -> None:
    """By hand: half-way between eight rows and 32, and between one and eight, at the logarithm."""
    table = attrs.evolve(
        told(one_row_overlap=0.3, one_row_slowdown=2.2, many_rows_overlap=0.8, many_rows_slowdown=1.5),
        decode_slowdown=1.9,
    )
    found = [table.overlap_of(rows) for rows in (1, 2, 8, 16, MANY_DECODES, 500)]
    assert [each.cost for each in found] == pytest.approx([0.3, 0.4, 0.6, 0.7, 0.8, 0.8])
    assert [each.slowdown for each in found] == pytest.approx([2.2, 2.1, 1.9, 1.7, 1.5, 1.5])
    # Only many rows: fewer are as a few. A slowdown by itself says nothing.
    alone = told(many_rows_overlap=0.8, one_row_slowdown=3.0)
    assert [alone.overlap_of(rows) for rows in (1, FEW_DECODES)] == [pytest.approx(Overlap.of(0.6))] * 2
    assert alone.overlap_of(MANY_DECODES) == pytest.approx(Overlap.of(0.8))
    numbers = BatchShape(decodes=[(1, 16)], prefills=[(30, 0)], decode_kv_tokens=160, max_kv_len=30).numbers
    launches = Launch(Rows.DECODE, FULL[0].key), Launch(Rows.PREFILL, PIECES[0].key, 1)
    halves = [table.launch_us(launch, numbers)[0] for launch in launches]
    for costs in (table, ahead(table)):
        assert costs.cost(launches, numbers).device_us == pytest.approx(Overlap.of(0.7, 1.7).device_us(*halves))


def test_decode_steps_that_outlast_a_short_prompt_pay_less() -> None:
    """By hand: half-way between 64 and 1,024 tokens at the logarithm, beyond as there; a longer prompt's time stays."""
    table = attrs.evolve(told(outlasted_share=((64, 0.25), (1024, 0.75))), decode_slowdown=1.8)
    assert [table.effects.outlasted_at(n) for n in (1, 64, 256, 1024, 5000)] == [0.25, 0.25, 0.5, 0.75, 0.75]
    long = table.overlap_of(8)
    assert table.overlap_of(8, 256) == long._replace(outlasted=0.5 * long.outlasted, share=0.5)
    numbers = BatchShape(decodes=[(1, 8)], prefills=[(64, 0)], decode_kv_tokens=80, max_kv_len=64).numbers
    for steps in (1, 9):
        launches = Launch(Rows.DECODE, FULL[0].key, repeat=steps), Launch(Rows.PREFILL, PIECES[0].key, 1)
        decode, prompt = (table.launch_us(launch, numbers)[0] for launch in launches)
        expected = max(prompt + long.cost * steps * decode, steps * decode + 0.25 * long.outlasted * prompt)
        for costs in (table, ahead(table)):
            assert costs.cost(launches, numbers).device_us == pytest.approx(expected)
    # Where both together take longer than in turn, two speeds don't tell, and it says nothing.
    assert attrs.evolve(table, overlap_cost=1.5).overlap_of(8, 64) == Overlap.of(1.5, 1.8)
    assert told().effects.outlasted_at(5) == 1.0


@pytest.mark.parametrize("steps", [1, 3, 40])
@pytest.mark.parametrize("speed", [1.0, 2.0, 60.0])
def test_a_prompt_beside_waits_until_the_decode_half_is_launched(steps: int, speed: float) -> None:
    """By hand: one repeat's launch of the host's 44 us goes by with the decode steps alone on the device.

    On a host half as fast it takes 1.85 times as long, and on a very slow one longer than a decode step; in turn nobody
    waits for it; and decisions don't count it.
    """
    table = attrs.evolve(TABLE, decode_slowdown=2.0, host_work_us=10.0)
    halves = Launch(Rows.DECODE, FULL[0].key, repeat=steps), Launch(Rows.PREFILL, PIECES[0].key, 1)
    numbers = BatchShape(decodes=[(1, 8)], prefills=[(64, 0)], decode_kv_tokens=80, max_kv_len=64).numbers
    decode, prompt = (table.launch_us(launch, numbers)[0] for launch in halves)
    lead = 44.0 * (1 + 0.85 * (speed - 1))
    # At a cost of 0.6 and a slowdown of 2 the prompt goes on at 0.7 of its speed and the decode steps at half.
    left = max(steps * decode - lead, 0.0)
    expected = lead + max(prompt + 0.6 * left, left + prompt * 0.5 / 0.7)
    costs = StepCosts(table).at_host_speed(10.0 * speed)
    assert costs.cost(halves, numbers).device_us == pytest.approx(expected)
    assert table.cost(halves, numbers).device_us == table.overlap_of(8).device_us(steps * decode, prompt)
    # They are over after the lead at their own speed and the rest at half of it, if the step isn't before.
    cycle = costs.cost(halves, numbers).cycle_us
    ready = max(min(lead, steps * decode) + 2 * left, steps * lead)
    assert costs.decodes_ready_us(halves, numbers, cycle) == pytest.approx(min(ready, cycle))
    in_turn = halves[0], attrs.evolve(halves[1], stream=0)
    assert costs.cost(in_turn, numbers).device_us == pytest.approx(steps * decode + prompt)


@pytest.mark.parametrize(
    ("name", "to"),
    [
        ("warm_host_share", (0.0, 1.0)),
        ("warm_host_share", (1.0, 1.2)),
        ("warm_host_share", (1.0,)),
        ("eager_new_us", -1.0),
        ("padding_share", (1.2, 1.0)),
        ("padding_share", (1.0, -0.1)),
        ("padding_share", (1.0,)),
        ("one_row_overlap", -0.1),
        ("one_row_overlap", 2.5),
        ("one_row_overlap", float("nan")),
        ("many_rows_overlap", 2.5),
        ("one_row_slowdown", 0.5),
        ("many_rows_slowdown", float("inf")),
        ("outlasted_share", ()),
        ("outlasted_share", ((0, 0.5),)),
        ("outlasted_share", ((64, 0.5), (64, 0.6))),
        ("outlasted_share", ((64, 0.5), (8, 0.6))),
        ("outlasted_share", ((64, -0.1),)),
        ("outlasted_share", ((64, float("nan")),)),
    ],
)
def test_effects_that_cant_be(name: str, to: Any) -> None:
    with pytest.raises(ProfileError, match=name):
        StepEffects(**{name: to})
