"""Several ladders under budgets: the choice equals brute force and the integer programme."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kpolicy.budgets import Budget, Usage
from kpolicy.errors import BudgetRefused, ConfigError
from kpolicy.planning import Ladder, choose, frontier, frontiers, joint_curve, tied
from kpolicy.planning.programme import solve_programme
from tests.planning.instances import best_us, budgets, cheapest_fit_us, ladders, subsets, usage_of, usages, within

NAMES = ("decode", "verify", "piecewise")


@st.composite
def problems(draw: Any, *, most: int = 3) -> tuple[Ladder, ...]:
    """One to three ladders of their own alignments, escapes and prices."""
    return tuple(draw(ladders(name=name)) for name in NAMES[: draw(st.integers(1, most))])


def used(given: tuple[Ladder, ...], sizes: Any) -> Usage:
    return sum((usage_of(each, sizes[each.name]) for each in given), Usage())


@settings(max_examples=120, deadline=None)
@given(problems(most=2), budgets, st.none() | st.integers(0, 4))
def test_equals_brute_force(problem: tuple[Ladder, ...], budget: Budget, most: int | None) -> None:
    """The time is the least of all choices within every budget at once, and the sizes named take it."""
    found = choose(problem, budget, most_sizes=most)
    best = best_us(problem, budget, most, fit=cheapest_fit_us)
    assert found.us == pytest.approx(best)
    assert found.gap == pytest.approx(0.0)
    assert sum(each.time_us(found.sizes[each.name]) for each in problem) == pytest.approx(best)
    assert within(budget, found.usage)


@settings(max_examples=60, deadline=None)
@given(problems(), budgets, st.none() | st.integers(0, 6))
def test_the_price_is_that_of_the_next_size(problem: tuple[Ladder, ...], budget: Budget, most: int | None) -> None:
    """What the best further size of any list would save, whatever the budget, though it bounds the work."""
    found = choose(problem, budget, most_sizes=most)
    gains = [each.gain(len(found.sizes[each.ladder.name])) for each in frontiers(problem)]
    assert found.price_us == max(0.0, *gains)


@pytest.mark.parametrize("growing", [False, True])
def test_a_budget_bounds_the_work(monkeypatch: pytest.MonkeyPatch, *, growing: bool) -> None:
    """No more sizes are tried than the budget holds of the cheapest, and one more for its price."""
    price = Usage(graphs=1, bytes=100)
    usage = [attrs.evolve(price, bytes=100 + i) for i in range(50)] if growing else price
    ladder = Ladder.of(
        "decode", weights=[1.0] * 50, sizes=range(1, 51), graph_us=range(100, 150), escape_us=[1000.0] * 50,
        usage=usage,
    )  # fmt: skip
    asked = []

    def noted(given: Ladder, most: int | None = None, **rest: Any) -> Any:
        asked.append(most)
        return frontier(given, most, **rest)

    monkeypatch.setattr(import_module("kpolicy.planning.choose"), "frontier", noted)
    assert choose([ladder], Budget(bytes=740)).num_sizes <= 7
    assert asked == [8]
    choose([ladder], Budget(bytes=740), most_sizes=3)
    assert asked == [8, 4]
    choose([ladder])
    assert asked == [8, 4, None]


@settings(max_examples=60, deadline=None)
@given(problems(), budgets, st.none() | st.integers(0, 6))
def test_equals_the_integer_programme(problem: tuple[Ladder, ...], budget: Budget, most: int | None) -> None:
    """HiGHS, told nothing of ranges or order, finds no better choice and no worse one."""
    pytest.importorskip("highspy")
    found = choose(problem, budget, most_sizes=most)
    sizes = solve_programme(problem, budget, most_sizes=most)
    assert within(budget, used(problem, sizes))
    assert found.us == pytest.approx(sum(cheapest_fit_us(each, sizes[each.name]) for each in problem), rel=1e-6)


@settings(max_examples=60, deadline=None)
@given(ladders(), ladders(name="verify"), budgets, st.data())
def test_unequal_prices_have_a_proven_gap(one: Ladder, other: Ladder, budget: Budget, data: Any) -> None:
    """With a price of its own for each size, the choice is within the budget and its bound is below the true best."""
    priced = tuple(
        attrs.evolve(each, usage=data.draw(st.lists(usages, min_size=len(each.sizes), max_size=len(each.sizes))))
        for each in (one, other)
    )
    found = choose(priced, budget)
    best = best_us(priced, budget, None, fit=cheapest_fit_us)
    assert within(budget, found.usage)
    assert found.bound_us <= best * (1 + 1e-9) + 1e-9
    assert found.us >= best * (1 - 1e-9)
    assert found.us <= found.bound_us * (1 + found.gap) * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(ladders(), budgets, st.data())
def test_unequal_prices_exactly(one: Ladder, budget: Budget, data: Any) -> None:
    """`exact` gives the best choice under unequal prices."""
    pytest.importorskip("highspy")
    priced = attrs.evolve(one, usage=data.draw(st.lists(usages, min_size=len(one.sizes), max_size=len(one.sizes))))
    found = choose([priced], budget, exact=True)
    assert found.us == pytest.approx(best_us([priced], budget, None, fit=cheapest_fit_us), rel=1e-6)


@settings(max_examples=60, deadline=None)
@given(ladders(escapes=False), ladders(escapes=False), st.integers(0, 4))
def test_the_programme_knows_engines_rules(one: Ladder, other: Ladder, most: int) -> None:
    """Steps that fit replay the next size, also where another way were better: then too it equals brute force."""
    pytest.importorskip("highspy")
    at = np.intersect1d(one.sizes, other.sizes)
    if not len(at):
        return
    list_of = tied("list", [each.kept(np.isin(each.sizes, at)) for each in (one, other)])
    sizes = solve_programme([list_of], most_sizes=most)["list"]
    best = min(list_of.time_us(found) for found in subsets(list_of, most))
    assert list_of.time_us(sizes) == pytest.approx(best, rel=1e-6)
    assert choose([list_of], most_sizes=most).us == pytest.approx(best)


@settings(max_examples=80, deadline=None)
@given(problems())
def test_joint_curve(problem: tuple[Ladder, ...]) -> None:
    """The curve over all ladders is what `choose` takes for each number of sizes, and its steps are the price."""
    curve = joint_curve(frontiers(problem))
    for k in range(min(5, len(curve))):
        assert curve[k] == pytest.approx(choose(problem, most_sizes=k).us)
    found = choose(problem, most_sizes=2)
    assert found.price_us == pytest.approx(float(curve[2] - curve[3]) if len(curve) > 3 else 0.0)


def test_a_gap_is_small_on_a_real_size() -> None:
    """Sizes whose memory grows with them: the priced choice is within one per cent of its bound."""
    rng = np.random.default_rng(1)
    num = 256
    ladder = Ladder.of(
        "decode", weights=rng.pareto(1.1, num), sizes=range(1, num + 1),
        graph_us=np.arange(1, num + 1) * 30.0 + 5000, escape_us=np.full(num, 20000.0),
        usage=[Usage(graphs=1, bytes=2_000_000 + 20_000 * size) for size in range(1, num + 1)],
    )  # fmt: skip
    found = choose([ladder], Budget(bytes=64_000_000))
    assert found.usage.bytes <= 64_000_000
    assert 0 <= found.gap < 0.01
    assert len(found.sizes["decode"]) > 10


def test_budget_that_nothing_fits() -> None:
    """A largest size that must be captured and doesn't fit is refused by name; without one the plan is empty."""
    ladder = Ladder.of("decode", weights=[3], sizes=[1], graph_us=[1], escape_us=[9], usage=Usage(1, 1, 50, 1.0))
    assert choose([ladder], Budget(bytes=49)).sizes == {"decode": ()}
    with pytest.raises(BudgetRefused, match=r"\(decode 1\) don't fit the budget of 49 bytes"):
        choose([ladder], Budget(bytes=49), largest={"decode": 1})
    with pytest.raises(BudgetRefused, match="the budget of 0 sizes"):
        choose([ladder], most_sizes=0, largest={"decode": 1})


def test_a_programme_that_is_too_large() -> None:
    """Hundreds of sizes with prices of their own are refused, with what to do; the choice with a bound takes them."""
    pytest.importorskip("highspy")
    num = 512
    ladder = Ladder.of(
        "decode", weights=[1] * num, sizes=range(1, num + 1), graph_us=range(1, num + 1), escape_us=[9999] * num,
        usage=[Usage(bytes=size) for size in range(1, num + 1)],
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"131,328 variables, over 125,000, for 512 candidate sizes. Lower"):
        choose([ladder], Budget(bytes=3000), exact=True)
    assert choose([ladder], Budget(bytes=3000)).gap < 0.05


def test_bad_arguments() -> None:
    """Names that match no ladder, shared names and negative numbers are errors that say so."""
    ladder = Ladder.of("decode", weights=[3], sizes=[1], graph_us=[1], escape_us=[9])
    with pytest.raises(ConfigError, match="largest names the list 'prefill'; there are decode"):
        choose([ladder], largest={"prefill": 1})
    with pytest.raises(ConfigError, match="share a name"):
        choose([ladder, ladder])
    with pytest.raises(ConfigError, match="most_sizes is -1"):
        choose([ladder], most_sizes=-1)
