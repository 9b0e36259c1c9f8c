"""A run as a Perfetto trace: what the host did in each step, and what each stream ran for it.

::

    with PerfettoWriter("run.pftrace") as trace:
        trace.write(entry)  # a `kpolicy.schemas.StepEntry`, step by step

Tracks, under one process: *host* has a slice a step, with what is known of its phases inside; *stream N* has a slice a
launch; counters say how many requests wait and run. Steps are written as they come, so memory is bounded.
docs/observe.md says what the slices carry. The `perfetto` package (the extra ``perfetto``) loads on first use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from kpolicy.errors import ConfigError
from kpolicy.modes import Rows
from kpolicy.observe.track_events import TrackEventFile
from kpolicy.schemas import LogHeader, StepEntry, StepLaunch, read_step_log

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["PerfettoWriter", "StepTiming", "perfetto_from_step_log"]


class StepTiming(NamedTuple):
    """When a step's parts ran, where that was measured; where not, its entry says as much as is known.

    Times are in microseconds.
    """

    start_us: float | None = None
    """From the run's start; None is the entry's own, and where that has none the end of the step before."""
    host_us: Mapping[str, float] = {}
    """How long each phase took on the host, in their order, such as decide, stage and launch"""
    launches_us: Sequence[tuple[float, float]] = ()
    """(start, duration) of each launch on its stream, from the step's start"""


_AS_LOGGED = StepTiming()


class PerfettoWriter:
    """Writes a Perfetto trace. A context manager: the file is there, whole, when it is left, by an error too.

    Until then what is written is beside it, under a name of its own.

    Args:
        path: the file; what is there is replaced at the end.
        header: what ran where; on the host's track, at the start.

    Raises:
        ConfigError: the file can't be written, or the perfetto package isn't installed.
    """

    def __init__(self, path: Path | str, header: LogHeader | None = None) -> None:
        header = header if header is not None else LogHeader()
        self._file = TrackEventFile(path, f"kpolicy {header.policy}".rstrip())
        self._host = self._file.track("host")
        self.mark("run", _said(header))

    def write(self, entry: StepEntry, timing: StepTiming = _AS_LOGGED) -> None:
        """Add a step.

        A slice never begins before the one before it on its track has ended: what was measured to overlap there
        begins later.

        Raises:
            ConfigError: the file is closed or can't be written.
        """
        start_us = entry.start_us if timing.start_us is None else timing.start_us
        start_ns = self._host.last_ns
        if start_us is not None:
            start_ns = max(_ns(start_us), start_ns)
        try:
            self._write_queue(entry, start_ns)
            self._write_host(entry, timing, start_ns)
            for i, launch in enumerate(entry.launches):
                measured = timing.launches_us[i] if i < len(timing.launches_us) else None
                self._write_launch(entry, launch, start_ns, measured)
        except BaseException:
            # Interrupted in the middle, perhaps from the keyboard: a slice that never ends would spoil the track.
            self._file.abandon()
            raise
        self._file.flush()

    def mark(self, name: str, values: Mapping[str, Any] | None = None) -> None:
        """Add a moment on the host's track, where the last step ended: an event, for example.

        Raises:
            ConfigError: the file is closed or can't be written.
        """
        self._file.mark(self._host, self._host.last_ns, name, values or {})
        self._file.flush()

    def _write_queue(self, entry: StepEntry, at_ns: int) -> None:
        queue = entry.queue
        if queue is None:
            return
        counts = {
            "requests waiting": queue.waiting, "requests running": queue.running,
            "KV tokens used": queue.kv_tokens_used, "preemptions": queue.preempted,
        }  # fmt: skip
        for name, count in counts.items():
            if count is not None:
                self._file.count(self._file.track(name, counter=True), at_ns, count)

    def _write_host(self, entry: StepEntry, timing: StepTiming, start_ns: int) -> None:
        file, host, numbers = self._file, self._host, entry.shape.numbers
        values = {
            "step": entry.step, "mode": entry.mode, "reason": entry.reason, "num_reqs": numbers.total_reqs,
            "num_tokens": numbers.total_tokens, "num_decodes": numbers.num_decodes,
            "num_prefills": numbers.num_prefills, "kv_tokens": entry.kv_tokens, "decode_steps": entry.decode_steps,
            "padding": sum(launch.padding for launch in entry.launches),
            "key": "; ".join(str(launch.key) for launch in entry.launches if launch.key is not None),
        }  # fmt: skip
        phases = timing.host_us or ({} if entry.host_us is None else {"launch": entry.host_us})
        file.begin(host, start_ns, entry.mode, values, "step")
        at_ns = start_ns
        for phase, duration_us in phases.items():
            file.begin(host, at_ns, phase, {}, "host")
            at_ns += _ns(duration_us)
            file.end(host, at_ns)
        file.end(host, max(at_ns, start_ns + _ns(entry.cycle_us or 0.0)))

    def _write_launch(
        self, entry: StepEntry, launch: StepLaunch, start_ns: int, measured: tuple[float, float] | None
    ) -> None:
        track = self._file.track(f"stream {launch.stream}")
        if measured is not None:
            timed_by = "launch"
            begin_ns = max(start_ns + _ns(measured[0]), track.last_ns)
            end_ns = begin_ns + _ns(measured[1])
        else:
            until_us, timed_by = _until(entry, launch.rows)
            begin_ns = max(start_ns, track.last_ns)
            end_ns = max(start_ns + _ns(until_us), begin_ns)
        name, part = ("eager", "eager") if launch.key is None else (str(launch.key), launch.key.part.value)
        values = {
            "step": entry.step, "mode": entry.mode, "reason": launch.reason or entry.reason,
            "rows": launch.rows.value, "part": part, "key": "" if launch.key is None else name,
            "num_reqs": _num_reqs(entry, launch), "num_tokens": _num_tokens(entry, launch),
            "padding": launch.padding, "repeat": launch.repeat, "timed_by": timed_by,
        }  # fmt: skip
        self._file.begin(track, begin_ns, name, values, "launch")
        self._file.end(track, end_ns)

    def close(self) -> None:
        """Finish the file and give it its name; a second time does nothing.

        Raises:
            ConfigError: the file can't be written; nothing is left of it.
        """
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.mark("cut short", {"error": f"{type(error).__name__}: {error}"})
            self.close()
        except ConfigError:
            # The error that ended the run is the one to hear of.
            self._file.discard()


