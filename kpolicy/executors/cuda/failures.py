"""What errors of CUDA, and of devices behind torch's own names, mean: which cost a capture and why, which the device.

Codes are those of ``cudaError_t`` (CUDA runtime API, "Error handling"). torch gives the code since 2.8
(`torch.AcceleratorError.error_code`); before, only its words.
"""

from __future__ import annotations

import re

import torch

from kpolicy.executors.device import Failure, known
from kpolicy.reasons import Reason

__all__ = ["classify", "classify_by_words", "error_code", "known_to_torch"]

OUT_OF_MEMORY = 2
STICKY = frozenset({46, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 999})
"""After these every call fails until the process ends: an illegal address, an assertion, a launch that failed or timed
out, ECC and link errors, a device that is unavailable or whose context is gone."""
ILLEGAL = frozenset({900, 901, 902, 903, 904, 905, 907})
"""A synchronisation or allocation while a stream is captured, work of streams that the capture doesn't hold, and what
follows of these."""
FORBIDDEN = frozenset({401, 906, 908})
"""The stream is in another state than a capture needs, another thread captures, or the legacy stream would wait for a
capture."""
MISSING = frozenset({35, 36, 98, 200, 209, 218, 221, 222, 223, 302, 303, 500})
"""A driver that is too old, no kernel for this device, no compiler for PTX, a library or a symbol that isn't there."""

WORDS = {
    46: ("all cuda-capable devices are busy", "cuda-capable device(s) is/are busy"), 214: ("uncorrectable ecc",),
    220: ("uncorrectable nvlink",), 226: ("invalid access of peer gpu memory",), 700: ("an illegal memory access",),
    702: ("launch timed out",), 709: ("context is destroyed",), 710: ("device-side assert triggered",),
    714: ("hardware stack error",), 715: ("illegal instruction",), 716: ("misaligned address",),
    717: ("not supported on global/shared address space",), 718: ("invalid program counter",),
    719: ("unspecified launch failure",), 721: ("tensor memory not completely freed",),
    999: ("error: unknown error", "[cuda]: unknown error"),
    900: ("operation not permitted when stream is capturing",),
    901: ("operation failed due to a previous error during capture",), 902: ("would result in a merge of",),
    903: ("capture was not ended in the same stream",), 904: ("unjoined work",),
    905: ("dependency created on uncaptured work",), 907: ("last recorded in a capturing stream",),
    401: ("cannot be performed in the present state",), 906: ("operation would make the legacy stream depend",),
    908: ("thread-local capture sequence from another thread",),
    35: ("driver version is insufficient",), 36: ("not supported in the installed cuda driver",),
    98: ("invalid device function",), 200: ("device kernel image is invalid",),
    209: ("no kernel image is available",), 218: ("ptx jit compilation failed",),
    221: ("ptx jit compiler library not found",), 222: ("unsupported toolchain",),
    223: ("ptx jit compilation was disabled",), 302: ("shared object symbol not found",),
    303: ("shared object initialization failed",), 500: ("named symbol not found",), OUT_OF_MEMORY: ("out of memory",),
}  # fmt: skip
"""By code, what torch before 2.8 and Triton say of it: the words of `cudaGetErrorString`, without what varies"""
_OF_TORCH = (
    ("must be captured on a non-default stream", Reason.CAPTURE_FORBIDDEN),
    ("during cuda graph capture", Reason.CAPTURE_ILLEGAL), ("during graph capture", Reason.CAPTURE_ILLEGAL),
    ("cannot open shared object file", Reason.BACKEND_MISSING),
    ("_status_alloc_failed", Reason.CAPTURE_OUT_OF_MEMORY),
    ("_device_allocation_failed", Reason.CAPTURE_OUT_OF_MEMORY),
    ("_status_arch_mismatch", Reason.BACKEND_MISSING),
)  # fmt: skip
"""What torch, the loader of libraries, cuBLAS and cuDNN refuse themselves: CUDA has no code for it"""
_LOST = ("device_lost", "device lost", "ur_result_error_device_lost")
_CODE = re.compile(r"cuda error(?: code)?[:=]? *(\d+)\b", re.IGNORECASE)


def error_code(error: BaseException) -> int | None:
    """The error's CUDA code, from the error or its words; None where it has none."""
    code = getattr(error, "error_code", None)
    if isinstance(code, int) and code > 0:
        return code
    text = str(error).lower()
    for known_code, said in WORDS.items():
        if any(words in text for words in said) and ("cuda" in text or known_code == OUT_OF_MEMORY):
            return known_code
    found = _CODE.search(text)
    return int(found[1]) if found else None


def known_to_torch(error: BaseException) -> Failure | None:
    """What an error means on every device of torch's, as `known` says it, with torch's own error of memory."""
    if isinstance(error, torch.OutOfMemoryError):
        return Failure(Reason.CAPTURE_OUT_OF_MEMORY, False)
    return known(error)


def classify(error: BaseException) -> Failure:
    """What an error means to a capture or a replay."""
    meant = known_to_torch(error)
    if meant is not None:
        return meant
    code = error_code(error)
    if code in STICKY:
        return Failure(Reason.DEVICE_LOST, True)
    if code == OUT_OF_MEMORY:
        return Failure(Reason.CAPTURE_OUT_OF_MEMORY, False)
    if code in ILLEGAL:
        return Failure(Reason.CAPTURE_ILLEGAL, False)
    if code in FORBIDDEN:
        return Failure(Reason.CAPTURE_FORBIDDEN, False)
    if code in MISSING:
        return Failure(Reason.BACKEND_MISSING, False)
    return Failure(_of_torch(error), False)


def _of_torch(error: BaseException) -> Reason:
    """What an error without a code of CUDA's says."""
    text = str(error).lower()
    if isinstance(error, NotImplementedError) and "backend" in text:
        # An operator of torch's that has no kernel for the device.
        return Reason.BACKEND_MISSING
    return next((reason for words, reason in _OF_TORCH if words in text), Reason.CAPTURE_FAILED)


def classify_by_words(error: BaseException) -> Failure:
    """What an error of a device whose library's codes aren't known means: memory, and the words of a lost device."""
    meant = known_to_torch(error)
    if meant is not None:
        return meant
    text = str(error).lower()
    if "out of memory" in text:
        return Failure(Reason.CAPTURE_OUT_OF_MEMORY, False)
    lost = any(words in text for words in _LOST)
    return Failure(Reason.DEVICE_LOST if lost else Reason.CAPTURE_FAILED, lost)
