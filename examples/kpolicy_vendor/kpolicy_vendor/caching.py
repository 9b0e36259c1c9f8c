"""`CachingExecutor`: kpolicy on a device that compiles graphs and caches them, in place of recording streams.

That is what an HPU (Gaudi) does: `HPUGraph` has `capture_begin`, `capture_end` and `replay` as others have, and below
it a recipe is compiled for each new structure and kept. It has no pool and no `reset`, and its library no handle of
one; `Graph` and `Library` say what kpolicy asks for in their place. kpolicy copies inputs into fixed buffers before
each replay and asks for few padded shapes, which is what such a cache wants.

Where there may only be so many graphs, that is said twice: beforehand by a budget, ``Engine(...,
budget=Budget(graphs=N))``, so that no more are asked for; and by `meaning`, for what comes too many all the same: it
runs another way.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from kpolicy.executors.xpu import StreamAdapter, StreamExecutor
from kpolicy_vendor import meaning, prove

__all__ = ["CachingExecutor"]

_ONE_POOL = "that of keys and values"


class CachingExecutor(StreamExecutor):
    """A step model on such a device. Arguments and errors are those of `VendorExecutor`."""

    def __init__(
        self,
        model: Any,
        *,
        device: Any = None,
        max_num_reqs: int | None = None,
        faults: Iterable[str] = (),
        check: bool = False,
    ) -> None:
        from kpolicy_vendor import stand_in

        at = torch.device(device or getattr(model, "device", "cpu"))
        adapter = StreamAdapter(
            "vendor-cached",
            Library(stand_in),
            at,
            begin=Graph,
            classify=meaning,
            report=prove(stand_in, at),
            check=check,
            statics=getattr(model, "static_tensors", None),
            faults=faults,
        )
        super().__init__(model, adapter, max_num_reqs=max_num_reqs)


class Library:
    """The vendor's namespace, and the name that it lacks."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def graph_pool_handle(self) -> str:
        """All graphs are in one pool, with keys and values."""
        return _ONE_POOL


class Graph:
    """A graph that is compiled from what runs until its `capture_end`; letting it go frees it."""

    def __init__(self, handle: Any) -> None:
        del handle
        from kpolicy_vendor import stand_in

        self._graph: Any = stand_in.CachedGraph()
        self._graph.capture_begin()

    def capture_end(self) -> None:
        self._graph.capture_end()

    def replay(self) -> None:
        self._graph.replay()

    def reset(self) -> None:
        self._graph = None

    def pool(self) -> str:
        return _ONE_POOL
