"""Quicker captures: what SGLang does more often than a graph needs is done once.

SGLang warms every size up twice before it captures it. The first warm-up loads kernels and pays what is set up at a
size's first step; what takes a second one is set up once a start, and both are kept for the first graph of each kind.
Later sizes have one: where SGLang asks for the second, it gets what the first gave. What is captured is the same step.

SGLang also walks through all of Python's objects before and after the captures of each phase, which takes seconds in
all. Here that is done once, after the last one: cycles that nothing uses any more live until then.

What both save is counted, since measuring costs may take of a start what they gave it: see `Savings`.
"""

from __future__ import annotations

import gc
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs

from kpolicy_sglang.arguments import resolved
from kpolicy_sglang.failures import Failures
from kpolicy_sglang.ranks import Ranks

__all__ = ["OneWarmUp", "Savings", "collected_once", "freeze_gc", "needs_one_warm_up", "no_memory", "without_frames"]

_BACKENDS = ("FullCudaGraphBackend", "BreakableCudaGraphBackend")
"""Backends whose procedure is known: two calls that warm up, and one that is captured."""
_WARM_UPS = 2
_KEEP_BOTH = ("enable_torch_compile", "debug_cuda_graph", "enable_profile_cuda_graph", "speculative_algorithm")
"""Arguments that compile at the second call, or do something else with it."""
_YOUNG = 1
"""The generation up to which Python's objects are few."""
_WALKS = 2
"""SGLang's walks through all objects around the captures of a phase."""
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
    by SGLang's own procedure. Where that goes well, so are all that come after it; an exception is SGLang's to handle.

    Args:
        capture: SGLang's own.
        device: the device's module of torch, which tells whether a capture is running.
        failures: where such a failure is noted.
        took: told the seconds of a second warm-up, where there is one.
    """

    def __init__(
        self,
        capture: Callable[..., Any],
        device: Any,
        failures: Failures,
        took: Callable[[float], None] = lambda _: None,
    ) -> None:
        self._capture, self._failures, self._took = capture, failures, took
        self._capturing: Callable[[], bool] = getattr(device, "is_current_stream_capturing", lambda: False)
        self._kinds: set[tuple[Any, ...]] = set()
        self._off = False

    def __call__(self, shape: Any, forward: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        kind = (shape.variant_label, shape.stream_idx, getattr(shape, "attention_variant", None))
        if self._off:
            return self._capture(shape, forward, *args, **kwargs)
        if kind not in self._kinds:
            timed = _Timed(forward)
            made = self._capture(shape, timed, *args, **kwargs)
            self._kinds.add(kind)
            if len(timed.seconds) == _WARM_UPS + 1:
                self._took(timed.seconds[_WARM_UPS - 1])
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
            failed = without_frames(error)
        made = self._capture(shape, forward, *args, **kwargs)
        self._off = True
        self._failures.note("a capture with one warm-up", failed, then="graphs are captured by SGLang's own procedure")
        return made


class _Timed:
    """A step whose calls are timed on the host."""

    def __init__(self, forward: Callable[[], Any]) -> None:
        self._forward = forward
        self.seconds: list[float] = []

    def __call__(self) -> Any:
        started = time.perf_counter()
        output = self._forward()
        self.seconds.append(time.perf_counter() - started)
        return output


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


def no_memory(error: BaseException) -> bool:
    """Whether an error of a capture, or one that led to it, says that there is no memory left.

    Out of memory between two segments of a graph, SGLang's own end of the capture fails for another reason.
    """
    return any(
        "out of memory" in text or "outofmemory" in text
        for text in (f"{type(each).__name__} {each}".lower() for each in _led_to(error))
    )


def _led_to(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those that it came after."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def without_frames(error: Exception) -> Exception:
    """An error that keeps no tensors of what failed: another capture needs their memory."""
    for each in _led_to(error):
        traceback.clear_frames(each.__traceback__)
    return error


@attrs.define
class Savings:
    """What a start's captures saved against SGLang's own, as far as that is known."""

    walk_s: float = 0.0
    """Seconds of the one walk through Python's objects; 0.0 where SGLang had its own."""
    warm_up_s: dict[str, float] = attrs.Factory(dict)
    """Seconds of a second warm-up by phase, where later graphs did without."""

    def seconds(self, graphs: Mapping[str, Sequence[float]], own: Mapping[str, int]) -> float:
        """Seconds that SGLang's captures would have taken longer; below 0.0 where they would have been shorter.

        Args:
            graphs: seconds of each graph by phase.
            own: how many SGLang has of its own, by phase; as many as there are where that isn't known.
        """
        saved = walks = 0.0
        for phase, each in graphs.items():
            count, warm_up_s = own.get(phase, len(each)), self.warm_up_s.get(phase, 0.0)
            walks += _WALKS * bool(count)
            if each:
                # The first graph has what is set up once in it, which SGLang's has too.
                usual_s = statistics.median(each)
                saved += (count - len(each)) * usual_s + max(count - 1, 0) * warm_up_s
        return saved + max(walks - 1, 0) * self.walk_s


@contextmanager
def collected_once(model_runner: Any, *, on: bool) -> Iterator[Savings]:
    """Have Python's garbage collector leave out what is there until the captures are done, and walk through it then.

    Where `--enable-cudagraph-gc` wants all objects looked at, they are. Yields what is saved: the walk's seconds are in
    it once it is done.
    """
    savings = Savings()
    if not on or getattr(resolved(model_runner.server_args), "enable_cudagraph_gc", False):
        yield savings
        return
    gc.collect(_YOUNG)
    gc.freeze()
    _frozen.append(True)
    try:
        yield savings
    finally:
        _frozen.pop()
        gc.unfreeze()
        # All of them, and last: Python goes by how many objects its last whole walk found when it decides on another,
        # which would come while requests are served.
        started = time.perf_counter()
        gc.collect()
        savings.walk_s = time.perf_counter() - started


def freeze_gc(original: Any, enable_cudagraph_gc: bool) -> Any:
    """AROUND `freeze_gc` of both runners: within `collected_once` nothing is left to freeze, or to unfreeze."""
    return original(enable_cudagraph_gc or bool(_frozen))
