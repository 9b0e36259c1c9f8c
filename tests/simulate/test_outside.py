"""Steps that the cost table wasn't made for: counted by size and by context, the same by every loop."""

import attrs
import pytest
from hypothesis import given
from hypothesis import settings as run_settings
from hypothesis import strategies as st

from kpolicy.kv_span import KvSpan
from kpolicy.settings import Settings
from kpolicy.simulate import simulate
from tests.simulate.helpers import COSTS, SIZES, run, server, trace_of, traces

SPAN = KvSpan(decode_row=45, decode_step=80, prefill=36)
SHORT = attrs.evolve(COSTS, kv_span=SPAN)
WIDE = Settings(max_num_tokens=64)


def contexts(*requests, **options):
    """Steps of a context outside, by both loops."""
    of = server(settings=WIDE, **options)
    both = [simulate(trace_of(*requests), "vllm", server=of, costs=SHORT, stepwise=each) for each in (False, True)]
    assert both[0].as_dict() == both[1].as_dict()
    return both[0].outside_contexts


def test_sizes_beyond_the_table_are_counted():
    """Steps larger or smaller than what the curves span are told apart."""
    inside, _ = run(trace_of((0, 30, 3)), "eager")
    assert inside.outside == 0
    beyond, steps = run(trace_of((0, 60, 3)), "eager", of=server(settings=WIDE))
    assert (beyond.outside, beyond.outside_sizes, len(steps)) == (1, 1, 3)
    assert beyond.outside_share == pytest.approx(1 / 3)


def test_contexts_beyond_the_table_are_counted():
    """A step counts from the token on at which a limit is passed: of a row, of all rows, or of the prompts."""
    # Decodes over 31 to 49 tokens.
    assert contexts((0, 30, 20)) == 4
    # Two rows over 21 to 45 tokens each: none passes 45, and together they pass 80 from 41 on.
    assert contexts((0, 20, 26), (0, 20, 26)) == 1 + 5
    # A prompt at once, and the same in time of another's decodes.
    assert contexts((0, 37, 1)) == 1
    assert contexts((0, 36, 1)) == 0


@run_settings(max_examples=60, deadline=None)
@given(traces(), st.integers(0, 60), st.integers(0, 120), st.integers(0, 70))
def test_both_loops_count_alike(trace, row, step, prefill):
    """Decode rows that go on alone are counted at once, and as they are step by step."""
    costs = attrs.evolve(COSTS, kv_span=KvSpan(row, step, prefill))
    given_ = {"server": server(), "costs": costs, "ladder": SIZES}
    quick, slow = (simulate(trace, "auto", stepwise=each, **given_) for each in (False, True))
    assert quick.as_dict() == slow.as_dict()
    assert quick.outside <= quick.outside_sizes + quick.outside_contexts


def test_a_table_that_does_not_know_says_so():
    """Measured without a record of contexts: none is counted, and the words are there; analytic ones have none."""
    trace = trace_of((0, 30, 20))
    known, unknown, analytic = (
        simulate(trace, "vllm", server=server(), costs=attrs.evolve(COSTS, kv_span=span, measured=measured))
        for span, measured in ((SPAN, True), (None, True), (None, False))
    )
    assert known.extrapolated[-1] == "4 steps (20.0%) of a context outside the cost table"
    assert (unknown.outside_contexts, unknown.extrapolated[-1]) == (None, "contexts: not recorded")
    assert analytic.outside_contexts is None
    assert not any("context" in each for each in analytic.extrapolated)
    # The words are all that it changes.
    told = ("kv_span", "outside", "outside_contexts", "outside_share")
    with_it, without = ({k: v for k, v in each.as_dict().items() if k not in told} for each in (known, unknown))
    assert with_it == without


def test_any_ranks_part_makes_a_step_one():
    """The second rank's longer row takes the steps of both beyond the table."""
    of = server(ranks=2, settings=WIDE)
    both = simulate(trace_of((0, 10, 12), (0, 36, 12)), "eager", server=of, costs=SHORT)
    # Rows over 37 to 47 tokens.
    assert (both.steps, both.outside_contexts) == (12, 2)
    swapped = simulate(trace_of((0, 36, 12), (0, 10, 12)), "eager", server=of, costs=SHORT)
    assert swapped.outside_contexts == 2
