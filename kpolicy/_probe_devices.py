"""Probes of torch and of the devices it reaches. Vendors come before CUDA, and are recognised by positive proof.

Kunlun's torch_xmlir answers for `torch.cuda` as a device of capability 8.6, so the CUDA probe alone would take one for
an NVIDIA GPU. And a broken vendor backend breaks plain `import torch`, which imports every one that is installed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any

import attrs

from kpolicy import executors
from kpolicy._probe_child import Answer, ask, ask_in_turn
from kpolicy.budget_models import AscendStack
from kpolicy.executors.base import ProbeReport, ProbeStatus

__all__ = ["Look", "origin", "probe_devices", "probe_torch", "report"]

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
"""With anything but 0, `import torch` imports every installed vendor backend, and fails if one of them does."""

LEAST_TORCH = (2, 6)
RUN_TORCH = ((2, 11), (2, 13))
"""What everything was run with: on a GPU, and on a CPU. Other versions are told by what they have."""
UNVERIFIED = "unverified on hardware"
NO_TORCH = "torch isn't installed: pip install 'kpolicy[torch]'"


@attrs.frozen
class _Device:
    """A kind of device that torch reaches.

    Args:
        name: the executor's name, and the probe's in `_probe_child`.
        package: what must be importable besides torch; none for what torch itself is built for.
        hiding: variables that hide devices from a process.
        missing, broken, none: the next step where the package isn't there, fails, or finds no device.
        verified: whether this probe ever ran where there is one.
        variables: variables whose values are facts.
    """

    name: str
    package: str | None
    hiding: tuple[str, ...]
    missing: str
    broken: str
    none: str
    verified: bool = False
    variables: tuple[str, ...] = ()


# Variables, error texts and versions of Ascend: torch_npu 2.13.0 tried without a device. Of Kunlun: the documents and
# public code around torch_xmlir (torch 2.5.1). docs/doctor.md says what was run.
_ASCEND = _Device(
    "ascend", "torch_npu", ("ASCEND_RT_VISIBLE_DEVICES",),
    missing="on an Ascend NPU, install the torch_npu made for this torch",
    broken="install CANN and source its set_env.sh, or uninstall torch_npu",
    none="npu-smi info shows what the driver sees",
    variables=("ASCEND_HOME_PATH", "ASCEND_LAUNCH_BLOCKING", "HCCL_OP_EXPANSION_MODE"),
)  # fmt: skip
_KUNLUN = _Device(
    "kunlun", "torch_xmlir", ("XPU_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    missing="on a Kunlun card, install the vendor's xpytorch over the torch it is made for",
    broken="reinstall the vendor's xpytorch over the torch it is made for",
    none="xpu-smi shows what the driver sees",
    variables=("XMLIR_FORCE_USE_XPU_GRAPH", "XMLIR_ENABLE_MOCK_TORCH_COMPILE", "XMLIR_DISABLE_CUDA_ALLOCATOR"),
)  # fmt: skip
_XPU = _Device(
    "xpu", None, ("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR"),
    missing="on an Intel GPU, install an XPU build of torch",
    broken="check the Intel GPU driver and the Level Zero loader",
    none="sycl-ls shows what the driver sees",
)  # fmt: skip
_CUDA = _Device(
    "cuda", None, ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    missing="on an NVIDIA or AMD GPU, install a CUDA or ROCm build of torch",
    broken="check that the driver, this torch build and the GPU go together",
    none="nvidia-smi or rocm-smi shows what the driver sees",
    verified=True,
)  # fmt: skip

# What Ascend says where streams have run out; see kpolicy/executors/ascend/failures.py.
_NO_ROOM = re.compile(
    r"alloc sq cq fail|insufficient_stream|(stream|event|notify)[a-z ]* resources are insufficient|20700[5789]|el0009",
    re.IGNORECASE,
)

# What torch says where there is simply no device; any other failure means one that doesn't work.
_NO_DEVICE = re.compile(r"found no nvidia driver|no (cuda|hip|xpu) (gpus|devices) are available", re.IGNORECASE)


@attrs.frozen
class Look:
    """The environment and time limit of a round of probes, and what is known of it already."""

    environ: Mapping[str, str]
    timeout_s: float
    answered: Mapping[str, Answer] = attrs.field(factory=dict)

    def ask(self, what: str, argument: str = "") -> Answer:
        if not argument and what in self.answered:
            return self.answered[what]
        return ask(what, argument, environ=self.environ, timeout_s=self.timeout_s)

    def having_asked(self, whats: Sequence[str]) -> Look:
        """The look with what one child says of all these; what it doesn't say is asked alone."""
        return attrs.evolve(self, answered=ask_in_turn(whats, environ=self.environ, timeout_s=self.timeout_s))

    def without(self, names: tuple[str, ...]) -> Look:
        return Look({name: self.environ[name] for name in self.environ if name not in names}, self.timeout_s)

    def with_autoload_off(self) -> Look:
        return Look({**self.environ, AUTOLOAD: "0"}, self.timeout_s)


