"""The hooks that a step asks: SGLang's own answer for all but the size, and nothing of it where ranks decide."""

import itertools
import sys
from types import ModuleType, SimpleNamespace

import pytest

from kpolicy.reasons import Reason
from kpolicy.settings import Objective
from kpolicy_sglang import dispatch
from kpolicy_sglang.config import Config
from kpolicy_sglang.counters import buckets, lines
from kpolicy_sglang.phase import DECODE, PREFILL, Phase, table_of
from kpolicy_sglang.state import State
from tests.integrations.sglang.fake_sglang import Tokens


def always(answer, seen=None):
    """An original that gives that answer, and notes what it was asked."""

    def original(runner, batch=None, **asked):
        if seen is not None:
            seen.append(asked or batch)
        return answer

    return original


def phase_of(kind, *, graph_us=100, eager_us=1000, sizes=(64, 128)):
    phase = Phase(kind, sizes, 300, full=kind == DECODE)
    phase.install("auto", table_of("test", dict.fromkeys(sizes, graph_us), {1: eager_us}), Objective())
    return phase


def runner_of(phase=None, **fields):
    made = SimpleNamespace(
        require_mlp_sync=False, captured_req_width=1, max_bs=128, max_num_tokens=128, _is_full_backend=False,
        has_mha_companion_layers=False, capture_hidden_mode=0, _uses_eager_prefill_tail=lambda: True,
    )  # fmt: skip
    made.__dict__.update(fields)
    if phase is not None:
        setattr(made, dispatch.ATTRIBUTE, phase)
    return made


def batch_of(size, **fields):
    made = SimpleNamespace(
        batch_size=size, input_ids=Tokens([0] * size), global_num_tokens_cpu=None, return_logprob=False,
        forward_mode=SimpleNamespace(is_target_verify=lambda: False), extend_prefix_lens_cpu=[0],
    )  # fmt: skip
    made.__dict__.update(fields)
    return made


HOOKS = {
    DECODE: dispatch.decode_can_run,
    PREFILL: dispatch.prefill_can_run_0_5_16,
    "prefill 0.5.23": dispatch.prefill_can_run,
}


@pytest.fixture(autouse=True)
def _module_of_the_runner(monkeypatch):
    """0.5.16's limit on padding is a constant of the runner's module."""
    module = ModuleType("types_of_runner")
    module._MAX_PREFILL_CUDA_GRAPH_PADDING_FACTOR = 2
    monkeypatch.setitem(sys.modules, "types_of_runner", module)
    monkeypatch.setattr(sys.modules["types"], "_MAX_PREFILL_CUDA_GRAPH_PADDING_FACTOR", 2, raising=False)


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("answer", [True, False])
def test_runner_that_kpolicy_does_not_know(kind, answer):
    """A draft model's runner, or one that was left alone, is SGLang's."""
    assert HOOKS[kind](always(answer), runner_of(), batch_of(5)) is answer


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("force", [True, False])
def test_measuring_asks_nobody(kind, force):
    """While costs are measured the answer is given."""
    phase = phase_of(kind.partition(" ")[0])
    phase.force = force
    assert HOOKS[kind](always(not force), runner_of(phase), batch_of(5)) is force
    assert not any(phase.steps)


@pytest.mark.parametrize("kind", [DECODE, PREFILL])
def test_cheaper_eager_is_eager(kind):
    """Where eager costs less SGLang isn't asked, and the step counts with that reason."""
    phase = phase_of(kind, graph_us=2000)
    seen = []
    assert HOOKS[kind](always(True, seen), runner_of(phase), batch_of(50)) is False
    assert not seen
    assert phase.decision(50).reason is Reason.EAGER_IS_CHEAPER
    assert phase.steps[50] == 1


@pytest.mark.parametrize("kind", HOOKS)
def test_what_sglang_refuses_stays_refused(kind):
    """A graph that the size would have had isn't replayed where SGLang says no; the reason is found out."""
    phase = phase_of(kind.partition(" ")[0])
    batch = batch_of(50, replace_embeds=[1])
    assert HOOKS[kind](always(False), runner_of(phase), batch) is False
    assert phase.refused == {(Reason.REPLACED_EMBEDDINGS, 50): 1}


