"""The XPU executor over a pretended torch.xpu, whose graph class takes what torch's own takes."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kpolicy.errors import ConfigError, StickyDeviceError  # noqa: E402
from kpolicy.executors.xpu import XpuAdapter, XpuExecutor  # noqa: E402
from kpolicy.reasons import Reason  # noqa: E402
from kpolicy.registry import GraphRegistry  # noqa: E402
from tests.executors_launcher.checker import Checker, batcher_steps, load_family, plan  # noqa: E402
from tests.fakes.torch_npu import fake_torch_npu  # noqa: E402


def fake_xpu() -> Any:
    npu = fake_torch_npu().npu

    class XPUGraph(npu.NPUGraph):  # type: ignore[misc]
        def capture_begin(self, pool: Any = None) -> None:
            super().capture_begin(pool)

    return SimpleNamespace(**vars(npu), XPUGraph=XPUGraph)


def test_modes_are_eager_bit_for_bit() -> None:
    """FULL, PIECEWISE and SPLIT steps equal their rows run eagerly at the same shape."""
    model = load_family("llama")
    executor, registry = XpuExecutor(model, library=fake_xpu(), check=True), GraphRegistry()
    keys = plan(model)
    registry.plan(keys)
    executor.open(registry)
    executor.capture(keys)
    assert set(registry.captured()) == set(keys)
    checker = Checker(executor, model)  # type: ignore[arg-type]
    for _ in batcher_steps(checker, registry.captured(), 30, seed=4):
        pass
    assert {"full", "piecewise", "split/in_turn"} <= {label.split()[0] for label in checker.steps}


def test_a_failed_capture_leaves_the_device_usable() -> None:
    """A capture that fails midway is given up, and the next one works."""
    model = load_family("llama")
    executor, registry = XpuExecutor(model, library=fake_xpu(), faults=["mid_segment@1"]), GraphRegistry()
    keys = plan(model)
    registry.plan(keys)
    executor.open(registry)
    executor.capture(keys)
    assert len(registry.captured()) == len(keys) - 1
    executor.capture([key for key in keys if key not in registry.captured()])
    assert len(registry.captured()) == len(keys)


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
