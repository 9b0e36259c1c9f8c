"""`HostReads`: notes operators that read tensors on the host or whose output shape depends on data.

A graph can hold neither: it would keep the value that it was captured with. Operators of ours and of libraries are
looked at from outside; what they do inside is theirs.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["HostReads"]

_READS = frozenset({
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::equal", "aten::is_nonzero", "aten::item", "aten::repeat_interleave",
})  # fmt: skip
_FUNCTIONS = frozenset({"tolist", "numpy", "__array__", "item", "__bool__", "__int__", "__float__", "__index__"})


class _Operators(TorchDispatchMode):  # type: ignore[misc]
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in _READS or (name == "aten::index" and _has_mask(args[1])):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def _has_mask(indices: Any) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


class _Functions(TorchFunctionMode):  # type: ignore[misc]
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _FUNCTIONS:
            self.found.append(f"Tensor.{name}")
        return func(*args, **(kwargs or {}))


class HostReads(AbstractContextManager["HostReads"]):
    """Watches this thread while entered; `found` has each host read's name, in order."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._stack = ExitStack()

    def __enter__(self) -> HostReads:
        self._stack.enter_context(_Operators(self.found))
        self._stack.enter_context(_Functions(self.found))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
