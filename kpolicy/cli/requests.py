"""`read_requests`: the requests that a command serves, of a trace's file and a window of it; of several `read_each`."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

from kpolicy.cli.options import check_rate
from kpolicy.errors import ConfigError
from kpolicy.scheduling.traces import Trace, default_trace, read_trace

__all__ = ["read_each", "read_requests"]


def read_each(paths: Sequence[Path], *, start: float, window: float, rate: float) -> list[Trace]:
    """The requests of each trace, or of the default one; raises as `read_requests`, and for a file that comes twice."""
    for i, path in enumerate(paths):
        if os.path.realpath(path) in map(os.path.realpath, paths[:i]):
            raise ConfigError(f"the trace {path} is given twice; both would do the same, so give it once.")
    return [read_requests(path, start=start, window=window, rate=rate) for path in paths or (None,)]


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
    for option, value in (("--window", window), ("--start", start)):
        if not 0 <= value < math.inf:
            raise ConfigError(
                f"{option} is {value:g}; it takes seconds from 0 up. --window 0 serves all from --start on."
            )
    if rate is not None:
        check_rate(rate)
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
