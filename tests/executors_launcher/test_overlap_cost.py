"""What running halves beside each other costs: from a decode step beside a prompt, and several beside a shorter one."""

from __future__ import annotations

from typing import Any

import pytest

from kpolicy.executors.calibrate.table import _Overlap
from kpolicy.keys import GraphKey
from kpolicy.modes import Part, SplitForm
from kpolicy.settings import Settings

DECODE_US, PROMPT_US = 2500.0, {2048: 6400.0, 1024: 4500.0}
SHARES = {SplitForm.BESIDE: 0.2, SplitForm.DECODES_BESIDE: 0.5}


class Bench:
    """A decode step and prompts of known times; `skipped` forms weren't come to."""

    short_kv = 64

    def __init__(self, *skipped: SplitForm) -> None:
        self._us: list[float] = []
        self._skipped = skipped
        self._unmeasured: set[int] = set()

    def rows(self, num_decodes: int, _decode_kv: int, new: int = 0, **_: int) -> int:
        assert num_decodes in (0, 8)
        return new

    def add(self, launches: list[Any], new: int, form: SplitForm | None = None) -> int:
        if form is None:
            self._us.append(PROMPT_US[new] if new else DECODE_US)
        else:
            halves = launches[0].repeat * DECODE_US, PROMPT_US[new]
            self._us.append(max(halves) + SHARES[form] * min(halves))
            if form in self._skipped:
                self._unmeasured.add(len(self._us) - 1)
        return len(self._us) - 1

    def measured(self, case: int) -> bool:
        return case not in self._unmeasured

    def us(self, case: int) -> float:
        return self._us[case]


def share(bench: Bench, *sizes: int) -> float:
    decode = [GraphKey(Part.FULL, size, num_reqs=size) for size in (1, 8, 64)]
    pieces = [GraphKey(Part.PIECEWISE, size) for size in sizes]
    return _Overlap(bench, decode, pieces, Settings(max_num_reqs=64, max_num_tokens=4096)).share()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("skipped", "expected"),
    [((), 0.35), ((SplitForm.DECODES_BESIDE,), 0.2), ((SplitForm.BESIDE,), 0.5), (tuple(SHARES), 1.0)],
)
def test_the_mean_of_what_was_measured(skipped: tuple[SplitForm, ...], expected: float) -> None:
    assert share(Bench(*skipped), 512, 1024, 2048) == pytest.approx(expected)


def test_nothing_overlaps_without_graphs_of_prompts() -> None:
    assert share(Bench()) == 1.0
