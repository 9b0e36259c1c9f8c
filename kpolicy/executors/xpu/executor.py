"""`XpuExecutor`: a step model on an Intel GPU through torch's own `torch.xpu`; `StreamExecutor`, what it is made of.

Unverified on hardware.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch

from kpolicy.errors import ConfigError
from kpolicy.executors.base import ProbeReport, ProbeStatus
from kpolicy.executors.cuda.stream_adapter import Statics, StreamAdapter
from kpolicy.executors.faults import Fault
from kpolicy.executors.runner import ModeRunner
from kpolicy.executors.step_model import StepModel
from kpolicy.executors.xpu.launcher import LiveLengthsLauncher

__all__ = ["LibraryExecutor", "StreamExecutor", "XpuAdapter", "XpuExecutor"]


class XpuAdapter(StreamAdapter):
    """The primitives of one Intel GPU: `torch.xpu.XPUGraph`s, which have no capture error mode.

    Args:
        device: the device; the current one where it has no index.
        library: `torch.xpu`, or what stands in for it; with one, tensors may be on any device.
        check, statics, faults: as `StreamAdapter` has them.

    Raises:
        ConfigError: there is no such device, or this torch has no graphs for it.
    """

    def __init__(
        self, device: Any = "xpu", *, library: Any = None, check: bool = False, statics: Statics | None = None,
        faults: Iterable[Fault | str] = (),
    ) -> None:  # fmt: skip
        found: Any = torch.xpu if library is None else library
        at = torch.device(device)
        if library is None and at.type != "xpu":
            raise ConfigError(
                f"device is {str(device)!r}; the XPU adapter takes 'xpu' or 'xpu:N'. Load a model that is elsewhere "
                "there: kpolicy.load(..., device='xpu')."
            )
        if not found.is_available():
            raise ConfigError(
                f"device {str(device)!r} isn't there: torch.xpu finds no GPU. `kpolicy doctor` says more."
            )
        if not hasattr(found, "XPUGraph"):
            raise ConfigError(f"torch {torch.__version__} has no XPUGraph; torch 2.11 or newer has it.")
        if at.type == "xpu" and at.index is None:
            at = torch.device("xpu", found.current_device())
        report = ProbeReport(
            "xpu", ProbeStatus.USABLE, f"{found.get_device_name(at)}; unverified on hardware",
            facts={"torch": str(torch.__version__)},
        )  # fmt: skip
        super().__init__(
            "xpu", found, at, begin=self._new_graph, report=report, check=check, statics=statics, faults=faults
        )

    def _new_graph(self, handle: Any) -> Any:
        graph = self.device_module.XPUGraph()
        graph.capture_begin(pool=handle)
        return graph


class StreamExecutor(ModeRunner):
    """A step model over an adapter of such a device. What a plugin's executor is made of: see docs/plugin.md.

    FULL graphs of attention that takes lengths on the host are refused: nothing here rewrites them.

    Args:
        model: the model; its tensors are on the device.
        adapter: the device.
        max_num_reqs: most rows of a launch that replays; the model's own by default.
    """

    def __init__(self, model: StepModel, adapter: StreamAdapter, *, max_num_reqs: int | None = None) -> None:
        self.model = model
        self.adapter = adapter
        super().__init__(LiveLengthsLauncher(adapter, model, max_num_reqs=max_num_reqs))


class LibraryExecutor(StreamExecutor):
    """A step model on a device whose adapter torch's own library is enough for. Unverified on hardware.

    Args:
        model: the model, for example of `kpolicy.load`; its tensors are on the device.
        device: the device; the model's own, or `default_device`.
        max_num_reqs: most rows of a launch that replays; the model's own by default.
        library: what stands in for torch's library.
        faults, check: as `CudaExecutor` has them.

    Raises:
        ConfigError: the device isn't there, or this torch has no graphs for it.
    """

    adapter_class: ClassVar[type[Any]]
    default_device: ClassVar[Any]

    def __init__(
        self,
        model: StepModel,
        *,
        device: Any = None,
        max_num_reqs: int | None = None,
        library: Any = None,
        faults: Iterable[Fault | str] = (),
        check: bool = False,
    ) -> None:
        at = getattr(model, "device", self.default_device) if device is None else device
        statics = getattr(model, "static_tensors", None)
        adapter = self.adapter_class(at, library=library, check=check, statics=statics, faults=faults)
        super().__init__(model, adapter, max_num_reqs=max_num_reqs)


class XpuExecutor(LibraryExecutor):
    """A step model on an Intel GPU, by default the current one; see `LibraryExecutor`. Unverified on hardware."""

    adapter_class = XpuAdapter
    default_device = "xpu"
