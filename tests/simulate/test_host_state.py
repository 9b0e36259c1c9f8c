"""Which table a step gets by what ran before it."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from kpolicy.costs import Curve
from kpolicy.decision import Launch
from kpolicy.errors import ConfigError
from kpolicy.host_speed import launching_takes
from kpolicy.keys import GraphKey
from kpolicy.modes import Mode, Part, Rows
from kpolicy.scheduling.traces import TraceRequest
from kpolicy.schemas import Profile
from kpolicy.shapes import BatchShape
from kpolicy.simulate import Server, simulate
from kpolicy.simulate import run as simulate_run
from kpolicy.simulate.host_state import HostState
from kpolicy.simulate.step_costs import StepCosts
from kpolicy.step_effects import StepEffects

from . import helpers

COSTS = attrs.evolve(helpers.COSTS, padding_us=(0.0, 0.0))
SHOWN = attrs.evolve(COSTS, effects=StepEffects(warm_host_share=(0.5, 0.8), eager_new_us=40.0))
EAGER, PIECES = (Launch(Rows.ALL, None),), (Launch(Rows.ALL, GraphKey(Part.PIECEWISE, 8)),)
FULL = (Launch(Rows.ALL, GraphKey(Part.FULL, 8, 8, query_len=1)),)


def host_us(state: HostState, mode: Mode, launches: tuple[Launch, ...], rows: int) -> float:
    numbers = BatchShape.decode(rows).numbers
    return state.costs(mode, launches, numbers).cost(launches, numbers).host_us


def test_steps_in_a_row_and_sizes_that_ran_before() -> None:
    """An eager step of four rows: first, at once again, after another mode, in a row with another new size."""
    state, cold = HostState(SHOWN), SHOWN.cost(EAGER, BatchShape.decode(4).numbers).host_us
    assert host_us(state, Mode.EAGER, EAGER, 4) == pytest.approx(cold + 40)
    assert host_us(state, Mode.EAGER, EAGER, 4) == pytest.approx(0.8 * cold)
    assert host_us(state, Mode.FULL, FULL, 4) == SHOWN.cost(FULL, BatchShape.decode(4).numbers).host_us
    assert host_us(state, Mode.EAGER, EAGER, 4) == pytest.approx(cold)
    five = SHOWN.cost(EAGER, BatchShape.decode(5).numbers).host_us
    assert host_us(state, Mode.EAGER, EAGER, 5) == pytest.approx(0.8 * five + 40)


def test_pieces_have_a_share_of_their_own_and_whole_graphs_none() -> None:
    state, cold = HostState(SHOWN), SHOWN.cost(PIECES, BatchShape.decode(4).numbers).host_us
    assert [host_us(state, Mode.PIECEWISE, PIECES, 4) for _ in range(3)] == pytest.approx([cold, cold / 2, cold / 2])
    assert host_us(state, Mode.FULL, FULL, 4) == host_us(state, Mode.FULL, FULL, 4)


def test_a_step_with_prompts_is_not_in_a_row_with_one_without() -> None:
    """Their attention is other code; another size of the same kind of rows is in a row."""
    state, other = HostState(SHOWN), (Launch(Rows.ALL, GraphKey(Part.PIECEWISE, 16)),)
    decodes, mixed = BatchShape.decode(4).numbers, BatchShape(prefills=[(4, 0)]).numbers
    ran = [(PIECES, decodes), (PIECES, mixed), (other, mixed), (PIECES, decodes), (other, decodes)]
    found = [state.costs(Mode.PIECEWISE, launches, numbers) for launches, numbers in ran]
    cold, warm = StepCosts.after_another(SHOWN), StepCosts.in_a_row(SHOWN)
    assert found == [cold, cold, warm, cold, warm]
    assert state.decodes(Mode.PIECEWISE, PIECES[0], 4)[0].host_us == warm.cost(PIECES, decodes).host_us


WAITS = 0.5 * 0.5 * COSTS.host_piecewise.base_for(decodes=True, prefills=True)
"""Half of what launching pieces takes more than in a row"""


@pytest.mark.parametrize("slower", [1.0, 2.0])
def test_the_device_waits_for_the_first_pieces_by_what_ran_before(slower: float) -> None:
    """After another mode half of what launching takes more, in a row as much less.

    Of a slower host it is more of either. Whole graphs and eager steps don't have it so.
    """
    shown, numbers = attrs.evolve(SHOWN, host_work_us=20.0), BatchShape.decode(4).numbers
    times = launching_takes(slower)
    for mode, launches, waits in ((Mode.PIECEWISE, PIECES, WAITS), (Mode.FULL, FULL, 0.0), (Mode.EAGER, EAGER, 0.0)):
        state, alone = HostState(shown), shown.cost(launches, numbers).device_us
        steps = [state.costs(mode, launches, numbers).at_host_speed(slower * 20) for _ in range(2)]
        found = [each.cost(launches, numbers).device_us for each in steps]
        assert found == pytest.approx([alone + times * waits, max(alone - times * waits, 0.0)])


def test_no_file_has_what_ran_before() -> None:
    """What a step takes by what ran before is no table: a profile of it would give another table's times."""
    step: Any = HostState(SHOWN).costs(Mode.PIECEWISE, PIECES, BatchShape.decode(4).numbers)
    with pytest.raises(ConfigError, match="costs is a StepCosts; a profile has the CostTable"):
        Profile(costs=step, device="d", model="m")


