"""The SGLang replica: golden decisions, default sizes, ranks, and properties over drawn batches and facts."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kpolicy.errors import ConfigError, NoLegalModeError, UnknownNameError
from kpolicy.ladders import CaptureLadder
from kpolicy.modes import Mode, Part
from kpolicy.policies import get_policy
from kpolicy.policies.base import PolicyContext
from kpolicy.policies.sglang import SglangPolicy, decode_sizes, prefill_sizes, tier_max_reqs
from kpolicy.reasons import Reason
from kpolicy.settings import Settings
from kpolicy.shapes import BatchShape
from kpolicy.testing.strategies import contexts, shapes
from tests.policies.replicas import ATTENTION, COSTS, agreed, check_golden, check_properties, context_of, rows, waste

DEPLOYMENT = Settings(max_num_reqs=512, max_num_tokens=8192)
FACTS = (
    "replace_embeds", "encoder_lens_zero", "cannot_overlap", "cp_refused", "multimodal", "lora_ineligible",
    "input_embeds", "longest_prefix", "target_verify", "hidden_states", "logprobs", "backend_refused", "keep_decode",
)  # fmt: skip
POLICIES = st.builds(
    SglangPolicy,
    decode=st.sampled_from(["full", "full", "disabled"]),
    prefill=st.sampled_from(["breakable", "full", "disabled"]),
    padding=st.booleans(),
    align=st.sampled_from([1, 2]),
    request_slots=st.sampled_from([0, 2, 8]),
    prefix_chunks=st.booleans(),
    metadata_reqs=st.sampled_from([0, 3]),
    max_seq_len=st.sampled_from([0, 500]),
    hidden_states=st.integers(0, 2),
    captured_tail=st.booleans(),
    multimodal_eager=st.booleans(),
    eager_mixed=st.booleans(),
    mha_companion=st.booleans(),
    prefill_lora=st.booleans(),
    two_batch_overlap=st.booleans(),
)


@st.composite
def batches(draw):
    """Any batch, with any facts."""
    shape = draw(shapes())
    facts = draw(st.dictionaries(st.sampled_from(FACTS), st.integers(0, 40), max_size=3))
    return BatchShape(
        decodes=shape.decodes,
        prefills=shape.prefills,
        decode_kv_tokens=shape.decode_kv_tokens,
        num_active_loras=shape.num_active_loras,
        forbidden=shape.forbidden,
        facts=facts,
    )


@pytest.mark.parametrize(("section", "batch", "wanted"), rows("sglang"))
def test_golden(section, batch, wanted):
    """The decision is the one typed from SGLang's rule."""
    check_golden(section, batch, wanted)


@pytest.mark.parametrize(("max_reqs", "graphs"), [(256, 36), (512, 52), (32, 8)])
def test_decode_counts(max_reqs, graphs):
    """The default decode list has as many graphs as SGLang's."""
    assert len(decode_sizes(max_reqs)) == graphs


@pytest.mark.parametrize(("max_tokens", "graphs"), [(2048, 42), (8192, 58), (16384, 74)])
def test_prefill_counts(max_tokens, graphs):
    """The default prefill list has as many graphs as SGLang's."""
    assert len(prefill_sizes(max_tokens)) == graphs


def test_sizes_that_waste_most():
    """The shipped lists waste what was measured of them: 60 % at worst in decode, over 25 % in prefill at 16 sizes."""
    assert max(waste(decode_sizes(256))) == pytest.approx(0.6)
    over = [n for n, share in enumerate(waste(prefill_sizes(2048)), 1) if share > 0.25]
    assert over == [1, 2, 3, 5, 6, 9, *range(33, 39), 49, 50, 51]


@pytest.mark.parametrize(
    ("sizes", "mean"),
    [(decode_sizes(256), 0.048), (decode_sizes(32), 0.156), (prefill_sizes(2048), 0.072), (prefill_sizes(8192), 0.051)],
)
def test_mean_waste(sizes, mean):
    """The mean padding, were every size equally likely, is the one measured of SGLang's lists."""
    shares = waste(sizes)
    assert sum(shares) / len(shares) == pytest.approx(mean, abs=0.0006)


def test_speculative_and_unpadded_sizes():
    """With drafts small sizes are all there, and without padding every size is."""
    assert decode_sizes(64, speculative=True) == (
        *range(1, 9), 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 40, 44, 48, 52, 56, 60, 64,
    )  # fmt: skip
    assert decode_sizes(20, padding=False) == tuple(range(1, 21))
    assert decode_sizes(100)[-2:] == (96, 100)


