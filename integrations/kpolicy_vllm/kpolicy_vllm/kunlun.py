"""`KunlunGraphWrapper`: the graph wrapper that vLLM-Kunlun's design page describes and its code never had.

vLLM-Kunlun returns vLLM's own wrapper from `get_static_graph_wrapper_cls`. `register` makes it return this one where
kpolicy is on (`KPOLICY_VLLM=1`). It captures and replays as vLLM's, and differs in three things:

- A capture that fails costs its graph: that size runs eagerly from then on, and serving goes on.
- FULL graphs of attention that takes lengths on the host are on probation: replays over other lengths than the
  capture's run beside an eager run, whose output is what the caller gets. After three that have its bits, over lengths
  shorter and longer than captured, the graph is trusted; one that hasn't is given up for good. A replay over the
  capture's own lengths proves nothing and runs eagerly.
- Linear attention keeps a state, which running twice would advance twice: its FULL graphs are refused.

vLLM-Kunlun isn't on a package index; names are those of its public sources (a build for vLLM 0.15). Unverified on
hardware: held to a pretended vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any, cast

import attrs

from kpolicy_vllm.config import Config

__all__ = ["LOGGER", "NEEDED", "Probation", "host_lengths", "register", "wrapper_class"]

LOGGER = logging.getLogger("vllm.kpolicy")
NEEDED = 3
"""Replays that must have eager's bits."""
_PLATFORM = "vllm_kunlun.platforms.kunlun"
_QUALNAME = "kpolicy_vllm.kunlun.KunlunGraphWrapper"
_STATEFUL = ("GDN", "Mamba", "Linear", "ShortConv")
_MARK = "_kpolicy"
_DEEPEST = 3


def register() -> bool:
    """Let vLLM-Kunlun use this wrapper, where both are there and kpolicy is on by the environment; whether it does."""
    if find_spec("vllm_kunlun") is None or Config.load({}) is None:
        return False
    platform = import_module(_PLATFORM).KunlunPlatform
    original = platform.get_static_graph_wrapper_cls
    if not getattr(original, _MARK, False):

        def get_static_graph_wrapper_cls(cls: type[Any]) -> str:  # noqa: ARG001 - as the platform's
            return _QUALNAME

        setattr(get_static_graph_wrapper_cls, _MARK, True)
        platform.get_static_graph_wrapper_cls = classmethod(get_static_graph_wrapper_cls)
    return True


def __getattr__(name: str) -> Any:
    # vLLM resolves the wrapper by its name, in a worker; nothing of vLLM is imported before.
    if name != "KunlunGraphWrapper":
        raise AttributeError(f"module 'kpolicy_vllm.kunlun' has no attribute {name!r}")
    from kpolicy.executors.cuda.failures import classify

    context = import_module("vllm.forward_context")
    made = wrapper_class(
        import_module("vllm.compilation.cuda_graph").CUDAGraphWrapper,
        context.get_forward_context,
        import_module("vllm.config").CUDAGraphMode,
        lambda error: classify(error).sticky,
    )
    globals()[name] = made
    return made


@attrs.define
class Probation:
    """What a FULL graph has still to prove.

    Args:
        captured: the lengths that it was captured with.
        shortest: no row of these lengths could be shorter.
    """

    captured: tuple[int, ...]
    shortest: bool
    passed: int = 0
    shorter: bool = False
    longer: bool = False

    def compared(self, lengths: tuple[int, ...]) -> bool:
        """A replay over those lengths had eager's bits; whether the graph is trusted from here on."""
        self.passed += 1
        self.longer |= max(lengths, default=0) > max(self.captured, default=0)
        self.shorter |= sum(lengths) < sum(self.captured)
        return self.passed >= NEEDED and self.longer and (self.shorter or self.shortest)


def host_lengths(metadata: Any) -> tuple[int, ...] | None:
    """Lengths that attention takes on the host, from its metadata; None where there are none."""
    found = [value for each in _each(metadata) for value in _lengths(each, 0)]
    return tuple(found) if found else None


def _each(metadata: Any) -> list[Any]:
    """One layer's metadata after another; layers that share it count once."""
    every = list(metadata.values()) if isinstance(metadata, Mapping) else [metadata]
    return list({id(each): each for each in every if each is not None}.values())


def _lengths(value: Any, depth: int) -> Iterator[int]:
    for name, held in (vars(value) if hasattr(value, "__dict__") else {}).items():
        lengths = "len" in name or "lod" in name or "start_loc" in name
        if lengths and getattr(getattr(held, "device", None), "type", "") == "cpu" and not held.is_floating_point():
            yield from held.flatten().tolist()
        elif lengths and isinstance(held, list) and all(isinstance(each, int) for each in held):
            yield from held
        elif depth < _DEEPEST and "meta" in type(held).__name__.lower():
            yield from _lengths(held, depth + 1)


