"""What a simulated server must keep: every request and token, every block, and the promises of each feature."""

from __future__ import annotations

import json
import math
from itertools import groupby
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as run_settings
from hypothesis import strategies as st

from kpolicy.budgets import Budget
from kpolicy.errors import ConfigError
from kpolicy.scheduling.traces import TraceRequest
from kpolicy.settings import Settings
from kpolicy.simulate import Drafts, Server, ServiceLevel, SimResult, SimStep, simulate
from kpolicy.simulate.account import Account
from kpolicy.simulate.drafts import drawn
from kpolicy.simulate.queue import Queue
from kpolicy.simulate.requests import Request

from .helpers import COSTS, LIMITS, SIZES, hash_lists, run, server, trace_of, traces, with_ids

DRAFTING = Settings(max_num_reqs=6, max_num_tokens=40, num_speculative_tokens=3)


def blocks_add_up(queue: Queue) -> None:
    """Free blocks, cached ones and those of every request are all there are."""
    blocks = queue.blocks
    decoding, prefilling = list(queue.rows.rows.values()), list(queue.prefilling)
    own = sum(each.blocks - len(each.held) * blocks.per_hash for each in prefilling)
    # A decode row's own count is as of its joining; what came since is told by its tokens.
    grown = blocks.num_blocks - blocks.free - blocks.cached - own
    least = 0
    for row in decoding:
        tokens = row.start + (queue.rows.counter - row.joined)
        least += max(-(-tokens // queue.block_size), row.blocks) - len(row.held) * blocks.per_hash
    assert grown >= least >= 0
    assert blocks.free >= 0
    if not decoding:
        assert grown == 0


@given(
    traces(), hash_lists, st.sampled_from(("auto", "vllm", "split")), st.booleans(), st.integers(1, 3),
    st.sampled_from((LIMITS, DRAFTING)), st.sampled_from(((30, 4), (16, 8))),
)  # fmt: skip
@run_settings(max_examples=150)
def test_requests_tokens_and_blocks_are_conserved(trace, hashes, policy, prefix, ranks, limits, blocks):
    """Every request is served whole or refused, chunks cover every prompt, and blocks never leak."""
    trace = with_ids(trace, hashes)
    num_blocks, block_size = blocks
    seen: list[SimStep] = []
    queues: set[Queue] = set()

    def look(step: SimStep) -> None:
        seen.append(step)
        queues.add(step.queue)
        if limits is LIMITS:
            blocks_add_up(step.queue)
        numbers = step.step.numbers
        assert 0 < numbers.total_tokens <= limits.max_num_tokens
        assert numbers.total_reqs <= limits.max_num_reqs
        assert step.step.shape().numbers == numbers

    of = Server(
        settings=limits, kv_tokens=num_blocks * block_size, block_size=block_size, kv_bytes_per_token=None,
        reuse_prefixes=prefix, prefix_block=8, ranks=ranks, drafts=Drafts(acceptance=0.6),
    )  # fmt: skip
    result = simulate(trace, policy, server=of, costs=COSTS, ladder=SIZES if limits is LIMITS else None, on_step=look)
    refused = sum(result.refused.values())
    assert result.served + refused == len(trace)
    assert result.tokens == result.ttft.count + result.gap.count
    assert (result.ttft.count, result.e2e.count) == (result.served, result.served)
    if not refused:
        assert result.tokens == sum(each.output_tokens for each in trace.requests)
        prompts = sum(each.prompt_tokens for each in trace.requests)
        computed = sum(each.step.numbers.num_prefill_tokens for each in seen)
        assert result.prompt_tokens == prompts
        if not result.preemptions:
            assert computed + result.reused_tokens == prompts
    for queue in queues:
        assert queue.idle
        assert queue.blocks.available == num_blocks
        assert (queue.rows.kv_tokens, queue.rows.longest) == (0, 0)


def test_preemption_computes_again_and_serves_all():
    """With KV for one and a half requests the later one gives way, is computed again, and still gets its tokens."""
    trace = trace_of((0, 20, 24), (0.01, 20, 24))
    result, steps = run(trace, "eager", of=server(num_blocks=15, block_size=4))
    assert result.preemptions >= 1
    assert (result.served, result.tokens) == (2, 48)
    prefilled = sum(each.step.numbers.num_prefill_tokens for each in steps)
    assert prefilled > 40
    roomy, _ = run(trace, "eager", of=server(num_blocks=40, block_size=4))
    assert roomy.preemptions == 0
    assert roomy.e2e.max < result.e2e.max


def test_equal_prompts_are_computed_once():
    """A second prompt with the same blocks starts behind them, but computes its last token; other ids don't match."""
    same = [(1, 2, 3), (1, 2, 3), (1, 9), (4,)]
    trace = trace_of(*[(i * 1e4, 1536, 2) for i in range(4)], hash_ids=same)
    of = Server(settings=Settings(max_num_tokens=4096), kv_tokens=64_000, warm=True)
    result = simulate(trace, "eager", server=of)
    # The second finds blocks 1 and 2 (its last block holds the last token); the third finds block 1.
    assert result.reused_tokens == 1024 + 512
    assert result.prompt_tokens == 4 * 1536
    without = simulate(trace, "eager", server=Server(settings=of.settings, kv_tokens=64_000, reuse_prefixes=False))
    assert without.reused_tokens == 0
    assert without.tokens_computed == result.tokens_computed + result.reused_tokens


def test_a_preemption_counts_no_prompt_again():
    """Prompts that give way and find their own blocks in the cache again are counted once, and as not found."""
    trace = trace_of((0, 24, 24), (0.01, 24, 24), hash_ids=[(1, 2, 3), (4, 5, 6)])
    of = server(num_blocks=20, block_size=4, reuse_prefixes=True, prefix_block=8)
    result, steps = run(trace, "eager", of=of)
    assert result.preemptions >= 1
    assert (result.prompt_tokens, result.reused_tokens) == (48, 0)
    readmitted = [start for each in steps[1:] for _, _, start in each.step.chunks]
    assert any(readmitted), "its own blocks were there, and it started behind them"


def test_cached_blocks_give_way_oldest_first():
    """Where KV is short the block that nobody used for longest is computed again, and the others are still there."""
    ids = [(1,), (2,), (3,), (2,), (1,)]
    trace = trace_of(*[(i * 1e4, 600, 1) for i in range(5)], hash_ids=ids)
    # Two cached blocks leave 470 tokens, too few for the third prompt's 600.
    result = simulate(trace, "eager", server=Server(settings=Settings(max_num_tokens=1024), kv_tokens=1500))
    assert result.served == 5
    # Block 1 gave way for the third prompt, so only the fourth one finds its own.
    assert result.reused_tokens == 512


def test_prefix_blocks_must_be_whole_kv_blocks():
    """A KV block size that doesn't divide 512 can't share prefixes, and the error says so."""
    with pytest.raises(ConfigError, match="512 tokens, which isn't a whole number of KV blocks of 48"):
        simulate(trace_of((0, 5, 1)), server=Server(block_size=48))


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.8, 1.0])
def test_drafts_are_accepted_as_often_as_stated(acceptance):
    """Tokens a step follow from the probability: the sum of its powers up to k."""
    request = Request(TraceRequest(7, 0.0, 10, 200_001), 0.0)
    request.generated = 1
    tokens = drawn(3, request, 3, acceptance)
    assert tokens.sum() == 200_000
    expected = sum(acceptance**i for i in range(4))
    assert tokens[:-1].mean() == pytest.approx(expected, rel=0.02)
    assert tokens.tolist() == drawn(3, request, 3, acceptance).tolist()
    assert (drawn(4, request, 3, 0.5)[:50].tolist() == drawn(3, request, 3, 0.5)[:50].tolist()) is False


