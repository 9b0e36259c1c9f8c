"""Lazy capture: few graphs at start-up, the others between steps once steps have asked for them often enough.

All graphs of the ladder are planned; `first` says which of them vLLM captures when it starts. From then on every so
many steps the steps that ran are looked at: which graph would the policy have taken, were all of them captured? One
that was missed `lazy_hot` times is captured by vLLM's own procedure, before the next step: vLLM's guard, which forbids
captures while it serves, is lifted for as long as that takes, and the device has nothing under way. vLLM collects all
of Python's garbage before and after captures, which likely takes most of the half second and more that one took in a
server's process; between steps that is left out (`uncollected`).

Ranks that run one model together see the same steps and so capture the same graphs at the same step. `why_not` lists
where that doesn't hold. A capture that fails costs a step its time and is not tried again.
"""

from __future__ import annotations

import functools
import gc
import importlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from time import perf_counter, sleep
from typing import Any

import attrs

from kpolicy.keys import GraphKey
from kpolicy.ladders import CaptureLadder
from kpolicy.modes import Part
from kpolicy.policies.auto import AutoPolicy
from kpolicy.reasons import Reason
from kpolicy_vllm.state import LOGGER, State, workers_apart
from kpolicy_vllm.steps import Step, numbers_of
from kpolicy_vllm.versions.names import wrapped

__all__ = ["Lazy", "attach", "first", "thin", "uncollected", "why_not"]

LOOK = 256
"""Steps between two looks at what was missed"""
_SETTLE_S = 0.002
"""For threads that still ask the device about the last step's output, which a capture forbids"""


def why_not(vllm_config: Any) -> str | None:
    """Why graphs can't be captured while this vLLM serves; None where they can."""
    parallel = vllm_config.parallel_config
    if parallel.data_parallel_size > 1:
        return "data-parallel ranks see different steps"
    asynchronous = getattr(getattr(vllm_config, "scheduler_config", None), "async_scheduling", False)
    if workers_apart(vllm_config) and asynchronous:
        return "a thread of the multi-process executor waits for outputs, which a capture forbids"
    if parallel.pipeline_parallel_size > 1:
        return "pipeline stages are never all between steps"
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.num_speculative_tokens:
        return "a drafter's graphs would be captured with it"
    if vllm_config.lora_config is not None:
        return "captures put dummy adapters in the place of those in use"
    return None


def first(keys: Iterable[GraphKey], most: int) -> list[GraphKey]:
    """The graphs to start with: the largest of each kind, then halves of it, then halves of those, `most` in all.

    Args:
        keys: all that are planned.
        most: how many; at least one of each kind is taken.
    """
    kinds: dict[tuple[Part, bool, int], list[GraphKey]] = {}
    for key in keys:
        kinds.setdefault((key.part, key.decode_only, key.lora_case), []).append(key)
    chosen: list[GraphKey] = []
    ranked = []
    for listed in kinds.values():
        listed.sort(key=lambda key: key.num_tokens, reverse=True)
        wanted = float(listed[0].num_tokens)
        place = 0
        for key in listed:
            if key.num_tokens <= wanted:
                ranked.append((place, key))
                place, wanted = place + 1, key.num_tokens / 2
    for place, key in sorted(ranked, key=lambda each: each[0]):
        if not place or len(chosen) < most:
            chosen.append(key)
    return chosen


def thin(dispatcher: Any, state: State) -> None:
    """Have vLLM capture only the `first` graphs of a dispatcher or manager whose keys are planned."""
    if why_not(dispatcher.vllm_config) is not None:
        return
    chosen = set(first(dispatcher.desc_of, state.config.lazy_graphs))
    _only(dispatcher, chosen)


