# ruff: noqa: ARG002 - arguments are those of vLLM's own methods
"""The shim on vLLM-Ascend: its signatures, its ladder within the streams, and what is done where they run out."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from kpolicy.attention.support import Claims
from kpolicy.budget_models import AscendParallel, AscendStack, ModelShape, ascend_budget
from kpolicy.ladders import CaptureSizes
from kpolicy.modes import Part
from kpolicy.reasons import Reason
from kpolicy.registry import GraphState
from kpolicy.settings import Settings
from kpolicy_vllm import ascend
from kpolicy_vllm.ascend import RECORDED, STREAMS, Device
from kpolicy_vllm.config import Config
from kpolicy_vllm.mirror import others
from kpolicy_vllm.state import State
from kpolicy_vllm.versions import UnsupportedError
from kpolicy_vllm.versions.names import Names
from tests.fakes.signatures import arguments_of
from tests.oracle.loader import VARIABLE, loaded, oracle_folder
from tests.oracle.vllm_real import RealVllm

pytest.importorskip("torch")
# The shim imports it when streams run out, which must not be under `loaded`, where torch is a stand-in.
importlib.import_module("kpolicy.executors.ascend.replan")

WHEEL = "KPOLICY_VLLM_ASCEND_WHEEL"
NO_STREAMS = "aclmdlRICaptureBegin, error code is 207008: stream resources are insufficient"
OLD = AscendStack(soc="A3", hdk="24.1.0", cann="8.2.RC1")


class Mode(Enum):
    NONE = 0
    PIECEWISE = 1
    FULL = 2
    BOTH = 3

    def has_mode(self, mode: Mode) -> bool:
        return self is mode or (self is Mode.BOTH and mode is not Mode.NONE)

    def separate_routine(self) -> bool:
        return self is Mode.BOTH

    def decode_mode(self) -> Mode:
        return Mode.FULL if self is Mode.BOTH else self

    def mixed_mode(self) -> Mode:
        return Mode.PIECEWISE if self is Mode.BOTH else self


class Desc(NamedTuple):
    num_tokens: int
    num_reqs: int | None = None
    uniform: bool = False
    has_lora: bool = False
    num_active_loras: int = 0


class Dispatcher:
    """As vLLM's, as far as the shim goes: FULL graphs of uniform decodes and pieces, of each size."""

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config
        self.compilation_config = vllm_config.compilation_config
        self.cudagraph_keys: dict[Mode, set[Desc]] = {Mode.PIECEWISE: set(), Mode.FULL: set()}

    def _get_lora_cases(self) -> list[int]:
        return [0]

    def initialize_cudagraph_keys(self, cudagraph_mode: Mode, uniform_decode_query_len: int = 1) -> None:
        for size in self.compilation_config.cudagraph_capture_sizes:
            self.cudagraph_keys[Mode.PIECEWISE].add(Desc(size))
            self.cudagraph_keys[Mode.FULL].add(Desc(size, size, uniform=True))

    def get_capture_descs(self) -> list[tuple[Mode, list[Desc]]]:
        largest_first = [
            (mode, sorted(self.cudagraph_keys[mode], reverse=True)) for mode in (Mode.PIECEWISE, Mode.FULL)
        ]
        return [(mode, descs) for mode, descs in largest_first if descs]

    def dispatch(self, num_tokens: int, uniform_decode: bool = False, *_: Any, **__: Any) -> tuple[Mode, Desc]:
        mode = Mode.FULL if uniform_decode else Mode.PIECEWISE
        fits = sorted(desc for desc in self.cudagraph_keys[mode] if desc.num_tokens >= num_tokens)
        return (mode, fits[0]) if fits else (Mode.NONE, Desc(num_tokens))


class Graphs:
    """vLLM-Ascend's module of graphs: one wrapper a piece, and stores by tokens."""

    def __init__(self, pieces: int, modes: Any = Mode) -> None:
        modes = [modes.PIECEWISE] * pieces + [modes.FULL]
        self._acl_graph_wrappers = [
            SimpleNamespace(runtime_mode=mode, concrete_aclgraph_entries={}) for mode in modes
        ]  # fmt: skip
        self.params = SimpleNamespace(events={8: [1]}, handles={8: [2]}, attn_params={8: [3]}, workspaces={8: object()})

    def get_graph_params(self) -> Any:
        return self.params

    def get_draft_graph_params(self) -> None:
        return None

    get_draft_graph_prefill_params = get_draft_graph_params

    @property
    def taken(self) -> int:
        """Streams: one a graph."""
        return sum(len(each.concrete_aclgraph_entries) for each in self._acl_graph_wrappers)


