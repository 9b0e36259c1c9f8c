"""Many simulations, on all cores or on a Ray cluster: every combination of policies, ladders, rates, traces and costs.

Each finished case is a line of a results file, written through to the disk, so that a sweep that was killed goes on
where it ended.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Protocol

import attrs

from kpolicy.errors import ConfigError, SchemaError
from kpolicy.reading import MOST_LINES_BYTES
from kpolicy.simulate.cases import Axes, Case, Common, alike, run_case
from kpolicy.simulate.local_backend import LocalBackend
from kpolicy.words import some
from kpolicy.writing import is_special, refused, write_all

__all__ = ["Axes", "Backend", "Case", "Common", "LocalBackend", "SweepFile", "run_case", "sweep"]

_SCHEMA, _VERSION = "kpolicy/sweep", [1, 0]


class Backend(Protocol):
    """Where cases run."""

    def run(self, cases: Sequence[Case], common: Common) -> Iterator[dict[str, Any]]:
        """The line of each case, as they finish."""
        ...


class SweepFile:
    """The results file of a sweep: a header, and a line a case. A context manager.

    Args:
        path: the file. One that was begun with the same options is gone on with; None keeps results in memory only.
        common: what the cases share.

    Raises:
        ConfigError: it can't be written, isn't a file, another sweep writes it, or it was begun with other options.
        SchemaError: it isn't such a file.
    """

    def __init__(self, path: Path | None, common: Common) -> None:
        self.lines: dict[str, dict[str, Any]] = {}
        """Finished cases, by key."""
        self._file: IO[bytes] | None = None
        self._path = path
        if path is None:
            return
        if is_special(path):
            # It needn't ever end, and what isn't kept can't be gone on from.
            raise ConfigError(
                f"{path} is a device or a pipe, and a sweep goes on from what is in its results file. Give a file, or "
                "a path where there is none yet."
            )
        header = {"schema": _SCHEMA, "version": _VERSION, "made_with": common.fingerprint()}
        try:
            # Without a buffer, whose rest would come again after a line that there was no room for.
            self._file = path.open("ab+", buffering=0)
            self._begin(self._file, path, header)
        except BaseException as error:
            self.__exit__()
            if isinstance(error, OSError):
                raise refused(path, error) from None
            raise

    def _begin(self, file: IO[bytes], path: Path, header: Mapping[str, Any]) -> None:
        """Go on after the whole lines that there are, and say in a header what these lack."""
        _lock(file, path)
        if os.fstat(file.fileno()).st_size > MOST_LINES_BYTES:
            most = f"{MOST_LINES_BYTES >> 20:,} MiB"
            raise SchemaError(f"{path} is longer than {most}, and no results file is. Give another path, or remove it.")
        file.seek(0)
        whole, begun = self._read(file.read(), path, header)
        if whole:
            # A line that was cut when the sweep was killed is written again.
            file.truncate(whole)
        before, now = _traces_of(begun), _traces_of(header)
        # A trace that couldn't be read when the file was begun, and can now, is held to this from now on.
        known = {name: before.get(name) if digest is None else digest for name, digest in now.items()}
        if known != before:
            self._write({**header, "made_with": {**header["made_with"], "traces": known}})

    def _read(self, data: bytes, path: Path, header: Mapping[str, Any]) -> tuple[int, Mapping[str, Any]]:
        """Bytes of whole lines there are, and the last header; 0 for an empty file."""
        whole = data.rfind(b"\n") + 1
        if not whole and data:
            raise SchemaError(f"{path} isn't a results file of kpolicy sweep. Give another path, or remove it.")
        begun: Mapping[str, Any] = {}
        for number, text in enumerate(data[:whole].splitlines(), 1):
            try:
                line = json.loads(text)
                heads = number == 1 or "schema" in line
                if not heads:
                    self.lines[Case(**line["case"]).key] = line
            except (ValueError, TypeError, KeyError):
                line, heads = None, False
            if not isinstance(line, dict) or (heads and line.get("schema") != _SCHEMA):
                raise SchemaError(
                    f"{path}, line {number}, isn't of a results file of kpolicy sweep. Give another path, or remove it."
                )
            if heads:
                begun = line
                others = _others(begun, header)
                if others:
                    raise ConfigError(
                        f"{path} was begun with other {others}. Give what it was begun with to go on, or another path."
                    )
        return whole, begun

    def add(self, line: dict[str, Any]) -> None:
        """Keep a finished case; a lost one only until the sweep is over.

        Raises:
            ConfigError: there is no room for it in the file, which stays as it was before.
        """
        if not line.get("lost"):
            self._write(line)
        self.lines[Case(**line["case"]).key] = line

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._file is None or self._path is None:
            return
        data = json.dumps(line, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        before = os.fstat(self._file.fileno()).st_size
        try:
            write_all(self._file, data)
            os.fsync(self._file.fileno())
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(before)
            kept = sum(not line.get("lost") for line in self.lines.values())
            step = f"Make room there; the same command goes on from the {some(kept, 'case')} in it." if kept else ""
            raise refused(self._path, error, before + len(data), step) from None

    def __enter__(self) -> SweepFile:
        return self

    def __exit__(self, *failure: object) -> None:
        if self._file is not None:
            self._file.close()


def _lock(file: IO[bytes], path: Path) -> None:
    """Keep other sweeps off a file until this process ends or closes it: each would cut off what the other wrote.

    Raises:
        ConfigError: another sweep writes it.
    """
    try:
        import fcntl
    except ImportError:
        # Not a Unix; nobody is kept off.
        return
    try:
        # Not `flock`, which worker processes would hold on to after a kill.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # A file system without locks keeps nobody off either.
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise ConfigError(f"{path} is written by another sweep now. Wait for it, or give another path.") from None


def _others(line: Mapping[str, Any], header: Mapping[str, Any]) -> str:
    """What a results file was begun with that this sweep hasn't, in words; nothing where it can be gone on with."""
    if line.get("version") != header["version"]:
        return f"lines, of version {line.get('version')} where this kpolicy writes {header['version']}"
    made, asked = line.get("made_with"), header["made_with"]
    made = made if isinstance(made, dict) else {}
    if made.get("kpolicy") != asked["kpolicy"]:
        return f"code, kpolicy {made.get('kpolicy', 'of an unknown version')} where this is {asked['kpolicy']}"
    held = {**made, "traces": asked["traces"]} if _same_traces(_traces_of(line), asked["traces"]) else made
    parts = [name for name in asked if held.get(name) != asked[name]]
    return " and other ".join(parts) or ("" if held == asked else "options")


