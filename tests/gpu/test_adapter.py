"""The CUDA adapter's primitives."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from kpolicy.errors import CaptureError, ConfigError, GraphReplayError, StickyDeviceError
from kpolicy.executors.cuda import CudaAdapter
from kpolicy.executors.cuda.second_context import second_context
from kpolicy.reasons import Reason

SIZE = 1 << 20


@pytest.fixture
def adapter() -> CudaAdapter:
    return CudaAdapter()


def used() -> int:
    """Bytes that torch keeps of the device, after everything that can go has gone."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def captured(adapter: CudaAdapter, pool: Any, work: Any) -> tuple[Any, Any]:
    with adapter.session(), adapter.recording(pool):
        work()
        adapter.begin(pool)
        out = work()
        graph = adapter.end()
    return graph, adapter.weak(pool, out)


def test_staging_is_one_copy_in_order(adapter: CudaAdapter) -> None:
    first, table, late = adapter.alloc_inputs([((8,), "int64", 7), ((4, 3), "int32", 0), ((8,), "float32", 0)])
    assert first.tolist() == [7] * 8
    for turn in range(20):
        adapter.stage(first, [turn, turn + 1], 4, -1)
        adapter.stage(table, [[turn], [turn, turn]], 3, 9)
        adapter.commit()
        assert first.tolist()[:4] == [turn, turn + 1, -1, -1]
        assert table.tolist()[:3] == [[turn, 9, 9], [turn, turn, 9], [9, 9, 9]]
    adapter.stage(late, torch.tensor([1.5, 2.5], device="cuda"), 3, 0)
    adapter.stage(first, torch.tensor([5, 6]), 2, 0)
    adapter.commit()
    assert late.tolist()[:3] == [1.5, 2.5, 0.0]
    assert first.tolist()[:2] == [5, 6]


def test_the_host_may_run_ahead_of_its_copies(adapter: CudaAdapter) -> None:
    (buffer,) = adapter.alloc_inputs([((4096,), "int64", 0)])
    seen = []
    torch.cuda._sleep(20_000_000)
    for turn in range(12):
        adapter.stage(buffer, [turn] * 4096, 4096, 0)
        adapter.commit()
        seen.append(buffer.clone())
    assert [each.unique().tolist() for each in seen] == [[turn] for turn in range(12)]


@pytest.mark.parametrize("values", [[1, 2, 3], [1 << 40], ["x"]])
def test_staging_refuses_what_does_not_fit(adapter: CudaAdapter, values: Any) -> None:
    buffer = adapter.alloc_static((2,), "int32")
    with pytest.raises(ConfigError):
        adapter.stage(buffer, values, 2, 0)
    with pytest.raises(GraphReplayError, match="swapped"):
        adapter.stage(torch.zeros(2, device="cuda"), [1], 2, 0)


def test_replay_reads_live_inputs_and_survives_empty_cache(adapter: CudaAdapter) -> None:
    buffer, pool = adapter.alloc_static((SIZE,), "int64"), adapter.new_pool()
    graph, out = captured(adapter, pool, lambda: buffer * 2 + 1)
    for value in (3, 5):
        torch.cuda.empty_cache()
        torch.empty(SIZE * 4, device="cuda").normal_()
        buffer.fill_(value)
        with adapter.session():
            adapter.replay(graph)
        assert out.unique().tolist() == [2 * value + 1]
    assert graph.num_bytes >= 0
    adapter.release(pool)


def test_graphs_of_a_pool_share_what_they_leave_behind(adapter: CudaAdapter) -> None:
    pool = adapter.new_pool()
    buffer = adapter.alloc_static((SIZE,), "int64")
    _, first = captured(adapter, pool, lambda: buffer + 1)
    before = torch.cuda.memory_reserved()
    for size in (SIZE, SIZE // 2, SIZE // 4):
        _, out = captured(adapter, pool, lambda size=size: buffer[:size] + 1)
        assert out.data_ptr() == first.data_ptr()
    assert torch.cuda.memory_reserved() == before
    adapter.release(pool)


def test_release_gives_all_memory_back(adapter: CudaAdapter) -> None:
    weight = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
    before = used()
    pool = adapter.new_pool()
    graphs = [captured(adapter, pool, lambda: (weight @ weight).relu() @ weight) for _ in range(4)]
    assert torch.cuda.memory_reserved() > before
    adapter.release(pool)
    del graphs
    assert used() == before
    with pytest.raises(Exception, match="released"), adapter.recording(pool):
        pass


def test_pools_that_come_and_go_leave_no_workspaces(adapter: CudaAdapter) -> None:
    """Libraries keep a workspace for each stream they ran on, so the next pool has the stream of the last one."""
    weight, held = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16), []
    for _ in range(6):
        pools = [adapter.new_pool(1), adapter.new_pool(0)]
        for pool in pools:
            captured(adapter, pool, lambda: weight @ weight)
        for pool in pools:
            adapter.release(pool)
        gc.collect()
        torch.cuda.empty_cache()
        held.append(torch.cuda.memory_reserved())
    assert held[-1] == held[0]


def _synchronises(weight: Any) -> Any:
    return weight @ weight * float(weight.sum())


