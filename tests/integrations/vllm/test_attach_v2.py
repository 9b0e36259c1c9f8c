"""The second runner's start, with the real manager of graphs of both releases and a runner that stands for vLLM's."""

from __future__ import annotations

import importlib
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from kpolicy.costs import analytic_costs
from kpolicy.decision import Decision, Launch
from kpolicy.keys import GraphKey
from kpolicy.modes import Mode, Part, Rows
from kpolicy.reasons import Reason
from kpolicy_vllm.attach_v2 import attach
from kpolicy_vllm.config import Config
from kpolicy_vllm.ladder import sizes_of
from kpolicy_vllm.state import State
from kpolicy_vllm.versions.names import Names
from tests.integrations.vllm.real_runner import Backend
from tests.integrations.vllm.test_oracle_dispatch import deployment
from tests.integrations.vllm.test_oracle_runner import Wild
from tests.integrations.vllm.test_real_scheduler import BOTH, pytestmark
from tests.oracle.loader import Loaded, loaded, oracle_folder
from tests.oracle.vllm_real import RealVllm

__all__ = ["pytestmark"]

STOCK = [1, 2, 4, 8, 16, 24, 32, 64]
REQS = 32


class Runner:
    """What vLLM's second runner does at its start, as far as kpolicy takes part.

    Args:
        modules: a release's.
        version: its name.
        sizes: the capture sizes in the configuration.
    """

    def __init__(self, modules: Loaded, version: str, sizes: list[int]) -> None:
        self._modules, self._version, self._sizes = modules, version, sizes
        self.cudagraph_manager: Any = None
        level = modules.module("v1.attention.backend").AttentionCGSupport.ALWAYS
        group = SimpleNamespace(backend=Backend("FLASH_ATTN", level), kv_cache_spec=None, metadata_builders=())
        self.attn_groups = [[group]]
        self.vllm_config: Any = SimpleNamespace(
            parallel_config=SimpleNamespace(data_parallel_size=1, pipeline_parallel_size=1),
            model_config=SimpleNamespace(model="m", is_encoder_decoder=False), speculative_config=None,
            lora_config=None, scheduler_config=SimpleNamespace(async_scheduling=True), kv_transfer_config=None,
            max_concurrent_batches=2,
        )  # fmt: skip
        self.req_states = SimpleNamespace(prompt_len=SimpleNamespace(pool=SimpleNamespace(max_concurrency=4)))
        importlib.import_module("vllm.v1.worker.gpu.buffer_utils")._DEFAULT_MAX_CONCURRENCY = 4
        self.captured: list[Any] = []

    def initialize_kv_cache(self, _config: Any) -> str:
        real = RealVllm(self._modules, self._version, "v2")
        real.start(deployment(self._version, "v2", self._sizes, reqs=REQS, level="mixed"))
        self.cudagraph_manager = real.manager
        self.cudagraph_manager._graphs_captured = False
        self.cudagraph_manager.__class__ = self._utils().ModelCudaGraphManager
        return "laid out"

    def _utils(self) -> Any:
        return self._modules.module("v1.worker.gpu.cudagraph_utils")

    def capture_model(self, *, profile_only: bool = False) -> int:
        self.captured = []
        # What the manager of a model does once it has the model's inputs.
        above = super(self._utils().ModelCudaGraphManager, self.cudagraph_manager)
        above.capture(lambda desc, warmup: self.captured.append((desc, warmup)), "progress")
        self.cudagraph_manager._graphs_captured = not profile_only
        return 1 << 20

    def execute_model(self, _output: Any) -> None: ...

    def sample_tokens(self, _grammar: Any) -> None: ...


