"""Batch shapes: what they count, and every shape that no batch can have."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kpolicy.errors import ShapeError
from kpolicy.modes import Mode, forbidden_mask
from kpolicy.shapes import LARGEST_COUNT, BatchNumbers, BatchShape
from kpolicy.testing.strategies import shapes


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"decodes": [(0, 3)]}, r"run \(query length 0, count 3\); both must be at least 1"),
        ({"decodes": [(1, 0)]}, r"run \(query length 1, count 0\)"),
        ({"decodes": [(1, 2), (-1, 2)]}, r"run \(query length -1"),
        ({"prefills": [(0, 0)]}, r"chunk \(new tokens 0, context 0\); new must be at least 1"),
        ({"prefills": [(5, -1)]}, r"chunk \(new tokens 5, context -1\)"),
        ({"decodes": [(1, 4)], "decode_kv_tokens": 3}, "decode_kv_tokens is 3 for 4 decode tokens"),
        ({"prefills": [(4, 0)], "decode_kv_tokens": 3}, "KV of decodes needs decodes"),
        ({"decode_kv_tokens": 1}, "KV of decodes needs decodes"),
        ({"decodes": [(1, 4)], "decode_kv_tokens": 40, "max_kv_len": 9}, "max_kv_len is 9.*between 10 and 40"),
        ({"prefills": [(4, 6)], "max_kv_len": 9}, "max_kv_len is 9.*between 10 and 10"),
        ({"decodes": [(1, 4)], "max_kv_len": 5}, "max_kv_len is 5.*between 1 and 4"),
        ({"num_active_loras": -1}, "num_active_loras is -1"),
        ({"max_decode_steps": 0}, "max_decode_steps 0"),
        ({"decodes": [(1, LARGEST_COUNT + 1)]}, f"counts to {LARGEST_COUNT + 1}; no count may be over"),
        ({"prefills": [(1, LARGEST_COUNT)]}, "no count may be over"),
        ({"decodes": [(1, 1)], "decode_kv_tokens": LARGEST_COUNT + 1}, "no count may be over"),
        ({"num_active_loras": LARGEST_COUNT + 1}, "num_active_loras counts to .*no count may be over"),
        ({"max_decode_steps": 2**40}, f"max_decode_steps counts to {2**40}; no count may be over"),
        ({"decodes": [(1.7, 3)]}, r"decodes is 1\.7; counts are whole numbers"),
        ({"decodes": [(1, 3), (2, 1.0)]}, r"\(query length, count\) in decodes is 1\.0; counts are"),
        ({"decodes": [("a", 1)]}, r"in decodes is 'a'; counts are whole numbers"),
        ({"decodes": [(True, 1)]}, "in decodes is True; counts are"),
        ({"decodes": [(None, 1)]}, "in decodes is None; counts are"),
        ({"decodes": 5}, r"decodes is 5; it must be pairs of \(query length, count\)"),
        ({"decodes": [1, 2]}, r"decodes is \[1, 2\]; it must be pairs"),
        ({"decodes": [(1, 2, 3)]}, "decodes is .*it must be pairs"),
        ({"prefills": [(4,)]}, r"prefills is .*it must be pairs of \(new tokens, context\)"),
        ({"prefills": [(4, 0.5)]}, r"\(new tokens, context\) in prefills is 0\.5; counts are"),
        ({"decodes": [(1, 2)], "decode_kv_tokens": 2.5}, r"decode_kv_tokens is 2\.5; counts are"),
        ({"decodes": [(1, 2)], "decode_kv_tokens": "7"}, "decode_kv_tokens is '7'; counts are"),
        ({"decodes": [(1, 2)], "max_kv_len": 1.5}, r"max_kv_len is 1\.5; counts are"),
        ({"num_active_loras": 1.5}, r"num_active_loras is 1\.5; counts are"),
        ({"num_active_loras": None}, "num_active_loras is None; counts are"),
        ({"max_decode_steps": True}, f"max_decode_steps is True; counts are whole numbers, at most {LARGEST_COUNT}"),
    ],
)
def test_shapes_that_no_batch_has(arguments: dict[str, Any], match: str) -> None:
    """Negative, zero, inconsistent and overflowing counts are errors that name the count and what is allowed."""
    with pytest.raises(ShapeError, match=match):
        BatchShape(**arguments)


def test_integers_of_other_libraries_are_counts() -> None:
    """Numpy's integers count as Python's do, and are kept as these."""
    numpy = pytest.importorskip("numpy")
    i = numpy.int64
    shape = BatchShape(
        decodes=numpy.array([[1, 3], [4, 2]]),
        prefills=[(i(5), 6)],
        decode_kv_tokens=i(70),
        max_kv_len=i(40),
        num_active_loras=numpy.uint8(2),
        max_decode_steps=i(4),
    )
    plain = BatchShape(
        decodes=[(1, 3), (4, 2)],
        prefills=[(5, 6)],
        decode_kv_tokens=70,
        max_kv_len=40,
        num_active_loras=2,
        max_decode_steps=4,
    )
    assert shape == plain
    assert shape.numbers == plain.numbers
    assert {type(number) for number in shape.numbers[:-1]} == {int}
    assert {type(number) for pair in (*shape.decodes, *shape.prefills) for number in pair} == {int}


@given(shapes())
def test_numbers_are_the_sums_of_the_rows(shape: BatchShape) -> None:
    """The plain numbers count what the runs and chunks say, each worked out the long way."""
    numbers = shape.numbers
    decode_rows = [length for length, count in shape.decodes for _ in range(count)]
    assert numbers.num_decodes == len(decode_rows)
    assert numbers.decode_tokens == sum(decode_rows)
    assert numbers.query_len == (decode_rows[0] if len(set(decode_rows)) == 1 else 0)
    assert numbers.longest_decode == max(decode_rows, default=0)
    assert numbers.num_prefill_tokens == sum(new for new, _ in shape.prefills)
    assert numbers.prefill_kv_tokens == sum(new + context for new, context in shape.prefills)
    pairs = sum(context + i + 1 for new, context in shape.prefills for i in range(new))
    assert numbers.prefill_pairs == pairs
    assert numbers.num_first_chunks == sum(context == 0 for _, context in shape.prefills)
    assert numbers.longest_query == max([*decode_rows, *(new for new, _ in shape.prefills)], default=0)
    assert shape.num_tokens == numbers.total_tokens == sum(decode_rows) + numbers.num_prefill_tokens
    assert shape.num_reqs == numbers.total_reqs == len(decode_rows) + len(shape.prefills)
    assert numbers.forbidden == forbidden_mask(shape.forbidden)
    assert all(bool(numbers.forbidden & mode.bit) == (mode in shape.forbidden) for mode in Mode)


@given(st.integers(1, 200), st.integers(1, 8), st.integers(0, 10**6))
def test_the_short_form_of_a_uniform_batch_counts_alike(num_reqs: int, query_len: int, more: int) -> None:
    """Three numbers stand for a uniform decode batch and count what the whole tuple counts."""
    kv_tokens = num_reqs * query_len + more
    whole = BatchShape.decode(num_reqs, kv_tokens, query_len=query_len).numbers
    short = BatchNumbers(num_reqs, query_len, kv_tokens)
    for name in ("decode_tokens", "total_tokens", "total_reqs", "longest_query", "longest_decode"):
        assert getattr(short, name) == getattr(whole, name)


def test_defaults_are_the_least_that_the_rows_can_have() -> None:
    """Without KV counts each decode token attends to itself, and the longest is as short as the totals allow."""
    assert BatchShape.decode(4).numbers.decode_kv_tokens == 4
    assert BatchShape.decode(4, 41).numbers.max_kv_len == 11
    assert BatchShape(prefills=[(3, 7), (5, 0)]).numbers.max_kv_len == 10


@pytest.mark.parametrize("value", ["7", 1.5, True, -1])
@pytest.mark.parametrize("name", ["waiting_reqs", "gap_tail_us"])
def test_a_fact_that_counts_is_a_count(name: str, value: Any) -> None:
    """How many requests wait, and how long gaps are, are whole numbers from 0, or the fact is refused by name."""
    with pytest.raises(ShapeError, match=name):
        BatchShape.decode(4, facts={name: value})


def test_shapes_compare_by_their_rows() -> None:
    """Equal rows are equal shapes, as a key of a mapping too; facts are compared, not hashed."""
    shape = BatchShape(decodes=[(1, 2)], prefills=[[3, 0]], forbidden=[Mode.FULL])  # type: ignore[list-item]
    same = BatchShape(decodes=((1, 2),), prefills=((3, 0),), forbidden={Mode.FULL})
    assert {shape: 1}[same] == 1
    assert shape != BatchShape(decodes=((1, 2),), prefills=((3, 0),))
    assert BatchShape(facts={"a": 1}) != BatchShape(facts={"a": 2})


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        (BatchShape(), "empty"),
        (BatchShape.decode(32), "decodes 32 x 1"),
        (BatchShape(decodes=[(4, 2), (1, 3)]), "decodes 2 x 4 + 3 x 1"),
        (BatchShape(decodes=[(1, 2)], prefills=[(64, 0), (8, 512)]), "decodes 2 x 1, prefill 64, 8@512"),
        (BatchShape(prefills=[(64, 0)]), "prefill 64"),
    ],
)
def test_shapes_in_words(shape: BatchShape, text: str) -> None:
    """A shape prints its runs and chunks, context after an at sign."""
    assert str(shape) == text


@pytest.mark.parametrize("forbidden", [["full"], 5, "full"])
def test_forbidden_takes_modes_only(forbidden: object) -> None:
    """A name or a number where a mode belongs is a ShapeError that says how to make a mode."""
    with pytest.raises(ShapeError, match=r"forbidden has .*Mode"):
        BatchShape(forbidden=forbidden)


def test_one_forbidden_mode_is_a_mode() -> None:
    """A mode is text too, and isn't taken for its letters; nor is a name."""
    assert BatchShape(forbidden=Mode.FULL).forbidden == {Mode.FULL}  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="forbidden has 'full'"):
        BatchShape(forbidden="full")  # type: ignore[arg-type]


def test_facts_are_a_mapping() -> None:
    """Anything else is a ShapeError of its name."""
    with pytest.raises(ShapeError, match="facts is 3; it is a mapping"):
        BatchShape.decode(4, facts=3)
