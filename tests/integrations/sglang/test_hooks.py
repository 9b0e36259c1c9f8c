"""The hooks of start-up: sizes, the MLA rule, attaching, and what kpolicy leaves to SGLang."""

import logging
import os
import pickle
import subprocess
import sys
import warnings
from collections import namedtuple
from types import ModuleType, SimpleNamespace

import pytest

from kpolicy.attention.support import Claims
from kpolicy.costs import Curve, analytic_costs
from kpolicy.errors import ConfigError
from kpolicy.ladders import CaptureSizes
from kpolicy.reasons import Reason
from kpolicy.schemas import LadderPlan, read_decision_log, write_plan
from kpolicy.settings import Objective, Settings
from kpolicy.simulate.recorded import replay
from kpolicy_sglang import dispatch, hooks, sizes
from kpolicy_sglang.arguments import own_sizes, running_per_rank
from kpolicy_sglang.calibrate import cost_tables
from kpolicy_sglang.config import Config
from kpolicy_sglang.counters import lines
from kpolicy_sglang.failures import Failures
from kpolicy_sglang.phase import DECODE, PREFILL, MixedCost, Phase, table_of
from kpolicy_sglang.split import counted, split_of
from kpolicy_sglang.state import State, state_of


@pytest.fixture(autouse=True)
def _configured():
    hooks.configure(Config(), "0.5.16")
    yield
    hooks.configure(None)


def arguments(**fields):
    made = SimpleNamespace(
        disable_cuda_graph=False, pp_size=1, enable_two_batch_overlap=False, enable_pdmux=False, dp_size=1, tp_size=1,
        disable_cuda_graph_padding=False, max_running_requests=768, _cuda_graph_config_locked=set(),
        cuda_graph_config=SimpleNamespace(decode=SimpleNamespace(max_bs=256)), chunked_prefill_size=8192,
        enable_metrics=False, model_path="model", attention_backend="triton", prefill_attention_backend=None,
    )  # fmt: skip
    made.__dict__.update(fields)
    return made


def stock(*_):
    return [1, 2, 256]


def test_sizes_up_to_the_requests_that_may_run():
    """Decode sizes end with them on both versions, and 0.5.16 sets memory aside for that."""
    assert sizes.decode_sizes(stock, arguments(), 256)[-1] == 768
    args = arguments()
    assert sizes.decode_sizes_0_5_16(stock, args, 256)[-1] == 768
    assert own_sizes(pickle.loads(pickle.dumps(args))) == {DECODE: 3}  # noqa: S301  the arguments go to other processes
    assert args.cuda_graph_config.decode.max_bs == 768
    few = arguments(max_running_requests=2)
    assert sizes.decode_sizes_0_5_16(stock, few, 256) == [1, 2]
    assert own_sizes(few) == {DECODE: 2}
    assert sizes.decode_sizes(stock, arguments(max_running_requests=None), 256)[-1] == 1024
    for own in (8, 48, 160):
        assert sizes.decode_sizes(stock, arguments(max_running_requests=None), own)[-1] == own


@pytest.mark.parametrize(
    ("fields", "largest"),
    [({"dp_size": 4}, 768), ({"dp_size": 4, "enable_dp_attention": True}, 192),
     ({"dp_size": 4, "attn_dp_size": 2}, 384), ({"dp_size": 4, "attn_dp_size": 1}, 768)],
)  # fmt: skip
def test_replicas_have_the_requests_to_themselves(fields, largest):
    """Only ranks of data-parallel attention share the requests that may run."""
    assert sizes.decode_sizes(stock, arguments(**fields), 256)[-1] == largest


@pytest.mark.parametrize(
    ("settings", "fields"),
    [
        ({}, {}),
        ({"calibrate": False}, {}),
        ({"policy": "sglang"}, {}),
        ({}, {"dp_size": 4, "enable_dp_attention": True}),
    ],
)
def test_default_prefill_sizes_are_sglangs(settings, fields):
    """Whether costs are had or not, no prompt is further from a size than in SGLang's own list."""
    hooks.configure(Config(**settings), "0.5.16")
    assert sizes.prefill_sizes_0_5_16(lambda *_: [4, 12, 8192], arguments(**fields), 8192) == [4, 12, 8192]


@pytest.mark.parametrize(
    ("backend", "mla", "found"),
    [
        ("breakable", True, [64, 512, 1024, 4096, 8192]),
        ("breakable", False, [4, 64, 80, 352, 512, 1024, 1280, 1536, 4096, 4608, 8192]),
        ("tc_piecewise", True, [4, 64, 80, 352, 512, 1024, 1280, 1536, 4096, 4608, 8192]),
    ],
)
def test_prompts_that_sglang_would_run_eagerly_have_fewer_sizes(backend, mla, found):
    """MLA models have no prefill graphs in 0.5.16 otherwise: no prompt loses, and each size makes a start longer."""
    own = [4, 64, 80, 352, 512, 1024, 1280, 1536, 4096, 4608, 8192]
    args = arguments(use_mla_backend=lambda: mla)
    args.cuda_graph_config.prefill = SimpleNamespace(backend=backend)
    assert sizes.prefill_sizes_0_5_16(lambda *_: own, args, 8192) == found
    assert sizes.prefill_sizes_0_5_16(lambda *_: own[:-5], args, 1200)[-1] == 1200
    assert own_sizes(args) == {PREFILL: 0 if len(found) < len(own) else len(own[:-5])}


