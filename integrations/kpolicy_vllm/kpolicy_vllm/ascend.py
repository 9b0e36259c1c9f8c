"""vLLM-Ascend 0.23.0: which graph replays, which are captured and what is done where streams run out are kpolicy's.

vLLM-Ascend's `ACLGraphWrapper` captures and replays as before, and its attention rewrites the graphs' lengths. Its
stores of what to rewrite are kept by tokens alone, so FULL graphs here are of uniform decodes only: a mixed one of as
many tokens would share their lists.

A capture that finds no streams ends vLLM-Ascend. Here the graphs are given back, the best that fit are planned from
what was held so far, and captured; serving goes on. Several ranks that capture together first see that all of them ran
out, and plan for the one with the fewest streams: one that planned anew while others wait in a collective would hang
them all. Where they don't all come within `AGREE_S` the error says what to set instead.

Drafters ask the runner's dispatcher too. They are answered by vLLM's own rule over the graphs that are there, which
their dummy runs captured beside the model's. The second runner isn't started by vLLM-Ascend on vLLM 0.23.0.

Unverified on hardware: held to the published package's signatures, and to a pretended runner.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from importlib import import_module
from typing import Any

import attrs

from kpolicy.budget_models import AscendParallel, BudgetModel, ModelShape
from kpolicy.budgets import Budget, Usage
from kpolicy.costs import analytic_costs
from kpolicy.errors import ConfigError, KPolicyError
from kpolicy.keys import GraphKey
from kpolicy.modes import Part
from kpolicy.reasons import Reason
from kpolicy_vllm import attach_v1
from kpolicy_vllm.published import with_published_costs
from kpolicy_vllm.state import LOGGER, State
from kpolicy_vllm.versions import UnsupportedError
from kpolicy_vllm.versions.names import Names
from kpolicy_vllm.versions.signatures import differing

__all__ = ["RECORDED", "STREAMS", "GraphBudget", "attach", "is_ascend", "parallel_of", "shape_of"]

STREAMS = "KPOLICY_ASCEND_STREAMS"
"""How many streams graphs may take, in place of what the stack is thought to allow."""
AGREE_S = 60.0
"""Seconds that ranks wait for each other when streams ran out."""
_ENOUGH = 1 << 30
"""What a rank says whose captures all went well."""
_RUNNER = "vllm_ascend.worker.model_runner_v1:NPUModelRunner"
_WRAPPER = "vllm_ascend.compilation.acl_graph"
_EXECUTION = (
    "self", "num_tokens", "num_reqs", "num_scheduled_tokens_np", "max_num_scheduled_tokens", "use_cascade_attn",
    "allow_microbatching", "force_eager", "force_uniform_decode", "force_has_lora", "force_num_active_loras",
    "num_encoder_reqs",
)  # fmt: skip
RECORDED: dict[str, tuple[str, ...]] = {
    f"{_RUNNER}._determine_batch_execution_and_padding": _EXECUTION,
    f"{_RUNNER}._check_and_update_cudagraph_mode": ("self", "attention_backends", "kv_cache_groups"),
    f"{_RUNNER}.capture_model": ("self",),
    f"{_WRAPPER}:ACLGraphWrapper.__init__": (
        "self", "runnable", "vllm_config", "runtime_mode", "cudagraph_options", "use_eagle", "enable_enpu",
    ),
    f"{_WRAPPER}:get_graph_params": (),
    f"{_WRAPPER}:get_draft_graph_params": (),
    f"{_WRAPPER}:get_draft_graph_prefill_params": (),
}  # fmt: skip
"""Parameters of what is wrapped or called, from the released wheel."""


def is_ascend(runner: Any) -> bool:
    """Whether a runner is vLLM-Ascend's."""
    return any(each.__module__.partition(".")[0] == "vllm_ascend" for each in type(runner).__mro__)


