"""`load`: a causal LM of transformers from a folder or a config, ready to be stepped and captured."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

from kpolicy.attention import AttentionSupport, Claims, LayerKind
from kpolicy.attention.hf import from_hf_config, layer_kinds
from kpolicy.device_names import read_device
from kpolicy.errors import ConfigError, SupportError
from kpolicy.executors.cpu.adapter import is_out_of_memory
from kpolicy.executors.cuda.failures import classify_by_words
from kpolicy.executors.importing import first_line
from kpolicy.reasons import Reason
from kpolicy.serving.checkpoint import has_weights, longest_request, read_config, read_weights
from kpolicy.serving.experts import take_experts
from kpolicy.serving.hf_model import KvSize, LoadedModel
from kpolicy.serving.kernels import Kernels, choose_kernels
from kpolicy.serving.kv_cache import LatentLayer, PagedLayer, layer_cache
from kpolicy.serving.marks import ATTENTION_NAME, register, watch_latents
from kpolicy.serving.trial import probe_layers, verify
from kpolicy.serving.weights import randomise
from kpolicy.shapes import LARGEST_COUNT, plain_int

__all__ = ["device_there", "first_device", "load"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""What weights and KV may be; float64 is for checks of the others"""
_SEEDS = range(-(1 << 63), 1 << 64)
"""What torch takes"""
_HELD = frozenset({LayerKind.MHA, LayerKind.GQA, LayerKind.MQA, LayerKind.SLIDING_WINDOW, LayerKind.MLA})


def load(
    source: str | Path | Mapping[str, Any] | Any,
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
    num_blocks: int = 1024,
    block_size: int = 16,
    max_model_len: int | None = None,
    max_num_reqs: int = 64,
    seed: int = 0,
    kernels: str = "auto",
) -> LoadedModel:
    """Load a causal LM of transformers as it is, and make KV for it.

    A folder with safetensors gets its weights; one without, and a config, get random ones under which attention
    matters. A few tokens are run and held to the class's own forward before it is given back.

    Args:
        source: a folder with config.json, a config as a mapping, or a config object of transformers.
        device: where weights and KV live, as torch or its executor is called: ``"cuda:1"``, ``"npu"`` or
            ``"ascend"``; ``"auto"`` for the first that memory can be had on: an NPU, a GPU, an XPU, the CPU.
        dtype: of weights and KV; the config's where None, float32 where it has none.
        num_blocks: KV blocks.
        block_size: tokens in a block.
        max_model_len: tokens of the longest request; where None, as many as the model has positions and the KV holds,
            and of one with longrope as its shorter frequencies are for.
        max_num_reqs: requests in a step, at most.
        seed: of random weights.
        kernels: what attention runs on: ``"triton"``, ``"flash"``, ``"flashinfer"``, ``"plain"``, or ``"auto"`` for
            the best that the device has; see `kpolicy.serving.kernels`.

    Raises:
        CheckpointError: the folder lacks files, or its weights are another model's.
        UnknownArchitectureError: the architecture isn't known.
        SupportError: its attention can't be marked, isn't what the kernels here compute, or the kernels can't run on
            the device.
        ConfigError: the KV is too small for one request, the device isn't there, or an argument is out of range.
    """
    at, seed = device_there(device), plain_int(seed)
    if type(seed) is not int or seed not in _SEEDS:
        raise ConfigError(f"seed is {seed!r:.80}; it must be a whole number of at most 64 bits, such as 0.")
    if at.type == "meta":
        raise ConfigError("device 'meta' holds no values, so no step runs there; give a device that does.")
    config, folder = read_config(source)
    attention, kinds = choose_kernels(at, kernels), layer_kinds(config)
    if hasattr(attention, "block_size"):
        attention.block_size = block_size  # their KV lies by head within a block
    _check_kinds(config, kinds)
    kv = _kv_size(config, num_blocks, block_size, max_model_len, max_num_reqs)
    register()
    # The KV is written in place by steps, which inference tensors made here would forbid.
    with _current(at), torch.inference_mode(False):
        hf = _weights(config, folder, at, _dtype(dtype, config), seed)
        take_experts(hf, getattr(attention, "experts", None))
        model = _over_kv(hf, kinds, kv, attention, folder)
        reads = verify(model)
        _measure_crossover(model, attention)
        _try_pages(model, attention)
    if reads:
        model._support = model.support.meet(_eager_only(type(hf).__name__, reads))
    return model


