"""Executors over a pretended torch.xpu and torch.accelerator, whose graph classes take what torch's own take."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kpolicy.attention import AttentionSupport, Claims, HostParams  # noqa: E402
from kpolicy.errors import ConfigError, StickyDeviceError  # noqa: E402
from kpolicy.executors.xpu import AcceleratorAdapter, AcceleratorExecutor, XpuAdapter, XpuExecutor  # noqa: E402
from kpolicy.executors.xpu.accelerator import TorchAccelerator  # noqa: E402
from kpolicy.modes import Part  # noqa: E402
from kpolicy.reasons import Reason  # noqa: E402
from kpolicy.registry import GraphRegistry  # noqa: E402
from kpolicy.testing import EXECUTOR_CHECKS  # noqa: E402
from tests.executors_launcher.checker import Checker, batcher_steps, kept_by_outputs, load_family, plan  # noqa: E402
from tests.executors_launcher.conftest import SMALL  # noqa: E402
from tests.fakes.torch_xpu import fake_accelerator, fake_xpu  # noqa: E402

KINDS = [(XpuExecutor, fake_xpu), (AcceleratorExecutor, fake_accelerator)]


@pytest.mark.parametrize("family", ["llama", "deepseek_v2"])
@pytest.mark.parametrize(("make", "library"), KINDS)
def test_modes_are_eager_bit_for_bit(make: Any, library: Any, family: str) -> None:
    """FULL, PIECEWISE and SPLIT steps equal their rows run eagerly at the same shape."""
    model = load_family(family)
    executor, registry = make(model, library=library(), check=True), GraphRegistry()
    keys = plan(model)
    registry.plan(keys)
    executor.open(registry)
    executor.capture(keys)
    assert set(registry.captured()) == set(keys)
    checker = Checker(executor, model)  # type: ignore[arg-type]
    for _ in batcher_steps(checker, registry.captured(), 30, seed=4):
        pass
    assert {"full", "piecewise", "split/in_turn"} <= {label.split()[0] for label in checker.steps}


@pytest.mark.parametrize(("make", "library"), KINDS)
def test_a_failed_capture_leaves_the_device_usable(make: Any, library: Any) -> None:
    """A capture that fails midway is given up, and the next one works."""
    model = load_family("llama")
    executor, registry = make(model, library=library(), faults=["mid_segment@1"]), GraphRegistry()
    keys = plan(model)
    registry.plan(keys)
    executor.open(registry)
    executor.capture(keys)
    assert len(registry.captured()) == len(keys) - 1
    executor.capture([key for key in keys if key not in registry.captured()])
    assert len(registry.captured()) == len(keys)


@pytest.mark.parametrize("policy", ["eager", "piecewise", "full"])
@pytest.mark.parametrize(("make", "library"), KINDS)
def test_outputs_do_not_keep_the_model(make: Any, library: Any, policy: str) -> None:
    """Who holds a step's outputs after release holds neither weights nor KV."""
    assert kept_by_outputs(lambda model: make(model, library=library()), policy) == []


def test_what_the_adapter_calls_is_torchs_own() -> None:
    """The names and arguments are those of the torch that is installed."""
    xpu = torch.xpu
    assert list(inspect.signature(xpu.XPUGraph.capture_begin).parameters) == ["self", "pool"]
    for name in ("capture_end", "replay", "reset"):
        assert callable(getattr(xpu.XPUGraph, name))
    for name in ("Stream", "Event", "stream", "current_stream", "graph_pool_handle", "synchronize", "mem_get_info",
                 "empty_cache", "is_available", "current_device", "get_device_name"):  # fmt: skip
        assert callable(getattr(xpu, name)), name
    assert "enable_timing" in inspect.signature(xpu.Event.__new__).parameters


def test_what_cannot_be_used_is_said() -> None:
    """No GPU, a device of another kind, and a torch without graphs."""
    with pytest.raises(ConfigError, match="takes 'xpu'"):
        XpuAdapter("cuda:0")
    if not torch.xpu.is_available():
        with pytest.raises(ConfigError, match="finds no GPU"):
            XpuAdapter("xpu")
    old = fake_xpu()
    del old.XPUGraph
    with pytest.raises(ConfigError, match="has no XPUGraph"):
        XpuAdapter("cpu", library=old)


