"""Streams that are used again: libraries keep a workspace for each stream they ever ran on.

cuBLAS has about 34 MiB a stream on an H100 or H200, which torch's allocator holds until the process ends, since graphs
may read it. torch hands out 32 streams a priority in turn, so pools that come and go would in time have a workspace for
each; and a pool that lives on could be given another's stream. So a stream whose pool is gone is the next one's, and
one that is held isn't given away while torch has another.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

__all__ = ["give_back", "new_stream"]

STREAMS = 32
"""Of a priority, that torch hands out in turn"""


class _Held(NamedTuple):
    """A stream that somebody has."""

    kind: tuple[int, int]
    """Its device and priority, as they were asked for"""
    owners: int


_spare: dict[tuple[int, int], list[Any]] = {}
_held: dict[Any, _Held] = {}
# By handle. Only streams of `new_stream` are handed on.


def new_stream(device: torch.device, priority: int) -> Any:
    """A stream that nobody else has of here: one that was given back, or a new one; a shared one where all are held.

    Args:
        device: its device, with an index.
        priority: as torch has it; lower goes first.
    """
    kind = device.index, priority
    spare = _spare.get(kind)
    if spare:
        stream = spare.pop()
    else:
        for _ in range(STREAMS):
            stream = torch.cuda.Stream(device, priority=priority)
            if stream.cuda_stream not in _held:
                break
    before = _held.get(stream.cuda_stream)
    _held[stream.cuda_stream] = _Held(kind, 1 if before is None else before.owners + 1)
    return stream


def give_back(stream: Any) -> None:
    """Take a stream back from an owner, who has waited for what it ran or lets others wait for it."""
    handle = getattr(stream, "cuda_stream", None)
    held = _held.pop(handle, None)
    if held is None:
        return
    if held.owners > 1:
        _held[handle] = held._replace(owners=held.owners - 1)
    else:
        _spare.setdefault(held.kind, []).append(stream)
