"""How a recorded operator runs at replay: one prepared call without arguments, as cheap as Python allows.

An operator is called best through the function that torch itself binds for it (``torch.add`` costs about half of
``torch.ops.aten.add``), writing straight into recorded memory (``out=``). Neither is taken on trust. Before a binding
is used, a dispatch mode looks where it arrives: it must be that operator, once, with those arguments. And an ``out=``
variant must give the bits of the recorded result. Otherwise the operator itself runs, and its result is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["fast", "flat_bytes", "into", "same_bits", "with_copies"]

Call = Callable[[], Any]

_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SPACES = tuple(
    space
    for space in (getattr(torch._C, name, None) for name in ("_VariableFunctions", "_nn", "_special", "_linalg"))
    if space is not None
)
_HIDDEN_WRITES = {"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "batch_norm_update_stats"}
"""Operators that write running statistics, which their schema keeps quiet about: a trial would write them twice."""

_COPIES = {"clone", "_to_copy"}


def flat_bytes(tensor: Any) -> Any:
    """Every byte of the storage under a tensor."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def same_bits(a: Any, b: Any) -> bool:
    """Whether two tensors of one shape and dtype hold the same bits, NaN and the sign of zero included."""
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    kind = _INTS[a.element_size()]
    same: bool = torch.equal(a.view(kind), b.view(kind))
    return same


