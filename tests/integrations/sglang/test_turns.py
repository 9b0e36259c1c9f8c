"""When a decode step comes between two batches of prompts."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kpolicy.settings import Objective
from kpolicy_sglang import hooks
from kpolicy_sglang.config import Config
from kpolicy_sglang.phase import DECODE, PREFILL, Phase, table_of
from kpolicy_sglang.split import split_of
from kpolicy_sglang.state import State, attach
from kpolicy_sglang.turns import Turns, aligned
from tests.integrations.sglang.fake_sglang import pretended
from tests.integrations.sglang.test_split import Scheduler, limited, scheduler_of, state_of

PROMPT_US = {64: 4000, 512: 4000, 1024: 4300, 2048: 7500, 3072: 11_200, 4096: 15_000, 8192: 30_000}
DECODE_US = {1: 1370, 256: 1970, 600: 2910}


def state_with(**settings):
    """A small dense model on a large GPU."""
    state = State(Config(**settings), "0.5.16")
    for name, us, full in ((DECODE, DECODE_US, True), (PREFILL, PROMPT_US, False)):
        phase = state.phases[name] = Phase(name, tuple(us), max(us), full=full)
        phase.install("auto", table_of("made up", us, {size: 3 * each for size, each in us.items()}), Objective())
    return state


class Prompts:
    """A scheduler with prompts of so many tokens in its queue, run whole as far as a chunk goes."""

    def __init__(self, prompts, *, decodes=8, room=592, **settings):
        runner = SimpleNamespace()
        attach(runner, state_with(**settings))
        self.tp_worker = SimpleNamespace(model_runner=runner)
        self.waiting_queue = [SimpleNamespace(origin_input_ids=range(tokens)) for tokens in prompts]
        self.chunked_req, self.is_mixed_chunk, self.chunked_prefill_size = None, False, 8192
        self.max_running_requests = decodes + room
        self.running = SimpleNamespace(reqs=[0] * decodes)

    def own(self, _, running):
        """SGLang's own batch: as many whole prompts as fit into the chunk and there is room for."""
        room, tokens, taken = self.max_running_requests - len(running.reqs), 0, []
        while self.waiting_queue and len(taken) < room:
            prompt = self.waiting_queue[0].origin_input_ids
            if taken and tokens + len(prompt) > self.chunked_prefill_size:
                break
            taken.append(self.waiting_queue.pop(0))
            tokens += len(prompt)
        batch = SimpleNamespace(extend_num_tokens=tokens) if taken else None
        running.reqs.extend([0] * len(taken))
        return SimpleNamespace(batch_to_run=batch, running_batch=running)

    def run(self, steps):
        """Prompt tokens of each step; 0 for a decode step."""
        found = []
        with pretended("0.5.16"):
            for _ in range(steps):
                batch = hooks.new_batch_prefill(self.own, self, self.running).batch_to_run
                found.append(batch.extend_num_tokens if batch else 0)
        return found


def test_decodes_wait_for_less_than_a_chunk():
    """A chunk and a decode step take 31.4 ms: after 3,072 tokens (11.2 ms) as many may follow, but 4,096 not."""
    assert Prompts([4096]).run(2) == [4096, 0]
    late = Prompts([3072])
    assert late.run(1) == [3072]
    late.waiting_queue = [SimpleNamespace(origin_input_ids=range(3072))]
    assert late.run(2) == [3072, 0]
    late = Prompts([3072])
    assert late.run(1) == [3072]
    late.waiting_queue = [SimpleNamespace(origin_input_ids=range(4096))]
    assert late.run(3) == [0, 4096, 0]


def test_decodes_have_a_turn_after_a_whole_chunk():
    """Two chunks wait: a decode step comes between them."""
    scheduler = Prompts([8192, 8000])
    assert scheduler.run(3) == [8192, 0, 8000]
    assert split_of(scheduler).cycles["in turns"] == 1


def test_a_burst_is_served_in_sglangs_order():
    """More than two chunks wait: prompts go first until none does; then decodes have turns again."""
    scheduler = Prompts([8192] * 4)
    assert scheduler.run(5) == [8192] * 4 + [0]
    scheduler.waiting_queue = [SimpleNamespace(origin_input_ids=range(8192)) for _ in range(2)]
    assert scheduler.run(3) == [8192, 0, 8192]


def test_more_prompts_than_decodes_are_a_burst():
    """A decode step for two rows would hold up three prompts; with three of each the rows have their turn."""
    assert Prompts([4096] * 3, decodes=2).run(3) == [8192, 4096, 0]
    assert Prompts([4096] * 3, decodes=3).run(3) == [8192, 0, 4096]


