"""Budgets, and the models that give one."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kpolicy.budget_models import (
    AscendParallel,
    AscendStack,
    ModelShape,
    ascend_budget,
    ascend_stream_budget,
    cuda_budget,
)
from kpolicy.budgets import Budget, Usage, check_ladder, graphs_per_key, sample_sizes
from kpolicy.errors import BudgetRefused, ConfigError, UnknownNameError
from kpolicy.keys import GraphKey
from kpolicy.modes import Part
from kpolicy.reasons import Reason

BOTH = (Part.FULL, Part.PIECEWISE)
SIZES_TO_512 = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))

# The worked values of the stream formula for 51 sizes; the two rows that leave parallelism to the row before them
# are the 61-layer model's DP4 TP4.
MOE_61 = {"dp": 4, "tp": 4, "ep": True, "aiv": True}
WORKED = [
    (ModelShape(num_layers=28), AscendParallel(aiv=True), 61),
    (ModelShape(num_layers=36), AscendParallel(aiv=True), 47),
    (ModelShape(num_layers=64), AscendParallel(tp=4, aiv=True), 12),
    (ModelShape(num_layers=64), AscendParallel(tp=4), 9),
    (ModelShape(num_layers=48, moe=True), AscendParallel(tp=4, aiv=True), 18),
    (ModelShape(num_layers=48, moe=True), AscendParallel(tp=4, ep=True, aiv=True), 12),
    (ModelShape(num_layers=94, moe=True), AscendParallel(tp=8, ep=True, aiv=True), 6),
    (ModelShape(num_layers=48, moe=True), AscendParallel(dp=2, tp=4, ep=True, aiv=True), 7),
    (ModelShape(num_layers=48, moe=True), AscendParallel(dp=2, tp=4, ep=True), 7),
    (ModelShape(num_layers=61, moe=True), AscendParallel(**MOE_61), 5),
    (ModelShape(num_layers=61, moe=True, draft_layers=1), AscendParallel(**MOE_61), 5),
    (ModelShape(num_layers=61, moe=True, draft_layers=1), AscendParallel(**MOE_61, shared_expert_stream=True), 4),
    (ModelShape(num_layers=61, moe=True), AscendParallel(dp=4, tp=4, ep=True, pcp=2, dcp=2), 4),
    (ModelShape(num_layers=94, moe=True), AscendParallel(tp=8), 6),
]


@pytest.mark.parametrize(("model", "parallel", "num_sizes"), WORKED)
def test_stream_formula_gives_the_worked_values(model: ModelShape, parallel: AscendParallel, num_sizes: int) -> None:
    """The Ascend stream formula admits as many sizes as each row of its table of worked values."""
    assert len(SIZES_TO_512) == 51
    assert ascend_stream_budget(model, parallel, num_sizes=51).num_sizes == num_sizes


def stated_formula(model: ModelShape, parallel: AscendParallel, num_sizes: int, both: bool) -> int:
    """The formula with divisions one after the other, as it is written down."""
    c = max(0, 1800 - num_sizes) if both else 1800
    r = model.num_layers + 1 + (model.draft_layers + 1 if model.draft_layers else 0)
    g = (parallel.dp > 1) + (parallel.tp > 1)
    if not parallel.aiv:
        c -= 100 * (parallel.pcp > 1) + 100 * (parallel.dcp > 1)
        return math.floor((c - 40 * g) / r / (1 + 2 * g))
    f = 1 + g + parallel.ep + parallel.shared_expert_stream + (model.moe and parallel.dp > 1)
    return math.floor((c - (0 if model.moe else f * r)) / r / f)


models = st.builds(ModelShape, num_layers=st.integers(1, 300), moe=st.booleans(), draft_layers=st.integers(0, 5))
ranks = st.sampled_from([1, 2, 16])
parallels = st.builds(
    AscendParallel,
    dp=ranks,
    tp=ranks,
    pcp=ranks,
    dcp=ranks,
    ep=st.booleans(),
    aiv=st.booleans(),
    shared_expert_stream=st.booleans(),
)


@given(models, parallels, st.integers(0, 2500), st.booleans())
def test_stream_budget_is_the_formula(model: ModelShape, parallel: AscendParallel, num_sizes: int, both: bool) -> None:
    """For any inputs the number of sizes is the formula's, and the stream budget admits these and not one more."""
    parts = BOTH if both else (Part.PIECEWISE,)
    found = ascend_stream_budget(model, parallel, num_sizes=num_sizes, parts=parts)
    assert found.num_sizes == stated_formula(model, parallel, num_sizes, both)
    used = Usage(streams=min(num_sizes, 1800) if both else 0)
    for _ in range(max(0, found.num_sizes)):
        assert found.budget.refuses(used, found.piecewise) is None
        used += found.piecewise
    assert found.budget.refuses(used, found.piecewise) is Reason.BUDGET_STREAMS


