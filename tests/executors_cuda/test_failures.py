"""What errors of CUDA, torch and Triton mean to a capture or a replay, by code and by words."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from kpolicy.errors import CaptureError, GraphReplayError, StickyDeviceError  # noqa: E402
from kpolicy.executors.cuda.failures import (  # noqa: E402
    FORBIDDEN,
    ILLEGAL,
    MISSING,
    OUT_OF_MEMORY,
    STICKY,
    WORDS,
    classify,
    error_code,
)
from kpolicy.reasons import Reason  # noqa: E402


class Coded(RuntimeError):
    """As `torch.AcceleratorError`: the code is an attribute, and the words say nothing."""

    def __init__(self, code: int) -> None:
        super().__init__("CUDA error: see the code")
        self.error_code = code


CASES = {
    "out of memory, torch's own": (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "oom", False),
    "out of memory, by code": (Coded(2), "oom", False),
    "out of memory, Triton's": (RuntimeError("Triton Error [CUDA]: out of memory"), "oom", False),
    "out of memory, the host's": (MemoryError(), "oom", False),
    "illegal in capture, by code": (Coded(900), "illegal", False),
    "illegal in capture, by words": (
        RuntimeError("CUDA error: operation not permitted when stream is capturing"), "illegal", False,
    ),
    "illegal in capture, torch's own": (
        RuntimeError("Cannot copy between CPU and CUDA tensors during CUDA graph capture unless pinned"), "illegal",
        False,
    ),
    "capture invalidated": (Coded(901), "illegal", False),
    "capture forbidden now, by code": (Coded(906), "forbidden", False),
    "capture forbidden now, by words": (
        RuntimeError("CUDA error: operation would make the legacy stream depend on another"), "forbidden", False,
    ),
    "capture forbidden now, another thread's": (
        RuntimeError("CUDA error: attempt to terminate a thread-local capture sequence from another thread"),
        "forbidden", False,
    ),
    "capture forbidden now, torch's own": (
        RuntimeError("CUDA graphs must be captured on a non-default stream."), "forbidden", False,
    ),
    "an address changed": (
        GraphReplayError(None, "weight is now elsewhere", Reason.ADDRESS_CHANGED), "address", False,
    ),
    "a replay that failed otherwise": (GraphReplayError(None, "no row"), "replay", False),
    "a refused capture keeps its reason": (CaptureError(Reason.CAPTURE_OUT_OF_STREAMS, "none left"), "streams", False),
    "a package that is missing": (ModuleNotFoundError("No module named 'flashinfer'"), "missing", False),
    "a library that is missing": (
        OSError("libcute.so: cannot open shared object file: No such file or directory"), "missing", False,
    ),
    "a kernel that is missing": (Coded(209), "missing", False),
    "a kernel that is missing, by words": (
        RuntimeError("CUDA error: no kernel image is available for execution on the device"), "missing", False,
    ),
    "an operator that is missing": (
        NotImplementedError("Could not run 'aten::x' with arguments from the 'CUDA' backend."), "missing", False,
    ),
    "cuBLAS without memory for its handle": (
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "oom", False,
    ),
    "cuDNN without memory": (
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), "oom", False,
    ),
    "cuBLAS for another device": (
        RuntimeError("CUDA error: CUBLAS_STATUS_ARCH_MISMATCH when calling `cublasGemmEx`"), "missing", False,
    ),
    "cuBLAS that takes no such types or strides": (
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmul`"), "failed", False,
    ),
    "cuDNN likewise": (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"), "failed", False),
    "a model's own gap": (NotImplementedError("forward"), "failed", False),
    "lost, by name": (StickyDeviceError("gone"), "lost", True),
    "an illegal address, by code": (Coded(700), "lost", True),
    "an illegal address, Triton's": (
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), "lost", True,
    ),
    "an assertion": (RuntimeError("CUDA error: device-side assert triggered"), "lost", True),
    "words with a number": (RuntimeError("CUDA error: 719"), "lost", True),
    "a model's own error": (ValueError("an illegal memory access, says the model"), "failed", False),
    "a model's shapes": (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "failed", False),
}  # fmt: skip
REASONS = {
    "oom": Reason.CAPTURE_OUT_OF_MEMORY, "failed": Reason.CAPTURE_FAILED, "replay": Reason.REPLAY_FAILED,
    "streams": Reason.CAPTURE_OUT_OF_STREAMS, "illegal": Reason.CAPTURE_ILLEGAL,
    "forbidden": Reason.CAPTURE_FORBIDDEN, "missing": Reason.BACKEND_MISSING, "lost": Reason.DEVICE_LOST,
    "address": Reason.ADDRESS_CHANGED,
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_classify(case: str) -> None:
    """The reason of a key that can't be had, and whether the device is lost with it."""
    error, reason, sticky = CASES[case]
    assert classify(error) == (REASONS[reason], sticky)


