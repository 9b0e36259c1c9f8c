"""Garbage collection while time is taken: what is there already isn't gone through again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["frozen_heap"]


@contextmanager
def frozen_heap(*, collects: bool = True) -> Iterator[None]:
    """Leave all objects that there are out of garbage collection, until the block ends.

    A collection goes through libraries and model again and again, a few ms each time, in the midst of some step: on an
    H200's host the quarter of eager steps that took longest took 23 ms with it and 19.7 without. New objects are
    collected as ever. A heap that is frozen already stays so.

    Args:
        collects: collect garbage first, which is kept as long otherwise. It takes half a second of a core where torch
            and transformers are imported.
    """
    if gc.get_freeze_count():
        yield
        return
    if collects:
        gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
