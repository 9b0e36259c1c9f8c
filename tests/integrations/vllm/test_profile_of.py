"""Whose profile kpolicy-vllm takes: by the rules of `Engine` and `kpolicy run`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from kpolicy.costs import analytic_costs
from kpolicy.schemas import Profile, write_profile
from kpolicy_vllm.started import _profile_costs

HERE = {"device": "NVIDIA H200", "model": "a-model", "tensor_parallel_size": 2}


def found(path: Path, **said: Any) -> tuple[Any, list[tuple[str, str]]]:
    """The costs that are taken of a profile that says so, and what is warned of."""
    measured = said.pop("measured", True)
    write_profile(path, Profile(costs=attrs.evolve(analytic_costs(), measured=measured), **{**HERE, **said}))
    warned: list[tuple[str, str]] = []
    config = SimpleNamespace(
        model_config=SimpleNamespace(model=HERE["model"]), parallel_config=SimpleNamespace(tensor_parallel_size=2)
    )
    state: Any = SimpleNamespace(
        config=SimpleNamespace(profile=str(path)), runner=SimpleNamespace(vllm_config=config),
        counters=SimpleNamespace(warn_once=lambda event, text: warned.append((event, text))),
    )  # fmt: skip
    return _profile_costs(state, HERE["device"]), warned


@pytest.mark.parametrize(
    ("said", "event", "words"),
    [
        ({"device": "NVIDIA B200"}, "other_device", "measured on NVIDIA B200, and this is NVIDIA H200"),
        ({"model": "another"}, "other_model", "measured with another, and this is a-model"),
        ({"tensor_parallel_size": 8}, "other_tensor_parallel_size", "tensor_parallel_size of 8, and this is 2"),
    ],
)
def test_what_was_measured_of_something_else_is_measured_anew(
    said: dict[str, Any], event: str, words: str, tmp_path: Path
) -> None:
    costs, ((warned, text),) = found(tmp_path / "p.json", **said)
    assert (costs, warned) == (None, event)
    assert words in text
    assert "Costs are measured instead" in text


@pytest.mark.parametrize(
    "said", [{}, {"device": ""}, {"model": ""}, {"tensor_parallel_size": None}, {"model": "another", "measured": False}]
)
def test_what_a_profile_leaves_open_is_taken(said: dict[str, Any], tmp_path: Path) -> None:
    """Where it doesn't say, or where nothing was measured."""
    costs, warned = found(tmp_path / "p.json", **said)
    assert costs is not None
    assert not warned
