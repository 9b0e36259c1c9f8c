"""`auto` with several ranks: of the ways that hold every rank's rows it takes the one whose slowest rank ends first."""

from functools import partial
from pathlib import Path

import attrs
import hypothesis
import pytest
from hypothesis import strategies as st

from kpolicy.attention.support import Claims
from kpolicy.costs import AttentionCost, Cost, CostTable, Curve, HostCost, analytic_costs
from kpolicy.ladders import CaptureLadder, CaptureSizes, plan_keys
from kpolicy.modes import Mode, Part, SplitForm
from kpolicy.policies import PolicyContext, get_policy
from kpolicy.policies.auto import cheapest, cheapest_of_unlike, choose, clear_us, near_tie, rate, wait_of
from kpolicy.policies.base import Way, legal_ways
from kpolicy.policies.rank_times import NUM_TIMES, RankTimes, Voted
from kpolicy.policies.ranks import reduced_numbers
from kpolicy.policies.tables import PreparedWays
from kpolicy.reasons import Reason
from kpolicy.settings import Settings
from kpolicy.shapes import BatchShape
from kpolicy.step_effects import StepEffects
from kpolicy.testing.strategies import contexts, shapes
from tests.policies.near_ties import MIXED, near_ties

ANY = hypothesis.settings(max_examples=150, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
ROUNDED_US = 0.01
LINE = Curve((1, 8192), (1.0, 8192.0))
COSTS = CostTable(
    version="by hand", measured=True, full=LINE, piecewise=LINE, eager=LINE,
    prefill_attention=AttentionCost(unit_us=0.001), host_full=HostCost(10.0), host_piecewise=HostCost(50.0),
    host_eager=HostCost(100.0), overlap_cost=0.5,
)  # fmt: skip


def reduced(compiled, ranks):
    """The largest of each vote."""
    return [max(votes) for votes in zip(*map(compiled.vote, ranks), strict=True)]


def ways_of(ranks, context, votes):
    """Every way that holds all ranks' rows, with its time by the votes and that of its slowest rank."""
    costs, times = context.costs, RankTimes(context.costs)
    numbers = reduced_numbers(votes[:-NUM_TIMES])
    for way in legal_ways(numbers, context, cheapest_of_unlike(context)):
        slowest = max(costs.cost(way.launches, rank).cycle_us for rank in ranks)
        yield way, times.cost(way, Voted._make(votes[-NUM_TIMES:])).cycle_us, slowest


def padding_us(way, context, ranks):
    """The most that padding counts for the slowest rank, which may have none."""
    costs = context.costs
    return sum(
        each.repeat * max(costs.padding_of(each.key, each.num_tokens(rank)) for rank in ranks)
        for each in way.launches
        if each.key is not None
    )


@ANY
@hypothesis.given(contexts(get_policy("auto")), st.lists(shapes(), min_size=1, max_size=4))
def test_votes_tell_what_the_slowest_rank_takes(context, drawn):
    """For any rows on any ranks each way's time is that of its slowest rank, or at least that for several steps.

    But for what padding takes more where a rank has some and the slowest has none, and for halves beside each other of
    ranks whose rows slow each other down by unlike much: at least that.
    """
    ranks = [shape.numbers for shape in drawn]
    overlaps = {context.costs.overlap_of(rank.num_decodes, rank.num_prefill_tokens) for rank in ranks}
    unlike = len(overlaps) > 1 or not all(each.gains for each in overlaps)
    votes = reduced(get_policy("auto").compile(context), ranks)
    for way, told, slowest in ways_of(ranks, context, votes):
        bound = any(launch.repeat > 1 for launch in way.launches) or (unlike and way.form is not SplitForm.IN_TURN)
        # A vote's rounding counts once a repeat.
        rounded_us = ROUNDED_US * max((launch.repeat for launch in way.launches), default=1)
        unknown_us = padding_us(way, context, ranks) if len(ranks) > 1 else 0.0
        if unknown_us and any(rank.total_tokens for rank in ranks):
            assert told >= slowest - rounded_us, f"{way}: {told} is below {slowest}"
            assert told <= slowest + unknown_us + rounded_us or (bound and way.mode is Mode.SPLIT)
        elif bound and way.mode is Mode.SPLIT:
            assert told >= slowest - rounded_us, f"{way}: {told} is below {slowest}"
        elif any(rank.total_tokens for rank in ranks):
            assert told == pytest.approx(slowest, abs=rounded_us), str(way)


@ANY
@hypothesis.given(contexts(get_policy("auto")), st.lists(shapes(), min_size=2, max_size=4))
def test_no_way_would_end_the_slowest_rank_sooner(context, drawn):
    """Where each decode row runs one step, no other way that holds all rows ends the slowest rank sooner.

    By no more than what padding takes more, where only a quicker rank has any. Halves count where they are clearly
    shorter than what doesn't divide the batch, by the votes' times.
    """
    costs = attrs.evolve(context.costs, overlap_cost=min(context.costs.overlap_cost, 1), effects=StepEffects())
    context = attrs.evolve(context, costs=costs)
    ranks = [attrs.evolve(shape, max_decode_steps=1).numbers for shape in drawn]
    compiled = get_policy("auto").compile(context)
    votes = reduced(compiled, ranks)
    found = list(ways_of(ranks, context, votes))
    decisions = [compiled.agree(votes, rank) for rank in ranks]
    launches = {tuple(attrs.evolve(each, reason=None) for each in decision.launches) for decision in decisions}
    assert len(launches) == 1
    taken = max(context.costs.cost(decisions[0].launches, rank).cycle_us for rank in ranks)
    alike = all(rank == ranks[0] for rank in ranks)
    told = [Cost(us, us, us, us, us) for _, us, _ in found]
    limit_us = clear_us([way for way, *_ in found], told)
    others = [
        slowest + (0.0 if alike else padding_us(way, context, ranks))
        for (way, _, slowest), cost in zip(found, told, strict=True)
        if not near_tie(way, cost, limit_us)
    ]
    assert taken <= min(others, default=taken) + ROUNDED_US


def test_ranks_take_near_ties_as_choose_does():
    """By the votes' times, on both sides of the margin; with a rank that has fewer rows, or none, or the same."""
    policy = get_policy("auto")

    @hypothesis.settings(ANY, max_examples=300)
    @hypothesis.given(contexts(policy), MIXED, st.sampled_from([None, BatchShape(), BatchShape.decode(1)]))
    def check(context, shape, other):
        for near in near_ties(context, shape):
            ranks = [shape.numbers, (other or shape).numbers]
            compiled, times = policy.compile(near), RankTimes(near.costs)
            votes = reduced(compiled, ranks)
            numbers, voted = reduced_numbers(votes[:-NUM_TIMES]), Voted._make(votes[-NUM_TIMES:])
            pick = cheapest_of_unlike if times.pads and voted.unlike(numbers) else cheapest
            ways = legal_ways(numbers, near, pick(near))
            wanted, _ = choose(numbers, ways, near, partial(times.cost, voted=voted))
            agreed = [compiled.agree(votes, rank) for rank in ranks]
            assert {each.mode for each in agreed} == {wanted.mode}
            assert len({each.keys for each in agreed}) == 1
            taken = times.cost(Way(agreed[0].mode, agreed[0].launches), voted)
            assert taken.cycle_us == pytest.approx(times.cost(wanted, voted).cycle_us, abs=ROUNDED_US)

    check()


@pytest.mark.parametrize(("host_us", "mode"), [(1000.0, Mode.EAGER), (1044.8, Mode.EAGER), (1045.0, Mode.SPLIT)])
def test_ranks_divide_a_batch_where_that_is_clearly_shorter(host_us, mode):
    """As one rank does (test_auto.py): halves take the slowest 1,024 us, and eagerly a step takes 1,028 or more."""
    costs = attrs.evolve(COSTS, host_eager=HostCost(host_us), overlap_cost=0.0, prefill_attention=AttentionCost())
    claims, settings = Claims.at_level("uniform"), Settings(max_num_reqs=16, max_num_tokens=2048)
    keys = plan_keys(CaptureSizes((8,), (), (16, 1024)), claims, settings)
    compiled = get_policy("auto").compile(
        PolicyContext(claims=claims, ladder=CaptureLadder(keys), costs=costs, settings=settings)
    )
    ranks = [
        BatchShape(decodes=[(1, decodes)], prefills=[(prompt, 0)]).numbers
        for decodes, prompt in ((8, 1020), (3, 1000), (8, 1))
    ]
    votes = reduced(compiled, ranks)
    assert {compiled.agree(votes, rank).mode for rank in ranks} == {mode}
    votes = reduced(compiled, [rank._replace(forbidden=Mode.EAGER.bit) for rank in ranks])
    assert {compiled.agree(votes, rank).mode for rank in ranks} == {Mode.SPLIT}


@ANY
@hypothesis.given(contexts(get_policy("auto")), shapes())
def test_one_rank_lets_decode_steps_wait_as_one_engine_does(context, drawn):
    """To a sixteenth of a slot, which a vote's rounding may turn over."""
    context = attrs.evolve(context, costs=attrs.evolve(context.costs, effects=StepEffects()), spreads=True)
    votes = reduced(get_policy("auto").compile(context), [drawn.numbers])
    times, voted = RankTimes(context.costs), Voted._make(votes[-NUM_TIMES:])
    for way in legal_ways(drawn.numbers, context, cheapest_of_unlike(context)):
        told, alone = times.wait_of(way, voted) or 0.0, wait_of(way, drawn.numbers, context) or 0.0
        assert told == pytest.approx(alone, abs=1 / 16), str(way)


def test_slowed_decode_steps_wait_less_with_ranks_too():
    """By hand: of two steps of 64 us beside a prompt; at twice their time and a half they fill it."""
    shape = BatchShape(decodes=[(1, 64)], prefills=[(1000, 0)], decode_kv_tokens=64, max_decode_steps=2)
    claims, settings = Claims.at_level("mixed"), Settings(max_num_reqs=64, max_num_tokens=2048)
    keys = plan_keys(CaptureSizes((64,), (64,), (64, 1024)), claims, settings)
    found = []
    for slowdown in (None, 1.5, 2.5, 8.0):
        costs = attrs.evolve(COSTS, overlap_cost=0.5, decode_slowdown=slowdown, host_piecewise=HostCost(0.0))
        context = PolicyContext(claims=claims, ladder=CaptureLadder(keys), costs=costs, settings=settings)
        votes = reduced(get_policy("auto").compile(context), [shape.numbers])
        voted = Voted._make(votes[-NUM_TIMES:])
        (way,) = [
            each
            for each in legal_ways(shape.numbers, context, cheapest_of_unlike(context))
            if len(each.launches) == 2 and each.launches[0].repeat == 2 and each.launches[1].key is not None
        ]
        found.append((RankTimes(costs).wait_of(way, voted), wait_of(way, shape.numbers, context)))
    assert [told for told, _ in found] == [alone for _, alone in found]
    assert found[0] == found[1]
    waits = [told or 0.0 for told, _ in found]
    assert waits[0] > waits[2] > waits[3]


@pytest.mark.parametrize(
    ("rows", "size"),
    [
        # 8 rows on both: the exact graph has no padding, and the larger one's curve isn't that much lower.
        ((8, 8), 8),
        # One has fewer rows, and so padding in the graph of 8 too.
        ((8, 5), 16), ((8, 0), 16),
        ((5, 5), 16), ((16, 8), 16),
    ],
)  # fmt: skip
@pytest.mark.parametrize("prompt", [0, 2])
def test_padding_counts_where_any_rank_has_some(rows, size, prompt):
    """Whichever rank is the slowest; alone and with prompts, where graphs hold the tokens of both."""
    settings, claims = Settings(max_num_reqs=16), Claims.at_level("mixed")
    full, dear = Curve((8, 16), (1000.0, 980.0)), Curve((1, 8192), (9e3, 9e4))
    costs = attrs.evolve(COSTS, full=full, piecewise=dear, eager=dear, padding_us=(50.0, 0.0))
    keys = plan_keys(CaptureSizes((8, 16), (8, 16), (8, 16)), claims, settings)
    compiled = get_policy("auto").compile(
        PolicyContext(claims=claims, ladder=CaptureLadder(keys), costs=costs, settings=settings)
    )
    ranks = [
        BatchShape(decodes=[(1, count - prompt)] if count else [], prefills=[(prompt, 0)] if prompt and count else [])
        .numbers
        for count in rows
    ]  # fmt: skip
    votes = reduced(compiled, ranks)
    (found,) = {compiled.agree(votes, rank).launches for rank in ranks}
    assert [(each.part, each.key.num_tokens) for each in found] == [(Part.FULL, size)]


@ANY
@hypothesis.given(contexts(get_policy("auto")), shapes())
def test_prepared_ways_of_unlike_ranks_are_all_legal_ones(context, shape):
    """In the same order, which tells on ties."""
    pick, numbers, forms = cheapest_of_unlike(context), shape.numbers, get_policy("auto").forms
    prepared = PreparedWays(context, pick, rate(context), forms, unlike=True)
    assert prepared(numbers) == prepared.scan(numbers) == legal_ways(numbers, context, pick, forms=forms)


@pytest.mark.parametrize("prompt", [0, 2])
def test_unlike_ranks_agree_without_scans(prompt, monkeypatch):
    """Where padding takes something their ways are looked up, as those of ranks that are alike."""
    settings, claims = Settings(max_num_reqs=16), Claims.at_level("mixed")
    keys = plan_keys(CaptureSizes((8, 16), (8, 16), (8, 16)), claims, settings)
    costs = attrs.evolve(COSTS, full=Curve((8, 16), (10.0, 9.0)), padding_us=(5.0, 5.0))
    compiled = get_policy("auto").compile(
        PolicyContext(claims=claims, ladder=CaptureLadder(keys), costs=costs, settings=settings)
    )
    prefills = [(prompt, 0)] if prompt else []
    ranks = [BatchShape(decodes=[(1, count)], prefills=prefills).numbers for count in (6, 3)]
    votes = reduced(compiled, ranks)
    scanned = []
    monkeypatch.setattr("kpolicy.policies.base.full_keys", lambda *_: scanned.append(1) or ())
    assert {compiled.agree(votes, rank).mode for rank in ranks} == {Mode.FULL}
    assert not scanned


def test_ranks_run_eagerly_where_the_largest_size_would_delay_the_slowest():
    """Two chunks without context and one of 500 tokens over 3,000: in turn with one graph of 1,024 for all.

    Eagerly the ranks take 1,000 + 500 and 500 + 1,625 us; in the graph of 1,024 the third would take 1,024 + 1,625.
    """
    settings = Settings(max_num_reqs=64)
    claims = Claims.at_level("mixed")
    keys = plan_keys(CaptureSizes((8,), (1024,), (1024,)), claims, settings)
    context = PolicyContext(claims=claims, ladder=CaptureLadder(keys), costs=COSTS, settings=settings)
    compiled = get_policy("auto").compile(context)
    short, long = BatchShape(prefills=[(1000, 0)]).numbers, BatchShape(prefills=[(500, 3000)]).numbers
    idle = BatchShape().numbers
    ranks = [short, short, long, idle]
    votes = reduced(compiled, ranks)
    assert {compiled.agree(votes, rank).mode for rank in ranks} == {Mode.EAGER}
    assert compiled.agree(votes, idle).reason is Reason.RANKS_AGREED
    # Where the host takes longer than that to launch, they replay.
    slow = attrs.evolve(context, costs=attrs.evolve(COSTS, host_eager=HostCost(4000.0)))
    compiled = get_policy("auto").compile(slow)
    votes = reduced(compiled, ranks)
    assert {compiled.agree(votes, rank).mode for rank in ranks} == {Mode.FULL}


def test_votes_fit_64_bits():
    """However long a step would take, no vote exceeds what ranks reduce."""
    context = PolicyContext(
        claims=Claims.at_level("mixed"), ladder=CaptureLadder(()), settings=Settings(max_num_reqs=64),
        costs=attrs.evolve(COSTS, prefill_attention=AttentionCost(unit_us=1e8)),
    )  # fmt: skip
    votes = get_policy("auto").compile(context).vote(BatchShape(prefills=[(1 << 20, 1 << 29)]).numbers)
    assert max(votes) == 1 << 62


def test_the_pages_count_of_votes():
    """docs/design.md says how many integers ranks reduce, by `auto` and by policies that go by counts alone."""
    context = PolicyContext(claims=Claims.at_level("mixed"), ladder=CaptureLadder(()), costs=analytic_costs())
    numbers = BatchShape.decode(3).numbers
    auto, counts = (len(get_policy(name).compile(context).vote(numbers)) for name in ("auto", "full"))
    said = (Path(__file__).parents[2] / "docs/design.md").read_text()
    assert f"That is {auto} integers to reduce instead of {counts}, three of them" in said
