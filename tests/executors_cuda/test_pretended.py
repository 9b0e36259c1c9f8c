"""A whole `CudaExecutor` over a pretended `torch.cuda`: every mode, failed captures, streams. `tests/gpu` has one."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kpolicy.engine import Engine  # noqa: E402
from kpolicy.executors import segments  # noqa: E402
from kpolicy.executors.base import StepInputs, StepOutputs  # noqa: E402
from kpolicy.executors.cuda import CudaExecutor, streams  # noqa: E402
from kpolicy.executors.cuda import adapter as cuda_adapter  # noqa: E402
from kpolicy.keys import GraphKey  # noqa: E402
from kpolicy.modes import Mode, Part  # noqa: E402
from kpolicy.registry import GraphRegistry  # noqa: E402
from kpolicy.settings import Settings  # noqa: E402
from kpolicy.shapes import BatchShape  # noqa: E402
from tests.executors_launcher.checker import (  # noqa: E402
    BLOCK_SIZE,
    Checker,
    batcher_steps,
    kept_by_outputs,
    load_family,
    plan,
)
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
        calls.append(("ends", adapter.current() == executor._pools[0].memory.memory.stream))
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


def decoding(num_reqs: int, first: int = 3, **sampling: Any) -> StepInputs:
    """One token of each row, each with a block of KV of its own and nothing before it."""
    return StepInputs(
        BatchShape.decode(num_reqs, num_reqs).numbers, [1] * num_reqs, [first + i for i in range(num_reqs)],
        [0] * num_reqs, [BLOCK_SIZE * i for i in range(num_reqs)], [[i] for i in range(num_reqs)], [1] * num_reqs,
        list(range(num_reqs)), sampling=sampling,
    )  # fmt: skip


def full_engine(**attributes: Any) -> tuple[Engine, Any]:
    """An Engine with FULL graphs of decodes, and its model with those attributes."""
    model = load_family("llama")
    for name, value in attributes.items():
        setattr(model, name, value)
    settings = Settings(max_num_reqs=8, max_num_tokens=32)
    executor = CudaExecutor(model, device="cpu")
    engine = Engine("full", executor=executor, settings=settings, calibrate=0, ladder=[4, 8])
    engine.capture()
    return engine, model


def found_of(outputs: StepOutputs) -> tuple[list[int], Any]:
    """(tokens, logits) of a step of decodes, each in memory that stays."""
    rows: Any = outputs.outputs
    return list(outputs.tokens[0]), rows.tensor.clone()


def noted_samples(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the model is asked to sample from here on: the names of each step's sampling inputs."""
    asked, sample = [], model.sample

    def noted(logits: Any, step: Any) -> Any:
        asked.append(sorted(step))
        return sample(logits, step)

    monkeypatch.setattr(model, "sample", noted)
    return asked


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("num_reqs", [1, 3, 4, 7])
def test_a_graph_of_decodes_samples_greedily(num_reqs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is sampled behind it; tokens and logits are those of the general way, and of EAGER, to the bit."""
    engine, model = full_engine()
    asked, inputs = noted_samples(model, monkeypatch), decoding(num_reqs)
    outputs = engine.step(inputs)
    assert outputs.decision.mode is Mode.FULL
    tokens, logits = found_of(outputs)
    assert asked == []
    assert tokens == logits.argmax(-1).tolist()
    assert logits.shape == (num_reqs, model.vocab)
    assert [torch.equal(row, logits[i]) for i, row in enumerate(outputs.outputs)] == [True] * num_reqs
    launcher: Any = engine.executor.launcher  # type: ignore[union-attr]
    launch = outputs.decision.launches[0]
    assert launch.key is not None
    launcher.start(outputs.decision)
    general = launcher.replay(engine.registry.record(launch.key).handle, inputs, launch)
    for part in (general, launcher.eager_as(launch.key, inputs)):
        assert list(part.tokens[0]) == tokens
        assert torch.equal(part.outputs.tensor, logits)
    assert asked == [[], []]


@pytest.mark.usefixtures("library")
def test_what_a_graph_sampled_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs that nobody has read yet are as they were when the graph, and a larger one, ran again; released, too."""
    engine, model = full_engine()
    asked = noted_samples(model, monkeypatch)
    wanted = [found_of(engine.step(decoding(num_reqs, first))) for num_reqs, first in [(3, 3), (3, 9), (8, 1), (2, 5)]]
    assert len({tuple(tokens) for tokens, _ in wanted}) == 4
    steps = [engine.step(decoding(num_reqs, first)) for num_reqs, first in [(3, 3), (3, 9), (8, 1), (2, 5)]]
    engine.release()
    for outputs, (tokens, logits) in zip(steps, wanted, strict=True):
        assert list(outputs.tokens[0]) == tokens
        assert torch.equal(outputs.outputs.tensor, logits)  # type: ignore[attr-defined]
    assert asked == []


@pytest.mark.usefixtures("library")
def test_rows_with_sampling_inputs_are_sampled_behind_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """As without a graph that samples: by their temperature and seed; those that are all greedy aren't."""
    tokens = []
    for greedy in (True, False):
        engine, model = full_engine(greedy_in_graphs=greedy)
        asked = noted_samples(model, monkeypatch)
        steps = [
            engine.step(decoding(3, temperature=[50.0, 0.0, 50.0], seed=[seed, 5, 11])) for seed in (1, 2, 3, 4)
        ]  # fmt: skip
        tokens.append([list(outputs.tokens[0]) for outputs in steps])
        assert asked == [["position", "seed", "temperature"]] * 4
        cold = engine.step(decoding(3, temperature=[0.0] * 3, seed=[1, 5, 11]))
        assert asked[4:] == [[]] * (not greedy)
        tokens[-1].append(list(cold.tokens[0]))
    assert tokens[0] == tokens[1]
    assert len({row[0] for row in tokens[0]}) > 1


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("why", ["model", "bytes"])
def test_a_graph_that_may_not_sample_leaves_it_to_the_step(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the model doesn't say that it can be captured, and where logits are too many bytes to copy."""
    wanted = found_of(full_engine()[0].step(decoding(3)))
    if why == "bytes":
        monkeypatch.setattr(segments, "MOST_JOINED_BYTES", 1000)
    engine, model = full_engine(greedy_in_graphs=why != "model")
    asked = noted_samples(model, monkeypatch)
    tokens, logits = found_of(engine.step(decoding(3)))
    assert asked == [[]]
    assert tokens == wanted[0]
    assert torch.equal(logits, wanted[1])


@pytest.mark.usefixtures("library")
def test_a_capture_whose_sampling_fails_costs_its_graph() -> None:
    """As any that fails: the step runs without it, and samples all the same."""

    def fails(logits: Any, step: Any) -> Any:
        if torch.cuda.current_stream() is not main:  # type: ignore[no-untyped-call]
            raise RuntimeError("this can't be captured")
        return sample(logits, step)

    model, main = load_family("llama"), torch.cuda.current_stream()  # type: ignore[no-untyped-call]
    model.sample, sample = fails, model.sample
    executor, settings = CudaExecutor(model, device="cpu"), Settings(max_num_reqs=8, max_num_tokens=32)
    engine = Engine("full", executor=executor, settings=settings, calibrate=0, ladder=[4, 8])
    engine.capture()
    assert not any(key.decode_only for key in engine.registry.captured())
    assert executor.capture_errors
    assert all("this can't be captured" in why for why in executor.capture_errors.values())
    assert found_of(engine.step(decoding(3)))[0] == found_of(full_engine()[0].step(decoding(3)))[0]
