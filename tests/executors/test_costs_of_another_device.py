"""Measured costs say where and with what they were measured; an Engine of another device or model refuses them."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest

from kpolicy.costs import CostTable, analytic_costs
from kpolicy.engine import Engine
from kpolicy.errors import ProfileError, RankError, SchemaError
from kpolicy.executors.simulated import SimulatedExecutor
from kpolicy.profiles import load_profile
from kpolicy.schemas import Profile, dumps, loads
from kpolicy.testing import ThreadCommunicator, run_ranks
from kpolicy.what_runs import WhatRuns

HERE, THERE = "NVIDIA H200", "NVIDIA B200"


class OnDevice(SimulatedExecutor):
    """Says which device it is."""

    device_name = HERE


def measured(device: str) -> CostTable:
    return Profile(costs=attrs.evolve(analytic_costs(), measured=True, version="t1"), device=device, model="m").costs


def test_costs_of_another_device_are_refused() -> None:
    """The error names the table, both devices and what to do."""
    with pytest.raises(ProfileError, match=rf"costs 't1' were measured on {THERE}, and this is {HERE}\. Leave costs"):
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
    """It is the profile's, like the model; the table that is read has both too, and equals the one that was written."""
    costs = measured(THERE)
    text = dumps(Profile(costs=costs, device=THERE, model="m"))
    assert text.count(THERE) == 1
    read = loads(text, Profile).costs
    assert read == costs
    assert (read.measured_on, read.measured_with) == (THERE, "m")


def test_a_profile_that_ships_says_its_device_and_model() -> None:
    profile = load_profile("qwen2.5-0.5b-h200")
    assert profile.costs.measured_on == profile.device != ""
    assert profile.costs.measured_with == profile.model != ""


# Another model.


class Named:
    """A model that says what it is."""

    full_name = "LlamaForCausalLM of 1235.8 M parameters, bfloat16"


class OfModel(OnDevice):
    """Says which model it runs."""

    def __init__(self, name: str = Named.full_name) -> None:
        super().__init__()
        self.model = Named()
        self.model.full_name = name


def with_model(name: str) -> CostTable:
    return Profile(costs=attrs.evolve(analytic_costs(), measured=True, version="t1"), device=HERE, model=name).costs


def test_costs_of_another_model_are_refused() -> None:
    """When it is made and later: the error names the table, both models and what to do."""
    other = "Qwen2ForCausalLM of 494.0 M parameters, bfloat16"
    words = rf"costs 't1' were measured with {other}, and this is {Named.full_name}\. Leave costs .* measured_with=''"
    with pytest.raises(ProfileError, match=words):
        Engine(costs=with_model(other), executor=OfModel())
    engine = Engine(costs=with_model(Named.full_name), executor=OfModel())
    with pytest.raises(ProfileError, match=words):
        engine.take_costs(with_model(other))
    assert engine.costs.measured_with == Named.full_name


@pytest.mark.parametrize("costs", [with_model(""), attrs.evolve(with_model("m"), measured_with=""), analytic_costs()])
def test_costs_of_no_named_model_are_taken(costs: CostTable) -> None:
    assert Engine(costs=costs, executor=OfModel()).costs is costs


def test_a_model_without_a_name_takes_all() -> None:
    """As does an Engine that only decides."""
    assert Engine(costs=with_model("m"), executor=OnDevice()).costs.measured_with == "m"
    assert Engine(costs=with_model("m"), executor=OfModel("")).costs.measured_with == "m"
    assert Engine(costs=with_model("m")).costs.measured_with == "m"


# A model of the same name and another shape.

SHAPE = {"num_hidden_layers": 2, "hidden_size": 64, "attention_kernels": "plain"}


def shaped(shape: dict[str, Any], name: str = Named.full_name) -> Engine:
    """An Engine of a model of that shape, by costs of one of `SHAPE`."""
    executor = OfModel(name)
    executor.model.model_shape = shape  # type: ignore[attr-defined]
    costs = Profile(
        costs=attrs.evolve(analytic_costs(), measured=True, version="t1"), device=HERE, model=Named.full_name,
        model_shape=SHAPE,
    ).costs  # fmt: skip
    return Engine(costs=costs, executor=executor)


