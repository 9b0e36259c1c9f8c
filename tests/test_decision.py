"""Decisions and launches: padding, labels, sentences and JSON values."""

from __future__ import annotations

import json

import pytest

from kpolicy.decision import Decision, Launch
from kpolicy.errors import ConfigError, UnknownNameError
from kpolicy.keys import GraphKey
from kpolicy.modes import ALL_MODES, Mode, Part, Rows, SplitForm, forbidden_mask, parse_mode
from kpolicy.reasons import Basis, Reason
from kpolicy.shapes import BatchShape

FULL8 = GraphKey(Part.FULL, 8, 8, query_len=1)
PIECE64 = GraphKey(Part.PIECEWISE, 64)
MIXED = BatchShape(decodes=[(1, 6)], prefills=[(40, 0), (10, 7)]).numbers
FULL = Decision(Mode.FULL, (Launch(Rows.ALL, FULL8),), Reason.GRAPH_FITS)
SPLIT = Decision(
    Mode.SPLIT,
    (Launch(Rows.DECODE, FULL8, repeat=4), Launch(Rows.PREFILL, None, stream=1, reason=Reason.ABOVE_LARGEST_SIZE)),
    Reason.CHEAPEST_ANALYTIC,
    SplitForm.DECODES_BESIDE,
    Basis.COSTS_ANALYTIC | Basis.LADDER_ASSUMED,
    "costs-1",
)


def test_padding_is_what_the_graph_has_beyond_the_rows() -> None:
    """Padding counts each repeat of a graph; eager launches have none unless they are padded too."""
    assert FULL.padding(BatchShape.decode(5).numbers) == 3
    assert SPLIT.launches[0].padding(MIXED) == (8 - 6) * 4
    assert SPLIT.launches[1].padding(MIXED) == 0
    assert SPLIT.padding(MIXED) == 8
    assert Launch(Rows.ALL, None, padded_tokens=64).padding(MIXED) == 64 - 56
    assert Launch(Rows.PREFILL, PIECE64).padding(MIXED) == 14


@pytest.mark.parametrize(("rows", "tokens"), [(Rows.ALL, 56), (Rows.DECODE, 6), (Rows.PREFILL, 50)])
def test_a_launch_counts_its_own_rows(rows: Rows, tokens: int) -> None:
    """Tokens of a launch are those of its rows, for one repeat; its size is with their padding."""
    assert Launch(rows, None, repeat=3).num_tokens(MIXED) == tokens
    assert Launch(rows, None, repeat=3).size(MIXED) == tokens
    assert Launch(rows, None, padded_tokens=64).size(MIXED) == Launch(rows, PIECE64).size(MIXED) == 64


def test_keys_parts_and_steps() -> None:
    """A decision lists the graphs that replay, and how many decode steps it runs."""
    assert SPLIT.keys == (FULL8,)
    assert [launch.part for launch in SPLIT.launches] == [Part.FULL, None]
    assert (SPLIT.decode_steps, FULL.decode_steps) == (4, 1)
    assert Decision(Mode.EAGER, (), Reason.EMPTY_BATCH).decode_steps == 1


def test_why_names_the_reason_the_eager_half_and_what_is_assumed() -> None:
    """One sentence says all that the decision rests on."""
    assert FULL.why == Reason.GRAPH_FITS.text
    assert SPLIT.why == (
        f"{Reason.CHEAPEST_ANALYTIC.text}; prefill rows run eagerly: {Reason.ABOVE_LARGEST_SIZE.text} "
        "(assuming the planned ladder captured and analytic costs)"
    )


def test_decisions_in_words() -> None:
    """A decision prints its label, launches and reason."""
    assert str(FULL) == f"full [all: FULL 8t/8r q=1] because {Reason.GRAPH_FITS.text}"
    assert str(SPLIT).startswith("split/decodes_beside [decode: FULL 8t/8r q=1 x4; prefill: eager on stream 1] because")
    assert (FULL.label, SPLIT.label) == ("full", "split/decodes_beside")


def test_json_values_carry_everything() -> None:
    """`as_dict` is plain JSON, with tokens and padding where the batch is given."""
    values = SPLIT.as_dict(MIXED)
    assert json.loads(json.dumps(values)) == values
    assert values == {
        "mode": "split",
        "form": "decodes_beside",
        "launches": [
            {"rows": "decode", "graph": str(FULL8), "tokens": 6, "padding": 8, "stream": 0, "repeat": 4},
            {
                "rows": "prefill",
                "graph": None,
                "tokens": 50,
                "padding": 0,
                "stream": 1,
                "repeat": 1,
                "reason": "above_largest_size",
            },
        ],
        "reason": "cheapest_analytic",
        "why": SPLIT.why,
        "assumes": ["ladder_assumed", "costs_analytic"],
        "costs": "costs-1",
    }
    assert FULL.as_dict()["launches"] == [{"rows": "all", "graph": str(FULL8), "stream": 0, "repeat": 1}]
    assert FULL.as_dict()["costs"] is None


def test_decisions_are_values() -> None:
    """Equal decisions are one key of a mapping, which counters rely on."""
    again = Decision(Mode.FULL, (Launch(Rows.ALL, GraphKey(Part.FULL, 8, 8, query_len=1)),), Reason.GRAPH_FITS)
    assert {FULL: 1}[again] == 1
    assert again != Decision(Mode.FULL, FULL.launches, Reason.NEXT_MODE)


def test_modes_by_name() -> None:
    """Modes are found by name in any case, and a near miss is suggested."""
    assert all(parse_mode(mode.value.upper()) is mode for mode in ALL_MODES)
    with pytest.raises(UnknownNameError, match="unknown mode 'ful'; did you mean 'full'"):
        parse_mode("ful")
    assert forbidden_mask([]) == 0
    assert forbidden_mask(Mode) == 15
    assert len({mode.bit for mode in Mode}) == 4


def test_a_basis_of_nothing_assumes_nothing() -> None:
    """What a decision takes for granted is named flag by flag."""
    assert (Basis.NOTHING.text, Basis.NOTHING.names) == ("", ())
    every = Basis.LADDER_ASSUMED | Basis.SUPPORT_ASSUMED | Basis.COSTS_ANALYTIC
    assert every.names == ("ladder_assumed", "support_assumed", "costs_analytic")


def test_each_reason_is_a_sentence_of_its_own() -> None:
    """Values are the lower-case names, and no two reasons say the same."""
    assert all(reason.value == reason.name.lower() == str(reason) for reason in Reason)
    assert len({reason.text for reason in Reason}) == len(Reason)


@pytest.mark.parametrize("value", [-0.1, 1, 1.0, 7, float("nan"), "0.5", True])
def test_a_share_of_a_slot_is_below_one(value: object) -> None:
    with pytest.raises(ConfigError, match=r"wait_share is .* from 0 up and below 1"):
        Launch(Rows.DECODE, None, wait_share=value)  # type: ignore[arg-type]
