"""Gaps between tokens, by when each was there."""

from __future__ import annotations

from kpolicy.scheduling.token_gaps import TokenGaps


def test_a_step_of_one_launch_brings_its_tokens_at_its_end() -> None:
    gaps = TokenGaps()
    assert gaps.step(90.0, 3) == [(90.0, 3)]
    assert gaps.step(40.0, 2) == [(40.0, 2)]


def test_what_the_prompt_half_takes_beyond_is_in_the_next_gap() -> None:
    """Four decode steps of 10 us, then 60 us of a prompt beside them: four gaps of 10, and one of 70."""
    gaps = TokenGaps()
    assert gaps.step(100.0, 2, steps=4, after_us=60.0) == [(10.0, 8)]
    assert gaps.step(10.0, 2) == [(70.0, 2)]
    assert gaps.step(10.0, 2) == [(10.0, 2)]


def test_a_row_that_had_its_first_token_at_the_end_waited_for_nothing() -> None:
    gaps = TokenGaps()
    gaps.step(100.0, 2, after_us=80.0)
    gaps.join([7])
    assert sorted(gaps.step(30.0, 3)) == [(30.0, 1), (110.0, 2)]
    # Those that were there wait in several steps in a row, and a row that joined before is one of them now.
    gaps.step(100.0, 3, steps=2, after_us=80.0)
    assert sorted(gaps.step(100.0, 3, steps=2, after_us=80.0)) == [(10.0, 3), (90.0, 3)]


def test_all_gaps_of_a_row_add_up_to_the_time_it_took() -> None:
    gaps, total = TokenGaps(), 0.0
    for us, steps, after in ((100.0, 3, 70.0), (50.0, 1, 0.0), (80.0, 2, 20.0), (80.0, 1, 80.0), (5.0, 1, 0.0)):
        total += sum(gap * count for gap, count in gaps.step(us, 1, steps, after))
    assert abs(total - 315.0) < 1e-9


def test_a_row_that_leaves_says_when_its_last_token_came() -> None:
    """Before the end of the last step, where the prompt half went on; at its end, where its own prompt was in there."""
    gaps = TokenGaps()
    gaps.step(100.0, 2, after_us=80.0)
    gaps.join([7, 8])
    assert gaps.leave(3) == 80.0
    assert gaps.leave(7) == 0.0
    # 8 has waited for nothing, and of the two that decoded one is left.
    assert sorted(gaps.step(30.0, 2)) == [(30.0, 1), (110.0, 1)]
    gaps.step(10.0, 2)
    assert gaps.leave(8) == 0.0
