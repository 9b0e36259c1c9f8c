"""Reasons and their documentation."""

import re
from pathlib import Path

from kpolicy.errors import GraphReplayError
from kpolicy.reasons import Basis, Reason

ROOT = Path(__file__).parent.parent


def test_every_reason_is_documented_with_its_sentence():
    """docs/reasons.md has one entry for each reason, with the reason's own sentence and something to do."""
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+) \|$", (ROOT / "docs" / "reasons.md").read_text(), re.M)
    documented = {value: (text, to_do) for value, text, to_do in rows}
    assert len(rows) == len(documented)
    assert set(documented) == {reason.value for reason in Reason}
    for reason in Reason:
        text, to_do = documented[reason.value]
        assert text.rstrip(".").lower() == reason.text.lower()
        assert to_do


def test_withdrawn_graphs_may_be_over_a_budget():
    """Its entry says what to do about a budget too: such graphs never failed."""
    page = (ROOT / "docs" / "reasons.md").read_text()
    (to_do,) = re.findall(rf"^\| `{Reason.GRAPH_WITHDRAWN}` \| .+? \| (.+) \|$", page, re.M)
    assert "`budget_...`: raise that budget, or let `kpolicy plan` choose sizes within it" in to_do


def test_every_reason_is_said_somewhere():
    """No reason is listed that nothing gives."""
    code = "\n".join(path.read_text() for path in (ROOT / "kpolicy").rglob("*.py") if path.name != "reasons.py")
    assert [reason.name for reason in Reason if f"Reason.{reason.name}" not in code] == []


def test_reasons_print_as_their_values():
    """A reason's text form is what logs and counters carry."""
    assert [str(reason) for reason in Reason] == [reason.value for reason in Reason]
    assert Reason("graph_fits") is Reason.GRAPH_FITS


def test_basis_says_what_it_stands_for():
    """A basis lists its parts by name and in one sentence; none is empty."""
    basis = Basis.LADDER_ASSUMED | Basis.COSTS_ANALYTIC
    assert basis.names == ("ladder_assumed", "costs_analytic")
    assert basis.text == "assuming the planned ladder captured and analytic costs"
    assert Basis.NOTHING.text == ""


def test_a_replay_fails_for_a_reason_that_is_one():
    """A plugin's text isn't a reason: it would stand in the registry, where snapshots can't write it."""
    assert GraphReplayError(None, "gone", Reason.ADDRESS_CHANGED).reason is Reason.ADDRESS_CHANGED
    assert GraphReplayError(None, "gone", "my reason").reason is Reason.REPLAY_FAILED
    assert GraphReplayError(None, "gone").reason is Reason.REPLAY_FAILED
