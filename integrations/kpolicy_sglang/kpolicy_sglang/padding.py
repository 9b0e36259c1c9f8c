"""Padded replays of 0.5.16 without launches of their own for the padding.

A replay reads all rows of its graph's inputs, so that SGLang clears those which a batch leaves empty: a launch for each
buffer. Behind the attention of a prompt, which writes the batch's rows only, it clears the others of every layer's
output: a launch for each layer. A batch of exactly a captured size has none of them. Here the rows are cleared all the
same, to the same values, but by launches that there are anyway:

- The inputs' empty rows are copied from constants in the launch that copies the batch into the others (`Tails`).
- A prefill graph itself clears the rows of attention's output that a batch of its size may leave empty, right
  before the attention that runs between two of its segments (`attention_0_5_16`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

from kpolicy_sglang.bound import bind, names_of, wrapped_by
from kpolicy_sglang.captures import no_memory, without_frames
from kpolicy_sglang.failures import Failures
from kpolicy_sglang.ranks import Ranks

__all__ = [
    "Tails",
    "attention_0_5_16",
    "clear_in_graphs",
    "fill_from",
    "first_empty",
    "leave_tails",
    "leaves_attention_out",
    "take_tails",
]

_ATTRIBUTE = "_kpolicy_tails"
_KEPT = 1024
"""Sizes of batch and graph of which the empty rows are kept as views; those that come later have theirs made anew."""
_LEFT = frozenset({"global_num_tokens_gpu", "global_num_tokens_for_logprob_gpu"})
"""Slots with a step after the copy which does nothing where ranks don't gather their tokens."""
_MULTIMODAL = "mrope_positions"
"""The slot of multimodal (mrope) positions. No graph of a model without them reads it."""
_FILL, _COPY = "fill_from", "_grouped_foreach_copy_"
"""What brings a batch in, and by what name it calls the copy."""
_TAKES = (
    "self", "forward_batch", "raw_bs", "padded_bs", "raw_num_tokens", "padded_num_tokens", "pp_proxy_tensors",
)  # fmt: skip
"""All that it takes."""
_clearing: list[int] = []
"""The first row that the graph which is captured now clears of attention's output."""


# The inputs