@pytest.mark.parametrize("left", ["enable_pdmux", "enable_two_batch_overlap"])
def test_a_deployment_left_alone_has_sglangs_sizes(left):
    """On both versions and in both phases, whoever asks first."""
    args, config = arguments(**{left: True}), SimpleNamespace(bs=None, max_bs=256)
    sizes.decode_limit(lambda *_: None, args, config, 1)
    assert config.max_bs == 256
    assert sizes.decode_sizes(stock, args, 256) == [1, 2, 256]
    assert sizes.prefill_sizes(lambda _: [4, 8], 8192) == [4, 8]
    assert sizes.prefill_sizes_0_5_16(lambda *_: [4, 8], args, 8192) == [4, 8]


@pytest.mark.parametrize(
    ("fields", "decode", "largest"),
    [({}, {}, 768), ({"max_running_requests": None}, {}, 1024), ({"max_running_requests": None}, {"max_bs": 48}, 48),
     ({}, {"bs": [1, 2]}, 256), ({"device": "cpu"}, {}, 256),
     ({"max_running_requests": 4096}, {}, 1024), ({"max_running_requests": 512}, {"max_bs": 8}, 8),
     ({"_cuda_graph_config_locked": {("decode", "max_bs")}}, {"max_bs": 100}, 100),
     ({"_cuda_graph_config_locked": {("decode", "max_bs")}}, {"max_bs": 1500}, 768),
     ({"_cuda_graph_config_locked": {("decode", "max_bs")}, "max_running_requests": 4096}, {"max_bs": 1500}, 1500)],
)  # fmt: skip
def test_memory_is_set_aside_for_the_largest_size(fields, decode, largest):
    """0.5.23 takes the largest size from its configuration, and that is the list's before anything reads it."""
    args, config = arguments(**fields), SimpleNamespace(**{"bs": None, "max_bs": 256, **decode})
    sizes.decode_limit(lambda *_: None, args, config, 1)
    assert config.max_bs == largest
    if config.bs is None and fields.get("device") != "cpu":
        assert sizes.decode_sizes(stock, args, config.max_bs)[-1] == largest


def own_list(_, most):
    """SGLang's list as it is for that largest size: 36 to 256, 68 to 1,024."""
    rising = (*(1, 2, 4, 8, 12), *range(16, 257, 8), *range(272, 512, 16), *range(512, most + 1, 32))
    found = [size for size in rising if size <= most]
    return found if most in found else [*found, most]


@pytest.mark.parametrize(("own", "above"), [(256, (384, 512, 768, 1024)), (512, (768, 1024)), (48, ())])
def test_sizes_in_the_order_of_0_5_23_are_sglangs_own_and_those_above(own, above):
    """It sets the largest size first and asks for its list then, which is longer for kpolicy's largest than its own."""
    args, config = arguments(max_running_requests=None), SimpleNamespace(bs=None, max_bs=own)
    sizes.decode_limit(lambda *_: None, args, config, 1)
    assert sizes.decode_sizes(own_list, args, config.max_bs) == [*own_list(args, own), *above]
    # Another deployment's arguments, a draft model's, have nothing of it.
    assert sizes.decode_sizes(own_list, arguments(max_running_requests=None), 64) == own_list(args, 64)


def test_given_largest_size_is_kept():
    """A largest size that the user gave bounds kpolicy's list too."""
    locked = arguments(_cuda_graph_config_locked={("decode", "max_bs")})
    assert sizes.decode_sizes(stock, locked, 100)[-1] == 100
    assert sizes.decode_sizes(stock, locked, 1500)[-1] == 768


@pytest.mark.parametrize("config", [None, "disabled", "no padding"])
def test_sglangs_own_sizes(config):
    """Off, without graphs, or without padding the list is SGLang's."""
    if config is None:
        hooks.configure(None)
    args = arguments(disable_cuda_graph=config == "disabled", disable_cuda_graph_padding=config == "no padding")
    assert sizes.decode_sizes(stock, args, 256) == [1, 2, 256]


def test_plan_that_cannot_be_read(tmp_path, caplog):
    """A plan that isn't one is named, and SGLang's sizes are captured; strictly, the start ends."""
    (tmp_path / "plan.json").write_text("{}")
    hooks.configure(Config(plan=str(tmp_path / "plan.json")), "0.5.16")
    args = arguments(get_model_config=lambda: SimpleNamespace(hf_config={}))
    with caplog.at_level(logging.ERROR):
        assert sizes.decode_sizes(stock, args, 256) == [1, 2, 256]
    assert "sizes can't be had" in caplog.text
    hooks.configure(Config(plan=str(tmp_path / "gone.json"), strict=True), "0.5.16")
    with pytest.raises(SystemExit, match="sizes can't be had"):
        sizes.prefill_sizes(lambda _: [4], 256)


