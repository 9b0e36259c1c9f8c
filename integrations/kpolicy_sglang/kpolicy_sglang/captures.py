"""Quicker captures: what SGLang does more often than a graph needs is done once.

SGLang warms every size up twice before it captures it. The first warm-up loads kernels and pays what is set up at a
size's first step; what takes a second one is set up once a start, and both are kept for the first graph of each kind.
Later sizes have one: where SGLang asks for the second, it gets what the first gave. What is captured is the same step.

SGLang also walks through all of Python's objects before and after the captures of each phase, which takes seconds in
all. Here that is done once, after the last one: cycles that nothing uses any more live until then.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kpolicy_sglang.arguments import resolved
from kpolicy_sglang.failures import Failures
from kpolicy_sglang.ranks import Ranks

__all__ = ["OneWarmUp", "collected_once", "freeze_gc", "needs_one_warm_up", "no_memory"]

_BACKENDS = ("FullCudaGraphBackend", "BreakableCudaGraphBackend")
"""Backends whose procedure is known: two calls that warm up, and one that is captured."""
_WARM_UPS = 2
_KEEP_BOTH = ("enable_torch_compile", "debug_cuda_graph", "enable_profile_cuda_graph", "speculative_algorithm")
"""Arguments that compile at the second call, or do something else with it."""
_YOUNG = 1
"""The generation up to which Python's objects are few."""
_frozen: list[bool] = []


def needs_one_warm_up(backend: Any, runner: Any) -> bool:
    """Whether one warm-up is enough for all graphs of a backend but its first.

    Several ranks keep both: their steps have collectives inside, whose own set-up was not looked at. So does an
    attention backend that sets back what a warm-up changed.
    """
    model_runner = runner.model_runner
    args = resolved(model_runner.server_args)
    if type(backend).__name__ not in _BACKENDS or any(getattr(args, name, None) for name in _KEEP_BOTH):
        return False
    attention = getattr(runner, "attn_backend", None) or model_runner.attn_backend
    sets_back = getattr(type(attention), "on_after_cuda_graph_warmup", None)
    own = sets_back is not None and getattr(sets_back, "__qualname__", "").partition(".")[0] != "AttentionBackend"
    return not own and not Ranks(model_runner).several


class OneWarmUp:
    """A backend's `capture_one` with one warm-up for all graphs but the first of each kind.

    Where a capture fails so, or SGLang doesn't call the step as often as it is known to, that graph is captured again
    by SGLang's own procedure, and so are all that come after it. An exception is SGLang's to handle then.

    Args:
        capture: SGLang's own.
        device: the device's module of torch, which tells whether a capture is running.
        failures: where such a failure is noted.
    """

    def __init__(self, capture: Callable[..., Any], device: Any, failures: Failures) -> None:
        self._capture, self._failures = capture, failures
        self._capturing: Callable[[], bool] = getattr(device, "is_current_stream_capturing", lambda: False)
        self._kinds: set[tuple[Any, ...]] = set()
        self._off = False

    def __call__(self, shape: Any, forward: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        kind = (shape.variant_label, shape.stream_idx, getattr(shape, "attention_variant", None))
        if self._off or kind not in self._kinds:
            made = self._capture(shape, forward, *args, **kwargs)
            self._kinds.add(kind)
            return made
        step = _Step(forward, self._capturing)
        try:
            made = self._capture(shape, step, *args, **kwargs)
            if step.as_known:
                return made
            raise RuntimeError(f"SGLang called the step {step.calls} times for a graph, {_WARM_UPS + 1} are known")
        except Exception as error:
            if no_memory(error):
                raise
            self._off = True
            self._failures.note(
                "a capture with one warm-up", error, then="graphs are captured by SGLang's own procedure"
            )
        return self._capture(shape, forward, *args, **kwargs)


class _Step:
    """A step that isn't run for SGLang's second warm-up, which gets what the first gave."""

    def __init__(self, forward: Callable[[], Any], capturing: Callable[[], bool]) -> None:
        self._forward, self._capturing = forward, capturing
        self._first: Any = None
        self._left_out = False
        self.calls = 0

    def __call__(self) -> Any:
        self.calls += 1
        # Kept no longer than SGLang itself would: the memory is the capture's.
        first, self._first = self._first, None
        if self.calls == _WARM_UPS and not self._capturing():
            self._left_out = True
            return first
        del first
        output = self._forward()
        if self.calls < _WARM_UPS:
            self._first = output
        return output

    @property
    def as_known(self) -> bool:
        """Whether what was captured is the step, and not what was kept of a warm-up."""
        return not self._left_out or self.calls == _WARM_UPS + 1


def no_memory(error: Exception) -> bool:
    """Whether an error of a capture says that there is no memory left."""
    text = f"{type(error).__name__} {error}".lower()
    return "out of memory" in text or "outofmemory" in text


@contextmanager
def collected_once(model_runner: Any, *, on: bool) -> Iterator[None]:
    """Have Python's garbage collector leave out what is there until the captures are done, and walk through it then.

    Where `--enable-cudagraph-gc` wants all objects looked at, they are.
    """
    if not on or getattr(resolved(model_runner.server_args), "enable_cudagraph_gc", False):
        yield
        return
    gc.collect(_YOUNG)
    gc.freeze()
    _frozen.append(True)
    try:
        yield
    finally:
        _frozen.pop()
        gc.unfreeze()
        # All of them, and last: Python goes by how many objects its last whole walk found when it decides on another,
        # which would come while requests are served.
        gc.collect()


def freeze_gc(original: Any, enable_cudagraph_gc: bool) -> Any:
    """AROUND `freeze_gc` of both runners: within `collected_once` nothing is left to freeze, or to unfreeze."""
    return original(enable_cudagraph_gc or bool(_frozen))
