"""Executors by name: ours and those of installed plugins. Device adapters import their libraries inside."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from kpolicy.errors import ConfigError, PluginError, UnknownNameError
from kpolicy.executors.base import CaptureReport, Executor, ProbeReport, ProbeStatus, StepInputs, StepOutputs
from kpolicy.plugins import load_plugin, plugin_names

__all__ = [
    "CaptureReport",
    "Executor",
    "ProbeReport",
    "ProbeStatus",
    "StepInputs",
    "StepOutputs",
    "executor_names",
    "get_executor",
]

GROUP = "kpolicy.executors"
OWN: Mapping[str, str] = {
    "simulated": "kpolicy.executors.simulated:SimulatedExecutor",
    "cpu": "kpolicy.executors.cpu:CpuExecutor",
    "cuda": "kpolicy.executors.cuda:CudaExecutor",
    "ascend": "kpolicy.executors.ascend:AscendExecutor",
    "kunlun": "kpolicy.executors.kunlun:KunlunExecutor",
    "xpu": "kpolicy.executors.xpu:XpuExecutor",
}
NEED_TORCH = frozenset(f"kpolicy.executors.{device}" for device in ("cpu", "cuda", "ascend", "kunlun", "xpu"))
"""Modules of ours that import torch."""


def executor_names() -> dict[str, str]:
    """Every executor that is installed: its name and where it comes from."""
    return plugin_names(GROUP, OWN)


def get_executor(name: str | Executor, **arguments: Any) -> Executor:
    """The executor that a name stands for.

    Raises:
        UnknownNameError: nobody registered the name.
        ConfigError: the executor doesn't take an argument.
        PluginError: a plugin raises when loaded, or isn't an executor.
    """
    if not isinstance(name, str):
        if not isinstance(name, Executor):
            raise ConfigError(
                f"{name!r} isn't an executor: it lacks part of the Executor protocol. See docs/design.md."
            )
        return name
    factory: Callable[..., Any] | None
    if name in OWN:
        module, _, attribute = OWN[name].partition(":")
        factory = getattr(import_module(module), attribute)
    else:
        factory = load_plugin(GROUP, name, OWN)
    if factory is None:
        raise UnknownNameError("executor", name, executor_names())
    try:
        executor = factory(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"executor {name!r} doesn't take {', '.join(arguments) or 'no arguments'}: {error}."
        ) from None
    if not isinstance(executor, Executor):
        raise PluginError(f"executor {name!r} made {executor!r}, which lacks part of the Executor protocol.")
    return executor
