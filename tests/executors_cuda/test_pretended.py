"""A whole `CudaExecutor` over a pretended `torch.cuda`: every mode, failed captures, streams. `tests/gpu` has one."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kpolicy.executors.cuda import CudaExecutor, streams  # noqa: E402
from kpolicy.executors.cuda import adapter as cuda_adapter  # noqa: E402
from kpolicy.registry import GraphRegistry  # noqa: E402
from tests.executors_launcher.checker import Checker, batcher_steps, kept_by_outputs, load_family, plan  # noqa: E402
from tests.fakes.torch_npu import fake_torch_npu  # noqa: E402


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`torch.cuda` is the pretended device's, whose tensors are on the CPU."""
    npu, handles = fake_torch_npu().npu, count(1)

    class Stream(npu.Stream):  # type: ignore[misc]
        def __init__(self, device: Any = None, priority: int = 0) -> None:
            super().__init__(device, priority)
            self.cuda_stream = next(handles)

    names = ("Event", "stream", "current_stream", "graph_pool_handle", "synchronize", "mem_get_info", "empty_cache")
    for name in names:
        monkeypatch.setattr(torch.cuda, name, getattr(npu, name), raising=False)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", npu.NPUGraph, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _=None: "pretended")
    monkeypatch.setattr(streams, "_spare", {})
    monkeypatch.setattr(streams, "_held", {})
    monkeypatch.setattr(cuda_adapter, "_device", torch.device)
    monkeypatch.setattr(cuda_adapter, "_current_device", lambda: None)
    monkeypatch.setattr(cuda_adapter, "_raw_stream", lambda _: npu.current_stream().number)
    return npu


def opened(family: str, **options: Any) -> tuple[CudaExecutor, Any, GraphRegistry, Any]:
    model = load_family(family)
    executor, registry = CudaExecutor(model, device="cpu", **options), GraphRegistry()
    keys = plan(model)
    registry.plan(keys)
    executor.open(registry)
    executor.capture(keys)
    return executor, model, registry, keys


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("family", ["llama", "deepseek_v2"])
def test_modes_are_eager_bit_for_bit(family: str, check: bool) -> None:
    """FULL, PIECEWISE and SPLIT steps equal their rows run eagerly at the same shape."""
    executor, model, registry, keys = opened(family, check=check)
    assert set(registry.captured()) == set(keys)
    checker = Checker(executor, model)  # type: ignore[arg-type]
    for _ in batcher_steps(checker, registry.captured(), 30, seed=4):
        pass
    assert {"full", "piecewise", "split/in_turn"} <= {label.split()[0] for label in checker.steps}


@pytest.mark.usefixtures("library")
def test_a_failed_capture_leaves_the_device_usable() -> None:
    """A capture that fails midway is given up, and the next one works; the streams of pools that go are used again."""
    executor, _, registry, keys = opened("llama", faults=["mid_segment@1"])
    assert len(registry.captured()) == len(keys) - 1
    executor.capture([key for key in keys if key not in registry.captured()])
    assert len(registry.captured()) == len(keys)
    executor.release()
    assert streams._spare
    assert not executor.adapter._pools


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("policy", ["eager", "piecewise", "full"])
def test_outputs_do_not_keep_the_model(policy: str) -> None:
    """Who holds a step's outputs after release holds neither weights nor KV: another model needs their memory."""
    assert kept_by_outputs(lambda model: CudaExecutor(model, device="cpu"), policy) == []
