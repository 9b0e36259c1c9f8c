"""SPLIT at the scheduler: which cycles are split, in which order, and that no request is lost."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kpolicy.costs import Curve
from kpolicy.settings import Objective
from kpolicy_sglang import hooks
from kpolicy_sglang.config import Config
from kpolicy_sglang.phase import DECODE, PREFILL, MixedCost, Phase, table_of
from kpolicy_sglang.split import Split, split_of
from kpolicy_sglang.state import State, attach
from tests.integrations.sglang.fake_sglang import pretended


def state_of(*, mixed_us, decode_us=10_600, extend_us=11_400, eager_us=41_000):
    """What kpolicy measured: an MLA model by default."""
    state = State(Config(), "0.5.16")
    decode, prefill = Phase(DECODE, (32, 64), 64, full=True), Phase(PREFILL, (64, 512, 2048), 2048, full=False)
    decode.install("auto", table_of("d", {32: decode_us, 64: decode_us}, {32: 45_000}), Objective())
    prefill.install("auto", table_of("p", {64: extend_us, 512: extend_us, 2048: eager_us}, {64: eager_us}), Objective())
    state.phases = {DECODE: decode, PREFILL: prefill}
    curve = Curve((96, 544), (mixed_us, mixed_us))
    state.mixed = MixedCost(curve, curve, 2, 32)
    return state


class Scheduler:
    """A scheduler with a queue, as far as the hook looks."""

    def __init__(self, state=None, *, waiting=1, mixed=True):
        runner = SimpleNamespace()
        if state is not None:
            attach(runner, state)
        self.tp_worker = SimpleNamespace(model_runner=runner)
        self.waiting_queue = [SimpleNamespace(origin_input_ids=[0] * 64, prefix_len=0) for _ in range(waiting)]
        self.chunked_req = None
        self.chunked_prefill_size, self.max_running_requests = 2048, 64
        self.is_mixed_chunk = mixed
        self.ran = []

    def get_new_batch_prefill(self, running):
        """SGLang's own: a batch of what waits, with the decodes in it where it mixes."""
        if not self.waiting_queue:
            return SimpleNamespace(batch_to_run=None, running_batch=running)
        self.waiting_queue.pop(0)
        return SimpleNamespace(batch_to_run="mixed" if self.is_mixed_chunk else "extend", running_batch=running)


def run(scheduler, steps, decodes=32):
    """What the scheduler runs: decodes where it gets no prefill batch."""
    running = SimpleNamespace(reqs=[0] * decodes)
    ran = []
    with pretended("0.5.16"):
        for _ in range(steps):
            plan = hooks.new_batch_prefill(Scheduler.get_new_batch_prefill, scheduler, running)
            assert plan.running_batch is running
            ran.append(plan.batch_to_run or "decode")
            assert scheduler.is_mixed_chunk == scheduler.mixed_at_start
    return ran


def scheduler_of(state, **rest):
    scheduler = Scheduler(state, **rest)
    scheduler.mixed_at_start = scheduler.is_mixed_chunk
    return scheduler


def test_costly_mixed_batches_are_split():
    """40 ms mixed against 10.6 and 11.4: the halves run one after the other, and every prompt runs."""
    scheduler = scheduler_of(state_of(mixed_us=40_000), waiting=3)
    assert run(scheduler, 8) == ["decode", "extend"] * 3 + ["decode"] * 2
    assert not scheduler.waiting_queue
    assert split_of(scheduler).cycles == {"mixed": 0, "decode first": 3, "extend first": 0, "in turns": 0}


def test_cheap_mixed_batches_stay():
    """Where mixing costs less than both halves it is SGLang's own batch."""
    scheduler = scheduler_of(state_of(mixed_us=12_000), waiting=3)
    assert run(scheduler, 4) == ["mixed"] * 3 + ["decode"]


@pytest.mark.parametrize(
    ("decodes", "prompts", "order"),
    [(32, 1, "decode first"), (1, 8, "extend first"), (4, 4, "decode first"), (2, 4, "extend first")],
)
def test_first_is_what_serves_most_for_its_time(decodes, prompts, order):
    """The half with least time a request goes first, so that requests wait least."""
    split = Split(None, state_of(mixed_us=60_000))
    assert split.order(decodes, 64, prompts) == order


