"""A simulated server whose steps are as long as the objective says: all is served, and the gap is shorter."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import settings as run_settings
from hypothesis import strategies as st

from kpolicy import profiles
from kpolicy.costs import CostTable, Curve, HostCost
from kpolicy.errors import UnknownNameError
from kpolicy.ladders import CaptureSizes
from kpolicy.scheduling.traces import TraceRequest
from kpolicy.schemas import read_profile
from kpolicy.settings import Objective, Settings
from kpolicy.simulate import Server, SimStep, simulate
from kpolicy.simulate.queue import Queue
from kpolicy.simulate.requests import Request

from .helpers import COSTS, LIMITS, SIZES, server, trace_of, traces

SLOW_EAGER = CostTable(
    version="made up", measured=True, full=Curve((1, 4096), (1002.0, 9192.0)),
    piecewise=Curve((1, 4096), (1002.0, 9192.0)), eager=Curve((1, 4096), (1002.0, 9192.0)),
    host_full=HostCost(10.0), host_piecewise=HostCost(10.0), host_eager=HostCost(9000.0),
)  # fmt: skip
SHIPPED = Path(profiles.__path__[0])
LADDER = CaptureSizes((1, 2, 4, 8, 16, 32), (), (64, 128, 256, 512, 1024, 2048))


def served(pace, objective="latency"):
    """Twenty prompts of 1,500 tokens at once, behind eight requests that decode."""
    load = trace_of(*[(0.0, 16, 400)] * 8, *[(5.0, 1500, 20)] * 20)
    limits = Settings(max_num_reqs=32, max_num_tokens=2048)
    return simulate(
        load, "auto", server=Server(settings=limits, warm=True, pace=pace, steps_ahead=1), costs=SLOW_EAGER,
        ladder=LADDER, objective=objective,
    )  # fmt: skip


def test_what_graphs_gain_over_vllm_goes_into_the_gap():
    """Prompts take no longer than by vLLM's rule in whole steps, and decodes wait for much less of them at once."""
    whole, own, vllm = served(None), served("auto"), served("vllm:version=0.23")
    stock = simulate(
        trace_of(*[(0.0, 16, 400)] * 8, *[(5.0, 1500, 20)] * 20), "vllm:version=0.23",
        server=Server(settings=Settings(max_num_reqs=32, max_num_tokens=2048), warm=True, steps_ahead=1),
        costs=SLOW_EAGER,
    )  # fmt: skip
    assert vllm.gap.p99 < 0.7 * own.gap.p99 < 0.7 * 0.7 * whole.gap.p99
    assert whole.ttft.p99 < own.ttft.p99 < vllm.ttft.p99 <= stock.ttft.p99
    assert vllm.tokens == whole.tokens == stock.tokens


@pytest.mark.parametrize(("context", "num_decodes"), [(64, 64), (8000, 64), (16000, 64), (16000, 128)])
def test_first_tokens_are_no_later_behind_decodes_of_long_contexts(context, num_decodes):
    """Each further step reads all decode rows' KV again, and prompts attend to themselves: both are in the bound."""
    costs = read_profile(SHIPPED / "qwen2.5-0.5b-h200.json").costs
    # A slow host for eager steps, so that graphs have something to gain over vLLM's rule.
    costs = attrs.evolve(costs, host_eager=attrs.evolve(costs.host_eager, base_us=3 * costs.host_eager.base_us))
    load = trace_of(*[(0.0, context, 600)] * num_decodes, *[(30.0 + 0.3 * i, 8000, 4) for i in range(40)])
    limits = Settings(max_num_reqs=256, max_num_tokens=8192)
    pieces = CaptureSizes((1, 2, 4, 8, 16, 32, 64, 128, 256), (), (64, 128, 256, 512, 1024, 2048, 4096))

    def times(policy, pace, ladder):
        server = Server(settings=limits, warm=True, pace=pace, steps_ahead=1, kv_tokens=6_000_000,
                        kv_bytes_per_token=None)  # fmt: skip
        return simulate(load, policy, server=server, costs=costs, ladder=ladder, objective=Objective(0.0, 1.0, 1.0))

    stock, whole = times("vllm:version=0.23", None, None), times("auto", None, pieces)
    paced = times("auto", "vllm:version=0.23", pieces)
    assert paced.ttft.p50 <= stock.ttft.p50
    assert paced.ttft.p99 <= stock.ttft.p99
    if context <= 8000:
        assert paced.gap.p99 < 0.6 * whole.gap.p99, "what graphs gain is spent on the gap"


def test_prompts_in_line_have_a_place():
    """A step's line holds prompts that run and those that there are rows for; it tells all KV, the decodes' too."""
    queue = Queue(Settings(max_num_reqs=3, max_num_tokens=64), num_blocks=100)
    asked = []

    class Asked:
        def prompt_tokens(self, first, num_decodes, _num_prompts, line):
            assert first == (1, 0)
            asked.append((num_decodes, line()))
            return 64 - num_decodes

    queue.pace = Asked()
    for order in range(5):
        queue.add(Request(TraceRequest(order, 0.0, 40, 9, ()), 0.0))
    for _ in range(3):
        step = queue.next_step(0.0)
        queue.complete(step, 1)
    # 64 of the first two prompts' 80 tokens ran, and the third has the one place left; then all places are taken.
    pairs = 16 * 24 + 16 * 17 // 2 + 40 * 41 // 2
    assert asked == [(1, (2, 56, 2, pairs, 41))]


def test_an_answer_stands_while_all_places_decode():
    """Steps that no prompt can enter use up nothing of an answer, whether they go through the scheduler or not."""
    load = trace_of(*[(0.4 * i, 90, 3 + i % 7) for i in range(40)])
    limits = attrs.evolve(LIMITS, max_num_reqs=3, max_num_tokens=64)
    of = server(300, settings=limits, pace="vllm")
    results = [
        simulate(load, "piecewise", server=of, costs=COSTS, objective="1:1", stepwise=each).as_dict()
        for each in (False, True)
    ]
    assert results[0] == results[1]


def test_throughput_fills_steps():
    """Where only whole cycles count, a step with more tokens is the cheaper one, save for what is only padding."""
    paced, whole = served("vllm:version=0.23", "throughput"), served(None, "throughput")
    assert paced.gap.p99 == whole.gap.p99
    assert 0.99 * whole.step_us < paced.step_us <= whole.step_us


@given(traces(), st.sampled_from(("auto", "vllm")), st.sampled_from(("auto", "eager")), st.integers(1, 3))
@run_settings(max_examples=60)
def test_every_request_is_served_whatever_a_step_holds(trace, policy, pace, ranks):
    """Bounded steps still make way with every prompt, keep all decodes, and stay under the limit."""
    seen: list[SimStep] = []
    result = simulate(
        trace, policy, costs=COSTS, ladder=SIZES, objective="latency", on_step=seen.append,
        server=Server(settings=LIMITS, kv_tokens=200, block_size=4, prefix_block=4, kv_bytes_per_token=None,
                      warm=True, ranks=ranks, pace=pace),
    )  # fmt: skip
    assert result.served + sum(result.refused.values()) == len(trace)
    assert all(each.step.numbers.total_tokens <= LIMITS.max_num_tokens for each in seen)


def test_a_policy_that_is_not_known_is_named():
    with pytest.raises(UnknownNameError, match="fastest"):
        served("fastest")
