"""`Overlap`: two halves that go on at constant speeds while both run, held to a device told moment by moment."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kpolicy.errors import ProfileError
from kpolicy.overlap import MOST_SLOWDOWN, Overlap, between, check_slowdown


def served(decodes_us: float, prompt_us: float, decode_speed: float, prompt_speed: float) -> float:
    """Until both are over, at these shares of their own speed while both run and at their own from then on."""
    decodes_over, prompt_over = decodes_us / decode_speed, prompt_us / prompt_speed
    together = min(decodes_over, prompt_over)
    decodes_left, prompt_left = decodes_us - decode_speed * together, prompt_us - prompt_speed * together
    return together + max(decodes_left, 0.0) + max(prompt_left, 0.0)


@given(
    st.floats(0.15, 1.0), st.floats(0.15, 1.0), st.floats(1.0, 1e5), st.floats(1.0, 1e5)
)  # fmt: skip
@example(0.15, 0.85, 1.0, 1.0)
def test_two_speeds(decode_speed: float, prompt_speed: float, decodes_us: float, prompt_us: float) -> None:
    """A table's numbers tell both speeds, and with them what any two halves take, whichever is over first."""
    if decode_speed + prompt_speed < 1.0 + 1e-9:
        decode_speed = 1.0 - prompt_speed / 2  # together they get less done than in turn otherwise, or rounding says so
    overlap = Overlap.of((1 - prompt_speed) / decode_speed, 1 / decode_speed)
    assert overlap.gains
    assert overlap.slowdown == pytest.approx(1 / decode_speed)
    expected = served(decodes_us, prompt_us, decode_speed, prompt_speed)
    assert overlap.device_us(decodes_us, prompt_us) == pytest.approx(expected, rel=1e-6)
    assert overlap.device_us(decodes_us, prompt_us) <= (decodes_us + prompt_us) * (1 + 1e-9)


@given(
    st.floats(0.15, 1.0), st.floats(0.5, 1.0), st.floats(1.0, 1e5), st.floats(1.0, 1e5), st.floats(0.0, 1e5)
)  # fmt: skip
def test_a_prompt_that_begins_later(
    decode_speed: float, prompt_speed: float, decodes_us: float, prompt_us: float, lead_us: float
) -> None:
    """So long the decode steps go on at their own speed, and where they are over by then the prompt is alone."""
    decode_speed = max(decode_speed, 1.0 - prompt_speed / 2)
    overlap = Overlap.of((1 - prompt_speed) / decode_speed, 1 / decode_speed)
    expected = lead_us + served(max(decodes_us - lead_us, 0.0), prompt_us, decode_speed, prompt_speed)
    assert overlap.device_us(decodes_us, prompt_us, lead_us) == pytest.approx(expected, rel=1e-6)
    assert overlap.device_us(decodes_us, prompt_us, lead_us) >= overlap.device_us(decodes_us, prompt_us) * (1 - 1e-9)


@given(st.floats(0.0, 2.0), st.floats(0.0, 1e5), st.floats(0.0, 1e5))
def test_without_a_slowdown_the_longer_half_and_a_share_of_the_shorter(cost: float, one: float, other: float) -> None:
    overlap = Overlap.of(cost)
    expected = max(one, other) + cost * min(one, other)
    assert overlap.device_us(one, other) == pytest.approx(expected)
    assert overlap.device_us(one, other) == overlap.device_us(other, one)
    assert overlap.slowdown == 1 + cost
    assert overlap.gains is (cost <= 1)
    if cost < 1:
        alike = Overlap.of(cost, 1 + cost)
        assert alike == pytest.approx(overlap)


def test_what_takes_longer_beside_than_in_turn_is_told_by_its_cost_alone() -> None:
    """No two speeds make that: the slowdown tells when decode steps are over, and nothing of the whole."""
    overlap = Overlap.of(1.3, 1.1)
    assert overlap == (1.3, 1.3, 1.1, 1.0)
    assert overlap.outlasting(0.5) == overlap
    assert not overlap.gains
    assert overlap.device_us(10.0, 100.0) == pytest.approx(113.0)