def test_stream_formula_leaves_full_graphs_alone() -> None:
    """The formula never ran without PIECEWISE graphs, so FULL alone is unbounded."""
    found = ascend_stream_budget(ModelShape(num_layers=94), AscendParallel(), parts=(Part.FULL,))
    assert (found.budget, found.num_sizes) == (Budget(), None)
    assert found.keep(SIZES_TO_512) == SIZES_TO_512


def test_sampling_reproduces_a_users_report() -> None:
    """Six of the 67 sizes 1, 2, 4, 8, 16, ... 512 are those that a user of 94 layers on 8 cards was left with."""
    sizes = (1, 2, 4, *range(8, 513, 8))
    found = ascend_stream_budget(ModelShape(num_layers=94, moe=True), AscendParallel(tp=8), num_sizes=len(sizes))
    assert found.keep(sizes) == (1, 88, 192, 304, 408, 512)


@given(st.sets(st.integers(1, 4096), min_size=1, max_size=80), st.integers(-3, 100))
def test_sampled_sizes_are_evenly_many(sizes: set[int], number: int) -> None:
    """Sampling keeps exactly the asked number of distinct sizes in order, with the first and last; at 1 the largest."""
    ordered = tuple(sorted(sizes))
    kept = sample_sizes(ordered, number)
    assert len(kept) == max(1, min(number, len(ordered)))
    assert list(kept) == sorted(set(kept))
    assert set(kept) <= sizes
    assert kept[-1] == ordered[-1]
    if len(kept) > 1:
        assert kept[0] == ordered[0]


LIFTED = [("A3", "25.5.1", "8.5.0", 32_000), ("950", "26.0", "9.1.RC1", 64_000), ("a5", "25.5.1", "8.5", 64_000)]


@pytest.mark.parametrize(("soc", "hdk", "cann", "graphs"), LIFTED)
def test_newer_stacks_allow_many_graphs(soc: str, hdk: str, cann: str, graphs: int) -> None:
    """HDK 25.5.1 and CANN 8.5.0 or newer lift the ceiling to about 32K graphs on A3 and 64K on 950."""
    stack = AscendStack(soc=soc, hdk=hdk, cann=cann)
    found = ascend_budget(stack, ModelShape(num_layers=61), AscendParallel(tp=4))
    assert found.budget == Budget(graphs=graphs)
    assert found.piecewise.graphs == 62
    assert "unverified on hardware" in found.source


OLD = [
    ("A3", "25.5.0", "8.5.0"),
    ("A3", "25.5.1", "8.2.RC1"),
    ("A3", "25.5.1", "8.5.0.RC1"),
    ("A3", "25.5.1", "8.5.RC2"),
    ("A3", None, "8.5.0"),
    ("A3", "25.5.1", None),
    ("A2", "25.5.1", "8.5.0"),
]


@pytest.mark.parametrize(("soc", "hdk", "cann"), OLD)
def test_older_or_unknown_stacks_keep_the_formula(soc: str, hdk: str | None, cann: str | None) -> None:
    """Any older, unknown or candidate version, and every A2, is held to the stream formula."""
    model, parallel = ModelShape(num_layers=64), AscendParallel(tp=4)
    found = ascend_budget(AscendStack(soc=soc, hdk=hdk, cann=cann), model, parallel)
    assert found == ascend_stream_budget(model, parallel)
    assert "unverified on hardware" in found.source


