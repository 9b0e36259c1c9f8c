"""Which chunks of MLA prompts are absorbed. The kernels themselves are tested on a GPU."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kpolicy.serving import crossover  # noqa: E402
from kpolicy.serving.crossover import ABSORBED_LENS, Crossover, measured  # noqa: E402


@pytest.mark.parametrize(
    ("query_len", "kv_len", "absorbed"),
    [(4, 100, True), (5, 100, False), (4, 1000, True), (5, 1000, False), (5, 4096, False), (60, 9000, True),
     (65, 9000, False), (64, 4097, True)],
)  # fmt: skip
def test_a_row_is_absorbed_by_the_lengths_around_it(query_len: int, kv_len: int, absorbed: bool) -> None:
    """Between two measured lengths both must say so; beyond the longest, the longest does."""
    found = Crossover((512, 4096, 4096 * 2), (4, 64, 64))
    assert found.absorbs(query_len, kv_len) == absorbed


@pytest.mark.parametrize(
    ("absorbed_us", "expanded_us", "longest"),
    [((1, 2, 3), (5, 5, 5), 64), ((1, 6, 3), (5, 5, 5), 4), ((1, 5, 9), (5, 5, 5), 16), ((9, 1, 1), (5, 5, 5), 1)],
)
def test_the_longest_chunk_that_is_no_slower(
    absorbed_us: tuple[int, ...], expanded_us: tuple[int, ...], longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths are tried from the shortest, up to the first where expanding is faster."""
    asked: list[tuple[str, int, int]] = []
    times = {"absorbed": absorbed_us, "expanded": expanded_us}

    def way(name: str) -> Any:
        def make(query_len: int, kv_len: int) -> Any:
            asked.append((name, query_len, kv_len))
            return lambda: times[name][ABSORBED_LENS.index(query_len)]

        return make

    monkeypatch.setattr(crossover, "_time", lambda call, _device: call())
    found = measured(way("absorbed"), way("expanded"), torch.device("cpu"), 5000)
    assert found == Crossover((512, 4096), (longest, longest))
    assert {kv_len for _, _, kv_len in asked} == {512, 4096}


def test_little_kv_is_measured_at_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rows are shorter than what is usually measured, their longest is; no chunk is longer than its row."""
    monkeypatch.setattr(crossover, "_time", lambda call, _device: call())
    found = measured(lambda *_: lambda: 1, lambda *_: lambda: 2, torch.device("cpu"), 20)
    assert found == Crossover((20,), (16,))


def test_a_call_is_timed() -> None:
    """Every try calls some times, and the first, which compiles, doesn't count."""
    calls = []
    assert crossover._time(lambda: calls.append(1), torch.device("cpu")) > 0
    assert len(calls) == 20
