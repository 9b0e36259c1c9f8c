"""`CpuExecutor`: runs a step model on the CPU in every mode."""

from __future__ import annotations

from collections.abc import Iterable

from kpolicy.errors import ConfigError
from kpolicy.executors.cpu.adapter import CpuAdapter
from kpolicy.executors.faults import Fault
from kpolicy.executors.launcher import GraphLauncher
from kpolicy.executors.runner import ModeRunner
from kpolicy.executors.step_model import StepModel

__all__ = ["CpuExecutor"]


class CpuExecutor(ModeRunner):
    """A step model on the CPU.

    Args:
        model: the model, for example of `kpolicy.load`.
        max_num_reqs: most rows of a launch that replays; the model's own by default.
        faults: faults to inject, as `Fault` or text such as ``"before_launch@3"``; see `DEVICE_FAULTS`.
        check: look before each replay whether memory from outside is still where it was recorded, and before each
            launch whether every value of its inputs can be.
        memory_bytes: what static buffers and graphs may take in all; None is without a limit of ours.

    Raises:
        ConfigError: the model isn't on the CPU, or an argument can't be used.
    """

    def __init__(
        self,
        model: StepModel,
        *,
        max_num_reqs: int | None = None,
        faults: Iterable[Fault | str] = (),
        check: bool = False,
        memory_bytes: int | None = None,
    ) -> None:
        at = str(getattr(model, "device", None) or "cpu")
        if at.partition(":")[0] != "cpu":
            raise ConfigError(
                f"the model is on {at!r}, and the CPU executor runs those on the CPU. Load it with device='cpu', or "
                "name the executor of its device."
            )
        self.adapter = CpuAdapter(memory_bytes=memory_bytes, check=check, faults=faults)
        self.model = model
        super().__init__(GraphLauncher(self.adapter, model, max_num_reqs=max_num_reqs))
