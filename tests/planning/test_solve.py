"""One ladder: the plan equals brute force, and the structure that makes it fast holds."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kpolicy.budgets import Usage
from kpolicy.errors import ConfigError, LadderError
from kpolicy.planning import Ladder, aligned_sizes, frontier, tied
from kpolicy.planning.solve import Sums, _layer, _layer_of_any, cheapest_path
from tests.planning.instances import cheapest_fit_us, ladders, subsets, times


@settings(max_examples=200, deadline=None)
@given(ladders())
def test_every_number_of_sizes_equals_brute_force(ladder: Ladder) -> None:
    """For each k the time is the least of all sets of at most k sizes, and the sizes named take that time."""
    found = frontier(ladder)
    for k in range(5):
        best = min(cheapest_fit_us(ladder, sizes) for sizes in subsets(ladder, k))
        assert found.us[min(k, found.most)] == pytest.approx(best)
        sizes = found.best(k)
        assert len(sizes) <= k
        assert ladder.time_us(sizes) == pytest.approx(best)
        assert cheapest_fit_us(ladder, sizes) == pytest.approx(best)


@settings(max_examples=150, deadline=None)
@given(ladders(escapes=False))
def test_steps_that_fit_replay(ladder: Ladder) -> None:
    """Where engines always replay what fits, the plan is the least over all sets under that rule."""
    found = frontier(ladder)
    for k in range(4):
        # The next size that holds a step; brute force over sets of candidates that aren't dominated finds the same.
        best = min(ladder.time_us(sizes) for sizes in subsets(ladder, k))
        assert found.us[min(k, found.most)] == pytest.approx(best)
        assert ladder.time_us(found.best(k)) == pytest.approx(best)


@settings(max_examples=150, deadline=None)
@given(ladders(), st.data())
def test_a_fixed_largest_size(ladder: Ladder, data: Any) -> None:
    """With the largest size fixed, every choice ends with it, and is the best of those that do."""
    last = data.draw(st.sampled_from(ladder.sizes.tolist()))
    found = frontier(ladder, largest=last)
    for k in range(1, 4):
        best = min(cheapest_fit_us(ladder, sizes) for sizes in subsets(ladder, k) if sizes and sizes[-1] == last)
        assert found.best(k)[-1] == last
        assert found.us[min(k, found.most)] == pytest.approx(best)
    assert np.isinf(found.us[0])


@settings(max_examples=200, deadline=None)
@given(ladders())
def test_costs_of_ranges_are_monge(ladder: Ladder) -> None:
    """Once dominated sizes are dropped, crossing ranges never cost less than nested ones."""
    sums = Sums.of(ladder)
    columns, prefix = sums.columns, sums.prefix
    num = len(columns) - 1

    def cost(i: int, j: int) -> float:
        return float(sums.tail[i] if j > num else prefix[j - 1, columns[j]] - prefix[j - 1, columns[i]])

    assert sums.ladder.rising
    for a in range(num + 1):
        for b in range(a + 1, num + 1):
            for c in range(b + 1, num + 1):
                for d in range(c + 1, num + 2):
                    assert cost(a, c) + cost(b, d) <= cost(a, d) + cost(b, c) + 1e-6


@settings(max_examples=200, deadline=None)
@given(ladders())
def test_one_more_size_saves_ever_less(ladder: Ladder) -> None:
    """The frontier is convex where steps take the escape when it is cheaper, so its gains are prices."""
    gains = -np.diff(frontier(ladder).us)
    assert (gains >= -1e-9).all()
    assert (np.diff(gains) <= 1e-6).all()


def test_a_time_that_falls_breaks_monge_until_dominated_sizes_are_dropped() -> None:
    """A size with a larger one as fast is dropped; without that, crossing ranges can cost less than nested ones."""
    ladder = Ladder.of(
        "decode", weights=[5, 5, 5, 5], sizes=[1, 2, 3, 4], graph_us=[10, 30, 12, 40], escape_us=[99, 99, 99, 99]
    )
    assert not ladder.rising
    left = ladder.without_dominated()
    assert left.sizes.tolist() == [1, 3, 4]
    assert left.rising


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 60))
def test_divide_and_conquer_equals_the_whole_layer(seed: int, num: int) -> None:
    """Both ways to work out a layer give the same times, for lists of any length."""
    rng = np.random.default_rng(seed)
    ladder = Ladder.of(
        "decode", weights=rng.integers(0, 5, num), sizes=range(1, num + 1), graph_us=rng.random(num).cumsum() + 1,
        escape_us=rng.random(num) * 50 + 1,
    )  # fmt: skip
    sums = Sums.of(ladder)
    fast = slow = np.concatenate([[0.0], np.full(len(sums.ladder.sizes), np.inf)])
    for k in range(1, min(7, len(sums.ladder.sizes)) + 1):
        fast, _ = _layer(fast, sums.prefix, sums.columns, k)
        slow, _ = _layer_of_any(slow, sums.prefix, sums.columns, k)
        assert np.allclose(fast, slow)


@settings(max_examples=100, deadline=None)
@given(ladders(), st.integers(0, 200))
def test_priced_path(ladder: Ladder, price: int) -> None:
    """With a price a size, the path is the best over all numbers of sizes of time and price."""
    found = frontier(ladder)
    total, sizes = cheapest_path(Sums.of(ladder), np.full(len(found.kept.sizes), float(price)))
    best = min(us + price * count for us, count in zip(found.us, found.choices, strict=True))
    assert total == pytest.approx(best)
    assert ladder.time_us(sizes) + price * len(sizes) == pytest.approx(best)


def test_kinds_tied_to_one_list() -> None:
    """Kinds that share a list are planned as one; each step still takes the next size."""
    decode = Ladder.of("decode", weights=[9, 0, 4, 0], sizes=[1, 2, 3, 4], graph_us=[5, 6, 7, 8], escape_us=[20] * 4)
    mixed = Ladder.of("mixed", weights=[0, 3, 0, 8], sizes=[1, 2, 3, 4], graph_us=[9, 8, 7, 30], escape_us=[25] * 4)
    both = tied("list", [decode, mixed])
    found = frontier(both)
    for k in range(5):
        best = min(decode.time_us(sizes) + mixed.time_us(sizes) for sizes in subsets(both, k))
        assert found.us[min(k, found.most)] == pytest.approx(best)
        assert both.time_us(found.best(k)) == pytest.approx(best)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 6), st.integers(1, 8), st.data())
def test_any_costs_equal_brute_force(num: int, most: int, data: Any) -> None:
    """Costs without any order, as kinds of one list or a limit on padding make them: the least over all sets."""
    sizes = sorted(data.draw(st.sets(st.integers(1, 9), min_size=num, max_size=num)))
    cost = data.draw(st.lists(st.lists(times, min_size=most, max_size=most), min_size=num, max_size=num))
    escape = data.draw(st.lists(times, min_size=most, max_size=most))
    ladder = Ladder(name="list", sizes=sizes, demands=range(1, most + 1), cost_us=cost, escape_us=escape)
    found = frontier(ladder)
    for k in range(num + 1):
        best = min(ladder.time_us(chosen) for chosen in subsets(ladder, k))
        assert found.us[min(k, found.most)] == pytest.approx(best)
        assert ladder.time_us(found.best(k)) == pytest.approx(best)


def test_a_size_that_spoils_a_larger_one_does_not_dominate() -> None:
    """Size 2 beats size 1 on the steps of 1, but takes steps of 2 away from size 3, where they are better off."""
    ladder = Ladder(
        name="list", sizes=[1, 2, 3], demands=[1, 2, 3], escape_us=[50, 50, 50],
        cost_us=[[5, 0, 0], [4, 40, 0], [30, 6, 7]],
    )  # fmt: skip
    assert ladder.without_dominated().sizes.tolist() == [1, 2, 3]
    assert frontier(ladder).best(2) == (1, 3)


@pytest.mark.parametrize("resource", ["graphs", "streams", "bytes", "seconds"])
def test_a_dearer_size_does_not_dominate(resource: str) -> None:
    """A larger size that takes no more time but more of anything leaves the smaller one a candidate."""
    price = Usage(graphs=1, streams=1, bytes=1, seconds=1)
    dear = attrs.evolve(price, **{resource: 2})
    given = {"weights": [1, 1], "sizes": [1, 2], "graph_us": [10, 10], "escape_us": [99, 99]}
    assert Ladder.of("decode", **given, usage=[price, dear]).without_dominated().sizes.tolist() == [1, 2]
    assert Ladder.of("decode", **given, usage=[dear, price]).without_dominated().sizes.tolist() == [2]


def test_fewest_sizes() -> None:
    """Sizes that save nothing aren't taken, however many are allowed."""
    flat = Ladder.of("decode", weights=[1] * 8, sizes=range(1, 9), graph_us=[5] * 8, escape_us=[9] * 8)
    assert frontier(flat).best(8) == (8,)
    nothing = Ladder.of("decode", weights=[1] * 8, sizes=range(1, 9), graph_us=[50] * 8, escape_us=[9] * 8)
    assert frontier(nothing).best(8) == ()


