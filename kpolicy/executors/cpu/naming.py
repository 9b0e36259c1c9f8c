"""What a processor is called in profiles."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

__all__ = ["cpu_name"]


def cpu_name() -> str:
    """What the processor calls itself, with the threads that operators use: times are of both."""
    threads = torch.get_num_threads()
    return f"{_processor()}, {threads} thread{'s' if threads > 1 else ''} a stream"


def _processor() -> str:
    """Its model; that of ARM by the numbers that Linux has in place of a name, which tell one from another too."""
    said: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, colon, value = line.partition(":")
            if colon:
                said.setdefault(name.strip(), value.strip())
    except OSError:
        pass
    part = ", ".join(f"{name} {said[name]}" for name in ("CPU implementer", "CPU part", "CPU variant") if name in said)
    return said.get("model name") or part or said.get("cpu") or platform.processor() or platform.machine() or "CPU"
