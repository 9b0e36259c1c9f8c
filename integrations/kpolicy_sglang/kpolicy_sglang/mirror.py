"""SGLang's captured graphs in kpolicy's registry: bytes, seconds and hits of every `ShapeKey`.

The graph backend stays what SGLang made, with two of its methods wrapped on the instance: SGLang asks for the
backend's type in places.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kpolicy.keys import GraphKey
from kpolicy.modes import Part
from kpolicy.reasons import Reason
from kpolicy.registry import GraphRegistry
from kpolicy_sglang.captures import OneWarmUp, no_memory
from kpolicy_sglang.failures import Failures
from kpolicy_sglang.phase import DECODE

__all__ = ["key_of", "leave", "mirror", "pool_of"]


def key_of(shape: Any, phase: str, *, full: bool, width: int = 1) -> GraphKey:
    """The key that a `ShapeKey` stands for.

    Args:
        shape: SGLang's key.
        phase: the phase that it was captured for.
        full: whether the graph covers attention.
        width: tokens of a decode row.
    """
    labels = (shape.variant_label, getattr(shape, "attention_variant", None))
    stream = () if shape.stream_idx is None else (f"stream{shape.stream_idx}",)
    variant = " ".join((*(label for label in labels if label and label not in ("lora", "nolora")), *stream))
    lora_case = 1 if shape.variant_label == "lora" else 0
    if phase == DECODE:
        return GraphKey(
            Part.FULL if full else Part.PIECEWISE, shape.size * width, shape.size if full else None,
            query_len=width if full else None, lora_case=lora_case, variant=variant,
        )  # fmt: skip
    return GraphKey(Part.FULL if full else Part.PIECEWISE, shape.size, lora_case=lora_case, variant=variant)


def pool_of(phase: str) -> str:
    """The registry's pool of a phase's graphs."""
    return f"sglang {phase}"


def mirror(
    backend: Any, registry: GraphRegistry, phase: str, *, device: Any, width: int = 1, failures: Failures | None = None,
    serving: list[bool] | None = None, by_replay: Callable[[], None] | None = None, one_warm_up: bool = False,
    took: Callable[[float], None] = lambda _: None,
    clearing: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda capture: capture,
) -> Any:  # fmt: skip
    """Enter every capture and replay of a graph backend into the registry, and return the backend.

    Args:
        backend: what SGLang resolved.
        registry: where the graphs are entered.
        phase: the phase it serves.
        device: the device's module of torch, which tells free memory; None where there is none to ask.
        width: tokens of a decode row.
        serving: has an entry once replays are a server's; those before aren't hits. By default all are.
        by_replay: where a phase's steps tell the hits, called once a graph is captured that they don't tell from
            another of its size: from then on replays are counted one by one. Without it they are from the first.
        failures: where a graph that can't be entered is noted; SGLang captures it all the same.
        one_warm_up: capture with one warm-up where that is enough, see `kpolicy_sglang.captures`.
        took: told the seconds of a second warm-up then.
        clearing: makes a capture one whose graphs clear what a batch leaves empty, see `kpolicy_sglang.padding`.
    """
    failures = failures or Failures()
    full = "Breakable" not in type(backend).__name__ and "Piecewise" not in type(backend).__name__
    capture, replay, cleanup = backend.capture_one, backend.replay, backend.cleanup
    if one_warm_up:
        capture = OneWarmUp(capture, device, failures, took)
    # Around the warm-ups: each of its attempts has its own, and may do without one.
    capture = clearing(capture)
    # A backend made anew means that the graphs of the last one are gone.
    registry.evict_generation(pool_of(phase))
    keys: dict[Any, GraphKey] = {}
    hit, counted = registry.hit, [True] if serving is None else serving

    @contextmanager
    def entered() -> Iterator[None]:
        try:
            yield
        # Whatever the registry makes of it, the graph is SGLang's.
        except Exception as error:  # noqa: BLE001
            failures.note("entering a graph", error, then="the graph is captured and isn't in the registry")

    def capture_one(shape: Any, *args: Any, **kwargs: Any) -> Any:
        with entered():
            key = keys[shape] = key_of(shape, phase, full=full, width=width)
            if by_replay is not None and (key.lora_case or key.variant) and backend.replay is not replay_one:
                by_replay()
                backend.replay = replay_one
            registry.plan([key])
        started, free = time.perf_counter(), _free_bytes(device)
        try:
            made = capture(shape, *args, **kwargs)
        except Exception as error:
            with entered():
                registry.fail(keys[shape], _reason(error), seconds=time.perf_counter() - started)
            raise
        with entered():
            registry.capture(
                keys[shape],
                bytes=max(free - _free_bytes(device), 0),
                seconds=time.perf_counter() - started,
                pool=pool_of(phase),
                handle=shape,
            )
        return made

    def replay_one(shape: Any, *args: Any, **kwargs: Any) -> Any:
        key = keys.get(shape)
        if key is not None and counted:
            hit(key)
        return replay(shape, *args, **kwargs)

    def clean() -> Any:
        with entered():
            registry.evict_generation(pool_of(phase))
        return cleanup()

    backend.capture_one, backend.cleanup = capture_one, clean
    if by_replay is None:
        backend.replay = replay_one
    return backend


def leave(backend: Any) -> None:
    """Have a graph backend's methods be its own again."""
    for name in ("capture_one", "replay", "cleanup"):
        getattr(backend, "__dict__", {}).pop(name, None)


def _free_bytes(device: Any) -> int:
    """Free memory; 0 of a device that doesn't tell."""
    ask = getattr(device, "mem_get_info", None)
    return 0 if ask is None else int(ask()[0])


def _reason(error: Exception) -> Reason:
    return Reason.CAPTURE_OUT_OF_MEMORY if no_memory(error) else Reason.CAPTURE_FAILED