def models(version, monkeypatch, config):
    """Has SGLang's ways to a model's config in that version; gives the arguments."""
    made = SimpleNamespace(hf_config=SimpleNamespace(to_dict=lambda: config))
    if version == "0.5.16":
        return arguments(get_model_config=lambda: made)
    overrides = ModuleType("sglang.srt.arg_groups.overrides")
    overrides.resolving_view, overrides.model_config_of = lambda args: args, lambda _: made
    monkeypatch.setitem(sys.modules, "sglang.srt.arg_groups.overrides", overrides)
    return arguments()


def planned_sizes(version, args):
    """Both phases' sizes, in the order in which that version asks."""
    if version == "0.5.16":
        return sizes.decode_sizes_0_5_16(stock, args, 256), sizes.prefill_sizes_0_5_16(lambda *_: [4, 256], args, 256)
    sizes.decode_limit(lambda *_: None, args, SimpleNamespace(bs=None, max_bs=256), 1)
    return sizes.decode_sizes(stock, args, 256), sizes.prefill_sizes(lambda _: [4, 256], 256)


@pytest.mark.parametrize("version", ["0.5.16", "0.5.23"])
def test_plan_of_another_model(version, tmp_path, caplog, monkeypatch):
    """SGLang's sizes are captured, with one message; strictly, the start ends. This model's plan is taken."""
    path = str(tmp_path / "plan.json")
    made = LadderPlan(
        sizes=CaptureSizes((1, 16), (), (64,)), keys=(), settings=Settings(), attention=Claims.at_level("mixed"),
        planned_from={"model": {"model_type": "qwen2", "hidden_size": 896}},
    )  # fmt: skip
    write_plan(path, made)
    for hidden, found in ((896, ([1, 16], [64])), (1536, ([1, 2, 256], [4, 256]))):
        args = models(version, monkeypatch, {"model_type": "qwen2", "hidden_size": hidden})
        hooks.configure(Config(plan=path), version)
        with caplog.at_level(logging.ERROR):
            assert planned_sizes(version, args) == found
    (record,) = caplog.records
    assert f"the plan {path} was made for another model: hidden_size 896 and not 1536" in record.message
    assert "SGLang's own sizes are captured" in record.message
    hooks.configure(Config(plan=path, decode_sizes=(2,), piecewise_sizes=(8,)), version)
    assert planned_sizes(version, args) == ([2], [8])
    hooks.configure(Config(plan=path, strict=True), version)
    with pytest.raises(SystemExit, match="hidden_size 896 and not 1536"):
        planned_sizes(version, args)


class Arguments:
    """Start-up arguments whose rules ask the object whether attention is MLA."""

    def __init__(self):
        self.__dict__.update(arguments().__dict__)
        self.prefill, self.lora = "breakable", False

    def use_mla_backend(self):
        return True

    def rules(self):
        if self.use_mla_backend() or self.lora:
            self.prefill = "disabled"


def test_mla_rule_stays_in_a_deployment_left_alone():
    """What kpolicy leaves to SGLang has its start-up rules too."""
    args = Arguments()
    args.pp_size = 2
    hooks.mla_rule_0_5_16(Arguments.rules, args)
    assert args.prefill == "disabled"


def test_mla_rule_alone_is_left_out():
    """0.5.16's MLA rule doesn't turn prefill graphs off; its other rules do; the object is as before."""
    args = Arguments()
    hooks.mla_rule_0_5_16(Arguments.rules, args)
    assert args.prefill == "breakable"
    assert args.use_mla_backend()
    args.lora = True
    hooks.mla_rule_0_5_16(Arguments.rules, args)
    assert args.prefill == "disabled"


@pytest.mark.parametrize(("attention", "prefill"), [("fa3", None), (None, None), ("triton", "fa3")])
def test_mla_rule_stays_where_graphs_were_not_checked(attention, prefill, caplog):
    """With another attention backend, or one that SGLang chooses later, only an explicit setting lifts the rule."""
    args = Arguments()
    args.attention_backend, args.prefill_attention_backend = attention, prefill
    with caplog.at_level(logging.INFO):
        hooks.mla_rule_0_5_16(Arguments.rules, args)
    assert args.prefill == "disabled"
    assert "KPOLICY_MLA_PREFILL=1" in caplog.text
    args.prefill = "breakable"
    hooks.configure(Config(mla_prefill=True), "0.5.16")
    hooks.mla_rule_0_5_16(Arguments.rules, args)
    assert args.prefill == "breakable"


