"""The adapters of mini-sglang and nano-vllm over pretended engines with the classes that those publish."""

import ast
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from kpolicy import CostTable
from kpolicy.costs import Curve, HostCost
from kpolicy.errors import UnknownNameError
from kpolicy.schemas import Profile, write_profile
from tests.integrations.examples.recorded import ATTRIBUTES, BY_NAME, IMPORTED, READ_AT, SIGNATURES

EXAMPLES = Path(__file__).parents[3] / "integrations" / "examples"


class GraphRunner:
    """mini-sglang's runner: it pads to the next size and replays, decodes alone."""

    def __init__(
        self, stream, device, model, attn_backend, cuda_graph_bs, cuda_graph_max_bs, free_memory, max_seq_len,  # noqa: ARG002
        vocab_size, dummy_req,  # noqa: ARG002  as published
    ):  # fmt: skip
        self.graph_bs_list = sorted(cuda_graph_bs)
        self.max_graph_bs = max(cuda_graph_bs, default=0)
        self.dummy_req, self.replayed = dummy_req, []

    def can_use_cuda_graph(self, batch):
        return batch.is_decode and batch.size <= self.max_graph_bs

    def pad_batch(self, batch):
        fits = self.can_use_cuda_graph(batch)
        padded = next(size for size in self.graph_bs_list if size >= batch.size) if fits else batch.size
        batch.padded_reqs = [*batch.reqs, *[self.dummy_req] * (padded - batch.size)]

    def replay(self, batch):
        self.replayed.append(len(batch.padded_reqs))
        return "logits"


class ModelRunner:
    """nano-vllm's runner: sizes to the last multiple of 16, and a search that finds none above them."""

    def __init__(self, config, rank, event):  # noqa: ARG002  as published
        self.config, self.enforce_eager, self.ran = config, config.enforce_eager, []
        self.run_model(Ids(config.max_num_seqs), None, is_prefill=True)
        if not self.enforce_eager:
            self.capture_cudagraph()

    def capture_cudagraph(self):
        self.graph_bs = [1, 2, 4, 8, *range(16, self.config.max_num_seqs + 1, 16)]

    def run_model(self, input_ids, positions, is_prefill):  # noqa: ARG002  as published
        if is_prefill or self.enforce_eager:
            self.ran.append("eager")
        else:
            self.ran.append(next(size for size in self.graph_bs if size >= input_ids.size(0)))
        return "logits"


PRETENDED = {"mini_sglang": GraphRunner, "nano_vllm": ModelRunner}


class Ids(list):
    """Token ids as far as they are looked at: how many."""

    def __init__(self, count):
        super().__init__([0] * count)

    def size(self, _):
        """As a tensor's."""
        return len(self)


def nano(runner, max_num_seqs, **given):
    """A pretended nano-vllm's runner, as its engine makes one; what its warm-up ran is forgotten."""
    made = runner(SimpleNamespace(max_num_seqs=max_num_seqs, **{"enforce_eager": False, **given}), 0, [])
    made.ran.clear()
    return made


@pytest.fixture
def adapter(monkeypatch):
    """Loads an adapter over the pretended engines."""
    torch = ModuleType("torch")
    torch.cuda = SimpleNamespace(mem_get_info=lambda *_: (1 << 30, 1 << 31))
    monkeypatch.setitem(sys.modules, "torch", torch)
    published = {path: {own: PRETENDED[name]} for name, of in IMPORTED.items() for path, own in of.items()}
    packages = {path: {} for name in published for path in (name.split(".")[0], name.rpartition(".")[0])}
    for name, holds in {**packages, **published}.items():
        module = ModuleType(name)
        module.__dict__.update(holds)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, module)

    def load(name):
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.install()
        return module

    return load


def profile_of(tmp_path, *, graph_us, eager_us):
    """A profile in which every graph takes one time, and every eager step another."""
    free = HostCost(0.0)
    costs = CostTable(
        version="test", measured=True, full=Curve((1, 64), (graph_us, graph_us * 2)), piecewise=Curve((1,), (9e9,)),
        eager=Curve((1,), (eager_us,)), host_full=free, host_piecewise=free, host_eager=free,
    )  # fmt: skip
    write_profile(tmp_path / "profile.json", Profile(costs=costs, device="test", model="test"))
    return str(tmp_path / "profile.json")


