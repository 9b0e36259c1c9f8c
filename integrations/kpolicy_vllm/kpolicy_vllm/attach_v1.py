"""Attaches kpolicy to a runner of the first kind: its dispatcher, its captures, and the facts of each step."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from kpolicy.modes import Part
from kpolicy_vllm.claims import claims_of, levels_of
from kpolicy_vllm.runner_v1 import dispatcher_class
from kpolicy_vllm.splits import Splits
from kpolicy_vllm.started import after_capture, before_capture
from kpolicy_vllm.state import State

__all__ = ["NOT_RECORDED", "attach"]

NOT_RECORDED = ("not_recorded", "entering a graph into the registry", "the policy never takes that graph")


def attach(runner: Any, state: State, modules: Any) -> None:
    """Give the runner kpolicy's dispatcher. It must not have initialised its graphs yet.

    Args:
        runner: vLLM's `GPUModelRunner`.
        state: what kpolicy knows of this vLLM.
        modules: the names of vLLM's that the version's adapter found.
    """
    make = getattr(modules, "dispatcher_class", None) or dispatcher_class
    dispatcher = make(modules.CudagraphDispatcher, modules.CUDAGraphMode, modules.BatchDescriptor)(
        runner.vllm_config, state
    )
    state.runner, state.dispatcher = runner, dispatcher
    state.broadcast, state.agree = modules.broadcast, getattr(modules, "agree", bool)
    runner.cudagraph_dispatcher = dispatcher
    splits = Splits(runner, state)
    _note_facts(runner, dispatcher, splits, modules.CUDAGraphMode.FULL)
    _learn_claims(runner, state, modules.CUDAGraphMode)
    _record_captures(runner, state, dispatcher, modules, splits)


def _note_facts(runner: Any, dispatcher: Any, splits: Splits, full: Any) -> None:
    """Before each dispatch, let the dispatcher see which rows the step has; then, attention what it runs in."""
    original = runner._determine_batch_execution_and_padding

    def determine(num_tokens: int, num_reqs: int, num_scheduled_tokens_np: Any, *rest: Any, **named: Any) -> Any:
        dispatcher.facts = (num_reqs, num_scheduled_tokens_np)
        try:
            found = original(num_tokens, num_reqs, num_scheduled_tokens_np, *rest, **named)
        finally:
            # A step that had to run eagerly didn't ask; whoever asks next asks of something else.
            dispatcher.facts = None
        whole = found[0] is full
        if whole is not splits.bounded:
            splits.bound(whole)
        return found

    runner._determine_batch_execution_and_padding = determine


def _learn_claims(runner: Any, state: State, modes: Any) -> None:
    """When vLLM asks its attention backends what they can capture, listen."""
    original = runner._check_and_update_cudagraph_mode

    def check(attention_backends: Any, kv_cache_groups: Any, *rest: Any, **named: Any) -> Any:
        with state.guard("claims_failed", "asking what attention can capture", "no FULL graphs are planned"):
            pairs = [
                (backend, group.kv_cache_spec)
                for backends, group in zip(attention_backends, kv_cache_groups, strict=False)
                for backend in backends
            ]
            pieces = runner.compilation_config.cudagraph_mode.has_mode(modes.PIECEWISE)
            state.claims = claims_of(levels_of(pairs, runner.vllm_config), piecewise=pieces)
        return original(attention_backends, kv_cache_groups, *rest, **named)

    runner._check_and_update_cudagraph_mode = check


def _record_captures(runner: Any, state: State, dispatcher: Any, modules: Any, splits: Splits) -> None:
    """Capture exactly the graph that is asked for, and enter the ones that stay into the registry."""
    warm_up, capture = runner._warmup_and_capture, runner.capture_model
    kept = False

    def warmup_and_capture(desc: Any, *rest: Any, **named: Any) -> Any:
        mode = named["cudagraph_runtime_mode"] if "cudagraph_runtime_mode" in named else rest[0]
        before, started = 0, perf_counter()
        with state.guard(*NOT_RECORDED):
            splits.found()
            before = modules.free_bytes()
        taken: list[int] = []
        for each in (desc, *(dispatcher.beside.get((mode, desc), ()) if dispatcher.sampling else ())):
            with dispatcher.forcing(mode, each), splits.capturing():
                result = warm_up(each, *rest, **named)
            if dispatcher.sampling:
                with state.guard(*NOT_RECORDED):
                    taken.append(before - sum(taken) - modules.free_bytes())
        dispatcher.sampled(mode, taken)
        with state.guard(*NOT_RECORDED):
            key = dispatcher.chooser.key_of.get((mode, desc))
            if kept and key is not None:
                pieces = modules.num_pieces(desc) if key.part is Part.PIECEWISE else 1
                state.registry.capture(
                    key,
                    bytes=max(0, before - modules.free_bytes()),
                    seconds=perf_counter() - started,
                    graphs=max(1, pieces),
                    pool="vllm",
                )
        return result

    def capture_model(*args: Any, **named: Any) -> Any:
        nonlocal kept
        with state.guard(*NOT_RECORDED):
            before_capture(state)
        kept, started = True, perf_counter()
        try:
            result = capture(*args, **named)
        finally:
            kept = False
        after_capture(state, modules, (result, perf_counter() - started))
        return result

    profile = runner.profile_cudagraph_memory

    def profile_cudagraph_memory(*args: Any, **named: Any) -> Any:
        dispatcher.sampling = True
        try:
            result = profile(*args, **named)
        finally:
            dispatcher.sampling = False
        return result + dispatcher.left_out() if isinstance(result, int) else result

    runner._warmup_and_capture = warmup_and_capture
    runner.capture_model = capture_model
    runner.profile_cudagraph_memory = profile_cudagraph_memory
