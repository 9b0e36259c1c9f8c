"""`Engine`: decides with and without an executor, says what it assumes, and follows the registry."""

from __future__ import annotations

from threading import Thread
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as run_settings
from hypothesis import strategies as st

from kpolicy.attention import Claims
from kpolicy.attention.support import AttentionSupport, parse_attention
from kpolicy.budgets import Budget
from kpolicy.costs import HostCost, analytic_costs
from kpolicy.engine import Engine
from kpolicy.errors import (
    BudgetRefused,
    ConfigError,
    LadderError,
    NoLegalModeError,
    ShapeError,
    SupportError,
    UnknownNameError,
)
from kpolicy.executors.simulated import SimulatedExecutor
from kpolicy.ladders import CaptureSizes
from kpolicy.modes import Mode
from kpolicy.policies import OWN, PolicyContext
from kpolicy.policies.auto import AutoPolicy
from kpolicy.policies.auto_tables import AutoTables
from kpolicy.reasons import Basis, Reason
from kpolicy.registry import GraphRegistry, GraphState
from kpolicy.settings import Objective, Settings
from kpolicy.shapes import BatchShape
from kpolicy.testing.ranks import ThreadCommunicator, ThreadWorld
from kpolicy.testing.sequences import Sequences
from kpolicy.testing.strategies import cost_tables, shapes

LIMITS = Settings(max_num_reqs=8, max_num_tokens=64)
SIZES = CaptureSizes((1, 2, 4, 8), (16, 64), (8, 64))


def simulated(policy: str = "full_and_piecewise", **arguments: Any) -> Engine:
    executor = arguments.pop("executor", None) or SimulatedExecutor(num_blocks=64)
    engine = Engine(policy, ladder=SIZES, settings=LIMITS, executor=executor, **arguments)
    engine.capture()
    return engine


@pytest.mark.parametrize("policy", OWN)
def test_an_engine_without_a_model_says_what_it_assumes(policy: str) -> None:
    """Each policy decides without an executor, and the decision names the assumed ladder and support."""
    engine = Engine(policy)
    decision = engine.decide(BatchShape.decode(32, 32_000))
    assert Basis.LADDER_ASSUMED | Basis.SUPPORT_ASSUMED in decision.basis
    assert "assuming the planned ladder captured" in decision.why
    assert "the stated attention support" in decision.why
    assert (Basis.COSTS_ANALYTIC in decision.basis) == engine.policy.reads_costs
    assert engine.stats.basis == decision.basis


@pytest.mark.parametrize("num_drafts", [1, 3])
@pytest.mark.parametrize("policy", OWN)
def test_every_policys_own_sizes_go_with_drafts(policy: str, num_drafts: int) -> None:
    """Nobody gave them, so nobody is told to change them."""
    engine = Engine(policy, settings=Settings(num_speculative_tokens=num_drafts))
    assert bool(engine.keys) == (policy != "eager")


def test_measured_costs_are_not_called_analytic() -> None:
    """With measured costs neither the reason nor the basis speaks of the analytic table."""
    import attrs

    measured = attrs.evolve(analytic_costs(), measured=True, version="mine")
    decision = Engine(costs=measured).decide(BatchShape.decode(4))
    assert decision.reason is Reason.CHEAPEST_MEASURED
    assert Basis.COSTS_ANALYTIC not in decision.basis
    assert decision.costs_version == "mine"


def test_an_engine_with_captured_graphs_assumes_nothing_of_them() -> None:
    """With an executor the ladder is what was captured, and nothing before that."""
    engine = Engine("full_and_piecewise", ladder=SIZES, settings=LIMITS, executor=SimulatedExecutor(num_blocks=8))
    before = engine.decide(BatchShape.decode(3))
    assert (before.mode, before.reason) == (Mode.EAGER, Reason.NO_GRAPHS)
    engine.capture()
    after = engine.decide(BatchShape.decode(3))
    assert (after.mode, after.basis) == (Mode.FULL, Basis.NOTHING)
    assert after.launches[0].key.num_tokens == 4