@pytest.mark.parametrize(
    ("fields", "runner", "reason"),
    [
        ({"input_embeds": [1]}, {}, Reason.INPUT_EMBEDDINGS),
        ({}, {"_has_unsupported_mha_prefix": lambda _: True}, Reason.PREFIX_NOT_CAPTURED),
        ({"capture_hidden_mode": 2}, {}, Reason.HIDDEN_STATES_WANTED),
        ({"return_logprob": True}, {"_uses_eager_prefill_tail": lambda: False}, Reason.LOGPROBS_WANTED),
        (
            {"forward_mode": SimpleNamespace(is_target_verify=lambda: True)},
            {},
            Reason.TARGET_VERIFY,
        ),
        ({"replace_embeds": [1]}, {}, Reason.REPLACED_EMBEDDINGS),
        ({}, {"_is_full_backend": True, "_capture_req_slots": 4}, Reason.TOO_MANY_REQS),
        ({}, {"max_num_tokens": 40}, Reason.ABOVE_LARGEST_SIZE),
        ({"global_num_tokens_cpu": [50, 60]}, {}, Reason.RANK_NEEDS_EAGER),
        (
            {"global_num_tokens_cpu": [50, 0], "can_run_dp_breakable_cuda_graph": True},
            {},
            Reason.RANK_NEEDS_EAGER,
        ),
        ({}, {}, Reason.BACKEND_REFUSED),
    ],
)
def test_reasons_of_refused_prefill(fields, runner, reason):
    """What SGLang doesn't say is read off the batch, in its order."""
    phase = phase_of(PREFILL)
    dispatch.prefill_can_run_0_5_16(always(False), runner_of(phase, **runner), batch_of(50, **fields))
    assert set(phase.refused) == {(reason, 50)}


def asking(then, *, local=True):
    """0.5.23's `can_run_graph`: `can_replay_locally` first, which answers so, and what it says after a yes."""

    def original(runner, batch):
        asked = {"num_tokens": batch.input_ids.numel(), "return_logprob": batch.return_logprob}
        question = lambda _, **given: local or not given["return_logprob"]  # noqa: E731
        return dispatch.prefill_can_replay_locally(question, runner, **asked) and then

    return original


def test_a_no_after_yes_is_the_backends():
    """A server with LoRA, a request without: what SGLang says no to after `can_replay_locally` isn't an adapter."""
    phase = phase_of(PREFILL)
    runner = runner_of(phase, enable_lora=True, prefer_eager_mixed_prefill=True)
    assert dispatch.prefill_can_run(asking(then=False), runner, batch_of(50)) is False
    assert phase.refused == {(Reason.BACKEND_REFUSED, 50): 1}
    assert phase.refusal is None


def test_a_padded_batch_above_the_largest_size():
    """Ranks agreed on a graph, and the batch is padded to more than was captured."""
    phase = phase_of(PREFILL)
    batch = batch_of(200, global_num_tokens_cpu=[200, 60], can_run_dp_prefill_cuda_graph=True)
    assert dispatch.prefill_can_run(asking(then=True), runner_of(phase, enable_lora=True), batch) is False
    assert phase.refused == {(Reason.ABOVE_LARGEST_SIZE, 200): 1}


def test_an_old_batchs_no_is_not_the_next_ones(caplog):
    """Whatever became of the first no, the next that comes without a question has its own reason."""
    phase = phase_of(PREFILL)
    runner, batch = runner_of(phase), batch_of(50, return_logprob=True)
    dispatch.prefill_can_replay_locally(always(False), runner, num_tokens=50, return_logprob=True)
    assert phase.refusal is not None
    assert dispatch.prefill_can_run(asking(then=False), runner, batch_of(60)) is False
    assert dispatch.prefill_can_run(asking(then=True, local=False), runner, batch) is False
    assert dispatch.prefill_can_run(always(False), runner, batch_of(70, replace_embeds=[1])) is False
    assert set(phase.refused) == {
        (Reason.BACKEND_REFUSED, 60), (Reason.LOGPROBS_WANTED, 50), (Reason.REPLACED_EMBEDDINGS, 70),
    }  # fmt: skip
    assert not caplog.records


