"""What happens once vLLM has captured its graphs: costs, then the policy decides."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

from kpolicy.errors import KPolicyError
from kpolicy.what_runs import WhatRuns
from kpolicy_vllm import host
from kpolicy_vllm.ladder import plan_differs
from kpolicy_vllm.mirror import enter_others
from kpolicy_vllm.state import LOGGER, State, engine_number
from kpolicy_vllm.watch import Watch

__all__ = ["NO_GRAPHS", "after_capture", "before_capture"]

NO_GRAPHS = "there is nothing to decide: vLLM captures no graphs of this model, as its log says of cudagraph_mode."
"""Where vLLM gave graphs up once attention had said what it supports"""


def before_capture(state: State) -> None:
    """Graphs are about to be captured: those of an earlier capture are gone."""
    if state.captured:
        state.captured = False
        for pool in state.registry.pools():
            state.registry.evict_generation(pool.name)
        state.recompile()


def after_capture(state: State, modules: Any, taken: tuple[Any, float] = (0, 0.0)) -> None:
    """Find costs where the policy reads them, and let it decide. Called on every rank, after the last capture.

    An engine that captures anew may be serving: nothing is timed then, as made-up rows would write over requests' KV.

    Args:
        state: what kpolicy knows of this vLLM.
        modules: the names of vLLM's that the version's adapter found.
        taken: bytes and seconds of all captures, as vLLM counted them.
    """
    again, state.started = state.started, True
    with state.guard("plan_not_checked", "comparing the plan with the model"):
        _check_plan(state)
    everywhere = state.together("policy_failed", "preparing the policy", lambda: _decide(state, modules, again=again))
    if not everywhere and not state.broken:
        state.fail("prepared", RuntimeError("another rank couldn't"))
        state.dispatcher.refresh()
    if state.config.split and state.costs is None:
        why = f"decodes and prompts run together, as costs decide that and {_why_no_costs(state)}."
        state.counters.warn_once("not_split", why)
    if state.config.paces and state.costs is None:
        why = f"steps are filled to vLLM's limit, as costs bound them and {_why_no_costs(state)}."
        state.counters.warn_once("not_paced", why)
    with state.guard("not_recorded", "entering others' graphs into the registry"):
        enter_others(state, state.runner, bytes=taken[0] if isinstance(taken[0], int) else 0, seconds=taken[1])
    with state.guard("summary_failed", "summing up the start"):
        _say(state)
    if again:
        return
    if state.config.lazy:
        _attach_lazy(state)
    if state.config.follow_host:
        with state.guard("host_speed_failed", "following the host's speed", "costs stay as they were measured"):
            host.attach(state.runner, state)
    with state.guard("log_failed", "opening the decision log"):
        if state.config.decision_log is not None and modules.first_rank():
            _open_log(state, modules.device_name())
    with state.guard("metrics_failed", "telling counts to the front end"):
        if modules.first_rank():
            Watch(state, _publisher(state)).start()


def _why_no_costs(state: State) -> str:
    if not state.dispatcher.chooser.desc_of:
        return "there are none: vLLM captures no graphs"
    if not state.policy.reads_costs:
        return f"policy {state.config.policy!r} reads none"
    return "there are none: they couldn't be measured, or calibrate is off"


def _decide(state: State, modules: Any, *, again: bool) -> None:
    """Find costs where they are read, the first time, and prepare the policy."""
    state.graphs_captured()
    if not state.dispatcher.chooser.desc_of:
        state.counters.warn_once("graphs_off", NO_GRAPHS)
    elif state.policy.reads_costs and not again:
        _find_costs(state, modules)
    if state.dispatcher.deciding:
        state.dispatcher.chooser.prepare()
    if state.broken:
        raise RuntimeError("the policy raised, as was said")


def _say(state: State) -> None:
    """One line on what was captured, and what decides."""
    if not state.dispatcher.chooser.desc_of:
        return
    totals = state.registry.totals()
    LOGGER.info(
        "kpolicy: %d graphs, %.2f GiB, %.1f s; policy %s decides%s",
        len(state.ladder),
        totals.bytes_live / 2**30,
        totals.held.seconds,
        state.config.policy,
        f" by costs of the {state.costs_from}" if state.costs_from else "" if state.ready else " once it has costs",
    )


def _check_plan(state: State) -> None:
    """Say so where the plan's sizes were chosen for another kind of attention."""
    if state.config.plan is not None:
        differs = plan_differs(state.config.plan, state.claims)
        if differs:
            state.counters.warn_once(
                "plan_of_another_model",
                f"plan {state.config.plan} was made for {differs}: it is another model's. Its sizes are captured as "
                "far as they can be; plan again for this model.",
            )


