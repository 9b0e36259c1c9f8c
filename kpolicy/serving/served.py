"""What a host takes besides launching while it serves: measured behind a calibration, for its profile."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from kpolicy.errors import ConfigError, KPolicyError
from kpolicy.host_speed import host_work_us, work_inside_us
from kpolicy.scheduling.generator import generate_trace
from kpolicy.served_host import ServedHost, noted_work
from kpolicy.serving.real_run import fitting, saturated_s, serve_model
from kpolicy.trace_run import Prompts

if TYPE_CHECKING:
    from kpolicy.costs import CostTable
    from kpolicy.engine import Engine
    from kpolicy.executors.base import StepInputs, StepOutputs
    from kpolicy.scheduling.traces import Trace
    from kpolicy.serving.real_run import Serving

__all__ = ["SERVED_S", "serve_for"]

SERVED_S = 10.0
"""Seconds of serving: a core's slow stretches last for tenths of a second up to seconds. Servings of five, within three
minutes, were 1.01 to 1.23 times as slow as launches (docs/six_fidelity_runs.md)."""
LOAD = 0.7
"""Requests come that would take this share of the seconds if all waited at their start, `_TRIED` at a time"""
_TRIED = 32
"""Generated requests that tell how long one takes"""
_MOST_REQUESTS = 5000
_LEAST_STEPS = 20


def serve_for(serving: Serving, engine: Engine, seconds: float = SERVED_S, *, seed: int = 0) -> ServedHost | None:
    """Serve generated requests for some seconds, and note what the host took besides launching.

    The requests are of a conversation's lengths (`generate_trace`), so many that a few to some dozens of rows decode at
    a time. It is no full server's load.

    Args:
        serving: the model and its costs, which decisions go by.
        engine: whose executor and graphs serve.
        seconds: of arrivals. Serving ends with the last token.
        seed: of the requests.

    Returns:
        None where fewer than 20 steps ran: they tell nothing.

    Raises:
        KPolicyError: serving failed, or no request fits the model; the message says why.
        KeyboardInterrupt: it was interrupted.
    """
    costs = serving.costs
    if costs is None:
        raise KPolicyError("nothing was measured, so nobody can tell how much to serve; calibrate first.")
    served = serving.engine("auto", like=engine)
    # Its graphs stay the other's: it isn't released.
    trace = _requests(serving, served, costs, seconds, seed)
    steps: list[tuple[float, float, float]] = []
    noted = costs.host_work_us > 0

    def note(_step: int, _inputs: StepInputs, outputs: StepOutputs, _batcher: Any, start_us: float) -> None:
        now_s = time.perf_counter()
        inside = work_inside_us(now_s - outputs.cycle_us * 1e-6, now_s) if costs.notes_inside else 0.0
        steps.append((start_us, start_us + outputs.cycle_us, costs.host_work_of(inside) or host_work_us()))

    prompts = Prompts(seed, vocab=serving.model.vocab)
    result, _ = serve_model(trace, served, serving, prompts, label="auto", on_step=note if noted else None)
    if result.interrupted.startswith("interrupted"):
        raise KeyboardInterrupt
    if result.interrupted:
        raise KPolicyError(f"serving, to see what the host takes besides launching, failed: {result.interrupted}.")
    decodes = result.steps - result.prompt_steps
    if min(decodes, result.prompt_steps) < 1 or result.steps < _LEAST_STEPS:
        return None
    step_us = (result.outside_us - result.outside_prompts_us) / decodes
    return ServedHost(
        scheduler_us=step_us,
        scheduler_prompt_us=max(result.outside_prompts_us / result.prompt_steps - step_us, 0.0),
        host_work_us=noted_work(steps),
    )


def _requests(serving: Serving, engine: Engine, costs: CostTable, seconds: float, seed: int) -> Trace:
    """Generated requests that ask for a share of these seconds, arriving in them."""
    model = serving.model
    # Those that fit, as some models have no room for most of a conversation's.
    every = generate_trace(seed=seed, num_requests=_MOST_REQUESTS)
    try:
        fit = fitting(every, model)
    except ConfigError:
        raise KPolicyError(
            f"nothing was served: no request of a conversation's lengths fits the model's {model.max_model_len} tokens."
        ) from None
    tried = fit.first(_TRIED)
    work_s = saturated_s(tried, engine, costs, num_blocks=model.num_blocks, block_size=model.block_size)
    trace = fit.first(max(round(LOAD * seconds * len(tried) / work_s), 2))
    return trace.scaled(trace.span_s / seconds) if trace.span_s else trace
