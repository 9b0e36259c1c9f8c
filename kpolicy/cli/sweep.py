"""`kpolicy sweep`: every combination of policies, ladders, rates, traces and costs, on all cores or on Ray."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import attrs
from cyclopts import Parameter

from kpolicy.cli.options import Deployment, Json, at_least, check_rate, ladder_of, specs_of, whole
from kpolicy.cli.render import console, counted, grid, print_json, say, show, told_after
from kpolicy.cli.render_simulation import COLD
from kpolicy.cli.requests import errors_of, read_each, unserved
from kpolicy.cli.serving_options import Seed, Served
from kpolicy.cli.step_log import files_of
from kpolicy.cli.turns import check_files, progress_bar, unwritten
from kpolicy.errors import ConfigError, UnknownNameError
from kpolicy.figures import find_device
from kpolicy.kv_span import NOT_RECORDED
from kpolicy.observe.extras import load
from kpolicy.scheduling.traces import FailedTrace, Trace
from kpolicy.simulate.pareto import FEWER, METRICS, Point, check_panels, draw, points_of, short_ladder
from kpolicy.simulate.sweep import Axes, Backend, Common, LocalBackend, sweep
from kpolicy.words import some

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["sweep_command"]

_AXES, _WHERE = "What is combined", "Where it runs"


@Parameter(name="*")
@attrs.frozen(kw_only=True)
class Combined:
    """Options that give an axis of the sweep several values."""

    policy: Annotated[
        list[str] | None,
        Parameter(group=_AXES, negative="", help="A policy; repeat the option. By default auto and vllm."),
    ] = None
    rate: Annotated[
        list[float] | None,
        Parameter(group=_AXES, negative="", help="Speed the arrivals up by this factor; repeat the option."),
    ] = None
    ladders: Annotated[
        list[str] | None,
        Parameter(
            group=_AXES,
            negative="",
            help="Capture sizes in tokens, such as 1,2,4,8, or own for the policy's; repeat the option.",
        ),
    ] = None
    profiles: Annotated[
        list[Path] | None,
        Parameter(group=_AXES, negative="", help="A measured profile; repeat the option."),
    ] = None
    devices: Annotated[
        list[str] | None,
        Parameter(group=_AXES, negative="", help="A device of analytic costs; repeat the option."),
    ] = None


@Parameter(name="*")
@attrs.frozen(kw_only=True)
class Where:
    """Options that say where cases run."""

    backend: Annotated[str, Parameter(group=_WHERE, help="local for processes here, ray for a Ray cluster.")] = "local"
    jobs: Annotated[
        int, Parameter(group=_WHERE, converter=whole, help="Processes of the local backend; 0 is one a core.")
    ] = 0
    ray_address: Annotated[
        str, Parameter(group=_WHERE, help="The Ray cluster; auto is this machine's, local starts one here.")
    ] = "auto"

    def made(self) -> Backend:
        """The backend that was asked for.

        Raises:
            ConfigError: it isn't known, or what it needs isn't installed.
        """
        if self.backend == "local":
            return LocalBackend(at_least("--jobs", self.jobs, 0))
        if self.backend != "ray":
            raise UnknownNameError("backend", self.backend, ("local", "ray"))
        load("ray", extra="ray", package="ray", what="--backend ray")
        from kpolicy.simulate.ray_backend import RayBackend

        return RayBackend(self.ray_address)


def sweep_command(
    *traces: Annotated[Path, Parameter(help="Traces, as simulate takes them.")],
    combined: Combined = Combined(),
    window: Annotated[float, Parameter(help="Seconds of each trace to serve; 0 is the whole trace.")] = 0.0,
    start: Annotated[float, Parameter(help="Second of each trace to start at.")] = 0.0,
    served: Served = Served(),  # noqa: B008
    deployment: Deployment = Deployment(),  # noqa: B008
    where: Where = Where(),
    out: Annotated[
        Path | None,
        Parameter(help="Results file: a line a case, written as each ends. A sweep that was killed goes on from it."),
    ] = None,
    plot: Annotated[
        Path | None, Parameter(help="Draw latency against graph memory, with the Pareto front: a .png or .svg file.")
    ] = None,
    metric: Annotated[str, Parameter(help=f"The latency that is drawn and ranked: {', '.join(METRICS)}.")] = "gap-p50",
    seed: Seed = 0,
    json: Json = False,
) -> int:
    """Simulate every combination of policies, ladders, rates, traces and costs, and mark the Pareto front."""
    if metric not in METRICS:
        raise UnknownNameError("metric", metric, METRICS)
    _check_plot(plot)
    check_files(
        (
            ("--out", files_of("--out", out, ["sweep"], "sweep.jsonl")[0]),
            ("--plot", files_of("--plot", plot, ["sweep"], "sweep.svg")[0]),
        ),
        deployment.reads(traces, *(combined.profiles or ()), *(combined.ladders or ())),
    )
    axes = Axes(policies=specs_of(combined.policy), rates=_rates(combined.rate))
    common = _common(traces, combined, served, deployment, start=start, window=window, seed=at_least("--seed", seed, 0))
    if plot is not None:
        check_panels(len(common.traces) * len(axes.rates) * len(common.costs))
    backend = where.made()
    interrupted = False
    lines: list[dict[str, Any]] = []
    with progress_bar("cases", quiet=json) as shown:
        task = shown.add_task("sweep", total=None)
        try:
            lines = sweep(
                axes, common, path=out, backend=backend,
                progress=lambda done, total: shown.update(task, completed=done, total=total),
            )  # fmt: skip
        except KeyboardInterrupt:
            interrupted = True
    if interrupted:
        kept = (
            f"what was done is in {out}; the same command goes on from there." if out else "nothing was kept: no --out."
        )
        sys.stderr.write(f"kpolicy: interrupted; {kept}\n")
        return 130
    points = points_of(lines, metric)
    failed = [line for line in lines if "error" in line and not _told(line, common.traces)]
    wrong = errors_of(common.traces.values()) + [f"{_named(line['case'])}: {line['error']}" for line in failed]
    for line in lines:
        if (result := line.get("result")) is not None:
            named = _named(line["case"])
            wrong += unserved(named, result["refused"], served=result["served"], kv_tokens=result["kv_tokens"])
    wrong += [] if plot is None else unwritten(partial(draw, points, metric, plot))
    with told_after(wrong):
        if json:
            front = [point.case for point in points if point.on_front]
            print_json({"cases": lines, "pareto": front, "dropped": _dropped(common.traces)})
        else:
            _render(lines, points, metric, _dropped(common.traces))
    return 1 if wrong else 0


def _told(line: Mapping[str, Any], traces: Mapping[str, Trace | FailedTrace]) -> bool:
    """Whether a case failed for its trace, of which that is said once."""
    trace = traces[line["case"]["trace"]]
    return isinstance(trace, FailedTrace) and trace.error == line["error"]


def _dropped(traces: Mapping[str, Trace | FailedTrace]) -> dict[str, dict[str, int]]:
    """By trace, the rows that were left out on reading, by reason; traces that lost none aren't there."""
    return {
        name: dict(trace.dropped)
        for name, trace in traces.items()
        if not isinstance(trace, FailedTrace) and trace.dropped
    }


