"""vLLM's own first runner and start-up code, out of the wheels, with the plugin loaded into them."""

import gc
import importlib
import logging
import threading
import weakref
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import attrs
import pytest

from kpolicy.costs import analytic_costs
from kpolicy.decision import Decision, Launch
from kpolicy.keys import GraphKey
from kpolicy.modes import Mode, Part, Rows
from kpolicy.reasons import Reason
from kpolicy.schemas import read_decision_log
from kpolicy_vllm import plugin
from kpolicy_vllm.experts import unbalanced
from kpolicy_vllm.metrics import folder
from kpolicy_vllm.started import NO_GRAPHS, _publisher
from kpolicy_vllm.state import PROCESS, Counters, state_of
from kpolicy_vllm.versions import KNOWN, signatures
from tests.integrations.vllm.real_runner import ask_v1, initialise_v1, runner_v1, sized, vllm_config, vllm_of
from tests.integrations.vllm.test_ladder import plan_of
from tests.integrations.vllm.test_oracle_dispatch import random_costs
from tests.oracle.wheels import VLLM_WHEELS

VERSIONS = ("0.23", "0.33")
STOCK_SIZES = [1, 2, 4, *range(8, 129, 8)]

pytestmark = VLLM_WHEELS


@pytest.fixture(autouse=True)
def fresh_warnings(monkeypatch):
    """Warnings are given once in a process, and each test is one."""
    monkeypatch.setattr(PROCESS, "counts", Counter())
    monkeypatch.setattr(PROCESS, "_warned", set())


@pytest.fixture(params=VERSIONS)
def vllm(request):
    """A vLLM with the plugin loaded."""
    with vllm_of(request.param) as modules:
        plugin.register()
        yield modules


def served(modules, *, backend="FLASH_ATTN", level="ALWAYS", runner=None, **settings):
    """A runner after start-up, as vLLM's worker brings it up."""
    config = vllm_config(modules, **settings)
    sized(modules, config)
    runner = runner or runner_v1(modules, config)
    attached(modules, config, runner)
    initialise_v1(runner, modules, backend, level)
    runner.capture_model()
    return runner


def attached(modules, config, runner):
    """Have vLLM's worker wrapper make its device ready, which is when the plugin sees the runner."""
    wrapper = object.__new__(modules.module("v1.worker.worker_base").WorkerWrapperBase)
    wrapper.vllm_config = config
    wrapper._worker_extension_cls = None
    wrapper.worker = SimpleNamespace(init_device=lambda: None, model_runner=runner)
    wrapper.init_device()


@pytest.mark.parametrize("version", VERSIONS)
def test_recorded_signatures_are_live(version):
    """What was recorded of each release is what its wheel has."""
    with vllm_of(version):
        recorded = importlib.import_module(KNOWN[f"{version}.0"]).make().signatures
        assert set(recorded) == {"config", "v1", "v2", "scheduler", "ranks", "engine", "two forwards"}
        for names in recorded.values():
            assert list(signatures.differing(names)) == []


def test_off_is_stock(vllm):
    """Without the flag nothing of a runner is touched, and sizes are vLLM's own."""
    config = vllm_config(vllm, kpolicy=None)
    sized(vllm, config)
    runner = runner_v1(vllm, config)
    before = dict(vars(runner))
    attached(vllm, config, runner)
    assert vars(runner) == before
    assert config.compilation_config.cudagraph_capture_sizes == STOCK_SIZES
    assert config.additional_config == {}


def test_ladders_are_captured(vllm):
    """Each kind of graph has sizes of its own; decodes reach the most requests, pieces go past 512."""
    runner = served(vllm, max_num_seqs=600, max_num_batched_tokens=4096)
    state = state_of(runner.vllm_config)
    ladder = state.ladder
    assert ladder.uniform[1][-1].num_tokens == 600
    assert ladder.piecewise[-1].num_tokens == 4096
    assert ladder.mixed[-1].num_tokens == 512
    assert len(ladder.piecewise) < len(ladder.uniform[1])
    captured = {(mode.name, desc) for mode, desc in runner.ran if mode.name != "NONE"}
    assert len(captured) == len(ladder)
    assert state.registry.totals().held.seconds > 0


def test_vllm_rule_until_costs(vllm):
    """Without costs the next graph of the best kind replays; with costs the cheapest way is taken."""
    runner = served(vllm, max_num_seqs=600, max_num_batched_tokens=4096, kpolicy={"calibrate": False})
    assert [ask_v1(runner, new)[0] for new in ([1] * 600, [1] * 9 + [100], [700], [3000])] == [
        "FULL", "FULL", "PIECEWISE", "PIECEWISE",
    ]  # fmt: skip
    state = state_of(runner.vllm_config)
    assert not state.ready
    state.install_costs(analytic_costs())
    assert state.ready
    assert ask_v1(runner, [1] * 5)[0] == "FULL"
    assert {reason for _, reason in state.dispatcher.chooser.tallies()} >= {"vllm_rule", "cheapest_analytic"}


def test_cheapest_size(vllm):
    """A larger graph that is cheaper than the next one is taken."""
    import attrs

    from kpolicy.costs import Curve

    runner = served(vllm, kpolicy={"calibrate": False, "decode_sizes": [4, 8, 16]})
    curve = Curve((4, 8, 16), (1000.0, 5000.0, 2000.0))
    state_of(runner.vllm_config).install_costs(attrs.evolve(analytic_costs(), measured=True, full=curve))
    assert ask_v1(runner, [1] * 7)[1].num_tokens == 16