class Runner:
    """As vLLM-Ascend's: a capture takes a stream a piece, and raises where there is none."""

    __module__ = "vllm_ascend.worker.model_runner_v1"

    def __init__(
        self, graphs: Graphs, streams: int, sizes: list[int], *, layers: int, ranks: int = 1, config: Any = None
    ) -> None:  # fmt: skip
        self.compilation_config = config or SimpleNamespace(
            cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=sizes[-1], cudagraph_mode=Mode.BOTH
        )
        text = SimpleNamespace(num_hidden_layers=layers, to_dict=dict)
        self.vllm_config = SimpleNamespace(
            compilation_config=self.compilation_config, model_config=SimpleNamespace(hf_text_config=text),
            speculative_config=None, additional_config={}, lora_config=None,
            scheduler_config=SimpleNamespace(max_num_seqs=64),
            parallel_config=SimpleNamespace(data_parallel_size=1, tensor_parallel_size=ranks, world_size=ranks),
        )  # fmt: skip
        self.attn_groups: list[Any] = []
        self.graphs, self.streams = graphs, streams
        self.cudagraph_dispatcher: Any = None
        self.eager = False

    def _determine_batch_execution_and_padding(self, num_tokens: int, num_reqs: int, *rest: Any, **named: Any) -> Any:
        return (Mode.NONE, None) if self.eager else self.cudagraph_dispatcher.dispatch(num_tokens=num_tokens)

    def _check_and_update_cudagraph_mode(self, attention_backends: Any, kv_cache_groups: Any) -> None:
        self.cudagraph_dispatcher.initialize_cudagraph_keys(self.compilation_config.cudagraph_mode, 1)

    def profile_cudagraph_memory(self) -> int:
        return 0

    def _warmup_and_capture(self, desc: Desc, cudagraph_runtime_mode: Mode, **_: Any) -> None:
        for wrapper in self.graphs._acl_graph_wrappers:
            if wrapper.runtime_mode is cudagraph_runtime_mode:
                if self.graphs.taken >= self.streams:
                    raise RuntimeError(NO_STREAMS)
                wrapper.concrete_aclgraph_entries[desc] = SimpleNamespace(aclgraph=object())

    def capture_model(self) -> int:
        for mode, descs in self.cudagraph_dispatcher.get_capture_descs():
            for desc in descs:
                self._warmup_and_capture(desc, cudagraph_runtime_mode=mode)
        return 0


SIZES = [1, 2, 4, 8, 16, 32, 64]


def started(
    streams: int, *, policy: str = "full_and_piecewise", ranks: int = 1, layers: int = 4, real: Any = None,
    least_of_all: Callable[[int], int] = lambda number: number,
) -> Any:  # fmt: skip
    """A runner with the shim attached and its keys initialised; over vLLM's own dispatcher with `real`."""
    config = None if real is None else real.config
    graphs = Graphs(layers + 1, Mode if real is None else real.names["CUDAGraphMode"])
    runner = Runner(graphs, streams, list(SIZES), layers=layers, ranks=ranks, config=config)
    state = State(Config(policy=policy), Settings(max_num_reqs=64, max_num_tokens=64))
    state.claims = Claims.at_level("uniform")
    state.sizes = CaptureSizes(SIZES, (), SIZES)
    npu = SimpleNamespace(
        mem_get_info=lambda: (1 << 30, 1 << 36), get_device_name=lambda: "Ascend910B3", synchronize=lambda: None,
        empty_cache=lambda: None,
    )  # fmt: skip

    def units(num_sizes: int, shape: ModelShape, parallel: AscendParallel) -> Any:
        return ascend_budget(OLD, shape, parallel, num_sizes=num_sizes, parts=tuple(Part))

    device = Device(npu, units, graphs, lambda error: "207008" in str(error), least_of_all)
    own = {"CUDAGraphMode": Mode, "BatchDescriptor": Desc, "CudagraphDispatcher": Dispatcher}
    names = Names(
        **(own if real is None else real.names),
        free_bytes=lambda: int(npu.mem_get_info()[0]), device_name=npu.get_device_name, num_pieces=device.num_pieces,
        broadcast=lambda value: value, first_rank=lambda: False, agree=bool,
    )  # fmt: skip
    ascend.attach(runner, state, names, device)
    runner._check_and_update_cudagraph_mode([], [])
    return SimpleNamespace(runner=runner, state=state, graphs=graphs)