def test_drafting_takes_fewer_steps_and_counts_what_it_drafted():
    """Full acceptance brings 1 + k tokens a step; none brings one, and costs the verification all the same."""
    trace = trace_of((0, 8, 41))
    by_acceptance = {}
    for acceptance in (0.0, 1.0):
        of = Server(settings=DRAFTING, kv_tokens=4000, drafts=Drafts(acceptance=acceptance, draft_us=50.0), warm=True)
        result, steps = run(trace, of=of, ladder=None)
        decodes = [each for each in steps if each.step.numbers.num_decodes]
        assert {each.step.numbers.query_len for each in decodes} == {4}
        assert result.drafted == 3 * len(decodes)
        assert result.tokens == 41
        by_acceptance[acceptance] = len(decodes), result.accepted
    assert by_acceptance == {0.0: (40, 0), 1.0: (10, 30)}


def test_a_speculative_step_spreads_its_tokens_over_its_time():
    """Gaps are the step's time over the tokens it brought, so that their sum is the time that passed."""
    of = Server(settings=DRAFTING, kv_tokens=4000, drafts=Drafts(acceptance=0.7), warm=True)
    result, _ = run(trace_of((0, 8, 60)), of=of, ladder=None)
    assert result.gap.mean * result.gap.count == pytest.approx(result.e2e.max - result.ttft.max)


