"""The CPU as a device: a recorder of torch's operators, the adapter over it, and the executor. Needs torch."""

from __future__ import annotations

from kpolicy.executors.cpu.adapter import CpuAdapter, CpuPool
from kpolicy.executors.cpu.executor import CpuExecutor
from kpolicy.executors.cpu.graph import Graph
from kpolicy.executors.cpu.recorder import Recorder
from kpolicy.executors.cpu.streams import CpuEvent, CpuStream

__all__ = ["CpuAdapter", "CpuEvent", "CpuExecutor", "CpuPool", "CpuStream", "Graph", "Recorder"]