def test_with_streams_for_all_nothing_is_given_up() -> None:
    """Every planned graph is captured, in FULL for decodes and in pieces, and the policy decides."""
    made = started(1000)
    made.runner.capture_model()
    keys = made.state.registry.captured()
    assert {key.part for key in keys} == set(Part)
    assert len(keys) == 2 * len(SIZES) == len(made.state.dispatcher.desc_of)
    assert made.graphs.taken == len(SIZES) * (1 + 5)
    assert made.state.ready
    assert made.state.dispatcher.dispatch(7, True) == (Mode.FULL, Desc(8, 8, uniform=True))


@pytest.mark.parametrize("streams", [0, 1, 3, 6, 11, 20, 40])
def test_streams_that_run_out_cost_graphs_and_not_the_server(streams: int) -> None:
    """vLLM-Ascend ends there; here the best that fit are captured, and steps without a graph run eagerly."""
    made = started(streams)
    made.runner.capture_model()
    state = made.state
    captured = state.registry.captured()
    assert made.graphs.taken <= streams
    assert set(state.dispatcher.desc_of) == set(captured)
    assert bool(captured) == (streams > 0)
    for record in state.registry.records():
        assert record.state is not GraphState.PLANNED
        assert (record.reason is Reason.CAPTURE_OUT_OF_STREAMS) == (record.key not in captured)
    assert state.counters.counts["streams_ran_out"] >= 1
    mode, desc = state.dispatcher.dispatch(3, True)
    held = [key.num_tokens for key in captured if key.part is Part.FULL]
    assert (mode is Mode.NONE) == (not captured)
    assert desc.num_tokens >= 3
    assert mode is not Mode.FULL or desc.num_tokens in held


def test_what_was_to_be_rewritten_goes_with_the_graphs() -> None:
    """vLLM-Ascend's stores are emptied, or the next capture would append to the lists of graphs that are gone."""
    made = started(20)
    made.runner.capture_model()
    params = made.graphs.params
    assert params.events[8] == params.handles[8] == params.attn_params[8] == []
    assert params.workspaces[8] is None


def test_other_errors_stay_errors() -> None:
    """Only a lack of streams is planned around."""
    made = started(1000)

    def broken(desc: Desc, cudagraph_runtime_mode: Mode, **_: Any) -> None:
        raise RuntimeError("107030: a synchronous copy in a capture")

    made.runner._warmup_and_capture = broken
    with pytest.raises(RuntimeError, match="107030"):
        made.runner.capture_model()


def test_a_rank_alone_is_told_what_to_set() -> None:
    """One that planned anew alone would leave the others in a collective, so the error says what to set."""

    def nobody_comes(_number: int) -> int:
        raise RuntimeError("Rank 1 failed to pass monitoredBarrier in 60000 ms")

    made = started(20, ranks=4, least_of_all=nobody_comes)
    with pytest.raises(RuntimeError, match=rf"monitoredBarrier.*Start again with {STREAMS}=\d+"):
        made.runner.capture_model()
    made = started(1000, ranks=4, least_of_all=nobody_comes)
    with pytest.raises(RuntimeError, match="Captures are done here"):
        made.runner.capture_model()


def test_ranks_that_all_ran_out_plan_for_the_one_with_the_fewest_streams() -> None:
    """Ranks with different streams, one with enough for all, end with the same graphs, which fit the least of them."""
    streams, numbers = [20, 34, 1000], {}
    come = threading.Barrier(len(streams), timeout=60)

    def least(rank: int, number: int) -> int:
        numbers[rank] = number
        come.wait()
        found = min(numbers.values())
        come.wait()
        return found

    made = [
        started(have, ranks=3, least_of_all=lambda number, rank=rank: least(rank, number))  # type: ignore[misc]
        for rank, have in enumerate(streams)
    ]
    with ThreadPoolExecutor(len(streams)) as pool:
        list(pool.map(lambda each: each.runner.capture_model(), made))
    captured = [each.state.registry.captured() for each in made]
    assert captured[0] == captured[1] == captured[2] != ()
    assert all(each.graphs.taken <= min(streams) for each in made)


