"""`torch.xpu` and `torch.accelerator` over the pretended device, with the arguments that torch 2.13's have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.fakes.torch_npu import fake_torch_npu

__all__ = ["fake_accelerator", "fake_xpu"]


def fake_xpu() -> Any:
    """`torch.xpu`: its graphs take a pool and no capture error mode."""
    npu = fake_torch_npu().npu

    class XPUGraph(npu.NPUGraph):  # type: ignore[misc]
        def capture_begin(self, pool: Any = None) -> None:
            super().capture_begin(pool)

    return SimpleNamespace(**vars(npu), XPUGraph=XPUGraph)


def fake_accelerator() -> Any:
    """What `TorchAccelerator` offers: a graph gets its pool when it is made, and there is none before the first."""
    npu = fake_torch_npu().npu

    class Graph(npu.NPUGraph):  # type: ignore[misc]
        def __init__(
            self, keep_graph: bool = False, *, pool: Any = None, capture_error_mode: str = "default"
        ) -> None:  # fmt: skip
            super().__init__()
            assert not keep_graph
            self.graph_pool, self.capture_error_mode = pool, capture_error_mode

        def capture_begin(self) -> None:
            assert self.capture_error_mode == "default"
            super().capture_begin(self.graph_pool)

    names = ("Stream", "Event", "stream", "current_stream", "synchronize", "mem_get_info", "empty_cache")
    return SimpleNamespace(
        **{name: getattr(npu, name) for name in names}, Graph=Graph, graph_pool_handle=lambda: None
    )  # fmt: skip