@given(traces(), st.sampled_from(("auto", "vllm", "sglang", "full_and_piecewise")), st.integers(2, 4))
@run_settings(max_examples=60)
def test_ranks_run_the_same_mode_and_graphs(trace, policy, ranks):
    """In every step all ranks replay the same keys, and it takes as long as the slowest."""
    result, steps = run(trace, policy, of=server(ranks=ranks))
    assert result.served == len(trace)
    assert sum(result.reasons.values()) == ranks * result.steps
    for _, group in groupby(steps, key=lambda each: each.number):
        together = list(group)
        assert len({(each.decision.mode, each.decision.keys, each.cycle_us) for each in together}) == 1
        for each in together:
            assert each.cycle_us >= COSTS.cost(each.decision.launches, each.step.numbers).cycle_us


def test_requests_go_to_the_rank_with_the_fewest():
    """Four requests at once on two ranks are two on each."""
    _, steps = run(trace_of(*[(0, 5, 3)] * 4), of=server(ranks=2))
    assert [(each.rank, each.step.numbers.num_prefills) for each in steps if each.number == 0] == [(0, 2), (1, 2)]


def test_captures_delay_the_first_request_and_take_kv():
    """A cold server starts after its captures, and its KV is short of what graphs take."""
    trace = trace_of((5, 5, 2), (90, 5, 2))
    warm, _ = run(trace, "full", of=server(kv_bytes_per_token=100, num_blocks=100, block_size=1))
    cold, _ = run(trace, "full", of=server(kv_bytes_per_token=100, num_blocks=100, block_size=1, warm=False))
    assert warm.capture_s == pytest.approx(6e-3)
    assert cold.ttft.max - warm.ttft.max == pytest.approx(cold.capture_s * 1e6)
    assert (warm.started_after_s, cold.started_after_s) == (0.0, cold.capture_s)
    assert warm.graph_bytes == 6000
    assert warm.kv_tokens == 100 - 60
    with pytest.raises(ConfigError, match="nothing is left for requests"):
        run(trace, "full", of=server(kv_bytes_per_token=100, num_blocks=60, block_size=1))


@given(traces(most_output=12), st.integers(1, 4), st.integers(1, 2))
@run_settings(max_examples=40)
def test_a_closed_loop_has_no_more_requests_inside_than_clients(trace, clients, ranks):
    """Each answer lets the next request in, whose wait outside isn't its time; stretches change nothing."""
    of = server(concurrency=clients, ranks=ranks)
    result, steps = run(trace, of=of)
    assert result.served == len(trace)
    for _, group in groupby(steps, key=lambda each: each.number):
        assert sum(each.queue.num_running + len(each.queue.waiting) for each in group) <= clients
    fast = simulate(trace, server=of, costs=COSTS, ladder=SIZES)
    assert fast.as_dict() == result.as_dict()


def test_clients_one_by_one_never_wait():
    """One client's first tokens take one prefill each, however early the trace says it would have asked."""
    result, _ = run(trace_of(*[(0, 8, 5)] * 6), "eager", of=server(concurrency=1))
    open_loop, _ = run(trace_of(*[(0, 8, 5)] * 6), "eager")
    assert result.ttft.p50 == pytest.approx(result.ttft.max)
    assert open_loop.ttft.max > result.ttft.max