def test_a_drafter_keeps_its_own_dispatcher(vllm):
    """Its sizes and modes are vLLM's; its graphs are on record beside the model's."""
    config = vllm_config(vllm, kpolicy={"calibrate": False})
    sized(vllm, config)
    runner = runner_v1(vllm, config)
    stock = vllm.module("v1.cudagraph_dispatcher").CudagraphDispatcher
    own = stock(config)
    own.initialize_cudagraph_keys(vllm.module("config.compilation").CUDAGraphMode.PIECEWISE, 1)
    keys = {mode: set(descs) for mode, descs in own.cudagraph_keys.items()}
    runner.drafter = SimpleNamespace(cudagraph_dispatcher=own)
    attached(vllm, config, runner)
    initialise_v1(runner, vllm, "FLASH_ATTN", "ALWAYS")
    runner.capture_model()
    assert runner.drafter.cudagraph_dispatcher is own
    assert type(own) is stock
    assert own.cudagraph_keys == keys
    assert type(runner.cudagraph_dispatcher) is not stock
    drafts = [record.key for record in state_of(config).registry.records() if record.key.stage == "draft"]
    assert {key.num_tokens for key in drafts} == {desc.num_tokens for descs in keys.values() for desc in descs}


def test_uniform_support_has_no_mixed_graphs(vllm):
    """Where attention captures decodes only, no FULL graph takes prompt chunks."""
    runner = served(vllm, backend="FLASHMLA", level="UNIFORM_BATCH")
    state = state_of(runner.vllm_config)
    assert not state.ladder.mixed
    assert state.ladder.piecewise
    assert ask_v1(runner, [1] * 9 + [20])[0] == "PIECEWISE"


@pytest.mark.parametrize("backend", ["FLASHINFER_MLA", "KIMI_KDA"])
def test_always_of_decode_backends_is_not_mixed(vllm, backend):
    """ALWAYS of a backend that only means decodes of any length doesn't bring mixed graphs."""
    runner = served(vllm, backend=backend)
    assert not state_of(runner.vllm_config).ladder.mixed


def test_speculation(vllm):
    """With three drafts decode graphs are of four tokens a request, and partial drafts don't take them."""
    runner = served(vllm, drafts=3, max_num_seqs=16, kpolicy={"policy": "full_and_piecewise"})
    mode, desc = ask_v1(runner, [4] * 5)
    assert (mode, desc.num_tokens, desc.num_reqs, desc.uniform) == ("FULL", 32, 8, True)
    assert not ask_v1(runner, [4, 4, 2])[1].uniform


def test_user_sizes_stay(vllm):
    """Sizes that the user gave to vLLM are the ones captured, of every kind."""
    runner = served(vllm, sizes=[1, 8, 64])
    assert runner.compilation_config.cudagraph_capture_sizes == [1, 8, 64]
    assert {key.num_tokens for key in state_of(runner.vllm_config).ladder.keys} == {1, 8, 64}


def test_compiled_sizes(vllm):
    """Sizes that vLLM compiles for stay on its list, or it wouldn't start; no graphs are captured of them."""
    config = vllm_config(vllm)
    config.compilation_config.compile_sizes = [24, 5000]
    sized(vllm, config)
    assert 24 in config.compilation_config.cudagraph_capture_sizes
    runner = runner_v1(vllm, config)
    attached(vllm, config, runner)
    config.compilation_config.compile_sizes = [24]
    initialise_v1(runner, vllm)
    assert 24 not in {key.num_tokens for key in state_of(config).dispatcher.desc_of}


def test_copied_configuration(vllm):
    """A configuration that is made again from a copy keeps the sizes."""
    config = vllm_config(vllm, max_num_seqs=600)
    sized(vllm, config)
    listed = list(config.compilation_config.cudagraph_capture_sizes)
    sized(vllm, config)
    assert config.compilation_config.cudagraph_capture_sizes == listed


def test_replica_keeps_vllm_sizes(vllm):
    """With the replica as the policy vLLM's own sizes and keys stay."""
    runner = served(vllm, kpolicy={"policy": "vllm:version=0.23,runner=v1"})
    assert runner.compilation_config.cudagraph_capture_sizes == STOCK_SIZES
    assert not state_of(runner.vllm_config).ladder.mixed
    assert state_of(runner.vllm_config).ready


@pytest.mark.parametrize(
    ("policy", "kinds"),
    [("eager", set()), ("piecewise", {"piecewise"}), ("full", {"full"}), ("auto", {"full", "piecewise"})],
)
def test_only_what_the_policy_can_choose(vllm, policy, kinds):
    """Graphs that a policy never chooses aren't captured."""
    runner = served(vllm, kpolicy={"policy": policy, "calibrate": False})
    state = state_of(runner.vllm_config)
    assert {key.part.value for key in state.ladder.keys} == kinds
    assert {mode.name for mode, _ in runner.ran} - {"NONE"} == {kind.upper() for kind in kinds}
    assert ask_v1(runner, [1] * 5)[0] in ({kind.upper() for kind in kinds} or {"NONE"})


def test_idle_rank(vllm):
    """An idle data-parallel rank asks with a dummy step of one decode, and is answered like a real one."""
    runner = served(vllm, kpolicy={"policy": "full_and_piecewise"})
    before = len(runner.ran)
    runner._dummy_run(1, uniform_decode=True)
    mode, desc = runner.ran[before]
    assert (mode.name, desc) == ask_v1(runner, [1])


