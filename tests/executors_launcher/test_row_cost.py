"""What a decode row costs, told by steps with a prompt: on a device, and where the host itself runs launches."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from kpolicy.costs import AttentionCost
from kpolicy.executors.calibrate.attention import Bases
from kpolicy.keys import GraphKey
from kpolicy.modes import Part

ROW_US, APART_US = 1.0, 50.0
FREE = AttentionCost(base_us=0.0)


class Bench:
    """Steps of 1,000 us and `ROW_US` for each decode row, and more where there are some; each is known to `error`.

    A whole graph takes `APART_US` more where it has some.
    """

    dense_kv = 16

    def __init__(self, host_runs: bool, error: float = 0.0, base_us: float = 0.0) -> None:
        self.host_runs = host_runs
        self._error, self._base_us = error, base_us
        self._times: dict[int, float] = {}
        self._cases = count()

    def rows(self, decodes: int, *_: int) -> int:
        return decodes

    def add(self, launches: Any, rows: int, **_: Any) -> int:
        case, apart_us = next(self._cases), APART_US if launches[0].key.part is Part.FULL else 0.0
        self._times[case] = 1000.0 + ROW_US * rows + (self._base_us + apart_us if rows else 0.0)
        return case

    def error(self, _case: int) -> float:
        return self._error

    def measured(self, _case: int) -> bool:
        return True

    def us(self, case: int) -> float:
        return self._times[case]

    def sides_us(self, case: int, _step_us: float) -> tuple[float, float]:
        return self._times[case], 0.0


@pytest.mark.parametrize(("host_runs", "row_us"), [(False, ROW_US), (True, 0.0)])
def test_rows_beside_a_prompt_tell_a_devices_rows(host_runs: bool, row_us: float) -> None:
    bench: Any = Bench(host_runs)
    pieces = [GraphKey(Part.PIECEWISE, size) for size in (256, 512)]
    decode, _, _ = Bases(bench, pieces, [], 256).added(FREE, FREE, 0.0)
    assert decode.row_us == pytest.approx(row_us)


@pytest.mark.parametrize(
    ("host_runs", "error", "base_us"),
    # 108 us of 1,000: three standard errors of the difference are 85 us at 2%, 127 us at 3%.
    [(True, 0.02, 108.0), (True, 0.03, 0.0), (False, 0.03, 100.0)],
)
def test_where_the_host_runs_a_difference_that_may_be_chance_is_nothing(
    host_runs: bool, error: float, base_us: float
) -> None:
    """What decode rows take beside a prompt is a small difference of long steps; a device's samples agree better."""
    bench: Any = Bench(host_runs, error, base_us=100.0)
    pieces = [GraphKey(Part.PIECEWISE, size) for size in (256, 512)]
    decode, _, both_us = Bases(bench, pieces, [], 256).added(FREE, FREE, 0.0)
    assert decode.base_us == pytest.approx(base_us)
    assert both_us == (0.0, 0.0)


@pytest.mark.parametrize(("host_runs", "both_us"), [(True, (0.0, 0.0)), (False, (50.0, 0.0))])
def test_where_the_host_runs_no_part_takes_longer_for_both_kinds(host_runs: bool, both_us: tuple[float, float]) -> None:
    """No kernels of their own in whole graphs, and nothing to prepare: what seems so there is other work's."""
    bench: Any = Bench(host_runs, base_us=100.0)
    pieces, mixed = [GraphKey(Part.PIECEWISE, size) for size in (256, 512)], [GraphKey(Part.FULL, 512)]
    assert Bases(bench, pieces, mixed, 256).added(FREE, FREE, 0.0)[2] == pytest.approx(both_us)