@pytest.mark.parametrize("config", [None, Config(mla_prefill=False)])
def test_mla_rule_stays_unless_asked(config):
    """Off, or with the setting off, SGLang's rules are all there."""
    hooks.configure(config, "0.5.16")
    args = Arguments()
    hooks.mla_rule_0_5_16(Arguments.rules, args)
    assert args.prefill == "disabled"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"disable_cuda_graph": True}, "--disable-cuda-graph leaves no graphs"),
        ({"pp_size": 2}, "pipeline parallelism isn't supported"),
        ({"enable_two_batch_overlap": True}, "two-batch overlap isn't supported"),
        ({"enable_pdmux": True}, "PD multiplexing isn't supported"),
        ({"attn_cp_size": 2}, "context parallelism isn't supported"),
        ({"dcp_size": 2}, "context parallelism isn't supported"),
        ({"enable_prefill_cp": True}, "context parallelism isn't supported"),
    ],
)
def test_deployments_left_to_sglang(fields, said, caplog):
    """What isn't supported is said once, and SGLang starts as without kpolicy; strictly, it doesn't start."""
    runner = SimpleNamespace(is_draft_worker=False, server_args=arguments(**fields))
    with caplog.at_level(logging.ERROR):
        assert hooks.init_cuda_graphs(lambda _: "started", runner) == "started"
    assert said in caplog.text
    assert state_of(runner) is None
    hooks.configure(Config(strict=True), "0.5.16")
    with pytest.raises(SystemExit, match=said):
        hooks.init_cuda_graphs(lambda _: "started", runner)


def graph_runner(**fields):
    made = SimpleNamespace(
        capture_bs=[1, 8], captured_req_width=1, require_mlp_sync=False, capture_num_tokens=[64, 128],
        prefill_backend_name="breakable", has_mha_companion_layers=False,
    )  # fmt: skip
    made.__dict__.update(fields)
    return made


def model_runner(**fields):
    made = SimpleNamespace(
        is_draft_worker=False, server_args=arguments(), decode_cuda_graph_runner=None, prefill_cuda_graph_runner=None,
        req_to_token_pool=SimpleNamespace(size=16),
    )  # fmt: skip
    made.__dict__.update(fields)
    return made


def start(runner, decode, prefill):
    def original(runner):
        runner.decode_cuda_graph_runner, runner.prefill_cuda_graph_runner = decode, prefill

    hooks.init_cuda_graphs(original, runner)
    return state_of(runner)


def test_every_size_is_decided_as_sglang_starts():
    """No step waits for its size's decision, of any size that SGLang may run."""
    hooks.configure(Config(calibrate=False), "0.5.23")
    state = start(model_runner(), graph_runner(), graph_runner())
    for phase in (state.decode, state.prefill):
        phase._select = None
        most = len(phase.steps) - 2
        assert [phase.replays(size) for size in (phase.largest, most)] == [True, most == phase.largest]
        assert phase.failures.total == 0


def test_requests_of_a_rank_are_rounded_up():
    """Of ten requests over four ranks of data-parallel attention one has three."""
    args = arguments(max_running_requests=10, dp_size=4, enable_dp_attention=True)
    assert running_per_rank(args) == 3
    assert running_per_rank(arguments(max_running_requests=10, dp_size=4)) == 10
    assert running_per_rank(arguments(max_running_requests=None)) is None


def test_phases_are_those_that_were_captured():
    """Runners with graphs get a phase; the eager one doesn't."""
    hooks.configure(Config(calibrate=False), "0.5.23")
    state = start(model_runner(), graph_runner(), SimpleNamespace())
    assert set(state.phases) == {DECODE}
    state = start(model_runner(), None, graph_runner(has_mha_companion_layers=True))
    assert set(state.phases) == {PREFILL}
    assert not state.prefix_is_eager


def test_draft_models_stay_sglangs():
    """A draft worker isn't attached to."""
    hooks.configure(Config(calibrate=False), "0.5.16")
    assert start(model_runner(), graph_runner(), graph_runner()) is not None
    assert start(model_runner(is_draft_worker=True), graph_runner(), graph_runner()) is None


def test_drafts_leave_decode_to_sglang():
    """Decodes that verify drafts go by SGLang's rule; prefill is decided."""
    hooks.configure(Config(calibrate=False), "0.5.16")
    state = start(model_runner(), graph_runner(captured_req_width=4), graph_runner())
    assert set(state.phases) == {PREFILL}
    assert "decodes with drafts" in state.messages[0]


def test_measuring_that_fails_leaves_sglangs_rule(caplog, monkeypatch):
    """What goes wrong after the captures costs the decision, not the start."""
    runner, decode = model_runner(), graph_runner()

    def fails(*_):
        raise RuntimeError("no device")

    monkeypatch.setattr("kpolicy_sglang.calibrate.cost_tables", fails)
    with caplog.at_level(logging.ERROR):
        start(runner, decode, None)
    assert "RuntimeError: no device. SGLang's own rule decides" in caplog.text
    assert not hasattr(decode, dispatch.ATTRIBUTE)


def test_what_kpolicy_itself_says_is_said_once(caplog, monkeypatch):
    """A profile that can't be had is one line, without where in the code that was found."""

    def fails(*_):
        raise ConfigError("x.json isn't there.")

    monkeypatch.setattr("kpolicy_sglang.calibrate.cost_tables", fails)
    with caplog.at_level(logging.ERROR):
        start(model_runner(), graph_runner(), None)
    (record,) = caplog.records
    assert record.message == "kpolicy: x.json isn't there. SGLang's own rule decides"
    assert record.exc_info is None