def test_forced_eager(vllm):
    """A step that the runner wants eager is eager at its own size."""
    runner = served(vllm, kpolicy={"policy": "full_and_piecewise"})
    mode, desc = ask_v1(runner, [1] * 5, force_eager=True)
    assert (mode, desc.num_tokens) == ("NONE", 5)
    assert runner.cudagraph_dispatcher.facts is None, "whoever asks next asks of something else"


def test_forced_graph(vllm):
    """Forcing one graph, for timing it, answers with just that, and NONE stays NONE."""
    runner = served(vllm, kpolicy={"policy": "full_and_piecewise"})
    dispatcher = state_of(runner.vllm_config).dispatcher
    key = next(key for key in dispatcher.desc_of if key.part is Part.PIECEWISE)
    mode, desc = dispatcher.desc_of[key]
    with dispatcher.forcing(mode, desc):
        assert ask_v1(runner, [1] * 2) == (mode.name, desc)
        assert ask_v1(runner, [1] * 2, force_eager=True)[0] == "NONE"
    assert ask_v1(runner, [1] * 2)[0] == "FULL"
    assert dispatcher.key_of[mode, desc] == key


def test_registered_twice(vllm, caplog, monkeypatch):
    """Loading the plugin again wraps nothing a second time, says so once and counts it."""
    monkeypatch.setattr(plugin, "PROCESS", counters := Counters())
    owner = vllm.module("config.vllm").VllmConfig
    before = owner._set_cudagraph_sizes
    with caplog.at_level(logging.WARNING):
        plugin.register()
        plugin.register()
    assert owner._set_cudagraph_sizes is before
    assert counters.counts["loaded_twice"] == 2
    assert [record.getMessage() for record in caplog.records] == [
        "kpolicy: the plugin was loaded twice in this process; the second time does nothing."
    ]


def test_unknown_version(caplog):
    """Another vLLM is left as it is, with one warning that names the known ones."""
    with vllm_of("0.33") as modules, caplog.at_level(logging.WARNING):
        import sys

        sys.modules["vllm"].__version__ = "0.34.0"
        before = modules.module("config.vllm").VllmConfig._set_cudagraph_sizes
        plugin.register()
        assert modules.module("config.vllm").VllmConfig._set_cudagraph_sizes is before
    assert [record.getMessage() for record in caplog.records] == [
        "kpolicy: it is off, and vLLM runs as if it weren't installed: this is vLLM 0.34.0, and kpolicy-vllm knows "
        "0.23.0 and 0.33.0. Install one of them, or a kpolicy-vllm made for this one."
    ]


@pytest.mark.parametrize("version", VERSIONS)
def test_changed_configuration(version, caplog):
    """Where what the plugin wraps itself was changed, nothing is wrapped, with one warning that says what differs."""

    def sizes_with_more(self, surprise=None):
        """As no release has it."""

    with vllm_of(version) as modules, caplog.at_level(logging.WARNING):
        config_class = modules.module("config.vllm").VllmConfig
        config_class._set_cudagraph_sizes = sizes_with_more
        before = modules.module("v1.worker.worker_base").WorkerWrapperBase.init_device
        plugin.register()
        assert config_class._set_cudagraph_sizes is sizes_with_more
        assert modules.module("v1.worker.worker_base").WorkerWrapperBase.init_device is before
    (record,) = caplog.records
    assert "VllmConfig._set_cudagraph_sizes" in record.getMessage()
    assert "surprise" in record.getMessage()
    assert PROCESS.counts["other_vllm"] == 1


def changed(self, surprise=None):
    """A capture with one more argument than any release has."""


def test_changed_signature(vllm, caplog):
    """A runner that was changed is left as it is, and vLLM serves."""
    runner_class = vllm.module("v1.worker.gpu_model_runner").GPUModelRunner
    runner_class.capture_model = changed
    with caplog.at_level(logging.WARNING):
        runner = served(vllm)
    assert "capture_model" in caplog.text
    assert "surprise" in caplog.text
    assert type(runner.cudagraph_dispatcher).__name__ == "CudagraphDispatcher"
    assert state_of(runner.vllm_config).counters.counts["not_attached"] == 1


def test_enforce_eager(vllm, caplog):
    """With graphs off there is nothing to decide: one warning, and the runner is left as it is."""
    config = vllm_config(vllm, enforce_eager=True)
    with caplog.at_level(logging.WARNING):
        sized(vllm, config)
        runner = runner_v1(vllm, config)
        attached(vllm, config, runner)
    assert sum("nothing to decide" in record.getMessage() for record in caplog.records) == 1
    assert type(runner.cudagraph_dispatcher).__name__ == "CudagraphDispatcher"


def test_elastic_parallelism(vllm, caplog):
    """Engines that join later have none of the others' costs: it is off."""
    config = vllm_config(vllm, ranks=2)
    config.parallel_config.enable_elastic_ep = True
    with caplog.at_level(logging.WARNING):
        sized(vllm, config)
        runner = runner_v1(vllm, config)
        attached(vllm, config, runner)
    assert sum("engines that join later" in record.getMessage() for record in caplog.records) == 1
    assert PROCESS.counts == {"elastic": 1}
    assert config.compilation_config.cudagraph_capture_sizes == STOCK_SIZES
    assert type(runner.cudagraph_dispatcher).__name__ == "CudagraphDispatcher"


