"""Where the real trace files are, for tests that read them."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest

from kpolicy.scheduling.traces import Trace

_FOLDERS = (os.environ.get("KPOLICY_TRACES"), Path(__file__).parents[3] / "shared" / "traces")


def real_file(name: str) -> Path:
    """The real trace file of that name; the test skips without it."""
    for folder in _FOLDERS:
        if folder and Path(folder, name).is_file():
            return Path(folder, name)
    pytest.skip(f"{name} is neither in $KPOLICY_TRACES nor in ../shared/traces")


def figures(values: Sequence[int]) -> tuple[float, float, float, int]:
    """Mean, median, 95th percentile and largest."""
    cuts = statistics.quantiles(values, n=20, method="inclusive")
    return statistics.fmean(values), statistics.median(values), cuts[18], max(values)


def burstiness(trace: Trace, bin_s: float = 1.0) -> float:
    """Variance over mean of the arrivals in each whole bin."""
    counts = [0] * (int(trace.requests[-1].arrival_s / bin_s) + 1)
    for request in trace.requests:
        counts[int(request.arrival_s / bin_s)] += 1
    return statistics.pvariance(counts[:-1]) / statistics.fmean(counts[:-1])
