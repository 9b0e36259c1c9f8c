"""From a trace to a plan: replays, halves, default lists."""

from __future__ import annotations

import attrs
import pytest

from kpolicy.attention.support import Claims
from kpolicy.budget_models import AscendParallel, ModelShape, ascend_stream_budget
from kpolicy.budgets import Budget
from kpolicy.costs import Curve
from kpolicy.engine import Engine
from kpolicy.errors import BudgetRefused, ConfigError, UnknownNameError
from kpolicy.kv_span import KvSpan
from kpolicy.modes import Part
from kpolicy.planning.workload import DECODE, LIST
from kpolicy.policies import get_policy
from kpolicy.scheduling.traces import TraceRequest
from kpolicy.simulate import simulate
from kpolicy.trace_plan import DEFAULT_LISTS, TracePlan, halves, plan_trace, replayed
from tests.planning.workloads import costs, server, trace

CLAIMS = Claims.at_level("mixed")


def planned(policy: str = "vllm", **rest: object) -> TracePlan:
    given = {"server": server(), "costs": costs(), "attention": CLAIMS, "most_sizes": 6}
    return plan_trace(trace(), policy=policy, **(given | rest))  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", ["vllm", "sglang", "auto", "piecewise", "nano_vllm"])
def test_a_plan_beats_its_start_with_no_more_sizes(policy: str) -> None:
    """With as many sizes as the policy's own list, the plan's steps take no longer, in the simulator as planned."""
    start = get_policy(policy).sizes(server().settings)
    many = max(len(start.decode) + len(start.piecewise) + len(start.mixed), 1)
    found = planned(policy, most_sizes=many, smoothing=0.0)
    assert found.own.step_us <= found.default.step_us * (1 + 1e-9)
    result = simulate(trace(), policy, server=server(), costs=costs(), attention=CLAIMS, ladder=found.plan.sizes)
    assert result.step_us / result.steps == pytest.approx(found.plan.step_us, rel=0.03)
    assert result.refused == {}


def test_a_policy_that_splits_runs_no_slower() -> None:
    """Halves of a split are planned as batches of their own, and the simulator takes no longer with the plan.

    But for the few microseconds by which a trace's last steps fall otherwise.
    """
    start = get_policy("split").sizes(server().settings)
    found = planned("split", most_sizes=len(start.decode) + len(start.piecewise), smoothing=0.0)
    took = [
        simulate(trace(), "split", server=server(), costs=costs(), attention=CLAIMS, ladder=sizes).step_us
        for sizes in (start, found.plan.sizes)
    ]
    assert took[1] <= took[0] * (1 + 1e-5)


def test_default_lists_of_every_engine() -> None:
    """Each engine's own list is scored by its own rule, on the plan's steps."""
    found = planned()
    assert [each.name for each in found.others] == list(DEFAULT_LISTS)
    by_name = {each.name: each for each in found.others}
    # 64 requests: 1, 2, 4, and by eights to 128 tokens; the sizes to 64 twice, for FULL and for PIECEWISE.
    assert (by_name["vLLM 0.33"].num_sizes, by_name["vLLM 0.33"].num_keys) == (19, 30)
    assert by_name["nano-vLLM"].num_keys == len(by_name["nano-vLLM"].sizes.decode)
    assert by_name["vLLM 0.33"].step_us == pytest.approx(found.default.step_us)
    # Prefill is eager there, so its steps take longer than where pieces replay.
    assert by_name["nano-vLLM"].step_us > by_name["vLLM 0.33"].step_us


def test_held_out() -> None:
    """The first half's plan is scored on the second half's steps, beside the default and the best that was possible."""
    found = planned(smoothing=0.0)
    held = found.held_out
    assert held is not None
    first, second = halves(trace())
    assert (len(first), len(second)) == (40, 40)
    assert held.plan.steps < found.plan.steps
    assert held.best_us <= held.step_us * (1 + 1e-9)
    assert held.against_default == pytest.approx(held.step_us / held.default_us - 1)
    assert planned(hold_out=False).held_out is None
    few = planned(smoothing=0.0, worth=0.2, most_loss=0.1).held_out
    assert few is not None
    assert few.best_us <= few.step_us, "the best has as many sizes, whatever more of them would be worth"


