"""`executor_on`: the executor of a model, by what its device is called."""

from __future__ import annotations

from typing import Any

from kpolicy.device_names import read_device
from kpolicy.errors import ConfigError
from kpolicy.executors import first_executor, get_executor, of_settings
from kpolicy.executors.base import Executor
from kpolicy.settings import Settings

__all__ = ["executor_on"]


def executor_on(
    model: Any, device: object, settings: Settings | None, **arguments: Any
) -> tuple[Executor, dict[str, str]]:
    """The executor that runs a model on a device, and with ``"auto"`` why those before it couldn't.

    Args:
        model: a step model.
        device: as `kpolicy.device_names.read_device` reads it; None is ``"auto"``.
        settings: an Engine's, for what an executor takes of them.
        **arguments: for the executor, besides the model.

    Raises:
        ConfigError: see `first_executor` and `get_executor`; or the model is on another one of several devices.
    """
    name = read_device("auto" if device is None else device)
    if name.executor == "auto":
        return first_executor(model, settings, **arguments)
    at = getattr(model, "device", None)
    here = read_device(at)
    if name.index is not None and (at is None or here.index != name.index):
        raise ConfigError(
            f"device is {str(device)!r}, and the model {'says no device' if at is None else f'is on {str(at)!r}'}. "
            f"Load it with device={str(device)!r}, or leave the number out: an executor runs a model where it is."
        )
    return get_executor(name.executor, model=model, **arguments, **of_settings(name.executor, settings)), {}
