"""SGLang's own rule and hook registry, out of the wheels, under kpolicy's hooks."""

from __future__ import annotations

import ast
import random
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from kpolicy.modes import Mode
from kpolicy.settings import Objective
from kpolicy_sglang import dispatch, hooks
from kpolicy_sglang.arguments import model_config
from kpolicy_sglang.config import Config
from kpolicy_sglang.phase import DECODE, PREFILL, Phase, table_of
from kpolicy_sglang.plugin import not_taken, register
from kpolicy_sglang.refused import why_refused
from kpolicy_sglang.versions import KNOWN
from tests.integrations.sglang.fake_sglang import Tokens
from tests.integrations.sglang.recorded import SIGNATURES
from tests.oracle.loader import executing
from tests.oracle.sglang_real import FOLDER, MARKS, Release, _class, _execute, _named, decode_runner, prefill_runner
from tests.oracle.test_sglang import prefill_batch, prefill_pair, random_sizes

BATCHES, DEPLOYMENTS = 20_000, 100
_OF_A_RUNNER = {
    "_qwen_bcg_hc_sidechannel": False, "_qwen_bcg_mtp_draft": False, "_is_full_backend": False, "_fa4_prefill": False,
    "_capture_req_slots": 1, "_captured_attn_metadata_max_bs": None, "prefer_eager_mixed_prefill": False,
    "prefill_backend_name": "breakable", "has_mha_companion_layers": False, "_attn_backend_is_dsa": False,
    "_capture_chunked_prefix": False, "max_context_size": None, "max_seq_len": None, "capture_hidden_mode": 2,
    "enable_lora": False, "_backend_can_run_prefill_cuda_graph": None,
}  # fmt: skip
"""What 0.5.23's prefill runner looks at."""

pytestmark = MARKS


class Older(Release):
    """The files of 0.5.16."""

    name = "sglang-0.5.16"

    def __init__(self, folder: Path) -> None:
        found = sorted(folder.glob("sglang-0.5.16*"), key=Path.is_file)
        if not found:
            pytest.skip("KPOLICY_ORACLE has no sglang-0.5.16")
        self._path = found[0]


def release_of(version):
    """The wheel of that version."""
    return Release(FOLDER) if version == "0.5.23" else Older(FOLDER)


@pytest.mark.parametrize("version", KNOWN)
def test_signatures_are_those_of_the_wheel(version):
    """Every recorded signature is what the release's source says, argument by argument."""
    release = release_of(version)
    for hook in KNOWN[version].hooks:
        owner, _, name = hook.target.rpartition(".")
        of = owner.rpartition(".")[2] if owner.rpartition(".")[2][0].isupper() else ""
        module = owner.rpartition(".")[0] if of else owner
        nodes = ast.parse(release.read(f"{module.replace('.', '/')}.py")).body
        for node in nodes:
            # Hooked where it is used: a name that the module has from another.
            if isinstance(node, ast.ImportFrom) and name in [each.name for each in node.names]:
                nodes = ast.parse(release.read(f"{str(node.module).replace('.', '/')}.py")).body
        if of:
            (nodes,) = (node.body for node in nodes if isinstance(node, ast.ClassDef) and node.name == of)
        (function,) = _named_in(nodes, name)
        arguments = [each.arg for each in (*function.args.args, *function.args.kwonlyargs)]
        assert ", ".join(arguments) == SIGNATURES[version][f"{of}.{name}" if of else name], hook.target


def _named_in(nodes, name):
    """The function of that name; of one that breaks a graph the wrapper, which takes what the wrapped one does."""
    for node in nodes:
        if isinstance(node, ast.Assign) and [each.id for each in node.targets if isinstance(each, ast.Name)] == [name]:
            assert ast.unparse(node.value).startswith("eager_on_graph(True)(")
            return [ast.parse("def wrapper(args, kwargs): pass").body[0]]
    return [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == name]


