"""The second model runner (`vllm/v1/worker/gpu/model_runner.py`): its manager of graphs, deciding by kpolicy.

vLLM makes the manager while it lays out the KV cache; the one object is then given a class of ours, which adds to
vLLM's and keeps its fields, so that whoever holds it has the new one. Managers of drafters are left as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from kpolicy.keys import GraphKey
from kpolicy.modes import Part
from kpolicy_vllm.dispatch import Chooser
from kpolicy_vllm.splits import Splits
from kpolicy_vllm.state import State
from kpolicy_vllm.steps import Step

__all__ = ["Timed", "manager_class", "take_over"]

OnCapture = Callable[[Any, float], None]


class Timed:
    """Between vLLM's manager of a model and its base: tells how long each capture took.

    A mixin, so that `super().capture` of the one comes here before it reaches the other.
    """

    on_capture: OnCapture | None = None

    def capture(self, create_forward_fn: Callable[..., Any], *rest: Any, **named: Any) -> Any:
        """vLLM's capture; what it asks for each descriptor marks the times."""
        on_capture = self.on_capture
        if on_capture is None:
            return super().capture(create_forward_fn, *rest, **named)  # type: ignore[misc]
        running: list[Any] = []
        started = 0.0

        def finish() -> None:
            if running:
                on_capture(running.pop(), perf_counter() - started)

        def create(desc: Any, warmup: bool) -> Any:
            nonlocal started
            if warmup:
                finish()
                running.append(desc)
                started = perf_counter()
            return create_forward_fn(desc, warmup)

        result = super().capture(create, *rest, **named)  # type: ignore[misc]
        finish()
        return result


