"""Ranks without rows of their own: they take part in every step, and none of it is theirs."""

import pytest

from tests.simulate.helpers import run, server, trace_of


@pytest.mark.parametrize("idle", [1, 3])
def test_a_rank_without_rows_is_in_no_step_outside_the_table(idle: int) -> None:
    """No curve has a size of no tokens: that isn't a batch that the table wasn't made for."""
    alone, _ = run(trace_of((0, 30, 3)), "eager")
    beside, _ = run(trace_of((0, 30, 3)), "eager", of=server(ranks=1 + idle))
    assert (alone.steps, alone.outside, alone.outside_sizes) == (3, 0, 0)
    assert (beside.steps, beside.outside, beside.outside_sizes) == (3, 0, 0)
