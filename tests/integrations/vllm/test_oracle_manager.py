"""Attaching to the second runner: vLLM's own manager, taken over where its runner lays out the KV cache."""

from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from kpolicy.modes import Part
from kpolicy.schemas import read_decision_log
from kpolicy_vllm import plugin
from kpolicy_vllm.lazy import Lazy
from kpolicy_vllm.state import state_of
from kpolicy_vllm.versions.names import wrapped
from tests.integrations.vllm.real_runner import Backend, sized, vllm_config, vllm_of
from tests.integrations.vllm.test_oracle_runner import attached
from tests.oracle.wheels import VLLM_WHEELS

pytestmark = VLLM_WHEELS


@pytest.fixture(params=["0.23", "0.33"])
def release(request):
    """A release, with the plugin loaded."""
    with vllm_of(request.param) as modules:
        plugin.register()
        yield request.param, modules


class Runner:
    """What kpolicy touches of the second runner, around vLLM's own manager."""

    def __init__(self, version, modules, config):
        self.vllm_config = config
        self.utils = modules.module("v1.worker.gpu.cudagraph_utils")
        self.compilation = modules.module("config.compilation")
        self.version = version
        self.cudagraph_manager = None
        self.attn_groups = []
        self.levels = modules.module("v1.attention.backend").AttentionCGSupport
        self.forwards = []
        without_device(self.utils)

    def initialize_kv_cache(self, _kv_cache_config):
        """Make a manager, as vLLM does."""
        self.attn_groups = [
            [
                SimpleNamespace(
                    backend=Backend("FLASH_ATTN", self.levels.ALWAYS), kv_cache_spec=None, metadata_builders=()
                )
            ]
        ]
        more = {} if self.version == "0.23" else {"lora_capture_cases": [0]}
        self.cudagraph_manager = self.utils.CudaGraphManager(
            self.vllm_config, None, self.vllm_config.compilation_config.cudagraph_mode, 1, **more
        )

    def capture_model(self, *, profile_only=False):  # noqa: ARG002 - vLLM's signature
        """Have the manager capture with a model that only counts."""

        def create(desc, warmup):
            self.forwards.append((desc, warmup))
            forward = lambda mode: None  # noqa: E731, ARG005
            return (forward, None) if self.version == "0.23" else forward

        self.cudagraph_manager.capture(create)
        return 0


def without_device(utils):
    @contextmanager
    def graph(*_, **__):
        yield

    utils.torch = SimpleNamespace(
        cuda=SimpleNamespace(CUDAGraph=lambda: SimpleNamespace(replay=lambda: None), graph=graph),
        accelerator=SimpleNamespace(synchronize=lambda: None, get_memory_info=lambda: (1, 1)),
    )
    utils.current_platform = SimpleNamespace(get_global_graph_pool=lambda: None)
    utils.graph_capture = lambda **_: nullcontext()
    utils.capture_pool = lambda *_, **__: nullcontext()
    utils.current_stream = lambda: None
    utils.tqdm = lambda descs, **_: descs


def served(release, **settings):
    """A runner after start-up."""
    version, modules = release
    settings.setdefault("kpolicy", {"policy": "full_and_piecewise"})
    config = vllm_config(modules, **settings)
    sized(modules, config)
    runner = Runner(version, modules, config)
    utils = runner.utils
    utils.ModelCudaGraphManager = utils.CudaGraphManager
    for name in ("initialize_kv_cache", "capture_model"):
        setattr(modules.module("v1.worker.gpu.model_runner").GPUModelRunner, name, getattr(Runner, name))
    attached_without_check(modules, config, runner)
    runner.initialize_kv_cache(None)
    return runner


def attached_without_check(modules, config, runner):
    """The stand-in runner hasn't the real one's signatures; those have a test of their own."""
    from kpolicy_vllm.versions import Adapter

    check = Adapter.check
    try:
        Adapter.check = lambda *_: None
        attached(modules, config, runner)
    finally:
        Adapter.check = check


@contextmanager
def wrapper_of(modules, runner):
    """What vLLM's wrapper of pieces has, of the sizes that are captured."""
    kinds = runner.compilation.CUDAGraphMode
    descriptor = modules.module("forward_context").BatchDescriptor
    entries = {descriptor(key.num_tokens): None for key in state_of(runner.vllm_config).ladder.piecewise}
    wrapper = SimpleNamespace(runtime_mode=kinds.PIECEWISE, concrete_cudagraph_entries=entries)
    module = modules.module("compilation.cuda_graph")
    stock, module.CUDAGraphWrapper = module.CUDAGraphWrapper, SimpleNamespace(_all_instances=[wrapper])
    try:
        yield entries
    finally:
        module.CUDAGraphWrapper = stock


