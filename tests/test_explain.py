"""`explain`: every way to run a batch, what it would cost, and why it lost, as text, HTML and JSON values."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import attrs
import pytest
from hypothesis import given
from hypothesis import settings as run_settings

from kpolicy.costs import CostTable, Curve, HostCost, analytic_costs
from kpolicy.engine import Engine
from kpolicy.errors import NoLegalModeError
from kpolicy.kv_span import KvSpan
from kpolicy.ladders import CaptureSizes
from kpolicy.modes import Mode
from kpolicy.policies.base import legal_ways
from kpolicy.profiles import load_profile
from kpolicy.settings import Objective, Settings
from kpolicy.shapes import BatchShape
from kpolicy.testing.strategies import cost_tables, shapes

LIMITS = Settings(max_num_reqs=24, max_num_tokens=256)
SIZES = CaptureSizes((1, 4, 24), (64, 256), (16, 256))
MIXED = BatchShape(decodes=[(1, 4)], prefills=[(40, 0), (20, 512)], decode_kv_tokens=4000)


def engine(policy: str = "auto", attention: str = "gqa", **arguments: object) -> Engine:
    return Engine(policy, attention=attention, ladder=SIZES, settings=LIMITS, **arguments)  # type: ignore[arg-type]


class _Cells(HTMLParser):
    """The text of each cell, row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self._in = False

    def handle_starttag(self, tag: str, attrs: object) -> None:  # noqa: ARG002 - the base class's signature
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self._in = True

    def handle_endtag(self, tag: str) -> None:
        self._in = self._in and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._in:
            self.rows[-1][-1] += data


@pytest.mark.parametrize("policy", ["auto", "split", "eager", "vllm"])
@pytest.mark.parametrize("attention", ["gqa", "mla", "none"])
@given(shape=shapes(), costs=cost_tables())
@run_settings(max_examples=25, deadline=None)
def test_every_way_is_there_with_the_chosen_one_first(
    policy: str, attention: str, shape: BatchShape, costs: object
) -> None:
    """The first row is the decision, every legal way has a row with costs, and every other mode says why it isn't."""
    told = engine(policy, attention, costs=costs)
    explanation = told.explain(shape)
    first, *others = explanation.considered
    assert first.chosen
    assert first.label == explanation.decision.label
    assert not any(each.chosen for each in others)
    labels = {each.label for each in explanation.considered if each.cost is not None}
    ways = legal_ways(shape.numbers, told.context, lambda keys, _num_tokens: keys[:1])
    assert {way.mode.value if way.form is None else f"{way.mode.value}/{way.form.value}" for way in ways} <= labels
    modes = {each.label.split("/")[0] for each in explanation.considered}
    assert modes == {mode.value for mode in Mode}
    for each in others:
        assert each.verdict
        assert (each.cost is None) == each.verdict.startswith("not possible")


@given(shape=shapes(), costs=cost_tables())
@run_settings(max_examples=40, deadline=None)
def test_the_chosen_way_of_auto_costs_least_among_those_it_may_take(shape: BatchShape, costs: object) -> None:
    """No other row of `auto` scores below the chosen one, but for those that it says to leave out, and why."""
    told = engine(costs=costs, objective="0.5:0.5")
    explanation = told.explain(shape)
    score = [told.costs.score(each.cost, told.objective) for each in explanation.considered if each.cost]
    others = [each for each in explanation.considered[1:] if each.cost]
    for each, other in zip(others, score[1:], strict=True):
        out = ("delays the prefill rows", "more of the longest", "not 2% shorter")
        assert other >= score[0] or each.verdict.startswith(out)


def test_a_split_that_is_hardly_shorter_says_so() -> None:
    """It is left out, and delays nothing; beside it one that is clearly shorter is chosen."""
    line, shape = Curve((1, 2048), (1.0, 2048.0)), BatchShape(decodes=[(1, 8)], prefills=[(1020, 0)])
    objective = Objective(first_token_limit=1.0)
    for eager_us, chosen in ((1040.0, "eager"), (1060.0, "split/beside")):
        costs = CostTable(
            version="by hand", measured=True, full=line, piecewise=line, eager=line, overlap_cost=0.0,
            host_full=HostCost(10.0), host_piecewise=HostCost(100.0), host_eager=HostCost(eager_us),
        )  # fmt: skip
        ways = Engine("auto", attention="uniform", ladder=[8, 1024], costs=costs, objective=objective).explain(shape)
        assert ways.considered[0].label == chosen
        told = {each.label: each.verdict for each in ways.considered if "PIECEWISE" in each.launches}
        if chosen == "eager":
            wanted = "not 2% shorter than the best way that doesn't divide the batch; -1.5% step time"
            assert told["split/beside"] == wanted, told
    assert told["split/beside"] == "chosen"


