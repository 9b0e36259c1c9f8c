"""Costs: curves, hand-worked sums, and the analytic table's sanity."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kpolicy.costs import (
    EARLY,
    H200,
    LLAMA_8B,
    MIDDLE_OF,
    AttentionCost,
    Cost,
    CostTable,
    Curve,
    HostCost,
    ModelFigures,
    Ties,
    analytic_costs,
)
from kpolicy.decision import Launch
from kpolicy.errors import ConfigError, ProfileError
from kpolicy.figures import find_device
from kpolicy.keys import GraphKey
from kpolicy.modes import Part, Rows
from kpolicy.overlap import Overlap
from kpolicy.profiles import load_profile
from kpolicy.schemas import Profile, dumps, loads
from kpolicy.settings import Objective
from kpolicy.shapes import WAITING_REQS, BatchNumbers, BatchShape

FULL8 = GraphKey(Part.FULL, 8, 8, query_len=1)
PIECE64 = GraphKey(Part.PIECEWISE, 64)
TABLE = CostTable(
    version="by hand",
    measured=True,
    full=Curve((8, 64), (100.0, 240.0)),
    piecewise=Curve((8, 64), (120.0, 260.0)),
    eager=Curve((8, 64), (130.0, 270.0)),
    decode_attention=AttentionCost(10.0, 1.0, 0.01),
    prefill_attention=AttentionCost(20.0, 0.5, 0.001),
    host_full=HostCost(40.0, 0.5),
    host_piecewise=HostCost(300.0, 1.0),
    host_eager=HostCost(900.0, 2.0),
    step_us=30.0,
    overlap_cost=0.5,
)
DECODES = BatchShape.decode(6, 6000).numbers
# 6 decodes with 6,000 KV tokens, 40 prompt tokens over a context of 100: 40 x 100 + 40 x 41 / 2 pairs.
MIXED = BatchShape(decodes=[(1, 6)], prefills=[(40, 100)], decode_kv_tokens=6000).numbers
DECODE_US = 10 + 6 * 1.0 + 6000 * 0.01
PREFILL_US = 20 + 40 * 0.5 + 4820 * 0.001


def test_curves_are_linear_between_points_and_beyond_the_last_two() -> None:
    """A measured size has its time; others lie on the line through their neighbours, never falling at the end."""
    curve = Curve((10, 20, 40), (100.0, 50.0, 150.0))
    assert [curve.at(size) for size in (10, 20, 40)] == [100, 50, 150]
    assert curve.at(15) == 75
    assert curve.at(30) == 100
    assert curve.at(60) == 250
    assert curve.at(1) == 100
    assert Curve((10, 20), (100.0, 50.0)).at(40) == 50
    assert Curve((10,), (100.0,)).at(1) == Curve((10,), (100.0,)).at(99) == 100


def test_a_title_names_the_first_of_several_tables_alone() -> None:
    """Only a middle's, and its version stays whole; any other's is its version, whatever is in it."""
    table = load_profile("qwen2.5-0.5b-h200").costs
    first, *others = table.version.split("; ")
    assert table.title == f"{first} and 2 more"
    assert len(others) == 2
    assert table.title.startswith(f"{MIDDLE_OF}3: measured ")
    for version in ("measured on cuda, 5 rounds; another figure of a later day", f"{MIDDLE_OF}1: measured on cuda"):
        assert attrs.evolve(table, version=version).title == version


def test_a_curve_is_held_to_another_where_both_were_measured() -> None:
    """At sizes of either that both span it is at most the other; where it is below, it is as it was."""
    eager = Curve((1, 100, 400), (50.0, 120.0, 420.0))
    pieces = Curve((10, 100, 200, 300), (40.0, 100.0, 190.0, 330.0))
    held = eager.at_most(pieces)
    assert held == Curve((1, 10, 100, 200, 300, 400), (50.0, 40.0, 100.0, 190.0, 320.0, 420.0))
    assert held.at_most(pieces) is held
    assert pieces.at_most(Curve((10, 300), (900.0, 900.0))) is pieces


def test_a_curve_held_to_another_goes_on_as_steep_as_it_was() -> None:
    """Beyond the other's last size it isn't back at its own time, nor does what it is beyond its own rise quicker."""
    eager = Curve((100, 200, 220), (120.0, 220.0, 240.0))
    held = eager.at_most(Curve((100, 200), (100.0, 190.0)))
    assert held == Curve((100, 200, 220), (100.0, 190.0, 210.0))
    assert held.at(400) == eager.at(400) - 30
    both = eager.at_most(Curve((100, 220), (100.0, 208.0)))
    assert both == Curve((100, 200, 220), (100.0, 190.0, 208.0))


def test_a_curve_goes_on_as_another_that_ends_later() -> None:
    """As far above or below it as at its own last size, and so as steep beyond both."""
    pieces = Curve((16, 704, 896), (50.0, 167.0, 194.0))
    eager = Curve((16, 704, 896, 1024), (45.0, 167.0, 190.0, 218.0))
    longer = pieces.going_on_as(eager)
    assert longer == Curve((16, 704, 896, 1024), (50.0, 167.0, 194.0, 222.0))
    assert longer.at(4096) - eager.at(4096) == pytest.approx(4.0)
    assert Curve((16, 896), (45.0, 160.0)).going_on_as(longer) == Curve((16, 896, 1024), (45.0, 160.0, 188.0))
    assert eager.going_on_as(pieces) is eager
    assert eager.going_on_as(eager) is eager
    # Where the other begins behind it, with its times, and all of a single point as the other is.
    assert Curve((1, 8), (44.0, 47.0)).going_on_as(pieces) == Curve(
        (1, 8, 16, 704, 896), (44.0, 47.0, 50.0, 167.0, 194.0)
    )
    assert Curve((704,), (170.0,)).going_on_as(pieces) == Curve((16, 704, 896), (53.0, 170.0, 197.0))
    falling = Curve((1, 1024, 2048), (500.0, 3834.0, 3528.0))
    assert Curve((1024,), (3900.0,)).going_on_as(falling) == Curve((1, 1024, 2048), (566.0, 3594.0, 3594.0))
    assert Curve((16, 20), (1.0, 1.0)).going_on_as(Curve((16, 30), (100.0, 50.0))).sizes == (16, 20)  # below 0


@given(st.lists(st.tuples(st.integers(1, 500), st.floats(0.5, 1e4)), min_size=1, max_size=6), st.integers(1, 900))
def test_a_curve_stays_between_its_points(points: list[tuple[int, float]], size: int) -> None:
    """Inside what was measured a curve lies between its neighbours; it is never negative."""
    drawn = dict(points)
    curve = Curve(sorted(drawn), [drawn[each] for each in sorted(drawn)])
    at = curve.at(size)
    assert at >= 0
    if curve.sizes[0] <= size <= curve.sizes[-1]:
        below = max(each for each in curve.sizes if each <= size)
        above = min(each for each in curve.sizes if each >= size)
        low, high = sorted((curve.at(below), curve.at(above)))
        assert low - 1e-6 <= at <= high + 1e-6


@pytest.mark.parametrize(
    ("sizes", "us", "match"),
    [
        ((), (), "0 sizes and 0 times"),
        ((1, 2), (1.0,), "2 sizes and 1 times"),
        ((2, 1), (1.0, 1.0), "must rise"),
        ((1, 1), (1.0, 1.0), "must rise"),
        ((0, 1), (1.0, 1.0), "from at least 1"),
        ((1,), (0.0,), "positive number"),
        ((1,), (-1.0,), "positive number"),
        ((1,), (float("nan"),), "positive number"),
        ((1,), (float("inf"),), "positive number"),
        ((1.5, 2.5), (1.0, 2.0), "curve sizes are .*whole numbers"),
        ((True, 2), (1.0, 2.0), "curve sizes are .*whole numbers"),
        ("12", (1.0, 2.0), "curve sizes are '12'"),
        ((1, 2), ("1", "2"), "curve times are .*numbers"),
        (1, (1.0,), "curve sizes are 1"),
    ],
)
def test_curves_that_nobody_measured(sizes: Any, us: Any, match: str) -> None:
    """A curve without points, with sizes that don't rise, or with a time that is no time is an error."""
    with pytest.raises(ProfileError, match=match):
        Curve(sizes, us)


