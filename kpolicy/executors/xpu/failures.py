"""What errors of a device behind torch's own names mean."""

from __future__ import annotations

import torch

from kpolicy.executors.device import Failure, known
from kpolicy.reasons import Reason

__all__ = ["classify"]

_LOST = ("device_lost", "device lost", "ur_result_error_device_lost")


def classify(error: BaseException) -> Failure:
    """What an error means to a capture or a replay."""
    meant = known(error)
    if meant is not None:
        return meant
    text = str(error).lower()
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in text:
        return Failure(Reason.CAPTURE_OUT_OF_MEMORY, False)
    lost = any(words in text for words in _LOST)
    return Failure(Reason.DEVICE_LOST if lost else Reason.CAPTURE_FAILED, lost)