@pytest.mark.parametrize("policy", ["auto", "full_and_piecewise", "split", "full", "piecewise", "vllm"])
@given(shape=shapes(), data=st.data())
@run_settings(max_examples=60, deadline=None)
def test_every_door_gives_the_same_decision(policy: str, shape: BatchShape, data: st.DataObject) -> None:
    """`decide`, `select`, `explain` and the policy's own `decide` agree on every batch."""
    costs = data.draw(cost_tables())
    engine = Engine(policy, attention="uniform", ladder=SIZES, settings=LIMITS, costs=costs, objective="0.6:0.4")
    decision = engine.decide(shape)
    assert decision == engine.select(*shape.numbers)
    assert decision == engine.explain(shape).decision
    assert decision == engine.policy.decide(shape, engine.context)


def test_a_withdrawn_graph_is_not_decided_for_again() -> None:
    """When a key is withdrawn the policy is compiled anew, and the batch pads further or says why it doesn't replay."""
    engine = simulated("full")
    four = engine.decide(BatchShape.decode(4)).launches[0].key
    compiled = engine.compiled
    assert engine.compiled is compiled
    engine.registry.withdraw(four, Reason.REPLAY_FAILED)
    assert engine.compiled is not compiled
    assert engine.decide(BatchShape.decode(4)).launches[0].key.num_tokens == 8
    for key in engine.registry.captured():
        engine.registry.withdraw(key, Reason.REPLAY_FAILED)
    decision = engine.decide(BatchShape.decode(4))
    assert (decision.mode, decision.reason) == (Mode.EAGER, Reason.GRAPH_WITHDRAWN)


def test_engines_that_share_a_registry_see_the_same_graphs() -> None:
    """What one Engine captures or loses, the other decides with or without."""
    registry, executor = GraphRegistry(), SimulatedExecutor(num_blocks=64)
    first = simulated("full_and_piecewise", registry=registry, executor=executor)
    second = Engine("full", ladder=SIZES, settings=LIMITS, registry=registry, executor=executor)
    assert second.decide(BatchShape.decode(2)).mode is Mode.FULL
    inputs = one_step()
    assert second.step(inputs).outputs == first.step(inputs).outputs
    for record in registry.records():
        registry.withdraw(record.key, Reason.REPLAY_FAILED)
    assert first.decide(BatchShape.decode(2)).mode is second.decide(BatchShape.decode(2)).mode is Mode.EAGER


def test_an_engine_decides_among_its_own_policys_graphs() -> None:
    """A replica of a rule whose list ends at 512 tokens doesn't replay a larger graph that another Engine captured."""
    limits = Settings(max_num_reqs=256, max_num_tokens=2048)
    registry, executor = GraphRegistry(), SimulatedExecutor(num_blocks=64)
    shared: dict[str, Any] = {"settings": limits, "attention": "mixed", "registry": registry, "executor": executor}
    vllm = Engine("vllm", **shared)
    alone = Engine("vllm", **{**shared, "registry": GraphRegistry(), "executor": None})
    auto = Engine("auto", ladder=CaptureSizes((64,), (64, 1024), (1024, 2048)), **shared)
    vllm.capture()
    auto.capture()
    prompts = [BatchShape(prefills=[(tokens, 0)]) for tokens in (30, 300, 512, 700, 1000, 2000)]
    mixed = [BatchShape(decodes=[(1, 8)], prefills=[(tokens, 0)]) for tokens in (30, 300, 504, 700, 1000, 2000)]
    every = [*prompts, *mixed, *(BatchShape.decode(rows) for rows in (1, 7, 60, 64, 200))]
    for shape in every:
        assert vllm.decide(shape).launches == alone.decide(shape).launches
    assert vllm.decide(prompts[-1]).mode is Mode.EAGER
    # Nor does `auto` have the replica's sizes.
    launches = [launch for shape in [*prompts, *mixed] for launch in auto.decide(shape).launches]
    assert {each.key.num_tokens for each in launches if each.key is not None} <= {64, 1024, 2048}
    only_planned = Engine("vllm", **{**shared, "executor": None})
    assert only_planned.decide(prompts[-1]).mode is Mode.EAGER
    assert only_planned.context.ladder.assumed
    # Nor do another one's losses show in its reasons.
    for key in set(registry.captured()) - set(vllm.keys):
        registry.withdraw(key, Reason.REPLAY_FAILED)
    assert [vllm.decide(each).reason for each in every] == [alone.decide(each).reason for each in every]
    assert vllm.decide(prompts[-1]).reason is Reason.ABOVE_LARGEST_SIZE
    assert auto.context.ladder.withdrawn
    assert not vllm.context.ladder.withdrawn