def attach(runner: Any, state: State, modules: Names | None = None, device: Device | None = None) -> None:
    """Give vLLM-Ascend's first runner kpolicy's decisions, its ladder and its way around streams that run out.

    Args:
        runner: an `NPUModelRunner` that hasn't initialised its graphs.
        state: what kpolicy knows of this vLLM.
        modules: what stands in for vLLM's names.
        device: what stands in for the device.

    Raises:
        UnsupportedError: this vLLM-Ascend isn't the one whose signatures were recorded.
    """
    if hasattr(runner, "cudagraph_manager"):
        raise UnsupportedError(
            "this is vLLM-Ascend's second runner, which vLLM-Ascend 0.23.0 itself doesn't start on vLLM 0.23.0; unset "
            "VLLM_USE_V2_MODEL_RUNNER."
        )
    if device is None:
        for name, recorded, live in differing(RECORDED):
            raise UnsupportedError(
                f"{name} takes ({live}), and kpolicy knows it with ({', '.join(recorded)}): use vllm-ascend 0.23.0, or "
                "a kpolicy-vllm made for this one."
            )
    here = device or Device.of_process()
    # Calibration times with CUDA's events; here costs come from a profile, or from figures.
    state.config = attrs.evolve(state.config, calibrate=False)
    budget = GraphBudget(runner, state, here)
    budget.recover()
    attach_v1.attach(runner, state, modules or here.names())
    _drafters_apart(state.dispatcher)
    budget.trim_at_start()
    with_published_costs(runner, state, "Ascend 910B")


def _drafters_apart(dispatcher: Any) -> None:
    """Answer drafters by vLLM's rule over the captured graphs, and don't count them among the model's steps.

    vLLM-Ascend's drafters ask the runner's dispatcher, right after the model's own step: twice, the second time with
    the size that they were told, so they must be told it again. Costs are of the model, not of the drafter.
    """
    decide = dispatcher.dispatch

    def dispatch(
        num_tokens: int, uniform_decode: bool = False, has_lora: bool = False, num_active_loras: int = 0,
        valid_modes: Any = None, invalid_modes: Any = None,
    ) -> Any:  # fmt: skip
        if dispatcher.facts is None and dispatcher.deciding and valid_modes is None and not has_lora:
            return dispatcher.by_own_rule(num_tokens, uniform_decode, invalid_modes)
        return decide(num_tokens, uniform_decode, has_lora, num_active_loras, valid_modes, invalid_modes)

    dispatcher.dispatch = dispatch


@attrs.frozen
class Device:
    """What is asked of the device and of vLLM-Ascend's graphs.

    Args:
        npu: ``torch.npu``.
        units: ``units(num_sizes, shape, parallel)``: the budget that the stack allows, and what graphs cost.
        graphs: the module of `ACLGraphWrapper`.
        is_out_of_streams: what an error means.
        least_of_all: the least number of all ranks, which each calls with its own; raises where they don't all come.
    """

    npu: Any
    units: Callable[[int, ModelShape, AscendParallel], BudgetModel]
    graphs: Any
    is_out_of_streams: Callable[[BaseException], bool]
    least_of_all: Callable[[int], int] = attrs.field(default=lambda number: _least_of_all(number))

    @classmethod
    def of_process(cls) -> Device:
        """The device that this worker has set."""
        from kpolicy.executors.ascend.failures import classify
        from kpolicy.executors.ascend.stack import detect_stack, stack_budget

        torch_npu = import_module("torch_npu")
        stack = detect_stack(torch_npu, torch_npu.npu.current_device())
        return cls(
            torch_npu.npu,
            lambda num_sizes, shape, parallel: stack_budget(stack, shape, parallel, num_sizes),
            import_module(_WRAPPER),
            lambda error: classify(error).reason is Reason.CAPTURE_OUT_OF_STREAMS,
        )

    def names(self) -> Names:
        """vLLM's names, and memory and pieces as they are counted here."""
        return attrs.evolve(
            Names.of_v1(),
            free_bytes=lambda: int(self.npu.mem_get_info()[0]),
            device_name=lambda: str(self.npu.get_device_name()),
            num_pieces=self.num_pieces,
        )

    def num_pieces(self, desc: Any) -> int:
        """Pieces captured for a descriptor's size."""
        return sum(
            any(entry.num_tokens == desc.num_tokens for entry in wrapper.concrete_aclgraph_entries)
            for wrapper in self.graphs._acl_graph_wrappers
            if wrapper.runtime_mode.name == "PIECEWISE"
        )

    def num_graphs(self) -> int:
        """Graphs that are held, those of a size that failed midway included."""
        entries = [each for wrapper in self.graphs._acl_graph_wrappers for each in _entries(wrapper)]
        return sum(entry.aclgraph is not None for entry in entries)

    def give_back(self) -> None:
        """Every captured graph, and what was to be rewritten in it."""
        for wrapper in list(self.graphs._acl_graph_wrappers):
            wrapper.concrete_aclgraph_entries.clear()
        for name in ("get_graph_params", "get_draft_graph_params", "get_draft_graph_prefill_params"):
            params = getattr(self.graphs, name)()
            if params is None:
                continue
            for table in (params.events, params.handles, params.attn_params):
                for size in table:
                    table[size] = []
            for size in params.workspaces:
                params.workspaces[size] = None
        gc.collect()
        self.npu.synchronize()
        self.npu.empty_cache()