def test_what_has_no_room_is_no_burst():
    """A long queue in front of a full server: those that may run are counted, and a batch that isn't had ends it."""
    scheduler = Prompts([8192] * 9, room=2)
    assert scheduler.run(5) == [8192, 0, 8192, 0, 0]
    scheduler.max_running_requests += 2
    assert scheduler.run(3) == [8192, 0, 8192]


def test_no_decodes_no_turns():
    """With nothing that decodes prompts run as SGLang has them."""
    scheduler = Prompts([8192, 8192], decodes=0)
    first = scheduler.run(1)
    scheduler.running.reqs.clear()
    assert first + scheduler.run(1) == [8192, 8192]


@given(
    st.lists(st.integers(1, 8192), max_size=60), st.integers(1, 500), st.integers(0, 100),
    st.sampled_from([None, 0.1, 9.0, 40.0]),
)  # fmt: skip
def test_every_prompt_runs_and_waits_are_bounded(prompts, decodes, room, gap_ms):
    """Nothing is lost or held up for ever; outside bursts no two decode steps are further apart than the bound."""
    scheduler = Prompts(prompts, decodes=decodes, room=room, gap_ms=gap_ms)
    turns = split_of(scheduler).turns
    steps = scheduler.run(2 * len(prompts) + 2)
    served = min(len(prompts), room)
    assert sum(steps) == sum(prompts[:served])
    assert steps[-1] == 0
    if gap_ms is None and sum(prompts) <= 2 * 8192 and served <= decodes:
        since = 0.0
        for tokens in steps:
            since = since + turns.prompts_us(tokens) if tokens else 0.0
            assert since <= 30_000 + turns.decode_us(decodes + served)


@pytest.mark.parametrize(("gap_ms", "tokens"), [(11.4, 512), (11.3, 64), (0.1, 64), (30.0, 512), (100.0, 2048)])
def test_limit_on_gaps_bounds_the_prompts_of_a_step(gap_ms, tokens):
    """As many prompt tokens as take no longer; never none."""
    state = state_of(mixed_us=40_000)
    state.config = Config(gap_ms=gap_ms, turns=False)
    assert Turns(state, 2048).limit == tokens


@pytest.mark.parametrize(("align", "tokens"), [(1, 64), (48, 48), (64, 64), (256, 256), (4096, 2048)])
def test_a_cut_prompt_has_whole_pages(align, tokens):
    """SGLang rounds a cut prompt down to pages, and runs none that has less than one: prompts would wait for ever."""
    state = state_of(mixed_us=40_000)
    state.config = Config(gap_ms=1.0)
    assert Turns(state, 2048, align=align).limit == tokens


def test_alignment_is_sglangs():
    """Pages, and the blocks of a deterministic attention where that is on."""
    assert aligned(SimpleNamespace()) == 1
    assert aligned(SimpleNamespace(page_size=64, truncation_align_size=None)) == 64
    assert aligned(SimpleNamespace(page_size=16, truncation_align_size=24)) == 48


@pytest.mark.parametrize("case", ["off", "no chunk", "no costs", "an interval", "on"])
def test_off(case):
    """Switched off, without chunks, without costs and with an interval of SGLang's the order is SGLang's."""
    state = state_with(turns=case != "off")
    if case == "no costs":
        state.phases[PREFILL].costs = None
    turns = Turns(state, 0 if case == "no chunk" else 8192, own=case == "an interval")
    assert turns.on == (case == "on")


def test_mixed_batches_need_no_turns():
    """They have decodes in them."""
    seen = []

    def own(scheduler, running):
        seen.append(scheduler.chunked_prefill_size)
        return Scheduler.get_new_batch_prefill(scheduler, running)

    mixed = scheduler_of(state_of(mixed_us=1), waiting=3)
    mixed.tp_worker.model_runner._kpolicy_state.config = Config(split=False)
    running = SimpleNamespace(reqs=[0] * 8)
    assert [hooks.new_batch_prefill(own, mixed, running).batch_to_run for _ in range(3)] == ["mixed"] * 3
    assert seen == [2048] * 3


def test_interval_of_sglangs_own_goes_before_turns():
    """Who gave SGLang 0.5.23 an interval of decode steps gets that one."""
    scheduler = scheduler_of(state_of(mixed_us=1), mixed=False)
    scheduler.prefill_decode_interval = 3
    assert split_of(scheduler) is None


def test_gap_limit_holds_mixed_batches_too():
    """Decodes in a mixed batch wait for its prompts."""
    scheduler, seen = limited(11.4, waiting=3), []
    scheduler.is_mixed_chunk = True

    def own(scheduler, running):
        seen.append(scheduler.chunked_prefill_size)
        return Scheduler.get_new_batch_prefill(scheduler, running)

    scheduler.tp_worker.model_runner._kpolicy_state.config = Config(gap_ms=11.4, split=False)
    hooks.new_batch_prefill(own, scheduler, SimpleNamespace(reqs=[0]))
    assert seen == [512]
