"""What a simulation comes to from several starts among its profile's notes."""

from __future__ import annotations

import json

import attrs
import pytest

from kpolicy.costs import analytic_costs
from kpolicy.errors import ConfigError
from kpolicy.scheduling.generator import generate_trace
from kpolicy.served_host import ServedHost
from kpolicy.simulate import SimResult, simulate
from kpolicy.simulate.starts import PERCENTS, Range, Starts

SERVED = ServedHost(scheduler_us=1500.0, host_work_us=(20.0, 20.0, 60.0, 20.0, 40.0))
COSTS = attrs.evolve(analytic_costs(), measured=True, host_work_us=20.0, served=SERVED)
TRACE = generate_trace(seed=0, num_requests=12)


def served(policy: str = "eager", seed: int = 0) -> SimResult:
    return simulate(TRACE, policy, costs=COSTS, attention="gqa", seed=seed)


def test_a_range_is_the_least_the_middle_and_the_most() -> None:
    """The middle of an even number is between two."""
    assert Range.of([3.0, 1.0, 7.0]) == Range(least=1.0, middle=3.0, most=7.0)
    assert Range.of([4.0, 1.0]) == Range(least=1.0, middle=2.5, most=4.0)


def test_ranges_are_of_each_percentile_over_all_starts() -> None:
    """Of each latency by itself: the middle of one may be another start's than that of the next."""
    results = [served(seed=seed) for seed in range(4)]
    starts = Starts.of(results)
    assert starts.seeds == (0, 1, 2, 3)
    for name in ("ttft", "gap", "e2e"):
        for percent in PERCENTS:
            values = [getattr(getattr(result, name), percent) for result in results]
            assert getattr(starts, name)[percent] == Range.of(values)
    assert starts.ttft["p50"].least < starts.ttft["p50"].most
    assert json.loads(json.dumps(starts.as_dict()))["ttft"]["p50"] == attrs.asdict(starts.ttft["p50"])


def test_results_of_different_things_are_refused() -> None:
    """They aren't starts of one simulation; nor is nothing."""
    with pytest.raises(ConfigError, match=r"these are eager on .*, vllm on .*seed=0, 1 and so on"):
        Starts.of([served(), served("vllm")])
    with pytest.raises(ConfigError, match="these are none"):
        Starts.of([])
