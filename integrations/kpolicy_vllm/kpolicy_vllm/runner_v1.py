"""The first model runner (`vllm/v1/worker/gpu_model_runner.py`): its dispatcher, and what is attached to a runner.

Only the one runner's own objects are changed, never vLLM's classes, so that drafters keep dispatchers of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from kpolicy.keys import GraphKey
from kpolicy.modes import Mode, Part
from kpolicy_vllm.dispatch import Chooser
from kpolicy_vllm.state import State
from kpolicy_vllm.steps import Step

__all__ = ["dispatcher_class", "grouped", "keys_of", "sampled"]

GROUP = 4
"""Graphs that are captured together while memory is estimated"""


def keys_of(dispatcher: Any, modes: Any, query_len: int) -> dict[GraphKey, tuple[Any, Any]]:
    """Kpolicy's keys for the descriptors of a dispatcher: ``{key: (mode, descriptor)}``, FULL graphs first."""
    keys: dict[GraphKey, tuple[Any, Any]] = {}
    for part, mode in ((Part.FULL, modes.FULL), (Part.PIECEWISE, modes.PIECEWISE)):
        for desc in sorted(dispatcher.cudagraph_keys[mode], key=_size):
            same = query_len if desc.uniform else None
            key = GraphKey(part, desc.num_tokens, desc.num_reqs, query_len=same, lora_case=_loras(desc))
            keys[key] = (mode, desc)
    return keys


def _size(desc: Any) -> tuple[int, bool, int]:
    return (desc.num_tokens, desc.uniform, _loras(desc))


def _loras(desc: Any) -> int:
    """Adapters that a descriptor is for; those of 0.15 know only whether there are any."""
    return int(getattr(desc, "num_active_loras", desc.has_lora))