def test_it_settles_and_says_what_it_is_from() -> None:
    """Replays are counted, and measured costs need no note."""
    found = planned()
    assert found.replayed.settled
    assert len(found.replayed.rounds) >= 2
    assert not any("settle" in note or "measured" in note for note in found.notes)
    analytic = plan_trace(trace(10), policy="vllm", server=server(), most_sizes=3, hold_out=False)
    assert any("not measured on your device" in note for note in analytic.notes)
    exact = planned("tensorrt_llm", hold_out=False)
    assert any("exact sizes only" in note for note in exact.notes)


def test_contexts_beyond_the_table_are_noted() -> None:
    """The share of the steps with longer contexts than attention was timed at; a table that doesn't know says so."""

    def notes(span: KvSpan | None) -> list[str]:
        given = plan_trace(
            trace(10), policy="vllm", server=server(), most_sizes=3, hold_out=False,
            costs=costs(kv_span=span),
        )  # fmt: skip
        return [note for note in given.notes if "context" in note]

    assert notes(KvSpan(1 << 20, 1 << 30, 1 << 20)) == []
    (all_of_them,) = notes(KvSpan(0, 0, 0))
    assert all_of_them.startswith("100.0% of the steps have a context outside what the cost table was made for")
    (unknown,) = notes(None)
    assert unknown.startswith("contexts: not recorded")


def test_sizes_beyond_the_table_are_no_contexts() -> None:
    """Steps larger than what was timed are noted as such, and not as of longer contexts."""
    short = Curve((1, 64), (1000.0, 2260.0))
    table = costs(full=short, piecewise=short, eager=short, kv_span=KvSpan(1 << 20, 1 << 30, 1 << 20))
    found = plan_trace(trace(10), policy="vllm", server=server(), most_sizes=3, hold_out=False, costs=table)
    assert found.replayed.histogram.outside_contexts == 0
    (note,) = [note for note in found.notes if "outside what the cost table was made for" in note]
    assert "of the steps run at a size outside" in note


def test_planned_graphs_beyond_the_table_are_noted() -> None:
    """Where FULL graphs were timed at smaller sizes than the plan has, whatever eager steps were timed at."""
    table = costs(full=Curve((1, 16), (1000.0, 1001.0)), kv_span=KvSpan(1 << 20, 1 << 30, 1 << 20))
    found = plan_trace(trace(10), policy="auto", server=server(), most_sizes=3, hold_out=False, costs=table)
    told = simulate(trace(10), "auto", server=server(), costs=table, ladder=found.plan.sizes)
    share = told.outside_sizes / told.steps
    (note,) = [note for note in found.notes if "outside what the cost table was made for" in note]
    assert share > 0
    assert note.startswith(f"{share:.1%} of the steps run at a size outside")
    assert "FULL graphs of up to 16 tokens, PIECEWISE of up to " in note


def test_same_input_same_plan() -> None:
    """Nothing in a plan is left to chance."""
    one, other = planned("auto"), planned("auto")
    assert one.plan == other.plan
    assert one.plan.lists == other.plan.lists
    assert one.held_out == other.held_out


def test_drafts_are_planned_for() -> None:
    """With drafts, sizes are whole decode rows of 1 + k tokens."""
    found = planned(server=server(num_speculative_tokens=3))
    assert all(size % 4 == 0 for size in found.plan.lists[LIST])
    apart = planned("full_and_piecewise", server=server(num_speculative_tokens=3))
    assert all(size % 4 == 0 for size in apart.plan.sizes.decode)
    Engine("full_and_piecewise", ladder=apart.plan.sizes, settings=apart.settings, attention=CLAIMS)


def test_budgets_reach_the_plan() -> None:
    """A budget holds for what the engine would capture."""
    found = planned("sglang", most_sizes=None, budget=Budget(bytes=12 << 20))
    assert found.own.usage.bytes <= 12 << 20
    with pytest.raises(BudgetRefused, match="don't fit the budget"):
        planned("sglang", most_sizes=None, budget=Budget(bytes=1), largest={DECODE: 64})
    with pytest.raises(BudgetRefused, match="no capture size fits the budget of 1 byte: the least"):
        planned("sglang", most_sizes=None, budget=Budget(bytes=1))