def test_piecewise_on_950_is_sampled_to_four() -> None:
    """On 950 PIECEWISE sizes are sampled to four, or fewer where the formula has fewer; FULL alone isn't touched."""
    model = ModelShape(num_layers=94, moe=True)
    new = AscendStack(soc="950", hdk="25.5.1", cann="8.5.0")
    assert ascend_budget(new, model, AscendParallel()).keep((1, 2, 4, 8, 16, 24, 32)) == (1, 4, 16, 32)
    assert ascend_budget(new, model, AscendParallel(), parts=(Part.FULL,)).num_sizes is None
    crowded = AscendParallel(dp=4, tp=4)
    assert ascend_budget(AscendStack(soc="950"), model, crowded).num_sizes == 3


def test_unknown_ascend_devices_and_versions_are_named() -> None:
    """A device generation or version that can't be is an error that says what can."""
    with pytest.raises(UnknownNameError, match="A3"):
        AscendStack(soc="A9")
    with pytest.raises(ConfigError, match=r"cann is 'latest'"):
        AscendStack(soc="A3", cann="latest")
    with pytest.raises(ConfigError, match="tp is 0"):
        AscendParallel(tp=0)
    with pytest.raises(ConfigError, match="num_layers is 0"):
        ModelShape(num_layers=0)


def test_a_piecewise_key_takes_a_graph_a_piece() -> None:
    """FULL is one device graph; PIECEWISE is one more than there are layers."""
    assert graphs_per_key(GraphKey(Part.FULL, 8, 8, query_len=1), 32) == 1
    assert graphs_per_key(GraphKey(Part.PIECEWISE, 8), 32) == 33
    with pytest.raises(ConfigError, match="num_layers is 0"):
        graphs_per_key(GraphKey(Part.PIECEWISE, 8), 0)


usages = st.builds(Usage, *[st.integers(0, 50)] * 3, st.integers(0, 50).map(float))
limits = st.none() | st.integers(0, 80)
budgets = st.builds(Budget, limits, limits, limits, limits)
FIELDS = {
    "graphs": Reason.BUDGET_GRAPHS,
    "streams": Reason.BUDGET_STREAMS,
    "bytes": Reason.BUDGET_BYTES,
    "seconds": Reason.BUDGET_SECONDS,
}


@given(budgets, usages, usages)
def test_a_refusal_names_a_budget_that_is_passed(budget: Budget, used: Usage, asked: Usage) -> None:
    """A refusal names a resource that is asked for and would pass its limit; without one no such resource exists."""
    passed = {
        reason
        for name, reason in FIELDS.items()
        if getattr(budget, name) is not None
        and getattr(asked, name)
        and getattr(used, name) + getattr(asked, name) > getattr(budget, name)
    }
    reason = budget.refuses(used, asked)
    assert reason in passed if passed else reason is None


def test_a_refusal_says_used_limit_and_asked() -> None:
    """The message of a refusal holds what is used, the limit and what was asked for."""
    with pytest.raises(BudgetRefused, match=r"asks for 12\.0 MiB, and 100\.0 MiB of the 104\.0 MiB") as caught:
        Budget(bytes=104 << 20).check("a graph", Usage(bytes=100 << 20), Usage(bytes=12 << 20))
    assert caught.value.reason is Reason.BUDGET_BYTES


def test_amounts_are_said_as_people_write_them() -> None:
    """One is singular, bytes are in MiB from there up, and seconds keep two digits however few they are."""
    assert str(Budget(graphs=1, streams=2, bytes=1, seconds=1.5)) == "1 graph, 2 streams, 1 byte, 1.50 capture seconds"
    assert str(Budget(streams=1, bytes=3 << 19, seconds=0.00012)) == "1 stream, 1.5 MiB, 0.00012 capture seconds"
    assert str(Budget(graphs=0, seconds=0)) == "0 graphs, 0.00 capture seconds"


BAD_AMOUNTS = [("graphs", -1), ("streams", 1.5), ("bytes", True), ("seconds", math.nan), ("seconds", math.inf)]


