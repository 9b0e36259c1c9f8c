"""How long the device waits for the first pieces of a step, by what calibration timed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from kpolicy.costs import HostCost, analytic_costs
from kpolicy.decision import Launch
from kpolicy.executors.calibrate import bench as module
from kpolicy.executors.calibrate.bench import Bench
from kpolicy.keys import GraphKey
from kpolicy.modes import Part, Rows

STEP_US = 50.0
PIECES, WHOLE = GraphKey(Part.PIECEWISE, 64), GraphKey(Part.FULL, 64)


def made(*cases: tuple[GraphKey | None, list[tuple[float, ...]]]) -> Bench:
    """A bench with the samples of each case: (whole, host, device, fixed work)."""
    executor: Any = SimpleNamespace(launcher=SimpleNamespace(adapter=SimpleNamespace(host_runs=False)))
    nothing: Any = SimpleNamespace()
    bench = Bench(executor, nothing)
    for key, samples in cases:
        case = bench.add([Launch(Rows.ALL, key)], nothing)
        bench._times[case] = [module._Times(*sample) for sample in samples]
    return bench


def test_the_share_is_that_of_steps_that_the_device_surely_bounds() -> None:
    """10, 8 and 30% of the host's time; a step that takes both as long, an eager one and a whole graph tell nothing."""
    bench = made(
        (PIECES, [(5250.0, 2000.0, 5000.0, 20.0)]),
        (PIECES, [(6250.0, 2500.0, 6000.0, 20.0)]),
        (PIECES, [(4350.0, 1000.0, 4000.0, 20.0)]),
        (PIECES, [(3900.0, 2900.0, 3000.0, 20.0)]),
        (None, [(9000.0, 1000.0, 5000.0, 20.0)]),
        (WHOLE, [(9000.0, 1000.0, 5000.0, 20.0)]),
    )
    assert bench.waited(STEP_US) == pytest.approx(0.1)


def test_every_step_of_pieces_waits_that_share() -> None:
    """Where the host bounds it too, whose own time hides it; what is beyond the host's time there stays the host's."""
    bench = made((PIECES, [(5250.0, 2000.0, 5000.0, 20.0)]), (PIECES, [(3160.0, 3100.0, 2900.0, 20.0)]))
    assert bench.sides_us(0, STEP_US) == (pytest.approx(5200), 2000)
    assert bench.sides_us(1, STEP_US) == (pytest.approx(2900 + 310), pytest.approx(3110))


def test_other_launches_have_what_is_beyond_the_longer_side() -> None:
    bench = made((WHOLE, [(3000.0, 400.0, 2800.0, 20.0)]), (None, [(9160.0, 9000.0, 2900.0, 20.0)]))
    assert bench.sides_us(0, STEP_US) == (pytest.approx(2950), 400)
    assert bench.sides_us(1, STEP_US) == (2900, pytest.approx(9110))
    assert bench.waited(STEP_US) == 0


def test_the_hosts_speed_is_taken_out_of_it() -> None:
    """Two of three samples are of a host that is half as slow again."""
    quick, slow = (5250.0, 2000.0, 5000.0, 20.0), (5375.0, 3000.0, 5000.0, 30.0)
    bench = made((PIECES, [quick, slow, slow]))
    assert bench.host_work_us == 30
    assert bench.waited(1.5 * STEP_US) == pytest.approx(0.1)


@pytest.mark.parametrize("work_us", [10.0, 20.0, 30.0, 45.0, 60.0])
def test_a_table_at_a_samples_speed_has_the_samples_time(work_us: float) -> None:
    """Calibration brings samples to the usual speed, 30 us here, and `at_host_speed` a table to another: inversely."""
    usual = (5000.0, 4000.0, 3000.0, 30.0)
    bench = made((PIECES, [(2500.0, 2150.0, 900.0, work_us)]), (PIECES, [usual, usual]))
    assert bench.host_work_us == 30
    assert bench.host_us(1) == 4000
    found = attrs.evolve(
        analytic_costs(), host_work_us=30.0, host_piecewise=HostCost(bench.host_us(0)), step_us=bench.rest_us(0)
    ).at_host_speed(work_us)
    assert (found.host_piecewise.base_us, found.step_us) == (pytest.approx(2150), pytest.approx(350))


