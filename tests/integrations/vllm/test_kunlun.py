# ruff: noqa: ARG005 - arguments are those of vLLM's own
"""The graph wrapper for vLLM-Kunlun over a pretended vLLM: captures that fail, and FULL graphs on probation."""

from __future__ import annotations

import sys
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

from kpolicy_vllm import kunlun  # noqa: E402
from kpolicy_vllm.kunlun import use_wrapper, wrapper_class  # noqa: E402
from kpolicy_vllm.kunlun_probation import PATIENCE  # noqa: E402


class Mode(Enum):
    NONE = 0
    PIECEWISE = 1
    FULL = 2


class Desc(NamedTuple):
    num_tokens: int
    num_reqs: int | None = None


class Wrapper:
    """As vLLM's: the first call of a descriptor captures, later ones replay what was captured."""

    def __init__(
        self, runnable: Any, vllm_config: Any, runtime_mode: Mode, cudagraph_options: Any = None
    ) -> None:  # fmt: skip
        self.runnable, self.vllm_config, self.runtime_mode = runnable, vllm_config, runtime_mode
        self.cudagraph_options = cudagraph_options
        self.concrete_cudagraph_entries: dict[Desc, Any] = {}

    def __call__(self, *args: Any, **named: Any) -> Any:
        entry = self.concrete_cudagraph_entries.setdefault(
            context.now.batch_descriptor, SimpleNamespace(cudagraph=None)
        )
        if entry.cudagraph is None:
            output = self.runnable(*args, **named)
            kept = context.now.attn_metadata["layer"].context_lens_cpu.clone()
            entry.cudagraph = kept
            return output
        return self.runnable(*args, frozen=entry.cudagraph, **named)


class Context:
    """Holds the step's forward context."""

    now: Any = None

    def get(self) -> Any:
        return self.now


context = Context()


class DecodeMetadata:
    """Lengths on the host beside those on the device, as vLLM-Kunlun's."""

    def __init__(self, lens: list[int], block: int = 0) -> None:
        self.context_lens_cpu = torch.tensor(lens, dtype=torch.int32)
        self.block_tables = torch.full((len(lens), 2), block)
        self.max_model_len = 4096
        self.num_actual_tokens = len(lens)


class GDNMetadata(DecodeMetadata):
    """Metadata of linear attention."""


class Model:
    """Attention that reads lengths on the host, or on the device; a graph keeps the host's."""

    def __init__(self, *, frozen: bool) -> None:
        self.frozen = frozen
        self.calls = 0
        self.fails: Exception | None = None

    def __call__(self, hidden: Any, *, frozen: Any = None) -> Any:
        self.calls += 1
        if self.fails is not None:
            raise self.fails
        live = context.now.attn_metadata["layer"].context_lens_cpu
        lens = frozen if self.frozen and frozen is not None else live
        output = torch.full((len(hidden),), -1.0)
        count = min(len(lens), len(hidden))
        output[:count] = lens[:count].float() * 2
        output[len(live) :] = torch.rand(len(hidden) - len(live))  # padding computes anything
        return output


def made(model: Any, mode: Mode = Mode.FULL, *, agree: Any = bool, **ranks: int) -> Any:
    built = wrapper_class(Wrapper, context.get, Mode, lambda error: "lost" in str(error), agree)
    return built(model, SimpleNamespace(parallel_config=SimpleNamespace(**ranks)), mode)


FOUR = Desc(4, 4)


def step(wrapper: Any, lens: list[int], *, desc: Desc = FOUR, metadata: type = DecodeMetadata, **more: Any) -> Any:
    """A step of rows of those lengths, in blocks from `block`, padded to the descriptor."""
    context.now = SimpleNamespace(
        cudagraph_runtime_mode=more.get("mode", wrapper.runtime_mode), batch_descriptor=desc,
        attn_metadata={"layer": metadata(lens, more.get("block", 0))},
    )  # fmt: skip
    return wrapper(torch.zeros(desc.num_tokens))


def right(output: Any, lens: list[int]) -> bool:
    return bool((output[: len(lens)] == torch.tensor(lens) * 2.0).all())


def test_live_lengths_are_trusted_after_three_that_differ() -> None:
    """Shorter and longer rows, in other blocks and of other numbers, each with eager's bits; then replays go alone."""
    model = Model(frozen=False)
    wrapper = made(model)
    step(wrapper, [8, 8, 8, 8])
    assert wrapper.probation
    for block, lens in enumerate(([9, 9, 9, 9], [3, 2, 2, 2], [30, 1, 7])):
        assert wrapper.probation
        assert right(step(wrapper, lens, block=block), lens)
    assert not wrapper.probation
    before = model.calls
    assert right(step(wrapper, [5, 6]), [5, 6])
    assert model.calls == before + 1
    assert not wrapper.refused


