"""vLLM's own runners, out of the wheel, with everything that touches a device replaced.

What decides is real: the runner's methods that ask for a graph, that capture, and that initialise, with the dispatcher
or the manager they use. Model, attention and KV cache are stand-ins.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.oracle.loader import Loaded, loaded, oracle_folder

RUNNER_FILES = (
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.worker.worker_base",
)
OTHER_FILES = (
    "vllm.v1.core.sched.async_scheduler",
    "vllm.v1.core.sched.interface",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.gpu.buffer_utils",
)
"""Of which only signatures are read here; tests of schedulers and buffers have their own modules"""


_NUMBERS = itertools.count()


@contextmanager
def vllm_of(version: str) -> Iterator[Loaded]:
    """The modules of a release, its runners among them, under a version of their own."""
    folder = oracle_folder()
    assert folder is not None
    with loaded(folder, version, real=RUNNER_FILES + OTHER_FILES) as modules:
        for name in ("config.compilation", "forward_context", "v1.cudagraph_dispatcher"):
            modules.module(name)
        importlib.import_module("torch")
        state: Any = importlib.import_module("vllm.distributed.parallel_state")
        world = state.get_world_group()
        world.world_size = 1
        state.get_world_group = lambda: world
        sys.modules["vllm"].__version__ = f"{version}.0"  # type: ignore[attr-defined]
        sys.modules["torch"].cuda = SimpleNamespace(is_available=lambda: False)  # type: ignore[attr-defined]
        yield modules


class Backend:
    """An attention backend of one name and level."""

    def __init__(self, name: str, level: Any) -> None:
        self.__name__ = name
        self._level = level

    def get_name(self) -> str:
        return self.__name__

    def get_builder_cls(self) -> Any:
        return self

    def get_cudagraph_support(self, _config: Any, _spec: Any) -> Any:
        return self._level


def vllm_config(
    modules: Loaded,
    *,
    mode: str = "FULL_AND_PIECEWISE",
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 2048,
    drafts: int = 0,
    kpolicy: Any = True,
    sizes: list[int] | None = None,
    enforce_eager: bool = False,
    ranks: int = 1,
    index: int = 0,
) -> SimpleNamespace:
    """A configuration as far as kpolicy and the code under test read it."""
    compilation = modules.module("config.compilation")
    config = object.__new__(compilation.CompilationConfig)
    config.cudagraph_mode = compilation.CUDAGraphMode["NONE" if enforce_eager else mode]
    config.cudagraph_capture_sizes = sizes
    config.max_cudagraph_capture_size = None
    config.mode = compilation.CompilationMode.VLLM_COMPILE
    config.splitting_ops = list(config._attention_ops)
    config.use_inductor_graph_partition = False
    config.compile_sizes = []
    config.pass_config = SimpleNamespace(enable_sp=False)
    config.cudagraph_specialize_lora = True
    config.cudagraph_num_of_warmups = 1
    speculative = SimpleNamespace(
        num_speculative_tokens=drafts,
        uses_dynamic_speculative_decoding=lambda: False,
        num_speculative_tokens_per_batch_size=[],
        use_eagle=lambda: False,
        uses_draft_model=lambda: False,
        uses_extract_hidden_states=lambda: False,
    )
    return SimpleNamespace(
        instance_id=f"test-{next(_NUMBERS)}",
        additional_config={} if kpolicy is None else {"kpolicy": kpolicy},
        compilation_config=config,
        model_config=SimpleNamespace(enforce_eager=enforce_eager, is_encoder_decoder=False, model="a-model"),
        scheduler_config=SimpleNamespace(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            scheduler_cls=None,
            async_scheduling=False,
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_size=ranks,
            data_parallel_rank=0,
            data_parallel_index=index,
            use_ubatching=False,
        ),
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
        observability_config=SimpleNamespace(cudagraph_metrics=False),
        speculative_config=speculative if drafts else None,
        num_speculative_tokens=drafts,
        uniform_decode_query_len=1 + drafts,
        lora_config=None,
        performance_mode="balanced",
    )


def sized(modules: Loaded, config: SimpleNamespace) -> None:
    """Have the real configuration set its sizes, as it does when it is made."""
    compilation = modules.module("config.compilation")
    modules.module("platforms").current_platform = SimpleNamespace(is_device_capability_family=lambda _: False)
    config.compilation_config.post_init_cudagraph_sizes = lambda: (
        compilation.CompilationConfig.post_init_cudagraph_sizes(config.compilation_config)
    )
    modules.module("config.vllm").VllmConfig._set_cudagraph_sizes(config)


def runner_v1(modules: Loaded, config: SimpleNamespace) -> Any:
    """The first runner, before its graphs are initialised. `ran` lists its dummy runs as (mode, descriptor)."""
    module = modules.module("v1.worker.gpu_model_runner")
    _without_device(module)
    runner = object.__new__(module.GPUModelRunner)
    runner.vllm_config = config
    runner.ran = []
    for name in ("compilation_config", "parallel_config", "scheduler_config", "model_config", "speculative_config",
                 "lora_config"):  # fmt: skip
        setattr(runner, name, getattr(config, name))
    runner.load_config = SimpleNamespace(use_tqdm_on_load=False)
    runner.uniform_decode_query_len = config.uniform_decode_query_len
    runner.max_num_reqs = config.scheduler_config.max_num_seqs
    runner.input_batch = SimpleNamespace(lora_id_to_lora_request={})
    runner.kv_cache_config = None
    runner.attn_groups = []
    runner.device = None
    runner.encoder_cudagraph_manager = None
    runner._maybe_init_encoder_cudagraph_manager = lambda: None
    runner.maybe_remove_all_loras = lambda _: None
    runner._dummy_run = lambda tokens, **named: _dummy_run(runner, module, tokens, **named)
    runner.cudagraph_dispatcher = modules.module("v1.cudagraph_dispatcher").CudagraphDispatcher(config)
    return runner


def _without_device(module: Any) -> None:
    module.torch = SimpleNamespace(
        accelerator=SimpleNamespace(
            synchronize=lambda: None, empty_cache=lambda: None, get_memory_info=lambda: (1 << 30, 1 << 31)
        ),
        cuda=SimpleNamespace(mem_get_info=lambda: (1 << 30, 1 << 31)),
        profiler=SimpleNamespace(record_function=lambda _: nullcontext()),
    )
    module.graph_capture = lambda **_: nullcontext()
    module.tqdm = lambda descs, **_: descs


def _dummy_run(runner: Any, module: Any, tokens: int, **named: Any) -> None:
    """The part of `_dummy_run` that asks for a graph and checks the answer."""
    mode, uniform = named.get("cudagraph_runtime_mode"), named.get("uniform_decode", False)
    q = runner.uniform_decode_query_len
    longest = q if uniform else tokens
    reqs = min(runner.max_num_reqs, -(-tokens // longest) if uniform else tokens)
    new = np.full(reqs, tokens // reqs, dtype=np.int32)
    new[-1] += tokens % reqs
    got, desc, *_ = runner._determine_batch_execution_and_padding(
        num_tokens=tokens,
        num_reqs=reqs,
        num_scheduled_tokens_np=new,
        max_num_scheduled_tokens=longest,
        use_cascade_attn=False,
        force_eager=mode == module.CUDAGraphMode.NONE,
        force_uniform_decode=uniform,
        force_has_lora=False,
        force_num_active_loras=0,
    )
    assert mode in (None, got)
    runner.ran.append((got, desc))


def initialise_v1(runner: Any, modules: Loaded, backend: str = "FLASH_ATTN", level: str = "ALWAYS") -> None:
    """Have the runner ask attention and initialise its keys, as when the KV cache is laid out."""
    levels = modules.module("v1.attention.backend").AttentionCGSupport
    group = SimpleNamespace(kv_cache_spec=None)
    runner._check_and_update_cudagraph_mode([{Backend(backend, levels[level])}], [group])


def ask_v1(runner: Any, new: list[int], **named: Any) -> tuple[str, Any]:
    """The graph for a step of requests with that many new tokens each."""
    mode, desc, *_ = runner._determine_batch_execution_and_padding(
        num_tokens=sum(new),
        num_reqs=len(new),
        num_scheduled_tokens_np=np.array(new, dtype=np.int32),
        max_num_scheduled_tokens=max(new),
        use_cascade_attn=False,
        **named,
    )
    return mode.name, desc
