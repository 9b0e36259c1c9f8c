"""vLLM 0.33.0. The second runner is its default; the first serves what that lacks."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from kpolicy_vllm.state import State
from kpolicy_vllm.versions import Adapter
from kpolicy_vllm.versions.names import Names
from kpolicy_vllm.versions.signatures import CONFIG, ENGINE, RANKS, SCHEDULER_0_25, TWO_FORWARDS, V1_0_33, V2_0_33

__all__ = ["make"]


def make() -> Adapter:
    """The adapter; imports what every process of vLLM imports anyway."""
    return Adapter(
        version="0.33.0",
        config_class=import_module("vllm.config.vllm").VllmConfig,
        worker_wrapper_class=import_module("vllm.v1.worker.worker_base").WorkerWrapperBase,
        attach=_attach,
        signatures={
            "config": CONFIG,
            "v1": V1_0_33,
            "v2": V2_0_33,
            "scheduler": SCHEDULER_0_25,
            "ranks": RANKS,
            "engine": ENGINE,
            "two forwards": TWO_FORWARDS,
        },
    )


def _attach(runner: Any, state: State) -> None:
    if hasattr(runner, "cudagraph_manager"):
        from kpolicy_vllm import attach_v2

        attach_v2.attach(runner, state, Names.of_v2(), newest=True)
    else:
        from kpolicy_vllm import attach_v1

        attach_v1.attach(runner, state, Names.of_v1())
