"""`serve_trace`: the clock, what it counts, and that every request is served rightly."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as run_settings
from hypothesis import strategies as st

from kpolicy import trace_run
from kpolicy.costs import CostTable, Curve, HostCost
from kpolicy.engine import Engine
from kpolicy.executors.base import StepOutputs
from kpolicy.executors.simulated import SimulatedExecutor
from kpolicy.ladders import CaptureSizes
from kpolicy.scheduling.batching import Batcher
from kpolicy.scheduling.traces import Trace, TraceRequest
from kpolicy.settings import Settings
from kpolicy.shapes import BatchShape
from kpolicy.trace_run import Prompts, RunResult, WallClock, reference_check, serve_trace, weighted_percentile

LIMITS = Settings(max_num_reqs=4, max_num_tokens=16)
SIZES = CaptureSizes((1, 2, 4), (8, 16), (8, 16))
VOCAB = 300
STEP_US = 1000.0
PROMPTS = Prompts(seed=1, vocab=VOCAB)
# Every step takes a millisecond, whatever is in it: sums can be worked out by hand.
FLAT = CostTable(
    version="flat",
    measured=True,
    full=Curve((1,), (STEP_US,)),
    piecewise=Curve((1,), (STEP_US,)),
    eager=Curve((1,), (STEP_US,)),
    host_full=HostCost(1.0),
    host_piecewise=HostCost(1.0),
    host_eager=HostCost(1.0),
)


def trace(*requests: tuple[float, int, int]) -> Trace:
    """A trace of (arrival in ms, prompt tokens, tokens to generate)."""
    return Trace(
        source="drawn",
        format="drawn",
        requests=tuple(TraceRequest(i, each[0] / 1e3, each[1], each[2]) for i, each in enumerate(requests)),
        dropped={},
    )


def serve(
    requests: Trace,
    policy: str = "eager",
    *,
    num_blocks: int = 16,
    block_size: int = 4,
    check: bool = True,
    **rest: Any,
) -> RunResult:
    faults = rest.pop("faults", ())
    executor = SimulatedExecutor(FLAT, num_blocks=num_blocks, block_size=block_size, vocab=VOCAB, faults=faults)
    engine = Engine(policy, ladder=SIZES, settings=LIMITS, costs=FLAT, executor=executor)
    engine.capture()
    batcher = Batcher(LIMITS, num_blocks=num_blocks, block_size=block_size, steps_ahead=rest.pop("steps_ahead", 1))
    checked = reference_check(PROMPTS, 0) if check else None
    return serve_trace(requests, engine, batcher, PROMPTS, check=checked, **rest)


def test_one_request_takes_a_step_a_token() -> None:
    """A prompt in one step, then a decode step a token: times are what the steps take."""
    result = serve(trace((5.0, 10, 4)))
    assert (result.served, result.tokens, result.steps) == (1, 4, 4)
    assert result.span_s == pytest.approx(4e-3)
    assert result.ttft_us == (STEP_US, STEP_US)
    assert result.gap_us == (STEP_US, STEP_US)
    assert result.step_us == pytest.approx(4 * STEP_US)
    assert result.tokens_computed == 10 + 3
    assert (result.checked, result.wrong) == (1, ())


def test_the_clock_jumps_over_idle_time_and_waits_for_nobody() -> None:
    """Requests start when they arrive; between the first's end and the second's arrival nothing runs."""
    result = serve(trace((0, 4, 1), (50, 4, 2)))
    assert result.span_s == pytest.approx(52e-3)
    assert result.steps == 3
    assert result.ttft_us == (STEP_US, STEP_US)


def test_waiting_counts_towards_the_first_token() -> None:
    """A request that arrives in the middle of a step gets its first token at the end of the next one."""
    result = serve(trace((0, 16, 1), (0.5, 4, 1)))
    assert sorted(result.ttft_us) == [pytest.approx(STEP_US), pytest.approx(1.5 * STEP_US)]


def test_a_chunked_prompt_has_its_first_token_at_its_end() -> None:
    """A prompt of three chunks waits three steps."""
    assert serve(trace((0, 40, 1))).ttft_us == (3 * STEP_US, 3 * STEP_US)


def test_a_preempted_request_has_one_first_token_and_one_long_gap() -> None:
    """A request that lost its blocks after its first token has a gap over its absence, not a second first token."""
    result = serve(trace((0, 6, 8), (0, 6, 8)), num_blocks=4)
    assert result.preemptions > 0
    assert result.served == 2
    assert result.tokens == 16
    assert result.ttft_us == (STEP_US, STEP_US)
    assert result.gap_us[1] > result.gap_us[0] == STEP_US
    # Gaps of one request add up to its time from first to last token, so none is longer than the whole run.
    assert result.gap_us[1] <= result.span_s * 1e6


class _Watched(trace_run._Run):
    """A run that remembers when each request ended."""

    last: _Watched

    def account(self, batch: Any, outputs: Any) -> None:
        type(self).last = self
        before = len(self.served)
        super().account(batch, outputs)
        for request in self.served[before:]:
            self.ends = {**getattr(self, "ends", {}), request.index: self.now_us}


def watched(requests: Trace, num_blocks: int, monkeypatch: pytest.MonkeyPatch) -> _Watched:
    executor = SimulatedExecutor(FLAT, num_blocks=num_blocks, block_size=4, vocab=VOCAB)
    engine = Engine("eager", ladder=SIZES, settings=LIMITS, costs=FLAT, executor=executor)
    batcher = Batcher(LIMITS, num_blocks=num_blocks, block_size=4, steps_ahead=1)
    monkeypatch.setattr(trace_run, "_Run", _Watched)
    result = serve_trace(requests, engine, batcher, PROMPTS)
    assert result.served == len(requests)
    return _Watched.last


def check_times(run: _Watched, requests: Trace) -> None:
    """First tokens and gaps together account for every request's time from arrival to its last token."""
    assert len(run.ttft_us) == len(requests)
    assert sum(run.gaps.values()) == sum(each.output_tokens - 1 for each in requests.requests)
    spent = sum(run.ttft_us) + sum(gap * count for gap, count in run.gaps.items())
    assert spent == pytest.approx(sum(run.ends[i] - each.arrival_s * 1e6 for i, each in enumerate(requests.requests)))


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12), st.integers(1, 28)), min_size=1, max_size=8),
    st.integers(10, 14),
)
@run_settings(max_examples=60, deadline=None)
def test_times_add_up_under_preemption(drawn: list[tuple[int, int, int]], num_blocks: int) -> None:
    """Whatever gives way when, no time of any request is lost or counted twice."""
    requests = trace(*sorted(drawn))
    with pytest.MonkeyPatch.context() as monkeypatch:
        check_times(watched(requests, num_blocks, monkeypatch), requests)


