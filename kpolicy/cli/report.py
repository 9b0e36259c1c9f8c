"""`kpolicy report`: a trace's simulations and plan as one HTML page that needs no network."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import attrs
from cyclopts import Parameter

from kpolicy import __version__
from kpolicy.cli.options import Deployment, Json, at_least, ladder_of, specs_of
from kpolicy.cli.plan import DEFAULT_WINDOW_S, budget_of
from kpolicy.cli.render import console, print_json, say, told_after
from kpolicy.cli.requests import read_each, unserved
from kpolicy.cli.serving_options import Seed, Served
from kpolicy.cli.sim_files import SimFiles, SimTurn
from kpolicy.cli.simulate import setting_lines
from kpolicy.cli.step_log import files_of
from kpolicy.cli.turns import check_files, progress_bar, unwritten
from kpolicy.costs import CostTable
from kpolicy.errors import ConfigError
from kpolicy.report import Report, TraceReport, gather, page
from kpolicy.scheduling.traces import FailedTrace
from kpolicy.simulate import Server
from kpolicy.simulate.run import OnStep
from kpolicy.writing import write_text

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["report_command"]


def report_command(
    *traces: Annotated[Path, Parameter(help="Traces, as simulate takes them.")],
    out: Annotated[Path, Parameter(help="The page to write, such as report.html.")],
    policy: Annotated[
        list[str] | None,
        Parameter(negative="", help="A policy; repeat the option to compare several. By default auto and vllm."),
    ] = None,
    window: Annotated[
        float, Parameter(help="Seconds of the trace to report; 0 is the whole trace.")
    ] = DEFAULT_WINDOW_S,
    start: Annotated[float, Parameter(help="Second of the trace to start at.")] = 0.0,
    rate: Annotated[float, Parameter(help="Speed the arrivals up by this factor, after --window.")] = 1.0,
    budget: Annotated[
        str | None, Parameter(help="What planned sizes may take, as plan's --budget: 40, 30s, 2GiB or several.")
    ] = None,
    served: Served = Served(),  # noqa: B008
    deployment: Deployment = Deployment(),  # noqa: B008
    cold: Annotated[
        bool,
        Parameter(
            negative="",
            show_default=False,
            help="The first request waits for captures. By default graphs are there when it comes.",
        ),
    ] = False,
    plots: Annotated[
        Path | None, Parameter(help="A folder for the pictures as PNG and SVG files (needs matplotlib).")
    ] = None,
    perfetto: Annotated[
        Path | None,
        Parameter(
            help="Write a Perfetto trace of the simulation here; with several policies or traces a file each, "
            "NAME-TRACE-POLICY."
        ),
    ] = None,
    seed: Seed = 0,
    json: Json = False,
) -> int:
    """Simulate policies on a trace, plan capture sizes for the best, and write what to do first as an HTML page."""
    specs = specs_of(policy)
    at_least("--seed", seed, 0)
    if cold and served.warm:
        raise ConfigError("--cold and --warm say the opposite; give one of them.")
    limits, most_sizes = budget_of(budget, deployment)
    model = served.costs(deployment)
    server = attrs.evolve(served.server(deployment, model), warm=not cold)
    loaded = read_each(traces, start=start, window=window, rate=rate)
    names = [path.stem for path in traces] if len(traces) > 1 else None
    reads = deployment.reads(traces)
    turns = SimFiles(perfetto=perfetto).turns(specs, names, reads)
    page_path = files_of("--out", out, ["report"], "report.html")[0]
    pictures = _pictures(plots, len(loaded))
    written_here = [("--out", page_path), *(("--perfetto", turn.perfetto) for turn in turns)]
    check_files([*written_here, *(("--plots", picture) for picture in pictures)], reads)
    followed: list[Path] = []
    with progress_bar("requests", quiet=json) as shown:
        made = gather(
            loaded, specs, server=server, costs=model.costs, attention=deployment.support(),
            ladder=ladder_of(deployment.ladder, server.settings, config=deployment.config),
            objective=deployment.objective,
            budget=deployment.budget(), plan_budget=limits, most_sizes=most_sizes, seed=seed,
            setting=setting_lines(model, server, deployment), notes=model.notes,
            observed=_observed(turns, specs, model.costs, server, followed), progress=_told(shown),
        )  # fmt: skip
    files: list[Path] = []
    lost = unwritten(lambda: _write(made, out, plots, files))
    written = [*files, *followed]
    wrong = [each.error for _, each in made.failed]
    wrong += [line for each in made.traces for line in each.missing if line != each.interrupted]
    for each in made.traces:
        for run in each.runs:
            named, result = f"{run.name} on {each.trace.source}", run.result
            wrong += unserved(named, result.refused, served=result.served, kv_tokens=result.kv_tokens)
    wrong += lost
    kept = "above" if lost else f"in {out}"
    with told_after([*wrong, f"{made.interrupted}; what was done is {kept}."] if made.interrupted else wrong):
        if json:
            print_json(_as_dict(made, written, specs))
        else:
            for each in made.traces:
                _say(each)
            if written:
                say(console(), f"written to {', '.join(map(str, written))}")
    return 130 if made.interrupted else 1 if wrong else 0


def _pictures(folder: Path | None, num_traces: int) -> list[Path]:
    """The pictures' files, or the folder where it is yet to be made; before anything runs, see that they can be."""
    if folder is None:
        return []
    from kpolicy.report.plots import check, files

    check()
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--plots {folder} is a file; name a folder.")
    there = folder if folder.exists() else folder.parent
    if not there.is_dir():
        raise ConfigError(f"--plots {folder}: there is no folder {there}; make it, or give another one.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"--plots {folder} can't be written: Permission denied. Give another folder.")
    return files(folder, num_traces) if folder.exists() else [folder]


def _observed(
    turns: Sequence[SimTurn], specs: Sequence[str], costs: CostTable, server: Server, followed: list[Path]
) -> Callable[[int, int], AbstractContextManager[OnStep | None]]:
    """What follows the run of a policy on a trace; its Perfetto trace, once whole, is added to `followed`."""

    @contextmanager
    def follow(i: int, j: int) -> Iterator[OnStep | None]:
        turn = turns[i * len(specs) + j]
        with turn.opened(specs[j], costs, server) as told:
            yield told
        if turn.perfetto is not None:
            followed.append(turn.perfetto)

    return follow


def _told(shown: Progress) -> Callable[[str, int], Callable[[int], object]]:
    def begin(what: str, total: int) -> Callable[[int], object]:
        task = shown.add_task(what, total=total or None)
        return lambda done: shown.update(task, completed=done)

    return begin


def _write(made: Report, out: Path, plots: Path | None, written: list[Path]) -> None:
    """Everything is made before anything is written; which files are there is added to `written`."""
    html = page(made)
    if plots is not None:
        from kpolicy.report.plots import write

        written += write(made, plots)
    write_text(out, html)
    written.insert(0, out)


def _say(made: TraceReport) -> None:
    shown = console()
    say(shown, made.trace.source)
    say(shown, made.advice.sentence)
    for each in made.advice.paste:
        if len(each.text) < 2000:
            say(shown, f"\n{each.title}: {each.how}\n\n{each.text.rstrip()}")
        for warning in each.warnings:
            say(shown, f"\nwarning: {warning}")
    if made.advice.paste:
        say(shown, "")
    for line in made.advice.details:
        say(shown, f"note: {line}")
    sys.stdout.flush()


def _as_dict(made: Report, written: Sequence[Path], specs: Sequence[str]) -> dict[str, Any]:
    traces = [*((each.number, _of_trace(each)) for each in made.traces)]
    traces += [(number, _of_failed(each, specs)) for number, each in made.failed]
    return {
        "kpolicy": __version__,
        "written": [str(path) for path in written],
        "traces": [each for _, each in sorted(traces, key=lambda trace: trace[0])],
    }


def _of_failed(trace: FailedTrace, specs: Sequence[str]) -> dict[str, Any]:
    """A trace of which nothing is reported: every policy failed on it."""
    why = [{"what": spec, "error": trace.error} for spec in specs]
    return {"source": trace.source, "interrupted": "", "failed": why, "advice": None, "runs": []}


def _of_trace(made: TraceReport) -> dict[str, Any]:
    return {
        "source": made.trace.source,
        "interrupted": made.interrupted,
        "failed": [{"what": what, "error": error} for what, error in made.failed],
        "advice": {
            "policy": None if made.advice.best is None else made.advice.best.policy,
            "planned": made.advice.best is not None and made.advice.best.kind == "planned",
            "sentence": made.advice.sentence,
            "details": list(made.advice.details),
            "paste": [attrs.asdict(paste) for paste in made.advice.paste],
        },
        "runs": [{"name": run.name, "sizes": run.kind} | run.result.as_dict() for run in made.runs],
    }
