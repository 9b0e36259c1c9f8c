"""The TensorRT-LLM replica: golden decisions, default sizes, ranks, and properties over drawn batches and facts."""

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kpolicy.errors import UnknownNameError
from kpolicy.policies import get_policy
from kpolicy.policies.tensorrt_llm import TensorRtLlmPolicy, decode_sizes, prefill_sizes
from kpolicy.reasons import Reason
from kpolicy.settings import Settings
from kpolicy.testing.strategies import contexts, shapes
from tests.policies.replicas import ATTENTION, agreed, check_golden, check_properties, context_of, rows

FACTS = ("expert_statistics", "not_last_chunk", "beam_search", "disaggregated", "input_embeds", "context_logits")


@pytest.mark.parametrize(("section", "batch", "wanted"), rows("tensorrt_llm"))
def test_golden(section, batch, wanted):
    """The decision is the one typed from TensorRT-LLM's rule."""
    check_golden(section, batch, wanted)


def test_default_decode_sizes():
    """The lists with and without padding are those of its configuration class."""
    assert decode_sizes(128, padding=False) == (*range(1, 33), 64, 128)
    assert decode_sizes(2048, padding=False)[-5:] == (128, 256, 512, 1024, 2048)
    assert decode_sizes(512, padding=True) == (1, 2, 4, *range(8, 129, 8), 192, 256, 320, 384, 448, 512)
    assert decode_sizes(500, padding=True)[-2:] == (448, 500)
    assert decode_sizes(3, padding=False) == (1, 2, 3)


def test_default_prefill_sizes():
    """Powers of two to 128, then every 256 to 3,072."""
    assert prefill_sizes(8192) == (1, 2, 4, 8, 16, 32, 64, 128, *range(256, 3073, 256))
    assert len(prefill_sizes(8192)) == 20


def test_decode_graphs_only_by_default():
    """Prefill graphs are off unless asked for."""
    deployment = Settings()
    policy = TensorRtLlmPolicy()
    keys = policy.plan(policy.sizes(deployment), ATTENTION["mixed"], deployment)
    assert len(keys) == 34
    assert all(key.query_len == 1 for key in keys)


def test_downgrades():
    """Each query length, and prefill where it is on, is told apart."""
    drafts = Settings(num_speculative_tokens=3)
    found = TensorRtLlmPolicy(prefill="piecewise").resolve(ATTENTION["unsplit"], drafts)
    assert [(each.batches, each.reason) for each in found] == [
        ("decodes of 1 tokens", Reason.SUPPORT_NONE),
        ("decodes of 4 tokens", Reason.SUPPORT_NONE),
        ("batches with prefill", Reason.NO_PIECEWISE),
    ]
    assert [each.reason for each in TensorRtLlmPolicy().resolve(ATTENTION["single"], drafts)] == [
        Reason.SPECULATION_TOO_WIDE
    ]


def test_from_reading():
    """It says that it comes from reading, and refuses a prefill backend that there isn't."""
    assert "from reading" in TensorRtLlmPolicy().summary
    with pytest.raises(UnknownNameError, match="breakable"):
        get_policy("tensorrt_llm:prefill=breakble")


@pytest.mark.parametrize(
    ("arguments", "ranks", "wanted"),
    [
        ({}, ("d4", "d4"), ["F 4/4 graph_fits"] * 2),
        ({}, ("d4", "d3"), ["E rank_needs_eager"] * 2),  # sizes differ, and padding is off
        ({}, ("d4", ""), ["F 4/4 graph_fits", "F 4/4 ranks_agreed"]),
        ({}, ("d4", "d3 + p1@9"), ["F 4/4 graph_fits"] * 2),
        ({}, ("d4", "p8"), ["E rank_needs_eager", "E phase_disabled"]),
        ({"enable_padding": True}, ("d4", "d9"), ["F 16/16 graph_fits"] * 2),
        ({"enable_padding": True}, ("d4", "d9 expert_statistics=1"), ["E rank_needs_eager", "E expert_statistics"]),
        ({"prefill": "piecewise"}, ("d4", "p100"), ["P 128 rank_needs_less", "P 128 graph_fits"]),
        ({"prefill": "piecewise"}, ("d4", "d3"), ["E rank_needs_eager"] * 2),  # no context request on any rank
        ({"prefill": "piecewise"}, ("d4", "p4000"), ["E rank_needs_eager", "E above_largest_size"]),
        ({"prefill": "piecewise"}, ("", ""), ["E empty_batch"] * 2),
    ],
)
def test_ranks(arguments, ranks, wanted):
    """FULL needs all ranks eligible, of equal size without padding; context requests send all to the prefill graph."""
    policy = TensorRtLlmPolicy(**arguments)
    context = context_of(policy, Settings(), ATTENTION["mixed"])
    assert agreed(policy, context, *ranks) == wanted


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_properties(data):
    """Any arguments, any batch, any facts: decided, as the prepared path does, by a graph that holds the batch."""
    policy = data.draw(
        st.builds(
            TensorRtLlmPolicy,
            enable_padding=st.booleans(),
            prefill=st.sampled_from(["disabled", "piecewise", "breakable"]),
            max_reqs=st.integers(1, 40),
        )
    )
    context = data.draw(contexts(policy))
    for shape in data.draw(st.lists(shapes(), min_size=1, max_size=4)):
        facts = data.draw(st.dictionaries(st.sampled_from(FACTS), st.booleans(), max_size=2))
        check_properties(policy, context, attrs.evolve(shape, facts=facts))
