"""`StepBuffers`: the static inputs of one pool, how a launch's rows are padded into them, and their views."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

from kpolicy.executors.base import StepInputs
from kpolicy.executors.device import DeviceAdapter, Span
from kpolicy.executors.launch_rows import check_extra, check_fit, check_sampling, slots_ahead
from kpolicy.executors.step_model import StepModel, StepTensors

__all__ = ["PaddedShape", "StepBuffers", "extra_inputs"]

Tensor = Any

STEPS_AHEAD = 16
"""Decode steps beyond the first that a launch's slots are reserved for without allocating: twice what the batcher
offers."""
_OF_DECODES = "token_ids", "positions", "slot_mapping", "block_table", "kv_lens"
"""What a step of decodes stages"""


class PaddedShape(NamedTuple):
    """The shape that a launch is padded to."""

    num_tokens: int
    num_reqs: int
    uniform_query_len: int | None
    """As `StepContext` has it"""


def extra_inputs(model: StepModel) -> Mapping[str, tuple[Sequence[int], str]]:
    """The model's further inputs: (shape of one token's, dtype) by name. A model without has no such attribute."""
    inputs: Mapping[str, tuple[Sequence[int], str]] = getattr(model, "extra_inputs", {})
    return inputs


class StepBuffers:
    """Static inputs for launches of up to so many tokens and rows; smaller ones use the front.

    Args:
        adapter: the device.
        model: whose inputs they are.
        num_tokens, num_reqs: the most of a launch, padding included.
    """

    def __init__(self, adapter: DeviceAdapter, model: StepModel, num_tokens: int, num_reqs: int) -> None:
        self._adapter = adapter
        self._stagers: list[tuple[ReferenceType[Any], list[Tensor]]] = []
        """Those that graphs still have: what is captured anew has another"""
        # Optional for an adapter: a launch's buffers in one call.
        self._stage_all: Callable[[Sequence[Any]], None] | None = getattr(adapter, "stage_all", None)
        self._pad_slot = model.pad_slot
        self.num_tokens = num_tokens
        self.num_reqs = num_reqs
        most = max(num_tokens, num_reqs)
        extra = {name: ((num_tokens, *shape), dtype, 0) for name, (shape, dtype) in extra_inputs(model).items()}
        inputs = {
            "token_ids": ((num_tokens,), "int64", 0),
            "positions": ((num_tokens,), "int64", 0),
            "slot_mapping": ((num_tokens,), "int64", model.pad_slot),
            "kv_lens": ((num_reqs,), "int32", 0),
            "query_starts": ((num_reqs + 1,), "int32", 0),
            "wanted": ((most,), "int64", 0),
            **extra,
            "temperature": ((most,), "float32", 0),
            "seed": ((most,), "int64", 0),
            "block_table": ((num_reqs, model.max_blocks), "int32", 0),
            "slots_ahead": ((STEPS_AHEAD, num_reqs), "int64", model.pad_slot),
        }
        made = dict(zip(inputs, adapter.alloc_inputs(list(inputs.values())), strict=True))
        self.token_ids, self.positions, self.slot_mapping = (
            made["token_ids"], made["positions"], made["slot_mapping"]
        )  # fmt: skip
        self.block_table, self.kv_lens, self.query_starts = (
            made["block_table"], made["kv_lens"], made["query_starts"]
        )  # fmt: skip
        self.wanted, self.temperature, self.seed = made["wanted"], made["temperature"], made["seed"]
        self.slots_ahead = made["slots_ahead"]
        self.extra = {name: made[name] for name in extra}
        self._uniform_starts: dict[int, Tensor] = {}
        self._views: dict[PaddedShape, StepTensors] = {}

    @property
    def num_bytes(self) -> int:
        """Device memory of the buffers, without what lies between them."""
        buffers = [
            self.token_ids, self.positions, self.slot_mapping, self.block_table, self.kv_lens, self.query_starts,
            self.wanted, self.temperature, self.seed, self.slots_ahead, *self.extra.values(),
            *self._uniform_starts.values(),
        ]  # fmt: skip
        return sum(each.numel() * each.element_size() for each in buffers)

    def holds(self, num_tokens: int, num_reqs: int) -> bool:
        return num_tokens <= self.num_tokens and num_reqs <= self.num_reqs

    def tensors(self, shape: PaddedShape) -> StepTensors:
        """Views of the front, made once a shape: they are addresses, and a graph keeps them."""
        views = self._views.get(shape)
        if views is None:
            tokens, reqs, query_len = shape
            starts = self.query_starts if query_len is None else self._starts_of(query_len)
            views = self._views[shape] = StepTensors(
                self.token_ids[:tokens], self.positions[:tokens], self.slot_mapping[:tokens],
                self.block_table[:reqs], self.kv_lens[:reqs], starts[: reqs + 1],
                {name: buffer[:tokens] for name, buffer in self.extra.items()},
            )  # fmt: skip
        return views

    def _starts_of(self, query_len: int) -> Tensor:
        """[num_reqs + 1], where rows of that query length begin: the same for every batch, so staged once."""
        starts = self._uniform_starts.get(query_len)
        if starts is None:
            starts = self._adapter.alloc_static((self.num_reqs + 1,), "int32")
            self._adapter.stage(starts, range(0, (self.num_reqs + 1) * query_len, query_len), self.num_reqs + 1, 0)
            self._adapter.commit()
            # Kept only once it is staged: zeros would make padding of every row.
            self._uniform_starts[query_len] = starts
        return starts

    def stage(
        self, rows: StepInputs, shape: PaddedShape, wanted: bool, repeat: int = 1, until: Span | None = None
    ) -> bool:
        """Bring a launch's rows to the device, and padding behind them: token 0, the reserved slot, no KV.

        Args:
            rows: the launch's rows.
            shape: what they are padded to.
            wanted: whether the head reads `wanted`.
            repeat: decode steps.
            until: as `DeviceAdapter.commit` has it.

        Returns:
            Whether sampling inputs are among them; False where every row is greedy, so that no noise is needed.

        Raises:
            ConfigError: the rows have unlike numbers of inputs by token or by row, or bring other extra or sampling
                inputs than are read, or the launch repeats and they can't.
        """
        tokens, reqs, query_len = shape
        _, query_lens, token_ids, positions, slots, table, kv_lens, wanted_rows, _, sampling, extra = rows
        check_fit(rows, query_len)
        jobs: list[Any] = [
            (self.token_ids, token_ids, tokens, 0), (self.positions, positions, tokens, 0),
            (self.slot_mapping, slots, tokens, self._pad_slot), (self.block_table, table, reqs, 0),
            (self.kv_lens, kv_lens, reqs, 0),
        ]  # fmt: skip
        if query_len is None:
            starts = [0, *accumulate(query_lens)]
            jobs.append((self.query_starts, starts, reqs + 1, starts[-1]))
        if wanted:
            jobs.append((self.wanted, wanted_rows, max(reqs, len(wanted_rows)), 0))
        if self.extra or extra:
            jobs += self._extra_jobs(rows, tokens)
        adapter = self._adapter
        try:
            if repeat > 1:
                self._stage_ahead(slots_ahead(rows, repeat))
            if self._stage_all is not None:
                self._stage_all(jobs)
            else:
                for job in jobs:
                    adapter.stage(*job)
            sampled = bool(sampling) and self._stage_sampling(rows)
        except BaseException:
            adapter.drop_staged()
            raise
        adapter.commit(until)
        return sampled

    def decode_stager(self, shape: PaddedShape) -> Callable[[StepInputs, Span], bool] | None:
        """What does as `stage` for steps of decodes padded to that shape, in fewer calls; None where it can't be.

        It says False, and has done nothing, where a step brings more than token ids, positions, slots, block tables and
        lengths in plain sequences, or a buffer was swapped: then it takes `stage`.
        """
        # Optional for an adapter.
        prepare: Callable[..., Any] | None = getattr(self._adapter, "decode_stager", None)
        if prepare is None or shape.uniform_query_len is None or self.extra:
            return None
        buffers = [getattr(self, name) for name in _OF_DECODES]
        stager = prepare(buffers, shape, self._pad_slot)
        if stager is None:
            return None
        self._stagers = [each for each in self._stagers if each[0]() is not None] + [(ref(stager), buffers)]
        stage: Callable[[StepInputs, Span], bool] = stager.stage
        return stage

    def __setattr__(self, name: str, value: Any) -> None:
        """Set it; who stages decodes of one shape hears that a buffer was swapped, or is back."""
        object.__setattr__(self, name, value)
        if name in _OF_DECODES:
            for known, buffers in self._stagers:
                if (stager := known()) is not None:
                    stager.swapped = any(
                        getattr(self, each) is not buffer for each, buffer in zip(_OF_DECODES, buffers, strict=True)
                    )

    def _extra_jobs(self, rows: StepInputs, num_tokens: int) -> list[Any]:
        check_extra(rows, self.extra)
        return [(buffer, rows.extra[name], num_tokens, 0) for name, buffer in self.extra.items()]

    def _stage_sampling(self, rows: StepInputs) -> bool:
        """Copy what sampling reads; False where every row is greedy."""
        check_sampling(rows)
        num_wanted = len(rows.wanted)
        temperature = rows.sampling.get("temperature")
        if temperature is None or not num_wanted or (isinstance(temperature, list | tuple) and not any(temperature)):
            return False
        self._adapter.stage(self.temperature, temperature, num_wanted, 0)
        self._adapter.stage(self.seed, rows.sampling.get("seed", ()), num_wanted, 0)
        return True

    def _stage_ahead(self, slots: Sequence[Sequence[int]]) -> None:
        """Copy the slots of further decode steps. More steps than were foreseen take new memory, once."""
        if len(slots) > len(self.slots_ahead):
            self.slots_ahead = self._adapter.alloc_static((len(slots), self.num_reqs), "int64", self._pad_slot)
        self._adapter.stage(self.slots_ahead, slots, len(slots), self._pad_slot)

    def next_step(self, step: int, tokens: Tensor, num_rows: int) -> None:
        """Go one decode step on, on the device: sampled tokens become inputs.

        Args:
            step: which one, from 1.
            tokens: [num_rows], what the step before sampled.
            num_rows: rows of one token each, without padding.
        """
        self.token_ids[:num_rows].copy_(tokens)
        self.positions[:num_rows].add_(1)
        self.kv_lens[:num_rows].add_(1)
        self.slot_mapping[:num_rows].copy_(self.slots_ahead[step - 1, :num_rows])

    def stage_padding(self, shape: PaddedShape) -> None:
        """Padding alone: what a graph is captured over, so that recording writes to the reserved slot only."""
        tokens, reqs, _ = shape
        stage = self._adapter.stage
        stage(self.token_ids, (), tokens, 0)
        stage(self.positions, (), tokens, 0)
        stage(self.slot_mapping, (), tokens, self._pad_slot)
        stage(self.block_table, (), reqs, 0)
        stage(self.kv_lens, (), reqs, 0)
        stage(self.query_starts, (), reqs + 1, 0)
        stage(self.wanted, (), reqs, 0)
        for buffer in self.extra.values():
            stage(buffer, (), tokens, 0)