def test_plain_numbers_of_a_curve_are_not_looked_at_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Corrected costs are made while steps run; numbers of other libraries are looked at, and become plain ones."""
    np = pytest.importorskip("numpy")
    asked = []

    def counting(value: object, kind: Any) -> bool:
        if kind in (Integral, Real):
            asked.append(value)
        return isinstance(value, kind)

    monkeypatch.setattr("kpolicy.costs.isinstance", counting, raising=False)
    Curve((1, 2), (1.0, 2))
    assert not asked
    curve = Curve(np.array([1, 2]), np.array([1.0, 2.0]))
    assert len(asked) == 4
    assert [type(value) for value in (*curve.sizes, *curve.us)] == [int, int, float, float]


@pytest.mark.parametrize(
    "make",
    [
        lambda: AttentionCost(-1.0),
        lambda: AttentionCost(0.0, float("nan")),
        lambda: HostCost(-1.0),
        lambda: HostCost(1.0, float("inf")),
        lambda: attrs.evolve(TABLE, decode_attention=AttentionCost(1.0, kv_us=0.1)),
        lambda: attrs.evolve(TABLE, overlap_cost=-0.1),
        lambda: attrs.evolve(TABLE, overlap_cost=2.5),
        lambda: attrs.evolve(TABLE, both_us=(0.0, -1.0)),
        lambda: attrs.evolve(TABLE, padding_us=(-1.0, 0.0)),
        lambda: attrs.evolve(TABLE, both_us=(1.0,)),
        lambda: attrs.evolve(TABLE, capture_us=(1.0, 2.0, 3.0)),
        lambda: attrs.evolve(TABLE, graph_bytes="12"),
        lambda: attrs.evolve(TABLE, padding_us=3.0),
        lambda: attrs.evolve(LLAMA_8B, num_layers=0),
        lambda: attrs.evolve(LLAMA_8B, dense_params=0),
    ],
)
def test_numbers_that_are_no_costs(make: Any) -> None:
    """Negative, infinite and unbelievable costs are errors."""
    with pytest.raises(ProfileError):
        make()


@pytest.mark.parametrize(
    ("launches", "numbers", "device", "host"),
    [
        # 6 rows in a graph of 8: dense work at 8, attention on the real KV.
        ((Launch(Rows.ALL, FULL8),), DECODES, 100 + DECODE_US, 40 + 6 * 0.5),
        ((Launch(Rows.ALL, PIECE64),), DECODES, 260 + DECODE_US, 300 + 6),
        # Eager isn't padded: 130 + (6 - 8) x 140 / 56 is below the first point, so it is the first point's.
        ((Launch(Rows.ALL, None),), DECODES, 130 + DECODE_US, 900 + 12),
        ((Launch(Rows.ALL, None, padded_tokens=64),), DECODES, 270 + DECODE_US, 900 + 12),
        ((Launch(Rows.ALL, PIECE64),), MIXED, 260 + DECODE_US + PREFILL_US, 300 + 7),
        ((Launch(Rows.ALL, None),), MIXED, 130 + (46 - 8) * 2.5 + DECODE_US + PREFILL_US, 900 + 14),
    ],
)
def test_one_launch_by_hand(launches: Any, numbers: Any, device: float, host: float) -> None:
    """A launch takes the larger of device and host time, plus what overlaps nothing; gap and step are the cycle."""
    cost = TABLE.cost(launches, numbers)
    assert cost.device_us == pytest.approx(device)
    assert cost.host_us == pytest.approx(host)
    assert cost.cycle_us == pytest.approx(max(device, host) + 30)
    assert cost.step_us == cost.gap_us == cost.cycle_us
    assert cost.bound_by == ("host" if host > device else "device")


def test_rows_of_both_kinds_in_one_graph() -> None:
    """Graphs that hold prompts have their own curve, and `both_us` comes where one launch of a graph has both kinds."""
    costs = attrs.evolve(TABLE, mixed=Curve((8, 64), (150.0, 333.0)), both_us=(7.0, 45.0))
    whole = Launch(Rows.ALL, GraphKey(Part.FULL, 64))
    assert costs.launch_us(whole, MIXED)[0] == pytest.approx(333 + DECODE_US + PREFILL_US + 7)
    assert costs.launch_us(whole, DECODES)[0] == pytest.approx(333 + DECODE_US)
    assert costs.launch_us(Launch(Rows.ALL, FULL8), DECODES)[0] == pytest.approx(100 + DECODE_US)
    assert costs.launch_us(Launch(Rows.ALL, PIECE64), MIXED)[0] == pytest.approx(260 + DECODE_US + PREFILL_US + 45)
    assert costs.launch_us(Launch(Rows.ALL, None), MIXED) == TABLE.launch_us(Launch(Rows.ALL, None), MIXED)
    assert costs.cost(split(1), MIXED) == TABLE.cost(split(1), MIXED), "halves have one kind each"
    assert TABLE.curve_for(whole.key or FULL8) is TABLE.full, "where nothing else was measured"


def test_any_padding_takes_what_nothing_overlaps() -> None:
    """Both sides of a launch take `padding_us` of its part more where a graph isn't full; eagerly they don't."""
    costs = attrs.evolve(TABLE, padding_us=(7.0, 45.0))
    eight = BatchShape.decode(8, 6000).numbers
    full, pieces = Launch(Rows.ALL, FULL8), Launch(Rows.ALL, PIECE64)
    for numbers, more in ((DECODES, 7.0), (eight, 0.0)):
        told, plain = costs.cost((full,), numbers), TABLE.cost((full,), numbers)
        assert (told.device_us, told.host_us) == pytest.approx((plain.device_us + more, plain.host_us + more))
        assert told.cycle_us == pytest.approx(plain.cycle_us + more)
    assert costs.cost((pieces,), MIXED).cycle_us == pytest.approx(TABLE.cost((pieces,), MIXED).cycle_us + 45)
    for eager in (Launch(Rows.ALL, None), Launch(Rows.ALL, None, padded_tokens=64)):
        assert costs.cost((eager,), DECODES) == TABLE.cost((eager,), DECODES)
    # Three padded decode steps in graphs of 8 and a prompt of 40 in one of 64.
    halves, plain = costs.cost(split(0, 3), MIXED), TABLE.cost(split(0, 3), MIXED)
    assert halves.cycle_us == pytest.approx(plain.cycle_us + 3 * 7 + 45)


def split(stream: int, repeat: int = 1) -> tuple[Launch, Launch]:
    return Launch(Rows.DECODE, FULL8, repeat=repeat), Launch(Rows.PREFILL, PIECE64, stream=stream)


def test_a_split_in_turn_by_hand() -> None:
    """Halves that follow each other add up, on the device and on the host."""
    cost = TABLE.cost(split(0), MIXED)
    device, host = 100 + DECODE_US + 260 + PREFILL_US, 40 + 3 + 300 + 1
    assert cost.device_us == pytest.approx(device)
    assert cost.host_us == pytest.approx(host)
    assert cost.step_us == cost.gap_us == pytest.approx(max(device, host) + 30)


def test_a_split_beside_by_hand() -> None:
    """Beside each other the shorter half costs half of itself; the next token still waits for the whole cycle."""
    cost = TABLE.cost(split(1), MIXED)
    longer, shorter = 260 + PREFILL_US, 100 + DECODE_US
    assert cost.device_us == pytest.approx(longer + 0.5 * shorter)
    assert cost.cycle_us == pytest.approx(max(longer + 0.5 * shorter, 344) + 30)
    assert cost.gap_us == cost.cycle_us


def test_several_decodes_beside_by_hand() -> None:
    """Four decodes beside a prefill: the gap is a quarter of the cycle, and three decode-only steps are taken off."""
    cost = TABLE.cost(split(1, 4), MIXED)
    decode, prefill = 100 + DECODE_US, 260 + PREFILL_US
    device, host = max(4 * decode, prefill) + 0.5 * min(4 * decode, prefill), 4 * 43 + 301
    cycle = max(device, host) + 30
    assert cost.cycle_us == pytest.approx(cycle)
    assert cost.gap_us == pytest.approx(cycle / 4)
    assert cost.step_us == pytest.approx(cycle - 3 * (decode + 30))


DECODE_HALF_US = 100 + DECODE_US


@pytest.mark.parametrize("repeat", [1, 4])
def test_when_decodes_in_turn_are_done_by_hand(repeat: int) -> None:
    """Their own time, and what a step takes beside all that it launches."""
    cycle = TABLE.cost(split(0, repeat), MIXED).cycle_us
    assert TABLE.decodes_ready_us(split(0, repeat), MIXED, cycle) == pytest.approx(repeat * DECODE_HALF_US + 30)
    assert TABLE.decodes_ready_us(split(0, repeat), MIXED, 120.0) == 120, "at most the step"


def test_when_decodes_beside_are_done_by_hand() -> None:
    """Half of the shorter half is paid: each half takes 1.5 times as long beside the other."""
    long = BatchShape(decodes=[(1, 6)], prefills=[(64, 40_000)], decode_kv_tokens=6000).numbers
    cycle = TABLE.cost(split(1, 2), long).cycle_us
    assert TABLE.decodes_ready_us(split(1, 2), long, cycle) == pytest.approx(2 * 1.5 * DECODE_HALF_US + 30)
    # Two halves that take about as long are done together.
    cycle = TABLE.cost(split(1, 2), MIXED).cycle_us
    assert TABLE.decodes_ready_us(split(1, 2), MIXED, cycle) == cycle


@pytest.mark.parametrize("slowdown", [None, 1.8])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_decodes_that_wait_are_done_when_the_step_is(steps: int, slowdown: float | None) -> None:
    """Never after its end, and before it by what they may take longer and less than a sixteenth of a slot."""
    table = attrs.evolve(TABLE, decode_slowdown=slowdown)
    times = slowdown or 1.5
    numbers = BatchShape(decodes=[(1, 6)], prefills=[(64, 40_000)], decode_kv_tokens=6000).numbers
    first, second = split(1, steps)
    cycle = table.cost((first, second), numbers).cycle_us
    wait = table.wait_share(*table.launch_us(first, numbers), table.overlap, cycle, steps)
    assert wait is not None
    assert wait * 16 == int(wait * 16)
    ready = table.decodes_ready_us((attrs.evolve(first, wait_share=wait), second), numbers, cycle)
    slot = (cycle - 30) / steps
    # By hand: the last begins when its slot is so far over, and takes so many times its time.
    assert ready == pytest.approx((steps - 1 + wait) * slot + times * DECODE_HALF_US + 30)
    assert cycle - slot / 16 <= ready + (EARLY - 1) * times * DECODE_HALF_US <= cycle
    at_once = table.decodes_ready_us((first, second), numbers, cycle)
    assert at_once < ready


def test_decodes_that_fill_the_step_do_not_wait() -> None:
    """Nothing is left to wait for; a host that takes longer than the device counts with its time."""
    overlap = Overlap.of(0.5)
    assert TABLE.wait_share(100.0, 0.0, overlap, 30 + EARLY * 300, 2) is None
    assert TABLE.wait_share(100.0, 0.0, overlap, 30 + EARLY * 600, 2) == 0.5
    assert TABLE.wait_share(100.0, 300.0, overlap, 30 + EARLY * 600, 2) is None
    assert TABLE.wait_share(100.0, 0.0, Overlap.of(0.5, 3.0), 30 + EARLY * 600, 2) is None
    assert TABLE.wait_share(100.0, 0.0, overlap, 30.0, 1) is None


@pytest.mark.parametrize(("waiting", "share"), [(0, 1), (6, 6 / 12), (94, 6 / 100)])
def test_what_decodes_ahead_spare_is_shared_with_requests_that_wait(waiting: int, share: float) -> None:
    """Requests that wait for a place in a step only will share later steps, so less of those is spared.

    The rows' own attention is 6 x 1.0 + 6,000 x 0.01 in any case.
    """
    shape = BatchShape(decodes=[(1, 6)], prefills=[(40, 100)], decode_kv_tokens=6000, facts={WAITING_REQS: waiting})
    cost = TABLE.cost(split(1, 2), shape.numbers)
    assert cost.cycle_us - cost.step_us == pytest.approx(66 + share * (110 + 30))
    assert cost.gap_us == pytest.approx(cost.cycle_us / 2)


def test_a_host_bound_decode_step_spares_launches() -> None:
    """Where launching takes longer than the device, the share of the launches counts, if it is more."""
    assert TABLE.spared_us(100.0, 400.0, 66.0, 0.5) == 0.5 * 400 + 0.5 * 30
    assert TABLE.spared_us(100.0, 110.0, 66.0, 0.5) == 66 + 0.5 * 34 + 0.5 * 30


def test_an_idle_rank_costs_what_others_decided() -> None:
    """A rank without rows has the cost of a decision of several decode steps like any other."""
    cost = TABLE.cost(split(1, 4), BatchShape().numbers)
    assert cost.step_us == cost.cycle_us


def test_nothing_to_run_costs_what_a_step_costs() -> None:
    """A step without launches takes only what overlaps nothing."""
    assert TABLE.cost((), BatchShape().numbers) == Cost(30, 30, 30, 0, 0)


def test_scores_weigh_step_and_gap() -> None:
    """The score is the weighted sum of the two."""
    cost = TABLE.cost(split(1, 4), MIXED)
    assert TABLE.score(cost, Objective()) == cost.step_us
    assert TABLE.score(cost, Objective.parse("latency")) == cost.gap_us
    assert TABLE.score(cost, Objective(2.0, 3.0)) == pytest.approx(2 * cost.step_us + 3 * cost.gap_us)


def whole(key: GraphKey | None) -> tuple[Launch]:
    return (Launch(Rows.ALL, key),)


SMALL = ModelFigures(
    name="small",
    num_layers=24,
    dense_params=494_032_768,
    weight_params=494_032_768,
    kv_bytes_per_token=12_288,
    attention_flops_per_pair=4 * 896 * 24,
)


@pytest.mark.parametrize("model", [LLAMA_8B, SMALL], ids=lambda model: model.name)
def test_one_decode_by_the_analytic_table(model: ModelFigures) -> None:
    """For one decode eager costs no less than pieces, and pieces no less than one graph; on the host always more."""
    table, numbers = analytic_costs(model), BatchShape.decode(1, 1000).numbers
    full = table.cost(whole(GraphKey(Part.FULL, 1, 1, query_len=1)), numbers)
    pieces = table.cost(whole(GraphKey(Part.PIECEWISE, 1)), numbers)
    eager = table.cost(whole(None), numbers)
    assert eager.step_us > pieces.step_us >= full.step_us
    assert eager.host_us > pieces.host_us > full.host_us
    assert full.bound_by == "device"
    assert not table.measured
    assert model.name in table.version


def test_a_large_batch_is_bound_by_the_device_whatever_the_mode() -> None:
    """With thousands of tokens launches are hidden, so eager costs what a graph of its size costs."""
    table, numbers = analytic_costs(), BatchShape(prefills=[(8192, 0)]).numbers
    graph = table.cost(whole(GraphKey(Part.PIECEWISE, 8192)), numbers)
    eager = table.cost(whole(None), numbers)
    assert graph.bound_by == eager.bound_by == "device"
    assert graph.step_us == eager.step_us


@given(st.integers(1, 16_000), st.integers(1, 16_000))
def test_analytic_time_never_falls_with_tokens(few: int, many: int) -> None:
    """More tokens never take less device time."""
    few, many = sorted((few, many))
    table = analytic_costs()
    assert table.eager.at(few) <= table.eager.at(many)
    assert table.full.at(few) == table.piecewise.at(few) == table.eager.at(few)


def test_reading_the_weights_bounds_a_single_token() -> None:
    """One token of the 8B model takes at least the time to read its weights, and no more than the kernels besides."""
    weights_us = 2 * LLAMA_8B.weight_params / (H200.bytes_per_us * H200.efficiency)
    dense_us = analytic_costs().full.at(1)
    assert weights_us < dense_us < 1.2 * weights_us


def test_bigger_models_cost_more_in_every_mode() -> None:
    """A model with more layers costs more on the host in eager and pieces, and more on the device throughout."""
    little, large = analytic_costs(SMALL), analytic_costs()
    assert little.host_eager.base_us < large.host_eager.base_us
    assert little.host_piecewise.base_us < large.host_piecewise.base_us
    assert all(little.full.at(size) < large.full.at(size) for size in (1, 64, 1024, 8192))
    assert little.version != large.version


@given(st.dictionaries(st.integers(1, 60), st.floats(0.5, 1e4), min_size=1, max_size=6), st.integers(1, 120))
def test_a_whole_curve_is_its_points(points: dict[int, float], most: int) -> None:
    """`upto` gives exactly what `at` gives, size by size, below, between and beyond the points."""
    curve = Curve(sorted(points), [points[each] for each in sorted(points)])
    assert curve.upto(most) == [0.0, *(curve.at(size) for size in range(1, most + 1))]


def test_the_host_launches_attention_of_each_kind_of_rows_outside_a_whole_graph() -> None:
    host = HostCost(100.0, 1.0, 30.0, 7.0)
    costs = attrs.evolve(TABLE, host_piecewise=host, host_eager=attrs.evolve(host, base_us=500.0))
    piece = Launch(Rows.ALL, GraphKey(Part.PIECEWISE, 64))
    decodes, prompts = BatchNumbers(4, 1, 40), BatchNumbers(0, num_prefills=2, num_prefill_tokens=20)
    both = BatchNumbers(4, 1, 40, 4, num_prefills=2, num_prefill_tokens=20)
    assert costs.launch_us(piece, decodes)[1] == 100 + 30 + 4
    assert costs.launch_us(piece, prompts)[1] == 100 + 7 + 2
    assert costs.launch_us(piece, both)[1] == 100 + 30 + 7 + 6
    assert costs.launch_us(Launch(Rows.PREFILL, None), both)[1] == 500 + 7 + 2
    with pytest.raises(ProfileError, match="host costs are microseconds from 0 up"):
        HostCost(1.0, 0.0, -1.0)


def test_prompt_attention_by_the_context_it_goes_through() -> None:
    costs = attrs.evolve(TABLE, prefill_attention=AttentionCost(20.0, 0.5, 0.001, 0.25))
    chunk = BatchNumbers(0, num_prefills=1, num_prefill_tokens=8, prefill_kv_tokens=1008, prefill_pairs=8036)
    assert costs.prefill_attention_us(chunk) == pytest.approx(20 + 4 + 8.036 + 252)


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("full", ((1,), (2.0,)), "Curve"), ("eager", None, "Curve"), ("mixed", 3.0, "Curve"),
        ("host_full", 50.0, "HostCost"), ("decode_attention", 0.1, "AttentionCost"), ("kv_span", 512, "KvSpan"),
        ("ties", {"full": 3.0}, "Ties"), ("ties.full", Ties(full=3.0), "Curve"),
    ],
)  # fmt: skip
def test_a_table_of_other_parts_is_refused(field: str, value: object, kind: str) -> None:
    """When it is made, and by the field's name."""
    with pytest.raises(ConfigError, match=f"^{field} is .*it takes an? {kind}, such as"):
        attrs.evolve(analytic_costs(), **{field.partition(".")[0]: value})
    attrs.evolve(analytic_costs(), mixed=None, kv_span=None, ties=None)