@pytest.mark.parametrize(
    ("gib", "tp", "max_reqs"),
    [(16, 8, 8), (24, 1, 48), (24, 4, 160), (40, 1, 32), (40, 4, 160), (80, 1, 256), (80, 4, 512), (141, 1, 256),
     (141, 8, 512), (192, 1, 512)],
)  # fmt: skip
def test_memory_tiers(gib, tp, max_reqs):
    """The largest decode graph follows the tier of GPU memory and tensor parallelism."""
    assert tier_max_reqs(gib, tp) == max_reqs


def test_full_prefill_plans_a_graph_for_each_prefix_variant():
    """FULL prefill with prefix chunks multiplies the list by six: 58 sizes at 8,192 tokens make 348 graphs."""
    policy = SglangPolicy(prefill="full", prefix_chunks=True)
    keys = policy.plan(policy.sizes(DEPLOYMENT), ATTENTION["mixed"], DEPLOYMENT)
    assert sum(key.query_len is None for key in keys) == 58 * 6


def test_alignment():
    """Decode sizes off the alignment are dropped, prefill sizes are rounded up to it."""
    sizes = SglangPolicy(align=8).sizes(DEPLOYMENT)
    assert sizes.decode[:4] == (8, 16, 24, 32)
    assert sizes.piecewise[:4] == (8, 16, 24, 32)


def test_downgrades():
    """What attention refuses at start-up is told phase by phase, with the reason."""
    policy = SglangPolicy(prefill="full")
    assert [(d.batches, d.asked, d.resolved, d.reason) for d in policy.resolve(ATTENTION["uniform"], DEPLOYMENT)] == [
        ("batches with prefill", "full", "eager", Reason.SUPPORT_UNIFORM_ONLY)
    ]
    assert [d.reason for d in SglangPolicy().resolve(ATTENTION["unsplit"], DEPLOYMENT)] == [
        Reason.SUPPORT_NONE,
        Reason.NO_PIECEWISE,
    ]
    drafts = Settings(num_speculative_tokens=3)
    assert [d.reason for d in SglangPolicy().resolve(ATTENTION["single"], drafts)] == [Reason.SPECULATION_TOO_WIDE]
    assert SglangPolicy().resolve(ATTENTION["uniform"], drafts) == ()


@pytest.mark.parametrize("argument", ["prefill=tc_piecewise", "decode=breakable", "align=0", "tp=x"])
def test_refused_arguments(argument):
    """A start-up option that SGLang 0.5.23 refuses is an error."""
    with pytest.raises(ConfigError):
        get_policy(f"sglang:{argument}")
    with pytest.raises(UnknownNameError, match="breakable"):
        get_policy("sglang:prefill=breakabel")


def test_withdrawn_graphs():
    """A withdrawn size pads on to the next, within the limit; past the last captured one the reason says so."""
    policy = SglangPolicy()
    keys = policy.plan(policy.sizes(DEPLOYMENT), ATTENTION["mixed"], DEPLOYMENT)
    lost = [key for key in keys if key.part is Part.PIECEWISE and not 100 <= key.num_tokens <= 1024]
    context = PolicyContext(
        claims=ATTENTION["mixed"],
        ladder=CaptureLadder([key for key in keys if key not in lost], withdrawn=lost),
        costs=COSTS,
        settings=DEPLOYMENT,
    )
    decide = {n: policy.decide(BatchShape(prefills=[(n, 0)]), context) for n in (40, 60, 1025)}
    assert decide[40].reason is Reason.PADDING_OVER_LIMIT
    assert decide[60].keys[0].num_tokens == 112
    assert decide[1025].reason is Reason.GRAPH_WITHDRAWN


def test_lora_graph_stands_in_for_a_withdrawn_plain_one():
    """Sizes that only the larger LoRA case still has serve batches without adapters, prepared and scanned alike."""
    deployment = Settings(max_num_reqs=64, max_num_tokens=1024, max_loras=4)
    policy = SglangPolicy()
    keys = policy.plan(policy.sizes(deployment), ATTENTION["mixed"], deployment)
    lost = [key for key in keys if key.query_len and key.lora_case == 0 and key.num_tokens > 4]
    context = PolicyContext(
        claims=ATTENTION["mixed"],
        ladder=CaptureLadder([key for key in keys if key not in lost], withdrawn=lost),
        costs=COSTS,
        settings=deployment,
    )
    for num_reqs, case in ((3, 0), (5, 4)):
        shape = BatchShape.decode(num_reqs)
        decision = policy.decide(shape, context)
        assert decision.keys[0].lora_case == case
        assert policy.compile(context).select(*shape.numbers) == decision


