"""Attention support of a model from its Hugging Face config: the meet over its layers, with who limits what.

Nothing is guessed. A `model_type` is known, registered by the caller, or an error that says how to declare it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kpolicy.attention.families import FAMILIES
from kpolicy.attention.fields import LAYER_COUNTS, Fields, read_config
from kpolicy.attention.layers import Layers
from kpolicy.attention.support import AttentionSupport, LayerKind, reference_support
from kpolicy.errors import ConfigError, PluginError, SupportError, UnknownArchitectureError, UnknownNameError

__all__ = ["architectures", "from_hf_config", "layer_kinds", "register_architecture"]

LayerKinds = Callable[[Mapping[str, Any]], Iterable["LayerKind | str | Iterable[LayerKind | str]"]]

_registered: dict[str, LayerKinds] = {}


def register_architecture(model_type: str, layer_kinds: LayerKinds) -> None:
    """Declare what the layers of a model compute.

    Args:
        model_type: the config's `model_type`.
        layer_kinds: from the language model's config, as a mapping, to a layer kind for each layer, first to last. A
            layer that runs two gives both, as a tuple, and one of MLP or experts alone an empty one.

    Raises:
        PluginError: the `model_type` is known or registered already.
        ConfigError: it is empty, or `layer_kinds` isn't a function.
    """
    if not isinstance(model_type, str) or not model_type or not callable(layer_kinds):
        raise ConfigError(
            f"an architecture was registered as {model_type!r} with {layer_kinds!r}; give the config's model_type and "
            "a function from the config to a kind for each layer."
        )
    if model_type in FAMILIES or model_type in _registered:
        owner = "part of kpolicy" if model_type in FAMILIES else "registered already"
        raise PluginError(f"the architecture {model_type!r} is {owner}; register another model_type.")
    _registered[model_type] = layer_kinds


def architectures() -> tuple[str, ...]:
    """Every `model_type` that can be read, sorted."""
    return tuple(sorted({*FAMILIES, *_registered}))


def layer_kinds(config: object) -> tuple[LayerKind, ...]:
    """What each layer's attention computes, first to last.

    A layer that runs two, for example a recurrence beside attention, gives both; one of MLP or experts alone none.

    Args:
        config: a mapping, an object with `to_dict()`, a path to a ``config.json`` or to a directory holding one. A
            multimodal config is read through to its language model.

    Raises:
        SupportError: the config can't be read or contradicts itself.
        UnknownArchitectureError: nobody declared the architecture.
    """
    return tuple(kind for layer in layers_of(Fields(read_config(config))) for kind in layer)


def from_hf_config(
    config: object, *, backends: Mapping[LayerKind, str] | Mapping[str, str] | None = None
) -> AttentionSupport:
    """What attention of this model lets be captured: the meet over its layers, an origin for each layer kind.

    Args:
        config: as for `layer_kinds`.
        backends: the backend that runs a layer kind, by its name in the tables, for example
            ``{"gqa": "vllm-0.33/FLASH_ATTN[fa3]"}``. Kinds left out have kpolicy's reference backends; kinds that the
            model hasn't are ignored, so one mapping serves many models.

    Raises:
        SupportError: the config can't be read or contradicts itself, or a backend doesn't run the kind.
        UnknownArchitectureError: nobody declared the architecture.
        UnknownNameError: `backends` names a kind or backend that doesn't exist.
    """
    chosen = {_kind(kind): name for kind, name in (backends or {}).items()}
    kinds = dict.fromkeys(layer_kinds(config))
    if not kinds:
        raise SupportError("no layer of this model has attention or a recurrence, so it has no support to state.")
    return AttentionSupport.meet_all(_support(kind, chosen.get(kind)) for kind in kinds)


def layers_of(fields: Fields) -> Layers:
    """The kinds in each layer, an entry a layer."""
    model_type = _known_type(fields)
    return FAMILIES[model_type](fields) if model_type in FAMILIES else _declared(model_type, fields)


def _declared(model_type: str, fields: Fields) -> Layers:
    """The layers of an architecture that was registered.

    Raises:
        SupportError: its function fails, or gives another number of layers than the config has.
        UnknownNameError: it gives a kind that doesn't exist.
    """
    name = f"the function registered for {model_type!r}"
    try:
        given = _registered[model_type](fields.values)
        entries: list[Any] = [given] if isinstance(given, str) else list(given)
    # Whatever a function of the caller's raises.
    except Exception as error:
        raise SupportError(f"{name} fails with this config: {type(error).__name__}: {error}.") from error
    both: tuple[type[Any], ...] = (list, tuple, set, frozenset)
    layers = tuple(tuple(map(_kind, each)) if isinstance(each, both) else (_kind(each),) for each in entries)
    # A layer left out would be taken to limit nothing.
    count = fields.num_layers if any(map(fields.has, LAYER_COUNTS)) else len(layers)
    if len(layers) != count:
        raise SupportError(
            f"{name} gives {len(layers)} layers and the config has {count}. Give a kind for each; an empty tuple for a "
            "layer without attention, a tuple of both for one that runs two."
        )
    return layers


def _support(kind: LayerKind, backend: str | None) -> AttentionSupport:
    if backend is None:
        return reference_support(kind)
    from kpolicy.attention.backends import backend_support

    return backend_support(backend, kind)


def _kind(kind: LayerKind | str) -> LayerKind:
    try:
        return LayerKind(kind)
    except ValueError:
        raise UnknownNameError("layer kind", kind, (known.value for known in LayerKind)) from None


def _known_type(fields: Fields) -> str:
    known = {*FAMILIES, *_registered}
    if fields.model_type in known:
        return fields.model_type
    if not fields.model_type:
        # Old configs name classes only; LlamaForCausalLM is model_type llama.
        folded = {name.replace("_", "").lower(): name for name in sorted(known)}
        for architecture in fields.architectures:
            stem = architecture.partition("For")[0].partition("LMHead")[0].removesuffix("Model").lower()
            if stem in folded:
                return folded[stem]
    raise _unknown(fields, known)


def _unknown(fields: Fields, known: set[str]) -> UnknownArchitectureError:
    classes = f" (architectures {', '.join(fields.architectures)})" if fields.architectures else ""
    near = difflib.get_close_matches(fields.model_type.lower(), sorted(known), n=1, cutoff=0.6)
    guess = f" Did you mean {near[0]!r}?" if near else ""
    kinds = ", ".join(kind.value for kind in LayerKind)
    return UnknownArchitectureError(
        f"kpolicy doesn't know what attention of model_type {fields.model_type!r}{classes} computes.{guess} Declare "
        f'it: give attention as layer kinds joined with +, for example "gdn+gqa" (kinds: {kinds}); or call '
        f"kpolicy.attention.hf.register_architecture({fields.model_type!r}, layer_kinds) with a function from the "
        f"config to a kind for each layer."
    )
