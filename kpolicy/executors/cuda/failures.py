"""What CUDA's errors mean: which cost a capture and why, and which the device.

Codes are those of ``cudaError_t`` (CUDA runtime API, "Error handling"). torch gives the code since 2.8
(`torch.AcceleratorError.error_code`); before, only its words.
"""

from __future__ import annotations

import re

import torch

from kpolicy.executors.device import Failure, known
from kpolicy.reasons import Reason

__all__ = ["classify", "error_code"]

OUT_OF_MEMORY = 2
STICKY = frozenset({46, 214, 220, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 999})
"""After these every call fails until the process ends: an illegal address, an assertion, a launch that failed or timed
out, ECC and link errors, a device that is unavailable."""
ILLEGAL = frozenset({900, 901, 902, 903, 904, 905, 907})
"""A synchronisation or allocation while a stream is captured, work of streams that the capture doesn't hold, and what
follows of these."""
FORBIDDEN = frozenset({401, 906, 908})
"""The stream is in another state than a capture needs, another thread captures, or the legacy stream would wait for a
capture."""
MISSING = frozenset({35, 209, 218, 221, 222, 223, 302, 303, 500})
"""A driver that is too old, no kernel for this device, no compiler for PTX, a library or a symbol that isn't there."""

_WORDS = (
    ("an illegal memory access", 700), ("device-side assert triggered", 710), ("unspecified launch failure", 719),
    ("misaligned address", 716), ("illegal instruction", 715), ("launch timed out", 702), ("uncorrectable ecc", 214),
    ("all cuda-capable devices are busy", 46), ("operation not permitted when stream is capturing", 900),
    ("operation would make the legacy stream depend", 906),
    ("operation failed due to a previous error during capture", 901),
    ("would result in a merge of", 902), ("unjoined work", 904), ("dependency created on uncaptured work", 905),
    ("last recorded in a capturing stream", 907), ("thread-local capture sequence from another thread", 908),
    ("no kernel image is available", 209), ("unsupported toolchain", 222), ("out of memory", OUT_OF_MEMORY),
)  # fmt: skip
_OF_TORCH = (
    ("must be captured on a non-default stream", Reason.CAPTURE_FORBIDDEN),
    ("during cuda graph capture", Reason.CAPTURE_ILLEGAL), ("during graph capture", Reason.CAPTURE_ILLEGAL),
    ("cannot open shared object file", Reason.BACKEND_MISSING),
)  # fmt: skip
"""What torch and the loader of libraries refuse themselves, before CUDA has a code for it"""
_CODE = re.compile(r"cuda error(?: code)?[:=]? *(\d+)\b", re.IGNORECASE)


def error_code(error: BaseException) -> int | None:
    """The error's CUDA code, from the error or its words; None where it has none."""
    code = getattr(error, "error_code", None)
    if isinstance(code, int) and code > 0:
        return code
    text = str(error).lower()
    for words, known_code in _WORDS:
        if words in text and ("cuda" in text or known_code == OUT_OF_MEMORY):
            return known_code
    found = _CODE.search(text)
    return int(found[1]) if found else None


def classify(error: BaseException) -> Failure:
    """What an error means to a capture or a replay."""
    meant = known(error)
    if meant is not None:
        return meant
    if isinstance(error, torch.OutOfMemoryError):
        return Failure(Reason.CAPTURE_OUT_OF_MEMORY, False)
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
