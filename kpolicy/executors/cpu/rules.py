"""What can't be recorded: host reads, shapes that depend on data, random operators; and where the model did it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kpolicy.errors import CaptureError
from kpolicy.reasons import Reason

__all__ = [
    "STALE",
    "is_metadata",
    "model_line",
    "reads_on_host",
    "refused",
    "stays_whole",
    "why_not",
    "why_not_function",
    "why_not_memory",
]

_OUTSIDE = (
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
    os.path.dirname(os.path.abspath(__file__)) + os.sep,
    "<",
)
"""Files that are never model code: torch, this package, and code made from text."""


def model_line() -> str:
    """``file:line`` of the innermost model code on this thread's stack."""
    frame = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_OUTSIDE):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "unknown line"


def refused(operator: object, why: str, line: str | None = None) -> CaptureError:
    """The one error of the recorder: the operator, the line of model code, why, and the next step."""
    return CaptureError(
        Reason.CAPTURE_ILLEGAL,
        f"{operator} at {line or model_line()} can't be recorded: {why} Take it out of the captured part, or mark the "
        "call so that it runs eagerly.",
    )


HOST_READ = "it reads a tensor's value on the host, and a replay would go on with the value of the recording."
DYNAMIC = "the shape of its result depends on tensor values, and a replay has the shapes of the recording."
RANDOM = "it draws random numbers, which eager and replay would draw differently."
MOVES = "it changes the memory under a tensor, and a replay has the addresses of the recording."
ADDRESS = "work that is done on an address isn't seen, so a replay would leave it out."

STALE = (
    "it reads memory from before the recording that nobody holds any more, so a replay would read freed or stale "
    "values. Compute it inside the captured part, or keep it in a static buffer."
)

_READS_OF_METHODS: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__complex__", "__array__",
            "__contains__", "__format__", "__repr__", "__reduce_ex__", "__deepcopy__",
        ),
        HOST_READ,
    ),
    "data_ptr": ADDRESS,
    "__dlpack__": ADDRESS,
}  # fmt: skip

_METADATA = {
    "_fused_sdp_choice", "_has_compatible_shallow_copy_type", "_has_same_storage_numel", "_is_zerotensor", "_version",
    "can_cast", "dim", "is_coalesced", "is_complex", "is_conj", "is_contiguous", "is_distributed",
    "is_floating_point", "is_inference", "is_leaf", "is_neg", "is_pinned", "is_same_size", "is_set_to", "is_signed",
    "numel", "output_nr", "promote_types", "qscheme", "result_type", "size", "storage_offset", "stride",
    "sym_is_contiguous", "sym_numel", "sym_size", "sym_storage_offset", "sym_stride", "_use_cudnn_ctc_loss",
    "_assert_tensor_metadata",
}  # fmt: skip
"""Operators of torch that answer from shapes, types and flags, never from values."""

_READS_QUIETLY = {"tensor_split.tensor_indices_or_sections", "_pack_padded_sequence", "_pack_padded_sequence.default"}
"""Operators of torch that read a tensor's memory on the host without a tag or another operator to say so."""

_MOVES = {"set_", "set", "resize_", "resize_as_", "_resize_output_"}


def is_metadata(func: Any) -> bool:
    """Whether an operator answers from shapes, types and flags alone, so that its answer holds at every replay."""
    return func.namespace in ("aten", "prim") and func._schema.name.partition("::")[2] in _METADATA


def why_not_function(func: Any) -> str | None:
    """Why a Python-level function on a tensor can't be recorded, for those that the dispatcher doesn't see."""
    if func == torch.Tensor.data.__set__:
        return MOVES
    name = getattr(func, "__name__", "")
    why = _READS_OF_METHODS.get(name)
    return why if why is not None and getattr(torch.Tensor, name, None) == func else None


def reads_on_host(func: Any) -> bool:
    """Whether an operator's result depends on values that it reads on the host."""
    name = func.name().partition("::")[2]
    return torch.Tag.data_dependent_output in func.tags or (func.namespace == "aten" and name in _READS_QUIETLY)


def stays_whole(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a composite operator isn't taken apart: it reads values for nothing but a check of its arguments."""
    name = func._schema.name
    return bool(name == "aten::one_hot" and _argument("num_classes", func._schema, args, kwargs) != -1)


def why_not(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Why an operator that isn't made of others can't be recorded; None where it can."""
    schema = func._schema
    if reads_on_host(func) or any(not _holds_tensors(each.type) for each in schema.returns):
        return HOST_READ
    name = schema.name.partition("::")[2]
    if func.namespace == "aten" and name in _MOVES:
        return MOVES
    if torch.Tag.nondeterministic_seeded in func.tags and _draws(schema, args, kwargs):
        return RANDOM
    if torch.Tag.dynamic_output_shape in func.tags and _is_dynamic(func, args, kwargs):
        return DYNAMIC
    return None


def why_not_memory(tensors: Sequence[Any], *, results: bool = False) -> str | None:
    """Why tensors can't be arguments of a recorded operator, or its results: they have no fixed, plain place here."""
    for tensor in tensors:
        if tensor.device.type != "cpu":
            return f"it has a tensor on {tensor.device}, and this recorder is the CPU's."
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return f"it has a tensor of layout {tensor.layout}, and only plain strided ones have fixed memory."
        if not results and (tensor.is_conj() or tensor.is_neg()):
            return "it has a lazily conjugated or negated view; resolve it with resolve_conj() or resolve_neg()."
    return None


def _holds_tensors(kind: Any) -> bool:
    return "Tensor" in str(kind)


def _argument(name: str, schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An argument's value by name; its default where it wasn't given, None where there is none."""
    for place, each in enumerate(schema.arguments):
        if each.name == name:
            default = each.default_value if each.has_default_value() else None
            return args[place] if place < len(args) else kwargs.get(name, default)
    return None


def _draws(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Attention kernels carry the tag for the dropout that they offer; without it they draw nothing."""
    names = {each.name for each in schema.arguments}
    if "dropout_p" in names:
        return bool(_argument("dropout_p", schema, args, kwargs) != 0)
    if "train" in names:
        return _argument("train", schema, args, kwargs) is not False
    return True


def _is_dynamic(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Indexing is dynamic by masks only, and `repeat_interleave` only where the size of its result isn't given."""
    name = func._schema.name.partition("::")[2]
    if name in ("index", "_unsafe_index"):
        indices = _argument("indices", func._schema, args, kwargs)
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)
    if name == "one_hot":
        return bool(_argument("num_classes", func._schema, args, kwargs) == -1)
    if name == "repeat_interleave":
        return _argument("output_size", func._schema, args, kwargs) is None
    return True
