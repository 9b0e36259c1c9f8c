"""Many simulations, on all cores or on a Ray cluster: every combination of policies, ladders, rates, traces and costs.

Each finished case is a line of a results file, written through to the disk, so that a sweep that was killed goes on
where it ended. A case is data, and running one needs nothing but that and its trace, so local processes and Ray's
workers run the same function.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import IO, Any, Protocol

import attrs

from kpolicy.budgets import Budget
from kpolicy.costs import CostTable
from kpolicy.errors import ConfigError, KPolicyError, SchemaError
from kpolicy.ladders import CaptureSizes
from kpolicy.scheduling.traces import Trace
from kpolicy.simulate.run import simulate
from kpolicy.simulate.server import Server

__all__ = ["Axes", "Backend", "Case", "Common", "LocalBackend", "SweepFile", "run_case", "sweep"]

_SCHEMA, _VERSION = "kpolicy/sweep", [1, 0]


@attrs.frozen(kw_only=True)
class Case:
    """One simulation of a sweep, by the names of what it combines.

    Args:
        trace, costs, ladder: names in `Common`; an empty ladder is the policy's own.
        rate: speeds the arrivals up by this factor.
        policy: the policy, with its arguments.
    """

    trace: str
    rate: float
    costs: str
    ladder: str
    policy: str

    @property
    def key(self) -> str:
        """What tells it from every other case of its sweep."""
        return json.dumps([self.trace, self.rate, self.costs, self.ladder, self.policy])


@attrs.frozen(kw_only=True)
class Common:
    """What the names of cases stand for, and what is equal in all of them.

    Args:
        traces: by name.
        costs: (cost table, server) by name: another device has other room for KV.
        ladders: capture sizes by name; None where the policy's own.
        attention: as `Engine` takes it.
        objective: what `auto` minimises.
        budget: what captured graphs may take.
        seed: of accepted drafts.
    """

    traces: Mapping[str, Trace]
    costs: Mapping[str, tuple[CostTable, Server]]
    ladders: Mapping[str, CaptureSizes | None]
    attention: Any = None
    objective: str = "throughput"
    budget: Budget | None = None
    seed: int = 0

    def fingerprint(self) -> dict[str, Any]:
        """What a results file must have been made with to be gone on with."""
        from hashlib import sha256

        def digest(value: object) -> str:
            return sha256(repr(value).encode()).hexdigest()[:16]

        return {
            "traces": {name: digest(trace.requests) for name, trace in self.traces.items()},
            "costs": {name: digest(each) for name, each in self.costs.items()},
            "ladders": {name: digest(each) for name, each in self.ladders.items()},
            "rest": digest((str(self.attention), self.objective, self.budget, self.seed)),
        }


@attrs.frozen(kw_only=True)
class Axes:
    """What is combined: every value of each with every value of the others."""

    policies: Sequence[str]
    rates: Sequence[float] = (1.0,)

    def cases(self, common: Common) -> list[Case]:
        """Every combination, in order."""
        return [
            Case(trace=trace, rate=rate, costs=costs, ladder=ladder, policy=policy)
            for trace, rate, costs, ladder, policy in product(
                common.traces, self.rates, common.costs, common.ladders, self.policies
            )
        ]


def run_case(case: Case, common: Common) -> dict[str, Any]:
    """One line of a results file: the case, and its result or why it has none."""
    costs, server = common.costs[case.costs]
    trace = common.traces[case.trace]
    try:
        result = simulate(
            trace if case.rate == 1 else trace.scaled(case.rate), case.policy, server=server, costs=costs,
            attention=common.attention, ladder=common.ladders[case.ladder], objective=common.objective,
            budget=common.budget, seed=common.seed,
        )  # fmt: skip
    except KPolicyError as error:
        return {"case": attrs.asdict(case), "error": str(error)}
    if result.interrupted:
        raise KeyboardInterrupt
    # As it reads back from a file, wherever it was run.
    return {"case": attrs.asdict(case), "result": json.loads(json.dumps(result.as_dict(), allow_nan=False))}


class Backend(Protocol):
    """Where cases run."""

    def run(self, cases: Sequence[Case], common: Common) -> Iterator[dict[str, Any]]:
        """The line of each case, as they finish."""
        ...


_COMMON: list[Common] = []
"""In a worker process: what its cases share, sent once."""


def _start_worker(common: Common) -> None:
    import signal

    # An interrupt from the keyboard reaches every process; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _COMMON[:] = [common]


def _work(case: Case) -> dict[str, Any]:
    return run_case(case, _COMMON[0])


@attrs.frozen
class LocalBackend:
    """Processes of this machine.

    Args:
        jobs: how many; 0 is one a core.
    """

    jobs: int = 0

    def run(self, cases: Sequence[Case], common: Common) -> Iterator[dict[str, Any]]:
        """The line of each case, as they finish."""
        from concurrent.futures import ProcessPoolExecutor, as_completed

        jobs = min(self.jobs or _cores(), len(cases))
        if jobs <= 1:
            yield from (run_case(case, common) for case in cases)
            return
        pool = ProcessPoolExecutor(jobs, initializer=_start_worker, initargs=(common,))
        try:
            futures = [pool.submit(_work, case) for case in cases]
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class SweepFile:
    """The results file of a sweep: a header, and a line a case. A context manager.

    Args:
        path: the file. One that was begun with the same options is gone on with; None keeps results in memory only.
        common: what the cases share.

    Raises:
        ConfigError: it can't be written, or was begun with other options.
        SchemaError: it isn't such a file.
    """

    def __init__(self, path: Path | None, common: Common) -> None:
        self.lines: dict[str, dict[str, Any]] = {}
        """Finished cases, by key."""
        self._file: IO[str] | None = None
        if path is None:
            return
        header = {"schema": _SCHEMA, "version": _VERSION, "made_with": common.fingerprint()}
        whole = self._read(path, header)
        try:
            self._file = path.open("r+" if whole else "w", encoding="utf-8", newline="\n")
            if whole:
                # A line that was cut when the sweep was killed is written again.
                self._file.truncate(whole)
                self._file.seek(whole)
            else:
                self._write(header)
        except OSError as error:
            raise ConfigError(f"can't write {path}: {error.strerror or error}. Give another path.") from None

    def _read(self, path: Path, header: Mapping[str, Any]) -> int:
        """Bytes of whole lines there are; 0 for no file or an empty one."""
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise ConfigError(f"can't read {path}: {error.strerror or error}. Give another path.") from None
        whole = data.rfind(b"\n") + 1
        if not whole:
            if data:
                raise SchemaError(f"{path} isn't a results file of kpolicy sweep. Give another path, or remove it.")
            return 0
        for number, text in enumerate(data[:whole].splitlines(), 1):
            try:
                line = json.loads(text)
                if number > 1:
                    self.lines[Case(**line["case"]).key] = line
            except (ValueError, TypeError, KeyError):
                line = None
            if not isinstance(line, dict) or (number == 1 and line.get("schema") != _SCHEMA):
                raise SchemaError(
                    f"{path}, line {number}, isn't of a results file of kpolicy sweep. Give another path, or remove it."
                )
            if number == 1 and line != header:
                raise ConfigError(
                    f"{path} was begun with another trace, server, costs or version. Give the options it was begun "
                    "with to go on, or another path."
                )
        return whole

    def add(self, line: dict[str, Any]) -> None:
        """Keep a finished case."""
        self.lines[Case(**line["case"]).key] = line
        self._write(line)

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line, allow_nan=False, separators=(",", ":")) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())

    def __enter__(self) -> SweepFile:
        return self

    def __exit__(self, *failure: object) -> None:
        if self._file is not None:
            self._file.close()


def sweep(
    axes: Axes,
    common: Common,
    *,
    path: Path | None = None,
    backend: Backend | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> list[dict[str, Any]]:
    """Run every case that the results file doesn't have yet; the lines of all, in the order of the cases.

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
        left = [case for case in cases if case.key not in file.lines]
        done = len(cases) - len(left)
        if progress is not None:
            progress(done, len(cases))
        for line in (backend or LocalBackend()).run(left, common) if left else ():
            file.add(line)
            done += 1
            if progress is not None:
                progress(done, len(cases))
        return [file.lines[case.key] for case in cases]