def ask(runner, reqs, tokens, uniform):
    more = {} if runner.version == "0.23" else {"num_active_loras": 0}
    desc = runner.cudagraph_manager.dispatch(reqs, tokens, uniform, **more)
    return desc.cg_mode.name, desc.num_tokens, desc.num_reqs


def test_taken_over(release):
    """The manager that vLLM made decides by kpolicy, over ladders of its own; before the capture nothing replays."""
    runner = served(release, max_num_seqs=600, max_num_batched_tokens=4096)
    manager, state = runner.cudagraph_manager, state_of(runner.vllm_config)
    assert isinstance(manager, runner.utils.CudaGraphManager)
    assert ask(runner, 600, 600, 1)[0] == "NONE"
    runner.capture_model()
    assert len(state.ladder) == len(manager.desc_of) > 30
    assert set(manager.graphs) == {desc for mode, desc in manager.desc_of.values() if mode.name == "FULL"}
    assert ask(runner, 600, 600, 1) == ("FULL", 600, 600)
    assert ask(runner, 1, 2000, None) == ("PIECEWISE", 2048, None)
    assert ask(runner, 3, 3000, None) == ("PIECEWISE", 3072, None)
    assert all(record.seconds > 0 for record in state.registry.records())


def test_a_speculator_keeps_its_own_manager(release):
    """Only the model's manager is given another class."""
    runner = served(release)
    other = Runner(release[0], release[1], runner.vllm_config)
    other.initialize_kv_cache(None)
    own = other.cudagraph_manager
    runner.speculator = SimpleNamespace(prefill=own)
    stock, descs = type(own), {mode: list(listed) for mode, listed in own._capture_descs.items()}
    runner.initialize_kv_cache(None)
    runner.capture_model()
    assert type(runner.cudagraph_manager) is not stock
    assert type(own) is stock
    assert own._capture_descs == descs
    drafts = [record.key for record in state_of(runner.vllm_config).registry.records() if record.key.stage == "draft"]
    assert {(key.num_tokens, key.variant) for key in drafts} == {
        (desc.num_tokens, "prefill") for listed in descs.values() for desc in listed
    }


def test_mixed_graphs_of_the_newest_alone(release):
    """0.33 captures mixed batches; 0.23 bakes in rows of one token, so there they aren't captured."""
    runner = served(release)
    runner.capture_model()
    assert bool(state_of(runner.vllm_config).ladder.mixed) == (release[0] == "0.33")


def test_largest_first(release):
    """The largest FULL graph is captured first: the buffers of all outputs are as large as the first's."""
    runner = served(release)
    runner.capture_model()
    sizes = [desc.num_tokens for desc, warmup in runner.forwards if warmup and desc.cg_mode.name == "FULL"]
    assert sizes == sorted(sizes, reverse=True)


def test_profiling_is_not_kept(release):
    """Captures for an estimate of memory leave the registry empty; the manager made after them is taken over too."""
    runner = served(release)
    state = state_of(runner.vllm_config)
    newest = release[0] == "0.33"
    if newest:
        # As vLLM sets it while it estimates; 0.23's second runner doesn't.
        runner.cudagraph_manager._max_full_descs_to_capture = 2
    runner.capture_model(profile_only=True)
    assert not len(state.ladder)
    sizes = [desc.num_tokens for desc, warmup in runner.forwards if warmup and desc.cg_mode.name == "FULL"]
    assert not newest or sizes[:3] == [*sorted(sizes, reverse=True)[:2], min(sizes)]
    runner.initialize_kv_cache(None)
    runner.capture_model()
    assert len(state.ladder)
    assert state.dispatcher is runner.cudagraph_manager
    assert ask(runner, 5, 5, 1)[0] == "FULL"


def test_released_graphs(release):
    """While vLLM has let its graphs go nothing replays; captured anew, they do."""
    runner = served(release)
    runner.capture_model()
    manager = runner.cudagraph_manager
    manager.graphs.clear()
    manager._graphs_captured = False
    assert ask(runner, 5, 5, 1)[0] == "NONE"
    runner.capture_model()
    assert ask(runner, 5, 5, 1)[0] == "FULL"
    assert len(state_of(runner.vllm_config).ladder) == len(manager.desc_of)