def _traces_of(header: Mapping[str, Any]) -> dict[str, str | None]:
    """The digests of a header's traces, None for one that failed."""
    made = header.get("made_with")
    traces = made.get("traces") if isinstance(made, dict) else None
    return traces if isinstance(traces, dict) else {}


def _same_traces(before: Mapping[str, str | None], now: Mapping[str, str | None]) -> bool:
    """Whether traces are those of before. One that failed, then or now, may be any, and under a name that is right."""
    if None not in before.values() and now.keys() != before.keys():
        return False
    digests = ((digest, now.get(name, "")) for name, digest in before.items())
    return all(one == other for one, other in digests if one is not None and other is not None)


def sweep(
    axes: Axes,
    common: Common,
    *,
    path: Path | None = None,
    backend: Backend | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> list[dict[str, Any]]:
    """Run every case that the results file doesn't have yet; the lines of all, in the order of the cases.

    Cases that capture nothing, as `eager`'s, are as each other whatever the ladder: one is run, and each has its line.

    Args:
        axes: what is combined.
        common: what the names stand for.
        path: the results file; None keeps nothing.
        backend: where cases run; all local cores by default.
        progress: told (cases done, cases in all).

    Raises:
        ConfigError: the results file can't be used.
        KeyboardInterrupt: it was interrupted; what was done is in the file.
    """
    cases = axes.cases(common)
    with SweepFile(path, common) as file:
        # With nothing left to run nobody asks which cases are alike.
        whole = all(case.key in file.lines for case in cases)
        same = {} if whole else alike(cases, common)

        def missing(case: Case) -> list[Case]:
            return [each for each in same.get(case.key, (case,)) if each.key not in file.lines]

        def add(line: dict[str, Any], case: Case) -> None:
            file.add({**line, "case": attrs.asdict(case)})

        for case in cases:
            if case.key in file.lines:
                for each in missing(case):
                    add(file.lines[case.key], each)
        left = [case for case in cases if case.key not in file.lines]
        done = len(cases) - len(left)
        if progress is not None:
            progress(done, len(cases))
        # Of those that are alike the first stands for all.
        run = [case for case in left if missing(case)[0] == case]
        for line in (backend or LocalBackend()).run(run, common) if run else ():
            for each in missing(Case(**line["case"])):
                add(line, each)
                done += 1
                if progress is not None:
                    progress(done, len(cases))
        return [file.lines[case.key] for case in cases]
