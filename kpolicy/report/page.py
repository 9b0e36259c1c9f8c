"""The page: one HTML file with its style, script and data in it, which asks the network for nothing."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from kpolicy import __version__
from kpolicy.report import sections, timeline
from kpolicy.report.curves import cdfs
from kpolicy.report.gather import Report, TraceReport
from kpolicy.report.html import text
from kpolicy.report.modemap import MUCH_WORSE
from kpolicy.settings import Settings
from kpolicy.words import some

__all__ = ["page"]

# Nothing may be asked of any network, whatever a trace is called.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def page(report: Report) -> str:
    """The report as an HTML page. The same report gives the same text."""
    own = files("kpolicy.report")
    style, script = (own.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    values = [timeline.data(each.runs) for each in report.traces]
    body = "".join(_trace(each, i, report) for i, each in enumerate(report.traces))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<title>kpolicy: {text(_titles(report))}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        f"<header><h1>Graph modes and capture sizes</h1>\n{_contents(report)}</header>\n<main>\n{body}"
        f'{_setting(report)}</main>\n<script type="application/json" id="data">{_json(values)}</script>\n'
        f"<script>\n{script}</script>\n</body>\n</html>\n"
    )


def _titles(report: Report) -> str:
    return "; ".join(each.trace.source for each in report.traces)


def _contents(report: Report) -> str:
    if len(report.traces) == 1 and not report.failed:
        return ""
    items = "".join(
        f'<li><a href="#trace-{i}">{text(each.trace.source)}</a>: {text(each.advice.sentence)}</li>'
        for i, each in enumerate(report.traces)
    )
    items += "".join(f'<li class="warning">{text(each.error)}</li>' for _, each in report.failed)
    return f"<nav><ul>{items}</ul></nav>\n"


def _trace(made: TraceReport, number: int, report: Report) -> str:
    trace, settings = made.trace, report.server.settings
    dropped = ", ".join(f"{many:,} {name}" for name, many in trace.dropped.items()) or "none"
    requests = some(len(trace), "request")
    parts = [
        ("first", "What to do first", sections.advice(made.advice)),
        ("compare", "Policies", sections.comparison(made.runs, made.advice.best)),
        ("latency", "Latency", "<p>Marks are at 50, 90 and 99%.</p>\n" + cdfs(made.runs)),
        ("modes", "Time by mode", sections.modes(made.runs)),
        ("timeline", "Timeline", _timeline(made, number)),
        ("map", "Mode map", _map(made, settings)),
        ("padding", "Padding by size", sections.padding(made.plans, made.runs)),
        ("plan", "Capture sizes", _plans(made)),
        ("reasons", "Reasons", sections.reasons(made.runs)),
    ]
    body = "".join(
        f'<section id="{name}-{number}" class="{name}">\n<h3>{title}</h3>\n{html}</section>\n'
        for name, title, html in parts
    )
    return (
        f'<article id="trace-{number}">\n<h2>{text(trace.source)}</h2>\n<p>{requests} over '
        f"{trace.span_s:,.0f} s; rows dropped: {text(dropped)}.</p>\n{body}</article>\n"
    )


def _timeline(made: TraceReport, number: int) -> str:
    return (
        "<p>Share of the time in each mode; what is blank is idle. Under it the requests that run (line) and wait "
        "(dashes), the most in each moment. The slowest 1,500 steps of each run are kept one by one.</p>\n"
        + sections.mode_key()
        + timeline.overview(made.runs, number)
    )


def _map(made: TraceReport, settings: Settings) -> str:
    if not made.maps:
        return "<p>Not drawn: interrupted.</p>\n"
    said = (
        "Each batch has decode rows of the trace's average context and, beside them, one prompt without context. "
        f"A + marks a batch that takes {MUCH_WORSE:.0%} or more over the cheapest way."
    )
    if settings.num_speculative_tokens:
        said += f" A decode row verifies {some(settings.num_speculative_tokens, 'draft')}."
    return f"<p>{said}</p>\n{sections.maps(made.maps)}"


def _plans(made: TraceReport) -> str:
    if not made.plans and made.interrupted:
        return "<p>Nothing was planned: interrupted.</p>\n"
    failed = [why for what, why in made.failed if what.startswith("plan for")]
    if not made.plans and failed:
        return f"<p>Nothing was planned: {text(failed[0])}</p>\n"
    if not made.plans:
        return "<p>Nothing was planned: no policy here captures graphs for one rank.</p>\n"
    return "".join(sections.plan(each) for each in made.plans)


def _setting(report: Report) -> str:
    lines = [*report.setting, *report.notes, f"costs: {report.costs.version}", f"kpolicy {__version__}"]
    items = "".join(f"<li>{text(line)}</li>" for line in lines)
    return f'<section id="setting">\n<h2>Setting</h2>\n<ul>{items}</ul>\n</section>\n'


def _json(values: Any) -> str:
    """JSON that no browser takes for markup."""
    return json.dumps(values, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