def report(name: str, status: ProbeStatus, *parts: str, facts: Mapping[str, Any] | None = None) -> ProbeReport:
    return ProbeReport(name, status, "; ".join(part for part in parts if part), facts or {})


# torch


def probe_torch(look: Look, then: Sequence[str] = ()) -> tuple[ProbeReport, Look]:
    """The report on torch, and the look under which it imports: without vendor autoload, where that breaks it.

    Where no vendor is installed, the child that imports torch is asked of `then` too, and at last of torch's own
    devices, which fail most often.
    """
    name = "extra torch"
    if origin("torch") is None:
        return report(name, ProbeStatus.ABSENT, NO_TORCH), look
    if not _vendors():
        look = look.having_asked(("torch", *then, _XPU.name, _CUDA.name))
    answer = look.ask("torch")
    if answer.error is None:
        return report(name, ProbeStatus.USABLE, _torch_words(answer), facts=answer.facts), look
    if look.environ.get(AUTOLOAD) != "0" and _may_autoload(answer.error):
        bare = look.with_autoload_off()
        again = bare.ask("torch")
        if again.error is None:
            why = f"imports only with {AUTOLOAD}=0, else {answer.error}"
            step = f"set {AUTOLOAD}=0, or repair or uninstall the vendor backend"
            facts = {**again.facts, "autoload_error": answer.error}
            return report(name, ProbeStatus.USABLE, _torch_words(again), why, step, facts=facts), bare
    return report(name, ProbeStatus.BROKEN, answer.error, "reinstall torch", facts=answer.facts), look


def _may_autoload(error: str) -> bool:
    """Whether a vendor's backend may be what broke `import torch`."""
    return "backend extension" in error or _vendors()


def _vendors() -> bool:
    """Whether a vendor's package is there, which may change what `import torch` is."""
    if any(origin(device.package) for device in (_ASCEND, _KUNLUN) if device.package):
        return True
    return any(True for _ in entry_points(group="torch.backends"))


def _torch_words(answer: Answer) -> str:
    found = str(answer.facts["version"])
    numbers = re.match(r"(\d+)\.(\d+)", found)
    version = (int(numbers[1]), int(numbers[2])) if numbers else None
    if version is not None and version < LEAST_TORCH:
        return f"torch {found} is older than {LEAST_TORCH[0]}.{LEAST_TORCH[1]}, untested"
    if version not in RUN_TORCH:
        return f"torch {found}, untested: kpolicy was run with 2.11 on a GPU and with 2.13 on a CPU"
    return f"torch {found}"


# Devices


def probe_devices(torch: ProbeReport, look: Look) -> Iterator[ProbeReport]:
    """A report for each device, vendors before CUDA, then the CPU and the simulated device.

    Args:
        torch: the report on torch.
        look: under which torch imports, if it does.
    """
    ascend = _device(_ASCEND, torch, look.with_autoload_off())
    kunlun = _device(_KUNLUN, torch, look.with_autoload_off())
    yield from _both(ascend, kunlun)
    yield _device(_XPU, torch, look)
    yield _masquerade(kunlun) if _proven(kunlun) else _doubted(_device(_CUDA, torch, look), kunlun)
    yield _cpu(torch)
    yield report("device simulated", ProbeStatus.USABLE, "always there: integers instead of a device")


def _both(ascend: ProbeReport, kunlun: ProbeReport) -> tuple[ProbeReport, ProbeReport]:
    """The two vendors' reports; each names the other where both have devices."""
    if ascend.status is not ProbeStatus.USABLE or kunlun.status is not ProbeStatus.USABLE:
        return ascend, kunlun
    step = "load a model on 'npu' for the one and on 'cuda' for the other, or name Engine(device=...)"
    return tuple(  # type: ignore[return-value]
        attrs.evolve(own, reason=_before_caveat(own.reason, f"{other} devices are here too: {step}"))
        for own, other in ((ascend, "Kunlun"), (kunlun, "Ascend"))
    )