@pytest.mark.parametrize("setting", [{"polcy": "auto"}, {"policy": "vlm"}, {"lazy": "yes"}, 7])
def test_bad_setting(vllm, setting, caplog):
    """A setting that can't be used turns kpolicy off, with a warning that names it; sizes stay vLLM's."""
    config = vllm_config(vllm, kpolicy=setting)
    with caplog.at_level(logging.WARNING):
        sized(vllm, config)
        runner = runner_v1(vllm, config)
        attached(vllm, config, runner)
    assert config.compilation_config.cudagraph_capture_sizes == STOCK_SIZES
    assert state_of(config) is None
    assert type(runner.cudagraph_dispatcher).__name__ == "CudagraphDispatcher"
    assert len(caplog.records) == 1
    assert PROCESS.counts["bad_setting"] == 1


def test_misspelt_variable(vllm, monkeypatch, caplog):
    """A variable that is nearly a setting changes nothing, and that is said once and counted."""
    monkeypatch.setenv("KPOLICY_OBJECTVE", "latency")
    with caplog.at_level(logging.WARNING):
        served(vllm, kpolicy={"policy": "vllm"})
    assert [record.getMessage() for record in caplog.records] == [
        "kpolicy: KPOLICY_OBJECTVE isn't a setting and changes nothing; KPOLICY_OBJECTIVE is"
    ]
    assert PROCESS.counts["misspelt"] == 1


def test_plan_of_another_deployment(vllm, tmp_path, caplog):
    """A plan for other speculation leaves all to vLLM, with one warning that says what differs."""
    path = tmp_path / "plan.json"
    plan_of(path, num_speculative_tokens=2)
    with caplog.at_level(logging.WARNING):
        runner = served(vllm, kpolicy={"plan": str(path)})
    assert runner.compilation_config.cudagraph_capture_sizes == STOCK_SIZES
    assert "num_speculative_tokens is 2 there and 0 here" in caplog.text
    assert len(caplog.records) == 1


def test_plan_of_a_named_model(vllm, tmp_path, caplog):
    """A plan that says which model it was made for leaves all to vLLM with another, with one warning."""
    path = tmp_path / "plan.json"
    plan_of(path, model={"model_type": "qwen2", "hidden_size": 896})
    for hidden, sizes in ((896, [1, 2, 16]), (1536, STOCK_SIZES)):
        config = vllm_config(vllm, kpolicy={"plan": str(path)})
        config.model_config.hf_config = SimpleNamespace(
            to_dict=lambda n=hidden: {"model_type": "qwen2", "hidden_size": n}
        )
        with caplog.at_level(logging.WARNING):
            sized(vllm, config)
            attached(vllm, config, runner_v1(vllm, config))
        assert config.compilation_config.cudagraph_capture_sizes == sizes
    assert "another model: hidden_size 896 and not 1536" in caplog.text
    assert len(caplog.records) == 1
    assert PROCESS.counts["bad_setting"] == 1


class Wild:
    """A policy that decides what can't be carried out, or raises."""

    name = "wild"
    summary = ""
    reads_costs = False

    def __init__(self, decision=None):
        self.decision = decision

    def compile(self, _context):
        return self

    def select(self, *_):
        if self.decision is None:
            raise RuntimeError("out of ideas")
        return self.decision


def test_crash_in_the_policy(vllm, caplog):
    """A policy that raises costs a warning and a counter; vLLM's own rule answers."""
    runner = served(vllm, kpolicy={"policy": "full_and_piecewise"})
    state = state_of(runner.vllm_config)
    state.policy = Wild()
    with caplog.at_level(logging.WARNING):
        state.recompile()
        answers = [ask_v1(runner, new)[0] for new in ([1] * 5, [1] * 5, [1] * 6 + [30])]
    assert answers == ["FULL", "FULL", "FULL"]
    assert state.counters.counts["policy_failed"] == 2
    assert sum("out of ideas" in record.getMessage() for record in caplog.records) == 1


def test_illegal_decision(vllm, caplog):
    """A decision for a graph that isn't captured is refused with a warning; vLLM's own rule answers."""
    runner = served(vllm, kpolicy={"policy": "full_and_piecewise"})
    state = state_of(runner.vllm_config)
    other = GraphKey(Part.FULL, 5, 5, query_len=1)
    state.policy = Wild(Decision(Mode.FULL, (Launch(Rows.ALL, other),), Reason.GRAPH_FITS))
    with caplog.at_level(logging.WARNING):
        state.recompile()
        assert ask_v1(runner, [1] * 5)[1].num_tokens == 8
        assert ask_v1(runner, [1] * 7)[1].num_tokens == 8
    assert "isn't captured" in caplog.text
    assert state.counters.counts["illegal_decision"] == 2
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("made", "event"),
    [
        (lambda _: 7, "policy_failed"),
        (lambda key: decided(key, reason=None), "policy_failed"),
        (lambda key: decided(key, reason="it fits"), "policy_failed"),
        (lambda _: decided(None, launches=[None]), "policy_failed"),
        (lambda _: decided([]), "policy_failed"),
        (lambda key: decided(attrs.evolve(key, stage="draft")), "illegal_decision"),
        # The mode and the graph contradict each other: either may be what was meant.
        (lambda key: decided(key, mode=Mode.EAGER), "illegal_decision"),
        (lambda key: decided(key, mode=Mode.PIECEWISE), "illegal_decision"),
        (lambda _: decided(None), "illegal_decision"),
        (lambda key: decided(key, mode=None), "policy_failed"),
    ],
)
def test_what_is_no_decision(vllm, made, event):
    """Whatever a policy returns, vLLM is given a graph by its own rule, and it is counted."""
    runner = served(vllm, kpolicy={"policy": "full_and_piecewise"})
    state = state_of(runner.vllm_config)
    key = next(key for key in state.ladder.keys if key.part is Part.FULL and key.num_tokens == 8)
    state.policy = Wild(made(key))
    state.recompile()
    assert ask_v1(runner, [1] * 5)[1].num_tokens == 8
    assert state.dispatcher.chooser.tallies() == {("full", event): (1, 5, 3)}
    assert state.counters.counts == {event: 1}


