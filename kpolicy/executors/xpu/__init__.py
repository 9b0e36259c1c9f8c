"""Intel GPUs through torch.xpu: `XpuExecutor`. `StreamAdapter` serves every device with `torch.cuda`'s names.

Unverified on hardware.
"""

from kpolicy.executors.xpu.adapter import StreamAdapter
from kpolicy.executors.xpu.executor import XpuAdapter, XpuExecutor

__all__ = ["StreamAdapter", "XpuAdapter", "XpuExecutor"]