def test_measured_on_an_h200() -> None:
    """Qwen2.5-0.5B's decode steps of 2.66 ms beside a prompt of 7.92: one to eight of them, as they were measured.

    Conversation x1's shape 33 in benchmarks/results/h200/raw/regret_qwen05b_fifth.json; a step in a row takes 4% less
    than one alone.
    """
    measured = {1: 9.217, 2: 10.340, 3: 12.494, 4: 15.021, 6: 20.011, 8: 25.131}
    overlap = Overlap.of(0.46, 1.82)
    for steps, cycle_ms in measured.items():
        assert overlap.device_us(steps * 0.96 * 2.66, 7.918) == pytest.approx(cycle_ms, rel=0.02), steps
    alike = Overlap.of(0.46)
    assert max(cycle / alike.device_us(steps * 0.96 * 2.66, 7.918) for steps, cycle in measured.items()) > 1.05


def test_decode_rows_between_those_timed() -> None:
    fewer, more = Overlap.of(0.3, 2.2), Overlap.of(0.6, 1.6)
    found = [between(fewer, more, rows, (1, 8)) for rows in (0, 1, 2, 4, 8)]
    assert [each.cost for each in found] == pytest.approx([0.3, 0.3, 0.4, 0.5, 0.6])
    assert [each.slowdown for each in found] == pytest.approx([2.2, 2.2, 2.0, 1.8, 1.6])
    assert between(fewer, more, 16, (8, 32)).cost == pytest.approx(0.45)


@given(st.sampled_from([0.0, 0.3, 0.99, 1.0, 1.6]), st.sampled_from([None, 1.0, 1.4, 2.5]))
def test_at_the_decode_rows_that_were_timed_nothing_changes(cost: float, slowdown: float | None) -> None:
    """A timed slowdown stays, whatever the cost."""
    timed, other = Overlap.of(cost, slowdown), Overlap.of(0.5, 2.0)
    assert between(timed, other, 8, (8, 32)) == timed
    assert between(other, timed, 8, (1, 8)) == timed
    assert between(timed, timed, 3, (1, 8)) == pytest.approx(timed)
    assert timed.slowdown == (1 + cost if slowdown is None else slowdown)


@given(
    st.floats(0.0, 0.9), st.none() | st.floats(1.0, 3.0), st.floats(10.0, 1e4), st.floats(10.0, 1e4),
    st.floats(0.0, 0.05), st.floats(0.0, 1.0),
)  # fmt: skip
def test_how_much_it_rises(
    cost: float, slowdown: float | None, decodes: float, prompt: float, more: float, share: float
) -> None:
    """With both numbers, as corrections change them; where another half becomes the last it rises more."""
    overlap = Overlap.of(cost, slowdown).outlasting(share)
    risen = Overlap.of(cost + more, None if slowdown is None else slowdown + more).outlasting(share)
    told = overlap.device_us(decodes, prompt) + more * overlap.rise_us(decodes, prompt)
    found = risen.device_us(decodes, prompt)
    assert found >= told * (1 - 1e-6)
    last = decodes + overlap.outlasted * prompt > prompt + cost * decodes
    if last == (decodes + risen.outlasted * prompt > prompt + risen.cost * decodes):
        assert found == pytest.approx(told, rel=1e-6)


def test_slowdowns_that_cannot_be() -> None:
    for fine in (None, 1.0, MOST_SLOWDOWN):
        check_slowdown("decode_slowdown", fine)
    for bad in (0.99, MOST_SLOWDOWN + 0.1, float("nan")):
        with pytest.raises(ProfileError, match=rf"decode_slowdown is {bad}; .* from 1 to 8, or none\."):
            check_slowdown("decode_slowdown", bad)