def test_forbidden_eager_raises():
    """Where the rule's only answer is eager and eager is forbidden, there is no legal mode."""
    context = context_of(SglangPolicy(), DEPLOYMENT, ATTENTION["mixed"])
    shape = BatchShape(prefills=[(9000, 0)], forbidden=[Mode.EAGER])
    with pytest.raises(NoLegalModeError):
        SglangPolicy().decide(shape, context)


RANKS = [
    (("d3", "d9"), ["F 12/12 graph_fits", "F 12/12 graph_fits"]),
    (("d3", ""), ["F 4/4 graph_fits", "F 4/4 ranks_agreed"]),
    (("d3", "d600"), ["E rank_needs_eager", "E above_largest_size"]),
    (("d3", "d4 replace_embeds=1"), ["E rank_needs_eager", "E replaced_embeddings"]),
    (("p100", "p500"), ["P 512 graph_fits", "P 512 graph_fits"]),
    (("p100", "p9000"), ["E rank_needs_eager", "E above_largest_size"]),
    (("p100", ""), ["E rank_needs_eager", "E rank_needs_eager"]),
    (("p100", "p100 input_embeds=1"), ["E rank_needs_eager", "E input_embeddings"]),
    (("p100", "d30"), ["P 112 graph_fits", "P 112 rank_needs_less"]),
    (("p100", "d30 keep_decode=1"), ["E rank_needs_eager", "E mixed_not_captured"]),
    (("p100", "d30 logprobs=1"), ["E rank_needs_eager", "E mixed_not_captured"]),
    (("p100", "d1"), ["E rank_needs_eager", "E padding_over_limit"]),
    (("p100", "d30 + p8", "p7"), ["P 112 graph_fits"] * 3),
    (("", ""), ["E empty_batch", "E empty_batch"]),
]


@pytest.mark.parametrize(("ranks", "wanted"), RANKS)
def test_ranks(ranks, wanted):
    """One "no" is everyone's, an idle rank makes prefill eager, and all replay the bucket of the largest."""
    policy = SglangPolicy()
    context = context_of(policy, DEPLOYMENT, ATTENTION["mixed"])
    assert agreed(policy, context, *ranks) == wanted


def test_lora_prefill_is_eager_on_ranks():
    """Under data parallelism a deployment with LoRA runs prefill eagerly, also without an adapter in the batch."""
    deployment = Settings(max_num_reqs=64, max_num_tokens=1024, max_loras=4)
    policy = SglangPolicy()
    context = context_of(policy, deployment, ATTENTION["mixed"])
    assert agreed(policy, context, "p64", "p64") == ["E lora_not_captured"] * 2
    assert agreed(policy, context, "d4", "d3 lora=1") == ["F 4/4 lora graph_fits"] * 2


def test_full_prefill_takes_no_decode_rows_of_other_ranks():
    """Decode batches are turned into extends for breakable graphs only; prefixes agree on the longest variant."""
    policy = SglangPolicy(prefill="full", prefix_chunks=True)
    context = context_of(policy, DEPLOYMENT, ATTENTION["mixed"])
    assert agreed(policy, context, "p64", "d4") == ["E rank_needs_eager", "E mixed_not_captured"]
    assert agreed(policy, context, "p64", "p64@600") == ["F 64/16 prefix2 graph_fits"] * 2


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_properties(data):
    """Any arguments, any batch, any facts: decided, as the prepared path does, by a graph that holds the batch."""
    policy = data.draw(POLICIES)
    context = data.draw(contexts(policy))
    for shape in data.draw(st.lists(batches(), min_size=1, max_size=4)):
        check_properties(policy, context, shape)


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_ranks_with_facts_agree(data):
    """Whatever facts the ranks have, all run one mode and one graph, which holds each."""
    policy = data.draw(POLICIES)
    context = data.draw(contexts(policy))
    ranks = [shape.numbers for shape in data.draw(st.lists(batches(), min_size=1, max_size=3))]
    compiled = policy.compile(context)
    reduced = [max(column) for column in zip(*(compiled.vote(each) for each in ranks), strict=True)]
    decisions = [compiled.agree(reduced, each) for each in ranks]
    assert len({(decision.mode, decision.keys) for decision in decisions}) == 1
    for numbers, decision in zip(ranks, decisions, strict=True):
        assert all(key.num_tokens >= numbers.total_tokens for key in decision.keys)
    if len(ranks) == 1 and not context.settings.max_loras and ranks[0].total_tokens:
        alone = compiled.select(*ranks[0])
        assert (alone.mode, alone.reason) == (decisions[0].mode, decisions[0].reason)
