"""Percentiles: exact below a size, within the stated error above it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kpolicy.simulate import percentiles
from kpolicy.simulate.percentiles import RELATIVE_ERROR, Percentiles, Spread
from kpolicy.trace_run import weighted_percentile

weighted = st.lists(st.tuples(st.floats(0.1, 1e9), st.integers(1, 1000)), min_size=1, max_size=60)


@given(weighted)
def test_few_values_are_exact(values: list[tuple[float, int]]) -> None:
    """The same percentiles as those of `kpolicy run`, and the very sum of weights."""
    kept = Percentiles()
    for value, weight in values:
        kept.add(value, weight)
    spread = kept.spread()
    ordered = sorted(values)
    assert (spread.p50, spread.p90, spread.p99) == tuple(weighted_percentile(ordered, each) for each in (50, 90, 99))
    assert spread.max == ordered[-1][0]
    assert spread.count == sum(weight for _, weight in values)
    assert spread.mean == pytest.approx(sum(value * weight for value, weight in values) / spread.count)
    assert spread.relative_error == 0.0
    assert list(spread.curve) == [weighted_percentile(ordered, each) for each in percentiles.CURVE_PERCENTS]


@pytest.mark.parametrize("draw", ["wide", "narrow", "same"])
def test_many_values_are_within_the_stated_error(draw: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the size a sketch answers, and says by how much it may be off; count, mean and largest stay exact."""
    monkeypatch.setattr(percentiles, "_AT_ONCE", 500)
    source = random.Random(5)  # noqa: S311 - not for secrets
    sketched, exact = Percentiles(exact=1000), Percentiles()
    for _ in range(20_000):
        value = {"wide": 10 ** source.uniform(0, 8), "narrow": source.uniform(5000, 5100), "same": 777.0}[draw]
        weight = source.randint(1, 9)
        sketched.add(value, weight)
        exact.add(value, weight)
    got, wanted = sketched.spread(), exact.spread()
    assert (got.relative_error, wanted.relative_error) == (RELATIVE_ERROR, 0.0)
    assert (got.count, got.max) == (wanted.count, wanted.max)
    assert got.mean == pytest.approx(wanted.mean)
    for name in ("p50", "p90", "p99"):
        assert getattr(got, name) == pytest.approx(getattr(wanted, name), rel=RELATIVE_ERROR * 1.01)
    # The sketch's rank may be the next entry's, which is a little further away here.
    assert got.curve == pytest.approx(wanted.curve, rel=3 * RELATIVE_ERROR)
    assert len(sketched.values) <= 1000


def test_a_long_run_says_that_its_percentiles_are_near(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulation whose gaps are too many to keep has the same result but for percentiles within the error."""
    from kpolicy.scheduling.generator import generate_trace
    from kpolicy.simulate import simulate

    trace = generate_trace(num_requests=200, seed=1)
    exact = simulate(trace, "vllm")
    monkeypatch.setattr(Percentiles.__init__, "__defaults__", (500,))
    monkeypatch.setattr(percentiles, "_AT_ONCE", 300)
    near = simulate(trace, "vllm")
    assert (exact.gap.relative_error, near.gap.relative_error, near.ttft.relative_error) == (0.0, RELATIVE_ERROR, 0.0)
    for name in ("p50", "p90", "p99"):
        assert getattr(near.gap, name) == pytest.approx(getattr(exact.gap, name), rel=RELATIVE_ERROR * 1.01)
    assert (near.gap.count, near.gap.max, near.ttft, near.e2e) == (
        exact.gap.count,
        exact.gap.max,
        exact.ttft,
        exact.e2e,
    )


def test_nothing_has_no_spread() -> None:
    """Without values everything is 0."""
    assert Percentiles().spread() == Spread()
