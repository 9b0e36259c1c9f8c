"""Finding policies and executors by name: ours, those of installed packages, and what goes wrong with either."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kpolicy import executors, policies
from kpolicy.errors import ConfigError, KPolicyError, PluginError, UnknownNameError
from kpolicy.executors import executor_names, get_executor
from kpolicy.plugins import load_plugin, plugin_names
from kpolicy.policies import get_policy, policy_names

if sys.version_info >= (3, 11):
    import tomllib

GROUP = "kpolicy.tests"
OWN = {"ours": "fake_ours:Ours"}

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """A function that installs a fake distribution: its name, its entry points, and modules by name."""
    monkeypatch.syspath_prepend(tmp_path)
    made: list[str] = []

    def _install(distribution: str, entry_points: str, **modules: str) -> None:
        info = tmp_path / f"{distribution}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(entry_points)
        for name, text in modules.items():
            (tmp_path / f"{name}.py").write_text(text)
            made.append(name)

    yield _install
    for name in made:
        sys.modules.pop(name, None)


# plugin_names and load_plugin


def test_a_plugin_is_found_and_loaded(install: Install) -> None:
    """A registered name is listed with its distribution and loads to what it points at."""
    install("fakeone", f"[{GROUP}]\nthing = fake_one:Thing\n", fake_one="class Thing: pass\n")
    assert plugin_names(GROUP, OWN) == {"ours": "kpolicy", "thing": "fakeone"}
    assert load_plugin(GROUP, "thing", OWN).__name__ == "Thing"


def test_nothing_is_found_under_a_name_nobody_registered(install: Install) -> None:
    """A name that nobody registered loads to None, also beside plugins."""
    install("fakeone", f"[{GROUP}]\nthing = fake_one:Thing\n")
    assert load_plugin(GROUP, "other", OWN) is None
    assert load_plugin("kpolicy.none", "thing", {}) is None


def test_listing_loads_nothing(install: Install) -> None:
    """Listing names imports no plugin, so one that raises is still listed."""
    install("fakebad", f"[{GROUP}]\nbad = fake_bad:X\n", fake_bad="raise RuntimeError('listed, not loaded')\n")
    assert plugin_names(GROUP, OWN)["bad"] == "fakebad"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("raise RuntimeError('no licence')", "RuntimeError: no licence"),
        ("import fake_missing_dependency", "ModuleNotFoundError: No module named 'fake_missing_dependency'"),
        ("def f(:", "SyntaxError"),
        ("x = 1", "AttributeError"),
    ],
)
def test_a_plugin_that_raises_when_loaded(install: Install, text: str, error: str) -> None:
    """A plugin that can't be loaded is one error that names group, name, distribution, target and cause."""
    install("fakebad", f"[{GROUP}]\nbad = fake_bad:X\ngood = fake_good:X\n", fake_bad=text, fake_good="X = 1")
    with pytest.raises(PluginError, match=error) as caught:
        load_plugin(GROUP, "bad", OWN)
    assert f"{GROUP} 'bad' of fakebad (fake_bad:X) raised when loaded" in str(caught.value)
    assert load_plugin(GROUP, "good", OWN) == 1


def test_a_name_registered_by_two_distributions(install: Install) -> None:
    """A name of two distributions is refused for both, naming both; names beside it still load."""
    install("fakeone", f"[{GROUP}]\ntwice = fake_one:A\nalone = fake_one:A\n", fake_one="A = 1\n")
    install("faketwo", f"[{GROUP}]\ntwice = fake_two:A\n", fake_two="A = 2\n")
    with pytest.raises(PluginError, match="uninstall one of them") as caught:
        load_plugin(GROUP, "twice", OWN)
    assert "fakeone (fake_one:A)" in str(caught.value)
    assert "faketwo (fake_two:A)" in str(caught.value)
    assert set(plugin_names(GROUP, OWN)["twice"].split(", ")) == {"fakeone", "faketwo"}
    assert load_plugin(GROUP, "alone", OWN) == 1


def test_our_own_registration_is_not_a_plugin(install: Install) -> None:
    """An entry point that equals our own table's is ours, as when kpolicy is installed."""
    install("kpolicylike", f"[{GROUP}]\nours = fake_ours:Ours\n")
    assert plugin_names(GROUP, OWN) == {"ours": "kpolicy"}
    assert load_plugin(GROUP, "ours", OWN) is None


# Policies and executors


