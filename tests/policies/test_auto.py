"""`auto` against costs small enough to work out by hand."""

import math
import random
from collections import Counter

import attrs
import hypothesis
import pytest
from hypothesis import strategies as st

from kpolicy.attention.support import Claims
from kpolicy.costs import AttentionCost, CostTable, Curve, HostCost, analytic_costs
from kpolicy.keys import GraphKey
from kpolicy.ladders import CaptureLadder, CaptureSizes, plan_keys
from kpolicy.modes import Mode, Part, SplitForm
from kpolicy.policies import PolicyContext, get_policy
from kpolicy.policies.auto import SPLIT_MARGIN, AutoPolicy, cheapest, clear_us, deciding, in_tail, near_tie
from kpolicy.policies.base import legal_ways, repeats
from kpolicy.profiles import load_profile
from kpolicy.reasons import Basis, Reason
from kpolicy.settings import Objective, Settings
from kpolicy.shapes import GAP_TAIL_US, WAITING_REQS, BatchShape
from kpolicy.step_effects import StepEffects
from kpolicy.testing.strategies import contexts, shapes
from tests.policies.near_ties import MIXED, near_ties

SETTINGS = Settings(max_num_reqs=64)
# A token is a microsecond of dense work, in every mode; attention is free unless a test says otherwise.
LINE = Curve((1, 8192), (1.0, 8192.0))
COSTS = CostTable(
    version="by hand",
    measured=True,
    full=LINE,
    piecewise=LINE,
    eager=LINE,
    host_full=HostCost(10.0),
    host_piecewise=HostCost(100.0),
    host_eager=HostCost(1000.0),
    overlap_cost=0.5,
)
DELAYS = Objective(1.0, 0.0, first_token_limit=1.25)
"""Throughput which may delay a prompt, as it doesn't by default"""


def context(costs=COSTS, claims="mixed", sizes=None, objective=None, **rest):
    claimed = Claims.at_level(claims)
    keys = plan_keys(sizes or CaptureSizes((1, 2, 4, 8, 64), (16,), (16, 128, 1024)), claimed, SETTINGS)
    return PolicyContext(
        claims=claimed, ladder=CaptureLadder(keys), costs=costs, settings=SETTINGS,
        objective=objective or Objective(), **rest,
    )  # fmt: skip


def decide(shape, **arguments):
    """The decision, which select must agree with."""
    policy, using = get_policy("auto"), context(**arguments)
    decision = policy.decide(shape, using)
    assert policy.compile(using).select(*shape.numbers) == decision
    return decision


def test_small_decodes_replay_full():
    """Three decodes: FULL 4 takes max(4, 10) us, PIECEWISE 100, eager 1,000."""
    decision = decide(BatchShape.decode(3))
    assert decision.mode is Mode.FULL
    assert decision.keys[0].num_tokens == 4
    assert decision.reason is Reason.CHEAPEST_MEASURED


def test_padding_that_costs_more_than_launching_goes_to_another_mode():
    """Nine decodes pad to 64 (64 us) in FULL; where that costs 2,000 us the PIECEWISE graph of 16 wins at 100."""
    steep = attrs.evolve(COSTS, full=Curve((1, 8, 64), (1.0, 8.0, 2000.0)))
    assert decide(BatchShape.decode(9)).mode is Mode.FULL
    decision = decide(BatchShape.decode(9), costs=steep, claims="uniform")
    assert decision.mode is Mode.PIECEWISE
    assert decision.keys[0].num_tokens == 16


def test_device_bound_batches_run_eagerly():
    """1,025 prompt tokens fit no graph of 1,024; 1,000 pad to 1,024 us, and eager takes 1,000 us of device and host."""
    assert decide(BatchShape(prefills=[(1025, 0)])).reason is Reason.ABOVE_LARGEST_SIZE
    assert decide(BatchShape(prefills=[(900, 0)])).mode is Mode.EAGER
    decision = decide(BatchShape(prefills=[(1000, 0)]))
    assert decision.mode is Mode.EAGER
    assert decision.reason is Reason.EAGER_IS_CHEAPER


def test_the_cheapest_size_that_fits_need_not_be_the_next():
    """Where the graph of 8 is slower than the graph of 64, five decodes take 64, and decodes of 2 still take 2."""
    bumpy = attrs.evolve(COSTS, full=Curve((1, 2, 4, 8, 16, 64), (20.0, 21.0, 22.0, 90.0, 91.0, 40.0)))
    assert decide(BatchShape.decode(5), costs=bumpy).keys[0].num_tokens == 64
    assert decide(BatchShape.decode(2), costs=bumpy).keys[0].num_tokens == 2


