"""The Kunlun replica: golden decisions, its sizes, what it refuses, its ranks, and properties."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kpolicy.errors import ConfigError
from kpolicy.modes import Mode
from kpolicy.policies import get_policy
from kpolicy.policies.kunlun import MODES, KunlunPolicy
from kpolicy.reasons import Reason
from kpolicy.settings import Settings
from kpolicy.testing.strategies import contexts, shapes
from tests.policies.replicas import ATTENTION, agreed, check_golden, check_properties, context_of, rows


@pytest.mark.parametrize(("section", "batch", "wanted"), rows("kunlun"))
def test_golden(section, batch, wanted):
    """The decision is the one typed from the page's rule."""
    check_golden(section, batch, wanted)


def test_default_sizes():
    """With 128 requests there are 35 PIECEWISE sizes, as public capture logs show; the maximum is vLLM's, doubled."""
    sizes = KunlunPolicy().sizes(Settings(max_num_reqs=128))
    assert len(sizes.piecewise) == 35
    assert sizes.piecewise[-1] == 256
    assert sizes.decode[-1] == 128


def test_threshold_bounds_the_sizes():
    """A threshold bounds what is captured, of the default sizes and of the user's."""
    deployment = Settings(max_num_reqs=128)
    policy = KunlunPolicy(threshold=100)
    assert policy.sizes(deployment).piecewise[-1] == 96
    keys = policy.plan(KunlunPolicy().sizes(deployment), ATTENTION["mixed"], deployment)
    assert max(key.num_tokens for key in keys) == 96


def test_frozen_host_lengths_refuse_full():
    """Where a graph would freeze host lengths no FULL graph is planned, and start-up says so."""
    deployment = Settings(max_num_reqs=128)
    policy = KunlunPolicy()
    keys = policy.plan(policy.sizes(deployment), ATTENTION["frozen"], deployment)
    assert {key.part.value for key in keys} == {"piecewise"}
    (found,) = policy.resolve(ATTENTION["frozen"], deployment)
    assert (found.asked, found.resolved, found.reason) == ("full", "piecewise", Reason.HOST_LENGTHS_FROZEN)


def test_downgrades():
    """Without pieces and without capturable attention both of the rule's graphs are told."""
    found = KunlunPolicy().resolve(ATTENTION["unsplit"], Settings())
    assert [(each.resolved, each.reason) for each in found] == [
        ("eager", Reason.SUPPORT_NONE),
        ("eager", Reason.NO_PIECEWISE),
    ]
    assert KunlunPolicy().resolve(ATTENTION["uniform"], Settings()) == ()


@pytest.mark.parametrize("argument", ["mode=full", "threshold=x"])
def test_refused_arguments(argument):
    """An unknown mode and a threshold that is no number are errors."""
    with pytest.raises(ConfigError):
        get_policy(f"kunlun:{argument}")


def test_from_reading():
    """It says that it comes from reading."""
    assert "from reading" in KunlunPolicy().summary


def test_ranks():
    """All ranks run the least of their modes at the size of the largest."""
    policy = KunlunPolicy()
    context = context_of(policy, Settings(max_num_reqs=128), ATTENTION["mixed"])
    assert agreed(policy, context, "d3", "d9") == ["F 16/16 graph_fits"] * 2
    assert agreed(policy, context, "d3", "p20") == ["P 24 rank_needs_less", "P 24 graph_fits"]
    assert agreed(policy, context, "d3", "p300") == ["E rank_needs_eager", "E above_threshold"]
    assert agreed(policy, context, "", "p20") == ["P 24 ranks_agreed", "P 24 graph_fits"]


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_properties(data):
    """Any mode and threshold, any batch: decided, as the prepared path does, and never above the threshold."""
    policy = KunlunPolicy(mode=data.draw(st.sampled_from(MODES)), threshold=data.draw(st.sampled_from([0, 40])))
    context = data.draw(contexts(policy))
    for shape in data.draw(st.lists(shapes(), min_size=1, max_size=4)):
        check_properties(policy, context, shape)
        if policy.threshold and shape.num_tokens > policy.threshold:
            assert policy.decide(shape, context).mode is Mode.EAGER