def test_clients_who_are_free_ask_when_the_trace_says():
    """With a client for each request nothing is another than without a limit; what an answer lets in comes then."""
    trace = trace_of((0, 8, 5), (0.5, 8, 5), (1, 8, 5), (2, 30, 9), (50, 4, 3))
    open_loop, _ = run(trace, "eager")
    assert (open_loop.delayed, open_loop.most_delayed_s, open_loop.delays) == (0, 0.0, "")
    for clients in (5, 400):
        assert run(trace, "eager", of=server(concurrency=clients))[0] == open_loop
    one, _ = run(trace_of((0, 8, 5), (0.5, 8, 5), (5, 8, 5)), "eager", of=server(concurrency=1))
    assert one.e2e.p50 == pytest.approx(one.e2e.max)
    assert (one.delayed, one.most_delayed_s) == (1, pytest.approx(one.e2e.max / 1e6 - 0.0005))
    said = "33.3% of the requests came up to {} later than the trace says"
    assert one.delays.startswith(said.format(f"{one.most_delayed_s * 1e3:.3g} ms"))
    assert attrs.evolve(one, most_delayed_s=0.000012).delays.startswith(said.format("0.012 ms"))
    assert attrs.evolve(one, most_delayed_s=1234.56).delays.startswith(said.format("1,234.6 s"))


def test_a_client_who_was_free_before_the_answer_takes_the_first_of_two():
    """Of two that come while a step ends the only other request, one is in time and one waits for that answer."""
    result, steps = run(trace_of((0, 30, 1), (0.1, 4, 2), (0.2, 4, 2)), "eager", of=server(concurrency=2))
    assert steps[0].cycle_us > 200
    assert (result.delayed, result.most_delayed_s) == (1, pytest.approx((steps[0].cycle_us - 200) / 1e6))


def test_the_longest_delay_is_told_whichever_it_is():
    """The second request waits for a long answer, the third for the end of a short one."""
    long, _ = run(trace_of((0, 8, 12)), "eager")
    almost_ms = long.e2e.max / 1e3 - 0.01
    result, _ = run(trace_of((0, 8, 12), (0.1, 8, 3), (almost_ms, 8, 3)), "eager", of=server(concurrency=1))
    assert (result.delayed, result.most_delayed_s) == (2, pytest.approx(long.e2e.max / 1e6 - 0.0001))


def test_a_result_is_made_without_saying_what_came_late():
    """As before there were clients."""
    result, _ = run(trace_of((0, 8, 2)), "eager")
    given = attrs.asdict(result, recurse=False)
    del given["delayed"], given["most_delayed_s"]
    assert SimResult(**given) == result


def test_a_request_that_is_refused_keeps_no_client():
    """One that no KV holds lets the next one ask at its own time."""
    result, _ = run(trace_of((0, 4, 2), (0.1, 5000, 2), (0.2, 4, 2)), "eager", of=server(concurrency=2))
    assert (result.refused, result.delayed) == ({"over_kv_capacity": 1}, 0)
    result, _ = run(trace_of((0, 8, 50), (0.1, 5000, 2)), "eager", of=server(concurrency=1))
    assert (result.refused, result.delayed, result.delays) == ({"over_kv_capacity": 1}, 0, "")


def test_a_budget_bounds_captures():
    """What the budget refuses isn't captured, and the result says why."""
    result, _ = run(trace_of((0, 5, 2)), budget=Budget(seconds=0.0025), ladder=None)
    assert result.not_captured == {"budget_seconds": result.not_captured["budget_seconds"]}
    assert result.capture_s <= 0.0025


def test_goodput_counts_requests_that_meet_every_limit():
    """A request is good where its first token and its own mean gap are in time."""
    trace = trace_of((0, 5, 3), (0.001, 30, 3))
    plain, _ = run(trace, "eager")
    loose, _ = run(trace, "eager", of=server(service_level=ServiceLevel(gap_ms=1e6)))
    assert (loose.goodput.good, loose.goodput.share) == (2, 1.0)
    between = (plain.ttft.p50 + plain.ttft.max) / 2e3
    assert plain.ttft.p50 < plain.ttft.max
    strict, _ = run(trace, "eager", of=server(service_level=ServiceLevel(ttft_ms=between)))
    assert (strict.goodput.good, strict.goodput.share) == (1, 0.5)
    assert strict.goodput.per_s == pytest.approx(1 / strict.span_s)
    slow, _ = run(trace, "eager", of=server(service_level=ServiceLevel(gap_ms=0.001)))
    assert slow.goodput.good == 0


