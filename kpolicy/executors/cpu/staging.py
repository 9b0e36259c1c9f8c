"""Static buffers on the CPU: tensors over host memory that numbers are packed into."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from struct import calcsize
from typing import Any

import torch

from kpolicy.errors import ConfigError, UnknownNameError
from kpolicy.executors.packing import FORMATS, PackedRows

__all__ = ["check_buffer", "new_buffer", "stage_tensor", "stage_tensor_or_numbers"]

_ROWS = "_kpolicy_rows"


def check_buffer(shape: Sequence[int], dtype: str) -> None:
    """Raise for a static buffer that can't be: UnknownNameError for its dtype, ConfigError for its shape."""
    if dtype not in FORMATS:
        raise UnknownNameError("dtype of a static buffer", dtype, FORMATS)
    if not shape or min(shape) < 0:
        raise ConfigError(f"a static buffer has shape {list(shape)}; give one dimension or more, none negative.")


def new_buffer(shape: Sequence[int], dtype: str, fill: float) -> Any:
    """A tensor whose memory never moves.

    Raises:
        UnknownNameError: `dtype` isn't int64, int32 or float32.
        ConfigError: a dimension is negative, or there is none.
    """
    check_buffer(shape, dtype)
    count = math.prod(shape)
    # A mapping of its own: aligned to a page, and its memory goes back to the host with the tensor.
    memory = mmap.mmap(-1, max(count, 1) * calcsize(FORMATS[dtype]))
    with torch.inference_mode(False):
        buffer = torch.frombuffer(memory, dtype=getattr(torch, dtype))[:count].view(*shape)
    rows = PackedRows(memory, dtype, shape[0], math.prod(shape[1:]))
    rows.fill(fill, 0, count)
    setattr(buffer, _ROWS, rows)
    return buffer


def stage_tensor_or_numbers(buffer: Any, values: Any, size: int, fill: float) -> None:
    """Copy values to the front of a buffer and fill it up to `size` rows. See `DeviceAdapter.stage`.

    Raises:
        ConfigError: the buffer isn't a static one, there are more values than `size` or than the buffer has, a row is
            too long, or a value doesn't fit the dtype.
    """
    rows: PackedRows | None = getattr(buffer, _ROWS, None)
    if rows is None:
        raise ConfigError("stage was given a tensor that alloc_static didn't make; only those have a fixed place.")
    if hasattr(values, "__array_interface__"):
        values = torch.as_tensor(values)
    if not isinstance(values, torch.Tensor):
        rows.put(values, size, fill, flat=buffer.dim() == 1)
        return
    stage_tensor(buffer, rows, values, size, fill)


def stage_tensor(buffer: Any, rows: PackedRows, values: Any, size: int, fill: float) -> None:
    """Copy a tensor of the host to the front of a buffer whose memory `rows` is, and fill it up to `size` rows.

    Raises:
        ConfigError: it has more rows than `size` or than the buffer, wider ones, or other dimensions.
    """
    count = len(values)
    rows.check_sizes(count, size)
    _copy_rows(buffer, rows, values, fill)
    if size > count:
        rows.fill(fill, count * rows.width, size * rows.width)


def _copy_rows(buffer: Any, rows: PackedRows, values: Any, fill: float) -> None:
    count = len(values)
    if values.dim() != buffer.dim() or (values.dim() > 1 and values.shape[1] > buffer.shape[1]):
        raise ConfigError(f"a tensor of {list(values.shape)} can't be staged into a buffer of {list(buffer.shape)}.")
    if values.dim() == 1 or values.shape[1] == buffer.shape[1]:
        buffer[:count].copy_(values)
        return
    rows.fill(fill, 0, count * rows.width)
    buffer[:count, : values.shape[1]].copy_(values)
