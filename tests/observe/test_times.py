"""How long steps took, by mode, in buckets."""

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from kpolicy.decision import Decision, Launch
from kpolicy.keys import GraphKey
from kpolicy.modes import Mode, Part, Rows
from kpolicy.observe.stats import TIME_BOUNDS_US, Stats
from kpolicy.reasons import Reason
from kpolicy.shapes import BatchShape

NUMBERS = BatchShape.decode(5).numbers


def eager(reason: Reason) -> Decision:
    return Decision(Mode.EAGER, (Launch(Rows.ALL, None),), reason)


def test_bounds_rise() -> None:
    """Bucket bounds rise strictly, from 100 microseconds to ten seconds."""
    assert list(TIME_BOUNDS_US) == sorted(set(TIME_BOUNDS_US))
    assert (TIME_BOUNDS_US[0], TIME_BOUNDS_US[-1]) == (100.0, 1e7)


@given(st.lists(st.floats(0.001, 1e9), min_size=1, max_size=40))
def test_each_step_is_in_the_bucket_that_its_time_fits(times_us: list[float]) -> None:
    """A bucket counts the steps that took at most its bound and more than the bound before; the last, all above."""
    stats = Stats()
    for i, us in enumerate(times_us):
        stats.add(eager(Reason.NO_GRAPHS if i % 2 else Reason.POLICY_IS_EAGER), NUMBERS, us)
    times = stats.times_by_mode["eager"]
    for bound, below, count in zip((*TIME_BOUNDS_US, float("inf")), (0.0, *TIME_BOUNDS_US), times.counts, strict=True):
        assert count == sum(below < us <= bound for us in times_us)
    assert abs(times.sum_us - sum(times_us)) <= 1e-6 * sum(times_us)


def test_decisions_without_a_time_are_in_no_bucket() -> None:
    """A decision that was only made counts as a step, and is in no histogram."""
    stats = Stats()
    stats.add(eager(Reason.NO_GRAPHS), NUMBERS)
    assert stats.total.steps == 1
    assert stats.times_by_mode == {}


def test_counters_are_read_while_another_thread_counts() -> None:
    """Reading sums never fails because the Engine's thread meets a decision for the first time."""
    stats, stop = Stats(), threading.Event()

    def count() -> None:
        for num_tokens in range(1, 20_001):
            stats.add(Decision(Mode.FULL, (Launch(Rows.ALL, GraphKey(Part.FULL, num_tokens)),), Reason.GRAPH_FITS),
                      NUMBERS, 1.0)  # fmt: skip
        stop.set()

    thread = threading.Thread(target=count)
    thread.start()
    seen = [0]
    while not stop.is_set():
        seen.append(stats.total.steps)
    assert seen == sorted(seen)
    thread.join()
    assert stats.total.steps == sum(stats.times_by_mode["full"].counts) == 20_000
