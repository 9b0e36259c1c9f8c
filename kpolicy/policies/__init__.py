"""Policies by name: kpolicy's own, replicas of what serving engines do, and those of installed plugins.

`get("vllm:runner=v2,version=0.33")` takes arguments after a colon. Our own policies are found without scanning
entry points; those are read only for a name that isn't ours, or to list all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from kpolicy.errors import ConfigError, KPolicyError, PluginError, UnknownNameError
from kpolicy.plugins import check_names, load_plugin, parameters_of, plugin_names
from kpolicy.policies.base import CompiledPolicy, Downgrade, Policy, PolicyContext

__all__ = ["CompiledPolicy", "Downgrade", "Policy", "PolicyContext", "factory_of", "get_policy", "policy_names"]

GROUP = "kpolicy.policies"

# Name -> "module:factory"; the same strings stand in pyproject.toml as entry points, as any plugin's do.
OWN: Mapping[str, str] = {
    "auto": "kpolicy.policies.auto:AutoPolicy",
    "eager": "kpolicy.policies.fixed:eager",
    "full": "kpolicy.policies.fixed:full",
    "piecewise": "kpolicy.policies.fixed:piecewise",
    "full_and_piecewise": "kpolicy.policies.fixed:full_and_piecewise",
    "split": "kpolicy.policies.fixed:split",
    "vllm": "kpolicy.policies.vllm:vllm",
    "sglang": "kpolicy.policies.sglang:SglangPolicy",
    "tensorrt_llm": "kpolicy.policies.tensorrt_llm:TensorRtLlmPolicy",
    "ascend": "kpolicy.policies.ascend:ascend",
    "kunlun": "kpolicy.policies.kunlun:KunlunPolicy",
    "nano_vllm": "kpolicy.policies.nano_vllm:NanoVllmPolicy",
}


def policy_names() -> dict[str, str]:
    """Every policy that is installed: its name and where it comes from (``kpolicy`` or a distribution)."""
    return plugin_names(GROUP, OWN)


def get_policy(spec: str | Policy, **arguments: Any) -> Policy:
    """The policy that a name stands for, with its arguments.

    Args:
        spec: a policy, or its name, with arguments after a colon: ``"vllm:runner=v2,version=0.33"``.
        arguments: more arguments of the policy's factory.

    Raises:
        UnknownNameError: nobody registered the name.
        ConfigError: the policy doesn't take an argument, or not that value.
        PluginError: a plugin raises when loaded, or isn't a policy.
    """
    if not isinstance(spec, str):
        if not isinstance(spec, Policy):
            raise ConfigError(f"{spec!r} isn't a policy: it lacks part of the Policy protocol. See docs/design.md.")
        return spec
    name, _, text = spec.partition(":")
    arguments = {**_parse_arguments(spec, text), **arguments}
    factory: Callable[..., Any] = factory_of(name)
    _check_arguments(name, factory, arguments)
    try:
        policy = factory(**arguments)
    except KPolicyError:
        raise
    except TypeError as error:
        raise ConfigError(
            f"policy {name!r} can't be made with {', '.join(arguments) or 'no arguments'}: {error}. "
            f"`kpolicy policies` lists what each takes."
        ) from None
    except Exception as error:
        if name in OWN:
            raise
        raise PluginError(
            f"policy {name!r} raised when made: {type(error).__name__}: {error}. Update or uninstall the package it "
            "comes from; `kpolicy policies` names it."
        ) from error
    if not isinstance(policy, Policy):
        raise PluginError(f"policy {name!r} made {policy!r}, which lacks part of the Policy protocol.")
    return policy


def factory_of(name: str) -> Callable[..., Any]:
    """What makes the policy of that name; its parameters are the policy's arguments.

    Raises:
        UnknownNameError: nobody registered the name.
        PluginError: a plugin raises when loaded.
    """
    if name in OWN:
        module, _, attribute = OWN[name].partition(":")
        factory: Callable[..., Any] = getattr(import_module(module), attribute)
        return factory
    loaded: Callable[..., Any] | None = load_plugin(GROUP, name, OWN)
    if loaded is None:
        raise UnknownNameError("policy", name, policy_names())
    return loaded


def _check_arguments(name: str, factory: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Refuse names it doesn't take, and values of another type than the default's.

    Text would turn a switch on, whatever it says.
    """
    if not arguments:
        return
    check_names(f"policy {name!r}", factory, arguments, "; `kpolicy policies` lists what each policy takes")
    for parameter in (parameters_of(factory) or {}).values():
        value, default = arguments.get(parameter.name, parameter.default), parameter.default
        for kind, wanted in ((bool, "true or false"), (int, "a whole number")):
            # A switch is a whole number to Python, and 1 isn't a switch.
            if type(default) is kind and type(value) is not kind:
                raise ConfigError(f"policy {name!r} has {parameter.name}={value!r}; it takes {wanted}.")


def _parse_arguments(spec: str, text: str) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if not equals or not key.isidentifier():
            raise ConfigError(f"policy {spec!r}: {part!r} isn't NAME=VALUE; for example vllm:runner=v2,version=0.33.")
        if key in arguments:
            raise ConfigError(f"policy {spec!r} gives {key} twice; give it once.")
        arguments[key] = _value(value)
    return arguments


def _value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    # "0.33" names a version; only whole numbers are numbers here.
    return int(text) if re.fullmatch(r"-?\d+", text) else text