def test_frozen_lengths_never_reach_the_caller() -> None:
    """The first other length shows it; what the caller gets is eager's, and the graph is given up."""
    wrapper = made(Model(frozen=True))
    told: list[Any] = []
    wrapper.on_refused = lambda desc, why: told.append((desc, why))
    step(wrapper, [8, 8, 8, 8])
    for lens in ([9, 9, 9, 9], [3, 2, 2, 2], [8, 8, 8, 8]):
        assert right(step(wrapper, lens), lens)
    assert "frozen" in wrapper.refused[Desc(4, 4)]
    assert not wrapper.concrete_cudagraph_entries
    assert told == [(Desc(4, 4), wrapper.refused[Desc(4, 4)])]


def test_the_captures_own_lengths_prove_nothing() -> None:
    """However often they come, the graph stays on probation, and they run eagerly."""
    model = Model(frozen=True)
    wrapper = made(model)
    step(wrapper, [8, 8, 8, 8])
    for _ in range(10):
        assert right(step(wrapper, [8, 8, 8, 8], block=5), [8, 8, 8, 8])
    assert wrapper.probation[Desc(4, 4)].passed == 0


def test_a_graph_that_is_never_shown_all_is_given_up() -> None:
    """Traffic that has the same number of rows each time doesn't run every step twice for ever."""
    model = Model(frozen=False)
    wrapper = made(model)
    step(wrapper, [8, 8, 8, 8])
    for i in range(PATIENCE + 1):
        lens = [9 + i % 3, 2, 8, 8]
        assert right(step(wrapper, lens, block=1 + i), lens)
    assert "another number of rows" in wrapper.refused[Desc(4, 4)]
    # Once three replays had the bits, only those that show something new ran twice.
    assert model.calls < PATIENCE + 10


def test_tensor_parallel_ranks_trust_together() -> None:
    """One rank's replay that differs has all give the graph up; so has one rank's failed capture."""
    words: list[bool] = []
    answers = iter([True, True, False])

    def agree(mine: bool) -> bool:
        words.append(mine)
        return next(answers)

    wrapper = made(Model(frozen=False), agree=agree, tensor_parallel_size=2)
    step(wrapper, [8, 8, 8, 8])
    for lens in ([9, 9, 9, 9], [3, 2, 2, 2]):
        assert right(step(wrapper, lens), lens)
    assert words == [True, True, True]
    assert "frozen" in wrapper.refused[Desc(4, 4)]
    other = made(Model(frozen=False), agree=lambda _mine: False, tensor_parallel_size=2)
    assert right(step(other, [8, 8, 8, 8]), [8, 8, 8, 8])
    assert "another rank" in other.refused[Desc(4, 4)]


def test_data_parallel_ranks_try_nothing() -> None:
    """One that ran a step twice would leave the others in a collective: such a graph is refused, and no step tried."""
    model = Model(frozen=False)
    wrapper = made(model, data_parallel_size=2)
    step(wrapper, [8, 8, 8, 8])
    assert "data-parallel" in wrapper.refused[Desc(4, 4)]
    before = model.calls
    assert right(step(wrapper, [9, 9, 9, 9]), [9, 9, 9, 9])
    assert model.calls == before + 1


def test_the_full_wrapper_is_ours_too() -> None:
    """vLLM's runner takes the wrapper of the whole model by its own name: ours comes in its place after loading."""

    class Runner:
        def __init__(self, mode: Mode | None) -> None:
            self.mode, self.model = mode, None

        def load_model(self, *_: bool) -> str:
            bare = Model(frozen=True)
            self.model = bare if self.mode is None else Wrapper(bare, SimpleNamespace(), runtime_mode=self.mode)
            return "loaded"

    ours = wrapper_class(Wrapper, context.get, Mode, lambda _: False)
    for mode in (Mode.FULL, None):
        runner = Runner(mode)
        use_wrapper(runner, Wrapper, ours)
        assert runner.load_model(False) == "loaded"
        assert isinstance(runner.model, ours if mode else Model)
    runner = Runner(Mode.FULL)
    use_wrapper(runner, Wrapper, ours)
    runner.load_model()
    assert runner.model.runtime_mode is Mode.FULL
    step(runner.model, [8, 8, 8, 8])
    assert runner.model.probation


def test_pieces_are_not_on_probation() -> None:
    """Attention of a PIECEWISE graph runs between its pieces, eagerly."""
    wrapper = made(Model(frozen=False), Mode.PIECEWISE)
    step(wrapper, [8, 8, 8, 8])
    assert not wrapper.probation


