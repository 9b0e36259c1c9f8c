"""`launch`: a Triton kernel, by the way of its compiled form from the second launch on.

Triton works out anew at each launch which compiled form of a kernel its arguments want, some 20 µs of host time that
eager attention pays several times a layer. What that depends on (Triton 3: compile-time arguments, types, whether
pointers and integers divide by 16 and integers are 1) is the key under which the compiled form is kept here.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["launch"]

_compiled: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any, grid: tuple[int, int, int], args: tuple[Any, ...], constants: tuple[Any, ...],
    sizes: tuple[int, ...] = (), **options: int,
) -> None:  # fmt: skip
    """Launch a kernel on the current stream.

    Args:
        kernel: a function under ``triton.jit``, its parameters those of `args`, of `sizes` and of `constants`.
        grid: programs.
        args: tensors and numbers.
        constants: compile-time arguments.
        sizes: numbers that the kernel names in its ``do_not_specialize``: what is compiled doesn't depend on them.
        **options: ``num_warps`` and ``num_stages``; functions of the constants.
    """
    key = (kernel, constants, *[
        (each.dtype, each.data_ptr() & 15, each.device.index) if isinstance(each, torch.Tensor) else each
        for each in args
    ])  # fmt: skip
    compiled = _compiled.get(key)
    if compiled is not None:
        compiled[grid](*args, *sizes, *constants)
        return
    made = kernel[grid](*args, *sizes, *constants, **options)
    # Triton's interpreter compiles nothing.
    if made is not None:
        _compiled[key] = made