@pytest.mark.parametrize(
    ("fields", "runner", "reason"),
    [
        ({"spec_info": SimpleNamespace(num_tokens_per_req=4)}, {}, Reason.WIDTH_DIFFERS),
        ({}, {"require_mlp_sync": True}, Reason.RANK_NEEDS_EAGER),
        ({"can_run_dp_cuda_graph": True}, {"require_mlp_sync": True, "max_bs": 40}, Reason.ABOVE_LARGEST_SIZE),
        ({}, {"disable_padding": True}, Reason.EXACT_SIZE_NOT_CAPTURED),
        ({}, {"enable_two_batch_overlap": True}, Reason.MICROBATCHES_DIFFER),
        ({}, {"is_encoder_decoder": True}, Reason.ENCODER_LENGTHS_ZERO),
        ({"capture_hidden_mode": 2}, {}, Reason.HIDDEN_STATES_WANTED),
        ({}, {}, Reason.BACKEND_REFUSED),
    ],
)
def test_reasons_of_refused_decode(fields, runner, reason):
    """Likewise for decode steps."""
    phase = phase_of(DECODE)
    dispatch.decode_can_run(always(False), runner_of(phase, **runner), batch_of(50, **fields))
    assert set(phase.refused) == {(reason, 50)}


@pytest.mark.parametrize("kind", HOOKS)
def test_a_step_that_replays_counts(kind):
    """Through the hooks of both versions."""
    phase = phase_of(kind.partition(" ")[0])
    assert HOOKS[kind](always(True), runner_of(phase), batch_of(50)) is True
    assert phase.steps[50] == sum(phase.steps) == 1


@pytest.mark.parametrize("kind", HOOKS)
def test_reason_that_cannot_be_found(kind, caplog):
    """A batch that isn't as expected keeps SGLang's answer, and counts without its reason."""
    phase = phase_of(kind.partition(" ")[0])
    runner = runner_of(phase)
    del runner.capture_hidden_mode
    batch = batch_of(50, capture_hidden_mode=1)
    assert HOOKS[kind](always(False), runner, batch) is False
    assert phase.refused == {(Reason.BACKEND_REFUSED, 50): 1}
    assert "looking for SGLang's reason raised" in caplog.text


@pytest.mark.parametrize("kind", HOOKS)
def test_policy_that_raises_serves_by_sglangs_rule(kind, caplog):
    """Through the hooks of both versions: the answer is SGLang's, with one warning."""

    def select(*_):
        raise RuntimeError("broken policy")

    phase = phase_of(kind.partition(" ")[0])
    phase._select, phase._decisions = select, [None] * len(phase.steps)
    phase._verdicts.clear()
    for answer in (True, False):
        assert HOOKS[kind](always(answer), runner_of(phase), batch_of(50)) is answer
    assert len(caplog.records) == phase.failures.total <= 1


def test_padding_limit_is_lifted_for_the_call_alone():
    """0.5.16's limit is away while its rule is asked, also where that raises, and back afterwards."""
    module = sys.modules[type(runner_of()).__module__]
    name = "_MAX_PREFILL_CUDA_GRAPH_PADDING_FACTOR"
    phase, seen = phase_of(PREFILL), []

    def original(runner, batch):
        seen.append(getattr(module, name))
        raise RuntimeError

    with pytest.raises(RuntimeError):
        dispatch.prefill_can_run_0_5_16(original, runner_of(phase), batch_of(3))
    assert seen[0] > 10**6
    assert getattr(module, name) == 2


@pytest.mark.parametrize("kind", [DECODE, PREFILL])
@pytest.mark.parametrize("answer", [True, False])
def test_ranks_that_step_together_keep_their_vote(kind, answer):
    """What ranks agreed on is SGLang's answer, whatever this rank's costs say."""
    phase = phase_of(kind, graph_us=2000)
    runner = runner_of(phase, require_mlp_sync=True)
    batch = batch_of(50, global_num_tokens_cpu=[50, 60])
    assert HOOKS[kind](always(answer), runner, batch) is answer


