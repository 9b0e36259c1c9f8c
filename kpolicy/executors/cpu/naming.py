"""What a processor is called in profiles."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

__all__ = ["cpu_name"]


def cpu_name() -> str:
    """What the processor calls itself, with the threads that operators use: times are of both."""
    name = ""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    except OSError:
        name = platform.processor()
    threads = torch.get_num_threads()
    return f"{name or 'CPU'}, {threads} thread{'s' if threads > 1 else ''} a stream"