def test_failure_after_costs_are_known_turns_split_off_too(monkeypatch):
    """What was measured before the failure decides nothing: no split of the scheduler is made from it."""
    runner, decode = model_runner(), graph_runner()
    curve, kept = Curve((64, 128), (9e6, 9e6)), []

    def measured(_, state, __):
        kept.append(state)
        state.mixed = MixedCost(curve, curve, 2, 32)
        return {DECODE: table_of("test", {1: 10, 8: 10}, {1: 100})}

    def fails(*_):
        raise ValueError("broken")

    monkeypatch.setattr("kpolicy_sglang.calibrate.cost_tables", measured)
    scheduler = SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner), is_mixed_chunk=True)
    monkeypatch.setattr(hooks, "_policies", fails)
    start(runner, decode, None)
    assert state_of(runner) is None
    assert not hasattr(decode, dispatch.ATTRIBUTE)
    assert split_of(scheduler) is None
    assert kept[0].decode is None
    assert kept[0].mixed is None


def test_steps_of_measuring_are_not_counted(monkeypatch):
    """Dummies that SGLang's own rule is asked about while costs are measured are no requests."""
    runner, decode = model_runner(), graph_runner()
    shape = namedtuple("Shape", "size variant_label stream_idx")(8, None, None)
    backend = SimpleNamespace(capture_one=lambda _: None, replay=lambda _: "replayed", cleanup=lambda: None)

    def original(runner):
        runner.decode_cuda_graph_runner, decode.model_runner = decode, runner
        hooks.decode_backend(lambda _: backend, decode).capture_one(shape)

    def measured(_, state, __):
        state.decode.ran(3, None)
        state.decode.ran_as_voted(3, 8, None)
        state.decode.was_refused(3, None, Reason.BACKEND_REFUSED)
        backend.replay(shape)
        return {}

    monkeypatch.setattr("kpolicy_sglang.calibrate.cost_tables", measured)
    hooks.configure(Config(), "0.5.16")
    hooks.init_cuda_graphs(original, runner)
    state = state_of(runner)
    assert state.phases[DECODE] is getattr(decode, dispatch.ATTRIBUTE)
    assert lines(state.decode) == []
    assert len(state.registry.unused()) == 1
    assert dispatch.decode_can_run(lambda *_: True, decode, SimpleNamespace(batch_size=3))
    assert backend.replay(shape) == "replayed"
    assert [(record.key.num_tokens, record.hits) for record in state.registry.records()] == [(8, 1)]


def test_counters_that_cannot_be_had_leave_the_decisions(monkeypatch, caplog):
    """The first rank alone counts; if that made it fall back to SGLang's rule, ranks would part."""

    def fails(**_):
        raise ValueError("Duplicated timeseries")

    monkeypatch.setattr(hooks, "Metrics", fails)
    hooks.configure(Config(calibrate=False), "0.5.16")
    decode = graph_runner()
    with caplog.at_level(logging.WARNING):
        state = start(model_runner(server_args=arguments(enable_metrics=True)), decode, None)
    assert state.phases[DECODE] is getattr(decode, dispatch.ATTRIBUTE)
    assert state.metrics is None
    assert "Duplicated timeseries" in caplog.text


def test_ranks_that_step_together_measure_nothing():
    """A step of one rank would wait for the others; the message says what to do."""
    state = State(Config(), "0.5.23")
    state.coupled = True
    assert cost_tables(model_runner(), state) == {}
    assert "KPOLICY_PROFILE" in state.messages[0]


def test_data_parallel_attention_is_seen_at_the_runner():
    """Whether ranks step together is what the decode runner says."""
    hooks.configure(Config(), "0.5.23")
    state = start(model_runner(), graph_runner(require_mlp_sync=True), graph_runner())
    assert state.coupled
    assert "KPOLICY_PROFILE" in state.messages[0]


@pytest.mark.parametrize(("dp", "coupled"), [(4, True), (1, False)])
def test_data_parallel_attention_is_seen_without_decode_graphs(dp, coupled):
    """Prompts' graphs alone are left unmeasured too: a step of one rank would wait for the others."""
    hooks.configure(Config(calibrate=False), "0.5.23")
    args = arguments(dp_size=dp, enable_dp_attention=dp > 1)
    state = start(model_runner(server_args=args), SimpleNamespace(), graph_runner())
    assert (set(state.phases), state.coupled, state.prefill.coupled) == ({PREFILL}, coupled, coupled)


def test_eager_runner_bare_is_wrapped(monkeypatch, caplog):
    """0.5.23 returns its eager runner alone where no size fits, and its caller reads fields that it hasn't."""
    module = ModuleType("sglang.srt.model_executor.model_runner_components.cuda_graph_setup")
    module.GraphCapture = SimpleNamespace
    for name in (
        "sglang",
        "sglang.srt",
        "sglang.srt.model_executor",
        "sglang.srt.model_executor.model_runner_components",
    ):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    eager = SimpleNamespace(name="eager")
    with caplog.at_level(logging.WARNING):
        found = hooks.capture_prefill_graph(lambda **_: eager, model_runner=None, eager_runner=eager)
    assert (found.runner, found.memory_phase, found.memory_usage_gb, found.capture_time) == (eager, "prefill", 0, 0)
    assert "no prefill size fits" in caplog.text
    draft = SimpleNamespace(is_draft_worker=True)
    found = hooks.capture_prefill_graph(lambda **_: eager, model_runner=draft, eager_runner=eager)
    assert found.memory_phase == "draft_prefill"
    whole = SimpleNamespace(runner=None, memory_phase="prefill")
    assert hooks.capture_prefill_graph(lambda **_: whole) is whole


