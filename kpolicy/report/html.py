"""Small pieces of HTML: escaped text, numbers as people read them, tables that can be sorted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

__all__ = ["HINT", "bar", "cell", "count", "ms", "percent", "seconds", "table", "text"]


def text(value: object) -> str:
    """Text that means nothing to a browser. What isn't a character, as in a file's name that isn't UTF-8, is ``?``."""
    return escape(str(value).encode("utf-8", "replace").decode())


def count(value: float) -> str:
    """A count with its thousands apart."""
    return f"{value:,.0f}"


def ms(us: float) -> str:
    """Microseconds as milliseconds, three digits of them or more."""
    value = us / 1e3
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def seconds(us: float) -> str:
    """Microseconds as seconds."""
    value = us / 1e6
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def percent(share: float) -> str:
    return f"{share:.1%}"


def cell(shown: str, key: float | None = None, *, head: bool = False) -> str:
    """A table's cell: HTML to show, and the number that it is sorted by; without one by its text."""
    # JavaScript calls what is infinite by its whole name.
    by = "" if key is None else f' data-key="{"Infinity" if key == math.inf else f"{key:.9g}"}"'
    return f'<th scope="row"{by}>{shown}</th>' if head else f"<td{by}>{shown}</td>"


HINT = '<span class="hint">\u25c0 \u25b6 scroll sideways for all columns</span>'
"""In the caption above a box that may scroll; the style hides it where all columns fit."""


def table(caption: str, names: Sequence[str], rows: Iterable[Sequence[str]], *, sortable: bool = True) -> str:
    """A table of `cell`s that scrolls in its own box.

    Args:
        caption: what it shows.
        names: the columns, as text.
        rows: the cells of each row.
        sortable: whether a column's head sorts by it.
    """
    heads = "".join(
        f'<th scope="col"><button type="button">{text(name)}</button></th>'
        if sortable
        else f'<th scope="col">{text(name)}</th>'
        for name in names
    )
    body = "".join(f"<tr>{''.join(row)}</tr>\n" for row in rows)
    kind = ' class="sortable"' if sortable else ""
    return (
        f'<p class="caption">{text(caption)}{HINT}</p>\n'
        f'<div class="scroll" tabindex="0" role="region" aria-label="{text(caption)}"><table{kind}>\n'
        f"<thead><tr>{heads}</tr></thead>\n<tbody>\n{body}</tbody></table></div>\n"
    )


def bar(share: float, kind: str, label: str) -> str:
    """A bar of that share of its box, of a class that gives its pattern, with its label beside it."""
    width = f"{100 * min(max(share, 0.0), 1.0):.2f}"
    fill = f'<span class="fill {kind}" style="width:{width}%"></span>' if share > 0 else ""
    return f'<span class="barred"><span class="bar">{fill}</span><span>{text(label)}</span></span>'