def test_alignment() -> None:
    """Aligned candidates are the multiples; none left is an error that says what to do."""
    assert aligned_sizes(range(1, 13), 4) == (4, 8, 12)
    with pytest.raises(LadderError, match="none of the 3 candidate sizes up to 3 is a multiple of 4; raise"):
        aligned_sizes([1, 2, 3], 4)
    with pytest.raises(ConfigError, match="multiple_of is 0"):
        aligned_sizes([1, 2, 3], 0)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"sizes": [2, 1]}, "must be whole numbers that rise"),
        ({"sizes": [1.5, 2.5]}, r"whole numbers; these are \[1\.5, 2\.5\]"),
        ({"sizes": []}, "has no candidate size"),
        ({"demands": [0, 1]}, "demands of the ladder decode"),
        ({"escape_us": [1.0]}, "one cost a pair and one escape a demand"),
        ({"escape_us": [1.0, float("nan")]}, "isn't a finite number"),
        ({"cost_us": [[1.0, 2.0], [-1.0, 2.0]]}, "from 0 up"),
        ({"usage": ()}, "0 usages for 2 sizes"),
    ],
)
def test_bad_ladders(change: dict[str, Any], problem: str) -> None:
    """A ladder that contradicts itself is an error that says where."""
    good = {"sizes": [1, 2], "demands": [1, 2], "cost_us": [[1.0, 2.0], [1.0, 2.0]], "escape_us": [3.0, 3.0]}
    Ladder(name="decode", **good)
    with pytest.raises(LadderError, match=problem):
        Ladder(name="decode", **{**good, **change})


def test_sizes_that_are_not_candidates() -> None:
    """Scoring a size without a cost, or ending with one, is an error."""
    with pytest.raises(LadderError, match="1 times for 2 sizes; one time a size"):
        Ladder.of("decode", weights=[1, 1], sizes=[1, 2], graph_us=[5], escape_us=[9, 9])
    ladder = Ladder.of("decode", weights=[1, 1], sizes=[2], graph_us=[5], escape_us=[9, 9])
    with pytest.raises(LadderError, match="3 isn't a candidate of the ladder decode"):
        ladder.time_us([2, 3])
    with pytest.raises(LadderError, match="largest size 1 isn't a candidate"):
        frontier(ladder, largest=1)
    with pytest.raises(LadderError, match="same candidate sizes"):
        tied("list", [])
