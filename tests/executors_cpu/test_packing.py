"""Staging of a group of inputs, as the CUDA adapter does it, in the host's memory."""

from __future__ import annotations

import gc
import weakref

import pytest

torch = pytest.importorskip("torch")

from kpolicy.errors import ConfigError  # noqa: E402
from kpolicy.executors.cuda.staging import BufferSpec, StagedGroup, place_of  # noqa: E402


def group_of(*specs: BufferSpec) -> tuple[StagedGroup, list[torch.Tensor]]:
    group = StagedGroup(specs, torch.device("cpu"))
    return group, group.buffers()


def test_one_copy_brings_all_that_was_staged() -> None:
    group, (first, table) = group_of(BufferSpec((8,), "int64", 7), BufferSpec((4, 3), "int32"))
    assert first.tolist() == [7] * 8
    for turn in range(9):
        group.stage(first, 0, [turn], 3, -1)
        group.stage(table, 1, [[turn, turn], [turn]], 3, 9)
        assert first.tolist()[0] != turn or turn == 7
        group.commit(None)
        assert first.tolist()[:3] == [turn, -1, -1]
        assert table.tolist()[:3] == [[turn, turn, 9], [turn, 9, 9], [9, 9, 9]]


def test_a_host_tensor_of_any_dimensions_is_staged() -> None:
    group, (extra,) = group_of(BufferSpec((4, 2, 2), "float32"))
    group.stage(extra, 0, torch.ones(2, 2, 2), 3, 0)
    group.commit(None)
    assert extra.tolist()[:3] == [[[1.0, 1.0]] * 2] * 2 + [[[0.0, 0.0]] * 2]
    with pytest.raises(ConfigError, match="can't be staged"):
        group.stage(extra, 0, torch.ones(2, 3), 3, 0)


def test_what_was_dropped_is_not_copied() -> None:
    group, (buffer,) = group_of(BufferSpec((4,), "int64"))
    group.stage(buffer, 0, [5, 5], 4, 0)
    group.drop()
    assert not group.staged
    group.commit(None)
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
