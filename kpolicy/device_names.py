"""What a device is called: as its executor (``ascend``), as torch has it (``npu``), and one of several (``cuda:1``).

`Engine(device=)`, `kpolicy.load(device=)` and the commands' ``--device`` take the same names.
"""

from __future__ import annotations

import re

import attrs

__all__ = ["DeviceName", "read_device"]

_TORCH = {"ascend": "npu", "kunlun": "cuda"}
"""torch's kind of device, where an executor of ours isn't called so"""
_EXECUTORS = {"npu": "ascend"}


@attrs.frozen
class DeviceName:
    """A device's name, read.

    Args:
        executor: the executor that runs models there; ``"auto"`` is the first that can.
        kind: torch's kind of device; ``"auto"`` is the first that is there, ``"accelerator"`` the one torch finds.
        index: which one of several; None is the current one.
    """

    executor: str
    kind: str
    index: int | None = None

    @property
    def torch(self) -> str:
        """As torch has it, such as ``npu:1``."""
        return self._numbered(self.kind)

    @property
    def given(self) -> str:
        """As its executor is called, or torch's kind where that was left open; `kpolicy.load` takes it."""
        return self.torch if self.executor == "auto" else self._numbered(self.executor)

    def _numbered(self, name: str) -> str:
        return name if self.index is None else f"{name}:{self.index}"


def read_device(device: object) -> DeviceName:
    """A name or a torch.device, read. Whether there is such a device shows when it is asked for memory."""
    text = str(device)
    if text == "cpu:0":  # torch's own name of the one CPU
        return DeviceName("cpu", "cpu")
    # Of the first that is there nobody knows how many there are, and there is one CPU.
    numbered = re.fullmatch(r"(?!auto:|cpu:)([^:]+):([0-9]{1,9})", text)
    name, index = (numbered[1], int(numbered[2])) if numbered else (text, None)
    return DeviceName(_EXECUTORS.get(name, name), _TORCH.get(name, name), index)
