"""What is kept of the steps: bins of bounded number that hold all time, the slowest stretch, padding by size."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kpolicy.report import steps as kept
from kpolicy.report.padding import by_range
from kpolicy.report.steps import Steps
from kpolicy.simulate import simulate
from tests.simulate.helpers import COSTS, SIZES, server, traces


@given(trace=traces(), policy=st.sampled_from(["auto", "vllm", "split", "eager"]), most=st.sampled_from([2, 8, 2048]))
def test_sums_are_the_results(trace: Any, policy: str, most: int) -> None:
    """Time by mode, padding and the end, however few bins there are."""
    before, kept.MOST_BINS = kept.MOST_BINS, most
    try:
        steps = Steps()
        result = simulate(trace, policy, server=server(), costs=COSTS, ladder=SIZES, on_step=steps)
        steps.done()
    finally:
        kept.MOST_BINS = before
    assert len(steps.running) == len(steps.waiting) <= most
    assert {len(each) for each in steps.busy_us} == {len(steps.running)}
    assert sum(map(sum, steps.busy_us)) == pytest.approx(result.step_us)
    assert all(0 <= sum(each) <= steps.bin_us * 1.0001 for each in zip(*steps.busy_us, strict=True))
    assert sum(each.padding for each in steps.padding.values()) == result.padding
    assert sum(each.tokens for each in steps.padding.values()) == result.tokens_computed
    assert steps.end_us == pytest.approx(result.span_s * 1e6)
    assert len(steps.slowest) == min(result.steps, kept.STRETCH)
    ranges = by_range(steps)
    assert sum(each.padding for each in ranges.values()) == result.padding
    assert all(low <= high for low, high in ranges)


@given(
    trace=traces(most_output=80), policy=st.sampled_from(["auto", "vllm", "split", "eager"]),
    most=st.sampled_from([2, 8, 2048]), stretch=st.sampled_from([3, 1500]),
)  # fmt: skip
def test_steps_told_at_once_are_kept_alike(trace: Any, policy: str, most: int, stretch: int) -> None:
    """To the last bit what is kept of each step told by itself."""
    before = kept.MOST_BINS, kept.STRETCH
    kept.MOST_BINS, kept.STRETCH = most, stretch
    try:
        found = []
        for at_once in (False, True):
            steps = Steps()
            result = simulate(
                trace, policy, server=server(60), costs=COSTS, ladder=SIZES, on_step=steps,
                on_decodes=steps.decodes if at_once else None,
            )  # fmt: skip
            padding = {
                size: [each.graphs, each.eager, each.tokens, each.padding] for size, each in steps.padding.items()
            }
            said = {name: value for name, value in vars(steps.done()).items() if name != "padding"}
            found.append((said, dict(sorted(padding.items())), result.as_dict()))
    finally:
        kept.MOST_BINS, kept.STRETCH = before
    assert found[0] == found[1]


def test_the_slowest_stretch_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all stretches of three steps, one that takes longest."""
    from kpolicy.scheduling.generator import generate_trace

    monkeypatch.setattr(kept, "STRETCH", 3)
    steps, every = Steps(), []

    def both(step: Any) -> None:
        steps(step)
        every.append((step.start_us, step.cycle_us))

    simulate(
        generate_trace(num_requests=20, seed=4), "auto", server=server(9000), costs=COSTS, ladder=SIZES, on_step=both
    )
    steps.done()
    stretches = [every[i : i + 3] for i in range(0, len(every), 3)]
    slowest = max(stretches, key=lambda each: sum(us for _, us in each))
    assert [(note.start_us, note.us) for note in steps.slowest] == slowest


@pytest.mark.parametrize(
    ("tokens", "wanted"), [(0, (0, 0)), (1, (1, 1)), (2, (2, 2)), (3, (3, 4)), (8, (5, 8)), (9, (9, 16))]
)
def test_ranges_double(tokens: int, wanted: tuple[int, int]) -> None:
    """Both ends are in the range."""
    steps = Steps()
    steps.padding[tokens] = kept.Padded()
    assert list(by_range(steps)) == [wanted]
