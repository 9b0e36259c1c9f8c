"""SPLIT in vLLM: schedulers that run decodes in a step of their own where that costs less, so they keep FULL graphs.

They also hold steps of decodes and prompts to a bound, see `kpolicy_vllm.pace`.

`SplitScheduler` and `SplitAsyncScheduler` are made of vLLM's own classes when first asked for. Where both decodes and
prompts could run, `SplitRule` compares one mixed step with two apart, and `kpolicy_vllm.turns` runs them so.

vLLM's first runner drops rows that a step leaves out from its batch and takes them up again in the next; under
asynchronous scheduling the engine has their last tokens by then, as long as two steps are under way and no more.
`why_not` lists where that, or something else, doesn't hold; there the scheduler is vLLM's.

Under data parallelism ranks run each step in the lesser of their modes, so all of them take the same turns: even steps
are for decodes, odd ones for prompts, by the step counter that vLLM keeps equal on all ranks.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from kpolicy.policies import get_policy
from kpolicy_vllm import pace
from kpolicy_vllm.config import Config
from kpolicy_vllm.pace import Pacer
from kpolicy_vllm.state import State, held_by, state_of, workers_apart
from kpolicy_vllm.turns import Turns

__all__ = ["SplitAsyncScheduler", "SplitScheduler", "may_pace", "qualname", "why_not"]  # noqa: F822 - made by __getattr__

_BASES = {
    "SplitScheduler": ("vllm.v1.core.sched.scheduler", "Scheduler"),
    "SplitAsyncScheduler": ("vllm.v1.core.sched.async_scheduler", "AsyncScheduler"),
}
_MARK = "_kpolicy_counted"


def qualname(vllm_config: Any) -> str:
    """What ``scheduler_cls`` is set to for that vLLM."""
    name = "SplitAsyncScheduler" if vllm_config.scheduler_config.async_scheduling else "SplitScheduler"
    return f"{__name__}.{name}"


def why_not(vllm_config: Any, *, in_scheduler: bool = True) -> str | None:
    """Why decodes and prompts can't be run apart in this vLLM; None where they can.

    Args:
        vllm_config: vLLM's.
        in_scheduler: whether it is for the scheduler to decide, or for the workers.
    """
    if in_scheduler and workers_apart(vllm_config):
        return (
            "the workers are processes of their own, and costs are measured there; SPLIT needs the in-process executor"
        )
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        return "pipeline stages have more steps under way than rows left out survive"
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.num_speculative_tokens:
        return "drafts of rows that a step leaves out would be lost"
    if vllm_config.lora_config is not None:
        return "adapters of rows that a step leaves out wouldn't be counted"
    if getattr(vllm_config, "kv_transfer_config", None) is not None:
        return "a KV connector sees every step"
    if vllm_config.model_config.is_encoder_decoder:
        return "steps of an encoder and a decoder aren't of decodes or prompts"
    return None


def may_pace(vllm_config: Any, config: Config) -> bool:
    """Whether steps can ever be bounded in this vLLM, so that graphs for bounded ones are worth their memory.

    Args:
        vllm_config: vLLM's, before or after it was given our scheduler's class.
        config: the user's settings.
    """
    if not config.paces or not get_policy(config.policy).reads_costs:
        return False
    if vllm_config.scheduler_config.scheduler_cls not in (None, qualname(vllm_config)):
        return False
    return pace.why_not(vllm_config, apart=config.split and why_not(vllm_config) is None) is None


def _made(name: str) -> type[Any]:
    module, base_name = _BASES[name]
    base = getattr(importlib.import_module(module), base_name)

    class Split(base):  # type: ignore[misc,valid-type]
        """vLLM's scheduler, with decodes and prompts in steps of their own where that costs less."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.kpolicy_turns: Turns | None = None
            self.kpolicy_pacer: Pacer | None = None
            state = state_of(self.vllm_config)
            if state is None:
                return
            held_by(self, state)
            self._kpolicy_split(state)
            if not state.config.paces:
                return
            with state.guard("not_paced", "bounding steps", "they are filled to vLLM's limit"):
                reason = pace.why_not(self.vllm_config, self, apart=self.kpolicy_turns is not None)
                if reason is None:
                    self.kpolicy_pacer = Pacer(self, state)
                else:
                    state.counters.warn_once("not_paced", f"steps are filled to vLLM's limit: {reason}.")

        def _kpolicy_split(self, state: State) -> None:
            if not state.config.split:
                return
            with state.guard("not_split", "scheduling decodes and prompts apart", "they are scheduled together"):
                reason = why_not(self.vllm_config)
                if reason is not None and _left_to_workers(self.vllm_config):
                    return
                if reason is not None:
                    state.counters.warn_once("not_split", f"decodes and prompts are scheduled together: {reason}.")
                    return
                if self.vllm_config.parallel_config.data_parallel_size > 1:
                    _count_steps()
                self.kpolicy_turns = Turns(self, state)

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            run = functools.partial(super().schedule, *args, **kwargs)
            if self.kpolicy_turns is not None:
                return self.kpolicy_turns.schedule(run)
            return run() if self.kpolicy_pacer is None else self.kpolicy_pacer.schedule(run)

    Split.__name__ = Split.__qualname__ = name
    Split.__module__ = __name__
    return Split


def _left_to_workers(vllm_config: Any) -> bool:
    """Whether workers run two forwards in a step where the scheduler can't decide (`kpolicy_vllm.two_forwards`)."""
    second = getattr(vllm_config, "use_v2_model_runner", False)
    alone = vllm_config.parallel_config.data_parallel_size == 1
    return bool(second and alone) and why_not(vllm_config, in_scheduler=False) is None


def _count_steps() -> None:
    """Let schedulers of data-parallel ranks read the step counter that their engine shares with the others."""
    engine = importlib.import_module("vllm.v1.engine.core").DPEngineCoreProc
    original = engine.run_busy_loop
    if getattr(original, _MARK, False):
        return

    @functools.wraps(original)
    def run_busy_loop(self: Any, *args: Any, **kwargs: Any) -> Any:
        turns = getattr(self.scheduler, "kpolicy_turns", None)
        if turns is not None:
            turns.counter = lambda: self.step_counter
        return original(self, *args, **kwargs)

    setattr(run_busy_loop, _MARK, True)
    engine.run_busy_loop = run_busy_loop


def __getattr__(name: str) -> Any:
    """The two classes, made when vLLM asks for them."""
    if name in _BASES:
        made = globals()[name] = _made(name)
        return made
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
