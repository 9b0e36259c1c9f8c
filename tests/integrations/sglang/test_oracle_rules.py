"""SGLang's rules that are known: its yes is told without it, and only where it says yes."""

from __future__ import annotations

import ast
import gc
import linecache
import random
import weakref
from collections import Counter
from functools import wraps
from types import SimpleNamespace

import pytest

from kpolicy.settings import Objective
from kpolicy_sglang import bound, dispatch, rules
from kpolicy_sglang.phase import DECODE, PREFILL, Phase, table_of
from tests.integrations.sglang.fake_sglang import Tokens
from tests.integrations.sglang.test_oracle import _OF_A_RUNNER, _older_prefill, release_of
from tests.oracle.sglang_real import MARKS, RUNNER, decode_runner, prefill_runner
from tests.oracle.test_sglang import random_sizes

pytestmark = MARKS
KINDS = [(DECODE, "0.5.16"), (DECODE, "0.5.23"), (PREFILL, "0.5.16"), (PREFILL, "0.5.23")]
OF_DECODES = {
    "ragged_verify_mode": False, "captured_req_width": 1, "require_mlp_tp_gather": False, "require_mlp_sync": False,
    "enable_pdmux": False, "disable_padding": False, "is_encoder_decoder": False, "enable_two_batch_overlap": False,
    "capture_hidden_mode": 0, "capture_num_tokens": None,
}  # fmt: skip
UNUSUAL = {
    (DECODE, "0.5.16"): {"disable_padding": True, "is_encoder_decoder": True, "enable_two_batch_overlap": True,
                         "require_mlp_sync": True, "ngram": True},
    (PREFILL, "0.5.16"): {"_is_full_backend": True, "has_mha_companion_layers": True,
                          "prefill_backend_name": "tc_piecewise"},
    (PREFILL, "0.5.23"): {"_is_full_backend": True, "_qwen_bcg_hc_sidechannel": True, "_qwen_bcg_mtp_draft": True,
                          "_captured_attn_metadata_max_bs": 2, "enable_lora": True, "prefer_eager_mixed_prefill": True,
                          "prefill_backend_name": "tc_piecewise", "max_seq_len": 2000, "max_context_size": 900,
                          "has_mha_companion_layers": True, "_backend_can_run_prefill_cuda_graph": lambda batch:
                          batch.batch_size % 2 > 0},
}  # fmt: skip
"""What a runner of another kind has, each by itself, of what the stand-ins let its rule ask."""
UNUSUAL[DECODE, "0.5.23"] = UNUSUAL[DECODE, "0.5.16"]


def around(original, hook):
    """As SGLang's registry puts a hook."""

    @wraps(original)
    def wrapper(*args, **kwargs):
        return hook(original, *args, **kwargs)

    return wrapper


def rule_of(name, version):
    """The release's runner, and the same under kpolicy's hooks."""
    release = release_of(version)
    if name == DECODE:
        rule, hooks = decode_runner(release), {"can_run_graph": dispatch.decode_can_run}
    elif version == "0.5.16":
        rule, hooks = _older_prefill(release), {"can_run_graph": dispatch.prefill_can_run_0_5_16}
    else:
        rule = prefill_runner(release, cuda=False, whole=True)
        rule._batch_max_context_len = lambda _, batch: batch.max_len
        rule.can_run_graph.__globals__["prefill_graph_tolerates_sum_len"] = lambda: False
        hooks = {
            "can_run_graph": dispatch.prefill_can_run, "can_replay_locally": dispatch.prefill_can_replay_locally,
        }  # fmt: skip
    return rule, type("Hooked", (rule,), {each: around(getattr(rule, each), hook) for each, hook in hooks.items()})


def runner_of(cls, name, sizes, *, ngram=False, **fields):
    runner = cls()
    usual = {**_OF_A_RUNNER, "_capture_lora": False, "capture_hidden_mode": 0}
    runner.__dict__.update(OF_DECODES if name == DECODE else usual)
    runner.max_bs, runner.backend = sizes[-1], SimpleNamespace(can_run=lambda _, key: key in sizes)
    if name == PREFILL:
        runner.capture_num_tokens, runner.max_num_tokens = list(sizes), sizes[-1]
    runner.model_runner = SimpleNamespace(spec_algorithm=SimpleNamespace(is_ngram=lambda: ngram))
    runner.__dict__.update(fields)
    return runner


def batch_of(name, size, **fields):
    """A batch with nothing but its size, as each release has it."""
    made = SimpleNamespace(
        batch_size=size if name == DECODE else 1, input_ids=Tokens([0] * size), replace_embeds=None, spec_info=None,
        capture_hidden_mode=0, global_num_tokens_cpu=None, can_run_tbo=True, encoder_lens=True, lora_ids=None,
        can_run_decode_cuda_graph=True, can_run_dp_cuda_graph=True, input_embeds=None, extend_prefix_lens_cpu=[0],
        forward_mode=SimpleNamespace(is_target_verify=lambda: False), return_logprob=False, max_len=size,
        contains_mm_inputs=lambda: False, can_run_dp_breakable_cuda_graph=True, can_run_dp_prefill_cuda_graph=True,
    )  # fmt: skip
    made.__dict__.update(fields)
    return made


