"""Steps that the cost table wasn't made for: counted by size and by context, the same by every loop."""

import attrs
import pytest
from hypothesis import given
from hypothesis import settings as run_settings
from hypothesis import strategies as st

from kpolicy.costs import Curve
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


def test_the_longest_row_is_looked_at_beside_prompts():
    """A step with a prompt says nothing of its longest decode row, which is the rows' own and not their mean."""
    costs = attrs.evolve(COSTS, kv_span=KvSpan(decode_row=20, decode_step=1000, prefill=1000))
    # 32 tokens a step: the last prompt comes in three chunks, with rows of 21 and 6 tokens, then 22 and 7.
    found, steps = run(trace_of((0, 20, 3), (0, 5, 3), (0, 60, 1)), "eager", costs=costs)
    numbers = [each.step.numbers for each in steps]
    assert [(each.num_decodes, each.num_prefills, each.decode_kv_tokens) for each in numbers] == [
        (0, 3, 0), (2, 1, 27), (2, 1, 29),
    ]  # fmt: skip
    assert found.outside_contexts == 2


def test_a_step_outside_by_both_is_one_step():
    """A size and a context outside are each told, and the step that has both is counted once."""
    wide = server(settings=WIDE)
    prompt = attrs.evolve(COSTS, kv_span=KvSpan(decode_row=1000, decode_step=1000, prefill=36))
    both, _ = run(trace_of((0, 60, 3)), "eager", of=wide, costs=prompt)
    assert (both.outside, both.outside_sizes, both.outside_contexts, both.steps) == (1, 1, 1, 3)
    # One row's 19 decodes are smaller than any size here, and the last 4 of them have longer contexts too.
    small = attrs.evolve(SHORT, eager=Curve((2, 32), (99.9, 371.7)))
    for stepwise in (False, True):
        rows = simulate(trace_of((0, 30, 20)), "eager", server=wide, costs=small, stepwise=stepwise)
        assert (rows.outside, rows.outside_sizes, rows.outside_contexts, rows.steps) == (19, 19, 4, 20)


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
    assert analytic.outside_contexts == 0
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
