"""The settings: from the flag, from the environment, and what is refused."""

import pytest

from kpolicy.errors import ConfigError
from kpolicy_vllm.config import Config


@pytest.mark.parametrize("additional", [{}, {"other": 1}, None, {"kpolicy": False}])
def test_off_without_the_flag(additional):
    """Without the flag and the environment kpolicy is off."""
    assert Config.load(additional, {}) is None


@pytest.mark.parametrize(
    ("given", "policy"), [(True, "auto"), ({}, "auto"), ("vllm", "vllm"), ({"policy": "eager"}, "eager")]
)
def test_forms_of_the_flag(given, policy):
    """The flag is an object of settings, true, or a policy's name."""
    config = Config.load({"kpolicy": given}, {})
    assert config is not None
    assert config.policy == policy


@pytest.mark.parametrize("environ", [{"KPOLICY_VLLM": "1"}, {"KPOLICY_POLICY": "auto"}])
def test_on_by_the_environment(environ):
    """The environment turns it on where no flag is given."""
    assert Config.load({}, environ) == Config()


def test_the_environment_switches_off():
    """0 turns it off whatever the flag says."""
    assert Config.load({"kpolicy": {}}, {"KPOLICY_VLLM": "0"}) is None


def test_misspelt_variables():
    """Each with the one that was meant; another program's isn't mentioned."""
    environ = {"KPOLICY_OBJECTVE": "latency", "KPOLICY_VLM": "1", "KPOLICY_ORACLE": "x", "KPOLICY_LAZY": "1"}
    assert Config.misspelt(environ) == [("KPOLICY_OBJECTVE", "KPOLICY_OBJECTIVE"), ("KPOLICY_VLM", "KPOLICY_VLLM")]


def test_values_of_the_environment():
    """Every kind of value is read; what the flag says goes first."""
    environ = {
        "KPOLICY_POLICY": "eager", "KPOLICY_DECODE_SIZES": "1, 2,4", "KPOLICY_LAZY": "yes", "KPOLICY_LAZY_HOT": "7",
        "KPOLICY_FIRST_TOKEN_MS": "20.5", "KPOLICY_DECISION_LOG": "x.jsonl",
    }  # fmt: skip
    config = Config.load({"kpolicy": {"lazy_hot": 9}}, environ)
    assert config == Config(
        policy="eager", decode_sizes=(1, 2, 4), lazy=True, lazy_hot=9, first_token_ms=20.5, decision_log="x.jsonl"
    )


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"polcy": "auto"}, "did you mean 'policy'"),
        ({"second_context": True}, "unknown setting of kpolicy 'second_context'"),
        ({"lazy": 1}, "true or false"),
        ({"lazy_hot": 2.5}, "whole number"),
        ({"decode_sizes": "1,2"}, "list of whole numbers"),
        ({"decode_sizes": [8, 0]}, r"\[8, 0\]; a size is 1 token or more"),
        ({"policy": None}, "text"),
        ({"lazy_hot": 0}, "from 1 up"),
        ({"first_token_ms": -1}, "from 0 up"),
        ({"objective": "speed"}, "throughput"),
        ({"objective": "0:1:0.9"}, "first_token_limit is 0.9"),
        (
            {"first_token_limit": 1.25},
            "has no setting 'first_token_limit' any more. It is the objective's third number: STEP:GAP:LIMIT, for",
        ),
        ({"pace": 1}, "true or false"),
        ([1], "an object of settings"),
    ],
)
def test_refused(given, says):
    """What can't be used is named, with what can."""
    with pytest.raises(ConfigError, match=says):
        Config.load({"kpolicy": given}, {})


@pytest.mark.parametrize(
    ("name", "text", "allowed"),
    [
        ("KPOLICY_LAZY", "maybe", "1 or 0"),
        ("KPOLICY_LAZY_HOT", "many", "a whole number"),
        ("KPOLICY_VLLM", "2", "1 or 0"),
        ("KPOLICY_PACE", "2", "1 or 0"),
        ("KPOLICY_FIRST_TOKEN_MS", "soon", "a number"),
        ("KPOLICY_MIXED_SIZES", "1;2", "whole numbers with commas between, for example 1,2,4"),
    ],
)
def test_refused_in_the_environment(name, text, allowed):
    """A variable that can't be read is named with its value and what it takes, in words and not as Python's type."""
    with pytest.raises(ConfigError, match=f"^{name} is '{text}'; it is {allowed}\\.$"):
        Config.load({"kpolicy": {}}, {name: text})


@pytest.mark.parametrize("config", [Config(), Config(decode_sizes=(1, 2), mixed_sizes=(), split=True, policy="eager")])
def test_section_reads_back(config):
    """What workers are handed is what was set."""
    assert Config.load({"kpolicy": config.as_section()}, {}) == config


@pytest.mark.parametrize(
    ("given", "paces"),
    [
        ({}, False),
        ({"objective": "latency"}, True),
        ({"objective": "1:0"}, False),
        ({"objective": "3:1"}, True),
        ({"objective": "3:1", "pace": False}, False),
        ({"pace": True}, True),
        ({"pace": None, "objective": "0:2"}, True),
    ],
)
def test_steps_are_bounded_where_the_gap_is_weighed(given, paces):
    """The objective says so where nothing else is said."""
    assert Config(**given).paces is paces


@pytest.mark.parametrize(
    ("objective", "limit"), [("throughput", 1.0), ("latency", 1.25), ("3:1", 1.25), ("0:1:1.05", 1.05), ("1:0:2", 2.0)]
)
def test_the_bound_on_prompts_is_the_objective_s(objective, limit):
    """Its own where none is given, by a section and by a variable."""
    config = Config(objective=objective)
    assert config.objective_parsed.first_token_limit == limit
    assert Config.load({"kpolicy": config.as_section()}, {}) == config
    assert Config.load({}, {"KPOLICY_POLICY": "auto", "KPOLICY_OBJECTIVE": objective}) == config


def test_a_variable_of_before_is_refused_and_says_what_to_do():
    """It isn't lost in silence: prompts would be bounded by another limit."""
    environ = {"KPOLICY_POLICY": "auto", "KPOLICY_FIRST_TOKEN_LIMIT": "2"}
    with pytest.raises(ConfigError, match=r"has no variable KPOLICY_FIRST_TOKEN_LIMIT any more.*STEP:GAP:LIMIT"):
        Config.load({}, environ)
    assert Config.load({}, environ | {"KPOLICY_FIRST_TOKEN_LIMIT": ""}) == Config()
    assert Config.load({}, {"KPOLICY_FIRST_TOKEN_LIMIT": "2"}) is None