def random_batch(rng, name, largest):
    size = int(rng.triangular(1, largest * 1.2, 1))

    def seldom(value, usual=None):
        return value if rng.random() < 0.06 else usual

    verifies, images = seldom(True, False), seldom(True, False)
    return batch_of(
        name, size, replace_embeds=seldom([1]), capture_hidden_mode=seldom(rng.randint(1, 2), 0),
        spec_info=seldom(SimpleNamespace(num_tokens_per_req=rng.choice([1, 4]))), input_embeds=seldom([1]),
        can_run_tbo=seldom(False, True), encoder_lens=seldom(False, True),
        can_run_decode_cuda_graph=seldom(False, True),
        can_run_dp_cuda_graph=seldom(False, True), extend_prefix_lens_cpu=[0, seldom(9, 0)],
        forward_mode=SimpleNamespace(is_target_verify=lambda: verifies), return_logprob=seldom(True, False),
        contains_mm_inputs=lambda: images, max_len=seldom(3000, size), global_num_tokens_cpu=seldom([size, size])
        if name == PREFILL else None, can_run_dp_breakable_cuda_graph=seldom(False, True),
        can_run_dp_prefill_cuda_graph=seldom(False, True),
    )  # fmt: skip


def is_told(runner):
    return "_told." in vars(runner)["can_run_graph"].__qualname__


@pytest.mark.parametrize("by_cost", [False, True])
@pytest.mark.parametrize(("name", "version"), KINDS)
def test_what_is_told_is_what_sglang_says(name, version, by_cost, monkeypatch):
    """On 6,000 random batches the answers, counts and reasons are those of a runner that asks each time."""
    rng, outcomes, told = random.Random(31), Counter(), 0  # noqa: S311  not for secrets
    rule, hooked = rule_of(name, version)
    for at in range(60):
        sizes, fields = random_sizes(rng, 1024), {}
        if at % 3 == 0:
            fields = dict([rng.choice(list(UNUSUAL[name, version].items()))])
        runners, phases = [runner_of(hooked, name, sizes, **fields) for _ in range(2)], []
        costs = table_of("test", dict.fromkeys(sizes, 5), {1: 4, sizes[-1]: rng.choice([4, 10])})
        for which, runner in enumerate(runners):
            phase = Phase(name, sizes, sizes[-1] + 200, full=name == DECODE)
            if by_cost:
                phase.install("auto", costs, Objective())
            phase.decide_all()
            with monkeypatch.context() as patched:
                if which:
                    patched.setattr(dispatch, "known_rule", lambda *_: None)
                dispatch.attach(runner, phase)
            phases.append(phase)
        assert [is_told(runner) for runner in runners] == [not fields, False], fields
        told += is_told(runners[0])
        for _ in range(100):
            batch = random_batch(rng, name, sizes[-1])
            here, asked = (runner.can_run_graph(batch) for runner in runners)
            assert here == asked, vars(batch)
            if not by_cost:
                assert bool(here) == bool(rule.can_run_graph(runners[0], batch)), vars(batch)
            outcomes[bool(here)] += 1
        for counts in ("steps", "refused", "voted"):
            assert getattr(phases[0], counts) == getattr(phases[1], counts)
        assert not phases[0].failures.total
    assert told == 40
    assert min(outcomes.values()) > 500, outcomes


@pytest.mark.parametrize(("name", "version"), KINDS)
def test_the_rule_is_not_asked_of_a_usual_batch(name, version):
    """A batch that has nothing but what is looked at here would end it; SGLang is asked of one with anything else."""
    _, hooked = rule_of(name, version)
    runner, phase = runner_of(hooked, name, (64, 128), capture_hidden_mode=0), Phase(name, (64, 128), 200, full=False)
    phase.decide_all()
    dispatch.attach(runner, phase)
    kept = {
        DECODE: ("batch_size", "replace_embeds", "spec_info", "capture_hidden_mode"),
        PREFILL: ("input_ids", "global_num_tokens_cpu", "input_embeds", "replace_embeds", "capture_hidden_mode",
                  "forward_mode"),
    }[name]  # fmt: skip
    bare = SimpleNamespace(**{each: value for each, value in vars(batch_of(name, 50)).items() if each in kept})
    assert runner.can_run_graph(bare) is True
    assert phase.steps[50] == 1
    bare.replace_embeds = [1]
    assert runner.can_run_graph(batch_of(name, 50, replace_embeds=[1])) is False
    assert (phase.steps[50], phase.refused.total()) == (1, 1)