def test_decision_log_has_every_step(tmp_path):
    """Each step's batch and decision are written, refused ones with SGLang's reason."""
    path = tmp_path / "log.jsonl"
    hooks.configure(Config(calibrate=False, decision_log=str(path)), "0.5.16")
    runner = model_runner(decode_cuda_graph_runner=None)
    state = start(runner, graph_runner(), graph_runner())
    decode, prefill = state.phases[DECODE], state.phases[PREFILL]
    decode.ran(5, SimpleNamespace(batch_size=5, seq_lens_sum=500))
    mixed = SimpleNamespace(
        batch_size=4, extend_seq_lens_cpu=[60, 9, 1, 1], extend_prefix_lens_cpu=[0, 30, 99, 49],
        forward_mode=SimpleNamespace(name="MIXED"),
    )  # fmt: skip
    prefill.ran(71, mixed)
    from kpolicy.reasons import Reason

    prefill.was_refused(71, mixed, Reason.INPUT_EMBEDDINGS)
    decode.log.__self__.close()
    log = read_decision_log(path)
    assert not log.cut_short
    assert log.header.policy == "auto"
    assert log.header.extra == {"sizes": {"decode": [1, 8], "piecewise": [64, 128]}}
    assert len(replay(log, ["auto", "sglang"])) == 3
    first, second, third = log.entries
    assert (first.shape.numbers.num_decodes, first.shape.numbers.decode_kv_tokens) == (5, 500)
    assert first.decision["launches"][0] | {"rows": 0} == {
        "rows": 0, "graph": "FULL 8t/8r q=1", "tokens": 5, "padding": 3, "stream": 0, "repeat": 1,
    }  # fmt: skip
    assert second.shape.prefills == ((60, 0), (9, 30))
    assert second.shape.decodes == ((1, 2),)
    assert second.shape.decode_kv_tokens == 150
    assert (second.decision["mode"], third.decision["mode"]) == ("piecewise", "eager")
    assert third.reason == "input_embeddings"


def test_the_log_is_decided_again_by_the_costs_that_decided_it(tmp_path, monkeypatch):
    """Each phase's costs are in the header, so that `auto` decides again as it did, over the graphs of that phase."""
    path = tmp_path / "log.jsonl"
    tables = {
        DECODE: table_of("of decodes", {1: 3000, 8: 3000}, {1: 1000, 8: 9000}),
        PREFILL: table_of("of prompts", {64: 50, 128: 20_000}, {64: 1000, 128: 1000}),
    }
    monkeypatch.setattr("kpolicy_sglang.calibrate.cost_tables", lambda *_: tables)
    hooks.configure(Config(decision_log=str(path)), "0.5.16")
    state = start(
        model_runner(), graph_runner(device_module=SimpleNamespace(get_device_name=lambda: "H")), graph_runner()
    )
    decode, prefill = state.phases[DECODE], state.phases[PREFILL]
    for size in (1, 1, 6, 7, 8):
        decode.ran(size, SimpleNamespace(batch_size=size, seq_lens_sum=40 * size))
    for size in (1, 64, 100, 128):
        batch = SimpleNamespace(batch_size=1, extend_seq_lens_cpu=[size], extend_prefix_lens_cpu=[0], forward_mode=None)
        prefill.ran(size, batch)
    decode.log.__self__.close()
    log = read_decision_log(path)
    assert (log.header.device, log.header.costs_version) == ("H", "of decodes, of prompts")
    found = replay(log, ["auto", "sglang"])
    assert dict(found[0].modes) == {"eager": 4, "full": 3, "piecewise": 2}
    assert (found[1].same, found[1].cycle_us, found[1].padding) == (9, found[0].cycle_us, found[0].padding)
    assert found[0].cycle_us == 2 * 1000 + 3 * 3000 + 2 * 50 + 2 * 1000
    assert found[2].same == 4
    assert replay(log, ["auto"], costs=analytic_costs())[0].cycle_us != found[0].cycle_us


def test_steps_without_rows_are_left_out_of_the_log(tmp_path):
    """An idle rank's batch, and one whose rows SGLang doesn't tell, are no steps of the log, and harm nothing."""
    path = tmp_path / "log.jsonl"
    hooks.configure(Config(calibrate=False, decision_log=str(path)), "0.5.16")
    state = start(model_runner(), graph_runner(), graph_runner())
    decode, prefill = state.phases[DECODE], state.phases[PREFILL]
    extend = SimpleNamespace(name="EXTEND")
    prefill.ran(
        0, SimpleNamespace(batch_size=0, extend_seq_lens_cpu=[], extend_prefix_lens_cpu=[], forward_mode=extend)
    )
    prefill.ran(9, SimpleNamespace(batch_size=1, extend_seq_lens_cpu=None, extend_prefix_lens_cpu=None))
    prefill.ran(
        9, SimpleNamespace(batch_size=1, extend_seq_lens_cpu=[0], extend_prefix_lens_cpu=[9], forward_mode=extend)
    )
    decode.ran(0, SimpleNamespace(batch_size=0))
    decode.ran(3, SimpleNamespace(batch_size=3, seq_lens_sum=None))
    log = decode.log.__self__
    assert log.left_out == 4
    log.close()
    assert [entry.shape.numbers.num_decodes for entry in read_decision_log(path).entries] == [3]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system doesn't fork")
