"""`Stats`: what an Engine ran, by mode and by reason."""

from __future__ import annotations

import json
import math

from hypothesis import given
from hypothesis import strategies as st

from kpolicy.decision import Decision, Launch
from kpolicy.keys import GraphKey
from kpolicy.modes import Mode, Part, Rows, SplitForm
from kpolicy.observe import ModeStats, Stats, padding_per_token, padding_text
from kpolicy.reasons import Basis, Reason
from kpolicy.shapes import BatchNumbers, BatchShape

FULL8 = GraphKey(Part.FULL, 8, 8, query_len=1)
FULL = Decision(Mode.FULL, (Launch(Rows.ALL, FULL8),), Reason.GRAPH_FITS, basis=Basis.LADDER_ASSUMED)
EAGER = Decision(Mode.EAGER, (Launch(Rows.ALL, None),), Reason.ABOVE_LARGEST_SIZE, basis=Basis.SUPPORT_ASSUMED)
PADDED = Decision(Mode.EAGER, (Launch(Rows.ALL, None, padded_tokens=64),), Reason.RANK_NEEDS_EAGER)
SPLIT = Decision(
    Mode.SPLIT,
    (Launch(Rows.DECODE, FULL8, repeat=4), Launch(Rows.PREFILL, None, stream=1, reason=Reason.NO_PIECEWISE)),
    Reason.DECODES_KEEP_GRAPH,
    SplitForm.DECODES_BESIDE,
)
MIXED = BatchShape(decodes=[(1, 6)], prefills=[(40, 0)]).numbers


def test_padding_is_of_the_tokens_that_were_asked_for() -> None:
    """Nine tokens in a graph of 16 are 7 more, 78%; nothing at all isn't padding, padding alone is without bound."""
    assert padding_per_token(16 - 9, 9) == 7 / 9
    assert padding_per_token(0, 0) == padding_per_token(0, 5) == 0.0
    assert padding_per_token(8, 0) == math.inf


def test_padding_without_tokens_is_told_as_all() -> None:
    """No table shows a percentage without bound."""
    assert [padding_text(*each) for each in ((7, 9), (0, 0), (8, 0))] == ["77.8%", "0.0%", "all"]


def test_nothing_was_counted_yet() -> None:
    """Fresh counters are zero, in every form."""
    stats = Stats()
    assert stats.total == ModeStats()
    assert stats.by_mode == stats.by_reason == stats.half_reasons == {}
    assert stats.basis is Basis.NOTHING
    assert str(stats) == "0 steps"


def test_steps_tokens_padding_and_time_are_summed_by_mode_and_reason() -> None:
    """Each step adds its own tokens, padding and time, repeats and eager padding included."""
    stats = Stats()
    stats.add(FULL, BatchShape.decode(5).numbers, 10.0)
    stats.add(FULL, BatchShape.decode(8).numbers, 20.0)
    stats.add(EAGER, MIXED, 300.0)
    stats.add(PADDED, MIXED, 5.0)
    stats.add(SPLIT, MIXED, 50.0)
    assert stats.by_mode == {
        "full": ModeStats(2, 13, 3, 30.0),
        "eager": ModeStats(2, 46 + 46, 64 - 46, 305.0),
        "split/decodes_beside": ModeStats(1, 4 * 6 + 40, 4 * 2, 50.0),
    }
    assert {reason: each.steps for reason, each in stats.by_reason.items()} == {
        "graph_fits": 2,
        "above_largest_size": 1,
        "rank_needs_eager": 1,
        "decodes_keep_graph": 1,
    }
    assert stats.half_reasons == {"no_piecewise": 1}
    assert stats.total == ModeStats(5, 13 + 92 + 64, 3 + 18 + 8, 385.0)
    assert stats.basis == Basis.LADDER_ASSUMED | Basis.SUPPORT_ASSUMED


@given(st.lists(st.sampled_from([FULL, EAGER, PADDED, SPLIT]), max_size=30))
def test_every_grouping_adds_up_to_the_total(decisions: list[Decision]) -> None:
    """However steps are grouped, none is lost or counted twice, and the most frequent group comes first."""
    stats = Stats()
    numbers = BatchShape(decodes=[(1, 6)], prefills=[(2, 0)]).numbers
    for decision in decisions:
        stats.add(decision, numbers, 1.5)
    for groups in (stats.by_mode, stats.by_reason, stats.by_mode_and_reason):
        total = ModeStats()
        for group in groups.values():
            total.add(group)
        assert total == stats.total
        counts = [group.steps for group in groups.values()]
        assert counts == sorted(counts, reverse=True)
    assert stats.total.steps == len(decisions)
    assert stats.total.padding == sum(decision.padding(numbers) for decision in decisions)


@given(
    st.lists(st.tuples(st.sampled_from([FULL, PADDED, SPLIT]), st.integers(1, 8), st.sampled_from([0.0, 90.0, 3e4])))
)
def test_steps_counted_together_are_those_counted_one_by_one(steps: list[tuple[Decision, int, float]]) -> None:
    """Steps, tokens, padding, times and their buckets are the same."""
    single, together = Stats(), Stats()
    batches: dict[Decision, list[tuple[BatchNumbers, float]]] = {}
    for decision, num_decodes, us in steps:
        numbers = BatchShape(decodes=[(1, num_decodes)], prefills=[(2, 0)]).numbers
        single.add(decision, numbers, us)
        batches.setdefault(decision, []).append((numbers, us))
    for decision, batch in batches.items():
        together.add_all(decision, batch)
    assert together.by_mode_and_reason == single.by_mode_and_reason
    assert together.times_by_mode == single.times_by_mode
    assert together.total.padding == sum(
        decision.padding(numbers) for decision, batch in batches.items() for numbers, _ in batch
    )


def test_counters_as_json_and_in_words() -> None:
    """The counters are plain JSON values, and print a line a mode and reason."""
    stats = Stats()
    stats.add(SPLIT, MIXED, 50.0)
    stats.add(FULL, BatchShape.decode(5).numbers)
    stats.replay_failures = 2
    values = stats.as_dict()
    assert json.loads(json.dumps(values)) == values
    assert (values["steps"], values["replay_failures"], values["assumes"]) == (2, 2, ["ladder_assumed"])
    assert values["modes"]["full"] == {"steps": 1, "tokens": 5, "padding": 3, "us": 0.0}
    assert values["reasons"] == {"decodes_keep_graph": 1, "graph_fits": 1}
    assert values["eager_halves"] == {"no_piecewise": 1}
    lines = str(stats).splitlines()
    assert lines[0] == "2 steps"
    assert any("split/decodes_beside" in line and "decodes_keep_graph" in line for line in lines)