def manager_class(manager: type[Any], base: type[Any], modes: Any, descriptor: Callable[..., Any], *,
                  newest: bool) -> type[Any]:  # fmt: skip
    """vLLM's manager of a model's graphs, deciding by kpolicy.

    Args:
        manager: vLLM's `ModelCudaGraphManager`, or the base itself.
        base: vLLM's `CudaGraphManager`.
        modes: vLLM's `CUDAGraphMode`.
        descriptor: vLLM's `BatchExecutionDescriptor`.
        newest: whether it is 0.33, whose descriptors know LoRA, micro-batches and bounds on query lengths.
    """
    none, full, piecewise = modes.NONE, modes.FULL, modes.PIECEWISE
    timed = type("TimedManager", (Timed, base), {})
    bases = (timed,) if manager is base else (manager, timed)

    class KManager(*bases):  # type: ignore[misc]
        """See `manager_class`; `take_over` makes one of a manager of vLLM's."""

        state: State
        chooser: Chooser
        deciding: bool
        last: Any
        told: Callable[[Any], None] | None
        splits: Splits

        def take_over(self, state: State) -> None:
            """Choose the graphs to capture, from vLLM's own, and decide among them from now on."""
            self.state = state
            self.deciding = False
            self.last = None
            self.told = None
            self.splits = Splits(state.runner, state)
            self._decodes: list[Any] = []
            # Then decode graphs take rows of any lengths to 1 + k, and none are of one length.
            self._varlen = bool(getattr(self, "varlen_decode", False))
            self._alone = state.num_dp_ranks == 1
            self.chooser = Chooser(state, lambda _tokens, _reqs: None, lambda _part, desc: desc)
            self.chooser.query_len = self.decode_query_len
            self.chooser.on_refresh = self._refreshed
            self.refresh = self.chooser.refresh
            if state.sizes is not None and self.cudagraph_mode.separate_routine():
                self._choose_descs()
            self.chooser.set_keys(
                {self._key(desc): desc for part in (full, piecewise) for desc in self._plain_descs(part)}
            )
            if state.config.lazy:
                from kpolicy_vllm.lazy import thin

                thin(self, state)
            if state.sizes is not None:
                self._list_candidates()

        @property
        def desc_of(self) -> dict[GraphKey, tuple[Any, Any]]:
            """The (mode, descriptor) of each graph that may be captured."""
            return {key: (desc.cg_mode, desc) for key, desc in self.chooser.desc_of.items()}

        @property
        def agreed(self) -> GraphKey | None:
            """The graph last given: once data-parallel ranks agreed on one, that."""
            return None if self.last is None else self.last.key

        @property
        def key_of(self) -> dict[tuple[Any, Any], GraphKey]:
            """The reverse."""
            return {found: key for key, found in self.desc_of.items()}

        def _plain_descs(self, mode: Any) -> list[Any]:
            """Descriptors without micro-batches, smallest first."""
            descs = self._capture_descs.get(mode, [])
            return [desc for desc in reversed(descs) if getattr(desc, "num_ubatches", 1) == 1]

        def _key(self, desc: Any) -> GraphKey:
            longest = getattr(desc, "max_query_len", None)
            case = desc.num_active_loras if newest else state_case(self.state)
            return GraphKey(
                Part.FULL if desc.cg_mode == full else Part.PIECEWISE,
                desc.num_tokens,
                desc.num_reqs,
                query_len=desc.uniform_token_count,
                max_query_len=longest,
                lora_case=case,
            )

        def _choose_descs(self) -> None:
            """Keep of vLLM's descriptors those of our sizes, and add FULL graphs of small mixed batches."""
            descs = self._capture_descs
            sizes = self.state.wanted(pieces=self.cudagraph_mode.mixed_mode() == piecewise)
            wanted = {each // self.decode_query_len for each in sizes.decode}

            def keeps(desc: Any) -> bool:
                if desc.cg_mode == piecewise:
                    return desc.num_tokens in sizes.piecewise
                if desc.uniform_token_count is None:
                    return getattr(desc, "max_query_len", None) is None or desc.num_tokens in sizes.decode
                return desc.num_tokens // desc.uniform_token_count in wanted

            for mode in (full, piecewise):
                if mode in descs:
                    descs[mode] = [desc for desc in descs[mode] if keeps(desc)]
            if self.cudagraph_mode.decode_mode() == full:
                self._add_mixed(descs, sizes.mixed)
            for mode in (full, piecewise):
                if not descs.get(mode, True):
                    del descs[mode]

        def _add_mixed(self, descs: Any, sizes: Any) -> None:
            if self.state.num_dp_ranks > 1:
                return
            cases = self.lora_capture_cases if newest else [0]
            for size in set(self.compilation_config.cudagraph_capture_sizes).intersection(sizes):
                for case in cases:
                    extra = {"num_active_loras": case} if newest else {}
                    desc = descriptor(cg_mode=full, num_tokens=size, num_reqs=min(size, self.max_num_reqs), **extra)
                    if desc not in descs.setdefault(full, []):
                        descs[full].append(desc)
            # The largest comes first: vLLM allocates the outputs of all of them at the first capture.
            descs.get(full, []).sort(key=lambda desc: desc.num_tokens, reverse=True)

        def _list_candidates(self) -> None:
            """vLLM's own look-up over the chosen graphs: the next size of each kind, FULL before PIECEWISE."""
            kinds: dict[Any, list[Any]] = {}
            for mode in (full, piecewise):
                for desc in reversed(self._capture_descs.get(mode, [])):
                    kind = (mode, desc.uniform_token_count, getattr(desc, "num_ubatches", 1))
                    kinds.setdefault((getattr(desc, "num_active_loras", 0), kind), []).append(desc)
            largest = max((desc.num_tokens for descs in kinds.values() for desc in descs), default=0)
            found: dict[tuple[int, int], list[Any]] = {}
            for (case, _), descs in kinds.items():
                at = 0
                for tokens in range(largest + 1):
                    while at < len(descs) and descs[at].num_tokens < tokens:
                        at += 1
                    if at < len(descs):
                        found.setdefault((tokens, case), []).append(descs[at])
            listed = [found.get((tokens, 0), []) for tokens in range(largest + 1)] if found else []
            self._candidates: Any = found if newest else listed

        # Dispatch

        def _refreshed(self) -> None:
            self._decodes = [None] * (self.state.settings.max_num_reqs * self.decode_query_len + 1)
            self.deciding = self.state.captured

        @contextmanager
        def forcing(self, mode: Any, desc: Any) -> Iterator[None]:
            """Answer with exactly that descriptor while the context lasts."""
            assert desc.cg_mode == mode  # noqa: S101 - a descriptor of this runner says its mode
            deciding, self.deciding = self.deciding, False
            try:
                with self.chooser.forcing(desc):
                    yield
            finally:
                self.deciding = deciding

        def capture(self, *args: Any, **named: Any) -> Any:
            with self.splits.capturing():
                return super().capture(*args, **named)

        def dispatch(
            self, num_reqs: int, num_tokens: int, uniform_token_count: int | None, *rest: Any, **named: Any
        ) -> Any:
            if rest or named:
                return self._dispatch_more(num_reqs, num_tokens, uniform_token_count, *rest, **named)
            if not self.deciding or not num_tokens or not self._graphs_captured:
                return self._stock(num_reqs, num_tokens, uniform_token_count)
            return self._decided(num_reqs, num_tokens, uniform_token_count, 0, 0)

        def _dispatch_more(
            self,
            num_reqs: int,
            num_tokens: int,
            uniform_token_count: int | None,
            num_active_loras: int = 0,
            max_query_len: int | None = None,
            num_ubatches: int = 1,
        ) -> Any:
            """0.33's arguments."""
            if not self.deciding or not num_tokens or not self._graphs_captured or num_ubatches != 1:
                return self._stock(
                    num_reqs, num_tokens, uniform_token_count, num_active_loras, max_query_len, num_ubatches
                )
            loras = self._resolve_effective_loras(num_active_loras) if num_active_loras else 0
            return self._decided(num_reqs, num_tokens, uniform_token_count, loras, max_query_len or 0)

        def _stock(self, *asked: Any) -> Any:
            forced = self.chooser.forced
            found = super().dispatch(*asked) if forced is None else forced
            self.splits.bound(found.cg_mode is full)
            return found

        def _decided(self, num_reqs: int, num_tokens: int, uniform: int | None, loras: int, longest: int) -> Any:
            q = self.decode_query_len
            if uniform == q and not loras and not self._varlen:
                entry = self._decodes[num_tokens] if num_tokens < len(self._decodes) else None
                if entry is None:
                    entry = self.chooser.entry(Step(num_tokens, num_tokens // q, num_tokens // q, q, q))
                    if num_tokens < len(self._decodes):
                        self._decodes[num_tokens] = entry
            elif uniform is None and not loras and not longest and num_reqs <= self.max_num_reqs:
                # Which rows are decodes isn't said. One prompt chunk beside decodes is what schedulers mostly make; of
                # ranks that agreed on a size and ask again, all must be told the same, so only the size counts.
                entry = self.chooser.cell(num_tokens, num_reqs - 1 if self._alone else 0)
            else:
                entry = self.chooser.entry(self._step(num_reqs, num_tokens, uniform, loras, longest))
            entry.count += 1
            self.last = entry
            if self.told is not None:
                self.told(entry)
            if entry.whole is not self.splits.bounded:
                self.splits.bound(entry.whole)
            if entry.key is None:
                return self._no_graph(num_tokens, num_reqs, loras)
            return entry.result

        def _step(self, num_reqs: int, num_tokens: int, uniform: int | None, loras: int, longest: int) -> Step:
            q = self.decode_query_len
            if uniform is not None and uniform <= q and not self._varlen:
                return Step(num_tokens, num_reqs, num_reqs, uniform, uniform, loras)
            if 0 < longest <= q and (q > 1 or self._varlen):
                # Decodes with fewer drafts than there could be, some of them.
                reqs = num_reqs if self._alone else -(-num_tokens // longest)
                return Step(num_tokens, reqs, reqs, 0, longest, loras)
            decodes = num_reqs - 1 if self._alone else 0
            return Step(num_tokens, decodes + 1, decodes, 0, 0, loras)

        def _no_graph(self, num_tokens: int, num_reqs: int, loras: int) -> Any:
            if newest:
                return descriptor(none, num_tokens, num_reqs, num_active_loras=loras)
            return descriptor(none, num_tokens, num_reqs)

    return KManager


def state_case(state: State) -> int:
    """0.23 captures all graphs with adapters where LoRA is on, and they serve every step."""
    return state.settings.max_loras + 1 if state.settings.max_loras else 0


def take_over(manager: Any, state: State, made: type[Any]) -> None:
    """Make a manager of vLLM's one of ours. It must not have captured anything yet."""
    manager.__class__ = made
    manager.take_over(state)
    state.dispatcher = manager
