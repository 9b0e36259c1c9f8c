"""The CPU adapter: streams, events, staging, memory, errors and faults."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time

import pytest

torch = pytest.importorskip("torch")

from kpolicy.errors import (  # noqa: E402
    CaptureError,
    ConfigError,
    GraphReplayError,
    OutOfMemoryError,
    RegistryError,
    StickyDeviceError,
    UnknownNameError,
)
from kpolicy.executors.base import ProbeStatus  # noqa: E402
from kpolicy.executors.cpu import CpuAdapter, Graph  # noqa: E402
from kpolicy.executors.faults import DEVICE_FAULTS, FAULTS, Fault  # noqa: E402
from kpolicy.reasons import Reason  # noqa: E402


def captured(adapter: CpuAdapter, size: int = 4) -> tuple[torch.Tensor, torch.Tensor, Graph]:
    """A graph of two operators: (input, output, graph)."""
    x = torch.zeros(size)
    adapter.begin(adapter.new_pool())
    try:
        y = (x + 1) * 2
        return x, y, adapter.end()
    finally:
        adapter.abort()


def test_probe_says_what_there_is() -> None:
    """The probe is usable and carries torch's version and the number of threads."""
    report = CpuAdapter().probe()
    assert report.status is ProbeStatus.USABLE
    assert report.facts["torch"] == torch.__version__
    assert report.facts["threads"] == torch.get_num_threads()


# Streams


def test_a_stream_runs_in_order_beside_the_host() -> None:
    """Work runs on another thread in the order of submission, and submitting doesn't wait for it."""
    adapter, go, ran = CpuAdapter(), threading.Event(), []
    stream = adapter.new_stream(priority=1)
    adapter.submit(stream, lambda: go.wait(30) and ran.append(threading.get_ident()))
    adapter.submit(stream, lambda: ran.append("second"))
    end = adapter.event(stream)
    assert not end.done()
    assert ran == []
    go.set()
    end.wait()
    assert end.done()
    assert ran[0] != threading.get_ident()
    assert ran[1] == "second"
    adapter.close()


def test_streams_wait_for_each_other_without_the_host() -> None:
    """A stream that waits for another's event blocks itself only, and goes on when the other is there."""
    adapter, go, ran = CpuAdapter(), threading.Event(), []
    first, second = adapter.new_stream(), adapter.new_stream()
    adapter.submit(first, lambda: go.wait(30) and ran.append("first"))
    event = adapter.event(first)
    adapter.submit(second, lambda: adapter.wait(event))
    adapter.submit(second, lambda: ran.append("second"))
    end = adapter.event(second)
    time.sleep(0.02)
    assert ran == []
    go.set()
    end.wait()
    assert ran == ["first", "second"]
    assert end.us_since(event) >= 0
    adapter.close()


def test_replays_run_beside_each_other_on_streams() -> None:
    """Graphs of two pools replay on two streams at once, each on its own memory."""
    adapter = CpuAdapter()
    graphs = [captured(adapter, size) for size in (4, 4096)]
    streams = [adapter.new_stream() for _ in graphs]
    for step in range(20):
        for stream, (x, _, graph) in zip(streams, graphs, strict=True):
            adapter.submit(stream, lambda x=x, step=step: x.fill_(step))
            adapter.submit(stream, lambda graph=graph: adapter.replay(graph))
        for event in [adapter.event(stream) for stream in streams]:
            event.wait()
        assert all((y == 2 * (step + 1)).all() for _, y, _ in graphs)
    adapter.close()


