"""What calibration makes of a step that is run once more at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kpolicy.decision import Launch
from kpolicy.executors.calibrate import bench as module
from kpolicy.executors.calibrate.bench import Bench
from kpolicy.modes import Rows

STEP_US = 50.0


def sides(*samples: tuple[float, ...]) -> tuple[float, float]:
    """Both sides of a case with samples of (whole, host, device, fixed work, host again, whole again)."""
    executor: Any = SimpleNamespace(launcher=SimpleNamespace(adapter=SimpleNamespace(host_runs=False)))
    bench = Bench(executor, SimpleNamespace())
    case = bench.add([Launch(Rows.ALL, None)], SimpleNamespace(), again=True)  # type: ignore[arg-type]
    bench._times[case] = [module._Times(*sample) for sample in samples]
    return bench.sides_us(case, STEP_US)


def test_what_the_device_waits_for_in_a_row_is_the_devices() -> None:
    """Cold, the host bounds the step; once more at once the device does, and the step takes 120 us beyond both."""
    device, host = sides((3260.0, 3200.0, 2900.0, 20.0, 2300.0, 3070.0))
    assert device == pytest.approx(2900 + 120)
    assert host == pytest.approx(3200 + 10)


def test_where_the_host_bounds_it_either_way_the_devices_time_is_its_own() -> None:
    device, host = sides((3260.0, 3200.0, 2900.0, 20.0, 3000.0, 3090.0))
    assert (device, host) == (2900, pytest.approx(3210))


def test_without_a_run_once_more_nothing_changes() -> None:
    assert sides((3260.0, 3200.0, 2900.0, 20.0)) == (2900, pytest.approx(3210))
    assert sides((3060.0, 2200.0, 2900.0, 20.0)) == (pytest.approx(2900 + 110), 2200)


def test_the_hosts_speed_is_taken_out_of_what_the_device_waits_for() -> None:
    """Half of the samples are a slow host's."""
    quick, slow = (2960.0, 3200.0, 2900.0, 20.0, 2300.0, 3070.0), (4400.0, 4800.0, 2900.0, 30.0, 2850.0, 3155.0)
    assert sides(quick, quick, slow)[0] == pytest.approx(2900 + 120)