class _Arrivals(TorchDispatchMode):  # type: ignore[misc]
    """Notes what arrives at the dispatcher, and runs nothing."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.seen: list[tuple[Any, Sequence[Any], Mapping[str, Any]]] = []
        self._answer = answer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append((func, args, kwargs or {}))
        return self._answer


def _arrives(call: Call, answer: Any) -> tuple[Any, Sequence[Any], Mapping[str, Any]] | None:
    """The one operator that a call ends in; None where it is refused, or is more than one."""
    mode = _Arrivals(answer)
    try:
        with mode:
            call()
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return None
    return mode.seen[0] if len(mode.seen) == 1 else None


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return a is b
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return type(a) is type(b) and bool(a == b)


def _bindings(func: Any) -> list[Callable[..., Any]]:
    name = func._schema.name.partition("::")[2]
    spaces = (torch._C.TensorBase, *_SPACES) if name.endswith("_") else _SPACES
    found = (getattr(space, name, None) for space in spaces)
    return [each for each in found if callable(each)]


def fast(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], answer: Any) -> Call:
    """The cheapest call of an operator: torch's own binding where it arrives there, else the operator.

    Args:
        func: the operator.
        args: its arguments, as replays give them.
        kwargs: likewise.
        answer: a result of the right kind, for the look at where a binding arrives.
    """
    for binding in _bindings(func) if func.namespace == "aten" else ():
        call = partial(binding, *args, **kwargs)
        seen = _arrives(call, answer)
        if seen is not None and seen[0] is func and _same(seen[1], args) and _same_kwargs(seen[2], kwargs):
            return call
    return partial(func, *args, **kwargs)


def _same_kwargs(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return a.keys() == b.keys() and all(_same(a[name], b[name]) for name in a)


def into(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[Any], recorded: Sequence[Any]
) -> Call | None:
    """A call that writes an operator's results straight into recorded memory, bit for bit; None where there is none.

    Args:
        func: an operator that changes none of its arguments.
        args: its arguments on recorded memory.
        kwargs: likewise.
        results: what it gave when it was recorded.
        recorded: where the results live, holding copies of them; they hold the same bits afterwards.
    """
    name = func._schema.name.partition("::")[2]
    if func.namespace != "aten" or name in _HIDDEN_WRITES:
        return None
    for call in _candidates(func, name, args, kwargs, recorded):
        if _gives(call, results, recorded):
            return call
        for target, result in zip(recorded, results, strict=True):
            target.copy_(result)
    return None


def _candidates(
    func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], recorded: Sequence[Any]
) -> list[Call]:
    if len(recorded) == 1 and name in _COPIES and args[0].shape == recorded[0].shape:
        return [partial(recorded[0].copy_, args[0])]
    if name == "embedding" and args[1].is_contiguous() and recorded[0].is_contiguous():
        weight, rows = args[0], args[1].reshape(-1)
        return [partial(torch.index_select, weight, 0, rows, out=recorded[0].view(-1, weight.shape[1]))]
    out = recorded[0] if len(recorded) == 1 else tuple(recorded)
    calls: list[Call] = []
    with_tensors = _tensors_for_numbers(func, args, recorded[0].dtype)
    for binding in _bindings(func):
        for tried in ([with_tensors] if with_tensors is not None else []) + [args]:
            call = partial(binding, *tried, **kwargs, out=out)
            seen = _arrives(call, out)
            if seen is not None and _is_out_variant(seen, func, tried, kwargs, recorded):
                calls.append(call)
    return calls


def _is_out_variant(
    seen: tuple[Any, Sequence[Any], Mapping[str, Any]], func: Any, args: Sequence[Any], kwargs: Mapping[str, Any],
    recorded: Sequence[Any],
) -> bool:  # fmt: skip
    """Whether what arrived is the same operator, over the same arguments, with the recorded memory as its results."""
    arrived, seen_args, seen_kwargs = seen
    outs = [argument.name for argument in arrived._schema.arguments if argument.is_out]
    rest = {name: value for name, value in seen_kwargs.items() if name not in outs}
    if arrived._schema.name != func._schema.name or not _same(seen_args, args) or not _same_kwargs(rest, kwargs):
        return False
    if [seen_kwargs.get(name) is target for name, target in zip(outs, recorded, strict=False)] != [True] * len(
        recorded
    ):
        return False
    if len(outs) != len(recorded):
        return False
    mine = [(each.name, str(each.type)) for each in func._schema.arguments]
    theirs = [(each.name, str(each.type)) for each in arrived._schema.arguments if not each.is_out]
    return mine == theirs


def _tensors_for_numbers(func: Any, args: Sequence[Any], dtype: Any) -> list[Any] | None:
    """The arguments with tensors of no dimension for numbers that an operator would wrap anew at each call (4 us).

    Only where that changes nothing: every tensor and the result have one dtype in which the number is computed
    with anyway. None where there is nothing to gain.
    """
    if dtype not in (torch.float32, torch.float64, torch.int64):
        return None
    kinds = [str(each.type) for each in func._schema.arguments]
    if any(isinstance(arg, torch.Tensor) and arg.dtype != dtype for arg in args):
        return None
    allowed = (int,) if dtype is torch.int64 else (int, float)
    changed = [
        torch.tensor(arg, dtype=dtype) if kind == "Tensor" and type(arg) in allowed else arg
        for arg, kind in zip(args, kinds, strict=False)
    ]
    return None if all(map(_is, changed, args)) else changed


def _is(a: Any, b: Any) -> bool:
    return a is b


def _gives(call: Call, results: Sequence[Any], recorded: Sequence[Any]) -> bool:
    """Whether a call writes those results to the bit, where they are expected."""
    places = [(target.data_ptr(), target.shape, target.stride()) for target in recorded]
    try:
        call()
    except (RuntimeError, TypeError, NotImplementedError, IndexError):
        return False
    moved = [(target.data_ptr(), target.shape, target.stride()) for target in recorded] != places
    return not moved and all(map(same_bits, recorded, results))


def with_copies(call: Call, copies: Sequence[tuple[tuple[int, ...], Callable[[Any], Any]]]) -> Call:
    """A call whose results are then copied to recorded memory.

    Args:
        call: gives fresh results.
        copies: where in what the call gives a result lies, as indices, and what takes it.
    """
    if not copies:
        return call
    if len(copies) == 1 and not copies[0][0]:
        copy = copies[0][1]

        def copied() -> None:
            copy(call())

        return copied

    def each_copied() -> None:
        given = call()
        for path, copy in copies:
            result = given
            for index in path:
                result = result[index]
            copy(result)

    return each_copied
