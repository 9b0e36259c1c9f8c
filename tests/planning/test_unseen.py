"""Decode steps larger than any that a plan was made for."""

from __future__ import annotations

import attrs
import pytest

from kpolicy.attention.support import Claims
from kpolicy.ladders import CaptureSizes
from kpolicy.planning import Histogram, Workload
from kpolicy.planning.unseen import unseen
from kpolicy.policies import get_policy
from kpolicy.scheduling.traces import Trace, TraceRequest
from kpolicy.shapes import BatchNumbers
from kpolicy.step_effects import StepEffects
from kpolicy.trace_plan import layout_of, plan_trace
from tests.planning.workloads import costs, server, trace


def workload(largest: int, policy: str = "sglang", kv_tokens: int = 1) -> Workload:
    """Decode steps of up to so many requests with so much KV a row, on a server of 64."""
    steps, settings = Histogram("made up"), server().settings
    for reqs in range(1, largest + 1):
        steps.add(BatchNumbers(reqs, decode_kv_tokens=reqs * kv_tokens))
    layout = layout_of(get_policy(policy), Claims.at_level("mixed"), settings)
    return Workload(histogram=steps, costs=costs(), settings=settings, layout=layout)


def step_us(reqs: int, size: int = 0, kv_tokens: int = 1) -> float:
    """A step of so many rows in a graph of that size, by default their own, by the test's table."""
    return 1000 + 20 * ((size or reqs) - 1) + 5 + reqs + 0.01 * reqs * kv_tokens + 100


def test_it_pads_to_the_next_graph() -> None:
    """The first step above those that were seen pads most."""
    found = unseen(workload(20), CaptureSizes((8, 24, 64), (), ()))
    assert found is not None
    assert found[:3] == (20, 25, 64)
    assert found.worse == pytest.approx(step_us(25, 64) / step_us(25) - 1)
    pads = attrs.evolve(workload(20), costs=costs(padding_us=(170.0, 0.0)))
    found = unseen(pads, CaptureSizes((8, 24, 64), (), ()))
    assert found is not None
    assert found.worse == pytest.approx((step_us(25, 64) + 170) / step_us(25) - 1)


def test_cheap_padding_is_not_much_worse() -> None:
    """Where rows of padding read few experts the step pads as far, and takes little longer."""
    experts = attrs.evolve(workload(20), costs=costs(effects=StepEffects(padding_share=(0.25, 1.0))))
    found = unseen(experts, CaptureSizes((8, 24, 64), (), ()))
    assert found is not None
    assert found[:3] == (20, 25, 64)
    assert found.worse == pytest.approx((step_us(25, 26) + 0.25 * 20 * 38) / step_us(25) - 1)


def test_it_is_eager_without_one() -> None:
    """Above the largest graph a step runs eagerly, which its launches bound."""
    found = unseen(workload(20), CaptureSizes((8, 20), (), ()))
    assert found is not None
    assert found[:3] == (20, 21, 0)
    assert found.worse == pytest.approx((4000 + 2 * 21 + 100) / step_us(21) - 1)


def test_attention_hides_launches() -> None:
    """Where rows keep the device busy for longer than eager launches take, a step without a graph takes no longer."""
    found = unseen(workload(20, kv_tokens=20_000), CaptureSizes((8, 20), (), ()))
    assert found is not None
    assert found[:3] == (20, 21, 0)
    assert found.worse == 0
    padded = unseen(workload(20, kv_tokens=2_000), CaptureSizes((8, 24, 64), (), ()))
    assert padded is not None
    assert padded.worse == pytest.approx(step_us(25, 64, 2_000) / step_us(25, kv_tokens=2_000) - 1)


def test_none_is_larger() -> None:
    """Steps of as many requests as may run leave none that weren't seen; so does a policy without FULL."""
    assert unseen(workload(64), CaptureSizes((8, 64), (), ())) is None
    assert unseen(workload(63), CaptureSizes((8, 64), (), ())) == (63, 64, 64, 0)
    assert unseen(workload(20, "vllm:mode=PIECEWISE"), CaptureSizes((), (), (8, 64))) is None


@pytest.mark.parametrize(("gap_s", "said"), [(1.0, True), (0.001, False)])
def test_a_plan_says_so(gap_s: float, *, said: bool) -> None:
    """A plan for a quiet trace says what a busier one would pay, and one for a busy trace doesn't."""
    found = plan_trace(
        trace(80, gap_s=gap_s), policy="sglang", server=server(), costs=costs(), largest={"decode": 64}, most_sizes=5,
        hold_out=False,
    )  # fmt: skip
    assert any("may run: one of 2 replays the graph of 22" in note for note in found.notes) == said


def test_a_light_trace_leaves_room() -> None:
    """Smoothing gives a quiet trace's plan sizes to the most requests that may run, without a budget too."""
    lists = {
        smoothing: plan_trace(
            trace(80, gap_s=1.0), policy="sglang", server=server(), costs=costs(), smoothing=smoothing, hold_out=False
        ).plan.lists["decode"]
        for smoothing in (0.0, 0.1)
    }
    assert lists[0.0][-1] == 1
    assert lists[0.1][-1] == 64
    assert len(lists[0.1]) > 3


def test_a_list_of_which_no_step_was_seen_has_room_too() -> None:
    """Requests of one token make no decode step: the list of decodes has sizes for some, and a note says so."""
    alone = Trace("t", "generated", [TraceRequest(i, 0.1 * i, 20 + 7 * i % 90, 1) for i in range(40)])
    given = {"policy": "sglang", "server": server(), "costs": costs(), "hold_out": False}
    found = plan_trace(alone, **given)
    assert not found.replayed.histogram.decodes
    assert found.plan.lists["decode"][-1] == 64
    assert found.plan.lists["prefill"]
    assert any(note.startswith("no step has decodes alone, and 64 may run: one of ") for note in found.notes)
    assert plan_trace(alone, smoothing=0.0, **given).plan.lists["decode"] == ()
