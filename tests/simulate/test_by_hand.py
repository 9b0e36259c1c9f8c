"""The simulator against a server told as simply as can be (`by_hand`), and times that are worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import pytest
from hypothesis import given
from hypothesis import settings as run_settings
from hypothesis import strategies as st

from kpolicy.scheduling.traces import Trace
from kpolicy.settings import Settings
from kpolicy.simulate import Drafts, Server, ServiceLevel, SimResult, simulate
from kpolicy.simulate.account import Account
from kpolicy.simulate.percentiles import Spread
from kpolicy.simulate.requests import Request

from .by_hand import ALIKE, serve, sizes
from .helpers import COSTS, SIZES, hash_lists, reference, trace_of, traces, with_ids

# Halves hide nearly all of each other, and long prompts keep them apart.
BESIDE = attrs.evolve(COSTS, overlap_cost=0.1, prefill_attention=attrs.evolve(COSTS.prefill_attention, row_us=9.0))
SPLITS = ("split", "split:form=beside", "split:form=decodes_beside")
BLOCKS = ((60, 1), (15, 4), (40, 4), (16, 2), (12, 8))
LEVEL = ServiceLevel(ttft_ms=0.9013, gap_ms=0.0837)
"""About half of the requests are good by it, and none is just so"""


@st.composite
def servers(draw: st.DrawFn, ranks: int = 1) -> Server:
    """Small servers with every feature, each of them on or off."""
    drafts = draw(st.sampled_from([0, 0, 2]))
    num_blocks, block_size = draw(st.sampled_from(BLOCKS))
    takes_kv = draw(st.booleans())
    return Server(
        settings=Settings(max_num_reqs=4, max_num_tokens=16, num_speculative_tokens=drafts),
        kv_tokens=num_blocks * block_size + (9 if takes_kv else 0),
        block_size=block_size,
        kv_bytes_per_token=1000 if takes_kv else None,
        reuse_prefixes=draw(st.booleans()),
        prefix_block=8,
        drafts=Drafts(acceptance=0.6, draft_us=draw(st.sampled_from([0.0, 7.0]))),
        ranks=ranks,
        steps_ahead=draw(st.sampled_from([1, 2, 8])),
        scheduler_us=draw(st.sampled_from([0.0, 11.0])),
        scheduler_prompt_us=draw(st.sampled_from([0.0, 5.0])),
        warm=draw(st.booleans()),
        concurrency=draw(st.sampled_from([None, 1, 2, 4])),
        service_level=LEVEL,
    )


def is_of(spread: Spread, values: Sequence[float]) -> None:
    """A spread is that of the values."""
    assert spread.count == len(values)
    if values:
        rising = sorted(values)
        wanted = [rising[math.ceil(len(rising) * percent / 100) - 1] for percent in (50, 90, 99)]
        assert [spread.p50, spread.p90, spread.p99, spread.max] == pytest.approx([*wanted, rising[-1]])
        assert spread.mean == pytest.approx(math.fsum(values) / len(values))


def agree(trace: Trace, policy: str, server: Server, seed: int, *, stepwise: bool) -> SimResult:
    """Every figure of a simulation is the one that comes of token times."""
    wanted = serve(trace.requests, policy, server, seed)
    got = simulate(
        trace, policy, server=server, costs=ALIKE, ladder=sizes(server.settings.query_len), seed=seed,
        stepwise=stepwise,
    )  # fmt: skip
    is_of(got.ttft, wanted.ttft)
    is_of(got.gap, wanted.gaps)
    is_of(got.e2e, wanted.e2e)
    assert got.span_s * 1e6 == pytest.approx(wanted.span_us)
    assert (got.served, sum(got.refused.values())) == (len(wanted.requests), wanted.refused)
    assert (got.preemptions, got.reused_tokens) == (wanted.preemptions, wanted.reused)
    assert got.prompt_tokens == wanted.prompt_tokens
    told = {mode: [each.steps, each.tokens, each.padding] for mode, each in got.modes.items()}
    assert told == {mode: each[:3] for mode, each in wanted.modes.items()}
    us = {mode: each.us for mode, each in got.modes.items()}
    assert us == pytest.approx({mode: each[3] for mode, each in wanted.modes.items()})
    assert (got.decode_steps, got.drafted) == (wanted.decode_steps, wanted.drafted)
    assert got.tokens == sum(each.output_tokens for each in wanted.requests)
    if server.service_level is LEVEL:
        assert got.goodput.good == wanted.good(901.3, 83.7)
    assert (got.delayed, got.most_delayed_s) == (
        len(wanted.delays), pytest.approx(max(wanted.delays, default=0.0) / 1e6),
    )  # fmt: skip
    # By `ALIKE` the host bounds eager steps and the device all others.
    assert got.bound["host"].us == pytest.approx(us.get("eager", 0.0))
    assert got.bound["device"].us == pytest.approx(sum(us.values()) - us.get("eager", 0.0))
    return got


SEEDS = st.integers(0, 1000)
TRACES = traces(most_prompt=40, most_output=20)


@given(TRACES, hash_lists, st.sampled_from(SPLITS), servers(), SEEDS, st.booleans())
@run_settings(max_examples=150)
def test_one_rank_does_as_by_hand(trace, hashes, policy, of, seed, stepwise):
    """Chunks, blocks, preemption, prefixes, drafts, clients, captures: all times follow from those of each token."""
    agree(with_ids(trace, hashes), policy, of, seed, stepwise=stepwise)


@given(TRACES, hash_lists, st.sampled_from(("eager", "piecewise")), st.integers(1, 3).flatmap(servers), SEEDS)
@run_settings(max_examples=80)
def test_ranks_do_as_by_hand(trace, hashes, policy, of, seed):
    """Ranks step together, and replay the graph of the one with the most tokens."""
    agree(with_ids(trace, hashes), policy, of, seed, stepwise=False)


@given(
    traces(), hash_lists, st.sampled_from(("auto", "vllm", *SPLITS)), st.sampled_from([0, 2]), st.integers(1, 3),
    st.sampled_from([(90, 1), (30, 4), (16, 8)]), st.sampled_from([COSTS, BESIDE]), st.sampled_from([None, 3]),
)  # fmt: skip
@run_settings(max_examples=150)
def test_gaps_add_up_to_the_time_between_first_and_last_tokens(
    trace, hashes, policy, drafts, ranks, blocks, costs, clients
):  # fmt: skip
    """A gap goes from one token to the next whatever lies between: halves, drafts, preemption, slower ranks."""
    between = []

    class Noted(Account):
        def finish(self, request: Request, now_us: float) -> None:
            between.append(now_us - request.first_us)
            super().finish(request, now_us)

    num_blocks, block_size = blocks
    of = Server(
        settings=Settings(max_num_reqs=6, max_num_tokens=32, num_speculative_tokens=drafts), block_size=block_size,
        kv_tokens=num_blocks * block_size, kv_bytes_per_token=None, prefix_block=8, ranks=ranks,
        drafts=Drafts(acceptance=0.6), concurrency=clients,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kpolicy.simulate.run.Account", Noted)
        result = simulate(with_ids(trace, hashes), policy, server=of, costs=costs, ladder=None if drafts else SIZES)
    assert len(between) == result.served
    assert min(between, default=0.0) >= 0
    assert result.gap.mean * result.gap.count == pytest.approx(math.fsum(between))


def given_way() -> tuple[Trace, Server]:
    """Three blocks of four tokens: behind a step in halves two rows want one more each, and one of them gives way."""
    trace = trace_of((0, 3, 3), (0, 3, 3), (0.1, 2, 1))
    limits = Settings(max_num_reqs=4, max_num_tokens=16)
    of = Server(settings=limits, kv_tokens=12, block_size=4, kv_bytes_per_token=None, reuse_prefixes=False, warm=True)
    return trace, of


@pytest.mark.parametrize(("policy", "ready_us", "over_us"), [("split", 70, 270), ("split:form=beside", 80, 260)])
def test_a_row_that_gives_way_behind_halves_by_hand(policy: str, ready_us: float, over_us: float) -> None:
    """Its gap counts from its last token, which was there when the decode half was done; by tokens and by counts.

    Two prompts take 230 us. In halves a third one is computed beside their second tokens, from 20 us on, when these are
    launched, and alone until then. One row goes on for 70 us; the other waits for its blocks, and is computed again in
    230 us.
    """
    trace, of = given_way()
    got = agree(trace, policy, of, 0, stepwise=False)
    assert got.preemptions == 1
    goes_on, again = over_us - ready_us + 70, over_us - ready_us + 70 + 230
    is_of(got.gap, [ready_us, ready_us, goes_on, again])
    assert got.gap.max == again
    by_tokens, _ = reference(
        trace, policy, num_blocks=3, block_size=4, settings=of.settings, costs=ALIKE, ladder=sizes(1)
    )
    assert by_tokens.preemptions == 1
    assert by_tokens.gap_us == (ready_us, again)


def test_an_answer_is_there_when_its_last_token_is_by_hand() -> None:
    """Its client asks again then, and not when the prompt half is over too.

    The first request has its answer at 300 us, 70 into a step of 270. The third, which wanted to come at 100, comes
    then; it gets one token of the next step's sixteen (500 to 730) and is done with the one after, at 960.
    """
    trace = trace_of((0, 4, 2), (0.1, 30, 1), (0.1, 4, 1))
    of = Server(settings=Settings(max_num_reqs=4, max_num_tokens=16), kv_bytes_per_token=None, warm=True, concurrency=2)
    got = agree(trace, "split", of, 0, stepwise=False)
    is_of(got.ttft, [230, 630, 660])
    assert (got.delayed, got.most_delayed_s) == (1, pytest.approx(200e-6))


def test_drafted_rows_wait_for_their_own_token_by_hand() -> None:
    """Behind a step in halves a row that was in it waited for the prompt half, and one whose prompt that was didn't.

    No draft is accepted. The first row has its second token 70 us into a step of 270, and its third 200 + 70 later;
    the second row has its first one at that step's end, and its second 70 later.
    """
    trace = trace_of((0, 4, 3), (0.1, 4, 2))
    limits = Settings(max_num_reqs=4, max_num_tokens=16, num_speculative_tokens=2)
    of = Server(settings=limits, kv_bytes_per_token=None, warm=True, drafts=Drafts(acceptance=0.0))
    got = agree(trace, "split", of, 0, stepwise=False)
    is_of(got.gap, [70, 270, 70])