def test_attention_time_moves_the_crossover():
    """Nine decodes in the graph of 64 pay 55 us of padding: free below the host's 1,000 us, not beyond it."""
    costs = attrs.evolve(COSTS, decode_attention=AttentionCost(unit_us=1.0))
    sizes = CaptureSizes((64,))
    assert decide(BatchShape.decode(9, 900), costs=costs, claims="uniform", sizes=sizes).mode is Mode.FULL
    assert decide(BatchShape.decode(9, 1000), costs=costs, claims="uniform", sizes=sizes).mode is Mode.EAGER


def test_graphs_that_hold_prompts_have_their_own_times():
    """A prompt of 100 in a graph of 128: FULL is the quicker by `full`, PIECEWISE where mixed graphs take 180 us."""
    prompt = BatchShape(prefills=[(100, 0)])
    sizes = CaptureSizes((8,), (128,), (128,))
    costs = attrs.evolve(COSTS, piecewise=Curve((1, 128), (150.0, 150.0)))
    assert decide(prompt, costs=costs, sizes=sizes).mode is Mode.FULL
    costs = attrs.evolve(costs, mixed=Curve((128,), (180.0,)))
    assert decide(prompt, costs=costs, sizes=sizes).mode is Mode.PIECEWISE
    # Rows of both kinds add to PIECEWISE what its host prepares for them.
    both = BatchShape(decodes=[(1, 2)], prefills=[(100, 0)], forbidden=[Mode.SPLIT])
    assert decide(both, costs=costs, sizes=sizes).mode is Mode.PIECEWISE
    costs = attrs.evolve(costs, both_us=(0.0, 40.0))
    assert decide(both, costs=costs, sizes=sizes).mode is Mode.FULL
    costs = attrs.evolve(costs, both_us=(15.0, 40.0))
    assert decide(both, costs=costs, sizes=sizes).mode is Mode.PIECEWISE


def test_a_graph_that_is_full_wins_where_padding_takes_something():
    """Five decodes take the quicker graph of 64, and eight their own where the other's padding takes 60 us."""
    bumpy = attrs.evolve(COSTS, full=Curve((1, 4, 8, 16, 64), (20.0, 22.0, 90.0, 91.0, 40.0)))
    for padding_us, size in ((0.0, 64), (49.0, 64), (60.0, 8)):
        costs = attrs.evolve(bumpy, padding_us=(padding_us, 0.0))
        assert decide(BatchShape.decode(8), costs=costs).keys[0].num_tokens == size
        assert decide(BatchShape.decode(5), costs=costs).keys[0].num_tokens == 64
    # 15 of 16 in pieces: FULL 64 at 64 us, PIECEWISE 16 at 100 (its launches); eager takes 1,000.
    costs = attrs.evolve(COSTS, padding_us=(50.0, 0.0))
    assert decide(BatchShape.decode(15), claims="uniform").mode is Mode.FULL
    assert decide(BatchShape.decode(15), costs=costs, claims="uniform").mode is Mode.PIECEWISE
    costs = attrs.evolve(COSTS, padding_us=(50.0, 30.0))
    assert decide(BatchShape.decode(15), costs=costs, claims="uniform").mode is Mode.FULL
    assert decide(BatchShape.decode(16), costs=costs, claims="uniform").mode is Mode.PIECEWISE
    costs = attrs.evolve(COSTS, padding_us=(5000.0, 5000.0))
    assert decide(BatchShape.decode(15), costs=costs, claims="uniform").mode is Mode.EAGER


def test_a_graph_that_is_full_wins_where_the_host_bounds_the_step():
    """The larger graph is quicker on the device, which nobody waits for: its padding comes to the host's time."""
    curve = Curve((8, 16), (1000.0, 900.0))
    host = HostCost(2000.0)
    costs = attrs.evolve(
        COSTS, full=curve, mixed=curve, piecewise=curve, host_full=host, host_piecewise=host, padding_us=(50.0, 50.0)
    )
    for shape, claims in (
        (BatchShape.decode(8), "mixed"),
        (BatchShape(decodes=[(1, 4)], prefills=[(4, 0)]), "mixed"),
        (BatchShape(decodes=[(1, 4)], prefills=[(4, 0)]), "uniform"),
    ):
        for host_us, size in ((2000.0, 8), (0.0, 16)):
            host = HostCost(host_us)
            bound = attrs.evolve(costs, host_full=host, host_piecewise=host, host_eager=HostCost(9000.0))
            sizes = CaptureSizes.of([8, 16], SETTINGS)
            assert decide(shape, costs=bound, claims=claims, sizes=sizes).keys[0].num_tokens == size


