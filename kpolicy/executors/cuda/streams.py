"""Streams that are used again: libraries keep a workspace for each stream they ever ran on.

cuBLAS has about 34 MiB a stream on an H100 or H200, which torch's allocator holds until the process ends, since graphs
may read it. torch hands out 32 streams a priority in turn, so pools that come and go would in time have a workspace for
each; and a pool that lives on could be given another's stream. So a stream whose pool is gone is the next one's.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["give_back", "new_stream"]

_spare: dict[tuple[int, int], list[Any]] = {}
_priorities: dict[Any, tuple[int, int]] = {}
# By handle: a stream's device and priority as they were asked for. Only streams of `new_stream` are handed on.


def new_stream(device: torch.device, priority: int) -> Any:
    """A stream that nobody else has: one that was given back, or a new one.

    Args:
        device: its device, with an index.
        priority: as torch has it; lower goes first.
    """
    kind = device.index, priority
    spare = _spare.get(kind)
    stream = spare.pop() if spare else torch.cuda.Stream(device, priority=priority)
    _priorities[stream.cuda_stream] = kind
    return stream


def give_back(stream: Any) -> None:
    """Take a stream back from its owner, who has waited for what it ran or lets others wait for it."""
    kind = _priorities.pop(getattr(stream, "cuda_stream", None), None)
    if kind is not None:
        _spare.setdefault(kind, []).append(stream)
