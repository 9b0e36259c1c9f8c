"""A phase: what replays by size, what it costs, and what was counted."""

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kpolicy.costs import Curve
from kpolicy.modes import Mode
from kpolicy.reasons import Reason
from kpolicy.settings import Objective
from kpolicy_sglang.counters import buckets, lines, summary
from kpolicy_sglang.phase import DECODE, NOISE, PREFILL, MixedCost, Phase, table_of

SIZES = st.lists(st.integers(1, 600), min_size=1, max_size=8, unique=True).map(sorted)


@given(SIZES, st.integers(1, 700))
def test_sglangs_rule_until_costs_are_known(sizes, tokens):
    """Before anything is measured prefill pads to at most twice, and decode without limit, as SGLang does."""
    prefill, decode = Phase(PREFILL, sizes, 700, full=False), Phase(DECODE, sizes, 700, full=True)
    bucket = prefill.bucket(tokens)
    assert prefill.replays(tokens) == (bucket is not None and bucket <= 2 * tokens)
    assert decode.replays(tokens) == (bucket is not None)


@given(SIZES, st.integers(1, 700), st.integers(1, 10_000), st.integers(1, 10_000), st.integers(0, 20))
def test_the_cheaper_one_by_measured_costs(sizes, tokens, graph_us, eager_us, per_token):
    """With costs a batch replays where the graph it would be padded to takes no longer, but for what is noise."""
    phase = Phase(PREFILL, sizes, 700, full=False)
    costs = table_of("test", {size: graph_us + per_token * size for size in sizes}, {1: eager_us, 700: eager_us})
    phase.install("auto", costs, Objective())
    bucket = phase.bucket(tokens)
    if bucket is None:
        assert not phase.replays(tokens)
        assert phase.decision(tokens).reason is Reason.ABOVE_LARGEST_SIZE
        return
    cost = graph_us + per_token * bucket
    if cost == pytest.approx(eager_us * (1 + NOISE)):
        return
    assert phase.replays(tokens) == (cost < eager_us * (1 + NOISE))
    assert phase.us(tokens) == pytest.approx(cost if phase.replays(tokens) else eager_us)


@pytest.mark.parametrize(("many_us", "decodes", "us"), [(300, 2, 100), (300, 32, 300), (300, 17, 200), (50, 32, 100)])
def test_what_decodes_cost_in_a_mixed_batch(many_us, decodes, us):
    """A line through the few and the many, which never falls with more decodes."""
    assert MixedCost(Curve((1,), (100,)), Curve((1,), (many_us,)), 2, 32).us(500, decodes) == us


def test_crossover_by_tokens():
    """MLA's graph wins small prompts and loses large ones, between captured sizes too."""
    phase = Phase(PREFILL, (64, 1024, 2048), 8192, full=False)
    phase.install(
        "auto", table_of("test", {64: 11_400, 1024: 24_600, 2048: 46_000}, {64: 41_000, 2048: 43_300}), Objective()
    )
    assert [phase.replays(tokens) for tokens in (1, 64, 900, 1024, 1025, 2048)] == [True] * 4 + [False] * 2


def test_padding_beyond_twice_where_it_is_cheaper():
    """A prompt of 10 tokens replays the graph of 64: SGLang's fixed limit would refuse it."""
    phase = Phase(PREFILL, (64, 512), 1024, full=False)
    assert not phase.replays(10)
    phase.install("auto", table_of("test", {64: 5_000, 512: 5_300}, {1: 12_000, 512: 12_400}), Objective())
    assert phase.replays(10)
    assert phase.decision(10).reason is Reason.CHEAPEST_MEASURED


@given(st.dictionaries(st.integers(1, 500), st.integers(1, 9999), min_size=1, max_size=9))
def test_measured_graphs_never_seem_cheaper_when_larger(us):
    """SGLang pads to the next size, so the decision is never another graph than it replays."""
    phase = Phase(DECODE, sorted(us), 500, full=True)
    phase.install("auto", table_of("test", us, {1: 10_000}), Objective())
    for size in range(1, max(us) + 1):
        decision = phase.decision(size)
        if decision.mode is not Mode.EAGER:
            assert decision.keys[0].num_tokens == phase.bucket(size)


def test_policy_that_reads_costs_waits_for_them():
    """Without costs `auto` isn't taken: SGLang's own rule stays."""
    phase = Phase(PREFILL, (64,), 100, full=False)
    phase.install("auto", None, Objective())
    assert phase.policy == "sglang"
    phase.install("full_and_piecewise", None, Objective())
    assert phase.policy == "full_and_piecewise"
    assert phase.replays(1)


def test_counters_add_up():
    """Steps, tokens and padding by mode and reason; refused steps are eager with SGLang's reason.

    Padding in percent is of the tokens that were asked for: 56 of 264.
    """
    phase = Phase(PREFILL, (64, 128), 200, full=False)
    for size in (64, 100, 100, 20, 200, 900):
        phase.ran(size, None)
    phase.was_refused(70, None, Reason.INPUT_EMBEDDINGS)
    found = {(line.mode, line.reason): line[3:] for line in lines(phase)}
    assert found == {
        ("piecewise", "graph_fits"): (3, 264, 56),
        ("eager", "padding_over_limit"): (1, 20, 0),
        ("eager", "above_largest_size"): (2, 401, 0),
        ("eager", "input_embeddings"): (1, 70, 0),
    }
    assert buckets(phase) == {64: 1, 128: 2}
    assert "prefill piecewise (graph_fits): 3 steps, 21.2% padding" in summary({"prefill": phase})


