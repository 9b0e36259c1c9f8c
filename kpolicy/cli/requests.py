"""`read_requests`: the requests that a command serves, of a trace's file and a window of it; of several `read_each`."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from kpolicy.cli.options import check_rate
from kpolicy.cli.render import counted
from kpolicy.errors import ConfigError, KPolicyError
from kpolicy.scheduling.traces import FailedTrace, Trace, default_trace, read_trace

__all__ = ["errors_of", "read_each", "read_requests", "unserved"]


def read_each(
    paths: Sequence[Path], *, start: float, window: float, rate: float | None = None
) -> list[Trace | FailedTrace]:
    """The requests of each trace, or of the default one. Of several, one that fails is kept as what is wrong with it.

    Raises:
        ConfigError: an option is out of range, a file comes twice, or no trace has a request; what is wrong with the
            others is on standard error then.
    """
    _check_window(start, window, rate)
    for i, path in enumerate(paths):
        if os.path.realpath(path) in map(os.path.realpath, paths[:i]):
            raise ConfigError(f"the trace {path} is given twice; both would do the same, so give it once.")
    found: list[Trace | FailedTrace] = []
    errors: list[KPolicyError] = []
    for each in paths or (None,):
        try:
            found.append(read_requests(each, start=start, window=window, rate=rate))
        except KPolicyError as error:  # noqa: PERF203 - the others are read all the same
            errors.append(error)
            found.append(FailedTrace(str(each), str(error)))
    if len(errors) == len(found):
        *others, last = errors
        for other in others:
            sys.stderr.write(f"kpolicy: {other}\n")
        raise last
    return found


def errors_of(traces: Iterable[Trace | FailedTrace]) -> list[str]:
    """What is wrong with those traces that failed."""
    return [each.error for each in traces if isinstance(each, FailedTrace)]


def unserved(named: str, refused: Mapping[str, int], *, served: int, kv_tokens: int) -> list[str]:
    """That a simulation served none of its requests, so that it has nothing to compare; nothing where it served one.

    Args:
        named: the policy and the trace.
        refused: requests handed back, by reason.
        served: requests served.
        kv_tokens: KV of a rank that the graphs leave.
    """
    if served or not refused:
        return []
    return [
        f"{named}: no request was served ({counted(refused)}); each takes more than the {kv_tokens:,} KV tokens that "
        "graphs leave. Raise --kv-tokens, or give another trace or window."
    ]


def read_requests(path: Path | None, *, start: float = 0.0, window: float = 0.0, rate: float | None = None) -> Trace:
    """A trace's requests in a window, arriving `rate` times as fast; the default trace where no path is given.

    Args:
        path: the file.
        start: ``--start``, seconds.
        window: ``--window``, seconds; 0 is all from `start` on.
        rate: ``--rate``; None leaves arrivals as they are.

    Raises:
        ConfigError: an option is out of range, or no request is left; TraceError says what is wrong with the file.
    """
    _check_window(start, window, rate)
    whole = default_trace() if path is None else read_trace(path, until_s=start + window if window else math.inf)
    if not len(whole):
        dropped = ", ".join(f"{count} {reason}" for reason, count in whole.dropped.items()) or "none"
        raise ConfigError(f"{whole.source} has no request to serve; rows dropped: {dropped}. Choose another trace.")
    trace = whole.window(start, window or math.inf) if start or window else whole
    if not len(trace):
        asked = f"in the {window:g} s from second {start:g}" if window else f"from second {start:g} on"
        advice = "Choose another --start, or a longer --window." if window else "Choose an earlier --start."
        raise ConfigError(
            f"no request arrives {asked} of {whole.source}; its last one arrives at second "
            f"{whole.requests[-1].arrival_s:.1f}. {advice}"
        )
    return trace if rate in (None, 1) else trace.scaled(rate)


def _check_window(start: float, window: float, rate: float | None) -> None:
    for option, value in (("--window", window), ("--start", start)):
        if not 0 <= value < math.inf:
            raise ConfigError(
                f"{option} is {value:g}; it takes seconds from 0 up. --window 0 serves all from --start on."
            )
    if rate is not None:
        check_rate(rate)