def test_errors_are_told_apart() -> None:
    """Memory, a lost device, and the rest."""
    classify = XpuAdapter("cpu", library=fake_xpu()).classify
    assert classify(torch.OutOfMemoryError("x")).reason is Reason.CAPTURE_OUT_OF_MEMORY
    assert classify(RuntimeError("level_zero: UR_RESULT_ERROR_DEVICE_LOST")).sticky
    assert classify(StickyDeviceError("x")).sticky
    assert classify(RuntimeError("x")) == (Reason.CAPTURE_FAILED, False)


def arguments(function: Any) -> list[str]:
    """Each argument with its default, by its name."""
    return [
        each.name if each.default is each.empty else f"{each.name}={each.default!r}"
        for each in inspect.signature(function).parameters.values()
    ]


@pytest.mark.skipif(not hasattr(torch.accelerator, "Graph"), reason="torch has no torch.accelerator.Graph")
def test_the_pretended_accelerator_takes_what_torchs_own_takes() -> None:
    """Graphs are made, begun and ended with the same arguments, and the adapter's names are there."""
    made, published = fake_accelerator().Graph, torch.accelerator.Graph
    assert arguments(made.__init__) == arguments(published.__init__)
    assert arguments(made.capture_begin) == arguments(published.capture_begin)
    for name in ("capture_end", "replay", "reset", "pool"):
        assert callable(getattr(published, name)), name
    for name in ("current_stream", "synchronize", "get_memory_info", "empty_cache", "current_accelerator"):
        assert callable(getattr(torch.accelerator, name)), name
    for kind, names in ((torch.Stream, ("wait_stream", "record_event", "__enter__")), (torch.Event, ("query", "wait"))):
        assert all(hasattr(kind, name) for name in names)
    wanted = set(vars(fake_accelerator()))
    assert wanted <= set(dir(TorchAccelerator(torch.device("cpu"))))


def test_an_accelerator_that_is_not_there_is_said() -> None:
    """No accelerator, and a torch without its graphs."""
    if not torch.accelerator.is_available():
        with pytest.raises(ConfigError, match=r"torch\.accelerator finds none"):
            AcceleratorAdapter()
    old = fake_accelerator()
    del old.Graph
    with pytest.raises(ConfigError, match=r"has no torch\.accelerator\.Graph; torch 2\.13"):
        AcceleratorAdapter("cpu", library=old)


@pytest.mark.parametrize(("make", "library"), KINDS)
def test_lengths_on_the_host_keep_attention_out_of_graphs(make: Any, library: Any) -> None:
    """Nothing rewrites them here, so FULL graphs of such attention are refused with the reason."""
    model = load_family("llama")
    keys = plan(model)
    model._support = AttentionSupport.of(
        Claims.at_level("mixed", host_params=HostParams.UPDATABLE), backend="lists", source="tests"
    )  # fmt: skip
    executor, registry = make(model, library=library()), GraphRegistry()
    registry.plan(keys)
    executor.open(registry)
    executor.capture(keys)
    assert {key.part for key in registry.captured()} == {Part.PIECEWISE}
    reasons = {registry.record(key).reason for key in keys if key.part is Part.FULL}
    assert reasons == {Reason.HOST_LENGTHS_FROZEN}


@pytest.mark.parametrize("check", EXECUTOR_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize(("make", "library"), KINDS)
def test_contract(make: Any, library: Any, check: Callable[..., None]) -> None:
    """Both executors keep the contract that all executors keep."""
    from kpolicy.serving.load import load

    def made() -> Any:
        model = load(SMALL, num_blocks=64, block_size=16, max_model_len=512, max_num_reqs=8)
        return make(model, library=library())

    fewer = {"seeds": range(1)} if "seeds" in inspect.signature(check).parameters else {}
    check(made, close=lambda a, b: bool(torch.allclose(a, b, rtol=1e-3, atol=1e-4)), **fewer)