def _allocates_too_much(_: Any) -> Any:
    return torch.empty(1 << 50, device="cuda", dtype=torch.uint8)


def failing(adapter: CudaAdapter, pool: Any, work: Any) -> tuple[Reason, bool]:
    """Capture work that fails, and give it up: what the adapter says of the error."""
    weight = torch.ones(512, 512, device="cuda")
    with adapter.session(), adapter.recording(pool):
        adapter.begin(pool)
        held = []
        try:
            held = [torch.randn(SIZE, device="cuda") for _ in range(8)]
            work(weight)
        except RuntimeError as error:
            meant = adapter.classify(error)
        else:
            pytest.fail("it was captured")
        held.clear()
        adapter.abort()
    return meant


FAILURES = [(_synchronises, Reason.CAPTURE_ILLEGAL), (_allocates_too_much, Reason.CAPTURE_OUT_OF_MEMORY)]


@pytest.mark.parametrize(("work", "reason"), FAILURES)
def test_after_a_capture_that_fails_the_pool_goes_on(adapter: CudaAdapter, work: Any, reason: Reason) -> None:
    weight = torch.randn(512, 512, device="cuda")
    pool = adapter.new_pool()
    graph, out = captured(adapter, pool, lambda: weight @ weight)
    right = weight @ weight
    for _ in range(3):
        assert failing(adapter, pool, work) == (reason, False)
        assert torch.randn(4, device="cuda").isfinite().all()
    with adapter.session():
        adapter.replay(graph)
    assert torch.equal(out, right)
    again, second = captured(adapter, pool, lambda: weight @ weight + 1)
    with adapter.session():
        adapter.replay(again)
    assert torch.equal(second, right + 1)
    adapter.release(pool)


@pytest.mark.parametrize("work", [_synchronises, _allocates_too_much])
def test_a_capture_that_fails_frees_what_it_took(adapter: CudaAdapter, work: Any) -> None:
    pool = adapter.new_pool()
    before = used()
    for _ in range(3):
        failing(adapter, pool, work)
    assert used() <= before + (2 << 20)
    adapter.release(pool)


def test_streams_and_events(adapter: CudaAdapter) -> None:
    stream = adapter.new_stream(priority=0)
    started = adapter.event()
    # Its kernel is loaded here: loading one may wait for what the device runs.
    value = torch.zeros(1, device="cuda").add_(0)
    torch.cuda.synchronize()
    ran = []

    def work() -> None:
        adapter.wait(started)
        torch.cuda._sleep(1_000_000_000)
        value.add_(1)
        ran.append(torch.cuda.current_stream() == stream)

    adapter.submit(stream, work)
    event = adapter.event(stream)
    assert ran == [True]
    assert not event.done()
    adapter.wait(event)
    assert value.item() == 1
    event.wait()
    assert event.done()
    assert event.us_since(started) > 100
    assert adapter.new_stream(1).priority < stream.priority


def test_checked_addresses() -> None:
    statics = {"weight": torch.randn(64, 64, device="cuda")}
    adapter = CudaAdapter(check=True, statics=lambda: statics)
    pool = adapter.new_pool()
    graph, _ = captured(adapter, pool, lambda: statics["weight"] @ statics["weight"])
    with adapter.session():
        adapter.replay(graph)
    statics["weight"] = statics["weight"].clone()
    with pytest.raises(GraphReplayError, match="weight is now"):
        adapter.replay(graph)
    del statics["weight"]
    with pytest.raises(GraphReplayError, match="weight is gone"):
        adapter.replay(graph)
    adapter.release(pool)


def test_recordings_do_not_nest(adapter: CudaAdapter) -> None:
    pool = adapter.new_pool()
    with pytest.raises(CaptureError, match="within recording"):
        adapter.begin(pool)
    with pytest.raises(CaptureError, match="nothing is recording"):
        adapter.end()
    adapter.abort()
    adapter.release(pool)


@pytest.mark.parametrize("device", ["cuda:99", "cpu", "nonsense"])
def test_a_device_that_is_not_there(device: str) -> None:
    with pytest.raises(ConfigError, match="device"):
        CudaAdapter(device)


def test_injected_sticky(adapter: CudaAdapter) -> None:
    adapter = CudaAdapter(faults=["sticky@2"])
    pool = adapter.new_pool()
    weight = torch.zeros(4, device="cuda")
    graph, _ = captured(adapter, pool, lambda: weight + 1)
    adapter.replay(graph)
    for _ in range(2):
        with pytest.raises(StickyDeviceError):
            adapter.replay(graph)


def test_a_second_context_comes_and_goes(adapter: CudaAdapter) -> None:
    """Graphs, tensors and the current context are as they were, and so is the device's memory."""
    pool = adapter.new_pool()
    weight = torch.ones(SIZE, device="cuda")
    graph, out = captured(adapter, pool, lambda: weight * 2)
    assert second_context(0) == ""
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    assert second_context(0) == ""
    assert abs(torch.cuda.mem_get_info()[0] - free) <= 2**21
    weight.fill_(3)
    adapter.replay(graph)
    assert bool((out == 6).all())
    adapter.release(pool)
