"""`import_torch`: torch, also where a vendor's broken backend would keep it from importing.

``import torch`` loads every installed entry point of ``torch.backends`` and fails if one of them does: torch_npu
without CANN breaks torch for the CPU and for CUDA too. Here the same entry points are loaded after torch, one by one.
"""

from __future__ import annotations

import os
import sys
import warnings
from importlib import import_module
from importlib.metadata import entry_points

from kpolicy.errors import ConfigError

__all__ = ["import_torch"]

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def import_torch() -> dict[str, str]:
    """Import torch, if it isn't yet, and the vendors' backends that load.

    Returns:
        The backends that don't load, by name, and why. A warning says so too.

    Raises:
        ModuleNotFoundError: torch isn't installed.
        ConfigError: it is, and doesn't import.
    """
    if sys.modules.get("torch") is not None:
        return {}
    before = os.environ.get(AUTOLOAD)
    wanted = before in (None, "1") and bool(points := entry_points(group="torch.backends"))
    if wanted:
        os.environ[AUTOLOAD] = "0"
    try:
        import_module("torch")
    except ModuleNotFoundError:
        raise
    except (ImportError, OSError, RuntimeError) as error:
        raise ConfigError(f"torch doesn't import: {_line(error)}. `kpolicy doctor` says more.") from error
    finally:
        if wanted:
            os.environ.pop(AUTOLOAD) if before is None else os.environ.__setitem__(AUTOLOAD, before)
    broken: dict[str, str] = {}
    for point in points if wanted else ():
        try:
            point.load()()
        except Exception as error:  # noqa: BLE001, PERF203 - whatever a vendor's library raises
            broken[point.name] = f"{type(error).__name__}: {_line(error)}"
    for name, why in broken.items():
        warnings.warn(
            f"torch's backend {name} doesn't load ({why}); going on without its device. Repair or uninstall it; "
            "`kpolicy doctor` says more.",
            RuntimeWarning,
            stacklevel=2,
        )
    return broken


def _line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
