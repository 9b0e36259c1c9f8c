"""What `kpolicy simulate` prints: latencies, what bounds the steps, time by mode, reasons, and the graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from kpolicy.cli.render import counted, grid, modes_table, reasons_table, say, show_run
from kpolicy.observe import padding_text
from kpolicy.scheduling.traces import Trace
from kpolicy.simulate import SimResult, Spread
from kpolicy.simulate.result import Goodput
from kpolicy.simulate.starts import Starts
from kpolicy.words import some

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["COLD", "render_simulation"]

COLD = "(--warm: graphs are there when it comes)"
"""What is said where requests waited for captures"""


def render_simulation(
    made: Console, trace: Trace, simulated: Sequence[tuple[SimResult, Starts | None]], setting: Sequence[str],
    notes: Sequence[str],
) -> None:  # fmt: skip
    """Print what policies made of one trace, from several starts too where they were asked for."""
    results = [result for result, _ in simulated]
    several = [(result, starts) for result, starts in simulated if starts is not None]
    tables = [_summary(results), *([_starts(several)] if several else [])]
    tables += [_steps(results), modes_table(results), reasons_table(results)]
    show_run(made, trace, [*setting, *notes], tables)
    for result in results:
        _notes(made, result)


def _summary(results: Sequence[SimResult]) -> Table:
    ttft, gap, e2e = (f"{name}\np50 / p90 / p99" for name in ("TTFT ms", "gap ms", "whole s"))
    names = ("served", ttft, gap, e2e, "good /s")
    table = grid("policy", *names, numbers=names)
    for result in results:
        table.add_row(
            result.policy, f"{result.served:,}", _three(result.ttft, 1e3), _three(result.gap, 1e3),
            _three(result.e2e, 1e6), _good(result.goodput),
        )  # fmt: skip
    return table


def _starts(several: Sequence[tuple[SimResult, Starts]]) -> Table:
    """The least, the middle and the most of latencies over starts; a dash where there are no values."""
    count = len(several[0][1].seeds)
    names = [f"{name}\nleast / middle / most" for name in ("TTFT p50 ms", "TTFT p99 ms", "gap p50 ms", "gap p99 ms")]
    table = grid(f"from {some(count, 'start')}", *names, numbers=tuple(names))
    for result, starts in several:
        ranges = [
            (each[percent], spread.count)
            for each, spread in ((starts.ttft, result.ttft), (starts.gap, result.gap))
            for percent in ("p50", "p99")
        ]
        table.add_row(
            result.policy,
            *(
                " / ".join(f"{us / 1e3:,.1f}" for us in attrs.astuple(each)) if values else "-"
                for each, values in ranges
            ),
        )
    return table


def _three(spread: Spread, unit: float) -> str:
    """The percentiles; a dash where there are no values."""
    if not spread.count:
        return "-"
    return " / ".join(f"{value / unit:,.1f}" for value in (spread.p50, spread.p90, spread.p99))


def _good(goodput: Goodput) -> str:
    """Good requests a second and their share; a dash where no service level was given."""
    if goodput.per_s is None or goodput.share is None:
        return "-"
    return f"{goodput.per_s:,.2f} ({goodput.share:.1%})"


def _steps(results: Sequence[SimResult]) -> Table:
    names = ("steps", "busy s", "padding", "device-bound", "host-bound", "start s", "graphs", "used")
    table = grid("policy", *names, numbers=names)
    for result in results:
        host = result.bound["host"]
        share = host.us / result.step_us if result.step_us else 0.0
        table.add_row(
            result.policy, f"{result.steps:,}", f"{result.step_us / 1e6:,.2f}",
            padding_text(result.padding, result.tokens_computed),
            f"{1 - share:.1%}" if result.steps else "-", f"{share:.1%}" if result.steps else "-",
            f"{result.started_after_s:,.1f}", f"{result.graphs:,}", f"{result.graphs_used:,}",
        )  # fmt: skip
    return table


def _notes(made: Console, result: SimResult) -> None:
    """What has no column."""
    text = (
        f"{result.policy}: {some(result.graphs, 'graph')} captured in {result.capture_s:.1f} s, "
        f"{result.graph_bytes / 2**20:,.1f} MiB, which leave {result.kv_tokens:,} KV tokens"
    )
    if result.started_after_s:
        text += f"; the first request waited for that, and others behind it {COLD}"
    if result.not_captured:
        text += "; not captured: " + counted(result.not_captured)
    text += "".join(f"; {each}" for each in result.extrapolated)
    if result.delays:
        text += f"; {result.delays}"
    if result.preemptions:
        text += f"; {some(result.preemptions, 'preemption')}"
    if result.reused_tokens:
        text += f"; {result.reused_tokens / result.prompt_tokens:.1%} of the prompt tokens were in the prefix cache"
    if result.drafted:
        text += f"; {result.accepted / result.drafted:.1%} of {some(result.drafted, 'draft')} accepted"
    if result.refused:
        text += f"; requests handed back: {counted(result.refused)}"
    if result.gap.relative_error:
        text += f"; percentiles of gaps are within {result.gap.relative_error:.1%}"
    if result.basis:
        text += f"; {result.basis.text}"
    say(made, text)
    for downgrade in result.downgrades:
        say(made, f"  downgraded at start-up: {downgrade}")
    if result.interrupted:
        say(made, f"  ended early: {result.interrupted}")