def _before_caveat(reason: str, words: str) -> str:
    head, mark, tail = reason.rpartition(f"; {UNVERIFIED}")
    return f"{head}; {words}{mark}{tail}" if mark else f"{reason}; {words}"


def _device(device: _Device, torch: ProbeReport, look: Look) -> ProbeReport:
    name = f"device {device.name}"
    caveat = "" if device.verified else UNVERIFIED
    absent = _without_child(device, torch)
    if absent is not None:
        return report(name, absent[0], *absent[1:], caveat)
    answer = look.ask(device.name)
    facts = {**_build(device, torch), **answer.facts, **_set_variables(device, look.environ)}
    if answer.error is None and facts["devices"]:
        words = f"{facts['devices']} x {', '.join(facts['names'])}; an operator ran on the first"
        notes = (*_notes(device, look.environ, facts), _executor_note(device.name))
        return report(name, ProbeStatus.USABLE, words, *notes, caveat, facts=facts)
    if facts.get("devices") == 0:
        hidden = _hidden(device, look)
        if hidden:
            facts["hidden_devices"] = hidden[0]
            return report(name, ProbeStatus.MASKED, *hidden[1:], caveat, facts=facts)
    if answer.error is None or (facts.get("devices") == 0 and _NO_DEVICE.search(answer.error)):
        why = answer.error or f"{device.package or f'torch.{device.name}'} imports and finds no device"
        return report(name, ProbeStatus.ABSENT, why, device.none, caveat, facts=facts)
    # A variable that torch_xmlir can't read breaks its import, and no new installation helps.
    step = (_bad_force(look.environ) if device is _KUNLUN else "") or device.broken
    return report(name, ProbeStatus.BROKEN, answer.error, step, caveat, facts=facts)


def _without_child(device: _Device, torch: ProbeReport) -> tuple[ProbeStatus, str, str] | None:
    """Status, reason and next step where they can be had without starting a process."""
    there = device.package is None or origin(device.package) is not None
    if torch.status is ProbeStatus.ABSENT:
        found = f"{device.package} is there, but " if device.package and there else ""
        return ProbeStatus.ABSENT, f"{found}{NO_TORCH}", ""
    if not there:
        return ProbeStatus.ABSENT, f"{device.package} isn't installed", device.missing
    if torch.status is ProbeStatus.BROKEN:
        return ProbeStatus.BROKEN, "torch doesn't import", "see extra torch"
    if device.package is None and not _build(device, torch):
        return ProbeStatus.ABSENT, f"torch {torch.facts['version']} isn't built for {device.name}", device.missing
    return None


def _build(device: _Device, torch: ProbeReport) -> dict[str, Any]:
    """What this torch is built for, as far as it concerns the device; empty where it isn't built for it."""
    facts = torch.facts
    if device is _CUDA:
        if facts.get("hip_build"):
            return {"platform": f"ROCm/HIP {facts['hip_build']}"}
        return {"platform": f"CUDA {facts['cuda_build']}"} if facts.get("cuda_build") else {}
    if device is _XPU:
        return {"platform": f"XPU {facts['xpu_build']}"} if facts.get("xpu_build") else {}
    return {"torch": facts.get("version"), "accelerator_graph": facts.get("accelerator_graph")}


def _set_variables(device: _Device, environ: Mapping[str, str]) -> dict[str, str]:
    """Values of the variables that matter to the device; those it should have been told of say so when unset."""
    told = {name: environ.get(name, "(unset)") for name in device.variables}
    return told | {name: environ[name] for name in device.hiding if name in environ}


def _hidden(device: _Device, look: Look) -> tuple[int, str, str] | None:
    """How many devices there are without the variables that hide them, and why and what next; None without any."""
    names = tuple(name for name in device.hiding if name in look.environ)
    if not names:
        return None
    devices = look.without(names).ask(device.name, "count").facts.get("devices", 0)
    if not devices:
        return None
    values = " and ".join(f"{name}={look.environ[name]!r}" for name in names)
    return devices, f"{devices} hidden by {values}", f"unset {' or '.join(names)}, or name a device in it"


