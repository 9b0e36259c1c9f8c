"""Modes over time: what the page's script zooms into, and a picture for where no script runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kpolicy.report.html import seconds, text
from kpolicy.report.runs import Run
from kpolicy.report.steps import MODES, Steps

__all__ = ["data", "overview", "shares"]

_COLUMNS = 240


def data(runs: Sequence[Run]) -> dict[str, Any]:
    """Plain values: times in microseconds, busy time in thousandths of a bin."""
    reasons = sorted({note.reason for run in runs for note in run.steps.slowest})
    place = {reason: i for i, reason in enumerate(reasons)}
    return {
        "modes": [mode.value for mode in MODES],
        "reasons": reasons,
        "end": round(max((run.steps.end_us for run in runs), default=0.0)),
        "runs": [
            {
                "name": run.name.encode("utf-8", "replace").decode(),
                "bin": run.steps.bin_us,
                "busy": [[round(1000 * us / run.steps.bin_us) for us in each] for each in run.steps.busy_us],
                "running": run.steps.running,
                "waiting": run.steps.waiting,
                "steps": [
                    [
                        round(note.start_us), round(note.us), note.mode, note.decodes, note.prefill_tokens,
                        note.padding, place[note.reason],
                    ]
                    for note in run.steps.slowest
                ],
            }
            for run in runs
        ],
    }  # fmt: skip


def shares(steps: Steps, columns: int, end_us: float) -> list[list[float]]:
    """Busy shares of equal parts of the time to `end_us`, by mode `[num_modes, columns]`."""
    width = end_us / columns
    found = [[0.0] * columns for _ in MODES]
    if not width:
        return found
    for into, busy in zip(found, steps.busy_us, strict=True):
        for i, us in enumerate(busy):
            if us:
                # A bin's time is spread evenly over the columns it lies in.
                start, stop = i * steps.bin_us / width, min((i + 1) * steps.bin_us, steps.end_us) / width
                for column in range(int(start), min(int(stop), columns - 1) + 1):
                    lies = min(stop, column + 1) - max(start, column)
                    into[column] += us * lies / (stop - start) / width
    return [[min(share, 1.0) for share in each] for each in found]


def overview(runs: Sequence[Run], number: int) -> str:
    """The place of a trace's timeline, with the whole run drawn in it."""
    end_us = max((run.steps.end_us for run in runs), default=0.0)
    lanes = "".join(_drawn(run, end_us) for run in runs)
    return f'<div class="timeline" data-number="{number}">{lanes}<p>0 to {seconds(end_us)} s</p></div>\n'


def _drawn(run: Run, end_us: float) -> str:
    return (
        f'<p class="name">{text(run.name)}</p><svg class="lane" viewBox="0 0 {_COLUMNS} 100" '
        f'preserveAspectRatio="none" role="img" aria-label="{text(run.name)}, share of time by mode">'
        f"{_lane(shares(run.steps, _COLUMNS, end_us))}</svg>"
    )


def _lane(found: Sequence[Sequence[float]]) -> str:
    below, paths = [0.0] * _COLUMNS, []
    for mode, each in zip(MODES, found, strict=True):
        parts = [
            f"M{i} {100 - 100 * low:.1f}h1v{-100 * share:.1f}h-1z"
            for i, (low, share) in enumerate(zip(below, each, strict=True))
            if share > 0.0005
        ]
        below = [min(low + share, 1.0) for low, share in zip(below, each, strict=True)]
        if parts:
            paths.append(f'<path class="f-{mode.value}" d="{"".join(parts)}"/>')
    return "".join(paths)
