"""vLLM 0.25.1 under vLLM-Kunlun, whose development branch is made for it. Its first runner is as 0.23's."""

from __future__ import annotations

from importlib import import_module

from kpolicy_vllm.state import State
from kpolicy_vllm.versions import Adapter
from kpolicy_vllm.versions.signatures import CONFIG, RANKS, SCHEDULER_0_25, V1_0_23

__all__ = ["make"]


def make() -> Adapter:
    """The adapter; imports what every process of vLLM imports anyway."""
    return Adapter(
        version="0.25.1",
        config_class=import_module("vllm.config.vllm").VllmConfig,
        worker_wrapper_class=import_module("vllm.v1.worker.worker_base").WorkerWrapperBase,
        attach=_attach,
        signatures={"config": CONFIG, "v1": V1_0_23, "v2": {}, "scheduler": SCHEDULER_0_25, "ranks": RANKS},
    )


def _attach(runner: object, state: State) -> None:
    from kpolicy_vllm import kunlun_attach

    kunlun_attach.attach(runner, state)
