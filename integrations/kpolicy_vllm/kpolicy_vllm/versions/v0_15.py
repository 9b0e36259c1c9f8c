"""vLLM 0.15.1 under vLLM-Kunlun, which is made for it: its dispatcher and its captures, as 0.23's are called."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import attrs

from kpolicy_vllm.runner_v1 import dispatcher_class
from kpolicy_vllm.state import State
from kpolicy_vllm.versions import Adapter
from kpolicy_vllm.versions.names import Names
from kpolicy_vllm.versions.signatures import CONFIG, V1_0_15

__all__ = ["as_newer", "by_descriptor", "make"]


def make() -> Adapter:
    """The adapter; imports what every process of vLLM imports anyway."""
    return Adapter(
        version="0.15.1",
        config_class=import_module("vllm.config.vllm").VllmConfig,
        worker_wrapper_class=import_module("vllm.v1.worker.worker_base").WorkerWrapperBase,
        attach=_attach,
        signatures={"config": CONFIG, "v1": V1_0_15, "v2": {}},
    )


def _attach(runner: Any, state: State) -> None:
    from kpolicy_vllm import kunlun_attach

    by_descriptor(runner)
    names = Names.of_v1()
    modes, descriptor = names.CUDAGraphMode, names.BatchDescriptor
    made = partial(_dispatcher_class, as_newer(names.CudagraphDispatcher, modes, descriptor))
    kunlun_attach.attach(runner, state, attrs.evolve(names, dispatcher_class=made))


def as_newer(base: type[Any], modes: Any, descriptor: Callable[..., Any]) -> type[Any]:
    """0.15's dispatcher with the arguments of 0.23's, for a class of ours over it.

    Args:
        base: vLLM's `CudagraphDispatcher`.
        modes: vLLM's `CUDAGraphMode`.
        descriptor: vLLM's `BatchDescriptor`, which knows that there are adapters and not how many.
    """
    none, full, piecewise = modes.NONE, modes.FULL, modes.PIECEWISE

    class Newer(base):  # type: ignore[misc]
        """See `as_newer`."""

        def _get_lora_cases(self) -> list[int]:
            if not self.vllm_config.lora_config:
                return [0]
            return [1, 0] if self.compilation_config.cudagraph_specialize_lora else [1]

        def _create_padded_batch_descriptor(
            self, num_tokens: int, uniform_decode: bool, has_lora: bool, num_active_loras: int = 0
        ) -> Any:
            return super()._create_padded_batch_descriptor(num_tokens, uniform_decode, has_lora or num_active_loras > 0)

        def dispatch(
            self, num_tokens: int, uniform_decode: bool = False, has_lora: bool = False, num_active_loras: int = 0,
            valid_modes: Any = None, invalid_modes: Any = None,
        ) -> Any:  # fmt: skip
            allowed = {none, full, piecewise} if valid_modes is None else set(valid_modes)
            allowed -= set(invalid_modes or ())
            mode, desc = super().dispatch(
                num_tokens, uniform_decode, has_lora or num_active_loras > 0, disable_full=full not in allowed
            )
            return (mode, desc) if mode in allowed else (none, descriptor(num_tokens))

    return Newer


def _dispatcher_class(newer: type[Any], _base: type[Any], modes: Any, descriptor: Callable[..., Any]) -> type[Any]:
    """Ours over 0.15's, asked with 0.15's arguments."""
    full = modes.FULL

    class KDispatcher015(dispatcher_class(newer, modes, descriptor)):  # type: ignore[misc]
        """See `_dispatcher_class`."""

        def dispatch(
            self, num_tokens: int, uniform_decode: bool = False, has_lora: bool = False, disable_full: bool = False
        ) -> Any:
            invalid, loras = ({full} if disable_full else None), int(has_lora)
            if self.facts is None and self.deciding and not has_lora:
                # The second question of a step, after data-parallel ranks agreed on a size: all must answer that size.
                return self.by_own_rule(num_tokens, uniform_decode, invalid)
            return super().dispatch(num_tokens, uniform_decode, has_lora, loras, None, invalid)

    return KDispatcher015


def by_descriptor(runner: Any) -> None:
    """Have 0.15's runner capture one descriptor at a time, through the method that newer ones have for that."""
    capture = runner._capture_cudagraphs

    def warmup_and_capture(desc: Any, cudagraph_runtime_mode: Any) -> None:
        capture([desc], cudagraph_runtime_mode)

    def capture_cudagraphs(batch_descriptors: list[Any], cudagraph_runtime_mode: Any) -> None:
        for desc in batch_descriptors:
            runner._warmup_and_capture(desc, cudagraph_runtime_mode=cudagraph_runtime_mode)

    runner._warmup_and_capture = warmup_and_capture
    runner._capture_cudagraphs = capture_cudagraphs
    # 0.15 doesn't estimate what its graphs will take.
    runner.profile_cudagraph_memory = lambda: 0