def test_errors_of_a_stream_surface_where_the_host_waits() -> None:
    """An error is raised by events after it, skips what was queued behind it, and is over once it was heard."""
    adapter, ran = CpuAdapter(), []
    stream = adapter.new_stream()
    before = adapter.event(stream)

    def fail() -> None:
        raise ValueError("in the stream")

    adapter.submit(stream, fail)
    adapter.submit(stream, lambda: ran.append("behind"))
    after = adapter.event(stream)
    before.wait()
    with pytest.raises(ValueError, match="in the stream"):
        after.wait()
    with pytest.raises(ValueError, match="in the stream"):
        adapter.wait(after)
    adapter.submit(stream, lambda: ran.append("next"))
    adapter.event(stream).wait()
    assert ran == ["next"]
    adapter.close()


def test_an_error_spreads_to_a_stream_that_waits_for_it() -> None:
    """Work that waits for a failed stream fails as well: its inputs were never made."""
    adapter, ran = CpuAdapter(), []
    first, second = adapter.new_stream(), adapter.new_stream()
    adapter.submit(first, lambda: 1 / 0)
    event = adapter.event(first)
    adapter.submit(second, lambda: adapter.wait(event))
    adapter.submit(second, lambda: ran.append("never"))
    with pytest.raises(ZeroDivisionError):
        adapter.event(second).wait()
    assert ran == []
    adapter.close()


def test_workers_have_the_hosts_settings() -> None:
    """Work runs with the submitting thread's inference mode, gradient mode and number of threads."""
    adapter, seen = CpuAdapter(), []
    stream = adapter.new_stream()

    def look() -> None:
        seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.get_num_threads()))

    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        with mode():
            adapter.submit(stream, look)
            look_here = (torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.get_num_threads())
        adapter.event(stream).wait()
        assert seen.pop() == look_here
    adapter.close()


def test_an_event_on_the_current_stream_is_past_at_once() -> None:
    """What the host and a stream's own work did before they ask is done; a wait for one's own future is refused."""
    adapter, seen = CpuAdapter(), []
    assert adapter.event().done()
    stream = adapter.new_stream()
    adapter.submit(stream, lambda: seen.append(adapter.event().done()))
    adapter.submit(stream, lambda: adapter.event(stream).wait())
    with pytest.raises(ConfigError, match="later point of the same stream"):
        adapter.event(stream).wait()
    assert seen == [True]
    adapter.close()


def test_streams_end() -> None:
    """Threads end with close, and with the stream that nobody holds; a closed stream takes no work."""
    count = threading.active_count()
    adapter = CpuAdapter()
    kept, dropped = adapter.new_stream(), adapter.new_stream()
    for stream in (kept, dropped):
        adapter.submit(stream, lambda: None)
        adapter.event(stream).wait()
    assert threading.active_count() == count + 2
    thread = dropped._thread
    del dropped, stream
    gc.collect()
    thread.join(30)
    adapter.close()
    assert threading.active_count() == count
    with pytest.raises(ConfigError, match="closed"):
        adapter.submit(kept, lambda: None)


# Staging


@pytest.mark.parametrize("dtype", ["int64", "int32", "float32"])
@pytest.mark.parametrize("make", [list, tuple, torch.tensor, lambda v: pytest.importorskip("numpy").array(v)])
def test_numbers_are_staged_and_padded(dtype: str, make: object) -> None:
    """Numbers from sequences, tensors and arrays reach the front of a buffer, with fill up to size and no further."""
    adapter = CpuAdapter()
    buffer = adapter.alloc_static((6,), dtype, fill=9)
    address = buffer.data_ptr()
    adapter.stage(buffer, make([1, 2, 3]), 5, -1)
    assert buffer.tolist() == [1, 2, 3, -1, -1, 9]
    adapter.stage(buffer, make([4, 5]), 2, -1)
    assert buffer.tolist() == [4, 5, 3, -1, -1, 9]
    assert buffer.data_ptr() == address
    assert buffer.dtype is getattr(torch, dtype)


