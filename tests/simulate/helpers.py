"""Small traces, a cost table with every cost in it, and runs that keep every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
from hypothesis import strategies as st

from kpolicy.costs import AttentionCost, CostTable, Curve, HostCost
from kpolicy.engine import Engine
from kpolicy.executors.simulated import SimulatedExecutor
from kpolicy.ladders import CaptureSizes
from kpolicy.policies import get_policy
from kpolicy.scheduling.batching import Batcher
from kpolicy.scheduling.pace import EnginePace
from kpolicy.scheduling.traces import Trace, TraceRequest
from kpolicy.settings import Settings
from kpolicy.simulate import Server, SimResult, SimStep, simulate
from kpolicy.trace_run import Prompts, RunResult, serve_trace

LIMITS = Settings(max_num_reqs=6, max_num_tokens=32)
SIZES = CaptureSizes((1, 2, 4), (8, 16, 24), (8, 16))
# Every part of a step costs something odd, so that sums in another order or with a part left out differ.
COSTS = CostTable(
    version="drawn",
    measured=True,
    full=Curve((1, 4, 8, 24), (101.7, 130.3, 171.9, 333.3)),
    piecewise=Curve((1, 8, 16), (111.1, 181.3, 260.7)),
    eager=Curve((1, 8, 32), (99.9, 160.1, 371.7)),
    decode_attention=AttentionCost(7.3, 1.1, 0.37),
    prefill_attention=AttentionCost(5.9, 0.9, 0.13),
    host_full=HostCost(120.3, 0.7),
    host_piecewise=HostCost(170.9, 1.3),
    host_eager=HostCost(290.1, 2.1),
    step_us=31.7,
    padding_us=(13.7, 9.1),
    overlap_cost=0.4,
    capture_us=(1000.0, 3000.0),
    graph_bytes=(1000, 2000),
)


def trace_of(*requests: tuple[float, int, int], hash_ids: Sequence[Sequence[int]] = ()) -> Trace:
    """A trace of (arrival in ms, prompt tokens, tokens to generate)."""
    ids = [*map(tuple, hash_ids), *([()] * (len(requests) - len(hash_ids)))]
    return Trace(
        "drawn", "drawn", [TraceRequest(i, each[0] / 1e3, each[1], each[2], ids[i]) for i, each in enumerate(requests)]
    )


def with_ids(trace: Trace, hashes: Sequence[Sequence[int]]) -> Trace:
    """The trace with those hash ids, as far as they go."""
    ids = [*map(tuple, hashes), *([()] * len(trace))]
    return Trace("drawn", "drawn", [attrs.evolve(each, hash_ids=ids[i]) for i, each in enumerate(trace.requests)])


hash_lists = st.lists(st.lists(st.integers(0, 4), max_size=6), max_size=14)
"""Hash ids of a trace's requests, few enough that prompts begin alike."""


def traces(most_prompt: int = 60, most_output: int = 24, most_requests: int = 14) -> st.SearchStrategy[Trace]:
    """Traces of a few requests, close enough to queue."""
    one = st.tuples(st.integers(0, 3000), st.integers(1, most_prompt), st.integers(1, most_output))
    return st.lists(one, max_size=most_requests).map(
        lambda drawn: trace_of(*[(at / 1e3, prompt, output) for at, prompt, output in sorted(drawn)])
    )


def server(num_blocks: int = 30, block_size: int = 4, **rest: Any) -> Server:
    """A warm server whose graphs take no KV, unless told otherwise."""
    given: dict[str, Any] = {"settings": LIMITS, "kv_bytes_per_token": None, "warm": True, "reuse_prefixes": False}
    return Server(kv_tokens=num_blocks * block_size, block_size=block_size, **(given | rest))


def run(
    trace: Trace, policy: str = "auto", *, of: Server | None = None, **rest: Any
) -> tuple[SimResult, list[SimStep]]:
    """A simulation, and every step of it."""
    steps: list[SimStep] = []
    given: dict[str, Any] = {"costs": COSTS, "ladder": SIZES} | rest
    result = simulate(trace, policy, server=of or server(), on_step=steps.append, **given)
    return result, steps


def reference(
    trace: Trace, policy: str, *, num_blocks: int = 30, block_size: int = 4, steps_ahead: int = 8,
    settings: Settings = LIMITS, costs: CostTable = COSTS, ladder: CaptureSizes = SIZES, objective: str = "throughput",
    pace: str | None = None,
) -> tuple[RunResult, list[tuple[Any, ...]]]:  # fmt: skip
    """The same by tokens: the batcher, an Engine and the simulated executor; numbers, decision, start and time."""
    executor = SimulatedExecutor(costs, num_blocks=num_blocks, block_size=block_size, vocab=300)
    engine = Engine(policy, ladder=ladder, settings=settings, costs=costs, executor=executor, objective=objective)
    engine.capture()
    batcher = Batcher(
        settings, num_blocks=num_blocks, block_size=block_size, steps_ahead=steps_ahead,
        pace=None if pace is None else EnginePace(engine, get_policy(pace)),
    )  # fmt: skip
    steps: list[tuple[Any, ...]] = []
    result = serve_trace(
        trace, engine, batcher, Prompts(vocab=300),
        on_step=lambda _index, inputs, outputs, _batcher, start_us: steps.append(
            (inputs.numbers, outputs.decision, start_us, outputs.cycle_us)
        ),
    )  # fmt: skip
    return result, steps