def test_decodes_that_go_on_alone_are_told_the_same() -> None:
    """`decodes` says what `costs` does of a step and the next like it, and of the device's dense work."""
    for mode, launches in ((Mode.EAGER, EAGER), (Mode.PIECEWISE, PIECES), (Mode.FULL, FULL)):
        one, other, device = (HostState(SHOWN) for _ in range(3))
        for rows in (4, 4, 6):
            now, after = one.decodes(mode, launches[0], rows)
            for sides in (now, after):
                assert sides.host_us == host_us(other, mode, launches, rows)
                numbers = BatchShape.decode(rows).numbers
                device_us = device.costs(mode, launches, numbers).cost(launches, numbers).device_us
                assert sides.dense_us + COSTS.decode_attention_us(numbers) == device_us
    assert HostState(COSTS).decodes(Mode.EAGER, EAGER[0], 4)[1].dense_us == COSTS.eager.at(4)


def test_a_table_that_tells_neither_is_every_steps() -> None:
    numbers = BatchShape.decode(4).numbers
    state = HostState(COSTS)
    assert state.costs(Mode.EAGER, EAGER, numbers) is state.costs(Mode.EAGER, EAGER, numbers)
    assert state.costs(Mode.EAGER, EAGER, numbers).cost(EAGER, numbers) == COSTS.cost(EAGER, numbers)


def test_steps_that_take_alike_are_told_as_one_kind() -> None:
    """Where steps in a row take no less, only a size that never ran is told apart."""
    numbers = BatchShape.decode(4).numbers
    state = HostState(attrs.evolve(COSTS, effects=StepEffects(eager_new_us=40.0)))
    new, again, after = (state.costs(mode, EAGER, numbers) for mode in (Mode.EAGER, Mode.EAGER, Mode.FULL))
    assert new is not again is after


def test_sizes_that_the_process_ran_before_arent_new() -> None:
    """Neither to a state nor to a simulation that is told of them."""
    costs = attrs.evolve(COSTS, effects=StepEffects(eager_new_us=40.0))
    numbers = BatchShape.decode(4).numbers
    told = HostState(costs, {4})
    assert told.costs(Mode.EAGER, EAGER, numbers) is told.costs(Mode.EAGER, EAGER, numbers)
    requests = [TraceRequest(i, 0.0, 30, 20, ()) for i in range(3)]
    plain, none_new, all_new = (
        simulate(requests, "eager", costs=table, eager_sizes=sizes, stepwise=True).step_us
        for table, sizes in ((COSTS, ()), (costs, range(200)), (costs, ()))
    )
    assert none_new == plain < all_new


def test_a_simulation_has_one_state_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made once, with what it is told of: a second one would forget the first's steps."""
    made: list[tuple[int, ...]] = []

    def noted(costs: Any, eager_sizes: Any) -> HostState:
        made.append(tuple(eager_sizes))
        return HostState(costs, eager_sizes)

    monkeypatch.setattr(simulate_run, "HostState", noted)
    simulate([TraceRequest(0, 0.0, 30, 2, ())], "eager", costs=COSTS, server=Server(ranks=2), eager_sizes=(4, 8))
    assert made == [(4, 8), (4, 8)]


def test_a_simulation_tells_rows_of_padding_from_others() -> None:
    """Both ways of costing a step of decodes alone, a whole table and its sides, count the padding of a graph."""
    effects = StepEffects(padding_share=(0.0, 1.0))
    table = attrs.evolve(COSTS, effects=effects, full=Curve([8, 16], [800.0, 1600.0]))
    launch = Launch(Rows.ALL, GraphKey(Part.FULL, 16, 16, query_len=1))
    shape = BatchShape(decodes=[(1, 9)], decode_kv_tokens=90, max_kv_len=10)
    found = HostState(table).costs("full", (launch,), shape.numbers)
    first, again = HostState(table).decodes("full", launch, 9)
    assert found.launch_us(launch, shape.numbers)[0] == table.launch_us(launch, shape.numbers)[0] - 600.0
    assert first.dense_us == again.dense_us == 1000.0