def _ns(us: float) -> int:
    """Microseconds as nanoseconds; 0 for what is no time."""
    return round(us * 1000) if 0 < us < 1e15 else 0


def _said(header: LogHeader) -> dict[str, str]:
    """What a header says, for the trace."""
    said = {
        "policy": header.policy, "device": header.device, "model": header.model, "command": header.command,
        "started_at": header.started_at, "costs_version": header.costs_version,
        **{f"version of {name}": version for name, version in header.versions.items()},
    }  # fmt: skip
    return {name: text for name, text in said.items() if text}


def _until(entry: StepEntry, rows: Rows) -> tuple[float, str]:
    """When a launch was done, in microseconds from the step's start, and what says so."""
    ready_us = (entry.ready_us or {}).get(rows.value)
    for us, name in ((ready_us, "ready_us"), (entry.device_us, "device_us"), (entry.cycle_us, "cycle_us")):
        if us is not None:
            return us, name
    return 0.0, "nothing"


def _num_tokens(entry: StepEntry, launch: StepLaunch) -> int:
    numbers = entry.shape.numbers
    if launch.rows is Rows.ALL:
        return numbers.total_tokens * launch.repeat
    tokens = numbers.decode_tokens if launch.rows is Rows.DECODE else numbers.num_prefill_tokens
    return tokens * launch.repeat


def _num_reqs(entry: StepEntry, launch: StepLaunch) -> int:
    numbers = entry.shape.numbers
    if launch.rows is Rows.ALL:
        return numbers.total_reqs
    return numbers.num_decodes if launch.rows is Rows.DECODE else numbers.num_prefills


def perfetto_from_step_log(path_in: Path | str, path_out: Path | str) -> int:
    """Write a step log as a Perfetto trace. Steps begin when the log says; those without a ``start_us``, end to end.

    The log is read whole, so this takes memory with its length.

    Returns:
        The number of steps.

    Raises:
        ConfigError: a file can't be read or written, or the perfetto package isn't installed.
        SchemaError: it isn't a step log.
    """
    log = read_step_log(path_in)
    with PerfettoWriter(path_out, log.header) as trace:
        for entry in log.entries:
            trace.write(entry)
        if log.cut_short:
            trace.mark("cut short", {"error": "the step log has no last line"})
    return len(log.entries)
