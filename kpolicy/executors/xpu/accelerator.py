"""`AcceleratorExecutor`: any device whose library stands behind `torch.accelerator`, from torch 2.13 on.

`torch.accelerator.Graph` is one graph class for all of them: capture, replay and pools, and no rewriting of arguments.
Unverified on hardware.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from kpolicy.errors import ConfigError
from kpolicy.executors.base import ProbeReport, ProbeStatus
from kpolicy.executors.cuda.stream_adapter import Statics, StreamAdapter
from kpolicy.executors.faults import Fault
from kpolicy.executors.importing import not_there
from kpolicy.executors.xpu.executor import LibraryExecutor

__all__ = ["AcceleratorAdapter", "AcceleratorExecutor", "TorchAccelerator"]


class TorchAccelerator:
    """`torch.accelerator` under the names that `torch.cuda` has for the same, for one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._torch: Any = torch.accelerator
        self.Graph: Any = getattr(torch.accelerator, "Graph", None)

    def Stream(self, device: Any, priority: int = 0) -> Any:  # noqa: N802 - torch's name
        return torch.Stream(device=device, priority=priority)

    def Event(self, enable_timing: bool = False) -> Any:  # noqa: N802 - torch's name
        return torch.Event(device=self._device, enable_timing=enable_timing)

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = stream
        return context

    def current_stream(self, device: Any) -> Any:
        return self._torch.current_stream(device)

    def graph_pool_handle(self) -> None:
        """No pool comes before its first graph here."""

    def synchronize(self, device: Any) -> None:
        self._torch.synchronize(device)

    def mem_get_info(self, device: Any) -> tuple[int, int]:
        free, total = self._torch.get_memory_info(device)
        return free, total

    def empty_cache(self) -> None:
        self._torch.empty_cache()


class AcceleratorAdapter(StreamAdapter):
    """The primitives of one device behind `torch.accelerator`.

    Args:
        device: the device, by torch's name for it; the current accelerator by default.
        library: what stands in for `TorchAccelerator`; with one, tensors may be on any device.
        check, statics, faults: as `StreamAdapter` has them.

    Raises:
        ConfigError: there is no such device, or this torch has no graphs for all accelerators.
    """

    def __init__(
        self, device: Any = None, *, library: Any = None, check: bool = False, statics: Statics | None = None,
        faults: Iterable[Fault | str] = (),
    ) -> None:  # fmt: skip
        at = torch.device("cpu" if device is None else device) if library is not None else _device(device)
        found = TorchAccelerator(at) if library is None else library
        if getattr(found, "Graph", None) is None:
            raise ConfigError(
                f"torch {torch.__version__} has no torch.accelerator.Graph; torch 2.13 has it. With an older one use "
                "the executor of the device itself."
            )
        report = ProbeReport(
            "accelerator", ProbeStatus.USABLE, f"{at} through torch.accelerator.Graph; unverified on hardware",
            facts={"torch": str(torch.__version__), "device": str(at)},
        )  # fmt: skip
        super().__init__(
            "accelerator", found, at, begin=self._new_graph, report=report, check=check, statics=statics, faults=faults
        )

    def _new_graph(self, handle: Any) -> Any:
        # Some backends know one mode alone and refuse to be told; CUDA's default would stop other threads' work.
        mode = "thread_local" if self.device.type == "cuda" else "default"
        graph = self.device_module.Graph(pool=handle, capture_error_mode=mode)
        graph.capture_begin()
        return graph


def _device(device: Any) -> torch.device:
    """The device with its index.

    Raises:
        ConfigError: it isn't there, or isn't an accelerator.
    """
    current: Any = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if current is None:
        raise ConfigError(
            f"device {str(device)!r} isn't there: torch.accelerator finds none. `kpolicy doctor` says more."
        )
    try:
        at = torch.device(current if device is None else device)
        torch.empty(1, device=at)
    # Each library has errors of its own.
    except Exception as error:
        raise not_there(device, error) from error
    if at.type != current.type:
        raise ConfigError(f"device is {str(device)!r}; the accelerator of this torch is {current.type!r}.")
    return at if at.index is not None else torch.device(at.type, torch.accelerator.current_device_index())


class AcceleratorExecutor(LibraryExecutor):
    """A step model on any device behind `torch.accelerator`, by default the current one; see `LibraryExecutor`.

    FULL graphs of attention that takes lengths on the host are refused: nothing here rewrites them. Unverified on
    hardware.
    """

    adapter_class = AcceleratorAdapter
    default_device = None
