"""`register`: what vLLM calls in each of its processes, through the entry point group ``vllm.general_plugins``.

Two of vLLM's methods are wrapped, and the wrappers do nothing unless kpolicy is on for the engine at hand: where the
configuration sets its capture sizes, and where a worker has made its runner. All else is attached to that one runner.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import attrs

from kpolicy.errors import KPolicyError
from kpolicy.ladders import CaptureSizes
from kpolicy.settings import Settings
from kpolicy_vllm import kunlun
from kpolicy_vllm.config import SECTION, Config
from kpolicy_vllm.ladder import describe, one_list, sizes_of, wide_layers
from kpolicy_vllm.metrics import announce
from kpolicy_vllm.state import LISTED, LOGGER, PROCESS, State, held_by, settings_of, state_of
from kpolicy_vllm.versions import Adapter, UnsupportedError, adapter

__all__ = ["register"]

_MARK = "_kpolicy"
_WITHOUT = {
    "split": ("not_split", "decodes and prompts are scheduled together"),
    "pace": ("not_paced", "steps are filled to vLLM's limit"),
}
"""The event where a setting can't be had, and what is then"""


def register() -> None:
    """Wrap vLLM's two methods, once in a process. A vLLM that isn't known is left alone, with a warning."""
    try:
        kunlun.register()
    except Exception as error:  # noqa: BLE001 - whatever it is, vLLM-Kunlun serves on with vLLM's own wrapper
        LOGGER.warning("kpolicy's graph wrapper for Kunlun is off: %s: %s", type(error).__name__, error)
    try:
        found = adapter()
        wrapped = [
            _wrap(found.config_class, "_set_cudagraph_sizes", functools.partial(_sizes_set, found)),
            _wrap(found.worker_wrapper_class, "init_device", functools.partial(_device_ready, found)),
        ]
        if not any(wrapped):
            PROCESS.warn_once(
                "loaded_twice", "the plugin was loaded twice in this process; the second time does nothing."
            )
            announce("")
    except Exception as error:  # noqa: BLE001 - vLLM calls this in every process, on or off, and catches nothing
        what = str(error) if isinstance(error, UnsupportedError) else f"{type(error).__name__}: {error}"
        PROCESS.warn_once("other_vllm", f"it is off, and vLLM runs as if it weren't installed: {what}")
        announce("")


def _wrap(owner: type[Any], name: str, around: Callable[..., Any]) -> bool:
    """Replace a method by ``around(original, self, ...)``, unless that was done before; whether it was replaced."""
    original = getattr(owner, name)
    if getattr(original, _MARK, False):
        return False

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **named: Any) -> Any:
        return around(original, self, *args, **named)

    setattr(wrapped, _MARK, True)
    setattr(owner, name, wrapped)
    return True


def _refused(vllm_config: Any, event: str, message: str) -> None:
    """Say and count why kpolicy is off for this engine, and keep it off in every process of its."""
    PROCESS.warn_of_each(event, message)
    announce("")
    if isinstance(vllm_config.additional_config, dict):
        vllm_config.additional_config = {**vllm_config.additional_config, SECTION: False}


def _sizes_set(found: Adapter, original: Callable[..., Any], vllm_config: Any) -> None:
    """vLLM's sizes, then ours in their place."""
    compilation = vllm_config.compilation_config
    listed = compilation.cudagraph_capture_sizes
    original(vllm_config)
    sizes, largest = compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size
    try:
        config = Config.load(vllm_config.additional_config)
        if config is not None and vllm_config.model_config is not None:
            _configure(found, vllm_config, config, listed)
    except Exception as error:  # noqa: BLE001 - whatever it is, vLLM serves on
        compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = sizes, largest
        what = str(error) if isinstance(error, KPolicyError) else f"{type(error).__name__}: {error}"
        _refused(vllm_config, "bad_setting", f"it is off, and vLLM's own rule and sizes stay: {what}")


