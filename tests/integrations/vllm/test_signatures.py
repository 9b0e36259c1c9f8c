"""The check of live signatures against recorded ones, without vLLM: modules made from what was recorded."""

import sys
from enum import Enum
from types import ModuleType

import pytest

from kpolicy_vllm.versions import Adapter, UnsupportedError
from kpolicy_vllm.versions import signatures as recorded

RUNNERS = [
    ("V1_0_15", "v1"),
    ("V1_0_23", "v1"),
    ("V1_0_33", "v1"),
    ("V2_0_23", "v2"),
    ("V2_0_33", "v2"),
    ("CONFIG", "config"),
    ("SCHEDULER_0_23", "scheduler"),
    ("SCHEDULER_0_25", "scheduler"),
    ("RANKS", "ranks"),
    ("ENGINE", "engine"),
    ("TWO_FORWARDS", "two forwards"),
]


def fake(names):
    """Modules with functions and classes of those parameters, properties that read so, and enumerations."""
    modules = {}
    for name, parameters in names.items():
        module, _, path = name.partition(":")
        made = modules.setdefault(module, ModuleType(module))
        *owner, last = path.split(".")
        if owner:
            if not hasattr(made, owner[0]):
                setattr(made, owner[0], type(owner[0], (), {}))
            made = getattr(made, owner[0])
        setattr(made, last, made_of(last, parameters))
    return modules


def made_of(name, parameters):
    if "=" in parameters[0]:
        members = (each.partition("=") for each in parameters)
        return Enum(name, {member: int(value or 99) for member, _, value in members})
    if parameters[0].startswith("self."):
        return property(eval(f"lambda self: ({', '.join(parameters)},)", {"surprise": 0}))  # noqa: S307 - our own records
    return eval(f"lambda {', '.join(parameters)}: None")  # noqa: S307


def adapter(names):
    signatures = {runner: getattr(recorded, name) for name, runner in RUNNERS if not name.endswith(("15", "25", "33"))}
    return Adapter("0.23.0", object, object, lambda _runner, _state: None, signatures | names)


@pytest.mark.parametrize(("name", "runner"), RUNNERS)
def test_as_recorded(monkeypatch, name, runner):
    """A vLLM that is as it was recorded passes."""
    names = getattr(recorded, name)
    for module, made in fake(names).items():
        monkeypatch.setitem(sys.modules, module, made)
    adapter({runner: names}).check(runner)


@pytest.mark.parametrize(("name", "runner"), RUNNERS)
def test_one_parameter_more(monkeypatch, name, runner):
    """A parameter more, in any of them, is refused, with both lists."""
    names = getattr(recorded, name)
    for changed, parameters in names.items():
        for module, made in fake(names | {changed: (*parameters, "surprise")}).items():
            monkeypatch.setitem(sys.modules, module, made)
        with pytest.raises(UnsupportedError, match="surprise") as refused:
            adapter({runner: names}).check(runner)
        assert changed in str(refused.value)


def test_no_record_of_a_part():
    """What wasn't recorded of a release is refused, by name."""
    made = Adapter("0.15.1", object, object, lambda _runner, _state: None, {})
    with pytest.raises(UnsupportedError, match=r"0\.15\.1's scheduler"):
        made.check("scheduler")


def test_missing(monkeypatch):
    """A name that isn't there is refused."""
    for module in ("vllm.config.vllm", "vllm.v1.worker.worker_base"):
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
    with pytest.raises(UnsupportedError, match="it isn't there"):
        adapter({}).check("config")