def dispatcher_class(base: type[Any], modes: Any, descriptor: Callable[..., Any]) -> type[Any]:
    """vLLM's dispatcher, deciding by kpolicy.

    Args:
        base: vLLM's `CudagraphDispatcher`.
        modes: vLLM's `CUDAGraphMode`.
        descriptor: vLLM's `BatchDescriptor`.
    """
    from numpy import count_nonzero

    none, full, piecewise = modes.NONE, modes.FULL, modes.PIECEWISE
    only_none, every = {none}, frozenset((none, full, piecewise))
    bits = {full: Mode.FULL.bit, piecewise: Mode.PIECEWISE.bit, none: Mode.EAGER.bit}

    class KDispatcher(base):  # type: ignore[misc]
        """See `dispatcher_class`.

        `facts` is the step that the runner is about to ask for, as (requests, new tokens by request); None where it
        asks outside of a step. `told`, where it is there, is told the policy's answers as they are given. `agreed` is
        the graph that it was last given where it named the modes itself, as it does once data-parallel ranks agreed.
        """

        def __init__(self, vllm_config: Any, state: State) -> None:
            super().__init__(vllm_config)
            self.state = state
            self.facts: tuple[int, Any] | None = None
            self.deciding = False
            self.off = False
            self.sampling = False
            self.agreed: GraphKey | None = None
            self.told: Callable[[Any], None] | None = None
            self.beside: dict[tuple[Any, Any], list[Any]] = {}
            self.largest_two: dict[Any, tuple[int, int]] = {}
            self.log: Callable[[Any, tuple[int, Any]], None] | None = None
            self._decodes: list[Any] = []
            self.chooser = Chooser(state, lambda tokens, _reqs: (none, descriptor(tokens)), lambda _part, desc: desc)
            self.chooser.on_refresh = self._refreshed
            self.refresh = self.chooser.refresh

        @property
        def desc_of(self) -> dict[GraphKey, tuple[Any, Any]]:
            """The (mode, descriptor) of each graph that may be captured."""
            found: dict[GraphKey, tuple[Any, Any]] = self.chooser.desc_of
            return found

        @property
        def key_of(self) -> dict[tuple[Any, Any], GraphKey]:
            """The reverse."""
            found: dict[tuple[Any, Any], GraphKey] = self.chooser.key_of
            return found

        # Keys

        def initialize_cudagraph_keys(self, cudagraph_mode: Any, uniform_decode_query_len: int = 1) -> None:
            super().initialize_cudagraph_keys(cudagraph_mode, uniform_decode_query_len)
            stock = {mode: set(descs) for mode, descs in self.cudagraph_keys.items()}
            choose = partial(self._choose_all, cudagraph_mode, uniform_decode_query_len)
            self.off = not self.state.together("not_attached", "choosing which graphs to capture", choose)
            if self.off:
                self.cudagraph_keys.update(stock)
                self.__dict__.pop("get_capture_descs", None)

        def _choose_all(self, cudagraph_mode: Any, uniform_decode_query_len: int) -> None:
            if self.state.sizes is not None:
                self._choose_keys(cudagraph_mode)
            self.chooser.query_len = uniform_decode_query_len
            self.chooser.set_keys(keys_of(self, modes, uniform_decode_query_len))
            if self.state.config.lazy:
                from kpolicy_vllm.lazy import thin

                thin(self, self.state)

        def _choose_keys(self, mode: Any) -> None:
            """Keep of vLLM's keys those of our sizes, and add FULL graphs of small mixed batches."""
            if mode == none or not mode.separate_routine():
                return
            pieces = mode.mixed_mode() == piecewise
            kept, sizes = self.cudagraph_keys, self.state.wanted(pieces=pieces)
            if pieces:
                kept[piecewise] = {desc for desc in kept[piecewise] if desc.num_tokens in sizes.piecewise}
            if mode.decode_mode() != full:
                return
            kept[full] = {desc for desc in kept[full] if desc.num_tokens in sizes.decode or not desc.uniform}
            if self.state.num_dp_ranks == 1:
                for size in set(self.compilation_config.cudagraph_capture_sizes).intersection(sizes.mixed):
                    for loras in self._get_lora_cases():
                        desc = self._create_padded_batch_descriptor(size, False, loras > 0, loras)
                        self.add_cudagraph_key(full, desc)

        # Capture

        def get_capture_descs(self) -> Any:
            """vLLM's list, largest first; while memory is estimated, one that `grouped` made of it."""
            found = super().get_capture_descs()
            if self.sampling and self.state.sizes is not None:
                self.beside, self.largest_two = {}, {}
                for place, (mode, descs) in enumerate(found):
                    listed, others = grouped(descs)
                    found[place] = (mode, listed)
                    if others:
                        self.beside[mode, listed[1]] = others
                    if len(descs) > GROUP + 1:
                        self.beside[mode, listed[0]] = [descs[1]]
            return found

        def sampled(self, mode: Any, taken: list[int]) -> None:
            """While memory is estimated: bytes of a graph, and of those captured with it."""
            if self.sampling and len(taken) == 2 and mode not in self.largest_two:
                self.largest_two[mode] = (taken[0], taken[1])

        def left_out(self) -> int:
            """Bytes that vLLM's estimate lacks: it takes the most of the first graphs of all modes, and small ones."""
            pairs = [(max(0, first), max(0, second)) for first, second in self.largest_two.values()]
            counted = max((first + second for first, second in pairs), default=0)
            return max((first for first, _ in pairs), default=0) + sum(second for _, second in pairs) - counted

        @contextmanager
        def forcing(self, mode: Any, desc: Any) -> Iterator[None]:
            """Answer with exactly that graph while the context lasts, save where only NONE is allowed."""
            deciding, self.deciding = self.deciding, False
            try:
                with self.chooser.forcing((mode, desc)):
                    yield
            finally:
                self.deciding = deciding

        # Dispatch

        def _refreshed(self) -> None:
            q = self.chooser.query_len
            self._decodes = [None] * (self.state.settings.max_num_reqs * q + 1)
            self.deciding = self.state.captured and not self.off

        def dispatch(
            self,
            num_tokens: int,
            uniform_decode: bool = False,
            has_lora: bool = False,
            num_active_loras: int = 0,
            valid_modes: Any = None,
            invalid_modes: Any = None,
        ) -> Any:
            facts, self.facts = self.facts, None
            if valid_modes is not None or not self.deciding or (invalid_modes and none in invalid_modes):
                return self._told(num_tokens, uniform_decode, has_lora, num_active_loras, valid_modes, invalid_modes)
            if has_lora or invalid_modes:
                loras = num_active_loras if has_lora else 0
                entry = self.chooser.entry(self._step(num_tokens, uniform_decode, loras, invalid_modes, facts))
            elif uniform_decode:
                known = self._decodes[num_tokens] if num_tokens < len(self._decodes) else None
                entry = known or self._decode_entry(num_tokens)
            elif num_tokens > self.chooser.largest:
                entry = self.chooser.cell(num_tokens, 0)
            elif facts is None:
                entry = self.chooser.entry(self._step(num_tokens, False, 0, None, None))
            else:
                reqs, new = facts
                decodes = int(count_nonzero(new <= self.chooser.query_len))
                if decodes < reqs <= self.state.settings.max_num_reqs:
                    entry = self.chooser.cell(num_tokens, decodes)
                else:
                    entry = self.chooser.entry(Step(num_tokens, reqs, decodes))
            entry.count += 1
            if self.told is not None:
                self.told(entry)
            if self.log is not None and facts is not None:
                self.log(entry, facts)
            return entry.result

        def by_own_rule(self, num_tokens: int, uniform_decode: bool = False, invalid_modes: Any = None) -> Any:
            """As vLLM's rule over the captured graphs, uncounted: for who asks outside of a step, as drafters do."""
            return self.chooser.agreed(self._step(num_tokens, uniform_decode, 0, invalid_modes, None)).result

        def _decode_entry(self, num_tokens: int) -> Any:
            entry = self.chooser.entry(self._step(num_tokens, True, 0, None, None))
            if num_tokens < len(self._decodes):
                self._decodes[num_tokens] = entry
            return entry

        def _step(self, num_tokens: int, uniform: bool, loras: int, invalid_modes: Any, facts: Any) -> Step:
            q = self.chooser.query_len
            forbidden = sum(bits[mode] for mode in invalid_modes) if invalid_modes else 0
            if uniform:
                reqs = min(-(-num_tokens // q), self.state.settings.max_num_reqs)
                return Step(num_tokens, reqs, reqs, q, q, loras, forbidden)
            if facts is None:
                return Step(num_tokens, 1, 0, 0, 0, loras, forbidden)
            reqs, new = facts
            return Step(num_tokens, reqs, int(count_nonzero(new <= q)), 0, 0, loras, forbidden)

        def _told(
            self, num_tokens: int, uniform: bool, has_lora: bool, loras: int, valid_modes: Any, invalid_modes: Any
        ) -> Any:
            """The answer where it isn't the policy's to give: captures, warm-up, and what ranks have agreed on."""
            forced = self.chooser.forced
            if forced is not None:
                if valid_modes is not None and valid_modes <= only_none:
                    return none, descriptor(num_tokens)
                return forced
            allowed = every if valid_modes is None else valid_modes
            if invalid_modes:
                allowed = allowed - invalid_modes
            self.agreed = None
            if self.deciding and allowed and not allowed <= only_none:
                forbidden = sum(bit for mode, bit in bits.items() if mode not in allowed)
                step = self._step(num_tokens, uniform, loras if has_lora else 0, None, None)
                step = step._replace(forbidden=forbidden)
                entry = self.chooser.agreed(step) if len(allowed) == 1 else self.chooser.entry(step)
                self.agreed = entry.key
                if entry.key is not None or none in allowed:
                    return entry.result
            # vLLM's own words, also for what can't be.
            return super().dispatch(num_tokens, uniform, has_lora, loras, valid_modes, _frozen(invalid_modes))

    return KDispatcher


def sampled(descs: list[Any]) -> list[Any]:
    """The descriptors, largest first and then from the smallest up."""
    return [*descs[:1], *descs[:0:-1]]


def grouped(descs: list[Any]) -> tuple[list[Any], list[Any]]:
    """A list by which vLLM estimates the memory of all graphs, and those to capture with its second one.

    vLLM captures two, and takes what the second adds for what every other adds. The second largest may add buffers that
    all smaller ones then share, such as those of FlashAttention's splits (0.1 GiB of a 0.5B model, where the estimate
    came to ten times the memory in the end); one small graph takes nothing or a whole step of the allocator's. So four
    of the smallest stand for four, and the list is as much shorter. The second largest is captured with the first, and
    counted once (`left_out`).
    """
    group = descs[:0:-1][:GROUP]
    if len(group) < GROUP:
        return sampled(descs), []
    count = 1 - -(len(descs) - 1) // GROUP
    return [descs[0], group[0], *descs[1:]][:count], group[1:]


def _frozen(modes: Any) -> Any:
    """The modes in a set that vLLM can't take others out of."""
    return modes if modes is None else frozenset(modes)
