"""What running halves beside each other costs: from a decode step beside a prompt, and several beside a shorter one."""

from __future__ import annotations

from typing import Any

import pytest

from kpolicy.costs import FEW_DECODES
from kpolicy.executors.calibrate.bench import Wave
from kpolicy.executors.calibrate.table import _Overlap
from kpolicy.keys import GraphKey
from kpolicy.modes import Part, SplitForm
from kpolicy.settings import Settings

DECODE_US, PROMPT_US = 2500.0, {2048: 6400.0, 1024: 4500.0}
SHARES = {SplitForm.BESIDE: 0.2, SplitForm.DECODES_BESIDE: 0.5}
ONE_LESS = 0.1
"""Of a share, with one decode row"""


class Bench:
    """A decode step and prompts of known times; `skipped` forms weren't come to."""

    short_kv, usual_kv = 64, 1024

    def __init__(
        self, *skipped: SplitForm, one_skipped: bool = False, host_runs: bool = False, error: float = 0.01
    ) -> None:
        self.host_runs = host_runs
        self._error = error
        self._one_skipped = one_skipped
        self._us: list[float] = []
        self._skipped = skipped
        self._unmeasured: set[int] = set()

    def rows(self, num_decodes: int, decode_kv: int, new: int = 0, **_: int) -> tuple[int, int]:
        assert num_decodes <= FEW_DECODES
        assert decode_kv == (self.usual_kv if self.host_runs else self.short_kv) or not num_decodes
        return num_decodes, new

    def add(
        self, launches: list[Any], rows: tuple[int, int], form: SplitForm | None = None, *, often: int = 1,
        wave: Wave = Wave.USUAL,
    ) -> int:  # fmt: skip
        num_decodes, new = rows
        assert (often > 1) == (self.host_runs and form is not None)
        assert (wave is Wave.FINER) == (num_decodes == 1)
        if form is None:
            self._us.append(PROMPT_US[new] if new else DECODE_US)
        else:
            assert launches[0].key.num_tokens == num_decodes
            halves = launches[0].repeat * DECODE_US, PROMPT_US[new]
            self._us.append(max(halves) + (SHARES[form] - ONE_LESS * (num_decodes == 1)) * min(halves))
            if form in self._skipped or (self._one_skipped and num_decodes == 1 and form is SplitForm.BESIDE):
                self._unmeasured.add(len(self._us) - 1)
        return len(self._us) - 1

    def measured(self, case: int) -> bool:
        return case not in self._unmeasured

    def middle_us(self, case: int) -> float:
        return self._us[case]

    def error(self, _case: int) -> float:
        return self._error


def overlap(bench: Bench, *sizes: int, graphs: tuple[int, ...] = (1, 8, 64)) -> _Overlap:
    decode = [GraphKey(Part.FULL, size, num_reqs=size) for size in graphs]
    pieces = [GraphKey(Part.PIECEWISE, size) for size in sizes]
    return _Overlap(bench, decode, pieces, Settings(max_num_reqs=64, max_num_tokens=4096))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("skipped", "expected"),
    [((), 0.35), ((SplitForm.DECODES_BESIDE,), 0.2), ((SplitForm.BESIDE,), 0.5), (tuple(SHARES), 1.0)],
)
def test_the_mean_of_what_was_measured(skipped: tuple[SplitForm, ...], expected: float) -> None:
    assert overlap(Bench(*skipped), 512, 1024, 2048).share() == pytest.approx(expected)


@pytest.mark.parametrize(("error", "expected"), [(0.01, (0.2 * 2500 + 0.5 * 4500) / 7000), (0.1, 1.0)])
def test_where_the_host_runs_both_longer_halves_tell_more(error: float, expected: float) -> None:
    """And nothing is saved where samples differ by as much: 23.4 ms in turn are 19.2 beside each other."""
    assert overlap(Bench(host_runs=True, error=error), 512, 1024, 2048).share() == pytest.approx(expected)


def test_nothing_overlaps_without_graphs_of_prompts() -> None:
    assert overlap(Bench()).share() == 1.0
    assert overlap(Bench()).one_row_share() is None


def test_one_decode_row_has_a_share_of_its_own() -> None:
    found = overlap(Bench(), 512, 1024, 2048)
    assert (found.share(), found.one_row_share()) == (pytest.approx(0.35), pytest.approx(0.25))


@pytest.mark.parametrize(
    "bench", [Bench(SplitForm.BESIDE), Bench(one_skipped=True), Bench(host_runs=True)],
    ids=["one of both steps", "not with one row", "the host runs both"],
)  # fmt: skip
def test_one_rows_share_is_of_the_steps_that_a_few_rows_share_is_of(bench: Bench) -> None:
    assert overlap(bench, 512, 1024, 2048).one_row_share() is None


@pytest.mark.parametrize("graphs", [(8, 64), (2, 8), (4, 8, 64), (1, 4), (1, 7)])
def test_one_row_is_timed_by_itself_and_beside_the_few_that_a_table_goes_up_to(graphs: tuple[int, ...]) -> None:
    """A graph of two is of one row and padding, and a share of four rows isn't the eight's."""
    found = overlap(Bench(), 512, 1024, 2048, graphs=graphs)
    assert (found.share(), found.one_row_share()) == (pytest.approx(0.35), None)