def names(modules: Loaded, monkeypatch: pytest.MonkeyPatch, **given: Any) -> Names:
    """vLLM's names; captures ask for each graph's forward as vLLM does, once to warm up and once to capture."""
    utils = modules.module("v1.worker.gpu.cudagraph_utils")

    def capture(self: Any, create_forward_fn: Any, progress_bar_desc: str = "") -> None:
        for mode in sorted(self._capture_descs, key=lambda mode: mode.value):
            for desc in self._capture_descs[mode]:
                create_forward_fn(desc, True)
                create_forward_fn(desc, False)

    monkeypatch.setattr(utils.CudaGraphManager, "capture", capture)
    free = iter(range(1 << 30, 0, -1000))
    defaults: dict[str, Any] = {
        "free_bytes": lambda: next(free), "num_pieces": lambda _: 25, "broadcast": lambda value: value, "agree": bool,
        "first_rank": lambda: False, "device_name": lambda: "a device",
    }  # fmt: skip
    return Names(
        CUDAGraphMode=modules.module("config.compilation").CUDAGraphMode,
        BatchExecutionDescriptor=utils.BatchExecutionDescriptor, CudaGraphManager=utils.CudaGraphManager,
        ModelCudaGraphManager=utils.ModelCudaGraphManager, **{**defaults, **given},
    )  # fmt: skip


def started(
    modules: Loaded, version: str, monkeypatch: pytest.MonkeyPatch, config: Config, **given: Any
) -> tuple[Runner, State]:
    """A runner after its start-up, with kpolicy attached."""
    settings = deployment(version, "v2", STOCK, reqs=REQS, level="mixed").settings
    state = State(config, settings)
    state.sizes = sizes_of(config, settings)
    sizes = sorted({*state.sizes.decode, *state.sizes.mixed, *state.sizes.piecewise}) if state.sizes else STOCK
    runner = Runner(modules, version, sizes)
    attach(runner, state, names(modules, monkeypatch, **given), newest=version == "0.33")
    assert runner.initialize_kv_cache(None) == "laid out"
    assert runner.capture_model() == 1 << 20
    return runner, state


AUTO = Config(calibrate=False, decode_sizes=(1, 8, 32), mixed_sizes=(16,), piecewise_sizes=(64, 256))


@BOTH
def test_graphs_are_of_our_sizes_on_record_and_chosen_by_cost(version: str, monkeypatch: Any) -> None:
    with loaded(oracle_folder(), version) as modules:
        runner, state = started(modules, version, monkeypatch, AUTO)
        sizes = {(key.part, key.decode_only): set() for key in state.ladder.keys}
        for key in state.ladder.keys:
            sizes[key.part, key.decode_only].add(key.num_tokens)
        wanted = {(Part.FULL, True): {1, 8, 32}, (Part.PIECEWISE, False): {64, 256}}
        if version == "0.33":
            # 0.23 captures a mixed graph with rows of one token.
            wanted[Part.FULL, False] = {16}
        assert sizes == wanted
        records = state.registry.records()
        assert {record.key for record in records} == set(state.ladder.keys)
        assert all(record.bytes == 1000 for record in records)
        assert {record.graphs for record in records if record.key.part is Part.PIECEWISE} == {25}
        assert state.captured
        manager = runner.cudagraph_manager
        assert state.dispatcher is manager
        assert manager.dispatch(7, 7, 1).num_tokens == 8
        assert state.dispatcher.last.label == ("full", "vllm_rule"), "there are no costs yet"
        state.install_costs(analytic_costs())
        desc = manager.dispatch(7, 7, 1)
        assert (desc.cg_mode.name, desc.num_tokens) == ("FULL", 8)
        assert state.dispatcher.last.decision is not None
        assert not state.counters.counts


@BOTH
def test_the_replica_leaves_graphs_and_answers(version: str, monkeypatch: Any) -> None:
    with loaded(oracle_folder(), version) as modules:
        config = Config(policy=f"vllm:version={version},runner=v2")
        runner, state = started(modules, version, monkeypatch, config)
        stock = Runner(modules, version, STOCK)
        stock.initialize_kv_cache(None)
        assert runner.cudagraph_manager._capture_descs == stock.cudagraph_manager._capture_descs
        stock.cudagraph_manager._graphs_captured = True
        assert state.select is not None
        more = (0,) if version == "0.33" else ()
        for tokens in range(1, 80):
            for reqs, uniform in ((tokens, 1), (1, None)):
                asked = (reqs, tokens, uniform, *more)
                assert runner.cudagraph_manager.dispatch(*asked) == stock.cudagraph_manager.dispatch(*asked)
        assert not state.counters.counts