def wrapper_class(
    base: type[Any], forward_context: Callable[[], Any], modes: Any, is_lost: Callable[[BaseException], bool]
) -> type[Any]:
    """See the module's docstring.

    Args:
        base: vLLM's `CUDAGraphWrapper`.
        forward_context: gives the step's forward context.
        modes: vLLM's `CUDAGraphMode`.
        is_lost: whether an error means that the device is lost.
    """

    class KunlunGraphWrapper(base):  # type: ignore[misc]
        """See `wrapper_class`.

        Attributes:
            refused: why sizes run eagerly, by descriptor.
            probation: FULL graphs that aren't trusted yet.
        """

        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **named)
            self.refused: dict[Any, str] = {}
            self.probation: dict[Any, Probation] = {}

        def __call__(self, *args: Any, **named: Any) -> Any:
            context = forward_context()
            mode, desc = context.cudagraph_runtime_mode, context.batch_descriptor
            if mode == modes.NONE or mode != self.runtime_mode or desc in self.refused:
                return self.runnable(*args, **named)
            entry = self.concrete_cudagraph_entries.get(desc)
            if entry is None or entry.cudagraph is None:
                return self._captured(desc, context.attn_metadata, args, named)
            trial = self.probation.get(desc)
            if trial is None:
                return super().__call__(*args, **named)
            return self._tried(desc, trial, context.attn_metadata, args, named)

        def _captured(self, desc: Any, metadata: Any, args: Any, named: Any) -> Any:
            whole = self.runtime_mode == modes.FULL
            if whole and any(name in type(each).__name__ for each in _each(metadata) for name in _STATEFUL):
                self._refuse(desc, "its attention keeps a state, which can't be run twice to prove a replay")
                return self.runnable(*args, **named)
            try:
                output = super().__call__(*args, **named)
            except RuntimeError as error:
                if is_lost(error):
                    raise
                self._refuse(desc, f"its capture failed: {(str(error).splitlines() or ['?'])[0]}")
                return self.runnable(*args, **named)
            lengths = host_lengths(metadata) if whole else None
            if lengths is not None:
                rows = _num_tokens(metadata, desc) // max(1, getattr(desc, "num_reqs", None) or desc.num_tokens)
                self.probation[desc] = Probation(lengths, max(lengths) <= max(1, rows))
            return output

        def _tried(self, desc: Any, trial: Probation, metadata: Any, args: Any, named: Any) -> Any:
            lengths = host_lengths(metadata) or ()
            if lengths == trial.captured:
                return self.runnable(*args, **named)
            count = _num_tokens(metadata, desc)
            replayed = _copied(super().__call__(*args, **named), desc.num_tokens, count)
            wanted = self.runnable(*args, **named)
            if not _same(replayed, _copied(wanted, desc.num_tokens, count)):
                self._refuse(desc, "a replay over other lengths isn't what eager computes: lengths are frozen in it")
            elif trial.compared(lengths):
                del self.probation[desc]
                LOGGER.info("kpolicy: the FULL graph of %s has proved itself", desc)
            return wanted

        def _refuse(self, desc: Any, why: str) -> None:
            self.refused[desc] = why
            self.probation.pop(desc, None)
            self.concrete_cudagraph_entries.pop(desc, None)
            LOGGER.warning("kpolicy: %s runs eagerly from here on: %s", desc, why)

    return KunlunGraphWrapper


def _num_tokens(metadata: Any, desc: Any) -> int:
    """Tokens of the step without padding."""
    counts = [getattr(each, "num_actual_tokens", None) for each in _each(metadata)]
    return next((int(count) for count in counts if count), int(desc.num_tokens))


def _copied(output: Any, padded: int, count: int) -> list[Any]:
    """Copies of an output's tensors, without rows of padding."""
    if isinstance(output, tuple | list):
        return [copy for each in output for copy in _copied(each, padded, count)]
    if isinstance(output, Mapping):
        return [copy for each in output.values() for copy in _copied(each, padded, count)]
    tensors = getattr(output, "tensors", None)
    if isinstance(tensors, Mapping):  # vLLM's IntermediateTensors
        return _copied(tensors, padded, count)
    if not hasattr(output, "clone"):
        return []
    rows = output[:count] if output.dim() and output.shape[0] == padded else output
    return [rows.clone()]


def _same(mine: list[Any], other: list[Any]) -> bool:
    equal = cast("Callable[[Any, Any], bool]", import_module("torch").equal)
    return len(mine) == len(other) and all(equal(a, b) for a, b in zip(mine, other, strict=True))
