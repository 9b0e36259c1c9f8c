"""A model folder: its config, whether its weights are all there, and whether they are this model's."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kpolicy.attention.fields import Fields
from kpolicy.attention.hf import layer_kinds
from kpolicy.errors import CheckpointError, ConfigError, SupportError, UnknownArchitectureError

__all__ = ["check_keys", "has_weights", "load_tokenizer", "longest_request", "read_config", "read_weights"]

_INDEX = "model.safetensors.index.json"
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "spiece.model",
    "tekken.json",
)  # fmt: skip
_MOST_NAMED = 4
_SIZES = (
    ("vocab_size",), ("hidden_size", "n_embd", "d_model"), ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    ("num_attention_heads", "n_head", "num_heads", "n_heads"),
)  # fmt: skip
"""Sizes that a config without weights should say, by transformers' name and others"""


def read_config(source: Any) -> tuple[Any, Path | None]:
    """(config object of transformers, folder if there is one) of what `load` was given.

    Raises:
        CheckpointError: the folder or its config.json isn't there or can't be read.
        UnknownArchitectureError: transformers doesn't know the model type, or nobody declared the architecture.
        SupportError: the config contradicts itself.
        ConfigError: it makes no config, or says none of its main sizes without weights that tell them.
    """
    from transformers import PretrainedConfig

    if isinstance(source, PretrainedConfig):
        return copy.deepcopy(source), None  # classes write to their config
    if isinstance(source, Mapping):
        return _config_of(dict(source), "the config given", weights=False), None
    if not isinstance(source, (str, Path)):
        raise ConfigError(
            f"a model can't be loaded from {type(source).__name__}; give a folder with config.json, a config as a "
            "mapping, or a config object of transformers."
        )
    folder = Path(source)
    if not folder.is_dir():
        raise CheckpointError(f"model folder {folder} isn't there; give a folder with config.json.")
    file = folder / "config.json"
    if not file.is_file():
        raise CheckpointError(f"model folder {folder} has no config.json; it needs one, weights are optional.")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} can't be read as JSON: {error}. Copy it from the model again.") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{file} holds {type(values).__name__}, not the fields of a config.")
    return _config_of(values, str(file), weights=has_weights(folder)), folder


def _config_of(values: dict[str, Any], where: str, *, weights: bool) -> Any:
    """The config object of these fields; `weights` is whether there are any that its sizes are held to."""
    from transformers import CONFIG_MAPPING

    given = values.copy()
    model_type = values.pop("model_type", None)
    if model_type is None:
        raise ConfigError(f"{where} has no model_type; add the one of its architecture, for example llama.")
    if model_type not in CONFIG_MAPPING:
        raise UnknownArchitectureError(
            f"{where} has model_type {model_type!r}, which this transformers doesn't know. Take one of its own, or "
            "install the transformers that the model was made for; remote code isn't run."
        )
    try:
        config = CONFIG_MAPPING[model_type].from_dict(values)
    # Config classes check fields as they please.
    except Exception as error:
        raise ConfigError(f"{where} can't be used as a {model_type} config: {error}") from error
    # One that isn't known has its sizes where nobody looks, and may have no one language model.
    layer_kinds(config)
    try:
        text = config.get_text_config()
    except ValueError as error:
        raise ConfigError(f"{where} can't be used as a {model_type} config: {error}") from error
    for name, *_ in _SIZES:
        size = getattr(text, name, None)
        if isinstance(size, int) and size < 1:
            raise ConfigError(f"{name} of {where} is {size}; it must be at least 1.")
    if not weights:
        _check_sizes(config, text, given, where)
        quantized = getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None)
        if quantized:
            method = quantized.get("quant_method") if isinstance(quantized, Mapping) else None
            warnings.warn(
                f"{where} is of quantized weights ({method or 'quantization_config'}), and random weights are not: "
                "steps take other times and memory than the model's own.",
                UserWarning,
                stacklevel=1,
            )
    return config


def longest_request(config: Any) -> tuple[int | None, str]:
    """Tokens of the longest request that a model runs as its class does alone, None without an end, and what ends it.

    LongRoPE's frequencies go with the longest request of a step: a shorter one beside it would get others than alone,
    and another result. So a request ends where they first change.

    Raises:
        ConfigError: the config says less than one.
    """
    text = config.get_text_config()
    positions: int | None = getattr(text, "max_position_embeddings", None)
    if positions is not None and positions < 1:
        raise ConfigError(f"max_position_embeddings of {config.model_type} is {positions}; it must be at least 1.")
    given: Mapping[str, Any] = getattr(text, "rope_parameters", None) or {}
    # Where layers differ there is one of each kind.
    ropes = [given, *(each for each in given.values() if isinstance(each, Mapping))]
    shorter = [rope["original_max_position_embeddings"] for rope in ropes if rope.get("rope_type") == "longrope"]
    if shorter and (positions is None or min(shorter) < positions):
        return min(shorter), (
            f"{config.model_type} has longrope, whose frequencies change for all of a step where one request is longer "
            f"than {min(shorter)} tokens"
        )
    return positions, f"{config.model_type} has {positions} positions"


