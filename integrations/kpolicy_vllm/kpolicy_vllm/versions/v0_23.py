"""vLLM 0.23.0. The first runner is its default for most models, the second for dense Llama, Mistral and Qwen3."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from kpolicy_vllm import kunlun
from kpolicy_vllm.state import State
from kpolicy_vllm.versions import Adapter
from kpolicy_vllm.versions.names import Names
from kpolicy_vllm.versions.signatures import CONFIG, ENGINE, RANKS, SCHEDULER_0_23, TWO_FORWARDS, V1_0_23, V2_0_23

__all__ = ["make"]


def make() -> Adapter:
    """The adapter; imports what every process of vLLM imports anyway."""
    return Adapter(
        version="0.23.0",
        config_class=import_module("vllm.config.vllm").VllmConfig,
        worker_wrapper_class=import_module("vllm.v1.worker.worker_base").WorkerWrapperBase,
        attach=_attach,
        signatures={
            "config": CONFIG,
            "v1": V1_0_23,
            "v2": V2_0_23,
            "scheduler": SCHEDULER_0_23,
            "ranks": RANKS,
            "engine": ENGINE,
            "two forwards": TWO_FORWARDS,
        },
    )


def _attach(runner: Any, state: State) -> None:
    if any(each.__module__.partition(".")[0] == "vllm_ascend" for each in type(runner).__mro__):
        from kpolicy_vllm import ascend

        ascend.attach(runner, state)
    elif kunlun.is_kunlun():
        from kpolicy_vllm import kunlun_attach

        kunlun_attach.attach(runner, state)
    elif hasattr(runner, "cudagraph_manager"):
        from kpolicy_vllm import attach_v2

        attach_v2.attach(runner, state, Names.of_v2(), newest=False)
    else:
        from kpolicy_vllm import attach_v1

        attach_v1.attach(runner, state, Names.of_v1())
