"""The parameters of what kpolicy wraps, as recorded from the released wheels, and a check of the live ones.

Of an enumeration its members are recorded, as ``NAME=value``; of a property what it reads, as ``self.name``.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from enum import Enum
from importlib import import_module

__all__ = [
    "CONFIG",
    "ENGINE",
    "RANKS",
    "SCHEDULER_0_23",
    "SCHEDULER_0_25",
    "TWO_FORWARDS",
    "V1_0_15",
    "V1_0_23",
    "V1_0_33",
    "V2_0_23",
    "V2_0_33",
    "differing",
]

Recorded = Mapping[str, tuple[str, ...]]

CONFIG: dict[str, tuple[str, ...]] = {
    "vllm.config.vllm:VllmConfig._set_cudagraph_sizes": ("self",),
    "vllm.v1.worker.worker_base:WorkerWrapperBase.init_device": ("self",),
}

_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_ASYNC_SCHEDULER = "vllm.v1.core.sched.async_scheduler:AsyncScheduler"

SCHEDULER_0_23: dict[str, tuple[str, ...]] = {
    f"{_SCHEDULER}.schedule": ("self",),
    f"{_ASYNC_SCHEDULER}.schedule": ("self",),
    f"{_SCHEDULER}.pause_state": ("self._pause_state",),
    f"{_ASYNC_SCHEDULER}.pause_state": ("self._pause_state",),
    "vllm.v1.core.sched.interface:PauseState": ("UNPAUSED=0", "PAUSED_NEW=1", "PAUSED_ALL=2"),
}
SCHEDULER_0_25: dict[str, tuple[str, ...]] = {
    **SCHEDULER_0_23,
    f"{_SCHEDULER}.schedule": ("self", "throttle_prefills"),
    f"{_ASYNC_SCHEDULER}.schedule": ("self", "throttle_prefills"),
}
"""0.33's too"""
RANKS: dict[str, tuple[str, ...]] = {"vllm.v1.engine.core:DPEngineCoreProc.run_busy_loop": ("self",)}
ENGINE: dict[str, tuple[str, ...]] = {
    "vllm.v1.engine.core:EngineCoreProc._process_input_queue": ("self",),
    "vllm.v1.engine.core:EngineCoreProc.is_running": ("self",),
    "vllm.v1.engine.core:EngineCore.step_with_batch_queue": ("self",),
    "vllm.v1.executor.uniproc_executor:UniProcExecutor.execute_model": ("self", "scheduler_output", "non_block"),
    "vllm.v1.executor.uniproc_executor:UniProcExecutor.sample_tokens": ("self", "grammar_output", "non_block"),
    "vllm.v1.executor.uniproc_executor:AsyncOutputFuture.__init__": ("self", "async_output", "single_value"),
    f"{_SCHEDULER}.update_from_output": ("self", "scheduler_output", "model_runner_output"),
}
TWO_FORWARDS: dict[str, tuple[str, ...]] = {"vllm.v1.worker.gpu.buffer_utils:set_default_max_concurrency": ("n",)}

_DISPATCH = ("self", "num_tokens", "uniform_decode", "has_lora", "num_active_loras", "valid_modes", "invalid_modes")
_EXECUTION = (
    "self", "num_tokens", "num_reqs", "num_scheduled_tokens_np", "max_num_scheduled_tokens", "use_cascade_attn",
    "allow_microbatching", "force_eager", "force_uniform_decode", "force_has_lora", "force_num_active_loras",
    "num_encoder_reqs",
)  # fmt: skip
_DUMMY = (
    "self", "num_tokens", "cudagraph_runtime_mode", "force_attention", "uniform_decode", "allow_microbatching",
    "skip_eplb", "is_profile", "create_mixed_batch", "remove_lora", "is_graph_capturing", "num_active_loras",
    "profile_seq_lens",
)  # fmt: skip
_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_DISPATCHER = "vllm.v1.cudagraph_dispatcher:CudagraphDispatcher"
_CAPTURE = ("self", "desc", "cudagraph_runtime_mode", "profile_seq_lens", "allow_microbatching", "num_warmups")

