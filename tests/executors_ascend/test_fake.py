"""The pretended device enforces what the vendor's documents say, so that a mistake of ours shows as it would there."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from tests.fakes.device import Device, Hang
from tests.fakes.torch_npu import fake_torch_npu


class Bench:
    """A graph of one operator that reads a length on the host, and what it read at each replay."""

    def __init__(self, *, reset: bool = True) -> None:
        self.torch_npu = fake_torch_npu(records=False)
        npu = self.npu = self.torch_npu.npu
        self.main, self.updates = npu.current_stream(), npu.Stream()
        self.read: list[int] = []
        self.event = npu.ExternalEvent()
        self.graph = npu.NPUGraph()
        self.graph.capture_begin()
        self.event.wait(self.main)
        if reset:
            self.event.reset(self.main)
        npu.graph_task_group_begin(self.main)
        self._launch(1, lambda arguments: self.read.append(arguments["length"]))
        self.task = npu.graph_task_group_end(self.main)
        self.graph.capture_end()
        self.read.clear()  # the capture ran it too

    def _launch(self, length: int, run: Any = None) -> None:
        self.torch_npu.launch("operator", run, {"length": length})

    def update(self, length: int, *, on: Any = None, current: Any = None) -> None:
        stream = on or self.updates
        with self.npu.stream(current or stream):
            self.npu.graph_task_update_begin(stream, self.task)
            self._launch(length)
            self.npu.graph_task_update_end(stream)
        self.event.record(stream)


def test_a_replay_waits_for_its_signal_and_reads_what_was_rewritten() -> None:
    """An external event may be waited for before it is recorded."""
    bench = Bench()
    bench.graph.replay()
    assert bench.read == []
    assert not bench.main.query()
    bench.update(7)
    assert bench.read == [7]
    assert bench.main.query()


def test_a_replay_without_an_update_goes_on_with_the_last_length() -> None:
    """A signal alone lets the graph go on with what it was captured with, or rewritten to last."""
    bench = Bench()
    for expected in (1, 1):
        bench.graph.replay()
        bench.event.record(bench.updates)
        assert bench.read[-1] == expected
    bench.graph.replay()
    bench.update(5)
    bench.graph.replay()
    bench.event.record(bench.updates)
    assert bench.read == [1, 1, 5, 5]


def test_an_event_that_is_not_reset_lets_the_next_replay_through() -> None:
    """The flag stays up, so that the next replay doesn't wait for its own update."""
    bench = Bench(reset=False)
    bench.graph.replay()
    bench.update(7)
    bench.graph.replay()
    bench.update(8)
    assert bench.read == [7, 7]


def test_a_signal_before_the_reset_is_eaten() -> None:
    """Two signals before two replays are one: the second replay waits for ever."""
    bench = Bench()
    bench.event.record(bench.updates)
    bench.event.record(bench.updates)
    bench.graph.replay()
    bench.graph.replay()
    assert bench.read == [1]
    with pytest.raises(Hang):
        bench.main.synchronize()


def test_an_update_behind_the_graph_on_its_own_stream_hangs() -> None:
    """The stream waits at the graph, and what would let it go is behind."""
    bench = Bench()
    bench.graph.replay()
    bench.update(7, on=bench.main)
    with pytest.raises(Hang, match="waits for ever"):
        bench.npu.synchronize()


def test_an_operator_on_another_stream_is_not_part_of_the_update() -> None:
    """The task keeps its length: a stale result, without a word."""
    bench = Bench()
    bench.graph.replay()
    bench.update(7, current=bench.npu.Stream())
    assert bench.read == [1]


def test_streams_run_out_and_come_back() -> None:
    """Graphs take streams for as long as they live, and a capture without one says so."""
    device = Device(2)
    npu = fake_torch_npu(device, records=False).npu
    graphs = [npu.NPUGraph() for _ in range(3)]
    for graph in graphs[:2]:
        graph.capture_begin()
        graph.capture_end()
    with pytest.raises(RuntimeError, match="207008"):
        graphs[2].capture_begin()
    graphs[0].reset()
    graphs[2].capture_begin()
    graphs[2].capture_end()
    assert device.taken == 2


def test_what_is_illegal_in_a_capture_is_refused() -> None:
    """Waiting on the host, a second capture, and an update in an update."""
    bench = Bench()
    graph = bench.npu.NPUGraph()
    graph.capture_begin()
    with pytest.raises(RuntimeError, match="107030"):
        bench.npu.synchronize()
    with pytest.raises(RuntimeError, match="107029"):
        bench.npu.NPUGraph().capture_begin()
    graph.capture_end()
    bench.npu.graph_task_update_begin(bench.updates, bench.task)
    with pytest.raises(RuntimeError, match="UpdateBegin"):
        bench.npu.graph_task_update_begin(bench.updates, bench.task)
    with pytest.raises(RuntimeError, match="UpdateEnd"):
        bench.npu.graph_task_update_end(bench.main)
