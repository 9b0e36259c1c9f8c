"""The simulator against `kpolicy run`'s simulated device, its own plain loop, and a second process."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import settings as run_settings
from hypothesis import strategies as st

from kpolicy.decision import Decision
from kpolicy.engine import Engine
from kpolicy.ladders import CaptureSizes
from kpolicy.policies import OWN
from kpolicy.scheduling.traces import Trace
from kpolicy.settings import Settings
from kpolicy.shapes import BatchShape
from kpolicy.simulate import simulate
from kpolicy.step_effects import StepEffects
from kpolicy.testing.ranks import ThreadCommunicator, run_ranks

from .helpers import COSTS, LIMITS, SIZES, hash_lists, reference, run, server, trace_of, traces, with_ids

POLICIES = ("auto", "vllm", "split", "eager", "piecewise", "sglang")


@given(
    traces(), st.sampled_from(POLICIES), st.sampled_from([(30, 4), (21, 4), (9, 16), (90, 1)]), st.integers(1, 8),
    st.sampled_from([("throughput", None), ("latency", None), ("latency", "vllm"), ("0:1:2", "eager")]),
)  # fmt: skip
@run_settings(max_examples=120)
def test_steps_and_clock_are_those_of_a_run_by_tokens(trace, policy, blocks, steps_ahead, asked):
    """Same batches, same decisions, same times to the last bit, and the same latencies."""
    (num_blocks, block_size), (objective, pace) = blocks, asked
    wanted, steps = reference(
        trace, policy, num_blocks=num_blocks, block_size=block_size, steps_ahead=steps_ahead, objective=objective,
        pace=pace,
    )  # fmt: skip
    got, seen = run(
        trace, policy, of=server(num_blocks, block_size, steps_ahead=steps_ahead, pace=pace), objective=objective
    )
    assert [(each.step.numbers, each.decision, each.cycle_us) for each in seen] == [
        (numbers, decision, cycle_us) for numbers, decision, _start, cycle_us in steps
    ]
    assert [each.start_us for each in seen] == pytest.approx([start for _, _, start, _ in steps])
    assert (got.served, got.tokens, got.preemptions) == (wanted.served, wanted.tokens, wanted.preemptions)
    assert got.refused == wanted.refused
    assert got.span_s == wanted.span_s
    assert (got.ttft.p50, got.ttft.p99) == wanted.ttft_us
    assert (got.gap.p50, got.gap.p99) == wanted.gap_us
    assert got.reasons == wanted.reasons
    assert {mode: (each.steps, each.tokens, each.padding) for mode, each in got.modes.items()} == {
        mode: (each.steps, each.tokens, each.padding) for mode, each in wanted.modes.items()
    }
    assert (got.graphs, got.graphs_used, got.unused) == (wanted.graphs, wanted.graphs_used, wanted.unused)


SHOWN = attrs.evolve(COSTS, effects=StepEffects(warm_host_share=(0.7, 0.9), eager_new_us=55.5))
"""Steps in a row and eager steps of known sizes take the host less."""


@given(traces(most_output=80), st.sampled_from(POLICIES))
@run_settings(max_examples=60)
def test_stretches_know_what_ran_before(trace, policy):
    """Steps of one mode in a row, and sizes that ran before, are told apart the same way in stretches."""
    plain = simulate(trace, policy, server=server(60), costs=SHOWN, ladder=SIZES, stepwise=True)
    assert simulate(trace, policy, server=server(60), costs=SHOWN, ladder=SIZES).as_dict() == plain.as_dict()


@given(traces(most_output=80), st.sampled_from(POLICIES), st.sampled_from([30, 60]))
@run_settings(max_examples=60)
def test_decodes_told_at_once_are_the_steps(trace, policy, num_blocks):
    """Each step is told once, to one of the two, in order and with the same times, decision and KV tokens."""
    _, wanted = run(trace, policy, of=server(num_blocks))
    got = []

    def one(step):
        got.append((step.number, step.start_us, step.cycle_us, step.decision, step.step.numbers.decode_kv_tokens))

    def several(steps):
        decisions = [decision for decision, count in steps.decisions for _ in range(count)]
        kv_tokens, now_us = steps.numbers.decode_kv_tokens, steps.now_us
        for i, (us, decision) in enumerate(zip(steps.cycles_us, decisions, strict=True)):
            got.append((steps.number + i, now_us - steps.origin_us, us, decision, kv_tokens))
            kv_tokens, now_us = kv_tokens + steps.numbers.num_decodes, now_us + us
        assert steps.kv_tokens == sum(each[-1] for each in got[-len(decisions) :])

    simulate(trace, policy, server=server(num_blocks), costs=COSTS, ladder=SIZES, on_step=one, on_decodes=several)
    assert got == [
        (each.number, each.start_us, each.cycle_us, each.decision, each.step.numbers.decode_kv_tokens)
        for each in wanted
    ]


@given(
    traces(most_output=80), hash_lists, st.sampled_from(POLICIES), st.sampled_from([(30, 4), (60, 4), (24, 8)]),
    st.sampled_from([0.0, 33.3]),
)  # fmt: skip
@run_settings(max_examples=100)
def test_stretches_change_nothing(trace, hashes, policy, blocks, scheduler_us):
    """Running decode steps without the scheduler gives the very result of going through it each step."""
    trace, of = with_ids(trace, hashes), server(*blocks, reuse_prefixes=True, prefix_block=8, scheduler_us=scheduler_us)
    plain = simulate(trace, policy, server=of, costs=COSTS, ladder=SIZES, stepwise=True)
    assert simulate(trace, policy, server=of, costs=COSTS, ladder=SIZES).as_dict() == plain.as_dict()


@pytest.mark.parametrize("seed", [66, 173, 1283])
def test_stretches_add_up_alike(seed: int) -> None:
    """Decisions that one loop looks at sooner, among preemptions, change no bit of a sum."""
    drawn = random.Random(seed)  # noqa: S311
    trace = trace_of(
        *sorted(
            (round(drawn.random() * drawn.choice([0.2, 3, 20]), 6), drawn.randint(1, 30), drawn.randint(1, 12))
            for _ in range(drawn.randint(4, 14))
        )
    )
    stretched, plain = (
        simulate(trace, "vllm", server=server(21, 2), costs=COSTS, ladder=SIZES, stepwise=stepwise)
        for stepwise in (False, True)
    )
    assert plain.preemptions
    assert json.dumps(stretched.as_dict()) == json.dumps(plain.as_dict())


DRAFTING = Settings(max_num_reqs=6, max_num_tokens=40, num_speculative_tokens=2)
BUSY = trace_of(*[(0.4 * i, 3 + 7 * i % 40, 1 + 5 * i % 17) for i in range(12)])


def told(decision: Decision) -> tuple[Any, ...]:
    """A decision, less what it takes for granted."""
    return decision.mode, decision.launches, decision.form, decision.reason


@pytest.mark.parametrize("limits", [LIMITS, DRAFTING], ids=["plain", "drafting"])
@pytest.mark.parametrize("policy", sorted(OWN))
def test_decisions_are_the_engines(policy: str, limits: Settings) -> None:
    """Each step's decision is what an Engine says of its shape, by the readable path and by `select`."""
    ladder = SIZES if limits is LIMITS else CaptureSizes((3, 6, 12), (8, 16, 24), (8, 16))
    result, steps = run(BUSY, policy, of=server(settings=limits, num_blocks=60), ladder=ladder)
    assert result.served == len(BUSY)
    engine = Engine(policy, ladder=ladder, settings=limits, costs=COSTS)
    for each in steps:
        shape = each.step.shape()
        assert told(each.decision) == told(engine.policy.decide(shape, engine.context)) == told(engine.decide(shape))


