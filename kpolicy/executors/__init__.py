"""Executors by name: ours and those of installed plugins. Device adapters import their libraries inside."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from kpolicy.errors import ConfigError, KPolicyError, PluginError, UnknownNameError
from kpolicy.executors.base import CaptureReport, Executor, ProbeReport, ProbeStatus, StepInputs, StepOutputs
from kpolicy.executors.importing import import_torch
from kpolicy.plugins import check_names, load_plugin, parameters_of, plugin_names
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
        ConfigError: the executor doesn't take an argument, lacks one, or can't be had with these.
        PluginError: a plugin raises when loaded or when it makes its executor, or isn't one.
    """
    if not isinstance(name, str):
        if not isinstance(name, Executor):
            raise ConfigError(
                f"{name!r} isn't an executor: it lacks part of the Executor protocol. See docs/design.md."
            )
        return name
    return _made(name, _factory(name), arguments)


def _factory(name: str) -> Callable[..., Any]:
    """What makes the executor of that name.

    Raises:
        UnknownNameError: nobody registered the name.
        ConfigError: torch isn't installed and it needs it.
        PluginError: a plugin raises when loaded, or makes nothing.
    """
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
    if not callable(factory):
        raise PluginError(f"executor {name!r} is {factory!r}, which makes nothing; it must be a class or a function.")
    return factory


def _made(name: str, factory: Callable[..., Any], arguments: Mapping[str, Any]) -> Executor:
    """The executor.

    Raises:
        ConfigError: it doesn't take an argument, lacks one, or can't be had with these.
        PluginError: a plugin raises anything else, or makes something else.
    """
    check_names(f"executor {name!r}", factory, arguments)
    missing = _missing(factory, arguments)
    if missing:
        of_model = f" An Engine makes one of its model: Engine(model=kpolicy.load(...), device={name!r})."
        raise ConfigError(f"executor {name!r} needs {', '.join(missing)}.{of_model if 'model' in missing else ''}")
    try:
        executor = factory(**arguments)
    except Exception as error:
        if name in OWN or isinstance(error, KPolicyError):
            raise
        raise PluginError(
            f"executor {name!r} raised when made: {type(error).__name__}: {error}. `kpolicy doctor` names the package "
            "it comes from."
        ) from error
    if not isinstance(executor, Executor):
        raise PluginError(f"executor {name!r} made {executor!r}, which lacks part of the Executor protocol.")
    return executor


def _missing(factory: Callable[..., Any], arguments: Mapping[str, Any]) -> list[str]:
    """Arguments that a factory needs and wasn't given."""
    return [
        parameter.name
        for parameter in (parameters_of(factory) or {}).values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and parameter.name not in arguments
    ]


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
        PluginError: a plugin raised when it made its executor: who installed it means it to run here.
    """
    kind = str(getattr(model, "device", None) or "cpu").partition(":")[0]
    own = OF_TENSORS.get(kind, ("accelerator",))
    names = [*([kind] if kind not in OWN and kind in executor_names() else []), *own]
    refused: dict[str, str] = {}
    for name in names:
        try:
            factory = _factory(name)
        except (ConfigError, PluginError) as error:
            refused[name] = str(error)
            continue
        try:
            return _made(name, factory, {"model": model, **arguments, **of_settings(name, settings)}), refused
        except ConfigError as error:
            refused[name] = str(error)
    why = (
        "; ".join(f"{name}: {words}" for name, words in refused.items()) or f"installed: {', '.join(executor_names())}"
    )
    raise ConfigError(f"no executor runs a model on {kind!r} ({why}). Load it on another device, or name its executor.")