@pytest.mark.parametrize("version", KNOWN)
def test_sglangs_own_loader_applies_the_hooks(version, monkeypatch):
    """`load_plugins` of the release runs kpolicy's entry point, applies its hooks, and kpolicy finds every one."""
    release = release_of(version)
    real = ("sglang.srt.plugins", "sglang.srt.plugins.hook_registry")
    with executing(release, real, ("sglang", "torch")):
        loader, registry = import_module(real[0]), import_module(real[1])
        import_module("sglang").__version__ = version
        for hook in KNOWN[version].hooks:
            _put(hook.target, SIGNATURES[version])
        point = SimpleNamespace(
            name="kpolicy", value="kpolicy_sglang.plugin:register", load=lambda: register, dist=None
        )
        monkeypatch.setattr(loader, "entry_points", lambda **_: [point])
        monkeypatch.setattr(loader, "envs", SimpleNamespace(
            SGLANG_PLUGINS=SimpleNamespace(get=lambda: None), SGLANG_PLATFORM=SimpleNamespace(get=lambda: None),
        ))  # fmt: skip
        monkeypatch.setattr(register, "__defaults__", ({"KPOLICY_SGLANG": "1", "KPOLICY_STRICT": "1"},))
        try:
            loader.load_plugins()
            wanted = KNOWN[version].hooks
            assert registry.HookRegistry._patched == {hook.target for hook in wanted}
            assert not_taken(wanted, registry.HookRegistry) == []
            assert hooks.configured() is not None
        finally:
            hooks.configure(None)


def _put(target, signatures):
    """A function of the recorded signature in its place among the stubs."""
    owner_path, _, name = target.rpartition(".")
    of = owner_path.rpartition(".")[2]
    scope = {}
    if of[0].isupper():
        module = _plain(owner_path.rpartition(".")[0])
        if of not in vars(module):
            setattr(module, of, type(of, (), {}))
        owner, arguments = getattr(module, of), signatures[f"{of}.{name}"]
    else:
        owner, arguments = _plain(owner_path), signatures[name]
    exec(f"def {name}({arguments}): return locals()", scope)  # noqa: S102  a function of a recorded signature
    setattr(owner, name, scope[name])


def _plain(name):
    """A module that is no package: names in it that aren't there aren't imported as stubs."""
    module = sys.modules.get(name)
    if module is None or hasattr(module, "__path__"):
        parent, _, own = name.rpartition(".")
        module = sys.modules[name] = ModuleType(name)
        setattr(import_module(parent), own, module)
    return module


def deployment(release, rng):
    """SGLang's own prefill runner over random sizes, and kpolicy's phase on it with the replica's rule."""
    full = rng.random() < 0.3
    sizes = random_sizes(rng, 1024)
    runner = prefill_runner(release, cuda=True)()
    runner.__dict__.update(
        _qwen_bcg_hc_sidechannel=False, _qwen_bcg_mtp_draft=False, _is_full_backend=full, _fa4_prefill=False,
        _capture_req_slots=4, _captured_attn_metadata_max_bs=None, prefer_eager_mixed_prefill=rng.random() < 0.3,
        prefill_backend_name="full" if full else "breakable", has_mha_companion_layers=False,
        _attn_backend_is_dsa=False, _capture_chunked_prefix=False, capture_hidden_mode=rng.randint(0, 2),
        max_context_size=None, max_seq_len=rng.choice([None, None, 2000]), max_num_tokens=sizes[-1],
        capture_num_tokens=list(sizes),
    )  # fmt: skip
    return runner, Phase(PREFILL, sizes, 6000, full=full)


