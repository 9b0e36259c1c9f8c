"""What errors of a device behind torch's own names mean."""

from __future__ import annotations

import torch

from kpolicy.errors import CaptureError, GraphReplayError, StickyDeviceError
from kpolicy.executors.device import Failure
from kpolicy.reasons import Reason

__all__ = ["classify"]

_LOST = ("device_lost", "device lost", "ur_result_error_device_lost")


def classify(error: BaseException) -> Failure:
    """What an error means to a capture or a replay."""
    if isinstance(error, StickyDeviceError):
        return Failure(Reason.REPLAY_FAILED, True)
    if isinstance(error, CaptureError):
        return Failure(error.reason, False)
    if isinstance(error, GraphReplayError):
        return Failure(Reason.REPLAY_FAILED, False)
    text = str(error).lower()
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "out of memory" in text:
        return Failure(Reason.CAPTURE_OUT_OF_MEMORY, False)
    return Failure(Reason.CAPTURE_FAILED, any(words in text for words in _LOST))
