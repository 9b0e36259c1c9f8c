"""The vLLM-Ascend replica: golden decisions, its sizes, its downgrades, its ranks, and properties."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kpolicy.errors import ConfigError, LadderError, UnknownNameError
from kpolicy.ladders import CaptureLadder
from kpolicy.modes import Mode, Part
from kpolicy.policies import get_policy
from kpolicy.policies.ascend import MODES, ascend, stepped_sizes
from kpolicy.policies.base import PolicyContext
from kpolicy.reasons import Reason
from kpolicy.settings import Settings
from kpolicy.shapes import BatchShape
from kpolicy.testing.strategies import contexts, shapes
from tests.policies.replicas import ATTENTION, COSTS, agreed, check_golden, check_properties, context_of, rows

ORDER = (Mode.FULL, Mode.PIECEWISE, Mode.EAGER)


@pytest.mark.parametrize(("section", "batch", "wanted"), rows("ascend"))
def test_golden(section, batch, wanted):
    """The decision is the one typed from the rule."""
    check_golden(section, batch, wanted)


@pytest.mark.parametrize(
    ("max_reqs", "drafts", "largest", "count"),
    [(256, 0, 256, 35), (512, 0, 512, 51), (1024, 0, 512, 51), (100, 0, 96, 15), (16, 3, 64, 9), (1024, 1, 512, 50)],
)
def test_default_sizes(max_reqs, drafts, largest, count):
    """The maximum is requests x (1 + k) up to 512, not doubled, and is no size itself when it is off the steps."""
    sizes = ascend().sizes(Settings(max_num_reqs=max_reqs, num_speculative_tokens=drafts)).piecewise
    assert sizes[-1] == largest
    assert len(sizes) == count
    assert all(size % (1 + drafts) == 0 for size in sizes)


def test_stepped_sizes():
    """The steps are vLLM's: by 8 below 256, then by 16; 51 up to 512."""
    assert stepped_sizes(512) == (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
    assert len(stepped_sizes(512)) == 51


def test_piecewise_mode_is_not_aligned_to_drafts():
    """Only modes with FULL graphs round their sizes to 1 + k."""
    deployment = Settings(max_num_reqs=16, num_speculative_tokens=2)
    assert ascend("piecewise").sizes(deployment).piecewise[:4] == (1, 2, 4, 8)
    assert ascend("full").sizes(deployment).mixed[:4] == (3, 6, 9, 18)


def test_alignment():
    """Sizes off the tensor-parallel alignment are dropped; when none is left, that is an error."""
    assert ascend(align=4).sizes(Settings(max_num_reqs=16)).piecewise == (4, 8, 16)
    with pytest.raises(LadderError, match="align = 8"):
        ascend(align=8).sizes(Settings(max_num_reqs=4))


@pytest.mark.parametrize("spec", ["ascend:mode=both", "ascend:align=0"])
def test_refused_arguments(spec):
    """An unknown mode or alignment is an error."""
    with pytest.raises(ConfigError):
        get_policy(spec)
    with pytest.raises(UnknownNameError, match="did you mean 'full_decode_only'"):
        ascend("full_decode_onyl")


@pytest.mark.parametrize(
    ("mode", "attention", "drafts", "resolved"),
    [
        ("full", "mixed", 0, "full"),
        ("full", "uniform", 0, "full_decode_only"),
        ("full", "single", 0, "full_decode_only"),
        ("full", "single", 3, "none"),
        ("full", "none", 0, "none"),
        ("full_decode_only", "uniform", 3, "full_decode_only"),
        ("full_decode_only", "single", 3, "none"),
        ("full_decode_only", "none", 0, "none"),
        ("full_and_piecewise", "uniform", 3, "full_and_piecewise"),
        ("full_and_piecewise", "single", 3, "piecewise"),
        ("full_and_piecewise", "none", 0, "piecewise"),
        ("full_and_piecewise", "unsplit", 0, "none"),
        ("piecewise", "none", 0, "piecewise"),
        ("piecewise", "unsplit", 0, "none"),
    ],
)
def test_start_up(mode, attention, drafts, resolved):
    """Start-up comes to what vLLM's tables say, with pieces for two of the modes and without for the others."""
    deployment = Settings(num_speculative_tokens=drafts)
    assert ascend(mode).resolved(ATTENTION[attention], deployment) == resolved
    found = ascend(mode).resolve(ATTENTION[attention], deployment)
    assert [(each.asked, each.resolved) for each in found] == ([] if mode == resolved else [(mode, resolved)])


def test_host_lengths_that_can_be_updated_dont_refuse_full():
    """Only frozen host lengths take FULL away, and the downgrade says so."""
    found = ascend("full").resolve(ATTENTION["frozen"], Settings())
    assert [each.reason for each in found] == [Reason.HOST_LENGTHS_FROZEN]


def test_one_padded_size_is_tried():
    """Where the FULL graph of the padded size was withdrawn, the batch drops to PIECEWISE of that size."""
    deployment = Settings(max_num_reqs=16)
    policy = ascend()
    keys = policy.plan(policy.sizes(deployment), ATTENTION["mixed"], deployment)
    lost = [key for key in keys if key.part is Part.FULL and key.num_tokens == 8]
    ladder = CaptureLadder([key for key in keys if key not in lost], withdrawn=lost)
    context = PolicyContext(claims=ATTENTION["mixed"], ladder=ladder, costs=COSTS, settings=deployment)
    decision = policy.decide(BatchShape.decode(5), context)
    assert (decision.mode, decision.keys[0].num_tokens) == (Mode.PIECEWISE, 8)


@pytest.mark.parametrize(
    ("ranks", "wanted"),
    [
        (("d3", "d9"), ["F 16/16 graph_fits"] * 2),
        (("d3", ""), ["F 4/4 graph_fits", "F 4/4 ranks_agreed"]),
        (("d3", "p20"), ["P 24 rank_needs_less", "P 24 graph_fits"]),
        (("d3", "p600"), ["E rank_needs_eager", "E above_largest_size"]),
    ],
)
def test_ranks(ranks, wanted):
    """All ranks run the least of their modes at the size of the largest."""
    policy = ascend()
    context = context_of(policy, Settings(max_num_reqs=32), ATTENTION["mixed"])
    assert agreed(policy, context, *ranks) == wanted


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_agreed_mode_is_the_least(data):
    """Whatever the ranks hold, none runs more than the least of what they would run alone."""
    policy = ascend(data.draw(st.sampled_from(MODES)))
    context = data.draw(contexts(policy))
    ranks = [shape.numbers for shape in data.draw(st.lists(shapes(), min_size=1, max_size=3))]
    compiled = policy.compile(context)
    reduced = [max(column) for column in zip(*(compiled.vote(each) for each in ranks), strict=True)]
    alone = [ORDER.index(compiled.select(*each).mode) for each in ranks if each.total_tokens]
    if alone:
        got = ORDER.index(compiled.agree(reduced, ranks[0]).mode)
        assert got == max(alone) or got == ORDER.index(Mode.EAGER)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_properties(data):
    """Any mode, any batch: decided, as the prepared path does, by a graph that holds the batch."""
    policy = ascend(data.draw(st.sampled_from(MODES)))
    context = data.draw(contexts(policy))
    for shape in data.draw(st.lists(shapes(), min_size=1, max_size=4)):
        check_properties(policy, context, shape)
