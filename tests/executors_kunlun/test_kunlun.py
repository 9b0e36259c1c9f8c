"""The Kunlun executor over a pretended torch_xmlir: proof before use, and trials before FULL graphs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kpolicy.attention import AttentionSupport, Claims, HostParams  # noqa: E402
from kpolicy.engine import Engine  # noqa: E402
from kpolicy.errors import ConfigError, StickyDeviceError  # noqa: E402
from kpolicy.executors import OF_TENSORS  # noqa: E402
from kpolicy.executors.kunlun import KunlunAdapter, KunlunExecutor, Trial, proven  # noqa: E402
from kpolicy.executors.kunlun.trial import try_kind  # noqa: E402
from kpolicy.modes import Part  # noqa: E402
from kpolicy.reasons import Reason  # noqa: E402
from kpolicy.registry import GraphRegistry  # noqa: E402
from kpolicy.serving.kernels import choose_kernels, kernels_here  # noqa: E402
from kpolicy.settings import Settings  # noqa: E402
from kpolicy.testing import EXECUTOR_CHECKS  # noqa: E402
from tests.executors_ascend.helpers import on_ascend  # noqa: E402
from tests.executors_launcher.checker import Checker, batcher_steps, drafting_steps, load_family, plan  # noqa: E402
from tests.executors_launcher.conftest import SMALL  # noqa: E402
from tests.fakes.torch_npu import fake_torch_npu  # noqa: E402
from tests.fakes.torch_xmlir import SOUND, fake_cuda, fake_xmlir  # noqa: E402


def on_kunlun(model: Any, *, frozen: bool) -> tuple[Any, dict[str, Any]]:
    """The model with attention that claims to read lengths on the host: it does, or it reads the device's after all."""
    library = fake_torch_npu()
    if frozen:
        on_ascend(model, library)
    claims = Claims.at_level("mixed", host_params=HostParams.FROZEN)
    latent = any(hasattr(layer, "rank") for layer in model.layers)
    if latent:
        claims = Claims.at_level("uniform", host_params=HostParams.FROZEN, one_computation=False)
    model._support = AttentionSupport.of(claims, backend="KUNLUN_ATTN", source="tests")
    return model, {"xmlir": fake_xmlir(), "library": fake_cuda(library), "environ": SOUND}


def test_a_card_is_proved_by_torch_xmlir_alone() -> None:
    """What `torch.cuda` says of itself proves nothing; half an installation and no card are errors that say so."""
    cuda = fake_cuda()
    adapter = KunlunAdapter("cpu", xmlir=fake_xmlir(), library=cuda, environ=SOUND)
    report = adapter.probe()
    assert "_xpu_get_devices_number" in report.facts["proof"]
    assert "unverified on hardware" in report.reason
    with pytest.raises(ConfigError, match="finds no Kunlun card"):
        KunlunAdapter("cpu", xmlir=fake_xmlir(0), library=cuda, environ=SOUND)
    with pytest.raises(ConfigError, match="installed in part"):
        KunlunAdapter("cpu", xmlir=SimpleNamespace(), library=cuda, environ=SOUND)
    with pytest.raises(ConfigError, match="torch_xmlir isn't installed"):
        KunlunAdapter("cuda")


@pytest.mark.parametrize(
    ("environ", "what"),
    [
        ({"XMLIR_FORCE_USE_XPU_GRAPH": "true"}, "isn't a whole number"),
        ({**SOUND, "XMLIR_DISABLE_CUDA_ALLOCATOR": "1"}, "unset it"),
    ],
)
def test_variables_that_break_graphs_are_errors(environ: dict[str, str], what: str) -> None:
    """They are named with their value and the next step."""
    with pytest.raises(ConfigError, match=what):
        KunlunAdapter("cpu", xmlir=fake_xmlir(), library=fake_cuda(), environ=environ)