class GraphBudget:
    """What of the planned graphs is captured, at start-up and where streams run out.

    Args:
        runner: the runner.
        state: what kpolicy knows of this vLLM.
        device: see `Device`.

    Attributes:
        limit: streams that were there when they ran out; None as long as they haven't.
    """

    def __init__(self, runner: Any, state: State, device: Device) -> None:
        self._runner = runner
        self._state = state
        self._device = device
        self.limit: int | None = None

    def units(self, keys: list[GraphKey]) -> BudgetModel:
        """What graphs may take, and what one costs."""
        config = self._runner.vllm_config
        sizes = len({key.num_tokens for key in keys})
        found = self._device.units(sizes, shape_of(config), parallel_of(config, os.environ))
        given = os.environ.get(STREAMS)
        if given is None:
            return found
        if not given.isdecimal() or int(given) < 1:
            raise ConfigError(f"{STREAMS}={given!r}; give a number of streams, such as 1800.")
        return attrs.evolve(found, budget=Budget(streams=int(given)), source=f"{STREAMS}={given}")

    def trim_at_start(self) -> None:
        """When the dispatcher gets its keys, keep those that the budget admits."""
        dispatcher = self._state.dispatcher
        initialise = dispatcher.initialize_cudagraph_keys

        def initialize_cudagraph_keys(*args: Any, **named: Any) -> None:
            initialise(*args, **named)
            keys = list(dispatcher.desc_of)
            try:
                units = self.units(keys)
                kept = self._fitting(keys, units, units.budget)
            except KPolicyError as error:
                self._state.counters.warn_once("no_budget", f"graphs are captured until the device is full: {error}")
                return
            self._keep(kept, Reason.BUDGET_STREAMS, units.source)

        dispatcher.initialize_cudagraph_keys = initialize_cudagraph_keys

    def recover(self) -> None:
        """Let captures that find no streams be planned anew. Before anything else wraps `capture_model`."""
        capture = self._runner.capture_model

        def capture_model(*args: Any, **named: Any) -> Any:
            while True:
                result, failed = None, None
                try:
                    result = capture(*args, **named)
                except RuntimeError as error:
                    if not self._device.is_out_of_streams(error):
                        raise
                    failed = error
                if not self._ran_out(failed):
                    return result
                self._replan(failed)

        self._runner.capture_model = capture_model

    def _ran_out(self, failed: RuntimeError | None) -> bool:
        """Whether streams ran out on any rank; `limit` is then what the one with the fewest had.

        Raises:
            RuntimeError: not all ranks came to the end of their captures; with what helps.
        """
        if failed is not None:
            self.limit = self._had()
        if _num_ranks(self._runner.vllm_config) == 1:
            return failed is not None
        had = self.limit if failed is not None and self.limit is not None else _ENOUGH
        try:
            least = self._device.least_of_all(had)
        except RuntimeError as alone:
            why = str(alone).splitlines() or [type(alone).__name__]
            said = "Captures are done here" if failed is None else f"Streams ran out when graphs had taken {had}"
            helps = "" if failed is None else f" Start again with {STREAMS}={max(1, had)}."
            raise RuntimeError(
                f"{said}, and other ranks, which capture together with this one, didn't come to their end within "
                f"{AGREE_S:g} s ({why[0]}); this one can't plan anew alone.{helps}"
            ) from failed
        if least == _ENOUGH:
            return False
        self.limit = least
        return True

    def _had(self) -> int:
        """Streams that graphs had when they ran out, and fewer each time."""
        dispatcher = self._state.dispatcher
        units = self.units(list(dispatcher.desc_of))
        used = sum((units.cost_of(key) for key in self._held()), Usage())
        # Pieces of the size whose capture failed midway took streams too.
        more = max(0, self._device.num_graphs() - used.graphs)
        streams = used.streams + more * units.piecewise.streams // max(1, units.piecewise.graphs)
        if self.limit is not None:
            streams = min(streams, self.limit - max(1, self.limit // 8))
        return max(0, streams)

    def _held(self) -> list[GraphKey]:
        return [key for key in self._state.registry.captured() if key in self._state.dispatcher.desc_of]

    def _replan(self, error: RuntimeError | None) -> None:
        """Give all graphs back, and keep what fits in `limit` streams.

        Raises:
            RuntimeError: there was nothing to give up.
        """
        state = self._state
        keys = list(state.dispatcher.desc_of)
        if not keys:
            raise error or RuntimeError("streams ran out on another rank, and no graph is left to give up.")
        units, held = self.units(keys), self._held()
        self._device.give_back()
        if held:
            state.registry.evict_generation("vllm")
        room = attrs.evolve(units.budget, streams=self.limit)
        why = "streams ran out on another rank" if error is None else str(error).splitlines()[0]
        self._keep(self._fitting(keys, units, room), Reason.CAPTURE_OUT_OF_STREAMS, why)
        state.counters.add("streams_ran_out")

    def _fitting(self, keys: list[GraphKey], units: BudgetModel, room: Budget) -> list[GraphKey]:
        from kpolicy.executors.ascend.replan import fitting

        spent = sum((units.cost_of(key) for key in keys), Usage())
        if room.refuses(Usage(), spent) is None and units.num_sizes is None:
            return keys
        return list(fitting(keys, room, units, self._state.costs or analytic_costs()))

    def _keep(self, kept: list[GraphKey], reason: Reason, why: str) -> None:
        """Let the dispatcher have those graphs alone."""
        state, dispatcher = self._state, self._state.dispatcher
        descs = dict(dispatcher.desc_of)
        dropped = [key for key in descs if key not in set(kept)]
        if not dropped:
            return
        for key in dropped:
            mode, desc = descs[key]
            dispatcher.cudagraph_keys[mode].discard(desc)
        dispatcher.chooser.set_keys({key: descs[key] for key in kept})
        for key in dropped:
            state.registry.withdraw(key, reason)
        state.counters.add("graphs_dropped", len(dropped))
        full = sum(key.part is Part.FULL for key in kept)
        LOGGER.warning(
            "kpolicy: %d of %d graphs are captured (%d FULL, %d PIECEWISE): %s",
            len(kept), len(descs), full, len(kept) - full, why,
        )  # fmt: skip


def shape_of(vllm_config: Any) -> ModelShape:
    """What the stream formula reads of the model."""
    text = vllm_config.model_config.hf_text_config
    draft = getattr(getattr(vllm_config, "speculative_config", None), "draft_model_config", None)
    layers = getattr(getattr(draft, "hf_text_config", None), "num_hidden_layers", 0) or 0
    moe = any(getattr(text, name, None) for name in ("num_experts", "n_routed_experts", "num_local_experts"))
    return ModelShape(num_layers=int(text.num_hidden_layers), moe=moe, draft_layers=int(layers))


def parallel_of(vllm_config: Any, environ: Mapping[str, str]) -> AscendParallel:
    """How the model is spread."""
    parallel = vllm_config.parallel_config
    additional = getattr(vllm_config, "additional_config", None) or {}
    return AscendParallel(
        dp=parallel.data_parallel_size,
        tp=parallel.tensor_parallel_size,
        ep=bool(getattr(parallel, "enable_expert_parallel", False)),
        pcp=getattr(parallel, "prefill_context_parallel_size", 1) or 1,
        dcp=getattr(parallel, "decode_context_parallel_size", 1) or 1,
        aiv=environ.get("HCCL_OP_EXPANSION_MODE", "").upper() == "AIV",
        shared_expert_stream=bool(additional.get("multistream_overlap_shared_expert", False)),
    )


def _entries(wrapper: Any) -> list[Any]:
    return list(wrapper.concrete_aclgraph_entries.values())


def _least_of_all(number: int) -> int:
    """By vLLM's group of all ranks on the host, as the device's may be in the middle of a collective."""
    distributed = import_module("torch.distributed")
    group = import_module("vllm.distributed.parallel_state").get_world_group().cpu_group
    distributed.monitored_barrier(group, timeout=timedelta(seconds=AGREE_S))
    numbers: list[int] = [0] * distributed.get_world_size(group)
    distributed.all_gather_object(numbers, number, group=group)
    return min(numbers)


def _num_ranks(vllm_config: Any) -> int:
    parallel = vllm_config.parallel_config
    return int(getattr(parallel, "world_size", 1)) * int(parallel.data_parallel_size)