def _over_kv(
    hf: Any, kinds: tuple[LayerKind, ...], kv: KvSize, kernels: Kernels, folder: Path | None
) -> LoadedModel:  # fmt: skip
    """The model over zeroed KV, its layers as a probe found them."""
    latent = [kind is LayerKind.MLA for kind in kinds]
    # A cross-attention module has a layer_idx too; the base model's own layers come first.
    modules: dict[int, Any] = {}
    for module in hf.base_model.modules():
        if hasattr(module, "layer_idx") and hasattr(module, "kv_a_layernorm"):
            modules.setdefault(module.layer_idx, module)
    missing = [index for index, wanted in enumerate(latent) if wanted and index not in modules]
    if missing:
        raise SupportError(
            f"{type(hf).__name__} has MLA in layer {missing[0]} and no module there with kv_a_layernorm and kv_b_proj, "
            "which absorbed decode works from; kpolicy holds MLA as DeepSeek-V2 and V3 have it."
        )
    specs = probe_layers(hf, len(kinds))
    watch_latents([modules[index] for index, wanted in enumerate(latent) if wanted])
    like = hf.get_input_embeddings().weight.detach()
    try:
        layers = [
            layer_cache(spec, kernels, modules.get(index), latent[index], kv.num_slots, kv.block_size, like)
            for index, spec in enumerate(specs)
        ]
    except (RuntimeError, MemoryError) as error:
        if not _no_memory(error):
            raise
        raise ConfigError(
            f"there is no room on {like.device} for the KV of {len(specs)} layers in {kv.num_blocks} blocks of "
            f"{kv.block_size} tokens: {first_line(error)}. Give fewer blocks."
        ) from error
    support = from_hf_config(hf.config).meet(kernels.support(latent=any(latent)))
    return LoadedModel(hf, layers, support, kv, folder)


def _no_memory(error: Exception) -> bool:
    """Whether the device has no memory for what was asked of it."""
    return is_out_of_memory(error) or classify_by_words(error).reason is Reason.CAPTURE_OUT_OF_MEMORY


def _measure_crossover(model: LoadedModel, kernels: Kernels) -> None:
    """Let kernels that can absorb chunks of prompts find out which; without it they expand all."""
    measure = getattr(kernels, "measure_crossover", None)
    layer = next((layer for layer in model.layers if isinstance(layer, LatentLayer)), None)
    if measure is None or layer is None:
        return
    try:
        with torch.no_grad():
            measure(layer, min(model.num_slots, model.max_model_len))
    # A kernel that the device has no room for isn't needed.
    except Exception as error:  # noqa: BLE001 - Triton's and torch's own
        logging.getLogger("kpolicy").info("MLA prompts are expanded, none absorbed: %s", error)


def _try_pages(model: LoadedModel, kernels: Kernels) -> None:
    """Let kernels that may read pages as they are find out for which layers; without it they gather keys."""
    try_pages = getattr(kernels, "try_pages", None)
    if try_pages is None:
        return
    with torch.no_grad():
        for layer in model.layers:
            if isinstance(layer, PagedLayer):
                try_pages(layer.spec, layer.caches[0].dtype, layer.block_size)


def _weights(config: Any, folder: Path | None, device: torch.device, dtype: torch.dtype, seed: int) -> Any:
    import transformers

    causal_lm: Any = transformers.AutoModelForCausalLM
    options: dict[str, Any] = {"attn_implementation": ATTENTION_NAME, "dtype": dtype}
    if folder is not None and has_weights(folder):
        # Loading reports go through transformers' logger; what is wrong in them is raised as our error.
        logger = logging.getLogger("transformers.modeling_utils")
        level = logger.level
        logger.setLevel(logging.CRITICAL)
        try:
            model = read_weights(folder, config, **options).to(device)
        finally:
            logger.setLevel(level)
    else:
        try:
            with device:
                model = causal_lm.from_config(config, **options)
        except ValueError as error:
            raise SupportError(
                f"transformers makes no causal LM with marked attention of a {config.model_type} config: {error}"
            ) from error
        # A class checks its config's fields only by using them.
        except Exception as error:
            raise ConfigError(
                f"transformers can't build a {config.model_type} of this config: {type(error).__name__}: {error}. "
                "Check its fields."
            ) from error
        model = model.to(device)
        randomise(model, seed)
    return model.eval().requires_grad_(False)