def test_a_variable_that_breaks_the_import_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch_xmlir reads it with int() and doesn't import: the error names the variable, not the library's words."""
    (tmp_path / "torch_xmlir.py").write_text("int('true')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="XMLIR_FORCE_USE_XPU_GRAPH='true' isn't a whole number"):
        KunlunAdapter("cuda", environ={"XMLIR_FORCE_USE_XPU_GRAPH": "true"})
    with pytest.raises(ConfigError, match="torch_xmlir doesn't import: invalid literal"):
        KunlunAdapter("cuda", environ=SOUND)


def test_kernels_of_nvidia_are_not_for_a_card_that_says_it_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch_xmlir answers for torch.cuda, a loaded model gets plain kernels."""
    monkeypatch.setitem(sys.modules, "torch_xmlir", fake_xmlir())
    for name, value in (("get_device_name", "GPU"), ("get_device_capability", (8, 6))):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    assert choose_kernels(torch.device("cuda", 0)).name == "plain"


@pytest.mark.parametrize("xmlir", [None, fake_xmlir(0)], ids=["broken", "no card"])
def test_a_torch_xmlir_that_proves_nothing_costs_cuda_nothing(xmlir: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken, which leaves None among the modules, or without a card: NVIDIA's devices keep their kernels."""
    monkeypatch.setitem(sys.modules, "torch_xmlir", xmlir)
    monkeypatch.setattr("kpolicy.serving.kernels.find_spec", lambda name: object() if name != "flashinfer" else None)
    for name, value in (("get_device_name", "NVIDIA H200"), ("get_device_capability", (9, 0))):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    here = kernels_here(torch.device("cuda"))
    assert here["triton"] == here["flash"] == ""
    assert "runs on Kunlun cards" in here["kunlun"]


def test_drafts_of_any_length_are_tried_by_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """An Engine that makes its executor tries the decode rows of its settings, so k = 5 keeps FULL decode graphs."""
    model, options = on_kunlun(load_family("llama"), frozen=False)
    made: list[dict[str, Any]] = []

    def executor(**arguments: Any) -> KunlunExecutor:
        made.append(arguments)
        return KunlunExecutor(**arguments, **options)

    monkeypatch.setattr("kpolicy.executors.kunlun.KunlunExecutor", executor)
    monkeypatch.setitem(OF_TENSORS, "cpu", ("kunlun",))
    for device in ("kunlun", "auto"):
        settings = Settings(max_num_reqs=4, max_num_tokens=24, num_speculative_tokens=5)
        engine = Engine(
            "full_and_piecewise", model=model, device=device, settings=settings, ladder=[6, 12], calibrate=0
        )
        assert made[-1]["query_len"] == 6
        engine.capture()
        assert {key.query_len for key in engine.registry.captured() if key.part is Part.FULL} >= {1, 6}
        engine.release()


def test_variables_that_matter_less_are_told() -> None:
    """The mock of torch.compile and the stock graph classes are in the probe's words."""
    adapter = KunlunAdapter("cpu", xmlir=fake_xmlir(), library=fake_cuda(), environ={})
    assert "mocked" in adapter.probe().reason
    assert "XMLIR_FORCE_USE_XPU_GRAPH isn't set" in adapter.probe().reason


@pytest.mark.parametrize("query_len", [1, 3, None])
def test_attention_that_reads_the_device_passes_the_trial(query_len: int | None) -> None:
    """Four replays, shorter and longer, over other tables and row counts, have eager's bits; KV is as before."""
    model, options = on_kunlun(load_family("llama"), frozen=False)
    for cache in model.kv_caches():
        cache.fill_(0.25)
    trial = try_kind(KunlunAdapter("cpu", **options), model, query_len)
    assert trial == Trial(trial.kind, 4)
    assert trial.passed
    assert all(bool((cache[:-1] == 0.25).all()) for cache in model.kv_caches())


@pytest.mark.parametrize(("family", "query_len"), [("llama", 1), ("llama", None), ("deepseek_v2", 1)])
def test_attention_that_keeps_its_lengths_fails_the_trial(family: str, query_len: int | None) -> None:
    """An operator that reads host copies replays the capture's lengths: the first other length shows it."""
    model, options = on_kunlun(load_family(family), frozen=True)
    trial = try_kind(KunlunAdapter("cpu", **options), model, query_len)
    assert not trial.passed
    assert "shorter rows isn't what eager computes" in trial.problem


def test_a_device_that_is_lost_in_a_trial_is_named() -> None:
    """It isn't taken for attention that can't be captured, which every later step would then run into."""
    model, options = on_kunlun(load_family("llama"), frozen=False)
    with pytest.raises(StickyDeviceError, match=r"trying FULL graphs of decodes of 1 tokens: .*device is lost"):
        KunlunExecutor(model, faults=["sticky@1"], **options)


def test_decode_rows_of_no_tokens_are_not_tried() -> None:
    """They would fail their trial, and with it every FULL graph."""
    model, options = on_kunlun(load_family("llama"), frozen=False)
    with pytest.raises(ConfigError, match="query_len is -3; decode rows have at least 1 token"):
        KunlunExecutor(model, query_len=-3, **options)


def test_a_model_that_cannot_be_tried_is_not_proven() -> None:
    """Without block_size, or with too little KV, nothing is captured and the reason is said."""
    _, options = on_kunlun(load_family("llama"), frozen=False)
    adapter = KunlunAdapter("cpu", **options)
    bare = SimpleNamespace(vocab=8)
    assert "block_size" in try_kind(adapter, bare, 1).problem
    small = SimpleNamespace(vocab=8, block_size=16, max_blocks=1, num_slots=16)
    assert "too small" in try_kind(adapter, small, 1).problem


def test_proven_attention_gets_full_graphs_that_equal_eager() -> None:
    """FULL, PIECEWISE and SPLIT steps of a proven model have eager's bits."""
    model, options = on_kunlun(load_family("llama"), frozen=False)
    assert not model.support.claims.full.mixed
    able = proven(model, KunlunAdapter("cpu", **options), query_len=3)
    assert able.support.claims.full.mixed
    executor, registry = KunlunExecutor(able, **options), GraphRegistry()
    keys = plan(able)
    registry.plan(keys)
    executor.open(registry)
    executor.capture(keys)
    assert set(registry.captured()) == set(keys)
    assert {key.part for key in keys} == set(Part)
    checker = Checker(executor, able)  # type: ignore[arg-type]
    for steps in (batcher_steps, drafting_steps):
        for _ in steps(checker, registry.captured(), 30, seed=2):
            pass
    assert {"full", "piecewise", "split/in_turn"} <= {label.split()[0] for label in checker.steps}


def test_unproven_attention_runs_in_pieces_and_full_is_refused_with_the_reason() -> None:
    """Policies plan no FULL graphs of it; one that is asked for all the same fails with the trial's words."""
    model, options = on_kunlun(load_family("llama"), frozen=True)
    able = proven(model, KunlunAdapter("cpu", **options))
    assert not able.support.claims.full.uniform_query_len
    executor = KunlunExecutor(able, **options)
    engine = Engine("full_and_piecewise", executor=executor, attention=able.support, ladder=[8, 16], calibrate=0)
    engine.capture()
    assert {key.part for key in engine.registry.captured()} == {Part.PIECEWISE}
    other, options = on_kunlun(load_family("llama"), frozen=True)
    executor, registry = KunlunExecutor(other, **options), GraphRegistry()
    keys = [key for key in plan(load_family("llama")) if key.query_len == 1]
    registry.plan(keys)
    executor.open(registry)
    executor.capture(keys)
    assert {registry.record(key).reason for key in keys} == {Reason.HOST_LENGTHS_FROZEN}
    assert len(executor.trials) == 3
    assert all("shorter rows" in words for words in executor.capture_errors.values())


HELD = [check for check in EXECUTOR_CHECKS if not check.__name__.startswith(("rows_", "repeats_", "modes_"))]
"""Those that random steps here and the Ascend executor's run of the suite don't go through on the same code."""


@pytest.mark.parametrize("check", HELD, ids=lambda check: check.__name__)
def test_contract(check: Callable[..., None]) -> None:
    """The Kunlun executor keeps the contract that all executors keep."""
    from kpolicy.serving.load import load

    def make() -> KunlunExecutor:
        model = load(SMALL, num_blocks=64, block_size=16, max_model_len=512, max_num_reqs=8)
        return KunlunExecutor(model, xmlir=fake_xmlir(), library=fake_cuda(), environ=SOUND)

    fewer = {"seeds": range(1)} if "seeds" in signature(check).parameters else {}
    check(make, close=lambda a, b: bool(torch.allclose(a, b, rtol=1e-3, atol=1e-4)), **fewer)
