"""`probe_all`: what devices, extras and plugins are there, and in what state. `kpolicy doctor` prints it.

Libraries and outside plugins are imported in child processes only, and only where a look at the import path finds them.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, entry_points, version
from numbers import Real

import attrs

from kpolicy import executors, policies
from kpolicy._probe_devices import UNVERIFIED, Look, origin, probe_devices, probe_torch, report
from kpolicy.errors import ConfigError
from kpolicy.executors.base import ProbeReport, ProbeStatus
from kpolicy.plugins import plugin_names

__all__ = ["probe_all"]

# Module, distribution, how to get it where it isn't "pip install <distribution>", and what needs it.
_EXTRAS = (
    ("transformers", "transformers", "pip install 'kpolicy[models]'", "models"),
    ("numpy", "numpy", "", ""),
    ("flashinfer", "flashinfer-python", "", ""),
    ("structlog", "structlog", "", ""),
    ("prometheus_client", "prometheus-client", "", ""),
    ("hypothesis", "hypothesis", "", "kpolicy.testing, for those who write plugins"),
    ("polars", "polars", "", ""),
    ("matplotlib", "matplotlib", "", ""),
    ("ray", "ray", "pip install 'kpolicy[ray]'", "kpolicy sweep --backend ray"),
    (
        "aiconfigurator_core", "aiconfigurator-core", "pip install 'kpolicy[aiconfigurator]'",
        "kpolicy simulate --tables aiconfigurator",
    ),
)  # fmt: skip


def probe_all(
    *, timeout_s: float = 60.0, environ: Mapping[str, str] | None = None, kernels: bool = False
) -> tuple[ProbeReport, ...]:
    """Look at every device, extra and plugin: first devices, vendors before CUDA, then extras, then plugins.

    A library that raises, crashes, hangs or prints costs its own report and no other. Where torch and outside
    plugins aren't installed no child process is started.

    Args:
        timeout_s: seconds that any one child process may take.
        environ: the environment to look in, and that children get; this process's own by default. Modules are
            looked up on this process's `sys.path`, in the children too.
        kernels: whether to say, where torch works, which kernels attention of a loaded model takes on each device.

    Raises:
        ConfigError: `timeout_s` isn't a positive number of seconds.
    """
    if not (isinstance(timeout_s, Real) and timeout_s > 0 and math.isfinite(timeout_s)):
        raise ConfigError(f"timeout_s={timeout_s!r:.60}: a probe needs a positive, finite number of seconds, as 60.")
    look = Look(dict(os.environ if environ is None else environ), timeout_s)
    torch, torch_look = probe_torch(look, ("kernels",) if kernels else ())
    devices = tuple(probe_devices(torch, torch_look))
    found = [torch]
    if kernels and torch.status is ProbeStatus.USABLE:
        # A model is loaded in the environment as it is, whatever torch alone needed.
        found.append(_kernels(attrs.evolve(look, answered=torch_look.answered)))
    seen = {each.name.partition(" ")[2]: each.status for each in devices}
    return (*devices, *found, *_extras(), *_plugins(look, seen))


_OTHERS = "it runs on "
"""How it is said of kernels that they are another kind of device's"""


def _kernels(look: Look) -> ProbeReport:
    """Which kernels attention of a loaded model takes on each device here, and why not others."""
    answer = look.ask("kernels")
    if answer.error is not None:
        return report("attention kernels", ProbeStatus.BROKEN, answer.error)
    lines = []
    for device, others in answer.facts.items():
        if device.endswith("_others"):
            kind = device.removesuffix("_others")
            usable = [name for name, why in others.items() if why == "can run too"]
            pages = answer.facts.get("flash_pages", "")
            usable = [f"{name}, which {pages}" if name == "flash" and pages else name for name in usable]
            # Those of other kinds of devices go without saying.
            lacking = {
                name: why for name, why in others.items() if why != "can run too" and not why.startswith(_OTHERS)
            }
            said = [f"also {', '.join(usable)}"] if usable else []
            said += [
                f"not {', '.join(name for name in lacking if lacking[name] == why)}: {why}"
                for why in dict.fromkeys(lacking.values())
            ]
            lines.append(f"{kind}: {answer.facts[kind]}" + (f" ({'; '.join(said)})" if said else ""))
    return report(
        "attention kernels", ProbeStatus.USABLE, "; ".join(lines), facts={"kernels": json.dumps(answer.facts)}
    )