class Tails:
    """What of a registry's buffers is cleared for a padded batch: the same rows as SGLang's, to the same values.

    Slots are asked once what they clear, and to what; those with more than a number a row, or not on the device, are
    cleared by SGLang. Multimodal positions aren't cleared: batches that have some are left to SGLang.

    Args:
        registry: SGLang's `CudaGraphBufferRegistry`.
        failures: where it is noted that the rows can't be had.
    """

    def __init__(self, registry: Any, failures: Failures) -> None:
        import torch

        self.failures, self.off = failures, False
        self.names = names_of(getattr(registry, _FILL))
        if _COPY not in self.names:
            raise LookupError(f"SGLang's {_FILL} has no {_COPY}")
        takes = tuple(inspect.signature(inspect.unwrap(getattr(type(registry), _FILL))).parameters)
        if takes != _TAKES:
            raise LookupError(f"SGLang's {_FILL} takes {', '.join(takes)}, and {', '.join(_TAKES)} are known")
        self.cleared_by_sglang: list[Any] = []
        self._buffers: dict[str, list[tuple[Any, Any]]] = {"bs": [], "tokens": []}
        self._kept: dict[tuple[int, ...], tuple[list[Any], list[Any]]] = {}
        # What is copied from is made at once: a step may run on another stream than the one before.
        constants: dict[tuple[Any, ...], Any] = {}
        longest = max(registry.max_bs, registry.max_num_tokens)
        for slot in registry._slots.values():
            policy, buffer = slot.padding_policy.name, slot.buffer
            if not slot.enabled or buffer is None or slot.axis not in self._buffers or slot.name == _MULTIMODAL:
                continue
            if policy not in ("ZERO", "FILL_SENTINEL"):
                continue
            value = 0 if policy == "ZERO" else slot.pad_value
            on_device = buffer.device.type == torch.device(registry.device).type
            if value is None or not on_device or buffer.dim() != 1 or slot.slice_fn is not None:
                self.cleared_by_sglang.append(slot)
                continue
            key = (value, buffer.dtype, buffer.device)
            if key not in constants:
                constants[key] = torch.full((longest,), value, dtype=buffer.dtype, device=buffer.device)
            self._buffers[slot.axis].append((buffer, constants[key]))

    def rest(
        self, forward_batch: Any, rows: int, padded_rows: int, tokens: int, padded_tokens: int
    ) -> tuple[list[Any], list[Any]] | None:
        """See `of`; None where SGLang clears it by itself."""
        # Multimodal positions are copied one by one, and so would be all that is copied beside them.
        if self.off or getattr(forward_batch, _MULTIMODAL, None) is not None:
            return None
        try:
            return self.of(rows, padded_rows, tokens, padded_tokens)
        # Whatever isn't as it is known to be, SGLang clears it by itself.
        except Exception as error:  # noqa: BLE001
            self.off = True
            self.failures.note("clearing what a batch leaves empty", error, then="SGLang clears it by itself")
            return None

    def of(self, rows: int, padded_rows: int, tokens: int, padded_tokens: int) -> tuple[list[Any], list[Any]]:
        """The empty rows of each buffer, and what is copied into each: of a batch, and of the graph that it pads to."""
        # A prompt has as many rows as its graph, however many those are.
        key = (tokens, padded_tokens) if rows >= padded_rows else (tokens, padded_tokens, rows, padded_rows)
        found = self._kept.get(key)
        if found is None:
            found = ([], [])
            for axis, raw, padded in (("tokens", tokens, padded_tokens), ("bs", rows, padded_rows)):
                for buffer, constant in self._buffers[axis] if raw < padded else ():
                    found[0].append(buffer[raw:padded])
                    found[1].append(constant[: padded - raw])
            if len(self._kept) < _KEPT:
                self._kept[key] = found
        return found


def take_tails(runner: Any, failures: Failures) -> None:
    """Clear a graph runner's buffers so from now on, but where more than a copy goes by the padded size."""
    registry = getattr(runner, "buffer_registry", None)
    if registry is None:
        return
    after = {slot.name for slot in registry._slots.values() if slot.enabled and slot.post_fill is not None}
    if not after or (after <= _LEFT and not getattr(runner, "require_gathered_buffer", True)):
        tails = Tails(registry, failures)
        setattr(registry, _ATTRIBUTE, tails)
        own = wrapped_by(registry, _FILL, fill_from)
        if own is not None:
            bind(registry, _FILL, _asked(tails, own, registry))


def _asked(tails: Tails, own: Any, registry: Any) -> Callable[..., Any]:
    """A registry's own `fill_from`: SGLang's, of a padded batch as of one without padding, the rest beside it.

    One function that hands each argument on by its name: what else it touched, or made, would cost as much again.
    """

    def fill_from(
        forward_batch: Any, *, raw_bs: int, padded_bs: int, raw_num_tokens: int, padded_num_tokens: int,
        pp_proxy_tensors: Any = None,
    ) -> Any:  # fmt: skip
        rest = None
        if raw_num_tokens < padded_num_tokens or raw_bs < padded_bs:
            rest = tails.rest(forward_batch, raw_bs, padded_bs, raw_num_tokens, padded_num_tokens)
        if rest is not None:
            for slot in tails.cleared_by_sglang:
                slot.reset_padding(slot._raw_n(raw_bs, raw_num_tokens), slot._padded_n(padded_bs, padded_num_tokens))
            padded_bs, padded_num_tokens = raw_bs, raw_num_tokens
            names, beside = tails.names, [rest]
            copy = _sglangs(names[_COPY])
            names[_COPY] = partial(_copied_along, copy, beside)
        try:
            found = own(
                registry, forward_batch, raw_bs=raw_bs, padded_bs=padded_bs, raw_num_tokens=raw_num_tokens,
                padded_num_tokens=padded_num_tokens, pp_proxy_tensors=pp_proxy_tensors,
            )  # fmt: skip
        finally:
            if rest is not None:
                names[_COPY] = copy
        if rest is not None and beside:  # nothing was copied to the device
            for tail, source in zip(*rest, strict=True):
                tail.copy_(source)
        return found

    return fill_from