def test_a_half_that_is_not_served_is_not_scored() -> None:
    """A first half that no KV holds leaves the plan, and a note instead of a score; no request at all is an error."""
    long = [TraceRequest(i, 0.0, 900_000, 5) for i in range(3)]
    short = [TraceRequest(3 + i, 1.0 + i, 40, 9) for i in range(3)]
    found = plan_trace(attrs.evolve(trace(), requests=(*long, *short)), server=server(), costs=costs())
    assert found.held_out is None
    assert found.plan.num_sizes
    assert any("no request of the first half was served" in note for note in found.notes)
    with pytest.raises(ConfigError, match=r"no request of .* was served.*: 3 over_kv_capacity"):
        plan_trace(attrs.evolve(trace(), requests=tuple(long)), server=server(), costs=costs())


def test_a_devices_own_units() -> None:
    """Under Ascend's stream formula a size's pieces take the streams that it says, and the plan stays within them."""
    model = ascend_stream_budget(
        ModelShape(num_layers=64), AscendParallel(tp=8), parts=(Part.FULL, Part.PIECEWISE), num_sizes=8
    )
    found = planned("ascend", budget=model, most_sizes=None)
    assert model.budget.streams is not None
    assert 0 < found.plan.num_sizes <= model.budget.streams // model.piecewise.streams
    assert found.own.usage.streams <= model.budget.streams
    assert found.own.usage == found.plan.usage
    assert planned("ascend", most_sizes=None).plan.num_sizes > found.plan.num_sizes


@pytest.mark.parametrize("level", ["mixed", "uniform", "varlen_decode"])
@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize(
    "policy",
    ["auto", "full_and_piecewise", "piecewise", "vllm", "vllm:version=0.23", "sglang", "tensorrt_llm", "ascend"],
)
def test_what_a_plan_takes_is_what_the_policy_captures(policy: str, num_drafts: int, level: str) -> None:
    """The budget is held for all graph keys of a size: with drafts and without, of variable lengths, of adapters."""
    given = server(num_speculative_tokens=num_drafts, max_loras=2 if policy in ("auto", "sglang") else 0)
    found = planned(policy, server=given, attention=Claims.at_level(level), hold_out=False, most_rounds=1)
    assert found.own.num_keys
    assert attrs.astuple(found.plan.usage) == pytest.approx(attrs.astuple(found.own.usage))


def test_replayed_counts_what_the_policy_ran() -> None:
    """A policy that splits makes batches of its own of the halves."""
    sizes = get_policy("split").sizes(server().settings)
    split = replayed(trace(), "split", sizes, server=server(), costs=costs(), attention=CLAIMS)
    whole = replayed(trace(), "full_and_piecewise", sizes, server=server(), costs=costs(), attention=CLAIMS)
    assert sum(sums.decodes for sums in split.others.values()) < sum(sums.decodes for sums in whole.others.values())


def test_bad_input() -> None:
    """A trace without a second half, and names that nobody knows, are errors that say so."""
    with pytest.raises(ConfigError, match="has 1 of the two requests"):
        plan_trace(trace(1), server=server())
    with pytest.raises(UnknownNameError, match="unknown policy 'vlm'"):
        planned("vlm")
    with pytest.raises(ConfigError, match="captures nothing here"):
        planned("eager")
    nothing = attrs.evolve(trace(), requests=())
    with pytest.raises(ConfigError, match="has 0 of the two requests"):
        plan_trace(nothing, server=server())


def test_a_plan_is_of_one_rank() -> None:
    """The steps of several ranks, which run at the largest of theirs, aren't planned for as if they were one's."""
    with pytest.raises(ConfigError, match="2 ranks were asked for; sizes are planned from the steps of one rank"):
        plan_trace(trace(), server=attrs.evolve(server(), ranks=2))
    with pytest.raises(ConfigError, match=r"trace is 'trace\.csv'; it takes a Trace"):
        plan_trace("trace.csv")  # type: ignore[arg-type]