# Extras


def _extras() -> Iterator[ProbeReport]:
    for module, distribution, step, purpose in _EXTRAS:
        where, found = origin(module), _version(distribution)
        name, step = f"extra {distribution}", step or f"pip install {distribution}"
        purpose = f"for {purpose}" if purpose else "optional"
        facts = {"version": found, "location": where}
        if where is not None:
            words = f"{found or 'unknown version'}, found and not imported"
            yield report(name, ProbeStatus.USABLE, words, purpose, facts=facts)
        elif found is not None:
            why = f"{distribution} {found} is listed as installed, and there is no module {module}"
            yield report(name, ProbeStatus.BROKEN, why, f"reinstall it: {step}", facts=facts)
        else:
            yield report(name, ProbeStatus.ABSENT, "not installed", f"{purpose}: {step}")


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


# Plugins


def _plugins(look: Look, devices: Mapping[str, ProbeStatus]) -> Iterator[ProbeReport]:
    """Policies and executors, ours first; `devices` are those that were looked at, by what an executor is called."""
    for kind, group, own in (
        ("policy", policies.GROUP, policies.OWN),
        ("executor", executors.GROUP, executors.OWN),
    ):
        for name, target in own.items():
            yield _own(f"{kind} {name}", target, devices if kind == "executor" else {})
        try:
            yield from _shadowed(kind, group, own)
            others = {name: source for name, source in plugin_names(group, own).items() if name not in own}
        except Exception as error:  # noqa: BLE001 - whatever other packages' metadata makes of the scan
            why = f"the entry points of {group} can't be read: {type(error).__name__}: {error}"
            yield report(f"{kind} plugins", ProbeStatus.BROKEN, why, "reinstall the package last installed")
            continue
        for name, source in others.items():
            yield _outside(f"{kind} {name}", group, name, source, look)


def _own(name: str, target: str, devices: Mapping[str, ProbeStatus]) -> ProbeReport:
    module, _, attribute = target.partition(":")
    facts = {"origin": "kpolicy", "target": target}
    if module in executors.NEED_TORCH:
        # Importing it would import torch, which the doctor leaves to child processes.
        if origin("torch") is None:
            return report(name, ProbeStatus.ABSENT, "needs torch", "pip install 'kpolicy[models]'", facts=facts)
        device = name.partition(" ")[2]
        caveat = UNVERIFIED if device in executors.UNVERIFIED else ""
        status = devices.get(device)
        if status is None:
            why = "kpolicy's own; needs torch, see extra torch; the device that it finds there isn't looked at"
            return report(name, ProbeStatus.USABLE, why, caveat, facts=facts)
        if status is not ProbeStatus.USABLE:
            why = f"kpolicy's own; its device is {status}, see device {device}"
            return report(name, status, why, caveat, facts=facts)
        return report(name, ProbeStatus.USABLE, "kpolicy's own; needs torch, see extra torch", caveat, facts=facts)
    try:
        getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        return report(name, ProbeStatus.BROKEN, f"{type(error).__name__}: {error}", "reinstall kpolicy", facts=facts)
    return report(name, ProbeStatus.USABLE, "kpolicy's own", facts=facts)


def _outside(title: str, group: str, name: str, source: str, look: Look) -> ProbeReport:
    answer = look.ask("plugin", f"{group}:{name}")
    facts = {**answer.facts, "origin": source}
    if answer.error is None:
        return report(title, ProbeStatus.USABLE, f"from {source}", "loads; not called here", facts=facts)
    blame = "" if source in answer.error else f"from {source}"
    step = "" if "uninstall" in answer.error else f"update or uninstall {source}"
    return report(title, ProbeStatus.BROKEN, blame, answer.error.rstrip("."), step, facts=facts)


def _shadowed(kind: str, group: str, own: Mapping[str, str]) -> Iterator[ProbeReport]:
    """Names of ours that another package registers: ours are looked up first, so those are never used."""
    for point in entry_points(group=group):
        if point.name in own and point.value != own[point.name]:
            source = point.dist.name if point.dist is not None else "unknown distribution"
            why = f"{source} registers {point.name!r} ({point.value}), which is kpolicy's own name and wins"
            facts = {"origin": source, "target": point.value}
            step = f"ask the authors of {source} for another name"
            yield report(f"{kind} {point.name} of {source}", ProbeStatus.MASKED, why, step, facts=facts)
