"""A bound on what any step loses against a graph of its own size."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kpolicy.errors import BudgetRefused, ConfigError
from kpolicy.planning import Ladder, choose
from kpolicy.policies import get_policy
from kpolicy.trace_plan import plan_trace
from tests.planning.instances import cheapest_fit_us, ladders
from tests.planning.workloads import costs, server, trace

GIVEN: dict[str, Any] = {"policy": "sglang", "server": server(), "costs": costs(), "hold_out": False}


def loses(ladder: Ladder, chosen: tuple[int, ...], most_loss: float) -> int:
    """True sizes that lose more than that by the choice, each at the smallest size that holds it or without a graph."""
    found = 0
    for i, demand in enumerate(ladder.demands.tolist()):
        own = next((j for j, size in enumerate(ladder.sizes) if size >= demand), None)
        if own is None:
            continue
        at = next((j for j, size in enumerate(ladder.sizes) if size >= demand and size in chosen), None)
        takes = ladder.escape_us[i] if at is None else ladder.cost_us[at, i]
        found += bool(takes > (1 + most_loss) * ladder.cost_us[own, i] + 1e-9)
    return found


@settings(max_examples=80, deadline=None)
@given(ladders(), st.sampled_from([0.0, 0.05, 0.3, 2.0]), st.integers(0, 4))
def test_equals_brute_force(ladder: Ladder, most_loss: float, most: int) -> None:
    """Of all choices that hold the bound the quickest; where none of so many sizes does, it costs the penalty."""
    sizes = ladder.sizes.tolist()
    sets = [each for k in range(most + 1) for each in combinations(sizes, k) if not loses(ladder, each, most_loss)]
    penalty_us = ladder.most_us + 1.0
    found = choose([ladder.bounded(most_loss, penalty_us)], most_sizes=most)
    assert (found.us < penalty_us) == bool(sets)
    assume(sets)
    assert not loses(ladder, found.sizes[ladder.name], most_loss)
    assert found.us == pytest.approx(min(cheapest_fit_us(ladder, each) for each in sets))


@pytest.mark.parametrize("most_loss", [0.02, 0.2])
def test_no_size_of_a_step_loses_more(most_loss: float) -> None:
    """Decode steps of every number of requests are within it, seen or not; a looser bound takes fewer sizes."""
    table = costs()
    sizes = plan_trace(trace(80, gap_s=1.0), most_loss=most_loss, **GIVEN).plan.lists["decode"]
    assert sizes[-1] == 64
    dense = np.array([table.full.at(reqs) for reqs in range(1, 65)]) + table.step_us
    padded = np.array([table.full.at(next(s for s in sizes if s >= reqs)) for reqs in range(1, 65)]) + table.step_us
    # Attention is part of the time that the loss is a share of.
    assert (padded <= dense * (1 + most_loss) + 30).all()
    tighter = plan_trace(trace(80, gap_s=1.0), most_loss=most_loss / 4, **GIVEN).plan.lists["decode"]
    assert len(tighter) > len(sizes)


def test_a_list_of_its_own() -> None:
    """A bound for decode steps alone leaves the other list as it was."""
    free, bounded = (plan_trace(trace(), most_loss=each, **GIVEN).plan for each in (None, {"decode": 0.02}))
    both = plan_trace(trace(), most_loss=0.02, **GIVEN).plan
    assert len(free.lists["decode"]) < len(bounded.lists["decode"])
    assert len(bounded.lists["prefill"]) < len(both.lists["prefill"])
    assert all(us == float("inf") for us in bounded.curve_us[: len(free.lists["decode"])])


def test_a_budget_that_cant_hold_it() -> None:
    """The error says how many sizes it takes, and so many are enough."""
    with pytest.raises(BudgetRefused, match=r"3 sizes can't keep every step as near .*: it takes \d+ sizes") as refused:
        plan_trace(trace(), most_sizes=3, most_loss=0.1, **GIVEN)
    takes = int(str(refused.value).split("it takes ")[1].split()[0])
    assert plan_trace(trace(), most_sizes=takes, most_loss=0.1, **GIVEN).plan.num_sizes == takes
    with pytest.raises(ConfigError, match="most_loss names the list 'decoed'; there are decode, prefill"):
        plan_trace(trace(), most_loss={"decoed": 0.1}, **GIVEN)
    with pytest.raises(ConfigError, match="most_loss is -1"):
        plan_trace(trace(), most_loss=-1, **GIVEN)


def test_a_loss_that_cant_be_held_is_no_budget() -> None:
    """What wasn't asked for isn't named: no number of sizes where `worth` alone limits them, nor a largest size."""
    never = r"^no plan of up to \d+ sizes keeps .* or don't fix the largest size\.$"
    for most_sizes in (None, 3):
        with pytest.raises(BudgetRefused, match=never):
            plan_trace(trace(), most_loss=0.0, largest={"decode": 2}, most_sizes=most_sizes, **GIVEN)
    more = r"^3 sizes can't keep .*: it takes \d+ sizes\. Raise the budget or the loss\.$"
    with pytest.raises(BudgetRefused, match=more):
        plan_trace(trace(), most_sizes=3, most_loss=0.1, worth=0.5, **GIVEN)


@settings(max_examples=60, deadline=None)
@given(ladders(), st.data())
def test_against_another_list_equals_brute_force(ladder: Ladder, data: st.DataObject) -> None:
    """A step that the other list has a graph for is compared with that one; the list itself never loses."""
    sizes = ladder.sizes.tolist()
    theirs = sorted(data.draw(st.sets(st.sampled_from(sizes), min_size=1)))
    columns = {}
    for i, demand in enumerate(ladder.demands.tolist()):
        at = next((size for size in theirs if size >= demand), next((size for size in sizes if size >= demand), None))
        if at is not None:
            columns[i] = ladder.cost_us[sizes.index(at), i]

    def within(chosen: tuple[int, ...]) -> bool:
        for i, most in columns.items():
            demand = ladder.demands[i]
            at = next((j for j, size in enumerate(sizes) if size >= demand and size in chosen), None)
            if (ladder.escape_us[i] if at is None else ladder.cost_us[at, i]) > most + 1e-9:
                return False
        return True

    penalty_us = ladder.most_us + 1.0
    found = choose([ladder.bounded(0.0, penalty_us, theirs)], most_sizes=3)
    sets = [each for k in range(4) for each in combinations(sizes, k) if within(each)]
    assert (found.us < penalty_us) == bool(sets)
    if sets:
        assert within(found.sizes[ladder.name])


def test_no_step_is_slower_than_with_an_engines_own_list() -> None:
    """As good as SGLang's list for every decode size, with fewer sizes than as near to a graph of its own takes."""
    table = costs()
    own, theirs = (
        plan_trace(trace(80, gap_s=1.0), most_loss=0.0, against=each, **GIVEN).plan.lists["decode"]
        for each in (None, "sglang")
    )
    stock = get_policy("sglang").sizes(GIVEN["server"].settings).decode
    assert len(theirs) < len(own)
    assert all(table.full.at(_next(theirs, reqs)) <= table.full.at(_next(stock, reqs)) for reqs in range(1, 65))
    with pytest.raises(ConfigError, match="give most_loss too"):
        plan_trace(trace(), against="sglang", **GIVEN)
    with pytest.raises(ConfigError, match="'eager' captures nothing to compare with"):
        plan_trace(trace(), against="eager", most_loss=0.0, **GIVEN)


def test_a_plan_against_another_list_is_scored_out_of_sample() -> None:
    """The second half is scored without the bound."""
    given = GIVEN | {"hold_out": True}
    assert plan_trace(trace(), most_loss=0.0, against="sglang", **given).held_out is not None


def test_a_size_between_candidates_counts_as_the_one_below() -> None:
    """A list that pads 3 requests to 7 lets them have the graph of 6, not that of 8."""
    ladder = Ladder.of("decode", weights=[0, 0, 1], sizes=[4, 6, 8], graph_us=[4, 6, 8], escape_us=[99] * 3)
    for chosen, within in (((6,), True), ((8,), False)):
        only = ladder.bounded(0.0, 1e6, [7]).kept(np.isin(ladder.sizes, chosen))
        assert (choose([only], most_sizes=1).us < 1e6) == within
    # Where the one below doesn't hold the step, the least that does is as near as can be.
    few = Ladder.of("decode", weights=[0, 0, 0, 0, 1], sizes=[4, 8], graph_us=[4, 8], escape_us=[99] * 5)
    assert choose([few.bounded(0.0, 1e6, [6])], most_sizes=1).us < 1e6


def _next(sizes: tuple[int, ...], size: int) -> int:
    return next(each for each in sizes if each >= size)
