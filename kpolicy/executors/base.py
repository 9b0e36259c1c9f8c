"""What an executor is: it captures graphs for keys and runs decisions. Devices differ below this line, modes don't."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import attrs

from kpolicy.decision import Decision
from kpolicy.keys import GraphKey
from kpolicy.modes import Rows
from kpolicy.registry import GraphRegistry
from kpolicy.shapes import BatchNumbers

__all__ = [
    "CaptureReport",
    "Executor",
    "ProbeReport",
    "ProbeStatus",
    "ReadyEvent",
    "StepInputs",
    "StepOutputs",
]


class ProbeStatus(str, Enum):
    """What a look at a device or an extra found."""

    USABLE = "usable"
    ABSENT = "absent"
    BROKEN = "broken"
    MASKED = "masked"
    """There, but claimed by another: a vendor that presents itself as CUDA, or switched off by a variable."""

    def __str__(self) -> str:
        return self.value


@attrs.frozen
class ProbeReport:
    """What a probe found: a device, an extra or a plugin.

    Args:
        name: what was probed.
        status: usable, absent, broken or masked.
        reason: why, in words, with the next step where there is one.
        facts: versions, device counts and the like.
    """

    name: str
    status: ProbeStatus
    reason: str
    facts: Mapping[str, Any] = attrs.field(factory=dict)


NO_SAMPLING: Mapping[str, Any] = MappingProxyType({})


class StepInputs(NamedTuple):
    """One step's inputs in the shape's row order: decode rows, then prefill chunks.

    Sequences hold plain numbers or device tensors, as the executor takes them.
    """

    numbers: BatchNumbers
    query_lens: Sequence[int]
    """[num_reqs]"""
    token_ids: Sequence[int]
    """[num_tokens]"""
    positions: Sequence[int]
    """[num_tokens]"""
    slot_mapping: Sequence[int]
    """[num_tokens], the KV slot that each token writes"""
    block_table: Sequence[Sequence[int]]
    """[num_reqs, max_blocks]"""
    kv_lens: Sequence[int]
    """[num_reqs], tokens attended to, this step's included"""
    wanted: Sequence[int]
    """[num_wanted], indices into the tokens of the rows whose outputs are wanted, rising; the last token of each decode
    row is always among them"""
    slots_ahead: Sequence[Sequence[int]] = ()
    """[max_decode_steps - 1, num_decodes], KV slots reserved for decode steps beyond the first"""
    sampling: Mapping[str, Sequence[float]] = NO_SAMPLING
    """[num_wanted] each, what a device sampler reads by name (``temperature``, ``seed``); without one, and by default,
    the likeliest token is taken"""
    extra: Mapping[str, Any] = NO_SAMPLING
    """[num_tokens, ...] each, more model inputs by name"""


class ReadyEvent(Protocol):
    """When a launch's outputs are there."""

    def done(self) -> bool:
        """Whether they are. Never waits."""
        ...

    def wait(self) -> None:
        """Block until they are."""
        ...

    @property
    def us(self) -> float:
        """Microseconds from the step's start until they were there. Waits for it."""
        ...


class StepOutputs(NamedTuple):
    """What a step gave back. Outputs are copies: the next replay doesn't overwrite them.

    Reading the values of an output, or a time, waits for its launch where the device runs behind the host.
    """

    outputs: Sequence[Any]
    """[num_wanted], one output a wanted row (logits, or a hash in the simulated executor)"""
    tokens: Sequence[Sequence[int]]
    """[decode_steps, num_decodes], tokens sampled on the device for decode rows; empty without a device sampler"""
    decision: Decision
    """What ran, after any fallback inside the step"""
    ready: Sequence[ReadyEvent]
    """One for each launch of the decision, in launch order"""
    first_tokens: Sequence[int] = ()
    """[wanted prefill rows], tokens sampled on the device for prompts that end here; empty without a device sampler"""

    @property
    def cycle_us(self) -> float:
        """Microseconds from the step's start until all of its outputs were there."""
        ready = self.ready
        return ready[0].us if len(ready) == 1 else max((event.us for event in ready), default=0.0)

    @property
    def ready_us(self) -> dict[Rows, float]:
        """Microseconds from the step's start until each part's outputs were there."""
        return {launch.rows: event.us for launch, event in zip(self.decision.launches, self.ready, strict=True)}


new_outputs = partial(tuple.__new__, StepOutputs)
"""Makes them of a tuple, as `StepOutputs._make` does without a function of Python's"""


class CaptureReport(NamedTuple):
    """What one capture cost."""

    bytes: int
    seconds: float
    streams: int = 1
    graphs: int = 1
    """Device graphs that the key is made of: one for FULL, one a piece for PIECEWISE."""


@runtime_checkable
class Executor(Protocol):
    """Runs decisions on one device, and records every graph in the registry it was opened with.

    Outside packages register theirs as `kpolicy.executors` entry points and hold it to
    `kpolicy.testing.EXECUTOR_CHECKS`.

    An Engine also reads these, where an executor has them: ``runs_behind``, whether a step is surely not over when
    `run` returns; ``captured``, the keys that it has graphs of where others share its registry; ``model``, the step
    model as the executor knows it, with what it found out about attention; ``device_name``, which measured costs of
    another device are told by; ``look()``, called now and then while the device is at work: it withdraws graphs that
    read memory which has moved, and says whether there were any.
    """

    @property
    def name(self) -> str: ...

    def open(self, registry: GraphRegistry) -> None:
        """Take the registry that all graphs are recorded in. Called before anything else.

        Raises:
            RegistryError: it was opened with another registry.
        """
        ...

    def capture(
        self, keys: Iterable[GraphKey], progress: Callable[[GraphKey, CaptureReport | None], None] | None = None
    ) -> None:
        """Capture keys, largest first; a key that can't be had ends up failed or withdrawn in the registry.

        Keys that had failed or were withdrawn are planned anew and tried again.

        Raises:
            StickyDeviceError: the device is lost.
        """
        ...

    def run(self, decision: Decision, inputs: StepInputs) -> StepOutputs:
        """Run one step as decided.

        Raises:
            RegistryError: the decision names a graph that this executor hasn't captured, or one with fewer tokens or
                rows than its launch.
            GraphReplayError: the first launch's graph failed before anything was launched.
            StickyDeviceError: the device is lost.
        """
        ...

    def release(self) -> None:
        """Give back every graph and buffer; the registry says so."""
        ...
