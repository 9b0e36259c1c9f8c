"""A recorder of torch's operators on the CPU, with the semantics of a device graph.

Promise: after `Recorder.end`, `Graph.replay` runs the operators that the model ran, on the same memory, and no Python
of the model. Addresses are fixed, Python values are frozen, outputs are overwritten by the next replay. Unlike on a
device, operators also run while they are recorded, so recording writes what the model writes.

How it works. A mode on torch's dispatcher sees every operator. Composite operators, which arrive whole under
`torch.inference_mode`, are taken apart by torch's own kernel for them, so that what is recorded is always a leaf: its
tags say whether it is random, reads values on the host, or has a shape that depends on data. Whether a result aliases
is decided by storage, at the time: one that shares storage with an argument is a view, and a replay does nothing for
it. Any other result moves to memory of the pool (`arena`), and a replay writes there. A second mode watches the
Python functions that the dispatcher doesn't see.

Memory from outside the recording is kept alive by the graph. If nobody else holds it when the recording ends, nobody
can ever put a new value there: a replay would go on with the values of the recording, where a device graph would read
freed memory. That is an error. A caller that lets it go later is found by `Graph.check` only. Constants are the
exception: tensors made of Python data, or of nothing (``torch.arange``), while recording are frozen as Python values
are; where the model changes one, each replay first puts it back.

What no mode sees: ``torch.frombuffer`` (its memory counts as outside), ``torch.utils.dlpack.to_dlpack``, and
operators on threads that the model starts itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kpolicy.errors import CaptureError
from kpolicy.executors.cpu.arena import Arena, nbytes_of
from kpolicy.executors.cpu.graph import Graph, Noted, this_thread
from kpolicy.executors.cpu.memory import Fresh, RecordedMemory, tensors_in
from kpolicy.executors.cpu.prepare import fast, into, with_copies
from kpolicy.executors.cpu.rules import (
    STALE,
    is_metadata,
    model_line,
    reads_on_host,
    refused,
    stays_whole,
    why_not,
    why_not_function,
    why_not_memory,
)
from kpolicy.reasons import Reason

__all__ = ["Recorder"]

CONSTANT_BYTES = 64 << 10
"""Largest result of an operator without tensors (``arange``, ``full``) that is kept, not computed by each replay."""

_COMPOSITE = "CompositeImplicitAutograd"
_UNWRITTEN = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"}


class Recorder:
    """Records what this thread runs, from `begin` to `end` or `abort`; used once.

    Args:
        arena: the pool's memory; its own by default.
        before: called with each operator's place before it is recorded: where faults are injected.
    """

    def __init__(self, arena: Arena | None = None, before: Callable[[int], None] | None = None) -> None:
        self.memory = RecordedMemory(arena or Arena())
        self.inside = False
        """Whether an operator runs: what it does in Python is its own, not the model's"""
        self._before = before
        self._refusal: CaptureError | None = None
        self._calls: list[tuple[Callable[[], Any], Sequence[Fresh]]] = []
        self._noted: list[Noted] = []
        self._composite: str | None = None
        self._mode = _Dispatch(self)
        self._modes = ExitStack()

    def begin(self) -> None:
        """Start recording this thread, in inference mode: only there do composite operators arrive whole.

        Raises:
            CaptureError: it is recording already.
        """
        if getattr(this_thread, "recorder", None) is not None:
            raise CaptureError(Reason.CAPTURE_FORBIDDEN, "this thread is recording already; end that recording first.")
        if not torch.is_inference_mode_enabled():
            self._modes.enter_context(torch.inference_mode())
        self._modes.enter_context(_Functions(self))
        self._modes.enter_context(self._mode)
        this_thread.recorder = self

    def end(self) -> Graph:
        """Stop recording.

        Raises:
            CaptureError: something that the model did can't be recorded, also where the model caught the error.
        """
        memory, recorded = self.memory, self._calls
        self.abort()
        if self._refusal is not None:
            raise self._refusal
        outside = list(memory.outside.values())
        for each in outside:
            if each.ours_only:
                raise CaptureError(Reason.CAPTURE_ILLEGAL, f"{each.line} can't be recorded: {STALE}")
        # A result that no call reads and nobody holds needn't be copied: statistics beside a normalisation's result.
        calls = [
            with_copies(call, [(each.path, each.copy) for each in fresh if each.block.read or each.block.alive])
            for call, fresh in recorded
        ]
        return Graph([*memory.restores, *calls], self._noted, outside, memory.arena.attribute())

    def abort(self) -> None:
        """Stop recording and leave no mode behind; nothing where nothing is recording."""
        if getattr(this_thread, "recorder", None) is self:
            this_thread.recorder = None
            self._modes.close()
            # The modes know the recorder and it knows them: what it recorded isn't left to the collector.
            self.memory, self._calls = RecordedMemory(Arena()), []

    # What the modes see

    def function(self, func: Any) -> None:
        """Refuse a Python function that reads values past the dispatcher."""
        why = why_not_function(func)
        if why is not None:
            raise self._refused(f"Tensor.{getattr(func, '__name__', func)}", why)

    def operator(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run one operator and record it."""
        if is_metadata(func):
            return func(*args, **kwargs)
        if _is_composite(func) and not reads_on_host(func) and not stays_whole(func, args, kwargs):
            return self._taken_apart(func, args, kwargs)
        given = list(tensors_in((args, kwargs)))
        why = why_not(func, args, kwargs) or why_not_memory(given)
        if why is not None:
            raise self._refused(func, why)
        if self._before is not None:
            self._before(len(self._noted))
        self.inside = True
        try:
            return self._recorded(func, args, kwargs, given)
        finally:
            self.inside = False

    def _refused(self, operator: Any, why: str) -> CaptureError:
        named = str(operator)
        error = refused(f"{self._composite} ({named})" if self._composite not in (None, named) else named, why)
        # Model code may catch what it raises; the recording is lost all the same.
        self._refusal = self._refusal or error
        return error

    def _taken_apart(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a composite operator with the mode on, so that its parts arrive."""
        outermost = self._composite is None
        if outermost:
            self._composite = str(func)
        try:
            with self._mode:
                return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
        finally:
            if outermost:
                self._composite = None

    def _recorded(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], given: Sequence[Any]) -> Any:
        memory, name, line = self.memory, func._schema.name, model_line()
        if name == "aten::lift_fresh":
            memory.keep(args[0], f"{func} at {line}", constant=True)
        with torch.inference_mode():
            call_args = memory.for_calls(args, f"{func} at {line}")
            call_kwargs = memory.for_calls(kwargs, f"{func} at {line}")
        memory.before_write(_written(func, args, kwargs))
        places = _places(given)
        result = func(*args, **kwargs)
        why = why_not_memory(list(tensors_in(result)), results=True)
        if why is not None:
            raise self._refused(func, why)
        if func._schema.is_mutable and _places(given) != places:
            raise self._refused(func, "it resizes the memory under a tensor, and a replay has the recording's.")
        if not given and name.startswith("aten::") and _is_small(result) and name[6:] not in _UNWRITTEN:
            for each in tensors_in(result):
                memory.keep(each, f"{func} at {line}", constant=True)
            return self._note(func, given, result, line, "kept")
        model, fresh = memory.moved(result, {each.untyped_storage()._cdata for each in given})
        return self._note(func, given, model, line, self._add(func, call_args, call_kwargs, result, fresh))

    def _add(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, fresh: Sequence[Fresh]
    ) -> str:
        """Add what a replay does for an operator to the list; how, in a word."""
        schema = func._schema
        if torch.Tag.inplace_view in func.tags:
            return "view"
        if schema.name.startswith("aten::") and schema.name[6:] in _UNWRITTEN:
            return "empty"
        if not schema.is_mutable and not fresh and schema.returns:
            return "view"
        how, copied = "in place" if schema.is_mutable else "copy", fresh
        with torch.inference_mode():
            call = None
            if not schema.is_mutable and len(fresh) == len(schema.returns) and all(len(f.path) < 2 for f in fresh):
                results = [result] if len(schema.returns) == 1 else list(result)
                call = into(func, args, kwargs, results, [each.recorded for each in fresh])
            if call is None:
                call = fast(func, args, kwargs, result)
            else:
                how, copied = "into", ()
        self._calls.append((call, copied))
        return how

    def _note(self, func: Any, given: Sequence[Any], result: Any, line: str, how: str) -> Any:
        self._noted.append(Noted(str(func), _text(given), _text(list(tensors_in(result))), line, how))
        return result