def test_rows_of_different_lengths_are_staged_and_padded() -> None:
    """Shorter rows and missing rows are filled; rows as a narrower tensor are too."""
    adapter = CpuAdapter()
    table = adapter.alloc_static((4, 3), "int32", fill=9)
    adapter.stage(table, [[1, 2, 3], [4], []], 3, 0)
    assert table.tolist() == [[1, 2, 3], [4, 0, 0], [0, 0, 0], [9, 9, 9]]
    adapter.stage(table, torch.tensor([[7, 8]]), 2, -1)
    assert table.tolist() == [[7, 8, -1], [-1, -1, -1], [0, 0, 0], [9, 9, 9]]
    adapter.stage(table, [], 1, 5)
    assert table.tolist()[0] == [5, 5, 5]


def test_staging_reaches_a_replay_in_any_mode() -> None:
    """A buffer made in inference mode takes new values outside it, and a replay reads them."""
    adapter = CpuAdapter()
    with torch.inference_mode():
        buffer = adapter.alloc_static((3,), "float32")
        adapter.begin(adapter.new_pool())
        doubled = buffer * 2
        graph = adapter.end()
    adapter.stage(buffer, torch.tensor([1.0, 2.0]), 3, 7)
    adapter.replay(graph)
    assert doubled.tolist() == [2.0, 4.0, 14.0]


@pytest.mark.parametrize(
    ("values", "size", "message"),
    [
        ([1] * 5, 4, "5 values can't be staged as 4 rows"),
        ([1], 7, "buffer of 6"),
        ([1 << 40], 1, "don't fit"),
        ([0.5], 1, "don't fit"),
        ([[1]], 1, "don't fit"),
    ],
)
def test_bad_values_are_refused(values: list, size: int, message: str) -> None:
    """Too many values, too many rows and values of the wrong kind are refused by name."""
    adapter = CpuAdapter()
    with pytest.raises(ConfigError, match=message):
        adapter.stage(adapter.alloc_static((6,), "int32"), values, size, 0)


def test_bad_buffers_are_refused() -> None:
    """Unknown dtypes, rows that are too long and tensors that aren't static buffers are refused."""
    adapter = CpuAdapter()
    with pytest.raises(UnknownNameError, match="int64"):
        adapter.alloc_static((1,), "int63")
    with pytest.raises(ConfigError, match="a row of 3 values"):
        adapter.stage(adapter.alloc_static((2, 2), "int64"), [[1, 2, 3]], 1, 0)
    with pytest.raises(ConfigError, match="alloc_static"):
        adapter.stage(torch.zeros(3), [1], 1, 0)


# Memory


def test_memory_is_what_buffers_and_graphs_hold() -> None:
    """With a limit, memory counts static buffers and graphs, and is as before after release."""
    adapter = CpuAdapter(memory_bytes=1 << 20)
    before = adapter.memory()
    assert before.total == 1 << 20
    assert before.used == 0
    buffer = adapter.alloc_static((100,), "int64")
    assert adapter.memory().used == 800
    pool = adapter.new_pool()
    adapter.begin(pool)
    kept = torch.arange(1000) + buffer[0]
    graph = adapter.end()
    assert adapter.memory().used == 800 + graph.num_bytes
    adapter.release(pool)
    del buffer, kept, graph
    gc.collect()
    assert adapter.memory().used == 0
    with pytest.raises(RegistryError, match="released"):
        adapter.begin(pool)


def test_a_capture_beyond_memory_is_refused_and_leaves_nothing() -> None:
    """A recording that needs more than the limit is out of memory; what it took is free, and a smaller one fits."""
    adapter = CpuAdapter(memory_bytes=100_000)
    pool, x = adapter.new_pool(), torch.zeros(10_000)
    adapter.begin(pool)
    with pytest.raises(CaptureError, match="memory_bytes is 100000") as caught:
        _ = [x + number for number in range(3)]
    adapter.abort()
    assert adapter.classify(caught.value) == (Reason.CAPTURE_OUT_OF_MEMORY, False)
    assert adapter.memory().used == 0
    adapter.begin(pool)
    y = x + 5
    adapter.replay(adapter.end())
    assert y[0] == 5