def batch_of(size, *, decode=True):
    reqs = [SimpleNamespace(extend_len=1 if decode else 100 + row, cached_len=7 * row) for row in range(size)]
    return SimpleNamespace(is_decode=decode, size=size, reqs=reqs)


def test_each_fits_a_screen_or_two():
    """The adapters are under a hundred lines."""
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) < 100, path


def mini(adapter, **given):
    module = adapter("mini_sglang")
    rest = dict.fromkeys(("model", "attn_backend", "free_memory", "max_seq_len", "vocab_size"), 0)
    asked = {"cuda_graph_bs": None, "cuda_graph_max_bs": None, **rest, **given}
    runner = sys.modules["minisgl.engine.engine"].GraphRunner
    assert runner is module.KPolicyGraphRunner
    return runner(dummy_req=SimpleNamespace(table_idx=100), device=0, stream=0, **asked)


def test_mini_sglang_pads_and_replays(adapter, monkeypatch):
    """Sizes go up to the requests that may run; a decode batch replays the next one and is counted."""
    monkeypatch.delenv("KPOLICY_PROFILE", raising=False)
    runner = mini(adapter)
    assert runner.graph_bs_list == [1, 2, 4, *range(8, 97, 8), 100]
    for size in (3, 70, 70):
        batch = batch_of(size)
        runner.pad_batch(batch)
        assert runner.can_use_cuda_graph(batch)
        assert runner.replay(batch) == "logits"
    assert runner.replayed == [4, 72, 72]
    hits = {record.key.num_tokens: record.hits for record in runner.kpolicy.registry.records() if record.hits}
    assert hits == {4: 1, 72: 2}
    assert runner.kpolicy.stats.total.padding == 5


@pytest.mark.parametrize("most", [100, 1024])
def test_mini_sglang_without_a_profile_replays_what_the_plain_engine_does(adapter, monkeypatch, most):
    """Costs of another model decide nothing: each decode batch replays, and to 256 as far padded as without kpolicy."""
    monkeypatch.delenv("KPOLICY_PROFILE", raising=False)
    runner = mini(adapter, cuda_graph_max_bs=most)
    assert all(runner.can_use_cuda_graph(batch_of(size)) for size in range(1, most + 1))
    own = (1, 2, 4, *range(8, min(most, 256) + 1, 8))
    assert set(own) <= set(runner.graph_bs_list)


def test_nano_vllm_without_a_profile_replays_what_the_plain_engine_does(adapter, monkeypatch):
    """Likewise, over nano-vllm's sizes."""
    monkeypatch.delenv("KPOLICY_PROFILE", raising=False)
    adapter("nano_vllm")
    runner = sys.modules["nanovllm.engine.llm_engine"].ModelRunner
    runner, plain = nano(runner, 512), nano(ModelRunner, 512)
    for size in range(1, 513):
        for each in (runner, plain):
            each.run_model(Ids(size), None, is_prefill=False)
    assert runner.ran == plain.ran


def test_mini_sglang_runs_eagerly_what_costs_less(adapter, monkeypatch, tmp_path):
    """Where a graph costs more than an eager step the batch isn't padded and doesn't replay."""
    monkeypatch.setenv("KPOLICY_PROFILE", profile_of(tmp_path, graph_us=900, eager_us=500))
    runner, batch = mini(adapter), batch_of(3)
    runner.pad_batch(batch)
    assert len(batch.padded_reqs) == 3
    assert not runner.can_use_cuda_graph(batch)
    assert runner.kpolicy.stats.by_reason["eager_is_cheaper"].steps == 1


def falling_profile(tmp_path):
    """A profile whose graph of 8 was measured to take longer than that of 16."""
    free = HostCost(0.0)
    costs = CostTable(
        version="test", measured=True, full=Curve((1, 8, 16), (100.0, 900.0, 200.0)), piecewise=Curve((1,), (9e9,)),
        eager=Curve((1,), (5e3,)), host_full=free, host_piecewise=free, host_eager=free,
    )  # fmt: skip
    write_profile(tmp_path / "profile.json", Profile(costs=costs, device="test", model="test"))
    return str(tmp_path / "profile.json")


