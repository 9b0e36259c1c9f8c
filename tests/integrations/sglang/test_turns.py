"""How many prompt tokens a step may have while decodes run."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kpolicy.settings import Objective
from kpolicy_sglang import hooks
from kpolicy_sglang.config import Config
from kpolicy_sglang.phase import DECODE, PREFILL, Phase, table_of
from kpolicy_sglang.split import split_of
from kpolicy_sglang.state import State
from kpolicy_sglang.turns import Turns
from tests.integrations.sglang.fake_sglang import pretended
from tests.integrations.sglang.test_split import Scheduler, limited, scheduler_of, state_of

PROMPT_US = {64: 4000, 512: 4000, 1024: 4300, 2048: 7500, 3072: 11_200, 4096: 15_000, 8192: 30_000}
DECODE_US = {1: 1370, 256: 1970, 600: 2910}


def state_with(*, prefix_is_eager=False, **settings):
    """A small dense model on a large GPU."""
    state = State(Config(**settings), "0.5.16")
    state.prefix_is_eager = prefix_is_eager
    for name, us, full in ((DECODE, DECODE_US, True), (PREFILL, PROMPT_US, False)):
        phase = state.phases[name] = Phase(name, tuple(us), max(us), full=full)
        phase.install("auto", table_of("made up", us, {size: 3 * each for size, each in us.items()}), Objective())
    return state


@pytest.mark.parametrize(
    ("decodes", "most", "tokens"),
    [
        (600, 600, 3072),  # 4 x 2.91 ms
        (300, 600, 4096),  # the graph of 600 as well, but twice as long
        (8, 600, 8192),  # a decode step for few isn't worth many prompts' time
        (1, 1, 1024),  # 4 x 1.37 ms, but 1,024 tokens are served as fast as any
    ],
)
def test_prompts_leave_decodes_their_share(decodes, most, tokens):
    """The prompts of a step take four times a decode step's time, more while most rows still wait."""
    assert Turns(state_with(), 8192).tokens(decodes, most) == tokens


@given(st.integers(1, 600), st.integers(0, 600), st.sampled_from([0.1, 0.2, 0.3]), st.sampled_from([None, 0.1, 9, 40]))
def test_prompts_are_bounded(decodes, waiting, share, gap_ms):
    """Never none, never over the chunk or the limit on gaps; more rows that wait never make it less."""
    turns = Turns(state_with(decode_share=share, gap_ms=gap_ms), 8192)
    tokens = turns.tokens(decodes, decodes + waiting)
    assert 64 <= tokens <= turns.limit <= 8192
    assert turns.tokens(decodes, decodes + waiting + 1) >= tokens


@pytest.mark.parametrize(("gap_ms", "tokens"), [(11.4, 512), (11.3, 64), (0.1, 64), (30.0, 512), (100.0, 2048)])
def test_limit_on_gaps_bounds_the_prompts_of_a_step(gap_ms, tokens):
    """As many prompt tokens as take no longer; never none."""
    state = state_of(mixed_us=40_000)
    state.config = Config(gap_ms=gap_ms, decode_share=0)
    assert Turns(state, 2048).tokens(8, 8) == tokens


def test_prompts_that_would_lose_their_graph_are_not_cut():
    """On 0.5.16 the rest of a cut MLA prompt has cached tokens before it, and no graph."""
    assert Turns(state_with(prefix_is_eager=True), 8192).tokens(600, 600) == 8192


@pytest.mark.parametrize("case", ["off", "no chunk", "no costs", "on"])
def test_off(case):
    """Without a share, without chunks and without costs the order is SGLang's."""
    state = state_with(decode_share=0.0 if case == "off" else 0.2)
    if case == "no costs":
        state.phases[PREFILL].costs = None
    assert Turns(state, 0 if case == "no chunk" else 8192).on == (case == "on")


def test_decodes_have_a_turn_after_each_batch_of_prompts():
    """SGLang would run prompt after prompt while decodes wait; mixed batches have decodes in them anyway."""
    scheduler = scheduler_of(state_of(mixed_us=1), waiting=3, mixed=False)
    running, seen = SimpleNamespace(reqs=[0] * 8), []

    def own(scheduler, running):
        seen.append(scheduler.chunked_prefill_size)
        return Scheduler.get_new_batch_prefill(scheduler, running)

    with pretended("0.5.16"):
        ran = [hooks.new_batch_prefill(own, scheduler, running).batch_to_run or "decode" for _ in range(6)]
    assert ran == ["extend", "decode"] * 3
    assert all(64 <= tokens <= 2048 for tokens in seen)
    assert scheduler.chunked_prefill_size == 2048
    mixed = scheduler_of(state_of(mixed_us=1), waiting=3)
    mixed.tp_worker.model_runner._kpolicy_state.config = Config(split=False)
    assert [hooks.new_batch_prefill(own, mixed, running).batch_to_run for _ in range(3)] == ["mixed"] * 3
    assert seen[-3:] == [2048] * 3


def test_interval_of_sglangs_own_goes_before_the_share():
    """Who gave SGLang 0.5.23 an interval of decode steps gets that one."""
    scheduler = scheduler_of(state_of(mixed_us=1), mixed=False)
    scheduler.prefill_decode_interval = 3
    assert split_of(scheduler) is None


def test_gap_limit_holds_mixed_batches_too():
    """Decodes in a mixed batch wait for its prompts."""
    scheduler, seen = limited(11.4, waiting=3), []
    scheduler.is_mixed_chunk = True
    scheduler.tp_worker.model_runner._kpolicy_state.config = Config(gap_ms=11.4, split=False)
    hooks.new_batch_prefill(lambda s, _: seen.append(s.chunked_prefill_size), scheduler, SimpleNamespace(reqs=[0]))
    assert seen == [512]
