"""Padded replays without launches of their own for the padding.

A replay reads all rows of its graph's inputs, so that SGLang clears those which a batch leaves empty: a launch for each
buffer. Behind the attention of a prompt, which writes the batch's rows only, it clears the others of every layer's
output: a launch for each layer. A batch of exactly a captured size has none of them. Here the rows are cleared all the
same, to the same values, but by launches that there are anyway:

- The inputs' empty rows are copied from constants in the launch that copies the batch into the others (`Tails`).
- On 0.5.16 a prefill graph itself clears the rows of attention's output that a batch of its size may leave empty, right
  before the attention that runs between two of its segments (`attention_0_5_16`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any

from kpolicy_sglang.captures import no_memory
from kpolicy_sglang.failures import Failures

__all__ = [
    "Tails",
    "attention_0_5_16",
    "clear_in_graphs",
    "fill_from",
    "first_empty",
    "grouped_copy",
    "leave_tails",
    "take_tails",
]

_ATTRIBUTE = "_kpolicy_tails"
_KEPT = 256
"""Batches and graphs by size of which the empty rows are kept as views."""
_LEFT = frozenset({"global_num_tokens_gpu", "global_num_tokens_for_logprob_gpu"})
"""Slots with a step after the copy which does nothing where ranks don't gather their tokens."""
_beside: list[tuple[list[Any], list[Any]]] = []
"""The rows that the next copy of a fill takes along."""
_clearing: list[int] = []
"""The first row that the graph which is captured now clears of attention's output."""


# The inputs


