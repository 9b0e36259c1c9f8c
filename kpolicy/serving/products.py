"""`products_of`: the matrix products of an eager step, to be run by themselves at other numbers of tokens.

cuBLAS chooses a kernel by a product's exact shape, and a kernel's first use loads it: 3 to 10 ms on top of an H200's
eager step of 19, in one new size of three or four after eager steps of 32 sizes. Products take a fraction of the step,
so many sizes can be run before anything is served.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import attrs
import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Product", "products_of"]

_PRODUCTS = frozenset({
    "aten::linear", "aten::matmul", "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm",
})  # fmt: skip
"""Without autograd a step's `linear` and `matmul` are seen as such, and what they are made of isn't"""


@attrs.frozen(eq=False)
class Product:
    """One matrix product, of which some arguments have a dimension that goes with the step's tokens.

    Attributes:
        function: the operator.
        args: what a step gave it; weights are the model's own.
        tokens: for each that goes with tokens, by index: its dimension, and how many rows a token has.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    tokens: dict[int, tuple[int, int]]

    def run(self, num_tokens: int) -> None:
        """Launch it over zeros of that many tokens."""
        args = list(self.args)
        for i, (dim, each) in self.tokens.items():
            args[i] = _zeros(args[i], dim, num_tokens * each)
        self.function(*args)


class _Kind(NamedTuple):
    """What of a tensor a library chooses its kernel by."""

    shape: tuple[int, ...]
    order: tuple[int, ...]
    """Its dimensions as they lie in memory, the outermost first"""
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Kind:
        order = sorted(range(tensor.dim()), key=lambda dim: -tensor.stride(dim))
        return cls(tuple(tensor.shape), tuple(order), tensor.dtype)


class _Noted(TorchDispatchMode):  # type: ignore[misc]
    """Notes the products that run while it is entered, and keeps the arguments of the first of each kind.

    A step's own tensors are freed as it goes but for these: all layers' together can be gigabytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Any, ...]] = []
        self.args: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in _PRODUCTS and not kwargs:
            kind = (func, *(_Kind.of(arg) if isinstance(arg, torch.Tensor) else arg for arg in args))
            self.found.append(kind)
            self.args.setdefault(kind, tuple(args))
        return func(*args, **(kwargs or {}))


def products_of(step: Callable[[int], object], sizes: tuple[int, int]) -> list[Product]:
    """The products of a step that go with its tokens, one of each kind.

    Args:
        step: runs one of that many tokens, on this thread.
        sizes: two numbers of tokens. What differs between their products goes with tokens.

    Returns:
        None of them where the two don't launch the same products one by one, as where routing depends on data.
    """
    with _Noted() as first:
        step(sizes[0])
    args = first.args
    with _Noted() as second:
        step(sizes[1])
    if len(first.found) != len(second.found):
        return []
    products = []
    for kind, other in dict.fromkeys(zip(first.found, second.found, strict=True)):
        tokens = _tokens(kind, other, sizes)
        if tokens:
            products.append(Product(kind[0], args[kind], tokens))
    return products


def _tokens(kind: tuple[Any, ...], other: tuple[Any, ...], sizes: tuple[int, int]) -> dict[int, tuple[int, int]] | None:
    """By argument, the dimension that goes with tokens and rows a token; None where they differ in another way."""
    if kind[0] is not other[0] or len(kind) != len(other):
        return None
    found = {}
    for i, (one, two) in enumerate(zip(kind[1:], other[1:], strict=True)):
        if one == two:
            continue
        if not (isinstance(one, _Kind) and isinstance(two, _Kind)) or len(one.shape) != len(two.shape):
            return None
        differing = [dim for dim, (a, b) in enumerate(zip(one.shape, two.shape, strict=True)) if a != b]
        if len(differing) != 1:
            return None
        (dim,) = differing
        each = one.shape[dim] // sizes[0]
        if (one.shape[dim], two.shape[dim]) != (each * sizes[0], each * sizes[1]):
            return None
        found[i] = (dim, each)
    return found


def _zeros(like: torch.Tensor, dim: int, rows: int) -> torch.Tensor:
    """Zeros of that shape but for one dimension, which lie in memory as it does."""
    shape, order = list(like.shape), _Kind.of(like).order
    shape[dim] = rows
    lying = like.new_zeros([shape[i] for i in order])
    return lying.permute([order.index(i) for i in range(len(order))])