def test_ranks_agree_over_vllms_own_group(tmp_path: Path) -> None:
    """Two processes over gloo: the least number of both; one whose peer doesn't come gives up."""
    torch = pytest.importorskip("torch")
    script = tmp_path / "rank.py"
    script.write_text(
        "import sys, types, datetime\n"
        "import torch.distributed as dist\n"
        "from kpolicy_vllm import ascend\n"
        "rank, path, comes = int(sys.argv[1]), sys.argv[2], sys.argv[3] == 'both' or sys.argv[1] == '0'\n"
        "dist.init_process_group('gloo', init_method='file://' + path, rank=rank, world_size=2)\n"
        "state = types.ModuleType('vllm.distributed.parallel_state')\n"
        "state.get_world_group = lambda: types.SimpleNamespace(cpu_group=dist.group.WORLD)\n"
        "sys.modules.update({'vllm': types.ModuleType('vllm'), 'vllm.distributed': types.ModuleType('d'),\n"
        "                    'vllm.distributed.parallel_state': state})\n"
        "ascend.AGREE_S = 2.0 if sys.argv[3] != 'both' else 60.0\n"
        "if comes:\n"
        "    try:\n"
        "        print(ascend._least_of_all(30 + rank), flush=True)\n"
        "    except RuntimeError as error:\n"
        "        print('alone', flush=True)\n"
        "else:\n"
        "    sys.stdin.read()\n"
    )
    assert torch.distributed.is_available()
    for kind, said in (("both", ["30", "30"]), ("one", ["alone", ""])):
        command = [sys.executable, str(script)]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), str(tmp_path / kind), kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
            for rank in range(2)
        ]  # fmt: skip
        first = ranks[0].communicate(timeout=120)[0].strip()
        second = ranks[1].communicate("", timeout=120)[0].strip()
        assert [first, second] == said


def test_a_given_number_of_streams_is_obeyed_before_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """With KPOLICY_ASCEND_STREAMS nothing is tried that doesn't fit."""
    monkeypatch.setenv(STREAMS, "12")
    made = started(1000)
    made.runner.capture_model()
    assert 0 < made.graphs.taken <= 12
    assert not made.state.counters.counts["streams_ran_out"]
    withdrawn = {record.reason for record in made.state.registry.records() if record.state is GraphState.WITHDRAWN}
    assert withdrawn == {Reason.BUDGET_STREAMS}
    monkeypatch.setenv(STREAMS, "many")
    assert started(1000).state.counters.counts["no_budget"] == 1


def test_auto_decides_by_figures_where_nothing_was_measured() -> None:
    """Calibration is CUDA's; without a profile the costs are published figures, and say that they weren't measured."""
    made = started(1000, policy="auto")
    made.runner.capture_model()
    assert made.state.ready
    assert not made.state.costs.measured
    assert "figures" in made.state.costs_from


def test_drafters_are_answered_by_vllms_rule_and_not_counted() -> None:
    """They ask the runner's dispatcher outside of its step, and again with the size they were told: that size again."""
    made = started(1000, policy="auto")
    made.runner.capture_model()
    dispatcher = made.state.dispatcher
    held = {(key.part, key.num_tokens) for key in made.state.registry.captured()}
    for tokens in range(1, 65):
        for uniform in (True, False):
            mode, desc = dispatcher.dispatch(num_tokens=tokens, uniform_decode=uniform, has_lora=False)
            part = Part.FULL if mode is Mode.FULL else Part.PIECEWISE
            assert mode is (Mode.FULL if uniform else Mode.PIECEWISE)
            assert desc.num_tokens == min(size for kind, size in held if kind is part and size >= tokens)
            again = dispatcher.dispatch(num_tokens=desc.num_tokens, uniform_decode=uniform, has_lora=False)
            assert again == (mode, desc)
    assert dispatcher.chooser.tallies() == {}
    made.runner._determine_batch_execution_and_padding(5, 5, np.ones(5, dtype=np.int32))
    assert sum(steps for steps, *_ in dispatcher.chooser.tallies().values()) == 1
    # A step that had to run eagerly asks nothing; the drafter after it is still no step.
    made.runner.eager = True
    made.runner._determine_batch_execution_and_padding(5, 5, np.ones(5, dtype=np.int32))
    dispatcher.dispatch(num_tokens=5, uniform_decode=True, has_lora=False)
    assert sum(steps for steps, *_ in dispatcher.chooser.tallies().values()) == 1