def _notes(device: _Device, environ: Mapping[str, str], facts: Mapping[str, Any]) -> Iterator[str]:
    if not facts.get("graphs", True):
        least = " (torch 2.11 has it)" if device is _XPU else ""
        yield f"this build has no graph class{least}, so only EAGER can run"
    if device is _ASCEND:
        yield from _ascend_notes(environ, facts)
    error = facts.get("graph_error")
    if error:
        taken = _NO_ROOM.search(str(error))
        hint = (
            ": other processes may hold the device's streams; graphs are captured as far as they fit" if taken else ""
        )
        yield f"no graph can be captured now ({error}){hint}"
    if device is _KUNLUN:
        yield from _kunlun_notes(environ)


def _ascend_notes(environ: Mapping[str, str], facts: Mapping[str, Any]) -> Iterator[str]:
    if environ.get("ASCEND_LAUNCH_BLOCKING") == "1":
        yield "ASCEND_LAUNCH_BLOCKING=1 rules graphs out; unset it"
    driver, cann = (re.match(r"\d+(?:\.\w+)*", str(facts.get(name, ""))) for name in ("driver", "cann"))
    if driver and cann and not AscendStack(soc="A3", hdk=driver[0], cann=cann[0]).lifted:
        yield (
            f"driver {driver[0]} and CANN {cann[0]} hold graphs to about 1,800 streams; driver 25.5.1 with CANN 8.5.0 "
            "lift that on A3 and 950"
        )


def _kunlun_notes(environ: Mapping[str, str]) -> Iterator[str]:
    if environ.get("XMLIR_ENABLE_MOCK_TORCH_COMPILE", "").lower() not in ("false", "0"):
        yield (
            "torch.compile is mocked by default, so PIECEWISE through torch.compile would silently be eager; "
            "set XMLIR_ENABLE_MOCK_TORCH_COMPILE=false"
        )
    yield _bad_force(environ)
    if environ.get("XMLIR_DISABLE_CUDA_ALLOCATOR", "").strip() not in ("", "0"):
        yield "XMLIR_DISABLE_CUDA_ALLOCATOR keeps memory of graphs from being counted; unset it"


def _bad_force(environ: Mapping[str, str]) -> str:
    force = environ.get("XMLIR_FORCE_USE_XPU_GRAPH")
    if force is None or re.fullmatch(r"\s*[+-]?\d+\s*", force):
        return ""
    return f"XMLIR_FORCE_USE_XPU_GRAPH={force!r} isn't a whole number, which torch_xmlir takes it for; set it to 1"


def _proven(kunlun: ProbeReport) -> bool:
    """Whether torch_xmlir itself counted a device, hidden or not, whatever came after."""
    return bool(kunlun.facts.get("devices") or kunlun.facts.get("hidden_devices"))


def _masquerade(kunlun: ProbeReport) -> ProbeReport:
    facts = {key: kunlun.facts[key] for key in ("proof", "names", "capability") if key in kunlun.facts}
    claims = f"as {', '.join(facts['names'])} {facts.get('capability', '')}".rstrip() if "names" in facts else ""
    why = f"torch.cuda is torch_xmlir's here, which answers for Kunlun devices {claims}".rstrip()
    return report("device cuda", ProbeStatus.MASKED, why, "use the kunlun device", facts=facts)


def _doubted(cuda: ProbeReport, kunlun: ProbeReport) -> ProbeReport:
    if cuda.status is not ProbeStatus.USABLE or kunlun.status is not ProbeStatus.BROKEN:
        return cuda
    doubt = "torch_xmlir is installed and broken, so on a Kunlun machine this may be Kunlun's; see device kunlun"
    return attrs.evolve(cuda, reason=f"{cuda.reason}; {doubt}")


def _cpu(torch: ProbeReport) -> ProbeReport:
    if torch.status is not ProbeStatus.USABLE:
        why = NO_TORCH if torch.status is ProbeStatus.ABSENT else "torch doesn't import; see extra torch"
        return report("device cpu", torch.status, why)
    autoload = f"with {AUTOLOAD}=0" if "autoload_error" in torch.facts else ""
    words = f"torch {torch.facts['version']} imports {autoload}".rstrip()
    return report("device cpu", ProbeStatus.USABLE, words, _executor_note("cpu"), facts={"cores": os.cpu_count()})


def _executor_note(name: str) -> str:
    try:
        there = name in executors.executor_names()
    except Exception:  # noqa: BLE001 - unreadable metadata of another package; the plugin section reports it
        there = name in executors.OWN
    return "" if there else f"no {name} executor is installed yet"


def origin(module: str) -> str | None:
    """Where a top-level module would be imported from; None without one, or with a mere folder of that name."""
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):  # ValueError: a module put into sys.modules by hand, without a spec
        return None
    return None if spec is None else spec.origin
