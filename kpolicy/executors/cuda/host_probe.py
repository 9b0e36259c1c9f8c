"""How fast the host launches now: small copies to the device, on a stream on which nothing else runs.

Of sixteen kinds of work timed beside steps on an H200's host none that takes as little followed the time to launch
them as nearly, one to one: 6% off, where the interpreter's loop is 7 to 8% off (docs/benchmarks.md).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["COPIES", "copy_probe"]

COPIES = "copies"
"""What tables call it"""
_COPIES, _RUNS, _FLOATS = 2, 2, 8


def copy_probe(device: torch.device, stream: Any) -> Callable[[], float]:
    """What times such copies: microseconds until the host has launched them, the lesser of two runs.

    They are a few bytes from pinned memory, over before the host launches a step; no step's stream waits for them.

    Args:
        device: where to.
        stream: one that runs nothing else.
    """
    source = torch.zeros(_FLOATS).pin_memory()
    # Outside inference mode, so that the copies may be made in any.
    with torch.inference_mode(False):
        target = torch.zeros(_FLOATS, device=device)
    stream.wait_stream(torch.cuda.current_stream(device))

    def copied_us() -> float:
        least = float("inf")
        for _ in range(_RUNS):
            start = time.perf_counter()
            with torch.cuda.stream(stream):
                for _ in range(_COPIES):
                    target.copy_(source, non_blocking=True)
            least = min(least, time.perf_counter() - start)
        return least * 1e6

    return copied_us
