"""Staging of a group of inputs, as the CUDA adapter does it, in the host's memory."""

from __future__ import annotations

import gc
import weakref

import pytest

torch = pytest.importorskip("torch")

from kpolicy.errors import ConfigError, GraphReplayError  # noqa: E402
from kpolicy.executors.cuda.staging import BufferSpec, StagedGroup, place_of  # noqa: E402


def group_of(*specs: BufferSpec) -> tuple[StagedGroup, list[torch.Tensor]]:
    group = StagedGroup(specs, torch.device("cpu"))
    return group, group.buffers()


def _no_stream() -> None:
    """The host's memory is copied at once."""


def test_one_copy_brings_all_that_was_staged() -> None:
    group, (first, table) = group_of(BufferSpec((8,), "int64", 7), BufferSpec((4, 3), "int32"))
    assert first.tolist() == [7] * 8
    for turn in range(9):
        group.stage(first, 0, [turn], 3, -1)
        group.stage(table, 1, [[turn, turn], [turn]], 3, 9)
        assert first.tolist()[0] != turn or turn == 7
        group.commit(_no_stream)
        assert first.tolist()[:3] == [turn, -1, -1]
        assert table.tolist()[:3] == [[turn, turn, 9], [turn, 9, 9], [9, 9, 9]]


def test_a_host_tensor_of_any_dimensions_is_staged() -> None:
    group, (extra,) = group_of(BufferSpec((4, 2, 2), "float32"))
    group.stage(extra, 0, torch.ones(2, 2, 2), 3, 0)
    group.commit(_no_stream)
    assert extra.tolist()[:3] == [[[1.0, 1.0]] * 2] * 2 + [[[0.0, 0.0]] * 2]
    with pytest.raises(ConfigError, match="can't be staged"):
        group.stage(extra, 0, torch.ones(2, 3), 3, 0)


def test_what_was_dropped_is_not_copied() -> None:
    group, (buffer,) = group_of(BufferSpec((4,), "int64"))
    group.stage(buffer, 0, [5, 5], 4, 0)
    group.drop()
    assert not group.staged
    group.commit(_no_stream)
    assert buffer.tolist() == [0, 0, 0, 0]


def test_memory_goes_with_the_last_buffer() -> None:
    gc.disable()
    try:
        group, buffers = group_of(BufferSpec((4,), "int64"), BufferSpec((4,), "int64"))
        alive = weakref.ref(group)
        assert place_of(buffers[1]) == (group, 1)
        del group, buffers[0]
        assert alive() is not None
        buffers.clear()
        assert alive() is None
    finally:
        gc.enable()


def test_several_buffers_in_one_call() -> None:
    """Lists and tensors of one launch arrive as they would one by one, in one copy."""
    group, (ids, table, kv) = group_of(
        BufferSpec((8,), "int64", 7), BufferSpec((4, 3), "int32"), BufferSpec((4,), "int32")
    )
    for turn in range(9):
        jobs = [(ids, [turn, 1], 4, -1), (table, ([turn], [2, 3]), 3, 9), (kv, torch.tensor([turn, 5]), 3, 0)]
        group.stage_all(jobs)
        group.commit(_no_stream)
        assert ids.tolist() == [turn, 1, -1, -1, 7, 7, 7, 7]
        assert table.tolist()[:3] == [[turn, 9, 9], [2, 3, 9], [9, 9, 9]]
        assert kv.tolist()[:3] == [turn, 5, 0]


def test_an_error_half_way_leaves_nothing_staged_once_dropped() -> None:
    group, (ids, kv) = group_of(BufferSpec((4,), "int64"), BufferSpec((4,), "int32"))
    with pytest.raises(ConfigError, match="don't fit"):
        group.stage_all([(ids, [5], 2, 0), (kv, [1 << 40], 2, 0)])
    assert group.staged
    group.drop()
    assert not group.staged


def test_a_swapped_buffer_is_refused() -> None:
    """Numbers would go where graphs read them, and the buffer's owner would believe they are in the other tensor."""
    group, (ids,) = group_of(BufferSpec((4,), "int64"))
    _, (other,) = group_of(BufferSpec((4,), "int64"))
    for swapped in (other, torch.zeros(4, dtype=torch.int64)):
        with pytest.raises(GraphReplayError, match="swapped"):
            group.stage_all([(ids, [1], 1, 0), (swapped, [1], 1, 0)])
