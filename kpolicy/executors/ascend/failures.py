"""What errors of an Ascend device mean: which say that it can't hold more graphs, and which lose it.

torch_npu raises RuntimeError with a text; the code of CANN stands in it. Codes are those of CANN's
``acl/error_codes/rt_error_codes.h`` as torch_npu 2.13 ships it, texts those that users of vllm-ascend report
(docs/ascend.md). Unverified on hardware.
"""

from __future__ import annotations

import re

from kpolicy.executors.cuda.failures import known_to_torch
from kpolicy.executors.device import Failure
from kpolicy.reasons import Reason

__all__ = ["advice", "classify", "error_codes"]

NO_RESOURCE = frozenset({207005, 207007, 207008, 207009, 207010})
"""No events, streams, notifies or models left. 207005 speaks of memory and was seen where streams had run out."""
OUT_OF_MEMORY = frozenset({207001, 207018})
ILLEGAL = frozenset({107030})
"""A synchronous copy or the like while a stream is captured"""
STICKY = frozenset({
    107022, 507010, 507011, 507014, 507015, 507016, 507017, 507018, 507034, 507035, 507036, 507042, 507043, 507044,
    507045, 507046, 507047, 507048, 507049, 507050, 507053, 507054, 507055, 507056, 507899,
})  # fmt: skip
"""A core's exception, trap or time-out, a task abort, broken memory or link: what follows on the device fails too."""
_NO_STREAMS = (
    "alloc sq cq fail", "insufficient_stream_resources", "stream resources are insufficient",
    "event resources are insufficient", "notify resources in the system are insufficient",
    "insufficient model resources", "el0009", "new capture stream failed",
)  # fmt: skip
_OLD_DRIVER = ("alloc sq cq fail",)
_CODE = re.compile(r"(?<![\d.x])([125]0[78]\d{3})(?!\d)")


def error_codes(error: BaseException) -> frozenset[int]:
    """Every ACL code in an error's text: the first may be of a caller, and the cause that of a callee."""
    return frozenset(int(code) for code in _CODE.findall(str(error)))


def classify(error: BaseException) -> Failure:
    """What an error means to a capture or a replay."""
    meant = known_to_torch(error)
    if meant is not None:
        return meant
    text, codes = str(error).lower(), error_codes(error)
    if any(words in text for words in _NO_STREAMS) or codes & NO_RESOURCE:
        return Failure(Reason.CAPTURE_OUT_OF_STREAMS, False)
    if codes & STICKY:
        return Failure(Reason.DEVICE_LOST, True)
    if codes & OUT_OF_MEMORY or "out of memory" in text:
        return Failure(Reason.CAPTURE_OUT_OF_MEMORY, False)
    return Failure(Reason.CAPTURE_ILLEGAL if codes & ILLEGAL else Reason.CAPTURE_FAILED, False)


def advice(error: BaseException) -> str:
    """What to do about a capture that found no streams, in words; "" for other errors."""
    if classify(error).reason is not Reason.CAPTURE_OUT_OF_STREAMS:
        return ""
    if any(words in str(error).lower() for words in _OLD_DRIVER):
        return "Drivers (HDK) before 25.5.1 run out early and may call it a lack of memory; update the driver."
    return "The device has no streams left for graphs; fewer sizes are captured instead."
