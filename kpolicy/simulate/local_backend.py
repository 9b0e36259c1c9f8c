"""Cases of a sweep in processes of this machine."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from kpolicy.simulate.cases import Case, Common, lost_case, run_case

if TYPE_CHECKING:
    from concurrent.futures import Future

__all__ = ["LocalBackend"]


_COMMON: list[Common] = []
"""In a worker process: what its cases share, sent once."""


def _start_worker(common: Common) -> None:
    import signal
    from threading import Thread

    # An interrupt from the keyboard reaches every process; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_with_parent, daemon=True).start()
    _COMMON[:] = [common]


def _end_with_parent() -> None:
    """End this worker when its parent is gone: the queue that it waits on never closes, because it holds both ends."""
    from multiprocessing import parent_process

    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(case: Case) -> dict[str, Any]:
    return run_case(case, _COMMON[0])


@attrs.frozen
class LocalBackend:
    """Processes of this machine.

    A process that is killed, as where memory runs out, takes the others with it. The cases that were running are then
    run again one by one, with the whole machine; one whose process is killed there too has no result, and the others
    go on.

    Args:
        jobs: how many; 0 is one a core.
    """

    jobs: int = 0

    def run(self, cases: Sequence[Case], common: Common) -> Iterator[dict[str, Any]]:
        """The line of each case, as they finish."""
        jobs = min(self.jobs or _cores(), len(cases))
        if jobs <= 1:
            yield from (run_case(case, common) for case in cases)
            return
        left = deque(cases)
        while left:
            for case in (yield from _in_pool(left, jobs, common)):
                for lost in (yield from _in_pool(deque([case]), 1, common)):
                    yield lost_case(lost, "its process was killed, as happens where memory runs out")


def _in_pool(left: deque[Case], jobs: int, common: Common) -> Generator[dict[str, Any], None, list[Case]]:
    """The lines of what is left, until nothing is or a process was killed; the cases that were running then."""
    from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
    from concurrent.futures.process import BrokenProcessPool

    pool = ProcessPoolExecutor(jobs, initializer=_start_worker, initargs=(common,))
    running: dict[Future[dict[str, Any]], Case] = {}
    broken: list[Case] = []
    try:
        while running or (left and not broken):
            # No more than there are processes, so that it is known what was running.
            while left and not broken and len(running) < jobs:
                try:
                    running[pool.submit(_work, left[0])] = left[0]
                except BrokenProcessPool:
                    # It is told by what runs, or where nothing does, here: the next case is as good as any.
                    broken += [] if running else [left.popleft()]
                    break
                left.popleft()
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                case = running.pop(future)
                try:
                    yield future.result()
                except BrokenProcessPool:
                    broken.append(case)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return broken


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
