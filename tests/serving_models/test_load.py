"""Loading: folders, checkpoints, tokenizers, sizes, devices, and every error that says what is wrong with them."""

from __future__ import annotations

import json
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kpolicy.attention import HostParams, hf  # noqa: E402
from kpolicy.errors import CheckpointError, ConfigError, SupportError, UnknownArchitectureError  # noqa: E402
from kpolicy.executors.step_model import StepContext  # noqa: E402
from kpolicy.figures import model_figures  # noqa: E402
from kpolicy.serving import load as loading  # noqa: E402
from kpolicy.serving.checkpoint import longest_request, read_config  # noqa: E402
from kpolicy.serving.default_model import load_default  # noqa: E402
from kpolicy.serving.load import load  # noqa: E402
from tests.serving_models.driver import Driver, Row, run_mixed  # noqa: E402
from tests.serving_models.families import FAMILIES  # noqa: E402

Loaded = Callable[[str], Any]
SMALL: dict[str, Any] = {"num_blocks": 16, "block_size": 4}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with config, weights in several files, and a tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("checkpoint")
    model = load(FAMILIES["llama"], **SMALL, seed=3)
    model.hf.save_pretrained(folder, max_shard_size="100KB")
    words = {word: index for index, word in enumerate(["?", "a", "graph", "replays", "fast"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(folder)  # noqa: S106
    return folder


@pytest.fixture
def copied(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of it to break."""
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


def _edit(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def test_a_checkpoint_has_the_saved_weights_and_tokenizer(checkpoint: Path, sequences: list[list[int]]) -> None:
    """A saved model loads with its weights, whatever the seed, and its tokenizer reads text."""
    assert len(list(checkpoint.glob("*.safetensors"))) > 1
    saved, model = load(FAMILIES["llama"], **SMALL, seed=3), load(checkpoint, **SMALL, seed=9)
    ids = sequences[1]
    assert torch.equal(model.reference_logits(ids), saved.reference_logits(ids))
    assert not torch.equal(load(FAMILIES["llama"], **SMALL, seed=9).reference_logits(ids), saved.reference_logits(ids))
    (logits,) = run_mixed(Driver(model), [ids], seed=2)
    torch.testing.assert_close(logits, model.reference_logits(ids), atol=3e-4, rtol=0)
    assert model.tokenizer("a graph replays").input_ids == [1, 2, 3]
    assert model.tokenizer is model.tokenizer


def test_what_load_runs_runs_on_the_models_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of Triton go to the current device: the second one is that while its model is held to its own forward."""
    current, seen = [0], list[tuple[int, str]]()

    @contextmanager
    def device(which: Any) -> Iterator[None]:
        before, current[0] = current[0], which.index
        yield
        current[0] = before

    def noted(name: str) -> Callable[..., list[str]]:
        return lambda *_: seen.append((current[0], name)) or []  # type: ignore[func-returns-value]

    enter = loading._current
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(device=device))
    monkeypatch.setattr(loading, "_current", lambda _: enter(torch.device("cuda", 1)))
    for name in ("verify", "_measure_crossover", "_try_pages"):
        monkeypatch.setattr(loading, name, noted(name))
    load(FAMILIES["llama"], **SMALL)
    assert seen == [(1, "verify"), (1, "_measure_crossover"), (1, "_try_pages")]
    assert current == [0]
    for other in ("cpu", "cuda"):
        with enter(torch.device(other)):
            assert current == [0]


def test_a_folder_without_weights_gets_random_ones(tmp_path: Path) -> None:
    """With config.json alone, weights are random and the seed says which."""
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["qwen3"]))
    first, second, other = load(tmp_path, **SMALL), load(str(tmp_path), **SMALL), load(tmp_path, **SMALL, seed=1)
    ids = [1, 2, 3]
    assert torch.equal(first.reference_logits(ids), second.reference_logits(ids))
    assert not torch.equal(first.reference_logits(ids), other.reference_logits(ids))


def test_a_config_object_is_taken_as_it_is() -> None:
    """A config of transformers loads, and the caller's stays as it was."""
    from transformers import LlamaConfig

    fields = {name: value for name, value in FAMILIES["llama"].items() if name != "model_type"}
    config = LlamaConfig(**fields)
    before = config.to_json_string(use_diff=False)
    assert load(config, **SMALL).vocab == 128
    assert config.to_json_string(use_diff=False) == before


def test_sizes_add_up(loaded: Loaded) -> None:
    """What a model says of itself is what its tensors are."""
    model = loaded("llama")
    assert (model.num_slots, model.pad_slot, model.max_blocks) == (384, 384, 24)
    assert model.kv_bytes == sum(cache.nbytes for cache in model.kv_caches())
    assert all(len(cache) == model.num_slots + 1 for cache in model.kv_caches())
    assert len(model.kv_caches()) == 6
    assert model.weight_bytes == 4 * model.num_params
    assert (model.vocab, model.max_model_len, model.block_size, model.num_blocks) == (128, 96, 4, 96)


def test_mla_keeps_one_latent_a_token(loaded: Loaded) -> None:
    """An MLA layer has one cache of latent and roped key, smaller than its expanded keys and values."""
    model = loaded("deepseek_v3")
    assert [tuple(cache.shape[1:]) for cache in model.kv_caches()] == [(24 + 8,)] * 3


@pytest.mark.parametrize("name", FAMILIES)
def test_a_token_takes_the_bytes_that_its_config_says(name: str, loaded: Loaded) -> None:
    """Of every family: what the cache holds for a token, which profiles say, is what simulations count by a config."""
    model = loaded(name)
    caches = model.kv_caches()
    assert model.kv_bytes_per_token == sum(cache[0].nbytes for cache in caches)
    in_16_bits = model.kv_bytes_per_token * 2 // caches[0].element_size()
    assert in_16_bits == model_figures(FAMILIES[name]).kv_bytes_per_token


def test_half_precision_runs() -> None:
    """Weights and KV in bfloat16 pass the check at load, and give what the class gives, roughly."""
    model = load(FAMILIES["qwen3"], **SMALL, dtype="bfloat16")
    assert {cache.dtype for cache in model.kv_caches()} == {torch.bfloat16}
    ids = list(range(30))
    (logits,) = run_mixed(Driver(model), [ids], seed=1)
    reference = model.reference_logits(ids).float()
    assert (logits.float() - reference).norm() < 0.05 * reference.norm()


def test_released_kv_is_an_error_to_use() -> None:
    """After release there is no KV, and a step says so."""
    model = load(FAMILIES["llama"], **SMALL)
    driver = Driver(model)
    tensors = driver.tensors([Row(driver.request([1, 2]), 2, False)])
    model.release()
    assert model.kv_caches() == []
    with pytest.raises(ConfigError, match="given back by release"):
        model.forward(StepContext(tensors, None))


class Watched(StepContext):
    """A step that notes its marked calls."""

    def __init__(self, tensors: Any) -> None:
        super().__init__(tensors, None)
        self.calls: list[Any] = []

    def attention(self, call: Any, *tensors: Any) -> Any:
        assert all(isinstance(each, torch.Tensor) for each in tensors)
        self.calls.append(call)
        return super().attention(call, *tensors)


@pytest.mark.parametrize("name", ["gemma2", "deepseek_v2"])
def test_marked_calls_are_the_same_objects_in_every_step(name: str, loaded: Loaded) -> None:
    """Each layer marks once a step, with one call that never changes and tensors: what a capture keeps."""
    model = loaded(name)
    driver = Driver(model)
    request = driver.request(list(range(9)))
    for count in (5, 4):
        step = Watched(driver.tensors([Row(request, count, False)]))
        model.forward(step)
        request.computed += count
        assert step.calls == list(model.layers)


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3"])
def test_two_threads_step_at_once(name: str, loaded: Loaded, sequences: list[list[int]]) -> None:
    """Steps of different requests on two threads, as halves that run beside each other, don't mix."""
    model = loaded(name)
    driver = Driver(model)
    requests = [driver.request(ids) for ids in sequences[1:3]]
    wanted = [model.reference_logits(ids) for ids in sequences[1:3]]
    found: list[list[Any]] = [[], []]

    def run(index: int) -> None:
        request = requests[index]
        while request.computed < len(request.ids):
            found[index] += driver.step([Row(request, 1, True)])

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for logits, reference in zip(found, wanted, strict=True):
        torch.testing.assert_close(torch.cat(logits), reference, atol=3e-4, rtol=0)


def test_the_default_model_has_a_few_million_parameters() -> None:
    """The default model loads, groups its query heads, and its attention can be captured in every batch."""
    model = load_default(num_blocks=64)
    assert 3e6 < model.num_params < 8e6
    assert model.vocab == 4096
    assert model.layers[0].spec.num_heads > model.layers[0].spec.num_kv_heads > 1
    assert model.support.claims.mixed
    assert model.support.claims.host_params is HostParams.NONE
    assert model.support.claims.one_computation
    tokens = model.generate_reference(list(range(100, 130)), 16)
    assert len(tokens) == 16
    assert len(set(tokens)) > 8


def test_a_forward_that_reads_the_host_can_not_be_captured() -> None:
    """Rotary scaling that looks at the positions' values makes the model eager-only, and the support says why."""
    config = {
        **FAMILIES["llama"], "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    }  # fmt: skip
    support = load(config, **SMALL).support
    assert not support.claims.piecewise
    assert support.claims.uniform_query_len == 0
    assert any("reads the host" in limit for limit in support.limits)


_LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 8, "long_factor": [4.0] * 8,
}  # fmt: skip


def test_longrope_has_requests_as_long_as_its_shorter_frequencies(sequences: list[list[int]]) -> None:
    """LongRoPE's frequencies change for a whole step with its longest request, so none is longer than where they do."""
    config = {**FAMILIES["llama"], "rope_parameters": _LONGROPE}
    with pytest.raises(ConfigError, match=r"max_model_len is 65; llama has longrope.* longer than 64 .* give 1 to 64"):
        load(config, max_model_len=65)
    model = load(config)
    assert model.max_model_len == 64
    wanted = [ids[:64] for ids in sequences]
    for ids, logits in zip(wanted, run_mixed(Driver(model), wanted, seed=2), strict=True):
        torch.testing.assert_close(logits, model.reference_logits(ids), atol=3e-4, rtol=0)


def test_longrope_is_found_where_layers_differ() -> None:
    """Of a config with rotary parameters by kind of layer, one with longrope bounds requests."""
    ropes = {"full_attention": _LONGROPE, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    config, _ = read_config({**FAMILIES["gemma3"], "rope_parameters": ropes})
    assert longest_request(config)[0] == 64


# Bad input.


def test_a_missing_folder_or_config_is_named(tmp_path: Path) -> None:
    """A folder that isn't there, one without config.json and a broken config.json are told apart."""
    with pytest.raises(CheckpointError, match="nowhere isn't there"):
        load(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(CheckpointError, match="can't be read as JSON"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="holds list"):
        load(tmp_path)
    with pytest.raises(ConfigError, match="can't be loaded from int"):
        load(7)


def test_an_unknown_architecture_is_named() -> None:
    """A model type that nobody knows, and a config without one, say so."""
    with pytest.raises(UnknownArchitectureError, match="'lama'"):
        load({"model_type": "lama"})
    with pytest.raises(ConfigError, match="no model_type"):
        load({"hidden_size": 64})


def test_a_family_alone_is_no_model(copied: Path) -> None:
    """Where weights don't tell its sizes: a model of random weights would be some other one."""
    bare = (
        r"says none of its main sizes, so it is llama's family .* vocab_size \(32000\), hidden_size \(4096\), num_hid"
    )
    for config in (
        {"model_type": "llama"}, {"model_type": "llama", "rope_theta": 5e5, "max_position_embeddings": 64},
        {"model_type": "llava", "text_config": {"model_type": "llama"}},
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=bare):
            load(config)
    (copied / "config.json").write_text('{"model_type": "llama"}')
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert read_config(copied)[0].hidden_size == 4096
    for file in copied.glob("*.safetensors*"):
        file.unlink()
    with pytest.raises(ConfigError, match=rf"{copied / 'config.json'} {bare}"):
        load(copied)


@pytest.mark.parametrize(
    ("config", "note", "sizes"),
    [
        # As they are published: Gemma 3 4B, LLaVA 1.5 7B and LLaVA with a text_config that says its type alone.
        (
            {"model_type": "gemma3", "text_config": {"hidden_size": 2560, "num_hidden_layers": 34}},
            r"say vocab_size \(262208\), num_attention_heads \(8\): .* default for gemma3_text", (2560, 34, 8),
        ),
        (
            {"model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": 32064}},
            r"say hidden_size \(4096\), num_hidden_layers \(32\), num_attention_heads \(32\): ", (4096, 32, 32),
        ),
        (
            {
                "model_type": "llava", "text_config": {"model_type": "llama"},
                "vision_config": {"model_type": "clip_vision_model", "hidden_size": 1024, "num_attention_heads": 16},
            },
            r"say vocab_size \(32000\), hidden_size \(4096\), ", (4096, 32, 32),
        ),
    ],
)  # fmt: skip
def test_sizes_that_are_left_to_transformers_are_told(
    config: dict[str, Any], note: str, sizes: tuple[int, ...]
) -> None:
    """Published configs leave out those that are their class's defaults."""
    with pytest.warns(UserWarning, match=note) as told:
        text = read_config(config)[0].get_text_config()
    assert (text.hidden_size, text.num_hidden_layers, text.num_attention_heads) == sizes
    assert len(told) == 1


def test_random_weights_of_a_quantized_model_are_told() -> None:
    """Random weights have the config's dtype: what is measured with them isn't the quantized model."""
    config = {**FAMILIES["llama"], "quantization_config": {"quant_method": "fp8"}}
    with pytest.warns(UserWarning, match=r"of quantized weights \(fp8\), and random weights are not"):
        assert load(config, **SMALL).dtype == torch.float32


def test_sizes_are_looked_at_after_the_architecture() -> None:
    """Neither encoder-decoders, nor configs of several language models, nor patterns of layers get a wrong reason."""
    for name in ("musicgen", "t5", "funnel", "prophetnet"):
        with pytest.raises(UnknownArchitectureError, match=f"{name!r}"):
            load({"model_type": name})
    pattern = {"model_type": "nemotron_h", "hidden_size": 64, "vocab_size": 256, "num_attention_heads": 4}
    pattern["num_key_value_heads"] = 2
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with pytest.raises(SupportError, match="mamba"):
            load({**pattern, "layers_block_type": ["mamba", "attention"]}, **SMALL)


def test_a_config_of_several_language_models_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its architecture was declared, too."""
    monkeypatch.setitem(hf._registered, "musicgen", lambda _: ["mha"])
    with pytest.raises(ConfigError, match=r"as a musicgen config: .*ambiguous"):
        load({"model_type": "musicgen"})


def test_a_config_that_makes_no_model_is_an_error_of_ours() -> None:
    """Fields that contradict each other give an error that names the model type."""
    with pytest.raises(ConfigError, match="llama"):
        load({**FAMILIES["llama"], "num_attention_heads": 4, "num_key_value_heads": 3})
    with pytest.raises(ConfigError, match="qwen2"):
        load({**FAMILIES["qwen2"], "head_dim": None})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64}, "mamba"),
        (
            {"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64},
            "can't be marked|marked attention",
        ),
    ],
)
def test_attention_that_can_not_be_marked_is_an_error(config: dict[str, Any], words: str) -> None:
    """Recurrences, and classes whose attention doesn't go through the interface, are refused at load."""
    with pytest.raises(SupportError, match=words):
        load(config, **SMALL)


def test_attention_that_does_something_else_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class whose own attention differs from the kernels' is refused, with the error that was found."""
    from transformers.models.llama import modeling_llama

    own = modeling_llama.eager_attention_forward

    def reversed_heads(module: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        return own(module, query.flip(1), *args, **kwargs)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", reversed_heads)
    with pytest.raises(SupportError, match="other logits than its own forward"):
        load(FAMILIES["llama"], **SMALL)


def test_attention_called_twice_a_layer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer must mark exactly once, or its KV would be written twice."""
    from transformers.models.llama import modeling_llama

    own = modeling_llama.LlamaAttention.forward

    def twice(self: Any, *args: Any, **kwargs: Any) -> Any:
        own(self, *args, **kwargs)
        return own(self, *args, **kwargs)

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", twice)
    with pytest.raises(SupportError, match="layer 0 did 2 times"):
        load(FAMILIES["llama"], **SMALL)


def test_a_shard_that_is_not_there_is_named(copied: Path) -> None:
    """An index that names a missing file, and one that isn't an index, are told with their names."""
    gone = sorted(copied.glob("*.safetensors"))[0]
    gone.unlink()
    with pytest.raises(CheckpointError, match=gone.name):
        load(copied, **SMALL)
    (copied / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="isn't an index"):
        load(copied, **SMALL)


def test_a_shard_that_is_cut_short_is_an_error(copied: Path) -> None:
    """A file cut short doesn't load as less."""
    file = sorted(copied.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="can't be loaded"):
        load(copied, **SMALL)


def test_another_models_weights_are_an_error(copied: Path) -> None:
    """Weights that lack keys, have others or other shapes than the config's model are refused, and some are named."""
    _edit(copied / "config.json", num_hidden_layers=4)
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.3\."):
        load(copied, **SMALL)
    _edit(copied / "config.json", num_hidden_layers=2)
    with pytest.raises(CheckpointError, match=r"unknown: model\.layers\.2\."):
        load(copied, **SMALL)
    _edit(copied / "config.json", num_hidden_layers=3, vocab_size=64)
    with pytest.raises(CheckpointError):
        load(copied, **SMALL)
    _edit(copied / "config.json", vocab_size=128, model_type="qwen3", architectures=["Qwen3ForCausalLM"])
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.0\.self_attn\.k_norm"):
        load(copied, **SMALL)


def test_weights_of_another_format_are_an_error(tmp_path: Path) -> None:
    """A folder with pickled weights alone isn't quietly run with random ones."""
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["llama"]))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_blocks": 0}, "num_blocks is 0"),
        ({"block_size": 0}, "block_size is 0"),
        ({"max_num_reqs": 0}, "max_num_reqs is 0"),
        ({"num_blocks": 4, "block_size": 4, "max_model_len": 17}, "num_blocks of at least 5"),
        ({"max_model_len": 257}, "256 positions"),
        ({"max_model_len": 0}, "max_model_len is 0"),
        ({"num_blocks": "64"}, "num_blocks is '64'; it must be a whole number"),
        ({"num_blocks": 1.5}, r"num_blocks is 1\.5"),
        ({"max_model_len": 1.5}, r"max_model_len is 1\.5"),
        ({"max_num_reqs": True}, "max_num_reqs is True"),
        ({"num_blocks": 10**30}, "num_blocks is 10+; blocks of 16 may hold 2147483647 tokens"),
        ({"seed": 1.5}, r"seed is 1\.5; it must be a whole number"),
        ({"seed": None}, "seed is None"),
        ({"seed": 2**70}, "at most 64 bits"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"dtype": "float8_e4m3fn"}, "dtype is 'float8_e4m3fn'; give float32, bfloat16, float16, float64"),
        ({"device": "meta"}, "device 'meta' holds no values"),
        ({"device": "warp"}, "device 'warp' isn't there"),
        ({"device": "cuda:99"}, "Devices here: cpu"),
    ],
)
def test_options_out_of_range_are_named(options: dict[str, Any], words: str) -> None:
    """Each option that can't be used is named with its value and what is allowed."""
    with pytest.raises(ConfigError, match=words):
        load(FAMILIES["llama"], **options)