def _render(
    lines: Sequence[dict[str, Any]], points: Sequence[Point], metric: str, dropped: Mapping[str, Mapping[str, int]]
) -> None:
    """The table of all cases, and what to know of them."""
    out = console()
    show(_table(lines, {id(point.line) for point in points if point.on_front}), out)
    for line in _notes(lines, points, metric):
        say(out, line)
    for name, counts in dropped.items():
        say(out, f"rows of {name} that were dropped: {counted(counts)}")


def _notes(lines: Sequence[dict[str, Any]], points: Sequence[Point], metric: str) -> Iterator[str]:
    results = [line["result"] for line in lines if "result" in line]
    yield f"* nothing else of its trace, rate and costs has less graph memory and a lower {METRICS[metric][0]}"
    back = [result["refused"] for result in results if result["refused"]]
    if back:
        most = max(back, key=lambda counts: sum(counts.values()))
        yield f"{_have(back)} requests handed back, up to {counted(most)}"
    waited = max((result["started_after_s"] for result in results), default=0.0)
    if waited:
        yield f"the first request waited up to {waited:,.1f} s for captures, and others behind it {COLD}"
    fewer = sum(point.fewer for point in points)
    if fewer:
        yield (
            f"{some(fewer, 'case')} served fewer requests than another of the same trace, rate and "
            f"costs by more than {FEWER:.1%}, and can't be marked"
        )
    outside = [share for result in results if (share := result.get("outside_share"))]
    if outside:
        yield f"{_have(outside)} steps of a size or a context outside the cost table, up to {max(outside):.1%}"
    # A file may be of a version that didn't tell.
    delayed = [share for result in results if (share := result.get("delayed_share"))]
    if delayed:
        yield (
            f"{_have(delayed)} requests that came later than the trace says, when a client of --concurrency was free, "
            f"up to {max(delayed):.1%}: --rate changes nothing for these"
        )
    blind = sum(result["measured"] and result.get("kv_span") is None for result in results)
    if blind:
        yield f"{NOT_RECORDED} by the profile of {some(blind, 'case')}"


def _have(cases: Sequence[object]) -> str:
    return some(len(cases), "case has", "cases have")


def _rates(rates: Sequence[float] | None) -> tuple[float, ...]:
    found = tuple(rates or (1.0,))
    for i, rate in enumerate(found):
        check_rate(rate)
        if rate in found[:i]:
            raise ConfigError(f"--rate {rate:g} is given twice; give each once.")
    return found


