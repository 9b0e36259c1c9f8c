"""The page: it stands alone, it has every part, its numbers are the simulation's, and a name can't become markup."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from kpolicy.budgets import Budget
from kpolicy.costs import Curve
from kpolicy.errors import ConfigError
from kpolicy.kv_span import KvSpan
from kpolicy.modes import Part
from kpolicy.policies import get_policy
from kpolicy.report import gather, page
from kpolicy.report.html import cell, text
from kpolicy.report.sections import _outside
from kpolicy.report.smallest import none_below
from kpolicy.report.timeline import shares
from kpolicy.scheduling.generator import generate_trace
from kpolicy.scheduling.traces import FailedTrace, Trace
from kpolicy.simulate import simulate
from tests.report.helpers import COSTS, SMALL, Page, small_report

HOSTILE = "</title></script><script>alert(1)</script>\"'&<img src=x onerror=alert(1)>\u2028.csv"
PARTS = ("first", "compare", "latency", "modes", "timeline", "map", "padding", "plan", "reasons")


def test_it_asks_the_network_for_nothing() -> None:
    """No address anywhere, no resource, and a policy that forbids both to whatever else might be in it."""
    html = page(small_report())
    assert not re.search(r"https?:|[^:]//[a-z]|@import|url\((?!#)", html)
    read = Page(html)
    for tag, given in read.tags:
        assert "src" not in given, tag
        assert given.get("href", "#").startswith(("#", "data:")), tag
    policies = [each["content"] for each in read.named("meta") if each.get("http-equiv") == "Content-Security-Policy"]
    assert len(policies) == 1
    assert str(policies[0]).startswith("default-src 'none';")


def test_every_part_is_there() -> None:
    """A section each, in order, with ids that are there once; heads of sortable columns are buttons."""
    read = Page(page(small_report()))
    assert len(set(read.ids)) == len(read.ids)
    sections = [str(given["id"]) for given in read.named("section")]
    assert sections == [*(f"{name}-0" for name in PARTS), "setting"]
    assert read.texts["h3"] == [
        "What to do first", "Policies", "Latency", "Time by mode", "Timeline", "Mode map", "Padding by size",
        "Capture sizes", "Reasons",
    ]  # fmt: skip
    assert all(given.get("type") == "button" for given in read.named("button"))
    assert {given.get("class") for given in read.named("table")} == {"sortable", "map"}


def test_the_same_report_is_the_same_bytes() -> None:
    """Simulated, planned and written twice."""
    again = gather(
        [generate_trace(num_requests=60, seed=3)], ("auto", "vllm", "eager"), server=SMALL, costs=COSTS
    )  # fmt: skip
    assert page(again) == page(small_report())


def test_numbers_are_the_simulations() -> None:
    """The table of policies has what `simulate` says, and that of modes adds up to it."""
    read = Page(page(small_report()))
    by_policy = {row[0][0]: row for row in read.rows("Policies on the same arrivals")}
    trace = generate_trace(num_requests=60, seed=3)
    for policy in ("auto", "vllm", "eager"):
        told = simulate(trace, policy, server=SMALL, costs=COSTS)
        row = next(row for name, row in by_policy.items() if name in (policy, f"{policy} advised"))
        host = told.bound["host"].us / told.step_us
        wanted = [
            told.ttft.p50, told.ttft.p99, told.gap.p50, told.gap.p99, told.e2e.p50, told.e2e.mean, told.served,
            told.steps, told.step_us, host, told.padding / told.tokens_computed, told.graphs, told.graphs_used,
            told.graph_bytes, told.capture_s,
        ]  # fmt: skip
        assert [key for _, key in row[1:]] == pytest.approx(wanted, rel=1e-8)
        modes = [row for row in read.rows("Time by mode") if row[0][0] == policy]
        assert {row[1][0]: row[4][1] for row in modes} == {mode: each.steps for mode, each in told.modes.items()}
        assert sum(row[2][1] for row in modes) == pytest.approx(1.0)
        reasons = [row for row in read.rows("Steps by reason") if row[0][0] == policy and "half" not in row[3][0]]
        assert {row[1][0]: row[2][1] for row in reasons} == told.reasons


def test_what_is_beyond_the_table_is_told_in_a_line() -> None:
    """Below the comparison, of all runs together: whose steps are, or that the table doesn't know."""
    trace = generate_trace(num_requests=10, seed=3)
    every = r">Steps of a context outside the cost table: (?:[^<;]+ 100\.0%(?:; |\.</p>)){4}"
    for span, told in ((KvSpan(0, 0, 0), every), (None, ">Contexts: not recorded by the cost table.</p>")):
        report = gather([trace], ["vllm", "eager", "sglang"], server=SMALL, costs=attrs.evolve(COSTS, kv_span=span))
        assert len(report.traces[0].runs) == 4
        assert len(re.findall(told, page(report))) == 1
    short = attrs.evolve(COSTS, eager=attrs.evolve(COSTS.eager, sizes=(1, 2), us=(9000.0, 9001.0)))
    html = page(gather([trace], ["vllm", "eager"], server=SMALL, costs=short))
    (line,) = re.findall(r">Steps of a size outside the cost table: [^<]*<", html)
    assert re.search(r"eager [1-9]", line)