@pytest.mark.parametrize("kind", HOOKS)
def test_what_ranks_agreed_on_is_what_counts(kind):
    """A step that replays counts as replayed, by this rank's own tokens, though the policy would have it eager."""
    phase, told = phase_of(kind.partition(" ")[0], graph_us=2000), []
    phase.log = lambda *each: told.append(each[2:])
    runner = runner_of(phase, require_mlp_sync=True)
    # Prompts are padded by the vote; decodes are when the graph is.
    padded = 50 if kind.startswith(DECODE) else 100
    batch = batch_of(padded, global_num_tokens_cpu=[50, 100], extend_seq_lens_cpu=[20, 30])
    HOOKS[kind](always(True), runner, batch)
    (line,) = lines(phase)
    assert (line.mode, line.reason) == (phase.keys[0].part.value, "graph_fits")
    assert (line.steps, line.tokens, line.padding) == (1, 50, 78)
    assert buckets(phase) == {128: 1}
    assert told == [(50, None, 128)]
    HOOKS[kind](always(False), runner, batch)
    assert sum(line.steps for line in lines(phase)) == 2
    # On 0.5.16 kpolicy has no say in prompts: their no is SGLang's. Else this rank's own no was in the vote.
    said = Reason.RANK_NEEDS_EAGER if kind == PREFILL else Reason.EAGER_IS_CHEAPER
    assert {line.reason for line in lines(phase)} == {"graph_fits", said.value}
    assert told[1] == (50, said if kind == PREFILL else None, None)


@pytest.mark.parametrize("kind", HOOKS)
def test_another_ranks_no_is_the_groups(kind):
    """Where this rank would have replayed, and where costs aren't known, a no is what ranks agreed on."""
    for phase in (phase_of(kind.partition(" ")[0]), Phase(kind.partition(" ")[0], (64, 128), 300, full=True)):
        batch = batch_of(50, global_num_tokens_cpu=[50, 60], extend_seq_lens_cpu=[50])
        assert HOOKS[kind](always(False), runner_of(phase, require_mlp_sync=True), batch) is False
        assert phase.refused == {(Reason.RANK_NEEDS_EAGER, 50): 1}
        assert not sum(phase.steps)


def test_no_of_sglangs_limit_is_this_ranks_own():
    """Without costs 0.5.23's vote on prompts is no beyond twice the tokens: that is the reason, and not the others'."""
    phase = Phase(PREFILL, (64, 128), 300, full=False)
    batch = batch_of(3, global_num_tokens_cpu=[3, 60], extend_seq_lens_cpu=[3])
    assert dispatch.prefill_can_run(always(False), runner_of(phase), batch) is False
    (line,) = lines(phase)
    assert (line.mode, line.reason) == ("eager", "padding_over_limit")


@pytest.mark.parametrize("hook", [dispatch.prefill_can_run_0_5_16, dispatch.prefill_can_run])
def test_limit_on_padding_that_is_not_there(hook, caplog):
    """A rule without the limit, of another plugin's class, is asked as it is; that is said once."""
    phase = phase_of(PREFILL)
    runner = runner_of(phase)
    names = vars(sys.modules[type(runner).__module__])
    limit = names.pop("_MAX_PREFILL_CUDA_GRAPH_PADDING_FACTOR")
    try:
        for _ in range(2):
            assert hook(always(True), runner, batch_of(3))
    finally:
        names["_MAX_PREFILL_CUDA_GRAPH_PADDING_FACTOR"] = limit
    assert caplog.text.count("the limit stays") == 1


def test_limit_on_padding_is_where_the_rule_is():
    """A class of another module inherits SGLang's rule: its limit is lifted where the rule looks it up."""
    names = {"_MAX_PREFILL_CUDA_GRAPH_PADDING_FACTOR": 2}
    exec("def rule(runner, batch): return _MAX_PREFILL_CUDA_GRAPH_PADDING_FACTOR > 9", names)  # noqa: S102
    assert dispatch.prefill_can_run_0_5_16(names["rule"], runner_of(phase_of(PREFILL)), batch_of(3))
    assert names["_MAX_PREFILL_CUDA_GRAPH_PADDING_FACTOR"] == 2


def locally(phase, size, answer=True, seen=None):
    return dispatch.prefill_can_replay_locally(always(answer, seen), runner_of(phase), num_tokens=size, batch_size=1)


def test_vote_goes_by_cost_and_asks_the_rest():
    """0.5.23: the size is decided here, and SGLang is asked without one, so that its limit on padding is out."""
    seen = []
    assert locally(phase_of(PREFILL), 3, seen=seen)
    assert seen == [{"num_tokens": None, "batch_size": 1}]
    assert not locally(phase_of(PREFILL), 3, answer=False)
    assert not locally(phase_of(PREFILL, graph_us=2000), 3)
    assert not locally(phase_of(PREFILL), 129)


def test_question_without_a_size_is_sglangs():
    """Who asks without a size gets SGLang's answer."""
    assert locally(phase_of(PREFILL, graph_us=2000), None)


