"""The report's pictures as PNG and SVG. matplotlib (the extra ``plots``) loads on first use."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kpolicy.errors import ConfigError
from kpolicy.observe.extras import load
from kpolicy.report.curves import LATENCIES, range_of, ticks
from kpolicy.report.gather import Report, TraceReport
from kpolicy.report.modemap import MUCH_WORSE, ModeMap
from kpolicy.report.padding import by_range
from kpolicy.report.runs import Run
from kpolicy.report.sections import LETTERS
from kpolicy.report.steps import MODES
from kpolicy.report.timeline import shares
from kpolicy.simulate.pareto import plain_text
from kpolicy.simulate.percentiles import CURVE_PERCENTS
from kpolicy.writing import write_whole

__all__ = ["check", "draw", "files", "write"]

FORMATS = ("png", "svg")
PICTURES = ("latency", "modes", "map", "padding", "timeline")
"""What a trace has pictures of; no map where the report was interrupted before it"""
_MODE_COLOURS = ("#56b4e9", "#e69f00", "#4cc39a", "#cc79a7")
_HATCHES = ("", "//", "..", "||")
_COLOURS = ("#0072b2", "#d55e00", "#007a5a", "#a84b82", "#000000", "#7a5c00", "#56b4e9", "#6b6b6b")
_LINES = ("-", "--", ":", "-.")
_MARKS = ("o", "s", "^", "D", "v", "X", "P", "*")
_MOST_COLUMNS = 400


def check() -> None:
    """Load matplotlib.

    Raises:
        ConfigError: it isn't installed; the error says what to install.
    """
    load("matplotlib", extra="plots", package="matplotlib", what="--plots")


def files(folder: Path, num_traces: int) -> list[Path]:
    """Every file that `write` may make in a folder for so many traces."""
    return [folder / _name(name, i, kind) for i in range(num_traces) for name in PICTURES for kind in FORMATS]


def _name(picture: str, trace: int, kind: str) -> str:
    return f"{picture}{f'-{trace + 1}' if trace else ''}.{kind}"


def write(report: Report, folder: Path) -> list[Path]:
    """Draw all pictures, then write them to a folder, which is made where its parent is there.

    Raises:
        ConfigError: matplotlib isn't installed, or a file can't be written.
    """
    drawn = draw(report)
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(f"can't make the folder {folder}: {error.strerror or error}. Give another one.") from None
    paths = [folder / name for name in drawn]
    for path, content in zip(paths, drawn.values(), strict=True):
        write_whole(path, content)
    return paths


def draw(report: Report) -> dict[str, bytes]:
    """Every picture by its file's name, such as ``latency.png``; with several traces, ``latency-2.png``.

    Raises:
        ConfigError: matplotlib isn't installed.
    """
    matplotlib = load("matplotlib", extra="plots", package="matplotlib", what="--plots")
    figure_of = load("matplotlib.figure", extra="plots", package="matplotlib", what="--plots").Figure
    found = {}
    # The salt makes the ids of an SVG the same each time.
    with matplotlib.rc_context({"svg.hashsalt": "kpolicy", "svg.fonttype": "none", "hatch.linewidth": 0.6}):
        for made in report.traces:
            for name, figure in _figures(made, figure_of):
                plain_text(figure)
                for kind in FORMATS:
                    into = io.BytesIO()
                    metadata = {"Date": None} if kind == "svg" else {"Software": "kpolicy"}
                    figure.savefig(into, format=kind, dpi=150, metadata=metadata)
                    found[_name(name, made.number, kind)] = into.getvalue()
    return found


def _figures(made: TraceReport, figure_of: Any) -> Iterator[tuple[str, Any]]:
    runs = made.runs
    figure = figure_of(figsize=(12, 4), layout="constrained")
    for i, (name, title) in enumerate(LATENCIES):
        _latency(figure.add_subplot(1, 3, i + 1), runs, name, title)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 4), frameon=False)
    yield "latency", figure
    figure = figure_of(figsize=(9, 0.6 * len(runs) + 1.6), layout="constrained")
    _modes(figure, runs)
    yield "modes", figure
    if made.maps:
        figure = figure_of(figsize=(7 * min(len(made.maps), 2), 6 * -(-len(made.maps) // 2)), layout="constrained")
        for i, each in enumerate(made.maps):
            _map(figure.add_subplot(-(-len(made.maps) // 2), min(len(made.maps), 2), i + 1), each)
        _mode_legend(figure, f"+ takes {MUCH_WORSE:.0%} or more over the cheapest way")
        yield "map", figure
    pairs: list[tuple[Run, Run | None]] = [(plan.base, plan.run) for plan in made.plans if plan.run is not None]
    pairs = pairs or [(run, None) for run in runs]
    figure = figure_of(figsize=(9, 3.4 * len(pairs)), layout="constrained")
    for i, (base, planned) in enumerate(pairs):
        _padding(figure.add_subplot(len(pairs), 1, i + 1), base, planned)
    yield "padding", figure
    figure = figure_of(figsize=(12, 1.5 * len(runs) + 1), layout="constrained")
    _timeline(figure, runs)
    yield "timeline", figure


def _latency(axes: Any, runs: Sequence[Run], name: str, title: str) -> None:
    marked = [CURVE_PERCENTS.index(percent) for percent in (50, 90, 99)]
    for i, run in enumerate(runs):
        values = [us / 1e3 for us in getattr(run.result, name).curve]
        if values:
            axes.plot(
                values, CURVE_PERCENTS, color=_COLOURS[i % 8], linestyle=_LINES[i % 4], marker=_MARKS[i % 8],
                markevery=marked, label=run.name,
            )  # fmt: skip
    axes.set(title=title, xlabel="ms", ylabel="% of values", ylim=(0, 101))
    found = range_of([getattr(run.result, name) for run in runs])
    if found is not None:
        axes.set_xscale("log")
        low, high = found
        at = [us / 1e3 for us in ticks(low, high)]
        axes.set_xticks(at, [f"{value:,.4g}" for value in at])
        axes.set_xticks([], minor=True)
        axes.set_xlim(low / 1e3, high / 1e3)
    axes.grid(visible=True, color="#dddddd", linewidth=0.6)


def _modes(figure: Any, runs: Sequence[Run]) -> None:
    axes = figure.add_subplot()
    for i, run in enumerate(runs):
        left, total = 0.0, run.result.step_us or 1.0
        for mode, colour, hatch in zip(MODES, _MODE_COLOURS, _HATCHES, strict=True):
            us = sum(each.us for label, each in run.result.modes.items() if label.partition("/")[0] == mode.value)
            axes.barh(i, 100 * us / total, left=left, color=colour, hatch=hatch, edgecolor="#333333", linewidth=0.3)
            # Less is narrower than its label.
            if us / total > 0.05:
                axes.text(left + 50 * us / total, i, f"{LETTERS[mode]} {us / total:.0%}", ha="center", va="center")
            left += 100 * us / total
    axes.set_yticks(range(len(runs)), [run.name for run in runs])
    axes.invert_yaxis()
    axes.set(xlabel="% of the steps' time", xlim=(0, 100))
    _mode_legend(figure)


def _mode_legend(figure: Any, mark: str | None = None) -> None:
    """The modes, below a mark in words: beside them it is wider than one map."""
    from matplotlib.patches import Patch

    handles = [
        Patch(facecolor=colour, hatch=hatch, edgecolor="#333333", label=f"{LETTERS[mode]} {mode.value.upper()}")
        for mode, colour, hatch in zip(MODES, _MODE_COLOURS, _HATCHES, strict=True)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, title=mark)


def _map(axes: Any, made: ModeMap) -> None:
    for (decodes, tokens), cell in made.cells.items():
        x, y, mode = made.tokens.index(tokens), made.rows.index(decodes), MODES.index(cell.mode)
        axes.bar(
            x, 1, width=1, bottom=y - 0.5, color=_MODE_COLOURS[mode], hatch=_HATCHES[mode], edgecolor="white",
            linewidth=0.4,
        )  # fmt: skip
        axes.text(x, y, LETTERS[cell.mode] + ("+" if cell.marked else ""), ha="center", va="center", fontsize=7)
    axes.set_xticks(range(len(made.tokens)), [str(size) for size in made.tokens], rotation=90, fontsize=8)
    axes.set_yticks(range(len(made.rows)), [str(size) for size in made.rows], fontsize=8)
    axes.set(
        title=made.policy, xlabel="prompt tokens", ylabel="decode rows", xlim=(-0.5, len(made.tokens) - 0.5),
        ylim=(-0.5, len(made.rows) - 0.5),
    )  # fmt: skip


def _padding(axes: Any, base: Run, planned: Run | None) -> None:
    both = [(run, by_range(run.steps)) for run in (base, planned) if run is not None]
    ranges = sorted({key for _, found in both for key in found})
    width = 0.8 / len(both)
    for i, (run, found) in enumerate(both):
        heights = [found[key].padding if key in found else 0 for key in ranges]
        at = [place + (i - (len(both) - 1) / 2) * width for place in range(len(ranges))]
        axes.bar(at, heights, width, label=run.name, color=_COLOURS[i], hatch=("", "//")[i], edgecolor="white")
    axes.set_yscale("symlog", linthresh=10)
    axes.yaxis.set_major_formatter(lambda value, _place: f"{value:,.0f}")
    labels = [str(low) if low == high else f"{low}-{high}" for low, high in ranges]
    axes.set_xticks(range(len(ranges)), labels, rotation=30, fontsize=8)
    axes.set(xlabel="tokens of a launch", ylabel="padding tokens")
    axes.legend(frameon=False)


def _timeline(figure: Any, runs: Sequence[Run]) -> None:
    end_us = max((run.steps.end_us for run in runs), default=0.0)
    across = [(i + 0.5) * end_us / 1e6 / _MOST_COLUMNS for i in range(_MOST_COLUMNS)]
    first = None
    for i, run in enumerate(runs):
        axes = first = figure.add_subplot(len(runs), 1, i + 1, sharex=first)
        stacked = [[100 * share for share in each] for each in shares(run.steps, _MOST_COLUMNS, end_us)]
        areas = axes.stackplot(across, stacked, colors=_MODE_COLOURS, step="mid")
        for area, hatch in zip(areas, _HATCHES, strict=True):
            area.set_hatch(hatch)
        axes.set(title=run.name, ylabel="% of time", ylim=(0, 100), xlim=(0, max(end_us / 1e6, 1e-6)))
    if first is not None:
        first.set_xlabel("s")
    _mode_legend(figure)
