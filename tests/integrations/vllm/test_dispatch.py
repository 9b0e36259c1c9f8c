"""Answers prepared by counts, without vLLM."""

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kpolicy.attention.support import Claims
from kpolicy.costs import Curve, analytic_costs
from kpolicy.keys import GraphKey
from kpolicy.modes import Mode, Part
from kpolicy.settings import Settings
from kpolicy_vllm.config import Config
from kpolicy_vllm.dispatch import WITHIN_DOUBT, Chooser
from kpolicy_vllm.ladder import sizes_of
from kpolicy_vllm.state import State
from kpolicy_vllm.steps import Step, classes, numbers_of
from kpolicy_vllm.watch import summary

SETTINGS = Settings(max_num_reqs=64, max_num_tokens=1024)


def chooser(policy="full_and_piecewise", settings=SETTINGS):
    """A chooser whose answers are the keys themselves, everything captured."""
    state = State(Config(policy=policy), settings)
    state.claims = Claims.at_level("mixed")
    made = Chooser(state, lambda tokens, reqs: ("eager", tokens, reqs), lambda part, desc: (part, desc))
    state.dispatcher = made
    keys = state.policy.plan(sizes_of(state.config, settings) or state.policy.sizes(settings), state.claims, settings)
    made.set_keys({key: key for key in keys})
    for key in keys:
        state.registry.capture(key, bytes=1, seconds=0.0)
    state.timed = state.costs = analytic_costs()
    state.graphs_captured()
    return made


@given(st.integers(1, 3000))
def test_classes(most):
    """Every number of decodes has a class, whose middle is within a factor of two of it."""
    class_of, middles = classes(most)
    assert len(class_of) == most + 1
    for number in {1, most // 2 or 1, most}:
        assert number / 2 <= middles[class_of[number]] <= 2 * number
    assert middles[class_of[0]] == 0


@given(st.integers(1, 64), st.integers(0, 64), st.integers(1, 4), st.booleans(), st.integers(0, 500))
def test_numbers_add_up(reqs, decodes, query_len, uniform, more):
    """The rows of the plain numbers have the step's tokens and requests, and SPLIT is forbidden."""
    decodes = min(decodes, reqs)
    tokens = reqs * query_len if uniform else reqs + more + (reqs - decodes)
    step = Step(tokens, reqs, reqs if uniform else decodes, query_len if uniform else 0)
    numbers = numbers_of(step, query_len)
    assert (numbers.total_tokens, numbers.total_reqs) == (tokens, reqs)
    assert numbers.num_decodes + numbers.num_prefills == reqs
    assert numbers.decode_tokens + numbers.num_prefill_tokens == tokens
    assert numbers.forbidden & Mode.SPLIT.bit
    assert (numbers.longest_query * reqs == tokens and not numbers.num_prefills) >= uniform


@pytest.mark.parametrize("policy", ["full_and_piecewise", "auto", "piecewise", "full", "eager"])
def test_cells_equal_the_policy(policy):
    """A prepared cell is what the policy says of the class's middle, at the step's own tokens, where that is sure."""
    made = chooser(policy)
    made.prepare()
    class_of, middles = classes(64)
    for tokens in (1, 2, 17, 64, 65, 300, 512, 513, 1000, 1024):
        for decodes in (0, 1, 5, 63):
            entry = made.cell(tokens, decodes)
            shown = min(middles[class_of[decodes]], tokens - 1, 63) if tokens <= made.largest else 0
            decision = made.state.select(*numbers_of(Step(tokens, shown + 1, shown), 1))
            assert entry.decision == decision or entry.label[1] == WITHIN_DOUBT
            assert entry.label[1] != WITHIN_DOUBT or (policy, decision.mode) == ("auto", Mode.EAGER)
            assert entry.step.num_tokens == tokens


def test_tallies_survive_a_refresh():
    """Steps, tokens and padding count on when the prepared answers are dropped."""
    made = chooser()
    for _ in range(3):
        made.entry(Step(5, 5, 5, 1, 1)).count += 1
    made.refresh()
    made.entry(Step(5, 5, 5, 1, 1)).count += 1
    assert made.tallies() == {("full", "graph_fits"): (4, 20, 12)}
    made.count_hits()
    (record,) = [each for each in made.state.registry.records() if each.hits]
    assert record.hits == 4


def test_own_rule():
    """vLLM's rule over the ladders: the next FULL graph, else the next in pieces, else none."""
    made = chooser()
    steps = [Step(5, 5, 5, 1, 1), Step(70, 9, 8), Step(600, 1, 0), Step(1024, 1, 0)]
    entries = [made.agreed(step) for step in steps]
    assert [entry.key and entry.key.part for entry in entries] == [Part.FULL, Part.FULL, Part.PIECEWISE, Part.PIECEWISE]
    assert made.agreed(Step(5, 5, 5, 1, 1, forbidden=Mode.FULL.bit)).key.part is Part.PIECEWISE
    assert made.agreed(Step(5, 5, 5, 1, 1, forbidden=Mode.FULL.bit | Mode.PIECEWISE.bit)).key is None


def test_summary():
    """The line has shares by mode, padding, and the reasons, of the steps since the last."""
    before = {("full", "graph_fits"): (10, 100, 0)}
    now = {("full", "graph_fits"): (19, 190, 10), ("eager", "above_largest_size"): (1, 10, 0)}
    assert summary(before, now, {"policy_failed": 2}, 60.0) == (
        "10 steps in 60 s: full 90.0%, eager 10.0%; padding 10.0%; graph_fits 9, above_largest_size 1; policy_failed 2"
    )
    assert summary(now, now, {}, 60.0) == ""


def test_whole_graphs_of_mixed_batches_have_costs_of_their_own():
    """Where they are slower than pieces, pieces are taken; decodes keep their whole graphs."""
    made = chooser("auto")
    assert made.cell(100, 5).key == GraphKey(Part.FULL, 128, 64)
    slow = Curve((1, 4096), (9e5, 9e5))
    made.state.install_costs(attrs.evolve(made.state.costs, mixed=slow))
    assert made.cell(100, 5).key.part is Part.PIECEWISE
    assert made.entry(Step(64, 64, 64, 1, 1)).key.decode_only


def test_a_policy_that_cannot_be_prepared_leaves_vllm_s_rule(caplog):
    """Whoever prepares it: at the start, and when a graph was captured between steps."""

    class Broken:
        """Raises when it is prepared."""

        reads_costs = False

        def compile(self, context):
            raise KeyError(context.ladder.version)

    made = chooser()
    made.state.policy = Broken()
    with caplog.at_level("WARNING"):
        made.state.recompile()
        made.state.recompile()
    assert made.state.broken
    assert made.state.select is None
    assert made.cell(100, 5).label == ("full", "vllm_rule")
    assert made.state.counters.counts["policy_failed"] == 1
    assert sum("raised when prepared" in record.getMessage() for record in caplog.records) == 1
