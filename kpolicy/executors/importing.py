"""`import_torch`: torch, also where a vendor's broken backend would keep it from importing.

``import torch`` loads every installed entry point of ``torch.backends`` and fails if one of them does: torch_npu
without CANN breaks torch for the CPU and for CUDA too. Here the same entry points are loaded after torch, one by one.

transformers imports torch_npu wherever it is installed, and fails with it. So a backend that doesn't load counts as not
installed for the rest of the process; who asks for its device is told why.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec

from kpolicy.errors import ConfigError

__all__ = ["first_line", "import_torch", "not_there", "why_broken"]

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_LOADED_ANYWAY = ("torch_npu",)
"""Backends that transformers imports, whatever torch does"""
_broken: dict[str, str] = {}


def why_broken(module: str) -> str:
    """Why a backend's module doesn't import, as `import_torch` found out; "" where it does or wasn't tried."""
    return _broken.get(module, "")


def import_torch(*, for_transformers: bool = False) -> dict[str, str]:
    """Import torch, if it isn't yet, and the vendors' backends that load.

    Where TORCH_DEVICE_BACKEND_AUTOLOAD turns loading off, none is loaded but those that transformers imports, and those
    only for who is about to import it.

    Args:
        for_transformers: the caller imports transformers next.

    Returns:
        The backends that don't load, by module, and why. A warning says so too, the first time.

    Raises:
        ModuleNotFoundError: torch isn't installed.
        ConfigError: it is, and doesn't import; or parts of it that transformers imports won't.
    """
    if for_transformers:
        _no_mere_folder("triton")
    points: Iterable[EntryPoint] = ()
    before = os.environ.get(AUTOLOAD)
    autoload = before in (None, "1")
    if sys.modules.get("torch") is None:
        points = entry_points(group="torch.backends") if autoload else ()
        if points:
            os.environ[AUTOLOAD] = "0"
        try:
            import_module("torch")
        except ModuleNotFoundError:
            raise
        # A library may call sys.exit when imported.
        except (ImportError, OSError, RuntimeError, SystemExit) as error:
            raise ConfigError(f"torch doesn't import: {first_line(error)}. `kpolicy doctor` says more.") from error
        finally:
            if before is None:
                os.environ.pop(AUTOLOAD, None)
            else:
                os.environ[AUTOLOAD] = before
    for point in points:
        _try(point.value.partition(":")[0].partition(".")[0], point)
    for module in _LOADED_ANYWAY if autoload or for_transformers else ():
        if module not in sys.modules and find_spec(module) is not None:
            _try(module, None)
    return dict(_broken)


def _no_mere_folder(name: str) -> None:
    """Where a package isn't installed a folder of its name is one to Python, empty: torch looks for triton and fails.

    Raises:
        ConfigError: there is such a folder on the import path.
    """
    spec = getattr(sys.modules[name], "__spec__", None) if name in sys.modules else find_spec(name)
    if spec is not None and spec.origin is None:
        folder = next(iter(spec.submodule_search_locations or ()), name)
        raise ConfigError(
            f"the folder {folder} is on Python's import path and is taken for the package {name}, with which torch "
            "doesn't import whole. Start from another folder, or rename it."
        )


def _try(module: str, point: EntryPoint | None) -> None:
    try:
        if point is None:
            import_module(module)
        else:
            point.load()()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a vendor's library raises
        _broken[module] = f"{type(error).__name__}: {first_line(error)}"
        # As Python marks what can't be imported.
        sys.modules[module] = None  # type: ignore[assignment]
        warnings.warn(
            f"torch's backend {module} doesn't load ({_broken[module]}); going on as if it weren't installed. Repair "
            "or uninstall it; `kpolicy doctor` says more.",
            RuntimeWarning,
            stacklevel=3,
        )


def not_there(device: object, error: Exception) -> ConfigError:
    """What to say of a device that torch can't have, by what its library raised."""
    return ConfigError(f"device {str(device)!r} isn't there: {first_line(error)}. `kpolicy doctor` says what is.")


def first_line(error: BaseException) -> str:
    """The first line of what an error says; its type where it says nothing."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