def decided(key, *, mode=Mode.FULL, reason=Reason.GRAPH_FITS, launches=None):
    """A decision for a graph, as little checked as anyone's code may make it."""
    return Decision(mode, (Launch(Rows.ALL, key),) if launches is None else launches, reason)


def test_decision_log(vllm, tmp_path):
    """The log has each step's rows as they are, and the decision; dummy steps aren't in it."""
    import numpy as np

    path = tmp_path / "decisions.jsonl"
    runner = served(vllm, kpolicy={"policy": "full_and_piecewise", "decision_log": str(path)}, runner=None)
    state = state_of(runner.vllm_config)
    runner.input_batch.num_reqs = 3
    runner.input_batch.num_computed_tokens_cpu = np.array([50, 40, 7])
    runner.input_batch.num_prompt_tokens = np.array([30, 41, 90])
    ask_v1(runner, [1, 1, 20])
    runner._dummy_run(1, uniform_decode=True)
    state.log.close()
    log = read_decision_log(path)
    (entry,) = log.entries
    assert entry.shape.decodes == ((1, 1),)
    assert entry.shape.prefills == ((1, 40), (20, 7))
    assert entry.shape.decode_kv_tokens == 51
    assert entry.decision["mode"] == "full"
    assert log.header.versions["vllm"] in ("0.23.0", "0.33.0")


def test_engines_that_know_of_no_others_have_their_own_sizes(vllm):
    """Two are configured, and each then serves alone, with whole graphs of mixed batches."""
    config = vllm_config(vllm, kpolicy={"policy": "auto", "calibrate": False, "mixed_sizes": [100]}, ranks=2)
    config.model_config.is_moe = False
    sized(vllm, config)
    config.parallel_config.data_parallel_size = 1
    runner = runner_v1(vllm, config)
    attached(vllm, config, runner)
    initialise_v1(runner, vllm)
    runner.capture_model()
    mixed = [key.num_tokens for key in state_of(config).ladder.keys if key.part is Part.FULL and not key.decode_only]
    assert mixed == [100]
    assert not [key for key in state_of(config).ladder.keys if key.part is Part.PIECEWISE and key.num_tokens == 100]


def test_engines_that_know_of_no_others_tell_apart(vllm, tmp_path, monkeypatch):
    """Of a dense model vLLM tells each data-parallel engine that it is rank 0 of one; only its index is its own."""
    path = tmp_path / "decisions.jsonl"
    runner = served(vllm, kpolicy={"policy": "full_and_piecewise", "decision_log": str(path)}, index=1)
    state = state_of(runner.vllm_config)
    state.log.close()
    assert not path.exists()
    assert read_decision_log(f"{path}.dp1").header.policy == "full_and_piecewise"
    monkeypatch.setattr("kpolicy_vllm.metrics._COLLECTOR", [])  # the page is in another process
    assert _publisher(state).path.name == f"{runner.vllm_config.instance_id}.dp1.json"


@pytest.mark.parametrize(
    ("kpolicy", "without"), [({}, ""), ({"split": True}, "not_split"), ({"objective": "latency"}, "not_paced")]
)
def test_graphs_that_vllm_gives_up_later(vllm, caplog, monkeypatch, kpolicy, without):
    """Nothing is timed for nothing; every warning says why, and vLLM serves without graphs."""
    monkeypatch.setattr("kpolicy_vllm.calibrate.calibrate", lambda *_: pytest.fail("it was timed"))
    config = vllm_config(vllm, mode="FULL_DECODE_ONLY", kpolicy=kpolicy)
    config.compilation_config.mode = vllm.module("config.compilation").CompilationMode.NONE
    config.compilation_config.splitting_ops = []
    sized(vllm, config)
    runner = runner_v1(vllm, config)
    attached(vllm, config, runner)
    with caplog.at_level(logging.WARNING, "vllm.kpolicy"):
        initialise_v1(runner, vllm, "CPU_ATTN", "NEVER")
        runner.capture_model()
    state = state_of(config)
    assert config.compilation_config.cudagraph_mode.name == "NONE"
    assert state.counters.counts["graphs_off"] == 1
    first, *others = [record.message for record in caplog.records if record.name == "vllm.kpolicy"]
    assert first == f"kpolicy: {NO_GRAPHS}"
    assert len(others) == bool(without)
    assert all(each.endswith("there are none: vLLM captures no graphs.") for each in others)
    assert state.counters.counts == {"graphs_off": 1} | ({without: 1} if without else {})
    assert ask_v1(runner, [1] * 5)[0] == "NONE"


