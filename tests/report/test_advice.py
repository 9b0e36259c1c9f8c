"""What to do first: which run is advised, and that what is to be pasted can be."""

from __future__ import annotations

import json
import re
import shlex
from importlib import import_module
from pathlib import Path
from typing import Any

import attrs
import pytest

from kpolicy.attention.support import Claims
from kpolicy.budgets import Budget
from kpolicy.costs import HostCost
from kpolicy.errors import BudgetRefused, ConfigError
from kpolicy.policies import get_policy
from kpolicy.report import gather
from kpolicy.report.advice import NEAR, best_of
from kpolicy.report.runs import Run
from kpolicy.scheduling.generator import generate_trace
from kpolicy.scheduling.traces import Trace, TraceRequest
from kpolicy.schemas import LadderPlan, loads
from kpolicy.settings import Settings
from kpolicy.simulate import Server, Spread
from kpolicy.simulate.server import LLAMA_8B_KV_BYTES
from tests.report.helpers import COSTS, SMALL, small_report

TRACE = generate_trace(num_requests=40, seed=7)


def with_mean(run: Run, mean_us: float, graph_bytes: int) -> Run:
    """The run, as if its requests had ended after that time."""
    result = attrs.evolve(run.result, e2e=Spread(count=1, mean=mean_us), graph_bytes=graph_bytes)
    return attrs.evolve(run, result=result)


def test_of_runs_that_are_near_the_one_with_less_memory_is_best() -> None:
    """Beyond that it is the shorter mean time to the last token."""
    run = small_report().traces[0].runs[0]
    quick, near, far = (
        with_mean(run, 1000.0, 900), with_mean(run, 1000.0 * (1 + 0.9 * NEAR), 100), with_mean(run, 1100.0, 1),
    )  # fmt: skip
    assert best_of([quick, far]) is quick
    assert best_of([quick, near, far]) is near