def test_decisions_take_tied_times_and_costs_dont() -> None:
    """Sizes that have none keep what was measured, in decisions too; a table without any decides by what it is."""
    decided = {name: getattr(TABLE, name) for name in ("full", "piecewise", "eager")}
    assert TABLE.deciding is TABLE
    assert TABLE.decided_by(decided) == TABLE
    size, *others = TABLE.full.sizes
    tied = TABLE.decided_by({**decided, "full": Curve(TABLE.full.sizes, (1.5, *TABLE.full.us[1:])), "mixed": None})
    assert tied.ties == Ties(full=Curve((size,), (1.5,)))
    assert tied.full == TABLE.full
    assert [tied.deciding.full.at(each) for each in (size, *others)] == [1.5, *map(TABLE.full.at, others)]
    assert attrs.evolve(tied.deciding, full=TABLE.full) == TABLE
    profile = loads(dumps(Profile(costs=tied, device="a device", model="a model")), Profile)
    assert profile.costs == tied


@pytest.mark.parametrize(
    ("ties", "problem"),
    [
        (Ties(full=Curve((3, 7777), (1.0, 2.0))), r"ties\.full has a time at size \d+, and full was measured at \("),
        (Ties(mixed=Curve((1,), (1.0,))), r"ties\.mixed has a time at size 1, and mixed was measured at no size"),
    ],
)
def test_tied_times_of_sizes_that_were_not_measured_are_refused(ties: Ties, problem: str) -> None:
    with pytest.raises(ProfileError, match=problem):
        attrs.evolve(TABLE, mixed=None, ties=ties)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: AttentionCost("1"), "attention costs are microseconds from 0 up"),
        (lambda: AttentionCost(row_us=True), "attention costs are microseconds from 0 up"),
        (lambda: HostCost(None), "host costs are microseconds from 0 up"),
        (lambda: attrs.evolve(LLAMA_8B, num_layers="32"), "num_layers of 8B GQA decoder is '32'; it is a whole number"),
        (lambda: attrs.evolve(LLAMA_8B, kv_bytes_per_token=-1), "kv_bytes_per_token of 8B GQA decoder is -1"),
        (lambda: attrs.evolve(H200, bytes_per_us=0), "bytes_per_us of H200 .* is 0; it is a number above 0"),
        (lambda: attrs.evolve(H200, efficiency="0.7"), "efficiency of H200 .* is '0.7'"),
        (lambda: attrs.evolve(H200, replay_us=-1), "replay_us of H200 .* is -1; it is microseconds from 0 up"),
        (lambda: analytic_costs("llama"), r"model is 'llama'; it takes a ModelFigures, such as kpolicy\.figures"),
        (lambda: analytic_costs(device="H100"), r"device is 'H100'; it takes a DeviceFigures, such as .*find_device"),
        (lambda: load_profile(None), "the profile is None; it takes a str"),
        (lambda: find_device(None), "unknown device None"),
    ],
)
def test_what_is_no_figure_is_named(make: Callable[[], object], problem: str) -> None:
    """A name where figures go, text for numbers, a bandwidth of 0: ours to refuse, not Python's."""
    with pytest.raises(ConfigError, match=problem):
        make()