def test_a_run_whose_table_has_no_contexts_is_told() -> None:
    """Where only one of them is such a run too."""
    results = [SimpleNamespace(outside_sizes=0, outside_contexts=each, steps=9) for each in (0, None)]
    runs: Any = [SimpleNamespace(name="a run", result=result) for result in results]
    assert _outside(runs) == ["Contexts: not recorded by the cost table."]


@pytest.mark.parametrize("policy", ["auto", "full", "piecewise", "tensorrt_llm", "split", "sglang", "vllm"])
@pytest.mark.parametrize("more", [{}, {"num_speculative_tokens": 3}, {"max_loras": 2}])
def test_listed_graphs_are_those_that_are_captured(policy: str, more: dict[str, int]) -> None:
    """By kind, with their number: a kind that the policy has no graphs of with this attention isn't there."""
    server = attrs.evolve(SMALL, settings=attrs.evolve(SMALL.settings, **more))
    made = gather([generate_trace(num_requests=20, seed=3)], [policy], server=server, costs=COSTS, most_sizes=4)
    read = Page(page(made)).texts
    for run in made.traces[0].runs:
        whose = "planned" if run.kind == "planned" else "default"
        told = [name for name in read["dt"] if name.startswith(whose)]
        counts = [re.match(r"\w+: (\d+) (FULL|PIECEWISE) graphs?( of mixed)?", name) for name in told]
        assert sum(int(found[1]) for found in counts if found) == run.result.graphs > 0
        assert all(counts)
        for part in Part:
            of = [found for found in counts if found and found[2] == part.name]
            assert sum(int(found[1]) for found in of) == sum(key.part is part for key in run.keys)
        mixed = any(key.part is Part.FULL and not key.decode_only for key in run.keys)
        assert any(found and found[3] for found in counts) == mixed
    if policy == "sglang":
        assert [each for each in read["dt"] if "mixed" in each] == []


def test_what_a_budget_leaves_out_is_told_beside_the_sizes() -> None:
    """Graphs that weren't captured are listed with the others, and counted with the reason."""
    made = gather([generate_trace(num_requests=20, seed=3)], ["vllm"], server=SMALL, costs=COSTS, budget=Budget(4))
    base = made.traces[0].runs[0]
    html = page(made)
    assert len(base.keys) == 4 + sum(base.result.not_captured.values()) > 4
    ((reason, many),) = base.result.not_captured.items()
    assert f"<dt>default: of these not captured</dt><dd>{many} {reason}</dd>" in html


def test_a_list_that_starts_high_says_why() -> None:
    """Where costs are flat smaller sizes save nothing, where they rise the share is told.

    A list from 1 up says nothing. What isn't about decodes is told with the sizes alone, not with the advice.
    """
    trace = generate_trace(num_requests=20, seed=3)
    made = gather([trace], ["vllm"], most_sizes=2).traces[0]
    least = made.plans[0].found.plan.lists["all"][0]
    assert least > 100
    (said,) = none_below(made.plans[0].found)
    assert f"No size below {least} tokens is planned" in said
    assert "would take 0.00% off a mean step" in said
    assert re.search(rf"a FULL graph of {least} tokens takes as long as one of 1 \([0-9.]+ ms\)", said)
    assert said in made.advice.details
    assert text(said) in page(attrs.evolve(small_report(), traces=(made,)))
    steep = Curve((1, 128), (100.0, 900.0))
    costs = attrs.evolve(COSTS, full=steep, mixed=steep, piecewise=steep)
    few, many = (gather([trace], ["auto"], server=SMALL, costs=costs, most_sizes=most).traces[0] for most in (4, 40))
    (said,) = none_below(few.plans[0].found)
    assert said.startswith("No size of batches with prompts below 128 tokens is planned: ")
    share = re.search(r"would take ([0-9.]+)% off a mean step.* takes 0\.90 ms and one of 1 0\.10 ms", said)
    assert share is not None
    assert float(share[1]) > 0.5
    assert said not in few.advice.details
    assert none_below(many.plans[0].found) == []


