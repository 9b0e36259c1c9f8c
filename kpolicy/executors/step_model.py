"""What a model must offer so that its steps can be captured: `StepModel`, and the step that its attention calls see.

A model runs over static inputs: tensors whose addresses don't change from step to step. Its attention calls are
*marked*: they go through `current_step().attention(...)`, so that a PIECEWISE capture can end a segment there, run the
call eagerly, and begin the next. Nothing here imports a device library; tensors are the device adapter's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from kpolicy.attention import AttentionSupport
from kpolicy.errors import ConfigError

__all__ = ["AttentionCall", "RowLayout", "StepContext", "StepModel", "StepTensors", "current_step", "running"]

Tensor = Any
"""A tensor of the device adapter's library."""


class StepTensors(NamedTuple):
    """One launch's inputs on the device, padding included.

    Views of static buffers, or plain tensors where no graph runs. Rows are decodes first, then prefill chunks, then
    padding.
    """

    token_ids: Tensor
    """[padded_tokens] int64; 0 in padding"""
    positions: Tensor
    """[padded_tokens] int64; 0 in padding"""
    slot_mapping: Tensor
    """[padded_tokens] int64, the KV slot that each token writes; the reserved slot in padding"""
    block_table: Tensor
    """[padded_reqs, max_blocks] int32; 0 beyond a row's blocks"""
    kv_lens: Tensor
    """[padded_reqs] int32, tokens attended to, this step's included; 0 in padding rows, which attend to nothing"""
    query_starts: Tensor
    """[padded_reqs + 1] int32, where each row's tokens begin; padding rows have no tokens but those of a uniform graph,
    where row i begins at i * query_len"""
    extra: Mapping[str, Tensor] = {}
    """More model inputs by name, [padded_tokens] or [padded_tokens, ...] each"""


class RowLayout(NamedTuple):
    """What the host knows of a launch's real rows, without padding: what an eager attention call may read.

    A captured call may not: a replay would go on with the lengths of the step that it was captured in.
    """

    num_tokens: int
    num_decodes: int
    """Rows at the front that are decodes"""
    query_lens: Sequence[int]
    """[num_reqs]"""
    kv_lens: Sequence[int]
    """[num_reqs]"""


AttentionCall = Callable[..., Any]
"""``call(step, *tensors) -> output``: one layer's attention over the step's KV cache, the KV write included. It takes
everything that changes from step to step from `step`, and never from what it was created with. Its output has a row
for each padded token and doesn't depend on the host where `step.layout` is None."""


class StepContext:
    """The step that is running on this thread.

    How `attention` runs a call depends on what is being done: plain here, ended segments in a PIECEWISE capture.

    Args:
        tensors: the launch's inputs.
        layout: what the host knows of its rows; None while a call is captured or must run as if it were.
        uniform_query_len: every row is a decode of that many tokens, padding rows included; None where rows differ.
            A fact of the launch's padded shape, as its graph key has it, so a captured call may read it: MLA chooses
            the computation by it, and tensors don't say whether four tokens are a decode or a prompt chunk.
    """

    def __init__(self, tensors: StepTensors, layout: RowLayout | None, uniform_query_len: int | None = None) -> None:
        self.tensors = tensors
        self.layout = layout
        self.uniform_query_len = uniform_query_len
        self.memo: dict[str, Any] = {}

    def attention(self, call: AttentionCall, *tensors: Tensor) -> Tensor:
        """Run a marked call: the break mark of PIECEWISE."""
        return call(self, *tensors)


class StepModel(Protocol):
    """A model whose steps can be captured. `kpolicy.load` makes one of a Hugging Face model.

    Optional, each with what is done without it:

    - ``device``: where its tensors are; the CPU.
    - ``max_num_reqs``: rows of a launch that replays, at most; 256.
    - `extra_inputs`: more inputs, (shape of one token's, dtype) by name; none.
    - ``static_tensors()``: what graphs read besides their inputs, by name; whether it moved isn't looked at.
    - ``watching(step)``: a context around a PIECEWISE capture that finds attention without its mark; only reads of the
      step's lengths, slots and block table are found.
    - ``num_blocks``, ``block_size`` and ``max_model_len``: its costs aren't measured, and `Engine` decides by analytic
      ones. With ``kv_untouched(slots)`` and ``clear_kv(slots)`` prompts attend to their own KV while they are timed.
    - ``full_name``: what the model calls itself, by which costs that were measured with another one are told. A rank's
      share of a model has none, since all ranks decide by rank 0's costs. With it ``model_shape``, what tells it from
      others of that name, as numbers and text by name.
    - ``greedy_in_graphs``: whether `sample` without sampling inputs can be captured, which nothing that waits for the
      device can; no, and each step samples behind its graph.
    - ``give_back()``: called when an executor is released, frees what the model keeps for steps to come.
    - ``layers`` and ``config``: on Ascend, how many streams a graph takes; its KV tensors are counted.
    """

    @property
    def support(self) -> AttentionSupport:
        """What of its attention can be captured."""
        ...

    @property
    def vocab(self) -> int: ...

    @property
    def max_blocks(self) -> int:
        """Columns of the block table."""
        ...

    @property
    def num_slots(self) -> int:
        """KV slots, without the reserved one."""
        ...

    @property
    def pad_slot(self) -> int:
        """The reserved KV slot that padding writes to."""
        ...

    def forward(self, step: StepContext) -> Tensor:
        """Everything before the LM head, attention calls through `step.attention`: [padded_tokens, hidden]."""
        ...

    def head(self, hidden: Tensor) -> Tensor:
        """The LM head over rows of `forward`'s result: [rows, vocab] logits."""
        ...

    def sample(self, logits: Tensor, step: Mapping[str, Tensor]) -> Tensor:
        """The next token of each row, on the device: [rows] int64.

        Args:
            logits: [rows, vocab].
            step: the rows' sampling inputs by name: ``temperature`` [rows] float32 (0 is greedy), ``seed`` [rows]
                int64, ``position`` [rows] int64, the position of the token that is sampled. Without ``temperature``
                every row is greedy: a choice of the launch, which a captured sampler may be made with.
        """
        ...

    def kv_caches(self) -> Sequence[Tensor]:
        """Every KV tensor, indexed by slot first: what a check of written KV reads, and poisons at the pad slot."""
        ...

    def release(self) -> None:
        """Give the KV memory back."""
        ...


_running = threading.local()


def current_step() -> StepContext:
    """The step that runs on this thread.

    Raises:
        ConfigError: none does: the model was called outside an executor.
    """
    step: StepContext | None = getattr(_running, "step", None)
    if step is None:
        raise ConfigError(
            "a marked attention call ran outside a step. Run the model through Engine.step, or call it inside "
            "kpolicy.executors.step_model.running(step)."
        )
    return step


@contextmanager
def running(step: StepContext) -> Iterator[StepContext]:
    """Make that step the current one of this thread."""
    before = getattr(_running, "step", None)
    _running.step = step
    try:
        yield step
    finally:
        _running.step = before