@pytest.mark.parametrize(
    ("shape", "theirs", "ours"),
    [
        ({**SHAPE, "num_hidden_layers": 3}, "num_hidden_layers 2", "num_hidden_layers 3"),
        ({**SHAPE, "attention_kernels": "flash"}, "attention_kernels plain", "attention_kernels flash"),
        (
            {"num_hidden_layers": 1, "hidden_size": 128}, "num_hidden_layers 2, hidden_size 64",
            "num_hidden_layers 1, hidden_size 128",
        ),
    ],
)  # fmt: skip
def test_costs_of_a_model_of_another_shape_are_refused(shape: dict[str, Any], theirs: str, ours: str) -> None:
    """Its name is the same: the error says what isn't, of both, and what to do."""
    words = f"costs 't1' were measured with {Named.full_name} of {theirs}, and this has {ours}. Leave costs out to meas"
    with pytest.raises(ProfileError) as caught:
        shaped(shape)
    assert words in str(caught.value)
    assert "measured_with=''" in str(caught.value)


@pytest.mark.parametrize("shape", [SHAPE, {}, {"hidden_size": 64, "experts": 8}])
def test_a_shape_is_compared_by_what_both_say(shape: dict[str, Any]) -> None:
    engine = shaped(shape)
    assert engine.costs.measured_shape == SHAPE
    engine.take_costs(with_model(Named.full_name))
    assert shaped({"hidden_size": 65}, name="").costs.version == "t1", "a rank's share has no name"


def test_profiles_carry_the_shape_and_old_ones_have_none() -> None:
    profile = Profile(costs=with_model("m"), device=HERE, model="m", model_shape=SHAPE)
    data = json.loads(dumps(profile))
    assert data["model_shape"] == SHAPE
    assert "measured_shape" not in data["costs"]
    assert loads(json.dumps(data), Profile).costs.measured_shape == SHAPE
    for wrong in (["num_hidden_layers"], {"num_hidden_layers": [2]}, {"num_hidden_layers": 2.5}, {"experts": None}):
        with pytest.raises(SchemaError, match="model_shape"):
            loads(json.dumps({**data, "model_shape": wrong}), Profile)
    del data["model_shape"]
    assert loads(json.dumps(data), Profile).model_shape == {}


@pytest.mark.parametrize("layers", [2, 3])
def test_ranks_compare_the_shape_with_rank_0s(layers: int) -> None:
    def of_rank(communicator: ThreadCommunicator) -> Engine:
        executor = OfModel()
        executor.model.model_shape = {**SHAPE, "num_hidden_layers": (2, layers)[communicator.rank]}  # type: ignore[attr-defined]
        costs = attrs.evolve(with_model(Named.full_name), measured_shape=SHAPE)
        engine = Engine(costs=costs if communicator.rank == 0 else None, executor=executor, communicator=communicator)
        engine.sync()
        return engine

    found = run_ranks(2, of_rank, timeout_s=20)
    if layers == 2:
        assert [each.costs.measured_shape for each in found] == [SHAPE, SHAPE]
    else:
        assert "of num_hidden_layers 2, and this has num_hidden_layers 3. Start all ranks with one model" in str(
            found[1]
        )


# A model that was split over several devices.


def split_over(size: int | None) -> CostTable:
    costs = attrs.evolve(analytic_costs(), measured=True, version="t1")
    return Profile(costs=costs, device=HERE, model=Named.full_name, tensor_parallel_size=size).costs


def test_costs_of_a_split_model_are_refused_for_a_whole_one() -> None:
    """Each device has a share of the work there; costs that don't say so are taken, and by a rank's share all are."""
    words = "measured with a tensor_parallel_size of 2, and this is 1. Leave costs .* measured_over=None"
    with pytest.raises(ProfileError, match=words):
        Engine(costs=split_over(2), executor=OfModel())
    for size in (1, None):
        assert Engine(costs=split_over(size), executor=OfModel()).costs.measured_over == size
    assert Engine(costs=split_over(2), executor=OfModel("")).costs.measured_over == 2
    written = dumps(Profile(costs=split_over(2), device=HERE, model="m", tensor_parallel_size=2))
    assert loads(written, Profile).costs.measured_over == 2


