"""What SGLang loads: hooks that took, and clear refusals."""

import functools
import logging
import pkgutil

import pytest

from kpolicy_sglang import hooks
from kpolicy_sglang.plugin import not_taken, register
from kpolicy_sglang.versions import KNOWN, known
from tests.integrations.sglang.fake_sglang import pretended
from tests.integrations.sglang.recorded import SIGNATURES

ON = {"KPOLICY_SGLANG": "1"}
STRICT = ON | {"KPOLICY_STRICT": "1"}


@pytest.fixture(autouse=True)
def _off_again():
    yield
    hooks.configure(None)


@pytest.mark.parametrize("version", KNOWN)
def test_every_hook_has_a_recorded_signature(version):
    """What a hook says its target takes is what the release has."""
    for hook in KNOWN[version].hooks:
        owner, _, name = hook.target.rpartition(".")
        of = owner.rpartition(".")[2]
        recorded = SIGNATURES[version][f"{of}.{name}" if of[0].isupper() else name].split(", ")
        assert set(hook.takes) <= set(recorded), hook.target
    names = {hook.target.rpartition(".")[2] for hook in KNOWN[version].hooks}
    assert names == {name.rpartition(".")[2] for name in SIGNATURES[version]}


@pytest.mark.parametrize("version", KNOWN)
def test_every_hook_takes(version):
    """After SGLang applied them each target calls kpolicy, and nothing is reported."""
    with pretended(version) as registry:
        register(STRICT)
        registry.apply_hooks()
        for hook in KNOWN[version].hooks:
            assert hasattr(pkgutil.resolve_name(hook.target), "__wrapped__"), hook.target
        assert hooks.configured() is not None


@pytest.mark.parametrize("environ", [{}, {"KPOLICY_SGLANG": "0", "KPOLICY_POLICY": "auto"}])
def test_off_registers_nothing(environ):
    """Without being turned on the plugin leaves SGLang as it is."""
    with pretended("0.5.23") as registry:
        register(environ)
        assert not registry._hooks


@pytest.mark.parametrize("version", ["0.5.15", "0.5.24", "0.6.0", "0.5.160"])
def test_unknown_version_is_refused(version, caplog):
    """Another version is named with those that are known; nothing is hooked."""
    with pretended(version) as registry:
        with caplog.at_level(logging.ERROR):
            register(ON)
        assert not registry._hooks
        assert hooks.configured() is None
        assert f"SGLang is {version}; kpolicy-sglang knows 0.5.16, 0.5.23" in caplog.text
        with pytest.raises(SystemExit, match=r"knows 0\.5\.16"):
            register(STRICT)


@pytest.mark.parametrize("name", ["KPOLICY_PROFILE", "KPOLICY_PLAN"])
def test_files_that_cannot_be_read_are_said_before_the_model_is_loaded(name, tmp_path, caplog):
    """A start isn't waited for to learn of it; hooks stay, since ranks fall back together; strictly it ends."""
    (tmp_path / "broken.json").write_text("{")
    for file in ("none.json", "broken.json"):
        with pretended("0.5.23") as registry:
            register({**ON, name: str(tmp_path / file)})
            assert registry._hooks
            assert file in caplog.text
            assert "Without it SGLang's own" in caplog.text
            with pytest.raises(SystemExit, match=file):
                register({**STRICT, name: str(tmp_path / file)})


def test_post_releases_are_the_version_they_mend():
    """0.5.23.post1 is 0.5.23; 0.5.230 isn't."""
    assert known("0.5.23.post1") is KNOWN["0.5.23"]
    assert known("0.5.16+cu130") is KNOWN["0.5.16"]
    assert known("0.5.230") is None