def test_each_of_two_engines_says_what_is_wrong_with_it(vllm, caplog):
    """In one process too: a warning for each different fault, and a count for each engine."""
    with caplog.at_level(logging.WARNING):
        for kpolicy in ({"policy": "autoo"}, {"splitt": True}, {"splitt": True}):
            sized(vllm, vllm_config(vllm, kpolicy=kpolicy))
    told = [record.message for record in caplog.records if "it is off" in record.message]
    assert [("autoo" in each, "splitt" in each) for each in told] == [(True, False), (False, True)]
    assert PROCESS.counts["bad_setting"] == 3


def test_experts_of_the_real_runner_are_left_out(vllm):
    """vLLM's own step of the balancing is what is held back."""
    runner = served(vllm, kpolicy={"policy": "full_and_piecewise"})
    steps, loads = [], []
    model = SimpleNamespace(expert_load_pass=SimpleNamespace(zero_=lambda: loads.append("zeroed")))
    runner.eplb_state = SimpleNamespace(step=lambda *_, **__: steps.append(1), model_states={"model": model})
    runner.parallel_config.enable_eplb, runner._moe_model = True, object()
    runner.parallel_config.eplb_config = SimpleNamespace(log_balancedness=False)
    runner.eep_eplb_suppressed = False
    with unbalanced(runner):
        runner.eplb_step()
    assert (steps, loads) == ([], ["zeroed"])
    runner.eplb_step()
    assert steps == [1]


def test_captured_again(vllm):
    """A runner that captures anew has its graphs once in the registry, and decides among them."""
    runner = served(vllm, kpolicy={"policy": "full_and_piecewise"})
    state = state_of(runner.vllm_config)
    before = state.registry.totals()
    runner.capture_model()
    assert state.registry.totals().keys == before.keys
    assert ask_v1(runner, [1] * 5)[0] == "FULL"


def test_captured_again_while_it_serves(vllm, tmp_path, monkeypatch):
    """Made-up rows would write over requests' KV: nothing is timed anew, and thread and log stay one each."""
    calls = []

    def calibrated(runner, state):
        calls.append(runner)
        return measured_costs()

    monkeypatch.setattr("kpolicy_vllm.calibrate.calibrate", calibrated)
    path = tmp_path / "decisions.jsonl"
    runner = served(vllm, kpolicy={"decision_log": str(path), "summary_seconds": 3600})
    state, log, threads = state_of(runner.vllm_config), state_of(runner.vllm_config).log, set(threading.enumerate())
    runner.capture_model()
    assert calls == [runner]
    assert set(threading.enumerate()) <= threads
    assert state.log is log is not None
    assert state.ready
    assert ask_v1(runner, [1] * 5)[0] == "FULL"
    assert {reason for _, reason in state.dispatcher.chooser.tallies()} != {"vllm_rule"}


def test_counted_hits(vllm):
    """The registry's hits are the steps that each graph replayed."""
    runner = served(vllm, kpolicy={"policy": "full_and_piecewise"})
    state = state_of(runner.vllm_config)
    for _ in range(3):
        ask_v1(runner, [1] * 5)
    state.dispatcher.chooser.count_hits()
    state.recompile()
    ask_v1(runner, [1] * 5)
    state.dispatcher.chooser.count_hits()
    (record,) = [each for each in state.registry.records() if each.hits]
    assert (record.key.num_tokens, record.hits) == (8, 4)


def measured_costs():
    return attrs.evolve(analytic_costs(), measured=True)


@pytest.mark.parametrize(
    ("device", "model", "event"), [("another", "a-model", "other_device"), ("cpu", "another", "other_model")]
)
def test_profile_of_another(vllm, tmp_path, caplog, device, model, event):
    """A profile that was measured on another device or model isn't used, and the warning names it."""
    from kpolicy.schemas import Profile, write_profile

    path = tmp_path / "profile.json"
    write_profile(path, Profile(costs=measured_costs(), device=device, model=model))
    with caplog.at_level(logging.WARNING):
        runner = served(vllm, kpolicy={"profile": str(path), "calibrate": False})
    state = state_of(runner.vllm_config)
    assert state.counters.counts[event] == 1
    assert not state.ready
    assert "another" in caplog.text


@pytest.mark.parametrize("size", [None, 1, 8])
def test_profile_of_another_tensor_parallel_size(vllm, tmp_path, caplog, size):
    """Costs of layers that were split otherwise aren't used; where the profile doesn't say, they are."""
    from kpolicy.schemas import Profile, write_profile

    path = tmp_path / "profile.json"
    made = Profile(costs=measured_costs(), device="cpu", model="a-model", tensor_parallel_size=size)
    write_profile(path, made)
    with caplog.at_level(logging.WARNING):
        runner = served(vllm, kpolicy={"profile": str(path), "calibrate": False})
    state = state_of(runner.vllm_config)
    assert state.counters.counts["other_tensor_parallel_size"] == (size == 8)
    assert ("tensor_parallel_size of 8, and this is 1" in caplog.text) is (size == 8)
    assert (state.costs_from == "profile") is (size != 8)


def test_measured_costs_are_kept(vllm, tmp_path, monkeypatch):
    """What was measured at start-up is saved where asked for, and the next start takes it."""
    import random

    from kpolicy.schemas import read_profile
    from kpolicy_vllm import calibrate

    path = tmp_path / "kept.json"
    table = random_costs(random.Random(2))  # noqa: S311
    monkeypatch.setattr(calibrate, "calibrate", lambda _runner, _state: table)
    saving = served(vllm, kpolicy={"save_profile": str(path)})
    first = state_of(saving.vllm_config)
    assert first.costs_from == "calibration"
    reading = served(vllm, kpolicy={"profile": str(path), "calibrate": False})
    second = state_of(reading.vllm_config)
    assert second.costs == table
    assert second.costs_from == "profile"
    assert read_profile(path).tensor_parallel_size == 1


