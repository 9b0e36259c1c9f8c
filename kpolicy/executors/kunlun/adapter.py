"""`KunlunAdapter`: a Kunlun card through torch_xmlir, which answers for `torch.cuda`.

Recognised by positive proof alone: torch_xmlir imports and counts a device itself. What `torch.cuda` says of itself
there (a device called "GPU" of capability 8.6) proves nothing. Unverified on hardware.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from kpolicy.errors import ConfigError
from kpolicy.executors.base import ProbeReport, ProbeStatus
from kpolicy.executors.cuda.failures import classify
from kpolicy.executors.cuda.stream_adapter import Statics, StreamAdapter
from kpolicy.executors.faults import Fault
from kpolicy.executors.kunlun.proof import count_devices, installed, load_xmlir

__all__ = ["KunlunAdapter", "environment_problems"]

FORCE_GRAPH = "XMLIR_FORCE_USE_XPU_GRAPH"
MOCK_COMPILE = "XMLIR_ENABLE_MOCK_TORCH_COMPILE"
NO_ALLOCATOR = "XMLIR_DISABLE_CUDA_ALLOCATOR"


def environment_problems(environ: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """(what keeps graphs from working, what a reader should know) of torch_xmlir's variables, in words."""
    wrong, notes = [], []
    force = environ.get(FORCE_GRAPH)
    if force is None:
        notes.append(f"{FORCE_GRAPH} isn't set: graphs are torch's own classes over the vendor's shim; set it to 1")
    elif not re.fullmatch(r"\s*[+-]?\d+\s*", force):
        wrong.append(f"{FORCE_GRAPH}={force!r} isn't a whole number, which torch_xmlir takes it for; set it to 1")
    if environ.get(NO_ALLOCATOR, "").strip() not in ("", "0"):
        wrong.append(f"{NO_ALLOCATOR} is set: memory can't be counted, and graphs have no pool; unset it")
    if environ.get(MOCK_COMPILE, "").lower() not in ("false", "0"):
        notes.append(f"torch.compile is mocked unless {MOCK_COMPILE}=false; PIECEWISE here needs no compiler")
    return wrong, notes


class KunlunAdapter(StreamAdapter):
    """The primitives of one Kunlun card.

    Args:
        device: the device, by `torch.cuda`'s name.
        xmlir: torch_xmlir, or what stands in for it.
        library: `torch.cuda`, or what stands in for it; with one, tensors may be on any device.
        environ: the variables to judge; this process's own by default.
        check, statics, faults: as `StreamAdapter` has them.

    Raises:
        ConfigError: torch_xmlir can't be used, counts no card, or a variable keeps graphs from working.
    """

    def __init__(
        self, device: Any = "cuda", *, xmlir: Any = None, library: Any = None, environ: Mapping[str, str] | None = None,
        check: bool = False, statics: Statics | None = None, faults: Iterable[Fault | str] = (),
    ) -> None:  # fmt: skip
        self._environ = os.environ if environ is None else environ
        wrong, _ = environment_problems(self._environ)
        # Before the import, which one of them breaks.
        if wrong and (xmlir is not None or installed()):
            raise ConfigError("; ".join(wrong) + ".")
        self.xmlir = load_xmlir() if xmlir is None else xmlir
        count, self.proof = count_devices(self.xmlir)
        if not count:
            raise ConfigError(f"{self.proof} finds no Kunlun card. `kpolicy doctor` says what is there.")
        at = torch.device(device)
        if library is None and at.type != "cuda":
            raise ConfigError(f"device is {device!r}; Kunlun cards go by 'cuda' or 'cuda:N' in torch.")
        if at.type == "cuda" and at.index is None:
            at = torch.device("cuda", torch.cuda.current_device())
        super().__init__(
            "kunlun", torch.cuda if library is None else library, at,
            classify=classify, check=check, statics=statics, faults=faults,
        )  # fmt: skip

    def probe(self) -> ProbeReport:
        _, notes = environment_problems(self._environ)
        facts = {
            "torch": str(torch.__version__), "torch_xmlir": str(getattr(self.xmlir, "__version__", "unknown")),
            "proof": self.proof, FORCE_GRAPH: self._environ.get(FORCE_GRAPH, "(unset)"),
        }  # fmt: skip
        words = "; ".join([f"proven by {self.proof}", *notes, "unverified on hardware"])
        return ProbeReport("kunlun", ProbeStatus.USABLE, words, facts=facts)
