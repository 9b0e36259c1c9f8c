"""A second CUDA context of this process, for a moment: graphs that are there replay faster from then on.

On an H200 (driver 580.159, torch 2.11) each kernel of a replayed graph takes some 0.35 us longer once a kernel ran on a
second stream, as in the warm-ups of captures, until any process makes a context, even on another device:
DeepSeek-V2-Lite's decode step of 2,436 kernels 7.3 ms instead of 6.5. What the driver changes isn't known;
`docs/measured_gpu.md` has what was tried. Inside vLLM a context made no difference that was seen
(`docs/measured_vllm.md`). It needs device memory while it is there.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import torch

__all__ = ["second_context"]

_LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"


class _Refused(Exception):
    """What the driver didn't do."""


def second_context(index: int) -> str:
    """Make a context on a device and destroy it; the caller's own is current again afterwards.

    Args:
        index: the device's, as torch counts them.

    Returns:
        Why there was none; empty where there was.
    """
    if not torch.version.cuda:
        return "this torch isn't built with CUDA"
    try:
        driver = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        return f"{_LIBRARY} can't be loaded: {error}"
    before, made, device = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
    try:
        _ask(driver, "cuCtxGetCurrent", ctypes.byref(before))
        _ask(driver, "cuDeviceGet", ctypes.byref(device), index)
        _ask(driver, "cuCtxCreate_v2", ctypes.byref(made), 0, device)
        try:
            _ask(driver, "cuCtxDestroy_v2", made)
        finally:
            _ask(driver, "cuCtxSetCurrent", before)
    except _Refused as refused:
        return str(refused)
    return ""


def _ask(driver: Any, name: str, *arguments: Any) -> None:
    function = getattr(driver, name, None)
    if function is None:
        raise _Refused(f"this driver has no {name}")
    code = function(*arguments)
    if code:
        raise _Refused(f"{name} gave CUDA error {code}")
