"""What calibration makes of the host's times: the table that they came from."""

from __future__ import annotations

from typing import Any

import pytest

from kpolicy.costs import HostCost
from kpolicy.executors.calibrate.attention import Bases
from kpolicy.executors.calibrate.host import HostTimes
from kpolicy.keys import GraphKey
from kpolicy.modes import Part

from .test_waiting import made

STEP_US = 150.0
TRUE = HostCost(1000.0, 2.5, 300.0, 120.0)


class Bench:
    """Answers with the times of a known table; `skipped` names cases that the allowance didn't come to."""

    host_runs = False
    short_kv = usual_kv = dense_kv = 64

    def __init__(self, *skipped: tuple[int, bool]) -> None:
        self.asked: list[tuple[int, int, Any]] = []
        self.others: list[Any] = []
        self.off: tuple[int, int] | None = None
        self.often: dict[tuple[int, int], int] = {}
        self.behind: set[int] = set()
        self.more = 0.0
        self._skipped = skipped

    def rows(self, num_decodes: int, _decode_kv: int, new: int = 0) -> tuple[int, int]:
        return num_decodes, new

    @property
    def short(self) -> list[int]:
        """Rows or tokens of the steps of one kind that `Bases` asked for, but for the largest prompt."""
        return [max(decodes, new) for decodes, new, key in self.asked if not decodes * new and key.num_tokens < 256]

    def add(
        self, launches: list[Any], rows: tuple[int, int], *, often: int = 1, others: Any = None,
        launching: bool = False, **more: Any,
    ) -> int:  # fmt: skip
        assert launching == (launches[0].key is None)
        del often, more
        self.asked.append((*rows, launches[0].key))
        self.others.append(others)
        return len(self.asked) - 1

    def measured(self, case: int) -> bool:
        decodes, new, _ = self.asked[case]
        return (decodes, new > 0) not in self._skipped

    def new_us(self, cases: list[int]) -> float:
        assert all(map(self.differs, cases))
        return self.more if cases else 0.0

    def differs(self, case: int) -> bool:
        return self.others[case] is not None

    def launching_us(self, case: int, step_us: float) -> list[float]:
        assert step_us == STEP_US
        decodes, new, _ = self.asked[case]
        us = TRUE.base_for(decodes=decodes > 0, prefills=new > 0) + TRUE.req_us * (decodes + (new > 0))
        return [us + 200.0 * ((decodes, new) == self.off)] * self.often.get((decodes, new), 1)

    def rows_of(self, case: int) -> tuple[int, int]:
        return self.asked[case][:2]

    def host_bounds(self, case: int) -> bool:
        return case not in self.behind


def times(bench: Bench, keys: list[GraphKey | None]) -> HostCost:
    return HostTimes(bench, keys, 64, 512).cost(STEP_US)  # type: ignore[arg-type]


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
        (8, 0, 8), (64, 0, 256), (0, 96, 256), (8, 96, 256),
    ]  # fmt: skip
    small = Bench()
    times(small, pieces(8, 32))
    assert (0, 24, GraphKey(Part.PIECEWISE, 32)) in small.asked
    assert (8, 24, GraphKey(Part.PIECEWISE, 32)) in small.asked


def test_prompts_are_longer_than_chunks_that_may_be_absorbed() -> None:
    """Absorbed chunks run other code: what they cost the host isn't what prompts do."""
    crossover = pytest.importorskip("kpolicy.serving.crossover")
    bench = Bench()
    times(bench, [None, *pieces(8, 32, 256)])
    lengths = {new for _, new, _ in bench.asked if new}
    assert min(lengths) > crossover.ABSORBED_LENS[-1]
    timed = Bench()
    Bases(timed, [GraphKey(Part.PIECEWISE, size) for size in (8, 16, 32, 128, 256)], [], 256)  # type: ignore[arg-type]
    assert timed.short == [128, 128, 128]


def test_without_steps_of_both_kinds_all_rows_cost_what_decodes_do() -> None:
    found = times(Bench((8, True)), [None])
    assert (found.base_us, found.req_us) == pytest.approx((1300.0, 2.5))
    assert (found.decode_us, found.prefill_us) == (0.0, 0.0)
    assert times(Bench((8, True), (8, False), (64, False)), [None]) == HostCost(TRUE.base_us + 120.0 + 2.5)


