"""Attaches kpolicy to a runner of the second kind: to its manager of graphs, each time vLLM makes one."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from kpolicy.modes import Part
from kpolicy_vllm import two_forwards
from kpolicy_vllm.attach_v1 import NOT_RECORDED
from kpolicy_vllm.claims import claims_of, levels_of
from kpolicy_vllm.runner_v1 import GROUP
from kpolicy_vllm.runner_v2 import manager_class, take_over
from kpolicy_vllm.started import after_capture, before_capture
from kpolicy_vllm.state import State

__all__ = ["attach"]

_LARGEST = 2
"""FULL graphs, largest first, of which each is counted by itself where memory is estimated"""


def attach(runner: Any, state: State, modules: Any, *, newest: bool) -> None:
    """Give the runner kpolicy's decisions. It must not have a manager yet.

    Args:
        runner: vLLM's second `GPUModelRunner`.
        state: what kpolicy knows of this vLLM.
        modules: the names of vLLM's that the version's adapter found.
        newest: whether it is 0.33.
    """
    state.runner, state.loras_apart = runner, newest
    state.broadcast, state.agree = modules.broadcast, getattr(modules, "agree", bool)
    made = manager_class(
        modules.ModelCudaGraphManager,
        modules.CudaGraphManager,
        modules.CUDAGraphMode,
        modules.BatchExecutionDescriptor,
        newest=newest,
    )
    initialize, capture = runner.initialize_kv_cache, runner.capture_model

    def initialize_kv_cache(*args: Any, **named: Any) -> Any:
        result = initialize(*args, **named)
        manager = runner.cudagraph_manager
        if manager is not None:
            stock, found = type(manager), dict(vars(manager))
            descs = {mode: list(listed) for mode, listed in manager._capture_descs.items()}
            if not state.together("not_attached", "taking over the graphs' manager", lambda: taken(manager)):
                vars(manager).clear()
                vars(manager).update(found, _capture_descs=descs)
                manager.__class__ = stock
                state.dispatcher = None
        return result

    def taken(manager: Any) -> None:
        pairs = [(group.backend, group.kv_cache_spec) for groups in runner.attn_groups for group in groups]
        pieces = manager.cudagraph_mode.has_mode(modules.CUDAGraphMode.PIECEWISE)
        # 0.23 captures a mixed graph with rows of one token and bakes that length in; 0.33 takes the longest.
        state.claims = claims_of(levels_of(pairs, runner.vllm_config), piecewise=pieces, mixed=newest)
        take_over(manager, state, made)
        manager.splits.found()

    def capture_model(*args: Any, **named: Any) -> Any:
        kept = not named.get("profile_only")
        if state.dispatcher is None:
            return capture(*args, **named)
        if kept:
            with state.guard(*NOT_RECORDED):
                before_capture(state)
                _record(runner, state, modules)
        elif state.sizes is not None:
            _few_sampled(runner.cudagraph_manager, modules.CUDAGraphMode.FULL)
        started = perf_counter()
        result = capture(*args, **named)
        if not kept and state.sizes is not None:
            _as_two_samples(runner.cudagraph_manager)
        if kept:
            runner.cudagraph_manager.on_capture = None
            after_capture(state, modules, (result, perf_counter() - started))
        return result

    runner.initialize_kv_cache = initialize_kv_cache
    runner.capture_model = capture_model
    if state.config.split:
        with state.guard("not_split", "running decodes and prompts of a step apart", "a step has one forward"):
            two_forwards.attach(runner, state)


def _few_sampled(manager: Any, full: Any) -> None:
    """Let vLLM's estimate of graphs' memory capture the two largest FULL graphs and a few of the smallest.

    It would capture the two largest and take the second for every other one (or, of another order, leave it out): that
    one adds buffers which all smaller ones share. See `kpolicy_vllm.runner_v1.grouped`.
    """
    descs = manager._capture_descs.get(full, [])
    if len(descs) > _LARGEST and getattr(manager, "_max_full_descs_to_capture", None) is not None:
        manager._capture_descs[full] = [*descs[:_LARGEST], *descs[: _LARGEST - 1 : -1]]
        manager._max_full_descs_to_capture = _LARGEST + GROUP


def _as_two_samples(manager: Any) -> None:
    """Write what `_few_sampled` had captured as vLLM reads it: the first sample, and the second for each other graph.

    The sum stays, which vLLM takes off what all captures took.
    """
    samples = getattr(manager, "_capture_mem_samples", None)
    if samples is not None and len(samples) > _LARGEST:
        small = samples[_LARGEST:]
        each = -(-max(0, sum(small)) // len(small))
        samples[:] = [sum(samples[:_LARGEST]) - each, each, sum(small)]


def _record(runner: Any, state: State, modules: Any) -> None:
    """Enter every graph that is captured from now on into the registry."""
    manager, before = runner.cudagraph_manager, modules.free_bytes()

    def captured(desc: Any, seconds: float) -> None:
        nonlocal before
        with state.guard(*NOT_RECORDED):
            after = modules.free_bytes()
            key = manager.key_of.get((desc.cg_mode, desc))
            if key is not None:
                pieces = modules.num_pieces(desc) if key.part is Part.PIECEWISE else 1
                state.registry.capture(
                    key, bytes=max(0, before - after), seconds=seconds, graphs=max(1, pieces), pool="vllm"
                )
            before = after

    manager.on_capture = captured
