"""What commands print: tables that keep their numbers whole at any width, and JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NoReturn, Protocol

import attrs
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kpolicy.engine import Engine
from kpolicy.explain import COLUMNS, Explanation
from kpolicy.kv_span import outside_in_words
from kpolicy.observe import ModeStats, padding_text
from kpolicy.policies import Downgrade
from kpolicy.reasons import Reason
from kpolicy.scheduling.traces import Trace
from kpolicy.trace_run import RunResult
from kpolicy.words import some

__all__ = [
    "console",
    "counted",
    "drop_output",
    "grid",
    "modes_table",
    "print_json",
    "reasons_table",
    "render_explanation",
    "render_run",
    "say",
    "show",
    "show_run",
    "told_after",
]

PIPED_WIDTH = 110
"""Columns where the output isn't a terminal and $COLUMNS isn't set."""
WAITED = 0.1
"""Share of the busy time that waiting for cores is told from"""
LEAST_WIDTH = 80
"""Narrower terminals wrap the lines themselves."""


def drop_output() -> None:
    """Let Python's own flush at exit succeed where ours failed."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def told_after(lines: Sequence[str]) -> Iterator[None]:
    """Say on standard error what failed once the result is printed, and also where its reader has enough of it."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # What the command returns is its exit code all the same.
        drop_output()
    finally:
        for line in lines:
            sys.stderr.write(f"kpolicy: {line}\n")


def print_json(value: object) -> None:
    """Print a value as indented JSON."""
    print(json.dumps(value, indent=2, allow_nan=False))


class _Console(Console):
    """Leaves a reader that has gone to who handles it for all output; Rich would end the command with code 1."""

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError


def console(*, stderr: bool = False) -> Console:
    """A console as wide as the terminal, or as $COLUMNS says; it honours $NO_COLOR.

    Text is as it is: a file may be called [bold].csv, and costs analytic-1:llama:H200, where Rich would draw a llama.
    """
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else PIPED_WIDTH
    made = _Console(stderr=stderr, width=width, markup=False, emoji=False)
    made.width = max(made.width, LEAST_WIDTH)
    return made


def grid(*names: str, numbers: Collection[str] = (), words: Collection[str] = ()) -> Table:
    """A table without lines. Columns fold to fit, save those of numbers, to the right, and of single words."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for i, name in enumerate(names):
        if name in numbers or name in words:
            table.add_column(name, justify="right" if name in numbers else "left", no_wrap=True)
        else:
            table.add_column(name, overflow="fold", min_width=8 if i else 16)
    return table


def show(table: Table, made: Console) -> None:
    """Print a table, without spaces at the ends of its lines."""
    for column in table.columns:
        widest = max(cell_len(line) for cell in (column.header, *column.cells) for line in _lines(cell))
        # Rich would cut what doesn't fit.
        column.min_width = widest if column.no_wrap else min(column.min_width or 0, widest)
    with made.capture() as captured:
        made.print(table, crop=False)
    made.file.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def _lines(cell: object) -> Sequence[str]:
    return (cell.plain if isinstance(cell, Text) else str(cell)).splitlines() or ("",)


def render_explanation(explanation: Explanation, downgrades: Iterable[Downgrade]) -> None:
    """Print an explanation: whole lines where it goes to a file or a pipe, folded to the width of a terminal."""
    if sys.stdout.isatty() or "COLUMNS" in os.environ:
        made = console()
        for line in explanation.head:
            say(made, line)
        made.print()
        table = grid(*COLUMNS, numbers=("step ms", "gap ms"), words=("way", "bound"))
        for row in explanation.rows():
            table.add_row(*map(Text, row))
        show(table, made)
    else:
        print(explanation)
    for downgrade in downgrades:
        print(f"downgraded at start-up: {downgrade}")


def render_run(
    made: Console, trace: Trace, results: Sequence[RunResult], setting: Sequence[str], engines: Mapping[str, Engine]
) -> None:
    """Print what a run did: the trace, a line a policy, time by mode, every reason, and the graphs."""
    named = [
        each if each.repeat == 1 else attrs.evolve(each, policy=f"{each.policy} ({each.repeat})") for each in results
    ]
    show_run(made, trace, setting, (_summary(named), modes_table(named), reasons_table(named)))
    for result, shown in zip(results, named, strict=True):
        _notes(made, shown, engines[result.policy])


def show_run(made: Console, trace: Trace, setting: Sequence[str], tables: Sequence[Table]) -> None:
    """Print the trace, the setting, and the tables that have rows."""
    dropped = counted(trace.dropped) or "none"
    say(made, f"trace    {trace.source}")
    say(made, f"         {some(len(trace), 'request')} over {trace.span_s:,.0f} s; rows dropped: {dropped}")
    for i, part in enumerate(setting):
        say(made, f"{'         ' if i else 'setting  '}{part}")
    for table in tables:
        if table.row_count:
            made.print()
            show(table, made)
    made.print()


def say(made: Console, text: str, style: str = "") -> None:
    """Print a line of text as it is; the terminal folds it."""
    made.print(text, highlight=False, soft_wrap=True, style=style)


def _summary(results: Sequence[RunResult]) -> Table:
    ttft, gap = "TTFT ms\np50 / p99", "gap ms\np50 / p99"
    names = ("served", "steps", "busy s", ttft, gap, "padding")
    table = grid("policy", *names, numbers=names)
    for result in results:
        table.add_row(
            result.policy,
            f"{result.served:,}",
            f"{result.steps:,}",
            f"{result.step_us / 1e6:,.2f}",
            _pair(result.ttft_us),
            _pair(result.gap_us),
            padding_text(result.padding, result.tokens_computed),
        )
    return table


