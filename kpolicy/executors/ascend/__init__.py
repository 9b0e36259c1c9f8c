"""Ascend NPUs through torch_npu: `AscendExecutor`, and `AscendAdapter` below it. Unverified on hardware."""

from kpolicy.executors.ascend.adapter import AscendAdapter
from kpolicy.executors.ascend.executor import AscendExecutor
from kpolicy.executors.ascend.updates import UpdateOrder

__all__ = ["AscendAdapter", "AscendExecutor", "UpdateOrder"]