def _configure(found: Adapter, vllm_config: Any, config: Config, listed: list[int] | None) -> None:
    compilation = vllm_config.compilation_config
    if not compilation.cudagraph_capture_sizes:
        why = "there is nothing to decide: CUDA graphs are off (enforce_eager, or cudagraph_mode NONE)."
        _refused(vllm_config, "graphs_off", why)
        return
    if getattr(vllm_config.parallel_config, "enable_elastic_ep", False):
        why = "engines that join later (enable_elastic_ep) have none of the others' costs, so vLLM's own rule decides."
        _refused(vllm_config, "elastic", why)
        return
    from kpolicy.schemas import read_plan
    from kpolicy_vllm.scheduler import qualname

    model = getattr(vllm_config.model_config, "hf_config", None)
    if config.plan is not None and model is not None:
        read_plan(config.plan, model)
    if LISTED not in (vllm_config.additional_config or ()):
        wrong = [f"{name} isn't a setting and changes nothing; {meant} is" for name, meant in Config.misspelt()]
        if wrong:
            PROCESS.warn_once("misspelt", ". ".join(wrong))
    config = _without_unknown_scheduling(found, vllm_config, config)
    listed = _remember(vllm_config, config, listed)
    sizes = _sizes_for(vllm_config, config, settings_of(vllm_config), listed)
    if sizes is not None:
        ours = one_list(sizes)
        if vllm_config.parallel_config.data_parallel_size > 1 and not getattr(vllm_config.model_config, "is_moe", True):
            # vLLM has each engine of a model without experts serve alone: it takes what it would by itself.
            alone = _sizes_for(vllm_config, config, settings_of(vllm_config), listed, ranks=1)
            ours = sorted({*ours, *(one_list(alone) if alone is not None else ())})
        # vLLM starts only if no size it compiles for would be padded.
        compiled = [size for size in compilation.compile_sizes or () if isinstance(size, int) and size <= ours[-1]]
        compilation.cudagraph_capture_sizes = sorted({*ours, *compiled})
        compilation.max_cudagraph_capture_size = ours[-1]
        compilation.post_init_cudagraph_sizes()
        LOGGER.info("kpolicy: capture sizes %s", describe(sizes))
    if config.metrics:
        announce(str(vllm_config.instance_id))
    scheduler = vllm_config.scheduler_config
    if config.split or config.paces:
        cls = qualname(vllm_config)
        if scheduler.scheduler_cls is None:
            scheduler.scheduler_cls = cls
        elif scheduler.scheduler_cls != cls:
            event = "not_split" if config.split else "not_paced"
            PROCESS.warn_of_each(event, f"what a step holds is left to {scheduler.scheduler_cls}, the scheduler given.")


def _without_unknown_scheduling(found: Adapter, vllm_config: Any, config: Config) -> Config:
    """The settings, with `split` and `pace` off where vLLM's scheduling isn't as it was recorded, each with a warning.

    Beside another scheduler that was given they stay as they are: `_configure` leaves steps to that one.
    """
    from kpolicy_vllm.scheduler import qualname

    wanted = [name for name, on in (("split", config.split), ("pace", config.paces)) if on]
    if not wanted or vllm_config.scheduler_config.scheduler_cls not in (None, qualname(vllm_config)):
        return config
    needs = {"split": ["scheduler"], "pace": ["scheduler"]}
    if vllm_config.parallel_config.data_parallel_size > 1:
        needs["split"].append("ranks")  # engines take turns by the counter of vLLM's loop
    off: dict[str, Any] = {}
    for name in wanted:
        why = _why_unknown(found, needs[name])
        if why is not None:
            event, then = _WITHOUT[name]
            PROCESS.warn_of_each(event, f"{then}: {why}")
            off[name] = False
    return attrs.evolve(config, **off)


def _why_unknown(found: Adapter, parts: list[str]) -> str | None:
    """Why one of these parts of vLLM isn't as it was recorded; None where all are."""
    try:
        for part in parts:
            found.check(part)
    except UnsupportedError as error:
        return str(error)
    return None