@pytest.mark.parametrize("whole", [0, 1])
def test_ranks_refuse_costs_of_a_split_model_together(whole: int) -> None:
    """A share takes them, a whole model doesn't; whose it is says both sizes, and the other that one is whole."""
    names = [Named.full_name if rank == whole else "" for rank in range(2)]
    errors = run_ranks(2, lambda rank: of_models(rank, *names, costs=split_over(2)), timeout_s=20)
    for rank, error in enumerate(errors):
        assert isinstance(error, RankError)
        assert "tensor_parallel_size of 2, and" in str(error)
        assert ("and this is 1" if rank == whole else "another rank runs a model that is split otherwise") in str(error)
    for engine in run_ranks(2, lambda rank: of_models(rank, "", "", costs=split_over(2)), timeout_s=20):
        assert isinstance(engine, Engine)
        assert engine.costs.measured_over == 2


# Ranks, which all decide by rank 0's costs.


class Elsewhere(SimulatedExecutor):
    """On another device than `OnDevice`."""

    device_name = THERE


def started(communicator: ThreadCommunicator, *executors: type[SimulatedExecutor], costs: Any = None) -> Engine:
    """One rank's Engine, captured, with the executor of its place."""
    executor = executors[communicator.rank](num_blocks=16)
    engine = Engine(costs=costs, executor=executor, communicator=communicator, ladder=[4])
    engine.capture()
    return engine


def test_ranks_on_two_devices_all_refuse_costs_of_one() -> None:
    """Together, so that none waits for another; the one elsewhere says which devices, and what to do."""
    here, there, other = run_ranks(
        3, lambda rank: started(rank, OnDevice, Elsewhere, OnDevice, costs=measured(HERE)), timeout_s=20
    )
    for error in (here, there, other):
        assert isinstance(error, RankError)
        assert f"measured on {HERE}, and" in str(error)
        assert "Start all ranks on one kind of device" in str(error)
    assert f"rank 1: costs 't1', by which all ranks decide, were measured on {HERE}, and this is {THERE}" in str(there)
    assert "rank 0" in str(here)
    assert "another rank runs on another device" in str(here)


def test_rank_0_is_refused_like_any_other() -> None:
    """Costs of a device that only another rank has are nobody's, as every rank would decide by them."""
    first, second = run_ranks(2, lambda rank: started(rank, Elsewhere, OnDevice, costs=measured(HERE)), timeout_s=20)
    assert isinstance(first, RankError)
    assert str(first).startswith("rank 0: costs 't1'")
    assert f"and this is {THERE}" in str(first)
    assert isinstance(second, RankError)


@pytest.mark.parametrize("costs", [measured(HERE), attrs.evolve(measured(THERE), measured_on="")])
def test_ranks_of_one_device_decide_by_its_costs(costs: CostTable) -> None:
    """And by costs that don't say where they were measured."""
    for engine in run_ranks(2, lambda rank: started(rank, OnDevice, OnDevice, costs=costs), timeout_s=20):
        assert isinstance(engine, Engine)
        assert engine.costs.version == "t1"
        assert engine.calibration_error == ""