def test_a_lazy_engine_captures_its_own_policys_graphs() -> None:
    """What another Engine of the registry planned isn't what its own steps need."""
    limits = Settings(max_num_reqs=256, max_num_tokens=2048)
    registry, executor = GraphRegistry(), SimulatedExecutor(num_blocks=64)
    shared: dict[str, Any] = {"settings": limits, "attention": "mixed", "registry": registry, "executor": executor}
    Engine("auto", ladder=CaptureSizes((64,), (64, 1024), (1024, 2048)), **shared)
    lazy = Engine("vllm", lazy=True, **shared)
    assert lazy._lazy is not None
    small, large = BatchShape(prefills=[(30, 0)]), BatchShape(prefills=[(700, 0)])
    for shape in (small, large, large, small, large, small):
        assert lazy.decide(shape).mode is Mode.EAGER
        lazy._lazy.before_step(shape.numbers)
    lazy.capture_pending(10.0)
    assert registry.captured()
    assert set(registry.captured()) <= set(lazy.keys)
    assert lazy.decide(small).mode is not Mode.EAGER


def test_graphs_of_another_executor_are_not_replayed() -> None:
    """An Engine whose registry holds another executor's graphs too decides with its own executor's only."""
    registry = GraphRegistry()
    simulated(registry=registry)
    other = Engine("full", ladder=SIZES, settings=LIMITS, registry=registry, executor=SimulatedExecutor(num_blocks=64))
    assert other.step(one_step()).decision.mode is Mode.EAGER


def one_step() -> Any:
    sequences = Sequences(1)
    row = sequences.chunk(sequences.start(), 5)
    return sequences.inputs([row])


def test_a_step_is_counted_with_its_time_and_hits() -> None:
    """A step counts once, with its tokens, padding and time; its graph counts a hit."""
    engine = simulated()
    outputs = engine.step(one_step())
    assert engine.stats.total.steps == 1
    assert engine.stats.total.tokens == 5
    assert engine.stats.total.us == outputs.cycle_us > 0
    key = outputs.decision.launches[0].key
    assert engine.stats.total.padding == key.num_tokens - 5
    assert engine.registry.record(key).hits == 1


def test_capturing_twice_captures_nothing_twice() -> None:
    """A second `capture` leaves captured graphs alone."""
    engine = simulated()
    told: list[Any] = []
    engine.capture(lambda key, _report: told.append(key))
    assert not told
    engine.release()
    assert not engine.registry.captured()
    engine.capture(lambda key, _report: told.append(key))
    assert sorted(map(str, told)) == sorted(map(str, engine.keys))


def test_an_engine_that_only_decides_names_what_is_missing() -> None:
    """`capture` and `step` without an executor say how to get one; `release` has nothing to do."""
    engine = Engine()
    for call in (engine.capture, lambda: engine.step(one_step())):
        with pytest.raises(ConfigError, match="executor='simulated'"):
            call()
    engine.release()


def test_downgrades_are_values_with_reasons() -> None:
    """What attention takes back is listed, and with `strict` it is an error that names the limit."""
    engine = Engine("full", attention="mla")
    (downgrade,) = engine.downgrades
    assert (downgrade.batches, downgrade.asked, downgrade.resolved) == ("batches with prefill", "full", "eager")
    assert downgrade.reason is Reason.SUPPORT_UNIFORM_ONLY
    with pytest.raises(SupportError, match=r"strict.*uniform decode batches only.*mla"):
        Engine("full", attention="mla", strict=True)
    assert Engine("piecewise", attention="mla", strict=True).downgrades == ()


