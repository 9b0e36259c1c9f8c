"""What an Ascend device and its software allow: `detect_stack`, and the budget that follows.

Each fact can be given instead: a stack, a budget, or none. Unverified on hardware.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kpolicy.budget_models import AscendParallel, AscendStack, BudgetModel, ModelShape, ascend_budget
from kpolicy.errors import ConfigError
from kpolicy.modes import Part

__all__ = ["detect_parallel", "detect_stack", "model_shape", "stack_budget"]

# Names of chips as torch_npu gives them, by generation, in the order in which they are tried.
_GENERATIONS = (("950", r"ascend950"), ("A3", r"ascend910_93"), ("A2", r"ascend910b"), ("A2", r"ascend"))


def detect_stack(torch_npu: Any, device: Any) -> AscendStack:
    """The chip's generation and the versions of driver and toolkit; what can't be found out counts as old."""
    name = str(torch_npu.npu.get_device_name(device)).lower().replace("-", "_")
    soc = next((soc for soc, pattern in _GENERATIONS if re.search(pattern, name)), "A2")
    return AscendStack(soc=soc, hdk=_version(torch_npu, "DRIVER"), cann=_version(torch_npu, "CANN"))


def _version(torch_npu: Any, module: str) -> str | None:
    try:
        found = str(torch_npu.npu.utils.get_cann_version(module))
    # An older torch_npu has no such function, or knows no such module.
    except Exception:  # noqa: BLE001
        return None
    number = re.match(r"\d+(?:\.\w+)*", found)
    return number[0] if number else None


def detect_parallel(environ: Mapping[str, str]) -> AscendParallel:
    """One rank, with the expansion of collectives that the environment names."""
    return AscendParallel(aiv=environ.get("HCCL_OP_EXPANSION_MODE", "").upper() == "AIV")


def model_shape(model: Any) -> ModelShape:
    """What the stream formula reads of a step model: its layers with attention.

    Raises:
        ConfigError: the model doesn't say how many it has.
    """
    layers = getattr(model, "layers", None)
    count = len(layers) if layers is not None else len(model.kv_caches())
    if not count:
        raise ConfigError("the model has no layers to count; give AscendExecutor(shape=ModelShape(num_layers=...)).")
    kinds = str(getattr(getattr(model, "config", None), "model_type", ""))
    moe = any(hasattr(getattr(model, "config", None), name) for name in ("num_experts", "n_routed_experts")) or (
        "moe" in kinds or "mixtral" in kinds
    )
    return ModelShape(num_layers=count, moe=moe)


def stack_budget(stack: AscendStack, shape: ModelShape, parallel: AscendParallel, num_sizes: int) -> BudgetModel:
    """What graphs of both parts may take on a stack."""
    return ascend_budget(stack, shape, parallel, num_sizes=num_sizes, parts=tuple(Part))
