"""Enters the graphs that others of vLLM's parts capture into kpolicy's registry: drafters' and the vision encoder's.

They are left alone: kpolicy neither chooses their sizes nor decides when they replay. What they took is what the whole
capture took beyond the model's own graphs, in equal shares. Replays are counted at those graphs that stand alone: the
encoder's, and whole ones of the second runner's drafters. A drafter's piece is one of many, and its hits aren't known.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs

from kpolicy.keys import GraphKey
from kpolicy.modes import Part
from kpolicy_vllm.state import State

__all__ = ["enter_others", "others"]


Held = tuple[GraphKey, Any]
"""A graph's key, and what replays it where that is one object; otherwise None"""


def others(runner: Any) -> Iterator[Held]:
    """The graphs that a runner holds besides its model's, of either kind of runner."""
    drafter: Any = getattr(runner, "drafter", None)
    if type(drafter).__module__.partition(".")[0] == "vllm_ascend" and hasattr(drafter, "use_cuda_graph"):
        # It asks the runner's own dispatcher, and has captured what the model has.
        yield from _of_drafter(runner if drafter.use_cuda_graph else None)
    else:
        yield from _of_drafter(drafter)
    yield from _of_speculator(getattr(runner, "speculator", None))
    manager = getattr(runner, "encoder_cudagraph_manager", None)
    if manager is None:
        encoder = getattr(getattr(runner, "model_state", None), "encoder_runner", None)
        manager = getattr(encoder, "cudagraph_manager", None)
    yield from _of_encoder(getattr(manager, "budget_graphs", None) or {})


def _of_drafter(drafter: Any) -> Iterator[Held]:
    """A drafter of the first runner: the keys of its own dispatcher. It has pieces only."""
    keys = getattr(getattr(drafter, "cudagraph_dispatcher", None), "cudagraph_keys", {})
    for mode, descs in keys.items():
        for desc in descs:
            key = GraphKey(
                _part(mode), desc.num_tokens, desc.num_reqs, lora_case=getattr(desc, "num_active_loras", 0),
                stage="draft", variant="uniform" if desc.uniform else "",
            )  # fmt: skip
            yield key, None


def _of_speculator(speculator: Any) -> Iterator[Held]:
    """A speculator of the second runner: the descriptors of each of its managers."""
    for name, manager in vars(speculator).items() if speculator is not None else ():
        for mode, descs in getattr(manager, "_capture_descs", {}).items():
            for desc in descs:
                # 0.33 captures a graph for each number of drafts that a batch may have.
                drafts = getattr(desc, "num_speculative_tokens", None)
                key = GraphKey(
                    _part(mode), desc.num_tokens, desc.num_reqs, query_len=desc.uniform_token_count,
                    max_query_len=getattr(desc, "max_query_len", None), stage="draft",
                    lora_case=getattr(desc, "num_active_loras", 0),
                    variant=name if drafts is None else f"{name} k{drafts}",
                )  # fmt: skip
                yield key, getattr(manager, "graphs", {}).get(desc)


def _of_encoder(graphs: Mapping[Any, Any]) -> Iterator[Held]:
    """The vision encoder's graphs, by token budget; 0.33 has sets of them by name."""
    for budget, graph in graphs.items():
        if isinstance(graph, Mapping):
            for key, held in _of_encoder(graph):
                yield attrs.evolve(key, variant=f"{budget} {key.variant}".rstrip()), held
        else:
            tokens, *more = budget if isinstance(budget, tuple) else (budget,)
            variant = " ".join(str(part) for part in more)
            yield GraphKey(Part.FULL, int(tokens), stage="encoder", variant=variant), getattr(graph, "graph", None)


def _part(mode: Any) -> Part:
    return Part.FULL if mode.name == "FULL" else Part.PIECEWISE


def enter_others(state: State, runner: Any, *, bytes: int, seconds: float) -> None:  # noqa: A002 - the registry's word
    """Enter them as captured, and count their replays from now on.

    Args:
        state: what kpolicy knows of this vLLM.
        runner: the runner, after its captures.
        bytes: what all captures took.
        seconds: how long all took.
    """
    held = list(others(runner))
    found = dict(held)
    if not found:
        return
    if len(found) < len(held):
        state.counters.warn_once(
            "not_recorded", f"{len(held) - len(found)} graphs of others' have keys that others have too: not entered."
        )
    own = state.registry.totals()
    left, spent = max(0, bytes - own.bytes_live), max(0.0, seconds - own.held.seconds)
    state.registry.plan(found)
    for key, graph in found.items():
        pool = "vllm-encoder" if key.stage == "encoder" else "vllm"
        state.registry.capture(key, bytes=left // len(found), seconds=spent / len(found), pool=pool)
        if graph is not None:
            graph.replay = _counted(graph, state, key)


def _counted(graph: Any, state: State, key: GraphKey) -> Callable[[], Any]:
    """That graph's replay, which the registry is told of. It doesn't hold the graph: vLLM frees it by dropping it."""
    replay, held = type(graph).replay, weakref.ref(graph)

    def counted() -> Any:
        with state.guard("not_recorded", "counting a replay"):
            state.registry.hit(key)
        return replay(held())

    return counted