@pytest.mark.parametrize("attention", ["gqa", Claims.at_level("mixed"), parse_attention("gqa")])
def test_attention_is_text_claims_or_support(attention: Any) -> None:
    """Each form of stating support gives the same claims."""
    engine = Engine("full", attention=attention)
    assert isinstance(engine.support, AttentionSupport)
    assert engine.support.claims == Claims.at_level("mixed")
    assert engine.downgrades == ()


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"policy": "atuo"}, UnknownNameError, "did you mean 'auto'"),
        ({"policy": object()}, ConfigError, "isn't a policy"),
        ({"policy": "auto:nope=1"}, ConfigError, "doesn't take nope"),
        ({"policy": "auto:forms"}, ConfigError, "NAME=VALUE"),
        ({"attention": "mlla"}, UnknownNameError, "did you mean 'mla'"),
        ({"attention": 3}, SupportError, "give AttentionSupport, Claims, or text"),
        ({"executor": "simulate"}, UnknownNameError, "did you mean 'simulated'"),
        ({"objective": "fast"}, ConfigError, "throughput, latency"),
        ({"ladder": []}, LadderError, "empty"),
        ({"ladder": [4, 2]}, LadderError, "Sorted: 2,4"),
        ({"ladder": [4, 99_999]}, LadderError, "over the 8192 tokens"),
        ({"ladder": CaptureSizes((), (), ())}, LadderError, "empty"),
        ({"ladder": 5}, LadderError, "capture sizes are 5; give a list"),
        ({"ladder": [4, 2, "a"]}, LadderError, "Sorted: 2,4"),
        ({"settings": {"max_num_reqs": 3}}, ConfigError, "settings is .*it takes a Settings"),
        ({"costs": "qwen2.5-0.5b-h200"}, ConfigError, "costs is .*load_profile"),
        ({"objective": 0.5}, ConfigError, "objective is 0.5; give an Objective, or text"),
        ({"budget": 5}, ConfigError, "budget is 5; it takes a Budget"),
        ({"registry": 5}, ConfigError, "registry is 5; it takes a GraphRegistry"),
        ({"calibrate": "x"}, ConfigError, "calibrate is 'x'; it takes seconds"),
        ({"calibrate": None, "policy": "eager"}, ConfigError, "calibrate is None; it takes seconds"),
        ({"lazy": "x", "executor": "simulated"}, ConfigError, "lazy is 'x'; it takes seconds"),
        ({"communicator": 2}, ConfigError, "communicator is 2; it takes a Communicator"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    """Each argument that can't be used is an error that names it, and the near miss where there is one."""
    with pytest.raises(error, match=match):
        Engine(**arguments)


@pytest.mark.parametrize("shape", [4, BatchShape.decode(4).numbers, None])
def test_a_batch_that_is_no_shape_is_named(shape: Any) -> None:
    """Counts and plain numbers are for `select`; `decide` and `explain` say so."""
    engine = Engine()
    for ask in (engine.decide, engine.explain):
        with pytest.raises(ShapeError, match=r"give a BatchShape.*Engine.select"):
            ask(shape)


@pytest.mark.parametrize("seconds", [float("nan"), -1, "1", float("inf")])
def test_seconds_that_cant_be_spent_are_named(seconds: Any) -> None:
    """What is left over is kept for later calls, so one that is no number would count for ever."""
    engine = Engine(executor=SimulatedExecutor(num_blocks=8), ladder=[4], settings=LIMITS, lazy=True)
    with pytest.raises(ConfigError, match=r"seconds is .*it takes seconds of at least 0"):
        engine.capture_pending(seconds)


def test_a_ladder_above_the_budget_is_an_error_that_says_what_to_keep() -> None:
    """A ladder that was given must fit its budget; a default one is captured as far as it goes."""
    with pytest.raises(BudgetRefused, match=r"over the budget of 2 graphs.*Keep the sizes") as caught:
        Engine("full", attention="uniform", ladder=SIZES, settings=LIMITS, budget=Budget(graphs=2))
    assert caught.value.reason is Reason.BUDGET_GRAPHS
    engine = Engine("full", settings=LIMITS, budget=Budget(graphs=2), executor=SimulatedExecutor(num_blocks=8))
    engine.capture()
    assert len(engine.registry.captured()) == 2
    refused = [record for record in engine.registry.records() if record.state is GraphState.WITHDRAWN]
    assert {record.reason for record in refused} == {Reason.BUDGET_GRAPHS}


def test_a_step_that_may_run_in_no_mode_is_an_error() -> None:
    """When everything that could run the batch is forbidden, the error lists the modes."""
    engine = Engine("full", ladder=[8], settings=LIMITS)
    shape = BatchShape.decode(64, forbidden={Mode.EAGER, Mode.PIECEWISE})
    with pytest.raises(NoLegalModeError, match=r"64 tokens.*piecewise, eager"):
        engine.decide(shape)


def test_a_lone_communicator_is_not_asked() -> None:
    """With one rank there is nothing to agree on, so nothing is sent."""

    class Alone:
        rank, world_size = 0, 1

    engine = Engine(communicator=Alone())  # type: ignore[arg-type]
    assert engine.decide(BatchShape.decode(1)) == Engine().decide(BatchShape.decode(1))


def test_what_decisions_are_made_from_is_not_set_by_assignment() -> None:
    """Assigned costs and objectives would be those of `explain` and not of `decide`, which was prepared before."""
    engine, shape = Engine(), BatchShape.decode(5)
    assert engine.decide(shape).mode is Mode.FULL
    slow = attrs.evolve(engine.costs, host_full=HostCost(1e6), host_piecewise=HostCost(1e6), host_eager=HostCost(1.0))
    for name, value in (("costs", slow), ("objective", Objective(0.0, 1.0))):
        with pytest.raises(AttributeError, match=name):
            setattr(engine, name, value)
    with pytest.raises(ConfigError, match="costs is None; it takes a CostTable"):
        engine.take_costs(None)  # type: ignore[arg-type]
    engine.take_costs(slow)
    assert engine.decide(shape).mode is engine.explain(shape).decision.mode is Mode.EAGER


def test_costs_that_are_taken_while_the_policy_is_prepared_are_decided_by() -> None:
    """Whoever reads `stats` on another thread may take corrected ones just then."""
    engine = Engine()
    slow = attrs.evolve(engine.costs, host_full=HostCost(1e6), host_piecewise=HostCost(1e6), host_eager=HostCost(1.0))

    class Interrupted(AutoPolicy):
        def compile(self, context: PolicyContext) -> AutoTables:
            made = super().compile(context)
            if engine.costs is not slow:
                engine.take_costs(slow)
            return made

    engine.policy = Interrupted()
    assert engine.compiled.select(5).mode is Mode.EAGER
    assert engine.compiled is engine.compiled


def test_steps_are_counted_by_one_thread_at_a_time() -> None:
    """A step that is over at once is counted under the lock that readers of `stats` hold while they count others."""
    engine = simulated()
    held = []
    add = engine.stats.add

    def noted(*arguments: Any) -> None:
        other = Thread(target=lambda: held.append(not engine._counting.acquire(blocking=False)))
        other.start()
        other.join()
        add(*arguments)

    engine.stats.add = noted  # type: ignore[method-assign]
    engine.step(one_step())
    assert held == [True]


def test_an_engine_that_cant_measure_says_so() -> None:
    """Its costs stay analytic, and `calibration_error` has why; where nothing was to be measured it is empty."""
    assert simulated("auto").calibration_error.startswith("nothing to measure: it takes an executor over")
    assert simulated("auto", lazy=True).calibration_error.startswith("nothing to measure")
    for arguments in ({"calibrate": 0}, {"costs": analytic_costs()}, {"policy": "full"}):
        assert simulated(**{"policy": "auto", **arguments}).calibration_error == ""


def test_a_communicator_may_count_its_ranks_in_numpys_numbers() -> None:
    """As counts elsewhere; one rank has nothing to agree on."""
    communicator: Any = ThreadCommunicator(ThreadWorld(1), 0)
    communicator.world_size = np.int64(1)
    assert Engine("eager", communicator=communicator).decide(BatchShape.decode(2)).mode is Mode.EAGER


@pytest.mark.parametrize(("name", "value"), [("strict", "no"), ("strict", 0), ("correct", "off"), ("correct", None)])
def test_flags_are_true_or_false(name: str, value: object) -> None:
    """Text that says no was yes."""
    with pytest.raises(ConfigError, match=rf"{name} is {value!r}; it takes a bool, such as True"):
        Engine(**{name: value})