def test_extend_first_runs_its_decodes_next():
    """After the prompts the decodes run, before the next prompts."""
    scheduler = scheduler_of(state_of(mixed_us=40_000), waiting=8)
    assert run(scheduler, 6, decodes=1) == ["extend", "decode"] * 3


def test_cached_tokens_keep_an_mla_extend_eager():
    """On 0.5.16 a chunk with tokens before it has no graph, so its half costs what a mixed batch does."""
    state = state_of(mixed_us=40_000)
    split = Split(None, state)
    assert split.order(32, 64, 1, prefix=True) == "decode first"
    state.prefix_is_eager = True
    assert split.order(32, 64, 1, prefix=True) == "mixed"


@pytest.mark.parametrize("case", ["off", "not mixed", "coupled", "no costs", "no kpolicy"])
def test_left_to_sglang(case):
    """Without mixed chunks, costs or kpolicy, or where ranks step together, every batch is SGLang's own."""
    state = state_of(mixed_us=40_000)
    if case == "off":
        state.config = Config(split=False)
    if case == "coupled":
        state.coupled = True
    if case == "no costs":
        state.mixed = None
    mixed = case != "not mixed"
    if not mixed:
        state.config = Config(turns=False)
    scheduler = scheduler_of(None if case == "no kpolicy" else state, waiting=2, mixed=mixed)
    assert run(scheduler, 2) == ["mixed" if mixed else "extend"] * 2


def test_nothing_to_divide():
    """Without decodes, or without prompts, SGLang's own batch runs."""
    assert run(scheduler_of(state_of(mixed_us=40_000)), 1, decodes=0) == ["mixed"]
    assert run(scheduler_of(state_of(mixed_us=40_000), waiting=0), 1) == ["decode"]


def test_a_failing_scheduler_mixes_again():
    """What SGLang raises goes through, and its switch is back."""
    scheduler = scheduler_of(state_of(mixed_us=40_000))
    split = split_of(scheduler)
    split._owed = "extend"

    def fails(scheduler, running):
        assert not scheduler.is_mixed_chunk
        raise RuntimeError

    with pytest.raises(RuntimeError):
        split.step(fails, SimpleNamespace(reqs=[1]))
    assert scheduler.is_mixed_chunk


def test_prompts_are_counted_up_to_the_chunk():
    """The estimate looks at the chunk under way and the queue, and no further than a chunk."""
    scheduler = Scheduler(state_of(mixed_us=40_000), waiting=100)
    split = Split(scheduler, state_of(mixed_us=40_000))
    assert split.prompts(2048) == (2048, 32, False)
    scheduler.chunked_req = SimpleNamespace(origin_input_ids=[0] * 3000, prefix_indices=[0] * 2048)
    assert split.prompts(2048) == (952 + 18 * 64 - 56, 19, True)
    scheduler.chunked_req = SimpleNamespace(origin_input_ids=[0] * 3000, prefix_len=2048)
    assert split.prompts(2048) == (952 + 18 * 64 - 56, 19, True)


def test_decode_rows_of_a_mixed_batch_by_what_they_take():
    """Rows that cost more beside a long prompt are split off when there are many; rows that cost nothing stay."""
    state = state_of(mixed_us=1)
    split = Split(None, state)
    few = Curve((64, 2048), (11_400, 41_000))
    state.mixed = MixedCost(few, Curve((64, 2048), (11_500, 56_000)), 2, 32)
    assert [split.order(decodes, 2000, 1) != "mixed" for decodes in (2, 8, 32, 600)] == [False, False, True, True]
    state.mixed = MixedCost(few, few, 2, 32)
    assert split.order(600, 64, 1) == "mixed"
    assert state.mixed.us(64, 1) == 11_400


def limited(gap_ms, **rest):
    """A scheduler without mixed chunks under a limit on gaps."""
    state = state_of(mixed_us=40_000)
    state.config = Config(gap_ms=gap_ms, turns=False)
    return scheduler_of(state, mixed=False, **rest)


