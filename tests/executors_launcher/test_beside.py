"""What of the host's time for a launch isn't the step's, by what calibration timed."""

from __future__ import annotations

import pytest

from kpolicy.executors.calibrate.host import host_by_rows

from .test_waiting import PIECES, STEP_US, WHOLE, made


def test_a_step_that_the_host_bounds_takes_what_it_took() -> None:
    """9,000 us of the host's and 8,960 of the step's: with `step_us`, which no mode overlaps, the table says those."""
    bench = made((None, [(8960.0, 9000.0, 2900.0, 20.0)] * 3))
    assert bench.beside_us(0, STEP_US) == pytest.approx(40 + STEP_US)
    device_us, host_us = bench.sides_us(0, STEP_US)
    assert (device_us, host_us + STEP_US) == (2900, pytest.approx(8960))


def test_steps_that_the_device_bounds_have_it_from_those_that_the_host_surely_does() -> None:
    """Their own time doesn't tell it; a step that takes both as long doesn't either, nor does another mode's."""
    bench = made(
        (PIECES, [(5300.0, 2000.0, 5000.0, 20.0)]),
        (PIECES, [(3030.0, 3060.0, 1000.0, 20.0)]),
        (PIECES, [(3900.0, 3100.0, 3000.0, 20.0)]),
        (None, [(8960.0, 9000.0, 2900.0, 20.0)]),
        (WHOLE, [(900.0, 1000.0, 500.0, 20.0)]),
    )
    assert bench.beside_us(0, STEP_US) == bench.beside_us(2, STEP_US) == pytest.approx(30 + STEP_US)
    assert bench.sides_us(0, STEP_US)[1] == pytest.approx(2000 - 30 - STEP_US)
    assert bench.beside_us(3, STEP_US) == pytest.approx(40 + STEP_US)
    assert bench.beside_us(4, STEP_US) == pytest.approx(100 + STEP_US)


def test_whole_graphs_that_the_host_bounds_have_it_taken_off_too() -> None:
    """Those of a model whose device is quick; of one whose device bounds every graph nothing tells it."""
    short, long = (860.0, 1000.0, 300.0, 20.0), (5300.0, 1100.0, 5000.0, 20.0)
    bench = made((WHOLE, [short]), (WHOLE, [long]))
    assert bench.sides_us(0, STEP_US) == (300, pytest.approx(860 - STEP_US))
    found = host_by_rows(bench, [(0, 1), (1, 101)], STEP_US)
    assert (found.base_us, found.req_us) == (pytest.approx(860 - STEP_US - 1), pytest.approx(1))
    assert host_by_rows(made((WHOLE, [long])), [(0, 1)], STEP_US).base_us == 1100


def test_nothing_is_taken_off_where_nothing_tells() -> None:
    bench = made((PIECES, [(5250.0, 2000.0, 5000.0, 20.0)]))
    assert bench.beside_us(0, STEP_US) is None
    assert bench.sides_us(0, STEP_US)[1] == 2000


def test_samples_that_were_interrupted_tell_nothing() -> None:
    """A stall makes the host bound a step that it doesn't; its samples are at the host's usual speed.

    On the slow core the step takes 1.85 times as long, as the work takes twice as long.
    """
    usual, stalled, slow = (
        (5300.0, 2000.0, 5000.0, 20.0),
        (9000.0, 52000.0, 5000.0, 20.0),
        (5513.0, 5550.0, 400.0, 40.0),
    )
    bench = made((PIECES, [usual, usual, usual, stalled]), (PIECES, [(2980.0, 3000.0, 400.0, 20.0), slow]))
    assert bench.host_work_us == 20
    assert bench.beside_us(0, STEP_US) == pytest.approx(20 + STEP_US)


def test_samples_that_come_later_count() -> None:
    bench = made((None, [(8960.0, 9000.0, 2900.0, 20.0)]))
    assert bench.beside_us(0, STEP_US) == pytest.approx(40 + STEP_US)
    bench._times[0] += 2 * [bench._times[0][0]._replace(wall=8900.0)]
    assert bench.beside_us(0, STEP_US) == pytest.approx(100 + STEP_US)