@pytest.mark.parametrize("what", ["alloc_static", "alloc_like"])
def test_a_buffer_beyond_memory_is_refused(what: str) -> None:
    """A static buffer that doesn't fit says what it needs, is out of memory, and isn't counted."""
    adapter = CpuAdapter(memory_bytes=1000)
    held = adapter.alloc_static((50,), "int64")
    with pytest.raises(OutOfMemoryError, match="800 bytes more than the 400 held, and memory_bytes is 1000") as caught:
        adapter.alloc_static((100,), "int64") if what == "alloc_static" else adapter.alloc_like(held[:1], 100)
    assert adapter.classify(caught.value) == (Reason.CAPTURE_OUT_OF_MEMORY, False)
    assert adapter.memory().used == 400
    assert adapter.alloc_static((150,), "int32").shape == (150,)


def test_without_a_limit_memory_is_the_process_and_the_machine() -> None:
    """Without a limit, used is a part of the machine's memory and grows with what the process holds."""
    adapter = CpuAdapter()
    used, total = adapter.memory()
    assert 0 < used < total
    held = torch.ones(16 << 20)
    assert adapter.memory().used > used + (32 << 20)
    del held


# Errors and faults


@pytest.mark.parametrize(
    ("error", "reason", "sticky"),
    [
        (MemoryError(), Reason.CAPTURE_OUT_OF_MEMORY, False),
        (OSError(12, "Cannot allocate memory"), Reason.CAPTURE_OUT_OF_MEMORY, False),
        (CaptureError(Reason.CAPTURE_OUT_OF_STREAMS, "x"), Reason.CAPTURE_OUT_OF_STREAMS, False),
        (GraphReplayError(None, "x"), Reason.REPLAY_FAILED, False),
        (StickyDeviceError("x"), Reason.DEVICE_LOST, True),
        (RuntimeError("anything"), Reason.CAPTURE_FAILED, False),
    ],
)
def test_errors_are_classified(error: Exception, reason: Reason, sticky: bool) -> None:
    """Each kind of error has its reason; only a lost device is sticky."""
    assert CpuAdapter().classify(error) == (reason, sticky)


