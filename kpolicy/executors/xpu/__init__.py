"""Intel GPUs through torch.xpu, any device through torch.accelerator: `XpuExecutor`, `AcceleratorExecutor`.

`StreamAdapter` serves every device with `torch.cuda`'s names. Unverified on hardware.
"""

from kpolicy.executors.cuda.stream_adapter import StreamAdapter
from kpolicy.executors.xpu.accelerator import AcceleratorAdapter, AcceleratorExecutor
from kpolicy.executors.xpu.executor import StreamExecutor, XpuAdapter, XpuExecutor

__all__ = ["AcceleratorAdapter", "AcceleratorExecutor", "StreamAdapter", "StreamExecutor", "XpuAdapter", "XpuExecutor"]
