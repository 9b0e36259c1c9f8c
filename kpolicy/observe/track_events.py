"""`TrackEventFile`: a Perfetto trace file of slices, moments and counts on named tracks, written as they come.

Perfetto's track events are described at perfetto.dev/docs/reference/synthetic-track-event. Here they are one packet
sequence; texts are interned, so a name costs a byte or two after its first use. Nothing here knows of steps.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from kpolicy.errors import ConfigError
from kpolicy.observe.extras import load
from kpolicy.writing import WholeFile

__all__ = ["Track", "TrackEventFile"]

MOST_INTERNED = 4096
"""Texts that are written once and then named by number; what a file has beyond them is written out each time."""
_SEQUENCE = 1
_PROCESS = 1
"""The ids of the one packet sequence and of the process's track; other tracks count on from there."""
_INT64 = 1 << 63


@attrs.define
class Track:
    """A track that was described: its id, and the time of its last event in nanoseconds."""

    uuid: int
    last_ns: int = 0


class TrackEventFile:
    """Writes a trace file, which has its name once it is closed (`kpolicy.writing.WholeFile`).

    Events of a track must be added in the order of their times, and every slice that begins must end.

    Args:
        path: the file; what is there is replaced.
        process: what to call the process that all tracks belong to.

    Raises:
        ConfigError: the file can't be written, or the perfetto package isn't installed.
    """

    def __init__(self, path: Path | str, process: str) -> None:
        self._protos: Any = load(
            "perfetto.protos.perfetto.trace.perfetto_trace_pb2",
            extra="perfetto", package="the perfetto package", what="Writing a Perfetto trace",
        )  # fmt: skip
        self.path = Path(path)
        self._trace = self._protos.Trace()
        self._tracks: dict[str, Track] = {}
        self._interned: dict[tuple[str, str], int] = {}
        packet = self._trace.packet.add()
        packet.trusted_packet_sequence_id = _SEQUENCE
        packet.sequence_flags = self._protos.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
        packet.first_packet_on_sequence = True
        packet.track_descriptor.uuid = _PROCESS
        packet.track_descriptor.process.pid = os.getpid()
        packet.track_descriptor.process.process_name = _clean(process)
        # Tracks and texts that the file has, or will have from the next flush on.
        self._told = (0, 0)
        if self.path.is_dir() or not self.path.name:
            example = self.path / "run.pftrace"
            raise ConfigError(f"can't write {path}: it is a folder. Name a file in it, such as {example}.")
        self._file = WholeFile(self.path)

    # Events.

    def track(self, name: str, *, counter: bool = False) -> Track:
        """The track of that name; described at its first use."""
        track = self._tracks.get(name)
        if track is None:
            track = self._tracks[name] = Track(_PROCESS + 1 + len(self._tracks))
            packet = self._trace.packet.add()
            packet.trusted_packet_sequence_id = _SEQUENCE
            packet.track_descriptor.uuid = track.uuid
            packet.track_descriptor.parent_uuid = _PROCESS
            packet.track_descriptor.name = name
            if counter:
                packet.track_descriptor.counter.unit = self._protos.CounterDescriptor.UNIT_COUNT
        return track

    def begin(self, track: Track, at_ns: int, name: str, values: Mapping[str, Any], category: str) -> None:
        """Begin a slice inside the one that is open on the track."""
        packet, event = self._event(track, at_ns, self._protos.TrackEvent.TYPE_SLICE_BEGIN)
        iid = self._iid(packet, "event_categories", category)
        if iid:
            event.category_iids.append(iid)
        else:
            event.categories.append(_clean(category))
        self._name(packet, event, name, values)

    def end(self, track: Track, at_ns: int) -> None:
        """End the innermost slice that is open on the track."""
        self._event(track, at_ns, self._protos.TrackEvent.TYPE_SLICE_END)

    def mark(self, track: Track, at_ns: int, name: str, values: Mapping[str, Any]) -> None:
        """Add a moment."""
        packet, event = self._event(track, at_ns, self._protos.TrackEvent.TYPE_INSTANT)
        self._name(packet, event, name, values)

    def count(self, track: Track, at_ns: int, value: int) -> None:
        """Add a value of a counter."""
        _, event = self._event(track, at_ns, self._protos.TrackEvent.TYPE_COUNTER)
        event.counter_value = value

    def _event(self, track: Track, at_ns: int, kind: int) -> tuple[Any, Any]:
        packet = self._trace.packet.add()
        packet.timestamp = at_ns
        packet.trusted_packet_sequence_id = _SEQUENCE
        packet.sequence_flags = self._protos.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
        event = packet.track_event
        event.type = kind
        event.track_uuid = track.uuid
        track.last_ns = at_ns
        return packet, event

    def _name(self, packet: Any, event: Any, name: str, values: Mapping[str, Any]) -> None:
        iid = self._iid(packet, "event_names", name)
        if iid:
            event.name_iid = iid
        else:
            event.name = _clean(name)
        for key, value in values.items():
            annotation = event.debug_annotations.add()
            iid = self._iid(packet, "debug_annotation_names", key)
            if iid:
                annotation.name_iid = iid
            else:
                annotation.name = _clean(key)
            self._value(packet, annotation, value)

    def _value(self, packet: Any, annotation: Any, value: Any) -> None:
        if isinstance(value, bool):
            annotation.bool_value = value
        elif isinstance(value, int) and -_INT64 <= value < _INT64:
            annotation.int_value = value
        elif isinstance(value, float):
            annotation.double_value = value
        else:
            text = str(value)
            iid = self._iid(packet, "debug_annotation_string_values", text)
            if iid:
                annotation.string_value_iid = iid
            else:
                annotation.string_value = _clean(text)

    def _iid(self, packet: Any, field: str, text: str) -> int:
        """The number of a text in a field of the interned data, told at its first use; 0 where there are too many."""
        iid = self._interned.get((field, text))
        if iid is not None:
            return iid
        if len(self._interned) >= MOST_INTERNED:
            return 0
        iid = self._interned[field, text] = len(self._interned) + 1
        entry = getattr(packet.interned_data, field).add()
        entry.iid = iid
        if field == "debug_annotation_string_values":
            entry.str = _clean(text).encode()
        else:
            entry.name = _clean(text)
        return iid

    # The file.

    def flush(self) -> None:
        """Append the events so far to the file, which is any number of `Trace` messages one after another.

        Raises:
            ConfigError: the file is closed or can't be written.
        """
        if self._file.closed:
            raise ConfigError(f"{self.path} is closed; write steps inside the writer's `with` block.")
        self._file.write(self._trace.SerializeToString())
        self._told = (len(self._tracks), len(self._interned))
        # A message that is cleared keeps the memory of all that it ever had.
        self._trace = self._protos.Trace()

    def abandon(self) -> None:
        """Forget the events since the last flush, with the tracks and texts that only they told of."""
        self._trace = self._protos.Trace()
        num_tracks, num_texts = self._told
        while len(self._tracks) > num_tracks:
            self._tracks.popitem()
        while len(self._interned) > num_texts:
            self._interned.popitem()

    def close(self) -> None:
        """Finish the file and give it its name; a second time does nothing.

        Raises:
            ConfigError: the file can't be written; nothing is left of it.
        """
        if self._file.closed:
            return
        try:
            self.flush()
            self._file.keep()
        finally:
            self.discard()

    def discard(self) -> None:
        """Leave nothing of what isn't finished."""
        self._file.discard()


def _clean(text: str) -> str:
    """The text as UTF-8 takes it: what a command line had in other bytes becomes question marks."""
    return text.encode(errors="replace").decode()
