"""Whether a Kunlun card is there: `load_xmlir`, `count_devices`, and `kunlun_behind_cuda` for who would use CUDA.

Positive proof alone: torch_xmlir imports and counts a device itself. What `torch.cuda` says of itself there (a device
called "GPU" of capability 8.6) proves nothing.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from kpolicy.errors import ConfigError
from kpolicy.executors.importing import first_line

__all__ = ["count_devices", "installed", "kunlun_behind_cuda", "kunlun_cards", "load_xmlir"]

_DISGUISE = "GPU", (8, 6)
"""Name and capability that torch_xmlir gives its cards; no NVIDIA GPU goes by that name"""


def load_xmlir() -> Any:
    """torch_xmlir.

    Raises:
        ConfigError: it isn't there or doesn't import.
    """
    try:
        return import_module("torch_xmlir")
    except ModuleNotFoundError as error:
        if error.name != "torch_xmlir":
            raise ConfigError(f"torch_xmlir doesn't import: {error}. Reinstall the vendor's xpytorch.") from error
        raise ConfigError(
            "torch_xmlir isn't installed; a Kunlun card needs the vendor's xpytorch over the torch it is made for."
        ) from error
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        line = first_line(error)
        raise ConfigError(f"torch_xmlir doesn't import: {line}. `kpolicy doctor` says more.") from error


def count_devices(xmlir: Any) -> tuple[int, str]:
    """Kunlun cards as torch_xmlir itself counts them, and by what.

    Raises:
        ConfigError: it has no way to count.
    """
    counter = getattr(getattr(xmlir, "_XMLIRC", None), "_xpu_get_devices_number", None)
    if counter is not None:
        return int(counter()), "torch_xmlir._XMLIRC._xpu_get_devices_number()"
    counter = getattr(getattr(xmlir, "xpu", None), "device_count", None)
    if counter is None:
        raise ConfigError(
            "torch_xmlir is installed in part: it has neither _XMLIRC nor xpu.device_count to prove a card by. "
            "Reinstall the vendor's xpytorch."
        )
    return int(counter()), "torch_xmlir.xpu.device_count()"


def kunlun_cards() -> int:
    """Kunlun cards that torch_xmlir counts; 0 where it isn't there, doesn't load or can't count."""
    if not installed():
        return 0
    try:
        return count_devices(load_xmlir())[0]
    except ConfigError:
        return 0


def kunlun_behind_cuda(name: str, capability: tuple[int, ...]) -> str:
    """Why a device of `torch.cuda` may not be used as NVIDIA's or AMD's; "" where it may.

    Args:
        name: what torch calls the device.
        capability: its capability.
    """
    if not installed():
        return ""
    try:
        count, proof = count_devices(load_xmlir())
    except ConfigError as error:
        if (name, tuple(capability)) != _DISGUISE:
            return ""
        return f"it is called {name!r}, as Kunlun cards are, and can't be proved to be one: {error}"
    return f"{proof} finds {count} Kunlun cards behind it. Use device='kunlun'." if count else ""


def installed() -> bool:
    """Whether there is a torch_xmlir to ask; one that didn't load and was marked as missing is none."""
    if sys.modules.get("torch_xmlir") is not None:
        return True
    try:
        return find_spec("torch_xmlir") is not None
    except (ImportError, ValueError):
        return False
