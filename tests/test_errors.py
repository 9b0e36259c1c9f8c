"""Errors as values: what they carry goes with them to another process."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kpolicy import errors
from kpolicy.errors import KPolicyError, TraceError
from kpolicy.keys import GraphKey
from kpolicy.modes import Part
from kpolicy.reasons import Reason
from kpolicy.scheduling.traces import read_trace

CLASSES = [each for name in errors.__all__ if isinstance(each := getattr(errors, name), type)]
KEY = GraphKey(Part.FULL, 8, 8, query_len=1)
GIVEN: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "BudgetRefused": ((Reason.REPLAY_FAILED, "too much"), {}),
    "CaptureError": ((Reason.REPLAY_FAILED, "no graph"), {"seconds": 1.5}),
    "GraphReplayError": ((KEY, "no launch", Reason.REPLAY_FAILED), {"maybe_inputs": True}),
    "TraceError": (("trace.csv", 3, "no number"), {}),
    "UnknownNameError": (("policy", "outo", ["auto", "eager"], "Look."), {}),
    "UpdateStallError": (([KEY], "it waits"), {}),
}
"""What those take that don't take one message"""


def made(kind: type[KPolicyError]) -> KPolicyError:
    args, named = GIVEN.get(kind.__name__, (("what is wrong",), {}))
    return kind(*args, **named)


def fails(kind: type[KPolicyError]) -> None:
    raise made(kind)


@pytest.mark.parametrize("again", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy])  # noqa: S301 - our own
@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_error_survives_pickling_and_copying(kind: type[KPolicyError], again: Any) -> None:
    """Its class, its message and all that it carries."""
    error = made(kind)
    found = again(error)
    assert type(found) is kind
    assert (str(found), found.args, vars(found)) == (str(error), error.args, vars(error))


def test_an_error_with_an_init_of_its_own_is_among_those_tried() -> None:
    """Or the test above would make it in a way that it isn't raised in."""
    assert {kind.__name__ for kind in CLASSES if "__init__" in vars(kind)} == GIVEN.keys()


def test_an_error_of_a_subclass_elsewhere_survives_too() -> None:
    """Plugins have their own."""
    found = pickle.loads(pickle.dumps(Elsewhere("a", beside=2)))  # noqa: S301 - our own
    assert (str(found), found.beside) == ("a!", 2)


class Elsewhere(errors.PluginError):
    """Its message isn't what it is given."""

    def __init__(self, what: str, *, beside: int) -> None:
        self.beside = beside
        super().__init__(f"{what}!")


def test_a_pool_of_processes_hands_errors_on(tmp_path: Path) -> None:
    """It broke where it couldn't read one, and all that it had was lost."""
    with ProcessPoolExecutor(1) as pool:
        with pytest.raises(TraceError, match=r"missing\.csv") as raised:
            pool.submit(read_trace, tmp_path / "missing.csv").result()
        assert raised.value.path == str(tmp_path / "missing.csv")
        for kind in CLASSES:
            with pytest.raises(kind):
                pool.submit(fails, kind).result()
