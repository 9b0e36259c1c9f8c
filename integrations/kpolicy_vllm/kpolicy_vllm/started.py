"""What happens once vLLM has captured its graphs: costs, then the policy decides."""

from __future__ import annotations

from typing import Any

from kpolicy.errors import KPolicyError
from kpolicy_vllm.state import LOGGER, State

__all__ = ["after_capture"]


def after_capture(state: State, modules: Any) -> None:
    """Find costs where the policy reads them, and let it decide. Called on every rank, after the last capture."""
    state.graphs_captured()
    if state.policy.reads_costs:
        _find_costs(state, modules)
    totals = state.registry.totals()
    LOGGER.info(
        "kpolicy: %d graphs, %.2f GiB, %.1f s; policy %s decides%s",
        len(state.ladder),
        totals.bytes_live / 2**30,
        totals.held.seconds,
        state.config.policy,
        f" by costs of the {state.costs_from}" if state.costs_from else "" if state.ready else " once it has costs",
    )
    if state.config.lazy:
        _attach_lazy(state)


def _find_costs(state: State, modules: Any) -> None:
    """Costs of a profile of this device, else measured now."""
    table = _profile_costs(state, modules.device_name())
    if table is not None:
        state.install_costs(table, "profile")
        return
    if not state.config.calibrate:
        return
    try:
        from kpolicy_vllm.calibrate import calibrate

        table = calibrate(state.runner, state)
    except Exception as error:  # noqa: BLE001 - timing is an extra, and serving goes on without it
        state.counters.warn_once(
            "calibration_failed",
            f"costs couldn't be measured: {type(error).__name__}: {error}. vLLM's own rule decides.",
        )
        return
    if table is not None:
        state.install_costs(table, "calibration")


def _profile_costs(state: State, device: str) -> Any:
    """The costs of the profile that the user named, if it is of this device; otherwise None."""
    if state.config.profile is None:
        return None
    from kpolicy.schemas import read_profile

    try:
        profile = read_profile(state.config.profile)
    except KPolicyError as error:
        state.counters.warn_once("bad_profile", f"{error} Costs are measured instead.")
        return None
    if profile.device != device:
        state.counters.warn_once(
            "other_device",
            f"profile {state.config.profile} was measured on {profile.device!r}, and this is {device!r}. "
            "Costs are measured instead.",
        )
        return None
    return profile.costs


def _attach_lazy(state: State) -> None:
    try:
        from kpolicy_vllm import lazy

        lazy.attach(state.runner, state)
    except Exception as error:  # noqa: BLE001 - capturing more graphs is an extra
        state.counters.warn_once("lazy_failed", f"lazy capture is off: {type(error).__name__}: {error}.")