def leave_tails(runner: Any) -> None:
    """Leave them to SGLang. What is copied from stays: a copy on another stream may still read it."""
    registry = getattr(runner, "buffer_registry", None)
    tails = getattr(registry, _ATTRIBUTE, None)
    if tails is not None:
        tails.off = True
        vars(registry).pop(_FILL, None)


def fill_from(original: Any, registry: Any, forward_batch: Any, **sizes: Any) -> Any:
    """AROUND `CudaGraphBufferRegistry.fill_from`: of a padded batch as of one without padding, the rest beside it."""
    tails = registry.__dict__.get(_ATTRIBUTE)
    if tails is None:
        return original(registry, forward_batch, **sizes)
    return _asked(tails, original, registry)(forward_batch, **sizes)


def _sglangs(copy: Any) -> Any:
    """SGLang's copy, also while another fill has put ours in its place."""
    return copy.args[0] if isinstance(copy, partial) and copy.func is _copied_along else copy


def _copied_along(copy: Any, beside: list[tuple[list[Any], list[Any]]], dsts: list[Any], srcs: list[Any]) -> None:
    """A fill's copy to the device, the first of which takes along the rows that its batch leaves empty."""
    if beside:
        into, sources = beside.pop()
        dsts, srcs = [*dsts, *into], [*srcs, *sources]
    copy(dsts, srcs)


# Attention's output


def first_empty(sizes: Sequence[int], size: int) -> int:
    """The first row that a batch may leave empty in the graph of a size: one that the next smaller has no room for."""
    return max((each for each in sizes if each < size), default=0) + 1


def leaves_attention_out(backend: Any, runner: Any) -> bool:
    """Whether a backend's graphs leave attention out, and one rank alone captures them.

    Of several ranks one might capture a size again, whose collectives would meet the others' next size.
    """
    return type(backend).__name__ == "BreakableCudaGraphBackend" and not Ranks(runner.model_runner).several


def clear_in_graphs(capture: Callable[..., Any], sizes: Sequence[int], failures: Failures) -> Callable[..., Any]:
    """A `capture_one` whose graphs clear the rows of attention's output that a batch may leave empty.

    A capture that fails so, but for want of memory, is done again as SGLang clears. Where that goes well, so are all
    after it; where it fails too, the first error is SGLang's to handle.

    Args:
        capture: captures a graph, with one warm-up or two.
        sizes: the sizes that are captured.
        failures: where a capture that failed is noted.
    """
    off: list[bool] = []

    def capture_one(shape: Any, *args: Any, **kwargs: Any) -> Any:
        if off:
            return capture(shape, *args, **kwargs)
        try:
            with _clear_from(first_empty(sizes, shape.size)):
                return capture(shape, *args, **kwargs)
        except Exception as error:
            if no_memory(error):
                raise
            failed = without_frames(error)
        try:
            made = capture(shape, *args, **kwargs)
        except Exception as error:
            raise failed from error
        off.append(True)
        failures.note("a capture that clears attention's output", failed, then="SGLang clears it by itself")
        return made

    return capture_one


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

    def attention(
        query: Any, key: Any, value: Any, output: Any, save_kv_cache: bool, layer_id: int, *, cleared_from: int,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        context = get_tc_piecewise_forward_context()
        rows = context.raw_num_tokens
        if rows is None or rows < cleared_from:
            return unified_attention_with_output(query, key, value, output, save_kv_cache, layer_id, **kwargs)
        context.raw_num_tokens = None
        try:
            return unified_attention_with_output(query, key, value, output, save_kv_cache, layer_id, **kwargs)
        finally:
            context.raw_num_tokens = rows

    made: Callable[..., Any] = eager_on_graph(True)(attention)
    return made