def test_no_votes_let_ranks_part():
    """Whatever each rank has and costs, after the reduced vote all replay or none does.

    SGLang pads the step of all ranks to the same tokens once all said yes. Here that padded size would be eager on
    some ranks by their own costs: only the vote may decide.
    """
    sizes = (1, 3, 60, 64, 100, 128, 129)
    for tokens in itertools.product(sizes, repeat=2):
        for graph_us in itertools.product((100, 2000), repeat=2):
            phases = [phase_of(PREFILL, graph_us=each) for each in graph_us]
            votes = [locally(phase, size) for phase, size in zip(phases, tokens, strict=True)]
            agreed = all(votes)
            padded = phases[0].bucket(max(tokens)) or max(tokens)
            ran = []
            for phase in phases:
                runner = runner_of(phase)

                def rule(runner, batch, phase=phase, agreed=agreed):
                    """SGLang's forward-time check: the group's verdict, then the local rule on the padded batch."""
                    return agreed and dispatch.prefill_can_replay_locally(
                        always(True), runner, num_tokens=batch.input_ids.numel(), batch_size=1
                    )

                batch = batch_of(padded, global_num_tokens_cpu=list(tokens))
                ran.append(dispatch.prefill_can_run(rule, runner, batch))
                assert not phase.agreed
            assert ran[0] == ran[1] == agreed, (tokens, graph_us, votes)


def beside(counts, *, voted=True):
    """A batch of 50 rows or tokens whose ranks have so many each, and voted so."""
    verdicts = ("can_run_dp_prefill_cuda_graph", "can_run_dp_breakable_cuda_graph", "can_run_dp_cuda_graph")
    return batch_of(50, global_num_tokens_cpu=counts, **dict.fromkeys(verdicts, voted))


def state_with(phase):
    """What a model runner's scheduler ticks, with ranks that vote."""
    state = State(Config(summary_seconds=0), "0.5.23")
    state.phases[phase.name], state.coupled, phase.coupled = phase, True, True
    return state


@pytest.mark.parametrize("kind", [PREFILL, "prefill 0.5.23"])
def test_an_idle_rank_is_said_once(kind, caplog):
    """Prompts beside a rank with nothing to run: SGLang's answer, counted; once, and in no step, it is said why."""
    phase = phase_of(PREFILL)
    state, runner = state_with(phase), runner_of(phase)
    for step in range(3):
        assert HOOKS[kind](always(False), runner, beside([50, 0])) is False
        assert len(caplog.records) == min(step, 1)
        state.tick()
    assert phase.refused == {(Reason.RANK_NEEDS_EAGER, 50): 3}
    (record,) = caplog.records
    said = record.getMessage()
    assert said.startswith("kpolicy: a data-parallel rank had nothing to run beside prompts")
    assert "SGLang runs such a step eagerly on all ranks" in said
    assert Reason.RANK_NEEDS_EAGER.value in said
    assert state.messages == [said.removeprefix("kpolicy: ")]


@pytest.mark.parametrize(
    ("kind", "answer", "batch", "graph_us"),
    [
        # Another rank's no isn't an idle rank, and neither is this one's own.
        (PREFILL, False, beside([50, 60], voted=False), 100),
        ("prefill 0.5.23", False, beside([50, 0]), 2000),
        # Some mixtures of experts bear with one, and decodes do.
        ("prefill 0.5.23", True, beside([50, 0]), 100),
        (DECODE, True, beside([50, 0]), 100),
        (DECODE, False, beside([50, 0], voted=False), 100),
    ],
)
def test_no_idle_rank_is_told_of_where_none_matters(kind, answer, batch, graph_us, caplog):
    """SGLang's answer, and nothing to say."""
    phase = phase_of(kind.partition(" ")[0], graph_us=graph_us)
    state, runner = state_with(phase), runner_of(phase, require_mlp_sync=True)
    assert HOOKS[kind](always(answer), runner, batch) is answer
    state.tick()
    assert not caplog.records


def test_an_idle_rank_of_dummy_steps_is_no_servers():
    """What ran before the server serves is forgotten with its steps."""
    phase = phase_of(PREFILL)
    HOOKS[PREFILL](always(False), runner_of(phase), beside([50, 0]))
    assert phase.idle_rank
    phase.forget_steps()
    assert not phase.idle_rank