def test_drafters_graphs_are_the_models_sizes_in_the_registry() -> None:
    """Its own dispatcher, which vLLM's base class gives it, isn't asked: what it names isn't captured."""
    made = started(1000)
    drafter = type("AscendEagleProposer", (), {"__module__": "vllm_ascend.spec_decode.eagle_proposer"})()
    drafter.cudagraph_dispatcher = SimpleNamespace(cudagraph_keys={Mode.PIECEWISE: {Desc(999)}})
    for graphs in (True, False):
        drafter.use_cuda_graph, made.runner.drafter = graphs, drafter
        drafts = [key for key, _ in others(made.runner)]
        assert {key.stage for key in drafts} == ({"draft"} if graphs else set())
        wanted = {(key.part, key.num_tokens) for key in made.state.dispatcher.desc_of} if graphs else set()
        assert {(key.part, key.num_tokens) for key in drafts} == wanted


def test_the_second_runner_is_left_as_it_is() -> None:
    """vLLM-Ascend doesn't start it on vLLM 0.23.0; one that is there all the same keeps everything of its own."""
    runner = SimpleNamespace(cudagraph_manager=None, capture_model=lambda: "stock")
    before = dict(vars(runner))
    with pytest.raises(UnsupportedError, match="second runner"):
        ascend.attach(runner, SimpleNamespace(config=Config()), None, SimpleNamespace())  # type: ignore[arg-type]
    assert vars(runner) == before


def test_the_runner_is_known_by_its_module() -> None:
    """vLLM-Ascend's runner, and a subclass of it, and no other."""

    class Derived(Runner):
        __module__ = "elsewhere"

    graphs = Graphs(1)
    assert ascend.is_ascend(Derived(graphs, 1, [1], layers=1))
    assert not ascend.is_ascend(graphs)


def test_what_the_formula_reads_of_a_config() -> None:
    """Layers, experts, drafts, and how the model is spread."""
    draft = SimpleNamespace(hf_text_config=SimpleNamespace(num_hidden_layers=1))
    config = SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(num_hidden_layers=61, n_routed_experts=256)),
        speculative_config=SimpleNamespace(draft_model_config=draft),
        additional_config={"multistream_overlap_shared_expert": True},
        parallel_config=SimpleNamespace(data_parallel_size=4, tensor_parallel_size=4, enable_expert_parallel=True),
    )
    assert ascend.shape_of(config) == ModelShape(num_layers=61, moe=True, draft_layers=1)
    found = ascend.parallel_of(config, {"HCCL_OP_EXPANSION_MODE": "AIV"})
    assert found == AscendParallel(dp=4, tp=4, ep=True, aiv=True, shared_expert_stream=True)