def test_target_patched_by_someone_else(caplog):
    """A target that another plugin has is named, and SGLang stays as that one left it."""
    target = KNOWN["0.5.23"].hooks[0].target
    with pretended("0.5.23") as registry:
        registry.register(target, lambda original, *args: original(*args), hooks_around())
        registry.apply_hooks()
        with caplog.at_level(logging.ERROR):
            register(ON)
        assert f"{target} is already patched by someone else" in caplog.text
        assert list(registry._hooks) == [target]


@pytest.mark.parametrize("when", ["before", "after"])
def test_target_that_another_plugin_only_registered(when, caplog):
    """SGLang applies all plugins' hooks at once: who comes first or last is seen, and nothing of kpolicy's decides."""
    target = KNOWN["0.5.23"].hooks[0].target
    with pretended("0.5.23") as registry, caplog.at_level(logging.ERROR):
        if when == "before":
            registry.register(target, lambda original, *args: original(*args), hooks_around())
        register(ON)
        if when == "after":
            registry.register(target, lambda original, *args: original(*args), hooks_around())
        registry.apply_hooks()
        assert hooks.configured() is None
        assert target in caplog.text


def test_class_that_another_plugin_replaces(caplog):
    """A class of which kpolicy hooks a method isn't SGLang's any more once a plugin replaces it."""
    owner = KNOWN["0.5.23"].hooks[0].target.rpartition(".")[0]
    with pretended("0.5.23") as registry, caplog.at_level(logging.ERROR):
        registry._hooks[owner] = [object]
        register(ON)
        assert hooks.configured() is None
        assert "is already patched by someone else" in caplog.text


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("folder", ["/home/me/sglang", "/opt/other"])
def test_target_patched_without_the_registry(folder, wrapped, monkeypatch, caplog):
    """A function of a file that isn't in SGLang's own package is a patch, also under a decorator of SGLang's."""
    target = KNOWN["0.5.23"].hooks[0].target
    with pretended("0.5.23"), caplog.at_level(logging.ERROR):
        import sglang

        home = "/usr/lib/python/sglang"
        monkeypatch.setattr(sglang, "__file__", f"{home}/__init__.py", raising=False)
        for hook in KNOWN["0.5.23"].hooks:
            of, _, name = hook.target.rpartition(".")
            owner = pkgutil.resolve_name(of)
            function = getattr(owner, name)
            file = f"{folder if hook.target == target else home}/here.py"
            function.__code__ = function.__code__.replace(co_filename=file)
            if wrapped:
                outer = functools.wraps(function)(lambda *given, function=function: function(*given))
                outer.__code__ = outer.__code__.replace(co_filename=f"{home}/decorators.py")
                setattr(owner, name, outer)
        register(ON)
        assert hooks.configured() is None
        assert caplog.text.count("is already patched by someone else") == 1
        assert target in caplog.text


def hooks_around():
    from tests.integrations.sglang.fake_sglang import HookType

    return HookType.AROUND


def test_target_of_another_signature(caplog):
    """A target that takes other arguments than its release's isn't hooked."""
    with pretended("0.5.16"):
        runner = pkgutil.resolve_name(KNOWN["0.5.16"].hooks[0].target.rpartition(".")[0])
        runner.can_run_graph = lambda self, batch, more: None  # noqa: ARG005
        with caplog.at_level(logging.ERROR):
            register(ON)
        assert "takes no forward_batch" in caplog.text


def test_target_that_is_gone(caplog):
    """A target that isn't there is named."""
    with pretended("0.5.16"):
        runner = pkgutil.resolve_name(KNOWN["0.5.16"].hooks[0].target.rpartition(".")[0])
        del runner.can_run_graph
        with caplog.at_level(logging.ERROR):
            register(ON)
        assert "can_run_graph isn't there (AttributeError" in caplog.text


def test_hook_that_did_not_take_is_seen(caplog):
    """SGLang logs a hook that fails and goes on; kpolicy sees it at load and stays out."""
    target = KNOWN["0.5.23"].hooks[2].target
    with pretended("0.5.23") as registry:
        registry.fails.add(target)
        register(ON)
        with caplog.at_level(logging.ERROR):
            registry.apply_hooks()
        assert f"SGLang didn't apply the hooks on {target}" in caplog.text
        assert hooks.configured() is None