class Tails:
    """What of a registry's buffers is cleared for a padded batch: the same rows as SGLang's, to the same values.

    Slots are asked what they clear, and to what; those with more than a number a row, or not on the device, clear their
    own.

    Args:
        registry: SGLang's `CudaGraphBufferRegistry`.
        failures: where it is noted that the rows can't be had.
    """

    def __init__(self, registry: Any, failures: Failures) -> None:
        import torch

        self.failures = failures
        self._torch = torch
        self._registry = registry
        self._device = torch.device(registry.device).type
        self._constants: dict[tuple[Any, ...], Any] = {}
        self.of = lru_cache(_KEPT)(self._of)
        # What is copied from is made at once: a step may run on another stream than the one before.
        self._of(0, registry.max_bs, 0, registry.max_num_tokens)

    def _of(
        self, raw_bs: int, padded_bs: int, raw_tokens: int, padded_tokens: int
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Tails, what is copied into each, and (slot, first row, end) of slots that clear their own."""
        tails: list[Any] = []
        sources: list[Any] = []
        own: list[Any] = []
        for slot in self._registry._slots.values():
            if not slot.enabled or slot.buffer is None:
                continue
            raw, padded = slot._raw_n(raw_bs, raw_tokens), slot._padded_n(padded_bs, padded_tokens)
            policy, buffer = slot.padding_policy.name, slot.buffer
            if raw >= padded or policy not in ("ZERO", "FILL_SENTINEL"):
                continue
            value = 0 if policy == "ZERO" else slot.pad_value
            # Positions of several kinds are a row of tokens each, and are copied as such: what a copy takes along
            # lies together.
            of_kinds = buffer.dim() == 2 and slot.slice_fn is not None
            if (
                value is None
                or buffer.device.type != self._device
                or not (of_kinds or (buffer.dim() == 1 and slot.slice_fn is None))
            ):
                own.append((slot, raw, padded))
                continue
            for each in slot.slice_fn(buffer, padded) if of_kinds else (buffer,):
                tail = each[raw:padded]
                tails.append(tail)
                sources.append(self._constant(value, tail))
        return tails, sources, own

    def _constant(self, value: Any, like: Any) -> Any:
        """As many of a value as a tail has."""
        key = (value, like.dtype, like.device)
        longest = max(self._registry.max_bs, self._registry.max_num_tokens)
        if key not in self._constants:
            self._constants[key] = self._torch.full((longest,), value, dtype=like.dtype, device=like.device)
        return self._constants[key][: like.shape[0]]


def take_tails(runner: Any, failures: Failures) -> None:
    """Clear a graph runner's buffers so from now on, but where more than a copy goes by the padded size."""
    registry = getattr(runner, "buffer_registry", None)
    if registry is None:
        return
    after = {slot.name for slot in registry._slots.values() if slot.enabled and slot.post_fill is not None}
    if not after or (after <= _LEFT and not getattr(runner, "require_gathered_buffer", True)):
        setattr(registry, _ATTRIBUTE, Tails(registry, failures))


def leave_tails(runner: Any) -> None:
    """Leave them to SGLang."""
    registry = getattr(runner, "buffer_registry", None)
    if hasattr(registry, _ATTRIBUTE):
        delattr(registry, _ATTRIBUTE)


def fill_from(original: Any, registry: Any, forward_batch: Any, **sizes: Any) -> Any:
    """AROUND `CudaGraphBufferRegistry.fill_from`: of a padded batch as of one without padding, the rest beside it."""
    tails = registry.__dict__.get(_ATTRIBUTE)
    if (
        tails is None
        or (sizes["raw_num_tokens"] >= sizes["padded_num_tokens"] and sizes["raw_bs"] >= sizes["padded_bs"])
        # Positions of several kinds are copied one by one, and so would be all that is copied beside them.
        or getattr(forward_batch, "mrope_positions", None) is not None
        or sizes.get("skip_slots")
    ):
        return original(registry, forward_batch, **sizes)
    rows, tokens = sizes["raw_bs"], sizes["raw_num_tokens"]
    try:
        into, sources, own = tails.of(rows, sizes["padded_bs"], tokens, sizes["padded_num_tokens"])
    # Whatever isn't as it is known to be, SGLang clears it by itself.
    except Exception as error:  # noqa: BLE001
        delattr(registry, _ATTRIBUTE)
        tails.failures.note("clearing what a batch leaves empty", error, then="SGLang clears it by itself")
        return original(registry, forward_batch, **sizes)
    for slot, first, end in own:
        slot.reset_padding(first, end)
    sizes["padded_bs"], sizes["padded_num_tokens"] = rows, tokens
    _beside.append((into, sources))
    try:
        found = original(registry, forward_batch, **sizes)
        if _beside:  # nothing was copied to the device
            for tail, source in zip(into, sources, strict=True):
                tail.copy_(source)
        return found
    finally:
        _beside.clear()


def grouped_copy(original: Any, dsts: list[Any], srcs: list[Any]) -> None:
    """AROUND `_grouped_foreach_copy_`: a padded batch's copy takes the rows that it leaves empty along."""
    if _beside:
        into, sources = _beside.pop()
        dsts, srcs = [*dsts, *into], [*srcs, *sources]
    original(dsts, srcs)


# Attention's output


def first_empty(sizes: Sequence[int], size: int) -> int:
    """The first row that a batch may leave empty in the graph of a size: one that the next smaller has no room for."""
    return max((each for each in sizes if each < size), default=0) + 1


def clear_in_graphs(backend: Any, sizes: Sequence[int], failures: Failures) -> None:
    """Have a backend's graphs clear the rows of attention's output that a batch may leave empty.

    A capture that fails so, but for want of memory, is done again as SGLang does it, and so are all after it.

    Args:
        backend: what SGLang resolved; nothing is done for one whose graphs don't leave attention out.
        sizes: the sizes that are captured.
        failures: where a capture that failed is noted.
    """
    if type(backend).__name__ != "BreakableCudaGraphBackend":
        return
    capture = backend.capture_one
    off: list[bool] = []

    def capture_one(shape: Any, *args: Any, **kwargs: Any) -> Any:
        if not off:
            try:
                with _clear_from(first_empty(sizes, shape.size)):
                    return capture(shape, *args, **kwargs)
            except Exception as error:
                if no_memory(error):
                    raise
                off.append(True)
                failures.note("a capture that clears attention's output", error, then="SGLang clears it by itself")
        return capture(shape, *args, **kwargs)

    backend.capture_one = capture_one


@contextmanager
def _clear_from(first: int) -> Iterator[None]:
    _clearing.append(first)
    try:
        yield
    finally:
        _clearing.pop()


def attention_0_5_16(
    original: Any, query: Any, key: Any, value: Any, output: Any, save_kv_cache: bool, layer_id: int, **kwargs: Any
) -> Any:
    """AROUND `breakable_unified_attention_with_output`, which ends a segment and runs attention after it.

    The segment's last step clears the rows of the output from the first that a batch may leave empty. It is captured
    with the segment, in warm-ups it is run.
    """
    if not _clearing:
        return original(query, key, value, output, save_kv_cache, layer_id, **kwargs)
    output[_clearing[-1] :].zero_()
    return _cleared_attention()(
        query, key, value, output, save_kv_cache, layer_id, cleared_from=_clearing[-1], **kwargs
    )


@cache
def _cleared_attention() -> Callable[..., Any]:
    """SGLang's attention between two segments of which the first cleared the output's rows from one on.

    SGLang clears the rows behind the batch's where it is told how many those are. It is where the graph left one of
    them out, a batch that another graph has room for.
    """
    from sglang.srt.layers.radix_attention import unified_attention_with_output
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import eager_on_graph
    from sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph import get_tc_piecewise_forward_context

    def attention(*args: Any, cleared_from: int, **kwargs: Any) -> Any:
        context = get_tc_piecewise_forward_context()
        rows = context.raw_num_tokens
        if rows is None or rows < cleared_from:
            return unified_attention_with_output(*args, **kwargs)
        context.raw_num_tokens = None
        try:
            return unified_attention_with_output(*args, **kwargs)
        finally:
            context.raw_num_tokens = rows

    made: Callable[..., Any] = eager_on_graph(True)(attention)
    return made
