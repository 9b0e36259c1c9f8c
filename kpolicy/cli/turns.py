"""Policies in turn: the files of each, progress, metrics, and what an interrupt leaves."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import attrs
from cyclopts import Parameter
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from kpolicy.cli.logs import log_engines, log_level
from kpolicy.cli.options import whole
from kpolicy.cli.render import console
from kpolicy.cli.step_log import RunsOn, StepLog, files_of, step_log_paths
from kpolicy.engine import Engine
from kpolicy.errors import ConfigError
from kpolicy.keys import GraphKey
from kpolicy.trace_run import RunResult
from kpolicy.writing import is_special

__all__ = ["Files", "Turn", "capture", "check_files", "progress_bar", "serve_in_turn", "unwritten"]


_OF_A_MODEL = ("config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json")
"""What loading a model reads of its folder."""


@attrs.frozen
class Turn:
    """One policy, and the files that it writes; with ``--repeats`` which of its turns it is."""

    spec: str
    step_log: Path | None = None
    perfetto: Path | None = None
    repeat: int = 1


@Parameter(name="*")
@attrs.frozen(kw_only=True)
class Files:
    """Options that say what a run writes and serves besides its table."""

    step_log: Annotated[
        Path | None, Parameter(help="Write every step here; with several policies a file each, NAME-POLICY.")
    ] = None
    perfetto: Annotated[
        Path | None, Parameter(help="Write a Perfetto trace here; with several policies a file each, NAME-POLICY.")
    ] = None
    save_profile: Annotated[
        Path | None,
        Parameter(
            help="Write the costs that were measured here as a profile, which --profile reads; with a model only."
        ),
    ] = None
    metrics_port: Annotated[
        int | None,
        Parameter(converter=whole, help="Serve Prometheus metrics on this port of this machine; 0 takes a free one."),
    ] = None

    def turns(self, specs: Sequence[str], reads: Iterable[Path] = (), *, repeats: int = 1) -> list[Turn]:
        """Each policy with its files, of which none may be one that is read.

        Args:
            specs: the policies.
            reads: what the command reads.
            repeats: how often each is served: in the order given, then backwards, and so on, so that what changes
                evenly in the course of a run meets all of them alike.

        Raises:
            ConfigError: a file can't be written, or what it needs isn't installed; before anything has run.
        """
        log_level()
        _check_port(self.metrics_port)
        served = [(spec, i) for i in range(1, repeats + 1) for spec in (specs if i % 2 else reversed(specs))]
        names = [spec if i == 1 else f"{spec}-{i}" for spec, i in served]
        logs = step_log_paths(self.step_log, names)
        traces = files_of("--perfetto", self.perfetto, names, "run.pftrace")
        each = (("--step-log", logs), ("--perfetto", traces), ("--save-profile", [self.save_profile]))
        check_files([(option, path) for option, paths in each for path in paths], reads)
        if self.perfetto is not None:
            from kpolicy.observe.extras import load

            load("perfetto.protos.perfetto.trace.perfetto_trace_pb2", extra="perfetto", package="perfetto",
                 what="--perfetto")  # fmt: skip
        return [Turn(spec, log, trace, i) for (spec, i), log, trace in zip(served, logs, traces, strict=True)]


def _check_port(port: int | None) -> None:
    """Hold the port to its range, and see whether it is free, before minutes of serving."""
    if port is None:
        return
    import socket

    if not 0 <= port <= 65_535:
        raise ConfigError(f"--metrics-port is {port}; it takes 1 to 65535, or 0 for any that is free.")
    from kpolicy.observe.extras import load

    load("prometheus_client", extra="metrics", package="prometheus-client", what="--metrics-port")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ConfigError(
                f"--metrics-port {port} can't be had: {error.strerror or error}. Give another, or 0 for any that is "
                "free."
            ) from None


def check_files(written: Iterable[tuple[str, Path | None]], reads: Iterable[Path] = ()) -> None:
    """See that files can be written, each to a path of its own, and that none of them is read: an error now.

    Args:
        written: options and their files; None for those that weren't given.
        reads: what the command reads, as far as it is there; of a folder what is a model's.
    """
    inputs = [each for read in reads for each in _files_of(read)]
    by_path: dict[str, str] = {}
    for option, path in written:
        if path is None:
            continue
        if path.exists() and any(path.samefile(read) for read in inputs):
            raise ConfigError(f"{option} {path} is what the command reads, and would be lost. Give another path.")
        other = by_path.setdefault(os.path.realpath(path), option)
        if other != option and (path.is_file() or not path.exists()):
            raise ConfigError(f"{other} and {option} both write {path}; give each a path of its own.")
        _check_writable(option, path)


def _files_of(read: Path) -> list[Path]:
    """The file, or those that a model is loaded from in a folder."""
    # Not `Path.is_dir`, which raises where a ladder's sizes are too many for a name.
    if not os.path.isdir(read):
        return [read] if os.path.exists(read) else []
    return [each for pattern in _OF_A_MODEL for each in read.glob(pattern)]


def _check_writable(option: str, path: Path) -> None:
    """Open the file, or make and remove it: an error now, not after minutes of serving."""
    there = path.exists()
    try:
        if is_special(path):
            _check_special(path)
            return
        with path.open("ab"):
            pass
    except OSError as error:
        raise ConfigError(f"{option} {path} can't be written: {error.strerror or error}. Give another path.") from None
    if not there:
        path.unlink()


def _check_special(path: Path) -> None:
    """See that a device or a pipe may be written. It isn't opened: who reads a pipe takes its closing for the end."""
    if path.is_block_device():
        raise OSError("it is a disk, whose content would be lost")
    if not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def unwritten(write: Callable[[], object]) -> list[str]:
    """Write a result; where that can't be done why, to be told when the result is printed, else nothing."""
    try:
        write()
    except ConfigError as error:
        return [str(error)]
    return []


