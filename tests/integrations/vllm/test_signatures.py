"""The check of live signatures against recorded ones, without vLLM: modules made from what was recorded."""

import sys
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
]


def fake(names):
    """Modules with functions and classes of those parameters."""
    modules = {}
    for name, parameters in names.items():
        module, _, path = name.partition(":")
        made = modules.setdefault(module, ModuleType(module))
        *owner, last = path.split(".")
        if owner:
            if not hasattr(made, owner[0]):
                setattr(made, owner[0], type(owner[0], (), {}))
            made = getattr(made, owner[0])
        setattr(made, last, eval(f"lambda {', '.join(parameters)}: None"))  # noqa: S307 - from our own records
    return modules


def adapter(names):
    signatures = {
        runner: getattr(recorded, name) for name, runner in RUNNERS if name.endswith("23") or name == "CONFIG"
    }
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


def test_missing(monkeypatch):
    """A name that isn't there is refused."""
    for module in ("vllm.config.vllm", "vllm.v1.worker.worker_base"):
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
    with pytest.raises(UnsupportedError, match="it isn't there"):
        adapter({}).check("config")
