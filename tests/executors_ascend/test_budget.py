"""Streams that run out: graphs are planned anew to what fits, the best sizes stay, and serving goes on."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import attrs
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("numpy")

from kpolicy.attention.support import Claims  # noqa: E402
from kpolicy.budget_models import AscendParallel, AscendStack, ModelShape, ascend_budget  # noqa: E402
from kpolicy.budgets import Budget, Usage  # noqa: E402
from kpolicy.costs import analytic_costs  # noqa: E402
from kpolicy.engine import Engine  # noqa: E402
from kpolicy.errors import ConfigError  # noqa: E402
from kpolicy.executors.ascend import AscendExecutor  # noqa: E402
from kpolicy.executors.ascend.replan import fitting, kinds_of, ladders_of  # noqa: E402
from kpolicy.keys import GraphKey  # noqa: E402
from kpolicy.ladders import CaptureSizes, plan_keys  # noqa: E402
from kpolicy.modes import Mode, Part  # noqa: E402
from kpolicy.reasons import Reason  # noqa: E402
from kpolicy.registry import GraphRegistry, GraphState  # noqa: E402
from kpolicy.settings import Settings  # noqa: E402
from kpolicy.testing import Sequences  # noqa: E402
from tests.executors_ascend.helpers import on_ascend  # noqa: E402
from tests.executors_launcher.checker import BLOCK_SIZE, NUM_BLOCKS, load_family  # noqa: E402
from tests.fakes.device import Device  # noqa: E402
from tests.fakes.torch_npu import NO_STREAMS, OLD_DRIVER, fake_torch_npu  # noqa: E402

LIMITS = Settings(max_num_reqs=8, max_num_tokens=32)
KEYS = plan_keys(CaptureSizes((1, 2, 4, 8), (8, 16, 32), (4, 8, 16, 32)), Claims.at_level("mixed"), LIMITS)
OLD = AscendStack(soc="A3", hdk="24.1.0", cann="8.2.RC1")
NEW = AscendStack(soc="A3", hdk="25.5.1", cann="8.5.0")


def device(streams: int, **options: Any) -> tuple[Any, Any]:
    return on_ascend(load_family("llama"), fake_torch_npu(Device(streams), **options))


def test_any_number_of_streams_is_enough_to_serve() -> None:
    """From none to plenty: what is captured fits, each key has its state and reason, and a step runs."""
    captured = []
    for streams in (0, 1, 2, 5, 13, 40):
        model, library = device(streams)
        engine = Engine("auto", executor=AscendExecutor(model, library=library), settings=LIMITS, calibrate=0)
        engine.capture()
        executor: Any = engine.executor
        keys = set(engine.registry.captured())
        captured.append(len(keys))
        assert library.chip.taken <= streams
        assert library.chip.taken == sum(executor.units.cost_of(key).streams for key in keys)
        for record in engine.registry.records():
            assert record.state is not GraphState.PLANNED
            assert (record.reason is Reason.CAPTURE_OUT_OF_STREAMS) == (record.key not in keys)
        sequences = Sequences(1, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, vocab=128)
        rows = [sequences.chunk(sequences.start(), 6)]
        assert torch.isfinite(engine.step(sequences.inputs(rows)).outputs[0]).all()
        engine.release()
        assert library.chip.taken == 0
    assert captured[0] == 0
    assert captured[-1] > captured[3] > 0


@pytest.mark.parametrize("error", [NO_STREAMS, OLD_DRIVER])
def test_a_replan_says_what_it_kept(error: str) -> None:
    """What was given up is in the executor's account, with the device's words and what to do about them."""
    model, library = device(14, error=error)
    executor, registry = AscendExecutor(model, library=library), GraphRegistry()
    registry.plan(KEYS)
    executor.open(registry)
    told: list[GraphKey] = []
    executor.capture(KEYS, lambda key, _: told.append(key))
    assert executor.replans
    last = executor.replans[-1]
    assert set(last.kept) == set(registry.captured())
    assert set(last.kept) | set(last.dropped) == set(KEYS) == set(told)
    assert last.limit <= 14
    assert ("driver" in executor.replans[0].why) == (error is OLD_DRIVER)
    # What was found out stays: asking again captures nothing more, and tries no key in vain.
    taken, rounds = library.chip.taken, len(executor.replans)
    executor.capture([key for key in KEYS if key not in last.kept])
    assert (library.chip.taken, len(executor.replans)) == (taken, rounds)


def test_streams_taken_by_another_process_are_found_late() -> None:
    """Streams that go between one round and the next cost further rounds, not the run."""
    model, library = device(20)
    chip = library.chip
    executor, registry = AscendExecutor(model, library=library), GraphRegistry()
    registry.plan(KEYS)
    executor.open(registry)
    give_back = executor._release_pools

    def robbed() -> None:
        give_back()
        chip.streams = max(5, chip.streams - 6)

    executor._release_pools = robbed  # type: ignore[method-assign]
    executor.capture(KEYS)
    assert len(executor.replans) > 1
    assert 0 < chip.taken <= 5
    limits = [each.limit for each in executor.replans]
    assert limits == sorted(set(limits), reverse=True)


def test_a_key_that_fails_for_another_reason_is_not_tried_again() -> None:
    """Only a lack of streams is planned around."""
    model, library = device(1000)
    executor, registry = AscendExecutor(model, library=library, faults=["capture_fails@1"]), GraphRegistry()
    registry.plan(KEYS)
    executor.open(registry)
    executor.capture(KEYS)
    assert not executor.replans
    failed = [record for record in registry.records() if record.state is GraphState.FAILED]
    assert [record.reason for record in failed] == [Reason.CAPTURE_FAILED]


def test_the_stack_is_found_out_and_can_be_given() -> None:
    """Chip, driver and toolkit come from torch_npu; each can be overridden, and so can the whole budget."""
    model, library = device(1000, soc="Ascend910B3", versions={"CANN": "8.2.RC1", "DRIVER": "24.1.rc3"})
    assert AscendExecutor(model, library=library).stack == AscendStack(soc="A2", hdk="24.1.rc3", cann="8.2.RC1")
    model, library = device(1000, soc="Ascend950PR_9599")
    assert AscendExecutor(model, library=library).stack.soc == "950"
    model, library = device(1000)
    assert AscendExecutor(model, library=library).units.budget == Budget(graphs=32_000)
    executor = AscendExecutor(model, library=library, stack=OLD, shape=ModelShape(num_layers=61))
    assert executor.units.budget.streams is not None
    own = attrs.evolve(executor.units, name="own", budget=Budget(graphs=3))
    assert AscendExecutor(model, library=library, budget=own).units is own
    assert AscendExecutor(model, library=library, budget=None, stack=OLD).units.budget == Budget()
    with pytest.raises(ConfigError, match="budget is 'none'"):
        AscendExecutor(model, library=library, budget="none")


def test_ascend_950_captures_four_piecewise_sizes() -> None:
    """The device's own bound on sizes: four, chosen by what steps take, not by their place in the list."""
    model, library = device(100_000, soc="Ascend950")
    executor, registry = AscendExecutor(model, library=library), GraphRegistry()
    keys = plan_keys(CaptureSizes((4,), (), (1, 2, 4, 8, 12, 16, 24, 32)), Claims.at_level("uniform"), LIMITS)
    registry.plan(keys)
    executor.open(registry)
    executor.capture(keys)
    pieces = sorted(key.num_tokens for key in registry.captured() if key.part is Part.PIECEWISE)
    assert len(pieces) == 4
    assert pieces[-1] == 32
    dropped = [registry.record(key) for key in keys if key.part is Part.PIECEWISE and key.num_tokens not in pieces]
    assert {record.reason for record in dropped} == {Reason.BUDGET_STREAMS}


SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
PLANNED = plan_keys(CaptureSizes(SIZES, (), SIZES), Claims.at_level("uniform"), Settings(max_num_reqs=512))
UNITS = ascend_budget(
    OLD, ModelShape(num_layers=48, moe=True), AscendParallel(tp=4, aiv=True), num_sizes=0, parts=tuple(Part)
)
UNITS = attrs.evolve(UNITS, num_sizes=None)


def _best_times(ladder: Any) -> list[float]:
    """The least time with exactly so many sizes, worked out anew: sizes in order, each the last but for one."""
    sizes, demands = ladder.sizes.tolist(), ladder.demands.tolist()
    ends = [bisect_left(demands, size + 1) for size in sizes]
    sums = [[0.0, *ladder.cost_us[i, :end].cumsum().tolist()] for i, end in enumerate(ends)]
    escape = [0.0, *ladder.escape_us.cumsum().tolist()]
    best = [escape[-1]]
    layer = [sums[i][ends[i]] for i in range(len(sizes))]
    while True:
        best.append(min(us + escape[-1] - escape[end] for us, end in zip(layer, ends, strict=True)))
        if len(best) == len(sizes) + 1:
            return best
        layer = [
            min((layer[j] + sums[i][ends[i]] - sums[i][ends[j]] for j in range(i)), default=float("inf"))
            for i in range(len(sizes))
        ]  # fmt: skip