@pytest.mark.parametrize(("work_us", "host_us"), [(20.0, 4300.0), (30.0, 6000.0), (60.0, 11_100.0)])
def test_samples_of_another_speed_have_the_usual_speeds_time(work_us: float, host_us: float) -> None:
    """Launching that takes 6 ms while the work takes 30 us takes 1.85 times that at 60 us, and 4.3 ms at 20."""
    bench = made((PIECES, [(9000.0, host_us, 900.0, work_us)]), (PIECES, [(5000.0, 4000.0, 3000.0, 30.0)] * 2))
    assert bench.host_us(0) == pytest.approx(6000)


def test_a_late_note_is_not_the_hosts_speed() -> None:
    """Of eleven in their order one took twice as long: its sample is of the usual speed all the same."""
    bench = made((PIECES, [(5250.0, 2000.0, 5000.0, 20.0)] * 11))
    bench._noted = [20.0] * 5 + [40.0] + [20.0] * 5
    bench._times[0] = [each._replace(work=bench._noted[i], place=i) for i, each in enumerate(bench._times[0])]
    slower = bench._slower()
    assert [slower(each) for each in bench._times[0]] == [1.0] * 11


def test_samples_that_come_later_count() -> None:
    bench = made((PIECES, [(5250.0, 2000.0, 5000.0, 20.0)]))
    assert bench.waited(STEP_US) == pytest.approx(0.1)
    bench._times[0] += 2 * [module._Times(5450.0, 2000.0, 5000.0, 20.0)]
    assert bench.waited(STEP_US) == pytest.approx(0.2)


def test_what_is_noted_inside_a_sample_tells_its_speed() -> None:
    """Of five one took 1.425 times as long, beside the same note: inside the work took half as long again."""
    usual: list[tuple[float, ...]] = [(4000.0, 4000.0, 900.0, 30.0)] * 4
    slow: list[tuple[float, ...]] = [(5700.0, 5700.0, 900.0, 30.0)]
    bench = made((None, usual), (None, slow))
    for case, inside in ((0, 12.0), (1, 18.0)):
        bench._times[case] = [each._replace(inside=inside) for each in bench._times[case]]
    assert (bench.host_work_us, bench.host_work_inside_us) == (30, 12)
    assert [bench.host_us(case) for case in (0, 1)] == pytest.approx([4000, 4000])
    bench._times[1] = [each._replace(inside=0.0, work=36.0) for each in bench._times[1]]
    # Beside it the work took a fifth longer than beside those that the usual speed is of.
    assert bench.host_us(1) == pytest.approx(5700 / 1.17)


def test_both_usual_speeds_are_of_the_same_samples() -> None:
    """Two of three that were noted inside: the third, of a slow host, has no part; of fewer than half neither goes."""
    samples: list[tuple[float, ...]] = [(4000.0, 4000.0, 900.0, 30.0)] * 2 + [(8000.0, 8000.0, 900.0, 60.0)]
    bench = made((None, samples), (None, samples[2:] * 2))
    first, second, slow = bench._times[0]
    bench._times[0] = [first._replace(inside=12.0), second._replace(inside=12.0), slow._replace(inside=12.0)]
    assert (bench.host_work_us, bench.host_work_inside_us) == (30, 12)
    bench._times[0] = [first._replace(inside=12.0), second, slow]
    assert (bench.host_work_us, bench.host_work_inside_us) == (60, 0)
    assert bench.host_us(0) == pytest.approx(8000 / (1 + 0.85 * (30 / 60 - 1)) / 2)


def test_once_more_is_brought_to_the_speed_of_the_first() -> None:
    first = module._Times(4000.0, 4000.0, 900.0, 30.0, inside=12.0)
    assert module._Times(5130.0, 5130.0, 900.0, inside=18.0).like(first) == pytest.approx(3600)
    assert module._Times(5130.0, 5130.0, 900.0).like(first) == 5130
