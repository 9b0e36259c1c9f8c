"""Which half empty graphs tell what padding takes, and what they tell of it."""

from __future__ import annotations

from typing import Any

import pytest

from kpolicy.costs import AttentionCost, Curve
from kpolicy.executors.calibrate.padding import PaddedRows
from kpolicy.keys import GraphKey
from kpolicy.ladders import decode_sizes, default_sizes
from kpolicy.modes import Part

EXPERTS = Curve([1, 5, 8, 9, 16, 17, 32, 64], [600.0, 1000.0, 1200.0, 1230.0, 1440.0, 1450.0, 1600.0, 1650.0])
"""What dense work takes where each row may choose other experts"""
ATTENTION = AttentionCost(base_us=10.0, row_us=1.0, unit_us=0.001)
KV = 1000


class HalfEmpty:
    """A bench whose graphs take what their rows take, and of what further rows would a share for padding."""

    dense_kv = KV

    def __init__(self, share: float, *, host_runs: bool = False) -> None:
        self.share, self.host_runs = share, host_runs
        self.cases: list[tuple[int, int]] = []

    def rows(self, count: int, kv: int) -> Any:
        assert kv == KV
        return count

    def add(self, launches: Any, rows: Any, *, wave: object) -> int:
        del wave
        self.cases.append((launches[0].key.num_tokens, rows))
        return len(self.cases) - 1

    def measured(self, case: int) -> bool:
        return case < len(self.cases)

    def sides_us(self, case: int, step_us: float) -> tuple[float, float]:
        del step_us
        size, rows = self.cases[case]
        dense = EXPERTS.at(rows + 1) + self.share * (EXPERTS.at(size) - EXPERTS.at(rows + 1))
        return dense + ATTENTION.base_us + ATTENTION.row_us * rows + ATTENTION.unit_us * rows * KV, 0.0


def padded(sizes: tuple[int, ...], share: float, **how: Any) -> tuple[HalfEmpty, PaddedRows]:
    bench: Any = HalfEmpty(share, **how)
    return bench, PaddedRows(bench, [GraphKey(Part.FULL, size, size, 1) for size in sizes])


@pytest.mark.parametrize(
    ("sizes", "timed"),
    [
        pytest.param(decode_sizes(256), [(8, 5), (16, 9), (32, 17)], id="the default list, of every few rows"),
        pytest.param(default_sizes(256), [(8, 5), (16, 9), (32, 17)], id="of pieces"),
        pytest.param((1, 2, 4, *range(8, 257, 24)), [(8, 5), (32, 17)], id="none from 16 to 31"),
        pytest.param((1, 64), [(64, 33)], id="one large"),
        pytest.param((1, 2, 4), [], id="none"),
    ],
)
def test_small_graphs_are_timed_half_empty(sizes: tuple[int, ...], timed: list[tuple[int, int]]) -> None:
    """As few rows as a sparse list brings there, however close to each other this one's graphs are."""
    assert padded(sizes, 0.2)[0].cases == timed


@pytest.mark.parametrize("share", [0.0, 0.2, 0.7])
@pytest.mark.parametrize("sizes", [decode_sizes(256), default_sizes(256)])
def test_what_padding_takes_is_told(sizes: tuple[int, ...], share: float) -> None:
    _, found = padded(sizes, share)
    assert found.share(EXPERTS, ATTENTION, 0.0) == pytest.approx(share)


def test_padding_that_saves_nothing_takes_as_much_as_rows() -> None:
    for share in (1.0, 0.97):
        assert padded(decode_sizes(256), share)[1].share(EXPERTS, ATTENTION, 0.0) == 1.0
    bench, found = padded(decode_sizes(256), 0.2, host_runs=True)
    assert not bench.cases, "a host that runs the work itself isn't asked"
    assert found.share(EXPERTS, ATTENTION, 0.0) == 1.0
    assert padded((8,), 0.2)[1].share(None, ATTENTION, 0.0) == 1.0