@pytest.mark.oracle
@pytest.mark.skipif(oracle_folder() is None, reason=f"{VARIABLE} isn't set: name a folder with vLLM's wheels")
@pytest.mark.parametrize("streams", [3, 17, 40, 1000])
def test_vllms_own_dispatcher_with_vllm_ascends_patch(streams: int) -> None:
    """Over the real dispatcher of vLLM 0.23, and vLLM-Ascend's change to it where its wheel is there, likewise."""
    with loaded(oracle_folder(), "0.23") as modules:
        vllm = RealVllm(modules, "0.23", "v1")
        module = modules.module("v1.cudagraph_dispatcher")
        modes = vllm.compilation.CUDAGraphMode
        config = vllm.resolve("FULL_AND_PIECEWISE", "UNIFORM_BATCH", 1, True, tuple(SIZES))
        config.cudagraph_specialize_lora = False
        dispatcher = type("CudagraphDispatcher", (module.CudagraphDispatcher,), {})
        if WHEEL in os.environ:
            with zipfile.ZipFile(os.environ[WHEEL]) as wheel:
                patch = wheel.read("vllm_ascend/patch/worker/patch_cudagraph.py").decode("utf-8")
            functions = [each for each in ast.parse(patch).body if isinstance(each, ast.FunctionDef)]
            space = {"CUDAGraphMode": modes, "BatchDescriptor": module.BatchDescriptor}
            exec(compile(ast.Module(functions, []), "patch_cudagraph.py", "exec"), space)  # noqa: S102 - the wheel's
            dispatcher._create_padded_batch_descriptor = space["_create_padded_batch_descriptor"]
        names = {"CUDAGraphMode": modes, "BatchDescriptor": module.BatchDescriptor, "CudagraphDispatcher": dispatcher}
        made = started(streams, real=SimpleNamespace(config=config, names=names))
        made.runner.capture_model()
        captured = made.state.registry.captured()
        assert captured
        assert made.graphs.taken <= streams
        assert set(made.state.dispatcher.desc_of) == set(captured)
        held = {(key.part, key.num_tokens) for key in captured}
        for tokens in range(1, 70):
            for uniform in (True, False):
                mode, desc = made.state.dispatcher.dispatch(tokens, uniform)
                part = {modes.FULL: Part.FULL, modes.PIECEWISE: Part.PIECEWISE}.get(mode)
                assert part is None or (part, desc.num_tokens) in held
                assert desc.num_tokens >= tokens
                assert part is not Part.FULL or desc.uniform
        assert len(captured) == 2 * len(SIZES) or streams < 1000


def published(path: Path, name: str) -> tuple[str, ...]:
    """The parameters of a function in a wheel's sources."""
    module, _, inside = name.partition(":")
    with zipfile.ZipFile(path) as wheel:
        found: Any = ast.parse(wheel.read(module.replace(".", "/") + ".py"))
    for part in inside.split("."):
        found = next(each for each in found.body if getattr(each, "name", None) == part)
    return tuple(each.partition("=")[0] for each in arguments_of(found) if each != "*")


@pytest.mark.skipif(WHEEL not in os.environ, reason=f"{WHEEL} names no wheel of vllm-ascend 0.23.0")
@pytest.mark.parametrize("name", RECORDED)
def test_recorded_signatures_are_the_wheels(name: str) -> None:
    """What the shim wraps and calls takes what was recorded."""
    assert published(Path(os.environ[WHEEL]), name) == RECORDED[name]


@pytest.mark.skipif(WHEEL not in os.environ, reason=f"{WHEEL} names no wheel of vllm-ascend 0.23.0")
def test_what_the_shim_reads_is_in_the_wheel() -> None:
    """Attributes of the wrapper, of its stores and of the runner that have no signature."""
    with zipfile.ZipFile(os.environ[WHEEL]) as wheel:
        graphs = wheel.read("vllm_ascend/compilation/acl_graph.py").decode("utf-8")
        runner = wheel.read("vllm_ascend/worker/model_runner_v1.py").decode("utf-8")
        platform = wheel.read("vllm_ascend/platform.py").decode("utf-8")
        drafters = wheel.read("vllm_ascend/spec_decode/llm_base_proposer.py").decode("utf-8")
        worker = wheel.read("vllm_ascend/worker/worker.py").decode("utf-8")
    for name in (
        "_acl_graph_wrappers", "self.concrete_aclgraph_entries", "self.runtime_mode", "events:", "handles:",
        "attn_params:", "workspaces:",
    ):  # fmt: skip
        assert name in graphs, name
    for name in ("self.cudagraph_dispatcher.dispatch(", "self.cudagraph_dispatcher.initialize_cudagraph_keys("):
        assert name in runner, name
    # Drafters ask the runner's dispatcher, and their dummy runs capture what the runner captures.
    assert drafters.count("self.runner.cudagraph_dispatcher.dispatch(") == 2
    assert "self.use_cuda_graph" in drafters
    assert "aclgraph_runtime_mode=" in runner
    # The second runner isn't started on vLLM 0.23.0.
    assert 'if self.use_v2_model_runner and vllm_version_is("0.23.0"):' in worker
    assert "self.use_v2_model_runner = False" in worker
    assert "vllm_ascend.compilation.acl_graph.ACLGraphWrapper" in platform
