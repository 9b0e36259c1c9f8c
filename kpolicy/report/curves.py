"""How latencies are spread by policy: a curve each, told apart by dash, mark and label as well as by colour."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from kpolicy.report.html import ms, text
from kpolicy.report.runs import Run
from kpolicy.simulate import Spread
from kpolicy.simulate.percentiles import CURVE_PERCENTS

__all__ = ["DASHES", "LATENCIES", "MARKS", "cdfs", "legend", "range_of", "ticks"]

LATENCIES = (("ttft", "Time to first token"), ("gap", "Gap between tokens"), ("e2e", "Time to the last token"))
MARKS = ("\u25cf", "\u25a0", "\u25b2", "\u25c6", "\u25bc", "\u2716", "\u25cb", "\u25a1")
DASHES = ("", "8 4", "2 3", "9 3 2 3", "14 4", "5 5", "2 6", "12 3 2 3 2 3")
_WIDTH, _HEIGHT = 1000.0, 500.0


def legend(runs: Sequence[Run]) -> str:
    """Each run with its line and its mark."""
    items = []
    for i, run in enumerate(runs):
        items.append(
            f'<li><svg class="key" viewBox="0 0 44 12" aria-hidden="true"><path class="line c{i % 8}" '
            f'stroke-dasharray="{DASHES[i % 8]}" d="M0 6H44"/></svg><span class="mark c{i % 8}" aria-hidden="true">'
            f"{MARKS[i % 8]}</span> {text(run.name)}</li>"
        )
    return f'<ul class="legend">{"".join(items)}</ul>\n'


def cdfs(runs: Sequence[Run]) -> str:
    """The three charts, with the runs' legend."""
    charts = "".join(_chart(title, [getattr(run.result, name) for run in runs]) for name, title in LATENCIES)
    return f'{legend(runs)}<div class="charts">{charts}</div>\n'


def _chart(title: str, spreads: Sequence[Spread]) -> str:
    found = range_of(spreads)
    if found is None:
        return f"<figure><figcaption>{text(title)}</figcaption><p>No request has one.</p></figure>\n"
    low, high = found

    def across(us: float) -> float:
        return (math.log10(max(us, low)) - math.log10(low)) / (math.log10(high) - math.log10(low))

    lines = "".join(
        f'<path class="line c{i % 8}" stroke-dasharray="{DASHES[i % 8]}" d="{_path(spread, across)}"/>'
        for i, spread in enumerate(spreads)
        if spread.curve
    )
    marks = "".join(
        f'<span class="mark c{i % 8}" style="left:{100 * across(value):.2f}%;bottom:{percent}%">{MARKS[i % 8]}</span>'
        for i, spread in enumerate(spreads)
        if spread.curve
        for percent, value in ((50, spread.p50), (90, spread.p90), (99, spread.p99))
    )
    down = "".join(
        f'<span class="x" style="left:{100 * across(us):.2f}%">{_short(us)}</span>' for us in ticks(low, high)
    )
    up = "".join(f'<span class="y" style="bottom:{percent}%">{percent}%</span>' for percent in (0, 50, 90))
    rules = "".join(
        f'<path class="rule" d="M0 {_HEIGHT * (1 - percent / 100):.0f}H{_WIDTH:.0f}"/>' for percent in (50, 90, 99)
    )
    said = "; ".join(f"p50 {ms(each.p50)} ms, p90 {ms(each.p90)} ms, p99 {ms(each.p99)} ms" for each in spreads)
    return (
        f'<figure><figcaption>{text(title)}, ms (logarithmic)</figcaption><div class="plot">'
        f'<svg viewBox="0 0 {_WIDTH:.0f} {_HEIGHT:.0f}" preserveAspectRatio="none" role="img" '
        f'aria-label="{text(title)}, share of values by milliseconds: {text(said)}">{rules}{lines}</svg>'
        f"{marks}{down}{up}</div></figure>\n"
    )


def _path(spread: Spread, across: Callable[[float], float]) -> str:
    points = (
        f"{_WIDTH * across(us):.1f} {_HEIGHT * (1 - percent / 100):.1f}"
        for percent, us in zip(CURVE_PERCENTS, spread.curve, strict=True)
    )
    return "M" + "L".join(points)


def range_of(spreads: Sequence[Spread]) -> tuple[float, float] | None:
    """The least and the largest value above 0, a little apart; None without values."""
    values = [us for spread in spreads for us in spread.curve if us > 0]
    if not values:
        return None
    return min(values) / 1.05, max(values) * 1.05


def ticks(low: float, high: float) -> list[float]:
    """At most five round values between two, as many as there are of the same in each power of ten; else the ends."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        found = [step * 10.0**power for power in powers for step in steps if low <= step * 10.0**power <= high]
        if len(found) <= 5:
            break
    found = found[:: -(-len(found) // 5)] if found else found
    return found if len(found) > 1 else [low, high]


def _short(us: float) -> str:
    return f"{us / 1e3:,.3g}" if us < 1e6 else f"{us / 1e6:,.3g}k"
