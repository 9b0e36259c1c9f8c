"""Which kernels a model's attention runs on: `choose_kernels`, by device, data type and head sizes.

- ``plain``: operators of torch alone, for any device. They read lengths on the host, which on the CPU is where the
  device runs; elsewhere it is a synchronisation, so there no graph holds them and they run between pieces.
- ``triton``: kernels of ours that read lengths on the device, so a graph replays over live lengths.
- ``flash``: as ``triton``, with torch's own FlashAttention for prompt rows where the host knows their lengths
  (PIECEWISE and EAGER), over keys gathered to contiguous slots. A FULL graph of a mixed batch has the Triton kernel for
  them.
- ``flashinfer``: as ``flash``, with FlashInfer's kernels over the pages as they are, where it is installed.
- ``ascend``, ``kunlun``: the vendors' own operators.

A mixed batch gets a kernel for decode rows and one for prompt rows in every mode, whichever is chosen.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch

from kpolicy.errors import SupportError, UnknownNameError
from kpolicy.executors.kunlun.proof import installed, kunlun_behind_cuda, kunlun_cards
from kpolicy.serving.plain_kernels import Kernels, PlainKernels
from kpolicy.serving.triton_kernels import TritonKernels

__all__ = [
    "KERNELS",
    "Kernels",
    "PlainKernels",
    "TritonKernels",
    "choose_kernels",
    "kernels_chosen",
    "kernels_here",
]

LEAST_CAPABILITY = (8, 0)
"""CUDA capability from which the Triton kernels run: bf16 and asynchronous copies."""


def kernels_here(device: torch.device) -> dict[str, str]:
    """Every kind of kernels by name, with why it can't run on a device; empty text where it can."""
    why = ""
    if device.type != "cuda":
        why = f"it runs on CUDA devices, and this is {device.type}"
    elif behind := _behind_cuda(device):
        why = f"it runs on NVIDIA's devices: {behind}"
    elif find_spec("triton") is None:
        why = "triton isn't installed; it comes with CUDA builds of torch"
    elif torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        have = ".".join(map(str, torch.cuda.get_device_capability(device)))
        why = f"the device has capability {have}, and it needs {LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]}"
    npu = "" if device.type == "npu" else f"it runs on Ascend NPUs, and this is {device.type}"
    kunlun = "" if device.type == "cuda" and kunlun_cards() else "it runs on Kunlun cards"
    if not kunlun and find_spec("kunlun_ops") is None:
        kunlun = "kunlun_ops isn't installed; it comes from the vendor"
    missing = why or ("" if find_spec("flashinfer") else "flashinfer isn't installed: pip install flashinfer-python")
    return {"ascend": npu, "kunlun": kunlun, "triton": why, "flash": why, "flashinfer": missing, "plain": ""}


def _behind_cuda(device: torch.device) -> str:
    """Why a device of `torch.cuda` isn't NVIDIA's: torch_xmlir proves a Kunlun card behind it; "" where it doesn't."""
    if not installed():
        return ""
    return kunlun_behind_cuda(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))


def kernels_chosen() -> dict[str, tuple[str, dict[str, str]]]:
    """For the CPU and the accelerator here: what ``"auto"`` takes, and why each other kind can't run, "" if it can."""
    kinds = ["cpu"]
    if torch.accelerator.is_available():
        kinds.append(torch.accelerator.current_accelerator().type)
    found = {}
    for kind in kinds:
        here = kernels_here(torch.device(kind))
        chosen = next(name for name, why in here.items() if not why)
        found[kind] = chosen, {name: why for name, why in here.items() if name != chosen}
    return found


KERNELS = ("auto", "ascend", "kunlun", "triton", "flash", "flashinfer", "plain")


def choose_kernels(device: torch.device, name: str = "auto") -> Kernels:
    """Kernels for a device; ``"auto"`` takes the first that can run there.

    Raises:
        UnknownNameError: there is no kind of that name.
        SupportError: the kind can't run on the device.
    """
    if name not in KERNELS:
        raise UnknownNameError("attention kernels", name, KERNELS)
    here = kernels_here(device)
    if name == "auto":
        name = next(each for each, why in here.items() if not why)
    if here[name]:
        raise SupportError(f"attention kernels {name!r} can't run on {device}: {here[name]}. Leave them to 'auto'.")
    if name == "ascend":
        # Imported here: it needs torch_npu.
        from kpolicy.serving.ascend import AscendKernels

        return AscendKernels(device)
    if name == "kunlun":
        # Imported here: it needs kunlun_ops.
        from kpolicy.serving.kunlun import KunlunKernels

        return KunlunKernels(device)
    if name == "flashinfer":
        # Imported here: flashinfer compiles kernels and isn't there for every device.
        from kpolicy.serving.flashinfer import FlashInferKernels

        return FlashInferKernels(device)
    return PlainKernels(device) if name == "plain" else TritonKernels(device, flash=name == "flash")
