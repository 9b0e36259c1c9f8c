"""Times that ranks vote, held to `CostTable.cost` term by term, so that none hides behind a longer one."""

import itertools
from functools import partial

import attrs
import hypothesis
import pytest

from kpolicy.attention.support import Claims
from kpolicy.costs import AttentionCost, CostTable, Curve, HostCost
from kpolicy.decision import Launch
from kpolicy.keys import GraphKey
from kpolicy.ladders import CaptureLadder, CaptureSizes, plan_keys
from kpolicy.modes import Mode, Part, Rows, SplitForm
from kpolicy.policies import PolicyContext, get_policy
from kpolicy.policies.auto import choose
from kpolicy.policies.base import Way
from kpolicy.policies.rank_times import RankTimes, Voted
from kpolicy.settings import Objective, Settings
from kpolicy.shapes import BatchShape
from kpolicy.step_effects import StepEffects
from kpolicy.testing.strategies import contexts, shapes

ROUNDED_US = 0.01
THROUGHPUT = Objective()
TABLE = CostTable(
    version="by hand", measured=True, full=Curve((8, 64), (11.0, 47.0)), piecewise=Curve((8, 64), (13.0, 53.0)),
    eager=Curve((1, 64), (17.0, 59.0)), mixed=Curve((8, 64), (19.0, 61.0)),
    decode_attention=AttentionCost(2.0, 0.3, 0.07), prefill_attention=AttentionCost(3.0, 0.5, 0.011, 0.013),
    host_full=HostCost(23.0, 0.7), host_piecewise=HostCost(29.0, 1.1, 5.0, 7.0),
    host_eager=HostCost(31.0, 1.3, 8.0, 9.0), step_us=37.0, both_us=(4.0, 6.0),
)  # fmt: skip
RANKS = {
    "idle": BatchShape(),
    "decodes": BatchShape.decode(5, 900),
    "drafts": BatchShape(decodes=[(3, 2), (1, 2)], decode_kv_tokens=80),
    "prompts": BatchShape(prefills=[(9, 0), (4, 300)]),
    "long decodes, a short prompt": BatchShape(decodes=[(1, 6)], prefills=[(2, 0)], decode_kv_tokens=4000),
    "short decodes, long prompts": BatchShape(decodes=[(1, 2)], prefills=[(30, 900), (8, 0), (5, 0)]),
}
DECODE, TAIL = GraphKey(Part.FULL, 8, 8, query_len=1), GraphKey(Part.PIECEWISE, 48)
WHOLES = [
    Way(Mode.FULL, (Launch(Rows.ALL, GraphKey(Part.FULL, 48)),)),
    Way(Mode.PIECEWISE, (Launch(Rows.ALL, TAIL),)),
    Way(Mode.EAGER, (Launch(Rows.ALL, None),)),
]


def split(key, steps, stream):
    """Decode rows that many times, and the prompts by that graph."""
    form = (SplitForm.DECODES_BESIDE if steps > 1 else SplitForm.BESIDE) if stream else SplitForm.IN_TURN
    return Way(Mode.SPLIT, (Launch(Rows.DECODE, DECODE, repeat=steps), Launch(Rows.PREFILL, key, stream=stream)), form)


ONE_STEP = [*WHOLES, *(split(key, 1, stream) for key in (TAIL, None) for stream in (0, 1))]
SEVERAL = [split(key, steps, 1) for key in (TAIL, None) for steps in (2, 4)]


def voted(times, *ranks):
    """The largest of the ranks' times."""
    return Voted._make(map(max, *map(times.vote, ranks)) if len(ranks) > 1 else times.vote(ranks[0]))