def test_a_run_that_serves_fewer_isnt_best() -> None:
    """Handing requests back makes the others quick; the sentence counts those that were served."""
    trace = Trace("t", "generated", [TraceRequest(i, 0.5 * i, 900 if i % 2 else 20, 8) for i in range(20)])
    settings, costs = Settings(max_num_reqs=16, max_num_tokens=1024), attrs.evolve(COSTS, graph_bytes=(8 << 20,) * 2)
    roomy = Server(settings=settings, warm=True, kv_tokens=60_000)
    (every,) = gather([trace], ["vllm"], server=roomy, costs=costs).traces
    # Beside all graphs of the default list only short requests fit.
    kv_tokens = 16 * (-(-every.runs[0].result.graph_bytes // (16 * LLAMA_8B_KV_BYTES)) + 20)
    tight = attrs.evolve(roomy, kv_tokens=kv_tokens)
    (made,) = gather([trace], ["vllm", "eager"], server=tight, costs=costs).traces
    vllm, eager = made.runs[:2]
    assert vllm.result.served == 10
    assert eager.result.served == 20
    assert vllm.result.e2e.mean < eager.result.e2e.mean
    assert made.advice.best is not vllm
    assert "20 requests served, 10 with vllm" in made.advice.sentence
    assert any(line.startswith("Not compared, because they serve fewer") for line in made.advice.details)


@pytest.mark.parametrize("policy", ["auto", "full", "piecewise", "tensorrt_llm", "split", "sglang", "vllm"])
def test_sizes_are_counted_as_a_plan_counts_them(policy: str) -> None:
    """A policy's own sizes are within a budget of as many sizes as the plan says that they are, and of no fewer."""
    (made,) = gather([TRACE], [policy], server=SMALL, costs=COSTS, most_sizes=2).traces
    own = made.plans[0].found.default.num_sizes
    asked = import_module("kpolicy.report.gather")._Asked(
        server=SMALL, costs=COSTS, attention=Claims.at_level("mixed"), ladder=None, objective="throughput", budget=None,
        seed=0,
    )  # fmt: skip
    assert asked.fits(made.runs[0], None, own)
    assert not asked.fits(made.runs[0], None, own - 1)


def test_the_better_share_of_good_requests_is_best() -> None:
    """With a service level the mean time doesn't count, and shares within half a point are equal."""
    run = small_report().traces[0].runs[0]

    def of(share: float, mean_us: float, graph_bytes: int) -> Run:
        level = attrs.evolve(run.result.goodput, share=share, ttft_ms=5.0)
        return attrs.evolve(
            run, result=attrs.evolve(with_mean(run, mean_us, graph_bytes).result, goodput=level)
        )  # fmt: skip

    good, bad, near = of(0.9, 2000.0, 900), of(0.6, 1000.0, 1), of(0.896, 3000.0, 100)
    assert best_of([bad, good]) is good
    assert best_of([bad, good, near]) is near
    far = of(0.8949, 3000.0, 100)
    assert best_of([bad, good, far]) is good


def test_planned_sizes_have_a_budget_of_their_own() -> None:
    """What the policies' graphs may take doesn't limit those of the plan."""
    (made,) = gather(
        [TRACE], ["vllm"], server=SMALL, costs=COSTS, budget=Budget(graphs=4), plan_budget=Budget(graphs=40)
    ).traces
    own, planned = made.runs
    assert own.result.graphs <= 4 < planned.result.graphs
    assert not planned.result.not_captured


def test_the_plan_is_advised_where_it_is_as_good_with_less() -> None:
    """Its flags are those sizes, as vLLM takes them, and the one sentence has both runs' figures."""
    made = gather([TRACE], ["vllm"], server=SMALL, costs=COSTS, most_sizes=6).traces[0]
    base, planned = made.runs
    assert made.advice.best is planned
    assert planned.result.graph_bytes < base.result.graph_bytes
    (paste,) = made.advice.paste
    arguments = shlex.split(paste.text)
    config: dict[str, Any] = json.loads(arguments[arguments.index("--compilation-config") + 1])
    assert tuple(config["cudagraph_capture_sizes"]) == made.plans[0].found.plan.lists["all"] == planned.sizes.piecewise
    assert f"{planned.result.graphs} graphs instead of {base.result.graphs}" in made.advice.sentence
    assert len(re.findall(r"[.](?!\d)", made.advice.sentence)) == 1


def test_what_planned_sizes_make_longer_is_told() -> None:
    """The mean hides tails: latencies over 5% longer than with the policy's own sizes are a detail, others aren't."""
    told = import_module("kpolicy.report.advice")._longer
    base = small_report().traces[0].runs[0]

    def of(ttft: Spread, gap: Spread) -> Run:
        return attrs.evolve(base, kind="planned", result=attrs.evolve(base.result, ttft=ttft, gap=gap))

    ttft, gap = base.result.ttft, base.result.gap
    for kind, own in (("own", "its own"), ("given", "the given")):
        for late in ("p50", "p99"):
            changed = {name: getattr(ttft, name) * (1.06 if name == late else 1.04) for name in ("p50", "p99")}
            now = of(attrs.evolve(ttft, **changed), attrs.evolve(gap, p99=gap.p99 / 2))
            (said,) = told(now, attrs.evolve(base, kind=kind))
            expected = rf"Longer than with {own} sizes: time to first token {late} [0-9.,]+ ms instead of [0-9.,]+ ms\."
            assert re.fullmatch(expected, said)
    assert told(of(ttft, gap), base) == []
    made = gather([TRACE], ["vllm"], server=SMALL, costs=COSTS, most_sizes=6).traces[0]
    assert made.advice.best is made.runs[1]
    assert [line for line in made.advice.details if line.startswith("Longer")] == told(made.runs[1], made.runs[0])


def test_a_plan_that_gains_nothing_and_starts_later_isnt_best() -> None:
    """Of runs that are near, planned sizes with less memory that take longer to capture lose to their policy's own."""
    run = small_report().traces[0].runs[0]

    def of(kind: str, mean_us: float, graph_bytes: int, capture_s: float) -> Run:
        made = with_mean(run, mean_us, graph_bytes)
        return attrs.evolve(made, kind=kind, result=attrs.evolve(made.result, capture_s=capture_s))

    own = of("own", 1000.0, 822, 25.6)
    for mean_us, capture_s, wins in ((999.9, 26.9, False), (999.9, 25.6, True), (990.0, 26.9, True)):
        planned = of("planned", mean_us, 810, capture_s)
        assert best_of([own, planned]) is (planned if wins else own)
    other = attrs.evolve(of("own", 1000.0, 900, 1.0), policy="another")
    assert best_of([other, of("planned", 999.9, 810, 26.9)]).kind == "planned"


def test_a_wide_budget_that_saves_nothing_keeps_the_default() -> None:
    """The sentence has both, and a detail says how few sizes would do; with as few a plan is advised."""
    made, few = (
        gather([TRACE], ["vllm"], **limits).traces[0]
        for limits in ({"plan_budget": Budget(bytes=2 << 30)}, {"most_sizes": 4})
    )
    own, planned = made.runs
    assert planned.result.capture_s > own.result.capture_s
    assert planned.result.e2e.mean == pytest.approx(own.result.e2e.mean, rel=NEAR)
    assert made.advice.best is own
    assert re.fullmatch(
        r"Run vllm with its own capture sizes, 86 graphs: within the budget they are as good as planned ones, which "
        r"take [0-9,]+ MiB instead of 822 MiB of graph memory and [0-9.]+ s instead of 25\.6 s of capture for requests "
        r"that end .*\.",
        made.advice.sentence,
    )
    assert "[1,2,4,8," in made.advice.paste[0].text
    (line,) = (line for line in made.advice.details if line.startswith("Within a budget"))
    assert line.endswith("try that, or --budget 4.")
    assert few.advice.best is few.runs[1]
    assert few.runs[1].result.capture_s < own.result.capture_s


def test_own_sizes_are_kept_where_the_plan_is_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one planned size makes requests end later, the flags are the default sizes'."""
    module = import_module("kpolicy.report.gather")
    real = module.plan_trace
    monkeypatch.setattr(module, "plan_trace", lambda trace, **given: real(trace, **given | {"most_sizes": 1}))
    made = gather([TRACE], ["vllm"], server=SMALL, costs=COSTS).traces[0]
    base, planned = made.runs
    assert planned.result.e2e.mean > base.result.e2e.mean * (1 + NEAR)
    assert made.advice.best is base
    assert "its own capture sizes" in made.advice.sentence
    assert str(list(base.sizes.piecewise)).replace(" ", "") in made.advice.paste[0].text


def test_kpolicys_own_policy_comes_with_a_plan_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is a plan that can be read, the code runs beside it; an engine's flags, last, say whose they are."""
    made = gather([TRACE], ["auto", "tensorrt_llm"], server=SMALL, costs=COSTS, most_sizes=8).traces[0]
    best = made.advice.best
    assert best is not None
    assert (best.policy, best.kind) == ("auto", "planned")
    by_title = {paste.title: paste for paste in made.advice.paste}
    assert list(by_title) == ["For kpolicy", "The plan file", "For tensorrt-llm"]
    (other,) = (run for run in made.runs if run.name == "tensorrt_llm, planned sizes")
    mib = other.result.graph_bytes / 2**20
    assert re.search(
        rf"\. That is not auto but tensorrt_llm, planned sizes: {other.result.graphs} graphs, {mib:,.2g} MiB of graph "
        r"memory, (as good as auto|requests that end [0-9.]+% later on average than with auto)$",
        by_title["For tensorrt-llm"].how,
    )
    assert json.loads(by_title["For tensorrt-llm"].text)["max_batch_size"] == 16
    plan = loads(by_title["The plan file"].text, LadderPlan)
    assert plan.sizes == best.sizes
    (tmp_path / "plan.json").write_text(by_title["The plan file"].text)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(by_title["For kpolicy"].text, "paste", "exec"), names)  # noqa: S102 - what a reader would run
    assert names["engine"].sizes == best.sizes
    assert names["engine"].settings == SMALL.settings


def test_without_graphs_there_is_nothing_to_paste_for_an_engine() -> None:
    """`eager` alone."""
    made = gather([TRACE], ["eager"], server=SMALL, costs=COSTS).traces[0]
    assert made.advice.sentence == "Run eager, without graphs."
    assert not made.plans
    assert not any("nothing was measured" in line for line in made.advice.details)
    analytic = gather([TRACE], ["eager"], server=SMALL).traces[0]
    assert any("nothing was measured" in line for line in analytic.advice.details)


def test_a_ladder_that_is_given_is_what_a_plan_is_compared_with() -> None:
    """The runs without a plan have it, and so have the maps."""
    from kpolicy.ladders import CaptureSizes

    given = CaptureSizes.of([1, 2, 16], SMALL.settings)
    made = gather([TRACE], ["vllm"], server=SMALL, costs=COSTS, ladder=given).traces[0]
    assert made.runs[0].sizes == given
    assert made.runs[0].kind == "given"
    assert made.runs[-1].sizes != given


@pytest.mark.parametrize(("traces", "policies"), [([], ["vllm"]), ([TRACE], [])])
def test_nothing_to_report_is_an_error(traces: Any, policies: Any) -> None:
    """No trace, or no policy."""
    with pytest.raises(ConfigError, match="needs a trace and a policy"):
        gather(traces, policies)


@pytest.mark.parametrize("limits", [{"most_sizes": 1}, {"plan_budget": Budget(graphs=2)}])
def test_what_is_over_the_budget_isnt_advised(limits: dict[str, Any]) -> None:
    """The plan is, though the default sizes serve better, of the other policy too."""
    made = gather([TRACE], ["vllm", "auto"], server=SMALL, costs=COSTS, **limits).traces[0]
    best = made.advice.best
    assert best is not None
    assert best.kind == "planned"
    assert best.result.graphs <= 2
    assert min(run.result.e2e.mean for run in made.runs) < best.result.e2e.mean


def test_a_budget_that_holds_nothing_is_an_error() -> None:
    """Be it the plan's or the policies' own."""
    with pytest.raises(BudgetRefused, match="no capture size fits the budget of 0 graphs"):
        gather([TRACE], ["vllm"], server=SMALL, costs=COSTS, plan_budget=Budget(graphs=0))
    ladder = get_policy("vllm").sizes(SMALL.settings)
    with pytest.raises(BudgetRefused):
        gather([TRACE], ["vllm"], server=SMALL, costs=COSTS, ladder=ladder, budget=Budget(graphs=1))


def test_where_no_graph_is_worth_its_while_the_advice_is_to_run_without() -> None:
    """The plan captures nothing where a graph takes longer than no graph, though the budget has room."""
    slow = attrs.evolve(COSTS, host_full=HostCost(1e6), host_piecewise=HostCost(1e6))
    made = gather([TRACE], ["vllm"], server=SMALL, costs=slow, most_sizes=2).traces[0]
    assert made.plans[0].run is None
    assert made.advice.best is None
    assert "without graphs, or raise the budget" in made.advice.sentence
    assert not made.advice.paste