def test_the_allocators_own_error_is_out_of_memory() -> None:
    """What torch raises when the host refuses memory is recognised."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50, dtype=torch.float64)
    assert CpuAdapter().classify(caught.value).reason is Reason.CAPTURE_OUT_OF_MEMORY


def test_begin_and_end_belong_together() -> None:
    """An end without a begin, and two recordings into one pool, are refused; an abort of nothing is nothing."""
    adapter = CpuAdapter()
    adapter.abort()
    with pytest.raises(CaptureError, match="call begin first"):
        adapter.end()
    pool, failures = adapter.new_pool(), []
    adapter.begin(pool)

    def other() -> None:
        try:
            adapter.begin(pool)
        except CaptureError as error:
            failures.append(str(error))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    adapter.abort()
    assert len(failures) == 1
    assert "isn't over" in failures[0]
    adapter.begin(pool)
    adapter.end()


@pytest.mark.parametrize(
    ("fault", "error", "reason"),
    [
        ("capture_fails", CaptureError, Reason.CAPTURE_FAILED),
        ("capture_out_of_memory", CaptureError, Reason.CAPTURE_OUT_OF_MEMORY),
        ("capture_out_of_streams", CaptureError, Reason.CAPTURE_OUT_OF_STREAMS),
        ("mid_segment", RuntimeError, Reason.CAPTURE_FAILED),
    ],
)
def test_the_nth_capture_fails(fault: str, error: type, reason: Reason) -> None:
    """An injected capture fault hits the n-th recording only, leaves no mode and no memory, and has its reason."""
    adapter = CpuAdapter(faults=[f"{fault}@2"], memory_bytes=1 << 20)
    captured(adapter)
    used = adapter.memory().used
    with pytest.raises(error, match=f"injected fault {fault}") as caught:
        captured(adapter)
    assert adapter.classify(caught.value) == (reason, False)
    assert adapter.memory().used == used
    x, y, graph = captured(adapter)
    x.fill_(3)
    adapter.replay(graph)
    assert y.tolist() == [8.0] * 4


@pytest.mark.parametrize(
    ("fault", "error", "reason"),
    [("replay_fails", GraphReplayError, Reason.REPLAY_FAILED), ("before_launch", RuntimeError, Reason.CAPTURE_FAILED)],
)
def test_the_nth_replay_fails_before_it_runs(fault: str, error: type, reason: Reason) -> None:
    """An injected replay fault comes before the first operator, so nothing was written."""
    adapter = CpuAdapter(faults=[Fault("replay_fails", 2) if fault == "replay_fails" else "before_launch@2"])
    x, y, graph = captured(adapter)
    adapter.replay(graph)
    x.fill_(3)
    with pytest.raises(error, match=f"injected fault {fault}") as caught:
        adapter.replay(graph)
    assert adapter.classify(caught.value) == (reason, False)
    assert y.tolist() == [2.0] * 4
    adapter.replay(graph)
    assert y.tolist() == [8.0] * 4


def test_staging_fails_before_it_writes() -> None:
    """An injected staging fault leaves the buffer as it was."""
    adapter = CpuAdapter(faults=["staging_fails"])
    buffer = adapter.alloc_static((2,), "int64", fill=5)
    with pytest.raises(RuntimeError, match="staging_fails"):
        adapter.stage(buffer, [1], 2, 0)
    assert buffer.tolist() == [5, 5]


def test_a_lost_device_stays_lost() -> None:
    """After the sticky fault every launch, capture and submission is refused with the one sticky error."""
    adapter = CpuAdapter(faults=["sticky"])
    _, _, graph = captured(adapter)
    stream = adapter.new_stream()
    buffer = adapter.alloc_static((1,), "int64")
    for attempt in (
        lambda: adapter.replay(graph),
        lambda: adapter.replay(graph),
        lambda: adapter.begin(adapter.new_pool()),
        lambda: adapter.stage(buffer, [1], 1, 0),
        lambda: adapter.submit(stream, lambda: None),
    ):
        with pytest.raises(StickyDeviceError, match="lost") as caught:
            attempt()
        assert adapter.classify(caught.value).sticky


def test_a_late_replay_still_gives_its_result() -> None:
    """An injected delay changes the time of a replay and nothing else."""
    adapter = CpuAdapter(faults=["late"])
    x, y, graph = captured(adapter)
    x.fill_(1)
    adapter.replay(graph)
    assert y.tolist() == [4.0] * 4


def test_faults_are_named() -> None:
    """The simulated executor's faults are all known here, and an unknown one is refused with the list."""
    assert set(FAULTS) < set(DEVICE_FAULTS)
    with pytest.raises(UnknownNameError, match="mid_segment"):
        CpuAdapter(faults=["mid_segmen"])
    # As an object too, not as text alone.
    with pytest.raises(RuntimeError, match="injected fault staging_fails"):
        CpuAdapter(faults=[Fault("staging_fails")]).stage(torch.zeros(4), [1], 4, 0)
    with pytest.raises(ConfigError, match="memory_bytes is 0"):
        CpuAdapter(memory_bytes=0)


def test_a_process_that_leaves_a_stream_working_ends_well() -> None:
    """The interpreter ends with code 0 while a stream that nobody closed still runs operators."""
    code = (
        "import torch\n"
        "from kpolicy.executors.cpu import CpuAdapter\n"
        "adapter = CpuAdapter()\n"
        "stream, a = adapter.new_stream(), torch.ones(256, 256)\n"
        "for _ in range(50): adapter.submit(stream, lambda: a @ a)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
