"""Objects whose methods call kpolicy's hooks past the registry's wrapper."""

import gc
from functools import partial
from types import SimpleNamespace

import pytest

from kpolicy.costs import Curve
from kpolicy.reasons import Reason
from kpolicy.settings import Objective
from kpolicy_sglang import bound, dispatch, hooks, padding
from kpolicy_sglang.config import Config
from kpolicy_sglang.failures import Failures
from kpolicy_sglang.phase import DECODE, PREFILL, MixedCost, table_of
from kpolicy_sglang.split import Split, counted, split_of
from kpolicy_sglang.state import State, attach
from tests.integrations.sglang.test_dispatch import always, batch_of, phase_of, runner_of
from tests.integrations.sglang.test_padding import Buffers

QUESTIONS = {
    "decode": (DECODE, dispatch.decode_can_run),
    "prefill 0.5.16": (PREFILL, dispatch.prefill_can_run_0_5_16),
    "prefill 0.5.23": (PREFILL, dispatch.prefill_can_run),
}


def around(original, hook, passed, *, told=True):
    """An AROUND hook as SGLang's registry puts it, which notes that it was passed."""

    def wrapper(*args, **kwargs):
        passed.append(hook)
        return hook(original, *args, **kwargs)

    if told:
        wrapper.__wrapped__ = original
    return wrapper


def another(original, *args, **kwargs):
    """Someone else's hook."""
    return original(*args, **kwargs)


def hooked(name, *wrappers, base=SimpleNamespace):
    return type("Hooked", (base,), {name: wrappers[-1]})


@pytest.mark.parametrize("answer", [True, False])
@pytest.mark.parametrize("kind", QUESTIONS)
def test_a_runner_with_a_phase_is_asked_past_the_registry(kind, answer):
    """With the same answer and the same counts, until kpolicy leaves it to SGLang again."""
    (name, hook), passed = QUESTIONS[kind], []
    question = around(always(answer), hook, passed)
    runner = hooked("can_run_graph", question)(**vars(runner_of()))
    phase = phase_of(name)
    dispatch.attach(runner, phase)
    assert runner.can_run_graph(batch_of(50)) is answer
    assert not passed
    assert (phase.steps[50], phase.refused.total()) == (int(answer), int(not answer))
    dispatch.detach(runner)
    assert runner.can_run_graph(batch_of(50)) is answer
    assert passed == [hook]
    assert phase.steps[50] + phase.refused.total() == 1


@pytest.mark.parametrize("kind", QUESTIONS)
def test_a_size_that_replays_is_only_counted(kind):
    """From its second step on only SGLang is asked, until more is to be done with a step than that."""
    (name, hook), written = QUESTIONS[kind], []

    def question(runner, batch):
        return not getattr(batch, "replace_embeds", None)

    runner = hooked("can_run_graph", around(question, hook, []))(**vars(runner_of()))
    phase = phase_of(name)
    phase.limited(2)
    dispatch.attach(runner, phase)

    def ask(**fields):
        return runner.can_run_graph(batch_of(50, **fields))

    verdict = phase.verdict
    for steps in (1, 2, 3):
        assert ask() is True
        assert phase.steps[50] == steps
        phase.verdict = None
    phase.verdict = verdict
    assert ask(replace_embeds=[1]) is False
    assert (phase.steps[50], phase.refused) == (3, {(Reason.REPLACED_EMBEDDINGS, 50): 1})
    phase.log = lambda *told: written.append(told)
    assert [ask(), ask(), len(written)] == [True, True, 2]
    phase.log = None
    assert [ask(), ask(), len(written)] == [True, True, 2]
    phase.force = False
    assert ask() is False
    phase.force = None
    assert ask() is True
    phase.forget_steps()
    assert ask() is True
    assert phase.steps[50] == 1
    if name == PREFILL:
        assert ask(global_num_tokens_cpu=[50, 50]) is True
        assert (phase.steps[50], phase.voted) == (1, {(50, 64): 1})
    phase.install("auto", table_of("test", {64: 2000, 128: 2000}, {1: 1000}), Objective())
    assert ask() is False