@pytest.mark.parametrize("name", ["mini_sglang", "nano_vllm"])
def test_what_is_decided_is_the_graph_that_the_engine_replays(adapter, monkeypatch, tmp_path, name):
    """Both pad to the next size, also where a larger graph was measured as quicker: hits and padding are that one's."""
    monkeypatch.setenv("KPOLICY_PROFILE", falling_profile(tmp_path))
    if name == "mini_sglang":
        runner, batch = mini(adapter, cuda_graph_max_bs=16), batch_of(5)
        runner.pad_batch(batch)
        runner.replay(batch)
        replayed = runner.replayed
    else:
        adapter(name)
        runner = nano(sys.modules["nanovllm.engine.llm_engine"].ModelRunner, 16)
        runner.run_model(Ids(5), None, is_prefill=False)
        replayed = runner.ran
    hits = [record.key.num_tokens for record in runner.kpolicy.registry.records() if record.hits]
    assert (hits, runner.kpolicy.stats.total.padding) == (replayed, 3) == ([8], 3)


def test_mini_sglang_keeps_given_sizes_and_prefill(adapter):
    """Sizes of the user stay; prefill and batches above every size are eager."""
    runner = mini(adapter, cuda_graph_bs=[8, 2])
    assert runner.graph_bs_list == [2, 8]
    assert not runner.can_use_cuda_graph(batch_of(9))
    assert not runner.can_use_cuda_graph(batch_of(2, decode=False))


def test_mini_sglang_without_graphs(adapter):
    """With expert parallelism mini-sglang captures nothing, and nothing is decided."""
    runner, batch = mini(adapter, cuda_graph_max_bs=0), batch_of(2)
    runner.pad_batch(batch)
    assert not runner.can_use_cuda_graph(batch)
    assert len(batch.padded_reqs) == 2


PREFILL_REASON = {None: "phase_disabled", "measured": "mixed_not_captured"}
"""Why prompts are eager: neither engine has graphs of them; a policy that reads costs finds none that takes them."""


@pytest.mark.parametrize("costs", [None, "measured"])
def test_mini_sglang_counts_prompts(adapter, monkeypatch, tmp_path, costs):
    """A prompt batch stays as it is, and is counted with a reason and its tokens beside the decodes."""
    profile = profile_of(tmp_path, graph_us=100, eager_us=500) if costs else ""
    monkeypatch.setenv("KPOLICY_PROFILE", profile)
    runner, batch = mini(adapter), batch_of(3, decode=False)
    for each in (batch, batch_of(3)):
        runner.pad_batch(each)
    assert batch.padded_reqs == batch.reqs
    assert not runner.can_use_cuda_graph(batch)
    stats = runner.kpolicy.stats
    told = stats.by_mode_and_reason["eager", PREFILL_REASON[costs]]
    assert (told.steps, told.tokens) == (1, 100 + 101 + 102)
    assert stats.total.steps == 2
    assert sum(each.steps for (mode, _), each in stats.by_mode_and_reason.items() if mode == "full") == 1


@pytest.mark.parametrize("costs", [None, "measured"])
def test_nano_vllm_counts_prompts(adapter, monkeypatch, tmp_path, costs):
    """Likewise; its warm-up, before anything is captured, isn't counted."""
    profile = profile_of(tmp_path, graph_us=100, eager_us=500) if costs else ""
    monkeypatch.setenv("KPOLICY_PROFILE", profile)
    adapter("nano_vllm")
    runner = nano(sys.modules["nanovllm.engine.llm_engine"].ModelRunner, 32)
    runner.run_model(Ids(700), None, is_prefill=True)
    runner.run_model(Ids(3), None, is_prefill=False)
    assert runner.ran == ["eager", 4]
    stats = runner.kpolicy.stats
    told = stats.by_mode_and_reason["eager", PREFILL_REASON[costs]]
    assert (told.steps, told.tokens, stats.total.steps) == (1, 700, 2)


def test_nano_vllm_without_graphs(adapter):
    """With enforce_eager it captures nothing, and nothing is decided."""
    adapter("nano_vllm")
    runner = nano(sys.modules["nanovllm.engine.llm_engine"].ModelRunner, 32, enforce_eager=True)
    runner.run_model(Ids(3), None, is_prefill=False)
    assert (runner.ran, runner.kpolicy) == (["eager"], None)