def test_lazy(release):
    """Few graphs at the start; one that steps ask for is captured by the manager, and the others stay."""
    runner = served(release, kpolicy={"policy": "full_and_piecewise", "lazy": True, "lazy_graphs": 2})
    manager, state = runner.cudagraph_manager, state_of(runner.vllm_config)
    planned = len(manager.desc_of)
    runner.capture_model()
    assert len(state.ladder) == sum(map(len, manager._capture_descs.values())) < planned
    assert not {key for key, (_, desc) in manager.desc_of.items() if desc in manager.graphs} - {*state.ladder.keys}
    before, listed = set(manager.graphs), manager._capture_descs
    lazy = Lazy(runner, state, partial(Runner.capture_model, runner), lambda: None, wrapped)
    for part in (Part.FULL, Part.PIECEWISE):
        key = min((key for key in manager.desc_of if key.part is part), key=lambda key: key.num_tokens)
        runner.forwards.clear()
        assert lazy.add(key)
        assert {desc for desc, _ in runner.forwards} == {manager.desc_of[key][1]}
        assert key in state.ladder.keys
    assert ask(runner, 1, 1, 1) == ("FULL", 1, 1)
    assert set(manager.graphs) > before
    assert manager._capture_descs is listed


@pytest.mark.parametrize("part", [Part.FULL, Part.PIECEWISE])
def test_lazy_takes_nothing_that_was_not_captured(release, part):
    """A size that vLLM passed over would end the server: the manager's list tells it of graphs, wrappers of pieces."""
    runner = served(release, kpolicy={"policy": "full_and_piecewise", "lazy": True, "lazy_graphs": 2})
    manager, state = runner.cudagraph_manager, state_of(runner.vllm_config)
    runner.capture_model()
    with wrapper_of(release[1], runner) as entries:
        lazy = Lazy(runner, state, lambda: 0, lambda: None, wrapped)
        keys = sorted((key for key in manager.desc_of if key.part is part), key=lambda key: key.num_tokens)
        assert not lazy.add(keys[0])
        assert keys[0] not in state.ladder.keys
        assert state.counters.counts["lazy_capture_failed"] == 1
        if part is Part.PIECEWISE:
            desc = manager.desc_of[keys[1]][1]
            entries[release[1].module("forward_context").BatchDescriptor(desc.num_tokens)] = None
            assert lazy.add(keys[1])


def test_vllm_looks_up_our_ladders(release):
    """vLLM's own look-up, which serves while kpolicy can't decide, finds the next graph of each kind."""
    runner = served(release, kpolicy={"calibrate": False, "mixed_sizes": [], "decode_sizes": [4, 16]})
    runner.capture_model()
    manager = runner.cudagraph_manager
    manager.deciding = False
    assert ask(runner, 5, 5, 1) == ("FULL", 16, 16)
    assert ask(runner, 2, 5, None) == ("PIECEWISE", 16, None)
    assert ask(runner, 17, 17, 1)[0] == "PIECEWISE"


def test_each_step_is_logged_with_its_inputs(release, tmp_path):
    """The rows are those that the runner has prepared, the decision the one that the manager gave for them."""
    path = tmp_path / "log.jsonl"
    runner = served(release, kpolicy={"policy": "full_and_piecewise", "decision_log": str(path)})
    runner.prepare_inputs = lambda decodes, chunk: SimpleNamespace(
        num_scheduled_tokens=np.array([1] * decodes + [chunk] * bool(chunk)),
        num_computed_tokens_np=np.array([9] * decodes + [4] * bool(chunk)),
        num_computed_prefill_tokens_np=np.array([5] * decodes + [4] * bool(chunk)),
        prefill_len_np=np.array([5] * decodes + [500] * bool(chunk)),
    )
    runner.capture_model()
    for decodes, chunk in ((3, 0), (2, 40), (1, 3000)):
        ask(runner, decodes + bool(chunk), decodes + chunk, None if chunk else 1)
        assert len(runner.prepare_inputs(decodes, chunk).num_scheduled_tokens) == decodes + bool(chunk)
    state_of(runner.vllm_config).log.close()
    entries = read_decision_log(path).entries
    assert [(entry.shape.decodes, entry.shape.prefills) for entry in entries] == [
        (((1, 3),), ()), (((1, 2),), ((40, 4),)), (((1, 1),), ((3000, 4),)),
    ]  # fmt: skip
    modes = [entry.decision["mode"] for entry in entries]
    assert modes == ["full", "piecewise" if release[0] == "0.23" else "full", "eager"]


def test_forced(release):
    """Forcing one graph, for timing it, answers with just that."""
    runner = served(release)
    runner.capture_model()
    manager = runner.cudagraph_manager
    mode, desc = next(found for found in manager.desc_of.values() if found[0].name == "PIECEWISE")
    with manager.forcing(mode, desc):
        assert ask(runner, 2, 2, 1) == ("PIECEWISE", desc.num_tokens, None)
    assert ask(runner, 2, 2, 1)[0] == "FULL"