def test_whole_numbers_of_other_libraries_are_taken() -> None:
    """Counts of NumPy are counts, as in a shape."""
    model = load(FAMILIES["llama"], num_blocks=np.int64(16), block_size=np.int32(4), max_num_reqs=np.uint8(3))
    assert (model.num_blocks, model.block_size, model.max_num_reqs) == (16, 4, 3)
    assert type(model.num_slots) is int


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("out of memory\nmore of it"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes. Out of it: no"),
        RuntimeError("NPU out of memory. Tried to allocate 2.00 GiB"),
        MemoryError("out of address space"),
    ],
)
def test_kv_that_there_is_no_memory_for_is_an_error_of_ours(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the device refuses the KV, the error says how much of it was asked for and what to give less of."""

    def refuse(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(loading, "layer_cache", refuse)
    words = r"no room on cpu for the KV of 3 layers in 16 blocks of 4 .*: .*[Oo]ut of .*Give fewer blocks\.$"
    with pytest.raises(ConfigError, match=words):
        load(FAMILIES["llama"], **SMALL)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        NotImplementedError("Could not run 'aten::empty.memory_format' with arguments from the 'FOO' backend"),
    ],
)
def test_an_error_of_kv_that_is_not_of_memory_goes_on(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that was lost, or has no such operator, isn't told as too many blocks."""

    def refuse(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(loading, "layer_cache", refuse)
    with pytest.raises(type(error)) as caught:
        load(FAMILIES["llama"], **SMALL)
    assert caught.value is error


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hidden_size": 0}, "hidden_size of the config given is 0; it must be at least 1"),
        ({"vocab_size": -3}, "vocab_size of the config given is -3"),
        ({"max_position_embeddings": 0}, "max_position_embeddings of llama is 0"),
    ],
)
def test_sizes_of_nothing_are_named(fields: dict[str, Any], words: str) -> None:
    """A config with a size of zero is refused by that size, and not by what torch makes of it."""
    with pytest.raises(ConfigError, match=words):
        load({**FAMILIES["llama"], **fields}, **SMALL)


def test_a_missing_tokenizer_is_an_error_only_where_text_is_asked_for(tmp_path: Path, loaded: Loaded) -> None:
    """A model without a tokenizer loads; asking for the tokenizer says where it looked."""
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["llama"]))
    model = load(tmp_path, **SMALL)
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        _ = model.tokenizer
    with pytest.raises(CheckpointError, match="made of a config"):
        _ = loaded("llama").tokenizer
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="can't be loaded"):
        _ = model.tokenizer
