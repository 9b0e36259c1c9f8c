"""Inputs that can't be: an error that names them, in every mode, and at the cost of no graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kpolicy.engine import Engine  # noqa: E402
from kpolicy.errors import ConfigError, UnknownNameError  # noqa: E402
from kpolicy.testing.sequences import Sequences  # noqa: E402

MODES = ("full", "piecewise", "eager")


@pytest.fixture(params=MODES)
def stepped(request: pytest.FixtureRequest, small: Callable[..., Any]) -> tuple[Engine, Any]:
    """An Engine that runs all in one mode, and the inputs of two prompts."""
    engine = Engine(request.param, model=small(), ladder=[2, 4, 8, 16], calibrate=0)
    engine.capture()
    sequences = Sequences(1)
    inputs = sequences.inputs([sequences.chunk(sequences.start(), 3), sequences.chunk(sequences.start(), 5)])
    assert engine.step(inputs).decision.mode.value == request.param
    return engine, inputs


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"positions": [0, 1]}, "token_ids 8, positions 2, slot_mapping 8"),
        ({"kv_lens": [3]}, "query_lens 2, kv_lens 1, block_table 2"),
        ({"query_lens": [3, 4]}, "query_lens come to 7 tokens"),
        ({"sampling": {"temperature": [0.5]}}, "sampling input temperature has 1 values for 2 wanted rows"),
        ({"sampling": {"temperature": [0.5, 0.5], "seed": [1]}}, "sampling input seed has 1 values for 2 wanted rows"),
    ],
)
def test_inputs_that_do_not_fit_each_other_are_named(
    stepped: tuple[Engine, Any], wrong: dict[str, Any], words: str
) -> None:
    """What is missing isn't padding: with it the step would compute something else, or sample greedily."""
    engine, inputs = stepped
    before = engine.registry.captured()
    with pytest.raises(ConfigError, match=words):
        engine.step(inputs._replace(**wrong))
    assert engine.registry.captured() == before
    engine.step(inputs)


def test_a_sampling_input_that_nobody_reads_is_refused(stepped: tuple[Engine, Any]) -> None:
    """It isn't dropped: tokens would come from another distribution than was asked for."""
    engine, inputs = stepped
    with pytest.raises(UnknownNameError, match="unknown sampling input 'top_p'"):
        engine.step(inputs._replace(sampling={"temperature": [0.5, 0.5], "top_p": [0.9, 0.9]}))


@pytest.mark.parametrize("wrong", [{"token_ids": [1000] * 8}, {"slot_mapping": [10**6] * 8}])
def test_a_token_that_is_not_there_costs_no_graph(stepped: tuple[Engine, Any], wrong: dict[str, Any]) -> None:
    """Every mode raises it, so the graph isn't to blame: requests of this kind would take all graphs in the end."""
    engine, inputs = stepped
    before = engine.registry.captured()
    for _ in range(3):
        with pytest.raises(IndexError):
            engine.step(inputs._replace(**wrong))
    assert engine.registry.captured() == before
    assert engine.stats.replay_failures == 0
    engine.step(inputs)


def test_extra_inputs_are_of_every_token(small: Callable[..., Any]) -> None:
    """One that is short would be zeros for the tokens beyond."""
    model = small()
    model.extra_inputs = {"scale": ((), "float32")}
    engine = Engine("eager", model=model, calibrate=0)
    sequences = Sequences(1)
    inputs = sequences.inputs([sequences.chunk(sequences.start(), 4)])
    with pytest.raises(ConfigError, match="extra input scale has 3 values for 4 tokens"):
        engine.step(inputs._replace(extra={"scale": [1.0] * 3}))