def test_times_add_up_when_a_request_gives_way_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each absence of a request counts from its own last token, not from that of an earlier absence."""
    requests = trace((0, 4, 28), (0, 4, 28), (0, 4, 28))
    run = watched(requests, 12, monkeypatch)
    assert max(request.num_preempted for request in run.served) > 1
    check_times(run, requests)


def test_requests_that_can_never_fit_are_refused_and_counted() -> None:
    """A request over the KV capacity is handed back; the others are served."""
    result = serve(trace((0, 10, 2), (1, 100, 2), (2, 5, 3)))
    assert result.refused == {"over_kv_capacity": 1}
    assert result.served == 2


def test_an_empty_trace_is_a_run_of_nothing() -> None:
    """Nothing arrives, nothing runs."""
    result = serve(trace())
    assert (result.served, result.steps, result.span_s, result.ttft_us) == (0, 0, 0.0, (0.0, 0.0))


@pytest.mark.parametrize("policy", ["auto", "full_and_piecewise", "split:form=decodes_beside", "vllm"])
def test_every_policy_serves_the_same_requests_rightly(policy: str) -> None:
    """Same arrivals, every token right, whatever the policy; modes, reasons and graphs are counted."""
    requests = trace(*((3 * i, 1 + 7 * i % 29, 1 + i % 9) for i in range(40)))
    result = serve(requests, policy, steps_ahead=4)
    assert result.served == result.checked == 40
    assert result.wrong == ()
    assert result.steps == sum(result.reasons.values())
    assert result.graphs >= result.graphs_used > 0
    assert len(result.unused) == result.graphs - result.graphs_used
    assert json.loads(json.dumps(result.as_dict()))["served"] == 40


def test_wrong_tokens_are_named() -> None:
    """The check reports which requests differ."""
    executor = SimulatedExecutor(FLAT, num_blocks=16, block_size=4, vocab=VOCAB, seed=5)
    engine = Engine("eager", settings=LIMITS, costs=FLAT, executor=executor)
    batcher = Batcher(LIMITS, num_blocks=16, block_size=4)
    result = serve_trace(trace((0, 9, 3), (0, 4, 3)), engine, batcher, PROMPTS, check=reference_check(PROMPTS, 0))
    assert sorted(result.wrong) == [0, 1]


def test_a_lost_device_ends_the_run_and_hands_back_what_is_left() -> None:
    """Served and handed-back requests add up to the trace, and the result says what happened."""
    result = serve(trace(*((i, 4, 3) for i in range(10))), faults=["sticky@6"])
    assert "lost" in result.interrupted
    assert result.served + result.refused["device_lost"] == 10
    assert result.wrong == ()


def test_failed_replays_are_told() -> None:
    """A graph that failed is among those that couldn't be had, and the requests are served."""
    result = serve(trace((0, 6, 6), (0, 5, 6)), "full_and_piecewise", faults=["replay_fails@2", "capture_fails@1"])
    assert result.served == 2
    assert result.wrong == ()
    assert result.replay_failures == 1
    assert result.not_captured == {"replay_failed": 1, "capture_failed": 1}