def test_without_a_service_level_there_is_no_goodput():
    """No request was held to anything, so none is good or bad, whether one was served or not."""
    for trace in (trace_of((0, 5, 3)), trace_of((0, 10**6, 3))):
        result, _ = run(trace, "eager")
        nothing = dict.fromkeys(("ttft_ms", "gap_ms", "good", "share", "per_s"))
        assert result.as_dict()["goodput"] == attrs.asdict(result.goodput) == nothing
    level, _ = run(trace, "eager", of=server(service_level=ServiceLevel(ttft_ms=1)))
    assert (level.served, level.goodput.good, level.goodput.share, level.goodput.per_s) == (0, 0, 0.0, 0.0)


def test_the_schedulers_own_time_is_in_every_step_and_more_in_those_with_prompts():
    """A step takes the executor's time, the scheduler's, and with prompts what those take it besides."""
    trace = trace_of((0, 5, 6), (0.9, 20, 3))
    of = server(30, 4, scheduler_us=11.5, scheduler_prompt_us=300.25)
    _, steps = run(trace, "piecewise", of=of)
    assert [each.step.numbers.num_prefills for each in steps].count(0) > 1
    for each in steps:
        bare = COSTS.cost(each.decision.launches, each.step.numbers).cycle_us
        assert each.cycle_us == pytest.approx(bare + 11.5 + (300.25 if each.step.chunks else 0))
    with pytest.raises(ConfigError, match="scheduler_prompt_us is -1"):
        Server(scheduler_prompt_us=-1)


def test_time_is_told_by_the_side_that_bounds_it():
    """Host-bound and device-bound steps add up to all of them, and eager small steps are the host's."""
    result, steps = run(trace_of((0, 5, 6)), "eager")
    assert result.bound["host"].steps == len(steps)
    assert result.bound["host"].us == pytest.approx(sum(each.cycle_us for each in steps))
    assert result.bound["device"].steps == 0


def test_requests_out_of_order_are_refused_by_name():
    """An iterable is checked as it is read."""
    requests = [TraceRequest(0, 1.0, 5, 5), TraceRequest(1, 0.5, 5, 5)]
    with pytest.raises(ConfigError, match=r"request 1 arrives at 0\.5 s, after one"):
        simulate(iter(requests))
    with pytest.raises(ConfigError, match="request 0 has 0 prompt"):
        simulate(iter([TraceRequest(0, 1.0, 0, 5)]))
    with pytest.raises(ConfigError, match="must be finite"):
        simulate(iter([TraceRequest(0, math.nan, 5, 5)]))


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ((0, None, 5, 5), "arrives at None s"),
        ((0, 1e12, 5, 5), r"arrives at 1000000000000\.0 s.*under 9e\+09 s"),
        ((0, 0.0, 5.5, 5), r"request 0 has 5\.5 prompt"),
        ((0, 0.0, "5", 5), "request 0 has '5' prompt"),
        ((-1, 0.0, 5, 5), "its index from 0 up"),
    ],
)
def test_requests_that_are_none_are_refused_by_name(request_, said):
    """Numbers of another kind, and times at which microseconds are no longer told apart."""
    with pytest.raises(ConfigError, match=said):
        simulate([TraceRequest(*request_)])


def test_numbers_of_another_library_are_pythons_in_the_result():
    """A trace of numpy's numbers, as of a data frame's rows, gives the same bytes."""
    plain = [(i, 0.1 * i, 5 + i, 3) for i in range(4)]
    others = [(np.int64(i), np.float64(at), np.int32(prompt), np.int64(out)) for i, at, prompt, out in plain]
    both = [simulate([TraceRequest(*each) for each in requests]).as_dict() for requests in (plain, others)]
    assert json.dumps(both[0]) == json.dumps(both[1])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"trace": "trace.csv"}, r"trace is 'trace\.csv'; it takes a Trace"),
        ({"trace": None}, "trace is None; it takes a Trace"),
        ({"trace": [{"arrival_s": 0.0}]}, "it takes a TraceRequest"),
        ({"server": {"kv_tokens": 4}}, "it takes a Server"),
        ({"seed": -1}, "seed is -1; it must be a whole number"),
        ({"seed": 0.5}, r"seed is 0\.5"),
        ({"host_speed": [(0, 1.0)]}, "it takes a HostSpeeds"),
    ],
)
def test_arguments_of_another_kind_are_named(arguments, said):
    with pytest.raises(ConfigError, match=said):
        simulate(**({"trace": []} | arguments))