def test_eager_steps_are_timed_over_many_tokens_too() -> None:
    bench = Bench()
    times(bench, [None])
    assert [(decodes, new) for decodes, new, _ in bench.asked] == [
        (8, 0), (64, 0), (0, 96), (8, 96), (0, 256), (8, 256), (8, 504),
    ]  # fmt: skip


def test_eager_steps_over_many_tokens_have_another_size_each_time() -> None:
    bench = Bench()
    times(bench, [None])
    drawn = [others for others in bench.others if others is not None]
    assert [others is not None for others in bench.others] == [False] * 4 + [True] * 2 + [False]
    for others, decodes in zip(drawn, (0, 8), strict=True):
        rows = [others(turn) for turn in range(40)]
        assert {each for each, _ in rows} == {decodes}
        sizes = {new for _, new in rows}
        assert len(sizes) > 30
        assert min(sizes) >= 128
        assert max(sizes) < 384
    pieced = Bench()
    times(pieced, pieces(8, 32, 256))
    assert pieced.others == [None] * len(pieced.asked)


def test_one_step_that_is_off_changes_little() -> None:
    """Prompts alone and steps of both kinds are timed at several sizes, whose median counts."""
    bench = Bench()
    bench.off = (8, 96)
    found = times(bench, [None])
    assert found == times(Bench(), [None])


def test_nothing_is_timed_without_graphs_or_where_the_host_runs_the_launches() -> None:
    assert times(Bench(), []) == HostCost(0.0)
    bench = Bench()
    bench.host_runs = True
    assert times(bench, [None]) == HostCost(0.0)
    assert not bench.asked


def test_all_launches_of_a_kind_count_alike() -> None:
    """One case that has three launches decides beside two with one each; of cases' medians the others would."""
    bench = Bench()
    bench.off, bench.often = (8, 96), {(8, 96): 3}
    found = times(bench, [None])
    assert found.base_for(decodes=True, prefills=True) == pytest.approx(
        TRUE.base_for(decodes=True, prefills=True) + 200.0
    )
    assert found.base_for(decodes=False, prefills=True) == pytest.approx(TRUE.base_for(decodes=False, prefills=True))


def test_other_cases_that_the_host_bounds_count_too() -> None:
    """Those of the curve: of many launches they decide; where the device bounds one, its launching isn't looked at."""
    bench = Bench()
    timed = HostTimes(bench, [None], 64, 512)  # type: ignore[arg-type]
    bench.off, bench.often = (0, 300), {(0, 300): 9}
    bench.asked.append((0, 300, None))
    bench.others.append(None)
    found = timed.cost(STEP_US, [len(bench.asked) - 1])
    assert found.base_for(decodes=False, prefills=True) == pytest.approx(
        TRUE.base_for(decodes=False, prefills=True) + 200.0
    )
    bench.behind = {len(bench.asked) - 1}
    assert timed.cost(STEP_US, bench.behind) == timed.cost(STEP_US)


@pytest.mark.parametrize("more", [70.0, -70.0])
def test_a_new_size_that_seems_to_take_off_adds_nothing(more: float) -> None:
    bench = Bench()
    bench.more = more
    assert HostTimes(bench, [None], 64, 512).new_us() == max(more, 0.0)  # type: ignore[arg-type]


def test_what_a_new_size_adds_is_no_part_of_launching() -> None:
    """A step once more takes 0.8 of it, beside which 90 us aren't the step's; other rows took 700 us more at first."""
    known, new = (8960.0, 9000.0, 2900.0, 20.0, 0.8 * 8910 + 90), (9660.0, 9700.0, 2900.0, 20.0, 0.8 * 8910 + 90)
    bench = made((None, [known[:4], known, known]), (None, [new]))
    assert bench.launching_us(0, STEP_US - 100) == pytest.approx([8910.0] * 5)
    bench._others[1] = lambda _turn: None  # type: ignore[return-value, assignment]
    bench._new[1] = [bench._times[1][0]] * 2
    assert bench.launching_us(1, STEP_US - 100) == pytest.approx([8910.0] * 3)
