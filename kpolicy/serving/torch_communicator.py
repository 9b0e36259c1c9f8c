"""`TorchCommunicator`: ranks of a torch.distributed process group, for an Engine's `communicator`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from kpolicy.errors import ConfigError, RankError

__all__ = ["TorchCommunicator"]


class TorchCommunicator:
    """The ranks of one process group. Votes are CPU tensors of int64, so a group over gloo needs no device.

    Args:
        group: the process group; the default group when None. It must take CPU tensors: give a gloo group where the
            default one is NCCL.

    Raises:
        ConfigError: torch.distributed isn't initialised, this process isn't in the group, or the group doesn't take
            CPU tensors.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ConfigError(
                "torch.distributed isn't initialised; call torch.distributed.init_process_group('gloo', ...) first."
            )
        self._group = group
        self._rank: int = dist.get_rank(group)
        if self._rank < 0:
            raise ConfigError("this process isn't in the process group; give a group that it belongs to.")
        backend = str(dist.get_backend(group))
        if backend in ("nccl", "hccl", "xccl"):
            raise ConfigError(
                f"the process group runs on {backend}, which takes no CPU tensors; give "
                "torch.distributed.new_group(backend='gloo')."
            )
        self._world_size: int = dist.get_world_size(group)
        self._first = 0 if group is None else dist.get_global_rank(group, 0)

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world_size

    def broadcast(self, text: str) -> str:
        """What rank 0 gave: its length in bytes, then the bytes."""
        data = text.encode()
        length = torch.tensor([len(data)], dtype=torch.int64)
        self._told(length)
        if self._rank:
            buffer = torch.empty(int(length), dtype=torch.uint8)
        else:
            buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        if not len(buffer):
            return ""
        self._told(buffer)
        return bytes(buffer.tolist()).decode()

    def all_reduce_max(self, values: Sequence[int]) -> list[int]:
        """The largest of each value over ranks."""
        votes = torch.tensor(list(values), dtype=torch.int64)
        try:
            dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self._group)
        except RuntimeError as error:
            raise self._failed("all_reduce", error) from error
        reduced: list[int] = votes.tolist()
        return reduced

    def _told(self, buffer: torch.Tensor) -> None:
        try:
            dist.broadcast(buffer, src=self._first, group=self._group)
        except RuntimeError as error:
            raise self._failed("broadcast", error) from error

    def _failed(self, what: str, error: RuntimeError) -> RankError:
        return RankError(f"{what} failed on rank {self._rank} of {self._world_size}: {error}. Did another rank stop?")
