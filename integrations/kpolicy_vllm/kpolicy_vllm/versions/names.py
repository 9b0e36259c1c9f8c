"""What kpolicy uses of a running vLLM, by one name in every release."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import attrs

from kpolicy.modes import Part

__all__ = ["Names"]


def _free_bytes() -> int:
    torch = import_module("torch")
    return int(torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else 0


def _device_name() -> str:
    torch = import_module("torch")
    return str(torch.cuda.get_device_name()) if torch.cuda.is_available() else "cpu"


def wrapped(desc: Any, part: Part) -> list[bool]:
    """Of each of vLLM's own wrappers that has graphs of that part: has it that descriptor's, or piece of its size?

    Nothing where none has any: the second runner's whole graphs are its manager's, and other wrappers aren't asked.
    """
    wrapper = import_module("vllm.compilation.cuda_graph").CUDAGraphWrapper
    mode = import_module("vllm.config.compilation").CUDAGraphMode[part.name]
    found = [each.concrete_cudagraph_entries for each in wrapper._all_instances if each.runtime_mode == mode]
    if part is Part.FULL:
        return [desc in entries for entries in found if entries]
    return [any(entry.num_tokens == desc.num_tokens for entry in entries) for entries in found if entries]


def _num_pieces(desc: Any) -> int:
    """Pieces that were captured for that descriptor's size, of either runner."""
    return sum(wrapped(desc, Part.PIECEWISE))


def _broadcast(value: Any) -> Any:
    """Rank 0's value, on every rank of the world."""
    world = import_module("vllm.distributed.parallel_state").get_world_group()
    return world.broadcast_object(value, src=0) if world.world_size > 1 else value


def agreed_on(ok: bool, group: Any) -> bool:
    """Whether it holds on every rank of a group; each must ask."""
    if group.world_size == 1:
        return ok
    torch = import_module("torch")
    flag = torch.tensor([int(ok)], dtype=torch.int32)
    torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return bool(flag.item())


def _agree(ok: bool) -> bool:
    """Whether it holds on every rank of the world."""
    return agreed_on(ok, import_module("vllm.distributed.parallel_state").get_world_group())


def _first_rank() -> bool:
    """Whether this worker is the first of its tensor and pipeline ranks: it speaks for them."""
    state = import_module("vllm.distributed.parallel_state")
    return state.get_pp_group().is_first_rank and state.get_tp_group().is_first_rank  # type: ignore[no-any-return]


@attrs.frozen(kw_only=True)
class Names:
    """See the module's docstring. Memory is of the current device; tests give functions of their own."""

    CUDAGraphMode: Any
    BatchDescriptor: Any = None
    CudagraphDispatcher: Any = None
    dispatcher_class: Any = None
    """Makes ours over vLLM's, where it isn't `runner_v1.dispatcher_class`"""
    BatchExecutionDescriptor: Any = None
    CudaGraphManager: Any = None
    ModelCudaGraphManager: Any = None
    free_bytes: Callable[[], int] = _free_bytes
    device_name: Callable[[], str] = _device_name
    num_pieces: Callable[[Any], int] = _num_pieces
    broadcast: Callable[[Any], Any] = _broadcast
    agree: Callable[[bool], bool] = _agree
    first_rank: Callable[[], bool] = _first_rank

    @staticmethod
    def everywhere(ok: bool) -> bool:
        """Whether it holds on every rank of the world; each must ask."""
        return _agree(ok)

    @classmethod
    def of_v1(cls) -> Names:
        """The names that the first runner needs."""
        return cls(
            CUDAGraphMode=import_module("vllm.config.compilation").CUDAGraphMode,
            BatchDescriptor=import_module("vllm.forward_context").BatchDescriptor,
            CudagraphDispatcher=import_module("vllm.v1.cudagraph_dispatcher").CudagraphDispatcher,
        )

    @classmethod
    def of_v2(cls) -> Names:
        """The names that the second runner needs."""
        utils = import_module("vllm.v1.worker.gpu.cudagraph_utils")
        return cls(
            CUDAGraphMode=import_module("vllm.config.compilation").CUDAGraphMode,
            BatchExecutionDescriptor=utils.BatchExecutionDescriptor,
            CudaGraphManager=utils.CudaGraphManager,
            ModelCudaGraphManager=utils.ModelCudaGraphManager,
        )