ADVICE = """
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("operation not permitted when stream is capturing", 900),
        ("out of memory", 2),
        ("device-side assert triggered", 710),
        ("invalid argument", None),
    ],
)
def test_the_advice_below_an_error_is_not_the_error(words: str, code: int | None) -> None:
    """Before torch 2.8 there are only words, and all of them end with advice that names device-side assertions."""
    assert error_code(RuntimeError(f"CUDA error: {words}{ADVICE}")) == code


# As cudaGetErrorString of CUDA 13.0 has them, but for those that CASES has.
SAID = {
    35: "CUDA driver version is insufficient for CUDA runtime version",
    36: "API call is not supported in the installed CUDA driver",
    46: "CUDA-capable device(s) is/are busy or unavailable",
    98: "invalid device function", 200: "device kernel image is invalid", 218: "a PTX JIT compilation failed",
    214: "uncorrectable ECC error encountered", 220: "uncorrectable NVLink error detected during the execution",
    221: "PTX JIT compiler library not found",
    222: "the provided PTX was compiled with an unsupported toolchain.", 223: "PTX JIT compilation was disabled",
    226: "Invalid access of peer GPU memory over nvlink or a hardware error",
    302: "shared object symbol not found", 303: "shared object initialization failed",
    401: "the operation cannot be performed in the present state", 500: "named symbol not found",
    702: "the launch timed out and was terminated", 709: "context is destroyed", 714: "hardware stack error",
    715: "an illegal instruction was encountered", 716: "misaligned address",
    717: "operation not supported on global/shared address space", 718: "invalid program counter",
    719: "unspecified launch failure", 721: "tensor memory not completely freed",
    901: "operation failed due to a previous error during capture",
    902: "operation would result in a merge of separate capture sequences",
    903: "capture was not ended in the same stream as it began", 904: "capturing stream has unjoined work",
    905: "dependency created on uncaptured work in another stream",
    907: "operation not permitted on an event last recorded in a capturing stream", 999: "unknown error",
}  # fmt: skip


@pytest.mark.parametrize("code", SAID)
@pytest.mark.parametrize("before", ["CUDA error", "Triton Error [CUDA]"])
def test_words_mean_what_their_code_means(before: str, code: int) -> None:
    """torch before 2.8 and Triton give words alone."""
    assert classify(RuntimeError(f"{before}: {SAID[code]}{ADVICE}")) == classify(Coded(code))


def test_every_code_that_means_something_has_words() -> None:
    assert WORDS.keys() == STICKY | ILLEGAL | FORBIDDEN | MISSING | {OUT_OF_MEMORY}


def test_every_sticky_code_loses_the_device() -> None:
    """And codes beside them don't: an invalid argument, a launch that is too large, no such symbol."""
    assert all(classify(Coded(code)).sticky for code in STICKY)
    assert not any(classify(Coded(code)).sticky for code in (1, 3, 9, 98, 209, 400, 500, 600, 701, 720, 801, 904))


def test_an_error_of_anything_else_has_no_code() -> None:
    assert error_code(RuntimeError("out of luck")) is None
    assert error_code(Coded(0)) is None