@pytest.mark.parametrize(("name", "value"), BAD_AMOUNTS)
def test_impossible_amounts_are_refused(name: str, value: float) -> None:
    """A usage or limit that is negative, not whole where it must be, or not finite is named in an error."""
    for kind in (Usage, Budget):
        with pytest.raises(ConfigError, match=name):
            kind(**{name: value})


def test_cuda_is_bounded_by_memory_alone() -> None:
    """The CUDA budget is a share of free memory, and costs are those given for each part."""
    found = cuda_budget(10 << 30, 0.25, graph_bytes=(6 << 20, 12 << 20), capture_us=(1e5, 4e5))
    assert found.budget == Budget(bytes=(10 << 30) // 4)
    assert found.cost_of(GraphKey(Part.FULL, 8)) == Usage(1, 1, 6 << 20, 0.1)
    assert found.cost_of(GraphKey(Part.PIECEWISE, 8)) == Usage(1, 1, 12 << 20, 0.4)
    for share in (0.0, 1.5, math.nan):
        with pytest.raises(ConfigError, match="share"):
            cuda_budget(1, share)


def test_a_ladder_over_its_budget_says_what_to_keep() -> None:
    """The error of a ladder that is too dear names how many keys fit and the sizes to keep, and these do fit."""
    keys = [GraphKey(Part.PIECEWISE, size) for size in SIZES_TO_512]
    model = ascend_stream_budget(ModelShape(num_layers=94, moe=True), AscendParallel(tp=8))
    with pytest.raises(BudgetRefused, match=r"51 graph keys .* 6 fit") as caught:
        check_ladder(keys, model.budget, model.cost_of)
    assert caught.value.reason is Reason.BUDGET_STREAMS
    kept = model.keep(SIZES_TO_512)
    assert f"Keep the sizes {','.join(map(str, kept))}," in str(caught.value)
    needed = check_ladder([GraphKey(Part.PIECEWISE, size) for size in kept], model.budget, model.cost_of)
    assert needed == Usage(6 * 95, 6 * 95 * 3)


def test_a_budget_for_nothing_says_so() -> None:
    """Where not even one size fits, the error says that instead of naming sizes."""
    with pytest.raises(BudgetRefused, match="not even its largest size fits"):
        check_ladder([GraphKey(Part.FULL, 8), GraphKey(Part.FULL, 16)], Budget(graphs=0), lambda _: Usage(1))


@given(budgets, st.sets(st.integers(1, 60), max_size=12), usages)
def test_a_ladder_is_admitted_exactly_when_its_sum_is(budget: Budget, sizes: set[int], each: Usage) -> None:
    """`check_ladder` gives the sum of the costs where every budget holds it, and raises otherwise."""
    keys = [GraphKey(Part.FULL, size) for size in sizes]
    sums = {name: getattr(each, name) * len(keys) for name in FIELDS}
    fits = all(getattr(budget, name) is None or not sums[name] or sums[name] <= getattr(budget, name) for name in sums)
    if fits:
        assert check_ladder(keys, budget, lambda _: each) == Usage(**sums)
    else:
        with pytest.raises(BudgetRefused):
            check_ladder(keys, budget, lambda _: each)


@pytest.mark.parametrize("parts", ["piecewise", (), ("pieces",)])
def test_what_is_captured_is_parts(parts: Any) -> None:
    """Of a name's letters none is a part: PIECEWISE would be unbounded."""
    with pytest.raises(ConfigError, match=r"parts is .*; give what is captured"):
        ascend_stream_budget(ModelShape(num_layers=4), AscendParallel(), parts=parts)


def test_layers_and_ranks_are_whole_numbers() -> None:
    """Half a layer made half a stream; a text was Python's own error."""
    for wrong in (1.5, "3"):
        with pytest.raises(ConfigError, match=r"num_layers is .*whole number"):
            ModelShape(num_layers=wrong)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"tp is .*whole number"):
            AscendParallel(tp=wrong)  # type: ignore[arg-type]
    for share in ("0.1", None, [1], True):
        with pytest.raises(ConfigError, match=r"share is .*; it is the part of free memory"):
            cuda_budget(1, share)  # type: ignore[arg-type]
