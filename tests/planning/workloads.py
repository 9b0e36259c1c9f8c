"""Small traces, cost tables and servers for planning tests."""

from __future__ import annotations

from typing import Any

from kpolicy.costs import AttentionCost, CostTable, Curve, HostCost
from kpolicy.scheduling.traces import Trace, TraceRequest
from kpolicy.settings import Settings
from kpolicy.simulate import Server


def costs(**changed: Any) -> CostTable:
    """A table in which a padded token costs something at every size, and eager is bound by its launches."""
    dense = Curve((1, 4096), (1000.0, 1000.0 + 20.0 * 4095))
    values: dict[str, Any] = {
        "version": "test-1",
        "measured": True,
        "full": dense,
        "piecewise": dense,
        "eager": dense,
        "decode_attention": AttentionCost(5.0, 1.0, 0.01),
        "prefill_attention": AttentionCost(5.0, 0.5, 0.001),
        "host_full": HostCost(50.0),
        "host_piecewise": HostCost(600.0),
        "host_eager": HostCost(4000.0, 2.0),
        "step_us": 100.0,
        "capture_us": (100_000.0, 300_000.0),
        "graph_bytes": (1 << 20, 3 << 20),
        "graph_pieces": (1, 5),
    }
    return CostTable(**(values | changed))


def trace(num: int = 80, *, gap_s: float = 0.02) -> Trace:
    """Requests of 8 to 300 prompt tokens that generate 4 to 60, a fiftieth of a second apart."""
    return Trace(
        "a test's trace",
        "generated",
        [TraceRequest(i, gap_s * i, 8 + 73 * i % 293, 4 + 31 * i % 57) for i in range(num)],
    )


def server(**changed: int) -> Server:
    """A warm server of 64 requests and 512 tokens a step."""
    limits = {"max_num_reqs": 64, "max_num_tokens": 512}
    return Server(settings=Settings(**(limits | changed)), kv_tokens=20_000, warm=True)