def _check_sizes(config: Any, text: Any, values: Mapping[str, Any], where: str) -> None:
    """Tell of sizes that a config leaves to transformers, which has those of some model; refuse one of these alone.

    Args:
        config: transformers' config object.
        text: its language model's.
        values: the fields that it was made of.
        where: what messages call it.

    Raises:
        ConfigError: it says none of its main sizes, nor anything of another part, such as a vision model.
    """
    said = Fields(values)
    unsaid = {
        names[0]: getattr(text, names[0], None)
        for names in _SIZES
        if said.get(*names, getattr(text, "attribute_map", {}).get(names[0], names[0])) is None
        # A property is made of what is said, such as a pattern of layers.
        and not isinstance(getattr(type(text), names[0], None), property)
    }
    taken = ", ".join(f"{name} ({value})" for name, value in unsaid.items() if value is not None)
    others = [name for name in config.sub_configs if getattr(config, name, None) is not text and values.get(name)]
    if len(unsaid) == len(_SIZES) and not others:
        raise ConfigError(
            f"{where} says none of its main sizes, so it is {text.model_type}'s family and no model: transformers' "
            f"defaults would be {taken}. Add what the model has."
        )
    if taken:
        warnings.warn(
            f"{where} doesn't say {taken}: in brackets is transformers' default for {text.model_type}, which is taken. "
            "Add what the model has where that is something else.",
            UserWarning,
            stacklevel=1,
        )


def has_weights(folder: Path) -> bool:
    """Whether the folder has safetensors weights, complete or not."""
    if (folder / _INDEX).is_file() or any(folder.glob("*.safetensors")):
        return True
    other = sorted(each.name for each in folder.glob("*.bin"))
    if other:
        raise CheckpointError(
            f"model folder {folder} has weights only as {other[0]}; kpolicy reads *.safetensors. Convert them, or "
            "remove them to run random weights."
        )
    return False


def read_weights(folder: Path, config: Any, **options: Any) -> Any:
    """The causal LM of transformers with the folder's weights.

    Raises:
        CheckpointError: files are missing or cut short, or the weights are another model's.
        SupportError: transformers has no causal LM of that architecture, or its attention can't be marked.
    """
    from transformers import AutoModelForCausalLM

    _check_files(folder)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            str(folder), config=config, local_files_only=True, output_loading_info=True, **options
        )
    except ValueError as error:
        raise SupportError(f"{folder}: attention of {config.model_type} can't be marked: {error}") from error
    # safetensors raises its own error for a file cut short, transformers a RuntimeError for shapes.
    except Exception as error:
        raise CheckpointError(f"the weights of {folder} can't be loaded as {config.model_type}: {error}") from error
    check_keys(folder, config.model_type, info)
    return model


def _check_files(folder: Path) -> None:
    index = folder / _INDEX
    if not index.is_file():
        return
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} isn't an index of weights: {error!r}. Copy it from the model again.") from error
    missing = [name for name in sorted(names) if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{index} names {len(names)} files, of which {len(missing)} aren't there: {_some(missing)}. Copy them "
            "beside it."
        )


def check_keys(folder: Path, model_type: str, info: Mapping[str, Any]) -> None:
    """Hold what was loaded to what the model has.

    Raises:
        CheckpointError: weights are missing, left over or of another shape.
    """
    problems = [
        f"{len(info[field])} {word}: {_some(sorted(_names(info[field])))}"
        for field, word in (
            ("missing_keys", "missing"),
            ("unexpected_keys", "unknown"),
            ("mismatched_keys", "misshapen"),
        )
        if info.get(field)
    ]
    if problems:
        raise CheckpointError(
            f"the weights of {folder} aren't those of its config ({model_type}); {'; '.join(problems)}. Put "
            "config.json and weights of one model together."
        )


def _names(keys: Iterable[Any]) -> list[str]:
    return [key if isinstance(key, str) else str(key[0]) for key in keys]


def _some(names: list[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def load_tokenizer(folder: Path | None, model: str) -> Any:
    """The folder's tokenizer.

    Raises:
        CheckpointError: there is none, or it can't be read.
    """
    from transformers import AutoTokenizer

    if folder is None or not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        where = f"model folder {folder}" if folder is not None else f"{model}, made of a config,"
        raise CheckpointError(
            f"{where} has no tokenizer (looked for {', '.join(_TOKENIZER_FILES)}). Add its files, or give token ids "
            "instead of text."
        )
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # tokenizer libraries raise what they please
        raise CheckpointError(f"the tokenizer of {folder} can't be loaded: {error}") from error