def test_an_interrupt_keeps_what_was_done() -> None:
    """Ctrl-C ends the run with what was served so far."""

    def stop(step: int, *_: Any) -> None:
        if step == 5:
            raise KeyboardInterrupt

    result = serve(trace((0, 4, 3), (0, 4, 50)), on_step=stop)
    assert result.interrupted == "interrupted from the keyboard"
    assert result.served == 1


class _Ticking:
    """A clock whose every step takes so long, whatever the executor says, and that notes when it is stopped."""

    def __init__(self, us: float) -> None:
        self.us = us
        self.calls: list[str] = []

    def step_us(self, outputs: Any) -> float:  # noqa: ARG002 - it takes the same time for any
        self.calls.append("step")
        return self.us

    def pause(self) -> None:
        self.calls.append("pause")

    def resume(self) -> None:
        self.calls.append("resume")


def test_another_clock_says_what_time_it_is() -> None:
    """Times are the given clock's, and what it adds to the executor's is outside of it."""
    result = serve(trace((0, 4, 3), (50, 4, 1)), clock=_Ticking(5 * STEP_US))
    assert result.ttft_us == (5 * STEP_US, 5 * STEP_US)
    assert result.gap_us == (5 * STEP_US, 5 * STEP_US)
    assert result.span_s == pytest.approx(55e-3)
    assert result.step_us == pytest.approx(4 * STEP_US)
    assert result.outside_us == pytest.approx(4 * 4 * STEP_US)
    # Two of the four steps have a prompt.
    assert (result.prompt_steps, result.outside_prompts_us) == (2, pytest.approx(2 * 4 * STEP_US))
    assert serve(trace((0, 4, 3))).outside_us == 0


def test_hooks_run_while_the_clock_stands() -> None:
    """What is called before and after a step isn't the run's time; the step's start is told from the run's."""
    clock, starts = _Ticking(2 * STEP_US), []
    serve(
        trace((3, 4, 2)),
        clock=clock,
        before_step=lambda: clock.calls.append("before"),
        on_step=lambda *step: (clock.calls.append("on_step"), starts.append(step[-1])),
    )
    # The heap is frozen before the first.
    assert clock.calls == ["pause", "resume"] + ["pause", "before", "resume", "step", "pause", "on_step", "resume"] * 2
    assert starts == [STEP_US, 3 * STEP_US]


def test_the_wall_clock_leaves_pauses_out() -> None:
    """Time between pause and resume isn't a step's; the rest since the step before is."""
    clock = WallClock()
    clock.step_us(StepOutputs([], [], Engine("eager").decide(BatchShape.decode(1)), ()))
    time.sleep(0.02)
    clock.pause()
    time.sleep(0.2)
    clock.resume()
    passed = clock.step_us(StepOutputs([], [], Engine("eager").decide(BatchShape.decode(1)), ()))
    assert 20_000 <= passed < 150_000


