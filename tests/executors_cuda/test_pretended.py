"""A whole `CudaExecutor` over a pretended `torch.cuda`: every mode, failed captures, streams. `tests/gpu` has one."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kpolicy.executors.cuda import CudaExecutor, streams  # noqa: E402
from kpolicy.executors.cuda import adapter as cuda_adapter  # noqa: E402
from kpolicy.keys import GraphKey  # noqa: E402
from kpolicy.modes import Part  # noqa: E402
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


def _again(executor: CudaExecutor, registry: GraphRegistry, keys: Any) -> None:
    """Capture what isn't there yet."""
    executor.capture([key for key in keys if key not in registry.captured()])
    assert set(registry.captured()) == set(keys)


@pytest.fixture
def ended(library: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The device ends the first capture itself, with an error; what torch's allocator is told of pools then."""
    told: list[Any] = []
    graph, broken = library.NPUGraph, []

    class Graph(graph):  # type: ignore[misc]
        def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
            told.append(("begin", pool))
            super().capture_begin(pool, capture_error_mode)

        def capture_end(self) -> None:
            super().capture_end()
            if not broken:
                broken.append(self)
                raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, lambda _, pool, name=name: told.append((name, pool)), raising=False)
    return told


@pytest.mark.parametrize("part", list(Part))
def test_a_capture_that_the_device_ended_is_mended(part: Part, ended: list[Any]) -> None:
    """torch's allocator is told that its pool is over, an empty capture ends well, and the next has a new pool."""
    model = load_family("llama")
    executor, registry = CudaExecutor(model, device="cpu"), GraphRegistry()
    keys = [key for key in plan(model) if key.part is part]
    registry.plan(keys)
    executor.open(registry)
    executor.capture(keys)
    assert len(registry.captured()) == len(keys) - 1
    (begun, first), *after = ended[:5]
    assert begun == "begin"
    assert after[:3] == [("_cuda_endAllocateToPool", first), ("_cuda_releasePool", first), ("begin", None)]
    assert after[3][0] == "begin"
    assert after[3][1] not in (None, first)
    _again(executor, registry, keys)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("lost", [False, True])
def test_a_failed_capture_that_cannot_be_reset_tells_of_a_lost_device(
    lost: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where freeing it fails too, a lost device is an error at once; otherwise it is said and the capture's tells."""
    words = "an illegal memory access was encountered" if lost else "invalid argument"

    def reset(_: Any) -> None:
        raise RuntimeError(f"CUDA error: {words}")

    adapter = CudaExecutor(load_family("llama"), device="cpu").adapter
    monkeypatch.setattr(torch.cuda.CUDAGraph, "reset", reset)

    def fails(pool: Any) -> None:
        with adapter.recording(pool):
            adapter.begin(pool)
            raise RuntimeError("the model's own")

    with pytest.raises(RuntimeError) as caught:
        fails(adapter.new_pool())
    assert adapter.classify(caught.value).sticky is lost
    assert (str(caught.value) == "the model's own") is not lost
    assert ("may not be free: CUDA error: invalid argument" in caplog.text) is not lost


@pytest.mark.usefixtures("library")
def test_pieces_that_cannot_be_reset_leave_the_captures_own_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The third piece fails, and then freeing the first two: the key's reason is what broke the capture."""
    model, key = load_family("llama"), GraphKey(Part.PIECEWISE, 8)
    executor, registry = CudaExecutor(model, device="cpu", faults=["mid_segment@3"]), GraphRegistry()
    registry.plan([key])
    executor.open(registry)

    def reset(_: Any) -> None:
        raise RuntimeError("CUDA error: invalid argument")

    monkeypatch.setattr(torch.cuda.CUDAGraph, "reset", reset)
    executor.capture([key])
    assert "mid_segment" in executor.capture_errors[key]
    assert caplog.text.count("may not be free: CUDA error: invalid argument") == 3


@pytest.mark.parametrize("part", list(Part))
def test_a_capture_that_fails_ends_before_anybody_waits_for_its_stream(
    part: Part, library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA lets no stream wait for one that records, and a recording end on its own stream alone."""
    model = load_family("llama")
    executor, registry = CudaExecutor(model, device="cpu"), GraphRegistry()
    adapter, key = executor.adapter, next(key for key in plan(model) if key.part is part)
    registry.plan([key])
    executor.open(registry)
    calls: list[tuple[str, bool]] = []
    wait, ended, begin = library.Stream.wait_stream, adapter._ended, adapter.begin

    def waits(stream: Any, other: Any) -> None:
        calls.append(("waits", adapter._recording is None))
        wait(stream, other)

    def ends(recorded: Any) -> None:
        calls.append(("ends", adapter._current() == executor._pools[0].memory.memory.stream))
        ended(recorded)

    def fails(_: Any) -> Any:
        raise RuntimeError("the device refused")

    with monkeypatch.context() as patch:
        patch.setattr(library.Stream, "wait_stream", waits)
        patch.setattr(adapter, "_ended", ends)
        patch.setattr(adapter, "begin", lambda pool: (begin(pool), patch.setattr(model, "forward", fails)))
        executor.capture([key])
    assert "the device refused" in executor.capture_errors[key]
    assert calls == [("waits", True), ("ends", True), ("waits", True)]
    executor.capture([key])
    assert registry.captured() == (key,)