def test_a_forked_process_leaves_the_log_to_the_other(tmp_path, caplog):
    """What is decided in it isn't written, without a warning."""
    path = tmp_path / "log.jsonl"
    hooks.configure(Config(calibrate=False, decision_log=str(path)), "0.5.16")
    decode = start(model_runner(), graph_runner(), None).phases[DECODE]
    step = SimpleNamespace(batch_size=5, seq_lens_sum=500)
    decode.ran(5, step)
    caplog.clear()
    with warnings.catch_warnings():
        # Some versions of Python warn where other tests left threads.
        warnings.simplefilter("ignore")
        child = os.fork()
    if not child:
        told = True
        try:
            decode.ran(5, step)
            decode.log.__self__.close()
            told = bool(caplog.records)
        finally:
            os._exit(told)
    assert os.waitpid(child, 0)[1] == 0
    decode.ran(5, step)
    decode.log.__self__.close()
    log = read_decision_log(path)
    assert (len(log.entries), log.cut_short) == (2, False)


@pytest.mark.parametrize("broken", ["batch", "disk"])
def test_log_that_fails_ends_and_serving_goes_on(tmp_path, caplog, monkeypatch, broken):
    """Whatever a step or the file raises, the log ends with one warning; what it has can be read."""
    path = tmp_path / "log.jsonl"
    hooks.configure(Config(calibrate=False, decision_log=str(path)), "0.5.16")
    decode = start(model_runner(), graph_runner(), None).phases[DECODE]
    good, bad = SimpleNamespace(batch_size=5, seq_lens_sum=500), SimpleNamespace(batch_size=5)
    decode.ran(5, good)
    if broken == "disk":
        bad = good

        def full(*_):
            raise OSError("No space left on device")

        monkeypatch.setattr(decode.log.__self__._writer, "write", full)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            decode.ran(5, bad)
    assert [record.message.partition(":")[2][:28] for record in caplog.records] == [" the decision log ends here:"]
    assert decode.steps[5] == 4
    assert len(read_decision_log(path).entries) == 1


def test_log_of_a_deployment_that_0_5_23_resolves(tmp_path, monkeypatch):
    """0.5.23 keeps arguments as given: the log's limits are those of what was captured, and it is decided again."""
    path = tmp_path / "log.jsonl"
    hooks.configure(Config(calibrate=False, decision_log=str(path)), "0.5.23")
    runner = model_runner()
    runner.server_args.chunked_prefill_size = None
    state = start(runner, graph_runner(), graph_runner())
    state.phases[DECODE].ran(5, SimpleNamespace(batch_size=5, seq_lens_sum=500))
    mode = SimpleNamespace(name="EXTEND")
    prompt = SimpleNamespace(batch_size=1, extend_seq_lens_cpu=[50], extend_prefix_lens_cpu=[0], forward_mode=mode)
    state.phases[PREFILL].ran_as_voted(50, 64, prompt)
    monkeypatch.setattr("kpolicy_sglang.state.METRICS_S", 0.0)
    state.tick()
    # What a killed server leaves.
    found = read_decision_log(path)
    assert found.cut_short
    assert [entry.decision["reason"] for entry in found.entries][1] == "graph_fits"
    state.phases[DECODE].log.__self__.close()
    command = [sys.executable, "-m", "kpolicy", "simulate", "--decisions", str(path), "--policy", "sglang"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"dp_size": 1}, "log"),
        ({"dp_size": 4}, "log.dp3"),
        # 0.5.16 and 0.5.23 under data-parallel attention: each of its ranks has requests of its own.
        ({"dp_size": 4, "enable_dp_attention": True}, "log.dp2"),
        ({"dp_size": 1, "attn_dp_size": 4}, "log.dp2"),
    ],
)
def test_replicas_have_logs_and_labels_of_their_own(fields, name, tmp_path, monkeypatch):
    """Data-parallel ranks, replicas or of attention, are processes with the same settings and other requests."""
    told = []
    monkeypatch.setattr(hooks, "Metrics", lambda dp_rank: told.append(dp_rank))
    hooks.configure(Config(calibrate=False, decision_log=str(tmp_path / "log")), "0.5.16")
    runner = model_runner()
    runner.server_args.__dict__.update(fields, enable_metrics=True)
    runner.ps = SimpleNamespace(tp_rank=5, attn_tp_rank=0, dp_rank=3, attn_dp_rank=2)
    start(runner, graph_runner(), None)
    assert [each.name for each in tmp_path.iterdir()] == [name]
    assert told == [int(name[-1]) if "." in name else None]