@pytest.mark.parametrize("kind", QUESTIONS)
def test_a_size_that_was_decided_at_start_is_only_counted_from_its_first_step_on(kind, monkeypatch):
    """SGLang's limit on padding is known by then. What it refused it isn't asked twice of the next time."""
    (name, hook), asked = QUESTIONS[kind], []
    monkeypatch.setattr(dispatch, "_names", lambda *_: {"_MAX_PREFILL_CUDA_GRAPH_PADDING_FACTOR": 2})

    def question(runner, batch):
        asked.append(batch)
        return not getattr(batch, "replace_embeds", None)

    runner, phase = hooked("can_run_graph", around(question, hook, []))(**vars(runner_of())), phase_of(name)
    dispatch.attach(runner, phase)
    phase.decide_all()
    verdict, phase.verdict = phase.verdict, None
    assert runner.can_run_graph(batch_of(50)) is True
    assert phase.steps[50] == 1
    phase.verdict = verdict
    for times in (2, 1):
        asked.clear()
        assert runner.can_run_graph(batch_of(50, replace_embeds=[1])) is False
        assert len(asked) == times
    assert [runner.can_run_graph(batch_of(50)) for _ in range(2)] == [True, True]
    assert (phase.steps[50], phase.refused.total()) == (3, 2)


def test_ranks_that_vote_have_each_step_looked_at():
    """None of their sizes is only counted."""
    runner = hooked("can_run_graph", around(always(True), dispatch.decode_can_run, []))(**vars(runner_of()))
    phase = phase_of(DECODE)
    phase.coupled = True
    dispatch.attach(runner, phase)
    assert runner.can_run_graph(batch_of(50))
    runner.require_mlp_sync = True
    assert runner.can_run_graph(batch_of(50, global_num_tokens_cpu=[50, 60]))
    assert (phase.steps[50], phase.voted) == (1, {(50, 64): 1})


def test_someone_elses_hooks_are_called():
    """One inside ours is what we ask; where one is outside, or a wrapper doesn't tell, the registry's way stays."""
    hook, passed = dispatch.decode_can_run, []
    inside = around(always(True), another, passed)
    outside = around(around(always(True), hook, passed), another, passed)
    for question, wanted in (
        (around(inside, hook, passed), [another]),
        (outside, [another, hook]),
        (around(always(True), hook, passed, told=False), [hook]),
    ):
        passed.clear()
        runner, phase = hooked("can_run_graph", question)(**vars(runner_of())), phase_of(DECODE)
        dispatch.attach(runner, phase)
        assert runner.can_run_graph(batch_of(50)) is True
        assert passed == wanted
        assert phase.steps[50] == 1


def state_with_costs():
    """A state whose schedulers have a split."""
    state = State(Config(summary_seconds=0), "0.5.16")
    state.phases = {name: phase_of(name) for name in (DECODE, PREFILL)}
    curve = Curve((64, 128), (9e6, 9e6))
    state.mixed = MixedCost(curve, curve, 2, 32)
    return state


def ticked():
    """A state's look at the clock, every 128 cycles."""
    State(Config(summary_seconds=0), "0.5.16").tick()


@pytest.mark.parametrize("late", [True, False])
def test_a_hook_that_comes_later_is_called(late):
    """From the next look at the clock on, around ours; where none came the attribute stays."""
    hook, passed = dispatch.decode_can_run, []
    cls = hooked("can_run_graph", around(always(True), hook, passed))
    runner, phase = cls(**vars(runner_of())), phase_of(DECODE)
    dispatch.attach(runner, phase)
    if late:
        cls.can_run_graph = around(cls.can_run_graph, another, passed)
    for _ in range(2):
        ticked()
        assert runner.can_run_graph(batch_of(50)) is True
    assert passed == [another, hook] * 2 * late
    assert phase.steps[50] == 2