def test_decodes_ahead_that_make_long_gaps_more_say_so() -> None:
    """A way that is left out for the gaps it makes says which gaps are long."""
    shape = BatchShape(decodes=[(1, 8)], prefills=[(4000, 0)], max_decode_steps=2, facts={"gap_tail_us": 1000})
    told = Engine("auto", attention="gqa", ladder=[8, 1024], objective="latency")
    verdicts = [each.verdict for each in told.explain(shape).considered if each.label == "split/decodes_beside"]
    assert any(each.startswith("more of the longest gaps, those above 1,000 us") for each in verdicts)


def test_ways_left_out_for_their_gaps_bound_no_other_and_others_are_told_apart() -> None:
    """Of a short `gap_tail_us` only several decode steps are told; what they take for the prompt delays nothing."""
    shape = BatchShape(decodes=[(1, 8)], prefills=[(600, 0)], max_decode_steps=4, facts={"gap_tail_us": 1})
    for limit in (1.0, 1.05, 100.0):
        objective = Objective(step_weight=0.0, gap_weight=1.0, first_token_limit=limit)
        told = Engine("auto", attention="gqa", ladder=[8, 1024], objective=objective)
        ways = told.explain(shape).considered
        several = [each for each in ways if re.search(r" x\d+;", each.launches)]
        assert several
        for each in ways:
            if each.verdict.startswith("more of the longest gaps"):
                assert each in several
    assert not any(each.verdict.startswith("delays the prefill rows") for each in ways)


def test_text_html_and_json_say_the_same() -> None:
    """All three forms carry the shape, the decision, its reason, and each way's costs and verdict."""
    explanation = engine().explain(MIXED)
    text, html, values = str(explanation), explanation._repr_html_(), explanation.as_dict()
    assert json.loads(json.dumps(values)) == values
    parser = _Cells()
    parser.feed(html)
    head, *cells = parser.rows
    assert head == ["way", "launches", "step ms", "gap ms", "bound", "verdict"]
    assert [tuple(row) for row in cells] == explanation.rows()
    for row, way in zip(explanation.rows(), values["considered"], strict=True):
        assert way["way"] == row[0]
        assert way["verdict"] == row[5]
        lines = [line for line in text.splitlines() if line.startswith(row[0])]
        assert any(all(cell in line for cell in row) for line in lines), row
    for form in (text, html):
        assert str(MIXED) in form
        assert explanation.costs in form
    assert values["shape"] == str(MIXED)
    assert explanation.decision.why in text
    assert "analytic, not measured" in text


def test_html_is_escaped() -> None:
    """Graph names with a less-than sign don't end up as markup."""
    import attrs

    told = Engine("full", attention="gqa", ladder=[4, 8], settings=attrs.evolve(LIMITS, max_loras=2))
    html = told.explain(BatchShape.decode(3, num_active_loras=1))._repr_html_()
    assert "lora&lt;=2" in html
    assert "lora<=2" not in html


@pytest.mark.parametrize(
    ("policy", "attention", "shape", "way", "because"),
    [
        ("auto", "mla", BatchShape(prefills=[(8, 0)]), "full", "attention can't be captured for such a batch"),
        ("auto", "gqa", BatchShape.decode(4), "split", "the batch isn't mixed"),
        ("auto", "gqa", BatchShape.decode(4, forbidden={Mode.EAGER}), "eager", "forbidden for this step"),
        ("auto", "gqa", BatchShape(prefills=[(300, 0)]), "piecewise", "more tokens than the largest captured size"),
        ("auto", "none", MIXED, "split", "decode rows have no FULL graph: attention can't be captured"),
        ("auto", "gqa", BatchShape(decodes=[(1, 2)], prefills=[(4, 0)], forbidden={Mode.SPLIT}), "split", "forbidden"),
    ],
)
def test_what_is_not_possible_says_why(policy: str, attention: str, shape: BatchShape, way: str, because: str) -> None:
    """A mode that can't run the batch has a row without costs and with the reason."""
    told = next(each for each in engine(policy, attention).explain(shape).considered if each.label == way)
    assert told.cost is None
    assert because in told.verdict


