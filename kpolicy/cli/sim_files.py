"""What `kpolicy simulate` writes besides its table: the result, and a file of every step."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import attrs
from cyclopts import Parameter

from kpolicy import __version__
from kpolicy.cli.options import COMMAND
from kpolicy.cli.step_log import files_of
from kpolicy.cli.turns import check_files
from kpolicy.costs import CostTable
from kpolicy.errors import KPolicyError
from kpolicy.observe.extras import load
from kpolicy.schemas import (
    DecisionEntry,
    DecisionLogWriter,
    LogHeader,
    StepLogWriter,
)
from kpolicy.simulate import Server, SimStep
from kpolicy.simulate.run import OnStep
from kpolicy.writing import write_whole

__all__ = ["SimFiles", "SimTurn"]


@attrs.frozen
class SimTurn:
    """The files of one policy on one trace."""

    step_log: Path | None = None
    decision_log: Path | None = None
    perfetto: Path | None = None

    @contextmanager
    def opened(self, spec: str, costs: CostTable, server: Server) -> Iterator[OnStep | None]:
        """What to call each step; None where nothing is written. Files are whole when it is left.

        Where the simulation can't be run there are none.
        """
        if self == SimTurn():
            yield None
            return
        try:
            with self._opened(spec, costs, server) as write:
                yield write
        except KPolicyError:
            for path in filter(None, attrs.astuple(self)):
                if path.is_file() and not path.is_symlink():
                    path.unlink()
            raise

    @contextmanager
    def _opened(self, spec: str, costs: CostTable, server: Server) -> Iterator[OnStep]:
        header = LogHeader(
            policy=spec, device="simulated", versions={"kpolicy": __version__}, costs_version=costs.version,
            settings=server.settings, command=shlex.join(["kpolicy", *COMMAND.get()]),
        )  # fmt: skip
        with ExitStack() as opened:
            steps = opened.enter_context(StepLogWriter(self.step_log, header)) if self.step_log else None
            decisions = (
                opened.enter_context(DecisionLogWriter(self.decision_log, header)) if self.decision_log else None
            )
            trace: Any = None
            if self.perfetto:
                from kpolicy.observe.perfetto import PerfettoWriter, StepTiming

                trace = opened.enter_context(PerfettoWriter(self.perfetto, header))

            def write(step: SimStep) -> None:
                if decisions is not None:
                    decisions.write(DecisionEntry.of(step.step.shape(), step.decision))
                if steps is None and trace is None:
                    return
                entry = step.entry()
                if steps is not None:
                    steps.write(entry)
                if trace is not None and not step.rank:
                    trace.write(entry, StepTiming(start_us=step.start_us))

            yield write


@Parameter(name="*")
@attrs.frozen(kw_only=True)
class SimFiles:
    """Options that say what a simulation writes."""

    out: Annotated[Path | None, Parameter(help="Write the result here too, as JSON.")] = None
    step_log: Annotated[
        Path | None,
        Parameter(help="Write every step here; with several policies or traces a file each, NAME-TRACE-POLICY."),
    ] = None
    decision_log: Annotated[Path | None, Parameter(help="Write every decision here, likewise.")] = None
    perfetto: Annotated[
        Path | None, Parameter(help="Write a Perfetto trace here, likewise; of several ranks the first one's.")
    ] = None

    def turns(self, specs: Sequence[str], traces: Sequence[str] | None, reads: Iterable[Path] = ()) -> list[SimTurn]:
        """The files of each policy on each trace, trace by trace, of which none may be one that is read.

        Raises:
            ConfigError: a file can't be written, or what it needs isn't installed; before anything has run.
        """
        names = list(specs) if traces is None else [f"{trace}-{spec}" for trace in traces for spec in specs]
        written = [("--out", files_of("--out", self.out, ["result"], "result.json")[0])]
        each: list[list[Path | None]] = []
        for option, path, example in (
            ("--step-log", self.step_log, "steps.jsonl"), ("--decision-log", self.decision_log, "decisions.jsonl"),
            ("--perfetto", self.perfetto, "run.pftrace"),
        ):  # fmt: skip
            paths = files_of(option, path, names, example)
            written += [(option, one) for one in paths]
            each.append(paths)
        check_files(written, reads)
        if self.perfetto is not None:
            load("perfetto.protos.perfetto.trace.perfetto_trace_pb2", extra="perfetto", package="perfetto",
                 what="--perfetto")  # fmt: skip
        return [SimTurn(*paths) for paths in zip(*each, strict=True)]

    def write(self, report: Mapping[str, Any]) -> None:
        """Write ``--out``, whole or not at all."""
        if self.out is not None:
            write_whole(self.out, json.dumps(report, indent=1, allow_nan=False) + "\n")