def _pair(us: tuple[float, float]) -> str:
    """The percentiles; a dash where there are no values."""
    return "-" if us == (0, 0) else f"{us[0] / 1e3:,.1f} / {us[1] / 1e3:,.1f}"


class Ran(Protocol):
    """What a run and a simulation both tell."""

    @property
    def policy(self) -> str: ...

    @property
    def modes(self) -> Mapping[str, ModeStats]: ...

    @property
    def reasons(self) -> Mapping[str, int]: ...

    @property
    def eager_halves(self) -> Mapping[str, int]: ...

    @property
    def step_us(self) -> float: ...


def modes_table(results: Sequence[Ran]) -> Table:
    """Steps, tokens, padding and time by policy and mode."""
    names = ("steps", "tokens", "padding", "time s", "of time")
    table = grid("policy", "mode", *names, numbers=names, words=("mode",))
    for result in results:
        for i, (mode, stats) in enumerate(result.modes.items()):
            share = stats.us / result.step_us if result.step_us else 0.0
            table.add_row(
                "" if i else result.policy, mode, f"{stats.steps:,}", f"{stats.tokens:,}", f"{stats.padding:,}",
                f"{stats.us / 1e6:,.2f}", f"{share:.1%}",
            )  # fmt: skip
    return table


def reasons_table(results: Sequence[Ran]) -> Table:
    """Steps by policy and reason, with the reason's sentence."""
    table = grid("policy", "reason", "steps", "what it means (docs/reasons.md)", numbers=("steps",), words=("reason",))
    table.columns[0].max_width = 20
    for result in results:
        rows = [(reason, count, "") for reason, count in result.reasons.items()]
        rows += [(reason, count, "eager half of a split: ") for reason, count in result.eager_halves.items()]
        for i, (reason, count, what) in enumerate(rows):
            table.add_row("" if i else result.policy, reason, f"{count:,}", what + _text(reason))
    return table


def _text(reason: str) -> str:
    return next((known.text for known in Reason if known.value == reason), "")


def _notes(made: Console, result: RunResult, engine: Engine) -> None:
    """What has no column: whether outputs were right, graphs, what failed, what was taken for granted."""
    if result.wrong:
        compared = some(result.checked, "request")
        say(made, f"{result.policy}: {len(result.wrong):,} of {compared} got WRONG tokens", "bold red")
    text = f"{result.policy}: "
    if result.checked and not result.wrong:
        text += f"every token right in {some(result.checked, 'request')} compared with the reference; "
    if result.verified:
        text += _verified(result) + "; "
    simulated = engine.executor is None or engine.executor.name == "simulated"
    text += _graphs(result)
    text += " (simulated)" if simulated else f", {result.graph_bytes / 2**20:,.1f} MiB"
    text += f", {result.graphs_used} used, {result.graphs - result.graphs_used} never"
    if result.outside_us and result.steps:
        spent = result.outside_us / (result.outside_us + result.step_us)
        text += f"; outside the executor {result.outside_us / result.steps:,.0f} us a step, {spent:.1%} of the time"
    if (result.core_wait_s or 0) * 1e6 > WAITED * result.step_us:
        text += f"; its threads waited {result.core_wait_s:,.1f} s for a core, so that its times are other work's too"
    if result.not_captured:
        text += "; not captured: " + counted(result.not_captured)
    if result.replay_failures:
        text += f"; replays that failed before launch, their steps run in a lesser mode: {result.replay_failures:,}"
    if result.preemptions:
        text += f"; {some(result.preemptions, 'preemption')}"
    if result.refused:
        text += f"; requests handed back: {counted(result.refused)}"
    if result.outside is not None:
        told = outside_in_words(result.steps, result.outside_sizes or 0, result.outside_contexts)
        text += "".join(f"; {each}" for each in told)
    if result.basis:
        text += f"; {result.basis.text}"
    say(made, text)
    for downgrade in engine.downgrades:
        say(made, f"  downgraded at start-up: {downgrade}")
    if result.interrupted:
        say(made, f"  ended early: {result.interrupted}")


def _graphs(result: RunResult) -> str:
    """How many graphs there were, and what capturing took in this turn."""
    graphs = some(result.graphs, "graph")
    if result.graphs_captured == result.graphs:
        return f"{graphs} captured in {result.capture_s:.1f} s"
    if result.graphs_captured:
        return f"{graphs}, {result.graphs_captured} of them captured now in {result.capture_s:.1f} s"
    failed = f", {result.capture_s:.1f} s of captures that failed" if result.capture_s else ""
    return f"{graphs} of an earlier turn, none captured now{failed}"


def _verified(result: RunResult) -> str:
    """What was compared with EAGER, by mode."""
    checks = ", ".join(f"{mode} {each.checks:,}" for mode, each in result.verified.items())
    failed = ", ".join(f"{mode} {each.failures:,}" for mode, each in result.verified.items() if each.failures)
    text = f"steps whose logits and written KV were compared with EAGER's: {checks}; "
    return text + (f"DIFFERENT: {failed}" if failed else "every bit equal")


def counted(counts: Mapping[str, int]) -> str:
    """``3 this, 2 that``."""
    return ", ".join(f"{count:,} {reason}" for reason, count in counts.items())
