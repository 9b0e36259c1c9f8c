"""The nano-vllm replica: golden decisions, its sizes and their gap, and properties over drawn batches."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kpolicy.policies.nano_vllm import NanoVllmPolicy, decode_sizes
from kpolicy.reasons import Reason
from kpolicy.settings import Settings
from kpolicy.testing.strategies import contexts, shapes
from tests.policies.replicas import ATTENTION, agreed, check_golden, check_properties, context_of, rows


@pytest.mark.parametrize(("section", "batch", "wanted"), rows("nano_vllm"))
def test_golden(section, batch, wanted):
    """The decision is the one typed from nano-vllm's rule."""
    check_golden(section, batch, wanted)


def test_sizes():
    """The list is 1, 2, 4, 8 and multiples of 16; it misses a limit that is no multiple, and ends at 512."""
    assert decode_sizes(100) == (1, 2, 4, 8, 16, 32, 48, 64, 80, 96)
    assert decode_sizes(1024)[-1] == 512
    assert len(decode_sizes(512)) == 36
    assert decode_sizes(3) == (1, 2, 3)


def test_plan_is_decode_only():
    """One graph a size, of single-token decodes; none when eager is enforced."""
    deployment = Settings(max_num_reqs=100)
    policy = NanoVllmPolicy()
    keys = policy.plan(policy.sizes(deployment), ATTENTION["mixed"], deployment)
    assert [(key.num_tokens, key.num_reqs, key.query_len) for key in keys] == [(n, n, 1) for n in decode_sizes(100)]
    assert NanoVllmPolicy(enforce_eager=True).plan(policy.sizes(deployment), ATTENTION["mixed"], deployment) == ()


def test_drafts_leave_its_graphs_as_they_are():
    """It drafts nothing: its own sizes, told in tokens of 1 + k a row, stand for the same graphs."""
    policy, deployment = NanoVllmPolicy(), Settings(max_num_reqs=100, num_speculative_tokens=2)
    keys = policy.plan(policy.sizes(deployment), ATTENTION["mixed"], deployment)
    assert keys == policy.plan(policy.sizes(Settings(max_num_reqs=100)), ATTENTION["mixed"], Settings(max_num_reqs=100))


def test_downgrades():
    """Attention without capture is a downgrade, and so are drafts, which nano-vllm doesn't know."""
    found = NanoVllmPolicy().resolve(ATTENTION["none"], Settings(num_speculative_tokens=1))
    assert [each.reason for each in found] == [Reason.SUPPORT_NONE, Reason.QUERY_LEN_NOT_CAPTURED]
    assert NanoVllmPolicy().resolve(ATTENTION["single"], Settings()) == ()


def test_from_reading():
    """It says that it comes from reading."""
    assert "from reading" in NanoVllmPolicy().summary


def test_ranks_share_one_size():
    """Ranks replay the size of the largest of them."""
    policy = NanoVllmPolicy()
    context = context_of(policy, Settings(max_num_reqs=64), ATTENTION["mixed"])
    assert agreed(policy, context, "d3", "d9") == ["F 16/16 graph_fits"] * 2
    assert agreed(policy, context, "d3", "p9") == ["E rank_needs_eager", "E phase_disabled"]


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_properties(data):
    """Any batch is decided, as the prepared path does, by a graph that holds it."""
    policy = NanoVllmPolicy(enforce_eager=data.draw(st.booleans()))
    context = data.draw(contexts(policy))
    for shape in data.draw(st.lists(shapes(), min_size=1, max_size=4)):
        check_properties(policy, context, shape)