def test_a_capture_that_fails_costs_its_graph() -> None:
    """The size runs eagerly from then on; other sizes are captured; a lost device stays an error."""
    model = Model(frozen=False)
    wrapper = made(model)
    model.fails = RuntimeError("operation not permitted when stream is capturing")
    with pytest.raises(RuntimeError):
        step(wrapper, [1, 1, 1, 1])  # the pretended model fails eagerly too
    assert "not permitted" in wrapper.refused[Desc(4, 4)]
    model.fails = None
    assert right(step(wrapper, [4, 4, 4, 4]), [4, 4, 4, 4])
    step(wrapper, [4, 4], desc=Desc(2, 2))
    assert set(wrapper.concrete_cudagraph_entries) == {Desc(2, 2)}
    other = made(Model(frozen=False))
    other.runnable.fails = RuntimeError("the device is lost")
    with pytest.raises(RuntimeError, match="lost"):
        step(other, [1, 1, 1, 1])
    assert not other.refused


def test_attention_with_a_state_gets_no_full_graph() -> None:
    """Running it twice for a proof would advance the state twice."""
    wrapper = made(Model(frozen=False))
    assert right(step(wrapper, [4, 4, 4, 4], metadata=GDNMetadata), [4, 4, 4, 4])
    assert "state" in wrapper.refused[Desc(4, 4)]


@pytest.mark.parametrize("mode", [Mode.NONE, Mode.PIECEWISE])
def test_other_modes_pass_through(mode: Mode) -> None:
    """A wrapper of FULL graphs doesn't act in other modes."""
    wrapper = made(Model(frozen=False))
    assert right(step(wrapper, [4, 4, 4, 4], mode=mode), [4, 4, 4, 4])
    assert not wrapper.concrete_cudagraph_entries


def test_the_platform_returns_it_where_kpolicy_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Off without the variable; on with it, once; without vLLM-Kunlun nothing happens."""

    class KunlunPlatform:
        @classmethod
        def get_static_graph_wrapper_cls(cls) -> str:
            return "vllm.compilation.cuda_graph.CUDAGraphWrapper"

    monkeypatch.delenv("KPOLICY_VLLM", raising=False)
    monkeypatch.delenv("KPOLICY_POLICY", raising=False)
    assert not kunlun.register()
    monkeypatch.setattr(kunlun, "find_spec", lambda name: object())
    module = ModuleType("vllm_kunlun.platforms.kunlun")
    vars(module)["KunlunPlatform"] = KunlunPlatform
    workers = ModuleType("vllm.worker.worker_base")
    vars(workers)["WorkerWrapperBase"] = type("WorkerWrapperBase", (), {"init_device": lambda self: "ready"})
    monkeypatch.setitem(sys.modules, "vllm.worker.worker_base", workers)
    for name in ("vllm", "vllm.worker", "vllm_kunlun", "vllm_kunlun.platforms"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm_kunlun.platforms.kunlun", module)
    assert not kunlun.register()
    assert "cuda_graph" in KunlunPlatform.get_static_graph_wrapper_cls()
    monkeypatch.setenv("KPOLICY_VLLM", "1")
    assert kunlun.register()
    assert kunlun.register()
    assert KunlunPlatform.get_static_graph_wrapper_cls() == "kpolicy_vllm.kunlun.KunlunGraphWrapper"
    assert KunlunPlatform().get_static_graph_wrapper_cls() == "kpolicy_vllm.kunlun.KunlunGraphWrapper"
    # A worker's runner is given our wrapper of FULL graphs, once, wherever that vLLM keeps its workers.
    worker = workers.WorkerWrapperBase()
    runner = SimpleNamespace(load_model=lambda: "loaded", model=None)
    worker.worker = SimpleNamespace(model_runner=runner)
    stock = runner.load_model
    assert worker.init_device() == "ready"
    assert runner.load_model is not stock
    hooked = workers.WorkerWrapperBase.init_device
    assert kunlun.register()
    assert workers.WorkerWrapperBase.init_device is hooked


def test_the_name_is_resolved_with_vllms_own_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM looks the class up by its name: it is vLLM's wrapper, with ours on it."""
    for name, content in {
        "vllm": {}, "vllm.compilation": {}, "vllm.compilation.cuda_graph": {"CUDAGraphWrapper": Wrapper},
        "vllm.forward_context": {"get_forward_context": context.get}, "vllm.config": {"CUDAGraphMode": Mode},
    }.items():  # fmt: skip
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(vars(kunlun), "KunlunGraphWrapper", raising=False)
    found = kunlun.KunlunGraphWrapper
    assert issubclass(found, Wrapper)
    monkeypatch.delitem(vars(kunlun), "KunlunGraphWrapper")
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        _ = kunlun.Other
