"""Costs from a device's published figures, where the policy reads costs and nothing on this device measures any."""

from __future__ import annotations

from typing import Any

from kpolicy.costs import CostTable, analytic_costs
from kpolicy.figures import config_costs
from kpolicy_vllm.state import LOGGER, State

__all__ = ["with_published_costs"]


def with_published_costs(runner: Any, state: State, device: str) -> None:
    """After the captures, costs from published figures where the policy reads some and there are none.

    Args:
        runner: vLLM's runner, before its captures.
        state: what kpolicy knows of this vLLM.
        device: its name in `kpolicy.figures`.
    """
    capture = runner.capture_model

    def capture_model(*args: Any, **named: Any) -> Any:
        result = capture(*args, **named)
        if state.costs is None and state.policy.reads_costs:
            state.install_costs(_figures(runner, device), "published figures of the device, not measured")
        return result

    runner.capture_model = capture_model


def _figures(runner: Any, device: str) -> CostTable:
    try:
        return config_costs(runner.vllm_config.model_config.hf_text_config.to_dict(), device)
    # A config of a model whose weights aren't known here, or one that isn't a mapping.
    except Exception as error:  # noqa: BLE001
        LOGGER.warning("kpolicy: costs are those of an 8B model, as this model's can't be told: %s", error)
        return analytic_costs()