def test_plan_of_another_model(vllm, tmp_path, caplog):
    """A plan for attention that captures more than this model's is said to be another model's."""
    path = tmp_path / "plan.json"
    plan_of(path)
    with caplog.at_level(logging.WARNING):
        runner = served(
            vllm, backend="FLASHMLA", level="UNIFORM_BATCH", kpolicy={"plan": str(path), "calibrate": False}
        )
    state = state_of(runner.vllm_config)
    assert state.counters.counts["plan_of_another_model"] == 1
    assert {key.num_tokens for key in state.ladder.keys} == {1, 2, 16}


def test_profile_of_this_device(vllm, tmp_path):
    """A profile of this device gives the costs, and nothing is measured."""
    import random

    from kpolicy.schemas import Profile, write_profile

    path = tmp_path / "profile.json"
    table = random_costs(random.Random(1))  # noqa: S311
    write_profile(path, Profile(costs=table, device="cpu", model="a-model"))
    runner = served(vllm, kpolicy={"profile": str(path)})
    state = state_of(runner.vllm_config)
    assert state.costs == table
    assert state.ready


class RecordedBuilder:
    """FlashAttention's metadata builder of 0.23 and 0.33, as far as it chooses splits."""

    def __init__(self, config):
        self.max_cudagraph_size = config.compilation_config.max_cudagraph_capture_size

    def num_splits(self, tokens):
        """The bound on splits of a step, FULL or not: 32 as vLLM's default, 0 where the kernel chooses."""
        return 32 if tokens <= self.max_cudagraph_size else 0


@pytest.mark.parametrize(
    ("kpolicy", "as_stock"), [(None, True), ("vllm:version=0.23,runner=v1", True), ({"calibrate": False}, False)]
)
def test_splits_of_attention(vllm, kpolicy, as_stock):
    """Off, and through the replica, every step has stock's splits: they decide the last bits of attention."""
    config = vllm_config(vllm, kpolicy=kpolicy, max_num_batched_tokens=1024)
    sized(vllm, config)
    runner = runner_v1(vllm, config)
    builder = RecordedBuilder(config)
    attached(vllm, config, runner)
    initialise_v1(runner, vllm)
    runner.attn_groups = [[SimpleNamespace(metadata_builders=[builder])]]
    runner.capture_model()
    if as_stock:
        assert [tokens for tokens in range(1, 1025) if builder.num_splits(tokens)] == list(range(1, 129))
    else:
        full = max(key.num_tokens for key in state_of(config).ladder.keys if key.part is Part.FULL)
        assert builder.max_cudagraph_size == full < config.compilation_config.max_cudagraph_capture_size


def test_a_vllm_that_was_patched_is_left_alone(monkeypatch, caplog):
    """vLLM catches nothing of what a plugin raises, whether kpolicy is on or off."""

    def broken():
        raise ImportError("cannot import name 'VllmConfig'")

    monkeypatch.setattr(plugin, "adapter", broken)
    with caplog.at_level(logging.WARNING):
        plugin.register()
    assert PROCESS.counts["other_vllm"] == 1
    assert "VllmConfig" in caplog.text


@pytest.mark.parametrize(
    ("name", "event"),
    [
        ("_check_plan", "plan_not_checked"),
        ("enter_others", "not_recorded"),
        ("_publisher", "metrics_failed"),
        ("_say", "summary_failed"),
        ("before_capture", "not_recorded"),
    ],
)
def test_nothing_at_the_start_ends_vllm(vllm, monkeypatch, name, event):
    """Each part of what follows the captures may fail; the others go on, and the policy decides."""
    from kpolicy_vllm import attach_v1, started

    def broken(*_, **__):
        raise OSError("read-only")

    monkeypatch.setattr(attach_v1 if name == "before_capture" else started, name, broken)
    runner = served(vllm, kpolicy={"policy": "full_and_piecewise"})
    counters = state_of(runner.vllm_config).counters
    assert counters.counts[event] == 1
    assert ask_v1(runner, [1] * 5)[0] == "FULL"
    assert state_of(runner.vllm_config).select is not None


def test_keys_that_cannot_be_chosen_leave_vllm_s(vllm, monkeypatch):
    """Graphs are vLLM's own, and so is the rule."""
    from kpolicy_vllm import runner_v1 as first

    def broken(*_):
        raise TypeError("changed")

    monkeypatch.setattr(first, "keys_of", broken)
    runner = served(vllm)
    assert state_of(runner.vllm_config).counters.counts["not_attached"] == 1
    assert [ask_v1(runner, new)[0] for new in ([1] * 5, [1, 40])] == ["FULL", "PIECEWISE"]


def test_a_rank_that_cannot_takes_the_others_with_it(vllm, monkeypatch):
    """Every rank must capture and pad alike: where one can't be attached, none is."""
    asked = []
    monkeypatch.setattr(plugin, "_agreed", lambda _config, ok: asked.append(ok))
    runner = served(vllm)
    assert asked == [True]
    assert type(runner.cudagraph_dispatcher).__name__ == "CudagraphDispatcher"
    assert "capture_model" not in vars(runner)
    assert state_of(runner.vllm_config).counters.counts["not_attached"] == 1


