"""A pretended SGLang: modules with what kpolicy hooks, and a hook registry that works as SGLang's does."""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

from kpolicy_sglang.versions import KNOWN
from tests.integrations.sglang.recorded import SIGNATURES


class Tokens(list[int]):
    """A batch's token ids as far as they are looked at: how many."""

    def numel(self) -> int:
        """As a tensor's."""
        return len(self)


class HookType(Enum):
    """SGLang's kinds of hooks."""

    AROUND = "around"


class HookRegistry:
    """Registers and applies AROUND hooks; a hook that fails is noted and nothing more, as in SGLang."""

    _hooks: dict[str, list[Any]]
    _patched: set[str]
    logged: list[str]
    fails: set[str]

    @classmethod
    def register(cls, target: str, hook: Any, kind: HookType) -> None:
        assert kind is HookType.AROUND
        cls._hooks.setdefault(target, []).append(hook)

    @classmethod
    def apply_hooks(cls) -> None:
        for target, hooks in cls._hooks.items():
            if target in cls._patched:
                continue
            if target in cls.fails:
                cls.logged.append(f"Failed to apply hooks to {target}")
                continue
            owner_path, _, name = target.rpartition(".")
            owner = pkgutil.resolve_name(owner_path)
            for hook in hooks:
                setattr(owner, name, _around(getattr(owner, name), hook))
            cls._patched.add(target)


def _around(original: Any, hook: Any) -> Any:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    wrapper.__wrapped__ = original  # type: ignore[attr-defined]
    return wrapper


def _function(name: str, arguments: str) -> Any:
    """A function of that signature that returns its arguments."""
    names: dict[str, Any] = {}
    code = f"def {name}({arguments.replace(', ', '=None, ').replace('self=None', 'self')}=None): return locals()"
    if "," not in arguments:
        code = f"def {name}({arguments}): return locals()"
    exec(code, names)  # noqa: S102  a function of a recorded signature
    return names[name]


@contextmanager
def pretended(version: str) -> Iterator[Any]:
    """SGLang of that version for as long as the context lasts; yields its hook registry."""
    known = KNOWN.get(version, KNOWN["0.5.16"])
    modules: dict[str, ModuleType] = {}

    def module(name: str) -> ModuleType:
        if name not in modules:
            modules[name] = ModuleType(name)
            modules[name].__path__ = []
            parent, _, own = name.rpartition(".")
            if parent:
                setattr(module(parent), own, modules[name])
        return modules[name]

    module("sglang").__version__ = version  # type: ignore[attr-defined]
    for hook in known.hooks:
        path, _, name = hook.target.rpartition(".")
        recorded = SIGNATURES[known.name]
        if path.rpartition(".")[2][0].isupper():
            class_path, _, of = path.rpartition(".")
            owner: Any = module(class_path)
            if not hasattr(owner, of):
                setattr(owner, of, type(of, (), {}))
            setattr(getattr(owner, of), name, _function(name, recorded[f"{of}.{name}"]))
        else:
            setattr(module(path), name, _function(name, recorded[name]))
    registry = type("HookRegistry", (HookRegistry,), {"_hooks": {}, "_patched": set(), "logged": [], "fails": set()})
    registry.apply_hooks = classmethod(HookRegistry.apply_hooks.__func__)  # type: ignore[attr-defined]
    found: Any = module("sglang.srt.plugins.hook_registry")
    found.HookRegistry, found.HookType = registry, HookType
    plan: Any = module("sglang.srt.managers.schedule_batch")
    plan.NextBatchPlan = SimpleNamespace
    before = {name: each for name, each in sys.modules.items() if name.partition(".")[0] == "sglang"}
    for name in before:
        del sys.modules[name]
    sys.modules.update(modules)
    try:
        yield registry
    finally:
        for name in modules:
            sys.modules.pop(name, None)
        sys.modules.update(before)