def _once(option: str, named: Sequence[object], values: Sequence[object]) -> None:
    """See that an axis has each value once, whatever it is called."""
    for i, value in enumerate(values):
        first = named[values.index(value)]
        if value in values[:i]:
            again = "given twice" if first == named[i] else f"the same as {first}"
            raise ConfigError(f"{option} {named[i]} is {again}; give each once.")


def _check_plot(plot: Path | None) -> None:
    if plot is None:
        return
    if plot.suffix.lower() not in (".png", ".svg"):
        raise ConfigError(f"--plot {plot} ends in {plot.suffix or 'nothing'}; it draws a .png or a .svg file.")
    load("matplotlib", extra="plots", package="matplotlib", what="--plot")


def _common(
    paths: Sequence[Path], combined: Combined, served: Served, deployment: Deployment, *, start: float, window: float,
    seed: int,
) -> Common:  # fmt: skip
    """What the names of the cases stand for."""
    if combined.ladders and deployment.ladder is not None:
        raise ConfigError("--ladder and --ladders both give capture sizes; give --ladders for several.")
    if combined.profiles and (deployment.profile is not None or combined.devices or served.device):
        raise ConfigError("--profiles were measured on devices; leave out --profile, --device and --devices.")
    profiles, devices = combined.profiles or (), combined.devices or ()
    _once("--profiles", profiles, [os.path.realpath(profile) for profile in profiles])
    _once("--devices", devices, [find_device(device).figures.name for device in devices])
    names = [path.name for path in paths]
    loaded = read_each(paths, start=start, window=window)
    for i, name in enumerate(names):
        if name in names[:i]:
            raise ConfigError(f"two traces are called {name}; rename one, so that results can tell them apart.")
    traces = dict(zip(names or [Path(loaded[0].source).stem], loaded, strict=True))
    costs = {}
    for profile in combined.profiles or (None,):
        for device in combined.devices or (served.device,):
            each = attrs.evolve(served, device=device)
            model = each.costs(deployment, profile)
            for doubt in model.doubts:
                sys.stderr.write(f"kpolicy: {doubt}\n")
            costs[str(profile or device or "default")] = (model.costs, each.server(deployment, model))
    settings = next(iter(costs.values()))[1].settings
    option, given = ("--ladders", combined.ladders) if combined.ladders else ("--ladder", [deployment.ladder or "own"])
    ladders = [None if text == "own" else ladder_of(text, settings, option, config=deployment.config) for text in given]
    _once(option, given, ladders)
    return Common(
        traces=traces, costs=costs, ladders=dict(zip(given, ladders, strict=True)), attention=deployment.support(),
        objective=deployment.objective, budget=deployment.budget(), seed=seed,
    )  # fmt: skip


def _named(case: dict[str, Any]) -> str:
    return f"{case['policy']} on {case['trace']} x{case['rate']:g}, costs {case['costs']}, ladder {case['ladder']}"


def _table(lines: Sequence[dict[str, Any]], front: set[int]) -> Table:
    varied = [
        name for name in ("trace", "rate", "costs", "ladder") if len({str(line["case"][name]) for line in lines}) > 1
    ]
    numbers = ("TTFT ms\np50 / p99", "gap ms\np50 / p99", "whole s\np50", "good /s", "graphs", "MiB", "capture s")
    table = grid("policy", *varied, *numbers, numbers=numbers, words=("policy", *varied))
    for line in lines:
        case, result = line["case"], line.get("result")
        names = [f"{case['policy']}{' *' if id(line) in front else ''}", *(_short(name, case[name]) for name in varied)]
        if result is None:
            table.add_row(*names, "failed", *[""] * (len(numbers) - 1))
            continue
        ttft, gap = result["ttft"], result["gap"]
        asked = result["goodput"]["ttft_ms"] is not None or result["goodput"]["gap_ms"] is not None
        table.add_row(
            *names, f"{ttft['p50'] / 1e3:,.1f} / {ttft['p99'] / 1e3:,.1f}" if ttft["count"] else "-",
            f"{gap['p50'] / 1e3:,.2f} / {gap['p99'] / 1e3:,.2f}" if gap["count"] else "-",
            f"{result['e2e']['p50'] / 1e6:,.2f}" if result["e2e"]["count"] else "-",
            f"{result['goodput']['per_s']:,.2f}" if asked else "-", f"{result['graphs']:,}",
            f"{result['graph_bytes'] / 2**20:,.0f}", f"{result['capture_s']:,.1f}",
        )  # fmt: skip
    return table


def _short(name: str, value: Any) -> str:
    """A name of an axis as the table has it."""
    if name == "ladder":
        return short_ladder(value)
    return f"{value:g}" if name == "rate" else Path(value).stem if name in ("trace", "costs") else str(value)
