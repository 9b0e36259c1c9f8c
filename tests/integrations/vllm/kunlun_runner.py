"""vLLM's own first runners on a pretended platform of vLLM-Kunlun's, over a pretended model and card."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kpolicy_vllm import kunlun, plugin, versions
from kpolicy_vllm.kunlun import wrapper_class
from kpolicy_vllm.state import PROCESS, state_of
from tests.integrations.vllm.real_runner import RUNNER_FILES, initialise_v1, runner_v1, sized, vllm_config
from tests.integrations.vllm.test_oracle_runner import attached
from tests.oracle.loader import Loaded, loaded, oracle_folder

if TYPE_CHECKING:
    import pytest


@contextmanager
def vllm_on_kunlun(version: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loaded]:
    """A vLLM on vLLM-Kunlun's platform, with the plugin loaded."""
    folder = oracle_folder()
    assert folder is not None
    monkeypatch.setattr(PROCESS, "counts", Counter())
    monkeypatch.setattr(PROCESS, "_warned", set())
    monkeypatch.delenv("KPOLICY_VLLM", raising=False)  # on by each test's configuration
    platform = type("KunlunPlatform", (), {"__module__": "vllm_kunlun.platforms.kunlun"})
    platform.get_static_graph_wrapper_cls = classmethod(lambda _cls: "vllm's own")  # type: ignore[attr-defined]
    for name in ("vllm_kunlun", "vllm_kunlun.platforms", "vllm_kunlun.platforms.kunlun"):
        module = ModuleType(name)
        vars(module)["KunlunPlatform"] = platform
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(versions, "find_spec", lambda _name: object())
    monkeypatch.setattr(kunlun, "find_spec", lambda _name: object())
    real = (*RUNNER_FILES, "vllm.v1.core.sched.output", "vllm.compilation.cuda_graph")
    with loaded(folder, version, real=real, installed=("torch",)) as modules:
        for name in ("config.compilation", "forward_context", "v1.cudagraph_dispatcher"):
            modules.module(name)
        state: Any = importlib.import_module("vllm.distributed.parallel_state")
        world = SimpleNamespace(world_size=1)
        state.get_world_group = lambda: world
        first = SimpleNamespace(is_first_rank=False)
        state.get_pp_group = state.get_tp_group = lambda: first
        package: Any = sys.modules["vllm"]
        package.__version__ = version
        package.SamplingParams = SimpleNamespace
        plugin.register()
        assert not PROCESS.counts, PROCESS.counts
        yield modules


class Metadata:
    """Attention metadata as vLLM-Kunlun's: lengths on the host beside block tables on the device."""

    def __init__(self, lens: list[int], blocks: list[int], padded: int) -> None:
        more = padded - len(lens)
        self.seq_lens_tensor_cpu = torch.tensor([*lens, *[0] * more], dtype=torch.int32)
        self.block_tables = torch.tensor([[block] for block in [*blocks, *[0] * more]])
        self.num_actual_tokens = padded


class Wrapper:
    """As vLLM's: captures at the first call, with the host lengths of that moment."""

    def __init__(self, runnable: Any, vllm_config: Any, runtime_mode: Any, cudagraph_options: Any = None) -> None:
        self.runnable, self.vllm_config, self.runtime_mode = runnable, vllm_config, runtime_mode
        self.cudagraph_options = cudagraph_options
        self.concrete_cudagraph_entries: dict[Any, Any] = {}

    def __call__(self, hidden: Any) -> Any:
        now = self.runnable.now
        entry = self.concrete_cudagraph_entries.setdefault(now.batch_descriptor, SimpleNamespace(cudagraph=None))
        if entry.cudagraph is None:
            entry.cudagraph = now.attn_metadata["layer"].seq_lens_tensor_cpu.clone()
            return self.runnable(hidden)
        return self.runnable(hidden, kept=entry.cudagraph)


