"""A loaded model's measured costs, and what a profile says it was measured on."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kpolicy import __version__
from kpolicy.costs import CostTable
from kpolicy.errors import ProfileError
from kpolicy.executors import calibrate as measured
from kpolicy.executors.cpu.naming import cpu_name
from kpolicy.registry import GraphRegistry
from kpolicy.schemas import Profile, write_profile
from kpolicy.serving.warm_up import warm_up
from kpolicy.settings import Settings
from kpolicy.what_runs import WhatRuns

if TYPE_CHECKING:
    from kpolicy.serving.hf_model import LoadedModel

__all__ = ["calibrate", "check_profile", "device_name", "save_profile", "versions"]


SLICE_S = 0.5
"""Seconds of measuring between two tells of progress, and beyond the allowance"""
_NEARLY = 0.99
"""The share that is told beyond it"""


def calibrate(
    executor: Any, registry: GraphRegistry, model: LoadedModel, settings: Settings, *, allowance_s: float = 10.0,
    least_rounds: int = 0, progress: Callable[[float], object] | None = None,
) -> CostTable:  # fmt: skip
    """Measure what launches take; see `kpolicy.executors.calibrate.calibrate`.

    Args:
        executor: as there.
        registry: as there.
        model: as there.
        settings: as there.
        allowance_s: as there.
        least_rounds: samples that every step has whatever the allowance. From two on all figures of a table are
            measured; what it doesn't come to has its default, as if padding took what rows take.
        progress: told now and then which share of the allowance is spent.
    """
    begun = time.perf_counter()
    # What a size's first use costs is then what a server's does, which has its kernels loaded.
    warm_up(executor, registry, model, settings)
    calibration = measured.Calibration(executor, registry, model, settings)
    try:
        done, left = False, allowance_s - (time.perf_counter() - begun)
        with calibration.undisturbed():
            while not done:
                slice_s = left if progress is None else min(left, SLICE_S)
                done = calibration.measure(SLICE_S if left <= 0 < least_rounds else slice_s)
                left = allowance_s - (time.perf_counter() - begun)
                done = done or (left <= 0 and calibration.rounds >= least_rounds)
                if progress is not None:
                    progress(1.0 if done else min(1.0 - left / allowance_s, _NEARLY))
        return calibration.table(_version(model))
    finally:
        calibration.end()


def device_name(device: torch.device | None = None) -> str:
    """What a device calls itself; a CPU with the threads that operators use."""
    if device is not None and device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    if device is not None and device.type != "cpu":
        named: Callable[[Any], Any] | None = getattr(torch.get_device_module(device), "get_device_name", None)
        return device.type if named is None else str(named(device))
    return cpu_name()


def versions() -> dict[str, str]:
    """Versions of the libraries that run the model."""
    import transformers

    return {"torch": str(torch.__version__), "transformers": transformers.__version__}


def _version(model: LoadedModel) -> str:
    at = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return f"measured {at} on {device_name(model.device)}, {model.full_name}"


def check_profile(profile: Profile, model: LoadedModel, name: str) -> None:
    """Refuse costs that were measured with another model or on another device than what is served, or over several.

    Args:
        profile: the profile; one that wasn't measured isn't looked at.
        model: what is served.
        name: what the profile is called.

    Raises:
        ProfileError: it is another model's or device's.
    """
    here = WhatRuns(device_name(model.device), model.full_name, 1, model.model_shape)
    for differs in filter(None, profile.costs.unlike(here)):
        raise ProfileError(f"{name} was {differs}. Leave it out to measure here, or run kpolicy calibrate.")


def save_profile(path: Path, costs: CostTable, model: LoadedModel, command: str) -> None:
    """Write a table as a profile, which ``--profile`` reads.

    Raises:
        ConfigError: the file can't be written.
    """
    write_profile(
        path,
        Profile(
            costs=costs, device=device_name(model.device), model=model.full_name,
            versions={"kpolicy": __version__, **versions()},
            measured_at=datetime.now(timezone.utc).isoformat(timespec="seconds"), command=command,
            tensor_parallel_size=1, model_shape=model.model_shape,
            kv_bytes_per_token=model.kv_bytes_per_token or None,
        ),
    )  # fmt: skip
