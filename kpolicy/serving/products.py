"""`products_of`: the matrix products of an eager step, to be run by themselves at other numbers of tokens.

cuBLAS chooses a kernel by a product's exact shape, and a kernel's first use loads it: 3 to 10 ms on top of an H200's
eager step of 19, in one new size of three or four after eager steps of 32 sizes. Products take a fraction of the step,
so many sizes can be run before anything is served.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Product", "products_of"]

_PRODUCTS = frozenset({
    "aten::linear", "aten::matmul", "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm",
})  # fmt: skip


@attrs.frozen(eq=False)
class Product:
    """One matrix product, of which some arguments have a dimension that goes with the step's tokens.

    Attributes:
        function: the operator.
        args: what the step gave it; weights are the model's own.
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

    def like(self) -> tuple[Any, ...]:
        """What is equal where one product's kernels are another's."""
        return (
            str(self.function),
            *(
                arg
                if not isinstance(arg, torch.Tensor)
                else (_shape(arg, self.tokens.get(i)), _order(arg), arg.dtype, arg.device)
                for i, arg in enumerate(self.args)
            ),
        )


class _Noted(TorchDispatchMode):  # type: ignore[misc]
    """Notes the products that run while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in _PRODUCTS and not kwargs:
            self.found.append((func, tuple(args)))
        return func(*args, **(kwargs or {}))


def products_of(step: Callable[[int], object], sizes: tuple[int, int]) -> list[Product]:
    """The products of a step that go with its tokens, one of each kind.

    Args:
        step: runs one of that many tokens, on this thread.
        sizes: two numbers of tokens. What differs between their products goes with tokens.

    Returns:
        None of them where the two don't launch the same products one by one, as where routing depends on data.
    """
    found = []
    for size in sizes:
        with _Noted() as noted:
            step(size)
        found.append(noted.found)
    if len(found[0]) != len(found[1]):
        return []
    products: dict[tuple[Any, ...], Product] = {}
    for (function, args), (other, others) in zip(*found, strict=True):
        tokens = _tokens(args, others, sizes) if function is other and len(args) == len(others) else None
        if tokens:
            product = Product(function, args, tokens)
            products.setdefault(product.like(), product)
    return list(products.values())


def _tokens(
    args: tuple[Any, ...], others: tuple[Any, ...], sizes: tuple[int, int]
) -> dict[int, tuple[int, int]] | None:
    """By argument, the dimension that goes with tokens and rows a token; None where one differs in another way."""
    found = {}
    for i, (one, other) in enumerate(zip(args, others, strict=True)):
        if not isinstance(one, torch.Tensor) or one.shape == other.shape:
            continue
        differing = [dim for dim in range(one.dim()) if one.dim() == other.dim() and one.shape[dim] != other.shape[dim]]
        if len(differing) != 1:
            return None
        (dim,) = differing
        each = one.shape[dim] // sizes[0]
        if (one.shape[dim], other.shape[dim]) != (each * sizes[0], each * sizes[1]):
            return None
        found[i] = (dim, each)
    return found


def _order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Its dimensions as they lie in memory, the outermost first."""
    return tuple(sorted(range(tensor.dim()), key=lambda dim: -tensor.stride(dim)))


def _shape(tensor: torch.Tensor, tokens: tuple[int, int] | None) -> tuple[int, ...]:
    shape = list(tensor.shape)
    if tokens is not None:
        shape[tokens[0]] = -tokens[1]
    return tuple(shape)


def _zeros(like: torch.Tensor, dim: int, rows: int) -> torch.Tensor:
    """Zeros of that shape but for one dimension, which lie in memory as it does."""
    shape, order = list(like.shape), _order(like)
    shape[dim] = rows
    lying = like.new_zeros([shape[i] for i in order])
    return lying.permute([order.index(i) for i in range(len(order))])
