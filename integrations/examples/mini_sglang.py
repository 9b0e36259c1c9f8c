"""kpolicy in mini-sglang: its `GraphRunner`, with kpolicy's sizes, decisions and reasons (docs/integrate.md).

    import mini_sglang
    mini_sglang.install()          # before the engine is made
    ...
    print(engine.graph_runner.kpolicy.stats.by_reason)

mini-sglang captures decode graphs alone, pads to the next size, and runs everything else eagerly.
"""

from __future__ import annotations

import os
import time
from itertools import accumulate
from typing import Any

import attrs
import minisgl.engine.engine as minisgl_engine
import torch
from minisgl.engine.graph import GraphRunner

from kpolicy import BatchShape, CaptureSizes, CostTable, Engine, Mode, Settings
from kpolicy.costs import Curve
from kpolicy.profiles import load_profile

SIZES = (1, 2, 4, *range(8, 257, 8), 384, 512, 768, 1024)
"""mini-sglang's own to its largest, so that no batch pads further, and those it has no graph for."""


class KPolicyGraphRunner(GraphRunner):
    """mini-sglang's runner; what replays is kpolicy's decision.

    Args:
        cuda_graph_bs: sizes that the user gave; they are kept.
        cuda_graph_max_bs: the largest size; by default as many requests as may run.
        dummy_req: the row that pads; its place in the table comes after every other.
        rest: the other arguments of `GraphRunner`.
    """

    def __init__(self, *, cuda_graph_bs: Any, cuda_graph_max_bs: Any, dummy_req: Any, **rest: Any) -> None:
        most = cuda_graph_max_bs if cuda_graph_max_bs is not None else dummy_req.table_idx
        sizes = cuda_graph_bs or [*(size for size in SIZES if size < most), *([most] if most else [])]
        free, started = torch.cuda.mem_get_info(rest["device"])[0], time.perf_counter()
        super().__init__(cuda_graph_bs=sizes, cuda_graph_max_bs=most, dummy_req=dummy_req, **rest)
        seconds, used = time.perf_counter() - started, free - torch.cuda.mem_get_info(rest["device"])[0]
        if not sizes:
            return  # no graphs: nothing is decided
        self.kpolicy = engine_over(sorted(sizes), costs_from(os.environ.get("KPOLICY_PROFILE")))
        for key in self.kpolicy.registry.view(assumed=True).keys:
            share = max(used, 0) // len(sizes)
            self.kpolicy.registry.capture(key, bytes=share, seconds=seconds / len(sizes))

    def can_use_cuda_graph(self, batch: Any) -> bool:
        """Whether the batch replays. mini-sglang asks when it pads a batch, and again when it runs it."""
        if not super().can_use_cuda_graph(batch):
            return False
        return self.kpolicy.select(batch.size).mode is not Mode.EAGER

    def pad_batch(self, batch: Any) -> None:
        """Pad to the next size where the batch replays, and count the decision: of prompts too, which run eagerly."""
        super().pad_batch(batch)
        if self.graph_bs_list and batch.is_decode:
            self.kpolicy.decide(BatchShape.decode(batch.size))
        elif self.graph_bs_list:
            self.kpolicy.decide(BatchShape(prefills=[(req.extend_len, req.cached_len) for req in batch.reqs]))

    def replay(self, batch: Any) -> Any:
        """Replay, and count it at the graph."""
        (key,) = self.kpolicy.select(batch.size).keys
        self.kpolicy.registry.hit(key)
        return super().replay(batch)


def engine_over(sizes: list[int], costs: CostTable | None) -> Engine:
    """An Engine that decides over decode graphs of these sizes, and runs nothing itself."""
    settings = Settings(max_num_reqs=sizes[-1], max_num_tokens=sizes[-1])
    # Costs of another model and device would have steps eager that aren't.
    policy = "auto" if costs else "sglang:prefill=disabled"
    engine = Engine(policy, attention="gqa", ladder=CaptureSizes(decode=tuple(sizes)), settings=settings, costs=costs)
    engine.registry.plan(engine.policy.plan(engine.sizes, engine.support.claims, settings))
    return engine


def costs_from(profile: str | None) -> CostTable | None:
    """Measured costs of a profile, by file or name; without one every batch that a graph holds replays it."""
    if not profile:
        return None
    costs = load_profile(profile).costs
    # mini-sglang pads to the next size, whatever a larger graph was measured to take; times that never fall do too.
    return attrs.evolve(costs, full=Curve(costs.full.sizes, tuple(accumulate(costs.full.us, max))))


def install() -> None:
    """Make mini-sglang's engine use the runner above."""
    minisgl_engine.GraphRunner = KPolicyGraphRunner
