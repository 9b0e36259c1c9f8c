"""Bits that a checkpoint keeps each weight in, by its config's ``quantization_config``: `read_scheme`.

Known are ``fp8``, ``awq``, ``gptq``, ``mxfp4``, ``compressed-tensors`` and ``modelopt``, by the fields that the classes
of transformers write (`transformers.utils.quantization_config`), and mxfp4's 4 bits with one exponent of 8 for 32
weights by the OCP microscaling specification. A scale counts with the weights that share it. Which modules stay in 16
bits is told by their names: a layer's attention, MLP, shared experts and experts, and the LM head, each as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from kpolicy.attention.fields import Fields
from kpolicy.errors import SupportError

__all__ = ["PLAIN", "Scheme", "read_scheme"]

PLAIN_BITS = 16.0
_SCALE_BITS = 16
_BLOCK_SCALE_BITS = 32
_EVERY = "Linear"
"""The target that is every matrix"""
_EXPERTS = ("experts",)
_MX_BITS = 4 + 8 / 32


@attrs.frozen
class Scheme:
    """How weights are kept.

    Args:
        name: what to call it; empty for 16 bits throughout.
        groups: (bits a weight, which modules), the first that fits counts.
        kept: modules that stay in 16 bits.
        notes: what the reader should know of costs made by it.
    """

    name: str = ""
    groups: tuple[tuple[float, tuple[str, ...]], ...] = ()
    kept: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def bits(self, modules: Sequence[str]) -> float:
        """Bits of each weight of a part of the model.

        Args:
            modules: what its modules are called, in one class or another; none for what no scheme quantizes.
        """
        if not any(_names(kept, module) for kept in self.kept for module in modules):
            for bits, targets in self.groups:
                if any(target == _EVERY or _names(target, each) for target in targets for each in modules):
                    return bits
        return PLAIN_BITS


PLAIN = Scheme()


def _names(pattern: str, module: str) -> bool:
    """Whether a pattern is of a module or of what it is in: whole parts of its name, with ``*``, or ``re:``."""
    if pattern.startswith("re:"):
        return any(re.match(pattern[3:], name) for name in (module, f"model.{module}"))
    # What stands before the layers is called differently by each class.
    start = pattern.find("layers.")
    parts = re.escape(pattern[max(start, 0) :]).replace(r"\*", ".*")
    return re.search(rf"(^|\.){parts}(\.|$)", module) is not None


def read_scheme(values: Mapping[str, Any], fields: Fields) -> Scheme:
    """The scheme of a model's config.

    Args:
        values: the whole config: a multimodal one's scheme stands beside its language model.
        fields: the language model's fields.

    Raises:
        SupportError: the scheme is known, and a field of it can't be used.
    """
    given = next(
        (found for each in (values, fields.values) if (found := each.get("quantization_config")) is not None), None
    )
    if given is None:
        return PLAIN
    section = Fields({"quantization_config": given, "model_type": fields.name}).section("quantization_config")
    said = section.get("quant_method") or "a scheme without a name"
    method = str(getattr(said, "value", said))  # a config object has an enum
    read = _KNOWN.get(method)
    if read is None:
        return _unknown(method)
    try:
        scheme = read(section)
    except re.error as error:
        raise SupportError(f"quantization_config of {fields.name} has a pattern that can't be read: {error}.") from None
    return attrs.evolve(scheme, notes=(*scheme.notes, *_not_counted(section)))


def _unknown(what: str) -> Scheme:
    return Scheme(
        f"{what} counted as 16 bits",
        notes=(
            f"how many bits {what} keeps a weight in isn't known here: each counts as 16, so that reading weights is "
            "costed too long",
        ),
    )


def _not_counted(section: Fields) -> list[str]:
    notes = []
    if section.get("kv_cache_scheme", "kv_cache_quant_algo") is not None:
        notes.append("KV counts as 16 bits a number, though the config has a scheme for it")
    if section.get("sparsity_config") or section.get("dynamic"):
        notes.append("sparsity and settings of single modules aren't counted")
    return notes


def _kept(section: Fields, *more: str) -> tuple[str, ...]:
    """Patterns of modules that stay as they are."""
    given = section.get("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
    return (*_patterns(given, f"the modules that {section.name} leaves alone"), *more)


def _patterns(given: Any, what: str) -> tuple[str, ...]:
    listed = [] if given is None else given
    if not isinstance(listed, (list, tuple)) or not all(isinstance(each, str) for each in listed):
        raise SupportError(f"{what} are {given!r:.80}; they are a list of names.")
    for each in listed:
        if each.startswith("re:"):
            re.compile(each[3:])
    return tuple(listed)


def _width(section: Fields, *names: str) -> int:
    """Bits of a weight without its scale."""
    bits = section.count(*names)
    if bits > PLAIN_BITS:
        raise SupportError(f"{names[0]} of {section.name} is {bits}; quantized weights have at most {PLAIN_BITS:g}.")
    return bits


def _fp8(section: Fields) -> Scheme:
    block = section.get("weight_block_size")
    shared = 0
    if block is not None:
        if not _is_block(block):
            raise SupportError(f"weight_block_size of {section.name} is {block!r:.80}; it is two whole numbers.")
        shared = block[0] * block[1]
    every, kept = (8 + (_BLOCK_SCALE_BITS / shared if shared else 0.0), (_EVERY,)), _kept(section, "lm_head")
    experts = section.get("expert_dtype")
    if experts in (None, "fp8"):
        return Scheme("fp8", (every,), kept)
    if experts != "fp4":
        return _unknown(f"fp8 with experts of {experts}")
    scale = 8 if section.get("scale_fmt") == "ue8m0" else _BLOCK_SCALE_BITS
    return Scheme("fp8, experts fp4", ((4 + scale / 32, _EXPERTS), every), kept)


def _grouped(bits: int, group: int, scale: int, *, zero_points: bool) -> float:
    """Bits a weight where so many share a scale and a zero point; a group below 1 is a whole column or more."""
    return bits + ((scale + bits * zero_points) / group if group > 0 else 0.0)


def _integers(method: str) -> Callable[[Fields], Scheme]:
    def read(section: Fields) -> Scheme:
        bits, group = _width(section, "bits", "w_bit"), section.get("group_size", "q_group_size")
        if group is not None and (type(group) is not int or group < -1):
            raise SupportError(f"group_size of {section.name} is {group!r:.80}; it is a whole number, -1 for a column.")
        zero_points = section.flag("zero_point", True)
        each = _grouped(bits, 128 if group is None else group, _SCALE_BITS, zero_points=zero_points)
        head = () if section.flag("lm_head", False) else ("lm_head",)
        return Scheme(f"{method}, {bits} bits", ((each, (_EVERY,)),), _kept(section, *head))

    return read


def _mxfp4(section: Fields) -> Scheme:
    return Scheme("mxfp4", ((_MX_BITS, _EXPERTS),), _kept(section))


def _by_groups(method: str) -> Callable[[Fields], Scheme]:
    def read(section: Fields) -> Scheme:
        groups = section.get("config_groups")
        if not isinstance(groups, Mapping) or not groups:
            return _unknown(f"{method} without config_groups")
        found: list[tuple[float, tuple[str, ...]]] = []
        widths: set[int] = set()
        for name, group in groups.items():
            if not isinstance(group, Mapping):
                return _unknown(f"{method} by a preset")
            weights = Fields({**group, "model_type": f"{section.name} {name}"}).section("weights")
            targets = _patterns(group.get("targets"), f"targets of {name} of {section.name}")
            # A group without weights is of activations alone.
            if group.get("weights") is not None:
                found.append((_of_weights(weights), targets))
                widths.add(weights.count("num_bits"))
        if not found:
            return PLAIN
        return Scheme(f"{method}, {' and '.join(map(str, sorted(widths)))} bits", tuple(found), _kept(section))

    return read


def _is_block(block: Any) -> bool:
    return (
        isinstance(block, (list, tuple)) and len(block) == 2 and all(type(each) is int and each > 0 for each in block)
    )


def _of_weights(weights: Fields) -> float:
    """Bits a weight by one group's settings."""
    bits, group = _width(weights, "num_bits"), weights.count("group_size", default=0, least=-1)
    block = weights.get("block_structure")
    if _is_block(block):
        group = block[0] * block[1]
    # One exponent or fp8 number for a few floats of 4 bits, of which modelopt says no more; else 16 bits.
    small = weights.get("strategy") == "tensor_group" or (bits == 4 and weights.get("type") == "float")
    small = small or "float8" in str(weights.get("scale_dtype"))
    return _grouped(bits, group, 8 if small else _SCALE_BITS, zero_points=not weights.flag("symmetric", True))


_KNOWN: Mapping[str, Callable[[Fields], Scheme]] = {
    "fp8": _fp8,
    "awq": _integers("awq"),
    "gptq": _integers("gptq"),
    "mxfp4": _mxfp4,
    "compressed-tensors": _by_groups("compressed-tensors"),
    "modelopt": _by_groups("modelopt"),
}
