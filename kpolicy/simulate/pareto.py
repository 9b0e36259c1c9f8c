"""Which cases of a sweep are worth their graph memory, and the picture of it."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs

from kpolicy.errors import ConfigError
from kpolicy.observe.extras import load
from kpolicy.writing import write_whole

__all__ = [
    "FEWER", "METRICS", "MOST_PANELS", "Point", "check_panels", "draw", "plain_text", "points_of", "short_ladder",
]  # fmt: skip

METRICS: Mapping[str, tuple[str, str, str]] = MappingProxyType(
    {
        "gap-p50": ("median gap between tokens", "gap", "p50"),
        "gap-p99": ("p99 of the gap between tokens", "gap", "p99"),
        "ttft-p50": ("median time to first token", "ttft", "p50"),
        "ttft-p99": ("p99 of the time to first token", "ttft", "p99"),
        "e2e-p50": ("median time to the last token", "e2e", "p50"),
        "e2e-p99": ("p99 of the time to the last token", "e2e", "p99"),
    }
)
"""Latencies that can be drawn: what they are, and where they stand in a result."""

FEWER = 0.005
"""A case that served fewer requests than another of its panel by more than this share is on no front: what it handed
back would have been slow."""

MOST_PANELS = 120
"""Panels of a picture: these take half a minute to draw, and many more no PNG can be as high as."""

_LEAST_SPAN = 0.05
"""The axis of latencies spans this share of the longest, so that what hardly differs isn't drawn far apart."""

# Okabe and Ito's colours, which people without colour vision tell apart, each with a mark of its own.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")


@attrs.frozen
class Point:
    """One finished case: what it costs in memory, and how quick it is.

    Args:
        line: its line of the results file.
        mib: memory of its graphs.
        ms: the latency.
        served: requests that it served.
        on_front: whether no other case of its trace, rate and costs has both less memory and a lower latency.
        fewer: whether another of them served more requests, so that it can't be on the front.
    """

    line: Mapping[str, Any]
    mib: float
    ms: float
    served: int
    on_front: bool = False
    fewer: bool = False

    @property
    def case(self) -> Any:
        return self.line["case"]

    @property
    def panel(self) -> tuple[str, float, str]:
        """What it can be compared with."""
        return self.case["trace"], self.case["rate"], self.case["costs"]


def points_of(lines: Sequence[Mapping[str, Any]], metric: str) -> list[Point]:
    """The finished cases that served a request as points, with those of each front marked."""
    _, spread, percentile = METRICS[metric]
    found = [
        Point(line, result["graph_bytes"] / 2**20, result[spread][percentile] / 1e3, result["served"])
        for line in lines
        if (result := line.get("result")) is not None and result[spread]["count"]
    ]
    panels: dict[tuple[str, float, str], list[int]] = {}
    for i, point in enumerate(found):
        panels.setdefault(point.panel, []).append(i)
    for panel in panels.values():
        most = max(found[i].served for i in panel)
        for i in panel:
            found[i] = attrs.evolve(found[i], fewer=found[i].served < most * (1 - FEWER))
        for i in _front([i for i in panel if not found[i].fewer], found):
            found[i] = attrs.evolve(found[i], on_front=True)
    return found


def _front(those: Sequence[int], points: Sequence[Point]) -> Iterator[int]:
    """Those points that no other of them beats: that is nowhere worse and somewhere better."""
    best: Point | None = None
    # By memory, then latency: each later one is on the front where it is quicker than all with less memory.
    for i in sorted(those, key=lambda i: (points[i].mib, points[i].ms)):
        point = points[i]
        if best is None or point.ms < best.ms or (point.mib, point.ms) == (best.mib, best.ms):
            best = point
            yield i


def check_panels(num_panels: int) -> None:
    """See that a picture can hold so many panels.

    Raises:
        ConfigError: they are more than `MOST_PANELS`.
    """
    if num_panels > MOST_PANELS:
        raise ConfigError(
            f"a picture with a panel for each trace, rate and costs would have {num_panels:,}, over {MOST_PANELS}. "
            "Draw fewer at once; fronts are marked in the table and in JSON however many there are."
        )


