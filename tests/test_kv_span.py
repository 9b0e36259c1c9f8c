"""`KvSpan`: which batches have contexts that attention was timed at, and how many of steps in a row."""

from __future__ import annotations

import json

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kpolicy.costs import analytic_costs
from kpolicy.errors import ProfileError, SchemaError
from kpolicy.kv_span import KvSpan
from kpolicy.schemas import Profile, dumps, loads
from kpolicy.shapes import BatchNumbers, BatchShape

SPAN = KvSpan(decode_row=100, decode_step=250, prefill=400)
SMALL = st.integers(0, 40)


@pytest.mark.parametrize(
    ("shape", "held"),
    [
        (BatchShape(), True),
        (BatchShape.decode(1, 100), True),
        (BatchShape.decode(1, 101), False),
        (BatchShape.decode(3, 250), True),
        (BatchShape.decode(3, 251), False),
        (BatchShape.decode(3, 120, max_kv_len=101), False),
        (BatchShape(prefills=[(10, 390)]), True),
        (BatchShape(prefills=[(10, 391)]), False),
        (BatchShape(prefills=[(10, 200), (10, 181)]), False),
        # The longest context is a prompt's, or what no prompt can have.
        (BatchShape(decodes=[(1, 2)], prefills=[(10, 290)], decode_kv_tokens=90), True),
        (BatchShape(decodes=[(1, 2)], prefills=[(10, 50)], decode_kv_tokens=150, max_kv_len=101), False),
        # Of 101 prompt tokens in two chunks neither can be the 101 long; of 101 in one chunk that may be it.
        (BatchShape(decodes=[(1, 2)], prefills=[(10, 41), (10, 40)], decode_kv_tokens=102, max_kv_len=101), False),
        (BatchShape(decodes=[(1, 2)], prefills=[(10, 91)], decode_kv_tokens=102, max_kv_len=101), True),
    ],
)
def test_every_limit_is_held(shape: BatchShape, held: bool) -> None:
    """A decode row, all decode rows and the prompts each have a limit, which itself is inside."""
    assert SPAN.holds(shape.numbers) is held


def test_a_longest_row_that_is_known_counts() -> None:
    """Beside prompts counts don't tell the longest decode row; who knows it says it."""
    numbers = BatchShape(decodes=[(1, 2)], prefills=[(10, 290)], decode_kv_tokens=110).numbers
    assert SPAN.holds(numbers)
    assert SPAN.holds(numbers, 100)
    assert not SPAN.holds(numbers, 101)


@given(SMALL, SMALL, st.integers(1, 9), SMALL, SMALL, SMALL)
def test_steps_in_a_row_are_counted_as_one_by_one(
    row: int, step: int, rows: int, kv_tokens: int, longest: int, steps: int
) -> None:
    """Decode rows grow by a token a step: as many of the steps are outside as asking for each says."""
    span = KvSpan(row, step, 0)
    one_by_one = sum(
        not span.holds(BatchNumbers(rows, 1, kv_tokens + i * rows, rows), longest + i) for i in range(steps)
    )
    assert span.outside(steps, rows, kv_tokens, longest) == one_by_one


def test_profiles_carry_it_and_old_ones_have_none() -> None:
    """It is written and read with the costs; a file from before it reads, without one; a wrong one is told."""
    profile = Profile(costs=attrs.evolve(analytic_costs(), kv_span=SPAN), device="a device", model="a model")
    text = dumps(profile)
    assert loads(text, Profile).costs.kv_span == SPAN
    data = json.loads(text)
    data["costs"]["kv_span"]["prefill"] = -1
    with pytest.raises(SchemaError, match="contexts are KV tokens from 0 up"):
        loads(json.dumps(data), Profile)
    del data["costs"]["kv_span"]
    assert loads(json.dumps(data), Profile).costs.kv_span is None
    with pytest.raises(ProfileError, match="contexts are KV tokens from 0 up"):
        KvSpan(-1, 0, 0)