def _sizes_for(
    vllm_config: Any, config: Config, settings: Settings, listed: list[int] | None, *, ranks: int | None = None
) -> CaptureSizes | None:
    """The sizes to capture, the same where vLLM is configured and in each worker.

    Args:
        vllm_config: vLLM's.
        config: the user's settings.
        settings: the deployment's limits.
        listed: the sizes that the user gave to vLLM.
        ranks: data-parallel engines that agree on each step; as vLLM has it by default.
    """
    from kpolicy_vllm.scheduler import may_pace

    parallel, split_over = vllm_config.parallel_config, vllm_config.parallel_config.tensor_parallel_size
    model = vllm_config.model_config
    return sizes_of(
        config,
        settings,
        listed=listed,
        ranks=parallel.data_parallel_size if ranks is None else ranks,
        multiple_of=split_over if vllm_config.compilation_config.pass_config.enable_sp else 1,
        paced=may_pace(vllm_config, config),
        wide=lambda: wide_layers(
            getattr(model, "hf_text_config", None) or getattr(model, "hf_config", None), split_over
        ),
    )


def _remember(vllm_config: Any, config: Config, listed: list[int] | None) -> list[int] | None:
    """Write the settings where workers find them, whatever their environment; the sizes that the user gave to vLLM."""
    additional = vllm_config.additional_config
    if not isinstance(additional, dict):
        return listed
    if LISTED in additional:
        return additional[LISTED] or None
    vllm_config.additional_config = {**additional, SECTION: config.as_section(), LISTED: listed or []}
    return listed


def _device_ready(found: Adapter, original: Callable[..., Any], wrapper: Any) -> None:
    """vLLM's runner, then kpolicy on it."""
    state = state_of(wrapper.vllm_config)
    with ExitStack() as stack:
        if state is not None and state.config.split and getattr(wrapper.vllm_config, "use_v2_model_runner", False):
            with state.guard("not_split", "making room for two forwards a step", "a step has one forward"):
                from kpolicy_vllm.two_forwards import deeper

                found.check("two forwards")
                stack.enter_context(deeper())
        original(wrapper)
    if state is None and not _meant(wrapper.vllm_config):
        return
    error: Exception | None = None
    runner = getattr(wrapper.worker, "model_runner", None)
    before = dict(vars(runner)) if runner is not None else {}
    try:
        if state is not None:
            _attach(found, wrapper, state)
    except Exception as raised:  # noqa: BLE001 - whatever it is, vLLM serves on
        error = raised
    everywhere = _agreed(wrapper.vllm_config, error is None and state is not None)
    if state is None:
        return
    if (error is not None or not everywhere) and runner is not None:
        vars(runner).clear()
        vars(runner).update(before)
    held_by(wrapper if runner is None else runner, state)
    if everywhere and error is None:
        with state.guard("not_deferred", "making steps late", "they are made as early as vLLM makes them"):
            from kpolicy_vllm import defer

            defer.attach(found, wrapper.vllm_config, state)
        return
    why = "another rank couldn't" if error is None else f"{type(error).__name__}: {error}"
    state.counters.warn_once("not_attached", f"vLLM's own rule decides, as kpolicy can't: {why}")


def _meant(vllm_config: Any) -> bool:
    """Whether kpolicy was on where this engine was configured: then every rank must say whether it is."""
    additional = vllm_config.additional_config
    return isinstance(additional, dict) and bool(additional.get(SECTION)) and LISTED in additional


def _agreed(vllm_config: Any, ok: bool) -> bool:
    """Whether all ranks are attached."""
    if not _meant(vllm_config) or getattr(vllm_config.parallel_config, "world_size_across_dp", 1) == 1:
        return ok
    try:
        from kpolicy_vllm.versions.names import Names

        return Names.everywhere(ok)
    except Exception as error:  # noqa: BLE001 - whatever it is, vLLM serves on
        PROCESS.warn_once("not_agreed", f"ranks couldn't be asked: {type(error).__name__}: {error}")
        return ok


def _attach(found: Adapter, wrapper: Any, state: State) -> None:
    runner = wrapper.worker.model_runner
    if not wrapper.vllm_config.compilation_config.cudagraph_capture_sizes:
        return
    listed = _remember(wrapper.vllm_config, state.config, None)
    state.sizes = _sizes_for(wrapper.vllm_config, state.config, state.settings, listed)
    state.vllm_version = found.version
    found.check("v2" if hasattr(runner, "cudagraph_manager") else "v1")
    found.attach(runner, state)
    LOGGER.info("kpolicy decides the graphs of this worker: policy %s, %s", state.config.policy, state.objective)