def draw(points: Sequence[Point], metric: str, path: Path) -> None:
    """Draw a panel for each trace, rate and costs: latency against graph memory, and its front.

    Raises:
        ConfigError: matplotlib isn't installed, there is nothing to draw or more than one picture holds, or the file
            can't be written.
    """
    if not points:
        raise ConfigError("no case of the sweep served a request, so there is nothing to draw.")
    check_panels(len({point.panel for point in points}))
    matplotlib = load("matplotlib", extra="plots", package="matplotlib", what="--plot")
    figure_of = load("matplotlib.figure", extra="plots", package="matplotlib", what="--plot").Figure
    panels = [list(each) for _, each in groupby(sorted(points, key=lambda point: point.panel), key=lambda p: p.panel)]
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    policies = list(dict.fromkeys(point.case["policy"] for point in points))
    # The salt makes the ids of an SVG the same each time.
    with matplotlib.rc_context({"svg.hashsalt": "kpolicy", "svg.fonttype": "none"}):
        figure = figure_of(figsize=(4.8 * columns, 3.6 * rows + 0.8), layout="constrained")
        for i, panel in enumerate(panels):
            _panel(figure.add_subplot(rows, columns, i + 1), panel, policies, metric)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 5), frameon=False)
        plain_text(figure)
        drawn = io.BytesIO()
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else {"Software": "kpolicy"}
        figure.savefig(drawn, format=path.suffix.lower()[1:], dpi=150, metadata=metadata)
    write_whole(path, drawn.getvalue())


def plain_text(figure: Any) -> None:
    """Have each text of a figure drawn as it is: a $ in a name is a character, not the start of a formula."""
    for text in figure.findobj(match=lambda artist: hasattr(artist, "set_parse_math")):
        text.set_parse_math(False)


def short_ladder(name: str) -> str:
    """A ladder's name in few characters."""
    sizes = name.split(",")
    return f"{sizes[0]}..{sizes[-1]} ({len(sizes)})" if len(sizes) > 3 else name


def _panel(axes: Any, points: Sequence[Point], policies: Sequence[str], metric: str) -> None:
    # Marks are hollow and of sizes of their own, so that equal points show both.
    trace, rate, costs = points[0].panel
    axes.set_title(f"{trace} x{rate:g}" + ("" if costs == "default" else f", {costs}"), fontsize=10)
    axes.set_xlabel("graph memory, MiB")
    axes.set_ylabel(f"{METRICS[metric][0]}, ms")
    front = sorted((point.mib, point.ms) for point in points if point.on_front)
    axes.plot(*zip(*front, strict=True), color="#767676", linewidth=1, drawstyle="steps-post", label="front", zorder=1)
    for i, policy in enumerate(policies):
        own = [point for point in points if point.case["policy"] == policy]
        axes.scatter(
            [point.mib for point in own], [point.ms for point in own], label=policy, zorder=2, s=42 + 34 * i,
            facecolors="none", edgecolors=_COLOURS[i % len(_COLOURS)], linewidths=1.6, marker=_MARKS[i % len(_MARKS)],
        )  # fmt: skip
    if len({point.case["ladder"] for point in points}) > 1:
        named: dict[tuple[float, float], dict[str, None]] = {}
        for point in points:
            if point.on_front:
                named.setdefault((point.mib, point.ms), {})[short_ladder(point.case["ladder"])] = None
        for at, ladders in named.items():
            axes.annotate(", ".join(ladders), at, xytext=(6, 6), textcoords="offset points", fontsize=7)
        axes.margins(x=0.12, y=0.12)
    low, high = axes.get_ylim()
    spare = _LEAST_SPAN * max(point.ms for point in points) - (high - low)
    if spare > 0:
        axes.set_ylim(low - spare / 2, high + spare / 2)
    axes.grid(visible=True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
