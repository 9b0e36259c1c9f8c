"""Reading a Hugging Face model config: from a path, a mapping or an object, and its fields with checks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from kpolicy.errors import SupportError
from kpolicy.reading import read_whole

__all__ = ["LAYER_COUNTS", "Fields", "identity", "identity_differs", "read_config"]

_NESTED = ("text_config", "language_config", "llm_config", "thinker_config")
"""Where multimodal configs keep their language model."""
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
"""Where configs say how many layers there are"""
_SIZES = (("hidden_size", "n_embd", "d_model"), ("num_hidden_layers", "n_layer"), ("vocab_size",))
"""What a model's size shows in, by its usual name and others"""


def read_config(config: object) -> Mapping[str, Any]:
    """The config as a mapping.

    Args:
        config: a mapping, an object with `to_dict()`, a path to a ``config.json`` or to a directory holding one.

    Raises:
        SupportError: there is no such file, it isn't JSON, or what was given isn't a config.
    """
    if isinstance(config, Mapping):
        return config
    if isinstance(config, (str, PathLike)):
        return _read_file(Path(config))
    to_dict = getattr(config, "to_dict", None)
    values = to_dict() if callable(to_dict) else None
    if isinstance(values, Mapping):
        return values
    raise SupportError(
        f"a model config is a mapping, an object with to_dict() or a path to config.json, not {type(config).__name__}."
    )


def _read_file(path: Path) -> Mapping[str, Any]:
    found = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(read_whole(found).decode())
    except FileNotFoundError:
        raise SupportError(
            f"there is no model config at {found}. Give config.json, or the directory that holds it."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise SupportError(f"the model config {found} can't be read: {error}.") from error
    except json.JSONDecodeError as error:
        raise SupportError(
            f"the model config {found} isn't JSON: {error.msg} in line {error.lineno}. Is the download complete?"
        ) from None
    if not isinstance(values, dict):
        raise SupportError(f"the model config {found} holds {type(values).__name__}, not an object of settings.")
    return values


class Fields:
    """A language model's config, by field name; a multimodal config is read through to its language model.

    Args:
        values: the config.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        architectures = values.get("architectures") or ()
        if not isinstance(architectures, (list, tuple)) or not all(isinstance(each, str) for each in architectures):
            raise SupportError(f"architectures is {architectures!r:.80}; it is a list of class names.")
        model_type = values.get("model_type")
        nested = next((values[name] for name in _NESTED if isinstance(values.get(name), Mapping)), None)
        if nested is not None:
            inner = Fields(nested)
            self.values: Mapping[str, Any] = inner.values
            self.model_type: str = inner.model_type or str(model_type or "")
            self.architectures: tuple[str, ...] = inner.architectures or tuple(architectures)
            return
        self.values = values
        self.model_type = str(model_type or "")
        self.architectures = tuple(architectures)

    @property
    def name(self) -> str:
        """What errors call the model."""
        return self.model_type or ", ".join(self.architectures) or "this model"

    def get(self, *names: str) -> Any:
        """The first of these fields that is there and isn't null; None without one."""
        for name in names:
            value = self.values.get(name)
            if value is not None:
                return value
        return None

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def count(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """A whole number of at least `least`.

        Raises:
            SupportError: it is missing without a default, or isn't such a number.
        """
        value = self.get(*names)
        if value is None:
            if default is None:
                raise SupportError(f"the config of {self.name} has no {' or '.join(names)}; add it.")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            name = next(each for each in names if self.has(each))
            raise SupportError(f"{name} of {self.name} is {value!r}; it must be a whole number of at least {least}.")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name)
        return default if value is None else bool(value)

    def section(self, name: str) -> Fields:
        """A nested mapping as fields; empty where it is missing.

        Raises:
            SupportError: it is something else than a mapping.
        """
        value = self.values.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise SupportError(f"{name} of {self.name} is {value!r}; it must be an object of settings.")
        return Fields({"model_type": f"{self.name} {name}", **(value or {})})

    @property
    def num_layers(self) -> int:
        return self.count(*LAYER_COUNTS)

    def per_layer(self, name: str, num_layers: int | None = None) -> list[Any] | None:
        """A list with an entry a layer; None where the field is missing.

        Raises:
            SupportError: it isn't a list, or not as long as the model is deep.
        """
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, str) or not isinstance(value, (list, tuple)):
            raise SupportError(f"{name} of {self.name} is {value!r}; it must be a list with an entry a layer.")
        layers = self.num_layers if num_layers is None else num_layers
        if len(value) != layers:
            raise SupportError(
                f"{name} of {self.name} has {len(value)} entries for {layers} layers. One of the two is wrong."
            )
        return list(value)

    def indices(self, name: str, *, base: int = 0, default: tuple[int, ...] = ()) -> frozenset[int]:
        """A list of layer numbers, counted from `base`, as indices from 0.

        Raises:
            SupportError: it isn't a list of numbers of layers.
        """
        value = self.get(name)
        if value is None:
            return frozenset(default)
        layers = self.num_layers
        if isinstance(value, (list, tuple)) and all(
            isinstance(each, int) and not isinstance(each, bool) and base <= each < layers + base for each in value
        ):
            return frozenset(each - base for each in value)
        raise SupportError(
            f"{name} of {self.name} is {value!r}; it must list layers from {base} to {layers + base - 1}."
        )


def identity(config: object) -> dict[str, Any]:
    """What tells a model from others, for files that are made for one: its type and its main sizes, those that it says.

    Args:
        config: as of `read_config`.
    """
    fields = Fields(read_config(config))
    found = {"model_type": fields.model_type or None, **{names[0]: fields.get(*names) for names in _SIZES}}
    return {name: value for name, value in found.items() if value is not None}


def identity_differs(noted: Mapping[str, Any], config: object) -> str:
    """How a model differs from the one that a file notes, by what both say; empty where it doesn't.

    A type may be a longer one of the same name: a multimodal model's own is its language model's where that says none.

    Args:
        noted: what `identity` said of the file's model.
        config: the other's, as of `read_config`.
    """
    here = identity(config)
    pairs = {name: (value, here[name]) for name, value in noted.items() if name in here}
    theirs, ours = map(str, pairs.get("model_type", ("", "")))
    if theirs.startswith(ours) or ours.startswith(theirs):
        pairs.pop("model_type", None)
    return ", ".join(f"{name} {theirs} and not {ours}" for name, (theirs, ours) in pairs.items() if theirs != ours)