def test_a_rank_whose_policy_fails_takes_the_others_with_it(vllm, monkeypatch):
    """Another rank couldn't prepare: this one gives vLLM's answers too."""
    from kpolicy_vllm.versions.names import Names

    answers = iter([True, False])
    names = attrs_evolved(Names.of_v1(), answers)
    monkeypatch.setattr(Names, "of_v1", lambda: names)
    runner = served(vllm, kpolicy={"policy": "full_and_piecewise"})
    state = state_of(runner.vllm_config)
    assert state.broken
    assert state.select is None
    assert ask_v1(runner, [1] * 5)[0] == "FULL"
    assert {reason for _, reason in state.dispatcher.chooser.tallies()} == {"vllm_rule"}


def attrs_evolved(names, answers):
    """The names, with ranks that answer so in turn."""
    import attrs

    return attrs.evolve(names, agree=lambda ok: ok and next(answers))


def test_a_log_that_cannot_be_built_ends(vllm, tmp_path, monkeypatch):
    """A step that the log can't describe is run all the same."""
    from kpolicy_vllm import decision_log

    path = tmp_path / "log.jsonl"
    runner = served(vllm, kpolicy={"policy": "full_and_piecewise", "decision_log": str(path)})
    monkeypatch.setattr(decision_log, "shape_of", lambda *_, **__: 1 / 0)
    runner.input_batch.num_reqs = 5
    runner.input_batch.num_computed_tokens_cpu = runner.input_batch.num_prompt_tokens = __import__("numpy").ones(5)
    for _ in range(3):
        assert ask_v1(runner, [1] * 5)[0] == "FULL"
    assert state_of(runner.vllm_config).counters.counts["log_failed"] == 1


def test_an_engine_that_ended_is_forgotten(vllm, tmp_path):
    """What kpolicy knows goes with vLLM's runner: its thread ends, its file is gone and its log is closed."""
    path = tmp_path / "decisions.jsonl"
    runner = served(vllm, kpolicy={"decision_log": str(path), "metrics": True, "summary_seconds": 3600})
    assert ask_v1(runner, [1, 1])[0] == "FULL"
    state, about = weakref.ref(state_of(runner.vllm_config)), weakref.ref(runner)
    threads = [thread for thread in threading.enumerate() if thread.name == "kpolicy-watch"]
    told = list(folder().glob(f"{runner.vllm_config.instance_id}.*"))
    del runner
    gc.collect()
    assert (about(), state()) == (None, None)
    assert threads
    for thread in threads:
        thread.join(5.0)
        assert not thread.is_alive()
    assert not any(each.exists() for each in told)
    assert not read_decision_log(path).cut_short


def test_memory_of_graphs_is_estimated_from_small_ones(vllm, monkeypatch):
    """vLLM's own estimate, where the second largest FULL graph adds a buffer that all smaller ones then share."""
    config = vllm_config(vllm, kpolicy={}, max_num_seqs=1024, max_num_batched_tokens=8192)
    sized(vllm, config)
    runner = runner_v1(vllm, config)
    attached(vllm, config, runner)
    module = vllm.module("v1.worker.gpu_model_runner")
    taken = graphs = 0
    run = runner._dummy_run

    def captured(tokens, **named):
        nonlocal taken, graphs
        run(tokens, **{name: value for name, value in named.items() if name != "is_graph_capturing"})
        if named.get("is_graph_capturing"):
            first = tokens == max(desc.num_tokens for descs in keys.values() for desc in descs)
            graphs += 1
            taken += 130 << 20 if first else 98 << 20 if tokens == second else 2 << 20

    def memory():
        return (1 << 36) - taken, 1 << 37

    module.torch.cuda.mem_get_info = module.torch.accelerator.get_memory_info = memory
    importlib.import_module("torch").cuda = SimpleNamespace(mem_get_info=memory, is_available=lambda: True)
    runner._dummy_run = captured
    runner.max_model_len, runner.max_num_tokens = 4096, 8192
    runner._init_minimal_kv_cache_for_profiling = lambda: initialise_v1(runner, vllm)
    runner._cleanup_profiling_kv_cache = runner._create_encoder_cudagraph_manager = lambda: None
    runner._freeze_gc = nullcontext
    platform = SimpleNamespace(graph_pool_handle=lambda: None)
    wrapper = SimpleNamespace(_all_instances=(), clear_all_graphs=lambda: None)
    for name, stand_in in (("current_platform", platform), ("CUDAGraphWrapper", wrapper),
                           ("BreakableCUDAGraphWrapper", wrapper), ("set_current_vllm_config", lambda _: nullcontext()),
                           ("set_cudagraph_capturing_enabled", lambda _: None)):  # fmt: skip
        monkeypatch.setattr(module, name, stand_in, raising=False)
    initialise_v1(runner, vllm)
    keys = {mode: set(descs) for mode, descs in runner.cudagraph_dispatcher.cudagraph_keys.items()}
    full = sorted((desc.num_tokens for mode, descs in keys.items() if mode.name == "FULL" for desc in descs))
    second = full[-2]
    estimate = runner.profile_cudagraph_memory()
    sampled, taken, graphs = graphs, 0, 0
    initialise_v1(runner, vllm)
    runner.capture_model()
    assert sampled < graphs / 2, "not all were captured for the estimate"
    assert 0.85 < estimate / taken < 1.05
