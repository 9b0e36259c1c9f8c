"""What calibration makes of the host's times: the table that they came from."""

from __future__ import annotations

from typing import Any

import pytest

from kpolicy.costs import HostCost
from kpolicy.executors.calibrate import _HostTimes
from kpolicy.keys import GraphKey
from kpolicy.modes import Part

TRUE = HostCost(1000.0, 2.5, 300.0, 120.0)


class Bench:
    """Answers with the times of a known table; `skipped` names cases that the allowance didn't come to."""

    host_runs = False

    def __init__(self, *skipped: tuple[int, bool]) -> None:
        self.asked: list[tuple[int, int, Any]] = []
        self._skipped = skipped

    def rows(self, num_decodes: int, _decode_kv: int, new: int = 0) -> tuple[int, int]:
        return num_decodes, new

    def add(self, launches: list[Any], rows: tuple[int, int]) -> int:
        self.asked.append((*rows, launches[0].key))
        return len(self.asked) - 1

    def measured(self, case: int) -> bool:
        decodes, new, _ = self.asked[case]
        return (decodes, new > 0) not in self._skipped

    def host_us(self, case: int) -> float:
        decodes, new, _ = self.asked[case]
        return TRUE.base_for(decodes=decodes > 0, prefills=new > 0) + TRUE.req_us * (decodes + (new > 0))


class Model:
    max_model_len = 512


def times(bench: Bench, keys: list[GraphKey | None], most_reqs: int = 64) -> HostCost:
    return _HostTimes(bench, keys, most_reqs, 512, Model()).cost()  # type: ignore[arg-type]


def pieces(*sizes: int) -> list[GraphKey | None]:
    return [GraphKey(Part.PIECEWISE, size) for size in sizes]


@pytest.mark.parametrize("keys", [[None], pieces(8, 32, 256)], ids=["eager", "piecewise"])
def test_the_table_comes_back(keys: list[GraphKey | None]) -> None:
    found = times(Bench(), keys)
    assert (found.base_us, found.req_us) == pytest.approx((TRUE.base_us, TRUE.req_us))
    assert (found.decode_us, found.prefill_us) == pytest.approx((TRUE.decode_us, TRUE.prefill_us))


def test_a_step_replays_the_smallest_graph_that_holds_it() -> None:
    bench = Bench()
    times(bench, pieces(8, 32, 256))
    assert [(decodes, new, key.num_tokens) for decodes, new, key in bench.asked] == [
        (8, 0, 8), (64, 0, 256), (0, 24, 32), (8, 24, 32),
    ]  # fmt: skip


def test_without_steps_of_both_kinds_all_rows_cost_what_decodes_do() -> None:
    found = times(Bench((8, True)), [None])
    assert (found.base_us, found.req_us) == pytest.approx((1300.0, 2.5))
    assert (found.decode_us, found.prefill_us) == (0.0, 0.0)
    assert times(Bench((8, True), (8, False), (64, False)), [None]) == HostCost(TRUE.base_us + 120.0 + 2.5)


def test_nothing_is_timed_without_graphs_or_where_the_host_runs_the_launches() -> None:
    assert times(Bench(), []) == HostCost(0.0)
    bench = Bench()
    bench.host_runs = True
    assert times(bench, [None]) == HostCost(0.0)
    assert not bench.asked