@pytest.mark.parametrize("policy", ["auto", "vllm", "sglang", "split"])
def test_ranks_decide_as_engines_that_talk_to_each_other(policy: str) -> None:
    """Each rank's decision is that of an Engine with a communicator, given the same batches in the same order."""
    _, steps = run(BUSY, policy, of=server(ranks=3))
    shapes = {(each.number, each.rank): each.step.shape() for each in steps}
    last = max(each.number for each in steps)

    def decide(communicator: ThreadCommunicator) -> list[tuple[Any, ...]]:
        engine = Engine(policy, ladder=SIZES, settings=LIMITS, costs=COSTS, communicator=communicator)
        return [
            told(engine.decide(shapes.get((number, communicator.rank), BatchShape()))) for number in range(last + 1)
        ]

    by_rank = run_ranks(3, decide)
    for each in steps:
        assert told(each.decision) == by_rank[each.rank][each.number]


TWICE = """
import json, sys
from kpolicy.scheduling.generator import generate_trace
from kpolicy.settings import Settings
from kpolicy.simulate import Server, simulate
trace = generate_trace(num_requests=300, seed=3)
server = Server(settings=Settings(max_num_tokens=512, num_speculative_tokens=2), kv_tokens=20_000, ranks=2)
print(json.dumps([simulate(trace, policy, server=server, seed=5).as_dict() for policy in ("auto", "vllm")]))
"""


def test_equal_bytes_from_two_processes():
    """The JSON of a run with every feature is the same, byte for byte, whatever the hash seed of the process."""
    texts = [
        subprocess.run(
            [sys.executable, "-c", TWICE], capture_output=True, check=True, env=os.environ | {"PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("1", "77")
    ]
    assert texts[0] == texts[1]
    assert all(each["served"] == 300 and each["accepted"] > 0 for each in json.loads(texts[0]))


def test_an_empty_trace_is_an_empty_result():
    """Nothing to serve is served."""
    result = simulate(Trace("none", "drawn", []))
    assert (result.served, result.steps, result.span_s, result.ttft.count) == (0, 0, 0.0, 0)