def device_there(device: str | torch.device) -> torch.device:
    """The device that a name stands for, on which memory can be had.

    Args:
        device: as for `load`.

    Raises:
        ConfigError: it isn't there; says which are.
    """
    name = read_device(device)
    if name.torch == "auto":
        return first_device()
    try:
        if name.kind.startswith("cpu:"):
            raise ValueError("the CPU has no number")
        at = torch.device(name.torch) if name.kind != "accelerator" else _accelerator(name.index)
        torch.empty(1, device=at)
    # Each device's library has errors of its own.
    except Exception as error:
        first = first_line(error)
        if name.kind == "npu" and not hasattr(torch, "npu"):
            first = "torch has no such devices without torch_npu"
        raise ConfigError(
            f"device {str(device)!r} isn't there: {first}. Devices here: {', '.join(_devices())}. Give one of them, or "
            "run `kpolicy doctor` to see why it's missing."
        ) from error
    return at


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Make a device the current one of its kind: kernels of Triton go to that, whatever their tensors are on."""
    if device.type == "cpu" or device.index is None:
        return nullcontext()
    make: Callable[[torch.device], AbstractContextManager[Any]] | None
    make = getattr(torch.get_device_module(device), "device", None)
    return nullcontext() if make is None else make(device)


def _accelerator(index: int | None) -> torch.device:
    """The device that torch finds, or one of several."""
    found = torch.accelerator.current_accelerator()
    if found is None:
        raise RuntimeError("torch.accelerator finds none")
    return torch.device(found.type, index) if index is not None else torch.device(found.type)


def first_device() -> torch.device:
    """The first of an NPU, a GPU, an XPU and the CPU that memory can be had on."""
    for kind in ("npu", "cuda", "xpu"):
        # Each library has errors of its own for a device that isn't there or doesn't work.
        with suppress(Exception):
            torch.empty(1, device=kind)
            return torch.device(kind)
    return torch.device("cpu")


def _devices() -> list[str]:
    here = ["cpu"]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator().type
        here += [f"{kind}:{index}" for index in range(torch.accelerator.device_count())]
    return here


def _dtype(dtype: str | torch.dtype | None, config: Any) -> torch.dtype:
    if dtype is None:
        return getattr(config, "dtype", None) or torch.float32
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if found not in _DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; give {', '.join(str(each)[6:] for each in _DTYPES)}.")
    return found


def _check_kinds(config: Any, kinds: tuple[LayerKind, ...]) -> None:
    others = sorted({str(kind) for kind in kinds} - {str(kind) for kind in _HELD})
    if others:
        raise SupportError(
            f"{config.model_type} has layers of {', '.join(others)}, which the reference runner has no kernels for; "
            f"it has {', '.join(sorted(map(str, _HELD)))}. Use another model."
        )
    if len(kinds) != config.get_text_config().num_hidden_layers:
        raise SupportError(
            f"{config.model_type} has {len(kinds)} attentions in {config.get_text_config().num_hidden_layers} layers; "
            "the reference runner takes one a layer."
        )


def _kv_size(config: Any, num_blocks: int, block_size: int, max_model_len: int | None, max_num_reqs: int) -> KvSize:
    num_blocks, block_size = _count("num_blocks", num_blocks), _count("block_size", block_size)
    max_num_reqs = _count("max_num_reqs", max_num_reqs)
    longest, why = longest_request(config)
    slots = num_blocks * block_size
    if slots > LARGEST_COUNT:
        raise ConfigError(
            f"num_blocks is {num_blocks}; blocks of {block_size} may hold {LARGEST_COUNT} tokens together."
        )
    length = min(slots, longest or slots) if max_model_len is None else _count("max_model_len", max_model_len)
    if longest is not None and length > longest:
        raise ConfigError(f"max_model_len is {length}; {why}, so give 1 to {longest}.")
    size = KvSize(num_blocks, block_size, length, max_num_reqs)
    if size.max_blocks > num_blocks:
        raise ConfigError(
            f"the KV is too small for one request: {num_blocks} blocks of {block_size} hold {slots} tokens and "
            f"max_model_len is {length}. Give num_blocks of at least {size.max_blocks}, or max_model_len of at most "
            f"{slots}."
        )
    return size


def _count(name: str, value: Any) -> int:
    count = plain_int(value)
    if type(count) is not int or count < 1:
        raise ConfigError(f"{name} is {value!r:.80}; it must be a whole number of at least 1.")
    return count


def _eager_only(name: str, reads: list[str]) -> AttentionSupport:
    return AttentionSupport.of(
        Claims(piecewise=False),
        backend=name,
        source="kpolicy/serving/trial.py",
        note=f"its forward reads the host ({', '.join(reads)}), so no graph can hold it",
    )