@hypothesis.given(contexts(get_policy("auto:forms=in_turn+beside")), shapes())
@hypothesis.settings(max_examples=200, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
def test_no_captured_size_would_be_cheaper(context, shape):
    """Of all sizes that hold the rows or their halves, whatever padding takes and whichever side bounds the step.

    But for divided ones that are hardly cheaper than a whole one.
    """
    policy, numbers = get_policy("auto:forms=in_turn+beside"), shape.numbers
    every = legal_ways(numbers, context, lambda keys, _num_tokens: keys, forms=policy.forms)
    hypothesis.assume(every)
    costs = [context.costs.cost(way.launches, numbers) for way in every]
    limit_us = clear_us(every, costs)
    least_us = min(cost.cycle_us for way, cost in zip(every, costs, strict=True) if not near_tie(way, cost, limit_us))
    decision = policy.decide(shape, context)
    assert context.costs.cost(decision.launches, numbers).cycle_us == pytest.approx(least_us, rel=1e-9)
    assert policy.compile(context).select(*numbers) == decision


def test_auto_without_a_form_divides_no_batch():
    """As text for the command line; a batch that costs least divided runs whole."""
    none, using = get_policy("auto:forms=none"), context(attrs.evolve(COSTS, host_eager=HostCost(5000.0)))
    assert none == AutoPolicy(forms=())
    shape = BatchShape(decodes=[(1, 4)], prefills=[(1022, 0)])
    assert get_policy("auto").decide(shape, using).mode is Mode.SPLIT
    assert none.decide(shape, using).mode is Mode.EAGER
    assert none.compile(using).select(*shape.numbers) == none.decide(shape, using)


def test_split_wins_where_the_mixed_batch_leaves_graph_mode():
    """4 decodes and 1,022 tokens fit no graph together: eager takes 1,026; split in turn 4 + 1,024, beside 1,026."""
    shape = BatchShape(decodes=[(1, 4)], prefills=[(1022, 0)])
    costs = attrs.evolve(COSTS, host_eager=HostCost(5000.0))
    decision = decide(shape, costs=costs)
    assert decision.form is SplitForm.BESIDE
    assert [str(launch.key) for launch in decision.launches] == ["FULL 4t/4r q=1", "PIECEWISE 1024t"]
    serial = decide(shape, costs=attrs.evolve(costs, overlap_cost=1.0))
    assert serial.form is SplitForm.IN_TURN
    assert decide(shape, costs=costs, claims="none").mode is Mode.EAGER


NEAR = BatchShape(decodes=[(1, 8)], prefills=[(1020, 0)])
"""No graph holds the 1,028 tokens: eagerly 1,028 us of the device; halves beside each other 1,024, by `FREE`."""
FREE = attrs.evolve(COSTS, overlap_cost=0.0)


@pytest.mark.parametrize("objective", ["throughput", "latency"])
@pytest.mark.parametrize(
    ("host_us", "mode"), [(1000.0, Mode.EAGER), (1044.8, Mode.EAGER), (1045.0, Mode.SPLIT), (1100.0, Mode.SPLIT)]
)
def test_a_batch_is_divided_where_that_is_clearly_shorter(host_us, mode, objective):
    """By 2% of the way that doesn't divide it: 1,024 us for 1,044.9 and more, not for less."""
    costs = attrs.evolve(FREE, host_eager=HostCost(host_us))
    decision = decide(NEAR, costs=costs, claims="uniform", objective=Objective.parse(objective))
    assert decision.mode is mode
    assert SPLIT_MARGIN == 0.02


@pytest.mark.parametrize("forms", ["in_turn", "in_turn+beside", "beside"])
def test_every_form_of_one_step_has_the_margin(forms):
    """In turn the halves take 1,032 us: 0.8% less than 1,040, 2.3% less than 1,056."""
    policy = get_policy(f"auto:forms={forms}")
    for host_us, mode in ((1040.0, Mode.EAGER), (1056.0, Mode.SPLIT)):
        using = context(attrs.evolve(FREE, host_eager=HostCost(host_us), overlap_cost=1.0), "uniform")
        decision = policy.decide(NEAR, using)
        assert decision.mode is mode
        assert policy.compile(using).select(*NEAR.numbers) == decision


def test_a_batch_is_divided_where_nothing_else_is_legal():
    """Without eager no graph holds it whole: halves run, the quicker form, however near to each other both are."""
    shape = attrs.evolve(NEAR, forbidden=[Mode.EAGER])
    assert decide(shape, costs=FREE, claims="uniform").form is SplitForm.BESIDE


def test_several_decode_steps_are_scored_as_they_are():
    """They need no margin, and the bound on the first token is of what is considered: here of two steps, or of none."""
    shape = attrs.evolve(NEAR, max_decode_steps=2)
    using = {"costs": FREE, "claims": "uniform"}
    for objective in (Objective(), Objective.parse("latency"), Objective(1.0, 0.0, 1.0), Objective(0.0, 1.0, 1.0)):
        assert decide(shape, objective=objective, **using).decode_steps == 2
    # Each longer than one gap in a hundred did: one step, which is a near tie.
    shape = attrs.evolve(shape, facts={GAP_TAIL_US: 100})
    assert decide(shape, **using).mode is Mode.EAGER


@pytest.mark.parametrize("spec", ["auto", "auto:forms=in_turn+beside", "auto:forms=beside"])
def test_near_ties_are_decided_alike(spec):
    """Prepared as by itself, to the last bit, on both sides of the margin."""
    policy = get_policy(spec)

    @hypothesis.given(contexts(policy), st.lists(MIXED, min_size=3, max_size=3))
    @hypothesis.settings(max_examples=100, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
    def check(context, drawn):
        for shape in drawn:
            for near in near_ties(context, shape):
                decision = policy.decide(shape, near)
                assert policy.compile(near).select(*shape.numbers) == decision

    check()
    by_hand = context(attrs.evolve(FREE, host_eager=HostCost(1100.0)), "uniform")
    found = [policy.decide(NEAR, near) for near in near_ties(by_hand, NEAR)]
    assert [each.mode is Mode.SPLIT for each in found][::4] == [True, False]
    assert found == [policy.compile(near).select(*NEAR.numbers) for near in near_ties(by_hand, NEAR)]


def test_device_bound_models_are_left_alone():
    """Where nothing overlaps and launching is quicker than the device, dividing the batch gains nothing."""
    costs = attrs.evolve(COSTS, overlap_cost=1.0, host_full=HostCost(1.0), host_eager=HostCost(1.0))
    for objective in ("throughput", "latency"):
        shape = BatchShape(decodes=[(1, 4)], prefills=[(900, 0)], max_decode_steps=1)
        assert decide(shape, costs=costs, objective=Objective.parse(objective)).mode is Mode.EAGER
    assert decide(attrs.evolve(shape, max_decode_steps=8), costs=costs).mode is Mode.EAGER


def test_latency_keeps_decodes_going_beside_a_prefill():
    """Under latency several decode steps run beside one prefill; the gap is the cycle over the steps."""
    shape = BatchShape(decodes=[(1, 8)], prefills=[(1000, 0)], max_decode_steps=8)
    decision = decide(shape, objective=Objective.parse("latency"))
    assert decision.form is SplitForm.DECODES_BESIDE
    assert decision.decode_steps == 8
    assert decide(shape, objective=Objective(0.0, 1.0, first_token_limit=1.0)).decode_steps == 1


def test_latency_differs_by_a_measured_table_too():
    """DeepSeek-V2-Lite on an H200: two decode steps beside a long prompt take more in all, and gaps are shorter."""
    using = {"costs": load_profile("deepseek-v2-lite-h200").costs, "claims": "uniform"}
    sizes = CaptureSizes((4, 8, 64), (), (64, 512, 2048))
    shape = BatchShape(decodes=[(1, 4)], prefills=[(1985, 4096)], decode_kv_tokens=2400, max_decode_steps=4)
    throughput, latency = (
        decide(shape, sizes=sizes, objective=Objective.parse(name), **using) for name in ("throughput", "latency")
    )
    assert (throughput.mode, throughput.decode_steps) == (Mode.PIECEWISE, 1)
    assert (latency.form, latency.decode_steps) == (SplitForm.DECODES_BESIDE, 2)
    whole, beside = (using["costs"].cost(each.launches, shape.numbers) for each in (throughput, latency))
    assert beside.step_us > whole.step_us
    assert beside.gap_us < 0.65 * whole.gap_us


@pytest.mark.parametrize(("waiting", "steps"), [(0, 2), (100, 1)])
def test_decodes_ahead_are_worth_less_while_others_wait(waiting, steps):
    """Throughput runs decodes ahead where that spares a later step, not where a queue would fill that step anyway.

    As far as it may delay the prompt, which it may not by default.
    """
    # Two steps of 300 us beside a prompt of 1,000 take 300 x 0.4 more than one, and a step alone 300.
    costs = attrs.evolve(COSTS, full=Curve((8, 64), (300.0, 301.0)), overlap_cost=0.4)
    shape = BatchShape(decodes=[(1, 8)], prefills=[(1000, 0)], max_decode_steps=2, facts={WAITING_REQS: waiting})
    assert decide(shape, costs=costs, objective=DELAYS).decode_steps == steps
    assert decide(shape, costs=costs).decode_steps == 1
    assert decide(shape, costs=costs, objective=Objective.parse("latency")).decode_steps == 2


@pytest.mark.parametrize("objective", [DELAYS, Objective.parse("latency")], ids=str)
def test_decodes_ahead_make_no_long_gaps_more(objective):
    """Several decode steps are taken as long as each comes within one gap in a hundred so far, and one step always."""
    costs = attrs.evolve(COSTS, full=Curve((8, 64), (300.0, 301.0)), overlap_cost=0.4)
    plain = BatchShape(decodes=[(1, 8)], prefills=[(1000, 0)], max_decode_steps=2)
    both = decide(plain, costs=costs, objective=objective)
    assert both.decode_steps == 2
    gap_us = costs.cost(both.launches, plain.numbers).gap_us
    for tail_us, steps in ((math.ceil(gap_us), 2), (math.floor(gap_us) - 1, 1), (0, 1)):
        shape = attrs.evolve(plain, facts={GAP_TAIL_US: tail_us})
        assert decide(shape, costs=costs, objective=objective).decode_steps == steps


@pytest.mark.parametrize(("forbidden", "steps"), [((), 1), ((Mode.EAGER,), 2)])
def test_long_gaps_leave_a_way(forbidden, steps):
    """What is left out for its gaps doesn't say how long prompts may take; where nothing else is legal it runs."""
    # Beside the prompt two decode steps are soonest. Without eager no graph holds the 1,032 tokens together.
    costs = attrs.evolve(COSTS, full=Curve((8, 64), (300.0, 301.0)), overlap_cost=0.0)
    shape = BatchShape(
        decodes=[(1, 8)], prefills=[(1024, 0)], max_decode_steps=2, forbidden=forbidden, facts={GAP_TAIL_US: 0}
    )
    using = context(costs=costs, claims="uniform", objective=Objective(1.0, 0.0, 1.0))
    policy = get_policy("auto", forms="decodes_beside")
    decision = policy.decide(shape, using)
    assert policy.compile(using).select(*shape.numbers) == decision
    assert decision.decode_steps == steps


@pytest.mark.parametrize("max_decode_steps", [2, 4])
def test_an_executor_that_does_not_spread_is_not_told_to(max_decode_steps):
    """The same way as for one that does, all decode steps at once; prepared as by itself."""
    costs = attrs.evolve(COSTS, full=Curve((8, 64), (100.0, 101.0)), overlap_cost=0.2)
    shape = BatchShape(decodes=[(1, 8)], prefills=[(1000, 0)], max_decode_steps=max_decode_steps)
    using = context(costs=costs, objective=Objective.parse("latency"))
    for policy in (get_policy("auto"), get_policy("auto:forms=decodes_beside")):
        found = {}
        for spreads in (True, False):
            told = attrs.evolve(using, spreads=spreads)
            found[spreads] = policy.decide(shape, told)
            assert policy.compile(told).select(*shape.numbers) == found[spreads]
        assert found[True].launches[0].wait_share is not None
        assert found[False].launches[0].wait_share is None
        assert found[False].launches[0].repeat == found[True].launches[0].repeat


def steps_beside(effects, all_rows, prompt):
    """Decode steps beside prompts of that many tokens with the rows, by rows, where eight hide nothing; of two."""
    costs = attrs.evolve(
        COSTS, full=Curve((8, 64), (300.0, 301.0)), overlap_cost=1.0, effects=effects,
        decode_attention=AttentionCost(), host_full=HostCost(1.0), host_piecewise=HostCost(1.0),
    )  # fmt: skip
    using = {"costs": costs, "objective": Objective.parse("latency")}
    return {
        rows: decide(
            BatchShape(decodes=[(1, rows)], prefills=[(prompt(rows), 0)], max_decode_steps=2), **using
        ).decode_steps
        for rows in all_rows
    }


def test_one_row_beside_a_prompt_is_decided_by_its_own_overlap():
    """Where it hides and several rows don't, one row runs ahead, and eight don't; prepared as by itself."""
    found = steps_beside(StepEffects(one_row_overlap=0.0), (1, 2, 4, 7, 8), lambda _rows: 1000)
    assert (found[1], found[8]) == (2, 1)
    assert sorted(found.values(), reverse=True) == list(found.values())


def test_many_rows_beside_a_prompt_are_decided_by_their_own_overlap():
    """Where they hide and eight don't, 32 run ahead, and eight don't; prepared as by itself, numbers between too."""
    effects = StepEffects(many_rows_overlap=0.0, many_rows_slowdown=1.5)
    found = steps_beside(effects, (7, 8, 12, 16, 24, 31, 32, 33, 60), lambda rows: 1000 - rows)
    assert (found[8], found[32], found[60]) == (1, 2, 2)
    assert sorted(found.values()) == list(found.values())


def test_many_rows_that_take_longer_beside_than_in_turn():
    """They are decided as any others, and so are few rows beside them in a table, which don't."""
    effects = StepEffects(many_rows_overlap=1.5)
    using = context(costs=attrs.evolve(COSTS, overlap_cost=0.3, effects=effects))
    compiled = get_policy("auto").compile(using)
    for rows in (3, 60):
        shape = BatchShape(decodes=[(1, rows)], prefills=[(900, 0)], max_decode_steps=2)
        assert compiled.select(*shape.numbers) == get_policy("auto").decide(shape, using)


def test_first_token_limit_bounds_the_prefill():
    """Steps that would stretch the cycle beyond the limit aren't taken: 8 steps of 60 us beside 100 us do."""
    costs = attrs.evolve(COSTS, full=Curve((8, 64), (60.0, 61.0)))
    shape = BatchShape(decodes=[(1, 8)], prefills=[(100, 0)], max_decode_steps=8)
    tight = decide(shape, costs=costs, objective=Objective(0.0, 1.0, first_token_limit=1.25))
    loose = decide(shape, costs=costs, objective=Objective(0.0, 1.0, first_token_limit=10.0))
    assert tight.decode_steps < loose.decode_steps == 8


def longer_than_shortest(numbers, using, decision):
    """Whether its cycle is longer than the shortest of the ways that are considered."""
    ways = legal_ways(numbers, using, cheapest(using))
    costs = [using.costs.cost(way.launches, numbers) for way in ways]
    limit_us = clear_us(ways, costs)
    cycles = [
        cost.cycle_us for way, cost in zip(ways, costs, strict=True)
        if not in_tail(way, cost, numbers) and not near_tie(way, cost, limit_us)
    ] or [cost.cycle_us for cost in costs]  # fmt: skip
    at_once = [attrs.evolve(launch, wait_share=None) for launch in decision.launches]
    return using.costs.cost(at_once, numbers).cycle_us > min(cycles) * (1 + 1e-9)


@hypothesis.given(
    contexts(get_policy("auto")), st.lists(MIXED, min_size=4, max_size=4), st.sampled_from([2, 4, 8]), shapes()
)
@hypothesis.settings(max_examples=200, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
def test_throughput_delays_no_prompt(drawn, batches, steps, other):
    """By default no way is taken that ends later than the shortest of those considered; prepared as by itself."""
    policy, using = get_policy("auto"), deciding(attrs.evolve(drawn, objective=Objective.parse("throughput")))
    compiled = policy.compile(using)
    for shape in (*(attrs.evolve(each, max_decode_steps=steps) for each in batches), other):
        numbers = shape.numbers
        if numbers.num_prefills:
            for decision in (policy.decide(shape, using), compiled.select(*numbers)):
                assert not longer_than_shortest(numbers, using, decision), decision


def test_prompts_are_delayed_where_the_gap_is_weighed_or_they_may_be():
    """Of the same batches some run several decode steps beside a prompt that ends later for them, and some don't."""
    drawn, later = random.Random(11), Counter()  # noqa: S311
    shipped = load_profile("qwen2.5-0.5b-h200").costs
    objectives = {"throughput": Objective(), "latency": Objective.parse("latency"), "told": DELAYS}
    tables = [
        (name, deciding(context(costs, objective=objective)))
        for name, objective in objectives.items()
        for costs in (COSTS, shipped)
    ]
    policy = get_policy("auto")
    compiled = [(name, using, policy.compile(using)) for name, using in tables]
    for _ in range(300):
        shape = BatchShape(
            decodes=[(1, drawn.randint(1, 64))], prefills=[(drawn.randint(64, 2000), 0)],
            max_decode_steps=drawn.choice((2, 4, 8)),
        )  # fmt: skip
        for name, using, prepared in compiled:
            decision = policy.decide(shape, using)
            assert prepared.select(*shape.numbers) == decision
            if longer_than_shortest(shape.numbers, using, decision):
                later[name] += 1
                assert decision.form is SplitForm.DECODES_BESIDE
                assert decision.decode_steps > 1
    assert not later["throughput"]
    assert 30 < later["latency"] < 600
    assert 30 < later["told"] < 600


def test_in_turn_halves_do_not_shorten_the_gap():
    """With only in-turn splits latency chooses as throughput does: the next decode waits for the prefill half."""
    policy = get_policy("auto", forms="in_turn")
    for tokens in (20, 200, 1000):
        shape = BatchShape(decodes=[(1, 8)], prefills=[(tokens, 0)], max_decode_steps=8)
        chosen = [policy.decide(shape, context(objective=Objective.parse(name))) for name in ("throughput", "latency")]
        assert chosen[0] == chosen[1]


def test_analytic_costs_are_said():
    """Without measurements the reason and the basis say so, and the table's version is on the decision."""
    decision = decide(BatchShape.decode(3), costs=analytic_costs(), basis=Basis.COSTS_ANALYTIC)
    assert decision.reason is Reason.CHEAPEST_ANALYTIC
    assert "nothing was measured" in decision.why
    assert decision.basis is Basis.COSTS_ANALYTIC
    assert decision.costs_version == analytic_costs().version


def test_one_legal_way_says_so():
    """With eager and PIECEWISE forbidden one way is left, and that is the reason."""
    shape = BatchShape.decode(3, forbidden=[Mode.EAGER, Mode.PIECEWISE])
    assert decide(shape).reason is Reason.ONLY_LEGAL


@pytest.mark.parametrize("text", ["throughput", "latency", "0.5:0.5"])
def test_objectives_parse_and_print(text):
    """An objective reads from text and prints as what was read."""
    assert str(Objective.parse(text)) == text


def test_an_eager_half_is_told_by_the_adapters_of_the_step_itself():
    """Steps with other LoRA counts that the same graphs serve keep reasons of their own: one lost its graph."""
    decode = GraphKey(Part.FULL, 16, 16, max_query_len=4, lora_case=4)
    lost = GraphKey(Part.PIECEWISE, 32, lora_case=1)
    ladder = CaptureLadder({decode}, withdrawn={lost})
    told = attrs.evolve(context(), claims=Claims(16, 4), ladder=ladder, settings=Settings(max_loras=4))
    policy = get_policy("auto:forms=beside")
    compiled = policy.compile(told)
    for loras in (1, 4, 1):
        shape = BatchShape(decodes=((1, 8),), prefills=((16, 0),), num_active_loras=loras)
        assert compiled.select(*shape.numbers) == policy.decide(shape, told)


@pytest.mark.parametrize(("most", "steps"), [(1, ()), (2, (2,)), (3, (2, 3)), (5, (2, 3, 4)), (8, (2, 3, 4, 6, 8))])
def test_decode_steps_beside_a_prompt(most: int, steps: tuple[int, ...]) -> None:
    """Near enough to each other that the next fewer is a good part of one that is too late."""
    assert repeats(SplitForm.DECODES_BESIDE, most) == steps
    assert repeats(SplitForm.BESIDE, most) == (1,)