def test_what_is_bound_keeps_no_object():
    """A runner that SGLang drops is gone, and one that can't be left again has no attribute."""
    cls = hooked("can_run_graph", around(always(True), dispatch.decode_can_run, []))
    runner = cls(**vars(runner_of()))
    dispatch.attach(runner, phase_of(DECODE))
    (known,) = [known for known, *_ in bound._bound if known() is runner]
    del runner
    gc.collect()
    assert known() is None
    ticked()
    assert all(each is not known for each, *_ in bound._bound)
    owner = SimpleNamespace(repeat=None)
    bound.bind(owner, "__repr__", str)
    assert vars(owner) == {"repeat": None}


def test_a_wrapper_with_a_name_that_is_not_set_is_not_ours():
    """It wraps a question that isn't kpolicy's, and is no reason to raise."""

    def wrapper(*args):
        return later(*args)

    wrapper.__wrapped__ = always(True)
    runner, phase = hooked("can_run_graph", wrapper)(**vars(runner_of())), phase_of(DECODE)
    dispatch.attach(runner, phase)
    assert "can_run_graph" not in vars(runner)
    later = always(True)
    assert runner.can_run_graph(batch_of(50)) is True


def test_cycles_counted_down_too_far_look_at_the_clock(monkeypatch):
    """Whatever else counted meanwhile: one less than none is none too."""
    state, ticks = State(Config(), "0.5.16"), []
    monkeypatch.setattr(state, "tick", partial(ticks.append, 1))
    state.left = 0
    scheduler = SimpleNamespace(
        chunked_prefill_size=64, waiting_queue=[], chunked_req=None, is_mixed_chunk=False, max_running_requests=8
    )
    steps = [partial(counted, state, scheduler)]
    split = Split(scheduler, state)
    for step in (*steps, split._in_turns_step, split._split_step):
        step(lambda *_: None, SimpleNamespace(reqs=[]))
    assert ticks == [1, 1, 1]


@pytest.mark.parametrize("mixed", [True, False])
def test_cycles_in_which_nothing_waits_are_only_counted(mixed, monkeypatch):
    """From the second on, until a prompt waits; the clock is looked at as often."""
    model, asked, ticks, plan = SimpleNamespace(), [], [], SimpleNamespace(batch_to_run=None)
    state = state_with_costs()
    monkeypatch.setattr(state, "tick", lambda: (ticks.append(1), setattr(state, "left", 128)))
    attach(model, state)
    own = around(lambda _, running: asked.append(running) or plan, hooks.new_batch_prefill, [])
    scheduler = hooked("get_new_batch_prefill", own)(
        tp_worker=SimpleNamespace(model_runner=model), chunked_prefill_size=64, waiting_queue=[], chunked_req=None,
        is_mixed_chunk=mixed, max_running_requests=8,
    )  # fmt: skip
    running = SimpleNamespace(reqs=[])
    for _ in range(2):
        scheduler.get_new_batch_prefill(running)
    split, looked = split_of(scheduler), []
    monkeypatch.setattr(split.turns, "decoded", lambda: looked.append(1))
    for _ in range(300):
        scheduler.get_new_batch_prefill(running)
    # Where the clock is looked at the rest is too.
    assert (len(asked), len(ticks), len(looked)) == (302, 2, 2)
    for waiting in ([SimpleNamespace(origin_input_ids=[1, 2])], []):
        scheduler.waiting_queue = waiting
        scheduler.get_new_batch_prefill(running)
        assert split._idle == (not waiting)
    assert len(looked) == 4 - mixed