V1_0_23: dict[str, tuple[str, ...]] = {
    "vllm.forward_context:BatchDescriptor": ("num_tokens", "num_reqs", "uniform", "has_lora", "num_active_loras"),
    f"{_DISPATCHER}.__init__": ("self", "vllm_config"),
    f"{_DISPATCHER}.dispatch": _DISPATCH,
    f"{_DISPATCHER}.initialize_cudagraph_keys": ("self", "cudagraph_mode", "uniform_decode_query_len"),
    f"{_DISPATCHER}.add_cudagraph_key": ("self", "runtime_mode", "batch_descriptor"),
    f"{_DISPATCHER}._create_padded_batch_descriptor": (
        "self", "num_tokens", "uniform_decode", "has_lora", "num_active_loras",
    ),
    f"{_DISPATCHER}._get_lora_cases": ("self",),
    f"{_RUNNER}._determine_batch_execution_and_padding": _EXECUTION,
    f"{_RUNNER}._check_and_update_cudagraph_mode": ("self", "attention_backends", "kv_cache_groups", "is_profiling"),
    f"{_RUNNER}._warmup_and_capture": _CAPTURE,
    f"{_RUNNER}.capture_model": ("self",),
    f"{_RUNNER}.profile_cudagraph_memory": ("self",),
    f"{_RUNNER}._dummy_run": _DUMMY,
}  # fmt: skip
V1_0_15: dict[str, tuple[str, ...]] = {
    "vllm.forward_context:BatchDescriptor": ("num_tokens", "num_reqs", "uniform", "has_lora"),
    f"{_DISPATCHER}.__init__": ("self", "vllm_config"),
    f"{_DISPATCHER}.dispatch": ("self", "num_tokens", "uniform_decode", "has_lora", "disable_full"),
    f"{_DISPATCHER}.initialize_cudagraph_keys": ("self", "cudagraph_mode", "uniform_decode_query_len"),
    f"{_DISPATCHER}.add_cudagraph_key": ("self", "runtime_mode", "batch_descriptor"),
    f"{_DISPATCHER}._create_padded_batch_descriptor": ("self", "num_tokens", "uniform_decode", "has_lora"),
    f"{_RUNNER}._determine_batch_execution_and_padding": tuple(
        name for name in _EXECUTION if name != "force_num_active_loras"
    ),
    f"{_RUNNER}._check_and_update_cudagraph_mode": ("self", "attention_backends", "kv_cache_groups"),
    f"{_RUNNER}._capture_cudagraphs": ("self", "batch_descriptors", "cudagraph_runtime_mode"),
    f"{_RUNNER}.capture_model": ("self",),
}  # fmt: skip
V1_0_33 = {
    **V1_0_23,
    f"{_RUNNER}._warmup_and_capture": (*_CAPTURE, "profiler"),
    f"{_RUNNER}._dummy_run": (*_DUMMY, "randomize_inputs"),
}

_UTILS = "vllm.v1.worker.gpu.cudagraph_utils"
_RUNNER_2 = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
_DESCRIPTOR = ("cg_mode", "num_tokens", "num_reqs", "uniform_token_count")
_ASKED = ("self", "num_reqs", "num_tokens", "uniform_token_count")
_EXECUTED = (
    "self", "scheduler_output", "intermediate_tensors", "dummy_run", "skip_attn_for_dummy_run", "is_profile",
)  # fmt: skip

V2_0_23: dict[str, tuple[str, ...]] = {
    f"{_UTILS}:BatchExecutionDescriptor": _DESCRIPTOR,
    f"{_UTILS}:CudaGraphManager.dispatch": _ASKED,
    f"{_UTILS}:CudaGraphManager.capture": ("self", "create_forward_fn", "progress_bar_desc"),
    f"{_UTILS}:CudaGraphManager._init_candidates": ("self",),
    f"{_RUNNER_2}.initialize_kv_cache": ("self", "kv_cache_config"),
    f"{_RUNNER_2}.capture_model": ("self",),
    f"{_RUNNER_2}.execute_model": _EXECUTED,
    f"{_RUNNER_2}.sample_tokens": ("self", "grammar_output"),
    f"{_RUNNER_2}.prepare_inputs": ("self", "scheduler_output", "batch_desc"),
}
V2_0_33: dict[str, tuple[str, ...]] = {
    **V2_0_23,
    f"{_UTILS}:BatchExecutionDescriptor": (*_DESCRIPTOR, "max_query_len", "num_active_loras", "num_ubatches"),
    f"{_UTILS}:CudaGraphManager.dispatch": (*_ASKED, "num_active_loras", "max_query_len", "num_ubatches"),
    f"{_RUNNER_2}.initialize_kv_cache": (
        "self", "kv_cache_config", "is_profiling", "kv_cache_allocation_context",
    ),
    f"{_RUNNER_2}.capture_model": ("self", "profile_only"),
    f"{_RUNNER_2}.execute_model": (*_EXECUTED, "context_len", "valid_dummy_state_slots", "randomize_inputs"),
    f"{_RUNNER_2}.prepare_inputs": (
        "self", "scheduler_output", "batch_req_state", "batch_desc", "num_active_loras",
    ),
}  # fmt: skip


def differing(recorded: Recorded) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """Each name whose live parameters aren't the recorded ones: (name, recorded, live)."""
    for name, parameters in recorded.items():
        live = _live(name)
        if live != parameters:
            yield name, parameters, "nothing: it isn't there" if live is None else ", ".join(live)


def _live(name: str) -> tuple[str, ...] | None:
    module, _, path = name.partition(":")
    try:
        found = import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
        if isinstance(found, property):
            return tuple(f"self.{name}" for name in found.fget.__code__.co_names)
        if isinstance(found, type) and issubclass(found, Enum):
            return tuple(f"{each.name}={each.value}" for each in found)
        return tuple(inspect.signature(found).parameters)  # type: ignore[arg-type]
    except (ImportError, AttributeError, TypeError, ValueError):
        return None