def test_another_package_can_not_take_our_name(install: Install) -> None:
    """A package that registers one of our names changes nothing: the name stays ours."""
    text = "raise RuntimeError('must not be loaded')\n"
    install("fakethief", "[kpolicy.policies]\nauto = fake_thief:X\n[kpolicy.executors]\nsimulated = fake_thief:X\n",
            fake_thief=text)  # fmt: skip
    assert type(get_policy("auto")).__module__ == "kpolicy.policies.auto"
    assert type(get_executor("simulated")).__module__ == "kpolicy.executors.simulated"
    assert policy_names()["auto"] == executor_names()["simulated"] == "kpolicy"


@pytest.mark.parametrize(
    ("name", "near"), [("piecewize", "piecewise"), ("Auto", "auto"), ("vlm", "vllm"), ("full_piecewise", "piecewise")]
)
def test_near_misses_of_policies(name: str, near: str) -> None:
    """An unknown policy name suggests the nearest known one, and lists all."""
    with pytest.raises(UnknownNameError, match=f"unknown policy '{name}'; did you mean '") as caught:
        get_policy(name)
    assert near in str(caught.value).partition("?")[0]
    assert all(known in str(caught.value) for known in policies.OWN)


def test_a_name_like_no_other() -> None:
    """A name that is near to none gets no suggestion, only the list."""
    with pytest.raises(UnknownNameError) as caught:
        get_policy("zzzz")
    assert "did you mean" not in str(caught.value)
    assert "Known: " in str(caught.value)


def test_near_misses_of_executors() -> None:
    """An unknown executor name suggests the nearest known one."""
    with pytest.raises(UnknownNameError, match="unknown executor 'simulatd'; did you mean 'simulated'"):
        get_executor("simulatd")


def test_near_misses_include_plugins(install: Install) -> None:
    """A plugin's name is suggested and listed as ours are."""
    install("fakeone", "[kpolicy.policies]\nwaterfall = fake_one:X\n")
    with pytest.raises(UnknownNameError, match="did you mean 'waterfall'"):
        get_policy("waterfal")


def test_objects_that_are_no_policy_or_executor() -> None:
    """An object that lacks part of the protocol is an error that shows the object."""
    with pytest.raises(ConfigError, match="42 isn't a policy"):
        get_policy(42)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="42 isn't an executor"):
        get_executor(42)  # type: ignore[arg-type]


def test_objects_pass_through() -> None:
    """A policy or an executor is handed back as it is."""
    policy, executor = get_policy("eager"), get_executor("simulated")
    assert get_policy(policy) is policy
    assert get_executor(executor) is executor


def test_a_plugin_that_makes_something_else(install: Install) -> None:
    """A plugin whose factory makes no policy, or no executor, is an error that names it and shows what it made."""
    install("fakeone", "[kpolicy.policies]\nodd = fake_one:make\n[kpolicy.executors]\nodd = fake_one:make\n",
            fake_one="def make(): return 'something else'\n")  # fmt: skip
    with pytest.raises(PluginError, match="policy 'odd' made 'something else', which lacks part of the Policy"):
        get_policy("odd")
    with pytest.raises(PluginError, match="executor 'odd' made 'something else', which lacks part of the Executor"):
        get_executor("odd")


def test_a_policy_plugin_takes_arguments(install: Install) -> None:
    """A plugin's policy is made with the arguments of its spec, as ours are."""
    install("fakeone", "[kpolicy.policies]\nmine = fake_one:make\n",
            fake_one="from kpolicy.policies import get_policy\nseen = []\n"
                     "def make(**arguments):\n    seen.append(arguments)\n    return get_policy('eager')")  # fmt: skip
    assert get_policy("mine:size=8,fast=true,version=0.33", more="x") == get_policy("eager")
    assert sys.modules["fake_one"].seen == [{"size": 8, "fast": True, "version": "0.33", "more": "x"}]


@pytest.mark.parametrize("spec", ["eager:colour=red", "auto:colour=1"])
def test_arguments_a_policy_does_not_take(spec: str) -> None:
    """An argument that a policy doesn't take is an error that names policy and argument, and where to look."""
    with pytest.raises(ConfigError, match="doesn't take colour") as caught:
        get_policy(spec)
    assert repr(spec.partition(":")[0]) in str(caught.value)
    assert "kpolicy policies" in str(caught.value)


@pytest.mark.parametrize("spec", ["vllm:v2", "vllm:=v2", "vllm:a b=1", "vllm:runner=v2,,x"])
def test_arguments_that_are_none(spec: str) -> None:
    """An argument that isn't NAME=VALUE is an error that shows one that is."""
    with pytest.raises(ConfigError, match="isn't NAME=VALUE; for example vllm:runner=v2,"):
        get_policy(spec)