def test_prefill_through_the_hooks_equals_the_real_rule():
    """On 20,000 random batches kpolicy with the replica's rule answers as SGLang without kpolicy does."""
    release, rng, outcomes = Release(FOLDER), random.Random(7), Counter()  # noqa: S311  not for secrets
    for _ in range(DEPLOYMENTS):
        runner, phase = deployment(release, rng)
        for _ in range(BATCHES // DEPLOYMENTS):
            shape, asked = prefill_batch(rng)
            wanted = type(runner).can_replay_locally(runner, **asked)
            dispatch.attach(runner, phase)
            got = dispatch.prefill_can_replay_locally(type(runner).can_replay_locally, runner, **asked)
            dispatch.detach(runner)
            assert got == wanted, (shape, asked)
            outcomes[got] += 1
    assert sum(outcomes.values()) == BATCHES
    assert min(outcomes.values()) > 3000, outcomes


def test_costs_replace_the_limit_on_padding_and_nothing_else():
    """With costs that always favour graphs, what is still refused is what SGLang refuses for other reasons."""
    release, rng, more = Release(FOLDER), random.Random(8), 0  # noqa: S311  not for secrets
    for _ in range(20):
        runner, phase = deployment(release, rng)
        costs = table_of("test", dict.fromkeys(phase.sizes, 1), {1: 10})
        phase.install("auto", costs, Objective())
        dispatch.attach(runner, phase)
        for _ in range(200):
            _, asked = prefill_batch(rng)
            own = type(runner).can_replay_locally
            rest = own(runner, **{**asked, "num_tokens": None}) and asked["num_tokens"] <= phase.largest
            assert dispatch.prefill_can_replay_locally(own, runner, **asked) == rest
            more += rest and not own(runner, **asked)
    assert more > 50


@pytest.mark.parametrize("version", KNOWN)
def test_decode_through_the_hooks_equals_the_real_rule(version):
    """On 20,000 random decode batches, with data-parallel verdicts, and graphs for LoRA where padding is off."""
    release, rng, outcomes = release_of(version), random.Random(9), Counter()  # noqa: S311  not for secrets
    for _ in range(DEPLOYMENTS):
        rows, together, exact = random_sizes(rng, 200), rng.random() < 0.4, rng.random() < 0.3
        labelled = {(size, label) for size in rows for label in ("lora", "nolora") if rng.random() < 0.8}
        phase = Phase(DECODE, rows, 220, full=True)
        runner = decode_runner(release)()
        runner.__dict__.update(
            ragged_verify_mode=False, captured_req_width=1, require_mlp_tp_gather=together, require_mlp_sync=together,
            enable_pdmux=False, disable_padding=exact, record_nolora_graph=exact,
            backend=SimpleNamespace(can_run=lambda _, key, graphs=labelled: key in graphs), max_bs=rows[-1],
            is_encoder_decoder=True, enable_two_batch_overlap=rng.random() < 0.2,
            model_runner=SimpleNamespace(spec_algorithm=SimpleNamespace(is_ngram=lambda: False)),
            capture_hidden_mode=0,
        )  # fmt: skip
        runner._max_dp_batch_size = lambda batch: max(batch.original_global_num_tokens_cpu)
        dispatch.attach(runner, phase)
        for _ in range(BATCHES // DEPLOYMENTS):
            size = rng.randint(1, 220)
            batch = SimpleNamespace(
                replace_embeds=1 if rng.random() < 0.05 else None,
                spec_info=SimpleNamespace(num_tokens_per_req=rng.choice([1, 1, 1, 4])), batch_size=size,
                can_run_tbo=rng.random() < 0.9, encoder_lens=int(rng.random() < 0.95),
                original_global_num_tokens_cpu=[size, rng.randint(0, 220)], global_num_tokens_cpu=None,
                can_run_decode_cuda_graph=rng.random() < 0.8, capture_hidden_mode=int(rng.random() < 0.05),
                lora_ids=[None, rng.choice([None, "an adapter"])],
            )  # fmt: skip
            batch.can_run_dp_cuda_graph = batch.can_run_decode_cuda_graph  # its name in 0.5.16
            wanted = bool(type(runner).can_run_graph(runner, batch))
            assert bool(dispatch.decode_can_run(type(runner).can_run_graph, runner, batch)) == wanted, vars(batch)
            outcomes[wanted] += 1
        counted = sum(phase.steps) + phase.refused.total() + phase.voted.total()
        assert counted == BATCHES // DEPLOYMENTS
    assert min(outcomes.values()) > 3000, outcomes


def test_real_votes_never_let_ranks_part():
    """SGLang's vote and its forward-time check, on two ranks with costs of their own: all replay, or none."""
    release, rng, outcomes = Release(FOLDER), random.Random(10), Counter()  # noqa: S311  not for secrets
    for _ in range(300):
        runner, _ = deployment(release, rng)
        own, sizes = type(runner).can_replay_locally, runner.capture_num_tokens
        phases = [Phase(PREFILL, sizes, 6000, full=False) for _ in range(2)]
        for phase in phases:
            graph = {size: rng.randint(1, 100) for size in sizes}
            phase.install("auto", table_of("test", graph, {1: rng.randint(1, 100)}), Objective())
        for _ in range(10):
            asked = [prefill_batch(rng)[1] for _ in phases]
            votes = []
            for phase, each in zip(phases, asked, strict=True):
                dispatch.attach(runner, phase)
                votes.append(dispatch.prefill_can_replay_locally(own, runner, **each))
            tokens = max(each["num_tokens"] for each in asked)
            agreed = all(votes)
            padded = runner._pad_to_bucket(tokens, sizes) if agreed else tokens
            ran = [
                _forward(runner, own, phase, each, padded, agreed) for phase, each in zip(phases, asked, strict=True)
            ]
            assert ran == [agreed, agreed], (votes, asked)
            outcomes[agreed] += 1
    assert min(outcomes.values()) > 100, outcomes


def _forward(runner, own, phase, asked, padded, agreed):
    dispatch.attach(runner, phase)

    def can_run_graph(runner, batch):
        """SGLang's: the group's verdict, then the local rule on the padded batch."""
        return batch.can_run_dp_prefill_cuda_graph and dispatch.prefill_can_replay_locally(
            own, runner, **{**asked, "num_tokens": padded}
        )

    batch = SimpleNamespace(
        input_ids=Tokens([0] * padded), global_num_tokens_cpu=[padded, padded], batch_size=1,
        can_run_dp_prefill_cuda_graph=agreed, forward_mode=SimpleNamespace(is_target_verify=lambda: False),
        extend_prefix_lens_cpu=[0], return_logprob=False,
    )  # fmt: skip
    return bool(dispatch.prefill_can_run(can_run_graph, runner, batch))


@pytest.mark.parametrize("version", KNOWN)
def test_the_models_config_is_had_from_sglangs_own_function(version, monkeypatch):
    """Each release's way to it, by its own text: from the path once, and kept with the arguments."""
    built = []

    def build(args):
        built.append(args.model_path)
        return SimpleNamespace(hf_config={"model_type": "qwen2"}, is_hybrid_swa=False)

    modules = {
        "sglang.srt.configs.model_config": {"ModelConfig": SimpleNamespace(from_server_args=build)},
        "sglang.srt.arg_groups.overrides": {},
    }
    if version == "0.5.16":
        tree = release_of(version).tree("sglang/srt/server_args.py")
        made = _execute([_class("ServerArgs", _named(tree, {"get_model_config"}))], {})["ServerArgs"]()
    else:
        release, made = release_of(version), SimpleNamespace()
        exported = "from sglang.srt.arg_groups.model_override_base import"
        overrides = release.tree("sglang/srt/arg_groups/overrides.py").body
        lists = [[each.name for each in node.names] for node in overrides if ast.unparse(node).startswith(exported)]
        assert any("model_config_of" in names for names in lists)
        nodes = _named(release.tree("sglang/srt/arg_groups/model_override_base.py"), {"model_config_of"})
        names = {"ResolvedView": type("View", (), {}), "ResolvingConfig": type("Config", (), {})}
        modules["sglang.srt.arg_groups.overrides"] = _execute(nodes, {**names, "resolving_view": lambda args: args})
    made.model_path = "a model"
    for name, held in modules.items():
        module = ModuleType(name)
        vars(module).update({each: held[each] for each in held if not each.startswith("__")})
        monkeypatch.setitem(sys.modules, name, module)
    assert [model_config(made), model_config(made)] == [{"model_type": "qwen2"}] * 2
    assert built == ["a model"]


def _forward_batch(asked):
    """The batch of which 0.5.23's whole rule asks that."""
    return SimpleNamespace(
        batch_size=asked["batch_size"], input_ids=Tokens([0] * asked["num_tokens"]),
        input_embeds=asked["input_embeds"], replace_embeds=asked["replace_embeds"], global_num_tokens_cpu=None,
        extend_prefix_lens_cpu=asked["prefix_lens"], capture_hidden_mode=asked["capture_hidden_mode"],
        return_logprob=asked["return_logprob"], contains_mm_inputs=lambda: asked["contains_mm_inputs"],
        forward_mode=Forward(asked), lora_ineligible=asked["lora_ineligible"], max_len=asked["batch_max_context_len"],
    )  # fmt: skip


class Forward:
    """SGLang's mode, as far as its rule looks."""

    def __init__(self, asked):
        self.verifies, self.mixed = asked["is_target_verify"], asked["is_mixed"]

    def __eq__(self, other):
        return self.mixed and other == "mixed"

    __hash__ = None

    def is_target_verify(self):
        return self.verifies


def _is_plain(batch):
    """Whether nothing but its size matters."""
    asked = batch.input_embeds or batch.replace_embeds or batch.return_logprob or batch.contains_mm_inputs()
    return not (asked or batch.forward_mode.verifies)


def _hooked(rule, *, told):
    """The runner's class with both hooks, by wrappers that tell what they wrap, or don't."""

    def around(name, hook):
        original = getattr(rule, name)

        def wrapper(*args, **kwargs):
            return hook(original, *args, **kwargs)

        if told:
            wrapper.__wrapped__ = original
        return wrapper

    return type("Hooked", (rule,), {
        "can_replay_locally": around("can_replay_locally", dispatch.prefill_can_replay_locally),
        "can_run_graph": around("can_run_graph", dispatch.prefill_can_run),
    })  # fmt: skip


@pytest.mark.parametrize("by_cost", [False, True])
def test_whole_rule_past_the_inner_hook(by_cost):
    """0.5.23 without votes: SGLang's own question past kpolicy's hook has the same answers and the same reasons."""
    rng, found, replayed = random.Random(12), Counter(), 0  # noqa: S311  not for secrets
    rule = prefill_runner(Release(FOLDER), cuda=True, whole=True)
    limits = rule.can_run_graph.__globals__
    rule._batch_max_context_len = lambda _runner, batch: batch.max_len
    rule._has_inactive_dp_rank = lambda *_: False
    for _ in range(DEPLOYMENTS):
        sizes = random_sizes(rng, 1024)
        fields = {
            **_OF_A_RUNNER, "capture_num_tokens": list(sizes), "max_num_tokens": sizes[-1], "enable_lora": True,
            "capture_hidden_mode": rng.randint(0, 2), "max_seq_len": rng.choice([None, None, 2000]),
            "prefer_eager_mixed_prefill": rng.random() < 0.3, "_capture_lora": True,
        }  # fmt: skip
        runners, phases = [], []
        for told in (True, False):
            runner = _hooked(rule, told=told)()
            runner.__dict__.update(fields)
            runner.model_runner = SimpleNamespace(
                lora_manager=SimpleNamespace(can_use_prefill_cuda_graph=lambda batch: not batch.lora_ineligible)
            )
            phase = Phase(PREFILL, sizes, 6000, full=False)
            if by_cost:
                phase.install("auto", table_of("test", dict.fromkeys(sizes, 1), {1: 10}), Objective())
            dispatch.attach(runner, phase)
            runners.append(runner)
            phases.append(phase)
        for _ in range(BATCHES // DEPLOYMENTS):
            _, asked = prefill_batch(rng)
            batch = _forward_batch(asked)
            past, through = (bool(runner.can_run_graph(batch)) for runner in runners)
            assert past == through, asked
            if not by_cost:
                assert past == bool(rule.can_run_graph(runners[0], batch)), asked
            replayed += past
        assert phases[0].refused == phases[1].refused
        assert phases[0].steps == phases[1].steps
        assert not phases[0].failures.total
        assert "can_replay_locally" not in vars(runners[1])
        found.update({reason for reason, _ in phases[0].refused})
    assert limits["_MAX_PREFILL_CUDA_GRAPH_PADDING_FACTOR"] == 2
    assert replayed > 3000
    assert len(found) >= 7, found


def test_ranks_that_vote_keep_the_inner_hook():
    """Where ranks take each step together the vote goes by kpolicy's sizes, whatever is asked before the first."""
    rule = prefill_runner(Release(FOLDER), cuda=True, whole=True)
    rng = random.Random(13)  # noqa: S311  not for secrets
    batch = next(each for each in map(_forward_batch, (prefill_batch(rng)[1] for _ in range(99))) if _is_plain(each))
    for coupled in (False, True):
        runner = _hooked(rule, told=True)()
        runner.__dict__.update(_OF_A_RUNNER, capture_num_tokens=[4096], max_num_tokens=4096)
        phase = Phase(PREFILL, (4096,), 6000, full=False)
        phase.install("auto", table_of("test", {4096: 1}, {1: 10}), Objective())
        phase.coupled = coupled
        dispatch.attach(runner, phase)
        assert runner.can_run_graph(batch)
        assert ("can_replay_locally" in vars(runner)) != coupled


def test_no_bucket_that_fits_does_not_end_sglang():
    """0.5.23's own function returns its eager runner bare where no size fits; under the hook callers get a result."""
    release = Release(FOLDER)
    tree = release.tree("sglang/srt/model_executor/model_runner_components/cuda_graph_setup.py")
    (function,) = _named(tree, {"capture_prefill_graph"})
    bare = [node for node in ast.walk(function) if isinstance(node, ast.Return) and isinstance(node.value, ast.Name)]
    assert [node.value.id for node in bare] == ["eager_runner"], "mended upstream: the hook may go"
    with executing(release, (), ("sglang", "torch")):
        setup = import_module("sglang.srt.model_executor.model_runner_components.cuda_graph_setup")
        setup.GraphCapture = SimpleNamespace
        eager = SimpleNamespace(name="eager")
        hooks.configure(Config(), "0.5.23")
        found = hooks.capture_prefill_graph(lambda **_: eager, model_runner=None, eager_runner=eager)
        hooks.configure(None)
    assert (found.runner, found.memory_usage_gb) == (eager, 0)


def test_reasons_of_0_5_23_are_in_its_own_order():
    """On 20,000 random batches that its rule refuses the reason is the replica's, which is held to the rule."""
    release, rng, found = Release(FOLDER), random.Random(3), Counter()  # noqa: S311  not for secrets
    for _ in range(DEPLOYMENTS):
        select, runner = prefill_pair(release, rng)
        phase = Phase(PREFILL, tuple(runner.capture_num_tokens), 6000, full=False)
        dispatch.attach(runner, phase)
        phase.force = None
        phase.replays = lambda _size: True  # only what SGLang itself refuses is looked at
        for _ in range(BATCHES // DEPLOYMENTS):
            shape, asked = prefill_batch(rng)
            if dispatch.prefill_can_replay_locally(type(runner).can_replay_locally, runner, **asked):
                continue
            batch = SimpleNamespace(global_num_tokens_cpu=None)
            said = why_refused(PREFILL, runner, batch, phase.refusal)
            assert said is select(*shape.numbers).reason, asked
            found[said] += 1
    assert len(found) >= 10, found
    assert min(found.values()) > 20, found


def test_prefill_through_the_hooks_on_0_5_16():
    """On 20,000 random batches of 0.5.16, whose rule has the sizes inside."""
    release, rng, outcomes = Older(FOLDER), random.Random(11), Counter()  # noqa: S311  not for secrets
    runner_class = _older_prefill(release)
    for _ in range(DEPLOYMENTS):
        sizes = random_sizes(rng, 1024)
        phase = Phase(PREFILL, sizes, 6000, full=False)
        runner = runner_class()
        runner.__dict__.update(
            _is_full_backend=False, _capture_req_slots=4, prefill_backend_name="breakable", capture_hidden_mode=0,
            has_mha_companion_layers=rng.random() < 0.3, max_num_tokens=sizes[-1], capture_num_tokens=list(sizes),
        )  # fmt: skip
        dispatch.attach(runner, phase)
        for _ in range(BATCHES // DEPLOYMENTS):
            batch = _older_batch(rng)
            wanted = bool(type(runner).can_run_graph(runner, batch))
            got = bool(dispatch.prefill_can_run_0_5_16(type(runner).can_run_graph, runner, batch))
            assert got == wanted, vars(batch)
            outcomes[got] += 1
    assert min(outcomes.values()) > 3000, outcomes


def _older_prefill(release):
    """0.5.16's prefill runner with its rule, in this module, where its limit on padding is looked up."""
    folder = "sglang/srt/model_executor/runner"
    tree = release.tree(f"{folder}/prefill_cuda_graph_runner.py")
    base = _named(release.tree(f"{folder}/base_cuda_graph_runner.py"), {"_pad_to_bucket"})
    own = {"can_run_graph", "_has_unsupported_mha_prefix", "_has_inactive_dp_rank", "_uses_eager_prefill_tail"}
    free = _named(tree, {"_MAX_PREFILL_CUDA_GRAPH_PADDING_FACTOR"})
    names = globals()
    names |= {"Backend": SimpleNamespace(BREAKABLE="breakable", FULL="full"), "bisect": import_module("bisect")}
    return _execute([*free, _class("Runner", base + _named(tree, own))], names)["Runner"]


def _older_batch(rng):
    tokens = [0] * int(rng.triangular(1, 1200, 1))
    ranks = [len(tokens), rng.choice([0, 5])] if rng.random() < 0.2 else None
    verify = rng.random() < 0.05
    batch = SimpleNamespace(
        batch_size=rng.randint(1, 6), input_embeds=1 if rng.random() < 0.05 else None,
        replace_embeds=1 if rng.random() < 0.05 else None, extend_prefix_lens_cpu=[0, rng.choice([0, 0, 9])],
        forward_mode=SimpleNamespace(is_target_verify=lambda: verify),
        capture_hidden_mode=int(rng.random() < 0.05), global_num_tokens_cpu=ranks,
        can_run_dp_breakable_cuda_graph=rng.random() < 0.7, return_logprob=rng.random() < 0.3,
    )  # fmt: skip
    batch.input_ids = Tokens([0] * len(tokens))
    return batch


def test_decision_is_eager_or_the_next_size():
    """What the phase says of a size is what SGLang will do with it."""
    phase = Phase(PREFILL, (64, 128), 200, full=False)
    for size in range(1, 201):
        decision = phase.decision(size)
        assert (decision.mode is Mode.EAGER) != phase.replays(size)
        if decision.keys:
            assert decision.keys[0].num_tokens == phase.bucket(size)


@pytest.mark.parametrize("version", KNOWN)
def test_emitted_flags_are_those_of_both_versions(version):
    """`kpolicy plan --emit sglang` writes what the parser of either version takes, and reads back as it was."""
    pytest.importorskip("msgspec")
    from kpolicy.engine_flags import emit
    from kpolicy.ladders import CaptureSizes
    from kpolicy.settings import Settings
    from tests.oracle.sglang_real import argument_parser

    sizes = CaptureSizes((1, 3, 48, 600), (), (16, 48, 2048))
    emitted = emit("sglang", sizes, Settings(max_num_reqs=600, max_num_tokens=4096))
    with argument_parser(release_of(version)) as parser:
        found = parser.parse_args(["--model-path", "x", *emitted.arguments])
        assert found.cuda_graph_bs_decode == [1, 3, 48, 600]
        assert found.cuda_graph_bs_prefill == [16, 48, 2048]
        assert (found.max_running_requests, found.chunked_prefill_size) == (600, 4096)