def _find_costs(state: State, modules: Any) -> None:
    """Costs of a profile of this device, else measured now."""
    table = None
    if state.config.profile is not None:
        with state.guard("bad_profile", "reading the profile", "costs are measured"):
            table = _profile_costs(state, modules.device_name())
        table = state.broadcast(table)
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
        if state.config.save_profile is not None and modules.first_rank():
            with state.guard("profile_not_saved", "saving the profile"):
                _save_profile(state, modules.device_name())


def _profile_costs(state: State, device: str) -> Any:
    """The costs of the profile that the user named, if it is of this device and model; otherwise None."""
    if state.config.profile is None:
        return None
    from kpolicy.profiles import load_profile

    try:
        profile = load_profile(state.config.profile)
    except KPolicyError as error:
        state.counters.warn_once("bad_profile", f"{error} Costs are measured instead.")
        return None
    model = str(state.runner.vllm_config.model_config.model)
    unlike = profile.costs.unlike(WhatRuns(device, model, _tensor_parallel_size(state)))
    for event, differs in zip(("other_device", "other_model", "other_tensor_parallel_size"), unlike, strict=True):
        if differs:
            state.counters.warn_once(
                event, f"profile {state.config.profile} was {differs}. Costs are measured instead."
            )
            return None
    return profile.costs


def _tensor_parallel_size(state: State) -> int:
    return int(state.runner.vllm_config.parallel_config.tensor_parallel_size)


def _save_profile(state: State, device: str) -> None:
    """Keep the measured costs for the next start, where the user wants them kept."""
    from kpolicy import __version__
    from kpolicy.schemas import Profile, write_profile

    assert state.timed is not None  # noqa: S101 - they were just measured
    profile = Profile(
        costs=state.timed,
        device=device,
        model=str(state.runner.vllm_config.model_config.model),
        versions={"kpolicy": __version__, "vllm": state.vllm_version},
        measured_at=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        command="kpolicy-vllm, at start-up",
        tensor_parallel_size=_tensor_parallel_size(state),
    )
    try:
        write_profile(str(state.config.save_profile), profile)
    except KPolicyError as error:
        state.counters.warn_once("profile_not_saved", str(error))


def _publisher(state: State) -> Callable[[], None] | None:
    """How counters reach vLLM's metrics page; None where they needn't, or mustn't."""
    if not state.config.metrics:
        return None
    from kpolicy_vllm.metrics import publisher

    config = state.runner.vllm_config
    return publisher(state, str(config.instance_id), engine_number(config))


def _open_log(state: State, device: str) -> None:
    """Write every step from now on."""
    from kpolicy_vllm.decision_log import DecisionLog

    try:
        log = DecisionLog(str(state.config.decision_log), state, device)
    except KPolicyError as error:
        state.counters.warn_once("log_failed", f"there is no decision log: {error}")
        return
    state.log = log
    runner, dispatcher = state.runner, state.dispatcher
    if hasattr(runner, "cudagraph_dispatcher"):
        dispatcher.log = log.step_of_runner_1
        return
    prepare = runner.prepare_inputs

    def prepare_inputs(*args: Any, **named: Any) -> Any:
        batch = prepare(*args, **named)
        if dispatcher.last is not None:
            log.step_of_runner_2(dispatcher.last, batch)
        return batch

    runner.prepare_inputs = prepare_inputs


def _attach_lazy(state: State) -> None:
    try:
        from kpolicy_vllm import lazy

        lazy.attach(state.runner, state)
    except Exception as error:  # noqa: BLE001 - capturing more graphs is an extra
        state.counters.warn_once("lazy_failed", f"lazy capture is off: {type(error).__name__}: {error}.")