@pytest.mark.parametrize(
    "given_",
    [
        {"kv_bytes_per_token": math.nan}, {"kv_bytes_per_token": 2.5}, {"concurrency": 1.5}, {"concurrency": True},
        {"scheduler_us": "3"}, {"drafts": None}, {"service_level": None}, {"settings": None}, {"kv_tokens": "9"},
    ],
)  # fmt: skip
def test_a_server_of_no_such_values_is_refused(given_):
    """By the field's name. Bytes that are no number left no room for any request, and nobody said so."""
    with pytest.raises(ConfigError, match=f"^{next(iter(given_))} is "):
        Server(**given_)
    with pytest.raises(ConfigError, match="acceptance is 'high'"):
        Drafts(acceptance="high")
    with pytest.raises(ConfigError, match="ttft_ms is '9'"):
        ServiceLevel(ttft_ms="9")


def test_a_prompt_of_a_million_tokens_is_served_in_chunks_or_refused():
    """With KV for it it is chunked; without, it is handed back with a reason."""
    trace = trace_of((0, 1_000_000, 3), (1, 10, 3))
    result = simulate(trace, "vllm", server=Server(kv_tokens=1_100_000, warm=True))
    assert (result.served, result.tokens_computed) == (2, 1_000_010 + 4)
    small = simulate(trace, "vllm")
    assert (small.served, small.refused) == (1, {"over_kv_capacity": 1})


def test_an_interrupt_keeps_what_was_done():
    """Ctrl-C ends the run with the sums so far."""

    def stop(step: SimStep) -> None:
        if step.number == 5:
            raise KeyboardInterrupt

    result = simulate(trace_of(*[(i, 5, 4) for i in range(9)]), "eager", costs=COSTS, on_step=stop)
    assert result.interrupted
    assert 0 < result.served < 9


def test_a_requests_gap_is_over_the_tokens_after_its_first() -> None:
    """Two tokens have one gap: a limit below it isn't met, one above it is."""
    trace = trace_of((0, 8, 2))
    gap_ms = run(trace, "eager")[0].gap.max / 1e3
    for limit, good in ((gap_ms * 0.75, 0), (gap_ms * 1.01, 1)):
        assert run(trace, "eager", of=server(service_level=ServiceLevel(gap_ms=limit)))[0].goodput.good == good


def test_the_last_drafts_need_room_too() -> None:
    """A request whose last drafts still fit is served; with one token more it is handed back, and the run ends."""
    of = server(10, settings=DRAFTING, drafts=Drafts(acceptance=0.5))
    for prompt, served in ((30, 1), (31, 0)):
        result, _ = run(trace_of((0, prompt, 8)), "eager", of=of, ladder=None)
        assert (result.served, dict(result.refused)) == (served, {} if served else {"over_kv_capacity": 1})


def test_part_of_a_tokens_kv_is_taken_whole() -> None:
    """Graphs of one byte more than whole KV tokens take a token more."""
    of = Server(kv_tokens=160, block_size=16, kv_bytes_per_token=100)
    assert [of.blocks(graph_bytes) for graph_bytes in (0, 1, 1600, 1601)] == [10, 9, 9, 8]


@pytest.mark.parametrize("policy", ["split", "split:form=beside", "split:form=decodes_beside", "auto", "full"])
@pytest.mark.parametrize("num_blocks", [400, 60])
def test_gaps_of_a_request_add_up_to_its_time_between_tokens(
    policy: str, num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a step's halves take, and where rows give way behind one: from each first token to each last one."""
    between: list[float] = []
    finish = Account.finish

    def noted(self: Account, request: Any, now_us: float) -> None:
        between.append(now_us - request.first_us)
        finish(self, request, now_us)

    monkeypatch.setattr(Account, "finish", noted)
    trace = trace_of(*[(0.4 * i, 5 + 7 * i % 40, 2 + i % 9) for i in range(60)])
    result = simulate(trace, policy, server=server(num_blocks, 1), costs=COSTS, ladder=SIZES, stepwise=True)
    assert result.served == 60
    assert bool(result.preemptions) is (num_blocks == 60)
    assert result.gap.mean * result.gap.count == pytest.approx(sum(between))