def test_limit_on_gaps_puts_a_decode_step_between_prompts():
    """SGLang would run prompt after prompt while decodes wait."""
    scheduler, seen = limited(11.4, waiting=3), []

    def own(scheduler, running):
        seen.append((scheduler.chunked_prefill_size, scheduler.is_mixed_chunk))
        return Scheduler.get_new_batch_prefill(scheduler, running)

    running = SimpleNamespace(reqs=[0] * 8)
    with pretended("0.5.16"):
        ran = [hooks.new_batch_prefill(own, scheduler, running).batch_to_run or "decode" for _ in range(6)]
    assert ran == ["extend", "decode"] * 3
    assert seen[:3] == [(512, False)] * 3
    assert scheduler.chunked_prefill_size == 2048


def test_no_limit_without_decodes():
    """Alone, prompts may take the whole chunk."""
    scheduler, seen = limited(11.4), []
    running = SimpleNamespace(reqs=[])
    hooks.new_batch_prefill(lambda s, _: seen.append(s.chunked_prefill_size), scheduler, running)
    assert seen == [2048]


@pytest.mark.parametrize("broken", ["policy", "prompts", "tick"])
def test_what_raises_leaves_the_batch_to_sglang(broken, caplog, monkeypatch):
    """A policy, an estimate or a counter that raises costs the split: SGLang's own batch runs, asked once a step."""
    state, asked = state_of(mixed_us=40_000), []
    scheduler = scheduler_of(state, waiting=3)

    def fails(*_):
        raise RuntimeError("broken")

    if broken == "policy":
        monkeypatch.setattr(Split, "order", fails)
    elif broken == "prompts":
        scheduler.waiting_queue[0] = SimpleNamespace()
    else:
        state.left = 1
        monkeypatch.setattr(state, "_flush", fails)

    def own(scheduler, running):
        asked.append(scheduler.is_mixed_chunk)
        return Scheduler.get_new_batch_prefill(scheduler, running)

    running = SimpleNamespace(reqs=[0] * 32)
    with pretended("0.5.16"), caplog.at_level("WARNING"):
        ran = [hooks.new_batch_prefill(own, scheduler, running).batch_to_run or "decode" for _ in range(4)]
    if broken == "policy":
        assert ran == ["mixed"] * 3 + ["decode"]
        assert asked == [True] * 4
    elif broken == "prompts":
        assert ran == ["mixed", "decode", "extend", "decode"]
    else:
        assert ran == ["decode", "extend", "decode", "extend"]
    assert len(caplog.records) == 1
    assert state.failures.total == {"policy": 3, "prompts": 1, "tick": 1}[broken]


@given(st.lists(st.integers(1, 900), max_size=80), st.integers(1, 4000), st.sampled_from([None, (2000, 1500)]))
def test_prompts_are_counted_as_far_as_a_batch_goes(waiting, most, cut):
    """As one by one: up to the one that fills it, of 64 at most, after what is left of the one under way."""
    scheduler = scheduler_of(state_of(mixed_us=1))
    scheduler.waiting_queue = [SimpleNamespace(origin_input_ids=range(each), prefix_len=0) for each in waiting]
    scheduler.chunked_req = SimpleNamespace(origin_input_ids=range(cut[0]), prefix_len=cut[1]) if cut else None
    tokens, prompts = (cut[0] - cut[1], 1) if cut else (0, 0)
    for each in waiting[:64]:
        if tokens < most:
            tokens, prompts = tokens + each, prompts + 1
    assert Split(scheduler, state_of(mixed_us=1)).prompts(most) == (
        max(1, min(tokens, most)), max(1, prompts), cut is not None
    )  # fmt: skip


def test_times_are_those_of_the_costs_in_use():
    """They are kept by size, until other costs come."""
    phase = state_of(mixed_us=1).prefill
    assert [phase.us(64) for _ in range(2)] == [11_400] * 2
    phase.install("auto", table_of("q", {64: 500, 512: 600, 2048: 700}, {64: 41_000}), Objective())
    assert phase.us(64) == 500
    mixed = MixedCost(Curve((96, 544), (10.0, 20.0)), Curve((96, 544), (10.0, 50.0)), 2, 32)
    assert [mixed.us(544, rows) for rows in (2, 32, 2)] == [20, 50, 20]
