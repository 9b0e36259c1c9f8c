"""What a decode row costs, told by steps with a prompt: on a device, and where the host itself runs launches."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from kpolicy.costs import AttentionCost
from kpolicy.executors.calibrate.attention import Bases
from kpolicy.keys import GraphKey
from kpolicy.modes import Part

ROW_US = 1.0
FREE = AttentionCost(base_us=0.0)


class Bench:
    """Steps of 1,000 us and `ROW_US` for each decode row."""

    usual_kv = 16

    def __init__(self, host_runs: bool) -> None:
        self.host_runs = host_runs
        self._times: dict[int, float] = {}
        self._cases = count()

    def rows(self, decodes: int, *_: int) -> int:
        return decodes

    def add(self, _launches: Any, rows: int) -> int:
        case = next(self._cases)
        self._times[case] = 1000.0 + ROW_US * rows
        return case

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