def _only(dispatcher: Any, keys: set[GraphKey]) -> Callable[[], None]:
    """Let the runner see only these graphs when it captures; what is returned undoes it."""
    if hasattr(dispatcher, "_capture_descs"):
        before = dispatcher._capture_descs
        # Of all that are planned: the list that is there may be short already.
        descs: dict[Any, list[Any]] = {}
        for key in sorted(keys, key=lambda key: key.num_tokens, reverse=True):
            mode, desc = dispatcher.desc_of[key]
            descs.setdefault(mode, []).append(desc)
        dispatcher._capture_descs = descs
        return lambda: setattr(dispatcher, "_capture_descs", before)
    wanted = {dispatcher.desc_of[key][1] for key in keys}
    listed = type(dispatcher).get_capture_descs

    def get_capture_descs() -> list[tuple[Any, list[Any]]]:
        found = [(mode, [desc for desc in each if desc in wanted]) for mode, each in listed(dispatcher)]
        return [(mode, each) for mode, each in found if each]

    before_this = vars(dispatcher).get("get_capture_descs")
    dispatcher.get_capture_descs = get_capture_descs

    def undo() -> None:
        if before_this is None:
            del dispatcher.get_capture_descs
        else:
            dispatcher.get_capture_descs = before_this

    return undo


_COLLECTING = ("collect", "freeze", "unfreeze")
_LOCK = threading.Lock()
_STOPPED: list[dict[str, Any]] = []
"""What `uncollected` has replaced, once for each that is inside it now"""


@contextmanager
def uncollected() -> Iterator[None]:
    """Python's garbage stays where it is, whatever asks for it, until the context ends.

    Captures mustn't be interrupted by a collection, which frees what the device's allocator has; vLLM collects all
    first, and freezes what is left. Of a server's objects that likely takes a few hundred milliseconds, and thawing
    them afterwards undoes the freeze that vLLM makes once when its start is over. Here none is made at all. Runners
    that share a process may be inside at once: the last to leave puts back what the first one found.
    """
    with _LOCK:
        found = _STOPPED[0] if _STOPPED else {"enabled": gc.isenabled(), **{n: getattr(gc, n) for n in _COLLECTING}}
        _STOPPED.append(found)
        gc.disable()
        for name in _COLLECTING:
            setattr(gc, name, lambda *_, **__: 0)
    try:
        yield
    finally:
        with _LOCK:
            _STOPPED.pop()
            if not _STOPPED:
                for name in _COLLECTING:
                    setattr(gc, name, found[name])
                if found["enabled"]:
                    gc.enable()


