"""What calibration makes of attention's times: the costs that they came from."""

from __future__ import annotations

from typing import Any

import pytest

from kpolicy.costs import AttentionCost
from kpolicy.executors.calibrate.attention import PrefillSlope
from kpolicy.keys import GraphKey
from kpolicy.modes import Part


class Bench:
    """Steps of one prompt chunk take a known cost and something for the rest; `skipped` wasn't come to."""

    def __init__(self, cost: AttentionCost, *, host_runs: bool = False, skipped: tuple[int, ...] = ()) -> None:
        self._cost, self.host_runs, self._skipped = cost, host_runs, skipped
        self.asked: list[tuple[int, int, Any]] = []

    def rows(self, _decodes: int, _kv: int, new: int, context: int) -> tuple[int, int]:
        return new, context

    def add(self, launches: list[Any], rows: tuple[int, int]) -> int:
        self.asked.append((*rows, launches[0].key))
        return len(self.asked) - 1

    def measured(self, case: int) -> bool:
        return case not in self._skipped

    def us(self, case: int) -> float:
        new, context, _ = self.asked[case]
        pairs = new * context + new * (new + 1) / 2
        return 1000.0 + 3.0 * new + self._cost.unit_us * pairs + self._cost.kv_us * (new + context)


PIECES = [GraphKey(Part.PIECEWISE, size) for size in (64, 128, 512, 2048)]


@pytest.mark.parametrize("cost", [AttentionCost(0.0, 0.0, 0.0005, 0.4), AttentionCost(0.0, 0.0, 0.002)])
def test_pairs_and_context_come_back(cost: AttentionCost) -> None:
    bench = Bench(cost)
    found = PrefillSlope(bench, PIECES, 2048, 16_384).cost()  # type: ignore[arg-type]
    assert (found.unit_us, found.kv_us) == pytest.approx((cost.unit_us, cost.kv_us))
    assert [(new, context) for new, context, _ in bench.asked] == [(2048, 0), (2048, 4096), (128, 0), (128, 4096)]
    assert bench.asked[2][2] == PIECES[1]


def test_without_the_short_chunk_pairs_stand_for_all() -> None:
    cost = AttentionCost(0.0, 0.0, 0.0005, 0.4)
    found = PrefillSlope(Bench(cost, skipped=(3,)), PIECES, 2048, 16_384).cost()  # type: ignore[arg-type]
    assert (found.unit_us, found.kv_us) == (pytest.approx(cost.unit_us + cost.kv_us / 2048), 0.0)
    assert PrefillSlope(Bench(cost, skipped=(1,)), PIECES, 2048, 16_384).cost() == AttentionCost()  # type: ignore[arg-type]


def test_a_host_that_runs_attention_itself_gets_short_contexts() -> None:
    bench = Bench(AttentionCost(), host_runs=True)
    PrefillSlope(bench, [], 256, 4096)  # type: ignore[arg-type]
    assert {context for _, context, _ in bench.asked} == {0, 1024}