@pytest.mark.parametrize("overlap", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("slow", [0.0, 400.0])
@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("padding_us", [(0.0, 0.0), (71.0, 83.0)])
def test_one_rank(overlap, slow, prepared, padding_us):
    """What a rank votes alone is what its steps take, each side by itself: device, host, gap and score."""
    table = attrs.evolve(
        TABLE, overlap_cost=overlap, eager=Curve((1, 64), (17.0 + slow, 59.0 + slow)), padding_us=padding_us
    )
    times = RankTimes(table, table.eager.upto(64) if prepared else ())
    for name, shape in RANKS.items():
        for way in ONE_STEP + (SEVERAL if shape.decodes and shape.prefills else []):
            numbers = shape.numbers
            told, expected = times.cost(way, voted(times, numbers)), table.cost(way.launches, numbers)
            assert told == pytest.approx(expected, abs=ROUNDED_US), f"{name}: {way}"


OWN = StepEffects(
    one_row_overlap=0.9, one_row_slowdown=3.0, many_rows_overlap=0.1, many_rows_slowdown=1.2,
    outlasted_share=((4, 0.2), (32, 0.7)),
)  # fmt: skip
"""Halves overlap by how many rows and prompt tokens there are"""
BESIDE = [way for way in ONE_STEP + SEVERAL if way.form in (SplitForm.BESIDE, SplitForm.DECODES_BESIDE)]


def test_halves_overlap_by_a_ranks_own_rows_and_prompts():
    """By one row's or many rows' own, and short prompts'; with another rank by the most that either adds."""
    table = attrs.evolve(TABLE, overlap_cost=0.5, decode_slowdown=2.0, effects=OWN)
    times = RankTimes(table)
    drawn = [
        BatchShape(decodes=[(1, rows)], prefills=[(tokens, 0)], decode_kv_tokens=200 * rows).numbers
        for rows in (1, 3, 8, 40)
        for tokens in (2, 9, 300)
    ]
    assert len({table.overlap_of(each.num_decodes, each.num_prefill_tokens) for each in drawn}) == len(drawn)
    own = [(rank, [table.cost(way.launches, rank) for way in BESIDE]) for rank in drawn]
    for rank, expected in own:
        for way, cost in zip(BESIDE, expected, strict=True):
            assert times.cost(way, voted(times, rank)) == pytest.approx(cost, abs=ROUNDED_US), str(way)
    for (one, costs), (other, others) in itertools.combinations(own, 2):
        largest = voted(times, one, other)
        most = [
            max(pair) for pair in zip(*(table.overlap_of(*rows_of(rank))[:3] for rank in (one, other)), strict=True)
        ]
        assert largest.overlap[:3] == pytest.approx(most)
        for way, *both in zip(BESIDE, costs, others, strict=True):
            slowest = max(each.cycle_us for each in both)
            assert times.cost(way, largest).cycle_us >= slowest - ROUNDED_US, str(way)


def rows_of(numbers):
    """Decode rows, and tokens of prompts."""
    return numbers.num_decodes, numbers.num_prefill_tokens


def test_where_one_rank_gains_nothing_by_halves_beside_each_other_the_longer_sum_counts():
    """One row's overlap costs more than the halves in turn, eight rows' doesn't: no less than either rank takes."""
    table = attrs.evolve(TABLE, overlap_cost=0.4, effects=StepEffects(one_row_overlap=1.5))
    times = RankTimes(table)
    one, few = (
        BatchShape(decodes=[(1, rows)], prefills=[(30, 900)], decode_kv_tokens=900 * rows).numbers for rows in (1, 8)
    )
    assert [table.overlap_of(rank.num_decodes).gains for rank in (one, few)] == [False, True]
    for way in BESIDE:
        slowest = max(table.cost(way.launches, rank).cycle_us for rank in (one, few))
        assert times.cost(way, voted(times, one, few)).cycle_us >= slowest - ROUNDED_US
        assert times.cost(way, voted(times, one)) == pytest.approx(table.cost(way.launches, one), abs=ROUNDED_US)


@pytest.mark.parametrize("overlap", [0.0, 0.4, 1.0])
def test_each_side_is_the_slowest_ranks(overlap):
    """Of any two ranks the longer device time and the longer host time; for several decode steps no less than that."""
    table = attrs.evolve(TABLE, overlap_cost=overlap)
    times = RankTimes(table)
    for ranks in itertools.combinations([shape.numbers for shape in RANKS.values()], 2):
        largest = voted(times, *ranks)
        for way in ONE_STEP + SEVERAL:
            told, own = times.cost(way, largest), [table.cost(way.launches, rank) for rank in ranks]
            device, host = max(each.device_us for each in own), max(each.host_us for each in own)
            if way in SEVERAL:
                assert told.device_us >= device - ROUNDED_US
                assert told.host_us >= host - ROUNDED_US
            else:
                assert (told.device_us, told.host_us) == pytest.approx((device, host), abs=ROUNDED_US), str(way)


def test_the_soonest_is_found_though_hosts_are_looked_at_first():
    """As `choose` finds it, the earlier on ties, in any order that has ways that divide the batch last."""
    context = PolicyContext(claims=Claims.at_level("mixed"), ladder=CaptureLadder(()), costs=TABLE)
    for overlap, full_host in itertools.product((0.0, 1.0), (1.0, 60.0, 900.0)):
        host_full = HostCost(full_host)
        times = RankTimes(attrs.evolve(TABLE, overlap_cost=overlap, host_full=host_full, padding_us=(20.0, 2.0)))
        for shape in RANKS.values():
            largest = voted(times, shape.numbers)
            for drawn in itertools.permutations(ONE_STEP, 3):
                ways = sorted(drawn, key=lambda way: way.mode is Mode.SPLIT)
                cost = partial(times.cost, voted=largest)
                expected, _ = choose(RANKS["decodes"].numbers, ways, context, cost)
                assert times.soonest(ways, largest) is expected


def compiled(costs, objective=THROUGHPUT, sizes=(8, 16, 64)):
    """`auto` with graphs of every kind."""
    settings, claims = Settings(max_num_reqs=16, max_num_tokens=4096), Claims.at_level("mixed")
    keys = plan_keys(CaptureSizes(sizes[:2], sizes, sizes), claims, settings)
    context = PolicyContext(
        claims=claims, ladder=CaptureLadder(keys), costs=costs, settings=settings, objective=objective
    )
    return get_policy("auto").compile(context)


def agreed(policy, *shapes):
    """What the ranks take, which is the same on all."""
    ranks = [shape.numbers for shape in shapes]
    reduced = [max(votes) for votes in zip(*map(policy.vote, ranks), strict=True)]
    found = {policy.agree(reduced, rank).launches for rank in ranks}
    assert len(found) == 1
    return found.pop()


def test_every_step_is_agreed_anew():
    """Other votes, another answer; the first votes again, the first answer."""
    policy, few, many = compiled(TABLE), BatchShape.decode(5), BatchShape.decode(12)
    assert [agreed(policy, rank, few)[0].key.num_tokens for rank in (few, many, few)] == [8, 16, 8]


def test_decode_rows_by_their_slowest_rank():
    """With decode rows alone the mode follows from times that no rank has alone."""
    rows = {mode: getattr(TABLE, f"host_{mode}") for mode in ("full", "piecewise", "eager")}
    short, long = BatchShape.decode(12), BatchShape.decode(2, 4000)
    for quick in rows:
        hosts = {f"host_{mode}": HostCost(50.0 if mode == quick else 5000.0) for mode in rows}
        (launch,) = agreed(compiled(attrs.evolve(TABLE, **hosts)), short, long, BatchShape())
        assert (None if launch.key is None else launch.key.part) == {
            "full": Part.FULL,
            "piecewise": Part.PIECEWISE,
        }.get(quick)
    # In the graph of 16 the second rank takes 16.1 + 280 us, eagerly 18 + 280: but where sizes cost more than that ...
    steep = attrs.evolve(
        TABLE, full=Curve((8, 16), (11.0, 300.0)), piecewise=Curve((8, 16), (11.0, 300.0)), mixed=None,
        host_eager=HostCost(10.0),
    )  # fmt: skip
    assert agreed(compiled(steep), short, long)[0].key is None
    graphs_only = attrs.evolve(long, forbidden={Mode.EAGER})
    assert agreed(compiled(steep), short, graphs_only)[0].key.num_tokens == 16
    assert agreed(compiled(steep), long, long)[0].key.num_tokens == 8


def test_counts_that_say_more_than_decode_rows():
    """Rows of several lengths, LoRA and drafts that ranks have unlike many of are no rows of one length."""
    settings = Settings(max_num_reqs=16, max_num_tokens=64, num_speculative_tokens=2, max_loras=2)
    claims = Claims.at_level("uniform")
    keys = plan_keys(CaptureSizes((3, 6, 12, 24), (16, 64), (16, 64)), claims, settings)
    context = PolicyContext(claims=claims, ladder=CaptureLadder(keys), costs=TABLE, settings=settings)
    policy, drafts = get_policy("auto").compile(context), BatchShape.decode(3, query_len=3)
    (launch,) = agreed(policy, drafts, drafts)
    assert (launch.key.part, launch.key.num_tokens, launch.key.lora_case) == (Part.FULL, 12, 0)
    assert agreed(policy, drafts, attrs.evolve(drafts, num_active_loras=2))[0].key.lora_case == 2
    assert agreed(policy, drafts, BatchShape.decode(2, query_len=3))[0].key.lora_case == 0
    for other in (BatchShape.decode(3), BatchShape(decodes=[(3, 2), (2, 1)])):
        (launch,) = agreed(policy, drafts, other)
        assert launch.key is None or launch.key.part is Part.PIECEWISE


def test_what_one_rank_forbids_no_rank_takes():
    """A rank without FULL for this step, beside one that would replay it: pieces for both."""
    policy, free = compiled(TABLE), BatchShape.decode(5)
    bound = attrs.evolve(free, forbidden={Mode.FULL})
    parts = [agreed(policy, free, rank)[0].key.part for rank in (free, bound, free)]
    assert parts == [Part.FULL, Part.PIECEWISE, Part.FULL]
    both = [attrs.evolve(free, forbidden={mode}) for mode in (Mode.FULL, Mode.PIECEWISE)]
    assert agreed(policy, *both)[0].key is None


def test_several_decode_steps_are_scored():
    """Beside a long prompt ranks run as many decode steps as one would alone, though the cycle is no shorter."""
    table = attrs.evolve(TABLE, overlap_cost=0.1, host_full=HostCost(1.0), eager=Curve((1, 4096), (17.0, 9000.0)))
    policy = compiled(table, Objective(0.0, 1.0))
    ranks = [
        BatchShape(decodes=[(1, reqs)], prefills=[(2000, 0)], decode_kv_tokens=500, max_decode_steps=8)
        for reqs in (3, 5)
    ]
    launches = agreed(policy, *ranks)
    assert launches[0].repeat > 1
    assert launches == policy.select(*ranks[1].numbers).launches


@hypothesis.settings(max_examples=100, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(contexts(get_policy("auto")), shapes())
def test_a_rank_by_itself_decides_as_without_ranks(context, shape):
    """Its own votes lead to a way of the score that it would take alone, but for what is rounded."""
    hypothesis.assume(shape.num_tokens)
    shape = attrs.evolve(shape, facts={})
    policy, costs, numbers = get_policy("auto").compile(context), context.costs, shape.numbers
    alone, found = policy.select(*numbers), policy.agree(policy.vote(numbers), numbers)
    scores = [costs.score(costs.cost(each.launches, numbers), context.objective) for each in (found, alone)]
    weights = context.objective.step_weight + context.objective.gap_weight
    if costs.overlap_of(numbers.num_decodes, numbers.num_prefill_tokens).gains:
        assert scores[0] <= scores[1] + ROUNDED_US * weights