class Lazy:
    """Counts what was missed and captures it.

    Args:
        runner: vLLM's model runner, its first graphs captured.
        state: the integration's.
        capture: captures what the dispatcher lists, as vLLM does at start-up; bytes it took.
        wait: until the device has done all.
        wrapped: whether each of vLLM's wrappers of a part has the graph of a descriptor.
    """

    def __init__(
        self, runner: Any, state: State, capture: Callable[[], Any], wait: Callable[[], None],
        wrapped: Callable[[Any, Part], list[bool]],
    ) -> None:  # fmt: skip
        self._runner = runner
        self._state = state
        self._capture = capture
        self._wait = wait
        self._wrapped = wrapped
        self._steps = 0
        self._seen: dict[Step, int] = {}
        self._missed: Counter[GraphKey] = Counter()
        self._failed: set[GraphKey] = set()
        self._select: tuple[Any, Any] | None = None

    def prepare(self) -> None:
        """Prepare the policy over all planned graphs, so that no step of serving waits for it."""
        self._select_of_all()

    def step(self) -> None:
        """Before each step of the runner."""
        self._steps += 1
        if self._steps % LOOK == 0:
            self.look()

    def look(self) -> None:
        """Count what the steps since the last look missed, and capture the hottest graph if it is hot enough."""
        state, chooser = self._state, self._state.dispatcher.chooser
        captured = set(state.ladder.keys)
        seen, self._seen = self._seen, {step: entry.count for step, entry in chooser.entries.items() if entry.count}
        select = self._select_of_all()
        if select is None:
            return
        for step, count in self._seen.items():
            more = count - min(seen.get(step, 0), count)
            if more:
                numbers = numbers_of(step, chooser.query_len)
                launches = chooser.surer(select(*numbers), select, numbers).launches
                key = launches[0].key if launches else None
                if key is not None and key not in captured:
                    self._missed[key] += more
        hot = [
            key
            for key, times in self._missed.most_common()
            if times >= state.config.lazy_hot and key not in self._failed
        ]
        if hot:
            self.add(hot[0])

    def add(self, key: GraphKey) -> bool:
        """Capture that graph now. The device must have nothing under way but what it can finish."""
        state, dispatcher = self._state, self._state.dispatcher
        del self._missed[key]
        self._wait()
        sleep(_SETTLE_S)
        deciding, dispatcher.deciding = dispatcher.deciding, False
        undo = _only(dispatcher, {key})
        started = perf_counter()
        taken, failed = None, ""
        try:
            taken = self._capture()
            if self._lacks(key):
                failed = "vLLM captured nothing"
        except Exception as error:  # noqa: BLE001 - the graphs that are there go on serving
            failed = f"{type(error).__name__}: {error}"
        finally:
            undo()
            dispatcher.deciding = deciding
        # Ranks must pad alike: a graph that one of them lacks, none takes.
        if not state.agree(not failed):
            self._failed.add(key)
            state.registry.fail(key, Reason.CAPTURE_FAILED, seconds=perf_counter() - started)
            state.counters.warn_once(
                "lazy_capture_failed", f"{key} couldn't be captured: {failed or 'on another rank'}. Others go on."
            )
            return False
        seconds = perf_counter() - started
        size = taken if isinstance(taken, int) else 0
        alike = [record.graphs for record in state.registry.records() if record.key.part is key.part]
        state.registry.capture(key, bytes=max(0, size), seconds=seconds, graphs=max([1, *alike]), pool="vllm")
        self._seen = {}
        state.recompile()
        state.counters.add("lazy_captures")
        LOGGER.info("kpolicy: captured %s in %.2f s, after steps had asked for it", key, seconds)
        return True

    def _lacks(self, key: GraphKey) -> bool:
        """Whether vLLM passed that size over: neither its wrappers have the graph, nor the second runner's manager.

        Where no wrapper of vLLM's own has any graph of that part, nothing tells.
        """
        dispatcher = self._state.dispatcher
        desc, graphs = dispatcher.desc_of[key][1], getattr(dispatcher, "graphs", None)
        if key.part is Part.FULL and graphs is not None:
            return desc not in graphs
        found = self._wrapped(desc, key.part)
        return bool(found) and not any(found)

    def _select_of_all(self) -> Any:
        """The policy as if every planned graph were captured; None where it can't be prepared."""
        state = self._state
        if not state.ready:
            return None
        if self._select is None or self._select[0] is not state.costs:
            keys = tuple(state.dispatcher.desc_of)
            context = attrs.evolve(state.context(lora=False), ladder=CaptureLadder(keys))
            policy = AutoPolicy(forms=()) if isinstance(state.policy, AutoPolicy) else state.policy
            self._select = (state.costs, policy.compile(context).select)
        return self._select[1]


def attach(runner: Any, state: State) -> None:
    """Capture what steps ask for, from now on, before steps of this runner."""
    reason = why_not(runner.vllm_config)
    if reason is not None:
        state.counters.warn_once("not_lazy", f"all graphs were captured at start-up: {reason}.")
        return
    import torch

    monitor = importlib.import_module("vllm.compilation.monitor")
    # Who asks vLLM to collect during captures has it so here too.
    collects: bool = importlib.import_module("vllm.envs").VLLM_ENABLE_CUDAGRAPH_GC

    def capture() -> Any:
        try:
            # vLLM's own, not the integration's wrapper of it, which ends in calibration.
            with nullcontext() if collects else uncollected():
                return type(runner).capture_model(runner)
        finally:
            monitor.set_cudagraph_capturing_enabled(False)

    lazy = Lazy(runner, state, capture, torch.accelerator.synchronize, wrapped)
    lazy.prepare()
    execute = runner.execute_model

    @functools.wraps(execute)
    def execute_model(*args: Any, **named: Any) -> Any:
        with state.guard("lazy_failed", "looking for graphs to capture"):
            lazy.step()
        return execute(*args, **named)

    runner.execute_model = execute_model