def test_padding_adds_up_to_the_simulations() -> None:
    """Over all ranges, the default sizes' and the plan's."""
    made = small_report().traces[0]
    read = Page(page(small_report()))
    plans = [plan for plan in made.plans if plan.run is not None]
    assert plans
    for plan in plans:
        assert plan.run is not None
        rows = read.rows(f"Padding tokens of {plan.base.policy} ")
        assert sum(row[1][1] for row in rows) == plan.base.result.padding > 0
        assert sum(row[4][1] for row in rows) == plan.run.result.padding


def test_time_adds_up_in_the_timeline() -> None:
    """Bins hold all time of all steps, by mode; so does the picture for where no script runs."""
    for run in small_report().traces[0].runs:
        by_mode: dict[str, float] = {}
        for label, stats in run.result.modes.items():
            mode = label.partition("/")[0]
            by_mode[mode] = by_mode.get(mode, 0.0) + stats.us
        drawn = shares(run.steps, 50, run.steps.end_us)
        for i, mode in enumerate(("full", "piecewise", "split", "eager")):
            assert sum(run.steps.busy_us[i]) == pytest.approx(by_mode.get(mode, 0.0))
            assert sum(drawn[i]) * run.steps.end_us / 50 == pytest.approx(by_mode.get(mode, 0.0), rel=1e-6)
        assert max(run.steps.running) <= SMALL.settings.max_num_reqs


def test_a_hostile_name_is_text() -> None:
    """Markup in a trace's name is shown, in the title too, and makes no element."""
    plain = generate_trace(num_requests=20, seed=1)
    trace = attrs.evolve(plain, source=HOSTILE)
    read = Page(page(gather([trace, plain], ["eager"], server=SMALL, costs=COSTS)))
    assert len(read.named("script")) == 2
    assert not read.named("img")
    assert HOSTILE in "".join(read.texts["title"])
    assert read.texts["h2"][0] == HOSTILE
    assert read.named("a")[0]["href"] == "#trace-0"


def test_a_name_that_isnt_text_can_be_written() -> None:
    """A file's name that isn't UTF-8 doesn't keep the page from being encoded."""
    trace = attrs.evolve(generate_trace(num_requests=5, seed=1), source="caf\udce9.csv")
    html = page(gather([trace], ["vllm"], server=SMALL, costs=COSTS))
    assert "caf?.csv" in html
    html.encode()


def test_the_timelines_data_is_json() -> None:
    """It holds a value a trace, with a name, bins and single steps a run."""
    found = re.search(r'id="data">(.*?)</script>', page(small_report()), re.DOTALL)
    assert found is not None
    (value,) = json.loads(found[1])
    assert [run["name"] for run in value["runs"]] == [run.name for run in small_report().traces[0].runs]
    for run, made in zip(value["runs"], small_report().traces[0].runs, strict=True):
        assert len(run["steps"]) == min(made.result.steps, 1500)
        assert len(run["running"]) == len(run["waiting"]) == len(run["busy"][0])
        assert sum(map(sum, run["busy"])) * run["bin"] / 1e3 == pytest.approx(made.result.step_us, rel=0.02)


def test_nothing_served_is_a_page_too() -> None:
    """A trace whose only request fits no KV has no latency; the page says so."""
    one = generate_trace(num_requests=1, seed=1)
    big = Trace("big", "drawn", [attrs.evolve(one.requests[0], prompt_tokens=10**6)])
    read = Page(page(gather([big], ["eager", "vllm"], server=SMALL, costs=COSTS)))
    assert any("No request has one" in text for text in read.texts["p"])
    assert any("No request of big was served (1 over_kv_capacity)" in text for text in read.texts["p"])


