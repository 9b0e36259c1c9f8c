"""What halves beside each other take, by one and two decode steps beside the longest prompt; on a host by several."""

from __future__ import annotations

from typing import Any

import pytest

from kpolicy.costs import FEW_DECODES, MANY_DECODES
from kpolicy.executors.calibrate.bench import Wave
from kpolicy.executors.calibrate.table import _Overlap
from kpolicy.keys import GraphKey
from kpolicy.modes import Part, SplitForm
from kpolicy.overlap import MOST_SLOWDOWN, Overlap
from kpolicy.settings import Settings

DECODE_US, PROMPT_US = 1500.0, {2048: 6400.0, 1024: 4500.0, 512: 3000.0, 64: 1800.0}
TRUE = {1: Overlap.of(0.3, 2.0), FEW_DECODES: Overlap.of(0.4, 1.8), MANY_DECODES: Overlap.of(0.7, 1.5)}
SHARES = {SplitForm.BESIDE: 0.2, SplitForm.DECODES_BESIDE: 0.5}
"""Where the host runs both"""
PAID = {1024: 0.45, 512: 0.4, 64: 0.3}
"""By tokens of prompts that four decode steps outlast: what they add of their time"""


class Bench:
    """A decode step and prompts of known times; `skipped` forms weren't come to, with one row or with all.

    Args:
        skipped: the forms.
        rows: with so many rows only; with all where None.
        host_runs: the host runs what it launches.
        error: of a sample.
        prompt: times as long that the prompt takes.
        untold: when the decode half is over isn't noted.
        paid: in place of `PAID`.
    """

    short_kv, usual_kv = 64, 1024

    def __init__(
        self, *skipped: SplitForm, rows: int | None = None, host_runs: bool = False, error: float = 0.01,
        prompt: float = 1.0, untold: bool = False, paid: dict[int, float] = PAID,
    ) -> None:  # fmt: skip
        self.host_runs = host_runs
        self._error, self._skipped, self._rows, self._prompt, self._untold = error, skipped, rows, prompt, untold
        self._paid = paid
        self._us: list[float] = []
        self._decodes: list[float] = []
        self._unmeasured: set[int] = set()

    def rows(self, num_decodes: int, decode_kv: int, new: int = 0, **_: int) -> tuple[int, int]:
        assert decode_kv == (self.usual_kv if self.host_runs else self.short_kv) or not num_decodes
        return num_decodes, new

    def add(
        self, launches: list[Any], rows: tuple[int, int], form: SplitForm | None = None, *, often: int = 1,
        wave: Wave = Wave.USUAL,
    ) -> int:  # fmt: skip
        num_decodes, new = rows
        assert (often > 1) == (self.host_runs and form is not None)
        shorter = new in self._paid and not self.host_runs
        assert (wave is Wave.THOROUGH) == shorter
        assert (wave is Wave.FINER) == (num_decodes in (1, MANY_DECODES))
        decodes_us, prompt_us = launches[0].repeat * DECODE_US, self._prompt * PROMPT_US.get(new, 0.0)
        us, over = decodes_us if num_decodes else prompt_us, 0.0
        if form is not None:
            assert launches[0].key.num_tokens == num_decodes
            assert shorter or new == (1024 if self.host_runs and form is SplitForm.DECODES_BESIDE else 2048)
            if shorter:
                assert (form, launches[0].repeat) == (SplitForm.DECODES_BESIDE, 4)
                us = over = decodes_us + self._paid[new] * prompt_us
                if prompt_us > decodes_us:
                    us, over = prompt_us + 0.4 * decodes_us, 0.9 * prompt_us
            elif self.host_runs:
                us = max(decodes_us, prompt_us) + SHARES[form] * min(decodes_us, prompt_us)
            else:
                true = TRUE.get(num_decodes, TRUE[FEW_DECODES])
                us = true.device_us(decodes_us, prompt_us)
                over = 0.0 if self._untold else min(true.slowdown * decodes_us, us)
            if form in self._skipped and self._rows in (None, num_decodes) and not shorter:
                self._unmeasured.add(len(self._us))
        self._us.append(us)
        self._decodes.append(over)
        return len(self._us) - 1

    def measured(self, case: int) -> bool:
        return case not in self._unmeasured

    def middle_us(self, case: int) -> float:
        return self._us[case]

    us = middle_us

    def decodes_us(self, case: int) -> float:
        return self._decodes[case]

    def error(self, _case: int) -> float:
        return self._error


def overlap(bench: Bench, *sizes: int, graphs: tuple[int, ...] = (1, 8, 32, 64), most: int = 4096) -> _Overlap:
    decode = [GraphKey(Part.FULL, size, num_reqs=size) for size in graphs]
    pieces = [GraphKey(Part.PIECEWISE, size) for size in sizes]
    return _Overlap(bench, decode, pieces, Settings(max_num_reqs=64, max_num_tokens=most))  # type: ignore[arg-type]


@pytest.mark.parametrize("skipped", [(), (SplitForm.DECODES_BESIDE,), (SplitForm.BESIDE,)])
def test_both_numbers_come_back(skipped: tuple[SplitForm, ...]) -> None:
    """By one decode step beside a prompt, by two, and by both."""
    few = TRUE[FEW_DECODES]
    assert overlap(Bench(*skipped), 512, 1024, 2048).told() == (pytest.approx(few.cost), pytest.approx(few.slowdown))


def test_nothing_timed_overlaps_nothing() -> None:
    for found in (overlap(Bench()), overlap(Bench(*SHARES), 512, 1024, 2048)):
        assert found.told() == (1.0, None)
        assert set(found.effects().values()) == {None}


