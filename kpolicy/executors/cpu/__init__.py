"""The CPU as a device: a recorder of torch's operators, and the adapter over it. Needs torch."""

from __future__ import annotations

from kpolicy.executors.cpu.adapter import CpuAdapter, CpuPool
from kpolicy.executors.cpu.faults import CPU_FAULTS
from kpolicy.executors.cpu.graph import Graph
from kpolicy.executors.cpu.recorder import Recorder
from kpolicy.executors.cpu.streams import CpuEvent, CpuStream

__all__ = ["CPU_FAULTS", "CpuAdapter", "CpuEvent", "CpuPool", "CpuStream", "Graph", "Recorder"]