def test_several_ranks_have_no_plan() -> None:
    """Ranks are simulated; sizes are for one, so none are planned, and padding of ranks without rows is counted."""
    server = attrs.evolve(SMALL, ranks=2)
    made = gather([generate_trace(num_requests=20, seed=2)], ["vllm"], server=server, costs=COSTS)
    read = Page(page(made))
    assert not made.traces[0].plans
    assert any("planned for one rank" in text for text in read.texts["li"])
    assert any("Nothing was planned" in text for text in read.texts["p"])


def test_a_service_level_is_what_counts() -> None:
    """With one, the share of good requests is a column, and what policies are compared by."""
    from kpolicy.simulate import ServiceLevel

    server = attrs.evolve(SMALL, service_level=ServiceLevel(ttft_ms=20))
    made = gather([generate_trace(num_requests=40, seed=2)], ["eager", "vllm"], server=server, costs=COSTS)
    (first, *_) = Page(page(made)).rows("Policies on the same arrivals")
    assert first[7][1] == pytest.approx(made.traces[0].runs[0].result.goodput.share)
    assert "share of good requests" in made.traces[0].advice.details[0]


def test_a_level_that_nobody_meets_isnt_what_counts() -> None:
    """All runs would be equal by it: the page says that none meets it, and compares by the time to the last token."""
    from kpolicy.simulate import ServiceLevel

    trace = generate_trace(num_requests=40, seed=2)
    level = attrs.evolve(SMALL, service_level=ServiceLevel(ttft_ms=1e-3))
    met = gather([trace], ["vllm", "eager"], server=SMALL, costs=COSTS).traces[0].advice
    missed = gather([trace], ["vllm", "eager"], server=level, costs=COSTS).traces[0].advice
    assert met.best is not None
    assert missed.best is not None
    assert (missed.best.policy, missed.best.kind) == (met.best.policy, met.best.kind) != ("eager", "own")
    assert missed.sentence == f"No request meets the service level; r{met.sentence[1:]}"
    assert "mean time to the last token, because no request meets the service level" in missed.details[0]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"traces": generate_trace(num_requests=2)}, "traces is Trace.*it takes a list"),
        ({"traces": [None]}, "a trace is None; it takes a Trace"),
        ({"policies": "auto"}, "policies is 'auto'; it takes a list"),
        ({"policies": [get_policy("vllm")]}, "it takes a str"),
        ({"server": {}}, "server is {}; it takes a Server"),
    ],
)
def test_what_a_report_takes_is_named(given: dict[str, Any], said: str) -> None:
    """One trace, one policy's name, an empty server: each would be taken for something else."""
    with pytest.raises(ConfigError, match=said):
        gather(**({"traces": [generate_trace(num_requests=2)], "policies": ["eager"]} | given))


def test_a_ladder_is_given_as_to_simulate() -> None:
    """A list of sizes for every kind of graph, or sizes by kind."""
    trace = generate_trace(num_requests=4, seed=1)
    made = gather([trace], ["vllm"], server=SMALL, costs=COSTS, ladder=[1, 2, 4, 8]).traces[0].runs[0]
    alone = simulate(trace, "vllm", server=SMALL, costs=COSTS, ladder=[1, 2, 4, 8])
    assert (made.kind, made.sizes.piecewise) == ("given", (1, 2, 4, 8))
    assert made.result.as_dict() == alone.as_dict()


def test_what_is_without_bound_sorts_as_the_most() -> None:
    """The page's script reads the key as a number, which JavaScript spells so."""
    assert cell("all", float("inf")) == '<td data-key="Infinity">all</td>'
    assert cell("7.5%", 0.075) == '<td data-key="0.075">7.5%</td>'


def test_a_trace_that_failed_is_told_beside_the_others() -> None:
    """At the top and among the notes, as text; alone it is an error."""
    lost = FailedTrace("<b>.csv", "<b>.csv: no such file.")
    made = gather([lost, generate_trace(num_requests=40, seed=7)], ["eager"], server=SMALL, costs=COSTS)
    assert made.failed == ((0, lost),)
    assert [each.number for each in made.traces] == [1]
    html = page(made)
    assert html.count("&lt;b&gt;.csv: no such file.") == 2
    assert "<b>.csv" not in html
    with pytest.raises(ConfigError, match=r"<b>\.csv: no such file"):
        gather([lost], ["eager"], server=SMALL, costs=COSTS)