def test_rules_say_that_they_are_rules() -> None:
    """A policy that reads no costs doesn't claim that costs decided."""
    explanation = engine("split").explain(MIXED)
    lost = [each for each in explanation.considered[1:] if each.cost]
    assert lost
    assert all(each.verdict.startswith("the rule doesn't choose it; ") for each in lost)


@pytest.mark.parametrize("limit", [1.0, 1.25])
def test_a_form_that_the_policy_leaves_out_is_said_to_be_left_out(limit: float) -> None:
    """A cheaper way that `auto` was told not to consider isn't called as cheap, nor later for the prompt."""
    from kpolicy.policies.auto import AutoPolicy

    told = Engine(
        AutoPolicy(forms=()), ladder=CaptureSizes((1, 4), (), (16, 64)), settings=LIMITS, attention="mla",
        objective=Objective(1.0, 0.0, first_token_limit=limit),
    )  # fmt: skip
    explanation = told.explain(BatchShape(decodes=[(1, 4)], prefills=[(64, 0)]))
    best = explanation.considered[0].cost
    cheaper = [each for each in explanation.considered if each.cost and each.cost.step_us < best.step_us]
    assert cheaper
    assert all(each.verdict.startswith("the policy doesn't consider it; -") for each in cheaper)


def test_an_empty_batch_is_explained() -> None:
    """Nothing to run is a way too."""
    explanation = engine().explain(BatchShape())
    assert explanation.considered[0].launches == "nothing to run"
    assert "empty: eager" in str(explanation)


def test_nothing_is_counted_and_an_impossible_step_is_an_error() -> None:
    """Explaining leaves the counters alone, and has no answer where every mode is forbidden."""
    told = engine()
    told.explain(MIXED)
    assert told.stats.total.steps == 0
    with pytest.raises(NoLegalModeError):
        told.explain(BatchShape.decode(4, forbidden=set(Mode)))


def test_a_size_outside_the_table_is_said_to_be_extrapolated() -> None:
    """Where a way has a size that the table's curve of its kind doesn't span, and only there."""
    span = KvSpan(decode_row=1 << 20, decode_step=1 << 20, prefill=1 << 20)
    narrow = attrs.evolve(analytic_costs(), eager=Curve((1, 64), (100.0, 200.0)), measured=True, kv_span=span)
    inside = engine(costs=narrow).explain(BatchShape.decode(4))
    assert inside.costs.endswith("(measured)")
    outside = engine(costs=narrow).explain(BatchShape(prefills=[(100, 0)]))
    assert outside.costs.endswith("(measured; sizes outside the table are extrapolated)")
    assert outside.costs in str(outside)


def test_a_context_outside_the_table_is_said_to_be_extrapolated() -> None:
    """Where the batch has longer contexts than attention was timed at; a table that doesn't know says that."""
    span = KvSpan(decode_row=512, decode_step=2048, prefill=6144)
    costs = attrs.evolve(analytic_costs(), measured=True, kv_span=span)
    assert engine(costs=costs).explain(BatchShape.decode(4, 2048)).costs.endswith("(measured)")
    said = (
        "(measured; attention is extrapolated from contexts of up to 512 tokens a decode row, 2,048 in a step, and "
        "6,144 of prompts)"
    )
    for beyond in (BatchShape.decode(4, 2049), BatchShape.decode(1, 513), BatchShape(prefills=[(145, 6000)])):
        assert engine(costs=costs).explain(beyond).costs.endswith(said)
    unknown = engine(costs=attrs.evolve(costs, kv_span=None)).explain(BatchShape.decode(4))
    assert unknown.costs.endswith("(measured; contexts: not recorded)")
    assert "contexts" not in engine(costs=analytic_costs()).explain(BatchShape.decode(4)).costs


def test_decode_steps_that_wait_for_their_place_are_one_way_once() -> None:
    """They take as long at once, which isn't another way that is as cheap."""
    shape = BatchShape(decodes=[(1, 8)], prefills=[(6000, 0)], max_decode_steps=8)
    objective = Objective(1.0, 0.0, first_token_limit=1.25)
    told = Engine("auto", costs=load_profile("qwen2.5-0.5b-h200").costs, objective=objective).explain(shape)
    (chosen,) = [each for each in told.considered if each.chosen]
    assert "of a slot" in chosen.launches
    assert not [each for each in told.considered if "as cheap" in each.verdict]
