"""How a step is divided and put together: the inputs of a part, its outputs, and the outputs of several parts."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple, overload

import attrs

from kpolicy.decision import Decision
from kpolicy.executors.base import NO_SAMPLING, StepInputs, StepOutputs
from kpolicy.keys import GraphKey
from kpolicy.modes import Rows
from kpolicy.reasons import Reason

__all__ = ["LateOutputs", "PartOutputs", "joined", "part_of", "without_graph"]


class PartOutputs(NamedTuple):
    """What one launch gave back, as copies."""

    outputs: Sequence[Any]
    """[num_wanted of these rows], of the last repeat"""
    tokens: Sequence[Sequence[int]]
    """[repeat, num_decodes], sampled on the device; empty for prefill rows and without a device sampler"""
    first_tokens: Sequence[int] = ()
    """[wanted prefill rows], likewise for prompts that end here"""

    @property
    def runs_behind(self) -> bool:
        """Whether it may still run: then `failed_key` isn't final."""
        return False

    @property
    def failed_key(self) -> GraphKey | None:
        """The graph that failed behind the host, before its launch, so that its rows ran eagerly at its shape."""
        return None


def without_graph(decision: Decision, place: int, reason: Reason = Reason.REPLAY_FAILED) -> Decision:
    """The decision with one launch run eagerly at its graph's size, because the graph failed for that reason."""
    launches = list(decision.launches)
    launch = launches[place]
    assert launch.key is not None  # noqa: S101 - only a graph fails so
    launches[place] = attrs.evolve(launch, key=None, padded_tokens=launch.key.num_tokens, reason=reason)
    return attrs.evolve(decision, launches=tuple(launches))


class LateOutputs(StepOutputs):
    """Outputs of launches that run behind the host: what ran is known for good when they are ready."""

    _parts: Sequence[PartOutputs] = ()

    @classmethod
    def of(cls, outputs: StepOutputs, parts: Sequence[PartOutputs]) -> StepOutputs:
        late = cls(*outputs)
        late._parts = parts
        return late

    @property
    def decision(self) -> Decision:
        ran: Decision = self[2]
        for place, part in enumerate(self._parts):
            if part.failed_key is not None:
                ran = without_graph(ran, place)
        return ran

    @property
    def failed_keys(self) -> dict[int, GraphKey]:
        """By launch, the graphs that failed behind the host: its rows ran as a replay of them would have."""
        found = {place: part.failed_key for place, part in enumerate(self._parts)}
        return {place: key for place, key in found.items() if key is not None}


class _Joined(Sequence[Any]):
    """Several sequences as one; reading an item reads it where it is."""

    def __init__(self, parts: Sequence[Sequence[Any]]) -> None:
        self._parts = parts

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    @overload
    def __getitem__(self, at: int) -> Any: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Any]: ...
    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        at = range(len(self))[at]
        for part in self._parts:
            if at < len(part):
                return part[at]
            at -= len(part)
        raise IndexError(at)

    def __repr__(self) -> str:
        return repr([item for part in self._parts for item in part])


def joined(parts: Sequence[Sequence[Any]]) -> Sequence[Any]:
    """The parts' items in order; parts that are empty or the only one are no join."""
    parts = [part for part in parts if len(part)]
    if len(parts) == 1:
        return parts[0]
    if all(isinstance(part, list) for part in parts):
        return [item for part in parts for item in part]
    return _Joined(parts)


def part_of(inputs: StepInputs, rows: Rows) -> StepInputs:
    """The inputs of the decode rows or of the prefill rows, as a batch of their own."""
    numbers = inputs.numbers
    num_reqs, num_tokens = numbers.num_decodes, numbers.decode_tokens
    num_wanted = _first_at(inputs.wanted, num_tokens)
    if rows is Rows.DECODE:
        return StepInputs(
            numbers, inputs.query_lens[:num_reqs], inputs.token_ids[:num_tokens], inputs.positions[:num_tokens],
            inputs.slot_mapping[:num_tokens], inputs.block_table[:num_reqs], inputs.kv_lens[:num_reqs],
            inputs.wanted[:num_wanted], inputs.slots_ahead,
            {name: values[:num_wanted] for name, values in inputs.sampling.items()} if inputs.sampling else NO_SAMPLING,
            {name: values[:num_tokens] for name, values in inputs.extra.items()} if inputs.extra else NO_SAMPLING,
        )  # fmt: skip
    return StepInputs(
        numbers, inputs.query_lens[num_reqs:], inputs.token_ids[num_tokens:], inputs.positions[num_tokens:],
        inputs.slot_mapping[num_tokens:], inputs.block_table[num_reqs:], inputs.kv_lens[num_reqs:],
        [token - num_tokens for token in inputs.wanted[num_wanted:]], (),
        {name: values[num_wanted:] for name, values in inputs.sampling.items()} if inputs.sampling else NO_SAMPLING,
        {name: values[num_tokens:] for name, values in inputs.extra.items()} if inputs.extra else NO_SAMPLING,
    )  # fmt: skip


def _first_at(wanted: Sequence[int], token: int) -> int:
    """How many wanted rows come before that token."""
    return bisect_left(wanted, token)