@pytest.mark.parametrize(("name", "version"), KINDS)
def test_another_text_is_asked(name, version, monkeypatch):
    """A method of the rule with so much as another comment isn't known, nor one whose text can't be had."""
    rule, hooked = rule_of(name, version)
    known = next(each for each in rules._KNOWN if each.texts["can_run_graph"] == rules._digest(rule.can_run_graph))
    for method in known.texts:
        code = getattr(rule, method).__code__
        _, _, lines, _ = linecache.cache[code.co_filename]
        last = code.co_firstlineno + 1
        for changed in ([*lines[:last], "        # patched\n", *lines[last:]], []):
            with monkeypatch.context() as patched:
                patched.setitem(linecache.cache, code.co_filename, (1, None, changed, code.co_filename))
                runner = runner_of(hooked, name, (64, 128))
                dispatch.attach(runner, Phase(name, (64, 128), 200, full=False))
                assert not is_told(runner)
        assert rules._digest(getattr(rule, method)) == known.texts[method]


@pytest.mark.parametrize(("name", "version"), KINDS)
def test_a_runner_that_changes_is_asked_again(name, version):
    """What made it usual is looked at as hooks are: one that isn't any more has SGLang's own answer from then on."""
    rule, hooked = rule_of(name, version)
    helper = "_uses_eager_prefill_tail" if name == PREFILL else None
    changes = [*UNUSUAL[name, version].items(), *([(helper, lambda: False), (helper, None)] if helper else [])]
    for changed, value in changes:
        if changed == "ngram":
            continue
        runner = runner_of(hooked, name, (64, 128), capture_hidden_mode=0)
        phase = Phase(name, (64, 128), 200, full=False)
        phase.decide_all()
        dispatch.attach(runner, phase)
        bound.leave_hooked()
        assert is_told(runner)
        before = getattr(rule, changed, None)
        if value is None:
            # The class has another one.
            setattr(rule, changed, lambda _: True)
        else:
            setattr(runner, changed, value)
        bound.leave_hooked()
        if value is None:
            setattr(rule, changed, before)
        assert "can_run_graph" not in vars(runner), changed
        for size in (49, 50):
            batch = batch_of(name, size)
            assert bool(runner.can_run_graph(batch)) == bool(rule.can_run_graph(runner, batch))


def test_a_limit_that_changes_is_asked_again(monkeypatch):
    """SGLang's limit on padding, where someone sets another; the one that kpolicy sets for a moment is its own."""
    rule, hooked = rule_of(PREFILL, "0.5.23")
    runner, phase = runner_of(hooked, PREFILL, (64, 128), capture_hidden_mode=0), Phase(PREFILL, (64,), 200, full=False)
    runner.capture_num_tokens, runner.max_num_tokens, runner.max_bs = [64], 64, 64
    dispatch.attach(runner, phase)
    for limit, left in ((dispatch._NO_LIMIT, False), (1, True)):
        monkeypatch.setitem(rule.can_run_graph.__globals__, dispatch._FACTOR, limit)
        assert is_told(runner)
        bound.leave_hooked()
        assert ("can_run_graph" not in vars(runner)) == left


@pytest.mark.parametrize(("name", "version"), KINDS)
def test_a_runner_that_is_told_of_is_let_go(name, version):
    """Nothing that looks at it later keeps it."""
    _, hooked = rule_of(name, version)
    runner = runner_of(hooked, name, (64, 128))
    dispatch.attach(runner, Phase(name, (64, 128), 200, full=False))
    assert is_told(runner)
    known = weakref.ref(runner)
    del runner
    gc.collect()
    assert known() is None


@pytest.mark.parametrize("version", ["0.5.16", "0.5.23"])
def test_sglang_sets_what_is_looked_at_once_as_it_makes_a_runner(version):
    """In the files of its runners, but for the bound on contexts, which may be taken away as it captures."""
    release, set_by = release_of(version), Counter()
    looked = {name for rule in rules._KNOWN for name in (*rule.off, *rule.seldom, *rule.none, *rule.equal)}
    for file in ("base_runner", "base_cuda_graph_runner", "decode_cuda_graph_runner", "prefill_cuda_graph_runner"):
        for function in ast.walk(release.tree(f"{RUNNER}/{file}.py")):
            if isinstance(function, ast.FunctionDef):
                for node in ast.walk(function):
                    targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
                    for target in targets if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) else ():
                        if isinstance(target, ast.Attribute) and target.attr in looked:
                            set_by[function.name, target.attr] += 1
    elsewhere = {each for each in set_by if each[0] != "__init__"}
    assert elsewhere <= {("_ignore_max_context_size", "max_context_size")}, elsewhere
    assert len(set_by) >= 10