class _Dispatch(TorchDispatchMode):  # type: ignore[misc]
    """Hands every operator to the recorder."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._recorder.operator(func, args, kwargs or {})


class _Functions(TorchFunctionMode):  # type: ignore[misc]
    """Shows the recorder the Python functions that are called on tensors."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._recorder.inside:
            self._recorder.function(func)
        return func(*args, **(kwargs or {}))


@cache
def _is_composite(func: Any) -> bool:
    """Whether torch makes an operator of others on the CPU. Operators from outside torch stay whole."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    name = func.name()
    return bool(
        func.namespace == "aten" and hasattr(func, "_op_dk") and has_kernel(name, _COMPOSITE)
        and not has_kernel(name, "CPU")
    )  # fmt: skip


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The tensors whose elements an operator's schema says it changes."""
    if not func._schema.is_mutable or torch.Tag.inplace_view in func.tags:
        return []
    written = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(args[place] if place < len(args) else kwargs.get(argument.name))
    return list(tensors_in(written))


def _places(tensors: Sequence[Any]) -> list[tuple[int, int]]:
    return [(each.untyped_storage().data_ptr(), nbytes_of(each)) for each in tensors]


def _is_small(result: Any) -> bool:
    return sum(map(nbytes_of, tensors_in(result))) <= CONSTANT_BYTES


def _text(tensors: Sequence[Any]) -> str:
    return ", ".join(f"{str(each.dtype).removeprefix('torch.')}{list(each.shape)}" for each in tensors)
