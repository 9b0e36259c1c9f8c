"""Tensor-parallel ranks: what one of them can't do, none does.

A step has collectives inside. A rank that runs one fewer, or falls back alone, leaves the others waiting for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from kpolicy.errors import RankError

__all__ = ["Ranks"]

T = TypeVar("T")


class Ranks:
    """The tensor-parallel group of a model runner; a group of one where it has none.

    Args:
        model_runner: SGLang's.
    """

    def __init__(self, model_runner: Any) -> None:
        self._group: Any = None
        if model_runner.server_args.tp_size > 1:
            self._group = getattr(model_runner, "tp_group", None)
            if self._group is None:
                from sglang.srt.runtime_context import get_parallel

                self._group = get_parallel().tp_group

    @property
    def several(self) -> bool:
        """Whether there are others to ask."""
        return self._group is not None

    def all(self, ok: bool) -> bool:
        """Whether it is so on every rank; each must ask as often."""
        if self._group is None:
            return ok
        import torch

        flag = torch.tensor([int(ok)], dtype=torch.int32)
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MIN, group=self._group.cpu_group)
        return bool(flag.item())

    def first(self, value: T) -> T:
        """Rank 0's."""
        return value if self._group is None else cast("T", self._group.broadcast_object(value, src=0))

    def differing(self, values: Mapping[str, Any]) -> tuple[list[str], Mapping[str, Any]]:
        """Names of rank 0's values that some rank has otherwise, the same list on each, and these values.

        Args:
            values: this rank's.
        """
        first = self.first(values)
        if self.all(values == first):
            return [], first
        return [name for name in sorted(first) if not self.all(values.get(name) == first[name])], first

    def together(self, made: Callable[[], T], what: str) -> T:
        """What this rank makes, once every one has made its own; whatever it does may have no collectives inside.

        Args:
            made: makes it.
            what: what all are doing, for the message.

        Raises:
            RankError: another rank failed.
            Exception: whatever `made` raises, when all know of it.
        """
        failed, found = None, None
        try:
            found = made()
        except Exception as error:  # noqa: BLE001  it is raised again, once the others know
            failed = error
        fine = self.all(failed is None)
        if failed is not None:
            raise failed
        if not fine:
            raise RankError(f"another tensor-parallel rank failed at {what}; see its log. All ranks fall back with it")
        return cast("T", found)
