"""Cases of a sweep in processes of this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from kpolicy.simulate.cases import Case, Common, run_case

__all__ = ["LocalBackend"]

_COMMON: list[Common] = []
"""In a worker process: what its cases share, sent once."""


def _start_worker(common: Common) -> None:
    import signal

    # An interrupt from the keyboard reaches every process; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _COMMON[:] = [common]


def _work(case: Case) -> dict[str, Any]:
    return run_case(case, _COMMON[0])


@attrs.frozen
class LocalBackend:
    """Processes of this machine.

    Args:
        jobs: how many; 0 is one a core.
    """

    jobs: int = 0

    def run(self, cases: Sequence[Case], common: Common) -> Iterator[dict[str, Any]]:
        """The line of each case, as they finish."""
        from concurrent.futures import ProcessPoolExecutor, as_completed

        jobs = min(self.jobs or _cores(), len(cases))
        if jobs <= 1:
            yield from (run_case(case, common) for case in cases)
            return
        pool = ProcessPoolExecutor(jobs, initializer=_start_worker, initargs=(common,))
        try:
            futures = [pool.submit(_work, case) for case in cases]
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