@BOTH
def test_a_rank_that_another_leaves_alone_is_as_stock(version: str, monkeypatch: Any) -> None:
    with loaded(oracle_folder(), version) as modules:
        runner, state = started(modules, version, monkeypatch, AUTO, agree=lambda _: False)
        utils = modules.module("v1.worker.gpu.cudagraph_utils")
        assert type(runner.cudagraph_manager) is utils.ModelCudaGraphManager
        assert state.dispatcher is None
        assert not state.captured
        assert state.counters.counts["not_attached"] == 1
        more = (0,) if version == "0.33" else ()
        assert runner.cudagraph_manager.dispatch(3, 3, 1, *more).num_tokens >= 3


@BOTH
@pytest.mark.parametrize("split", [False, True])
def test_two_forwards_are_there_with_the_flag(version: str, split: bool, monkeypatch: Any) -> None:
    with loaded(oracle_folder(), version, real=("vllm.v1.outputs",), installed=("torch",)) as modules:
        config = Config(calibrate=False, split=split)
        runner, state = started(modules, version, monkeypatch, config)
        assert state.two_forwards is split
        assert ("execute_model" in vars(runner)) is split
        # Nothing was measured here, and costs decide.
        assert state.counters.counts == ({"not_split": 1} if split else {})


@BOTH
@pytest.mark.parametrize("illegal", [False, True])
def test_a_policy_that_raises_or_decides_what_cannot_be_is_vllm_s_rule(
    version: str, illegal: bool, monkeypatch: Any, caplog: Any
) -> None:
    other = GraphKey(Part.FULL, 5, 5, query_len=1)
    decided = Decision(Mode.FULL, (Launch(Rows.ALL, other),), Reason.GRAPH_FITS) if illegal else None
    with loaded(oracle_folder(), version) as modules:
        runner, state = started(modules, version, monkeypatch, AUTO)
        state.policy = Wild(decided)
        state.costs = analytic_costs()
        with caplog.at_level(logging.WARNING):
            state.recompile()
            more = (0,) if version == "0.33" else ()
            sizes = [runner.cudagraph_manager.dispatch(n, n, 1, *more).num_tokens for n in (3, 3, 20)]
        assert sizes == [8, 8, 32]
        event = "illegal_decision" if illegal else "policy_failed"
        assert state.counters.counts == {event: 2}
        assert len(caplog.records) == 1


@pytest.mark.parametrize("graphs", [1, 2, 3, 5, 26])
def test_an_estimate_of_memory_counts_the_two_largest_graphs_once_and_small_ones_for_the_rest(
    graphs: int, monkeypatch: Any
) -> None:
    """By 0.33's own extrapolation of what it sampled: MiB of a 0.5B model's graphs, the first two with buffers."""
    with loaded(oracle_folder(), "0.33") as modules:
        utils = modules.module("v1.worker.gpu.cudagraph_utils")
        runner, state = started(modules, "0.33", monkeypatch, AUTO)
        manager, full = runner.cudagraph_manager, modules.module("config.compilation").CUDAGraphMode.FULL
        descs = [SimpleNamespace(place=place) for place in range(graphs)]
        manager._capture_descs = {full: list(descs)}
        takes = [130 << 20, 98 << 20, *([0, 8 << 20, 0, 0] * 6)][:graphs]
        samples: list[int] = []
        taken: list[int] = []

        def capture(self: Any, _create: Any, _progress: str = "") -> None:
            few = self._capture_descs[full][: self._max_full_descs_to_capture]
            taken.extend(takes[desc.place] for desc in few)
            samples.extend(taken)

        monkeypatch.setattr(utils.CudaGraphManager, "capture", capture)
        manager._max_full_descs_to_capture = utils._FULL_GRAPH_PROFILING_SAMPLES
        manager._capture_mem_samples = samples
        runner.capture_model(profile_only=True)
        pieces = 7 << 20
        measured = sum(taken) + pieces
        estimate = measured - sum(samples) + utils._extrapolate_full_graph_memory(samples, graphs)
        small = [takes[place] for place in range(graphs - 1, 1, -1)][:4]
        mean = sum(small) / len(small) if small else 0
        least = utils._MIN_PER_GRAPH_BYTES * graphs
        assert 0 <= estimate - (sum(takes[:2]) + mean * max(0, graphs - 2) + pieces) <= least + graphs
        assert sorted(desc.place for desc in manager._capture_descs[full]) == list(range(graphs))
        assert not state.counters.counts