Serve = Callable[[Turn, Engine, Any, Any, Progress], RunResult]
"""(turn, engine, what to call each step or None, what to tell progress, the bars) -> the result"""


def serve_in_turn(
    turns: Sequence[Turn],
    engines: dict[str, Engine],
    num_requests: int,
    serve: Serve,
    *,
    files: Files,
    quiet: bool,
    runs_on: RunsOn | None = None,
    anew: Callable[[str], Engine] | None = None,
) -> list[RunResult]:
    """Serve with each policy, until the first one that is interrupted from the keyboard.

    Args:
        turns: whose turn it is, in order.
        engines: the policies' Engines; where a policy has another turn, its new one takes the place of the old.
        num_requests: of the trace.
        serve: serves one turn.
        files: what is served besides.
        quiet: without a progress bar.
        runs_on: what step logs say of device and model.
        anew: an Engine of the policy that has counted nothing yet and goes by the costs as they were given: over the
            graphs that it has, or without any.
    """
    results: list[RunResult] = []
    log_engines(engines.values())
    try:
        with _metrics(engines, files.metrics_port), progress_bar("requests", quiet=quiet) as shown:
            for turn in turns:
                if turn.repeat > 1 and anew is not None:
                    engines[turn.spec] = anew(turn.spec)
                    log_engines([engines[turn.spec]])
                engine = engines[turn.spec]
                before = None if turn.repeat == 1 else _Captured.of(engine)
                task = shown.add_task(turn.spec, total=num_requests)

                def advance(done: int, _total: int, task: Any = task) -> None:
                    shown.update(task, completed=done)

                with StepLog(turn.step_log, turn.spec, engine, perfetto=turn.perfetto, runs_on=runs_on) as log:
                    result = serve(turn, engine, log, advance, shown)
                    results.append(attrs.evolve(result, repeat=turn.repeat))
                if before is not None:
                    results[-1] = before.left_out_of(results[-1], engine)
                if results[-1].interrupted.startswith("interrupted"):
                    break
    except KeyboardInterrupt:
        # Between policies, or while outputs were compared: what is done is still told.
        pass
    return results


@attrs.frozen
class _Captured:
    """What a policy's earlier turns captured."""

    keys: frozenset[GraphKey]
    seconds: float

    @classmethod
    def of(cls, engine: Engine) -> _Captured:
        registry = engine.registry
        return cls(frozenset(registry.captured()), sum(record.seconds for record in registry.records()))

    def left_out_of(self, result: RunResult, engine: Engine) -> RunResult:
        """The result of the turn that came after."""
        now = _Captured.of(engine)
        return attrs.evolve(result, graphs_captured=len(now.keys - self.keys), capture_s=now.seconds - self.seconds)


def capture(engine: Engine, label: str, shown: Progress) -> None:
    """Capture the graphs that an Engine lacks, with a bar that says how many, how large and how long."""
    held, seconds = 0, 0.0
    lacking = set(engine.keys).difference(engine.registry.captured())
    task = shown.add_task(f"capture {label}", total=len(lacking), unit="graphs")

    def advance(_key: Any, report: Any) -> None:
        nonlocal held, seconds
        if report is not None:
            held, seconds = held + report.bytes, seconds + report.seconds
        shown.update(task, advance=1, description=f"capture {label}: {held / 2**20:,.1f} MiB, {seconds:.1f} s")

    engine.capture(advance)
    shown.refresh()


class _Count(ProgressColumn):
    """How many of how many: of a task's ``unit``, or what the bar counts by default."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what

    def render(self, task: Task) -> Text:
        total = "?" if task.total is None else f"{task.total:.0f}"
        return Text(f"{task.completed:.0f}/{total} {task.fields.get('unit', self._what)}")


@contextmanager
def progress_bar(what: str, *, quiet: bool) -> Iterator[Progress]:
    """A progress bar on standard error, on terminals only."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), _Count(what))
    made = console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=made, disable=quiet or not made.is_terminal,
                  transient=True) as shown:  # fmt: skip
        yield shown


def _metrics(engines: Mapping[str, Engine], port: int | None) -> Any:
    if port is None:
        return nullcontext()
    from kpolicy.observe.metrics import serve_metrics

    server = serve_metrics(engines, port)
    sys.stderr.write(f"kpolicy: metrics at {server.url}\n")
    return server
