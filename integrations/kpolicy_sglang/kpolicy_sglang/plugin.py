"""What SGLang loads: it registers the hooks of the version at hand, and has them looked at once they are applied."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import pkgutil
from collections.abc import Iterable, Mapping
from typing import Any

from kpolicy.errors import KPolicyError
from kpolicy_sglang import hooks
from kpolicy_sglang.bound import calls
from kpolicy_sglang.config import Config

__all__ = ["not_taken", "register"]

logger = logging.getLogger(__name__)


def register(environ: Mapping[str, str] = os.environ) -> None:
    """Register kpolicy's hooks with SGLang. Nothing happens where kpolicy is off.

    Raises:
        SystemExit: in strict mode, where kpolicy can't be what was asked for.
    """
    try:
        config = Config.from_env(environ)
    except KPolicyError as error:
        if Config.strict_in(environ):
            raise SystemExit(f"kpolicy: {error}") from None
        logger.error("kpolicy: %s SGLang runs as without kpolicy.", error)
        return
    if config is None:
        return
    for name, meant in Config.misspelt(environ):
        logger.warning("kpolicy: %s isn't a setting and changes nothing; %s is", name, meant)
    import sglang
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from kpolicy_sglang.versions import KNOWN, known

    hooks.configure(config, sglang.__version__)
    version = known(sglang.__version__)
    if version is None:
        hooks.fail(
            f"SGLang is {sglang.__version__}; kpolicy-sglang knows {', '.join(KNOWN)} and hooks no other. Install one "
            "of these, or unset KPOLICY_SGLANG. SGLang runs as without kpolicy."
        )
        hooks.configure(None)
        return
    # Said before the model is loaded. Hooks are registered all the same: ranks fall back together, see `Ranks`.
    for problem in _unusable(config):
        hooks.fail(problem)
    taken = _taken_before(version.hooks, HookRegistry)
    if taken:
        hooks.fail(f"{'; '.join(taken)}. SGLang runs as without kpolicy.")
        hooks.configure(None)
        return
    for hook in version.hooks:
        HookRegistry.register(hook.target, hook.around, HookType.AROUND)
    _check_after_applying(HookRegistry, version.hooks)


def _unusable(config: Config) -> list[str]:
    """What is wrong with the files that the settings name, which are opened once SGLang has its model."""
    from kpolicy.schemas import read_plan, read_profile

    found = []
    for path, read, instead in (
        (config.plan, read_plan, "SGLang's own sizes are captured."),
        (config.profile, read_profile, "SGLang's own rule decides."),
    ):
        try:
            if path is not None:
                read(path)
        except (KPolicyError, OSError) as error:  # noqa: PERF203
            found.append(f"{error} Without it {instead}")
    if config.decision_log is not None:
        folder = os.path.dirname(os.path.abspath(config.decision_log))
        if os.path.isdir(config.decision_log) or not os.path.isdir(folder) or not os.access(folder, os.W_OK):
            found.append(
                f"KPOLICY_DECISION_LOG is {config.decision_log!r}; it is a file in a folder that is there and can be "
                "written to. Without it there is no log."
            )
    return found


def _taken_before(wanted: Iterable[Any], registry: Any) -> list[str]:
    """Targets that can't be hooked: not there, of another signature, or someone else's by now."""
    found = []
    for hook in wanted:
        try:
            target = _resolve(hook.target)
        # The target's module is SGLang's own; whatever its import raises, the hook can't be had.
        except Exception as error:  # noqa: BLE001
            found.append(f"{hook.target} isn't there ({type(error).__name__}: {error})")
            continue
        if _others(hook, registry) or not _is_sglangs(target):
            found.append(f"{hook.target} is already patched by someone else; one of the two has to go")
            continue
        missing = [name for name in hook.takes if name not in inspect.signature(target).parameters]
        if missing:
            found.append(f"{hook.target} takes no {', '.join(missing)}: it isn't what this version of kpolicy hooks")
    return found


def _others(hook: Any, registry: Any) -> bool:
    """Whether someone else has hooks on a target, or on the class that it is of, applied or only registered."""
    owner = hook.target.rpartition(".")[0]
    registered = getattr(registry, "_hooks", {})
    entries = [*registered.get(hook.target, ()), *registered.get(owner, ())]
    own = [entry for entry in entries if hook.around in (entry if isinstance(entry, tuple) else (entry,))]
    return len(own) < len(entries) or (hook.target in registry._patched and not own)


def _is_sglangs(target: Any) -> bool:
    """Whether a function and all that it wraps are of SGLang's own files; its hook registry's wrappers aren't."""
    import sglang

    home = getattr(sglang, "__file__", None)
    folder = os.path.join(os.path.dirname(os.path.realpath(home)), "") if home else ""
    while target is not None:
        code = getattr(target, "__code__", None)
        file = os.path.realpath(code.co_filename) if code is not None else folder
        # What Python itself wraps a context manager in.
        if file == os.path.realpath(contextlib.__file__) and hasattr(target, "__wrapped__"):
            file = folder
        if not file.startswith(folder) or "hook_registry" in file:
            return False
        target = getattr(target, "__wrapped__", None)
    return True


def _resolve(target: str) -> Any:
    owner, _, name = target.rpartition(".")
    return getattr(pkgutil.resolve_name(owner), name)


def not_taken(wanted: Iterable[Any], registry: Any) -> list[str]:
    """Targets that don't call our hooks after the registry applied them."""
    found = []
    for hook in wanted:
        try:
            target: Any = _resolve(hook.target)
        except Exception:  # noqa: BLE001  as above
            found.append(hook.target)
            continue
        if hook.target not in registry._patched or not _calls(target, hook.around):
            found.append(hook.target)
    return found


def _calls(target: Any, around: Any) -> bool:
    """Whether a chain of wrappers has our hook in it."""
    while target is not None:
        if calls(target, around):
            return True
        target = getattr(target, "__wrapped__", None)
    return False


def _check_after_applying(registry: Any, wanted: Iterable[Any]) -> None:
    """Look at the hooks as soon as SGLang has applied them: it logs one that fails, and goes on without it."""
    apply = registry.__dict__["apply_hooks"]

    def apply_hooks(cls: Any) -> None:
        cls.apply_hooks = apply
        cls.apply_hooks()
        others = [hook.target for hook in wanted if _others(hook, cls)]
        if others:
            hooks.fail(
                f"{', '.join(others)} is hooked by another plugin too; one of the two has to go. SGLang runs as "
                "without kpolicy."
            )
            hooks.configure(None)
            return
        missing = not_taken(wanted, cls)
        if missing:
            hooks.fail(f"SGLang didn't apply the hooks on {', '.join(missing)}; its own rules stay.")
            hooks.configure(None)

    registry.apply_hooks = classmethod(apply_hooks)