def test_what_is_left_of_it_beside_shorter_prompts() -> None:
    """By hand: beside long ones decode steps that are over last pay 0.8 of 1.4, beside these 0.3, 0.4 and 0.45."""
    found = overlap(Bench(), 64, 512, 1024, 2048).effects()["outlasted_share"]
    shares = [(tokens, pytest.approx(paid * 1.4 / 0.8)) for tokens, paid in sorted(PAID.items())]
    assert found == (*shares, (2048, 1.0))
    # No more than beside long ones, nor less than nothing.
    found = overlap(Bench(paid={1024: 0.4, 512: 0.9, 64: -0.1}), 64, 512, 1024, 2048).effects()["outlasted_share"]
    assert found == ((64, 0.0), (512, 1.0), (1024, pytest.approx(0.4 * 1.4 / 0.8)), (2048, 1.0))


@pytest.mark.parametrize("bench", [Bench(prompt=5.0), Bench(untold=True), Bench(*SHARES), Bench(host_runs=True)])
def test_beside_shorter_prompts_that_outlast_decode_steps_nothing_is_told(bench: Bench) -> None:
    """Nor without a note of when these are over, nor where halves take what both together do."""
    assert overlap(bench, 64, 512, 1024, 2048).effects()["outlasted_share"] is None


def test_one_graph_of_pieces_has_no_shorter_prompt() -> None:
    assert overlap(Bench(), 2048).effects()["outlasted_share"] is None


def test_decode_steps_that_last_longer_than_the_prompt_are_left_out() -> None:
    """Beside a prompt of 3.8 ms two take 5.7: one tells. Beside one of 1.3 ms either lasts longer: both slow alike."""
    few = TRUE[FEW_DECODES]
    assert overlap(Bench(prompt=0.6), 512, 1024, 2048).told() == (
        pytest.approx(few.cost), pytest.approx(few.slowdown)
    )  # fmt: skip
    cost, slowdown = overlap(Bench(prompt=0.2), 512, 1024, 2048).told()
    assert slowdown is None
    assert cost == pytest.approx((few.device_us(1500, 1280) - 1500) / 1280)


def test_without_a_note_of_when_decodes_are_over_halves_are_alike() -> None:
    """The share of the shorter half, which the decode steps are."""
    assert overlap(Bench(untold=True), 512, 1024, 2048).told() == (pytest.approx(TRUE[FEW_DECODES].cost), None)


def test_a_slowdown_beyond_belief_is_cut() -> None:
    class Late(Bench):
        def decodes_us(self, case: int) -> float:
            return 0.9 * self.us(case)

    _, slowdown = overlap(Late(prompt=50.0), 512, 1024, 2048).told()
    assert slowdown == MOST_SLOWDOWN


@pytest.mark.parametrize(("error", "expected"), [(0.01, (0.2 * 1500 + 0.5 * 4500) / 6000), (0.1, 1.0)])
def test_where_the_host_runs_both_longer_halves_tell_more(error: float, expected: float) -> None:
    """And nothing is saved where samples differ by as much: 18.4 ms in turn are 15 beside each other."""
    found = overlap(Bench(host_runs=True, error=error), 512, 1024, 2048)
    assert found.told() == (pytest.approx(expected), None)
    assert set(found.effects().values()) == {None}


def test_one_decode_row_and_many_have_numbers_of_their_own() -> None:
    found = overlap(Bench(), 512, 1024, 2048).effects()
    one, many = TRUE[1], TRUE[MANY_DECODES]
    # The smallest graph of pieces holds the shortest prompt too.
    shares = [(tokens, pytest.approx(PAID[tokens] * 1.4 / 0.8)) for tokens in (512, 1024)]
    assert found.pop("outlasted_share") == (*shares, (2048, 1.0))
    assert found == {
        "one_row_overlap": pytest.approx(one.cost), "one_row_slowdown": pytest.approx(one.slowdown),
        "many_rows_overlap": pytest.approx(many.cost), "many_rows_slowdown": pytest.approx(many.slowdown),
    }  # fmt: skip


@pytest.mark.parametrize(("rows", "name"), [(1, "one_row"), (MANY_DECODES, "many_rows")])
def test_they_are_of_the_steps_that_a_few_rows_numbers_are_of(rows: int, name: str) -> None:
    found = overlap(Bench(SplitForm.BESIDE, rows=rows), 512, 1024, 2048).effects()
    assert found.pop("outlasted_share")
    assert {each for each, value in found.items() if value is None} == {f"{name}_overlap", f"{name}_slowdown"}


@pytest.mark.parametrize("graphs", [(8, 64), (2, 8), (4, 32, 64), (1, 4), (1, 7, 32)])
def test_one_and_many_are_timed_by_themselves_and_beside_the_few_that_a_table_goes_over_at(
    graphs: tuple[int, ...],
) -> None:
    """A graph of two is of one row and padding, and what four rows take isn't the eight's."""
    found = overlap(Bench(), 512, 1024, 2048, graphs=graphs)
    assert found.told() == (pytest.approx(0.4), pytest.approx(1.8))
    effects = found.effects()
    assert effects.pop("outlasted_share")
    assert set(effects.values()) == {None}


def test_many_rows_that_do_not_fit_beside_the_longest_prompt_are_not_timed() -> None:
    found = overlap(Bench(), 512, 1024, 2048, most=2048 + 8).effects()
    assert found.pop("outlasted_share")
    assert {each for each, value in found.items() if value is None} == {"many_rows_overlap", "many_rows_slowdown"}
