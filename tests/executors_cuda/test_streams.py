"""Streams and pools of a CUDA device, over stand-ins for what torch has of one. `tests/gpu` has the real ones."""

from __future__ import annotations

import gc
from contextlib import nullcontext, suppress
from itertools import count
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kpolicy.executors.cuda import adapter as cuda_adapter  # noqa: E402
from kpolicy.executors.cuda import streams  # noqa: E402
from kpolicy.executors.cuda.adapter import CudaAdapter  # noqa: E402

handles = count(1)


class Stream:
    """What is read of `torch.cuda.Stream`."""

    def __init__(self, device: Any, priority: int = 0) -> None:
        self.device = device
        self.priority = priority
        self.cuda_stream = next(handles)

    def wait_stream(self, other: Stream) -> None: ...


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> CudaAdapter:
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _=None: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, next(handles)), raising=False)
    monkeypatch.setattr(streams, "_spare", {})
    monkeypatch.setattr(streams, "_held", {})
    monkeypatch.setattr(cuda_adapter, "_device", lambda _: torch.device("cuda", 0))
    made = CudaAdapter()
    # A CUDA build of torch would look for a driver.
    made._raw_stream = int
    return made


def test_pools_that_come_and_go_use_the_same_streams(adapter: CudaAdapter) -> None:
    """A library keeps a workspace for each stream it ran on, so two pools at a time take two streams, ever."""
    used = set()
    for _ in range(40):
        full, pieces = adapter.new_pool(1), adapter.new_pool(0)
        assert full.stream is not pieces.stream
        assert (full.stream.priority, pieces.stream.priority) == (-1, 0)
        used |= {full.stream, pieces.stream}
        for pool in (full, pieces):
            adapter.release(pool)
            adapter.release(pool)
    assert len(used) == 2


def test_a_stream_is_one_owners_at_a_time(adapter: CudaAdapter) -> None:
    """Given back twice it goes to one; of another priority or device it goes to nobody; a foreign one isn't taken."""
    first = adapter.new_stream()
    adapter.give_back(first)
    adapter.give_back(first)
    adapter.give_back(Stream(None))
    assert adapter.new_stream(1) is not first
    assert adapter.new_stream() is first
    assert adapter.new_stream() is not first
    other = streams.new_stream(torch.device("cuda", 1), 0)
    adapter.give_back(other)
    assert adapter.new_stream() is not other


def test_a_stream_that_is_held_is_not_given_away_while_there_is_another(
    adapter: CudaAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch hands its streams out in turn; where all are held one is shared, and spare when all its owners are done."""
    turn = count()

    class InTurn(Stream):
        def __init__(self, device: Any, priority: int = 0) -> None:
            super().__init__(device, priority)
            self.cuda_stream = 10_000 + next(turn) % streams.STREAMS

    monkeypatch.setattr(torch.cuda, "Stream", InTurn)
    first = adapter.new_stream()
    torch.cuda.Stream(None)
    others = [adapter.new_stream() for _ in range(streams.STREAMS - 1)]
    assert len({first.cuda_stream, *(each.cuda_stream for each in others)}) == streams.STREAMS
    shared = adapter.new_stream()
    partner = next(each for each in (first, *others) if each.cuda_stream == shared.cuda_stream)
    adapter.give_back(partner)
    assert not streams._spare
    adapter.give_back(shared)
    assert adapter.new_stream() is shared


def test_a_lost_device_keeps_its_streams(adapter: CudaAdapter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows what still runs on them."""
    pool = adapter.new_pool()

    def lost(_: Any = None) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    adapter.release(pool)
    assert pool.released
    assert adapter.new_stream() is not pool.stream


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("collects", [False, True])
def test_garbage_is_not_collected_while_something_records(
    adapter: CudaAdapter, monkeypatch: pytest.MonkeyPatch, collects: bool, fails: bool
) -> None:
    """What a collection frees may be device memory. Afterwards it is as before, also where a capture failed."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream(None))
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    if not collects:
        gc.disable()
    try:
        with suppress(ValueError), adapter.recording(adapter.new_pool()):
            assert not gc.isenabled()
            if fails:
                raise ValueError("a capture that fails")
        assert gc.isenabled() is collects
    finally:
        gc.enable()


class Allocator:
    """torch's allocator as far as a broken recording goes: which pools record, and how many graphs hold each."""

    def __init__(self, handle: Any, *, recording: bool) -> None:
        self.place = 0, handle
        self.recording = recording
        self.holders = 2

    def end(self, device: int, handle: Any) -> None:
        assert (device, handle) == self.place
        if not self.recording:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.recording = False

    def release(self, device: int, handle: Any) -> None:
        assert (device, handle) == self.place
        self.holders -= 1


@pytest.mark.parametrize("end", ["_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool"])
@pytest.mark.parametrize(("recording", "holders"), [(True, 1), (False, 2)])
def test_a_broken_recording_lets_its_pool_go_once(
    adapter: CudaAdapter, monkeypatch: pytest.MonkeyPatch, end: str, recording: bool, holders: int
) -> None:
    """Where torch left it recording the graph that never came holds the pool; where it hadn't, it holds it no more."""
    pool = adapter.new_pool()
    allocator = Allocator(pool.handle, recording=recording)
    for name in ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool"):
        monkeypatch.delattr(torch._C, name, raising=False)
    monkeypatch.setattr(torch._C, end, allocator.end, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", allocator.release, raising=False)
    adapter._end_allocation(pool.handle)
    assert (allocator.recording, allocator.holders) == (False, holders)


def test_a_torch_without_the_allocators_names_is_left_alone(
    adapter: CudaAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of the capture is what the caller sees, not that torch has no such function."""
    for name in ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool", "_cuda_releasePool"):
        monkeypatch.delattr(torch._C, name, raising=False)
    adapter._end_allocation((0, 1))


def test_a_recording_is_this_threads_into_its_pool(adapter: CudaAdapter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads may go on with the device meanwhile, which the strictest mode of CUDA would forbid."""
    given = []

    class Graph:
        """What is asked of `torch.cuda.CUDAGraph`."""

        def capture_begin(self, **options: Any) -> None:
            given.append(options)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph, raising=False)
    pool = adapter.new_pool()
    adapter._begun(pool)
    assert given == [{"pool": pool.handle, "capture_error_mode": "thread_local"}]


def test_the_device_that_is_kept_busy_is_its_own(adapter: CudaAdapter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever is current: calibration of a second GPU would otherwise see the host's gaps as device time."""
    entered: list[Any] = []

    def device(which: Any) -> Any:
        entered.append(which)
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda _: entered.append("sleeps"), raising=False)
    adapter.occupy(10.0)
    assert entered == [torch.device("cuda", 0), "sleeps"]
