"""What `kpolicy policies` says of what other packages make policies with."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest

from kpolicy.cli import lists
from kpolicy.policies import get_policy
from tests.cli.conftest import Command

EAGER = get_policy("eager")


_ATTRIBUTES = {name: getattr(EAGER, name) for name in dir(EAGER) if not name.startswith("_")}
UNTOLD: Any = type("UNTOLD", (dict,), _ATTRIBUTES)
"""Makes a policy as a class written in C does: Python has no signature of it."""


def _angry() -> Any:
    raise RuntimeError("no licence")


def _many(*sizes: int, **options: Any) -> Any:
    return EAGER


@pytest.fixture
def listed(kpolicy: Command, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[dict[str, Any], str]]:
    """Lists one plugin's policy: its row of ``--json``, and the text."""

    def rows(factory: Any) -> tuple[dict[str, Any], str]:
        from kpolicy import policies

        monkeypatch.setattr(lists, "policy_names", lambda: {"theirs": "fake"})
        monkeypatch.setattr(lists, "factory_of", lambda _: factory)
        monkeypatch.setattr(policies, "factory_of", lambda _: factory)
        (row,) = kpolicy("policies", "--json").json
        return row, kpolicy("policies").out

    return rows


def test_a_factory_without_a_signature_is_usable(listed: Any) -> None:
    """It says what it does where it needs no argument; that its arguments aren't known is no fault of the policy."""
    row, text = listed(UNTOLD)
    assert (row["status"], row["summary"], row["arguments"], row["error"]) == ("usable", EAGER.summary, None, None)
    assert "broken" not in text
    assert "arguments aren't known" in text
    # It needs an argument, and nobody can tell which.
    row, text = listed(operator.itemgetter)
    assert (row["status"], row["summary"], row["arguments"], row["error"]) == ("usable", "", None, None)
    assert "broken" not in text


def test_a_factory_that_raises_or_makes_no_policy_is_broken(listed: Any) -> None:
    """Whether or not it has a signature, with what is wrong."""
    row, text = listed(_angry)
    assert row["status"] == "broken"
    assert "no licence" in row["error"]
    assert "broken: " in text
    # Without a signature too.
    row, _ = listed(dict)
    assert (row["status"], row["arguments"]) == ("broken", {})
    assert "lacks part of the Policy protocol" in row["error"]


def test_arguments_are_those_that_have_a_name(listed: Any) -> None:
    """A factory that takes any is made without one, and lists none."""
    row, _ = listed(_many)
    assert (row["status"], row["summary"], row["arguments"]) == ("usable", EAGER.summary, {})