@pytest.mark.parametrize("known", [True, False])
def test_a_scheduler_is_asked_past_the_registry(known):
    """From its second cycle on; without kpolicy every cycle is the registry's. Cycles count either way."""
    model, passed, asked = SimpleNamespace(), [], []
    state = State(Config(), "0.5.16")
    if known:
        attach(model, state)
    own = around(lambda _, running: asked.append(running), hooks.new_batch_prefill, passed)
    scheduler = hooked("get_new_batch_prefill", own)(
        tp_worker=SimpleNamespace(model_runner=model), chunked_prefill_size=64, waiting_queue=[], chunked_req=None,
        is_mixed_chunk=False,
    )  # fmt: skip
    left = state.left
    for running in range(3):
        scheduler.get_new_batch_prefill(running)
    assert asked == [0, 1, 2]
    assert len(passed) == (1 if known else 3)
    assert left - state.left == (3 if known else 0)


@pytest.mark.parametrize(
    ("found", "coupled", "past"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_a_runner_made_anew_has_the_inner_question_past_the_registry_too(found, coupled, past):
    """0.5.23's, as the one before had it from its first step on; where ranks vote by it our hook stays."""
    question = around(always(True), dispatch.prefill_can_replay_locally, [])
    runner, phase = hooked("can_replay_locally", question)(**vars(runner_of())), phase_of(PREFILL)
    phase.names, phase.coupled = {"a limit": 2} if found else None, coupled
    dispatch.attach(runner, phase)
    assert ("can_replay_locally" in vars(runner)) == past


def test_a_limit_that_would_not_refuse_is_not_lifted(monkeypatch):
    """SGLang's on padding: a batch of 50 in a graph of 64 is within it, one of 3 isn't."""
    seen = []
    names = {"_MAX_PREFILL_CUDA_GRAPH_PADDING_FACTOR": 2}
    monkeypatch.setattr(dispatch, "_names", lambda *_: names)
    phase = phase_of(PREFILL)

    def original(*_):
        seen.append(names["_MAX_PREFILL_CUDA_GRAPH_PADDING_FACTOR"] == 2)
        return True

    for size in (3, 50, 32, 31, 64, 3):
        assert dispatch.prefill_can_run_0_5_16(original, runner_of(phase), batch_of(size))
    assert seen == [False, True, True, False, True, False]
    assert phase.steps[3] == 2


def test_a_size_beyond_the_limit_is_never_only_counted(monkeypatch):
    """A runner that is asked past the registry has the limit lifted at each step of it, and not for others."""
    seen, names = [], {"_MAX_PREFILL_CUDA_GRAPH_PADDING_FACTOR": 2}
    monkeypatch.setattr(dispatch, "_names", lambda *_: names)

    def question(*_):
        seen.append(names["_MAX_PREFILL_CUDA_GRAPH_PADDING_FACTOR"] == 2)
        return True

    hook, phase = dispatch.prefill_can_run_0_5_16, phase_of(PREFILL)
    runner = hooked("can_run_graph", around(question, hook, []))(**vars(runner_of()))
    dispatch.attach(runner, phase)
    for size in (3, 3, 50, 50, 3):
        assert runner.can_run_graph(batch_of(size))
    assert seen == [False, False, True, True, False]
    assert (phase.steps[3], phase.plain[3], phase.plain[50]) == (3, 0, 1)


def test_buffers_are_filled_past_the_registry():
    """As long as kpolicy clears what a batch leaves empty."""
    passed = []
    buffers = hooked("fill_from", around(Buffers.fill_from, padding.fill_from, passed), base=Buffers)()
    runner = SimpleNamespace(buffer_registry=buffers, require_gathered_buffer=False)
    padding.take_tails(runner, Failures())
    sizes = {"raw_bs": 3, "padded_bs": 4, "raw_num_tokens": 3, "padded_num_tokens": 4}
    buffers.fill_from(SimpleNamespace(), **sizes)
    assert not passed
    padding.leave_tails(runner)
    buffers.fill_from(SimpleNamespace(), **sizes)
    assert passed == [padding.fill_from]
