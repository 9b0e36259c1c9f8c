"""kpolicy in nano-vllm: its `ModelRunner`, whose decode batches replay by kpolicy's decision (docs/integrate.md).

    import nano_vllm
    nano_vllm.install()            # before the LLM is made
    ...
    print(llm.model_runner.kpolicy.stats.by_reason)

nano-vllm captures decode graphs of sizes of its own, and replays the next size. Two of its rules change here: a batch
above its last size runs eagerly and with a reason (its own search ends in an exception, since sizes stop at the last
multiple of 16), and with a profile a batch whose padding costs more than it saves runs eagerly too.
"""

from __future__ import annotations

import os
import time
from itertools import accumulate
from typing import Any

import attrs
import nanovllm.engine.llm_engine as nanovllm_engine
import torch
from nanovllm.engine.model_runner import ModelRunner

from kpolicy import BatchShape, CaptureSizes, CostTable, Engine, Mode, Settings
from kpolicy.costs import Curve
from kpolicy.profiles import load_profile


class KPolicyModelRunner(ModelRunner):
    """nano-vllm's runner; what replays is kpolicy's decision."""

    kpolicy: Engine | None = None

    def capture_cudagraph(self) -> None:
        """Capture as nano-vllm does, and take its graphs into kpolicy's registry."""
        free, started = torch.cuda.mem_get_info()[0], time.perf_counter()
        super().capture_cudagraph()
        seconds, used = time.perf_counter() - started, free - torch.cuda.mem_get_info()[0]
        most = self.config.max_num_seqs
        # Sizes over the most requests were captured on buffers of so many rows.
        sizes = sorted({min(size, most) for size in self.graph_bs})
        self.kpolicy = engine_over(sizes, most, costs_from(os.environ.get("KPOLICY_PROFILE")))
        for key in self.kpolicy.registry.view(assumed=True).keys:
            share = max(used, 0) // len(sizes)
            self.kpolicy.registry.capture(key, bytes=share, seconds=seconds / len(sizes))

    def run_model(self, input_ids: Any, positions: Any, is_prefill: bool) -> Any:
        """Run one batch as kpolicy decides: prefill eagerly, as nano-vllm does, which has no graphs of it."""
        if self.kpolicy is None:  # nothing is captured, or not yet
            return super().run_model(input_ids, positions, is_prefill)
        size = input_ids.size(0)  # of prompts nano-vllm tells no more here: they are counted as one
        decision = self.kpolicy.decide(BatchShape(prefills=[(size, 0)]) if is_prefill else BatchShape.decode(size))
        for key in decision.keys:
            self.kpolicy.registry.hit(key)
        asked = self.enforce_eager
        self.enforce_eager = asked or decision.mode is Mode.EAGER
        try:
            return super().run_model(input_ids, positions, is_prefill)
        finally:
            self.enforce_eager = asked


def engine_over(sizes: list[int], most: int, costs: CostTable | None) -> Engine:
    """An Engine that decides over decode graphs of these sizes, and runs nothing itself."""
    settings = Settings(max_num_reqs=most, max_num_tokens=most)
    ladder = CaptureSizes(decode=tuple(sizes))
    # Costs of another model and device would have steps eager that aren't.
    policy = "auto" if costs else "sglang:prefill=disabled"
    engine = Engine(policy, attention="gqa", ladder=ladder, settings=settings, costs=costs)
    engine.registry.plan(engine.policy.plan(ladder, engine.support.claims, settings))
    return engine


def costs_from(profile: str | None) -> CostTable | None:
    """Measured costs of a profile, by file or name; without one every batch that a graph holds replays it."""
    if not profile:
        return None
    costs = load_profile(profile).costs
    # nano-vllm pads to the next size, whatever a larger graph was measured to take; times that never fall do too.
    return attrs.evolve(costs, full=Curve(costs.full.sizes, tuple(accumulate(costs.full.us, max))))


def install() -> None:
    """Make nano-vllm's engine use the runner above."""
    nanovllm_engine.ModelRunner = KPolicyModelRunner