class Model:
    """Attention over host lengths; where they are `frozen`, a graph goes on with those of its capture."""

    def __init__(self, *, frozen: bool) -> None:
        self.frozen, self.now = frozen, SimpleNamespace()
        self.calls = 0

    def __call__(self, hidden: Any, kept: Any = None) -> Any:
        self.calls += 1
        live = self.now.attn_metadata["layer"].seq_lens_tensor_cpu
        lens = kept if self.frozen and kept is not None else live
        return hidden + torch.repeat_interleave(lens, len(hidden) // len(lens))[: len(hidden)]


def brought_up(modules: Loaded, *, frozen: bool = False, level: str = "UNIFORM_BATCH", **settings: Any) -> Any:
    """A runner after start-up, its FULL graphs under our wrapper; `served` lists (mode, rows, tokens) of its steps."""
    config = vllm_config(modules, kpolicy=settings.pop("kpolicy", {"policy": "auto"}), **settings)
    config.parallel_config.pipeline_parallel_size = 1
    config.cache_config = SimpleNamespace(block_size=16)
    config.model_config.max_model_len = 2048
    config.model_config.hf_text_config = SimpleNamespace(to_dict=dict)
    sized(modules, config)
    modules.module("platforms").current_platform = sys.modules["vllm_kunlun.platforms.kunlun"].KunlunPlatform()
    runner = runner_v1(modules, config)
    module: Any = modules.module("v1.worker.gpu_model_runner")
    module.torch.cuda.synchronize = lambda: None
    module.coordinate_batch_across_dp = lambda **asked: (
        False, torch.tensor([asked["num_tokens_padded"]] * 2), asked["cudagraph_mode"],
    )  # fmt: skip
    spec = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=16))
    runner.kv_cache_config = SimpleNamespace(kv_cache_groups=[spec], num_blocks=500, has_mamba_layers=False)
    modes = modules.module("config.compilation").CUDAGraphMode
    attached(modules, config, runner)
    model = Model(frozen=frozen)
    made = wrapper_class(Wrapper, lambda: model.now, modes, lambda _: False)
    runner.model = made(model, config, runtime_mode=modes.FULL)
    runner.served = []
    asked = inspect.signature(type(runner)._determine_batch_execution_and_padding).parameters

    def forward(new: list[int], lens: list[int], blocks: list[int], **named: Any) -> Any:
        mode, desc, *_ = runner._determine_batch_execution_and_padding(
            num_tokens=sum(new), num_reqs=len(new), num_scheduled_tokens_np=np.array(new, dtype=np.int32),
            max_num_scheduled_tokens=max(new), use_cascade_attn=False,
            **{name: value for name, value in named.items() if name in asked},
        )  # fmt: skip
        rows = desc.num_reqs or len(new)
        model.now = SimpleNamespace(
            cudagraph_runtime_mode=mode, batch_descriptor=desc,
            attn_metadata={"layer": Metadata(lens, blocks, rows)} if mode is modes.FULL else None,
        )  # fmt: skip
        if mode is modes.FULL:
            runner.model(torch.zeros(desc.num_tokens, dtype=torch.int32))
        runner.served.append((mode.name, len(new), desc.num_tokens))
        return mode, desc

    def dummy_run(tokens: int, **named: Any) -> None:
        uniform, q = named.get("uniform_decode", False), runner.uniform_decode_query_len
        rows = -(-tokens // q) if uniform else min(tokens, runner.max_num_reqs)
        new = [q] * rows if uniform else [*[1] * (rows - 1), tokens - rows + 1]
        got, desc = forward(
            new, [q] * rows, [0] * rows, force_eager=named.get("cudagraph_runtime_mode") is modes.NONE,
            force_uniform_decode=uniform, force_has_lora=False, force_num_active_loras=0,
        )  # fmt: skip
        assert named.get("cudagraph_runtime_mode") in (None, got)
        runner.ran.append((got, desc))

    known: dict[str, tuple[int, list[int]]] = {}

    def execute_model(output: Any) -> None:
        for gone in output.finished_req_ids:
            known.pop(gone, None)
        for each in output.scheduled_new_reqs:
            known[each.req_id] = (each.num_computed_tokens, each.block_ids[0])
        cached = output.scheduled_cached_reqs
        for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            known[name] = (computed, known[name][1])
        new = output.num_scheduled_tokens
        if new:
            lens = [known[name][0] + count for name, count in new.items()]
            forward(list(new.values()), lens, [known[name][1][0] for name in new])

    runner._dummy_run = dummy_run
    runner.execute_model, runner.sample_tokens = execute_model, lambda _: None
    initialise_v1(runner, modules, "Kunlun_v1", level)
    runner.capture_model()
    return SimpleNamespace(
        runner=runner, model=model, state=state_of(config), modes=modes, known=known, forward=forward
    )  # fmt: skip
