"""Deployment limits and objectives."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from kpolicy.errors import ConfigError
from kpolicy.settings import GAP_FIRST_TOKEN_LIMIT, SWITCH, Objective, Settings, read_variable, read_variables


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"max_num_reqs": 0}, "max_num_reqs is 0; it must be a whole number of at least 1"),
        ({"max_num_tokens": -5}, "max_num_tokens is -5"),
        ({"max_num_tokens": 2.5}, "max_num_tokens is 2.5"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens is -1; it must be a whole number of at least 0"),
        ({"max_loras": -1}, "max_loras is -1"),
        ({"max_loras": "2"}, "max_loras is '2'"),
        ({"max_num_tokens": 4, "num_speculative_tokens": 4}, "less than one decode row of 5 tokens"),
    ],
)
def test_limits_out_of_range_are_named(arguments: dict[str, Any], match: str) -> None:
    """Each limit that no deployment has is an error with its name, value and range."""
    with pytest.raises(ConfigError, match=match):
        Settings(**arguments)


def test_whole_numbers_of_other_libraries_are_limits() -> None:
    """NumPy's integers are limits, kept as Python's own; its floats and bools aren't."""
    np = pytest.importorskip("numpy")
    settings = Settings(max_num_reqs=np.int64(4), max_num_tokens=np.uint16(64))
    assert settings == Settings(max_num_reqs=4, max_num_tokens=64)
    assert type(settings.max_num_reqs) is int
    with pytest.raises(ConfigError, match="max_loras is np"):
        Settings(max_loras=np.float64(2))
    with pytest.raises(ConfigError, match="max_loras is True"):
        Settings(max_loras=True)


@pytest.mark.parametrize(("drafts", "query_len", "lengths"), [(0, 1, (1,)), (3, 4, (1, 4))])
def test_decode_rows_come_in_these_lengths(drafts: int, query_len: int, lengths: tuple[int, ...]) -> None:
    """With k drafts decode rows have 1 + k tokens, or 1 in a step without drafts."""
    settings = Settings(num_speculative_tokens=drafts)
    assert settings.query_len == query_len
    assert settings.decode_query_lens == lengths


@pytest.mark.parametrize(
    ("text", "weights", "printed"),
    [
        ("throughput", (1.0, 0.0), "throughput"),
        ("latency", (0.0, 1.0), "latency"),
        ("0.7:0.3", (0.7, 0.3), "0.7:0.3"),
        ("2:0", (2.0, 0.0), "throughput"),
        ("0:5", (0.0, 5.0), "latency"),
    ],
)
def test_objectives_are_parsed(text: str, weights: tuple[float, float], printed: str) -> None:
    """An objective is a word or two weights, and prints as such; an objective stays itself."""
    objective = Objective.parse(text)
    assert (objective.step_weight, objective.gap_weight) == weights
    assert str(objective) == printed
    assert Objective.parse(objective) is objective


@pytest.mark.parametrize(
    ("objective", "printed"),
    [
        (Objective(first_token_limit=1.25), "1:0:1.25"),
        (Objective(0.0, 1.0, first_token_limit=1.0), "0:1:1"),
        (Objective(0.7, 0.3, first_token_limit=2.0), "0.7:0.3:2"),
        (Objective(1 / 3, 2 / 3), f"{1 / 3!r}:{2 / 3!r}"),
    ],
)
def test_an_objective_prints_as_what_it_is_parsed_from(objective: Objective, printed: str) -> None:
    """With its bound on first tokens where that isn't its own, and all digits of weights."""
    assert str(objective) == printed
    assert Objective.parse(printed) == objective


@pytest.mark.parametrize("text", ["", "fast", "1", "1:2:3:4", "a:b", "1:", "1:0:", "throughput:1.25"])
def test_texts_that_are_no_objective(text: str) -> None:
    """Anything else is an error that lists the forms."""
    with pytest.raises(ConfigError, match="throughput, latency, or weights as STEP:GAP"):
        Objective.parse(text)


@pytest.mark.parametrize("weights", [(-1.0, 2.0), (0.0, 0.0), (1.0, -0.1)])
def test_weights_that_weigh_nothing_are_refused(weights: tuple[float, float]) -> None:
    """Weights are at least 0 and one is above it."""
    with pytest.raises(ConfigError, match="weights"):
        Objective(*weights)


@pytest.mark.parametrize(
    ("text", "limit"), [("throughput", 1.0), ("2:0", 1.0), ("latency", 1.25), ("0.7:0.3", 1.25), ("1:0.001", 1.25)]
)
def test_prompts_may_be_later_where_the_gap_is_weighed(text: str, limit: float) -> None:
    """A quarter, whatever the weight; without one not at all. By weights as by words."""
    found = Objective.parse(text)
    assert found.first_token_limit == limit
    assert Objective(found.step_weight, found.gap_weight) == found
    assert Objective() == Objective.parse("throughput")
    assert GAP_FIRST_TOKEN_LIMIT == 1.25


@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.0, 1.0), (0.7, 0.3)])
def test_a_first_token_limit_that_is_given_is_kept(weights: tuple[float, float]) -> None:
    """Whatever the objective's own is, also where it is changed afterwards."""
    for limit in (1.0, 1.25, 3.0):
        given = Objective(*weights, first_token_limit=limit)
        assert given.first_token_limit == limit
        assert attrs.evolve(Objective(*weights), first_token_limit=limit) == given
        assert attrs.evolve(given, step_weight=5.0).first_token_limit == limit


@pytest.mark.parametrize("limit", [0.99, -1.0, float("nan"), float("inf")])
def test_a_first_token_limit_is_a_factor_from_one_up(limit: float) -> None:
    """A limit under what is best for the prefill rows could never be kept."""
    with pytest.raises(ConfigError, match="first_token_limit"):
        Objective(first_token_limit=limit)


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        *((word, "bool", on) for word, on in SWITCH.items()),
        (" ON ", "bool | None", True),
        ("7", "int", 7),
        ("7", "float | None", 7.0),
        ("1, 2,8", "tuple[int, ...] | None", (1, 2, 8)),
        (",", "tuple[int, ...]", ()),
        ("1, 2", "str | None", "1, 2"),
    ],
)
def test_variables_are_read_as_their_setting_s_type(text: str, kind: str, value: object) -> None:
    """By the type as it is annotated, optional or not."""
    read = read_variable("X", text, kind)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("text", "kind", "allowed"),
    [
        ("maybe", "bool", "1 or 0"),
        ("1.5", "int", "a whole number"),
        ("soon", "float | None", "a number"),
        ("nan", "float | None", "a number"),
        ("inf", "float", "a number"),
        ("1,x", "tuple[int, ...]", "whole numbers with commas between, for example 1,2,4"),
    ],
)
def test_variables_that_cannot_be_read(text: str, kind: str, allowed: str) -> None:
    """The error names the variable, its value, and what it takes in words."""
    with pytest.raises(ConfigError, match=rf"^X_NAME is '{text}'; it is {allowed}\.$"):
        read_variables({"X_NAME": text}, "X_", {"name": kind})


def test_variables_that_are_empty_or_of_others_give_no_setting() -> None:
    """So a setting keeps its default."""
    environ = {"X_A": "1", "X_B": "", "X_OTHER": "2", "A": "3"}
    assert read_variables(environ, "X_", {"a": "int", "b": "bool", "c": "str"}) == {"a": 1}
