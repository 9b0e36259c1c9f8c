"""Which half empty graphs tell what padding takes, and what they tell of it."""

from __future__ import annotations

from typing import Any

import pytest

from kpolicy.costs import AttentionCost, Curve
from kpolicy.executors.calibrate.padding import PaddedRows
from kpolicy.keys import GraphKey
from kpolicy.ladders import decode_sizes, default_sizes
from kpolicy.modes import Part

NUMBER, CHOSEN, READ_US, ROW_US = 64, 6, 20.0, 3.0
"""Of experts, and how many a row chooses; what one that is read takes, and a row besides"""
ATTENTION = AttentionCost(base_us=10.0, row_us=1.0, unit_us=0.001)
KV = 1000


def dense_us(rows: float, padding: float = 0.0) -> float:
    """Of rows that choose other experts each, as many as chance has it, and of rows that all choose the same few."""
    read = NUMBER * (1 - (1 - CHOSEN / NUMBER) ** (rows + (padding > 0)))
    return 500.0 + READ_US * read + ROW_US * (rows + padding)


def curve(sizes: tuple[int, ...]) -> Curve:
    return Curve(sizes, [dense_us(size) for size in sizes])


class HalfEmpty:
    """A bench whose graphs take what their rows' experts take, and those of a row of padding."""

    dense_kv = KV

    def __init__(self, *, mixture: bool = True, host_runs: bool = False) -> None:
        self.mixture, self.host_runs = mixture, host_runs
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
        dense = dense_us(rows, size - rows) if self.mixture else dense_us(size)
        return dense + ATTENTION.base_us + ATTENTION.row_us * rows + ATTENTION.unit_us * rows * KV, 0.0


def padded(sizes: tuple[int, ...], **how: bool) -> tuple[HalfEmpty, PaddedRows]:
    bench: Any = HalfEmpty(**how)
    return bench, PaddedRows(bench, [GraphKey(Part.FULL, size, size, 1) for size in sizes])


VLLM = (1, 2, 4, *range(8, 257, 8))
LADDERS = [
    pytest.param(decode_sizes(256), [(8, 5), (16, 9), (32, 17)], id="the default list, of every few rows"),
    pytest.param(default_sizes(256), [(8, 5), (16, 9), (32, 17)], id="of pieces"),
    pytest.param(VLLM, [(8, 5), (16, 9), (32, 17)], id="vLLM's"),
    pytest.param((1, 2, 4, 8, 32, 56, 80), [(8, 5), (32, 9), (56, 29)], id="none from 9 to 31"),
    pytest.param((1, 2, 4, 64, 256), [(64, 5)], id="a gap above 4"),
    pytest.param((1, 8, 64, 128), [(8, 2), (64, 9)], id="few"),
    pytest.param((1, 64), [(64, 2)], id="one large"),
    pytest.param((1, 4, 7), [(4, 2), (7, 4)], id="small batches"),
    pytest.param((1, 2, 3), [], id="nothing to leave empty"),
]


@pytest.mark.parametrize(
    ("sizes", "timed"),
    # Its curve says nothing of five rows.
    [*LADDERS, pytest.param((8, 16, 24), [(8, 5), (16, 9), (24, 13)], id="none below 8")],
)
def test_small_graphs_are_timed_with_few_rows(sizes: tuple[int, ...], timed: list[tuple[int, int]]) -> None:
    """As few as a sparse list brings there, however close to each other this one's graphs are."""
    assert padded(sizes)[0].cases == timed


@pytest.mark.parametrize(("sizes", "timed"), [each for each in LADDERS if each.values[1]])
def test_graphs_that_are_padded_come_out_as_they_are(sizes: tuple[int, ...], timed: list[tuple[int, int]]) -> None:
    """What few rows take in each of these graphs by the share and the ladder's own curve is what they take."""
    full = curve(sizes)
    share = padded(sizes)[1].share(full, ATTENTION, 0.0)
    assert 0 < share < 0.4
    for size, rows in timed:
        found = full.at(rows + 1) + share * (full.at(size) - full.at(rows + 1))
        assert found == pytest.approx(dense_us(rows, size - rows), rel=0.1), (size, rows)


def test_padding_that_saves_nothing_takes_as_much_as_rows() -> None:
    sizes = decode_sizes(256)
    assert padded(sizes, mixture=False)[1].share(curve(sizes), ATTENTION, 0.0) == 1.0
    bench, found = padded(sizes, host_runs=True)
    assert not bench.cases, "a host that runs the work itself isn't asked"
    assert found.share(curve(sizes), ATTENTION, 0.0) == 1.0
    assert padded((1, 8))[1].share(None, ATTENTION, 0.0) == 1.0
