"""Static inputs on a GPU that are staged together: one copy from pinned memory brings a launch's inputs over.

Buffers of a group lie behind each other in one piece of device memory, in the order they were asked for, and in pinned
memory likewise. Staging packs numbers into pinned memory; `commit` copies from the front to the last byte that was
staged. Pinned memory is several turns deep, so the host may stage a launch while the copies of earlier ones are under
way; it waits only where it would overwrite one that isn't done. When one is done says a point behind it on its stream:
the end of the step that it belongs to, where that is given, as a step has one anyway; otherwise one of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from struct import calcsize
from struct import error as StructError  # noqa: N812 - as in `packing`
from typing import Any, NamedTuple

import torch

from kpolicy.errors import ConfigError, GraphReplayError
from kpolicy.executors.base import StepInputs
from kpolicy.executors.cpu.staging import check_buffer, stage_tensor
from kpolicy.executors.cuda.events import Recorder
from kpolicy.executors.device import Span
from kpolicy.executors.launch_rows import check_fit
from kpolicy.executors.packing import FORMATS, PackedRows
from kpolicy.reasons import Reason

__all__ = ["BufferSpec", "DecodeStager", "Job", "StagedGroup", "place_of"]

TURNS = 5
"""Pieces of pinned memory: how many launches the host may be ahead of the device"""
ALIGNMENT = 256
_PLACE = "_kpolicy_place"
_PLAIN = frozenset((list, tuple, range))
"""Sequences of numbers that need no second look"""

Job = tuple[Any, Any, int, float]
"""(buffer, values, size, fill) as `StagedGroup.stage` takes them"""


class BufferSpec(NamedTuple):
    """One buffer of a group."""

    shape: Sequence[int]
    dtype: str
    fill: float = 0


class _Place(NamedTuple):
    """A buffer keeps its group, and a group none of its buffers: the memory goes with the last buffer."""

    group: StagedGroup
    buffer: int


class _Turn:
    """One piece of pinned memory, and what waits until its last copy is over; None where none is under way."""

    def __init__(self, nbytes: int, pin: bool) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pin)
        self.rows: list[PackedRows] = []
        self.places: list[tuple[PackedRows, int, int, bool]] = []
        """Of each buffer: its rows, its offset, bytes of a row, whether it has one dimension"""
        self.copied = Recorder(timed=False) if pin else None
        self.wait: Callable[[], object] | None = None


class StagedGroup:
    """Static buffers that are staged together.

    Args:
        specs: the buffers, those that launches fill least last: a copy goes from the front to the last byte staged.
        device: where they are.

    Attributes:
        num_bytes: device memory.
        turns: the pieces of pinned memory that take turns.
    """

    def __init__(self, specs: Sequence[BufferSpec], device: torch.device) -> None:
        for spec in specs:
            check_buffer(spec.shape, spec.dtype)
        self._specs = specs
        self._offsets: list[int] = []
        end = 0
        for spec in specs:
            end = -(-end // ALIGNMENT) * ALIGNMENT
            self._offsets.append(end)
            end += max(1, math.prod(spec.shape)) * calcsize(FORMATS[spec.dtype])
        self.num_bytes = -(-end // ALIGNMENT) * ALIGNMENT
        pin = device.type == "cuda"
        with torch.inference_mode(False):
            self._memory = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
            self.turns = [self._turn(pin) for _ in range(TURNS)]
        self._at = 0
        self._high = 0
        self._copies: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._from_device: list[tuple[torch.Tensor, Any, int, float]] = []
        self._memory.copy_(self.turns[0].memory)

    def buffers(self) -> list[Any]:
        """The device's tensors, in the order of the specs: views that keep this group."""
        with torch.inference_mode(False):
            return [self._view(index) for index in range(len(self._specs))]

    def _view(self, index: int) -> Any:
        view = self._place_in(self._memory, index)
        setattr(view, _PLACE, _Place(self, index))
        return view

    def _turn(self, pin: bool) -> _Turn:
        turn = _Turn(self.num_bytes, pin)
        whole = memoryview(turn.memory.numpy())
        for spec, offset in zip(self._specs, self._offsets, strict=True):
            count = math.prod(spec.shape)
            size = max(1, count) * calcsize(FORMATS[spec.dtype])
            rows = PackedRows(whole[offset : offset + size], spec.dtype, spec.shape[0], math.prod(spec.shape[1:]))
            rows.fill(spec.fill, 0, count)
            turn.rows.append(rows)
            turn.places.append((rows, offset, rows.width * rows.itemsize, len(spec.shape) == 1))
        return turn

    @property
    def staged(self) -> bool:
        """Whether something waits for `commit`."""
        return bool(self._high or self._from_device)

    def stage(self, buffer: Any, index: int, values: Any, size: int, fill: float) -> None:
        """Put values of one buffer into pinned memory. See `DeviceAdapter.stage`."""
        turn = self.turns[self._at]
        if turn.wait is not None:
            turn.wait()
            turn.wait = None
        if isinstance(values, torch.Tensor) and values.device.type != "cpu":
            self._stage_device(buffer, values, size, fill)
            return
        rows = turn.rows[index]
        if hasattr(values, "__array_interface__") or isinstance(values, torch.Tensor):
            stage_tensor(self._place_in(turn.memory, index), rows, torch.as_tensor(values), size, fill)
        else:
            rows.put(values, size, fill, flat=buffer.dim() == 1)
        self._high = max(self._high, self._offsets[index] + size * rows.width * rows.itemsize)

    def stage_all(self, jobs: Iterable[Job]) -> None:
        """`stage` for several buffers of this group. Most of what a launch stages are lists.

        Raises:
            ConfigError: as `stage`.
            GraphReplayError: a buffer isn't of this group: somebody swapped it, and graphs read the one that was here.
        """
        turn = self.turns[self._at]
        if turn.wait is not None:
            turn.wait()
            turn.wait = None
        places, high = turn.places, self._high
        for buffer, values, size, fill in jobs:
            place: _Place | None = getattr(buffer, _PLACE, None)
            if place is None or place.group is not self:
                raise _swapped(buffer)
            if type(values) in _PLAIN:
                rows, offset, row_bytes, flat = places[place.buffer]
                rows.put(values, size, fill, flat=flat)
                end = offset + size * row_bytes
                if end > high:
                    # Noted at once: what is staged before an error is dropped.
                    self._high = high = end
            else:
                self.stage(buffer, place.buffer, values, size, fill)
                high = self._high

    def _place_in(self, memory: torch.Tensor, index: int) -> torch.Tensor:
        """A buffer's place in device memory or in a turn's pinned memory, as a tensor."""
        spec, offset = self._specs[index], self._offsets[index]
        size = math.prod(spec.shape) * calcsize(FORMATS[spec.dtype])
        return memory[offset : offset + size].view(getattr(torch, spec.dtype)).view(*spec.shape)

    def drop(self) -> None:
        """Forget what was staged and not committed."""
        self._high = 0
        self._from_device.clear()

    def _stage_device(self, buffer: Any, values: Any, size: int, fill: float) -> None:
        """Note a copy from device memory, which comes after the one from pinned memory."""
        count = len(values)
        fits = values.dim() == buffer.dim() and (values.dim() == 1 or values.shape[1] <= buffer.shape[1])
        if not count <= size <= len(buffer) or not fits:
            raise ConfigError(
                f"a tensor of {list(values.shape)} can't be staged as {size} rows into a buffer of "
                f"{list(buffer.shape)}; rows are at least the values, and at most the buffer's."
            )
        self._from_device.append((buffer, values, size, fill))

    def commit(self, current: Callable[[], Any], until: Span | None = None, staged: int = 0) -> None:
        """Copy what was staged, on the current stream.

        Args:
            current: gives that stream, for who needs it.
            until: as `DeviceAdapter.commit` has it.
            staged: bytes that were staged without this group, at least.
        """
        high = staged if staged > self._high else self._high
        if high:
            turn = self.turns[self._at]
            pieces = self._copies.get(high)
            to, out_of = (self._pieces(high) if pieces is None else pieces)[self._at]
            to.copy_(out_of, non_blocking=True)
            if turn.copied is not None:
                if until is None:
                    turn.copied.record(current())
                    turn.wait = turn.copied.event.synchronize
                else:
                    turn.wait = until.wait
            self._at = (self._at + 1) % TURNS
            self._high = 0
        for buffer, values, size, fill in self._from_device:
            count = len(values)
            values.record_stream(current())  # the caller may let go of them before they are copied
            if values.dim() == 1:
                buffer[:count].copy_(values)
            else:
                width = values.shape[1]
                buffer[:count, :width].copy_(values)
                buffer[:count, width:].fill_(fill)
            buffer[count:size].fill_(fill)
        self._from_device.clear()

    def _pieces(self, high: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(device, pinned) memory up to a byte, for each turn; views made once a size."""
        end = min(-(-high // ALIGNMENT) * ALIGNMENT, self.num_bytes)
        pieces = self._copies.get(end)
        if pieces is None:
            with torch.inference_mode(False):
                pieces = [(self._memory[:end], turn.memory[:end]) for turn in self.turns]
            self._copies[end] = pieces
        self._copies[high] = pieces
        return pieces


class _DecodeTurn(NamedTuple):
    """Where one turn's pinned memory takes the inputs of decodes, and what copies them to the device."""

    turn: _Turn
    pack_tokens: Callable[..., None]
    """Packs a number a token, padding included"""
    pack_lens: Callable[..., None]
    """Packs a number a row, padding included"""
    token_ids: PackedRows
    positions: PackedRows
    slots: PackedRows
    table: PackedRows
    lens: PackedRows
    copy: Callable[[], object]


class DecodeStager:
    """Stages the inputs of decodes that are padded to one shape, and commits them, in one call.

    What `StagedGroup.stage_all` and `StagedGroup.commit` look up for each launch is looked up once.

    Args:
        buffers: of token ids, positions, slots, block tables and lengths, of one group.
        shape: (tokens, rows, tokens of a row).
        pad_slot: padded tokens write there.
        current: gives the current stream, for who needs it.

    Attributes:
        swapped: a buffer isn't the one that graphs read any more, so nothing can be staged here.
    """

    __slots__ = (
        "__weakref__", "_current", "_group", "_high", "_num_reqs", "_num_tokens", "_pad_slot", "_query_len", "_turns",
        "swapped",
    )  # fmt: skip

    def __init__(
        self, buffers: Sequence[Any], shape: tuple[int, int, int], pad_slot: int, current: Callable[[], Any]
    ) -> None:
        self._group = group = place_of(buffers[0])[0]
        self._num_tokens, self._num_reqs, self._query_len = tokens, reqs, _ = shape
        self._pad_slot = pad_slot
        self._current = current
        self.swapped = False
        at = [place_of(buffer)[1] for buffer in buffers]
        self._high = 0
        for index, size in zip(at, (tokens, tokens, tokens, reqs, reqs), strict=True):
            _, offset, row_bytes, _ = group.turns[0].places[index]
            self._high = max(self._high, offset + size * row_bytes)
        self._turns = []
        for turn, (to, out_of) in zip(group.turns, group._pieces(self._high), strict=True):
            ids, positions, slots, table, lens = (turn.rows[index] for index in at)
            assert ids.dtype == positions.dtype == slots.dtype  # noqa: S101 - `StepBuffers` made them so
            copy = partial(to.copy_, out_of, True)
            self._turns.append(
                _DecodeTurn(turn, ids.packer(tokens), lens.packer(reqs), ids, positions, slots, table, lens, copy)
            )

    def stage(self, rows: StepInputs, until: Span) -> bool:
        """Stage a launch's rows and commit them; False, and nothing is done, where that takes `StepBuffers.stage`.

        That is where they bring more than token ids, positions, slots, block tables and lengths in plain sequences.

        Raises:
            ConfigError: as `StepBuffers.stage`.
        """
        _, _, ids, positions, slots, table, lens, _, _, sampling, extra = rows
        if sampling or extra or self.swapped:
            return False
        for each in (ids, positions, slots, table, lens):
            if type(each) not in _PLAIN:
                return False
        check_fit(rows, self._query_len)
        group = self._group
        at = group._at
        turn, pack_tokens, pack_lens, ids_to, positions_to, slots_to, table_to, lens_to, copy = self._turns[at]
        if turn.wait is not None:
            turn.wait()
            turn.wait = None
        num_tokens, num_reqs = self._num_tokens, self._num_reqs
        try:
            # Without padding they are packed as they are; what is wrong with some, those calls say that pad.
            padded = len(ids) != num_tokens or len(lens) != num_reqs
            if not padded:
                try:
                    pack_tokens(ids_to.memory, 0, *ids)
                    pack_tokens(positions_to.memory, 0, *positions)
                    pack_tokens(slots_to.memory, 0, *slots)
                    pack_lens(lens_to.memory, 0, *lens)
                except (StructError, OverflowError, TypeError):
                    padded = True
            if padded:
                ids_to.put(ids, num_tokens, 0, flat=True)
                positions_to.put(positions, num_tokens, 0, flat=True)
                slots_to.put(slots, num_tokens, self._pad_slot, flat=True)
                lens_to.put(lens, num_reqs, 0, flat=True)
            table_to.put(table, num_reqs, 0, flat=False)
            if group._high or group._from_device:
                # Somebody staged more of the group, which comes along.
                group.commit(self._current, until, self._high)
                return True
            copy()
        except BaseException:
            group.drop()
            raise
        if turn.copied is not None:
            turn.wait = until.wait
        group._at = (at + 1) % TURNS
        return True


def _swapped(buffer: Any) -> GraphReplayError:
    """What is wrong with a tensor in the place of a static input of a graph's."""
    return GraphReplayError(
        None,
        f"a static input of {list(buffer.shape)} isn't the one that graphs read: it was swapped for another. Copy into "
        "the tensor that was there, or capture again.",
        Reason.ADDRESS_CHANGED,
    )


def place_of(buffer: Any) -> tuple[StagedGroup, int]:
    """The group of a static buffer, and which of its buffers it is.

    Raises:
        GraphReplayError: the tensor isn't a static buffer: somebody swapped one for it.
    """
    place: _Place | None = getattr(buffer, _PLACE, None)
    if place is None:
        raise _swapped(buffer)
    return place
