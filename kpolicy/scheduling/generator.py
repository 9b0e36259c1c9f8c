"""A seeded trace for when no trace file is at hand, fitted to Azure's conversation trace of 2023.

Only figures of that trace stand here: quantiles of prompt and output lengths, the mean rate and how uneven arrivals
are. docs/traces.md sets the generated figures beside the real ones.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections.abc import Iterator

from kpolicy.errors import ConfigError
from kpolicy.scheduling.traces import Trace, TraceRequest, real
from kpolicy.shapes import plain_int
from kpolicy.words import some

__all__ = ["FITTED_DURATION_S", "FITTED_RATE", "LARGEST_TRACE", "generate_trace"]

FITTED_RATE = 5.53
"""Requests a second of the fitted trace, on average."""

FITTED_DURATION_S = 3502.0
"""Seconds that the fitted trace spans."""

LARGEST_TRACE = 10_000_000
"""No generated trace may have more requests: at some 150 bytes each it would need over a gigabyte."""

# (share of requests at or below, tokens), joined by straight lines. Rounded quantiles of azure_llm_2023_conv.csv
# (CC BY 4.0; Patel and others, "Splitwise", ISCA 2024). Points stand close where the density jumps.
_PROMPT_QUANTILES = (
    (0.0, 2),
    (0.01, 30),
    (0.025, 120),
    (0.05, 180),
    (0.10, 207),
    (0.15, 372),
    (0.20, 387),
    (0.30, 403),
    (0.35, 414),
    (0.40, 703),
    (0.45, 984),
    (0.50, 1020),
    (0.60, 1070),
    (0.70, 1130),
    (0.75, 1190),
    (0.80, 1315),
    (0.85, 1880),
    (0.90, 2730),
    (0.925, 4075),
    (0.95, 4083),
    (0.99, 4140),
    (0.995, 4830),
    (0.999, 6180),
    (1.0, 14050),
)
_OUTPUT_QUANTILES = (
    (0.0, 7),
    (0.01, 16),
    (0.025, 28),
    (0.05, 41),
    (0.10, 54),
    (0.15, 67),
    (0.20, 77),
    (0.30, 91),
    (0.40, 103),
    (0.50, 129),
    (0.55, 151),
    (0.60, 177),
    (0.65, 217),
    (0.70, 384),
    (0.80, 400),
    (0.90, 424),
    (0.95, 451),
    (0.975, 522),
    (0.99, 601),
    (0.995, 643),
    (0.999, 954),
    (1.0, 1000),
)
# Arrivals are Poisson at a level that is drawn anew, from a gamma distribution, every `_LEVEL_S` seconds. The variance
# of arrivals in 1 s is then 1 + _EXCESS times their mean. In the real trace nearly all of the excess is slow drift
# (counts one second and one minute apart correlate alike), hence levels this long: they fit 1 s, 10 s and 60 s alike.
_EXCESS = 0.385
_LEVEL_S = 45.0


def generate_trace(
    *,
    seed: int = 0,
    num_requests: int | None = None,
    duration_s: float = FITTED_DURATION_S,
    rate: float = FITTED_RATE,
) -> Trace:
    """A trace with the rate, burstiness and lengths of Azure's conversation trace; the same seed gives the same one.

    Prompt and output lengths are drawn independently of each other and of the time. Another rate squeezes or
    stretches the same arrivals, as `Trace.scaled` does.

    Args:
        seed: picks the trace.
        num_requests: how many requests; by default as many as arrive in `duration_s`.
        duration_s: seconds of arrivals; without effect when `num_requests` is given.
        rate: requests a second, on average.

    Raises:
        ConfigError: num_requests is negative, duration_s or rate isn't above 0 and finite, seed isn't a whole number,
            or there would be more than `LARGEST_TRACE` requests.
    """
    rate, whole_seed = _checked("rate", rate), plain_int(seed)
    if type(whole_seed) is not int:
        raise ConfigError(f"seed is {seed!r:.80}; it must be a whole number.")
    stretch = FITTED_RATE / rate
    if num_requests is None:
        duration_s = _checked("duration_s", duration_s)
        expected = duration_s * rate
        extent = f"{duration_s:g} s"
    else:
        num_requests = expected = plain_int(num_requests)
        if type(num_requests) is not int:
            raise ConfigError(f"num_requests is {num_requests!r:.80}; it must be a whole number.")
        extent = some(num_requests, "request")
    if not 0 <= expected <= LARGEST_TRACE:
        raise ConfigError(f"a trace of {extent} at {rate:g} requests/s can't be generated; 0 to {LARGEST_TRACE} can.")
    rng = random.Random(whole_seed)  # noqa: S311 - a workload, not a secret
    lengths = random.Random(rng.getrandbits(64))  # noqa: S311 - apart from arrivals, so neither shifts the other
    times: Iterator[float] = (time * stretch for time in _arrivals(rng))
    if num_requests is None:
        times = itertools.takewhile(lambda time: time < duration_s, times)
    requests = tuple(
        TraceRequest(index, time, _drawn(_PROMPT_QUANTILES, lengths), _drawn(_OUTPUT_QUANTILES, lengths))
        for index, time in enumerate(itertools.islice(times, num_requests))
    )
    source = (
        f"generated (seed {whole_seed}, {extent}, {rate:g} requests/s, fitted to Azure's conversation trace of 2023)"
    )
    return Trace(source, "generated", requests)


def _arrivals(rng: random.Random) -> Iterator[float]:
    """Arrival times at the fitted rate, without end."""
    time = 0.0
    for level in itertools.count(1):
        end = level * _LEVEL_S
        level_rate = rng.gammavariate(FITTED_RATE / _EXCESS, _EXCESS)
        while True:
            time += rng.expovariate(level_rate)
            if time >= end:
                # Poisson arrivals have no memory, so the next level may begin its own wait.
                time = end
                break
            yield time


def _drawn(quantiles: tuple[tuple[float, int], ...], rng: random.Random) -> int:
    share = rng.random()
    above = bisect.bisect_right(quantiles, (share, math.inf))
    (low, few), (high, many) = quantiles[above - 1], quantiles[above]
    return round(few + (many - few) * (share - low) / (high - low))


def _checked(name: str, value: float) -> float:
    number = real(name, value)
    if not 0 < number < math.inf:
        raise ConfigError(f"{name} is {value}; it must be above 0 and finite.")
    return number
