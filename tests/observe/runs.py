"""Engines that ran something on the simulated executor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kpolicy import Engine
from kpolicy.executors.base import StepInputs, StepOutputs
from kpolicy.executors.simulated import SimulatedExecutor
from kpolicy.scheduling.batching import Batcher, Generation
from kpolicy.settings import Settings

__all__ = ["engine_of", "serve"]


def engine_of(policy: str = "auto", faults: Sequence[str] = (), **settings: Any) -> Engine:
    """An Engine on a simulated executor with a short ladder, not captured yet."""
    executor = SimulatedExecutor(num_blocks=512, faults=faults)
    return Engine(policy, ladder=[1, 2, 4, 8, 16, 32], settings=Settings(**settings), executor=executor)


def serve(
    engine: Engine, num_requests: int = 12, on_step: Callable[[int, StepInputs, StepOutputs], None] | None = None
) -> int:
    """Serve requests that come while others decode, so that some batches are mixed. The number of steps."""
    batcher = Batcher(engine.settings, num_blocks=512)
    steps = 0
    while num_requests or not batcher.idle:
        if num_requests and steps % 3 == 0:
            num_requests -= 1
            batcher.add(Generation(num_requests, [1 + num_requests] * (5 + 7 * num_requests), 6))
        batch = batcher.next_batch()
        if batch is not None:
            outputs = engine.step(batch.inputs)
            if on_step is not None:
                on_step(steps, batch.inputs, outputs)
            batcher.complete(batch, outputs, lambda _output: 1)
        steps += 1
    return int(engine.stats.total.steps)
