from __future__ import annotations

import math
import statistics

import pytest

from kpolicy.errors import ConfigError
from kpolicy.scheduling.generator import FITTED_DURATION_S, FITTED_RATE, LARGEST_TRACE, generate_trace
from kpolicy.scheduling.traces import DEFAULT_FILE, Trace, read_trace
from tests.scheduling import burstiness, figures, real_file

# Azure's conversation trace of 2023, as published: mean, median, 95th percentile.
PROMPT = (1155, 1020, 4083)
OUTPUT = (211, 129, 451)


@pytest.fixture(scope="module")
def large() -> Trace:
    return generate_trace(seed=0, num_requests=20_000)


def test_generated_figures_are_the_fitted_ones(large):
    """20,000 generated requests have the rate, lengths and burstiness of the trace they were fitted to."""
    prompt = figures([one.prompt_tokens for one in large.requests])
    output = figures([one.output_tokens for one in large.requests])
    assert len(large) == 20_000
    assert prompt[:3] == pytest.approx(PROMPT, rel=0.1)
    assert output[:3] == pytest.approx(OUTPUT, rel=0.1)
    assert prompt[3] <= 14_050
    assert output[3] <= 1_000
    assert len(large) / large.span_s == pytest.approx(FITTED_RATE, rel=0.1)
    assert 1.2 <= burstiness(large) <= 1.7


def test_generated_lengths_follow_the_real_file(large):
    """Every fifth percentile of both lengths is within a tenth, or five tokens, of the real file's."""
    real = read_trace(real_file(DEFAULT_FILE))
    for name in ("prompt_tokens", "output_tokens"):
        ours, theirs = (
            statistics.quantiles([getattr(one, name) for one in trace.requests], n=20, method="inclusive")
            for trace in (large, real)
        )
        assert ours == pytest.approx(theirs, rel=0.1, abs=5)


@pytest.mark.parametrize("bin_s", [1.0, 10.0, 60.0])
def test_generated_arrivals_are_as_uneven_as_the_real_ones(large, bin_s):
    """Arrivals in 1, 10 and 60 s vary like the real file's, so a busy minute is as busy."""
    assert burstiness(large, bin_s) == pytest.approx(burstiness(read_trace(real_file(DEFAULT_FILE)), bin_s), rel=0.4)


def test_a_seed_gives_one_trace():
    """The same arguments give the same trace; another seed another; a longer trace begins with the shorter."""
    assert generate_trace(seed=3, num_requests=500) == generate_trace(seed=3, num_requests=500)
    assert generate_trace(seed=3, num_requests=500).requests != generate_trace(seed=4, num_requests=500).requests
    assert generate_trace(seed=3, num_requests=500).requests[:200] == generate_trace(seed=3, num_requests=200).requests
    assert generate_trace(seed=3, duration_s=50).requests == generate_trace(seed=3).window(0, 50).requests


def test_duration_bounds_arrivals():
    """Without a number of requests the trace ends with its duration, and nearly fills it."""
    trace = generate_trace(duration_s=600)
    assert 590 < trace.requests[-1].arrival_s < 600
    assert generate_trace().requests[-1].arrival_s < FITTED_DURATION_S
    assert trace.format == "generated"
    assert "seed 0, 600 s, 5.53 requests/s" in trace.source


def test_rate_squeezes_the_same_arrivals():
    """Ten times the rate gives the same requests in a tenth of the time."""
    slow, fast = generate_trace(num_requests=300), generate_trace(num_requests=300, rate=10 * FITTED_RATE)
    assert [one.prompt_tokens for one in slow.requests] == [one.prompt_tokens for one in fast.requests]
    assert fast.span_s == pytest.approx(slow.span_s / 10)


def test_no_requests_is_an_empty_trace():
    """Nothing asked for, or too short a time for an arrival, gives a trace without requests."""
    assert len(generate_trace(num_requests=0)) == 0
    assert len(generate_trace(duration_s=1e-9)) == 0


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"rate": 0}, "rate is 0"),
        ({"rate": math.inf}, "rate is inf"),
        ({"duration_s": -1}, "duration_s is -1"),
        ({"duration_s": math.nan}, "duration_s is nan"),
        ({"num_requests": -1}, "-1 requests"),
        ({"num_requests": 2.5}, r"num_requests is 2\.5; it must be a whole number"),
        ({"num_requests": LARGEST_TRACE + 1}, f"0 to {LARGEST_TRACE} can"),
        ({"duration_s": 1e9}, f"0 to {LARGEST_TRACE} can"),
        ({"num_requests": 5, "rate": 5e-324}, "arrives at inf"),
        ({"rate": "5"}, "rate is '5'; it must be a number"),
        ({"duration_s": None}, "duration_s is None"),
        ({"seed": "one"}, "seed is 'one'; it must be a whole number"),
    ],
)
def test_impossible_arguments_are_refused(arguments, problem):
    """Arguments that no trace can have, or that would fill the memory, are errors that name the value."""
    with pytest.raises(ConfigError, match=problem):
        generate_trace(**arguments)