@pytest.mark.parametrize("first_given", [False, True])
def test_what_ranks_do_goes_by_whose_costs_count(first_given: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's: where they were given all refuse, where it measured them all go on, whatever another rank has."""
    from kpolicy.executors import calibrate

    monkeypatch.setattr(calibrate, "can_measure", lambda _executor: True)
    monkeypatch.setattr(calibrate, "measure", lambda executor, *_, **__: measured(executor.device_name))

    def work(communicator: ThreadCommunicator) -> Engine:
        given = first_given is (communicator.rank == 0)
        engine = Engine(
            costs=measured(HERE if communicator.rank == 0 else THERE) if given else None, ladder=[4],
            executor=(OnDevice, Elsewhere)[communicator.rank](num_blocks=16),
        )  # fmt: skip
        engine.capture()
        # Ranks that became ranks once each had costs of its own.
        engine._communicator = communicator
        engine.sync()
        return engine

    for result in run_ranks(2, work, timeout_s=20):
        assert isinstance(result, RankError if first_given else Engine)
        if isinstance(result, Engine):
            assert not result.costs.measured


@pytest.mark.parametrize("apart", [False, True])
def test_what_ranks_measure_themselves_costs_no_start(apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On devices of two kinds they go by analytic costs and say why, also when they become equal again."""
    from kpolicy.executors import calibrate

    monkeypatch.setattr(calibrate, "can_measure", lambda _executor: True)
    monkeypatch.setattr(calibrate, "measure", lambda executor, *_, **__: measured(executor.device_name))

    def work(communicator: ThreadCommunicator) -> Engine:
        engine = started(communicator, OnDevice, Elsewhere if apart else OnDevice)
        engine.sync()
        return engine

    for engine in run_ranks(2, work, timeout_s=20):
        assert isinstance(engine, Engine)
        assert engine.costs.measured is not apart
        assert ("ranks decide by analytic costs" in engine.calibration_error) is apart
        assert (HERE in engine.calibration_error) is apart


OTHER = "Qwen2ForCausalLM of 494.0 M parameters, bfloat16"


def of_models(communicator: ThreadCommunicator, *names: str, costs: Any = None) -> Engine:
    """One rank's Engine, captured and made equal twice, with the model of its place."""
    engine = Engine(costs=costs, executor=OfModel(names[communicator.rank]), communicator=communicator, ladder=[4])
    engine.capture()
    engine.sync()
    return engine


@pytest.mark.parametrize("names", [(OTHER, Named.full_name), (Named.full_name, OTHER), (OTHER, OTHER)])
def test_ranks_refuse_costs_of_another_model_together(names: tuple[str, str]) -> None:
    """Rank 0 like any other; whoever runs another model names both, and what to do."""
    costs = with_model(Named.full_name)
    for name, error in zip(
        names, run_ranks(2, lambda rank: of_models(rank, *names, costs=costs), timeout_s=20), strict=True
    ):
        assert isinstance(error, RankError)
        assert f"measured with {Named.full_name}, and" in str(error)
        assert "Start all ranks with one model" in str(error)
        assert (f"and this is {OTHER}" if name == OTHER else "another rank runs another model") in str(error)


@pytest.mark.parametrize("share", [False, True])
def test_ranks_keep_which_model_costs_are_of(share: bool) -> None:
    """However often they become equal; a rank's share of a model has no name, and takes the costs."""
    names = Named.full_name, "" if share else Named.full_name
    costs = with_model(Named.full_name)
    for engine in run_ranks(2, lambda rank: of_models(rank, *names, costs=costs), timeout_s=20):
        assert isinstance(engine, Engine)
        assert (engine.costs.version, engine.costs.measured_with) == ("t1", Named.full_name)
        assert engine.calibration_error == ""


def test_ranks_of_two_models_decide_by_analytic_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rank 0 measured its own."""
    from kpolicy.executors import calibrate

    monkeypatch.setattr(calibrate, "can_measure", lambda _executor: True)
    monkeypatch.setattr(calibrate, "measure", lambda executor, *_, **__: with_model(executor.model.full_name))
    for engine in run_ranks(2, lambda rank: of_models(rank, Named.full_name, OTHER), timeout_s=20):
        assert isinstance(engine, Engine)
        assert not engine.costs.measured
        assert f"measured with {Named.full_name}, and" in engine.calibration_error
        assert "ranks decide by analytic costs" in engine.calibration_error


@pytest.mark.parametrize(
    ("measured_shape", "here", "words"),
    [
        ({"experts": 64}, {"experts": 64, "expert_kernels": "kpolicy"}, "expert_kernels transformers"),
        ({"experts": 64, "expert_kernels": "kpolicy"}, {"experts": 64, "expert_kernels": "kpolicy"}, ""),
        ({"latent_rank": 512}, {"latent_rank": 512, "latent_prompts": "triton"}, "latent_prompts flash"),
        ({"hidden_size": 64}, {"hidden_size": 64, "experts": 64, "expert_kernels": "kpolicy"}, ""),
        ({}, {"experts": 64, "expert_kernels": "kpolicy"}, ""),
    ],
)
def test_a_shape_that_names_no_kernels_is_of_those_before_there_were_others(
    measured_shape: dict[str, Any], here: dict[str, Any], words: str
) -> None:
    """Where nothing is said of the model's experts or latents nothing is compared."""
    theirs, ours = (WhatRuns(HERE, "m", 1, each) for each in (measured_shape, here))
    _, model, _ = theirs.unlike(ours)
    assert bool(model) == bool(words)
    assert words in model