def test_stop_tokens_end_requests_early() -> None:
    """A request ends with the first step that gives it one of them, and counts as served."""
    ended: list[list[int]] = []

    def keep(request: Any) -> bool:
        ended.append(request.generated)
        return True

    executor = SimulatedExecutor(FLAT, num_blocks=16, block_size=4, vocab=VOCAB)
    engine = Engine("eager", ladder=SIZES, settings=LIMITS, costs=FLAT, executor=executor)

    def run(stop_tokens: frozenset[int]) -> RunResult:
        batcher = Batcher(LIMITS, num_blocks=16, block_size=4, steps_ahead=1)
        return serve_trace(trace((0, 9, 12)), engine, batcher, PROMPTS, check=keep, stop_tokens=stop_tokens)

    run(frozenset())
    whole = ended.pop()
    assert run(frozenset({whole[4]})).served == 1
    assert ended == [whole[: whole.index(whole[4]) + 1]]


def test_a_stop_token_of_the_prompt_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is generated ends a request, also where the host samples and the device tells no tokens."""
    executor = SimulatedExecutor(FLAT, num_blocks=16, block_size=4, vocab=VOCAB)
    engine = Engine("eager", ladder=SIZES, settings=LIMITS, costs=FLAT, executor=executor)
    batcher = Batcher(LIMITS, num_blocks=16, block_size=4, steps_ahead=1)
    step, lengths = engine.step, list[int]()
    monkeypatch.setattr(engine, "step", lambda inputs: step(inputs)._replace(tokens=[], first_tokens=[]))

    def keep(request: Any) -> bool:
        lengths.append(len(request.generated))
        return True

    serve_trace(trace((0, 9, 12)), engine, batcher, PROMPTS, check=keep, stop_tokens={PROMPTS.of(0, 9)[0]})
    assert lengths == [12]


def test_cancelled_requests_are_counted() -> None:
    """A request that a hook cancels is handed back, and the other one is served."""

    def cancel(step: int, _inputs: Any, _outputs: Any, batcher: Batcher, _start_us: float) -> None:
        if step == 2:
            assert batcher.cancel(1)

    result = serve(trace((0, 4, 6), (0, 4, 6)), on_step=cancel)
    assert (result.served, result.refused) == (1, {"cancelled": 1})


def test_progress_ends_at_everything() -> None:
    """The last progress says how many of how many."""
    told: list[tuple[int, int]] = []
    serve(trace((0, 4, 3), (0, 4, 2)), progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (2, 2)


@given(st.lists(st.tuples(st.floats(0, 1e6), st.integers(1, 9)), min_size=1, max_size=20), st.integers(0, 100))
def test_percentiles_of_weighted_values(values: list[tuple[float, int]], percent: int) -> None:
    """At least the percentage of the weight lies at or below it, and less than that below any smaller value."""
    values = sorted(values)
    found = weighted_percentile(values, percent)
    total = sum(weight for _, weight in values)
    assert sum(weight for value, weight in values if value <= found) * 100 >= percent * total
    below = sum(weight for value, weight in values if value < found)
    assert not below or below * 100 < percent * total
    assert weighted_percentile([], percent) == 0.0


def test_prompts_are_seeded_and_share_prefixes_where_hashes_do() -> None:
    """Equal seeds give equal prompts of the right length, equal hash blocks equal tokens, other requests others."""
    prompts = Prompts(seed=3, vocab=100, block=8)
    assert prompts.of(0, 50) == Prompts(seed=3, vocab=100, block=8).of(0, 50)
    assert prompts.of(0, 50) != Prompts(seed=4, vocab=100, block=8).of(0, 50)
    first, second = prompts.of(1, 30, (7, 8, 9)), prompts.of(2, 30, (7, 8, 10))
    assert len(first) == len(second) == 30
    assert first[:16] == second[:16]
    assert first[16:24] != second[16:24]
    assert all(0 <= token < 100 for token in first)
    assert len(prompts.of(3, 300_000)) == 300_000
