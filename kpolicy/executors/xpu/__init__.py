"""Devices whose graphs, streams and events have `torch.cuda`'s names: `StreamAdapter`. Unverified on hardware."""

from kpolicy.executors.xpu.adapter import StreamAdapter

__all__ = ["StreamAdapter"]
