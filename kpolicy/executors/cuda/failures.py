"""What CUDA's errors mean: which cost a capture, and which the device.

Codes are those of ``cudaError_t`` (CUDA runtime API, "Error handling"). torch gives the code since 2.8
(`torch.AcceleratorError.error_code`); before, only its words.
"""

from __future__ import annotations

import re

import torch

from kpolicy.errors import CaptureError, GraphReplayError, StickyDeviceError
from kpolicy.executors.device import Failure
from kpolicy.reasons import Reason

__all__ = ["classify", "error_code"]

OUT_OF_MEMORY = 2
STICKY = frozenset({46, 214, 220, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 999})
"""After these every call fails until the process ends: an illegal address, an assertion, a launch that failed or timed
out, ECC and link errors, a device that is unavailable."""

_WORDS = (
    ("an illegal memory access", 700), ("device-side assert triggered", 710), ("unspecified launch failure", 719),
    ("misaligned address", 716), ("illegal instruction", 715), ("launch timed out", 702), ("uncorrectable ecc", 214),
    ("all cuda-capable devices are busy", 46), ("operation not permitted when stream is capturing", 900),
    ("operation would make the legacy stream depend", 906),
    ("operation failed due to a previous error during capture", 901),
    ("dependency created on uncaptured work", 905), ("out of memory", OUT_OF_MEMORY),
)  # fmt: skip
_CODE = re.compile(r"cuda error(?: code)?[:=]? *(\d+)\b", re.IGNORECASE)


def error_code(error: BaseException) -> int | None:
    """The error's CUDA code, from the error or its words; None where it has none."""
    code = getattr(error, "error_code", None)
    if isinstance(code, int) and code > 0:
        return code
    text = str(error).lower()
    for words, known in _WORDS:
        if words in text and ("cuda" in text or known == OUT_OF_MEMORY):
            return known
    found = _CODE.search(text)
    return int(found[1]) if found else None


def classify(error: BaseException) -> Failure:
    """What an error means to a capture or a replay."""
    if isinstance(error, StickyDeviceError):
        return Failure(Reason.REPLAY_FAILED, True)
    if isinstance(error, CaptureError):
        return Failure(error.reason, False)
    if isinstance(error, GraphReplayError):
        return Failure(Reason.REPLAY_FAILED, False)
    if isinstance(error, torch.OutOfMemoryError):
        return Failure(Reason.CAPTURE_OUT_OF_MEMORY, False)
    code = error_code(error)
    if code == OUT_OF_MEMORY or isinstance(error, MemoryError):
        return Failure(Reason.CAPTURE_OUT_OF_MEMORY, False)
    return Failure(Reason.CAPTURE_FAILED, code in STICKY)