@pytest.mark.parametrize("spec", ["vllm:runner=v9", "vllm:version=7"])
def test_argument_values_a_policy_does_not_take(spec: str) -> None:
    """A value that a policy's argument doesn't take is a ConfigError that shows the value."""
    with pytest.raises(ConfigError) as caught:
        get_policy(spec)
    assert spec.partition("=")[2] in str(caught.value)


def test_arguments_an_executor_does_not_take() -> None:
    """An argument that an executor doesn't take is an error that names both."""
    with pytest.raises(ConfigError, match=r"executor 'simulated' doesn't take colour. It takes costs, seed,"):
        get_executor("simulated", colour="red")


def test_an_executor_that_lacks_an_argument_says_which() -> None:
    """One that runs a model can't be had by its name alone, and the error shows how it can."""
    pytest.importorskip("torch")
    with pytest.raises(ConfigError, match=r"executor 'cpu' needs model.*Engine\(model=kpolicy.load"):
        get_executor("cpu")


def test_a_type_error_inside_an_executor_is_not_one_of_its_arguments() -> None:
    """The value was wrong, or the executor is: neither is told as an argument that it doesn't take."""
    with pytest.raises(TypeError, match="not supported between"):
        get_executor("simulated", num_blocks="64")


def test_a_plugin_whose_executor_raises_is_named(install: Install) -> None:
    """Whatever it raises, with its cause; so is one that can't be called."""
    install("fakeone", "[kpolicy.executors]\nodd = fake_one:make\nvalue = fake_one:VALUE\n",
            fake_one="VALUE = 3\ndef make(): return len(None)\n")  # fmt: skip
    with pytest.raises(PluginError, match="executor 'odd' raised when made: TypeError") as caught:
        get_executor("odd")
    assert isinstance(caught.value.__cause__, TypeError)
    with pytest.raises(PluginError, match="executor 'value' is 3, which makes nothing"):
        get_executor("value")


def _names_of_arguments(name: str) -> list[str]:
    return list(inspect.signature(policies.factory_of(name)).parameters)


ARGUMENTS = st.sampled_from(sorted(policies.OWN)).flatmap(
    lambda name: st.tuples(
        st.just(name),
        # `form` and `forms`: see test_split_forms_that_are_none.
        st.sampled_from([*sorted(set(_names_of_arguments(name))), "self", "cls", "x"]),
        st.sampled_from(["", "0", "1", "99999999999999999999", "true", "false", "v1", "0.33", "x", "/"])
        | st.text(max_size=8),
    )
)


@pytest.mark.parametrize("spec", ["split:form=x", "auto:forms=x"])
def test_split_forms_that_are_none(spec: str) -> None:
    """A split form that there isn't is an UnknownNameError that lists those there are."""
    with pytest.raises(UnknownNameError, match="in_turn"):
        get_policy(spec)


def test_auto_s_forms_say_how_to_have_none() -> None:
    """Where a form isn't known the error names ``none`` too, which stands alone; `split` has always one."""
    with pytest.raises(UnknownNameError, match=r"in_turn, none.*Join several by .; none stands"):
        get_policy("auto:forms=nine")
    with pytest.raises(ConfigError, match=r"are 'none\+beside'; write none in small letters and alone for no SPLIT"):
        get_policy("auto:forms=none+beside")
    with pytest.raises(UnknownNameError, match=r"Known: beside, decodes_beside, in_turn\.$"):
        get_policy("split:form=none")


@given(st.text(max_size=40))
def test_any_text_is_a_policy_or_a_named_error(spec: str) -> None:
    """No text makes `get_policy` fail in any way but with an error of ours."""
    with contextlib.suppress(KPolicyError):
        assert isinstance(get_policy(spec), policies.Policy)


@given(ARGUMENTS)
def test_any_arguments_are_taken_or_a_named_error(parts: tuple[str, str, str]) -> None:
    """No argument and value after the colon make one of our policies fail but with an error of ours."""
    name, argument, value = parts
    with contextlib.suppress(KPolicyError):
        assert isinstance(get_policy(f"{name}:{argument}={value}"), policies.Policy)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib is in the standard library from 3.11 on")
def test_our_tables_equal_the_registered_entry_points() -> None:
    """The tables that are looked up without a scan say what pyproject.toml registers."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"] == {policies.GROUP: dict(policies.OWN), executors.GROUP: dict(executors.OWN)}


@pytest.mark.parametrize("name", sorted(policies.OWN))
def test_every_policy_of_ours_can_be_made(name: str) -> None:
    """Each name of ours makes a policy without arguments."""
    assert isinstance(get_policy(name), policies.Policy)
