"""What a simulation comes to from several starts among its profile's notes of the host's speed.

A profile whose calibration served says how fast the host was when, over some seconds (`kpolicy.served_host`), and a
simulation goes through these notes over and over from one of them on, which its seed picks. No note is more likely than
another to be the first of a real run, and near a server's limit the first tokens of requests depend on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import attrs

from kpolicy.errors import ConfigError
from kpolicy.simulate.percentiles import Spread
from kpolicy.simulate.result import SimResult

__all__ = ["LATENCIES", "PERCENTS", "Range", "Starts"]

LATENCIES = ("ttft", "gap", "e2e")
PERCENTS = ("p50", "p90", "p99")


@attrs.frozen(kw_only=True)
class Range:
    """A figure over starts, in microseconds.

    Args:
        least: from the start that is quickest by it.
        middle: the median over starts.
        most: from the slowest.
    """

    least: float
    middle: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Range:
        """Of one value from each start."""
        return cls(least=min(values), middle=median(values), most=max(values))


@attrs.frozen(kw_only=True)
class Starts:
    """Latencies of one policy on one trace over several starts.

    Args:
        seeds: of the simulations. Each picks the note that its simulation begins at, which two may have in common.
        ttft, gap, e2e: time to first token, between a request's tokens, and from arrival to last token: the range of
            each of `PERCENTS`.
    """

    seeds: tuple[int, ...]
    ttft: Mapping[str, Range]
    gap: Mapping[str, Range]
    e2e: Mapping[str, Range]

    @classmethod
    def of(cls, results: Sequence[SimResult]) -> Starts:
        """Of simulations that differ in their seeds alone.

        Raises:
            ConfigError: there are none, or they are of several policies or traces.
        """
        if len({(result.policy, result.source, result.costs) for result in results}) != 1:
            told = ", ".join(f"{result.policy} on {result.source}" for result in results[:4]) or "none"
            raise ConfigError(
                f"results are of one policy, trace and cost table, from several seeds; these are {told}. Simulate the "
                "same with seed=0, 1 and so on."
            )
        ranges = {name: _ranges([getattr(result, name) for result in results]) for name in LATENCIES}
        return cls(seeds=tuple(result.seed for result in results), **ranges)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return attrs.asdict(self)


def _ranges(spreads: Sequence[Spread]) -> dict[str, Range]:
    return {name: Range.of([getattr(each, name) for each in spreads]) for name in PERCENTS}
