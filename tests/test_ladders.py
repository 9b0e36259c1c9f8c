"""Capture sizes, the keys they stand for, and the view of keys that policies read."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kpolicy.attention import Claims
from kpolicy.errors import ConfigError, LadderError
from kpolicy.keys import GraphKey
from kpolicy.ladders import CaptureLadder, CaptureSizes, check_sizes, decode_sizes, default_sizes, plan_keys
from kpolicy.modes import Part
from kpolicy.policies.base import admits, full_keys, piecewise_keys
from kpolicy.settings import Settings
from kpolicy.shapes import BatchShape
from kpolicy.testing.strategies import claims, ladders, settings

MIXED = Claims.at_level("mixed")


@pytest.mark.parametrize(
    ("sizes", "rest", "match"),
    [
        ((), {}, "the list is empty; give at least one capture size"),
        ((1, 2.0), {}, "has the size 2.0; sizes are whole numbers"),
        ((True, 2), {}, "has the size True"),
        (("8",), {}, "has the size '8'"),
        ((0, 4), {}, "has the size 0"),
        ((-4,), {}, "has the size -4"),
        ((4, 2, 8), {}, "has 2 after 4; sizes rise without repeats. Sorted: 2,4,8."),
        ((4, 4, 8), {}, "has 4 after 4; sizes rise without repeats. Sorted: 4,8."),
        ((4, 7, 8), {"multiple_of": 4}, "has the size 7, not a multiple of 4.*Rounded up: 4,8."),
        ((1, 2, 3), {"multiple_of": 3}, "has the size 1, not a multiple of 3.*Rounded up: 3."),
        ((4, 80), {"largest": 64}, "ends at 80, over the 64 tokens one step may have"),
    ],
)
def test_sizes_that_cannot_be_captured(sizes: Any, rest: dict[str, int], match: str) -> None:
    """Each list that can't be used is an error with the list's name, the size and the remedy."""
    with pytest.raises(LadderError, match=match) as caught:
        check_sizes("the list", sizes, **rest)
    assert isinstance(caught.value, ConfigError)
    assert str(caught.value).startswith("the list")


@given(st.integers(1, 3000))
def test_default_sizes_have_a_bucket_for_every_size(largest: int) -> None:
    """Every size up to the limit, on the grid or off it, is held by a default size."""
    sizes = default_sizes(largest)
    assert check_sizes("default sizes", sizes, largest=largest) == sizes
    assert sizes[-1] == largest
    assert sizes[0] == 1


@given(st.integers(1, 3000), st.data())
def test_padding_is_monotone_and_leaves_sizes_alone(largest: int, data: st.DataObject) -> None:
    """A size that is captured isn't padded, more tokens never pad to less, and padding stays under an eighth or 8."""
    sizes = default_sizes(largest)
    ladder = CaptureLadder(GraphKey(Part.PIECEWISE, size) for size in sizes)
    tokens = data.draw(st.integers(1, largest))

    def padded(tokens: int) -> int:
        return piecewise_keys(BatchShape(prefills=[(tokens, 0)]).numbers, ladder)[0].num_tokens

    assert padded(tokens) >= tokens
    assert padded(sizes[data.draw(st.integers(0, len(sizes) - 1))]) in sizes
    assert all(padded(size) == size for size in sizes[:: max(1, len(sizes) // 8)])
    if tokens < largest:
        assert padded(tokens) <= padded(tokens + 1)
    assert padded(tokens) - tokens < max(8, -(-tokens // 8))


@given(settings())
def test_defaults_hold_every_batch_up_to_the_limits(deployment: Settings) -> None:
    """With the default ladder every uniform decode batch and every size up to the limits has a graph."""
    sizes = CaptureSizes.default(deployment)
    sizes.check(deployment)
    ladder = CaptureLadder(plan_keys(sizes, MIXED, deployment))
    most = min(deployment.max_num_reqs, deployment.max_num_tokens // deployment.query_len)
    for num_reqs in range(1, most + 1):
        for q in deployment.decode_query_lens:
            (key, *_) = full_keys(BatchShape.decode(num_reqs, query_len=q).numbers, ladder)
            assert key.query_len == q
            assert key.num_reqs >= num_reqs
    for tokens in range(1, deployment.max_num_tokens + 1):
        assert piecewise_keys(BatchShape(prefills=[(tokens, 0)]).numbers, ladder)


@pytest.mark.parametrize("limit", [97, 100, 193, 255, 2048])
def test_an_off_grid_maximum_is_covered(limit: int) -> None:
    """A limit that isn't on the grid is a size of its own, so the last sizes before it have a bucket too."""
    assert default_sizes(limit)[-1] == limit
    sizes = CaptureSizes.default(Settings(max_num_reqs=limit))
    assert sizes.decode[-1] == limit


def test_one_list_for_every_kind() -> None:
    """`of` checks one list against the limits and cuts decode sizes at the most rows."""
    sizes = CaptureSizes.of([4, 8, 64], Settings(max_num_reqs=8, max_num_tokens=64))
    assert (sizes.decode, sizes.mixed, sizes.piecewise) == ((4, 8), (4, 8, 64), (4, 8, 64))
    with pytest.raises(LadderError, match=r"not a multiple of 3 \(1 \+ speculative tokens\).*Rounded up: 3,6,9"):
        CaptureSizes.of([2, 4, 8], Settings(num_speculative_tokens=2))
    with pytest.raises(LadderError, match="over the 64 tokens"):
        CaptureSizes.of([65], Settings(max_num_tokens=64))


@pytest.mark.parametrize(
    ("sizes", "match"),
    [
        (CaptureSizes(()), "the ladder is empty"),
        (CaptureSizes((3,)), "decode sizes has the size 3, not a multiple of 2"),
        (
            CaptureSizes((18,)),
            "decode sizes ends at 18, over the 16 decode tokens that max_num_reqs 8 allows \\(2 each\\)",
        ),
        (CaptureSizes((), (8, 4)), "mixed sizes has 4 after 8"),
        (CaptureSizes((), (), (4, 65)), "piecewise sizes ends at 65, over the 64"),
    ],
)
def test_each_list_is_checked_by_name(sizes: CaptureSizes, match: str) -> None:
    """Planning keys of a list that can't be used names the list."""
    deployment = Settings(max_num_reqs=8, max_num_tokens=64, num_speculative_tokens=1)
    with pytest.raises(LadderError, match=match):
        plan_keys(sizes, MIXED, deployment)


@given(st.data(), claims(), settings())
def test_planned_keys_are_admitted_distinct_and_whole(
    data: st.DataObject, claimed: Claims, deployment: Settings
) -> None:
    """Attention admits each planned key, none comes twice, and a uniform graph has whole rows."""
    keys = plan_keys(data.draw(ladders(deployment)), claimed, deployment)
    assert len(set(keys)) == len(keys)
    for key in keys:
        assert admits(claimed, key)
        assert key.lora_case in (0, deployment.max_loras)
        if key.query_len is not None:
            assert key.num_tokens == key.query_len * (key.num_reqs or 0)
    plain = {key for key in keys if not key.lora_case}
    if deployment.max_loras:
        assert {attrs.evolve(key, lora_case=deployment.max_loras) for key in plain} == set(keys) - plain


def test_keys_by_support_level() -> None:
    """What attention can't capture isn't planned."""
    deployment = Settings(max_num_reqs=8, num_speculative_tokens=3)
    sizes = CaptureSizes((4, 32), (64,), (64,))

    def kinds(level: str, **rest: Any) -> set[str]:
        keys = plan_keys(sizes, Claims.at_level(level, **rest), deployment)
        return {
            "piecewise"
            if key.part is Part.PIECEWISE
            else f"q={key.query_len}"
            if key.query_len
            else "varlen"
            if key.max_query_len
            else "mixed"
            for key in keys
        }

    assert kinds("none") == {"piecewise"}
    assert kinds("none", piecewise=False) == set()
    assert kinds("single") == {"piecewise", "q=1"}
    assert kinds("uniform") == {"piecewise", "q=1", "q=4"}
    assert kinds("varlen_decode") == {"piecewise", "q=1", "q=4", "varlen"}
    assert kinds("mixed") == {"piecewise", "q=1", "q=4", "varlen", "mixed"}


def test_the_view_sorts_keys_by_kind_and_size() -> None:
    """A view shows its keys by kind, smallest first in each, and what was withdrawn besides."""
    keys = [
        GraphKey(Part.PIECEWISE, 8),
        GraphKey(Part.FULL, 4, 4, query_len=1),
        GraphKey(Part.FULL, 2, 2, query_len=1),
        GraphKey(Part.FULL, 8, 2, query_len=4),
        GraphKey(Part.FULL, 8, 8, max_query_len=4),
        GraphKey(Part.FULL, 16, 8),
        GraphKey(Part.PIECEWISE, 4),
    ]
    view = CaptureLadder(keys, version=3, withdrawn=[keys[0]])
    assert [key.num_tokens for key in view.uniform[1]] == [2, 4]
    assert [key.num_tokens for key in view.piecewise] == [4, 8]
    assert (len(view.uniform[4]), len(view.varlen), len(view.mixed)) == (1, 1, 1)
    assert len(view) == 7
    assert all(key in view for key in keys)
    assert GraphKey(Part.PIECEWISE, 5) not in view
    assert view.withdrawn == (keys[0],)
    assert "7 keys, version=3" in repr(view)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"num_tokens": 0}, "num_tokens"),
        ({"num_tokens": 4, "num_reqs": 0}, "num_reqs of a graph key is 0; it is a whole number from 1 up"),
        ({"num_tokens": 7.5}, "num_tokens of a graph key is 7.5"),
        ({"num_tokens": 4, "query_len": 0}, "query_len of a graph key is 0"),
        ({"num_tokens": 4, "max_query_len": -1}, "max_query_len of a graph key is -1"),
        ({"num_tokens": 4, "lora_case": None}, "lora_case of a graph key is None"),
        ({"num_tokens": 4, "part": "full"}, r"part is 'full'; it is Part.FULL or Part.PIECEWISE"),
        ({"num_tokens": 4, "lora_case": -1}, "lora_case of a graph key is -1; it is a whole number from 0 up"),
        ({"num_tokens": 4, "query_len": 1, "max_query_len": 2}, "one query length or of varying ones"),
    ],
)
def test_keys_that_no_graph_has(arguments: dict[str, Any], match: str) -> None:
    """A key without tokens or rows, or of two kinds at once, is an error."""
    with pytest.raises(ConfigError, match=match):
        GraphKey(**{"part": Part.FULL, **arguments})


def test_sizes_of_numpy_are_sizes() -> None:
    """Keys, capture sizes and claims hold them as plain whole numbers, which JSON takes too; true isn't one."""
    np = pytest.importorskip("numpy")
    key = GraphKey(Part.FULL, np.int64(8), np.int32(8), query_len=np.int64(1), lora_case=np.int64(0))
    assert key == GraphKey(Part.FULL, 8, 8, query_len=1)
    assert hash(key) == hash(GraphKey(Part.FULL, 8, 8, query_len=1))
    sizes = CaptureSizes(tuple(np.arange(1, 4)))
    claims = Claims(uniform_query_len=np.int64(4))
    for value in (key.num_tokens, key.num_reqs, key.query_len, key.lora_case, *sizes.decode, claims.uniform_query_len):
        assert type(value) is int
    with pytest.raises(ConfigError, match="num_tokens of a graph key is True"):
        GraphKey(Part.FULL, True)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (GraphKey(Part.PIECEWISE, 64), "PIECEWISE 64t"),
        (GraphKey(Part.FULL, 8, 2, query_len=4), "FULL 8t/2r q=4"),
        (GraphKey(Part.FULL, 8, 8, max_query_len=4, lora_case=2), "FULL 8t/8r q<=4 lora<=2"),
        (GraphKey(Part.FULL, 8, 8, stage="draft", variant="sparse"), "FULL 8t/8r draft sparse"),
    ],
)
def test_keys_in_words(key: GraphKey, text: str) -> None:
    """A key prints the fields that identify it."""
    assert str(key) == text


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 9, 31, 33, 63, 64, 65, 256, 1000])
def test_decode_sizes(most: int) -> None:
    """Rising, up to the most; every size to 8, then neighbours at most a quarter apart, from 64 up an eighth."""
    sizes = decode_sizes(most)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == most
    assert sizes[:8] == tuple(range(1, min(most, 8) + 1))
    for before, size in pairwise(sizes):
        if before >= 8:
            assert (size - before) / before <= (0.125 if before >= 64 else 0.25)