def optima(ladders: list[Any]) -> Callable[[int], float]:
    """The exact optimum of two ladders under a number of streams."""
    times = [_best_times(each) for each in ladders]
    prices = [each.usage_of(0).streams for each in ladders]
    cheap, dear = sorted(range(2), key=lambda i: prices[i])

    def best(streams: int) -> float:
        return float(min(
            us + min(times[cheap][: max(0, streams - count * prices[dear]) // prices[cheap] + 1])
            for count, us in enumerate(times[dear]) if count * prices[dear] <= streams
        ))  # fmt: skip

    return best


def test_replanning_under_any_number_of_streams_fits_and_is_the_optimum() -> None:
    """From 1 to 2,048 streams: what is kept fits, and its expected time within 1% of an optimum found otherwise.

    `benchmarks/npu_streams.py` looks at every number in between.
    """
    costs, kinds = analytic_costs(), kinds_of(PLANNED)
    ladders = ladders_of(kinds, UNITS, costs, None)
    best = optima(ladders)
    for streams in [*range(1, 130, 3), *range(130, 2049, 61), 2048]:
        kept = fitting(PLANNED, Budget(streams=streams), UNITS, costs)
        used = sum((UNITS.cost_of(key) for key in kept), Usage())
        assert used.streams <= streams
        held = kinds_of(kept)
        mine = sum(each.time_us(sorted(held.get(kind, {}))) for kind, each in zip(kinds, ladders, strict=True))
        assert mine <= best(streams) * 1.01
        assert mine >= best(streams) * (1 - 1e-9)


def test_a_histogram_of_steps_moves_the_choice() -> None:
    """Where steps are known to be large, the sizes that are kept pad those least."""
    costs = analytic_costs()

    def large(key: GraphKey, tokens: int) -> float:
        return 1.0 if tokens > 300 and key.part is Part.FULL else 0.0

    evenly, known = (fitting(PLANNED, Budget(streams=4), UNITS, costs, demand) for demand in (None, large))
    kinds = kinds_of(PLANNED)
    ladders = ladders_of(kinds, UNITS, costs, large)

    def time_us(kept: tuple[GraphKey, ...]) -> float:
        held = kinds_of(kept)
        return sum(each.time_us(sorted(held.get(kind, {}))) for kind, each in zip(kinds, ladders, strict=True))

    assert known != evenly
    assert time_us(known) < time_us(evenly)


def test_mixed_graphs_are_priced_by_their_own_curve() -> None:
    """Where FULL graphs of prompts take longer than decode graphs, their ladder has that; the others' hasn't."""
    costs = analytic_costs()
    slow = attrs.evolve(costs, mixed=attrs.evolve(costs.full, us=[3 * us for us in costs.full.us]))
    settings = Settings(max_num_reqs=512)
    planned = plan_keys(CaptureSizes(SIZES, SIZES, ()), Claims.at_level("mixed"), settings)
    kinds = kinds_of(planned)
    plain, priced = (
        {by_size[max(by_size)][0].decode_only: ladder for by_size, ladder in
         zip(kinds.values(), ladders_of(kinds, UNITS, table, None), strict=True)}
        for table in (costs, slow)
    )  # fmt: skip
    assert set(plain) == {True, False}
    times = {of: [each.time_us(SIZES) for each in (plain[of], priced[of])] for of in plain}
    assert times[True][0] == times[True][1]
    assert times[False][1] > 1.5 * times[False][0]


def test_an_old_stack_keeps_what_the_formula_allows() -> None:
    """The stream formula is obeyed before anything is captured, so nothing fails."""
    model, library = device(100_000)
    shape = ModelShape(num_layers=600)
    executor, registry = AscendExecutor(model, library=library, stack=OLD, shape=shape), GraphRegistry()
    registry.plan(KEYS)
    executor.open(registry)
    executor.capture(KEYS)
    captured = registry.captured()
    used = sum((executor.units.cost_of(key) for key in captured), Usage())
    assert 0 < used.streams <= (executor.units.budget.streams or 0)
    assert not executor.replans
    assert len(captured) < len(KEYS)
    withdrawn = {record.reason for record in registry.records() if record.state is GraphState.WITHDRAWN}
    assert withdrawn == {Reason.BUDGET_STREAMS}


@pytest.mark.parametrize(("streams", "modes"), [(0, {Mode.EAGER}), (3, {Mode.FULL})])
def test_serving_goes_on_in_the_modes_that_are_left(streams: int, modes: set[Mode]) -> None:
    """With streams for a few graphs steps replay those, with none they run eagerly; each says why."""
    model, library = device(streams)
    engine = Engine("full_and_piecewise", executor=AscendExecutor(model, library=library), settings=LIMITS, calibrate=0)
    engine.capture()
    sequences = Sequences(3, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, vocab=128)
    seen = set()
    for _ in range(20):
        rows = sequences.random_rows(6, 30, 1)
        outputs = engine.step(sequences.inputs(rows))
        seen.add(outputs.decision.mode)
        wanted = Reason.GRAPH_WITHDRAWN if not streams else Reason.GRAPH_FITS
        assert outputs.decision.reason is wanted
        sequences.advance(rows)
    assert seen == modes


def test_a_graph_that_failed_is_captured_again() -> None:
    """Its key was withdrawn when its replay failed; asked for again it is tried again, and counts among what fits."""
    model, library = device(10_000)
    executor, registry = AscendExecutor(model, library=library), GraphRegistry()
    registry.plan(KEYS)
    executor.open(registry)
    executor.capture(KEYS)
    failed = KEYS[0]
    registry.withdraw(failed, Reason.REPLAY_FAILED)
    executor.capture([failed])
    assert failed in registry.captured()
    assert not executor.replans


def test_graphs_that_failed_count_among_what_the_device_held() -> None:
    """They keep their streams until their pool goes, so they tell how many there are."""
    model, library = device(40)
    executor, registry = AscendExecutor(model, library=library, budget=None), GraphRegistry()
    registry.plan(KEYS)
    executor.open(registry)
    executor.capture([KEYS[0], KEYS[1]])
    for key in KEYS[:2]:
        registry.withdraw(key, Reason.REPLAY_FAILED)
    library.chip.streams = library.chip.taken
    executor.capture([KEYS[2]])
    assert executor.replans[0].limit == 2
    assert KEYS[2] in registry.captured()
