"""`CudaExecutor`: runs a step model on a CUDA device in every mode."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kpolicy.executors.cuda.adapter import CudaAdapter
from kpolicy.executors.faults import Fault
from kpolicy.executors.launcher import GraphLauncher
from kpolicy.executors.runner import ModeRunner
from kpolicy.executors.step_model import StepModel

__all__ = ["CudaExecutor"]


class CudaExecutor(ModeRunner):
    """A step model on a CUDA device.

    Args:
        model: the model, for example of `kpolicy.load`; its tensors are on the device.
        device: the device; the model's own, or the current one.
        max_num_reqs: most rows of a launch that replays; the model's own by default.
        faults: faults to inject, as `Fault` or text such as ``"replay_fails@3"``.
        check: look before each replay whether weights and KV are where the graph was captured with them, and before
            each launch whether every value of its inputs can be (`input_values`). It costs a look at each of them.

    Raises:
        ConfigError: the device isn't there, or an argument can't be used.
    """

    def __init__(
        self,
        model: StepModel,
        *,
        device: Any = None,
        max_num_reqs: int | None = None,
        faults: Iterable[Fault | str] = (),
        check: bool = False,
    ) -> None:
        at = getattr(model, "device", "cuda") if device is None else device
        self.adapter = CudaAdapter(at, check=check, statics=getattr(model, "static_tensors", None), faults=faults)
        self.model = model
        super().__init__(GraphLauncher(self.adapter, model, max_num_reqs=max_num_reqs))