@pytest.mark.parametrize("where", ["runner", "ps", "context"])
def test_other_ranks_count_nothing(where, tmp_path, monkeypatch):
    """Of ranks that run the same requests the first alone has counters and the log, on both releases."""
    hooks.configure(Config(calibrate=False, decision_log=str(tmp_path / "log")), "0.5.23")
    runner = model_runner()
    ranks = SimpleNamespace(attn_tp_rank=1, dp_rank=0)
    if where == "runner":
        runner.attn_tp_rank = 1
    elif where == "ps":
        runner.ps = ranks
    else:
        module = ModuleType("sglang.srt.runtime_context")
        module.get_parallel = lambda: ranks
        for name in ("sglang", "sglang.srt"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    start(runner, graph_runner(), None)
    assert not list(tmp_path.iterdir())


def test_a_phase_without_graphs_is_said(caplog):
    """Whoever turned one phase off reads that its steps are SGLang's; without any there is nothing to decide."""
    hooks.configure(Config(calibrate=False), "0.5.16")
    start(model_runner(), None, graph_runner())
    start(model_runner(), graph_runner(captured_req_width=4), None)
    assert "SGLang has no decode graphs here" in caplog.text
    assert "SGLang has no prefill graphs here" in caplog.text
    caplog.clear()
    start(model_runner(), SimpleNamespace(), SimpleNamespace())
    assert [record.message for record in caplog.records] == [
        "kpolicy: SGLang captured no graphs here, so that there is nothing to decide; SGLang's own rules stay"
    ]
    hooks.configure(Config(strict=True), "0.5.16")
    with pytest.raises(SystemExit, match="captured no graphs"):
        start(model_runner(), None, None)


def test_log_that_cannot_be_written(tmp_path, caplog):
    """A log in a folder that isn't there is named; SGLang serves without it."""
    hooks.configure(Config(calibrate=False, decision_log=str(tmp_path / "no" / "log.jsonl")), "0.5.16")
    with caplog.at_level(logging.ERROR):
        state = start(model_runner(), graph_runner(), None)
    assert "no decision log" in caplog.text
    assert state.phases[DECODE].log is None


def test_counters_beside_sglangs_metrics():
    """Prometheus counters rise by what came since the last flush."""
    prometheus = pytest.importorskip("prometheus_client")
    from kpolicy_sglang.metrics import Metrics

    registry = prometheus.CollectorRegistry()
    phase, metrics = Phase(PREFILL, (64, 128), 200, full=False), Metrics(registry)
    for _ in range(2):
        phase.ran(50, None)
        phase.ran(190, None)
        metrics.flush({PREFILL: phase})

    def value(name, **labels):
        return registry.get_sample_value(name, labels)

    assert value("sglang:kpolicy_steps_total", phase="prefill", mode="piecewise", reason="graph_fits") == 2
    assert value("sglang:kpolicy_steps_total", phase="prefill", mode="eager", reason="above_largest_size") == 2
    assert value("sglang:kpolicy_padding_tokens_total", phase="prefill", mode="piecewise") == 28
    assert value("sglang:kpolicy_replays_total", phase="prefill", size="64") == 2


def test_padding_of_two_reasons_of_a_mode_adds_up():
    """A replay that ranks agreed on has another reason than one by cost, and the same counter of padding."""
    prometheus = pytest.importorskip("prometheus_client")
    from kpolicy_sglang.metrics import Metrics

    registry = prometheus.CollectorRegistry()
    phase, metrics = Phase(PREFILL, (64, 128), 200, full=False), Metrics(registry)
    phase.install("auto", table_of("test", {64: 10, 128: 20}, {1: 1000}), Objective())
    labels = {"phase": "prefill", "mode": "piecewise"}
    for times in (1, 2):
        phase.ran(50, None)
        phase.ran_as_voted(60, 128, None)
        metrics.flush({PREFILL: phase})
        assert registry.get_sample_value("sglang:kpolicy_padding_tokens_total", labels) == times * (14 + 68)
    for reason in ("cheapest_measured", "graph_fits"):
        assert registry.get_sample_value("sglang:kpolicy_steps_total", {**labels, "reason": reason}) == 2


def test_the_clock_is_read_now_and_then(monkeypatch):
    """Iterations of the scheduler are many: most of them count and do nothing else."""
    state, seen = State(Config(), "0.5.16"), []
    state.metrics = SimpleNamespace(flush=lambda *_: seen.append("flushed"))
    monkeypatch.setattr("kpolicy_sglang.state.METRICS_S", 0.0)
    for _ in range(2 * 128 - 1):
        counted(state, None, lambda *_: None, None)
    assert seen == ["flushed"]


def test_counters_of_data_parallel_ranks_are_told_apart():
    """With several of them every counter has the rank, as SGLang's own have."""
    prometheus = pytest.importorskip("prometheus_client")
    from kpolicy_sglang.metrics import Metrics

    registry, phase, failures = prometheus.CollectorRegistry(), Phase(PREFILL, (64,), 200, full=False), Failures()
    phase.ran(50, None)
    failures.note("counting", ValueError())
    Metrics(registry, dp_rank=2).flush({PREFILL: phase}, failures)
    found = [sample for metric in registry.collect() for sample in metric.samples]
    assert len({sample.name for sample in found if sample.name.endswith("_total")}) == 4
    assert {sample.labels["dp_rank"] for sample in found} == {"2"}
