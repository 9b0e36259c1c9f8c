"""Executors by name: ours and those of installed plugins. Device adapters import their libraries inside."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from kpolicy.errors import ConfigError, PluginError, UnknownNameError
from kpolicy.executors.base import CaptureReport, Executor, ProbeReport, ProbeStatus, StepInputs, StepOutputs
from kpolicy.executors.importing import import_torch
from kpolicy.plugins import load_plugin, plugin_names
from kpolicy.settings import Settings

__all__ = [
    "CaptureReport",
    "Executor",
    "ProbeReport",
    "ProbeStatus",
    "StepInputs",
    "StepOutputs",
    "executor_names",
    "first_executor",
    "get_executor",
    "of_settings",
]

GROUP = "kpolicy.executors"
OWN: Mapping[str, str] = {
    "simulated": "kpolicy.executors.simulated:SimulatedExecutor",
    "cpu": "kpolicy.executors.cpu:CpuExecutor",
    "cuda": "kpolicy.executors.cuda:CudaExecutor",
    "ascend": "kpolicy.executors.ascend:AscendExecutor",
    "kunlun": "kpolicy.executors.kunlun:KunlunExecutor",
    "xpu": "kpolicy.executors.xpu:XpuExecutor",
    "accelerator": "kpolicy.executors.xpu:AcceleratorExecutor",
}
NEED_TORCH = frozenset(f"kpolicy.executors.{device}" for device in ("cpu", "cuda", "ascend", "kunlun", "xpu"))
"""Modules of ours that import torch."""
UNVERIFIED = frozenset({"ascend", "kunlun", "xpu", "accelerator"})
"""Executors of ours that never ran on the hardware they are for."""
OF_TENSORS: Mapping[str, tuple[str, ...]] = {
    "npu": ("ascend",), "cuda": ("kunlun", "cuda"), "xpu": ("xpu", "accelerator"), "cpu": ("cpu",),
}  # fmt: skip
"""Executors of ours for a model whose tensors are on a kind of device, vendors before CUDA."""


OF_SETTINGS: Mapping[str, Callable[[Settings], Mapping[str, Any]]] = {
    "kunlun": lambda settings: {"query_len": settings.query_len},
}
"""What executors of ours take from an Engine's settings, besides the most requests: the decode rows to be tried."""


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
        if module in NEED_TORCH:
            _need_torch(name)
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


def of_settings(name: str, settings: Settings | None) -> dict[str, Any]:
    """Arguments that an executor of ours takes from an Engine's settings alone."""
    taken = OF_SETTINGS.get(name)
    return {} if taken is None or settings is None else dict(taken(settings))


def _need_torch(name: str) -> None:
    try:
        import_torch()
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"executor {name!r} needs {error.name}, which isn't installed. Run: pip install 'kpolicy[torch]'."
        ) from None


def first_executor(model: Any, settings: Settings | None = None, **arguments: Any) -> tuple[Executor, dict[str, str]]:
    """The first executor that can run a model where its tensors are, and why those before it couldn't.

    A plugin of the same name as the kind of device that torch gives comes first, then ours, vendors before CUDA.

    Args:
        model: a step model; one that doesn't say its device is on the CPU.
        settings: an Engine's, for what an executor takes of them; see `of_settings`.
        **arguments: for the executor, besides the model.

    Raises:
        ConfigError: none can, with every reason; or the executor doesn't take an argument.
    """
    kind = str(getattr(model, "device", "cpu")).partition(":")[0]
    own = OF_TENSORS.get(kind, ("accelerator",))
    names = [*([kind] if kind not in OWN and kind in executor_names() else []), *own]
    refused: dict[str, str] = {}
    for name in names:
        try:
            return get_executor(name, model=model, **arguments, **of_settings(name, settings)), refused
        except (ConfigError, PluginError) as error:  # noqa: PERF203 - a few names, once
            refused[name] = str(error)
    why = (
        "; ".join(f"{name}: {words}" for name, words in refused.items()) or f"installed: {', '.join(executor_names())}"
    )
    raise ConfigError(f"no executor runs a model on {kind!r} ({why}). Load it on another device, or name its executor.")