def test_hook_that_did_not_take_ends_a_strict_start():
    """In strict mode it ends the process."""
    with pretended("0.5.23") as registry:
        registry.fails.add(KNOWN["0.5.23"].hooks[0].target)
        register(STRICT)
        with pytest.raises(SystemExit, match="didn't apply the hooks on"):
            registry.apply_hooks()


def test_hook_that_sglang_only_says_it_applied(caplog):
    """A target that is called patched and doesn't call kpolicy isn't hooked."""
    target = KNOWN["0.5.23"].hooks[0].target
    with pretended("0.5.23") as registry, caplog.at_level(logging.ERROR):
        register(ON)
        of, _, name = target.rpartition(".")
        own = getattr(pkgutil.resolve_name(of), name)
        registry.apply_hooks()
        setattr(pkgutil.resolve_name(of), name, own)
        assert not_taken(KNOWN["0.5.23"].hooks, registry) == [target]


def test_misspelt_setting_is_said(caplog):
    """A variable that is nearly a setting changes nothing, and that is said; another program's isn't mentioned."""
    with pretended("0.5.23"), caplog.at_level(logging.WARNING):
        register(ON | {"KPOLICY_SPLITS": "0", "KPOLICY_ORACLE": "x"})
    assert [record.message for record in caplog.records] == [
        "kpolicy: KPOLICY_SPLITS isn't a setting and changes nothing; KPOLICY_SPLIT is"
    ]


def test_check_looks_once():
    """Applying again, as SGLang may, goes to SGLang's own method."""
    with pretended("0.5.16") as registry:
        own = registry.__dict__["apply_hooks"]
        register(ON)
        assert registry.__dict__["apply_hooks"] is not own
        registry.apply_hooks()
        assert registry.__dict__["apply_hooks"] is own


@pytest.mark.parametrize(
    ("name", "instead"),
    [("KPOLICY_PROFILE", "SGLang's own rule decides"), ("KPOLICY_PLAN", "SGLang's own sizes are captured"),
     ("KPOLICY_DECISION_LOG", "there is no log")],
)  # fmt: skip
def test_files_are_looked_at_before_the_model_is_loaded(name, instead, tmp_path, caplog):
    """One that can't be had is named with what happens without it; strictly, the start ends there."""
    gone = {name: str(tmp_path / "no" / "file.json")}
    with pretended("0.5.23") as registry, caplog.at_level(logging.ERROR):
        register(ON | gone)
        assert registry._hooks
    (record,) = caplog.records
    assert str(tmp_path) in record.message
    assert instead in record.message
    with pretended("0.5.23"), pytest.raises(SystemExit, match=instead):
        register(STRICT | gone)
    with pretended("0.5.23"), pytest.raises(SystemExit, match=instead):
        register(STRICT | {name: str(tmp_path)})


def test_log_in_a_folder_that_is_there(tmp_path):
    """The file itself is made once there is something to write."""
    with pretended("0.5.23"):
        register(STRICT | {"KPOLICY_DECISION_LOG": str(tmp_path / "log.jsonl")})
    assert not list(tmp_path.iterdir())


def test_bad_setting_leaves_sglang_alone(caplog):
    """A setting that can't be read is named, and nothing is hooked."""
    with pretended("0.5.23") as registry:
        with caplog.at_level(logging.ERROR):
            register(ON | {"KPOLICY_DECODE_SIZES": "8,4"})
        assert "KPOLICY_DECODE_SIZES is 8,4" in caplog.text
        assert not registry._hooks
        with pytest.raises(SystemExit, match="KPOLICY_DECODE_SIZES is 8,4"):
            register(STRICT | {"KPOLICY_DECODE_SIZES": "8,4"})