def test_nano_vllm_has_no_gap_above_its_last_size(adapter, monkeypatch):
    """With 100 requests its sizes end at 96: 97 runs eagerly, with that reason, where it used to end in an error."""
    monkeypatch.delenv("KPOLICY_PROFILE", raising=False)
    adapter("nano_vllm")
    runner = nano(sys.modules["nanovllm.engine.llm_engine"].ModelRunner, 100)
    with pytest.raises(StopIteration):
        nano(ModelRunner, 100).run_model(Ids(97), None, is_prefill=False)
    assert runner.run_model(Ids(97), None, is_prefill=False) == "logits"
    runner.run_model(Ids(9), None, is_prefill=False)
    runner.run_model(Ids(500), None, is_prefill=True)
    assert runner.ran == ["eager", 16, "eager"]
    assert runner.enforce_eager is False
    assert runner.kpolicy.stats.by_reason["above_largest_size"].steps == 1


def test_nano_vllm_by_measured_costs(adapter, monkeypatch, tmp_path):
    """A profile decides for it too."""
    monkeypatch.setenv("KPOLICY_PROFILE", profile_of(tmp_path, graph_us=900, eager_us=500))
    adapter("nano_vllm")
    runner = nano(sys.modules["nanovllm.engine.llm_engine"].ModelRunner, 32)
    runner.run_model(Ids(4), None, is_prefill=False)
    assert runner.ran == ["eager"]


@pytest.mark.parametrize("name", ["mini_sglang", "nano_vllm"])
def test_a_profile_is_named_as_elsewhere(adapter, name):
    """By the file, or by the name of one that ships."""
    module = adapter(name)
    assert module.costs_from("qwen2.5-0.5b-h200").measured
    with pytest.raises(UnknownNameError, match="unknown profile"):
        module.costs_from("qwen9")


def parameters(function):
    return ", ".join(inspect.signature(function).parameters)


@pytest.mark.parametrize("name", PRETENDED)
def test_pretended_classes_are_as_published(name):
    """Their methods take what the published ones do, which were read at a commit that is named."""
    for path, signature in SIGNATURES[name].items():
        of, _, method = path.partition(".")
        assert of == PRETENDED[name].__name__
        assert parameters(getattr(PRETENDED[name], method)) == signature, path
    own = {method for method, each in vars(PRETENDED[name]).items() if inspect.isfunction(each)}
    assert own == {path.partition(".")[2] for path in SIGNATURES[name]}
    assert all(len(commit) == 40 for files in READ_AT.values() for commit in files.values())


@pytest.mark.parametrize("name", PRETENDED)
def test_adapters_take_what_the_engine_gives(adapter, name):
    """Methods that are overridden keep their parameters; the runner that is called by name takes each name."""
    module = adapter(name)
    ours = getattr(module, f"KPolicy{PRETENDED[name].__name__}")
    overridden = [path for path in SIGNATURES[name] if path.partition(".")[2] in vars(ours)]
    assert overridden
    for path in overridden:
        method = getattr(ours, path.partition(".")[2])
        if path in BY_NAME:
            inspect.signature(method).bind(None, **dict.fromkeys(SIGNATURES[name][path].split(", ")[1:]))
        else:
            assert parameters(method) == SIGNATURES[name][path]


@pytest.mark.parametrize("name", PRETENDED)
def test_adapters_rely_on_no_more_than_is_recorded(name):
    """Each attribute that an adapter asks of the engine's objects is one that the published classes have."""
    tree = ast.parse((EXAMPLES / f"{name}.py").read_text(encoding="utf-8"))
    methods = {path.partition(".")[2] for path in SIGNATURES[name]}
    known = {"self": {"kpolicy", *methods, *ATTRIBUTES[name]["self"]}}
    known.update({of: set(names) for of, names in ATTRIBUTES[name].items() if of != "self"})
    asked = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    found = set()
    for node in asked:
        of = node.value.id if isinstance(node.value, ast.Name) else getattr(node.value, "attr", None)
        if of in known:
            assert node.attr in known[of], f"{of}.{node.attr}"
            found.add(of)
    assert found == known.keys()
