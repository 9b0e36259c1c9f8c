"""What torch holds of the device once graphs are released."""

from __future__ import annotations

import gc
from typing import NamedTuple

import torch

SEGMENT_BYTES = 2 << 20
"""The least that torch's allocator takes of the device at once: a tensor that lives may hold so much more"""


class Held(NamedTuple):
    """Bytes of the device."""

    allocated: int
    """Of tensors"""
    reserved: int
    """That torch's allocator has, once it gave back all that it could"""

    def is_back_at(self, before: Held) -> bool:
        """Whether no tensor is left of what came since, and no pool of a graph's."""
        return self.allocated <= before.allocated and self.reserved <= before.reserved + SEGMENT_BYTES


def held() -> Held:
    """What is held now, less cuBLAS's workspaces, which stay with their streams on purpose.

    No graph may live: it reads the workspace of its stream.
    """
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return Held(torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