def test_drafts_are_tokens_of_a_row():
    """A phase of width 4 counts its padding in tokens."""
    phase = Phase(DECODE, (2, 8), 8, full=True, width=4)
    phase.ran(3, None)
    assert [line[3:] for line in lines(phase)] == [(1, 12, 20)]
    assert phase.keys[0].num_tokens == 8


def test_within_noise_the_graph_is_taken():
    """A graph that takes a percent longer replays: it leaves the host free; three percent longer doesn't.

    The table has what was measured all the same, and so has what SPLIT compares.
    """
    for graph_us, replays, reason in (
        (990, True, Reason.CHEAPEST_MEASURED), (1010, True, Reason.GRAPH_FITS), (1030, False, Reason.EAGER_IS_CHEAPER),
    ):  # fmt: skip
        phase = Phase(PREFILL, (64,), 100, full=False)
        phase.install("auto", table_of("test", {64: graph_us}, {1: 1000}), Objective())
        assert phase.replays(64) is replays
        assert phase.decision(64).reason is reason
        assert phase.us(64) == (graph_us if replays else 1000)
        assert phase.costs.eager.at(64) == 1000


@pytest.mark.parametrize("bad", ["raises", "no decision"])
@pytest.mark.parametrize("kind", [DECODE, PREFILL])
def test_policy_that_fails_is_stood_in_for(kind, bad, caplog):
    """SGLang's own rule decides each size that the policy can't, with one warning and a count."""

    def select(*_):
        if bad == "raises":
            raise RuntimeError("no such table")
        return "eager"

    phase, rule = (Phase(kind, (64, 128), 300, full=kind == DECODE) for _ in range(2))
    phase._select = select
    with caplog.at_level("WARNING"):
        found = [phase.replays(size) for size in (1, 40, 100, 100, 200)]
    assert found == [rule.replays(size) for size in (1, 40, 100, 100, 200)]
    assert len(caplog.records) == 1
    assert "SGLang's own rule decides" in caplog.text
    assert phase.failures.total == 3
    phase.ran(100, None)
    assert [line.steps for line in lines(phase)] == [1]
    assert "kpolicy raised 3 times" in summary({kind: phase}, phase.failures)


def test_little_padding_keeps_the_graph():
    """Between two measured sizes a graph as fast as eager steps of its size is taken where it is nearly full."""
    eager_us = {64: 2000, 4096: 16_000, 4608: 18_000}
    level, absorbed = (Phase(PREFILL, (4096, 4608), 8192, full=False) for _ in range(2))
    level.install("auto", table_of("test", {4096: 16_000, 4608: 18_000}, eager_us), Objective())
    assert [level.replays(size) for size in (4000, 4095, 4200, 4600, 4608)] == [True] * 5
    assert not level.replays(2048)
    absorbed.install("auto", table_of("test", {4096: 19_000, 4608: 22_000}, eager_us), Objective())
    assert not any(absorbed.replays(size) for size in (4000, 4095, 4200, 4608))


def test_all_sizes_are_decided_at_once():
    """And costed, so that no step waits for either; the decisions are those of the steps."""
    phase, asked = Phase(PREFILL, (64, 1024), 2048, full=False), []
    phase.install("auto", table_of("test", {64: 100, 1024: 300}, {1: 200, 1024: 400}), Objective())
    select = phase._select
    phase._select = lambda *numbers: asked.append(numbers) or select(*numbers)
    phase.decide_all()
    assert len(asked) == 2048
    assert [phase.replays(size) for size in (1, 64, 1000, 1025)] == [True, True, True, False]
    assert phase.us(64) == 100
    assert len(asked) == 2048


def test_a_decision_that_cannot_be_costed_is_left_to_sglang():
    """Of its size alone: what waits asks for its cost, and SGLang starts."""
    phase = Phase(PREFILL, (64, 1024), 2048, full=False)
    phase.install("auto", table_of("test", {64: 100, 1024: 300}, {1: 200, 1024: 400}), Objective())
    select = phase._select
    phase._select = lambda *numbers: (
        attrs.evolve(select(*numbers), launches=("x",)) if numbers[5] == 64 else select(*numbers)
    )
    phase.decide_all()
    assert phase.failures.total == 1
    assert (phase.decision(64).reason, phase.us(64)) == (phase._by_own_rule(*phase.numbers(64)).reason, 100)
    phase.decide_all()
    assert (phase.us(63), phase.us(1000)) == (100, 300)


def test_a_policy_that_raises_is_not_asked_of_all_sizes():
    """It is of each as it comes, as ever."""
    phase = Phase(PREFILL, (64, 1024), 2048, full=False)
    phase._select = lambda *_: 1 / 0
    phase.decide_all()
    assert phase.failures.total == 1
