"""Measured costs say where they were measured, and an Engine on another device doesn't take them."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from kpolicy.costs import CostTable, analytic_costs
from kpolicy.engine import Engine
from kpolicy.errors import ProfileError
from kpolicy.executors.simulated import SimulatedExecutor
from kpolicy.profiles import load_profile
from kpolicy.schemas import Profile, dumps, loads

HERE, THERE = "NVIDIA H200", "NVIDIA B200"


class OnDevice(SimulatedExecutor):
    """Says which device it is."""

    device_name = HERE


def measured(device: str) -> CostTable:
    return Profile(costs=attrs.evolve(analytic_costs(), measured=True, version="t1"), device=device, model="m").costs


def test_costs_of_another_device_are_refused() -> None:
    """The error names the table, both devices and what to do."""
    with pytest.raises(ProfileError, match=rf"costs 't1' were measured on {THERE}, .* runs on {HERE}\. Leave costs"):
        Engine(costs=measured(THERE), executor=OnDevice())


def test_an_engine_that_runs_does_not_take_them_either() -> None:
    """And goes on by those that it has."""
    engine = Engine(costs=measured(HERE), executor=OnDevice())
    with pytest.raises(ProfileError, match=f"measured on {THERE}"):
        engine.take_costs(measured(THERE))
    assert engine.costs.measured_on == HERE
    engine.take_costs(attrs.evolve(measured(HERE), version="t2"))
    assert engine.costs.version == "t2"


@pytest.mark.parametrize(
    "costs", [measured(HERE), attrs.evolve(measured(THERE), measured_on=""), analytic_costs()],
    ids=["of this device", "of nobody knows which", "analytic"],
)  # fmt: skip
def test_other_costs_are_taken(costs: CostTable) -> None:
    """Of the same device, of one that isn't said, and analytic ones."""
    assert Engine(costs=costs, executor=OnDevice()).costs is costs


@pytest.mark.parametrize("executor", [None, "simulated"])
def test_who_says_no_device_takes_all(executor: Any) -> None:
    """Deciding and simulating for another device is what profiles are for."""
    assert Engine(costs=measured(THERE), executor=executor).costs.measured_on == THERE


def test_a_file_says_the_device_once() -> None:
    """It is the profile's; the table that is read has it too, and equals the one that was written."""
    costs = measured(THERE)
    text = dumps(Profile(costs=costs, device=THERE, model="m"))
    assert text.count(THERE) == 1
    read = loads(text, Profile).costs
    assert read == costs
    assert read.measured_on == THERE


def test_a_profile_that_ships_says_its_device() -> None:
    profile = load_profile("qwen2.5-0.5b-h200")
    assert profile.costs.measured_on == profile.device != ""
